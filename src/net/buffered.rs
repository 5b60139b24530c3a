//! Between HTTP/2 and the socket: reads ahead, gathers small writes, and gives the core away in time.
//!
//! Why: h2 reads 8 KiB at a time and flushes after each DATA frame, which is 128 system calls for each MiB and one for
//! each small reply. Reading 256 KiB ahead and writing once for each turn of the connection makes them few.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::limits;

/// Buffers that no connection uses now. Why shared: an idle connection holds none, a busy one only while it has bytes
/// that HTTP/2 or the socket has not taken yet. Clones share the pool; core-local.
#[derive(Clone, Default)]
pub struct Buffers(Rc<RefCell<Spare>>);

#[derive(Default)]
struct Spare {
    /// Each of `READ_AHEAD_LEN` bytes.
    read: Vec<Box<[u8]>>,
    /// Each empty, with room for `WRITE_GATHER_LEN` bytes.
    write: Vec<Vec<u8>>,
}

/// How many unused buffers of each kind a core keeps.
const SPARE_MAX: usize = 8;

impl Buffers {
    fn take_read(&self) -> Box<[u8]> {
        self.0.borrow_mut().read.pop().unwrap_or_else(|| vec![0; limits::READ_AHEAD_LEN].into())
    }

    fn give_back_read(&self, buffer: Box<[u8]>) {
        let mut spare = self.0.borrow_mut();
        if spare.read.len() < SPARE_MAX {
            spare.read.push(buffer);
        }
    }

    fn take_write(&self) -> Vec<u8> {
        self.0.borrow_mut().write.pop().unwrap_or_else(|| Vec::with_capacity(limits::WRITE_GATHER_LEN))
    }

    fn give_back_write(&self, mut buffer: Vec<u8>) {
        let mut spare = self.0.borrow_mut();
        if spare.write.len() < SPARE_MAX {
            buffer.clear();
            spare.write.push(buffer);
        }
    }
}

/// A transport with both buffers. Clones share it: HTTP/2 owns one and the connection's driver another, to say when a
/// turn begins and to send what was gathered in it.
pub struct Buffered<T>(Rc<RefCell<State<T>>>);

struct State<T> {
    io: T,
    buffers: Buffers,
    /// Bytes read and not taken yet: the buffer, and which part of it.
    ahead: Option<(Box<[u8]>, std::ops::Range<usize>)>,
    /// Bytes that may still be read in this turn.
    turn_left: usize,
    /// Bytes written and not sent yet. Has its room only while it is not empty.
    gathered: Vec<u8>,
}

impl<T> Clone for Buffered<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Buffered<T> {
    pub fn new(io: T, buffers: Buffers) -> Self {
        let turn_left = limits::CONNECTION_READ_TURN_LEN;
        Self(Rc::new(RefCell::new(State { io, buffers, ahead: None, turn_left, gathered: Vec::new() })))
    }

    /// Begins a turn: `CONNECTION_READ_TURN_LEN` bytes may be read until the next one.
    pub fn begin_turn(&self) {
        self.0.borrow_mut().turn_left = limits::CONNECTION_READ_TURN_LEN;
    }

    /// True when this turn has read all that it may: reads are pending with nobody to wake them, so the driver must
    /// begin another turn after the core's other work.
    pub fn is_turn_over(&self) -> bool {
        self.0.borrow().turn_left == 0
    }

    /// Sends what was gathered. Pending while the socket is full.
    pub fn poll_send(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.borrow_mut().poll_send(context)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> State<T> {
    fn poll_read(&mut self, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some((buffer, range)) = &mut self.ahead {
            let count = range.len().min(buf.remaining());
            buf.put_slice(&buffer[range.start..range.start + count]);
            range.start += count;
            if range.start == range.end
                && let Some((buffer, _)) = self.ahead.take()
            {
                self.buffers.give_back_read(buffer);
            }
            return Poll::Ready(Ok(()));
        }
        if self.turn_left == 0 {
            return Poll::Pending;
        }
        if buf.remaining() >= limits::READ_AHEAD_LEN / 4 {
            let before = buf.filled().len();
            ready!(Pin::new(&mut self.io).poll_read(context, buf))?;
            self.turn_left = self.turn_left.saturating_sub(buf.filled().len() - before);
            return Poll::Ready(Ok(()));
        }
        let mut buffer = self.buffers.take_read();
        let mut ahead = ReadBuf::new(&mut buffer);
        let result = Pin::new(&mut self.io).poll_read(context, &mut ahead);
        let read = ahead.filled().len();
        let count = read.min(buf.remaining());
        buf.put_slice(&ahead.filled()[..count]);
        self.turn_left = self.turn_left.saturating_sub(read);
        if count < read {
            self.ahead = Some((buffer, count..read));
        } else {
            self.buffers.give_back_read(buffer);
        }
        result
    }

    fn poll_write(&mut self, context: &mut Context<'_>, data: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let len: usize = data.iter().map(|slice| slice.len()).sum();
        loop {
            if self.gathered.len() + len <= limits::WRITE_GATHER_LEN {
                if self.gathered.capacity() == 0 {
                    self.gathered = self.buffers.take_write();
                }
                data.iter().for_each(|slice| self.gathered.extend_from_slice(slice));
                return Poll::Ready(Ok(len));
            }
            if self.gathered.is_empty() {
                return Pin::new(&mut self.io).poll_write_vectored(context, data);
            }
            let mut slices = [IoSlice::new(&[]); 16];
            let given = data.len().min(slices.len() - 1);
            slices[0] = IoSlice::new(&self.gathered);
            slices[1..=given].copy_from_slice(&data[..given]);
            let written = ready!(Pin::new(&mut self.io).poll_write_vectored(context, &slices[..=given]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_gathered = written.min(self.gathered.len());
            self.gathered.drain(..of_gathered);
            if written > of_gathered {
                return Poll::Ready(Ok(written - of_gathered));
            }
        }
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.gathered.is_empty() {
            let written = ready!(Pin::new(&mut self.io).poll_write(context, &self.gathered))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.gathered.drain(..written);
        }
        if self.gathered.capacity() > 0 {
            self.buffers.give_back_write(std::mem::take(&mut self.gathered));
        }
        Pin::new(&mut self.io).poll_flush(context)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Buffered<T> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.0.borrow_mut().poll_read(context, buf)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Buffered<T> {
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

impl<T> Drop for State<T> {
    fn drop(&mut self) {
        if let Some((buffer, _)) = self.ahead.take() {
            self.buffers.give_back_read(buffer);
        }
    }
}
