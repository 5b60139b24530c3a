//! Runs the phases: workers take jobs from one supply, results go into tallies.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet, spawn_local};

use crate::client::{CallError, Connection, Windows};
use crate::flags::Flags;
use crate::job::{Job, Work};
use crate::measure::Tally;
use crate::payload::SplitMix64;
use crate::probe::{self, Findings, Probe};
use crate::process::{Process, Sampler};
use crate::report::{PhaseReport, Report, Unfinished, Usage};
use crate::scenario::{Phase, Plan};
use crate::supply::{self, Schedule, Supply};
use crate::verify;

/// Why a run could not go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{0}")]
    Connect(String),
    #[error("there is no process {0} to account for")]
    NoServer(u32),
    #[error("cannot store the blobs to be read: {0}")]
    Fill(String),
    #[error("the probe failed: {0}")]
    Probe(String),
    #[error("cannot verify: {}: {}", .0.code, .0.text)]
    Verify(CallError),
    #[error("cannot write the report: {0}")]
    Report(#[from] std::io::Error),
    #[error("a worker panicked: {0}")]
    Panicked(#[from] tokio::task::JoinError),
}

/// Runs everything that `flags` asks for. Returns how many calls and checks failed.
pub async fn run(flags: Rc<Flags>) -> Result<u64, RunError> {
    let seed = flags.seed.unwrap_or_else(fresh_seed);
    if let Some(pid) = flags.server_pid {
        Process::read(pid).ok_or(RunError::NoServer(pid))?;
    }
    let mut report = Report::new(&flags, seed)?;
    let plan = Plan::new(Rc::clone(&flags), seed);
    for repeat in 0..flags.repeat {
        let phases = plan.reseeded(SplitMix64::new(seed, u64::from(repeat)).next_u64()).phases(repeat);
        for phase in phases {
            if let Some(done) = run_phase(&flags, phase, repeat, seed).await? {
                report.add(done)?;
            }
        }
    }
    report.finish()
}

/// A seed from the clock: two runs against one server must not store the same blobs.
fn fresh_seed() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    SplitMix64::new(now.as_nanos() as u64, u64::from(std::process::id())).next_u64()
}

/// What the workers of one phase share.
struct Shared {
    flags: Rc<Flags>,
    supply: RefCell<Supply>,
    tallies: RefCell<BTreeMap<&'static str, Tally>>,
    unfinished: RefCell<Unfinished>,
    digests: Cell<u64>,
    /// In an open loop, a permit for each call that is due.
    permits: Option<Arc<Semaphore>>,
    /// Whether refusals are to be expected.
    forgives: bool,
    /// When calls are cut off: the end of a siege.
    cut: Option<Instant>,
}

