//! Segments: how the volume is cut, and the header and footer of a segment.
//!
//! ```text
//! log segment:    header (2 copies, a block each) | records ... | free | footer, up to the segment's end
//! chunk segment:  header (2 copies, a block each) | chunks ...
//! ```
//! Blocks are `DISK_ALIGN` bytes. All numbers are little-endian; own format, version 2.

use super::index::Word;
use super::record::{Checksums, Place, RUN_LEN, Run, get_run, put_run, u32_at, u64_at};
use super::shard_map::ShardId;
use crate::limits::{CHUNK_LEN, DISK_ALIGN};

/// Bytes at the start of each segment that its header takes.
pub const HEAD_LEN: u32 = 2 * DISK_ALIGN as u32;
const MAGIC: u32 = u32::from_le_bytes(*b"rcS1");
const FOOTER_MAGIC: u32 = u32::from_le_bytes(*b"rcF1");
/// Bytes of a header copy that mean something.
const SEGMENT_HEADER_LEN: usize = 40;
/// Bytes at the very end of a log segment that describe its footer.
pub const TRAILER_LEN: usize = 64;
const ENTRY_LEN: usize = 16;
/// Bytes of a large entry in front of its runs.
const LARGE_LEN: usize = 8;

/// How the volume is cut into segments and those into chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Bytes; a power of two.
    pub segment_len: u32,
}

impl Layout {
    /// The position of `offset` in `segment`, in bytes from the start of the volume.
    pub fn position(&self, segment: u32, offset: u32) -> u64 {
        u64::from(segment) * u64::from(self.segment_len) + u64::from(offset)
    }

    /// The segment at `position`, and the offset in it.
    pub fn split(&self, position: u64) -> (u32, u32) {
        let len = u64::from(self.segment_len);
        ((position / len) as u32, (position % len) as u32)
    }

    pub fn chunks_per_segment(&self) -> u32 {
        (self.segment_len - HEAD_LEN) / CHUNK_LEN as u32
    }

    pub fn segment_of_chunk(&self, chunk: u32) -> u32 {
        chunk / self.chunks_per_segment()
    }

    /// Where `chunk` starts, in bytes from the start of the volume.
    pub fn chunk_position(&self, chunk: u32) -> u64 {
        let per_segment = self.chunks_per_segment();
        self.position(chunk / per_segment, HEAD_LEN + chunk % per_segment * CHUNK_LEN as u32)
    }
}

/// What a segment is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    Log,
    Chunks,
}

/// A segment's header: whose it is. Written once for each lease, in two copies, each with its own checksum.
///
/// | offset | bytes | content |
/// |---|---|---|
/// | 0 | 4 | magic |
/// | 4 | 1 | class: 1 log, 2 chunks |
/// | 5 | 1 | which copy: 0, 1 |
/// | 6 | 2 | shard |
/// | 8 | 4 | number of this segment |
/// | 12 | 4 | 0 |
/// | 16 | 8 | generation: the number of the lease, never used twice |
/// | 24 | 8 | 0 |
/// | 32 | 8 | XXH3-64 of bytes 0..32, seeded with the directory's key and the copy's position |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHeader {
    pub segment: u32,
    pub class: Class,
    pub shard: ShardId,
    pub generation: u64,
}

impl SegmentHeader {
    /// Both copies, `HEAD_LEN` bytes.
    pub fn encode(&self, sums: &Checksums, layout: Layout) -> Vec<u8> {
        let mut out = vec![0u8; HEAD_LEN as usize];
        for copy in 0..2u8 {
            let block = &mut out[usize::from(copy) * DISK_ALIGN..][..SEGMENT_HEADER_LEN];
            block[0..4].copy_from_slice(&MAGIC.to_le_bytes());
            block[4] = match self.class {
                Class::Log => 1,
                Class::Chunks => 2,
            };
            block[5] = copy;
            block[6..8].copy_from_slice(&self.shard.0.to_le_bytes());
            block[8..12].copy_from_slice(&self.segment.to_le_bytes());
            block[16..24].copy_from_slice(&self.generation.to_le_bytes());
            let sum = sums.placed(copy_place(layout, self.segment, copy), &block[..32]);
            block[32..40].copy_from_slice(&sum.to_le_bytes());
        }
        out
    }

    /// The header of `segment` from its first `HEAD_LEN` bytes, if at least one copy is whole. If both are and differ (a
    /// lease was being written), the later one holds.
    pub fn decode(bytes: &[u8], sums: &Checksums, layout: Layout, segment: u32) -> Option<Self> {
        Self::copies(bytes, sums, layout, segment).into_iter().flatten().max_by_key(|header| header.generation)
    }

