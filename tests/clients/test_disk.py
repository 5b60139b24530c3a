"""Goal: the cache keeps to its directory and size, says what is wrong with a directory, and never serves damaged bytes.
Method: directories of every kind are given to it; it is filled over and over; single bytes on disk are flipped."""

import os
import pathlib
import random
import re

import pytest

from content import unique
from reapi import Client, Code, blob_name, digest, digest_of, fails, message, upload_name, write_requests
from server import Server, StartError, scratch
from streams import check_read
from tools import tool
from wait import until

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


# Directories


def start_error(words: list[str], **options) -> StartError:
    server = Server(**options)
    try:
        with pytest.raises(StartError) as caught:
            server.start()
    finally:
        server.close()
    error = caught.value
    assert error.code not in (None, 0), error
    assert "panicked" not in error.log, error.log
    assert any(word in error.log.lower() for word in words), error.log
    return error


def test_a_directory_in_use(fresh):
    server = fresh()
    start_error(["in use", "another process", "locked"], directory=server.directory)
    with Client(server.address) as client:
        client.capabilities()
    # Free again after a crash.
    server.restart(crash=True)


def test_a_cache_of_another_format(fresh):
    # What names the format is damaged beyond its copies, or of another version: refused, and not changed.
    server = fresh(max_size="0.25")
    server.stop()
    named = [path for path in server.data_files() if 0 < path.stat().st_size <= 64 * KIB]
    assert named, "a small file says what the directory is"
    for path in named:
        path.write_bytes(random.Random(1).randbytes(path.stat().st_size))
    before = {path: path.read_bytes() for path in server.data_files()}
    error = start_error(["format", "not a cache", "no cache", "damaged"], directory=server.directory, max_size="0.25")
    assert str(server.directory) in error.log
    assert all(path.read_bytes() == data for path, data in before.items()), "it is not ours to change"


def test_a_directory_with_other_files():
    # bazel-remote's layout: nothing of it may be touched, whether the server starts beside it or refuses.
    directory = scratch("shared")
    (directory / "cas.v2" / "ab").mkdir(parents=True)
    blob = directory / "cas.v2" / "ab" / ("ab" * 32 + "-1234-x")
    blob.write_bytes(b"of another")
    server = Server(directory=directory, max_size="0.25")
    try:
        server.start()
        server.stop()
    except StartError as error:
        assert error.code not in (None, 0)
    finally:
        server.close()
    assert blob.read_bytes() == b"of another"


def test_a_cache_without_its_superblock(fresh):
    # Data files that nothing is known of: those of a cache that could still be put together, or of another program.
    server = fresh(max_size="0.0625")
    with Client(server.address) as client:
        key = client.put(b"kept until super is back")
    server.stop()
    named = server.directory / "super"
    kept = named.read_bytes()
    named.unlink()
    error = start_error(["super"], directory=server.directory, max_size="0.0625")
    assert str(server.directory) in error.log
    named.write_bytes(kept)
    server.start()
    with Client(server.address) as client:
        assert not client.missing(key)


def test_lost_data_files_are_named(fresh):
    # Gone, cut, of another cache: the server starts, and the log says that something is lost.
    server = fresh(max_size="0.0625", ack="flushed")

    def harm(work) -> str:
        with Client(server.address) as client:
            client.put(unique(1000).bytes())
        server.stop()
        work(server.directory / "data.0")
        server.start()
        return server.log

    assert "is lost" not in server.log
    assert "data.0 has 0 bytes" in harm(pathlib.Path.unlink)
    assert f"data.0 has {3 * MIB} bytes" in harm(lambda path: os.truncate(path, 3 * MIB))
    other = fresh(max_size="0.0625")
    with Client(other.address) as client:
        client.put(unique(1000).bytes())
    other.stop()
    assert "1 of 63 segments" in harm(lambda path: path.write_bytes((other.directory / "data.0").read_bytes()))


@pytest.mark.parametrize("name", ["super", "lock", "data.0"])
def test_no_file_where_one_should_be(fresh, name):
    # Whoever opens a FIFO waits for ever.
    server = fresh(max_size="0.0625")
    server.stop()
    (server.directory / name).unlink()
    os.mkfifo(server.directory / name)
    start_error(["no regular file"], directory=server.directory, max_size="0.0625")
    for command in ("check", "stats"):
        run = tool(command, server.directory)
        assert run.code == 2 and "no regular file" in run.err, run


