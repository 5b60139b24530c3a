"""Goal: an action's result is returned only while all that it names is there; results are kept as they were given.
Method: results of every shape are stored, their blobs left out one by one; hints, keys and errors by the API's list."""

import itertools

import pytest

from content import EMPTY_HASH, unique
from reapi import BLAKE3, SHA256, Client, Code, blob_name, digest, digest_of, fails, message

MIB = 1 << 20
_numbers = itertools.count(1)


def action():
    """The digest of an action that no other test uses."""
    return digest_of(b"action %d" % next(_numbers))


def result(**fields):
    return message("ActionResult")(**fields)


def test_absent(client):
    with fails(Code.NOT_FOUND):
        client.get_action(action())


def test_round_trip_of_every_field(client):
    out, log, inner = (client.put(unique(size).bytes()) for size in (100, 200, 300))
    tree = message("Tree")(root={"files": [{"name": "f", "digest": inner, "is_executable": True}]})
    tree_digest = client.put(tree.SerializeToString())
    stored = result(
        output_files=[{"path": "a/b.txt", "digest": out, "is_executable": True}],
        output_symlinks=[{"path": "s", "target": "/abs"}],
        output_file_symlinks=[{"path": "fs", "target": "t"}],
        output_directory_symlinks=[{"path": "ds", "target": "t"}],
        output_directories=[{"path": "d", "tree_digest": tree_digest, "is_topologically_sorted": True}],
        exit_code=3,
        stdout_digest=log,
        stderr_digest=log,
        execution_metadata={"worker": "w", "queued_timestamp": {"seconds": 5}},
    )
    key = action()
    returned = client.update_action(key, stored, digest_function=SHA256, results_cache_policy={"priority": 1})
    assert returned == stored
    assert client.get_action(key, digest_function=SHA256) == stored


def test_update_replaces(client):
    key = action()
    for code in (1, 2, 3):
        client.update_action(key, result(exit_code=code))
        assert client.get_action(key).exit_code == code


def test_an_action_that_nobody_uploaded_is_fine(client):
    # moon's action blob is JSON; HTTP clients upload none. The server looks at results only.
    key = action()
    client.update_action(key, result(exit_code=4))
    assert client.get_action(key).exit_code == 4


def test_inline_contents_become_blobs(client):
    # What stands inline in an upload is a blob from then on, and comes inline only to those who ask for it.
    out, err, file = (unique(40).bytes() for _ in range(3))
    key = action()
    given = result(
        stdout_raw=out,
        stderr_raw=err,
        output_files=[{"path": "p", "digest": digest_of(file), "contents": file}],
    )
    stored = client.update_action(key, given)
    assert stored.stdout_digest == digest_of(out) and stored.stderr_digest == digest_of(err)
    assert client.find_missing([digest_of(out), digest_of(err), digest_of(file)]) == []
    plain = client.get_action(key)
    assert plain.stdout_digest == digest_of(out) and not plain.stdout_raw and not plain.output_files[0].contents
    hinted = client.get_action(key, inline_stdout=True, inline_stderr=True, inline_output_files=["p"])
    assert (hinted.stdout_raw, hinted.stderr_raw, hinted.output_files[0].contents) == (out, err, file)


def test_inline_contents_must_fit_their_digest(client):
    for given in (
        result(stdout_raw=b"one", stdout_digest=digest_of(b"another")),
        result(stderr_raw=b"one", stderr_digest=digest_of(b"another")),
        result(output_files=[{"path": "p", "digest": digest_of(b"another"), "contents": b"one"}]),
    ):
        with fails(Code.INVALID_ARGUMENT):
            client.update_action(action(), given)


# Completeness


def directory(files=(), directories=()):
    return message("Directory")(
        files=[{"name": f"f{number}", "digest": key} for number, key in enumerate(files)],
        directories=[{"name": f"d{number}", "digest": key} for number, key in enumerate(directories)],
    )


def test_each_missing_blob_makes_a_miss(client):
    def shapes(key):
        yield {"output_files": [{"path": "p", "digest": key}]}
        yield {"stdout_digest": key}
        yield {"stderr_digest": key}
        yield {"output_directories": [{"path": "p", "tree_digest": key}]}

    for make in range(4):
        blob = message("Tree")(root=directory([digest_of(b"")])).SerializeToString() + b"\xc2\x3e\x01" + bytes([make])
        key = action()
        client.update_action(key, result(exit_code=7, **list(shapes(digest_of(blob)))[make]))
        with fails(Code.NOT_FOUND):
            client.get_action(key)
        client.put(blob)
        # The entry was dropped or is complete now; both are right. Stored again it must be found.
        client.update_action(key, result(exit_code=7, **list(shapes(digest_of(blob)))[make]))
        assert client.get_action(key).exit_code == 7


