//! The bytes of a connection, encrypted or not, and what is spoken on it.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::tls::TlsStream;
use crate::rt::tcp::TcpConn;

/// What a client of HTTP/2 with prior knowledge sends first. Source: RFC 9113, 3.4.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What carries a connection's bytes, encrypted or not.
pub trait Carrier: AsyncRead + AsyncWrite + Unpin {
    /// Tells the peer at once what has come, when that is known to be all for now.
    ///
    /// Why: by Nagle's algorithm a client holds a short body back until the head before it is acknowledged, and the kernel takes
    /// 40 ms for that, as it hopes for an answer to put it on.
    fn acknowledge(&self);
}

impl Carrier for TcpConn {
    fn acknowledge(&self) {
        TcpConn::acknowledge(self);
    }
}

#[cfg(test)]
impl Carrier for tokio::io::DuplexStream {
    fn acknowledge(&self) {}
}

/// A connection.
pub struct Transport<T> {
    io: Io<T>,
    /// What was read to see which protocol is spoken, and not given on yet: `start..end` of it.
    ahead: [u8; PREFACE.len()],
    start: usize,
    end: usize,
}

enum Io<T> {
    Plain(T),
    Tls(Box<TlsStream<T>>),
}

/// What is spoken on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    Http2,
    Http1,
}

impl<T> Transport<T> {
    fn new(io: Io<T>) -> Self {
        Self { io, ahead: [0; PREFACE.len()], start: 0, end: 0 }
    }

    pub fn plain(io: T) -> Self {
        Self::new(Io::Plain(io))
    }

    pub fn tls(stream: TlsStream<T>) -> Self {
        Self::new(Io::Tls(Box::new(stream)))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Transport<T> {
    /// Waits for what a client sends first, and tells what it speaks. `None` when it goes away before. The caller has a
    /// deadline.
    pub async fn protocol(&mut self) -> io::Result<Option<Protocol>> {
        while self.end < PREFACE.len() {
            let Self { io, ahead, end, .. } = self;
            let mut buf = ReadBuf::new(&mut ahead[*end..]);
            std::future::poll_fn(|context| poll_read(io, context, &mut buf)).await?;
            let got = buf.filled().len();
            if got == 0 {
                return Ok(None);
            }
            *end += got;
            // No method of HTTP/1.1 begins as the preface does.
            if ahead[..*end] != PREFACE[..*end] {
                return Ok(Some(Protocol::Http1));
            }
        }
        Ok(Some(Protocol::Http2))
    }
}

fn poll_read<T: AsyncRead + AsyncWrite + Unpin>(
    io: &mut Io<T>,
    context: &mut Context<'_>,
    buf: &mut ReadBuf<'_>,
) -> Poll<io::Result<()>> {
    match io {
        Io::Plain(io) => Pin::new(io).poll_read(context, buf),
        Io::Tls(stream) => Pin::new(stream).poll_read(context, buf),
    }
}

impl<T: Carrier> Carrier for Transport<T> {
    fn acknowledge(&self) {
        match &self.io {
            Io::Plain(io) => io.acknowledge(),
            Io::Tls(stream) => stream.get_ref().0.acknowledge(),
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Transport<T> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.start < self.end && buf.remaining() > 0 {
            let count = buf.remaining().min(self.end - self.start);
            buf.put_slice(&self.ahead[self.start..self.start + count]);
            self.start += count;
            return Poll::Ready(Ok(()));
        }
        poll_read(&mut self.io, context, buf)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Transport<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Io::Plain(io) => Pin::new(io).poll_write(context, data),
            Io::Tls(stream) => Pin::new(stream).poll_write(context, data),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Io::Plain(io) => Pin::new(io).poll_write_vectored(context, data),
            Io::Tls(stream) => Pin::new(stream).poll_write_vectored(context, data),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(io) => io.is_write_vectored(),
            Io::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Plain(io) => Pin::new(io).poll_flush(context),
            Io::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Io::Plain(io) => Pin::new(io).poll_shutdown(context),
            Io::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::rt::cores::block_on;

    /// Goal: the protocol is told by the first bytes, however they are cut, and none of them is lost. Method: requests of both
    /// kinds, byte by byte and as a whole; some that begin as the other does.
    #[test]
    fn told_by_the_first_bytes() {
        const REQUEST: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nand what follows it";
        let cases: [(&'static [u8], _); 6] = [
            (REQUEST, Some(Protocol::Http2)),
            (b"GET / HTTP/1.1\r\n\r\n", Some(Protocol::Http1)),
            (b"PUT /cas/x HTTP/1.1\r\n\r\n", Some(Protocol::Http1)),
            (b"PRI * HTTP/1.1\r\n\r\nlonger than a preface", Some(Protocol::Http1)),
            (b"PRI * HT", None),
            (b"", None),
        ];
        for (sent, expected) in cases {
            for piece in [1, 7, 1000] {
                block_on(async {
                    let (mut ours, theirs) = tokio::io::duplex(1 << 10);
                    crate::rt::spawn(async move {
                        for piece in sent.chunks(piece) {
                            ours.write_all(piece).await.expect("room");
                            crate::rt::time::yield_once().await;
                        }
                    });
                    let mut transport = Transport::plain(theirs);
                    assert_eq!(transport.protocol().await.expect("a socket"), expected);
                    let mut read = Vec::new();
                    transport.read_to_end(&mut read).await.expect("a socket");
                    assert_eq!(read, sent);
                });
            }
        }
    }
}
