//! Sockets, HTTP/1.1, HTTP/2 and gRPC framing, in the order in which the bytes travel.

pub mod accept;
pub mod account;
pub mod body;
pub mod gather;
pub mod grpc;
pub mod http1;
pub mod http2;
pub mod memory;
pub mod metadata;
pub mod methods;
pub mod payload;
pub mod responder;
pub mod server;

pub use server::{Server, Settings};

#[cfg(test)]
mod tests;
