//! Which segments are free, who has the others, and what is evicted next: segments in the order of their leases (FIFO), with
//! one second chance for each entry that was used meanwhile.

use std::collections::{BTreeMap, VecDeque};

use super::index::Word;
use super::segment::Class;
use super::shard_map::ShardId;

/// What becomes of an entry when its log segment is reclaimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// A later record has taken its place, or it was removed.
    Gone,
    /// Copied forward, mark cleared.
    Keep,
    Evict,
}

/// The fate of an entry whose record is at `location`, from what the index says now. A large blob's commit is always kept: the
/// blob lives and dies with its chunks.
pub fn log_fate(now: Option<Word>, location: u64, force: bool) -> Fate {
    match now {
        Some(word) if word.location() == location => {
            if word.is_large() || (word.is_marked() && !force) {
                Fate::Keep
            } else {
                Fate::Evict
            }
        }
        _ => Fate::Gone,
    }
}

/// The fate of a large blob when the chunk segment of its first chunk is reclaimed.
pub fn blob_fate(now: Option<Word>, force: bool) -> Fate {
    match now {
        Some(word) if word.is_large() => {
            if word.is_marked() && !force {
                Fate::Keep
            } else {
                Fate::Evict
            }
        }
        _ => Fate::Gone,
    }
}

/// A segment given to a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    pub segment: u32,
    pub shard: ShardId,
    pub class: Class,
    /// Never used twice.
    pub generation: u64,
}

/// A request to empty a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    pub segment: u32,
    pub shard: ShardId,
    /// Marks spare nothing.
    pub force: bool,
}

/// How an order ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing of the segment is in use.
    Freed,
    /// Something in it is still in use.
    Kept,
    /// The segment's disk region is bad: never to be leased again.
    Retired,
}

/// A lease request that waits, as its asker names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiter {
    pub id: u64,
    pub shard: ShardId,
    pub class: Class,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Leased { shard: ShardId, order: u64 },
    Reclaiming { shard: ShardId },
    Retired,
}

/// The pool's state machine. It decides; the caller carries messages.
///
/// Invariant: each segment is in exactly one state; `free` and `by_age` list the free and the leased ones.
pub struct Pool {
    states: Vec<State>,
    free: VecDeque<u32>,
    by_age: BTreeMap<u64, u32>,
    waiting: VecDeque<Waiter>,
    /// The number of the next lease and the next place in the order of ages.
    next: u64,
    reclaiming: usize,
    lap: Lap,
}

/// One round through all leased segments, oldest first.
#[derive(Debug, Clone, Copy)]
struct Lap {
    /// Ages from here on belong to the next lap.
    end: u64,
    freed: bool,
    force: bool,
    /// The last lap freed nothing although it was forced (or nobody waits): wait for news.
    idle: bool,
}

/// More than the leases that a crash can have left without a header, and so without a trace: their numbers are skipped.
const LOST_LEASES_MAX: u64 = 1 << 16;
/// Most reclaim orders that run at a time, and most segments in the reserve: each order may need one.
pub const RECLAIMS_MAX: usize = 4;

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Grant(Waiter, Lease),
    Reclaim(Order),
    /// Nothing can be freed now: tell this one.
    Refuse(Waiter),
}

impl Pool {
    /// A pool of `segments`, of which `leased` (with their generations) are in use.
    pub fn new(segments: u32, leased: impl IntoIterator<Item = Lease>) -> Self {
        let mut pool = Self {
            states: vec![State::Free; segments as usize],
            free: VecDeque::new(),
            by_age: BTreeMap::new(),
            waiting: VecDeque::new(),
            next: 1,
            reclaiming: 0,
            lap: Lap { end: 0, freed: false, force: false, idle: false },
        };
        let mut leased: Vec<Lease> = leased.into_iter().collect();
        leased.sort_unstable_by_key(|lease| lease.generation);
        for (age, lease) in (1..).zip(&leased) {
            pool.states[lease.segment as usize] = State::Leased { shard: lease.shard, order: age };
            pool.by_age.insert(age, lease.segment);
            pool.next = pool.next.max(lease.generation + LOST_LEASES_MAX).max(age + 1);
        }
        pool.free.extend((0..segments).filter(|&segment| pool.states[segment as usize] == State::Free));
        pool
    }

    /// Free segments that only reclaim may lease, so that it can always copy forward.
    pub fn reserve(&self) -> usize {
        (self.states.len() / 32).clamp(1, RECLAIMS_MAX)
    }

    /// Free segments beyond the reserve that are kept ready for appends.
    fn headroom(&self) -> usize {
        (self.states.len() / 128).clamp(1, 32)
    }

