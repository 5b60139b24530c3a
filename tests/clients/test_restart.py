"""Goal: whatever was flushed is found after any end of the process, with any number of cores.
Method: blobs and results of every class are stored, the process is stopped or killed, all are read back."""

import random
import threading

import pytest

from content import unique
from reapi import Client, Code, blob_name, digest, digest_of, fails, message, upload_name
from streams import check_read, zstd_pieces

KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 100, 4 * KIB, 4 * KIB + 1, 60_000, 256 * KIB, 256 * KIB + 1, MIB + 1, 5 * MIB + 77]


class Stock:
    """What has been stored and acknowledged, and must be found again."""

    def __init__(self):
        self.contents = []
        self.actions = {}

    def fill(self, address: str, small: int = 200) -> None:
        """Adds blobs of every size, raw and zstd, many small ones, and results that name them."""
        with Client(address) as client:
            for number, size in enumerate(SIZES):
                content = unique(size)
                zstd = number % 2 == 1
                pieces = content.chunks()
                name = upload_name(content.hash, size, zstd)
                client.write(name, zstd_pieces(pieces) if zstd else pieces)
                self.contents.append(content)
            batch = [unique(random.Random(number).randrange(1, 9000)) for number in range(small)]
            for at in range(0, len(batch), 100):
                items = [(digest(content), content.bytes()) for content in batch[at : at + 100]]
                assert all(answer.status.code == 0 for answer in client.batch_update(items))
            self.contents += batch
            for content in self.contents[-20:]:
                key = digest_of(b"action of " + content.hash.encode())
                result = message("ActionResult")(output_files=[{"path": "p", "digest": digest(content)}])
                client.update_action(key, result)
                # Stored twice: the last one counts.
                result.exit_code = 9
                client.update_action(key, result)
                self.actions[key.hash] = (key, result)

    def check(self, address: str) -> None:
        with Client(address) as client:
            assert client.find_missing([digest(content) for content in self.contents]) == []
            for content in self.contents:
                check_read(client, blob_name(content.hash, content.size), content)
            for content in self.contents[: len(SIZES)]:
                check_read(client, blob_name(content.hash, content.size, zstd=True), content, zstd=True)
            for key, result in self.actions.values():
                assert client.get_action(key) == result


@pytest.mark.parametrize("mode", ["zstd", "uncompressed"])
@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "killed"])
def test_all_is_found_again(fresh, mode, crash):
    server = fresh(storage_mode=mode, ack="flushed" if crash else "buffered")
    stock = Stock()
    for _ in range(3):
        stock.fill(server.address)
        server.restart(crash)
        stock.check(server.address)


def test_durable_acknowledgements(fresh):
    server = fresh(ack="durable")
    stock = Stock()
    stock.fill(server.address, small=20)
    server.restart(crash=True)
    stock.check(server.address)


def test_any_number_of_cores(fresh):
    server = fresh(cores="1", ack="flushed")
    stock = Stock()
    for number, cores in enumerate(["2", "16", "3", "1", "16"]):
        stock.fill(server.address, small=50)
        server.restart(crash=number % 2 == 1, cores=cores)
        stock.check(server.address)


def test_a_list_of_cpus(fresh):
    server = fresh(cores="0-0")
    with Client(server.address) as client:
        key = client.put(b"on one CPU by its number")
        assert not client.missing(key)


def test_the_storage_mode_may_change(fresh):
    server = fresh(storage_mode="zstd")
    stock = Stock()
    for mode in ("uncompressed", "zstd"):
        stock.fill(server.address, small=50)
        server.restart(storage_mode=mode)
        stock.check(server.address)


def test_settings_may_change(fresh):
    server = fresh(ack="flushed")
    stock = Stock()
    stock.fill(server.address, small=50)
    for flags in ({"memory_limit": "1G", "ram_cache": "0"}, {"memory_limit": "4G", "ram_cache": "512M"}):
        server.restart(**flags)
        stock.check(server.address)


@pytest.mark.parametrize("round", range(3))
def test_killed_under_load(fresh, round):
    # 8 connections upload while the process is killed: the acknowledged is there, the rest is a miss, no byte is wrong.
    server = fresh(ack="flushed", cores="3")
    acknowledged, attempted = [], []
    going = threading.Event()
    lock = threading.Lock()

    def load(seed: int):
        source = random.Random(seed)
        with Client(server.address) as client:
            for number in range(10_000):
                content = unique(source.choice([500, 5000, 5000, 5000, 300_000, 2 * MIB]))
                with lock:
                    attempted.append(content)
                try:
                    client.write(upload_name(content.hash, content.size), content.chunks())
                except Exception:  # noqa: BLE001 - the server is gone.
                    return
                with lock:
                    acknowledged.append(content)
                    if len(acknowledged) >= 300 * (round + 1):
                        going.set()

    threads = [threading.Thread(target=load, args=(100 * round + number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    assert going.wait(120)
    server.kill()
    for thread in threads:
        thread.join(30)
    server.start()
    with Client(server.address) as client:
        assert client.find_missing([digest(content) for content in acknowledged]) == []
        found = 0
        for content in attempted:
            try:
                check_read(client, blob_name(content.hash, content.size), content)
                found += 1
            except Exception as error:
                if not hasattr(error, "code") or error.code() != Code.NOT_FOUND:
                    raise
        assert found >= len(acknowledged)


def test_a_crash_during_recovery(fresh):
    # Killed again at once after each start, before and after the port answers.
    server = fresh(ack="flushed")
    stock = Stock()
    stock.fill(server.address)
    for _ in range(6):
        server.restart(crash=True)
    stock.check(server.address)


def test_what_was_wrong_stays_away(fresh):
    server = fresh(ack="flushed")
    content = unique(2 * MIB)
    with Client(server.address) as client:
        with fails(Code.INVALID_ARGUMENT):
            client.write(upload_name(content.hash, content.size), [bytes(MIB), bytes(MIB)])
    server.restart(crash=True)
    with Client(server.address) as client:
        assert client.missing(digest(content))
        assert client.write_status(upload_name(content.hash, content.size)).committed_size == 0
