//! The store as services see it: one trait, and small decorators over it.

pub mod complete;
pub mod empty;
#[cfg(test)]
pub mod fake;
pub mod measured;
pub mod walk;

use std::cell::Cell;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::limits;
use crate::pure::digest::{Digest, Hash};
pub use crate::pure::encoding::Encoding;
use crate::pure::purge::{InstanceTag, Which};
use crate::pure::scope::Scope;
use crate::rt;
use crate::rt::channel::Receiver;
use crate::rt::join::map_bounded;
use crate::rt::time::Either;

/// What a reader can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accept {
    /// Raw bytes only.
    Identity,
    /// A zstd stream only; raw content is wrapped or compressed.
    Zstd,
    /// Whatever is cheapest: the form at rest.
    Any,
}

/// Which bytes of which blob.
#[derive(Debug, Clone, Copy)]
pub struct Get {
    pub digest: Digest,
    /// First raw byte wanted; at most the size (the service checks).
    pub offset: u64,
    /// Raw bytes wanted at most; `None` for all. Only with `Accept::Identity`.
    pub limit: Option<u64>,
    pub accept: Accept,
}

impl Get {
    /// All of a blob.
    pub fn whole(digest: Digest, accept: Accept) -> Self {
        Self { digest, offset: 0, limit: None, accept }
    }
}

/// A blob's bytes. Every byte has been checked against its checksum when it gets here.
pub enum Blob {
    /// All of what was asked for, at once.
    Whole { data: Bytes, encoding: Encoding },
    /// Piece by piece; dropping it ends the read.
    Stream(BlobStream),
}

impl Blob {
    /// How the bytes stand.
    pub fn encoding(&self) -> Encoding {
        match self {
            Self::Whole { encoding, .. } | Self::Stream(BlobStream { encoding, .. }) => *encoding,
        }
    }

    /// Bytes that there will be; `None` when only the end will tell.
    pub fn encoded_len(&self) -> Option<u64> {
        match self {
            Self::Whole { data, .. } => Some(data.len() as u64),
            Self::Stream(stream) => stream.len,
        }
    }

    /// The next bytes; `None` at the end.
    pub async fn next_piece(&mut self) -> Result<Option<Bytes>, StoreError> {
        match self {
            Self::Whole { data, .. } => Ok(Some(std::mem::take(data)).filter(|data| !data.is_empty())),
            Self::Stream(stream) => stream.pieces.recv().await.transpose(),
        }
    }

    /// All of the bytes that are left, for blobs of a known, small size.
    pub async fn collect(mut self) -> Result<Vec<Bytes>, StoreError> {
        let mut pieces = Vec::new();
        while let Some(piece) = self.next_piece().await? {
            pieces.push(piece);
        }
        Ok(pieces)
    }
}

/// Pieces of at most `limits::FRAME_LEN` raw bytes each, in order.
pub struct BlobStream {
    pub encoding: Encoding,
    /// Bytes of all pieces together; `None` when only the end will tell.
    pub len: Option<u64>,
    pub pieces: Receiver<Result<Bytes, StoreError>>,
}

/// A whole blob to store, all of its body here: at most `limits::SMALL_BLOB_LEN_MAX` raw bytes declared, unless it is
/// `admitted`.
pub struct Put {
    pub digest: Digest,
    pub encoding: Encoding,
    /// The body as it came, in pieces.
    pub data: Vec<Bytes>,
    /// Needs no slot: it is part of an action's result, which is never refused, and its bytes are held already.
    pub admitted: bool,
}

/// How a put ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    Stored,
    AlreadyPresent,
}

/// The name of an upload session (REAPI: one UUID may be used for several blobs).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct UploadKey {
    pub instance: Box<str>,
    pub uuid: Box<str>,
    pub digest: Digest,
    pub encoding: Encoding,
}

impl UploadKey {
    /// A key that no client can name: its UUIDs have no slash. So nobody else takes such an upload over, nobody resumes it,
    /// and nothing of it is kept when it is cut off. `random` tells it from others of the same blob.
    pub fn unnamed(instance: &str, random: u64, digest: Digest, encoding: Encoding) -> Self {
        Self { instance: instance.into(), uuid: format!("/{random:016x}").into(), digest, encoding }
    }

    /// Whether `unnamed` made it.
    pub fn is_unnamed(&self) -> bool {
        self.uuid.starts_with('/')
    }
}

/// What `open_upload` found.
pub enum Opened<U> {
    AlreadyPresent,
    Ready(U),
}

/// Why an upload ends before its client finished it.
#[derive(Debug)]
pub enum UploadEnd {
    /// Somebody else stored the blob meanwhile: answer as for a present blob.
    AlreadyPresent,
    Failed(StoreError),
}

