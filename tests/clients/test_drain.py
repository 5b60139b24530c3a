"""Goal: a signal ends the server cleanly: what is in flight is finished, what is new is refused, and it does end.
Method: calls are held open while signals are sent; exit codes and times are taken."""

import queue
import signal
import time

import grpc
import pytest

import peer
from bucket import blob_key
from content import unique
from peer import Peer
from reapi import BYTE_STREAM, CAPABILITIES, Client, blob_name, message, upload_name, write_requests
from streams import check_read
from test_metrics import scrape
from wait import until

MIB = 1 << 20


def held_upload(client, content, pieces: int):
    """An upload that has sent `pieces` MiB and waits for the test. Returns its queue and its future."""
    held: queue.Queue = queue.Queue()
    requests = list(write_requests(upload_name(content.hash, content.size), content.chunks()))
    for request in requests[:pieces]:
        held.put(request)
    encode = message("google.bytestream.WriteRequest").SerializeToString
    decode = message("google.bytestream.WriteResponse").FromString
    call = client.channel.stream_unary(f"{BYTE_STREAM}/Write", encode, decode)
    future = call.future(iter(held.get, None), timeout=60)
    with Client(client.address) as asker:
        until(lambda: asker.write_status(requests[0].resource_name).committed_size >= MIB, "the upload has begun")

    def finish():
        for request in requests[pieces:]:
            held.put(request)
        held.put(None)

    return finish, future


def refused(address: str) -> bool:
    with Client(address) as client:
        try:
            client.capabilities(timeout=1)
            return False
        except grpc.RpcError:
            return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_in_flight_is_finished(fresh, number):
    server = fresh(shutdown_timeout="60")
    content, read = unique(6 * MIB), unique(20 * MIB)
    with Client(server.address) as client:
        client.write(upload_name(read.hash, read.size), read.chunks())
        finish, upload = held_upload(client, content, 3)
        reading = client.read_call(blob_name(read.hash, read.size))
        got = next(reading).data
        server.signal(number)
        until(lambda: refused(server.address), "new connections are refused")
        assert server.process.poll() is None
        got += b"".join(reply.data for reply in reading)
        assert got == read.bytes()
        finish()
        assert upload.result(timeout=20).committed_size == content.size
    assert server.wait(20) == 0
    server.start()
    with Client(server.address) as client:
        check_read(client, blob_name(content.hash, content.size), content)
        check_read(client, blob_name(read.hash, read.size), read)


def test_goaway_comes_first(fresh):
    server = fresh()
    with Peer(server.port) as caller:
        caller.call(f"{BYTE_STREAM}/Write")
        assert caller.ping()
        server.signal(signal.SIGTERM)
        assert caller.pump(lambda: caller.goaways), "no GOAWAY"
        assert caller.goaways[0][0] == 0, "GOAWAY must say NO_ERROR"
        # The stream that is open keeps connection and process.
        assert not caller.pump(lambda: caller.closed, 2)
        assert server.process.poll() is None
    assert server.wait(20) == 0


def test_an_idle_connection_does_not_hold_it(fresh):
    server = fresh()
    with Peer(server.port) as idle:
        assert idle.unary(f"{CAPABILITIES}/GetCapabilities", b"").grpc_status == 0
        server.signal(signal.SIGTERM)
        # Less than a call may hold it.
        assert idle.pump(lambda: idle.closed, 20)
        assert server.wait(20) == 0


def test_a_silent_connection_does_not_hold_it(fresh):
    # Says its preface and never another word, also not to the PING that follows the GOAWAY.
    server = fresh()
    with peer.connect(server.port) as silent:
        silent.sendall(peer.PREFACE + peer.frame(peer.SETTINGS, 0, 0))
        assert silent.recv(1 << 16)
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0


def test_the_wait_is_bounded(fresh):
    server = fresh(shutdown_timeout="2")
    with Client(server.address) as client:
        _, upload = held_upload(client, unique(6 * MIB), 3)
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
        # The upload alone would go on for a minute.
        assert 1.5 < time.monotonic() - started < 20
        with pytest.raises(grpc.RpcError):
            upload.result(timeout=20)


def test_calls_and_uploads_share_the_wait(fresh, store):
    """A call that does not end and an upload that a store does not answer: both have the same time, and the upload is owed."""
    limit = 10
    server = fresh(shutdown_timeout=str(limit), cores="1", http_address="127.0.0.1:0", **store.flags())
    until(lambda: "the backend answers" in server.log, "the look at the store")
    store.fault, store.methods = "silent", ("PUT",)
    content = unique(3000)
    with Client(server.address) as client:
        client.write(upload_name(content.hash, content.size), content.chunks())
        until(lambda: store.count("PUT") == 1, "the upload runs")
        held_upload(client, unique(6 * MIB), 3)
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait(40) == 0
        assert limit - 0.5 < time.monotonic() - started < 2 * limit - 1
    assert "uploads are left to the next start" in server.log
    store.heal()
    server.start()
    until(lambda: blob_key(content.hash) in store.objects, "the upload")


def test_the_last_write_is_uploaded(fresh, store):
    """The core that owns the store has no calls any more when a write on another core ends: that is still uploaded."""
    server = fresh(cores="2", http_address="127.0.0.1:0", **store.flags())
    content = unique(6 * MIB)
    # The first core owns the only store, and the first connections may be its as well.
    clients = []
    while not clients or scrape(server)['bazel_remote_connections{core="1",protocol="grpc"}'] == 0:
        assert len(clients) < 8, "no connection went to the second core"
        clients.append(Client(server.address))
        clients[-1].capabilities()
    *others, client = clients
    for other in others:
        other.channel.close()
    with client:
        finish, upload = held_upload(client, content, 3)
        server.signal(signal.SIGTERM)
        until(lambda: refused(server.address), "draining")
        finish()
        assert upload.result(timeout=20).committed_size == content.size
    assert server.wait(20) == 0
    assert blob_key(content.hash) in store.objects
    assert "left to the next start" not in server.log


@pytest.mark.parametrize("first, second", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGINT)])
def test_a_second_signal_ends_it_at_once(fresh, first, second):
    server = fresh()
    with Client(server.address) as client:
        held_upload(client, unique(6 * MIB), 3)
        server.signal(first)
        until(lambda: refused(server.address), "draining")
        server.signal(second)
        # Less than the upload may hold it.
        server.wait(20)


def test_a_signal_during_load(fresh):
    # 32 small uploads at a time until the server says no: each that was answered OK is there afterwards.
    server = fresh(ack="flushed")
    acknowledged = []
    with Client(server.address) as client:
        encode = message("google.bytestream.WriteRequest").SerializeToString
        decode = message("google.bytestream.WriteResponse").FromString
        call = client.channel.stream_unary(f"{BYTE_STREAM}/Write", encode, decode)
        for wave in range(200):
            contents = [unique(3000) for _ in range(32)]
            futures = []
            for content in contents:
                requests = write_requests(upload_name(content.hash, content.size), content.chunks())
                futures.append(call.future(requests, timeout=10))
            if wave == 20:
                server.signal(signal.SIGTERM)
            failures = 0
            for content, future in zip(contents, futures):
                if future.exception(timeout=20) is None:
                    acknowledged.append(content)
                else:
                    failures += 1
            if failures:
                break
    assert server.wait(20) == 0
    server.start()
    with Client(server.address) as client:
        assert client.find_missing([message("Digest")(hash=each.hash, size_bytes=each.size) for each in acknowledged]) == []
    assert len(acknowledged) >= 20 * 32
