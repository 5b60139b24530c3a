//! From the command line to running cores, and back to an exit code.

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};

use crate::access::{AccessFiles, FileError, Passwords};
use crate::activity::Activity;
use crate::backend;
use crate::backend::settings::{BackendSettings, Settings};
use crate::backend::tls::{NoTrust, Trust};
use crate::budget::Budget;
use crate::config::effective::Effective;
use crate::config::inputs::{Inputs, Outcome};
use crate::config::{self, Config, ConfigError, Flags, LogTimezone};
use crate::kept::{Kept, Source as _, Watched};
use crate::limits;
use crate::logging::{self, Log};
use crate::metrics::export::{self, Facts};
use crate::net::accept::{self, ConnectionsMax};
use crate::net::tls::TlsError;
use crate::net::trust::TrustLog;
use crate::offline::{self, flags::Tool};
use crate::percore::{self, Barrier, FirstCore, Kit};
use crate::ports::{Inherited, PortError, Ports};
use crate::pure::memory_plan::{MemoryPlan, TooSmall, Use};
use crate::reload::{Live, Reloader};
use crate::rt::cores::{self, CoreDied, CorePlan, StartError};
use crate::rt::latest::Latest;
use crate::rt::listen::{self, Address, SocketFile};
use crate::rt::notify::{self, Notifier};
use crate::rt::signal::{self, Hangups, Shutdown};
use crate::rt::takeover::{self, Offer};
use crate::rt::{self};
use crate::service::shed::ShedLog;
use crate::shard::disk::DiskConfig;
use crate::shard::geometry::{self, OpenError, Volume};
use crate::shard::standing::StandingPurges;
use crate::shard::{pool, router};
use crate::watchdog::Watchdog;

/// The command line: flags of the server, or a tool and its flags.
#[derive(Parser)]
#[command(about = "A Bazel remote-cache server: one io_uring executor pinned to each core", long_about = None)]
#[command(name = "ringcas", version, args_conflicts_with_subcommands = true, max_term_width = 110, after_help = MORE)]
struct CommandLine {
    #[command(flatten)]
    serve: Flags,
    /// Print the effective configuration as a file, with who said what, and end.
    #[arg(long = "print_config", help_heading = None::<&str>)]
    print_config: bool,
    /// Check the configuration, and end: 0 when the server could start with it.
    #[arg(long = "check_config", help_heading = None::<&str>)]
    check_config: bool,
    #[command(subcommand)]
    tool: Option<Tool>,
}

/// What `--help` ends with.
const MORE: &str = "\
Each flag is also an environment variable, such as RINGCAS_MAX_SIZE or BAZEL_REMOTE_S3_BUCKET, and a key of --config_file, \
where those of --s3.* stand in a section s3_proxy. A flag goes before a variable, a variable before the file. SIGHUP reads \
them again.

Other flags of bazel-remote are accepted; --check_config says what becomes of them.";

