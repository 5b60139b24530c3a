//! Between HTTP/2 and the socket: gathers the frames of one turn.
//!
//! Why: h2 flushes after each DATA frame of more than 256 bytes, which is a system call for each small reply and for each
//! 16 KiB of a large one. Gathered, all that a connection has to say in one of its turns goes out at once. What is large
//! is not copied: the payload that h2 writes says which shared bytes it is cut from, and these are kept instead.
//! (Reading ahead is the socket's part too: `rt::tcp`.)

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::payload::{Rooms, Shown};
use super::sending::Sending;
use crate::budget::{Apart, Purse, Rank};
use crate::limits;
use crate::pure::answers::Answers;
use crate::pure::partial_frame::PartialFrame;
use crate::rt::time;

/// Buffers for what is copied that no connection uses now, each with room for `WRITE_COPIED_LEN` bytes. Why shared: a
/// connection holds one only while it has bytes that the socket has not taken, and memory to charge it to. Clones share the
/// pool; core-local.
#[derive(Clone, Default)]
pub struct Buffers(Rc<RefCell<Vec<Vec<u8>>>>);

impl Buffers {
    fn take(&self) -> Vec<u8> {
        self.0.borrow_mut().pop().unwrap_or_else(|| Vec::with_capacity(limits::WRITE_COPIED_LEN))
    }

    fn give_back(&self, mut buffer: Vec<u8>) {
        let mut spare = self.0.borrow_mut();
        if buffer.capacity() >= limits::WRITE_COPIED_LEN && spare.len() < limits::WRITE_BUFFERS_SPARE_MAX {
            buffer.clear();
            spare.push(buffer);
        }
    }
}

/// A transport that gathers. Clones share it: HTTP/2 owns one, and the connection's driver another, to send what was
/// gathered when the turn ends.
pub struct Gathered<T>(Rc<RefCell<State<T>>>);

struct State<T> {
    io: T,
    buffers: Buffers,
    shown: Shown,
    /// What was written and not sent yet, in order.
    parts: VecDeque<Part>,
    /// Bytes in `parts`.
    len: usize,
    /// The bytes of the parts that were copied, and how many of them were sent. Has its room only while there are parts.
    copied: Vec<u8>,
    copied_sent: usize,
    answers: Answers,
    /// What has come of a frame that is not whole.
    begun: PartialFrame,
    /// What that is charged to, once a long frame has come.
    sending: Sending,
    /// Bytes of the connection's window beyond the first 64 KiB, which are charged.
    window: u64,
    /// From when the connection's time counts.
    opened: Instant,
    /// What `copied` is charged to while it has room. Without it, it has less room, which the connection is charged with.
    memory: Option<Apart>,
}

enum Part {
    /// So many bytes of `copied`, behind those of the parts before it.
    Copied(usize),
    /// A cut of a message, and what the message is accounted to.
    Shared { bytes: Bytes, _rooms: Rooms },
}

impl<T> Clone for Gathered<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: AsyncWrite + Unpin> Gathered<T> {
    /// `shown` is where the payloads that will be written leave what they are cut from.
    /// What is copied is charged to `purse`.
    pub fn new(io: T, buffers: Buffers, shown: Shown, purse: Purse) -> Self {
        let (parts, copied) = (VecDeque::new(), Vec::new());
        let answers = Answers::default();
        let state = State {
            io,
            buffers,
            shown,
            parts,
            len: 0,
            copied,
            copied_sent: 0,
            answers,
            begun: PartialFrame::default(),
            sending: Sending::new(purse),
            window: 0,
            opened: time::now(),
            memory: None,
        };
        Self(Rc::new(RefCell::new(state)))
    }

    /// The connection's window is larger by so many bytes, which are charged.
    pub fn widen(&self, window: u64) {
        let mut state = self.0.borrow_mut();
        state.window = window;
        if window >= limits::SENDING_HELD_LEN {
            state.sending.give_back();
        }
    }

    /// Streams that were reset since the beginning.
    pub fn resets(&self) -> u64 {
        self.0.borrow().answers.resets()
    }

    /// Of these, what HTTP/2 may still remember.
    pub fn resets_remembered(&self) -> usize {
        let state = &mut *self.0.borrow_mut();
        if state.answers.resets() == 0 {
            return 0;
        }
        state.answers.resets_remembered(millis_since(state.opened))
    }

    /// Sends what was gathered. Pending while the socket is full.
    pub fn poll_send(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.borrow_mut().poll_send(context)
    }
}

