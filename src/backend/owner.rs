//! What exists once for a backend, on the core that owns it: the breaker, the credentials' keeper, the queue of uploads.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::UploadEnd;
use super::credentials::{Keeper, Renewal};
use super::ledger::{self, Ledger};
use super::mesh::{BackendIndex, Note, Trouble};
use super::percore::{Backends, OwnerPort, is_due};
use super::s3::S3Error;
use super::tls::Trust;
use crate::limits::{
    BACKEND_OWED_KEEP_MS, BACKEND_OWED_KEPT_MAX, BACKEND_OWED_MAX, BACKEND_OWED_RETRY_MAX_MS, BACKEND_OWED_RETRY_MS,
    BREAKER_FAILURES, BREAKER_OPEN_MS, BREAKER_PROBE_LEN, BREAKER_PROBE_MS,
};
use crate::metrics::{Counter, Metric, Snapshot};
use crate::pure::backoff::Passes;
use crate::pure::breaker::{Act, Announcement, Breaker, BreakerLimits, Evidence, State};
use crate::pure::breaker_view::Health;
use crate::pure::digest::EMPTY;
use crate::pure::shard_map::ShardMap;
use crate::pure::upload_queue::{End, Ended, ObjectKind, Pushed, QueueLimits, Upload, UploadQueue};
use crate::rt::channel::{self, Receiver};
use crate::rt::gate::Gate;
use crate::rt::local::{Event, Local};
use crate::rt::{self, HandlerPanicked};

/// All that this core owns. Clones share it.
#[derive(Clone)]
pub struct Owner(Rc<Vec<Owned>>);

/// One backend that this core owns. Clones share it.
#[derive(Clone)]
struct Owned(Rc<Inner>);

struct Inner {
    index: BackendIndex,
    name: String,
    backends: Backends,
    map: ShardMap,
    epoch: Instant,
    breaker: Local<Breaker>,
    breaker_changed: Event,
    /// The breaker has closed.
    healed: Event,
    /// The state that was announced last.
    announced: Cell<State>,
    /// Of credentials: the generation that is out, and the last one that has expired, 0 for none.
    generation: Cell<u64>,
    refused: Cell<u64>,
    expired: Event,
    queue: Local<UploadQueue>,
    queue_changed: Event,
    passes: Local<Passes>,
    ledger: Ledger,
    /// Uploads that run.
    running: Gate,
    /// No further uploads are started.
    draining: Cell<bool>,
    denied_logged: Cell<Option<Instant>>,
    wrong_logged: Cell<Option<Instant>>,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    transitions: [Counter; 3],
    outcomes: [Counter; UploadEnd::ALL.len()],
    coalesced: Counter,
    refused: Counter,
}

const BREAKER: BreakerLimits = BreakerLimits {
    failures: BREAKER_FAILURES,
    open: Duration::from_millis(BREAKER_OPEN_MS),
    probe: Duration::from_millis(BREAKER_PROBE_MS),
};

