//! Goes through all that stands in a shard, as a start of the server would, and compares every byte that means something.
//!
//! Segments come in the order of their leases. Each record is compared with the list that names it, with its checksums
//! and with its key; then the last commits claim their chunks, and the content of those that get them is compared.
//! A broken record counts as a tomb of its key, which is what a repair makes of it.

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::content;
use super::crew::Progress;
use super::files::Files;
use super::findings::{Broken, Class, Findings, What, class_of};
use super::repair::Damage;
use crate::budget::Purse;
use crate::limits::{CHUNK_LEN, DISK_ALIGN, WORK_SLICE_LEN};
use crate::pure::chunks::Chunks;
use crate::pure::index::{Index, Word};
use crate::pure::recency::Ages;
use crate::pure::record::{
    Checksums, Commit, HEADER_LEN, Header, Key, Place, RECORD_ALIGN, RecordKind, generation_at, log_len, may_start,
};
use crate::pure::segment::{self, FooterEntry, HEAD_LEN, LargeEntry, Layout, SegmentHeader, Trailer};
use crate::pure::shard_map::{ShardId, ShardMap};
use crate::rt;
use crate::shard::codec::{Codecs, StorageMode};
use crate::shard::geometry::Volume;
use crate::shard::recover::{Among, Blocks, Listed, LogReader, SCAN_GAP, Window, Written, replay};

/// How closely records are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Headers only.
    Headers,
    /// All bytes of every record and frame.
    Content,
}

/// Surveys shards on one core.
pub struct Surveyor {
    pub(super) files: Files,
    pub(super) layout: Layout,
    pub(super) sums: Checksums,
    map: ShardMap,
    /// Which segments have a header.
    leased: Rc<[bool]>,
    codecs: Codecs,
    depth: Depth,
    repairs: bool,
    progress: Arc<Progress>,
    /// Work since this core last reached the reactor, in bytes of hashing.
    spent: Cell<usize>,
}

/// A record that is what it should be.
pub(super) struct Found {
    pub(super) header: Header,
    /// Only of a large commit.
    pub(super) commit: Option<Commit>,
}

/// A large blob's commit, and where it stands.
struct Claim {
    found: Found,
    log: usize,
    entry: usize,
}

/// A log segment on the way.
struct Log {
    header: SegmentHeader,
    listed: Listed,
    /// Facts of each listed record; `None` for tombs and what is broken.
    facts: Vec<Option<(usize, Class)>>,
    damage: Damage,
}

impl Surveyor {
    pub async fn open(volume: &Volume, depth: Depth, repairs: bool, progress: Arc<Progress>) -> io::Result<Self> {
        Ok(Self {
            files: Files::open(volume, repairs).await?,
            layout: volume.layout(),
            sums: volume.checksums(),
            map: ShardMap::new(volume.shards(), 1),
            leased: volume.headers().iter().map(Option::is_some).collect(),
            codecs: Codecs::new(StorageMode::Zstd, Purse::alone(u64::MAX)),
            depth,
            repairs,
            progress,
            spent: Cell::new(0),
        })
    }

    /// Waits until all repairs are on the device.
    pub async fn sync(&self) -> io::Result<()> {
        self.files.sync().await
    }

    /// Looks at a segment that has no header: blank, or damaged in both copies.
    pub async fn headless(&self, segment: u32) -> io::Result<Findings> {
        let mut findings = Findings::default();
        let position = self.layout.position(segment, 0);
        let read = self.files.read(position, HEAD_LEN as usize).await;
        let what = match &read {
            Some(read) if SegmentHeader::is_blank(read.bytes()) => return Ok(findings),
            Some(_) => What::Header,
            None => What::Unreadable,
        };
        self.note(&mut findings, what, position, None);
        if self.repairs {
            self.files.write(position, &[0; HEAD_LEN as usize]).await?;
            findings.repaired += 1;
        }
        Ok(findings)
    }

