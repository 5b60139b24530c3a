//! What the tests of handlers share.

use std::rc::Rc;

use prost::Message;

use super::health::Health;
use super::{Options, Outgoing, Reply, Services, Status};
pub use crate::pure::digest::tests::wire;
use crate::store::fake::FakeStore;

/// Services on a fake store that is empty.
pub fn services() -> (FakeStore, Services<FakeStore>) {
    let store = FakeStore::default();
    (store.clone(), Services::new(store, Rc::new(Options::default()), Health::new(true)))
}

/// Collects the messages of a stream; after `room` of them the client is gone.
pub struct Collected {
    pub messages: Vec<Reply>,
    pub room: usize,
    /// What the handler last asked to hold, in bytes.
    pub held: usize,
    /// Memory is scarce, and the client has room for so many bytes at a time.
    pub scarce_room: Option<usize>,
}

impl Default for Collected {
    fn default() -> Self {
        Self { messages: Vec::new(), room: usize::MAX, held: 0, scarce_room: None }
    }
}

impl Collected {
    pub fn decode<M: Message + Default>(&self) -> Vec<M> {
        self.messages.iter().map(|pieces| M::decode(&pieces.concat()[..]).expect("a message")).collect()
    }
}

impl Outgoing for Collected {
    async fn send(&mut self, message: Reply) -> Result<(), Status> {
        if self.messages.len() == self.room {
            return Err(Status::new(super::Code::Cancelled, "the client went away"));
        }
        self.messages.push(message);
        Ok(())
    }

    async fn room(&mut self) -> Result<Option<usize>, Status> {
        Ok(Some(self.scarce_room.unwrap_or(usize::MAX)))
    }

    fn is_scarce(&self) -> bool {
        self.scarce_room.is_some()
    }

    fn release(&mut self) {
        self.held = 0;
    }

    async fn hold(&mut self, len: usize) -> Result<(), Status> {
        self.held = len;
        Ok(())
    }
}
