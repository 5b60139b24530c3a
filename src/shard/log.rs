//! The appender of a shard's log: one open segment, filled through a write buffer that is flushed when full or a few
//! milliseconds old.
//!
//! Invariant: a block once written is not written again while the segment keeps its generation, but for the footer's.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use super::disk::Ack;
use super::engine::{Core, Shard, ShardState};
use crate::limits::DISK_ALIGN;
use crate::pure::eviction::{Lease, Outcome};
use crate::pure::index::Word;
use crate::pure::record::{HEADER_LEN, Header, Place, RECORD_ALIGN, RecordKind, TombOrder};
use crate::pure::segment::{Class, Footer, FooterEntry, HEAD_LEN, LargeEntry, Layout, SegmentHeader};
use crate::pure::shard_map::ShardId;
use crate::rt::file::DiskBuf;
use crate::rt::local::Event;

/// Bytes of a write buffer; a longer record gets a buffer of its own size.
const LOG_BUF_LEN: usize = 256 << 10;
/// Writes of one shard's log that may be under way.
const FLIGHTS_MAX: usize = 2;
const BLOCK: u32 = DISK_ALIGN as u32;
/// Above so many parts of the log that wait for a sync, neighbours are joined and wait for the later one. Why: while syncs fail
/// there is one for each write.
const UNSYNCED_PARTS_MAX: usize = 256;

/// Whether what was put into a buffer has reached the disk.
#[derive(Clone, Default)]
pub(super) struct Ticket(Rc<TicketState>);

#[derive(Default)]
struct TicketState {
    /// `Some(false)`: the write failed.
    written: Cell<Option<bool>>,
    event: Event,
}

/// A log segment being filled.
pub(super) struct OpenSegment {
    segment: u32,
    generation: u64,
    /// Offset behind the last record, or where the next buffer starts.
    tail: u32,
    footer: Footer,
    footer_len: usize,
    fill: Option<Fill>,
    /// A write into it failed: nothing more is appended.
    failed: bool,
    /// Entries that are in the footer on disk.
    checkpointed: usize,
    /// Leased for a reclaim: while that copies, nobody else appends.
    for_reclaim: bool,
}

struct Fill {
    buf: DiskBuf,
    /// Offset in the segment.
    start: u32,
    used: usize,
    ticket: Ticket,
}

struct Flight {
    segment: u32,
    start: u32,
    end: u32,
    ticket: Ticket,
    /// The write failed: its records are being appended again elsewhere.
    failed: bool,
}

/// A buffer to be written; its flight is already noted.
pub(super) struct Flush {
    segment: u32,
    generation: u64,
    fill: Fill,
}

/// A buffer whose write failed.
pub(super) struct Unwritten {
    pub(super) segment: u32,
    pub(super) generation: u64,
    pub(super) buf: DiskBuf,
    /// Where in the segment it was to stand, and where in it the records are.
    pub(super) start: u32,
    pub(super) records: Range<usize>,
}

/// A shard's log.
#[derive(Default)]
pub(super) struct Log {
    open: Option<OpenSegment>,
    leases: VecDeque<Lease>,
    /// Leased by reclaims, from the reserve.
    reserved: VecDeque<Lease>,
    /// Held by each reclaim that copies forward.
    copying: Rc<()>,
    asked: bool,
    /// How often the pool had no segment.
    refusals: u64,
    /// The generation of the segment that was opened last.
    opened: u64,
    flights: Vec<Flight>,
    /// Segments whose footer is still to be written.
    sealing: Vec<u32>,
    /// A footer of the open segment is being written.
    checkpointing: bool,
    /// Written, and not on stable storage yet as far as is known. Kept with `--ack durable` only.
    unsynced: Vec<Unsynced>,
}

/// A part of the log that a sync will make durable.
struct Unsynced {
    segment: u32,
    /// Offsets in the segment.
    part: Range<u32>,
    /// The number of that sync.
    sync: u64,
}