    /// Asks for a segment; `next_step` grants or refuses it.
    pub fn ask(&mut self, waiter: Waiter) {
        self.waiting.push_back(waiter);
        self.lap.idle = false;
    }

    /// A segment for a reclaim that copies forward, at once or never: a reclaim must not wait for another.
    pub fn lease_for_reclaim(&mut self, shard: ShardId, class: Class) -> Option<Lease> {
        self.lease(shard, class)
    }

    /// An order has ended.
    pub fn reclaimed(&mut self, segment: u32, outcome: Outcome) {
        let State::Reclaiming { shard } = self.states[segment as usize] else { return };
        self.reclaiming -= 1;
        match outcome {
            Outcome::Freed => self.put_free(segment),
            Outcome::Kept => {
                self.states[segment as usize] = State::Leased { shard, order: self.next };
                self.by_age.insert(self.next, segment);
                self.next += 1;
            }
            Outcome::Retired => self.states[segment as usize] = State::Retired,
        }
    }

    /// A shard gives a segment back, or gives it up, on its own account.
    pub fn returned(&mut self, segment: u32, outcome: Outcome) {
        let State::Leased { order, .. } = self.states[segment as usize] else { return };
        match outcome {
            Outcome::Freed => {
                self.by_age.remove(&order);
                self.put_free(segment);
            }
            Outcome::Retired => {
                self.by_age.remove(&order);
                self.states[segment as usize] = State::Retired;
            }
            Outcome::Kept => {}
        }
    }

    /// What to do next; `None` until something else is reported. After `Refuse`, give the refused one's space time to come
    /// back before asking again.
    pub fn next_step(&mut self) -> Option<Step> {
        if self.free.len() > self.reserve()
            && let Some(waiter) = self.waiting.pop_front()
        {
            let lease = self.lease(waiter.shard, waiter.class)?;
            return Some(Step::Grant(waiter, lease));
        }
        if self.free.len() + self.reclaiming >= self.reserve() + self.headroom() + self.waiting.len().min(RECLAIMS_MAX)
            || self.reclaiming >= self.reserve()
            || self.lap.idle
        {
            return None;
        }
        self.next_order()
    }

    fn next_order(&mut self) -> Option<Step> {
        loop {
            let oldest = self.by_age.first_key_value().map(|(&age, &segment)| (age, segment));
            if let Some((age, segment)) = oldest
                && age < self.lap.end
            {
                self.by_age.remove(&age);
                let State::Leased { shard, .. } = self.states[segment as usize] else {
                    unreachable!("by_age lists leased segments only")
                };
                self.states[segment as usize] = State::Reclaiming { shard };
                self.reclaiming += 1;
                return Some(Step::Reclaim(Order { segment, shard, force: self.lap.force }));
            }
            // The lap is over once its last orders have ended.
            if self.reclaiming > 0 {
                return None;
            }
            let was = self.lap;
            let force = !was.freed && was.end > 0;
            if was.force && !was.freed || oldest.is_none() {
                self.lap = Lap { end: 0, freed: false, force: false, idle: true };
                let refused = self.pick_refused();
                self.lap.idle = refused.is_none() || self.waiting.is_empty();
                return refused.map(Step::Refuse);
            }
            if force && self.waiting.is_empty() {
                self.lap = Lap { end: 0, freed: false, force: false, idle: true };
                return None;
            }
            self.lap = Lap { end: self.next, freed: false, force, idle: false };
        }
    }

    /// Who is told that there is nothing: the last to ask, and rather a large blob, whose end gives space back.
    fn pick_refused(&mut self) -> Option<Waiter> {
        let large = self.waiting.iter().rposition(|waiter| waiter.class == Class::Chunks);
        self.waiting.remove(large.or(self.waiting.len().checked_sub(1))?)
    }

    fn lease(&mut self, shard: ShardId, class: Class) -> Option<Lease> {
        let segment = self.free.pop_front()?;
        let generation = self.next;
        self.next += 1;
        self.states[segment as usize] = State::Leased { shard, order: generation };
        self.by_age.insert(generation, segment);
        Some(Lease { segment, shard, class, generation })
    }

