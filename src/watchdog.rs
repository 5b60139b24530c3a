//! Whether every core still runs its tasks, for a service manager that restarts what hangs (systemd's `WatchdogSec`).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::rt::notify::Notifier;
use crate::rt::time;

/// When each core last ran a task. Clones share it.
#[derive(Clone)]
pub struct Watchdog {
    period: Duration,
    began: Instant,
    /// Milliseconds after `began`, by core.
    beats_ms: Arc<[AtomicU64]>,
}

impl Watchdog {
    /// Tells the service manager that all is well, as long as each of `cores` cores ran a task within half of `period`.
    pub fn start(notifier: &Notifier, period: Duration, cores: usize) -> io::Result<Self> {
        let beats_ms = (0..cores).map(|_| AtomicU64::new(0)).collect();
        let watchdog = Self { period, began: time::now(), beats_ms };
        let watched = watchdog.clone();
        notifier.keep_watch(period, move || {
            let silent = watched.silent();
            if let Some((core, silence)) = silent {
                tracing::error!(
                    "core {core} has run nothing for {silence:?}: the watchdog is not told that all is well"
                );
            }
            silent.is_none()
        })?;
        Ok(watchdog)
    }

    /// Says that `core` runs, for as long as it does. A task of this core.
    pub async fn beat(self, core: usize) {
        loop {
            self.beats_ms[core].store(self.now_ms(), Ordering::Relaxed);
            time::sleep(self.period / 6).await;
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(time::now().saturating_duration_since(self.began).as_millis()).unwrap_or(u64::MAX)
    }

    /// A core that has been silent for too long, and for how long.
    fn silent(&self) -> Option<(usize, Duration)> {
        let now_ms = self.now_ms();
        let silences = self.beats_ms.iter().map(|beat| now_ms.saturating_sub(beat.load(Ordering::Relaxed)));
        let silences = silences.map(Duration::from_millis).enumerate();
        silences.max_by_key(|(_, silence)| *silence).filter(|(_, silence)| *silence > self.period / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: one silent core is enough, half a period is too long, and who beats again is well again. Method: a watchdog
    /// that began a minute ago.
    #[test]
    fn one_silent_core_is_found() {
        let now = time::now();
        let began = now.checked_sub(Duration::from_secs(60)).unwrap_or(now);
        let beats_ms = [59_000, 30_000, 58_000].map(AtomicU64::new).into_iter().collect();
        let watchdog = Watchdog { period: Duration::from_secs(30), began, beats_ms };
        assert_eq!(watchdog.silent().map(|(core, silence)| (core, silence.as_secs() >= 30)), Some((1, true)));
        watchdog.beats_ms[1].store(59_000, Ordering::Relaxed);
        assert_eq!(watchdog.silent(), None);
    }
}