    /// Goes through one shard, and repairs it if that is asked for.
    pub async fn shard(&self, shard: ShardId, mut segments: Vec<SegmentHeader>) -> io::Result<Findings> {
        segments.sort_unstable_by_key(|header| header.generation);
        let newest = segments.iter().rev().find(|header| header.class == segment::Class::Log).copied();
        let mut findings = Findings::default();
        let (mut index, mut large, mut commits) = (Index::default(), HashMap::new(), 0);
        let mut chunks = Chunks::new(self.layout.chunks_per_segment());
        let (mut logs, mut claims, mut generations) = (Vec::new(), HashMap::new(), HashMap::new());
        for header in segments {
            self.segment_header(header, &mut findings).await?;
            findings.note_generation(header.generation);
            if header.class == segment::Class::Chunks {
                findings.chunk_segments += 1;
                chunks.add(header.segment);
                continue;
            }
            let gap = if newest == Some(header) { SCAN_GAP } else { u32::MAX };
            let (log, found) = self.log_segment(shard, header, gap, &mut findings).await;
            for (entry, found) in found {
                let location = self.location(&log, entry);
                claims.insert(location, Claim { found, log: logs.len(), entry });
            }
            let dropped = log.damage.without_dropped(&log.listed.footer);
            generations.insert(header.segment, header.generation);
            let among = Among { layout: self.layout, generation: header.generation, generations: &generations };
            replay(&dropped, Written::default(), among, &mut index, &mut large, &mut commits);
            self.progress.add(u64::from(self.layout.segment_len));
            logs.push(log);
        }
        let mut latest: Vec<(u64, (usize, LargeEntry))> = large.into_iter().collect();
        latest.sort_unstable_by_key(|(_, (order, _))| std::cmp::Reverse(*order));
        let (mut large_bytes, mut homeless) = (0, Vec::new());
        for (tag, (_, LargeEntry { runs, .. })) in latest {
            let claim = index.get(tag).and_then(|word| claims.remove(&word.location()));
            let Some(claim) = claim else {
                index.remove(tag);
                continue;
            };
            if !chunks.claim_all(&runs) {
                index.remove(tag);
                if runs.iter().any(|run| !self.leased[self.layout.segment_of_chunk(run.first) as usize]) {
                    homeless.push(claim);
                }
                continue;
            }
            let compared = self.large(&claim.found).await;
            let stored = claim.found.commit.as_ref().map_or(0, Commit::stored_len);
            self.progress.add(stored);
            large_bytes += stored;
            if compared.is_ok() && self.depth == Depth::Content {
                findings.verified += stored;
            }
            if let Err((what, position)) = compared {
                // Its chunks may be those of an earlier blob, which a start would find once this one is dropped.
                for run in &runs {
                    chunks.give(*run);
                }
                index.remove(tag);
                self.note(&mut findings, what, position, Some(claim.found.header.key));
                logs[claim.log].damage.drop_entry(claim.entry);
                logs[claim.log].facts[claim.entry] = None;
            }
        }
        let chunk_bytes = findings.chunk_segments * u64::from(self.layout.segment_len);
        self.progress.add(chunk_bytes.saturating_sub(large_bytes));
        self.compare_count(&mut logs, homeless, &index, &mut findings).await;
        self.sum_up(&logs, &index, &mut findings);
        findings.chunks_taken = chunks.segments().map(|segment| u64::from(chunks.taken(segment))).sum();
        if self.repairs {
            for log in &logs {
                findings.repaired += self.repair_log(log.header, &log.listed, &log.damage).await?;
            }
        }
        Ok(findings)
    }

    /// Compares both copies of a segment's header.
    async fn segment_header(&self, header: SegmentHeader, findings: &mut Findings) -> io::Result<()> {
        let position = self.layout.position(header.segment, 0);
        let read = self.files.read(position, HEAD_LEN as usize).await;
        let copies = match &read {
            Some(read) => SegmentHeader::copies(read.bytes(), &self.sums, self.layout, header.segment),
            None => [None; 2],
        };
        for (copy, _) in copies.iter().enumerate().filter(|(_, copy)| copy.is_none()) {
            self.note(findings, What::HeaderCopy, position + (copy * DISK_ALIGN) as u64, None);
            if self.repairs {
                self.files.write(position, &header.encode(&self.sums, self.layout)).await?;
                findings.repaired += 1;
            }
        }
        Ok(())
    }

