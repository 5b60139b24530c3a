"""Goal: a store that is sick costs a miss and soon no time, costs nobody else anything, and loses no upload.
Method: a store of our own with one sickness at a time, in front of it one server; times are bounds that the rules give.
What takes long stands in `test_s3_drill.py`, each operation with each fault in `test_s3_matrix.py`."""

import collections
import concurrent.futures
import http.client
import statistics
import threading
import time

import grpc
import pytest

from bucket import action_key, blob_key, casblob
from content import unique
from reapi import Client, Code, blob_name, digest, digest_of, fails, message, upload_name
from test_metrics import scrape
from wait import until

MIB = 1 << 20
# What the rules bound, and what a loaded machine adds.
SLACK_S = 4


@pytest.fixture
def server(store, fresh):
    return fresh(http_address="127.0.0.1:0", **store.flags())


def upload(client: Client, content) -> None:
    client.write(upload_name(content.hash, content.size), content.chunks())


def miss(client: Client, content=None) -> float:
    """A read that must miss; how long it took."""
    content = content or unique(1000)
    begun = time.monotonic()
    with fails(Code.NOT_FOUND):
        client.read(blob_name(content.hash, content.size))
    return time.monotonic() - begun


def series(server, name: str, **labels) -> float:
    text = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return scrape(server).get(f"bazel_remote_s3_{name}{{{text}}}", 0.0)


def state(server) -> float:
    return series(server, "breaker_state", backend="default")


def open_breaker(client: Client, server) -> None:
    for _ in range(5):
        miss(client)
    until(lambda: state(server) == 2, "the breaker opens")


def test_one_request_for_many_readers(store, server):
    """100 clients that read one cold blob make one request to the store, and all get all of it."""
    content = unique(3 * MIB)
    store.objects[blob_key(content.hash)] = casblob(content.bytes())
    go = threading.Event()
    store.gate = lambda request: go.wait(30) if request.method == "GET" else None
    with Client(server.address) as client, concurrent.futures.ThreadPoolExecutor(100) as pool:
        calls = [pool.submit(client.read, blob_name(content.hash, content.size)) for _ in range(100)]
        until(lambda: store.count("GET", blob_key(content.hash)), "the first request")
        go.set()
        assert all(call.result(60) == content.bytes() for call in calls)
    assert store.count("GET", blob_key(content.hash)) == 1


@pytest.mark.parametrize("raw", [False, True])
def test_what_is_stored_meanwhile_stays(store, fresh, raw):
    """A result that a client stores while the store's is on its way is not replaced by that one, here or in the store."""
    server = fresh(http_address="127.0.0.1:0", disable_http_ac_validation=str(raw).lower(), **store.flags())
    name = digest_of(unique(100).bytes()).hash
    key = f"raw/{name[:2]}/{name}" if raw else action_key(name)
    old, new = (message("ActionResult")(exit_code=code).SerializeToString() for code in (1, 2))
    store.objects[key] = old
    go = threading.Event()
    store.gate = lambda request: go.wait(30) if store.key(request.path) == key else None

    def ask(method: str, body=None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(server.http_address, timeout=30)
        connection.request(method, f"/ac/{name}", body)
        reply = connection.getresponse()
        return reply.status, reply.read()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, "GET")
        until(lambda: store.count("GET", key), "the request to the store")
        assert ask("PUT", new)[0] == 200
        go.set()
        assert waiting.result(30) == (200, new)
    until(lambda: store.count("PUT", key), "the upload")
    assert ask("GET") == (200, new)
    until(lambda: store.objects[key] == new, "what the client stored is there")


def test_a_slow_reader_holds_up_nobody(store, server):
    """A client that stops reading in the middle delays no other, and gets the rest later."""
    content = unique(12 * MIB)
    store.objects[blob_key(content.hash)] = casblob(content.bytes())
    name = blob_name(content.hash, content.size)
    with Client(server.address) as slow, Client(server.address) as quick:
        stream = slow.read_call(name)
        received = bytearray(next(stream).data)
        assert quick.read(name) == content.bytes()
        for reply in stream:
            received += reply.data
        assert received == content.bytes()
    assert store.count("GET", blob_key(content.hash)) == 1


def test_first_bytes_come_while_the_rest_is_under_way(store, server):
    content = unique(4 * MIB)
    store.objects[blob_key(content.hash)] = casblob(content.bytes(), compression=0)
    store.fault, store.trickle = "trickle", 2 * MIB
    with Client(server.address) as client:
        stream = client.read_call(blob_name(content.hash, content.size))
        received = bytearray(next(stream).data)
        assert len(received) < content.size
        for reply in stream:
            received += reply.data
    assert received == content.bytes()


