//! The backends as one core sees them. Reads ask nobody but the backend: the breaker's state and the credentials are
//! here already.

mod presence;

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::UploadEnd;
use super::counts::{Counts, Operation, Unnamed};
use super::credentials::Holder;
use super::mesh::{BackendIndex, MeshPort, Note, Trouble};
use super::s3::{Client, Condition, Hooks, Object, PutOutcome, S3Error, Source};
use super::settings::{Patience, Settings};
use super::tls::{Tls, Trust};
use crate::limits::{
    BACKEND_ABSENT_MS, BACKEND_EXISTENCE_LEN, BACKEND_HEADS_MAX, BACKEND_LOG_MS, BACKEND_PRESENT_MS, BACKEND_WRONG_MAX,
};
use crate::metrics::{Metric, Snapshot};
use crate::pure::breaker_view::{BreakerView, Health, Ticket};
use crate::pure::digest::Hash;
use crate::pure::existence::{Existence, ExistenceLimits, Presence};
use crate::pure::purge::Origin;
use crate::pure::scope::{Scope, Selection};
use crate::pure::upload_queue::{ObjectKind, Upload};
use crate::pure::wrong_objects::{Flaw, WrongObjects};
use crate::rt;
use crate::rt::channel::{self, Receiver};
use crate::rt::lane::Lane;
use crate::rt::local::{Event, Local, Permits};

/// What this core owns, and where the notes to it come.
pub struct OwnerPort {
    pub(super) owned: Vec<BackendIndex>,
    pub(super) inbox: Receiver<Note>,
}

/// The records of this core, as the backends need them.
pub trait Records {
    /// Uploads one.
    fn upload(&self, backend: Backend, upload: Upload) -> Pin<Box<dyn Future<Output = UploadEnd>>>;
    /// Keeps these from being evicted, for a while.
    fn keep(&self, uploads: Vec<Upload>) -> Pin<Box<dyn Future<Output = ()>>>;
}

/// All backends, on this core. Clones share them.
#[derive(Clone)]
pub struct Backends(Rc<Inner>);

struct Inner {
    settings: Settings,
    /// Can change.
    patience: Rc<Cell<Patience>>,
    backends: Vec<Backend>,
    cores: usize,
    /// By core, this one included.
    lanes: Rc<[Lane<Note>]>,
    records: RefCell<Option<Rc<dyn Records>>>,
    records_set: Event,
    stop: Stop,
    unnamed: Rc<Unnamed>,
}

/// Whether the backends are no longer wanted on this core.
#[derive(Clone, Default)]
struct Stop {
    is_stopped: Rc<Cell<bool>>,
    stopped: Event,
}

impl Stop {
    async fn wait(&self) {
        loop {
            let stopped = self.stopped.wait();
            if self.is_stopped.get() {
                return;
            }
            stopped.await;
        }
    }
}

/// One backend, on this core. Clones share it.
#[derive(Clone)]
pub struct Backend(Rc<One>);

struct One {
    index: BackendIndex,
    settings: Settings,
    patience: Rc<Cell<Patience>>,
    /// In the order of the settings.
    buckets: Box<[Bucket]>,
    credentials: Holder,
    view: Local<BreakerView>,
    /// The owner has announced.
    announced: Event,
    /// A report to the breaker is on its way.
    reporting: Cell<bool>,
    /// The lane to the owner.
    lanes: Rc<[Lane<Note>]>,
    owner: usize,
    epoch: Instant,
    counts: Counts,
    /// Existence checks that may run.
    heads: Permits,
    unnamed: Rc<Unnamed>,
    stop: Stop,
    denied_told: Cell<Option<Instant>>,
    wrong_told: Cell<Option<Instant>>,
}

/// One bucket of a backend, on this core. What is known of its objects is kept under the hashes of their keys in the
/// cache, so that what one prefix has tells nothing of another.
struct Bucket {
    client: Client,
    existence: Local<Existence>,
    /// Absent as far as we are concerned, and replaced by the next upload.
    wrong: Local<WrongObjects>,
}

impl Bucket {
    /// Whether the object under `key` is wrong for who says that its blob has `size` bytes.
    fn is_wrong(&self, key: Hash, size: u64) -> bool {
        self.wrong.with(|wrong| wrong.contains(key, size))
    }
}

