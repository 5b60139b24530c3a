//! Uploads in pieces: resumed, cut off, taken over, bounded.

use std::time::Duration;

use bytes::Bytes;

use super::{SplitMix64, digest_of, read, worker};
use crate::limits::{FRAME_LEN, PARKED_UPLOADS_MAX, UPLOAD_MESSAGE_LEN};
use crate::pure::digest::Digest;
use crate::rt;
use crate::rt::cores::block_on;
use crate::shard::codec::StorageMode;
use crate::shard::fake_disk::FakeDisk;
use crate::shard::upload::UploadHandle;
use crate::shard::worker::Worker;
use crate::store::{
    Accept, Encoding, Get, Opened, Put, PutOutcome, StoreError, Upload, UploadEnd, UploadKey, UploadStatus,
};

fn key(digest: Digest, encoding: Encoding, uuid: &str) -> UploadKey {
    UploadKey { instance: "main".into(), uuid: uuid.into(), digest, encoding }
}

async fn open(worker: &Worker<FakeDisk>, key: &UploadKey, offset: u64) -> Result<UploadHandle, StoreError> {
    match worker.open_upload(key.clone(), offset).await? {
        Opened::Ready(upload) => Ok(upload),
        Opened::AlreadyPresent => panic!("{} is present", key.digest),
    }
}

/// Waits until the tasks of all dropped handles have ended.
async fn settle(worker: &Worker<FakeDisk>) {
    for _ in 0..10_000 {
        if worker.stats().tasks == 0 {
            return;
        }
        rt::time::yield_to_reactor().await;
    }
    panic!("{} tasks do not end", worker.stats().tasks);
}

/// Asks for the status until the owner has consumed so much: a short write may run ahead of it.
async fn wait_for(worker: &Worker<FakeDisk>, key: &UploadKey, committed: u64) {
    for _ in 0..10_000 {
        if worker.upload_status(key).await.expect("no error").committed == committed {
            return;
        }
        rt::time::yield_once().await;
    }
    panic!("{key:?} does not get to {committed}");
}

/// Goal: an upload cut anywhere, any number of times, and resumed where the server says, ends as one that never was.
/// Method: random contents in random pieces, both encodings and modes; handles dropped at random, the offset asked for.
#[test]
fn a_cut_upload_resumes_where_it_stands() {
    let mut random = SplitMix64::seeded();
    block_on(async move {
        for round in 0..80 {
            let mode = if round % 2 == 0 { StorageMode::Zstd } else { StorageMode::Uncompressed };
            let (worker, disk) = worker(mode);
            let len = random.len();
            let data = random.content(len);
            let digest = digest_of(&data);
            let encoding = if random.below(2) == 0 { Encoding::Identity } else { Encoding::Zstd };
            let key = key(digest, encoding, "u");
            let mut offset = 0;
            let mut cuts_left = random.below(4);
            loop {
                let mut upload = open(&worker, &key, offset).await.expect("the offset is the reported one");
                let rest = data.slice(offset as usize..);
                let body = if encoding == Encoding::Zstd { random.zstd(&rest) } else { rest };
                let pieces = random.cut(&body, 5);
                let kept = if cuts_left > 0 { random.below(5) as usize } else { pieces.len() };
                for piece in &pieces[..kept] {
                    upload.write(random.cut(piece, 2)).await.expect("consumed");
                }
                if cuts_left == 0 {
                    assert_eq!(upload.finish().await, Ok(PutOutcome::Stored), "{key:?}");
                    break;
                }
                cuts_left -= 1;
                let said = match random.below(2) {
                    0 => Some(upload.suspend().await.expect("consumed")),
                    _ => {
                        drop(upload);
                        None
                    }
                };
                if random.below(2) == 0 {
                    settle(&worker).await;
                }
                if let (Some(committed), 0) = (said, random.below(2)) {
                    offset = committed;
                    continue;
                }
                let status = worker.upload_status(&key).await.expect("no error");
                assert!(status.committed >= offset && !status.complete);
                offset = status.committed;
            }
            let get = Get { digest, offset: 0, limit: None, accept: Accept::Identity };
            assert!(read(&worker, get).await.expect("present").1 == data);
            let done = UploadStatus { committed: digest.size, complete: true };
            assert_eq!(worker.upload_status(&key).await, Ok(done));
            settle(&worker).await;
            assert_eq!(disk.with(|state| state.frames_in_flight), 0);
            assert_eq!(worker.stats().parked_uploads, 0);
        }
    });
}

