//! How the server treats others while it is under load: small calls at fixed times, from a thread and on connections of
//! their own, so that the load generator's own queues do not count.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::client::{self, CallError, Connection, Method, Windows};
use crate::drive::RunError;
use crate::flags::Flags;
use crate::http;
use crate::job::{Check, Job, Work};
use crate::measure::Tally;
use crate::payload::{Blob, Maker, SplitMix64};
use crate::scenario;
use crate::target::Target;
use crate::wire;

/// How often each question is asked.
const PERIOD: Duration = Duration::from_millis(100);
/// After this a question has failed, and counts as answered then.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Every how many periods /metrics is read: a scrape costs more than a call.
const METRICS_EACH: u64 = 5;
/// Bytes of the blob that is read.
const BLOB_LEN: u64 = 4096;
/// The gauge of write slots, without its prefix.
const SLOTS: &str = "_cas_write_slots_inflight";

/// What the probe has found.
#[derive(Default)]
pub struct Findings {
    pub kinds: BTreeMap<&'static str, Tally>,
    /// The highest value of the gauge of write slots; `None` when it was never there.
    pub slots_max: Option<f64>,
}

/// A probe, ready or at work.
pub struct Probe {
    go: oneshot::Sender<()>,
    running: Running,
}

/// A probe at work.
pub struct Running {
    stop: oneshot::Sender<()>,
    findings: oneshot::Receiver<Findings>,
}

/// What its questions share.
struct Prober {
    target: Target,
    http_address: Option<String>,
    asks_metrics: bool,
    instance: String,
    blob: Rc<Blob>,
    read_name: String,
    connection: RefCell<Option<Connection>>,
    findings: RefCell<Findings>,
}

impl Probe {
    /// Stores the blob that is read later. Why before everything else: under siege the server may refuse it.
    pub async fn prepare(flags: &Flags, seed: u64) -> Result<Self, RunError> {
        let maker = Maker { seed, compressibility: 0.5, zstd: false };
        let blob = maker.blob(u64::MAX - 1, BLOB_LEN);
        let blob_name = format!("blobs/{}/{BLOB_LEN}", blob.digest.hex());
        let prefix = scenario::instance_prefix(flags);
        let upload_name = format!("{prefix}uploads/{}/{blob_name}", maker.uuid(u64::MAX - 1));
        let (target, http_address) = (flags.target.clone(), flags.http_address.clone());
        let (instance, asks_metrics) = (flags.instance.clone(), flags.slot_cap.is_some());
        let (go, is_to_go) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = oneshot::channel();
        let (found, findings) = oneshot::channel();
        std::thread::spawn(move || {
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = ready.send(Err(error.to_string()));
                    return;
                }
            };
            let prober = Rc::new(Prober {
                target,
                http_address,
                asks_metrics,
                instance,
                read_name: format!("{prefix}{blob_name}"),
                blob: Rc::new(blob),
                connection: RefCell::default(),
                findings: RefCell::default(),
            });
            tokio::task::LocalSet::new().block_on(&runtime, async {
                let stored = prober.store(&upload_name).await;
                let is_stored = stored.is_ok();
                let _ = ready.send(stored.map_err(|error| format!("{}: {}", error.code, error.text)));
                if is_stored && is_to_go.await.is_ok() {
                    prober.ask_until(stopped).await;
                }
            });
            let _ = found.send(prober.findings.take());
        });
        match is_ready.await {
            Ok(Ok(())) => Ok(Self { go, running: Running { stop, findings } }),
            Ok(Err(text)) => Err(RunError::Probe(text)),
            Err(_) => Err(RunError::Probe("its thread has ended".to_owned())),
        }
    }

    /// Begins to ask.
    pub fn go(self) -> Running {
        // A thread that has ended says so when it is to finish.
        let _ = self.go.send(());
        self.running
    }
}

impl Running {
    /// Ends it when the questions on their way are answered.
    pub async fn finish(self) -> Result<Findings, RunError> {
        drop(self.stop);
        self.findings.await.map_err(|_| RunError::Probe("its thread has ended".to_owned()))
    }
}

/// The gauge of write slots of all cores now; `None` when there is none.
pub async fn slots(http_address: &str) -> Result<Option<f64>, CallError> {
    let page = tokio::time::timeout(TIMEOUT, http::get(http_address, "/metrics")).await;
    Ok(http::gauge(&page.unwrap_or_else(|_| Err(timed_out()))?, SLOTS))
}

fn timed_out() -> CallError {
    CallError::new("TIMEOUT", format!("no answer in {TIMEOUT:?}"))
}

