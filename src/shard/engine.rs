//! One core's share of the volume: its shards' state, and what all parts of the engine use: files, buffers, leases, timers.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::time::Instant;

use super::blob_disk::Older;
use super::disk::{Ack, DiskError, DiskStats};
use super::geometry::Volume;
use super::log::{Log, Ticket};
use super::meters::Meters;
use super::pool::{PoolPort, ToPool};
use crate::limits::{
    CHECKPOINT_PERIOD, FLUSH_DELAY, FLUSH_DELAY_ACK, FLUSH_DELAYS_MAX, FLUSH_SHARDS, SYNC_PERIOD, WRITE_FAILURES_MAX,
    WRITE_FAILURES_PAUSE,
};
use crate::pure::chunks::Chunks;
use crate::pure::eviction::{Lease, Outcome};
use crate::pure::index::{Index, Word, tag};
use crate::pure::recency::Epoch;
use crate::pure::record::{Checksums, Key, RECORD_ALIGN, Run};
use crate::pure::segment::{Class, Layout};
use crate::pure::shard_map::{CoreId, ShardId, ShardMap};
use crate::rt;
use crate::rt::channel::{Sender, reply};
use crate::rt::file::{DiskBuf, DiskFile, FailedWrite, ReadBuf};
use crate::rt::gate::Gate;
use crate::rt::local::{Event, Vital};
use crate::rt::time::sleep;

/// Bits of a version that are the generation's.
pub(super) const VERSION_SHIFT: u32 = 24;

/// What all tasks of the engine on one core share.
pub(super) struct Core {
    pub(super) volume: Volume,
    pub(super) layout: Layout,
    pub(super) sums: Checksums,
    pub(super) map: ShardMap,
    pub(super) ack: Ack,
    files: Vec<DiskFile>,
    /// By shard; `None` for those of other cores.
    shards: Vec<Option<Rc<Shard>>>,
    pool: Sender<ToPool>,
    /// The epoch now, as far as the pool has told.
    pub(super) epoch: Cell<Epoch>,
    gate: Gate,
    /// Reclaims that are under way.
    pub(super) reclaims: Gate,
    stopping: Cell<bool>,
    stats: RefCell<DiskStats>,
    pub(super) meters: Meters,
    /// Shards with something in their write buffer.
    pub(super) unflushed: RefCell<Vec<ShardId>>,
    pub(super) wake_flusher: Event,
    syncs: Syncs,
    write_failures: Cell<u32>,
    last_write_failure: Cell<Option<Instant>>,
    /// Chunks whose blob is gone, and the ticket of the record that says so.
    graves: RefCell<Vec<Grave>>,
    wake_gravedigger: Event,
    /// What is to be done when space is so short that somebody is about to be refused.
    on_pressure: RefCell<Option<Box<dyn Fn()>>>,
    /// Large blobs being written.
    pub(super) writers: Cell<usize>,
    /// Bytes that may still be staged for them beyond the least.
    pub(super) stage_room: Cell<usize>,
}

#[derive(Default)]
struct Syncs {
    dirty: Cell<bool>,
    /// Syncs are numbered: the last to begin, and the last to end well.
    begun: Cell<u64>,
    ended: Cell<u64>,
    /// The last one that failed.
    failed: Cell<u64>,
    wanted: Cell<bool>,
    wake: Event,
    done: Event,
}

/// One shard.
pub(super) struct Shard {
    pub(super) id: ShardId,
    pub(super) state: Vital<ShardState>,
    /// Something that an append or an allocation may wait for has changed.
    pub(super) changed: Event,
    /// Something waits in the write buffer, and the flusher knows.
    pub(super) unflushed: Cell<bool>,
    /// Allocations that wait for chunks.
    pub(super) chunk_waiters: Cell<usize>,
    /// A request for a chunk segment is under way.
    pub(super) chunks_asked: Cell<bool>,
    /// The pool had none: one of those who wait is to fail.
    pub(super) chunks_refused: Cell<bool>,
    pub(super) ready: Cell<bool>,
    pub(super) recovered: Event,
}

