//! `build.bazel.remote.execution.v2.Capabilities`.

use bytes::Bytes;

use super::{CallContext, Code, Reply, Services, Status};
use crate::store::Store;

/// `GetCapabilities`.
pub async fn get_capabilities<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}
