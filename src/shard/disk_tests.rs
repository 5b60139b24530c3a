//! The disk engine against real files: write, read, evict, damage, crash, recover.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join;

use super::blob_disk::{Older, Stored};
use super::disk::{Ack, Codec, Disk, DiskConfig, DiskError, DiskStats, Key, Kind};
use super::tests::SplitMix64;
use super::{geometry, pool};
use crate::limits::{CHUNK_LEN, DISK_ALIGN, FRAME_LEN, STAGE_CHUNKS, STAGE_CHUNKS_MIN};
use crate::metrics::{Metric, Snapshot};
use crate::pure::digest::Hash;
use crate::pure::purge::Origin;
use crate::pure::shard_map::{CoreId, ShardMap};
use crate::rt::cores::block_on;
use crate::rt::time::{sleep, yield_to_reactor};

/// All cores of one process, in one executor.
pub(super) struct World {
    pub(super) disks: Vec<Disk>,
    pub(super) map: ShardMap,
}

impl World {
    pub(super) async fn open(dir: &Path, mib: u64, cores: usize, ack: Ack) -> Self {
        let config = DiskConfig { dir: dir.into(), max_size_bytes: mib << 20, ack };
        if dir.join("lock").exists() {
            wait_closed(dir).await;
        }
        let volume = geometry::open(&config).expect("the directory opens");
        let map = ShardMap::new(volume.shards(), cores as u16);
        let (main, ports) = pool::wire(&volume, cores);
        crate::rt::spawn(main.run());
        let mut disks = Vec::new();
        for (core, port) in ports.into_iter().enumerate() {
            disks.push(Disk::open(volume.clone(), core, cores, port).await.expect("the disk opens"));
        }
        let world = Self { disks, map };
        world.wait_ready().await;
        world
    }

    async fn wait_ready(&self) {
        for shard in 0..self.map.shards() {
            let mut hash = Hash([0; 32]);
            hash.0[..2].copy_from_slice(&((u32::from(shard) << 16) / u32::from(self.map.shards())).to_be_bytes()[2..]);
            let CoreId(core) = self.map.core_of_hash(&hash);
            self.disks[usize::from(core)].ready(&hash).await;
        }
    }

    pub(super) fn of(&self, key: &Key) -> &Disk {
        &self.disks[usize::from(self.map.core_of_hash(&key.hash).0)]
    }

    pub(super) async fn put(&self, blob: &Blob) -> Result<u64, DiskError> {
        let data = blob.data();
        let disk = self.of(&blob.key);
        if blob.key.kind == Kind::Action || data.len() <= FRAME_LEN {
            let (one, two) = data.split_at(data.len() / 3);
            return disk.append(&blob.key, Codec::Zstd, 7, &[one, two]).await;
        }
        let mut writer = disk.begin_large(&blob.key).await?;
        for (frame, n) in data.chunks(FRAME_LEN).zip(0..) {
            writer.push(if n % 2 == 0 { Codec::Raw } else { Codec::Zstd }, frame).await?;
        }
        writer.commit().await
    }

    /// What a read brings: `None` is a miss.
    async fn get(&self, key: &Key) -> Result<Option<Bytes>, DiskError> {
        match self.of(key).read(key).await? {
            None => Ok(None),
            Some(Stored::Small(small)) => {
                assert_eq!((small.codec, small.raw_len), (Codec::Zstd, 7));
                Ok(Some(small.data))
            }
            Some(Stored::Large(large)) => {
                let mut all = Vec::new();
                let mut at = 0;
                while at < large.frame_count() {
                    for (codec, data) in large.read_frames(at, 100).await?.split() {
                        let info = large.frame(at);
                        assert_eq!((info.codec, info.stored_len, info.raw_len), (codec, data.len(), data.len()));
                        all.extend_from_slice(&data);
                        at += 1;
                    }
                }
                Ok(Some(all.into()))
            }
        }
    }

