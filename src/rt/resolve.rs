//! Names to addresses, off the executors: the system's resolver blocks, sometimes for half a minute.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::channel;

/// Lookups of the process that may run at a time. Why: each has a thread, and a resolver that hangs keeps it. Why so many:
/// every core looks up every name by itself, one at a time, and what hangs for one must leave room for the others.
const LOOKUPS_MAX: usize = 1024;

static LOOKUPS: AtomicUsize = AtomicUsize::new(0);

/// The addresses of `host`, a name or an address, with `port`. Never empty.
pub async fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<std::net::IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let lookup = Lookup::begin()?;
    let (reply_to, reply) = channel::reply();
    let host = host.to_owned();
    // Why a thread of its own and not the core's pool: disk work waits there, and must not wait for a resolver.
    std::thread::Builder::new().name("resolver".into()).spawn(move || {
        let found = (host.as_str(), port).to_socket_addrs().map(Vec::from_iter);
        reply_to.send(found.and_then(|found| match found.is_empty() {
            true => Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address")),
            false => Ok(found),
        }));
        drop(lookup);
    })?;
    reply.recv().await.unwrap_or_else(|_| Err(io::Error::other("the resolver panicked")))
}

/// One of the lookups that may run.
struct Lookup;

impl Lookup {
    fn begin() -> io::Result<Self> {
        let begun = LOOKUPS.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < LOOKUPS_MAX).then_some(n + 1));
        begun.map(|_| Self).map_err(|_| io::Error::other("too many lookups hang; is the resolver well?"))
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        LOOKUPS.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::cores::block_on;

    /// Goal: addresses need no resolver, names are looked up, what has no address is an error. Method: one of each.
    #[test]
    fn names_and_addresses() {
        block_on(async {
            assert_eq!(resolve("127.0.0.1", 7).await.ok(), Some(vec![([127, 0, 0, 1], 7).into()]));
            assert_eq!(resolve("::1", 7).await.map(|found| found[0].is_ipv6()).ok(), Some(true));
            assert!(resolve("localhost", 7).await.is_ok_and(|found| found.iter().all(|a| a.ip().is_loopback())));
            assert!(resolve("no such host.invalid", 7).await.is_err());
        });
    }
}
