//! Reading through: what a shard does not have, its owner asks the backend for, once for all who wait, and hands on while
//! it fills the cache. Any trouble of a backend is a miss.

mod follower;

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustc_hash::FxHashMap;

use super::blob_disk::{BlobDisk, Older};
use super::object::Content;
use super::session::{Session, is_small};
use super::worker::Worker;
use crate::backend::s3::HEAD_TIME;
use crate::backend::settings::ObjectFormat;
use crate::backend::{Backend, ReadBody};
use crate::limits::{
    ACTION_RESULT_LEN_MAX, BACKEND_TURN_MS, BACKEND_WAITING_MAX, FLIGHT_WINDOW_LEN, FLIGHTS_MAX, FRAME_LEN,
    READER_WAIT_MS,
};
use crate::pure::action_result::References;
use crate::pure::casblob::{self, Header};
use crate::pure::digest::{Digest, Hash};
use crate::pure::flight::{Phase, Window};
use crate::pure::upload_queue::{ObjectKind, Upload};
use crate::pure::wrong_objects::Flaw;
use crate::rt::local::{Event, Local, Permit, Permits};
use crate::rt::{self, HandlerPanicked};
use crate::store::{ActionEntry, ActionKey, Blob, Get, Purpose, StoreError, Wanted};

/// The flights of one core from one backend.
pub(super) struct Flights {
    by_name: Local<FxHashMap<Upload, Rc<Flight>>>,
    permits: Permits,
    /// Requests that wait for the backend.
    waiting: Rc<Cell<usize>>,
}

/// One of the requests that may wait for the backend.
struct Waiting(Rc<Cell<usize>>);

impl Flights {
    /// `running` objects may come in at a time.
    pub fn new(running: usize) -> Self {
        let permits = Permits::new(running);
        Self { by_name: Local::new(FxHashMap::default()), permits, waiting: Rc::default() }
    }

    /// Ends the flights that `which` names; their readers find a miss.
    pub fn doom(&self, which: impl Fn(&Upload) -> bool) {
        let flights = self.by_name.with(|by_name| {
            by_name.iter().filter(|(name, _)| which(name)).map(|(_, flight)| flight.clone()).collect::<Vec<_>>()
        });
        flights.iter().for_each(|flight| flight.doom());
    }

