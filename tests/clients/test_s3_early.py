"""Goal: a store that answers an upload before it has read it is understood at once, and costs neither a task nor a descriptor,
nor the next request its time.
Method: the fault store, which answers at the head of a PUT and then reads nothing; bodies that sockets can hold, and such as
they cannot, whole and in parts."""

import pathlib

import pytest

from bucket import blob_key
from content import unique
from fault_s3 import FaultStore, self_signed
from reapi import Client, blob_name, upload_name
from test_s3_owed import series
from wait import until

MIB = 1 << 20
PARTS = {"s3.multipart_from": "32M"}


def begin(fresh, store, **flags):
    server = fresh(http_address="127.0.0.1:0", storage_mode="uncompressed", **store.flags() | flags)
    until(lambda: "the backend answers" in server.log, "the look at the store")
    return server


def outcome(server, status: str, reason: str = "") -> float:
    return series(server, "upload_outcomes_total", status=status, reason=reason)


def upload(client: Client, content) -> None:
    client.write(upload_name(content.hash, content.size), content.chunks())


def puts(store, content) -> int:
    return store.count("PUT", blob_key(content.hash, raw=True))


def held(server, store) -> set[int]:
    """Ports of the server's connections that the store has answered early and that the server still has open."""
    ports = set()
    for line in pathlib.Path(f"/proc/{server.process.pid}/net/tcp").read_text().splitlines()[1:]:
        local, remote, inode = (line.split()[at] for at in (1, 2, 9))
        # What no process has any more, and only the kernel finishes, has no inode.
        if int(remote.split(":")[1], 16) == store.port and inode != "0":
            ports.add(int(local.split(":")[1], 16))
    return ports & set(store.answered_early)


def reads_well(store, client: Client) -> None:
    """A cold read is none the worse: on a connection that the store does not read it would be a miss, ten seconds later."""
    content = unique(1000)
    store.objects[blob_key(content.hash, raw=True)] = content.bytes()
    assert client.read(blob_name(content.hash, content.size)) == content.bytes()


@pytest.mark.parametrize("then", ["stall", "close"])
@pytest.mark.parametrize("size, flags", [(4000, {}), (32 * MIB, {}), (40 * MIB, PARTS)])
def test_early_answers(store, fresh, size, flags, then):
    """Each is taken as if the body had been read: a denial and a refusal end the upload, a throttle puts it off."""
    server = begin(fresh, store, cores="1", **flags)
    with Client(server.address) as client:
        for uploads, status in enumerate([429, 503], start=1):
            throttles = series(server, "throttled_total")
            content, store.early = unique(size), (status, then)
            upload(client, content)
            until(lambda: series(server, "throttled_total") > throttles, "the throttle")
            store.early = None
            reads_well(store, client)
            until(lambda: outcome(server, "created") == uploads, "the upload")
            assert store.objects[blob_key(content.hash, raw=True)] == content.bytes()
        for status, reason in [(403, "access_denied"), (400, "s3_put_failed")]:
            content, store.early = unique(size), (status, then)
            upload(client, content)
            until(lambda: outcome(server, "error", reason) == 1, "the outcome")
            assert puts(store, content) == 1
            store.early = None
            reads_well(store, client)
        assert len(store.answered_early) >= 4 and store.parts == {} and series(server, "breaker_state") == 0
        until(lambda: not held(server, store), "the connections are closed")


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def any_store(request, tmp_path, monkeypatch):
    """A store that speaks TLS, and one that does not."""
    certificate = self_signed(tmp_path / "store.pem") if request.param else None
    if certificate:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    made = FaultStore(certificate)
    yield made
    made.close()


def test_an_answer_is_not_lost_with_its_connection(any_store, fresh):
    """The store resets the connection while it is written to: what it said before is heard each time."""
    store = any_store
    server = begin(fresh, store, cores="1")
    store.early = (403, "close")
    with Client(server.address) as client:
        for denied in range(1, 13):
            content = unique(16 * MIB)
            upload(client, content)
            until(lambda: outcome(server, "error", "access_denied") == denied, "the outcome")
            assert puts(store, content) == 1


def test_what_is_there_is_not_sent(any_store, fresh):
    """412 at the head of a large upload: it is done, and the connection is not used again."""
    store = any_store
    server = begin(fresh, store, cores="1")
    store.early = (412, "stall")
    with Client(server.address) as client:
        upload(client, unique(32 * MIB))
        until(lambda: outcome(server, "already_exists", "precondition_failed") == 1, "the outcome")
        reads_well(store, client)
        until(lambda: not held(server, store), "the connection is closed")


def test_a_success_too_early_is_none(store, fresh):
    """200 at the head of a large upload: it is made again, and done only when all of it was sent."""
    server = begin(fresh, store, cores="1")
    store.early = (200, "close")
    with Client(server.address) as client:
        content = unique(32 * MIB)
        upload(client, content)
        until(lambda: store.answered_early, "the answer")
        store.early = None
        until(lambda: outcome(server, "created") == 1, "the upload", timeout_s=60)
        assert store.objects.get(blob_key(content.hash, raw=True)) == content.bytes()


def test_half_a_refusal(store, fresh):
    """A status whose document never ends is believed after ten seconds, not only when the time of the upload is over."""
    server = begin(fresh, store, cores="1")
    store.early = (403, "silent")
    with Client(server.address) as client:
        content = unique(32 * MIB)
        upload(client, content)
        until(lambda: outcome(server, "error", "access_denied") == 1, "the outcome", timeout_s=40)
        assert puts(store, content) == 1
        until(lambda: not held(server, store), "the connection is closed")
