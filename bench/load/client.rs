//! A gRPC client on bare h2 that costs less than the server it drives: one thread, no copy of payload, few system calls.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::buf::Chain;
use bytes::{Buf, Bytes};
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Request, Response, Uri, header};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Mutex;
use tokio::task::AbortHandle;

use crate::target::{Socket, Target};

/// A message to send: its head, and payload that is only referred to.
pub type Message = Chain<Bytes, Bytes>;

/// A message that is one piece.
pub fn whole(message: Bytes) -> Message {
    message.chain(Bytes::new())
}

/// Why a call failed: a gRPC code, or what stood in the way of one.
#[derive(Debug, Clone)]
pub struct CallError {
    pub code: &'static str,
    pub text: String,
    /// True when the connection is gone.
    pub is_fatal: bool,
}

impl CallError {
    pub fn new(code: &'static str, text: impl ToString) -> Self {
        Self { code, text: text.to_string(), is_fatal: false }
    }
}

impl From<h2::Error> for CallError {
    fn from(error: h2::Error) -> Self {
        let is_fatal = error.is_io() || error.is_go_away();
        Self { code: if is_fatal { "CONNECTION" } else { "RESET" }, text: error.to_string(), is_fatal }
    }
}

/// Names of `google.rpc.Code`.
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

pub fn code_name(code: u64) -> &'static str {
    usize::try_from(code).ok().and_then(|code| CODES.get(code)).copied().unwrap_or("UNKNOWN")
}

/// The methods that are called.
#[derive(Clone, Copy)]
pub enum Method {
    Write,
    Read,
    FindMissing,
    BatchUpdate,
    BatchRead,
    UpdateAction,
    GetAction,
    Health,
}

const PATHS: [&str; 8] = [
    "/google.bytestream.ByteStream/Write",
    "/google.bytestream.ByteStream/Read",
    "/build.bazel.remote.execution.v2.ContentAddressableStorage/FindMissingBlobs",
    "/build.bazel.remote.execution.v2.ContentAddressableStorage/BatchUpdateBlobs",
    "/build.bazel.remote.execution.v2.ContentAddressableStorage/BatchReadBlobs",
    "/build.bazel.remote.execution.v2.ActionCache/UpdateActionResult",
    "/build.bazel.remote.execution.v2.ActionCache/GetActionResult",
    "/grpc.health.v1.Health/Check",
];

/// HTTP/2 settings of a connection, in bytes.
#[derive(Clone, Copy)]
pub struct Windows {
    stream: u32,
    connection: u32,
    frame: u32,
}

impl Windows {
    /// A connection's window is 16 times a stream's; `frame` is the largest DATA frame that we accept.
    pub fn new(stream: u64, frame: u64) -> Self {
        let within = |value: u64, min: u32, max: u32| u32::try_from(value).unwrap_or(max).clamp(min, max);
        Self {
            stream: within(stream, 1, i32::MAX as u32),
            connection: within(stream * 16, 65_535, i32::MAX as u32),
            frame: within(frame, 16_384, (1 << 24) - 1),
        }
    }
}

/// One HTTP/2 connection; the next one when the server has sent GOAWAY, as gRPC clients do it.
#[derive(Clone)]
pub struct Connection {
    live: Rc<RefCell<Live>>,
    /// Held by the one call that opens the next connection.
    renewing: Rc<Mutex<()>>,
    target: Target,
    windows: Windows,
    uris: Rc<[Uri]>,
    headers: HeaderMap,
}

#[derive(Clone)]
struct Live {
    send: SendRequest<Message>,
    io: SharedIo,
    driver: AbortHandle,
    /// Connections before this one.
    number: u64,
}

