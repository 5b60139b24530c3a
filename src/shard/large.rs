//! Large blobs: written frame by frame into chunks, published by a commit record, read frame by frame.

use std::rc::Rc;

use bytes::{Bytes, BytesMut};

use super::blob_disk::Older;
use super::disk::{DiskError, Key};
use super::engine::{Core, Held, LargeRef, Leased, Shard, VERSION_SHIFT};
use super::log::{Log, Record, Ticket, Urgency};
use crate::limits::{
    CHUNK_LEN, CHUNKS_AHEAD, DISK_ALIGN, FRAME_LEN, LARGE_READ_LEN_MAX, STAGE_CHUNKS, STAGE_CHUNKS_MIN,
};
use crate::pure::eviction::Outcome;
use crate::pure::purge::{InstanceTag, Origin};
use crate::pure::record::{Codec, Commit, Frame, Header, RECORD_ALIGN, RecordKind, Run, commit_len, log_len};
use crate::pure::segment::{Class, HEAD_LEN, LargeEntry, SegmentHeader};
use crate::rt::file::DiskBuf;
use crate::rt::time::unix_seconds;

/// A large blob being written: frame by frame, each of `FRAME_LEN` raw bytes but the last. Dropping it before `commit`
/// gives its space back.
pub struct LargeWriter {
    core: Rc<Core>,
    shard: Rc<Shard>,
    key: Key,
    tag: u64,
    commit: Commit,
    stage: Option<Stage>,
    flight: Option<Flight>,
}

/// A write that is under way, or whose end nobody has looked at yet.
struct Flight {
    end: Ticket,
    /// The chunks of its buffer that the upload is counted with.
    own: u32,
}

/// A buffer being filled for neighbouring chunks.
struct Stage {
    run: Run,
    buf: DiskBuf,
    used: usize,
    extra: Extra,
}

/// What a buffer has beyond what its upload is counted with, of what the core has for that. Dropping it gives it back.
struct Extra {
    core: Rc<Core>,
    chunks: u32,
}

impl Extra {
    /// As much of `chunks` as there is.
    fn take(core: &Rc<Core>, chunks: u32) -> Self {
        let mut extra = Self { core: core.clone(), chunks: 0 };
        let room = u32::try_from(core.stage_room.get() / CHUNK_LEN).unwrap_or(u32::MAX);
        extra.set(chunks.min(room));
        extra
    }

    fn set(&mut self, chunks: u32) {
        let room = &self.core.stage_room;
        room.set(room.get() + self.chunks as usize * CHUNK_LEN - chunks as usize * CHUNK_LEN);
        self.chunks = chunks;
    }
}

impl Drop for Extra {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// What a commit says beside its frames.
pub(super) struct Closing {
    pub(super) codec: Codec,
    pub(super) raw_len: u64,
    pub(super) pieces: bool,
    pub(super) origin: Origin,
    pub(super) older: Older,
}

impl LargeWriter {
    pub(super) fn new(core: &Rc<Core>, shard: &Rc<Shard>, key: Key, tag: u64) -> Self {
        core.writers.set(core.writers.get() + 1);
        core.meters.reserved.set(core.meters.reserved.get() + key.size);
        let (core, shard) = (core.clone(), shard.clone());
        Self { core, shard, key, tag, commit: Commit::default(), stage: None, flight: None }
    }

    /// Adds the next frame as it is to stand at rest. Waits for the disk when that is behind.
    pub async fn push(&mut self, codec: Codec, stored: &[u8]) -> Result<(), DiskError> {
        let too_long = |_| DiskError::Io(format!("a frame of {} bytes", stored.len()));
        let stored_len = u32::try_from(stored.len()).map_err(too_long)?;
        let mut rest = stored;
        while !rest.is_empty() {
            let stage = match &mut self.stage {
                Some(stage) => stage,
                None => {
                    let stage = self.start_stage().await?;
                    self.stage.insert(stage)
                }
            };
            let (now, later) = rest.split_at(rest.len().min(stage.buf.bytes().len() - stage.used));
            stage.buf.bytes_mut()[stage.used..stage.used + now.len()].copy_from_slice(now);
            stage.used += now.len();
            rest = later;
            if stage.used == stage.buf.bytes().len() {
                self.write_stage().await?;
            }
        }
        self.commit.frames.push(Frame { codec, stored_len, sum: self.core.sums.payload(stored) });
        Ok(())
    }

