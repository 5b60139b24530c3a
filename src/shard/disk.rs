//! One core's disk: the log segments and chunk segments of the shards it owns, and their indexes.

use std::path::PathBuf;

use bytes::Bytes;

use super::geometry::Volume;
use super::pool::PoolPort;
use crate::pure::digest::Hash;

/// Which key space a record belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Cas,
    Action,
}

/// What a record is found by. A CAS blob is named by hash and size. An action is found by its hash alone: `size` is
/// stored with it and comes back as `Small::key_size`, for the caller to compare.
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

/// When `append` and `commit` return.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ack {
    /// Verified, indexed, in the write buffer; on disk within milliseconds.
    #[default]
    Buffered,
    /// Written: survives `kill -9`.
    Flushed,
    /// Written and synced: survives a power cut.
    Durable,
}

/// What the operator decides about the disk cache.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// The cache directory (`--dir`).
    pub dir: PathBuf,
    /// Most bytes that the files in `dir` may take together (`--max_size`).
    pub max_size_bytes: u64,
    pub ack: Ack,
}

/// What a lookup found. All bytes of a small one have been checked; those of a large one are checked frame by frame.
pub enum Found {
    Small(Small),
    Large(LargeBlob),
}

/// A small record's payload.
#[derive(Debug, Clone)]
pub struct Small {
    pub codec: Codec,
    /// Raw bytes.
    pub raw_len: u64,
    /// As stored.
    pub data: Bytes,
    /// Where it stood: names this version.
    pub version: u64,
    /// The key's size as it was stored: for actions, the size of the action's digest.
    pub key_size: u64,
}

/// What went wrong on the disk. A miss is not an error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The bytes read are not those that were written. The record has been dropped: a miss from now on.
    #[error("record damaged")]
    Damaged,
    #[error("no segment can be freed for {bytes} bytes")]
    NoSpace { bytes: u64 },
    #[error("{0}")]
    Io(String),
    #[error("the disk is shutting down")]
    Stopping,
}

/// What this core's shards hold and have done. Counters only grow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Entries in the index, actions included.
    pub entries: u64,
    pub large_blobs: u64,
    pub index_bytes: u64,
    /// Bytes of the segments that this core's shards have leased.
    pub leased_bytes: u64,
    pub appended_records: u64,
    pub appended_bytes: u64,
    /// Records copied forward by reclaim, and their bytes.
    pub reinserted_records: u64,
    pub reinserted_bytes: u64,
    pub evicted_entries: u64,
    pub damaged_records: u64,
    pub read_errors: u64,
    pub write_errors: u64,
    pub flushes: u64,
    pub syncs: u64,
    /// Shards of this core that are still being recovered.
    pub recovering_shards: u64,
}

/// One core's disk. Core-local; clones share it.
#[derive(Clone)]
pub struct Disk(());

impl Disk {
    /// Opens the data files on this core and starts recovery of its shards in the background.
    pub async fn open(volume: Volume, core: usize, cores: usize, port: PoolPort) -> Result<Self, DiskError> {
        let _ = (volume, core, cores, port);
        todo!()
    }

    /// Waits until the shard of `hash` has been recovered. Cheap when it has.
    pub async fn ready(&self, _hash: &Hash) {}

    /// Whether `key` is present. A hit counts as use. Call `ready` first.
    pub fn contains(&self, _key: &Key) -> bool {
        todo!()
    }

    /// Looks `key` up; a hit counts as use.
    pub async fn read(&self, _key: &Key) -> Result<Option<Found>, DiskError> {
        todo!()
    }

    /// Stores one record, replacing an older one of the same key, and returns its version. `stored` is the payload at
    /// rest, in pieces: of a CAS blob at most `SMALL_BLOB_LEN_MAX` bytes, of an action `ACTION_RESULT_LEN_MAX`.
    pub async fn append(&self, _key: &Key, _codec: Codec, _raw_len: u64, _stored: &[&[u8]]) -> Result<u64, DiskError> {
        todo!()
    }

    /// Starts a large blob. Nothing of it is visible before `commit`; dropping the writer gives the space back.
    pub async fn begin_large(&self, _key: &Key) -> Result<LargeWriter, DiskError> {
        todo!()
    }

    /// Drops `key`, if it is still `version` (any, when `None`). True when something was dropped.
    pub async fn remove(&self, _key: &Key, _version: Option<u64>) -> Result<bool, DiskError> {
        todo!()
    }

    /// The caller found that the bytes of `key` make no sense (zstd refuses them): dropped and counted.
    pub fn damaged(&self, _key: &Key) {}

    pub fn stats(&self) -> DiskStats {
        DiskStats::default()
    }

    /// The largest raw size that is accepted for a blob, in bytes: half of `--max_size`.
    pub fn max_blob_len(&self) -> u64 {
        0
    }

    /// Refuses new work, flushes, writes checkpoint footers and syncs.
    pub async fn shutdown(&self) {}
}

/// A large blob being written: frame by frame, each of `FRAME_LEN` raw bytes but the last.
pub struct LargeWriter(());

impl LargeWriter {
    /// Adds the next frame as it is to stand at rest. Waits for the disk when it is behind.
    pub async fn push(&mut self, _codec: Codec, _stored: &[u8]) -> Result<(), DiskError> {
        todo!()
    }

    /// All frames are there and the content has been verified: publishes the blob. Returns its version.
    pub async fn commit(self) -> Result<u64, DiskError> {
        todo!()
    }
}

/// A frame of a large blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameInfo {
    pub codec: Codec,
    /// Bytes of content: `FRAME_LEN`, but for the last.
    pub raw_len: usize,
    /// Bytes at rest.
    pub stored_len: usize,
}

/// A large blob open for reading; its chunks are not reused while this lives.
pub struct LargeBlob {}

impl LargeBlob {
    pub fn frame_count(&self) -> usize {
        0
    }

    pub fn frame(&self, _index: usize) -> FrameInfo {
        todo!()
    }

    /// Reads and checks one frame.
    pub async fn read_frame(&self, _index: usize) -> Result<(Codec, Bytes), DiskError> {
        todo!()
    }

    /// Reads and checks frames from `first` on with as few disk reads as possible: at least one and at most `max`,
    /// and of those as many as stand in 1 MiB at rest.
    pub async fn read_frames(&self, _first: usize, _max: usize) -> Result<Vec<(Codec, Bytes)>, DiskError> {
        todo!()
    }
}