impl Owner {
    /// Starts what this core owns, and handles the notes that come to it. `dir` is the cache directory.
    pub async fn start(
        backends: &Backends,
        port: OwnerPort,
        map: ShardMap,
        dir: &Path,
        trust: Option<&Trust>,
    ) -> std::io::Result<Self> {
        let OwnerPort { owned, inbox } = port;
        let mut all = Vec::new();
        for index in owned {
            let settings = &backends.settings().backends[index];
            let (ledger, unfinished) = Ledger::open(ledger::path(dir, &settings.name)).await?;
            let mut queue = UploadQueue::new(QueueLimits {
                queued: backends.settings().max_queued_uploads,
                owed: BACKEND_OWED_MAX,
                running: backends.settings().num_uploaders,
            });
            if !unfinished.is_empty() {
                tracing::info!(backend = %settings.name, uploads = unfinished.len(), "uploads of the last run go on");
            }
            let (mut homeless, mut refused) = (0, 0);
            for owed in unfinished {
                match backends.settings().upload(index, &owed) {
                    // What does not fit any more stays in the file until it is written anew.
                    Some(upload) => refused += u64::from(queue.push(upload) == Pushed::Refused),
                    None => homeless += 1,
                }
            }
            if homeless > 0 {
                let text = "uploads are owed to buckets that are not in extra_buckets any more: they are not made";
                tracing::error!(backend = %settings.name, uploads = homeless, "{text}");
            }
            let keeper = Keeper::new(settings.credentials.clone(), &settings.region, trust.cloned());
            let one = Owned(Rc::new(Inner {
                index,
                name: settings.name.to_string(),
                backends: backends.clone(),
                map,
                epoch: rt::time::now(),
                breaker: Local::new(Breaker::new(BREAKER)),
                breaker_changed: Event::default(),
                healed: Event::default(),
                announced: Cell::new(State::Closed),
                generation: Cell::new(0),
                refused: Cell::new(0),
                expired: Event::default(),
                queue: Local::new(queue),
                queue_changed: Event::default(),
                passes: Local::new(Passes::new(
                    Duration::from_millis(BACKEND_OWED_RETRY_MS),
                    Duration::from_millis(BACKEND_OWED_RETRY_MAX_MS),
                )),
                ledger,
                running: Gate::default(),
                draining: Cell::new(false),
                denied_logged: Cell::new(None),
                wrong_logged: Cell::new(None),
                counts: Counts::default(),
            }));
            one.0.counts.refused.add(homeless + refused);
            rt::spawn(one.clone().keep_credentials(keeper));
            rt::spawn(one.clone().watch_breaker());
            rt::spawn(one.clone().dispatch());
            rt::spawn(one.clone().retry_owed());
            rt::spawn(rt::contain(one.clone().look()));
            all.push(one);
        }
        let owner = Self(Rc::new(all));
        rt::spawn(owner.clone().listen(inbox, backends.clone()));
        Ok(owner)
    }

    async fn listen(self, mut inbox: Receiver<Note>, backends: Backends) {
        loop {
            let next = rt::time::race(inbox.recv(), backends.stopped()).await;
            let rt::time::Either::Left(Some(note)) = next else { return };
            let Some(note) = backends.handle(note) else { continue };
            let (Note::Evidence { backend, .. }
            | Note::Throttled { backend }
            | Note::Upload { backend, .. }
            | Note::IsOwed { backend, .. }
            | Note::Expired { backend, .. }
            | Note::Trouble { backend, .. }) = note
            else {
                unreachable!("notes for every core are handled before")
            };
            let owned = self.0.iter().find(|owned| owned.0.index == backend);
            owned.expect("notes go to the core that owns the backend").handle(note);
        }
    }

    /// Waits until `end` for the uploads that are ready or run, and starts no further ones: they are left to the next start.
    pub async fn drain(&self, end: Instant) {
        for owned in self.0.iter() {
            let _ = rt::time::race(owned.drained(), rt::time::deadline(end)).await;
            owned.0.draining.set(true);
            let left = owned.0.queue.with(|queue| queue.len());
            if left > 0 {
                tracing::info!(backend = owned.0.name, uploads = left, "uploads are left to the next start");
            }
        }
    }

    /// Ends the ledgers. To be called when no core serves any more: until then what is stored has to be noted.
    pub async fn close(&self) {
        for owned in self.0.iter() {
            owned.0.ledger.close().await;
        }
    }

    /// Adds what this core owns.
    pub fn report(&self, into: &mut Snapshot) {
        self.0.iter().for_each(|owned| owned.count_into(into));
    }
}

impl Owned {
    fn now(&self) -> Duration {
        rt::time::now() - self.0.epoch
    }

    fn handle(&self, note: Note) {
        match note {
            Note::Evidence { evidence, .. } => self.handle_evidence(evidence),
            Note::Throttled { .. } => self.0.queue.with(UploadQueue::throttled),
            Note::Upload { upload, noted, .. } => {
                self.push(upload);
                self.0.ledger.tell_when_written(noted);
            }
            Note::IsOwed { upload, reply, .. } => reply.send(self.0.queue.with(|queue| queue.contains(&upload))),
            Note::Expired { generation, .. } => {
                // Why not each time it is told: who tells it while the next set is on its way would cost one more.
                if generation == self.0.generation.get() && self.0.refused.replace(generation) != generation {
                    self.0.expired.notify();
                }
            }
            Note::Trouble { trouble, text, .. } => {
                let logged = match trouble {
                    Trouble::Denied => &self.0.denied_logged,
                    Trouble::Wrong => &self.0.wrong_logged,
                };
                if is_due(logged) {
                    tracing::error!(backend = self.0.name, "{text}");
                }
            }
            Note::Announce { .. } | Note::Issue { .. } | Note::Order { .. } | Note::Keep { .. } => {
                unreachable!("notes for every core are handled before")
            }
        }
    }

