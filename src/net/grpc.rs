//! gRPC over HTTP/2 streams: one task for each call, from its headers to its trailers.

use std::cell::RefCell;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use futures_util::FutureExt as _;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};

use super::access_log::AccessLine;
use super::body::{Body, RequestStream};
use super::deadline::Deadline;
use super::payload::Payload;
use super::server::{Gauge, Server, count};
use crate::limits;
use crate::pure::grpc_frame::{self, Part};
use crate::rt::gate::Gate;
use crate::rt::time;
use crate::service::{
    CallContext, Code, Outgoing, Reply, Services, Status, action_cache, byte_stream, capabilities, cas, health,
    reflection,
};
use crate::store::Store;

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const IDENTITY: HeaderValue = HeaderValue::from_static("identity");
const APPLICATION_GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
/// Bytes of an error text that are sent. Why: clients limit a header list to 8 KiB, and percent-encoding may triple it.
const ERROR_TEXT_LEN_MAX: usize = 2048;

/// Starts a call in its own task, inside the connection's gate. Refuses what is not gRPC at once.
pub(super) fn start<S: Store>(
    server: &Rc<Server<S>>,
    calls: &Gate,
    request: Request<RecvStream>,
    mut respond: SendResponse<Payload>,
) {
    let (head, stream) = request.into_parts();
    if let Some(status) = not_grpc(&head) {
        let mut response = Response::new(());
        *response.status_mut() = status;
        // A client that is gone already needs no answer.
        let _ = respond.send_response(response, true);
        return;
    }
    let has_encoding = head.headers.get(GRPC_ENCODING).is_some_and(|encoding| encoding != IDENTITY);
    let timeout = head.headers.get(GRPC_TIMEOUT).map(|value| grpc_frame::parse_timeout(value.as_bytes()));
    let body = Body::new(stream, has_encoding);
    let responder = Responder::new(respond);
    let call = Call { server: server.clone(), calls, responder, timeout: timeout.flatten(), head, body };
    if timeout == Some(None) {
        return call.refuse("unknown", Status::invalid("grpc-timeout: must be up to 8 digits and one of H M S m u n"));
    }
    dispatch(call);
}

/// The HTTP status for a request that is no gRPC call. Source: PROTOCOL-HTTP2.md, "Requests". `te` is checked by h2.
fn not_grpc(head: &Parts) -> Option<StatusCode> {
    if head.method != Method::POST {
        return Some(StatusCode::METHOD_NOT_ALLOWED);
    }
    let content_type = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    match content_type.strip_prefix(b"application/grpc") {
        Some([] | [b'+' | b';', ..]) => None,
        _ => Some(StatusCode::UNSUPPORTED_MEDIA_TYPE),
    }
}

