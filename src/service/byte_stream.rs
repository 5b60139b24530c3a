//! `google.bytestream.ByteStream`: blobs of any size, in both directions.
//!
//! Source: googleapis `google/bytestream/bytestream.proto`; REAPI, comments at `ContentAddressableStorage`, for resource
//! names, compressed blobs and what `committed_size` means for them.

use std::fmt;
use std::rc::Rc;

use bytes::{Bytes, BytesMut};
use prost::Message as _;
use prost::encoding::encode_varint;

use super::{CallContext, Code, Options, Outgoing, Reply, Services, Status};
use crate::limits;
use crate::pure::digest::Digest;
use crate::pure::grpc_frame::Part;
use crate::pure::resource_name::{ReadName, WriteName};
use crate::pure::write_request::{Field, ScanError, Scanner};
use crate::rt::time::{self, Either};
use crate::store::{
    Accept, Blob, Encoding, Get, Opened, Put, PutOutcome, Store, StoreError, Upload, UploadEnd, UploadKey,
};
use crate::wire::bytestream::{QueryWriteStatusRequest, QueryWriteStatusResponse, ReadRequest, WriteResponse};

/// The tool that calls, from RequestMetadata.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tool {
    /// Lower case; empty when not sent.
    pub name: String,
    pub version: String,
}

/// Where a client-streaming handler gets its request messages from, as they arrive.
#[allow(async_fn_in_trait)] // Why: futures stay on their core; nobody asks for Send.
pub trait Incoming {
    /// The next part of a message; `None` at the half-close, which is always between messages.
    async fn part(&mut self) -> Result<Option<Part>, Status>;
    /// The next part if it is here already; `None` also at the half-close.
    fn part_here(&mut self) -> Result<Option<Part>, Status>;
    /// All parts handed out so far have been consumed, but for `held` bytes: the client may send as many bytes more.
    fn consumed_but(&mut self, held: usize);
    /// Decoded when asked for: few calls need it.
    fn tool(&self) -> Tool;
    /// The `user-agent` header; empty when not sent.
    fn user_agent(&self) -> String;
    /// Names what the call is about, for the access log.
    fn note_resource(&mut self, name: fmt::Arguments<'_>);
}

/// A zstd frame of nothing. Source: RFC 8878, 3.1.1: magic number, single segment, content size 0, one empty last block.
const EMPTY_ZSTD_FRAME: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd, 0x20, 0x00, 0x01, 0x00, 0x00];
/// Tag of `ReadResponse.data` (field 10, length-delimited).
const DATA_TAG: u8 = 0x52;
/// What stands before the data in a ReadResponse, at most, in bytes: the tag and a length.
const READ_RESPONSE_HEAD_LEN: usize = 11;

/// `Read`, server-streaming.
pub async fn read<S: Store>(
    services: &Services<S>,
    _context: &CallContext,
    request: Bytes,
    out: &mut impl Outgoing,
) -> Result<(), Status> {
    let request = ReadRequest::decode(request).map_err(|error| Status::invalid(format!("ReadRequest: {error}")))?;
    out.note_resource(format_args!("{}", request.resource_name));
    let name =
        ReadName::parse(&request.resource_name).map_err(|error| Status::invalid(format!("resource_name: {error}")))?;
    let get = checked_get(&name, &request)?;
    let sent = if name.digest.is_empty() { false } else { send_blob(services, get, out).await? };
    if !sent && name.encoding == Encoding::Zstd {
        // Why: the answer to a compressed read is a valid zstd stream, also when it is a stream of nothing.
        out.send(read_response(Bytes::from_static(EMPTY_ZSTD_FRAME))).await?;
    }
    Ok(())
}

/// Holds a ReadRequest's range against the blob's size.
fn checked_get(name: &ReadName<'_>, request: &ReadRequest) -> Result<Get, Status> {
    let size = name.digest.size;
    let out_of_range = |text: String| Status::new(Code::OutOfRange, text);
    let offset = u64::try_from(request.read_offset).ok().filter(|&offset| offset <= size);
    let offset = offset.ok_or_else(|| {
        out_of_range(format!("read_offset: {} is outside of the blob's {size} bytes", request.read_offset))
    })?;
    if request.read_limit != 0 && name.encoding == Encoding::Zstd {
        return Err(Status::invalid("read_limit: must be 0 for a compressed read"));
    }
    let limit = u64::try_from(request.read_limit)
        .map_err(|_| out_of_range(format!("read_limit: {} is negative", request.read_limit)))?;
    let accept = match name.encoding {
        Encoding::Identity => Accept::Identity,
        Encoding::Zstd => Accept::Zstd,
    };
    Ok(Get { digest: name.digest, offset, limit: (limit != 0).then_some(limit), accept })
}

