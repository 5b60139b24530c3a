"""Goal: 16 executors on 2 CPUs bear a mixed load of 64 connections: no error, no hang, no growth of memory.
Method: worker processes with 16 connections each do every kind of call with checked contents while memory is sampled.
RINGCAS_SOAK_S sets the duration in seconds (300 to show it; CI runs a shorter one). The seeds are fixed."""

import os
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time
import traceback

import pytest

SOAK_S = float(os.environ.get("RINGCAS_SOAK_S", "45"))
PROCESSES = 4
CONNECTIONS = 16
CALL_S = 60


def main(address: str, seed: int, seconds: float) -> int:
    """One worker process: 16 threads, each with a connection of its own. Exit code 1 and a report on any error."""
    deadline = time.monotonic() + seconds
    errors, counts = [], [0] * CONNECTIONS
    threads = [threading.Thread(target=_connection, args=(address, seed * 100 + n, deadline, errors, counts, n)) for n in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 3 * CALL_S)
        if thread.is_alive():
            errors.append("a connection hangs")
    print(f"calls {sum(counts)}")
    for error in errors[:3]:
        print(error)
    return 1 if errors else 0


def _connection(address, seed, deadline, errors, counts, number):
    try:
        with Client(address, deadline_s=CALL_S) as client:
            load = Load(client, seed)
            while time.monotonic() < deadline and not errors:
                load.step()
                counts[number] += 1
    except BaseException:  # noqa: BLE001 - reported by the process.
        errors.append(f"seed {seed}: " + traceback.format_exc(limit=-4))


class Load:
    def __init__(self, client, seed: int):
        self.client = client
        self.source = random.Random(seed)
        self.base = seed << 20
        self.made = 0
        self.recent: list[Content] = []
        self.steps = [self.write, self.write, self.read, self.read, self.find, self.batch, self.action, self.abandon]

    def step(self):
        self.source.choice(self.steps)()

    def content(self) -> "Content":
        self.made += 1
        size = self.source.choice([1, 300, 4096, 4096, 20_000, 100_000, 300_000, 1 << 20, 3 << 20])
        return Content(size, self.base + self.made % 50 if size > 200_000 else self.base + self.made)

    def keep(self, content):
        self.recent = [*self.recent[-20:], content]

    def write(self):
        content = self.content()
        zstd = self.source.random() < 0.4
        pieces = content.chunks(length=self.source.choice([16 << 10, 256 << 10, 1 << 20]))
        committed = self.client.write(upload_name(content.hash, content.size, zstd), zstd_pieces(pieces) if zstd else pieces)
        assert committed == content.size or zstd
        self.keep(content)

    def read(self):
        if not self.recent:
            return
        content = self.source.choice(self.recent)
        zstd = self.source.random() < 0.4
        offset = self.source.choice([0, 0, content.size // 3, content.size])
        check_read(self.client, blob_name(content.hash, content.size, zstd), content, offset, zstd)

    def find(self):
        asked = [digest(content) for content in self.recent]
        absent = [message("Digest")(hash=self.source.randbytes(32).hex(), size_bytes=5) for _ in range(500)]
        assert {key.hash for key in self.client.find_missing(asked + absent)} == {key.hash for key in absent}

    def batch(self):
        contents = [Content(self.source.randrange(1, 5000), self.base + 10_000 + self.source.randrange(5000)) for _ in range(20)]
        answers = self.client.batch_update([(digest(content), content.bytes()) for content in contents])
        assert all(answer.status.code == 0 for answer in answers)
        for content, answer in zip(contents, self.client.batch_read([digest(content) for content in contents])):
            assert answer.status.code == 0 and answer.digest == digest(content) and answer.data == content.bytes()

    def action(self):
        key = message("Digest")(hash=self.source.randbytes(32).hex(), size_bytes=140)
        files = [{"path": str(n), "digest": digest(content)} for n, content in enumerate(self.recent)]
        result = message("ActionResult")(output_files=files, exit_code=self.source.randrange(100))
        self.client.update_action(key, result)
        assert self.client.get_action(key) == result

    def abandon(self):
        """Calls that end early: a cancelled read, an upload left in the middle, a wrong hash."""
        content = Content(2 << 20, self.base + 20_000 + self.source.randrange(1 << 18))
        name = upload_name(content.hash, content.size)
        kind = self.source.randrange(3)
        try:
            if kind == 0:
                # Always the same two, so that what is kept for their clients is soon as much as it will be.
                kept = Content(2 << 20, self.base + 20_000 + self.source.randrange(2))
                name = upload_name(kept.hash, kept.size, id=f"kept-{kept.seed}")
                self.client.write(name, [kept.read(0, 100_000)], finish=False)
            elif kind == 1:
                self.client.write(name, [bytes(1 << 20), bytes(1 << 20)])
                raise AssertionError("wrong bytes were taken")
            elif self.recent:
                big = max(self.recent, key=lambda each: each.size)
                call = self.client.read_call(blob_name(big.hash, big.size))
                next(call, None)
                call.cancel()
        except grpc.RpcError as error:
            assert kind != 2 or error.code() == Code.CANCELLED, error
            assert error.code() not in (Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE, Code.INTERNAL, Code.UNKNOWN), error


@pytest.mark.slow
def test_mixed_load(fresh):
    server = fresh(cores="16", max_size="6", memory_limit="2G", ram_cache="16M")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, server.address, str(seed), str(SOAK_S)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True,
        )
        for seed in range(1, PROCESSES + 1)
    ]  # fmt: skip
    samples = []
    try:
        started = time.monotonic()
        while any(worker.poll() is None for worker in workers):
            assert time.monotonic() - started < SOAK_S + 4 * CALL_S, "the load hangs"
            samples.append((time.monotonic() - started, server.rss()))
            time.sleep(0.5)
        for worker in workers:
            report = worker.communicate()[0]
            assert worker.returncode == 0, report
            calls = int(report.split()[1])
            assert calls > 5 * SOAK_S, report
            print(report.strip())
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    warm, last = ([rss for at, rss in samples if SOAK_S * since < at < SOAK_S * until] for since, until in ((0.4, 0.6), (0.8, 1)))
    mib = [rss >> 20 for _, rss in samples[:: max(1, len(samples) // 12)]]
    print(f"resident MiB over time: {mib}")
    # Medians: a peak of uploads at a time is no growth. A short run is not warm in the middle.
    grown = statistics.median(last) / statistics.median(warm) - 1
    assert grown < (0.15 if SOAK_S >= 300 else 0.3), f"memory grows by {grown:.0%}: {mib}"
    assert max(rss for _, rss in samples) < 3 << 30
    with Client(server.address) as client:
        client.capabilities()
    server.stop()


if __name__ == "__main__":
    sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / "support")]

import grpc  # noqa: E402

from content import Content  # noqa: E402
from reapi import Client, Code, blob_name, digest, message, upload_name  # noqa: E402
from streams import check_read, zstd_pieces  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
