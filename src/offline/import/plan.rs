//! Which files are imported, and in which order.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;

use super::names::{Form, Space};
use super::source::Entry;
use crate::limits::{CHUNK_LEN, FRAME_LEN, SMALL_BLOB_LEN_MAX};
use crate::pure::digest::Hash;
use crate::pure::record::{commit_len, log_len};
use crate::pure::shard_map::ShardMap;
use crate::shard::geometry::Volume;

/// Segments of a volume that new blobs do not fill: one log and one chunk segment of each shard are being filled, and
/// some are kept for eviction.
const SEGMENTS_OPEN_PER_SHARD: u64 = 2;
const SEGMENTS_KEPT: u64 = 8;
/// Bytes of a footer's entry.
const LISTED_LEN: u64 = 16;

/// What each core imports, oldest first, and what does not fit.
pub struct Plan {
    pub parts: Vec<Vec<Entry>>,
    pub left_out: Vec<Entry>,
}

impl Plan {
    /// Why files are left out beforehand: those stored first would be evicted by those that come later, and an import
    /// that is run again would bring them back in the place of newer ones.
    pub fn new(entries: Vec<Entry>, volume: &Volume, cores: usize) -> Self {
        let segments = u64::from(volume.segment_count());
        let open = SEGMENTS_OPEN_PER_SHARD * u64::from(volume.shards()) + SEGMENTS_KEPT;
        // A shard's last segment may be as good as empty, and footers take some of each.
        let room = segments.saturating_sub(open) * u64::from(volume.layout().segment_len) / 20 * 19;
        let (mut chosen, left_out) = newest_that_fit(one_for_each_action(entries), room, volume.max_blob_len());
        chosen.sort_by_key(|entry| entry.used);
        let map = ShardMap::new(volume.shards(), cores as u16);
        let mut parts: Vec<Vec<Entry>> = (0..cores).map(|_| Vec::new()).collect();
        for entry in chosen {
            parts[usize::from(map.core_of_hash(&entry.hash).0)].push(entry);
        }
        Self { parts, left_out }
    }
}

/// Gathers the files of each action: the newest one, with the others behind it.
fn one_for_each_action(entries: Vec<Entry>) -> Vec<Entry> {
    let (mut out, rest): (Vec<Entry>, Vec<Entry>) = entries.into_iter().partition(|entry| entry.space == Space::Cas);
    let mut actions: HashMap<(Space, Hash), Entry> = HashMap::new();
    for entry in rest {
        match actions.entry((entry.space, entry.hash)) {
            Slot::Vacant(slot) => drop(slot.insert(entry)),
            Slot::Occupied(mut slot) => slot.get_mut().older.push(entry),
        }
    }
    out.extend(actions.into_values().map(|mut first| {
        if first.older.is_empty() {
            return first;
        }
        let mut all = std::mem::take(&mut first.older);
        all.push(first);
        all.sort_by_key(|entry| -entry.used);
        let mut first = all.remove(0);
        first.older = all;
        first
    }));
    out
}

/// The most recently used entries that `room` bytes hold together, and the others. Of more than `blob_max` raw bytes none is
/// stored: such a one takes no room, and whoever loads it says so.
fn newest_that_fit(mut entries: Vec<Entry>, room: u64, blob_max: u64) -> (Vec<Entry>, Vec<Entry>) {
    entries.sort_by_key(|entry| -entry.used);
    let mut taken = 0u64;
    let fit = entries.iter().take_while(|entry| {
        let space = if raw_of(entry) > blob_max { 0 } else { space_of(entry) };
        taken = taken.saturating_add(space);
        taken <= room
    });
    let left_out = entries.split_off(fit.count());
    (entries, left_out)
}

fn raw_of(entry: &Entry) -> u64 {
    match entry.form {
        Form::Casblob(size) => size,
        Form::Plain => entry.len,
    }
}

