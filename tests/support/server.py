"""Starts, watches and stops the server under test. Ends only processes that it started itself."""

import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("RINGCAS_TEST_BINARY", ROOT / "target" / "release" / "ringcas"))
# Not /tmp: it may be a tmpfs, and the server wants O_DIRECT and preallocated files.
SCRATCH = pathlib.Path(os.environ.get("RINGCAS_TEST_SCRATCH", ROOT / "target" / "tests"))

START_S = 60
STOP_S = 60
LISTENING = re.compile(r"listening\b.*\bgrpc=(\S+)(?: http=(\S+))?")
# Servers that have been made and not closed: a failing test shows their logs.
running: set["Server"] = set()
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def scratch(prefix: str) -> pathlib.Path:
    """A new directory on a real file system."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    return pathlib.Path(tempfile.mkdtemp(prefix=prefix + "-", dir=SCRATCH))


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
            return True
        except OSError:
            return False


def free_port(below: int | None = None) -> int:
    """A free port for programs that cannot choose one themselves: none of those that the kernel gives to whoever asks for any, so
    that it is still free when they take it."""
    given = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(10_000, below or max(given, 20_000))
    return next(port for port in iter(lambda: random.choice(ports), None) if is_free(port))


def port_of(address: str) -> int:
    """0 for a unix socket, and for none."""
    return 0 if address.startswith("unix:") or address in ("", "none") else int(address.rsplit(":", 1)[1])


class StartError(Exception):
    """The server ended, or did not listen, instead of starting."""

    def __init__(self, code: int | None, log: str):
        super().__init__(f"server did not start (exit code {code}); its log ends with:\n{log[-2000:]}")
        self.code = code
        self.log = log


class Server:
    """One server process on a cache directory. The directory outlives restarts and ends with `close`."""

    def __init__(
        self,
        directory: pathlib.Path | None = None,
        environment: dict[str, str] | None = None,
        passed=(),
        hosts: pathlib.Path | None = None,
        **flags,
    ):
        """`flags` are the server's own, without dashes; `None` leaves one out. `passed` are listening sockets that it
        gets as systemd passes them. `hosts` is what it finds in the place of /etc/hosts, and may change."""
        self.passed = passed
        self.hosts = hosts
        self.home = scratch("server")
        self.directory = directory or self.home / "cache"
        self.environment = environment or {}
        self.flags = {"max_size": "1", "cores": "2", "http_address": "none", "grpc_address": "127.0.0.1:0"} | flags
        self.process: subprocess.Popen | None = None
        self.port = 0
        # `unix:PATH`, when gRPC listens on a unix socket.
        self.path = ""
        self.http_port = 0
        self.starts = 0
        running.add(self)

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc):
        self.close()

    @property
    def address(self) -> str:
        """As gRPC clients take it."""
        return self.path or f"127.0.0.1:{self.port}"

    @property
    def http_address(self) -> str:
        """Where HTTP listens, if the flags say that it does."""
        return f"127.0.0.1:{self.http_port}"

    @property
    def log_path(self) -> pathlib.Path:
        return self.home / f"log-{self.starts}.txt"

    @property
    def log(self) -> str:
        return ANSI.sub("", self.log_path.read_text(errors="replace"))

    def start(self, **flags) -> "Server":
        """Starts, or starts again with some flags changed. Returns when the port answers."""
        assert self.process is None, "already started"
        self.flags |= flags
        self.starts += 1
        command = [str(BINARY), "--dir", str(self.directory)]
        for name, value in self.flags.items():
            if value is not None:
                command.append(f"--{name}={value}")
        # Why: variables of the machine must not change what is tested.
        own = ("RINGCAS_", "BAZEL_REMOTE_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        environment |= self.environment
        if self.passed:
            # The shell has the number of the process that it becomes.
            moves = " ".join(f"{3 + at}<&{listening.fileno()}" for at, listening in enumerate(self.passed))
            script = f'exec {moves}; export LISTEN_PID=$$ LISTEN_FDS={len(self.passed)}; exec "$@"'
            command = ["bash", "-c", script, "bash", *command]
        if self.hosts is not None:
            # In a namespace of mounts of its own, which root may make; it becomes the server, so that its number is that.
            command = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(self.hosts), *command]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[listening.fileno() for listening in self.passed],
            )
        try:
            self._await_port(time.monotonic() + START_S)
        except BaseException:
            self.kill()
            raise
        return self

    def _await_port(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            code = self.process.poll()
            if code is not None:
                raise StartError(code, self.log)
            match = LISTENING.search(self.log)
            if match:
                grpc, http = match.group(1), match.group(2)
                self.path = grpc if grpc.startswith("unix:") else ""
                self.port, self.http_port = port_of(grpc), port_of(http or "")
                try:
                    self._connect()
                    return
                except OSError:
                    pass
            time.sleep(0.02)
        raise StartError(None, self.log)

    def _connect(self) -> None:
        if not self.path:
            return socket.create_connection(("127.0.0.1", self.port or self.http_port), timeout=1).close()
        with socket.socket(socket.AF_UNIX) as connecting:
            connecting.connect(self.path.removeprefix("unix:"))

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """The exit code; the server is expected to end by itself."""
        code = self.process.wait(timeout_s)
        self.process = None
        return code

    def stop(self) -> None:
        """SIGTERM, and the clean end that must follow."""
        self.signal(signal.SIGTERM)
        code = self.wait()
        assert code == 0, f"exit code {code} after SIGTERM; the log ends with:\n{self.log[-2000:]}"

    def kill(self) -> None:
        """SIGKILL: what a crash leaves."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_S)
            self.process = None

    def restart(self, crash: bool = False, **flags) -> "Server":
        if crash:
            self.kill()
        else:
            self.stop()
        return self.start(**flags)

    def close(self) -> None:
        self.kill()
        running.discard(self)
        shutil.rmtree(self.home, ignore_errors=True)

    def rss(self) -> int:
        """Resident bytes."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) * 1024

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def data_files(self) -> list[pathlib.Path]:
        return sorted(path for path in self.directory.rglob("*") if path.is_file())

    def disk_usage(self) -> int:
        """Bytes allocated by the cache directory, as `du` counts them."""
        return sum(path.stat().st_blocks * 512 for path in self.data_files())
