"""Goal: requests as no client library sends them have the standard's answer, and never another request's. Method: a table of requests
in raw bytes, each on a connection of its own and with an ordinary request behind it: the status of the answer, what it says, and
whether the one behind is answered too."""

import contextlib
import hashlib
import http.client
import io
import socket

import pytest

from content import EMPTY_HASH, unique
from server import Server, port_of

BLOB, NEW, ABSENT, AWAITED = unique(600), unique(200), unique(78), unique(300)
HOST = b"Host: x\r\n"
CAS = f"/cas/{BLOB.hash}"
# What zstd makes less of.
LONG = b"a" * 100_000
LONG_CAS = f"/cas/{hashlib.sha256(LONG).hexdigest()}"
FOUND, TAG = BLOB.bytes(), f'"{BLOB.hash}"'
BEHIND = f"GET /cas/{ABSENT.hash} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


def get(path: str, headers: bytes = b"", method: str = "GET", version: str = "1.1", host: bytes = HOST) -> bytes:
    return f"{method} {path} HTTP/{version}\r\n".encode() + host + headers + b"\r\n"


def put(headers: bytes, body: bytes = b"", path: str = f"/cas/{NEW.hash}") -> bytes:
    return get(path, headers, "PUT") + body


def chunked(body: bytes) -> bytes:
    return put(b"Transfer-Encoding: chunked\r\n", body)


def sized(headers: bytes = b"", path: str = f"/cas/{NEW.hash}") -> bytes:
    return put(b"Content-Length: 200\r\n" + headers, NEW.bytes(), path)


def lines(*headers: str) -> bytes:
    return "".join(header + "\r\n" for header in headers).encode()


