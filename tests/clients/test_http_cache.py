"""Goal: the HTTP cache does what bazel-remote's clients expect, and what RFC 9110 says where they leave it open.
Method: requests by http.client, raw sockets and curl; what goes in over HTTP comes out over gRPC and the other way."""

import http.client
import io
import json
import os
import pathlib
import shutil
import socket
import subprocess

import pytest
import zstandard

import credentials
from content import EMPTY_HASH, Content, sha256, unique
from metrics import scrape
from reapi import Client, blob_name, digest, digest_of, message, upload_name
from server import Server, scratch
from wait import until

MIB = 1 << 20


@pytest.fixture(scope="module")
def server():
    with Server(http_address="127.0.0.1:0") as running:
        yield running


class Http:
    """One connection that is kept."""

    def __init__(self, server):
        self.connection = http.client.HTTPConnection(server.http_address, timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.connection.close()

    def ask(self, method: str, path: str, body=None, chunked: bool = False, **headers):
        """(status, headers in lower case, body). `X_Y=z` stands for the header `X-Y: z`."""
        headers = {name.replace("_", "-"): str(value) for name, value in headers.items()}
        self.connection.request(method, path, body, headers, encode_chunked=chunked)
        reply = self.connection.getresponse()
        data = reply.read()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, data

    def get(self, path: str, **headers):
        return self.ask("GET", path, **headers)

    def put(self, path: str, body=b"", **headers):
        return self.ask("PUT", path, body, **headers)

    def announce(self, path: str, size: int) -> int:
        """The status of a PUT of which only the beginning is sent: the answer must not wait for the rest."""
        self.connection.putrequest("PUT", path)
        self.connection.putheader("Content-Length", str(size))
        self.connection.endheaders(b"the beginning")
        return self.connection.getresponse().status


@pytest.fixture
def web(server):
    with Http(server) as connected:
        yield connected


@pytest.fixture
def client(server):
    with Client(server.address) as connected:
        yield connected


def packed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def unpacked(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()


@pytest.mark.parametrize("size", [1, 1000, 256 << 10, (256 << 10) + 1, 3 * MIB + 7])
def test_blobs_go_in_and_come_out(web, client, size):
    content = unique(size)
    path = f"/cas/{content.hash}"
    assert web.get(path)[0] == 404
    assert web.ask("HEAD", path)[0] == 404
    assert web.put(path, content.bytes())[0] == 200
    status, headers, data = web.get("/any/instance" + path)
    assert (status, data) == (200, content.bytes())
    assert headers["content-length"] == str(size)
    assert headers["content-type"] == "application/octet-stream"
    assert headers["etag"] == f'"{content.hash}"'
    status, headers, data = web.ask("HEAD", path)
    assert (status, headers["content-length"], data) == (200, str(size), b"")
    assert client.read(blob_name(content.hash, size)) == content.bytes()
    other = unique(size)
    client.write(upload_name(other.hash, size), other.chunks())
    assert web.get(f"/cas/{other.hash}")[2] == other.bytes()


def test_what_a_restart_leaves_is_found_by_hash(fresh):
    server = fresh(http_address="127.0.0.1:0", ack="flushed", ram_cache="0")
    contents = [unique(size) for size in (5, 70_000, 2 * MIB)]
    with Http(server) as web:
        for content in contents:
            assert web.put(f"/cas/{content.hash}", content.bytes())[0] == 200
    server.restart(crash=True, cores="3")
    with Http(server) as web:
        for content in contents:
            assert web.get(f"/cas/{content.hash}")[2] == content.bytes()


def test_the_empty_blob_is_always_there(web):
    path = f"/cas/{EMPTY_HASH}"
    assert web.get(path)[::2] == (200, b"")
    assert web.ask("HEAD", path)[1]["content-length"] == "0"
    assert web.put(path)[0] == 200
    assert web.put(path, b"x")[0] == 400
    assert web.put(f"/cas/{unique(9).hash}")[0] == 400


@pytest.mark.parametrize("size", [5000, 2 * MIB])
def test_a_wrong_body_is_refused(web, size):
    # 400, and the connection goes on; nothing is left behind.
    content, other = unique(size), unique(size)
    path = f"/cas/{content.hash}"
    status, _, text = web.put(path, other.bytes())
    assert status == 400 and b"SHA-256" in text
    assert web.get(path)[0] == 404
    assert web.put(path, content.bytes())[0] == 200
    assert web.get(path)[2] == content.bytes()


def test_a_present_blob_is_not_taken_again(server, web):
    content = unique(2 * MIB)
    path = f"/cas/{content.hash}"
    assert web.put(path, content.bytes())[0] == 200
    before = scrape(server)
    assert web.put(path, content.bytes())[0] == 200
    after = scrape(server)
    assert after["bazel_remote_present_blobs_total"] == before["bazel_remote_present_blobs_total"] + 1
    assert after["bazel_remote_stored_blobs_total"] == before["bazel_remote_stored_blobs_total"]


def test_zstd_both_ways(web, client):
    for size in (60_000, 3 * MIB):
        content = unique(size)
        path = f"/cas/{content.hash}"
        body = packed(content.bytes())
        assert web.put(path, body, Content_Encoding="zstd")[0] == 400
        assert web.put(path, body, Content_Encoding="zstd", X_Digest_SizeBytes=size)[0] == 200
        assert web.get(path)[2] == content.bytes()
        status, headers, data = web.get(path, Accept_Encoding="gzip, zstd")
        assert (status, headers["content-encoding"]) == (200, "zstd")
        assert int(headers["content-length"]) == len(data) < size
        assert headers["etag"] == f'"{content.hash}-zstd"'
        assert unpacked(data) == content.bytes()
    # What does not shrink stands raw and is sent raw.
    noise = os.urandom(MIB)
    assert web.put(f"/cas/{sha256(noise)}", noise)[0] == 200
    status, headers, data = web.get(f"/cas/{sha256(noise)}", Accept_Encoding="zstd")
    assert (status, headers.get("content-encoding"), data) == (200, None, noise)
    status, _, text = web.put(f"/cas/{sha256(noise)}", b"x", Content_Encoding="gzip")
    assert (status, b"content-encoding" in text) == (400, True)
    bad = unique(500_000)
    assert web.put(f"/cas/{bad.hash}", b"no zstd" * 100, Content_Encoding="zstd", X_Digest_SizeBytes=bad.size)[0] == 400
    assert web.put(f"/cas/{bad.hash}", b"x", X_Digest_SizeBytes="many")[0] == 400
    assert web.put(f"/cas/{bad.hash}", b"x", X_Digest_SizeBytes="2")[0] == 400


@pytest.mark.parametrize("unchecked", [False, True], ids=["results", "any bytes"])
def test_zstd_uploads_of_results(fresh, unchecked):
    """As bazel-remote takes them: decoded, of exactly the size that is said, and given back as they are."""
    server = fresh(http_address="127.0.0.1:0", disable_http_ac_validation=str(unchecked).lower())
    result = message("ActionResult")(exit_code=7, stdout_raw=b"said " * 5000).SerializeToString()
    path, body = f"/ac/{unique(14).hash}", packed(result)
    with Http(server) as web:
        for size in (len(result) - 1, len(result) + 1, 17 * MIB):
            status, _, text = web.put(path, body, Content_Encoding="zstd", X_Digest_SizeBytes=size)
            assert (status, str(size) in text.decode() or status == 413) == (413 if size > 16 * MIB else 400, True)
        assert web.put(path, body, Content_Encoding="zstd")[0] == 400
        assert web.put(path, b"no zstd", Content_Encoding="zstd", X_Digest_SizeBytes=len(result))[0] == 400
        assert web.put(path, body, Content_Encoding="gzip", X_Digest_SizeBytes=len(result))[0] == 400
        assert web.get(path)[0] == 404
        assert web.put(path, body, Content_Encoding="zstd", X_Digest_SizeBytes=len(result))[0] == 200
        status, _, found = web.get(path)
        assert status == 200
        if unchecked:
            assert found == result
            return
        assert message("ActionResult").FromString(found).exit_code == 7
        as_json = b'{"exitCode": 8}'
        headers = {"Content_Type": "application/json", "Content_Encoding": "zstd", "X_Digest_SizeBytes": len(as_json)}
        assert web.put(path, packed(as_json), **headers)[0] == 200
        assert message("ActionResult").FromString(web.get(path)[2]).exit_code == 8


def test_ranges(web):
    for size in (1000, MIB):
        content = unique(size)
        path = f"/cas/{content.hash}"
        web.put(path, content.bytes())
        for header, start, end in [
            ("bytes=0-0", 0, 1),
            ("bytes=10-19", 10, 20),
            (f"bytes={size - 5}-", size - 5, size),
            ("bytes=-7", size - 7, size),
            (f"bytes=1-{10 * size}", 1, size),
        ]:
            status, headers, data = web.get(path, Range=header, Accept_Encoding="zstd")
            assert (status, data) == (206, content.bytes()[start:end]), header
            assert headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
        status, headers, _ = web.get(path, Range=f"bytes={size}-")
        assert (status, headers["content-range"]) == (416, f"bytes */{size}")
        assert web.get(path, Range="bytes=0-1,5-6")[::2] == (200, content.bytes())
        assert web.get(path, Range="bytes=0-1", If_Range=f'"{content.hash}"')[0] == 206
        assert web.get(path, Range="bytes=0-1", If_Range='"other"')[0] == 200


def test_a_client_that_has_it_is_told_so(web):
    content = unique(1000)
    path = f"/cas/{content.hash}"
    web.put(path, content.bytes())
    status, headers, data = web.get(path, If_None_Match=f'"x", W/"{content.hash}"')
    assert (status, headers["etag"], data) == (304, f'"{content.hash}"', b"")
    assert web.get(path, If_None_Match='"x"')[0] == 200


def test_a_body_without_a_length(web):
    content, long = unique(MIB), unique(5 * MIB)
    pieces = list(content.chunks(length=100_000))
    assert web.ask("PUT", f"/cas/{content.hash}", iter(pieces), chunked=True, Transfer_Encoding="chunked")[0] == 200
    assert web.get(f"/cas/{content.hash}")[2] == content.bytes()
    # With its size declared it may be as long as it likes; without it may not.
    size = {"X-Digest-SizeBytes": str(long.size), "Transfer-Encoding": "chunked"}
    web.connection.request("PUT", f"/cas/{long.hash}", iter(list(long.chunks())), size, encode_chunked=True)
    reply = web.connection.getresponse()
    assert (reply.status, reply.read()) == (200, b"")
    assert web.get(f"/cas/{long.hash}")[2] == long.bytes()
    with socket.create_connection(web.connection.sock.getpeername(), timeout=60) as raw:
        raw.sendall(f"PUT /cas/{unique(8).hash} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        raw.sendall(b"100000\r\n" + bytes(MIB) + b"\r\n")
        raw.sendall(b"".join(b"100000\r\n" + bytes(MIB) + b"\r\n" for _ in range(4)))
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_client_may_ask_first(web):
    # `Expect: 100-continue`: for what is here there is a final answer and no body; else the body is asked for.
    content = unique(2 * MIB)
    head = f"PUT /cas/{content.hash} HTTP/1.1\r\nhost: x\r\ncontent-length: {content.size}\r\nexpect: 100-continue\r\n\r\n"
    web.get("/status")
    address = web.connection.sock.getpeername()
    with socket.create_connection(address, timeout=60) as raw:
        raw.sendall(head.encode())
        assert raw.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(content.bytes())
        assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")
    with socket.create_connection(address, timeout=60) as raw:
        raw.sendall(head.encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_names_and_methods(web):
    hash = unique(3).hash
    for method, path, status in [
        ("GET", f"/cas/{hash.upper()}", 400),
        ("GET", f"/cas/{hash[1:]}", 400),
        ("PUT", f"/ac/{hash}0", 400),
        ("GET", f"/cas.v2/{hash}", 400),
        ("DELETE", f"/cas/{hash}", 403),
        ("POST", f"/ac/{hash}", 405),
        ("OPTIONS", f"/ac/{hash}", 405),
    ]:
        found, headers, text = web.ask(method, path)
        assert found == status, (method, path, text)
        assert text.decode().strip(), "an error must say what happened"
        assert headers.get("allow") == ("GET, HEAD, PUT, DELETE" if status == 405 else None)


def test_action_results(web, client):
    output = unique(1000)
    path = f"/ac/{unique(11).hash}"
    result = message("ActionResult")(
        output_files=[{"path": "a/b", "digest": digest(output)}], exit_code=7, stdout_raw=b"said"
    )
    assert web.put(path, b"\xff no message")[0] == 400
    assert web.put(path, message("ActionResult")(output_files=[{"path": "/abs"}]).SerializeToString())[0] == 400
    assert web.put(path, result.SerializeToString())[0] == 200
    # Its blob is not here: a miss, over HTTP as over gRPC.
    assert web.get(path)[0] == 404
    client.write(upload_name(output.hash, output.size), output.chunks())
    assert web.put(path, result.SerializeToString())[0] == 200
    status, headers, data = web.get(path)
    assert (status, headers["content-type"]) == (200, "application/octet-stream")
    stored = message("ActionResult").FromString(data)
    assert (stored.exit_code, stored.output_files[0].path) == (7, "a/b")
    assert web.ask("HEAD", path)[1]["content-length"] == str(len(data))
    action = message("Digest")(hash=path[4:], size_bytes=11)
    assert client.get_action(action).exit_code == 7
    # As JSON, both ways.
    status, headers, text = web.get(path, Accept="application/json")
    assert (status, headers["content-type"], json.loads(text)["exitCode"]) == (200, "application/json", 7)
    again = f"/ac/{unique(12).hash}"
    assert web.put(again, text, Content_Type="application/json; charset=utf-8")[0] == 200
    assert message("ActionResult").FromString(web.get(again)[2]) == stored
    assert web.put(again, b"{", Content_Type="application/json")[0] == 400
    assert web.put(again, data, X_Digest_SizeBytes=len(data))[0] == 200
    assert web.put(again, data, X_Digest_SizeBytes=len(data) + 1)[0] == 400
    assert web.announce(again, 4 * MIB) == 413


def test_instances_can_be_kept_apart(fresh):
    server = fresh(http_address="127.0.0.1:0", enable_ac_key_instance_mangling="true")
    hash = unique(13).hash
    body = message("ActionResult")(exit_code=3).SerializeToString()
    with Http(server) as web, Client(server.address) as client:
        assert web.put(f"/team/a/ac/{hash}", body)[0] == 200
        assert web.get(f"/team/a/ac/{hash}")[0] == 200
        assert web.get(f"/team/b/ac/{hash}")[0] == 404
        assert web.get(f"/ac/{hash}")[0] == 404
        action = message("Digest")(hash=hash, size_bytes=5)
        assert client.get_action(action, instance_name="team/a").exit_code == 3


def test_values_that_are_no_action_results(fresh):
    # Kept apart from what gRPC clients see, whole, replaced, and there after a crash.
    server = fresh(http_address="127.0.0.1:0", disable_http_ac_validation="true", ack="flushed")
    values = [b"", b"not an ActionResult \xff", unique(3 * MIB).bytes()]
    paths = [f"/ac/{unique(20 + number).hash}" for number in range(len(values))]
    with Http(server) as web:
        for path, value in zip(paths, values):
            assert web.put(path, b"older")[0] == 200
            assert web.put(path, value)[0] == 200
    server.restart(crash=True)
    with Http(server) as web, Client(server.address) as client:
        for path, value in zip(paths, values):
            status, headers, data = web.get(path)
            assert (status, data) == (200, value)
            assert web.ask("HEAD", path)[1]["content-length"] == str(len(value))
            with pytest.raises(Exception, match="NOT_FOUND"):
                client.get_action(message("Digest")(hash=path[4:], size_bytes=5))
        assert web.announce(paths[0], 17 * MIB) == 413


def test_a_write_that_is_not_let_in(fresh):
    # 503 with Retry-After; reads, actions and present blobs pass.
    server = fresh(http_address="127.0.0.1:0", max_inflight_cas_writes=1, write_queue_wait="0s", cores="1")
    here, large, small, held = unique(1000), unique(600_000), unique(100), unique(4 * MIB)
    with Http(server) as web, Http(server) as holder:
        assert web.put(f"/cas/{here.hash}", here.bytes())[0] == 200
        holder.connection.putrequest("PUT", f"/cas/{held.hash}")
        holder.connection.putheader("Content-Length", str(held.size))
        holder.connection.endheaders(held.read(0, MIB))
        until(lambda: scrape(server)["bazel_remote_cas_write_slots_inflight"] == 1, "the upload has its slot")
        for content in (small, large):
            with Http(server) as other:
                status, headers, text = other.put(f"/cas/{content.hash}", content.bytes())
            assert (status, headers["retry-after"]) == (503, "1")
            assert b"--max_inflight_cas_writes" in text
            assert f"HTTP PUT SHED {content.hash}" in server.log
            assert web.get(f"/cas/{content.hash}")[0] == 404
        assert web.put(f"/cas/{here.hash}", here.bytes())[0] == 200
        assert web.get(f"/cas/{here.hash}")[2] == here.bytes()
        assert web.put(f"/ac/{unique(14).hash}", message("ActionResult")(exit_code=1).SerializeToString())[0] == 200
        for piece in held.chunks(offset=MIB):
            holder.connection.send(piece)
        assert holder.connection.getresponse().read() == b""
        assert web.get(f"/cas/{held.hash}")[2] == held.bytes()
        assert web.put(f"/cas/{large.hash}", large.bytes())[0] == 200


def test_a_client_that_goes_away_leaves_nothing(fresh):
    server = fresh(http_address="127.0.0.1:0", max_inflight_cas_writes=1, write_queue_wait="0s", cores="1")
    content = unique(4 * MIB)
    with Http(server) as web:
        web.connection.putrequest("PUT", f"/cas/{content.hash}")
        web.connection.putheader("Content-Length", str(content.size))
        web.connection.endheaders(content.read(0, MIB))
        until(lambda: scrape(server)["bazel_remote_cas_write_slots_inflight"] == 1, "the upload has its slot")
    until(lambda: scrape(server)["bazel_remote_cas_write_slots_inflight"] == 0, "the slot is free")
    with Http(server) as web:
        assert web.get(f"/cas/{content.hash}")[0] == 404
        assert web.put(f"/cas/{content.hash}", content.bytes())[0] == 200


def test_a_slow_reader_costs_little(fresh):
    server = fresh(http_address="127.0.0.1:0", cores="1", memory_limit="256M")
    content = unique(64 * MIB)
    with Client(server.address) as client:
        client.write(upload_name(content.hash, content.size), content.chunks())
    before = server.rss()
    readers = [socket.create_connection(("127.0.0.1", server.http_port), timeout=60) for _ in range(20)]
    try:
        for reader in readers:
            reader.sendall(f"GET /cas/{content.hash} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        busy = 'http_requests_inflight{handler="GET",service=""}'
        until(lambda: scrape(server)[busy] == 20, "all are served")
        for reader in readers:
            assert reader.recv(1000)
        assert server.rss() - before < 64 * MIB
    finally:
        for reader in readers:
            reader.close()


def test_curl(server):
    # A client that people use: files up and down, compressed, resumed, and a failure that it reports.
    home = scratch("curl")
    content = unique(3 * MIB)
    source, target = home / "in", home / "out"
    source.write_bytes(content.bytes())
    url = f"http://{server.http_address}/cas/{content.hash}"

    def curl(*arguments: str) -> str:
        command = ["curl", "-sS", "--max-time", "60", "-o", str(target), "-w", "%{http_code}", *arguments, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=90).stdout

    try:
        assert curl() == "404"
        assert curl("-T", str(source)) == "200"
        assert curl() == "200" and target.read_bytes() == content.bytes()
        target.write_bytes(content.read(0, MIB))
        assert curl("-C", "-") == "206" and target.read_bytes() == content.bytes()
        assert curl("-H", "Accept-Encoding: zstd") == "200" and unpacked(target.read_bytes()) == content.bytes()
        assert curl("-X", "PATCH") == "405"
        assert curl("-I") == "200"
    finally:
        shutil.rmtree(home)


@pytest.mark.parametrize("login", ["", "ci:ccache-pass-1@"])
def test_ccache(fresh, login):
    # Two machines, each with an empty local cache: what one compiles the other one gets.
    home = scratch("ccache")
    (home / "htpasswd").write_text(f"ci:{credentials.sha1('ccache-pass-1')}\n")
    guard = {"htpasswd_file": str(home / "htpasswd")} if login else {}
    server = fresh(http_address="127.0.0.1:0", disable_http_ac_validation="true", **guard)
    source = home / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")

    def compile_on(machine: str) -> dict:
        environment = os.environ | {
            "CCACHE_DIR": str(home / machine),
            "CCACHE_REMOTE_STORAGE": f"http://{login}{server.http_address}|layout=bazel",
            "CCACHE_NOHASHDIR": "1",
            "CCACHE_CONFIGPATH": str(home / "none.conf"),
        }
        target = home / f"{machine}.o"
        subprocess.run(["ccache", "cc", "-c", str(source), "-o", str(target)], env=environment, check=True, timeout=60)
        told = subprocess.run(["ccache", "--print-stats"], env=environment, capture_output=True, text=True, timeout=60)
        return {name: int(value) for name, value in (line.split("\t") for line in told.stdout.splitlines())}

    try:
        first = compile_on("one")
        assert first["cache_miss"] == 1 and first.get("remote_storage_error", 0) == 0, first
        second = compile_on("two")
        hits = second["direct_cache_hit"] + second["preprocessed_cache_hit"]
        assert (hits, second["cache_miss"]) == (1, 0), second
        assert pathlib.Path(home / "one.o").read_bytes() == pathlib.Path(home / "two.o").read_bytes()
    finally:
        shutil.rmtree(home)
