//! The RAM tier of one core: small records as they stand at rest, within an exact budget of bytes.

use std::collections::HashMap;
use std::hash::RandomState;

use bytes::Bytes;

use super::blob_disk::Record;
use super::disk::{Key, Kind};
use crate::limits::RAM_RECORD_LEN_MAX;
use crate::pure::digest::Hash;

/// What an entry costs besides its payload, in bytes: slot, table entry at its worst load, and two allocations.
pub const ENTRY_OVERHEAD: usize = 384;

const _: () = assert!(size_of::<Slot>() + 5 * (size_of::<(Name, u32)>() + 1) / 2 + 2 * 48 <= ENTRY_OVERHEAD);

/// What entries are found by: a `Key` without its size. An action's is no part of its name, and a blob has only one.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Name {
    kind: Kind,
    hash: Hash,
}

impl From<&Key> for Name {
    fn from(key: &Key) -> Self {
        Self { kind: key.kind, hash: key.hash }
    }
}

struct Slot {
    name: Name,
    record: Record,
    /// Asked for since the hand last passed.
    used: bool,
}

/// What happened so far, and what is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RamStats {
    pub hits: u64,
    pub misses: u64,
    pub evicted: u64,
    pub entries: u64,
    /// Payload and overhead, in bytes; never more than the budget.
    pub bytes: u64,
}

/// Evicts by CLOCK: a hand goes round the slots, spares an entry that was used since it last passed, and takes the
/// first that was not.
///
/// Why not LRU: a hit writes one flag and no list, and the hit rate is the same (storage-study C).
pub struct RamTier {
    /// Bytes that entries may cost together.
    budget: usize,
    bytes: usize,
    // Why a keyed hasher: clients choose the hashes of actions freely.
    by_name: HashMap<Name, u32, RandomState>,
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    hand: usize,
    hits: u64,
    misses: u64,
    evicted: u64,
}

impl RamTier {
    /// An empty tier. A budget of 0 holds nothing.
    pub fn new(budget: usize) -> Self {
        Self {
            budget,
            bytes: 0,
            by_name: HashMap::default(),
            slots: Vec::new(),
            free: Vec::new(),
            hand: 0,
            hits: 0,
            misses: 0,
            evicted: 0,
        }
    }

    /// The record, if it is here. Marks it as used.
    pub fn get(&mut self, key: &Key) -> Option<Record> {
        let slot = self.by_name.get(&key.into()).and_then(|&at| self.slots[at as usize].as_mut());
        let fits = |slot: &&mut Slot| key.kind.is_action() || slot.record.key_size == key.size;
        let Some(slot) = slot.filter(fits) else {
            self.misses += 1;
            return None;
        };
        self.hits += 1;
        slot.used = true;
        Some(slot.record.clone())
    }

    /// The size of the blob with this hash, if it is here. No use of it: who asks reads it next.
    pub fn size_of(&self, hash: &Hash) -> Option<u64> {
        let &at = self.by_name.get(&Name { kind: Kind::Cas, hash: *hash })?;
        self.slots[at as usize].as_ref().map(|slot| slot.record.key_size)
    }

    /// True when `insert` would take a record of this length.
    pub fn takes(&self, len: usize) -> bool {
        len <= RAM_RECORD_LEN_MAX && len + ENTRY_OVERHEAD <= self.budget
    }

