"""Goal: an upload that was cut off goes on where it stopped, from any connection and core.
Method: uploads are cut by a half-close or by cancelling the call; QueryWriteStatus says where to go on, and new
connections take the rest."""

import queue

import pytest

from content import unique
from reapi import Client, Code, blob_name, digest, fails, message, upload_name, write_requests
from streams import check_read, zstd_pieces
from wait import until

MIB = 1 << 20


@pytest.fixture(scope="module")
def server():
    from server import Server

    with Server(cores="5") as running:
        yield running


def write_part(address: str, name: str, pieces, offset: int) -> int:
    """Sends `pieces` over a connection of its own, ends without finish_write, and returns where to go on."""
    with Client(address) as client:
        return client.write(name, pieces, offset, finish=False)


def cut_part(address: str, name: str, pieces, offset: int, expected: int) -> int:
    """Sends `pieces`, waits until about `expected` raw bytes are committed, drops the connection, and asks."""
    encode = message("google.bytestream.WriteRequest").SerializeToString
    decode = message("google.bytestream.WriteResponse").FromString
    with Client(address) as client, Client(address) as asker:
        held: queue.Queue = queue.Queue()
        for request in write_requests(name, pieces, offset, finish=False):
            held.put(request)
        call = client.channel.stream_unary("/google.bytestream.ByteStream/Write", encode, decode)
        future = call.future(iter(held.get, None), timeout=30)
        # While the call runs, the newest bytes may wait for more before they are counted.
        until(lambda: asker.write_status(name).committed_size >= expected - MIB // 2, f"{expected} bytes committed")
        future.cancel()
        held.put(None)
    with Client(address) as asker:
        status = asker.write_status(name)
        assert not status.complete
        return status.committed_size


@pytest.mark.parametrize("size", [2, 3000, 262_145, MIB + 1, 9 * MIB + 321])
def test_a_half_close_says_how_much_is_kept(server, size):
    # All that was sent counts, on whichever core, and the answer is where QueryWriteStatus and a resume go on.
    for _ in range(8):
        content = unique(size)
        data, half = content.bytes(), size // 2
        name = upload_name(content.hash, size)
        with Client(server.address) as client:
            assert client.write(name, [data[:half]], finish=False) == half
            status = client.write_status(name)
            assert (status.committed_size, status.complete) == (half, False)
            assert client.write(name, [data[half:]], half) == size
            check_read(client, blob_name(content.hash, size), content)


@pytest.mark.parametrize("size", [3000, 200_000, 9 * MIB + 321])
def test_unknown_and_complete(server, size):
    content = unique(size)
    with Client(server.address) as client:
        for zstd in (False, True):
            status = client.write_status(upload_name(content.hash, size, zstd))
            assert (status.committed_size, status.complete) == (0, False)
        client.write(upload_name(content.hash, size), content.chunks())
        for zstd in (False, True):
            status = client.write_status(upload_name(content.hash, size, zstd))
            assert (status.committed_size, status.complete) == (size, True)


@pytest.mark.parametrize("size", [200_000, 8 * MIB + 321])
def test_resume_raw_over_many_connections(server, size):
    content = unique(size)
    name = upload_name(content.hash, size, instance="main")
    at = 0
    step = size // 6
    for target in range(step, size, step):
        at, before = write_part(server.address, name, [content.read(at, target - at)], at), at
        # The newest bytes may come to count a moment later; the client may send them again.
        assert before <= at <= target
        assert target - at <= MIB
    with Client(server.address) as client:
        assert client.missing(digest(content))
        assert client.write(name, content.chunks(at), at) == size
        check_read(client, blob_name(content.hash, size), content)
        status = client.write_status(name)
        assert (status.committed_size, status.complete) == (size, True)


@pytest.mark.parametrize("size", [200_000, 9 * MIB + 321])
def test_resume_after_lost_connections(server, size):
    content = unique(size)
    name = upload_name(content.hash, size)
    at = 0
    for _ in range(4):
        step = size // 5
        before = at
        at = cut_part(server.address, name, [content.read(at, step)], at, at + step)
        assert before <= at <= before + step
    with Client(server.address) as client:
        assert client.write(name, content.chunks(at), at) == size
        check_read(client, blob_name(content.hash, size), content)


@pytest.mark.parametrize("size", [200_000, 8 * MIB + 321])
@pytest.mark.parametrize("tool", [None, "siso"])
def test_resume_zstd_over_connections(server, size, tool):
    # Offsets count raw bytes; every part is a zstd frame of its own.
    content = unique(size)
    name = upload_name(content.hash, size, zstd=True)
    at = 0
    step = size // 3
    for target in range(step, size, step):
        packed = list(zstd_pieces([content.read(at, target - at)]))
        at, before = write_part(server.address, name, packed, at), at
        assert before <= at <= target
    with Client(server.address, tool) as client:
        rest = list(zstd_pieces(content.chunks(at)))
        committed = client.write(name, rest, at)
        # Bazel expects the raw offset it started from and the bytes it sent since, or -1; others the raw size.
        sent = sum(len(piece) for piece in rest)
        assert committed in ((size,) if tool else (-1, at + sent))
        check_read(client, blob_name(content.hash, size), content)


def test_resume_zstd_in_the_middle_of_a_frame(server):
    # The cut falls inside a frame: what was decoded counts, and the client goes on with a new frame from there.
    content = unique(4 * MIB)
    name = upload_name(content.hash, content.size, zstd=True)
    packed = b"".join(zstd_pieces(content.chunks()))
    at = cut_part(server.address, name, [packed[: len(packed) // 2]], 0, MIB)
    assert MIB // 2 <= at < content.size
    with Client(server.address) as client:
        client.write(name, zstd_pieces(content.chunks(at)), at)
        check_read(client, blob_name(content.hash, content.size), content)


def test_resume_at_a_wrong_offset(server):
    content = unique(2 * MIB)
    name = upload_name(content.hash, content.size)
    at = write_part(server.address, name, [content.read(0, MIB)], 0)
    with Client(server.address) as client:
        for offset in (at + 1, at - 1, content.size):
            with fails(Code.INVALID_ARGUMENT):
                client.write(name, content.chunks(offset), offset)
        # Starting anew is always allowed.
        assert client.write(name, content.chunks()) == content.size
        check_read(client, blob_name(content.hash, content.size), content)


@pytest.mark.parametrize("zstd", [False, True], ids=["raw", "zstd"])
def test_what_is_committed_never_falls(server, zstd):
    # A client starts anew beside an upload that was cut off: who asks is told what may be gone on from, and goes on there.
    content = unique(6 * MIB)
    name = upload_name(content.hash, content.size, zstd=zstd)
    pack = (lambda pieces: list(zstd_pieces(pieces))) if zstd else list
    at = write_part(server.address, name, pack([content.read(0, 4 * MIB)]), 0)
    assert at == 4 * MIB
    for anew in (MIB, 2 * MIB):
        assert write_part(server.address, name, pack([content.read(0, anew)]), 0) == at
        with Client(server.address) as client:
            assert client.write_status(name).committed_size == at
    with Client(server.address) as client:
        client.write(name, pack(content.chunks(at)), at)
        check_read(client, blob_name(content.hash, content.size), content)


def test_sessions_are_told_apart(server):
    # The session is named by id, instance, digest and form together: what one knows, the others do not.
    content = unique(2 * MIB)
    id = "0b2ffdf6-23a8-4aee-9f8b-0bbbbd2ea5fc"
    name = upload_name(content.hash, content.size, id=id)
    write_part(server.address, name, [content.read(0, MIB)], 0)
    with Client(server.address) as client:
        others = [
            upload_name(content.hash, content.size),
            upload_name(content.hash, content.size, id=id, zstd=True),
            upload_name(content.hash, content.size, id=id, instance="other"),
            upload_name(content.hash, content.size + 1, id=id),
        ]
        for other in others:
            assert client.write_status(other).committed_size == 0
        until(lambda: client.write_status(name).committed_size == MIB, "all that was sent counts")


def test_wrong_bytes_in_a_resumed_upload(server):
    content = unique(2 * MIB)
    name = upload_name(content.hash, content.size)
    at = write_part(server.address, name, [bytes(MIB)], 0)
    with Client(server.address) as client:
        with fails(Code.INVALID_ARGUMENT):
            client.write(name, content.chunks(at), at)
        assert client.missing(digest(content))
        # The bad part is gone with it, so that the client's next try starts anew and works.
        assert client.write_status(name).committed_size == 0
        assert client.write(name, content.chunks()) == content.size


def test_partial_uploads_stay_within_a_budget(server):
    # 100 uploads of 20 MiB are started and left behind. They cost no memory to speak of, and the cache still works.
    before = server.rss()
    with Client(server.address) as client:
        for _ in range(100):
            content = unique(20 * MIB)
            name = upload_name(content.hash, content.size)
            try:
                client.write(name, [content.read(0, 2 * MIB)], finish=False)
            except Exception:  # noqa: BLE001 - how an unfinished call ends is not laid down.
                pass
        content = unique(3 * MIB)
        assert client.write(upload_name(content.hash, content.size), content.chunks()) == content.size
        check_read(client, blob_name(content.hash, content.size), content)
    assert server.rss() - before < 400 * MIB
