"""Goal: rules of time, of access and of single stores that show only between a whole server and a store.
Method: one server in front of a store of our own; times that are too long to wait for are set short by their flags."""

import http.client
import re
import signal
import time

import pytest

import credentials
from bucket import blob_key, casblob, from_casblob
from content import unique
from fault_s3 import ERROR
from reapi import Client, Code, blob_name, digest, fails, upload_name
from server import free_port
from test_s3_backends import AUTH, PREFIX, SECRET, TRUST
from wait import until

MIB = 1 << 20


def put_object(store, size: int):
    content = unique(size)
    store.objects[blob_key(content.hash)] = casblob(content.bytes())
    return content


def read(client: Client, content) -> bytes:
    return client.read(blob_name(content.hash, content.size))


def upload(client: Client, content) -> None:
    client.write(upload_name(content.hash, content.size), content.chunks())


@pytest.mark.parametrize("interval, is_kept", [("1s", False), ("-1s", True)])
def test_connections_are_recycled(store, fresh, interval, is_kept):
    """A connection in steady use is given up at its age, so that a change of addresses is seen; or never."""
    server = fresh(cores="1", **store.flags() | {"s3.conn_recycle_interval": interval})
    until(lambda: "the backend answers" in server.log, "the look at the store")
    with Client(server.address) as client:
        read(client, put_object(store, 500))
        before, end = store.accepted, time.monotonic() + 2.5
        while time.monotonic() < end:
            content = put_object(store, 500)
            assert read(client, content) == content.bytes()
        assert (store.accepted == before) == is_kept
        assert store.accepted <= before + 4


def test_read_timeout_changes_at_run_time(store, fresh, tmp_path):
    """A body that is fast enough but never ends: the read is cut at the limit that stands when it begins."""
    file = tmp_path / "config.yaml"
    section = "".join(f"  {name.removeprefix('s3.')}: {value}\n" for name, value in store.flags().items())

    def configure(limit: str) -> None:
        file.write_text(f"s3_proxy:\n{section}  read_timeout: {limit}\n")

    configure("5m")
    server = fresh(config_file=str(file))
    content = unique(64 * MIB)
    store.objects[blob_key(content.hash)] = casblob(content.bytes(), compression=0)
    store.fault, store.trickle = "trickle", MIB
    with Client(server.address) as client, Client(server.address) as other:
        patient = client.read_call(blob_name(content.hash, content.size))
        next(patient)
        configure("2s")
        server.signal(signal.SIGHUP)
        until(lambda: "read_timeout was 5m" in server.log, "the new limit")
        hurried = put_object(store, 64 * MIB)
        store.objects[blob_key(hurried.hash)] = casblob(hurried.bytes(), compression=0)
        begun = time.monotonic()
        with fails(Code.NOT_FOUND):
            read(other, hurried)
        assert 1.5 < time.monotonic() - begun < 8
        # The one that had begun goes on.
        next(patient)
        patient.cancel()


