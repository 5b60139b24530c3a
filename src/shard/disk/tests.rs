//! What the engine holds to between its steps, seen from inside.

mod reclaims;

use std::cell::Cell;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use super::*;
use crate::limits::CHUNK_LEN;
use crate::pure::shard_map::{ShardId, ShardMap};
use crate::rt::cores::block_on;
use crate::rt::faults::{Operation, plan};
use crate::rt::local::Event;
use crate::rt::time::timeout;
use crate::shard::disk_tests::{Blob, World, crash_copy, directory};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

impl Disk {
    /// All that was stored up to now is on the drive.
    async fn flushed(&self) {
        for shard in self.0.own_shards() {
            self.0.flush_shard(shard);
            self.0.settle(shard).await;
        }
    }

    /// Chunks that are taken.
    fn chunks_taken(&self) -> u32 {
        let taken =
            |state: &mut ShardState| state.chunks.segments().map(|segment| state.chunks.taken(segment)).sum::<u32>();
        self.0.own_shards().map(|shard| shard.state.with(taken)).sum()
    }

    /// Waits until so many chunks are taken. Whoever gives some back says so to their shard.
    async fn comes_to_chunks(&self, key: &Key, taken: u32) -> bool {
        let (shard, _) = self.locate(key).expect("on this core");
        let come = async {
            loop {
                let changed = shard.changed.wait();
                if self.chunks_taken() == taken {
                    return;
                }
                changed.await;
            }
        };
        timeout(PATIENCE, come).await.is_ok()
    }

    fn first_chunk(&self, key: &Key) -> Option<u32> {
        let (shard, tag) = self.locate(key).expect("on this core");
        shard.state.with(|state| state.large.get(&tag).map(|large| large.held.runs[0].first))
    }
}

/// Blobs whose hashes are of the first shard.
fn of_first_shard(map: ShardMap, from: u64, len: u64) -> impl Iterator<Item = Blob> {
    let blobs = (from..).map(move |number| Blob::cas(number, len));
    blobs.filter(move |blob| map.shard_of(&blob.key.hash) == ShardId(0))
}

/// Goal: what is being written is known as that, its segment is not reclaimed meanwhile, and a footer is not written before what it
/// lists. Method: all that is looked at when a write begins: of records, and of the footers of a full segment and a checkpoint.
#[test]
fn what_is_being_written_is_known() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Buffered).await;
        let disk = &world.disks[0];
        let blobs: Vec<Blob> = of_first_shard(world.map, 0, 60_000).take(30).collect();
        let keys: Vec<Key> = blobs.iter().map(|blob| blob.key).collect();
        let (shard, _) = disk.locate(&keys[0]).expect("on this core");
        // Writes of records, writes of footers, and what was wrong at one.
        let seen: Rc<Cell<(u32, u32, u32)>> = Rc::default();
        let (noted, watched, log) = (seen.clone(), disk.clone(), shard.clone());
        let faults = plan(move |operation, offset| {
            if operation != Operation::Write {
                return None;
            }
            let (mut records, mut footers, mut wrong) = noted.get();
            let layout = watched.0.layout;
            let (segment, start) = layout.split(offset);
            wrong += u32::from(!log.state.with(|state| state.log.is_busy(segment)));
            let is_footer = start + DISK_ALIGN as u32 == layout.segment_len;
            footers += u32::from(is_footer);
            for (_, tag) in keys.iter().filter_map(|key| watched.locate(key).ok()) {
                let found = log.state.with(|state| {
                    let location = state.index.get(tag)?.location();
                    Some((location * RECORD_ALIGN as u64, state.log.pending(layout, location).is_some()))
                });
                let Some((position, is_pending)) = found else { continue };
                if is_footer && layout.split(position).0 == segment {
                    wrong += u32::from(is_pending);
                } else if position == offset {
                    records += 1;
                    wrong += u32::from(!is_pending);
                }
            }
            noted.set((records, footers, wrong));
            None
        });
        for blob in &blobs {
            world.put(blob).await.expect("stored");
        }
        disk.0.checkpoint(&shard).await;
        disk.flushed().await;
        drop(faults);
        let (records, footers, wrong) = seen.get();
        assert!(records > 2 && footers == 2 && wrong == 0, "{:?}", seen.get());
    });
}

