//! One HTTP/2 connection: its limits, its turns, its end.

use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use h2::server::{Builder, Connection};
use tokio::io::{AsyncRead, AsyncWrite};

use super::gather::Gathered;
use super::grpc;
use super::payload::Payload;
use super::server::{Gauge, Phase, PhaseWatch, Server, Settings, count};
use super::tables::Tables;
use super::transport::Transport;
use crate::access::Peer;
use crate::budget::{Claim, Grant, Rank};
use crate::limits;
use crate::pure::memory_plan::Use;
use crate::rt::gate::Gate;
use crate::rt::{self, time};
use crate::store::Store;

/// Serves one connection to its end, and waits for its calls.
pub(super) async fn serve<T, S>(io: Transport<T>, peer: Peer, server: Rc<Server<S>>)
where
    T: AsyncRead + AsyncWrite + Unpin + 'static,
    S: Store,
{
    let Some(memory) = server.make_room(limits::CONNECTION_HELD_LEN, Rank::New).await else {
        count(&server.counters.connections_failed);
        return tracing::debug!("a connection was closed: those that are open take all of their memory");
    };
    let _open = Gauge::enter(&server.counters.connections);
    let purse = server.settings.purse.clone();
    let io = Gathered::new(io, server.buffers.clone(), server.shown.clone(), purse);
    let watch = server.watch_phase();
    let handshake = handshake(&io, &server.settings, &watch, server.farewell.get());
    let connection = match time::timeout(server.preface_timeout.get(), handshake).await {
        Ok(Some(Ok(connection))) => connection,
        Ok(Some(Err(error))) => return failed(&server, &error),
        Ok(None) => return,
        Err(time::Elapsed) => return tracing::debug!("a connection sent no HTTP/2 preface in time"),
    };
    let calls = Gate::default();
    let tables = Tables::new(memory);
    if let Err(error) = drive(connection, &io, tables, &server, &peer, &calls, &watch).await {
        failed(&server, &error);
    }
    // Why: the connection is gone and has told every stream; each call now notices and ends by itself.
    calls.close();
    calls.wait_empty().await;
}

fn failed<S>(server: &Server<S>, error: &h2::Error) {
    // Why: a vanished client is not a fault; breaking the protocol or our limits is.
    if error.is_io() {
        tracing::debug!(%error, "a connection broke");
    } else {
        count(&server.counters.connections_failed);
        tracing::debug!(%error, "a connection was ended for breaking HTTP/2's rules or limits");
    }
}

/// Sends our settings and waits for the client's preface. `None` when the server stops meanwhile; while it drains, a
/// client has `farewell` for it.
///
/// Why it has: who connected a moment before the drain may have sent a call along, and cannot know whether to repeat it.
async fn handshake<T: AsyncRead + AsyncWrite + Unpin>(
    io: &Gathered<T>,
    settings: &Settings,
    watch: &PhaseWatch,
    farewell: Duration,
) -> Option<Result<Connection<Gathered<T>, Payload>, h2::Error>> {
    let mut handshake = Builder::new()
        .initial_window_size(settings.stream_window)
        .initial_connection_window_size(limits::HTTP2_CONNECTION_WINDOW_MIN)
        // Why set: h2 would derive it from the small window that a connection begins with, and end one that sends a
        // short message on each of a few hundred streams.
        .data_frame_budget(data_frame_budget(settings))
        .max_frame_size(limits::HTTP2_FRAME_LEN_MAX)
        .max_concurrent_streams(limits::HTTP2_STREAMS_MAX)
        .max_header_list_size(limits::HTTP2_HEADER_LIST_LEN_MAX)
        .max_send_buffer_size(limits::HTTP2_SEND_BUFFER_LEN)
        // Each early answer to an upload resets its stream while data is in flight. What comes for a forgotten stream counts as an
        // error of the client, of which there may be many.
        .max_concurrent_reset_streams(limits::HTTP2_RESET_STREAMS_MAX)
        .reset_stream_duration(Duration::from_millis(limits::HTTP2_RESET_STREAM_KEEP_MS))
        // These two end the connection (ENHANCE_YOUR_CALM); so do too many CONTINUATION frames and too many tiny or
        // empty DATA frames, which h2 bounds by itself.
        .max_pending_accept_reset_streams(limits::HTTP2_PENDING_RESETS_MAX)
        .max_local_error_reset_streams(Some(limits::HTTP2_STREAM_ERRORS_MAX))
        .handshake(io.clone());
    let mut last: Option<time::Sleep> = None;
    std::future::poll_fn(move |context| {
        let result = Pin::new(&mut handshake).poll(context);
        // A broken socket shows at the next read.
        let _ = io.poll_send(context);
        if let Poll::Ready(result) = result {
            return Poll::Ready(Some(result));
        }
        if io.is_flooded() {
            return Poll::Ready(Some(Err(h2::Reason::ENHANCE_YOUR_CALM.into())));
        }
        match watch.poll_phase(context) {
            Phase::Serving => Poll::Pending,
            Phase::Draining => Pin::new(last.get_or_insert_with(|| time::sleep(farewell))).poll(context).map(|()| None),
            Phase::Aborting => Poll::Ready(None),
        }
    })
    .await
}

