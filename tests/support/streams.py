"""zstd streams of tests, and comparison of streamed answers with content that is made again."""

import zstandard

from content import Content


def zstd_pieces(pieces, level: int = 1):
    """One zstd frame over `pieces`, without content size, as a streaming client makes it."""
    packer = zstandard.ZstdCompressor(level=level).compressobj()
    for piece in pieces:
        packed = packer.compress(piece)
        if packed:
            yield packed
    yield packer.flush()


def unzstd(data: bytes) -> bytes:
    """Decodes all frames of `data`; fails on a cut or trailing bytes."""
    unpacker = zstandard.ZstdDecompressor().decompressobj(read_across_frames=False)
    out = []
    while data:
        out.append(unpacker.decompress(data))
        assert unpacker.eof, "the zstd stream is cut off"
        data = unpacker.unused_data
        unpacker = zstandard.ZstdDecompressor().decompressobj()
    return b"".join(out)


class Checker:
    """Takes an answer piece by piece and holds it against `content` from `offset` on."""

    def __init__(self, content: Content, offset: int = 0, zstd: bool = False):
        self.content = content
        self.at = offset
        self.unpacker = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True) if zstd else None

    def feed(self, data: bytes) -> None:
        if self.unpacker:
            data = self.unpacker.decompress(data)
        assert data == self.content.read(self.at, len(data)), f"wrong bytes after offset {self.at}"
        self.at += len(data)

    def finish(self) -> None:
        assert self.at == self.content.size, f"the answer ends at {self.at} of {self.content.size}"


def check_read(client, name: str, content: Content, offset: int = 0, zstd: bool = False, **options) -> None:
    """Reads `name` from `offset` to the end and compares every byte."""
    checker = Checker(content, offset, zstd)
    for reply in client.read_call(name, offset, **options):
        checker.feed(reply.data)
    checker.finish()
