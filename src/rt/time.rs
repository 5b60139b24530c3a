//! Clocks, sleeps, timeouts and yields.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

/// Monotonic time.
pub fn now() -> Instant {
    Instant::now()
}

/// Milliseconds since the Unix epoch.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |age| age.as_millis() as u64)
}

/// A sleep that ends at a fixed instant.
pub struct Sleep(glommio::timer::Timer);

/// Sleeps for `duration`.
pub fn sleep(duration: Duration) -> Sleep {
    Sleep(glommio::timer::Timer::new(duration))
}

impl Future for Sleep {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(context).map(|_| ())
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
/// 250 us of hashing or compressing.
pub async fn yield_to_reactor() {
    sleep(Duration::from_micros(1)).await
}