/// Why the server did not start, or did not go on.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("--memory_limit: {0}. Raise it, or lower --ram_cache or --cores")]
    Memory(#[from] TooSmall),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Ports(#[from] PortError),
    #[error("the purges that stand cannot be read: {0}")]
    Purges(std::io::Error),
    #[error("--take_over: the process that runs on --dir does not hand over: {0}. Stop it, and start this one without")]
    TakeOver(std::io::Error),
    #[error(transparent)]
    Trust(#[from] NoTrust),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Access(#[from] FileError),
    #[error("cannot start the threads that compare passwords: {0}. Raise the limit of threads (TasksMax)")]
    Passwords(std::io::Error),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("cannot start the thread of the watchdog: {0}")]
    Watchdog(std::io::Error),
    #[error("cannot watch for signals: {0}")]
    Signals(std::io::Error),
    #[error("cannot print the configuration: {0}")]
    Print(std::io::Error),
    #[error("{0}: the process ends, because what that core owned cannot be reached")]
    CoreDied(#[from] CoreDied),
}

/// Runs the server until it is told to stop, or a tool to its end.
pub fn main() -> ExitCode {
    let inputs = Inputs::of_process();
    let line = inputs.read::<CommandLine>();
    if let Err(ConfigError::CommandLine(error)) = line {
        error.exit();
    }
    let log = match &line {
        Ok(Outcome { flags: CommandLine { serve, tool, .. }, .. }) => {
            let (level, timezone) = serve.log();
            // Why less for tools: their report is what is to be read.
            logging::start(level.or(tool.as_ref().map(|_| "warn")), timezone)
        }
        Err(_) => logging::start(None, LogTimezone::Utc),
    };
    cores::log_panics();
    let ended = match line {
        Ok(Outcome { flags: CommandLine { tool: Some(tool), .. }, .. }) => return offline::run(tool),
        Ok(Outcome { flags, effective, notices }) => {
            notices.iter().for_each(|line| tracing::warn!("{line}"));
            match flags {
                CommandLine { serve, print_config: true, .. } => print(serve, &effective),
                CommandLine { serve, check_config: true, .. } => check(serve),
                CommandLine { serve: flags, .. } => serve(flags, inputs, effective, log),
            }
        }
        Err(error) => Err(error.into()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            tracing::error!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn serve(flags: Flags, inputs: Inputs, effective: Effective, log: Log) -> Result<(), Failure> {
    let hangups = Hangups::take().map_err(Failure::Signals)?;
    let config = flags.resolve()?;
    if let Err(error) = cores::raise_descriptor_limit() {
        tracing::warn!("the limit of open files stays as it is: {error}");
    }
    let shutdown = Shutdown::new();
    signal::trigger_on_signals(&shutdown).map_err(Failure::Signals)?;
    let count = config.cores.len();
    let tls = config.tls.clone().map(Kept::new).transpose()?;
    let access = match config.access.is_guarded() {
        true => {
            let (kept, rules) = Kept::new(config.access.clone())?;
            Some((kept, rules, Passwords::start(count).map_err(Failure::Passwords)?))
        }
        false => None,
    };
    let notifier = Notifier::from_environment();
    // Why after what may fail: a server that is taken over stops when this has been done.
    let needs_tls = |settings: &Settings| settings.backends.iter().any(BackendSettings::needs_tls);
    let trust = config.backends.as_ref().is_some_and(needs_tls).then(Trust::of_system).transpose()?;
    let (volume, mut ports) = open(&config, &shutdown)?;
    let files = ports.take_files();
    let standing = StandingPurges::open(&config.dir).map_err(Failure::Purges)?;
    let plan = memory_plan(&config, volume.shards())?;
    let write_slots = config.write_slots.unwrap_or_else(|| writes_fit(&plan));
    announce(&config, &plan, write_slots, &volume, &ports);
    let (pool, pool_ports) = pool::wire(&volume, count);
    let routers = router::wire(count);
    // Why not all of it: those that are open must still be able to call, and to send.
    let grpc_max = limits::CONNECTIONS_MAX.min((plan.apart_max() / 16 * 13 / limits::CONNECTION_HELD_LEN) as usize);
    let connections = ConnectionsMax { grpc: grpc_max, http: limits::HTTP_CONNECTIONS_MAX };
    let (targets, inboxes) = accept::inboxes(count, connections);
    let facts = Facts {
        prefix: config.metrics_prefix.text(),
        is_http_prefixed: config.http_metrics_prefix,
        is_enabled: config.endpoint_metrics.into(),
        max_size: volume.max_size(),
        memory_limit: config.memory_limit,
        started_s: rt::time::unix_seconds(),
    };
    let mut meshes = backend::mesh::wire(if config.backends.is_some() { count } else { 0 }).into_iter();
    let (served, quiet, closed) = (Barrier::new(count), Barrier::new(count), Barrier::new(count));
    let (shed_log, trust_log) = (ShedLog::default(), TrustLog::default());
    let budget = Budget::new(plan, count);
    let live = Latest::new(Live::of(&config));
    let mut reloader = Reloader::new(inputs, effective);
    reloader.add(live.clone());
    reloader.add(log);
    let mut watched: Vec<Box<dyn Watched>> = Vec::new();
    if let Some((kept, _)) = &tls {
        watched.push(Box::new(kept.clone()));
        reloader.add(kept.clone());
    }
    if let Some((kept, ..)) = &access {
        watched.push(Box::new(kept.clone()));
        reloader.add(kept.clone());
    }
    let activity = config.lifecycle.idle_timeout.map(Activity::new);
    let offer = offer(&config, &ports, &shutdown)?;
    let watch = |period| Watchdog::start(&notifier, period, count);
    let watchdog = notify::watchdog_period().map(watch).transpose().map_err(Failure::Watchdog)?;
    let told = notifier.clone();
    let mut first = Some(FirstCore { pool, ports, targets, files: watched, notifier });
    let mut parts = pool_ports.into_iter().zip(routers).zip(inboxes).zip(export::wire(count, &facts));
    let running = cores::launch(&config.cores, plan.io_memory(count), &shutdown, |core| {
        let (((port, router), inbox), metrics) = parts.next().expect("one part for each core");
        let kit = Kit {
            core,
            config: config.clone(),
            live: live.clone(),
            volume: volume.clone(),
            port,
            router,
            inbox,
            metrics,
            mesh: meshes.next(),
            authorities: trust.clone(),
            first: first.take(),
            shutdown: shutdown.clone(),
            activity: activity.clone(),
            offer: offer.clone(),
            watchdog: watchdog.clone(),
            shed_log: shed_log.clone(),
            trust_log: trust_log.clone(),
            budget: budget.clone(),
            tls: tls.as_ref().map(|(_, acceptors)| acceptors.clone()),
            access: access.as_ref().map(|(_, rules, passwords)| (rules.clone(), passwords.clone())),
            write_slots,
            writes_fit: writes_fit(&plan),
            served: served.clone(),
            quiet: quiet.clone(),
            standing: standing.clone(),
            closed: closed.clone(),
        };
        move || percore::run(kit)
    })?;
    let reload = move || {
        told.reloading();
        reloader.reload();
        told.ready();
    };
    hangups.answer(reload).map_err(Failure::Signals)?;
    running.wait()?;
    if offer.is_taken() {
        files.into_iter().for_each(SocketFile::leave);
    }
    tracing::info!("stopped");
    Ok(())
}

/// `--check_config`: all that a start looks at before it takes the directory and the ports.
fn check(flags: Flags) -> Result<(), Failure> {
    let config = flags.resolve()?;
    let shards = geometry::look_closely(&config.dir, config.max_size)?;
    memory_plan(&config, shards)?;
    if let Some(files) = &config.tls {
        files.read()?;
    }
    if config.access.is_guarded() {
        config.access.read_aloud()?;
    }
    // Why said: whoever checks by hand wants more than silence.
    tracing::info!("the configuration is valid");
    Ok(())
}

/// `--print_config`.
fn print(flags: Flags, effective: &Effective) -> Result<(), Failure> {
    let config = flags.resolve()?;
    // Why no error: whoever looks for what is wrong wants to see all that is known.
    let shards = geometry::look(&config.dir, config.max_size).ok();
    let plan = shards.and_then(|shards| memory_plan(&config, shards).ok());
    let text = config::print::yaml(effective, &config.derived(plan.as_ref().map(writes_fit)));
    std::io::stdout().write_all(text.as_bytes()).map_err(Failure::Print)
}

/// The directory and the sockets. Where a server is to be taken over, it serves until this process has all it can have
/// without the directory.
fn open(config: &Config, shutdown: &Shutdown) -> Result<(Volume, Ports), Failure> {
    let disk = DiskConfig { dir: config.dir.clone(), max_size_bytes: config.max_size, ack: config.ack.into() };
    let passed = listen::take_passed();
    if !config.lifecycle.take_over {
        let volume = geometry::open(&disk)?;
        return Ok((volume, Ports::open(config, Inherited { passed, taken: Vec::new() })?));
    }
    let mut former = takeover::ask(&config.dir).map_err(Failure::TakeOver)?;
    let taken = former.as_mut().map_or_else(Vec::new, |former| std::mem::take(&mut former.sockets));
    let ports = Ports::open(config, Inherited { passed, taken })?;
    let has_confirmed = former.is_some();
    if let Some(former) = former {
        // Why first: once it is confirmed there is no way back.
        memory_plan(config, geometry::foresee(&disk)?)?;
        StandingPurges::open(&config.dir).map_err(Failure::Purges)?;
        former.confirm().map_err(Failure::TakeOver)?;
        tracing::info!("taking over: the process that runs finishes what is in flight; connections wait meanwhile");
    }
    let begun = rt::time::now();
    let waits = || {
        std::thread::sleep(limits::TAKE_OVER_LOOK);
        !shutdown.is_triggered() && begun.elapsed() < limits::TAKE_OVER_TIME
    };
    let volume = match geometry::open_when_free(&disk, waits) {
        Err(error) if has_confirmed && !shutdown.is_triggered() => open_again(&disk, error, shutdown)?,
        opened => opened?,
    };
    tracing::info!("the directory is free after {} ms", begun.elapsed().as_millis());
    Ok((volume, ports))
}

/// Tries what has failed for a while. Why: nobody else serves any more, connections wait, and a drive that has refused once may
/// not refuse for ever.
fn open_again(disk: &DiskConfig, first: OpenError, shutdown: &Shutdown) -> Result<Volume, OpenError> {
    let limit = limits::TAKE_OVER_TRY_TIME;
    tracing::error!("taking over: {first}. The process that ran has ended: this one tries again for {limit:?}");
    let begun = rt::time::now();
    loop {
        std::thread::sleep(limits::TAKE_OVER_TRY_PAUSE);
        match geometry::open(disk) {
            Err(_) if !shutdown.is_triggered() && begun.elapsed() < limit => {}
            opened => return opened,
        }
    }
}

fn memory_plan(config: &Config, shards: u16) -> Result<MemoryPlan, TooSmall> {
    let flights = config.backends.as_ref().map_or(0, |_| config.memory_limit / limits::FLIGHT_MEMORY_PART);
    MemoryPlan::new(config.memory_limit, config.ram_cache, flights, config.cores.len(), shards)
}

/// Lets a later process take over. Why a failure is no reason not to serve: it may still be stopped and started anew.
fn offer(config: &Config, ports: &Ports, shutdown: &Shutdown) -> Result<Offer, Failure> {
    let stop = shutdown.clone();
    let taken = move || {
        tracing::info!("another process takes over: this one finishes what is in flight");
        stop.trigger();
    };
    let offer = Offer::make(&config.dir, ports.share()?, taken);
    Ok(offer.unwrap_or_else(|error| {
        tracing::warn!("no later process can --take_over from this one: no socket in --dir: {error}");
        Offer::default()
    }))
}

/// How many writes of the largest blobs the memory limit has room for.
fn writes_fit(plan: &MemoryPlan) -> u32 {
    u32::try_from(plan.share_max(Use::Writes) / limits::WRITE_HELD_LEN).unwrap_or(u32::MAX).max(1)
}

/// What the memory limit means, part by part, and the worst case of each thing that a peer can do.
fn announce_memory(config: &Config, plan: &MemoryPlan, write_slots: u32, max_size: u64) {
    let mib = |bytes: u64| bytes >> 20;
    let share = |used: Use| mib(plan.share_max(used));
    tracing::info!(
        "memory limit {} MiB: hot records {}, fixed parts {}, buffers {}, reads under way {}, reads through to backends {}, and for peers {}: connections and calls up to {}, \
         and of what these leave now writes {}, decoders {}, replies {}, requests {}, windows {}, interrupted uploads {}",
        mib(plan.limit),
        mib(plan.hot),
        mib(plan.fixed),
        mib(plan.buffers),
        mib(plan.reads),
        mib(plan.flights),
        mib(plan.peers),
        mib(plan.apart_max()),
        share(Use::Writes),
        share(Use::Decoders),
        share(Use::Replies),
        share(Use::Requests),
        share(Use::Windows),
        mib(plan.parked()),
    );
    let (index_max, foreseen) = (plan.index_max(), index_foreseen(max_size));
    tracing::info!(
        "index: grows out of what is for peers, which has room for {} million entries; a full cache with blobs of {} KiB needs {} MiB",
        index_max / limits::INDEX_ENTRY_LEN / 1_000_000,
        limits::ENTRY_LEN_EXPECTED >> 10,
        mib(foreseen),
    );
    tracing::info!(
        "at most: a connection with one call {} KiB, {} KiB for each 16 calls that it has had at a time, and {} KiB once it has sent much at a time; another open call {} KiB besides its messages, an upload {} KiB, a read {} KiB; \
         windows: {} KiB a stream, 64 to {} KiB a connection",
        limits::CONNECTION_HELD_LEN >> 10,
        (16 * (limits::HTTP2_ROW_LEN + limits::HTTP2_FRAMES_LEN)) >> 10,
        limits::SENDING_HELD_LEN >> 10,
        limits::CALL_HELD_LEN >> 10,
        limits::WRITE_HELD_LEN >> 10,
        limits::READ_HELD_LEN >> 10,
        config.stream_window >> 10,
        (u64::from(config.stream_window) * u64::from(limits::HTTP2_CONNECTION_WINDOW_STREAMS)) >> 10,
    );
    tracing::info!(
        "CAS writes: {write_slots} in flight at a time, others wait {:?} for a place and are then refused ({})",
        config.write_queue_wait,
        word(config.write_shed_status),
    );
    memory_warnings(plan, write_slots, max_size).iter().for_each(|warning| tracing::warn!("{warning}"));
}

/// The length of the index of a full cache, in bytes.
fn index_foreseen(max_size: u64) -> u64 {
    max_size / limits::ENTRY_LEN_EXPECTED * limits::INDEX_ENTRY_LEN
}

/// Settings that the memory limit is too small for.
fn memory_warnings(plan: &MemoryPlan, write_slots: u32, max_size: u64) -> Vec<String> {
    let (index_max, foreseen, fit) = (plan.index_max(), index_foreseen(max_size), writes_fit(plan));
    let mut warnings = Vec::new();
    if foreseen > index_max / 2 {
        warnings.push(format!(
            "--max_size {max_size}: the index of a full cache takes about {} MiB, more than half of the {} that --memory_limit has for it \
             and for clients: raise --memory_limit, or lower --max_size",
            foreseen >> 20,
            index_max >> 20,
        ));
    }
    if write_slots > fit {
        warnings.push(format!(
            "--max_inflight_cas_writes {write_slots}: --memory_limit has room for {fit} large ones at a time"
        ));
    }
    warnings
}

/// Who is let in, and how.
fn announce_access<'a>(config: &Config, addresses: impl Iterator<Item = &'a Address>) {
    let AccessFiles { htpasswd, tokens, certificates, open_reads, .. } = config.access.clone();
    match &config.tls {
        None if config.access.is_guarded() => {
            tracing::warn!(
                "credentials travel in clear text: give --tls_cert_file and --tls_key_file, or let a proxy do TLS"
            )
        }
        None => {}
        Some(tls) => tracing::info!(
            "TLS {} with {}",
            if tls.only_tls13 { "1.3" } else { "1.2 and 1.3" },
            tls.certificates.display()
        ),
    }
    if config.access.is_guarded() {
        let taken = [(htpasswd.is_some(), "passwords"), (tokens.is_some(), "tokens"), (certificates, "certificates")];
        let taken: Vec<&str> = taken.iter().filter(|(is_taken, _)| *is_taken).map(|(_, name)| *name).collect();
        let reads = if open_reads { ", and nothing for reads" } else { "" };
        tracing::info!("access control: takes {}{reads}", taken.join(", "));
        return;
    }
    for address in addresses.filter(|address| address.is_unspecified()) {
        tracing::warn!("anyone who reaches {address} can read and write this cache: see --htpasswd_file");
    }
}

/// A value of a flag as its users write it.
fn word(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The start-up lines: what runs where, with which limits.
fn announce(config: &Config, plan: &MemoryPlan, write_slots: u32, volume: &Volume, ports: &Ports) {
    let http = if ports.is_shared() { ports.grpc.as_ref() } else { ports.http.as_ref() };
    let [grpc, http] = [ports.grpc.as_ref(), http].map(|bound| bound.and_then(|bound| bound.address().ok()));
    tracing::info!("ringcas {} on {} cores, {} shards", env!("CARGO_PKG_VERSION"), config.cores.len(), volume.shards(),);
    tracing::info!(
        "cache in {}: {:.3} GiB in segments of {} MiB, storage mode {}, acknowledged when {}",
        config.dir.display(),
        volume.allocated_bytes() as f64 / (1u64 << 30) as f64,
        volume.layout().segment_len >> 20,
        word(config.storage_mode),
        word(config.ack),
    );
    let cpus = CorePlan::every_cpu().len();
    if config.cores.len() > cpus {
        tracing::warn!(
            "--cores: there are {cpus} CPUs for {} cores: they share them, and are slower",
            config.cores.len()
        );
    }
    let (lost, segments) = (volume.lost_segments(), volume.segment_count());
    if lost > 0 {
        tracing::warn!(
            "{lost} of {segments} segments of the cache are damaged, or are those of another one: what stood in them is lost"
        );
    }
    announce_memory(config, plan, write_slots, volume.max_size());
    announce_access(config, [&grpc, &http].into_iter().flatten());
    for backend in config.backends.iter().flat_map(|settings| settings.backends.iter()) {
        let target = &backend.buckets[0].target;
        let scheme = if target.tls { "https" } else { "http" };
        let (name, authority) = (&backend.name, target.authority());
        let buckets: Vec<&str> = backend.buckets.iter().map(|bucket| bucket.name.as_str()).collect();
        tracing::info!(
            "backend {name}: {scheme}://{authority}, bucket {}, prefix {:?}",
            buckets.join(" and "),
            backend.prefix
        );
    }
    let [grpc, http] =
        [grpc, http].map(|address| address.map_or_else(|| "none".to_owned(), |address| address.to_string()));
    tracing::info!("listening: grpc={grpc} http={http}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a start warns of a cache whose index, and of write slots whose uploads, the memory limit is too small for, and of
    /// nothing else. Method: sizes and slots on both sides of what fits.
    #[test]
    fn warns_of_what_memory_is_too_small_for() {
        let plan = MemoryPlan::new(1 << 30, 256 << 20, 0, 2, 64).expect("enough");
        let entries = plan.index_max() / 2 / limits::INDEX_ENTRY_LEN;
        let (size, slots) = (entries * limits::ENTRY_LEN_EXPECTED, writes_fit(&plan));
        assert!(slots > 100 && size > 100 << 30, "a server of 1 GiB is of use");
        assert_eq!(memory_warnings(&plan, slots, size), Vec::<String>::new());
        let larger = size + limits::ENTRY_LEN_EXPECTED;
        let [index] = &memory_warnings(&plan, slots, larger)[..] else { panic!("one") };
        assert!(index.contains(&format!("--max_size {larger}:")) && index.contains("raise --memory_limit"), "{index}");
        let [writes] = &memory_warnings(&plan, slots + 1, size)[..] else { panic!("one") };
        assert!(writes.contains(&format!("--max_inflight_cas_writes {}:", slots + 1)), "{writes}");
        assert!(writes.contains(&format!("room for {slots} large")), "{writes}");
        assert_eq!(memory_warnings(&plan, slots + 1, larger), [index.as_str(), writes]);
        // The default number of slots is what fits.
        let small = MemoryPlan::new(limits::MEMORY_LIMIT_MIN, 0, 0, 1, 4).expect("enough");
        assert_eq!(memory_warnings(&small, writes_fit(&small), limits::MAX_SIZE_MIN), Vec::<String>::new());
    }
}
