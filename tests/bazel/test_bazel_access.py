"""Goal: builds by real Bazel with credentials do as their role says, over every scheme that Bazel has.
Method: Debian's Bazel over http:// and grpc:// with user and password, Bazel 2.1.0 over grpcs:// with and without a
certificate of its own: who may write stores, who may read gets hits and no warning, who may neither is told so."""

import pathlib
import shutil

import pytest

import credentials
import runner
import workspace
from server import Server, free_port, scratch

OUTPUTS = 12
WRITER, READER = "writer:p-w-123", "reader:p-r-123"


def lay(root: pathlib.Path) -> None:
    workspace.write_outputs(root, OUTPUTS, 50_000)


@pytest.fixture(scope="module")
def home():
    made = scratch("bazel-access")
    lines = [f"{user}:{make(password)}\n" for (user, password), make in [
        (WRITER.split(":"), credentials.bcrypt), (READER.split(":"), credentials.apr1),
    ]]  # fmt: skip
    (made / "htpasswd").write_text("".join(lines))
    (made / "roles").write_text("read: reader cert/reader\n")
    yield made
    shutil.rmtree(made)


def guarded(home: pathlib.Path) -> dict[str, str]:
    return {
        "htpasswd_file": str(home / "htpasswd"),
        "roles_file": str(home / "roles"),
        "http_address": "127.0.0.1:0",
        "ack": "flushed",
    }


def stores(bazel, address: str, *flags: str) -> None:
    counts = bazel.run("build", address, *flags)
    assert counts.get("local") == OUTPUTS and not bazel.warnings("Writing to"), bazel.log


def hits(bazel, address: str, *flags: str) -> None:
    bazel.forget()
    counts = bazel.run("build", address, *flags)
    assert counts.get("remote cache hit") == OUTPUTS, (counts, bazel.log)
    assert not bazel.warnings("Writing to") and not bazel.warnings("Reading from"), bazel.log


def fails(bazel, address: str, *flags: str) -> str:
    bazel.forget()
    with pytest.raises(AssertionError) as error:
        bazel.run("build", address, *flags)
    return str(error.value)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_passwords(home, scheme):
    with runner.bazel(lay) as bazel, Server(**guarded(home)) as server:
        address = server.address if scheme == "grpc" else server.http_address

        def url(login):
            return f"{scheme}://{login}@{address}"

        stores(bazel, url(WRITER))
        hits(bazel, url(WRITER))
        hits(bazel, url(READER), "--remote_upload_local_results=false")
        assert WRITER.split(":")[1] not in server.log
        if scheme == "grpc":
            # This Bazel asks for capabilities first.
            assert "UNAUTHENTICATED" in fails(bazel, url("writer:wrong"))
            assert "UNAUTHENTICATED" in fails(bazel, f"grpc://{address}")
            # And does not build where it may not upload what it is told to.
            assert "not authorized to write local results" in fails(bazel, url(READER))
        else:
            bazel.forget()
            counts = bazel.run("build", url("writer:wrong"))
            assert counts.get("local") == OUTPUTS and "401" in bazel.log, bazel.log


def test_reads_without_a_credential(home):
    with runner.bazel(lay) as bazel, Server(**guarded(home), allow_unauthenticated_reads="true") as server:
        stores(bazel, f"grpc://{WRITER}@{server.address}")
        hits(bazel, f"grpc://{server.address}", "--remote_upload_local_results=false")
        hits(bazel, f"http://{server.http_address}", "--remote_upload_local_results=false")


def test_a_token(home):
    (home / "tokens").write_text("write bazel-token-0123456789\n")
    with runner.bazel(lay) as bazel, Server(token_file=str(home / "tokens")) as server:
        header = "--remote_header=authorization=Bearer bazel-token-0123456789"
        stores(bazel, server.address, header)
        hits(bazel, server.address, header)


@pytest.mark.parametrize("ports", ["two", "one"])
def test_grpcs(home, ports):
    authority = credentials.Authority(home)
    certificate, key = authority.sign("server", "/CN=cache")
    tls = {"tls_cert_file": str(certificate), "tls_key_file": str(key)}
    if ports == "one":
        address = f"127.0.0.1:{free_port()}"
        tls |= {"grpc_address": address, "http_address": address}
    trust = f"--tls_certificate={authority.certificate}"
    with runner.bazel(lay, runner.BAZEL_2) as bazel, Server(**guarded(home) | tls) as server:
        address = f"grpcs://{WRITER}@localhost:{server.port}"
        stores(bazel, address, trust)
        hits(bazel, address, trust)


def test_grpcs_where_certificates_are_asked_for(home):
    # Bazel 2.1.0 cannot show one; a password does as well, on the same port.
    authority = credentials.Authority(home, "mutual")
    certificate, key = authority.sign("mutual-server", "/CN=cache")
    flags = guarded(home) | {
        "tls_cert_file": str(certificate), "tls_key_file": str(key), "tls_ca_file": str(authority.certificate),
    }  # fmt: skip
    trust = f"--tls_certificate={authority.certificate}"
    with runner.bazel(lay, runner.BAZEL_2) as bazel, Server(**flags) as server:
        address = f"grpcs://{WRITER}@localhost:{server.port}"
        stores(bazel, address, trust)
        hits(bazel, address, trust)
        assert "UNAUTHENTICATED" in fails(bazel, f"grpcs://localhost:{server.port}", trust)
