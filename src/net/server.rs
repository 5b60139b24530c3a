//! What one core holds to serve its connections, and how it stops.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::accept::Kind;
use super::gather::Buffers;
use super::http1::{self, HttpCounters, Patience};
use super::http2;
use super::memory::{Memory, Shares};
use super::methods::GrpcCounters;
use super::payload::Shown;
use super::tables::OpenStreams;
use super::tls::{self, Acceptors, TlsAcceptor, TlsStream};
use super::transport::{Carrier, Protocol, Transport};
use super::trust::Trust;
use crate::access::{Access, Origin, Peer};
use crate::budget::{Apart, Purse, Rank};
use crate::limits;
use crate::metrics::export::Exporter;
use crate::metrics::{Metric, Snapshot, TimeBounds};
use crate::pure::memory_plan::Use;
use crate::rt;
use crate::rt::gate::Gate;
use crate::rt::local::Local;
use crate::rt::published::Reader;
use crate::rt::time::{self, Either};
use crate::service::Services;
use crate::store::Store;

/// What an operator can set about connections.
#[derive(Clone)]
pub struct Settings {
    /// The window of each stream, in bytes (`--grpc_initial_window_size`); a connection's window is
    /// `limits::HTTP2_CONNECTION_WINDOW_STREAMS` times as large.
    pub stream_window: u32,
    /// How old a gRPC connection may become before its client is asked to connect anew (`--grpc_max_connection_age`), and
    /// how long its calls may take to end from then on.
    pub max_connection_age: Option<Duration>,
    pub max_connection_age_grace: Option<Duration>,
    /// This core's hold on the memory limit.
    pub purse: Purse,
    /// What handshakes are made with; `None` without TLS.
    pub tls: Option<Rc<Reader<Acceptors>>>,
    /// Who may do what.
    pub access: Rc<Access>,
    /// What gRPC calls must say of themselves; `None` for nothing.
    pub trust: Option<Rc<Trust>>,
    /// Into which buckets the times of calls and requests are counted.
    pub time_bounds: TimeBounds,
}

/// Whether this core serves or stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Serving,
    /// Connections have been told to go away (GOAWAY); what is in flight is finished.
    Draining,
    /// Connections are cut.
    Aborting,
}

/// Counts of this core.
pub struct Counters {
    /// Connections that are open now.
    pub connections: Cell<u64>,
    /// Calls whose handler runs now.
    pub calls_open: Cell<u64>,
    /// Calls that ended because the client cancelled, vanished, or its deadline passed.
    pub calls_cut: Cell<u64>,
    /// Connections that were ended for breaking HTTP/2's rules or our limits.
    pub connections_failed: Cell<u64>,
    /// New ones that wait for memory now.
    pub connections_waiting: Cell<u64>,
    pub handshakes: Handshakes,
    pub grpc: Rc<GrpcCounters>,
    pub http: Rc<HttpCounters>,
}

/// TLS handshakes: those under way, and how others ended.
#[derive(Default)]
pub struct Handshakes {
    under_way: Cell<u64>,
    done: Cell<u64>,
    failed: Cell<u64>,
    late: Cell<u64>,
    refused: Cell<u64>,
}

impl Counters {
    fn new(bounds: &TimeBounds) -> Self {
        Self {
            connections: Cell::default(),
            calls_open: Cell::default(),
            calls_cut: Cell::default(),
            connections_failed: Cell::default(),
            connections_waiting: Cell::default(),
            handshakes: Handshakes::default(),
            grpc: Rc::new(GrpcCounters::new(bounds)),
            http: Rc::new(HttpCounters::new(bounds)),
        }
    }

    fn report(&self, core: usize, into: &mut Snapshot) {
        into.add_labels(Metric::Connections, vec![core.to_string().into(), "grpc".into()], self.connections.get());
        into.add_for(Metric::ConnectionsFailed, ["grpc"], self.connections_failed.get());
        let Handshakes { done, failed, late, refused, .. } = &self.handshakes;
        for (result, count) in [("done", done), ("failed", failed), ("late", late), ("refused", refused)] {
            into.add_for(Metric::TlsHandshakes, [result], count.get());
        }
        into.add(Metric::CallsInflight, self.calls_open.get());
        into.add(Metric::CallsCut, self.calls_cut.get());
        self.grpc.report(into);
        self.http.report(core, into);
    }
}