def test_trust_roles_and_one_port(store, fresh, tmp_path):
    """On a port for both protocols, with prefixes and roles: a call needs its tenant, the secret and a role that may."""
    users = [("reader", "r-pass-1"), ("writer", "w-pass-2")]
    (tmp_path / "htpasswd").write_text("".join(f"{user}:{credentials.sha1(password)}\n" for user, password in users))
    (tmp_path / "roles").write_text("read: reader\n")
    address = f"127.0.0.1:{free_port()}"
    server = fresh(
        environment=TRUST,
        grpc_address=address,
        http_address=address,
        htpasswd_file=str(tmp_path / "htpasswd"),
        roles_file=str(tmp_path / "roles"),
        **store.flags(),
    )
    of_reader, of_writer = (("authorization", credentials.basic(*user)) for user in users)
    tenant, secret = (PREFIX, "t/1"), (AUTH, SECRET)
    content = unique(1000)

    def write(*metadata) -> None:
        with Client(server.address) as client:
            client.metadata = list(metadata)
            upload(client, content)

    def ask(method: str, of, body: bytes = b"") -> int:
        connection = http.client.HTTPConnection(address, timeout=30)
        try:
            connection.request(method, f"/cas/{content.hash}", body, dict([of] if of else []))
            reply = connection.getresponse()
            reply.read()
            return reply.status
        finally:
            connection.close()

    for code, metadata in [
        (Code.UNAUTHENTICATED, [secret, tenant]),
        (Code.UNAUTHENTICATED, [of_writer, tenant]),
        (Code.UNAUTHENTICATED, [("authorization", credentials.basic("writer", "guess")), secret, tenant]),
        (Code.INVALID_ARGUMENT, [of_writer, secret]),
        (Code.PERMISSION_DENIED, [of_reader, secret, tenant]),
    ]:
        with fails(code):
            write(*metadata)
    assert ask("PUT", None, content.bytes()) == 401 and ask("PUT", of_reader, content.bytes()) == 403
    assert store.count("PUT") == 0
    write(of_writer, secret, tenant)
    until(lambda: f"t/1/{blob_key(content.hash)}" in store.objects, "the tenant's upload")
    with Client(server.address) as client:
        client.metadata = [of_reader, secret, tenant]
        assert read(client, content) == content.bytes()
        client.metadata = [of_reader, secret, (PREFIX, "t/2")]
        with fails(Code.NOT_FOUND):
            read(client, content)
    # HTTP has no tenant: what it sees is what stands below no prefix.
    assert ask("GET", of_reader) == 404
    assert ask("PUT", of_writer, content.bytes()) == 200
    until(lambda: blob_key(content.hash) in store.objects, "the upload without a prefix")
    assert ask("GET", of_reader) == 200 and ask("GET", None) == 401


def test_a_store_like_r2(store, fresh):
    """It has one region, named `auto`, says so to who signs for another, wants parts of one size, and knows neither chunked
    signatures nor checksums of its own kind."""
    plain, broken = store._answer, []

    def answer(connection, request):
        headers = request.headers
        scope = re.search(r"Credential=AK/\d{8}/([^/]*)/s3/aws4_request", headers.get("authorization", ""))
        if scope is None or scope.group(1) != "auto":
            text = b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>x</Message><Region>auto</Region></Error>"
            return store._send(connection, 400, text, request)
        if headers.get("x-amz-content-sha256", "").startswith("STREAMING-") or "x-amz-trailer" in headers:
            broken.append(headers)
            return store._send(connection, 501, ERROR.format("NotImplemented").encode(), request)
        if request.method == "POST" and "uploadId" in request.path:
            (parts,) = store.parts.values()
            if len({len(parts[number]) for number in sorted(parts)[:-1]}) > 1:
                return store._send(connection, 400, ERROR.format("InvalidPart").encode(), request)
        return plain(connection, request)

    store._answer = answer
    server = fresh(**store.flags() | {"s3.multipart_from": "5M"})
    small, large, there = unique(4000), unique(17 * MIB), put_object(store, 3000)
    with Client(server.address) as client:
        assert read(client, there) == there.bytes()
        assert not client.missing(digest(put_object(store, 700)))
        for content in [small, large]:
            upload(client, content)
            until(lambda: blob_key(content.hash) in store.objects, "the upload")
            assert from_casblob(store.objects[blob_key(content.hash)]) == content.bytes()
    assert not broken and "in another region" in server.log


def test_credentials_that_cannot_be_sent(store, fresh):
    """A token with a line break in it: misses, and a line in the log that says why."""
    server = fresh(**store.flags() | {"s3.session_token": "two\nlines"})
    content = put_object(store, 300)
    with Client(server.address) as client:
        for _ in range(8):
            with fails(Code.NOT_FOUND):
                read(client, content)
        upload(client, unique(400))
    assert "characters that no header may have" in server.log
    server.stop()
