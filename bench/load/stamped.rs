//! Blobs that cost the client next to no memory, so that thousands of large uploads can be in flight: all share one body,
//! and each has random bytes of its own at the start of every chunk. They are made again whenever they are needed.

use std::cell::Cell;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use sha2::Digest as _;

use crate::client::Message;
use crate::payload::{Maker, SplitMix64, compressed};
use crate::wire::{self, Digest};

/// Bytes of a chunk that no other chunk of any blob has; compressed, they fit a raw block with a one-byte length.
const STAMP_LEN: usize = 32;

/// What all stamped blobs of a run share.
pub struct Family {
    seed: u64,
    chunk_len: usize,
    body: Bytes,
    /// One zstd frame for each whole chunk of `body` without the room for the stamp, when the run compresses.
    packed: Option<Vec<Bytes>>,
}

/// One blob of a family.
#[derive(Clone, Copy)]
pub struct Stamped {
    pub serial: u64,
    pub digest: Digest,
}

impl Family {
    /// For blobs of at most `size_max` bytes, sent in chunks of `chunk_len`.
    pub fn new(maker: &Maker, size_max: u64, chunk_len: usize) -> Self {
        let chunk_len = chunk_len.max(STAMP_LEN);
        let body = maker.data(u64::MAX, size_max);
        let pack = |chunk: &[u8]| compressed(&chunk[STAMP_LEN..]);
        let packed = maker.zstd.then(|| body.chunks_exact(chunk_len).map(pack).collect());
        Self { seed: maker.seed, chunk_len, body, packed }
    }

    /// The blob `serial`; to find its digest costs a hash over all of it.
    pub fn blob(&self, serial: u64, size: u64) -> Stamped {
        let mut hash = sha2::Sha256::new();
        for (stamp, rest) in self.chunks(serial, size) {
            hash.update(stamp);
            hash.update(rest);
        }
        Stamped { serial, digest: Digest::from_hash(&hash.finalize().into(), size) }
    }

    /// The WriteRequests of `blob`, one for each chunk. `sent` counts their bytes of data.
    pub fn messages(&self, blob: &Stamped, name: &str, sent: &Cell<u64>) -> impl Iterator<Item = Message> {
        let count = blob.digest.size.div_ceil(self.chunk_len as u64).max(1) as usize;
        let mut chunks = self.chunks(blob.serial, blob.digest.size);
        (0..count).map(move |i| {
            // An empty blob has no chunk, but one message.
            let (stamp, rest) = chunks.next().unwrap_or_default();
            let mut inline = BytesMut::with_capacity(name.len() + 128);
            let (head_len, rest) = match &self.packed {
                None => (stamp.len(), rest),
                Some(_) if stamp.is_empty() => (0, compressed(&[])),
                Some(packed) => {
                    let rest =
                        if stamp.len() + rest.len() == self.chunk_len { packed[i].clone() } else { compressed(&rest) };
                    (RAW_FRAME_HEAD_LEN + stamp.len(), rest)
                }
            };
            let data_len = head_len + rest.len();
            wire::put_write_head(&mut inline, (i == 0).then_some(name), sent.get(), i + 1 == count, data_len);
            if head_len > stamp.len() {
                put_raw_frame_head(&mut inline, stamp.len());
            }
            inline.put_slice(&stamp);
            sent.set(sent.get() + data_len as u64);
            inline.freeze().chain(rest)
        })
    }

    /// Whether `data` stands at `offset` in `blob`.
    pub fn matches(&self, blob: &Stamped, mut offset: u64, mut data: &[u8]) -> bool {
        while !data.is_empty() {
            let index = offset / self.chunk_len as u64;
            let Some((stamp, rest)) = self.chunk(blob.serial, blob.digest.size, index) else { return false };
            let within = (offset % self.chunk_len as u64) as usize;
            let len = data.len().min(stamp.len() + rest.len() - within);
            let (head, tail) = data[..len].split_at(stamp.len().saturating_sub(within).min(len));
            let in_stamp = stamp.get(within..within + head.len()).unwrap_or_default();
            let in_rest = &rest[(within + head.len()).saturating_sub(stamp.len())..][..tail.len()];
            if head != in_stamp || tail != in_rest {
                return false;
            }
            offset += len as u64;
            data = &data[len..];
        }
        true
    }

    fn chunks(&self, serial: u64, size: u64) -> impl Iterator<Item = (Vec<u8>, Bytes)> {
        (0..).map_while(move |index| self.chunk(serial, size, index))
    }

