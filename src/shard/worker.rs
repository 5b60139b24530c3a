//! The owner of one core's shards: verifies, compresses, stores, finds.

mod admit;
mod changes;
mod purges;

use std::cell::Cell;
use std::rc::{Rc, Weak};
use std::slice;
use std::time::{Duration, Instant};

use bytes::Bytes;

pub(super) use self::admit::Admitted;
use self::admit::Lines;
use super::blob_disk::{BlobDisk, Older, Record, Stored};
use super::codec::{Codecs, DecodeError, StorageMode, StreamDecoder};
use super::disk::{Codec, DiskError, Key, Kind};
use super::fences::Fences;
use super::ram::{RamStats, RamTier, own};
use super::read_through::Flights;
use super::router::Mesh;
use super::session::{Session, check_raw, decode_error, decoder_for, is_small};
use super::standing::StandingPurges;
use super::upload::{UploadHandle, Uploads};
use super::write_behind::{Intents, Sending};
use super::write_gate::{WriteGate, WriteLimits, WriteStats};
use crate::backend::{Backend, Backends};
use crate::budget::Purse;
use crate::limits::{self, FIND_MISSING_SLICE, WORK_SLICE_LEN};
use crate::metrics::{Metric, Snapshot};
use crate::pure::admission;
use crate::pure::digest::{Digest, Hash};
use crate::pure::purge::{InstanceTag, Origin, Purges};
use crate::pure::scope::Scope;
use crate::pure::upload_queue::{ObjectKind, Upload};
use crate::rt;
use crate::rt::gate::Gate;
use crate::rt::local::{Event, Local, Permits};
use crate::rt::published::Reader;
use crate::store::{
    ActionEntry, ActionKey, Blob, Encoding, Get, NotDecoded, Opened, Purpose, Put, PutOutcome, StoreError, UploadKey,
    UploadStatus,
};

/// What boot decides for each core.
#[derive(Clone)]
pub struct WorkerConfig {
    pub mode: StorageMode,
    /// Budget of the RAM tier, in bytes; 0 for none.
    pub ram_bytes: usize,
    /// This core's hold on the memory limit.
    pub purse: Purse,
    /// Memory of interrupted uploads, in bytes.
    pub parked_bytes: usize,
    /// This core, and how many there are.
    pub core: usize,
    pub cores: usize,
    pub writes: WriteLimits,
    pub standing: StandingPurges,
}

/// What a worker has done and holds.
#[derive(Debug, Clone, Copy, Default)]
pub struct WorkerStats {
    pub ram: RamStats,
    /// Blobs that were verified and stored.
    pub stored_blobs: u64,
    /// Their raw bytes.
    pub stored_raw_bytes: u64,
    /// Puts and uploads of blobs that were present.
    pub already_present: u64,
    pub parked_uploads: u64,
    /// Bytes of memory that they hold.
    pub parked_bytes: u64,
    /// Streams and uploads that are running.
    pub tasks: u64,
    /// How long work waits for its turn, in microseconds.
    pub delay_us: u64,
    /// The gate before CAS writes.
    pub writes: WriteStats,
}

/// The worker of this core, for the blobs of one scope. Clones share it, whatever their scope.
pub struct Worker<D: BlobDisk>(Rc<Inner<D>>, Scope);

struct Inner<D: BlobDisk> {
    disk: D,
    ram: Local<RamTier>,
    fences: Fences,
    codecs: Codecs,
    purse: Purse,
    cores: usize,
    uploads: Uploads<D>,
    write_gate: WriteGate,
    lines: Lines,
    /// Somebody waits at the gate or in a line, and a task looks after them: next at that time, unless it is woken.
    gate_kept: Cell<Option<Instant>>,
    gate_wakes: Event,
    backends: Option<Backends>,
    /// The way to other cores, once there is one.
    mesh: Local<Weak<Mesh>>,
    /// By backend, so that a sick one fills only its own.
    flights: Vec<Flights>,
    intents: Intents,
    /// Every upload and every stream of this worker.
    gate: Gate,
    sending: Sending,
    standing: StandingPurges,
    purges: Reader<Purges>,
    purge_turns: Permits,
    /// Work since this core last reached the reactor, in bytes of hashing.
    spent: Cell<usize>,
    stored_blobs: Cell<u64>,
    stored_raw_bytes: Cell<u64>,
    already_present: Cell<u64>,
}