    fn wait(&self) -> Option<Waiting> {
        let waiting = self.waiting.get();
        (waiting < BACKEND_WAITING_MAX).then(|| {
            self.waiting.set(waiting + 1);
            Waiting(self.waiting.clone())
        })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// An object on its way from a backend.
pub(super) struct Flight {
    window: Local<Window>,
    changed: Event,
    /// Readers that keep up, and how far the first of them is.
    readers: Cell<usize>,
    foremost: Cell<u64>,
    /// Of a blob that was asked for by its hash alone: its size, once the object has said it.
    size: Cell<Option<u64>>,
    /// It must not land: what it brings has been purged.
    is_doomed: Cell<bool>,
    doomed: Event,
}

impl Flight {
    fn new() -> Self {
        Self {
            window: Local::new(Window::new(FLIGHT_WINDOW_LEN)),
            changed: Event::default(),
            readers: Cell::new(0),
            foremost: Cell::new(0),
            size: Cell::new(None),
            is_doomed: Cell::new(false),
            doomed: Event::default(),
        }
    }

    fn doom(&self) {
        self.is_doomed.set(true);
        self.doomed.notify();
    }

    /// Lets `flown` run to its end, or not one step further once the flight is doomed. Why not one: that step might store what
    /// has been purged.
    async fn unless_doomed<T>(&self, flown: impl Future<Output = T>) -> Option<T> {
        let doomed = async {
            loop {
                let doomed = self.doomed.wait();
                if self.is_doomed.get() {
                    return;
                }
                doomed.await;
            }
        };
        match rt::time::race(doomed, flown).await {
            rt::time::Either::Left(()) => None,
            rt::time::Either::Right(end) => Some(end),
        }
    }

    pub fn enter(&self, phase: Phase) {
        self.window.with(|window| window.enter(phase));
        self.changed.notify();
    }

    fn phase(&self) -> Phase {
        self.window.with(|window| window.phase())
    }

    /// Waits like `reached`, on behalf of a client. A flight that is still waiting for its turn counts as missed after the time in
    /// which a dead backend would be given up.
    async fn answered(&self, is_wanted: impl Fn(Phase) -> bool) -> Phase {
        let begun = self.reached(|phase| phase != Phase::Asking);
        match rt::time::timeout(HEAD_TIME, begun).await {
            Ok(_) => self.reached(is_wanted).await,
            Err(_) => Phase::Missed,
        }
    }

    /// Waits until the flight is in one of the phases that `is_wanted` names.
    async fn reached(&self, is_wanted: impl Fn(Phase) -> bool) -> Phase {
        loop {
            let changed = self.changed.wait();
            let phase = self.phase();
            if is_wanted(phase) {
                return phase;
            }
            changed.await;
        }
    }

    /// Hands a piece to the readers. Waits a little for the foremost of those that keep up; not for one that stands.
    async fn push(&self, piece: Bytes) {
        let (from, start) = self.window.with(|window| (window.start(), window.start_after(piece.len() as u64)));
        let patience = rt::time::sleep(Duration::from_millis(READER_WAIT_MS));
        let caught_up = async {
            loop {
                let changed = self.changed.wait();
                let foremost = self.foremost.get();
                if self.readers.get() == 0 || foremost >= start || foremost < from {
                    return;
                }
                changed.await;
            }
        };
        let _ = rt::time::race(caught_up, patience).await;
        self.window.with(|window| window.push(piece));
        self.changed.notify();
    }
}

/// A reader that keeps up, as long as this lives.
struct Following<'a>(&'a Flight);

impl<'a> Following<'a> {
    fn new(flight: &'a Flight) -> Self {
        flight.readers.set(flight.readers.get() + 1);
        Self(flight)
    }
}

impl Drop for Following<'_> {
    fn drop(&mut self) {
        self.0.readers.set(self.0.readers.get() - 1);
        self.0.changed.notify();
    }
}

/// Where a flight begins.
enum Start {
    /// The backend is asked once it is this flight's turn, if that is by `turn`. `deadline` is that of the answer's head, so
    /// that nobody waits longer for a backend that gives none: also not for those who asked it earlier.
    Asking { turn: Instant, deadline: Instant },
    /// It has answered.
    Answered(Box<Incoming>),
}

/// An object that is coming in.
struct Incoming {
    body: ReadBody,
    /// What has come of it.
    first: Bytes,
    _permit: Permit,
}

/// The longest wait for a turn.
const TURN_TIME: Duration = Duration::from_millis(BACKEND_TURN_MS);

/// The size of a blob that is known by its hash alone. Why 0: no blob of that size gets here.
const UNKNOWN: u64 = 0;

/// How a flight ended, for its log and counters.
pub(super) enum Landing {
    Landed,
    Missed,
    /// The backend, or the way from it, broke off.
    Broken,
    /// The object's bytes are not what the hash says.
    Wrong(String),
    /// It has another size than was asked for.
    OtherSize(String),
    /// Our own trouble.
    NotStored(StoreError),
}

impl<D: BlobDisk> Worker<D> {
    /// Whether a blob that is not here may be asked for elsewhere.
    ///
    /// Why the breaker is asked before anybody waits: while it is open a miss costs nothing, and no task's turn.
    pub(super) fn reads_through(&self, digest: &Digest) -> bool {
        let fits = |backend: &&Backend| digest.size <= backend.settings().max_proxy_blob_size;
        // See `Scope::raw`.
        self.backend().filter(|_| !self.scope().is_raw()).filter(fits).is_some_and(Backend::takes_reads)
    }

    /// Whether things that are not here may be asked for elsewhere.
    pub(super) fn takes_reads(&self) -> bool {
        self.backend().is_some_and(Backend::takes_reads)
    }

