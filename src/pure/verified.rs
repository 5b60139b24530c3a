//! Remembers for a while which passwords were right, and which were wrong, so that none is hashed twice.

use std::collections::HashMap;

/// A name for a user with a password: a keyed hash of both, from which neither can be told.
pub type Fingerprint = [u8; 32];

/// What was found of at most `max` fingerprints, each for `keep_ms`.
///
/// Why two halves: when one is full, the older one goes as a whole. What is asked for again moves to the younger one.
#[derive(Debug)]
pub struct Verified<T> {
    young: HashMap<Fingerprint, (T, u64)>,
    old: HashMap<Fingerprint, (T, u64)>,
    half_max: usize,
    keep_ms: u64,
}

impl<T: Copy> Verified<T> {
    pub fn new(max: usize, keep_ms: u64) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), half_max: (max / 2).max(1), keep_ms }
    }

    /// What was found, if that is not too long ago.
    pub fn get(&mut self, of: &Fingerprint, now_ms: u64) -> Option<T> {
        if let Some(&(found, until_ms)) = self.young.get(of) {
            return (now_ms < until_ms).then_some(found);
        }
        let (found, until_ms) = self.old.remove(of)?;
        if now_ms >= until_ms {
            return None;
        }
        self.insert(*of, found, until_ms);
        Some(found)
    }

    pub fn put(&mut self, of: Fingerprint, found: T, now_ms: u64) {
        self.old.remove(&of);
        self.insert(of, found, now_ms.saturating_add(self.keep_ms));
    }

    fn insert(&mut self, of: Fingerprint, found: T, until_ms: u64) {
        if self.young.len() >= self.half_max && !self.young.contains_key(&of) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(of, (found, until_ms));
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: what was found holds for its time and no longer, whatever is asked meanwhile; there are never more than `max`;
    /// what is used stays. Method: walk through the times with one that is asked for all along, among many that are not.
    #[test]
    fn is_bounded_in_number_and_time() {
        let name = |number: u32| {
            let mut name = [0; 32];
            name[..4].copy_from_slice(&number.to_le_bytes());
            name
        };
        let mut verified = Verified::new(8, 100);
        verified.put(name(0), true, 0);
        for number in 1..90 {
            verified.put(name(number), false, u64::from(number));
            assert_eq!(verified.get(&name(0), u64::from(number)), Some(true), "{number}");
            assert_eq!(verified.get(&name(number), u64::from(number)), Some(false));
            assert!(verified.len() <= 8);
        }
        assert_eq!((verified.get(&name(1), 90), verified.get(&name(1000), 90)), (None, None));
        assert_eq!((verified.get(&name(0), 99), verified.get(&name(0), 100)), (Some(true), None));
        verified.put(name(0), false, 100);
        assert_eq!((verified.get(&name(0), 199), verified.get(&name(0), 200)), (Some(false), None));
    }

    /// Goal: the older half expires like the younger one, and what is found once more drives nothing out. Method: both halves full,
    /// and the younger one put again.
    #[test]
    fn both_halves_hold_for_their_time() {
        let mut verified = Verified::new(8, 100);
        let name = |number: u8| [number; 32];
        for (number, now_ms) in [(0, 0), (1, 0), (2, 0), (3, 10), (4, 10), (5, 10), (6, 10), (7, 10), (4, 20), (7, 20)]
        {
            verified.put(name(number), number, now_ms);
        }
        assert_eq!((verified.get(&name(0), 100), verified.get(&name(3), 100)), (None, Some(3)));
    }
}
