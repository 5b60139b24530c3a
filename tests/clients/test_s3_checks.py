"""Goal: whether an action's result is a hit is answered in time, whatever ails the store that has its blobs, and only an answer
of the store costs the result its place in the cache.
Method: results that stand in the cache alone, with blobs that stand in the store alone, so that each call asks the store for
them; a sickness of the store; then the same calls while it is well."""

import http.client
import threading
import time

import grpc
import pytest

from bucket import action_key, blob_key, casblob
from content import unique
from reapi import Client, Code, blob_name, digest, digest_of, fails, message
from test_metrics import scrape
from test_s3_faults import SLACK_S, state
from wait import until

TIMEOUT_S = 2


@pytest.fixture
def server(store, fresh):
    return fresh(http_address="127.0.0.1:0", **store.flags())


def put(store, data: bytes):
    """Puts a blob into the store."""
    store.objects[blob_key(digest_of(data).hash)] = casblob(data)
    return digest_of(data)


def directory(*below, name: str = "d", file=None) -> bytes:
    nodes = [{"name": f"{name} {at}", "digest": one} for at, one in enumerate(below)]
    files = [{"name": name, "digest": file}] if file is not None else []
    return message("Directory")(directories=nodes, files=files).SerializeToString()


def every_way(store):
    """A result that names blobs in every way, and these blobs, which the store gets."""
    file, of_tree, of_root = (put(store, unique(900).bytes()) for _ in range(3))
    tree = put(store, message("Tree")(root={"files": [{"name": "f", "digest": of_tree}]}).SerializeToString())
    below = put(store, directory(file=of_root))
    root = put(store, directory(below, name=file.hash))
    result = message("ActionResult")(
        output_files=[{"path": "f", "digest": file}],
        output_directories=[{"path": "t", "tree_digest": tree}, {"path": "r", "root_directory_digest": root}],
    )
    return result, [file, tree, of_tree, root, below, of_root]


def keep_here(store, client: Client, server, result):
    """An action whose result stands in the cache, and nowhere else."""
    action = digest_of(unique(100).bytes())
    client.update_action(action, result)
    until(lambda: is_idle(server) and action_key(action.hash) in store.objects, "the upload")
    del store.objects[action_key(action.hash)]
    return action


def is_idle(server) -> bool:
    gauges = scrape(server)
    return not any(gauges[f'bazel_remote_s3_{name}{{backend="default"}}'] for name in ["owed_uploads", "upload_queue_depth"])


def miss(client: Client, action) -> float:
    """A call that must miss; how long it took."""
    begun = time.monotonic()
    with fails(Code.NOT_FOUND):
        client.get_action(action)
    return time.monotonic() - begun


@pytest.mark.parametrize("fault", ["black hole", "refused", "silent", "slow_headers", "stalled_body", "reset", 500, 503, 429, 403])
def test_a_result_outlives_a_sick_store(store, server, fault):
    """However the store fails to answer, and after its breaker has opened: a miss in time. When it is well, the result is back,
    from the cache."""
    result, _ = every_way(store)
    with Client(server.address) as client:
        action = keep_here(store, client, server, result)
        if fault == "black hole":
            store.black_hole()
        elif fault == "refused":
            store.refuse()
        else:
            store.fault = fault
        for _ in range(3):
            assert miss(client, action) < TIMEOUT_S + SLACK_S
        store.heal()
        if fault in ("black hole", "refused"):
            store.listen()

        def is_back() -> bool:
            try:
                return client.get_action(action) == result
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.NOT_FOUND
                return False

        until(is_back, "the result is back", timeout_s=20 + SLACK_S, step_s=0.2)
        assert store.count("GET", action_key(action.hash)) == 0 and state(server) == 0


@pytest.mark.parametrize("place", range(6))
def test_what_the_store_lacks_is_sure(store, server, place):
    """The store says that it lacks a blob: the result is dropped, and the next call finds the one that the store has."""
    result, blobs = every_way(store)
    with Client(server.address) as client:
        action = keep_here(store, client, server, result)
        newer = message("ActionResult")(exit_code=7)
        store.objects[action_key(action.hash)] = newer.SerializeToString()
        del store.objects[blob_key(blobs[place].hash)]
        miss(client, action)
        assert client.get_action(action) == newer


