"""Goal: as many writes as the operator allows are in flight; others wait a little and are then refused, in the way that
suits their client, while everything else goes on. Method: servers with one slot, held by an upload that stands still."""

import contextlib
import queue
import time

import grpc
import pytest

from content import Content, unique
from metrics import scrape
from reapi import Client, Code, blob_name, digest, digest_of, fails, upload_name, write_requests
from wait import until

MIB = 1 << 20


@contextlib.contextmanager
def held(client: Client, content: Content):
    """Half of an upload, which stands still while the body runs and is finished after it."""
    pieces: queue.Queue = queue.Queue()
    requests = list(write_requests(upload_name(content.hash, content.size), content.chunks(length=MIB // 4)))
    for request in requests[: len(requests) // 2]:
        pieces.put(request)
    call = client.start_write(iter(pieces.get, None))
    name = requests[0].resource_name
    until(lambda: client.write_status(name).committed_size > 0, "the upload has its slot")
    yield
    for request in requests[len(requests) // 2 :]:
        pieces.put(request)
    pieces.put(None)
    assert call.result().committed_size == content.size


def names(log: str) -> list[str]:
    return [line.split(" SHED ", 1)[1] for line in log.splitlines() if "GRPC BYTESTREAM WRITE SHED " in line]


def test_only_new_blobs_are_refused(fresh):
    server = fresh(max_inflight_cas_writes=1, write_queue_wait="0s", http_address="127.0.0.1:0")
    with Client(server.address) as client:
        here = unique(5000)
        client.write(upload_name(here.hash, here.size), here.chunks())
        large, small = unique(2 * MIB), unique(100)
        with held(client, unique(4 * MIB)):
            for content in (small, large):
                with fails(Code.FAILED_PRECONDITION) as refused:
                    client.write(upload_name(content.hash, content.size), content.chunks(length=MIB // 4))
                assert "--max_inflight_cas_writes" in refused[0].details()
                assert client.missing(digest(content))
                assert any(f"blobs/{content.hash}/{content.size}" in name for name in names(server.log))
            assert client.write(upload_name(here.hash, here.size), here.chunks()) == here.size
            assert client.read(blob_name(here.hash, here.size)) == here.bytes()
            statuses = client.batch_update([(digest(here), here.bytes()), (digest(small), small.bytes())])
            assert [one.status.code for one in statuses] == [0, Code.FAILED_PRECONDITION.value[0]]
            action = digest_of(b"an action beside the gate")
            client.update_action(action, {"exit_code": 3, "stdout_raw": b"never refused"})
            assert client.get_action(action).exit_code == 3
            told = scrape(server)
            assert told["bazel_remote_cas_write_slots_inflight"] == told["bazel_remote_cas_write_slots_limit"] == 1
            assert told['bazel_remote_cas_write_shed_total{reason="timeout"}'] == 3
        client.write(upload_name(large.hash, large.size), large.chunks())
        assert not client.missing(digest(large))


@pytest.mark.parametrize(
    "status, tool, code",
    [
        ("auto", "bazel", Code.FAILED_PRECONDITION),
        ("auto", "BuildStream", Code.RESOURCE_EXHAUSTED),
        ("unavailable", "bazel", Code.UNAVAILABLE),
        ("failed_precondition", "BuildStream", Code.FAILED_PRECONDITION),
    ],
)
def test_the_status_suits_the_client(fresh, status, tool, code):
    server = fresh(max_inflight_cas_writes=1, write_queue_wait="0s", write_shed_status=status)
    with Client(server.address) as holder, Client(server.address, tool=tool) as client:
        with held(holder, unique(4 * MIB)), fails(code):
            content = unique(1000)
            client.write(upload_name(content.hash, content.size), content.chunks())


def test_a_short_burst_is_delayed(fresh):
    server = fresh(max_inflight_cas_writes=1, write_queue_wait="20s")
    contents = [unique(300_000 + n) for n in range(40)]
    with Client(server.address) as client:
        calls = [
            client.start_write(write_requests(upload_name(one.hash, one.size), one.chunks())) for one in contents
        ]
        assert [call.result().committed_size for call in calls] == [one.size for one in contents]
    assert names(server.log) == []


def test_an_upload_that_stands_still_gives_way(fresh):
    server = fresh(max_inflight_cas_writes=1, write_queue_wait="30s")
    with Client(server.address) as client:
        content = unique(4 * MIB)
        pieces: queue.Queue = queue.Queue()
        requests = list(write_requests(upload_name(content.hash, content.size), content.chunks(length=MIB)))
        for request in requests[:2]:
            pieces.put(request)
        idle = client.start_write(iter(pieces.get, None))
        name = requests[0].resource_name
        until(lambda: client.write_status(name).committed_size > 0, "the upload has its slot")
        other = unique(1000)
        assert client.write(upload_name(other.hash, other.size), other.chunks()) == other.size
        assert idle.exception().code() == grpc.StatusCode.UNAVAILABLE
        pieces.put(None)
        at = client.write_status(name).committed_size
        assert 0 < at <= 2 * MIB
        assert client.write(name, content.chunks(offset=at), offset=at) == content.size
        assert client.read(blob_name(content.hash, content.size)) == content.bytes()


def test_refusals_are_logged_by_the_dozen(fresh):
    server = fresh(max_inflight_cas_writes=1, write_queue_wait="0s")
    contents = [unique(100) for _ in range(100)]
    with Client(server.address) as client, held(client, unique(4 * MIB)):
        begun = time.monotonic()
        calls = [
            client.start_write(write_requests(upload_name(one.hash, one.size), one.chunks())) for one in contents
        ]
        assert {call.exception().code() for call in calls} == {Code.FAILED_PRECONDITION}
        seconds = time.monotonic() - begun
        until(lambda: "more in the last second" in server.log, "the rest is counted")
        assert 10 <= len(names(server.log)) <= 10 * (int(seconds) + 2)


@pytest.mark.parametrize("prefix", ["RINGCAS", "BAZEL_REMOTE"])
def test_settings_by_environment(fresh, prefix):
    settings = {"MAX_INFLIGHT_CAS_WRITES": "77", "GRPC_INITIAL_WINDOW_SIZE": "131072"}
    log = fresh(environment={f"{prefix}_{name}": value for name, value in settings.items()}).log
    assert "CAS writes: 77 in flight" in log and "windows: 128 KiB a stream" in log
