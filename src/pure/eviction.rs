//! Which segments are free, who has the others, and what is evicted next: the least recently used.
//!
//! Segments stand in a queue by the epoch since which nothing in them can go, and within an epoch by the age of their
//! leases. The first is to be emptied: its owner evicts what was last used before the cutoff of the order, which is at
//! most a little after that epoch, and either frees the segment or says in which epoch to look at it again. So what is
//! evicted was used less recently than something in every other segment; and among things used at the same time, those
//! that were written first go first.

use std::collections::{BTreeMap, VecDeque};

use super::recency::{EPOCHS_PER_VOLUME, Epoch};
use super::segment::Class;
use super::shard_map::ShardId;

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
    /// The epoch now.
    pub now: Epoch,
    /// What was last used before this epoch may go.
    pub cutoff: Epoch,
    /// Nothing else could be freed: what cannot be copied forward is evicted, too.
    pub force: bool,
}

/// How an order ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing of the segment is in use.
    Freed,
    /// What is left may go when what was last used in this epoch may. Some parts of `SEGMENT_PARTS` have been freed, and
    /// the owner fills them again.
    Kept { epoch: Epoch, freed_parts: u32 },
    /// What is left cannot go, whatever its age, as long as something else holds it.
    Pinned,
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

/// A leased segment's place in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    epoch: Epoch,
    /// Of the lease, as a rule: within an epoch the first written goes first.
    number: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Leased { shard: ShardId, place: Place },
    Reclaiming { shard: ShardId, place: Place },
    Retired,
}

/// The pool's state machine. It decides; the caller carries messages.
///
/// Invariant: each segment is in exactly one state; `free` and `queue` list the free and the leased ones.
pub struct Pool {
    states: Vec<State>,
    free: VecDeque<u32>,
    queue: BTreeMap<Place, u32>,
    waiting: VecDeque<Waiter>,
    /// The next number of a lease, or of a place in the queue.
    next: u64,
    /// Parts of segments that were given out up to now, as far as is known.
    clock: u64,
    reclaiming: usize,
    /// Orders that ended with `Pinned` since one freed its segment.
    in_vain: usize,
    /// Orders are forced: every leased segment has been tried in vain.
    force: bool,
    /// Nothing can be freed, and nobody waits: until there is news.
    idle: bool,
    /// Somebody has asked for a segment. Why: before that nothing is reclaimed ahead of need, so that opening a full cache
    /// evicts nothing.
    asked: bool,
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

/// In how many parts a segment is counted.
pub const SEGMENT_PARTS: u32 = 1024;

/// Parts of segments that are given out in an epoch.
fn epoch_len(segments: u32) -> u64 {
    (u64::from(segments) * u64::from(SEGMENT_PARTS) / EPOCHS_PER_VOLUME).max(1)
}

fn epoch_at(clock: u64, segments: u32) -> Epoch {
    Epoch(Epoch::FIRST.0 + clock / epoch_len(segments))
}

/// The segments that are leased at start-up, oldest first, with the epochs of their leases; then the epoch now.
pub fn epochs_at_start(segments: u32, leased: impl IntoIterator<Item = Lease>) -> (Vec<(Lease, Epoch)>, Epoch) {
    let mut leased: Vec<Lease> = leased.into_iter().collect();
    leased.sort_unstable_by_key(|lease| lease.generation);
    let epoch = |leases: u64| epoch_at(leases * u64::from(SEGMENT_PARTS), segments);
    let now = epoch(leased.len() as u64);
    (leased.into_iter().zip(0..).map(|(lease, before)| (lease, epoch(before))).collect(), now)
}

impl Pool {
    /// A pool of `segments`, of which `leased` (with their generations) are in use.
    pub fn new(segments: u32, leased: impl IntoIterator<Item = Lease>) -> Self {
        let mut pool = Self {
            states: vec![State::Free; segments as usize],
            free: VecDeque::new(),
            queue: BTreeMap::new(),
            waiting: VecDeque::new(),
            next: 1,
            clock: 0,
            reclaiming: 0,
            in_vain: 0,
            force: false,
            idle: false,
            asked: false,
        };
        let (leased, _) = epochs_at_start(segments, leased);
        for (lease, epoch) in leased {
            let place = Place { epoch, number: lease.generation };
            pool.states[lease.segment as usize] = State::Leased { shard: lease.shard, place };
            pool.queue.insert(place, lease.segment);
            pool.next = lease.generation + LOST_LEASES_MAX;
            pool.clock += u64::from(SEGMENT_PARTS);
        }
        pool.free.extend((0..segments).filter(|&segment| pool.states[segment as usize] == State::Free));
        pool
    }

    /// The epoch now.
    pub fn epoch(&self) -> Epoch {
        epoch_at(self.clock, self.states.len() as u32)
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
        self.idle = false;
        self.asked = true;
    }

    /// Who asked as `id` has found room elsewhere.
    pub fn withdraw(&mut self, id: u64) {
        self.waiting.retain(|waiter| waiter.id != id);
    }

    /// A segment for a reclaim that copies forward, at once or never: a reclaim must not wait for another.
    pub fn lease_for_reclaim(&mut self, shard: ShardId, class: Class) -> Option<Lease> {
        self.lease(shard, class)
    }