/// Sends what was asked for; false when that was no bytes.
///
/// A client that takes nothing while memory is scarce costs what HTTP/2 has of it: the rest is given back, and read again
/// from where it stood when the client goes on. Not so for zstd: its pieces have no offset of their own.
///
/// While memory is scarce no more is read at a time than the client has room for, so that thousands who do not read take
/// memory from others for no longer than a disk read takes.
async fn send_blob<S: Store>(services: &Services<S>, mut get: Get, out: &mut impl Outgoing) -> Result<bool, Status> {
    let first = get.offset;
    loop {
        let mut part = take_memory(&get, out).await?;
        let blob = match services.store.get_here(part).await? {
            Some(blob) => Some(blob),
            None => {
                // While a backend is asked nothing is held.
                out.release();
                match services.store.fetch_to_get(get.digest).await? {
                    true => {
                        part = take_memory(&get, out).await?;
                        services.store.get(part).await?
                    }
                    false => None,
                }
            }
        };
        let mut blob = blob.ok_or_else(|| Status::not_found(format!("blob {} is not in the cache", get.digest)))?;
        let is_last = part.limit == get.limit;
        let sent = send_pieces(&mut blob, &mut part, out).await?;
        get.limit = get.limit.map(|limit| limit - (part.offset - get.offset));
        get.offset = part.offset;
        if is_last && matches!(sent, Sent::All) {
            return Ok(get.offset > first);
        }
        drop(blob);
        out.release();
    }
}

/// Takes memory for what is to be read next: all of `get` as a stream, or, while memory is scarce, what the client has room
/// for now, of one frame.
async fn take_memory(get: &Get, out: &mut impl Outgoing) -> Result<Get, Status> {
    let mut part = *get;
    if out.is_scarce() && held_len(get) > limits::SMALL_MESSAGE_LEN {
        out.ready().await?;
        if get.accept == Accept::Identity {
            // Nothing is waited for: there is room.
            let room = out.room().await?.unwrap_or(0).saturating_sub(limits::READ_MESSAGE_OVERHEAD);
            let frame_left = limits::FRAME_LEN as u64 - get.offset % limits::FRAME_LEN as u64;
            let most = frame_left.min(room.max(limits::READ_MESSAGE_LEN_MIN) as u64);
            let left = get.limit.unwrap_or(u64::MAX).min(get.digest.size - get.offset);
            if most < left {
                part.limit = Some(most);
                out.hold(limits::READ_PART_HELD_LEN).await?;
                return Ok(part);
            }
        }
    }
    out.hold(held_len(get)).await?;
    Ok(part)
}

/// How a client took a blob.
enum Sent {
    All,
    /// It takes nothing now.
    Part,
}

/// Sends pieces as the client takes them; `get` is then what is left. (Compressed bytes are counted as well.)
async fn send_pieces(blob: &mut Blob, get: &mut Get, out: &mut impl Outgoing) -> Result<Sent, Status> {
    let mut rest = Bytes::new();
    loop {
        if get.accept == Accept::Identity && (get.limit == Some(0) || get.offset == get.digest.size) {
            return Ok(Sent::All);
        }
        let room = match out.room().await? {
            Some(room) => room,
            None if get.accept == Accept::Identity => return Ok(Sent::Part),
            None => {
                out.ready().await?;
                continue;
            }
        };
        if rest.is_empty() {
            match blob.next_piece().await? {
                Some(piece) => rest = piece,
                None => return Ok(Sent::All),
            }
        }
        // Why to the byte: what does not fit waits in HTTP/2, and goes out as a frame of its own.
        let room = room.saturating_sub(limits::READ_MESSAGE_OVERHEAD).max(limits::READ_MESSAGE_LEN_MIN);
        let len = rest.len().min(room).min(limits::READ_PIECE_LEN_MAX);
        let is_little = len < rest.len() / 2 && len <= limits::READ_REST_LEN;
        let piece = rest.split_to(len);
        get.offset += len as u64;
        get.limit = get.limit.map(|limit| limit - len as u64);
        // Why copied: a client that stops here would hold all of the piece that this is cut from.
        out.send(read_response(if is_little { Bytes::copy_from_slice(&piece) } else { piece })).await?;
    }
}

