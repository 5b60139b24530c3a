//! gRPC over HTTP/2 streams: one task for each call, from its headers to its trailers.

use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use h2::RecvStream;
use h2::server::SendResponse;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method as Verb, Request, Response, StatusCode};

use super::account::Account;
use super::bodies::Bodies;
use super::body::{Body, Message, RequestStream};
use super::credential;
use super::memory::{Share, Shares};
use super::metadata::{self, Caller};
use super::methods::Method;
use super::payload::Payload;
use super::responder::Responder;
use super::server::{Gauge, Phase, PhaseWatch, Server, count};
use super::tables::OpenStream;
use crate::access::{Decision, Peer, Role};
use crate::budget::Rank;
use crate::limits;
use crate::pure::grpc_frame::{self, Part};
use crate::rt::gate::Gate;
use crate::rt::time::{self, Sleep};
use crate::rt::{self, HandlerPanicked};
use crate::service::reply::pieces_len;
use crate::service::{
    CallContext, Code, Outgoing as _, Reply, Services, Status, action_cache, byte_stream, capabilities, cas, health,
    reflection,
};
use crate::store::{Store, StoreError};

const WRITE: &str = "/google.bytestream.ByteStream/Write";
const BATCH_UPDATE: &str = "/build.bazel.remote.execution.v2.ContentAddressableStorage/BatchUpdateBlobs";
const FIND_MISSING: &str = "/build.bazel.remote.execution.v2.ContentAddressableStorage/FindMissingBlobs";
const UPDATE_ACTION: &str = "/build.bazel.remote.execution.v2.ActionCache/UpdateActionResult";
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const IDENTITY: HeaderValue = HeaderValue::from_static("identity");

/// Starts a call in its own task, inside the connection's gate. Refuses what is not gRPC at once.
pub(super) fn start<S: Store>(
    server: &Rc<Server<S>>,
    peer: &Peer,
    calls: &Gate,
    shares: &Shares,
    bodies: &Bodies,
    request: Request<RecvStream>,
    mut respond: SendResponse<Payload>,
) {
    let is_short = !is_long(&request);
    let (head, stream) = request.into_parts();
    // Why not health: who looks after the server must see that it lives.
    let is_exempt = head.uri.path() == HEALTH_CHECK;
    // Why: many calls of few connections must not keep others from making one. Those count as well whose answers have not gone out.
    let open = shares.streams.count();
    let rank = if open < limits::CALLS_FEW_MAX { Rank::Open } else { Rank::More };
    let take = || server.settings.purse.apart_for(limits::CALL_HELD_LEN, rank);
    // A connection's own memory has room for one.
    let memory = if open > 0 { take() } else { None };
    let is_full = open > 0 && memory.is_none() && !is_exempt;
    if let Some(status) = not_grpc(&head) {
        let mut response = Response::new(());
        *response.status_mut() = status;
        // A client that is gone already needs no answer.
        let _ = respond.send_response(response, true);
        return;
    }
    let has_encoding = head.headers.get(GRPC_ENCODING).is_some_and(|encoding| encoding != IDENTITY);
    let timeout = head.headers.get(GRPC_TIMEOUT).map(|value| grpc_frame::parse_timeout(value.as_bytes()));
    let body = Body::new(bodies.open(stream, is_short), has_encoding, server.write_idle.get());
    let responder = Responder::new(respond, shares.replies.clone(), server.shown.clone());
    let timeout_given = timeout.flatten();
    let admitted = match &server.settings.trust {
        None => Ok(None),
        Some(trust) => trust.admit(head.uri.path(), &head.headers),
    };
    let admitted = admitted.map(|scope| scope.map(|scope| server.services.scoped(&scope)));
    let requests = shares.requests.clone();
    let memory = shares.streams.open(memory);
    let call = Call {
        serving: admitted.map(|scoped| Serving { server: server.clone(), scoped }),
        server: server.clone(),
        peer,
        calls,
        requests,
        responder,
        timeout: timeout_given,
        drain: None,
        head,
        body,
        memory,
    };
    if is_full {
        let text = "the calls that are open take all of the memory that they may: make fewer at a time";
        return call.turn_away(Status::new(Code::ResourceExhausted, text));
    }
    if timeout == Some(None) {
        return call.refuse(Status::invalid("grpc-timeout: must be up to 8 digits and one of H M S m u n"));
    }
    dispatch(call);
}