    /// A blob that is not here and that `reads_through` allows, from the backend. `None` is a miss.
    pub(super) async fn get_there(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        match self.await_blob(get.digest, !is_small(&get.digest)).await {
            None => Ok(None),
            Some((Phase::Asking | Phase::Missed | Phase::Failed, _)) => Ok(None),
            Some((Phase::Landed, _)) => self.get_here(get).await,
            Some((Phase::Streaming, flight)) => self.follow(get, flight),
        }
    }

    /// Waits until a blob can be followed, if `follows`, or else until its flight has ended.
    async fn await_blob(&self, digest: Digest, follows: bool) -> Option<(Phase, Rc<Flight>)> {
        let (_, flights) = self.backend_and_flights()?;
        let _waiting = flights.wait()?;
        let flight = self.board(self.name(ObjectKind::Cas, digest))?;
        let wanted = |phase| match phase {
            Phase::Asking => false,
            Phase::Streaming => follows,
            Phase::Landed | Phase::Missed | Phase::Failed => true,
        };
        Some((flight.answered(wanted).await, flight))
    }

    /// Waits until an action's flight has ended.
    async fn await_action(&self, key: ActionKey) -> Option<Phase> {
        let (_, flights) = self.backend_and_flights()?;
        let _waiting = flights.wait()?;
        let digest = Digest { hash: key.hash, size: key.size.unwrap_or(0) };
        let flight = self.board(self.name(ObjectKind::Action, digest))?;
        Some(flight.answered(|phase| !matches!(phase, Phase::Asking | Phase::Streaming)).await)
    }

    /// Waits until what is wanted is here or on its way, or by `until` here; false when it is not to be had. What comes later
    /// fills the cache.
    pub(super) async fn fetch(&self, wanted: Wanted, until: Option<Instant>) -> bool {
        match wanted {
            Wanted::Blob(digest) if self.has_blob(&digest).await => return true,
            Wanted::Blob(digest) if !self.reads_through(&digest) => return false,
            Wanted::Action(_) if !self.takes_reads() => return false,
            Wanted::Blob(_) | Wanted::Action(_) => {}
        }
        let ended = async {
            match wanted {
                Wanted::Blob(digest) => {
                    let follows = until.is_none() && !is_small(&digest);
                    self.await_blob(digest, follows).await.map(|(phase, _)| phase)
                }
                Wanted::Action(key) => self.await_action(key).await,
            }
        };
        let phase = match until {
            None => ended.await,
            // Why in this order: what has not begun by then is not asked for.
            Some(until) => match rt::time::race(rt::time::deadline(until), Box::pin(ended)).await {
                rt::time::Either::Left(()) => None,
                rt::time::Either::Right(phase) => phase,
            },
        };
        matches!(phase, Some(Phase::Streaming | Phase::Landed))
    }

    /// The size of a blob that is not here, from a backend that takes reads. `None` is a miss.
    pub(super) async fn size_there(&self, hash: Hash, purpose: Purpose) -> Option<u64> {
        let (backend, flights) = self.backend_and_flights()?;
        let name = self.name(ObjectKind::Cas, Digest { hash, size: UNKNOWN });
        let waiting = flights.wait()?;
        if purpose == Purpose::Look {
            return backend.size_of(&name).await;
        }
        let flight = self.board(name)?;
        flight.answered(|phase| !matches!(phase, Phase::Asking | Phase::Streaming)).await;
        drop(waiting);
        let size = flight.size.get()?;
        self.fetch(Wanted::Blob(Digest { hash, size }), None).await.then_some(size)
    }

    /// An action that is not here, from a backend that takes reads. `None` is a miss.
    pub(super) async fn action_there(&self, key: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        match self.await_action(key).await {
            Some(Phase::Landed) => self.action_here(key).await,
            None | Some(Phase::Asking | Phase::Streaming | Phase::Missed | Phase::Failed) => Ok(None),
        }
    }