impl<D: BlobDisk> Clone for Worker<D> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), self.1.clone())
    }
}

impl<D: BlobDisk> Worker<D> {
    pub fn new(disk: D, config: WorkerConfig) -> Self {
        Self::with_backends(disk, config, None)
    }

    /// A worker that reads through to backends and writes behind.
    pub fn with_backends(disk: D, config: WorkerConfig, backends: Option<Backends>) -> Self {
        let worker = Rc::new(Inner {
            disk,
            ram: Local::new(RamTier::new(config.ram_bytes)),
            fences: Fences::default(),
            codecs: Codecs::new(config.mode, config.purse.clone()),
            purse: config.purse,
            cores: config.cores,
            uploads: Uploads::new(config.parked_bytes),
            write_gate: WriteGate::new(config.writes, config.core, config.cores),
            lines: Lines::new(),
            gate_kept: Cell::new(None),
            gate_wakes: Event::default(),
            flights: backends.as_ref().map_or_else(Vec::new, |backends| {
                let settings = backends.settings();
                settings.backends.iter().map(|_| Flights::new(settings.flights)).collect()
            }),
            backends,
            mesh: Local::new(Weak::new()),
            intents: Intents::default(),
            gate: Gate::default(),
            sending: Sending::default(),
            purges: config.standing.reader(),
            standing: config.standing,
            purge_turns: Permits::new(1),
            spent: Cell::new(0),
            stored_blobs: Cell::new(0),
            stored_raw_bytes: Cell::new(0),
            already_present: Cell::new(0),
        });
        let worker = Self(worker, Scope::default());
        let weak = Rc::downgrade(&worker.0);
        worker.0.disk.on_pressure(Box::new(move || {
            if let Some(inner) = weak.upgrade() {
                inner.uploads.give_way(&inner.write_gate, rt::time::now());
            }
        }));
        worker
    }

    /// The same worker, for the blobs of `scope`.
    pub fn scoped(&self, scope: Scope) -> Self {
        Self(self.0.clone(), scope)
    }

    pub(super) fn scope(&self) -> &Scope {
        &self.1
    }

    pub fn stats(&self) -> WorkerStats {
        WorkerStats {
            ram: self.0.ram.with(|ram| ram.stats()),
            stored_blobs: self.0.stored_blobs.get(),
            stored_raw_bytes: self.0.stored_raw_bytes.get(),
            already_present: self.0.already_present.get(),
            parked_uploads: self.0.uploads.parked() as u64,
            parked_bytes: self.0.uploads.parked_bytes() as u64,
            tasks: self.0.gate.len() as u64,
            delay_us: u64::from(self.0.codecs.pressure().delay_us()),
            writes: self.0.write_gate.stats(),
        }
    }

    /// Adds what this worker has done and holds.
    pub(super) fn report(&self, core: usize, into: &mut Snapshot) {
        let stats = self.stats();
        into.add(Metric::StoredBlobs, stats.stored_blobs);
        into.add(Metric::Stored, stats.stored_raw_bytes);
        into.add(Metric::PresentBlobs, stats.already_present);
        into.add(Metric::ParkedUploads, stats.parked_uploads);
        into.add(Metric::Tasks, stats.tasks);
        into.add_core(Metric::CoreQueueDelay, core, Duration::from_micros(stats.delay_us));
        into.add(Metric::RamCacheHits, stats.ram.hits);
        into.add(Metric::RamCacheMisses, stats.ram.misses);
        into.add(Metric::RamCacheEvicted, stats.ram.evicted);
        into.add(Metric::RamCacheEntries, stats.ram.entries);
        into.add_for(Metric::MemoryHeld, ["ram_cache"], stats.ram.bytes);
        into.add_for(Metric::MemoryHeld, ["parked"], stats.parked_bytes);
        self.0.write_gate.report(into);
    }

