//! New connections: core 0 accepts, and hands each socket to the core that serves the fewest.
//!
//! Why: SO_REUSEPORT spreads connections by a hash, and the normal case is few, long-lived ones, so some cores would
//! get several and others none.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crate::limits;
use crate::net::Server;
use crate::rt::channel::{self, Receiver, Sender};
use crate::rt::tcp::{Accepted, Listener};
use crate::store::Store;

/// How many connections each core serves or is about to serve, and what was turned away. Shared by all cores.
pub struct Load {
    cores: Box<[AtomicUsize]>,
    connections_max: usize,
    /// Connections closed at once because `connections_max` were open, or because every inbox was full.
    refused: AtomicU64,
    closing: AtomicBool,
}

impl Load {
    /// Connections open now on all cores.
    pub fn connections(&self) -> usize {
        self.cores.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Connections turned away since the start.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// From now on new connections are closed at once, so that their clients go elsewhere. The accept task goes on,
    /// because a cancelled accept could lose a socket and leave its client hanging.
    pub fn stop_accepting(&self) {
        self.closing.store(true, Ordering::Relaxed);
    }

    /// The core with the fewest connections, the lowest on a tie; `None` when the limit is reached.
    fn least_loaded(&self) -> Option<usize> {
        let counts: Vec<usize> = self.cores.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        if counts.iter().sum::<usize>() >= self.connections_max {
            return None;
        }
        (0..counts.len()).min_by_key(|&core| counts[core])
    }
}

/// One connection in its core's count. Dropping it takes the connection out, wherever it ended.
struct Counted {
    load: Arc<Load>,
    core: usize,
}

impl Counted {
    fn new(load: &Arc<Load>, core: usize) -> Self {
        load.cores[core].fetch_add(1, Ordering::Relaxed);
        Self { load: load.clone(), core }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.load.cores[self.core].fetch_sub(1, Ordering::Relaxed);
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

/// The inboxes of `cores` cores, and the side that fills them. At most `connections_max` connections are open at a time.
pub fn inboxes(cores: usize, connections_max: usize) -> (Targets, Vec<Inbox>) {
    let load = Arc::new(Load {
        cores: (0..cores).map(|_| AtomicUsize::new(0)).collect(),
        connections_max,
        refused: AtomicU64::new(0),
        closing: AtomicBool::new(false),
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
    /// The counts, for metrics and for `stop_accepting`.
    pub fn load(&self) -> Arc<Load> {
        self.load.clone()
    }

    /// Hands `socket` to a core, or closes it when there is no room for it.
    fn hand_over(&mut self, socket: Accepted) {
        if self.load.closing.load(Ordering::Relaxed) {
            return;
        }
        let handed = self.load.least_loaded().map(|core| {
            let counted = Counted::new(&self.load, core);
            self.inboxes[core].try_send(Handed { socket, counted })
        });
        if !matches!(handed, Some(Ok(()))) {
            self.load.refused.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Accepts for ever. Run it detached on one core, one call for each listener.
pub async fn run(listener: Listener, mut targets: Targets) {
    loop {
        let socket = listener.accept_patiently().await;
        targets.hand_over(socket);
    }
}

/// Serves what arrives in `inbox` on this core, until the accepting side is gone.
pub async fn serve_core<S: Store>(mut inbox: Inbox, server: Rc<Server<S>>) {
    while let Some(Handed { socket, counted }) = inbox.0.recv().await {
        match socket.own() {
            Ok(socket) => server.serve(socket, counted),
            Err(error) => tracing::debug!(%error, "a connection ended before it was served"),
        }
    }
}
