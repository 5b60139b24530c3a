//! When entries were last used, in steps of a twelfth of the volume, and what follows for a segment that is to be emptied.
//!
//! Time is counted in space given out: an epoch lasts while a twelfth of the volume is. An index entry keeps the
//! low bits of the epoch of its last use (its stamp).

use super::record::{Checksums, u64_at};

/// A step of the eviction clock. Only grows while the server runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Epoch(pub u64);

/// Epochs in which as much space is given out as the volume has.
pub const EPOCHS_PER_VOLUME: u64 = 12;
/// Bits of a stamp, and how many different ones there are.
pub const STAMP_BITS: u32 = 5;
const STAMPS: u64 = 1 << STAMP_BITS;
// Ages stand in 4 bits each.
const _: () = assert!(AGE_MAX < 16);
/// Older entries count as being of this age, in epochs.
const AGE_MAX: u64 = 15;

// Why: a segment is looked at again after one volume at the latest, and until then no stamp may come round. (If
// one did, an old entry would pass for a young one: kept once more than it should be.)
const _: () = assert!(AGE_MAX + EPOCHS_PER_VOLUME < STAMPS);

impl Epoch {
    /// The first one: there are epochs before it for whatever is older.
    pub const FIRST: Self = Self(STAMPS);

    /// What an index entry keeps of it.
    pub fn stamp(self) -> u8 {
        (self.0 % STAMPS) as u8
    }

    /// The epoch that a stamp found in epoch `self` stands for.
    pub fn of_stamp(self, stamp: u8) -> Self {
        Self(self.0 - (self.0 + STAMPS - u64::from(stamp)) % STAMPS)
    }

    /// The same, or the oldest that is told apart in epoch `now`.
    pub fn no_older(self, now: Self) -> Self {
        self.max(Self(now.0.saturating_sub(AGE_MAX)))
    }

    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// A live record of a log segment that is to be emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aged {
    /// Of the last use; `None` for one that must be kept, however old.
    pub epoch: Option<Epoch>,
    /// Bytes in the log.
    pub len: u32,
}

impl Aged {
    pub fn survives(&self, cutoff: Epoch) -> bool {
        self.epoch.is_none_or(|epoch| epoch >= cutoff)
    }
}

/// What is done with a log segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Survivors are copied forward, the rest is evicted.
    Empty,
    /// So much survives that copying it would free too little: all stays. It is worth another look when what was last used
    /// in this epoch may go.
    Stay(Epoch),
    /// So much of it must be kept that there will be nothing to gain for a while.
    StayLong,
}

/// The part of a segment that is copied forward at most, in quarters. So each byte that is freed costs at most three that
/// are copied, and at most a quarter of a segment that stays is waste.
const COPIED_QUARTERS_MAX: u64 = 3;

/// Judges a log segment of `segment_len` bytes with these live records, of which those last used before `cutoff` may go.
pub fn judge(records: &[Aged], segment_len: u32, cutoff: Epoch) -> Verdict {
    let most = u64::from(segment_len) * COPIED_QUARTERS_MAX / 4;
    let bytes = |cutoff: Epoch| -> u64 {
        records.iter().filter(|record| record.survives(cutoff)).map(|record| u64::from(record.len)).sum()
    };
    if bytes(cutoff) <= most {
        return Verdict::Empty;
    }
    let mut epochs: Vec<Epoch> =
        records.iter().filter_map(|record| record.epoch).filter(|epoch| *epoch >= cutoff).collect();
    epochs.sort_unstable();
    epochs.dedup();
    epochs.into_iter().find(|epoch| bytes(epoch.next()) <= most).map_or(Verdict::StayLong, Verdict::Stay)
}

/// How long ago each entry of an index was used, in the order of their tags: written when the server stops.
///
/// | offset | bytes | content |
/// |---|---|---|
/// | 0 | 8 | number of entries |
/// | 8 | 8 | checksum of their tags |
/// | 16 | (entries + 1) / 2 | ages in epochs, 4 bits each, the first in the low bits |
///
/// Little-endian; own format, version 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ages(Vec<u8>);

const AGES_HEAD_LEN: usize = 16;