    /// True when `blob` is there, whole. Anything but that or a miss fails.
    pub(super) async fn has(&self, blob: &Blob) -> bool {
        match self.get(&blob.key).await {
            Ok(Some(data)) => {
                assert!(data == blob.data(), "wrong bytes for {blob:?}");
                if blob.key.kind == Kind::Cas {
                    let size = self.of(&blob.key).size_of(&blob.key.hash).await;
                    // It may be evicted between the two.
                    assert!(matches!(size, Ok(None)) || size == Ok(Some(blob.len)), "{size:?} for {blob:?}");
                }
                true
            }
            Ok(None) | Err(DiskError::Damaged) => false,
            Err(error) => panic!("{error} for {blob:?}"),
        }
    }

    pub(super) fn stats(&self) -> DiskStats {
        self.disks.iter().map(Disk::stats).fold(DiskStats::default(), |sum, stats| DiskStats {
            entries: sum.entries + stats.entries,
            large_blobs: sum.large_blobs + stats.large_blobs,
            leased_bytes: sum.leased_bytes + stats.leased_bytes,
            damaged_records: sum.damaged_records + stats.damaged_records,
            reinserted_records: sum.reinserted_records + stats.reinserted_records,
            evicted_entries: sum.evicted_entries + stats.evicted_entries,
            read_errors: sum.read_errors + stats.read_errors,
            write_errors: sum.write_errors + stats.write_errors,
            ..sum
        })
    }

    pub(super) async fn shutdown(self) {
        for disk in &self.disks {
            disk.shutdown().await;
        }
    }
}

/// Something to store; its bytes follow from `number` and `version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blob {
    pub(super) key: Key,
    number: u64,
    version: u64,
    len: u64,
}

impl Blob {
    pub(super) fn cas(number: u64, len: u64) -> Self {
        Self { key: Key { kind: Kind::Cas, hash: hash(number), size: len }, number, version: 0, len }
    }

    pub(super) fn action(number: u64, version: u64, len: u64) -> Self {
        Self { key: Key { kind: Kind::Action, hash: hash(number), size: 142 }, number, version, len }
    }

    /// A fill byte, and at each 512 bytes a stamp that no other blob and no other place has.
    fn data(&self) -> Vec<u8> {
        let seed = SplitMix64(self.number << 20 ^ self.version << 1 ^ u64::from(self.key.kind == Kind::Action)).word();
        let mut out = vec![seed as u8 | 1; self.len as usize];
        for (block, at) in out.chunks_mut(512).zip(0u64..) {
            let stamp = (seed ^ at << 32).to_le_bytes();
            let len = block.len().min(stamp.len());
            block[..len].copy_from_slice(&stamp[..len]);
        }
        out
    }
}

fn hash(number: u64) -> Hash {
    let mut random = SplitMix64(number ^ 0xabcdef);
    let mut out = [0u8; 32];
    out.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.word().to_le_bytes()));
    Hash(out)
}

pub(super) fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

/// Waits until nobody has `dir` open: the tasks of a world that was dropped end within a few turns of the reactor.
pub(super) async fn wait_closed(dir: &Path) {
    let lock = std::fs::File::open(dir.join("lock")).expect("opened");
    for _ in 0..5000 {
        if lock.try_lock().is_ok() {
            return;
        }
        sleep(Duration::from_millis(1)).await;
    }
    panic!("{} is still open", dir.display());
}

/// The directory as a `kill -9` would leave it now.
pub(super) fn crash_copy(dir: &Path) -> tempfile::TempDir {
    let copy = directory();
    for entry in std::fs::read_dir(dir).expect("list") {
        let entry = entry.expect("entry");
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).expect("copied");
    }
    copy
}

/// A mixed bag of `count` blobs.
fn mixed(seed: u64, count: u64) -> Vec<Blob> {
    let mut random = SplitMix64(seed);
    (0..count)
        .map(|n| {
            let number = seed << 32 | n;
            match random.below(10) {
                0 => Blob::cas(number, FRAME_LEN as u64 + 1 + random.below(3 << 20)),
                1 => Blob::cas(number, 1 + random.below(FRAME_LEN as u64)),
                2..5 => Blob::action(number, 0, 1 + random.below(3000)),
                _ => Blob::cas(number, 1 + random.below(10_000)),
            }
        })
        .collect()
}

