//! The empty blob is always there.

use bytes::Bytes;

use super::{
    Accept, ActionEntry, ActionKey, Blob, Encoding, Get, Opened, Put, PutOutcome, Store, StoreError, UploadKey,
    UploadStatus,
};
use crate::pure::digest::Digest;

/// Answers for the empty blob itself, so that the store inside never sees a digest of size 0.
///
/// Source: REAPI, `ContentAddressableStorage`: servers must behave as though empty blobs are always available.
#[derive(Clone)]
pub struct EmptyBlob<S>(S);

/// A zstd frame without content: magic, single segment with 1 byte of size, size 0, one last raw block of 0 bytes.
///
/// Source: RFC 8878, 3.1.1.
const EMPTY_FRAME: [u8; 9] = [0x28, 0xb5, 0x2f, 0xfd, 0x20, 0x00, 0x01, 0x00, 0x00];

impl<S: Store> EmptyBlob<S> {
    pub fn new(inner: S) -> Self {
        Self(inner)
    }
}

impl<S: Store> Store for EmptyBlob<S> {
    type Upload = S::Upload;

    async fn find_missing(&self, digests: Vec<Digest>) -> Result<Vec<bool>, StoreError> {
        if !digests.iter().any(Digest::is_empty) {
            return self.0.find_missing(digests).await;
        }
        let is_empty: Vec<bool> = digests.iter().map(Digest::is_empty).collect();
        let others = digests.into_iter().filter(|digest| !digest.is_empty()).collect();
        let mut missing = self.0.find_missing(others).await?.into_iter();
        Ok(is_empty.into_iter().map(|is_empty| !is_empty && missing.next().unwrap_or(true)).collect())
    }

    async fn get(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        if !get.digest.is_empty() {
            return self.0.get(get).await;
        }
        Ok(Some(match get.accept {
            Accept::Identity | Accept::Any => Blob::Whole { data: Bytes::new(), encoding: Encoding::Identity },
            Accept::Zstd => Blob::Whole { data: Bytes::from_static(&EMPTY_FRAME), encoding: Encoding::Zstd },
        }))
    }

    async fn put(&self, put: Put) -> Result<PutOutcome, StoreError> {
        if !put.digest.is_empty() {
            return self.0.put(put).await;
        }
        if put.encoding == Encoding::Identity && put.data.iter().any(|piece| !piece.is_empty()) {
            return Err(StoreError::TooLong { expected: put.digest });
        }
        Ok(PutOutcome::AlreadyPresent)
    }

    async fn open_upload(&self, key: UploadKey, write_offset: u64) -> Result<Opened<Self::Upload>, StoreError> {
        if key.digest.is_empty() {
            return Ok(Opened::AlreadyPresent);
        }
        self.0.open_upload(key, write_offset).await
    }

    async fn upload_status(&self, key: UploadKey) -> Result<UploadStatus, StoreError> {
        if key.digest.is_empty() {
            return Ok(UploadStatus { committed: 0, complete: true });
        }
        self.0.upload_status(key).await
    }

    async fn action_get(&self, key: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        self.0.action_get(key).await
    }

    async fn action_put(&self, key: ActionKey, data: Bytes) -> Result<(), StoreError> {
        self.0.action_put(key, data).await
    }

    async fn action_drop(&self, key: ActionKey, version: u64) -> Result<(), StoreError> {
        self.0.action_drop(key, version).await
    }
}
