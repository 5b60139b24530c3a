//! Counts what clients asked for and whether it was there: bazel-remote's `incoming_requests_total`.

use std::rc::Rc;

use bytes::Bytes;

use super::complete::Complete;
use super::{
    ActionEntry, ActionKey, Blob, Get, Memory, NotDecoded, Opened, Purge, Purged, Purpose, Put, PutOutcome, Store,
    StoreError, UploadKey, UploadStatus, Wanted,
};
use crate::metrics::{Counter, Metric, Snapshot};
use crate::pure::digest::{Digest, Hash};
use crate::pure::purge::InstanceTag;
use crate::pure::scope::Scope;

/// Passes everything through. Stands outermost, so that what the stores below ask for themselves is not counted, and an
/// action whose blobs are gone counts as the miss that the client sees.
#[derive(Clone)]
pub struct Measured<S> {
    inner: S,
    counts: Rc<Counts>,
}

#[derive(Default)]
struct Counts {
    get_blob: Ratio,
    get_action: Ratio,
    /// By digest.
    contains_blob: Ratio,
    purged_blobs: Counter,
    purged_actions: Counter,
    purges_failed: Counter,
}

#[derive(Default)]
struct Ratio {
    hits: Counter,
    misses: Counter,
}

impl Ratio {
    fn note(&self, is_hit: bool) {
        if is_hit { self.hits.count() } else { self.misses.count() }
    }

    fn report(&self, kind: &'static str, method: &'static str, into: &mut Snapshot) {
        into.add_for(Metric::IncomingRequests, [kind, method, "hit"], &self.hits);
        into.add_for(Metric::IncomingRequests, [kind, method, "miss"], &self.misses);
    }
}

impl<S> Measured<S> {
    pub fn new(inner: S) -> Self {
        Self { inner, counts: Rc::default() }
    }

    pub fn report(&self, into: &mut Snapshot) {
        self.counts.get_blob.report("cas", "get", into);
        self.counts.get_action.report("ac", "get", into);
        self.counts.contains_blob.report("cas", "contains", into);
        into.add_for(Metric::PurgedEntries, ["cas"], &self.counts.purged_blobs);
        into.add_for(Metric::PurgedEntries, ["ac"], &self.counts.purged_actions);
        into.add(Metric::PurgesFailed, self.counts.purges_failed.get());
    }
}

impl<S: Store> Measured<S> {
    /// `fetch` of a blob that is not here, by who will get it then: what does not come is a miss.
    pub async fn fetch_to_get(&self, digest: Digest) -> Result<bool, StoreError> {
        let comes = self.inner.fetch(Wanted::Blob(digest)).await?;
        if !comes {
            self.counts.get_blob.note(false);
        }
        Ok(comes)
    }
}

impl<S: Store> Measured<Complete<S>> {
    /// See `Complete::action_get_held`.
    pub async fn action_get_held<E: From<StoreError>>(
        &self,
        key: ActionKey,
        check: bool,
        memory: &mut impl Memory<E>,
    ) -> Result<Option<ActionEntry>, E> {
        let found = self.inner.action_get_held(key, check, memory).await?;
        self.counts.get_action.note(found.is_some());
        Ok(found)
    }
}

impl<S: Store> Store for Measured<S> {
    type Upload = S::Upload;

    fn scoped(&self, scope: &Scope) -> Self {
        Self { inner: self.inner.scoped(scope), counts: self.counts.clone() }
    }

    fn for_check(&self) -> Self {
        Self { inner: self.inner.for_check(), counts: self.counts.clone() }
    }

    async fn is_absent(&self, digest: Digest) -> Result<bool, StoreError> {
        self.inner.is_absent(digest).await
    }

    async fn find_missing(&self, digests: Vec<Digest>) -> Result<Vec<bool>, StoreError> {
        let missing = self.inner.find_missing(digests).await?;
        let misses = missing.iter().filter(|missing| **missing).count() as u64;
        self.counts.contains_blob.misses.add(misses);
        self.counts.contains_blob.hits.add(missing.len() as u64 - misses);
        Ok(missing)
    }

    async fn size_of(&self, hash: Hash, purpose: Purpose) -> Result<Option<u64>, StoreError> {
        let size = self.inner.size_of(hash, purpose).await?;
        // Who goes on to read the blob counts it as found.
        if size.is_none() {
            self.counts.get_blob.note(false);
        }
        Ok(size)
    }

    async fn get(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        let found = self.inner.get(get).await;
        match &found {
            Ok(found) => self.counts.get_blob.note(found.is_some()),
            // To its client a miss.
            Err(StoreError::Lost { .. }) => self.counts.get_blob.note(false),
            Err(_) => {}
        }
        found
    }