impl Connection {
    /// Connects to `target` and drives the connection on the current `LocalSet`.
    pub async fn open(target: &Target, windows: Windows) -> Result<Self, CallError> {
        let address = &target.address;
        let uris = PATHS
            .iter()
            .map(|path| format!("http://{address}{path}").parse())
            .collect::<Result<Vec<Uri>, _>>()
            .map_err(|error| CallError { is_fatal: true, ..CallError::new("CONNECTION", error) })?;
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static("ringcas-load/1"));
        let live = Rc::new(RefCell::new(Live::open(target, windows, 0).await?));
        Ok(Self { live, renewing: Rc::default(), target: target.clone(), windows, uris: uris.into(), headers })
    }

    /// Cuts the connection off with a TCP reset, as a machine that crashes does.
    pub fn reset(self) -> Result<(), CallError> {
        let live = self.live.borrow();
        live.driver.abort();
        let io = live.io.0.borrow();
        io.socket.set_zero_linger().map_err(|error| CallError::new("CONNECTION", error))
    }

    /// Opens a stream for `method`.
    async fn begin(&self, method: Method) -> Result<(ResponseFuture, SendStream<Message>), CallError> {
        let mut request = Request::new(());
        *request.method_mut() = http::Method::POST;
        *request.version_mut() = http::Version::HTTP_2;
        *request.uri_mut() = self.uris[method as usize].clone();
        *request.headers_mut() = self.headers.clone();
        loop {
            let Live { send, number, .. } = self.live.borrow().clone();
            // Nothing has been sent when one of these fails, so that a call may take the next connection.
            let begun = match send.ready().await {
                Ok(mut send) => send.send_request(request.clone(), false),
                Err(error) => Err(error),
            };
            match begun {
                // With any other reason it is a fault.
                Err(error) if error.is_go_away() && error.reason() == Some(Reason::NO_ERROR) => {
                    self.renew(number).await?;
                }
                begun => return Ok(begun?),
            }
        }
    }

    /// Replaces connection `number`, if nobody has done it yet.
    async fn renew(&self, number: u64) -> Result<(), CallError> {
        let _alone = self.renewing.lock().await;
        if self.live.borrow().number == number {
            let next = Live::open(&self.target, self.windows, number + 1).await?;
            self.live.replace(next);
        }
        Ok(())
    }

    /// Calls `method` with `messages` and hands each DATA chunk of the answer to `sink`. `Ok` is the status OK.
    pub async fn call(
        &self,
        method: Method,
        messages: impl IntoIterator<Item = Message>,
        mut sink: impl FnMut(&[u8]) -> Result<(), CallError>,
    ) -> Result<(), CallError> {
        let (response, mut stream) = self.begin(method).await?;
        let mut messages = messages.into_iter().peekable();
        while let Some(message) = messages.next() {
            // h2 keeps what the windows do not let through yet; it holds handles, not copies.
            if stream.send_data(message, messages.peek().is_none()).is_err() {
                break; // The server has answered already: its answer tells.
            }
        }
        finish(response.await?, &mut sink).await
    }

    /// Calls `method` and returns its one answer, without the prefix.
    pub async fn unary(
        &self,
        method: Method,
        messages: impl IntoIterator<Item = Message>,
    ) -> Result<Vec<u8>, CallError> {
        let mut answer = Vec::new();
        let gather = |chunk: &[u8]| {
            answer.extend_from_slice(chunk);
            Ok(())
        };
        self.call(method, messages, gather).await?;
        one_message(answer)
    }

    /// Calls Write with `messages` made as flow control takes them, with `pause` after each. `moved` is set whenever one
    /// has been handed over. An answer that comes early ends the sending.
    pub async fn push(
        &self,
        messages: impl Iterator<Item = Message>,
        pause: Duration,
        moved: &Cell<Option<Instant>>,
    ) -> Result<Vec<u8>, CallError> {
        let (mut response, mut stream) = self.begin(Method::Write).await?;
        let mut messages = messages.peekable();
        let mut early = None;
        while let Some(message) = messages.next() {
            stream.reserve_capacity(message.remaining());
            match poll_fn(|cx| poll_room(&mut response, &mut stream, cx)).await {
                Room::Some => {}
                Room::Answered(answer) => {
                    early = Some(answer?);
                    break;
                }
                Room::Closed => break, // The server has answered already: its answer tells.
            }
            if stream.send_data(message, messages.peek().is_none()).is_err() {
                break;
            }
            moved.set(Some(Instant::now()));
            if !pause.is_zero()
                && messages.peek().is_some()
                && let Ok(answer) = tokio::time::timeout(pause, &mut response).await
            {
                early = Some(answer?);
                break;
            }
        }
        let head = match early {
            Some(head) => head,
            None => response.await?,
        };
        let mut answer = Vec::new();
        let mut gather = |chunk: &[u8]| {
            answer.extend_from_slice(chunk);
            Ok(())
        };
        finish(head, &mut gather).await?;
        one_message(answer)
    }

    /// Calls Read and takes what the windows let through, without ever opening them again. `moved` is set when the
    /// answer begins. Returns when the answer ends, which one that is longer than the window never does by itself.
    pub async fn stall(&self, request: Message, moved: &Cell<Option<Instant>>) -> Result<(), CallError> {
        let (response, mut stream) = self.begin(Method::Read).await?;
        stream.send_data(request, true)?;
        let (head, mut body) = response.await?.into_parts();
        moved.set(Some(Instant::now()));
        if head.headers.contains_key("grpc-status") {
            return status(&head.headers);
        }
        while let Some(chunk) = body.data().await {
            // The chunk is dropped and its credit kept: the client stays small however many readers it plays.
            drop(chunk?);
        }
        last_word(&mut body).await
    }
}

