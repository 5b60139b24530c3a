//! Sockets, HTTP/2 and gRPC framing.

pub mod accept;
pub mod grpc;
pub mod http2;
