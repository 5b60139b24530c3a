"""Goal: blobs and actions go to an S3 store and come back from it, in bazel-remote's format, whatever their size.
Method: SeaweedFS and a store on the s3s library, which check different things (s3s also the hash of each body); a second
client with its own signer, and servers with empty caches in front of one bucket."""

import re

import pytest

from bucket import action_key, blob_key, casblob, from_casblob
from content import Content, unique
from reapi import Client, Code, blob_name, digest, digest_of, fails, message, upload_name
from s3s import S3s
from server import Server, StartError
from test_metrics import scrape
from wait import until
from weed import Weed

MIB = 1 << 20
SIZES = [1, 100, 4096, 70_000, 256 * 1024, 256 * 1024 + 1, MIB, 5 * MIB + 17]


@pytest.fixture(scope="module", params=[Weed, S3s])
def store(request):
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def bucket(store, request):
    made = store.bucket(f"b{abs(hash(request.node.name)) % 10**9}")
    made.create()
    return made


def upload(client: Client, content: Content, zstd: bool = False) -> None:
    client.write(upload_name(content.hash, content.size), content.chunks())


@pytest.mark.parametrize("mode", ["zstd", "uncompressed"])
def test_round_trips(store, bucket, fresh, mode):
    flags = store.flags(bucket.name) | {"storage_mode": mode, "s3.prefix": "some/where"}
    contents = [unique(size) for size in SIZES]
    one = fresh(**flags)
    with Client(one.address) as client:
        for content in contents:
            upload(client, content)
    is_raw = mode == "uncompressed"
    for content in contents:
        key = "some/where/" + blob_key(content.hash, is_raw)
        until(lambda: bucket.has(key), f"the upload of {content.size} bytes")
        stored = bucket.get(key)
        assert (stored if is_raw else from_casblob(stored)) == content.bytes()
    other = fresh(**flags)
    with Client(other.address) as client:
        assert not client.missing(*[digest(content) for content in contents])
        for content in contents:
            assert client.read(blob_name(content.hash, content.size)) == content.bytes()
    # Now they stand in the cache.
    other.restart(**{"s3.bucket": None})
    with Client(other.address) as client:
        assert not client.missing(*[digest(content) for content in contents])


def test_what_a_bazel_remote_left(store, bucket, fresh):
    """Its objects are read, from any offset, also its rare uncompressed casblobs."""
    contents = [unique(size) for size in [1, 5000, MIB, MIB + 1, 3 * MIB + 5]]
    for content in contents:
        bucket.put(blob_key(content.hash), casblob(content.bytes()))
    plain = unique(100_000)
    bucket.put(blob_key(plain.hash), casblob(plain.bytes(), compression=0))
    server = fresh(**store.flags(bucket.name))
    with Client(server.address) as client:
        for content in [*contents, plain]:
            offset = content.size // 3
            name = blob_name(content.hash, content.size)
            assert client.read(name, offset, 1000) == content.read(offset, 1000)
            assert client.read(name) == content.bytes()
    with Client(server.address) as client:
        small = contents[1]
        (response,) = client.batch_read([digest(small)])
        assert response.data == small.bytes()


@pytest.mark.parametrize("mode", ["zstd", "uncompressed"])
def test_parts(store, bucket, fresh, mode):
    """An object above the threshold goes in parts, and comes back whole; a second server does not send it again."""
    flags = store.flags(bucket.name) | {"storage_mode": mode, "s3.multipart_from": "5M"}
    content, key = unique(23 * MIB + 7), None
    for number in range(2):
        server = fresh(http_address="127.0.0.1:0", **flags)
        key = blob_key(content.hash, mode == "uncompressed")
        with Client(server.address) as client:
            upload(client, content)
        status = ["created", "already_exists"][number]
        until(lambda: outcomes(server, status) == 1, f"the upload ends as {status}")
    stored = bucket.get(key)
    assert (stored if mode == "uncompressed" else from_casblob(stored)) == content.bytes()
    server = fresh(**flags)
    with Client(server.address) as client:
        assert client.read(blob_name(content.hash, content.size)) == content.bytes()


def outcomes(server, status: str) -> float:
    found = [value for name, value in scrape(server).items() if f'status="{status}"' in name]
    return sum(found)


def test_actions(store, bucket, fresh):
    output, action = unique(300_000), digest_of(b"an action")
    result = message("ActionResult")(exit_code=7)
    result.output_files.add(path="out", digest=digest(output))
    one = fresh(**store.flags(bucket.name))
    with Client(one.address) as client:
        upload(client, output)
        client.update_action(action, result)
        until(lambda: bucket.has(action_key(action.hash)) and bucket.has(blob_key(output.hash)), "the uploads")
        changed = message("ActionResult")(exit_code=8)
        client.update_action(action, changed)
        until(lambda: message("ActionResult").FromString(bucket.get(action_key(action.hash))).exit_code == 8, "the change")
        client.update_action(action, result)
        until(lambda: message("ActionResult").FromString(bucket.get(action_key(action.hash))).exit_code == 7, "the change")
    other = fresh(**store.flags(bucket.name))
    with Client(other.address) as client:
        found = client.get_action(action)
        assert found.exit_code == 7 and found.output_files[0].digest == digest(output)
        with fails(Code.NOT_FOUND):
            client.get_action(digest_of(b"another action"))


