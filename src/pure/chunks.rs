//! Which chunks of a shard's chunk segments are taken, and by whom.

use std::collections::{BTreeMap, BTreeSet};

use super::record::Run;

/// Most chunks of one segment.
const CHUNKS_MAX: usize = 512;
type Bits = [u64; CHUNKS_MAX / 64];

struct Segment {
    /// Set: taken.
    taken: Bits,
    count: u32,
    /// Closed segments give out no chunks: they are being emptied.
    closed: bool,
    /// Was full once: what is given back stays free until a reclaim has made room in the segment. Why: the segment is old,
    /// and a blob that started in a hole of it would be evicted with its old neighbours, right after it was written.
    sealed: bool,
    /// Tags of the blobs whose first chunk is here. May name blobs that are gone.
    homes: Vec<u64>,
}

/// The chunks of one shard.
pub struct Chunks {
    per_segment: u32,
    segments: BTreeMap<u32, Segment>,
    /// Segments that are neither closed nor sealed: they have a free chunk.
    open: BTreeSet<u32>,
}

impl Chunks {
    pub fn new(chunks_per_segment: u32) -> Self {
        assert!((1..=CHUNKS_MAX as u32).contains(&chunks_per_segment), "{chunks_per_segment} chunks");
        Self { per_segment: chunks_per_segment, segments: BTreeMap::new(), open: BTreeSet::new() }
    }

    /// Adds an empty segment.
    pub fn add(&mut self, segment: u32) {
        let fresh = Segment { taken: [0; CHUNKS_MAX / 64], count: 0, closed: false, sealed: false, homes: Vec::new() };
        assert!(self.segments.insert(segment, fresh).is_none(), "segment {segment} added twice");
        self.open.insert(segment);
    }

    /// Takes an empty segment out. False when it is not empty or not here.
    pub fn remove_empty(&mut self, segment: u32) -> bool {
        let empty = self.segments.get(&segment).is_some_and(|entry| entry.count == 0);
        if empty {
            self.segments.remove(&segment);
            self.open.remove(&segment);
        }
        empty
    }

    /// Takes an empty segment out unless it is closed: then whoever is emptying it will.
    pub fn remove_if_idle(&mut self, segment: u32) -> bool {
        !self.segments.get(&segment).is_none_or(|entry| entry.closed) && self.remove_empty(segment)
    }

    pub fn contains(&self, segment: u32) -> bool {
        self.segments.contains_key(&segment)
    }

    pub fn segments(&self) -> impl Iterator<Item = u32> {
        self.segments.keys().copied()
    }

    pub fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// Chunks that could be taken now.
    pub fn free(&self) -> u32 {
        self.open.iter().map(|&segment| self.per_segment - self.taken(segment)).sum()
    }

    /// Chunks taken in `segment`.
    pub fn taken(&self, segment: u32) -> u32 {
        self.segments.get(&segment).map_or(0, |entry| entry.count)
    }

    /// Takes up to `want` neighbouring chunks: those from `next` on if they are free (so that a blob's runs join), else the
    /// first free run that is long enough, else the longest.
    pub fn take(&mut self, want: u32, next: Option<u32>) -> Option<Run> {
        let follow = next.and_then(|chunk| {
            let segment = chunk / self.per_segment;
            let len = self.open.contains(&segment).then(|| self.free_from(segment, chunk % self.per_segment, want))?;
            (len > 0).then_some(Run { first: chunk, count: len })
        });
        let run = follow.or_else(|| self.find(want))?;
        assert!(self.set(run, true), "a free chunk was taken");
        Some(run)
    }

    /// Takes all of `run` if its segment is here and all of it is free.
    pub fn claim(&mut self, run: Run) -> bool {
        self.is_inside(run) && self.set(run, true)
    }

    /// Takes all of `runs`, or nothing where one of them cannot be claimed (or there are none).
    pub fn claim_all(&mut self, runs: &[Run]) -> bool {
        let claimed = runs.iter().take_while(|run| self.claim(**run)).count();
        let all = claimed == runs.len() && claimed > 0;
        if !all {
            for run in &runs[..claimed] {
                self.give(*run);
            }
        }
        all
    }

    /// Gives `run` back. Its segment if that is empty now.
    pub fn give(&mut self, run: Run) -> Option<u32> {
        assert!(self.is_inside(run) && self.set(run, false), "chunks {run:?} were given back twice");
        let segment = run.first / self.per_segment;
        (self.taken(segment) == 0).then_some(segment)
    }

    /// Gives out no more chunks of `segment`; or does again, unless it is sealed.
    pub fn close(&mut self, segment: u32, closed: bool) {
        if let Some(entry) = self.segments.get_mut(&segment) {
            entry.closed = closed;
            refresh_open(&mut self.open, segment, entry, self.per_segment);
        }
    }

    /// Gives out what is free in `segment`, because its age counts anew.
    pub fn unseal(&mut self, segment: u32) {
        if let Some(entry) = self.segments.get_mut(&segment) {
            entry.sealed = entry.count == self.per_segment;
            refresh_open(&mut self.open, segment, entry, self.per_segment);
        }
    }

