//! A hit in the action cache is a promise that its blobs are here.

use bytes::Bytes;

use super::{ActionEntry, ActionKey, Blob, Get, Opened, Put, PutOutcome, Store, StoreError, UploadKey, UploadStatus};

/// Passes everything through, except that an action whose blobs are not all present is a miss and is dropped.
#[derive(Clone)]
pub struct Complete<S> {
    inner: S,
    check: bool,
}

impl<S: Store> Complete<S> {
    /// With `check` off every action passes.
    pub fn new(inner: S, check: bool) -> Self {
        Self { inner, check }
    }
}

impl<S: Store> Store for Complete<S> {
    type Upload = S::Upload;

    async fn find_missing(&self, digests: Vec<crate::pure::digest::Digest>) -> Result<Vec<bool>, StoreError> {
        self.inner.find_missing(digests).await
    }

    async fn get(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        self.inner.get(get).await
    }

    async fn put(&self, put: Put) -> Result<PutOutcome, StoreError> {
        self.inner.put(put).await
    }

    async fn open_upload(&self, key: UploadKey, write_offset: u64) -> Result<Opened<Self::Upload>, StoreError> {
        self.inner.open_upload(key, write_offset).await
    }

    async fn upload_status(&self, key: UploadKey) -> Result<UploadStatus, StoreError> {
        self.inner.upload_status(key).await
    }

    async fn action_get(&self, key: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        if !self.check {
            return self.inner.action_get(key).await;
        }
        self.inner.action_get(key).await
    }

    async fn action_put(&self, key: ActionKey, data: Bytes) -> Result<(), StoreError> {
        self.inner.action_put(key, data).await
    }

    async fn action_drop(&self, key: ActionKey, version: u64) -> Result<(), StoreError> {
        self.inner.action_drop(key, version).await
    }
}
