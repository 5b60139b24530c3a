//! The bytes of a stored blob in the form that a reader takes, from the offset that it wants.

use std::ops::Range;

use bytes::Bytes;

use super::blob_disk::{BlobDisk, FrameReader, Record};
use super::codec::{wrap_raw, wrapped_len};
use super::disk::{Codec, DiskError};
use super::worker::{Worker, store_error};
use crate::limits::{FRAME_LEN, READ_AHEAD_FRAMES, READ_AT_ONCE_FRAMES};
use crate::pure::digest::Digest;
use crate::rt;
use crate::rt::channel::{self, Sender};
use crate::store::{Accept, Blob, BlobStream, Encoding, Get, StoreError};

impl<D: BlobDisk> Worker<D> {
    /// The asked part of a small blob.
    pub(super) fn small_blob(&self, get: &Get, record: Record) -> Result<Option<Blob>, StoreError> {
        let span = Span::of(get);
        let frame = Frame { codec: record.codec, stored: record.data, raw_len: get.digest.size as usize };
        let encoding = span.encoding(get.accept, record.codec);
        match self.piece(frame, span.start as usize..span.end as usize, encoding) {
            Ok(data) => Ok(Some(Blob::Whole { data, encoding })),
            Err(DiskError::Damaged) => {
                self.forget_damaged(&self.cas_key(&get.digest));
                Ok(None)
            }
            Err(error) => Err(store_error(error, get.digest)),
        }
    }

    /// The asked part of a large blob: its first piece is read here, so that damage there is a plain miss.
    pub(super) async fn large_blob(&self, get: Get, blob: D::Large) -> Result<Option<Blob>, StoreError> {
        let span = Span::of(&get);
        let first = ((span.start / FRAME_LEN as u64) as usize).min(blob.frame_count() - 1);
        let encoding = span.encoding(get.accept, blob.codec(first));
        let mut reader = Reader { worker: self.clone(), digest: get.digest, blob, span, encoding, next: first };
        let pieces = match reader.read().await {
            Ok(pieces) => pieces,
            Err(DiskError::Damaged) => return Ok(None),
            Err(error) => return Err(store_error(error, get.digest)),
        };
        if reader.is_done()
            && let [piece] = &pieces[..]
        {
            return Ok(Some(Blob::Whole { data: piece.clone(), encoding }));
        }
        let len = reader.encoded_len();
        let (sender, receiver) = channel::bounded(0);
        if !self.gate().spawn_bulk(reader.run(pieces, sender)) {
            return Err(StoreError::Stopping);
        }
        Ok(Some(Blob::Stream(BlobStream { encoding, len, pieces: receiver })))
    }

    /// The raw bytes `range` of one frame, as `encoding` wants them.
    fn piece(&self, frame: Frame, range: Range<usize>, encoding: Encoding) -> Result<Bytes, DiskError> {
        let whole = range == (0..frame.raw_len);
        match (frame.codec, encoding) {
            (Codec::Zstd, Encoding::Zstd) if whole => Ok(frame.stored),
            (Codec::Zstd, encoding) => {
                let raw = self.codecs().decode(&frame.stored, frame.raw_len).map_err(|_| DiskError::Damaged)?;
                if raw.len() != frame.raw_len {
                    return Err(DiskError::Damaged);
                }
                Ok(match encoding {
                    Encoding::Identity => Bytes::from(raw).slice(range),
                    Encoding::Zstd => self.codecs().frame_of(&raw[range]).into(),
                })
            }
            (Codec::Raw, _) if frame.stored.len() != frame.raw_len => Err(DiskError::Damaged),
            (Codec::Raw, Encoding::Identity) => Ok(frame.stored.slice(range)),
            (Codec::Raw, Encoding::Zstd) => Ok(wrap_raw(&frame.stored[range]).into()),
        }
    }
}

/// One frame as stored; a small blob is one.
struct Frame {
    codec: Codec,
    stored: Bytes,
    raw_len: usize,
}

/// Which raw bytes are wanted, in the blob's own count.
#[derive(Clone, Copy)]
struct Span {
    start: u64,
    end: u64,
    whole: bool,
}

impl Span {
    fn of(get: &Get) -> Self {
        let start = get.offset.min(get.digest.size);
        let end = start.saturating_add(get.limit.unwrap_or(u64::MAX)).min(get.digest.size);
        Self { start, end, whole: end - start == get.digest.size }
    }

    /// What is sent of content whose first frame stands as `codec`.
    fn encoding(&self, accept: Accept, codec: Codec) -> Encoding {
        match accept {
            Accept::Identity => Encoding::Identity,
            Accept::Zstd => Encoding::Zstd,
            // A part of a frame would have to be encoded anew.
            Accept::Any if self.whole && codec == Codec::Zstd => Encoding::Zstd,
            Accept::Any => Encoding::Identity,
        }
    }
}

