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
        let refused = self.sender.with(|sender| match sender {
            Some(sender) => sender.try_send(message).err(),
            None => Some(message),
        });
        if let Some(message) = refused {
            self.wait_and_send(message).await?;
        }
        self.sent.set(self.sent.get() + 1);
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
        turn.sender.as_mut().expect("taken only by drop").send(message).await
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
