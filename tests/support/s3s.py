"""The S3 store of `tests/store` on loopback: in memory, with every signature and hash checked by the s3s library."""

import os
import pathlib
import subprocess

from bucket import StoreProcess
from server import ROOT, free_port, scratch
from wait import until

BINARY = pathlib.Path(os.environ.get("RINGCAS_TEST_STORE", ROOT / "target" / "store" / "release" / "store"))
# Moves the clock of a process that gets its time from libc.
SKEW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += %d;
    return result;
}
"""


class S3s(StoreProcess):
    """One such store."""

    key, secret = "AKS3S", "another-secret/with+signs="

    def __init__(self, skew_s: int = 0):
        """`skew_s` is how far its clock is ahead."""
        self.home = scratch("s3s")
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        environment = dict(os.environ)
        if skew_s:
            source, library = self.home / "skew.c", self.home / "skew.so"
            source.write_text(SKEW % skew_s)
            command = ["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            environment["LD_PRELOAD"] = str(library)
        log = self.home / "log"
        with open(log, "wb") as out:
            command = [BINARY, str(port), self.key, self.secret]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        try:
            until(lambda: "listening" in log.read_text() or self.process.poll() is not None, "the store listens")
            assert self.process.poll() is None, log.read_text()
        except BaseException:
            self.close()
            raise
