"""Goal: a build by real Bazel is served from the cache, whatever happened in between.
Method: Debian's Bazel builds and tests a generated workspace, forgets everything, and does it again: every action must be a
remote hit and every output the same byte for byte. Bazel's own summary is what counts the hits."""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess

import pytest

import workspace
from server import Server, scratch

BAZEL = shutil.which("bazel")
RUN_S = 300
OUTPUTS = (".txt", ".bin", ".joined")
PROCESSES = re.compile(r"INFO: (\d+) process(?:es)?: (.*)\.")


class Bazel:
    """One workspace. Each `forget` throws away all that Bazel knows: output base and server."""

    def __init__(self, home: pathlib.Path):
        self.home = home
        self.source = home / "workspace"
        self.runs = 0
        self.log = ""
        workspace.write(self.source)

    @property
    def base(self) -> pathlib.Path:
        return self.home / f"base-{self.runs}"

    def _run(self, *arguments: str, timeout_s: float = RUN_S) -> subprocess.CompletedProcess:
        # The system's bazelrc is kept: Debian's sets the install base. A user's own is not read.
        command = [BAZEL, "--nohome_rc", f"--output_base={self.base}", "--host_jvm_args=-Xmx1g", *arguments]
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "USER", "JAVA_HOME") if name in os.environ}
        return subprocess.run(
            command, cwd=self.source, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
        )  # fmt: skip

    def test(self, address: str, *flags: str) -> dict[str, int]:
        """Builds and tests all. Returns how many processes ran where, by Bazel's own count."""
        done = self._run(
            "test", "--color=no", "--curses=no", "--noshow_progress", "--spawn_strategy=local", "--jobs=16",
            "--show_result=0", "--test_verbose_timeout_warnings=false", f"--remote_cache=grpc://{address}", *flags, "//...",
        )  # fmt: skip
        self.log = done.stdout
        assert done.returncode == 0, f"exit code {done.returncode}:\n{self.log[-3000:]}"
        assert "WARNING: Reading from Remote Cache" not in self.log and "WARNING: Writing to Remote Cache" not in self.log, self.log
        assert re.search(r"Executed \d+ out of 2 tests: 2 tests pass", self.log), self.log[-2000:]
        match = PROCESSES.search(self.log)
        assert match, self.log[-2000:]
        return {name: int(count) for count, name in re.findall(r"(\d+) ([a-z][a-z -]*)", match.group(2))}

    def outputs(self) -> dict[str, str]:
        """SHA-256 of every file that an action made, by its path."""
        root = (self.source / "bazel-bin").resolve()
        found = {}
        for path in root.rglob("*"):
            name = path.relative_to(root).as_posix()
            if path.is_file() and ".runfiles" not in name and (".dir/" in name or path.suffix in OUTPUTS):
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    def stop(self) -> None:
        """Ends the Bazel server of this output base, if there is one."""
        if self.base.exists():
            self._run("shutdown", timeout_s=60)

    def forget(self) -> None:
        self.stop()
        shutil.rmtree(self.base, ignore_errors=True)
        for link in self.source.glob("bazel-*"):
            link.unlink()
        self.runs += 1


@pytest.fixture
def bazel():
    assert BAZEL, "bazel is not installed; tests/run installs Debian's bazel-bootstrap"
    home = scratch("bazel")
    made = Bazel(home)
    yield made
    made.stop()
    shutil.rmtree(home, ignore_errors=True)


def all_hits(counts: dict[str, int]) -> None:
    # A test counts twice where Bazel makes its test.xml in an action of its own.
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
