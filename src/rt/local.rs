//! Core-local shared state: every borrow is a closure, so there is nowhere to write `.await` inside one.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

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

/// State of which a part must not be left half-changed: others would be told what is not so, or wait for ever. A panic while it is
/// borrowed ends the core, and with it the process, whoever catches it.
pub struct Vital<T>(Local<T>);

impl<T> Vital<T> {
    pub fn new(value: T) -> Self {
        Self(Local::new(value))
    }

    /// As `Local::with`.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let breaks = Breaks;
        let result = self.0.with(work);
        std::mem::forget(breaks);
        result
    }
}

/// Dropped by a panic only.
struct Breaks;

impl Drop for Breaks {
    fn drop(&mut self) {
        BROKEN.set(true);
    }
}

thread_local! {
    static BROKEN: Cell<bool> = const { Cell::new(false) };
}

/// A panic has left a `Vital` of this core half-changed.
pub(super) fn is_broken() -> bool {
    BROKEN.get()
}

/// Wakes every task of this core that waits for a condition, which each then checks again.
#[derive(Clone, Default)]
pub struct Event(Rc<EventState>);

#[derive(Default)]
struct EventState {
    generation: Cell<u64>,
    waiters: RefCell<Waiters>,
}

impl Event {
    /// Wakes all who wait.
    pub fn notify(&self) {
        self.0.generation.set(self.0.generation.get().wrapping_add(1));
        let waiters = self.0.waiters.borrow_mut().take_all();
        waiters.into_iter().for_each(Waker::wake);
    }

    /// Waits for the next `notify` after this call (the call, not the first poll).
    pub fn wait(&self) -> EventWait {
        EventWait { state: self.0.clone(), seen: self.0.generation.get(), slot: None }
    }
}

/// The wait for an event. Dropping it leaves nothing behind.
pub struct EventWait {
    state: Rc<EventState>,
    seen: u64,
    slot: Option<u64>,
}

impl Future for EventWait {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let wait = &mut *self;
        if wait.state.generation.get() != wait.seen {
            return Poll::Ready(());
        }
        wait.state.waiters.borrow_mut().put(&mut wait.slot, context.waker());
        Poll::Pending
    }
}

impl Drop for EventWait {
    fn drop(&mut self) {
        let left = self.state.waiters.borrow_mut().remove(self.slot);
        drop(left); // Outside of the borrow: dropping a waker may run other drops.
    }
}

/// Wakers, each of which its waiter can replace and take back.
#[derive(Default)]
pub(super) struct Waiters {
    /// Invariant: in order of their numbers.
    wakers: Vec<(u64, Waker)>,
    numbers: u64,
}

impl Waiters {
    /// Makes `waker` the one of the waiter that `slot` names; it gets a number the first time.
    pub(super) fn put(&mut self, slot: &mut Option<u64>, waker: &Waker) {
        if let Some(at) = self.find(*slot) {
            self.wakers[at].1.clone_from(waker);
            return;
        }
        self.numbers += 1;
        *slot = Some(self.numbers);
        self.wakers.push((self.numbers, waker.clone()));
    }

    pub(super) fn remove(&mut self, slot: Option<u64>) -> Option<Waker> {
        self.find(slot).map(|at| self.wakers.remove(at).1)
    }

    fn find(&self, slot: Option<u64>) -> Option<usize> {
        self.wakers.binary_search_by_key(&slot?, |(number, _)| *number).ok()
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.wakers.is_empty()
    }

    fn len(&self) -> usize {
        self.wakers.len()
    }

    /// The number and the waker of who has waited longest.
    fn first(&self) -> Option<&(u64, Waker)> {
        self.wakers.first()
    }

    pub(super) fn take_all(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.wakers).into_iter().map(|(_, waker)| waker).collect()
    }
}

/// A number of permits that the tasks of one core share, first come, first served.
#[derive(Clone)]
pub struct Permits(Rc<PermitState>);

struct PermitState {
    count: usize,
    free: Cell<usize>,
    waiters: RefCell<Waiters>,
}

/// Permits that were taken together; they go back when dropped.
pub struct Permit {
    permits: Permits,
    count: usize,
}

/// The wait for a permit. Dropping it gives up the place in the queue.
pub struct TakePermit {
    permits: Permits,
    count: usize,
    /// The place in the queue, once there is one.
    slot: Option<u64>,
}

impl Permits {
    pub fn new(count: usize) -> Self {
        Self(Rc::new(PermitState { count, free: Cell::new(count), waiters: RefCell::default() }))
    }

    /// Waits for a permit, behind all who wait already.
    pub fn take(&self) -> TakePermit {
        self.take_many(1)
    }

    /// Waits for `count` permits, or for all that there are where that is fewer.
    pub fn take_many(&self, count: usize) -> TakePermit {
        TakePermit { permits: self.clone(), count: count.min(self.0.count), slot: None }
    }

    /// How many permits are out, and how many tasks wait.
    pub fn in_line(&self) -> usize {
        self.0.count - self.0.free.get() + self.0.waiters.borrow().len()
    }

    fn wake_first(&self) {
        if self.0.free.get() > 0 {
            let first = self.0.waiters.borrow().first().map(|(_, waker)| waker.clone());
            first.into_iter().for_each(Waker::wake);
        }
    }
}

impl Future for TakePermit {
    type Output = Permit;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Permit> {
        let Self { permits, count, slot } = &mut *self;
        let (free, count) = (permits.0.free.get(), *count);
        let first = permits.0.waiters.borrow().first().map(|(number, _)| *number);
        if free < count || first != *slot {
            permits.0.waiters.borrow_mut().put(slot, context.waker());
            return Poll::Pending;
        }
        permits.0.free.set(free - count);
        let left = permits.0.waiters.borrow_mut().remove(slot.take());
        drop(left);
        permits.wake_first();
        Poll::Ready(Permit { permits: permits.clone(), count })
    }
}