def test_huge_files_hold_up_no_start(fresh):
    # Sparse, as a truncated copy may be. Only the superblock's own bytes count; no list of uploads is that long.
    server = fresh(max_size="0.0625")
    server.stop()
    os.truncate(server.directory / "super", 1 << 40)
    server.start()
    server.stop()
    assert tool("check", server.directory, "--json").code == 0
    (server.directory / "uploads").mkdir(exist_ok=True)
    with open(server.directory / "uploads" / "gone.v1", "wb") as file:
        file.truncate(3 << 30)
    server.start()
    until(lambda: re.search(r"gone\.v1 is larger than 2 GiB.* move it away", server.log), "a line that names it")
    server.stop()


def test_a_cache_keeps_its_size(fresh):
    # Whatever else lies in the directory.
    server = fresh(max_size="0.0625")
    size = (server.directory / "data.0").stat().st_size
    (server.directory / "notes").write_bytes(bytes(5 * MIB))
    server.restart(max_size=None)
    assert (server.directory / "data.0").stat().st_size == size


@pytest.mark.parametrize("size", ["0.00001", "0.001"])
def test_too_small(size):
    start_error(["max_size", "too small", "at least"], max_size=size)


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "x"])
def test_sizes_that_are_none(size):
    start_error(["max_size"], max_size=size)


def test_more_than_the_drive_has():
    start_error(["space", "max_size"], max_size=str(1 << 22))


def test_a_file_as_directory():
    file = scratch("file") / "x"
    file.write_text("x")
    start_error(["dir"], directory=file)


@pytest.mark.parametrize(
    "flags",
    [
        {"storage_mode": "gzip"},
        {"ack": "perhaps"},
        {"cores": "0-"},
        {"cores": "9999"},
        {"cores": "none"},
        {"grpc_address": "nonsense"},
        {"memory_limit": "1K"},
        {"no_such_flag": "1"},
    ],
    ids=str,
)
def test_flags_that_make_no_sense(flags):
    start_error([next(iter(flags)), *flags.values()], **flags)


def test_a_port_in_use(fresh):
    server = fresh()
    start_error(["address", "in use"], grpc_address=server.address)


def test_max_size_may_grow_and_shrink(fresh):
    server = fresh(max_size="0.5")
    with Client(server.address) as client:
        key = client.put(b"kept over a change of size")
    for size in ("1", "0.5"):
        server.stop()
        try:
            server.start(max_size=size)
        except StartError as error:
            # Not possible is an answer, if it says so.
            assert "max_size" in error.log
            server.start(max_size="0.5")
            continue
        assert server.disk_usage() <= float(size) * GIB
        with Client(server.address) as client:
            assert not client.missing(key) or float(size) < 1


# Size


def test_a_blob_of_half_the_cache(fresh):
    server = fresh(max_size="0.5", storage_mode="uncompressed")
    content = unique(256 * MIB)
    with Client(server.address) as client:
        for _ in range(2):
            assert client.write(upload_name(content.hash, content.size), content.chunks()) == content.size
            check_read(client, blob_name(content.hash, content.size), content)
            # Again, with a cache that is not empty.
            content = unique(256 * MIB)
        assert server.disk_usage() <= GIB // 2


@pytest.mark.parametrize("mode", ["zstd", "uncompressed"])
def test_filled_three_times_over(fresh, mode):
    server = fresh(max_size="0.25", storage_mode=mode, ack="flushed")
    source = random.Random(7)
    stored, written = [], 0
    with Client(server.address) as client:
        while written < 3 * GIB // 4 * (2 if mode == "zstd" else 1):
            content = unique(source.choice([3000, 50_000, 200_000, MIB + 5, 8 * MIB]))
            assert client.write(upload_name(content.hash, content.size), content.chunks()) == content.size
            stored.append(content)
            written += content.size
            if len(stored) % 20 == 0:
                assert server.disk_usage() <= GIB // 4
                assert all(read_back(client, recent) for recent in stored[-10:]), "a young blob is gone"
        missing = {key.hash for key in client.find_missing([digest(content) for content in stored])}
        kept = [content for content in stored if content.hash not in missing]
        assert missing, "not everything fits"
        assert sum(content.size for content in kept) > GIB // 8, "most of the space is used"
        assert all(read_back(client, content) for content in kept), "what FindMissing calls present is served"
    # Opening a full cache makes no room: that is for the first write.
    for crash in (True, False, False):
        server.restart(crash=crash)
        assert server.disk_usage() <= GIB // 4
        with Client(server.address) as client:
            again = sum(read_back(client, content) for content in kept)
        assert again == len(kept), f"{again} of {len(kept)} are left after a {'crash' if crash else 'restart'}"


