//! Connections over TCP and unix sockets: a listener whose accepted sockets can be handed to another core, connections to
//! servers, and a stream that h2 can drive.
//!
//! Why plain descriptors and not glommio's streams: a dropped accept cannot lose a socket here, since the accept itself
//! is one system call; an unserved socket closes when it is dropped; and both kinds of socket are one type.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use glommio::io::{PollState, PollableFd};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::listen::{self, Bound};
use super::{pulse, time};
use crate::limits::{READ_AHEAD_BUFS_MAX, READ_AHEAD_LEN};

/// A read into at least this many bytes goes there directly, past the read-ahead buffer.
const BYPASS_LEN: usize = 64 << 10;
/// Bytes that a connection reads before the reactor gets a turn, so that one fast uploader does not keep its core.
const IN_A_ROW_MAX: usize = 1 << 20;
/// Accepts in a row after which the reactor gets a turn.
const ACCEPTS_IN_A_ROW: u32 = 16;
/// Pause after a failed accept, as a full table of descriptors does not empty at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Who is at the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    Tcp(SocketAddr),
    /// A process of this host, over a unix socket.
    Unix,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix => f.write_str("unix"),
        }
    }
}

/// A listening socket of this core.
pub struct Listener {
    socket: PollableFd<Socket>,
    in_a_row: Cell<u32>,
}

/// An accepted connection that no core owns yet. Closes when dropped.
pub struct Accepted {
    socket: Socket,
    peer: Peer,
}

impl Listener {
    /// Takes over a bound socket on this core.
    pub fn adopt(bound: Bound) -> Self {
        let socket = bound.into_socket();
        socket.set_nonblocking(true).expect("a listening socket can be made non-blocking");
        let socket = PollableFd::new(socket).expect("an executor runs on this thread");
        Self { socket, in_a_row: Cell::new(0) }
    }

