//! The peers' part of the memory limit, which all cores share (the parts stand in `pure::memory_plan`).
//!
//! A core takes from it in chunks, and keeps a little: so most grants are a change of a `Cell`, and a core that needs much
//! has what the others do not use.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::pure::memory_plan::{MemoryPlan, Use};

/// What all cores share. Clones are the same.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Central>);

#[derive(Debug)]
struct Central {
    plan: MemoryPlan,
    /// Bytes of connections and calls.
    apart: AtomicU64,
    /// Bytes of the index.
    index: AtomicU64,
    /// Bytes that the cores have taken for each use, spare ones included.
    used: [AtomicU64; Use::ALL.len()],
    /// What a core takes at a time, and what all of them may keep for one use, in bytes.
    chunk: u64,
    idle_max: u64,
}

/// One core's hold on the budget. Clones are the same; core-local.
#[derive(Clone)]
pub struct Purse(Rc<Local>);

struct Local {
    budget: Budget,
    is_alone: bool,
    held: [Cell<u64>; Use::ALL.len()],
    spare: [Cell<u64>; Use::ALL.len()],
    apart: Cell<u64>,
    /// Of `apart`, what is for TLS.
    tls: Cell<u64>,
    /// Of `apart`, what the others know of.
    apart_told: Cell<u64>,
    index: Cell<u64>,
}

/// How urgent a grant is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// Of one who could not be served at all without it, and holds so many bytes of it already: may take the last quarter
    /// of the share, and more than that when nobody else has any.
    First {
        held: u64,
    },
    Further,
    /// As `Further`, but that it may have more than there is when nobody else has any.
    Bulk,
}

/// What memory of connections and calls is for. Those further down may take what is kept from those above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rank {
    /// One more of what a connection has several of.
    More,
    /// A new connection, with one call. It may wait, or be turned away.
    New,
    /// What an open connection needs to go on: few calls, and what it sends.
    Open,
    /// What looks after the server.
    First,
}

impl Rank {
    /// Bytes of `max` that it may fill.
    const fn part_of(self, max: u64) -> u64 {
        let kept = match self {
            Self::More => 7,
            Self::New => 3,
            Self::Open => 1,
            Self::First => 0,
        };
        max - max / 32 * kept
    }
}

/// Memory that was granted; goes back when dropped.
pub struct Grant {
    purse: Purse,
    used: Use,
    len: Cell<u64>,
}

/// Memory of a connection or a call; goes back when dropped.
pub struct Apart {
    purse: Purse,
    len: u64,
    is_tls: bool,
}

impl Budget {
    pub fn new(plan: MemoryPlan, cores: usize) -> Self {
        let chunk = (plan.peers / (cores as u64 * 256)).min(1 << 20);
        let used = [const { AtomicU64::new(0) }; Use::ALL.len()];
        let idle_max = 2 * cores as u64 * chunk;
        Self(Arc::new(Central { plan, apart: AtomicU64::new(0), index: AtomicU64::new(0), used, chunk, idle_max }))
    }

    pub fn plan(&self) -> MemoryPlan {
        self.0.plan
    }

    /// A core's purse. `is_alone`: there are no other cores.
    pub fn purse(&self, is_alone: bool) -> Purse {
        Purse(Rc::new(Local {
            budget: self.clone(),
            is_alone,
            held: Default::default(),
            spare: Default::default(),
            apart: Cell::new(0),
            tls: Cell::new(0),
            apart_told: Cell::new(0),
            index: Cell::new(0),
        }))
    }

    /// Bytes of the index, on all cores.
    pub fn index(&self) -> u64 {
        self.0.index.load(Ordering::Relaxed)
    }

    /// Bytes that the index leaves to peers.
    fn left(&self) -> u64 {
        self.0.plan.left_by_index(self.index())
    }

    /// Bytes that `used` may take now: a share of what the index, connections and calls leave.
    fn share(&self, used: Use) -> u64 {
        self.0.plan.share(used, self.left(), self.0.apart.load(Ordering::Relaxed))
    }

    /// Bytes that connections and calls may take now: what the uses and interrupted uploads leave of what the index leaves, and three
    /// quarters of it at most.
    fn apart_max(&self) -> u64 {
        let Central { plan, used, .. } = &*self.0;
        let left = self.left();
        let used: u64 = used.iter().map(|used| used.load(Ordering::Relaxed)).sum();
        // Why `newcomers` in any case: one that is larger than its use's share may be alone in taking what it needs.
        MemoryPlan::apart_of(left).min(left.saturating_sub(used + plan.parked()).max(plan.newcomers))
    }

