//! TCP: a listener whose accepted sockets can be handed to another core, and a stream that h2 can drive.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::io::{AsyncRead as _, AsyncWrite as _};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A listening socket of this core.
pub struct Listener(glommio::net::TcpListener);

/// An accepted connection that no core owns yet.
pub struct Accepted {
    socket: OwnedFd,
    peer: SocketAddr,
}

/// A connection owned by this core.
pub struct TcpConn {
    stream: glommio::net::TcpStream,
    peer: SocketAddr,
}

/// A bound, listening socket (SO_REUSEADDR, SO_REUSEPORT) that no core owns yet; bind errors show before cores start.
pub fn bind(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    use socket2::{Domain, Protocol, Socket, Type};
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}

/// All interfaces: `[::]`, which also takes IPv4, or `0.0.0.0` on a machine without IPv6.
pub fn any_interface(port: u16) -> SocketAddr {
    let v6 = std::net::Ipv6Addr::UNSPECIFIED;
    match socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::STREAM, None) {
        Ok(_) if std::path::Path::new("/proc/net/if_inet6").exists() => (v6, port).into(),
        _ => (std::net::Ipv4Addr::UNSPECIFIED, port).into(),
    }
}

impl Listener {
    /// Takes over a bound socket on this core.
    pub fn adopt(socket: std::net::TcpListener) -> Self {
        // SAFETY: `into_raw_fd` gives up ownership, which the glommio listener takes.
        Self(unsafe { glommio::net::TcpListener::from_raw_fd(socket.into_raw_fd()) })
    }

    /// The next connection. Run it in one task that is never cancelled: a dropped accept can lose a socket.
    pub async fn accept(&self) -> io::Result<Accepted> {
        let stream = self.0.accept().await?;
        let peer = stream.peer_addr()?;
        // SAFETY: `into_raw_fd` gives up ownership of the descriptor.
        let socket = unsafe { OwnedFd::from_raw_fd(stream.into_raw_fd()) };
        Ok(Accepted { socket, peer })
    }
}

impl Accepted {
    /// Makes this core the owner.
    pub fn own(self) -> io::Result<TcpConn> {
        // SAFETY: as in `accept`.
        let stream = unsafe { glommio::net::TcpStream::from_raw_fd(self.socket.into_raw_fd()) };
        stream.set_nodelay(true)?;
        Ok(TcpConn { stream, peer: self.peer })
    }
}

impl TcpConn {
    /// The client's address.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }
}

impl AsyncRead for TcpConn {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let room = buf.initialize_unfilled();
        match Pin::new(&mut self.stream).poll_read(context, room) {
            Poll::Ready(Ok(got)) => {
                buf.advance(got);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncWrite for TcpConn {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, data)
    }
    fn is_write_vectored(&self) -> bool {
        true
    }
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_close(context)
    }
}
