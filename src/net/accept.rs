//! New connections: core 0 accepts, and hands each socket to the core that serves the fewest.
//!
//! Why: SO_REUSEPORT spreads connections by a hash, and the normal case is few, long-lived ones, so some cores would
//! get several and others none.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::access::Origin;
use crate::limits;
use crate::metrics::{Metric, Snapshot};
use crate::net::Server;
use crate::pure::authority::AuthorityFilter;
use crate::rt::channel::{self, Receiver, Sender};
use crate::rt::tcp::{Accepted, Listener, Peer};
use crate::rt::time::{self, Either};
use crate::store::Store;

/// What is spoken on a listener's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// HTTP/2 with prior knowledge.
    Grpc,
    /// HTTP/1.1.
    Http,
    /// Either, as the client begins.
    Both,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Grpc, Self::Http, Self::Both];

    fn label(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::Http => "http",
            Self::Both => "both",
        }
    }
}

/// Connections of each kind that may be open at a time.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionsMax {
    /// Also of those on a port for both.
    pub grpc: usize,
    pub http: usize,
}

/// How many connections each core serves or is about to serve, and what was turned away. Shared by all cores.
pub struct Load {
    cores: Box<[AtomicUsize]>,
    /// By kind.
    kinds: [OfKind; Kind::ALL.len()],
}

struct OfKind {
    open: AtomicUsize,
    max: usize,
    /// Connections closed at once because `max` were open, or because the inbox was full.
    refused: AtomicU64,
}

impl OfKind {
    fn new(max: usize) -> Self {
        Self { open: AtomicUsize::new(0), max, refused: AtomicU64::new(0) }
    }
}

impl Load {
    /// Connections open now on all cores.
    pub fn connections(&self) -> usize {
        self.kinds.iter().map(|kind| kind.open.load(Ordering::Relaxed)).sum()
    }

    /// Connections turned away since the start.
    pub fn refused(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.refused.load(Ordering::Relaxed)).sum()
    }

    /// Adds what was turned away. For one core to say.
    pub fn report(&self, into: &mut Snapshot) {
        for kind in Kind::ALL {
            let refused = self.kinds[kind as usize].refused.load(Ordering::Relaxed);
            into.add_for(Metric::ConnectionsRefused, [kind.label()], refused);
        }
    }

    /// The core with the fewest connections, the lowest on a tie; `None` when the limit is reached.
    fn least_loaded(&self, kind: Kind) -> Option<usize> {
        let of_kind = &self.kinds[kind as usize];
        if of_kind.open.load(Ordering::Relaxed) >= of_kind.max {
            return None;
        }
        let counts: Vec<usize> = self.cores.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        (0..counts.len()).min_by_key(|&core| counts[core])
    }
}

/// One connection in its core's count. Dropping it takes the connection out, wherever it ended.
struct Counted {
    load: Arc<Load>,
    core: usize,
    kind: Kind,
}

impl Counted {
    fn new(load: &Arc<Load>, core: usize, kind: Kind) -> Self {
        load.cores[core].fetch_add(1, Ordering::Relaxed);
        load.kinds[kind as usize].open.fetch_add(1, Ordering::Relaxed);
        Self { load: load.clone(), core, kind }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.load.cores[self.core].fetch_sub(1, Ordering::Relaxed);
        self.load.kinds[self.kind as usize].open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A socket on its way to the core that will serve it.
struct Handed {
    socket: Accepted,
    counted: Counted,
}

/// The accepting side: knows every core's inbox. Clone it for each listener.
#[derive(Clone)]
pub struct Targets {
    inboxes: Vec<Sender<Handed>>,
    load: Arc<Load>,
}

/// The receiving side on one core.
pub struct Inbox(Receiver<Handed>);

/// The inboxes of `cores` cores, and the side that fills them. At most `max` connections are open at a time.
pub fn inboxes(cores: usize, max: ConnectionsMax) -> (Targets, Vec<Inbox>) {
    let load = Arc::new(Load {
        cores: (0..cores).map(|_| AtomicUsize::new(0)).collect(),
        kinds: [OfKind::new(max.grpc), OfKind::new(max.http), OfKind::new(max.grpc)],
    });
    let (inboxes, receivers) = (0..cores)
        .map(|_| {
            let (sender, receiver) = channel::bounded(limits::ACCEPT_INBOX_LEN);
            (sender, Inbox(receiver))
        })
        .unzip();
    (Targets { inboxes, load }, receivers)
}

impl Targets {
    /// The counts, for metrics.
    pub fn load(&self) -> Arc<Load> {
        self.load.clone()
    }

    /// Hands `socket` to a core, or closes it when there is no room for it.
    fn hand_over(&mut self, socket: Accepted, kind: Kind) {
        let handed = self.load.least_loaded(kind).map(|core| {
            let counted = Counted::new(&self.load, core, kind);
            self.inboxes[core].try_send(Handed { socket, counted })
        });
        if !matches!(handed, Some(Ok(()))) {
            self.load.kinds[kind as usize].refused.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Accepts until `stop`, then closes the listener. Run it on one core, one call for each listener.
///
/// Why it does not go on and close what comes: where another process holds the listener too, what comes is for that one.
/// Nothing is lost at the end, because an accept is one system call and no wait.
pub async fn run(listener: Listener, kind: Kind, mut targets: Targets, stop: impl Future<Output = ()>) {
    let mut stop = pin!(stop);
    while let Either::Right(socket) = time::race(&mut stop, listener.accept_patiently()).await {
        targets.hand_over(socket, kind);
    }
}

/// Serves what arrives in `inbox` on this core, until the accepting side is gone.
pub async fn serve_core<S: Store>(mut inbox: Inbox, server: Rc<Server<S>>) {
    while let Some(Handed { socket, counted }) = inbox.0.recv().await {
        match socket.own() {
            Ok(mut socket) => {
                if counted.kind != Kind::Http && socket.peer() == Peer::Unix {
                    let mut authority = AuthorityFilter::default();
                    socket.filter(Box::new(move |bytes| authority.pass(bytes)));
                }
                let origin = match socket.peer() {
                    Peer::Tcp(address) => address.ip().into(),
                    Peer::Unix => Origin::default(),
                };
                server.serve(counted.kind, socket, origin, counted);
            }
            Err(error) => tracing::debug!(%error, "a connection ended before it was served"),
        }
    }
}
