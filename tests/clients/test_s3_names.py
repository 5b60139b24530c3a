"""Goal: what hangs on a store's name: Google's way of speaking, and a name that moves to another address.
Method: servers that find their stores by a hosts file of the test's own."""

import contextlib
import hashlib
import hmac
import re
import urllib.parse

import pytest

from bucket import action_key, blob_key, casblob, from_casblob
from content import unique
from fault_s3 import ERROR, BlackHole, FaultStore
from reapi import Client, blob_name, digest, digest_of, message, upload_name
from test_s3_owed import is_idle, series
from wait import until

KIB, MIB = 1 << 10, 1 << 20


def upload(client: Client, content) -> None:
    client.write(upload_name(content.hash, content.size), content.chunks())


def put_object(store, size: int):
    content = unique(size)
    store.objects[blob_key(content.hash)] = casblob(content.bytes())
    return content


def goog4_signature(request, secret: str) -> str:
    """What Google's own V4 signature of a request is, by its documentation."""
    found = re.fullmatch(
        r"GOOG4-HMAC-SHA256 Credential=AK/(\d{8})/(\w+)/storage/goog4_request,SignedHeaders=([^,]*),Signature=\w{64}",
        request.headers["authorization"],
    )
    day, region, names = found.groups()
    path, _, query = request.path.partition("?")
    lines = "".join(f"{name}:{request.headers[name]}\n" for name in names.split(";"))
    payload = request.headers["x-goog-content-sha256"]
    canonical = f"{request.method}\n{path}\n{query}\n{lines}\n{names}\n{payload}"
    scope = f"{day}/{region}/storage/goog4_request"
    date = request.headers["x-goog-date"]
    text = f"GOOG4-HMAC-SHA256\n{date}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"GOOG4{secret}".encode()
    for part in [day, region, "storage", "goog4_request"]:
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


class GoogleStore(FaultStore):
    """Speaks as Google's XML API does, and takes nothing else. Source: its reference of headers and of errors."""

    # Creations that say `x-goog-if-generation-match: 0` are refused: as a store that only stands for Google.
    knows_conditions = True

    def key(self, path: str) -> str:
        # The bucket stands in the host's name.
        return path.split("?")[0].removeprefix("/")

    def _answer(self, connection, request) -> bool:
        def refuse(status: int, code: str) -> bool:
            return self._send(connection, status, ERROR.format(code).encode(), request)

        headers = request.headers
        condition = headers.get("x-goog-if-generation-match")
        if any(name.startswith("x-amz-") for name in headers):
            return refuse(400, "ExcessHeaderValues")
        if not headers["authorization"].endswith(f"Signature={goog4_signature(request, 'SK')}"):
            return refuse(403, "SignatureDoesNotMatch")
        query = urllib.parse.parse_qs(request.path.partition("?")[2], keep_blank_values=True)
        if "uploads" in query or "uploadId" in query:
            return refuse(400, "InvalidArgument")
        if request.method == "PUT":
            # Conditions on ETags are for reads.
            if "if-none-match" in headers or (condition is not None and not self.knows_conditions):
                return refuse(400, "InvalidArgument")
            key = self.key(request.path)
            if condition == "0" and key in self.objects:
                return refuse(412, "PreconditionFailed")
            answered = super()._answer(connection, request)
            self.kept.get(key, {}).update({n: v for n, v in headers.items() if n.startswith("x-goog-meta-")})
            return answered
        return super()._answer(connection, request)


@pytest.mark.parametrize("knows_conditions", [True, False])
def test_a_store_like_googles(fresh, tmp_path, knows_conditions):
    """Round trips of all kinds; what is there is not written again, as far as the store can tell; no parts."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 storage.googleapis.com bucket.storage.googleapis.com\n")
    store = GoogleStore()
    store.knows_conditions = knows_conditions
    try:
        flags = store.flags() | {"s3.endpoint": f"storage.googleapis.com:{store.port}", "s3.multipart_from": "5M"}
        server = fresh(hosts=hosts, http_address="127.0.0.1:0", **flags)
        small, large, there = unique(4 * KIB), unique(12 * MIB), put_object(store, 3 * KIB)
        action = digest_of(b"for Google")
        with Client(server.address) as client:
            assert client.read(blob_name(there.hash, there.size)) == there.bytes()
            assert not client.missing(digest(put_object(store, 700)))
            for content in [small, large]:
                upload(client, content)
                until(lambda: blob_key(content.hash) in store.objects, "the upload", timeout_s=60)
                assert from_casblob(store.objects[blob_key(content.hash)]) == content.bytes()
            client.update_action(action, message("ActionResult")(exit_code=5))
            until(lambda: action_key(action.hash) in store.objects, "the result")
            again = put_object(store, 900)
            upload(client, again)
            until(lambda: is_idle(server), "the end of the uploads")
        outcome = {"status": "already_exists", "reason": "precondition_failed"}
        assert series(server, "upload_outcomes_total", **outcome) == (1 if knows_conditions else 0)
        assert any(name.startswith("x-goog-meta-") for name in store.kept[action_key(action.hash)])
        assert ("does not know conditional uploads" in server.log) != knows_conditions
        assert series(server, "owed_uploads") == 0
        other = fresh(hosts=hosts, **flags)
        with Client(other.address) as client:
            assert client.get_action(action).exit_code == 5
    finally:
        store.close()


def test_a_name_that_moves(fresh, tmp_path):
    """A store's name gets another address while its connections are in steady use: within their age all goes there."""
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

            until(has_moved, "a request at the new address")
            asked = before.count("GET")
            for _ in range(20):
                read(after)
            assert before.count("GET") == asked
            assert series(server, "failures_total") == 0
    finally:
        before.close()
        after.close()


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_name_with_a_dead_address(fresh, tmp_path, is_silent):
    """One of a name's addresses refuses connections, or answers none: whichever a connection begins with, no read misses,
    and nothing that the store has is called missing."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 store.test\n127.0.0.2 store.test\n")
    with contextlib.ExitStack() as stack:
        store = FaultStore()
        stack.callback(store.close)
        if is_silent:
            stack.callback(BlackHole(store.port, "127.0.0.2").close)
        server = fresh(hosts=hosts, http_address="127.0.0.1:0", **store.flags() | {"s3.endpoint": f"store.test:{store.port}"})
        with Client(server.address) as client:
            for _ in range(8):
                # Two, so that each address has its turn.
                for _ in range(2):
                    assert not client.missing(digest(put_object(store, 500)))
                    store.drop_connections()
                content = put_object(store, 500)
                assert client.read(blob_name(content.hash, content.size)) == content.bytes()
                store.drop_connections()
        assert series(server, "failures_total") == 0
