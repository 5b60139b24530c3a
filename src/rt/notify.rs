//! Words to the service manager that has started this process. Source: sd_notify(3), sd_watchdog_enabled(3).

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;

/// Speaks to the service manager, if there is one that listens. Clones share the socket.
#[derive(Clone, Default)]
pub struct Notifier(Option<Arc<UnixDatagram>>);

impl Notifier {
    /// To whom NOTIFY_SOCKET names: a path, or an abstract name after `@`.
    pub fn from_environment() -> Self {
        let Some(name) = std::env::var("NOTIFY_SOCKET").ok().filter(|name| !name.is_empty()) else {
            return Self::default();
        };
        Self::to(&name).unwrap_or_else(|error| {
            tracing::warn!("the service manager at {name} cannot be told anything: {error}");
            Self::default()
        })
    }

    fn to(name: &str) -> io::Result<Self> {
        let address = match name.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(name)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        socket.set_nonblocking(true)?;
        Ok(Self(Some(Arc::new(socket))))
    }

    /// The server serves.
    pub fn ready(&self) {
        self.say("READY=1\nSTATUS=serving");
    }

    /// The server reads its configuration again; `ready` is to follow.
    pub fn reloading(&self) {
        // Why the time: by it the service manager tells this one from words about an earlier request.
        self.say(&format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_us()));
    }

    /// The server ends by itself or because it was told to.
    pub fn stopping(&self) {
        self.say("STOPPING=1\nSTATUS=finishing what is in flight");
    }

    fn say(&self, state: &str) {
        // A service manager that does not listen changes nothing for clients.
        if let Some(socket) = &self.0
            && let Err(error) = socket.send(state.as_bytes())
        {
            tracing::debug!(%error, "the service manager does not listen");
        }
    }

    /// Tells the watchdog that all is well, as long as `is_well` says so, from a thread of its own. It has to be told each
    /// `period`; when it is not, the service manager ends this process and starts another one.
    pub fn keep_watch(&self, period: Duration, is_well: impl Fn() -> bool + Send + 'static) -> io::Result<()> {
        let notifier = self.clone();
        std::thread::Builder::new().name("watchdog".into()).spawn(move || {
            loop {
                std::thread::sleep(period / 3);
                if is_well() {
                    notifier.say("WATCHDOG=1");
                }
            }
        })?;
        Ok(())
    }
}

/// The clock that the service manager compares with.
fn monotonic_us() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call, which only writes to it; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    (time.tv_sec as u64) * 1_000_000 + (time.tv_nsec as u64) / 1000
}

/// How often the watchdog has to be told that all is well; `None` without one.
pub fn watchdog_period() -> Option<Duration> {
    period(|name| std::env::var(name).ok())
}

fn period(variable: impl Fn(&str) -> Option<String>) -> Option<Duration> {
    let is_ours = variable("WATCHDOG_PID").is_none_or(|pid| pid == std::process::id().to_string());
    let micros: u64 = variable("WATCHDOG_USEC")?.parse().ok()?;
    (is_ours && micros > 0).then(|| Duration::from_micros(micros))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: words reach the socket that was named, and nobody minds when there is none. Method: a path and an abstract
    /// name, then a socket that is gone.
    #[test]
    fn words_arrive() {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let path = scratch.path().join("notify");
        let abstract_name = format!("ringcas-test-{}", std::process::id());
        let at_name = SocketAddr::from_abstract_name(&abstract_name).expect("short");
        let sockets = [
            (path.to_str().expect("UTF-8").to_owned(), UnixDatagram::bind(&path).expect("binds")),
            (format!("@{abstract_name}"), UnixDatagram::bind_addr(&at_name).expect("binds")),
        ];
        for (name, socket) in sockets {
            let notifier = Notifier::to(&name).expect("connects");
            notifier.ready();
            let mut got = [0; 64];
            let len = socket.recv(&mut got).expect("receives");
            assert_eq!(&got[..len], b"READY=1\nSTATUS=serving");
            drop(socket);
            notifier.stopping();
        }
        assert!(Notifier::to("/nowhere/at/all").is_err());
        Notifier::default().ready();
    }

    /// Goal: the watchdog is minded only where it is meant for this process. Method: environments with one difference.
    #[test]
    fn the_watchdog_is_ours() {
        let own = std::process::id().to_string();
        let of = |pid: Option<&str>, micros: &str| {
            period(|name| match name {
                "WATCHDOG_PID" => pid.map(str::to_owned),
                _ => (!micros.is_empty()).then(|| micros.to_owned()),
            })
        };
        assert_eq!(of(Some(&own), "30000000"), Some(Duration::from_secs(30)));
        assert_eq!(of(None, "500000"), Some(Duration::from_millis(500)));
        assert_eq!(of(Some("1"), "30000000"), None);
        assert_eq!(of(Some(&own), ""), None);
        assert_eq!(of(Some(&own), "0"), None);
        assert_eq!(of(Some(&own), "soon"), None);
    }
}
