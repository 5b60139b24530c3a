//! The body of an answer, and the account of the request that ends with it.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::{Buf, Bytes};
use http::{Method, StatusCode};
use hyper::body::{Frame, SizeHint};

use super::super::memory::Room;
use super::counters::{Handler, HttpCounters, method_label};
use super::io::InRequest;
use crate::access::Origin;
use crate::budget::Apart;
use crate::rt::{self, BusyGuard, time};
use crate::store::{Blob, BlobStream, StoreError};

/// One request, from its head to the last byte of its answer. Dropping it counts and logs the request.
pub struct Exchange {
    counters: Rc<HttpCounters>,
    handler: Handler,
    method: Method,
    /// For the access log; `None` when that is off.
    path: Option<String>,
    origin: Origin,
    code: StatusCode,
    received: u64,
    sent: u64,
    /// The answer was not cut off.
    is_whole: bool,
    started: Instant,
    /// Memory that the answer may hold until it has gone out.
    hold: Option<Rc<Hold>>,
    _busy: BusyGuard,
    request: Rc<InRequest>,
}

impl Exchange {
    pub fn new(
        counters: Rc<HttpCounters>,
        handler: Handler,
        method: Method,
        path: Option<String>,
        origin: Origin,
        request: InRequest,
    ) -> Self {
        let inflight = counters.inflight(handler);
        inflight.set(inflight.get() + 1);
        Self {
            counters,
            handler,
            method,
            path,
            origin,
            code: StatusCode::OK,
            received: 0,
            sent: 0,
            is_whole: false,
            started: time::now(),
            hold: None,
            _busy: rt::busy(),
            request: Rc::new(request),
        }
    }

    pub fn is_head(&self) -> bool {
        self.method == Method::HEAD
    }

    /// So many bytes of the request's body have come.
    pub fn received(&mut self, bytes: u64) {
        self.received = bytes;
    }

    /// For who goes on with the request behind its answer.
    pub fn request(&self) -> Rc<InRequest> {
        self.request.clone()
    }

    /// Keeps what the answer is accounted to.
    pub fn keep(&mut self, hold: Option<Hold>) {
        self.hold = hold.map(Rc::new);
    }

    fn sent(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        self.counters.sent.add(bytes as u64);
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let inflight = self.counters.inflight(self.handler);
        inflight.set(inflight.get() - 1);
        let time = self.started.elapsed();
        // Why so: nobody else knows what the client of a handler that panics is told.
        if rt::is_panicking() {
            self.code = StatusCode::INTERNAL_SERVER_ERROR;
        }
        self.counters.ended(self.handler, method_label(&self.method), self.code, time, self.sent);
        let Some(path) = &self.path else { return };
        let (method, received, sent, ms) = (&self.method, self.received, self.sent, time.as_secs_f64() * 1e3);
        let (end, origin) = (if self.is_whole { self.code.as_str() } else { "cut" }, self.origin);
        tracing::info!(target: "access", "{method} {path} {end} from={origin} in={received} out={sent} {ms:.3}ms");
    }
}

/// What an answer is accounted to.
pub enum Hold {
    Room { _room: Room },
    Apart { _apart: Apart },
}

/// Bytes of an answer on their way out.
///
/// Why with what they are accounted to: hyper lets go of the body when it has taken the last of it, and keeps that until its
/// client takes it.
pub struct Piece {
    bytes: Bytes,
    _hold: Option<Rc<Hold>>,
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

/// The bytes of an answer.
pub struct Body {
    content: Content,
    /// `None` where a panic has ended the account.
    exchange: Option<Exchange>,
}

enum Content {
    Whole(Bytes),
    Stream {
        stream: BlobStream,
        /// Bytes that are to come, where that is known.
        left: Option<u64>,
    },
}

impl Body {
    /// All of it is here.
    pub fn whole(bytes: Bytes, code: StatusCode, exchange: Exchange) -> Self {
        Self::new(Content::Whole(bytes), code, exchange)
    }

    /// A blob as it comes from the store.
    pub fn blob(blob: Blob, code: StatusCode, exchange: Exchange) -> Self {
        let content = match blob {
            Blob::Whole { data, .. } => Content::Whole(data),
            Blob::Stream(stream) => Content::Stream { left: stream.len, stream },
        };
        Self::new(content, code, exchange)
    }

