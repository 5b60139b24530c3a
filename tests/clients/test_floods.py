"""Goal: what many peers begin to send and never end stays within the memory limit, harms nobody, and is let go of with them.
Method: hundreds of connections made by hand against a server with a small `--memory_limit`; its resident memory, its gauges,
and a well-behaved client that must be served meanwhile and afterwards."""

import math
import random
import selectors
import socket
import time
from hashlib import sha256

import pytest

import peer as frames
from metrics import scrape
from peer import frame, literal
from reapi import BYTE_STREAM, CAPABILITIES, CAS, Client
from wait import until

MIB = 1 << 20
LARGE = random.Random(7).randbytes(MIB)
HELD = "bazel_remote_memory_held_bytes"
SETTINGS = frame(frames.SETTINGS, 0, 0)


def head(path: str, fields=()) -> bytes:
    """The header block of a call."""
    pseudo = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
    fields = [*pseudo, ("content-type", "application/grpc"), ("te", "trailers"), *fields]
    return b"".join(literal(name.encode(), value.encode()) for name, value in fields)


def press(port: int, count: int, data: bytes) -> list[socket.socket]:
    """So many connections that have each sent what the server takes of `data`."""
    pushing = selectors.DefaultSelector()
    made = []
    for _ in range(count):
        # One that is refused has sent enough.
        each = socket.create_connection(("127.0.0.1", port), timeout=20)
        each.setblocking(False)
        pushing.register(each, selectors.EVENT_WRITE, memoryview(data))
        made.append(each)
    while pushing.get_map() and (ready := pushing.select(timeout=1)):
        for key, _ in ready:
            try:
                left = key.data[key.fileobj.send(key.data) :]
            except BlockingIOError:
                continue
            except OSError:
                left = b""
            if left:
                pushing.modify(key.fileobj, selectors.EVENT_WRITE, left)
            else:
                pushing.unregister(key.fileobj)
    pushing.close()
    return made


def bear(server, port: int, count: int, data: bytes, most: int, newcomers: bool = True) -> None:
    """`count` connections send `data` and stay; the server may grow by `most` bytes, and has room for `newcomers`."""
    with Client(server.address, deadline_s=30) as bystander:
        stored = bystander.put(b"before")
        before, made = server.rss(), []
        try:
            made = press(port, count, data)
            if newcomers:
                with Client(server.address, deadline_s=30) as newcomer:
                    newcomer.capabilities()
                    assert not newcomer.missing(stored)
            assert not bystander.missing(stored)
            # What was sent is worked on for a while.
            grown = max(held_in_a_moment(server) for _ in range(10)) - before
            assert grown < most, f"{grown // MIB} MiB more"
        finally:
            for each in made:
                each.close()
        # The bystander's connection, and the one that asks.
        until(lambda: held_by_connections(server) < 256 << 10, "all is given back")


def held_in_a_moment(server) -> int:
    time.sleep(0.1)
    return server.rss()


def held_by_connections(server) -> float:
    try:
        return scrape(server)[f'{HELD}{{use="connections"}}']
    except OSError:
        # The connections that were closed a moment ago still take their place.
        return math.inf


@pytest.mark.parametrize(
    "begun",
    [
        SETTINGS + frame(frames.DATA, 0, 1, bytes(64_000))[:-1],
        SETTINGS + frame(frames.DATA, 0, 1, bytes(256 << 10))[:-1],
        SETTINGS + frame(frames.HEADERS, 4, 1, bytes(256 << 10))[:-1],
        SETTINGS + frame(0xEE, 0, 0, bytes(256 << 10))[:-1],
        frame(frames.SETTINGS, 0, 0, bytes(6 * 40_000))[:-1],
        # A header that never ends.
        SETTINGS
        + frame(frames.HEADERS, 0, 1, head("/x") + b"\x00\x01a\x7f\xff\xff\x7f" + b"v" * 60_000)
        + frame(frames.CONTINUATION, 0, 1, b"v" * (256 << 10)) * 4,
    ],
    ids=["data", "long-data", "headers", "unknown", "settings", "continuation"],
)
def test_frames_that_never_end(fresh, begun):
    server = fresh(http_address="127.0.0.1:0", memory_limit="256M")
    # As many as there is memory for, with the frames of all.
    bear(server, server.port, 600, frames.PREFACE + begun, 80 * MIB)