/// Why an object was not removed.
#[derive(Debug, thiserror::Error)]
pub enum NotDeleted {
    #[error("it does not answer now (its breaker is open)")]
    BreakerOpen,
    #[error(transparent)]
    S3(#[from] S3Error),
}

/// An object on its way, whose end tells the breaker how the backend is: broken off by itself, well by `ended_well`, and
/// nothing when it is dropped, or is not what its name says.
pub struct ReadBody {
    object: Object,
    backend: Backend,
    ticket: Ticket,
    begun: Instant,
}

impl ReadBody {
    /// Bytes of the object, where the backend says.
    pub fn content_length(&self) -> Option<u64> {
        self.object.content_length()
    }

    /// Who stored the object and when, as far as it tells.
    pub fn origin(&self) -> Origin {
        self.object.origin()
    }

    /// The next bytes; `None` at the end. After an error it is of no use.
    pub async fn next(&mut self) -> Result<Option<Bytes>, S3Error> {
        let next = self.object.next().await;
        match &next {
            Ok(Some(_)) => {}
            Ok(None) => self.backend.0.counts.read_times.0.observe_time(self.begun.elapsed()),
            Err(error) => self.backend.failed(self.ticket, "read", error),
        }
        next
    }

    /// It has come to its end, and is what it should be.
    pub fn ended_well(self) {
        self.backend.report(self.ticket, Health::Good);
    }
}

impl Backend {
    pub fn name(&self) -> &str {
        &self.0.settings.backends[self.0.index].name
    }

    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// How long a check waits for it.
    pub fn existence_timeout(&self) -> Duration {
        self.0.patience.get().existence
    }

    /// The client of its own bucket, for whoever asks the backend outside of the breaker's rules: the probe.
    pub(super) fn client(&self) -> &Client {
        &self.0.buckets[0].client
    }

    pub(super) fn key(&self, name: &Upload) -> String {
        self.0.settings.key(name)
    }

    /// The scope of what stands below its own prefix in its own bucket.
    pub(super) fn own_scope(&self) -> Scope {
        Scope::new(Some(Selection { backend: self.0.index as u16, bucket: 0 }), None)
    }

    fn bucket(&self, scope: &Scope) -> &Bucket {
        &self.0.buckets[self.0.settings.place_of(scope).1]
    }

    /// Counts an operation for a request that named no backend where there are several.
    fn note_unnamed(&self, scope: &Scope, operation: Operation) {
        if self.0.settings.has_map && scope.selection().is_none() {
            self.0.unnamed.note(operation);
        }
    }

    /// Whether a read is worth a try. Counts it as one that the breaker cut short when it is not.
    pub fn takes_reads(&self) -> bool {
        let takes = self.0.view.with(|view| view.admit()).is_some();
        if !takes {
            self.0.counts.short_circuits.count();
        }
        takes
    }

    /// Asks for an object, until `deadline` for the head of an answer. `None`: the backend does not have it, or cannot say,
    /// which to a client is the same.
    pub async fn fetch(&self, name: &Upload, deadline: Instant) -> Option<ReadBody> {
        let (one, bucket) = (&*self.0, self.bucket(&name.scope));
        self.note_unnamed(&name.scope, Operation::Download);
        if name.kind == ObjectKind::Cas && bucket.is_wrong(cas_key(name), name.digest.size) {
            return None;
        }
        let Some(ticket) = one.view.with(|view| view.admit()) else {
            one.counts.short_circuits.count();
            return None;
        };
        let begun = rt::time::now();
        let key = self.key(name);
        let head = deadline.saturating_duration_since(begun);
        match bucket.client.get(&key, None, head, one.patience.get().read).await {
            Ok(Some(object)) => {
                one.counts.hits.count();
                Some(ReadBody { object, backend: self.clone(), ticket, begun })
            }
            Ok(None) => {
                one.counts.misses.count();
                one.counts.read_times.0.observe_time(begun.elapsed());
                self.report(ticket, Health::Good);
                if name.kind == ObjectKind::Cas {
                    self.learn(name, Presence::Absent);
                }
                None
            }
            Err(error) => {
                one.counts.misses.count();
                if name.kind == ObjectKind::Cas {
                    self.learn_denied(name, &error);
                }
                self.failed(ticket, "read", &error);
                None
            }
        }
    }

    /// Whether an upload may be tried now.
    pub fn takes_uploads(&self) -> bool {
        self.0.view.with(|view| view.admit()).is_some()
    }

