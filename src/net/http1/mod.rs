//! HTTP/1.1: one task for each connection, hyper for the protocol, our own clock for its limits.

mod body;
mod cache;
mod counters;
mod io;
mod routes;
mod waiting;

use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;

use super::server::{Gauge, Phase, Server};
use super::transport::{Carrier, Transport};
use crate::access::Peer;
use crate::budget::Rank;
use crate::limits;
use crate::rt::time::{self, Sleep};
use crate::store::Store;
pub use counters::HttpCounters;
use io::{Io, Stage, Watch};
use waiting::{Overdue, Waiting};

/// How long a connection may stay in each stage. Tests have shorter ones.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Between two requests.
    pub idle: Duration,
    /// From the first byte of a request's head to its last.
    pub head: Duration,
    /// Without a byte of a request's body or of its answer moving: at least this, at most twice as long.
    pub stall: Duration,
    /// Waiting for bytes of a request's body, beyond what those that came take at `HTTP_SPEED_FLOOR`.
    pub body: Duration,
    /// Waiting for the client to take its answers, likewise: at first, and after it has taken much.
    pub taking: Duration,
    pub taking_most: Duration,
    /// From the end of a request's head to the end of its body, and to that of its answer; zero for no limit
    /// (`--http_read_timeout`, `--http_write_timeout`).
    pub read: Duration,
    pub write: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            idle: Duration::from_millis(limits::HTTP_IDLE_MS),
            head: Duration::from_millis(limits::HTTP_HEAD_MS),
            stall: Duration::from_millis(limits::HTTP_STALL_MS),
            body: Duration::from_millis(limits::HTTP_SLOW_MS),
            taking: Duration::from_millis(limits::HTTP_SLOW_MS),
            taking_most: Duration::from_millis(limits::HTTP_SLOW_TAKING_MS_MAX),
            read: Duration::ZERO,
            write: Duration::ZERO,
        }
    }
}

/// Serves one connection to its end.
pub(super) async fn serve<T, S>(io: Transport<T>, peer: Peer, server: Rc<Server<S>>)
where
    T: Carrier + 'static,
    S: Store,
{
    // Why first for few: who looks at `/status` must be answered whatever others have taken. Why not `New` for the others: a flood
    // over HTTP must leave room for gRPC.
    let len = limits::HTTP_CONNECTION_HELD_LEN;
    let rank = if server.has_few_over_http() { Rank::First } else { Rank::More };
    // Why before the wait: those that wait are some of the few.
    let _open = Gauge::enter(&server.counters.http.connections);
    let Some(_memory) = server.make_room(len, rank).await else {
        server.counters.http.failed.count();
        return tracing::debug!("a connection was closed: those that are open take all of their memory");
    };
    let phases = server.watch_phase();
    let patience = server.patience.get();
    let watch = Rc::new(Watch::new(Waiting::new(patience.taking, patience.taking_most)));
    let (answering, asked, shares) = (server.clone(), watch.clone(), server.shares());
    let service = service_fn(move |request| {
        routes::answer(answering.clone(), peer.clone(), shares.clone(), Watch::request(&asked), request)
    });
    let mut connection = pin!(
        Builder::new()
            .max_buf_size(limits::HTTP_BUFFER_LEN)
            .max_header_size(limits::HTTP_HEAD_LEN_MAX)
            // Why none: hyper's timers cross threads, ours do not. `Watch` keeps these times.
            .header_read_timeout(None)
            .serve_connection(Io::new(io, watch.clone()), service)
    );
    let asking = watch.clone();
    let mut limit = Limit { watch, patience, entered: (0, time::now()), timer: None, overdue: Overdue::default() };
    let mut told = Phase::Serving;
    let mut farewell: Option<Sleep> = None;
    let ended = std::future::poll_fn(|context| {
        let phase = phases.poll_phase(context);
        if told < phase {
            told = phase;
            match phase {
                Phase::Serving => {}
                // Why not at once when nothing is asked: a request may be on its way, and its client could not know whether
                // to repeat it. It is answered, with a word that it was the last (`routes::answer`).
                Phase::Draining if asking.now().1 != Stage::Request => {
                    farewell = Some(time::sleep(server.farewell.get()));
                }
                Phase::Draining => connection.as_mut().graceful_shutdown(),
                Phase::Aborting => return Poll::Ready(Ok(())),
            }
        }
        if farewell.as_mut().is_some_and(|wait| Pin::new(wait).poll(context).is_ready()) {
            farewell = None;
            connection.as_mut().graceful_shutdown();
        }
        if let Poll::Ready(ended) = connection.as_mut().poll(context) {
            return Poll::Ready(ended);
        }
        if ready!(limit.poll(context)) != End::Unused {
            server.counters.http.failed.count();
        }
        Poll::Ready(Ok(()))
    })
    .await;
    match ended {
        Ok(()) => {}
        // A client that vanished is not a fault.
        Err(error) if error.is_parse() || error.is_parse_too_large() => {
            server.counters.http.failed.count();
            tracing::debug!(%error, "a connection was ended for breaking HTTP/1.1's rules or limits");
        }
        Err(error) => tracing::debug!(%error, "a connection broke"),
    }
}

/// Why a connection ends.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Unused,
    TooSlow,
}

/// Ends a connection that stays in one stage for too long.
struct Limit {
    watch: Rc<Watch>,
    patience: Patience,
    /// The number of the stage, and when it was first seen.
    entered: (u64, Instant),
    /// With the number of the stage that it is for.
    timer: Option<(u64, Sleep)>,
    overdue: Overdue,
}

impl Limit {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<End> {
        if self.overdue.poll(&self.watch.taking(), context).is_ready() {
            tracing::debug!("a client took its answer too slowly");
            return Poll::Ready(End::TooSlow);
        }
        loop {
            let (number, stage) = self.watch.now();
            if self.entered.0 != number {
                self.entered = (number, time::now());
            }
            let end = self.end(stage);
            let fresh = || {
                let time = match stage {
                    Stage::Idle => self.patience.idle,
                    Stage::Head => self.patience.head,
                    Stage::Request => self.patience.stall,
                };
                let at = time::now() + time;
                (number, time::deadline(end.map_or(at, |end| end.min(at))))
            };
            let (of, timer) = self.timer.get_or_insert_with(fresh);
            if *of != number {
                self.timer = Some(fresh());
                continue;
            }
            ready!(Pin::new(timer).poll(context));
            self.timer = None;
            if self.end(stage).is_some_and(|end| end <= time::now()) {
                tracing::debug!("a request took longer than --http_read_timeout or --http_write_timeout");
                return Poll::Ready(End::TooSlow);
            }
            if stage != Stage::Request || !self.watch.take_moved() {
                tracing::debug!(?stage, "a connection stood still for too long and was closed");
                return Poll::Ready(if stage == Stage::Idle { End::Unused } else { End::TooSlow });
            }
        }
    }

    /// When the stage has to end, however much moves.
    fn end(&self, stage: Stage) -> Option<Instant> {
        if stage != Stage::Request {
            return None;
        }
        let Patience { read, write, .. } = self.patience;
        let read = Some(read).filter(|read| !read.is_zero() && !self.watch.is_received());
        let limit = [read, Some(write).filter(|write| !write.is_zero())].into_iter().flatten().min()?;
        Some(self.entered.1 + limit)
    }
}
