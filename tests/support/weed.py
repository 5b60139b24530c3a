"""SeaweedFS as an S3 store on loopback."""

import json
import pathlib
import subprocess
import sys
import time

from bucket import StoreProcess
from server import free_port, is_free, scratch

START_S = 60


def _ports(count: int) -> list[int]:
    """Ports P for which P + 10000 is free too: weed takes that for its gRPC."""
    found: set[int] = set()
    while len(found) < count:
        port = free_port(below=20_000)
        if is_free(port + 10_000):
            found.add(port)
    return list(found)


class Weed(StoreProcess):
    """One such store."""

    key, secret = "AKWEED", "a-secret/with+signs="

    def __init__(self):
        self.home = scratch("weed")
        config = self.home / "s3.json"
        identity = {
            "name": "test",
            "credentials": [{"accessKey": self.key, "secretKey": self.secret}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config.write_text(json.dumps({"identities": [identity]}))
        master, volume, filer, s3 = _ports(4)
        self.address = f"127.0.0.1:{s3}"
        binary = pathlib.Path(sys.executable).parent / "weed"
        command = [str(binary), "-logtostderr=true", "server", f"-dir={self.home}", "-ip=127.0.0.1"]
        command += ["-ip.bind=127.0.0.1", "-master.telemetry=false", f"-master.port={master}"]
        command += [f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}"]
        command += [f"-s3.config={config}", "-master.volumeSizeLimitMB=64", "-volume.max=100"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        self.log = self.home / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.home)
        try:
            self._await(time.monotonic() + START_S)
        except BaseException:
            self.close()
            raise

    def _await(self, deadline: float) -> None:
        """Returns when a bucket can be made and written."""
        trial = self.bucket("trial")
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-2000:]
            try:
                if trial.request("PUT")[0] in (200, 409) and trial.request("PUT", "x", b"x")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"weed did not start:\n{self.log.read_text(errors='replace')[-2000:]}")