    /// Chunks of memory that the upload is counted with and that are staged or on their way to the drive.
    #[cfg(test)]
    pub(super) fn own_chunks(&self) -> u32 {
        let staged = self.stage.as_ref().map_or(0, |stage| stage.run.count - stage.extra.chunks);
        staged + self.own_in_flight()
    }

    /// Bytes of memory that are staged for the drive.
    pub fn staged_len(&self) -> usize {
        self.stage.as_ref().map_or(0, |stage| stage.buf.bytes().len())
    }

    /// All frames are there and the content has been verified: publishes the blob. Returns its version.
    pub async fn commit(self) -> Result<u64, DiskError> {
        let frames = self.key.size.div_ceil(FRAME_LEN as u64);
        if self.commit.frames.len() as u64 != frames {
            let got = self.commit.frames.len();
            return Err(DiskError::Io(format!("a blob of {} bytes has {frames} frames, not {got}", self.key.size)));
        }
        let raw_len = self.key.size;
        let origin = Origin::new(unix_seconds(), InstanceTag::UNKNOWN);
        self.close(Closing { codec: Codec::Raw, raw_len, pieces: false, origin, older: Older::Replaced }).await
    }

    pub(super) async fn close(mut self, closing: Closing) -> Result<u64, DiskError> {
        if self.stage.is_some() {
            self.write_stage().await?;
        }
        self.wait_flight().await?;
        let payload = self.commit.encode();
        let no_space = DiskError::NoSpace { bytes: self.key.size };
        if self.commit.runs.is_empty() || log_len(payload.len()) > Log::record_len_max(self.core.layout) {
            return Err(no_space);
        }
        let header = Header {
            kind: RecordKind::Large,
            key: self.key,
            codec: closing.codec,
            pieces: closing.pieces,
            raw_len: closing.raw_len,
            origin: closing.origin,
            stored_len: payload.len() as u32,
            payload_sum: self.core.sums.payload(&payload),
        };
        let record_len = header.record_len() as u32;
        let large = LargeEntry { record_len, runs: self.commit.runs.clone() };
        let record = Record { header, tag: self.tag, payload: &[&payload], large: Some(large) };
        let runs = std::mem::take(&mut self.commit.runs);
        let held = Held::new(&self.core, self.shard.id, runs);
        let (key, tag, first) = (self.key, self.tag, held.runs[0].first);
        let mut version = 0;
        let (core, mut old) = (self.core.clone(), None);
        let ticket = core
            .append_record(
                &self.shard,
                Urgency::Normal,
                &record,
                |state| state.makes_way(tag, &key, closing.older),
                |state, word, ticket| {
                    old = state.publish(tag, word, ticket);
                    state.large.insert(tag, LargeRef { held: held.clone(), record_len });
                    state.chunks.add_home(first, tag);
                    version = state.version(core.layout, word);
                },
            )
            .await
            .map_err(|error| error.into_disk_error(self.key.size))?;
        drop(old);
        core.meters.stored(closing.raw_len, self.commit.stored_len());
        core.acknowledge(&ticket).await?;
        Ok(version)
    }

    async fn start_stage(&mut self) -> Result<Stage, DiskError> {
        let writers = self.core.writers.get();
        let few = STAGE_CHUNKS.iter().find(|(most, _)| writers <= *most).map(|(_, chunks)| *chunks);
        // A second buffer beside the one that is on its way is worth its memory to few writers: many overlap with each other.
        if few.is_none() || self.core.stage_room.get() < STAGE_CHUNKS_MIN as usize * CHUNK_LEN {
            self.wait_flight().await?;
        }
        let own = STAGE_CHUNKS_MIN - self.own_in_flight();
        // A blob's raw size bounds what it takes at rest, but for a few bytes.
        let left = self.key.size.saturating_sub(self.commit.stored_len()).div_ceil(CHUNK_LEN as u64);
        let want = few.unwrap_or(STAGE_CHUNKS_MIN).min(u32::try_from(left).unwrap_or(u32::MAX)).max(1);
        let mut extra = Extra::take(&self.core, want.saturating_sub(own));
        let want = want.min(own + extra.chunks);
        let next = self.commit.runs.last().map(|run| run.first + run.count);
        let run = self.core.take_chunks(&self.shard, want, next, left, self.key.size).await?;
        extra.set(run.count.saturating_sub(own));
        Ok(Stage { run, buf: DiskBuf::new(run.count as usize * CHUNK_LEN), used: 0, extra })
    }

