//! What is still to be uploaded to one backend: uploads that are ready, running, or owed for later. Each upload is in one
//! of these places at most, so the same thing asked for twice is done once.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::digest::Digest;
use super::pacing::Pace;
use super::scope::Scope;

/// Which key space an object belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ObjectKind {
    Cas,
    Action,
}

/// A thing to upload: a cached record, by its name. (Also what a read asks a backend for.)
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Upload {
    pub kind: ObjectKind,
    /// Of an action: its key; the size is 0 where the protocol does not carry one.
    pub digest: Digest,
    /// Whose it is.
    pub scope: Scope,
}

/// How many uploads are kept.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    /// Ready or running.
    pub queued: usize,
    /// For later.
    pub owed: usize,
    /// Running at a time.
    pub running: u32,
}

/// What became of an upload that was handed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    Ready,
    /// It was there already.
    Coalesced,
    /// The queue is full: later.
    Owed,
    /// All is full: lost.
    Refused,
}

/// How a running upload ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The backend has it, or never will: forget it.
    Done,
    /// Try again later.
    Owed,
}

/// What became of an upload that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Forgotten,
    /// It was handed in again while it ran, and is ready anew.
    ReadyAgain,
    Owed,
    /// There is no room to keep it for later: lost.
    Lost,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Ready,
    /// `again`: handed in anew meanwhile, perhaps with other content.
    Running {
        again: bool,
    },
    Owed,
}

/// The queue.
#[derive(Debug)]
pub struct UploadQueue {
    limits: QueueLimits,
    pace: Pace,
    places: FxHashMap<Upload, Place>,
    ready: VecDeque<Upload>,
    /// Owed for want of room alone: their turn comes when nothing is ready.
    overflow: VecDeque<Upload>,
    /// Owed since a try, or since the backend took nothing.
    owed: VecDeque<Upload>,
    running: usize,
}

impl UploadQueue {
    pub fn new(limits: QueueLimits) -> Self {
        Self {
            limits,
            pace: Pace::new(limits.running),
            places: FxHashMap::default(),
            ready: VecDeque::new(),
            overflow: VecDeque::new(),
            owed: VecDeque::new(),
            running: 0,
        }
    }

    /// Hands an upload in.
    pub fn push(&mut self, upload: Upload) -> Pushed {
        if let Some(place) = self.places.get_mut(&upload) {
            if let Place::Running { again } = place {
                *again = true;
            }
            return Pushed::Coalesced;
        }
        if self.depth() < self.limits.queued {
            self.places.insert(upload.clone(), Place::Ready);
            self.ready.push_back(upload);
            return Pushed::Ready;
        }
        if self.owed() >= self.limits.owed {
            return Pushed::Refused;
        }
        self.places.insert(upload.clone(), Place::Owed);
        self.overflow.push_back(upload);
        Pushed::Owed
    }

    /// The next upload to run, if the pace allows one more.
    pub fn start(&mut self) -> Option<Upload> {
        if self.running >= self.pace.limit() as usize {
            return None;
        }
        let upload = self.ready.pop_front().or_else(|| self.overflow.pop_front())?;
        self.places.insert(upload.clone(), Place::Running { again: false });
        self.running += 1;
        Some(upload)
    }

    /// A started upload has ended.
    pub fn finish(&mut self, upload: Upload, end: End) -> Ended {
        self.running -= 1;
        let again = self.places.remove(&upload) == Some(Place::Running { again: true });
        match end {
            End::Done if again => {
                self.places.insert(upload.clone(), Place::Ready);
                self.ready.push_back(upload);
                Ended::ReadyAgain
            }
            End::Done => Ended::Forgotten,
            End::Owed if self.keep(upload) => Ended::Owed,
            End::Owed => Ended::Lost,
        }
    }

