//! The disk engine on a device that fails.

use std::cell::Cell;
use std::rc::Rc;

use futures_util::future::{join, join_all};

use super::disk::{Ack, DiskError};
use super::disk_tests::{Blob, World, crash_copy, directory};
use super::tests::SplitMix64;
use crate::limits::FRAME_LEN;
use crate::rt::cores::block_on;
use crate::rt::faults::{EIO, ENOSPC, Operation, fail_next, plan};
use crate::rt::time::yield_to_reactor;

/// Small blobs and actions, which all go to the log.
fn small(seed: u64, count: u64) -> Vec<Blob> {
    let mut random = SplitMix64(seed);
    (0..count)
        .map(|n| match random.below(3) {
            0 => Blob::action(seed << 32 | n, 0, 1 + random.below(3000)),
            1 => Blob::cas(seed << 32 | n, 1 + random.below(100_000)),
            _ => Blob::cas(seed << 32 | n, 1 + random.below(5000)),
        })
        .collect()
}

async fn has_all(world: &World, blobs: &[Blob]) -> bool {
    join_all(blobs.iter().map(|blob| world.has(blob))).await.into_iter().all(|has| has)
}

/// Goal: a write to the log that fails costs nothing but its segment: what was in the buffer is acknowledged, read, and there
/// after a crash, and a removal still holds. Method: one failing write under a put, and one under a removal, with each error.
#[test]
fn a_failed_write_is_made_good_elsewhere() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let mut stored = small(1, 30);
        for blob in &stored {
            world.put(blob).await.expect("stored");
        }
        for (errors, errno) in (1..).zip([EIO, ENOSPC]) {
            let (blob, gone) = (Blob::cas(50 + errors, 3000), stored.remove(0));
            let faults = fail_next(Operation::Write, 1, errno);
            world.put(&blob).await.expect("stored elsewhere");
            drop(faults);
            assert_eq!(world.stats().write_errors, 2 * errors - 1);
            let faults = fail_next(Operation::Write, 1, errno);
            assert_eq!(world.of(&gone.key).remove(&gone.key, None).await, Ok(true));
            drop(faults);
            assert_eq!(world.stats().write_errors, 2 * errors);
            stored.push(blob);
            assert!(has_all(&world, &stored).await && !world.has(&gone).await);
            let copy = crash_copy(dir.path());
            let other = World::open(copy.path(), 64, 2, Ack::Buffered).await;
            assert!(has_all(&other, &stored).await && !other.has(&gone).await);
        }
        assert_eq!((world.stats().evicted_entries, world.stats().damaged_records), (0, 0));
    });
}

/// Goal: writes that fail now and then, also those that make others good, lose nothing. Method: many puts at once while a random
/// one of five writes fails, ten in all; then a crash; then the cache is filled three times over, so that the segments that
/// failed are reclaimed.
#[test]
fn writes_that_fail_now_and_then_lose_nothing() {
    const SEED: u64 = 5;
    println!("seed {SEED}");
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let (mut random, mut left) = (SplitMix64(SEED), 10);
        let faults = plan(move |operation, _| {
            let fails = operation == Operation::Write && left > 0 && random.below(5) == 0;
            left -= u32::from(fails);
            fails.then_some(EIO)
        });
        let blobs = small(2, 500);
        for some in blobs.chunks(50) {
            for result in join_all(some.iter().map(|blob| world.put(blob))).await {
                result.expect("stored");
            }
        }
        drop(faults);
        assert_eq!(world.stats().write_errors, 10);
        assert!(has_all(&world, &blobs).await);
        let copy = crash_copy(dir.path());
        let other = World::open(copy.path(), 64, 2, Ack::Buffered).await;
        assert!(has_all(&other, &blobs).await);
        drop(other);
        for number in 0..2000 {
            world.put(&Blob::cas(number, 100_000)).await.expect("there is room");
        }
        assert_eq!(world.stats().damaged_records, 0);
    });
}

