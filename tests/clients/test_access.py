"""Goal: who may do what is the same over gRPC and HTTP, and no credential shows anywhere.
Method: one table of credentials against every method and every route; the ways in which clients send credentials; files that
change while the server runs; floods of wrong passwords."""

import concurrent.futures
import http.client
import os
import pathlib
import shutil
import signal
import uuid

import grpc
import pytest

import credentials
from content import unique
from metrics import scrape
from reapi import (
    ACTION_CACHE, BYTE_STREAM, CAPABILITIES, CAS, HEALTH, Client, Code, blob_name, digest, digest_of, fails, message, upload_name,
    write_requests,
)  # fmt: skip
from server import Server, StartError, scratch
from wait import until

READER, WRITER, ADMIN = ("reader", "r-pass-1"), ("writer", "w-pass-2"), ("boss", "a-pass-3")
# Each also as a token.
TOKENS = {"read": "read-token-0123456789", "write": "write-token-012345678", "admin": "admin-token-012345678"}
SECRETS = [READER[1], WRITER[1], ADMIN[1], *TOKENS.values(), "wrong-pass-9"]
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"

CREDENTIALS = {
    "none": None,
    "wrong": credentials.basic(WRITER[0], "wrong-pass-9"),
    "unknown": credentials.basic("nobody", "wrong-pass-9"),
    "malformed": "Basic %%%",
    "wrong token": "Bearer no-token-of-ours-here",
    "read": credentials.basic(*READER),
    "write": credentials.basic(*WRITER),
    "admin": credentials.basic(*ADMIN),
    "read token": f"Bearer {TOKENS['read']}",
    "write token": f"Bearer {TOKENS['write']}",
    "admin token": f"Bearer {TOKENS['admin']}",
}
UNKNOWN = {"none", "wrong", "unknown", "malformed", "wrong token"}


@pytest.fixture(scope="module")
def home():
    made = scratch("access")
    yield made
    shutil.rmtree(made)


def write_files(home: pathlib.Path) -> dict[str, str]:
    lines = [(READER, credentials.apr1), (WRITER, credentials.bcrypt), (ADMIN, credentials.sha1)]
    (home / "htpasswd").write_text("".join(f"{user}:{make(password)}\n" for (user, password), make in lines))
    (home / "tokens").write_text("".join(f"{role} {token} a comment\n" for role, token in TOKENS.items()))
    (home / "roles").write_text(f"read: {READER[0]}\nadmin: {ADMIN[0]}\n")
    return {f"{name}_file": str(home / file) for name, file in [("htpasswd", "htpasswd"), ("token", "tokens"), ("roles", "roles")]}


