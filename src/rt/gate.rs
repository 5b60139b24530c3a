//! A gate counts the tasks that entered it, and can be closed and waited for.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::task::{Poll, Waker};

#[derive(Default)]
struct State {
    inside: usize,
    closed: bool,
    waiters: Vec<Waker>,
}

/// A core-local gate. Clones share the count.
#[derive(Clone, Default)]
pub struct Gate(Rc<RefCell<State>>);

/// Proof of having entered a gate; leaves it when dropped.
pub struct Pass(Gate);

impl Gate {
    /// Enters, unless the gate is closed.
    pub fn enter(&self) -> Option<Pass> {
        let mut state = self.0.borrow_mut();
        if state.closed {
            return None;
        }
        state.inside += 1;
        Some(Pass(self.clone()))
    }

    /// Runs `future` on this core inside the gate. False, and dropped, when the gate is closed.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) -> bool {
        let Some(pass) = self.enter() else { return false };
        super::spawn(async move {
            future.await;
            drop(pass);
        });
        true
    }

    /// Lets nobody in from now on.
    pub fn close(&self) {
        self.0.borrow_mut().closed = true;
    }

    /// True after `close`.
    pub fn is_closed(&self) -> bool {
        self.0.borrow().closed
    }

    /// How many are inside.
    pub fn len(&self) -> usize {
        self.0.borrow().inside
    }

    /// True when nobody is inside.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits until nobody is inside.
    pub async fn wait_empty(&self) {
        std::future::poll_fn(|context| {
            let mut state = self.0.borrow_mut();
            if state.inside == 0 {
                return Poll::Ready(());
            }
            if !state.waiters.iter().any(|waker| waker.will_wake(context.waker())) {
                state.waiters.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let waiters = {
            let mut state = self.0.0.borrow_mut();
            state.inside -= 1;
            if state.inside > 0 {
                return;
            }
            std::mem::take(&mut state.waiters)
        };
        waiters.into_iter().for_each(Waker::wake);
    }
}