/// Goal: an action that is to keep an older one replaces none, whatever its size, and is stored where there is
/// none. Method: both sizes, over one that is there, that was removed, and that is stored meanwhile.
#[test]
fn an_older_action_may_be_kept() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Buffered).await;
        for (number, len) in [(1, 900), (2, 1 << 20)] {
            let [client, flight] = [1, 2].map(|version| Blob::action(number, version, len));
            let (disk, key, data) = (world.of(&client.key), client.key, flight.data());
            let origin = Origin::default();
            let (kept, stored) =
                join(disk.append_action(&key, origin, &data, Older::Kept), async { world.put(&client).await }).await;
            assert!(stored.is_ok() && matches!(kept, Ok(_) | Err(DiskError::Superseded)), "{stored:?} {kept:?}");
            assert!(world.has(&client).await, "the client's stays, whichever came first");
            assert_eq!(disk.append_action(&key, origin, &data, Older::Kept).await, Err(DiskError::Superseded));
            assert!(world.has(&client).await);
            assert_eq!(disk.remove(&key, None).await, Ok(true));
            assert!(disk.append_action(&key, origin, &data, Older::Kept).await.is_ok());
            let found = disk.read(&key).await.expect("readable");
            assert!(matches!(found, Some(Stored::Small(record)) if record.data == data));
        }
        let stats = world.stats();
        assert_eq!((stats.entries, stats.large_blobs), (2, 1));
    });
}

/// Goal: what was stored comes back, from the buffer, from disk, after a clean restart and after a crash, at whatever number of
/// cores. Method: a mixed bag; each state read in full; 1, 2, 16 and 3 cores in turn on the same directory.
#[test]
fn what_was_stored_comes_back_at_any_number_of_cores() {
    let dir = directory();
    block_on(async {
        let blobs = mixed(1, 60);
        let mut stored = 0;
        for (cores, crash) in [(1, false), (2, true), (16, false), (3, true), (1, false)] {
            let world = World::open(dir.path(), 96, cores, Ack::Flushed).await;
            for blob in &blobs[..stored] {
                assert!(world.of(&blob.key).contains(&blob.key) && world.has(blob).await, "{blob:?} at {cores} cores");
            }
            let next = (stored + 12).min(blobs.len());
            for blob in &blobs[stored..next] {
                assert!(!world.has(blob).await);
                world.put(blob).await.expect("stored");
                assert!(world.has(blob).await, "{blob:?} from the buffer");
            }
            stored = next;
            assert_eq!(world.stats().entries, stored as u64);
            if crash {
                let copy = crash_copy(dir.path());
                let other = World::open(copy.path(), 96, 2, Ack::Buffered).await;
                for blob in &blobs[..stored] {
                    assert!(other.has(blob).await, "{blob:?} after a crash");
                }
            } else {
                world.shutdown().await;
            }
        }
    });
}

/// Goal: keys are told apart by kind and size, actions are replaced, versions guard removal, a removed key stays away.
/// Method: by hand, with a crash at the end.
#[test]
fn keys_versions_and_removal() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Durable).await;
        let disk = world.disks[0].clone();
        let cas = Blob::cas(5, 4000);
        let (first, second) = (Blob::action(5, 1, 900), Blob::action(5, 2, 5000));
        world.put(&cas).await.expect("stored");
        let v1 = world.put(&first).await.expect("stored");
        assert!(world.has(&cas).await && world.has(&first).await);
        let other_size = Key { size: 4001, ..cas.key };
        assert!(!disk.contains(&other_size) && world.get(&other_size).await == Ok(None));
        let any_size = Key { size: 0, ..first.key };
        let Ok(Some(Stored::Small(small))) = disk.read(&any_size).await else {
            panic!("an action is found by its hash")
        };
        assert_eq!((small.key_size, small.version), (142, v1));

        let v2 = world.put(&second).await.expect("stored");
        assert!(world.has(&second).await);
        assert_eq!(disk.remove(&first.key, Some(v1)).await, Ok(false), "v1 has been replaced");
        assert!(world.has(&second).await);
        assert_eq!(disk.remove(&second.key, Some(v2)).await, Ok(true));
        assert_eq!(disk.remove(&cas.key, None).await, Ok(true));
        assert!(!world.has(&second).await && !world.has(&cas).await);
        let copy = crash_copy(dir.path());
        let world = World::open(copy.path(), 64, 1, Ack::Buffered).await;
        assert!(!world.has(&second).await && !world.has(&first).await && !world.has(&cas).await);
    });
}

