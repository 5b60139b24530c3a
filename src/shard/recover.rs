//! From what stands on disk to a shard's state: footers of the log segments in the order of their leases, scans of what no
//! footer covers, and the chunks that the last commits claim.

use std::collections::HashMap;
use std::rc::Rc;

use super::engine::{Core, Held, LargeRef, Shard};
use super::log::{OpenSegment, tomb_word};
use crate::limits::DISK_ALIGN;
use crate::pure::digest::Hash;
use crate::pure::eviction::Outcome;
use crate::pure::index::{Index, Word, tag};
use crate::pure::purge::Origin;
use crate::pure::recency::{Ages, Epoch};
use crate::pure::record::{
    Checksums, Codec, Commit, HEADER_LEN, Header, Key, Kind, Place, RECORD_ALIGN, RecordKind, TombOrder, may_start,
};
use crate::pure::segment::{
    Class, Footer, FooterEntry, HEAD_LEN, LargeEntry, Layout, SegmentHeader, TRAILER_LEN, Trailer,
};
use crate::pure::shard_map::ShardId;
use crate::rt::file::ReadBuf;
use crate::rt::time::yield_once;

/// Shards of one core that are recovered at a time.
const SHARDS_AT_A_TIME: usize = 4;
/// Bytes at the end of a segment that are read in one go: most footers are shorter.
const FOOTER_READ_LEN: u32 = 64 << 10;
/// Bytes of a scan's window.
const WINDOW_LEN: usize = 1 << 20;
/// A scan of an open segment ends after so many bytes without a record. More than all that can be in flight to one segment.
pub const SCAN_GAP: u32 = 4 << 20;
/// Steps of a scan between two yields.
const STEPS_PER_YIELD: u32 = 4096;

/// The list of a log segment's records, from its footer, a scan, or both.
pub struct Listed {
    pub footer: Footer,
    /// Offset behind the last record.
    pub tail: u32,
    pub sealed: bool,
    /// Entries that a valid footer on disk has.
    pub on_disk: usize,
}

/// Whole blocks of one segment, wherever they come from.
#[allow(async_fn_in_trait)] // Why: futures stay on their core; nobody asks for Send.
pub trait Blocks {
    /// `None` when they cannot be read.
    async fn read(&self, position: u64, len: usize) -> Option<ReadBuf>;
}

impl Blocks for Core {
    async fn read(&self, position: u64, len: usize) -> Option<ReadBuf> {
        Core::read(self, position, len).await
    }
}

/// Lists what stands in log segments.
#[derive(Clone, Copy)]
pub struct LogReader<'a, B> {
    pub blocks: &'a B,
    pub layout: Layout,
    pub sums: Checksums,
}

impl Core {
    /// Recovers this core's shards in the background. `leased_in` says in which epoch each segment was leased.
    pub(super) fn start_recovery(self: &Rc<Self>, leased_in: HashMap<u32, Epoch>) {
        let leased_in = Rc::new(leased_in);
        let mut segments: HashMap<ShardId, Vec<SegmentHeader>> = HashMap::new();
        for header in self.volume.headers().iter().flatten() {
            segments.entry(header.shard).or_default().push(*header);
        }
        let mut shards: Vec<_> = self.own_shards().cloned().collect();
        let queue: Vec<Vec<_>> = (0..SHARDS_AT_A_TIME)
            .map(|lane| shards.iter().skip(lane).step_by(SHARDS_AT_A_TIME).cloned().collect())
            .collect();
        shards.clear();
        for lane in queue {
            let work: Vec<_> =
                lane.into_iter().map(|shard| (segments.remove(&shard.id).unwrap_or_default(), shard)).collect();
            let (core, leased_in) = (Rc::downgrade(self), leased_in.clone());
            crate::rt::spawn(async move {
                for (segments, shard) in work {
                    let Some(core) = core.upgrade() else { return };
                    core.recover(&shard, segments, &leased_in).await;
                    shard.ready.set(true);
                    shard.recovered.notify();
                }
            });
        }
    }

