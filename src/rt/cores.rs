//! Executors: one for each configured core, pinned where there are enough CPUs.

use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;
use std::sync::mpsc;
use std::thread::JoinHandle;

use glommio::{LocalExecutor, LocalExecutorBuilder, Placement, PoolPlacement};

pub use super::host::{HostError, allowed_cpus, raise_descriptor_limit};
use super::signal::Shutdown;
use super::{allocator, host, pulse};

/// Entries of each ring: more than the operations of one turn.
const RING_DEPTH: usize = 128;
/// Threads for blocking calls, for each executor.
const BLOCKING_THREADS: usize = 1;
/// The most executors in one process. `CoreId` is a `u16`; this is a guard against typing errors.
const CORES_MAX: usize = 1024;

/// How many executors, and the CPU of each (`None`: wherever the kernel puts it).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorePlan {
    cpus: Vec<Option<usize>>,
}

/// Why a `--cores` value was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("`{0}` is neither a number of cores nor a list of CPUs such as `0-15,18`")]
    Malformed(String),
    #[error("at least one core is needed")]
    None,
    #[error("{0} cores are more than the {CORES_MAX} that are supported")]
    TooMany(usize),
    #[error("the range `{0}` ends before it starts")]
    Backwards(String),
    #[error("CPU {0} is listed twice")]
    Twice(usize),
    #[error("this process may not run on CPU {cpu}; it may run on {allowed:?} (see taskset, cpusets, CPUAffinity=)")]
    NotAllowed { cpu: usize, allowed: Vec<usize> },
}

impl CorePlan {
    /// One pinned executor for each CPU that this process may use.
    pub fn every_cpu() -> Self {
        Self { cpus: allowed_cpus().into_iter().map(Some).collect() }
    }

    /// `count` executors, pinned when there are CPUs enough.
    pub fn count(count: usize) -> Result<Self, PlanError> {
        Self::count_on(count, &allowed_cpus())
    }

    /// How many executors.
    pub fn len(&self) -> usize {
        self.cpus.len()
    }

    /// Never true: a plan has at least one core.
    pub fn is_empty(&self) -> bool {
        self.cpus.is_empty()
    }

    fn count_on(count: usize, allowed: &[usize]) -> Result<Self, PlanError> {
        match count {
            0 => Err(PlanError::None),
            n if n > CORES_MAX => Err(PlanError::TooMany(n)),
            n if n <= allowed.len() => Ok(Self { cpus: allowed[..n].iter().copied().map(Some).collect() }),
            n => Ok(Self { cpus: vec![None; n] }),
        }
    }

    /// A number is a count; anything with a comma or a dash is a list of CPUs.
    fn parse(text: &str, allowed: &[usize]) -> Result<Self, PlanError> {
        let malformed = || PlanError::Malformed(text.to_owned());
        let number = |digits: &str| digits.trim().parse::<usize>().map_err(|_| malformed());
        if !text.contains([',', '-']) {
            return Self::count_on(number(text)?, allowed);
        }
        let mut cpus: Vec<Option<usize>> = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if last < first {
                return Err(PlanError::Backwards(part.trim().to_owned()));
            }
            if last - first >= CORES_MAX || cpus.len() + (last - first) >= CORES_MAX {
                return Err(PlanError::TooMany(cpus.len().saturating_add(last - first).saturating_add(1)));
            }
            for cpu in first..=last {
                if !allowed.contains(&cpu) {
                    return Err(PlanError::NotAllowed { cpu, allowed: allowed.to_vec() });
                }
                if cpus.contains(&Some(cpu)) {
                    return Err(PlanError::Twice(cpu));
                }
                cpus.push(Some(cpu));
            }
        }
        Ok(Self { cpus })
    }
}

impl FromStr for CorePlan {
    type Err = PlanError;

    /// `4`: that many cores, pinned when there are CPUs enough. `0-15,18`: one core on each CPU listed.
    fn from_str(text: &str) -> Result<Self, PlanError> {
        Self::parse(text, &allowed_cpus())
    }
}

impl Default for CorePlan {
    fn default() -> Self {
        Self::every_cpu()
    }
}

/// Why the executors did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("cannot start the thread of core {core}: {source}")]
    Thread { core: usize, source: std::io::Error },
    #[error("cannot start the executor of core {core}: {detail}")]
    Executor { core: usize, detail: String },
}

/// A core ended while the others run: what it owned is unreachable, so the process must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("core {core} {}", if *.panicked { "panicked" } else { "ended without being told to" })]
pub struct CoreDied {
    pub core: usize,
    pub panicked: bool,
}

