//! The reply side of a call: headers, messages, status.

use std::cell::RefCell;
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Buf as _;
use h2::SendStream;
use h2::server::SendResponse;
use http::Response;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};

use super::account::Account;
use super::memory::{GaveWay, Room, Share};
use super::payload::{Payload, Rooms, Shown};
use super::tables::OpenStream;
use crate::limits;
use crate::pure::grpc_frame::{self, Part};
use crate::rt::time::{self, Sleep};
use crate::service::reply::pieces_len;
use crate::service::{Code, Outgoing, Reply, Status};

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_STATUS_DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const IDENTITY: HeaderValue = HeaderValue::from_static("identity");
const APPLICATION_GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
/// Bytes of an error text that are sent. Why: clients limit a header list to 8 KiB, and percent-encoding may triple it.
const ERROR_TEXT_LEN_MAX: usize = 2048;

/// The answering side of a call. Clones share it: the handler sends by one, and its task watches for the client's
/// going away and sends the status by another.
#[derive(Clone)]
pub struct Responder(Rc<RefCell<Answer>>);

struct Answer {
    stage: Stage,
    /// `None` until it is known which method the call is for.
    account: Option<Account>,
    /// What the call holds for its reply. Each message that HTTP/2 still has keeps its own hold on it.
    rooms: Rooms,
    replies: Share,
    shown: Shown,
    /// Bytes of the last message.
    last_len: usize,
    /// The client has taken nothing for too long: what it was sent is dropped.
    is_stalled: bool,
}

enum Stage {
    /// Nothing has been sent.
    New(SendResponse<Payload>),
    /// Headers have been sent, and perhaps messages.
    Streaming(SendStream<Payload>),
    Ended,
}

impl Stage {
    /// The stream to send messages on, after sending the headers if that has not been done. An error when the call is over.
    fn streaming(&mut self) -> Result<&mut SendStream<Payload>, Status> {
        if let Self::New(respond) = self {
            *self = Self::Streaming(respond.send_response(headers_response(), false).map_err(|_| gone())?);
        }
        match self {
            Self::Streaming(stream) => Ok(stream),
            Self::New(_) | Self::Ended => Err(gone()),
        }
    }
}

impl Responder {
    pub(super) fn new(respond: SendResponse<Payload>, replies: Share, shown: Shown) -> Self {
        let answer = Answer {
            stage: Stage::New(respond),
            account: None,
            rooms: Rooms::default(),
            replies,
            shown,
            last_len: 0,
            is_stalled: false,
        };
        Self(Rc::new(RefCell::new(answer)))
    }

    /// Keeps the request's room until the reply has gone out, which may be cut from it.
    pub(super) fn keep(&self, request: Room) {
        if request.held() > 0 {
            self.0.borrow_mut().rooms.request = Some(Rc::new(request));
        }
    }

    /// Keeps the call's memory until its last message has gone out.
    pub(super) fn charge(&self, stream: OpenStream) {
        self.0.borrow_mut().rooms.call = Some(Rc::new(stream));
    }

    /// Gives back what the reply does not need after all.
    pub(super) fn shrink_room(&self, len: usize) {
        if let Some(room) = &self.0.borrow().rooms.reply {
            room.shrink_to(len);
        }
    }

    pub(super) fn open_account(&self, account: Account) {
        self.0.borrow_mut().account = Some(account);
    }

    /// Counts what has come.
    pub(super) fn count_received(&self, part: &Part) {
        let Some(account) = &mut self.0.borrow_mut().account else { return };
        match part {
            Part::Start { .. } => account.message_received(),
            Part::Piece(piece) => account.bytes_received(piece.len()),
            Part::End => {}
        }
    }

    /// Sends a message without waiting for room: for the only message of a unary call.
    pub(super) fn send_now(&mut self, message: Reply) -> Result<(), Status> {
        let answer = &mut *self.0.borrow_mut();
        let payload = Payload::message(message, answer.rooms.clone(), answer.shown.clone());
        answer.last_len = payload.remaining();
        if let Some(account) = &mut answer.account {
            account.message_sent(payload.remaining());
        }
        let stream = answer.stage.streaming()?;
        stream.send_data(payload, false).map_err(|_| gone())
    }

    /// Waits until HTTP/2 may send at least one byte more than it holds.
    ///
    /// Why the headers go first: only then does HTTP/2 say what it may send, and a client that opens no window must not
    /// be able to park a first message of each of its calls here.
    fn poll_room(&self, context: &mut Context<'_>) -> Poll<Result<usize, Status>> {
        let answer = &mut *self.0.borrow_mut();
        let stream = answer.stage.streaming()?;
        stream.reserve_capacity(limits::HTTP2_SEND_BUFFER_LEN);
        while stream.capacity() == 0 {
            match ready!(stream.poll_capacity(context)) {
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return Poll::Ready(Err(gone())),
            }
        }
        Poll::Ready(Ok(stream.capacity()))
    }