    /// The stamp and what follows it in one chunk; `None` beyond the end.
    fn chunk(&self, serial: u64, size: u64, index: u64) -> Option<(Vec<u8>, Bytes)> {
        let start = usize::try_from(index).ok()?.checked_mul(self.chunk_len)?;
        let end = (start + self.chunk_len).min(usize::try_from(size).ok()?);
        if start >= end {
            return None;
        }
        let mut random = SplitMix64::new(self.seed.rotate_left(17) ^ index, serial);
        let mut stamp = vec![0; STAMP_LEN];
        stamp.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next_u64().to_le_bytes()));
        stamp.truncate(end - start);
        let rest = self.body.slice(start + stamp.len()..end);
        Some((stamp, rest))
    }
}

/// Bytes of a zstd frame header with a one-byte content size, and of the header of a raw block.
const RAW_FRAME_HEAD_LEN: usize = 9;

/// The head of a zstd frame that holds `len` bytes as they are, up to 255: single segment, no checksum, one last raw
/// block. Source: RFC 8878, 3.1.1.
fn put_raw_frame_head(out: &mut BytesMut, len: usize) {
    let size = u8::try_from(len).expect("a stamp is short");
    out.put_slice(&[0x28, 0xb5, 0x2f, 0xfd, 0x20, size]);
    let block = u32::from(size) << 3 | 1;
    out.put_slice(&block.to_le_bytes()[..3]);
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::wire::{Field, for_each_field};

    /// The data of all messages of a blob; checks that each is framed and the last, and only the last, finishes.
    fn body(family: &Family, blob: &Stamped) -> Vec<u8> {
        let (mut body, sent) = (Vec::new(), Cell::new(0));
        let mut messages = family.messages(blob, "uploads/u/blobs/h/1", &sent).peekable();
        while let Some(mut message) = messages.next() {
            let message = message.copy_to_bytes(message.remaining());
            assert_eq!(message[1..5], ((message.len() - 5) as u32).to_be_bytes());
            let (mut offset, mut is_last) = (0, false);
            let before = body.len() as u64;
            for_each_field(&message[5..], |number, field| {
                match (number, field) {
                    (2, Field::Varint(value)) => offset = value,
                    (3, Field::Varint(1)) => is_last = true,
                    (10, Field::Bytes(data)) => body.extend_from_slice(data),
                    _ => {}
                }
                Ok(())
            })
            .expect("well formed");
            assert_eq!((offset, is_last), (before, messages.peek().is_none()));
        }
        body
    }

    /// Goal: what is sent has the digest that was promised, raw and compressed, and no chunk comes twice. Method: sizes
    /// around the edges of a chunk.
    #[test]
    fn messages_carry_the_blob() {
        for zstd in [false, true] {
            let maker = Maker { seed: 3, compressibility: 0.5, zstd };
            let family = Family::new(&maker, 5000, 1000);
            let mut seen = HashSet::new();
            for (serial, size) in (0..).zip([0, 1, 31, 32, 33, 999, 1000, 1001, 4000, 5000]) {
                let blob = family.blob(serial, size);
                let mut data = body(&family, &blob);
                if zstd {
                    let mut raw = vec![0; size as usize];
                    assert_eq!(zstd_safe::decompress(&mut raw[..], &data), Ok(size as usize), "{size}");
                    data = raw;
                }
                assert_eq!(Digest::of(&data).hex, blob.digest.hex);
                assert!(data.chunks(1000).filter(|chunk| chunk.len() > 8).all(|chunk| seen.insert(chunk.to_vec())));
            }
        }
    }

    /// Goal: a comparison finds every wrong byte, and none in the right data. Method: all cuts, all single changes.
    #[test]
    fn matches_sees_each_byte() {
        let family = Family::new(&Maker { seed: 3, compressibility: 0.5, zstd: false }, 150, 50);
        let blob = family.blob(9, 120);
        let data = body(&family, &blob);
        for start in 0..=data.len() {
            for end in start..=data.len() {
                assert!(family.matches(&blob, start as u64, &data[start..end]), "{start}..{end}");
            }
        }
        for at in 0..data.len() {
            let mut bad = data.clone();
            bad[at] ^= 0x40;
            assert!(!family.matches(&blob, 0, &bad), "{at}");
        }
        assert!(!family.matches(&blob, 1, &data), "one byte beyond the end");
        assert!(!family.matches(&family.blob(10, 120), 0, &data));
    }
}
