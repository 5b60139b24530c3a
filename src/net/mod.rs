//! Sockets, HTTP/1.1, HTTP/2 and gRPC framing, in the order in which the bytes travel.

pub mod accept;
pub mod account;
pub mod bodies;
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
pub mod sending;
pub mod server;
pub mod tables;
pub mod tls;
pub mod transport;
pub mod trust;

pub use server::{Server, Settings};

use crate::pure::credential::Credential;

/// The credential of a request.
fn credential(headers: &http::HeaderMap, authority: Option<&http::uri::Authority>) -> Credential {
    let values = headers.get_all(http::header::AUTHORIZATION).iter().map(http::HeaderValue::as_bytes);
    Credential::of(values, authority.map(http::uri::Authority::as_str))
}

#[cfg(test)]
mod tests;