    async fn recover(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        mut segments: Vec<SegmentHeader>,
        leased_in: &HashMap<u32, Epoch>,
    ) {
        segments.sort_unstable_by_key(|header| header.generation);
        let newest = segments.iter().rev().find(|header| header.class == Class::Log).map(|header| header.segment);
        let mut large: HashMap<u64, (usize, LargeEntry)> = HashMap::new();
        let mut commits = 0;
        let mut unsealed = Vec::new();
        let mut ages = None;
        let now = self.epoch.get();
        let epoch_of = |segment| leased_in.get(&segment).copied().unwrap_or(now);
        let logs = || segments.iter().filter(|header| header.class == Class::Log);
        // A log segment is filled until the next one is begun.
        let until: HashMap<u32, Epoch> =
            logs().zip(logs().skip(1)).map(|(header, next)| (header.segment, epoch_of(next.segment))).collect();
        for header in &segments {
            let (segment, generation) = (header.segment, header.generation);
            if header.class == Class::Chunks {
                shard.state.with(|state| state.chunks.add(segment));
                continue;
            }
            let is_newest = newest == Some(segment);
            let written = Written { since: epoch_of(segment), until: until.get(&segment).copied().unwrap_or(now) };
            let listed = self.load_log(segment, generation, if is_newest { SCAN_GAP } else { u32::MAX }).await;
            shard.state.with(|state| {
                state.generations.insert(segment, generation);
                state.index.make_room(listed.footer.entries.len());
                let among = Among { layout: self.layout, generation, generations: &state.generations };
                replay(&listed.footer, written, among, &mut state.index, &mut large, &mut commits);
            });
            // The ages that a clean end wrote are the last in the log.
            let last = listed.footer.entries.last().filter(|last| last.tag == AGES_TAG);
            ages = last.and_then(|last| Word::from_bits(last.word)).map(|word| (word.location(), generation));
            if !listed.sealed {
                let tail = listed.tail.next_multiple_of(DISK_ALIGN as u32);
                unsealed.push((is_newest, OpenSegment::new(segment, generation, tail, listed.footer, listed.on_disk)));
            }
            yield_once().await;
        }
        self.claim_chunks(shard, large, epoch_of);
        shard.state.with(|state| state.index.fit());
        if let Some(location) = ages {
            self.apply_ages(shard, location).await;
        }
        for (is_newest, open) in unsealed {
            if is_newest {
                shard.state.with(|state| state.log.resume(open));
            } else {
                self.seal_found(shard, open);
            }
        }
        let empty: Vec<u32> = shard.state.with(|state| {
            let all: Vec<u32> = state.chunks.segments().collect();
            all.into_iter().filter(|&segment| state.chunks.remove_empty(segment)).collect()
        });
        // Why: new blobs go where the newest are, so that they are not evicted with the oldest.
        let chunks = segments.iter().rev().filter(|header| header.class == Class::Chunks);
        let old: Vec<u32> = chunks.skip(1).map(|header| header.segment).collect();
        shard.state.with(|state| old.into_iter().for_each(|segment| state.chunks.seal(segment)));
        empty.into_iter().for_each(|segment| self.return_segment(segment, Outcome::Freed));
    }

    /// Reads what the record of ages at `location` says, and notes it if the index is what it was then.
    async fn apply_ages(&self, shard: &Rc<Shard>, (location, generation): (u64, u64)) {
        let place = Place { position: location * RECORD_ALIGN as u64, generation };
        let (segment, offset) = self.layout.split(place.position);
        let mut window = Window::new(self, self.layout, segment);
        let header = window.at(offset, HEADER_LEN).await.and_then(|bytes| Header::decode(bytes, &self.sums, place));
        let Some(header) = header.filter(|header| header.kind == RecordKind::Ages) else { return };
        if header.record_len() > (self.layout.segment_len - offset) as usize {
            return;
        }
        let Some(record) = window.at(offset, header.record_len()).await else { return };
        let Some(payload) = header.payload(record, &self.sums) else { return };
        shard.state.with(|state| {
            let tags = state.index.iter().map(|(tag, _)| tag);
            if let Some(epochs) = Ages::decode(payload, &self.sums, tags, self.epoch.get()) {
                state.index.touch_all(epochs);
            }
        });
    }

    /// Gives each blob the chunks that its commit names, the latest commit first. A blob whose chunks a later one has is gone.
    fn claim_chunks(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        large: HashMap<u64, (usize, LargeEntry)>,
        epoch_of: impl Fn(u32) -> Epoch,
    ) {
        let mut large: Vec<_> = large.into_iter().collect();
        large.sort_unstable_by_key(|(_, (order, _))| std::cmp::Reverse(*order));
        for (tag, (_, LargeEntry { record_len, runs })) in large {
            shard.state.with(|state| {
                if state.chunks.claim_all(&runs) {
                    let now = self.epoch.get();
                    state.chunks.add_home(runs[0].first, tag);
                    // Its chunks tell better when it was written: they are filled in less time than the log.
                    let since = state.index.get(tag).map_or(now, |word| word.used(now));
                    let chunks = runs.iter().map(|run| epoch_of(self.layout.segment_of_chunk(run.first)));
                    state.index.touch(tag, chunks.fold(since, Epoch::max));
                    state.large.insert(tag, LargeRef { held: Held::new(self, shard.id, runs), record_len });
                } else {
                    state.index.remove(tag);
                }
            });
        }
    }