    /// Of the blobs that are missing here, those that the backend has are not missing. For `until` see `Router`.
    pub(super) async fn find_there(&self, digests: &[Digest], missing: &mut [bool], until: Option<Instant>) {
        let Some((backend, flights)) = self.backend_and_flights().filter(|_| !self.scope().is_raw()) else { return };
        let Some(_waiting) = flights.wait() else { return };
        let places: Vec<usize> = (0..digests.len()).filter(|&at| missing[at]).collect();
        if places.is_empty() {
            return;
        }
        let asked: Vec<Digest> = places.iter().map(|&at| digests[at]).collect();
        for (at, present) in places.into_iter().zip(backend.present(&asked, self.scope(), until).await) {
            missing[at] = !present;
        }
    }

    /// See `Store::is_absent`.
    pub(super) async fn is_absent(&self, digest: &Digest) -> bool {
        // See `Scope::raw`.
        let backend = self.backend().filter(|_| !self.scope().is_raw());
        !self.has_blob(digest).await && backend.is_none_or(|backend| backend.lacks(digest, self.scope()))
    }

    /// The flight of `name`: the one that is on its way, or a new one. `None` when there are too many.
    fn board(&self, name: Upload) -> Option<Rc<Flight>> {
        let (flight, is_new) = self.enlist(&name)?;
        let now = rt::time::now();
        let asking = Start::Asking { turn: now + TURN_TIME, deadline: now + HEAD_TIME };
        match is_new {
            true => self.take_off(name, flight, asking),
            false => Some(flight),
        }
    }

    /// The flight of `name`, and whether it was made just now. `None` when there are too many.
    fn enlist(&self, name: &Upload) -> Option<(Rc<Flight>, bool)> {
        let (_, flights) = self.backend_and_flights()?;
        flights.by_name.with(|by_name| {
            if let Some(flight) = by_name.get(name) {
                return Some((flight.clone(), false));
            }
            let flight = (by_name.len() < FLIGHTS_MAX).then(|| Rc::new(Flight::new()))?;
            by_name.insert(name.clone(), flight.clone());
            Some((flight, true))
        })
    }

    /// Starts a flight that was just enlisted. `None` when the worker ends.
    fn take_off(&self, name: Upload, flight: Rc<Flight>, from: Start) -> Option<Rc<Flight>> {
        let (worker, flown, flying) = (self.clone(), name.clone(), flight.clone());
        let begun = self.gate().spawn(async move {
            let _busy = rt::busy();
            worker.fly(flown, &flying, from).await;
        });
        if begun {
            return Some(flight);
        }
        let (_, flights) = self.backend_and_flights()?;
        flights.by_name.with(|by_name| by_name.remove(&name));
        None
    }

    async fn fly(&self, name: Upload, flight: &Rc<Flight>, from: Start) {
        let (backend, flights) = self.backend_and_flights().expect("only with a backend is there a flight");
        let flown = Box::pin(async {
            let body = match from {
                Start::Asking { turn, deadline } => {
                    let taken = rt::time::race(flights.permits.take(), rt::time::deadline(turn)).await;
                    let rt::time::Either::Left(permit) = taken else { return Landing::Missed };
                    let Some(body) = backend.fetch(&name, deadline).await else { return Landing::Missed };
                    Incoming { body, first: Bytes::new(), _permit: permit }
                }
                Start::Answered(incoming) => *incoming,
            };
            match name.kind {
                ObjectKind::Cas if name.digest.size == UNKNOWN => self.fly_sizing(backend, &name, flight, body).await,
                ObjectKind::Cas => self.fly_blob(backend, name.digest, flight, body).await,
                // Why boxed: it is rare, and its future is larger than all others.
                ObjectKind::Action if name.scope.is_raw() => {
                    Box::pin(self.fly_raw(backend, &name, flight, body.body)).await
                }
                ObjectKind::Action => self.fly_action(&name, flight, body).await,
            }
        });
        // Why caught: else nobody would be told that it has ended, and its name would stay taken.
        let landing = match rt::time::race(backend.stopped(), flight.unless_doomed(rt::catch(flown))).await {
            rt::time::Either::Left(()) | rt::time::Either::Right(None | Some(Err(HandlerPanicked))) => Landing::Broken,
            rt::time::Either::Right(Some(Ok(landing))) => landing,
        };
        let phase = match landing {
            Landing::Landed => Phase::Landed,
            Landing::Missed => Phase::Missed,
            Landing::Broken => Phase::Failed,
            Landing::Wrong(detail) => {
                backend.found_wrong(&name, Flaw::Content, &detail);
                Phase::Failed
            }
            Landing::OtherSize(detail) => {
                backend.found_wrong(&name, Flaw::Size, &detail);
                Phase::Failed
            }
            Landing::NotStored(error) => {
                tracing::debug!(digest = %name.digest, "a blob from the backend could not be stored: {error}");
                Phase::Failed
            }
        };
        // Why first: who comes from now on finds it in the cache, or asks anew. Why not yet what told a size: the blob is on its
        // way, and who asks for its size meanwhile need not ask the backend.
        if flight.size.get().is_none() {
            flights.by_name.with(|by_name| {
                by_name.remove(&name);
                if name.kind == ObjectKind::Cas {
                    by_name.remove(&Upload { digest: Digest { size: UNKNOWN, ..name.digest }, ..name.clone() });
                }
            });
        }
        flight.enter(phase);
    }

