//! Runs the phases: workers take jobs from one supply, results go into tallies.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::io::{IsTerminal, Write};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use tokio::task::{JoinHandle, JoinSet, spawn_local};

use crate::Flags;
use crate::client::{CallError, Connection, Windows};
use crate::measure::{Process, Tally};
use crate::payload::SplitMix64;
use crate::report::{PhaseReport, Report, Usage};
use crate::scenario::{Job, Make, Phase, Plan, Work};

/// Why a run could not go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{0}")]
    Connect(String),
    #[error("there is no process {0} to account for")]
    NoServer(u32),
    #[error("cannot store the blobs to be read: {0}")]
    Fill(String),
    #[error("cannot write the report: {0}")]
    Report(#[from] std::io::Error),
    #[error("a worker panicked: {0}")]
    Panicked(#[from] tokio::task::JoinError),
}

/// Runs everything that `flags` asks for. Returns how many calls failed.
pub async fn run(flags: Rc<Flags>) -> Result<u64, RunError> {
    let seed = flags.seed.unwrap_or_else(fresh_seed);
    let windows = Windows {
        stream: u32::try_from(flags.window).unwrap_or(u32::MAX).clamp(1, i32::MAX as u32),
        connection: u32::try_from(flags.window * 16).unwrap_or(u32::MAX).clamp(65_535, i32::MAX as u32),
        frame: u32::try_from(flags.frame).unwrap_or(u32::MAX).clamp(16_384, (1 << 24) - 1),
    };
    if let Some(pid) = flags.server_pid {
        Process::read(pid).ok_or(RunError::NoServer(pid))?;
    }
    let mut connections = Vec::new();
    for _ in 0..flags.connections {
        let connection = Connection::open(&flags.address, windows).await.map_err(|e| RunError::Connect(e.text))?;
        connections.push(connection);
    }
    let mut report = Report::new(&flags, seed)?;
    let plan = Plan::new(Rc::clone(&flags), seed);
    for repeat in 0..flags.repeat {
        let phases = plan.reseeded(SplitMix64::new(seed, u64::from(repeat)).next_u64()).phases(repeat);
        for phase in phases {
            if let Some(done) = run_phase(&flags, &connections, phase, repeat).await? {
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
    supply: RefCell<Supply>,
    tallies: RefCell<BTreeMap<&'static str, Tally>>,
    digests: Cell<u64>,
    timeout: Duration,
}

/// Jobs: those made beforehand, then new ones until the end.
struct Supply {
    prepared: VecDeque<Job>,
    make: Make,
    next_serial: u64,
    given: u64,
    count: u64,
    deadline: Option<Instant>,
}

impl Supply {
    fn next(&mut self, now: Instant) -> Option<Job> {
        if self.given == self.count || self.deadline.is_some_and(|deadline| now >= deadline) {
            return None;
        }
        self.given += 1;
        Some(self.prepared.pop_front().unwrap_or_else(|| self.make_one()))
    }

    fn make_one(&mut self) -> Job {
        self.next_serial += 1;
        (self.make)(self.next_serial - 1)
    }
}

impl Shared {
    fn record(&self, kind: &'static str, elapsed: Duration, outcome: Result<Work, CallError>) {
        let mut tallies = self.tallies.borrow_mut();
        let tally = tallies.entry(kind).or_default();
        tally.ops += 1;
        match outcome {
            Ok(work) => {
                tally.bytes += work.bytes;
                tally.latency.record(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX));
                self.digests.set(self.digests.get() + work.digests);
            }
            Err(error) => tally.errors.entry(error.code).or_insert((0, error.text)).0 += 1,
        }
    }
}

/// `None` for a phase that only stores what later ones need.
async fn run_phase(
    flags: &Flags,
    connections: &[Connection],
    phase: Phase,
    repeat: u32,
) -> Result<Option<PhaseReport>, RunError> {
    let Phase { name, fill, prepare, make } = phase;
    let count = fill.or(flags.count).unwrap_or(u64::MAX);
    let mut supply = Supply { prepared: VecDeque::new(), make, next_serial: 0, given: 0, count, deadline: None };
    if prepare {
        let mut held = 0;
        // Without a count, more than a second's worth of small calls is guesswork: the rest is made on the way.
        for _ in 0..count.min(2_000_000) {
            let job = supply.make_one();
            held += job.held_bytes();
            supply.prepared.push_back(job);
            if held >= flags.prepare_max {
                break;
            }
        }
    }
    let server = |pid| Process::read(pid).ok_or(RunError::NoServer(pid));
    let server_before = flags.server_pid.map(server).transpose()?;
    let client_before = Process::read(std::process::id()).unwrap_or_default();
    let start = Instant::now();
    supply.deadline = flags.duration.filter(|_| fill.is_none()).and_then(|duration| start.checked_add(duration));
    let shared = Rc::new(Shared {
        supply: RefCell::new(supply),
        tallies: RefCell::default(),
        digests: Cell::new(0),
        timeout: flags.timeout,
    });
    let progress = (!flags.quiet).then(|| show_progress(name, repeat, count, Rc::clone(&shared)));
    let mut workers = JoinSet::new();
    for _ in 0..flags.streams {
        for connection in connections {
            workers.spawn_local(work(connection.clone(), Rc::clone(&shared)));
        }
    }
    while let Some(ended) = workers.join_next().await {
        ended?;
    }
    let wall_s = start.elapsed().as_secs_f64();
    let client_after = Process::read(std::process::id()).unwrap_or_default();
    if let Some(progress) = progress {
        progress.abort();
    }
    let kinds = shared.tallies.take();
    if fill.is_some() {
        let failed = kinds.values().flat_map(|tally| &tally.errors).next();
        return failed
            .map_or(Ok(None), |(code, (count, text))| Err(RunError::Fill(format!("{count} times {code}: {text}"))));
    }
    let mut usage = None;
    if let (Some(pid), Some(before)) = (flags.server_pid, server_before) {
        tokio::time::sleep(Duration::from_millis(flags.settle)).await;
        let after = server(pid)?;
        let rss_peak_kib = after.rss_peak_kib;
        usage = Some(Usage { cpu_s: after.cpu_s - before.cpu_s, rss_kib: after.rss_kib, rss_peak_kib });
    }
    let client_cpu_s = client_after.cpu_s - client_before.cpu_s;
    Ok(Some(PhaseReport { name, repeat, wall_s, kinds, digests: shared.digests.get(), usage, client_cpu_s }))
}

/// One call after the other until the supply ends or the connection breaks.
async fn work(connection: Connection, shared: Rc<Shared>) {
    let mut now = Instant::now();
    loop {
        let Some(job) = shared.supply.borrow_mut().next(now) else { return };
        let kind = job.kind();
        let start = Instant::now();
        let outcome = match tokio::time::timeout(shared.timeout, job.run(&connection)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(CallError::new("TIMEOUT", format!("no answer in {:?}", shared.timeout))),
        };
        let is_fatal = outcome.as_ref().is_err_and(|error| error.is_fatal);
        now = Instant::now();
        shared.record(kind, now - start, outcome);
        if is_fatal {
            return;
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
            let (ops, errors) = shared
                .tallies
                .borrow()
                .values()
                .fold((0, 0), |(ops, errors), tally| (ops + tally.ops, errors + tally.error_count()));
            let of = if count == u64::MAX { String::new() } else { format!(" of {count}") };
            let rate = (ops - before) / period.as_secs();
            let (start, end) = if is_terminal { ("\r", "\x1b[K") } else { ("", "\n") };
            let line = format!("{name} #{repeat}: {seconds} s, {ops}{of} calls, {rate}/s, {errors} errors");
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
            run(Rc::new(Flags::parse_from(own.split_ascii_whitespace()))).await
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
            ("write --duration 0.2 --count 10 --instance some/where --prepare-max 100", 10),
        ] {
            let peer = Rc::new(Peer::default());
            assert_eq!(drive(&peer, words).expect(words), 0, "{words}");
            assert_eq!(peer.calls.get(), calls, "{words}");
        }
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
