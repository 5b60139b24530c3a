//! gRPC statuses, and the one place where store errors become statuses.

use std::collections::BTreeMap;

use prost::Message as _;

use crate::access::Denial;
use crate::store::StoreError;
use crate::wire::google::protobuf::Any;
use crate::wire::rpc;

/// gRPC status codes. Source: `google.rpc.Code`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Code {
    Ok = 0,
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

impl Code {
    pub const COUNT: usize = 17;
    pub const ALL: [Self; Self::COUNT] = [
        Self::Ok,
        Self::Cancelled,
        Self::Unknown,
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::AlreadyExists,
        Self::PermissionDenied,
        Self::ResourceExhausted,
        Self::FailedPrecondition,
        Self::Aborted,
        Self::OutOfRange,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
        Self::DataLoss,
        Self::Unauthenticated,
    ];
}

/// How a call ends when it does not end well (or, for per-item statuses, how an item ends).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code:?}: {message}")]
pub struct Status {
    pub code: Code,
    /// Names the field and the limit, for a person.
    pub message: String,
    /// For a program, where one looks for it.
    pub info: Option<ErrorInfo>,
}

/// What `google.rpc.ErrorInfo` says, with one entry of metadata, `cause`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorInfo {
    pub domain: &'static str,
    pub reason: &'static str,
    pub cause: &'static str,
}

/// `google.rpc.ErrorInfo`, as far as it is used here.
#[derive(Clone, PartialEq, prost::Message)]
struct ErrorInfoMessage {
    #[prost(string, tag = "1")]
    reason: String,
    #[prost(string, tag = "2")]
    domain: String,
    #[prost(btree_map = "string, string", tag = "3")]
    metadata: BTreeMap<String, String>,
}

impl Status {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), info: None }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NotFound, message)
    }

    /// The serialized `google.rpc.Status` with what a program looks for; `None` when there is nothing of that kind.
    ///
    /// Source: grpc-go, `status.WithDetails`, whose trailer is `grpc-status-details-bin`.
    pub fn details(&self) -> Option<Vec<u8>> {
        let ErrorInfo { domain, reason, cause } = self.info?;
        let metadata = BTreeMap::from([("cause".to_owned(), cause.to_owned())]);
        let info = ErrorInfoMessage { reason: reason.into(), domain: domain.into(), metadata };
        let type_url = "type.googleapis.com/google.rpc.ErrorInfo".to_owned();
        let details = vec![Any { type_url, value: info.encode_to_vec().into() }];
        let status = rpc::Status { code: self.code as i32, message: self.message.clone(), details };
        Some(status.encode_to_vec())
    }
}

impl From<Denial> for Status {
    fn from(denial: Denial) -> Self {
        let code = match denial {
            Denial::NoCredential | Denial::Malformed(_) | Denial::WrongPassword | Denial::WrongToken => {
                Code::Unauthenticated
            }
            Denial::Role { .. } => Code::PermissionDenied,
            // Why: every client retries it.
            Denial::Busy => Code::Unavailable,
        };
        Self::new(code, denial.text())
    }
}

impl From<StoreError> for Status {
    fn from(error: StoreError) -> Self {
        let code = match &error {
            StoreError::HashMismatch { .. }
            | StoreError::TooShort { .. }
            | StoreError::TooLong { .. }
            | StoreError::BadZstd { .. }
            | StoreError::WriteOffset { .. }
            | StoreError::BlobTooLarge { .. } => Code::InvalidArgument,
            StoreError::TakenOver => Code::Aborted,
            // Why: see `shed`, which knows the client and may say otherwise.
            StoreError::Shed { .. } => Code::FailedPrecondition,
            // Why: every client retries it, and then goes on where it stood.
            StoreError::Yielded => Code::Unavailable,
            StoreError::NoSpace { .. } | StoreError::Busy { .. } => Code::ResourceExhausted,
            // Why: to a client damaged bytes are a miss, which makes it produce the blob again.
            StoreError::Lost { .. } => Code::NotFound,
            StoreError::Disk(_) | StoreError::Unanswered | StoreError::NotPurged { .. } => Code::Internal,
            StoreError::Stopping => Code::Unavailable,
        };
        Self::new(code, error.to_string())
    }
}
