"""Goal: clients that wait for a sick store take no memory from those who do not need it.
Method: a server with little memory, a silent store, and more cold reads than there is memory for replies; then reads of what
is here."""

import concurrent.futures
import contextlib
import os
import time

import grpc
import pytest

from bucket import blob_key, casblob
from content import sha256, unique
from reapi import Client, blob_name, digest, digest_of, message, upload_name
from wait import until

MIB = 1 << 20
READERS = 150


KINDS = ["blobs", "actions", "batches", "trees", "below a root", "checks of trees", "checks of roots", "inlined"]


def absent(size: int):
    """The digest of what nobody has. Why no content: it takes long to make, and the calls are to be made at once."""
    return message("Digest")(hash=sha256(os.urandom(16)), size_bytes=size)


def stored_result(client: Client, store, kind: str, number: int):
    """An action whose result is here, and something that it names is not."""
    action, result = digest_of(b"%d: %s" % (number, kind.encode())), message("ActionResult")()
    content = unique(2 * MIB if kind == "inlined" else 700)
    # It is known to be in the store, which does not give it.
    store.objects[blob_key(content.hash)] = casblob(content.bytes())
    if kind == "inlined":
        result.stdout_digest.CopyFrom(digest(content))
    elif kind == "checks of trees":
        result.output_directories.add(path="out", tree_digest=digest(content))
    else:
        result.output_directories.add(path="out", root_directory_digest=digest(content))
    client.update_action(action, result)
    return action


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_for_a_store_holds_no_memory(store, fresh, kind):
    # Why so long a wait for existence checks: the last of these calls may begin seconds after the first.
    server = fresh(memory_limit="300M", cores="2", **store.flags() | {"s3.existence_timeout": "20s"})
    local = unique(MIB)
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        clients = [stack.enter_context(Client(server.address)) for _ in range(6)]
        clients[0].write(upload_name(local.hash, local.size), local.chunks())
        actions, roots = [], []
        for number in range(READERS):
            if kind.startswith("checks") or kind == "inlined":
                actions.append(stored_result(clients[0], store, kind, number))
            if kind == "below a root":
                directory = message("Directory")()
                directory.directories.add(name="below", digest=absent(300))
                roots.append(clients[0].put(directory.SerializeToString()))
        store.fault, store.methods = "silent", ("GET",)

        def cold(number: int) -> None:
            client = clients[number % 6]
            with contextlib.suppress(grpc.RpcError):
                if kind == "blobs":
                    client.read(blob_name(absent(MIB).hash, MIB))
                elif kind == "batches":
                    client.batch_read([absent(MIB) for _ in range(3)])
                elif kind == "trees":
                    client.tree_pages(absent(500))
                elif kind == "below a root":
                    client.tree_pages(roots[number])
                elif actions:
                    client.get_action(actions[number], inline_stdout=True)
                else:
                    client.get_action(digest_of(b"action %d" % number))

        calls = [pool.submit(cold, number) for number in range(READERS)]
        # Checks that walk Directories take turns, eight on each core.
        enough = 8 if kind == "checks of roots" else 16
        until(lambda: store.in_flight >= enough, "cold reads that wait")
        begun = time.monotonic()
        assert clients[0].read(blob_name(local.hash, local.size)) == local.bytes()
        waited = time.monotonic() - begun
        assert not any(call.done() for call in calls), "the cold reads should still wait"
        store.heal()
        for call in calls:
            call.result(60)
    assert waited < 4, f"a read of what is here waited {waited:.1f} s"