    fn put_free(&mut self, segment: u32) {
        self.states[segment as usize] = State::Free;
        self.free.push_back(segment);
        self.lap.freed = true;
        self.lap.idle = false;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    impl Pool {
        fn check(&self) {
            let free: BTreeSet<u32> = self.free.iter().copied().collect();
            assert_eq!(free.len(), self.free.len(), "a segment is free twice");
            let mut reclaiming = 0;
            for (segment, state) in (0..).zip(&self.states) {
                assert_eq!(free.contains(&segment), *state == State::Free);
                match state {
                    State::Leased { order, .. } => assert_eq!(self.by_age.get(order), Some(&segment)),
                    State::Reclaiming { .. } => reclaiming += 1,
                    State::Free | State::Retired => {}
                }
            }
            assert_eq!(reclaiming, self.reclaiming);
            let leased = self.states.iter().filter(|state| matches!(state, State::Leased { .. })).count();
            assert_eq!(leased, self.by_age.len());
        }
    }

    fn waiter(id: u64) -> Waiter {
        Waiter { id, shard: ShardId((id % 4) as u16), class: Class::Log }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Goal: no segment has two holders, generations only grow, every request is answered in bounded steps, and one is
        /// refused only after a forced lap in which nothing could be freed. Method: random askers and a world in which a random
        /// set of segments is pinned, another is used once; the invariant is checked after each step.
        #[test]
        fn every_request_is_answered(segments in 4u32..60, pinned in proptest::collection::vec(any::<bool>(), 60), asks in 1u64..150, used in any::<u64>()) {
            let mut pool = Pool::new(segments, []);
            let mut last_generation = 0;
            let mut held = BTreeSet::new();
            let mut spared = used;
            for id in 0..asks {
                pool.ask(waiter(id));
                let mut answered = false;
                let mut steps = 0;
                let mut freed_since_force = false;
                while let Some(step) = pool.next_step() {
                    steps += 1;
                    prop_assert!(steps < 10 * segments + 20, "no end");
                    match step {
                        Step::Grant(_, lease) => {
                            prop_assert!(held.insert(lease.segment), "leased twice");
                            prop_assert!(lease.generation > last_generation);
                            last_generation = lease.generation;
                            answered = true;
                        }
                        Step::Refuse(_) => {
                            prop_assert!(!freed_since_force);
                            prop_assert!(held.iter().all(|&segment| pinned[segment as usize]), "refused although something could go");
                            answered = true;
                        }
                        Step::Reclaim(order) => {
                            let spare = spared & 1 == 1 && !order.force;
                            spared = spared.rotate_right(1);
                            let outcome = if pinned[order.segment as usize] || spare { Outcome::Kept } else { Outcome::Freed };
                            if outcome == Outcome::Freed {
                                freed_since_force = true;
                                held.remove(&order.segment);
                            } else if order.force {
                                freed_since_force = false;
                            }
                            pool.reclaimed(order.segment, outcome);
                        }
                    }
                    pool.check();
                }
                prop_assert!(answered, "request {} of {} has no answer", id, asks);
            }
        }

        /// Goal: eviction follows the age of leases. Method: all leased at start in random order of generations; orders come
        /// in that order.
        #[test]
        fn the_oldest_goes_first(generations in proptest::collection::btree_set(1u64..10_000, 8..40), seed in any::<u64>()) {
            let segments = generations.len() as u32;
            let mut numbers: Vec<u32> = (0..segments).collect();
            numbers.sort_by_key(|&n| (u64::from(n) + 1).wrapping_mul(seed | 1));
            let leases: Vec<_> = generations.iter().zip(&numbers).map(|(&generation, &segment)| Lease { segment, shard: ShardId(0), class: Class::Log, generation }).collect();
            let mut pool = Pool::new(segments, leases.iter().rev().copied());
            let mut order = Vec::new();
            pool.ask(waiter(0));
            while order.len() < 4 {
                let Some(Step::Reclaim(next)) = pool.next_step() else { break };
                order.push(next.segment);
            }
            prop_assert!(!order.is_empty());
            prop_assert_eq!(&order[..], &numbers[..order.len()]);
        }
    }

    /// Goal: several askers that hold everything between them do not wait for each other for ever. Method: everything is
    /// pinned by uploads; three ask; all but those that fit are refused one by one, the last first.
    #[test]
    fn a_deadlock_is_refused() {
        let mut pool = Pool::new(
            8,
            (0..8).map(|n| Lease { segment: n, shard: ShardId(0), class: Class::Chunks, generation: n.into() }),
        );
        (0..3).for_each(|id| pool.ask(waiter(id)));
        let mut refused = Vec::new();
        while let Some(step) = pool.next_step() {
            match step {
                Step::Reclaim(order) => pool.reclaimed(order.segment, Outcome::Kept),
                Step::Refuse(waiter) => {
                    refused.push(waiter.id);
                    if refused.len() == 1 {
                        (0..3).for_each(|segment| pool.returned(segment, Outcome::Freed));
                    }
                }
                Step::Grant(waiter, _) => assert!(waiter.id < 2),
            }
            pool.check();
        }
        assert_eq!(refused, [2]);
    }
}
