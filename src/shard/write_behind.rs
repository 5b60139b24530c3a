//! Writing behind: what was stored here goes to the backend later, by the hand of the core that holds it. An upload names
//! a record and holds nothing until it runs; then it reads the record as often as a retry needs.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;

use bytes::Bytes;
use futures_util::stream;
use rustc_hash::FxHashMap;

use super::blob_disk::{BlobDisk, FrameReader, Record, Stored};
use super::codec::{wrap_raw, wrapped_len};
use super::disk::{Codec, Key};
use super::worker::Worker;
use crate::backend::http::{BodyError, OutBody};
use crate::backend::s3::{InMemory, Source};
use crate::backend::settings::ObjectFormat;
use crate::backend::{Backend, Records, UploadEnd};
use crate::limits::{FRAME_LEN, READ_AHEAD_FRAMES};
use crate::pure::casblob;
use crate::pure::digest::Digest;
use crate::pure::sigv4::{self, Payload};
use crate::pure::upload_queue::{ObjectKind, Upload};
use crate::rt;
use crate::rt::local::{Event, Local};
use crate::store::{ActionKey, StoreError};

impl<D: BlobDisk> Records for Worker<D> {
    fn upload(&self, backend: Backend, upload: Upload) -> Pin<Box<dyn Future<Output = UploadEnd>>> {
        let worker = self.clone();
        Box::pin(async move {
            let _sending = worker.sending().begin(&upload);
            // Dropped at a stop, so that it holds nothing that the disk waits for.
            match rt::time::race(
                Box::pin(worker.scoped(upload.scope.clone()).upload(&backend, &upload)),
                backend.stopped(),
            )
            .await
            {
                rt::time::Either::Left(end) => end,
                rt::time::Either::Right(()) => UploadEnd::Failed,
            }
        })
    }

    fn keep(&self, uploads: Vec<Upload>) -> Pin<Box<dyn Future<Output = ()>>> {
        let worker = self.clone();
        Box::pin(async move {
            for upload in uploads {
                let key = key_of(&upload);
                worker.disk().ready(&key.hash).await;
                if worker.disk().contains(&key) && upload.scope.is_raw() {
                    worker.scoped(upload.scope).keep_raw(&key).await;
                }
            }
        })
    }
}

impl<D: BlobDisk> Worker<D> {
    /// To be called when all is verified, before anything is stored: the backend should then have it. Returns when that is
    /// noted on disk, so that no record outlives the process of which nobody knows that the backend lacks it. `None` without
    /// a backend.
    pub(super) async fn announce(&self, upload: Upload) -> Option<Intent<'_>> {
        // See `Scope::raw`.
        let is_part = upload.kind == ObjectKind::Cas && upload.scope.is_raw();
        let backend = self.backend().filter(|_| !is_part)?;
        let intent = Intent::new(self.intents(), upload.clone());
        backend.wants(upload).await;
        Some(intent)
    }

    /// Whether the backend is still to get this version of an action. Not asked of what is raw: who drops that has not found
    /// its bytes, without which there is nothing to send.
    pub(super) async fn owes(&self, action: &ActionKey, version: u64) -> Result<bool, StoreError> {
        let Some(backend) = self.backend().filter(|_| !self.scope().is_raw()) else { return Ok(false) };
        let stored = self.read_action(&self.action_key(action)).await?;
        let Some(record) = stored.filter(|record| record.version == version) else { return Ok(false) };
        // Why the record's size: by that it was announced, and not every protocol carries it.
        let digest = Digest { hash: action.hash, size: record.key_size };
        Ok(backend.is_owed(self.name(ObjectKind::Action, digest)).await)
    }

    async fn upload(&self, backend: &Backend, upload: &Upload) -> UploadEnd {
        // Why first: while the backend is not well no disk is read in vain.
        if !backend.takes_uploads() {
            return UploadEnd::BreakerOpen;
        }
        let key = key_of(upload);
        self.disk().ready(&key.hash).await;
        // Why: it may have been announced just now. What is not there then was not stored in the end.
        self.intents().settled(upload).await;
        let format = backend.settings().format;
        match self.disk().read(&key).await {
            Ok(Some(Stored::Small(record))) if upload.scope.is_raw() => match self.raw_object(&record).await {
                Some(source) => backend.upload(upload, &source).await,
                None => UploadEnd::Lost,
            },
            Ok(Some(Stored::Small(record))) => match self.small_object(upload, format, record) {
                Some(source) => backend.upload(upload, &source).await,
                None => UploadEnd::Lost,
            },
            Ok(Some(Stored::Large(blob))) => match LargeObject::new(self, upload.digest, format, blob) {
                Some(source) => backend.upload(upload, &source).await,
                None => UploadEnd::Failed,
            },
            Ok(None) => UploadEnd::Lost,
            // What is gone for good is found to be so by the next try.
            Err(_) => UploadEnd::Failed,
        }
    }

    /// The object of a record; `None` when its bytes make no sense.
    fn small_object(&self, upload: &Upload, format: ObjectFormat, record: Record) -> Option<InMemory> {
        let raw_len = record.raw_len as usize;
        let raw = |record: &Record| match record.codec {
            Codec::Raw => Some(record.data.clone()),
            Codec::Zstd => self.codecs().decode(&record.data, raw_len).ok().map(Bytes::from),
        };
        match (upload.kind, format) {
            (ObjectKind::Action, _) => {
                let data = raw(&record)?;
                let payload = Some(Payload::Known(sigv4::sha256(&data)));
                Some(InMemory { data, payload, origin: Some(record.origin) })
            }
            (ObjectKind::Cas, ObjectFormat::Raw) => {
                let payload = Some(Payload::Known(upload.digest.hash));
                Some(InMemory { data: raw(&record)?, payload, origin: None })
            }
            (ObjectKind::Cas, ObjectFormat::Casblob) => {
                let frame = match record.codec {
                    Codec::Zstd => record.data,
                    Codec::Raw => wrap_raw(&record.data).into(),
                };
                let lens = std::iter::once(frame.len() as u64);
                let (mut object, _) = casblob::encode(upload.digest.size, FRAME_LEN as u32, lens)?;
                object.extend_from_slice(&frame);
                let data = Bytes::from(object);
                let payload = Some(Payload::Known(sigv4::sha256(&data)));
                Some(InMemory { data, payload, origin: None })
            }
        }
    }
}