/// Goal: on a device that takes no write at all an upload fails and leaves nothing, and what is there is still served. Method: all
/// writes fail, for log and chunks.
#[test]
fn a_device_that_takes_nothing_is_still_read() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let stored = small(3, 30);
        for blob in &stored {
            world.put(blob).await.expect("stored");
        }
        let large = Blob::cas(1, 3 << 20);
        world.put(&large).await.expect("stored");
        let faults = plan(|operation, _| (operation == Operation::Write).then_some(EIO));
        let more: Vec<Blob> = small(4, 20).into_iter().chain([Blob::cas(2, FRAME_LEN as u64 + 1)]).collect();
        for blob in &more {
            assert!(matches!(world.put(blob).await, Err(DiskError::Io(_))));
            assert!(!world.has(blob).await);
        }
        assert!(has_all(&world, &stored).await && world.has(&large).await);
        drop(faults);
    });
}

/// Goal: whoever uploads what is here is told no more than holds: with `flushed` it has been written, with `durable` synced, also
/// after its write failed once, after a crash, and never on the word of a write or sync that failed. Method: what the device does
/// is written down; a second upload asks while the first one waits.
#[test]
fn what_was_here_before_is_acknowledged_alike() {
    for (ack, needed) in [(Ack::Flushed, Operation::Write), (Ack::Durable, Operation::Sync)] {
        let dir = directory();
        block_on(async {
            let world = World::open(dir.path(), 64, 1, ack).await;
            for (number, fails) in (0..).zip([false, false, true]) {
                let blob = Blob::cas(80 + number, if number == 1 { 1 << 20 } else { 3000 });
                let disk = world.of(&blob.key);
                assert_eq!(disk.holds(&blob.key).await, Ok(false));
                let done = Rc::new(Cell::new(0));
                let (counted, mut left) = (done.clone(), u32::from(fails));
                let faults = plan(move |operation, _| {
                    let fails = operation == Operation::Write && left > 0;
                    left -= u32::from(fails);
                    counted.set(if operation == needed && !fails { counted.get() + 1 } else { counted.get() });
                    fails.then_some(EIO)
                });
                let second = async {
                    while !disk.contains(&blob.key) {
                        yield_to_reactor().await;
                    }
                    let before = done.get();
                    assert_eq!(disk.holds(&blob.key).await, Ok(true));
                    done.get() > before
                };
                let (first, waited) = join(world.put(&blob), second).await;
                first.expect("stored");
                assert!(waited, "{ack:?}: the second upload was answered before the blob was safe");
                let before = done.get();
                assert_eq!(disk.holds(&blob.key).await, Ok(true));
                assert_eq!(done.get(), before, "what is safe is not waited for");
                drop(faults);
            }
            let lost = Blob::cas(90, 3000);
            let disk = world.of(&lost.key);
            let faults = plan(|operation, _| (operation == Operation::Write).then_some(EIO));
            let second = async {
                while !disk.contains(&lost.key) {
                    yield_to_reactor().await;
                }
                disk.holds(&lost.key).await
            };
            let (first, second) = join(world.put(&lost), second).await;
            assert!(first.is_err() && second == Ok(false), "{second:?}");
            drop(faults);
            let found = Blob::cas(80, 3000);
            let copy = crash_copy(dir.path());
            let other = World::open(copy.path(), 64, 2, ack).await;
            assert_eq!(other.of(&found.key).holds(&found.key).await, Ok(true));
            let syncs: u64 = other.disks.iter().map(|disk| disk.stats().syncs).sum();
            assert!(ack != Ack::Durable || syncs > 0, "what a killed process wrote is synced first");
        });
    }
}