    /// Lists the records of a log segment (`LogReader::load_log`).
    pub(super) async fn load_log(&self, segment: u32, generation: u64, gap: u32) -> Listed {
        let reader = LogReader { blocks: self, layout: self.layout, sums: self.sums };
        reader.load_log(segment, generation, gap).await
    }
}

impl<B: Blocks> LogReader<'_, B> {
    /// Lists the records of a log segment. What no footer covers is scanned, until `gap` bytes brought no record.
    pub async fn load_log(&self, segment: u32, generation: u64, gap: u32) -> Listed {
        let mut listed = match self.read_footer(segment, generation).await {
            Some((footer, trailer)) => {
                let on_disk = footer.entries.len();
                Listed { footer, tail: trailer.upto, sealed: trailer.sealed, on_disk }
            }
            None => Listed { footer: Footer::default(), tail: HEAD_LEN, sealed: false, on_disk: 0 },
        };
        if !listed.sealed {
            self.scan(segment, generation, gap, &mut listed).await;
        }
        listed
    }

    async fn read_footer(&self, segment: u32, generation: u64) -> Option<(Footer, Trailer)> {
        let end = self.layout.segment_len;
        let read =
            self.blocks.read(self.layout.position(segment, end - FOOTER_READ_LEN), FOOTER_READ_LEN as usize).await?;
        let trailer = Trailer::decode(read.bytes(), &self.sums, self.layout, segment, generation)?;
        let whole = trailer.body_len + TRAILER_LEN as u32;
        let longer = if whole > FOOTER_READ_LEN {
            let start = (end - whole) / DISK_ALIGN as u32 * DISK_ALIGN as u32;
            self.blocks.read(self.layout.position(segment, start), (end - start) as usize).await?
        } else {
            read
        };
        let bytes = longer.bytes();
        let body = &bytes[bytes.len() - whole as usize..bytes.len() - TRAILER_LEN];
        let footer = Footer::decode(body, &trailer, &self.sums, self.layout, segment, generation)?;
        Some((footer, trailer))
    }

    /// Looks for records from `listed.tail` on, at every place where one may start, and adds them.
    async fn scan(&self, segment: u32, generation: u64, gap: u32, listed: &mut Listed) {
        let mut window = Window::new(self.blocks, self.layout, segment);
        let mut at = listed.tail.next_multiple_of(RECORD_ALIGN as u32);
        let mut steps = 0u32;
        while at + HEADER_LEN as u32 <= self.layout.segment_len && at - listed.tail.min(at) <= gap {
            steps += 1;
            if steps.is_multiple_of(STEPS_PER_YIELD) {
                yield_once().await;
            }
            let place = Place { position: self.layout.position(segment, at), generation };
            let Some(start) = window.at(at, HEADER_LEN).await else {
                at = (at + 1).next_multiple_of(DISK_ALIGN as u32);
                continue;
            };
            let header = if may_start(start) { Header::decode(start, &self.sums, place) } else { None };
            let header = header.filter(|header| header.record_len() <= (self.layout.segment_len - at) as usize);
            let found = match header {
                Some(header) => {
                    let payload =
                        window.at(at, header.record_len()).await.and_then(|record| header.payload(record, &self.sums));
                    payload.and_then(|payload| self.entry_of(&header, payload, place)).map(|entry| (header, entry))
                }
                None => None,
            };
            match found {
                Some((header, (entry, large))) => {
                    listed.footer.entries.push(entry);
                    listed.footer.large.extend(large);
                    at += header.log_len() as u32;
                    listed.tail = at;
                }
                None => at += RECORD_ALIGN as u32,
            }
        }
    }

    /// What a footer says of the whole record at `place`. `None` for one that no writer makes.
    pub fn entry_of(&self, header: &Header, payload: &[u8], place: Place) -> Option<(FooterEntry, Option<LargeEntry>)> {
        let location = place.position / RECORD_ALIGN as u64;
        let own_tag = || tag(self.sums.key, header.key.kind, &header.key.hash);
        let (tag, word, large) = match header.kind {
            RecordKind::Tomb => (tomb_tag(header), tomb_word(header, location, place.generation), None),
            RecordKind::Small => (own_tag(), Word::small(location, &header.key, header.record_len() as u64)?, None),
            RecordKind::Ages => (AGES_TAG, Word::tomb(location), None),
            RecordKind::Large => {
                let large = LargeEntry { record_len: header.record_len() as u32, runs: Commit::decode(payload)?.runs };
                (own_tag(), Word::large(location, &header.key), Some(large))
            }
        };
        Some((FooterEntry { tag, word: word.bits() }, large))
    }
}

