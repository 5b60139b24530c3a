//! A gate counts the tasks that entered it, and can be closed and waited for.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::local::Waiters;

#[derive(Default)]
struct State {
    inside: usize,
    closed: bool,
    waiters: Waiters,
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
        self.enter().map(|pass| super::spawn(inside(pass, future))).is_some()
    }

    /// The same as bulk work (see `rt::spawn_bulk`).
    pub fn spawn_bulk(&self, future: impl Future<Output = ()> + 'static) -> bool {
        self.enter().map(|pass| super::spawn_bulk(inside(pass, future))).is_some()
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
    pub fn wait_empty(&self) -> WaitEmpty {
        WaitEmpty { gate: self.clone(), slot: None }
    }
}

fn inside(pass: Pass, future: impl Future<Output = ()> + 'static) -> impl Future<Output = ()> + 'static {
    // Why boxed: see `spawn`.
    let future = Box::pin(future);
    async move {
        future.await;
        drop(pass);
    }
}

/// The wait for an empty gate.
pub struct WaitEmpty {
    gate: Gate,
    slot: Option<u64>,
}

impl Future for WaitEmpty {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let wait = &mut *self;
        let mut state = wait.gate.0.borrow_mut();
        if state.inside == 0 {
            return Poll::Ready(());
        }
        state.waiters.put(&mut wait.slot, context.waker());
        Poll::Pending
    }
}

impl Drop for WaitEmpty {
    fn drop(&mut self) {
        let left = self.gate.0.borrow_mut().waiters.remove(self.slot);
        drop(left); // Outside of the borrow: dropping a waker may run other drops.
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
            state.waiters.take_all()
        };
        waiters.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::cores::block_on;
    use crate::rt::time;

    /// Goal: a gate counts who is inside, lets nobody in once closed, and is waited for until the last has left.
    /// Method: three tasks that each yield a different number of times.
    #[test]
    fn closes_and_empties() {
        block_on(async {
            let gate = Gate::default();
            for turns in [1, 5, 20] {
                let entered = gate.spawn(async move {
                    for _ in 0..turns {
                        time::yield_once().await;
                    }
                });
                assert!(entered);
            }
            assert_eq!(gate.len(), 3);
            gate.close();
            assert!(!gate.spawn(async { unreachable!("the gate is closed") }));
            gate.wait_empty().await;
            assert!(gate.is_empty() && gate.is_closed());
        });
    }

    /// Goal: a panic that is caught inside leaves the gate.
    /// Method: one caught task that panics; its log line is expected.
    #[test]
    fn a_caught_panic_leaves() {
        block_on(async {
            let gate = Gate::default();
            assert!(gate.spawn(async {
                let caught = crate::rt::catch(async { panic!("on purpose") }).await;
                assert!(caught.is_err());
            }));
            gate.wait_empty().await;
        });
    }

    /// Goal: a wait that is given up leaves no waker behind.
    /// Method: poll waits once and drop them.
    #[test]
    fn waits_leave_nothing() {
        block_on(async {
            let gate = Gate::default();
            let _pass = gate.enter();
            for _ in 0..10 {
                let _ = time::race(gate.wait_empty(), std::future::ready(())).await;
            }
            assert!(gate.0.borrow().waiters.is_empty());
        });
    }
}
