//! Emptying segments for reuse: what was used lately stays or is copied forward, the rest is evicted.

use std::rc::{Rc, Weak};

use super::engine::{Core, Forgotten, Shard, ShardState};
use super::log::{AppendError, Record, Ticket, Urgency};
use super::pool::FromPool;
use crate::limits::{CHUNK_LEN, DISK_ALIGN};
use crate::pure::eviction::{Order, Outcome, SEGMENT_PARTS};
use crate::pure::index::Word;
use crate::pure::recency::{Aged, Epoch, Verdict, judge};
use crate::pure::record::{Header, Place, RECORD_ALIGN, TombOrder};
use crate::pure::segment::{HEAD_LEN, LargeEntry};
use crate::rt::channel::Receiver;
use crate::rt::file::DiskBuf;
use crate::rt::time::now;

/// The most that is read of a segment at a time, in bytes (one record may be longer).
const WINDOW_LEN: u32 = 1 << 20;
/// Bytes between two survivors that are read rather than skipped.
const GAP_LEN: u32 = 64 << 10;

/// A live record of a segment that is to be emptied.
#[derive(Clone, Copy)]
struct Live {
    tag: u64,
    location: u64,
    /// Offsets in the segment; the record ends at `end` or before.
    start: u32,
    end: u32,
    aged: Aged,
    /// A lasting tomb. It counts as long as there is an older segment, and the index does not know it.
    is_tomb: bool,
}

/// Carries out the pool's orders, each in a task of its own.
pub(super) async fn order_loop(core: Weak<Core>, mut messages: Receiver<FromPool>) {
    while let Some(message) = messages.recv().await {
        let Some(core) = core.upgrade() else { return };
        let order = match message {
            FromPool::Reclaim(order) => order,
            FromPool::Epoch(epoch) => {
                core.epoch.set(epoch);
                core.meters.note_epoch(epoch, now());
                continue;
            }
            FromPool::Pressure => {
                core.press();
                continue;
            }
        };
        let task = core.clone();
        core.reclaims.spawn(async move {
            let outcome = match task.shard(order.shard).cloned() {
                Some(shard) => {
                    shard.wait_ready().await;
                    task.reclaim(&shard, order).await
                }
                None => Outcome::Pinned,
            };
            task.report_reclaimed(order.segment, outcome).await;
        });
    }
}

impl Core {
    async fn reclaim(self: &Rc<Self>, shard: &Rc<Shard>, order: Order) -> Outcome {
        let (is_chunks, generation, busy) = shard.state.with(|state| {
            let generation = state.generations.get(&order.segment).copied();
            (state.chunks.contains(order.segment), generation, state.log.is_busy(order.segment))
        });
        let outcome = match generation {
            _ if self.is_stopping() => Outcome::Pinned,
            _ if is_chunks => self.reclaim_chunks(shard, order).await,
            Some(generation) if !busy => self.reclaim_log(shard, order, generation).await,
            // Leased, but not used yet, or being filled.
            _ => Outcome::Pinned,
        };
        let bad = outcome == Outcome::Freed && shard.state.with(|state| state.bad.remove(&order.segment));
        if bad { Outcome::Retired } else { outcome }
    }

    async fn reclaim_log(self: &Rc<Self>, shard: &Rc<Shard>, order: Order, generation: u64) -> Outcome {
        let (live, has_lasting) = self.list_live(shard, order, generation).await;
        let aged: Vec<Aged> = live.iter().map(|live| live.aged).collect();
        match judge(&aged, self.layout.segment_len, order.cutoff) {
            Verdict::Empty => {}
            Verdict::Stay(epoch) => return Outcome::Kept { epoch, freed_parts: 0 },
            Verdict::StayLong => return Outcome::Pinned,
        }
        let (survivors, rest): (Vec<Live>, Vec<Live>) =
            live.into_iter().partition(|live| live.aged.survives(order.cutoff));
        rest.iter().for_each(|live| self.evict(shard, live));
        let copying = shard.state.with(|state| state.log.begin_copying());
        let copied = self.copy_all(shard, order, generation, &survivors).await;
        drop(copying);
        shard.changed.notify();
        if !copied || !self.erase(order.segment, has_lasting).await {
            return Outcome::Pinned;
        }
        shard.state.with(|state| state.generations.remove(&order.segment));
        Outcome::Freed
    }

    /// Takes the header of a log segment away, so that a start does not find what stands in it. False when that failed.
    ///
    /// Why: until it is used again its records would come back, also those whose tombs have gone since.
    async fn erase(&self, segment: u32, has_lasting: bool) -> bool {
        // Why first: the erasure of older segments whose tombs stand here must not come later.
        if has_lasting {
            self.sync().await;
        }
        let mut blank = DiskBuf::new(HEAD_LEN as usize);
        blank.bytes_mut().fill(0);
        self.write(self.layout.position(segment, 0), blank, HEAD_LEN as usize).await.is_ok()
    }

