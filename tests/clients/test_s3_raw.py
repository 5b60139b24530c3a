"""Goal: entries that HTTP clients store unchecked are one with those of a bazel-remote on the same bucket, under `raw/`.
Method: objects as a bazel-remote leaves them, read over HTTP; entries stored over HTTP, looked at in the store; a kill, a
sick store, a change in between."""

import http.client

import pytest

from content import sha256, unique
from reapi import Client, digest, digest_of
from test_s3_owed import is_idle, series
from wait import until

KIB, MIB = 1 << 10, 1 << 20
OPEN = {"http_address": "127.0.0.1:0", "disable_http_ac_validation": "true", "ack": "flushed"}


def raw_key(hash: str) -> str:
    return f"raw/{hash[:2]}/{hash}"


def ask(server, method: str, hash: str, body: bytes | None = None) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection(server.http_address, timeout=60)
    try:
        connection.request(method, f"/ac/{hash}", body)
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.getheader("content-length")
    finally:
        connection.close()


@pytest.mark.parametrize("size", [0, 9, 256 * KIB, 256 * KIB + 1, 5 * MIB])
def test_both_ways(store, fresh, size):
    """What a bazel-remote left is read, once; what is stored here stands there as it does, and another server reads it."""
    theirs, ours, older = unique(size), unique(size), unique(77)
    left, stored = sha256(b"left by %d" % size), sha256(b"stored by %d" % size)
    store.objects[raw_key(left)] = theirs.bytes()
    server = fresh(**OPEN, **store.flags())
    for _ in range(2):
        assert ask(server, "GET", left)[:2] == (200, theirs.bytes())
    # The bytes have no name before they are all there: those of a long one are read for it first.
    assert store.count("GET", raw_key(left)) == (1 if size <= 256 * KIB else 2)
    assert ask(server, "HEAD", left) == (200, b"", str(size))
    for content in [older, ours]:
        assert ask(server, "PUT", stored, content.bytes())[0] == 200
        until(lambda: store.objects.get(raw_key(stored)) == content.bytes(), "the upload")
    until(lambda: is_idle(server), "the end of the uploads")
    assert set(store.objects) == {raw_key(left), raw_key(stored)}
    with Client(server.address) as client:
        # Its bytes are nobody else's.
        assert size == 0 or client.missing(digest(ours))
    other = fresh(**OPEN, **store.flags())
    assert ask(other, "HEAD", stored) == (200, b"", str(size))
    assert ask(other, "GET", stored)[:2] == (200, ours.bytes())


def test_absent_and_too_large(store, fresh):
    server = fresh(max_proxy_blob_size=MIB, **OPEN, **store.flags())
    absent, large = sha256(b"absent"), sha256(b"large")
    store.objects[raw_key(large)] = unique(MIB + 1).bytes()
    for hash in [absent, large]:
        assert ask(server, "GET", hash)[0] == 404
        assert store.count("GET", raw_key(hash)) == 1
    assert series(server, "failures_total") == 0


@pytest.mark.parametrize("fault", ["reset", "short", "hang_up", 500, 403, 429])
def test_a_fault_is_a_miss(store, fresh, fault):
    small, large = unique(2 * KIB), unique(3 * MIB)
    server = fresh(**OPEN, **store.flags())
    for content in [small, large]:
        store.objects[raw_key(content.hash)] = content.bytes()
    store.fault = fault
    for content in [small, large]:
        assert ask(server, "GET", content.hash)[0] == 404
    store.heal()
    for content in [small, large]:
        assert ask(server, "GET", content.hash)[:2] == (200, content.bytes())


def test_an_object_that_changes_in_between(store, fresh):
    """Replaced after its hash was taken and before its bytes are: a miss, and never a mixture."""
    server = fresh(**OPEN, **store.flags())
    first, second, hash = unique(2 * MIB), unique(2 * MIB), sha256(b"changes")
    store.objects[raw_key(hash)] = first.bytes()

    def replace(request) -> None:
        if store.count("GET", raw_key(hash)) == 2:
            store.objects[raw_key(hash)] = second.bytes()

    store.gate = replace
    assert ask(server, "GET", hash)[0] == 404
    assert ask(server, "GET", hash)[:2] == (200, second.bytes())


@pytest.mark.parametrize("size", [300, 2 * MIB])
def test_owed_entries_survive_a_kill(store, fresh, size):
    server = fresh(**OPEN, **store.flags())
    contents = [unique(size + number) for number in range(6)]
    store.fault, store.methods = "silent", ("PUT",)
    for content in contents:
        assert ask(server, "PUT", content.hash, content.bytes())[0] == 200
    server.kill()
    store.heal()
    server.start()
    for content in contents:
        until(lambda: store.objects.get(raw_key(content.hash)) == content.bytes(), "an owed entry", timeout_s=60)
    until(lambda: is_idle(server), "the end of the uploads")


def test_a_purge_takes_the_object(store, fresh):
    server = fresh(allow_unauthenticated_purges="true", **OPEN, **store.flags())
    content = unique(900)
    assert ask(server, "PUT", content.hash, content.bytes())[0] == 200
    until(lambda: raw_key(content.hash) in store.objects, "the upload")
    assert ask(server, "DELETE", content.hash)[0] == 200
    assert not store.objects
    assert ask(server, "GET", content.hash)[0] == 404