    /// Finds out how large a blob is, and hands the rest on to the flight of the blob as it is called then.
    async fn fly_sizing(&self, backend: &Backend, name: &Upload, flight: &Flight, mut incoming: Incoming) -> Landing {
        let size = match backend.settings().format {
            ObjectFormat::Raw => match incoming.body.content_length() {
                Some(len) => Ok(len),
                None => return Landing::Missed,
            },
            ObjectFormat::Casblob => {
                while incoming.first.len() < casblob::FIXED_LEN {
                    match incoming.body.next().await {
                        Ok(Some(piece)) if incoming.first.is_empty() => incoming.first = piece,
                        Ok(Some(piece)) => incoming.first = [&incoming.first[..], &piece[..]].concat().into(),
                        Ok(None) => break,
                        Err(_) => return Landing::Broken,
                    }
                }
                match incoming.first.first_chunk() {
                    Some(fixed) => {
                        Header::parse(fixed).map(|header| header.raw_size).map_err(|error| error.to_string())
                    }
                    None => Err(format!("it has {} bytes", incoming.first.len())),
                }
            }
        };
        let size = match size {
            Ok(0) => return Landing::Wrong("it has 0 bytes".into()),
            Ok(size) if size > backend.settings().max_proxy_blob_size => return Landing::Missed,
            Ok(size) => size,
            Err(detail) => return Landing::Wrong(detail),
        };
        let sized = self.name(ObjectKind::Cas, Digest { size, ..name.digest });
        let Some((next, is_new)) = self.enlist(&sized) else { return Landing::Missed };
        if is_new && self.take_off(sized, next, Start::Answered(Box::new(incoming))).is_none() {
            return Landing::Missed;
        }
        flight.size.set(Some(size));
        Landing::Landed
    }

    async fn fly_blob(&self, backend: &Backend, digest: Digest, flight: &Flight, incoming: Incoming) -> Landing {
        let Incoming { mut body, mut first, _permit } = incoming;
        let format = backend.settings().format;
        // Whoever asked for the blob by its hash is about to read it, and finds the beginning still there when that happens soon.
        let _expected = (!first.is_empty()).then(|| Following::new(flight));
        if let Some(len) = body.content_length().filter(|&len| format == ObjectFormat::Raw && len != digest.size) {
            return Landing::OtherSize(format!("it has {len} bytes"));
        }
        let unfit = |error: StoreError| match error {
            StoreError::TooShort { .. } | StoreError::TooLong { .. } if format == ObjectFormat::Raw => {
                Landing::OtherSize(error.to_string())
            }
            error => landing_of(error),
        };
        let mut content = Content::new(format);
        let mut session = Session::from_backend(digest);
        loop {
            let mut rest = std::mem::take(&mut first);
            if rest.is_empty() {
                rest = match body.next().await {
                    Ok(Some(piece)) => piece,
                    Ok(None) => break,
                    Err(_) => return Landing::Broken,
                };
            }
            loop {
                let raw = match content.take(self, digest, &mut rest) {
                    Ok(raw) => raw,
                    Err(landing) => return landing,
                };
                if content.has_begun() && flight.phase() == Phase::Asking {
                    flight.enter(Phase::Streaming);
                }
                // A decoder that gave as much as it may can hold more, even with no input left.
                let may_hold_more = raw.len() == FRAME_LEN;
                if !raw.is_empty() {
                    flight.push(raw.clone()).await;
                    if let Err(error) = session.write(self, &[raw]).await {
                        return unfit(error);
                    }
                }
                if rest.is_empty() && !may_hold_more {
                    break;
                }
            }
        }
        if content.is_cut() {
            return Landing::Wrong("the object ends within a zstd frame".into());
        }
        let landing = match session.finish(self).await {
            Ok(_) => Landing::Landed,
            Err(error) => unfit(error),
        };
        if !matches!(landing, Landing::Wrong(_) | Landing::OtherSize(_)) {
            body.ended_well();
        }
        landing
    }

