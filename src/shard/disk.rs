//! One core's disk cache as its worker sees it: keys in, checked bytes out.

use std::path::PathBuf;
use std::rc::Rc;

use bytes::{Bytes, BytesMut};

use super::blob_disk::{self, Older, Stored};
use super::engine::{Core, Shard, ShardState, VERSION_SHIFT};
use super::geometry::Volume;
use super::large::Closing;
pub use super::large::{FrameInfo, Frames, LargeBlob, LargeWriter};
use super::log::{AppendError, Log, Record, Ticket, Urgency, Whereabouts};
use super::pool::PoolPort;
pub use super::purging::ActionCursor;
use super::recover::{AGES_TAG, tomb_header};
use crate::limits::{self, DISK_ALIGN, FRAME_LEN, SMALL_BLOB_LEN_MAX};
use crate::metrics::Snapshot;
use crate::pure::digest::Hash;
use crate::pure::index::Word;
use crate::pure::purge::{InstanceTag, Origin, Which};
use crate::pure::recency::Ages;
pub use crate::pure::record::{Codec, Key, Kind};
use crate::pure::record::{Commit, HEADER_LEN, Header, Place, RECORD_ALIGN, RecordKind, TombOrder, log_len};
use crate::rt::file::ReadBuf;
use crate::rt::gate::Gate;
use crate::rt::time::unix_seconds;

/// When `append` and `commit` return.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ack {
    /// Verified, indexed, in the write buffer; on disk within milliseconds.
    #[default]
    Buffered,
    /// Written: survives `kill -9`.
    Flushed,
    /// Written and synced: survives a power cut.
    Durable,
}

/// What the operator decides about the disk cache.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// The cache directory (`--dir`).
    pub dir: PathBuf,
    /// Most bytes that the files in `dir` may take together (`--max_size`).
    pub max_size_bytes: u64,
    pub ack: Ack,
}

/// What went wrong on the disk. A miss is not an error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The bytes read are not those that were written. The record has been dropped: a miss from now on.
    #[error("record damaged")]
    Damaged,
    /// Another record of this key is there, and is to stay.
    #[error("there is a newer record")]
    Superseded,
    #[error("no segment can be freed for {bytes} bytes")]
    NoSpace { bytes: u64 },
    #[error("{0}")]
    Io(String),
    #[error("the disk is shutting down")]
    Stopping,
}

/// What this core's shards hold and have done. Counters only grow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Entries in the index, actions included.
    pub entries: u64,
    pub large_blobs: u64,
    /// Memory of the index.
    pub index_bytes: u64,
    /// Bytes of the segments that this core's shards have leased.
    pub leased_bytes: u64,
    pub appended_records: u64,
    pub appended_bytes: u64,
    /// Records copied forward by reclaim (they are in `appended_*` too), and their bytes.
    pub reinserted_records: u64,
    pub reinserted_bytes: u64,
    pub evicted_entries: u64,
    pub damaged_records: u64,
    pub read_errors: u64,
    pub write_errors: u64,
    pub flushes: u64,
    pub syncs: u64,
    /// Shards of this core that are still being recovered.
    pub recovering_shards: u64,
}

/// One core's disk. Core-local; clones share it.
#[derive(Clone)]
pub struct Disk(Rc<Core>);

impl Disk {
    /// Opens the data files on this core and starts recovery of its shards in the background.
    pub async fn open(volume: Volume, core: usize, cores: usize, port: PoolPort) -> Result<Self, DiskError> {
        Core::open(volume, core, cores, port).await.map(Self)
    }

    /// How many bytes large writes may stage on this core beyond the least that each needs; without bound until it is said.
    /// For the start: what is staged then is not counted.
    pub fn stage_beyond(&self, bytes: usize) {
        self.0.stage_room.set(bytes);
    }

