//! The readers of a flight: each gets what comes as long as it keeps up, and the rest from the cache.

use std::rc::Rc;

use bytes::Bytes;

use super::{Flight, Following};
use crate::pure::digest::Digest;
use crate::pure::flight::{Next, Phase};
use crate::rt;
use crate::rt::channel::{self, Sender};
use crate::shard::blob_disk::BlobDisk;
use crate::shard::codec::wrap_raw;
use crate::shard::worker::Worker;
use crate::store::{Accept, Blob, BlobStream, Encoding, Get, StoreError};

impl<D: BlobDisk> Worker<D> {
    /// The stream of one reader of a flight.
    pub(super) fn follow(&self, get: Get, flight: Rc<Flight>) -> Result<Option<Blob>, StoreError> {
        let start = get.offset.min(get.digest.size);
        let until = start.saturating_add(get.limit.unwrap_or(u64::MAX)).min(get.digest.size);
        let encoding = match get.accept {
            Accept::Identity | Accept::Any => Encoding::Identity,
            Accept::Zstd => Encoding::Zstd,
        };
        let (sender, pieces) = channel::bounded(0);
        let follower = Follower { worker: self.clone(), digest: get.digest, at: start, until, encoding, sender };
        if !self.gate().spawn(follower.run(flight)) {
            return Err(StoreError::Stopping);
        }
        let len = (encoding == Encoding::Identity).then_some(until - start);
        Ok(Some(Blob::Stream(BlobStream { encoding, len, pieces })))
    }
}

/// One reader of a flight.
struct Follower<D: BlobDisk> {
    worker: Worker<D>,
    digest: Digest,
    at: u64,
    until: u64,
    encoding: Encoding,
    sender: Sender<Result<Bytes, StoreError>>,
}

impl<D: BlobDisk> Follower<D> {
    async fn run(mut self, flight: Rc<Flight>) {
        let failed = rt::catch(self.follow(&flight)).await.unwrap_or(Some(StoreError::Unanswered));
        if let Some(error) = failed {
            let _ = self.sender.send(Err(error)).await;
        }
    }

    /// Sends what the reader wants of the flight, and then of the cache. The error that the reader is still to be told.
    async fn follow(&mut self, flight: &Flight) -> Option<StoreError> {
        match self.keep_up(flight).await {
            Some(Next::Behind) => self.read_on(flight).await,
            Some(Next::Failed) => Some(StoreError::Lost { digest: self.digest }),
            _ => None,
        }
    }

    /// Sends what comes, as long as this reader keeps up. `None` when the reader is gone.
    async fn keep_up(&mut self, flight: &Flight) -> Option<Next> {
        let _following = Following::new(flight);
        flight.foremost.set(flight.foremost.get().max(self.at));
        loop {
            let changed = flight.changed.wait();
            match flight.window.with(|window| window.next(self.at, self.until)) {
                Next::Piece(piece) => {
                    self.at += piece.len() as u64;
                    self.send(piece).await?;
                    flight.foremost.set(flight.foremost.get().max(self.at));
                    flight.changed.notify();
                }
                Next::Wait => changed.await,
                ended => return Some(ended),
            }
        }
    }

    /// Goes on from the cache, once the flight has landed.
    async fn read_on(&mut self, flight: &Flight) -> Option<StoreError> {
        let ended = |phase| !matches!(phase, Phase::Asking | Phase::Streaming);
        if flight.reached(ended).await != Phase::Landed {
            return Some(StoreError::Lost { digest: self.digest });
        }
        let limit = Some(self.until - self.at);
        let rest = Get { digest: self.digest, offset: self.at, limit, accept: Accept::Identity };
        let mut blob = match self.worker.get_here(rest).await {
            Ok(Some(blob)) => blob,
            Ok(None) => return Some(StoreError::Lost { digest: self.digest }),
            Err(error) => return Some(error),
        };
        loop {
            match blob.next_piece().await {
                Ok(Some(piece)) => self.send(piece).await?,
                Ok(None) => return None,
                Err(error) => return Some(error),
            }
        }
    }

    async fn send(&mut self, raw: Bytes) -> Option<()> {
        let piece = match self.encoding {
            Encoding::Identity => raw,
            Encoding::Zstd => wrap_raw(&raw).into(),
        };
        self.sender.send(Ok(piece)).await.ok()
    }
}
