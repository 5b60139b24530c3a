//! One line for each call (`--access_log_level all`).

use std::time::Instant;

use crate::rt::time;
use crate::service::Code;

/// What will be logged about a call when it ends. Dropping it writes the line, however the call ended.
pub struct AccessLine {
    /// The path, or `unknown`.
    pub method: &'static str,
    /// The `resource_name` of a ByteStream call; else empty.
    pub resource: String,
    /// Body bytes in and out.
    pub received: u64,
    pub sent: u64,
    /// `None`: the client cancelled or vanished.
    pub code: Option<Code>,
    started: Instant,
}

impl AccessLine {
    pub fn new(method: &'static str) -> Self {
        Self { method, resource: String::new(), received: 0, sent: 0, code: None, started: time::now() }
    }
}

impl Drop for AccessLine {
    fn drop(&mut self) {
        let Self { method, resource, received, sent, code, started } = self;
        let ms = started.elapsed().as_secs_f64() * 1e3;
        match code {
            Some(code) => {
                tracing::info!(target: "access", "{method} {resource} {code:?} in={received} out={sent} {ms:.3}ms")
            }
            None => tracing::info!(target: "access", "{method} {resource} cut in={received} out={sent} {ms:.3}ms"),
        }
    }
}
