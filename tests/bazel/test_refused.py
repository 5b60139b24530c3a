"""Goal: a server that refuses uploads costs a build its warnings and nothing else.
Method: real Bazel builds 50 outputs at 16 at a time on a server with one write slot and no queue. What was refused is known
by asking for each output; the next build, from nothing, must run those actions again and no other."""

import hashlib

import runner
import workspace
from reapi import Client, message
from server import Server

COUNT = 50
LENGTH = 2_000_000


def missing(bazel, server) -> set[str]:
    """The outputs that the server does not have."""
    root = (bazel.source / "bazel-bin").resolve()
    data = {path.name: path.read_bytes() for path in root.glob("out*.bin")}
    assert len(data) == COUNT
    digests = {hashlib.sha256(content).hexdigest(): name for name, content in data.items()}
    with Client(server.address) as client:
        reply = client.find_missing([message("Digest")(hash=hash, size_bytes=LENGTH) for hash in digests])
    return {digests[digest.hash] for digest in reply}


def test_refused_uploads_are_warnings():
    with (
        runner.bazel(lambda root: workspace.write_outputs(root, COUNT, LENGTH)) as bazel,
        Server(max_inflight_cas_writes="1", write_queue_wait="0", ack="flushed") as server,
    ):
        counts = bazel.run("build", server.address)
        assert counts.get("local") == COUNT, counts
        first = bazel.outputs()
        refused = missing(bazel, server)
        assert 0 < len(refused) < COUNT, "some uploads get through, some do not"
        assert len(bazel.warnings("Writing to")) == len(refused), bazel.log

        bazel.forget()
        server.restart(max_inflight_cas_writes=None, write_queue_wait=None)
        counts = bazel.run("build", server.address)
        assert counts.get("local") == len(refused) and counts.get("remote cache hit") == COUNT - len(refused), counts
        assert bazel.outputs() == first
        assert not missing(bazel, server) and not bazel.warnings("Writing to")
