//! How an HTTP request ends when it does not end well, and the one place where store errors become HTTP statuses.

use super::{Code, Status};
use crate::store::StoreError;

/// A status, and a text for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status code. Source: RFC 9110, 15.
    pub code: u16,
    pub text: String,
    /// The client may try again after this many seconds (`Retry-After`).
    pub retry_after_s: Option<u32>,
    /// Of a range that is outside: the size of the blob (`Content-Range`).
    pub size: Option<u64>,
}

/// When a client whose request was refused for load may come back, in seconds.
const RETRY_AFTER_S: u32 = 1;

impl Refusal {
    pub fn new(code: u16, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), retry_after_s: None, size: None }
    }

    /// The range begins behind the blob's end.
    pub fn outside_of(size: u64) -> Self {
        let text = format!("the range is outside of the blob's {size} bytes");
        Self { size: Some(size), ..Self::new(416, text) }
    }

    /// Too much is going on; the same request may be good in a while.
    pub fn later(text: String) -> Self {
        Self { retry_after_s: Some(RETRY_AFTER_S), ..Self::new(503, text) }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        let text = error.to_string();
        match error {
            StoreError::HashMismatch { .. }
            | StoreError::TooShort { .. }
            | StoreError::TooLong { .. }
            | StoreError::BadZstd { .. }
            | StoreError::WriteOffset { .. } => Self::new(400, text),
            StoreError::BlobTooLarge { .. } => Self::new(413, text),
            StoreError::TakenOver => Self::new(409, text),
            StoreError::NoSpace { .. } => Self::new(507, text),
            // Why: to a client damaged bytes are a miss, which makes it produce the blob again.
            StoreError::Lost { .. } => Self::new(404, text),
            StoreError::Disk(_) | StoreError::Unanswered => Self::new(500, text),
            StoreError::NotPurged { .. } => Self::new(502, text),
            StoreError::Shed { .. } | StoreError::Yielded | StoreError::Busy { .. } | StoreError::Stopping => {
                Self::later(text)
            }
        }
    }
}

/// For what the HTTP cache shares with gRPC.
impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        let Status { code, message, info: _ } = status;
        match code {
            Code::InvalidArgument | Code::OutOfRange | Code::AlreadyExists => Self::new(400, message),
            Code::NotFound => Self::new(404, message),
            Code::Unauthenticated => Self::new(401, message),
            Code::PermissionDenied => Self::new(403, message),
            Code::Aborted | Code::Cancelled => Self::new(409, message),
            Code::Unimplemented => Self::new(501, message),
            Code::ResourceExhausted | Code::FailedPrecondition | Code::Unavailable | Code::DeadlineExceeded => {
                Self::later(message)
            }
            Code::Ok | Code::Unknown | Code::Internal | Code::DataLoss => Self::new(500, message),
        }
    }
}