@pytest.mark.parametrize("fault", ["reset", "short", 500, 403, 503, 429])
def test_a_fault_is_a_miss(store, server, fault):
    """Whatever the store does, a client sees NOT_FOUND; the store's object is read once it is well."""
    small, large, action = unique(2000), unique(3 * MIB), digest_of(b"an action")
    for content in [small, large]:
        store.objects[blob_key(content.hash)] = casblob(content.bytes())
    store.objects[action_key(action.hash)] = message("ActionResult")(exit_code=3).SerializeToString()
    store.fault = fault
    with Client(server.address) as client:
        for content in [small, large]:
            miss(client, content)
        with fails(Code.NOT_FOUND):
            client.get_action(action)
        if fault not in ("reset", "short"):
            assert client.missing(digest(small))
        store.heal()
        for content in [small, large]:
            assert client.read(blob_name(content.hash, content.size)) == content.bytes()
        assert client.get_action(action).exit_code == 3
    assert state(server) == 0


@pytest.mark.parametrize("kind", ["batch", "page", "check"])
def test_a_miss_asks_once(store, server, kind):
    """Whatever kind of call reads a blob that the store does not have: it is asked for once."""
    absent, action = unique(400), digest_of(b"needs what is not there")
    with Client(server.address) as client:
        if kind == "batch":
            assert client.batch_read([digest(absent)])[0].status.code == Code.NOT_FOUND.value[0]
        elif kind == "page":
            with fails(Code.NOT_FOUND):
                client.tree_pages(digest(absent))
        else:
            root = message("Directory")(directories=[{"name": "d", "digest": digest(absent)}]).SerializeToString()
            store.objects[blob_key(digest_of(root).hash)] = casblob(root)
            stored = message("ActionResult")(output_directories=[{"path": "d", "root_directory_digest": digest_of(root)}])
            store.objects[action_key(action.hash)] = stored.SerializeToString()
            with fails(Code.NOT_FOUND):
                client.get_action(action)
    assert store.count("GET", blob_key(absent.hash)) == 1


def test_throttles_and_denials_open_nothing(store, server):
    with Client(server.address) as client:
        for fault in [429, 503, 403]:
            store.fault = fault
            for _ in range(8):
                miss(client)
        assert state(server) == 0
        assert series(server, "failures_total", backend="default") >= 24
    assert server.log.count("Check the credentials") == 1


def test_who_waits_too_long_for_a_turn_misses(store, fresh):
    """More reads than may run, of a store that is well but slow: those that wait miss, soon enough for those that run to have
    their time, and the store counts as well."""
    server = fresh(http_address="127.0.0.1:0", memory_limit="300M", cores="1", **store.flags())
    until(lambda: "the backend answers" in server.log, "the look at the store")
    contents = [unique(1000) for _ in range(60)]
    for content in contents:
        store.objects[blob_key(content.hash)] = casblob(content.bytes())
    go = threading.Event()
    store.gate = lambda request: go.wait(30) if request.method == "GET" else None
    with Client(server.address) as client, concurrent.futures.ThreadPoolExecutor(len(contents)) as pool:

        def is_read(content) -> bool:
            try:
                return client.read(blob_name(content.hash, content.size)) == content.bytes()
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.NOT_FOUND
                return False

        calls = [pool.submit(is_read, content) for content in contents]
        late = until(lambda: [call for call in calls if call.done()], "a read has waited too long")
        assert len(late) < len(calls) and not any(call.result() for call in late)
        go.set()
        assert any([call.result(60) for call in calls])
        assert state(server) == 0 and series(server, "failures_total", backend="default") == 0
        assert all(map(is_read, contents))


def test_the_breaker(store, server):
    """Five failures open it; then reads miss at once and without a request; one probe closes it when the store is well."""
    content = unique(5000)
    store.objects[blob_key(content.hash)] = casblob(content.bytes())
    store.refuse()
    with Client(server.address) as client:
        open_breaker(client, server)
        opened = time.monotonic()
        before = series(server, "short_circuits_total", backend="default")
        for _ in range(50):
            miss(client)
        assert series(server, "short_circuits_total", backend="default") == before + 50, "the store was asked"
        store.listen()
        until(lambda: state(server) == 0, "a probe closes it", timeout_s=15 + SLACK_S)
        assert time.monotonic() - opened > 10
        probes = store.since(opened, "GET")
        assert len(probes) == 1 and "range" in probes[0].headers
        assert client.read(blob_name(content.hash, content.size)) == content.bytes()
    assert server.log.count("the breaker is open") == 1