@pytest.mark.parametrize("sorted_tree", [False, True])
@pytest.mark.parametrize("lost", ["root file", "child file", "deep file", "nothing"])
def test_files_of_trees_count(client, sorted_tree, lost):
    blobs = {name: unique(50).bytes() for name in ("root file", "child file", "deep file")}
    for name, blob in blobs.items():
        if name != lost:
            client.put(blob)
    deep = directory([digest_of(blobs["deep file"])])
    child = directory([digest_of(blobs["child file"])], [digest_of(deep.SerializeToString())])
    root = directory([digest_of(blobs["root file"])], [digest_of(child.SerializeToString())])
    tree = client.put(message("Tree")(root=root, children=[child, deep]).SerializeToString())
    key = action()
    outputs = [{"path": "p", "tree_digest": tree, "is_topologically_sorted": sorted_tree}]
    client.update_action(key, result(output_directories=outputs))
    if lost == "nothing":
        assert client.get_action(key).output_directories[0].tree_digest == tree
    else:
        with fails(Code.NOT_FOUND):
            client.get_action(key)


def test_a_tree_that_is_no_tree_is_a_miss(client):
    for garbage in (b"\xff\xff\xff garbage", b"\x0a\x05abc"):
        tree = client.put(garbage + str(next(_numbers)).encode())
        key = action()
        client.update_action(key, result(output_directories=[{"path": "p", "tree_digest": tree}]))
        with fails(Code.NOT_FOUND):
            client.get_action(key)


def test_a_tree_of_many_files(client):
    # 6,000 files in 60 directories: about 400 KB of Tree, stored as frames.
    blobs = [b"leaf %d" % number for number in range(6000)]
    for at in range(0, len(blobs), 2000):
        client.batch_update([(digest_of(blob), blob) for blob in blobs[at : at + 2000]])
    children = [directory([digest_of(blob) for blob in blobs[at : at + 100]]) for at in range(0, 6000, 100)]
    root = directory([], [digest_of(child.SerializeToString()) for child in children])
    complete = client.put(message("Tree")(root=root, children=children).SerializeToString())
    key = action()
    client.update_action(key, result(output_directories=[{"path": "p", "tree_digest": complete}]))
    assert client.get_action(key).output_directories
    children[37].files[50].digest.CopyFrom(digest_of(b"nowhere"))
    lacking = client.put(message("Tree")(root=root, children=children).SerializeToString())
    client.update_action(key, result(output_directories=[{"path": "p", "tree_digest": lacking}]))
    with fails(Code.NOT_FOUND):
        client.get_action(key)


def test_the_empty_blob_counts_as_there(client):
    key = action()
    empty = message("Digest")(hash=EMPTY_HASH, size_bytes=0)
    client.update_action(key, result(output_files=[{"path": "e", "digest": empty}], stdout_digest=empty))
    assert client.get_action(key).output_files[0].digest == empty


# Inlining


def test_inlining_by_hint_only(client):
    out, err, file, other = (unique(1000) for _ in range(4))
    for content in (out, err, file, other):
        client.put(content.bytes())
    key = action()
    client.update_action(
        key,
        result(
            stdout_digest=digest(out),
            stderr_digest=digest(err),
            output_files=[{"path": "x/f.d", "digest": digest(file)}, {"path": "x/g", "digest": digest(other)}],
        ),
    )
    plain = client.get_action(key)
    assert not plain.stdout_raw and not plain.stderr_raw and not any(each.contents for each in plain.output_files)
    hinted = client.get_action(key, inline_stdout=True, inline_stderr=True, inline_output_files=["x/f.d", "no/such"])
    assert hinted.stdout_raw == out.bytes() and hinted.stdout_digest == digest(out)
    assert hinted.stderr_raw == err.bytes() and hinted.stderr_digest == digest(err)
    by_path = {each.path: each for each in hinted.output_files}
    assert by_path["x/f.d"].contents == file.bytes() and by_path["x/f.d"].digest == digest(file)
    assert by_path["x/g"].contents == b""


