"""Goal: gRPC and HTTP are served over unix sockets as over TCP, and the sockets' files come and go with the server.
Method: real clients of both protocols, modes as the file system says them, restarts and crashes."""

import http.client
import pathlib
import socket
import stat

import pytest
from content import unique
from reapi import Client, blob_name, upload_name
from server import StartError
from streams import check_read


class UnixConnection(http.client.HTTPConnection):
    """http.client over a unix socket."""

    def __init__(self, path: pathlib.Path):
        super().__init__("localhost", timeout=20)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))


def ask(path: pathlib.Path, method: str, target: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = UnixConnection(path)
    connection.request(method, target, body)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


@pytest.mark.parametrize("form", ["unix:", "unix://"])
def test_both_protocols(fresh, tmp_path, form):
    grpc_path, http_path = tmp_path / "grpc", tmp_path / "http"
    server = fresh(grpc_address=f"{form}{grpc_path}", http_address=f"{form}{http_path}", unix_socket_mode="0600")
    assert f"grpc=unix:{grpc_path} http=unix:{http_path}" in server.log
    for path in (grpc_path, http_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = unique(300_000)
    with Client(server.address) as client:
        client.write(upload_name(content.hash, content.size), content.chunks())
        check_read(client, blob_name(content.hash, content.size), content)
    assert ask(http_path, "GET", f"/cas/{content.hash}") == (200, content.bytes())
    more = unique(20)
    assert ask(http_path, "PUT", f"/cas/{more.hash}", more.bytes())[0] == 200
    assert ask(http_path, "GET", "/status")[0] == 200
    server.stop()
    assert not grpc_path.exists() and not http_path.exists()


def test_only_an_abandoned_socket_is_replaced(fresh, tmp_path):
    path = tmp_path / "grpc"
    server = fresh(grpc_address=f"unix:{path}")
    with pytest.raises(StartError) as refused:
        fresh(grpc_address=f"unix:{path}")
    assert "Free the address" in refused.value.log
    server.restart(crash=True)
    server.stop()
    path.write_text("a document")
    with pytest.raises(StartError) as refused:
        server.start()
    assert "Free the address" in refused.value.log
    assert path.read_text() == "a document"