/// Goal: an action longer than a record is one value all the same. Method: 3 MiB in segments of 1 MiB, replaced by a short one.
#[test]
fn a_long_action_is_cut_and_joined() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let (long, short) = (Blob::action(9, 1, 3 << 20), Blob::action(9, 2, 100));
        world.put(&long).await.expect("stored");
        assert!(world.has(&long).await);
        let copy = crash_copy(dir.path());
        let other = World::open(copy.path(), 64, 2, Ack::Flushed).await;
        assert!(other.has(&long).await);
        world.put(&short).await.expect("stored");
        assert!(world.has(&short).await);
        assert_eq!((world.stats().entries, world.stats().large_blobs), (1, 0));
    });
}

/// Goal: an upload that is dropped leaves nothing, and its chunks can be used again at once. Method: half-size uploads, dropped
/// at many points, more of them than the volume could hold.
#[test]
fn a_dropped_upload_gives_its_space_back() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Buffered).await;
        let key = Blob::cas(1, 30 << 20).key;
        let frame = vec![7u8; FRAME_LEN];
        for frames in [0, 1, 3, 16, 33, 80, 100, 100, 100] {
            let mut writer = world.disks[0].begin_large(&key).await.expect("begun");
            for _ in 0..frames {
                writer.push(Codec::Raw, &frame).await.expect("there is room");
            }
            drop(writer);
            assert!(!world.disks[0].contains(&key));
        }
        let writer = world.disks[0].begin_large(&key).await.expect("begun");
        assert!(writer.commit().await.is_err(), "frames are missing");
    });
}

/// Goal: large writes stage no more than the core has for that, and give it back, also what is on its way to the drive. Method: some
/// with a short frame each, and room for six chunks beyond the least.
#[test]
fn stages_are_bounded() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Buffered).await;
        let disk = &world.disks[0];
        let begin = async |number| {
            let mut writer = disk.begin_large(&Blob::cas(number, 4 << 20).key).await.expect("begun");
            writer.push(Codec::Raw, &[7; 10]).await.expect("there is room");
            writer
        };
        let least = STAGE_CHUNKS_MIN as usize * CHUNK_LEN;
        disk.stage_beyond(6 * CHUNK_LEN);
        let mut first = begin(1).await;
        let second = begin(2).await;
        assert_eq!((first.staged_len(), second.staged_len()), (least + 6 * CHUNK_LEN, least));
        // The stage goes out, and there is no room for one beside it: the next has what it gives back, if as many chunks lie together.
        first.push(Codec::Raw, &vec![7; least + 6 * CHUNK_LEN]).await.expect("there is room");
        assert_eq!(first.own_chunks(), STAGE_CHUNKS_MIN);
        assert!(first.staged_len() <= least + 6 * CHUNK_LEN);
        drop((first, second));
        while begin(3).await.staged_len() < least + 6 * CHUNK_LEN {
            yield_to_reactor().await;
        }
    });
}

/// Goal: of what an upload is counted with it holds no more while a write is under way, and goes on all the same. Method: blobs of
/// many stages, with no room beyond the least, with little, and with all; more writers than have a second buffer.
#[test]
fn an_upload_holds_what_it_is_counted_with() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 256, 1, Ack::Buffered).await;
        let disk = &world.disks[0];
        let few = STAGE_CHUNKS[STAGE_CHUNKS.len() - 1].0;
        for (room, writers) in [(0, 1), (STAGE_CHUNKS_MIN as usize, 1), (3, 2), (1000, 1), (1000, few + 1)] {
            disk.stage_beyond(room * CHUNK_LEN);
            let mut others = Vec::new();
            for number in 1..writers as u64 {
                others.push(disk.begin_large(&Blob::cas(number, 4 << 20).key).await.expect("begun"));
            }
            let blob = Blob::cas(1000 + (room + writers) as u64, 4 << 20);
            let mut writer = disk.begin_large(&blob.key).await.expect("begun");
            for frame in blob.data().chunks(FRAME_LEN) {
                writer.push(Codec::Raw, frame).await.expect("there is room");
                assert!(writer.own_chunks() <= STAGE_CHUNKS_MIN, "{} of its own", writer.own_chunks());
                assert!(writers <= few || writer.staged_len() <= STAGE_CHUNKS_MIN as usize * CHUNK_LEN);
            }
            writer.commit().await.expect("stored");
            assert!(disk.contains(&blob.key));
        }
    });
}