/// What is asked.
#[derive(Clone, Copy)]
enum Question {
    Health,
    Read,
    FindMissing,
    Status,
    Metrics,
}

impl Question {
    fn name(self) -> &'static str {
        match self {
            Self::Health => "health",
            Self::Read => "read",
            Self::FindMissing => "find-missing",
            Self::Status => "status",
            Self::Metrics => "metrics",
        }
    }
}

impl Prober {
    async fn store(&self, name: &str) -> Result<(), CallError> {
        let mut head = bytes::BytesMut::new();
        wire::put_write_head(&mut head, Some(name), 0, true, self.blob.data.len());
        let message = bytes::Buf::chain(head.freeze(), self.blob.data.clone());
        self.connection().await?.unary(Method::Write, [message]).await.map(drop)
    }

    async fn ask_until(self: &Rc<Self>, mut stopped: oneshot::Receiver<()>) {
        let mut ticks = tokio::time::interval(PERIOD);
        // A late tick is asked late and counts from when it was due.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut asked = JoinSet::new();
        for round in 0.. {
            let due = tokio::select! {
                _ = &mut stopped => break,
                due = ticks.tick() => due.into_std(),
            };
            let mut questions = vec![Question::Health, Question::Read, Question::FindMissing];
            questions.extend(self.http_address.as_ref().map(|_| Question::Status));
            questions.extend((self.asks_metrics && round % METRICS_EACH == 0).then_some(Question::Metrics));
            for question in questions {
                asked.spawn_local(Rc::clone(self).ask(question, due));
            }
            while asked.try_join_next().is_some() {}
        }
        asked.join_all().await;
    }

    async fn ask(self: Rc<Self>, question: Question, due: Instant) {
        let outcome = tokio::time::timeout(TIMEOUT, self.answer(question)).await;
        let is_late = outcome.is_err();
        let mut findings = self.findings.borrow_mut();
        let tally = findings.kinds.entry(question.name()).or_default();
        match outcome.unwrap_or_else(|_| Err(timed_out())) {
            Ok(bytes) => tally.success(due.elapsed(), bytes),
            Err(error) => {
                if error.is_fatal {
                    self.connection.take();
                }
                if is_late {
                    tally.latency.record_duration(due.elapsed());
                }
                tally.error(error);
            }
        }
    }

    async fn answer(&self, question: Question) -> Result<u64, CallError> {
        match question {
            Question::Health => {
                let empty = bytes::Bytes::from_static(&[0; wire::PREFIX_LEN]);
                let answer = self.connection().await?.unary(Method::Health, [client::whole(empty)]).await?;
                // HealthCheckResponse {status = 1}: SERVING is 1.
                if answer == [8, 1] { Ok(0) } else { Err(CallError::new("WRONG_ANSWER", format!("{answer:?}"))) }
            }
            Question::Read => {
                let job = Job::Read { blob: Rc::clone(&self.blob), name: self.read_name.clone(), decode: false };
                let work = job.run(&self.connection().await?, &std::cell::Cell::default()).await?;
                Ok(work.bytes)
            }
            Question::FindMissing => {
                let absent = scenario::absent(&mut SplitMix64::new(7, 7));
                let message = wire::find_missing_request(&self.instance, [self.blob.digest, absent]);
                let (kind, method, check) = (question.name(), Method::FindMissing, Check::Missing(1));
                let job = Job::Call { kind, method, message, check, work: Work::default() };
                let work = job.run(&self.connection().await?, &std::cell::Cell::default()).await?;
                Ok(work.bytes)
            }
            Question::Status => http::get(self.http(), "/status").await.map(|page| page.len() as u64),
            Question::Metrics => {
                let page = http::get(self.http(), "/metrics").await?;
                if let Some(slots) = http::gauge(&page, SLOTS) {
                    let highest = &mut self.findings.borrow_mut().slots_max;
                    *highest = Some(highest.unwrap_or(0.0).max(slots));
                }
                Ok(page.len() as u64)
            }
        }
    }

    fn http(&self) -> &str {
        self.http_address.as_deref().unwrap_or_default()
    }

    /// The connection, opened again when it has broken.
    async fn connection(&self) -> Result<Connection, CallError> {
        let open = self.connection.borrow().clone();
        if let Some(connection) = open {
            return Ok(connection);
        }
        let connection = Connection::open(&self.target, Windows::new(1 << 20, 16_384)).await?;
        self.connection.replace(Some(connection.clone()));
        Ok(connection)
    }
}
