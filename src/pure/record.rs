//! Records of the log: header, checksums, and the commit of a large blob.
//!
//! A record starts at a multiple of 64 bytes. Its header, own format, version 1, little-endian:
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 4 | magic |
//! | 4 | 1 | record kind: 1 small, 2 large commit, 3 tomb, 4 ages |
//! | 5 | 1 | key space: 1 CAS, 2 action, 3 and 4 the same below a storage prefix (`scope`) |
//! | 6 | 1 | codec: 0 raw, 1 zstd |
//! | 7 | 1 | flags: bit 0: a large commit that carries one value cut into pieces |
//! | 8 | 32 | hash |
//! | 40 | 8 | size of the key |
//! | 48 | 8 | raw length of the payload. Of an action: 4 bytes of it, then 4 bytes: the tag of the instance that stored it (`purge`), 0 for unknown. Of a tomb: `TombOrder` |
//! | 56 | 4 | stored length of the payload |
//! | 60 | 4 | when the content was stored, in seconds since 1970; 0 for unknown |
//! | 64 | 8 | generation of the segment |
//! | 72 | 8 | XXH3-64 of the stored payload, seeded with the directory's key |
//! | 80 | 8 | XXH3-64 of bytes 0..80, seeded with the directory's key, the record's position and the generation |
//!
//! The payload follows at once. Why position and generation are in the checksum: nothing that a client can upload, and no
//! stale copy, can be taken for a record.

use std::hash::Hasher as _;

use super::digest::Hash;
use super::purge::{InstanceTag, Origin};
use crate::limits::ACTION_RESULT_LEN_MAX;
use twox_hash::xxhash3_64::Hasher;

/// Which key space a record belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Cas,
    Action,
    /// Below a storage prefix: the hash of the key is not that of the content, but made of it.
    ScopedCas,
    ScopedAction,
}

impl Kind {
    pub fn is_action(self) -> bool {
        match self {
            Self::Cas | Self::ScopedCas => false,
            Self::Action | Self::ScopedAction => true,
        }
    }
}

/// What a record is found by. A CAS blob is named by hash and size. An action is found by its hash alone: `size` is
/// stored with it, for the caller to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    pub kind: Kind,
    pub hash: Hash,
    pub size: u64,
}

/// How payload stands at rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    Raw,
    /// One whole zstd frame with its content size.
    Zstd,
}

/// What a record does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordKind {
    /// Carries the payload of its key.
    Small,
    /// Says in which chunks the payload of its key stands (`Commit`).
    Large,
    /// Removes its key.
    Tomb,
    /// Says how long ago each entry of the shard was used (`recency::Ages`), when it is the last in the log.
    Ages,
}

/// Which records of its key a tomb removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TombOrder {
    /// Those before it. It may go with its segment: what an older record brings back is right, and was only not wanted.
    Here,
    /// Those before it, and none may come back: it is copied forward as long as there are older segments.
    LastingHere,
    /// The copy of such a one, which first stood in a segment of this generation: removes what stands in older ones.
    LastingSince(u64),
}

impl TombOrder {
    pub fn number(self) -> u64 {
        match self {
            Self::Here => 0,
            Self::LastingHere => u64::MAX,
            Self::LastingSince(generation) => generation,
        }
    }

    pub fn of_number(number: u64) -> Self {
        match number {
            0 => Self::Here,
            u64::MAX => Self::LastingHere,
            generation => Self::LastingSince(generation),
        }
    }
}

const _: () = assert!(ACTION_RESULT_LEN_MAX as u64 <= u32::MAX as u64, "an action's length leaves room for a tag");

/// Bytes of a record's header.
pub const HEADER_LEN: usize = 88;
/// Records start at multiples of this.
pub const RECORD_ALIGN: usize = 64;
const MAGIC: u32 = u32::from_le_bytes(*b"rcR1");
const PIECES: u8 = 1;

/// Where a record stands: what its header checksum is bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Bytes from the start of the volume.
    pub position: u64,
    /// Of the segment: its lease's number.
    pub generation: u64,
}

/// Checksums keyed with the directory's random key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checksums {
    pub key: u64,
}

/// What stands in a record's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub kind: RecordKind,
    pub key: Key,
    pub codec: Codec,
    /// Only of a large commit: the frames are pieces of one value of `codec`, to be joined by the reader.
    pub pieces: bool,
    /// Bytes of content. Of a tomb: `TombOrder`, as a number.
    pub raw_len: u64,
    /// Who stored the content, and when. It stays with the record wherever that is copied.
    pub origin: Origin,
    /// Bytes of payload as it stands on disk.
    pub stored_len: u32,
    /// Checksum of those.
    pub payload_sum: u64,
}

