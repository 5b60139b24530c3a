"""Goal: every kind of request to the HTTP cache has the answer that bazel-remote gives it, or the standard's where the README says
so. Method: a table of requests to one server that holds one blob and one result; status, headers and text of each answer."""

import http.client
import re

import pytest

from content import EMPTY_HASH, unique
from reapi import message
from server import Server

MIB = 1 << 20
BLOB, ABSENT, NEW = unique(1000), unique(77), unique(78)
RESULT = message("ActionResult")(exit_code=3).SerializeToString()
ACTION, OTHER = unique(9).hash, unique(10).hash
CAS, TAG = f"/cas/{BLOB.hash}", f'"{BLOB.hash}"'
ABSOLUTE = message("ActionResult")(output_files=[{"path": "/x"}]).SerializeToString()
JSON = {"Content-Type": "application/json"}
# Of a blob, of a text for people, and of an action result.
OF_BLOB = {"content-type": "application/octet-stream", "accept-ranges": "bytes", "etag": TAG, "vary": "accept-encoding"}
OF_TEXT = {"content-type": "text/plain; charset=utf-8", "x-content-type-options": "nosniff"}
OF_RESULT = {"content-type": "application/octet-stream", "vary": "accept", "etag": None}
NAMES = "resource name must be a SHA256 hash in hex"
NO_ROOM = "more than the 5000000 that are taken"


def part(first: int, last: int) -> dict[str, str]:
    return OF_BLOB | {"content-range": f"bytes {first}-{last}/1000", "content-length": str(last + 1 - first)}


