//! What one core holds and runs: its disk, its worker, its services, its connections.

use std::cell::Cell;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::access::{Access, Passwords, Rules};
use crate::activity::Activity;
use crate::backend::ledger;
use crate::backend::mesh::MeshPort;
use crate::backend::tls::Trust as Authorities;
use crate::backend::{Backends, Owner};
use crate::budget::{Budget, Purse};
use crate::config::Config;
use crate::kept::{self, Reloads, Watched};
use crate::limits;
use crate::metrics::export::{Port, Reporter};
use crate::metrics::{Metric, Snapshot};
use crate::net::accept::{self, Inbox, Kind, Load, Targets};
use crate::net::tls::Acceptors;
use crate::net::trust::{Trust, TrustLog, TrustSettings};
use crate::net::{Server, Settings};
use crate::ports::Ports;
use crate::pure::secret::Secret;
use crate::pure::shard_map::ShardMap;
use crate::reload::Live;
use crate::rt;
use crate::rt::latest::Latest;
use crate::rt::notify::Notifier;
use crate::rt::published::Published;
use crate::rt::signal::Shutdown;
use crate::rt::takeover::Offer;
use crate::rt::tcp::Listener;
use crate::rt::time::Either;
use crate::service::health::Health;
use crate::service::shed::ShedLog;
use crate::service::{Options, Services};
use crate::shard::disk::Disk;
use crate::shard::geometry::Volume;
use crate::shard::pool::{PoolMain, PoolPort};
use crate::shard::router::{Router, RouterPort};
use crate::shard::standing::StandingPurges;
use crate::shard::worker::{Worker, WorkerConfig};
use crate::shard::write_gate::WriteLimits;
use crate::watchdog::Watchdog;

/// All that a core is given before its thread starts.
pub struct Kit {
    pub core: usize,
    pub config: Config,
    /// What of it may change.
    pub live: Latest<Live>,
    pub volume: Volume,
    pub port: PoolPort,
    pub router: RouterPort,
    pub inbox: Inbox,
    pub metrics: Port,
    /// Where there are backends.
    pub mesh: Option<MeshPort>,
    /// Where one of them needs TLS.
    pub authorities: Option<Authorities>,
    /// Core 0 only: what exists once for the whole process.
    pub first: Option<FirstCore>,
    pub shutdown: Shutdown,
    /// Where the server is to stop when nobody asks it for anything.
    pub activity: Option<Activity>,
    /// Where a later process asks for the sockets.
    pub offer: Offer,
    /// Where a service manager wants to know that this core runs.
    pub watchdog: Option<Watchdog>,
    /// Where writes that are refused are named: one log for all cores.
    pub shed_log: ShedLog,
    /// Where calls that are refused are named: one log for all cores.
    pub trust_log: TrustLog,
    pub budget: Budget,
    /// What handshakes are made with; `None` without TLS.
    pub tls: Option<Published<Acceptors>>,
    /// Who may do what; `None` for everybody everything.
    pub access: Option<(Published<Rules>, Passwords)>,
    /// CAS writes in flight on all cores, and for how many there is memory.
    pub write_slots: u32,
    pub writes_fit: u32,
    /// The purges that stand: the same for all cores.
    pub standing: StandingPurges,
    /// Passed when no core serves clients any more: until then what they write is uploaded.
    pub served: Barrier,
    /// Passed when no core serves or uploads any more: from then on no peer asks this core's worker for anything.
    pub quiet: Barrier,
    /// Passed when every core has closed its disk: from then on nobody needs the segment pool.
    pub closed: Barrier,
}

/// What core 0 runs for all.
pub struct FirstCore {
    pub pool: PoolMain,
    pub ports: Ports,
    pub targets: Targets,
    /// Files that are read again when they change.
    pub files: Vec<Box<dyn Watched>>,
    pub notifier: Notifier,
}

/// A point that every core passes only when all have come to it. Clones are the same barrier.
#[derive(Clone)]
pub struct Barrier {
    missing: Arc<AtomicUsize>,
    passed: Shutdown,
}

