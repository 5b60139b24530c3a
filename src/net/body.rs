//! The request side of a call: its body, cut into messages.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;

use super::bodies::Inbound;
use super::memory::{GaveWay, Room, Share};
use super::metadata::Caller;
use super::responder::Responder;
use crate::limits;
use crate::pure::grpc_frame::{Deframer, FrameError, Part};
use crate::rt::time::{self, Sleep};
use crate::service::byte_stream::{Incoming, Tool};
use crate::service::{Code, Outgoing as _, Status};

/// A request body.
pub struct Body {
    inbound: Inbound,
    deframer: Deframer,
    /// Bytes that came and whose window credit has not been returned.
    owed: usize,
    idle: Idle,
}

/// Ends a wait for a client that sends nothing.
///
/// Why not a timer from each byte: this one is set once for many parts, so that a busy stream pays nothing for it. A
/// client is given up after one to two times `limit`.
struct Idle {
    limit: Duration,
    timer: Option<Sleep>,
    /// Something came since the timer was set.
    moved: bool,
}

impl Idle {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        loop {
            let timer = self.timer.get_or_insert_with(|| time::sleep(self.limit));
            ready!(Pin::new(timer).poll(context));
            self.timer = None;
            if !std::mem::take(&mut self.moved) {
                let text = format!("nothing of the request came for {} s", self.limit.as_secs_f32());
                return Poll::Ready(Status::new(Code::DeadlineExceeded, text));
            }
        }
    }
}

/// A whole unary request message, and its room.
pub struct Message {
    pub bytes: Bytes,
    pub room: Room,
}

impl Body {
    /// `has_encoding`: `grpc-encoding` names something other than `identity`. The client may send nothing for
    /// `idle_limit` at a time.
    pub fn new(inbound: Inbound, has_encoding: bool, idle_limit: Duration) -> Self {
        let deframer = Deframer::new(limits::GRPC_MESSAGE_LEN_MAX, has_encoding);
        Self { inbound, deframer, owed: 0, idle: Idle { limit: idle_limit, timer: None, moved: false } }
    }

    /// The one message of a unary call. Copies nothing when it came in one chunk. While it waits for memory its
    /// window is closed; who has begun a message may send nothing of it for `stall_limit` at a time.
    ///
    /// Why the window credit is returned as bytes come and not when the message is complete: many half-sent messages
    /// would fill the connection's window, and then none of them could end. `Share` is the bound instead. It counts what
    /// has come and not what is announced, because an announcement costs a client nothing.
    pub async fn message(mut self, share: &Share, stall_limit: Duration) -> Result<Message, Status> {
        self.idle.limit = stall_limit;
        let Some(Part::Start { len }) = self.part().await? else { return Err(not_one_message("none")) };
        let room = share.room();
        let mut bytes = Bytes::new();
        let mut joined = Vec::new();
        while let Some(Part::Piece(piece)) = self.part().await? {
            let here = joined.len() + piece.len();
            if here > joined.capacity() {
                // Why doubled: so that a message of many pieces is copied once or twice, and holds at most twice what came.
                let capacity = if piece.len() == len { len } else { (2 * joined.len()).max(here).min(len) };
                if len > limits::SMALL_MESSAGE_LEN {
                    hold(&room, capacity).await?;
                }
                if piece.len() < len {
                    joined.reserve_exact(capacity - joined.len());
                }
            }
            if piece.len() == len {
                bytes = piece;
            } else {
                joined.extend_from_slice(&piece);
            }
            self.return_credit();
        }
        if !joined.is_empty() {
            bytes = joined.into();
        }
        match self.part().await? {
            None => Ok(Message { bytes, room }),
            Some(_) => Err(not_one_message("more")),
        }
    }

    /// The next part of a message; `None` at the half-close.
    pub async fn part(&mut self) -> Result<Option<Part>, Status> {
        std::future::poll_fn(|context| match self.poll_part(context) {
            Poll::Pending => self.idle.poll(context).map(Err),
            part => part,
        })
        .await
    }

    fn poll_part(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Part>, Status>> {
        loop {
            if let Some(part) = self.deframer.next_part().map_err(frame_status)? {
                return Poll::Ready(Ok(Some(part)));
            }
            match ready!(self.inbound.poll_data(context)) {
                Some(Ok(chunk)) => {
                    self.owed += chunk.len();
                    self.idle.moved = true;
                    self.deframer.feed(chunk);
                }
                Some(Err(error)) => {
                    return Poll::Ready(Err(Status::new(Code::Cancelled, format!("the request was cut off: {error}"))));
                }
                None => {
                    self.deframer.end().map_err(frame_status)?;
                    return Poll::Ready(Ok(None));
                }
            }
        }
    }

    /// Returns window credit for all that came out.
    pub fn return_credit(&mut self) {
        self.return_credit_but(0);
    }

    /// The same, but for `held` bytes, which are still in memory somewhere.
    pub fn return_credit_but(&mut self, held: usize) {
        let out = (self.owed - self.deframer.unread()).saturating_sub(held);
        self.inbound.release(out);
        self.owed -= out;
    }
}

/// Makes the room at least `len` bytes, or refuses the message.
async fn hold(room: &Room, len: usize) -> Result<(), Status> {
    let limit = Duration::from_millis(limits::REQUEST_WAIT_MS);
    match time::timeout(limit, room.grow(len.saturating_sub(room.held()))).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(GaveWay)) | Err(time::Elapsed) => {
            let text = "requests in flight take all of the memory that this connection may use: send fewer at a time";
            Err(Status::new(Code::ResourceExhausted, text))
        }
    }
}

/// Source: statuscodes.md, "Request cardinality violation".
fn not_one_message(what: &str) -> Status {
    Status::new(Code::Unimplemented, format!("this method takes exactly one request message, got {what}"))
}

/// Source: statuscodes.md and compression.md for the codes that gRPC prescribes.
fn frame_status(error: FrameError) -> Status {
    let code = match error {
        FrameError::TooLong { .. } => Code::ResourceExhausted,
        FrameError::Truncated => Code::InvalidArgument,
        FrameError::CompressedWithoutEncoding | FrameError::UnknownFlag(_) => Code::Internal,
        FrameError::UnsupportedEncoding => Code::Unimplemented,
    };
    Status::new(code, error.to_string())
}

/// The request messages of a client-streaming call.
pub struct RequestStream {
    pub body: Body,
    pub caller: Caller,
    pub responder: Responder,
}

impl Incoming for RequestStream {
    async fn part(&mut self) -> Result<Option<Part>, Status> {
        let part = self.body.part().await?;
        part.iter().for_each(|part| self.responder.count_received(part));
        Ok(part)
    }

    fn part_here(&mut self) -> Result<Option<Part>, Status> {
        // Why a waker that does nothing: whoever finds nothing here goes on to wait with `part`, or does not care.
        match self.body.poll_part(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(part) => {
                let part = part?;
                part.iter().for_each(|part| self.responder.count_received(part));
                Ok(part)
            }
            Poll::Pending => Ok(None),
        }
    }

    fn consumed_but(&mut self, held: usize) {
        self.body.return_credit_but(held);
    }

    fn tool(&self) -> Tool {
        self.caller.tool()
    }

    fn user_agent(&self) -> String {
        self.caller.user_agent()
    }

    fn note_resource(&mut self, name: fmt::Arguments<'_>) {
        self.responder.note_resource(name);
    }
}
