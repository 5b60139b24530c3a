//! `/cas/` and `/ac/`: headers to what the service asks for, and its answers to headers.

use std::borrow::Cow;
use std::error::Error as _;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, ACCEPT_RANGES, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE,
    ETAG, EXPECT, HeaderName, HeaderValue, IF_NONE_MATCH, IF_RANGE, RANGE, RETRY_AFTER, VARY, WWW_AUTHENTICATE,
};
use http::request::Parts;
use http::{HeaderMap, Method, Response, StatusCode};
use hyper::body::Body as _;

use super::super::memory::{GaveWay, Room, Share, Shares};
use super::super::server::Server;
use super::body::{Body, Exchange, Hold};
use super::counters::HttpCounters;
use super::io::InRequest;
use super::routes::{JSON, text};
use super::waiting::{Overdue, Waiting};
use crate::access::{Denial, Role};
use crate::limits;
use crate::pure::http_cache::Target;
use crate::rt::{self, time};
use crate::service::CallContext;
use crate::service::http_cache::{self, Answering, Declared, Found, Incoming, Part, Wants};
use crate::service::refusal::Refusal;
use crate::store::{Encoding, PutOutcome, Store};

const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");
const BYTES: HeaderValue = HeaderValue::from_static("bytes");
const ZSTD: HeaderValue = HeaderValue::from_static("zstd");
const DIGEST_SIZE: HeaderName = HeaderName::from_static("x-digest-sizebytes");

/// `GET` and `HEAD`.
pub async fn get<S: Store>(
    server: &Server<S>,
    target: &Target,
    head: &Parts,
    shares: &Shares,
    mut exchange: Exchange,
) -> Response<Body> {
    let header = |name| text_of(&head.headers, name);
    let wants = Wants {
        is_head: head.method == Method::HEAD,
        accept: &header(ACCEPT),
        accept_encoding: &header(ACCEPT_ENCODING),
        range: &header(RANGE),
        if_range: &header(IF_RANGE),
        if_none_match: &header(IF_NONE_MATCH),
    };
    let mut replies = Holding { share: shares.replies.clone(), room: None };
    let found = http_cache::get(&server.services, target, wants, &mut replies).await;
    exchange.keep(replies.room.map(|room| Hold::Room { _room: room }));
    match found {
        Ok(found) => respond(found, wants.is_head, exchange),
        Err(refusal) => refuse(refusal, exchange),
    }
}

/// `PUT`, by one who may.
pub async fn put<S: Store>(
    server: &Server<S>,
    role: Role,
    target: &Target,
    head: &Parts,
    body: hyper::body::Incoming,
    shares: &Shares,
    mut exchange: Exchange,
) -> Response<Body> {
    if head.headers.contains_key(CONTENT_RANGE) {
        // Source: RFC 9110, 14.5.
        let refusal = Refusal::new(400, "Content-Range: a part cannot be stored; send the whole");
        return reject(server, refusal, head, body, shares, exchange);
    }
    let header = |name| text_of(&head.headers, name);
    let declared = Declared {
        content_length: body.size_hint().exact(),
        digest_size: &header(DIGEST_SIZE),
        content_encoding: &header(CONTENT_ENCODING),
        content_type: &header(CONTENT_TYPE),
        expects_continue: expects_continue(head),
    };
    let mut upload = Upload::new(server, body, shares, &exchange, declared.expects_continue);
    let ended = http_cache::put(&server.services, &CallContext::of(role), target, declared, &mut upload).await;
    exchange.received(upload.taken);
    let is_awaited = !upload.has_begun;
    let mut response = match ended {
        Ok(PutOutcome::Stored | PutOutcome::AlreadyPresent) => {
            // Why before the answer: some clients take an answer in the middle of their request for a failure.
            upload.drain(u64::MAX).await;
            let mut response = Response::new(Body::whole(Bytes::new(), StatusCode::OK, exchange));
            response.headers_mut().insert(CONTENT_LENGTH, 0.into());
            response
        }
        Err(refusal) => {
            upload.drain_behind();
            refuse(refusal, exchange)
        }
    };
    if is_awaited {
        close_behind(&mut response);
    }
    response
}

/// The answer to a request of which nothing is done.
pub fn reject<S: Store>(
    server: &Server<S>,
    refusal: Refusal,
    head: &Parts,
    body: hyper::body::Incoming,
    shares: &Shares,
    exchange: Exchange,
) -> Response<Body> {
    let is_awaited = expects_continue(head) && !body.is_end_stream();
    if !body.is_end_stream() {
        Upload::new(server, body, shares, &exchange, is_awaited).drain_behind();
    }
    let mut response = refuse(refusal, exchange);
    if is_awaited {
        close_behind(&mut response);
    }
    response
}