/// Goal: what is stored behind a checkpoint is found after a crash. Method: some blobs, a checkpoint, and some more.
#[test]
fn a_checkpoint_ends_nothing() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let blobs: Vec<Blob> = of_first_shard(world.map, 0, 5_000).take(6).collect();
        let (shard, _) = world.disks[0].locate(&blobs[0].key).expect("on this core");
        for blob in &blobs[..3] {
            world.put(blob).await.expect("stored");
        }
        world.disks[0].0.checkpoint(&shard).await;
        for blob in &blobs[3..] {
            world.put(blob).await.expect("stored");
        }
        let copy = crash_copy(dir.path());
        let other = World::open(copy.path(), 64, 1, Ack::Flushed).await;
        for blob in &blobs {
            assert!(other.has(blob).await, "{blob:?} is lost");
        }
    });
}

/// Goal: a record that a crash has torn does not take the place of the one before it. Method: an action is replaced, and in what a
/// crash leaves the second half of the later record is wiped out.
#[test]
fn a_torn_record_replaces_nothing() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let (first, second) = (Blob::action(1, 1, 900), Blob::action(1, 2, 9000));
        world.put(&first).await.expect("stored");
        world.put(&second).await.expect("stored");
        let (shard, tag) = world.disks[0].locate(&second.key).expect("on this core");
        let word = shard.state.with(|state| state.index.get(tag)).expect("it is there");
        let copy = crash_copy(dir.path());
        let file = std::fs::OpenOptions::new().write(true).open(copy.path().join("data.0")).expect("opened");
        file.write_all_at(&[0; 4000], word.location() * RECORD_ALIGN as u64 + 5000).expect("written");
        assert!(World::open(copy.path(), 64, 1, Ack::Flushed).await.has(&first).await);
    });
}

/// Goal: what is written is synced a little later, also when nobody waits for it. Method: a put that is acknowledged when written.
#[test]
fn what_nobody_waits_for_is_synced() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let synced = Event::default();
        let (done, notified) = (synced.wait(), synced.clone());
        let faults = plan(move |operation, _| {
            if operation == Operation::Sync {
                notified.notify();
            }
            None
        });
        world.put(&Blob::cas(1, 3000)).await.expect("stored");
        assert!(timeout(PATIENCE, done).await.is_ok());
        drop(faults);
    });
}

/// Goal: where the tags of two keys meet, each is told from the other by its whole key, and what is there is not harmed. Method:
/// the record of one key is stored at the tag of another, which differs in its hash, in its kind, or in a size that the index
/// takes for the same.
#[test]
fn keys_whose_tags_meet_are_told_apart() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let disk = &world.disks[0];
        let stored = Blob::cas(1, 3000).key;
        let word = Word::small(1, &stored, 2000).expect("it fits");
        let same_check = (3001..).find(|&size| word.fits(&Key { size, ..stored })).expect("the check has 14 bits");
        let others =
            [Blob::cas(2, 3000).key, Key { kind: Kind::ScopedCas, ..stored }, Key { size: same_check, ..stored }];
        let data = vec![7; 2000];
        for asked in others {
            let (shard, tag) = disk.locate(&asked).expect("on this core");
            let header = Header {
                kind: RecordKind::Small,
                key: stored,
                codec: Codec::Zstd,
                pieces: false,
                raw_len: 3000,
                origin: Origin::default(),
                stored_len: data.len() as u32,
                payload_sum: disk.0.sums.payload(&data),
            };
            let record = Record { header, tag, payload: &[&data], large: None };
            let publish = |state: &mut ShardState, word, ticket: &Ticket| drop(state.publish(tag, word, ticket));
            let placed = disk.0.append_record(&shard, Urgency::Normal, &record, |_| true, publish).await;
            assert!(placed.is_ok() && disk.contains(&asked), "{asked:?}");
            assert!(matches!(disk.read(&asked).await, Ok(None)), "{asked:?}");
            if asked.hash != stored.hash {
                assert_eq!(disk.size_of(&asked.hash).await, Ok(None));
            }
            assert!(disk.contains(&asked), "the other one is innocent");
        }
        let Ok(Some(Stored::Small(found))) = disk.read(&stored).await else { panic!("its own key finds it") };
        assert!(found.data == data && disk.size_of(&stored.hash).await == Ok(Some(3000)));
        assert_eq!(disk.stats().damaged_records, 0);
    });
}

