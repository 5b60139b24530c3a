"""Goal: a store is reached over TLS that is checked, and with credentials from every place that AWS knows.
Method: a store of our own with a certificate of its own; stand-ins of the credential services that note what they are asked."""

import http.server
import json
import threading
import time
import urllib.parse

import pytest

from bucket import blob_key, casblob
from content import unique
from fault_s3 import ERROR, FaultStore, self_signed
from reapi import Client, Code, blob_name, digest, fails, upload_name
from server import StartError
from wait import until

MIB = 1 << 20


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("tls") / "store.pem")


@pytest.fixture
def tls_store(certificate):
    made = FaultStore(certificate)
    yield made
    made.close()


def put_object(store, size: int = 5000):
    content = unique(size)
    store.objects[blob_key(content.hash)] = casblob(content.bytes())
    return content


def read(client: Client, content) -> bytes:
    return client.read(blob_name(content.hash, content.size))


def test_tls(tls_store, certificate, fresh, monkeypatch):
    """Objects come and go over TLS; a large one is sent unsigned, as its hash is not known and TLS keeps it whole."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    server = fresh(**tls_store.flags())
    contents = [put_object(tls_store), put_object(tls_store, 3 * MIB)]
    large = unique(2 * MIB)
    with Client(server.address) as client:
        for content in contents:
            assert read(client, content) == content.bytes()
        client.write(upload_name(large.hash, large.size), large.chunks())
        until(lambda: blob_key(large.hash) in tls_store.objects, "the upload")
    (put,) = [r for r in tls_store.requests if r.method == "PUT"]
    assert put.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


def test_tls_of_a_stranger(tls_store, fresh, tmp_path, monkeypatch):
    """A certificate that nobody vouches for: no request is sent, reads are misses."""
    monkeypatch.setenv("SSL_CERT_FILE", str(self_signed(tmp_path / "other.pem")))
    server = fresh(**tls_store.flags())
    content = put_object(tls_store)
    with Client(server.address) as client, fails(Code.NOT_FOUND):
        read(client, content)
    assert not tls_store.requests
    until(lambda: "the backend cannot be used now: TLS with" in server.log, "the log names the reason")


def test_no_trust_at_all(tls_store, fresh, tmp_path, monkeypatch):
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    monkeypatch.setenv("SSL_CERT_FILE", str(empty))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "nothing"))
    with pytest.raises(StartError, match="no trusted certificate authority"):
        fresh(**tls_store.flags())


def test_a_handshake_that_hangs(tls_store, certificate, fresh, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    tls_store.fault = "silent_tls"
    server = fresh(**tls_store.flags())
    content = put_object(tls_store)
    begun = time.monotonic()
    with Client(server.address) as client, fails(Code.NOT_FOUND):
        read(client, content)
    assert 9 < time.monotonic() - begun < 10 + 6


class Service:
    """A credential service. `answer` makes the reply from (method, path, headers, body): a text, or None for 404."""

    def __init__(self, answer):
        self.asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do(handler):
                body = handler.rfile.read(int(handler.headers.get("content-length") or 0)).decode()
                self.asked.append((handler.command, handler.path))
                text = answer(handler.command, handler.path, handler.headers, body)
                handler.send_response(404 if text is None else 200)
                data = (text or "").encode()
                handler.send_header("Content-Length", str(len(data)))
                handler.end_headers()
                handler.wfile.write(data)

            do_GET = do_PUT = do_POST = do

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def service():
    made = []

    def start(answer):
        made.append(Service(answer))
        return made[-1]

    yield start
    for one in made:
        one.close()


def temporary(key: str, expires: str = "2099-01-01T00:00:00Z") -> str:
    return json.dumps(
        {"Code": "Success", "AccessKeyId": key, "SecretAccessKey": "s", "Token": f"t-{key}", "Expiration": expires}
    )


def keyless(store) -> dict:
    flags = store.flags()
    return {name: value for name, value in flags.items() if not name.endswith(("access_key_id", "secret_access_key"))}


def signed_by(store, key: str) -> bool:
    requests = store.since(0, "GET")
    return bool(requests) and all(f"Credential={key}/" in r.headers.get("authorization", "") for r in requests)


def test_instance_role(store, service, fresh):
    """IMDSv2: a token first, then the role's name, then its keys; the session token is sent and signed."""

    def answer(method, path, headers, body):
        if method == "PUT":
            return "imds-token" if headers["x-aws-ec2-metadata-token-ttl-seconds"] == "21600" else None
        if headers["x-aws-ec2-metadata-token"] != "imds-token":
            return None
        return "the-role\n" if path.endswith("/security-credentials/") else temporary("AKIMDS")

    imds = service(answer)
    flags = keyless(store) | {"s3.auth_method": "iam_role", "s3.iam_role_endpoint": imds.url}
    server = fresh(**flags)
    content = put_object(store)
    with Client(server.address) as client:
        assert read(client, content) == content.bytes()
    assert imds.asked[0] == ("PUT", "/latest/api/token") and imds.asked[2][1].endswith("/the-role")
    assert signed_by(store, "AKIMDS")
    request = store.since(0, "GET")[-1]
    assert request.headers["x-amz-security-token"] == "t-AKIMDS"
    assert "x-amz-security-token" in request.headers["authorization"]
    assert "t-AKIMDS" not in server.log and "imds-token" not in server.log


