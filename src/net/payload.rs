//! What goes into DATA frames: a gRPC prefix and the pieces of a message behind it, none of them copied.

use std::io::IoSlice;
use std::rc::Rc;

use bytes::{Buf, Bytes};

use super::memory::Room;
use crate::pure::grpc_frame::{PREFIX_LEN, prefix};

/// One gRPC message on its way out.
pub struct Payload {
    prefix: [u8; PREFIX_LEN],
    prefix_sent: usize,
    pieces: Vec<Bytes>,
    /// The first piece that has bytes left.
    at: usize,
    remaining: usize,
    _rooms: Rooms,
}

/// What a message is accounted to. Why in here: HTTP/2 drops a payload when it has gone out, or never will.
#[derive(Clone, Default)]
pub struct Rooms {
    /// The request's, which the reply may be cut from.
    pub request: Option<Rc<Room>>,
    pub reply: Option<Rc<Room>>,
}

impl Payload {
    /// The message made of `pieces`, which follow each other.
    pub fn message(pieces: Vec<Bytes>, rooms: Rooms) -> Self {
        let len: usize = pieces.iter().map(Bytes::len).sum();
        let remaining = PREFIX_LEN + len;
        let mut payload = Self { prefix: prefix(len), prefix_sent: 0, pieces, at: 0, remaining, _rooms: rooms };
        payload.skip_empty();
        payload
    }

    fn skip_empty(&mut self) {
        while self.pieces.get(self.at).is_some_and(Bytes::is_empty) {
            // Why replaced: a piece that has gone out frees its memory at once, not with the last one.
            self.pieces[self.at] = Bytes::new();
            self.at += 1;
        }
    }
}

impl Buf for Payload {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        if self.prefix_sent < PREFIX_LEN {
            return &self.prefix[self.prefix_sent..];
        }
        self.pieces.get(self.at).map_or(&[], |piece| piece)
    }

    fn chunks_vectored<'a>(&'a self, dst: &mut [IoSlice<'a>]) -> usize {
        let prefix = &self.prefix[self.prefix_sent..];
        let pieces = self.pieces[self.at..].iter().map(|piece| &piece[..]);
        let chunks = std::iter::once(prefix).chain(pieces).filter(|chunk| !chunk.is_empty());
        dst.iter_mut().zip(chunks).map(|(slot, chunk)| *slot = IoSlice::new(chunk)).count()
    }

    fn advance(&mut self, mut count: usize) {
        assert!(count <= self.remaining, "advanced beyond the end");
        self.remaining -= count;
        let of_prefix = count.min(PREFIX_LEN - self.prefix_sent);
        self.prefix_sent += of_prefix;
        count -= of_prefix;
        while count > 0 {
            let piece = &mut self.pieces[self.at];
            let step = count.min(piece.len());
            piece.advance(step);
            count -= step;
            self.skip_empty();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: however it is advanced, the bytes are prefix and pieces in order, and a chunk is empty only at the end.
    /// Method: a message with empty pieces, taken in every step width, by `chunk` and by `chunks_vectored`.
    #[test]
    fn yields_the_message_in_any_step() {
        let pieces =
            || vec![Bytes::new(), Bytes::from_static(b"abc"), Bytes::new(), Bytes::from_static(b"defgh"), Bytes::new()];
        let expected = b"\0\0\0\0\x08abcdefgh";
        for step in 1..=expected.len() {
            let mut payload = Payload::message(pieces(), Rooms::default());
            let mut got = Vec::new();
            while payload.has_remaining() {
                let mut slices = [IoSlice::new(&[]); 8];
                let count = payload.chunks_vectored(&mut slices);
                let whole: usize = slices[..count].iter().map(|slice| slice.len()).sum();
                assert_eq!(whole, payload.remaining());
                assert_eq!(payload.chunk(), &slices[0][..]);
                let step = step.min(payload.chunk().len());
                assert!(step > 0);
                got.extend_from_slice(&payload.chunk()[..step]);
                payload.advance(step);
            }
            assert_eq!(got, expected);
            let mut jumped = Payload::message(pieces(), Rooms::default());
            jumped.advance(step);
            assert_eq!(jumped.copy_to_bytes(jumped.remaining()), expected[step..]);
        }
        assert_eq!(Payload::message(Vec::new(), Rooms::default()).chunk(), b"\0\0\0\0\0");
    }
}
