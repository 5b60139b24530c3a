//! The shard machinery as a store, over a disk in memory.

mod blobs;
mod cores;
mod gate;
mod real_disk;
mod uploads;

use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::codec::{Codecs, StorageMode, wrap_raw};
use super::fake_disk::FakeDisk;
use super::standing::StandingPurges;
use super::worker::{Worker, WorkerConfig};
use super::write_gate::WriteLimits;
use crate::budget::Purse;
use crate::limits::FRAME_LEN;
use crate::pure::digest::{Digest, Hash};
pub(super) use crate::pure::random::SplitMix64;
use crate::store::{Blob, Encoding, Get, StoreError};

/// What tests make of random words.
impl SplitMix64 {
    /// A seed from the system, printed: a failure shows it.
    fn seeded() -> Self {
        let seed = crate::rt::random_u64();
        println!("seed {seed}");
        Self(seed)
    }

    /// A length of interest: around the borders, or anywhere below four frames.
    fn len(&mut self) -> usize {
        let frame = FRAME_LEN as u64;
        let len = match self.below(8) {
            0 => 1 + self.below(20),
            1 => 500 + self.below(30),
            2 => frame - 1 + self.below(3),
            3 => 2 * frame - 1 + self.below(3),
            4 => 1 + self.below(4 * frame),
            _ => 1 + self.below(20_000),
        };
        len as usize
    }

    /// Bytes that compress well, not at all, or in parts.
    fn content(&mut self, len: usize) -> Bytes {
        let kind = self.below(3);
        let mut content = Vec::with_capacity(len + 8);
        while content.len() < len {
            let word = self.word();
            let is_random = kind == 0 || (kind == 2 && (content.len() / FRAME_LEN).is_multiple_of(2));
            content.extend_from_slice(&if is_random { word } else { word & 0x0f }.to_le_bytes());
        }
        content.truncate(len);
        content.into()
    }

    /// Bytes that do not compress.
    fn noise(&mut self, len: usize) -> Bytes {
        let words = std::iter::repeat_with(|| self.word().to_le_bytes());
        words.take(len.div_ceil(8)).flatten().take(len).collect()
    }

    /// `data` cut at random places, `pieces` at most.
    fn cut(&mut self, data: &Bytes, pieces: u64) -> Vec<Bytes> {
        let mut rest = data.clone();
        let mut cut = Vec::new();
        for _ in 1..pieces {
            let at = self.below(rest.len() as u64 + 1) as usize;
            cut.push(rest.split_to(at));
        }
        cut.push(rest);
        cut
    }

    /// `data` as a zstd stream of several frames of both kinds.
    fn zstd(&mut self, data: &Bytes) -> Bytes {
        let codecs = codecs();
        let mut stream = Vec::new();
        for piece in self.cut(data, 3) {
            stream.extend(if self.below(2) == 0 { wrap_raw(&piece) } else { codecs.frame_of(&piece) });
            if self.below(4) == 0 {
                // A skippable frame (RFC 8878, 3.1.2) of 5 bytes.
                stream.extend_from_slice(&[0x50, 0x2a, 0x4d, 0x18, 5, 0, 0, 0, 1, 2, 3, 4, 5]);
            }
        }
        stream.into()
    }
}

fn codecs() -> Codecs {
    Codecs::new(StorageMode::Zstd, Purse::alone(1 << 40))
}

fn digest_of(data: &[u8]) -> Digest {
    Digest { hash: Hash(Sha256::digest(data).into()), size: data.len() as u64 }
}

fn worker_config(mode: StorageMode, ram_bytes: usize) -> WorkerConfig {
    let writes = WriteLimits::new(10_000, Duration::from_millis(250));
    WorkerConfig {
        mode,
        ram_bytes,
        purse: Purse::alone(1 << 40),
        parked_bytes: 16 << 20,
        core: 0,
        cores: 1,
        writes,
        standing: StandingPurges::default(),
    }
}

fn worker(mode: StorageMode) -> (Worker<FakeDisk>, FakeDisk) {
    let disk = FakeDisk::default();
    let config = worker_config(mode, 1 << 20);
    (Worker::new(disk.clone(), config), disk)
}

/// All of a blob as it came.
async fn collect(blob: Blob) -> Result<(Encoding, Vec<u8>), StoreError> {
    match blob {
        Blob::Whole { data, encoding } => Ok((encoding, data.to_vec())),
        Blob::Stream(mut stream) => {
            let mut all = Vec::new();
            while let Some(piece) = stream.pieces.recv().await {
                all.extend_from_slice(&piece?);
            }
            Ok((stream.encoding, all))
        }
    }
}

/// The asked bytes, raw.
async fn read(worker: &Worker<FakeDisk>, get: Get) -> Option<(Encoding, Vec<u8>)> {
    let (encoding, body) = collect(worker.get(get).await.expect("no error")?).await.expect("no error on the way");
    let raw_len = (get.digest.size - get.offset).min(get.limit.unwrap_or(u64::MAX)) as usize;
    let raw = match encoding {
        Encoding::Identity => body,
        Encoding::Zstd => codecs().decode(&body, raw_len).expect("a valid stream"),
    };
    Some((encoding, raw))
}