    /// An order has ended.
    pub fn reclaimed(&mut self, segment: u32, outcome: Outcome) {
        let State::Reclaiming { shard, place } = self.states[segment as usize] else { return };
        self.reclaiming -= 1;
        let now = self.epoch();
        match outcome {
            Outcome::Freed => self.put_free(segment),
            Outcome::Retired => self.states[segment as usize] = State::Retired,
            // Why only later epochs: so each segment is looked at once in an epoch at most, and orders come to an end.
            Outcome::Kept { epoch, freed_parts } if epoch.min(now) > place.epoch => {
                let mut number = place.number;
                if freed_parts > 0 {
                    self.clock += u64::from(freed_parts.min(SEGMENT_PARTS));
                    // What fills the gaps is as new as what a new lease gets.
                    number = self.take_number();
                }
                self.enqueue(segment, shard, Place { epoch: epoch.min(now), number });
            }
            Outcome::Kept { .. } | Outcome::Pinned => {
                self.in_vain += 1;
                let number = self.take_number();
                self.enqueue(segment, shard, Place { epoch: now, number });
            }
        }
    }

    /// A shard gives a segment back, or gives it up, on its own account.
    pub fn returned(&mut self, segment: u32, outcome: Outcome) {
        let State::Leased { place, .. } = self.states[segment as usize] else { return };
        match outcome {
            Outcome::Freed => {
                self.queue.remove(&place);
                self.put_free(segment);
            }
            Outcome::Retired => {
                self.queue.remove(&place);
                self.states[segment as usize] = State::Retired;
            }
            Outcome::Kept { .. } | Outcome::Pinned => {}
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
        let wanted = self.reserve() + self.headroom() + self.waiting.len().min(RECLAIMS_MAX);
        if !self.asked || self.free.len() + self.reclaiming >= wanted || self.reclaiming >= self.reserve() || self.idle
        {
            return None;
        }
        self.next_order()
    }

    fn next_order(&mut self) -> Option<Step> {
        if self.in_vain >= self.queue.len() {
            // An order that still runs may free something.
            if self.reclaiming > 0 {
                return None;
            }
            let tried = std::mem::replace(&mut self.in_vain, 0) > 0;
            self.force = tried && !self.force && !self.waiting.is_empty();
            if !self.force {
                let refused = self.pick_refused();
                self.idle = self.waiting.is_empty();
                return refused.map(Step::Refuse);
            }
        }
        let (place, segment) = self.queue.pop_first()?;
        let State::Leased { shard, .. } = self.states[segment as usize] else {
            unreachable!("the queue lists leased segments only")
        };
        self.states[segment as usize] = State::Reclaiming { shard, place };
        self.reclaiming += 1;
        let others = self.queue.first_key_value().map_or(place.epoch, |(place, _)| place.epoch);
        let cutoff = if self.force { Epoch(u64::MAX) } else { others.max(place.epoch.next()) };
        Some(Step::Reclaim(Order { segment, shard, now: self.epoch(), cutoff, force: self.force }))
    }

    /// Who is told that there is nothing: the last to ask, and rather a large blob, whose end gives space back.
    fn pick_refused(&mut self) -> Option<Waiter> {
        let large = self.waiting.iter().rposition(|waiter| waiter.class == Class::Chunks);
        self.waiting.remove(large.or(self.waiting.len().checked_sub(1))?)
    }

    fn lease(&mut self, shard: ShardId, class: Class) -> Option<Lease> {
        let segment = self.free.pop_front()?;
        let generation = self.take_number();
        self.enqueue(segment, shard, Place { epoch: self.epoch(), number: generation });
        self.clock += u64::from(SEGMENT_PARTS);
        Some(Lease { segment, shard, class, generation })
    }

    fn take_number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    fn enqueue(&mut self, segment: u32, shard: ShardId, place: Place) {
        self.states[segment as usize] = State::Leased { shard, place };
        self.queue.insert(place, segment);
    }

    fn put_free(&mut self, segment: u32) {
        self.states[segment as usize] = State::Free;
        self.free.push_back(segment);
        self.in_vain = 0;
        self.force = false;
        self.idle = false;
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
                    State::Leased { place, .. } => assert_eq!(self.queue.get(place), Some(&segment)),
                    State::Reclaiming { .. } => reclaiming += 1,
                    State::Free | State::Retired => {}
                }
            }
            assert_eq!(reclaiming, self.reclaiming);
            let leased = self.states.iter().filter(|state| matches!(state, State::Leased { .. })).count();
            assert_eq!(leased, self.queue.len());
        }
    }

    fn waiter(id: u64) -> Waiter {
        Waiter { id, shard: ShardId((id % 4) as u16), class: Class::Log }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Goal: no segment has two holders, generations only grow, every request is answered in bounded steps, and one is
        /// refused only after a forced lap in which nothing could be freed. Method: random askers and a world in which a random
        /// set of segments is pinned, others are in use now and then; the invariant is checked after each step.
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
                    prop_assert!(steps < 20 * segments + 20, "no end");
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
                            let outcome = match pinned[order.segment as usize] {
                                true => Outcome::Pinned,
                                false if spare => Outcome::Kept { epoch: order.cutoff, freed_parts: 0 },
                                false => Outcome::Freed,
                            };
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
                Step::Reclaim(order) => pool.reclaimed(order.segment, Outcome::Pinned),
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
