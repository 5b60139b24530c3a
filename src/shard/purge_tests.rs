//! Purges on the real disk: what is gone stays gone.

use super::blob_disk::Older;
use super::disk::{Ack, ActionCursor, Codec, Key};
use super::disk_tests::{Blob, World, crash_copy, directory};
use crate::pure::purge::{InstanceTag, Origin, Which};
use crate::rt::cores::block_on;
use crate::rt::faults::{EIO, Operation, fail_next};

/// All actions of all cores that `which` covers.
async fn covered(world: &World, which: &Which) -> Vec<Key> {
    let mut all = Vec::new();
    for disk in &world.disks {
        let mut cursor = ActionCursor::default();
        while let Some(keys) = disk.next_actions(&mut cursor, which).await {
            all.extend(keys);
        }
    }
    all
}

/// Goal: a purged key is gone at once, and after a crash, whatever `--ack` says; what is stored anew stays; a key that is not
/// there is no error. Method: records of each kind, purged, some stored again; a copy as a crash would leave it right after.
#[test]
fn a_purge_survives_a_crash() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 2, Ack::Buffered).await;
        let blobs = [
            Blob::action(1, 0, 500),
            Blob::cas(2, 5000),
            Blob::cas(3, 2 << 20),
            Blob::action(4, 0, 400_000),
            Blob::action(5, 0, 700),
        ];
        for blob in &blobs {
            world.put(blob).await.expect("stored");
            // Flushed or not.
            let found = world.of(&blob.key).purge(&[Key { size: 0, ..blob.key }]).await;
            assert_eq!(found, Ok(vec![true]), "{blob:?}");
            assert_eq!(world.of(&blob.key).purge(&[blob.key]).await, Ok(vec![false]), "{blob:?}");
        }
        world.put(&blobs[4]).await.expect("stored anew");
        assert_eq!(world.of(&Blob::cas(6, 9).key).purge(&[Blob::cas(6, 9).key]).await, Ok(vec![false]));
        let copy = crash_copy(dir.path());
        for world in [World::open(copy.path(), 64, 1, Ack::Buffered).await, world] {
            for blob in &blobs[..4] {
                assert!(!world.has(blob).await, "{blob:?}");
            }
        }
    });
}

/// Goal: a purge that cannot be written is not acknowledged. Method: a sync that fails, then one that does not; then writes that fail.
#[test]
fn a_purge_that_is_not_synced_is_not_acknowledged() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let blob = Blob::action(1, 0, 500);
        world.put(&blob).await.expect("stored");
        let faults = fail_next(Operation::Sync, 1, EIO);
        assert!(world.of(&blob.key).purge(&[blob.key]).await.is_err());
        drop(faults);
        assert_eq!(world.of(&blob.key).purge(&[blob.key]).await, Ok(vec![false]));
        let faults = fail_next(Operation::Write, u32::MAX, EIO);
        assert!(world.of(&blob.key).purge(&[blob.key]).await.is_err());
        drop(faults);
    });
}

/// Goal: a purge holds whose tomb could not be written where it was to stand: the segment keeps the record. Method: one failing
/// write under a purge, then a copy as a crash would leave it.
#[test]
fn a_tomb_that_is_written_elsewhere_removes_what_stays() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let blob = Blob::action(1, 0, 500);
        world.put(&blob).await.expect("stored");
        let faults = fail_next(Operation::Write, 1, EIO);
        assert_eq!(world.of(&blob.key).purge(&[blob.key]).await, Ok(vec![true]));
        drop(faults);
        assert_eq!(world.stats().write_errors, 1);
        let copy = crash_copy(dir.path());
        let other = World::open(copy.path(), 64, 1, Ack::Buffered).await;
        assert!(!other.of(&blob.key).contains(&blob.key));
    });
}