impl Live {
    async fn open(target: &Target, windows: Windows, number: u64) -> Result<Self, CallError> {
        let unreachable = |error: io::Error| CallError {
            code: "CONNECTION",
            text: format!("cannot connect to {}: {error}", target.address),
            is_fatal: true,
        };
        let socket = target.connect().await.map_err(unreachable)?;
        let io = SharedIo(Rc::new(RefCell::new(BufferedIo::new(socket))));
        let (send, mut connection) = h2::client::Builder::new()
            .initial_window_size(windows.stream)
            .initial_connection_window_size(windows.connection)
            .max_frame_size(windows.frame)
            .enable_push(false)
            .handshake::<_, Message>(io.clone())
            .await?;
        let drained = io.clone();
        let driver = tokio::task::spawn_local(poll_fn(move |cx| {
            let done = Pin::new(&mut connection).poll(cx);
            // h2 flushes for each DATA frame; the bytes of all streams leave together here instead.
            match drained.0.borrow_mut().poll_drain(cx) {
                Poll::Ready(Err(_)) => Poll::Ready(()),
                _ => done.map(|_| ()),
            }
        }));
        Ok(Self { send, io, driver: driver.abort_handle(), number })
    }
}

/// What a sender waits for.
enum Room {
    Some,
    Answered(Result<Response<RecvStream>, h2::Error>),
    Closed,
}

fn poll_room(response: &mut ResponseFuture, stream: &mut SendStream<Message>, cx: &mut Context<'_>) -> Poll<Room> {
    if let Poll::Ready(answer) = Pin::new(response).poll(cx) {
        return Poll::Ready(Room::Answered(answer));
    }
    while stream.capacity() == 0 {
        match ready!(stream.poll_capacity(cx)) {
            Some(Ok(_)) => {}
            Some(Err(_)) | None => return Poll::Ready(Room::Closed),
        }
    }
    Poll::Ready(Room::Some)
}

/// Hands the body of an answer to `sink`. `Ok` is the status OK.
async fn finish(
    answer: Response<RecvStream>,
    sink: &mut impl FnMut(&[u8]) -> Result<(), CallError>,
) -> Result<(), CallError> {
    let (head, mut body) = answer.into_parts();
    if head.status != http::StatusCode::OK {
        return Err(CallError::new("HTTP", head.status));
    }
    if head.headers.contains_key("grpc-status") {
        return status(&head.headers);
    }
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        body.flow_control().release_capacity(chunk.len())?;
        sink(&chunk)?;
    }
    last_word(&mut body).await
}

