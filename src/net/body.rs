//! The request side of a call: its body, cut into messages.

use std::task::{Context, Poll, Waker, ready};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::HeaderMap;

use super::memory::{Memory, Room};
use super::metadata;
use super::responder::Responder;
use crate::limits;
use crate::pure::grpc_frame::{Deframer, FrameError, Part};
use crate::service::byte_stream::{Incoming, Tool};
use crate::service::{Code, Outgoing as _, Status};

/// A request body.
pub struct Body {
    stream: RecvStream,
    deframer: Deframer,
    /// Bytes that came and whose window credit has not been returned.
    owed: usize,
}

/// A whole unary request message.
pub struct Message<'a> {
    pub bytes: Bytes,
    _room: Room<'a>,
}

impl Body {
    /// `has_encoding`: `grpc-encoding` names something other than `identity`.
    pub fn new(stream: RecvStream, has_encoding: bool) -> Self {
        Self { stream, deframer: Deframer::new(limits::GRPC_MESSAGE_LEN_MAX, has_encoding), owed: 0 }
    }

    /// The one message of a unary call. Copies nothing when it came in one DATA frame.
    ///
    /// Why the window credit is returned as bytes come and not when the message is complete: many half-sent messages
    /// would fill the connection's window, and then none of them could end. `Memory` is the bound instead.
    pub async fn message(mut self, memory: &Memory) -> Result<Message<'_>, Status> {
        let Some(Part::Start { len }) = self.part().await? else { return Err(not_one_message("none")) };
        let room = memory.take(len)?;
        let mut bytes = Bytes::new();
        let mut joined = BytesMut::new();
        while let Some(Part::Piece(piece)) = self.part().await? {
            if piece.len() == len {
                bytes = piece;
            } else {
                // Why not `len` at once: a claim is not a reason to allocate, bytes are.
                let more = joined.len().max(piece.len()).min(len - joined.len());
                joined.reserve(more);
                joined.extend_from_slice(&piece);
            }
            self.return_credit();
        }
        if !joined.is_empty() {
            bytes = joined.freeze();
        }
        match self.part().await? {
            None => Ok(Message { bytes, _room: room }),
            Some(_) => Err(not_one_message("more")),
        }
    }

    /// The next part of a message; `None` at the half-close.
    pub async fn part(&mut self) -> Result<Option<Part>, Status> {
        std::future::poll_fn(|context| self.poll_part(context)).await
    }

    fn poll_part(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Part>, Status>> {
        loop {
            if let Some(part) = self.deframer.next_part().map_err(frame_status)? {
                return Poll::Ready(Ok(Some(part)));
            }
            match ready!(self.stream.poll_data(context)) {
                Some(Ok(chunk)) => {
                    self.owed += chunk.len();
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
        let out = self.owed - self.deframer.unread();
        // An error means that the stream is over, and its credit with it.
        let _ = self.stream.flow_control().release_capacity(out);
        self.owed -= out;
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
    pub headers: HeaderMap,
    pub responder: Responder,
}

impl Incoming for RequestStream {
    async fn part(&mut self) -> Result<Option<Part>, Status> {
        self.body.part().await
    }

    fn part_here(&mut self) -> Result<Option<Part>, Status> {
        // Why a waker that does nothing: whoever finds nothing here goes on to wait with `part`, or does not care.
        match self.body.poll_part(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(part) => part,
            Poll::Pending => Ok(None),
        }
    }

    fn consumed(&mut self) {
        self.body.return_credit();
    }

    fn tool(&self) -> Tool {
        metadata::tool(&self.headers)
    }

    fn note_resource(&mut self, name: &str) {
        self.responder.note_resource(name);
    }
}
