"""Goal: a store's name that moves to another address is followed.
Method: a server that finds its store by a hosts file of the test's own."""

from bucket import blob_key, casblob
from content import unique
from fault_s3 import FaultStore
from reapi import Client, blob_name
from test_s3_owed import series
from wait import until


def test_a_name_that_moves(fresh, tmp_path):
    """A store's name gets another address while its connections are in steady use: when they are old, and so is what was
    last found for the name, all goes there. That is 30 s, for which nothing here can be set."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 store.test\n")
    before = FaultStore()
    after = FaultStore(host="127.0.0.2", port=before.port)
    try:
        flags = before.flags() | {"s3.endpoint": f"store.test:{before.port}", "s3.conn_recycle_interval": "2s"}
        server = fresh(cores="1", hosts=hosts, http_address="127.0.0.1:0", **flags)

        def read(*stores) -> None:
            content = unique(500)
            for store in stores:
                store.objects[blob_key(content.hash)] = casblob(content.bytes())
            assert client.read(blob_name(content.hash, content.size)) == content.bytes()

        with Client(server.address) as client:
            read(before)
            # Why not replaced: the server has this very file for its own.
            hosts.write_text("127.0.0.2 store.test\n")

            def has_moved() -> bool:
                read(before, after)
                return after.count("GET") > 0

            until(has_moved, "a request at the new address", timeout_s=60)
            asked = before.count("GET")
            for _ in range(20):
                read(after)
            assert before.count("GET") == asked
            assert series(server, "failures_total") == 0
    finally:
        before.close()
        after.close()