enum Report {
    Started,
    Refused { core: usize, detail: String },
    Ended(Ended),
}

struct Ended {
    core: usize,
    panicked: bool,
}

/// Running executors.
pub struct Cores {
    threads: Vec<JoinHandle<()>>,
    reports: mpsc::Receiver<Report>,
    /// Ends that were reported before every core had started.
    ended: VecDeque<Ended>,
    shutdown: Shutdown,
}

/// Starts one executor for each core of `plan`, and returns when all of them exist.
///
/// `io_memory`: bytes that each of them registers with the kernel at most, and reads the drive into while there are some.
///
/// `prepare(core)` is called here, for each core in order, and returns what runs on that core's thread: a function
/// whose future is the core's main task. That future must end once `shutdown` was triggered, and not before.
pub fn launch<P, M, F>(
    plan: &CorePlan,
    io_memory: usize,
    shutdown: &Shutdown,
    mut prepare: P,
) -> Result<Cores, StartError>
where
    P: FnMut(usize) -> M,
    M: FnOnce() -> F + Send + 'static,
    F: Future<Output = ()> + 'static,
{
    host::probe_uring()?;
    let io_memory = host::choose_io_memory(plan.len(), io_memory)?;
    allocator::set_up();
    let (reporter, reports) = mpsc::channel();
    let mut cores = Cores { threads: Vec::new(), reports, ended: VecDeque::new(), shutdown: shutdown.clone() };
    let launched = cores.start(plan, io_memory, &reporter, &mut prepare).and_then(|()| cores.wait_started());
    // The ones that run already have nobody to talk to.
    launched.inspect_err(|_| shutdown.trigger())?;
    Ok(cores)
}

impl Cores {
    /// Blocks until every core has ended after a shutdown, or one has died.
    pub fn wait(mut self) -> Result<(), CoreDied> {
        for _ in 0..self.threads.len() {
            let Ended { core, panicked } = self.ended.pop_front().unwrap_or_else(|| match self.reports.recv() {
                Ok(Report::Ended(ended)) => ended,
                Ok(Report::Started | Report::Refused { .. }) => unreachable!("`launch` took one for each core"),
                Err(mpsc::RecvError) => unreachable!("each thread reports its end"),
            });
            if panicked || !self.shutdown.is_triggered() {
                return Err(CoreDied { core, panicked });
            }
        }
        self.threads.into_iter().for_each(|thread| drop(thread.join()));
        Ok(())
    }

    fn start<P, M, F>(
        &mut self,
        plan: &CorePlan,
        io_memory: usize,
        reporter: &mpsc::Sender<Report>,
        prepare: &mut P,
    ) -> Result<(), StartError>
    where
        P: FnMut(usize) -> M,
        M: FnOnce() -> F + Send + 'static,
        F: Future<Output = ()> + 'static,
    {
        for (core, &cpu) in plan.cpus.iter().enumerate() {
            let main = prepare(core);
            let reporter = reporter.clone();
            let thread = std::thread::Builder::new()
                .name(format!("core-{core}"))
                .spawn(move || run_core(core, cpu, io_memory, &reporter, main))
                .map_err(|source| StartError::Thread { core, source })?;
            self.threads.push(thread);
        }
        Ok(())
    }

    fn wait_started(&mut self) -> Result<(), StartError> {
        let mut missing = self.threads.len();
        while missing > 0 {
            match self.reports.recv() {
                Ok(Report::Started) => missing -= 1,
                Ok(Report::Refused { core, detail }) => return Err(StartError::Executor { core, detail }),
                Ok(Report::Ended(ended)) => self.ended.push_back(ended),
                Err(mpsc::RecvError) => unreachable!("each thread reports its start"),
            }
        }
        Ok(())
    }
}

/// The whole life of a core's thread.
fn run_core<M, F>(core: usize, cpu: Option<usize>, io_memory: usize, reporter: &mpsc::Sender<Report>, main: M)
where
    M: FnOnce() -> F,
    F: Future<Output = ()> + 'static,
{
    // A report that nobody takes: `wait` has returned, and the process is ending.
    let report = |report| drop(reporter.send(report));
    let placement = cpu.map_or(Placement::Unbound, Placement::Fixed);
    let executor = match make(placement, io_memory) {
        Ok(executor) => executor,
        Err(detail) => return report(Report::Refused { core, detail }),
    };
    report(Report::Started);
    let ended = catch_unwind(AssertUnwindSafe(|| pulse::run(&executor, async move { main().await })));
    if ended.is_err() {
        // Why: dropping a broken executor runs the drops of its tasks, which may panic or hang, and must not come
        // before the report.
        std::mem::forget(executor);
    } else {
        drop(executor);
    }
    report(Report::Ended(Ended { core, panicked: ended.is_err() }));
}

