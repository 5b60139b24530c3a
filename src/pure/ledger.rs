//! The ledger of a backend's unfinished uploads, as it stands in a file: entries one behind the other, each of which
//! notes an upload or strikes it out. The file is only appended to, and rewritten when most of it is struck out.
//!
//! | offset | bytes | field (little-endian) |
//! |---|---|---|
//! | 0 | 1 | 1 noted, 2 struck out |
//! | 1 | 1 | 1 CAS, 2 action |
//! | 2 | 2 | length of the storage prefix P, 0 for none |
//! | 4 | 1 | length of the bucket's name B, 0 for the backend's own |
//! | 5 | 3 | 0 |
//! | 8 | 32 | hash |
//! | 40 | 8 | size in bytes |
//! | 48 | 8 | XXH3-64 of all of the entry but this |
//! | 56 | P + B | prefix (`\\raw` for `Scope::raw`) and bucket, then zeros up to a multiple of 56 bytes |
//!
//! Own format, version 1. The file's name carries the version. Why multiples of 56: what is damaged costs its entry, as the
//! next one is found again.

use super::digest::{Digest, Hash};
use super::record::Checksums;
use super::scope::PREFIX_LEN_MAX;
use super::upload_queue::ObjectKind;

/// Entries take a multiple of so many bytes.
pub const ENTRY_LEN: usize = 56;
const SUMMED_LEN: usize = 48;
const SUMS: Checksums = Checksums { key: 0 };

/// An unfinished upload, by names that mean the same after the settings have changed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owed {
    pub kind: ObjectKind,
    pub digest: Digest,
    /// Empty for none.
    pub prefix: Box<str>,
    /// Empty for the backend's own bucket.
    pub bucket: Box<str>,
}

/// What an entry says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    Noted(Owed),
    Struck(Owed),
}

impl Entry {
    /// Appends the entry to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let (word, owed) = match self {
            Self::Noted(owed) => (1, owed),
            Self::Struck(owed) => (2, owed),
        };
        let start = out.len();
        let (prefix, bucket) = (owed.prefix.as_bytes(), owed.bucket.as_bytes());
        let prefix_len = u16::try_from(prefix.len()).expect("a prefix of at most PREFIX_LEN_MAX bytes");
        let bucket_len = u8::try_from(bucket.len()).expect("a bucket's name of at most BUCKET_LEN_MAX bytes");
        let kind = match owed.kind {
            ObjectKind::Cas => 1,
            ObjectKind::Action => 2,
        };
        out.extend_from_slice(&[word, kind]);
        out.extend_from_slice(&prefix_len.to_le_bytes());
        out.extend_from_slice(&[bucket_len, 0, 0, 0]);
        out.extend_from_slice(&owed.digest.hash.0);
        out.extend_from_slice(&owed.digest.size.to_le_bytes());
        out.extend_from_slice(&[0; 8]);
        out.extend_from_slice(prefix);
        out.extend_from_slice(bucket);
        out.resize(start + (out.len() - start).next_multiple_of(ENTRY_LEN), 0);
        let sum = sum_of(&out[start..]);
        out[start + SUMMED_LEN..start + ENTRY_LEN].copy_from_slice(&sum.to_le_bytes());
    }

    /// The entry that `bytes` begin with, and how many bytes it takes.
    fn decode(bytes: &[u8]) -> Option<(Self, usize)> {
        let head: &[u8; ENTRY_LEN] = bytes.first_chunk()?;
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
        let (prefix_len, bucket_len) = (usize::from(u16::from_le_bytes([head[2], head[3]])), usize::from(head[4]));
        if prefix_len > PREFIX_LEN_MAX {
            return None;
        }
        let len = (ENTRY_LEN + prefix_len + bucket_len).next_multiple_of(ENTRY_LEN);
        let entry = bytes.get(..len)?;
        if u64_at(SUMMED_LEN) != sum_of(entry) {
            return None;
        }
        let kind = match head[1] {
            1 => ObjectKind::Cas,
            2 => ObjectKind::Action,
            _ => return None,
        };
        let (prefix, rest) = entry[ENTRY_LEN..].split_at(prefix_len);
        let text = |bytes: &[u8]| std::str::from_utf8(bytes).ok().map(Box::from);
        let digest = Digest { hash: Hash(std::array::from_fn(|i| head[8 + i])), size: u64_at(40) };
        let owed = Owed { kind, digest, prefix: text(prefix)?, bucket: text(&rest[..bucket_len])? };
        match head[0] {
            1 => Some((Self::Noted(owed), len)),
            2 => Some((Self::Struck(owed), len)),
            _ => None,
        }
    }
}