async fn last_word(body: &mut RecvStream) -> Result<(), CallError> {
    match body.trailers().await? {
        Some(trailers) => status(&trailers),
        None => Err(CallError::new("WRONG_ANSWER", "a stream without a status")),
    }
}

/// The one message of a unary answer, without its prefix.
fn one_message(mut answer: Vec<u8>) -> Result<Vec<u8>, CallError> {
    match answer.split_first_chunk::<5>() {
        Some(([0, len @ ..], rest)) if u32::from_be_bytes(*len) as usize == rest.len() => {
            answer.drain(..5);
            Ok(answer)
        }
        _ => Err(CallError::new("WRONG_ANSWER", "not exactly one uncompressed message")),
    }
}

fn status(trailers: &HeaderMap) -> Result<(), CallError> {
    let code = trailers.get("grpc-status").and_then(|value| value.to_str().ok()?.parse().ok());
    if code == Some(0) {
        return Ok(());
    }
    let text = trailers.get("grpc-message").map(|text| String::from_utf8_lossy(text.as_bytes()));
    Err(CallError::new(code.map_or("UNKNOWN", code_name), text.unwrap_or_default()))
}

/// A socket that gathers small writes until `poll_drain`, and reads ahead.
struct BufferedIo {
    socket: Socket,
    read: Box<[u8]>,
    read_range: std::ops::Range<usize>,
    write: Vec<u8>,
    written: usize,
}

/// Bytes of each buffer of a connection; a piece of at least this size goes around it.
const BUFFER_LEN: usize = 128 << 10;

impl BufferedIo {
    fn new(socket: Socket) -> Self {
        let read = vec![0; BUFFER_LEN].into_boxed_slice();
        Self { socket, read, read_range: 0..0, write: Vec::with_capacity(BUFFER_LEN), written: 0 }
    }

    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.write.len() {
            let sent = ready!(Pin::new(&mut self.socket).poll_write(cx, &self.write[self.written..]))?;
            self.written += sent;
        }
        self.write.clear();
        self.written = 0;
        // What TLS has encrypted and the kernel has not taken yet.
        Pin::new(&mut self.socket).poll_flush(cx)
    }
}

/// The handle of h2 and that of the task which drains behind it. Invariant: no borrow outlives a poll.
#[derive(Clone)]
struct SharedIo(Rc<RefCell<BufferedIo>>);

impl AsyncRead for SharedIo {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let io = &mut *self.0.borrow_mut();
        if io.read_range.is_empty() {
            if out.remaining() >= BUFFER_LEN {
                return Pin::new(&mut io.socket).poll_read(cx, out);
            }
            let mut ahead = ReadBuf::new(&mut io.read);
            ready!(Pin::new(&mut io.socket).poll_read(cx, &mut ahead))?;
            io.read_range = 0..ahead.filled().len();
        }
        let len = io.read_range.len().min(out.remaining());
        out.put_slice(&io.read[io.read_range.start..][..len]);
        io.read_range.start += len;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for SharedIo {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(data)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let io = &mut *self.0.borrow_mut();
        let len: usize = data.iter().map(|piece| piece.len()).sum();
        if io.write.len() + len > BUFFER_LEN {
            ready!(io.poll_drain(cx))?;
        }
        if len >= BUFFER_LEN {
            return Pin::new(&mut io.socket).poll_write_vectored(cx, data);
        }
        data.iter().for_each(|piece| io.write.extend_from_slice(piece));
        Poll::Ready(Ok(len))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Nothing to do: the driver drains after each turn of h2.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let io = &mut *self.0.borrow_mut();
        ready!(io.poll_drain(cx))?;
        Pin::new(&mut io.socket).poll_shutdown(cx)
    }
}