    /// Waits until the shard of `hash` has been recovered. Cheap when it has.
    pub async fn ready(&self, hash: &Hash) {
        if let Some(shard) = self.0.shard(self.0.map.shard_of(hash)) {
            shard.wait_ready().await;
        }
    }

    /// Whether `key` is present. A hit counts as use. Call `ready` first.
    pub fn contains(&self, key: &Key) -> bool {
        let Some((shard, tag)) = self.0.locate(key) else { return false };
        shard.state.with(|state| {
            state.index.get(tag).is_some_and(|word| word.fits(key)) && {
                state.index.touch(tag, self.0.epoch.get());
                true
            }
        })
    }

    /// Whether `key` is present and all that `--ack` promises of it holds: waits for that. A hit counts as use. Call `ready`
    /// first.
    pub async fn holds(&self, key: &Key) -> Result<bool, DiskError> {
        while self.contains(key) {
            if self.0.ack == Ack::Buffered {
                return Ok(true);
            }
            let (shard, tag) = self.locate(key)?;
            let layout = self.0.layout;
            let found = shard.state.with(|state| {
                let location = state.index.get(tag)?.location();
                Some((state.log.pending(layout, location), state.log.sync_of(layout, location)))
            });
            match found {
                None => {}
                // Then it is looked at again: a write that failed has moved it, or lost it.
                Some((Some(ticket), _)) => {
                    ticket.wait().await;
                }
                Some((None, sync)) => return self.0.wait_durable(sync).await.map(|()| true),
            }
        }
        Ok(false)
    }

    /// Looks `key` up; a hit counts as use.
    pub async fn read(&self, key: &Key) -> Result<Option<Stored<LargeBlob>>, DiskError> {
        let (shard, tag) = self.locate(key)?;
        shard.wait_ready().await;
        // Each turn but the last means that the record was moved while it was being read.
        for _ in 0..MOVES_MAX {
            let found = shard.state.with(|state| {
                let word = state.index.get(tag).filter(|word| word.fits(key))?;
                state.index.touch(tag, self.0.epoch.get());
                let large = if word.is_large() { state.large.get(&tag) } else { None };
                Some((
                    word,
                    large.map(|large| (large.held.clone(), large.record_len)),
                    state.version(self.0.layout, word),
                ))
            });
            let Some((word, large, version)) = found else { return Ok(None) };
            let len = large.as_ref().map_or(word.read_len(key), |(_, len)| u64::from(*len));
            let whole = |header: Header, record: &[u8]| {
                let payload = header.payload(record, &self.0.sums)?;
                Some((header, Bytes::copy_from_slice(payload)))
            };
            let record = self.0.fetch(&shard, word, len, whole).await;
            let kind = if large.is_some() { RecordKind::Large } else { RecordKind::Small };
            let wanted = |header: &Header| {
                let fits = header.key.kind == key.kind && (key.kind.is_action() || header.key.size == key.size);
                header.kind == kind && header.key.hash == key.hash && fits
            };
            match (record, large) {
                // Another key with the same tag: that one is innocent.
                (Some((header, _)), _) if !wanted(&header) => return Ok(None),
                (Some((header, data)), None) => {
                    return Ok(Some(Stored::Small(blob_disk::Record {
                        codec: header.codec,
                        raw_len: header.raw_len,
                        data,
                        version,
                        key_size: header.key.size,
                        origin: header.origin,
                    })));
                }
                (Some((header, payload)), Some((held, _))) => {
                    let blob = Commit::decode(&payload)
                        .and_then(|commit| LargeBlob::new(&self.0, &shard, header.key, tag, version, held, commit));
                    match blob {
                        Some(blob) if header.pieces => return join(blob, &header, version).await.map(Some),
                        Some(blob) => return Ok(Some(Stored::Large(blob))),
                        None => {
                            self.0.drop_damaged(&shard, tag, word.location());
                            return Err(DiskError::Damaged);
                        }
                    }
                }
                (None, _) => {
                    let now = shard.state.with(|state| state.index.get(tag).map(Word::location));
                    if now == Some(word.location()) {
                        self.0.drop_damaged(&shard, tag, word.location());
                        return Err(DiskError::Damaged);
                    }
                }
            }
        }
        Ok(None)
    }