/// Spawns the handler that the path names.
fn dispatch<S: Store>(call: Call<'_, S>) {
    match call.head.uri.path() {
        "/google.bytestream.ByteStream/Read" => call.server_streaming("ByteStream.Read", byte_stream::read),
        "/google.bytestream.ByteStream/Write" => call.write("ByteStream.Write"),
        "/google.bytestream.ByteStream/QueryWriteStatus" => {
            call.unary("ByteStream.QueryWriteStatus", byte_stream::query_write_status)
        }
        "/build.bazel.remote.execution.v2.ActionCache/GetActionResult" => {
            call.unary("ActionCache.GetActionResult", action_cache::get_action_result)
        }
        "/build.bazel.remote.execution.v2.ActionCache/UpdateActionResult" => {
            call.unary("ActionCache.UpdateActionResult", action_cache::update_action_result)
        }
        "/build.bazel.remote.execution.v2.ContentAddressableStorage/FindMissingBlobs" => {
            call.unary("ContentAddressableStorage.FindMissingBlobs", cas::find_missing_blobs)
        }
        "/build.bazel.remote.execution.v2.ContentAddressableStorage/BatchUpdateBlobs" => {
            call.unary("ContentAddressableStorage.BatchUpdateBlobs", cas::batch_update_blobs)
        }
        "/build.bazel.remote.execution.v2.ContentAddressableStorage/BatchReadBlobs" => {
            call.unary("ContentAddressableStorage.BatchReadBlobs", cas::batch_read_blobs)
        }
        "/build.bazel.remote.execution.v2.ContentAddressableStorage/GetTree" => {
            call.server_streaming("ContentAddressableStorage.GetTree", crate::service::tree::get_tree)
        }
        "/build.bazel.remote.execution.v2.ContentAddressableStorage/SplitBlob" => {
            call.unary("ContentAddressableStorage.SplitBlob", cas::split_blob)
        }
        "/build.bazel.remote.execution.v2.ContentAddressableStorage/SpliceBlob" => {
            call.unary("ContentAddressableStorage.SpliceBlob", cas::splice_blob)
        }
        "/build.bazel.remote.execution.v2.Capabilities/GetCapabilities" => {
            call.unary("Capabilities.GetCapabilities", capabilities::get_capabilities)
        }
        "/grpc.health.v1.Health/Check" => call.unary("Health.Check", health::check),
        "/grpc.health.v1.Health/List" => call.unary("Health.List", health::list),
        "/grpc.health.v1.Health/Watch" => call.server_streaming("Health.Watch", health::watch),
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        | "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo" => {
            call.reflection("ServerReflection.ServerReflectionInfo")
        }
        path => {
            let status = Status::new(Code::Unimplemented, format!("this server has no method {path}"));
            call.refuse("unknown", status);
        }
    }
}

/// One call that has not been started: who serves it, how to answer it, and what came with its headers.
struct Call<'a, S> {
    server: Rc<Server<S>>,
    calls: &'a Gate,
    responder: Responder,
    timeout: Option<Duration>,
    head: Parts,
    body: Body,
}

