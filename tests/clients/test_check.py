"""Goal: `check` finds exactly what is broken in a directory, `check --repair` drops exactly that, and `stats` counts what
is there.
Method: a cache is filled and stopped (or killed), single bits of every kind of structure are flipped; the report must name
what was flipped, the repaired directory must check clean, and a server on it must serve all but that."""

import os
import pathlib
import pty
import select
import subprocess

import pytest

from content import unique
from reapi import Client, blob_name, digest, digest_of, fails, message, Code
from server import BINARY, scratch
from streams import check_read
from tools import FOOTER, RECORD_HEADER_LEN, SEGMENT_HEADER, Data, tool

KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 700, 5000, 60_000, 256 * KIB, 256 * KIB + 100, 3 * MIB + 77]
ACTIONS = 20


class Filled:
    """A cache with blobs of every class and results of actions, its server stopped."""

    def __init__(self, server, crash: bool = False):
        self.server = server
        self.contents = [unique(size) for size in SIZES] + [unique(2000 + number) for number in range(40)]
        self.actions = {}
        with Client(server.address) as client:
            for content in self.contents:
                client.put(content.bytes())
            for number in range(ACTIONS):
                key = digest_of(b"action %d" % number)
                named = self.contents[number]
                result = message("ActionResult")(output_files=[{"path": "p", "digest": digest(named)}], exit_code=number)
                client.update_action(key, result)
                self.actions[key.hash] = (key, result)
        server.kill() if crash else server.stop()
        self.data = Data(server.directory)

    @property
    def directory(self) -> pathlib.Path:
        return self.server.directory

    def content(self, size: int):
        return next(content for content in self.contents if content.size == size)

    def check_served(self, but=(), but_actions=()) -> None:
        """All is served but the blobs of these hashes and these actions."""
        self.server.start()
        with Client(self.server.address) as client:
            missing = {key.hash for key in client.find_missing([digest(content) for content in self.contents])}
            assert missing == set(but)
            for content in self.contents:
                if content.hash not in missing:
                    check_read(client, blob_name(content.hash, content.size), content)
            for hash, (key, result) in self.actions.items():
                if hash in but_actions or result.output_files[0].digest.hash in missing:
                    with fails(Code.NOT_FOUND):
                        client.get_action(key)
                else:
                    assert client.get_action(key) == result
        self.server.stop()


@pytest.fixture
def filled(fresh):
    # Uncompressed, so that what was stored can be found on disk.
    return Filled(fresh(max_size="0.0625", storage_mode="uncompressed"))


def check_found(filled, kinds: dict[str, int], key: str | None = None, position: int | None = None) -> None:
    """The check names what is broken, and says so for people and by its exit code."""
    before = filled.data.bytes()
    run = tool("check", filled.directory, "--json")
    assert run.code == 1 and run.json["kinds"] == kinds and run.json["broken"] == sum(kinds.values()), run
    if key is not None:
        assert [entry.get("key", "") for entry in run.json["positions"]] == [key], run
    if position is not None:
        assert [entry["position"] for entry in run.json["positions"]] == [position], run
    text = tool("check", filled.directory)
    assert text.code == 1 and all(kind in text.out for kind in kinds) and "--repair" in text.out, text
    assert filled.data.bytes() == before, "a check changes nothing"
    # A server does with it what a check does not: nothing is lost but what is broken, so the repair comes first.
    run = tool("check", filled.directory, "--repair", "--json")
    assert run.code == 0 and run.json["repaired"] == run.json["broken"] == sum(kinds.values()), run
    check_clean(filled)


def check_clean(filled) -> dict:
    run = tool("check", filled.directory, "--json")
    assert run.code == 0 and run.json["broken"] == 0 and run.json["kinds"] == {}, run
    text = tool("check", filled.directory)
    assert text.code == 0 and "nothing is broken" in text.out, text
    return run.json


@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("mode", ["zstd", "uncompressed"])
def test_a_whole_cache(fresh, mode, crash):
    filled = Filled(fresh(max_size="0.0625", storage_mode=mode, ack="flushed"), crash)
    found = check_clean(filled)
    assert found["live"] == len(filled.contents) + ACTIONS
    total = sum(content.size for content in filled.contents)
    if mode == "uncompressed":
        assert found["verified_bytes"] > total
    filled.check_served()
    check_clean(filled)


def test_an_empty_cache(fresh):
    server = fresh(max_size="0.0625")
    server.stop()
    assert tool("check", server.directory, "--json").json["records"] == 0
    assert tool("stats", server.directory, "--json").json["all"]["entries"] == 0


