//! Notices changes of actions while they are read.

use std::cell::Cell;

use super::disk::Key;

/// Counts changes of actions, by the first byte of the hash, so that a read that began before a change does not put
/// what it found into the RAM tier after it.
pub struct Fences([Cell<u64>; 256]);

impl Default for Fences {
    fn default() -> Self {
        Self([const { Cell::new(0) }; 256])
    }
}

impl Fences {
    pub fn change(&self, key: &Key) {
        let fence = self.of(key);
        fence.set(fence.get() + 1);
    }

    pub fn now(&self, key: &Key) -> u64 {
        self.of(key).get()
    }

    pub fn is_at(&self, key: &Key, seen: u64) -> bool {
        self.now(key) == seen
    }

    /// Why the last byte: the first ones are the shard's and differ little within a core.
    fn of(&self, key: &Key) -> &Cell<u64> {
        &self.0[usize::from(key.hash.0[31])]
    }
}
