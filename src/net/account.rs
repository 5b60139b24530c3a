//! The account of a call: what came, what went, how it ended. Counted, and logged if wanted (`--access_log_level all`).

use std::fmt::{self, Write};
use std::rc::Rc;
use std::time::Instant;

use super::methods::{GrpcCounters, Method, OfMethod, label};
use crate::access::Origin;
use crate::rt::time;
use crate::service::Code;

/// One call, from its headers to its status. Dropping it counts its end and writes its line, however it ended.
pub struct Account {
    counters: Rc<GrpcCounters>,
    method: Method,
    /// Write a line.
    is_logged: bool,
    origin: Origin,
    /// The `resource_name` of a ByteStream call, the key of one about a result; else empty.
    resource: String,
    /// Bytes of messages in and out.
    received: u64,
    sent: u64,
    /// `None`: the client cancelled or vanished.
    code: Option<Code>,
    started: Instant,
}

impl Account {
    pub fn open(counters: Rc<GrpcCounters>, method: Method, is_logged: bool, origin: Origin) -> Self {
        counters.of(method).started.count();
        let started = time::now();
        Self { counters, method, is_logged, origin, resource: String::new(), received: 0, sent: 0, code: None, started }
    }

    /// A request message has begun.
    pub fn message_received(&self) {
        self.of_method().received.count();
    }

    /// Bytes of a request message.
    pub fn bytes_received(&mut self, bytes: usize) {
        self.received += bytes as u64;
        self.of_method().received_bytes.add(bytes as u64);
    }

    /// A reply message of so many bytes goes out.
    pub fn message_sent(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        self.of_method().sent.count();
        self.of_method().sent_bytes.add(bytes as u64);
    }

    /// Names what the call is about.
    pub fn note_resource(&mut self, name: fmt::Arguments<'_>) {
        if self.is_logged {
            self.resource.clear();
            // Writing to a String cannot fail.
            let _ = self.resource.write_fmt(name);
        }
    }

    /// The status that was sent.
    pub fn finish(&mut self, code: Code) {
        self.code = Some(code);
    }

    fn of_method(&self) -> &OfMethod {
        self.counters.of(self.method)
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let time = self.started.elapsed();
        self.of_method().ended(self.code.unwrap_or(Code::Cancelled), time);
        if !self.is_logged {
            return;
        }
        let Self { method, origin, resource, received, sent, code, .. } = self;
        let service = method.service().rsplit('.').next().unwrap_or_default();
        let (method, ms) = (method.name(), time.as_secs_f64() * 1e3);
        let end = code.map_or("cut", label);
        // Why a dash: the words of a line have their places.
        let resource = if resource.is_empty() { "-" } else { resource };
        tracing::info!(
            target: "access",
            "{service}.{method} {resource} {end} from={origin} in={received} out={sent} {ms:.3}ms"
        );
    }
}