    /// Both copies; `None` for one that is not whole.
    pub fn copies(bytes: &[u8], sums: &Checksums, layout: Layout, segment: u32) -> [Option<Self>; 2] {
        [0, 1].map(|copy: u8| {
            let block = bytes.get(usize::from(copy) * DISK_ALIGN..)?.get(..SEGMENT_HEADER_LEN)?;
            let valid = u32_at(block, 0) == MAGIC
                && block[5] == copy
                && u32_at(block, 8) == segment
                && sums.placed(copy_place(layout, segment, copy), &block[..32]) == u64_at(block, 32);
            let class = match block[4] {
                1 => Class::Log,
                2 => Class::Chunks,
                _ => return None,
            };
            let shard = ShardId(u16::from_le_bytes([block[6], block[7]]));
            valid.then_some(Self { segment, class, shard, generation: u64_at(block, 16) })
        })
    }

    /// Whether the first `HEAD_LEN` bytes of a segment are those of one that was never leased.
    pub fn is_blank(bytes: &[u8]) -> bool {
        [0, DISK_ALIGN].iter().all(|&at| bytes[at..at + SEGMENT_HEADER_LEN].iter().all(|&byte| byte == 0))
    }
}

fn copy_place(layout: Layout, segment: u32, copy: u8) -> Place {
    Place { position: layout.position(segment, u32::from(copy) * DISK_ALIGN as u32), generation: 0 }
}

/// One record of a log segment, as the footer lists it: the index tag and word, which may be a tomb's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FooterEntry {
    pub tag: u64,
    pub word: u64,
}

/// What a footer says of a large commit beside its entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LargeEntry {
    /// Bytes of the commit record, header included.
    pub record_len: u32,
    pub runs: Vec<Run>,
}

/// The list of a log segment's records, in log order, up to offset `upto`. It stands at the segment's end and is written when
/// the segment is sealed; before that now and then, as a checkpoint.
///
/// ```text
/// entries (u64 tag, u64 word) | of each large one, in order: u32 record length, u32 number of runs, runs | trailer
/// ```
/// The trailer is the last `TRAILER_LEN` bytes of the segment:
///
/// | offset | bytes | content |
/// |---|---|---|
/// | 0 | 4 | magic |
/// | 4 | 1 | 1: sealed, nothing follows `upto` |
/// | 8 | 4 | number of entries |
/// | 12 | 4 | bytes of the footer in front of the trailer |
/// | 16 | 4 | `upto`, offset in the segment |
/// | 24 | 8 | generation |
/// | 32 | 8 | `Checksums::placed` of those bytes, at the segment's start |
/// | 56 | 8 | `Checksums::placed` of trailer bytes 0..56, at the segment's end |
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Footer {
    pub entries: Vec<FooterEntry>,
    /// One for each large entry, in order.
    pub large: Vec<LargeEntry>,
}

/// The described part of a trailer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trailer {
    pub sealed: bool,
    pub entries: u32,
    /// Bytes in front of the trailer that the list takes.
    pub body_len: u32,
    /// Offset in the segment up to which the list is complete.
    pub upto: u32,
    sum: u64,
}

impl Footer {
    /// Bytes of the footer, trailer included.
    pub fn encoded_len(&self) -> usize {
        let large: usize = self.large.iter().map(|large| large_len(large.runs.len())).sum();
        self.entries.len() * ENTRY_LEN + large + TRAILER_LEN
    }

    /// Bytes that one more entry adds; `runs` is `None` for one that is not large.
    pub fn entry_len(runs: Option<usize>) -> usize {
        ENTRY_LEN + runs.map_or(0, large_len)
    }

