"""Goal: gRPC and HTTP over TLS, with and without certificates of clients, on one port or two; certificates change while the
server runs; nobody who holds up a handshake holds up others.
Method: grpcio, curl and Python's ssl against certificates that an authority of the test signs."""

import contextlib
import http.client
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import time

import grpc
import pytest

import credentials
from content import unique
from metrics import of_all_cores
from reapi import BYTE_STREAM, CAPABILITIES, Client, Code, blob_name, fails, message, upload_name
from server import Server, StartError, free_port, scratch
from wait import until

CURL_S = 30


class Files:
    """What one authority has signed."""

    def __init__(self, home: pathlib.Path):
        self.home = home
        self.authority = credentials.Authority(home)
        self.stranger = credentials.Authority(home, "stranger")
        self.server = self.authority.sign("server", "/CN=cache")
        self.clients = {
            "ci": self.authority.sign("ci", "/O=Org/CN=ci agent", "DNS:ci.example"),
            "viewer": self.authority.sign("viewer", "/O=Org", "URI:spiffe://org/viewer"),
            "boss": self.authority.sign("boss", "/CN=boss", "DNS:boss.example"),
            "stranger": self.stranger.sign("unknown", "/CN=boss", "DNS:boss.example"),
        }
        self.roles = home / "roles"
        self.roles.write_text("read: cert/spiffe://org/viewer\nadmin: cert/boss\n")

    @property
    def flags(self) -> dict[str, str]:
        certificate, key = self.server
        return {"tls_cert_file": str(certificate), "tls_key_file": str(key), "http_address": "127.0.0.1:0"}

    @property
    def mutual(self) -> dict[str, str]:
        return self.flags | {"tls_ca_file": str(self.authority.certificate), "roles_file": str(self.roles)}

    def channel(self, name: str | None = None) -> grpc.ChannelCredentials:
        root = self.authority.certificate.read_bytes()
        if name is None:
            return grpc.ssl_channel_credentials(root)
        certificate, key = self.clients[name]
        return grpc.ssl_channel_credentials(root, key.read_bytes(), certificate.read_bytes())

    def context(self, name: str | None = None, alpn: list[str] | None = None) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=str(self.authority.certificate))
        if name is not None:
            made.load_cert_chain(*map(str, self.clients[name]))
        if alpn is not None:
            made.set_alpn_protocols(alpn)
        return made


@pytest.fixture(scope="module")
def files():
    home = scratch("tls")
    yield Files(home)
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def server(files):
    with Server(**files.flags) as running:
        yield running


@pytest.fixture(scope="module")
def mutual(files):
    with Server(**files.mutual) as running:
        yield running


def connected(server: Server, files: Files, name: str | None = None) -> Client:
    return Client(f"localhost:{server.port}", credentials=files.channel(name))


def ask(port: int, context: ssl.SSLContext, method: str, path: str, body=None):
    with contextlib.closing(http.client.HTTPSConnection("localhost", port, timeout=CURL_S, context=context)) as connection:
        connection.request(method, path, body)
        reply = connection.getresponse()
        return reply.status, reply.read()


def curl(*arguments: str) -> tuple[int, str]:
    """The HTTP status and version."""
    command = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code} %{http_version}", "-m", str(CURL_S), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * CURL_S)
    assert done.returncode == 0, done.stderr
    status, version = done.stdout.split()
    return int(status), version


@pytest.mark.parametrize("size", [0, 10, 300_000, 20 << 20])
def test_blobs_go_both_ways(server, files, size):
    content = unique(size)
    with connected(server, files) as client:
        assert client.write(upload_name(content.hash, size), content.chunks()) == size
        assert client.read(blob_name(content.hash, size)) == content.bytes()
    assert ask(server.http_port, files.context(), "GET", f"/cas/{content.hash}") == (200, content.bytes())
    other = unique(size + 1)
    assert ask(server.http_port, files.context(), "PUT", f"/cas/{other.hash}", other.bytes())[0] == 200
    with connected(server, files) as client:
        assert client.read(blob_name(other.hash, size + 1)) == other.bytes()


def test_what_is_not_tls_is_refused(server, files):
    with Client(server.address, deadline_s=5) as client, fails(Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
        client.capabilities()
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=20) as plain:
        plain.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")
    distrusting = ssl.create_default_context()
    with pytest.raises(ssl.SSLError):
        ask(server.http_port, distrusting, "GET", "/status")
    with connected(server, files) as client:
        client.capabilities()