    /// Chunks of the write under way that the upload is counted with.
    fn own_in_flight(&self) -> u32 {
        self.flight.as_ref().filter(|flight| !flight.end.is_ended()).map_or(0, |flight| flight.own)
    }

    /// Sends the staging buffer off, once the write before it has ended.
    async fn write_stage(&mut self) -> Result<(), DiskError> {
        self.wait_flight().await?;
        let Some(Stage { mut run, mut buf, used, extra }) = self.stage.take() else { return Ok(()) };
        let len = used.next_multiple_of(DISK_ALIGN);
        buf.bytes_mut()[used..len].fill(0);
        let count = used.div_ceil(CHUNK_LEN) as u32;
        if count < run.count {
            self.core.discard(self.shard.id, vec![Run { first: run.first + count, count: run.count - count }]);
            run.count = count;
        }
        let layout = self.core.layout;
        match self.commit.runs.last_mut() {
            Some(last)
                if last.first + last.count == run.first
                    && layout.segment_of_chunk(last.first) == layout.segment_of_chunk(run.first) =>
            {
                last.count += run.count;
            }
            _ => self.commit.runs.push(run),
        }
        let own = (buf.bytes().len() / CHUNK_LEN) as u32 - extra.chunks;
        let end = Ticket::default();
        self.flight = Some(Flight { end: end.clone(), own });
        let (core, shard) = (self.core.clone(), self.shard.clone());
        // Why not inside the gate: a region is reused only after its write has ended, also when the core is stopping.
        crate::rt::spawn(async move {
            let written = core.write(layout.chunk_position(run.first), buf, len).await.is_ok();
            drop(extra);
            if !written {
                let segment = layout.segment_of_chunk(run.first);
                shard.state.with(|state| {
                    state.bad.insert(segment);
                    state.chunks.close(segment, true);
                });
            }
            end.end(written);
        });
        Ok(())
    }

    async fn wait_flight(&mut self) -> Result<(), DiskError> {
        let Some(flight) = &self.flight else { return Ok(()) };
        let written = flight.end.wait().await;
        self.flight = None;
        if written { Ok(()) } else { Err(DiskError::Io("a write to the disk cache failed".into())) }
    }
}

impl Drop for LargeWriter {
    fn drop(&mut self) {
        self.core.writers.set(self.core.writers.get() - 1);
        self.core.meters.reserved.set(self.core.meters.reserved.get() - self.key.size);
        let mut runs = std::mem::take(&mut self.commit.runs);
        runs.extend(self.stage.take().map(|stage| stage.run));
        let (core, shard) = (self.core.clone(), self.shard.id);
        match self.flight.take().filter(|flight| !flight.end.is_ended()) {
            Some(flight) if !runs.is_empty() => crate::rt::spawn(async move {
                flight.end.wait().await;
                core.discard(shard, runs);
            }),
            _ => core.discard(shard, runs),
        }
    }
}

/// Counts an allocation that waits for chunks.
struct Waiting<'a>(&'a Shard);

impl<'a> Waiting<'a> {
    fn new(shard: &'a Shard) -> Self {
        shard.chunk_waiters.set(shard.chunk_waiters.get() + 1);
        Self(shard)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.chunk_waiters.set(self.0.chunk_waiters.get() - 1);
    }
}