    /// Lists a log segment, and compares each record and what lies between them. Returns the commits in it too.
    async fn log_segment(
        &self,
        shard: ShardId,
        header: SegmentHeader,
        gap: u32,
        findings: &mut Findings,
    ) -> (Log, Vec<(usize, Found)>) {
        let SegmentHeader { segment, generation, .. } = header;
        let reader = self.reader();
        let listed = reader.load_log(segment, generation, gap).await;
        let mut damage = Damage::default();
        let is_listed = listed.on_disk > 0 || listed.sealed;
        damage.footer = !is_listed && self.footer_is_damaged(header).await;
        if damage.footer {
            let trailer = self.layout.position(segment, self.layout.segment_len) - segment::TRAILER_LEN as u64;
            self.note(findings, What::Footer, trailer, None);
        }
        // Another segment is begun when one is full: only the last may have nothing in it.
        damage.emptied = gap == u32::MAX && !is_listed && !damage.footer && listed.footer.entries.is_empty();
        if damage.emptied {
            self.note(findings, What::Records, self.layout.position(segment, HEAD_LEN), None);
        }
        let mut window = Window::new(&self.files, self.layout, segment);
        let (mut ends, mut facts, mut commits) = (Vec::new(), Vec::new(), Vec::new());
        let mut large = listed.footer.large.iter();
        for (number, entry) in listed.footer.entries.iter().enumerate() {
            let word =
                Word::from_bits(entry.word).expect("a list has words of records only: `Footer::decode`, `entry_of`");
            let large = if word.is_large() { large.next() } else { None };
            let position = word.location() * RECORD_ALIGN as u64;
            let offset = self.layout.split(position).1;
            match self.record(&mut window, shard, Place { position, generation }, entry, large).await {
                Ok(found) => {
                    let len = found.header.log_len();
                    findings.records += u64::from(found.header.kind != RecordKind::Ages);
                    ends.push(offset + len as u32);
                    facts.push(class_of_record(&found));
                    findings.tombs += u64::from(matches!(found.header.kind, RecordKind::Tomb));
                    findings.verified += if self.depth == Depth::Content { len as u64 } else { HEADER_LEN as u64 };
                    if found.commit.is_some() {
                        commits.push((number, found));
                    }
                }
                Err((what, key)) => {
                    ends.push(offset + log_len(0) as u32);
                    facts.push(None);
                    findings.records += 1;
                    self.note(findings, what, position, key);
                    damage.drop_entry(number);
                }
            }
        }
        if !listed.sealed && self.depth == Depth::Content {
            for gap in gaps(&listed, &ends, self.layout, gap) {
                for (position, header) in self.torn(&mut window, header, gap).await {
                    let what = if header.is_some() { What::Payload } else { What::RecordHeader };
                    self.note(findings, what, position, header.map(|header| header.key));
                    damage.unlisted.push((position, header));
                }
            }
        }
        findings.log_segments += 1;
        findings.log_used += u64::from(listed.tail);
        (Log { header, listed, facts, damage }, commits)
    }

    /// Compares the number of entries with what the server noted at its end: a segment may be gone with its header, and look
    /// like one that was freed. `homeless` are commits of large blobs with chunks in such segments.
    ///
    /// Why not all of those whose chunks are not theirs: the commit of a blob that was evicted may outlive its tomb.
    async fn compare_count(&self, logs: &mut [Log], homeless: Vec<Claim>, index: &Index, findings: &mut Findings) {
        let noted = self.noted(logs).await;
        if noted.is_some_and(|(noted, _)| index.len() as u64 >= noted) {
            return;
        }
        for claim in homeless {
            let position = self.location(&logs[claim.log], claim.entry) * RECORD_ALIGN as u64;
            self.note(findings, What::Chunks, position, Some(claim.found.header.key));
            logs[claim.log].damage.drop_entry(claim.entry);
            logs[claim.log].facts[claim.entry] = None;
        }
        let (Some((_, position)), Some(last)) = (noted, logs.last_mut()) else { return };
        // Once what is broken has been dropped the note would tell of it for ever.
        last.damage.outdated = last.listed.footer.entries.len().checked_sub(1);
        if !findings.has_losses() {
            self.note(findings, What::Missing, position, None);
            findings.repaired += u64::from(self.repairs);
        }
    }