impl Checksums {
    /// Of payload: bound to nothing but the directory.
    pub fn payload(&self, bytes: &[u8]) -> u64 {
        Hasher::oneshot_with_seed(self.key, bytes)
    }

    /// Of payload in pieces.
    pub fn payload_of_pieces(&self, pieces: &[&[u8]]) -> u64 {
        let mut hasher = Hasher::with_seed(self.key);
        pieces.iter().for_each(|piece| hasher.write(piece));
        hasher.finish()
    }

    /// Of headers and footers: bound to where they stand.
    pub fn placed(&self, place: Place, bytes: &[u8]) -> u64 {
        let seed = self.key
            ^ place.position.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
            ^ place.generation.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
        Hasher::oneshot_with_seed(seed, bytes)
    }
}

impl Header {
    /// Bytes of header and payload.
    pub fn record_len(&self) -> usize {
        HEADER_LEN + self.stored_len as usize
    }

    /// Bytes that the record takes in the log, up to where the next may start.
    pub fn log_len(&self) -> usize {
        log_len(self.stored_len as usize)
    }

    pub fn encode(&self, sums: &Checksums, place: Place) -> [u8; HEADER_LEN] {
        let mut out = [0u8; HEADER_LEN];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = match self.kind {
            RecordKind::Small => 1,
            RecordKind::Large => 2,
            RecordKind::Tomb => 3,
            RecordKind::Ages => 4,
        };
        out[5] = match self.key.kind {
            Kind::Cas => 1,
            Kind::Action => 2,
            Kind::ScopedCas => 3,
            Kind::ScopedAction => 4,
        };
        out[6] = match self.codec {
            Codec::Raw => 0,
            Codec::Zstd => 1,
        };
        out[7] = if self.pieces { PIECES } else { 0 };
        out[8..40].copy_from_slice(&self.key.hash.0);
        out[40..48].copy_from_slice(&self.key.size.to_le_bytes());
        let raw_len = match self.has_instance() {
            true => self.raw_len | u64::from(self.origin.instance.0) << u32::BITS,
            false => self.raw_len,
        };
        out[48..56].copy_from_slice(&raw_len.to_le_bytes());
        out[56..60].copy_from_slice(&self.stored_len.to_le_bytes());
        out[60..64].copy_from_slice(&self.origin.stored_s.to_le_bytes());
        out[64..72].copy_from_slice(&place.generation.to_le_bytes());
        out[72..80].copy_from_slice(&self.payload_sum.to_le_bytes());
        let sum = sums.placed(place, &out[..80]);
        out[80..88].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// The header at the start of `bytes`, if that is one written for this very place.
    pub fn decode(bytes: &[u8], sums: &Checksums, place: Place) -> Option<Self> {
        let bytes: &[u8; HEADER_LEN] = bytes.first_chunk()?;
        if u32_at(bytes, 0) != MAGIC || u64_at(bytes, 64) != place.generation {
            return None;
        }
        if sums.placed(place, &bytes[..80]) != u64_at(bytes, 80) {
            return None;
        }
        let kind = match bytes[4] {
            1 => RecordKind::Small,
            2 => RecordKind::Large,
            3 => RecordKind::Tomb,
            4 => RecordKind::Ages,
            _ => return None,
        };
        let space = match bytes[5] {
            1 => Kind::Cas,
            2 => Kind::Action,
            3 => Kind::ScopedCas,
            4 => Kind::ScopedAction,
            _ => return None,
        };
        let codec = match bytes[6] {
            0 => Codec::Raw,
            1 => Codec::Zstd,
            _ => return None,
        };
        let mut hash = [0u8; 32];
        hash.copy_from_slice(&bytes[8..40]);
        let mut header = Self {
            kind,
            key: Key { kind: space, hash: Hash(hash), size: u64_at(bytes, 40) },
            codec,
            pieces: bytes[7] & PIECES != 0,
            raw_len: u64_at(bytes, 48),
            origin: Origin { stored_s: u32_at(bytes, 60), instance: InstanceTag::UNKNOWN },
            stored_len: u32_at(bytes, 56),
            payload_sum: u64_at(bytes, 72),
        };
        if header.has_instance() {
            header.origin.instance = InstanceTag((header.raw_len >> u32::BITS) as u32);
            header.raw_len &= u64::from(u32::MAX);
        }
        Some(header)
    }

    /// Only actions are stored by an instance, and only they are never so long that the length would need the space.
    fn has_instance(&self) -> bool {
        self.key.kind.is_action() && matches!(self.kind, RecordKind::Small | RecordKind::Large)
    }

    /// The payload behind the header at the start of `bytes`, if all of it is there and unharmed.
    pub fn payload<'a>(&self, bytes: &'a [u8], sums: &Checksums) -> Option<&'a [u8]> {
        let payload = bytes.get(HEADER_LEN..self.record_len())?;
        (sums.payload(payload) == self.payload_sum).then_some(payload)
    }
}

