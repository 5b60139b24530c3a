//! Entries that were stored over HTTP unchecked, as bazel-remote has them in a bucket: one object, of the bytes as they are.
//! Here they are a record of the core that owns their name, and a blob of the core that owns their content.

use bytes::Bytes;
use futures_util::stream;

use super::blob_disk::{BlobDisk, Older, Record, Stored};
use super::disk::Key;
use super::read_through::{Flight, Landing};
use super::router::Router;
use super::session::is_small;
use super::worker::Worker;
use crate::backend::http::{BodyError, OutBody};
use crate::backend::s3::{HEAD_TIME, Source};
use crate::backend::{Backend, ReadBody};
use crate::limits::{HTTP_RAW_LEN_MAX, SMALL_BLOB_LEN_MAX, WORK_SLICE_LEN};
use crate::pure::digest::Digest;
use crate::pure::flight::Phase;
use crate::pure::purge::Origin;
use crate::pure::raw_entry;
use crate::pure::sigv4::{Hasher, Payload};
use crate::pure::upload_queue::Upload;
use crate::rt;
use crate::store::{
    Accept, ActionKey, Blob, Encoding, Get, Opened, Put, Store, StoreError, Upload as _, UploadEnd, UploadKey,
};

impl<D: BlobDisk> Worker<D> {
    /// Brings an entry from the backend. The bytes' name is known at their end only: of more than a small blob the hash is
    /// taken first, and then the object is asked for once more, so that none is held whole.
    pub(super) async fn fly_raw(&self, backend: &Backend, name: &Upload, flight: &Flight, body: ReadBody) -> Landing {
        let origin = body.origin();
        if self.is_purged(origin) {
            body.ended_well();
            return Landing::Missed;
        }
        flight.enter(Phase::Streaming);
        let most = backend.settings().max_proxy_blob_size.min(HTTP_RAW_LEN_MAX as u64);
        let Some(router) = Router::of(self.clone()) else { return Landing::NotStored(StoreError::Stopping) };
        let (content, data) = match self.take_in(body, most).await {
            Ok(taken) => taken,
            Err(landing) => return landing,
        };
        let stored = match data {
            _ if content.size == 0 => Ok(()),
            Some(data) => {
                let put = Put { digest: content, encoding: Encoding::Identity, data: vec![data], admitted: true };
                router.put(put).await.map(drop)
            }
            None => match backend.fetch(name, rt::time::now() + HEAD_TIME).await {
                Some(body) => match self.pass_on(&router, content, body).await {
                    Ok(()) => Ok(()),
                    Err(Passing::Backend) => return Landing::Broken,
                    Err(Passing::Store(error)) => Err(error),
                },
                None => return Landing::Missed,
            },
        };
        let key = ActionKey { hash: name.digest.hash, size: None };
        let stored = match stored {
            // Why kept: see `fly_action`.
            Ok(()) => self.action_put_here(key, raw_entry::encode(content), origin, Older::Kept).await,
            failed => failed,
        };
        match stored {
            Ok(()) => Landing::Landed,
            // Somebody has replaced the object since it was read first.
            Err(StoreError::HashMismatch { .. } | StoreError::TooShort { .. } | StoreError::TooLong { .. }) => {
                Landing::Missed
            }
            Err(error) => Landing::NotStored(error),
        }
    }

    /// Reads an object to its end: its digest, and its bytes when they are few.
    async fn take_in(&self, mut body: ReadBody, most: u64) -> Result<(Digest, Option<Bytes>), Landing> {
        if body.content_length().is_some_and(|len| len > most) {
            return Err(Landing::Missed);
        }
        let (mut hasher, mut size, mut data) = (Hasher::default(), 0, Vec::new());
        loop {
            let piece = match body.next().await {
                Ok(Some(piece)) => piece,
                Ok(None) => break,
                Err(_) => return Err(Landing::Broken),
            };
            size += piece.len() as u64;
            if size > most {
                return Err(Landing::Missed);
            }
            for slice in piece.chunks(WORK_SLICE_LEN) {
                hasher.update(slice);
                self.breathe(slice.len()).await;
            }
            match size <= SMALL_BLOB_LEN_MAX as u64 {
                true => data.extend_from_slice(&piece),
                false => data = Vec::new(),
            }
        }
        body.ended_well();
        let digest = Digest { hash: hasher.finish(), size };
        Ok((digest, is_small(&digest).then(|| data.into())))
    }