/// Goal: a tomb is not put behind a newer record of its key: that would be gone at the next start. Method: one that comes too
/// late, of each order.
#[test]
fn a_tomb_that_comes_too_late_is_refused() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let (disk, blob) = (&world.disks[0], Blob::cas(1, 3000));
        let (shard, tag) = disk.locate(&blob.key).expect("on this core");
        world.put(&blob).await.expect("stored");
        for order in [TombOrder::Here, TombOrder::LastingHere] {
            let appended = disk.0.append_tomb(&shard, tag, order, Urgency::Normal).await;
            assert_eq!(appended.err(), Some(AppendError::Refused));
        }
        disk.flushed().await;
        let copy = crash_copy(dir.path());
        assert!(World::open(copy.path(), 64, 1, Ack::Flushed).await.has(&blob).await);
    });
}

/// Goal: the chunks of a large blob stay taken until what ends it is on the drive, so that no crash leaves a commit that names
/// the chunks of another blob; then they are free. Method: a blob ends in each way; at every write that follows all chunks are
/// given back that may be, and the others counted.
#[test]
fn chunks_are_kept_until_their_blobs_end_is_on_the_drive() {
    // An action, so that a short value can take its place.
    let (long, short) = (Blob::action(1, 0, 300_000), Blob::action(1, 1, 100));
    let ways = ["removed", "purged", "damaged", "replaced by a short one", "replaced by a long one"];
    for way in ways {
        let dir = directory();
        block_on(async {
            let world = World::open(dir.path(), 64, 1, Ack::Buffered).await;
            let disk = &world.disks[0];
            world.put(&long).await.expect("stored");
            disk.flushed().await;
            let before = disk.chunks_taken();
            assert_eq!(before, 300_000_u32.div_ceil(CHUNK_LEN as u32));
            // The last write is that of what ends the blob.
            let (watched, taken) = (disk.clone(), Rc::new(Cell::new(0)));
            let seen = taken.clone();
            let faults = plan(move |operation, _| {
                if operation == Operation::Write {
                    watched.0.dig();
                    seen.set(watched.chunks_taken());
                }
                None
            });
            let left = match way {
                "removed" => disk.remove(&long.key, None).await.map(|_| 0),
                "purged" => disk.purge(&[long.key]).await.map(|_| 0),
                "damaged" => {
                    disk.damaged(&long.key);
                    Ok(0)
                }
                "replaced by a short one" => world.put(&short).await.map(|_| 0),
                _ => world.put(&Blob::action(1, 1, 300_000)).await.map(|_| before),
            };
            let left = left.expect("it goes well");
            assert!(disk.comes_to_chunks(&long.key, left).await, "{way}");
            drop(faults);
            assert_eq!(taken.get(), before + left, "{way}: given back too early");
        });
    }
}