    /// The size of the blob with this hash, as its record's header says; a hit counts as use. The blob's bytes are not
    /// looked at.
    pub async fn size_of(&self, hash: &Hash) -> Result<Option<u64>, DiskError> {
        let (shard, tag) = self.locate(&Key { kind: Kind::Cas, hash: *hash, size: 0 })?;
        shard.wait_ready().await;
        for _ in 0..MOVES_MAX {
            let found = shard.state.with(|state| {
                state.index.touch(tag, self.0.epoch.get());
                state.index.get(tag)
            });
            let Some(word) = found else { return Ok(None) };
            let header = self.0.fetch(&shard, word, HEADER_LEN as u64, |header, _| Some(header)).await;
            if let Some(header) = header {
                // Else another key with the same tag.
                let is_it = header.key.kind == Kind::Cas && header.key.hash == *hash;
                return Ok(is_it.then_some(header.key.size));
            }
            let now = shard.state.with(|state| state.index.get(tag).map(Word::location));
            if now == Some(word.location()) {
                self.0.drop_damaged(&shard, tag, word.location());
                return Err(DiskError::Damaged);
            }
        }
        Ok(None)
    }

    /// Stores one record, replacing an older one of the same key, and returns its version. `stored` is the payload at
    /// rest, in pieces: of a CAS blob at most `SMALL_BLOB_LEN_MAX` bytes, of an action `ACTION_RESULT_LEN_MAX`.
    pub async fn append(&self, key: &Key, codec: Codec, raw_len: u64, stored: &[&[u8]]) -> Result<u64, DiskError> {
        let origin = Origin::new(unix_seconds(), InstanceTag::UNKNOWN);
        self.append_from(origin, key, codec, raw_len, stored, Older::Replaced).await
    }

    /// The same of an action, with its origin.
    pub async fn append_action(&self, key: &Key, origin: Origin, data: &[u8], older: Older) -> Result<u64, DiskError> {
        self.append_from(origin, key, Codec::Raw, data.len() as u64, &[data], older).await
    }

    async fn append_from(
        &self,
        origin: Origin,
        key: &Key,
        codec: Codec,
        raw_len: u64,
        stored: &[&[u8]],
        older: Older,
    ) -> Result<u64, DiskError> {
        let (shard, tag) = self.locate(key)?;
        shard.wait_ready().await;
        let stored_len: usize = stored.iter().map(|piece| piece.len()).sum();
        if stored_len > SMALL_BLOB_LEN_MAX {
            let whole = stored.concat();
            let closing = Closing { codec, raw_len, pieces: true, origin, older };
            return self.append_pieces(&shard, tag, key, closing, &whole).await;
        }
        let header = Header {
            kind: RecordKind::Small,
            key: *key,
            codec,
            pieces: false,
            raw_len,
            origin,
            stored_len: stored_len as u32,
            payload_sum: match stored {
                [whole] => self.0.sums.payload(whole),
                pieces => self.0.sums.payload_of_pieces(pieces),
            },
        };
        let record = Record { header, tag, payload: stored, large: None };
        if record.word(1, 0).is_none() {
            return Err(DiskError::Io(format!("{stored_len} bytes at rest for a blob of {} bytes", key.size)));
        }
        let (mut version, mut old) = (0, None);
        let ticket = self
            .0
            .append_record(
                &shard,
                Urgency::Normal,
                &record,
                |state| state.makes_way(tag, key, older),
                |state, word, ticket| {
                    old = state.publish(tag, word, ticket);
                    version = state.version(self.0.layout, word);
                },
            )
            .await
            .map_err(|error| error.into_disk_error(stored_len as u64))?;
        drop(old);
        self.0.meters.stored(raw_len, stored_len as u64);
        self.0.acknowledge(&ticket).await?;
        Ok(version)
    }