    /// How many entries there were when the server ended, and where that stands: in the record of their ages, as long as it is
    /// the last in the log.
    async fn noted(&self, logs: &[Log]) -> Option<(u64, u64)> {
        let last = logs.last()?;
        let position = self.location(last, last.listed.footer.entries.len().checked_sub(1)?) * RECORD_ALIGN as u64;
        let place = Place { position, generation: last.header.generation };
        let (segment, offset) = self.layout.split(position);
        let mut window = Window::new(&self.files, self.layout, segment);
        let header = Header::decode(window.at(offset, HEADER_LEN).await?, &self.sums, place)?;
        if header.kind != RecordKind::Ages || header.record_len() > (self.layout.segment_len - offset) as usize {
            return None;
        }
        let record = window.at(offset, header.record_len()).await?;
        Some((Ages::entries(header.payload(record, &self.sums)?)?, position))
    }

    async fn footer_is_damaged(&self, header: SegmentHeader) -> bool {
        let end = self.layout.position(header.segment, self.layout.segment_len);
        let read = self.files.read(end - DISK_ALIGN as u64, DISK_ALIGN).await;
        read.is_none_or(|read| {
            let bytes = read.bytes();
            let (segment, generation) = (header.segment, header.generation);
            // A whole trailer whose list is not whole is damage too: with a whole one the list would have been read.
            Trailer::is_damaged(bytes, &self.sums, self.layout, segment, generation)
                || Trailer::decode(bytes, &self.sums, self.layout, segment, generation).is_some()
        })
    }

    /// Compares one listed record with all that is known of it.
    async fn record(
        &self,
        window: &mut Window<'_, Files>,
        shard: ShardId,
        place: Place,
        entry: &FooterEntry,
        large: Option<&LargeEntry>,
    ) -> Result<Found, (What, Option<Key>)> {
        let offset = self.layout.split(place.position).1;
        let start = window.at(offset, HEADER_LEN).await.ok_or((What::Unreadable, None))?;
        let header = Header::decode(start, &self.sums, place).ok_or((What::RecordHeader, None))?;
        let key = matches!(header.kind, RecordKind::Small | RecordKind::Large).then_some(header.key);
        if header.record_len() > (self.layout.segment_len - offset) as usize
            || key.is_some_and(|key| self.map.shard_of(&key.hash) != shard)
        {
            return Err((What::Listing, key));
        }
        let mut payload = &[][..];
        if self.depth == Depth::Content || header.kind == RecordKind::Large {
            let record = window.at(offset, header.record_len()).await.ok_or((What::Unreadable, key))?;
            payload = header.payload(record, &self.sums).ok_or((What::Payload, key))?;
        }
        let commit = match header.kind {
            RecordKind::Large => Some(Commit::decode(payload).ok_or((What::Listing, key))?),
            _ => None,
        };
        match self.reader().entry_of(&header, payload, place) {
            Some((listed, runs)) if listed == *entry && runs.as_ref() == large => {}
            _ => return Err((What::Listing, key)),
        }
        if self.depth == Depth::Content && header.kind == RecordKind::Small {
            content::whole(&self.codecs, &header, payload).ok_or((What::Content, key))?;
            self.breathe(header.raw_len as usize).await;
        }
        self.breathe(RECORD_COST).await;
        Ok(Found { header, commit })
    }

    /// Records that a crash left half-written, or that are damaged and in no list: where one of this lease starts in `gap`.
    async fn torn(
        &self,
        window: &mut Window<'_, Files>,
        header: SegmentHeader,
        gap: Range<u32>,
    ) -> Vec<(u64, Option<Header>)> {
        let mut found = Vec::new();
        let mut at = gap.start.next_multiple_of(RECORD_ALIGN as u32);
        while at + HEADER_LEN as u32 <= gap.end {
            let Some(start) = window.at(at, HEADER_LEN).await else {
                at = (at + 1).next_multiple_of(DISK_ALIGN as u32);
                continue;
            };
            let mut step = RECORD_ALIGN as u32;
            if may_start(start) && generation_at(start) == Some(header.generation) {
                let place = Place { position: self.layout.position(header.segment, at), generation: header.generation };
                let header = Header::decode(start, &self.sums, place);
                step = header.map_or(step, |header| header.log_len() as u32);
                found.push((place.position, header));
            }
            self.breathe(HEADER_LEN).await;
            at = at.saturating_add(step);
        }
        found
    }