/// True for calls whose requests may be long.
pub(super) fn is_long(request: &Request<RecvStream>) -> bool {
    [WRITE, BATCH_UPDATE, FIND_MISSING, UPDATE_ACTION].contains(&request.uri().path())
}

/// The HTTP status for a request that is no gRPC call. Source: PROTOCOL-HTTP2.md, "Requests". `te` is checked by h2.
fn not_grpc(head: &Parts) -> Option<StatusCode> {
    if head.method != Verb::POST {
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
        "/google.bytestream.ByteStream/Read" => call.server_streaming(Method::Read, byte_stream::read),
        WRITE => call.write(Method::Write),
        "/google.bytestream.ByteStream/QueryWriteStatus" => {
            call.unary(Method::QueryWriteStatus, byte_stream::query_write_status)
        }
        "/build.bazel.remote.execution.v2.ActionCache/GetActionResult" => {
            call.unary_held(Method::GetActionResult, action_cache::get_action_result)
        }
        UPDATE_ACTION => call.unary_held(Method::UpdateActionResult, action_cache::update_action_result),
        FIND_MISSING => call.unary(Method::FindMissingBlobs, cas::find_missing_blobs),
        BATCH_UPDATE => call.unary_named(Method::BatchUpdateBlobs, cas::batch_update_blobs),
        "/build.bazel.remote.execution.v2.ContentAddressableStorage/BatchReadBlobs" => {
            call.unary_held(Method::BatchReadBlobs, cas::batch_read_blobs)
        }
        "/build.bazel.remote.execution.v2.ContentAddressableStorage/GetTree" => {
            call.server_streaming(Method::GetTree, crate::service::tree::get_tree)
        }
        "/build.bazel.remote.execution.v2.ContentAddressableStorage/SplitBlob" => {
            call.unary(Method::SplitBlob, cas::split_blob)
        }
        "/build.bazel.remote.execution.v2.ContentAddressableStorage/SpliceBlob" => {
            call.unary(Method::SpliceBlob, cas::splice_blob)
        }
        "/build.bazel.remote.execution.v2.Capabilities/GetCapabilities" => {
            call.unary(Method::GetCapabilities, capabilities::get_capabilities)
        }
        HEALTH_CHECK => call.unary(Method::HealthCheck, health::check),
        "/grpc.health.v1.Health/List" => call.unary(Method::HealthList, health::list),
        "/grpc.health.v1.Health/Watch" => call.without_end().server_streaming(Method::HealthWatch, health::watch),
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo" => {
            call.without_end().reflection(Method::Reflection)
        }
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo" => {
            call.without_end().reflection(Method::ReflectionAlpha)
        }
        path => {
            let path: String = path.chars().take(limits::METHOD_SHOWN_LEN_MAX).collect();
            let status = Status::new(Code::Unimplemented, format!("this server has no method {path}"));
            call.refuse(status);
        }
    }
}

/// Who serves a call: the server, for the blobs that the call may see.
struct Serving<S> {
    server: Rc<Server<S>>,
    /// `None`: all that belong to no other scope.
    scoped: Option<Services<S>>,
}

impl<S> Serving<S> {
    fn services(&self) -> &Services<S> {
        self.scoped.as_ref().unwrap_or(&self.server.services)
    }
}

/// One call that has not been started: who serves it, how to answer it, and what came with its headers.
struct Call<'a, S> {
    server: Rc<Server<S>>,
    peer: &'a Peer,
    /// Or why it is not let in.
    serving: Result<Serving<S>, Status>,
    calls: &'a Gate,
    /// The connection's part of the memory for requests.
    requests: Share,
    responder: Responder,
    timeout: Option<Duration>,
    /// Set for calls that their clients keep open for ever: a drain ends them.
    drain: Option<PhaseWatch>,
    head: Parts,
    body: Body,
    memory: OpenStream,
}