    /// Lets no new upload or stream begin, waits for those that run, and frees what interrupted ones have left.
    pub async fn stop(&self) {
        self.0.write_gate.close();
        self.0.gate.close();
        self.0.gate.wait_empty().await;
        // Why last: those that just ended have parked what they had.
        self.0.uploads.clear();
    }

    /// For each digest whether it is missing, here and in the backend, for which see `Router::until`.
    pub async fn find_missing(&self, digests: &[Digest], until: Option<Instant>) -> Vec<bool> {
        let mut missing = self.find_missing_here(digests).await;
        self.find_there(digests, &mut missing, until).await;
        missing
    }

    /// For each digest whether it is missing here.
    pub(super) async fn find_missing_here(&self, digests: &[Digest]) -> Vec<bool> {
        let mut missing = Vec::with_capacity(digests.len());
        for (slice, digests) in digests.chunks(FIND_MISSING_SLICE).enumerate() {
            if slice > 0 {
                self.yield_turn().await;
            }
            for digest in digests {
                self.0.disk.ready(&digest.hash).await;
                missing.push(!self.0.disk.contains(&self.cas_key(digest)));
            }
        }
        missing
    }

    /// Whether a blob is here; that counts as use.
    pub(super) async fn has_blob(&self, digest: &Digest) -> bool {
        self.0.disk.ready(&digest.hash).await;
        self.0.disk.contains(&self.cas_key(digest))
    }

    /// The size of a blob that is known by its hash only. `None` is a miss, here and in the backend.
    pub async fn size_of(&self, hash: Hash, purpose: Purpose) -> Result<Option<u64>, StoreError> {
        match self.size_here(hash).await? {
            None if self.takes_reads() => Ok(self.size_there(hash, purpose).await),
            found => Ok(found),
        }
    }

    /// `None` is a miss here.
    pub(super) async fn size_here(&self, hash: Hash) -> Result<Option<u64>, StoreError> {
        self.0.disk.ready(&hash).await;
        // Why the disk is asked, too: see `take_from_ram`.
        let here = |size: &u64| self.0.disk.contains(&Key { kind: Kind::Cas, hash, size: *size });
        if let Some(size) = self.0.ram.with(|ram| ram.size_of(&hash)).filter(here) {
            return Ok(Some(size));
        }
        match self.0.disk.size_of(&hash).await {
            Err(DiskError::Damaged) => Ok(None),
            found => found.map_err(|error| store_error(error, Digest { hash, size: 0 })),
        }
    }

    /// `None` is a miss, here and in the backend.
    pub async fn get(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        match self.get_here(get).await? {
            None if self.reads_through(&get.digest) => self.get_there(get).await,
            found => Ok(found),
        }
    }

    /// `None` is a miss here.
    pub(super) async fn get_here(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        let key = self.cas_key(&get.digest);
        if let Some(record) = self.take_from_ram(&key) {
            return self.small_blob(&get, record);
        }
        self.0.disk.ready(&key.hash).await;
        match self.0.disk.read(&key).await {
            Ok(None) | Err(DiskError::Damaged) => Ok(None),
            Ok(Some(Stored::Small(record))) => {
                self.keep_in_ram(&key, &record, false);
                self.small_blob(&get, record)
            }
            Ok(Some(Stored::Large(blob))) => self.large_blob(get, blob).await,
            Err(error) => Err(store_error(error, get.digest)),
        }
    }