/// About how many bytes an entry takes at rest: a file that is compressed stays about as long, and is hardly longer than its
/// content if it is whole.
fn space_of(entry: &Entry) -> u64 {
    let raw = raw_of(entry);
    let len = entry.len.min(raw.saturating_add(raw / 32).saturating_add(CHUNK_LEN as u64));
    if raw <= SMALL_BLOB_LEN_MAX as u64 {
        return log_len(len as usize) as u64 + LISTED_LEN;
    }
    let chunks = len.saturating_add(len / 32).next_multiple_of(CHUNK_LEN as u64);
    chunks + log_len(commit_len(1, raw.div_ceil(FRAME_LEN as u64) as usize)) as u64 + LISTED_LEN
}

#[cfg(test)]
mod tests {
    use super::super::source::tests::entry;
    use super::*;

    /// Goal: of an action's files the newest comes first, the others stand behind it; blobs are left alone.
    /// Method: by hand.
    #[test]
    fn an_action_has_one_entry() {
        let all = vec![
            entry(Space::Action, Form::Plain, 1, 10, 5),
            entry(Space::Raw, Form::Plain, 1, 10, 9),
            entry(Space::Cas, Form::Plain, 1, 10, 9),
            entry(Space::Action, Form::Plain, 1, 10, 7),
            entry(Space::Cas, Form::Casblob(9), 1, 10, 9),
            entry(Space::Raw, Form::Plain, 2, 10, 1),
        ];
        let mut found: Vec<_> = one_for_each_action(all)
            .iter()
            .map(|entry| (entry.space, entry.hash.0[0], entry.older.iter().map(|old| old.used).collect::<Vec<_>>()))
            .collect();
        found.sort_by_key(|(space, hash, _)| (*space as u8, *hash));
        let none = Vec::<i128>::new();
        let cas = (Space::Cas, 1, none.clone());
        let raw = |hash| (Space::Raw, hash, none.clone());
        assert_eq!(found, [cas.clone(), cas, (Space::Action, 1, vec![5]), raw(1), raw(2)]);
    }

    /// Goal: a file that is never stored leaves its room to others. Method: the newest is too large by its name, then longer than
    /// its content can be.
    #[test]
    fn what_is_too_large_takes_no_room() {
        let good = entry(Space::Cas, Form::Casblob(1 << 20), 1, 100_000, 1);
        let room = 2 * space_of(&good) + (2 << 20);
        for (size, len) in [(3 << 20, 3 << 20), (1 << 62, 100), (1 << 20, 1 << 40), (1000, 1 << 40)] {
            let newest = entry(Space::Cas, Form::Casblob(size), 2, len, 2);
            let (fit, left) = newest_that_fit(vec![good.clone(), newest.clone()], room, 2 << 20);
            assert_eq!((fit, left), (vec![newest, good.clone()], vec![]), "{size} bytes in {len}");
        }
    }

    /// Goal: what was used last is kept, in the space that it takes at rest. Method: small and large files by hand.
    #[test]
    fn the_newest_fit() {
        let all = || (0..10).map(|n| entry(Space::Cas, Form::Casblob(1 << 20), n, 100_000, i128::from(n))).collect();
        // Two chunks, and a commit of four frames.
        let each = space_of(&entry(Space::Cas, Form::Casblob(1 << 20), 0, 100_000, 0));
        assert_eq!(each, (128 << 10) + 192 + 16);
        let (fit, left) = newest_that_fit(all(), 3 * each, 1 << 20);
        assert_eq!(fit.iter().map(|entry| entry.used).collect::<Vec<_>>(), [9, 8, 7]);
        assert_eq!(left.len(), 7);
        assert_eq!(newest_that_fit(all(), u64::MAX, 1 << 20).1, []);
        assert_eq!(newest_that_fit(all(), each - 1, 1 << 20).0, []);
        assert_eq!(space_of(&entry(Space::Action, Form::Plain, 0, 1000, 0)), 1088 + 16);
    }
}
