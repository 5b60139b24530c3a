"""Goal: what was stored reaches the store, whatever happens in between; what cannot is counted.
Method: kills at any moment under load, each followed by a look at what outlived them; and a cache that is too small for
all that is owed."""

import contextlib
import signal
import threading

import grpc
import pytest

from bucket import action_key, blob_key
from content import unique
from reapi import Client, digest, digest_of, message, upload_name
from test_drain import held_upload
from test_metrics import scrape
from wait import until

KIB, MIB = 1 << 10, 1 << 20
WRITERS = 6


def series(server, name: str, **labels) -> float:
    text = ",".join(f'{label}="{value}"' for label, value in sorted((labels | {"backend": "default"}).items()))
    return scrape(server).get(f"bazel_remote_s3_{name}{{{text}}}", 0.0)


def is_idle(server) -> bool:
    return series(server, "owed_uploads") == 0 and series(server, "upload_queue_depth") == 0


@pytest.mark.parametrize("fault", [None, "silent", "refused"])
def test_a_kill_at_any_moment(store, fresh, fault):
    """Each upload that was acknowledged at a kill -9 reaches the store; and so does whatever outlived it unacknowledged, as
    FindMissing calls that present from then on."""
    server = fresh(http_address="127.0.0.1:0", ack="flushed", **store.flags())
    until(lambda: "the backend answers" in server.log, "the look at the store")
    begun, acknowledged, lock = {}, set(), threading.Lock()

    def write(client: Client, number: int) -> None:
        content = unique([700, 40 * KIB, 300 * KIB][number % 3])
        action = digest_of(b"%d of %s" % (number, content.hash.encode()))
        with lock:
            begun[blob_key(content.hash)] = content
        client.write(upload_name(content.hash, content.size), content.chunks())
        with lock:
            acknowledged.add(blob_key(content.hash))
        client.update_action(action, message("ActionResult")(exit_code=number))
        with lock:
            acknowledged.add(action_key(action.hash))

    def keep_writing(stop: threading.Event) -> None:
        with Client(server.address) as client, contextlib.suppress(grpc.RpcError):
            number = 0
            while not stop.is_set():
                write(client, number)
                number += 1

    for round in range(3):
        if fault == "refused":
            store.refuse()
        else:
            store.fault, store.methods = fault, ("PUT",)
        stop, before = threading.Event(), len(acknowledged)
        writers = [threading.Thread(target=keep_writing, args=(stop,)) for _ in range(WRITERS)]
        for writer in writers:
            writer.start()
        until(lambda: len(acknowledged) > before + 30 + 17 * round, "some uploads")
        server.kill()
        stop.set()
        for writer in writers:
            writer.join()
        store.heal()
        if fault == "refused":
            store.listen()
        server.start()
        for key in sorted(acknowledged):
            until(lambda: key in store.objects, "an upload of the last run")
        until(lambda: is_idle(server), "nothing is left to do")
    server.restart(**{"s3.bucket": None})
    with Client(server.address) as client:
        missing = {found.hash for found in client.find_missing([digest(content) for content in begun.values()])}
    orphans = [key for key, content in begun.items() if content.hash not in missing and key not in store.objects]
    assert not orphans, f"{len(orphans)} of {len(begun)} blobs are here, and the store will never have them"


def test_what_is_owed_is_kept(store, fresh):
    """Records of owed uploads are evicted after those of their age that are not owed; what goes in the end is counted."""
    server = fresh(
        http_address="127.0.0.1:0", max_size="0.0625", ram_cache="0", storage_mode="uncompressed", **store.flags()
    )
    made, owed = [[unique(100 * KIB) for _ in range(30)] for _ in range(2)]

    def write(contents) -> None:
        with Client(server.address) as client:
            for content in contents:
                client.write(upload_name(content.hash, content.size), content.chunks())

    def fill(mib: int) -> None:
        """Without the store, so that fillers are not owed too."""
        server.restart(**{"s3.bucket": None})
        write(unique(2 * MIB) for _ in range(mib // 2))

    def here(contents) -> int:
        with Client(server.address) as client:
            return len(contents) - len(client.find_missing([digest(content) for content in contents]))

    write(made)
    until(lambda: series(server, "upload_outcomes_total", status="created", reason="") == len(made), "the uploads")
    store.refuse()
    write(owed)
    until(lambda: series(server, "owed_uploads") == len(owed), "they are owed")
    fill(16)
    # A start marks what is owed as used, and so does each minute.
    server.restart(**store.flags())
    until(lambda: series(server, "owed_uploads") == len(owed), "they are owed still")
    fill(36)
    assert here(made) < len(made), "the pressure was not enough"
    assert here(owed) == len(owed)
    fill(120)
    left = here(owed)
    assert left < len(owed), "the pressure was not enough"
    store.listen()
    server.restart(**store.flags())
    until(lambda: is_idle(server), "all is done that can be")
    assert series(server, "upload_outcomes_total", status="created", reason="") == left
    assert series(server, "upload_outcomes_total", status="error", reason="evicted") == len(owed) - left
    assert sum(blob_key(content.hash, raw=True) in store.objects for content in owed) == left


def test_a_write_that_ends_last_is_owed(store, fresh):
    """What is stored while the server stops reaches the store after the next start, also when core 0, which has the ledger,
    has nothing to wait for: its connection is idle, the other core's holds an upload."""
    store.refuse()
    server = fresh(http_address="127.0.0.1:0", **store.flags())
    earlier, last = unique(700), unique(6 * MIB)

    def connections(core: int) -> float:
        return scrape(server).get(f'bazel_remote_connections{{core="{core}",protocol="grpc"}}', 0.0)

    with Client(server.address) as one, Client(server.address) as other:
        one.write(upload_name(earlier.hash, earlier.size), earlier.chunks())
        until(lambda: connections(0) + connections(1) == 1, "there is one connection")
        finish, upload = held_upload(other if connections(0) else one, last, 3)
        other.capabilities()
        server.signal(signal.SIGTERM)
        until(lambda: "told to stop" in server.log, "it stops")
        finish()
        assert upload.result(timeout=20).committed_size == last.size
    assert server.wait(20) == 0
    store.listen()
    server.start()
    for content in (earlier, last):
        until(lambda: blob_key(content.hash) in store.objects, "an upload of the last run")