/// How far the unread DATA frames of a connection may fall short of 256 bytes, all together.
///
/// Why by the memory limit: they cost two bytes for each of these. A turn of a connection brings fewer (`pure::turn`).
fn data_frame_budget(settings: &Settings) -> usize {
    let part = settings.purse.share(Use::Windows) / limits::HTTP2_CONNECTION_WINDOW_PART;
    let (min, max) = (limits::HTTP2_DATA_FRAME_BUDGET_MIN, limits::HTTP2_DATA_FRAME_BUDGET);
    usize::try_from(4 * part).unwrap_or(usize::MAX).clamp(min, max)
}

/// Polls the connection until it ends: accepts calls, answers pings, moves data, and says goodbye when asked.
async fn drive<T, S>(
    mut connection: Connection<Gathered<T>, Payload>,
    io: &Gathered<T>,
    mut tables: Tables,
    server: &Rc<Server<S>>,
    peer: &Peer,
    calls: &Gate,
    watch: &PhaseWatch,
) -> Result<(), h2::Error>
where
    T: AsyncRead + AsyncWrite + Unpin + 'static,
    S: Store,
{
    let mut told = Phase::Serving;
    let mut farewell: Option<time::Sleep> = None;
    let Settings { max_connection_age, max_connection_age_grace, .. } = server.settings;
    let mut age = max_connection_age.map(|age| time::sleep(spread(age, rt::random_u64())));
    let mut grace: Option<time::Sleep> = None;
    let (shares, bodies) = (server.shares(), io.bodies());
    let mut window: Option<Grant> = None;
    let mut growth = Growth::default();
    let mut is_leaving = false;
    shares.requests.allow_waiting(0);
    // Each poll is a turn: what has come is read, all calls that came are started, all that they have said is sent.
    std::future::poll_fn(|context| {
        io.begin_turn(tables.frames(), growth.is_short);
        let phase = watch.poll_phase(context);
        if told < phase {
            told = phase;
            match phase {
                Phase::Serving => {}
                Phase::Draining => {
                    connection.graceful_shutdown();
                    farewell = Some(time::sleep(server.farewell.get()));
                }
                // Why not `abrupt_shutdown`: it waits for a client that may not read.
                Phase::Aborting => return Poll::Ready(Ok(())),
            }
        }
        if age.as_mut().is_some_and(|age| Pin::new(age).poll(context).is_ready()) {
            age = None;
            connection.graceful_shutdown();
            farewell.get_or_insert_with(|| time::sleep(server.farewell.get()));
            grace = max_connection_age_grace.map(time::sleep);
        }
        if grace.as_mut().is_some_and(|grace| Pin::new(grace).poll(context).is_ready()) {
            tracing::debug!("the calls of an old connection did not end in time and are cut");
            return Poll::Ready(Ok(()));
        }
        loop {
            match connection.poll_accept(context) {
                Poll::Ready(Some(Ok((request, respond)))) => {
                    growth.accepted += 1;
                    if window.is_none() && grpc::is_long(&request) {
                        window = larger_window(&server.settings, &mut connection);
                        io.widen(window.as_ref().map_or(0, Grant::len));
                        shares.requests.allow_waiting(waiting_max(server.settings.stream_window, &window));
                    }
                    grpc::start(server, peer, calls, &shares, &bodies, request, respond);
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(error)),
                Poll::Ready(None) => return Poll::Ready(Ok(())),
                Poll::Pending => break,
            }
        }
        let uncovered = tables.cover_headers(io.header_table_held());
        if uncovered > 0 && !is_leaving {
            tracing::debug!("a connection is told to go away: there is no memory for its table of header fields");
            is_leaving = true;
            connection.graceful_shutdown();
            farewell.get_or_insert_with(|| time::sleep(server.farewell.get()));
            context.waker().wake_by_ref();
        }
        if io.is_flooded() || uncovered > limits::HTTP2_HEADERS_OVER_LEN {
            connection.abrupt_shutdown(h2::Reason::ENHANCE_YOUR_CALM);
            let _ = connection.poll_accept(context);
            let _ = io.poll_send(context);
            return Poll::Ready(Err(h2::Reason::ENHANCE_YOUR_CALM.into()));
        }
        if farewell.is_some() {
            bodies.end_left(0);
        }
        // Why: the goodbye ends with the answer to a PING, and a peer that is gone, or asleep, never sends it.
        if farewell.as_mut().is_some_and(|wait| Pin::new(wait).poll(context).is_ready()) && !connection.has_streams() {
            connection.abrupt_shutdown(h2::Reason::NO_ERROR);
            let _ = connection.poll_accept(context);
            let _ = io.poll_send(context);
            return Poll::Ready(Ok(()));
        }
        growth.follow(&mut tables, shares.streams.count(), io);
        match io.poll_send(context) {
            Poll::Ready(Err(error)) => {
                tracing::debug!(%error, "a connection broke");
                return Poll::Ready(Ok(()));
            }
            Poll::Ready(Ok(())) => growth.accepted = 0,
            Poll::Pending => {}
        }
        let is_held_up = growth.is_short && growth.accepted > 0;
        let goes_on = io.hold_up(is_held_up) && !is_held_up;
        if io.is_cut() || goes_on {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    })
    .await
}

/// Follows how HTTP/2's tables grow.
#[derive(Default)]
struct Growth {
    /// Calls that came since all that was said has gone out. Why these: their answers may be what a client does not take, which
    /// then keep their streams open though the calls are over.
    accepted: usize,
    /// How many streams had been reset when this was looked at.
    resets: u64,
    /// There was no memory for what the tables have grown to.
    is_short: bool,
}

impl Growth {
    /// Charges what the tables have grown to.
    ///
    /// Where there is no memory for that, they stay as they are charged, and what is not taken holds up what would come. Why not ended:
    /// whoever is refused a call, as all are then, must not lose those that were let in.
    fn follow<T>(&mut self, tables: &mut Tables, open: usize, io: &Gathered<T>)
    where
        T: AsyncWrite + Unpin,
    {
        let resets = io.resets();
        if self.accepted == 0 && self.resets == resets && !self.is_short {
            return;
        }
        self.resets = resets;
        let open = open.max(self.accepted).min(limits::HTTP2_STREAMS_MAX as usize);
        self.is_short = !tables.cover(open, io.resets_remembered());
    }
}

/// A tenth more or less, by a random word: connections that began together do not end together.
fn spread(age: Duration, random: u64) -> Duration {
    let share = random as f64 / u64::MAX as f64;
    (age - age / 10).saturating_add((age / 5).mul_f64(share))
}

/// How many requests of a connection may wait for memory half-sent: as many as leave half of its window to others.
fn waiting_max(stream_window: u32, window: &Option<Grant>) -> usize {
    let window = window.as_ref().map_or(0, Grant::len) / (2 * u64::from(stream_window));
    usize::try_from(window).unwrap_or(usize::MAX).min(limits::REQUESTS_WAITING_MAX)
}

/// Gives a connection that uploads a larger window, as far as there is memory for it; it keeps it to its end, because
/// what a peer has been allowed to send cannot be taken back.
fn larger_window<T>(settings: &Settings, connection: &mut Connection<Gathered<T>, Payload>) -> Option<Grant>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let min = limits::HTTP2_CONNECTION_WINDOW_MIN;
    let most = settings.stream_window.saturating_mul(limits::HTTP2_CONNECTION_WINDOW_STREAMS).saturating_sub(min);
    let part = settings.purse.share(Use::Windows) / limits::HTTP2_CONNECTION_WINDOW_PART;
    let more = u32::try_from(part).unwrap_or(u32::MAX).min(most);
    let grant = settings.purse.grant(Use::Windows, u64::from(more), Claim::Further)?;
    connection.set_target_window_size(min + more);
    Some(grant)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: ages stay within a tenth of what was asked for, and nothing overflows. Method: the ends of the range.
    #[test]
    fn ages_are_spread() {
        let hour = Duration::from_secs(3600);
        assert_eq!(spread(hour, 0), hour * 9 / 10);
        assert_eq!(spread(hour, u64::MAX), hour * 11 / 10);
        assert!(spread(Duration::MAX, u64::MAX) > Duration::MAX / 10 * 9);
        assert!(spread(Duration::from_nanos(1), u64::MAX) <= Duration::from_nanos(2));
    }
}
