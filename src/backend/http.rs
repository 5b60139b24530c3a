//! HTTP/1.1 towards one server: connections that are kept for a while and used again. Core-local.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::rt::ReadBufCursor;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::tls::{Tls, TlsConn};
use crate::limits::{BACKEND_ADDRESSES_KEEP_MS, BACKEND_DIAL_MS, BACKEND_HEAD_MS, BACKEND_IDLE_MS};
use crate::rt;
use crate::rt::local::{Event, Local};
use crate::rt::tcp::TcpConn;

pub use hyper::{HeaderMap, Method, Request, Uri};

/// The server that a pool talks to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// A name, or an address without brackets.
    pub host: String,
    pub port: u16,
    pub tls: bool,
}

impl Target {
    /// The server that an `http://` or `https://` URL names, and the path there, which begins with a slash.
    pub fn parse(url: &str) -> Option<(Self, String)> {
        let (scheme, rest) = url.split_once("://")?;
        let tls = match scheme {
            "http" => false,
            "https" => true,
            _ => return None,
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = Self::split_authority(authority)?;
        let target = Self { host, port: port.unwrap_or(if tls { 443 } else { 80 }), tls };
        Some((target, format!("/{path}")))
    }

    /// `host`, `host:port`, `[v6]`, `[v6]:port`.
    pub fn split_authority(authority: &str) -> Option<(String, Option<u16>)> {
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest.split_once(']')?;
                (host, if after.is_empty() { None } else { Some(after.strip_prefix(':')?) })
            }
            None => authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port))),
        };
        let is_host = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
        if host.is_empty() || !host.chars().all(is_host) {
            return None;
        }
        let port = port.map(|port| port.parse().map_err(drop)).transpose().ok()?;
        Some((host.to_owned(), port))
    }

    /// The `Host` header: with the port when it is not the scheme's own.
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        match (self.tls, self.port) {
            (true, 443) | (false, 80) => host,
            (_, port) => format!("{host}:{port}"),
        }
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("cannot find {host}: {source}")]
    Resolve { host: String, source: io::Error },
    #[error("cannot connect to {authority}: {source}")]
    Connect { authority: String, source: io::Error },
    #[error("TLS with {authority}: {source}")]
    Tls { authority: String, source: io::Error },
    #[error("{authority} broke off: {detail}")]
    Broken { authority: String, detail: String },
    #[error("the body to send could not be read: {0}")]
    OurBody(String),
}

/// What is sent.
pub enum OutBody {
    /// Bytes that are all here.
    Pieces(VecDeque<Bytes>),
    /// Bytes that are read while they are sent: exactly `left` of them.
    Stream { pieces: Pin<Box<dyn futures_core::Stream<Item = Result<Bytes, BodyError>>>>, left: u64 },
}

/// Our own source of bytes failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct BodyError(pub String);

impl OutBody {
    pub fn empty() -> Self {
        Self::Pieces(VecDeque::new())
    }

    /// Bytes that are still to come.
    fn left(&self) -> u64 {
        match self {
            Self::Pieces(pieces) => pieces.iter().map(|piece| piece.len() as u64).sum(),
            Self::Stream { left, .. } => *left,
        }
    }

    /// The next bytes, for whoever reads a body without sending it.
    pub async fn next(&mut self) -> Result<Option<Bytes>, HttpError> {
        let frame = poll_fn(|context| Pin::new(&mut *self).poll_frame(context)).await;
        let frame = frame.transpose().map_err(|error| HttpError::OurBody(error.0))?;
        Ok(frame.and_then(|frame| frame.into_data().ok()))
    }
}

impl hyper::body::Body for OutBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let (piece, left) = match self.get_mut() {
            Self::Pieces(pieces) => return Poll::Ready(pieces.pop_front().map(|piece| Ok(Frame::data(piece)))),
            Self::Stream { left: 0, .. } => return Poll::Ready(None),
            Self::Stream { pieces, left } => (std::task::ready!(pieces.as_mut().poll_next(context)), left),
        };
        Poll::Ready(Some(match piece {
            Some(Ok(piece)) if piece.len() as u64 <= *left => {
                *left -= piece.len() as u64;
                Ok(Frame::data(piece))
            }
            Some(Ok(_)) => Err(BodyError("there are more bytes than were announced".into())),
            Some(Err(error)) => Err(error),
            None => Err(BodyError(format!("{left} bytes are missing"))),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.left() == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left())
    }
}