impl<T: AsyncWrite + Unpin> State<T> {
    fn poll_write(&mut self, context: &mut Context<'_>, data: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let shown = self.shown.take();
        loop {
            let taken = self.gather(data, shown.as_ref());
            if taken > 0 || data.iter().all(|slice| slice.is_empty()) {
                return Poll::Ready(Ok(taken));
            }
            ready!(self.poll_send_parts(context))?;
        }
    }

    /// Takes of `data` what there is room for, which is all of it but when much waits already.
    fn gather(&mut self, data: &[IoSlice<'_>], shown: Option<&(Bytes, Rooms)>) -> usize {
        let opened = self.opened;
        let now_ms = || millis_since(opened);
        let mut taken = 0;
        for slice in data {
            if self.len >= limits::WRITE_GATHER_LEN || self.parts.len() >= limits::WRITE_PARTS_MAX {
                return taken;
            }
            if slice.len() > limits::WRITE_COPY_LEN_MAX
                && let Some(cut) = shown.and_then(|(whole, rooms)| {
                    Some(Part::Shared { bytes: cut_of(whole, slice)?, _rooms: rooms.clone() })
                })
            {
                self.parts.push_back(cut);
                self.answers.pass(slice, now_ms);
                self.len += slice.len();
                taken += slice.len();
                continue;
            }
            if self.copied.capacity() == 0 && !slice.is_empty() {
                self.take_buffer();
            }
            let count = slice.len().min(self.copied_max().saturating_sub(self.copied.len()));
            self.copied.extend_from_slice(&slice[..count]);
            self.answers.pass(&slice[..count], now_ms);
            match self.parts.back_mut() {
                Some(Part::Copied(len)) => *len += count,
                _ if count > 0 => self.parts.push_back(Part::Copied(count)),
                _ => {}
            }
            self.len += count;
            taken += count;
            if count < slice.len() {
                return taken;
            }
        }
        taken
    }

    /// Sends what was gathered.
    fn poll_send_parts(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.parts.is_empty() {
            let mut slices = [IoSlice::new(&[]); limits::WRITE_PARTS_MAX];
            let mut copied = &self.copied[self.copied_sent..];
            for (slice, part) in slices.iter_mut().zip(&self.parts) {
                *slice = IoSlice::new(match part {
                    Part::Copied(len) => copied.split_off(..*len).unwrap_or_default(),
                    Part::Shared { bytes, .. } => bytes,
                });
            }
            let written = ready!(Pin::new(&mut self.io).poll_write_vectored(context, &slices[..self.parts.len()]))?;
            self.sent(written)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Takes room for what is copied: much, if there is memory for it.
    ///
    /// Why before it is known what the socket takes: afterwards, there might be none. Why not the last of it: that is for new
    /// connections, and little will do.
    fn take_buffer(&mut self) {
        self.memory = self.sending.purse().apart_for(limits::WRITE_COPIED_LEN as u64, Rank::More);
        self.copied = match self.memory {
            Some(_) => self.buffers.take(),
            None => Vec::with_capacity(limits::WRITE_COPIED_LEN_MIN),
        };
    }

    /// Bytes that may be copied.
    fn copied_max(&self) -> usize {
        if self.memory.is_some() { limits::WRITE_COPIED_LEN } else { limits::WRITE_COPIED_LEN_MIN }
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Why apart: most turns say little, which needs no list of parts.
        while let (1, Some(Part::Copied(len))) = (self.parts.len(), self.parts.front()) {
            let data = &self.copied[self.copied_sent..self.copied_sent + len];
            let written = ready!(Pin::new(&mut self.io).poll_write(context, data))?;
            self.sent(written)?;
        }
        ready!(self.poll_send_parts(context))?;
        Pin::new(&mut self.io).poll_flush(context)
    }

    /// Forgets what the socket took.
    fn sent(&mut self, mut written: usize) -> io::Result<()> {
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.len -= written;
        while let Some(part) = self.parts.front_mut() {
            let len = match part {
                Part::Copied(len) => len,
                Part::Shared { bytes, .. } if written < bytes.len() => {
                    bytes.advance(written);
                    break;
                }
                Part::Shared { bytes, .. } => {
                    written -= bytes.len();
                    self.parts.pop_front();
                    continue;
                }
            };
            let count = written.min(*len);
            self.copied_sent += count;
            written -= count;
            *len -= count;
            if *len > 0 {
                break;
            }
            self.parts.pop_front();
        }
        if self.parts.is_empty() {
            self.copied_sent = 0;
            self.buffers.give_back(std::mem::take(&mut self.copied));
            self.memory = None;
        }
        Ok(())
    }
}

fn millis_since(begun: Instant) -> u64 {
    time::now().saturating_duration_since(begun).as_millis() as u64
}

/// The part of `whole` that `slice` is, when it is one.
fn cut_of(whole: &Bytes, slice: &[u8]) -> Option<Bytes> {
    whole.as_ptr_range().contains(&slice.as_ptr()).then_some(())?;
    (slice.as_ptr_range().end <= whole.as_ptr_range().end).then(|| whole.slice_ref(slice))
}

impl<T: AsyncRead + Unpin> Gathered<T> {
    /// True when the peer does little but make HTTP/2 answer, has begun what it cannot mean, or found no room for it in time.
    pub fn is_flooded(&self) -> bool {
        let state = self.0.borrow();
        state.answers.is_flood() || state.is_too_long() || state.sending.is_overdue(time::now())
    }
}

impl<T: AsyncRead + Unpin> State<T> {
    /// Reads no more of a long frame than is charged to the connection.
    fn poll_read(&mut self, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.is_too_long() {
            // The driver ends the connection in this turn.
            return Poll::Pending;
        }
        ready!(self.poll_sending(context));
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(context, buf))?;
        self.begun.pass(&buf.filled()[before..]);
        Poll::Ready(Ok(()))
    }

    /// Waits until what HTTP/2 gathers of the running frame is charged.
    fn poll_sending(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let is_charged = self.sending.is_held() || self.window >= limits::SENDING_HELD_LEN;
        if is_charged || self.begun.gathered() <= limits::SMALL_MESSAGE_LEN {
            return Poll::Ready(());
        }
        self.sending.poll(context)
    }

    /// The running frame is longer than anybody may send, or has a reason to.
    fn is_too_long(&self) -> bool {
        self.begun.is_too_long(limits::HTTP2_CONNECTION_WINDOW_MIN as usize + self.window as usize)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Gathered<T> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.0.borrow_mut().poll_read(context, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Gathered<T> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.0.borrow_mut().poll_write(context, &[IoSlice::new(data)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.borrow_mut().poll_write(context, data)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing: the driver sends at the end of its turn (see `poll_send`).
    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.0.borrow_mut();
        ready!(state.poll_send(context))?;
        Pin::new(&mut state.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::super::payload::Payload;
    use super::*;

    /// A socket that takes at most `take` bytes at a time, none when it is 0. It counts the calls, and knows where the
    /// bytes lay that it took.
    struct Socket {
        take: usize,
        calls: usize,
        flushes: usize,
        is_shut: bool,
        got: Vec<u8>,
        places: Vec<*const u8>,
    }

    impl Socket {
        fn new(take: usize) -> Self {
            Self { take, calls: 0, flushes: 0, is_shut: false, got: Vec::new(), places: Vec::new() }
        }
    }

    impl AsyncWrite for Socket {
        fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
            self.poll_write_vectored(context, &[IoSlice::new(data)])
        }
        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            data: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            let mut left = self.take;
            if left == 0 {
                return Poll::Pending;
            }
            self.calls += 1;
            for slice in data {
                let count = slice.len().min(left);
                self.places.push(slice.as_ptr());
                self.got.extend_from_slice(&slice[..count]);
                left -= count;
            }
            Poll::Ready(Ok(self.take - left))
        }
        fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.flushes += 1;
            Poll::Ready(Ok(()))
        }
        fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.is_shut = true;
            Poll::Ready(Ok(()))
        }
    }

    fn gathered(take: usize, shown: &Shown) -> Gathered<Socket> {
        Gathered::new(Socket::new(take), Buffers::default(), shown.clone(), Purse::alone(1 << 20))
    }

    fn holds_nothing(io: &Gathered<Socket>) -> bool {
        let state = io.0.borrow();
        state.len == 0 && state.parts.is_empty() && state.copied.capacity() == 0
    }

    fn bytes_of(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + len) as u8).collect()
    }

    /// Goal: bytes keep their order and none is lost, whatever the socket takes, and small writes become one. Method:
    /// writes of growing size over sockets that take 1000 bytes, or everything, at a time.
    #[test]
    fn keeps_the_order() {
        let mut context = Context::from_waker(std::task::Waker::noop());
        for take in [1000, usize::MAX] {
            let mut io = gathered(take, &Shown::default());
            let mut expected = Vec::new();
            for len in [1, 5, 4000, 70_000, 10, 60_000, 6000, 200_000, 1] {
                let piece = bytes_of(len);
                expected.extend_from_slice(&piece);
                let mut rest = &piece[..];
                while !rest.is_empty() {
                    let (one, two) = rest.split_at(rest.len() / 2);
                    let slices = [IoSlice::new(one), IoSlice::new(two)];
                    let Poll::Ready(Ok(count)) = Pin::new(&mut io).poll_write_vectored(&mut context, &slices) else {
                        panic!("the socket takes bytes")
                    };
                    rest = &rest[count..];
                }
            }
            assert!(io.poll_send(&mut context).is_ready());
            assert_eq!(io.0.borrow().io.got, expected);
            assert!(holds_nothing(&io));
        }
        let io = gathered(usize::MAX, &Shown::default());
        for _ in 0..100 {
            assert!(Pin::new(&mut io.clone()).poll_write(&mut context, &[7; 100]).is_ready());
        }
        assert!(io.poll_send(&mut context).is_ready());
        assert_eq!(io.0.borrow().io.calls, 1);
        io.0.borrow_mut().io.take = 0;
        assert!(Pin::new(&mut io.clone()).poll_write(&mut context, b"kept").is_ready());
        assert!(io.poll_send(&mut context).is_pending());
        assert_eq!(io.0.borrow().copied, b"kept");
    }

    /// Goal: what is copied is charged before it is held, and without memory for it there is less of it; all goes out in order
    /// in the end. Method: a socket that takes nothing, then everything, with a purse that has memory for one and with one that
    /// has not; small writes until no more are taken.
    #[test]
    fn what_is_copied_is_charged() {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let full = limits::WRITE_COPIED_LEN;
        for (peers, most, charge) in [(1 << 20, full, full as u64), (1000, limits::WRITE_COPIED_LEN_MIN, 0)] {
            let purse = Purse::alone(peers);
            let io = Gathered::new(Socket::new(0), Buffers::default(), Shown::default(), purse.clone());
            let piece = bytes_of(1000);
            let mut expected = Vec::new();
            while let Poll::Ready(Ok(count)) = Pin::new(&mut io.clone()).poll_write(&mut context, &piece) {
                expected.extend_from_slice(&piece[..count]);
                assert_eq!(purse.apart(), charge);
                assert!(io.0.borrow().copied.capacity() <= most.max(limits::WRITE_COPIED_LEN_MIN));
            }
            assert_eq!(expected.len(), most);
            assert!(io.poll_send(&mut context).is_pending());
            assert_eq!(purse.apart(), charge);
            io.0.borrow_mut().io.take = usize::MAX;
            assert!(io.poll_send(&mut context).is_ready());
            assert!(io.0.borrow().io.got == expected);
            assert!(holds_nothing(&io) && purse.apart() == 0);
        }
    }

    /// Goal: of the buffers that nobody uses a few are kept, empty, and those with little room are not. Method: more are given back
    /// than that.
    #[test]
    fn spare_buffers_are_few_and_empty() {
        let buffers = Buffers::default();
        let full = || vec![7; limits::WRITE_COPIED_LEN];
        buffers.give_back(vec![7; limits::WRITE_COPIED_LEN_MIN]);
        assert!(buffers.0.borrow().is_empty());
        (0..=limits::WRITE_BUFFERS_SPARE_MAX).for_each(|_| buffers.give_back(full()));
        assert_eq!(buffers.0.borrow().len(), limits::WRITE_BUFFERS_SPARE_MAX);
        assert!(buffers.take().is_empty());
        assert_eq!(buffers.0.borrow().len(), limits::WRITE_BUFFERS_SPARE_MAX - 1);
    }

    /// Goal: what waits for a socket that takes nothing is bounded, in bytes and in parts, whether it is copied or not, and all of it
    /// goes out in the end. Method: messages of one large piece each, of several lengths, every other one behind a byte.
    #[test]
    fn what_waits_is_bounded() {
        let mut context = Context::from_waker(std::task::Waker::noop());
        for (len, most) in [(limits::WRITE_COPY_LEN_MAX, 16), (5000, 210), (100_000, 11)] {
            let shown = Shown::default();
            let mut io = gathered(0, &shown);
            let (piece, mut expected) = (Bytes::from(bytes_of(len)), Vec::new());
            let taken = (0..1000).take_while(|number| {
                let mut payload = Payload::message(vec![piece.clone()], Rooms::default(), shown.clone());
                payload.advance(crate::pure::grpc_frame::PREFIX_LEN - number % 2);
                let mut slices = [IoSlice::new(&[]); 2];
                let slices_count = payload.chunks_vectored(&mut slices);
                let written = Pin::new(&mut io).poll_write_vectored(&mut context, &slices[..slices_count]);
                let Poll::Ready(Ok(count)) = written else { return false };
                expected.extend_from_slice(&payload.copy_to_bytes(count));
                true
            });
            let taken = taken.count();
            let state = io.0.borrow();
            assert!(taken <= most && state.parts.len() <= limits::WRITE_PARTS_MAX, "{taken} of {len}");
            assert!(state.len < limits::WRITE_GATHER_LEN + len);
            drop(state);
            io.0.borrow_mut().io.take = usize::MAX;
            assert!(io.poll_send(&mut context).is_ready());
            assert!(io.0.borrow().io.got == expected);
        }
    }

    /// Goal: where there is no room for all of a copy, nothing behind it is taken before the rest of it. Method: room for one byte more,
    /// and two of them before a large piece.
    #[test]
    fn nothing_overtakes_what_has_no_room() {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let shown = Shown::default();
        let mut io = gathered(0, &shown);
        assert!(Pin::new(&mut io).poll_write(&mut context, &vec![7; limits::WRITE_COPIED_LEN - 1]).is_ready());
        let message = vec![Bytes::from(bytes_of(5000))];
        let mut payload = Payload::message(message, Rooms::default(), shown.clone());
        payload.advance(crate::pure::grpc_frame::PREFIX_LEN - 2);
        let mut slices = [IoSlice::new(&[]); 2];
        let count = payload.chunks_vectored(&mut slices);
        let written = Pin::new(&mut io).poll_write_vectored(&mut context, &slices[..count]);
        assert!(matches!(written, Poll::Ready(Ok(1))));
        assert_eq!((count, io.0.borrow().len), (2, limits::WRITE_COPIED_LEN));
    }

    /// Goal: what was gathered goes out before the end does, the socket is told to pass it on, and one that takes nothing more is an
    /// error. Method: each with a few bytes.
    #[test]
    fn the_end() {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut io = gathered(usize::MAX, &Shown::default());
        assert!(Pin::new(&mut io).poll_write(&mut context, b"last").is_ready());
        assert!(Pin::new(&mut io).poll_shutdown(&mut context).is_ready());
        let state = io.0.borrow();
        assert_eq!((&state.io.got[..], state.io.flushes, state.io.is_shut), (&b"last"[..], 1, true));
        let io = gathered(0, &Shown::default());
        let error = io.0.borrow_mut().sent(0).expect_err("it takes nothing");
        assert_eq!(error.kind(), io::ErrorKind::WriteZero);
    }

    /// Writes the next frame of at most 16 KiB as h2 does: a head, and behind it what the payload shows.
    fn write_frame(io: &mut Gathered<Socket>, context: &mut Context<'_>, payload: &mut Payload) {
        let mut frame = (&b"nine byte"[..]).chain(payload.take(16 << 10));
        while frame.has_remaining() {
            let mut slices = [IoSlice::new(&[]); 8];
            let count = frame.chunks_vectored(&mut slices);
            let written = Pin::new(&mut *io).poll_write_vectored(context, &slices[..count]);
            let Poll::Ready(Ok(count)) = written else { panic!("the socket takes bytes") };
            frame.advance(count);
        }
    }

    /// Goal: the large pieces of messages go to the socket from where they are, in order between what is copied, and
    /// are let go of when they are sent. Method: messages of large and small pieces, over sockets that take a few bytes
    /// at a time, or everything.
    #[test]
    fn sends_messages_from_where_they_are() {
        let mut context = Context::from_waker(std::task::Waker::noop());
        for take in [777, 100_000, usize::MAX] {
            let shown = Shown::default();
            let mut io = gathered(take, &shown);
            let pieces = [50_000, 10, 100_000, 600].map(|len| Bytes::from(bytes_of(len)));
            let mut expected = Vec::new();
            for _ in 0..3 {
                let message = || Payload::message(pieces.to_vec(), Rooms::default(), shown.clone());
                let mut whole = message();
                for frame in whole.copy_to_bytes(whole.remaining()).chunks(16 << 10) {
                    expected.extend_from_slice(b"nine byte");
                    expected.extend_from_slice(frame);
                }
                let mut payload = message();
                while payload.has_remaining() {
                    write_frame(&mut io, &mut context, &mut payload);
                }
            }
            assert!(io.poll_send(&mut context).is_ready());
            assert!(holds_nothing(&io) && shown.take().is_none());
            let state = io.0.borrow();
            assert_eq!(state.io.got, expected);
            let from_pieces =
                state.io.places.iter().filter(|place| pieces.iter().any(|p| p.as_ptr_range().contains(place)));
            assert!(from_pieces.count() >= 3 * 150_000 / (16 << 10));
            assert!(pieces.iter().all(Bytes::is_unique));
        }
    }
}