    /// Starts a large blob. Nothing of it is visible before `commit`; dropping the writer gives the space back.
    pub async fn begin_large(&self, key: &Key) -> Result<LargeWriter, DiskError> {
        let (shard, tag) = self.locate(key)?;
        shard.wait_ready().await;
        if self.0.is_stopping() {
            return Err(DiskError::Stopping);
        }
        if key.size > self.max_blob_len() {
            return Err(DiskError::NoSpace { bytes: key.size });
        }
        Ok(LargeWriter::new(&self.0, &shard, *key, tag))
    }

    /// Drops `key`, if it is still `version` (any, when `None`). True when something was dropped. Once it returns, the key
    /// stays away also after a crash, as far as `--ack` promises.
    ///
    /// Limit: a record that was moved since it was read (by a reclaim, or as its write failed) counts as another version
    /// and stays. The next lookup names it anew.
    pub async fn remove(&self, key: &Key, version: Option<u64>) -> Result<bool, DiskError> {
        let (shard, tag) = self.locate(key)?;
        shard.wait_ready().await;
        let gone = shard.state.with(|state| {
            let word = state.index.get(tag).filter(|word| word.fits(key))?;
            let same = version.is_none_or(|version| version == state.version(self.0.layout, word));
            if same { state.forget(tag) } else { None }
        });
        let Some((_, held)) = gone else { return Ok(false) };
        match self.0.append_tomb(&shard, tag, TombOrder::Here, Urgency::Normal).await {
            Ok(ticket) => {
                held.iter().for_each(|held| held.release_after(&ticket));
                self.0.acknowledge(&ticket).await?;
            }
            // Gone for now; without a tomb a restart may bring it back, whole and checked as ever.
            Err(AppendError::NoSegment | AppendError::Refused) => {}
            Err(error @ (AppendError::WritesFail | AppendError::Stopping)) => return Err(error.into_disk_error(0)),
        }
        Ok(true)
    }

    /// Removes keys, whatever their size, for good: once it returns they stay away also after a power cut. Says for each
    /// whether there was something.
    pub async fn purge(&self, keys: &[Key]) -> Result<Vec<bool>, DiskError> {
        self.0.purge(keys).await
    }

    /// The next action results of this core that `which` covers, which may be none; `None` at the end.
    pub async fn next_actions(&self, cursor: &mut ActionCursor, which: &Which) -> Option<Vec<Key>> {
        self.0.next_actions(cursor, which).await
    }

    /// The caller found that the bytes of `key` make no sense (zstd refuses them): dropped and counted.
    pub fn damaged(&self, key: &Key) {
        let Some((shard, tag)) = self.0.locate(key) else { return };
        let word = shard.state.with(|state| state.index.get(tag).filter(|word| word.fits(key)));
        if let Some(word) = word {
            self.0.drop_damaged(&shard.clone(), tag, word.location());
        }
    }

    /// Adds what this core's disk has counted and holds.
    pub fn report(&self, into: &mut Snapshot) {
        self.0.meters.report(&self.stats(), into);
    }

    /// Bytes of memory for what is in the cache: the index, and the lists of large blobs.
    pub fn index_bytes(&self) -> u64 {
        let bytes = |state: &mut ShardState| {
            state.index.memory_bytes() as u64 + state.large.len() as u64 * limits::INDEX_LARGE_LEN
        };
        self.0.own_shards().map(|shard| shard.state.with(bytes)).sum()
    }

    pub fn stats(&self) -> DiskStats {
        let mut stats = self.0.counters();
        stats.index_bytes = self.index_bytes();
        for shard in self.0.own_shards() {
            shard.state.with(|state| {
                stats.entries += state.index.len() as u64;
                stats.large_blobs += state.large.len() as u64;
                let segments = state.generations.len() + state.chunks.segment_count();
                stats.leased_bytes += segments as u64 * u64::from(self.0.layout.segment_len);
            });
            stats.recovering_shards += u64::from(!shard.ready.get());
        }
        stats
    }

