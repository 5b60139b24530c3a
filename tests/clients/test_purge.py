"""Goal: what an administrator purges is gone when he is told so, and nothing brings it back: not the RAM tier, not a kill, not a
store behind the cache, nor what was on its way to it or from it.
Method: purges by digest, instance and time over HTTP; the server killed right after the answer; a store that is slow, sick, or
has what was purged."""

import http.client
import json
import threading
import time

import pytest

from bucket import action_key, blob_key, casblob
from content import unique
from metrics import scrape
from reapi import Client, Code, blob_name, digest, digest_of, fails, message, upload_name
from server import Server, StartError
from wait import until

MIB = 1 << 20
OPEN = {
    "http_address": "127.0.0.1:0",
    "allow_unauthenticated_purges": "true",
    "enable_endpoint_metrics": "true",
    # Some of these servers are killed at once.
    "ack": "flushed",
}


def ask(server: Server, method: str, path: str, body: bytes | None = None, accept: str = "*/*"):
    connection = http.client.HTTPConnection(server.http_address, timeout=60)
    try:
        connection.request(method, path, body, {"Accept": accept})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def purged(server: Server, method: str, path: str) -> int:
    status, text = ask(server, method, path)
    assert status == 200, text
    return json.loads(text)["purged"]


def store_action(client: Client, instance: str = ""):
    """A result without outputs; its action's digest."""
    key = digest_of(unique(30).bytes())
    client.update_action(key, message("ActionResult")(exit_code=3), instance_name=instance)
    return key


def has(client: Client, key, instance: str = "") -> bool:
    try:
        client.get_action(key, instance_name=instance)
        return True
    except Exception as error:
        assert error.code() == Code.NOT_FOUND, error
        return False


@pytest.mark.parametrize("size", [100, 300_000, 3 * MIB])
def test_a_blob(fresh, size):
    server = fresh(**OPEN)
    content, other = unique(size), unique(size)
    with Client(server.address) as client:
        for one in (content, other):
            client.write(upload_name(one.hash, size), one.chunks())
            # Into the RAM tier, if it is of a size for that.
            assert client.read(blob_name(one.hash, size)) == one.bytes()
        assert purged(server, "DELETE", f"/cas/{content.hash}") == 1
        assert purged(server, "DELETE", f"/cas/{content.hash}") == 0
        assert client.find_missing([digest(content), digest(other)]) == [digest(content)]
        assert ask(server, "HEAD", f"/cas/{content.hash}")[0] == 404
        with fails(Code.NOT_FOUND):
            client.read(blob_name(content.hash, size))
    server.restart(crash=True)
    with Client(server.address) as client:
        assert client.find_missing([digest(content), digest(other)]) == [digest(content)]
        assert ask(server, "GET", f"/cas/{content.hash}")[0] == 404
        # It may be stored again, and then stays.
        client.write(upload_name(content.hash, size), content.chunks())
        assert client.read(blob_name(content.hash, size)) == content.bytes()


def test_results_by_digest_and_by_instance(fresh):
    server = fresh(**OPEN)
    with Client(server.address) as client:
        keys = {instance: [store_action(client, instance) for _ in range(40)] for instance in ("", "main", "other/x")}
        one = keys["main"].pop()
        assert purged(server, "DELETE", f"/main/ac/{one.hash}") == 1
        assert purged(server, "POST", "/admin/purge?instance=main") == 39
        assert purged(server, "POST", "/admin/purge?instance=main") == 0
    server.restart(crash=True)
    with Client(server.address) as client:
        for instance, stored in keys.items():
            assert all(has(client, key, instance) == (instance != "main") for key in stored), instance
        assert not has(client, one, "main")
        assert purged(server, "POST", "/admin/purge?instance=other%2Fx") == 40
        found = scrape(server)
        # Counters begin anew with the process.
        assert found['bazel_remote_purged_entries_total{kind="ac"}'] == 40, found
    assert "purge of action results, instance=other%2Fx, for 127.0.0.1: done" in server.log


