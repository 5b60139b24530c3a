//! ByteStream resource names.

use crate::pure::digest::Digest;
use crate::store::Encoding;

/// What a `ReadRequest.resource_name` names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadName<'a> {
    /// Empty when the name has none.
    pub instance: &'a str,
    pub encoding: Encoding,
    pub digest: Digest,
}

/// What a `WriteRequest.resource_name` (and that of QueryWriteStatus) names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteName<'a> {
    pub instance: &'a str,
    pub uuid: &'a str,
    pub encoding: Encoding,
    pub digest: Digest,
}

/// Why a name was refused. The texts follow `resource_name: ` in an INVALID_ARGUMENT.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("not yet")]
    NotYet,
}

impl<'a> ReadName<'a> {
    pub fn parse(_name: &'a str) -> Result<Self, NameError> {
        Err(NameError::NotYet)
    }
}

impl<'a> WriteName<'a> {
    pub fn parse(_name: &'a str) -> Result<Self, NameError> {
        Err(NameError::NotYet)
    }
}