impl Shard {
    /// Waits until the shard has been recovered.
    pub(super) async fn wait_ready(&self) {
        while !self.ready.get() {
            let recovered = self.recovered.wait();
            if !self.ready.get() {
                recovered.await;
            }
        }
    }
}

/// What a shard knows.
pub(super) struct ShardState {
    pub(super) index: Index,
    pub(super) large: HashMap<u64, LargeRef>,
    pub(super) chunks: Chunks,
    pub(super) log: Log,
    /// Of this shard's log segments.
    pub(super) generations: HashMap<u32, u64>,
    /// Segments in which a write failed: never to be used again.
    pub(super) bad: HashSet<u32>,
}

/// What the shard knows of a large blob.
pub(super) struct LargeRef {
    pub(super) held: Rc<Held>,
    /// Bytes of the commit record, header included.
    pub(super) record_len: u32,
}

/// The chunks of a large blob. They are given back when the table and all readers have let go of them.
pub(super) struct Held {
    core: Weak<Core>,
    shard: ShardId,
    pub(super) runs: Vec<Run>,
    /// Of the record after which the chunks may be reused.
    until: RefCell<Option<Ticket>>,
}

/// What the index and the table of large blobs had of an entry.
pub(super) type Forgotten = (Word, Option<Rc<Held>>);

/// How a request for a segment ended.
pub(super) enum Leased {
    Lease(Lease),
    /// The pool has none and can free none.
    Refused,
    /// There is room without one.
    Enough,
}

impl From<Option<Lease>> for Leased {
    fn from(lease: Option<Lease>) -> Self {
        lease.map_or(Self::Refused, Self::Lease)
    }
}

pub(super) struct Grave {
    shard: ShardId,
    runs: Vec<Run>,
    until: Option<Ticket>,
}

impl Held {
    pub(super) fn new(core: &Rc<Core>, shard: ShardId, runs: Vec<Run>) -> Rc<Self> {
        Rc::new(Self { core: Rc::downgrade(core), shard, runs, until: RefCell::default() })
    }

    /// The chunks are reused only after what `ticket` stands for is on disk: the record that takes the blob's place. So a
    /// crash cannot leave a commit that claims another blob's chunks.
    pub(super) fn release_after(&self, ticket: &Ticket) {
        *self.until.borrow_mut() = Some(ticket.clone());
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(core) = self.core.upgrade() {
            core.bury(Grave { shard: self.shard, runs: std::mem::take(&mut self.runs), until: self.until.take() });
        }
    }
}

impl ShardState {
    fn new(layout: Layout) -> Self {
        Self {
            index: Index::default(),
            large: HashMap::new(),
            chunks: Chunks::new(layout.chunks_per_segment()),
            log: Log::default(),
            generations: HashMap::new(),
            bad: HashSet::new(),
        }
    }

    /// Whether a record of `key` may be published.
    pub(super) fn makes_way(&self, tag: u64, key: &Key, older: Older) -> bool {
        older == Older::Replaced || !self.index.get(tag).is_some_and(|word| word.fits(key))
    }

    /// Takes `tag` out of the index. The chunks of a large blob are released with what is returned: drop it outside of the
    /// state's borrow.
    #[must_use]
    pub(super) fn forget(&mut self, tag: u64) -> Option<Forgotten> {
        let word = self.index.remove(tag)?;
        let held = if word.is_large() { self.large.remove(&tag).map(|large| large.held) } else { None };
        Some((word, held))
    }

    /// Forgets all records in a region of the volume, in bytes, that could not be written.
    #[must_use]
    pub(super) fn forget_region(&mut self, region: Range<u64>) -> (u64, Vec<Rc<Held>>) {
        let region = region.start / RECORD_ALIGN as u64..region.end / RECORD_ALIGN as u64;
        let tags: Vec<u64> =
            self.index.iter().filter(|(_, word)| region.contains(&word.location())).map(|(tag, _)| tag).collect();
        (tags.len() as u64, tags.into_iter().filter_map(|tag| self.forget(tag)?.1).collect())
    }