impl<S: Store> Call<'_, S> {
    fn unary<H>(self, method: &'static str, handler: H)
    where
        H: AsyncFnOnce(&Services<S>, &CallContext, Bytes) -> Result<Reply, Status> + 'static,
    {
        let context = context(&self.head.headers);
        self.spawn(method, async move |server, mut responder, body, _| {
            let request = body.message(&server.request_memory).await?;
            responder.count_received(request.bytes.len());
            let reply = handler(&server.services, &context, request.bytes.clone()).await?;
            responder.send_now(reply)
        });
    }

    fn server_streaming<H>(self, method: &'static str, handler: H)
    where
        H: AsyncFnOnce(&Services<S>, &CallContext, Bytes, &mut Responder) -> Result<(), Status> + 'static,
    {
        let context = context(&self.head.headers);
        self.spawn(method, async move |server, mut responder, body, _| {
            let request = body.message(&server.request_memory).await?;
            responder.count_received(request.bytes.len());
            handler(&server.services, &context, request.bytes.clone(), &mut responder).await
        });
    }

    fn write(self, method: &'static str) {
        let context = context(&self.head.headers);
        self.spawn(method, async move |server, mut responder, body, headers| {
            let mut incoming = RequestStream { body, headers, responder: responder.clone() };
            let reply = byte_stream::write(&server.services, &context, &mut incoming).await?;
            responder.send_now(reply)
        });
    }

    fn reflection(self, method: &'static str) {
        self.spawn(method, async move |_server, mut responder, mut body, _| {
            let mut request = Vec::new();
            while let Some(part) = body.part().await? {
                match part {
                    Part::Start { .. } => request.clear(),
                    Part::Piece(piece) => request.extend_from_slice(&piece),
                    Part::End => responder.send(reflection::answer(&request)?).await?,
                }
                body.return_credit();
            }
            Ok(())
        });
    }

    fn refuse(self, method: &'static str, status: Status) {
        self.spawn(method, async move |_, _, _, _| Err(status));
    }

    /// Runs the call in a task of its own. Why generic and not boxed: each kind of call is a task of its own size, so
    /// that the many small ones do not pay for the few large ones.
    fn spawn<W>(self, method: &'static str, work: W)
    where
        W: AsyncFnOnce(Rc<Server<S>>, Responder, Body, HeaderMap) -> Result<(), Status> + 'static,
    {
        let Self { server, calls, responder, timeout, head, body } = self;
        if server.services.options.access_log {
            responder.log_as(method);
        }
        let deadline = timeout.map(|timeout| server.deadlines.after(timeout));
        calls.spawn(async move {
            let _open = Gauge::enter(&server.counters.calls_open);
            count(&server.counters.calls);
            // Why: a new task runs at once, inside the connection's turn. A handler that answers without waiting would
            // make HTTP/2 flush once for each reply; this way all calls that came together are answered together.
            time::yield_once().await;
            let work = work(server.clone(), responder.clone(), body, head.headers);
            let end = finish_or_cut(work, &responder, deadline).await;
            match end {
                End::Finished(result) => responder.finish(result),
                End::Panicked => {
                    count(&server.counters.panics);
                    responder.finish(Err(Status::new(Code::Internal, "the handler failed; the server's log says why")));
                }
                End::Late => {
                    count(&server.counters.calls_cut);
                    responder.finish(Err(Status::new(Code::DeadlineExceeded, "the call's deadline has passed")));
                }
                End::Cut => count(&server.counters.calls_cut),
            }
        });
    }
}

/// How the work of a call ended.
enum End {
    Finished(Result<(), Status>),
    /// The panic hook has logged it.
    Panicked,
    /// The deadline passed.
    Late,
    /// The client cancelled, or the connection is gone.
    Cut,
}

/// Runs `work` until it ends, the client goes away or the deadline passes, and drops it: all that it held is free when
/// this returns.
async fn finish_or_cut(
    work: impl Future<Output = Result<(), Status>>,
    responder: &Responder,
    mut deadline: Option<Deadline>,
) -> End {
    let mut work = pin!(AssertUnwindSafe(work).catch_unwind());
    std::future::poll_fn(|context| {
        if let Poll::Ready(result) = work.as_mut().poll(context) {
            return Poll::Ready(result.map_or(End::Panicked, End::Finished));
        }
        if responder.poll_cut(context).is_ready() {
            return Poll::Ready(End::Cut);
        }
        match &mut deadline {
            Some(deadline) => Pin::new(deadline).poll(context).map(|()| End::Late),
            None => Poll::Pending,
        }
    })
    .await
}

fn context(headers: &HeaderMap) -> CallContext {
    let user_agent = headers.get(USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let _ = user_agent;
    CallContext::default()
}

/// The answering side of a call. Clones share it: the handler sends by one, and its task watches for the client's
/// going away and sends the status by another.
#[derive(Clone)]
pub struct Responder(Rc<RefCell<Answer>>);

struct Answer {
    stage: Stage,
    line: Option<Box<AccessLine>>,
}

enum Stage {
    /// Nothing has been sent.
    New(SendResponse<Payload>),
    /// Headers have been sent, and perhaps messages.
    Streaming(SendStream<Payload>),
    Ended,
}

impl Responder {
    fn new(respond: SendResponse<Payload>) -> Self {
        Self(Rc::new(RefCell::new(Answer { stage: Stage::New(respond), line: None })))
    }

    fn log_as(&self, method: &'static str) {
        self.0.borrow_mut().line = Some(Box::new(AccessLine::new(method)));
    }

    /// Adds to the access log line's count.
    pub fn count_received(&self, bytes: usize) {
        if let Some(line) = &mut self.0.borrow_mut().line {
            line.received += bytes as u64;
        }
    }

    /// Sends a message without waiting for room: for the only message of a unary call.
    fn send_now(&mut self, message: Reply) -> Result<(), Status> {
        let answer = &mut *self.0.borrow_mut();
        let payload = Payload::message(message);
        if let Some(line) = &mut answer.line {
            line.sent += payload.remaining() as u64;
        }
        if let Stage::New(respond) = &mut answer.stage {
            let response = headers_response();
            answer.stage = Stage::Streaming(respond.send_response(response, false).map_err(|_| gone())?);
        }
        match &mut answer.stage {
            Stage::Streaming(stream) => stream.send_data(payload, false).map_err(|_| gone()),
            Stage::New(_) | Stage::Ended => Err(gone()),
        }
    }

    /// Waits until HTTP/2 may send at least one byte more than it holds. The first message always may be handed over.
    fn poll_room(&self, context: &mut Context<'_>) -> Poll<Result<(), Status>> {
        let Stage::Streaming(stream) = &mut self.0.borrow_mut().stage else { return Poll::Ready(Ok(())) };
        stream.reserve_capacity(limits::HTTP2_SEND_BUFFER_LEN);
        while stream.capacity() == 0 {
            match ready!(stream.poll_capacity(context)) {
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return Poll::Ready(Err(gone())),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Ready when the client has reset the stream or the connection is gone.
    fn poll_cut(&self, context: &mut Context<'_>) -> Poll<()> {
        match &mut self.0.borrow_mut().stage {
            Stage::New(respond) => respond.poll_reset(context).map(|_| ()),
            Stage::Streaming(stream) => stream.poll_reset(context).map(|_| ()),
            Stage::Ended => Poll::Pending,
        }
    }

    /// Sends the status. Errors are ignored: a client that is gone needs none. What the client has still to send is
    /// stopped by HTTP/2 when the last clone is dropped (RST_STREAM with NO_ERROR, RFC 9113, 8.1).
    fn finish(&self, result: Result<(), Status>) {
        let answer = &mut *self.0.borrow_mut();
        let status = result.err();
        let code = status.as_ref().map_or(Code::Ok, |status| status.code);
        if let Some(line) = &mut answer.line {
            line.code = Some(code);
        }
        match std::mem::replace(&mut answer.stage, Stage::Ended) {
            Stage::New(mut respond) => {
                let mut response = headers_response();
                add_status(response.headers_mut(), code, status.as_ref());
                let _ = respond.send_response(response, true);
            }
            Stage::Streaming(mut stream) => {
                let mut trailers = HeaderMap::with_capacity(2);
                add_status(&mut trailers, code, status.as_ref());
                let _ = stream.send_trailers(trailers);
            }
            Stage::Ended => {}
        }
    }
}

impl Outgoing for Responder {
    async fn send(&mut self, message: Reply) -> Result<(), Status> {
        self.ready().await?;
        self.send_now(message)
    }

    async fn ready(&mut self) -> Result<(), Status> {
        std::future::poll_fn(|context| self.poll_room(context)).await
    }

    fn note_resource(&mut self, name: &str) {
        if let Some(line) = &mut self.0.borrow_mut().line {
            name.clone_into(&mut line.resource);
        }
    }
}

fn gone() -> Status {
    Status::new(Code::Cancelled, "the client is gone")
}

fn headers_response() -> Response<()> {
    let mut response = Response::new(());
    response.headers_mut().insert(CONTENT_TYPE, APPLICATION_GRPC);
    response
}

fn add_status(headers: &mut HeaderMap, code: Code, status: Option<&Status>) {
    headers.insert(GRPC_STATUS, HeaderValue::from(code as u16));
    if code == Code::Unimplemented {
        // Source: compression.md: a server that does not know the request's encoding says which it knows.
        headers.insert(GRPC_ACCEPT_ENCODING, IDENTITY);
    }
    if let Some(status) = status {
        let text = &status.message[..status.message.floor_char_boundary(ERROR_TEXT_LEN_MAX)];
        if let Ok(text) = HeaderValue::try_from(grpc_frame::encode_message(text)) {
            headers.insert(GRPC_MESSAGE, text);
        }
    }
}