    /// The next connection. Dropping the future loses nothing.
    pub async fn accept(&self) -> io::Result<Accepted> {
        if self.in_a_row.replace(self.in_a_row.get() + 1) >= ACCEPTS_IN_A_ROW {
            self.in_a_row.set(0);
            time::yield_to_reactor().await;
        }
        loop {
            match try_accept(self.socket.get_ref()) {
                Ok(accepted) => {
                    pulse::touch();
                    return Ok(accepted);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.in_a_row.set(0);
                    self.socket.readable().await?;
                }
                // The client went away before its turn.
                Err(error) if is_of_one_client(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The next connection, whatever goes wrong meanwhile: a failure that stays (no descriptors, no memory) is logged,
    /// less and less often, and waited out.
    pub async fn accept_patiently(&self) -> Accepted {
        let mut failures = 0u32;
        loop {
            match self.accept().await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    failures = failures.saturating_add(1);
                    if failures.is_power_of_two() {
                        tracing::warn!(%error, failures, "cannot accept; raise the limit of open files (LimitNOFILE)");
                    }
                    time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// Errors that say nothing about the listener. Source: accept(2), "Error handling".
fn is_of_one_client(error: &io::Error) -> bool {
    const OF_ONE_CLIENT: [i32; 11] = [
        libc::EINTR,
        libc::ECONNABORTED,
        libc::EPERM,
        libc::EPROTO,
        libc::ENOPROTOOPT,
        libc::ENETDOWN,
        libc::EHOSTDOWN,
        libc::ENONET,
        libc::EHOSTUNREACH,
        libc::EOPNOTSUPP,
        libc::ENETUNREACH,
    ];
    error.raw_os_error().is_some_and(|code| OF_ONE_CLIENT.contains(&code))
}

fn try_accept(socket: &Socket) -> io::Result<Accepted> {
    let (socket, peer) = socket.accept()?;
    Ok(Accepted { socket, peer: peer.as_socket().map_or(Peer::Unix, Peer::Tcp) })
}

impl Accepted {
    /// The client's address.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Makes this core the owner.
    pub fn own(self) -> io::Result<TcpConn> {
        self.socket.set_nonblocking(true)?;
        if matches!(self.peer, Peer::Tcp(_)) {
            self.socket.set_tcp_nodelay(true)?;
        }
        Ok(TcpConn::over(PollableFd::new(self.socket)?, self.peer))
    }
}

/// Connects to a server. Waits as long as the kernel does: the caller has a deadline.
pub async fn connect(address: SocketAddr) -> io::Result<TcpConn> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&listen::keepalive())?;
    let begun = socket.connect(&address.into());
    let socket = PollableFd::new(socket)?;
    match begun {
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
            socket.writable().await?;
            if let Some(error) = socket.get_ref().take_error()? {
                return Err(error);
            }
        }
        begun => begun?,
    }
    Ok(TcpConn::over(socket, Peer::Tcp(address)))
}

/// A connection owned by this core.
///
/// h2 reads 8 KiB at a time, which is 128 system calls for each MiB. So a read takes what the socket has, up to
/// `READ_AHEAD_LEN`, into a buffer that the core's connections share; a connection holds one only between a read that
/// brought more than was asked for and the reads that fetch the rest.
pub struct TcpConn {
    readable: Readiness,
    writable: Readiness,
    socket: PollableFd<Socket>,
    peer: Peer,
    /// Bytes read since the reactor had a turn.
    in_a_row: usize,
    ahead: Option<Ahead>,
    /// Changes what comes, before anybody reads it.
    filter: Option<Filter>,
}

/// Is given all that a connection brings, in order, to change it in place.
pub type Filter = Box<dyn FnMut(&mut [u8])>;

impl TcpConn {
    fn over(socket: PollableFd<Socket>, peer: Peer) -> Self {
        let (readable, writable) = (Readiness::new(), Readiness::new());
        Self { readable, writable, socket, peer, in_a_row: 0, ahead: None, filter: None }
    }

    /// Changes what comes from now on.
    pub fn filter(&mut self, filter: Filter) {
        self.filter = Some(filter);
    }

    /// The client's address.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Bytes that were read ahead and not asked for yet.
    pub fn read_ahead(&self) -> usize {
        self.ahead.as_ref().map_or(0, |ahead| ahead.end - ahead.start)
    }

    /// Acknowledges what has come, if that is still to be done: one system call.
    pub fn acknowledge(&self) {
        if matches!(self.peer, Peer::Tcp(_)) {
            // Why ignored: a failure costs the peer some milliseconds, and the next read says what is wrong.
            let _ = self.socket.get_ref().set_tcp_quickack(true);
        }
    }

    /// One read from the socket. `WouldBlock` when it has nothing.
    fn receive(&mut self, buf: &mut ReadBuf<'_>) -> io::Result<()> {
        let socket = self.socket.get_ref();
        let (got, room) = match Ahead::take().filter(|_| buf.remaining() < BYPASS_LEN) {
            Some(mut ahead) => {
                ahead.end = io::Read::read(&mut &*socket, &mut ahead.bytes)?;
                ahead.give(buf);
                let sizes = (ahead.end, ahead.bytes.len());
                self.ahead = (ahead.start < ahead.end).then_some(ahead);
                sizes
            }
            None => {
                let room = buf.remaining();
                // SAFETY: `recv` only writes to the slice, so nothing in it becomes uninitialized.
                let got = socket.recv(unsafe { buf.unfilled_mut() })?;
                // SAFETY: `recv` has initialized the first `got` bytes.
                unsafe { buf.assume_init(got) };
                buf.advance(got);
                (got, room)
            }
        };
        if got > 0 {
            pulse::touch();
            self.in_a_row += got;
            // A short read has emptied the socket, so the next one would be in vain.
            self.readable.needed = got < room || self.in_a_row >= IN_A_ROW_MAX;
        }
        Ok(())
    }
}

impl AsyncRead for TcpConn {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(self.poll_unfiltered(context, buf))?;
        if let Some(filter) = &mut self.filter {
            filter(&mut buf.filled_mut()[before..]);
        }
        Poll::Ready(Ok(()))
    }
}

impl TcpConn {
    fn poll_unfiltered(&mut self, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let conn = self;
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        if let Some(ahead) = &mut conn.ahead {
            ahead.give(buf);
            if ahead.start == ahead.end {
                conn.ahead = None;
            }
            return Poll::Ready(Ok(()));
        }
        loop {
            if conn.readable.needed {
                let socket = &conn.socket;
                ready!(conn.readable.poll(context, |context, state| socket.poll_readable(context, state)))?;
                conn.in_a_row = 0;
            }
            match conn.receive(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => conn.readable.needed = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                received => return Poll::Ready(received),
            }
        }
    }

    fn poll_send(
        &mut self,
        context: &mut Context<'_>,
        send: impl Fn(&Socket) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            if self.writable.needed {
                let socket = &self.socket;
                ready!(self.writable.poll(context, |context, state| socket.poll_writable(context, state)))?;
            }
            match send(self.socket.get_ref()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable.needed = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => return Poll::Ready(sent),
            }
        }
    }
}

impl AsyncWrite for TcpConn {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send(context, |socket| socket.send_with_flags(data, libc::MSG_NOSIGNAL))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let data = &data[..data.len().min(libc::UIO_MAXIOV as usize)];
        self.poll_send(context, |socket| socket.send_vectored_with_flags(data, libc::MSG_NOSIGNAL))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Ends our half; the peer may go on sending.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(match self.socket.get_ref().shutdown(std::net::Shutdown::Write) {
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()), // The peer has reset it.
            ended => ended,
        })
    }
}

