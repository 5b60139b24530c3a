"""Goal: curl, as scripts use it, sees the HTTP status that says what happened.
Method: one request for each status code that the server has an everyday way to."""

import contextlib
import http.client
import pathlib
import shutil
import subprocess

import pytest

import credentials
from content import Content, sha256, unique
from server import Server, scratch

RUN_S = 30
BLOB = b"a blob of some bytes"
HASH = sha256(BLOB)
MISSING = "ab" * 32
BODY_MAX = 1 << 20


@pytest.fixture(scope="module")
def server():
    home = scratch("curl")
    (home / "htpasswd").write_text("".join(f"{user}:{credentials.sha1('pass-' + user)}\n" for user in ("writer", "reader")))
    (home / "roles").write_text("read: reader\n")
    flags = {"htpasswd_file": str(home / "htpasswd"), "roles_file": str(home / "roles"), "http_address": "127.0.0.1:0"}
    with Server(max_blob_size=BODY_MAX, max_inflight_cas_writes="1", write_queue_wait="0", cores="1", **flags) as running:
        yield running
    shutil.rmtree(home)


def curl(server: Server, path: str, *arguments: str, user: str | None = "writer", body: bytes | None = None) -> tuple[int, str]:
    """The status, and the text of the answer."""
    command = ["curl", "-sS", "-m", str(RUN_S), "-w", "\n%{http_code}", *arguments]
    if user is not None:
        command += ["-u", f"{user}:pass-{user}"]
    if body is not None:
        command += ["-T", "-"]
    done = subprocess.run([*command, f"http://{server.http_address}{path}"], input=body, capture_output=True, timeout=2 * RUN_S)
    text, _, status = done.stdout.decode().rpartition("\n")
    assert status != "000", done.stderr
    return int(status), text


@contextlib.contextmanager
def writing(server: Server):
    """An upload that is under way, and has the only place."""
    connection = http.client.HTTPConnection(server.http_address, timeout=RUN_S)
    size = 600_000
    content = unique(size)
    connection.putrequest("PUT", f"/cas/{content.hash}")
    connection.putheader("Authorization", credentials.basic("writer", "pass-writer"))
    connection.putheader("Content-Length", str(size))
    connection.endheaders(content.bytes()[:300_000])
    try:
        yield
    finally:
        connection.close()


def test_200_and_what_a_stored_blob_has(server):
    assert curl(server, f"/cas/{HASH}", body=BLOB) == (200, "")
    assert curl(server, f"/cas/{HASH}") == (200, BLOB.decode())
    assert curl(server, f"/cas/{HASH}", user="reader")[0] == 200
    assert curl(server, f"/cas/{HASH}", "-I")[0] == 200
    assert curl(server, f"/cas/{HASH}", "-r", "2-5") == (206, "blob")
    assert curl(server, f"/cas/{HASH}", "-r", "100-")[0] == 416
    assert curl(server, f"/cas/{HASH}", "-H", f'If-None-Match: "{HASH}"') == (304, "")


@pytest.mark.parametrize(
    "status, path, arguments, options",
    [
        (400, f"/cas/{MISSING}", [], {"body": b"another hash"}),
        (400, "/cas/short", [], {}),
        (401, f"/cas/{HASH}", [], {"user": None}),
        (401, f"/cas/{HASH}", ["-u", "writer:wrong"], {"user": None}),
        (401, f"/cas/{MISSING}", [], {"user": None, "body": bytes(300_000)}),
        (403, f"/cas/{MISSING}", [], {"user": "reader", "body": b"x"}),
        (404, f"/cas/{MISSING}", [], {}),
        (400, "/nothing", [], {}),
        (405, f"/cas/{HASH}", ["-X", "PATCH"], {}),
        (403, f"/cas/{HASH}", ["-X", "DELETE"], {}),
        (405, "/metrics", ["-X", "POST"], {}),
        (400, f"/cas/{MISSING}", ["-H", f"X-Digest-SizeBytes: {BODY_MAX + 1}"], {"body": b"x"}),
        (400, f"/cas/{MISSING}", ["-H", "Content-Encoding: br"], {"body": b"x"}),
        (431, f"/cas/{HASH}", ["-H", "X-Long: " + "x" * 40_000], {}),
    ],
)
def test_refusals(server, status, path, arguments, options):
    found, text = curl(server, path, *arguments, **options)
    assert found == status, text
    assert text.strip() or status == 431


def test_503_while_another_writes(server):
    with writing(server):
        content = unique(600_000)
        statuses = set()
        # The other upload takes its place within some turns of its core.
        for _ in range(100):
            statuses.add(curl(server, f"/cas/{content.hash}", body=content.bytes())[0])
            content = unique(600_000)
            if 503 in statuses:
                break
        assert 503 in statuses and statuses <= {200, 503}
