//! The superblock: what a cache directory was made with. Two copies, written in turn; the valid one with the higher counter
//! holds.
//!
//! A copy is one block of `DISK_ALIGN` bytes. Own format, version 2, little-endian:
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 8 | magic |
//! | 8 | 4 | version |
//! | 12 | 4 | which copy |
//! | 16 | 8 | counter |
//! | 24 | 8 | the directory's random key |
//! | 32 | 4 | bytes of a segment |
//! | 36 | 4 | number of segments |
//! | 40 | 2 | number of shards |
//! | 56 | 8 | XXH3-64 of bytes 0..56 |

use super::record::{u32_at, u64_at};
use super::shard_map::SHARDS_MAX;
use crate::limits::DISK_ALIGN;
use twox_hash::xxhash3_64::Hasher;

/// The format that this program writes and reads.
pub const VERSION: u32 = 2;
const MAGIC: &[u8; 8] = b"ringcas\n";
const LEN: usize = 64;

/// What a directory was made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    /// Of writes of this block.
    pub counter: u64,
    /// Random; seeds all checksums and tags of the directory.
    pub key: u64,
    /// Bytes; a power of two.
    pub segment_len: u32,
    pub segments: u32,
    /// A power of two.
    pub shards: u16,
}

/// Why no superblock could be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unreadable {
    Damaged,
    OtherVersion(u32),
}

impl Superblock {
    /// One copy, a block.
    pub fn encode(&self, copy: u8) -> Vec<u8> {
        let mut out = vec![0u8; DISK_ALIGN];
        out[0..8].copy_from_slice(MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[12] = copy;
        out[16..24].copy_from_slice(&self.counter.to_le_bytes());
        out[24..32].copy_from_slice(&self.key.to_le_bytes());
        out[32..36].copy_from_slice(&self.segment_len.to_le_bytes());
        out[36..40].copy_from_slice(&self.segments.to_le_bytes());
        out[40..42].copy_from_slice(&self.shards.to_le_bytes());
        let sum = Hasher::oneshot(&out[..56]);
        out[56..64].copy_from_slice(&sum.to_le_bytes());
        out
    }
}

/// The newest valid copy in the bytes of the whole file.
pub fn decode(bytes: &[u8]) -> Result<Superblock, Unreadable> {
    let copies = [0, 1].map(|copy| bytes.get(copy * DISK_ALIGN..).map_or(Err(Unreadable::Damaged), decode_copy));
    match copies {
        [Ok(first), Ok(second)] => Ok(if second.counter > first.counter { second } else { first }),
        [Ok(one), Err(_)] | [Err(_), Ok(one)] => Ok(one),
        [Err(Unreadable::OtherVersion(found)), Err(_)] | [Err(_), Err(Unreadable::OtherVersion(found))] => {
            Err(Unreadable::OtherVersion(found))
        }
        [Err(Unreadable::Damaged), Err(Unreadable::Damaged)] => Err(Unreadable::Damaged),
    }
}

/// Which copies are whole, of the bytes of the whole file.
pub fn whole_copies(bytes: &[u8]) -> [bool; 2] {
    [0, 1].map(|copy| bytes.get(copy * DISK_ALIGN..).is_some_and(|bytes| decode_copy(bytes).is_ok()))
}

fn decode_copy(bytes: &[u8]) -> Result<Superblock, Unreadable> {
    let bytes: &[u8; LEN] = bytes.first_chunk().ok_or(Unreadable::Damaged)?;
    if !bytes.starts_with(MAGIC) || Hasher::oneshot(&bytes[..56]) != u64_at(bytes, 56) {
        return Err(Unreadable::Damaged);
    }
    let version = u32_at(bytes, 8);
    if version != VERSION {
        return Err(Unreadable::OtherVersion(version));
    }
    let block = Superblock {
        counter: u64_at(bytes, 16),
        key: u64_at(bytes, 24),
        segment_len: u32_at(bytes, 32),
        segments: u32_at(bytes, 36),
        shards: u16::from_le_bytes([bytes[40], bytes[41]]),
    };
    let sane = (1 << 20..=32 << 20).contains(&block.segment_len)
        && block.segment_len.is_power_of_two()
        && block.shards.is_power_of_two()
        && block.shards <= SHARDS_MAX
        && block.segments > 0;
    if sane { Ok(block) } else { Err(Unreadable::Damaged) }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The file `bytes` as a program of another version would have written it.
    pub fn with_version(bytes: &[u8], version: u32) -> Vec<u8> {
        let mut out = bytes.to_vec();
        for copy in [0, DISK_ALIGN] {
            out[copy + 8..copy + 12].copy_from_slice(&version.to_le_bytes());
            let sum = Hasher::oneshot(&out[copy..copy + 56]);
            out[copy + 56..copy + 64].copy_from_slice(&sum.to_le_bytes());
        }
        out
    }

    /// Goal: one whole copy is enough, the newer one holds, another version is told from damage. Method: by hand, with every
    /// byte changed in turn.
    #[test]
    fn the_newest_valid_copy_holds() {
        let old = Superblock { counter: 4, key: 9, segment_len: 1 << 20, segments: 63, shards: 4 };
        let new = Superblock { counter: 5, segments: 99, ..old };
        let bytes = [old.encode(0), new.encode(1)].concat();
        assert_eq!(decode(&bytes), Ok(new));
        assert_eq!(decode(&bytes[..DISK_ALIGN]), Ok(old));
        assert_eq!((whole_copies(&bytes), whole_copies(&bytes[..DISK_ALIGN])), ([true, true], [true, false]));
        for at in 0..LEN {
            let mut bad = bytes.clone();
            bad[DISK_ALIGN + at] ^= 4;
            assert_eq!((decode(&bad), whole_copies(&bad)), (Ok(old), [true, false]), "byte {at}");
            bad[at] ^= 4;
            assert_eq!(whole_copies(&bad), [false, false], "byte {at}");
            assert_eq!(decode(&bad), Err(Unreadable::Damaged), "byte {at}");
        }
        assert_eq!(decode(&with_version(&bytes, VERSION + 1)), Err(Unreadable::OtherVersion(VERSION + 1)));
        assert_eq!(decode(b""), Err(Unreadable::Damaged));
    }
}
