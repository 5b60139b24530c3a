//! Clocks, sleeps, timeouts and yields.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::deadlines::Key;
use super::pulse;

/// Monotonic time.
pub fn now() -> Instant {
    Instant::now()
}

/// Seconds since 1970, by the wall clock, which may be wrong and may jump: for people, for signatures and expiry dates.
pub fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The same with the microseconds of the second.
pub fn unix_micros() -> (u64, u32) {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (since.as_secs(), since.subsec_micros())
}

/// Ends at a fixed instant. Made for many at once: it costs an insertion into a core-local queue when it is first
/// polled and a removal when it is dropped, whatever the distance. Core-local.
pub struct Sleep {
    at: Instant,
    waiting: Option<(Key, Waker)>,
    core_local: PhantomData<*const ()>,
}

/// A `Sleep` that was given an instant.
pub type Deadline = Sleep;

/// Sleeps for `duration`.
pub fn sleep(duration: Duration) -> Sleep {
    // Why the cap: an `Instant` overflows after some hundred years.
    deadline(Instant::now() + duration.min(DURATION_MAX))
}

/// Sleeps until `at`.
pub fn deadline(at: Instant) -> Deadline {
    Sleep { at, waiting: None, core_local: PhantomData }
}

/// The longest sleep: as good as for ever.
const DURATION_MAX: Duration = Duration::from_secs(10 * 365 * 86_400);

impl Sleep {
    /// When it ends.
    pub fn at(&self) -> Instant {
        self.at
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.at {
            self.forget();
            return Poll::Ready(());
        }
        match &mut self.waiting {
            Some((_, waker)) if waker.will_wake(context.waker()) => {}
            Some((key, waker)) => {
                waker.clone_from(context.waker());
                pulse::set_waker(*key, context.waker());
            }
            None => {
                assert!(pulse::on_core(), "a sleep needs an executor that `rt` runs");
                let key = pulse::insert(self.at, context.waker().clone());
                self.waiting = Some((key, context.waker().clone()));
            }
        }
        Poll::Pending
    }
}

impl Sleep {
    fn forget(&mut self) {
        if let Some((key, _)) = self.waiting.take() {
            pulse::remove(key);
        }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.forget();
    }
}

/// The time allowed has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("timed out")]
pub struct Elapsed;

/// Runs `future` for at most `duration`; it is dropped when the time is over.
pub async fn timeout<T>(duration: Duration, future: impl Future<Output = T>) -> Result<T, Elapsed> {
    match race(future, sleep(duration)).await {
        Either::Left(value) => Ok(value),
        Either::Right(()) => Err(Elapsed),
    }
}

/// Which of two futures ended first.
pub enum Either<A, B> {
    Left(A),
    Right(B),
}

/// Runs both futures until one ends, and drops the other. The left one is polled first.
pub async fn race<A, B>(left: impl Future<Output = A>, right: impl Future<Output = B>) -> Either<A, B> {
    let mut left = std::pin::pin!(left);
    let mut right = std::pin::pin!(right);
    std::future::poll_fn(move |context| {
        if let Poll::Ready(value) = left.as_mut().poll(context) {
            return Poll::Ready(Either::Left(value));
        }
        right.as_mut().poll(context).map(Either::Right)
    })
    .await
}

/// Lets every other runnable task of this core run once. Does not reach the reactor.
pub async fn yield_once() {
    let mut yielded = false;
    std::future::poll_fn(move |context| {
        if yielded {
            return Poll::Ready(());
        }
        yielded = true;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// Leaves the run queue until the reactor has had a turn (sockets, disk, timers). Call it after each slice of at most
/// 250 us of hashing or compressing: a turn costs some microseconds.
///
/// Why `yield_once` will not do: it stays within the run queue, and glommio visits the reactor only when that is empty.
pub async fn yield_to_reactor() {
    let mut left = false;
    std::future::poll_fn(move |context| {
        if left {
            return Poll::Ready(());
        }
        left = true;
        pulse::wake_after_turn(context);
        Poll::Pending
    })
    .await
}