/// Goal: what is said of a name never falls, and whoever goes on there succeeds, also when clients begin anew at 0 beside what
/// was cut off and what still runs. Method: random starts, writes, cuts and resumes of one name by clients that do not know
/// of each other, against the largest number that was said.
#[test]
fn what_is_committed_never_falls() {
    let mut random = SplitMix64::seeded();
    block_on(async move {
        for round in 0..60 {
            let (worker, disk) = worker(StorageMode::Zstd);
            let data = random.content(8 * FRAME_LEN);
            let digest = digest_of(&data);
            let key = key(digest, Encoding::Identity, "u");
            let mut said = 0;
            // Uploads whose clients are there, and where each goes on.
            let mut running: Vec<(UploadHandle, usize)> = Vec::new();
            for _ in 0..40 {
                let chosen = random.below(running.len().max(1) as u64) as usize;
                match random.below(5) {
                    0 if running.len() < 4 => running.push((open(&worker, &key, 0).await.expect("always allowed"), 0)),
                    1 if chosen < running.len() => drop(running.swap_remove(chosen)),
                    2 | 3 if chosen < running.len() => {
                        let (upload, at) = &mut running[chosen];
                        let end = (*at + random.below(2 * FRAME_LEN as u64) as usize).min(data.len() - 1);
                        let written = upload.write(vec![data.slice(*at..end)]).await;
                        *at = end;
                        if let Err(end) = written {
                            assert!(matches!(end, UploadEnd::Failed(StoreError::TakenOver)), "round {round}: {end:?}");
                            running.swap_remove(chosen);
                        }
                    }
                    _ => {
                        let status = worker.upload_status(&key).await.expect("no error");
                        assert!(status.committed >= said, "round {round}: {} after {said}", status.committed);
                        said = status.committed;
                        if said > 0 && running.len() < 4 && random.below(2) == 0 {
                            let resumed = open(&worker, &key, said).await.expect("it was said to be good");
                            running.push((resumed, said as usize));
                        }
                    }
                }
            }
            let at = worker.upload_status(&key).await.expect("no error").committed;
            assert!(at >= said);
            let mut last = open(&worker, &key, at).await.expect("it was said to be good");
            last.write(vec![data.slice(at as usize..)]).await.expect("consumed");
            assert_eq!(last.finish().await, Ok(PutOutcome::Stored));
            drop(running);
            settle(&worker).await;
            let get = Get { digest, offset: 0, limit: None, accept: Accept::Identity };
            assert!(read(&worker, get).await.expect("present").1 == data);
            worker.uploads().clear();
            assert_eq!((worker.stats().parked_uploads, disk.with(|state| state.frames_in_flight)), (0, 0));
        }
    });
}

/// Goal: who begins anew owes nothing to what was there: wrong bytes that were cut off harm nobody, and an upload that has come
/// as far as an older one sets that one's space free. Method: wrong bytes, a cut, all from 0.
#[test]
fn beginning_anew_passes_what_was_there() {
    block_on(async {
        let (worker, _) = worker(StorageMode::Zstd);
        let data = SplitMix64(5).noise(4 * FRAME_LEN);
        let key = key(digest_of(&data), Encoding::Identity, "u");
        let mut wrong = open(&worker, &key, 0).await.expect("new");
        wrong.write(vec![Bytes::from(vec![7; 2 * FRAME_LEN])]).await.expect("consumed");
        assert_eq!(wrong.suspend().await.expect("consumed"), 2 * FRAME_LEN as u64);
        let mut anew = open(&worker, &key, 0).await.expect("always allowed");
        anew.write(vec![data.slice(..FRAME_LEN)]).await.expect("consumed");
        let status = worker.upload_status(&key).await.expect("no error");
        assert_eq!((status.committed, worker.stats().parked_uploads), (2 * FRAME_LEN as u64, 1));
        anew.write(vec![data.slice(FRAME_LEN..3 * FRAME_LEN)]).await.expect("consumed");
        wait_for(&worker, &key, 3 * FRAME_LEN as u64).await;
        assert_eq!(worker.stats().parked_uploads, 0);
        anew.write(vec![data.slice(3 * FRAME_LEN..)]).await.expect("consumed");
        assert_eq!(anew.finish().await, Ok(PutOutcome::Stored));
        // The same, ended without a question in between.
        let data = SplitMix64(6).noise(4 * FRAME_LEN);
        let key = self::key(digest_of(&data), Encoding::Identity, "u");
        let mut wrong = open(&worker, &key, 0).await.expect("new");
        wrong.write(vec![Bytes::from(vec![7; 2 * FRAME_LEN])]).await.expect("consumed");
        wrong.suspend().await.expect("consumed");
        let mut anew = open(&worker, &key, 0).await.expect("always allowed");
        anew.write(vec![data]).await.expect("consumed");
        assert_eq!((anew.finish().await, worker.stats().parked_uploads), (Ok(PutOutcome::Stored), 0));
    });
}

