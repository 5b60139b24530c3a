//! Single blobs: what is put is what is got, in every form.

use bytes::Bytes;
use futures_util::FutureExt as _;

use super::{SplitMix64, collect, digest_of, read, worker};
use crate::limits::FRAME_LEN;
use crate::pure::digest::Hash;
use crate::pure::purge::InstanceTag;
use crate::rt;
use crate::rt::cores::block_on;
use crate::shard::codec::StorageMode;
use crate::shard::disk::{Codec, Key, Kind};
use crate::store::{Accept, ActionKey, Blob, Encoding, Get, Purge, Purpose, Put, PutOutcome, StoreError};

/// Goal: whatever form a blob came in and stands in, a reader gets the bytes that it asked for in a form that it takes.
/// Method: random contents, sizes around the borders, both modes and encodings; random ranges.
#[test]
fn what_was_put_can_be_read_in_every_form() {
    let mut random = SplitMix64::seeded();
    block_on(async move {
        for mode in [StorageMode::Zstd, StorageMode::Uncompressed] {
            let (worker, _) = worker(mode);
            for _ in 0..60 {
                let len = random.len();
                let data = random.content(len);
                let digest = digest_of(&data);
                let (encoding, body) = match random.below(2) {
                    0 => (Encoding::Identity, data.clone()),
                    _ => (Encoding::Zstd, random.zstd(&data)),
                };
                let put = Put { digest, encoding, data: random.cut(&body, 3), admitted: false };
                assert_eq!(worker.size_of(digest.hash, Purpose::Look).await, Ok(None), "{digest}");
                assert_eq!(worker.put(put).await, Ok(PutOutcome::Stored), "{digest}");
                assert_eq!(worker.size_of(digest.hash, Purpose::Look).await, Ok(Some(digest.size)), "{digest}");
                for accept in [Accept::Identity, Accept::Zstd, Accept::Any] {
                    for offset in [0, random.below(digest.size + 1), digest.size] {
                        let limit = (accept == Accept::Identity && random.below(2) == 0).then(|| random.below(300_000));
                        let get = Get { digest, offset, limit, accept };
                        let (form, raw) = read(&worker, get).await.expect("present");
                        let end = (offset + limit.unwrap_or(u64::MAX - offset)).min(digest.size) as usize;
                        assert!(raw == data[offset as usize..end], "{get:?}");
                        match accept {
                            Accept::Identity => assert_eq!(form, Encoding::Identity),
                            Accept::Zstd => assert_eq!(form, Encoding::Zstd),
                            Accept::Any => {}
                        }
                    }
                }
            }
            assert!(worker.stats().ram.hits > 0);
            worker.stop().await;
        }
    });
}

/// Goal: only what the digest names is stored. Method: each way in which a body can be wrong, small and large, in both
/// encodings; nothing may be found afterwards and no frame may be left behind.
#[test]
fn a_wrong_body_is_refused() {
    let mut random = SplitMix64::seeded();
    block_on(async move {
        let (worker, disk) = worker(StorageMode::Zstd);
        for len in [1000, 3 * FRAME_LEN + 5] {
            let data = random.content(len);
            let digest = digest_of(&data);
            for encoding in [Encoding::Identity, Encoding::Zstd] {
                let encode = |raw: &[u8]| match encoding {
                    Encoding::Identity => raw.to_vec(),
                    Encoding::Zstd => super::codecs().frame_of(raw),
                };
                let put =
                    |body: Vec<u8>| worker.put(Put { digest, encoding, data: vec![body.into()], admitted: false });
                let mut flipped = data.to_vec();
                flipped[len / 2] ^= 1;
                let error = put(encode(&flipped)).await.expect_err("another hash");
                assert!(matches!(error, StoreError::HashMismatch { .. }), "{error}");
                let longer = [&data[..], b"x"].concat();
                assert_eq!(put(encode(&longer)).await, Err(StoreError::TooLong { expected: digest }));
                let shorter = StoreError::TooShort { expected: digest, actual: len as u64 - 1 };
                assert_eq!(put(encode(&data[1..])).await, Err(shorter));
                if encoding == Encoding::Zstd {
                    let mut cut = encode(&data);
                    cut.pop();
                    let error = put(cut).await.expect_err("a frame without its end");
                    assert!(matches!(error, StoreError::BadZstd { .. }), "{error}");
                    let error = put(data.to_vec()).await.expect_err("no zstd at all");
                    assert!(matches!(error, StoreError::BadZstd { .. }), "{error}");
                }
            }
            assert_eq!(worker.find_missing(&[digest], None).await, [true]);
        }
        disk.with(|state| {
            assert_eq!((state.frames_in_flight, state.small.len(), state.large.len()), (0, 0, 0));
        });
    });
}