    /// Makes ready again what is owed since a try, oldest first, as long as the queue is less than half full. How many.
    pub fn retry_owed(&mut self) -> usize {
        let mut count = 0;
        while self.depth() < self.limits.queued.div_ceil(2) {
            let Some(upload) = self.owed.pop_front() else { break };
            self.places.insert(upload.clone(), Place::Ready);
            self.ready.push_back(upload);
            count += 1;
        }
        count
    }

    /// Puts off all that is ready: the backend takes nothing now. Those that were lost for want of room.
    pub fn postpone(&mut self) -> (usize, Vec<Upload>) {
        let mut lost = Vec::new();
        let mut count = 0;
        while let Some(upload) = self.ready.pop_front() {
            count += 1;
            self.places.remove(&upload);
            if !self.keep(upload.clone()) {
                lost.push(upload);
            }
        }
        (count, lost)
    }

    /// The backend asked for less.
    pub fn throttled(&mut self) {
        self.pace.throttled();
    }

    /// An upload reached the backend.
    pub fn succeeded(&mut self) {
        self.pace.succeeded();
    }

    /// Uploads that may run at a time now.
    pub fn pace(&self) -> u32 {
        self.pace.limit()
    }

    /// Ready and running ones.
    pub fn depth(&self) -> usize {
        self.ready.len() + self.running
    }

    /// Whether nothing runs, and nothing would be started.
    pub fn is_idle(&self) -> bool {
        self.depth() == 0 && (self.overflow.is_empty() || self.limits.running == 0)
    }

    pub fn running(&self) -> usize {
        self.running
    }

    pub fn owed(&self) -> usize {
        self.overflow.len() + self.owed.len()
    }

    /// Those that are owed longest, at most `most`.
    pub fn oldest_owed(&self, most: usize) -> Vec<Upload> {
        self.owed.iter().chain(&self.overflow).take(most).cloned().collect()
    }

    /// Whether it is still to be made.
    pub fn contains(&self, upload: &Upload) -> bool {
        self.places.contains_key(upload)
    }