impl Barrier {
    pub fn new(cores: usize) -> Self {
        Self { missing: Arc::new(AtomicUsize::new(cores)), passed: Shutdown::new() }
    }

    /// Comes to the barrier, and waits for the others. Each core calls it once.
    pub async fn pass(&self) {
        if self.missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.passed.trigger();
        }
        self.passed.wait().await;
    }
}

/// The main task of one core: starts everything, serves, and takes everything down in the reverse order.
pub async fn run(kit: Kit) {
    let Kit {
        core,
        config,
        live,
        volume,
        port,
        router,
        inbox,
        metrics,
        mesh,
        authorities,
        first,
        shutdown,
        activity,
        offer,
        watchdog,
        shed_log,
        trust_log,
        budget,
        tls,
        access,
        write_slots,
        writes_fit,
        served,
        quiet,
        standing,
        closed,
    } = kit;
    let cores = config.cores.len();
    let shards = volume.shards();
    let load = first.as_ref().map(|first| first.targets.load());
    let is_first = first.is_some();
    if let Some(watchdog) = watchdog {
        rt::spawn(watchdog.beat(core));
    }
    let mut accepting = None;
    let mut reloads = Reloads::default();
    let mut notifier = Notifier::default();
    if let Some(FirstCore { pool, ports, targets, files, notifier: first_notifier }) = first {
        rt::spawn(pool.run());
        reloads = Reloads::of(&files);
        rt::spawn(kept::watch(files));
        accepting = Some((ports, targets));
        notifier = first_notifier;
    }
    let disk = match Disk::open(volume, core, cores, port).await {
        Ok(disk) => disk,
        Err(error) => panic!("core {core} cannot open the data files: {error}"),
    };
    let options = Options {
        mangle_action_keys: config.mangle_action_keys,
        check_http_actions: config.check_http_actions,
        check_actions: config.check_actions,
        max_blob_size: Cell::default(),
        access_log: Cell::default(),
        shed_status: Cell::new(config.write_shed_status.into()),
        shed_log,
    };
    let share = |bytes: u64| usize::try_from(bytes / cores as u64).unwrap_or(usize::MAX);
    let map = ShardMap::new(shards, cores as u16);
    let mut backends = None;
    if let (Some(mesh), Some(settings)) = (mesh, config.backends.clone()) {
        let (all, port) = Backends::new(mesh, settings, authorities.as_ref());
        let owner = match Owner::start(&all, port, map, &config.dir, authorities.as_ref()).await {
            Ok(owner) => owner,
            Err(error) => panic!("core {core} cannot open the ledger of uploads in --dir: {error}"),
        };
        backends = Some((all, owner));
    }
    let orphans = if core == 0 { orphans(&config).await } else { Vec::new() };
    let purse = budget.purse(cores == 1);
    let index_purse = purse.clone();
    // A quarter of a core's buffers is for reading sockets, one for large writes, the rest for the drive.
    let buffers = share(budget.plan().buffers);
    rt::tcp::read_ahead(buffers / 4);
    rt::file::keep_spare(buffers / 2);
    disk.stage_beyond(buffers / 4);
    rt::file::read_at_once(share(budget.plan().reads));
    let worker = Worker::with_backends(
        disk.clone(),
        WorkerConfig {
            mode: config.storage_mode.into(),
            ram_bytes: share(config.ram_cache),
            purse: purse.clone(),
            parked_bytes: share(budget.plan().parked()),
            core,
            cores,
            writes: WriteLimits::new(write_slots, config.write_queue_wait),
            standing,
        },
        backends.as_ref().map(|(all, _)| all.clone()),
    );
    if let Some((all, _)) = &backends {
        all.set_records(Rc::new(worker.clone()));
    }
    let router = router.start(worker.clone(), map);
    let health = Health::new(true);
    let options = Rc::new(options);
    let services = Services::new(router.clone(), options.clone(), health.clone());
    let (exporter, reporter) = metrics.split();
    let callers = config.trusted_callers.as_ref();
    let trust = callers.map(|callers| Rc::new(Trust::new(trust_settings(&config, callers.secret.clone(), trust_log))));
    let settings = Settings {
        trust,
        time_bounds: config.time_bounds.clone(),
        stream_window: config.stream_window,
        max_connection_age: config.lifecycle.max_connection_age,
        max_connection_age_grace: config.lifecycle.max_connection_age_grace,
        purse,
        tls: tls.map(|tls| Rc::new(tls.reader())),
        access: Rc::new(match access {
            Some((rules, passwords)) => Access::by(&rules, &passwords),
            None => Access::open(config.open_purges),
        }),
    };
    let server = Server::new(services, settings, exporter);
    let changing = Changing {
        options,
        worker: worker.clone(),
        server: server.clone(),
        backends: backends.as_ref().map(|(all, _)| all.clone()),
        max_blob_len: disk.max_blob_len(),
        writes_fit,
    };
    let mut changes = live.changes();
    changing.apply(&live.get());
    let ending = shutdown.clone();
    rt::spawn(async move {
        while let Either::Left(live) = rt::time::race(changes.next(), ending.wait()).await {
            changing.apply(&live);
        }
    });
    let indexed = disk.clone();
    // One core tells it for all.
    let told = is_first.then(|| IndexRoom::new(budget.plan().index_max()));
    rt::spawn(follow_index(move || indexed.index_bytes(), budget.clone(), index_purse, told, shutdown.clone()));
    let counting = Rc::new(Counting {
        core,
        load,
        reloads,
        router,
        disk: disk.clone(),
        server: server.clone(),
        backends: backends.clone(),
        orphans,
    });
    rt::spawn(report(reporter, Rc::downgrade(&counting)));
    if let Some((ports, targets)) = accepting {
        let kind = if ports.is_shared() { Kind::Both } else { Kind::Grpc };
        let Ports { grpc, http, .. } = ports;
        if let Some(http) = http {
            rt::spawn(accept::run(Listener::adopt(http), Kind::Http, targets.clone(), shutdown.wait()));
        }
        if let Some(grpc) = grpc {
            rt::spawn(accept::run(Listener::adopt(grpc), kind, targets, shutdown.wait()));
        }
        notifier.ready();
    }
    let serving = server.clone();
    rt::spawn(async move { accept::serve_core(inbox, serving).await });

    if let Some(activity) = activity {
        rt::spawn(activity.watch(server.clone(), is_first, shutdown.clone()));
    }

    shutdown.wait().await;
    // Why first: who connects from now on is refused at once, unless another process listens, too.
    offer.withdraw();
    notifier.stopping();
    health.set(false);
    server.drain();
    // One for calls and uploads, which end side by side.
    let end = rt::time::sleep(live.get().shutdown_timeout).at();
    if let Either::Right(()) = rt::time::race(server.drained(), rt::time::deadline(end)).await {
        tracing::warn!(core, "calls in flight did not end within --shutdown_timeout and are cut");
        server.abort();
        let _ = rt::time::timeout(limits::CUT_TIME, server.drained()).await;
    }
    if let Some((_, owner)) = &backends {
        // Why not only this core's calls: what is written on the others is uploaded from here, too.
        let _ = rt::time::race(served.pass(), rt::time::deadline(end)).await;
        // Why no time for who is taken over: clients wait, and the other process does what is owed.
        owner.drain(if offer.is_taken() { rt::time::now() } else { end }).await;
    }
    quiet.pass().await;
    if let Some((all, owner)) = &backends {
        owner.close().await;
        all.stop();
    }
    // Why first: an upload that waits for space would hold up the worker.
    disk.refuse_writes();
    worker.stop().await;
    disk.shutdown().await;
    closed.pass().await;
}

