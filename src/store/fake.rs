//! An in-memory store for tests of handlers: the rules of the real one, no disk, no cores, knobs for trouble.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::*;
use crate::limits;
use crate::pure::purge::Origin;
use crate::rt::channel;
use crate::rt::local::Local;

/// Clones share the content.
#[derive(Clone)]
pub struct FakeStore {
    state: Local<State>,
    /// The number of the check that it is for, from 1 on; 0: for none.
    check: usize,
}

/// What the store holds, what it was asked, and how it shall behave.
#[derive(Default)]
pub struct State {
    pub blobs: HashMap<Digest, Bytes>,
    /// Who stored each action.
    pub instances: HashMap<Hash, InstanceTag>,
    /// By hash: the size given when stored, the bytes, the version.
    pub actions: HashMap<Hash, (Option<u64>, Bytes, u64)>,
    /// Parked or running uploads: raw bytes so far.
    pub partial: HashMap<UploadKey, Vec<u8>>,
    /// Blobs larger than this many bytes come as a stream, in pieces of that length; 0 for never.
    pub piece_len: usize,
    /// `Accept::Any` gets zstd.
    pub prefers_zstd: bool,
    /// The next call (any method that reads or writes) ends with this.
    pub fail_next: Option<StoreError>,
    /// Digests of each `find_missing`, in order.
    pub asked: Vec<Vec<Digest>>,
    /// Every scope that the store was wanted for.
    pub scopes: Vec<Scope>,
    /// A backend is asked for these and never answers.
    pub hanging: HashSet<Digest>,
    /// A backend says of these that they come.
    pub coming: HashSet<Digest>,
    /// A backend does not answer whether it has these.
    pub unsure: HashSet<Digest>,
    /// How many `fetch`es there were.
    pub fetches: usize,
    /// How many checks there were.
    pub checks: usize,
    /// For which check each `find_missing` and each `fetch` of a blob asked, in order.
    pub asked_for: Vec<usize>,
    /// How many `get`s there were.
    pub gets: usize,
    /// How many `put`s and opened uploads there were.
    pub puts: usize,
    versions: u64,
}

/// A running upload of the fake: holds everything in memory until `finish`.
pub struct FakeUpload {
    store: FakeStore,
    key: UploadKey,
    base: Vec<u8>,
    body: Vec<u8>,
    done: bool,
}

/// The digest of `data`.
pub fn digest_of(data: &[u8]) -> Digest {
    Digest { hash: Hash(Sha256::digest(data).into()), size: data.len() as u64 }
}

impl Default for FakeStore {
    fn default() -> Self {
        Self { state: Local::new(State::default()), check: 0 }
    }
}

impl FakeStore {
    /// Looks at the state, or turns a knob.
    pub fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        self.state.with(work)
    }

    /// Stores a blob and returns its digest.
    pub fn add(&self, data: impl Into<Bytes>) -> Digest {
        let data = data.into();
        let digest = digest_of(&data);
        self.with(|state| state.blobs.insert(digest, data));
        digest
    }

    /// Forgets a blob.
    pub fn remove(&self, digest: Digest) {
        self.with(|state| state.blobs.remove(&digest));
    }

    /// The blob's raw bytes.
    pub fn blob(&self, digest: Digest) -> Option<Bytes> {
        self.with(|state| state.blobs.get(&digest).cloned())
    }

    fn trouble(&self) -> Result<(), StoreError> {
        self.with(|state| state.fail_next.take()).map_or(Ok(()), Err)
    }

    fn publish(&self, digest: Digest, data: Vec<u8>) -> Result<PutOutcome, StoreError> {
        let actual = data.len() as u64;
        if actual < digest.size {
            return Err(StoreError::TooShort { expected: digest, actual });
        }
        if actual > digest.size {
            return Err(StoreError::TooLong { expected: digest });
        }
        let hash = digest_of(&data).hash;
        if hash != digest.hash {
            return Err(StoreError::HashMismatch { expected: digest, actual: hash });
        }
        let old = self.with(|state| state.blobs.insert(digest, data.into()));
        Ok(if old.is_some() { PutOutcome::AlreadyPresent } else { PutOutcome::Stored })
    }
}

impl Upload for FakeUpload {
    async fn write(&mut self, data: Vec<Bytes>) -> Result<(), UploadEnd> {
        self.store.trouble().map_err(UploadEnd::Failed)?;
        data.iter().for_each(|piece| self.body.extend_from_slice(piece));
        if self.key.encoding == Encoding::Identity && (self.base.len() + self.body.len()) as u64 > self.key.digest.size
        {
            self.done = true;
            return Err(UploadEnd::Failed(StoreError::TooLong { expected: self.key.digest }));
        }
        Ok(())
    }

    async fn moved(&mut self) -> Result<(), UploadEnd> {
        std::future::pending().await
    }

    fn unconsumed(&self) -> usize {
        0
    }