    /// Waits for room. `None` when there was none for `patience` while memory was scarce.
    async fn room_within(&self, patience: Duration) -> Result<Option<usize>, Status> {
        let mut waited: Option<Sleep> = None;
        std::future::poll_fn(|context| {
            if let Poll::Ready(room) = self.poll_room(context) {
                return Poll::Ready(room.map(Some));
            }
            loop {
                ready!(Pin::new(waited.get_or_insert_with(|| time::sleep(patience))).poll(context));
                if self.0.borrow().replies.is_scarce() {
                    return Poll::Ready(Ok(None));
                }
                waited = None;
            }
        })
        .await
    }

    /// Ready when the client has reset the stream or the connection is gone.
    pub(super) fn poll_cut(&self, context: &mut Context<'_>) -> Poll<()> {
        match &mut self.0.borrow_mut().stage {
            Stage::New(respond) => respond.poll_reset(context).map(|_| ()),
            Stage::Streaming(stream) => stream.poll_reset(context).map(|_| ()),
            Stage::Ended => Poll::Pending,
        }
    }

    /// Sends the status. Errors are ignored: a client that is gone needs none. What the client has still to send is
    /// stopped by HTTP/2 when the last clone is dropped (RST_STREAM with NO_ERROR, RFC 9113, 8.1).
    pub(super) fn finish(&self, result: Result<(), Status>) {
        let answer = &mut *self.0.borrow_mut();
        answer.rooms = Rooms::default();
        let status = result.err();
        let code = status.as_ref().map_or(Code::Ok, |status| status.code);
        if let Some(account) = &mut answer.account {
            account.finish(code);
        }
        match std::mem::replace(&mut answer.stage, Stage::Ended) {
            // Why without a status: it would wait behind what is not taken.
            Stage::Streaming(mut stream) if answer.is_stalled => stream.send_reset(h2::Reason::CANCEL),
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
        self.hold(pieces_len(&message)).await?;
        self.ready().await?;
        self.send_now(message)
    }

    async fn ready(&mut self) -> Result<(), Status> {
        while self.room_within(Duration::from_millis(limits::REPLY_STALL_MS)).await?.is_none() {
            let answer = &mut *self.0.borrow_mut();
            if answer.rooms.reply.take_if(|room| !is_shared(room)).is_some() {
                continue;
            }
            if answer.rooms.reply.is_some() {
                answer.is_stalled = true;
                let text = "the client took nothing of the reply for too long, and others wait for its memory";
                return Err(Status::new(Code::Unavailable, text));
            }
        }
        Ok(())
    }

    async fn room(&mut self) -> Result<Option<usize>, Status> {
        self.room_within(Duration::from_millis(limits::READ_YIELD_MS)).await
    }

    fn is_scarce(&self) -> bool {
        self.0.borrow().replies.is_scarce()
    }

    fn release(&mut self) {
        let Answer { rooms, last_len, .. } = &mut *self.0.borrow_mut();
        let Some(room) = rooms.reply.take() else { return };
        room.shrink_to(*last_len);
        if *last_len > limits::READ_REST_LEN && is_shared(&room) {
            rooms.reply = Some(room);
        }
    }

    async fn hold(&mut self, len: usize) -> Result<(), Status> {
        if len <= limits::SMALL_MESSAGE_LEN {
            return Ok(());
        }
        let room = {
            let answer = &mut *self.0.borrow_mut();
            if answer.rooms.reply.as_ref().is_some_and(|room| room.held() >= len) {
                return Ok(());
            }
            // Why given back first: who holds some while waiting for more may keep others from ever ending.
            answer.rooms.reply = None;
            answer.replies.room()
        };
        room.grow(len).await.map_err(|GaveWay| Status::new(Code::ResourceExhausted, "too many replies wait"))?;
        self.0.borrow_mut().rooms.reply = Some(Rc::new(room));
        Ok(())
    }

    fn note_resource(&mut self, name: fmt::Arguments<'_>) {
        if let Some(account) = &mut self.0.borrow_mut().account {
            account.note_resource(name);
        }
    }
}

/// A message that has not gone out is accounted to it.
fn is_shared(room: &Rc<Room>) -> bool {
    Rc::strong_count(room) > 1
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
    headers.insert(GRPC_STATUS, if code == Code::Ok { HeaderValue::from_static("0") } else { (code as u16).into() });
    if code == Code::Unimplemented {
        // Source: compression.md: a server that does not know the request's encoding says which it knows.
        headers.insert(GRPC_ACCEPT_ENCODING, IDENTITY);
    }
    if let Some(status) = status {
        let text = &status.message[..status.message.floor_char_boundary(ERROR_TEXT_LEN_MAX)];
        if let Ok(text) = HeaderValue::try_from(grpc_frame::encode_message(text)) {
            headers.insert(GRPC_MESSAGE, text);
        }
        let details = status.details().map(|details| HeaderValue::try_from(STANDARD_NO_PAD.encode(details)));
        if let Some(Ok(details)) = details {
            headers.insert(GRPC_STATUS_DETAILS, details);
        }
    }
}
