"""Goal: each operation on a store ends as the rules say, whatever the fault: tries, waits, outcome, and what becomes of it.
Method: the fault store, one fault at a time, each crossed with reads, existence checks, uploads and uploads in parts."""

import concurrent.futures
import contextlib
import email.utils
import threading
import time

import grpc
import pytest

from bucket import action_key, blob_key, casblob, from_casblob
from content import unique
from fault_s3 import FaultStore
from reapi import Client, Code, blob_name, digest, digest_of, fails, message, upload_name
from test_metrics import scrape
from wait import until

KIB, MIB = 1 << 10, 1 << 20
# What the rules bound, and what a loaded machine adds.
SLACK_S = 4
HEAD_S = 10


def begin(fresh, store, **flags):
    """A server that has had its look at the store, so that no request but a test's own meets a fault."""
    server = fresh(**{"http_address": "127.0.0.1:0"} | store.flags() | flags)
    until(lambda: "the backend answers" in server.log, "the look at the store")
    return server


@pytest.fixture
def server(store, fresh):
    return begin(fresh, store)


@pytest.fixture
def client(server):
    with Client(server.address) as connected:
        yield connected


def series(server, name: str, **labels) -> float:
    text = ",".join(f'{label}="{value}"' for label, value in sorted((labels | {"backend": "default"}).items()))
    return scrape(server).get(f"bazel_remote_s3_{name}{{{text}}}", 0.0)


def outcome(server, status: str, reason: str = "") -> float:
    return series(server, "upload_outcomes_total", status=status, reason=reason)


def owed(server) -> float:
    return series(server, "owed_uploads")


def upload(client: Client, content) -> None:
    client.write(upload_name(content.hash, content.size), content.chunks())


def read(client: Client, content) -> bytes:
    return client.read(blob_name(content.hash, content.size))


def put_object(store, size: int, mode: str = "zstd"):
    content = unique(size)
    is_raw = mode == "uncompressed"
    store.objects[blob_key(content.hash, is_raw)] = content.bytes() if is_raw else casblob(content.bytes())
    return content


def gaps(requests) -> list[float]:
    return [later.at - earlier.at for earlier, later in zip(requests, requests[1:])]


def of_key(store, method: str, content) -> list:
    return [r for r in store.since(0, method) if store.key(r.path) == blob_key(content.hash)]


@pytest.mark.parametrize("fault, tries", [(500, 3), (502, 3), ("hang_up", 3), (429, 3), (503, 3), (403, 1), (400, 1), (404, 1)])
def test_reads_and_checks(store, client, fault, tries):
    """A read and an existence check are tried so often, and are misses; the next ones find the store well."""
    content = put_object(store, 3000)
    store.fault = fault
    with fails(Code.NOT_FOUND):
        read(client, content)
    other = put_object(store, 3000)
    assert client.missing(digest(other))
    sent = [of_key(store, "GET", content), of_key(store, "HEAD", other)]
    if fault == "hang_up":
        # A kept connection that ends with the first request is replaced at no charge.
        sent = [requests[-tries:] for requests in sent if len(requests) <= tries + 1]
    assert [len(requests) for requests in sent] == [tries, tries]
    for requests in sent:
        assert all(wait > least - 0.02 for wait, least in zip(gaps(requests), (0.1, 0.2)))
    store.heal()
    assert read(client, content) == content.bytes()
    assert read(client, other) == other.bytes()