/// Where a record is to be found now.
pub(super) enum Whereabouts {
    /// In the write buffer: its bytes.
    Buffer(Vec<u8>),
    /// It is being written: wait, then look again.
    Flight(Ticket),
    Disk,
}

/// A record to append, its payload in pieces.
pub(super) struct Record<'a> {
    pub(super) header: Header,
    pub(super) tag: u64,
    pub(super) payload: &'a [&'a [u8]],
    /// Of a large commit: what the footer says of it.
    pub(super) large: Option<LargeEntry>,
}

/// Says that a reclaim copies forward.
pub(super) struct Copying {
    _counted: Rc<()>,
}

/// Whether an append may wait for a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Urgency {
    Normal,
    /// A reclaim: takes from the reserve, at once or never.
    Reclaim,
}

/// Why nothing was appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AppendError {
    NoSegment,
    /// The caller's check said no.
    Refused,
    /// The last writes have all failed.
    WritesFail,
    Stopping,
}

/// How one attempt to append ended.
enum Attempt {
    Placed(Ticket, Option<Flush>),
    Refused,
    /// The open segment is full.
    Seal(OpenSegment, Option<Flush>),
    NeedsLease,
    Flush(Option<Flush>),
    Busy,
}

impl Ticket {
    pub(super) fn is_ended(&self) -> bool {
        self.0.written.get().is_some()
    }

    pub(super) fn is_same(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// True when it was written.
    pub(super) async fn wait(&self) -> bool {
        loop {
            let changed = self.0.event.wait();
            if let Some(written) = self.0.written.get() {
                return written;
            }
            changed.await;
        }
    }

    pub(super) fn end(&self, written: bool) {
        self.0.written.set(Some(written));
        self.0.event.notify();
    }
}

impl Record<'_> {
    /// What index and footer say of the record at `location`, in a segment of this generation. `None` when its length is
    /// beyond what they can say.
    pub(super) fn word(&self, location: u64, generation: u64) -> Option<Word> {
        match self.header.kind {
            RecordKind::Small => Word::small(location, &self.header.key, self.header.record_len() as u64),
            RecordKind::Large => Some(Word::large(location, &self.header.key)),
            RecordKind::Tomb => Some(tomb_word(&self.header, location, generation)),
            RecordKind::Ages => Some(Word::tomb(location)),
        }
    }
}

/// What a footer says of a tomb in a segment of this generation.
pub(super) fn tomb_word(header: &Header, location: u64, generation: u64) -> Word {
    match TombOrder::of_number(header.raw_len) {
        TombOrder::Here => Word::tomb(location),
        TombOrder::LastingHere => Word::lasting_tomb(location, 0),
        TombOrder::LastingSince(since) => Word::lasting_tomb(location, generation.saturating_sub(since)),
    }
}

impl OpenSegment {
    /// A segment that is filled up to `tail`, a multiple of a block; 0 for one that has no header yet.
    ///
    /// `checkpointed` of its entries are in a footer on disk.
    pub(super) fn new(segment: u32, generation: u64, tail: u32, footer: Footer, checkpointed: usize) -> Self {
        let footer_len = footer.encoded_len();
        Self {
            segment,
            generation,
            tail,
            footer,
            footer_len,
            fill: None,
            failed: false,
            checkpointed,
            for_reclaim: false,
        }
    }

    /// Whether a record of `len` bytes, whose entry adds `entry_len` bytes to the footer, still fits.
    fn fits(&self, layout: Layout, len: usize, entry_len: usize) -> bool {
        let start = if self.fill.is_some() { self.tail } else { self.tail.next_multiple_of(BLOCK).max(HEAD_LEN) };
        let end = (start as usize + len).next_multiple_of(DISK_ALIGN);
        !self.failed && end + (self.footer_len + entry_len).next_multiple_of(DISK_ALIGN) <= layout.segment_len as usize
    }

