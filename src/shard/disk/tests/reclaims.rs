//! Reclaims that are ordered by hand: what is on the drive when a segment is erased.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;

use tempfile::TempDir;

use super::*;
use crate::pure::eviction::{Lease, Order, Outcome};
use crate::pure::recency::Epoch;
use crate::pure::segment::HEAD_LEN;
use crate::rt::channel::{Receiver, Sender, bounded};
use crate::rt::faults::{EIO, fail_next};
use crate::shard::geometry;
use crate::shard::pool::{FromPool, ToPool};

/// Bytes of a segment.
const SEGMENT_LEN: u64 = 1 << 20;
/// Bytes of a blob: 17 fill a segment.
const LEN: u64 = 60_000;

/// A disk whose pool leases one segment after the other, and reclaims what it is told to.
struct ByHand {
    world: World,
    orders: Sender<FromPool>,
    outcomes: Receiver<Outcome>,
    /// There are no more segments.
    is_full: Rc<Cell<bool>>,
}

impl ByHand {
    async fn open(dir: &Path, ack: Ack) -> Self {
        Self::open_leasing(dir, ack, 0..).await
    }

    /// The same, with `segments` in the order in which they are leased.
    async fn open_leasing(dir: &Path, ack: Ack, segments: impl Iterator<Item = u32> + 'static) -> Self {
        let volume = geometry::open(&DiskConfig { dir: dir.into(), max_size_bytes: 64 << 20, ack }).expect("it opens");
        let map = ShardMap::new(volume.shards(), 1);
        let (requests, mut asked) = bounded(8);
        let (orders, messages) = bounded(8);
        let (mut ended, outcomes) = bounded(8);
        let is_full = Rc::new(Cell::new(false));
        let refuses = is_full.clone();
        crate::rt::spawn(async move {
            let mut leases = segments.zip(1..);
            while let Some(message) = asked.recv().await {
                match message {
                    ToPool::Ask { reply, .. } | ToPool::AskForReclaim { reply, .. } if refuses.get() => {
                        reply.send(None)
                    }
                    ToPool::Ask { shard, class, reply } | ToPool::AskForReclaim { shard, class, reply } => {
                        let (segment, generation) = leases.next().expect("without end");
                        reply.send(Some(Lease { segment, shard, class, generation }));
                    }
                    ToPool::Reclaimed { outcome, .. } => ended.send(outcome).await.expect("the test waits for it"),
                    ToPool::Returned { .. } => {}
                }
            }
        });
        let port = PoolPort { requests, messages, epoch: Epoch::FIRST, leased_in: HashMap::new() };
        let disk = Disk::open(volume, 0, 1, port).await.expect("the disk opens");
        Self { world: World { disks: vec![disk], map }, orders, outcomes, is_full }
    }

    fn disk(&self) -> &Disk {
        &self.world.disks[0]
    }

    /// Blobs of the first shard, so that they stand one behind the other.
    fn blobs(&self, from: u64) -> impl Iterator<Item = Blob> + use<> {
        of_first_shard(self.world.map, from, LEN)
    }

    /// Where the record of `key` stands.
    fn segment_of(&self, key: &Key) -> u64 {
        let (shard, tag) = self.disk().locate(key).expect("on this core");
        let word = shard.state.with(|state| state.index.get(tag)).expect("it is there");
        word.location() * RECORD_ALIGN as u64 / SEGMENT_LEN
    }

    /// Stores blobs until one stands in `segment`; gives all of them.
    async fn fill_to(&self, segment: u64, from: u64) -> Vec<Blob> {
        let mut stored = Vec::new();
        for blob in self.blobs(from) {
            self.world.put(&blob).await.expect("stored");
            stored.push(blob);
            if self.segment_of(&blob.key) == segment {
                break;
            }
        }
        stored
    }

    /// Fills segments 0 and 1, purges what segment 0 holds, so that its tombs stand in segment 1, and leaves little else there.
    /// Returns what was purged.
    async fn purge_first(&self) -> Vec<Blob> {
        let mut first = self.fill_to(1, 0).await;
        first.pop();
        let keys: Vec<Key> = first.iter().map(|blob| blob.key).collect();
        assert_eq!(self.disk().purge(&keys).await, Ok(vec![true; keys.len()]));
        let second = self.fill_to(2, 1000).await;
        self.thin_out(&second).await;
        first
    }

    /// Removes every other one. The rest, and those that are gone.
    async fn thin_out(&self, blobs: &[Blob]) -> (Vec<Blob>, Vec<Blob>) {
        let (mut rest, mut gone) = (Vec::new(), Vec::new());
        for (blob, n) in blobs.iter().zip(0..) {
            if n % 2 == 0 {
                rest.push(*blob);
            } else {
                assert_eq!(self.disk().remove(&blob.key, None).await, Ok(true));
                gone.push(*blob);
            }
        }
        (rest, gone)
    }

