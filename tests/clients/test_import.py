"""Goal: a bazel-remote directory is taken over: what is whole is served, what is not is named, an import that was ended
goes on.
Method: directories by the documented layout, every kind of file and of damage among them; import, check, serve, compare."""

import os
import pty
import select
import shutil
import signal
import subprocess
import urllib.request

import pytest

from bazel_remote import IDENTITY, Directory, casblob
from content import sha256, unique
from reapi import Client, blob_name, digest_of, message
from server import BINARY, Server, scratch
from tools import Run, tool

KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 100, 5000, 64 * KIB, 256 * KIB, 256 * KIB + 1, MIB, MIB + 1, 3 * MIB + 333]
IMPORT_S = 120


def text(size: int) -> bytes:
    """Content that compresses, and that no other test has."""
    content = unique(max(32, size // 4)).bytes().hex().encode()
    return (content * 2)[:size]


class Move:
    """A bazel-remote directory, and a server on what was imported from it."""

    def __init__(self):
        self.source = Directory(scratch("bazel-remote"))
        self.server = Server(max_size="0.125")

    def close(self):
        self.server.close()
        shutil.rmtree(self.source.root)

    def command(self, *arguments: str) -> list[str]:
        directories = [f"--from={self.source.root}", f"--dir={self.server.directory}"]
        return [str(BINARY), "import", *directories, "--max_size=0.125", *arguments]

    def run(self, *arguments: str) -> Run:
        command = self.command(*(arguments or ["--json"]))
        return Run(subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, env={}))

    def files(self) -> dict:
        """Every file of the source: what an import must leave as it is."""
        paths = [path for path in self.source.root.rglob("*") if path.is_file()]
        stats = {path: path.lstat() for path in paths}
        return {path: (stat.st_size, stat.st_mtime_ns, stat.st_atime_ns) for path, stat in stats.items()}

    def check_served(self, blobs, actions=(), missing=()) -> None:
        """These and those are there, byte for byte; and these digests are not."""
        found = tool("check", self.server.directory)
        assert found.code == 0, found
        self.server.start()
        with Client(self.server.address) as client:
            assert client.find_missing([digest_of(data) for data in blobs]) == []
            for data in blobs:
                assert client.read(blob_name(sha256(data), len(data))) == data
            for hash, result in actions:
                # bazel-remote does not keep the size of an action: any is right.
                key = message("Digest")(hash=hash, size_bytes=77)
                assert client.get_action(key) == result
            if missing:
                assert len(client.find_missing(list(missing))) == len(missing)
        self.server.stop()


@pytest.fixture
def move():
    made = Move()
    yield made
    made.close()


def result_of(*outputs: bytes, **fields):
    files = [{"path": f"out/{number}", "digest": digest_of(data)} for number, data in enumerate(outputs)]
    worker = {"worker": "10.0.0.1:1234"}
    return message("ActionResult")(output_files=files, execution_metadata=worker, **fields)


def stored(run: Run) -> dict[str, int]:
    return {name: sums["files"] for name, sums in run.json["stored"].items()}


def skipped(run: Run) -> dict[str, int]:
    return {name: sums["files"] for name, sums in run.json["skipped"].items()}


def test_every_kind_of_file(move):
    blobs, actions = [], []
    for number, size in enumerate(SIZES):
        for write in (move.source.compressed, move.source.plain):
            for data in (text(size), unique(size).bytes()) if size > 100 else (text(size),):
                if data not in blobs:
                    write(data)
                    blobs.append(data)
    whole = text(2 * MIB)
    move.source.compressed(whole, object=casblob(whole, kind=IDENTITY))
    small = text(3000)
    move.source.compressed(small, object=casblob(small, kind=IDENTITY))
    blobs += [whole, small]
    raws = {}
    for number in range(20):
        result = result_of(*blobs[number : number + 3], exit_code=number)
        hash = sha256(b"action %d" % number)
        move.source.action(hash, result.SerializeToString())
        actions.append((hash, result))
        raws[hash] = b"\xff\xff of ccache %d" % number + bytes(300_000 * (number % 2))
        move.source.raw(hash, raws[hash])
    # Contents that bazel-remote keeps inline become blobs.
    inline = result_of(stdout_raw=b"printed by an action")
    move.source.action(sha256(b"inline"), inline.SerializeToString())
    blobs.append(b"printed by an action")
    outside = result_of(stdout_digest=digest_of(b"printed by an action"))
    actions.append((sha256(b"inline"), outside))
    move.source.plain(b"")
    (move.source.root / "lost+found").mkdir()
    (move.source.root / ".DS_Store").write_bytes(b"x")
    before = move.files()
    run = move.run()
    assert run.code == 0 and skipped(run) == {}, run
    # The empty blob is always there, and what the inline contents became is no file.
    assert stored(run) == {"cas": len(blobs) - 1, "ac": 21, "raw": 20} and run.json["present"] == 1, run
    assert move.files() == before
    move.check_served(blobs, actions)
    # What was not checked is there over HTTP where it is not checked either.
    move.server.start(http_address="127.0.0.1:0", disable_http_ac_validation="true")
    for hash, data in raws.items():
        with urllib.request.urlopen(f"http://{move.server.http_address}/ac/{hash}", timeout=60) as answer:
            assert answer.read() == data
    move.server.stop()
    again = move.run()
    assert stored(again) == {"cas": 0, "ac": 0, "raw": 0} and again.json["present"] == len(before) - 1, again
    words = move.run("--storage_mode=uncompressed")
    assert words.code == 0 and "were there already" in words.out, words


@pytest.mark.parametrize("mode", ["zstd", "uncompressed"])
def test_the_storage_mode(move, mode):
    data = text(50_000)
    move.source.compressed(data)
    assert move.run("--json", f"--storage_mode={mode}").code == 0
    sums = tool("stats", move.server.directory, "--json").json["all"]
    assert (sums["stored_bytes"] == sums["logical_bytes"] == len(data)) == (mode == "uncompressed")
    move.check_served([data])


def test_directories_of_older_versions(move):
    blobs = [text(5000), text(400_000)]
    result = result_of(*blobs)
    hash = sha256(b"an old action")
    move.source.file(f"cas/{sha256(blobs[0])}", blobs[0])
    move.source.file(f"cas/{sha256(blobs[1])[:2]}/{sha256(blobs[1])}", blobs[1])
    move.source.file(f"ac/{hash[:2]}/{hash}", result.SerializeToString())
    move.source.file(f"raw/{sha256(b'raw')}", result.SerializeToString())
    run = move.run()
    assert run.code == 0 and stored(run) == {"cas": 2, "ac": 1, "raw": 1}, run
    move.check_served(blobs, [(hash, result)])


def test_what_is_not_whole(move):
    source = move.source
    good = [text(7000), text(700_000)]
    source.compressed(good[0])
    source.plain(good[1])
    gone = []

    def lost(data: bytes) -> bytes:
        gone.append(digest_of(data))
        return data

    def flipped(object: bytes) -> bytes:
        at = len(object) // 2
        return object[:at] + bytes([object[at] ^ 4]) + object[at + 1 :]

    # Empty; cut in the header, in the table, in the first chunk, at the end; another magic; one bit of a chunk.
    cuts = [lambda object, end=end: object[:end] for end in (0, 20, 40, 100, -1)]
    harms = [*cuts, lambda object: b"\x00" + object[1:], flipped]
    for size in (9000, 3 * MIB):
        for harm in harms:
            data = lost(text(size))
            source.compressed(data, object=harm(casblob(data)))
    damaged = 2 * len(harms)
    # Sizes that disagree: the name's with the header's, and both with the content.
    data = lost(text(8000))
    source.compressed(data, size=7999)
    data = lost(text(8000))
    source.compressed(data, object=casblob(data, size=7999), size=7999)
    data = lost(text(8000))
    source.compressed(data, object=casblob(data, size=8001), size=8001)
    damaged += 3
    # Empty and cut files of uncompressed blobs, and content of another hash.
    source.plain(b"", hash=sha256(lost(text(600))))
    damaged += 1
    for size in (900, 400_000):
        data = lost(text(size))
        source.plain(data[:-1], hash=sha256(data))
        data = lost(text(size))
        source.compressed(bytes(size), hash=sha256(data))
    for data in (b"", b"no message \xff\xff", result_of(good[0]).SerializeToString()[:-1]):
        source.action(sha256(b"of " + data), data)
        damaged += 1
    source.action(sha256(b"absolute"), message("ActionResult")(output_files=[{"path": "/x"}]).SerializeToString())
    damaged += 1
    too_large = message("ActionResult")(output_symlinks=[{"path": f"{n}", "target": "t" * 1000} for n in range(4000)])
    source.action(sha256(b"too large"), too_large.SerializeToString())
    source.compressed(bytes(65 * MIB))
    # Names that mean nothing, and files that were being written.
    hash = sha256(b"nothing")
    other = "00" if hash[:2] != "00" else "01"
    for path in ("notes.txt", "cas.v2/readme", f"cas.v2/{hash[:2]}/{hash}", f"cas.v2/{other}/{hash}-5-1",
                 f"cas.v2/{hash[:2]}/{hash}-1.v2", f"ac.v2/{hash[:2]}/{hash}-1-2", f"cas.v2/{hash}-5-1"):  # fmt: skip
        source.file(path, b"12345")
    (source.root / "cas.v2" / hash[:2] / f"{hash}-77.v1").symlink_to(source.root / "notes.txt")
    (source.root / "cas.v2" / "zz").mkdir()
    source.plain(lost(text(300))).chmod(0o2664)
    source.file(f"{sha256(b'a prefix')}/cas.v2/{hash[:2]}/{hash}-5-1", b"of a tenant")
    before = move.files()
    run = move.run()
    assert run.code == 1, run
    assert stored(run) == {"cas": 2, "ac": 0, "raw": 0}, run
    expected = {"damaged": damaged, "wrong_hash": 4, "too_large": 2, "unknown_name": 9, "temporary": 1, "storage_prefix": 1}
    assert skipped(run) == expected, run
    assert all(str(move.source.root) in path for path in run.json["skipped"]["damaged"]["examples"])
    assert move.files() == before
    words = move.run("--cores=1")
    assert words.code == 1 and "hash" in words.out and "notes.txt" in words.out, words
    move.check_served(good, missing=gone)


def test_actions_with_several_files(move):
    # The newest that is whole counts.
    good = [result_of(exit_code=number) for number in range(2)]
    names = [sha256(b"several %d" % number) for number in range(2)]
    move.source.action(names[0], result_of(exit_code=9).SerializeToString())
    move.source.action(names[0], good[0].SerializeToString())
    move.source.action(names[1], good[1].SerializeToString())
    move.source.action(names[1], good[1].SerializeToString()[:-1])
    move.source.raw(names[1], b"of another key space")
    run = move.run()
    assert stored(run) == {"cas": 0, "ac": 2, "raw": 1}, run
    assert skipped(run) == {"damaged": 1, "superseded": 1}, run
    move.check_served([], zip(names, good))


def test_what_is_there_stays(move):
    # A result that the server got since counts more than the file's.
    old, new = result_of(exit_code=1), result_of(exit_code=2)
    hash = sha256(b"newer here")
    move.source.action(hash, old.SerializeToString())
    assert move.run().code == 0
    move.server.start()
    with Client(move.server.address) as client:
        client.update_action(message("Digest")(hash=hash, size_bytes=77), new)
    move.server.stop()
    assert move.run().json["present"] == 1
    move.check_served([], [(hash, new)])


def test_the_newest_are_kept(move):
    # More than fits: what was used last is there, and another run changes nothing.
    contents = [unique(MIB).bytes() for _ in range(180)]
    for content in contents:
        move.source.plain(content)
    # One that no such cache takes, used last: it takes nobody's place.
    os.truncate(move.source.plain(b"too large"), 1 << 40)
    run = move.run()
    assert run.code == 1 and set(skipped(run)) == {"does_not_fit", "too_large"}, run
    kept = stored(run)["cas"]
    assert 60 < kept < 128 and skipped(run)["does_not_fit"] == len(contents) - kept
    move.check_served(contents[-kept:], missing=[digest_of(content) for content in contents[:-kept]])
    again = move.run()
    assert stored(again)["cas"] == 0 and again.json["present"] == kept, again


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_an_import_that_was_ended_goes_on(move, end):
    blobs = [text(2000 + number % 50) + b"%d" % number for number in range(4000)]
    for data in blobs:
        move.source.plain(data)
    ours, theirs = pty.openpty()
    run = subprocess.Popen(move.command("--json"), stdout=subprocess.DEVNULL, stderr=theirs, env={})
    os.close(theirs)
    shown = b""
    # Ended as soon as it shows that it has begun.
    while b"[#" not in shown and select.select([ours], [], [], IMPORT_S)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:
            break
    run.send_signal(end)
    code = run.wait(IMPORT_S)
    os.close(ours)
    # It may have come to its end just before.
    assert code in (-end, 2, 0), (code, shown)
    again = move.run()
    assert again.code == 0 and stored(again)["cas"] + again.json["present"] == len(blobs), again
    assert again.json["present"] > 0 or code == -signal.SIGKILL, again
    move.check_served(blobs[::20] + blobs[-20:])


def test_wrong_directories(move):
    empty = scratch("empty")
    for source, words in [
        (empty / "none", ["--from"]),
        (empty, ["--from", "cas.v2"]),
        (move.source.root, ["--dir"]),
    ]:
        target = source if words == ["--dir"] else move.server.directory
        command = [str(BINARY), "import", f"--from={source}", f"--dir={target}", "--max_size=0.125"]
        run = Run(subprocess.run(command, capture_output=True, text=True, timeout=60, env={}))
        assert run.code == 2 and all(word in run.err for word in words), run
    assert list(empty.iterdir()) == [] and not move.server.directory.exists()
    move.server.start()
    run = move.run()
    assert run.code == 2 and "in use" in run.err, run