    /// Names the record that `word` points to: where it stands, and the low bits of the segment's generation.
    pub(super) fn version(&self, layout: Layout, word: Word) -> u64 {
        let (segment, _) = layout.split(word.location() * RECORD_ALIGN as u64);
        let generation = self.generations.get(&segment).copied().unwrap_or_default();
        word.location() << VERSION_SHIFT | generation & ((1 << VERSION_SHIFT) - 1)
    }

    /// Puts a small record's word into the index. A large blob that it replaces is released after `ticket`.
    pub(super) fn publish(&mut self, tag: u64, word: Word, ticket: &Ticket) -> Option<Rc<Held>> {
        let old = self.index.insert(tag, word)?;
        let held = if old.is_large() { self.large.remove(&tag).map(|large| large.held) } else { None };
        held.inspect(|held| held.release_after(ticket))
    }
}

impl Core {
    pub(super) async fn open(volume: Volume, core: usize, cores: usize, port: PoolPort) -> Result<Rc<Self>, DiskError> {
        let count = |number: usize| u16::try_from(number).map_err(|_| DiskError::Io(format!("{number} cores")));
        let map = ShardMap::new(volume.shards(), count(cores)?);
        let core_id = CoreId(count(core)?);
        let mut files = Vec::new();
        for path in volume.data_paths() {
            let file = DiskFile::open(&path).await;
            files.push(file.map_err(|error| DiskError::Io(format!("cannot open {}: {error}", path.display())))?);
        }
        let mut shards = vec![None; usize::from(map.shards())];
        for id in map.shards_of(core_id) {
            shards[usize::from(id.0)] = Some(Rc::new(Shard {
                id,
                state: Vital::new(ShardState::new(volume.layout())),
                changed: Event::default(),
                unflushed: Cell::default(),
                chunk_waiters: Cell::default(),
                chunks_asked: Cell::default(),
                chunks_refused: Cell::default(),
                ready: Cell::default(),
                recovered: Event::default(),
            }));
        }
        let core = Rc::new(Self {
            layout: volume.layout(),
            sums: volume.checksums(),
            ack: volume.ack(),
            map,
            volume,
            files,
            shards,
            pool: port.requests,
            epoch: Cell::new(port.epoch),
            gate: Gate::default(),
            reclaims: Gate::default(),
            stopping: Cell::default(),
            stats: RefCell::default(),
            meters: Meters::default(),
            unflushed: RefCell::default(),
            wake_flusher: Event::default(),
            syncs: Syncs::default(),
            write_failures: Cell::default(),
            last_write_failure: Cell::default(),
            graves: RefCell::default(),
            wake_gravedigger: Event::default(),
            on_pressure: RefCell::default(),
            writers: Cell::default(),
            stage_room: Cell::new(usize::MAX),
        });
        core.meters.note_epoch(core.epoch.get(), rt::time::now());
        rt::spawn(flush_loop(Rc::downgrade(&core), core.wake_flusher.clone()));
        rt::spawn(sync_loop(Rc::downgrade(&core), core.syncs.wake.clone()));
        rt::spawn(grave_loop(Rc::downgrade(&core), core.wake_gravedigger.clone()));
        rt::spawn(super::reclaim::order_loop(Rc::downgrade(&core), port.messages));
        core.start_recovery(port.leased_in);
        Ok(core)
    }

    /// Runs `future` in the background, inside the gate.
    pub(super) fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        // A closed gate means that the shutdown is over: nothing is left to do.
        self.gate.spawn(future);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    pub(super) fn stop(&self) {
        self.stopping.set(true);
        self.own_shards().for_each(|shard| shard.changed.notify());
    }

    pub(super) fn set_on_pressure(&self, work: Box<dyn Fn()>) {
        *self.on_pressure.borrow_mut() = Some(work);
    }

