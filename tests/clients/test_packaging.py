"""Goal: the Debian package holds what it should, where the unit looks for it. Method: it is made of the binary under test
and taken apart again; the binary in it runs."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest
from server import BINARY, ROOT


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb here")
    out = tmp_path_factory.mktemp("deb")
    command = [ROOT / "tuning" / "packaging" / "deb", out]
    made = subprocess.run(command, env=os.environ | {"RINGCAS_BINARY": str(BINARY)}, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made
    return pathlib.Path(made.stdout.strip())


def test_its_fields(package):
    def field(name):
        return subprocess.run(["dpkg-deb", "-f", package, name], capture_output=True, text=True, check=True).stdout.strip()

    version = subprocess.run([BINARY, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    assert (field("Package"), field("Version")) == ("ringcas", version)
    assert re.fullmatch(r"libc6 \(>= 2\.\d+\), libgcc-s1", field("Depends"))


def test_its_files(package, tmp_path):
    subprocess.run(["dpkg-deb", "-R", package, tmp_path], check=True, timeout=120)
    unit = (tmp_path / "usr/lib/systemd/system/ringcas.service").read_text()
    program = re.search(r"^ExecStart=/(\S+)", unit, re.MULTILINE).group(1)
    settings = re.search(r"^EnvironmentFile=-/(\S+)", unit, re.MULTILINE).group(1)
    assert (tmp_path / settings).is_file() and (tmp_path / "usr/lib/systemd/system/ringcas.socket").is_file()
    assert f"/{settings}\n" == (tmp_path / "DEBIAN/conffiles").read_text()
    ran = subprocess.run([tmp_path / program, "--version"], capture_output=True, text=True, timeout=60)
    assert ran.stdout.startswith("ringcas ")
    for script in ("postinst", "prerm", "postrm"):
        subprocess.run(["sh", "-n", tmp_path / "DEBIAN" / script], check=True)
    assert (tmp_path / "usr/share/doc/ringcas/tuning/runbook.md").is_file()


def test_the_image_copies_what_is_built():
    text = (ROOT / "tuning" / "packaging" / "Dockerfile").read_text()
    assert "cargo build --locked --release" in text and "apt-get" not in text and "curl" not in text
    assert re.search(r'^ENTRYPOINT \["/usr/bin/ringcas"\]$', text, re.MULTILINE)