/// Bytes that a record with a payload of `stored_len` bytes takes in the log.
pub const fn log_len(stored_len: usize) -> usize {
    (HEADER_LEN + stored_len).next_multiple_of(RECORD_ALIGN)
}

/// Whether a record may start here: a cheap test before `Header::decode`.
pub fn may_start(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC.to_le_bytes())
}

/// The generation that a header at the start of `bytes` names, whole or not.
pub fn generation_at(bytes: &[u8]) -> Option<u64> {
    (bytes.len() >= HEADER_LEN).then(|| u64_at(bytes, 64))
}

/// Neighbouring chunks. Chunks are numbered through the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    pub first: u32,
    pub count: u32,
}

/// One frame of a large blob in its stored stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    pub codec: Codec,
    /// Bytes at rest; at most 2^31 - 1.
    pub stored_len: u32,
    /// `Checksums::payload` of those.
    pub sum: u64,
}

/// The payload of a large commit, little-endian: u32 number of runs, u32 number of frames, the runs (u32 first chunk, u32
/// count), the frames (u32 stored length with the codec in bit 31, u64 checksum).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Commit {
    pub runs: Vec<Run>,
    pub frames: Vec<Frame>,
}

/// Bytes of a run and of a frame in a commit.
pub const RUN_LEN: usize = 8;
const FRAME_ENTRY_LEN: usize = 12;
const ZSTD_BIT: u32 = 1 << 31;

/// Bytes of a commit's payload.
pub const fn commit_len(runs: usize, frames: usize) -> usize {
    8 + runs * RUN_LEN + frames * FRAME_ENTRY_LEN
}

impl Commit {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(commit_len(self.runs.len(), self.frames.len()));
        out.extend((self.runs.len() as u32).to_le_bytes());
        out.extend((self.frames.len() as u32).to_le_bytes());
        self.runs.iter().for_each(|run| put_run(&mut out, *run));
        for frame in &self.frames {
            assert!(frame.stored_len < ZSTD_BIT, "a frame of {} bytes", frame.stored_len);
            let codec = if frame.codec == Codec::Zstd { ZSTD_BIT } else { 0 };
            out.extend((frame.stored_len | codec).to_le_bytes());
            out.extend(frame.sum.to_le_bytes());
        }
        out
    }

    /// `None` when the lengths do not add up.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (counts, rest) = bytes.split_first_chunk::<8>()?;
        let (runs, frames) = (u32_at(counts, 0) as usize, u32_at(counts, 4) as usize);
        if bytes.len() != 8 + runs.checked_mul(RUN_LEN)? + frames.checked_mul(FRAME_ENTRY_LEN)? {
            return None;
        }
        let (runs, frames) = rest.split_at(runs * RUN_LEN);
        Some(Self {
            runs: runs.chunks_exact(RUN_LEN).map(get_run).collect(),
            frames: frames.chunks_exact(FRAME_ENTRY_LEN).map(get_frame).collect(),
        })
    }

    /// Bytes of the stored stream.
    pub fn stored_len(&self) -> u64 {
        self.frames.iter().map(|frame| u64::from(frame.stored_len)).sum()
    }
}

pub(crate) fn put_run(out: &mut Vec<u8>, run: Run) {
    out.extend(run.first.to_le_bytes());
    out.extend(run.count.to_le_bytes());
}

/// `bytes` has `RUN_LEN` of them.
pub(crate) fn get_run(bytes: &[u8]) -> Run {
    Run { first: u32_at(bytes, 0), count: u32_at(bytes, 4) }
}

