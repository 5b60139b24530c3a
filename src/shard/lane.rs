//! The ways from one core to the others, one bounded queue into each.

use super::protocol::{Asked, Request};
use crate::metrics::Counter;
use crate::pure::scope::Scope;
use crate::rt::channel::{self, Reply, ReplyTo, Sender};
use crate::rt::local::{Event, Local};
use crate::store::StoreError;

/// The way to one other core. Who finds the queue full waits in line for the one sender.
///
/// Why not a clone of the sender for each request: every clone adds a place to the queue, which would then have no bound.
pub(super) struct Lane {
    /// `None` while somebody waits for room with it, and in the lane of this core, which nobody takes.
    sender: Local<Option<Sender<Asked>>>,
    returned: Event,
    /// Requests sent.
    pub posted: Counter,
}

impl Lane {
    pub fn new(sender: Option<Sender<Asked>>) -> Self {
        Self { sender: Local::new(sender), returned: Event::default(), posted: Counter::default() }
    }

    /// Sends a request and waits for its answer.
    pub async fn ask<T: Send>(
        &self,
        scope: &Scope,
        request: impl FnOnce(ReplyTo<Result<T, StoreError>>) -> Request,
    ) -> Result<T, StoreError> {
        self.post(scope, request).await?.recv().await.map_err(|_| StoreError::Stopping)?
    }

    /// Sends a request and returns where its answer will come.
    pub async fn post<T: Send>(
        &self,
        scope: &Scope,
        request: impl FnOnce(ReplyTo<T>) -> Request,
    ) -> Result<Reply<T>, StoreError> {
        let (reply_to, reply) = channel::reply();
        let request = Asked { scope: scope.clone(), request: request(reply_to) };
        let refused = self.sender.with(|sender| match sender {
            Some(sender) => sender.try_send(request).err(),
            None => Some(request),
        });
        if let Some(request) = refused {
            self.wait_and_send(request).await?;
        }
        self.posted.count();
        Ok(reply)
    }

    /// Sends a message that has no answer, unless the queue is full or the other core is gone.
    pub fn try_send(&self, request: Request) -> Result<(), Unsent> {
        let request = Asked { scope: Scope::default(), request };
        let refused = self.sender.with(|sender| match sender {
            Some(sender) => sender.try_send(request).map_err(|_| sender.is_closed()),
            None => Err(false),
        });
        refused.map(|()| self.posted.count()).map_err(|is_gone| Unsent { is_gone })
    }

    #[cold]
    async fn wait_and_send(&self, request: Asked) -> Result<(), StoreError> {
        let mut turn = loop {
            let returned = self.returned.wait();
            match self.sender.with(Option::take) {
                Some(sender) => break Turn { lane: self, sender: Some(sender) },
                None => returned.await,
            }
        };
        let sender = turn.sender.as_mut().expect("taken only by drop");
        sender.send(request).await.map_err(|_| StoreError::Stopping)
    }
}

/// Holds a lane's sender; gives it back when dropped, sent or not.
struct Turn<'a> {
    lane: &'a Lane,
    sender: Option<Sender<Asked>>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.lane.sender.with(|sender| *sender = self.sender.take());
        self.lane.returned.notify();
    }
}

/// A message was not sent.
pub(super) struct Unsent {
    /// The other core has ended; else its queue is full.
    pub is_gone: bool,
}
