//! S3-compatible stores behind the cache: their clients, their breakers, and what is still to be uploaded to them.
//!
//! Every core has a client for every backend. What exists once for a backend lives on the core that owns it (its number
//! modulo the cores): the breaker, the credentials' keeper, the queue of uploads. The cores talk by notes (`mesh`).

mod counts;
pub mod credentials;
pub mod http;
pub mod ledger;
pub mod mesh;
mod owner;
mod percore;
pub mod s3;
pub mod settings;
pub mod tls;

pub use owner::Owner;
pub use percore::{Backend, Backends, OwnerPort, ReadBody, Records};

/// How an upload ended, as the metric counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum UploadEnd {
    Created,
    AlreadyExists,
    /// The record is not in the cache any more.
    Lost,
    AccessDenied,
    Failed,
    BreakerOpen,
    Throttled,
    Timeout,
}

impl UploadEnd {
    /// The labels `status` and `reason` of `bazel_remote_s3_upload_outcomes_total`.
    pub fn labels(self) -> (&'static str, &'static str) {
        match self {
            Self::Created => ("created", ""),
            Self::AlreadyExists => ("already_exists", "precondition_failed"),
            Self::Lost => ("error", "evicted"),
            Self::AccessDenied => ("error", "access_denied"),
            Self::Failed => ("error", "s3_put_failed"),
            Self::BreakerOpen => ("error", "breaker_open"),
            Self::Throttled => ("error", "throttled"),
            Self::Timeout => ("error", "timeout"),
        }
    }

    /// Whether there is nothing more to be done.
    pub fn is_final(self) -> bool {
        match self {
            Self::Created | Self::AlreadyExists | Self::Lost | Self::AccessDenied => true,
            Self::Failed | Self::BreakerOpen | Self::Throttled | Self::Timeout => false,
        }
    }

    /// All of them, in the order of their declaration.
    pub const ALL: [Self; 8] = [
        Self::Created,
        Self::AlreadyExists,
        Self::Lost,
        Self::AccessDenied,
        Self::Failed,
        Self::BreakerOpen,
        Self::Throttled,
        Self::Timeout,
    ];
}