    async fn reclaim(&mut self, segment: u32, cutoff: Epoch, force: bool) -> Outcome {
        self.reclaim_in(Epoch::FIRST, segment, cutoff, force).await
    }

    async fn reclaim_in(&mut self, now: Epoch, segment: u32, cutoff: Epoch, force: bool) -> Outcome {
        let order = Order { segment, shard: ShardId(0), now, cutoff, force };
        assert!(self.orders.send(FromPool::Reclaim(order)).await.is_ok());
        self.outcomes.recv().await.expect("an order ends")
    }
}

async fn check(world: &World, there: &[Blob], gone: &[Blob]) {
    for blob in there {
        assert!(world.has(blob).await, "{blob:?} is lost");
    }
    for blob in gone {
        assert!(!world.of(&blob.key).contains(&blob.key), "{blob:?} came back");
    }
}

/// Wipes the header of `segment`, and opens what is left.
async fn open_without(dir: &Path, segment: u64) -> World {
    let file = std::fs::OpenOptions::new().write(true).open(dir.join("data.0")).expect("opened");
    file.write_all_at(&[0; HEAD_LEN as usize], segment * SEGMENT_LEN).expect("written");
    World::open(dir, 64, 1, Ack::Flushed).await
}

/// Goal: a segment is erased when all of it that is in use is on the drive elsewhere, with `durable` also after a power cut; and it
/// is erased when it is reported as free. Method: a segment is reclaimed when half of it has been removed; what a crash would leave
/// at the moment of its erasure, or what had been written when the last sync before that began, is opened without the segment.
#[test]
fn a_segment_is_erased_after_its_records_are_copied() {
    for ack in [Ack::Flushed, Ack::Durable] {
        let dir = directory();
        block_on(async {
            let mut hand = ByHand::open(dir.path(), ack).await;
            let mut all = hand.fill_to(1, 0).await;
            let last = all.pop().expect("some");
            let (mut stay, gone) = hand.thin_out(&all).await;
            stay.push(last);
            let (path, synced) = (dir.path().to_owned(), RefCell::new(crash_copy(dir.path())));
            let erasure: Rc<RefCell<Option<TempDir>>> = Rc::default();
            let seen = erasure.clone();
            let faults = plan(move |operation, offset| {
                match operation {
                    Operation::Sync if ack == Ack::Durable => _ = synced.replace(crash_copy(&path)),
                    Operation::Write if offset == 0 => {
                        let image =
                            if ack == Ack::Durable { synced.replace(crash_copy(&path)) } else { crash_copy(&path) };
                        seen.borrow_mut().get_or_insert(image);
                    }
                    _ => {}
                }
                None
            });
            assert_eq!(hand.reclaim(0, Epoch::FIRST, false).await, Outcome::Freed);
            drop(faults);
            check(&hand.world, &stay, &gone).await;
            let at_erasure = erasure.take().expect("it is erased");
            check(&open_without(at_erasure.path(), 0).await, &stay, &gone).await;
            let copy = crash_copy(dir.path());
            let headers = geometry::open(&DiskConfig { dir: copy.path().into(), max_size_bytes: 64 << 20, ack });
            assert_eq!(headers.expect("it opens").headers()[0], None);
        });
    }
}

/// Goal: a segment with something in use that there is no room for elsewhere stays as it is, unless the order is forced: then that is
/// evicted; and one that cannot be erased is not free. Method: a full log, and no more segments; then an erasure that fails.
#[test]
fn a_segment_that_cannot_be_emptied_stays() {
    let dir = directory();
    block_on(async {
        let mut hand = ByHand::open(dir.path(), Ack::Flushed).await;
        let mut all = hand.fill_to(1, 0).await;
        all.pop();
        let (stay, _) = hand.thin_out(&all).await;
        hand.is_full.set(true);
        for blob in hand.blobs(1000) {
            if hand.world.put(&blob).await.is_err() {
                break;
            }
        }
        let erasures = Rc::new(Cell::new(0));
        let seen = erasures.clone();
        let faults = plan(move |operation, offset| {
            let erases = operation == Operation::Write && offset == 0;
            seen.set(seen.get() + u32::from(erases));
            // The first one.
            (erases && seen.get() == 1).then_some(EIO)
        });
        assert_eq!(hand.reclaim(0, Epoch::FIRST, false).await, Outcome::Pinned);
        check(&hand.world, &stay, &[]).await;
        assert_eq!(erasures.get(), 0);
        assert_eq!(hand.reclaim(0, Epoch::FIRST, true).await, Outcome::Pinned, "it cannot be erased");
        check(&hand.world, &[], &stay).await;
        assert_eq!(hand.reclaim(0, Epoch::FIRST, true).await, Outcome::Freed);
        assert_eq!(erasures.get(), 2);
        drop(faults);
    });
}

