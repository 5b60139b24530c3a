//! What the worker asks of a disk: records, and large blobs in frames. Tests put a faulty one in its place.

use bytes::Bytes;

use super::disk::{Codec, Disk, DiskError, Frames, Key, LargeBlob, LargeWriter};
use super::purging::ActionCursor;
use crate::pure::digest::Hash;
use crate::pure::purge::{Origin, Which};

/// What a lookup found. All bytes of a small one have been checked; those of a large one are checked frame by frame.
pub enum Stored<L> {
    Small(Record),
    Large(L),
}

/// A small record, as it stands at rest.
#[derive(Debug, Clone)]
pub struct Record {
    pub codec: Codec,
    /// Raw bytes.
    pub raw_len: u64,
    /// As stored.
    pub data: Bytes,
    /// Where it stands: the disk's name for this version.
    pub version: u64,
    /// The size in the key that it was stored under; 0 for an action stored without one.
    pub key_size: u64,
    pub origin: Origin,
}

/// What becomes of a record that is there already when another one of the same key comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Older {
    Replaced,
    /// Then the other one is not stored.
    Kept,
}

/// One core's share of the disk. Clones are handles of the same one.
#[allow(async_fn_in_trait)] // Why: futures stay on their core; nobody asks for Send.
pub trait BlobDisk: Clone + 'static {
    type Writer: FrameWriter + 'static;
    type Large: FrameReader + 'static;

    /// Waits until the shard that holds `hash` knows its content: recovery may still be reading it. Cheap when it does.
    async fn ready(&self, hash: &Hash);
    /// Whether the record is here. Counts as use of it. Call `ready` first.
    fn contains(&self, key: &Key) -> bool;
    /// The same, and all that `--ack` promises of a stored record holds of it: waits for that. So what an upload is told of a blob
    /// that was here before is no less than what it is told of its own.
    async fn holds(&self, key: &Key) -> Result<bool, DiskError>;
    /// The size of the blob with this hash; a hit counts as use.
    async fn size_of(&self, hash: &Hash) -> Result<Option<u64>, DiskError>;
    /// Looks a record up; a hit counts as use.
    async fn read(&self, key: &Key) -> Result<Option<Stored<Self::Large>>, DiskError>;
    /// Stores a small record, all of `stored` joined, and returns its version. An older one of the same key is replaced.
    async fn append(&self, key: &Key, codec: Codec, raw_len: u64, stored: &[&[u8]]) -> Result<u64, DiskError>;
    /// Stores an action, as `append` does a raw record. `DiskError::Superseded` where an older one was kept.
    async fn append_action(&self, key: &Key, origin: Origin, data: &[u8], older: Older) -> Result<u64, DiskError>;
    /// Starts a large blob.
    async fn begin_large(&self, key: &Key) -> Result<Self::Writer, DiskError>;
    /// Drops a record, if it is still this version where one is given. True when something was dropped.
    async fn remove(&self, key: &Key, version: Option<u64>) -> Result<bool, DiskError>;
    /// Removes keys, whatever their size, so that nothing brings them back. Says for each whether there was something.
    async fn purge(&self, keys: &[Key]) -> Result<Vec<bool>, DiskError>;
    /// The next actions of a walk over all that `which` covers, which may be none; `None` at the end.
    async fn next_actions(&self, cursor: &mut ActionCursor, which: &Which) -> Option<Vec<Key>>;
    /// The record's bytes are those that were written but make no sense: drops and counts it.
    fn damaged(&self, key: &Key);
    /// Raw bytes of the largest blob that is accepted.
    fn max_blob_len(&self) -> u64;
    /// `work` is done each time that space is so short that somebody is about to be refused.
    fn on_pressure(&self, work: Box<dyn Fn()>);
}

