//! Core-local shared state: every borrow is a closure, so there is nowhere to write `.await` inside one.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Poll, Waker};

/// A value shared by the tasks of one core.
pub struct Local<T>(Rc<RefCell<T>>);

impl<T> Local<T> {
    pub fn new(value: T) -> Self {
        Self(Rc::new(RefCell::new(value)))
    }

    /// Runs `work` with the value. Not re-entrant: `work` must not call `with` on the same value.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        work(&mut self.0.borrow_mut())
    }
}

impl<T> Clone for Local<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Wakes every task of this core that waits for a condition, which each then checks again.
#[derive(Clone, Default)]
pub struct Event(Rc<EventState>);

#[derive(Default)]
struct EventState {
    generation: Cell<u64>,
    waiters: RefCell<Vec<Waker>>,
}

impl Event {
    /// Wakes all who wait.
    pub fn notify(&self) {
        self.0.generation.set(self.0.generation.get().wrapping_add(1));
        let waiters = std::mem::take(&mut *self.0.waiters.borrow_mut());
        waiters.into_iter().for_each(Waker::wake);
    }

    /// Waits for the next `notify` after this call (the call, not the first poll).
    pub fn wait(&self) -> impl Future<Output = ()> + 'static {
        let state = self.0.clone();
        let seen = state.generation.get();
        std::future::poll_fn(move |context| {
            if state.generation.get() != seen {
                return Poll::Ready(());
            }
            let mut waiters = state.waiters.borrow_mut();
            if !waiters.iter().any(|waker| waker.will_wake(context.waker())) {
                waiters.push(context.waker().clone());
            }
            Poll::Pending
        })
    }
}