/// Goal: a cache that is filled many times over keeps to its size, serves only right bytes, and keeps what is used. Method:
/// five times `max_size` of mixed blobs; a hot set is looked up all the time.
#[test]
fn a_full_cache_evicts_the_unused() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 2, Ack::Buffered).await;
        let hot: Vec<Blob> = mixed(3, 30);
        for blob in &hot {
            world.put(blob).await.expect("stored");
        }
        let (mut bytes, mut round) = (0, 0);
        while bytes < 320 << 20 {
            round += 1;
            for blob in mixed(1000 + round, 40) {
                world.put(&blob).await.expect("there is always room for a blob");
                bytes += blob.len;
                hot.iter().for_each(|blob| _ = world.of(&blob.key).contains(&blob.key));
            }
        }
        let mut kept = 0;
        for blob in &hot {
            kept += u32::from(world.has(blob).await);
        }
        let stats = world.stats();
        assert!(stats.evicted_entries > 200 && stats.damaged_records == 0, "{stats:?}");
        let mut told = Snapshot::default();
        world.disks.iter().for_each(|disk| disk.report(&mut told));
        assert_eq!(told.value(Metric::DiskCacheEvictedAge, &[]), Some(stats.evicted_entries as f64));
        assert!(told.total(Metric::DiskCacheEvicted) as u64 > bytes / 2, "{bytes} bytes went into 64 MiB");
        assert_eq!(kept, 30, "{stats:?}");
        let mut left = 0;
        for round in 1..=round {
            for blob in mixed(1000 + round, 40) {
                left += if world.has(&blob).await { blob.len } else { 0 };
            }
        }
        // How far reclaims run ahead of the writes is a matter of turns: seen are 23 to 40 MiB.
        assert!(left > 16 << 20, "only {left} bytes are left");
        world.shutdown().await;
        let len: u64 = std::fs::read_dir(dir.path())
            .expect("list")
            .map(|e| e.expect("entry").metadata().expect("len").len())
            .sum();
        assert!(len <= 64 << 20);
        // With more room, so that nothing is evicted before it has been looked at.
        let world = World::open(dir.path(), 80, 1, Ack::Buffered).await;
        // What was evicted may come back from segments that could not be freed.
        assert!(world.stats().entries >= stats.entries);
        for blob in &hot {
            assert!(world.has(blob).await);
        }
    });
}

/// Goal: a blob of half of max_size can be stored when the cache is full, again and again; a larger one is refused; uploads that
/// cannot all fit end, and at least one of them well. Method: a full cache; three of the largest in turn, then at once.
#[test]
fn a_blob_of_half_the_cache_fits() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 2, Ack::Buffered).await;
        for round in 0..4 {
            for blob in mixed(50 + round, 40) {
                world.put(&blob).await.expect("stored");
            }
        }
        let most = world.disks[0].max_blob_len();
        assert_eq!(most, 32 << 20);
        for number in 0..3 {
            let blob = Blob::cas(7000 + number, most);
            world.put(&blob).await.expect("half of the cache");
            assert!(world.has(&blob).await);
        }
        let too_large = Blob::cas(7100, most + 1);
        assert_eq!(
            world.of(&too_large.key).begin_large(&too_large.key).await.err(),
            Some(DiskError::NoSpace { bytes: most + 1 })
        );

        let all: Vec<Blob> = (0..3).map(|number| Blob::cas(7200 + number, most)).collect();
        let results = futures_util::future::join_all(all.iter().map(|blob| world.put(blob))).await;
        let stored = results.iter().filter(|result| result.is_ok()).count();
        assert!(
            stored >= 1 && results.iter().all(|r| r.is_ok() || matches!(r, Err(DiskError::NoSpace { .. }))),
            "{results:?}"
        );
        for (blob, result) in all.iter().zip(&results) {
            assert!(result.is_err() || stored > 1 || world.has(blob).await);
        }
    });
}

