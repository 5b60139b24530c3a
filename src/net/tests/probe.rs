//! A transport that notes what is asked of it, and panics when it is told to.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

use crate::net::transport::Carrier;

/// The server's end of a connection in memory.
pub struct Probe {
    pub io: DuplexStream,
    /// The next read that brings something panics.
    pub panics: Rc<Cell<bool>>,
    /// How often it was to be told what has come.
    pub acknowledged: Rc<Cell<u32>>,
}

impl AsyncRead for Probe {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(context, buf);
        assert!(read.is_pending() || !self.panics.get(), "the transport was told to panic");
        read
    }
}

impl AsyncWrite for Probe {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

impl Carrier for Probe {
    fn acknowledge(&self) {
        self.acknowledged.set(self.acknowledged.get() + 1);
    }
}
