//! Goal: content that no key names is found although its checksums are right, and a repair drops it and nothing else.
//! Method: records and large blobs are stored through the disk, which trusts its caller, under keys of other content.

use std::path::Path;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::crew::Progress;
use super::findings::{Findings, What};
use super::survey::{Depth, Surveyor};
use crate::limits::FRAME_LEN;
use crate::pure::digest::Hash;
use crate::pure::record::{Codec, Key, Kind};
use crate::pure::shard_map::ShardId;
use crate::rt::cores::block_on;
use crate::shard::codec::wrap_raw;
use crate::shard::disk::{Ack, Disk, DiskConfig};
use crate::shard::{geometry, pool};

fn with_disk(dir: &Path, work: impl AsyncFnOnce(&Disk)) {
    let config = DiskConfig { dir: dir.into(), max_size_bytes: 64 << 20, ack: Ack::Buffered };
    let volume = geometry::open(&config).expect("opened");
    let (pool, mut ports) = pool::wire(&volume, 1);
    block_on(async {
        crate::rt::spawn(pool.run());
        let disk = Disk::open(volume, 0, 1, ports.pop().expect("one port")).await.expect("opened");
        work(&disk).await;
        disk.shutdown().await;
    });
}

fn survey(dir: &Path, depth: Depth, repairs: bool) -> Findings {
    let volume = geometry::open_as_is(dir).expect("opened");
    block_on(async {
        let progress = Arc::new(Progress::default());
        let surveyor = Surveyor::open(&volume, depth, repairs, progress).await.expect("opened");
        let mut all = Findings::default();
        for shard in 0..volume.shards() {
            let segments = volume.headers().iter().flatten().filter(|header| header.shard.0 == shard).copied();
            all.add(surveyor.shard(ShardId(shard), segments.collect()).await.expect("surveyed"));
        }
        all
    })
}

fn key(kind: Kind, content: &[u8]) -> Key {
    Key { kind, hash: Hash(Sha256::digest(content).into()), size: content.len() as u64 }
}

async fn put_large(disk: &Disk, key: &Key, frames: &[(Codec, &[u8])]) {
    let mut writer = disk.begin_large(key).await.expect("begun");
    for (codec, frame) in frames {
        writer.push(*codec, frame).await.expect("pushed");
    }
    writer.commit().await.expect("committed");
}

#[test]
fn content_is_compared_with_its_key() {
    let dir = tempfile::tempdir().expect("a directory");
    let small = [b"one".as_slice(), b"two", b"three", b"four", b"fives"];
    let large: Vec<u8> = (0..FRAME_LEN + 9).map(|i| (i % 251) as u8).collect();
    let (first, last) = large.split_at(FRAME_LEN);
    let good = key(Kind::Cas, &large);
    let [wrong_hash, not_zstd, too_long] = [1, 2, 3].map(|n| key(Kind::Cas, &[&large[..], &[n]].concat()[1..]));
    with_disk(dir.path(), async |disk| {
        let append = async |key: &Key, codec, raw_len: usize, stored: &[u8]| {
            disk.append(key, codec, raw_len as u64, &[stored]).await.expect("appended");
        };
        append(&key(Kind::Cas, small[0]), Codec::Raw, 3, small[0]).await;
        append(&key(Kind::Cas, small[1]), Codec::Zstd, 3, &wrap_raw(small[1])).await;
        append(&key(Kind::Action, small[2]), Codec::Raw, 4, b"data").await;
        // The content of another key, no zstd at all, and fewer bytes than it says.
        append(&key(Kind::Cas, small[3]), Codec::Raw, 4, b"FOUR").await;
        append(&key(Kind::Cas, small[4]), Codec::Zstd, 5, small[4]).await;
        append(&key(Kind::Action, small[4]), Codec::Raw, 5, b"data").await;
        put_large(disk, &good, &[(Codec::Zstd, &wrap_raw(first)), (Codec::Raw, last)]).await;
        put_large(disk, &wrong_hash, &[(Codec::Raw, first), (Codec::Raw, last)]).await;
        put_large(disk, &not_zstd, &[(Codec::Zstd, first), (Codec::Raw, last)]).await;
        put_large(disk, &too_long, &[(Codec::Raw, first), (Codec::Raw, &large[..10])]).await;
        let value = vec![7; FRAME_LEN + 1];
        append(&key(Kind::Action, &value), Codec::Raw, value.len(), &value).await;
    });
    let broken = [(What::Content, 6)].into_iter().collect();
    let found = survey(dir.path(), Depth::Content, false);
    assert_eq!((found.records, &found.broken), (11, &broken));
    assert_eq!(found.live().entries, 5);
    let positions = found.examples.iter().map(|broken| broken.key.expect("known").size);
    let (small_ones, large_ones): (Vec<_>, Vec<_>) = positions.partition(|&size| size < 10);
    assert_eq!((small_ones.len(), large_ones.len()), (3, 3));
    // A look at headers does not see it.
    assert_eq!(survey(dir.path(), Depth::Headers, false).live().entries, 11);
    assert_eq!(survey(dir.path(), Depth::Content, true).repaired, 6);
    let found = survey(dir.path(), Depth::Content, false);
    // In two shards the note of how many entries there were went with them.
    assert_eq!((found.tombs, found.live().entries, found.broken_total()), (6 + 2, 5, 0));
    with_disk(dir.path(), async |disk| {
        for (key, is_there) in [
            (key(Kind::Cas, small[0]), true),
            (key(Kind::Cas, small[1]), true),
            (key(Kind::Action, small[2]), true),
            (key(Kind::Cas, small[3]), false),
            (key(Kind::Cas, small[4]), false),
            (key(Kind::Action, small[4]), false),
            (good, true),
            (wrong_hash, false),
            (not_zstd, false),
            (too_long, false),
        ] {
            disk.ready(&key.hash).await;
            assert_eq!(disk.read(&key).await.expect("read").is_some(), is_there, "{key:?}");
        }
    });
}