/// Says that the connection ends with this answer. Why, where the client awaits a word before it sends its body: it may send that all
/// the same, and what comes next could be that or a request.
fn close_behind(response: &mut Response<Body>) {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}

/// The answer to a request that is not allowed.
pub fn deny<S: Store>(
    server: &Server<S>,
    denial: Denial,
    head: &Parts,
    body: hyper::body::Incoming,
    shares: &Shares,
    exchange: Exchange,
) -> Response<Body> {
    let access = &server.settings.access;
    access.count(denial);
    let (refusal, challenges) = match denial {
        Denial::Role { needs: Role::Admin, .. } if access.is_open() => {
            let remedy =
                "nobody may purge: configure access control with an administrator, or --allow_unauthenticated_purges";
            (Refusal::new(403, remedy), false)
        }
        Denial::Role { .. } => (Refusal::new(403, denial.text()), false),
        Denial::Busy => (Refusal::later(denial.text()), false),
        Denial::NoCredential | Denial::Malformed(_) | Denial::WrongPassword | Denial::WrongToken => {
            (Refusal::new(401, denial.text()), true)
        }
    };
    let mut response = reject(server, refusal, head, body, shares, exchange);
    if challenges {
        insert(response.headers_mut(), WWW_AUTHENTICATE, &access.challenge());
    }
    response
}

fn expects_continue(head: &Parts) -> bool {
    text_of(&head.headers, EXPECT).eq_ignore_ascii_case("100-continue")
}

/// A header's value; all of them where it is there several times (RFC 9110, 5.3).
fn text_of(headers: &HeaderMap, name: HeaderName) -> Cow<'_, str> {
    let texts = headers.get_all(name).into_iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
    texts.reduce(|all, next| format!("{all}, {next}").into()).unwrap_or_default()
}

fn respond(found: Found, is_head: bool, exchange: Exchange) -> Response<Body> {
    match found {
        Found::NotModified { etag } => {
            let mut response = Response::new(Body::whole(Bytes::new(), StatusCode::NOT_MODIFIED, exchange));
            *response.status_mut() = StatusCode::NOT_MODIFIED;
            let headers = response.headers_mut();
            headers.insert(VARY, HeaderValue::from_name(ACCEPT_ENCODING));
            insert(headers, ETAG, &etag);
            response
        }
        Found::Blob { blob, len, encoding, etag, part } => {
            let code = if part.is_some() { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
            let mut response = Response::new(match blob {
                Some(blob) => Body::blob(blob, code, exchange),
                None => Body::whole(Bytes::new(), code, exchange),
            });
            *response.status_mut() = code;
            let headers = response.headers_mut();
            headers.insert(CONTENT_TYPE, OCTETS);
            headers.insert(ACCEPT_RANGES, BYTES);
            headers.insert(VARY, HeaderValue::from_name(ACCEPT_ENCODING));
            insert(headers, ETAG, &etag);
            len.iter().for_each(|len| drop(headers.insert(CONTENT_LENGTH, (*len).into())));
            if encoding == Encoding::Zstd {
                headers.insert(CONTENT_ENCODING, ZSTD);
            }
            if let Some(Part { start, len, size }) = part {
                insert(headers, CONTENT_RANGE, &format!("bytes {start}-{}/{size}", start + len - 1));
            }
            response
        }
        Found::Action { data, is_json } => {
            let len = data.len();
            let data = if is_head { Bytes::new() } else { data };
            let mut response = Response::new(Body::whole(data, StatusCode::OK, exchange));
            response.headers_mut().insert(CONTENT_TYPE, if is_json { JSON } else { OCTETS });
            response.headers_mut().insert(CONTENT_LENGTH, len.into());
            response.headers_mut().insert(VARY, HeaderValue::from_name(ACCEPT));
            response
        }
    }
}

fn too_slow() -> Refusal {
    let floor = limits::HTTP_SPEED_FLOOR;
    Refusal::new(408, format!("the body came in at less than {floor} bytes a second, or not at all"))
}

fn refuse(refusal: Refusal, exchange: Exchange) -> Response<Body> {
    let Refusal { code, text: reason, retry_after_s, size } = refusal;
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = text(code, reason, exchange);
    if code == StatusCode::REQUEST_TIMEOUT {
        // Source: RFC 9110, 15.5.9.
        close_behind(&mut response);
    }
    let headers = response.headers_mut();
    retry_after_s.iter().for_each(|seconds| drop(headers.insert(RETRY_AFTER, (*seconds).into())));
    size.iter().for_each(|size| insert(headers, CONTENT_RANGE, &format!("bytes */{size}")));
    response
}

/// Inserts a value that we have made ourselves.
fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert(name, value);
    }
}