    /// Sends a note to every core.
    fn tell_all(&self, note: impl Fn() -> Note + 'static) {
        let backends = self.0.backends.clone();
        rt::spawn(async move {
            for core in 0..backends.cores() {
                backends.send(core, note()).await;
            }
        });
    }

    // The breaker.

    fn handle_evidence(&self, evidence: Evidence) {
        let now = self.now();
        let act = self.0.breaker.with(|breaker| breaker.handle_evidence(evidence, now));
        self.act(act);
    }

    fn act(&self, act: Option<Act>) {
        let announcement = match act {
            None => return,
            Some(Act::Announce(announcement)) => announcement,
            Some(Act::Probe(announcement)) => {
                rt::spawn(self.clone().probe(announcement.epoch));
                announcement
            }
        };
        self.announce(announcement);
    }

    fn announce(&self, announcement: Announcement) {
        let backend = self.0.index;
        self.tell_all(move || Note::Announce { backend, announcement });
        let state = announcement.state;
        // A run of failures that begins is no change of state.
        if self.0.announced.replace(state) != state {
            self.0.counts.transitions[state.number() as usize].count();
            match state {
                State::Open => tracing::warn!(backend = self.0.name, "the breaker is open: reads miss, uploads wait"),
                State::HalfOpen => tracing::info!(backend = self.0.name, "the breaker is half-open: one probe is out"),
                State::Closed => {
                    tracing::info!(backend = self.0.name, "the breaker is closed: the backend is well");
                    self.0.healed.notify();
                }
            }
        }
        self.0.breaker_changed.notify();
        self.0.queue_changed.notify();
    }

    fn state(&self) -> State {
        self.0.breaker.with(|breaker| breaker.announcement().state)
    }

    /// Opens, half-opens and gives up probes in time.
    async fn watch_breaker(self) {
        loop {
            let changed = self.0.breaker_changed.wait();
            let waited = match self.0.breaker.with(|breaker| breaker.deadline()) {
                None => rt::time::race(changed, self.0.backends.stopped()).await,
                Some(deadline) => {
                    let due = rt::time::race(changed, rt::time::deadline(self.0.epoch + deadline));
                    match rt::time::race(due, self.0.backends.stopped()).await {
                        rt::time::Either::Left(_) => rt::time::Either::Left(()),
                        rt::time::Either::Right(()) => rt::time::Either::Right(()),
                    }
                }
            };
            if matches!(waited, rt::time::Either::Right(())) {
                return;
            }
            let now = self.now();
            let act = self.0.breaker.with(|breaker| breaker.poll(now));
            self.act(act);
        }
    }

    /// Asks for the start of an object that a bazel-remote probably has; that it is not there is an answer too.
    async fn probe(self, epoch: u32) {
        let _busy = rt::busy();
        let backend = self.0.backends.get(self.0.index);
        let scope = backend.own_scope();
        let key = backend.key(&Upload { kind: ObjectKind::Cas, digest: EMPTY, scope });
        let asked = async {
            let Some(mut object) =
                backend.client().get(&key, Some(BREAKER_PROBE_LEN), BREAKER.probe, BREAKER.probe).await?
            else {
                return Ok(());
            };
            let mut read = 0;
            // A store that does not know ranges sends all of it.
            while let Some(piece) = object.next().await? {
                read += piece.len() as u64;
                if read >= BREAKER_PROBE_LEN {
                    break;
                }
            }
            Ok::<(), S3Error>(())
        };
        // Why caught: while no probe ends, the breaker stays half-open.
        let healthy = match rt::time::timeout(BREAKER.probe, rt::catch(asked)).await {
            Ok(Ok(Ok(()))) => true,
            // Throttled or refused, it answers.
            Ok(Ok(Err(error))) => error.health() != Health::Bad,
            Ok(Err(HandlerPanicked)) | Err(rt::time::Elapsed) => false,
        };
        let now = self.now();
        let act = self.0.breaker.with(|breaker| breaker.handle_probe(epoch, healthy, now));
        self.act(act);
    }

