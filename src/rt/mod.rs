//! The only door to the runtime: nobody else names glommio, a clock, a task, a socket, a file or a random word.
//!
//! Futures are `!Send` and live on the core that spawned them. What crosses cores is an owned `Send` message.

mod allocator;
pub mod aside;
pub mod channel;
pub mod cores;
mod deadlines;
mod descriptors;
#[cfg(test)]
pub mod faults;
pub mod file;
pub mod gate;
pub mod host;
pub mod join;
pub mod lane;
pub mod latest;
pub mod listen;
mod loan;
pub mod local;
pub mod notify;
pub mod published;
pub mod pulse;
pub mod resolve;
pub mod signal;
pub mod takeover;
pub mod tcp;
pub mod time;
pub mod whole;

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;

pub use pulse::{BusyGuard, busy, core_stats};

/// Runs `future` on this core, detached: nobody can cancel it, so it cannot leak half-way (see `gate` to wait for it).
/// It starts after the calling task has yielded. A panic in it ends the core, and with it the process.
///
/// Why not at once, as glommio does: the new task would run inside whatever the caller holds borrowed, and stream
/// handlers that answer without awaiting would make HTTP/2 flush once for each reply.
///
/// Why boxed first: an async block holds what it awaits twice, and every call on the way to the task's place moves all
/// of it. A call's future of 10 KB cost 20 us in moves alone.
pub fn spawn(future: impl Future<Output = ()> + 'static) {
    // Why it is named: else what bulk work spawns would be bulk work.
    spawn_into(future, glommio::TaskQueueHandle::default());
}

/// Like `spawn`, for work that keeps a core busy for long: it gives way to all other tasks of the core.
///
/// Why: in one run queue, a request that takes microseconds waits for a slice of each of thousands of uploads.
pub fn spawn_bulk(future: impl Future<Output = ()> + 'static) {
    spawn_into(future, pulse::bulk_queue());
}

fn spawn_into(future: impl Future<Output = ()> + 'static, queue: glommio::TaskQueueHandle) {
    let future = Box::pin(future);
    let task = glommio::spawn_local_into(
        async move {
            time::yield_once().await;
            future.await;
        },
        queue,
    );
    task.expect("no queue of an executor is ever removed").detach();
}

/// A handler panicked; the panic has been logged by the panic hook, and counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a request handler panicked")]
pub struct HandlerPanicked;

/// Runs `future`, and turns a panic in it into an error: for work for one peer, whose panic must cost that work only.
/// What it shares with others must stay consistent across an unwind: a borrow of `Local` ends with it. Where a change that was
/// left half-way would harm others, the state is in a `Vital`, and the panic goes on and ends the core.
///
/// Why no `async fn`: see `spawn`.
pub fn catch<F: Future>(future: F) -> impl Future<Output = Result<F::Output, HandlerPanicked>> + use<F> {
    AssertUnwindSafe(future).catch_unwind().map(|ended| ended.map_err(caught))
}

fn caught(panic: Box<dyn Any + Send>) -> HandlerPanicked {
    if local::is_broken() {
        std::panic::resume_unwind(panic);
    }
    pulse::count_panic();
    HandlerPanicked
}

/// The same for work that answers by itself: whom it leaves without an answer sees that.
pub fn contain<F: Future<Output = ()>>(future: F) -> impl Future<Output = ()> + use<F> {
    catch(future).map(drop)
}

/// True in a drop that a panic brings about.
pub fn is_panicking() -> bool {
    std::thread::panicking()
}

/// Runs `work` on this core's blocking pool. `Err` when it panicked.
pub async fn blocking<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Result<R, WorkPanicked> {
    glommio::executor()
        .spawn_blocking(move || std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)))
        .await
        .map_err(|_| WorkPanicked)
}

/// Work on the blocking pool panicked; the panic has been logged by the panic hook.
#[derive(Debug, thiserror::Error)]
#[error("a blocking task panicked")]
pub struct WorkPanicked;

/// A random word from the operating system. For seeds and tokens; logic takes its randomness as an argument.
pub fn random_u64() -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: the pointer and length describe `bytes`, which outlives the call.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    assert_eq!(got, 8, "getrandom gave {got} of 8 bytes");
    u64::from_le_bytes(bytes)
}