    /// `Volume::max_blob_len`.
    pub fn max_blob_len(&self) -> u64 {
        self.0.volume.max_blob_len()
    }

    /// `work` is done each time that space is so short that somebody is about to be refused. It does not wait.
    pub fn on_pressure(&self, work: Box<dyn Fn()>) {
        self.0.set_on_pressure(work);
    }

    /// From now on what waits for space gets `DiskError::Stopping`, and so does every new write.
    pub fn refuse_writes(&self) {
        self.0.stop();
    }

    /// Refuses new work, lets reclaims come to the end of a step, flushes, writes checkpoint footers and syncs.
    pub async fn shutdown(&self) {
        let core = &self.0;
        self.refuse_writes();
        core.reclaims.wait_empty().await;
        let ending = Gate::default();
        for shard in core.own_shards() {
            let (core, shard) = (core.clone(), shard.clone());
            ending.spawn(async move {
                shard.wait_ready().await;
                core.flush_shard(&shard);
                core.settle(&shard).await;
                core.append_ages(&shard).await;
                core.checkpoint(&shard).await;
                core.settle(&shard).await;
            });
        }
        ending.wait_empty().await;
        core.sync().await;
    }

    fn locate(&self, key: &Key) -> Result<(Rc<Shard>, u64), DiskError> {
        let (shard, tag) = self.0.locate(key).ok_or_else(|| DiskError::Io("the key belongs to another core".into()))?;
        Ok((shard.clone(), tag))
    }

    /// Stores a value that is too long for a record as a large blob of pieces, which `read` joins again.
    async fn append_pieces(
        &self,
        shard: &Rc<Shard>,
        tag: u64,
        key: &Key,
        closing: Closing,
        whole: &[u8],
    ) -> Result<u64, DiskError> {
        let mut writer = LargeWriter::new(&self.0, shard, *key, tag);
        for piece in whole.chunks(FRAME_LEN) {
            writer.push(Codec::Raw, piece).await?;
        }
        writer.close(closing).await
    }
}

/// How often a read follows a record that is moved under it.
const MOVES_MAX: usize = 8;

/// The value whose pieces are the frames of `blob`.
async fn join(blob: LargeBlob, header: &Header, version: u64) -> Result<Stored<LargeBlob>, DiskError> {
    let mut data = BytesMut::with_capacity(blob.stored_len() as usize);
    let mut at = 0;
    while at < blob.frame_count() {
        let frames = blob.read_frames(at, usize::MAX).await?;
        at += frames.list.len();
        data.extend_from_slice(&frames.bytes);
    }
    let Header { codec, raw_len, key, origin, .. } = *header;
    Ok(Stored::Small(blob_disk::Record { codec, raw_len, data: data.freeze(), version, key_size: key.size, origin }))
}

impl AppendError {
    pub(super) fn into_disk_error(self, bytes: u64) -> DiskError {
        match self {
            AppendError::NoSegment => DiskError::NoSpace { bytes },
            AppendError::Refused => DiskError::Superseded,
            AppendError::WritesFail => DiskError::Io("writes to the disk cache fail".into()),
            AppendError::Stopping => DiskError::Stopping,
        }
    }
}

