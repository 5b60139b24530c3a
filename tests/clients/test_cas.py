"""Goal: FindMissingBlobs, BatchUpdateBlobs and BatchReadBlobs answer by the API's rules, each item for itself.
Method: a grpcio client against the running server; every error of the API's lists is provoked once."""

import random

import pytest
import zstandard

from content import EMPTY_HASH, unique
from reapi import BLAKE3, BROTLI, DEFLATE, IDENTITY, SHA1, SHA256, ZSTD, Code, digest_of, fails, message

BATCH_MAX = 4 << 20


def digest(hash: str, size: int):
    return message("Digest")(hash=hash, size_bytes=size)


def random_digests(count: int, seed: int = 1) -> list:
    source = random.Random(seed)
    return [digest(source.randbytes(32).hex(), source.randrange(1, 1 << 30)) for _ in range(count)]


# FindMissingBlobs


def test_find_missing_lists_only_the_absent(client):
    held = [client.put(unique(size).bytes()) for size in (1, 100, 5000)]
    absent = random_digests(5)
    found = client.find_missing([absent[0], held[0], absent[1], held[1], held[2], *absent[2:]])
    assert sorted(key.hash for key in found) == sorted(key.hash for key in absent)
    assert {key.hash: key.size_bytes for key in found} == {key.hash: key.size_bytes for key in absent}


def test_find_missing_of_nothing(client):
    assert client.find_missing([]) == []


def test_find_missing_takes_duplicates(client):
    held = client.put(unique(77).bytes())
    (absent,) = random_digests(1, seed=2)
    assert {key.hash for key in client.find_missing([held, absent, held, absent])} == {absent.hash}


def test_find_missing_of_14000_at_once(client):
    # What Bazel puts in one call: about 1 MiB of digests.
    held = [client.put(b"one of many %d" % number) for number in range(200)]
    absent = random_digests(13_800, seed=3)
    asked = held + absent
    random.Random(4).shuffle(asked)
    found = client.find_missing(asked, digest_function=SHA256)
    assert {key.hash for key in found} == {key.hash for key in absent}


def test_the_size_is_part_of_the_digest(client):
    held = client.put(unique(500).bytes())
    for size in (1, 499, 501, 1 << 40):
        assert client.missing(digest(held.hash, size))


def test_empty_blob_is_always_there(client):
    assert not client.missing(digest(EMPTY_HASH, 0))
    (read,) = client.batch_read([digest(EMPTY_HASH, 0)])
    assert read.status.code == 0 and read.data == b""
    (written,) = client.batch_update([(digest(EMPTY_HASH, 0), b"")])
    assert written.status.code == 0


@pytest.mark.parametrize(
    "bad",
    [("", 1), ("00", 1), ("g" * 64, 1), ("A" * 64, 1), ("0" * 63, 1), ("0" * 65, 1), ("0" * 64, -1), (" " + "0" * 63, 1)],
    ids=["empty", "short", "not-hex", "upper", "63", "65", "negative", "space"],
)
def test_bad_digests_are_refused(client, bad):
    with fails(Code.INVALID_ARGUMENT):
        client.find_missing([digest(*bad)])


@pytest.mark.parametrize("function", [SHA1, BLAKE3, 99])
def test_other_digest_functions_are_refused(client, function):
    with fails(Code.INVALID_ARGUMENT):
        client.find_missing(random_digests(1), digest_function=function)
    with fails(Code.INVALID_ARGUMENT):
        client.batch_update([(digest_of(b"x"), b"x")], digest_function=function)
    with fails(Code.INVALID_ARGUMENT):
        client.batch_read(random_digests(1), digest_function=function)


# BatchUpdateBlobs


def test_batch_round_trip(client):
    blobs = [unique(size).bytes() for size in (1, 2, 4095, 4096, 4097, 100_000, (256 << 10) - 1, 256 << 10, (256 << 10) + 1)]
    answers = client.batch_update([(digest_of(blob), blob) for blob in blobs], digest_function=SHA256)
    assert [answer.status.code for answer in answers] == [0] * len(blobs)
    assert [answer.digest for answer in answers] == [digest_of(blob) for blob in blobs]
    back = {answer.digest.hash: answer for answer in client.batch_read([digest_of(blob) for blob in blobs])}
    for blob in blobs:
        answer = back[digest_of(blob).hash]
        assert answer.status.code == 0 and answer.compressor == IDENTITY and answer.data == blob


def test_batch_round_trip_zstd(client):
    blobs = [unique(size).bytes() for size in (1, 4096, 65_537, 300_000, 1 << 20)]
    packed = [zstandard.compress(blob) for blob in blobs]
    answers = client.batch_update([(digest_of(blob), data, ZSTD) for blob, data in zip(blobs, packed)])
    assert [answer.status.code for answer in answers] == [0] * len(blobs)
    for accepted in ((), (ZSTD,), (ZSTD, DEFLATE, BROTLI), (IDENTITY, ZSTD)):
        back = {answer.digest.hash: answer for answer in client.batch_read([digest_of(blob) for blob in blobs], accepted)}
        for blob in blobs:
            answer = back[digest_of(blob).hash]
            assert answer.status.code == 0
            assert answer.compressor == IDENTITY or (answer.compressor == ZSTD and ZSTD in accepted)
            data = answer.data
            if answer.compressor == ZSTD:
                data = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(data)
            assert data == blob


