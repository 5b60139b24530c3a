"""Goal: GetTree gives every directory once, in pages that a client may take up again, within fixed memory.
Method: trees of known shape are stored and read whole, by pages of every size, by tokens, and with parts missing."""

import pytest

from reapi import Client, Code, digest_of, fails, message


def store(client, directories) -> list:
    answers = []
    items = [(digest_of(each.SerializeToString()), each.SerializeToString()) for each in directories]
    for at in range(0, len(items), 500):
        answers += client.batch_update(items[at : at + 500])
    assert all(answer.status.code == 0 for answer in answers)
    return [item[0] for item in items]


def leaf(name: str):
    return message("Directory")(files=[{"name": name, "digest": digest_of(name.encode())}])


def parent(name: str, children):
    return message("Directory")(
        files=[{"name": name, "digest": digest_of(b"")}],
        directories=[{"name": f"d{number}", "digest": key} for number, key in enumerate(children)],
    )


def names(pages) -> list[str]:
    return [directory.files[0].name for page in pages for directory in page.directories]


@pytest.fixture(scope="module")
def wide(server):
    """A root over 30 directories of 10 leaves each: 331 directories."""
    with Client(server.address) as client:
        middles = []
        for number in range(30):
            leaves = store(client, [leaf(f"leaf {number}.{each}") for each in range(10)])
            middles.append(parent(f"middle {number}", leaves))
        (root,) = store(client, [parent("root", store(client, middles))])
    return root


def expected() -> set[str]:
    return {"root"} | {f"middle {n}" for n in range(30)} | {f"leaf {n}.{e}" for n in range(30) for e in range(10)}


def test_whole_tree(client, wide):
    pages = client.tree_pages(wide)
    found = names(pages)
    assert found[0] == "root" and len(found) == 331 and set(found) == expected()
    assert pages[-1].next_page_token == ""


@pytest.mark.parametrize("page_size", [1, 7, 100, 331, 5000])
def test_pages(client, wide, page_size):
    pages = client.tree_pages(wide, page_size)
    assert all(len(page.directories) <= page_size for page in pages)
    assert set(names(pages)) == expected() and len(names(pages)) == 331
    assert pages[-1].next_page_token == ""
    assert all(page.next_page_token for page in pages[:-1])


@pytest.mark.parametrize("page_size", [1, 50])
def test_tokens_take_up_the_walk(client, server, wide, page_size):
    pages = client.tree_pages(wide, page_size)
    whole = names(pages)
    for number in sorted({0, 1, len(pages) // 2, len(pages) - 2}):
        with Client(server.address) as other:
            rest = other.tree_pages(wide, page_size, pages[number].next_page_token)
        assert names(pages[: number + 1]) + names(rest) == whole


def test_missing_subtrees_are_left_out(client):
    there = leaf("present leaf")
    (there_key,) = store(client, [there])
    (root,) = store(client, [parent("root with a hole", [digest_of(b"not stored"), there_key])])
    assert set(names(client.tree_pages(root))) == {"root with a hole", "present leaf"}


def test_a_shared_directory(client):
    # The same directory below two parents may come once or twice; it must come.
    (shared,) = store(client, [leaf("shared")])
    parents = store(client, [parent("left", [shared]), parent("right", [shared])])
    (root,) = store(client, [parent("sharing root", parents)])
    found = names(client.tree_pages(root))
    assert set(found) == {"sharing root", "left", "right", "shared"}


def test_a_deep_tree_ends_in_bounded_time(client):
    # A chain of 300 directories: served, or refused by a limit; never a hang or a crash.
    below = store(client, [leaf("bottom")])
    for depth in range(300):
        below = store(client, [parent(f"depth {depth}", below)])
    try:
        assert len(names(client.tree_pages(below[0]))) == 301
    except Exception as error:
        assert error.code() in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION)


def test_a_tree_that_doubles_at_each_level(client):
    # 40 levels, each naming the next twice: 2^40 paths, 41 directories. It must not be walked path by path.
    below = store(client, [leaf("end of doubling")])
    for depth in range(40):
        below = store(client, [parent(f"doubling {depth}", below * 2)])
    try:
        assert len(set(names(client.tree_pages(below[0])))) == 41
    except Exception as error:
        assert error.code() in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION)


def test_large_directories_stay_under_the_limit_of_a_message(client):
    # 12 directories of 900 KB each.
    big = []
    for number in range(12):
        files = [{"name": f"{number} {'n' * 800} {each}", "digest": digest_of(b"")} for each in range(1000)]
        big.append(message("Directory")(files=files))
    keys = [client.put(each.SerializeToString()) for each in big]
    (root,) = store(client, [parent("root of big ones", keys)])
    pages = client.tree_pages(root)
    assert len(names(pages)) == 13
    assert all(page.ByteSize() < 4 << 20 for page in pages)


def test_errors(client, wide):
    with fails(Code.NOT_FOUND):
        client.tree_pages(digest_of(b"no such directory"))
    with fails(Code.INVALID_ARGUMENT):
        client.tree_pages(None)
    with fails(Code.INVALID_ARGUMENT):
        client.tree_pages(message("Digest")(hash="zz", size_bytes=1))
    with fails(Code.INVALID_ARGUMENT):
        client.tree_pages(wide, -1)
    with fails(Code.INVALID_ARGUMENT):
        client.tree_pages(wide, 10, "no token of ours")
    garbage = client.put(b"\xff\xff\xff\xff this is no directory")
    with fails(Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND, Code.DATA_LOSS):
        client.tree_pages(garbage)


def test_the_empty_directory(client):
    (empty,) = store(client, [message("Directory")()])
    pages = client.tree_pages(empty)
    assert sum(len(page.directories) for page in pages) == 1
