"""Goal: the load generator drives the real server with every scenario, and its JSON says what happened.

Method: each scenario for a second or less against one server; figures, probes, samples and verdicts are checked. What the
generator makes of a server that misbehaves is tested beside its code."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest

import credentials
from server import BINARY, Server, scratch

LOAD = pathlib.Path(os.environ.get("RINGCAS_TEST_LOAD", BINARY.parent / "examples" / "load"))
LATENCIES = [f"latency_{name}_us" for name in ("p50", "p90", "p99", "p999", "max")]


@pytest.fixture(scope="module")
def server():
    with Server(http_address="127.0.0.1:0", max_inflight_cas_writes="40") as running:
        yield running


@pytest.fixture(scope="module")
def encrypted():
    """A server that speaks TLS, and the file of who signed its certificate."""
    home = scratch("load-tls")
    authority = credentials.Authority(home)
    certificate, key = authority.sign("server", "/CN=cache")
    with Server(http_address="127.0.0.1:0", tls_cert_file=str(certificate), tls_key_file=str(key)) as running:
        yield running, authority.certificate
    shutil.rmtree(home)


def run(server, words: str, tmp_path) -> list[dict]:
    """The phases of `load <words>`, which must find no fault."""
    result = tmp_path / "result.jsonl"
    command = [LOAD, *words.split(), "--address", server.address, "--http-address", f"127.0.0.1:{server.http_port}"]
    command += ["--server-pid", str(server.process.pid), "--settle", "100", "--json", result]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    phases = [json.loads(line) for line in result.read_text().splitlines()]
    for phase in phases:
        assert phase["errors"] == 0 and phase["faults"] == {}
        # The kernel's peak lags behind by some pages.
        assert phase["server_rss_peak_mib"] + 1 >= phase["server_rss_sampled_max_mib"] > 0
        assert phase["samples"][-1]["sockets"]["LISTEN"] > 0
        latencies = [phase[name] for name in LATENCIES]
        assert latencies == sorted(latencies)
    return phases


def test_what_was_written_is_read_back(server, tmp_path):
    """A seed names the same blobs again, so that another server can be asked for them."""
    words = "--count 60 --size 3KiB --size-p99 300KiB --seed 77 --connections 2 --streams 4"
    run(server, f"write {words}", tmp_path)
    [written, read] = run(server, f"read-back {words}", tmp_path)
    assert read["phase"] == "read-back" and read["ops"] == written["ops"] == 60


@pytest.mark.parametrize(
    "words, names, calls",
    [
        ("write --count 200", ["write"], 200),
        ("write --count 50 --size 100KiB --zstd", ["write"], 50),
        ("read --count 200 --size 100KiB --blobs 20", ["read"], 200),
        ("read --count 200 --size 100KiB --blobs 20 --zstd", ["read"], 200),
        ("find-missing --count 50 --blobs 100", ["find-missing"], 50),
        ("action-cache --count 100 --blobs 20", ["action-update", "action-get"], 100),
        ("batch --count 20 --digests-per-call 50 --blobs 50", ["batch-update", "batch-read"], 20),
        ("batch --count 20 --digests-per-call 50 --blobs 50 --size-p99 64KiB --zstd", ["batch-update", "batch-read"], 20),
        ("mix --count 200 --blobs 50 --instance some/name", ["mix"], 200),
        ("mix --duration 0.5 --rate 200 --blobs 50 --probe", ["mix"], 100),
        ("churn --count 60", ["churn"], 60),
    ],
)
def test_scenarios_whose_calls_end(server, tmp_path, words, names, calls):
    phases = run(server, f"{words} --connections 2 --streams 8", tmp_path)
    assert [phase["phase"] for phase in phases] == names
    for phase in phases:
        assert phase["ops"] == calls and phase["unfinished"] == 0 and phase["server_cpu_s"] >= 0


@pytest.mark.parametrize("encoding", ["", "--zstd"])
def test_burst(server, tmp_path, encoding):
    """More writers than slots: some writes end, some are refused, and both are as the server said."""
    words = f"burst {encoding} --duration 1 --concurrency 400 --size 300KiB --probe --verify --slot-cap 40"
    [phase] = run(server, words, tmp_path)
    assert phase["verdict"]["intact"] == phase["kinds"]["write"]["ops"] > 0
    assert phase["verdict"]["lost"] == {} and phase["verdict"]["refused_present"] == 0
    assert phase["refused"] > 0 and phase["verdict"]["refused"] > 0
    assert sum(found["count"] for found in phase["kinds"]["refused"]["refusals"].values()) == phase["refused"]
    assert 0 < phase["write_slots_max"] <= 40 and phase["write_slots_after"] == 0
    for name in ("health", "read", "find-missing", "status", "metrics"):
        assert phase["probes"][name]["ops"] > 0 and phase["probes"][name]["errors"] == {}


@pytest.mark.parametrize(
    "words, kind",
    [("stalled-readers --concurrency 200 --size 1MiB", "stalled-read"), ("slow-writers --concurrency 30", "slow-write")],
)
def test_calls_that_are_held(server, tmp_path, words, kind):
    [phase] = run(server, f"{words} --duration 2.5 --connections 4 --probe", tmp_path)
    assert phase["unfinished"] == int(words.split()[2]) and phase["ops"] == 0
    assert phase["probes"]["read"]["ops"] > 0
    # On a busy machine the first sample may be of a moment before they are there.
    connected = max(sample["sockets"].get("ESTAB", 0) for sample in phase["samples"])
    assert connected >= 5, "four connections and the probe's"


@pytest.mark.parametrize(
    "words", ["write --count 200", "write --count 20 --size 3MiB", "read --count 100 --size 1MiB --blobs 20", "churn --count 60"]
)
def test_over_tls(encrypted, tmp_path, words):
    server, authority = encrypted
    [phase] = run(server, f"{words} --connections 2 --streams 8 --tls-ca {authority}", tmp_path)
    assert phase["tls"] is True and phase["ops"] == int(words.split()[2])


def test_a_server_whose_certificate_another_signed(encrypted, tmp_path):
    stranger = credentials.Authority(tmp_path, "stranger").certificate
    command = [LOAD, "write", "--count", "1", "--address", encrypted[0].address, "--tls-ca", stranger]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "certificate" in ended.stderr, ended
