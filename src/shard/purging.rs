//! Purging on the disk: records that go for good, and the list of the action results that there are.

use std::rc::Rc;

use super::disk::{DiskError, Key};
use super::engine::{Core, Shard};
use super::log::{AppendError, Record, Ticket, Urgency};
use super::recover::tomb_tag;
use crate::limits::{PURGE_READS_MAX, PURGE_TRIES_MAX};
use crate::pure::index::Word;
use crate::pure::purge::Which;
use crate::pure::record::{HEADER_LEN, Header, TombOrder};
use crate::pure::segment::FooterEntry;
use crate::rt::join::map_bounded;

/// How far a walk over this core's action results has come. It sees every one that was there when it began; one that is
/// moved meanwhile is moved to where the walk has yet to come.
#[derive(Debug, Default)]
pub struct ActionCursor {
    /// This core's shards that are done.
    shards: usize,
    /// In the shard that comes next: the least generation of a log segment that is not done.
    generation: u64,
    /// Results that were looked at.
    pub examined: u64,
}

impl Core {
    /// Removes keys, whatever their size, for good: when it returns, a power cut does not bring them back, whatever `--ack`
    /// promises of writes. Says for each whether there was something.
    pub(super) async fn purge(self: &Rc<Self>, keys: &[Key]) -> Result<Vec<bool>, DiskError> {
        let (mut found, mut tickets) = (Vec::with_capacity(keys.len()), Vec::new());
        for key in keys {
            let (shard, tag) =
                self.locate(key).ok_or_else(|| DiskError::Io("the key belongs to another core".into()))?;
            shard.wait_ready().await;
            let mut any = false;
            let ticket = self.bury_for_good(&shard.clone(), tag, &mut any).await?;
            found.push(any);
            tickets.push(ticket);
            tickets.dedup_by(|later, earlier| later.is_same(earlier));
        }
        for key in keys {
            if let Some((shard, _)) = self.locate(key).filter(|(shard, _)| shard.unflushed.get()) {
                self.flush_shard(&shard.clone());
            }
        }
        for ticket in tickets {
            self.wait_written(&ticket).await?;
        }
        self.wait_synced(self.next_sync()).await?;
        Ok(found)
    }

    /// Why a tomb also where nothing is found: what was dropped a moment ago may have left none on the disk yet.
    async fn bury_for_good(self: &Rc<Self>, shard: &Rc<Shard>, tag: u64, any: &mut bool) -> Result<Ticket, DiskError> {
        for _ in 0..PURGE_TRIES_MAX {
            let gone = shard.state.with(|state| state.forget(tag));
            *any |= gone.is_some();
            let held = gone.and_then(|(_, held)| held);
            match self.append_tomb(shard, tag, TombOrder::LastingHere, Urgency::Normal).await {
                Ok(ticket) => {
                    held.iter().for_each(|held| held.release_after(&ticket));
                    return Ok(ticket);
                }
                // Stored anew meanwhile.
                Err(AppendError::Refused) => {}
                Err(error @ (AppendError::NoSegment | AppendError::WritesFail | AppendError::Stopping)) => {
                    return Err(error.into_disk_error(HEADER_LEN as u64));
                }
            }
        }
        Err(DiskError::Io("the key is stored again as fast as it is removed".into()))
    }

    /// Appends a tomb again, whose place in a segment of `generation` is given up.
    ///
    /// `is_whole`: the whole segment goes. Else records before the tomb may stay in it.
    pub(super) async fn append_tomb_again(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        header: Header,
        generation: u64,
        is_whole: bool,
    ) -> Result<Ticket, AppendError> {
        let tag = tomb_tag(&header);
        let since = match TombOrder::of_number(header.raw_len) {
            TombOrder::Here => return self.append_tomb(shard, tag, TombOrder::Here, Urgency::Reclaim).await,
            TombOrder::LastingHere => generation + u64::from(!is_whole),
            TombOrder::LastingSince(since) => since,
        };
        let header = Header { raw_len: TombOrder::LastingSince(since).number(), ..header };
        let record = Record { header, tag, payload: &[], large: None };
        self.append_record(shard, Urgency::Reclaim, &record, |_| true, |_, _, _| {}).await
    }

    /// The next action results of this core that `which` covers: those of one log segment, which may be none. `None` at the end.
    pub(super) async fn next_actions(self: &Rc<Self>, cursor: &mut ActionCursor, which: &Which) -> Option<Vec<Key>> {
        loop {
            let shard = self.own_shards().nth(cursor.shards)?.clone();
            shard.wait_ready().await;
            let next = shard.state.with(|state| {
                let segments = state.generations.iter().map(|(segment, generation)| (*generation, *segment));
                segments.filter(|(generation, _)| *generation >= cursor.generation).min()
            });
            let Some((generation, segment)) = next else {
                cursor.shards += 1;
                cursor.generation = 0;
                continue;
            };
            cursor.generation = generation + 1;
            let entries = match self.wait_sealed(&shard, segment).await {
                true => self.load_log(segment, generation, u32::MAX).await.footer.entries,
                false => shard.state.with(|state| state.log.open_entries(segment).map_or_else(Vec::new, <[_]>::to_vec)),
            };
            return Some(self.covered_of(&shard, entries, cursor, which).await);
        }
    }

    async fn covered_of(
        self: &Rc<Self>,
        shard: &Rc<Shard>,
        entries: Vec<FooterEntry>,
        cursor: &mut ActionCursor,
        which: &Which,
    ) -> Vec<Key> {
        let words = entries.into_iter().filter_map(|entry| Some((entry.tag, Word::from_bits(entry.word)?)));
        // What older servers have listed may be of any kind.
        let may_be = |word: &Word| !word.is_tomb() && word.is_action() != Some(false);
        let live: Vec<(u64, Word)> = shard.state.with(|state| {
            let here =
                |tag: u64, word: &Word| state.index.get(tag).is_some_and(|now| now.location() == word.location());
            words.filter(|(tag, word)| may_be(word) && here(*tag, word)).collect()
        });
        let headers = map_bounded(live, PURGE_READS_MAX, async |(tag, word): (u64, Word)| {
            let header = self.fetch(shard, word, HEADER_LEN as u64, |header, _| Some(header)).await;
            if header.is_none() {
                // One that was moved is met again. One that cannot be read shall not be read later, either.
                self.drop_damaged(shard, tag, word.location());
            }
            header
        })
        .await;
        let actions = headers.into_iter().flatten().filter(|header| header.key.kind.is_action());
        let actions = actions.inspect(|_| cursor.examined += 1);
        actions.filter(|header| which.covers(header.origin)).map(|header| header.key).collect()
    }
}