/// Codes that servers refuse a write with.
const REFUSALS: [&str; 3] = ["FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "UNAVAILABLE"];
/// A push that is cut off and has sent nothing for so long was stuck.
const STUCK: Duration = Duration::from_secs(10);

impl Shared {
    async fn next(&self) -> Option<(Job, Option<Instant>)> {
        if let Some(permits) = &self.permits {
            permits.acquire().await.ok()?.forget();
        }
        self.supply.borrow_mut().next(Instant::now())
    }

    fn record(&self, kind: &'static str, elapsed: Duration, outcome: Result<Work, CallError>) {
        let mut tallies = self.tallies.borrow_mut();
        match outcome {
            Ok(work) => {
                tallies.entry(kind).or_default().success(elapsed, work.bytes);
                self.digests.set(self.digests.get() + work.digests);
            }
            Err(error) if self.is_refusal(&error) => tallies.entry("refused").or_default().refusal(elapsed, error),
            Err(error) => tallies.entry(kind).or_default().error(error),
        }
    }

    fn is_refusal(&self, error: &CallError) -> bool {
        self.forgives && REFUSALS.contains(&error.code)
    }

    fn cut_off(&self, moved: Option<Instant>) {
        let mut unfinished = self.unfinished.borrow_mut();
        unfinished.calls += 1;
        match moved {
            None => unfinished.unbegun += 1,
            Some(moved) => unfinished.stuck += u64::from(moved.elapsed() > STUCK),
        }
    }
}

/// Connections for one phase. Made when its payload is ready: a server gives new ones only seconds to speak.
async fn connect(flags: &Flags) -> Result<Vec<Connection>, RunError> {
    let windows = Windows::new(flags.window(), flags.frame);
    let mut connections = Vec::new();
    for _ in 0..flags.connections {
        let connection = Connection::open(&flags.target, windows).await.map_err(|e| RunError::Connect(e.text))?;
        connections.push(connection);
    }
    Ok(connections)
}

/// `None` for a phase that only stores what later ones need.
async fn run_phase(flags: &Rc<Flags>, phase: Phase, repeat: u32, seed: u64) -> Result<Option<PhaseReport>, RunError> {
    let Phase { name, fill, prepare, make, family } = phase;
    let is_timed = fill.is_none();
    let duration = flags.duration.filter(|_| is_timed);
    let rate = flags.rate.filter(|_| is_timed);
    let mut count = fill.or(flags.count).unwrap_or(u64::MAX);
    if let (Some(rate), Some(duration)) = (rate, duration) {
        count = count.min(supply::calls_within(rate, duration));
    }
    let mut supply = Supply::new(make, count);
    let probe = if flags.probe && is_timed { Some(Probe::prepare(flags, seed).await?) } else { None };
    let worker_count = flags.concurrency() as usize;
    if prepare {
        // What a siege needs at once; without a count, more than a second's worth of small calls is guesswork.
        let jobs_max = if flags.scenario.is_siege() { worker_count as u64 } else { 2_000_000 };
        supply.prepare(jobs_max, flags.prepare_max);
    }
    let connections = connect(flags).await?;
    let server = |pid| Process::read(pid).ok_or(RunError::NoServer(pid));
    let server_before = flags.server_pid.map(server).transpose()?;
    let sampler = flags.server_pid.filter(|_| is_timed).map(Sampler::start);
    let client_before = Process::read(std::process::id()).unwrap_or_default();
    let probe = probe.map(Probe::go);
    let start = Instant::now();
    // An open loop ends when all calls have been made that were due in time.
    supply.deadline = duration.filter(|_| rate.is_none()).and_then(|duration| start.checked_add(duration));
    let cut = supply.deadline.filter(|_| flags.scenario.is_siege());
    let permits = rate.map(|rate| supply.open_loop(Schedule::new(start, rate), worker_count));
    let shared = Rc::new(Shared {
        flags: Rc::clone(flags),
        supply: RefCell::new(supply),
        tallies: RefCell::default(),
        unfinished: RefCell::default(),
        digests: Cell::new(0),
        permits,
        // Blobs to be read must be there.
        forgives: is_timed && flags.scenario.expects_refusals(),
        cut,
    });
    let progress = (!flags.quiet).then(|| show_progress(name, repeat, count, Rc::clone(&shared)));
    let mut workers = JoinSet::new();
    for connection in connections.iter().cycle().take(worker_count) {
        workers.spawn_local(work(connection.clone(), Rc::clone(&shared)));
    }
    drop(connections);
    while let Some(ended) = workers.join_next().await {
        ended?;
    }
    let wall_s = start.elapsed().as_secs_f64();
    let client_after = Process::read(std::process::id()).unwrap_or_default();
    if let Some(progress) = progress {
        progress.abort();
    }
    let kinds = shared.tallies.take();
    if !is_timed {
        let failed = kinds.values().flat_map(|tally| &tally.errors).next();
        return failed
            .map_or(Ok(None), |(code, (count, text))| Err(RunError::Fill(format!("{count} times {code}: {text}"))));
    }
    let findings = match probe {
        Some(probe) => probe.finish().await?,
        None => Findings::default(),
    };
    let mut done = PhaseReport {
        name,
        repeat,
        wall_s,
        kinds,
        digests: shared.digests.get(),
        unfinished: shared.unfinished.take(),
        client_cpu_s: client_after.cpu_s - client_before.cpu_s,
        usage: None,
        samples: Vec::new(),
        probes: findings.kinds,
        slot_cap: flags.slot_cap,
        slots_max: findings.slots_max,
        slots_after: None,
        verdict: None,
    };
    if flags.server_pid.is_some() || flags.slot_cap.is_some() {
        tokio::time::sleep(Duration::from_millis(flags.settle)).await;
    }
    if let (Some(pid), Some(before)) = (flags.server_pid, server_before) {
        let after = server(pid)?;
        let rss_peak_kib = after.rss_peak_kib;
        done.usage = Some(Usage { cpu_s: after.cpu_s - before.cpu_s, rss_kib: after.rss_kib, rss_peak_kib });
    }
    done.samples = sampler.map(Sampler::finish).unwrap_or_default();
    if let (Some(_), Some(address)) = (flags.slot_cap, &flags.http_address) {
        done.slots_after = probe::slots(address).await.map_err(RunError::Verify)?;
    }
    if let Some(family) = family.filter(|_| flags.verify) {
        let ledger = std::mem::take(&mut shared.supply.borrow_mut().ledger);
        done.verdict = Some(verify::verify(flags, family, ledger).await?);
    }
    Ok(Some(done))
}

/// One call after the other until the supply ends, the time is over or the connection breaks.
async fn work(connection: Connection, shared: Rc<Shared>) {
    while let Some((job, due)) = shared.next().await {
        let (kind, push) = (job.kind(), job.push());
        let is_visit = matches!(job, Job::Visit { .. });
        let began = Instant::now();
        let moved = Cell::new(None);
        let timeout = began + shared.flags.timeout();
        let until = shared.cut.map_or(timeout, |cut| cut.min(timeout));
        let outcome = match tokio::time::timeout_at(until.into(), job.run(&connection, &moved)).await {
            Ok(outcome) => outcome,
            Err(_) if shared.cut == Some(until) => return shared.cut_off(moved.get()),
            Err(_) => Err(CallError::new("TIMEOUT", format!("no answer in {:?}", shared.flags.timeout()))),
        };
        let is_fatal = outcome.as_ref().is_err_and(|error| error.is_fatal);
        let is_refused = outcome.as_ref().is_err_and(|error| shared.is_refusal(error));
        match push {
            Some(push) if outcome.is_ok() => shared.supply.borrow_mut().acknowledged(&push),
            Some(push) if is_refused => shared.supply.borrow_mut().refused(push),
            _ => {}
        }
        // In an open loop a call that had to wait for a worker has waited since it was due.
        shared.record(kind, due.unwrap_or(began).elapsed(), outcome);
        if is_fatal && !is_visit {
            return;
        }
        if is_refused && shared.flags.refused_pause > 0 {
            tokio::time::sleep(Duration::from_millis(shared.flags.refused_pause)).await;
        }
    }
}

/// A line that rewrites itself each second on a terminal, or a new line each five seconds elsewhere.
fn show_progress(name: &'static str, repeat: u32, count: u64, shared: Rc<Shared>) -> JoinHandle<()> {
    spawn_local(async move {
        let is_terminal = std::io::stderr().is_terminal();
        let period = Duration::from_secs(if is_terminal { 1 } else { 5 });
        let (mut before, mut seconds) = (0, 0);
        loop {
            tokio::time::sleep(period).await;
            seconds += period.as_secs();
            let (mut ops, mut refused, mut errors) = (0, 0, 0);
            for tally in shared.tallies.borrow().values() {
                ops += tally.ops;
                refused += tally.refusal_count();
                errors += tally.error_count();
            }
            let of = if count == u64::MAX { String::new() } else { format!(" of {count}") };
            let rate = (ops - before) / period.as_secs();
            let (start, end) = if is_terminal { ("\r", "\x1b[K") } else { ("", "\n") };
            let refused = if refused == 0 { String::new() } else { format!(", {refused} refused") };
            let line = format!("{name} #{repeat}: {seconds} s, {ops}{of} calls, {rate}/s{refused}, {errors} errors");
            let mut err = std::io::stderr();
            let _ = write!(err, "{start}{line}{end}").and_then(|()| err.flush());
            before = ops;
        }
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::peer::{Mood, Peer};

    /// Runs `load <words> --address <peer>` in this thread.
    fn drive(peer: &Rc<Peer>, words: &str) -> Result<u64, RunError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let address = peer.start().await;
            let own = format!("load {words} --address {address} --connections 2 --streams 3 --quiet --seed 42");
            let flags = Flags::parse_from(own.split_ascii_whitespace()).completed().expect("valid");
            run(Rc::new(flags)).await
        })
    }

    /// Goal: every scenario's calls are what a REAPI server understands, and its answers are checked to the byte.
    /// Method: a server in memory that takes them apart; several chunks to a blob, windows smaller than a blob.
    #[test]
    fn every_scenario_runs_against_a_good_server() {
        for (words, calls) in [
            ("write --count 40 --size 70000", 40),
            ("write --count 40 --size 0", 40),
            ("read --count 40 --size 70000 --blobs 5 --window 65535", 45),
            ("read --count 40 --size 70000 --blobs 5 --zstd --repeat 3", 125),
            ("find-missing --count 40 --digests-per-call 9 --blobs 5", 45),
            ("action-cache --count 40 --blobs 5", 85),
            ("batch --count 10 --blobs 30 --digests-per-call 20", 50),
            ("mix --count 40 --blobs 5", 45),
            ("batch --count 10 --blobs 30 --digests-per-call 20 --size 100 --size-p99 1MiB", 50),
            ("write --duration 0.2 --count 10 --instance some/where --prepare-max 100", 10),
            ("write --count 40 --rate 2000", 40),
            ("write --duration 0.1 --rate 200", 20),
            ("burst --count 10 --size 100000 --verify", 21),
            ("burst --count 10 --size 100000 --zstd --concurrency 40", 10),
            ("churn --count 10", 10),
        ] {
            let peer = Rc::new(Peer::default());
            assert_eq!(drive(&peer, words).expect(words), 0, "{words}");
            assert_eq!(peer.calls.get(), calls, "{words}");
        }
    }

    /// Goal: sieges last as long as they should and no longer, others are served meanwhile, and only refusals are
    /// forgiven. Method: a good server, and one that refuses everything.
    #[test]
    fn sieges_end_with_their_time() {
        for words in [
            "burst --duration 0.3 --size 100000 --concurrency 20 --probe --verify",
            "stalled-readers --duration 0.3 --size 200000 --concurrency 20 --blobs 2 --probe",
            "slow-writers --duration 0.3 --concurrency 20 --size 5000 --pace 4000 --probe",
        ] {
            let peer = Rc::new(Peer::default());
            let start = Instant::now();
            assert_eq!(drive(&peer, words).expect(words), 0, "{words}");
            assert!(start.elapsed() >= Duration::from_millis(300) && peer.calls.get() > 20, "{words}");
        }
        let peer = Rc::new(Peer::default());
        peer.mood.set(Mood::Refuses);
        assert_eq!(drive(&peer, "burst --duration 0.2 --size 100000 --refused-pause 50 --verify").ok(), None);
        assert_eq!(drive(&peer, "burst --duration 0.2 --size 100000 --refused-pause 50").expect("runs"), 0);
        assert_eq!(drive(&peer, "burst --count 20 --size 100000").expect("runs"), 0);
        assert!(
            matches!(drive(&peer, "burst --count 20 --probe"), Err(RunError::Probe(text)) if text.contains("no room"))
        );
    }

    /// Goal: a server that lies is found out at the end of a burst. Method: one whose Reads flip a bit.
    #[test]
    fn a_burst_is_verified() {
        let peer = Rc::new(Peer::default());
        peer.mood.set(Mood::Corrupts);
        assert_eq!(drive(&peer, "burst --count 10 --size 100000 --verify").expect("runs"), 10);
    }

    /// Goal: what a server does wrong is counted, not passed over. Method: one server for each fault.
    #[test]
    fn faults_are_errors() {
        let peer = Rc::new(Peer::default());
        peer.mood.set(Mood::Refuses);
        assert_eq!(drive(&peer, "write --count 20").expect("runs"), 20);
        assert!(matches!(drive(&peer, "read --count 20"), Err(RunError::Fill(text)) if text.contains("no room")));
        peer.mood.set(Mood::Corrupts);
        assert_eq!(drive(&peer, "read --count 20 --blobs 5").expect("runs"), 20);
        peer.mood.set(Mood::HangsUp);
        assert!(drive(&peer, "write --count 20").expect("ends") > 0);
        assert!(matches!(drive(&peer, "write --server-pid 4294967295"), Err(RunError::NoServer(_))));
    }
}