    /// Gives out no more chunks of `segment` before it has been through a reclaim, as if it had been full.
    pub fn seal(&mut self, segment: u32) {
        if let Some(entry) = self.segments.get_mut(&segment) {
            entry.sealed = true;
            refresh_open(&mut self.open, segment, entry, self.per_segment);
        }
    }

    /// Notes that the blob of `tag` starts in `chunk`.
    pub fn add_home(&mut self, chunk: u32, tag: u64) {
        if let Some(entry) = self.segments.get_mut(&(chunk / self.per_segment)) {
            entry.homes.push(tag);
        }
    }

    /// Takes the list of the blobs that started in `segment`; the caller adds back those that stay.
    pub fn take_homes(&mut self, segment: u32) -> Vec<u64> {
        self.segments.get_mut(&segment).map(|entry| std::mem::take(&mut entry.homes)).unwrap_or_default()
    }

    fn is_inside(&self, run: Run) -> bool {
        let segment = run.first / self.per_segment;
        let end = u64::from(run.first % self.per_segment) + u64::from(run.count);
        run.count > 0 && end <= u64::from(self.per_segment) && self.segments.contains_key(&segment)
    }

    /// The first run of `want` free chunks, else the longest there is.
    fn find(&self, want: u32) -> Option<Run> {
        let mut best: Option<Run> = None;
        for &segment in &self.open {
            let mut at = 0;
            while at < self.per_segment {
                let count = self.free_from(segment, at, want);
                if count > best.map_or(0, |run| run.count) {
                    best = Some(Run { first: segment * self.per_segment + at, count });
                    if count == want {
                        return best;
                    }
                }
                at += count + 1;
            }
        }
        best
    }

    /// Free chunks of `segment` from `at` on, at most `want`.
    fn free_from(&self, segment: u32, at: u32, want: u32) -> u32 {
        let Some(entry) = self.segments.get(&segment) else { return 0 };
        let end = self.per_segment.min(at.saturating_add(want));
        (at..end).take_while(|&chunk| entry.taken[chunk as usize / 64] >> (chunk % 64) & 1 == 0).count() as u32
    }

    /// Sets all of `run`, if all of it is the other way round now.
    fn set(&mut self, run: Run, taken: bool) -> bool {
        let segment = run.first / self.per_segment;
        let first = run.first % self.per_segment;
        let Some(entry) = self.segments.get_mut(&segment) else { return false };
        let bit = |chunk: u32| (chunk as usize / 64, 1u64 << (chunk % 64));
        let mut all = first..first + run.count;
        if all.any(|chunk| (entry.taken[bit(chunk).0] & bit(chunk).1 != 0) == taken) {
            return false;
        }
        for chunk in first..first + run.count {
            entry.taken[bit(chunk).0] ^= bit(chunk).1;
        }
        entry.count = if taken { entry.count + run.count } else { entry.count - run.count };
        entry.sealed |= entry.count == self.per_segment;
        refresh_open(&mut self.open, segment, entry, self.per_segment);
        true
    }
}