def test_calls_with_long_headers(fresh):
    # Of many short fields, which take several times their length when they have been read.
    server = fresh(http_address="127.0.0.1:0", memory_limit="256M")
    fields = [(f"a{number}", "") for number in range(850)]
    begun = frame(frames.SETTINGS, 0, 0)
    for path in (f"{BYTE_STREAM}/Write", f"{CAS}/FindMissingBlobs", "/unknown"):
        calls = (frame(frames.HEADERS, 4, 1 + 2 * number, head(path, fields)) for number in range(500))
        bear(server, server.port, 15, frames.PREFACE + SETTINGS + b"".join(calls), 128 * MIB)


@pytest.mark.parametrize(
    "begun",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 31_000,
        b"PUT /cas/" + b"0" * 64 + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n" + bytes(500_000),
    ],
    ids=["heads", "bodies"],
)
def test_http_requests_that_never_end(fresh, begun):
    server = fresh(http_address="127.0.0.1:0", memory_limit="128M")
    bear(server, server.http_port, 1500, begun, 80 * MIB)


def test_trailers(fresh):
    # Of many short fields, behind calls that nobody ends: each would take 200 KiB.
    server = fresh(http_address="127.0.0.1:0", memory_limit="256M")
    block = b"".join(literal(f"a{number}".encode(), b"") for number in range(850))
    streams = range(1, 101, 2)
    calls = b"".join(frame(frames.HEADERS, 4, stream, head(f"{BYTE_STREAM}/Write")) for stream in streams)
    trailers = b"".join(frame(frames.HEADERS, 5, stream, block) for stream in streams)
    bear(server, server.port, 100, frames.PREFACE + SETTINGS + calls + trailers, 80 * MIB)


def tiny_frames() -> bytes:
    # The beginnings of requests, a byte in each frame.
    calls = []
    for stream in range(1, 801, 2):
        calls.append(frame(frames.HEADERS, 4, stream, head(f"{CAS}/FindMissingBlobs")))
        calls += [frame(frames.DATA, 0, stream, bytes([byte])) for byte in b"\0\0\0\1\0" + bytes(5)]
    return SETTINGS + b"".join(calls)


def whole_calls(path: str, message: bytes) -> bytes:
    body = b"\0" + len(message).to_bytes(4, "big") + message
    heads = (frame(frames.HEADERS, 4, stream, head(path)) + frame(frames.DATA, 1, stream, body) for stream in range(1, 1001, 2))
    return b"".join(heads)


def answers() -> bytes:
    return SETTINGS + whole_calls(f"{CAPABILITIES}/GetCapabilities", b"")


def reads() -> bytes:
    # SETTINGS_INITIAL_WINDOW_SIZE is 0: nothing of the blob can go.
    name = f"blobs/{sha256(LARGE).hexdigest()}/{len(LARGE)}".encode()
    return frame(frames.SETTINGS, 0, 0, bytes([0, 4, 0, 0, 0, 0])) + whole_calls(
        f"{BYTE_STREAM}/Read", bytes([10, len(name)]) + name
    )


def refused_writes() -> bytes:
    block = head(f"{BYTE_STREAM}/Write", [(f"x-{number}", "v" * 120) for number in range(16)])
    return SETTINGS + b"".join(frame(frames.HEADERS, 4, stream, block) for stream in range(1, 2001, 2))


def trailers() -> bytes:
    block = b"".join(literal(bytes([97 + number]), b"") for number in range(15))
    call = head(f"{BYTE_STREAM}/Write")
    return SETTINGS + b"".join(
        frame(frames.HEADERS, 4, stream, call) + frame(frames.HEADERS, 5, stream, block) for stream in range(1, 1001, 2)
    )


def paths() -> bytes:
    # Each stays in HTTP/2's table of header fields, as a cut of what was read with it.
    between = frame(0xEE, 0, 0, bytes(4000)) * 2
    calls = []
    for number in range(110):
        block = b"\x83\x86\x44\x04" + f"/{number:03}".encode() + literal(b"content-type", b"application/grpc")
        calls.append(frame(frames.HEADERS, 5, 2 * number + 1, block) + between)
    return SETTINGS + b"".join(calls)


@pytest.mark.parametrize("begun", [tiny_frames, answers, reads, refused_writes, trailers, paths])
def test_what_nobody_reads(fresh, begun):
    server = fresh(http_address="127.0.0.1:0", memory_limit="256M")
    with Client(server.address) as client:
        client.put(LARGE)
    # They have all of the memory for connections after some of them.
    bear(server, server.port, 400, frames.PREFACE + begun(), 120 * MIB, newcomers=False)
