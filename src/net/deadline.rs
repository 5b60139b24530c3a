//! One queue of deadlines for each core: Bazel puts a deadline on every call, and a timer for each would cost more
//! than the call.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::rt;
use crate::rt::local::Event;
use crate::rt::time;

/// The deadlines of this core. Clones share the queue.
#[derive(Clone, Default)]
pub struct Deadlines(Rc<Queue>);

#[derive(Default)]
struct Queue {
    /// By time and number. Whoever is no longer here has been woken.
    waiting: RefCell<BTreeMap<(Instant, u64), Waker>>,
    next: Cell<u64>,
    /// When the sweeper will look next; `None` when it does not run.
    armed: Cell<Option<Instant>>,
    rearm: Event,
}

/// Ends at its time. Costs nothing until it is first polled, and leaves the queue when dropped.
pub struct Deadline {
    queue: Rc<Queue>,
    key: (Instant, u64),
    entered: bool,
}

impl Deadlines {
    /// A deadline `after` from now.
    pub fn after(&self, after: Duration) -> Deadline {
        let number = self.0.next.get();
        self.0.next.set(number + 1);
        let now = time::now();
        // Why: a timeout beyond the range of the clock (99,999,999 hours) is no timeout; a year stands for it.
        let at = now.checked_add(after).unwrap_or(now + Duration::from_secs(365 * 24 * 3600));
        Deadline { queue: self.0.clone(), key: (at, number), entered: false }
    }

    /// How many wait.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.waiting.borrow().len()
    }
}

impl Future for Deadline {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if !self.entered {
            if self.key.0 <= time::now() {
                return Poll::Ready(());
            }
            self.entered = true;
            self.queue.waiting.borrow_mut().insert(self.key, context.waker().clone());
            sweep_by(&self.queue, self.key.0);
            return Poll::Pending;
        }
        match self.queue.waiting.borrow_mut().get_mut(&self.key) {
            None => Poll::Ready(()),
            Some(waker) => {
                waker.clone_from(context.waker());
                Poll::Pending
            }
        }
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        if self.entered {
            self.queue.waiting.borrow_mut().remove(&self.key);
        }
    }
}

/// Makes sure that the sweeper looks at `at` or before.
fn sweep_by(queue: &Rc<Queue>, at: Instant) {
    match queue.armed.get() {
        Some(armed) if armed <= at => {}
        Some(_) => queue.rearm.notify(),
        None => {
            queue.armed.set(Some(at));
            rt::spawn(sweep(queue.clone()));
        }
    }
}

/// Wakes whose time has come, until nobody waits. Why it sleeps on when its earliest deadline has left the queue:
/// nearly every call ends long before, and moving the timer each time would cost more than one idle wake a minute.
async fn sweep(queue: Rc<Queue>) {
    loop {
        let Some(first) = queue.waiting.borrow().first_key_value().map(|(key, _)| key.0) else { break };
        queue.armed.set(Some(first));
        let rearmed = queue.rearm.wait();
        let now = time::now();
        if first > now {
            time::race(time::sleep(first - now), rearmed).await;
        }
        wake_due(&queue, time::now());
    }
    queue.armed.set(None);
}

fn wake_due(queue: &Queue, now: Instant) {
    loop {
        // Why the borrow ends before the wake: a waker may run code that drops another deadline.
        let due = {
            let mut waiting = queue.waiting.borrow_mut();
            match waiting.first_entry() {
                Some(entry) if entry.key().0 <= now => entry.remove(),
                _ => return,
            }
        };
        due.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::cores::block_on;

    /// Goal: a later deadline armed first does not hide an earlier one; a dropped one leaves nothing. Method: one of
    /// 60 s is armed, then one of 10 ms is awaited; both are dropped and the queue is looked at.
    #[test]
    fn an_earlier_deadline_overtakes() {
        block_on(async {
            let deadlines = Deadlines::default();
            let mut late = deadlines.after(Duration::from_secs(60));
            std::future::poll_fn(|context| {
                assert!(Pin::new(&mut late).poll(context).is_pending());
                Poll::Ready(())
            })
            .await;
            let start = time::now();
            deadlines.after(Duration::from_millis(10)).await;
            let took = start.elapsed();
            assert!(took >= Duration::from_millis(10) && took < Duration::from_secs(30), "{took:?}");
            assert_eq!(deadlines.len(), 1);
            drop(late);
            assert_eq!(deadlines.len(), 0);
            deadlines.after(Duration::ZERO).await;
        });
    }
}