    async fn finish(mut self) -> Result<PutOutcome, StoreError> {
        self.done = true;
        self.store.trouble()?;
        let mut raw = std::mem::take(&mut self.base);
        let body = std::mem::take(&mut self.body);
        raw.extend(decode(self.key.encoding, &body, self.key.digest)?);
        self.store.publish(self.key.digest, raw)
    }

    async fn suspend(self) -> Result<u64, UploadEnd> {
        let (store, key) = (self.store.clone(), self.key.clone());
        drop(self);
        Ok(store.with(|state| state.partial[&key].len() as u64))
    }
}

impl Drop for FakeUpload {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        // Why: what cannot be decoded yet is not committed, as with a frame that has not ended.
        let mut raw = std::mem::take(&mut self.base);
        raw.extend(decode(self.key.encoding, &self.body, self.key.digest).unwrap_or_default());
        self.store.with(|state| state.partial.insert(self.key.clone(), raw));
    }
}

impl Store for FakeStore {
    type Upload = FakeUpload;

    fn scoped(&self, scope: &Scope) -> Self {
        self.with(|state| state.scopes.push(scope.clone()));
        self.clone()
    }

    fn for_check(&self) -> Self {
        let check = self.with(|state| {
            state.checks += 1;
            state.checks
        });
        Self { check, ..self.clone() }
    }

    async fn is_absent(&self, digest: Digest) -> Result<bool, StoreError> {
        Ok(self.with(|state| !state.blobs.contains_key(&digest) && !state.unsure.contains(&digest)))
    }

    async fn find_missing(&self, digests: Vec<Digest>) -> Result<Vec<bool>, StoreError> {
        self.trouble()?;
        Ok(self.with(|state| {
            let missing = digests.iter().map(|d| !d.is_empty() && !state.blobs.contains_key(d)).collect();
            state.asked.push(digests);
            state.asked_for.push(self.check);
            missing
        }))
    }

    async fn size_of(&self, hash: Hash, _purpose: Purpose) -> Result<Option<u64>, StoreError> {
        self.trouble()?;
        Ok(self.with(|state| state.blobs.keys().find(|digest| digest.hash == hash).map(|digest| digest.size)))
    }

    async fn get(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        assert!(get.limit.is_none() || get.accept == Accept::Identity, "a limit goes with identity only");
        assert!(get.offset <= get.digest.size, "the service checks the offset");
        self.with(|state| state.gets += 1);
        self.trouble()?;
        let raw = match self.blob(get.digest) {
            Some(raw) => raw,
            None if get.digest.is_empty() => Bytes::new(),
            None => return Ok(None),
        };
        let raw = raw.slice(get.offset as usize..);
        let raw = raw.slice(..raw.len().min(get.limit.unwrap_or(u64::MAX) as usize));
        let (piece_len, prefers_zstd) = self.with(|state| (state.piece_len, state.prefers_zstd));
        let encoding = match get.accept {
            Accept::Identity => Encoding::Identity,
            Accept::Zstd => Encoding::Zstd,
            Accept::Any if prefers_zstd => Encoding::Zstd,
            Accept::Any => Encoding::Identity,
        };
        let encode = |piece: Bytes| match encoding {
            Encoding::Identity => piece,
            Encoding::Zstd => zstd_of(&piece),
        };
        if piece_len == 0 || raw.len() <= piece_len {
            return Ok(Some(Blob::Whole { data: encode(raw), encoding }));
        }
        let (mut sender, pieces) = channel::bounded(raw.len() / piece_len + 1);
        let (mut rest, mut len) = (raw, 0);
        while !rest.is_empty() {
            let piece = encode(rest.split_to(piece_len.min(rest.len())));
            len += piece.len() as u64;
            assert!(sender.try_send(Ok(piece)).is_ok(), "the channel holds all pieces");
        }
        Ok(Some(Blob::Stream(BlobStream { encoding, len: Some(len), pieces })))
    }

    async fn fetch(&self, wanted: Wanted) -> Result<bool, StoreError> {
        self.with(|state| state.fetches += 1);
        match wanted {
            Wanted::Blob(digest) if self.with(|state| state.hanging.contains(&digest)) => std::future::pending().await,
            Wanted::Blob(digest) => Ok(self.with(|state| {
                state.asked_for.push(self.check);
                state.coming.contains(&digest)
            })),
            Wanted::Action(_) => Ok(false),
        }
    }

    async fn put(&self, put: Put) -> Result<PutOutcome, StoreError> {
        assert!(put.admitted || put.digest.size <= limits::SMALL_BLOB_LEN_MAX as u64, "put is for small blobs");
        self.with(|state| state.puts += 1);
        self.trouble()?;
        self.publish(put.digest, decode(put.encoding, &put.data.concat(), put.digest)?)
    }