/// Goal: a present blob is answered without a look at the body, a too large one before anything else. Method: bodies that
/// would be refused.
#[test]
fn presence_and_size_come_before_the_body() {
    block_on(async {
        let (worker, disk) = worker(StorageMode::Zstd);
        let data = Bytes::from_static(b"a small blob");
        let digest = digest_of(&data);
        let put = |body: &'static [u8]| {
            worker.put(Put {
                digest,
                encoding: Encoding::Identity,
                data: vec![Bytes::from_static(body)],
                admitted: false,
            })
        };
        assert_eq!(put(b"a small blob").await, Ok(PutOutcome::Stored));
        assert_eq!(put(b"nonsense").await, Ok(PutOutcome::AlreadyPresent));
        disk.with(|state| state.max_blob_len = 5);
        assert_eq!(put(b"nonsense").await, Err(StoreError::BlobTooLarge { digest, max: 5 }));
        assert_eq!(worker.find_missing(&[digest, digest_of(b"another")], None).await, [false, true]);
    });
}

/// Goal: blobs stand compressed where that pays and only there, and a client's good frame is kept as it is. Method: look
/// at the records.
#[test]
fn the_form_at_rest_is_the_one_that_pays() {
    block_on(async {
        let (worker, disk) = worker(StorageMode::Zstd);
        let codec = |data: &Bytes| {
            let digest = digest_of(data);
            let key = Key { kind: Kind::Cas, hash: digest.hash, size: digest.size };
            disk.with(|state| state.small.get(&key).map(|record| (record.codec, record.data.clone())))
        };
        let put = async |data: &Bytes, body: Bytes, encoding| {
            worker
                .put(Put { digest: digest_of(data), encoding, data: vec![body], admitted: false })
                .await
                .expect("stored");
        };
        let even = Bytes::from(vec![7; 5000]);
        put(&even, even.clone(), Encoding::Identity).await;
        assert_eq!(codec(&even).map(|(codec, _)| codec), Some(Codec::Zstd));
        let tiny = Bytes::from(vec![7; 100]);
        put(&tiny, tiny.clone(), Encoding::Identity).await;
        assert_eq!(codec(&tiny).map(|(codec, _)| codec), Some(Codec::Raw));
        let noise = SplitMix64(1).noise(5000);
        put(&noise, super::codecs().frame_of(&noise).into(), Encoding::Zstd).await;
        assert_eq!(codec(&noise), Some((Codec::Raw, noise)));
        let other = Bytes::from(vec![9; 6000]);
        let frame = Bytes::from(super::codecs().frame_of(&other));
        put(&other, frame.clone(), Encoding::Zstd).await;
        assert_eq!(codec(&other), Some((Codec::Zstd, frame)));
    });
}

/// Goal: damage costs the blob and nothing else, and no wrong byte is sent. Method: damage in the first frame is a miss,
/// in a later one the stream ends there with `Lost`.
#[test]
fn damage_is_a_miss_or_ends_the_stream() {
    let mut random = SplitMix64::seeded();
    block_on(async move {
        for mode in [StorageMode::Zstd, StorageMode::Uncompressed] {
            let (worker, disk) = worker(mode);
            let data = random.content(5 * FRAME_LEN);
            let digest = digest_of(&data);
            let put = Put { digest, encoding: Encoding::Identity, data: vec![data.clone()], admitted: false };
            assert_eq!(worker.put(put).await, Ok(PutOutcome::Stored));
            let get = Get { digest, offset: 0, limit: None, accept: Accept::Identity };
            disk.with(|state| state.damaged_frame = Some(0));
            assert!(worker.get(get).await.expect("a miss is no error").is_none());
            disk.with(|state| state.damaged_frame = Some(3));
            let Some(Blob::Stream(mut stream)) = worker.get(get).await.expect("the first frame is good") else {
                panic!("a blob of several frames is a stream");
            };
            let mut sent = Vec::new();
            let end = loop {
                match stream.pieces.recv().await {
                    Some(Ok(piece)) => sent.extend_from_slice(&piece),
                    end => break end,
                }
            };
            assert!(sent == data[..3 * FRAME_LEN]);
            assert_eq!(end, Some(Err(StoreError::Lost { digest })));
            assert_eq!(stream.pieces.recv().await, None);
            // Bytes that pass their checksum but are no zstd.
            let key = Key { kind: Kind::Cas, hash: digest.hash, size: digest.size };
            disk.with(|state| {
                let nonsense = vec![(Codec::Zstd, Bytes::from_static(b"nonsense")); 5];
                state.damaged_frame = None;
                state.large.insert(key, std::rc::Rc::new(nonsense));
            });
            assert!(worker.get(get).await.expect("a miss is no error").is_none());
            assert_eq!(disk.with(|state| state.damaged.clone()), [key]);
        }
    });
}

