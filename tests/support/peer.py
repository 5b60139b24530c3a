"""An HTTP/2 peer made by hand: sees frames and headers that grpcio hides, and sends what no sane client would."""

import socket
import struct
import time

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS = 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def grpc_message(data: bytes, compressed: int = 0) -> bytes:
    return bytes([compressed]) + struct.pack(">I", len(data)) + data


def literal(name: bytes, value: bytes) -> bytes:
    """A header field as HPACK literal without indexing; both shorter than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def connect(port: int, timeout_s: float = 20) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


class Answer:
    """What came back on one stream."""

    def __init__(self):
        self.headers: dict[str, str] = {}
        self.trailers: dict[str, str] = {}
        self.data = b""
        self.reset: int | None = None
        self.ended = False

    @property
    def http_status(self) -> str | None:
        return self.headers.get(":status")

    @property
    def grpc_status(self) -> int | None:
        found = self.trailers.get("grpc-status", self.headers.get("grpc-status"))
        return None if found is None else int(found)


class Peer:
    """A client connection under the test's control."""

    def __init__(self, port: int, window: int | None = None):
        self.socket = connect(port)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        if window is not None:
            # As initial values: a change made later is announced by a SETTINGS frame of its own, and holds from its ACK.
            codes = h2.settings.SettingCodes
            self.h2.local_settings = h2.settings.Settings(client=True, initial_values={codes.INITIAL_WINDOW_SIZE: window})
        self.h2.initiate_connection()
        self.answers: dict[int, Answer] = {}
        self.pongs = 0
        self.goaways: list[tuple[int, int]] = []
        self.closed = False
        self.error: Exception | None = None
        self.unread = b""
        self.flush()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self) -> None:
        self.socket.close()

    def flush(self) -> None:
        try:
            self.socket.sendall(self.h2.data_to_send())
        except OSError:
            self.closed = True

    def call(self, path: str, *, end: bool = False, method: str = "POST", content_type: str | None = "application/grpc", **headers):
        """Opens a stream and returns its id. `grpc_timeout="1S"` becomes the header `grpc-timeout: 1S`."""
        stream = self.h2.get_next_available_stream_id()
        fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "localhost"), ("te", "trailers")]
        if content_type is not None:
            fields.append(("content-type", content_type))
        fields += [(name.replace("_", "-"), value) for name, value in headers.items()]
        self.h2.send_headers(stream, fields, end_stream=end)
        self.answers[stream] = Answer()
        self.flush()
        return stream

    def send(self, stream: int, data: bytes, end: bool = False) -> None:
        """Sends within the windows, pumping for credit when they are used up."""
        while data:
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size, len(data))
            if room == 0:
                self.pump(lambda: self.h2.local_flow_control_window(stream) > 0, 10)
                continue
            self.h2.send_data(stream, data[:room])
            data = data[room:]
            self.flush()
        if end:
            self.h2.end_stream(stream)
            self.flush()

    def pump(self, done, timeout_s: float = 10, credit: bool = True) -> bool:
        """Takes in what comes until `done()` or the connection ends. Whether `done()` was reached."""
        deadline = time.monotonic() + timeout_s
        while not done():
            left = deadline - time.monotonic()
            if left <= 0 or self.closed:
                return False
            self.socket.settimeout(left)
            try:
                data = self.socket.recv(1 << 18)
            except TimeoutError:
                return False
            except OSError:
                data = b""
            if not data:
                self.closed = True
                return done()
            self._feed(data, credit)
            self.flush()
        return True

    def _feed(self, data: bytes, credit: bool) -> None:
        """Frame by frame: the library forgets events that came before an error, and is deaf after a GOAWAY."""
        self.unread += data
        while len(self.unread) >= 9:
            length = int.from_bytes(self.unread[:3], "big")
            if len(self.unread) < 9 + length:
                break
            one, self.unread = self.unread[: 9 + length], self.unread[9 + length :]
            if one[3] == GOAWAY:
                last, code = struct.unpack(">II", one[9:17])
                self.goaways.append((code, last))
            elif one[3] == PING and self.goaways and not one[4]:
                self.socket.sendall(frame(PING, 1, 0, one[9:]))
            if self.goaways:
                continue
            try:
                events = self.h2.receive_data(one)
            except h2.exceptions.ProtocolError as error:
                self.error = error
                self.closed = True
                return
            for event in events:
                self._take(event, credit)

    def _take(self, event, credit: bool) -> None:
        answer = self.answers.get(getattr(event, "stream_id", None)) or Answer()
        if isinstance(event, h2.events.ResponseReceived):
            answer.headers = dict(event.headers)
        elif isinstance(event, h2.events.TrailersReceived):
            answer.trailers = dict(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            answer.data += event.data
            if credit:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            answer.ended = True
        elif isinstance(event, h2.events.StreamReset):
            answer.reset = int(event.error_code)
            answer.ended = True
        elif isinstance(event, h2.events.PingAckReceived):
            self.pongs += 1

    def answer(self, stream: int, timeout_s: float = 10) -> Answer:
        """The complete answer on `stream`."""
        answer = self.answers[stream]
        assert self.pump(lambda: answer.ended, timeout_s), f"no answer: {vars(answer)}, goaways {self.goaways}"
        return answer

    def unary(self, path: str, body: bytes, **headers) -> Answer:
        stream = self.call(path, **headers)
        self.send(stream, grpc_message(body), end=True)
        return self.answer(stream)

    def ping(self) -> bool:
        """Whether a PING is answered."""
        before = self.pongs
        self.h2.ping(b"ringcas!")
        self.flush()
        return self.pump(lambda: self.pongs > before)


def ended(made: socket.socket, timeout_s: float = 10) -> bool:
    """Whether the server ends the connection, whatever it sends before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        made.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            if not made.recv(1 << 16):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False