/// The serving side of one core. Lives in an `Rc`; every connection and every call holds one.
pub struct Server<S> {
    pub(super) services: Services<S>,
    pub(super) settings: Settings,
    /// How long a new connection may wait for memory.
    pub(super) connection_wait: Cell<Duration>,
    /// How long a new connection may take to send the HTTP/2 preface.
    pub(super) preface_timeout: Cell<Duration>,
    /// How long a connection without calls may take to answer, or to ask for one thing more, when it is to end.
    pub(super) farewell: Cell<Duration>,
    /// How long a TLS handshake may take.
    pub(super) handshake_timeout: Cell<Duration>,
    /// How long a client may send nothing: of a unary request that it has begun, and of a Write.
    pub(super) request_stall: Cell<Duration>,
    pub(super) write_idle: Cell<Duration>,
    pub(super) patience: Cell<Patience>,
    pub(super) exporter: Exporter,
    pub(super) buffers: Buffers,
    pub(super) shown: Shown,
    /// Unary requests that are held as a whole, and replies until they have gone out.
    pub(super) request_memory: Memory,
    pub(super) reply_memory: Memory,
    pub counters: Counters,
    connections: Gate,
    phases: Local<Phases>,
}

struct Phases {
    now: Phase,
    /// Whom to wake when the phase changes: connections, and calls that would not end by themselves.
    watchers: BTreeMap<u64, Waker>,
    next_watcher: u64,
}

/// A view of the phase. Leaves nothing behind when dropped.
pub(super) struct PhaseWatch {
    phases: Local<Phases>,
    number: u64,
}

impl<S: Store> Server<S> {
    pub fn new(services: Services<S>, settings: Settings, exporter: Exporter) -> Rc<Self> {
        let counters = Counters::new(&settings.time_bounds);
        Rc::new(Self {
            services,
            request_memory: Memory::new(settings.purse.clone(), Use::Requests),
            reply_memory: Memory::new(settings.purse.clone(), Use::Replies),
            settings,
            connection_wait: Cell::new(Duration::from_millis(limits::CONNECTION_WAIT_MS)),
            preface_timeout: Cell::new(Duration::from_millis(limits::HTTP2_PREFACE_MS)),
            farewell: Cell::new(Duration::from_millis(limits::HTTP2_FAREWELL_MS)),
            handshake_timeout: Cell::new(Duration::from_millis(limits::TLS_HANDSHAKE_MS)),
            request_stall: Cell::new(Duration::from_millis(limits::REQUEST_STALL_MS)),
            write_idle: Cell::new(Duration::from_millis(limits::WRITE_IDLE_MS)),
            patience: Cell::default(),
            exporter,
            buffers: Buffers::default(),
            shown: Shown::default(),
            counters,
            connections: Gate::default(),
            phases: Local::new(Phases { now: Phase::Serving, watchers: BTreeMap::new(), next_watcher: 0 }),
        })
    }