/// The wait for one direction of a socket.
///
/// Why the waker in between: each poll of glommio's registration adds one more waker to it, and a connection task is
/// polled for many other reasons while its socket is silent. So the registration is polled only after it has fired.
struct Readiness {
    registration: PollState,
    fired: Arc<Fired>,
    waker: Waker,
    /// The next call on the socket must wait for it first.
    needed: bool,
    registered: bool,
}

#[derive(Default)]
struct Fired {
    fired: AtomicBool,
    task: AtomicWaker,
}

impl Wake for Fired {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.fired.store(true, Ordering::Release);
        self.task.wake();
    }
}

impl Readiness {
    fn new() -> Self {
        let fired = Arc::<Fired>::default();
        let waker = fired.clone().into();
        Self { registration: PollState::default(), fired, waker, needed: false, registered: false }
    }

    fn poll(
        &mut self,
        context: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>, &mut PollState) -> Poll<Result<(), glommio::GlommioError<()>>>,
    ) -> Poll<io::Result<()>> {
        self.fired.task.register(context.waker());
        if self.registered && !self.fired.fired.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        self.registered = true;
        let result = ready!(poll(&mut Context::from_waker(&self.waker), &mut self.registration));
        (self.needed, self.registered) = (false, false);
        self.fired.fired.store(false, Ordering::Release);
        Poll::Ready(result.map_err(Into::into))
    }
}

/// A read-ahead buffer on loan from the core's pool; goes back when dropped.
struct Ahead {
    bytes: Box<[u8]>,
    /// What is in it and not given away yet: `start..end`.
    start: usize,
    end: usize,
}

struct Pool {
    spare: Vec<Box<[u8]>>,
    lent: usize,
    /// How many may be lent.
    most: usize,
}

impl Default for Pool {
    fn default() -> Self {
        Self { spare: Vec::new(), lent: 0, most: READ_AHEAD_BUFS_MAX }
    }
}

/// How much memory this core has for read-ahead, at least one buffer; as much as may be when nothing is said.
pub fn read_ahead(bytes: usize) {
    POOL.with_borrow_mut(|pool| pool.most = (bytes / READ_AHEAD_LEN).clamp(1, READ_AHEAD_BUFS_MAX));
}

thread_local! {
    static POOL: RefCell<Pool> = RefCell::default();
}

/// Spare buffers that a core keeps; in the steady state it needs one.
const SPARES_MAX: usize = 4;

impl Ahead {
    /// A buffer, unless the core has lent all that it may.
    fn take() -> Option<Self> {
        POOL.with_borrow_mut(|pool| {
            if pool.lent >= pool.most {
                return None;
            }
            pool.lent += 1;
            let bytes = pool.spare.pop().unwrap_or_else(|| vec![0; READ_AHEAD_LEN].into_boxed_slice());
            Some(Self { bytes, start: 0, end: 0 })
        })
    }

    fn give(&mut self, buf: &mut ReadBuf<'_>) {
        let count = buf.remaining().min(self.end - self.start);
        buf.put_slice(&self.bytes[self.start..self.start + count]);
        self.start += count;
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        // A thread that is ending has no pool any more.
        let _ = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            pool.lent -= 1;
            if pool.spare.len() < SPARES_MAX {
                pool.spare.push(bytes);
            }
        });
    }
}