    /// A miss here is none yet: who asks goes on to `fetch_to_get`.
    async fn get_here(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        let found = self.inner.get_here(get).await?;
        if found.is_some() {
            self.counts.get_blob.note(true);
        }
        Ok(found)
    }

    async fn fetch(&self, wanted: Wanted) -> Result<bool, StoreError> {
        self.inner.fetch(wanted).await
    }

    async fn get_fetched(&self, get: Get, comes: bool) -> Result<Option<Blob>, StoreError> {
        if comes {
            return self.get(get).await;
        }
        let found = self.inner.get_here(get).await?;
        self.counts.get_blob.note(found.is_some());
        Ok(found)
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
        let found = self.inner.action_get(key).await?;
        self.counts.get_action.note(found.is_some());
        Ok(found)
    }

    async fn action_put(&self, key: ActionKey, data: Bytes, instance: InstanceTag) -> Result<(), StoreError> {
        self.inner.action_put(key, data, instance).await
    }

    async fn action_drop(&self, key: ActionKey, version: u64) -> Result<(), StoreError> {
        self.inner.action_drop(key, version).await
    }

    async fn purge(&self, purge: Purge) -> Result<Purged, StoreError> {
        let purged = self.inner.purge(purge).await.inspect_err(|_| self.counts.purges_failed.count())?;
        match purge {
            Purge::Blob(_) => self.counts.purged_blobs.add(purged.purged),
            Purge::Action(_) | Purge::Actions(_) => self.counts.purged_actions.add(purged.purged),
        }
        Ok(purged)
    }

    fn decoded(&self, zstd: &[u8], raw_len: usize) -> Result<Bytes, NotDecoded> {
        self.inner.decoded(zstd, raw_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::cores::block_on;
    use crate::store::fake::{FakeStore, digest_of};
    use crate::store::{Accept, Encoding, Uncounted};

    /// Goal: a purge that failed is counted, as one that took nothing. Method: one that the store fails, one that it does not.
    #[test]
    fn purges_that_failed_are_counted() {
        block_on(async {
            let fake = FakeStore::default();
            let store = Measured::new(Complete::new(fake.clone()));
            let purge = Purge::Blob(fake.add("here").hash);
            fake.with(|state| state.fail_next = Some(StoreError::Disk("it is stored again".into())));
            assert!(store.purge(purge).await.is_err());
            assert_eq!(store.purge(purge).await.map(|purged| purged.purged), Ok(1));
            let mut all = Snapshot::default();
            store.report(&mut all);
            assert_eq!(all.value(Metric::PurgesFailed, &[]), Some(1.0));
            assert_eq!(all.value(Metric::PurgedEntries, &["cas"]), Some(1.0));
        });
    }

    /// Goal: each question is counted once, by kind and by what was found. Method: questions of each kind to a store that
    /// holds one blob.
    #[test]
    fn hits_and_misses_are_told_apart() {
        block_on(async {
            let store = Measured::new(Complete::new(FakeStore::default()));
            let (here, gone) = (digest_of(b"here"), digest_of(b"gone"));
            let data = vec![Bytes::from_static(b"here")];
            store.put(Put { digest: here, encoding: Encoding::Identity, data, admitted: false }).await.expect("stored");
            store.find_missing(vec![here, gone, gone]).await.expect("an answer");
            assert!(store.get(Get::whole(here, Accept::Identity)).await.expect("an answer").is_some());
            assert!(store.get(Get::whole(gone, Accept::Identity)).await.expect("an answer").is_none());
            // A read in two steps is one question.
            assert!(store.get_here(Get::whole(here, Accept::Identity)).await.expect("an answer").is_some());
            assert!(store.get_here(Get::whole(gone, Accept::Identity)).await.expect("an answer").is_none());
            assert!(!store.fetch_to_get(gone).await.expect("an answer"));
            for comes in [false, true] {
                for digest in [here, gone] {
                    let found = store.get_fetched(Get::whole(digest, Accept::Identity), comes).await;
                    assert_eq!(found.expect("an answer").is_some(), digest == here);
                }
            }
            let key = ActionKey { hash: here.hash, size: None };
            assert!(store.action_get(key).await.expect("an answer").is_none());
            let held = store.action_get_held::<StoreError>(key, true, &mut Uncounted).await;
            assert!(held.expect("an answer").is_none());
            let mut all = Snapshot::default();
            store.report(&mut all);
            for (kind, method, status, expected) in [
                ("cas", "contains", "hit", 1.0),
                ("cas", "contains", "miss", 2.0),
                ("cas", "get", "hit", 4.0),
                ("cas", "get", "miss", 4.0),
                ("ac", "get", "hit", 0.0),
                ("ac", "get", "miss", 2.0),
            ] {
                let found = all.value(Metric::IncomingRequests, &[kind, method, status]);
                assert_eq!(found, Some(expected), "{kind} {method} {status}");
            }
        });
    }
}