impl Ages {
    /// Of entries (tag, epoch of last use) in the order of their tags.
    pub fn encode(sums: &Checksums, entries: impl Iterator<Item = (u64, Epoch)>, now: Epoch) -> Self {
        let mut bytes = vec![0; AGES_HEAD_LEN];
        let (mut count, mut sum) = (0u64, 0);
        for (tag, epoch) in entries {
            let age = (now.0 - epoch.0.min(now.0)).min(AGE_MAX) as u8;
            match count % 2 {
                0 => bytes.push(age),
                _ => *bytes.last_mut().expect("pushed in the turn before") |= age << 4,
            }
            sum = add_tag(sums, sum, tag);
            count += 1;
        }
        bytes[0..8].copy_from_slice(&count.to_le_bytes());
        bytes[8..16].copy_from_slice(&sum.to_le_bytes());
        Self(bytes)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Of how many entries `bytes` were written.
    pub fn entries(bytes: &[u8]) -> Option<u64> {
        bytes.split_at_checked(AGES_HEAD_LEN).map(|(head, _)| u64_at(head, 0))
    }

    /// The epoch of last use of each of `tags`, in their order. `None` when they are not those that `bytes` were written of.
    pub fn decode(bytes: &[u8], sums: &Checksums, tags: impl Iterator<Item = u64>, now: Epoch) -> Option<Vec<Epoch>> {
        let (head, ages) = bytes.split_at_checked(AGES_HEAD_LEN)?;
        let (count, sum) = (u64_at(head, 0), u64_at(head, 8));
        let (found, found_sum) = tags.fold((0u64, 0), |(count, sum), tag| (count + 1, add_tag(sums, sum, tag)));
        if (found, found_sum) != (count, sum) || ages.len() as u64 != count.div_ceil(2) {
            return None;
        }
        let age = |n: u64| u64::from(ages[(n / 2) as usize] >> (n % 2 * 4) & 15);
        Some((0..count).map(|n| Epoch(now.0.saturating_sub(age(n))).no_older(now)).collect())
    }
}

fn add_tag(sums: &Checksums, sum: u64, tag: u64) -> u64 {
    (sum ^ tag ^ sums.key).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Goal: a stamp brings back its epoch for as long as no stamp has come round. Method: random epochs and ages.
        #[test]
        fn a_stamp_brings_back_its_epoch(now in Epoch::FIRST.0..1 << 40, age in 0u64..STAMPS) {
            let epoch = Epoch(now - age);
            prop_assert_eq!(Epoch(now).of_stamp(epoch.stamp()), epoch);
            prop_assert!(now - epoch.no_older(Epoch(now)).0 <= AGE_MAX);
        }

        /// Goal: ages come back for the same entries, and for no others. Method: random entries; one tag missing, one
        /// changed, bytes cut.
        #[test]
        fn ages_come_back_for_the_same_entries(
            entries in proptest::collection::vec((any::<u64>(), 0u64..20), 1..50),
            now in Epoch::FIRST.0..1 << 40,
            later in 0u64..100,
        ) {
            let sums = Checksums { key: 77 };
            let tags = || entries.iter().map(|(tag, _)| *tag);
            let ages = Ages::encode(&sums, entries.iter().map(|(tag, age)| (*tag, Epoch(now - age))), Epoch(now));
            prop_assert_eq!(Ages::entries(ages.bytes()), Some(entries.len() as u64));
            let then = Epoch(now + later);
            let found = Ages::decode(ages.bytes(), &sums, tags(), then).expect("the same entries");
            for ((_, age), epoch) in entries.iter().zip(found) {
                prop_assert_eq!(then.0 - epoch.0, (*age).min(AGE_MAX));
            }
            prop_assert_eq!(Ages::decode(ages.bytes(), &sums, tags().skip(1), then), None);
            prop_assert_eq!(Ages::decode(ages.bytes(), &sums, tags().map(|tag| tag ^ 1), then), None);
            prop_assert_eq!(Ages::decode(&ages.bytes()[..ages.bytes().len() - 1], &sums, tags(), then), None);
        }

        /// Goal: copying is bounded, and a segment that stays is looked at again when that pays. Method: random records.
        #[test]
        fn a_verdict_bounds_the_copying(
            records in proptest::collection::vec((proptest::option::weighted(0.9, 0u64..10), 1u32..300), 0..30),
            cutoff in 0u64..12,
        ) {
            let records: Vec<Aged> = records.iter().map(|(epoch, len)| Aged { epoch: epoch.map(Epoch), len: *len }).collect();
            let total: u32 = records.iter().map(|record| record.len).sum();
            let survivors = |cutoff: u64| -> u32 { records.iter().filter(|record| record.survives(Epoch(cutoff))).map(|record| record.len).sum() };
            let len = total.max(400);
            match judge(&records, len, Epoch(cutoff)) {
                Verdict::Empty => prop_assert!(survivors(cutoff) <= len / 4 * 3 + 3),
                Verdict::Stay(Epoch(epoch)) => {
                    prop_assert!(epoch >= cutoff && survivors(cutoff) > len / 4 * 3);
                    prop_assert_eq!(judge(&records, len, Epoch(epoch + 1)), Verdict::Empty);
                    prop_assert!(judge(&records, len, Epoch(epoch)) != Verdict::Empty);
                }
                Verdict::StayLong => prop_assert!(survivors(u64::MAX) > len / 4 * 3),
            }
        }
    }
}