@pytest.mark.parametrize("fault", [500, "hang_up", "reset", 429, 503])
def test_a_fault_that_passes(store, client, server, fault):
    """Two faults in a row are nothing to a client, if the head of the answer had not come; in the body one is a miss."""
    content, checked, sent = put_object(store, 3000), put_object(store, 3000), unique(4000)
    store.fault, store.times = fault, 2
    if fault == "reset":
        with fails(Code.NOT_FOUND):
            read(client, content)
        store.times = 0
        assert read(client, content) == content.bytes()
        return
    assert read(client, content) == content.bytes()
    store.fault, store.times = fault, 2
    assert not client.missing(digest(checked))
    store.fault, store.times = fault, 2
    upload(client, sent)
    until(lambda: outcome(server, "created") == 1, "the upload")
    waits = gaps(of_key(store, "PUT", sent))
    throttled = fault in (429, 503)
    assert len(waits) == 2
    if fault != "hang_up":
        assert waits[0] > (0.48 if throttled else 0.08) and waits[1] > (0.98 if throttled else 0.18)
    assert from_casblob(store.objects[blob_key(sent.hash)]) == sent.bytes()
    assert series(server, "throttled_total") == (6 if throttled else 0)
    assert (series(server, "upload_pace") < 100) == throttled
    assert series(server, "breaker_state") == 0 and owed(server) == 0


@pytest.mark.parametrize("fault, reason", [
    (500, "s3_put_failed"),
    ("hang_up", "s3_put_failed"),
    ("silent", "timeout"),
    ((400, "ExpiredToken"), "s3_put_failed"),
    ((403, "RequestTimeTooSkewed"), "s3_put_failed"),
])
def test_uploads_that_fail_are_owed(store, fresh, fault, reason):
    """An upload that failed for good is owed, and made when the store is well: after a start at the latest."""
    server = begin(fresh, store, **{"s3.upload_timeout": "2s"})
    content = unique(4000)
    store.fault, store.methods = fault, ("PUT",)
    with Client(server.address) as client:
        upload(client, content)
    until(lambda: outcome(server, "error", reason) == 1, "the outcome")
    # A kept connection that ends with the first request is replaced at no charge.
    assert len(of_key(store, "PUT", content)) in {500: [3], "hang_up": [3, 4], "silent": [1]}.get(fault, [2])
    assert series(server, "breaker_state") == 0
    until(lambda: owed(server) == 1, "it is owed")
    store.heal()
    made = store.count("PUT")
    server.restart(num_uploaders="0")
    until(lambda: "the backend answers" in server.log, "a start without uploads")
    assert owed(server) == 1 and store.count("PUT") == made
    server.restart(num_uploaders=None)
    until(lambda: outcome(server, "created") == 1, "the upload")
    assert owed(server) == 0


def test_refused_connections_and_uploads(store, client, server):
    store.refuse()
    content = unique(4000)
    upload(client, content)
    until(lambda: outcome(server, "error", "s3_put_failed") == 1 and owed(server) == 1, "it is owed")
    with fails(Code.NOT_FOUND):
        read(client, unique(10))
    assert client.missing(digest(unique(10)))


def test_denied_uploads(store, client, server):
    """403 to an upload: counted, said once, neither tried again nor owed, and nothing to the breaker."""
    store.fault = 403
    contents = [unique(500 + number) for number in range(8)]
    for content in contents:
        upload(client, content)
    until(lambda: outcome(server, "error", "access_denied") == 8, "the outcomes")
    assert all(len(of_key(store, "PUT", content)) == 1 for content in contents)
    assert owed(server) == 0 and series(server, "upload_queue_depth") == 0 and series(server, "breaker_state") == 0
    assert server.log.count("upload: access denied") == 1


@pytest.mark.parametrize("times", [2, 3])
def test_conflicts_of_what_replaces(store, client, server, times):
    """409 to the update of an action: what is there is not what was to be stored. Tried again, and in the end owed."""
    action = digest_of(b"an action that changes")
    old = store.objects[action_key(action.hash)] = message("ActionResult")(exit_code=1).SerializeToString()
    fail_at(store, "PUT", "", (409, "OperationAborted"), times)
    client.update_action(action, message("ActionResult")(exit_code=7))
    if times == 2:
        until(lambda: outcome(server, "created") == 1, "the update")
        assert message("ActionResult").FromString(store.objects[action_key(action.hash)]).exit_code == 7
    else:
        until(lambda: outcome(server, "error", "s3_put_failed") == 1, "the outcome")
        assert store.objects[action_key(action.hash)] == old and owed(server) == 1
    assert store.count("PUT") == 3 and series(server, "breaker_state") == 0


