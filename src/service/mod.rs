//! One file for each gRPC service. Handlers know REAPI and the `Store`, and nothing of sockets or HTTP/2.
//!
//! A unary handler takes the request message as `Bytes` and returns the reply message in pieces that follow each
//! other on the wire, so that payload is never copied through a protobuf encoder.

pub mod action_cache;
pub mod byte_stream;
pub mod capabilities;
pub mod cas;
pub mod health;
pub mod reflection;
pub mod status;

use std::rc::Rc;

use bytes::Bytes;

pub use status::{Code, Status};

/// A reply message: its pieces in wire order.
pub type Reply = Vec<Bytes>;

/// What the services of one core share.
pub struct Services<S> {
    pub store: S,
    pub options: Rc<Options>,
}

/// The settings that the services look at.
#[derive(Debug, Clone)]
pub struct Options {
    /// AC keys depend on the instance name (`--enable_ac_key_instance_mangling`).
    pub mangle_action_keys: bool,
    /// The largest blob that is accepted, in raw bytes: advertised as `max_cas_blob_size_bytes`.
    pub max_blob_size: u64,
    /// One log line for each request (`--access_log_level all`).
    pub access_log: bool,
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
}