    /// Verifies and stores a blob whose body is all here, when it is let in. The backend gets it later.
    pub async fn put(&self, put: Put) -> Result<PutOutcome, StoreError> {
        if self.is_present(&put.digest).await? {
            return Ok(self.note_present());
        }
        // Of a small blob the decoded content and the form at rest.
        let len = if is_small(&put.digest) { 2 * put.digest.size } else { limits::write_held_len(put.digest.size) };
        let decoder = match is_small(&put.digest) {
            true => None,
            false => decoder_for(self, put.digest, put.encoding).await?,
        };
        let _admitted = if put.admitted { None } else { Some(self.enter_write(len).await?) };
        self.put_admitted(put, decoder).await
    }

    async fn put_admitted(&self, put: Put, decoder: Option<StreamDecoder>) -> Result<PutOutcome, StoreError> {
        if !is_small(&put.digest) {
            let mut session = Session::new(put.digest, decoder);
            session.write(self, &put.data).await?;
            return session.finish(self).await;
        }
        let key = self.cas_key(&put.digest);
        match put.encoding {
            Encoding::Identity => {
                check_raw(&put.digest, &put.data)?;
                self.breathe(put.digest.size as usize).await;
                let _intent = self.announce(self.name(ObjectKind::Cas, put.digest)).await;
                self.store_small(&key, &put.data, None).await?;
            }
            Encoding::Zstd => {
                let body = joined(&put.data);
                let raw = self.0.codecs.decode(&body, put.digest.size as usize);
                let raw = Bytes::from(raw.map_err(|error| decode_error(error, put.digest))?);
                check_raw(&put.digest, std::slice::from_ref(&raw))?;
                self.breathe(2 * raw.len()).await;
                let _intent = self.announce(self.name(ObjectKind::Cas, put.digest)).await;
                self.store_small(&key, &[raw], Some(body)).await?;
            }
        }
        Ok(PutOutcome::Stored)
    }

    /// See `Store::decoded`.
    pub fn decoded(&self, zstd: &[u8], raw_len: usize) -> Result<Bytes, NotDecoded> {
        let detail = match self.0.codecs.decode(zstd, raw_len) {
            Ok(raw) if raw.len() == raw_len => return Ok(raw.into()),
            Ok(_) => "there are less",
            Err(DecodeError::TooLong) => "there are more",
            Err(DecodeError::Bad(detail)) => detail,
            Err(DecodeError::Memory { .. }) => "there is no memory for it",
        };
        Err(NotDecoded { raw_len, detail })
    }

    pub async fn open_upload(&self, key: UploadKey, offset: u64) -> Result<Opened<UploadHandle>, StoreError> {
        if self.is_present(&key.digest).await? {
            self.note_present();
            return Ok(Opened::AlreadyPresent);
        }
        self.0.uploads.open(self, self.session(key), offset).await.map(Opened::Ready)
    }

    /// So many CAS writes may be in flight on all cores, and new ones wait for so long at most. Tell every core.
    pub fn set_write_limits(&self, slots: u32, wait: std::time::Duration) {
        self.0.write_gate.set_slots(slots);
        self.0.write_gate.set_wait(wait);
        self.keep_gate();
    }

    /// A message of another core's gate.
    pub fn receive_slots(&self, message: admission::Message) {
        self.0.write_gate.receive(message);
        self.keep_gate();
    }

    pub async fn upload_status(&self, key: &UploadKey) -> Result<UploadStatus, StoreError> {
        self.0.disk.ready(&key.digest.hash).await;
        if self.holds(&key.digest).await? {
            return Ok(UploadStatus { committed: key.digest.size, complete: true });
        }
        Ok(UploadStatus { committed: self.0.uploads.report(&self.session(key.clone())), complete: false })
    }

    /// `None` is a miss, here and in the backend.
    pub async fn action_get(&self, action: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        match self.action_here(action).await? {
            None if self.takes_reads() => self.action_there(action).await,
            found => Ok(found),
        }
    }

    /// `None` is a miss here.
    pub(super) async fn action_here(&self, action: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        let key = self.action_key(&action);
        let found = match self.take_from_ram(&key) {
            Some(record) => Some(record),
            None => self.read_action(&key).await?,
        };
        let same = |record: &Record| action.size.is_none_or(|size| record.key_size == 0 || record.key_size == size);
        Ok(found.filter(same).map(|record| ActionEntry { data: record.data, version: record.version }))
    }