impl Drop for TakePermit {
    fn drop(&mut self) {
        let left = self.permits.0.waiters.borrow_mut().remove(self.slot);
        if left.is_some() {
            // It may have been this one's turn.
            self.permits.wake_first();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Self { permits, count } = self;
        permits.0.free.set(permits.0.free.get() + *count);
        permits.wake_first();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::cores::block_on;
    use crate::rt::{spawn, time};

    /// Goal: a panic while vital state is borrowed goes through `catch` and ends the core; one elsewhere does not, also of a drop
    /// that borrows it meanwhile. Method: each on a thread of its own; their log lines are expected.
    #[test]
    fn a_panic_in_vital_state_ends_the_core() {
        struct Borrows(Vital<u32>);
        impl Drop for Borrows {
            fn drop(&mut self) {
                self.0.with(|value| *value += 1);
            }
        }
        for within in [false, true] {
            let core = std::thread::spawn(move || {
                block_on(async move {
                    let caught = crate::rt::catch(async move {
                        let vital = Borrows(Vital::new(0));
                        match within {
                            true => vital.0.with(|_| panic!("on purpose")),
                            false => panic!("on purpose"),
                        }
                    });
                    assert!(caught.await.is_err());
                });
            });
            assert_eq!(core.join().is_err(), within);
        }
    }

    /// Goal: a notification reaches all who waited before it, none who waited after it, and dropped waits leave nothing.
    /// Method: waits taken before and after a `notify`, polled only afterwards; then waits that are given up.
    #[test]
    fn events_reach_those_who_wait() {
        block_on(async {
            let event = Event::default();
            let before = [event.wait(), event.wait()];
            event.notify();
            for wait in before {
                wait.await;
            }
            let after = event.wait();
            assert!(matches!(time::race(after, std::future::ready(())).await, time::Either::Right(())));
            assert!(event.0.waiters.borrow().is_empty());
            let woken = Local::new(0);
            for _ in 0..3 {
                let (wait, woken) = (event.wait(), woken.clone());
                spawn(async move {
                    wait.await;
                    woken.with(|woken| *woken += 1);
                });
            }
            time::yield_once().await;
            time::yield_once().await;
            event.notify();
            while woken.with(|woken| *woken) < 3 {
                time::yield_once().await;
            }
        });
    }

    /// Goal: a waiter can replace and take back its own waker only.
    /// Method: put, replace, remove and take in turn.
    #[test]
    fn waiters_keep_their_slots() {
        let (mut waiters, waker) = (Waiters::default(), Waker::noop());
        let (mut first, mut second) = (None, None);
        waiters.put(&mut first, waker);
        waiters.put(&mut second, waker);
        waiters.put(&mut first, waker);
        assert!(waiters.remove(first).is_some() && waiters.remove(first).is_none());
        waiters.put(&mut first, waker);
        assert_eq!(waiters.take_all().len(), 2);
        assert!(waiters.remove(second).is_none() && waiters.remove(None).is_none());
    }

    /// Goal: no more permits are out than there are, they go to who waits longest, and a waiter that gives up takes none and
    /// holds up nobody. Method: two permits; five wait, the first and the third of whom give up; permits come back one by one,
    /// with a newcomer each time.
    #[test]
    fn permits_are_bounded_and_in_order() {
        block_on(async {
            let permits = Permits::new(2);
            let mut held = vec![permits.take().await, permits.take().await];
            let mut waiting = Vec::new();
            for _ in 0..5 {
                let mut take = permits.take();
                assert!(is_pending(&mut take).await);
                waiting.push(take);
            }
            drop(waiting.remove(2));
            drop(waiting.remove(0));
            let mut late = permits.take();
            for mut first in waiting {
                assert!(is_pending(&mut first).await);
                drop(held.pop());
                assert!(is_pending(&mut late).await, "somebody has waited longer");
                held.insert(0, first.await);
            }
            assert_eq!(permits.0.free.get(), 0);
            // Its turn comes as it gives up: the next one, a task that only a wake gets on, is told.
            let (last, got) = (permits.take(), Local::new(None));
            let taken = got.clone();
            spawn(async move {
                let permit = last.await;
                taken.with(|taken| *taken = Some(permit));
            });
            turns().await;
            drop(held.pop());
            drop(late);
            turns().await;
            held.push(got.with(Option::take).expect("it was woken"));
            drop(held);
            assert_eq!(permits.0.free.get(), 2);
            assert!(permits.0.waiters.borrow().is_empty());
        });
    }

    /// Goal: several permits are taken together or not at all, in order, and more than there are means all. Method: four.
    #[test]
    fn permits_are_taken_together() {
        block_on(async {
            let permits = Permits::new(4);
            let three = permits.take_many(3).await;
            let (mut all, mut one) = (permits.take_many(9), permits.take());
            assert!(is_pending(&mut all).await && is_pending(&mut one).await, "one would fit, but came later");
            assert_eq!(permits.in_line(), 5);
            drop(three);
            let all = all.await;
            assert!(is_pending(&mut one).await);
            drop(all);
            drop(one.await);
            assert_eq!(permits.in_line(), 0);
        });
    }

    /// Enough for every task that has been woken.
    async fn turns() {
        for _ in 0..4 {
            time::yield_once().await;
        }
    }

    async fn is_pending(take: &mut TakePermit) -> bool {
        matches!(time::race(take, std::future::ready(())).await, time::Either::Right(()))
    }
}
