"""Goal: who names a blob by its hash alone gets it from the store as others do.
Method: GET and HEAD over HTTP on empty caches in front of a store of our own, in both formats of objects; then objects that
say something wrong of themselves, and faults."""

import concurrent.futures
import http.client
import struct
import threading
import time

import pytest

from bucket import blob_key, casblob
from content import unique
from reapi import Client, Code, blob_name, digest, fails, upload_name
from test_metrics import scrape
from wait import until

MIB = 1 << 20
MODES = ["zstd", "uncompressed"]
# What the rules bound, and what a loaded machine adds.
SLACK_S = 4


def begin(fresh, store, **flags):
    server = fresh(http_address="127.0.0.1:0", **store.flags() | flags)
    until(lambda: "the backend answers" in server.log, "the look at the store")
    return server


def put_object(store, size: int, mode: str = "zstd"):
    content = unique(size)
    is_raw = mode == "uncompressed"
    store.objects[blob_key(content.hash, is_raw)] = content.bytes() if is_raw else casblob(content.bytes())
    return content


def ask(server, content, method: str = "GET", **headers) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection(server.http_address, timeout=60)
    try:
        connection.request(method, f"/cas/{content.hash}", headers={k.replace("_", "-"): v for k, v in headers.items()})
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.headers["content-length"]
    finally:
        connection.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 3000, 256 * 1024, 3 * MIB + 1])
def test_get(store, fresh, mode, size):
    """One request to the store brings the blob into the cache, whose size is known then."""
    server = begin(fresh, store, storage_mode=mode)
    content = put_object(store, size, mode)
    assert ask(server, content) == (200, content.bytes(), str(size))
    key = blob_key(content.hash, mode == "uncompressed")
    assert store.count("GET", key) == 1 and store.count("HEAD", key) == 0
    store.objects.clear()
    store.refuse()
    assert ask(server, content) == (200, content.bytes(), str(size))
    assert ask(server, content, "HEAD") == (200, b"", str(size))
    if size > 10:
        assert ask(server, content, Range="bytes=3-8")[:2] == (206, content.read(3, 6))


@pytest.mark.parametrize("mode", MODES)
def test_head(store, fresh, mode):
    """It says the size and fetches next to nothing; what is absent is asked for once in a while."""
    server = begin(fresh, store, storage_mode=mode)
    there, absent = put_object(store, 3 * MIB, mode), unique(1000)
    assert ask(server, there, "HEAD") == (200, b"", str(there.size))
    assert all("range" in request.headers for request in store.since(0, "GET") if "cas" in request.path)
    for _ in range(3):
        assert ask(server, absent, "HEAD")[0] == 404
    key = blob_key(absent.hash, mode == "uncompressed")
    assert store.count("GET", key) + store.count("HEAD", key) == 1
    # Nothing came in.
    store.objects.clear()
    assert ask(server, there)[0] == 404


def test_many_at_a_time(store, fresh):
    """60 clients make one request, over HTTP and gRPC alike."""
    server = begin(fresh, store)
    content = put_object(store, 4 * MIB)
    go = threading.Event()
    store.gate = lambda request: go.wait(30) if request.method == "GET" else None
    with concurrent.futures.ThreadPoolExecutor(60) as pool:
        calls = [pool.submit(ask, server, content) for _ in range(60)]
        until(lambda: store.count("GET", blob_key(content.hash)), "the first request")
        go.set()
        assert all(call.result(60)[:2] == (200, content.bytes()) for call in calls)
    assert store.count("GET", blob_key(content.hash)) == 1


def test_objects_that_lie_about_their_size(store, fresh):
    """Too small, too large, nothing: never served as complete, and the store's object is known to be wrong."""
    server = begin(fresh, store)
    for lie in [2999, 3001, 1 << 40, 0]:
        content = unique(3000)
        honest = casblob(content.bytes())
        store.objects[blob_key(content.hash)] = honest[:8] + struct.pack("<q", lie) + honest[16:]
        try:
            status, body, _ = ask(server, content)
            assert status == 404, (lie, status, len(body))
        except http.client.IncompleteRead as broken:
            assert len(broken.partial) < lie
        assert ask(server, content, "HEAD")[0] == 404
        with Client(server.address) as client:
            assert client.missing(digest(content))
    wrong = [value for name, value in scrape(server).items() if name.startswith("bazel_remote_s3_wrong_objects_total")]
    assert sum(wrong) >= 4


@pytest.mark.parametrize("mode", MODES)
def test_readers_who_err_about_the_size(store, fresh, mode):
    """They miss, and hide the object from nobody who is right."""
    server = begin(fresh, store, storage_mode=mode)
    content = put_object(store, 3000, mode)
    with Client(server.address) as client:
        for size in [1, 2999, 3001, 3 * MIB]:
            with fails(Code.NOT_FOUND):
                client.read(blob_name(content.hash, size))
            assert client.missing({"hash": content.hash, "size_bytes": size})
        assert not client.missing(digest(content))
        assert ask(server, content, "HEAD") == (200, b"", "3000")
        assert client.read(blob_name(content.hash, 3000)) == content.bytes()


def test_an_object_that_lies_is_replaced(store, fresh):
    """Also while others err about its size."""
    server = begin(fresh, store)
    content = unique(3000)
    honest = casblob(content.bytes())
    store.objects[blob_key(content.hash)] = honest[:8] + struct.pack("<q", 3001) + honest[16:]
    with Client(server.address) as client:
        for size in [3000, 4000]:
            with fails(Code.NOT_FOUND):
                client.read(blob_name(content.hash, size))
        assert client.missing(digest(content))
        client.write(upload_name(content.hash, 3000), content.chunks())
        until(lambda: store.objects[blob_key(content.hash)][8:16] == struct.pack("<q", 3000), "the upload")


@pytest.mark.parametrize("fault", [500, 503, 403, "reset", "short", "hang_up"])
def test_faults_are_misses(store, fresh, fault):
    server = begin(fresh, store)
    content = put_object(store, 2000)
    store.fault = fault
    assert ask(server, content)[0] == 404
    store.heal()
    assert ask(server, content)[:2] == (200, content.bytes())


def test_a_silent_store(store, fresh):
    """GET waits as long as any read, HEAD as long as an existence check; with an open breaker neither waits."""
    server = begin(fresh, store)
    store.fault = "silent"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:

        def timed(method: str) -> float:
            begun = time.monotonic()
            assert ask(server, unique(100), method)[0] == 404
            return time.monotonic() - begun

        heads = [pool.submit(timed, "HEAD") for _ in range(2)]
        gets = [pool.submit(timed, "GET") for _ in range(4)]
        assert all(1.9 < call.result(60) < 2 + SLACK_S for call in heads)
        assert all(9.5 < call.result(60) < 10 + SLACK_S for call in gets)
        until(lambda: scrape(server).get('bazel_remote_s3_breaker_state{backend="default"}') == 2, "it opens")
        assert timed("GET") < SLACK_S and timed("HEAD") < 1.9


def test_a_blob_larger_than_allowed(store, fresh):
    server = begin(fresh, store, max_proxy_blob_size="1000")
    content = put_object(store, 1001)
    assert ask(server, content)[0] == 404 and ask(server, content, "HEAD")[0] == 404
    small = put_object(store, 1000)
    assert ask(server, small)[:2] == (200, small.bytes())
