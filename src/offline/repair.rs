//! Drops what is broken, so that a start of the server and the next check find a whole directory.
//!
//! A record that a list names gives way to a tomb of its key, in its place and in the list: whatever older record of the
//! key there is stays dead. What stands in no list, and whose key cannot be told, is blanked. The order is records first,
//! lists then: a crash in between leaves lists that name records which are not there, and another repair ends that.

use std::collections::BTreeSet;
use std::io;

use super::survey::Surveyor;
use crate::limits::DISK_ALIGN;
use crate::pure::index::{Word, tag};
use crate::pure::record::{HEADER_LEN, Header, Place, RECORD_ALIGN, RecordKind, TombOrder};
use crate::pure::segment::{Footer, FooterEntry, SegmentHeader};
use crate::shard::recover::{Listed, tomb_header};

/// What is broken in one log segment.
#[derive(Debug, Default)]
pub struct Damage {
    /// Its list.
    pub footer: bool,
    /// Listed records, by number.
    dropped: BTreeSet<usize>,
    /// Nothing is left of what it listed.
    pub emptied: bool,
    /// A listed record of ages whose entries are not all there: it goes, and counts for nothing.
    pub outdated: Option<usize>,
    /// Records in no list: where they start, and their header if that is whole.
    pub unlisted: Vec<(u64, Option<Header>)>,
}

impl Damage {
    pub fn drop_entry(&mut self, number: usize) {
        self.dropped.insert(number);
    }

    /// The list with tombs in the place of what is dropped.
    pub fn without_dropped(&self, footer: &Footer) -> Footer {
        let mut out = Footer::default();
        let mut large = footer.large.iter();
        for (number, entry) in footer.entries.iter().enumerate() {
            let word = Word::from_bits(entry.word).expect("checked when the list was read");
            let detail = if word.is_large() { large.next() } else { None };
            if self.dropped.contains(&number) || self.outdated == Some(number) {
                out.entries.push(FooterEntry { tag: entry.tag, word: Word::tomb(word.location()).bits() });
            } else {
                out.entries.push(*entry);
                out.large.extend(detail.cloned());
            }
        }
        out
    }
}

impl Surveyor {
    /// Repairs a log segment. How many broken things are gone.
    pub(super) async fn repair_log(&self, header: SegmentHeader, listed: &Listed, damage: &Damage) -> io::Result<u64> {
        let SegmentHeader { segment, generation, .. } = header;
        for &number in damage.dropped.iter().chain(&damage.outdated) {
            let entry = listed.footer.entries[number];
            let location = Word::from_bits(entry.word).map_or(0, Word::location);
            self.bury(entry.tag, Place { position: location * RECORD_ALIGN as u64, generation }).await?;
        }
        for (position, header) in &damage.unlisted {
            match header {
                Some(Header { kind: RecordKind::Small | RecordKind::Large, key, .. }) => {
                    let tag = tag(self.sums.key, key.kind, &key.hash);
                    self.bury(tag, Place { position: *position, generation }).await?;
                }
                _ => self.files.patch(*position, &[0; HEADER_LEN]).await?,
            }
        }
        let changed = !damage.dropped.is_empty() || damage.outdated.is_some();
        if damage.footer || damage.emptied || (listed.on_disk > 0 && changed) {
            let footer = damage.without_dropped(&listed.footer);
            let bytes = footer.encode(
                &self.sums,
                self.layout,
                segment,
                generation,
                listed.tail,
                listed.sealed || damage.emptied,
            );
            let mut blocks = vec![0; bytes.len().next_multiple_of(DISK_ALIGN) - bytes.len()];
            blocks.extend_from_slice(&bytes);
            let end = self.layout.position(segment, self.layout.segment_len);
            self.files.write(end - blocks.len() as u64, &blocks).await?;
        }
        let records = (damage.dropped.len() + damage.unlisted.len()) as u64;
        Ok(records + u64::from(damage.footer) + u64::from(damage.emptied))
    }

    /// Writes a tomb over the start of a record, which is never shorter than one.
    async fn bury(&self, tag: u64, place: Place) -> io::Result<()> {
        self.files.patch(place.position, &tomb_header(tag, TombOrder::Here, &self.sums).encode(&self.sums, place)).await
    }
}