def test_results_by_time(fresh):
    """A poisoned cache: what was written since some time goes, what is older stays; and the reverse."""
    server = fresh(**OPEN)
    with Client(server.address) as client:
        old = [store_action(client) for _ in range(20)]
        time.sleep(1.1)
        since = int(time.time())
        poisoned = [store_action(client) for _ in range(30)]
        assert purged(server, "POST", f"/admin/purge?written_since={since}") == 30
        assert [has(client, key) for key in old + poisoned] == [True] * 20 + [False] * 30
    server.restart(crash=True)
    with Client(server.address) as client:
        assert [has(client, key) for key in old + poisoned] == [True] * 20 + [False] * 30
        new = store_action(client)
        assert purged(server, "POST", f"/admin/purge?written_before={since}") == 20
        assert has(client, new)
        assert purged(server, "POST", "/admin/purge?all=true") == 1
        assert not has(client, new)


def test_bad_requests_name_the_field(fresh):
    server = fresh(**OPEN)
    for query, field in [
        ("", "all"),
        ("?written_since=yesterday", "written_since"),
        ("?written_before=2099-01-01T00:00:00Z", "written_before"),
        ("?digest=1", "digest"),
        ("?instance=%zz", "instance"),
        ("?all=true&instance=x", "all"),
    ]:
        status, text = ask(server, "POST", f"/admin/purge{query}")
        assert (status, text.split(":")[0]) == (400, field), text
    assert ask(server, "DELETE", "/cas/short")[0] == 400
    connection = http.client.HTTPConnection(server.http_address, timeout=60)
    connection.request("DELETE", f"/cas/{unique(100).hash}", headers={"x-blacksmith-storage-prefix": "t/1"})
    reply = connection.getresponse()
    assert reply.status == 400 and b"--trust_storage_prefix_header" in reply.read()
    connection.close()
    assert ask(server, "PUT", "/admin/purge", b"")[0] == 405
    assert "may come back" not in server.log, "who is paged for a failed purge looks for it there"


def test_off_unless_somebody_may(fresh):
    server = fresh(http_address="127.0.0.1:0")
    content = unique(100)
    with Client(server.address) as client:
        client.write(upload_name(content.hash, 100), content.chunks())
        for method, path in [("DELETE", f"/cas/{content.hash}"), ("POST", "/admin/purge?all=true")]:
            status, text = ask(server, method, path)
            assert status == 403 and "--allow_unauthenticated_purges" in text
        assert client.find_missing([digest(content)]) == []
    with pytest.raises(StartError, match="--allow_unauthenticated_purges is for servers without access control"):
        fresh(allow_unauthenticated_purges="true", token_file="/dev/null")


def test_a_store_loses_it_too(store, fresh):
    """By digest the object is deleted before the answer; a store that does not, or does not answer, makes it a failure."""
    server = fresh(**OPEN, **store.flags())
    content = unique(5000)
    with Client(server.address) as client:
        client.write(upload_name(content.hash, 5000), content.chunks())
        key = store_action(client)
        for name in (blob_key(content.hash), action_key(key.hash)):
            until(lambda: name in store.objects, f"the upload of {name}")
        store.methods, store.fault = ("DELETE",), 403
        status, text = ask(server, "DELETE", f"/cas/{content.hash}")
        assert status == 502 and "AccessDenied" in text
        assert scrape(server)["bazel_remote_purges_failed_total"] == 1
        store.fault = None
        # It went from here, and comes back from there: nothing else was promised.
        assert client.find_missing([digest(content)]) == []
        purged(server, "DELETE", f"/cas/{content.hash}")
        assert purged(server, "DELETE", f"/ac/{key.hash}") == 1
        assert not store.objects
        assert client.find_missing([digest(content)]) == [digest(content)]
        assert not has(client, key)


