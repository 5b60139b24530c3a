//! `ringcas import`: takes over the directory of a stopped bazel-remote.
//!
//! The files are sorted by their last use, those that fit are stored oldest first, so that eviction takes them in that
//! order, and each goes the way of an upload: hash and size are compared before anything is indexed. What is there
//! already is passed over, so an import that was ended goes on where it stopped. The source is only read.

mod load;
mod names;
mod plan;
mod report;
mod source;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::crew::{self, Progress, seconds_left};
use super::flags::Import;
use super::report::size;
use super::{Failure, Verdict};
use crate::budget::Purse;
use crate::limits;
use crate::percore::Barrier;
use crate::pure::shard_map::ShardMap;
use crate::rt;
use crate::rt::join::map_bounded;
use crate::rt::signal::Shutdown;
use crate::shard::codec::StorageMode;
use crate::shard::disk::{Ack, Disk, DiskConfig};
use crate::shard::geometry::{self, Volume};
use crate::shard::pool::{self, PoolMain, PoolPort};
use crate::shard::router::{self, RouterPort};
use crate::shard::standing::StandingPurges;
use crate::shard::worker::{Worker, WorkerConfig};
use crate::shard::write_gate::WriteLimits;
use load::Loader;
use plan::Plan;
use report::{Reason, Report};
use source::Entry;

/// Files that a core works on at a time.
const LANES: usize = 8;
/// Memory of each core for what is on its way and for zstd decoders, in bytes. Nobody but its lanes asks for it.
const MEMORY: u64 = 1 << 30;
/// Work that a file costs whatever its size, in bytes of content: for the estimate of the time that is left.
const FILE_COST: u64 = 64 << 10;

pub fn import(flags: &Import) -> Result<Verdict, Failure> {
    let begun = rt::time::now();
    let (dir, cores) = (flags.place.dir()?, flags.place.cores()?);
    let max_size_bytes = flags.max_size(&dir)?;
    let mut report = Report::default();
    let entries = source::scan(&flags.from, &dir, &mut report)?;
    let volume = geometry::open(&DiskConfig { dir: dir.clone(), max_size_bytes, ack: Ack::Buffered })?;
    let files = entries.len();
    let Plan { parts, left_out } = Plan::new(entries, &volume, cores.len());
    left_out.iter().for_each(|entry| report.skip(Reason::DoesNotFit, &entry.path(&flags.from)));
    eprintln!(
        "{}: {files} files, of which {} are to be stored in {} ({})",
        flags.from.display(),
        parts.iter().map(Vec::len).sum::<usize>(),
        dir.display(),
        size(volume.allocated_bytes()),
    );
    let progress = Arc::new(Progress::default());
    progress.set_total(parts.iter().flatten().map(|entry| FILE_COST + entry.len).sum());
    let (count, stop) = (cores.len(), Shutdown::new());
    let (pool, ports) = pool::wire(&volume, count);
    let (quiet, closed) = (Barrier::new(count), Barrier::new(count));
    let mut pool = Some(pool);
    let mut kits = ports.into_iter().zip(router::wire(count)).zip(parts);
    let loaded = crew::run(&cores, &stop, &progress, line, |core| {
        let ((port, router), entries) = kits.next().expect("one for each core");
        let kit = Kit {
            core,
            cores: count,
            volume: volume.clone(),
            pool: pool.take(),
            port,
            router,
            entries,
            mode: flags.storage_mode.into(),
            from: flags.from.clone(),
            progress: progress.clone(),
            stop: stop.clone(),
            quiet: quiet.clone(),
            closed: closed.clone(),
        };
        move || load_part(kit)
    })?;
    for part in loaded {
        report.add(part?);
    }
    report.took = begun.elapsed();
    super::print(&if flags.json { report.json() } else { report.text() })?;
    match (report.fatal.take(), stop.is_triggered()) {
        (Some(problem), _) => Err(Failure::Store(problem)),
        (None, true) => Err(Failure::Stopped),
        (None, false) => Ok(report.verdict()),
    }
}

/// All that a core is given.
struct Kit {
    core: usize,
    cores: usize,
    volume: Volume,
    /// Core 0 only.
    pool: Option<PoolMain>,
    port: PoolPort,
    router: RouterPort,
    mode: StorageMode,
    entries: Vec<Entry>,
    from: PathBuf,
    progress: Arc<Progress>,
    stop: Shutdown,
    /// Passed when no core stores anything any more, and when every core has closed its disk.
    quiet: Barrier,
    closed: Barrier,
}

/// One core's share, from opening its disk to closing it.
async fn load_part(kit: Kit) -> Result<Report, Failure> {
    let Kit { core, cores, volume, pool, port, router, mode, entries, from, progress, stop, quiet, closed } = kit;
    if let Some(pool) = pool {
        rt::spawn(pool.run());
    }
    let map = ShardMap::new(volume.shards(), cores as u16);
    let disk = match Disk::open(volume, core, cores, port).await {
        Ok(disk) => disk,
        // Why not an error to return: the other cores would wait for this one.
        Err(error) => panic!("core {core} cannot open the data files: {error}"),
    };
    let worker = WorkerConfig {
        mode,
        ram_bytes: 0,
        purse: Purse::alone(MEMORY),
        parked_bytes: 0,
        core,
        cores,
        writes: WriteLimits::new((LANES * cores) as u32, limits::WRITE_QUEUE_WAIT_MAX),
        // Without a backend they have no effect.
        standing: StandingPurges::default(),
    };
    let worker = Worker::new(disk.clone(), worker);
    let router = router.start(worker.clone(), map);
    let loader = Loader::new(router, disk.max_blob_len(), from, progress, stop);
    // Files of one key are in one lane, where they keep their order.
    let mut lanes: Vec<Vec<Entry>> = (0..LANES).map(|_| Vec::new()).collect();
    for entry in entries {
        lanes[usize::from(entry.hash.0[31]) % LANES].push(entry);
    }
    let loaded = map_bounded(lanes, LANES, |lane| loader.lane(lane)).await;
    quiet.pass().await;
    worker.stop().await;
    disk.shutdown().await;
    closed.pass().await;
    let mut report = Report::default();
    loaded.into_iter().for_each(|part| report.add(part));
    Ok(report)
}

/// A bar, and what it stands for.
fn line(progress: &Progress, elapsed: Duration) -> String {
    const WIDTH: u64 = 24;
    let (done, total, skipped) = progress.now();
    let filled = (WIDTH * done).checked_div(total).unwrap_or(WIDTH).min(WIDTH) as usize;
    let bar = format!("{}{}", "#".repeat(filled), ".".repeat(WIDTH as usize - filled));
    let percent = (100 * done).checked_div(total).unwrap_or(100);
    let left = seconds_left(done, total, elapsed).map_or(String::new(), |left| format!(", {left} s left"));
    format!("[{bar}] {percent:>3} %  {} files, {skipped} skipped{left}", progress.files())
}