    /// Keeps a record, in the place of one with the same key. `record.data` must own its memory (`own`): a slice of a
    /// network or disk buffer would pin all of it.
    pub fn insert(&mut self, key: &Key, record: Record) {
        self.remove(key);
        if !self.takes(record.data.len()) {
            return;
        }
        let cost = cost(&record);
        while self.bytes + cost > self.budget {
            self.evict_one();
        }
        let name = Name::from(key);
        let slot = Some(Slot { name, record, used: false });
        let at = match self.free.pop() {
            Some(at) => {
                self.slots[at as usize] = slot;
                at
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        };
        self.by_name.insert(name, at);
        self.bytes += cost;
    }

    /// Drops the record, if it is here.
    pub fn remove(&mut self, key: &Key) {
        if let Some(at) = self.by_name.remove(&key.into()) {
            self.clear(at as usize);
        }
    }

    pub fn stats(&self) -> RamStats {
        RamStats {
            hits: self.hits,
            misses: self.misses,
            evicted: self.evicted,
            entries: self.by_name.len() as u64,
            bytes: self.bytes as u64,
        }
    }

    /// Moves the hand to an entry that was not used lately and drops it. Something must be held.
    fn evict_one(&mut self) {
        debug_assert!(!self.by_name.is_empty());
        loop {
            let at = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            let Some(slot) = &mut self.slots[at] else { continue };
            if std::mem::take(&mut slot.used) {
                continue;
            }
            let name = slot.name;
            self.by_name.remove(&name);
            self.clear(at);
            self.evicted += 1;
            return;
        }
    }

    fn clear(&mut self, at: usize) {
        if let Some(slot) = self.slots[at].take() {
            self.bytes -= cost(&slot.record);
            self.free.push(at as u32);
        }
    }
}

/// One copy of `pieces` in memory of its own.
pub fn own(pieces: &[impl AsRef<[u8]>]) -> Bytes {
    let mut owned = Vec::with_capacity(pieces.iter().map(|piece| piece.as_ref().len()).sum());
    pieces.iter().for_each(|piece| owned.extend_from_slice(piece.as_ref()));
    owned.into()
}

fn cost(record: &Record) -> usize {
    record.data.len() + ENTRY_OVERHEAD
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pure::purge::Origin;
    use crate::shard::disk::Codec;

    fn key(n: u8, action: bool) -> Key {
        let kind = if action { Kind::Action } else { Kind::Cas };
        Key { kind, hash: Hash([n; 32]), size: u64::from(n) }
    }

    fn record(key: &Key, len: usize, version: u64) -> Record {
        let data = own(&[vec![version as u8; len]]);
        Record { codec: Codec::Raw, raw_len: len as u64, data, version, key_size: key.size, origin: Origin::default() }
    }

    proptest! {
        /// Goal: the tier never holds more than its budget, counts exactly, and returns only what was put last.
        /// Method: random calls against a plain map that forgets nothing; a hit must be the map's value.
        #[test]
        fn is_a_bounded_map(
            budget in 0usize..6000,
            steps in proptest::collection::vec((0u8..4, 0u8..24, any::<bool>(), 0usize..900), 1..300),
        ) {
            let mut tier = RamTier::new(budget);
            let mut model: HashMap<(u8, bool), u64> = HashMap::new();
            for (version, (step, n, action, len)) in steps.into_iter().enumerate() {
                let key = key(n, action);
                match step {
                    0 => {
                        tier.remove(&key);
                        model.remove(&(n, action));
                    }
                    1 => {
                        tier.insert(&key, record(&key, len, version as u64));
                        model.insert((n, action), version as u64);
                    }
                    _ => {
                        if let Some(found) = tier.get(&key) {
                            prop_assert_eq!(Some(&found.version), model.get(&(n, action)));
                            prop_assert!(found.data.iter().all(|&byte| byte == found.version as u8));
                        }
                    }
                }
                let held: usize = tier.slots.iter().flatten().map(|slot| cost(&slot.record)).sum();
                prop_assert_eq!(held, tier.bytes);
                prop_assert!(tier.bytes <= budget);
                prop_assert_eq!(tier.by_name.len() + tier.free.len(), tier.slots.len());
            }
        }
    }

    /// Goal: what is asked for again outlives what is not. Method: one hot entry, and a stream of cold ones five times
    /// the budget.
    #[test]
    fn a_hot_entry_stays() {
        let mut tier = RamTier::new(8 * (100 + ENTRY_OVERHEAD));
        tier.insert(&key(200, false), record(&key(200, false), 100, 7));
        for n in 0..40 {
            assert_eq!(tier.get(&key(200, false)).map(|found| found.version), Some(7), "after {n} cold ones");
            tier.insert(&key(n, false), record(&key(n, false), 100, 1));
        }
        assert_eq!(tier.stats().entries, 8);
        assert_eq!(tier.stats().evicted, 33);
    }

    /// Goal: an action is found whatever size its key carries, a blob by its own size or by none. Method: insert with one
    /// size, ask with another.
    #[test]
    fn the_size_is_no_part_of_an_actions_name() {
        let mut tier = RamTier::new(1 << 20);
        tier.insert(&key(1, true), record(&key(1, true), 10, 3));
        assert!(tier.get(&Key { size: 99, ..key(1, true) }).is_some());
        tier.insert(&key(1, false), record(&key(1, false), 10, 4));
        assert!(tier.get(&Key { size: 99, ..key(1, false) }).is_none());
        assert_eq!(tier.size_of(&Hash([1; 32])), Some(1));
        assert_eq!(tier.size_of(&Hash([2; 32])), None);
    }
}