    pub(super) fn press(&self) {
        if let Some(work) = &*self.on_pressure.borrow() {
            work();
        }
    }

    pub(super) fn own_shards(&self) -> impl Iterator<Item = &Rc<Shard>> {
        self.shards.iter().flatten()
    }

    pub(super) fn shard(&self, id: ShardId) -> Option<&Rc<Shard>> {
        self.shards.get(usize::from(id.0))?.as_ref()
    }

    /// The shard of `key` and its tag. `None` when another core owns it.
    pub(super) fn locate(&self, key: &Key) -> Option<(&Rc<Shard>, u64)> {
        Some((self.shard(self.map.shard_of(&key.hash))?, tag(self.sums.key, key.kind, &key.hash)))
    }

    pub(super) fn count(&self, work: impl FnOnce(&mut DiskStats)) {
        work(&mut self.stats.borrow_mut());
    }

    pub(super) fn counters(&self) -> DiskStats {
        self.stats.borrow().clone()
    }

    /// Reads whole blocks of one segment.
    pub(super) async fn read(&self, position: u64, len: usize) -> Option<ReadBuf> {
        let (file, offset) = Volume::file_of(position);
        let got = self.files[file].read(offset, len).await;
        if let Err(error) = &got {
            self.count(|stats| stats.read_errors += 1);
            tracing::warn!(position, len, %error, "a read from the disk cache failed; what stood there is dropped");
        }
        got.ok()
    }

    /// Writes the first `len` bytes of `buf`, whole blocks of one segment. Gives the buffer back when that failed.
    pub(super) async fn write(&self, position: u64, buf: DiskBuf, len: usize) -> Result<(), DiskBuf> {
        let (file, offset) = Volume::file_of(position);
        let begun = rt::time::now();
        let written = self.files[file].write(offset, buf, len).await;
        self.meters.flush_time.observe_time(begun.elapsed());
        match written {
            Ok(_) => {
                self.write_failures.set(0);
                if !self.syncs.dirty.replace(true) {
                    self.syncs.wake.notify();
                }
                Ok(())
            }
            Err(FailedWrite { error, buf }) => {
                self.write_failures.set(self.write_failures.get() + 1);
                self.last_write_failure.set(Some(rt::time::now()));
                self.count(|stats| stats.write_errors += 1);
                tracing::error!(position, len, %error, "a write to the disk cache failed; the segment is retired");
                Err(buf)
            }
        }
    }

    /// True while so many writes in a row have failed that another try is pointless.
    pub(super) fn writes_fail(&self) -> bool {
        let recent = |at: Instant| rt::time::now().duration_since(at) < WRITE_FAILURES_PAUSE;
        self.write_failures.get() >= WRITE_FAILURES_MAX && self.last_write_failure.get().is_some_and(recent)
    }

    /// Waits for a segment. `None`: the pool has none and can free none.
    pub(super) async fn lease(&self, shard: ShardId, class: Class) -> Option<Lease> {
        let (to, answer) = reply();
        self.pool.clone().send(ToPool::Ask { shard, class, reply: to }).await.ok()?;
        answer.recv().await.ok()?
    }

    /// The same, until `enough` holds, which is asked whenever something changes in the shard.
    pub(super) async fn lease_unless(&self, shard: &Shard, class: Class, enough: impl Fn() -> bool) -> Leased {
        let (to, mut answer) = reply();
        if self.pool.clone().send(ToPool::Ask { shard: shard.id, class, reply: to }).await.is_err() {
            return Leased::Refused;
        }
        loop {
            let changed = shard.changed.wait();
            if enough() {
                return answer.withdraw().map_or(Leased::Enough, Leased::from);
            }
            match rt::time::race(answer.ready(), changed).await {
                rt::time::Either::Left(lease) => return Leased::from(lease.ok().flatten()),
                rt::time::Either::Right(()) => {}
            }
        }
    }

