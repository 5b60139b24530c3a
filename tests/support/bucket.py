"""A bucket as a second client of the store sees it: own signer, so that nothing is checked with what is under test."""

import datetime
import hashlib
import hmac
import http.client
import pathlib
import shutil
import struct
import subprocess
import urllib.parse

import zstandard

CHUNK = 1 << 20


class Bucket:
    """Requests to one bucket, addressed in the path."""

    def __init__(self, address: str, name: str, key: str, secret: str):
        self.address, self.name, self.key, self.secret = address, name, key, secret
        # How far the store's clock is ahead.
        self.skew_s = 0

    def request(self, method: str, key: str = "", body: bytes = b"", query: str = "") -> tuple[int, bytes]:
        now = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=self.skew_s)
        date, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        path = urllib.parse.quote(f"/{self.name}/{key}" if key else f"/{self.name}", safe="/-._~")
        payload = hashlib.sha256(body).hexdigest()
        headers = {"host": self.address, "x-amz-content-sha256": payload, "x-amz-date": date}
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{payload}"
        scope = f"{day}/us-east-1/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signer = f"AWS4{self.secret}".encode()
        for part in [day, "us-east-1", "s3", "aws4_request"]:
            signer = hmac.digest(signer, part.encode(), "sha256")
        signature = hmac.digest(signer, text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self.key}/{scope},SignedHeaders={names},Signature={signature}"
        )
        connection = http.client.HTTPConnection(self.address, timeout=30)
        try:
            connection.request(method, path + (f"?{query}" if query else ""), body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def create(self) -> None:
        status, text = self.request("PUT")
        assert status == 200, (status, text)

    def put(self, key: str, data: bytes) -> None:
        status, text = self.request("PUT", key, data)
        assert status == 200, (status, text)

    def get(self, key: str) -> bytes | None:
        """The object; None when there is none."""
        status, data = self.request("GET", key)
        assert status in (200, 404), (status, data)
        return data if status == 200 else None

    def has(self, key: str) -> bool:
        return self.request("HEAD", key)[0] == 200


def blob_key(hash: str, raw: bool = False) -> str:
    return f"{'cas' if raw else 'cas.v2'}/{hash[:2]}/{hash}"


def action_key(hash: str) -> str:
    return f"ac/{hash[:2]}/{hash}"


def casblob(data: bytes, compression: int = 1) -> bytes:
    """`data` as bazel-remote stores it: independent frames of 1 MiB behind a table of offsets."""
    pieces = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)] if compression else [data]
    frames = [zstandard.compress(piece, 1) if compression else piece for piece in pieces]
    entries = len(frames) + 1
    offset = 29 + 8 * entries
    table = [offset]
    for frame in frames:
        offset += len(frame)
        table.append(offset)
    head = struct.pack("<IIqBIq", 0x184D2A50, 21 + 8 * entries, len(data), compression, CHUNK, entries)
    return head + struct.pack(f"<{entries}q", *table) + b"".join(frames)


def from_casblob(blob: bytes) -> bytes:
    """The content, read as bazel-remote does: every check of its header, then every chunk through the table."""
    magic, frame, size, compression, chunk, entries = struct.unpack_from("<IIqBIq", blob)
    assert magic == 0x184D2A50 and frame == 21 + 8 * entries and size > 0 and compression in (0, 1)
    table = struct.unpack_from(f"<{entries}q", blob, 29)
    assert table[0] == 29 + 8 * entries and table[-1] == len(blob) and list(table) == sorted(set(table))
    pieces = [blob[start:end] for start, end in zip(table, table[1:])]
    if compression:
        assert len(pieces) == -(-size // chunk)
        pieces = [zstandard.ZstdDecompressor().decompressobj().decompress(piece) for piece in pieces]
        assert all(len(piece) == chunk for piece in pieces[:-1])
    data = b"".join(pieces)
    assert len(data) == size
    return data


class StoreProcess:
    """An S3 store that runs as a process of ours, with one identity. Ends only that process."""

    key: str
    secret: str
    home: pathlib.Path
    address: str
    process: subprocess.Popen

    def bucket(self, name: str) -> Bucket:
        return Bucket(self.address, name, self.key, self.secret)

    def flags(self, bucket: str) -> dict:
        """What the server needs to use a bucket here."""
        return {
            "s3.endpoint": self.address,
            "s3.bucket": bucket,
            "s3.disable_ssl": "true",
            "s3.auth_method": "access_key",
            "s3.access_key_id": self.key,
            "s3.secret_access_key": self.secret,
        }

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        shutil.rmtree(self.home, ignore_errors=True)