def test_conflicts_of_what_is_new(store, client, server):
    """409 to a conditional upload: done when the object is there by then, else tried again."""
    there, absent = unique(4000), unique(4000)
    store.objects[blob_key(there.hash)] = casblob(there.bytes())
    fail_at(store, "PUT", "", (409, "ConditionalRequestConflict"), 1)
    upload(client, there)
    until(lambda: outcome(server, "already_exists", "precondition_failed") == 1, "the outcome")
    assert len(of_key(store, "PUT", there)) == 1
    fail_at(store, "PUT", "", (409, "ConditionalRequestConflict"), 2)
    upload(client, absent)
    until(lambda: outcome(server, "created") == 1, "the upload")
    assert len(of_key(store, "PUT", absent)) == 3


def test_retry_after(store, client, server):
    """An upload waits as long as the store asks, in seconds or by a date; a read, for which somebody waits, takes it for a no."""
    store.fault, store.times, store.retry_after = 503, 1, "3"
    content = unique(4000)
    upload(client, content)
    until(lambda: outcome(server, "created") == 1, "the upload")
    assert gaps(of_key(store, "PUT", content))[0] > 2.98
    # Dates are whole seconds, and a while passes until the answer.
    store.fault, store.times, store.retry_after = 503, 1, email.utils.formatdate(time.time() + 6, usegmt=True)
    other = unique(4000)
    upload(client, other)
    until(lambda: outcome(server, "created") == 2, "the other upload")
    assert 2 < gaps(of_key(store, "PUT", other))[0] < 6 + SLACK_S
    store.fault, store.times, store.retry_after = 503, None, "3"
    asked = put_object(store, 100)
    with fails(Code.NOT_FOUND):
        read(client, asked)
    assert len(of_key(store, "GET", asked)) == 1


@pytest.mark.parametrize("size", [4000, 27 * MIB])
def test_throttled_uploads_do_not_outwait_the_breaker(store, fresh, size):
    """Uploads, whole and in parts, that a store has told to come again in a minute end as soon as its breaker opens: they are
    owed, and made when it is well. Nothing of an upload in parts is left behind."""
    server = begin(fresh, store, storage_mode="uncompressed", **{"s3.multipart_from": "5M"})
    contents = [unique(size) for _ in range(3)]
    store.fault, store.methods, store.retry_after = 429, ("PUT",), "60"
    with Client(server.address) as client:
        for content in contents:
            upload(client, content)
        until(lambda: series(server, "throttled_total") == 3, "all are throttled")
        assert series(server, "upload_queue_depth") == 3
        store.fault, store.methods = 500, ("GET",)
        for _ in range(5):
            with fails(Code.NOT_FOUND):
                read(client, unique(10))
    until(lambda: outcome(server, "error", "breaker_open") == 3, "the outcomes")
    until(lambda: owed(server) == 3 and series(server, "upload_queue_depth") == 0, "they are owed")
    assert outcome(server, "error", "throttled") == 0 and store.count("PUT") == 3 and store.parts == {}
    store.heal()
    until(lambda: outcome(server, "created") == 3, "the uploads", timeout_s=15 + 20)
    assert all(store.objects[blob_key(content.hash, raw=True)] == content.bytes() for content in contents)


