//! What one core's disk says to Prometheus.

use std::cell::Cell;

use super::disk::DiskStats;
use crate::metrics::{Counter, Histogram, Metric, Snapshot};

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
        into.add(Metric::DiskCacheRecoveringShards, stats.recovering_shards);
        into.add_histogram(Metric::DiskCacheEntrySize, vec![], &self.entry_size);
        into.add(Metric::DiskCacheEvictedEntries, stats.evicted_entries);
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
