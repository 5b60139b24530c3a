//! Whether stored bytes are the content that their key names.

use std::borrow::Cow;

use sha2::{Digest as _, Sha256};

use super::files::Files;
use crate::limits::{CHUNK_LEN, DISK_ALIGN, FRAME_LEN};
use crate::pure::digest::Hash;
use crate::pure::record::{Codec, Header, Key, Kind, Run};
use crate::pure::segment::Layout;
use crate::shard::codec::Codecs;
use crate::shard::recover::Blocks;

/// Compares the payload of a record that holds a whole value. Of actions and of what stands below a
/// storage prefix, which no hash of their own names, the length.
pub fn whole(codecs: &Codecs, header: &Header, payload: &[u8]) -> Option<()> {
    let raw = decoded(codecs, header.codec, payload, usize::try_from(header.raw_len).ok()?)?;
    let is_named = match header.key.kind {
        Kind::Cas => {
            raw.len() as u64 == header.key.size && Hash(Sha256::digest(raw.as_ref()).into()) == header.key.hash
        }
        Kind::ScopedCas => raw.len() as u64 == header.key.size,
        Kind::Action | Kind::ScopedAction => true,
    };
    is_named.then_some(())
}

/// `stored` as raw bytes, of which there must be `raw_len`.
fn decoded<'a>(codecs: &Codecs, codec: Codec, stored: &'a [u8], raw_len: usize) -> Option<Cow<'a, [u8]>> {
    let raw = match codec {
        Codec::Raw => Cow::Borrowed(stored),
        Codec::Zstd => Cow::Owned(codecs.decode(stored, raw_len).ok()?),
    };
    (raw.len() == raw_len).then_some(raw)
}

/// The content of a large blob, frame by frame.
pub struct Large<'a> {
    codecs: &'a Codecs,
    key: Key,
    /// Of a value in pieces: the header, and the value so far.
    pieces: Option<(Header, Vec<u8>)>,
    frames_left: usize,
    raw: u64,
    sha: Sha256,
}

impl<'a> Large<'a> {
    pub fn new(codecs: &'a Codecs, header: &Header, frames: usize) -> Self {
        let pieces = header.pieces.then(|| (*header, Vec::new()));
        Self { codecs, key: header.key, pieces, frames_left: frames, raw: 0, sha: Sha256::new() }
    }

    /// The next frame as stored. `None` when it cannot be part of the content.
    pub fn frame(&mut self, codec: Codec, stored: &[u8]) -> Option<()> {
        self.frames_left = self.frames_left.checked_sub(1)?;
        if let Some((_, value)) = &mut self.pieces {
            value.extend_from_slice(stored);
            return Some(());
        }
        let raw_len = self.key.size.checked_sub(self.raw)?.min(FRAME_LEN as u64);
        let raw = decoded(self.codecs, codec, stored, raw_len as usize)?;
        self.sha.update(raw.as_ref());
        self.raw += raw_len;
        Some(())
    }

    /// All frames are here.
    pub fn finish(self) -> Option<()> {
        if self.frames_left > 0 {
            return None;
        }
        match self.pieces {
            Some((header, value)) => whole(self.codecs, &header, &value),
            None => {
                // Below a storage prefix the key is not the content's hash.
                let is_named = self.key.kind != Kind::Cas || Hash(self.sha.finalize().into()) == self.key.hash;
                (self.raw == self.key.size && is_named).then_some(())
            }
        }
    }
}

/// The most that one read brings, in bytes.
const READ_LEN_MAX: u64 = 1 << 20;

/// The stored stream of a large blob, from its first byte to its last.
pub struct Stored<'a> {
    files: &'a Files,
    layout: Layout,
    runs: &'a [Run],
    /// Bytes of `runs[0]` that have been read.
    read: u64,
    /// What has been read, and how much of that was taken.
    ahead: Vec<u8>,
    taken: usize,
}

impl<'a> Stored<'a> {
    pub fn new(files: &'a Files, layout: Layout, runs: &'a [Run]) -> Self {
        Self { files, layout, runs, read: 0, ahead: Vec::new(), taken: 0 }
    }

    /// Where the next byte stands in the volume.
    pub fn position(&self) -> u64 {
        let ahead = (self.ahead.len() - self.taken) as u64;
        let at = |run: &Run| self.layout.chunk_position(run.first) + self.read.saturating_sub(ahead);
        self.runs.first().map_or(0, at)
    }

    /// The next `len` bytes. `None` when they cannot be read.
    pub async fn take(&mut self, len: usize) -> Option<&[u8]> {
        self.ahead.drain(..self.taken);
        self.taken = 0;
        while self.ahead.len() < len {
            let run = self.runs.first()?;
            let run_len = u64::from(run.count) * CHUNK_LEN as u64;
            if self.read == run_len {
                self.runs = &self.runs[1..];
                self.read = 0;
                continue;
            }
            let position = self.layout.chunk_position(run.first) + self.read;
            let want = ((len - self.ahead.len()).next_multiple_of(DISK_ALIGN) as u64).min(READ_LEN_MAX);
            let want = want.max(READ_LEN_MAX).min(run_len - self.read);
            let got = self.files.read(position, want as usize).await?;
            self.ahead.extend_from_slice(got.bytes());
            self.read += want;
        }
        self.taken = len;
        self.ahead.get(..len)
    }
}