/// Goal: a blob that is being read stays whole however much is evicted. Method: an open reader while the cache is filled three
/// times over; then the blob is gone, and its chunks are used again.
#[test]
fn a_reader_keeps_its_blob() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Buffered).await;
        let blob = Blob::cas(1, 5 << 20);
        world.put(&blob).await.expect("stored");
        let Ok(Some(Stored::Large(reader))) = world.disks[0].read(&blob.key).await else { panic!("it is there") };
        for number in 0..60 {
            world.put(&Blob::cas(100 + number, 3 << 20)).await.expect("stored");
        }
        let data = blob.data();
        for (frame, expected) in data.chunks(FRAME_LEN).enumerate() {
            assert_eq!(reader.read_frames(frame, 1).await.expect("still there").bytes, expected);
        }
        drop(reader);
        for number in 0..40 {
            world.put(&Blob::cas(200 + number, 3 << 20)).await.expect("stored");
        }
        assert!(!world.has(&blob).await);
    });
}

/// Goal: a flipped byte costs the record it is in and nothing else, and wrong bytes are never served. Method: one directory
/// after a clean shutdown and one after a crash; bytes flipped all over the used part, block by block; each time everything is
/// read.
#[test]
fn a_flipped_byte_costs_one_record() {
    let dir = directory();
    let mut random = SplitMix64(11);
    block_on(async {
        let blobs: Vec<Blob> = (0..40)
            .map(|n| match n % 8 {
                0 => Blob::cas(n, 300_000 + n * 1000),
                1..4 => Blob::action(n, 0, 200 + n * 40),
                _ => Blob::cas(n, 500 + n * 400),
            })
            .collect();
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        for blob in &blobs {
            world.put(blob).await.expect("stored");
        }
        let crashed = crash_copy(dir.path());
        world.shutdown().await;
        for dir in [dir.path(), crashed.path()] {
            let path = dir.join("data.0");
            let good = std::fs::read(&path).expect("read");
            let used: Vec<usize> = (0..good.len() / DISK_ALIGN)
                .filter(|block| good[block * DISK_ALIGN..][..DISK_ALIGN].iter().any(|byte| *byte != 0))
                .collect();
            let file = std::fs::OpenOptions::new().write(true).open(&path).expect("opened");
            let end = (used[used.len() - 1] + 1) * DISK_ALIGN + (1 << 20);
            for &block in used.iter().step_by(5) {
                let nonzero: Vec<usize> =
                    (block * DISK_ALIGN..(block + 1) * DISK_ALIGN).filter(|&at| good[at] != 0).collect();
                let at = nonzero[random.below(nonzero.len() as u64) as usize];
                file.write_all_at(&[good[at] ^ 1 << random.below(8)], at as u64).expect("written");
                let world = World::open(dir, 64, 1, Ack::Buffered).await;
                let mut lost = 0;
                for blob in &blobs {
                    lost += u32::from(!world.has(blob).await);
                }
                assert!(lost <= 1, "byte {at} cost {lost} blobs");
                let again = futures_util::future::join_all(blobs.iter().map(|blob| world.has(blob))).await;
                assert_eq!(again.iter().filter(|has| !**has).count() as u32, lost);
                drop(world);
                wait_closed(dir).await;
                file.write_all_at(&good[..end], 0).expect("written");
            }
        }
    });
}

/// Goal: reads that fail cost what they were to bring, and nothing stops. Method: the data file is cut short under an open
/// disk; everything is read, then stored anew.
#[test]
fn failing_reads_are_misses() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let blobs = mixed(21, 30);
        for blob in &blobs {
            world.put(blob).await.expect("stored");
        }
        let file = std::fs::OpenOptions::new().write(true).open(dir.path().join("data.0")).expect("opened");
        file.set_len(0).expect("cut");
        for blob in &blobs {
            assert!(!world.has(blob).await && !world.of(&blob.key).contains(&blob.key));
        }
        assert_eq!(world.stats().damaged_records, 30);
        for blob in &blobs {
            world.put(blob).await.expect("stored");
            assert!(world.has(blob).await);
        }
    });
}

