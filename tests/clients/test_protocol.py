"""Goal: HTTP/2 and gRPC by the letter, and no peer can harm another.
Method: an HTTP/2 peer made by hand sends odd, broken and hostile frames; a well-behaved client must not notice."""

import socket
import struct
import time

import pytest

import peer as frames
from content import unique
from peer import Peer, connect, ended, frame, grpc_message, literal
from reapi import BYTE_STREAM, CAPABILITIES, CAS, Client, Code, blob_name, digest, fails, message, upload_name
from server import Server
from wait import until

GET_CAPABILITIES = f"{CAPABILITIES}/GetCapabilities"
FIND_MISSING = f"{CAS}/FindMissingBlobs"
MIB = 1 << 20


@pytest.fixture(scope="module")
def server():
    with Server(cores="2") as running:
        yield running
        assert running.process.poll() is None, "the server must outlive every peer"


@pytest.fixture
def peer(server):
    with Peer(server.port) as connected:
        yield connected


@pytest.fixture(autouse=True)
def bystander(server):
    """A client that is connected all the while and must be served before and after."""
    with Client(server.address, deadline_s=10) as client:
        client.capabilities()
        yield client
        client.capabilities()
        with Client(server.address, deadline_s=10) as newcomer:
            newcomer.capabilities()


# The answers of a well-behaved server


def test_settings(peer):
    assert peer.ping()
    settings = peer.h2.remote_settings
    assert settings.max_concurrent_streams >= 256
    assert settings.max_frame_size == 256 << 10
    assert settings.initial_window_size == 256 << 10
    # A connection has the protocol's window until it uploads.
    assert peer.h2.outbound_flow_control_window == 65_535
    peer.call(f"{BYTE_STREAM}/Write")
    assert peer.pump(lambda: peer.h2.outbound_flow_control_window == 16 * (256 << 10))


def test_window_flag(server):
    with Server(grpc_initial_window_size=str(64 << 10)) as small, Peer(small.port) as peer:
        assert peer.ping()
        assert peer.h2.remote_settings.initial_window_size == 64 << 10
        peer.call(f"{BYTE_STREAM}/Write")
        assert peer.pump(lambda: peer.h2.outbound_flow_control_window == 16 * (64 << 10))


def test_shape_of_an_answer(peer):
    answer = peer.unary(GET_CAPABILITIES, b"")
    assert answer.http_status == "200" and answer.headers["content-type"].startswith("application/grpc")
    assert answer.grpc_status == 0 and answer.reset is None
    compressed, length = struct.unpack(">BI", answer.data[:5])
    assert compressed == 0 and length == len(answer.data) - 5


@pytest.mark.parametrize("content_type", ["application/grpc", "application/grpc+proto"])
def test_content_types(peer, content_type):
    assert peer.unary(GET_CAPABILITIES, b"", content_type=content_type).grpc_status == 0


@pytest.mark.parametrize("content_type", ["text/plain", "application/json", None])
def test_other_content_types_are_refused(peer, content_type):
    answer = peer.unary(GET_CAPABILITIES, b"", content_type=content_type)
    assert answer.http_status == "415" or answer.grpc_status not in (None, 0)


def test_other_methods_are_refused(peer):
    stream = peer.call("/", end=True, method="GET", content_type=None)
    answer = peer.answer(stream)
    assert answer.http_status != "200" or answer.grpc_status not in (None, 0) or answer.reset is not None


@pytest.mark.parametrize("path", ["/", "/x", "/no.such.Service/Call", f"{CAS}/NoSuchCall", f"{CAS}/", f"{CAS}/FindMissingBlobs/x"])
def test_unknown_methods(peer, path):
    answer = peer.unary(path, b"")
    assert answer.http_status == "200" and answer.grpc_status == 12
    assert answer.reset in (None, 0)


@pytest.mark.parametrize("path", [FIND_MISSING, f"{CAS}/BatchUpdateBlobs", f"{CAS}/BatchReadBlobs", f"{CAS}/GetTree",
                                  f"{BYTE_STREAM}/Read", f"{BYTE_STREAM}/Write", f"{BYTE_STREAM}/QueryWriteStatus",
                                  "/build.bazel.remote.execution.v2.ActionCache/GetActionResult",
                                  "/build.bazel.remote.execution.v2.ActionCache/UpdateActionResult",
                                  GET_CAPABILITIES, "/grpc.health.v1.Health/Check"])  # fmt: skip