/// Goal: what was purged does not come back with a segment whose erasure a power cut undoes. Method: keys are purged that stand in
/// one segment, their tombs in the next; both are reclaimed: between the two erasures there is a sync.
#[test]
fn the_erasure_of_tombs_comes_after_that_of_what_they_remove() {
    let dir = directory();
    block_on(async {
        let mut hand = ByHand::open(dir.path(), Ack::Flushed).await;
        hand.purge_first().await;
        let done: Rc<RefCell<Vec<(Operation, u64)>>> = Rc::default();
        let seen = done.clone();
        let faults = plan(move |operation, offset| {
            seen.borrow_mut().push((operation, offset));
            None
        });
        for segment in [0, 1] {
            assert_eq!(hand.reclaim(segment, Epoch::FIRST, false).await, Outcome::Freed);
        }
        drop(faults);
        let done = done.borrow();
        let place = |segment| done.iter().position(|&did| did == (Operation::Write, segment * SEGMENT_LEN));
        let (one, two) = (place(0).expect("it is erased"), place(1).expect("it is erased"));
        assert!(one < two && done[one..two].iter().any(|(operation, _)| *operation == Operation::Sync));
    });
}

/// Goal: a tomb of a purge goes on when its segment is freed before that of what it removes; there it spares what was stored
/// after the purge. Method: keys are purged and some of them stored again, in three segments; the one of the tombs is reclaimed;
/// what a crash leaves has the new ones, and of the others none.
#[test]
fn a_moved_tomb_removes_what_is_older_and_nothing_else() {
    let dir = directory();
    block_on(async {
        let mut hand = ByHand::open(dir.path(), Ack::Flushed).await;
        let first = hand.purge_first().await;
        let (again, gone) = first.split_at(first.len() / 2);
        for blob in again {
            hand.world.put(blob).await.expect("stored again");
            assert_eq!(hand.segment_of(&blob.key), 2);
        }
        assert_eq!(hand.reclaim(1, Epoch::FIRST, false).await, Outcome::Freed);
        check(&hand.world, again, gone).await;
        let copy = crash_copy(dir.path());
        check(&open_without(copy.path(), 1).await, again, gone).await;
    });
}

/// Goal: the chunks of an evicted blob are kept until its tomb is on the drive. Method: a reclaim of the only chunk segment; at each
/// write all chunks are given back that may be, and the others counted.
#[test]
fn an_evicted_blob_keeps_its_chunks_until_its_tomb_is_on_the_drive() {
    let dir = directory();
    block_on(async {
        let mut hand = ByHand::open(dir.path(), Ack::Buffered).await;
        let blob = of_first_shard(hand.world.map, 0, 300_000).next().expect("some");
        hand.world.put(&blob).await.expect("stored");
        hand.disk().flushed().await;
        let before = hand.disk().chunks_taken();
        let (watched, least) = (hand.disk().clone(), Rc::new(Cell::new(u32::MAX)));
        let seen = least.clone();
        let faults = plan(move |operation, _| {
            if operation == Operation::Write {
                watched.0.dig();
                seen.set(seen.get().min(watched.chunks_taken()));
            }
            None
        });
        assert_eq!(hand.reclaim(0, Epoch(u64::MAX), false).await, Outcome::Freed);
        drop(faults);
        assert_eq!((least.get(), hand.disk().chunks_taken()), (before, 0));
        assert!(!hand.world.has(&blob).await);
    });
}

/// Goal: a large blob stays until its last use is before the cutoff, as often as its segment is looked at, and its age does not come
/// round where that is not often. Method: a blob that is never used again; orders whose cutoff is its epoch, and later ones, up to
/// more epochs on than a stamp tells apart.
#[test]
fn a_large_blob_stays_until_its_time() {
    let epochs_on = |count| Epoch(Epoch::FIRST.0 + count);
    let kept = |epoch| Outcome::Kept { epoch, freed_parts: 0 };
    let ways = [
        vec![(0, 0, kept(Epoch::FIRST)), (1, 0, kept(Epoch::FIRST)), (1, 1, Outcome::Freed)],
        // Older than 15 epochs is told apart no more.
        vec![(20, 5, kept(epochs_on(5))), (36, 21, kept(epochs_on(21))), (36, 22, Outcome::Freed)],
    ];
    for orders in ways {
        let dir = directory();
        block_on(async {
            let mut hand = ByHand::open(dir.path(), Ack::Flushed).await;
            let blob = of_first_shard(hand.world.map, 0, 300_000).next().expect("some");
            hand.world.put(&blob).await.expect("stored");
            for (now, cutoff, outcome) in orders {
                assert_eq!(hand.reclaim_in(epochs_on(now), 0, epochs_on(cutoff), false).await, outcome);
                // Why not asked for by its key: that would be a use.
                assert_eq!(hand.disk().first_chunk(&blob.key).is_some(), outcome != Outcome::Freed);
            }
        });
    }
}