def test_a_renewal_that_fails(store, service, fresh):
    """The service has nothing when the keys are to be renewed: they go on until they expire, and new ones come in time."""
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 36))
    given, asked = [temporary("AKOLD", expires)], 0

    def answer(method, path, headers, body):
        nonlocal asked
        if method == "PUT":
            return "imds-token"
        if path.endswith("/security-credentials/"):
            return "the-role"
        asked += 1
        return given[0]

    imds = service(answer)
    server = fresh(**keyless(store) | {"s3.auth_method": "iam_role", "s3.iam_role_endpoint": imds.url})
    until(lambda: "the backend answers" in server.log, "the first keys")
    given[0] = None
    with Client(server.address) as client:
        until(lambda: "the credentials cannot be renewed" in server.log, "a renewal that fails", timeout_s=30)
        content = put_object(store)
        assert read(client, content) == content.bytes()
        assert signed_by(store, "AKOLD")
        given[0], before = temporary("AKNEW"), asked
        until(lambda: asked > before, "the next renewal", timeout_s=20)

        def is_new() -> bool:
            content = put_object(store)
            assert read(client, content) == content.bytes()
            return "Credential=AKNEW/" in store.since(0, "GET")[-1].headers["authorization"]

        until(is_new, "the new keys")
    assert "no credentials" not in server.log


def test_container_role(store, service, fresh, tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("pod-token\n")
    container = service(lambda method, path, headers, body: temporary("AKPOD") if headers["authorization"] == "pod-token" else None)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{container.url}/v1/credentials")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
    server = fresh(**keyless(store) | {"s3.auth_method": "iam_role"})
    content = put_object(store)
    with Client(server.address) as client:
        assert read(client, content) == content.bytes()
    assert signed_by(store, "AKPOD")


def test_web_identity(store, service, fresh, tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("jwt+/=")

    def answer(method, path, headers, body):
        form = dict(urllib.parse.parse_qsl(body))
        assert form["WebIdentityToken"] == "jwt+/=" and form["RoleArn"] == "arn:aws:iam::1:role/r"
        keys = "<AccessKeyId>AKWEB</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
        return f"<R><Credentials>{keys}<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></R>"

    sts = service(answer)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/r")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
    server = fresh(**keyless(store) | {"s3.auth_method": "iam_role"})
    content = put_object(store)
    with Client(server.address) as client:
        assert read(client, content) == content.bytes()
    assert signed_by(store, "AKWEB")


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidToken"])
@pytest.mark.parametrize("asks_first", [True, False])
def test_a_shared_file_and_expired_keys(store, fresh, tmp_path, code, asks_first):
    """Keys come from a profile. When the store calls them expired, the file is read again, and the request goes on; also an
    existence check, to which the store can only say 400."""
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id=AKNO\naws_secret_access_key=x\n[p]\naws_access_key_id=AKONE\naws_secret_access_key=x\n")
    plain = store._answer

    def answer(connection, request):
        if store.objects and "Credential=AKONE/" in request.headers["authorization"]:
            return store._send(connection, 400, ERROR.format(code).encode(), request)
        return plain(connection, request)

    store._answer = answer
    flags = {"s3.auth_method": "aws_credentials_file", "s3.aws_shared_credentials_file": str(file), "s3.aws_profile": "p"}
    server = fresh(**keyless(store) | flags)
    with Client(server.address) as client:
        with fails(Code.NOT_FOUND):
            read(client, unique(10))
        assert signed_by(store, "AKONE")
        file.write_text(file.read_text().replace("AKONE", "AKTWO"))
        content = put_object(store)
        if asks_first:
            assert not client.missing(digest(content))
        assert read(client, content) == content.bytes()
        assert not client.missing(digest(content))
    assert "Credential=AKTWO/" in store.since(0, "GET")[-1].headers["authorization"]


def test_keys_that_are_always_refused(store, service, fresh):
    """The store calls whatever it is shown invalid: the service is asked once more, and then once in 10 s, however much is read
    on however many cores."""

    def answer(method, path, headers, body):
        if method == "PUT":
            return "imds-token"
        return "the-role" if path.endswith("/security-credentials/") else temporary("AKBAD")

    store._answer = lambda connection, request: store._send(connection, 400, ERROR.format("InvalidToken").encode(), request)
    imds = service(answer)
    begun = time.monotonic()
    server = fresh(cores="4", **keyless(store) | {"s3.auth_method": "iam_role", "s3.iam_role_endpoint": imds.url})
    with Client(server.address) as client:
        for _ in range(32):
            with fails(Code.NOT_FOUND):
                read(client, unique(10))
    took = time.monotonic() - begun
    given = sum(path.endswith("/the-role") for _, path in imds.asked)
    assert 2 <= given <= 2 + took // 10


def test_no_role_at_all(store, service, fresh):
    """No service has credentials: nothing is sent, reads are misses within the bound, and the log says why."""
    nobody = service(lambda *asked: None)
    server = fresh(**keyless(store) | {"s3.auth_method": "iam_role", "s3.iam_role_endpoint": nobody.url})
    with Client(server.address) as client, fails(Code.NOT_FOUND):
        read(client, put_object(store))
    assert not store.requests
    assert "no credentials" in server.log and "status 404" in server.log