    /// A segment from the reserve, at once or not at all.
    pub(super) async fn lease_for_reclaim(&self, shard: ShardId, class: Class) -> Option<Lease> {
        let (to, answer) = reply();
        self.pool.clone().send(ToPool::AskForReclaim { shard, class, reply: to }).await.ok()?;
        answer.recv().await.ok()?
    }

    pub(super) async fn report_reclaimed(&self, segment: u32, outcome: Outcome) {
        // A pool that is gone needs no report.
        let _ = self.pool.clone().send(ToPool::Reclaimed { segment, outcome }).await;
    }

    /// Gives a segment back to the pool unasked.
    pub(super) fn return_segment(self: &Rc<Self>, segment: u32, outcome: Outcome) {
        let mut pool = self.pool.clone();
        self.spawn(async move {
            // As above.
            let _ = pool.send(ToPool::Returned { segment, outcome }).await;
        });
    }

    /// Waits for what `--ack` promises of a record with this ticket.
    pub(super) async fn acknowledge(&self, ticket: &Ticket) -> Result<(), DiskError> {
        if self.ack == Ack::Buffered {
            return Ok(());
        }
        self.wait_written(ticket).await?;
        self.wait_durable(self.next_sync()).await
    }

    /// Waits until the record is on the disk, whatever `--ack` promises.
    pub(super) async fn wait_written(&self, ticket: &Ticket) -> Result<(), DiskError> {
        match ticket.wait().await {
            true => Ok(()),
            false => Err(DiskError::Io("the record could not be written".into())),
        }
    }

    /// The number of the next sync to begin: what has been written until now is on stable storage when it has ended well.
    pub(super) fn next_sync(&self) -> u64 {
        self.syncs.begun.get() + 1
    }

    /// With `--ack durable`, waits until the sync of this number, or a later one, has ended well. At least one must have since
    /// the start: what a killed process has written is found, and may never have been synced.
    ///
    /// Limit: of records whose sync failed a later one that does not is believed.
    pub(super) async fn wait_durable(&self, sync: u64) -> Result<(), DiskError> {
        if self.ack == Ack::Durable { self.wait_synced(sync.max(1)).await } else { Ok(()) }
    }

    /// Waits until the sync of this number, or a later one, has ended well, whatever `--ack` promises.
    pub(super) async fn wait_synced(&self, sync: u64) -> Result<(), DiskError> {
        let syncs = &self.syncs;
        while syncs.ended.get() < sync {
            let done = syncs.done.wait();
            if syncs.failed.get() >= sync {
                return Err(DiskError::Io("the record could not be synced".into()));
            }
            syncs.wanted.set(true);
            syncs.wake.notify();
            done.await;
        }
        Ok(())
    }

    /// The last sync that ended well.
    pub(super) fn synced(&self) -> u64 {
        self.syncs.ended.get()
    }

    /// Syncs all data files. A sync that fails is tried again a second later, but for nobody who waits now.
    ///
    /// Why: the drive may have dropped what it was to keep, and the next sync would not tell.
    pub(super) async fn sync(&self) {
        let syncs = &self.syncs;
        syncs.wanted.set(false);
        syncs.dirty.set(false);
        let this = syncs.begun.get() + 1;
        syncs.begun.set(this);
        let mut ok = true;
        let at = rt::time::now();
        for file in &self.files {
            if let Err(error) = file.sync().await {
                ok = false;
                self.count(|stats| stats.write_errors += 1);
                tracing::error!(%error, "fdatasync of the disk cache failed; it is tried again");
            }
        }
        self.meters.sync_time.observe_time(at.elapsed());
        self.count(|stats| stats.syncs += 1);
        if ok {
            syncs.ended.set(syncs.ended.get().max(this));
        } else {
            syncs.failed.set(this);
            syncs.dirty.set(true);
        }
        syncs.done.notify();
    }

    fn bury(&self, grave: Grave) {
        if !grave.runs.is_empty() {
            self.graves.borrow_mut().push(grave);
            self.wake_gravedigger.notify();
        }
    }

