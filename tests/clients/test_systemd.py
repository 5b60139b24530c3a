"""Goal: a service manager is told when the server serves, lives and stops, and its sockets are served, so that a restart
refuses nobody. Method: a socket in the manager's place, and listeners that the test passes as systemd does."""

import signal
import socket

import pytest
from content import unique
from reapi import Client, blob_name, upload_name
from server import Server, StartError
from streams import check_read
from test_upgrade import Workers
from wait import until


@pytest.fixture
def manager(tmp_path):
    """Reads what is said to NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(20)
        yield listening


def hear(manager, word: str) -> str:
    for _ in range(100):
        said = manager.recv(4096).decode()
        if word in said.splitlines():
            return said
    raise AssertionError(f"never said {word}")


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=128)


def address_of(listening: socket.socket) -> str:
    return f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def start():
    started = []

    def start(**options) -> Server:
        started.append(Server(**options))
        return started[-1].start()

    yield start
    for server in started:
        server.close()


def test_what_is_said(manager, start):
    server = start(environment={"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "300000"})
    hear(manager, "READY=1")
    for _ in range(5):
        hear(manager, "WATCHDOG=1")
    server.signal(signal.SIGHUP)
    assert "MONOTONIC_USEC=" in hear(manager, "RELOADING=1")
    hear(manager, "READY=1")
    server.signal(signal.SIGTERM)
    hear(manager, "STOPPING=1")
    assert server.wait() == 0


def test_no_watchdog_of_others(manager, start):
    server = start(environment={"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "300000", "WATCHDOG_PID": "1"})
    hear(manager, "READY=1")
    manager.settimeout(1)
    with pytest.raises(TimeoutError):
        hear(manager, "WATCHDOG=1")
    server.stop()


@pytest.mark.parametrize("names", ["grpc:http", "ringcas.socket:ringcas.socket"])
def test_passed_sockets_are_served(start, names):
    with listener() as grpc, listener() as http:
        # By name wherever they are, or by the address that the flags give.
        by_name = names == "grpc:http"
        flags = {} if by_name else {"grpc_address": address_of(grpc)}
        flags["http_address"] = "127.0.0.1:0" if by_name else address_of(http)
        passed = [grpc, http] if by_name else [http, grpc]
        server = start(passed=passed, environment={"LISTEN_FDNAMES": names}, **flags)
        assert (server.address, server.http_address) == (address_of(grpc), address_of(http))
        content = unique(1000)
        with Client(server.address) as client:
            client.write(upload_name(content.hash, content.size), content.chunks())
        server.stop()


def test_a_socket_that_nobody_asked_for(start):
    with listener() as grpc, listener() as other:
        with pytest.raises(StartError) as refused:
            start(passed=[grpc, other], environment={"LISTEN_FDNAMES": "grpc:other"})
        assert "FileDescriptorName" in refused.value.log


def test_a_restart_refuses_nobody(start):
    stored = []
    with listener() as grpc:
        server = start(passed=[grpc], environment={"LISTEN_FDNAMES": "grpc"})

        def anew(stopping):
            while not stopping.is_set():
                content = unique(3000)
                with Client(server.address, sends_again=True) as client:
                    client.write(upload_name(content.hash, content.size), content.chunks())
                    check_read(client, blob_name(content.hash, content.size), content)
                stored.append(content)
                yield

        with Workers(3, anew) as workers:
            for _ in range(2):
                calls = workers.calls
                until(lambda: workers.calls > calls + 5 or workers.failures, "all work")
                server.stop()
                # Nobody serves now, and who comes waits.
                server.start()
        assert workers.failures == []
        with Client(server.address) as client:
            for content in stored:
                check_read(client, blob_name(content.hash, content.size), content)
        server.stop()