/// Memory that a Read takes at most, in bytes.
fn held_len(get: &Get) -> usize {
    let len = get.limit.unwrap_or(u64::MAX).min(get.digest.size - get.offset);
    len.saturating_add(READ_RESPONSE_HEAD_LEN as u64).min(limits::READ_HELD_LEN as u64) as usize
}

/// A ReadResponse around `data`, which is not copied.
fn read_response(data: Bytes) -> Reply {
    let mut head = BytesMut::with_capacity(READ_RESPONSE_HEAD_LEN);
    head.extend_from_slice(&[DATA_TAG]);
    encode_varint(data.len() as u64, &mut head);
    vec![head.freeze(), data]
}

/// `QueryWriteStatus`.
pub async fn query_write_status<S: Store>(
    services: &Services<S>,
    _context: &CallContext,
    request: Bytes,
) -> Result<Reply, Status> {
    let request = QueryWriteStatusRequest::decode(request)
        .map_err(|error| Status::invalid(format!("QueryWriteStatusRequest: {error}")))?;
    let name = write_name(&request.resource_name)?;
    let response = if name.digest.is_empty() {
        QueryWriteStatusResponse { committed_size: 0, complete: true }
    } else {
        // Why not NOT_FOUND for an upload that is not known: Bazel takes an error here for the end of its attempt, while
        // 0 makes it begin.
        let status = services.store.upload_status(upload_key(&name)).await?;
        QueryWriteStatusResponse { committed_size: wire_size(status.committed), complete: status.complete }
    };
    Ok(vec![response.encode_to_vec().into()])
}

/// `Write`, client-streaming.
///
/// - A small blob that is here as a whole is stored at once; anything else becomes an upload, which tells early when
///   the blob is present, so that the client need not send it.
/// - A half-close without `finish_write` does not complete the upload: it is kept for the client to resume, and the
///   answer says how much of it is committed (bytestream.proto, `WriteRequest.finish_write`).
/// - A client that vanishes leaves its upload to be resumed as well, because this future is dropped.
pub async fn write<S: Store>(
    services: &Services<S>,
    context: &CallContext,
    incoming: &mut impl Incoming,
) -> Result<Reply, Status> {
    let mut messages = Messages::new(incoming);
    messages.read_name().await?;
    messages.read_here()?;
    let name = messages.name.clone();
    messages.incoming.note_resource(format_args!("{name}"));
    let name = write_name(&name)?;
    context.require_write()?;
    let max = services.options.max_blob_size.get();
    if name.digest.size > max {
        return Err(StoreError::BlobTooLarge { digest: name.digest, max }.into());
    }
    messages.check_len(&name)?;
    let ending = if name.digest.is_empty() {
        Ending::Present
    } else if messages.finished && messages.first_offset == 0 && is_small(name.digest) {
        messages.check_nothing_follows()?;
        let data = std::mem::take(&mut messages.fresh);
        let put = services.store.put(Put { digest: name.digest, encoding: name.encoding, data, admitted: false }).await;
        match put.map_err(|error| refused(services, messages.incoming, &messages.name, error))? {
            PutOutcome::Stored => Ending::Stored,
            PutOutcome::AlreadyPresent => Ending::Present,
        }
    } else {
        upload(services, &name, &mut messages).await?
    };
    let committed_size = committed_size(&name, ending, &mut messages).await?;
    Ok(vec![WriteResponse { committed_size }.encode_to_vec().into()])
}

/// How a Write ends when it ends well.
enum Ending {
    /// All of it came and has been stored.
    Stored,
    /// The blob is in the cache without this upload.
    Present,
    /// The client stopped before the end; so many raw bytes are kept.
    Kept { committed: u64 },
}