/// One running upload. Dropping it parks what has arrived, for the client to resume, if it can name it.
#[allow(async_fn_in_trait)] // Why: futures stay on their core; nobody asks for Send.
pub trait Upload {
    /// Hands over the next body bytes, in the upload's encoding. Returns when there is room for more. The caller may return
    /// window credit for all but `unconsumed` bytes; what is gathered for the next message is below
    /// `limits::UPLOAD_MESSAGE_LEN`.
    async fn write(&mut self, data: Vec<Bytes>) -> Result<(), UploadEnd>;
    /// Waits until the owner has consumed more of what was handed over. An error: it has ended the upload by itself, because
    /// somebody else has stored the blob, or has taken its place.
    async fn moved(&mut self) -> Result<(), UploadEnd>;
    /// Bytes on their way to the owner.
    fn unconsumed(&self) -> usize;
    /// The client set `finish_write`: verifies and publishes.
    async fn finish(self) -> Result<PutOutcome, StoreError>;
    /// The client stopped before the end: parks what has been handed over, and says how many raw bytes are committed,
    /// which is where it may go on.
    async fn suspend(self) -> Result<u64, UploadEnd>;
}

/// Where an upload stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UploadStatus {
    /// Raw bytes consumed so far.
    pub committed: u64,
    pub complete: bool,
}

/// An action's key in the cache. `size` is `None` where the protocol does not carry it (HTTP), and then matches any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ActionKey {
    pub hash: Hash,
    pub size: Option<u64>,
}

/// What may be fetched from a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    Blob(Digest),
    Action(ActionKey),
}

/// What a size is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Nothing more.
    Look,
    /// The blob is read next: a backend's is here or on its way when its size is known.
    Read,
}

/// Who has memory for an answer, and takes it back while the answer is sought elsewhere.
#[allow(async_fn_in_trait)] // Why: futures stay on their core; nobody asks for Send.
pub trait Memory<E> {
    /// Takes memory for so many bytes, after waiting for it, in place of what was taken before.
    async fn hold(&mut self, len: usize) -> Result<(), E>;
    /// Gives back what was taken.
    fn release(&mut self);
}

/// Waits for `work`, which may ask a backend, and then takes its time: after `BACKEND_HOLD_MS` with memory for the `kept`
/// bytes that cannot be given back, in place of `held` bytes, which are taken again when it is done.
pub async fn wait_holding<T, E>(
    memory: &mut impl Memory<E>,
    kept: usize,
    held: usize,
    work: impl Future<Output = T>,
) -> Result<T, E> {
    let mut work = Box::pin(work);
    // Why in a block: what is here needs no clock.
    let patience = async { rt::time::sleep(Duration::from_millis(limits::BACKEND_HOLD_MS)).await };
    if let Either::Left(done) = rt::time::race(&mut work, patience).await {
        return Ok(done);
    }
    memory.release();
    memory.hold(kept).await?;
    let done = work.await;
    memory.hold(held).await?;
    Ok(done)
}

/// Has a backend bring what is not here, and says for each whether it comes. Waits as `wait_holding` does, with memory for
/// `kept` bytes.
pub async fn bring<S: Store, E>(
    store: &S,
    digests: Vec<Digest>,
    memory: &mut impl Memory<E>,
    kept: usize,
    held: usize,
) -> Result<Vec<bool>, E> {
    wait_holding(memory, kept, held, fetch_all(store, digests)).await
}

/// Has a backend bring what is not here, and says for each whether it comes. When nothing has come for as long as one read may wait for
/// a backend, no more is asked for.
///
/// Why: each miss may take seconds, and there may be thousands in one call.
pub async fn fetch_all<S: Store>(store: &S, digests: Vec<Digest>) -> Vec<bool> {
    fetch_by_clock(store, digests, rt::time::now).await
}

async fn fetch_by_clock<S: Store>(store: &S, digests: Vec<Digest>, now: impl Fn() -> Instant) -> Vec<bool> {
    let came = Cell::new(now());
    let fetch = async |digest: Digest| {
        if now().saturating_duration_since(came.get()) >= Duration::from_millis(limits::BACKEND_HEAD_MS) {
            return false;
        }
        // What does not come is missed by whoever reads it.
        let comes = store.fetch(Wanted::Blob(digest)).await.unwrap_or(false);
        if comes {
            came.set(now());
        }
        comes
    };
    map_bounded(digests, limits::BATCH_CONCURRENCY, fetch).await
}

/// For who counts no memory.
pub struct Uncounted;