impl<S: Store> Call<'_, S> {
    fn without_end(mut self) -> Self {
        self.drain = Some(self.server.watch_phase());
        self
    }

    fn unary<H>(self, method: Method, handler: H)
    where
        H: AsyncFnOnce(&Services<S>, &CallContext, Bytes) -> Result<Reply, Status> + 'static,
    {
        self.unary_held(method, async move |services, context, request, _| handler(services, context, request).await);
    }

    /// A unary call whose handler wants to know who calls.
    fn unary_named<H>(self, method: Method, handler: H)
    where
        H: AsyncFnOnce(&Services<S>, &CallContext, Bytes) -> Result<Reply, Status> + 'static,
    {
        let named = metadata::context(&self.head.headers);
        self.unary_held(method, async move |services, context, request, _| {
            let context = CallContext { read_only: context.read_only, ..named };
            handler(services, &context, request).await
        });
    }

    /// A unary call whose handler takes memory for its reply before it makes it.
    fn unary_held<H>(self, method: Method, handler: H)
    where
        H: AsyncFnOnce(&Services<S>, &CallContext, Bytes, &mut Responder) -> Result<Reply, Status> + 'static,
    {
        let requests = self.requests.clone();
        self.spawn(method, async move |serving, mut responder, body, role| {
            let request = take_request(body, &requests, &serving.server, &responder).await?;
            let reply = handler(serving.services(), &CallContext::of(role), request, &mut responder).await?;
            let len = pieces_len(&reply);
            responder.hold(len).await?;
            responder.shrink_room(len);
            responder.send_now(reply)
        });
    }

    fn server_streaming<H>(self, method: Method, handler: H)
    where
        H: AsyncFnOnce(&Services<S>, &CallContext, Bytes, &mut Responder) -> Result<(), Status> + 'static,
    {
        let requests = self.requests.clone();
        self.spawn(method, async move |serving, mut responder, body, role| {
            let request = take_request(body, &requests, &serving.server, &responder).await?;
            handler(serving.services(), &CallContext::of(role), request, &mut responder).await
        });
    }

    fn write(self, method: Method) {
        let caller = Caller::of(&self.head.headers);
        self.spawn(method, async move |serving, mut responder, body, role| {
            let mut incoming = RequestStream { body, caller, responder: responder.clone() };
            let reply = byte_stream::write(serving.services(), &CallContext::of(role), &mut incoming).await?;
            responder.send_now(reply)
        });
    }

    fn reflection(self, method: Method) {
        self.spawn(method, async move |_, mut responder, mut body, _| {
            let mut request = Vec::new();
            while let Some(part) = body.part().await? {
                responder.count_received(&part);
                match part {
                    Part::Start { len } if len > limits::REFLECTION_REQUEST_LEN_MAX => {
                        let max = limits::REFLECTION_REQUEST_LEN_MAX;
                        let text = format!("a message of {len} bytes is larger than the limit of {max} bytes");
                        return Err(Status::new(Code::ResourceExhausted, text));
                    }
                    Part::Start { .. } => request.clear(),
                    Part::Piece(piece) => request.extend_from_slice(&piece),
                    Part::End => responder.send(reflection::answer(&request)?).await?,
                }
                body.return_credit();
            }
            Ok(())
        });
    }

    fn refuse(self, status: Status) {
        self.spawn(Method::Unknown, async move |_, _, _, _| Err(status));
    }

    /// Answers at once, whoever calls.
    ///
    /// Why without a task, for which there is no memory: it would have to wait until all connections had their turn, and each may bring
    /// many calls.
    fn turn_away(self, status: Status) {
        self.responder.open_account(account(&self.server, Method::Unknown, self.peer));
        self.responder.finish(Err(status));
    }

    /// Runs the call in a task of its own, which starts when the connection's turn is over, so that all calls that came
    /// together are answered together.
    ///
    /// Limit: the head is not part of it, because a peer may make it many times as long as what a call is counted with.
    fn spawn<W>(self, method: Method, work: W)
    where
        W: AsyncFnOnce(Serving<S>, Responder, Body, Role) -> Result<(), Status> + 'static,
    {
        let Self { server, serving, peer, calls, requests: _, responder, timeout, drain, head, body, memory } = self;
        let decision = decide(&server, method, peer, &head);
        drop(head);
        responder.open_account(account(&server, method, peer));
        responder.charge(memory);
        let deadline: Option<Sleep> = timeout.map(time::sleep);
        // Why also what is around the handler: where a panic has broken the connection's HTTP/2, its calls panic when they end.
        calls.spawn(rt::contain(async move {
            let _busy = rt::busy();
            let _open = Gauge::enter(&server.counters.calls_open);
            let (access, answering) = (&server.settings.access, responder.clone());
            // Why boxed: the handler's state is some kilobytes, and a task is moved several times before it runs.
            let work = Box::pin(async move {
                let role = decision.made().await.inspect_err(|denial| access.count(*denial))?;
                work(serving?, answering, body, role).await
            });
            // Why not left to the timer: an answer from memory would come first.
            let has_passed = timeout == Some(Duration::ZERO);
            let end = if has_passed { End::Late } else { finish_or_cut(work, &responder, deadline, drain).await };
            match end {
                End::Finished(result) => responder.finish(result),
                End::Panicked => {
                    responder.finish(Err(Status::new(Code::Internal, "the handler failed; the server's log says why")));
                }
                End::Late => {
                    count(&server.counters.calls_cut);
                    responder.finish(Err(Status::new(Code::DeadlineExceeded, "the call's deadline has passed")));
                }
                End::Drained => responder.finish(Err(StoreError::Stopping.into())),
                End::Cut => count(&server.counters.calls_cut),
            }
        }));
    }
}