def test_local_things_never_wait(store, server):
    """While the store is silent: local reads, FindMissing of local blobs and new writes are as quick as ever."""
    local = [unique(3000) for _ in range(20)]
    with Client(server.address) as client, concurrent.futures.ThreadPoolExecutor(300) as pool:
        for content in local:
            upload(client, content)
        store.fault = "silent"
        waiting = [pool.submit(miss, client) for _ in range(200)]
        until(lambda: store.in_flight > 20, "reads that hang")
        times = collections.defaultdict(list)
        with Client(server.address) as other:
            for content in local:
                for kind, call in [
                    ("read", lambda: other.read(blob_name(content.hash, content.size))),
                    ("check", lambda: other.missing(digest(content))),
                    ("write", lambda: upload(other, unique(1000))),
                ]:
                    begun = time.monotonic()
                    call()
                    times[kind].append(time.monotonic() - begun)
        # A busy machine delays a few: whoever waits for the store does so each time, for two seconds and more.
        assert all(statistics.median(each) < 1 for each in times.values()), times
        assert max(wait.result(60) for wait in waiting) < 10 + SLACK_S


def test_existence_checks_are_bounded(store, server):
    """FindMissing waits two seconds for a silent store, and asks a healthy one once for each blob in a while."""
    there, absent = unique(1000), unique(1000)
    store.objects[blob_key(there.hash)] = casblob(there.bytes())
    with Client(server.address) as client:
        for _ in range(3):
            assert client.find_missing([digest(there), digest(absent)]) == [digest(absent)]
        assert store.count("HEAD", blob_key(there.hash)) == 1
        others = [digest(unique(10)) for _ in range(300)]
        store.fault = "silent"
        begun = time.monotonic()
        assert len(client.find_missing(others)) == 300
        assert 1.5 < time.monotonic() - begun < 2 + SLACK_S


def test_an_absence_is_believed_for_a_while(store, fresh):
    """What a store did not have a moment ago is missing without a question; what it has got meanwhile is found soon."""
    server = fresh(cores="1", **store.flags())
    content = unique(1000)
    with Client(server.address) as client:
        begun = time.monotonic()
        assert client.missing(digest(content))
        store.objects[blob_key(content.hash)] = casblob(content.bytes())
        until(lambda: not client.missing(digest(content)), "it is found")
        assert time.monotonic() - begun > 4.9
    assert store.count("HEAD", blob_key(content.hash)) == 2


def test_writes_do_not_ask_the_store(store, server):
    store.fault = "silent"
    with Client(server.address) as client:
        for _ in range(20):
            upload(client, unique(500))
        assert store.count("HEAD") == 0


def test_a_shutdown_drains(store, server):
    """What is queued at SIGTERM is uploaded before the end."""
    contents = [unique(700 + n) for n in range(40)]
    go = threading.Event()
    store.gate = lambda request: go.wait(30) if request.method == "PUT" else None
    with Client(server.address) as client:
        for content in contents:
            upload(client, content)
        until(lambda: store.in_flight > 0, "uploads run")
    server.signal()
    go.set()
    assert server.wait() == 0
    assert all(blob_key(c.hash) in store.objects for c in contents)


def test_kept_connections_that_died_are_no_failure(store, server):
    """The store closes idle connections; the next request takes a new one and nobody notices."""
    with Client(server.address) as client:
        for _ in range(6):
            content = unique(900)
            store.objects[blob_key(content.hash)] = casblob(content.bytes())
            assert client.read(blob_name(content.hash, content.size)) == content.bytes()
            store.drop_connections()
        assert series(server, "failures_total", backend="default") == 0


def test_a_store_without_conditions(store, server):
    """501 to a conditional upload: it is sent again without the condition."""
    plain = store._answer

    def answer(connection, request):
        if request.headers.get("if-none-match"):
            return store._send(connection, 501, b"<Error><Code>NotImplemented</Code></Error>", request)
        return plain(connection, request)

    store._answer = answer
    with Client(server.address) as client:
        for number in range(8):
            content = unique(600 + number)
            upload(client, content)
            until(lambda: blob_key(content.hash) in store.objects, "the upload")
    # Each core finds out for itself.
    assert sum("if-none-match" in r.headers for r in store.requests) <= 2


def test_a_skewed_clock(store, server):
    """A refusal with a date far from ours: the next request is signed with the store's time."""
    content = unique(800)
    store.objects[blob_key(content.hash)] = casblob(content.bytes())
    plain = store._answer

    def answer(connection, request):
        if not request.headers["x-amz-date"].startswith("2030"):
            text = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"
            return store._send(connection, 403, text, request, "Date: Tue, 01 Jan 2030 12:00:00 GMT\r\n")
        return plain(connection, request)

    store._answer = answer
    with Client(server.address) as client:
        assert client.read(blob_name(content.hash, content.size)) == content.bytes()
        assert not client.missing(digest(content))
    assert "Check NTP" in server.log
