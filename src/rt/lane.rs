//! The way to one other core, shared by the tasks of this one: a bounded channel's single sender, for which they wait in
//! line.
//!
//! Why not a clone of the sender for each task: every clone adds a place to the channel, which would then have no bound.

use std::cell::Cell;

use super::channel::{Closed, Sender};
use super::local::{Event, Local};

/// A lane. Core-local.
pub struct Lane<T> {
    /// `None` while somebody waits for room with it.
    sender: Local<Option<Sender<T>>>,
    returned: Event,
    sent: Cell<u64>,
}

/// A message that was not sent.
pub struct Unsent<T> {
    pub message: T,
    /// The other core has ended; else its channel is full, or somebody waits in front.
    pub is_gone: bool,
}

impl<T: Send> Lane<T> {
    pub fn new(sender: Sender<T>) -> Self {
        Self { sender: Local::new(Some(sender)), returned: Event::default(), sent: Cell::new(0) }
    }

    /// Messages sent so far.
    pub fn sent(&self) -> u64 {
        self.sent.get()
    }

    /// Sends, waiting for room where there is none.
    pub async fn send(&self, message: T) -> Result<(), Closed> {
        match self.try_send(message) {
            Ok(()) => Ok(()),
            Err(Unsent { message, .. }) => self.wait_and_send(message).await,
        }
    }

    /// Sends if there is room now.
    pub fn try_send(&self, message: T) -> Result<(), Unsent<T>> {
        self.sender.with(|sender| match sender {
            Some(sender) => sender.try_send(message).map_err(|message| Unsent { message, is_gone: sender.is_closed() }),
            None => Err(Unsent { message, is_gone: false }),
        })?;
        self.count();
        Ok(())
    }

    #[cold]
    async fn wait_and_send(&self, message: T) -> Result<(), Closed> {
        let mut turn = loop {
            let returned = self.returned.wait();
            match self.sender.with(Option::take) {
                Some(sender) => break Turn { lane: self, sender: Some(sender) },
                None => returned.await,
            }
        };
        turn.sender.as_mut().expect("taken only by drop").send(message).await?;
        self.count();
        Ok(())
    }

    fn count(&self) {
        self.sent.set(self.sent.get() + 1);
    }
}

/// Holds a lane's sender; gives it back when dropped, sent or not.
struct Turn<'a, T> {
    lane: &'a Lane<T>,
    sender: Option<Sender<T>>,
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        self.lane.sender.with(|sender| *sender = self.sender.take());
        self.lane.returned.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::channel;
    use crate::rt::cores::block_on;
    use crate::rt::{spawn, time};

    /// Goal: however many send, the channel keeps its bound, all that was sent arrives, and who gives up while waiting with
    /// the sender hands it on. Method: ten tasks, a channel of one, a receiver that begins late; three of the tasks are dropped.
    #[test]
    fn all_get_their_turn() {
        block_on(async {
            let (sender, mut receiver) = channel::bounded(0);
            let lane = std::rc::Rc::new(Lane::new(sender));
            for number in 0..10 {
                let lane = lane.clone();
                spawn(async move {
                    let sending = lane.send(number);
                    if number % 4 == 1 {
                        let _ = time::race(sending, time::yield_once()).await;
                    } else {
                        sending.await.expect("the receiver is there");
                    }
                });
            }
            for _ in 0..4 {
                time::yield_once().await;
            }
            assert!(lane.try_send(99).is_err_and(|unsent| !unsent.is_gone && unsent.message == 99));
            assert_eq!(lane.sent(), 1, "more than there is room for");
            let mut got = Vec::new();
            while got.len() < 7 {
                got.push(receiver.recv().await);
            }
            got.sort_unstable();
            assert_eq!(got, [0, 2, 3, 4, 6, 7, 8].map(Some));
            drop(receiver);
            assert_eq!(lane.send(1).await, Err(Closed));
            assert!(lane.try_send(1).is_err_and(|unsent| unsent.is_gone));
        });
    }
}