impl<E> Memory<E> for Uncounted {
    async fn hold(&mut self, _len: usize) -> Result<(), E> {
        Ok(())
    }

    fn release(&mut self) {}
}

/// A stored ActionResult, and which version of it this is.
#[derive(Debug, Clone)]
pub struct ActionEntry {
    /// The serialized ActionResult.
    pub data: Bytes,
    /// Names this version, for `action_drop`.
    pub version: u64,
}

/// What is to be purged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purge {
    Blob(Hash),
    /// By the hash that the action is kept under.
    Action(Hash),
    /// Whatever actions these are, in every scope.
    Actions(Which),
}

/// What a purge has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Purged {
    /// Records that were looked at.
    pub examined: u64,
    /// Of these, those that were removed.
    pub purged: u64,
}

/// What went wrong in the store. A miss is not an error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    #[error("the data's SHA-256 is {actual}, the digest says {expected}")]
    HashMismatch { expected: Digest, actual: Hash },
    #[error("the data ends after {actual} bytes, the digest of {expected} says {}", expected.size)]
    TooShort { expected: Digest, actual: u64 },
    #[error("the data is longer than the {} bytes of digest {expected}", expected.size)]
    TooLong { expected: Digest },
    #[error("the data of {digest} is not valid zstd: {detail}")]
    BadZstd { digest: Digest, detail: &'static str },
    #[error("write_offset is {given}, but {committed} bytes of this upload are committed")]
    WriteOffset { given: u64, committed: u64 },
    #[error("the upload was taken over by another stream")]
    TakenOver,
    #[error("blob {digest} is larger than the largest that this cache can hold ({max} bytes)")]
    BlobTooLarge { digest: Digest, max: u64 },
    #[error("no space in the cache for {bytes} bytes now")]
    NoSpace { bytes: u64 },
    #[error(
        "as many writes are in flight as may be (--max_inflight_cas_writes {slots}) or as there is memory for \
         (--memory_limit), and none ended within {wait_ms} ms: the blob was not stored. Nothing is lost: whoever misses it next makes it again"
    )]
    Shed { slots: u32, wait_ms: u64 },
    #[error(
        "next to nothing came for some time while others waited for a place to write (--max_inflight_cas_writes): what has \
         arrived is kept. Ask QueryWriteStatus and go on from there"
    )]
    Yielded,
    #[error("too much is in flight ({what}, limit {limit})")]
    Busy { what: &'static str, limit: u64 },
    #[error("blob {digest} could not be read to its end: it was damaged, or its backend broke off")]
    Lost { digest: Digest },
    #[error("disk: {0}")]
    Disk(String),
    #[error("it is purged here, but not from the backend {backend}, which may bring it back: {detail}. Try again")]
    NotPurged { backend: String, detail: String },
    #[error("the owner of the blob gave no answer: its work failed, and the server's log says why")]
    Unanswered,
    #[error("the server is shutting down")]
    Stopping,
}

/// A body that is not what its headers say.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the body is no zstd of {raw_len} bytes: {detail}")]
pub struct NotDecoded {
    pub raw_len: usize,
    pub detail: &'static str,
}

