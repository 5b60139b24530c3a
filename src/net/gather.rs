//! Between HTTP/2 and the socket: gathers small writes.
//!
//! Why: h2 flushes after each DATA frame of more than 256 bytes, which is a system call for each small reply. Gathered,
//! all that a connection has to say in one of its turns goes out at once. What is large is not copied: it goes to the
//! socket as it is, behind what was gathered, and the socket knows that more may follow. (Reading ahead is the socket's
//! part too: `rt::tcp`.)

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::limits;

/// Write buffers that no connection uses now, each with room for `WRITE_GATHER_LEN` bytes. Why shared: a connection
/// holds one only while it has bytes that the socket has not taken. Clones share the pool; core-local.
#[derive(Clone, Default)]
pub struct Buffers(Rc<RefCell<Vec<Vec<u8>>>>);

/// How many unused buffers a core keeps.
const SPARE_MAX: usize = 8;

impl Buffers {
    fn take(&self) -> Vec<u8> {
        self.0.borrow_mut().pop().unwrap_or_else(|| Vec::with_capacity(limits::WRITE_GATHER_LEN))
    }

    fn give_back(&self, mut buffer: Vec<u8>) {
        let mut spare = self.0.borrow_mut();
        if spare.len() < SPARE_MAX {
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
    /// Bytes written and not sent yet. Has its room only while it is not empty.
    gathered: Vec<u8>,
}

impl<T> Clone for Gathered<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: AsyncWrite + Unpin> Gathered<T> {
    pub fn new(io: T, buffers: Buffers) -> Self {
        Self(Rc::new(RefCell::new(State { io, buffers, gathered: Vec::new() })))
    }

    /// Sends what was gathered. Pending while the socket is full.
    pub fn poll_send(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.borrow_mut().poll_send(context)
    }
}

impl<T: AsyncWrite + Unpin> State<T> {
    fn poll_write(&mut self, context: &mut Context<'_>, data: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let len: usize = data.iter().map(|slice| slice.len()).sum();
        loop {
            if len <= limits::WRITE_COPY_LEN_MAX && self.gathered.len() + len <= limits::WRITE_GATHER_LEN {
                if self.gathered.capacity() == 0 {
                    self.gathered = self.buffers.take();
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
            self.buffers.give_back(std::mem::take(&mut self.gathered));
        }
        Pin::new(&mut self.io).poll_flush(context)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Gathered<T> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.borrow_mut().io).poll_read(context, buf)
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
    use super::*;

    /// A socket that takes at most `take` bytes at a time, none when it is 0, and counts the calls.
    struct Socket {
        take: usize,
        calls: usize,
        got: Vec<u8>,
    }

    impl AsyncWrite for Socket {
        fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
            let count = data.len().min(self.take);
            if count == 0 {
                return Poll::Pending;
            }
            self.calls += 1;
            self.got.extend_from_slice(&data[..count]);
            Poll::Ready(Ok(count))
        }
        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Goal: bytes keep their order and none is lost, whatever the socket takes, and small writes become one. Method:
    /// writes of growing size over sockets that take 1000 bytes, or everything, at a time.
    #[test]
    fn keeps_the_order() {
        let mut context = Context::from_waker(std::task::Waker::noop());
        for take in [1000, usize::MAX] {
            let mut io = Gathered::new(Socket { take, calls: 0, got: Vec::new() }, Buffers::default());
            let mut expected = Vec::new();
            for len in [1, 5, 4000, 70_000, 10, 60_000, 6000, 200_000, 1] {
                let piece: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
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
            assert_eq!(io.0.borrow().gathered.capacity(), 0);
        }
        let io = Gathered::new(Socket { take: usize::MAX, calls: 0, got: Vec::new() }, Buffers::default());
        for _ in 0..100 {
            assert!(Pin::new(&mut io.clone()).poll_write(&mut context, &[7; 100]).is_ready());
        }
        assert!(io.poll_send(&mut context).is_ready());
        assert_eq!(io.0.borrow().io.calls, 1);
        io.0.borrow_mut().io.take = 0;
        assert!(Pin::new(&mut io.clone()).poll_write(&mut context, b"kept").is_ready());
        assert!(io.poll_send(&mut context).is_pending());
        assert_eq!(io.0.borrow().gathered, b"kept");
    }
}
