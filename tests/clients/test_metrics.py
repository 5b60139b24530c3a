"""Goal: Prometheus reads the server, names and numbers are right, and a scrape never hangs.
Method: Debian's own Prometheus and promtool, curl-like requests, and calls whose counts are known."""

import http.client
import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest

from content import unique
from metrics import get, scrape, scrape_at_rest
from reapi import BYTE_STREAM, Client, Code, blob_name, digest, fails, message, upload_name, write_requests
from server import Server, StartError, free_port, scratch
from wait import until

MIB = 1 << 20


@pytest.fixture(scope="module")
def server():
    with Server(http_address="127.0.0.1:0") as running:
        yield running


class Prometheus:
    """A real one, on loopback, that scrapes one target each second."""

    def __init__(self, target: str):
        self.home = scratch("prometheus")
        config = self.home / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            f"scrape_configs: [{{job_name: cache, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        self.port = free_port()
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={self.home}/data"]
        with open(self.home / "log", "wb") as log:
            command.append(f"--web.listen-address=127.0.0.1:{self.port}")
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.home)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.process.kill()
        self.process.wait(20)
        shutil.rmtree(self.home, ignore_errors=True)

    def ask(self, path: str):
        """The data of an answer, or None while it starts."""
        assert self.process.poll() is None, (self.home / "log").read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=10) as reply:
                return json.load(reply)["data"]
        except OSError:
            return None

    def value(self, query: str):
        """The value of a query's first series, or None."""
        data = self.ask(f"query?query={urllib.request.quote(query)}")
        return float(data["result"][0]["value"][1]) if data and data["result"] else None


def test_prometheus_scrapes_it(server):
    content = unique(MIB)
    with Client(server.address) as client:
        client.write(upload_name(content.hash, content.size), content.chunks())
    with Prometheus(server.http_address) as prometheus:
        until(lambda: prometheus.value("up") == 1, "the target is up", 60)
        target = prometheus.ask("targets")["activeTargets"][0]
        assert (target["health"], target["lastError"]) == ("up", "")
        assert prometheus.value("bazel_remote_stored_bytes_total") >= MIB
        assert prometheus.value('bazel_remote_disk_cache_size_bytes_limit{type="evict"}') == 1 << 30
        assert prometheus.value("process_resident_memory_bytes") > MIB
        # The next scrape tells of the one before.
        until(lambda: prometheus.value('http_request_duration_seconds_count{handler="metrics"}'), "a second scrape", 30)


def test_promtool_has_nothing_to_say(server):
    text = get(server, "/metrics")
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_status_has_the_known_keys(server):
    content = unique(MIB)
    with Client(server.address) as client:
        # What is not asked for in time is as it was then.
        scrape(server)
        before = json.loads(get(server, "/status"))
        client.write(upload_name(content.hash, content.size), content.chunks())
        scrape(server)
        after = json.loads(get(server, "/status"))
    keys = "CurrSize UncompressedSize ReservedSize MaxSize NumFiles ServerTime GitCommit GitTags NumGoroutines"
    assert list(after) == keys.split()
    assert after["MaxSize"] == 1 << 30
    assert after["NumFiles"] == before["NumFiles"] + 1
    assert after["CurrSize"] >= MIB
    assert after["ReservedSize"] == 0
    assert after["NumGoroutines"] > 0


def test_buckets_of_an_operator(fresh):
    """As bazel-remote's key of the file has them; what is no list of bounds is an error."""
    server = fresh(http_address="127.0.0.1:0", endpoint_metrics_duration_buckets="2.5,0.01,0.5")
    with Client(server.address) as client:
        client.capabilities()
    get(server, "/status")
    found = scrape(server)
    for name in ("grpc_server_handling_seconds", "http_request_duration_seconds"):
        bounds = {series.split('le="')[1].split('"')[0] for series in found if series.startswith(f"{name}_bucket")}
        assert bounds == {"0.01", "0.5", "2.5", "+Inf"}, name
    with pytest.raises(StartError, match="--endpoint_metrics_duration_buckets: 1 stands there twice"):
        fresh(endpoint_metrics_duration_buckets="1,1")