@pytest.mark.parametrize("offset", [0, 1999])
def test_a_small_payload(filled, offset):
    content = filled.content(2000)
    position = filled.data.record(content.hash)
    filled.data.flip(position + RECORD_HEADER_LEN + offset)
    check_found(filled, {"payload": 1}, f"cas {content.hash}/{content.size}", position)
    filled.check_served(but=[content.hash])
    check_clean(filled)


def test_record_headers(filled):
    # One byte of each field, each of another record.
    fields = [0, 4, 5, 6, 7, 8, 40, 48, 56, 60, 64, 72, 80]
    gone = filled.contents[-len(fields) :]
    places = filled.data.records([content.hash for content in gone])
    filled.data.flip(*[place + field for place, field in zip(places, fields)])
    check_found(filled, {"record_header": len(fields)})
    filled.check_served(but=[content.hash for content in gone])
    check_clean(filled)


def test_an_action(filled):
    hash = next(iter(filled.actions))
    position = filled.data.record(hash)
    filled.data.flip(position + RECORD_HEADER_LEN + 3)
    check_found(filled, {"payload": 1}, f"ac {hash}", position)
    filled.check_served(but_actions=[hash])
    check_clean(filled)


@pytest.mark.parametrize("size", [256 * KIB + 100, 3 * MIB + 77])
@pytest.mark.parametrize("last", [False, True])
def test_a_frame(filled, size, last):
    content = filled.content(size)
    start = size - size % (256 * KIB) if last else 0
    (position,) = filled.data.find(content.bytes()[start : start + 4096])
    filled.data.flip(position)
    check_found(filled, {"frame": 1}, f"cas {content.hash}/{content.size}", position)
    filled.check_served(but=[content.hash])
    check_clean(filled)


def test_the_commit_of_a_large_blob(filled):
    content = filled.content(3 * MIB + 77)
    position = filled.data.record(content.hash)
    filled.data.flip(position + RECORD_HEADER_LEN + 8)
    check_found(filled, {"payload": 1}, f"cas {content.hash}/{content.size}", position)
    filled.check_served(but=[content.hash])
    check_clean(filled)


def test_headers_of_segments(filled):
    # One copy of one, both of another, which loses what stood in it.
    content = filled.content(2000)
    record = filled.data.record(content.hash)
    copies = filled.data.find(SEGMENT_HEADER)
    segment = max(copy for copy in copies[::2] if copy <= record)
    other = next(copy for copy in copies[::2] if copy != segment)
    filled.data.flip(other + 20)
    check_found(filled, {"segment_header_copy": 1}, "", other)
    filled.check_served()
    filled.data.flip(segment + 16, segment + 4096 + 16)
    run = tool("check", filled.directory, "--json")
    assert run.code == 1 and run.json["kinds"] == {"segment_header": 1}, run
    run = tool("check", filled.directory, "--json", "--repair")
    assert run.code == 0 and run.json["repaired"] == 1, run
    check_clean(filled)
    filled.server.start()
    with Client(filled.server.address) as client:
        assert client.missing(digest(content))
    filled.server.stop()
    check_clean(filled)


