//! `build.bazel.remote.execution.v2.ActionCache`.

use bytes::Bytes;

use super::{CallContext, Code, Reply, Services, Status};
use crate::store::Store;

pub async fn get_action_result<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}

pub async fn update_action_result<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}