/// Goal: a failed write of a large blob costs that upload, and the next try goes elsewhere; a failed header costs nothing. Method:
/// the first write to chunks fails; it is told from a header by its place in a segment of 1 MiB.
#[test]
fn a_failed_chunk_write_costs_the_upload() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let blob = Blob::cas(1 << 24, 3 << 20);
        for (header, errors) in [(false, 1), (true, 2)] {
            let mut left = 1;
            let faults = plan(move |operation, offset| {
                let fails = operation == Operation::Write && offset.is_multiple_of(1 << 20) == header && left > 0;
                left -= u32::from(fails);
                fails.then_some(EIO)
            });
            assert_eq!(world.put(&blob).await.is_ok(), header);
            assert_eq!((world.has(&blob).await, world.stats().write_errors), (header, errors));
            drop(faults);
        }
    });
}

/// Goal: a read that fails costs the record that it was for, once. Method: one failing read for each kind of record.
#[test]
fn a_failed_read_is_a_miss() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let blobs = [Blob::action(1, 0, 500), Blob::cas(2, 5000), Blob::cas(3, 200_000), Blob::cas(4, 2 << 20)];
        for blob in &blobs {
            world.put(blob).await.expect("stored");
        }
        for (errors, blob) in (1..).zip(&blobs) {
            let faults = fail_next(Operation::Read, 1, EIO);
            assert!(!world.has(blob).await);
            drop(faults);
            assert_eq!((world.stats().read_errors, world.stats().damaged_records), (errors, errors));
            assert!(!world.of(&blob.key).contains(&blob.key));
            world.put(blob).await.expect("stored anew");
            assert!(has_all(&world, &blobs).await);
        }
    });
}

/// Goal: nothing is acknowledged as durable on the word of a sync that failed. Method: one failing sync under a put.
#[test]
fn a_failed_sync_acknowledges_nothing() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Durable).await;
        let (first, second) = (Blob::cas(1, 3000), Blob::cas(2, 3000));
        let faults = fail_next(Operation::Sync, 1, EIO);
        assert!(matches!(world.put(&first).await, Err(DiskError::Io(_))));
        drop(faults);
        world.put(&second).await.expect("durable");
        assert!(world.has(&second).await);
        assert_eq!(world.stats().write_errors, 1);
    });
}

/// Goal: a shutdown ends on a device that takes no write, and costs what was not written before, no more. Method: all writes
/// fail under a shutdown; then the directory is opened anew.
#[test]
fn a_shutdown_without_writes_ends() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let blobs = small(6, 30);
        for blob in &blobs {
            world.put(blob).await.expect("stored");
        }
        let faults = plan(|operation, _| (operation == Operation::Write).then_some(EIO));
        world.shutdown().await;
        drop(faults);
        let world = World::open(dir.path(), 64, 2, Ack::Flushed).await;
        assert!(has_all(&world, &blobs).await);
    });
}

/// Goal: nothing is written after a shutdown, although reclaims were under way, and what is used is there after it. Method: a full
/// cache with a hot set; the shutdown begins when the first record has been copied forward.
#[test]
fn a_shutdown_waits_for_reclaims() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let hot: Vec<Blob> = (0..200).map(|number| Blob::cas(number, 20_000)).collect();
        for blob in &hot {
            world.put(blob).await.expect("stored");
        }
        let mut number = 1000;
        while world.stats().reinserted_records == 0 {
            hot.iter().for_each(|blob| _ = world.of(&blob.key).contains(&blob.key));
            number += 1;
            world.put(&Blob::cas(number, 100_000)).await.expect("there is room");
        }
        let writes = Rc::new(Cell::new(0));
        let seen = writes.clone();
        let faults = plan(move |operation, _| {
            seen.set(seen.get() + u32::from(operation == Operation::Write));
            None
        });
        let disk = world.disks[0].clone();
        world.shutdown().await;
        let at_the_end = writes.get();
        for _ in 0..200 {
            yield_to_reactor().await;
        }
        assert_eq!(writes.get(), at_the_end, "written after the shutdown");
        drop((faults, disk));
        let world = World::open(dir.path(), 80, 1, Ack::Flushed).await;
        assert!(has_all(&world, &hot).await);
    });
}