/// Goal: a purged key does not come back when the segment of its tomb has long been freed, while the segment of its record
/// stays because it is full of what is used; nor when it was stored anew after the purge, and that was evicted. Method: the first
/// segments are filled with blobs that are used all the time, and the keys among them; then the cache is filled several times
/// over, and copied as a crash would leave it.
#[test]
fn a_tomb_outlives_its_segment() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let hot: Vec<Blob> = (0..1200).map(|number| Blob::cas(number, 10_000)).collect();
        let (gone, again) = (2_000..2_040, 3_000..3_040);
        let mut dead = gone.clone().chain(again.clone());
        for blob in &hot {
            world.put(blob).await.expect("stored");
            if let Some(number) = dead.next() {
                world.put(&Blob::action(number, 0, 300)).await.expect("stored");
            }
        }
        let keys: Vec<Key> = gone.clone().chain(again.clone()).map(|number| Blob::action(number, 0, 300).key).collect();
        assert_eq!(world.disks[0].purge(&keys).await, Ok(vec![true; keys.len()]));
        for number in again.clone() {
            world.put(&Blob::action(number, 1, 300)).await.expect("stored anew");
        }
        let (mut number, mut crashes) = (10_000u64, 0);
        while crashes < 4 {
            crashes += 1;
            for _ in 0..1200 {
                number += 1;
                world.put(&Blob::cas(number, 60_000)).await.expect("stored");
                if number.is_multiple_of(50) {
                    hot.iter().for_each(|blob| _ = world.of(&blob.key).contains(&blob.key));
                }
            }
            let copy = crash_copy(dir.path());
            // With more room, so that nothing is evicted from the copy.
            let other = World::open(copy.path(), 80, 2, Ack::Buffered).await;
            for number in gone.clone() {
                let key = Blob::action(number, 0, 300).key;
                assert!(!other.of(&key).contains(&key), "{number} came back after {crashes} fillings");
            }
            for number in again.clone() {
                // The first version has other bytes than the second: `has` compares.
                other.has(&Blob::action(number, 1, 300)).await;
            }
        }
        let stats = world.stats();
        assert!(stats.evicted_entries > 3000, "{stats:?}");
        let stay = hot.iter().filter(|blob| world.of(&blob.key).contains(&blob.key)).count();
        assert_eq!(stay, hot.len(), "the blobs in use were to stay");
    });
}

/// Goal: a walk sees every action once, with its origin, wherever its record stands, and no blob. Method: actions of two
/// instances and two times among blobs, in the write buffer, on disk, in pieces, moved, replaced and removed; walks before and
/// after restarts with other numbers of cores, and one that purges what it finds.
#[test]
fn walks_over_actions() {
    let dir = directory();
    block_on(async {
        let mut world = World::open(dir.path(), 96, 2, Ack::Flushed).await;
        let origin = |number: u64| Origin {
            stored_s: if number.is_multiple_of(3) { 1000 } else { 2000 },
            instance: InstanceTag::of(if number.is_multiple_of(2) { "even" } else { "odd" }),
        };
        let key = |number: u64| Blob::action(number, 0, 1).key;
        for number in 0..600u64 {
            let data = vec![number as u8; if number % 100 == 7 { 300_000 } else { 200 }];
            for _ in 0..1 + number % 2 {
                world
                    .of(&key(number))
                    .append_action(&key(number), origin(number), &data, Older::Replaced)
                    .await
                    .expect("stored");
            }
            world.put(&Blob::cas(10_000 + number, 20_000)).await.expect("stored");
        }
        for number in 590..600 {
            world.of(&key(number)).remove(&key(number), None).await.expect("removed");
        }
        let even = Which { instance: Some(InstanceTag::of("even")), ..Which::default() };
        let (since, before) = (Which { since_s: Some(1500), ..even }, Which { before_s: Some(1500), ..even });
        let expected = |which: &Which| (0..590u64).filter(|number| which.covers(origin(*number))).count();
        for cores in [2, 1, 3] {
            for which in [Which::default(), even, since, before] {
                let mut keys = covered(&world, &which).await;
                let found = keys.len();
                keys.sort_unstable_by_key(|key| key.hash.0);
                keys.dedup();
                assert_eq!((keys.len(), found), (expected(&which), expected(&which)), "{which:?} on {cores} cores");
                assert!(keys.iter().all(|key| key.kind.is_action()));
            }
            world.shutdown().await;
            world = World::open(dir.path(), 96, cores, Ack::Flushed).await;
        }
        for key in covered(&world, &even).await {
            assert_eq!(world.of(&key).purge(&[key]).await, Ok(vec![true]));
        }
        let copy = crash_copy(dir.path());
        let other = World::open(copy.path(), 96, 2, Ack::Buffered).await;
        for world in [&world, &other] {
            assert!(covered(world, &even).await.is_empty());
            let odd = Which { instance: Some(InstanceTag::of("odd")), ..Which::default() };
            assert_eq!(covered(world, &Which::default()).await.len(), expected(&odd));
        }
        let plain = Blob::action(20_000, 0, 10);
        world.of(&plain.key).append(&plain.key, Codec::Raw, 10, &[&[0; 10]]).await.expect("stored");
        assert_eq!(covered(&world, &even).await, [plain.key], "whose instance is not known fits every one");
    });
}