/// Where this core looks at what can change.
struct Changing {
    options: Rc<Options>,
    worker: Worker<Disk>,
    server: Rc<Server<Router<Disk>>>,
    backends: Option<Backends>,
    /// Bytes.
    max_blob_len: u64,
    writes_fit: u32,
}

impl Changing {
    fn apply(&self, live: &Live) {
        let Live {
            access_log,
            endpoint_metrics,
            http_read_timeout,
            http_write_timeout,
            max_blob_size,
            s3_patience,
            // Looked at when the core ends.
            shutdown_timeout: _,
            write_queue_wait,
            write_shed_status,
            write_slots,
        } = *live;
        self.options.access_log.set(access_log);
        self.options.max_blob_size.set(max_blob_size.min(self.max_blob_len));
        self.options.shed_status.set(write_shed_status.into());
        self.server.enable_metrics(endpoint_metrics);
        self.server.set_http_times(http_read_timeout, http_write_timeout);
        if let (Some(backends), Some(patience)) = (&self.backends, s3_patience) {
            backends.set_patience(patience);
        }
        self.worker.set_write_limits(write_slots.unwrap_or(self.writes_fit), write_queue_wait);
    }
}

/// What calls of trusted servers must say.
fn trust_settings(config: &Config, secret: Option<Secret>, log: TrustLog) -> TrustSettings {
    let map = config.backends.iter().filter(|settings| settings.has_map);
    let backends = map
        .flat_map(|settings| settings.backends.iter())
        .map(|backend| (backend.name.clone(), backend.buckets.iter().map(|bucket| bucket.name.clone()).collect()));
    TrustSettings { secret, backends: backends.collect(), log }
}

