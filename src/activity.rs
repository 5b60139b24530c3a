//! Whether anybody asks this server for anything: it can stop by itself when nobody does (`--idle_timeout`).

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::limits;
use crate::net::Server;
use crate::rt;
use crate::rt::signal::Shutdown;
use crate::rt::time::{self, Either};
use crate::store::Store;

/// When the server was last asked for something. Clones share it, one for each core.
///
/// Why the cores look each second, and requests say nothing: a word that all cores write would cost each request.
#[derive(Clone)]
pub struct Activity {
    idle_timeout: Duration,
    began: Instant,
    /// Milliseconds after `began`.
    last_ms: Arc<AtomicU64>,
}

impl Activity {
    /// The start counts as activity.
    pub fn new(idle_timeout: Duration) -> Self {
        Self { idle_timeout, began: time::now(), last_ms: Arc::default() }
    }

    /// Says whenever this core has begun or holds a request. `stops`: this core also triggers `shutdown`, when no core has
    /// said so for the idle timeout.
    pub async fn watch<S: Store>(self, server: Rc<Server<S>>, stops: bool, shutdown: Shutdown) {
        let mut begun_before = 0;
        while let Either::Right(()) = time::race(shutdown.wait(), time::sleep(limits::IDLE_LOOK)).await {
            let (begun, open) = server.asked();
            if begun > begun_before || open > 0 {
                begun_before = begun;
                self.touch();
            }
            if stops && self.idle() >= self.idle_timeout {
                tracing::info!("no request for {:?} (--idle_timeout): the server stops", self.idle_timeout);
                shutdown.trigger();
            }
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(rt::time::now().saturating_duration_since(self.began).as_millis()).unwrap_or(u64::MAX)
    }

    fn touch(&self) {
        self.last_ms.fetch_max(self.now_ms(), Ordering::Relaxed);
    }

    fn idle(&self) -> Duration {
        Duration::from_millis(self.now_ms().saturating_sub(self.last_ms.load(Ordering::Relaxed)))
    }
}