    /// Takes the buffer to be written, and notes its flight.
    fn take_flush(&mut self, flights: &mut Vec<Flight>) -> Option<Flush> {
        let mut fill = self.fill.take()?;
        let end = fill.used.next_multiple_of(DISK_ALIGN);
        fill.buf.bytes_mut()[fill.used..end].fill(0);
        self.tail = fill.start + end as u32;
        let (segment, start, end, ticket) = (self.segment, fill.start, self.tail, fill.ticket.clone());
        flights.push(Flight { segment, start, end, ticket, failed: false });
        Some(Flush { segment, generation: self.generation, fill })
    }
}

impl Log {
    /// The most that a record may take, in bytes.
    pub(super) fn record_len_max(layout: Layout) -> usize {
        (layout.segment_len - HEAD_LEN) as usize * 7 / 8
    }

    /// Resumes the segment that was open before the restart.
    pub(super) fn resume(&mut self, open: OpenSegment) {
        assert!(self.open.is_none(), "a segment is open already");
        self.opened = open.generation;
        self.open = Some(open);
    }

    /// Where the record at `location` is; of `len` bytes at most when it is in the buffer.
    pub(super) fn whereabouts(&self, layout: Layout, location: u64, len: usize) -> Whereabouts {
        let (segment, offset) = layout.split(location * RECORD_ALIGN as u64);
        if let Some(open) = &self.open
            && open.segment == segment
            && let Some(fill) = &open.fill
            && offset >= fill.start
        {
            let from = (offset - fill.start) as usize;
            let to = fill.used.min(from.saturating_add(len));
            return Whereabouts::Buffer(fill.buf.bytes()[from.min(to)..to].to_vec());
        }
        self.flight(segment, offset).map_or(Whereabouts::Disk, |ticket| Whereabouts::Flight(ticket.clone()))
    }

    fn flight(&self, segment: u32, offset: u32) -> Option<&Ticket> {
        let mut flights = self.flights.iter();
        let flight =
            flights.find(|flight| flight.segment == segment && (flight.start..flight.end).contains(&offset))?;
        Some(&flight.ticket)
    }

    /// The ticket of the record at `location`, while it has not been written.
    pub(super) fn pending(&self, layout: Layout, location: u64) -> Option<Ticket> {
        let (segment, offset) = layout.split(location * RECORD_ALIGN as u64);
        let open = self.open.as_ref().filter(|open| open.segment == segment);
        let fill = open.and_then(|open| open.fill.as_ref()).filter(|fill| offset >= fill.start);
        fill.map(|fill| &fill.ticket).or_else(|| self.flight(segment, offset)).cloned()
    }

    /// The sync that makes the written record at `location` durable; 0 when that is over.
    pub(super) fn sync_of(&self, layout: Layout, location: u64) -> u64 {
        let (segment, offset) = layout.split(location * RECORD_ALIGN as u64);
        let parts = self.unsynced.iter().filter(|of| of.segment == segment && of.part.contains(&offset));
        parts.map(|of| of.sync).max().unwrap_or(0)
    }

    /// Notes that `part` of a segment has been written, and forgets what the sync `synced` has covered.
    fn note_unsynced(&mut self, segment: u32, part: Range<u32>, sync: u64, synced: u64) {
        self.unsynced.retain(|of| of.sync > synced);
        let is_long = self.unsynced.len() >= UNSYNCED_PARTS_MAX;
        match self.unsynced.last_mut() {
            Some(last) if last.segment == segment && last.part.end == part.start && (is_long || last.sync == sync) => {
                (last.part.end, last.sync) = (part.end, sync);
            }
            _ => self.unsynced.push(Unsynced { segment, part, sync }),
        }
    }

    /// True while the segment is not to be reclaimed: it is being filled or is about to be, or is being written to.
    pub(super) fn is_busy(&self, segment: u32) -> bool {
        self.open.as_ref().is_some_and(|open| open.segment == segment)
            || self.sealing.contains(&segment)
            || self.flights.iter().any(|flight| flight.segment == segment)
            || self.leases.iter().chain(&self.reserved).any(|lease| lease.segment == segment)
    }

