//! Between HTTP/2 and the socket: gathers the frames of one turn.
//!
//! Why: h2 flushes after each DATA frame of more than 256 bytes, which is a system call for each small reply and for each
//! 16 KiB of a large one. Gathered, all that a connection has to say in one of its turns goes out at once. What is large
//! is not copied: the payload that h2 writes says which shared bytes it is cut from, and these are kept instead.
//! (Reading ahead is the socket's part too: `rt::tcp`.)
//!
//! And no more is read in a turn than the connection is charged for: what has come waits with HTTP/2 until the turn is over.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::bodies::Bodies;
use super::payload::{Rooms, Shown};
use super::sending::Sending;
use crate::budget::{Apart, Purse, Rank};
use crate::limits;
use crate::pure::answers::Answers;
use crate::pure::partial_frame::PartialFrame;
use crate::pure::turn::{Most, Turn};
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
    /// What has come in this turn, and what may.
    turn: Turn,
    most: Most,
    /// There was more to read in this turn than it might bring.
    is_cut: bool,
    /// What was read of the next turn.
    ahead: Bytes,
    bodies: Bodies,
    /// Nothing is read until what was gathered has gone out.
    is_held_up: bool,
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
            turn: Turn::default(),
            most: Most {
                frames: limits::HTTP2_ROWS_FIRST,
                blocks: limits::HTTP2_TURN_BLOCKS,
                len: limits::HTTP2_TURN_LEN,
            },
            is_cut: false,
            ahead: Bytes::new(),
            bodies: Bodies::default(),
            is_held_up: false,
            sending: Sending::new(purse),
            window: 0,
            opened: time::now(),
            memory: None,
        };
        Self(Rc::new(RefCell::new(state)))
    }

    /// The request bodies of the connection.
    pub fn bodies(&self) -> Bodies {
        self.0.borrow().bodies.clone()
    }

    /// The connection's window is larger by so many bytes, which are charged.
    pub fn widen(&self, window: u64) {
        let mut state = self.0.borrow_mut();
        state.window = window;
        if window >= limits::SENDING_HELD_LEN {
            state.sending.give_back();
        }
    }

    /// Bytes of the buffers that HTTP/2's table of header fields may hold on to.
    pub fn header_table_held(&self) -> usize {
        self.0.borrow().begun.table_held()
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

    /// Begins a turn of a connection that is charged for so many DATA frames which nobody has read. `is_short`: there is no memory
    /// for more.
    pub fn begin_turn(&self, frames: usize, is_short: bool) {
        let state = &mut *self.0.borrow_mut();
        state.is_cut = false;
        state.turn.end().for_each(|stream| state.bodies.take_out(stream));
        let charged = state.charged();
        state.most = Most {
            frames: if charged > 0 { frames.max(limits::HTTP2_TURN_FRAMES) } else { frames },
            blocks: if is_short { frames } else { limits::HTTP2_TURN_BLOCKS },
            len: limits::HTTP2_TURN_LEN + charged,
        };
    }

    /// There is more to read than this turn might bring.
    pub fn is_cut(&self) -> bool {
        self.0.borrow().is_cut
    }

    /// Reads nothing until what was gathered has gone out, or goes on to read. Tells whether it was held up before.
    pub fn hold_up(&self, is_held_up: bool) -> bool {
        std::mem::replace(&mut self.0.borrow_mut().is_held_up, is_held_up)
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

impl<T> State<T> {
    /// Bytes that are charged for what the connection sends, beyond what each is charged for.
    fn charged(&self) -> usize {
        if self.window >= limits::SENDING_HELD_LEN {
            return usize::try_from(self.window).unwrap_or(usize::MAX);
        }
        if self.sending.is_held() { limits::SENDING_HELD_LEN as usize } else { 0 }
    }
}

impl<T: AsyncRead + Unpin> Gathered<T> {
    /// True when the peer does little but make HTTP/2 answer, has begun what it cannot mean, or found no room for it in time.
    pub fn is_flooded(&self) -> bool {
        let state = self.0.borrow();
        state.answers.is_flood() || state.is_too_long() || state.sending.is_overdue(time::now())
    }
}

impl<T: AsyncRead + Unpin> State<T> {
    /// Reads no more than this turn may bring, and than is charged to the connection.
    fn poll_read(&mut self, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.begun.settle();
        if self.is_too_long() || self.is_held_up {
            // The driver ends the connection in this turn, or is woken when something goes out.
            return Poll::Pending;
        }
        if self.turn.is_over(&self.most) {
            self.is_cut = true;
            return Poll::Pending;
        }
        ready!(self.poll_charged(context));
        let before = buf.filled().len();
        if self.ahead.is_empty() {
            ready!(Pin::new(&mut self.io).poll_read(context, buf))?;
        } else {
            buf.put_slice(&self.ahead[..self.ahead.len().min(buf.remaining())]);
        }
        let read = &buf.filled()[before..];
        let count = self.begun.pass(read, &mut self.turn, &self.most);
        if !self.ahead.is_empty() {
            self.ahead.advance(count);
        } else if count < read.len() {
            self.ahead = Bytes::copy_from_slice(&read[count..]);
        }
        buf.set_filled(before + count);
        Poll::Ready(Ok(()))
    }

    /// Waits until more than a little that HTTP/2 gathers, or that no call has read, is charged.
    fn poll_charged(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let most = limits::SMALL_MESSAGE_LEN;
        let is_little = self.begun.gathered() <= most && self.bodies.unread() + self.turn.data_len() <= most;
        if is_little || self.charged() > 0 {
            self.sending.rest();
            return Poll::Ready(());
        }
        // Why: calls may take what has come when the turn is over.
        if self.turn.frames() > 0 {
            self.is_cut = true;
            return Poll::Pending;
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
mod tests;
