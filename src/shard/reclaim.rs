//! Emptying segments for reuse: what was used meanwhile is copied forward, the rest is evicted.

use std::rc::{Rc, Weak};

use super::engine::{Core, Shard, ShardState};
use super::log::{AppendError, Record, Ticket, Urgency};
use crate::limits::DISK_ALIGN;
use crate::pure::eviction::{Fate, Order, Outcome, blob_fate, log_fate};
use crate::pure::index::Word;
use crate::pure::record::{Header, Place, RECORD_ALIGN, RecordKind};
use crate::pure::segment::LargeEntry;
use crate::rt::channel::Receiver;

/// The most that is read of a segment at a time, in bytes (one record may be longer).
const WINDOW_LEN: u32 = 1 << 20;
/// Bytes between two survivors that are read rather than skipped.
const GAP_LEN: u32 = 64 << 10;

/// A record to be copied forward.
#[derive(Clone, Copy)]
struct Survivor {
    tag: u64,
    location: u64,
    /// Offsets in the segment; the record ends at `end` or before.
    start: u32,
    end: u32,
}

/// Carries out the pool's orders, each in a task of its own.
pub(super) async fn order_loop(core: Weak<Core>, mut orders: Receiver<Order>) {
    while let Some(order) = orders.recv().await {
        let Some(core) = core.upgrade() else { return };
        let task = core.clone();
        core.reclaims.spawn(async move {
            let outcome = match task.shard(order.shard).cloned() {
                Some(shard) => {
                    shard.wait_ready().await;
                    task.reclaim(&shard, order).await
                }
                None => Outcome::Kept,
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
            _ if self.is_stopping() => Outcome::Kept,
            _ if is_chunks => self.reclaim_chunks(shard, order).await,
            Some(generation) if !busy => self.reclaim_log(shard, order, generation).await,
            // Leased, but not used yet.
            _ => Outcome::Kept,
        };
        let bad = outcome == Outcome::Freed && shard.state.with(|state| state.bad.remove(&order.segment));
        if bad { Outcome::Retired } else { outcome }
    }

    async fn reclaim_log(self: &Rc<Self>, shard: &Rc<Shard>, order: Order, generation: u64) -> Outcome {
        let listed = self.load_log(shard.id, order.segment, generation, u32::MAX).await;
        let mut survivors = Vec::new();
        let mut evicted = Vec::new();
        let ends =
            listed.footer.entries[1.min(listed.footer.entries.len())..].iter().map(|entry| self.offset_of(entry.word));
        let ends = ends.chain([listed.tail]);
        shard.state.with(|state| {
            for (entry, end) in listed.footer.entries.iter().zip(ends) {
                let Some(word) = Word::from_bits(entry.word) else { continue };
                // The footer's mark says that this is a tomb. All that it removed was older, and is gone.
                if word.is_marked() {
                    continue;
                }
                let location = word.location();
                match log_fate(state.index.get(entry.tag), location, order.force) {
                    Fate::Gone => {}
                    Fate::Evict => evicted.extend(state.forget(entry.tag)),
                    Fate::Keep => {
                        survivors.push(Survivor { tag: entry.tag, location, start: self.offset_of(entry.word), end })
                    }
                }
            }
        });
        self.count(|stats| stats.evicted_entries += evicted.len() as u64);
        drop(evicted);
        let mut tickets = Vec::new();
        let mut rest = survivors.as_slice();
        while let Some(first) = rest.first().filter(|_| !self.is_stopping()) {
            let near = |pair: &&[Survivor]| {
                pair[1].start.saturating_sub(pair[0].end) <= GAP_LEN && pair[1].end - first.start <= WINDOW_LEN
            };
            let count = 1 + rest.windows(2).take_while(near).count();
            let (window, after) = rest.split_at(count);
            rest = after;
            self.copy_window(shard, order.segment, generation, window, &mut tickets).await;
        }
        self.flush_shard(shard);
        for ticket in tickets {
            // A failed write has taken its records out of the index.
            ticket.wait().await;
        }
        if !rest.is_empty() {
            // The server stops: what is left stays where it is.
            return Outcome::Kept;
        }
        shard.state.with(|state| state.generations.remove(&order.segment));
        Outcome::Freed
    }

    /// Copies neighbouring survivors forward.
    async fn copy_window(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        segment: u32,
        generation: u64,
        window: &[Survivor],
        tickets: &mut Vec<Ticket>,
    ) {
        let (Some(first), Some(last)) = (window.first(), window.last()) else { return };
        let from = first.start - first.start % DISK_ALIGN as u32;
        let to = last.end.next_multiple_of(DISK_ALIGN as u32).min(self.layout.segment_len);
        let read = self.read(self.layout.position(segment, from), (to - from) as usize).await;
        let bytes = read.as_ref().map_or(&[][..], |read| read.bytes());
        for survivor in window {
            let place = Place { position: survivor.location * RECORD_ALIGN as u64, generation };
            let record = bytes.get((survivor.start - from) as usize..).unwrap_or_default();
            let header = Header::decode(record, &self.sums, place);
            let payload = header.and_then(|header| header.payload(record, &self.sums));
            let (Some(header), Some(payload)) = (header, payload) else {
                self.drop_damaged(shard, survivor.tag, survivor.location);
                continue;
            };
            let Survivor { tag, location, .. } = *survivor;
            // A small record has had its second chance; a large blob's mark belongs to its chunks.
            let keep_mark = header.kind == RecordKind::Large;
            match self.copy_forward(shard, tag, location, header, payload, keep_mark).await {
                Ok(ticket) => {
                    tickets.push(ticket);
                    self.count(|stats| {
                        stats.reinserted_records += 1;
                        stats.reinserted_bytes += header.log_len() as u64;
                    });
                }
                Err(AppendError::Refused) => {}
                // No room to copy: evicted after all.
                Err(AppendError::NoSegment | AppendError::WritesFail | AppendError::Stopping) => {
                    let gone = shard.state.with(|state| {
                        let now = state.index.get(survivor.tag).filter(|word| word.location() == survivor.location);
                        now.and_then(|_| state.forget(survivor.tag))
                    });
                    self.count(|stats| stats.evicted_entries += u64::from(gone.is_some()));
                }
            }
            tickets.dedup_by(|later, earlier| later.is_ended() && earlier.is_ended());
        }
    }

    /// Appends the record of `tag` again, if the index still says that it is at `location`, and tells the index.
    pub(super) async fn copy_forward(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        tag: u64,
        location: u64,
        header: Header,
        payload: &[u8],
        keep_mark: bool,
    ) -> Result<Ticket, AppendError> {
        let large = shard.state.with(|state| {
            let large = state.large.get(&tag)?;
            Some(LargeEntry { record_len: large.record_len, runs: large.held.runs.clone() })
        });
        let record = Record { header, tag, payload: &[payload], large };
        let still_there = |state: &ShardState| state.index.get(tag).is_some_and(|word| word.location() == location);
        self.append_record(shard, Urgency::Reclaim, &record, still_there, |state, word, _| {
            let mark = keep_mark && state.index.get(tag).is_some_and(Word::is_marked);
            state.index.replace_at(tag, location, word.marked(mark));
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
        let mut last = None;
        for tag in homes {
            if self.is_stopping() {
                break;
            }
            let evict = shard.state.with(|state| {
                let first = state.large.get(&tag)?.held.runs[0].first;
                if self.layout.segment_of_chunk(first) != order.segment {
                    return None;
                }
                let word = state.index.get(tag);
                match blob_fate(word, order.force) {
                    Fate::Gone => None,
                    Fate::Evict => state.forget(tag),
                    Fate::Keep => {
                        let word = word?;
                        state.index.replace_at(tag, word.location(), word.marked(false));
                        state.chunks.add_home(first, tag);
                        None
                    }
                }
            });
            let Some((_, held)) = evict else { continue };
            self.count(|stats| stats.evicted_entries += 1);
            if let Ok(ticket) = self.append_tomb(shard, tag, Urgency::Reclaim).await {
                held.iter().for_each(|held| held.release_after(&ticket));
                last = Some(ticket);
            }
        }
        if let Some(ticket) = last {
            self.flush_shard(shard);
            ticket.wait().await;
        }
        self.dig();
        let freed = shard.state.with(|state| {
            let freed = state.chunks.remove_empty(order.segment);
            state.chunks.close(order.segment, state.bad.contains(&order.segment));
            freed
        });
        if freed { Outcome::Freed } else { Outcome::Kept }
    }

    /// The offset of a footer word's record in its segment.
    fn offset_of(&self, word: u64) -> u32 {
        Word::from_bits(word).map_or(0, |word| self.layout.split(word.location() * RECORD_ALIGN as u64).1)
    }
}
