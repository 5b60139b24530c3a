//! The bytes of one upload: decoded, hashed, cut into frames and sent to the disk while they arrive.

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::blob_disk::{BlobDisk, FrameWriter};
use super::codec::{DecodeError, Probe, StreamDecoder};
use super::disk::Codec;
use super::worker::{Worker, store_error};
use super::write_behind::Intent;
use crate::limits::{FRAME_LEN, SMALL_BLOB_LEN_MAX};
use crate::pure::digest::{Digest, Hash};
use crate::pure::upload_queue::ObjectKind;
use crate::store::{Encoding, PutOutcome, StoreError};

/// An upload's content so far. Memory grows with the bytes that came, up to one frame, never with what was declared.
pub struct Session<D: BlobDisk> {
    digest: Digest,
    sha: Sha256,
    /// Raw bytes taken in.
    committed: u64,
    /// Raw bytes still to be dropped: a resumed client repeats what had arrived after it last asked.
    overlap: u64,
    decoder: Option<StreamDecoder>,
    /// Raw bytes that stand in no frame yet; of a small blob all of them.
    open_frame: Vec<u8>,
    /// Where the frames of a large blob go, once there is one.
    writer: Option<D::Writer>,
    probe: Probe,
    /// It comes from the backend, which needs not have it again.
    is_from_backend: bool,
}

impl<D: BlobDisk> Session<D> {
    /// The caller has checked that a blob of this size is accepted.
    pub fn new(digest: Digest, decoder: Option<StreamDecoder>) -> Self {
        Self {
            digest,
            sha: Sha256::new(),
            committed: 0,
            overlap: 0,
            decoder,
            open_frame: Vec::new(),
            writer: None,
            probe: Probe::default(),
            is_from_backend: false,
        }
    }

    /// For what comes from the backend.
    pub fn from_backend(digest: Digest) -> Self {
        Self { is_from_backend: true, ..Self::new(digest, None) }
    }

    /// Raw bytes taken in.
    pub fn committed(&self) -> u64 {
        self.committed
    }

    /// Raw bytes held in memory and, as far as we know, on disk.
    pub fn held(&self) -> (usize, u64) {
        let staged = self.writer.as_ref().map_or(0, |writer| writer.staged_len());
        (self.open_frame.capacity() + staged, self.committed - self.open_frame.len() as u64)
    }

    /// Gives back what only a running upload needs.
    pub fn park(&mut self) {
        self.decoder = None;
        self.open_frame.shrink_to_fit();
    }

    /// Goes on at `offset`, at most `committed`. A compressed upload goes on with a fresh frame.
    pub fn resume(&mut self, offset: u64, decoder: Option<StreamDecoder>) {
        debug_assert!(offset <= self.committed);
        self.overlap = self.committed - offset;
        self.decoder = decoder;
    }

    /// Takes in the next bytes of the body. After an error the session is of no use.
    pub async fn write(&mut self, worker: &Worker<D>, data: &[Bytes]) -> Result<(), StoreError> {
        for piece in data {
            let mut input = &piece[..];
            while !input.is_empty() {
                self.step(worker, &mut input).await?;
            }
        }
        Ok(())
    }

    /// Verifies the whole and stores it.
    pub async fn finish(mut self, worker: &Worker<D>) -> Result<PutOutcome, StoreError> {
        if self.decoder.as_ref().is_some_and(StreamDecoder::in_frame) {
            return Err(StoreError::BadZstd { digest: self.digest, detail: "the last frame is not complete" });
        }
        if self.committed < self.digest.size || self.overlap > 0 {
            let actual = self.committed - self.overlap;
            return Err(StoreError::TooShort { expected: self.digest, actual });
        }
        check_hash(self.digest, self.sha.clone())?;
        if worker.holds(&self.digest).await? {
            return Ok(PutOutcome::AlreadyPresent);
        }
        let key = worker.cas_key(&self.digest);
        if is_small(&self.digest) {
            let raw = Bytes::from(std::mem::take(&mut self.open_frame));
            let _intent = self.announce(worker).await;
            worker.store_small(&key, &[raw], None).await?;
            return Ok(PutOutcome::Stored);
        }
        if !self.open_frame.is_empty() {
            self.seal_open_frame(worker).await?;
        }
        let writer = self.writer.take().expect("a blob of more than one frame has sealed one");
        let _intent = self.announce(worker).await;
        // Two uploads of one blob may end together: the second drops its copy.
        if worker.holds(&self.digest).await? {
            return Ok(PutOutcome::AlreadyPresent);
        }
        writer.commit().await.map_err(|error| store_error(error, self.digest))?;
        worker.note_stored(&key);
        Ok(PutOutcome::Stored)
    }