    /// Uploads a record. `source` is only asked for bytes when the backend takes uploads.
    pub async fn upload(&self, upload: &Upload, source: &dyn Source) -> UploadEnd {
        let (one, bucket) = (&*self.0, self.bucket(&upload.scope));
        let Some(ticket) = one.view.with(|view| view.admit()) else { return UploadEnd::BreakerOpen };
        // An action's content may change under its key.
        let replaces = upload.kind == ObjectKind::Action || bucket.is_wrong(cas_key(upload), upload.digest.size);
        let condition = if replaces { Condition::Replace } else { Condition::IfAbsent };
        let begun = rt::time::now();
        let total = one.patience.get().upload;
        let key = self.key(upload);
        let put = bucket.client.put(&key, source, condition, total).await;
        match put {
            Ok(outcome) => {
                one.counts.upload_times.0.observe_time(begun.elapsed());
                self.report(ticket, Health::Good);
                if upload.kind == ObjectKind::Cas {
                    bucket.wrong.with(|wrong| wrong.forget(cas_key(upload), upload.digest.size));
                    self.learn(upload, Presence::Present);
                }
                match outcome {
                    PutOutcome::Created => UploadEnd::Created,
                    PutOutcome::AlreadyExists => UploadEnd::AlreadyExists,
                }
            }
            Err(error) => {
                self.failed(ticket, "upload", &error);
                match error {
                    S3Error::Throttled { .. } => UploadEnd::Throttled,
                    S3Error::Timeout { .. } => UploadEnd::Timeout,
                    S3Error::Denied { .. } => UploadEnd::AccessDenied,
                    S3Error::GivenUp(_) => UploadEnd::BreakerOpen,
                    S3Error::Http(_)
                    | S3Error::Stalled
                    | S3Error::Server { .. }
                    | S3Error::Refused { .. }
                    // These come again.
                    | S3Error::Outdated { .. }
                    | S3Error::NoCredentials(_) => UploadEnd::Failed,
                }
            }
        }
    }

    /// Removes an object, if there is one, and what is known of it.
    pub async fn delete(&self, name: &Upload) -> Result<(), NotDeleted> {
        let bucket = self.bucket(&name.scope);
        let ticket = self.0.view.with(|view| view.admit()).ok_or(NotDeleted::BreakerOpen)?;
        match bucket.client.delete(&self.key(name)).await {
            Ok(()) => {
                self.report(ticket, Health::Good);
                bucket.existence.with(|existence| existence.forget(&cas_key(name)));
                Ok(())
            }
            Err(error) => {
                self.failed(ticket, "delete", &error);
                Err(error.into())
            }
        }
    }

    /// An object is not what its name says.
    pub fn found_wrong(&self, name: &Upload, flaw: Flaw, detail: &dyn std::fmt::Display) {
        let (one, bucket, digest) = (&*self.0, self.bucket(&name.scope), &name.digest);
        one.counts.wrong.count();
        if name.kind == ObjectKind::Cas {
            bucket.existence.with(|existence| existence.forget(&cas_key(name)));
            bucket.wrong.with(|wrong| wrong.note(cas_key(name), digest.size, flaw));
        }
        self.tell_trouble(Trouble::Wrong, &one.wrong_told, || {
            format!(
                "the object of {digest} is not what its name says and is ignored: {detail}. The next upload replaces it"
            )
        });
    }

    /// A record is about to be stored here, and the backend should then have it. Returns when the end of the process would not
    /// make us forget that.
    pub async fn wants(&self, upload: Upload) {
        if self.0.settings.num_uploaders == 0 {
            return;
        }
        self.note_unnamed(&upload.scope, Operation::Upload);
        let (noted, is_noted) = channel::reply();
        let note = Note::Upload { backend: self.0.index, upload, noted };
        let told = Box::pin(async {
            self.tell(note).await;
            is_noted.recv().await
        });
        // Where the owner has gone away, the process ends.
        let _ = rt::time::race(told, self.stopped()).await;
    }

    /// Whether it is still to get a record. Yes as well where nobody can say any more.
    pub async fn is_owed(&self, upload: Upload) -> bool {
        let (reply, answer) = channel::reply();
        let asked = Box::pin(async {
            self.tell(Note::IsOwed { backend: self.0.index, upload, reply }).await;
            answer.recv().await
        });
        match rt::time::race(asked, self.stopped()).await {
            rt::time::Either::Left(Ok(is_owed)) => is_owed,
            rt::time::Either::Left(Err(_)) | rt::time::Either::Right(()) => true,
        }
    }

    /// Resolves when the backends are no longer wanted.
    pub async fn stopped(&self) {
        self.0.stop.wait().await;
    }

    fn learn(&self, name: &Upload, presence: Presence) {
        let now = self.now();
        self.bucket(&name.scope).existence.with(|existence| existence.learn(cas_key(name), presence, now));
    }

    fn learn_denied(&self, name: &Upload, error: &S3Error) {
        if matches!(error, S3Error::Denied { .. }) {
            self.learn(name, Presence::Denied);
        }
    }