fn get_frame(bytes: &[u8]) -> Frame {
    let len = u32_at(bytes, 0);
    let codec = if len & ZSTD_BIT == 0 { Codec::Raw } else { Codec::Zstd };
    Frame { codec, stored_len: len & !ZSTD_BIT, sum: u64_at(bytes, 4) }
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> impl Strategy<Value = Header> {
        (0..4usize, any::<bool>(), any::<bool>(), any::<[u8; 32]>(), any::<(u64, u64, u32, u64, u32, u32)>()).prop_map(
            |(kind, action, zstd, hash, (size, raw_len, stored_len, payload_sum, stored_s, instance))| Header {
                kind: [RecordKind::Small, RecordKind::Large, RecordKind::Tomb, RecordKind::Ages][kind],
                key: Key { kind: if action { Kind::Action } else { Kind::Cas }, hash: Hash(hash), size },
                codec: if zstd { Codec::Zstd } else { Codec::Raw },
                pieces: action && kind == 1,
                // Of an action it is short: the tag stands beside it.
                raw_len: if action && kind < 2 { raw_len >> 32 } else { raw_len },
                origin: Origin { stored_s, instance: InstanceTag(if action && kind < 2 { instance } else { 0 }) },
                stored_len,
                payload_sum,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Goal: a header comes back as it was written, in its place only, and no changed byte goes unseen. Method: random
        /// headers and places; each byte changed in turn; shifted place, other generation, other directory.
        #[test]
        fn a_header_is_valid_only_whole_and_in_its_place(header in header(), at in any::<u32>(), generation in any::<u64>(), bit in 0u32..8) {
            let sums = Checksums { key: 77 };
            let place = Place { position: u64::from(at) * 64, generation };
            let bytes = header.encode(&sums, place);
            prop_assert!(may_start(&bytes));
            prop_assert_eq!(generation_at(&bytes), Some(generation));
            prop_assert_eq!(Header::decode(&bytes, &sums, place), Some(header));
            for i in 0..HEADER_LEN {
                let mut bad = bytes;
                bad[i] ^= 1 << bit;
                prop_assert_eq!(Header::decode(&bad, &sums, place), None);
            }
            prop_assert_eq!(Header::decode(&bytes, &sums, Place { position: place.position + 64, ..place }), None);
            prop_assert_eq!(Header::decode(&bytes, &sums, Place { generation: generation ^ 1, ..place }), None);
            prop_assert_eq!(Header::decode(&bytes, &Checksums { key: 78 }, place), None);
            prop_assert_eq!(Header::decode(&bytes[..HEADER_LEN - 1], &sums, place), None);
        }

        /// Goal: a commit comes back as it was written; other lengths are refused. Method: random commits, cut and extended.
        #[test]
        fn a_commit_comes_back(runs in proptest::collection::vec(any::<(u32, u32)>(), 0..9), frames in proptest::collection::vec((any::<bool>(), 0u32..1 << 31, any::<u64>()), 0..9)) {
            let commit = Commit {
                runs: runs.into_iter().map(|(first, count)| Run { first, count }).collect(),
                frames: frames.into_iter().map(|(zstd, stored_len, sum)| Frame { codec: if zstd { Codec::Zstd } else { Codec::Raw }, stored_len, sum }).collect(),
            };
            let mut bytes = commit.encode();
            prop_assert_eq!(bytes.len(), commit_len(commit.runs.len(), commit.frames.len()));
            prop_assert_eq!(Commit::decode(&bytes), Some(commit));
            prop_assert_eq!(Commit::decode(&bytes[..bytes.len() - 1]), None);
            bytes.push(0);
            prop_assert_eq!(Commit::decode(&bytes), None);
        }
    }

    /// Goal: a payload is served only whole and unharmed. Method: one record, cut and changed.
    #[test]
    fn a_payload_is_checked() {
        let sums = Checksums { key: 5 };
        let key = Key { kind: Kind::Cas, hash: Hash([3; 32]), size: 5 };
        let header = Header {
            kind: RecordKind::Small,
            key,
            codec: Codec::Raw,
            pieces: false,
            raw_len: 5,
            origin: Origin::default(),
            stored_len: 5,
            payload_sum: sums.payload(b"hello"),
        };
        let mut bytes = header.encode(&sums, Place { position: 64, generation: 1 }).to_vec();
        bytes.extend(b"hello");
        assert_eq!(header.payload(&bytes, &sums), Some(&b"hello"[..]));
        assert_eq!(header.payload(&bytes[..bytes.len() - 1], &sums), None);
        bytes[HEADER_LEN] ^= 1;
        assert_eq!(header.payload(&bytes, &sums), None);
        assert_eq!((header.record_len(), header.log_len()), (93, 128));
    }
}
