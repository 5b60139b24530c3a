//! A blob's raw content out of an object's bytes, as they come from a backend.

use bytes::Bytes;

use super::blob_disk::BlobDisk;
use super::codec::StreamDecoder;
use super::read_through::{Landing, landing_of};
use super::session::decode_error;
use super::worker::Worker;
use crate::backend::settings::ObjectFormat;
use crate::limits::FRAME_LEN;
use crate::pure::casblob::Unwrap;
use crate::pure::digest::Digest;
use crate::store::{Encoding, StoreError};

/// Raw content out of an object's bytes.
pub(super) enum Content {
    /// The object is a casblob whose header is not complete.
    Header(Unwrap),
    Raw,
    Zstd {
        decoder: Box<StreamDecoder>,
        scratch: Vec<u8>,
        /// Bytes that may still come. Why: there are ways to send much that decodes to nothing.
        left: u64,
    },
}

/// A shorter piece is copied, so that it does not hold all of the buffer that it came in.
const PIECE_LEN_MIN: usize = 4096;

impl Content {
    pub fn new(format: ObjectFormat) -> Self {
        match format {
            ObjectFormat::Casblob => Self::Header(Unwrap::default()),
            ObjectFormat::Raw => Self::Raw,
        }
    }

    /// Whether what comes is content.
    pub fn has_begun(&self) -> bool {
        !matches!(self, Self::Header(_))
    }

    pub fn is_cut(&self) -> bool {
        match self {
            Self::Header(_) => true,
            Self::Raw => false,
            Self::Zstd { decoder, .. } => decoder.in_frame(),
        }
    }

    /// Takes some of `input` and gives raw bytes, at most a frame's worth; perhaps none.
    pub fn take<D: BlobDisk>(
        &mut self,
        worker: &Worker<D>,
        digest: Digest,
        input: &mut Bytes,
    ) -> Result<Bytes, Landing> {
        match self {
            Self::Raw => {
                let piece = input.split_to(input.len().min(FRAME_LEN));
                Ok(if piece.len() < PIECE_LEN_MIN { Bytes::copy_from_slice(&piece) } else { piece })
            }
            Self::Zstd { decoder, scratch, left } => {
                scratch.clear();
                let mut rest = &input[..];
                decoder.decode(&mut rest, scratch).map_err(|error| landing_of(decode_error(error, digest)))?;
                let taken = input.len() - rest.len();
                let _ = input.split_to(taken);
                *left = left
                    .checked_sub(taken as u64)
                    .ok_or_else(|| landing_of(StoreError::TooLong { expected: digest }))?;
                // Why a copy: small pieces must not hold a frame's worth of memory each.
                Ok(Bytes::copy_from_slice(scratch))
            }
            Self::Header(unwrap) => {
                let taken = unwrap.header_bytes(input).map_err(|error| Landing::Wrong(error.to_string()))?;
                let _ = input.split_to(taken);
                let header = unwrap.header().filter(|_| !input.is_empty());
                if let Some(header) = unwrap.header()
                    && header.raw_size != digest.size
                {
                    return Err(Landing::OtherSize(format!("its header says {} bytes", header.raw_size)));
                }
                if let Some(header) = header {
                    *self = match header.encoding {
                        Encoding::Identity => Self::Raw,
                        Encoding::Zstd => Self::Zstd {
                            decoder: Box::new(worker.codecs().stream_decoder(digest.size).ok_or_else(no_decoder)?),
                            scratch: Vec::with_capacity(FRAME_LEN),
                            left: header.object_len_max(),
                        },
                    };
                }
                Ok(Bytes::new())
            }
        }
    }
}

fn no_decoder() -> Landing {
    Landing::NotStored(StoreError::Busy { what: "memory of zstd decoders, part of --memory_limit", limit: 0 })
}