impl Core {
    /// Takes up to `want` neighbouring chunks for a blob of `bytes` that will need `left` in all; waits for a segment when the
    /// shard has none.
    async fn take_chunks(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        want: u32,
        next: Option<u32>,
        left: u64,
        bytes: u64,
    ) -> Result<Run, DiskError> {
        let mut waiting = None;
        loop {
            if self.is_stopping() {
                return Err(DiskError::Stopping);
            }
            if self.writes_fail() {
                return Err(DiskError::Io("writes to the disk cache fail".into()));
            }
            let changed = shard.changed.wait();
            let taken = shard.state.with(|state| state.chunks.take(want, next).map(|run| (run, state.chunks.free())));
            if let Some((run, free)) = taken {
                if waiting.take().is_some() {
                    // The request for a segment may not be needed any more.
                    shard.changed.notify();
                }
                if free < CHUNKS_AHEAD && u64::from(free + run.count) < left {
                    self.ask_for_chunks(shard);
                }
                return Ok(run);
            }
            // A refusal is for one waiter: its space may be enough for the others.
            if waiting.is_some() && shard.chunks_refused.replace(false) {
                return Err(DiskError::NoSpace { bytes });
            }
            waiting.get_or_insert_with(|| Waiting::new(shard));
            self.ask_for_chunks(shard);
            changed.await;
        }
    }

    /// Asks the pool for the next chunk segment in the background, once at a time.
    fn ask_for_chunks(self: &Rc<Self>, shard: &Rc<Shard>) {
        if shard.chunks_asked.replace(true) {
            return;
        }
        let (core, shard) = (self.clone(), shard.clone());
        self.spawn(async move {
            // Why: when a reclaim makes room in segments that the shard has, it goes on until nobody waits any more.
            let free = || shard.state.with(|state| state.chunks.free());
            let wanted = free() + (core.layout.chunks_per_segment() / 4).max(1);
            let enough = || shard.chunk_waiters.get() == 0 && free() >= wanted;
            match core.lease_unless(&shard, Class::Chunks, enough).await {
                Leased::Enough => {}
                Leased::Lease(lease) => {
                    let (segment, generation) = (lease.segment, lease.generation);
                    let header = SegmentHeader { segment, class: Class::Chunks, shard: shard.id, generation };
                    let mut buf = DiskBuf::new(HEAD_LEN as usize);
                    buf.bytes_mut().copy_from_slice(&header.encode(&core.sums, core.layout));
                    // Before the first commit that names its chunks.
                    if core.write(core.layout.position(segment, 0), buf, HEAD_LEN as usize).await.is_ok() {
                        shard.state.with(|state| state.chunks.add(segment));
                    } else {
                        core.return_segment(segment, Outcome::Retired);
                    }
                }
                Leased::Refused => shard.chunks_refused.set(shard.chunk_waiters.get() > 0),
            }
            shard.chunks_asked.set(false);
            shard.changed.notify();
        });
    }
}

/// A frame of a large blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameInfo {
    pub codec: Codec,
    /// Bytes of content: `FRAME_LEN`, but for the last.
    pub raw_len: usize,
    /// Bytes at rest.
    pub stored_len: usize,
}

/// Neighbouring frames of a large blob as they stand at rest.
#[derive(Debug, Clone, Default)]
pub struct Frames {
    /// All of them, one behind the other.
    pub bytes: Bytes,
    /// What each is, and how many bytes it has.
    pub list: Vec<(Codec, usize)>,
}

impl Frames {
    /// One by one.
    pub fn split(self) -> impl ExactSizeIterator<Item = (Codec, Bytes)> {
        let mut bytes = self.bytes;
        self.list.into_iter().map(move |(codec, len)| (codec, bytes.split_to(len)))
    }
}

/// A large blob open for reading; its chunks are not reused while this lives.
pub struct LargeBlob {
    core: Rc<Core>,
    shard: Rc<Shard>,
    key: Key,
    tag: u64,
    version: u64,
    held: Rc<Held>,
    frames: Vec<Frame>,
    /// Where each frame starts in the stored stream, and where that ends.
    frame_starts: Vec<u64>,
    /// Where each run starts in the stored stream.
    run_starts: Vec<u64>,
}

impl LargeBlob {
    /// `None` when the commit does not describe what the shard holds.
    pub(super) fn new(
        core: &Rc<Core>,
        shard: &Rc<Shard>,
        key: Key,
        tag: u64,
        version: u64,
        held: Rc<Held>,
        commit: Commit,
    ) -> Option<Self> {
        let (core, shard) = (core.clone(), shard.clone());
        let (run_starts, end) = starts(held.runs.iter().map(|run| u64::from(run.count) * CHUNK_LEN as u64));
        let (mut frame_starts, stored_len) = starts(commit.frames.iter().map(|frame| u64::from(frame.stored_len)));
        frame_starts.push(stored_len);
        let fits = commit.runs == held.runs && stored_len <= end;
        fits.then_some(Self { core, shard, key, tag, version, held, frames: commit.frames, frame_starts, run_starts })
    }