/// A large blob on its way to a reader.
struct Reader<D: BlobDisk> {
    worker: Worker<D>,
    digest: Digest,
    blob: D::Large,
    span: Span,
    encoding: Encoding,
    /// The frame that comes next.
    next: usize,
}

impl<D: BlobDisk> Reader<D> {
    /// Sends `pieces` and all that follow. Ends when the receiver is gone.
    async fn run(self, pieces: Vec<Bytes>, mut sender: Sender<Result<Bytes, StoreError>>) {
        if rt::catch(self.send(pieces, &mut sender)).await.is_err() {
            // Why said: where the length was not announced, a stream that just ends looks whole.
            let _ = sender.send(Err(StoreError::Unanswered)).await;
        }
    }

    /// Is one read ahead of the receiver.
    async fn send(mut self, mut pieces: Vec<Bytes>, sender: &mut Sender<Result<Bytes, StoreError>>) {
        loop {
            for piece in pieces {
                if sender.send(Ok(piece)).await.is_err() {
                    return;
                }
            }
            if self.is_done() || sender.room().await.is_err() {
                return;
            }
            pieces = match self.read().await {
                Ok(pieces) => pieces,
                Err(error) => {
                    let _ = sender.send(Err(store_error(error, self.digest))).await;
                    return;
                }
            };
        }
    }

    /// Bytes that all pieces will have. Known of frames that are passed through or wrapped, not of those encoded anew.
    fn encoded_len(&self) -> Option<u64> {
        let (raw_len, size) = (self.span.end - self.span.start, self.digest.size);
        match self.encoding {
            Encoding::Identity => Some(raw_len),
            Encoding::Zstd if !self.span.whole => None,
            Encoding::Zstd => {
                let wire_len = |frame| match self.blob.codec(frame) {
                    Codec::Zstd => self.blob.stored_len(frame),
                    Codec::Raw => wrapped_len((size - self.frame_start(frame)).min(FRAME_LEN as u64) as usize),
                };
                Some((0..self.blob.frame_count()).map(|frame| wire_len(frame) as u64).sum())
            }
        }
    }

    fn is_done(&self) -> bool {
        self.frame_start(self.next) >= self.span.end
    }

    /// The next few pieces, checked and encoded.
    async fn read(&mut self) -> Result<Vec<Bytes>, DiskError> {
        let end = self.span.end.div_ceil(FRAME_LEN as u64) as usize;
        let left = end.saturating_sub(self.next).max(1);
        let is_short = end - (self.span.start / FRAME_LEN as u64) as usize <= READ_AT_ONCE_FRAMES;
        let most = if is_short && self.passes(self.blob.codec(self.next)) { left } else { left.min(READ_AHEAD_FRAMES) };
        let frames = self.blob.read_frames(self.next, most).await?;
        let (first, count) = (self.next, frames.list.len());
        self.next += count;
        let range = self.within(first, count);
        let raw_len = (self.digest.size.min(self.frame_start(self.next)) - self.frame_start(first)) as usize;
        if count > 1 && frames.list.iter().all(|&(codec, _)| self.passes(codec)) {
            match self.encoding {
                Encoding::Identity if frames.bytes.len() == raw_len => return Ok(vec![frames.bytes.slice(range)]),
                Encoding::Zstd if range == (0..raw_len) => return Ok(vec![frames.bytes]),
                _ => {}
            }
        }
        let mut pieces = Vec::with_capacity(count);
        for (frame, (codec, stored)) in (first..).zip(frames.split()) {
            let raw_len = (self.digest.size - self.frame_start(frame)).min(FRAME_LEN as u64) as usize;
            let is_transcoded = codec == Codec::Zstd && self.encoding == Encoding::Identity;
            let piece = self.worker.piece(Frame { codec, stored, raw_len }, self.within(frame, 1), self.encoding);
            if piece == Err(DiskError::Damaged) {
                self.worker.forget_damaged(&self.worker.cas_key(&self.digest));
            }
            pieces.push(piece?);
            if is_transcoded {
                self.worker.breathe(raw_len).await;
            }
        }
        if pieces.is_empty() { Err(DiskError::Damaged) } else { Ok(pieces) }
    }

    /// Frames of this codec are sent as they stand, where they are wanted as a whole.
    fn passes(&self, codec: Codec) -> bool {
        matches!((codec, self.encoding), (Codec::Raw, Encoding::Identity) | (Codec::Zstd, Encoding::Zstd))
    }

    /// Which of the raw bytes of these frames are wanted.
    fn within(&self, first: usize, count: usize) -> Range<usize> {
        let (start, end) = (self.frame_start(first), self.frame_start(first + count).min(self.digest.size));
        let within = |at: u64| (at.clamp(start, end) - start) as usize;
        within(self.span.start)..within(self.span.end)
    }

    fn frame_start(&self, frame: usize) -> u64 {
        frame as u64 * FRAME_LEN as u64
    }
}