/// Whatever counts on this core.
struct Counting {
    core: usize,
    /// Core 0 only, for all.
    load: Option<Arc<Load>>,
    reloads: Reloads,
    router: Router<Disk>,
    disk: Disk,
    server: Rc<Server<Router<Disk>>>,
    backends: Option<(Backends, Owner)>,
    /// Core 0 only: the ledgers of backends that are not configured, and how many uploads each is owed.
    orphans: Vec<(String, usize)>,
}

/// The ledgers of backends that are not configured. Nothing is done with them but to say so.
async fn orphans(config: &Config) -> Vec<(String, usize)> {
    let names = config.backends.iter().flat_map(|settings| settings.backends.iter().map(|one| one.name.to_string()));
    let found = ledger::orphans(&config.dir, &names.collect::<Vec<_>>()).await.unwrap_or_else(|error| {
        tracing::warn!("cannot read the ledgers of uploads in --dir: {error}");
        Vec::new()
    });
    for (ledger, uploads) in &found {
        tracing::error!(
            ledger,
            uploads,
            "uploads are owed to a backend that is not configured any more: they wait for it"
        );
    }
    found
}

/// Tells the budget how long this core's part of the index is, until the end begins.
///
/// Why by looking: entries come and go with each write, and what is left for clients need not be right at every moment.
async fn follow_index(
    index_bytes: impl Fn() -> u64,
    budget: Budget,
    purse: Purse,
    mut told: Option<IndexRoom>,
    shutdown: Shutdown,
) {
    loop {
        purse.set_index(index_bytes());
        match told.as_mut().and_then(|told| told.look(budget.index())) {
            Some(Fill::Over(text)) => tracing::error!("{text}"),
            Some(Fill::Half(text)) => tracing::warn!("{text}"),
            None => {}
        }
        if let Either::Right(()) = rt::time::race(rt::time::sleep(limits::INDEX_LOOK), shutdown.wait()).await {
            return;
        }
    }
}

/// Says how far the index has filled its room, each thing once.
struct IndexRoom {
    /// Bytes.
    max: u64,
    is_half_told: bool,
    is_over_told: bool,
}

/// What is to be told of the index.
#[derive(Debug, PartialEq, Eq)]
enum Fill {
    /// More than half of its room is taken.
    Half(String),
    /// More than there is.
    Over(String),
}

impl IndexRoom {
    fn new(max: u64) -> Self {
        Self { max, is_half_told: false, is_over_told: false }
    }

    /// What is new of an index of so many bytes.
    fn look(&mut self, index: u64) -> Option<Fill> {
        let (taken, room) = (index >> 20, self.max >> 20);
        let remedy = "raise --memory_limit, or lower --max_size";
        if index > self.max && !self.is_over_told {
            (self.is_half_told, self.is_over_told) = (true, true);
            return Some(Fill::Over(format!(
                "the index takes {taken} MiB, and --memory_limit has room for {room}: the process takes more than its limit: {remedy}"
            )));
        }
        if index > self.max / 2 && !self.is_half_told {
            self.is_half_told = true;
            return Some(Fill::Half(format!(
                "the index takes {taken} MiB, more than half of what --memory_limit has for it and for clients ({room}): {remedy}"
            )));
        }
        None
    }
}