def test_uploads_that_are_throttled_for_good(store, client, server):
    """Six tries, each wait at random in the upper half of its step; then the upload is owed, which the breaker does not see."""
    content = unique(4000)
    store.fault, store.methods = 503, ("PUT",)
    upload(client, content)
    until(lambda: outcome(server, "error", "throttled") == 1, "the outcome", timeout_s=31 + 20)
    waits = gaps(of_key(store, "PUT", content))
    assert len(waits) == 5 and sum(waits) < 31 + SLACK_S
    assert all(ceiling / 2 - 0.02 < wait < ceiling + SLACK_S for wait, ceiling in zip(waits, [1, 2, 4, 8, 16]))
    until(lambda: owed(server) == 1, "it is owed")
    assert series(server, "breaker_state") == 0 and series(server, "throttled_total") == 6


class Parts:
    """A blob that goes in six parts, of which the tests make the third one fail."""

    def __init__(self, store, fresh, **flags):
        self.store, self.content = store, unique(27 * MIB)
        self.server = begin(fresh, store, storage_mode="uncompressed", **{"s3.multipart_from": "5M"} | flags)

    def upload(self):
        with Client(self.server.address) as client:
            upload(client, self.content)

    def sent(self, number: int) -> list:
        return [r for r in self.store.since(0, "PUT") if f"partNumber={number}&" in r.path]

    def is_there(self) -> bool:
        return self.store.objects.get(blob_key(self.content.hash, raw=True)) == self.content.bytes()


@pytest.fixture
def parts(store, fresh):
    return Parts(store, fresh)


def fail_at(store, method: str, part: str, fault, times: int) -> None:
    """Requests with this in their query meet the fault, so many times."""
    plain, left = store._fault, [times]

    def choose(asked, key, query):
        if asked == method and part in query and left[0] > 0:
            left[0] -= 1
            return fault
        return plain(asked, key, query)

    store._fault = choose


@pytest.mark.parametrize("fault", [500, "hang_up", 429])
@pytest.mark.parametrize("method, step", [("POST", "uploads"), ("PUT", "partNumber=3"), ("POST", "uploadId")])
def test_parts_that_fail_twice(parts, store, fault, method, step):
    """Any step of an upload in parts that fails in passing is repeated alone."""
    fail_at(store, method, step, fault, 2)
    parts.upload()
    until(parts.is_there, "the upload", timeout_s=30)
    assert [len(parts.sent(number)) for number in range(1, 7)] == [1, 1, 3 if method == "PUT" else 1, 1, 1, 1]
    until(lambda: outcome(parts.server, "created") == 1, "it is counted")


@pytest.mark.parametrize("fault, reason", [(500, "s3_put_failed"), (403, "access_denied")])
def test_parts_that_fail_for_good(parts, store, fault, reason):
    """The upload is given up and its parts are removed; it is owed unless it was denied."""
    fail_at(store, "PUT", "partNumber=3", fault, 3)
    parts.upload()
    until(lambda: outcome(parts.server, "error", reason) == 1, "the outcome")
    assert store.parts == {} and store.count("DELETE") == 1
    assert owed(parts.server) == (0 if fault == 403 else 1)
    if fault == 500:
        parts.server.restart()
        until(parts.is_there, "the upload of the next run", timeout_s=30)


def test_parts_that_take_too_long(store, fresh):
    """An upload that its time limit ends in the middle removes its parts as well, and is owed."""
    parts = Parts(store, fresh, **{"s3.upload_timeout": "8s"})
    fail_at(store, "PUT", "partNumber=3", "silent", 1)
    parts.upload()
    until(lambda: outcome(parts.server, "error", "timeout") == 1, "the outcome")
    assert store.parts == {} and store.count("DELETE") == 1
    assert len(parts.sent(3)) == 1 and owed(parts.server) == 1