/// Runs an upload from the first bytes that are here to its end.
async fn upload<S: Store, I: Incoming>(
    services: &Services<S>,
    name: &WriteName<'_>,
    messages: &mut Messages<'_, I>,
) -> Result<Ending, Status> {
    let store = &services.store;
    let opened = store.open_upload(upload_key(name), messages.first_offset).await;
    let mut upload = match opened.map_err(|error| refused(services, messages.incoming, &messages.name, error))? {
        Opened::AlreadyPresent => return Ok(Ending::Present),
        Opened::Ready(upload) => upload,
    };
    loop {
        messages.check_len(name)?;
        if !messages.fresh.is_empty() {
            match upload.write(std::mem::take(&mut messages.fresh)).await {
                Ok(()) => {}
                Err(UploadEnd::AlreadyPresent) => return Ok(Ending::Present),
                Err(UploadEnd::Failed(error)) => return Err(error.into()),
            }
        }
        messages.incoming.consumed_but(upload.unconsumed());
        if messages.finished {
            messages.check_nothing_follows()?;
            return match upload.finish().await? {
                PutOutcome::Stored => Ok(Ending::Stored),
                PutOutcome::AlreadyPresent => Ok(Ending::Present),
            };
        }
        let more = loop {
            match time::race(messages.read_more(), upload.moved()).await {
                Either::Left(more) => break more?,
                Either::Right(Ok(())) => messages.incoming.consumed_but(upload.unconsumed()),
                Either::Right(Err(UploadEnd::AlreadyPresent)) => return Ok(Ending::Present),
                Either::Right(Err(UploadEnd::Failed(error))) => return Err(error.into()),
            }
        };
        if !more {
            return match upload.suspend().await {
                Ok(committed) => Ok(Ending::Kept { committed }),
                Err(UploadEnd::AlreadyPresent) => Ok(Ending::Present),
                Err(UploadEnd::Failed(error)) => Err(error.into()),
            };
        }
    }
}

/// The status of a write that the store did not begin. One that was not let in is logged.
fn refused<S>(services: &Services<S>, incoming: &impl Incoming, name: &str, error: StoreError) -> Status {
    let Options { shed_status, shed_log, .. } = &*services.options;
    if matches!(error, StoreError::Shed { .. }) {
        shed_log.note(format_args!("GRPC BYTESTREAM WRITE SHED {}", name.escape_debug()));
    }
    shed_status.get().status(error, || {
        let Tool { name: tool_name, version: tool_version } = incoming.tool();
        CallContext { tool_name, tool_version, user_agent: incoming.user_agent(), ..CallContext::default() }
    })
}

/// What `WriteResponse.committed_size` must be for this client.
///
/// | blob | ending | who | value |
/// |---|---|---|---|
/// | any | kept | all | raw bytes kept |
/// | identity | stored, present | all | the blob's size |
/// | zstd | stored, present | clients that only take it | the blob's size |
/// | zstd | present | Bazel 5.0.0 | as when stored, and the stream is read to its end (bazel #14654) |
/// | zstd | present | others | -1 |
/// | zstd | stored | others | first `write_offset` + compressed bytes of this stream |
///
/// Source: REAPI for -1; bazelbuild/bazel PR #30000 for what clients accept.
async fn committed_size<I: Incoming>(
    name: &WriteName<'_>,
    ending: Ending,
    messages: &mut Messages<'_, I>,
) -> Result<i64, Status> {
    if let Ending::Kept { committed } = ending {
        return Ok(wire_size(committed));
    }
    if name.encoding == Encoding::Identity {
        return Ok(wire_size(name.digest.size));
    }
    let tool = messages.incoming.tool();
    if wants_blob_size(&tool) {
        return Ok(wire_size(name.digest.size));
    }
    if matches!(ending, Ending::Present) {
        if !(tool.name == "bazel" && tool.version.starts_with("5.0.0")) {
            return Ok(-1);
        }
        messages.drain().await?;
    }
    Ok(wire_size(messages.first_offset + messages.received))
}

/// Siso, and what is built with bazelbuild/remote-apis-sdks, take nothing but the blob's size.
fn wants_blob_size(tool: &Tool) -> bool {
    const NAMES: [&str; 7] =
        ["siso", "reclient", "re-client", "reproxy", "rewrapper", "remotetool", "remote-apis-sdks"];
    NAMES.iter().any(|name| tool.name.contains(name))
}

fn is_small(digest: Digest) -> bool {
    digest.size <= limits::SMALL_BLOB_LEN_MAX as u64
}

