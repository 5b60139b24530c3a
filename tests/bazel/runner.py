"""Real Bazel in a workspace of its own."""

import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import subprocess

import workspace
from server import ROOT, scratch

BAZEL = shutil.which("bazel")
# Debian's has no ALPN, which grpcs:// needs. tests/run fetches this one.
BAZEL_2 = pathlib.Path(os.environ.get("RINGCAS_TEST_BAZEL_2", ROOT / "target" / "bazel-2.1.0" / "bazel"))
RUN_S = 300
OUTPUTS = (".txt", ".bin", ".joined")
PROCESSES = re.compile(r"INFO: (\d+) process(?:es)?: (.*)\.")


class Bazel:
    """One workspace. Each `forget` throws away all that Bazel knows: output base and server."""

    def __init__(self, home: pathlib.Path, write=workspace.write, binary: str | pathlib.Path = BAZEL):
        self.binary = str(binary)
        self.home = home
        self.source = home / "workspace"
        self.runs = 0
        self.log = ""
        write(self.source)

    @property
    def base(self) -> pathlib.Path:
        return self.home / f"base-{self.runs}"

    def _run(self, *arguments: str, timeout_s: float = RUN_S) -> subprocess.CompletedProcess:
        # The system's bazelrc is kept: Debian's sets the install base. A user's own is not read.
        command = [self.binary, "--nohome_rc", f"--output_base={self.base}", "--host_jvm_args=-Xmx1g", *arguments]
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "USER", "JAVA_HOME") if name in os.environ}
        return subprocess.run(
            command, cwd=self.source, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
        )  # fmt: skip

    def test(self, address: str, *flags: str) -> dict[str, int]:
        """Builds and tests all, without a warning about the cache. Returns how many processes ran where."""
        # Why not in an action of its own: that action's arguments have the seconds which the test took.
        xml = "--noexperimental_split_xml_generation"
        counts = self.run("test", address, "--test_verbose_timeout_warnings=false", xml, *flags)
        assert not self.warnings("Reading from") and not self.warnings("Writing to"), self.log
        assert re.search(r"Executed \d+ out of 2 tests: 2 tests pass", self.log), self.log[-2000:]
        return counts

    def warnings(self, about: str) -> list[str]:
        """What Bazel complains of when it reads from or writes to the cache."""
        return [line for line in self.log.splitlines() if line.startswith(f"WARNING: {about} Remote Cache")]

    def run(self, command: str, address: str, *flags: str, targets=("//...",)) -> dict[str, int]:
        """Runs `command` over `targets`, all by default. Returns how many processes ran where, by Bazel's own count.
        An address without a scheme is that of gRPC."""
        cache = address if "://" in address else f"grpc://{address}"
        done = self._run(
            command, "--color=no", "--curses=no", "--noshow_progress", "--spawn_strategy=local", "--jobs=16",
            "--show_result=0", f"--remote_cache={cache}", *flags, *targets,
        )  # fmt: skip
        self.log = done.stdout
        assert done.returncode == 0, f"exit code {done.returncode}:\n{self.log[-3000:]}"
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


@contextlib.contextmanager
def bazel(write=workspace.write, binary=BAZEL):
    """Bazel in a new workspace that `write` lays, ended and removed afterwards."""
    assert binary and pathlib.Path(binary).exists(), f"{binary} is not installed; tests/run installs both Bazels"
    home = scratch("bazel")
    made = Bazel(home, write, binary)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(home, ignore_errors=True)
