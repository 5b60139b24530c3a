//! Objects of a backend that were found wrong, in a bounded set.

use rustc_hash::FxHashSet;

use super::digest::Hash;

/// What is wrong with an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// Its bytes are not what the hash says.
    Content,
    /// It has another size than its reader said. Who is wrong is not known: any client may ask for any size, and must not
    /// hide the object from those who name the right one.
    Size,
}

/// The objects by their keys, each for the size that was asked for, or for any.
///
/// Why two halves: when the newer is full, the older is dropped. So the newest are always known; what was forgotten is
/// found out again by its next reader.
#[derive(Debug)]
pub struct WrongObjects {
    newer: FxHashSet<(Hash, Option<u64>)>,
    older: FxHashSet<(Hash, Option<u64>)>,
    half_max: usize,
}

impl WrongObjects {
    /// `max` are kept, at least 2.
    pub fn new(max: usize) -> Self {
        Self { newer: FxHashSet::default(), older: FxHashSet::default(), half_max: max / 2 }
    }

    /// The object under `key` was found wrong by who asked for `size` bytes.
    pub fn note(&mut self, key: Hash, size: u64, flaw: Flaw) {
        let name = match flaw {
            Flaw::Content => (key, None),
            Flaw::Size => (key, Some(size)),
        };
        self.older.remove(&name);
        if self.newer.len() >= self.half_max && !self.newer.contains(&name) {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(name);
    }

    /// Whether it is wrong for who says that it has `size` bytes.
    pub fn contains(&self, key: Hash, size: u64) -> bool {
        // Why first: there are hardly ever any.
        !self.is_empty() && names(key, size).iter().any(|name| self.newer.contains(name) || self.older.contains(name))
    }

    /// It was replaced by one of `size` bytes.
    pub fn forget(&mut self, key: Hash, size: u64) {
        for name in names(key, size) {
            self.newer.remove(&name);
            self.older.remove(&name);
        }
    }

    /// How many are known.
    pub fn len(&self) -> usize {
        self.newer.len() + self.older.len()
    }

    /// True when none is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What may say that an object is wrong for this size.
fn names(key: Hash, size: u64) -> [(Hash, Option<u64>); 2] {
    [(key, None), (key, Some(size))]
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::super::random::SplitMix64;
    use super::*;

    /// Goal: a wrong size counts for that size alone; the newest are known whatever came before; the bound holds. Method: seeded
    /// walks against a list of all notes and one of the newest.
    #[test]
    fn the_newest_are_known() {
        const MAX: usize = 8;
        for seed in 0..100 {
            let mut random = SplitMix64(seed);
            let mut objects = WrongObjects::new(MAX);
            let (mut noted, mut newest) = (FxHashSet::default(), VecDeque::new());
            for _ in 0..500 {
                let (key, size) = (Hash([random.below(12) as u8; 32]), 1 + random.below(3));
                match random.below(4) {
                    0 => {
                        objects.forget(key, size);
                        noted.retain(|name| !names(key, size).contains(name));
                        newest.retain(|name| !names(key, size).contains(name));
                        assert!(!objects.contains(key, size), "seed {seed}");
                    }
                    number => {
                        let flaw = if number == 1 { Flaw::Content } else { Flaw::Size };
                        let name = (key, (flaw == Flaw::Size).then_some(size));
                        objects.note(key, size, flaw);
                        noted.insert(name);
                        newest.retain(|known| *known != name);
                        newest.push_front(name);
                        newest.truncate(MAX / 2);
                    }
                }
                assert!(objects.len() <= MAX, "seed {seed}");
                for &(key, size) in &newest {
                    assert!(objects.contains(key, size.unwrap_or(9)), "seed {seed}");
                }
                let (key, size) = (Hash([random.below(12) as u8; 32]), 1 + random.below(3));
                let is_noted = names(key, size).iter().any(|name| noted.contains(name));
                assert!(is_noted || !objects.contains(key, size), "seed {seed}");
            }
        }
    }

    /// Goal: what is noted once more drives nothing out, and is forgotten at once. Method: both halves full, all of them noted again.
    #[test]
    fn once_more_is_nothing_new() {
        let mut objects = WrongObjects::new(8);
        let known = |objects: &WrongObjects| (0..8).filter(|&number| objects.contains(Hash([number; 32]), 1)).count();
        for number in (0..8).chain(4..8) {
            objects.note(Hash([number; 32]), 1, Flaw::Content);
        }
        assert_eq!((known(&objects), objects.len()), (8, 8));
        objects.note(Hash([7; 32]), 1, Flaw::Size);
        assert_eq!((known(&objects), objects.len()), (4, 5), "the older half has made room");
        objects.note(Hash([6; 32]), 1, Flaw::Content);
        assert_eq!((known(&objects), objects.len()), (4, 5), "it is known once");
    }
}