/// A body that is being sent.
struct Outgoing {
    body: OutBody,
    /// Bytes that the connection has not taken yet.
    left: Rc<Cell<u64>>,
}

impl Outgoing {
    fn of(request: Request<OutBody>) -> (Request<Self>, Rc<Cell<u64>>) {
        let left = Rc::new(Cell::new(request.body().left()));
        (request.map(|body| Self { body, left: left.clone() }), left)
    }
}

impl hyper::body::Body for Outgoing {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(context);
        this.left.set(this.body.left());
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer's head, and its body.
pub struct Response {
    pub status: u16,
    /// Bytes of the request's body that were not sent when it came.
    pub unsent: u64,
    pub headers: HeaderMap,
    pub body: Body,
}

impl Response {
    /// A header's text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// Whether the end of the body can be told from a broken connection.
    pub fn is_delimited(&self) -> bool {
        self.content_length().is_some() || self.headers.contains_key("transfer-encoding")
    }

    /// `Content-Length`.
    pub fn content_length(&self) -> Option<u64> {
        self.header("content-length")?.parse().ok()
    }
}

/// An answer's body. When it has been read to its end the connection is used again; dropped before, it is closed.
pub struct Body {
    incoming: Incoming,
    connection: Option<(Pool, Connection)>,
    /// Whether the connection may be of use after this.
    again: bool,
}

impl Body {
    /// The next bytes; `None` at the end. A body that ends too early is an error.
    pub async fn next(&mut self) -> Result<Option<Bytes>, HttpError> {
        loop {
            let frame = match self.incoming.is_end_stream() {
                true => None,
                false => poll_fn(|context| Pin::new(&mut self.incoming).poll_frame(context)).await,
            };
            match frame {
                None => {
                    if let Some((pool, connection)) = self.connection.take().filter(|_| self.again) {
                        pool.keep(connection);
                    }
                    return Ok(None);
                }
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if !data.is_empty() => return Ok(Some(data)),
                    Ok(_) | Err(_) => {}
                },
                Some(Err(error)) => {
                    let pool = self.connection.take().map(|(pool, _)| pool);
                    let authority = pool.map_or_else(String::new, |pool| pool.0.target.authority());
                    return Err(HttpError::Broken { authority, detail: describe(&error) });
                }
            }
        }
    }
}

/// Connections to one server. Clones share them.
#[derive(Clone)]
pub struct Pool(Rc<Inner>);

struct Inner {
    target: Target,
    tls: Option<Tls>,
    times: PoolTimes,
    /// In the order in which they became idle.
    idle: Local<VecDeque<Connection>>,
    addresses: Local<Addresses>,
    sweeping: Local<bool>,
}

/// How long connections live.
#[derive(Debug, Clone, Copy)]
pub struct PoolTimes {
    /// An older one is not used again, so that a change of addresses is seen; `None` for no such limit.
    pub recycle: Option<Duration>,
    /// Idle ones that are kept, and for how long.
    pub idle_max: usize,
    pub idle: Duration,
    /// What a name, a connection and its TLS may take.
    pub connect: Duration,
}

impl PoolTimes {
    /// Of a connection that is for one request.
    pub const ONCE: Self = Self { recycle: None, idle_max: 0, idle: IDLE, connect: CONNECT };
}

#[derive(Default)]
struct Addresses {
    found: Vec<SocketAddr>,
    until: Option<Instant>,
    /// Which one is next.
    next: usize,
    /// The lookup that runs, for all who wait: a resolver that hangs keeps one thread, whoever asks how often.
    lookup: Option<Rc<Lookup>>,
}

impl Addresses {
    fn in_turn(&mut self) -> Vec<SocketAddr> {
        self.next = self.next.wrapping_add(1);
        let mut all = self.found.clone();
        let first = self.next.checked_rem(all.len()).unwrap_or(0);
        all.rotate_left(first);
        all
    }