/// Goal: a reader that goes away ends its stream, and one that stands still costs a few frames. Method: drop a stream, and
/// count tasks.
#[test]
fn a_dropped_stream_ends() {
    block_on(async {
        let (worker, _) = worker(StorageMode::Uncompressed);
        let data = SplitMix64(5).content(20 * FRAME_LEN);
        let digest = digest_of(&data);
        worker
            .put(Put { digest, encoding: Encoding::Identity, data: vec![data], admitted: false })
            .await
            .expect("stored");
        let get = Get { digest, offset: 0, limit: None, accept: Accept::Any };
        let blob = worker.get(get).await.expect("no error").expect("present");
        assert_eq!(worker.stats().tasks, 1);
        drop(blob);
        rt::time::timeout(std::time::Duration::from_secs(10), worker.stop()).await.expect("the stream has ended");
        assert!(matches!(worker.get(get).await, Err(StoreError::Stopping)));
    });
}

/// Goal: an action is replaced and dropped by version, and its size matters only where both are known. Method: one
/// action, step by step, from RAM and from disk.
#[test]
fn actions_are_replaced_and_dropped_by_version() {
    for ram_bytes in [0, 1 << 20] {
        block_on(async move {
            let (_, disk) = worker(StorageMode::Zstd);
            let config = super::worker_config(StorageMode::Zstd, ram_bytes);
            let worker = super::Worker::new(disk.clone(), config);
            let hash = Hash([3; 32]);
            let sized = |size| ActionKey { hash, size };
            assert!(worker.action_get(sized(None)).await.expect("no error").is_none());
            worker
                .action_put(sized(Some(40)), Bytes::from_static(b"first"), InstanceTag::UNKNOWN)
                .await
                .expect("stored");
            let first = worker.action_get(sized(Some(40))).await.expect("no error").expect("present");
            assert_eq!(&first.data[..], b"first");
            assert!(worker.action_get(sized(None)).await.expect("no error").is_some());
            assert!(worker.action_get(sized(Some(41))).await.expect("no error").is_none());
            worker.action_put(sized(None), Bytes::from_static(b"second"), InstanceTag::UNKNOWN).await.expect("stored");
            worker.action_drop(sized(None), first.version).await.expect("no error");
            let second = worker.action_get(sized(Some(41))).await.expect("no error").expect("another version stays");
            assert_eq!(&second.data[..], b"second");
            worker.action_drop(sized(None), second.version).await.expect("no error");
            assert!(worker.action_get(sized(None)).await.expect("no error").is_none());
        });
    }
}

/// Goal: the RAM tier never answers with an older action than the disk holds. Method: writers and readers of one action
/// interleaved at every await by a disk that is slow by chance; when all are done, RAM and disk must agree.
#[test]
fn ram_and_disk_agree_on_actions() {
    let mut random = SplitMix64::seeded();
    block_on(async move {
        let (worker, disk) = worker(StorageMode::Zstd);
        disk.with(|state| (state.slow, state.uneven) = (true, Some(SplitMix64(random.word()))));
        let key = ActionKey { hash: Hash([9; 32]), size: None };
        for _ in 0..100 {
            let gate = rt::gate::Gate::default();
            for _ in 0..6 {
                let (worker, word) = (worker.clone(), random.word());
                gate.spawn(async move {
                    for _ in 0..word % 4 {
                        rt::time::yield_once().await;
                    }
                    match word >> 32 & 3 {
                        0 | 1 => drop(worker.action_get(key).await),
                        2 => worker
                            .action_put(key, Bytes::copy_from_slice(&word.to_le_bytes()), InstanceTag::UNKNOWN)
                            .await
                            .expect("stored"),
                        _ => {
                            if let Ok(Some(entry)) = worker.action_get(key).await {
                                worker.action_drop(key, entry.version).await.expect("no error");
                            }
                        }
                    }
                });
            }
            gate.wait_empty().await;
            let found = worker.action_get(key).await.expect("no error");
            let stored = disk.with(|state| state.small.values().next().map(|record| record.version));
            assert_eq!(found.map(|entry| entry.version), stored);
        }
    });
}

