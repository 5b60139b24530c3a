//! Work on all cores that comes to an end: results, progress, and a signal that stops it.

use std::future::Future;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::Failure;
use crate::limits;
use crate::rt;
use crate::rt::cores::{self, CorePlan};
use crate::rt::signal::{self, Shutdown};

/// How often progress is shown on a terminal, and elsewhere.
const SHOW_TERMINAL: Duration = Duration::from_millis(200);
const SHOW_ELSEWHERE: Duration = Duration::from_secs(10);

/// How far the work has come. All cores add to it.
#[derive(Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
    noted: AtomicU64,
    files: AtomicU64,
}

impl Progress {
    pub fn set_total(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }

    pub fn add(&self, done: u64) {
        self.done.fetch_add(done, Ordering::Relaxed);
    }

    /// Counts something that the line is to name.
    pub fn note(&self) {
        self.noted.fetch_add(1, Ordering::Relaxed);
    }

    pub fn add_file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    pub fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    /// What is done, of how much, and how many things were noted.
    pub fn now(&self) -> (u64, u64, u64) {
        let get = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        (get(&self.done), get(&self.total), get(&self.noted))
    }
}

/// The seconds that are left at this pace, once there is one.
pub fn seconds_left(done: u64, total: u64, elapsed: Duration) -> Option<u64> {
    let left = elapsed.as_secs_f64() * (total.saturating_sub(done)) as f64 / done as f64;
    (elapsed.as_secs() >= 1 && left.is_finite()).then_some(left.ceil() as u64)
}

/// Runs `prepare(core)`'s future on each core of `plan` and returns what they bring. `line` says how far the work is.
/// A first SIGTERM or SIGINT triggers `stop`, which the work is to watch.
pub fn run<T, P, M, F>(
    plan: &CorePlan,
    stop: &Shutdown,
    progress: &Arc<Progress>,
    line: fn(&Progress, Duration) -> String,
    mut prepare: P,
) -> Result<Vec<T>, Failure>
where
    T: Send + 'static,
    P: FnMut(usize) -> M,
    M: FnOnce() -> F + Send + 'static,
    F: Future<Output = T> + 'static,
{
    signal::trigger_on_signals(stop).map_err(Failure::Signals)?;
    let working = Arc::new(AtomicUsize::new(plan.len()));
    let ended = Shutdown::new();
    let (sender, results) = mpsc::channel();
    let crew = cores::launch(plan, limits::IO_MEMORY_TOOLS, &ended, |core| {
        let work = prepare(core);
        let (sender, working, ended, progress) = (sender.clone(), working.clone(), ended.clone(), progress.clone());
        move || async move {
            if core == 0 {
                rt::spawn(show(progress, line, ended.clone()));
            }
            // Whoever collects the results waits for all of them.
            let _ = sender.send(work().await);
            if working.fetch_sub(1, Ordering::AcqRel) == 1 {
                ended.trigger();
            }
            ended.wait().await;
        }
    })?;
    crew.wait()?;
    Ok(results.try_iter().collect())
}

/// Shows how far the work is until it has ended.
async fn show(progress: Arc<Progress>, line: fn(&Progress, Duration) -> String, ended: Shutdown) {
    let begun = rt::time::now();
    let on_terminal = std::io::stderr().is_terminal();
    let period = if on_terminal { SHOW_TERMINAL } else { SHOW_ELSEWHERE };
    while rt::time::timeout(period, ended.wait()).await.is_err() {
        let text = line(&progress, begun.elapsed());
        let text = if on_terminal { format!("\r{text}\x1b[K") } else { format!("{text}\n") };
        // Nobody reads it: no reason to end the work.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
    if on_terminal {
        let _ = std::io::stderr().write_all(b"\r\x1b[K");
    }
}
