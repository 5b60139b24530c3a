"""Goal: BuildStream keeps its blobs in the server: buildbox-casd, a client in C++ that neither Bazel's nor Python's code is in.
Method: a project of small and large files is built with the server as storage service. What casd has of the files is
deleted, and the artifact, checked out by its name, must come back from the server."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from content import unique
from server import scratch

BST = pathlib.Path(sys.executable).parent / "bst"
BST_S = 120
SIZES = [0, 1, 1000, 300_000, 5_000_000, 20_000_000] + [2000 * n for n in range(40)]
# Larger than what describes an artifact, which BuildStream itself cannot fetch again.
KEPT_LEN = 4096


@pytest.fixture
def home():
    made = scratch("buildstream")
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_artifacts(fresh, home):
    server = fresh()
    files = home / "project" / "files"
    files.mkdir(parents=True)
    for number, size in enumerate(SIZES):
        (files / f"{number}").write_bytes(unique(size).bytes())
    (home / "project" / "project.conf").write_text("name: demo\nmin-version: 2.0\nelement-path: elements\n")
    elements = home / "project" / "elements"
    elements.mkdir()
    (elements / "files.bst").write_text("kind: import\nsources:\n- kind: local\n  path: files\n")
    (elements / "all.bst").write_text("kind: compose\nbuild-depends:\n- files.bst\n")
    settings = home / "buildstream.conf"
    settings.write_text(f"cachedir: {home}/cache\ncache:\n  storage-service:\n    url: http://{server.address}\n")

    def bst(*arguments: str) -> None:
        done = subprocess.run(
            [BST, "--config", settings, "--no-interactive", *arguments],
            cwd=home / "project",
            env=os.environ | {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_CACHE_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=BST_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    bst("build", "all.bst")
    for kept in (home / "cache" / "cas" / "objects").rglob("*"):
        if kept.is_file() and kept.stat().st_size > KEPT_LEN:
            kept.unlink()
    # Why: BuildStream would take them from the project.
    files.rename(home / "files")
    refs = home / "cache" / "artifacts" / "refs"
    artifact = next(path for path in (refs / "demo" / "all").iterdir())
    bst("artifact", "checkout", "--deps", "none", "--directory", str(home / "out"), str(artifact.relative_to(refs)))
    compared = subprocess.run(["diff", "-r", home / "files", home / "out"], capture_output=True, text=True, timeout=BST_S)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    calls = re.findall(r"(?:ByteStream|ContentAddressableStorage)\.(\w+)\b.* OK ", server.log)
    assert {"Write", "Read", "BatchUpdateBlobs", "BatchReadBlobs", "FindMissingBlobs"} <= set(calls), set(calls)