    /// Compares the content of a large blob.
    async fn large(&self, found: &Found) -> Result<(), (What, u64)> {
        let Some(commit) = &found.commit else { return Ok(()) };
        let space: u64 = commit.runs.iter().map(|run| u64::from(run.count) * CHUNK_LEN as u64).sum();
        let first = commit.runs.first().map_or(0, |run| self.layout.chunk_position(run.first));
        if commit.stored_len() > space {
            return Err((What::Listing, first));
        }
        if self.depth == Depth::Headers {
            return Ok(());
        }
        let mut stored = content::Stored::new(&self.files, self.layout, &commit.runs);
        let mut content = content::Large::new(&self.codecs, &found.header, commit.frames.len());
        for frame in &commit.frames {
            let position = stored.position();
            let bytes = stored.take(frame.stored_len as usize).await.ok_or((What::Unreadable, position))?;
            if self.sums.payload(bytes) != frame.sum {
                return Err((What::Frame, position));
            }
            content.frame(frame.codec, bytes).ok_or((What::Content, position))?;
            self.breathe(2 * bytes.len()).await;
        }
        content.finish().ok_or((What::Content, first))
    }

    /// Adds the entries that a server would serve.
    fn sum_up(&self, logs: &[Log], index: &Index, findings: &mut Findings) {
        for log in logs {
            for (entry, facts) in log.listed.footer.entries.iter().zip(&log.facts) {
                let Some((class, facts)) = facts else { continue };
                let location = Word::from_bits(entry.word).map(Word::location);
                if index.get(entry.tag).map(Word::location) == location {
                    findings.note_entry(*class, *facts);
                }
            }
        }
    }

    fn reader(&self) -> LogReader<'_, Files> {
        LogReader { blocks: &self.files, layout: self.layout, sums: self.sums }
    }

    fn location(&self, log: &Log, entry: usize) -> u64 {
        Word::from_bits(log.listed.footer.entries[entry].word).map_or(0, Word::location)
    }

    fn note(&self, findings: &mut Findings, what: What, position: u64, key: Option<Key>) {
        self.progress.note();
        findings.note_broken(Broken { what, position, key });
    }

    /// Called after work that costs as much as hashing `bytes`: lets the reactor have its turn when it is due.
    async fn breathe(&self, bytes: usize) {
        let spent = self.spent.get() + bytes;
        self.spent.set(spent);
        if spent >= WORK_SLICE_LEN {
            self.spent.set(0);
            rt::time::yield_to_reactor().await;
        }
    }
}

/// What looking at a record costs beside hashing its content, in bytes of hashing.
const RECORD_COST: usize = 512;

/// The class of a record that holds an entry, and what it adds to that.
fn class_of_record(found: &Found) -> Option<(usize, Class)> {
    let header = &found.header;
    let log = header.log_len() as u64;
    let (large, stored, space) = match (header.kind, &found.commit) {
        (RecordKind::Small, _) => (false, u64::from(header.stored_len), log),
        (RecordKind::Large, Some(commit)) => {
            let chunks: u64 = commit.runs.iter().map(|run| u64::from(run.count)).sum();
            (true, commit.stored_len(), log + chunks * CHUNK_LEN as u64)
        }
        _ => return None,
    };
    let class = Class { entries: 1, logical: header.raw_len, stored, space };
    Some((class_of(header.key.kind, large), class))
}

/// What lies between the records of a segment that no footer covers, and behind the last of them.
fn gaps(listed: &Listed, ends: &[u32], layout: Layout, after: u32) -> Vec<Range<u32>> {
    let starts = listed.footer.entries.iter().filter_map(|entry| Word::from_bits(entry.word));
    let starts = starts.map(|word| layout.split(word.location() * RECORD_ALIGN as u64).1).skip(listed.on_disk);
    let mut from = listed.on_disk.checked_sub(1).and_then(|last| ends.get(last).copied()).unwrap_or(HEAD_LEN);
    let mut gaps = Vec::new();
    for (start, end) in starts.zip(ends.iter().skip(listed.on_disk)) {
        gaps.push(from..start);
        from = *end;
    }
    gaps.push(from..from.saturating_add(after).min(layout.segment_len));
    gaps.retain(|gap| gap.start < gap.end);
    gaps
}