    /// All of them, in no order.
    pub fn all(&self) -> impl Iterator<Item = Upload> + '_ {
        self.places.keys().cloned()
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    fn keep(&mut self, upload: Upload) -> bool {
        if self.owed() >= self.limits.owed {
            return false;
        }
        self.places.insert(upload.clone(), Place::Owed);
        self.owed.push_back(upload);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::digest::Hash;
    use super::super::random::SplitMix64;
    use super::*;

    fn upload(number: u8) -> Upload {
        let kind = if number.is_multiple_of(2) { ObjectKind::Cas } else { ObjectKind::Action };
        Upload { kind, digest: Digest { hash: Hash([number; 32]), size: 1 }, scope: Scope::default() }
    }

    /// Goal: what was handed in is forgotten only when done or counted as lost, runs once at a time, and every bound
    /// holds. Method: seeded walks against a set of what is unfinished.
    #[test]
    fn nothing_is_lost_silently() {
        for seed in 0..300 {
            let mut random = SplitMix64(seed);
            let limits = QueueLimits {
                queued: 1 + random.below(12) as usize,
                owed: random.below(12) as usize,
                running: 1 + random.below(6) as u32,
            };
            let mut queue = UploadQueue::new(limits);
            let (mut unfinished, mut running) = (BTreeSet::new(), Vec::new());
            for _ in 0..600 {
                match random.below(8) {
                    0..=2 => {
                        let new = upload(random.below(40) as u8);
                        match queue.push(new.clone()) {
                            Pushed::Ready | Pushed::Owed => assert!(unfinished.insert(new), "seed {seed}"),
                            Pushed::Coalesced => assert!(unfinished.contains(&new), "seed {seed}"),
                            Pushed::Refused => assert!(!unfinished.contains(&new), "seed {seed}"),
                        }
                    }
                    3 | 4 => {
                        if let Some(started) = queue.start() {
                            assert!(!running.contains(&started) && unfinished.contains(&started), "seed {seed}");
                            running.push(started);
                        }
                    }
                    5 if !running.is_empty() => {
                        let ended = running.swap_remove(random.below(running.len() as u64) as usize);
                        let end = if random.below(2) == 0 { End::Done } else { End::Owed };
                        match queue.finish(ended.clone(), end) {
                            Ended::Forgotten => assert!(end == End::Done && unfinished.remove(&ended)),
                            Ended::Lost => assert!(end == End::Owed && unfinished.remove(&ended)),
                            Ended::ReadyAgain | Ended::Owed => {}
                        }
                    }
                    6 => {
                        let (_, lost) = queue.postpone();
                        lost.iter().for_each(|lost| assert!(unfinished.remove(lost)));
                    }
                    _ => match random.below(3) {
                        0 => queue.throttled(),
                        1 => queue.succeeded(),
                        _ => drop(queue.retry_owed()),
                    },
                }
                assert_eq!(queue.all().collect::<BTreeSet<_>>(), unfinished, "seed {seed}");
                assert!(queue.all().all(|upload| queue.contains(&upload)), "seed {seed}");
                assert!(!queue.contains(&upload(40)), "seed {seed}");
                assert!(queue.running() == running.len() && running.len() <= limits.running as usize);
                assert!(queue.owed() <= limits.owed, "seed {seed}");
                // What is handed in anew while it runs may be one more.
                assert!(queue.depth() <= limits.queued + limits.running as usize, "seed {seed}");
            }
        }
    }

    /// Goal: what did not fit into the queue has its turn as soon as nothing else has, without a retry; what failed waits
    /// for one. Method: more than fits, each of which is run, one of them in vain.
    #[test]
    fn what_did_not_fit_comes_next() {
        let mut queue = UploadQueue::new(QueueLimits { queued: 2, owed: 3, running: 1 });
        let pushed: Vec<_> = (0..6).map(|number| queue.push(upload(number))).collect();
        assert_eq!(pushed[..2], [Pushed::Ready; 2]);
        assert_eq!((&pushed[2..5], pushed[5]), (&[Pushed::Owed; 3][..], Pushed::Refused));
        for number in 0..5 {
            assert_eq!(queue.start(), Some(upload(number)));
            queue.finish(upload(number), if number == 3 { End::Owed } else { End::Done });
            assert_eq!(queue.is_idle(), number == 4, "after {number}");
        }
        assert_eq!((queue.start(), queue.owed(), queue.retry_owed()), (None, 1, 1));
        assert_eq!(queue.start(), Some(upload(3)));
    }

    /// Goal: where no upload may run, what a former run owes is kept and none is started. Method: all ways to start one.
    #[test]
    fn no_uploaders() {
        let mut queue = UploadQueue::new(QueueLimits { queued: 0, owed: 3, running: 0 });
        assert_eq!(queue.push(upload(1)), Pushed::Owed);
        queue.throttled();
        queue.succeeded();
        assert_eq!((queue.retry_owed(), queue.start(), queue.owed(), queue.depth()), (0, None, 1, 0));
        assert!(queue.is_idle());
    }

    /// Goal: a thing that changes while it is uploaded is uploaded again. Method: one, step by step.
    #[test]
    fn changed_while_running() {
        let mut queue = UploadQueue::new(QueueLimits { queued: 4, owed: 4, running: 2 });
        assert_eq!((queue.push(upload(1)), queue.push(upload(1))), (Pushed::Ready, Pushed::Coalesced));
        let started = queue.start().expect("one is ready");
        assert_eq!((queue.start(), queue.push(started.clone())), (None, Pushed::Coalesced));
        assert_eq!(queue.finish(started, End::Done), Ended::ReadyAgain);
        let started = queue.start().expect("it is ready again");
        assert_eq!(queue.finish(started.clone(), End::Owed), Ended::Owed);
        assert_eq!((queue.start(), queue.retry_owed()), (None, 1));
        assert_eq!(queue.start(), Some(started.clone()));
        assert_eq!((queue.finish(started, End::Done), queue.is_empty()), (Ended::Forgotten, true));
    }
}