def test_an_upload_on_its_way_does_not_bring_it_back(store, fresh):
    """The object arrives while the purge waits: it is deleted behind it."""
    arrived, go = threading.Event(), threading.Event()

    def hold(request):
        if request.method == "PUT":
            arrived.set()
            go.wait(30)

    server = fresh(**OPEN, **store.flags())
    store.gate = hold
    content = unique(5000)
    with Client(server.address) as client:
        client.write(upload_name(content.hash, 5000), content.chunks())
        assert arrived.wait(30)
        answers = []
        purge = threading.Thread(target=lambda: answers.append(ask(server, "DELETE", f"/cas/{content.hash}")))
        purge.start()
        until(lambda: client.find_missing([digest(content)]) == [digest(content)], "the purge here")
        assert not answers, "the upload still runs"
        go.set()
        purge.join(30)
        assert answers[0][0] == 200 and not store.objects
        assert client.find_missing([digest(content)]) == [digest(content)]


def test_an_answer_without_end_holds_up_no_purge(store, fresh):
    """The object is gone; what the store goes on to say about it is not listened to."""
    server = fresh(**OPEN, **store.flags())
    contents = [unique(700), unique(700)]
    for content in contents:
        store.objects[blob_key(content.hash)] = casblob(content.bytes())
    store.methods, store.fault = ("DELETE",), "endless"
    for content in contents:
        assert ask(server, "DELETE", f"/cas/{content.hash}")[0] == 200
    assert not store.objects


def test_owed_uploads_are_forgotten(store, fresh):
    """What is owed to a sick store is not uploaded once it is purged and the store is well."""
    server = fresh(**OPEN, **store.flags())
    store.methods, store.fault = ("PUT",), 500
    with Client(server.address) as client:
        keys = [store_action(client, "bad") for _ in range(5)]
        kept = store_action(client, "good")
        assert purged(server, "POST", "/admin/purge?instance=bad") == 5
    # Before the start: what fails in its first tries waits 15 s and more.
    store.fault = None
    server.restart(crash=True)
    until(lambda: action_key(kept.hash) in store.objects, "the upload of what was not purged")
    assert not any(action_key(key.hash) in store.objects for key in keys)


@pytest.mark.parametrize("crash", [False, True], ids=["running", "killed"])
def test_a_store_does_not_bring_results_back(store, fresh, crash):
    """By instance and by time objects stay in the store, and are not read any more: also those that were never here, or not
    any more. What is stored later is read again."""
    flags = OPEN | store.flags()
    server, other = fresh(**flags), fresh(**flags)
    with Client(server.address) as client, Client(other.address) as elsewhere:
        bad, good = [store_action(client, "bad") for _ in range(5)], [store_action(client, "good") for _ in range(5)]
        remote = [store_action(elsewhere, "bad") for _ in range(5)]
        for key in bad + good + remote:
            until(lambda: action_key(key.hash) in store.objects, "the uploads")
        # As a bazel-remote leaves it: nothing says whose it is.
        nameless = digest_of(unique(30).bytes())
        store.objects[action_key(nameless.hash)] = message("ActionResult")(exit_code=1).SerializeToString()
        assert purged(server, "POST", "/admin/purge?instance=bad") == 5
    if crash:
        server.restart(crash=True)
    with Client(server.address) as client, Client(other.address) as elsewhere:
        assert not any(has(client, key, "bad") for key in [*bad, *remote, nameless])
        assert all(has(client, key, "good") for key in good)
        assert all(has(elsewhere, key, "bad") for key in remote), "it has purged nothing"
        # Time is counted in seconds, and clocks may differ by two.
        time.sleep(3.1)
        later = store_action(elsewhere, "bad")
        until(lambda: action_key(later.hash) in store.objects, "the upload")
        assert has(client, later, "bad")
        assert purged(server, "POST", "/admin/purge?written_since=1h") == 6
        assert not any(has(client, key, "good") for key in [*good, later])