def zero_frames(filled, content) -> None:
    """Zeros, as if the segments with these frames had never been used."""
    segments = {filled.data.find(content.read(at, 64))[0] // MIB for at in (0, 2 * MIB)}
    with open(filled.data.path, "r+b") as file:
        for segment in segments:
            file.seek(segment * MIB)
            file.write(bytes(MIB))


def test_a_segment_of_frames_that_is_gone(filled):
    # The commits in the log tell what stood there.
    content = filled.content(3 * MIB + 77)
    zero_frames(filled, content)
    run = tool("check", filled.directory, "--json")
    keys = {entry["key"] for entry in run.json["positions"]}
    assert run.code == 1 and set(run.json["kinds"]) == {"chunks"}, run
    assert f"cas {content.hash}/{content.size}" in keys, run
    run = tool("check", filled.directory, "--json", "--repair")
    assert run.code == 0 and run.json["repaired"] == run.json["broken"] == len(keys), run
    check_clean(filled)
    filled.check_served(but=[other.hash for other in filled.contents if f"cas {other.hash}/{other.size}" in keys])


def test_commits_of_what_was_gone_at_the_end(filled):
    # They stay in the log, as those of evicted blobs do whose tombs went first; the server has not counted them.
    zero_frames(filled, filled.content(3 * MIB + 77))
    filled.server.start()
    filled.server.stop()
    check_clean(filled)


class Logs:
    """A cache some of whose shards have two segments of log or more, its server stopped."""

    def __init__(self, server):
        self.server = server
        self.contents = [unique(240_000 + number) for number in range(100)]
        with Client(server.address) as client:
            for content in self.contents:
                client.put(content.bytes())
        server.stop()
        self.data = Data(server.directory)

    @property
    def directory(self) -> pathlib.Path:
        return self.server.directory

    def oldest(self) -> tuple[int, set[str]]:
        """The number of a segment of log that is not the last of its shard, and the hashes of what stands in it."""
        data, shards = self.data.bytes(), {}
        for at in range(0, len(data), MIB):
            if data[at : at + 5] == SEGMENT_HEADER + b"\x01":
                shard, generation = data[at + 6 : at + 8], int.from_bytes(data[at + 16 : at + 24], "little")
                shards.setdefault(shard, []).append((generation, at // MIB))
        _, segment = min(min(segments) for segments in shards.values() if len(segments) > 1)
        places = zip(self.data.records([content.hash for content in self.contents]), self.contents)
        return segment, {content.hash for place, content in places if place // MIB == segment}

    def check_served(self, but: set[str]) -> None:
        self.server.start()
        with Client(self.server.address) as client:
            assert {key.hash for key in client.find_missing([digest(content) for content in self.contents])} == but
        self.server.stop()


@pytest.mark.parametrize("kept", [0, 2 * 4096], ids=["all", "all but the header"])
def test_a_segment_of_log_that_is_zeros(fresh, kept):
    # What a lost write or a discarded range leaves: nothing in the segment itself says that there was something.
    filled = Logs(fresh(max_size="0.0625", storage_mode="uncompressed"))
    check_clean(filled)
    segment, gone = filled.oldest()
    assert gone
    with open(filled.data.path, "r+b") as file:
        file.seek(segment * MIB + kept)
        file.write(bytes(MIB - kept))
    check_found(filled, {"records" if kept else "missing": 1}, "", segment * MIB + kept if kept else None)
    filled.check_served(gone)
    check_clean(filled)


@pytest.mark.parametrize("copy", [0, 1])
def test_zeros_in_the_place_of_what_stands_twice(filled, copy):
    segment = filled.data.find(SEGMENT_HEADER)[0]
    path = filled.directory / "super"
    path.write_bytes(path.read_bytes()[: 4096 * copy] + bytes(4096) + path.read_bytes()[4096 * (copy + 1) :])
    with open(filled.data.path, "r+b") as file:
        file.seek(segment + 4096 * copy)
        file.write(bytes(4096))
    check_found(filled, {"super": 1, "segment_header_copy": 1})
    filled.check_served()


def test_zeros_in_the_place_of_a_chunk_and_a_record(filled):
    large, small = filled.content(3 * MIB + 77), filled.content(5000)
    with open(filled.data.path, "r+b") as file:
        file.seek(filled.data.find(large.read(0, 4096))[0])
        file.write(bytes(64 * KIB))
        file.seek(filled.data.record(small.hash))
        file.write(bytes(5000))
    check_found(filled, {"frame": 1, "record_header": 1})
    filled.check_served(but=[large.hash, small.hash])
    check_clean(filled)


@pytest.mark.parametrize("offset", [0, 12, 24, 56, -8, -16], ids=["magic", "length", "generation", "sum", "list", "word"])
def test_footers(filled, offset):
    position = filled.data.find(FOOTER)[0]
    filled.data.flip(position + offset)
    check_found(filled, {"footer": 1})
    filled.check_served()
    check_clean(filled)


@pytest.mark.parametrize("copy", [0, 1])
def test_superblocks(filled, copy):
    path = filled.directory / "super"
    data = bytearray(path.read_bytes())
    data[4096 * copy + 30] ^= 1
    path.write_bytes(data)
    check_found(filled, {"super": 1}, "", 4096 * copy)
    assert len(path.read_bytes()) == 8192
    filled.check_served()


def test_a_killed_server_and_flips(fresh):
    # No footer lists what was written since the start: records are found by going through the segment.
    filled = Filled(fresh(max_size="0.0625", storage_mode="uncompressed", ack="flushed"), crash=True)
    assert filled.data.find(FOOTER) == []
    payload, header = filled.content(2001), filled.content(2002)
    places = filled.data.records([payload.hash, header.hash])
    filled.data.flip(places[0] + RECORD_HEADER_LEN + 5, places[1] + 20)
    check_found(filled, {"payload": 1, "record_header": 1})
    filled.check_served(but=[payload.hash, header.hash])
    check_clean(filled)


def test_an_older_record_stays_dead(filled):
    # The last result of an action is broken: the one before must not come back with the repair.
    key, _ = next(iter(filled.actions.values()))
    filled.server.start()
    with Client(filled.server.address) as client:
        client.update_action(key, message("ActionResult")(exit_code=77))
    filled.server.stop()
    filled.data.flip(filled.data.record(key.hash) + RECORD_HEADER_LEN + 1)
    check_found(filled, {"payload": 1}, f"ac {key.hash}")
    filled.check_served(but_actions=[key.hash])


def test_many_flips_at_once(filled):
    gone = filled.contents[::2]
    places = filled.data.records([content.hash for content in gone])
    filled.data.flip(*[place + RECORD_HEADER_LEN for place in places])
    check_found(filled, {"payload": len(gone)})
    filled.check_served(but=[content.hash for content in gone])
    check_clean(filled)


def test_exchanged_frames(filled):
    # Each is whole, but not what stands in the list of that place.
    content = filled.content(3 * MIB + 77)
    places = [filled.data.find(content.bytes()[at : at + 4096])[0] for at in (0, 256 * KIB)]
    data = filled.data.bytes()
    with open(filled.data.path, "r+b") as file:
        for place, other in (places, places[::-1]):
            file.seek(place)
            file.write(data[other : other + 256 * KIB])
    check_found(filled, {"frame": 1}, f"cas {content.hash}/{content.size}", min(places))
    filled.check_served(but=[content.hash])


def test_stats(filled):
    found = tool("stats", filled.directory, "--json")
    assert found.code == 0, found
    classes = found.json["classes"]
    small = [content for content in filled.contents if content.size <= 256 * KIB]
    large = [content for content in filled.contents if content.size > 256 * KIB]
    for name, contents in (("cas_small", small), ("cas_large", large)):
        total = sum(content.size for content in contents)
        assert classes[name]["entries"] == len(contents)
        assert classes[name]["logical_bytes"] == classes[name]["stored_bytes"] == total
        assert classes[name]["disk_bytes"] > total
    assert classes["ac_small"]["entries"] == ACTIONS and classes["ac_large"]["entries"] == 0
    assert found.json["all"]["entries"] == len(filled.contents) + ACTIONS
    bars = {bar["up_to"]: bar["sums"]["entries"] for bar in found.json["sizes"]}
    assert bars[64 * KIB] == 1 and bars[256 * KIB] == 1 and bars[16 * MIB] == 1
    assert sum(bars.values()) == found.json["all"]["entries"]
    assert 0 < found.json["oldest_lease"] <= found.json["newest_lease"]
    assert found.json["segments"]["logs"] + found.json["segments"]["chunks"] <= found.json["segments"]["total"]
    text = tool("stats", filled.directory)
    assert text.code == 0 and "cas large" in text.out and "size up to" in text.out, text


def test_stats_of_compressed_blobs(fresh):
    server = fresh(max_size="0.0625")
    with Client(server.address) as client:
        client.put(b"the same again " * 10_000)
        client.put(b"and more of it " * 100_000)
    server.stop()
    found = tool("stats", server.directory, "--json").json["all"]
    assert found["entries"] == 2 and found["logical_bytes"] == 1_650_000
    assert found["stored_bytes"] < found["logical_bytes"] / 10


def test_a_directory_in_use(fresh):
    server = fresh(max_size="0.0625")
    for name in ("check", "stats"):
        run = tool(name, server.directory)
        assert run.code == 2 and "in use" in run.err and run.out == "", run


def test_no_cache():
    directory = scratch("none")
    for name in ("check", "stats"):
        run = tool(name, directory)
        assert run.code == 2 and "--dir" in run.err and "super" in run.err, run
    assert list(directory.iterdir()) == []


def test_the_directory_may_come_from_the_environment(filled):
    run = subprocess.run(
        [str(BINARY), "check"], env={"RINGCAS_DIR": str(filled.directory)}, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0 and "nothing is broken" in run.stdout, run


@pytest.mark.parametrize(
    "arguments,told",
    [
        (["check", "--nothing"], "Usage"),
        (["chekc"], "Usage"),
        (["--max_size", "1", "check"], "the flags of a tool stand behind its name: ringcas check --dir <DIR>"),
    ],
)
def test_wrong_command_lines(arguments, told):
    run = subprocess.run([str(BINARY), *arguments], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and told in run.stderr, run


def test_progress_on_a_terminal(filled):
    # On a terminal a line is written over and over, and wiped at the end; the report goes to standard output.
    ours, theirs = pty.openpty()
    run = subprocess.Popen(
        [str(BINARY), "check", f"--dir={filled.directory}", "--cores=1"], stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:
            break
    out, _ = run.communicate(timeout=60)
    os.close(ours)
    assert run.returncode == 0 and b"nothing is broken" in out
    assert shown.endswith(b"\r\x1b[K") and b"\n" not in shown, shown
