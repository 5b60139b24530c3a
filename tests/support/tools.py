"""Runs the server's tools on cache directories, and changes bytes in those."""

import json
import pathlib
import re
import subprocess

from server import BINARY

TOOL_S = 120
SEGMENT_HEADER, RECORD, FOOTER = b"rcS1", b"rcR1", b"rcF1"
RECORD_HEADER_LEN = 88


class Run:
    """A tool that has ended."""

    def __init__(self, done: subprocess.CompletedProcess):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def json(self):
        return json.loads(self.out)

    def __repr__(self):
        return f"exit code {self.code}\n{self.out}\n{self.err}"


def tool(name: str, directory: pathlib.Path, *arguments: str, env=None) -> Run:
    command = [str(BINARY), name, f"--dir={directory}", *arguments]
    return Run(subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, env=env or {}))


class Data:
    """The bytes of a cache directory that nobody uses."""

    def __init__(self, directory: pathlib.Path):
        self.path = directory / "data.0"

    def bytes(self) -> bytes:
        return self.path.read_bytes()

    def find(self, wanted: bytes) -> list[int]:
        return [match.start() for match in re.finditer(re.escape(wanted), self.bytes())]

    def record(self, hash: str) -> int:
        """Where the last record of this hash starts."""
        return self.records([hash])[0]

    def records(self, hashes: list[str]) -> list[int]:
        data = self.bytes()
        # A whole record names its hash behind 8 bytes of header.
        starts = [data.rfind(RECORD, 0, data.rfind(bytes.fromhex(hash))) for hash in hashes]
        for start, hash in zip(starts, hashes):
            assert start >= 0 and data[start + 8 : start + 40] == bytes.fromhex(hash), f"no record of {hash}"
        return starts

    def flip(self, *positions: int) -> None:
        """Changes one bit at each."""
        with open(self.path, "r+b") as file:
            for position in positions:
                file.seek(position)
                (byte,) = file.read(1)
                file.seek(position)
                file.write(bytes([byte ^ 0x10]))