fn write_name(name: &str) -> Result<WriteName<'_>, Status> {
    WriteName::parse(name).map_err(|error| Status::invalid(format!("resource_name: {error}")))
}

fn upload_key(name: &WriteName<'_>) -> UploadKey {
    UploadKey { instance: name.instance.into(), uuid: name.uuid.into(), digest: name.digest, encoding: name.encoding }
}

/// Sizes come from digests, which are at most `i64::MAX`.
fn wire_size(size: u64) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

fn scan_status(error: ScanError) -> Status {
    Status::invalid(error.to_string())
}

/// The messages of one Write, put together and held against the rules of the stream.
struct Messages<'a, I> {
    incoming: &'a mut I,
    scanner: Scanner,
    /// From the first message; empty until it is known.
    name: Rc<str>,
    /// `write_offset` of the first message, in raw bytes.
    first_offset: u64,
    /// Data bytes of this stream so far, in its encoding.
    received: u64,
    /// Data that the store has not been given yet.
    fresh: Vec<Bytes>,
    fresh_len: usize,
    /// Whole messages so far.
    complete: u64,
    /// What the message that is being read has said so far.
    offset: Option<i64>,
    finish: bool,
    /// Its offset has been checked, because its data has begun.
    placed: bool,
    /// The message with `finish_write` is complete.
    finished: bool,
}

impl<'a, I: Incoming> Messages<'a, I> {
    fn new(incoming: &'a mut I) -> Self {
        Self {
            incoming,
            scanner: Scanner::new(limits::RESOURCE_NAME_LEN_MAX),
            name: Rc::default(),
            first_offset: 0,
            received: 0,
            fresh: Vec::new(),
            fresh_len: 0,
            complete: 0,
            offset: None,
            finish: false,
            placed: false,
            finished: false,
        }
    }

    /// Reads until the name is known.
    async fn read_name(&mut self) -> Result<(), Status> {
        while self.name.is_empty() {
            let Some(part) = self.incoming.part().await? else {
                return Err(Status::invalid("resource_name: the stream ended before its first message"));
            };
            self.take(part)?;
            // Why: data may stand before the name in its message. It is held, so the window must not be what holds it.
            if self.fresh_len > limits::FRAME_LEN {
                return Err(Status::invalid("resource_name: must stand before the data in the first message"));
            }
            self.incoming.consumed_but(0);
        }
        Ok(())
    }

    /// Reads what is here, up to a store call's worth.
    fn read_here(&mut self) -> Result<(), Status> {
        while !self.finished && self.fresh_len < limits::FRAME_LEN {
            let Some(part) = self.incoming.part_here()? else { break };
            self.take(part)?;
        }
        Ok(())
    }

    /// Waits for more, and reads what is here then. False at the half-close.
    async fn read_more(&mut self) -> Result<bool, Status> {
        self.fresh_len = 0;
        let Some(part) = self.incoming.part().await? else { return Ok(false) };
        self.take(part)?;
        self.read_here()?;
        Ok(true)
    }

    /// Reads and forgets the rest of the stream; its bytes are still counted.
    async fn drain(&mut self) -> Result<(), Status> {
        loop {
            self.fresh.clear();
            self.incoming.consumed_but(0);
            if self.finished || !self.read_more().await? {
                return Ok(());
            }
        }
    }

    /// Raw bytes must not be more than the digest says. Compressed ones are counted by the store, as they decode.
    fn check_len(&self, name: &WriteName<'_>) -> Result<(), Status> {
        let is_too_long =
            name.encoding == Encoding::Identity && self.first_offset.saturating_add(self.received) > name.digest.size;
        if is_too_long { Err(StoreError::TooLong { expected: name.digest }.into()) } else { Ok(()) }
    }

    /// A message after `finish_write` is an error where it is seen before the answer.
    fn check_nothing_follows(&mut self) -> Result<(), Status> {
        match self.incoming.part_here()? {
            None => Ok(()),
            Some(part) => self.take(part),
        }
    }