/// The longest name of a bucket, in bytes.
pub const BUCKET_LEN_MAX: usize = 255;

fn sum_of(entry: &[u8]) -> u64 {
    match &entry[ENTRY_LEN..] {
        [] => SUMS.payload(&entry[..SUMMED_LEN]),
        names => SUMS.payload_of_pieces(&[&entry[..SUMMED_LEN], names]),
    }
}

/// The unfinished uploads of a file, oldest first, and how many entries could not be read: the last one of a process that
/// was killed may be torn.
pub fn replay(file: &[u8]) -> (Vec<Owed>, usize) {
    let (mut damaged, mut number) = (0, 0);
    let mut noted: rustc_hash::FxHashMap<Owed, usize> = rustc_hash::FxHashMap::default();
    let mut rest = file;
    let mut is_lost = false;
    while !rest.is_empty() {
        let Some((entry, len)) = Entry::decode(rest) else {
            // What follows may be the rest of it.
            damaged += usize::from(!std::mem::replace(&mut is_lost, true));
            rest = &rest[rest.len().min(ENTRY_LEN)..];
            continue;
        };
        (is_lost, number) = (false, number + 1);
        match entry {
            Entry::Noted(owed) => drop(noted.entry(owed).or_insert(number)),
            Entry::Struck(owed) => drop(noted.remove(&owed)),
        }
        rest = &rest[len..];
    }
    let mut unfinished: Vec<(usize, Owed)> = noted.into_iter().map(|(owed, number)| (number, owed)).collect();
    unfinished.sort_unstable();
    (unfinished.into_iter().map(|(_, owed)| owed).collect(), damaged)
}

#[cfg(test)]
mod tests {
    use super::super::random::SplitMix64;
    use super::*;

    fn owed(number: u64) -> Owed {
        let kind = if number.is_multiple_of(3) { ObjectKind::Action } else { ObjectKind::Cas };
        let digest = Digest { hash: Hash([number as u8; 32]), size: number << 33 };
        let prefix = "tenant/".repeat((number % 4) as usize * 24).into();
        let bucket = if number.is_multiple_of(5) { "" } else { "other" }.into();
        Owed { kind, digest, prefix, bucket }
    }

    /// Goal: a file cut anywhere gives what was unfinished at the last whole entry. Method: seeded histories, each
    /// replayed at every length.
    #[test]
    fn replays_every_prefix() {
        for seed in 0..20 {
            let mut random = SplitMix64(seed);
            let (mut file, mut states, mut model) = (Vec::new(), vec![(0, Vec::new())], Vec::new());
            for _ in 0..30 {
                let owed = owed(random.below(12));
                let entry = if random.below(2) == 0 {
                    if !model.contains(&owed) {
                        model.push(owed.clone());
                    }
                    Entry::Noted(owed)
                } else {
                    model.retain(|known| *known != owed);
                    Entry::Struck(owed)
                };
                entry.encode(&mut file);
                states.push((file.len(), model.clone()));
            }
            for end in 0..=file.len() {
                let (unfinished, damaged) = replay(&file[..end]);
                let (whole, expected) = states.iter().rfind(|(len, _)| *len <= end).expect("the first is empty");
                assert_eq!(unfinished, *expected, "seed {seed}");
                assert_eq!(damaged, usize::from(end > *whole), "seed {seed}");
            }
        }
    }

    /// Goal: a flipped bit costs its entry and nothing else. Method: flip each bit of the middle one of three.
    #[test]
    fn damage_costs_one_entry() {
        for middle in [owed(5), owed(2), owed(3)] {
            let [mut file, mut third] = [Vec::new(), Vec::new()];
            Entry::Noted(owed(1)).encode(&mut file);
            let start = file.len();
            Entry::Noted(middle).encode(&mut file);
            let end = file.len();
            Entry::Noted(owed(4)).encode(&mut third);
            file.extend_from_slice(&third);
            for bit in start * 8..end * 8 {
                let mut file = file.clone();
                file[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(replay(&file), (vec![owed(1), owed(4)], 1), "bit {bit}");
            }
        }
    }
}