    async fn fly_action(&self, name: &Upload, flight: &Flight, mut incoming: Incoming) -> Landing {
        let digest = name.digest;
        let origin = incoming.body.origin();
        if self.is_purged(origin) {
            incoming.body.ended_well();
            return Landing::Missed;
        }
        flight.enter(Phase::Streaming);
        let mut data = Vec::new();
        loop {
            match incoming.body.next().await {
                Ok(Some(piece)) => data.extend_from_slice(&piece),
                Ok(None) => break,
                Err(_) => return Landing::Broken,
            }
            if data.len() > ACTION_RESULT_LEN_MAX {
                return Landing::Wrong(format!("an ActionResult of more than {ACTION_RESULT_LEN_MAX} bytes"));
            }
        }
        if data.is_empty() || References::of(&data).is_err() {
            return Landing::Wrong("it is no ActionResult".into());
        }
        incoming.body.ended_well();
        let key = ActionKey { hash: digest.hash, size: Some(digest.size).filter(|&size| size > 0) };
        // Why what is here already is kept: a client has stored it meanwhile, and that is what the backend is to get.
        match self.action_put_here(key, data.into(), origin, Older::Kept).await {
            Ok(()) => Landing::Landed,
            Err(error) => Landing::NotStored(error),
        }
    }
}

/// What an error of the session says about the object.
pub(super) fn landing_of(error: StoreError) -> Landing {
    match error {
        StoreError::HashMismatch { .. }
        | StoreError::TooShort { .. }
        | StoreError::TooLong { .. }
        | StoreError::BadZstd { .. } => Landing::Wrong(error.to_string()),
        StoreError::WriteOffset { .. }
        | StoreError::TakenOver
        | StoreError::BlobTooLarge { .. }
        | StoreError::NoSpace { .. }
        | StoreError::Busy { .. }
        | StoreError::Shed { .. }
        | StoreError::Yielded
        | StoreError::Lost { .. }
        | StoreError::Disk(_)
        | StoreError::NotPurged { .. }
        | StoreError::Unanswered
        | StoreError::Stopping => Landing::NotStored(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::channel;
    use crate::rt::cores::block_on;

    /// Goal: a flight that is doomed does nothing more, also where it could go on at once; another one ends as ever. Method: two
    /// flights that wait for their next turn, one of which is doomed meanwhile.
    #[test]
    fn a_doomed_flight_goes_no_further() {
        block_on(async {
            for is_doomed in [true, false] {
                let (flight, landed) = (Rc::new(Flight::new()), Rc::new(Cell::new(false)));
                let (flying, landing) = (flight.clone(), landed.clone());
                let (ended_to, ended) = channel::reply();
                rt::spawn(async move {
                    let flown = async {
                        if is_doomed {
                            flying.doom();
                        }
                        rt::time::yield_once().await;
                        landing.set(true);
                    };
                    ended_to.send(flying.unless_doomed(flown).await);
                });
                let expected = if is_doomed { None } else { Some(()) };
                assert_eq!(ended.recv().await, Ok(expected));
                assert_eq!(landed.get(), !is_doomed);
            }
        });
    }
}