/// Goal: a client that comes back takes the session from its old stream, which learns of it; what the old stream sent in
/// between is skipped. Method: two handles of one key, a status in between.
#[test]
fn coming_back_takes_over() {
    block_on(async {
        for encoding in [Encoding::Identity, Encoding::Zstd] {
            let (worker, _) = worker(StorageMode::Zstd);
            let data = SplitMix64(2).noise(3 * FRAME_LEN + 100);
            let digest = digest_of(&data);
            let key = key(digest, encoding, "u");
            let encode = |raw: Bytes| match encoding {
                Encoding::Identity => raw,
                Encoding::Zstd => super::codecs().frame_of(&raw).into(),
            };
            let mut old = open(&worker, &key, 0).await.expect("new");
            old.write(vec![encode(data.slice(..FRAME_LEN))]).await.expect("consumed");
            let reported = FRAME_LEN as u64;
            wait_for(&worker, &key, reported).await;
            old.write(vec![encode(data.slice(FRAME_LEN..2 * FRAME_LEN))]).await.expect("consumed");
            let mut new = open(&worker, &key, reported).await.expect("the reported offset is good");
            let end = old.write(vec![Bytes::from(vec![0; UPLOAD_MESSAGE_LEN])]).await.expect_err("taken over");
            assert!(matches!(end, UploadEnd::Failed(StoreError::TakenOver)), "{end:?}");
            drop(old);
            new.write(vec![encode(data.slice(reported as usize..))]).await.expect("consumed");
            assert_eq!(new.finish().await, Ok(PutOutcome::Stored));
        }
    });
}

/// Goal: what nobody can resume is not kept. Method: an upload with a name and one without, both cut off.
#[test]
fn only_what_has_a_name_is_parked() {
    block_on(async {
        let (worker, disk) = worker(StorageMode::Zstd);
        let data = SplitMix64(2).noise(3 * FRAME_LEN);
        let digest = digest_of(&data);
        let keys = [UploadKey::unnamed("main", 7, digest, Encoding::Identity), key(digest, Encoding::Identity, "u")];
        for (key, parked) in keys.into_iter().zip([0, 1]) {
            let mut upload = open(&worker, &key, 0).await.expect("new");
            upload.write(vec![data.slice(..2 * FRAME_LEN)]).await.expect("consumed");
            wait_for(&worker, &key, 2 * FRAME_LEN as u64).await;
            drop(upload);
            settle(&worker).await;
            assert_eq!(worker.stats().parked_uploads, parked, "{key:?}");
            assert_eq!(disk.with(|state| state.frames_in_flight) > 0, parked > 0, "{key:?}");
        }
    });
}

/// Goal: only an offset that the server gave is taken. Method: unknown, running and parked sessions, with others.
#[test]
fn a_wrong_offset_is_refused() {
    block_on(async {
        let (worker, _) = worker(StorageMode::Zstd);
        let data = SplitMix64(2).content(200_000);
        let key = key(digest_of(&data), Encoding::Identity, "u");
        let refused = |given, committed| Some(StoreError::WriteOffset { given, committed });
        assert_eq!(open(&worker, &key, 7).await.err(), refused(7, 0));
        let mut upload = open(&worker, &key, 0).await.expect("new");
        upload.write(vec![data.slice(..100_000)]).await.expect("consumed");
        wait_for(&worker, &key, 100_000).await;
        assert_eq!(open(&worker, &key, 99_999).await.err(), refused(99_999, 100_000));
        drop(upload);
        settle(&worker).await;
        assert_eq!(worker.stats().parked_uploads, 1);
        assert_eq!(open(&worker, &key, 100_001).await.err(), refused(100_001, 100_000));
        assert_eq!(worker.stats().parked_uploads, 1);
        // Starting anew leaves the parked one where it is, and frees it in the end.
        let mut upload = open(&worker, &key, 0).await.expect("new");
        assert_eq!(worker.stats().parked_uploads, 1);
        assert_eq!(open(&worker, &key, 99_999).await.err(), refused(99_999, 100_000));
        upload.write(vec![data]).await.expect("consumed");
        assert_eq!(upload.finish().await, Ok(PutOutcome::Stored));
        assert_eq!(worker.stats().parked_uploads, 0);
    });
}