def test_present_is_a_promise(fresh):
    # More is asked for than fits, again and again, so that all that is there is in use: the first written go, and with them a few
    # large blobs that begin in a segment of frames which their shard had open since then.
    server = fresh(max_size="0.25", storage_mode="uncompressed")
    stored, gone = [], {}
    with Client(server.address) as client:
        for number in range(700):
            content = unique(MIB if number % 8 else 60_000)
            client.write(upload_name(content.hash, content.size), content.chunks())
            stored.append(content)
            missing = {key.hash for key in client.find_missing([digest(each) for each in stored[-400:]])}
            gone |= {each.hash: each.size for each in stored[-100:] if each.hash in missing}
            assert MIB // 4 < min(gone.values(), default=MIB) and len(gone) <= 3, f"young blobs are gone after write {number}: {gone}"
    assert missing


@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "killed"])
def test_uses_outlive_a_restart(fresh, crash):
    # The first half of a full cache is read, the server restarts, a quarter of the cache is written: after a clean end
    # what was read is still there. After a crash what was written last is, but for large blobs whose segments of frames have
    # others that were written much earlier.
    server = fresh(max_size="0.25", storage_mode="uncompressed", ack="flushed")
    sizes = [MIB, 30_000, 300_000]
    with Client(server.address) as client:
        stored = [unique(sizes[number % 3]) for number in range(420)]
        for content in stored:
            client.write(upload_name(content.hash, content.size), content.chunks())
        assert all(read_back(client, content) for content in stored[:150])
    server.restart(crash=crash)
    with Client(server.address) as client:
        for _ in range(120):
            content = unique(MIB)
            client.write(upload_name(content.hash, content.size), content.chunks())
        missing = {key.hash for key in client.find_missing([digest(content) for content in stored])}
        assert missing, "not everything fits"
        kept = stored[-60:] if crash else stored[:150]
        gone = [content for content in kept if content.hash in missing]
        spared = [content for content in gone if not crash or content.size < MIB // 4]
        assert not spared and len(gone) <= 3, f"{len(gone)} of {len(kept)} are gone: {[(stored.index(each), each.size) for each in gone]}"


def test_what_is_used_stays(fresh):
    # A small set is read over and over while three times the cache passes through: it survives.
    server = fresh(max_size="0.25", storage_mode="uncompressed")
    with Client(server.address) as client:
        used = [unique(20_000) for _ in range(50)]
        result = message("ActionResult")(output_files=[{"path": str(n), "digest": digest(c)} for n, c in enumerate(used)])
        for content in used:
            client.put(content.bytes())
        key = digest_of(b"the action that is used")
        client.update_action(key, result)
        for number in range(400):
            content = unique(2 * MIB)
            client.write(upload_name(content.hash, content.size), content.chunks())
            if number % 10 == 0:
                assert client.get_action(key) == result
        assert client.find_missing([digest(content) for content in used]) == []


def test_full_of_uploads_in_flight(fresh):
    # More is begun than the cache can hold at once: refused with a reason or stored, and the server goes on.
    server = fresh(max_size="0.25", storage_mode="uncompressed")
    contents = [unique(100 * MIB) for _ in range(6)]
    with Client(server.address) as client:
        encode = message("google.bytestream.WriteRequest").SerializeToString
        decode = message("google.bytestream.WriteResponse").FromString
        call = client.channel.stream_unary("/google.bytestream.ByteStream/Write", encode, decode)
        futures = []
        for content in contents:
            requests = write_requests(upload_name(content.hash, content.size), content.chunks())
            futures.append(call.future(requests, timeout=60))
        for content, future in zip(contents, futures):
            error = future.exception(timeout=70)
            if error is None:
                assert future.result().committed_size == content.size
            else:
                assert error.code() in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE), error
        small = unique(3 * MIB)
        client.write(upload_name(small.hash, small.size), small.chunks())
        check_read(client, blob_name(small.hash, small.size), small)
        assert server.disk_usage() <= GIB // 4


# Damage


def written_extents(path: pathlib.Path) -> list[int]:
    """Offsets of the 4 KiB blocks of `path` that are not all zero."""
    zero = bytes(4 * KIB)
    found = []
    with open(path, "rb") as file:
        at = 0
        while piece := file.read(4 * KIB):
            if piece != zero[: len(piece)]:
                found.append(at)
            at += len(piece)
    return found