def test_wrong_objects_are_never_served(store, bucket, fresh):
    """A small one, a large one, a cut one and one that is no casblob are misses, and the next upload replaces them."""
    small, large, cut, odd = unique(1000), unique(4 * MIB), unique(3 * MIB), unique(2000)
    bucket.put(blob_key(small.hash), casblob(unique(1000).bytes()))
    wrong = bytearray(large.bytes())
    wrong[-1] ^= 1
    bucket.put(blob_key(large.hash), casblob(bytes(wrong)))
    bucket.put(blob_key(cut.hash), casblob(cut.bytes())[:-1000])
    bucket.put(blob_key(odd.hash), odd.bytes())
    server = fresh(**store.flags(bucket.name))
    with Client(server.address) as client:
        for content in [small, large, cut, odd]:
            received = bytearray()
            with fails(Code.NOT_FOUND):
                for reply in client.read_call(blob_name(content.hash, content.size)):
                    received += reply.data
            assert len(received) < content.size
            assert client.missing(digest(content)), "a wrong object must be uploaded again"
            upload(client, content)
        for content in [small, large, cut, odd]:
            key = blob_key(content.hash)
            until(lambda: bucket.get(key)[:4] == b"\x50\x2a\x4d\x18" and is_right(bucket.get(key), content), "the mend")


def is_right(stored: bytes, content: Content) -> bool:
    try:
        return from_casblob(stored) == content.bytes()
    except Exception:
        return False


def test_uploads_survive_a_kill(store, bucket, fresh):
    """What was not uploaded when the process was killed is uploaded by the next one."""
    flags = store.flags(bucket.name) | {"ack": "flushed"}
    server = fresh(**flags | {"s3.endpoint": "127.0.0.1:9"})
    contents = [unique(2000 + 100 * number) for number in range(30)]
    with Client(server.address) as client:
        for content in contents:
            upload(client, content)
    server.restart(crash=True, **flags)
    for content in contents:
        until(lambda: bucket.has(blob_key(content.hash)), "an upload of the last run")
    server.stop()


def test_wrong_credentials_are_misses_and_say_so(store, bucket, fresh):
    content = unique(1000)
    bucket.put(blob_key(content.hash), casblob(content.bytes()))
    server = fresh(**store.flags(bucket.name) | {"s3.secret_access_key": "guessed"})
    with Client(server.address) as client:
        with fails(Code.NOT_FOUND):
            client.read(blob_name(content.hash, content.size))
        upload(client, content)
        until(lambda: "upload: access denied" in server.log or "read: access denied" in server.log, "the log names it")
    # Each is said when its own request has been answered.
    for text in [
        "the bucket cannot be listed: access denied: status 403 SignatureDoesNotMatch",
        "Check the credentials and their policy",
    ]:
        until(lambda: text in server.log, text)
    assert "guessed" not in server.log


def test_unknown_keys_and_buckets_are_named(store, bucket, fresh):
    """What an operator may have got wrong is said at the start, each with the store's own word for it."""
    for flag, value, words in [
        ("s3.access_key_id", "AKNOBODY", ["InvalidAccessKeyId", "NotSignedUp"]),
        ("s3.bucket", "no-such-bucket", ["NoSuchBucket"]),
    ]:
        server = fresh(**store.flags(bucket.name) | {flag: value})
        until(lambda: any(word in server.log for word in words), f"the log names {words}")
        server.stop()


def test_a_skewed_clock(fresh):
    """A store whose clock is an hour ahead: everything is signed with its time from the first refusal on, which is said."""
    store = S3s(skew_s=3600)
    try:
        bucket = store.bucket("skewed")
        bucket.skew_s = 3600
        bucket.create()
        contents = [unique(5000), unique(MIB)]
        bucket.put(blob_key(contents[0].hash), casblob(contents[0].bytes()))
        server = fresh(**store.flags("skewed"))
        with Client(server.address) as client:
            assert client.read(blob_name(contents[0].hash, 5000)) == contents[0].bytes()
            upload(client, contents[1])
        until(lambda: bucket.has(blob_key(contents[1].hash)), "the upload")
        # Dates are whole seconds, and an answer takes its time.
        behind = int(re.search(r"this machine's clock is (\d+) s behind the backend's", server.log)[1])
        assert 3590 < behind <= 3600
    finally:
        store.close()


def test_a_configuration_file(store, bucket, fresh, tmp_path):
    """The file of a bazel-remote is enough; a misspelt key in it is named."""
    file = tmp_path / "config.yml"
    section = "".join(f"  {name.removeprefix('s3.')}: {value}\n" for name, value in store.flags(bucket.name).items())
    file.write_text(f"storage_mode: zstd\nnum_uploaders: 7\ns3_proxy:\n{section}")
    server = fresh(config_file=str(file))
    content = unique(5000)
    with Client(server.address) as client:
        upload(client, content)
    until(lambda: bucket.has(blob_key(content.hash)), "the upload")
    file.write_text("s3_proxy:\n  buckt: x\n")
    with pytest.raises(StartError, match='did you mean \\\\?"bucket'):
        Server(config_file=str(file)).start()
