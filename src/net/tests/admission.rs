//! The gate before writes, through the network side and the real owner of the blobs, over a disk in memory.

use super::*;
use crate::budget::Purse;
use crate::limits;
use crate::pure::shard_map::ShardMap;
use crate::shard::codec::StorageMode;
use crate::shard::fake_disk::FakeDisk;
use crate::shard::router::{Router, wire};
use crate::shard::standing::StandingPurges;
use crate::shard::worker::{Worker, WorkerConfig};
use crate::shard::write_gate::{WriteLimits, WriteStats};
use crate::store::fake::digest_of;
use crate::wire::reapi::{
    BatchUpdateBlobsRequest, BatchUpdateBlobsResponse, Digest as WireDigest, batch_update_blobs_request,
};

const BATCH_UPDATE: &str = "/build.bazel.remote.execution.v2.ContentAddressableStorage/BatchUpdateBlobs";
/// Times that each path is taken.
const TIMES: u64 = 1000;
/// Calls at a time.
const TOGETHER: u64 = 50;

type Gated = Harness<Router<FakeDisk>>;

/// A server whose core lets `slots` writes in at a time.
fn with_gate(slots: u32, wait: Duration, test: impl AsyncFnOnce(&Gated, FakeDisk)) {
    block_on(async {
        let disk = FakeDisk::default();
        let config = WorkerConfig {
            mode: StorageMode::Zstd,
            ram_bytes: 0,
            purse: Purse::alone(1 << 40),
            parked_bytes: 16 << 20,
            core: 0,
            cores: 1,
            writes: WriteLimits::new(slots, wait),
            standing: StandingPurges::default(),
        };
        let worker = Worker::new(disk.clone(), config);
        let store = wire(1).pop().expect("one core").start(worker, ShardMap::new(64, 1));
        with_store(store, settings(), Options::default(), async |harness: &Gated| test(harness, disk).await).await;
    });
}

impl Gated {
    fn gate(&self) -> WriteStats {
        self.store.worker().stats().writes
    }

    async fn until_free(&self, path: &str) {
        self.until(path, || self.gate().in_flight == 0).await;
        assert_eq!(self.gate().waiting, 0, "{path}");
    }
}

/// One of many blobs: small ones are stored in one go, large ones in frames.
fn blob(number: u64, large: bool) -> Vec<u8> {
    let mut blob = number.to_le_bytes().to_vec();
    blob.resize(if large { limits::SMALL_BLOB_LEN_MAX + 1 } else { 100 }, 0);
    blob
}

/// How a write is made to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    Stored,
    WrongHash,
    /// In a blob that is here as a whole, and in one that comes piece by piece.
    BadZstd,
    DecoderError,
    DiskError,
    Panic,
    Timeout,
    Cancel,
    Disconnect,
}

/// The whole body of a write, with what makes it fail in it.
fn body(path: Path, number: u64, large: bool) -> Bytes {
    let blob = blob(number, large);
    let mut digest = digest_of(&blob);
    if path == Path::WrongHash {
        digest.hash.0[9] ^= 1;
    }
    let name =
        if matches!(path, Path::BadZstd | Path::DecoderError) { zstd_write_name(digest) } else { write_name(digest) };
    // Why the number: an upload's name is its own.
    let name = name.replace(UUID, &format!("{path:?}-{number}"));
    frames(&upload(&name, &blob, 16 << 10, 0))
}