def flip(path: pathlib.Path, offset: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (old,) = file.read(1)
        file.seek(offset)
        file.write(bytes([old ^ mask]))


def read_back(client, content) -> bool:
    """Whether `content` is served. Wrong bytes fail the test."""
    try:
        check_read(client, blob_name(content.hash, content.size), content)
        return True
    except Exception as error:
        if not hasattr(error, "code") or error.code() != Code.NOT_FOUND:
            raise
        return False


def stock(client) -> list:
    contents = [unique(size) for size in (1, 50, 3000, 4096, 70_000, 256 * KIB, MIB, 3 * MIB + 1)]
    contents += [unique(1000 + number) for number in range(100)]
    for content in contents:
        client.write(upload_name(content.hash, content.size), content.chunks())
    return contents


@pytest.mark.parametrize("mode", ["zstd", "uncompressed"])
@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "killed"])
def test_any_flipped_byte(fresh, mode, crash):
    server = fresh(max_size="0.25", storage_mode=mode, ack="flushed", ram_cache="0")
    seed = 11
    print(f"seed {seed}")
    source = random.Random(seed)
    with Client(server.address) as client:
        contents = stock(client)
    for round in range(12):
        server.kill() if crash else server.stop()
        places = [(path, at) for path in server.data_files() for at in written_extents(path)]
        path, at = source.choice(places)
        # Not a padding byte, if the block has others.
        block = block_at(path, at)
        offset = at + source.choice([number for number, byte in enumerate(block) if byte])
        mask = source.choice([1, 0x80, 0xFF])
        flip(path, offset, mask)
        where = f"round {round}: {path.name} at {offset} ^ {mask:#x}"
        try:
            server.start()
        except StartError as error:
            # The directory's own header: damaged it may be refused, in clear words.
            assert offset < 64 * KIB and "panicked" not in error.log, f"{where}: {error}"
            flip(path, offset, mask)
            server.start()
        with Client(server.address) as client:
            lost = [content for content in contents if not read_back(client, content)]
            assert len(lost) <= 1, f"{where}: {len(lost)} blobs are lost"
            for content in lost:
                assert client.missing(digest(content)), f"{where}: a damaged blob is a miss for FindMissing, too"
                client.write(upload_name(content.hash, content.size), content.chunks())
                assert read_back(client, content), f"{where}: written again it is served again"


def block_at(path: pathlib.Path, at: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(at)
        return file.read(4 * KIB)


@pytest.mark.parametrize("size", [3000, 200_000, 3 * MIB])
def test_a_flipped_byte_of_the_content_while_the_server_runs(fresh, size):
    # Found on the disk by its bytes, damaged under the running server: a miss at once, and the rest of a stream ends.
    server = fresh(max_size="0.25", storage_mode="uncompressed", ack="durable", ram_cache="0")
    with Client(server.address) as client:
        content, other = unique(size), unique(size)
        for each in (content, other):
            client.write(upload_name(each.hash, each.size), each.chunks())
        needle = content.read(size - 1000, 600)
        found = [(path, _find(path, needle)) for path in server.data_files()]
        places = [(path, at) for path, at in found if at >= 0]
        assert places, "raw bytes stand on the disk as they are"
        for path, at in places:
            flip(path, at + 300, 0x10)
        with fails(Code.NOT_FOUND, Code.DATA_LOSS, Code.UNAVAILABLE, Code.ABORTED) if size > MIB else fails(Code.NOT_FOUND):
            client.read(blob_name(content.hash, content.size))
        with fails(Code.NOT_FOUND):
            client.read(blob_name(content.hash, content.size))
        assert client.missing(digest(content))
        (answer,) = client.batch_read([digest(content)]) if size <= MIB else (None,)
        assert answer is None or answer.status.code == 5
        assert read_back(client, other)
        client.write(upload_name(content.hash, content.size), content.chunks())
        assert read_back(client, content)


def _find(path: pathlib.Path, needle: bytes) -> int:
    with open(path, "rb") as file:
        at, carry = 0, b""
        while piece := file.read(4 * MIB):
            window = carry + piece
            found = window.find(needle)
            if found >= 0:
                return at - len(carry) + found
            carry = window[-len(needle) :]
            at += len(piece)
    return -1


def test_zeroed_and_cut_files(fresh):
    # A block of zeros where records were; then a data file that lost its end.
    server = fresh(max_size="0.25", ack="flushed", ram_cache="0")
    with Client(server.address) as client:
        contents = stock(client)
    server.kill()
    path = max(server.data_files(), key=lambda each: each.stat().st_size)
    extents = [at for at in written_extents(path) if at >= MIB]
    with open(path, "r+b") as file:
        file.seek(extents[len(extents) // 2])
        file.write(bytes(4 * KIB))
    server.start()
    with Client(server.address) as client:
        lost = [content for content in contents if not read_back(client, content)]
        assert len(lost) < len(contents) // 2
    server.kill()
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    try:
        server.start()
    except StartError as error:
        assert "panicked" not in error.log
        return
    with Client(server.address) as client:
        for content in contents:
            read_back(client, content)
        content = unique(MIB)
        client.write(upload_name(content.hash, content.size), content.chunks())
        assert read_back(client, content)
