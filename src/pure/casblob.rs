//! The object that bazel-remote keeps of a CAS blob in its `zstd` storage mode: a header, which is a zstd skippable
//! frame, and the content in independent chunks. So a compressed casblob as a whole is a valid zstd stream.
//!
//! | offset | bytes | field (little-endian) |
//! |---|---|---|
//! | 0 | 4 | magic of a skippable frame, 0x184D2A50 |
//! | 4 | 4 | bytes of the header after this field: 21 + 8 x entries |
//! | 8 | 8 | raw size of the blob, above 0 |
//! | 16 | 1 | 0 raw content, 1 zstd |
//! | 17 | 4 | raw bytes in a chunk: 1 MiB from bazel-remote, which takes other values; ours is `FRAME_LEN` |
//! | 21 | 8 | entries: chunks + 1 |
//! | 29 | 8 x entries | offset of each chunk in the object, then the object's length |
//!
//! Source: bazel-remote `cache/disk/casblob/casblob.go`.

use super::encoding::Encoding;

/// Bytes before the table.
pub const FIXED_LEN: usize = 29;
const MAGIC: u32 = 0x184D_2A50;
/// Chunks of the largest blob that fits the header's own length field.
const ENTRIES_MAX: u64 = (u32::MAX as u64 - 21) / 8;

/// What a header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub raw_size: u64,
    pub encoding: Encoding,
    /// Entries of the table.
    entries: u64,
}

/// Why an object is no casblob of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CasblobError {
    #[error("the object does not start with a casblob header")]
    NoHeader,
    #[error("the casblob header contradicts itself")]
    Inconsistent,
    #[error("compression type {0} of the casblob is unknown")]
    Compression(u8),
}

impl Header {
    /// Reads the part before the table.
    pub fn parse(fixed: &[u8; FIXED_LEN]) -> Result<Self, CasblobError> {
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| fixed[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| fixed[at + i]));
        if u32_at(0) != MAGIC {
            return Err(CasblobError::NoHeader);
        }
        let (raw_size, entries) = (u64_at(8), u64_at(21));
        if !(1..=i64::MAX as u64).contains(&raw_size) || !(2..=ENTRIES_MAX).contains(&entries) {
            return Err(CasblobError::Inconsistent);
        }
        if u64::from(u32_at(4)) != 21 + 8 * entries {
            return Err(CasblobError::Inconsistent);
        }
        // Why not more entries: a header must not say that for long there is no content.
        let chunk_len = u64::from(u32_at(17));
        if chunk_len == 0 || entries - 1 > raw_size.div_ceil(chunk_len) {
            return Err(CasblobError::Inconsistent);
        }
        let encoding = match fixed[16] {
            0 => Encoding::Identity,
            1 => Encoding::Zstd,
            other => return Err(CasblobError::Compression(other)),
        };
        Ok(Self { raw_size, encoding, entries })
    }

    /// Bytes that the object has at most, however little its content can be compressed. Source: a frame of zstd has at most
    /// 18 bytes besides its blocks, and each block of up to 128 KiB 3, so that 1 KiB for each chunk is plenty.
    pub fn object_len_max(&self) -> u64 {
        let content = self.raw_size.saturating_add(self.raw_size / 64);
        content.saturating_add(self.entries * (8 + 1024)).saturating_add(FIXED_LEN as u64)
    }

    /// Bytes of the table, which follows.
    pub fn table_len(&self) -> u64 {
        8 * self.entries
    }
}

/// The header of a blob that stands in zstd frames of `chunk_len` raw bytes each (the last may be shorter), whose stored
/// lengths are given, and the length of the whole object. `None` when there are too many chunks.
pub fn encode(raw_size: u64, chunk_len: u32, stored: impl ExactSizeIterator<Item = u64>) -> Option<(Vec<u8>, u64)> {
    let entries = stored.len() as u64 + 1;
    debug_assert_eq!(stored.len() as u64, raw_size.div_ceil(u64::from(chunk_len)));
    if entries > ENTRIES_MAX {
        return None;
    }
    let header_len = FIXED_LEN as u64 + 8 * entries;
    let mut out = Vec::with_capacity(header_len as usize);
    out.extend_from_slice(&MAGIC.to_le_bytes());
    out.extend_from_slice(&(header_len as u32 - 8).to_le_bytes());
    out.extend_from_slice(&raw_size.to_le_bytes());
    out.push(1);
    out.extend_from_slice(&chunk_len.to_le_bytes());
    out.extend_from_slice(&entries.to_le_bytes());
    let mut offset = header_len;
    out.extend_from_slice(&offset.to_le_bytes());
    for len in stored {
        offset += len;
        out.extend_from_slice(&offset.to_le_bytes());
    }
    Some((out, offset))
}

/// What comes after the header of an object whose bytes arrive in pieces of any size.
#[derive(Debug, Default)]
pub struct Unwrap {
    fixed: Vec<u8>,
    /// Known once the fixed part is here.
    header: Option<Header>,
    /// Bytes of the table still to be passed over.
    skip: u64,
}

