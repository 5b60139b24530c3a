"""Goal: a new process takes over from the one that runs, on the same addresses and directory, and no client notices.
Method: clients that repeat no call, but for those that a GOAWAY says were not looked at (gRPC's transparent retry: a call
may cross the GOAWAY on its way), and the load generator, work through several upgrades; every failure counts. What was
acknowledged before is there afterwards. Upgrades that go wrong leave a server."""

import http.client
import json
import os
import pathlib
import shutil
import socket
import subprocess
import threading
import time

import pytest
from content import unique
from reapi import Client, blob_name, digest, upload_name
from server import BINARY, Server, StartError, scratch
from streams import check_read
from test_drain import MIB, held_upload
from wait import until

LOAD = pathlib.Path(os.environ.get("RINGCAS_TEST_LOAD", BINARY.parent / "examples" / "load"))
HTTP = "127.0.0.1:0"


class Line:
    """Servers that follow one another on one directory and the same addresses."""

    def __init__(self):
        self.home = scratch("upgrade")
        self.servers: list[Server] = []

    def start(self, **flags) -> Server:
        self.servers.append(Server(directory=self.home / "cache", **flags))
        return self.servers[-1].start()

    def successor(self, **flags) -> Server:
        """A server that takes over from the last one, not started yet."""
        last = self.servers[-1]
        same = {"grpc_address": last.address, "take_over": "true"}
        if last.http_port:
            same["http_address"] = last.http_address
        self.servers.append(Server(directory=last.directory, **(last.flags | same | flags)))
        return self.servers[-1]

    def takeover(self, old: Server) -> tuple[Server, threading.Thread]:
        """A successor that has told `old` of itself, and the thread that starts it: it ends when the new one serves."""
        new = self.successor()
        starting = threading.Thread(target=new.start)
        starting.start()
        until(lambda: "another process takes over" in old.log, "the old one is told")
        return new, starting

    def upgrade(self, **flags) -> Server:
        old = self.servers[-1]
        new = self.successor(**flags).start()
        assert old.wait(30) == 0
        return new

    def close(self):
        for server in self.servers:
            server.close()
        shutil.rmtree(self.home, ignore_errors=True)


@pytest.fixture
def line():
    servers = Line()
    yield servers
    servers.close()


class Workers:
    """Threads that call `work(number)` until they are told to stop. Each keeps what it was told was wrong."""

    def __init__(self, count: int, work):
        self.stopping = threading.Event()
        self.failures: list[str] = []
        self.calls = 0
        self.threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for _ in range(count)]

    def _run(self, work):
        try:
            for _ in work(self.stopping):
                self.calls += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a failed request
            self.failures.append(repr(error))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)


def test_no_request_fails(line):
    server = line.start(http_address=HTTP)
    stored = []

    def over_grpc(stopping):
        with Client(server.address, sends_again=True) as client:
            while not stopping.is_set():
                content = unique(40_000)
                client.write(upload_name(content.hash, content.size), content.chunks())
                check_read(client, blob_name(content.hash, content.size), content)
                assert client.find_missing([digest(content)]) == []
                stored.append(content)
                yield

    def over_http(stopping):
        connection = http.client.HTTPConnection(server.http_address, timeout=60)
        while not stopping.is_set():
            content = unique(5_000)
            for method, body in (("PUT", content.bytes()), ("GET", None)):
                connection.request(method, f"/cas/{content.hash}", body)
                answer = connection.getresponse()
                got = answer.read()
                assert answer.status == 200 and (method == "PUT" or got == content.bytes())
            stored.append(content)
            yield

    def anew(stopping):
        # Clients that come: each call on a connection of its own.
        while not stopping.is_set():
            with Client(server.address, sends_again=True) as client:
                client.capabilities()
            yield

    with Workers(3, over_grpc) as one, Workers(2, over_http) as two, Workers(1, anew) as three:
        for _ in range(3):
            calls = [workers.calls for workers in (one, two, three)]
            until(lambda: all(now.calls > before + 5 or now.failures for now, before in zip((one, two, three), calls)), "all work")
            line.upgrade()
    assert one.failures == two.failures == three.failures == []
    with Client(server.address) as client:
        assert client.find_missing([digest(content) for content in stored]) == []