    /// Says at the start whether the backend can be used, for the log. What it finds decides nothing.
    async fn look(self) {
        let backends = self.0.backends.clone();
        let settings = &backends.settings().backends[self.0.index];
        let looked = backends.get(self.0.index).client().list(&settings.prefix).await;
        match looked {
            Ok(_) => tracing::info!(backend = self.0.name, "the backend answers"),
            Err(error @ S3Error::Denied { .. }) => tracing::warn!(
                backend = self.0.name,
                "the bucket cannot be listed: {error}. Check the credentials; a policy without s3:ListBucket makes the \
                 store answer 403 for what it does not have, which is taken for a miss"
            ),
            Err(error) => tracing::warn!(backend = self.0.name, "the backend cannot be used now: {error}"),
        }
    }

    // Credentials.

    async fn keep_credentials(self, mut keeper: Keeper) {
        loop {
            let expired = self.0.expired.wait();
            let (renewal, again) = keeper.issue(self.0.refused.get()).await;
            match renewal {
                Renewal::Failed(reason) => {
                    let text = "the credentials cannot be renewed; the last ones are used until they expire";
                    tracing::warn!(backend = self.0.name, "{text}: {reason}");
                }
                Renewal::Issued(issue) => {
                    if let Err(reason) = &issue.credentials {
                        tracing::error!(backend = self.0.name, "no credentials: {reason}");
                    }
                    self.0.generation.set(issue.generation);
                    let backend = self.0.index;
                    self.tell_all(move || Note::Issue { backend, issue: issue.clone() });
                }
            }
            let due = rt::time::race(expired, rt::time::sleep(again.unwrap_or(Duration::MAX)));
            if let rt::time::Either::Right(()) = rt::time::race(due, self.0.backends.stopped()).await {
                return;
            }
        }
    }

    // Uploads.

    fn push(&self, upload: Upload) {
        let owed = self.0.backends.settings().owed(&upload);
        match self.0.queue.with(|queue| queue.push(upload)) {
            Pushed::Ready | Pushed::Owed => self.0.ledger.note(owed),
            Pushed::Coalesced => self.0.counts.coalesced.count(),
            Pushed::Refused => self.0.counts.refused.count(),
        }
        self.0.queue_changed.notify();
    }

    /// Starts uploads as fast as the pace allows; while the backend is not well, puts them off.
    async fn dispatch(self) {
        loop {
            let changed = self.0.queue_changed.wait();
            if self.state() != State::Closed {
                self.postpone();
            } else if !self.0.draining.get() {
                while let Some(upload) = self.0.queue.with(UploadQueue::start) {
                    let started = self.clone();
                    self.0.running.spawn(async move { started.run(upload).await });
                }
            }
            if let rt::time::Either::Right(()) = rt::time::race(changed, self.0.backends.stopped()).await {
                return;
            }
        }
    }

    fn postpone(&self) {
        let (count, lost) = self.0.queue.with(UploadQueue::postpone);
        self.0.counts.outcomes[UploadEnd::BreakerOpen as usize].add(count as u64);
        self.0.counts.refused.add(lost.len() as u64);
        lost.iter().for_each(|upload| self.strike(upload));
    }

    fn strike(&self, upload: &Upload) {
        self.0.ledger.strike(self.0.backends.settings().owed(upload));
    }

    async fn run(&self, upload: Upload) {
        let core = usize::from(self.0.map.core_of_hash(&upload.digest.hash).0);
        let (reply, answer) = channel::reply();
        let order = Note::Order { backend: self.0.index, upload: upload.clone(), reply };
        let end = match self.0.backends.send(core, order).await {
            true => answer.recv().await.unwrap_or(UploadEnd::Failed),
            false => UploadEnd::Failed,
        };
        self.0.counts.outcomes[end as usize].count();
        let taken = matches!(end, UploadEnd::Created | UploadEnd::AlreadyExists);
        if taken {
            self.0.passes.with(Passes::succeeded);
        }
        let ended = self.0.queue.with(|queue| {
            if taken {
                queue.succeeded();
            }
            queue.finish(upload.clone(), if end.is_final() { End::Done } else { End::Owed })
        });
        match ended {
            Ended::Forgotten => self.strike(&upload),
            Ended::ReadyAgain | Ended::Owed => {}
            Ended::Lost => {
                self.0.counts.refused.count();
                self.strike(&upload);
            }
        }
        self.renew_if_worn();
        self.0.queue_changed.notify();
    }

