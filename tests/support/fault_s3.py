"""An S3 store of our own that can be sick in every way. Checks no signatures: others do that. Threads and blocking sockets,
so that each sickness is a few lines."""

import collections
import contextlib
import dataclasses
import email.utils
import pathlib
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.parse

from server import free_port

ERROR = "<Error><Code>{}</Code><Message>by order</Message></Error>"
CODES = {429: "TooManyRequests", 503: "SlowDown", 500: "InternalError", 403: "AccessDenied", 412: "PreconditionFailed"}


def self_signed(path: pathlib.Path) -> pathlib.Path:
    """A certificate for 127.0.0.1 that signs itself, and its key, in one file."""
    key = path.with_suffix(".key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=store", "-addext", "subjectAltName=IP:127.0.0.1"]
    # Why: rustls takes no authority for a server.
    command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(path)], check=True, capture_output=True, timeout=60)
    path.write_text(path.read_text() + key.read_text())
    return path


@dataclasses.dataclass
class Request:
    method: str
    path: str
    headers: dict
    at: float
    body: bytes = b""


class FaultStore:
    """One bucket of any name, with multipart uploads. `fault` says what ails it, `sick` what ails single keys; set them at
    any time.

    None            healthy
    "silent_tls"    takes connections and never shakes hands
    "silent"        takes requests and never answers
    "hang_up"       takes requests and ends the connection
    "slow_headers"  begins to answer, and never ends the headers
    "stalled_body"  answers with headers and half of the body, then nothing
    "trickle"       sends the body at `trickle` bytes a second
    "reset"         breaks the connection in the middle of the body
    "short"         ends the body too early, with a clean end of the connection
    "endless"       to a DELETE: obeys, and never ends the answer's body
    "wrong"         sends a body with one other byte in its middle
    an int          answers with this status
    (int, str)      answers with this status and code

    `refuse` and `black_hole` are for connections: refused, and never answered.

    `early`, a status and a word, is for uploads: they are answered with this status before anything of their body is read, and
    nothing is read after that. "stall" keeps the connection, "close" ends it, "silent" keeps it and says only the first half.
    """

    def __init__(self, certificate: pathlib.Path | None = None, host: str = "127.0.0.1", port: int = 0):
        """`certificate` holds a certificate and its key: then the store speaks TLS. `host` is a loopback address."""
        self.host = host
        self.tls = None
        if certificate is not None:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(certificate)
        # Bytes, or for large ones that are only read something like `content.Content`.
        self.objects: dict = {}
        # What came with an object and goes out with it: metadata, and when it was stored.
        self.kept: dict[str, dict[str, str]] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.fault = None
        # Only for this many requests, if it is a number.
        self.times: int | None = None
        self.sick: dict[str, object] = {}
        self.early: tuple[int, str] | None = None
        # The other ends' ports of connections on which an upload was answered early.
        self.answered_early: list[int] = []
        self.trickle = 1000
        self.methods = ("GET", "HEAD", "PUT", "POST", "DELETE")
        self.retry_after: str | None = None
        # Called with each request before it is answered; tests hold requests with it.
        self.gate = None
        self.requests: list[Request] = []
        self.accepted = 0
        self.in_flight = 0
        self.most_in_flight = 0
        # When the head of the last answer with an object was sent, and the end of the last one with a large object.
        self.answered, self.sent_all = 0.0, 0.0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._released = threading.Event()
        self._listener: socket.socket | None = None
        self._hole: BlackHole | None = None
        self._closed = False
        # Why none that the kernel gives away: nobody is to get it while this store refuses connections.
        self.port = port or free_port()
        self.listen()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def flags(self, bucket: str = "bucket") -> dict:
        return {
            "s3.endpoint": self.address,
            "s3.bucket": bucket,
            "s3.disable_ssl": "false" if self.tls else "true",
            "s3.access_key_id": "AK",
            "s3.secret_access_key": "SK",
        }

    def key(self, path: str) -> str:
        return path.split("?")[0].removeprefix("/").partition("/")[2]

    def count(self, method: str, key: str | None = None) -> int:
        with self._lock:
            return sum(r.method == method and (key is None or self.key(r.path) == key) for r in self.requests)

    def since(self, at: float, method: str | None = None) -> list[Request]:
        with self._lock:
            return [r for r in self.requests if r.at >= at and method in (None, r.method)]

    def listen(self) -> None:
        """Accepts connections, again on the same port after `refuse` or `black_hole`."""
        if self._hole is not None:
            self._hole.close()
            self._hole = None
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port))
        listener.listen(512)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def refuse(self) -> None:
        """Refuses connections, and breaks those that are open."""
        self._stop_listening()
        self.drop_connections()

    def black_hole(self) -> None:
        """Answers no SYN, and breaks the connections that are open."""
        self._stop_listening()
        self._hole = BlackHole(self.port)
        self.drop_connections()

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def drop_connections(self) -> None:
        with self._lock:
            doomed, self._open = list(self._open), set()
        for connection in doomed:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        """Healthy from now on; what hangs is let go."""
        self.fault = None
        self._released.set()
        self._released = threading.Event()
        self.drop_connections()

    def close(self) -> None:
        self._closed = True
        self.heal()
        self._stop_listening()
        if self._hole is not None:
            self._hole.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self.accepted += 1
                self._open.add(connection)
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        if self.fault == "silent_tls":
            self._released.wait()
            return connection.close()
        if self.tls is not None:
            try:
                connection = self.tls.wrap_socket(connection, server_side=True)
            except OSError:
                return connection.close()
        self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError), connection.makefile("rb") as reader:
            while line := reader.readline():
                method, path, _ = line.decode().split(" ", 2)
                headers = {}
                while (header := reader.readline()) not in (b"\r\n", b""):
                    name, value = header.decode().split(":", 1)
                    headers[name.lower()] = value.strip()
                with self._lock:
                    request = Request(method, path, headers, time.monotonic())
                    self.requests.append(request)
                    self.in_flight += 1
                    self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    if self.early is not None and method == "PUT":
                        return self._answer_early(connection, request, *self.early)
                    request.body = reader.read(int(headers.get("content-length", 0)))
                    if self.gate is not None:
                        self.gate(request)
                    if not self._answer(connection, request):
                        return
                finally:
                    with self._lock:
                        self.in_flight -= 1
        with self._lock:
            self._open.discard(connection)

    def _answer_early(self, connection: socket.socket, request: Request, status: int, then: str) -> None:
        with self._lock:
            self.answered_early.append(connection.getpeername()[1])
        self._refuse(connection, status, request, "stalled_body" if then == "silent" else None)
        if then == "stall":
            self._released.wait()

    def _refuse(self, connection: socket.socket, status: int, request: Request, fault=None) -> bool:
        extra = f"Retry-After: {self.retry_after}\r\n" if self.retry_after else ""
        return self._send(connection, status, ERROR.format(CODES.get(status, "Other")).encode(), request, extra, fault)

    def _answer(self, connection: socket.socket, request: Request) -> bool:
        """Whether the connection goes on."""
        key = self.key(request.path)
        fault = self._fault(request.method, key, request.path.partition("?")[2])
        if fault == "silent":
            self._released.wait()
            return False
        if fault == "hang_up":
            return False
        if fault == "slow_headers":
            connection.sendall(b"HTTP/1.1 200 X\r\n")
            while not self._released.wait(0.5):
                connection.sendall(b"X-Slow: 1\r\n")
            return False
        if isinstance(fault, tuple):
            return self._send(connection, fault[0], ERROR.format(fault[1]).encode(), request)
        if isinstance(fault, int):
            return self._refuse(connection, fault, request)
        query = urllib.parse.parse_qs(request.path.partition("?")[2], keep_blank_values=True)
        if "uploadId" in query or "uploads" in query:
            return self._answer_multipart(connection, request, key, query)
        if request.method == "PUT":
            if request.headers.get("if-none-match") == "*" and key in self.objects:
                return self._send(connection, 412, ERROR.format("PreconditionFailed").encode(), request)
            self.objects[key] = request.body
            self.kept[key] = {n: v for n, v in request.headers.items() if n.startswith("x-amz-meta-")}
            self.kept[key]["last-modified"] = email.utils.formatdate(usegmt=True)
            return self._send(connection, 200, b"", request)
        if request.method == "DELETE":
            self.objects.pop(key, None)
            if fault == "endless":
                connection.sendall(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
                while not self._released.wait(0.01):
                    connection.sendall(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
                return False
            return self._send(connection, 204, b"", request)
        if request.method not in ("GET", "HEAD"):
            return self._send(connection, 501, ERROR.format("NotImplemented").encode(), request)
        if "list-type" in query:
            return self._send(connection, 200, b"<ListBucketResult><Name>bucket</Name></ListBucketResult>", request)
        if key not in self.objects:
            return self._send(connection, 404, ERROR.format("NoSuchKey").encode(), request)
        found = self.objects[key]
        if not isinstance(found, bytes) and request.method == "GET":
            return self._send_large(connection, found)
        kept = self.kept.get(key, {}) | {"date": email.utils.formatdate(usegmt=True)}
        extra = "".join(f"{name}: {value}\r\n" for name, value in kept.items())
        return self._send(connection, 200, found, request, extra, fault)

    def _send_large(self, connection, content) -> bool:
        """Something with a `size` and `chunks`, as it is."""
        head = f"HTTP/1.1 200 X\r\nContent-Length: {content.size}\r\n\r\n".encode()
        for piece in content.chunks():
            connection.sendall(head + piece)
            if head:
                self.answered, head = time.monotonic(), b""
        self.sent_all = time.monotonic()
        return True

    def _fault(self, method: str, key: str, query: str):
        if method not in self.methods:
            return None
        with self._lock:
            if key in self.sick:
                return self.sick[key]
            if self.fault is not None and self.times is not None:
                self.times -= 1
                if self.times < 0:
                    self.fault, self.times = None, None
            return self.fault

    def _answer_multipart(self, connection, request: Request, key: str, query: dict) -> bool:
        id = query.get("uploadId", [""])[0]
        if "uploads" in query:
            with self._lock:
                id = f"upload-{len(self.parts)}"
                self.parts[id] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
            return self._send(connection, 200, text.encode(), request)
        if id not in self.parts:
            return self._send(connection, 404, ERROR.format("NoSuchUpload").encode(), request)
        if request.method == "PUT":
            number = int(query["partNumber"][0])
            self.parts[id][number] = request.body
            return self._send(connection, 200, b"", request, f'ETag: "part-{number}"\r\n')
        if request.method == "DELETE":
            del self.parts[id]
            return self._send(connection, 204, b"", request)
        parts = self.parts.pop(id)
        self.objects[key] = b"".join(parts[number] for number in sorted(parts))
        text = b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
        return self._send(connection, 200, text, request)

    def _send(self, connection, status: int, body: bytes, request, extra: str = "", fault=None) -> bool:
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        if request.method == "HEAD":
            connection.sendall(head.encode())
            return True
        half = len(body) // 2
        if fault == "stalled_body":
            connection.sendall(head.encode() + body[:half])
            self._released.wait()
            return False
        if fault == "trickle":
            connection.sendall(head.encode())
            step = max(1, self.trickle // 20)
            for at in range(0, len(body), step):
                connection.sendall(body[at : at + step])
                if self._released.wait(0.05):
                    return False
            return True
        if fault in ("reset", "short"):
            connection.sendall(head.encode() + body[:half])
            if fault == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if fault == "wrong":
            body = body[:half] + bytes([body[half] ^ 1]) + body[half + 1 :]
        connection.sendall(head.encode())
        self.answered = time.monotonic()
        connection.sendall(body)
        return True


class BlackHole:
    """An address whose SYNs are never answered: a listener whose backlog is full."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1"):
        self.host = host
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind((host, port))
        self.listener.listen(0)
        self.port = self.listener.getsockname()[1]
        self.fillers = collections.deque()
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect((host, self.port))
            self.fillers.append(filler)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def close(self) -> None:
        for filler in self.fillers:
            filler.close()
        self.listener.close()
