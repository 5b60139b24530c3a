//! Goal: what is evicted is old: not used for as long as there is room for what was used since, and among equals the first
//! written. Method: a simulated cache of small records and large blobs on the real pool, driven by seeded workloads; every
//! eviction is checked against exact times of use, which the pool does not have.

use std::collections::{BTreeMap, HashMap};

use super::eviction::{Lease, Order, Outcome, Pool, SEGMENT_PARTS, Step, Waiter};
use super::random::SplitMix64;
use super::recency::{Aged, Epoch, Verdict, judge};
use super::segment::Class;
use super::shard_map::ShardId;

const SEGMENTS: u32 = 128;
const SEGMENT_LEN: u32 = 1000;
const SHARDS: u64 = 4;
/// Longer blobs are large.
const SMALL_LEN_MAX: u32 = 60;

#[derive(Debug, Clone, Copy)]
struct Entry {
    len: u32,
    segment: u32,
    stamp: u8,
    /// What `stamp` stands for.
    epoch: Epoch,
    /// Bytes that had been put when it was put, and when it was last used.
    put_at: u64,
    used_at: u64,
}

struct Segment {
    shard: ShardId,
    class: Class,
    ids: Vec<u64>,
    used: u32,
    has_holes: bool,
}

struct Evicted {
    entry: Entry,
    now: u64,
    forced: bool,
    /// Bytes of entries that stay, and of those that were last used in an earlier epoch.
    live: u64,
    older: u64,
}

struct Sim {
    pool: Pool,
    segments: BTreeMap<u32, Segment>,
    open: HashMap<(ShardId, bool), u32>,
    /// Bytes of entries by the epoch of their last use.
    bytes: BTreeMap<Epoch, u64>,
    entries: BTreeMap<u64, Entry>,
    put_bytes: u64,
    copied_bytes: u64,
    evicted: Vec<Evicted>,
    orders: u64,
}