class HeldHalfway:
    """An object whose second half the store sends after `go`, whatever has become of the object meanwhile."""

    def __init__(self, data: bytes):
        self.data, self.size, self.go = data, len(data), threading.Event()

    def chunks(self):
        yield self.data[: self.size // 2]
        self.go.wait(30)
        yield self.data[self.size // 2 :]


@pytest.mark.parametrize("by", ["the blob's hash", "the action's hash", "all actions"])
def test_what_is_on_its_way_here_does_not_stay(store, fresh, by):
    """A read-through that has begun before the purge ends as a miss and leaves nothing, though all of the object comes."""
    server = fresh(**OPEN, **store.flags())
    content = unique(5000)
    is_blob = by == "the blob's hash"
    name = blob_key(content.hash) if is_blob else action_key(content.hash)
    result = message("ActionResult")(exit_code=1, stdout_raw=b"x" * 1000).SerializeToString()
    held = store.objects[name] = HeldHalfway(casblob(content.bytes()) if is_blob else result)

    def reads() -> bool:
        with Client(server.address) as reader:
            if not is_blob:
                return has(reader, digest(content))
            try:
                return reader.read(blob_name(content.hash, content.size)) == content.bytes()
            except Exception as error:
                assert error.code() == Code.NOT_FOUND, error
                return False

    found = []
    reading = threading.Thread(target=lambda: found.append(reads()))
    reading.start()
    until(lambda: store.count("GET", name) > 0, "the read-through")
    if by == "all actions":
        purged(server, "POST", "/admin/purge?all=true")
    else:
        purged(server, "DELETE", f"/{'cas' if is_blob else 'ac'}/{content.hash}")
    held.go.set()
    reading.join(30)
    assert found == [False]
    store.objects.clear()
    with Client(server.address) as client:
        if is_blob:
            assert client.find_missing([digest(content)]) == [digest(content)]
        else:
            assert not has(client, digest(content))


def test_what_comes_back_while_the_store_deletes_does_not_stay(store, fresh):
    """Until its object is gone a blob may be read through, and lands in the cache: it goes from there once more."""
    arrived, go = threading.Event(), threading.Event()

    def hold(request):
        if request.method == "DELETE":
            arrived.set()
            go.wait(30)

    server = fresh(**OPEN, **store.flags())
    store.gate = hold
    content = unique(5000)
    store.objects[blob_key(content.hash)] = casblob(content.bytes())
    answers = []
    purge = threading.Thread(target=lambda: answers.append(ask(server, "DELETE", f"/cas/{content.hash}")))
    purge.start()
    assert arrived.wait(30)
    with Client(server.address) as client:
        assert client.read(blob_name(content.hash, content.size)) == content.bytes()
        go.set()
        purge.join(30)
        assert answers[0][0] == 200 and not store.objects
        assert client.find_missing([digest(content)]) == [digest(content)]


def test_values_that_are_no_results(fresh):
    """What HTTP clients store unchecked is purged by its hash and instance, and with all of an instance."""
    server = fresh(**OPEN, disable_http_ac_validation="true", enable_ac_key_instance_mangling="true")
    one, two = unique(31).hash, unique(32).hash
    paths = [f"/{instance}/ac/{hash}" for instance in ("main", "other") for hash in (one, two)]

    def found() -> list[int]:
        return [ask(server, "GET", path)[0] for path in paths]

    for path in paths:
        assert ask(server, "PUT", path, path.encode())[0] == 200
    assert purged(server, "DELETE", paths[0]) == 1 and purged(server, "DELETE", paths[0]) == 0
    assert found() == [404, 200, 200, 200]
    assert purged(server, "POST", "/admin/purge?instance=other") == 2
    server.restart(crash=True)
    assert found() == [404, 200, 404, 404]


def test_a_damaged_list_of_purges_is_an_error(fresh):
    server = fresh(**OPEN)
    purged(server, "POST", "/admin/purge?all=true")
    server.stop()
    (server.directory / "purges.v1").write_text("something else")
    with pytest.raises(StartError, match="purges.v1 is damaged"):
        server.start()