impl Core {
    /// What `take` makes of the record that `word` points to, if what is there now is one. `len` bytes are enough to read.
    pub(super) async fn fetch<T>(
        &self,
        shard: &Rc<Shard>,
        word: Word,
        len: u64,
        take: impl FnOnce(Header, &[u8]) -> Option<T>,
    ) -> Option<T> {
        let position = word.location() * RECORD_ALIGN as u64;
        let (segment, offset) = self.layout.split(position);
        let len = len.clamp(HEADER_LEN as u64, u64::from(self.layout.segment_len - offset)) as usize;
        let generation = shard.state.with(|state| state.generations.get(&segment).copied())?;
        let place = Place { position, generation };
        loop {
            let buffered;
            let read: ReadBuf;
            let record = match shard.state.with(|state| state.log.whereabouts(self.layout, word.location(), len)) {
                Whereabouts::Flight(ticket) => {
                    ticket.wait().await;
                    continue;
                }
                Whereabouts::Buffer(bytes) => {
                    buffered = bytes;
                    &buffered[..]
                }
                Whereabouts::Disk => {
                    let skip = (position % DISK_ALIGN as u64) as usize;
                    read = self.read(position - skip as u64, (skip + len).next_multiple_of(DISK_ALIGN)).await?;
                    &read.bytes()[skip..]
                }
            };
            return Header::decode(record, &self.sums, place).and_then(|header| take(header, record));
        }
    }

    /// Drops the record of `tag`, if it still is at `location`, because its bytes are not what they should be.
    pub(super) fn drop_damaged(self: &Rc<Self>, shard: &Rc<Shard>, tag: u64, location: u64) {
        let gone = shard.state.with(|state| {
            let still = state.index.get(tag).is_some_and(|word| word.location() == location);
            if still { state.forget(tag) } else { None }
        });
        let Some((_, held)) = gone else { return };
        self.count(|stats| stats.damaged_records += 1);
        tracing::warn!(
            shard = shard.id.0,
            position = location * RECORD_ALIGN as u64,
            "a damaged record was dropped from the disk cache"
        );
        let (core, shard) = (self.clone(), shard.clone());
        self.spawn(async move {
            // Without a tomb the next start finds it again, and a read drops it again.
            if let Ok(ticket) = core.append_tomb(&shard, tag, TombOrder::Here, Urgency::Normal).await {
                held.iter().for_each(|held| held.release_after(&ticket));
            }
        });
    }

    /// Appends how long ago each entry was used. Why only at the end: the record counts as long as it is the log's last.
    async fn append_ages(self: &Rc<Self>, shard: &Rc<Shard>) {
        let now = self.epoch.get();
        let ages = shard.state.with(|state| {
            let entries = state.index.iter().map(|(tag, word)| (tag, word.used(now)));
            (!state.index.is_empty()).then(|| Ages::encode(&self.sums, entries, now))
        });
        let Some(ages) = ages else { return };
        let payload = ages.bytes();
        if log_len(payload.len()) > Log::record_len_max(self.layout) {
            return;
        }
        let header = Header {
            kind: RecordKind::Ages,
            key: Key { kind: Kind::Cas, hash: Hash([0; 32]), size: 0 },
            codec: Codec::Raw,
            pieces: false,
            raw_len: payload.len() as u64,
            origin: Origin::default(),
            stored_len: payload.len() as u32,
            payload_sum: self.sums.payload(payload),
        };
        let record = Record { header, tag: AGES_TAG, payload: &[payload], large: None };
        // Without room, or with writes that fail, the next start takes the age of each record for that of its use.
        let _ = self.append_record(shard, Urgency::Reclaim, &record, |_| true, |_, _, _| {}).await;
    }

    /// Appends a record that removes `tag`. It carries the tag in the place of the hash.
    pub(super) async fn append_tomb(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        tag: u64,
        order: TombOrder,
        urgency: Urgency,
    ) -> Result<Ticket, AppendError> {
        let record = Record { header: tomb_header(tag, order, &self.sums), tag, payload: &[], large: None };
        // Why the check: a tomb behind a newer record of the same key would remove that one at the next start.
        self.append_record(shard, urgency, &record, |state| state.index.get(tag).is_none(), |_, _, _| {}).await
    }
}

const _: () = assert!(VERSION_SHIFT + 40 == u64::BITS);

#[cfg(test)]
mod tests;