fn shard_of(id: u64) -> ShardId {
    ShardId((id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u16 % SHARDS as u16)
}

impl Sim {
    fn new() -> Self {
        Self {
            pool: Pool::new(SEGMENTS, []),
            segments: BTreeMap::new(),
            open: HashMap::new(),
            bytes: BTreeMap::new(),
            entries: BTreeMap::new(),
            put_bytes: 0,
            copied_bytes: 0,
            evicted: Vec::new(),
            orders: 0,
        }
    }

    fn capacity() -> u64 {
        u64::from(SEGMENTS) * u64::from(SEGMENT_LEN)
    }

    fn put(&mut self, id: u64, len: u32) {
        let (shard, is_large) = (shard_of(id), len > SMALL_LEN_MAX);
        let class = if is_large { Class::Chunks } else { Class::Log };
        if !self.has_room(shard, is_large, len) {
            self.pool.ask(Waiter { id, shard, class });
            while let Some(step) = self.pool.next_step() {
                match step {
                    Step::Grant(_, lease) => self.add(lease),
                    Step::Reclaim(order) => self.reclaim(order),
                    Step::Refuse(_) => panic!("refused, although nothing is pinned"),
                }
                if self.has_room(shard, is_large, len) {
                    self.pool.withdraw(id);
                }
            }
        }
        assert!(self.has_room(shard, is_large, len));
        self.put_bytes += u64::from(len);
        let (now, epoch) = (self.put_bytes, self.pool.epoch());
        let entry = Entry { len, segment: 0, stamp: epoch.stamp(), epoch, put_at: now, used_at: now };
        *self.bytes.entry(epoch).or_default() += u64::from(len);
        self.place(id, entry, is_large);
    }

    fn touch(&mut self, id: u64) -> bool {
        let (now, epoch) = (self.put_bytes, self.pool.epoch());
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        *self.bytes.get_mut(&entry.epoch).expect("counted") -= u64::from(entry.len);
        *self.bytes.entry(epoch).or_default() += u64::from(entry.len);
        (entry.stamp, entry.epoch, entry.used_at) = (epoch.stamp(), epoch, now);
        true
    }

    /// Makes a segment with room for `len` bytes the open one: one that is being filled, or has holes.
    fn has_room(&mut self, shard: ShardId, is_large: bool, len: u32) -> bool {
        let fits = |segment: &Segment| segment.used + len <= SEGMENT_LEN;
        if self.open.get(&(shard, is_large)).is_some_and(|segment| fits(&self.segments[segment])) {
            return true;
        }
        let mut others = self.segments.iter();
        let found = others.find(|(_, each)| each.has_holes && each.shard == shard && fits(each));
        let Some((&segment, _)) = found.filter(|_| is_large) else { return false };
        self.open.insert((shard, true), segment);
        true
    }

    fn add(&mut self, lease: Lease) {
        let segment = Segment { shard: lease.shard, class: lease.class, ids: Vec::new(), used: 0, has_holes: false };
        assert!(self.segments.insert(lease.segment, segment).is_none());
        self.open.insert((lease.shard, lease.class == Class::Chunks), lease.segment);
    }

    fn place(&mut self, id: u64, entry: Entry, is_large: bool) {
        let segment = self.open[&(shard_of(id), is_large)];
        let open = self.segments.get_mut(&segment).expect("leased");
        open.used += entry.len;
        open.ids.push(id);
        self.entries.insert(id, Entry { segment, ..entry });
    }

    fn reclaim(&mut self, order: Order) {
        self.orders += 1;
        let is_filled = self.open.iter().any(|((_, is_large), segment)| !is_large && *segment == order.segment);
        let outcome = if is_filled {
            Outcome::Pinned
        } else {
            let segment = &self.segments[&order.segment];
            let live = segment.ids.iter().filter(|id| self.entries.get(id).is_some_and(|e| e.segment == order.segment));
            let live: Vec<u64> = live.copied().collect();
            for id in &live {
                let entry = self.entries.get_mut(id).expect("live");
                entry.stamp = order.now.of_stamp(entry.stamp).no_older(order.now).stamp();
            }
            match segment.class {
                Class::Log => self.reclaim_log(order, live),
                Class::Chunks => self.reclaim_chunks(order, live),
            }
        };
        if outcome == Outcome::Freed {
            self.segments.remove(&order.segment);
            self.open.retain(|_, segment| *segment != order.segment);
        }
        self.pool.reclaimed(order.segment, outcome);
    }

    fn used(&self, id: u64, order: Order) -> Epoch {
        order.now.of_stamp(self.entries[&id].stamp)
    }

    fn reclaim_log(&mut self, order: Order, live: Vec<u64>) -> Outcome {
        let aged = |id: &u64| Aged { epoch: Some(self.used(*id, order)), len: self.entries[id].len };
        match judge(&live.iter().map(aged).collect::<Vec<_>>(), SEGMENT_LEN, order.cutoff) {
            Verdict::Empty => {}
            Verdict::Stay(epoch) => return Outcome::Kept { epoch, freed_parts: 0 },
            Verdict::StayLong => return Outcome::Pinned,
        }
        let (stay, go): (Vec<u64>, Vec<u64>) = live.into_iter().partition(|id| self.used(*id, order) >= order.cutoff);
        go.into_iter().for_each(|id| self.evict(id, order));
        for id in stay {
            let entry = self.entries[&id];
            if !self.has_room(order.shard, false, entry.len) {
                match self.pool.lease_for_reclaim(order.shard, Class::Log) {
                    Some(lease) => self.add(lease),
                    None => return Outcome::Pinned,
                }
            }
            self.copied_bytes += u64::from(entry.len);
            self.place(id, entry, false);
        }
        Outcome::Freed
    }

    fn reclaim_chunks(&mut self, order: Order, live: Vec<u64>) -> Outcome {
        let (stay, go): (Vec<u64>, Vec<u64>) = live.into_iter().partition(|id| self.used(*id, order) >= order.cutoff);
        let freed: u32 = go.iter().map(|id| self.entries[id].len).sum();
        go.into_iter().for_each(|id| self.evict(id, order));
        let segment = self.segments.get_mut(&order.segment).expect("leased");
        segment.used -= freed;
        segment.has_holes |= freed > 0;
        let freed_parts = freed * SEGMENT_PARTS / SEGMENT_LEN;
        let oldest = stay.iter().map(|id| self.used(*id, order)).min();
        oldest.map_or(Outcome::Freed, |epoch| Outcome::Kept { epoch, freed_parts })
    }

    fn evict(&mut self, id: u64, order: Order) {
        let entry = self.entries.remove(&id).expect("live");
        *self.bytes.get_mut(&entry.epoch).expect("counted") -= u64::from(entry.len);
        let (live, older) = (self.bytes.values().sum(), self.bytes.range(..entry.epoch).map(|(_, bytes)| bytes).sum());
        self.evicted.push(Evicted { entry, now: self.put_bytes, forced: order.force, live, older });
    }

    /// Checks what holds for every workload. Returns the least bytes put between a put, or a use, and the eviction, in parts
    /// of the capacity.
    fn check(&self, what: &str) -> (f64, f64) {
        assert!(self.evicted.len() > 500, "{what}: {} evictions", self.evicted.len());
        let share = |bytes: u64| bytes as f64 / Self::capacity() as f64;
        for each in &self.evicted {
            assert!(!each.forced, "{what}: {:?} was forced out", each.entry);
            assert!(
                each.older * 2 <= each.live,
                "{what}: {:?} went at {}, although {} of {} bytes that stay were used before it",
                each.entry,
                each.now,
                each.older,
                each.live
            );
        }
        let since_put = self.evicted.iter().map(|each| share(each.now - each.entry.put_at)).fold(f64::MAX, f64::min);
        let since_use = self.evicted.iter().map(|each| share(each.now - each.entry.used_at)).fold(f64::MAX, f64::min);
        println!(
            "{what}: evicted {since_put:.2} after the put and {since_use:.2} after the last use at least; {:.2} bytes copied \
             for each put, {:.1} orders for each segment put, {:.2} of the space live",
            self.copied_bytes as f64 / self.put_bytes as f64,
            self.orders as f64 / (self.put_bytes as f64 / f64::from(SEGMENT_LEN)),
            share(self.entries.values().map(|entry| u64::from(entry.len)).sum()),
        );
        (since_put, since_use)
    }
}

fn len(random: &mut SplitMix64, mix: u64) -> u32 {
    let small = match mix {
        0 => true,
        1 => false,
        _ => random.below(3) > 0,
    };
    if small { 1 + random.below(u64::from(SMALL_LEN_MAX)) as u32 } else { 61 + random.below(400) as u32 }
}

/// Puts blobs of mix `mix` until three capacities have passed; `each` is called after each put with its number.
fn fill(sim: &mut Sim, random: &mut SplitMix64, mix: u64, mut each: impl FnMut(&mut Sim, &mut SplitMix64, u64)) {
    let mut id = 0;
    while sim.put_bytes < 3 * Sim::capacity() {
        let len = len(random, mix);
        sim.put(id, len);
        each(sim, random, id);
        id += 1;
    }
}

/// Goal: nothing that is only written goes before its turn.
#[test]
fn the_unused_go_in_the_order_of_their_writes() {
    for mix in 0..3 {
        let mut sim = Sim::new();
        fill(&mut sim, &mut SplitMix64(1 + mix), mix, |_, _, _| {});
        let (since_put, _) = sim.check(&format!("seed {}, unused", 1 + mix));
        assert!(since_put > 0.6, "{since_put}");
        // Only what was written after an epoch began in its segment.
        assert!(sim.copied_bytes * 10 < sim.put_bytes, "{} bytes copied", sim.copied_bytes);
    }
}

/// Goal: when more is in use than fits, the first written go, and never a young one. Method: after every few puts all of the
/// last 1.5 capacities are touched, so that everything that is there is equally used.
#[test]
fn the_first_written_go_when_all_are_in_use() {
    for mix in 0..3 {
        let mut sim = Sim::new();
        fill(&mut sim, &mut SplitMix64(11 + mix), mix, |sim, _, id| {
            if id % 16 == 0 {
                let all: Vec<u64> = sim.entries.keys().copied().collect();
                all.into_iter().for_each(|id| assert!(sim.touch(id)));
            }
        });
        let (since_put, _) = sim.check(&format!("seed {}, all in use", 11 + mix));
        assert!(since_put > 0.6, "{since_put}");
    }
}

/// Goal: what is in use stays for as long as it fits, and costs a bounded amount of copying. Method: a set of half the
/// capacity, spread among others or not, is touched round and round while others pass through.
#[test]
fn what_is_in_use_stays() {
    for (seed, mix, every) in [(21, 0, 1), (22, 0, 5), (23, 1, 1), (24, 1, 5), (25, 2, 1), (26, 2, 5)] {
        let mut sim = Sim::new();
        let mut hot: Vec<u64> = Vec::new();
        let mut hot_bytes = 0;
        let mut at = 0;
        fill(&mut sim, &mut SplitMix64(seed), mix, |sim, _, id| {
            if id % every == 0 && hot_bytes < Sim::capacity() / 2 {
                hot.push(id);
                hot_bytes += u64::from(sim.entries[&id].len);
            }
            // Once through the hot set for each tenth of the capacity put.
            let due = sim.put_bytes as usize * hot.len() * 10 / Sim::capacity() as usize;
            while at < due.min(at + 1000) {
                let id = hot[at % hot.len()];
                assert!(sim.touch(id), "seed {seed}: {id} was in use and is gone");
                at += 1;
            }
            at = at.max(due);
        });
        sim.check(&format!("seed {seed}, a hot set"));
        assert!(sim.copied_bytes < 3 * sim.put_bytes, "{} bytes copied for {}", sim.copied_bytes, sim.put_bytes);
    }
}

/// Goal: under any mixture of uses what goes is older than most that stays. Method: uses that prefer recent, old or random
/// entries, in changing phases.
#[test]
fn what_goes_is_older_than_most_that_stays() {
    for seed in 31..37 {
        let mut sim = Sim::new();
        fill(&mut sim, &mut SplitMix64(seed), seed % 3, |sim, random, id| {
            let phase = sim.put_bytes * 3 / Sim::capacity() + seed;
            for _ in 0..random.below(8) {
                let back = match phase % 4 {
                    0 => random.below(20 + id / 50),
                    1 => random.below(1 + id),
                    2 => id / 4 + random.below(1 + id / 4),
                    _ => return,
                };
                sim.touch(id.saturating_sub(back));
            }
        });
        sim.check(&format!("seed {seed}, a mixture"));
        let live: u64 = sim.entries.values().map(|entry| u64::from(entry.len)).sum();
        assert!(live * 2 > Sim::capacity(), "{live} bytes live");
    }
}