@pytest.fixture(scope="module")
def flags(home):
    return write_files(home) | {"http_address": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def guarded(flags):
    # Traces of everything: no credential may show in them either.
    with Server(environment={"RINGCAS_LOG": "trace"}, **flags) as server:
        yield server
        for secret in SECRETS:
            assert secret not in server.log, "a credential is in the log"
        for value in CREDENTIALS.values():
            assert value is None or value.split()[1] not in server.log, "a credential is in the log"


@pytest.fixture(scope="module")
def half_open(flags):
    with Server(allow_unauthenticated_reads="true", **flags) as server:
        yield server


@pytest.fixture(scope="module")
def open_to_all():
    with Server(http_address="127.0.0.1:0") as server:
        yield server


def metadata(credential: str | None) -> list[tuple[str, str]]:
    return [] if credential is None else [("authorization", credential)]


def unary(path: str, name: str, **fields):
    def call(client: Client):
        client.unary(path, message(name)(**fields), None)

    return call


def read(client: Client):
    client.read(blob_name(unique(3).hash, 3))


def write(client: Client):
    content = unique(100)
    client.write(upload_name(content.hash, 100), content.chunks())


def batch_update(client: Client):
    content = unique(50)
    (reply,) = client.batch_update([(digest(content), content.bytes())])
    assert reply.status.code == 0


def get_tree(client: Client):
    client.tree_pages(digest(unique(3)))


def update_action(client: Client):
    client.update_action(digest(unique(3)), message("ActionResult")(exit_code=1))


def stream(path: str):
    def call(client: Client):
        opened = client.channel.stream_stream(path)(iter([b""]), timeout=20, metadata=client.metadata)
        next(iter(opened), None)
        opened.cancel()

    return call


def watch(client: Client):
    opened = client.channel.unary_stream(f"{HEALTH}/Watch")(b"", timeout=20, metadata=client.metadata)
    next(iter(opened))
    opened.cancel()


SOME = {"hash": "ab" * 32, "size_bytes": 3}
# Of each method: what it needs, and a call of it.
METHODS = {
    "GetCapabilities": ("read", unary(f"{CAPABILITIES}/GetCapabilities", "GetCapabilitiesRequest")),
    "FindMissingBlobs": ("read", unary(f"{CAS}/FindMissingBlobs", "FindMissingBlobsRequest", blob_digests=[SOME])),
    "BatchReadBlobs": ("read", unary(f"{CAS}/BatchReadBlobs", "BatchReadBlobsRequest", digests=[SOME])),
    "GetTree": ("read", get_tree),
    "GetActionResult": ("read", unary(f"{ACTION_CACHE}/GetActionResult", "GetActionResultRequest", action_digest=SOME)),
    "Read": ("read", read),
    "SplitBlob": ("read", lambda client: client.unary(f"{CAS}/SplitBlob", b"", None)),
    "Reflection": ("read", stream(REFLECTION)),
    "ReflectionAlpha": ("read", stream(REFLECTION.replace("v1", "v1alpha"))),
    "NoSuchMethod": ("read", lambda client: client.unary(f"{CAS}/NoSuchMethod", b"", None)),
    "BatchUpdateBlobs": ("write", batch_update),
    "Write": ("write", write),
    "QueryWriteStatus": ("write", lambda client: client.write_status(upload_name("ab" * 32, 3))),
    "UpdateActionResult": ("write", update_action),
    "SpliceBlob": ("write", lambda client: client.unary(f"{CAS}/SpliceBlob", b"", None)),
    "Check": (None, lambda client: client.unary(f"{HEALTH}/Check", b"", None)),
    "List": (None, lambda client: client.unary(f"{HEALTH}/List", b"", None)),
    "Watch": (None, watch),
}
ROLES = ["read", "write", "admin"]
# How a call may end that was let in.
LET_IN = {None, Code.NOT_FOUND, Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT}


def expected(credential: str, needs: str | None, half_open: bool):
    """The code of a refusal, or `None`."""
    if needs is None or (half_open and needs == "read"):
        return None
    if credential in UNKNOWN:
        return Code.UNAUTHENTICATED
    has = credential.split()[0]
    return None if ROLES.index(has) >= ROLES.index(needs) else Code.PERMISSION_DENIED


def ended(server: Server, credential: str | None, call):
    with Client(server.address) as client:
        client.metadata += metadata(credential)
        try:
            call(client)
        except grpc.RpcError as error:
            if error.code() in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED):
                assert error.details(), "a refusal must say why"
            return error.code()
    return None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("opening", ["guarded", "half_open"])
def test_every_grpc_method(request, method, opening):
    server = request.getfixturevalue(opening)
    needs, call = METHODS[method]
    for name, credential in CREDENTIALS.items():
        code = ended(server, credential, call)
        refusal = expected(name, needs, opening == "half_open")
        assert code == refusal if refusal else code in LET_IN, f"{method} with {name}: {code}, expected {refusal}"


def test_the_table_has_every_method(guarded):
    """What the server counts is what the table knows."""
    with Client(guarded.address):
        pass
    found = scrape(guarded, Authorization=CREDENTIALS["read"])
    known = {name.split('grpc_method="')[1].split('"')[0] for name in found if name.startswith("grpc_server_started_total{")}
    assert known == set(METHODS) - {"Reflection", "ReflectionAlpha", "NoSuchMethod"} | {"ServerReflectionInfo", "unknown"}