/// Memory that a request holds, in one room at a time.
struct Holding {
    share: Share,
    room: Option<Room>,
}

impl Holding {
    async fn hold(&mut self, len: usize) -> Result<(), Refusal> {
        if self.room.as_ref().is_some_and(|room| room.held() >= len) {
            return Ok(());
        }
        // Why given back first: who holds some while waiting for more may keep others from ever ending.
        self.room = None;
        let room = self.share.room();
        match time::timeout(Duration::from_millis(limits::REQUEST_WAIT_MS), room.grow(len)).await {
            Ok(Ok(())) => self.room = Some(room),
            Ok(Err(GaveWay)) | Err(time::Elapsed) => {
                let text = "requests in flight take all of the memory that this connection may use".to_owned();
                return Err(Refusal::later(text));
            }
        }
        Ok(())
    }
}

impl Answering for Holding {
    async fn hold(&mut self, len: usize) -> Result<(), Refusal> {
        Holding::hold(self, len).await
    }

    fn release(&mut self) {
        self.room = None;
    }
}

/// The body of a PUT.
struct Upload {
    body: hyper::body::Incoming,
    request: Rc<InRequest>,
    requests: Holding,
    counters: Rc<HttpCounters>,
    /// Bytes that have come.
    taken: u64,
    waiting: Waiting,
    overdue: Overdue,
    /// The client sends, or has been told to go on.
    has_begun: bool,
}

impl Upload {
    fn new<S>(
        server: &Server<S>,
        body: hyper::body::Incoming,
        shares: &Shares,
        exchange: &Exchange,
        expects_continue: bool,
    ) -> Self {
        let requests = Holding { share: shares.requests.clone(), room: None };
        let (request, counters) = (exchange.request(), server.counters.http.clone());
        let patience = server.patience.get().body;
        let (waiting, overdue) = (Waiting::new(patience, patience), Overdue::default());
        Self { body, request, requests, counters, taken: 0, waiting, overdue, has_begun: !expects_continue }
    }

    /// Reads and drops what the client still sends of a request that is refused.
    ///
    /// Why behind the answer: a client may wait for it with a body that has no end. Why at all: a connection that is closed
    /// with bytes unread takes the answer with it.
    fn drain_behind(mut self) {
        // One that was too slow has this time again.
        self.waiting = Waiting::new(limits::HTTP_DRAIN_TIME, limits::HTTP_DRAIN_TIME);
        rt::spawn(rt::contain(async move {
            let _ = time::timeout(limits::HTTP_DRAIN_TIME, self.drain(limits::HTTP_DRAIN_LEN_MAX)).await;
        }));
    }

    /// Reads and drops what the client still sends, up to so many bytes. Behind a longer rest the connection is closed.
    async fn drain(&mut self, most: u64) {
        let end = self.taken.saturating_add(most);
        while self.has_begun && self.taken < end && matches!(self.next().await, Ok(Some(_))) {}
    }
}

impl Incoming for Upload {
    async fn next(&mut self) -> Result<Option<Bytes>, Refusal> {
        self.has_begun = true;
        loop {
            let Self { body, waiting, overdue, .. } = self;
            let frame = std::future::poll_fn(|context| {
                if let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(context) {
                    return Poll::Ready(Ok(frame));
                }
                waiting.begin();
                ready!(overdue.poll(waiting, context));
                Poll::Ready(Err(too_slow()))
            });
            match frame.await? {
                None => {
                    self.request.received();
                    return Ok(None);
                }
                Some(Err(error)) => {
                    let reason = error.source().map_or_else(String::new, |source| format!(": {source}"));
                    return Err(Refusal::new(400, format!("the body broke off: {error}{reason}")));
                }
                Some(Ok(frame)) => {
                    // Trailers say nothing here.
                    let Ok(data) = frame.into_data() else { continue };
                    if !data.is_empty() {
                        self.waiting.end(data.len());
                        self.taken += data.len() as u64;
                        self.counters.received.add(data.len() as u64);
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    async fn hold(&mut self, len: usize) -> Result<(), Refusal> {
        self.requests.hold(len).await
    }
}