    fn take(&self, used: Use, len: u64, claim: Claim) -> bool {
        let share = self.share(used);
        let may_be = |taken: u64| match claim {
            Claim::First { held } => taken <= held + self.0.idle_max || taken + len <= share,
            Claim::Further => taken + len <= share / 4 * 3,
            Claim::Bulk => taken <= self.0.idle_max || taken + len <= share / 4 * 3,
        };
        let add = |taken: u64| may_be(taken).then_some(taken + len);
        self.0.used[used as usize].fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    fn give(&self, used: Use, len: u64) {
        self.0.used[used as usize].fetch_sub(len, Ordering::Relaxed);
    }
}

impl Purse {
    /// The purse of a process that has one core, or no peers: `peers` bytes, to the byte.
    pub fn alone(peers: u64) -> Self {
        let plan = MemoryPlan { limit: peers, hot: 0, fixed: 0, buffers: 0, reads: 0, flights: 0, peers, newcomers: 0 };
        let used = [const { AtomicU64::new(0) }; Use::ALL.len()];
        Budget(Arc::new(Central {
            plan,
            apart: AtomicU64::new(0),
            index: AtomicU64::new(0),
            used,
            chunk: 0,
            idle_max: 0,
        }))
        .purse(true)
    }

    /// True when no other core can give anything back.
    pub fn is_alone(&self) -> bool {
        self.0.is_alone
    }

    /// Bytes that this core holds for `used`.
    pub fn held(&self, used: Use) -> u64 {
        self.0.held[used as usize].get()
    }

    /// Bytes that all cores together may hold for `used` now.
    pub fn share(&self, used: Use) -> u64 {
        self.0.budget.share(used)
    }

    /// True when more than half of what `used` may take is taken.
    pub fn is_scarce(&self, used: Use) -> bool {
        self.0.budget.0.used[used as usize].load(Ordering::Relaxed) > self.share(used) / 2
    }

    /// Bytes of connections and calls of this core.
    pub fn apart(&self) -> u64 {
        self.0.apart.get()
    }

    /// Of these, bytes of TLS.
    pub fn apart_tls(&self) -> u64 {
        self.0.tls.get()
    }

    /// Takes `len` bytes if they are there.
    pub fn take(&self, used: Use, len: u64, claim: Claim) -> bool {
        let Local { budget, held, spare, .. } = &*self.0;
        let (held, spare) = (&held[used as usize], &spare[used as usize]);
        let chunk = budget.0.chunk;
        if spare.get() >= len {
            spare.set(spare.get() - len);
        } else {
            let missing = len - spare.get();
            if missing < chunk && budget.take(used, chunk, Claim::Further) {
                spare.set(chunk - missing);
            } else if budget.take(used, missing, claim) {
                spare.set(0);
            } else {
                return false;
            }
        }
        held.set(held.get() + len);
        true
    }

    /// Gives `len` bytes back.
    pub fn give(&self, used: Use, len: u64) {
        let Local { budget, held, spare, .. } = &*self.0;
        let (held, spare) = (&held[used as usize], &spare[used as usize]);
        held.set(held.get() - len);
        spare.set(spare.get() + len);
        let chunk = budget.0.chunk;
        if spare.get() > 2 * chunk {
            budget.give(used, spare.get() - chunk);
            spare.set(chunk);
        }
    }

    /// A grant of `len` bytes, if they are there.
    pub fn grant(&self, used: Use, len: u64, claim: Claim) -> Option<Grant> {
        self.take(used, len, claim).then(|| Grant { purse: self.clone(), used, len: Cell::new(len) })
    }

    /// `len` bytes of a connection or call, if they are there, until dropped.
    pub fn apart_for(&self, len: u64, rank: Rank) -> Option<Apart> {
        self.set_apart(len, rank).then(|| Apart { purse: self.clone(), len, is_tls: false })
    }

    /// Counts `len` bytes of a connection or call, which the uses then have less. False when there is no room for more.
    ///
    /// Why told in steps: it is done for each call, and some of them more or less do not matter.
    pub fn set_apart(&self, len: u64, rank: Rank) -> bool {
        let Local { budget, apart, .. } = &*self.0;
        let others = budget.0.apart.load(Ordering::Relaxed).saturating_sub(self.0.apart_told.get());
        if others + apart.get() + len > rank.part_of(budget.apart_max()) {
            return false;
        }
        apart.set(apart.get() + len);
        self.tell_apart();
        true
    }

