//! Sockets, HTTP/2 and gRPC framing, in the order in which the bytes travel.

pub mod accept;
pub mod access_log;
pub mod body;
pub mod buffered;
pub mod deadline;
pub mod grpc;
pub mod http2;
pub mod metadata;
pub mod payload;
pub mod server;

pub use server::{Server, Settings};
