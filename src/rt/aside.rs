//! Threads aside of the cores, for work that keeps a CPU busy for so long that no core may do it.
//!
//! Why not a core's pool: disk work waits there, and must not wait for this.

use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::channel;
use super::time;

type Job = Box<dyn FnOnce() + Send>;

/// Some threads and the queue in front of them. Clones are the same.
#[derive(Clone)]
pub struct Aside(SyncSender<Job>);

/// The work was not done: too much waits already, it waited for too long, or it panicked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too much work of this kind is waiting")]
pub struct Busy;

/// How much the threads give way to all others, as in nice(1): next to a busy core they get a tenth of its CPU.
const NICE: libc::c_int = 10;

impl Aside {
    /// `threads` threads; at most `waiting_max` pieces of work wait for them. They end with the last clone.
    pub fn start(name: &str, threads: usize, waiting_max: usize) -> io::Result<Self> {
        let (sender, receiver) = sync_channel::<Job>(waiting_max);
        let receiver = Arc::new(Mutex::new(receiver));
        for number in 0..threads.max(1) {
            let receiver = receiver.clone();
            let work = move || {
                give_way();
                while let Some(job) = next(&receiver) {
                    // The panic hook has logged it; whoever waits is told by the end of the reply.
                    let _ = std::panic::catch_unwind(AssertUnwindSafe(job));
                }
            };
            std::thread::Builder::new().name(format!("{name}-{number}")).spawn(work)?;
        }
        Ok(Self(sender))
    }

    /// Does `work` on one of the threads, and waits for it for at most `patience`. Work that nobody waits for any more
    /// when its turn comes is not done.
    pub async fn run<R: Send + 'static>(
        &self,
        patience: Duration,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, Busy> {
        let (reply_to, mut reply) = channel::reply();
        let job = Box::new(move || {
            if !reply_to.is_abandoned() {
                reply_to.send(work());
            }
        });
        self.0.try_send(job).map_err(|_| Busy)?;
        match time::timeout(patience, reply.ready()).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(channel::Closed)) => Err(Busy),
            Err(time::Elapsed) => reply.withdraw().ok_or(Busy),
        }
    }
}

fn next(receiver: &Mutex<Receiver<Job>>) -> Option<Job> {
    receiver.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

fn give_way() {
    // SAFETY: setpriority takes no pointers. On Linux, 0 is the calling thread. Source: setpriority(2), "C library/kernel
    // differences".
    let done = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
    if done != 0 {
        tracing::debug!("a thread aside cannot give way: {}", io::Error::last_os_error());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::rt::cores::block_on;

    /// Goal: work is done and answered, a panic is told, what is too much is refused at once, and what nobody waits for is
    /// not done. Method: one thread that is held up, with room for one to wait.
    #[test]
    fn bounded_and_patient() {
        block_on(async {
            let long = Duration::from_secs(60);
            let aside = Aside::start("test", 1, 1).expect("threads");
            assert_eq!(aside.run(long, || 7).await, Ok(7));
            assert_eq!(aside.run(long, || panic!("on purpose")).await, Err::<(), _>(Busy));

            let (go, held) = mpsc::channel::<()>();
            let (began, has_begun) = channel::reply();
            let other = aside.clone();
            crate::rt::spawn(async move {
                let work = move || {
                    began.send(());
                    let _ = held.recv();
                };
                assert_eq!(other.run(long, work).await, Ok(()));
            });
            has_begun.recv().await.expect("the thread has begun");
            let (done, was_done) = mpsc::channel();
            let given_up = aside.run(Duration::from_millis(1), move || done.send(()));
            assert!(given_up.await.is_err());
            assert_eq!(aside.run(long, || ()).await, Err(Busy), "one waits already");
            drop(go);
            while aside.run(long, || ()).await.is_err() {
                time::yield_to_reactor().await;
            }
            assert!(was_done.recv().is_err());
        });
    }
}