/// Goal: starting anew leaves a running stream of the same name alone; whoever is first stores, the other finds it there.
/// Method: two handles of one key, both sent in full.
#[test]
fn two_uploads_of_one_blob_both_end_well() {
    block_on(async {
        for len in [500, 2 * FRAME_LEN + 1] {
            let (worker, disk) = worker(StorageMode::Zstd);
            let data = SplitMix64(4).content(len);
            let key = key(digest_of(&data), Encoding::Identity, "u");
            let mut uploads = Vec::new();
            for _ in 0..3 {
                let mut upload = open(&worker, &key, 0).await.expect("new");
                upload.write(vec![data.slice(..len / 2)]).await.expect("consumed");
                uploads.push(upload);
            }
            let mut late = uploads.pop().expect("three");
            for upload in &mut uploads {
                upload.write(vec![data.slice(len / 2..)]).await.expect("consumed");
            }
            let mut outcomes = Vec::new();
            for upload in uploads {
                outcomes.push(upload.finish().await);
            }
            assert_eq!(outcomes, [Ok(PutOutcome::Stored), Ok(PutOutcome::AlreadyPresent)]);
            let end = late.write(vec![Bytes::from(vec![0; 4 * UPLOAD_MESSAGE_LEN])]).await;
            assert!(matches!(end, Err(UploadEnd::AlreadyPresent)), "{end:?}");
            assert_eq!(late.finish().await, Err(StoreError::Unanswered), "an ended upload has no second answer");
            assert_eq!(disk.with(|state| state.frames_in_flight), 0);
            assert!(matches!(worker.open_upload(key, 0).await, Ok(Opened::AlreadyPresent)));
        }
    });
}

/// Goal: who uploads a blob that comes in another way is told at once, though its client sends nothing. Method: uploads that
/// stand before their first byte and in the middle; another one ends, or the blob is put as a whole.
#[test]
fn a_standing_upload_ends_when_the_blob_is_there() {
    block_on(async {
        for (len, sent, in_one) in [(500, 0, true), (500, 200, false), (2 * FRAME_LEN, FRAME_LEN + 1, false)] {
            let (worker, _) = worker(StorageMode::Zstd);
            let data = SplitMix64(5).content(len);
            let digest = digest_of(&data);
            let other = key(digest_of(b"other"), Encoding::Identity, "other");
            let mut other = open(&worker, &other, 0).await.expect("new");
            let mut standing = open(&worker, &key(digest, Encoding::Zstd, "standing"), 0).await.expect("new");
            let mut half = open(&worker, &key(digest, Encoding::Identity, "half"), 0).await.expect("new");
            half.write(vec![data.slice(..sent)]).await.expect("consumed");
            let put = Put { digest, encoding: Encoding::Identity, data: vec![data.clone()], admitted: false };
            let stored = match in_one {
                true => worker.put(put).await,
                false => {
                    let mut whole = open(&worker, &key(digest, Encoding::Identity, "whole"), 0).await.expect("new");
                    whole.write(vec![data.clone()]).await.expect("consumed");
                    whole.finish().await
                }
            };
            assert_eq!(stored, Ok(PutOutcome::Stored));
            for upload in [&mut standing, &mut half] {
                assert!(matches!(upload.ended().await, UploadEnd::AlreadyPresent));
            }
            other.write(vec![Bytes::from_static(b"other")]).await.expect("consumed");
            assert_eq!(other.finish().await, Ok(PutOutcome::Stored));
            settle(&worker).await;
        }
    });
}

/// Goal: too much is noticed at once, whatever the framing claims, and costs no memory; a frame without end is noticed at
/// the finish. Method: a long body; a bomb; a cut frame.
#[test]
fn a_lying_body_ends_the_upload() {
    block_on(async {
        let (worker, disk) = worker(StorageMode::Zstd);
        for size in [1000, 3 * FRAME_LEN as u64] {
            let digest = Digest { size, ..digest_of(b"whatever") };
            let identity = key(digest, Encoding::Identity, "long");
            let mut upload = open(&worker, &identity, 0).await.expect("new");
            let body = Bytes::from(vec![0; size as usize + 4 * UPLOAD_MESSAGE_LEN]);
            let end = upload.write(vec![body]).await.expect_err("too long");
            assert!(matches!(end, UploadEnd::Failed(StoreError::TooLong { .. })), "{end:?}");
            assert_eq!(worker.upload_status(&identity).await.map(|status| status.committed), Ok(0));

            // 256 MiB of zeros in a few kilobytes.
            let bomb = super::codecs().frame_of(&vec![0; 256 << 20]);
            assert!(bomb.len() < 64 << 10);
            let bombed = key(digest, Encoding::Zstd, "bomb");
            let mut upload = open(&worker, &bombed, 0).await.expect("new");
            upload.write(vec![bomb.into()]).await.ok();
            let error = upload.finish().await.expect_err("too long");
            assert!(matches!(error, StoreError::TooLong { .. }), "{error}");

            let cut = super::codecs().frame_of(&SplitMix64(8).content(size as usize));
            let mut upload = open(&worker, &key(digest, Encoding::Zstd, "cut"), 0).await.expect("new");
            upload.write(vec![Bytes::copy_from_slice(&cut[..cut.len() - 1])]).await.expect("nothing wrong yet");
            let error = upload.finish().await.expect_err("no end");
            assert!(matches!(error, StoreError::BadZstd { .. }), "{error}");
        }
        settle(&worker).await;
        assert_eq!(worker.stats().parked_uploads, 0);
        assert_eq!(disk.with(|state| state.frames_in_flight), 0);
    });
}

