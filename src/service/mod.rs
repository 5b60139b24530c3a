//! One file for each gRPC service, and one for the HTTP cache. Handlers know REAPI and the `Store`, and nothing of sockets or HTTP/2.
//!
//! A unary handler takes the request message as `Bytes` and returns the reply message in pieces that follow each
//! other on the wire, so that payload is never copied through a protobuf encoder. A server-streaming handler hands its
//! messages to an `Outgoing`, which makes it wait while the client does not read.

pub mod action_cache;
pub mod action_json;
pub mod byte_stream;
pub mod capabilities;
pub mod cas;
pub mod health;
pub mod http_cache;
mod inline;
pub mod purge;
pub mod reflection;
pub mod refusal;
pub mod reply;
pub mod shed;
pub mod status;
#[cfg(test)]
mod testing;
pub mod tree;

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

use bytes::{Buf, Bytes};
use prost::Message;

pub use status::{Code, Status};

use crate::pure::digest::Digest;
use crate::pure::roles::Role;
use crate::pure::scope::Scope;
use crate::store::complete::Complete;
use crate::store::empty::Empty;
use crate::store::measured::Measured;
use crate::store::{Memory, Store};
use crate::wire::reapi;
use health::Health;
use shed::{ShedLog, ShedStatus};

/// A reply message: its pieces in wire order.
pub type Reply = Vec<Bytes>;

/// Where a server-streaming handler sends its messages.
#[allow(async_fn_in_trait)] // Why: futures stay on their core; nobody asks for Send.
pub trait Outgoing {
    /// Hands over one whole message, after waiting for room. An error means that the call is over
    /// (the client went away): the handler passes it up and stops.
    async fn send(&mut self, message: Reply) -> Result<(), Status>;

    /// Waits until there is room for a message: to be called before the next costly one is made, so that a client
    /// which does not read costs what it has been sent and nothing more.
    async fn ready(&mut self) -> Result<(), Status> {
        Ok(())
    }

    /// The same, and says for how many bytes. `None`: the client takes nothing while memory is scarce, so that what can be
    /// made again is to be given back (`release`) until `ready` returns.
    async fn room(&mut self) -> Result<Option<usize>, Status> {
        self.ready().await.map(|()| Some(usize::MAX))
    }

    /// True when memory for replies is scarce: then what can be made in parts is to be made so, each when there is room for it.
    fn is_scarce(&self) -> bool {
        false
    }

    /// Gives back what was taken by `hold`, but for what has been sent and has not gone out.
    fn release(&mut self) {}

    /// Takes memory for `len` bytes of reply that the handler is about to make or read, after waiting for it: so that
    /// clients which do not read make the server hold no more than its limit. The call has it until its messages have
    /// gone out; a larger `len` later takes the place of this one.
    async fn hold(&mut self, _len: usize) -> Result<(), Status> {
        Ok(())
    }

    /// Names what the call is about, for the access log.
    fn note_resource(&mut self, _name: fmt::Arguments<'_>) {}
}

/// What a reply has taken, as the store asks for it.
pub(crate) struct ReplyMemory<'a, O>(pub &'a mut O);

impl<O: Outgoing> Memory<Status> for ReplyMemory<'_, O> {
    async fn hold(&mut self, len: usize) -> Result<(), Status> {
        self.0.hold(len).await
    }

    fn release(&mut self) {
        self.0.release();
    }
}

/// What the services of one core share.
pub struct Services<S> {
    /// Every store is wrapped, so that the empty blob is always present and an action whose blobs are gone is a miss,
    /// whichever door asks.
    pub store: Measured<Complete<Empty<S>>>,
    pub options: Rc<Options>,
    pub health: Health,
}

impl<S: Store> Services<S> {
    pub fn new(store: S, options: Rc<Options>, health: Health) -> Self {
        let store = Complete::new(Empty(store));
        Self { store: Measured::new(store), options, health }
    }