    /// Uses this one no more; when there is no other, the next connection looks the name up again.
    fn leave_out(&mut self, address: SocketAddr) {
        self.found.retain(|found| *found != address);
        if self.found.is_empty() {
            self.until = None;
        }
    }
}

#[derive(Default)]
struct Lookup {
    done: Event,
    failure: RefCell<Option<(io::ErrorKind, String)>>,
}

/// Connecting. When it is given up, by its own limit or by whoever waits, the name is looked up again: perhaps no address
/// that is left answers, and nobody waits long enough to find that out.
struct Attempt<'a> {
    pool: &'a Pool,
    has_ended: bool,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.pool.0.addresses.with(|addresses| addresses.until = None);
        }
    }
}

struct Connection {
    sender: SendRequest<Outgoing>,
    /// Ends the task that drives the connection.
    cut: Event,
    born: Instant,
    idle_since: Instant,
}

impl Drop for Connection {
    /// What is idle says goodbye by itself. Why not all: a body that has been answered already would be sent for as long as its
    /// server takes bytes, and held for as long as it takes none.
    fn drop(&mut self) {
        if !self.sender.is_ready() {
            self.cut.notify();
        }
    }
}

impl Pool {
    pub fn new(target: Target, tls: Option<Tls>, times: PoolTimes) -> Self {
        assert_eq!(target.tls, tls.is_some(), "a TLS target needs TLS");
        Self(Rc::new(Inner {
            target,
            tls,
            times,
            idle: Local::new(VecDeque::new()),
            addresses: Local::new(Addresses::default()),
            sweeping: Local::new(false),
        }))
    }

    pub fn target(&self) -> &Target {
        &self.0.target
    }

    /// Sends a request and waits for the head of the answer. `request` is called again when a kept connection turns out
    /// to be dead, which is no failure of the server: it may close an idle connection at any time.
    pub async fn send(&self, mut request: impl FnMut() -> Request<OutBody>) -> Result<Response, HttpError> {
        while let Some(mut connection) = self.take_idle() {
            if connection.sender.ready().await.is_err() {
                continue;
            }
            let (request, left) = Outgoing::of(request());
            let sends = left.get() > 0;
            match connection.sender.send_request(request).await {
                Ok(response) => return Ok(self.response(response, connection, sends, left.get())),
                // Nothing of an answer has come.
                Err(error) if is_dead(&error) => break,
                Err(error) => return Err(self.error(&error)),
            }
        }
        let mut connection = self.connect().await?;
        let (request, left) = Outgoing::of(request());
        let sends = left.get() > 0;
        match connection.sender.send_request(request).await {
            Ok(response) => Ok(self.response(response, connection, sends, left.get())),
            Err(error) => Err(self.error(&error)),
        }
    }

    /// `sends`: the request has a body.
    fn response(
        &self,
        response: hyper::Response<Incoming>,
        connection: Connection,
        sends: bool,
        unsent: u64,
    ) -> Response {
        let (head, incoming) = response.into_parts();
        let status = head.status.as_u16();
        // Why not: who refuses a body need not have read it, and may then read nothing more. An object that is there already
        // (412) is no such refusal, and is common.
        let again = !sends || status < 400 || status == 412;
        let body = Body { incoming, connection: Some((self.clone(), connection)), again };
        Response { status, unsent, headers: head.headers, body }
    }

    fn error(&self, error: &hyper::Error) -> HttpError {
        match error.is_user() || find_source::<BodyError>(error) {
            true => HttpError::OurBody(describe(error)),
            false => HttpError::Broken { authority: self.0.target.authority(), detail: describe(error) },
        }
    }

    async fn connect(&self) -> Result<Connection, HttpError> {
        let limit = self.0.times.connect;
        let mut attempt = Attempt { pool: self, has_ended: false };
        let connected = rt::time::timeout(limit, Box::pin(self.connect_some_time())).await;
        attempt.has_ended = connected.is_ok();
        connected.unwrap_or_else(|_| {
            let source = io::Error::new(ErrorKind::TimedOut, format!("not within {} s", limit.as_secs()));
            Err(HttpError::Connect { authority: self.0.target.authority(), source })
        })
    }