    /// Until the guard is dropped, what reclaims lease is for them alone. Why: they empty a segment only if all of it fits,
    /// and others who wait for space would take that from them.
    pub(super) fn begin_copying(&self) -> Copying {
        Copying { _counted: self.copying.clone() }
    }

    /// The segment to be filled next, and whether it was leased for a reclaim.
    fn next_lease(&mut self, may_reserved: bool) -> Option<(Lease, bool)> {
        let reserved = if may_reserved { self.reserved.pop_front() } else { None };
        let for_reclaim = reserved.is_some();
        let mut lease = reserved.or_else(|| self.leases.pop_front())?;
        // Why: a start replays segments in the order of their generations, so they are filled in it.
        for later in self.leases.iter_mut().chain(&mut self.reserved) {
            if later.generation < lease.generation {
                std::mem::swap(&mut later.generation, &mut lease.generation);
            }
        }
        self.opened = lease.generation;
        Some((lease, for_reclaim))
    }

    /// Keeps a lease for later. False when one that was made after it is being filled already: it came too late.
    fn keep_lease(&mut self, lease: Lease, is_reserved: bool) -> bool {
        let is_late = lease.generation < self.opened;
        if !is_late {
            let queue = if is_reserved { &mut self.reserved } else { &mut self.leases };
            queue.push_back(lease);
        }
        !is_late
    }

    fn is_open(&self, segment: u32) -> bool {
        self.open.as_ref().is_some_and(|open| open.segment == segment)
    }

    /// The entries of the segment that is being filled, if it is this one.
    pub(super) fn open_entries(&self, segment: u32) -> Option<&[FooterEntry]> {
        self.open.as_ref().filter(|open| open.segment == segment).map(|open| &open.footer.entries[..])
    }

    fn is_copying(&self) -> bool {
        Rc::strong_count(&self.copying) > 1
    }

    fn take_flush(&mut self) -> Option<Flush> {
        self.open.as_mut()?.take_flush(&mut self.flights)
    }

    /// Nothing more is appended to the segment, and the flight that starts at `start` holds up no other.
    pub(super) fn note_failed(&mut self, segment: u32, start: u32) {
        if let Some(open) = self.open.as_mut().filter(|open| open.segment == segment) {
            open.failed = true;
        }
        let failed = self.flights.iter_mut().filter(|flight| flight.segment == segment && flight.start == start);
        failed.for_each(|flight| flight.failed = true);
    }

    /// Whether no further buffer may be filled for `segment` now. Its header goes first and alone: without it a restart
    /// would know nothing of the segment.
    fn holds_up(&self, segment: u32) -> bool {
        let flying = || self.flights.iter().filter(|flight| !flight.failed);
        flying().count() >= FLIGHTS_MAX || flying().any(|flight| flight.segment == segment && flight.start == 0)
    }
}

impl Core {
    /// Appends `record`. `check` is asked, and `publish` told what the index is to say, in one step with the copying into
    /// the buffer: nothing comes between. Cancelling it before it returns appends nothing.
    pub(super) async fn append_record(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        urgency: Urgency,
        record: &Record<'_>,
        check: impl Fn(&ShardState) -> bool,
        mut publish: impl FnMut(&mut ShardState, Word, &Ticket),
    ) -> Result<Ticket, AppendError> {
        let refusals = shard.state.with(|state| state.log.refusals);
        loop {
            if self.is_stopping() && urgency == Urgency::Normal {
                return Err(AppendError::Stopping);
            }
            if self.writes_fail() {
                return Err(AppendError::WritesFail);
            }
            let changed = shard.changed.wait();
            match shard.state.with(|state| self.try_append(shard.id, state, urgency, record, &check, &mut publish)) {
                Attempt::Placed(ticket, flush) => {
                    flush.into_iter().for_each(|flush| self.spawn_flush(shard, flush));
                    self.after_append(shard, record);
                    return Ok(ticket);
                }
                Attempt::Refused => return Err(AppendError::Refused),
                Attempt::Flush(flush) => flush.into_iter().for_each(|flush| self.spawn_flush(shard, flush)),
                Attempt::Seal(open, flush) => {
                    flush.into_iter().for_each(|flush| self.spawn_flush(shard, flush));
                    self.spawn_seal(shard, open);
                }
                Attempt::Busy => changed.await,
                Attempt::NeedsLease if urgency == Urgency::Reclaim => {
                    let lease = self.lease_for_reclaim(shard.id, Class::Log).await.ok_or(AppendError::NoSegment)?;
                    self.take_lease(shard, lease, true);
                }
                Attempt::NeedsLease => {
                    if shard.state.with(|state| state.log.refusals) != refusals {
                        return Err(AppendError::NoSegment);
                    }
                    self.ask_for_log(shard);
                    changed.await;
                }
            }
        }
    }