    /// The records of a log segment that the index points to, and its lasting tombs that still count.
    ///
    /// Also whether it has any lasting tombs.
    async fn list_live(self: &Rc<Self>, shard: &Rc<Shard>, order: Order, generation: u64) -> (Vec<Live>, bool) {
        let listed = self.load_log(order.segment, generation, u32::MAX).await;
        let entries = &listed.footer.entries;
        let ends = entries.iter().skip(1).map(|entry| self.offset_of(entry.word)).chain([listed.tail]);
        let (mut live, mut has_lasting) = (Vec::new(), false);
        shard.state.with(|state| {
            let others = state.generations.iter().filter(|(segment, _)| **segment != order.segment);
            let oldest_other = others.map(|(_, generation)| *generation).min();
            for (entry, end) in entries.iter().zip(ends) {
                let Some(word) = Word::from_bits(entry.word) else { continue };
                let (start, location) = (self.offset_of(entry.word), word.location());
                let len = end.saturating_sub(start);
                if word.is_tomb() {
                    let since = word.lasting().map(|ago| generation.saturating_sub(ago));
                    has_lasting |= since.is_some();
                    if oldest_other.is_some_and(|oldest| since.is_some_and(|since| oldest < since)) {
                        let aged = Aged { epoch: None, len };
                        live.push(Live { tag: entry.tag, location, start, end, aged, is_tomb: true });
                    }
                    continue;
                }
                let Some(now) = state.index.get(entry.tag).filter(|now| now.location() == location) else { continue };
                let used = now.used(order.now).no_older(order.now);
                state.index.touch(entry.tag, used);
                // A large blob's commit is always kept: the blob lives and dies with its chunks.
                let epoch = if now.is_large() { None } else { Some(used) };
                live.push(Live { tag: entry.tag, location, start, end, aged: Aged { epoch, len }, is_tomb: false });
            }
        });
        (live, has_lasting)
    }

    /// Evicts an entry, unless it has been moved or replaced.
    fn evict(&self, shard: &Rc<Shard>, live: &Live) {
        let gone = shard.state.with(|state| {
            let now = state.index.get(live.tag).filter(|now| now.location() == live.location);
            now.and_then(|_| state.forget(live.tag))
        });
        if gone.is_some() {
            self.count(|stats| stats.evicted_entries += 1);
            let used = live.aged.epoch.unwrap_or(self.epoch.get());
            self.meters.evicted(u64::from(live.aged.len), used, now());
        }
    }

    /// Copies the survivors forward and waits until they are on disk. False when some of them had to stay where they are.
    async fn copy_all(self: &Rc<Self>, shard: &Rc<Shard>, order: Order, generation: u64, survivors: &[Live]) -> bool {
        let mut tickets = Vec::new();
        let mut rest = survivors;
        let mut all = true;
        while let Some(first) = rest.first().filter(|_| all && !self.is_stopping()) {
            let near = |pair: &&[Live]| {
                pair[1].start.saturating_sub(pair[0].end) <= GAP_LEN && pair[1].end - first.start <= WINDOW_LEN
            };
            let count = 1 + rest.windows(2).take_while(near).count();
            let (window, after) = rest.split_at(count);
            rest = after;
            all = self.copy_window(shard, order, generation, window, &mut tickets).await;
        }
        self.flush_shard(shard);
        for ticket in tickets {
            // A failed write has taken its records out of the index.
            ticket.wait().await;
        }
        // What was durable is so until its copy is.
        all && rest.is_empty() && (survivors.is_empty() || self.wait_durable(self.next_sync()).await.is_ok())
    }

    /// Copies neighbouring survivors forward. False when there was no room for one of them.
    async fn copy_window(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        order: Order,
        generation: u64,
        window: &[Live],
        tickets: &mut Vec<Ticket>,
    ) -> bool {
        let (Some(first), Some(last)) = (window.first(), window.last()) else { return true };
        let from = first.start - first.start % DISK_ALIGN as u32;
        let to = last.end.next_multiple_of(DISK_ALIGN as u32).min(self.layout.segment_len);
        let read = self.read(self.layout.position(order.segment, from), (to - from) as usize).await;
        let bytes = read.as_ref().map_or(&[][..], |read| read.bytes());
        for survivor in window {
            let Live { tag, location, .. } = *survivor;
            let place = Place { position: location * RECORD_ALIGN as u64, generation };
            let record = bytes.get((survivor.start - from) as usize..).unwrap_or_default();
            let header = Header::decode(record, &self.sums, place);
            let payload = header.and_then(|header| header.payload(record, &self.sums));
            let (Some(header), Some(payload)) = (header, payload) else {
                self.drop_damaged(shard, tag, location);
                continue;
            };
            let copied = match survivor.is_tomb {
                true => self.append_tomb_again(shard, header, generation, true).await,
                false => self.copy_forward(shard, tag, location, header, payload).await,
            };
            match copied {
                Ok(ticket) => {
                    tickets.push(ticket);
                    self.count(|stats| {
                        stats.reinserted_records += 1;
                        stats.reinserted_bytes += header.log_len() as u64;
                    });
                }
                Err(AppendError::Refused) => {}
                Err(AppendError::NoSegment | AppendError::WritesFail) if order.force && !survivor.is_tomb => {
                    self.evict(shard, survivor);
                }
                Err(AppendError::NoSegment | AppendError::WritesFail | AppendError::Stopping) => return false,
            }
            tickets.dedup_by(|later, earlier| later.is_ended() && earlier.is_ended());
        }
        true
    }