/// Goal: after a crash at any point everything that was acknowledged as flushed is there, removed keys are gone, and nothing
/// wrong is ever served. Method: seeded random walks of puts, replacements, removals, reads and restarts on a small cache with
/// a changing number of cores; at random points the directory is copied as a crash would leave it, and the copy is compared with
/// the model. As the cache is filled several times over, a blob may have been evicted: then an older version must not come back.
#[test]
fn a_crash_loses_nothing_that_was_flushed() {
    for seed in 1..=3 {
        println!("seed {seed}");
        walk(seed);
    }
}

fn walk(seed: u64) {
    let dir = directory();
    let mut random = SplitMix64(seed);
    block_on(async {
        let mut model: BTreeMap<(bool, u64), Blob> = BTreeMap::new();
        let mut removed: BTreeSet<(bool, u64)> = BTreeSet::new();
        let mut world = World::open(dir.path(), 64, 2, Ack::Flushed).await;
        for step in 0..700u64 {
            let number = random.below(150);
            match random.below(100) {
                0..60 => {
                    let blob = match random.below(8) {
                        0 => Blob::cas(number, FRAME_LEN as u64 + 1 + number * 10_000),
                        1 => Blob::cas(number, 200_000 + number),
                        2..5 => Blob::action(number, step, 1 + random.below(20_000)),
                        _ => Blob::cas(number, 3000 + number * 11),
                    };
                    // A blob of another size is another blob: its number differs too.
                    let blob = if blob.key.kind == Kind::Cas {
                        Blob::cas(blob.number << 24 | blob.len, blob.len)
                    } else {
                        blob
                    };
                    world.put(&blob).await.expect("stored");
                    let name = (blob.key.kind == Kind::Action, blob.number);
                    model.insert(name, blob);
                    removed.remove(&name);
                }
                60..75 => {
                    if let Some((&name, blob)) = model.range((random.below(2) == 0, number)..).next() {
                        match step % 2 {
                            0 => drop(world.of(&blob.key).remove(&blob.key, None).await.expect("removed")),
                            _ => drop(world.of(&blob.key).purge(&[blob.key]).await.expect("purged")),
                        }
                        removed.insert(name);
                        model.remove(&name);
                    }
                }
                75..97 => {
                    if let Some((_, blob)) = model.range((random.below(2) == 0, number << 24)..).next() {
                        world.has(blob).await;
                    }
                }
                97 => {
                    let evictions = world.stats().evicted_entries;
                    let copy = crash_copy(dir.path());
                    // With more room than the original, so that nothing is evicted from the copy.
                    let other = World::open(copy.path(), 80, 1 + random.below(3) as usize, Ack::Buffered).await;
                    let mut missing = 0;
                    for blob in model.values() {
                        let has = other.has(blob).await;
                        assert!(
                            has || !world.of(&blob.key).contains(&blob.key),
                            "{blob:?} was lost at step {step} of seed {seed}"
                        );
                        missing += u64::from(!has);
                    }
                    for &(action, number) in &removed {
                        let key = if action {
                            Blob::action(number, 0, 1).key
                        } else {
                            Blob::cas(number, number & 0xff_ffff).key
                        };
                        assert!(!other.of(&key).contains(&key), "{key:?} came back at step {step} of seed {seed}");
                    }
                    assert!(missing == 0 || evictions > 0 || step > 300, "{missing} are missing at step {step}");
                    let stats = other.stats();
                    assert_eq!((stats.damaged_records, stats.evicted_entries), (0, 0));
                }
                _ => {
                    world.shutdown().await;
                    world = World::open(dir.path(), 64, 1 + random.below(4) as usize, Ack::Flushed).await;
                }
            }
        }
        assert_eq!(world.stats().damaged_records, 0);
    });
}
