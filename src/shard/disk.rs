//! One core's disk: the log segments and chunk segments of the shards it owns, and their indexes.

use bytes::Bytes;

use crate::pure::digest::Hash;

/// Which key space a record belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Cas,
    Action,
}

/// What a record is found by. `size` is the digest's size; for actions it is part of the record, not of the key.
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

/// What a lookup found. All bytes have been checked.
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
}

/// A large blob open for reading; its chunks are not reused while this lives.
pub struct LargeBlob {}

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