    /// Stores an object's bytes on the core that owns them, as they come.
    async fn pass_on(&self, router: &Router<D>, content: Digest, mut body: ReadBody) -> Result<(), Passing> {
        let key = UploadKey::unnamed("", rt::random_u64(), content, Encoding::Identity);
        let mut upload = match router.open_upload(key, 0).await? {
            Opened::AlreadyPresent => return Ok(()),
            Opened::Ready(upload) => upload,
        };
        while let Some(piece) = body.next().await.map_err(|_| Passing::Backend)? {
            match upload.write(vec![piece]).await {
                Ok(()) => {}
                Err(UploadEnd::AlreadyPresent) => return Ok(()),
                Err(UploadEnd::Failed(error)) => return Err(error.into()),
            }
        }
        body.ended_well();
        upload.finish().await?;
        Ok(())
    }

    /// The object of an entry; `None` when its bytes are not here any more.
    pub(super) async fn raw_object(&self, record: &Record) -> Option<RawObject<D>> {
        let content = raw_entry::content_of(&record.data)?;
        let router = Router::of(self.clone())?;
        let is_here = content.size == 0 || router.find_missing(vec![content]).await == Ok(vec![false]);
        is_here.then(|| RawObject { router, content, origin: record.origin })
    }

    /// Counts an entry's bytes as used.
    pub(super) async fn keep_raw(&self, key: &Key) {
        if let Ok(Some(Stored::Small(record))) = self.disk().read(key).await {
            self.raw_object(&record).await;
        }
    }
}

/// Why bytes were not passed on.
enum Passing {
    Backend,
    Store(StoreError),
}

impl From<StoreError> for Passing {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// The object of an entry: its bytes are read, from whichever core has them, while they are sent.
pub(super) struct RawObject<D: BlobDisk> {
    router: Router<D>,
    content: Digest,
    origin: Origin,
}

impl<D: BlobDisk> Source for RawObject<D> {
    fn len(&self) -> u64 {
        self.content.size
    }

    fn payload(&self) -> Option<Payload> {
        Some(Payload::Known(self.content.hash))
    }

    fn origin(&self) -> Option<Origin> {
        Some(self.origin)
    }

    fn open(&self, offset: u64, len: u64) -> OutBody {
        if len == 0 {
            return OutBody::empty();
        }
        let get = Get { digest: self.content, offset, limit: Some(len), accept: Accept::Identity };
        let pieces = stream::unfold(Reading::Begins(self.router.clone(), get), |mut reading| async move {
            let next = reading.next().await.map_err(|error| BodyError(error.to_string()));
            next.transpose().map(|piece| (piece, reading))
        });
        OutBody::Stream { pieces: Box::pin(pieces), left: len }
    }
}

/// A blob that is being read.
enum Reading<D: BlobDisk> {
    Begins(Router<D>, Get),
    Goes(Blob),
}

impl<D: BlobDisk> Reading<D> {
    async fn next(&mut self) -> Result<Option<Bytes>, StoreError> {
        if let Self::Begins(router, get) = self {
            let found = router.get_here(*get).await?;
            *self = Self::Goes(found.ok_or(StoreError::Lost { digest: get.digest })?);
        }
        match self {
            Self::Begins(..) => Ok(None),
            Self::Goes(blob) => blob.next_piece().await,
        }
    }
}