    async fn open_upload(&self, key: UploadKey, write_offset: u64) -> Result<Opened<FakeUpload>, StoreError> {
        self.with(|state| state.puts += 1);
        self.trouble()?;
        if self.blob(key.digest).is_some() {
            return Ok(Opened::AlreadyPresent);
        }
        let base = self.with(|state| state.partial.remove(&key)).unwrap_or_default();
        let base = if write_offset == 0 { Vec::new() } else { base };
        if base.len() as u64 != write_offset {
            let committed = base.len() as u64;
            self.with(|state| state.partial.insert(key, base));
            return Err(StoreError::WriteOffset { given: write_offset, committed });
        }
        Ok(Opened::Ready(FakeUpload { store: self.clone(), key, base, body: Vec::new(), done: false }))
    }

    async fn upload_status(&self, key: UploadKey) -> Result<UploadStatus, StoreError> {
        self.trouble()?;
        if self.blob(key.digest).is_some() {
            return Ok(UploadStatus { committed: key.digest.size, complete: true });
        }
        let committed = self.with(|state| state.partial.get(&key).map_or(0, |raw| raw.len() as u64));
        Ok(UploadStatus { committed, complete: false })
    }

    async fn action_get(&self, key: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        self.trouble()?;
        Ok(self.with(|state| {
            let (size, data, version) = state.actions.get(&key.hash)?;
            let matches = key.size.is_none() || size.is_none() || key.size == *size;
            matches.then(|| ActionEntry { data: data.clone(), version: *version })
        }))
    }

    async fn action_put(&self, key: ActionKey, data: Bytes, instance: InstanceTag) -> Result<(), StoreError> {
        self.trouble()?;
        self.with(|state| {
            state.versions += 1;
            state.actions.insert(key.hash, (key.size, data, state.versions));
            state.instances.insert(key.hash, instance);
        });
        Ok(())
    }

    async fn action_drop(&self, key: ActionKey, version: u64) -> Result<(), StoreError> {
        self.with(|state| {
            if state.actions.get(&key.hash).is_some_and(|(_, _, now)| *now == version) {
                state.actions.remove(&key.hash);
            }
        });
        Ok(())
    }

    fn decoded(&self, zstd: &[u8], raw_len: usize) -> Result<Bytes, NotDecoded> {
        let raw = raw_of(zstd).filter(|raw| raw.len() == raw_len).map(Bytes::from);
        raw.ok_or(NotDecoded { raw_len, detail: "not made by the fake" })
    }

    async fn purge(&self, purge: Purge) -> Result<Purged, StoreError> {
        self.trouble()?;
        Ok(self.with(|state| {
            let before = (state.blobs.len() + state.actions.len()) as u64;
            match purge {
                Purge::Blob(hash) => state.blobs.retain(|digest, _| digest.hash != hash),
                Purge::Action(hash) => drop(state.actions.remove(&hash)),
                Purge::Actions(which) => {
                    let State { actions, instances, .. } = state;
                    let instance = |hash: &Hash| instances.get(hash).copied().unwrap_or_default();
                    actions.retain(|hash, _| !which.covers(Origin { stored_s: 0, instance: instance(hash) }));
                }
            }
            Purged { examined: before, purged: before - (state.blobs.len() + state.actions.len()) as u64 }
        }))
    }
}

/// A valid zstd frame of `raw`, in blocks that are not compressed (RFC 8878, 3.1.1: no checksum, 4-byte content size).
pub fn zstd_of(raw: &[u8]) -> Bytes {
    let mut out = vec![0x28, 0xb5, 0x2f, 0xfd, 0xa0];
    out.extend((raw.len() as u32).to_le_bytes());
    let mut blocks: Vec<&[u8]> = raw.chunks(100 << 10).collect();
    if blocks.is_empty() {
        blocks.push(&[]);
    }
    let last = blocks.len() - 1;
    for (i, block) in blocks.into_iter().enumerate() {
        let header = (block.len() as u32) << 3 | u32::from(i == last);
        out.extend(&header.to_le_bytes()[..3]);
        out.extend(block);
    }
    out.into()
}

/// Undoes `zstd_of`, also several frames in a row. `None` for anything that it did not make.
pub fn raw_of(mut zstd: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    while !zstd.is_empty() {
        zstd = zstd.strip_prefix(&[0x28, 0xb5, 0x2f, 0xfd, 0xa0])?.get(4..)?;
        loop {
            let (header, rest) = zstd.split_at_checked(3)?;
            let header = u32::from_le_bytes([header[0], header[1], header[2], 0]);
            let (block, rest) = rest.split_at_checked((header >> 3) as usize)?;
            out.extend(block);
            zstd = rest;
            if header & 6 != 0 {
                return None;
            }
            if header & 1 == 1 {
                break;
            }
        }
    }
    Some(out)
}

fn decode(encoding: Encoding, body: &[u8], digest: Digest) -> Result<Vec<u8>, StoreError> {
    match encoding {
        Encoding::Identity => Ok(body.to_vec()),
        Encoding::Zstd => raw_of(body).ok_or(StoreError::BadZstd { digest, detail: "not made by the fake" }),
    }
}