/// Goal: frames of one byte each are an upload like any other. Method: 3000 of them, in large messages.
#[test]
fn many_tiny_frames_are_fine() {
    block_on(async {
        let (worker, _) = worker(StorageMode::Zstd);
        let data = SplitMix64(11).content(3000);
        let body: Vec<u8> = data.chunks(1).flat_map(crate::shard::codec::wrap_raw).collect();
        let mut upload = open(&worker, &key(digest_of(&data), Encoding::Zstd, "u"), 0).await.expect("new");
        upload.write(vec![body.into()]).await.expect("consumed");
        assert_eq!(upload.finish().await, Ok(PutOutcome::Stored));
    });
}

/// Goal: interrupted uploads are bounded, the newest stay, and they give way when the disk is full. Method: more of them
/// than are kept; then a disk without space.
#[test]
fn parked_uploads_are_bounded_and_give_way() {
    block_on(async {
        let (worker, disk) = worker(StorageMode::Uncompressed);
        let digest = Digest { size: 2 * FRAME_LEN as u64, ..digest_of(b"whatever") };
        for n in 0..PARKED_UPLOADS_MAX + 5 {
            let key = key(digest, Encoding::Identity, &n.to_string());
            let mut upload = open(&worker, &key, 0).await.expect("new");
            upload.write(vec![Bytes::from_static(b"some bytes")]).await.expect("consumed");
            drop(upload);
            settle(&worker).await;
        }
        assert_eq!(worker.stats().parked_uploads, PARKED_UPLOADS_MAX as u64);
        let committed = async |n: usize| {
            let key = key(digest, Encoding::Identity, &n.to_string());
            worker.upload_status(&key).await.expect("no error").committed
        };
        assert_eq!(committed(4).await, 0);
        assert_eq!(committed(5).await, 10);
        assert_eq!(committed(PARKED_UPLOADS_MAX + 4).await, 10);

        disk.with(|state| state.no_space = 1);
        let data = SplitMix64(12).content(2 * FRAME_LEN);
        let mut upload = open(&worker, &key(digest_of(&data), Encoding::Identity, "u"), 0).await.expect("new");
        upload.write(vec![data.clone()]).await.expect("parked uploads gave way");
        assert_eq!(worker.stats().parked_uploads, 0);
        assert_eq!(upload.finish().await, Ok(PutOutcome::Stored));
        disk.with(|state| state.no_space = 1);
        let other = SplitMix64(13).content(2 * FRAME_LEN);
        let mut upload = open(&worker, &key(digest_of(&other), Encoding::Identity, "u"), 0).await.expect("new");
        let end = upload.write(vec![other]).await.expect_err("nothing to give way");
        assert!(matches!(end, UploadEnd::Failed(StoreError::NoSpace { .. })), "{end:?}");
    });
}

/// Goal: a handle that is dropped while the owner works leaves nothing behind when the worker stops. Method: drop during a
/// write, then stop with a deadline.
#[test]
fn stopping_frees_everything() {
    block_on(async {
        let (worker, disk) = worker(StorageMode::Zstd);
        disk.with(|state| state.slow = true);
        let data = SplitMix64(14).content(6 * FRAME_LEN);
        let key = key(digest_of(&data), Encoding::Identity, "u");
        let mut upload = open(&worker, &key, 0).await.expect("new");
        drop(rt::time::timeout(Duration::ZERO, upload.write(vec![data])).await);
        drop(upload);
        rt::time::timeout(Duration::from_secs(10), worker.stop()).await.expect("the upload has ended");
        assert!(matches!(worker.open_upload(key, 0).await, Err(StoreError::Stopping)));
        assert_eq!(disk.with(|state| state.frames_in_flight), 0);
        assert_eq!(worker.stats().parked_uploads, 0);
    });
}
