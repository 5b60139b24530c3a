//! What one core's disk says to Prometheus.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::disk::DiskStats;
use crate::limits::EPOCHS_REMEMBERED;
use crate::metrics::{Counter, Histogram, Metric, Snapshot};
use crate::pure::recency::Epoch;

/// Counts that are no part of `DiskStats`.
pub(super) struct Meters {
    /// Writes to the drive, and syncs of all data files.
    pub(super) flush_time: Histogram,
    pub(super) sync_time: Histogram,
    /// Raw bytes of each entry that was stored.
    pub(super) entry_size: Histogram,
    /// Raw bytes, and bytes at rest, of what was stored.
    raw: Counter,
    at_rest: Counter,
    /// Raw bytes of the large blobs that are being written.
    pub(super) reserved: Cell<u64>,
    /// Bytes at rest of what was evicted, and for how long nobody had used it.
    evicted: Counter,
    evicted_age: Histogram,
    /// When the last epochs began.
    epochs: RefCell<VecDeque<(Epoch, Instant)>>,
}

impl Default for Meters {
    fn default() -> Self {
        Self {
            flush_time: Histogram::of_times(),
            sync_time: Histogram::of_times(),
            entry_size: Histogram::of_sizes(),
            raw: Counter::default(),
            at_rest: Counter::default(),
            reserved: Cell::default(),
            evicted: Counter::default(),
            evicted_age: Histogram::of_ages(),
            epochs: RefCell::default(),
        }
    }
}

impl Meters {
    /// An entry was stored.
    pub(super) fn stored(&self, raw_len: u64, stored_len: u64) {
        self.entry_size.observe_bytes(raw_len);
        self.raw.add(raw_len);
        self.at_rest.add(stored_len);
    }

    /// An epoch begins.
    pub(super) fn note_epoch(&self, epoch: Epoch, now: Instant) {
        let mut epochs = self.epochs.borrow_mut();
        if epochs.back().is_some_and(|(last, _)| *last >= epoch) {
            return;
        }
        if epochs.len() >= EPOCHS_REMEMBERED {
            epochs.pop_front();
        }
        epochs.push_back((epoch, now));
    }

    /// An entry that was last used in this epoch was evicted.
    pub(super) fn evicted(&self, bytes: u64, used: Epoch, now: Instant) {
        self.evicted.add(bytes);
        self.evicted_age.observe_time(self.age(used, now));
    }

    /// How long ago an epoch ended, as far as is known: time before the start of the process is not counted.
    fn age(&self, epoch: Epoch, now: Instant) -> Duration {
        let epochs = self.epochs.borrow();
        let next = epochs.iter().find(|(known, _)| *known > epoch);
        next.map_or(Duration::ZERO, |(_, began)| now.saturating_duration_since(*began))
    }

    /// What `bytes` at rest are raw, if all is as compressible as what was stored since the start.
    fn estimate_raw(&self, bytes: u64) -> f64 {
        let ratio = if self.at_rest.get() == 0 { 1.0 } else { self.raw.get() as f64 / self.at_rest.get() as f64 };
        bytes as f64 * ratio
    }

    pub(super) fn report(&self, stats: &DiskStats, into: &mut Snapshot) {
        into.add(Metric::DiskCacheSize, stats.leased_bytes);
        into.add(Metric::DiskCacheLogical, self.estimate_raw(stats.leased_bytes));
        into.add(Metric::DiskCacheReserved, self.reserved.get());
        into.add(Metric::DiskCacheEntries, stats.entries);
        into.add(Metric::DiskCacheLargeBlobs, stats.large_blobs);
        into.add(Metric::DiskCacheIndex, stats.index_bytes);
        into.add_for(Metric::MemoryHeld, ["index"], stats.index_bytes);
        into.add(Metric::DiskCacheRecoveringShards, stats.recovering_shards);
        into.add_histogram(Metric::DiskCacheEntrySize, vec![], &self.entry_size);
        into.add(Metric::DiskCacheEvictedEntries, stats.evicted_entries);
        into.add(Metric::DiskCacheEvicted, &self.evicted);
        into.add_histogram(Metric::DiskCacheEvictedAge, vec![], &self.evicted_age);
        into.add(Metric::DiskCacheAppendedEntries, stats.appended_records);
        into.add(Metric::DiskCacheAppended, stats.appended_bytes);
        into.add(Metric::DiskCacheReinsertedEntries, stats.reinserted_records);
        into.add(Metric::DiskCacheReinserted, stats.reinserted_bytes);
        into.add(Metric::DiskCacheDamaged, stats.damaged_records);
        into.add(Metric::DiskCacheReadErrors, stats.read_errors);
        into.add(Metric::DiskCacheWriteErrors, stats.write_errors);
        into.add_histogram(Metric::DiskFlushTime, vec![], &self.flush_time);
        into.add_histogram(Metric::DiskSyncTime, vec![], &self.sync_time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::time::now;

    /// Goal: an age is the time since the epoch of the last use ended, and never more than what the process has seen.
    /// Method: epochs a minute apart, more of them than are remembered.
    #[test]
    fn ages_count_from_the_end_of_an_epoch() {
        let (meters, start, minute) = (Meters::default(), now(), Duration::from_secs(60));
        for n in 0..=EPOCHS_REMEMBERED as u64 {
            meters.note_epoch(Epoch(100 + n), start + minute * n as u32);
            // Said twice: the first time counts.
            meters.note_epoch(Epoch(100 + n), start + minute * (n as u32 + 1));
        }
        let last = EPOCHS_REMEMBERED as u64;
        let now = start + minute * last as u32;
        assert_eq!(meters.age(Epoch(100 + last), now), Duration::ZERO);
        assert_eq!(meters.age(Epoch(100 + last - 1), now), Duration::ZERO);
        assert_eq!(meters.age(Epoch(100 + last - 3), now), 2 * minute);
        assert_eq!(meters.age(Epoch(7), now), minute * (last as u32 - 1));
        assert_eq!(Meters::default().age(Epoch(7), now), Duration::ZERO);
    }
}
