"""A gRPC client of the Remote Execution API, its messages made from this repository's proto/ files."""

import contextlib
import functools
import pathlib
import subprocess
import sys
import tempfile
import threading
import uuid

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from content import Content, sha256

ROOT = pathlib.Path(__file__).resolve().parents[2]
REAPI = "build.bazel.remote.execution.v2"
CAS = f"/{REAPI}.ContentAddressableStorage"
ACTION_CACHE = f"/{REAPI}.ActionCache"
CAPABILITIES = f"/{REAPI}.Capabilities"
BYTE_STREAM = "/google.bytestream.ByteStream"
HEALTH = "/grpc.health.v1.Health"
METADATA_KEY = f"{REAPI}.requestmetadata-bin"

IDENTITY, ZSTD, DEFLATE, BROTLI = 0, 1, 2, 3
SHA256, SHA1, BLAKE3 = 1, 2, 9
DEADLINE_S = 60
Code = grpc.StatusCode


@functools.cache
def _make_pool() -> descriptor_pool.DescriptorPool:
    # Why not generated modules: their global pool clashes with grpcio's own health and reflection packages.
    files = sorted(str(path) for path in (ROOT / "proto").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        out = f"{directory}/set.bin"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", "--include_imports"]
        subprocess.run([*command, f"--descriptor_set_out={out}", *files], check=True, timeout=60)
        found = descriptor_pb2.FileDescriptorSet.FromString(pathlib.Path(out).read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in found.file:
        pool.Add(file)
    return pool


_lock = threading.Lock()


def message(name: str):
    """The message class `name`, REAPI's package when it names none."""
    full = name if "." in name and name[0].islower() else f"{REAPI}.{name}"
    with _lock:
        return message_factory.GetMessageClass(_make_pool().FindMessageTypeByName(full))


def digest_of(data: bytes):
    return message("Digest")(hash=sha256(data), size_bytes=len(data))


def digest(content: Content):
    return message("Digest")(hash=content.hash, size_bytes=content.size)


@contextlib.contextmanager
def fails(*codes: grpc.StatusCode):
    """The call in the block must end with one of `codes`. Yields a list that then holds the error."""
    caught = []
    try:
        yield caught
    except grpc.RpcError as error:
        assert error.code() in codes, f"expected {codes}, got {error.code()}: {error.details()}"
        assert error.details(), "an error must say what happened"
        caught.append(error)
    else:
        raise AssertionError(f"expected {codes}, the call succeeded")


def upload_name(hash: str, size: int, zstd: bool = False, id: str | None = None, instance: str = "") -> str:
    kind = "compressed-blobs/zstd" if zstd else "blobs"
    return f"{instance + '/' if instance else ''}uploads/{id or uuid.uuid4()}/{kind}/{hash}/{size}"


def blob_name(hash: str, size: int, zstd: bool = False, instance: str = "") -> str:
    kind = "compressed-blobs/zstd" if zstd else "blobs"
    return f"{instance + '/' if instance else ''}{kind}/{hash}/{size}"


class Client:
    """One connection. Uses grpcio's default limit of 4 MiB for received messages, as every client does."""

    def __init__(
        self,
        address: str,
        tool: str | None = None,
        version: str = "",
        deadline_s: float = DEADLINE_S,
        credentials: grpc.ChannelCredentials | None = None,
        sends_again: bool = False,
    ):
        """`sends_again`: what the server has said that it never looked at, as gRPC clients do when nobody forbids it."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", int(sends_again))]
        self.address = address
        secure = credentials is not None
        self.channel = grpc.secure_channel(address, credentials, options) if secure else grpc.insecure_channel(address, options)
        self.deadline_s = deadline_s
        self.metadata = []
        if tool is not None:
            metadata = message("RequestMetadata")(tool_details={"tool_name": tool, "tool_version": version})
            self.metadata.append((METADATA_KEY, metadata.SerializeToString()))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        self.channel.close()

    def unary(self, path: str, request, reply: str | None, **options):
        decode = message(reply).FromString if reply else None
        encode = None if isinstance(request, bytes) else type(request).SerializeToString
        call = self.channel.unary_unary(path, request_serializer=encode, response_deserializer=decode)
        return call(request, **self._options(options))

    def _options(self, options: dict) -> dict:
        return {"timeout": self.deadline_s, "metadata": self.metadata} | options

    # Capabilities

    def capabilities(self, instance: str = "", **options):
        request = message("GetCapabilitiesRequest")(instance_name=instance)
        return self.unary(f"{CAPABILITIES}/GetCapabilities", request, "ServerCapabilities", **options)

    # ContentAddressableStorage

    def find_missing(self, digests, **fields) -> list:
        request = message("FindMissingBlobsRequest")(blob_digests=digests, **fields)
        reply = self.unary(f"{CAS}/FindMissingBlobs", request, "FindMissingBlobsResponse")
        return list(reply.missing_blob_digests)

    def missing(self, *digests) -> bool:
        """Whether any of them is missing."""
        return bool(self.find_missing(digests))

    def batch_update(self, items, **fields) -> list:
        """`items` are (digest, data) or (digest, data, compressor)."""
        requests = [{"digest": item[0], "data": item[1], "compressor": (*item, IDENTITY)[2]} for item in items]
        request = message("BatchUpdateBlobsRequest")(requests=requests, **fields)
        return list(self.unary(f"{CAS}/BatchUpdateBlobs", request, "BatchUpdateBlobsResponse").responses)

    def batch_read(self, digests, compressors=(), **fields) -> list:
        request = message("BatchReadBlobsRequest")(digests=digests, acceptable_compressors=compressors, **fields)
        return list(self.unary(f"{CAS}/BatchReadBlobs", request, "BatchReadBlobsResponse").responses)

    def tree_pages(self, root, page_size: int = 0, token: str = "", **fields) -> list:
        request = message("GetTreeRequest")(root_digest=root, page_size=page_size, page_token=token, **fields)
        decode = message("GetTreeResponse").FromString
        call = self.channel.unary_stream(f"{CAS}/GetTree", type(request).SerializeToString, decode)
        return list(call(request, **self._options({})))

    def put(self, data: bytes):
        """Stores `data` the short way and returns its digest."""
        key = digest_of(data)
        if len(data) <= 1 << 20:
            (response,) = self.batch_update([(key, data)])
            assert response.status.code == 0, response.status
        else:
            self.write(upload_name(key.hash, len(data)), [data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20)])
        return key

    # ByteStream

    def read_call(self, name: str, offset: int = 0, limit: int = 0, **options):
        request = message("google.bytestream.ReadRequest")(resource_name=name, read_offset=offset, read_limit=limit)
        decode = message("google.bytestream.ReadResponse").FromString
        call = self.channel.unary_stream(f"{BYTE_STREAM}/Read", type(request).SerializeToString, decode)
        return call(request, **self._options(options))

    def read(self, name: str, offset: int = 0, limit: int = 0, **options) -> bytes:
        return b"".join(reply.data for reply in self.read_call(name, offset, limit, **options))

    def write_call(self, requests, **options):
        encode = message("google.bytestream.WriteRequest").SerializeToString
        decode = message("google.bytestream.WriteResponse").FromString
        call = self.channel.stream_unary(f"{BYTE_STREAM}/Write", encode, decode)
        return call(requests, **self._options(options))

    def start_write(self, requests, **options):
        """The same, without waiting for it: a future."""
        encode = message("google.bytestream.WriteRequest").SerializeToString
        decode = message("google.bytestream.WriteResponse").FromString
        call = self.channel.stream_unary(f"{BYTE_STREAM}/Write", encode, decode)
        return call.future(requests, **self._options(options))

    def write(self, name: str, pieces, offset: int = 0, finish: bool = True, **options) -> int:
        """Uploads `pieces` and returns committed_size."""
        return self.write_call(write_requests(name, pieces, offset, finish), **options).committed_size

    def write_status(self, name: str):
        request = message("google.bytestream.QueryWriteStatusRequest")(resource_name=name)
        reply = "google.bytestream.QueryWriteStatusResponse"
        return self.unary(f"{BYTE_STREAM}/QueryWriteStatus", request, reply)

    # ActionCache

    def get_action(self, action, **fields):
        request = message("GetActionResultRequest")(action_digest=action, **fields)
        return self.unary(f"{ACTION_CACHE}/GetActionResult", request, "ActionResult")

    def update_action(self, action, result, **fields):
        request = message("UpdateActionResultRequest")(action_digest=action, action_result=result, **fields)
        return self.unary(f"{ACTION_CACHE}/UpdateActionResult", request, "ActionResult")


def write_requests(name: str, pieces, offset: int = 0, finish: bool = True, repeat_name: bool = False):
    """The messages of one Write: the name on the first, finish_write on the last."""
    write = message("google.bytestream.WriteRequest")
    first = True
    held = None
    for piece in pieces:
        if held is not None:
            yield held
        held = write(resource_name=name if first or repeat_name else "", write_offset=offset, data=piece)
        first = False
        offset += len(piece)
    if held is None:
        held = write(resource_name=name, write_offset=offset)
    held.finish_write = finish
    yield held