/// Goal: what has moved to another segment is not judged with the one where it was. Method: an action is replaced whose chunks filled
/// a segment together with those of a blob; a reclaim of that segment takes the blob alone.
#[test]
fn a_segment_goes_without_what_has_moved() {
    let dir = directory();
    block_on(async {
        let mut hand = ByHand::open(dir.path(), Ack::Flushed).await;
        let map = hand.world.map;
        let blob = of_first_shard(map, 0, 5 * CHUNK_LEN as u64).next().expect("some");
        let actions = |version| (0..).map(move |number| Blob::action(number, version, 10 * CHUNK_LEN as u64));
        let [old, new] = [1, 2].map(|version| {
            actions(version).find(|action| map.shard_of(&action.key.hash) == ShardId(0)).expect("without end")
        });
        for stored in [blob, old, new] {
            hand.world.put(&stored).await.expect("stored");
        }
        let chunks_of_segment = hand.disk().0.layout.chunks_per_segment();
        assert_eq!(hand.disk().first_chunk(&blob.key), Some(0));
        assert!(hand.disk().first_chunk(&new.key).is_some_and(|first| first >= chunks_of_segment));
        assert_eq!(hand.reclaim(0, Epoch::FIRST.next(), false).await, Outcome::Freed);
        check(&hand.world, &[new], &[blob]).await;
    });
}

/// Goal: which record is later is told by when segments were leased, not by where they lie. Method: the second segment is leased
/// first; an action stands there, and replaced in the one before it.
#[test]
fn later_leases_hold_what_is_later() {
    let dir = directory();
    block_on(async {
        let hand = ByHand::open_leasing(dir.path(), Ack::Flushed, [1, 0].into_iter().chain(2..)).await;
        let map = hand.world.map;
        let actions = |version| (0..).map(move |number| Blob::action(number, version, 900));
        let [old, new] = [1, 2].map(|version| {
            actions(version).find(|action| map.shard_of(&action.key.hash) == ShardId(0)).expect("without end")
        });
        hand.world.put(&old).await.expect("stored");
        assert_eq!(hand.segment_of(&old.key), 1);
        hand.fill_to(0, 0).await;
        hand.world.put(&new).await.expect("stored");
        assert_eq!(hand.segment_of(&new.key), 0);
        let copy = crash_copy(dir.path());
        check(&World::open(copy.path(), 64, 1, Ack::Flushed).await, &[new], &[]).await;
    });
}

/// Goal: a segment that could not be written to is not used again. Method: a write to it fails, which is made good elsewhere; then it is
/// reclaimed.
#[test]
fn a_segment_that_failed_is_retired() {
    let dir = directory();
    block_on(async {
        let mut hand = ByHand::open(dir.path(), Ack::Flushed).await;
        let mut blobs = hand.blobs(0);
        let [one, two] = std::array::from_fn(|_| blobs.next().expect("without end"));
        hand.world.put(&one).await.expect("stored");
        let faults = fail_next(Operation::Write, 1, EIO);
        hand.world.put(&two).await.expect("stored elsewhere");
        drop(faults);
        assert_eq!((hand.segment_of(&one.key), hand.segment_of(&two.key)), (0, 1));
        assert_eq!(hand.reclaim(0, Epoch::FIRST, false).await, Outcome::Retired);
        check(&hand.world, &[one, two], &[]).await;
    });
}

/// Goal: the segment that is being filled is not emptied. Method: a reclaim of it, and what a crash leaves then.
#[test]
fn a_segment_that_is_filled_stays() {
    let dir = directory();
    block_on(async {
        let mut hand = ByHand::open(dir.path(), Ack::Flushed).await;
        let blob = hand.blobs(0).next().expect("without end");
        hand.world.put(&blob).await.expect("stored");
        assert_eq!(hand.reclaim(0, Epoch::FIRST, false).await, Outcome::Pinned);
        let copy = crash_copy(dir.path());
        check(&World::open(copy.path(), 64, 1, Ack::Flushed).await, &[blob], &[]).await;
    });
}