    fn try_append(
        &self,
        shard: ShardId,
        state: &mut ShardState,
        urgency: Urgency,
        record: &Record<'_>,
        check: &impl Fn(&ShardState) -> bool,
        publish: &mut impl FnMut(&mut ShardState, Word, &Ticket),
    ) -> Attempt {
        if !check(state) {
            return Attempt::Refused;
        }
        let layout = self.layout;
        let len = record.header.log_len();
        let entry_len = Footer::entry_len(record.large.as_ref().map(|large| large.runs.len()));
        let log = &mut state.log;
        let is_kept = log.is_copying() && log.open.as_ref().is_some_and(|open| open.for_reclaim);
        if is_kept && urgency == Urgency::Normal {
            return Attempt::Busy;
        }
        if let Some(mut full) = log.open.take_if(|open| !open.fits(layout, len, entry_len)) {
            log.sealing.push(full.segment);
            let flush = full.take_flush(&mut log.flights);
            return Attempt::Seal(full, flush);
        }
        if log.open.is_none() {
            let may_reserved = urgency == Urgency::Reclaim || !log.is_copying();
            let Some((lease, for_reclaim)) = log.next_lease(may_reserved) else { return Attempt::NeedsLease };
            state.generations.insert(lease.segment, lease.generation);
            let open = OpenSegment::new(lease.segment, lease.generation, 0, Footer::default(), 0);
            log.open = Some(OpenSegment { for_reclaim, ..open });
        }
        let held_up = log.open.as_ref().is_some_and(|open| open.fill.is_none() && log.holds_up(open.segment));
        if held_up {
            return Attempt::Busy;
        }
        let open = log.open.as_mut().expect("opened above");
        if open.fill.as_ref().is_some_and(|fill| fill.used + len > fill.buf.bytes().len()) {
            return Attempt::Flush(open.take_flush(&mut log.flights));
        }
        let mut fill = open.fill.take().unwrap_or_else(|| self.start_fill(shard, open, len));
        let offset = fill.start + fill.used as u32;
        let place = Place { position: layout.position(open.segment, offset), generation: open.generation };
        let word = record
            .word(place.position / RECORD_ALIGN as u64, place.generation)
            .expect("checked by whoever made the record");
        let space = &mut fill.buf.bytes_mut()[fill.used..fill.used + len];
        let mut at = HEADER_LEN;
        space[..at].copy_from_slice(&record.header.encode(&self.sums, place));
        for piece in record.payload {
            space[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
        space[at..].fill(0);
        fill.used += len;
        open.tail = fill.start + fill.used as u32;
        open.footer_len += entry_len;
        open.footer.entries.push(FooterEntry { tag: record.tag, word: word.bits() });
        open.footer.large.extend(record.large.clone());
        let ticket = fill.ticket.clone();
        let full = fill.used + 2 * RECORD_ALIGN > fill.buf.bytes().len();
        open.fill = Some(fill);
        let flush = if full { open.take_flush(&mut log.flights) } else { None };
        publish(state, word.used_in(self.epoch.get()), &ticket);
        Attempt::Placed(ticket, flush)
    }

    /// A buffer for the open segment with room for a record of `len` bytes; the segment's first starts with its header.
    fn start_fill(&self, shard: ShardId, open: &OpenSegment, len: usize) -> Fill {
        let start = open.tail.next_multiple_of(BLOCK);
        let used = if start == 0 { HEAD_LEN as usize } else { 0 };
        let mut buf = DiskBuf::new((used + len).next_multiple_of(DISK_ALIGN).max(LOG_BUF_LEN));
        if start == 0 {
            let (segment, generation) = (open.segment, open.generation);
            let header = SegmentHeader { segment, class: Class::Log, shard, generation };
            buf.bytes_mut()[..used].copy_from_slice(&header.encode(&self.sums, self.layout));
        }
        Fill { buf, start, used, ticket: Ticket::default() }
    }

    fn after_append(self: &Rc<Self>, shard: &Rc<Shard>, record: &Record<'_>) {
        self.count(|stats| {
            stats.appended_records += 1;
            stats.appended_bytes += record.header.log_len() as u64;
        });
        if !shard.unflushed.replace(true) {
            self.unflushed.borrow_mut().push(shard.id);
            self.wake_flusher.notify();
        }
        let nearly_full = |open: &OpenSegment| open.tail > self.layout.segment_len / 4 * 3;
        if shard.state.with(|state| state.log.leases.is_empty() && state.log.open.as_ref().is_some_and(nearly_full)) {
            self.ask_for_log(shard);
        }
    }

    /// Asks the pool for the next log segment in the background, once at a time.
    fn ask_for_log(self: &Rc<Self>, shard: &Rc<Shard>) {
        if shard.state.with(|state| std::mem::replace(&mut state.log.asked, true)) {
            return;
        }
        let (core, shard) = (self.clone(), shard.clone());
        self.spawn(async move {
            let lease = core.lease(shard.id, Class::Log).await;
            shard.state.with(|state| {
                state.log.asked = false;
                state.log.refusals += u64::from(lease.is_none());
            });
            lease.into_iter().for_each(|lease| core.take_lease(&shard, lease, false));
            shard.changed.notify();
        });
    }

    /// Keeps a lease for later. One that came too late goes back.
    fn take_lease(self: &Rc<Self>, shard: &Rc<Shard>, lease: Lease, is_reserved: bool) {
        if !shard.state.with(|state| state.log.keep_lease(lease, is_reserved)) {
            self.return_segment(lease.segment, Outcome::Freed);
        }
    }

    /// Waits until nothing of the segment is on its way to the disk. False when it is still being filled.
    pub(super) async fn wait_sealed(&self, shard: &Rc<Shard>, segment: u32) -> bool {
        self.wait_for_log(shard, |log| log.is_open(segment) || !log.is_busy(segment)).await;
        shard.state.with(|state| !state.log.is_open(segment))
    }

    fn spawn_flush(self: &Rc<Self>, shard: &Rc<Shard>, flush: Flush) {
        let (core, shard) = (self.clone(), shard.clone());
        self.spawn(async move { core.flush(&shard, flush).await });
    }

    async fn flush(self: &Rc<Self>, shard: &Rc<Shard>, flush: Flush) {
        let Flush { segment, generation, fill: Fill { buf, start, used, ticket } } = flush;
        let is_bad = shard.state.with(|state| state.bad.contains(&segment));
        let written = if is_bad {
            Err(buf)
        } else {
            self.count(|stats| stats.flushes += 1);
            self.write(self.layout.position(segment, start), buf, used.next_multiple_of(DISK_ALIGN)).await
        };
        let kept = match written {
            Ok(()) => {
                if self.ack == Ack::Durable {
                    let (part, sync) = (start..start + used as u32, self.next_sync());
                    shard.state.with(|state| state.log.note_unsynced(segment, part, sync, self.synced()));
                }
                true
            }
            Err(buf) => {
                let records = if start == 0 { HEAD_LEN as usize..used } else { 0..used };
                self.rescue(shard, Unwritten { segment, generation, buf, start, records }).await
            }
        };
        shard.state.with(|state| {
            state.log.flights.retain(|flight| !(flight.segment == segment && flight.start == start));
        });
        ticket.end(kept);
        shard.changed.notify();
    }

    /// Writes what is in the shard's buffer, now, in the background.
    pub(super) fn flush_shard(self: &Rc<Self>, shard: &Rc<Shard>) {
        shard.unflushed.set(false);
        let flush = shard.state.with(|state| state.log.take_flush());
        flush.into_iter().for_each(|flush| self.spawn_flush(shard, flush));
    }

    pub(super) fn spawn_seal(self: &Rc<Self>, shard: &Rc<Shard>, open: OpenSegment) {
        let (core, shard) = (self.clone(), shard.clone());
        self.spawn(async move { core.seal(&shard, open).await });
    }

    /// Writes the footer of a segment that takes no more records and is in `sealing`.
    async fn seal(self: &Rc<Self>, shard: &Rc<Shard>, open: OpenSegment) {
        self.wait_for_log(shard, |log| {
            !log.checkpointing && log.flights.iter().all(|flight| flight.segment != open.segment)
        })
        .await;
        if !shard.state.with(|state| state.bad.contains(&open.segment)) {
            self.write_footer(&open.footer, open.segment, open.generation, open.tail, true).await;
        }
        shard.state.with(|state| state.log.sealing.retain(|segment| *segment != open.segment));
        shard.changed.notify();
    }

    /// Marks a segment found without a footer as one that gets it now.
    pub(super) fn seal_found(self: &Rc<Self>, shard: &Rc<Shard>, open: OpenSegment) {
        shard.state.with(|state| state.log.sealing.push(open.segment));
        self.spawn_seal(shard, open);
    }

    /// Flushes the log and writes a footer for what the open segment has so far, so that the next start need not scan it.
    pub(super) async fn checkpoint(self: &Rc<Self>, shard: &Rc<Shard>) {
        self.flush_shard(shard);
        let snapshot = shard.state.with(|state| {
            let log = &mut state.log;
            let open =
                log.open.as_mut().filter(|open| open.footer.entries.len() > open.checkpointed && !open.failed)?;
            if std::mem::replace(&mut log.checkpointing, true) {
                return None;
            }
            open.checkpointed = open.footer.entries.len();
            Some((open.segment, open.generation, open.tail, open.footer.clone()))
        });
        let Some((segment, generation, upto, footer)) = snapshot else { return };
        self.wait_for_log(shard, |log| {
            log.flights.iter().all(|flight| flight.segment != segment || flight.start >= upto)
        })
        .await;
        if !shard.state.with(|state| state.bad.contains(&segment)) {
            self.write_footer(&footer, segment, generation, upto, false).await;
        }
        shard.state.with(|state| state.log.checkpointing = false);
        shard.changed.notify();
    }

    /// Waits until nothing of the shard's log is being written.
    pub(super) async fn settle(self: &Rc<Self>, shard: &Rc<Shard>) {
        self.wait_for_log(shard, |log| log.flights.is_empty() && log.sealing.is_empty() && !log.checkpointing).await;
    }

    async fn wait_for_log(&self, shard: &Rc<Shard>, condition: impl Fn(&Log) -> bool) {
        loop {
            let changed = shard.changed.wait();
            if shard.state.with(|state| condition(&state.log)) {
                return;
            }
            changed.await;
        }
    }

    async fn write_footer(self: &Rc<Self>, footer: &Footer, segment: u32, generation: u64, upto: u32, sealed: bool) {
        let bytes = footer.encode(&self.sums, self.layout, segment, generation, upto, sealed);
        let len = bytes.len().next_multiple_of(DISK_ALIGN);
        let mut buf = DiskBuf::new(len);
        buf.bytes_mut()[..len - bytes.len()].fill(0);
        buf.bytes_mut()[len - bytes.len()..].copy_from_slice(&bytes);
        // A footer that fails to be written costs a scan at the next start.
        let _ = self.write(self.layout.position(segment, self.layout.segment_len - len as u32), buf, len).await;
    }
}

#[cfg(test)]
mod tests;
