//! `google.bytestream.ByteStream`.
use super::{CallContext, Outgoing, Reply, Services, Status};
use crate::pure::grpc_frame::Part;
use crate::store::Store;
use bytes::Bytes;

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
    /// All parts handed out so far have been consumed: the client may send as many bytes more.
    fn consumed(&mut self);
    /// Decoded when asked for: few calls need it.
    fn tool(&self) -> Tool;
    /// Names what the call is about, for the access log.
    fn note_resource(&mut self, name: &str);
}

pub async fn query_write_status<S: Store>(
    _s: &Services<S>,
    _c: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::invalid("not yet"))
}
pub async fn read<S: Store>(
    _s: &Services<S>,
    _c: &CallContext,
    _request: Bytes,
    _out: &mut impl Outgoing,
) -> Result<(), Status> {
    Err(Status::invalid("not yet"))
}
pub async fn write<S: Store>(
    _s: &Services<S>,
    _c: &CallContext,
    _incoming: &mut impl Incoming,
) -> Result<Reply, Status> {
    Err(Status::invalid("not yet"))
}