    /// The same services, for the blobs of `scope`.
    pub fn scoped(&self, scope: &Scope) -> Self {
        Self { store: self.store.scoped(scope), options: self.options.clone(), health: self.health.clone() }
    }
}

/// The settings that the services look at. Those in cells can change.
#[derive(Debug, Clone)]
pub struct Options {
    /// AC keys depend on the instance name (`--enable_ac_key_instance_mangling`).
    pub mangle_action_keys: bool,
    /// An AC hit over gRPC needs all of its blobs (off: `--disable_grpc_ac_deps_check`).
    pub check_actions: bool,
    /// `/ac/` over HTTP takes and gives ActionResults only (off: `--disable_http_ac_validation`).
    pub check_http_actions: bool,
    /// The largest blob that is accepted, in raw bytes: advertised as `max_cas_blob_size_bytes`.
    pub max_blob_size: Cell<u64>,
    /// One log line for each request (`--access_log_level all`).
    pub access_log: Cell<bool>,
    /// What a write is told that was not let in (`--write_shed_status`).
    pub shed_status: Cell<ShedStatus>,
    /// Where such writes are named.
    pub shed_log: ShedLog,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mangle_action_keys: false,
            check_actions: true,
            check_http_actions: true,
            max_blob_size: Cell::new(i64::MAX as u64),
            access_log: Cell::new(false),
            shed_status: Cell::new(ShedStatus::Auto),
            shed_log: ShedLog::default(),
        }
    }
}

/// What a handler knows of its call besides the message.
#[derive(Debug, Clone, Default)]
pub struct CallContext {
    /// `RequestMetadata.tool_details.tool_name`, lower case; empty when not sent.
    pub tool_name: String,
    /// `RequestMetadata.tool_details.tool_version`.
    pub tool_version: String,
    /// The `user-agent` header; empty when not sent.
    pub user_agent: String,
    /// The caller may read only: it sees `update_enabled = false`, and its writes are refused.
    pub read_only: bool,
}

impl CallContext {
    /// Of a caller who has that role.
    pub fn of(role: Role) -> Self {
        Self { read_only: role < Role::Write, ..Self::default() }
    }

    /// PERMISSION_DENIED for a caller that may only read.
    pub fn require_write(&self) -> Result<(), Status> {
        if self.read_only {
            return Err(Status::new(Code::PermissionDenied, "this client may read from the cache, not write to it"));
        }
        Ok(())
    }
}

/// The full names of the services here.
pub const SERVICES: [&str; 7] = [
    "build.bazel.remote.execution.v2.ActionCache",
    "build.bazel.remote.execution.v2.Capabilities",
    "build.bazel.remote.execution.v2.ContentAddressableStorage",
    "google.bytestream.ByteStream",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
];

/// Reads a request.
fn decode<M: Message + Default>(request: impl Buf) -> Result<M, Status> {
    M::decode(request).map_err(|error| Status::invalid(format!("the request is not a valid message: {error}")))
}

/// Every digest of a request is of one function, which must be the one that is announced.
fn check_digest_function(value: i32) -> Result<(), Status> {
    use reapi::digest_function::Value;
    match Value::try_from(value) {
        // Why: clients older than API 2.5 leave it out, and the length of the hash tells.
        Ok(Value::Unknown | Value::Sha256) => Ok(()),
        Ok(other) => {
            Err(Status::invalid(format!("digest_function must be SHA256 or unset, got {}", other.as_str_name())))
        }
        Err(_) => Err(Status::invalid(format!("digest_function must be SHA256 or unset, got {value}"))),
    }
}

/// Reads a digest that must be there; `field` names it in the error.
fn parse_digest(digest: Option<&reapi::Digest>, field: &str) -> Result<Digest, Status> {
    let digest = digest.ok_or_else(|| Status::invalid(format!("{field}: must be set")))?;
    Digest::parse(digest.hash.as_bytes(), digest.size_bytes)
        .map_err(|error| Status::invalid(format!("{field}: {error}")))
}
