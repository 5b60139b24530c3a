"""Blob contents that tests can make again from a seed, at any offset, without holding them."""

import functools
import hashlib
import random

EMPTY_HASH = hashlib.sha256(b"").hexdigest()
_BLOCK = 1 << 20


@functools.lru_cache(maxsize=8)
def _block(seed: int) -> bytes:
    """1 MiB: runs of random bytes and of text, so that it shrinks to about a half."""
    source = random.Random(seed)
    pieces = []
    for number in range(_BLOCK // 4096):
        pieces.append(source.randbytes(2048))
        pieces.append((b"%016x" % (seed * 65537 + number)) * 128)
    return b"".join(pieces)


class Content:
    """`size` bytes that depend on `seed`; every MiB of them differs."""

    def __init__(self, size: int, seed: int = 1):
        self.size = size
        self.seed = seed

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length), cut at the end."""
        end = min(offset + length, self.size)
        pieces = []
        while offset < end:
            number, at = divmod(offset, _BLOCK)
            take = min(end - offset, _BLOCK - at)
            if at == 0 and take >= 16:
                pieces.append(self._mark(number))
                pieces.append(_block(self.seed)[16:take])
            else:
                pieces.append((self._mark(number) + _block(self.seed)[16:])[at : at + take])
            offset += take
        return b"".join(pieces)

    def _mark(self, number: int) -> bytes:
        return (number * 0x9E3779B97F4A7C15 + self.seed & (1 << 128) - 1).to_bytes(16, "little")

    def chunks(self, offset: int = 0, length: int = 1 << 20):
        while offset < self.size:
            piece = self.read(offset, length)
            yield piece
            offset += len(piece)

    def bytes(self) -> bytes:
        return self.read(0, self.size)

    @functools.cached_property
    def hash(self) -> str:
        state = hashlib.sha256()
        for piece in self.chunks():
            state.update(piece)
        return state.hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


_seeds = iter(range(1000, 1 << 30))


def unique(size: int) -> Content:
    """Content that no other test has. The same in every run, as long as the same tests run."""
    return Content(size, next(_seeds))