    fn renew_if_worn(&self) {
        let unfinished = self.0.queue.with(|queue| queue.len());
        if self.0.ledger.is_worn(unfinished) {
            let settings = self.0.backends.settings();
            self.0.ledger.renew(self.0.queue.with(|queue| queue.all().map(|upload| settings.owed(&upload)).collect()));
        }
    }

    /// Tries owed uploads again: once in a while, ever more seldom while the backend takes none, and as soon as it is well
    /// again. Until then their records count
    /// as used, so that they are not evicted before those that nobody wants.
    async fn retry_owed(self) {
        let mut kept: Option<Instant> = None;
        loop {
            let healed = self.0.healed.wait();
            let now = rt::time::now();
            if kept.is_none_or(|kept| now - kept >= Duration::from_millis(BACKEND_OWED_KEEP_MS)) {
                kept = Some(now);
                self.keep_owed().await;
            }
            // Why here as well: while the backend takes nothing no upload ends, and yet what is refused for want of room is noted and
            // struck out, and a file that could not be written may take it again.
            self.renew_if_worn();
            let now = now - self.0.epoch;
            let is_due = self.state() == State::Closed && self.0.passes.with(|passes| passes.is_due(now));
            if is_due && self.0.queue.with(UploadQueue::retry_owed) > 0 {
                self.0.passes.with(|passes| passes.begun(now));
                self.0.queue_changed.notify();
            }
            let due = rt::time::race(healed, rt::time::sleep(Duration::from_millis(BACKEND_OWED_RETRY_MS)));
            match rt::time::race(due, self.0.backends.stopped()).await {
                rt::time::Either::Left(rt::time::Either::Left(())) => self.0.passes.with(Passes::healed),
                rt::time::Either::Left(rt::time::Either::Right(())) => {}
                rt::time::Either::Right(()) => return,
            }
        }
    }

    async fn keep_owed(&self) {
        let mut by_core = vec![Vec::new(); self.0.backends.cores()];
        let owed = self.0.queue.with(|queue| queue.oldest_owed(BACKEND_OWED_KEPT_MAX));
        for upload in owed {
            by_core[usize::from(self.0.map.core_of_hash(&upload.digest.hash).0)].push(upload);
        }
        for (core, uploads) in by_core.into_iter().enumerate().filter(|(_, uploads)| !uploads.is_empty()) {
            self.0.backends.send(core, Note::Keep { uploads }).await;
        }
    }

    /// Waits until nothing runs or has its turn, or the backend takes nothing.
    async fn drained(&self) {
        loop {
            let changed = self.0.queue_changed.wait();
            let idle = self.0.queue.with(|queue| queue.is_idle());
            if idle || self.state() != State::Closed {
                return;
            }
            changed.await;
        }
    }

    fn count_into(&self, into: &mut Snapshot) {
        let counts = &self.0.counts;
        let name = || std::borrow::Cow::from(self.0.name.clone());
        into.add_labels(Metric::S3BreakerState, vec![name()], f64::from(self.state().number()));
        for state in [State::Closed, State::HalfOpen, State::Open] {
            let count = &counts.transitions[state.number() as usize];
            into.add_labels(Metric::S3BreakerTransitions, vec![name(), state.word().into()], count);
        }
        for end in UploadEnd::ALL {
            let (status, reason) = end.labels();
            let labels = vec![name(), reason.into(), status.into()];
            into.add_labels(Metric::S3UploadOutcomes, labels, &counts.outcomes[end as usize]);
        }
        let (depth, pace, owed) = self.0.queue.with(|queue| (queue.depth(), queue.pace(), queue.owed()));
        into.add_labels(Metric::S3UploadQueueDepth, vec![name()], depth);
        into.add_labels(Metric::S3UploadPace, vec![name()], f64::from(pace));
        into.add_labels(Metric::S3OwedUploads, vec![name()], owed);
        into.add_labels(Metric::S3UploadQueueCoalesced, vec![name()], &counts.coalesced);
        into.add_labels(Metric::S3OwedRejected, vec![name()], &counts.refused);
    }
}
