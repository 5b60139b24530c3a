//! What a backend has said about the presence of objects: its answers, each with an expiry, in a bounded table.

use std::time::Duration;

use rustc_hash::FxHashMap;

use super::digest::Hash;

/// What a backend has said of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    Present,
    Absent,
    /// We may not look: some stores say so of what they do not have, and every one when it has doubts about who asks.
    Denied,
}

/// How long an answer is believed, and how many are kept.
#[derive(Debug, Clone, Copy)]
pub struct ExistenceLimits {
    /// At least 2.
    pub count: usize,
    pub present: Duration,
    /// And denied.
    pub absent: Duration,
}

/// The answers. Two tables of half the size each: when the newer is full, the older is dropped. So the bound holds
/// without an order of use, and what was learned last stays longest.
#[derive(Debug)]
pub struct Existence {
    limits: ExistenceLimits,
    newer: FxHashMap<Hash, Answer>,
    older: FxHashMap<Hash, Answer>,
}

#[derive(Debug, Clone, Copy)]
struct Answer {
    presence: Presence,
    /// On the caller's clock.
    until: Duration,
}

impl Existence {
    pub fn new(limits: ExistenceLimits) -> Self {
        Self { limits, newer: FxHashMap::default(), older: FxHashMap::default() }
    }

    /// What is known of `hash` at `now` (time since any fixed point).
    pub fn get(&self, hash: &Hash, now: Duration) -> Option<Presence> {
        let answer = self.newer.get(hash).or_else(|| self.older.get(hash))?;
        (now < answer.until).then_some(answer.presence)
    }

    /// The backend said this of `hash`.
    pub fn learn(&mut self, hash: Hash, presence: Presence, now: Duration) {
        if self.newer.len() >= self.limits.count / 2 && !self.newer.contains_key(&hash) {
            self.older = std::mem::take(&mut self.newer);
        }
        let keep = match presence {
            Presence::Present => self.limits.present,
            Presence::Absent | Presence::Denied => self.limits.absent,
        };
        self.newer.insert(hash, Answer { presence, until: now + keep });
    }

    /// Nothing is known of `hash` any more: an object was found wrong.
    pub fn forget(&mut self, hash: &Hash) {
        self.newer.remove(hash);
        self.older.remove(hash);
    }

    /// Answers kept.
    pub fn len(&self) -> usize {
        self.newer.len() + self.older.len()
    }

    /// True when nothing is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::SplitMix64;
    use super::*;

    const LIMITS: ExistenceLimits =
        ExistenceLimits { count: 16, present: Duration::from_secs(100), absent: Duration::from_secs(10) };

    /// Goal: the table never says what the backend did not say within the answer's time, and stays within its bound.
    /// Method: seeded walks against a list of all answers.
    #[test]
    fn says_only_what_was_learned_in_time() {
        for seed in 0..100 {
            let mut random = SplitMix64(seed);
            let mut existence = Existence::new(LIMITS);
            let mut learned: Vec<(Hash, Presence, Duration)> = Vec::new();
            let mut now = Duration::ZERO;
            for _ in 0..1_000 {
                now += Duration::from_secs(random.below(4));
                let hash = Hash([random.below(30) as u8; 32]);
                match random.below(4) {
                    0 => {
                        existence.forget(&hash);
                        learned.retain(|(known, ..)| *known != hash);
                        assert_eq!(existence.get(&hash, now), None);
                    }
                    1 => {
                        let all = [Presence::Present, Presence::Absent, Presence::Denied];
                        let presence = all[random.below(3) as usize];
                        existence.learn(hash, presence, now);
                        learned.retain(|(known, ..)| *known != hash);
                        learned.push((hash, presence, now));
                        assert_eq!(existence.get(&hash, now), Some(presence), "seed {seed}");
                    }
                    _ => {
                        let Some(presence) = existence.get(&hash, now) else { continue };
                        let truth = learned.iter().find(|(known, ..)| *known == hash).expect("it was learned");
                        let keep = if presence == Presence::Present { LIMITS.present } else { LIMITS.absent };
                        assert!(truth.1 == presence && now < truth.2 + keep, "seed {seed}");
                    }
                }
                assert!(existence.len() <= LIMITS.count, "seed {seed}");
            }
            assert!(!existence.is_empty());
        }
    }

    /// Goal: what was learned last stays, and what is learned again drives nothing out. Method: more hashes than are kept; then the
    /// last ones again.
    #[test]
    fn what_was_learned_last_stays() {
        let (mut existence, half) = (Existence::new(LIMITS), LIMITS.count as u8 / 2);
        let known = |existence: &Existence, from: u8, to: u8| {
            (from..to).filter(|&n| existence.get(&Hash([n; 32]), Duration::ZERO).is_some()).count()
        };
        for n in 1..=104 {
            existence.learn(Hash([n; 32]), Presence::Present, Duration::ZERO);
            assert_eq!(known(&existence, n.saturating_sub(half), n + 1), usize::from(n.min(half + 1)), "{n}");
        }
        let before = existence.len();
        (97..=104).for_each(|n| existence.learn(Hash([n; 32]), Presence::Absent, Duration::ZERO));
        assert_eq!((known(&existence, 0, 105), existence.len()), (before, before));
    }

    /// Goal: each kind of answer is believed for its own time to the last moment and no longer, counted from when it was learned
    /// last. Method: looks around the end of each, and an answer that is learned again.
    #[test]
    fn answers_expire() {
        let (mut existence, hash, moment) = (Existence::new(LIMITS), Hash([1; 32]), Duration::from_nanos(1));
        let all = [Presence::Present, Presence::Absent, Presence::Denied];
        for (presence, keep) in all.into_iter().zip([LIMITS.present, LIMITS.absent, LIMITS.absent]) {
            for begun in [0, 7, 500].map(Duration::from_secs) {
                existence.learn(hash, presence, begun);
                assert_eq!(existence.get(&hash, begun + keep - moment), Some(presence));
                assert_eq!(existence.get(&hash, begun + keep), None);
            }
        }
    }
}