# Method, path, headers, body; status, headers of the answer (None: not there), its text (bytes: as a whole).
ANSWERS = [
    ("GET", CAS, {}, None, 200, OF_BLOB | {"content-length": "1000"}, BLOB.bytes()),
    ("HEAD", CAS, {}, None, 200, OF_BLOB | {"content-length": "1000"}, b""),
    ("GET", f"/any/instance{CAS}", {}, None, 200, OF_BLOB, BLOB.bytes()),
    ("GET", CAS, {"Accept-Encoding": "zstd;q=0"}, None, 200, OF_BLOB | {"content-encoding": None}, BLOB.bytes()),
    ("GET", CAS, {"Range": "bytes=0-3"}, None, 206, part(0, 3), BLOB.bytes()[:4]),
    ("GET", CAS, {"Range": "bytes=-4"}, None, 206, part(996, 999), BLOB.bytes()[-4:]),
    ("GET", CAS, {"Range": "bytes=990-5000"}, None, 206, part(990, 999), BLOB.bytes()[990:]),
    ("GET", CAS, {"Range": "bytes=0-3,7-9"}, None, 200, OF_BLOB, BLOB.bytes()),
    ("GET", CAS, {"Range": "bytes=0-3", "If-Range": '"x"'}, None, 200, OF_BLOB, BLOB.bytes()),
    ("HEAD", CAS, {"Range": "bytes=0-3"}, None, 200, OF_BLOB | {"content-length": "1000"}, b""),
    ("GET", CAS, {"Range": "bytes=1000-"}, None, 416, OF_TEXT | {"content-range": "bytes */1000"}, "outside"),
    ("GET", CAS, {"Range": "bytes=-0"}, None, 416, OF_TEXT | {"content-range": "bytes */1000"}, "outside"),
    ("GET", CAS, {"If-None-Match": TAG}, None, 304, {"etag": TAG, "vary": "accept-encoding"}, b""),
    ("GET", CAS, {"If-None-Match": f'"x", W/"{BLOB.hash}-zstd"'}, None, 304, {"etag": f'"{BLOB.hash}-zstd"'}, b""),
    ("HEAD", CAS, {"If-None-Match": "*"}, None, 304, {"etag": TAG}, b""),
    ("GET", CAS, {"If-None-Match": '"x"'}, None, 200, OF_BLOB, BLOB.bytes()),
    ("GET", f"/cas/{ABSENT.hash}", {"If-None-Match": "*"}, None, 404, OF_TEXT, b"Not found\n"),
    ("HEAD", f"/cas/{ABSENT.hash}", {}, None, 404, OF_TEXT, b""),
    ("GET", f"/ac/{OTHER}", {}, None, 404, OF_TEXT, b"Not found\n"),
    ("GET", f"/cas/ac/{BLOB.hash}", {}, None, 404, OF_TEXT, b"Not found\n"),
    ("GET", f"/cas/{EMPTY_HASH}", {}, None, 200, {"content-length": "0"}, b""),
    ("HEAD", f"/cas/{EMPTY_HASH}", {}, None, 200, {"content-length": "0"}, b""),
    ("GET", CAS.upper().replace("CAS", "cas"), {}, None, 400, OF_TEXT, NAMES),
    ("GET", f"/cas.v2/{BLOB.hash}", {}, None, 400, OF_TEXT, NAMES),
    ("GET", CAS + "0", {}, None, 400, OF_TEXT, NAMES),
    ("PUT", "/nothing", {}, b"x", 400, OF_TEXT, NAMES),
    ("PUT", CAS, {}, BLOB.bytes(), 200, {"content-length": "0"}, b""),
    ("PUT", f"/cas/{NEW.hash}", {"Content-Encoding": "identity"}, NEW.bytes(), 200, {}, b""),
    ("PUT", f"/cas/{NEW.hash}", {"X-Digest-SizeBytes": "78"}, NEW.bytes(), 200, {}, b""),
    ("PUT", f"/cas/{ABSENT.hash}", {}, b"q" * 77, 400, OF_TEXT, "SHA-256"),
    ("PUT", f"/cas/{ABSENT.hash}", {}, b"", 400, OF_TEXT, "0 bytes"),
    ("PUT", f"/cas/{EMPTY_HASH}", {}, b"", 200, {}, b""),
    ("PUT", f"/cas/{EMPTY_HASH}", {}, b"x", 400, OF_TEXT, "1 bytes"),
    ("PUT", f"/cas/{ABSENT.hash}", {"X-Digest-SizeBytes": "many"}, ABSENT.bytes(), 400, OF_TEXT, "X-Digest-SizeBytes"),
    ("PUT", f"/cas/{ABSENT.hash}", {"X-Digest-SizeBytes": "-1"}, ABSENT.bytes(), 400, OF_TEXT, "X-Digest-SizeBytes"),
    ("PUT", f"/cas/{ABSENT.hash}", {"X-Digest-SizeBytes": "76"}, ABSENT.bytes(), 400, OF_TEXT, "Content-Length is 77"),
    ("PUT", f"/cas/{ABSENT.hash}", {"Content-Encoding": "gzip"}, ABSENT.bytes(), 400, OF_TEXT, "Unsupported content-encoding"),
    ("PUT", f"/cas/{ABSENT.hash}", {"Content-Encoding": "zstd"}, ABSENT.bytes(), 400, OF_TEXT, "X-Digest-SizeBytes"),
    ("PUT", f"/cas/{ABSENT.hash}", {"X-Digest-SizeBytes": "5000001", "Content-Encoding": "zstd"}, b"x", 400, OF_TEXT, NO_ROOM),
    ("GET", f"/ac/{ACTION}", {}, None, 200, OF_RESULT | {"content-length": str(len(RESULT))}, RESULT),
    ("GET", f"/ac/{ACTION}", {"Accept-Encoding": "zstd"}, None, 200, OF_RESULT | {"content-encoding": None}, RESULT),
    ("HEAD", f"/ac/{ACTION}", {}, None, 200, OF_RESULT | {"content-length": str(len(RESULT))}, b""),
    ("GET", f"/ac/{ACTION}", {"Accept": "application/json"}, None, 200, {"content-type": "application/json"}, b'{"exitCode":3}'),
    ("HEAD", f"/ac/{ACTION}", {"Accept": "application/json"}, None, 200, {"content-length": "14"}, b""),
    ("PUT", f"/ac/{OTHER}", {}, b"\xff", 400, OF_TEXT, "no ActionResult"),
    ("PUT", f"/ac/{OTHER}", JSON, b"{", 400, OF_TEXT, "JSON"),
    ("PUT", f"/ac/{OTHER}", {}, ABSOLUTE, 400, OF_TEXT, "output_files"),
    ("PUT", f"/ac/{OTHER}", {"X-Digest-SizeBytes": "1"}, RESULT, 400, OF_TEXT, "X-Digest-SizeBytes"),
    ("PUT", f"/ac/{OTHER}", {"Content-Encoding": "br"}, RESULT, 400, OF_TEXT, "Unsupported content-encoding"),
    ("POST", CAS, {}, b"x", 405, OF_TEXT | {"allow": "GET, HEAD, PUT, DELETE"}, "Method 'POST' not supported"),
    ("OPTIONS", CAS, {}, None, 405, OF_TEXT | {"allow": "GET, HEAD, PUT, DELETE"}, "Method 'OPTIONS' not supported"),
    ("DELETE", CAS, {}, None, 403, OF_TEXT, "nobody may purge"),
    ("PUT", "/status", {}, b"", 405, OF_TEXT | {"allow": "GET, HEAD"}, "Method 'PUT' not supported"),
    ("PUT", "/metrics", {}, b"", 405, OF_TEXT | {"allow": "GET, HEAD"}, "Method 'PUT' not supported"),
    ("GET", "/status", {}, None, 200, {"content-type": "application/json"}, '{\n "CurrSize": '),
    ("GET", "/metrics", {}, None, 404, OF_TEXT, b"Endpoint metrics are not enabled on this server.\n"),
]


@pytest.fixture(scope="module")
def server():
    flags = {"max_blob_size": "5000000", "storage_mode": "uncompressed", "enable_endpoint_metrics": "false"}
    with Server(http_address="127.0.0.1:0", **flags) as running:
        for path, body in [(CAS, BLOB.bytes()), (f"/ac/{ACTION}", RESULT)]:
            assert ask(running, "PUT", path, {}, body)[0] == 200
        yield running


def ask(server: Server, method: str, path: str, headers: dict[str, str], body: bytes | None):
    connection = http.client.HTTPConnection(server.http_address, timeout=60)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        length = {} if body is None else {"Content-Length": str(len(body))}
        for name, value in (length | headers).items():
            connection.putheader(name, value)
        connection.endheaders(body or None)
        reply = connection.getresponse()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "method, path, headers, body, status, expected, text",
    ANSWERS,
    ids=[re.sub(r"\w{64}", "HASH", f"{answer[4]} {answer[0]} {answer[1]} {answer[2]}") for answer in ANSWERS],
)
def test_answers(server, method, path, headers, body, status, expected, text):
    found, answered, data = ask(server, method, path, headers, body)
    assert found == status, data
    assert {name: answered.get(name) for name in expected} == expected
    assert data == text if isinstance(text, bytes) else text in data.decode()
