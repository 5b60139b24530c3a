"""Writes a cache directory as bazel-remote leaves it: every kind of file, by the documented layout."""

import os
import pathlib
import struct

import zstandard

from content import sha256

MAGIC = 0x184D2A50
CHUNK_LEN = 1 << 20
IDENTITY, ZSTD = 0, 1


def casblob(data: bytes, size: int | None = None, kind: int = ZSTD) -> bytes:
    """The object of a blob: a header with a table of offsets, and independent chunks. Identity has one chunk."""
    pieces = [data[at : at + CHUNK_LEN] for at in range(0, len(data), CHUNK_LEN)] if kind == ZSTD else [data]
    if kind == ZSTD:
        pieces = [zstandard.ZstdCompressor(level=1, write_checksum=True).compress(piece) for piece in pieces]
    entries = len(pieces) + 1
    offsets = [29 + 8 * entries]
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    size = len(data) if size is None else size
    header = struct.pack("<IIqBIq", MAGIC, 21 + 8 * entries, size, kind, CHUNK_LEN, entries)
    assert len(header) == 29
    return header + struct.pack(f"<{entries}q", *offsets) + b"".join(pieces)


class Directory:
    """A bazel-remote directory. Every file has a later time of use than the one before."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        self.time = 1_700_000_000
        self.written = 0
        for kind in ("ac.v2", "cas.v2", "raw.v2"):
            for number in range(256):
                (root / kind / f"{number:02x}").mkdir(parents=True)

    def file(self, path: str, data: bytes) -> pathlib.Path:
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.time += 10
        os.utime(path, (self.time, self.time))
        return path

    def _random(self) -> str:
        self.written += 1
        return f"{self.written:09d}"

    def compressed(self, data: bytes, hash: str | None = None, object: bytes | None = None, size: int | None = None):
        """A blob of storage mode zstd; `object` takes the place of the right one."""
        hash, size = hash or sha256(data), len(data) if size is None else size
        object = casblob(data) if object is None else object
        return self.file(f"cas.v2/{hash[:2]}/{hash}-{size}-{self._random()}", object)

    def plain(self, data: bytes, hash: str | None = None) -> pathlib.Path:
        """A blob of storage mode uncompressed."""
        hash = hash or sha256(data)
        return self.file(f"cas.v2/{hash[:2]}/{hash}-{self._random()}.v1", data)

    def action(self, hash: str, data: bytes, kind: str = "ac") -> pathlib.Path:
        return self.file(f"{kind}.v2/{hash[:2]}/{hash}-{self._random()}", data)

    def raw(self, hash: str, data: bytes) -> pathlib.Path:
        return self.action(hash, data, kind="raw")