    async fn announce<'a>(&self, worker: &'a Worker<D>) -> Option<Intent<'a>> {
        match self.is_from_backend {
            true => None,
            false => worker.announce(worker.name(ObjectKind::Cas, self.digest)).await,
        }
    }

    /// Takes in some of `input`: at most what makes one frame.
    async fn step(&mut self, worker: &Worker<D>, input: &mut &[u8]) -> Result<(), StoreError> {
        let large = !is_small(&self.digest);
        if large
            && self.decoder.is_none()
            && self.overlap == 0
            && self.open_frame.is_empty()
            && input.len() >= FRAME_LEN
        {
            // A whole frame in one piece needs no copy.
            let (frame, rest) = input.split_at(FRAME_LEN);
            *input = rest;
            self.take_in(frame)?;
            worker.breathe(FRAME_LEN).await;
            return self.seal(worker, frame).await;
        }
        loop {
            self.make_room();
            let start = self.open_frame.len();
            let before = input.len();
            match &mut self.decoder {
                Some(decoder) => {
                    let decoded = decoder.decode(input, &mut self.open_frame);
                    decoded.map_err(|error| decode_error(error, self.digest))?;
                }
                None => {
                    let (now, rest) = input.split_at(input.len().min(self.open_frame.capacity() - start));
                    self.open_frame.extend_from_slice(now);
                    *input = rest;
                }
            }
            let full = self.open_frame.len() == self.open_frame.capacity();
            self.take_in_from(start)?;
            worker.breathe((before - input.len()).max(self.open_frame.len() - start)).await;
            if large && self.open_frame.len() >= FRAME_LEN {
                self.seal_open_frame(worker).await?;
            }
            // A decoder that filled the frame may hold more output of the input that it has already taken.
            if !(full && input.is_empty() && self.decoder.is_some()) {
                return Ok(());
            }
        }
    }

    /// Makes sure that the open frame can grow: by doubling, up to a frame, or one byte more than a small blob may have.
    fn make_room(&mut self) {
        let (len, capacity) = (self.open_frame.len(), self.open_frame.capacity());
        if len < capacity {
            return;
        }
        let most = if is_small(&self.digest) { self.digest.size as usize + 1 } else { FRAME_LEN };
        let target = (2 * capacity).clamp(OPEN_FRAME_LEN_FIRST.min(most), most);
        self.open_frame.reserve_exact(target.saturating_sub(len).max(1));
    }

    /// Takes in what was added to the open frame at `start`, less what the client repeats.
    fn take_in_from(&mut self, start: usize) -> Result<(), StoreError> {
        let repeated = self.overlap.min((self.open_frame.len() - start) as u64);
        if repeated > 0 {
            self.overlap -= repeated;
            self.open_frame.drain(start..start + repeated as usize);
        }
        let frame = std::mem::take(&mut self.open_frame);
        let taken = self.take_in(&frame[start..]);
        self.open_frame = frame;
        taken
    }

    fn take_in(&mut self, raw: &[u8]) -> Result<(), StoreError> {
        if raw.len() as u64 > self.digest.size - self.committed {
            return Err(StoreError::TooLong { expected: self.digest });
        }
        self.sha.update(raw);
        self.committed += raw.len() as u64;
        Ok(())
    }

    async fn seal_open_frame(&mut self, worker: &Worker<D>) -> Result<(), StoreError> {
        let mut frame = std::mem::take(&mut self.open_frame);
        self.seal(worker, &frame).await?;
        frame.clear();
        self.open_frame = frame;
        Ok(())
    }

    /// Sends one frame to the disk, compressed if that pays.
    async fn seal(&mut self, worker: &Worker<D>, raw: &[u8]) -> Result<(), StoreError> {
        let mut stored = None;
        if worker.codecs().tries(raw.len()) && self.probe.is_due() {
            stored = worker.codecs().at_rest(raw);
            self.probe.note(stored.is_some());
            worker.breathe_after_compressing(raw.len()).await;
        }
        let writer = match &mut self.writer {
            Some(writer) => writer,
            empty => empty.insert(worker.begin_large(&self.digest).await?),
        };
        let pushed = match stored {
            Some(frame) => writer.push(Codec::Zstd, &frame).await,
            None => writer.push(Codec::Raw, raw).await,
        };
        pushed.map_err(|error| store_error(error, self.digest))
    }
}

/// True for a blob that becomes one record.
pub fn is_small(digest: &Digest) -> bool {
    digest.size <= SMALL_BLOB_LEN_MAX as u64
}

/// Checks length and hash.
pub fn check_raw(digest: &Digest, raw: &[Bytes]) -> Result<(), StoreError> {
    let actual: u64 = raw.iter().map(|piece| piece.len() as u64).sum();
    if actual > digest.size {
        return Err(StoreError::TooLong { expected: *digest });
    }
    if actual < digest.size {
        return Err(StoreError::TooShort { expected: *digest, actual });
    }
    let mut sha = Sha256::new();
    raw.iter().for_each(|piece| sha.update(piece));
    check_hash(*digest, sha)
}

/// Compares the hash of all content with the digest.
fn check_hash(expected: Digest, sha: Sha256) -> Result<(), StoreError> {
    let actual = Hash(sha.finalize().into());
    if actual == expected.hash { Ok(()) } else { Err(StoreError::HashMismatch { expected, actual }) }
}

/// A decoder's error as a client's.
pub fn decode_error(error: DecodeError, digest: Digest) -> StoreError {
    match error {
        DecodeError::TooLong => StoreError::TooLong { expected: digest },
        DecodeError::Bad(detail) => StoreError::BadZstd { digest, detail },
        DecodeError::Memory { limit } => StoreError::Busy { what: "memory of zstd decoders, bytes", limit },
    }
}

/// The open frame's first capacity, in bytes: what Bazel sends in one message.
const OPEN_FRAME_LEN_FIRST: usize = 16 << 10;

/// What a body of this encoding is decoded with. Waits a little for its memory, if need be.
pub async fn decoder_for<D: BlobDisk>(
    worker: &Worker<D>,
    digest: Digest,
    encoding: Encoding,
) -> Result<Option<StreamDecoder>, StoreError> {
    match encoding {
        Encoding::Identity => Ok(None),
        Encoding::Zstd => worker.enter_decoder(digest.size).await.map(Some),
    }
}
