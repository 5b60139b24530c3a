//! Records whose write failed: they are still in memory, and are appended again to another segment.

use std::rc::Rc;

use super::engine::{Core, Shard};
use super::log::{AppendError, Ticket, Unwritten};
use crate::pure::index::tag;
use crate::pure::record::{Header, Place, RECORD_ALIGN, RecordKind};

impl Core {
    /// Retires the segment and appends the records that still count elsewhere, also while the server stops. True when all
    /// of them are on disk; the others are gone from the index.
    ///
    /// Limit: when writes go on failing, `append_record` soon refuses (`WRITE_FAILURES_MAX`).
    pub(super) async fn rescue(self: &Rc<Self>, shard: &Rc<Shard>, unwritten: Unwritten) -> bool {
        let Unwritten { segment, generation, buf, start, records } = unwritten;
        shard.state.with(|state| {
            state.bad.insert(segment);
            state.log.note_failed(segment, start);
        });
        shard.changed.notify();
        let first = self.layout.position(segment, start);
        let mut tickets = Vec::new();
        let mut at = records.start;
        while at < records.end {
            let place = Place { position: first + at as u64, generation };
            let Some((len, appended)) = self.append_again(shard, &buf.bytes()[at..records.end], place).await else {
                break;
            };
            match appended {
                Ok(ticket) => tickets.push(ticket),
                // Replaced or removed meanwhile, or not worth it.
                Err(AppendError::Refused) => {}
                Err(AppendError::NoSegment | AppendError::WritesFail | AppendError::Stopping) => break,
            }
            at += len;
        }
        let mut all = at >= records.end;
        if !all {
            let region = first + at as u64..first + records.end as u64;
            let (forgotten, held) = shard.state.with(|state| state.forget_region(region));
            self.count(|stats| stats.evicted_entries += forgotten);
            drop(held);
        }
        self.flush_shard(shard);
        for ticket in tickets {
            all &= ticket.wait().await;
        }
        all
    }

    /// Appends the record at the start of `bytes`, which was made for `place`. Its length in the log, and what became of
    /// it; `None` when there is none.
    async fn append_again(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        bytes: &[u8],
        place: Place,
    ) -> Option<(usize, Result<Ticket, AppendError>)> {
        let header = Header::decode(bytes, &self.sums, place)?;
        let payload = header.payload(bytes, &self.sums)?;
        let appended = match header.kind {
            RecordKind::Tomb => self.append_tomb_again(shard, header, place.generation, false).await,
            // Ages that are lost cost nothing but the order of evictions.
            RecordKind::Ages => Err(AppendError::Refused),
            RecordKind::Small | RecordKind::Large => {
                let tag = tag(self.sums.key, header.key.kind, &header.key.hash);
                self.copy_forward(shard, tag, place.position / RECORD_ALIGN as u64, header, payload).await
            }
        };
        Some((header.log_len(), appended))
    }
}