def test_batch_items_fail_one_by_one(client):
    good, wrong, short, long, packed = (unique(300 + number).bytes() for number in range(5))
    items = [
        (digest_of(good), good),
        (digest_of(wrong), wrong[::-1]),
        (digest_of(short), short[:-1]),
        (digest_of(long), long + b"!"),
        (digest_of(packed), b"this is not zstd", ZSTD),
        (digest_of(packed), packed, DEFLATE),
        (digest_of(packed), packed, 77),
        (digest("zz", 3), b"abc"),
    ]
    answers = client.batch_update(items)
    assert len(answers) == len(items)
    codes = [answer.status.code for answer in answers]
    assert codes[0] == 0
    # Unknown compressors may be refused as such; all others are the client's mistake.
    assert [codes[number] for number in (1, 2, 3, 4, 7)] == [3] * 5, codes
    assert all(codes[number] in (3, 12) for number in (5, 6)), codes
    assert all(answer.status.message for answer in answers[1:])
    assert not client.missing(digest_of(good))
    for blob in (wrong, short, long, packed):
        assert client.missing(digest_of(blob))


def test_batch_update_of_a_present_blob(client):
    blob = unique(3000).bytes()
    for _ in range(3):
        (answer,) = client.batch_update([(digest_of(blob), blob)])
        assert answer.status.code == 0
    # Twice in one call.
    other = unique(3001).bytes()
    answers = client.batch_update([(digest_of(other), other), (digest_of(other), other)])
    assert [answer.status.code for answer in answers] == [0, 0]


def test_batch_update_over_the_limit(client):
    blobs = [unique(1 << 20).bytes() for _ in range(5)]
    with fails(Code.INVALID_ARGUMENT):
        client.batch_update([(digest_of(blob), blob) for blob in blobs])
    assert len(client.find_missing([digest_of(blob) for blob in blobs])) == 5


def test_batch_update_of_one_item_just_under_the_limit(client):
    size = client.capabilities().cache_capabilities.max_batch_total_size_bytes
    blob = unique(size).bytes()
    (answer,) = client.batch_update([(digest_of(blob), blob)])
    assert answer.status.code == 0
    (back,) = client.batch_read([digest_of(blob)])
    assert back.data == blob


def test_batch_update_zstd_that_lies(client):
    bomb = zstandard.compress(bytes(64 << 20), 19)
    assert len(bomb) < 8192
    small = unique(1000).bytes()
    answers = client.batch_update(
        [
            (digest(digest_of(small).hash, 1000), bomb, ZSTD),  # Expands beyond the declared size.
            (digest(digest_of(small).hash, 1000), zstandard.compress(small[:999]), ZSTD),
            (digest(digest_of(small).hash, 1000), zstandard.compress(small)[:-5], ZSTD),  # Cut off.
            (digest(digest_of(small).hash, 1000), zstandard.compress(small) + b"rest", ZSTD),
            (digest(digest_of(small).hash, 1000), b"", ZSTD),
        ]
    )
    assert [answer.status.code for answer in answers] == [3] * 5
    assert client.missing(digest_of(small))


def test_batch_update_zstd_of_several_frames(client):
    blob = unique(10_000).bytes()
    packed = b"".join(zstandard.compress(blob[at : at + 1000]) for at in range(0, len(blob), 1000))
    (answer,) = client.batch_update([(digest_of(blob), packed, ZSTD)])
    assert answer.status.code == 0
    assert client.batch_read([digest_of(blob)])[0].data == blob


# BatchReadBlobs


def test_batch_read_items_fail_one_by_one(client):
    held = client.put(unique(600).bytes())
    absent = digest("5" * 64, 1000)
    answers = {answer.digest.hash: answer for answer in client.batch_read([absent, held])}
    assert answers[held.hash].status.code == 0
    assert answers[absent.hash].status.code == 5 and answers[absent.hash].data == b""


def test_batch_read_over_the_limit(client):
    held = [client.put(unique(1 << 20).bytes()) for _ in range(5)]
    with fails(Code.INVALID_ARGUMENT):
        client.batch_read(held)
    assert len(client.batch_read(held[:3])) == 3


def test_batch_read_counts_every_duplicate(client):
    held = client.put(unique(1 << 20).bytes())
    assert len(client.batch_read([held])) == 1
    # Five copies would not fit into a message of 4 MiB.
    with fails(Code.INVALID_ARGUMENT):
        client.batch_read([held] * 5)


def test_batch_read_with_lying_sizes(client):
    # The declared sizes say that the answer is small; the blob is not.
    held = client.put(unique(1 << 20).bytes())
    answers = client.batch_read([digest(held.hash, 1)] * 100)
    assert {answer.status.code for answer in answers} == {5}


def test_batch_read_of_many_small(client):
    blobs = [b"small %d" % number for number in range(3000)]
    for at in range(0, len(blobs), 1000):
        answers = client.batch_update([(digest_of(blob), blob) for blob in blobs[at : at + 1000]])
        assert all(answer.status.code == 0 for answer in answers)
    found = {answer.digest.hash: answer.data for answer in client.batch_read([digest_of(blob) for blob in blobs])}
    assert all(found[digest_of(blob).hash] == blob for blob in blobs)


def test_split_and_splice_are_not_served(client):
    for method in ("SplitBlob", "SpliceBlob"):
        with fails(Code.UNIMPLEMENTED):
            client.unary(f"/build.bazel.remote.execution.v2.ContentAddressableStorage/{method}", b"", None)