/// A large blob on its way to the disk, invisible until `commit`. Dropping it frees its space.
#[allow(async_fn_in_trait)] // Why: as above.
pub trait FrameWriter {
    /// Appends a frame of `FRAME_LEN` raw bytes; the last may be shorter. Waits for the disk when it is behind.
    async fn push(&mut self, codec: Codec, stored: &[u8]) -> Result<(), DiskError>;
    /// Bytes of memory that wait to be written.
    fn staged_len(&self) -> usize;
    /// Publishes the blob, whose content has been verified.
    async fn commit(self) -> Result<u64, DiskError>;
}

/// A large blob open for reading; its space is not reused while this lives.
#[allow(async_fn_in_trait)] // Why: as above.
pub trait FrameReader {
    fn frame_count(&self) -> usize;
    fn codec(&self, frame: usize) -> Codec;
    /// Bytes at rest of a frame.
    fn stored_len(&self, frame: usize) -> usize;
    /// Reads and checks frames as stored from `first` on: at least one and at most `max`.
    async fn read_frames(&self, first: usize, max: usize) -> Result<Frames, DiskError>;
}

impl BlobDisk for Disk {
    type Writer = LargeWriter;
    type Large = LargeBlob;

    async fn ready(&self, hash: &Hash) {
        Disk::ready(self, hash).await;
    }

    fn contains(&self, key: &Key) -> bool {
        Disk::contains(self, key)
    }

    async fn holds(&self, key: &Key) -> Result<bool, DiskError> {
        Disk::holds(self, key).await
    }

    async fn size_of(&self, hash: &Hash) -> Result<Option<u64>, DiskError> {
        Disk::size_of(self, hash).await
    }

    async fn read(&self, key: &Key) -> Result<Option<Stored<LargeBlob>>, DiskError> {
        Disk::read(self, key).await
    }

    async fn append(&self, key: &Key, codec: Codec, raw_len: u64, stored: &[&[u8]]) -> Result<u64, DiskError> {
        Disk::append(self, key, codec, raw_len, stored).await
    }

    async fn append_action(&self, key: &Key, origin: Origin, data: &[u8], older: Older) -> Result<u64, DiskError> {
        Disk::append_action(self, key, origin, data, older).await
    }

    async fn begin_large(&self, key: &Key) -> Result<LargeWriter, DiskError> {
        Disk::begin_large(self, key).await
    }

    async fn remove(&self, key: &Key, version: Option<u64>) -> Result<bool, DiskError> {
        Disk::remove(self, key, version).await
    }

    async fn purge(&self, keys: &[Key]) -> Result<Vec<bool>, DiskError> {
        Disk::purge(self, keys).await
    }

    async fn next_actions(&self, cursor: &mut ActionCursor, which: &Which) -> Option<Vec<Key>> {
        Disk::next_actions(self, cursor, which).await
    }

    fn damaged(&self, key: &Key) {
        Disk::damaged(self, key);
    }

    fn max_blob_len(&self) -> u64 {
        Disk::max_blob_len(self)
    }

    fn on_pressure(&self, work: Box<dyn Fn()>) {
        self.on_pressure(work);
    }
}

impl FrameWriter for LargeWriter {
    async fn push(&mut self, codec: Codec, stored: &[u8]) -> Result<(), DiskError> {
        LargeWriter::push(self, codec, stored).await
    }

    fn staged_len(&self) -> usize {
        LargeWriter::staged_len(self)
    }

    async fn commit(self) -> Result<u64, DiskError> {
        LargeWriter::commit(self).await
    }
}

impl FrameReader for LargeBlob {
    fn frame_count(&self) -> usize {
        LargeBlob::frame_count(self)
    }

    fn codec(&self, frame: usize) -> Codec {
        self.frame(frame).codec
    }

    fn stored_len(&self, frame: usize) -> usize {
        self.frame(frame).stored_len
    }

    async fn read_frames(&self, first: usize, max: usize) -> Result<Frames, DiskError> {
        LargeBlob::read_frames(self, first, max).await
    }
}