    /// Serves one connection in the background; a panic, in HTTP/2 or TLS for instance, costs that connection. `hold` is dropped when the connection and all of its calls have ended.
    pub fn serve<T>(self: &Rc<Self>, kind: Kind, io: T, origin: Origin, hold: impl Sized + 'static)
    where
        T: Carrier + 'static,
    {
        let server = self.clone();
        match self.settings.tls.as_ref().map(|tls| tls.with(|_, acceptors| acceptors.of(kind))) {
            None => {
                self.connections.spawn(rt::contain(async move {
                    server.speak(kind, Transport::plain(io), Peer { origin, certificate: None }).await;
                    drop(hold);
                }));
            }
            // Why bulk work: signing takes up to a millisecond, and a flood of handshakes must not delay what is served.
            Some(acceptor) => {
                self.connections.spawn_bulk(rt::contain(async move {
                    let Some((stream, peer, memory)) = server.secure(kind, acceptor, io, origin).await else { return };
                    server.clone().connections.spawn(rt::contain(async move {
                        server.speak(kind, Transport::tls(stream), peer).await;
                        drop((memory, hold));
                    }));
                }));
            }
        }
    }

    /// The TLS handshake of a connection, and its memory.
    async fn secure<T>(
        &self,
        kind: Kind,
        acceptor: TlsAcceptor,
        io: T,
        origin: Origin,
    ) -> Option<(TlsStream<T>, Peer, Apart)>
    where
        T: Carrier,
    {
        let rank = if kind == Kind::Http && self.has_few_over_http() { Rank::First } else { Rank::New };
        let Handshakes { under_way, done, failed, late, refused } = &self.counters.handshakes;
        if under_way.get() >= limits::TLS_HANDSHAKES_MAX {
            count(refused);
            return None;
        }
        let _under_way = Gauge::enter(under_way);
        let Some(memory) = self.make_room(limits::TLS_HELD_LEN, rank).await else {
            count(refused);
            return None;
        };
        let memory = memory.for_tls();
        let watch = self.watch_phase();
        let stopping = std::future::poll_fn(|context| match watch.poll_phase(context) {
            Phase::Serving => Poll::Pending,
            Phase::Draining | Phase::Aborting => Poll::Ready(()),
        });
        let handshake = time::timeout(self.handshake_timeout.get(), tls::handshake(acceptor, io, origin));
        match time::race(handshake, stopping).await {
            Either::Left(Ok(Ok((stream, peer)))) => {
                count(done);
                return Some((stream, peer, memory));
            }
            Either::Left(Ok(Err(error))) => {
                count(failed);
                tracing::debug!(%error, "a TLS handshake failed");
            }
            Either::Left(Err(time::Elapsed)) => count(late),
            Either::Right(()) => {}
        }
        None
    }

    /// Serves what is spoken on a connection.
    async fn speak<T>(self: Rc<Self>, kind: Kind, mut io: Transport<T>, peer: Peer)
    where
        T: Carrier + 'static,
    {
        match kind {
            Kind::Grpc => http2::serve(io, peer, self).await,
            Kind::Http => http1::serve(io, peer, self).await,
            Kind::Both => {
                // What is spoken counts its own.
                let Some(memory) = self.make_room(limits::CONNECTION_HELD_LEN, Rank::New).await else {
                    return count(&self.counters.connections_failed);
                };
                match time::timeout(self.preface_timeout.get(), io.protocol()).await {
                    Ok(Ok(Some(Protocol::Http2))) => {
                        drop(memory);
                        http2::serve(io, peer, self).await;
                    }
                    Ok(Ok(Some(Protocol::Http1))) => {
                        drop(memory);
                        http1::serve(io, peer, self).await;
                    }
                    Ok(Ok(None) | Err(_)) | Err(time::Elapsed) => tracing::debug!("a connection said nothing"),
                }
            }
        }
    }

    /// True when one more connection over HTTP is one of few, which may have what is kept for who looks after the server.
    pub(super) fn has_few_over_http(&self) -> bool {
        self.counters.http.connections.get() < limits::HTTP_CONNECTIONS_FIRST_MAX
    }

    /// Memory for a new connection. Few may wait a little for it; `None` for those who find none.
    pub(super) async fn make_room(&self, len: u64, rank: Rank) -> Option<Apart> {
        let take = || self.settings.purse.apart_for(len, rank);
        let memory = take();
        let waiting = &self.counters.connections_waiting;
        // Why not for more of what there is enough of: these would take the places of others.
        if memory.is_some() || rank == Rank::More || waiting.get() >= limits::CONNECTIONS_WAITING_MAX {
            return memory;
        }
        let _waiting = Gauge::enter(waiting);
        let until = time::now() + self.connection_wait.get();
        while time::now() < until && !self.is_draining() {
            time::sleep(Duration::from_millis(limits::MEMORY_WATCH_MS)).await;
            if let Some(memory) = take() {
                return Some(memory);
            }
        }
        None
    }

    /// Adds what this core has counted of connections and calls, and what they hold.
    pub fn report(&self, core: usize, into: &mut Snapshot) {
        self.counters.report(core, into);
        self.settings.access.report(into);
        // One for all.
        if let Some(tls) = self.settings.tls.as_ref().filter(|_| core == 0) {
            into.add(Metric::TlsNotAfter, tls.with(|_, acceptors| acceptors.not_after_s()));
        }
        self.services.store.report(into);
        self.settings.trust.iter().for_each(|trust| trust.report(into));
        let purse = &self.settings.purse;
        for used in Use::ALL {
            into.add_for(Metric::MemoryHeld, [used.name()], purse.held(used));
        }
        into.add_for(Metric::MemoryHeld, ["connections"], purse.apart() - purse.apart_tls());
        into.add_for(Metric::MemoryHeld, ["tls"], purse.apart_tls());
    }

    /// What connections from now on have for a whole HTTP request and for its answer; zero for no limit.
    pub fn set_http_times(&self, read: Duration, write: Duration) {
        self.patience.set(Patience { read, write, ..self.patience.get() });
    }

    /// Says whether `/metrics` is served from now on.
    pub fn enable_metrics(&self, is_enabled: bool) {
        self.exporter.enable(is_enabled);
    }

    /// Tells every connection to go away and finishes what is in flight; new connections get the same. Wait for
    /// `drained`, with a deadline, and then `abort`.
    pub fn drain(&self) {
        self.enter(Phase::Draining);
    }

    /// Cuts every connection.
    pub fn abort(&self) {
        self.enter(Phase::Aborting);
    }

    /// True from `drain` on.
    pub(super) fn is_draining(&self) -> bool {
        self.phases.with(|phases| phases.now > Phase::Serving)
    }

    /// Calls and HTTP requests for blobs that have begun on this core so far, and how many run now.
    pub fn asked(&self) -> (u64, u64) {
        let (http_begun, http_open) = self.counters.http.asked();
        (self.counters.grpc.begun() + http_begun, self.counters.calls_open.get() + http_open)
    }

    /// Ends when no connection is open.
    pub async fn drained(&self) {
        self.connections.wait_empty().await;
    }

    /// The parts of a new connection.
    pub(super) fn shares(&self) -> Shares {
        Shares {
            requests: self.request_memory.share(),
            replies: self.reply_memory.share(),
            streams: OpenStreams::default(),
        }
    }

    pub(super) fn watch_phase(&self) -> PhaseWatch {
        let number = self.phases.with(|phases| {
            phases.next_watcher += 1;
            phases.next_watcher
        });
        PhaseWatch { phases: self.phases.clone(), number }
    }

    fn enter(&self, phase: Phase) {
        let watchers = self.phases.with(|phases| {
            phases.now = phases.now.max(phase);
            std::mem::take(&mut phases.watchers)
        });
        watchers.into_values().for_each(Waker::wake);
    }
}

impl PhaseWatch {
    /// The phase now; wakes this task when it changes.
    pub(super) fn poll_phase(&self, context: &Context<'_>) -> Phase {
        self.phases.with(|phases| {
            match phases.watchers.get_mut(&self.number) {
                Some(waker) => waker.clone_from(context.waker()),
                None => {
                    phases.watchers.insert(self.number, context.waker().clone());
                }
            }
            phases.now
        })
    }
}

impl Drop for PhaseWatch {
    fn drop(&mut self) {
        self.phases.with(|phases| phases.watchers.remove(&self.number));
    }
}

/// One more in a gauge, until dropped.
pub(super) struct Gauge<'a>(&'a Cell<u64>);

impl<'a> Gauge<'a> {
    pub(super) fn enter(cell: &'a Cell<u64>) -> Self {
        count(cell);
        Self(cell)
    }
}

impl Drop for Gauge<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Adds one.
pub(super) fn count(cell: &Cell<u64>) {
    cell.set(cell.get() + 1);
}
