//! The fake store with a brake: calls can be made to wait, to panic, and are counted while they run.

use bytes::Bytes;

use crate::pure::digest::{Digest, Hash};
use crate::pure::purge::InstanceTag;
use crate::rt::channel;
use crate::rt::local::{Event, Local};
use crate::store::fake::{FakeStore, FakeUpload};
use crate::store::*;

/// Clones share everything.
#[derive(Clone, Default)]
pub struct SlowStore {
    pub fake: FakeStore,
    brake: Shared,
    changed: Event,
}

/// What the brake does.
#[derive(Debug, Default)]
pub struct Brake {
    /// Calls wait until this is false.
    pub hold: bool,
    /// The next call panics.
    pub panic: bool,
    /// Calls that wait now.
    pub waiting: usize,
    /// The next `Upload::write` ends with `AlreadyPresent`.
    pub present: bool,
    /// A read of this many bytes, in pieces of `FRAME_LEN`, made when asked for; how many were made is counted.
    pub endless: u64,
    pub pieces_made: usize,
    /// Bytes of the largest `Upload::write`.
    pub largest_write: usize,
}

#[derive(Clone)]
struct Shared(Local<Brake>);

impl Default for Shared {
    fn default() -> Self {
        Self(Local::new(Brake::default()))
    }
}

pub struct SlowUpload {
    inner: FakeUpload,
    store: SlowStore,
}

struct Waiting<'a>(&'a SlowStore);

impl SlowStore {
    pub fn brake<R>(&self, work: impl FnOnce(&mut Brake) -> R) -> R {
        let result = self.brake.0.with(work);
        self.changed.notify();
        result
    }

    async fn pass(&self) {
        if self.brake.0.with(|brake| std::mem::take(&mut brake.panic)) {
            panic!("the store was told to panic");
        }
        if !self.brake.0.with(|brake| brake.hold) {
            return;
        }
        self.brake.0.with(|brake| brake.waiting += 1);
        let _waiting = Waiting(self);
        while self.brake.0.with(|brake| brake.hold) {
            self.changed.wait().await;
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.brake.0.with(|brake| brake.waiting -= 1);
    }
}

impl Upload for SlowUpload {
    async fn write(&mut self, data: Vec<Bytes>) -> Result<(), UploadEnd> {
        let len = data.iter().map(Bytes::len).sum();
        self.store.brake.0.with(|brake| brake.largest_write = brake.largest_write.max(len));
        self.store.pass().await;
        if self.store.brake.0.with(|brake| std::mem::take(&mut brake.present)) {
            return Err(UploadEnd::AlreadyPresent);
        }
        self.inner.write(data).await
    }

    async fn moved(&mut self) -> Result<(), UploadEnd> {
        self.inner.moved().await
    }

    fn unconsumed(&self) -> usize {
        self.inner.unconsumed()
    }

    async fn finish(self) -> Result<PutOutcome, StoreError> {
        self.store.pass().await;
        self.inner.finish().await
    }

    async fn suspend(self) -> Result<u64, UploadEnd> {
        self.store.pass().await;
        self.inner.suspend().await
    }
}

impl Store for SlowStore {
    type Upload = SlowUpload;

    fn scoped(&self, scope: &crate::pure::scope::Scope) -> Self {
        Self { fake: self.fake.scoped(scope), ..self.clone() }
    }

    fn for_check(&self) -> Self {
        Self { fake: self.fake.for_check(), ..self.clone() }
    }

    async fn is_absent(&self, digest: Digest) -> Result<bool, StoreError> {
        self.fake.is_absent(digest).await
    }

    async fn find_missing(&self, digests: Vec<Digest>) -> Result<Vec<bool>, StoreError> {
        self.pass().await;
        self.fake.find_missing(digests).await
    }

    async fn size_of(&self, hash: Hash, purpose: Purpose) -> Result<Option<u64>, StoreError> {
        self.pass().await;
        self.fake.size_of(hash, purpose).await
    }

    async fn get(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        self.pass().await;
        let endless = self.brake.0.with(|brake| brake.endless);
        if endless == 0 {
            return self.fake.get(get).await;
        }
        let (mut sender, pieces) = channel::bounded(0);
        let store = self.clone();
        crate::rt::spawn(async move {
            let piece = Bytes::from(vec![7; crate::limits::FRAME_LEN]);
            for _ in 0..endless / piece.len() as u64 {
                if sender.send(Ok(piece.clone())).await.is_err() {
                    return;
                }
                store.brake.0.with(|brake| brake.pieces_made += 1);
            }
        });
        Ok(Some(Blob::Stream(BlobStream { encoding: Encoding::Identity, len: None, pieces })))
    }

    async fn put(&self, put: Put) -> Result<PutOutcome, StoreError> {
        self.pass().await;
        self.fake.put(put).await
    }

    async fn open_upload(&self, key: UploadKey, write_offset: u64) -> Result<Opened<SlowUpload>, StoreError> {
        Ok(match self.fake.open_upload(key, write_offset).await? {
            Opened::AlreadyPresent => Opened::AlreadyPresent,
            Opened::Ready(inner) => Opened::Ready(SlowUpload { inner, store: self.clone() }),
        })
    }

    async fn upload_status(&self, key: UploadKey) -> Result<UploadStatus, StoreError> {
        self.fake.upload_status(key).await
    }

    async fn action_get(&self, key: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        self.fake.action_get(key).await
    }

    async fn action_put(&self, key: ActionKey, data: Bytes, instance: InstanceTag) -> Result<(), StoreError> {
        self.fake.action_put(key, data, instance).await
    }

    async fn action_drop(&self, key: ActionKey, version: u64) -> Result<(), StoreError> {
        self.fake.action_drop(key, version).await
    }

    async fn purge(&self, purge: Purge) -> Result<Purged, StoreError> {
        self.fake.purge(purge).await
    }

    fn decoded(&self, zstd: &[u8], raw_len: usize) -> Result<Bytes, NotDecoded> {
        self.fake.decoded(zstd, raw_len)
    }
}