    fn take(&mut self, part: Part) -> Result<(), Status> {
        match part {
            Part::Start { .. } if self.finished => {
                Err(Status::invalid("finish_write: a message follows the one that ended the upload"))
            }
            Part::Start { .. } => {
                (self.offset, self.finish, self.placed) = (None, false, false);
                Ok(())
            }
            Part::Piece(piece) => {
                self.scanner.feed(piece);
                while let Some(field) = self.scanner.next_field().map_err(scan_status)? {
                    self.take_field(field)?;
                }
                Ok(())
            }
            Part::End => {
                self.scanner.end().map_err(scan_status)?;
                self.place()?;
                if self.name.is_empty() {
                    return Err(Status::invalid("resource_name: missing in the first message"));
                }
                self.complete += 1;
                self.finished = self.finish;
                Ok(())
            }
        }
    }

    fn take_field(&mut self, field: Field) -> Result<(), Status> {
        match field {
            Field::ResourceName => {
                let name = self.scanner.name();
                if self.name.is_empty() && self.complete == 0 {
                    self.name = name.into();
                } else if !name.is_empty() && *name != *self.name {
                    let first = &self.name;
                    return Err(Status::invalid(format!("resource_name: changes within the stream, from {first:?}")));
                }
            }
            Field::WriteOffset(offset) => {
                if self.placed && offset != self.offset.unwrap_or(0) {
                    return Err(Status::invalid("write_offset: stands behind its data"));
                }
                self.offset = Some(offset);
            }
            Field::FinishWrite(finish) => self.finish = finish,
            Field::Data(data) => {
                self.place()?;
                self.received += data.len() as u64;
                self.fresh_len += data.len();
                self.fresh.push(data);
            }
        }
        Ok(())
    }

    /// Checks where the running message's data goes, once: the first message says where the stream begins, and every
    /// later one must follow on. For compressed uploads that adds compressed bytes to a raw offset: REAPI wants it so.
    fn place(&mut self) -> Result<(), Status> {
        if std::mem::replace(&mut self.placed, true) {
            return Ok(());
        }
        let given = self.offset.unwrap_or(0);
        let offset = u64::try_from(given).map_err(|_| Status::invalid(format!("write_offset: {given} is negative")))?;
        if self.complete == 0 {
            self.first_offset = offset;
            return Ok(());
        }
        let expected = self.first_offset.saturating_add(self.received);
        if offset != expected {
            return Err(Status::invalid(format!("write_offset: {given} does not follow on, {expected} does")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::testing::{Collected, services};
    use crate::wire::bytestream::ReadResponse;

    /// Goal: while memory is scarce a Read takes what the client has room for, one frame at most, and holds little; the bytes
    /// are those of the blob. Method: rooms from tiny to more than a frame, ranges that begin and end within frames.
    #[test]
    fn reads_in_parts_while_memory_is_scarce() {
        crate::rt::cores::block_on(async {
            let (store, services) = services();
            let blob: Bytes = (0..3 * limits::FRAME_LEN + 1000).map(|i| (i / 7) as u8).collect::<Vec<_>>().into();
            let digest = store.add(blob.clone());
            for room in [1, 20_000, 64 << 10, 1 << 20] {
                for (offset, limit) in [(0, 0), (100, 0), (limits::FRAME_LEN - 5, limits::FRAME_LEN + 10), (7, 3)] {
                    store.with(|state| state.gets = 0);
                    let mut out = Collected { scarce_room: Some(room), ..Collected::default() };
                    let request = ReadRequest {
                        resource_name: format!("blobs/{}/{}", digest.hash.to_hex(), digest.size),
                        read_offset: offset as i64,
                        read_limit: limit as i64,
                    };
                    let request = request.encode_to_vec().into();
                    read(&services, &CallContext::default(), request, &mut out).await.expect("it is there");
                    let end = if limit == 0 { blob.len() } else { offset + limit };
                    let pieces = out.decode::<ReadResponse>();
                    assert!(pieces.iter().all(|piece| piece.data.len() <= room.max(limits::READ_MESSAGE_LEN_MIN)));
                    assert!(
                        pieces.iter().flat_map(|piece| &piece.data).eq(&blob[offset..end]),
                        "{room} {offset} {limit}"
                    );
                    assert!(out.held <= limits::READ_PART_HELD_LEN);
                    let step = room.clamp(limits::READ_MESSAGE_LEN_MIN, limits::FRAME_LEN);
                    let gets = store.with(|state| state.gets);
                    assert!(gets >= (end - offset).div_ceil(step), "{gets} reads with room for {room}");
                }
            }
        });
    }
}
