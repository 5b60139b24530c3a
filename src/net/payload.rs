//! What goes into DATA frames: a gRPC prefix and the pieces of a message behind it, none of them copied.

use std::cell::RefCell;
use std::io::IoSlice;
use std::rc::Rc;

use bytes::{Buf, Bytes};

use super::memory::Room;
use super::tables::OpenStream;
use crate::limits;
use crate::pure::grpc_frame::{PREFIX_LEN, prefix};

/// One gRPC message on its way out.
pub struct Payload {
    prefix: [u8; PREFIX_LEN],
    prefix_sent: usize,
    pieces: Vec<Bytes>,
    /// The first piece that has bytes left.
    at: usize,
    remaining: usize,
    rooms: Rooms,
    shown: Shown,
}

/// The piece that a payload's last `chunks_vectored` ended with, if it was a large one, and what it is accounted to.
///
/// Why: a transport sees only the bytes that it is asked to write. With this it can keep them without a copy, and they stay
/// accounted until the socket has them. Clones share it; core-local.
#[derive(Clone, Default)]
pub struct Shown(Rc<RefCell<Option<(Bytes, Rooms)>>>);

impl Shown {
    /// What was shown since the last call.
    pub fn take(&self) -> Option<(Bytes, Rooms)> {
        self.0.borrow_mut().take()
    }
}

/// What a message is accounted to. Why in here: HTTP/2 drops a payload when it has gone out, or never will.
#[derive(Clone, Default)]
pub struct Rooms {
    /// The request's, which the reply may be cut from.
    pub request: Option<Rc<Room>>,
    pub reply: Option<Rc<Room>>,
    /// The call's own, which has room for small messages.
    pub call: Option<Rc<OpenStream>>,
}

impl Payload {
    /// The message made of `pieces`, which follow each other.
    pub fn message(pieces: Vec<Bytes>, rooms: Rooms, shown: Shown) -> Self {
        let len: usize = pieces.iter().map(Bytes::len).sum();
        let remaining = PREFIX_LEN + len;
        let mut payload = Self { prefix: prefix(len), prefix_sent: 0, pieces, at: 0, remaining, rooms, shown };
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

    /// Ends with the first large piece, which it leaves in `Shown`.
    fn chunks_vectored<'a>(&'a self, dst: &mut [IoSlice<'a>]) -> usize {
        let prefix = &self.prefix[self.prefix_sent..];
        let mut slots = dst.iter_mut();
        let mut filled = 0;
        if !prefix.is_empty()
            && let Some(slot) = slots.next()
        {
            *slot = IoSlice::new(prefix);
            filled += 1;
        }
        for (piece, slot) in self.pieces[self.at..].iter().filter(|piece| !piece.is_empty()).zip(slots) {
            *slot = IoSlice::new(piece);
            filled += 1;
            if piece.len() > limits::WRITE_COPY_LEN_MAX {
                *self.shown.0.borrow_mut() = Some((piece.clone(), self.rooms.clone()));
                break;
            }
        }
        filled
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
            let mut payload = Payload::message(pieces(), Rooms::default(), Shown::default());
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
            let mut jumped = Payload::message(pieces(), Rooms::default(), Shown::default());
            jumped.advance(step);
            assert_eq!(jumped.copy_to_bytes(jumped.remaining()), expected[step..]);
        }
        assert_eq!(Payload::message(Vec::new(), Rooms::default(), Shown::default()).chunk(), b"\0\0\0\0\0");
    }
}