    async fn connect_some_time(&self) -> Result<Connection, HttpError> {
        let target = &self.0.target;
        let authority = || target.authority();
        let socket = self.dial().await?;
        let stream = match &self.0.tls {
            None => Stream::Plain(socket),
            Some(tls) => {
                let stream = tls.connect(&target.host, socket).await;
                Stream::Tls(Box::new(stream.map_err(|source| HttpError::Tls { authority: authority(), source })?))
            }
        };
        let stream = Conn { stream, takes_nothing: false };
        let made = http1::Builder::new().max_buf_size(READ_BUFFER_MAX).handshake(stream).await;
        let (sender, driver) = made.map_err(|error| self.error(&error))?;
        let cut = Event::default();
        let is_cut = cut.wait();
        rt::spawn(rt::contain(async move {
            // Whoever waits for an answer gets the error as well.
            let _ = rt::time::race(driver, is_cut).await;
        }));
        let now = rt::time::now();
        Ok(Connection { sender, cut, born: now, idle_since: now })
    }

    /// Connects to one address after the other until one takes the connection. Those that do not are left out until the name is
    /// looked up again. The last one has all the time that is left.
    async fn dial(&self) -> Result<TcpConn, HttpError> {
        let addresses = self.addresses().await?;
        let count = addresses.len().min(DIALS_MAX);
        let mut failure = io::Error::new(ErrorKind::NotFound, "its name has no address left");
        for (place, address) in addresses.into_iter().take(count).enumerate() {
            let limit = if place + 1 < count { DIAL } else { self.0.times.connect };
            match rt::time::timeout(limit, rt::tcp::connect(address)).await {
                Ok(Ok(socket)) => return Ok(socket),
                Ok(Err(error)) => failure = error,
                Err(_) => failure = io::Error::new(ErrorKind::TimedOut, format!("{} does not answer", address.ip())),
            }
            self.0.addresses.with(|addresses| addresses.leave_out(address));
        }
        Err(HttpError::Connect { authority: self.0.target.authority(), source: failure })
    }

    /// The addresses are looked up once in a while, and come first in turn.
    async fn addresses(&self) -> Result<Vec<SocketAddr>, HttpError> {
        let now = rt::time::now();
        let known = self.0.addresses.with(|addresses| addresses.until.is_some_and(|until| now < until));
        if !known {
            let (lookup, is_new) = self.0.addresses.with(|addresses| match &addresses.lookup {
                Some(lookup) => (lookup.clone(), false),
                None => (addresses.lookup.insert(Rc::default()).clone(), true),
            });
            let done = lookup.done.wait();
            if is_new {
                rt::spawn(self.clone().look_up(lookup.clone()));
            }
            done.await;
            if let Some((kind, text)) = &*lookup.failure.borrow() {
                let source = io::Error::new(*kind, text.clone());
                return Err(HttpError::Resolve { host: self.0.target.host.clone(), source });
            }
        }
        Ok(self.0.addresses.with(Addresses::in_turn))
    }

    async fn look_up(self, lookup: Rc<Lookup>) {
        let target = &self.0.target;
        let found = rt::resolve::resolve(&target.host, target.port).await;
        self.0.addresses.with(|addresses| {
            addresses.lookup = None;
            match found {
                Ok(found) => {
                    addresses.found = found;
                    // Why not longer than connections: whoever has them recycled wants to see a change by then.
                    let keep = Duration::from_millis(BACKEND_ADDRESSES_KEEP_MS);
                    let until = rt::time::now() + self.0.times.recycle.map_or(keep, |recycle| keep.min(recycle));
                    addresses.until = Some(until);
                }
                Err(error) => *lookup.failure.borrow_mut() = Some((error.kind(), error.to_string())),
            }
        });
        lookup.done.notify();
    }

    /// The connection that was used last, if it is young enough.
    fn take_idle(&self) -> Option<Connection> {
        loop {
            let connection = self.0.idle.with(VecDeque::pop_back)?;
            if self.is_fit(&connection) {
                return Some(connection);
            }
        }
    }