def ask(server: Server, method: str, path: str, body: bytes | None = None, headers: dict | None = None):
    connection = http.client.HTTPConnection(server.http_address, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
    finally:
        connection.close()


MISSING = "/cas/" + "ab" * 32
# Method, path, what it needs, the status of one who is let in.
ROUTES = [
    ("GET", MISSING, "read", 404),
    ("HEAD", MISSING, "read", 404),
    ("GET", "/ac/" + "ab" * 32, "read", 404),
    ("HEAD", "/some/instance/ac/" + "ab" * 32, "read", 404),
    ("GET", "/status", "read", 200),
    ("HEAD", "/status", "read", 200),
    ("GET", "/metrics", "read", 200),
    ("GET", "/cas/short", "read", 400),
    ("GET", "/nothing/here", "read", 400),
    ("PUT", MISSING, "write", 400),
    ("PUT", "/ac/" + "ab" * 32, "write", 200),
    ("GET", "/", "read", 200),
    ("HEAD", "/", "read", 200),
    ("GET", "/overview.json", "read", 200),
    ("POST", "/", "write", 405),
    ("DELETE", MISSING, "admin", 200),
    ("DELETE", "/some/instance/ac/" + "ab" * 32, "admin", 200),
    ("POST", "/admin/purge?instance=nobodys", "admin", 200),
    ("POST", "/admin/purge", "admin", 400),
    ("GET", "/admin/purge", "admin", 405),
    ("DELETE", "/cas/short", "write", 400),
    ("POST", "/metrics", "write", 405),
    ("OPTIONS", MISSING, "write", 405),
]


@pytest.mark.parametrize("opening", ["guarded", "half_open"])
@pytest.mark.parametrize("method, path, needs, inside", ROUTES, ids=[f"{method} {path[:12]}" for method, path, *_ in ROUTES])
def test_every_http_route(request, opening, method, path, needs, inside):
    server = request.getfixturevalue(opening)
    # An ActionResult with exit_code 1; no blob.
    body = b"\x20\x01" if method in ("PUT", "POST") else None
    for name, credential in CREDENTIALS.items():
        headers = {} if credential is None else {"Authorization": credential}
        status, answer, text = ask(server, method, path, body, headers)
        refusal = expected(name, needs, opening == "half_open")
        wanted = {None: inside, Code.UNAUTHENTICATED: 401, Code.PERMISSION_DENIED: 403}[refusal]
        assert status == wanted, f"{method} {path} with {name}: {status}, {text}"
        assert ("www-authenticate" in answer) == (status == 401)
        if status == 401:
            assert answer["www-authenticate"].startswith("Basic realm=") and "Bearer" in answer["www-authenticate"]
        if status in (401, 403):
            assert text.strip() or method == "HEAD", "a refusal must say why"


def test_without_access_control_everybody_reads_and_writes(open_to_all):
    for needs, call in METHODS.values():
        for credential in (None, CREDENTIALS["wrong"], CREDENTIALS["malformed"]):
            assert ended(open_to_all, credential, call) in LET_IN
    assert ask(open_to_all, "PUT", "/ac/" + "ab" * 32, b"\x20\x01")[0] == 200


@pytest.mark.parametrize("opening", ["guarded", "half_open", "open_to_all"])
def test_capabilities_say_who_may_write(request, opening):
    server = request.getfixturevalue(opening)
    for name, credential in CREDENTIALS.items():
        if opening == "guarded" and name in UNKNOWN:
            continue
        with Client(server.address) as client:
            client.metadata += metadata(credential)
            cache = client.capabilities().cache_capabilities
            may = opening == "open_to_all" or name.split()[0] in ("write", "admin")
            assert cache.action_cache_update_capabilities.update_enabled == may, name


@pytest.mark.parametrize("url_safe", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_both_alphabets_of_base64(fresh, home, url_safe, padded):
    password = "\u00fb?>~\u00ff?>"
    (home / "odd").write_text(f"u:{credentials.sha1(password)}\n")
    server = fresh(htpasswd_file=str(home / "odd"), http_address="127.0.0.1:0")
    value = credentials.basic("u", password, url_safe, padded)
    assert ended(server, value, write) is None
    assert ask(server, "GET", "/status", headers={"Authorization": value})[0] == 200


def test_another_users_password_is_wrong(guarded):
    # Whose is compared when there is no such user, so that the time tells nothing, must not let anybody in.
    for _, password in (READER, WRITER, ADMIN):
        for user in ("nobody", READER[0], ADMIN[0]):
            if (user, password) not in (READER, ADMIN):
                assert ask(guarded, "GET", "/status", headers={"Authorization": credentials.basic(user, password)})[0] == 401


def test_credentials_in_the_authority(guarded):
    # As Bazel sends those of grpc://user:password@host.
    for (user, password), code in [(WRITER, None), (READER, Code.PERMISSION_DENIED), (("writer", "wrong-pass-9"), Code.UNAUTHENTICATED)]:
        options = [("grpc.default_authority", f"{user}:{password}@{guarded.address}")]
        with grpc.insecure_channel(guarded.address, options) as channel:
            content = unique(10)
            requests = write_requests(upload_name(content.hash, 10), content.chunks())
            call = channel.stream_unary(f"{BYTE_STREAM}/Write", type(message("google.bytestream.WriteRequest")()).SerializeToString)
            try:
                call(requests, timeout=20)
                assert code is None
            except grpc.RpcError as error:
                assert error.code() == code, error


def test_a_refused_upload_costs_no_upload(guarded):
    # The answer comes while the body is on its way, and the connection goes on.
    connection = http.client.HTTPConnection(guarded.http_address, timeout=30)
    connection.putrequest("PUT", MISSING)
    connection.putheader("Content-Length", str(300_000))
    connection.endheaders(b"x" * 1000)
    reply = connection.getresponse()
    assert reply.status == 401 and reply.read()
    connection.close()
    size = 4 << 20
    content = unique(size)
    with Client(guarded.address) as client, fails(Code.UNAUTHENTICATED):
        client.write(upload_name(content.hash, size), content.chunks())


def denied(server: Server) -> dict[str, float]:
    found = scrape(server, Authorization=CREDENTIALS["read token"])
    return {name.split('"')[1]: count for name, count in found.items() if name.startswith("bazel_remote_access_denied_total{")}


def test_failures_are_counted_by_reason(fresh, flags):
    server = fresh(**flags)
    assert denied(server) == {reason: 0 for reason in ("no_credential", "malformed", "wrong_password", "wrong_token", "role", "busy")}
    for name in ("none", "wrong", "unknown", "malformed", "wrong token", "read"):
        headers = {"Authorization": CREDENTIALS[name]} if CREDENTIALS[name] else {}
        assert ask(server, "PUT", MISSING, b"", headers)[0] in (401, 403)
        assert ended(server, CREDENTIALS[name], write)
    counts = denied(server)
    assert counts == {"no_credential": 2, "malformed": 2, "wrong_password": 4, "wrong_token": 2, "role": 2, "busy": 0}


def value(server, name: str, credential: str = CREDENTIALS["write token"]) -> float:
    return scrape(server, Authorization=credential)[f"bazel_remote_{name}"]


def test_a_password_is_hashed_once(fresh, home):
    # 300 calls over 10 connections at a time, with a hash that takes a quarter of a second: it is made once by each core at most.
    (home / "slow").write_text(f"u:{credentials.bcrypt('slow-pass-1', 12)}\n")
    server = fresh(htpasswd_file=str(home / "slow"), http_address="127.0.0.1:0", cores="2")

    def some(_):
        with Client(server.address) as client:
            client.metadata += metadata(credentials.basic("u", "slow-pass-1"))
            for _ in range(30):
                client.capabilities()

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        list(pool.map(some, range(10)))
    count = value(server, "passwords_compared_total", credentials.basic("u", "slow-pass-1"))
    assert 1 <= count <= 2, count


def test_a_flood_of_wrong_passwords_delays_nobody_who_is_known(fresh, home):
    # Hashes of a quarter of a second each, asked for by 64 connections without end: the cores go on, so that whoever is
    # known and whoever needs no credential is answered as before. What is too much is refused as such.
    (home / "flooded").write_text(f"u:{credentials.bcrypt('right-pass-1', 12)}\n")
    (home / "token").write_text(f"write {TOKENS['write']}\n")
    server = fresh(htpasswd_file=str(home / "flooded"), token_file=str(home / "token"), http_address="127.0.0.1:0", cores="1")
    right = [("authorization", credentials.basic("u", "right-pass-1"))]
    with Client(server.address) as known:
        known.metadata += right
        known.capabilities()
        with Client(server.address) as guesser:
            request = message("GetCapabilitiesRequest")().SerializeToString()
            call = guesser.channel.unary_unary(f"{CAPABILITIES}/GetCapabilities")
            guesses = [
                call.future(request, timeout=60, metadata=[("authorization", credentials.basic("u", f"guess-{number}-{uuid.uuid4()}"))])
                for number in range(500)
            ]
            before = value(server, "passwords_compared_total")
            for _ in range(50):
                known.capabilities()
                known.unary(f"{HEALTH}/Check", b"", None)
                assert ask(server, "GET", "/status", headers={"Authorization": f"Bearer {TOKENS['write']}"})[0] == 200
            hashed = value(server, "passwords_compared_total") - before
            waiting = sum(not guess.done() for guess in guesses)
            assert waiting > 0, "the flood was over before anybody was asked"
            # Who waited for a hash each time would have waited for 150.
            assert hashed < 50, hashed
            codes = {guess.code() for guess in guesses if guess.done()}
            assert codes <= {Code.UNAUTHENTICATED, Code.UNAVAILABLE}, codes
            for guess in guesses:
                guess.cancel()
            # A comparison may take 20 s to have its turn: nobody waits for it whose client has gone.
            until(lambda: value(server, "calls_inflight") == 0, "cancelled calls end at once", 10)


def replace(path: pathlib.Path, text: str) -> None:
    """At once: a server that looks meanwhile sees the one or the other."""
    (path.parent / "next").write_text(text)
    os.replace(path.parent / "next", path)


def test_files_that_change_count_at_once_and_wrong_ones_never(fresh, home):
    mine = scratch("reload")
    try:
        server = fresh(**write_files(mine), http_address="127.0.0.1:0")
        with Client(server.address) as client:
            client.metadata += metadata(CREDENTIALS["write"])
            batch_update(client)
            whole = (mine / "htpasswd").read_text()
            # Broken: the old one stays, also for who was not known yet.
            replace(mine / "htpasswd", whole + "torn:$2y$05$ab")
            until(lambda: "those of before stay" in server.log, "the broken file is seen", 30)
            assert "--htpasswd_file" in server.log and "line 4" in server.log
            batch_update(client)
            assert ended(server, CREDENTIALS["admin"], write) is None
            # A new password: the old one is forgotten on the connection that stands.
            replace(mine / "htpasswd", f"writer:{credentials.bcrypt('new-pass-4')}\n")
            until(lambda: ended_on(client, batch_update) == Code.UNAUTHENTICATED, "the old password is refused", 30)
            assert ended(server, credentials.basic("writer", "new-pass-4"), write) is None
            # A role.
            replace(mine / "roles", "read: writer\n")
            fresh_one = credentials.basic("writer", "new-pass-4")
            until(lambda: ended(server, fresh_one, write) == Code.PERMISSION_DENIED, "the role is taken away", 30)
            # A token.
            replace(mine / "tokens", "read another-token-0123456\n")
            until(lambda: ended(server, CREDENTIALS["read token"], read) == Code.UNAUTHENTICATED, "the token is refused", 30)
        found = scrape(server, Authorization="Bearer another-token-0123456")
        assert found['bazel_remote_reloads_total{result="failed",what="credentials"}'] == 1
    finally:
        shutil.rmtree(mine)


def test_sighup_reads_other_files(fresh, home):
    # The configuration file names other files than at the start; what cannot change is said.
    mine = scratch("hangup")
    try:
        flags = write_files(mine)
        (mine / "other").write_text("write token-of-the-other-file\n")
        settings = mine / "settings.yml"

        def configure(**values):
            settings.write_text("".join(f"{name}: {value}\n" for name, value in values.items()))

        configure(**flags)
        server = fresh(config_file=str(settings), http_address="127.0.0.1:0")
        assert ended(server, CREDENTIALS["write token"], write) is None
        configure(**flags | {"token_file": mine / "other", "allow_unauthenticated_reads": "true"})
        server.signal(signal.SIGHUP)
        until(lambda: "reload: token_file was" in server.log, "the new token file")
        assert ended(server, CREDENTIALS["write token"], write) == Code.UNAUTHENTICATED
        assert ended(server, "Bearer token-of-the-other-file", write) is None
        assert ended(server, None, read) == Code.NOT_FOUND
        # Nobody opens a cache by emptying a file.
        settings.write_text("")
        server.signal(signal.SIGHUP)
        until(lambda: "access control cannot be turned off" in server.log, "the refusal")
        assert ended(server, None, write) == Code.UNAUTHENTICATED
    finally:
        shutil.rmtree(mine)


def test_the_names_of_bazel_remote(fresh, home):
    # Its variables, odd ones included, and empty values, which are its defaults.
    files = write_files(home)
    environment = {
        "BAZEL_REMOTE_HTPASSWD_FILE": files["htpasswd_file"], "BAZEL_REMOTE_UNAUTHENTICATED_READS": "true",
        "BAZEL_REMOTE_TLS_CERT_FILE": "", "BAZEL_REMOTE_TLS_KEY_FILE": "", "BAZEL_REMOTE_TLS_CA_FILE": "",
        "BAZEL_REMOTE_MIN_TLS_VERSION": "1.0",
    }  # fmt: skip
    server = Server(environment=environment, http_address="127.0.0.1:0")
    try:
        server.start()
        assert ended(server, None, read) == Code.NOT_FOUND
        assert ended(server, None, write) == Code.UNAUTHENTICATED
        assert ended(server, CREDENTIALS["write"], write) is None
    finally:
        server.close()


def ended_on(client: Client, call):
    try:
        call(client)
    except grpc.RpcError as error:
        return error.code()
    return None


@pytest.mark.parametrize(
    "name, text, problem",
    [
        ("htpasswd_file", "user-without-hash\n", "line 1: it must be user:hash"),
        ("htpasswd_file", "a:$6$salt$hash\n", "make it with `htpasswd -B`"),
        ("token_file", "write\n", "line 1: it must be `role token`"),
        ("token_file", "\n\nread short\n", "line 3: the token must have at least 16 bytes"),
        ("roles_file", "readers: a\n", "line 1: it must be `role: name name ...`"),
        ("htpasswd_file", None, "Give a file that this user may read"),
    ],
)
def test_a_start_with_a_wrong_file_names_it(fresh, home, name, text, problem):
    path = home / f"wrong-{name}"
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    (home / "good-tokens").write_text(f"write {TOKENS['write']}\n")
    flags = {"token_file": str(home / "good-tokens")} | {name: str(path)}
    with pytest.raises(StartError) as error:
        fresh(**flags)
    last = error.value.log.strip().splitlines()[-1]
    assert f"--{name} {path}" in last and problem in last, last
    assert error.value.code == 1
    for secret in ("$6$", "short\n"):
        assert secret not in last


def test_a_file_that_names_nobody_is_told(fresh, home):
    """At the start, at a check, when the file changes and on SIGHUP: the server runs, as users may be added."""
    passwords, tokens = home / "empty-htpasswd", home / "empty-tokens"
    passwords.write_text("# none yet\n")
    tokens.write_text("")
    told = f"--htpasswd_file {passwords}: nobody stands in it: no client is let in"
    server = fresh(htpasswd_file=str(passwords))
    assert told in server.log and ended(server, None, read) == Code.UNAUTHENTICATED
    replace(passwords, f"a:{credentials.apr1('new-pass')}\n")
    until(lambda: ended(server, credentials.basic("a", "new-pass"), read) == Code.NOT_FOUND, "a user was added", 30)
    for count, change in [(2, lambda: replace(passwords, "\n")), (3, lambda: server.signal(signal.SIGHUP))]:
        change()
        until(lambda: server.log.count(told) == count, "it is told again", 30)
    assert ended(server, credentials.basic("a", "new-pass"), read) == Code.UNAUTHENTICATED
    server.stop()
    both = {"htpasswd_file": str(passwords), "token_file": str(tokens), "allow_unauthenticated_reads": "true"}
    log = fresh(**both).log
    assert all(f"{path}: nobody stands in it: no client may write" in log for path in (passwords, tokens))
    tokens.write_text(f"write {TOKENS['write']}\n")
    log = fresh(**both).log
    assert f"{passwords}: nobody stands in it\n" in log and f"{tokens}: nobody" not in log


def test_the_log_warns_only_where_nothing_protects(fresh, flags):
    free, guarded = fresh(grpc_address=":0"), fresh(**flags | {"grpc_address": ":0"})
    assert "can read and write this cache" in free.log
    assert "can read and write this cache" not in guarded.log
    assert "access control: takes passwords, tokens" in guarded.log
    assert "credentials travel in clear text" in guarded.log