    /// Appends the record of `tag` again, if the index still says that it is at `location`, and tells the index.
    pub(super) async fn copy_forward(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        tag: u64,
        location: u64,
        header: Header,
        payload: &[u8],
    ) -> Result<Ticket, AppendError> {
        let large = shard.state.with(|state| {
            let large = state.large.get(&tag)?;
            Some(LargeEntry { record_len: large.record_len, runs: large.held.runs.clone() })
        });
        let record = Record { header, tag, payload: &[payload], large };
        let still_there = |state: &ShardState| state.index.get(tag).is_some_and(|word| word.location() == location);
        let now = self.epoch.get();
        self.append_record(shard, Urgency::Reclaim, &record, still_there, |state, word, _| {
            let used = state.index.get(tag).map_or(now, |old| old.used(now));
            state.index.replace_at(tag, location, word.used_in(used));
        })
        .await
    }

    async fn reclaim_chunks(self: &Rc<Self>, shard: &Rc<Shard>, order: Order) -> Outcome {
        let mut homes = shard.state.with(|state| {
            state.chunks.close(order.segment, true);
            state.chunks.take_homes(order.segment)
        });
        homes.sort_unstable();
        homes.dedup();
        let taken_before = shard.state.with(|state| state.chunks.taken(order.segment));
        let (mut last, mut oldest) = (None, None);
        for tag in homes {
            let (used, evicted) = shard.state.with(|state| self.judge_home(state, order, tag));
            oldest = used.into_iter().chain(oldest).min();
            let Some((word, held)) = evicted else { continue };
            self.count(|stats| stats.evicted_entries += 1);
            let chunks: u64 = held.iter().flat_map(|held| &held.runs).map(|run| u64::from(run.count)).sum();
            self.meters.evicted(chunks * CHUNK_LEN as u64, word.used(order.now).no_older(order.now), now());
            if let Ok(ticket) = self.append_tomb(shard, tag, TombOrder::Here, Urgency::Reclaim).await {
                held.iter().for_each(|held| held.release_after(&ticket));
                last = Some(ticket);
            }
        }
        if let Some(ticket) = last {
            self.flush_shard(shard);
            ticket.wait().await;
        }
        self.dig();
        let (is_empty, taken) = shard.state.with(|state| {
            let taken = state.chunks.taken(order.segment);
            let is_empty = state.chunks.remove_empty(order.segment);
            state.chunks.close(order.segment, state.bad.contains(&order.segment));
            if taken < taken_before {
                state.chunks.unseal(order.segment);
            }
            (is_empty, taken)
        });
        // What is free may be filled again.
        shard.changed.notify();
        let freed_parts = taken_before.saturating_sub(taken) * SEGMENT_PARTS / self.layout.chunks_per_segment();
        match oldest {
            _ if is_empty => Outcome::Freed,
            Some(epoch) => Outcome::Kept { epoch, freed_parts },
            None => Outcome::Pinned,
        }
    }

    /// Whether the blob of `tag`, which may start in the segment, stays: the epoch of its last use. Or else what it leaves.
    fn judge_home(&self, state: &mut ShardState, order: Order, tag: u64) -> (Option<Epoch>, Option<Forgotten>) {
        let first = state.large.get(&tag).map(|large| large.held.runs[0].first);
        let first = first.filter(|first| self.layout.segment_of_chunk(*first) == order.segment);
        let (Some(first), Some(word)) = (first, state.index.get(tag)) else { return (None, None) };
        let used = word.used(order.now).no_older(order.now);
        if used < order.cutoff && !self.is_stopping() {
            return (None, state.forget(tag));
        }
        state.index.touch(tag, used);
        state.chunks.add_home(first, tag);
        (Some(used), None)
    }

    /// The offset of a footer word's record in its segment.
    fn offset_of(&self, word: u64) -> u32 {
        Word::from_bits(word).map_or(0, |word| self.layout.split(word.location() * RECORD_ALIGN as u64).1)
    }
}
