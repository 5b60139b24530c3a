"""Goal: a server that nobody uses stops by itself, and connections do not grow older than they may.
Method: short times; what a client is told is read from raw frames."""

import time

import pytest
from peer import Peer
from reapi import BYTE_STREAM, CAPABILITIES, Client
from server import StartError
from wait import until

GET_CAPABILITIES = f"{CAPABILITIES}/GetCapabilities"


def test_idle_timeout(fresh):
    server = fresh(idle_timeout="3s", http_address="127.0.0.1:0")
    with Client(server.address) as client:
        began = time.monotonic()
        while time.monotonic() < began + 5:
            client.capabilities()
            time.sleep(0.2)
        assert server.process.poll() is None, "requests keep it"
        # The connection stays, and nothing is asked any more.
        assert server.wait(20) == 0
    assert "--idle_timeout" in server.log


def test_a_call_in_flight_is_no_idleness(fresh):
    server = fresh(idle_timeout="3s")
    with Peer(server.port) as caller:
        caller.call(f"{BYTE_STREAM}/Write")
        assert not caller.pump(lambda: caller.closed, 6)
        assert server.process.poll() is None
    assert server.wait(20) == 0


def test_connections_have_an_age(fresh):
    server = fresh(grpc_max_connection_age="3s", grpc_max_connection_age_grace="3s")
    with Peer(server.port) as idle, Peer(server.port) as busy:
        assert idle.unary(GET_CAPABILITIES, b"").grpc_status == 0
        busy.call(f"{BYTE_STREAM}/Write")
        assert idle.pump(lambda: idle.goaways and idle.closed, 10), "an idle one ends"
        assert busy.pump(lambda: busy.goaways, 10) and busy.goaways[0][0] == 0
        assert not busy.closed, "a call has the grace to end"
        assert busy.pump(lambda: busy.closed, 10), "and no more"
    with Client(server.address) as client:
        client.capabilities()
    server.stop()


@pytest.mark.parametrize("flags", [{"idle_timeout": "soon"}, {"unix_socket_mode": "rw"}])
def test_nonsense_is_refused(fresh, flags):
    with pytest.raises(StartError) as refused:
        fresh(**flags)
    assert next(iter(flags)) in refused.value.log