def test_counts_follow_what_happens(server):
    content = unique(3 * MIB)
    with Client(server.address) as client:
        before = scrape_at_rest(server)
        assert client.missing(digest(content))
        client.write(upload_name(content.hash, content.size), content.chunks())
        client.write(upload_name(content.hash, content.size), content.chunks())
        assert client.read(blob_name(content.hash, content.size)) == content.bytes()
        with fails(Code.NOT_FOUND):
            client.read(blob_name(unique(10).hash, 10))
        after = scrape_at_rest(server)

    def moved(name: str) -> float:
        full = name if name.startswith("grpc_") else f"bazel_remote_{name}"
        return after[full] - before.get(full, 0)

    def method(name: str, kind: str) -> str:
        return f'grpc_method="{name}",grpc_service="google.bytestream.ByteStream",grpc_type="{kind}"'

    assert moved('incoming_requests_total{kind="cas",method="contains",status="miss"}') == 1
    assert moved('incoming_requests_total{kind="cas",method="get",status="hit"}') == 1
    assert moved('incoming_requests_total{kind="cas",method="get",status="miss"}') == 1
    assert moved(f'grpc_server_started_total{{{method("Write", "client_stream")}}}') == 2
    assert moved(f'grpc_server_handled_total{{grpc_code="OK",{method("Write", "client_stream")}}}') == 2
    assert moved(f'grpc_server_handled_total{{grpc_code="NotFound",{method("Read", "server_stream")}}}') == 1
    assert moved(f'grpc_server_handling_seconds_count{{{method("Read", "server_stream")}}}') == 2
    assert moved('sent_bytes_total{protocol="grpc"}') >= content.size
    assert moved('received_bytes_total{protocol="grpc"}') >= content.size

    assert moved("stored_blobs_total") == 1
    assert moved("stored_bytes_total") == content.size
    assert moved("present_blobs_total") == 1
    assert moved("disk_cache_entries") == 1
    assert moved("disk_cache_large_blobs") == 1


def test_head_and_refusals(server):
    connection = http.client.HTTPConnection(server.http_address, timeout=20)
    for method, path, code in [
        ("HEAD", "/metrics", 200),
        ("HEAD", "/status", 200),
        ("POST", "/metrics", 405),
        ("GET", "/favicon.ico", 400),
        ("GET", "/status", 200),
    ]:
        connection.request(method, path)
        reply = connection.getresponse()
        body = reply.read()
        assert reply.status == code, (method, path)
        assert (method == "HEAD") == (body == b"")
        assert int(reply.getheader("Content-Length")) > 0
        if code >= 400:
            assert body.decode().strip(), "an error must say what happened"
    connection.close()


def test_the_prefix_can_be_chosen_and_metrics_switched_off(fresh):
    server = fresh(http_address="127.0.0.1:0", metrics_prefix="ringcas")
    names = {series.split("{")[0] for series in scrape(server)}
    assert "ringcas_disk_cache_size_bytes" in names and "process_open_fds" in names
    assert not [name for name in names if name.startswith("bazel_remote")]
    server.restart(enable_endpoint_metrics="false")
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server, "/metrics")
    assert caught.value.code == 404
    assert caught.value.read() == b"Endpoint metrics are not enabled on this server.\n"
    assert json.loads(get(server, "/status"))["MaxSize"] == 1 << 30


def test_a_held_connection_does_not_stop_the_server(fresh):
    server = fresh(http_address="127.0.0.1:0")
    idle = http.client.HTTPConnection(server.http_address, timeout=20)
    idle.request("GET", "/status")
    idle.getresponse().read()
    server.stop()
    idle.close()


def test_a_saturated_server_answers(fresh):
    # One core, and more uploads in flight than it can take in: counters only grow, and every scrape gets its answer.
    server = fresh(http_address="127.0.0.1:0", cores="1", access_log_level="none")
    stop = threading.Event()
    ended = []

    def load():
        with Client(server.address) as client:
            encode = message("google.bytestream.WriteRequest").SerializeToString
            decode = message("google.bytestream.WriteResponse").FromString
            call = client.channel.stream_unary(f"{BYTE_STREAM}/Write", encode, decode)
            while not stop.is_set():
                contents = [unique(MIB) for _ in range(16)]
                futures = [
                    call.future(write_requests(upload_name(each.hash, each.size), each.chunks()), timeout=60)
                    for each in contents
                ]
                ended.extend(future.exception(60) is None for future in futures)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: scrape(server)["bazel_remote_stored_blobs_total"] >= 32, "the load runs", 60)
        last, worst = {}, 0.0
        for _ in range(40):
            started = time.monotonic()
            now = scrape(server)
            json.loads(get(server, "/status"))
            worst = max(worst, time.monotonic() - started)
            fallen = [name for name, value in now.items() if "_total" in name and value < last.get(name, 0)]
            assert not fallen
            last = now
        print(f"the slowest pair of scrapes took {worst * 1e3:.0f} ms")
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert all(ended)
    after = scrape_at_rest(server)
    assert after["bazel_remote_stored_blobs_total"] == len(ended)
    assert after['http_request_duration_seconds_count{code="200",handler="metrics",method="GET",service=""}'] > 40