fn refresh_open(open: &mut BTreeSet<u32>, segment: u32, entry: &Segment, per_segment: u32) {
    if entry.closed || entry.sealed || entry.count == per_segment {
        open.remove(&segment);
    } else {
        open.insert(segment);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Goal: no chunk has two owners, counts are right, an empty segment is reported. Method: random takes, gives and
        /// closings against a plain list of owned chunks.
        #[test]
        fn no_chunk_has_two_owners(steps in proptest::collection::vec((0u8..5, 1u32..20, any::<prop::sample::Index>()), 1..300)) {
            const PER_SEGMENT: u32 = 15;
            let mut chunks = Chunks::new(PER_SEGMENT);
            (2..6).for_each(|segment| chunks.add(segment));
            let mut owned: Vec<Run> = Vec::new();
            let mut closed = BTreeSet::new();
            let mut sealed = BTreeSet::new();
            for (step, want, pick) in steps {
                match step {
                    0 | 1 => {
                        let next = (step == 1).then(|| owned.last().map(|run| run.first + run.count)).flatten();
                        let free: u32 = (2..6).filter(|segment| !closed.contains(segment) && !sealed.contains(segment)).map(|segment| PER_SEGMENT - chunks.taken(segment)).sum();
                        match chunks.take(want, next) {
                            Some(run) => {
                                let segment = run.first / PER_SEGMENT;
                                prop_assert!(run.count <= want && !closed.contains(&segment) && !sealed.contains(&segment));
                                prop_assert_eq!(run.first / PER_SEGMENT, (run.first + run.count - 1) / PER_SEGMENT);
                                prop_assert!(owned.iter().all(|o| run.first + run.count <= o.first || o.first + o.count <= run.first));
                                owned.push(run);
                            }
                            None => prop_assert_eq!(free, 0),
                        }
                    }
                    2 | 3 if !owned.is_empty() => {
                        let run = owned.swap_remove(pick.index(owned.len()));
                        let empty = chunks.give(run);
                        let rest = owned.iter().any(|other| other.first / PER_SEGMENT == run.first / PER_SEGMENT);
                        prop_assert_eq!(empty, (!rest).then_some(run.first / PER_SEGMENT));
                    }
                    _ => {
                        let segment = 2 + want % 4;
                        chunks.close(segment, step == 4);
                        if step == 4 { closed.insert(segment); } else { chunks.unseal(segment); closed.remove(&segment); sealed.remove(&segment); }
                    }
                }
                sealed.extend((2..6).filter(|&segment| chunks.taken(segment) == PER_SEGMENT));
                let total: u32 = (2..6).map(|segment| chunks.taken(segment)).sum();
                prop_assert_eq!(total, owned.iter().map(|run| run.count).sum::<u32>());
            }
            for run in owned {
                prop_assert!(!chunks.claim(run));
                chunks.give(run);
                prop_assert!(chunks.claim(run));
                chunks.give(run);
            }
            prop_assert!((2..6).all(|segment| chunks.remove_empty(segment)));
        }
    }

    /// Goal: runs join where they can, and claims outside of the shard's segments are refused. Method: by hand.
    #[test]
    fn runs_join_and_foreign_claims_fail() {
        let mut chunks = Chunks::new(15);
        chunks.add(1);
        assert_eq!(chunks.take(4, None), Some(Run { first: 15, count: 4 }));
        assert_eq!(chunks.take(4, Some(19)), Some(Run { first: 19, count: 4 }));
        assert_eq!(chunks.take(40, Some(15)), Some(Run { first: 23, count: 7 }));
        assert_eq!(chunks.take(1, Some(30)), None);
        for run in [
            Run { first: 14, count: 1 },
            Run { first: 29, count: 2 },
            Run { first: 15, count: 0 },
            Run { first: 29, count: u32::MAX },
        ] {
            assert!(!chunks.claim(run));
        }
    }

    /// Goal: a blob gets the first free run that is long enough, else the longest; only an empty segment that is not being emptied
    /// goes, and it goes whole. Method: by hand.
    #[test]
    fn the_best_run_is_taken_and_idle_segments_go() {
        let mut chunks = Chunks::new(15);
        (1..=3).for_each(|segment| chunks.add(segment));
        let run = |first, count| Run { first, count };
        // Free: 2 and 3 in segment 1, 4 in segment 2, all of segment 3.
        assert!(chunks.claim_all(&[run(17, 5), run(25, 4), run(30, 5), run(39, 6)]));
        assert_eq!(chunks.take(3, None), Some(run(22, 3)));
        assert_eq!(chunks.take(20, None), Some(run(45, 15)));
        assert_eq!(chunks.take(20, None), Some(run(35, 4)));
        assert_eq!(chunks.give(run(45, 14)), None);
        assert!(!chunks.remove_if_idle(3), "one is taken");
        assert_eq!(chunks.give(run(59, 1)), Some(3));
        chunks.close(3, true);
        assert!(!chunks.remove_if_idle(3), "it is being emptied");
        chunks.close(3, false);
        chunks.unseal(3);
        assert_eq!(chunks.free(), 15 + 2 + 1);
        assert!(chunks.remove_if_idle(3) && !chunks.contains(3) && !chunks.remove_if_idle(3));
        assert_eq!(chunks.free(), 2 + 1);
        chunks.seal(1);
        chunks.unseal(2);
        chunks.give(run(35, 4));
        assert_eq!(chunks.free(), 0, "segment 2 was full when its age began anew");
        chunks.unseal(2);
        assert_eq!(chunks.free(), 4);
    }

    /// Goal: blobs are listed where they start, once, until they are asked for. Method: by hand.
    #[test]
    fn homes_are_listed() {
        let mut chunks = Chunks::new(15);
        (1..=2).for_each(|segment| chunks.add(segment));
        for (chunk, tag) in [(15, 1), (29, 2), (30, 3), (45, 4)] {
            chunks.add_home(chunk, tag);
        }
        assert_eq!([1, 2, 3, 1].map(|segment| chunks.take_homes(segment)), [vec![1, 2], vec![3], vec![], vec![]]);
    }

    /// Goal: a blob gets all of its chunks or none. Method: runs that are free, taken in part, outside, and no runs.
    #[test]
    fn a_claim_is_whole_or_nothing() {
        let mut chunks = Chunks::new(15);
        chunks.add(2);
        let run = |first, count| Run { first, count };
        assert!(chunks.claim_all(&[run(30, 3), run(40, 2)]));
        assert!(!chunks.claim_all(&[run(35, 2), run(32, 2)]), "chunk 32 is taken");
        assert!(!chunks.claim_all(&[run(35, 2), run(45, 1)]), "chunk 45 is in no segment of this shard");
        assert!(!chunks.claim_all(&[]));
        assert_eq!(chunks.taken(2), 5);
        assert!(chunks.claim_all(&[run(35, 2)]));
    }
}
