"""Goal: what is written comes back identical, in either form, from any offset; what is wrong is refused.
Method: ByteStream calls of every size class raw and zstd, each read raw and zstd; then each error of the API once."""

import queue
import random
import threading

import pytest
import zstandard

from content import EMPTY_HASH, Content, sha256, unique
from reapi import Client, Code, blob_name, digest, digest_of, fails, message, upload_name, write_requests
from streams import check_read, unzstd, zstd_pieces

KIB, MIB = 1 << 10, 1 << 20
FRAME = 256 * KIB
SIZES = [0, 1, 4 * KIB, FRAME - 1, FRAME, FRAME + 1, MIB, MIB + 1, 100 * MIB]


def offsets(size: int) -> list[int]:
    """One offset of each class: the ends, and around the boundaries of frames and of 1 MiB."""
    found = {0, 1, FRAME - 1, FRAME, FRAME + 1, MIB - 1, MIB, MIB + 1, size // 2, size - 1, size}
    return sorted(offset for offset in found if 0 <= offset <= size)


def write(client, content: Content, zstd: bool = False, piece: int = MIB, **options) -> int:
    pieces = content.chunks(length=piece)
    return client.write(
        upload_name(content.hash, content.size, zstd), zstd_pieces(pieces) if zstd else pieces, **options
    )


# Round trips


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("zstd_in", [False, True], ids=["raw-in", "zstd-in"])
@pytest.mark.parametrize("zstd_out", [False, True], ids=["raw-out", "zstd-out"])
def test_round_trip(client, size, zstd_in, zstd_out):
    content = unique(size)
    committed = write(client, content, zstd_in)
    if not zstd_in:
        assert committed == size
    assert not client.missing(digest(content))
    for offset in offsets(size):
        check_read(client, blob_name(content.hash, size, zstd_out), content, offset, zstd_out)


@pytest.mark.parametrize("mode", ["zstd", "uncompressed"])
@pytest.mark.parametrize("size", [1, 5000, FRAME, 3 * MIB + 77])
def test_round_trip_of_bytes_that_do_not_shrink(fresh, mode, size):
    server = fresh(storage_mode=mode)
    data = random.Random(size).randbytes(size)
    with Client(server.address) as client:
        key = client.put(data)
        assert client.read(blob_name(key.hash, size)) == data
        assert unzstd(client.read(blob_name(key.hash, size, zstd=True))) == data
        zeros = client.put(bytes(size))
        assert client.read(blob_name(zeros.hash, size)) == bytes(size)
        assert unzstd(client.read(blob_name(zeros.hash, size, zstd=True))) == bytes(size)


@pytest.mark.slow
@pytest.mark.parametrize("zstd", [False, True], ids=["raw", "zstd"])
def test_round_trip_of_3_gib(fresh, zstd):
    server = fresh(max_size="8")
    content = Content(3 << 30, 3 + zstd)
    with Client(server.address, deadline_s=400) as client:
        write(client, content, zstd, piece=2 * MIB)
        for zstd_out in (False, True):
            name = blob_name(content.hash, content.size, zstd_out)
            check_read(client, name, content, zstd=zstd_out)
            for offset in offsets(content.size)[5:]:
                if offset >= content.size - 1:
                    check_read(client, name, content, offset, zstd_out)
        for offset in (1, FRAME + 1, MIB - 1, (2 << 30) - 1, (2 << 30) + FRAME, (3 << 30) - MIB):
            found = client.read(blob_name(content.hash, content.size), offset, limit=2 * MIB)
            assert found == content.read(offset, 2 * MIB)
        # The server works in a fixed frame of memory: blobs are not held.
        assert server.rss() < 2 << 30


def test_a_message_of_4_mib_and_of_one_byte(client):
    # BuildGrid sends 4,193,280 bytes in one message.
    content = unique(9 * MIB + 5)
    assert write(client, content, piece=4_193_280) == content.size
    check_read(client, blob_name(content.hash, content.size), content)
    small = unique(3000)
    assert write(client, small, piece=1) == small.size
    check_read(client, blob_name(small.hash, small.size), small)


def test_answers_stay_under_4_mib(client):
    content = unique(20 * MIB)
    write(client, content)
    for zstd in (False, True):
        for reply in client.read_call(blob_name(content.hash, content.size, zstd)):
            assert reply.ByteSize() < 4 * MIB


# Names


def test_names_with_instance_function_and_metadata(client):
    for instance, function, rest in [
        ("", "", "/some/path/to/file.txt"),
        ("main", "", ""),
        ("a/b/c", "", "/x"),
        ("", "sha256/", ""),
        ("a/b", "sha256/", "/meta"),
    ]:
        content = unique(2000)
        prefix = f"{instance}/" if instance else ""
        id = "9f3a0d0e-0c2f-4a79-9dc5-1c7a3c2f6b10"
        name = f"{prefix}uploads/{id}/blobs/{function}{content.hash}/{content.size}{rest}"
        assert client.write(name, [content.bytes()]) == content.size
        assert client.read(f"{prefix}blobs/{function}{content.hash}/{content.size}") == content.bytes()
        zipped = client.read(f"{prefix}compressed-blobs/zstd/{function}{content.hash}/{content.size}")
        assert unzstd(zipped) == content.bytes()


HASH = "ab" * 32


@pytest.mark.parametrize(
    "name",
    [
        "",
        "blobs",
        f"blobs/{HASH}",
        f"blobs/{HASH}/",
        f"blobs/{HASH}/-1",
        f"blobs/{HASH}/+1",
        f"blobs/{HASH}/1x",
        f"blobs/{HASH}/99999999999999999999",
        f"blobs/{HASH[:-1]}/1",
        f"blobs/{HASH.upper()}/1",
        f"blobs/{HASH}/1/meta",
        f"blobs/blake3/{HASH}/1",
        f"blobs/md5/{HASH}/1",
        f"blob/{HASH}/1",
        f"uploads/x/blobs/{HASH}/1",
        f"compressed-blobs/{HASH}/1",
        f"compressed-blobs/identity/{HASH}/1",
        f"/blobs/{HASH}/1",
    ],
)
def test_bad_read_names(client, name):
    with fails(Code.INVALID_ARGUMENT):
        client.read(name)


@pytest.mark.parametrize("compressor", ["deflate", "brotli", "gzip", "ZSTD"])
def test_compressors_that_are_not_announced(client, compressor):
    with fails(Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED):
        client.read(f"compressed-blobs/{compressor}/{HASH}/1")
    with fails(Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED):
        client.write(f"uploads/u/compressed-blobs/{compressor}/{HASH}/1", [b"x"])


@pytest.mark.parametrize(
    "name",
    ["", f"blobs/{HASH}/1", f"uploads/blobs/{HASH}/1", f"uploads/u/{HASH}/1", f"uploads/u/blobs/{HASH}", "uploads/u/blobs/x/1"],
)
def test_bad_write_names(client, name):
    with fails(Code.INVALID_ARGUMENT):
        client.write(name, [b"x"])
    with fails(Code.INVALID_ARGUMENT):
        client.write_status(name)


# Read: errors and limits


def test_read_of_the_absent(client):
    for zstd in (False, True):
        with fails(Code.NOT_FOUND):
            client.read(blob_name(HASH, 10, zstd))


def test_read_with_the_wrong_size(client):
    content = unique(1000)
    write(client, content)
    for size in (999, 1001):
        with fails(Code.NOT_FOUND, Code.INVALID_ARGUMENT):
            client.read(blob_name(content.hash, size))


def test_read_outside(client):
    content = unique(1000)
    write(client, content)
    for zstd in (False, True):
        for offset in (-1, 1001, 1 << 62):
            with fails(Code.OUT_OF_RANGE):
                client.read(blob_name(content.hash, content.size, zstd), offset)
    with fails(Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE):
        client.read(blob_name(content.hash, content.size), 0, -1)


@pytest.mark.parametrize("size", [5000, 3 * MIB])
def test_read_limits(client, size):
    content = unique(size)
    write(client, content)
    name = blob_name(content.hash, size)
    for offset, limit in [(0, 1), (0, size), (0, size + 1), (1, 1), (size - 1, 5), (size, 5), (100, FRAME), (7, 1 << 62)]:
        assert client.read(name, offset, limit) == content.read(offset, limit)
    for limit in (10, -1):
        with fails(Code.INVALID_ARGUMENT):
            client.read(blob_name(content.hash, size, zstd=True), 0, limit)


def test_empty_blob(client):
    for zstd in (False, True):
        got = client.read(blob_name(EMPTY_HASH, 0, zstd))
        assert (unzstd(got) if zstd else got) == b""
        with fails(Code.OUT_OF_RANGE):
            client.read(blob_name(EMPTY_HASH, 0, zstd), 1)
    assert client.write(upload_name(EMPTY_HASH, 0), [b""]) == 0
    assert client.write(upload_name(EMPTY_HASH, 0), []) == 0
    client.write(upload_name(EMPTY_HASH, 0, zstd=True), [zstandard.compress(b"")])
    status = client.write_status(upload_name(EMPTY_HASH, 0))
    assert status.complete and status.committed_size == 0


# Write: errors


@pytest.mark.parametrize("size", [1000, 2 * MIB])
@pytest.mark.parametrize("zstd", [False, True], ids=["raw", "zstd"])
def test_wrong_hash_and_sizes(client, size, zstd):
    content = unique(size)
    data = content.bytes()
    changed = data[:-1] + bytes([data[-1] ^ 1])
    for sent in (changed, data[:-1], data + b"!", data + data, b""):
        pieces = [sent[at : at + MIB] for at in range(0, len(sent), MIB)]
        with fails(Code.INVALID_ARGUMENT):
            client.write(upload_name(content.hash, size, zstd), zstd_pieces(pieces) if zstd else pieces)
        assert client.missing(digest(content))
    # The failures left nothing behind that stands in the way.
    write(client, content, zstd)
    assert not client.missing(digest(content))


def raw_writes(client, *requests):
    make = message("google.bytestream.WriteRequest")
    return client.write_call(iter([make(**fields) for fields in requests]))


def test_offsets_must_fit(client):
    content = unique(1000)
    data = content.bytes()
    name = lambda: upload_name(content.hash, content.size)  # noqa: E731
    with fails(Code.INVALID_ARGUMENT):
        raw_writes(client, {"resource_name": name(), "write_offset": 5, "data": data[5:], "finish_write": True})
    with fails(Code.INVALID_ARGUMENT):
        raw_writes(client, {"resource_name": name(), "write_offset": -1, "data": data, "finish_write": True})
    for second in (499, 501, 0):
        with fails(Code.INVALID_ARGUMENT):
            raw_writes(
                client,
                {"resource_name": name(), "data": data[:500]},
                {"write_offset": second, "data": data[500:], "finish_write": True},
            )
    assert client.missing(digest(content))


def test_messages_that_break_the_protocol(client):
    content = unique(1000)
    data = content.bytes()
    first = {"resource_name": upload_name(content.hash, content.size), "data": data[:500]}
    other = upload_name(content.hash, content.size)
    with fails(Code.INVALID_ARGUMENT):
        raw_writes(client)  # No message at all.
    with fails(Code.INVALID_ARGUMENT):
        raw_writes(client, {"data": data, "finish_write": True})  # No name.
    with fails(Code.INVALID_ARGUMENT):
        raw_writes(client, first, {"resource_name": other, "write_offset": 500, "data": data[500:], "finish_write": True})
    assert client.missing(digest(content))


def test_names_may_be_repeated_or_left_out(client):
    content = unique(10_000)
    name = upload_name(content.hash, content.size)
    requests = write_requests(name, content.chunks(length=1000), repeat_name=True)
    assert client.write_call(requests).committed_size == content.size


def test_data_may_be_empty_at_any_time(client):
    content = unique(1000)
    data = content.bytes()
    reply = raw_writes(
        client,
        {"resource_name": upload_name(content.hash, content.size)},
        {"data": data[:500]},
        {"write_offset": 500},
        {"write_offset": 500, "data": data[500:]},
        {"write_offset": 1000, "finish_write": True},
    )
    assert reply.committed_size == 1000
    assert client.read(blob_name(content.hash, content.size)) == data


def test_half_close_without_finish_is_not_complete(client):
    content = unique(1000)
    name = upload_name(content.hash, content.size)
    assert client.write(name, [content.bytes()], finish=False) == content.size
    assert client.missing(digest(content))
    assert not client.write_status(name).complete


def test_one_id_for_several_blobs(client):
    id = "d0c1a5f0-8d3c-4f6a-8f61-1d3a3b7f0a11"
    contents = [unique(size) for size in (10, 3000, MIB)]
    for content in contents:
        assert client.write(upload_name(content.hash, content.size, id=id), content.chunks()) == content.size
    for content in contents:
        check_read(client, blob_name(content.hash, content.size), content)


def test_over_max_blob_size(fresh):
    server = fresh(max_blob_size=str(MIB))
    content = unique(MIB + 1)
    with Client(server.address) as client:
        for zstd in (False, True):
            with fails(Code.INVALID_ARGUMENT):
                write(client, content, zstd)
        (answer,) = client.batch_update([(digest(content), content.bytes())])
        assert answer.status.code == Code.INVALID_ARGUMENT.value[0]
        fits = unique(MIB)
        assert write(client, fits) == MIB


def test_sizes_beyond_everything(client):
    for size in (1 << 40, (1 << 63) - 1):
        with fails(Code.INVALID_ARGUMENT):
            client.write(upload_name(HASH, size), [b"x" * 100])


# committed_size and early answers


@pytest.mark.parametrize(
    "tool, version, raw_size",
    [
        (None, "", False),
        ("bazel", "7.4.1", False),
        ("buck2", "1", False),
        ("siso", "1.2.3", True),
        ("remote-apis-sdks", "", True),
    ],
)
def test_committed_size_of_a_compressed_upload(server, tool, version, raw_size):
    content = unique(300_000)
    packed = zstandard.compress(content.bytes())
    with Client(server.address, tool, version) as client:
        committed = client.write(upload_name(content.hash, content.size, zstd=True), [packed])
        assert committed == (content.size if raw_size else len(packed))
        # Again: it is there, and the stream may end early.
        assert client.write(upload_name(content.hash, content.size, zstd=True), [packed]) in (-1, len(packed), content.size)
        assert client.write(upload_name(content.hash, content.size), [content.bytes()]) == content.size


@pytest.mark.parametrize("size", [5000, 3 * MIB])
@pytest.mark.parametrize("zstd", [False, True], ids=["raw", "zstd"])
def test_early_answer_for_a_present_blob(client, size, zstd):
    content = unique(size)
    write(client, content)
    stop = threading.Event()

    def endless():
        yield from list(write_requests(upload_name(content.hash, size, zstd), [b"x", b"y"]))[:1]
        stop.wait(30)  # Nothing more is sent: the answer must not wait for it.

    call = client.write_call(endless(), timeout=20)
    stop.set()
    assert call.committed_size == (-1 if zstd else size)


def test_early_answer_when_another_finishes_first(server):
    content = unique(8 * MIB)
    pieces: queue.Queue = queue.Queue()
    with Client(server.address) as slow, Client(server.address) as fast:
        requests = write_requests(upload_name(content.hash, content.size), iter(pieces.get, None))
        encode = message("google.bytestream.WriteRequest").SerializeToString
        decode = message("google.bytestream.WriteResponse").FromString
        call = slow.channel.stream_unary("/google.bytestream.ByteStream/Write", encode, decode)
        future = call.future(requests, timeout=30)
        for piece in list(content.chunks())[:2]:
            pieces.put(piece)
        write(fast, content)
        # Nothing more is sent: the answer must not wait for it.
        assert future.result(timeout=20).committed_size == content.size
        pieces.put(None)


def test_many_upload_one_digest_at_once(server):
    content = unique(2 * MIB + 1)
    barrier = threading.Barrier(16)
    results: queue.Queue = queue.Queue()

    def upload(number: int):
        try:
            with Client(server.address) as client:
                barrier.wait(20)
                write(client, content, zstd=number % 2 == 1, piece=64 * KIB)
                check_read(client, blob_name(content.hash, content.size), content)
            results.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the test.
            results.put(error)

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    errors = [error for error in (results.get(timeout=60) for _ in threads) if error]
    for thread in threads:
        thread.join(20)
    assert not errors, errors


# zstd that costs more than it says


def test_zstd_bomb(server):
    # 1 GiB of zeros in some 100 KB, declared as 1 MiB: refused without being unfolded.
    with Client(server.address) as client:
        before = server.rss()
        bomb = b"".join(zstd_pieces((bytes(MIB) for _ in range(1024)), level=3))
        for size in (1, 1000, MIB, 100 * MIB):
            with fails(Code.INVALID_ARGUMENT):
                client.write(upload_name(HASH, size, zstd=True), [bomb])
        assert server.rss() - before < 256 * MIB


def test_zstd_with_a_huge_window(client):
    # A frame that asks the decoder for 2 GiB of window.
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    content = unique(100_000)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = packer.compress(content.bytes()) + packer.flush()
    try:
        client.write(upload_name(content.hash, content.size, zstd=True), [packed])
        check_read(client, blob_name(content.hash, content.size), content)
    except Exception as error:
        assert error.code() == Code.INVALID_ARGUMENT


def test_zstd_of_one_byte_frames(server):
    content = unique(20_000)
    frames = b"".join(zstandard.compress(bytes([byte])) for byte in content.bytes())
    with Client(server.address) as client:
        before = server.rss()
        client.write(upload_name(content.hash, content.size, zstd=True), [frames[at : at + 7] for at in range(0, len(frames), 7)])
        check_read(client, blob_name(content.hash, content.size), content)
        # Frames of nothing, without end: no data comes, and the server gives up or takes them at no cost.
        nothing = zstandard.compress(b"") * 100_000
        with fails(Code.INVALID_ARGUMENT):
            client.write(upload_name(HASH, 10, zstd=True), [nothing])
        assert server.rss() - before < 128 * MIB


def test_zstd_as_bazel_sends_it(client):
    # Bazel flushes its encoder every 491 bytes: one frame of very many small blocks.
    content = unique(MIB + 123)
    packer = zstandard.ZstdCompressor().compressobj()
    pieces = []
    for piece in content.chunks(length=491):
        pieces.append(packer.compress(piece) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    pieces.append(packer.flush())
    packed = b"".join(pieces)
    sent = [packed[at : at + 16 * KIB] for at in range(0, len(packed), 16 * KIB)]
    assert client.write(upload_name(content.hash, content.size, zstd=True), sent) == len(packed)
    check_read(client, blob_name(content.hash, content.size), content)


@pytest.mark.parametrize("damage", ["garbage", "cut", "flipped", "trailing", "empty"])
def test_zstd_that_is_broken(client, damage):
    content = unique(2 * MIB)
    packed = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(content.bytes()))
    if damage == "garbage":
        packed = bytearray(b"no zstd at all" * 100)
    elif damage == "cut":
        packed = packed[:-10]
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 0x55
    elif damage == "trailing":
        packed += b"garbage"
    else:
        packed = bytearray()
    with fails(Code.INVALID_ARGUMENT):
        client.write(upload_name(content.hash, content.size, zstd=True), [bytes(packed)])
    assert client.missing(digest(content))


# Memory and cancellation


def test_readers_that_do_not_read_cost_little(server):
    content = unique(100 * MIB)
    with Client(server.address) as client:
        write(client, content)
        before = server.rss()
        clients = [Client(server.address) for _ in range(8)]
        calls = [one.read_call(blob_name(content.hash, content.size)) for one in clients for _ in range(8)]
        firsts = [next(call).data for call in calls]
        assert all(first == content.read(0, len(first)) for first in firsts)
        held = server.rss() - before
        for call in calls:
            call.cancel()
        for one in clients:
            one.close()
        # 64 readers: a window and a few frames for each, never the blob.
        assert held < 64 * 4 * MIB, f"{held >> 20} MiB held for 64 stalled readers"
        assert not client.missing(digest_of(content.read(0, 0)))


def test_deadlines_and_cancellation_free_everything(server):
    content = unique(50 * MIB)
    with Client(server.address) as client:
        write(client, content)
        files = server.open_files()
        for _ in range(3):
            with Client(server.address) as other:
                for _ in range(50):
                    call = other.read_call(blob_name(content.hash, content.size), timeout=30)
                    next(call)
                    call.cancel()
                for _ in range(20):
                    never = threading.Event()
                    lost = unique(2 * MIB)

                    def stuck(lost=lost, never=never):
                        yield next(write_requests(upload_name(lost.hash, lost.size), lost.chunks(length=MIB)))
                        never.wait(2)

                    with fails(Code.DEADLINE_EXCEEDED):
                        other.write_call(stuck(), timeout=0.1)
                    never.set()
        check_read(client, blob_name(content.hash, content.size), content)
        assert server.open_files() <= files + 8, "sockets of closed connections stay open"


def test_write_in_messages_over_the_limit(client):
    content = unique(20 * MIB)
    with fails(Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT):
        client.write(upload_name(content.hash, content.size), [content.bytes()])
    assert client.missing(digest(content))
    assert sha256(content.bytes()) == content.hash
