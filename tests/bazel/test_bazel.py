"""Goal: a build by real Bazel is served from the cache, whatever happened in between.
Method: Debian's Bazel builds and tests a generated workspace, forgets everything, and does it again: every action must be a
remote hit and every output the same byte for byte. Bazel's own summary is what counts the hits."""

import shutil

import pytest

import runner
import workspace
from server import Server


@pytest.fixture
def bazel():
    with runner.bazel() as made:
        yield made


def all_hits(counts: dict[str, int]) -> None:
    hits = counts.get("remote cache hit", 0)
    assert set(counts) <= {"internal", "remote cache hit"} and hits >= workspace.ACTIONS, counts


def all_local(counts: dict[str, int]) -> None:
    assert set(counts) <= {"internal", "local"} and counts.get("local", 0) >= workspace.ACTIONS, counts


def test_second_build_is_all_hits(bazel):
    # The server ends and crashes between builds, and comes back with other numbers of cores.
    assert workspace.ACTIONS >= 200
    with Server(ack="flushed") as server:
        all_local(bazel.test(server.address))
        first = bazel.outputs()
        assert len(first) >= workspace.ACTIONS - workspace.TESTS

        bazel.forget()
        all_hits(bazel.test(server.address))
        assert bazel.outputs() == first

        bazel.forget()
        all_hits(bazel.test(server.address, "--remote_download_minimal"))
        assert len(bazel.outputs()) < len(first) // 2, "minimal means that outputs stay remote"
        # Now they are wanted after all: Bazel fetches what it had left.
        bazel.test(server.address)

        bazel.forget()
        server.restart(cores="3")
        all_hits(bazel.test(server.address))
        assert bazel.outputs() == first

        bazel.forget()
        server.restart(crash=True, cores="16")
        all_hits(bazel.test(server.address, "--remote_instance_name=some/instance"))
        assert bazel.outputs() == first


def test_uncompressed_storage_and_an_instance_of_its_own(bazel):
    with Server(storage_mode="uncompressed", enable_ac_key_instance_mangling="true", ack="flushed") as server:
        instance = "--remote_instance_name=team/a"
        all_local(bazel.test(server.address, instance))
        bazel.forget()
        server.restart(crash=True)
        all_hits(bazel.test(server.address, instance, "--remote_download_toplevel"))
        bazel.forget()
        # Another instance has its own action cache.
        all_local(bazel.test(server.address, "--remote_instance_name=team/b"))


def test_a_server_that_lost_everything_is_only_slower(bazel):
    # The cache is emptied between two builds of one Bazel: it builds again, and nothing fails.
    with Server(ack="flushed") as server:
        all_local(bazel.test(server.address))
        bazel.forget()
        server.stop()
        shutil.rmtree(server.directory)
        server.start()
        all_local(bazel.test(server.address))


def test_over_http(bazel):
    # What was built over HTTP is there over HTTP after a crash, and over gRPC as well.
    with Server(ack="flushed", http_address="127.0.0.1:0") as server:
        all_local(bazel.test(f"http://{server.http_address}"))
        first = bazel.outputs()
        bazel.forget()
        server.restart(crash=True)
        all_hits(bazel.test(f"http://{server.http_address}/some/instance"))
        assert bazel.outputs() == first
        bazel.forget()
        all_hits(bazel.test(server.address))
        assert bazel.outputs() == first