/// Goal: a slot comes back on every path that a write can take. Method: each path 1,000 times, with blobs of both kinds
/// and 50 writes at a time; where a write is cut off, it is so while it holds its slot.
#[test]
fn slots_come_back_on_every_path() {
    with_gate(10_000, Duration::ZERO, async |harness, disk| {
        let mut number = 0;
        for path in [
            Path::Stored,
            Path::WrongHash,
            Path::BadZstd,
            Path::DecoderError,
            Path::DiskError,
            Path::Panic,
            Path::Timeout,
            Path::Cancel,
            Path::Disconnect,
        ] {
            let before = harness.gate().admitted;
            // Why one at a time: h2's client trips over what an early answer has kept it from sending.
            let together = if path == Path::DecoderError { 1 } else { TOGETHER };
            for _ in 0..TIMES / together {
                let mut client = harness.connect().await;
                let mut calls = Vec::new();
                for _ in 0..together {
                    number += 1;
                    let cut_off = matches!(path, Path::Timeout | Path::Cancel | Path::Disconnect);
                    let large = match path {
                        Path::Stored | Path::WrongHash | Path::DiskError | Path::Panic => number % 2 == 0,
                        Path::BadZstd => false,
                        Path::DecoderError | Path::Timeout | Path::Cancel | Path::Disconnect => true,
                    };
                    match path {
                        Path::DiskError if large => disk.with(|state| state.no_space += 1),
                        Path::DiskError => disk.with(|state| state.append_fails += 1),
                        Path::Panic => disk.with(|state| state.panics += 1),
                        _ => {}
                    }
                    let headers: &[_] = if path == Path::Timeout { &[("grpc-timeout", "100m")] } else { &[] };
                    let mut call = client.start(WRITE, headers).await;
                    let body = body(path, number, large);
                    let sent = match path {
                        Path::DecoderError => body.slice(..limits::UPLOAD_MESSAGE_LEN + 1000),
                        _ if cut_off => body.slice(..6000),
                        _ => body.clone(),
                    };
                    let is_whole = sent.len() == body.len();
                    call.send(sent, is_whole);
                    calls.push(call);
                }
                match path {
                    Path::Cancel | Path::Disconnect => {
                        let held = || harness.gate().in_flight == together;
                        harness.until("all have a slot", held).await;
                    }
                    _ => {}
                }
                for mut call in calls {
                    let expected = match path {
                        Path::Stored => Code::Ok,
                        Path::WrongHash | Path::BadZstd | Path::DecoderError => Code::InvalidArgument,
                        Path::DiskError => {
                            let answer = call.answer().await;
                            assert!([Code::Internal as u8, Code::ResourceExhausted as u8].contains(&answer.code()));
                            continue;
                        }
                        Path::Panic => Code::Internal,
                        Path::Timeout => Code::DeadlineExceeded,
                        Path::Cancel => {
                            call.stream.send_reset(Reason::CANCEL);
                            continue;
                        }
                        Path::Disconnect => continue,
                    };
                    call.answer().await.expect(expected, "");
                }
                drop(client);
                harness.until_free(&format!("{path:?} gives its slots back")).await;
            }
            let admitted = harness.gate().admitted - before;
            // A slow machine lets some deadlines pass before their calls are let in.
            let fewest = if path == Path::Timeout { TIMES / 2 } else { TIMES };
            assert!((fewest..=TIMES).contains(&admitted), "{path:?}: {admitted}");
        }
        let WriteStats { shed_late, shed_queue_full, .. } = harness.gate();
        assert_eq!((shed_late, shed_queue_full, disk.with(|state| state.frames_in_flight)), (0, 0, 0));
    });
}

