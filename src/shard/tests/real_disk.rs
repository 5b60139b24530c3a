//! The worker on real files.

use std::path::Path;

use bytes::Bytes;

use super::{SplitMix64, collect, digest_of};
use crate::limits::FRAME_LEN;
use crate::pure::digest::Digest;
use crate::pure::purge::InstanceTag;
use crate::pure::shard_map::ShardMap;
use crate::rt;
use crate::rt::cores::block_on;
use crate::shard::codec::StorageMode;
use crate::shard::disk::{Ack, Disk, DiskConfig};
use crate::shard::disk_tests::wait_closed;
use crate::shard::router::{Router, wire};
use crate::shard::worker::Worker;
use crate::shard::{geometry, pool};
use crate::store::{Accept, ActionKey, Encoding, Get, Opened, Purpose, Put, PutOutcome, Store, Upload, UploadKey};

/// One core with a real disk in `dir`.
async fn open(dir: &Path, mode: StorageMode, ram_bytes: usize) -> (Router<Disk>, Disk) {
    let config = DiskConfig { dir: dir.into(), max_size_bytes: 256 << 20, ack: Ack::Buffered };
    let volume = geometry::open(&config).expect("the directory opens");
    let map = ShardMap::new(volume.shards(), 1);
    let (main, mut ports) = pool::wire(&volume, 1);
    rt::spawn(main.run());
    let disk = Disk::open(volume, 0, 1, ports.pop().expect("one port")).await.expect("the disk opens");
    let worker = Worker::new(disk.clone(), super::worker_config(mode, ram_bytes));
    (wire(1).pop().expect("one core").start(worker, map), disk)
}

async fn check(store: &Router<Disk>, random: &mut SplitMix64, data: &Bytes, digest: Digest) {
    for accept in [Accept::Identity, Accept::Zstd, Accept::Any] {
        let offset = random.below(digest.size + 1) * random.below(2);
        let get = Get { digest, offset, limit: None, accept };
        assert_eq!(store.size_of(digest.hash, Purpose::Look).await, Ok(Some(digest.size)));
        let blob = store.get(get).await.expect("no error").expect("present");
        let len = blob.encoded_len();
        let (encoding, body) = collect(blob).await.expect("no damage");
        // Unknown only of what is encoded anew.
        assert!(len == Some(body.len() as u64) || (len.is_none() && accept == Accept::Zstd && offset > 0), "{get:?}");
        let rest = &data[offset as usize..];
        let raw = match encoding {
            Encoding::Identity => body,
            Encoding::Zstd => super::codecs().decode(&body, rest.len()).expect("a valid stream"),
        };
        assert!(raw == rest, "{get:?}");
    }
}

/// Goal: the worker and the real disk are one store, also after a restart. Method: random blobs by put and by cut and
/// resumed uploads, actions, with and without RAM tier; each read in every form, before and after.
#[test]
fn the_worker_on_a_real_disk() {
    let mut random = SplitMix64::seeded();
    for (mode, ram_bytes) in [(StorageMode::Zstd, 1 << 20), (StorageMode::Uncompressed, 0)] {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().to_owned();
        let (mut seeded, again) = (SplitMix64(random.word()), path.clone());
        let kept = block_on(async move {
            let random = &mut seeded;
            let mut kept: Vec<(Digest, Bytes)> = Vec::new();
            let (store, disk) = open(&path, mode, ram_bytes).await;
            for n in 0..60 {
                let len = if n % 6 == 0 { random.len() + 3 * FRAME_LEN } else { random.len() };
                let data = random.content(len);
                let digest = digest_of(&data);
                let encoding = if random.below(2) == 0 { Encoding::Identity } else { Encoding::Zstd };
                if random.below(2) == 0 {
                    let body = if encoding == Encoding::Zstd { random.zstd(&data) } else { data.clone() };
                    let put = Put { digest, encoding, data: random.cut(&body, 3), admitted: false };
                    assert_eq!(store.put(put).await, Ok(PutOutcome::Stored));
                } else {
                    let key = UploadKey { instance: "".into(), uuid: "u".into(), digest, encoding };
                    let mut offset = 0;
                    for is_last in [false, true] {
                        let Ok(Opened::Ready(mut upload)) = store.open_upload(key.clone(), offset).await else {
                            panic!("{digest} is new");
                        };
                        let rest = data.slice(offset as usize..);
                        let body = if encoding == Encoding::Zstd { random.zstd(&rest) } else { rest };
                        let pieces = random.cut(&body, 4);
                        for piece in &pieces[..if is_last { 4 } else { 2 }] {
                            upload.write(vec![piece.clone()]).await.expect("consumed");
                        }
                        if is_last {
                            assert_eq!(upload.finish().await, Ok(PutOutcome::Stored));
                        } else {
                            drop(upload);
                            offset = store.upload_status(key.clone()).await.expect("no error").committed;
                        }
                    }
                }
                check(&store, random, &data, digest).await;
                let action = ActionKey { hash: digest.hash, size: Some(7) };
                store.action_put(action, data.slice(..len.min(1000)), InstanceTag::UNKNOWN).await.expect("stored");
                kept.push((digest, data));
            }
            store.worker().stop().await;
            disk.shutdown().await;
            drop((store, disk));
            // Why here: what an executor still runs when it ends is never dropped, and would hold the lock.
            wait_closed(&path).await;
            kept
        });
        let mut seeded = SplitMix64(random.word());
        block_on(async move {
            let (store, disk) = open(&again, mode, ram_bytes).await;
            let missing = store.find_missing(kept.iter().map(|(digest, _)| *digest).collect()).await;
            assert_eq!(missing, Ok(vec![false; kept.len()]));
            for (digest, data) in &kept {
                check(&store, &mut seeded, data, *digest).await;
                let action = store.action_get(ActionKey { hash: digest.hash, size: Some(7) }).await;
                let entry = action.expect("no error").expect("present");
                assert_eq!(entry.data, data.slice(..data.len().min(1000)));
                let other = ActionKey { hash: digest.hash, size: Some(8) };
                assert!(store.action_get(other).await.expect("no error").is_none());
                store.action_drop(other, entry.version).await.expect("no error");
                assert!(
                    store.action_get(ActionKey { hash: digest.hash, size: None }).await.expect("no error").is_none()
                );
            }
            store.worker().stop().await;
            disk.shutdown().await;
        });
    }
}
