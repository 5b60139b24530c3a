//! The empty blob is always present and never stored.
//!
//! Source: REAPI, `ContentAddressableStorage`: "The empty blob ... must be treated as always present".

use bytes::Bytes;

use super::{
    Accept, ActionEntry, ActionKey, Blob, Encoding, Get, NotDecoded, Opened, Purge, Purged, Purpose, Put, PutOutcome,
    Store, StoreError, UploadKey, UploadStatus, Wanted,
};
use crate::pure::digest::{Digest, EMPTY, Hash};
use crate::pure::purge::InstanceTag;
use crate::pure::scope::Scope;

/// Answers for the empty blob, and passes everything else through.
#[derive(Clone)]
pub struct Empty<S>(pub S);

/// A zstd frame of nothing. Source: RFC 8878: magic, single segment of content size 0, one last raw block of 0 bytes.
const EMPTY_ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd, 0x20, 0x00, 0x01, 0x00, 0x00];

impl<S: Store> Store for Empty<S> {
    type Upload = S::Upload;

    fn scoped(&self, scope: &Scope) -> Self {
        Self(self.0.scoped(scope))
    }

    fn for_check(&self) -> Self {
        Self(self.0.for_check())
    }

    async fn find_missing(&self, digests: Vec<Digest>) -> Result<Vec<bool>, StoreError> {
        if !digests.iter().any(Digest::is_empty) {
            return self.0.find_missing(digests).await;
        }
        let real = digests.iter().copied().filter(|digest| !digest.is_empty()).collect();
        let mut missing = self.0.find_missing(real).await?.into_iter();
        Ok(digests.iter().map(|digest| !digest.is_empty() && missing.next().unwrap_or(true)).collect())
    }

    async fn is_absent(&self, digest: Digest) -> Result<bool, StoreError> {
        Ok(!digest.is_empty() && self.0.is_absent(digest).await?)
    }

    async fn size_of(&self, hash: Hash, purpose: Purpose) -> Result<Option<u64>, StoreError> {
        if hash == EMPTY.hash { Ok(Some(0)) } else { self.0.size_of(hash, purpose).await }
    }

    async fn get(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        if !get.digest.is_empty() {
            return self.0.get(get).await;
        }
        let (data, encoding) = match get.accept {
            Accept::Identity | Accept::Any => (Bytes::new(), Encoding::Identity),
            Accept::Zstd => (Bytes::from_static(EMPTY_ZSTD), Encoding::Zstd),
        };
        Ok(Some(Blob::Whole { data, encoding }))
    }

    async fn get_here(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        if get.digest.is_empty() { self.get(get).await } else { self.0.get_here(get).await }
    }

    async fn fetch(&self, wanted: Wanted) -> Result<bool, StoreError> {
        match wanted {
            Wanted::Blob(digest) if digest.is_empty() => Ok(true),
            wanted => self.0.fetch(wanted).await,
        }
    }

    async fn put(&self, put: Put) -> Result<PutOutcome, StoreError> {
        if !put.digest.is_empty() {
            return self.0.put(put).await;
        }
        // Why: a zstd body is not decoded, because whatever it holds, the blob that it names is here.
        if put.encoding == Encoding::Identity && put.data.iter().any(|piece| !piece.is_empty()) {
            return Err(StoreError::TooLong { expected: put.digest });
        }
        Ok(PutOutcome::AlreadyPresent)
    }

    async fn open_upload(&self, key: UploadKey, write_offset: u64) -> Result<Opened<Self::Upload>, StoreError> {
        if key.digest.is_empty() { Ok(Opened::AlreadyPresent) } else { self.0.open_upload(key, write_offset).await }
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

    async fn action_get_here(&self, key: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        self.0.action_get_here(key).await
    }

    async fn action_put(&self, key: ActionKey, data: Bytes, instance: InstanceTag) -> Result<(), StoreError> {
        self.0.action_put(key, data, instance).await
    }

    async fn action_drop(&self, key: ActionKey, version: u64) -> Result<(), StoreError> {
        self.0.action_drop(key, version).await
    }

    async fn purge(&self, purge: Purge) -> Result<Purged, StoreError> {
        match purge {
            Purge::Blob(hash) if hash == EMPTY.hash => Ok(Purged::default()),
            purge => self.0.purge(purge).await,
        }
    }

    fn decoded(&self, zstd: &[u8], raw_len: usize) -> Result<Bytes, NotDecoded> {
        self.0.decoded(zstd, raw_len)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::pure::digest::EMPTY;
    use crate::store::fake::{FakeStore, digest_of};

    /// Goal: the empty blob behaves as present everywhere and never reaches the store below. Method: each call on a
    /// store that fails the test when it is asked for the empty digest.
    #[test]
    fn is_always_present() {
        let fake = FakeStore::default();
        let store = Empty(fake.clone());
        let (here, gone) = (fake.add("here"), digest_of(b"gone"));
        let asked = store.find_missing(vec![EMPTY, gone, EMPTY, here]).now_or_never().expect("ready");
        assert_eq!(asked, Ok(vec![false, true, false, false]));
        assert_eq!(fake.with(|state| state.asked.clone()), [[gone, here]]);
        for (accept, expected) in [(Accept::Identity, &[][..]), (Accept::Any, &[]), (Accept::Zstd, EMPTY_ZSTD)] {
            let blob = store.get(Get::whole(EMPTY, accept)).now_or_never().expect("ready");
            let Ok(Some(Blob::Whole { data, .. })) = blob else { panic!("{accept:?}") };
            assert_eq!(data, expected);
        }
        let put = |data: &'static str| Put {
            digest: EMPTY,
            encoding: Encoding::Identity,
            data: vec![data.into()],
            admitted: false,
        };
        assert_eq!(store.put(put("")).now_or_never(), Some(Ok(PutOutcome::AlreadyPresent)));
        assert_eq!(store.put(put("x")).now_or_never(), Some(Err(StoreError::TooLong { expected: EMPTY })));
        let key = UploadKey { instance: "".into(), uuid: "u".into(), digest: EMPTY, encoding: Encoding::Zstd };
        let status = store.upload_status(key.clone()).now_or_never().expect("ready");
        assert_eq!(status, Ok(UploadStatus { committed: 0, complete: true }));
        assert!(matches!(store.open_upload(key, 0).now_or_never(), Some(Ok(Opened::AlreadyPresent))));
        assert_eq!(fake.with(|state| (state.gets, state.puts)), (0, 0));
    }
}
