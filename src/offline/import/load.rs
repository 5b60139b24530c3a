//! One file after the other into the cache, as an upload.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::FILE_COST;
use super::names::{Form, Space};
use super::report::{Reason, Report};
use super::source::Entry;
use crate::limits::{ACTION_RESULT_LEN_MAX, FRAME_LEN, HTTP_RAW_LEN_MAX, SMALL_BLOB_LEN_MAX};
use crate::offline::crew::Progress;
use crate::pure::casblob::Unwrap;
use crate::pure::digest::{Digest, EMPTY_HASH, Hash};
use crate::pure::purge::InstanceTag;
use crate::pure::raw_entry;
use crate::pure::scope::Scope;
use crate::rt;
use crate::rt::signal::Shutdown;
use crate::service::action_cache::{StoreResultError, store_serialized_result};
use crate::store::{ActionKey, Encoding, Opened, Put, Store, StoreError, Upload, UploadEnd, UploadKey};

/// Bytes that one read brings.
const READ_LEN: usize = 4 * FRAME_LEN;

/// What became of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    Stored,
    /// It was there.
    Present,
    Skipped(Reason),
}

/// Loads files on one core.
pub struct Loader<S> {
    store: S,
    /// Bytes.
    max_blob_len: u64,
    from: PathBuf,
    progress: Arc<Progress>,
    stop: Shutdown,
}

/// Why a file is not stored: for its own sake, or because nothing can be stored any more.
enum Trouble {
    File(Reason),
    Store(StoreError),
}

impl<S: Store> Loader<S> {
    pub fn new(store: S, max_blob_len: u64, from: PathBuf, progress: Arc<Progress>, stop: Shutdown) -> Self {
        Self { store, max_blob_len, from, progress, stop }
    }

    /// Loads `entries` in their order, until told to stop or the store fails.
    pub async fn lane(&self, entries: Vec<Entry>) -> Report {
        let mut report = Report::default();
        for entry in entries {
            if self.stop.is_triggered() || report.fatal.is_some() {
                break;
            }
            let cost = FILE_COST + entry.len;
            self.with_older(entry, &mut report).await;
            self.progress.add(cost);
            self.progress.add_file();
        }
        report
    }

    /// Loads one entry, or an older file of the same action where this one is damaged.
    async fn with_older(&self, mut entry: Entry, report: &mut Report) {
        let mut older = std::mem::take(&mut entry.older).into_iter();
        let mut next = Some(entry);
        while let Some(entry) = next {
            next = None;
            let path = entry.path(&self.from);
            match self.load(&entry, &path).await {
                Ok(Outcome::Stored) => report.stored(entry.space, entry.len),
                Ok(Outcome::Present) => report.present += 1,
                Ok(Outcome::Skipped(reason)) | Err(Trouble::File(reason)) => {
                    self.progress.note();
                    report.skip(reason, &path);
                    next = older.next();
                }
                Err(Trouble::Store(error)) => {
                    report.fatal = Some(error);
                    self.stop.trigger();
                }
            }
        }
        for entry in older {
            report.skip(Reason::Superseded, &entry.path(&self.from));
        }
    }

    async fn load(&self, entry: &Entry, path: &Path) -> Result<Outcome, Trouble> {
        match (entry.space, entry.form) {
            (Space::Cas, Form::Casblob(size)) => self.blob(Digest { hash: entry.hash, size }, true, path).await,
            (Space::Cas, Form::Plain) if entry.hash == EMPTY_HASH && entry.len == 0 => Ok(Outcome::Present),
            (Space::Cas, Form::Plain) => self.blob(Digest { hash: entry.hash, size: entry.len }, false, path).await,
            (Space::Action, _) => self.action(entry, path).await,
            (Space::Raw, _) => self.raw(entry, path).await,
        }
    }

    async fn blob(&self, digest: Digest, is_casblob: bool, path: &Path) -> Result<Outcome, Trouble> {
        if digest.size == 0 || digest.hash == EMPTY_HASH {
            return Ok(Outcome::Skipped(Reason::Damaged));
        }
        if digest.size > self.max_blob_len {
            return Ok(Outcome::Skipped(Reason::TooLarge));
        }
        if self.store.find_missing(vec![digest]).await? == [false] {
            return Ok(Outcome::Present);
        }
        let mut pieces = Pieces::open(path, is_casblob).await?;
        if digest.size <= SMALL_BLOB_LEN_MAX as u64 {
            // A small blob's zstd form is at most a little longer than the blob.
            let mut data = Vec::new();
            let mut left = 2 * SMALL_BLOB_LEN_MAX;
            while let Some(piece) = pieces.next(&digest).await? {
                left = left.checked_sub(piece.len()).ok_or(Trouble::File(Reason::Damaged))?;
                data.push(piece);
            }
            let put = Put { digest, encoding: pieces.encoding, data, admitted: false };
            self.store.put(put).await?;
            return Ok(Outcome::Stored);
        }
        // The encoding is known once the first piece is here.
        let Some(first) = pieces.next(&digest).await? else { return Ok(Outcome::Skipped(Reason::Damaged)) };
        let key = UploadKey { instance: "".into(), uuid: "import".into(), digest, encoding: pieces.encoding };
        let mut upload = match self.store.open_upload(key, 0).await? {
            Opened::AlreadyPresent => return Ok(Outcome::Present),
            Opened::Ready(upload) => upload,
        };
        let mut piece = Some(first);
        while let Some(data) = piece {
            match upload.write(vec![data]).await {
                Ok(()) => {}
                Err(UploadEnd::AlreadyPresent) => return Ok(Outcome::Present),
                Err(UploadEnd::Failed(error)) => return Err(error.into()),
            }
            piece = pieces.next(&digest).await?;
        }
        upload.finish().await?;
        Ok(Outcome::Stored)
    }