@pytest.mark.parametrize("body", [b"\xff", b"\x0a\x7fshort", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x0b\x0b\x0b"])
def test_malformed_messages(peer, path, body):
    answer = peer.unary(path, body)
    assert answer.grpc_status == 3, vars(answer)
    assert answer.trailers.get("grpc-message") or answer.headers.get("grpc-message")


def test_message_encodings_are_refused(peer):
    stream = peer.call(GET_CAPABILITIES, grpc_encoding="gzip")
    peer.send(stream, grpc_message(b"\x1f\x8b", compressed=1), end=True)
    answer = peer.answer(stream)
    assert answer.grpc_status == 12
    assert "identity" in (answer.headers | answer.trailers)["grpc-accept-encoding"]


def test_identity_encoding_is_served(peer):
    assert peer.unary(GET_CAPABILITIES, b"", grpc_encoding="identity", grpc_accept_encoding="gzip, deflate").grpc_status == 0


def test_a_compressed_message_without_an_encoding(peer):
    stream = peer.call(GET_CAPABILITIES)
    peer.send(stream, grpc_message(b"", compressed=1), end=True)
    assert peer.answer(stream).grpc_status not in (None, 0)


@pytest.mark.parametrize("body", [b"", b"\x00\x00", grpc_message(b"1234567")[:-3], b"\x07" + grpc_message(b"")[1:]])
def test_broken_framing(peer, body):
    stream = peer.call(FIND_MISSING)
    peer.send(stream, body, end=True)
    assert peer.answer(stream).grpc_status not in (None, 0)


def test_two_messages_for_a_unary_call(peer):
    stream = peer.call(GET_CAPABILITIES)
    peer.send(stream, grpc_message(b"") * 2, end=True)
    assert peer.answer(stream).ended


def test_a_message_that_says_4_gib(peer):
    for path in (FIND_MISSING, f"{BYTE_STREAM}/Write"):
        stream = peer.call(path)
        peer.send(stream, b"\x00\xff\xff\xff\xff" + bytes(1000))
        assert peer.answer(stream).grpc_status in (3, 8)


def test_messages_in_single_bytes(peer):
    stream = peer.call(GET_CAPABILITIES)
    for byte in grpc_message(message("GetCapabilitiesRequest")(instance_name="abc").SerializeToString()):
        peer.send(stream, bytes([byte]))
    peer.send(stream, b"", end=True)
    assert peer.answer(stream).grpc_status == 0


# Deadlines


@pytest.mark.parametrize("path", [f"{BYTE_STREAM}/Write", FIND_MISSING])
def test_the_server_keeps_deadlines_itself(peer, path):
    started = time.monotonic()
    stream = peer.call(path, grpc_timeout="300m")
    answer = peer.answer(stream, 10)
    assert answer.grpc_status == 4 and time.monotonic() - started > 0.25


@pytest.mark.parametrize("value, served", [("1H", True), ("99999999S", True), ("20S", True), ("5000000u", True), ("9999999n", None)])
def test_units_of_deadlines(peer, value, served):
    answer = peer.unary(GET_CAPABILITIES, b"", grpc_timeout=value)
    assert answer.grpc_status == 0 if served else answer.grpc_status in (0, 4)


@pytest.mark.parametrize("value", ["", "x", "1", "S", "-1S", "1D", "999999999999S"])
def test_deadlines_that_are_none(peer, value):
    # Ignored or refused; the call ends either way.
    assert peer.unary(GET_CAPABILITIES, b"", grpc_timeout=value).ended


# Metadata


@pytest.mark.parametrize("value", ["CgsKBWJhemVsEgI4LjA", "CgsKBWJhemVsEgI4LjA=", "!!!", "", "AAAA", "gA=="])
def test_request_metadata_of_any_kind(server, value):
    # The header is a hint: padded, unpadded or garbage, the call is served.
    with Peer(server.port) as peer:
        stream = peer.h2.get_next_available_stream_id()
        peer.h2.send_headers(
            stream,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", GET_CAPABILITIES),
                (":authority", "x"),
                ("content-type", "application/grpc"),
                ("build.bazel.remote.execution.v2.requestmetadata-bin", value),
                ("google.devtools.remoteexecution.v1test.requestmetadata-bin", value),
            ],
        )
        peer.answers[stream] = frames.Answer()
        peer.send(stream, grpc_message(b""), end=True)
        assert peer.answer(stream).grpc_status == 0


# Keepalive, many streams


def test_pings_are_answered(peer):
    for _ in range(100):
        assert peer.ping()
    assert not peer.goaways


def test_many_streams_at_once(peer):
    streams = [peer.call(GET_CAPABILITIES) for _ in range(250)]
    for stream in streams:
        peer.send(stream, grpc_message(b""), end=True)
    assert all(peer.answer(stream).grpc_status == 0 for stream in streams)


def test_more_streams_than_allowed(server, peer):
    assert peer.ping()
    allowed = peer.h2.remote_settings.max_concurrent_streams
    # Straight to the socket: the library would keep to the limit.
    fields = literal(b":method", b"POST") + literal(b":scheme", b"http") + literal(b":path", b"/google.bytestream.ByteStream/Write")
    fields += literal(b":authority", b"x") + literal(b"content-type", b"application/grpc")
    peer.socket.sendall(b"".join(frame(frames.HEADERS, END, 1 + 2 * number, fields) for number in range(allowed + 200)))
    # The rest is refused, or the connection is ended; see the bystander.
    peer.socket.settimeout(20)
    assert peer.socket.recv(1 << 16)


END = frames.END_HEADERS


def test_a_window_that_stays_shut(server, bystander):
    # 100 reads of 8 MiB by a client that grants no credit: they wait at the cost of little memory.
    content = unique(8 * MIB)
    bystander.write(upload_name(content.hash, content.size), content.chunks())
    before = server.rss()
    request = message("google.bytestream.ReadRequest")(resource_name=blob_name(content.hash, content.size))
    with Peer(server.port, window=0) as shut:
        streams = [shut.call(f"{BYTE_STREAM}/Read") for _ in range(100)]
        for stream in streams:
            shut.send(stream, grpc_message(request.SerializeToString()), end=True)
        assert shut.ping(), shut.error
        assert not any(shut.answers[stream].data for stream in streams)
        assert bystander.missing(digest(content)) is False
        assert server.rss() - before < 256 * MIB


def test_uploads_stall_by_window_not_by_memory(server, bystander):
    # Credit comes back as bytes are consumed: 40 MiB pass through a window of 256 KiB.
    content = unique(40 * MIB)
    bystander.write(upload_name(content.hash, content.size), content.chunks())
    assert not bystander.missing(digest(content))


# Hostile peers


def hello(port: int) -> socket.socket:
    made = connect(port)
    made.sendall(frames.PREFACE + frame(frames.SETTINGS, 0, 0) + frame(frames.SETTINGS, 1, 0))
    return made


def flood(made: socket.socket, pieces, seconds: float = 20) -> bool:
    """Sends until the server ends the connection. Whether it did before the pieces or the time ran out."""
    deadline = time.monotonic() + seconds
    made.settimeout(seconds)
    try:
        for piece in pieces:
            made.sendall(piece)
            if time.monotonic() > deadline:
                return False
    except OSError:
        return True
    return ended(made, 5)


REQUEST = (
    literal(b":method", b"POST")
    + literal(b":scheme", b"http")
    + literal(b":path", GET_CAPABILITIES.encode())
    + literal(b":authority", b"x")
    + literal(b"content-type", b"application/grpc")
)


def test_rapid_reset(server):
    made = hello(server.port)
    reset = struct.pack(">I", 8)

    def burst(number: int) -> bytes:
        ids = range(1 + 200 * number, 1 + 200 * (number + 1), 2)
        return b"".join(frame(frames.HEADERS, END, id, REQUEST) + frame(frames.RST_STREAM, 0, id, reset) for id in ids)

    assert flood(made, (burst(number) for number in range(1000))), "100,000 resets did not end the connection"
    made.close()


def test_continuation_flood(server):
    before = server.rss()
    made = hello(server.port)
    field = literal(b"x-flood", b"y" * 100) * 100
    pieces = [frame(frames.HEADERS, 0, 1, REQUEST)] + [frame(frames.CONTINUATION, 0, 1, field)] * 20_000
    assert flood(made, pieces), "200 MB of headers did not end the connection"
    made.close()
    assert server.rss() - before < 64 * MIB


def test_empty_continuation_flood(server):
    made = hello(server.port)
    pieces = [frame(frames.HEADERS, 0, 1, REQUEST)] + [frame(frames.CONTINUATION, 0, 1) * 1000] * 1000
    assert flood(made, pieces), "1,000,000 empty CONTINUATIONs did not end the connection"
    made.close()


def test_header_flood(server):
    # Requests with 200 KB of headers each: the stream or the connection ends, memory does not grow.
    before = server.rss()
    with Peer(server.port) as big:
        fields = {f"x-{number}": "v" * 1000 for number in range(200)}
        try:
            for _ in range(50):
                answer = big.answers[big.call(GET_CAPABILITIES, end=True, **fields)]
                if not big.pump(lambda answer=answer: answer.ended, 5):
                    break
                assert answer.grpc_status != 0
        except Exception:  # noqa: BLE001 - the library notices that the connection has ended.
            pass
    assert server.rss() - before < 64 * MIB


@pytest.mark.parametrize("kind, payload", [(frames.PING, bytes(8)), (frames.SETTINGS, b"")])
def test_control_floods(server, kind, payload):
    # By a peer that reads no answers.
    before = server.rss()
    made = hello(server.port)
    flood(made, [frame(kind, 0, 0, payload) * 1000] * 1000, 5)
    made.close()
    assert server.rss() - before < 64 * MIB


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        bytes(1000),
        frames.PREFACE + frame(0, 0, 0, b"data on stream 0"),
        frames.PREFACE + frame(frames.SETTINGS, 0, 0, b"odd"),
        frames.PREFACE + frame(frames.HEADERS, 5, 1, b"\xff\xff\xff\xff\xff"),
        frames.PREFACE + frame(frames.HEADERS, 5, 2, REQUEST),
        frames.PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    ],
    ids=["http1", "tls", "zeros", "data0", "settings", "hpack", "even", "huge"],
)
def test_no_http2_at_all(server, bytes_sent):
    made = connect(server.port)
    made.sendall(bytes_sent)
    assert ended(made, 30)
    made.close()