fn account<S>(server: &Server<S>, method: Method, peer: &Peer) -> Account {
    Account::open(server.counters.grpc.clone(), method, server.services.options.access_log.get(), peer.origin)
}

/// Whether the caller may.
fn decide<S>(server: &Server<S>, method: Method, peer: &Peer, head: &Parts) -> Decision {
    match method.ask() {
        Some(ask) => server.settings.access.decide(ask, peer, || credential(&head.headers, head.uri.authority())),
        // Its role does not matter.
        None => Decision::Made(Ok(Role::Read)),
    }
}

/// The one request message of a call. Its room is the responder's from then on.
async fn take_request<S>(
    body: Body,
    requests: &Share,
    server: &Server<S>,
    responder: &Responder,
) -> Result<Bytes, Status> {
    let Message { bytes, room } = body.message(requests, server.request_stall.get()).await?;
    responder.count_received(&Part::Start { len: bytes.len() });
    responder.count_received(&Part::Piece(bytes.clone()));
    responder.keep(room);
    Ok(bytes)
}

/// How the work of a call ended.
enum End {
    Finished(Result<(), Status>),
    /// The panic hook has logged it.
    Panicked,
    /// The deadline passed.
    Late,
    /// The server drains, and the call would not end by itself.
    Drained,
    /// The client cancelled, or the connection is gone.
    Cut,
}

/// Runs `work` until it ends, the client goes away or the deadline passes, and drops it: all that it held is free when
/// this returns.
async fn finish_or_cut(
    work: Pin<Box<impl Future<Output = Result<(), Status>>>>,
    responder: &Responder,
    mut deadline: Option<Sleep>,
    drain: Option<PhaseWatch>,
) -> End {
    let mut work = rt::catch(work);
    let mut has_begun = false;
    std::future::poll_fn(|context| {
        // Why before the work: what a client leaves behind wakes the next one, which is often gone as well, and would
        // begin to read and to hold for nobody.
        if std::mem::replace(&mut has_begun, true) && responder.poll_cut(context).is_ready() {
            return Poll::Ready(End::Cut);
        }
        match work.poll_unpin(context) {
            Poll::Ready(Ok(Ok(()))) => return Poll::Ready(End::Finished(Ok(()))),
            // Why looked at before the error: a handler may notice first that its client is gone.
            _ if responder.poll_cut(context).is_ready() => return Poll::Ready(End::Cut),
            Poll::Ready(Ok(Err(status))) => return Poll::Ready(End::Finished(Err(status))),
            Poll::Ready(Err(HandlerPanicked)) => return Poll::Ready(End::Panicked),
            Poll::Pending => {}
        }
        if let Some(deadline) = &mut deadline
            && Pin::new(deadline).poll(context).is_ready()
        {
            return Poll::Ready(End::Late);
        }
        match &drain {
            Some(drain) if drain.poll_phase(context) > Phase::Serving => Poll::Ready(End::Drained),
            _ => Poll::Pending,
        }
    })
    .await
}