    /// Stores or replaces, for a client of `instance`. The backend gets it later.
    pub async fn action_put(&self, action: ActionKey, data: Bytes, instance: InstanceTag) -> Result<(), StoreError> {
        let digest = Digest { hash: action.hash, size: action.size.unwrap_or(0) };
        let _intent = self.announce(self.name(ObjectKind::Action, digest)).await;
        self.action_put_here(action, data, Origin::new(rt::time::unix_seconds(), instance), Older::Replaced).await
    }

    /// Stores, where `older` allows it.
    pub(super) async fn action_put_here(
        &self,
        action: ActionKey,
        data: Bytes,
        origin: Origin,
        older: Older,
    ) -> Result<(), StoreError> {
        let key = self.action_key(&action);
        self.0.disk.ready(&key.hash).await;
        let (changing, fence) = (self.changing(slice::from_ref(&key)), self.0.fences.now(&key));
        let raw_len = data.len() as u64;
        let version = match self.0.disk.append_action(&key, origin, &data, older).await {
            Err(DiskError::Superseded) => return Ok(()),
            stored => stored.map_err(action_error)?,
        };
        // Whoever changed the action meanwhile may have been later or earlier: the disk knows.
        let alone = self.0.fences.is_at(&key, fence);
        drop(changing);
        if alone {
            let record = Record { codec: Codec::Raw, raw_len, data, version, key_size: key.size, origin };
            self.keep_in_ram(&key, &record, false);
        }
        Ok(())
    }

    /// Drops the entry if it is still this version, and no backend is to get it yet.
    pub async fn action_drop(&self, action: ActionKey, version: u64) -> Result<(), StoreError> {
        let key = self.action_key(&action);
        self.0.disk.ready(&key.hash).await;
        if self.owes(&action, version).await? {
            return Ok(());
        }
        let _changing = self.changing(slice::from_ref(&key));
        self.0.disk.remove(&key, Some(version)).await.map(drop).map_err(action_error)
    }

    pub(super) async fn read_action(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        self.0.disk.ready(&key.hash).await;
        let fence = self.0.fences.now(key);
        match self.0.disk.read(key).await {
            Ok(Some(Stored::Small(record))) => {
                if self.0.fences.is_at(key, fence) {
                    self.keep_in_ram(key, &record, false);
                }
                Ok(Some(record))
            }
            Ok(None | Some(Stored::Large(_))) | Err(DiskError::Damaged) => Ok(None),
            Err(error) => Err(action_error(error)),
        }
    }

    async fn is_present(&self, digest: &Digest) -> Result<bool, StoreError> {
        let max = self.0.disk.max_blob_len();
        if digest.size > max {
            return Err(StoreError::BlobTooLarge { digest: *digest, max });
        }
        self.0.disk.ready(&digest.hash).await;
        self.holds(digest).await
    }

    /// Whether a blob is here as `--ack` promises it, so that an upload of it is over. Waits for that, if need be.
    pub(super) async fn holds(&self, digest: &Digest) -> Result<bool, StoreError> {
        self.0.disk.holds(&self.cas_key(digest)).await.map_err(|error| store_error(error, *digest))
    }

    /// Runs what waits for a backend, outside of the bound on requests: nobody else must wait for that.
    pub(super) fn apart(&self, waiting: impl Future<Output = ()> + 'static) {
        rt::spawn(rt::contain(async move {
            let _busy = rt::busy();
            waiting.await;
        }));
    }

    fn note_present(&self) -> PutOutcome {
        self.0.already_present.set(self.0.already_present.get() + 1);
        PutOutcome::AlreadyPresent
    }

    /// The record from RAM, if the disk has its key, too; counts as use of both.
    ///
    /// Why the disk is asked: nothing is served that FindMissing calls missing, and what is hot here must not grow old there.
    fn take_from_ram(&self, key: &Key) -> Option<Record> {
        let record = self.0.ram.with(|ram| ram.get(key))?;
        if self.0.disk.contains(key) {
            return Some(record);
        }
        self.0.ram.with(|ram| ram.remove(key));
        None
    }

