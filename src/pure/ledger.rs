//! The ledger of a backend's unfinished uploads, as it stands in a file: entries one behind the other, each of which
//! notes an upload or strikes it out. The file is only appended to, and rewritten when most of it is struck out.
//!
//! | offset | bytes | field (little-endian) |
//! |---|---|---|
//! | 0 | 1 | 1 noted, 2 struck out |
//! | 1 | 1 | 1 CAS, 2 action |
//! | 2 | 6 | 0 |
//! | 8 | 32 | hash |
//! | 40 | 8 | size in bytes |
//! | 48 | 8 | XXH3-64 of the above |
//!
//! Own format, version 1. The file's name carries the version.

use super::digest::{Digest, Hash};
use super::record::Checksums;
use super::upload_queue::{ObjectKind, Upload};

/// Bytes of an entry.
pub const ENTRY_LEN: usize = 56;
const SUMMED_LEN: usize = 48;
const SUMS: Checksums = Checksums { key: 0 };

/// What an entry says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    Noted(Upload),
    Struck(Upload),
}

impl Entry {
    pub fn encode(&self) -> [u8; ENTRY_LEN] {
        let (word, upload) = match self {
            Self::Noted(upload) => (1, upload),
            Self::Struck(upload) => (2, upload),
        };
        let mut out = [0; ENTRY_LEN];
        out[0] = word;
        out[1] = match upload.kind {
            ObjectKind::Cas => 1,
            ObjectKind::Action => 2,
        };
        out[8..40].copy_from_slice(&upload.digest.hash.0);
        out[40..48].copy_from_slice(&upload.digest.size.to_le_bytes());
        let sum = SUMS.payload(&out[..SUMMED_LEN]);
        out[SUMMED_LEN..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; ENTRY_LEN]) -> Option<Self> {
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if u64_at(SUMMED_LEN) != SUMS.payload(&bytes[..SUMMED_LEN]) {
            return None;
        }
        let kind = match bytes[1] {
            1 => ObjectKind::Cas,
            2 => ObjectKind::Action,
            _ => return None,
        };
        let digest = Digest { hash: Hash(std::array::from_fn(|i| bytes[8 + i])), size: u64_at(40) };
        match bytes[0] {
            1 => Some(Self::Noted(Upload { kind, digest })),
            2 => Some(Self::Struck(Upload { kind, digest })),
            _ => None,
        }
    }
}

/// The unfinished uploads of a file, oldest first, and how many entries could not be read: the last one of a process that
/// was killed may be torn.
pub fn replay(file: &[u8]) -> (Vec<Upload>, usize) {
    let (entries, torn) = file.as_chunks::<ENTRY_LEN>();
    let mut damaged = usize::from(!torn.is_empty());
    let mut noted: rustc_hash::FxHashMap<Upload, usize> = rustc_hash::FxHashMap::default();
    for (number, entry) in entries.iter().enumerate() {
        match Entry::decode(entry) {
            Some(Entry::Noted(upload)) => drop(noted.entry(upload).or_insert(number)),
            Some(Entry::Struck(upload)) => drop(noted.remove(&upload)),
            None => damaged += 1,
        }
    }
    let mut unfinished: Vec<(usize, Upload)> = noted.into_iter().map(|(upload, number)| (number, upload)).collect();
    unfinished.sort_unstable();
    (unfinished.into_iter().map(|(_, upload)| upload).collect(), damaged)
}

#[cfg(test)]
mod tests {
    use super::super::random::SplitMix64;
    use super::*;

    fn upload(number: u64) -> Upload {
        let kind = if number.is_multiple_of(3) { ObjectKind::Action } else { ObjectKind::Cas };
        Upload { kind, digest: Digest { hash: Hash([number as u8; 32]), size: number << 33 } }
    }

    /// Goal: a file cut anywhere gives what was unfinished at the last whole entry. Method: seeded histories, each
    /// replayed at every length.
    #[test]
    fn replays_every_prefix() {
        for seed in 0..20 {
            let mut random = SplitMix64(seed);
            let (mut file, mut states, mut model) = (Vec::new(), vec![Vec::new()], Vec::new());
            for _ in 0..60 {
                let upload = upload(random.below(12));
                let entry = if random.below(2) == 0 {
                    if !model.contains(&upload) {
                        model.push(upload);
                    }
                    Entry::Noted(upload)
                } else {
                    model.retain(|known| *known != upload);
                    Entry::Struck(upload)
                };
                file.extend_from_slice(&entry.encode());
                states.push(model.clone());
            }
            for end in 0..=file.len() {
                let (unfinished, damaged) = replay(&file[..end]);
                assert_eq!(unfinished, states[end / ENTRY_LEN], "seed {seed}");
                assert_eq!(damaged, usize::from(end % ENTRY_LEN > 0), "seed {seed}");
            }
        }
    }

    /// Goal: a flipped bit costs its entry and nothing else. Method: flip each bit of the middle one of three.
    #[test]
    fn damage_costs_one_entry() {
        let file: Vec<u8> = (1..4).flat_map(|number| Entry::Noted(upload(number)).encode()).collect();
        for bit in 0..ENTRY_LEN * 8 {
            let mut file = file.clone();
            file[ENTRY_LEN + bit / 8] ^= 1 << (bit % 8);
            assert_eq!(replay(&file), (vec![upload(1), upload(3)], 1), "bit {bit}");
        }
    }
}