    fn new(content: Content, code: StatusCode, mut exchange: Exchange) -> Self {
        exchange.code = code;
        exchange.is_whole = matches!(&content, Content::Whole(bytes) if bytes.is_empty());
        Self { content, exchange: Some(exchange) }
    }

    /// What is said of a request whose account has ended.
    pub fn unaccounted(bytes: Bytes) -> Self {
        Self { content: Content::Whole(bytes), exchange: None }
    }
}

impl hyper::body::Body for Body {
    type Data = Piece;
    type Error = StoreError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Piece>, StoreError>>> {
        let Self { content, exchange } = &mut *self;
        let data = match content {
            Content::Whole(bytes) => Some(std::mem::take(bytes)).filter(|bytes| !bytes.is_empty()),
            Content::Stream { stream, left } => {
                let data = ready!(stream.pieces.poll_recv(context)).transpose()?;
                let len = data.as_ref().map_or(0, Bytes::len) as u64;
                match left {
                    Some(left) if data.is_some() && len <= *left => *left -= len,
                    // Why an error: the client must see that what it has is not the blob.
                    Some(left) if *left > 0 || data.is_some() => {
                        let text = format!("a blob of another length than was announced: {left} bytes are missing");
                        return Poll::Ready(Some(Err(StoreError::Disk(text))));
                    }
                    Some(_) | None => {}
                }
                data
            }
        };
        let mut hold = None;
        if let Some(exchange) = exchange {
            exchange.is_whole = match content {
                Content::Whole(_) => true,
                Content::Stream { left: Some(left), .. } => *left == 0,
                Content::Stream { left: None, .. } => data.is_none(),
            };
            exchange.sent(data.as_ref().map_or(0, Bytes::len));
            hold.clone_from(&exchange.hold);
        }
        Poll::Ready(data.map(|bytes| Ok(Frame::data(Piece { bytes, _hold: hold }))))
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Whole(bytes) => bytes.is_empty(),
            Content::Stream { left, .. } => *left == Some(0),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Stream { left: Some(left), .. } => SizeHint::with_exact(*left),
            Content::Stream { left: None, .. } => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::io::Watch;
    use super::super::waiting::Waiting;
    use super::*;
    use crate::rt::channel;
    use crate::rt::cores::block_on;
    use crate::store::Encoding;
    use hyper::body::Body as _;
    use std::time::Duration;

    /// All frames until the end, or the error.
    async fn read(body: Body) -> Result<usize, StoreError> {
        let mut body = Box::pin(body);
        let mut len = 0;
        while let Some(frame) = std::future::poll_fn(|context| body.as_mut().poll_frame(context)).await {
            len += frame?.data_ref().map_or(0, Piece::remaining);
        }
        Ok(len)
    }

    /// Goal: a body that is not as long as was announced, or breaks off, ends with an error, so that its client does not
    /// take it for the blob. Method: streams of two pieces of 5 bytes, with right, wrong and no announcements.
    #[test]
    fn a_wrong_length_is_an_error() {
        block_on(async {
            let damaged = || Err(StoreError::Disk("damaged".into()));
            let five = || Ok(Bytes::from_static(b"12345"));
            for (len, pieces, expected) in [
                (Some(10), vec![five(), five()], Some(10)),
                (None, vec![five(), five()], Some(10)),
                (Some(11), vec![five(), five()], None),
                (Some(7), vec![five(), five()], None),
                (Some(10), vec![five(), damaged()], None),
                (None, vec![five(), damaged()], None),
            ] {
                let counters = Rc::new(HttpCounters::new(&crate::metrics::TimeBounds::default()));
                let request = Watch::request(&Rc::new(Watch::new(Waiting::new(Duration::ZERO, Duration::ZERO))));
                let exchange =
                    Exchange::new(counters.clone(), Handler::Get, Method::GET, None, Origin::default(), request);
                let (mut sender, receiver) = channel::bounded(2);
                pieces.into_iter().for_each(|piece| assert!(sender.try_send(piece).is_ok()));
                drop(sender);
                let stream = BlobStream { encoding: Encoding::Identity, len, pieces: receiver };
                assert_eq!(counters.inflight(Handler::Get).get(), 1);
                let got = read(Body::blob(Blob::Stream(stream), StatusCode::OK, exchange)).await;
                assert_eq!(got.ok(), expected, "{len:?}");
                assert_eq!(counters.inflight(Handler::Get).get(), 0);
            }
        });
    }
}