def test_inlining_stops_under_the_limit_of_a_message(client):
    contents = [unique(MIB) for _ in range(6)]
    for content in contents:
        client.put(content.bytes())
    big = unique(20 * MIB)
    client.put(big.bytes())
    key = action()
    files = [{"path": f"p{number}", "digest": digest(content)} for number, content in enumerate(contents)]
    files.append({"path": "big", "digest": digest(big)})
    client.update_action(key, result(output_files=files, stdout_digest=digest(big)))
    # grpcio refuses more than 4 MiB: this call would fail.
    paths = [file["path"] for file in files]
    found = client.get_action(key, inline_stdout=True, inline_output_files=paths)
    assert found.stdout_raw == b"" and found.stdout_digest == digest(big)
    for each, file in zip(found.output_files, files):
        assert each.digest == file["digest"]
        assert each.contents in (b"", contents[int(each.path[1:])].bytes() if each.path != "big" else b"")


def test_a_result_too_large_to_return(client):
    stored = result(output_files=[{"path": "p" * 1000 + str(n), "digest": digest_of(b"")} for n in range(5000)])
    assert stored.ByteSize() > 5 << 20
    key = action()
    with fails(Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED):
        client.update_action(key, stored)
    with fails(Code.NOT_FOUND):
        client.get_action(key)


def test_a_large_result_comes_back(client):
    key = action()
    stored = result(output_files=[{"path": f"some/long/path/{n}" * 5, "digest": digest_of(b"")} for n in range(12_000)])
    assert 1 << 20 < stored.ByteSize() < 3 << 20
    client.update_action(key, stored)
    assert client.get_action(key) == stored


# Keys


def test_cas_and_action_cache_are_apart(client):
    blob = unique(64).bytes()
    key = client.put(blob)
    with fails(Code.NOT_FOUND):
        client.get_action(key)
    other = action()
    client.update_action(other, result(exit_code=1))
    assert client.missing(other)
    with fails(Code.NOT_FOUND):
        client.read(blob_name(other.hash, other.size_bytes))


def test_the_size_of_the_action_is_part_of_its_key(client):
    key = action()
    client.update_action(key, result(exit_code=1))
    with fails(Code.NOT_FOUND):
        client.get_action(message("Digest")(hash=key.hash, size_bytes=key.size_bytes + 1))


def test_instances_share_results_by_default(client):
    key = action()
    client.update_action(key, result(exit_code=5), instance_name="one")
    assert client.get_action(key, instance_name="two").exit_code == 5
    assert client.get_action(key).exit_code == 5


def test_instances_are_apart_when_keys_are_mangled(fresh):
    server = fresh(enable_ac_key_instance_mangling="true")
    with Client(server.address) as client:
        key = action()
        for number, instance in enumerate(["", "one", "two"], start=1):
            client.update_action(key, result(exit_code=number), instance_name=instance)
        for number, instance in enumerate(["", "one", "two"], start=1):
            assert client.get_action(key, instance_name=instance).exit_code == number
        with fails(Code.NOT_FOUND):
            client.get_action(key, instance_name="three")
        # Blobs are what they are, whatever the instance.
        blob = client.put(unique(10).bytes())
        assert client.find_missing([blob], instance_name="two") == []


# Errors


@pytest.mark.parametrize("bad", [("", 1), ("x" * 64, 1), ("AB" * 32, 1), ("ab" * 31, 1), ("ab" * 32, -1)])
def test_bad_digests_anywhere(client, bad):
    wrong = message("Digest")(hash=bad[0], size_bytes=bad[1])
    with fails(Code.INVALID_ARGUMENT):
        client.get_action(wrong)
    with fails(Code.INVALID_ARGUMENT):
        client.update_action(wrong, result(exit_code=1))
    for stored in (
        result(stdout_digest=wrong),
        result(stderr_digest=wrong),
        result(output_files=[{"path": "p", "digest": wrong}]),
        result(output_directories=[{"path": "p", "tree_digest": wrong}]),
    ):
        with fails(Code.INVALID_ARGUMENT):
            client.update_action(action(), stored)


def test_fields_that_must_be_set(client):
    with fails(Code.INVALID_ARGUMENT):
        client.get_action(None)
    with fails(Code.INVALID_ARGUMENT):
        client.update_action(None, result(exit_code=1))
    with fails(Code.INVALID_ARGUMENT):
        client.update_action(action(), None)
    with fails(Code.INVALID_ARGUMENT):
        client.update_action(action(), result(output_files=[{"path": "p"}]))
    with fails(Code.INVALID_ARGUMENT):
        client.update_action(action(), result(output_files=[{"digest": digest_of(b"")}]))
    with fails(Code.INVALID_ARGUMENT):
        client.update_action(action(), result(output_directories=[{"path": "p"}]))


def test_other_digest_functions(client):
    with fails(Code.INVALID_ARGUMENT):
        client.get_action(action(), digest_function=BLAKE3)
    with fails(Code.INVALID_ARGUMENT):
        client.update_action(action(), result(exit_code=1), digest_function=BLAKE3)