/// Goal: a writer that is dropped gives back all chunks, wherever they are: written, on their way to the drive, staged, or left
/// over; and none while it is being written to. One that ends well keeps what it needs. Method: writers with so many bytes, whose
/// first stage is a segment of 15 chunks; the chunks are counted at each write.
#[test]
fn a_dropped_writer_gives_back_each_chunk() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Buffered).await;
        let disk = &world.disks[0];
        let segment = 15 * CHUNK_LEN;
        let key = Blob::cas(1, 6 << 20).key;
        for (len, closes) in [1, segment, segment + 1, 3 * segment].into_iter().flat_map(|n| [(n, false), (n, true)]) {
            let mut writer = disk.begin_large(&key).await.expect("begun");
            let (watched, untaken) = (disk.clone(), Rc::new(Cell::new(0)));
            let seen = untaken.clone();
            let faults = plan(move |operation, offset| {
                // Else it is the header of a segment.
                if operation == Operation::Write && !offset.is_multiple_of(1 << 20) {
                    watched.0.dig();
                    seen.set(seen.get() + u32::from(watched.chunks_taken() == 0));
                }
                None
            });
            for frame in vec![7; len].chunks(FRAME_LEN) {
                writer.push(Codec::Raw, frame).await.expect("there is room");
            }
            if closes {
                let (codec, raw_len, origin, older) = (Codec::Raw, key.size, Origin::default(), Older::Replaced);
                writer.close(Closing { codec, raw_len, pieces: false, origin, older }).await.expect("stored");
                assert!(disk.comes_to_chunks(&key, len.div_ceil(CHUNK_LEN) as u32).await, "{len} bytes");
                assert_eq!(disk.remove(&key, None).await, Ok(true));
            } else {
                drop(writer);
            }
            assert!(disk.comes_to_chunks(&key, 0).await, "{} are left of {len} bytes", disk.chunks_taken());
            // What is on its way ends before the plan does.
            disk.flushed().await;
            assert_eq!(untaken.get(), 0, "{len} bytes were written to chunks that were free");
            drop(faults);
        }
    });
}

/// Goal: a large blob is published with all of its frames or not at all. Method: one frame too few and one too many; then all.
#[test]
fn a_blob_without_all_of_its_frames_is_refused() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Buffered).await;
        let disk = &world.disks[0];
        let key = Blob::cas(1, 4 * FRAME_LEN as u64 - 1).key;
        for frames in [3, 5, 4] {
            let mut writer = disk.begin_large(&key).await.expect("begun");
            for _ in 0..frames {
                writer.push(Codec::Raw, &[7; FRAME_LEN]).await.expect("there is room");
            }
            assert_eq!((writer.commit().await.is_ok(), disk.contains(&key)), (frames == 4, frames == 4), "{frames}");
        }
    });
}

/// Goal: chunks that two commits name belong to the later one; the blob of the other is gone, and what comes later leaves them
/// alone. Method: a blob is removed and another one gets its chunks; a crash; in the copy the tomb is wiped out.
#[test]
fn chunks_belong_to_the_last_commit_that_names_them() {
    let dir = directory();
    block_on(async {
        let world = World::open(dir.path(), 64, 1, Ack::Flushed).await;
        let disk = &world.disks[0];
        let mut blobs = of_first_shard(world.map, 0, 300_000);
        let [stays, gone, last, later] = std::array::from_fn(|_| blobs.next().expect("without end"));
        world.put(&stays).await.expect("stored");
        world.put(&gone).await.expect("stored");
        let (chunks, first) = (disk.chunks_taken(), disk.first_chunk(&gone.key));
        assert_eq!(disk.remove(&gone.key, None).await, Ok(true));
        assert!(disk.comes_to_chunks(&gone.key, chunks / 2).await);
        world.put(&last).await.expect("stored");
        assert_eq!(disk.first_chunk(&last.key), first, "it was to get the same chunks");
        let copy = crash_copy(dir.path());
        let path = copy.path().join("data.0");
        let mut bytes = std::fs::read(&path).expect("read");
        // A record's magic, and the kind of a tomb.
        let tombs: Vec<usize> =
            (0..bytes.len()).step_by(RECORD_ALIGN).filter(|&at| bytes[at..].starts_with(b"rcR1\x03")).collect();
        assert_eq!(tombs.len(), 1);
        bytes[tombs[0]..][..HEADER_LEN].fill(0);
        std::fs::write(&path, bytes).expect("written");
        let world = World::open(copy.path(), 64, 1, Ack::Flushed).await;
        assert!(!world.disks[0].contains(&gone.key));
        assert!(world.has(&stays).await && world.has(&last).await);
        assert_eq!(world.disks[0].chunks_taken(), chunks);
        world.put(&later).await.expect("stored");
        assert!(world.has(&stays).await && world.has(&last).await && world.has(&later).await);
        assert_eq!(world.stats().damaged_records, 0);
    });
}