@pytest.mark.parametrize("words", ["mix --blobs 50", "write --size 100KiB", "find-missing --blobs 100"])
def test_the_load_generator_sees_no_error(line, tmp_path, words):
    server = line.start()
    result = tmp_path / "result.jsonl"
    command = [LOAD, *words.split(), "--duration", "12", "--connections", "4", "--streams", "8", "--settle", "0"]
    command += ["--prepare-max", "64MiB", "--address", server.address, "--json", result]
    load = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for _ in range(2):
            until(lambda: line.servers[-1].log.count(" in=") > 50, "it has calls")
            line.upgrade()
        was_under_load = load.poll() is None
        out, _ = load.communicate(timeout=120)
    finally:
        load.kill()
    assert load.returncode == 0, out
    assert was_under_load, "the load ended before the upgrades"
    for phase in map(json.loads, result.read_text().splitlines()):
        assert phase["errors"] == 0 and phase["faults"] == {} and phase["ops"] > 0


def test_what_is_in_flight_is_finished_and_others_wait(line):
    old = line.start()
    content = unique(6 * MIB)
    with Client(old.address) as client:
        finish, upload = held_upload(client, content, 3)
        new, starting = line.takeover(old)
        waiting = []

        def ask():
            with Client(old.address) as late:
                late.capabilities()
                waiting.append(time.monotonic())

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(1)
        assert not waiting and old.process.poll() is None, "nobody serves while the old one finishes"
        finish()
        assert upload.result(timeout=20).committed_size == content.size
    starting.join(30)
    asking.join(30)
    assert waiting and old.wait(10) == 0
    with Client(new.address) as client:
        check_read(client, blob_name(content.hash, content.size), content)
    new.stop()


def test_a_crash_of_the_old_one_does_not_stop_it(line):
    old = line.start()
    with Client(old.address) as client:
        held_upload(client, unique(6 * MIB), 3)
        new, starting = line.takeover(old)
        old.kill()
    starting.join(30)
    with Client(new.address) as client:
        client.capabilities()
    new.stop()


def test_a_new_one_that_fails_changes_nothing(line):
    old = line.start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(StartError) as failed:
            line.successor(http_address=f"127.0.0.1:{taken.getsockname()[1]}").start()
    assert "Free the address" in failed.value.log
    line.servers.pop().close()
    # Also what only shows in the directory, which is not free yet.
    (old.directory / "purges.v1").write_text("something else")
    for flags, reason in [
        ({"max_size": "0.07"}, "was made with"),
        ({"max_size": "60000"}, "no room in the file system|largest cache"),
        ({}, "purges.v1 is damaged"),
    ]:
        with pytest.raises(StartError, match=reason):
            line.successor(**flags).start()
        line.servers.pop().close()
    (old.directory / "purges.v1").unlink()
    with Client(old.address) as client:
        client.capabilities()
    line.upgrade().stop()


def test_a_directory_that_fails_for_a_while(line):
    """The old one has ended, so there is no way back: the new one tries until it can."""
    old = line.start()
    content = unique(6 * MIB)
    with Client(old.address) as client:
        finish, upload = held_upload(client, content, 3)
        new, starting = line.takeover(old)
        (old.directory / "super").rename(line.home / "super")
        finish()
        upload.result(timeout=20)
    assert old.wait(30) == 0
    until(lambda: "tries again" in new.log, "a failure")
    (line.home / "super").rename(old.directory / "super")
    starting.join(30)
    with Client(new.address) as client:
        check_read(client, blob_name(content.hash, content.size), content)
    new.stop()


def test_without_the_flag_the_directory_is_in_use(line):
    line.start()
    with pytest.raises(StartError) as refused:
        line.start()
    assert "another ringcas" in refused.value.log or "in use" in refused.value.log


def test_nobody_to_take_over_from(line):
    with Client(line.start(take_over="true").address) as client:
        client.capabilities()


def test_unix_sockets_are_handed_over(line, tmp_path):
    path = tmp_path / "grpc"
    line.start(grpc_address=f"unix:{path}")
    new = line.upgrade()
    assert path.exists()
    with Client(new.address) as client:
        client.capabilities()
    new.stop()
    assert not path.exists()
