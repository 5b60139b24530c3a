//! Shutdown as a value, the signals that trigger it, and the one that asks for a reload.

use std::future::Future;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::local::Waiters;

/// Tells every core once that it is time to stop. Clones share it; any thread may hold one.
#[derive(Clone, Default)]
pub struct Shutdown(Arc<State>);

#[derive(Default)]
struct State {
    triggered: AtomicBool,
    waiting: Mutex<Waiters>,
}

impl Shutdown {
    /// Not triggered yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Wakes all who wait, now and later.
    pub fn trigger(&self) {
        let wakers = {
            let mut waiting = self.0.lock();
            self.0.triggered.store(true, Ordering::SeqCst);
            waiting.take_all()
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// True once triggered.
    pub fn is_triggered(&self) -> bool {
        self.0.triggered.load(Ordering::SeqCst)
    }

    /// Waits until it is triggered, on any core.
    pub fn wait(&self) -> Wait {
        Wait { state: self.0.clone(), slot: None }
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Waiters> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The wait for a shutdown.
pub struct Wait {
    state: Arc<State>,
    slot: Option<u64>,
}

impl Future for Wait {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let state = self.state.clone();
        let mut waiting = state.lock();
        // Under the lock, so that no trigger falls between this look and the registration.
        if state.triggered.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        waiting.put(&mut self.slot, context.waker());
        Poll::Pending
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        let left = self.state.lock().remove(self.slot);
        drop(left);
    }
}

/// From now on the first SIGTERM or SIGINT triggers `shutdown`; the second ends the process at once, with 128 plus its
/// number. Call it once, before the cores start.
pub fn trigger_on_signals(shutdown: &Shutdown) -> io::Result<()> {
    let seen = Arc::new(AtomicBool::new(false));
    let (mut pipe, writer) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT] {
        // The order matters: actions run in it, and the first signal must not find its own flag.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, seen.clone())?;
        signal_hook::flag::register(signal, seen.clone())?;
        signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
    }
    let shutdown = shutdown.clone();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut byte = [0];
        // Why a thread: a signal handler may not take locks or wake tasks, and no core should own this.
        if pipe.read_exact(&mut byte).is_ok() {
            tracing::info!("told to stop; a second signal ends the process at once");
            shutdown.trigger();
        }
        // The handlers write until the process ends; a closed pipe would be an error in each.
        std::mem::forget(pipe);
    })?;
    Ok(())
}

/// Requests to read the configuration again (SIGHUP), from now on.
pub struct Hangups(UnixStream);

impl Hangups {
    /// Takes the signal, which would else end the process. Call it once, before anything that may take long.
    pub fn take() -> io::Result<Self> {
        let (pipe, writer) = UnixStream::pair()?;
        signal_hook::low_level::pipe::register(SIGHUP, writer)?;
        Ok(Self(pipe))
    }

    /// Calls `reload` for each signal so far and from now on, one at a time, on a thread of its own: what it does may block.
    /// Signals that come close together may be one.
    pub fn answer(mut self, mut reload: impl FnMut() + Send + 'static) -> io::Result<()> {
        std::thread::Builder::new().name("reload".into()).spawn(move || {
            // Why so many: signals that came in meanwhile ask for the same.
            let mut bytes = [0; 64];
            while self.0.read(&mut bytes).is_ok_and(|len| len > 0) {
                reload();
            }
        })?;
        Ok(())
    }
}