    fn now(&self) -> Duration {
        rt::time::now() - self.0.epoch
    }

    fn failed(&self, ticket: Ticket, what: &str, error: &S3Error) {
        self.0.counts.failures.count();
        match error {
            S3Error::Denied { .. } | S3Error::Outdated { .. } | S3Error::NoCredentials(_) => {
                self.tell_trouble(Trouble::Denied, &self.0.denied_told, || {
                    format!("{what}: {error}. Check the credentials and their policy")
                });
            }
            error => tracing::debug!(backend = self.name(), "{what}: {error}"),
        }
        self.report(ticket, error.health());
    }

    /// Tells the owner, who logs, if this core has not done so for a while.
    fn tell_trouble(&self, trouble: Trouble, told: &Cell<Option<Instant>>, text: impl FnOnce() -> String) {
        if is_due(told) {
            let (backend, text) = (self.clone(), text());
            rt::spawn(async move { backend.tell(Note::Trouble { backend: backend.0.index, trouble, text }).await });
        }
    }

    /// Tells the breaker how a call went, if it wants to know.
    fn report(&self, ticket: Ticket, health: Health) {
        self.0.view.with(|view| view.handle_outcome(ticket, health));
        if self.0.reporting.get() {
            return;
        }
        let Some(evidence) = self.0.view.with(BreakerView::take_report) else { return };
        self.0.reporting.set(true);
        let backend = self.clone();
        rt::spawn(async move {
            let mut next = Some(evidence);
            while let Some(evidence) = next {
                backend.tell(Note::Evidence { backend: backend.0.index, evidence }).await;
                next = backend.0.view.with(BreakerView::take_report);
            }
            backend.0.reporting.set(false);
        });
    }

    async fn tell(&self, note: Note) {
        // A core that has gone away needs to know nothing.
        let _ = self.0.lanes[self.0.owner].send(note).await;
    }
}

/// Whether it is time to log again what would else fill the log.
pub(super) fn is_due(logged: &Cell<Option<Instant>>) -> bool {
    let now = rt::time::now();
    let due = logged.get().is_none_or(|last| now - last >= Duration::from_millis(BACKEND_LOG_MS));
    if due {
        logged.set(Some(now));
    }
    due
}

impl Backends {
    /// The backends, and what `Owner::start` needs. `trust` is there when a backend needs TLS.
    pub fn new(port: MeshPort, settings: Settings, trust: Option<&Trust>) -> (Self, OwnerPort) {
        let MeshPort { core, peers, inbox } = port;
        let cores = peers.len();
        let lanes: Rc<[Lane<Note>]> = peers.into_iter().map(Lane::new).collect();
        let epoch = rt::time::now();
        let (stop, unnamed) = (Stop::default(), Rc::<Unnamed>::default());
        let patience = Rc::new(Cell::new(settings.patience()));
        let make = |index: BackendIndex| {
            let one = &settings.backends[index];
            let owner = index % cores;
            let ask_lanes = lanes.clone();
            let credentials = Holder::new(move |generation| {
                let lanes = ask_lanes.clone();
                rt::spawn(async move {
                    let _ = lanes[owner].send(Note::Expired { backend: index, generation }).await;
                });
            });
            let counts = Counts::default();
            // Why: what was under way when the breaker opened must not go on asking. The probe too asks but once.
            let (view, announced) = (Local::new(BreakerView::default()), Event::default());
            let hooks = || {
                let (throttles, lanes, retry_view) = (counts.throttles.clone(), lanes.clone(), view.clone());
                let on_throttle = move || {
                    throttles.count();
                    let lanes = lanes.clone();
                    rt::spawn(async move {
                        let _ = lanes[owner].send(Note::Throttled { backend: index }).await;
                    });
                };
                let may_retry = move || retry_view.with(|view| view.admit()).is_some();
                let changed = announced.clone();
                Hooks { on_throttle: Box::new(on_throttle), may_retry: Box::new(may_retry), changed }
            };
            let bucket = |bucket: &super::settings::Bucket| {
                let needs = bucket.target.tls;
                let tls = needs.then(|| Tls::new(trust.expect("there is trust where a backend needs TLS")));
                Bucket {
                    client: Client::new(one, bucket, tls, credentials.clone(), core, hooks()),
                    existence: Local::new(Existence::new(EXISTENCE)),
                    wrong: Local::new(WrongObjects::new(BACKEND_WRONG_MAX)),
                }
            };
            Backend(Rc::new(One {
                index,
                patience: patience.clone(),
                buckets: one.buckets.iter().map(bucket).collect(),
                credentials,
                view,
                announced,
                reporting: Cell::new(false),
                lanes: lanes.clone(),
                owner,
                epoch,
                counts,
                heads: Permits::new(BACKEND_HEADS_MAX),
                unnamed: unnamed.clone(),
                stop: stop.clone(),
                denied_told: Cell::new(None),
                wrong_told: Cell::new(None),
                settings: settings.clone(),
            }))
        };
        let count = settings.backends.len();
        let backends = Self(Rc::new(Inner {
            backends: (0..count).map(make).collect(),
            settings,
            patience,
            cores,
            lanes,
            records: RefCell::new(None),
            records_set: Event::default(),
            stop,
            unnamed: unnamed.clone(),
        }));
        let owned = (0..count).filter(|index| index % cores == core).collect();
        (backends, OwnerPort { owned, inbox })
    }