impl Unwrap {
    /// The content's encoding, once the header is here.
    pub fn header(&self) -> Option<Header> {
        self.header
    }

    /// How many bytes at the front of `data` belong to the header. Fewer than all of `data` only when the header is
    /// complete.
    pub fn header_bytes(&mut self, data: &[u8]) -> Result<usize, CasblobError> {
        let mut taken = 0;
        if self.header.is_none() {
            taken = data.len().min(FIXED_LEN - self.fixed.len());
            self.fixed.extend_from_slice(&data[..taken]);
            let Ok(fixed) = <&[u8; FIXED_LEN]>::try_from(&self.fixed[..]) else { return Ok(taken) };
            let header = Header::parse(fixed)?;
            self.skip = header.table_len();
            self.header = Some(header);
        }
        let skipped = self.skip.min((data.len() - taken) as u64);
        self.skip -= skipped;
        Ok(taken + skipped as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::SplitMix64;
    use super::*;

    /// A header as bazel-remote writes it for a blob of 3 bytes whose one chunk has 16: written out by hand.
    const SMALL: [u8; 45] = [
        0x50, 0x2a, 0x4d, 0x18, 37, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0x10, 0, 2, 0, 0, 0, 0, 0, 0, 0, 45, 0,
        0, 0, 0, 0, 0, 0, 61, 0, 0, 0, 0, 0, 0, 0,
    ];

    /// Goal: the layout is the documented one. Method: a header written by hand, both ways.
    #[test]
    fn layout() {
        let (header, len) = encode(3, 1 << 20, [16].into_iter()).expect("one chunk");
        assert_eq!((header.as_slice(), len), (&SMALL[..], 61));
        let parsed = Header::parse(SMALL[..FIXED_LEN].try_into().expect("29 bytes")).expect("a header");
        assert_eq!((parsed.raw_size, parsed.encoding, parsed.table_len()), (3, Encoding::Zstd, 16));
    }

    /// Goal: what contradicts itself is refused. Method: one broken field at a time.
    #[test]
    fn broken_headers() {
        let broken = |at: usize, value: u8| {
            let mut bytes: [u8; FIXED_LEN] = SMALL[..FIXED_LEN].try_into().expect("29 bytes");
            bytes[at] = value;
            Header::parse(&bytes)
        };
        assert_eq!(broken(0, 0), Err(CasblobError::NoHeader));
        assert_eq!(broken(4, 36), Err(CasblobError::Inconsistent));
        assert_eq!(broken(8, 0), Err(CasblobError::Inconsistent));
        assert_eq!(broken(15, 0x80), Err(CasblobError::Inconsistent));
        assert_eq!(broken(16, 2), Err(CasblobError::Compression(2)));
        assert_eq!(broken(21, 1), Err(CasblobError::Inconsistent));
        assert_eq!(broken(28, 0x7f), Err(CasblobError::Inconsistent));
        // Chunks of no bytes, and more chunks than the content has.
        assert_eq!(broken(19, 0), Err(CasblobError::Inconsistent));
        let (mut longer, _) = encode(5, 2, [7, 7, 7].into_iter()).expect("few chunks");
        let fixed = |header: &[u8]| Header::parse(header[..FIXED_LEN].try_into().expect("29 bytes"));
        assert_eq!(fixed(&longer).map(|header| header.object_len_max() >= 29 + 32 + 21), Ok(true));
        longer[8] = 4;
        assert_eq!(fixed(&longer), Err(CasblobError::Inconsistent));
        assert_eq!(broken(16, 0).map(|header| header.encoding), Ok(Encoding::Identity));
    }

    /// Goal: a header is cut off exactly, however the bytes come. Method: seeded cuts of objects of some chunks.
    #[test]
    fn unwraps_pieces_of_any_size() {
        for seed in 0..500 {
            let mut random = SplitMix64(seed);
            let chunks = 1 + random.below(20);
            let lens: Vec<u64> = (0..chunks).map(|_| 1 + random.below(40)).collect();
            let (mut object, len) = encode(chunks * 1000, 1000, lens.iter().copied()).expect("few chunks");
            let header_len = object.len();
            object.resize(len as usize, 0xee);
            let (mut unwrap, mut rest, mut content) = (Unwrap::default(), &object[..], 0);
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rest.len().min(1 + random.below(50) as usize));
                let header = unwrap.header_bytes(piece).expect("a header");
                assert!(header == piece.len() || unwrap.header().is_some());
                assert!(piece[header..].iter().all(|byte| *byte == 0xee), "seed {seed}");
                content += piece.len() - header;
                rest = after;
            }
            assert_eq!(content, object.len() - header_len, "seed {seed}");
            assert_eq!(unwrap.header().map(|header| header.raw_size), Some(chunks * 1000));
        }
    }
}
