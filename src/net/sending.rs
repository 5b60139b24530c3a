//! What a connection is charged with once it sends more than a little at a time.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use crate::budget::{Apart, Purse, Rank};
use crate::limits;
use crate::rt::time::{self, Sleep};

/// Room for what a protocol gathers of what one connection sends until it is whole.
///
/// Why to the end of the connection once it is taken: the protocol keeps its buffer as long as it once had to be.
pub struct Sending {
    purse: Purse,
    room: Option<Apart>,
    wait: Option<Sleep>,
    waits_since: Option<Instant>,
}

impl Sending {
    pub fn new(purse: Purse) -> Self {
        Self { purse, room: None, wait: None, waits_since: None }
    }

    pub fn purse(&self) -> &Purse {
        &self.purse
    }

    /// Takes the room if there is some, and says whether it is held.
    pub fn take(&mut self) -> bool {
        let room = self.room.take().or_else(|| self.purse.apart_for(limits::SENDING_HELD_LEN, Rank::Open));
        self.room = room;
        self.room.is_some()
    }

    /// Waits for the room.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while !self.take() {
            self.waits_since.get_or_insert_with(time::now);
            let look = || time::sleep(Duration::from_millis(limits::MEMORY_WATCH_MS));
            ready!(Pin::new(self.wait.get_or_insert_with(look)).poll(context));
            self.wait = None;
        }
        self.rest();
        Poll::Ready(())
    }

    /// Waits no more.
    pub fn rest(&mut self) {
        (self.wait, self.waits_since) = (None, None);
    }

    /// It has waited for as long as a request may.
    pub fn is_overdue(&self, now: Instant) -> bool {
        let patience = Duration::from_millis(limits::REQUEST_WAIT_MS);
        self.waits_since.is_some_and(|since| now.saturating_duration_since(since) >= patience)
    }

    pub fn is_held(&self) -> bool {
        self.room.is_some()
    }

    /// Gives the room back: it is charged otherwise.
    pub fn give_back(&mut self) {
        self.room = None;
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;
    use crate::rt::cores::block_on;

    /// Goal: who finds no room waits for it, not without end, takes it once, and gives it back at the end. Method: a purse with room
    /// for one of two.
    #[test]
    fn waits_for_room() {
        block_on(async {
            let purse = Purse::alone(2 * limits::SENDING_HELD_LEN);
            let [mut one, mut two] = [(); 2].map(|()| Sending::new(purse.clone()));
            assert!(one.take() && one.take() && !two.take() && !two.is_held());
            assert_eq!(purse.apart(), limits::SENDING_HELD_LEN);
            assert!(two.poll(&mut Context::from_waker(Waker::noop())).is_pending());
            let later = time::now() + Duration::from_millis(limits::REQUEST_WAIT_MS);
            assert!(!two.is_overdue(time::now()) && two.is_overdue(later));
            let waits = std::future::poll_fn(|context| two.poll(context));
            crate::rt::spawn(async move {
                time::yield_once().await;
                drop(one);
            });
            waits.await;
            assert!(two.is_held() && !two.is_overdue(later));
            two.give_back();
            assert_eq!(purse.apart(), 0);
        });
    }
}
