"""Goal: a store that answers with nonsense, lies or floods costs a miss: no memory by its claim, no hang, no panic, and no
delay for others.
Method: one server in front of a store that plays one trick at a time on reads of blobs and actions and on existence checks;
between tricks it is well, so that the breaker stays closed. The server's memory is looked at all the time."""

import concurrent.futures
import contextlib
import struct
import threading
import time

import pytest
import zstandard

from bucket import action_key, blob_key, casblob
from content import unique
from fault_s3 import ERROR, FaultStore
from reapi import Client, Code, blob_name, digest, digest_of, fails, message, upload_name
from server import Server
from test_metrics import scrape
from wait import until

KIB, MIB = 1 << 10, 1 << 20
# The longest wait for a dead store, and what a loaded machine adds.
MISS_S = 10 + 6
GROWTH_MAX = 64 * MIB
FLOOD_MAX = 512 * MIB


def flood(connection, piece: bytes, most: int = FLOOD_MAX) -> None:
    """Sends until the other side has had enough; not as fast as it can, as other tests run beside this one."""
    piece = piece * (1 + 64 * KIB // len(piece))
    sent = 0
    while sent < most:
        connection.sendall(piece)
        sent += len(piece)
        time.sleep(0.005)


def chunked(head: str, piece: bytes, most: int = FLOOD_MAX):
    def play(connection, request):
        connection.sendall(f"HTTP/1.1 {head}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        flood(connection, b"%x\r\n%s\r\n" % (len(piece), piece), most)

    return play


def sends(answer: bytes, then_closes: bool = True):
    def play(connection, request):
        connection.sendall(answer)
        return not then_closes

    return play


def with_body(head: str, body: bytes):
    return sends(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body, then_closes=False)


def floods(start: bytes, piece: bytes):
    def play(connection, request):
        connection.sendall(start)
        flood(connection, piece)

    return play


def trickles(start: bytes, piece: bytes = b"x"):
    """A byte every 50 ms."""

    def play(connection, request):
        connection.sendall(start)
        for _ in range(20 * 60):
            connection.sendall(piece)
            time.sleep(0.05)

    return play


def header(size: int, entries: int = 2, compression: int = 1, chunk: int = MIB, frame: int | None = None) -> bytes:
    """The fixed part of a casblob."""
    frame = 21 + 8 * entries if frame is None else frame
    return struct.pack("<IIqBIq", 0x184D2A50, frame & 0xFFFFFFFF, size, compression, chunk, entries)


def bomb() -> bytes:
    """64 MiB of zeros in a few KiB, behind the header of a blob of 3,000 bytes."""
    frame = zstandard.compress(bytes(64 * MIB), 19)
    return header(3000) + struct.pack("<2q", 45, 45 + len(frame)) + frame


def wide_window() -> bytes:
    """A frame that asks for a window of 2 GiB."""
    frame = b"\x28\xb5\x2f\xfd" + b"\x00" + bytes([(31 - 10) << 3]) + b"\x01\x00\x00"
    return header(3000) + struct.pack("<2q", 45, 45 + len(frame)) + frame


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
SKIPPABLE = struct.pack("<II", 0x184D2A50, 1000) + bytes(1000)

TRICKS = {
    "endless header": floods(OK + b"X-A: ", b"a"),
    "endless headers": floods(OK, b"X-A: aaaa\r\n"),
    "endless reason": floods(b"HTTP/1.1 200 ", b"a"),
    "endless 100": floods(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "endless 103": floods(b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
    "endless body": chunked("200 OK", bytes(1000)),
    "endless error": chunked("500 X", b"<Error>" * 1000),
    "endless refusal": chunked("404 X", b"<Error><Code>NoSuchKey</Code>" * 1000),
    "endless chunk size": floods(CHUNKED, b"0"),
    "endless chunk extension": floods(CHUNKED + b"5;", b"a"),
    "endless trailers": floods(CHUNKED + b"0\r\n", b"X-A: a\r\n"),
    "endless table": floods(CHUNKED + b"1d\r\n" + header(3000, 1 << 28) + b"\r\n", b"400\r\n" + bytes(1024) + b"\r\n"),
    "endless skippable frames": floods(
        CHUNKED + b"2d\r\n" + header(3000) + struct.pack("<2q", 45, 3000) + b"\r\n",
        b"%x\r\n%s\r\n" % (len(SKIPPABLE), SKIPPABLE),
    ),
    "chunk of 2^63": sends(CHUNKED + b"7fffffffffffffff\r\nabc"),
    "chunk above 2^64": sends(CHUNKED + b"fffffffffffffffff\r\nabc"),
    "length of 2^64 - 1": sends(OK + b"Content-Length: 18446744073709551615\r\n\r\nabc"),
    "length of 2^62": sends(OK + b"Content-Length: 4611686018427387904\r\n\r\n" + header(1 << 61)),
    "negative length": sends(OK + b"Content-Length: -1\r\n\r\nabc"),
    "two lengths": sends(OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
    "too long a length": sends(OK + b"Content-Length: 9000\r\n\r\n" + bytes(3000)),
    "too short a length": sends(OK + b"Content-Length: 10\r\n\r\n" + bytes(3000)),
    "no length": sends(OK + b"\r\n" + b"\x20\x05"),
    "length and chunks": sends(OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"),
    "gzip transfer": sends(OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"),
    "gzip content": with_body("200 OK\r\nContent-Encoding: gzip", b"\x1f\x8b\x08" + bytes(500)),
    "a part": with_body("206 X\r\nContent-Range: bytes 0-1/9000", b"\x20\x05"),
    "no content": sends(b"HTTP/1.1 204 X\r\n\r\n", then_closes=False),
    "reset content": sends(b"HTTP/1.1 205 X\r\nContent-Length: 0\r\n\r\n", then_closes=False),
    "not modified": sends(b"HTTP/1.1 304 X\r\n\r\n", then_closes=False),
    "an empty object": with_body("200 OK", b""),
    "redirect": with_body("307 X\r\nLocation: http://127.0.0.1:1/other", b""),
    "redirect to itself": with_body("301 X\r\nLocation: /", b""),
    "switching protocols": sends(b"HTTP/1.1 101 X\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"),
    "status 999": with_body("999 X", b"x"),
    "status 1": sends(b"HTTP/1.1 1 X\r\n\r\n"),
    "HTTP 0.9": sends(b"<html>hello</html>"),
    "HTTP 2": sends(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18)),
    "garbage": sends(bytes(range(256)) * 16),
    "a region of nonsense": with_body(
        "400 X",
        b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>a&#10;b \xc3\xa9</Region></Error>",
    ),
    "a long region": with_body(
        "301 X\r\nx-amz-bucket-region: " + "r" * 5000, b"<Error><Code>PermanentRedirect</Code></Error>"
    ),
    "a clock of nonsense": with_body("403 X\r\nDate: Fri, 99 Foo 99999 99:99:99 GMT", ERROR.format("X").encode()),
    "the year 9999": with_body("403 X\r\nDate: Fri, 31 Dec 9999 23:59:59 GMT", ERROR.format("X").encode()),
    "deep XML": with_body("500 X", b"<a>" * 20_000),
    "entities": with_body("500 X", b'<!DOCTYPE a [<!ENTITY b "cc">]><Error><Code>&b;</Code></Error>'),
    "code of a megabyte": with_body("500 X", b"<Error><Code>" + b"x" * MIB + b"</Code></Error>"),
    "retry in 2^70 s": with_body("503 X\r\nRetry-After: 1180591620717411303424", ERROR.format("SlowDown").encode()),
    "trickled headers": trickles(OK + b"X-A: "),
    "trickled body": trickles(OK + b"Content-Length: 3000\r\n\r\n"),
    "size of 2^62": with_body("200 OK", header(1 << 62) + bytes(5000)),
    "no size": with_body("200 OK", header(0) + bytes(5000)),
    "negative size": with_body("200 OK", header(-1) + bytes(5000)),
    "no entries": with_body("200 OK", header(3000, 0) + bytes(5000)),
    "2^61 entries": with_body("200 OK", header(3000, 1 << 61) + bytes(5000)),
    "entries that overflow": with_body("200 OK", header(3000, (1 << 61) + 1, frame=29) + bytes(5000)),
    "chunks of 0 bytes": with_body("200 OK", header(3000, chunk=0) + bytes(5000)),
    "a casblob cut in its header": with_body("200 OK", header(3000)[:20]),
    "a casblob cut in its table": with_body("200 OK", header(3000) + bytes(7)),
    "raw content of another length": with_body("200 OK", header(3000, compression=0) + bytes(16) + bytes(9000)),
    "unknown compression": with_body("200 OK", header(3000, compression=7) + bytes(5000)),
    "a bomb": with_body("200 OK", bomb()),
    "a window of 2 GiB": with_body("200 OK", wide_window()),
}


class Peak:
    """The most memory that a process had while this ran."""

    def __init__(self, server: Server):
        self.server, self.most, self.over = server, 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.over.wait(0.02):
            with contextlib.suppress(OSError):
                self.most = max(self.most, self.server.rss())

    def stop(self) -> int:
        self.over.set()
        self.thread.join()
        return self.most


@pytest.fixture(scope="module")
def hostile():
    store = FaultStore()
    server = Server(http_address="127.0.0.1:0", **store.flags()).start()
    until(lambda: "the backend answers" in server.log, "the look at the store")
    yield store, server
    server.close()
    store.close()


def put_well(store: FaultStore):
    content = unique(3000)
    store.objects[blob_key(content.hash)] = casblob(content.bytes())
    return content


def read_well(store: FaultStore, client: Client) -> None:
    content = put_well(store)
    assert client.read(blob_name(content.hash, content.size)) == content.bytes()


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_is_a_miss(hostile, trick):
    store, server = hostile
    plain = store._answer
    local, number = unique(2000), list(TRICKS).index(trick)
    action = digest_of(b"action %d" % number)
    store.objects[action_key(action.hash)] = message("ActionResult")(exit_code=5).SerializeToString()

    def answer(connection, request):
        if request.method == "PUT":
            return plain(connection, request)
        return bool(TRICKS[trick](connection, request))

    with Client(server.address) as client, concurrent.futures.ThreadPoolExecutor(3) as pool:
        client.write(upload_name(local.hash, local.size), local.chunks())
        read_well(store, client)
        before, peak = server.rss(), Peak(server)
        store._answer = answer
        try:
            done, waits = threading.Event(), []

            def look():
                with Client(server.address) as other:
                    while True:
                        begun = time.monotonic()
                        assert other.read(blob_name(local.hash, local.size)) == local.bytes()
                        waits.append(time.monotonic() - begun)
                        if done.wait(0.05):
                            return

            watcher = threading.Thread(target=look)
            watcher.start()

            def misses(call) -> None:
                with fails(Code.NOT_FOUND):
                    call()

            cold, asked, begun = put_well(store), put_well(store), time.monotonic()
            calls = [
                pool.submit(misses, lambda: client.read(blob_name(cold.hash, cold.size))),
                pool.submit(misses, lambda: client.get_action(action)),
                pool.submit(client.find_missing, [digest(asked)]),
            ]
            for call in calls:
                call.result(60)
            assert time.monotonic() - begun < MISS_S
        finally:
            store._answer = plain
            done.set()
            watcher.join()
            grown = peak.stop() - before
        store.drop_connections()
        read_well(store, client)
        assert client.get_action(action).exit_code == 5
    assert grown < GROWTH_MAX, f"{grown / MIB:.0f} MiB"
    assert max(waits) < 8, f"others waited {max(waits):.2f} s"
    assert "panicked" not in server.log