    async fn action(&self, entry: &Entry, path: &Path) -> Result<Outcome, Trouble> {
        let key = ActionKey { hash: entry.hash, size: None };
        if self.store.action_get(key).await?.is_some() {
            return Ok(Outcome::Present);
        }
        // Contents that stand inline are stored as blobs of their own.
        let data = self.whole(entry, path, 4 * ACTION_RESULT_LEN_MAX).await?;
        match store_serialized_result(&self.store, key, InstanceTag::UNKNOWN, data).await {
            Ok(_) => Ok(Outcome::Stored),
            Err(StoreResultError::Store(error)) => Err(error.into()),
            Err(StoreResultError::TooLong { .. }) => Ok(Outcome::Skipped(Reason::TooLarge)),
            Err(StoreResultError::Unparsable(_) | StoreResultError::Invalid(_)) => {
                Ok(Outcome::Skipped(Reason::Damaged))
            }
        }
    }

    /// What was stored over HTTP unchecked may be anything: it is kept as the server keeps it.
    async fn raw(&self, entry: &Entry, path: &Path) -> Result<Outcome, Trouble> {
        let (store, key) = (self.store.scoped(&Scope::raw()), ActionKey { hash: entry.hash, size: None });
        if store.action_get(key).await?.is_some() {
            return Ok(Outcome::Present);
        }
        let data = self.whole(entry, path, HTTP_RAW_LEN_MAX).await?;
        let digest = Digest { hash: Hash(Sha256::digest(&data).into()), size: data.len() as u64 };
        if digest.size > self.max_blob_len {
            return Ok(Outcome::Skipped(Reason::TooLarge));
        }
        let put = Put { digest, encoding: Encoding::Identity, data: vec![data], admitted: true };
        store.put(put).await?;
        store.action_put(key, raw_entry::encode(digest), InstanceTag::UNKNOWN).await?;
        Ok(Outcome::Stored)
    }

    /// The bytes of a file that has `max` at most. None is empty: bazel-remote names the worker in each result, and an
    /// empty file was left by a crash.
    async fn whole(&self, entry: &Entry, path: &Path, max: usize) -> Result<Bytes, Trouble> {
        if entry.len == 0 {
            return Err(Trouble::File(Reason::Damaged));
        }
        if entry.len > max as u64 {
            return Err(Trouble::File(Reason::TooLarge));
        }
        let mut pieces = Pieces::open(path, false).await?;
        let mut data = Vec::with_capacity(entry.len as usize);
        while let Some(piece) = pieces.read().await? {
            data.extend_from_slice(&piece);
        }
        Ok(data.into())
    }
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Self::File(match error {
            StoreError::HashMismatch { .. } => Reason::WrongHash,
            StoreError::TooShort { .. } | StoreError::TooLong { .. } | StoreError::BadZstd { .. } => Reason::Damaged,
            StoreError::BlobTooLarge { .. } => Reason::TooLarge,
            StoreError::NoSpace { .. } => Reason::NoSpace,
            error => return Self::Store(error),
        })
    }
}

impl From<io::Error> for Trouble {
    fn from(_: io::Error) -> Self {
        Self::File(Reason::Unreadable)
    }
}

/// The content of a file, piece by piece, read off the executor.
struct Pieces {
    file: Option<File>,
    /// Only of a casblob: its header on the way.
    unwrap: Option<Unwrap>,
    encoding: Encoding,
}

impl Pieces {
    async fn open(path: &Path, is_casblob: bool) -> io::Result<Self> {
        let path = path.to_owned();
        let file = rt::blocking(move || rt::file::open_unmarked(&path)).await.map_err(io::Error::other)??;
        let unwrap = is_casblob.then(Unwrap::default);
        Ok(Self { file: Some(file), unwrap, encoding: Encoding::Identity })
    }

    /// The next bytes of the file; `None` at its end.
    async fn read(&mut self) -> io::Result<Option<Bytes>> {
        let Some(mut file) = self.file.take() else { return Ok(None) };
        let (file, data) = rt::blocking(move || {
            let mut data = Vec::new();
            let read = (&mut file).take(READ_LEN as u64).read_to_end(&mut data);
            read.map(|_| (file, data))
        })
        .await
        .map_err(io::Error::other)??;
        self.file = Some(file);
        Ok((!data.is_empty()).then(|| data.into()))
    }

    /// The next bytes of content.
    async fn next(&mut self, digest: &Digest) -> Result<Option<Bytes>, Trouble> {
        loop {
            let Some(mut data) = self.read().await? else {
                // A header that is not whole, or is all that there is.
                let is_cut = self.unwrap.is_some();
                return if is_cut { Err(Trouble::File(Reason::Damaged)) } else { Ok(None) };
            };
            let Some(unwrap) = &mut self.unwrap else { return Ok(Some(data)) };
            let header = unwrap.header_bytes(&data).map_err(|_| Trouble::File(Reason::Damaged))?;
            let content = data.split_off(header);
            if content.is_empty() {
                continue;
            }
            let header = unwrap.header().filter(|header| header.raw_size == digest.size);
            self.encoding = header.ok_or(Trouble::File(Reason::Damaged))?.encoding;
            self.unwrap = None;
            return Ok(Some(content));
        }
    }
}