    /// Such bytes are free again.
    pub fn rejoin(&self, len: u64) {
        self.0.apart.set(self.0.apart.get() - len);
        self.tell_apart();
    }

    /// Bytes that this core's part of the index takes from now on. Peers have what it leaves.
    pub fn set_index(&self, len: u64) {
        let Local { budget, index, .. } = &*self.0;
        let before = index.replace(len);
        // Why wrapping: it may have shrunk, and adding what wraps around subtracts.
        budget.0.index.fetch_add(len.wrapping_sub(before), Ordering::Relaxed);
    }

    fn tell_apart(&self) {
        let Local { budget, apart, apart_told, .. } = &*self.0;
        let (now, told) = (apart.get(), apart_told.get());
        if now.abs_diff(told) > budget.0.chunk || (now == 0 && told > 0) {
            match now >= told {
                true => budget.0.apart.fetch_add(now - told, Ordering::Relaxed),
                false => budget.0.apart.fetch_sub(told - now, Ordering::Relaxed),
            };
            apart_told.set(now);
        }
    }
}

impl Apart {
    /// Counts it as that of TLS from now on.
    pub fn for_tls(mut self) -> Self {
        if !std::mem::replace(&mut self.is_tls, true) {
            self.purse.0.tls.set(self.purse.0.tls.get() + self.len);
        }
        self
    }