/// A content-addressed store with an action cache. Cheap to clone; core-local.
///
/// Invariant: digests of size 0 are the empty blob; implementations below `store::empty` never see them.
#[allow(async_fn_in_trait)] // Why: as above.
pub trait Store: Clone + 'static {
    type Upload: Upload + 'static;

    /// The same store, for the blobs of `scope`.
    fn scoped(&self, scope: &Scope) -> Self;
    /// The same store, for the questions of one check that begins now: they wait for a backend for `existence_timeout` all
    /// together, and what it does not say or bring by then counts as missing. A blob comes when all of it is here.
    fn for_check(&self) -> Self;
    /// For each digest whether it is missing, in order. Present blobs count as used.
    async fn find_missing(&self, digests: Vec<Digest>) -> Result<Vec<bool>, StoreError>;
    /// Whether a blob that was missing just now surely is: not here, and not in a backend, which has said so lately. Asks no
    /// backend.
    async fn is_absent(&self, digest: Digest) -> Result<bool, StoreError>;
    /// The size of the blob with this hash, for clients that do not know it (HTTP). `None` is a miss; a hit counts as use.
    /// A backend is asked for what is not here: who calls this should hold no memory that others want.
    async fn size_of(&self, hash: Hash, purpose: Purpose) -> Result<Option<u64>, StoreError>;
    /// `None` is a miss.
    async fn get(&self, get: Get) -> Result<Option<Blob>, StoreError>;
    /// The same of what is here, without asking a backend; then `fetch` tells more. A store without backends has no other.
    async fn get_here(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        self.get(get).await
    }
    /// Waits until what is not here comes from a backend; false when it does not. Who calls this should hold no memory that
    /// others want: it takes as long as backends do.
    async fn fetch(&self, _wanted: Wanted) -> Result<bool, StoreError> {
        Ok(false)
    }
    /// What `fetch` has said of: a backend is not asked for it again.
    async fn get_fetched(&self, get: Get, comes: bool) -> Result<Option<Blob>, StoreError> {
        if comes { self.get(get).await } else { self.get_here(get).await }
    }
    /// Verifies and stores a small blob.
    async fn put(&self, put: Put) -> Result<PutOutcome, StoreError>;
    /// Starts or resumes an upload at `write_offset` raw bytes. 0 starts anew; else it must be what
    /// `upload_status` last said.
    async fn open_upload(&self, key: UploadKey, write_offset: u64) -> Result<Opened<Self::Upload>, StoreError>;
    /// Where the upload stands; a present blob is complete, an unknown upload is at 0.
    async fn upload_status(&self, key: UploadKey) -> Result<UploadStatus, StoreError>;
    /// `None` is a miss.
    async fn action_get(&self, key: ActionKey) -> Result<Option<ActionEntry>, StoreError>;
    /// As `get_here`.
    async fn action_get_here(&self, key: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        self.action_get(key).await
    }
    /// Stores or replaces, for a client of `instance`.
    async fn action_put(&self, key: ActionKey, data: Bytes, instance: InstanceTag) -> Result<(), StoreError>;
    /// Drops the entry if it is still this version, and no backend is to get it yet.
    async fn action_drop(&self, key: ActionKey, version: u64) -> Result<(), StoreError>;
    /// Drops an entry whose blob `missing` was not to be had, unless a backend only did not answer.
    async fn action_drop_lacking(&self, key: ActionKey, version: u64, missing: Digest) -> Result<(), StoreError> {
        if self.is_absent(missing).await? { self.action_drop(key, version).await } else { Ok(()) }
    }
    /// Removes for good: when it returns, nothing brings back what was there. It takes as long as it takes.
    async fn purge(&self, purge: Purge) -> Result<Purged, StoreError>;
    /// What is in a body of zstd that is to be looked at before it is stored: exactly `raw_len` bytes.
    fn decoded(&self, zstd: &[u8], raw_len: usize) -> Result<Bytes, NotDecoded>;
}

/// The raw bytes of a whole blob, for blobs of a known, small size, of which `bring` said whether it comes. `None` is a miss,
/// and so is a damaged blob.
pub async fn read_raw<S: Store>(store: &S, digest: Digest, comes: bool) -> Result<Option<Vec<Bytes>>, StoreError> {
    let found = match store.get_fetched(Get::whole(digest, Accept::Identity), comes).await {
        Ok(Some(blob)) => blob.collect().await,
        Ok(None) => return Ok(None),
        Err(error) => Err(error),
    };
    let pieces = match found {
        Ok(pieces) => pieces,
        Err(StoreError::Lost { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let len: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
    if len != digest.size {
        return Err(StoreError::Disk(format!("the read of {digest} ended after {len} bytes")));
    }
    Ok(Some(pieces))
}

#[cfg(test)]
mod tests {
    use super::fake::{FakeStore, digest_of};
    use super::*;
    use crate::rt::cores::block_on;

    /// Goal: a backend that brings nothing is not asked on and on, and one that brings things now and then is asked for all. Method:
    /// thousands of digests, and a clock that goes on by a second each time that somebody looks.
    #[test]
    fn asks_while_something_comes() {
        block_on(async {
            for (every, all_asked) in [(usize::MAX, false), (1000, false), (4, true)] {
                let (store, start, looks) = (FakeStore::default(), rt::time::now(), Cell::new(0));
                let digests: Vec<Digest> = (1..3000_u32).map(|number| digest_of(&number.to_le_bytes())).collect();
                let coming: Vec<bool> = (1..3000).map(|number| number % every == 0).collect();
                let brings = digests.iter().zip(&coming).filter(|(_, comes)| **comes).map(|(digest, _)| *digest);
                store.with(|state| state.coming = brings.collect());
                let clock = || start + Duration::from_secs(looks.replace(looks.get() + 1));
                let found = fetch_by_clock(&store, digests, clock).await;
                let asked = store.with(|state| state.fetches);
                let expected: Vec<bool> = coming.iter().enumerate().map(|(at, comes)| *comes && at < asked).collect();
                assert!(found == expected && (asked == found.len()) == all_asked, "{every}: {asked}");
                assert!(all_asked || asked < 20);
            }
        });
    }
}
