"""Goal: a server that refuses uploads costs a build its warnings and nothing else.
Method: real Bazel builds 10 outputs, and then 50 more on a server with one write slot and no queue. Each action that lost an
upload is one warning; the next build, from nothing, must run those actions again and no other."""

import hashlib

import runner
import workspace
from reapi import Client, message
from server import Server

COUNT = 60
KEPT = 10
LENGTH = 500_000


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
        Server(ack="flushed") as server,
    ):
        bazel.run("build", server.address, targets=[f"//:out{number}" for number in range(KEPT)])
        server.restart(max_inflight_cas_writes="1", write_queue_wait="0")
        # Why verbose: Bazel says each text once, and a short one for an action of which several uploads were refused.
        counts = bazel.run("build", server.address, "--verbose_failures")
        assert counts.get("local") == COUNT - KEPT, counts
        first = bazel.outputs()
        refused = len(bazel.warnings("Writing to"))
        lost = missing(bazel, server)
        assert 0 < len(lost) <= refused <= COUNT - KEPT, (lost, refused)
        assert "BYTESTREAM WRITE SHED" in server.log

        bazel.forget()
        server.restart(max_inflight_cas_writes=None, write_queue_wait=None)
        counts = bazel.run("build", server.address)
        assert (counts.get("local"), counts.get("remote cache hit")) == (refused, COUNT - refused), counts
        assert bazel.outputs() == first
        assert not missing(bazel, server) and not bazel.warnings("Writing to")