/// Uploads of this core that run, by their names. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Sending(Rc<RefCell<Vec<Upload>>>, Event);

/// One of them, as long as this lives.
pub(super) struct Sent(Sending, Upload);

impl Sending {
    fn begin(&self, upload: &Upload) -> Sent {
        self.0.borrow_mut().push(upload.clone());
        Sent(self.clone(), upload.clone())
    }

    /// Waits until no upload of this name runs, whatever its size.
    pub async fn ended(&self, name: &Upload) {
        let is_it =
            |one: &Upload| one.kind == name.kind && one.digest.hash == name.digest.hash && one.scope == name.scope;
        loop {
            let changed = self.1.wait();
            if !self.0.borrow().iter().any(is_it) {
                return;
            }
            changed.await;
        }
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let Self(sending, upload) = self;
        let mut running = sending.0.borrow_mut();
        if let Some(at) = running.iter().position(|one| one == upload) {
            running.swap_remove(at);
        }
        sending.1.notify();
    }
}

/// What the record of an upload is found by.
fn key_of(upload: &Upload) -> Key {
    let (kind, hash) = match upload.kind {
        ObjectKind::Cas => upload.scope.cas_key(&upload.digest.hash),
        ObjectKind::Action => upload.scope.action_key(&upload.digest.hash),
    };
    Key { kind, hash, size: upload.digest.size }
}

/// Records of this core that are announced and about to be stored. An upload of one waits until it has been.
pub(super) struct Intents {
    by_name: Local<FxHashMap<Upload, usize>>,
    ended: Event,
}

impl Default for Intents {
    fn default() -> Self {
        Self { by_name: Local::new(FxHashMap::default()), ended: Event::default() }
    }
}

impl Intents {
    async fn settled(&self, upload: &Upload) {
        loop {
            let ended = self.ended.wait();
            if !self.by_name.with(|by_name| by_name.contains_key(upload)) {
                return;
            }
            ended.await;
        }
    }
}

/// A record that is about to be stored, or gives up.
pub(super) struct Intent<'a> {
    all: &'a Intents,
    upload: Upload,
}

impl<'a> Intent<'a> {
    fn new(all: &'a Intents, upload: Upload) -> Self {
        all.by_name.with(|by_name| *by_name.entry(upload.clone()).or_default() += 1);
        Self { all, upload }
    }
}

impl Drop for Intent<'_> {
    fn drop(&mut self) {
        self.all.by_name.with(|by_name| {
            let count = by_name.get_mut(&self.upload).expect("counted since it was made");
            *count -= 1;
            if *count == 0 {
                by_name.remove(&self.upload);
            }
        });
        self.all.ended.notify();
    }
}

/// The object of a large blob: its frames are read while they are sent.
struct LargeObject<D: BlobDisk>(Rc<Inner<D>>);

struct Inner<D: BlobDisk> {
    worker: Worker<D>,
    digest: Digest,
    format: ObjectFormat,
    blob: D::Large,
    /// Of a casblob; empty else.
    header: Bytes,
    len: u64,
}