    /// The backend of a scope.
    pub fn of(&self, scope: &Scope) -> &Backend {
        self.get(self.0.settings.place_of(scope).0)
    }

    pub fn get(&self, index: BackendIndex) -> &Backend {
        &self.0.backends[index]
    }

    /// What is asked of backends from now on may take so long.
    pub fn set_patience(&self, patience: Patience) {
        self.0.patience.set(patience);
    }

    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    pub fn cores(&self) -> usize {
        self.0.cores
    }

    /// From now on orders to upload find `records`; until then they wait.
    pub fn set_records(&self, records: Rc<dyn Records>) {
        *self.0.records.borrow_mut() = Some(records);
        self.0.records_set.notify();
    }

    /// `None` when the backends are no longer wanted.
    async fn records(&self) -> Option<Rc<dyn Records>> {
        loop {
            let set = self.0.records_set.wait();
            if self.0.stop.is_stopped.get() {
                return None;
            }
            if let Some(records) = self.0.records.borrow().clone() {
                return Some(records);
            }
            rt::time::race(set, self.stopped()).await;
        }
    }

    /// Handles no more notes.
    pub fn stop(&self) {
        self.0.stop.is_stopped.set(true);
        self.0.records.borrow_mut().take();
        self.0.stop.stopped.notify();
    }

    /// Sends a note to a core.
    pub(super) async fn send(&self, core: usize, note: Note) -> bool {
        self.0.lanes[core].send(note).await.is_ok()
    }

    /// Resolves once `stop` was called.
    pub(super) async fn stopped(&self) {
        self.0.stop.wait().await;
    }

    /// Handles a note that is for every core; gives back one that is for an owner.
    pub(super) fn handle(&self, note: Note) -> Option<Note> {
        match note {
            Note::Announce { backend, announcement } => {
                let one = &self.get(backend).0;
                one.view.with(|view| view.handle_announcement(announcement));
                one.announced.notify();
                None
            }
            Note::Issue { backend, issue } => {
                self.get(backend).0.credentials.hold(issue);
                None
            }
            Note::Order { backend, upload, reply } => {
                let (all, backend) = (self.clone(), self.get(backend).clone());
                rt::spawn(async move {
                    let _busy = rt::busy();
                    reply.send(match all.records().await {
                        Some(records) => rt::catch(records.upload(backend, upload)).await.unwrap_or(UploadEnd::Failed),
                        None => UploadEnd::Failed,
                    });
                });
                None
            }
            Note::Keep { uploads } => {
                let all = self.clone();
                rt::spawn(rt::contain(async move {
                    if let Some(records) = all.records().await {
                        records.keep(uploads).await;
                    }
                }));
                None
            }
            note @ (Note::Evidence { .. }
            | Note::Throttled { .. }
            | Note::Upload { .. }
            | Note::IsOwed { .. }
            | Note::Expired { .. }
            | Note::Trouble { .. }) => Some(note),
        }
    }

    /// Adds what this core counted.
    pub fn report(&self, into: &mut Snapshot) {
        self.0.backends.iter().for_each(|backend| backend.0.counts.report(backend.name(), into));
        if self.0.settings.has_map {
            self.0.unnamed.report(Metric::S3DefaultBackendFallback, into);
            // Why the same: where there is a map, every gRPC call has a prefix, and no call of HTTP has.
            self.0.unnamed.report(Metric::S3PrefixMissing, into);
        }
    }
}

const EXISTENCE: ExistenceLimits = ExistenceLimits {
    count: BACKEND_EXISTENCE_LEN,
    present: Duration::from_millis(BACKEND_PRESENT_MS),
    absent: Duration::from_millis(BACKEND_ABSENT_MS),
};

/// What is known of a CAS object is kept under this.
fn cas_key(name: &Upload) -> Hash {
    name.scope.cas_key(&name.digest.hash).1
}