WHOLE = b"c8\r\n" + NEW.bytes() + b"\r\n"
# What is asked, the answer's status, what its body has (bytes: all of it) or headers, and whether the connection goes on.
REQUESTS = {
    # Paths.
    "an escaped path": (get(f"/c%61s/{BLOB.hash}"), 200, FOUND, True),
    "an escaped slash": (get(f"/a%2Fcas/{BLOB.hash}"), 200, FOUND, True),
    "a query": (get(f"{CAS}?x=1"), 200, FOUND, True),
    "dots are an instance": (get(f"/a/..{CAS}"), 200, FOUND, True),
    "two slashes": (get("/" + CAS), 200, FOUND, True),
    "absolute form": (get(f"http://x{CAS}"), 200, FOUND, True),
    "absolute form of another host": (get(f"http://y{CAS}"), 200, FOUND, True),
    "upper case": (sized(path=f"/cas/{NEW.hash.upper()}"), 400, "SHA256 hash in hex", True),
    "a slash behind": (get(CAS + "/"), 400, "SHA256 hash in hex", True),
    "asterisk form": (get("*", method="OPTIONS"), 400, "SHA256 hash in hex", True),
    "authority form": (get("x:443", method="CONNECT"), 400, "SHA256 hash in hex", True),
    "a space": (get(f"/a b{CAS}"), 400, b"", False),
    "bytes that are no text": (b"GET /\xe2\x82\xac" + CAS.encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n", 200, FOUND, True),
    # Methods.
    **{
        method: (get(CAS, method=method), 405, {"Allow": "GET, HEAD, PUT, DELETE"}, True)
        for method in ("PATCH", "TRACE", "FOO", "get")
    },
    # Versions, and who goes on.
    "HTTP/1.0": (get(CAS, version="1.0", host=b""), 200, FOUND, False),
    "HTTP/1.0 with keep-alive": (get(CAS, b"Connection: keep-alive\r\n", version="1.0"), 200, FOUND, True),
    "HTTP/1.0 in chunks": (get(CAS, b"Transfer-Encoding: chunked\r\n", "PUT", "1.0"), 400, b"", False),
    "HTTP/1.2": (get(CAS, version="1.2"), 400, b"", False),
    "HTTP/2.0": (get(CAS, version="2.0"), 400, b"", False),
    "HTTP/0.9": (b"GET /\r\n\r\n", 400, b"", False),
    "close": (get(CAS, b"Connection: close\r\n"), 200, {"Connection": "close"}, False),
    "empty lines before": (b"\r\n\r\n" + get(CAS), 200, FOUND, True),
    "an upgrade": (get(CAS, lines("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")), 200, FOUND, True),
    # Heads.
    "no Host": (get(CAS, host=b""), 400, "Host", False),
    "two Hosts": (get(CAS, HOST), 400, "Host", False),
    "an empty Host": (get(CAS, host=b"Host:\r\n"), 200, FOUND, True),
    "a long header": (get(CAS, b"X: " + b"a" * 40000 + b"\r\n"), 431, b"", False),
    "many headers": (get(CAS, lines(*(f"X{n}: a" for n in range(200)))), 431, b"", False),
    "a long path": (get(f"/{'a' * 20000}{CAS}"), 200, FOUND, True),
    "a space before the colon": (get(CAS, b"X : a\r\n"), 400, b"", False),
    "a header over two lines": (get(CAS, b"X: a\r\n b\r\n"), 400, b"", False),
    "a NUL": (get(CAS, b"X: a\0b\r\n"), 400, b"", False),
    # Headers that are there twice.
    "tags in two headers": (get(CAS, lines('If-None-Match: "x"', f"If-None-Match: {TAG}")), 304, {"ETag": TAG}, True),
    "codings in two headers": (get(LONG_CAS, lines("Accept-Encoding: gzip", "Accept-Encoding: zstd")), 200, {"Content-Encoding": "zstd"}, True),
    "two ranges": (get(CAS, lines("Range: bytes=0-3", "Range: bytes=7-9")), 200, FOUND, True),
    "two content codings": (sized(lines("Content-Encoding: identity", "Content-Encoding: zstd")), 400, "content-encoding", True),
    "two sizes": (sized(lines("X-Digest-SizeBytes: 200", "X-Digest-SizeBytes: 300")), 400, "X-Digest-SizeBytes", True),
    "a coding that is no text": (sized(b"Content-Encoding: \xff\r\n"), 400, "content-encoding", True),
    # Lengths.
    "a PUT of no length": (put(b""), 400, "0 bytes", True),
    "a length twice": (sized(b"Content-Length: 200\r\n"), 200, b"", True),
    "two lengths": (sized(b"Content-Length: 5\r\n"), 400, b"", False),
    "two lengths in one": (put(b"Content-Length: 200, 5\r\n", NEW.bytes()), 400, b"", False),
    **{
        f"Content-Length: {length}": (put(f"Content-Length: {length}\r\n".encode(), NEW.bytes()), 400, b"", False)
        for length in ("+200", "-1", "0xc8", "99999999999999999999999")
    },
    "a length and chunks": (put(lines("Content-Length: 3", "Transfer-Encoding: chunked"), WHOLE + b"0\r\n\r\n"), 200, b"", False),
    "chunks and a length": (put(lines("Transfer-Encoding: chunked", "Content-Length: 3"), WHOLE + b"0\r\n\r\n"), 200, b"", False),
    "a body for a GET": (get(CAS, b"Content-Length: 3\r\n") + b"abc", 200, FOUND, True),
    "a part": (sized(b"Content-Range: bytes 0-199/400\r\n"), 400, "Content-Range", True),
    # Chunks.
    "chunks": (chunked(WHOLE + b"0\r\n\r\n"), 200, b"", True),
    "chunks with an extension": (chunked(WHOLE.replace(b"\r\n", b";a=b\r\n", 1) + b"0\r\n\r\n"), 200, b"", True),
    "chunks with a trailer": (chunked(WHOLE + b"0\r\nX: y\r\n\r\n"), 200, b"", True),
    "leading zeros": (chunked(b"0000" + WHOLE + b"0\r\n\r\n"), 200, b"", True),
    **{
        f"a chunk of {size}": (chunked(size.encode() + b"\r\n" + ABSENT.bytes()), 400, "broke off", False)
        for size in ("-1", "xyz", "fffffffffffffffff", "")
    },
    "a chunk that is longer": (chunked(b"5\r\nabcdefgh\r\n0\r\n\r\n"), 400, "broke off", False),
    **{
        f"Transfer-Encoding: {coding}": (put(f"Transfer-Encoding: {coding}\r\n".encode(), WHOLE + b"0\r\n\r\n"), 400, text, False)
        for coding, text in (("gzip, chunked", "chunked"), ("identity", b""), ("xchunked", b""))
    },
    # Expectations. Who is not told to go on sends no body, or does: so the connection ends.
    "a PUT that may go on": (put(lines("Content-Length: 300", "Expect: 100-continue"), AWAITED.bytes(), f"/cas/{AWAITED.hash}"), 200, b"", True),
    "a PUT that need not": (put(lines("Content-Length: 600", "Expect: 100-continue"), path=CAS), 200, {"Connection": "close"}, False),
    "a PUT that must not": (put(lines("Content-Length: 5", "Expect: 100-continue"), path=f"/cas/{EMPTY_HASH}"), 400, {"Connection": "close"}, False),
    "a request that must not": (put(lines("Content-Length: 5", "Expect: 100-continue", "Content-Range: bytes 0-4/5")), 400, {"Connection": "close"}, False),
    "a GET that waits": (get(CAS, b"Expect: 100-continue\r\n"), 200, FOUND, True),
    "something else is expected": (get(CAS, b"Expect: the unexpected\r\n"), 200, FOUND, True),
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with Server(http_address="127.0.0.1:0", grpc_address="none") as running:
        connection = http.client.HTTPConnection(running.http_address, timeout=60)
        for path, data in ((CAS, FOUND), (LONG_CAS, LONG)):
            connection.request("PUT", path, data)
            with connection.getresponse() as reply:
                assert reply.status == 200, reply.read()
        connection.close()
        yield running


class Received(io.BytesIO):
    """What has come, as the socket that http.client reads from, one answer behind the other."""

    def makefile(self, _):
        return self

    def close(self):
        pass


def answers(server: Server, sent: bytes):
    """What is answered to a request, and to one behind it that ends the connection."""
    with socket.create_connection(("127.0.0.1", port_of(server.http_address)), timeout=60) as peer:
        peer.sendall(sent + BEHIND)
        received = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while data := peer.recv(1 << 16):
                received += data
    file = Received(received)
    while file.tell() < len(received):
        reply = http.client.HTTPResponse(file)
        reply.begin()
        yield reply, reply.read()


@pytest.mark.parametrize("sent, status, expected, goes_on", REQUESTS.values(), ids=REQUESTS.keys())
def test_answers(server, sent, status, expected, goes_on):
    (reply, body), *behind = answers(server, sent)
    assert reply.status == status, (reply.status, body)
    match expected:
        case bytes():
            assert body == expected
        case str():
            assert expected in body.decode()
        case dict():
            assert {name: reply.headers[name] for name in expected} == expected
    assert [reply.status for reply, _ in behind] == [404] * goes_on, (reply.headers, body)
