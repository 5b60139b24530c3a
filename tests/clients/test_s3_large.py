"""Goal: a gigabyte that only the store has is handed on as it comes and costs little memory.
Method: a store that makes it while it sends it, in a format of which every byte is content; the server's resident memory
while clients read."""

import hashlib
import threading
import time

import pytest

from bucket import blob_key
from content import unique
from reapi import Client, blob_name
from wait import until

MIB = 1 << 20
RSS_GROWTH_MAX = 32 * MIB


@pytest.fixture
def server(store, fresh):
    return fresh(max_size="3", storage_mode="uncompressed", **store.flags())


class Peak:
    """The most that the server held while the block ran, above what it held before."""

    def __init__(self, server):
        self.server, self.before, self.most = server, server.rss(), 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch)

    def _watch(self):
        while not self.stop.wait(0.05):
            self.most = max(self.most, self.server.rss())

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.stop.set()
        self.thread.join()

    @property
    def growth(self) -> int:
        return self.most - self.before


def put_object(store, size: int):
    content = unique(size)
    store.objects[blob_key(content.hash, raw=True)] = content
    return content


def read(server, content) -> tuple[float, str]:
    """When the first byte came, and the hash of all."""
    first, state = 0.0, hashlib.sha256()
    with Client(server.address, deadline_s=120) as client:
        for reply in client.read_call(blob_name(content.hash, content.size)):
            first = first or time.monotonic()
            state.update(reply.data)
    return first, state.hexdigest()


@pytest.mark.slow
def test_a_gigabyte(store, server):
    """The first byte is with the client before the last one has left the store, and little is held."""
    small, large = put_object(store, 16 * MIB), put_object(store, 1 << 30)
    assert read(server, small)[1] == small.hash
    with Peak(server) as peak:
        first, hash = read(server, large)
    assert hash == large.hash
    print(f"first byte after {(first - store.answered) * 1000:.1f} ms, resident memory + {peak.growth / MIB:.1f} MiB")
    until(lambda: store.sent_all > store.answered, "the store has sent all")
    assert first < store.sent_all
    assert peak.growth < RSS_GROWTH_MAX
    assert store.count("GET", blob_key(large.hash, raw=True)) == 1