@pytest.mark.parametrize("method, step, fault", [
    ("POST", "uploads", (501, "NotImplemented")),
    ("POST", "uploads", (409, "OperationAborted")),
    ("PUT", "partNumber=1", (412, "PreconditionFailed")),
])
def test_a_store_without_parts(store, fresh, method, step, fault):
    """A store that refuses uploads in parts answers, so it is not sick: its breaker stays closed, and they are owed."""
    server = begin(fresh, store, storage_mode="uncompressed", **{"s3.multipart_from": "5M"})
    fail_at(store, method, step, fault, 1000)
    with Client(server.address) as client:
        for number in range(6):
            upload(client, unique(6 * MIB + number))
    until(lambda: outcome(server, "error", "s3_put_failed") >= 6, "the outcomes")
    until(lambda: owed(server) == 6, "they are owed")
    assert series(server, "breaker_state") == 0


@pytest.mark.parametrize("mode", ["zstd", "uncompressed"])
@pytest.mark.parametrize("size", [2 * KIB, 3 * MIB])
def test_wrong_objects(store, fresh, mode, size):
    """Wrong bytes, and an object of another length: never served as complete, not cached, and mended by the next upload."""
    server = begin(fresh, store, storage_mode=mode)
    contents = [put_object(store, size, mode) for _ in range(2)]
    keys = [blob_key(content.hash, mode == "uncompressed") for content in contents]
    store.sick[keys[0]] = "wrong"
    store.objects[keys[1]] = store.objects[keys[1]][:-100]
    with Client(server.address) as client:
        for number, (key, content) in enumerate(zip(keys, contents), 1):
            received = bytearray()
            with fails(Code.NOT_FOUND):
                for reply in client.read_call(blob_name(content.hash, content.size)):
                    received += reply.data
            assert len(received) < content.size
            assert series(server, "wrong_objects_total") == number
            assert client.missing(digest(content))
            upload(client, content)
            until(lambda: store.count("PUT", key) == 1, "it is overwritten")
            until(lambda: outcome(server, "created") == number, "the upload ends")
            stored = store.objects[key]
            assert (stored if mode == "uncompressed" else from_casblob(stored)) == content.bytes()
        assert all("if-none-match" not in r.headers for r in store.since(0, "PUT"))
        assert series(server, "breaker_state") == 0
    store.sick.clear()
    with Client(begin(fresh, store, storage_mode=mode).address) as client:
        assert all(read(client, content) == content.bytes() for content in contents)


def test_wrong_actions(store, client, server):
    """An object that is no ActionResult is a miss, and the next update replaces it."""
    action = digest_of(b"an action")
    for garbage in [b"\xff garbage", b"\x00" * 5000]:
        store.objects[action_key(action.hash)] = garbage
        with fails(Code.NOT_FOUND):
            client.get_action(action)
    client.update_action(action, message("ActionResult")(exit_code=5))
    wanted = lambda: message("ActionResult").FromString(store.objects[action_key(action.hash)]).exit_code == 5
    until(lambda: store.count("PUT") and wanted(), "the update")
    assert client.get_action(action).exit_code == 5


def test_hanging(fresh):
    """Each way to hang ends a read within its bound, all tries together: before the head 10 s, a body below 64 KiB/s 15 s.
    An existence check waits 2 s. All ways at a time, as each has a store and a server of its own."""
    ways = ["backlog", "silent", "slow_headers", "stalled_body", "trickle"]

    def hang(way: str, store: FaultStore, server) -> tuple[float, float]:
        content = put_object(store, 400_000)
        if way == "backlog":
            store.black_hole()
        else:
            store.fault, store.trickle = way, 8_000
        with Client(server.address) as client:
            begun = time.monotonic()
            assert client.missing(digest(content)) == (way not in ("stalled_body", "trickle"))
            checked = time.monotonic() - begun
            begun = time.monotonic()
            with fails(Code.NOT_FOUND):
                read(client, content)
            return checked, time.monotonic() - begun

    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(len(ways)) as pool:
        calls = []
        for way in ways:
            store = FaultStore()
            stack.callback(store.close)
            calls.append(pool.submit(hang, way, store, begin(fresh, store)))
        for way, call in zip(ways, calls):
            checked, waited = call.result(60)
            assert checked < 2 + SLACK_S, way
            assert HEAD_S - 1 < waited < (15 if way in ("stalled_body", "trickle") else HEAD_S + SLACK_S), way


