//! `build.bazel.remote.execution.v2.ContentAddressableStorage`.

use bytes::Bytes;

use super::{CallContext, Code, Outgoing, Reply, Services, Status};
use crate::store::Store;

pub async fn find_missing_blobs<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}

pub async fn batch_update_blobs<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}

pub async fn batch_read_blobs<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}

pub async fn split_blob<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}

pub async fn splice_blob<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}

/// Server-streaming.
pub async fn get_tree<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
    _out: &mut impl Outgoing,
) -> Result<(), Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}