    fn is_fit(&self, connection: &Connection) -> bool {
        let now = rt::time::now();
        let young = self.0.times.recycle.is_none_or(|most| now - connection.born < most);
        young && now - connection.idle_since < self.0.times.idle && !connection.sender.is_closed()
    }

    fn keep(&self, mut connection: Connection) {
        connection.idle_since = rt::time::now();
        // One that is not ready still sends a body that has been answered already.
        if !connection.sender.is_ready() || !self.is_fit(&connection) {
            return;
        }
        let extra = self.0.idle.with(|idle| {
            idle.push_back(connection);
            if idle.len() > self.0.times.idle_max { idle.pop_front() } else { None }
        });
        drop(extra);
        if !self.0.sweeping.with(|sweeping| std::mem::replace(sweeping, true)) {
            rt::spawn(sweep(self.clone()));
        }
    }
}

pub const IDLE: Duration = Duration::from_millis(BACKEND_IDLE_MS);
/// What a name, a connection and its TLS may take. Why not more: an upload has minutes for its bytes, not for this.
pub const CONNECT: Duration = Duration::from_millis(BACKEND_HEAD_MS);
/// Addresses of a name that are tried for one connection, and how long each but the last.
const DIALS_MAX: usize = 3;
const DIAL: Duration = Duration::from_millis(BACKEND_DIAL_MS);
/// What hyper reads at a time at most, in bytes.
const READ_BUFFER_MAX: usize = 256 << 10;

/// Closes connections whose idle time is over, as long as there are any.
async fn sweep(pool: Pool) {
    while let Some(oldest) = pool.0.idle.with(|idle| idle.front().map(|connection| connection.idle_since)) {
        rt::time::deadline(oldest + pool.0.times.idle).await;
        let now = rt::time::now();
        let overdue: Vec<_> = pool.0.idle.with(|idle| {
            let count = idle.iter().take_while(|connection| now - connection.idle_since >= pool.0.times.idle).count();
            idle.drain(..count).collect()
        });
        drop(overdue);
    }
    pool.0.sweeping.with(|sweeping| *sweeping = false);
}

/// Whether a kept connection was closed by its server before the request reached it.
fn is_dead(error: &hyper::Error) -> bool {
    !error.is_user() && !error.is_parse() && !find_source::<BodyError>(error)
}

fn find_source<E: std::error::Error + 'static>(error: &hyper::Error) -> bool {
    std::iter::successors(std::error::Error::source(error), |error| error.source()).any(|error| error.is::<E>())
}

/// The error with its causes.
fn describe(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let texts: Vec<String> = causes.map(ToString::to_string).collect();
    texts.join(": ")
}

/// A connection's bytes, as hyper wants them.
struct Conn {
    stream: Stream,
    /// A write has failed.
    takes_nothing: bool,
}

enum Stream {
    Plain(TcpConn),
    Tls(Box<TlsConn>),
}

impl Conn {
    /// A connection that takes no more bytes may have brought an answer, which hyper would not look at after an error: so the
    /// write waits, and what is read decides.
    fn written<T>(&mut self, context: &Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        let is_broken = |error: &io::Error| matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset);
        if !matches!(&written, Poll::Ready(Err(error)) if is_broken(error)) {
            return written;
        }
        self.takes_nothing = true;
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl hyper::rt::Read for Conn {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut cursor: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut buf = ReadBuf::new(cursor.initialize_unfilled());
        let read = match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(context, &mut buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(context, &mut buf),
        };
        let filled = buf.filled().len();
        // SAFETY: `filled` bytes of the cursor were initialized by `initialize_unfilled`, as were all others.
        unsafe { cursor.advance(filled) };
        read
    }
}

impl hyper::rt::Write for Conn {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        if self.takes_nothing {
            return Poll::Pending;
        }
        let written = match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write(context, data),
            Stream::Tls(stream) => Pin::new(stream).poll_write(context, data),
        };
        self.written(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.takes_nothing {
            return Poll::Pending;
        }
        let written = match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(context, data),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(context, data),
        };
        self.written(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.takes_nothing {
            return Poll::Pending;
        }
        let flushed = match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(context),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(context),
        };
        self.written(context, flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    mod pool;
}