    /// Keeps a copy of a record in RAM if it is of a size for that. `owned`: its data is a whole allocation.
    fn keep_in_ram(&self, key: &Key, record: &Record, owned: bool) {
        self.0.ram.with(|ram| {
            if ram.takes(record.data.len()) {
                let data = if owned { record.data.clone() } else { own(&[&record.data]) };
                ram.insert(key, Record { data, ..record.clone() });
            }
        });
    }
}

/// For the parts of the worker in `session`, `read` and `upload`.
impl<D: BlobDisk> Worker<D> {
    pub(super) fn disk(&self) -> &D {
        &self.0.disk
    }

    pub(super) fn codecs(&self) -> &Codecs {
        &self.0.codecs
    }

    pub(super) fn uploads(&self) -> &Uploads<D> {
        &self.0.uploads
    }

    /// The backend of this scope, and what is on its way from there.
    pub(super) fn backend_and_flights(&self) -> Option<(&Backend, &Flights)> {
        let backends = self.0.backends.as_ref()?;
        let (index, _) = backends.settings().place_of(&self.1);
        Some((backends.get(index), &self.0.flights[index]))
    }

    /// The backend of this scope.
    pub(super) fn backend(&self) -> Option<&Backend> {
        self.0.backends.as_ref().map(|backends| backends.of(&self.1))
    }

    /// Says by which ways the other cores are reached.
    pub(super) fn connect(&self, mesh: &Rc<Mesh>) {
        self.0.mesh.with(|known| *known = Rc::downgrade(mesh));
    }

    pub(super) fn mesh(&self) -> Option<Rc<Mesh>> {
        self.0.mesh.with(|mesh| mesh.upgrade())
    }

    pub(super) fn intents(&self) -> &Intents {
        &self.0.intents
    }

    /// What a backend knows a thing of this scope by.
    pub(super) fn name(&self, kind: ObjectKind, digest: Digest) -> Upload {
        Upload { kind, digest, scope: self.1.clone() }
    }

    /// What a blob is found by.
    pub(super) fn cas_key(&self, digest: &Digest) -> Key {
        let (kind, hash) = self.1.cas_key(&digest.hash);
        Key { kind, hash, size: digest.size }
    }

    /// What an action is found by.
    pub(super) fn action_key(&self, action: &ActionKey) -> Key {
        let (kind, hash) = self.1.action_key(&action.hash);
        Key { kind, hash, size: action.size.unwrap_or(0) }
    }

    /// The name of an upload session of this scope.
    fn session(&self, key: UploadKey) -> UploadKey {
        UploadKey { instance: self.1.instance(key.instance), ..key }
    }

    pub(super) fn gate(&self) -> &Gate {
        &self.0.gate
    }

    pub(super) fn write_gate(&self) -> &WriteGate {
        &self.0.write_gate
    }

    /// Stores a verified small blob: as the client's `frame` if that may be kept, else compressed if that pays, else raw.
    pub(super) async fn store_small(&self, key: &Key, raw: &[Bytes], frame: Option<Bytes>) -> Result<(), StoreError> {
        let raw_len = key.size as usize;
        let mut record = Record {
            codec: Codec::Zstd,
            raw_len: key.size,
            data: Bytes::new(),
            version: 0,
            key_size: key.size,
            origin: Origin::default(),
        };
        let mut pieces = raw;
        let mut owned = false;
        if let Some(frame) = frame.filter(|frame| self.0.codecs.keeps(frame, raw_len)) {
            record.data = frame;
        } else if self.0.codecs.tries(raw_len) {
            let raw = joined(raw);
            match self.0.codecs.at_rest(&raw) {
                Some(frame) => (record.data, owned) = (frame.into(), true),
                None => (record.data, record.codec) = (raw, Codec::Raw),
            }
            self.breathe_after_compressing(raw_len).await;
        } else {
            record.codec = Codec::Raw;
        }
        if !record.data.is_empty() {
            pieces = std::slice::from_ref(&record.data);
        }
        record.version = self.append(key, record.codec, pieces).await?;
        if pieces.len() != 1 {
            (record.data, owned) = (own(pieces), true);
        } else if record.data.is_empty() {
            record.data = pieces[0].clone();
        }
        self.keep_in_ram(key, &record, owned);
        self.note_stored(key);
        Ok(())
    }

