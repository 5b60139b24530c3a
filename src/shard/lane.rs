//! Requests on their way to another core.

use super::protocol::{Asked, Request};
use crate::pure::scope::Scope;
use crate::rt::channel::{self, Reply, ReplyTo};
use crate::rt::lane::{self, Unsent};
use crate::store::StoreError;

/// The way to one other core.
pub(super) type Lane = lane::Lane<Asked>;

impl Lane {
    /// Sends a request and waits for its answer.
    pub(super) async fn ask<T: Send>(
        &self,
        scope: &Scope,
        request: impl FnOnce(ReplyTo<Result<T, StoreError>>) -> Request,
    ) -> Result<T, StoreError> {
        self.post(scope, request).await?.recv().await.map_err(|_| StoreError::Unanswered)?
    }

    /// Sends a request and returns where its answer will come, unless a panic ends the work on it.
    pub(super) async fn post<T: Send>(
        &self,
        scope: &Scope,
        request: impl FnOnce(ReplyTo<T>) -> Request,
    ) -> Result<Reply<T>, StoreError> {
        let (reply_to, reply) = channel::reply();
        let asked = Asked { scope: scope.clone(), request: request(reply_to) };
        self.send(asked).await.map_err(|_| StoreError::Stopping)?;
        Ok(reply)
    }

    /// Sends a message that has no answer, if there is room now.
    pub(super) fn try_tell(&self, request: Request) -> Result<(), Unsent<Asked>> {
        self.try_send(Asked { scope: Scope::default(), request })
    }
}
