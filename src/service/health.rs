//! `grpc.health.v1.Health`.

use bytes::Bytes;

use super::{CallContext, Code, Outgoing, Reply, Services, Status};
use crate::rt::local::{Event, Local};
use crate::store::Store;

/// Whether this core serves. Clones share the value; changes wake every `Watch` of this core.
#[derive(Clone)]
pub struct Health {
    serving: Local<bool>,
    changed: Event,
}

impl Health {
    pub fn new(serving: bool) -> Self {
        Self { serving: Local::new(serving), changed: Event::default() }
    }

    /// Sets the answer from now on.
    pub fn set(&self, serving: bool) {
        self.serving.with(|now| *now = serving);
        self.changed.notify();
    }

    /// The answer now.
    pub fn is_serving(&self) -> bool {
        self.serving.with(|now| *now)
    }
}

/// `Check`.
pub async fn check<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}

/// `List`.
pub async fn list<S: Store>(_services: &Services<S>, _context: &CallContext, _request: Bytes) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}

/// `Watch`, server-streaming: never ends by itself; it ends when `out` says so or when it is dropped.
pub async fn watch<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
    _out: &mut impl Outgoing,
) -> Result<(), Status> {
    Err(Status::new(Code::Unimplemented, "not yet"))
}