    /// The record's bytes make no sense: from now on it is a miss.
    pub(super) fn forget_damaged(&self, key: &Key) {
        self.0.ram.with(|ram| ram.remove(key));
        self.0.disk.damaged(key);
    }

    /// A CAS blob has been stored.
    pub(super) fn note_stored(&self, key: &Key) {
        self.0.stored_blobs.set(self.0.stored_blobs.get() + 1);
        self.0.stored_raw_bytes.set(self.0.stored_raw_bytes.get() + key.size);
        self.0.uploads.note_stored(key);
    }

    /// Starts a large blob on disk. When there is no space, interrupted uploads give way.
    pub(super) async fn begin_large(&self, digest: &Digest) -> Result<D::Writer, StoreError> {
        let key = self.cas_key(digest);
        match self.0.disk.begin_large(&key).await {
            Err(DiskError::NoSpace { .. }) if self.0.uploads.parked() > 0 => {
                self.0.uploads.clear();
                self.0.disk.begin_large(&key).await
            }
            begun => begun,
        }
        .map_err(|error| store_error(error, *digest))
    }

    /// Called after work that costs as much as hashing `bytes`: lets the reactor have its turn when it is due.
    pub(super) async fn breathe(&self, bytes: usize) {
        let spent = self.0.spent.get() + bytes;
        self.0.spent.set(spent);
        if spent >= WORK_SLICE_LEN {
            self.yield_turn().await;
        }
    }

    /// The same after compressing `raw_len` bytes, which costs three times as much.
    pub(super) async fn breathe_after_compressing(&self, raw_len: usize) {
        self.breathe(3 * raw_len).await;
    }

    async fn yield_turn(&self) {
        self.0.spent.set(0);
        let before = rt::time::now();
        rt::time::yield_to_reactor().await;
        self.0.codecs.pressure().observe(before.elapsed());
    }

    async fn append(&self, key: &Key, codec: Codec, pieces: &[Bytes]) -> Result<u64, StoreError> {
        let appended = match pieces {
            [piece] => self.0.disk.append(key, codec, key.size, &[piece]).await,
            pieces => {
                let slices: Vec<&[u8]> = pieces.iter().map(|piece| &piece[..]).collect();
                self.0.disk.append(key, codec, key.size, &slices).await
            }
        };
        appended.map_err(|error| store_error(error, Digest { hash: key.hash, size: key.size }))
    }
}

/// The disk's error as the store's.
pub(super) fn store_error(error: DiskError, digest: Digest) -> StoreError {
    match error {
        DiskError::Damaged => StoreError::Lost { digest },
        DiskError::NoSpace { bytes } => StoreError::NoSpace { bytes },
        DiskError::Superseded | DiskError::Io(_) => StoreError::Disk(error.to_string()),
        DiskError::Stopping => StoreError::Stopping,
    }
}

fn action_error(error: DiskError) -> StoreError {
    match error {
        DiskError::Damaged => StoreError::Disk("the action's record was damaged and has been dropped".into()),
        DiskError::NoSpace { bytes } => StoreError::NoSpace { bytes },
        DiskError::Superseded | DiskError::Io(_) => StoreError::Disk(error.to_string()),
        DiskError::Stopping => StoreError::Stopping,
    }
}

/// The pieces as one; no copy when there is only one.
fn joined(pieces: &[Bytes]) -> Bytes {
    match pieces {
        [piece] => piece.clone(),
        pieces => own(pieces),
    }
}