@pytest.mark.parametrize("flags, oldest", [({}, "TLSv1.2"), ({"min_tls_version": "1.0"}, "TLSv1.2"), ({"min_tls_version": "1.3"}, "TLSv1.3")])
def test_the_oldest_version(fresh, files, flags, oldest):
    server = fresh(**files.flags, **flags)
    assert ("the oldest TLS that is spoken is 1.2" in server.log) == (flags.get("min_tls_version") == "1.0")
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = files.context()
        context.minimum_version = context.maximum_version = version
        if version.name.replace("_", ".") < oldest:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                ask(server.http_port, context, "GET", "/status")
        else:
            assert ask(server.http_port, context, "GET", "/status")[0] == 200


def test_certificates_of_clients(mutual, files):
    content = unique(70_000)
    name = upload_name(content.hash, content.size)
    for who, role in [("ci", "write"), ("boss", "admin")]:
        with connected(mutual, files, who) as client:
            assert client.capabilities().cache_capabilities.action_cache_update_capabilities.update_enabled, role
            client.write(name, content.chunks())
    with connected(mutual, files, "viewer") as client:
        assert not client.capabilities().cache_capabilities.action_cache_update_capabilities.update_enabled
        assert client.read(blob_name(content.hash, content.size)) == content.bytes()
        with fails(Code.PERMISSION_DENIED):
            client.put(unique(10).bytes())
    with connected(mutual, files) as client:
        client.unary("/grpc.health.v1.Health/Check", b"", None)
        with fails(Code.UNAUTHENTICATED):
            client.capabilities()
        with fails(Code.UNAUTHENTICATED):
            client.read(blob_name(content.hash, content.size))
    with Client(f"localhost:{mutual.port}", deadline_s=5, credentials=files.channel("stranger")) as client:
        with fails(Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
            client.capabilities()

    path = f"/cas/{content.hash}"
    assert ask(mutual.http_port, files.context("ci"), "GET", path)[0] == 200
    assert ask(mutual.http_port, files.context("viewer"), "GET", path)[0] == 200
    assert ask(mutual.http_port, files.context("viewer"), "PUT", path, content.bytes())[0] == 403
    assert ask(mutual.http_port, files.context("boss"), "PUT", path, content.bytes())[0] == 200
    assert ask(mutual.http_port, files.context(), "GET", path)[0] == 401
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(mutual.http_port, files.context("stranger"), "GET", path)


def test_certificates_and_passwords_together(fresh, files):
    # Either is enough; the higher role counts.
    passwords = files.home / "htpasswd"
    passwords.write_text(f"u:{credentials.sha1('pass-word-1')}\n")
    server = fresh(**files.mutual, htpasswd_file=str(passwords))
    header = [("authorization", credentials.basic("u", "pass-word-1"))]
    for who, metadata, may in [(None, header, True), ("viewer", [], False), ("viewer", header, True), ("ci", [], True)]:
        with connected(server, files, who) as client:
            client.metadata += metadata
            update = client.capabilities().cache_capabilities.action_cache_update_capabilities.update_enabled
            assert update == may, (who, metadata)
            content = unique(10)
            if may:
                client.put(content.bytes())
            else:
                with fails(Code.PERMISSION_DENIED):
                    client.put(content.bytes())


def scrape(server: Server, files: Files) -> dict:
    return of_all_cores(lambda: ask(server.http_port, files.context(), "GET", "/metrics")[1].decode())


def replace(source: pathlib.Path, path: pathlib.Path) -> None:
    """At once: a server that looks meanwhile sees the one or the other."""
    shutil.copy(source, path.parent / "next")
    os.replace(path.parent / "next", path)


def test_a_new_certificate_without_a_restart(fresh, files):
    mine = scratch("renewed")
    try:
        for path, name in zip(files.server, ("c.pem", "k.pem")):
            shutil.copy(path, mine / name)
        server = fresh(tls_cert_file=str(mine / "c.pem"), tls_key_file=str(mine / "k.pem"), http_address="127.0.0.1:0")

        def presented() -> str:
            with socket.create_connection(("localhost", server.http_port), timeout=20) as plain:
                with files.context().wrap_socket(plain, server_hostname="localhost") as connection:
                    return dict(field[0] for field in connection.getpeercert()["subject"])["commonName"]

        with connected(server, files) as client:
            client.capabilities()
            assert presented() == "cache"
            certificate, key = files.authority.sign("second", "/CN=renewed")
            # First the one, then the other: in between they do not go together, and the old ones stay.
            replace(certificate, mine / "c.pem")
            until(lambda: "those of before stay" in server.log, "the wrong pair is seen", 30)
            assert presented() == "cache"
            assert "--tls_cert_file" in server.log and "Give the key that the certificate is for" in server.log
            replace(key, mine / "k.pem")
            until(lambda: presented() == "renewed", "the new certificate is shown", 30)
            # The connection of before goes on.
            client.capabilities()
        found = scrape(server, files)
        assert 86_400 < found["bazel_remote_tls_certificate_not_after_seconds"] - time.time() < 3 * 86_400
        assert found['bazel_remote_reloads_total{result="done",what="certificates"}'] == 1
        assert found['bazel_remote_reloads_total{result="failed",what="certificates"}'] == 1
    finally:
        shutil.rmtree(mine)


def test_handshakes_that_stand_still_hold_up_nobody(fresh, files):
    server = fresh(**files.flags, cores="1")
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(200)]
    try:
        silent[0].sendall(b"\x16\x03\x01\x02")
        for _ in range(20):
            with connected(server, files) as client:
                client.capabilities()
        # And they end.
        assert silent[0].recv(1) == b"" and silent[-1].recv(1) == b""
        until(lambda: scrape(server, files)['bazel_remote_tls_handshakes_total{result="late"}'] == 200, "all are counted")
    finally:
        for one in silent:
            one.close()


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"tls_key_file": None}, "--tls_cert_file and --tls_key_file go together"),
        ({"tls_cert_file": "no/such/file"}, "--tls_cert_file no/such/file"),
        ({"tls_key_file": "KEY OF ANOTHER"}, "Give the key that the certificate is for"),
        ({"tls_key_file": "CERTIFICATE"}, "--tls_key_file"),
        ({"tls_cert_file": "EMPTY"}, "there is no certificate in it"),
        ({"tls_ca_file": "EMPTY"}, "there is no certificate in it"),
        ({"tls_cert_file": None, "tls_key_file": None, "tls_ca_file": "CERTIFICATE"}, "--tls_ca_file needs --tls_cert_file"),
    ],
)
def test_a_start_with_wrong_files_names_them(fresh, files, change, problem):
    empty = files.home / "empty"
    empty.write_text("nothing\n")
    named = {"KEY OF ANOTHER": files.clients["ci"][1], "CERTIFICATE": files.server[0], "EMPTY": empty}
    with pytest.raises(StartError) as error:
        fresh(**files.flags | {flag: value and str(named.get(value, value)) for flag, value in change.items()})
    last = error.value.log.strip().splitlines()[-1]
    assert problem in last and error.value.code == 1, last