/// Answers who collects metrics, for as long as this core runs.
async fn report(reporter: Reporter, counting: Weak<Counting>) {
    let source = |into: &mut Snapshot| {
        let Some(counting) = counting.upgrade() else { return false };
        let Counting { core, load, reloads, router, disk, server, backends, orphans } = &*counting;
        load.iter().for_each(|load| load.report(into));
        reloads.report(into);
        server.report(*core, into);
        router.report(into);
        disk.report(into);
        for (ledger, uploads) in orphans {
            into.add_labels(Metric::S3OrphanedUploads, vec![ledger.clone().into()], *uploads);
        }
        if let Some((all, owner)) = backends {
            all.report(into);
            owner.report(into);
        }
        let stats = rt::core_stats();
        into.add_core(Metric::CoreBusyTime, *core, stats.busy);
        into.add_core(Metric::CoreCpuTime, *core, stats.cpu);
        into.add_core(Metric::CoreTasksRun, *core, stats.tasks_run);
        into.add_core(Metric::CoreStalls, *core, stats.stalls);
        into.add_core(Metric::CoreStallTime, *core, stats.stalled);
        into.add(Metric::HandlerPanics, stats.panics);
        true
    };
    reporter.run(source).await;
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::pure::memory_plan::MemoryPlan;
    use crate::rt::cores::block_on;

    /// Goal: what the index takes of its room is told once when it is more than half and once when it is too much, with what to do.
    /// Method: an index that grows and shrinks, slowly and at once.
    #[test]
    fn the_index_is_told_once() {
        let mut room = IndexRoom::new(100 << 20);
        assert_eq!([0, 50, 49].map(|mib| room.look(mib << 20)), [None, None, None]);
        let Some(Fill::Half(text)) = room.look(51 << 20) else { panic!("it is more than half") };
        assert!(text.contains("takes 51 MiB") && text.contains("(100)") && text.contains("--memory_limit"), "{text}");
        assert_eq!([52, 10, 60, 100].map(|mib| room.look(mib << 20)), [None, None, None, None]);
        let Some(Fill::Over(text)) = room.look(101 << 20) else { panic!("it is too much") };
        assert!(text.contains("takes 101 MiB") && text.contains("room for 100"), "{text}");
        assert_eq!([200, 10, 60, 200].map(|mib| room.look(mib << 20)), [None, None, None, None]);
        let mut room = IndexRoom::new(100 << 20);
        assert!(matches!(room.look(300 << 20), Some(Fill::Over(_))));
        assert_eq!([60, 300].map(|mib| room.look(mib << 20)), [None, None], "that it is half is no news any more");
    }

    /// Goal: what each core's index takes is what the budget leaves to clients less, for as long as the core runs. Method: two
    /// followers of an index that grows and shrinks; the clock says when they look again.
    #[test]
    fn the_budget_follows_the_index() {
        block_on(async {
            let plan = MemoryPlan::new(1 << 30, 0, 0, 2, 64).expect("enough");
            let (budget, shutdown) = (Budget::new(plan, 2), Shutdown::new());
            let running = rt::gate::Gate::default();
            let lens = [3 << 20, 5 << 20].map(|len| Rc::new(Cell::new(len)));
            for len in &lens {
                let (len, purse) = (len.clone(), budget.purse(false));
                running.spawn(follow_index(move || len.get(), budget.clone(), purse, None, shutdown.clone()));
            }
            let follows = async |expected: u64| {
                while budget.index() != expected {
                    rt::time::yield_to_reactor().await;
                }
            };
            let patience = Duration::from_secs(60);
            rt::time::timeout(patience, follows(8 << 20)).await.expect("it is told at once");
            lens[0].set(1 << 20);
            lens[1].set(9 << 20);
            rt::time::timeout(patience, follows(10 << 20)).await.expect("it is told again");
            shutdown.trigger();
            rt::time::timeout(patience, running.wait_empty()).await.expect("they end");
        });
    }
}