    /// The footer's bytes, which end where the segment ends.
    pub fn encode(
        &self,
        sums: &Checksums,
        layout: Layout,
        segment: u32,
        generation: u64,
        upto: u32,
        sealed: bool,
    ) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.encoded_len());
        for entry in &self.entries {
            out.extend(entry.tag.to_le_bytes());
            out.extend(entry.word.to_le_bytes());
        }
        for large in &self.large {
            out.extend(large.record_len.to_le_bytes());
            out.extend((large.runs.len() as u32).to_le_bytes());
            large.runs.iter().for_each(|run| put_run(&mut out, *run));
        }
        let body_sum = sums.placed(Place { position: layout.position(segment, 0), generation }, &out);
        let mut trailer = [0u8; TRAILER_LEN];
        trailer[0..4].copy_from_slice(&FOOTER_MAGIC.to_le_bytes());
        trailer[4] = u8::from(sealed);
        trailer[8..12].copy_from_slice(&(self.entries.len() as u32).to_le_bytes());
        trailer[12..16].copy_from_slice(&(out.len() as u32).to_le_bytes());
        trailer[16..20].copy_from_slice(&upto.to_le_bytes());
        trailer[24..32].copy_from_slice(&generation.to_le_bytes());
        trailer[32..40].copy_from_slice(&body_sum.to_le_bytes());
        let sum = sums.placed(trailer_place(layout, segment, generation), &trailer[..56]);
        trailer[56..64].copy_from_slice(&sum.to_le_bytes());
        out.extend(trailer);
        out
    }

    /// The list from the `trailer.body_len` bytes in front of the trailer. `None` when they are not those that were written.
    pub fn decode(
        body: &[u8],
        trailer: &Trailer,
        sums: &Checksums,
        layout: Layout,
        segment: u32,
        generation: u64,
    ) -> Option<Self> {
        let place = Place { position: layout.position(segment, 0), generation };
        if body.len() != trailer.body_len as usize || sums.placed(place, body) != trailer.sum {
            return None;
        }
        let (entries, mut rest) = body.split_at_checked((trailer.entries as usize).checked_mul(ENTRY_LEN)?)?;
        let entries: Vec<_> = entries
            .chunks_exact(ENTRY_LEN)
            .map(|bytes| FooterEntry { tag: u64_at(bytes, 0), word: u64_at(bytes, 8) })
            .collect();
        let mut large = Vec::new();
        for entry in &entries {
            let word = Word::from_bits(entry.word)?;
            if layout.split(word.location() * 64).0 != segment {
                return None;
            }
            if word.is_large() {
                let (head, after) = rest.split_at_checked(LARGE_LEN)?;
                let (runs, after) = after.split_at_checked((u32_at(head, 4) as usize).checked_mul(RUN_LEN)?)?;
                large.push(LargeEntry {
                    record_len: u32_at(head, 0),
                    runs: runs.chunks_exact(RUN_LEN).map(get_run).collect(),
                });
                rest = after;
            }
        }
        rest.is_empty().then_some(Self { entries, large })
    }
}

impl Trailer {
    /// The trailer at the end of `bytes`, which end where the segment ends.
    pub fn decode(bytes: &[u8], sums: &Checksums, layout: Layout, segment: u32, generation: u64) -> Option<Self> {
        let bytes: &[u8; TRAILER_LEN] = bytes.last_chunk()?;
        if u32_at(bytes, 0) != FOOTER_MAGIC || u64_at(bytes, 24) != generation {
            return None;
        }
        if sums.placed(trailer_place(layout, segment, generation), &bytes[..56]) != u64_at(bytes, 56) {
            return None;
        }
        let trailer = Self {
            sealed: bytes[4] != 0,
            entries: u32_at(bytes, 8),
            body_len: u32_at(bytes, 12),
            upto: u32_at(bytes, 16),
            sum: u64_at(bytes, 32),
        };
        let room = layout.segment_len - HEAD_LEN - TRAILER_LEN as u32;
        (trailer.body_len <= room && (HEAD_LEN..=layout.segment_len).contains(&trailer.upto)).then_some(trailer)
    }

    /// Whether a footer of this generation was written at the end of `bytes` and has come to harm since: what is there is
    /// no trailer, neither of this lease nor of a former one, but looks like one.
    pub fn is_damaged(bytes: &[u8], sums: &Checksums, layout: Layout, segment: u32, generation: u64) -> bool {
        let Some(last) = bytes.last_chunk::<TRAILER_LEN>() else { return false };
        let noted = u64_at(last, 24);
        let is_whole = |generation| Self::decode(bytes, sums, layout, segment, generation).is_some();
        (u32_at(last, 0) == FOOTER_MAGIC || noted == generation) && !is_whole(generation) && !is_whole(noted)
    }
}

fn large_len(runs: usize) -> usize {
    LARGE_LEN + runs * RUN_LEN
}

fn trailer_place(layout: Layout, segment: u32, generation: u64) -> Place {
    Place { position: layout.position(segment, layout.segment_len - TRAILER_LEN as u32), generation }
}

#[cfg(test)]
mod tests {
    use super::super::digest::Hash;
    use super::super::record::{Key, Kind};
    use super::*;

    const LAYOUT: Layout = Layout { segment_len: 1 << 20 };
    const SUMS: Checksums = Checksums { key: 99 };