def test_a_wrong_object_is_as_good_as_none(store, server):
    """The store has other bytes under a blob's name: once that is found out the result is dropped, and the store's is found."""
    content = unique(900)
    store.objects[blob_key(content.hash)] = casblob(unique(900).bytes())
    with Client(server.address) as client:
        action = keep_here(store, client, server, message("ActionResult")(output_files=[{"path": "f", "digest": digest(content)}]))
        with fails(Code.NOT_FOUND):
            client.read(blob_name(content.hash, content.size))
        newer = message("ActionResult")(exit_code=7)
        store.objects[action_key(action.hash)] = newer.SerializeToString()
        miss(client, action)
        assert client.get_action(action) == newer


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_denial_is_remembered(store, server, method):
    """403 for a blob, as some stores say of what they do not have: for a while it is missing and not asked for again; then it is."""
    content = unique(600)
    store.objects[blob_key(content.hash)] = casblob(content.bytes())
    store.fault = 403
    with Client(server.address) as client:
        if method == "GET":
            with fails(Code.NOT_FOUND):
                client.read(blob_name(content.hash, content.size))
        for _ in range(3):
            assert client.missing(digest(content))
        assert store.count(method, blob_key(content.hash)) == 1
        assert store.count("HEAD", blob_key(content.hash)) == (method == "HEAD")
        store.heal()
        until(lambda: not client.missing(digest(content)), "it is asked for again")
        assert store.count("HEAD", blob_key(content.hash)) == (2 if method == "HEAD" else 1)
    assert state(server) == 0


@pytest.mark.parametrize("over_http", [False, True])
def test_an_upload_that_is_owed_is_made(store, fresh, over_http):
    """A result whose blob the store lacks, and which the store is still to get: it is kept until it has it."""
    server = fresh(http_address="127.0.0.1:0", num_uploaders="1", **store.flags())
    absent, action = unique(500), digest_of(unique(100).bytes())
    key = action_key(action.hash)
    result = message("ActionResult")(output_files=[{"path": "f", "digest": digest(absent)}])
    go = threading.Event()
    store.gate = lambda request: go.wait(60) if request.method == "PUT" else None
    with Client(server.address) as client:
        # Whose upload comes first.
        client.put(unique(100).bytes())
        until(lambda: store.count("PUT") == 1, "an upload that goes on and on")
        client.update_action(action, result)
        for _ in range(2):
            if over_http:
                # Where the size of the action is not known.
                connection = http.client.HTTPConnection(server.http_address, timeout=30)
                connection.request("GET", f"/ac/{action.hash}")
                assert connection.getresponse().status == 404
                connection.close()
            else:
                miss(client, action)
        assert store.count("HEAD", blob_key(absent.hash)) > 0
        go.set()
        until(lambda: key in store.objects and is_idle(server), "the upload")
        assert message("ActionResult").FromString(store.objects[key]) == result
        # Then it goes the way of all that lack something.
        store.objects[key] = message("ActionResult")(exit_code=7).SerializeToString()
        miss(client, action)
        assert client.get_action(action).exit_code == 7


@pytest.mark.parametrize("kind", ["levels", "trees"])
def test_one_deadline_for_a_whole_check(store, server, kind):
    """A store that takes its time for each of many bodies: their times do not add up, and what comes too late for one check is
    here for a later one, asked for once."""
    count, pause_s = 8, 1.5
    bodies = []
    if kind == "levels":
        for level in range(count):
            bodies.append(put(store, directory(*bodies[-1:], name=f"level {level}")))
        outputs = [{"path": "r", "root_directory_digest": bodies[-1]}]
    else:
        for number in range(count):
            # More than a small blob, so that it could be read while it comes.
            files = [{"name": f"{number} {at} {'x' * 200}"} for at in range(1000 * number)]
            for file in files:
                file["digest"] = digest_of(b"")
            bodies.append(put(store, message("Tree")(root={"files": files}).SerializeToString()))
        outputs = [{"path": f"t{at}", "tree_digest": tree} for at, tree in enumerate(bodies)]
    with Client(server.address) as client:
        action = keep_here(store, client, server, message("ActionResult")(output_directories=outputs))
        keys = {blob_key(body.hash) for body in bodies if body.size_bytes}

        def be_slow(request) -> None:
            if request.method == "GET" and store.key(request.path) in keys:
                time.sleep(pause_s if kind == "levels" else 2 * pause_s)

        store.gate = be_slow
        assert miss(client, action) < TIMEOUT_S + SLACK_S < count * pause_s
        times = []

        def is_hit() -> bool:
            begun = time.monotonic()
            try:
                client.get_action(action)
                return True
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.NOT_FOUND
                return False
            finally:
                times.append(time.monotonic() - begun)

        until(is_hit, "all has come", timeout_s=60)
        assert max(times) < TIMEOUT_S + SLACK_S
        assert all(store.count("GET", key) == 1 for key in keys)