/// Goal: a write that is not let in ends at once with what suits its client, leaves nothing, and its bytes are not pulled
/// in; a write of a blob that is present, a read, and the rest of the connection are not touched. Method: one slot, held
/// by an upload that is half sent; then each kind of call; then the slot comes back.
#[test]
fn refused_writes_leave_nothing() {
    with_gate(1, Duration::ZERO, async |harness, disk| {
        let mut client = harness.connect().await;
        let here = blob(1, false);
        client.write(&upload(&write_name(digest_of(&here)), &here, 100, 0)).await.expect(Code::Ok, "");
        let large = blob(2, true);
        let messages = frames(&upload(&write_name(digest_of(&large)), &large, 16 << 10, 0));
        let mut holder = client.start(WRITE, &[]).await;
        holder.send(messages.slice(..100_000), false);
        harness.until("it has the slot", || harness.gate().in_flight == 1).await;

        for large in [false, true] {
            let refused = blob(3, large);
            let name = write_name(digest_of(&refused));
            let mut call = client.start(WRITE, &[]).await;
            // Without its end: who is refused is told before.
            let body = frames(&upload(&name, &refused, 16 << 10, 0));
            call.send(if large { body.slice(..50_000) } else { body }, !large);
            let answer = call.answer().await;
            answer.expect(Code::FailedPrecondition, "--max_inflight_cas_writes");
            assert_eq!(answer.reset, None, "the status came whole");
            let read = client.read(&read_name(digest_of(&refused)), 0, 0).await;
            read.expect(Code::NotFound, "");
        }
        let casd = [("user-agent", "grpc-c++/1.60 grpc-c/37 (linux; chttp2)")];
        let other = blob(4, false);
        let body = frames(&upload(&write_name(digest_of(&other)), &other, 100, 0));
        client.call_with(WRITE, &casd, body).await.expect(Code::ResourceExhausted, "");

        client.write(&upload(&write_name(digest_of(&here)), &here, 100, 0)).await.expect(Code::Ok, "");
        client.read(&read_name(digest_of(&here)), 0, 0).await.expect(Code::Ok, "");
        let item = |data: &[u8]| {
            let digest = digest_of(data);
            let digest = WireDigest { hash: digest.hash.to_hex(), size_bytes: digest.size as i64 };
            batch_update_blobs_request::Request {
                digest: Some(digest),
                data: Bytes::copy_from_slice(data),
                ..Default::default()
            }
        };
        let requests = vec![item(&here), item(&other)];
        let answer =
            client.call(BATCH_UPDATE, frame(&BatchUpdateBlobsRequest { requests, ..Default::default() })).await;
        let response: BatchUpdateBlobsResponse = answer.message();
        let codes: Vec<i32> = response.responses.iter().map(|one| one.status.as_ref().expect("set").code).collect();
        assert_eq!(codes, [0, Code::FailedPrecondition as i32]);

        assert_eq!(harness.gate().in_flight, 1);
        holder.send(messages.slice(100_000..), true);
        holder.answer().await.expect(Code::Ok, "");
        client.write(&upload(&write_name(digest_of(&other)), &other, 100, 0)).await.expect(Code::Ok, "");
        assert_eq!((harness.gate().in_flight, harness.gate().shed_late), (0, 4));
        assert_eq!(disk.with(|state| (state.small.len(), state.large.len())), (2, 1));
    });
}

/// Goal: a write waits its turn, and one that goes away leaves the queue. Method: one slot, held; three writes wait, the
/// first is cancelled; the slot comes back.
#[test]
fn waiting_writes_get_their_turn_or_leave() {
    with_gate(1, Duration::from_secs(50), async |harness, _| {
        let mut client = harness.connect().await;
        let large = blob(1, true);
        let messages = frames(&upload(&write_name(digest_of(&large)), &large, 16 << 10, 0));
        let mut holder = client.start(WRITE, &[]).await;
        holder.send(messages.slice(..100_000), false);
        harness.until("it has the slot", || harness.gate().in_flight == 1).await;
        let mut calls = Vec::new();
        for number in 2..5 {
            let blob = blob(number, false);
            let mut call = client.start(WRITE, &[]).await;
            call.send(frames(&upload(&write_name(digest_of(&blob)), &blob, 100, 0)), true);
            calls.push(call);
            harness.until("it waits", || harness.gate().waiting == number - 1).await;
        }
        calls.remove(0).stream.send_reset(Reason::CANCEL);
        harness.until("it has left", || harness.gate().waiting == 2).await;
        holder.send(messages.slice(100_000..), true);
        holder.answer().await.expect(Code::Ok, "");
        for call in calls {
            call.answer().await.expect(Code::Ok, "");
        }
        let WriteStats { in_flight, waiting, admitted, admitted_late, .. } = harness.gate();
        assert_eq!((in_flight, waiting, admitted, admitted_late), (0, 0, 3, 2));
    });
}