/// The header of a record that removes `tag`, which stands in the place of the hash.
pub fn tomb_header(tag: u64, order: TombOrder, sums: &Checksums) -> Header {
    let mut hash = [0u8; 32];
    hash[..8].copy_from_slice(&tag.to_le_bytes());
    Header {
        kind: RecordKind::Tomb,
        key: Key { kind: Kind::Cas, hash: Hash(hash), size: 0 },
        codec: Codec::Raw,
        pieces: false,
        raw_len: order.number(),
        origin: Origin::default(),
        stored_len: 0,
        payload_sum: sums.payload(&[]),
    }
}

/// What a footer says of a record of ages: a tomb of a key that nobody can name.
pub(super) const AGES_TAG: u64 = 0;

/// The tag that a tomb removes: it stands in the place of the hash.
pub(super) fn tomb_tag(header: &Header) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| header.key.hash.0[i]))
}

/// Between which epochs a log segment was written.
#[derive(Clone, Copy, Default)]
pub struct Written {
    pub since: Epoch,
    pub until: Epoch,
}

/// A log segment among those of its shard that are older.
#[derive(Clone, Copy)]
pub struct Among<'a> {
    pub layout: Layout,
    pub generation: u64,
    /// By segment.
    pub generations: &'a HashMap<u32, u64>,
}

impl Among<'_> {
    /// Whether a tomb that first stood so many generations before this segment removes the record that `word` points to.
    fn is_buried(&self, word: Word, generations_ago: u64) -> bool {
        let (segment, _) = self.layout.split(word.location() * RECORD_ALIGN as u64);
        let since = self.generation.saturating_sub(generations_ago);
        self.generations.get(&segment).is_some_and(|generation| *generation < since)
    }
}

/// Applies a segment's entries to the index, in log order. Without better knowledge an entry counts as last used when it
/// was written, a small one at the latest time that this can have been. `large` gathers what the last commits say, numbered by
/// `commits`.
pub fn replay(
    footer: &Footer,
    written: Written,
    among: Among<'_>,
    index: &mut Index,
    large: &mut HashMap<u64, (usize, LargeEntry)>,
    commits: &mut usize,
) {
    let mut details = footer.large.iter();
    for entry in &footer.entries {
        let Some(word) = Word::from_bits(entry.word) else { continue };
        if word.is_large() {
            let Some(detail) = details.next() else { continue };
            *commits += 1;
            index.insert(entry.tag, word.used_in(written.since));
            large.insert(entry.tag, (*commits, detail.clone()));
        } else {
            // Why: the copy of a tomb stands behind what was stored after the tomb.
            if let Some(ago) = word.lasting().filter(|ago| *ago > 0)
                && !index.get(entry.tag).is_some_and(|word| among.is_buried(word, ago))
            {
                continue;
            }
            // Why the test: most shards have far fewer large blobs than records, and a keyed hash costs as much as the rest.
            if !large.is_empty() {
                large.remove(&entry.tag);
            }
            if word.is_tomb() {
                index.remove(entry.tag);
            } else {
                index.insert(entry.tag, word.used_in(written.until));
            }
        }
    }
}

/// A part of a segment in memory.
pub struct Window<'a, B> {
    blocks: &'a B,
    layout: Layout,
    segment: u32,
    start: u32,
    bytes: Option<ReadBuf>,
}

impl<'a, B: Blocks> Window<'a, B> {
    pub fn new(blocks: &'a B, layout: Layout, segment: u32) -> Self {
        Self { blocks, layout, segment, start: 0, bytes: None }
    }

    /// `len` bytes from `offset` on. `None` when they cannot be read.
    pub async fn at(&mut self, offset: u32, len: usize) -> Option<&[u8]> {
        let has = self
            .bytes
            .as_ref()
            .is_some_and(|bytes| offset >= self.start && (offset - self.start) as usize + len <= bytes.bytes().len());
        if !has {
            self.start = offset / DISK_ALIGN as u32 * DISK_ALIGN as u32;
            let want = ((offset - self.start) as usize + len).next_multiple_of(DISK_ALIGN).max(WINDOW_LEN);
            let want = want.min((self.layout.segment_len - self.start) as usize);
            let position = self.layout.position(self.segment, self.start);
            self.bytes = self.blocks.read(position, want).await;
            if self.bytes.is_none() {
                // A bad block shall cost what stands in it, not its neighbours.
                let least = ((offset - self.start) as usize + len).next_multiple_of(DISK_ALIGN);
                self.bytes = self.blocks.read(position, least).await;
            }
        }
        let from = (offset - self.start) as usize;
        self.bytes.as_ref()?.bytes().get(from..from + len)
    }
}

#[cfg(test)]
mod tests;
