//! Bounded channels and one-shot replies whose two ends may live on different cores.
//!
//! A wake from another core is an event to the receiving reactor, and `pulse` covers the case in which the executor
//! parks all the same; nothing is to be added by who receives.

use std::task::{Context, Poll};

use futures_channel::{mpsc, oneshot};
use futures_util::{SinkExt, StreamExt};

/// The other end is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the other end of the channel is gone")]
pub struct Closed;

/// The sending end of a bounded channel.
pub struct Sender<T>(mpsc::Sender<T>);
/// The receiving end of a bounded channel.
pub struct Receiver<T>(mpsc::Receiver<T>);

/// A channel that holds at most `bound` messages and one more for each sender.
/// Limit: so clone a sender for each core or task that sends, never for each message.
pub fn bounded<T: Send>(bound: usize) -> (Sender<T>, Receiver<T>) {
    let (sender, receiver) = mpsc::channel(bound);
    (Sender(sender), Receiver(receiver))
}

impl<T> Sender<T> {
    /// Waits for room. Cancel-safe in that a message is either sent or dropped.
    pub async fn send(&mut self, message: T) -> Result<(), Closed> {
        // Why not `SinkExt::send`: that waits, after a message which filled the channel, until there is room again.
        self.0.feed(message).await.map_err(|_| Closed)
    }

    /// Waits for room, which is there until the next message is sent.
    pub async fn room(&mut self) -> Result<(), Closed> {
        std::future::poll_fn(|context| self.0.poll_ready(context)).await.map_err(|_| Closed)
    }

    /// Sends when there is room, else gives the message back.
    pub fn try_send(&mut self, message: T) -> Result<(), T> {
        self.0.try_send(message).map_err(|refused| refused.into_inner())
    }

    /// True once the receiver is gone.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Receiver<T> {
    /// The next message; `None` when every sender is gone.
    pub async fn recv(&mut self) -> Option<T> {
        self.0.next().await
    }

    /// The same, for who is polled.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<T>> {
        self.0.poll_next_unpin(context)
    }
}

/// The side that answers.
pub struct ReplyTo<T>(oneshot::Sender<T>);
/// The side that waits for the answer.
pub struct Reply<T>(oneshot::Receiver<T>);

/// A reply slot for one request.
pub fn reply<T: Send>() -> (ReplyTo<T>, Reply<T>) {
    let (sender, receiver) = oneshot::channel();
    (ReplyTo(sender), Reply(receiver))
}

impl<T> ReplyTo<T> {
    /// Answers. A requester that has gone away is no error.
    pub fn send(self, answer: T) {
        let _ = self.0.send(answer);
    }

    /// Ends when the requester has gone away.
    pub async fn abandoned(&mut self) {
        self.0.cancellation().await;
    }

    /// Answers, or gives the answer back when the requester has gone away.
    pub fn offer(self, answer: T) -> Result<(), T> {
        self.0.send(answer)
    }

    /// True once the requester has gone away.
    pub fn is_abandoned(&self) -> bool {
        self.0.is_canceled()
    }
}

impl<T> Reply<T> {
    /// The answer; `Closed` when the answering side was dropped without one.
    pub async fn recv(self) -> Result<T, Closed> {
        // The answer is due: a core that waits for another must not oversleep it.
        let _busy = super::busy();
        self.0.await.map_err(|_| Closed)
    }

    /// The same for who may withdraw before the answer comes. Not to be called again after it has.
    pub async fn ready(&mut self) -> Result<T, Closed> {
        let _busy = super::busy();
        (&mut self.0).await.map_err(|_| Closed)
    }

    /// Goes away; the answer, if it was on its way already.
    pub fn withdraw(mut self) -> Option<T> {
        self.0.close();
        self.0.try_recv().ok().flatten()
    }
}