    /// Gives chunks back that belong to nobody, once nothing is being written to them.
    pub(super) fn discard(&self, shard: ShardId, runs: Vec<Run>) {
        self.bury(Grave { shard, runs, until: None });
    }

    /// Gives back the chunks of all blobs whose end is on disk.
    pub(super) fn dig(self: &Rc<Self>) {
        let ready: Vec<Grave> = self
            .graves
            .borrow_mut()
            .extract_if(.., |grave| grave.until.as_ref().is_none_or(Ticket::is_ended))
            .collect();
        for Grave { shard, runs, .. } in ready {
            let Some(shard) = self.shard(shard) else { continue };
            let empty: Vec<u32> = shard.state.with(|state| {
                let empty: Vec<u32> = runs.into_iter().filter_map(|run| state.chunks.give(run)).collect();
                empty.into_iter().filter(|&segment| state.chunks.remove_if_idle(segment)).collect()
            });
            empty.into_iter().for_each(|segment| self.return_segment(segment, Outcome::Freed));
            shard.changed.notify();
        }
    }

    fn next_grave(&self) -> Option<Ticket> {
        self.graves.borrow().iter().find_map(|grave| grave.until.clone())
    }
}

impl Drop for Core {
    /// The loops hold no reference: they see that the core is gone.
    fn drop(&mut self) {
        self.wake_flusher.notify();
        self.wake_gravedigger.notify();
        self.syncs.wake.notify();
    }
}

async fn flush_loop(core: Weak<Core>, wake: Event) {
    let mut flushed = 0;
    loop {
        let woken = wake.wait();
        let Some(core_now) = core.upgrade() else { return };
        let delay = match core_now.ack {
            Ack::Buffered => FLUSH_DELAY * (1 + flushed / FLUSH_SHARDS).min(FLUSH_DELAYS_MAX) as u32,
            Ack::Flushed | Ack::Durable => FLUSH_DELAY_ACK,
        };
        let idle = core_now.unflushed.borrow().is_empty();
        drop(core_now);
        if idle {
            flushed = 0;
            woken.await;
            continue;
        }
        sleep(delay).await;
        let Some(core) = core.upgrade() else { return };
        let shards = std::mem::take(&mut *core.unflushed.borrow_mut());
        flushed = shards.len();
        for shard in shards.into_iter().filter_map(|id| core.shard(id)) {
            core.flush_shard(shard);
        }
    }
}

async fn sync_loop(core: Weak<Core>, wake: Event) {
    let mut last_checkpoint = rt::time::now();
    loop {
        let woken = wake.wait();
        let Some(core_now) = core.upgrade() else { return };
        let (dirty, wanted) = (core_now.syncs.dirty.get(), core_now.syncs.wanted.get());
        drop(core_now);
        if !dirty && !wanted {
            woken.await;
            continue;
        }
        if !wanted {
            rt::time::race(sleep(SYNC_PERIOD), wanted_sync(core.clone(), wake.clone())).await;
        }
        let Some(core) = core.upgrade() else { return };
        if rt::time::now().duration_since(last_checkpoint) >= CHECKPOINT_PERIOD {
            last_checkpoint = rt::time::now();
            for shard in core.own_shards().cloned().collect::<Vec<_>>() {
                core.checkpoint(&shard).await;
            }
        }
        core.sync().await;
    }
}

/// Ends when somebody waits for a sync, or the core is gone.
async fn wanted_sync(core: Weak<Core>, wake: Event) {
    loop {
        let woken = wake.wait();
        if core.upgrade().is_none_or(|core| core.syncs.wanted.get()) {
            return;
        }
        woken.await;
    }
}

async fn grave_loop(core: Weak<Core>, wake: Event) {
    loop {
        let woken = wake.wait();
        let Some(core_now) = core.upgrade() else { return };
        core_now.dig();
        let ticket = core_now.next_grave();
        drop(core_now);
        match ticket {
            Some(ticket) => {
                rt::time::race(ticket.wait(), woken).await;
            }
            None => woken.await,
        }
    }
}