def test_slow_bodies_and_the_next_read(store, fresh):
    """When all the places for objects on their way are taken by slow ones, the next read waits for one no longer than for
    a dead store."""
    server = begin(fresh, store, cores="1", memory_limit="512M")
    slow = [unique(250 * KIB) for _ in range(240)]
    for content in slow:
        key = blob_key(content.hash)
        store.objects[key], store.sick[key] = casblob(content.bytes(), compression=0), "trickle"
    # Four seconds each, some fifty at a time.
    store.trickle = 68_000
    other = put_object(store, 1000)

    def try_to_read(content, client) -> None:
        with contextlib.suppress(grpc.RpcError):
            read(client, content)

    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(len(slow)) as pool:
        clients = [stack.enter_context(Client(server.address)) for _ in range(6)]
        calls = [pool.submit(try_to_read, content, clients[at % 6]) for at, content in enumerate(slow)]
        until(lambda: store.in_flight >= 50, "slow bodies")
        begun = time.monotonic()
        try_to_read(other, clients[0])
        waited = time.monotonic() - begun
        for call in calls:
            call.result(60)
    print(f"waited {waited:.1f} s")
    assert waited < HEAD_S + SLACK_S


def test_connections_are_used_again(store, client):
    """Whatever the answer, the next request takes the same connection: 200 checks and reads of absent blobs."""
    accepted = store.accepted
    for _ in range(100):
        assert client.missing(digest(unique(10)))
        with fails(Code.NOT_FOUND):
            read(client, unique(10))
    # One for each core, and one that the start had.
    assert store.accepted - accepted <= 3


def test_existence_checks_have_a_bound(store, client, server):
    """However many calls ask about however many blobs, a core has 64 checks under way; those that nobody waits for any more
    are not made."""
    # Made before, as the calls must all be made while the first ones wait.
    asked = [[digest_of(b"%d of %d" % (number, call)) for number in range(300)] for call in range(8)]
    store.fault, store.methods = "silent", ("HEAD",)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for missing in pool.map(client.find_missing, asked):
            assert len(missing) == 300
    assert 64 < store.count("HEAD") <= 2 * 64
    store.heal()
    # These wait behind all others. What hung is tried again.
    client.find_missing([digest_of(b"%d at last" % number) for number in range(50)])
    assert store.count("HEAD") <= 2 * 2 * 64 + 50


def test_what_a_sick_store_has_is_missing(store, client, server):
    """Known to be there, but in a store whose breaker is open: missing, so that clients upload it instead of failing to
    read it later."""
    content = put_object(store, 1000)
    assert not client.missing(digest(content))
    store.refuse()
    for _ in range(5):
        with fails(Code.NOT_FOUND):
            read(client, unique(10))
    until(lambda: series(server, "breaker_state") == 2, "the breaker opens")
    assert client.missing(digest(content))


def test_more_uploads_than_fit(store, fresh):
    """What does not fit into the queue is owed, and uploaded as soon as there is room: nobody waits for a retry."""
    server = begin(fresh, store, num_uploaders="2", max_queued_uploads="5")
    contents = [unique(400 + number) for number in range(100)]
    hold = threading.Event()
    store.gate = lambda request: hold.wait(30) if request.method == "PUT" else None
    with Client(server.address) as client:
        for content in contents:
            upload(client, content)
    until(lambda: owed(server) == 95, "the rest is owed")
    assert series(server, "upload_queue_depth") == 5
    # Later the store may see the next request before it has counted the end of one that was answered.
    assert store.most_in_flight == 2
    hold.set()
    # By retries, each of a few, it would take minutes.
    until(lambda: outcome(server, "created") == 100, "all uploads", timeout_s=40)
    assert owed(server) == 0