@pytest.fixture(scope="module", params=["clear", "tls"])
def shared(request, files):
    """A server with one port for both, a way to a gRPC client, and a URL with what curl needs for it."""
    address = f"127.0.0.1:{free_port()}"
    flags = {"grpc_address": address, "http_address": address}
    is_tls = request.param == "tls"
    with Server(**(files.flags if is_tls else {}) | flags) as server:
        assert server.port == server.http_port
        connect = (lambda: connected(server, files)) if is_tls else (lambda: Client(server.address))
        scheme = ["--cacert", str(files.authority.certificate), "https://"] if is_tls else ["http://"]
        yield server, connect, lambda path: [*scheme[:-1], f"{scheme[-1]}localhost:{server.port}{path}"]


def test_one_port_for_both(shared):
    server, connect, url = shared
    content = unique(300_000)
    with connect() as client:
        client.write(upload_name(content.hash, content.size), content.chunks())
        # A browser offers both protocols in its handshake, and wants what HTTP/1.1 has.
        assert curl(*url("/status")) == (200, "1.1")
        assert curl("--http1.1", *url(f"/cas/{content.hash}")) == (200, "1.1")
        assert curl("-X", "PUT", "--data-binary", "x", *url("/cas/" + "ab" * 32)) == (400, "1.1")
        assert client.read(blob_name(content.hash, content.size)) == content.bytes()


def test_one_port_for_clients_that_name_no_protocol(files):
    # Old clients send no ALPN: their first bytes tell.
    address = f"127.0.0.1:{free_port()}"
    with Server(**files.flags | {"grpc_address": address, "http_address": address}) as server:
        for alpn in (None, ["h2"], ["h2", "http/1.1"], ["http/1.1"]):
            with socket.create_connection(("localhost", server.port), timeout=20) as plain:
                with files.context(alpn=alpn).wrap_socket(plain, server_hostname="localhost") as connection:
                    expected = None if alpn is None else "http/1.1" if "http/1.1" in alpn else "h2"
                    assert connection.selected_alpn_protocol() == expected
                    if alpn is None or alpn == ["h2"]:
                        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
                        # A SETTINGS frame.
                        assert connection.recv(9)[3] == 4
                    else:
                        connection.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert ask(server.port, files.context(), "GET", "/status")[0] == 200


def test_a_connection_that_says_nothing_is_closed(shared):
    server, connect, _ = shared
    with socket.create_connection(("127.0.0.1", server.port), timeout=40) as silent:
        assert silent.recv(1) == b""
    with connect() as client:
        client.capabilities()