fn make(placement: Placement, io_memory: usize) -> Result<LocalExecutor, String> {
    // Why no `preempt_timer`: at its default of 100 ms the wrong park (see `pulse`) is rare; shorter ones invite it.
    LocalExecutorBuilder::new(placement)
        .io_memory(io_memory)
        .ring_depth(RING_DEPTH)
        .blocking_thread_pool_placement(PoolPlacement::Unbound(BLOCKING_THREADS))
        .make()
        .map_err(|error| error.to_string())
}

/// Logs every panic through `tracing`, or as before where nobody listens.
pub fn log_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !tracing::enabled!(tracing::Level::ERROR) {
            return before(panic);
        }
        let place = panic.location().map_or_else(String::new, ToString::to_string);
        let thread = std::thread::current();
        let text = panic.payload_as_str().unwrap_or("a value that is no text");
        tracing::error!(thread = thread.name().unwrap_or("?"), %place, "panic: {text}");
    }));
}

/// Runs `future` on an executor of the calling thread: for tests and tools.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    allocator::set_up();
    let executor = make(Placement::Unbound, 64 << 10).expect("an executor for this thread");
    pulse::run(&executor, async move {
        let _busy = pulse::busy();
        future.await
    })
}

/// Whose memory it is that bounds this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryOf {
    Machine,
    Cgroup,
}

/// Memory that this process may use, in bytes: the machine's, or the cgroup's limit when that is lower.
pub fn memory_available() -> (u64, MemoryOf) {
    // SAFETY: sysconf takes no pointers.
    let (pages, page) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let machine = u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(page).unwrap_or(0));
    let read = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let cgroup = cgroup_dirs().iter().filter_map(|dir| read(&format!("{dir}/memory.max"))).min();
    match cgroup {
        Some(cgroup) if cgroup < machine => (cgroup, MemoryOf::Cgroup),
        _ => (machine, MemoryOf::Machine),
    }
}

/// The directories of this process's cgroup (version 2) and of all above it.
fn cgroup_dirs() -> Vec<String> {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let mut dirs = vec!["/sys/fs/cgroup".to_owned()];
    for part in path.split('/').filter(|part| !part.is_empty()) {
        let deeper = format!("{}/{part}", dirs.last().expect("never empty"));
        dirs.push(deeper);
    }
    dirs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str, allowed: &[usize]) -> Result<Vec<Option<usize>>, PlanError> {
        CorePlan::parse(text, allowed).map(|plan| plan.cpus)
    }

    /// Goal: a count pins where there are CPUs enough, a list pins to what it names.
    /// Method: parse both forms against a made-up set of allowed CPUs.
    #[test]
    fn counts_and_lists() {
        let allowed = [0, 1, 2, 3, 8];
        assert_eq!(plan("2", &allowed), Ok(vec![Some(0), Some(1)]));
        assert_eq!(plan("5", &allowed), Ok(vec![Some(0), Some(1), Some(2), Some(3), Some(8)]));
        assert_eq!(plan("6", &allowed), Ok(vec![None; 6]));
        assert_eq!(plan("1-3,8", &allowed), Ok(vec![Some(1), Some(2), Some(3), Some(8)]));
        assert_eq!(plan("8-8", &allowed), Ok(vec![Some(8)]));
        assert_eq!(plan(" 2 , 0 ", &allowed), Ok(vec![Some(2), Some(0)]));
    }

    /// Goal: each way to get it wrong has its own text.
    /// Method: one example for each error.
    #[test]
    fn refused_plans() {
        let allowed = [0, 1, 2, 3];
        assert_eq!(plan("0", &allowed), Err(PlanError::None));
        assert_eq!(plan("1025", &allowed), Err(PlanError::TooMany(1025)));
        assert_eq!(plan("3-1", &allowed), Err(PlanError::Backwards("3-1".into())));
        assert_eq!(plan("1,0-2", &allowed), Err(PlanError::Twice(1)));
        assert_eq!(plan("2-4", &allowed), Err(PlanError::NotAllowed { cpu: 4, allowed: allowed.to_vec() }));
        assert!(matches!(plan("0-99999999999", &allowed), Err(PlanError::TooMany(_))));
        for text in ["", "many", "1,", "-1", "1-2-3", "0x3"] {
            assert_eq!(plan(text, &allowed), Err(PlanError::Malformed(text.into())), "{text}");
        }
    }
}