    /// Goal: positions, segments and chunks map to each other. Method: all chunks of some segments.
    #[test]
    fn chunks_lie_inside_their_segments() {
        for len in [1 << 20, 1 << 25] {
            let layout = Layout { segment_len: len };
            let per_segment = layout.chunks_per_segment();
            for chunk in 0..3 * per_segment {
                let (segment, offset) = layout.split(layout.chunk_position(chunk));
                assert_eq!(segment, layout.segment_of_chunk(chunk));
                assert!(
                    offset >= HEAD_LEN
                        && offset + CHUNK_LEN as u32 <= len
                        && (offset as usize).is_multiple_of(DISK_ALIGN)
                );
            }
        }
    }

    /// Goal: a flipped byte in one copy of a header loses nothing, in both it loses the segment, and a header counts only in
    /// its own segment. Method: each meaningful byte of each copy.
    #[test]
    fn a_header_survives_damage_to_one_copy() {
        let header = SegmentHeader { segment: 7, class: Class::Chunks, shard: ShardId(3), generation: 12 };
        let bytes = header.encode(&SUMS, LAYOUT);
        assert_eq!(SegmentHeader::decode(&bytes, &SUMS, LAYOUT, 7), Some(header));
        assert_eq!(SegmentHeader::decode(&bytes, &SUMS, LAYOUT, 8), None);
        for at in 0..SEGMENT_HEADER_LEN {
            for copy in 0..2 {
                let mut bad = bytes.clone();
                bad[copy * DISK_ALIGN + at] ^= 0x10;
                assert_eq!(SegmentHeader::decode(&bad, &SUMS, LAYOUT, 7), Some(header));
                let copies = SegmentHeader::copies(&bad, &SUMS, LAYOUT, 7);
                assert_eq!((copies[copy], copies[1 - copy]), (None, Some(header)));
                bad[(1 - copy) * DISK_ALIGN + at] ^= 0x10;
                assert_eq!(SegmentHeader::decode(&bad, &SUMS, LAYOUT, 7), None);
            }
        }
        let later = SegmentHeader { generation: 13, class: Class::Log, ..header }.encode(&SUMS, LAYOUT);
        let torn = [&later[..DISK_ALIGN], &bytes[DISK_ALIGN..]].concat();
        assert_eq!(SegmentHeader::decode(&torn, &SUMS, LAYOUT, 7).map(|header| header.generation), Some(13));
    }

    /// Goal: a footer comes back whole or not at all. Method: one with all kinds of entries; each byte changed in turn.
    #[test]
    fn a_footer_comes_back_whole_or_not_at_all() {
        let key = Key { kind: Kind::Cas, hash: Hash([1; 32]), size: 1000 };
        let location = |offset| LAYOUT.position(7, offset) / 64;
        let words = [
            Word::small(location(HEAD_LEN), &key, 500).expect("fits"),
            Word::large(location(HEAD_LEN + 640), &key),
            Word::tomb(location(HEAD_LEN + 1280)),
            Word::large(location(HEAD_LEN + 1344), &key),
        ];
        let run = |first| Run { first, count: 2 };
        let footer = Footer {
            entries: words.iter().zip(5..).map(|(word, tag)| FooterEntry { tag, word: word.bits() }).collect(),
            large: vec![
                LargeEntry { record_len: 100, runs: vec![run(3), run(9)] },
                LargeEntry { record_len: 104, runs: vec![] },
            ],
        };
        let bytes = footer.encode(&SUMS, LAYOUT, 7, 12, HEAD_LEN + 4096, true);
        assert_eq!(bytes.len(), footer.encoded_len());
        let decode = |bytes: &[u8], segment, generation| {
            let trailer = Trailer::decode(bytes, &SUMS, LAYOUT, segment, generation)?;
            let body = bytes.get(bytes.len() - TRAILER_LEN - trailer.body_len as usize..bytes.len() - TRAILER_LEN)?;
            Footer::decode(body, &trailer, &SUMS, LAYOUT, segment, generation)
                .map(|footer| (footer, trailer.upto, trailer.sealed))
        };
        assert_eq!(decode(&bytes, 7, 12), Some((footer, HEAD_LEN + 4096, true)));
        assert_eq!(decode(&bytes, 7, 13), None);
        assert_eq!(decode(&bytes, 8, 12), None);
        let is_damaged = |bytes: &[u8], generation| Trailer::is_damaged(bytes, &SUMS, LAYOUT, 7, generation);
        // Whole, and whole but of a former lease.
        assert!(!is_damaged(&bytes, 12) && !is_damaged(&bytes, 13) && !is_damaged(&[0; 4096], 12));
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x40;
            assert_eq!(decode(&bad, 7, 12), None, "byte {at}");
            assert_eq!(is_damaged(&bad, 12), at >= bytes.len() - TRAILER_LEN, "byte {at}");
        }
    }
}