    /// Makes it `more` bytes longer, if they are there.
    pub fn grow(&mut self, more: u64, rank: Rank) -> bool {
        let is_there = self.purse.set_apart(more, rank);
        if is_there {
            self.len += more;
            if self.is_tls {
                self.purse.0.tls.set(self.purse.0.tls.get() + more);
            }
        }
        is_there
    }
}

impl Grant {
    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len.get()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes it `len` bytes long, if there are as many.
    pub fn resize(&self, len: u64) -> bool {
        let now = self.len.get();
        let done = match len > now {
            true => self.purse.take(self.used, len - now, Claim::First { held: now }),
            false => {
                self.purse.give(self.used, now - len);
                true
            }
        };
        if done {
            self.len.set(len);
        }
        done
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        if self.is_tls {
            self.purse.0.tls.set(self.purse.0.tls.get() - self.len);
        }
        self.purse.rejoin(self.len);
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.purse.give(self.used, self.len.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: no use gets more than its share, the last quarter is for those who have nothing, what comes back can be
    /// taken again by any core, and connections leave less. Method: two cores that take and give in turn.
    #[test]
    fn cores_share_to_the_byte() {
        let plan =
            MemoryPlan { limit: 1600, hot: 0, fixed: 0, buffers: 0, reads: 0, flights: 0, peers: 1600, newcomers: 0 };
        let budget = Budget::new(plan, 2);
        let [one, two] = [budget.purse(false), budget.purse(false)];
        assert_eq!(one.share(Use::Replies), 400);
        assert!(one.take(Use::Replies, 200, Claim::Further) && !two.take(Use::Replies, 101, Claim::Further));
        assert!(two.take(Use::Replies, 100, Claim::Further) && !one.take(Use::Replies, 1, Claim::Further));
        assert!(
            one.take(Use::Replies, 97, Claim::First { held: 0 })
                && !two.take(Use::Replies, 10, Claim::First { held: 0 })
        );
        one.give(Use::Replies, 297);
        assert!(two.take(Use::Replies, 190, Claim::Further));
        two.give(Use::Replies, 290);
        assert_eq!((one.held(Use::Replies), two.held(Use::Replies)), (0, 0));
        assert!(budget.0.used[Use::Replies as usize].load(Ordering::Relaxed) <= 4 * budget.0.chunk);
        assert!(one.set_apart(800, Rank::First));
        let mut filled = 800;
        for (rank, most) in [(Rank::More, 941), (Rank::New, 1089), (Rank::Open, 1163), (Rank::First, 1200)] {
            assert!(!two.set_apart(most - filled + 1, rank) && two.set_apart(most - filled, rank), "{rank:?}");
            filled = most;
        }
        assert_eq!(one.share(Use::Replies), 100);
        one.rejoin(800);
        two.rejoin(400);
        assert_eq!((one.share(Use::Replies), one.apart(), two.apart()), (400, 0, 0));
    }

    /// Goal: what the uses hold and what connections and calls take never exceed the peers' part together; the uses leave some for
    /// newcomers, and these have it however long the uses keep theirs. Method: uses that take all they may, then calls.
    #[test]
    fn newcomers_find_room_beside_uses() {
        let plan =
            MemoryPlan { limit: 1600, hot: 0, fixed: 0, buffers: 0, reads: 0, flights: 0, peers: 1600, newcomers: 200 };
        let purse = Budget::new(plan, 1).purse(true);
        let first = Claim::First { held: 0 };
        for used in Use::ALL {
            let share = purse.share(used);
            assert_eq!(share, used.share_of(1400));
            assert!(purse.take(used, share, first));
        }
        let used: u64 = Use::ALL.iter().map(|&used| purse.held(used)).sum();
        let kept: Vec<_> = std::iter::from_fn(|| purse.apart_for(1, Rank::First)).collect();
        assert_eq!(used + kept.len() as u64 + plan.parked(), 1600);
        assert!(kept.len() >= 200 && purse.share(Use::Replies) < purse.held(Use::Replies));
        for used in Use::ALL {
            purse.give(used, purse.held(used));
        }
        let more: Vec<_> = std::iter::from_fn(|| purse.apart_for(1, Rank::First)).collect();
        assert_eq!((kept.len() + more.len(), purse.share(Use::Replies)), (1200, 100));
    }

    /// Goal: peers have what the index leaves, of both cores, and an eighth of the limit in any case. Method: indexes that grow and
    /// shrink.
    #[test]
    fn the_index_leaves_less() {
        let plan =
            MemoryPlan { limit: 3200, hot: 0, fixed: 0, buffers: 0, reads: 0, flights: 0, peers: 1600, newcomers: 0 };
        let budget = Budget::new(plan, 2);
        let [one, two] = [budget.purse(false), budget.purse(false)];
        one.set_index(500);
        two.set_index(300);
        assert_eq!((budget.index(), two.share(Use::Replies)), (800, 200));
        assert!(two.set_apart(600, Rank::First) && !two.set_apart(1, Rank::First));
        one.set_index(5000);
        assert_eq!((two.share(Use::Replies), two.set_apart(1, Rank::First)), (0, false));
        two.rejoin(600);
        assert_eq!(two.share(Use::Replies), 100);
        one.set_index(0);
        two.set_index(0);
        assert_eq!((budget.index(), one.share(Use::Replies)), (0, 400));
    }

    /// Goal: the first claim is granted whatever its size when nobody else has anything, so that nobody waits for ever.
    /// Method: a request longer than the share.
    #[test]
    fn the_first_is_never_too_large() {
        let purse = Purse::alone(160);
        let grant = purse.grant(Use::Requests, 1000, Claim::First { held: 0 }).expect("nobody else has any");
        assert!(!purse.take(Use::Requests, 1, Claim::First { held: 0 }));
        assert!(grant.resize(10) && purse.take(Use::Requests, 5, Claim::First { held: 0 }) && !grant.resize(16));
        assert!(grant.resize(15));
        assert_eq!((grant.len(), purse.held(Use::Requests)), (15, 20));
        purse.give(Use::Requests, 5);
        drop(grant);
        assert_eq!(purse.held(Use::Requests), 0);
    }

    /// Goal: who takes much leaves the last quarter to others, but is never too large for an empty purse; TLS is told apart.
    /// Method: a share of 40 bytes.
    #[test]
    fn bulk_leaves_a_quarter() {
        let purse = Purse::alone(160);
        let first = Claim::First { held: 0 };
        drop(purse.grant(Use::Replies, 50, Claim::Bulk).expect("nobody else has any"));
        let bulk = purse.grant(Use::Replies, 30, Claim::Bulk).expect("three quarters");
        assert!(purse.grant(Use::Replies, 1, Claim::Bulk).is_none() && purse.grant(Use::Replies, 11, first).is_none());
        let small = purse.grant(Use::Replies, 10, first).expect("the last quarter");
        drop((bulk, small));
        assert_eq!(purse.held(Use::Replies), 0);
        let (plain, tls) = (purse.apart_for(5, Rank::First), purse.apart_for(7, Rank::First).map(Apart::for_tls));
        assert_eq!((purse.apart(), purse.apart_tls()), (12, 7));
        let [mut plain, mut tls] = [plain, tls].map(|apart| apart.expect("there is room"));
        assert!(plain.grow(3, Rank::First) && tls.grow(4, Rank::First) && !plain.grow(120, Rank::First));
        assert_eq!((purse.apart(), purse.apart_tls()), (19, 11));
        drop((plain, tls));
        assert_eq!((purse.apart(), purse.apart_tls()), (0, 0));
    }
}