/// Goal: a change of an action that is given up when it is on the disk already leaves nothing older in RAM. Method: a read finds
/// the action before that, and ends after it.
#[test]
fn a_change_that_is_given_up_counts() {
    block_on(async {
        let (worker, disk) = worker(StorageMode::Uncompressed);
        let key = ActionKey { hash: Hash([7; 32]), size: None };
        let put = |data: &'static [u8]| worker.action_put(key, Bytes::from_static(data), InstanceTag::UNKNOWN);
        put(b"first").await.expect("stored");
        disk.with(|disk| disk.slow = true);
        let (mut change, mut read) = (Box::pin(put(b"second")), Box::pin(worker.action_get(key)));
        assert!((&mut change).now_or_never().is_none() && (&mut read).now_or_never().is_none());
        assert!((&mut change).now_or_never().is_none());
        drop(change);
        let read = read.await.expect("no error").expect("present");
        assert_eq!((&read.data[..], disk.with(|disk| disk.small.len())), (&b"first"[..], 1));
        let now = worker.action_get(key).await.expect("no error").expect("present");
        assert_eq!(now.data, "second");
    });
}

/// Goal: what is purged is gone from RAM at once, and what there was is told. Method: a blob and an action, purged twice.
#[test]
fn a_purge_empties_ram() {
    block_on(async {
        let (worker, _) = worker(StorageMode::Uncompressed);
        let data = Bytes::from_static(b"a blob");
        let digest = digest_of(&data);
        let put = Put { digest, encoding: Encoding::Identity, data: vec![data], admitted: false };
        worker.put(put).await.expect("stored");
        let key = ActionKey { hash: Hash([7; 32]), size: None };
        worker.action_put(key, Bytes::from_static(b"an action"), InstanceTag::UNKNOWN).await.expect("stored");
        assert_eq!(worker.stats().ram.entries, 2);
        for expected in [1, 0] {
            for purge in [Purge::Blob(digest.hash), Purge::Action(key.hash)] {
                assert_eq!(worker.purge(purge).await.expect("purged").purged, expected);
            }
            assert_eq!(worker.stats().ram.entries, 0);
        }
    });
}

/// Goal: RAM serves nothing that the disk no longer has. Method: a blob and an action are put, read and then taken from the
/// disk, as an eviction does.
#[test]
fn ram_does_not_outlive_the_disk() {
    block_on(async {
        let (worker, disk) = worker(StorageMode::Uncompressed);
        let digest = digest_of(b"a small blob");
        let put = || Put {
            digest,
            encoding: Encoding::Identity,
            data: vec![Bytes::from_static(b"a small blob")],
            admitted: true,
        };
        let key = ActionKey { hash: Hash([9; 32]), size: None };
        for _ in 0..2 {
            assert_eq!(worker.put(put()).await, Ok(PutOutcome::Stored));
            worker.action_put(key, Bytes::from_static(b"an action"), InstanceTag::UNKNOWN).await.expect("stored");
            let reads = disk.with(|state| state.reads);
            assert!(worker.get(Get::whole(digest, Accept::Identity)).await.expect("no error").is_some());
            assert!(worker.action_get(key).await.expect("no error").is_some());
            assert_eq!(disk.with(|state| state.reads), reads, "served from RAM");
            disk.with(|state| state.small.clear());
            assert_eq!(worker.find_missing(&[digest], None).await, [true]);
            assert!(worker.get(Get::whole(digest, Accept::Identity)).await.expect("no error").is_none());
            assert!(worker.action_get(key).await.expect("no error").is_none());
            assert_eq!(worker.stats().ram.entries, 0);
        }
    });
}

/// Goal: a read that is no longer than one message needs no stream. Method: ranges within a frame, across some, and across more
/// than are read at once.
#[test]
fn a_short_range_comes_whole() {
    block_on(async {
        let (worker, _) = worker(StorageMode::Uncompressed);
        let data = SplitMix64(6).content(6 * FRAME_LEN);
        let digest = digest_of(&data);
        worker
            .put(Put { digest, encoding: Encoding::Identity, data: vec![data.clone()], admitted: false })
            .await
            .expect("stored");
        let offset = FRAME_LEN as u64 + 10;
        for (frames, more, is_whole) in
            [(0, 20, true), (1, 0, true), (3, 0, true), (3, 20, true), (4, 0, false), (4, 20, false)]
        {
            let limit = frames * FRAME_LEN as u64 + more;
            let get = Get { digest, offset, limit: Some(limit), accept: Accept::Identity };
            let blob = worker.get(get).await.expect("no error").expect("present");
            assert_eq!(matches!(blob, Blob::Whole { .. }), is_whole);
            let (_, raw) = collect(blob).await.expect("no error");
            assert!(raw == data[offset as usize..(offset + limit) as usize]);
        }
    });
}