impl<D: BlobDisk> LargeObject<D> {
    /// `None` when the format cannot hold it.
    fn new(worker: &Worker<D>, digest: Digest, format: ObjectFormat, blob: D::Large) -> Option<Self> {
        let (header, len) = match format {
            ObjectFormat::Raw => (Bytes::new(), digest.size),
            ObjectFormat::Casblob => {
                let lens = (0..blob.frame_count()).map(|frame| match blob.codec(frame) {
                    Codec::Zstd => blob.stored_len(frame) as u64,
                    Codec::Raw => wrapped_len(blob.stored_len(frame)) as u64,
                });
                let (header, len) = casblob::encode(digest.size, FRAME_LEN as u32, lens)?;
                (header.into(), len)
            }
        };
        Some(Self(Rc::new(Inner { worker: worker.clone(), digest, format, blob, header, len })))
    }
}

impl<D: BlobDisk> Source for LargeObject<D> {
    fn len(&self) -> u64 {
        self.0.len
    }

    fn payload(&self) -> Option<Payload> {
        match self.0.format {
            ObjectFormat::Raw => Some(Payload::Known(self.0.digest.hash)),
            ObjectFormat::Casblob => None,
        }
    }

    fn open(&self, offset: u64, len: u64) -> OutBody {
        let cursor = Cursor { object: self.0.clone(), skip: offset, left: len, next: None, ready: Vec::new() };
        let pieces = stream::unfold(cursor, |mut cursor| async move {
            match cursor.piece().await {
                Ok(Some(piece)) => Some((Ok(piece), cursor)),
                Ok(None) => None,
                Err(error) => Some((Err(error), cursor)),
            }
        });
        OutBody::Stream { pieces: Box::pin(pieces), left: len }
    }
}

/// A place in an object that is being sent.
struct Cursor<D: BlobDisk> {
    object: Rc<Inner<D>>,
    /// Bytes still to be passed over.
    skip: u64,
    /// Bytes still to be given.
    left: u64,
    /// The frame that is read next; `None` for the header.
    next: Option<usize>,
    /// Pieces that were read, the last one first.
    ready: Vec<Bytes>,
}

impl<D: BlobDisk> Cursor<D> {
    async fn piece(&mut self) -> Result<Option<Bytes>, BodyError> {
        while self.left > 0 {
            let Some(mut piece) = self.ready.pop() else {
                if !self.read().await? {
                    return Ok(None);
                }
                continue;
            };
            let passed = self.skip.min(piece.len() as u64);
            self.skip -= passed;
            let _ = piece.split_to(passed as usize);
            piece.truncate(self.left.min(piece.len() as u64) as usize);
            if !piece.is_empty() {
                self.left -= piece.len() as u64;
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    /// Reads some more; false at the end. What is to be passed over as a whole is not read.
    async fn read(&mut self) -> Result<bool, BodyError> {
        let object = self.object.clone();
        let Some(mut first) = self.next else {
            self.ready.push(object.header.clone());
            self.next = Some(0);
            return Ok(true);
        };
        while first < object.blob.frame_count() && self.skip >= object.frame_len(first) {
            self.skip -= object.frame_len(first);
            first += 1;
        }
        if first == object.blob.frame_count() {
            return Ok(false);
        }
        let frames = object.blob.read_frames(first, READ_AHEAD_FRAMES).await;
        let frames = frames.map_err(|error| BodyError(error.to_string()))?;
        if frames.list.is_empty() {
            return Err(BodyError("the blob ends too early".into()));
        }
        self.next = Some(first + frames.list.len());
        for (number, (codec, stored)) in frames.split().enumerate() {
            self.ready.push(object.frame(first + number, codec, stored)?);
        }
        self.ready.reverse();
        Ok(true)
    }
}

impl<D: BlobDisk> Inner<D> {
    fn raw_len(&self, frame: usize) -> u64 {
        (self.digest.size - frame as u64 * FRAME_LEN as u64).min(FRAME_LEN as u64)
    }

    /// Bytes of a frame in the object.
    fn frame_len(&self, frame: usize) -> u64 {
        match (self.format, self.blob.codec(frame)) {
            (ObjectFormat::Raw, _) => self.raw_len(frame),
            (ObjectFormat::Casblob, Codec::Zstd) => self.blob.stored_len(frame) as u64,
            (ObjectFormat::Casblob, Codec::Raw) => wrapped_len(self.blob.stored_len(frame)) as u64,
        }
    }

    /// A frame as it stands in the object.
    fn frame(&self, frame: usize, codec: Codec, stored: Bytes) -> Result<Bytes, BodyError> {
        Ok(match (self.format, codec) {
            (ObjectFormat::Raw, Codec::Raw) | (ObjectFormat::Casblob, Codec::Zstd) => stored,
            (ObjectFormat::Casblob, Codec::Raw) => wrap_raw(&stored).into(),
            (ObjectFormat::Raw, Codec::Zstd) => {
                let raw = self.worker.codecs().decode(&stored, self.raw_len(frame) as usize);
                raw.map_err(|_| BodyError("a frame at rest is not valid zstd".into()))?.into()
            }
        })
    }
}
