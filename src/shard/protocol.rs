//! What crosses from a connection's core to the core that owns the digest: owned messages, each with its reply.
//!
//! Invariant: depth one. Whoever handles one of these sends no request to another core, so there is no cycle to wait in.

use std::time::Instant;

use bytes::Bytes;

use super::upload::UploadHandle;
use crate::pure::admission;
use crate::pure::digest::{Digest, Hash};
use crate::pure::purge::InstanceTag;
use crate::pure::scope::Scope;
use crate::rt::channel::ReplyTo;
use crate::store::{
    ActionEntry, ActionKey, Blob, Get, Opened, Purge, Purged, Purpose, Put, PutOutcome, StoreError, UploadEnd,
    UploadKey, UploadStatus, Wanted,
};

/// A request, and whose blobs it is about.
pub struct Asked {
    pub scope: Scope,
    pub request: Request,
}

/// A request to the owner of what it names.
pub enum Request {
    FindMissing {
        digests: Vec<Digest>,
        /// See `Router::until`.
        until: Option<Instant>,
        reply: ReplyTo<Vec<bool>>,
    },
    /// See `Store::is_absent`.
    IsAbsent {
        digest: Digest,
        reply: ReplyTo<bool>,
    },
    SizeOf {
        hash: Hash,
        purpose: Purpose,
        reply: ReplyTo<Result<Option<u64>, StoreError>>,
    },
    Get {
        get: Get,
        /// Without asking a backend.
        only_here: bool,
        reply: ReplyTo<Result<Option<Blob>, StoreError>>,
    },
    Put {
        put: Put,
        reply: ReplyTo<Result<PutOutcome, StoreError>>,
    },
    OpenUpload {
        key: UploadKey,
        write_offset: u64,
        reply: ReplyTo<Result<Opened<UploadHandle>, StoreError>>,
    },
    UploadStatus {
        key: UploadKey,
        reply: ReplyTo<Result<UploadStatus, StoreError>>,
    },
    /// Answered when it comes, or does not.
    Fetch {
        wanted: Wanted,
        until: Option<Instant>,
        reply: ReplyTo<bool>,
    },
    ActionGet {
        key: ActionKey,
        only_here: bool,
        reply: ReplyTo<Result<Option<ActionEntry>, StoreError>>,
    },
    ActionPut {
        key: ActionKey,
        data: Bytes,
        instance: InstanceTag,
        reply: ReplyTo<Result<(), StoreError>>,
    },
    ActionDrop {
        key: ActionKey,
        version: u64,
        reply: ReplyTo<Result<(), StoreError>>,
    },
    /// Answered when it is done, which takes as long as it takes.
    Purge {
        purge: Purge,
        reply: ReplyTo<Result<Purged, StoreError>>,
    },
    /// Write slots change hands. No answer, so that it is no request in the sense of the invariant.
    Slots(admission::Message),
}

/// What follows on an opened upload's own channel.
pub enum UploadMessage {
    /// Body bytes; answered by one `UploadAck`.
    Write(Vec<Bytes>),
    /// The last body bytes.
    Finish { data: Vec<Bytes>, reply: ReplyTo<Result<PutOutcome, StoreError>> },
    /// The last body bytes for now; answered by what is committed once they are parked.
    Suspend { data: Vec<Bytes>, reply: ReplyTo<Result<u64, UploadEnd>> },
}

/// The owner has consumed a write, or the upload has ended.
pub type UploadAck = Result<(), UploadEnd>;

const _: () = assert!(size_of::<Request>() <= 160, "requests are moved by value");
