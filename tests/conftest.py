"""Fixtures of the client tests. Each test file opens with its goal and method."""

import pathlib
import re
import sys

import pytest

# The server's line for a request that ended as requests do.
ACCESS = re.compile(r" in=\d+ out=\d+ ")
# Files of a minute and more, the longest first: one that was begun late would run alone at the end.
LONGEST = (
    "test_bazel.py test_bazel_access.py test_s3_drill.py test_disk.py test_byte_stream.py test_s3_memory.py "
    "test_s3_backends.py test_restart.py test_soak.py test_s3_matrix.py test_s3_hostile.py"
).split()
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "support"), str(HERE / "bazel")]

from fault_s3 import FaultStore  # noqa: E402
from reapi import Client  # noqa: E402
from server import Server, running  # noqa: E402


def pytest_collection_modifyitems(items):
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the ends of the servers' logs to the report of a failure, without lines of single requests."""
    report = (yield).get_result()
    if report.failed:
        for server in [server for server in running if server.starts]:
            lines = [line for line in server.log.splitlines() if not ACCESS.search(line)]
            report.sections.append((f"log of the server on port {server.port}", "\n".join(lines[-25:])))


@pytest.fixture(scope="module")
def server():
    """A server with default settings for all tests of a file: they must use contents of their own."""
    with Server() as running:
        yield running


@pytest.fixture
def client(server):
    with Client(server.address) as connected:
        yield connected


@pytest.fixture
def store():
    """An S3 store that misbehaves when told to."""
    made = FaultStore()
    yield made
    made.close()


@pytest.fixture
def fresh():
    """Starts servers of the test's own: `fresh(max_size="0.5")`. They end with the test."""
    started = []

    def start(**flags):
        server = Server(**flags)
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.close()
