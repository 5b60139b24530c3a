//! What one core counts of HTTP requests: bazel-remote's `http_*` metrics.

use std::cell::Cell;
use std::collections::BTreeMap;

use http::{Method, StatusCode};

use crate::metrics::{Counter, Histogram, Metric, Snapshot, TimeBounds};
use crate::rt::local::Local;

/// Who answers: the label `handler`. Source: bazel-remote's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Handler {
    Get,
    Head,
    Put,
    /// Purges.
    Purge,
    Metrics,
    Status,
    /// The page for people, and what it shows.
    Page,
    /// A path that nobody answers for.
    None,
}

impl Handler {
    const ALL: [Self; 8] =
        [Self::Get, Self::Head, Self::Put, Self::Purge, Self::Metrics, Self::Status, Self::Page, Self::None];

    fn label(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Head => "HEAD",
            Self::Put => "PUT",
            Self::Purge => "purge",
            Self::Metrics => "metrics",
            Self::Status => "status",
            Self::Page => "page",
            Self::None => "none",
        }
    }
}

/// The label `method`: those that are served, and one name for whatever else clients think of.
pub fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::PUT => "PUT",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        _ => "other",
    }
}

/// The counts of HTTP connections and requests on this core.
pub struct HttpCounters {
    /// Connections that are open now.
    pub connections: Cell<u64>,
    /// Connections that were ended for breaking the protocol's rules or our limits.
    pub failed: Counter,
    pub received: Counter,
    pub sent: Counter,
    inflight: [Cell<u64>; Handler::ALL.len()],
    /// Requests for blobs that have ended.
    asked_ended: Counter,
    ended: Local<BTreeMap<(Handler, &'static str, u16), Ended>>,
    bounds: TimeBounds,
}

/// Requests of one kind that have been answered.
struct Ended {
    time: Histogram,
    size: Histogram,
}

impl HttpCounters {
    pub fn new(bounds: &TimeBounds) -> Self {
        Self {
            connections: Cell::default(),
            failed: Counter::default(),
            received: Counter::default(),
            sent: Counter::default(),
            inflight: Default::default(),
            asked_ended: Counter::default(),
            ended: Local::new(BTreeMap::new()),
            bounds: bounds.clone(),
        }
    }

    pub fn inflight(&self, handler: Handler) -> &Cell<u64> {
        &self.inflight[handler as usize]
    }

    /// A request has been answered, or cut off.
    pub fn ended(
        &self,
        handler: Handler,
        method: &'static str,
        code: StatusCode,
        time: std::time::Duration,
        sent: u64,
    ) {
        if matches!(handler, Handler::Get | Handler::Head | Handler::Put) {
            self.asked_ended.count();
        }
        self.ended.with(|ended| {
            let of = ended
                .entry((handler, method, code.as_u16()))
                .or_insert_with(|| Ended { time: Histogram::of_handling(&self.bounds), size: Histogram::of_sizes() });
            of.time.observe_time(time);
            of.size.observe_bytes(sent);
        });
    }

    /// Requests for blobs that have begun so far, and how many run now.
    pub fn asked(&self) -> (u64, u64) {
        let open = [Handler::Get, Handler::Head, Handler::Put].map(|handler| self.inflight(handler).get()).iter().sum();
        (self.asked_ended.get() + open, open)
    }

    pub fn report(&self, core: usize, into: &mut Snapshot) {
        into.add_labels(Metric::Connections, vec![core.to_string().into(), "http".into()], self.connections.get());
        into.add_for(Metric::ConnectionsFailed, ["http"], &self.failed);
        into.add_for(Metric::Received, ["http"], &self.received);
        into.add_for(Metric::Sent, ["http"], &self.sent);
        for handler in Handler::ALL {
            into.add_for(Metric::HttpInflight, [handler.label(), ""], self.inflight(handler).get());
        }
        self.ended.with(|ended| {
            for ((handler, method, code), of) in ended {
                let labels = vec![code.to_string().into(), handler.label().into(), (*method).into(), "".into()];
                into.add_histogram(Metric::HttpTime, labels.clone(), &of.time);
                into.add_histogram(Metric::HttpSize, labels, &of.size);
            }
        });
    }
}