    /// Bytes of content.
    pub fn size(&self) -> u64 {
        self.key.size
    }

    /// Names this version, for `Disk::remove`.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Bytes at rest.
    pub fn stored_len(&self) -> u64 {
        self.frame_starts[self.frames.len()]
    }

    pub fn frame_count(&self) -> usize {
        self.frames.len()
    }

    /// `index` is below `frame_count`.
    pub fn frame(&self, index: usize) -> FrameInfo {
        let frame = self.frames[index];
        let start = index as u64 * FRAME_LEN as u64;
        let raw_len = self.key.size.saturating_sub(start).min(FRAME_LEN as u64) as usize;
        FrameInfo { codec: frame.codec, raw_len, stored_len: frame.stored_len as usize }
    }

    /// Reads and checks frames from `first` on with one disk read, where they stand together: at least one and at most `max`,
    /// and of those as many as stand in 1 MiB at rest. None when `first` is not below `frame_count`.
    pub async fn read_frames(&self, first: usize, max: usize) -> Result<Frames, DiskError> {
        let most = self.frames.len().min(first.saturating_add(max));
        if first >= most {
            return Ok(Frames::default());
        }
        let start = self.frame_starts[first];
        let runs = self.run_starts.partition_point(|&run_start| run_start <= start);
        let together = self.run_starts.get(runs).copied().unwrap_or(u64::MAX);
        let mut last = first + 1;
        while last < most
            && self.frame_starts[last + 1] - start <= LARGE_READ_LEN_MAX
            && self.frame_starts[last + 1] <= together
        {
            last += 1;
        }
        let Some(bytes) = self.read_stored(start, self.frame_starts[last]).await else {
            return Err(self.damaged());
        };
        let frames = Frames {
            bytes,
            list: self.frames[first..last].iter().map(|frame| (frame.codec, frame.stored_len as usize)).collect(),
        };
        let mut rest = &frames.bytes[..];
        for frame in &self.frames[first..last] {
            let stored = rest.split_off(..frame.stored_len as usize);
            if stored.is_none_or(|stored| self.core.sums.payload(stored) != frame.sum) {
                return Err(self.damaged());
            }
        }
        Ok(frames)
    }

    /// Bytes `start..end` of the stored stream; copied only where they stand in more than one place.
    async fn read_stored(&self, start: u64, end: u64) -> Option<Bytes> {
        let mut joined = BytesMut::new();
        let mut run = self.run_starts.partition_point(|&run_start| run_start <= start).checked_sub(1)?;
        let mut at = start;
        while at < end {
            let Run { first, count } = *self.held.runs.get(run)?;
            let run_end = self.run_starts[run] + u64::from(count) * CHUNK_LEN as u64;
            let position = self.core.layout.chunk_position(first) + (at - self.run_starts[run]);
            let len = (end.min(run_end) - at) as usize;
            let skip = (position % DISK_ALIGN as u64) as usize;
            let read = self.core.read(position - skip as u64, (skip + len).next_multiple_of(DISK_ALIGN)).await?;
            let part = read.share(skip..skip + len);
            if len as u64 == end - start {
                return Some(part);
            }
            joined.reserve((end - at) as usize);
            joined.extend_from_slice(&part);
            at += len as u64;
            run += 1;
        }
        Some(joined.freeze())
    }

    fn damaged(&self) -> DiskError {
        self.core.drop_damaged(&self.shard, self.tag, self.version >> VERSION_SHIFT);
        DiskError::Damaged
    }
}

/// Where things of these lengths start when they stand one behind the other, and where the last one ends.
fn starts(lengths: impl Iterator<Item = u64>) -> (Vec<u64>, u64) {
    let mut end = 0;
    let mut starts = Vec::new();
    for len in lengths {
        starts.push(end);
        end += len;
    }
    (starts, end)
}

const _: () = assert!(CHUNK_LEN.is_multiple_of(DISK_ALIGN) && DISK_ALIGN.is_multiple_of(RECORD_ALIGN));
const _: () = assert!(commit_len(0, 0) == 8);
