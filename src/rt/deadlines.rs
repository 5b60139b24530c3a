//! The deadlines of one core, in order of time. No clock and no runtime in here: `pulse` drives it.

use std::collections::BTreeMap;
use std::task::Waker;
use std::time::Instant;

/// Names one deadline: when it is due, and a number that tells apart those due at the same instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    at: Instant,
    number: u64,
}

/// Who is to be woken when.
#[derive(Debug, Default)]
pub struct Deadlines {
    waiting: BTreeMap<Key, Waker>,
    numbers: u64,
}

impl Deadlines {
    /// Adds a deadline.
    pub fn insert(&mut self, at: Instant, waker: Waker) -> Key {
        self.numbers += 1;
        let key = Key { at, number: self.numbers };
        self.waiting.insert(key, waker);
        key
    }

    /// Wakes somebody else from now on. No effect when the deadline has passed already.
    pub fn set_waker(&mut self, key: Key, waker: &Waker) {
        if let Some(known) = self.waiting.get_mut(&key) {
            known.clone_from(waker);
        }
    }

    /// Forgets a deadline, passed or not. The waker goes to the caller, who drops it outside of any borrow.
    pub fn remove(&mut self, key: Key) -> Option<Waker> {
        self.waiting.remove(&key)
    }

    /// The earliest deadline.
    pub fn next(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(key, _)| key.at)
    }

    /// Takes one deadline that is due.
    pub fn pop_due(&mut self, now: Instant) -> Option<Waker> {
        let first = self.waiting.first_entry()?;
        (first.key().at <= now).then(|| first.remove())
    }

    /// How many are waiting.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;
    use std::time::Duration;

    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Goal: deadlines come out in order of time, equal ones in order of insertion, and none before its time.
    /// Method: insert out of order, then pop at chosen instants.
    #[test]
    fn due_ones_come_in_order() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut deadlines = Deadlines::default();
        let counts: Vec<Arc<Count>> = (0..4).map(|_| Arc::new(Count(AtomicU32::new(0)))).collect();
        for (number, ms) in [(0, 30), (1, 10), (2, 20), (3, 10)] {
            deadlines.insert(at(ms), counts[number].clone().into());
        }
        assert_eq!(deadlines.next(), Some(at(10)));
        assert!(deadlines.pop_due(at(9)).is_none());
        let mut order = Vec::new();
        while let Some(waker) = deadlines.pop_due(at(20)) {
            waker.wake();
            order.push(counts.iter().map(|count| count.0.load(Ordering::Relaxed)).collect::<Vec<_>>());
        }
        assert_eq!(order, [[0, 1, 0, 0], [0, 1, 0, 1], [0, 1, 1, 1]]);
        assert_eq!(deadlines.next(), Some(at(30)));
    }

    /// Goal: a removed deadline wakes nobody, and a passed one can still be named without harm.
    /// Method: remove one, pop the other, then use both keys again.
    #[test]
    fn removed_and_passed_keys_are_harmless() {
        let start = Instant::now();
        let mut deadlines = Deadlines::default();
        let gone = deadlines.insert(start, Waker::noop().clone());
        let passed = deadlines.insert(start, Waker::noop().clone());
        assert!(deadlines.remove(gone).is_some());
        assert!(deadlines.pop_due(start).is_some());
        assert!(deadlines.pop_due(start).is_none());
        deadlines.set_waker(passed, Waker::noop());
        assert!(deadlines.remove(passed).is_none());
        assert_eq!(deadlines.len(), 0);
    }
}