def test_silent_connections(server, bystander):
    # 500 connections that say nothing, and 100 that say half a preface.
    idle = [connect(server.port) for _ in range(600)]
    for each in idle[:100]:
        each.sendall(frames.PREFACE[:10])
    for _ in range(20):
        bystander.capabilities()
    for each in idle:
        each.close()


def test_connections_come_and_go(server):
    # ccache opens a connection for nearly every call.
    files = server.open_files()
    for _ in range(300):
        with Peer(server.port) as short:
            assert short.unary(GET_CAPABILITIES, b"").grpc_status == 0
    until(lambda: server.open_files() <= files + 5, "all are closed")


def test_connections_that_are_reset_in_the_middle(server):
    content = unique(20 * MIB)
    with Client(server.address) as client:
        client.write(upload_name(content.hash, content.size), content.chunks())
    request = message("google.bytestream.ReadRequest")(resource_name=blob_name(content.hash, content.size))
    files = server.open_files()
    for _ in range(50):
        with Peer(server.port) as short:
            stream = short.call(f"{BYTE_STREAM}/Read")
            short.send(stream, grpc_message(request.SerializeToString()), end=True)
            short.pump(lambda stream=stream, short=short: short.answers[stream].data)
            short.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: server.open_files() <= files + 5, "all are closed")


def test_an_unknown_method_by_grpcio(bystander):
    with fails(Code.UNIMPLEMENTED):
        bystander.unary("/build.bazel.remote.execution.v2.Execution/Execute", b"", None)
