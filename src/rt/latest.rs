//! A value that changes seldom, as the whole process should see it: what a reload of the configuration brings.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::local::Waiters;

/// The latest value. Clones share it; any thread may hold one.
///
/// Why a lock is good enough: requests never ask here. Each core has a task that waits for `Changes` and keeps what it
/// brings in cells of the core.
pub struct Latest<T>(Arc<Mutex<State<T>>>);

struct State<T> {
    value: Arc<T>,
    version: u64,
    waiting: Waiters,
}

impl<T> Clone for Latest<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Latest<T> {
    pub fn new(value: T) -> Self {
        Self(Arc::new(Mutex::new(State { value: Arc::new(value), version: 0, waiting: Waiters::default() })))
    }

    /// The value now.
    pub fn get(&self) -> Arc<T> {
        self.lock().value.clone()
    }

    /// Replaces the value, and wakes all who wait for that.
    pub fn set(&self, value: T) {
        let wakers = {
            let mut state = self.lock();
            state.value = Arc::new(value);
            state.version += 1;
            state.waiting.take_all()
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// The values that follow the one that is here now.
    pub fn changes(&self) -> Changes<T> {
        Changes { latest: self.clone(), seen: self.lock().version, slot: None }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One waiter's view of the changes.
pub struct Changes<T> {
    latest: Latest<T>,
    seen: u64,
    slot: Option<u64>,
}

impl<T> Changes<T> {
    /// Waits for a value that this has not brought yet: the latest, if there were several meanwhile.
    pub async fn next(&mut self) -> Arc<T> {
        Next(self).await
    }
}

impl<T> Drop for Changes<T> {
    fn drop(&mut self) {
        let left = self.latest.lock().waiting.remove(self.slot);
        drop(left);
    }
}

struct Next<'a, T>(&'a mut Changes<T>);

impl<T> Future for Next<'_, T> {
    type Output = Arc<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Arc<T>> {
        let Changes { latest, seen, slot } = &mut *self.0;
        // Under the lock, so that no change falls between this look and the registration.
        let mut state = latest.lock();
        if state.version != *seen {
            *seen = state.version;
            return Poll::Ready(state.value.clone());
        }
        state.waiting.put(slot, context.waker());
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::cores::block_on;

    /// Goal: every core sees the latest value once, whenever it looks, and given-up waits leave nothing.
    /// Method: two threads that wait for a value each sets in turn; then two changes before anybody looks.
    #[test]
    fn changes_reach_all() {
        let latest = Latest::new(0);
        let mut early = latest.changes();
        let other = latest.clone();
        let (seen, all_seen) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut changes = other.changes();
            seen.send(()).expect("the test waits");
            block_on(async move { *changes.next().await })
        });
        all_seen.recv().expect("ready");
        latest.set(1);
        assert_eq!(thread.join().expect("no panic"), 1);
        latest.set(2);
        block_on(async {
            assert_eq!(*early.next().await, 2);
            let waits = std::future::poll_fn(|context| {
                assert!(Pin::new(&mut Next(&mut early)).poll(context).is_pending());
                Poll::Ready(())
            });
            waits.await;
        });
        drop(early);
        assert!(latest.lock().waiting.is_empty());
        assert_eq!(*latest.get(), 2);
    }
}
