//! Who gives the workers their calls, and when: as fast as they take them, or at fixed times (open loop).

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use crate::job::{Job, Push};
use crate::scenario::Make;
use crate::stamped::Stamped;

/// Calls at a fixed rate: call `i` is due `i / rate` seconds after the start, whatever became of those before.
#[derive(Clone, Copy)]
pub struct Schedule {
    start: Instant,
    rate: f64,
}

impl Schedule {
    pub fn new(start: Instant, rate: f64) -> Self {
        Self { start, rate }
    }

    pub fn due(&self, index: u64) -> Instant {
        self.start + Duration::from_secs_f64(index as f64 / self.rate)
    }

    /// How many calls are due at `now`.
    fn due_count(&self, now: Instant) -> u64 {
        let passed = now.saturating_duration_since(self.start).as_secs_f64();
        let mut count = (passed * self.rate) as u64;
        // Both directions round: `due` decides.
        while self.due(count) <= now {
            count += 1;
        }
        count
    }

    /// Gives a permit for each call at its time until nobody holds `permits`, and after `count` one for each of `workers`,
    /// so that all of them see the end. A thread of its own: the timer of tokio is too coarse.
    fn pace(self, permits: Weak<Semaphore>, count: u64, workers: usize) {
        std::thread::spawn(move || {
            let mut issued = 0;
            while issued < count {
                std::thread::sleep(self.due(issued).saturating_duration_since(Instant::now()));
                let Some(permits) = permits.upgrade() else { return };
                let due = self.due_count(Instant::now()).min(count);
                permits.add_permits(due.saturating_sub(issued) as usize);
                issued = issued.max(due);
            }
            if let Some(permits) = permits.upgrade() {
                permits.add_permits(workers);
            }
        });
    }
}

/// How many calls a rate makes due within `duration`, one at least.
pub fn calls_within(rate: f64, duration: Duration) -> u64 {
    ((rate * duration.as_secs_f64()).ceil() as u64).max(1)
}

/// Jobs: those made beforehand, then those to be tried again, then new ones until the end.
pub struct Supply {
    prepared: VecDeque<Job>,
    again: VecDeque<Push>,
    make: Make,
    next_serial: u64,
    given: u64,
    count: u64,
    pub deadline: Option<Instant>,
    schedule: Option<Schedule>,
    /// What became of the pushed blobs.
    pub ledger: Ledger,
}

/// Blobs of a burst whose fate is certain.
#[derive(Default)]
pub struct Ledger {
    pub acknowledged: Vec<Stamped>,
    /// Refused, and not tried again.
    pub refused: Vec<Stamped>,
    refusals: u64,
}

impl Supply {
    pub fn new(make: Make, count: u64) -> Self {
        Self {
            prepared: VecDeque::new(),
            again: VecDeque::new(),
            make,
            next_serial: 0,
            given: 0,
            count,
            deadline: None,
            schedule: None,
            ledger: Ledger::default(),
        }
    }

    /// Makes jobs ahead until they are enough, or hold `bytes_max`.
    pub fn prepare(&mut self, jobs_max: u64, bytes_max: u64) {
        let mut held = 0;
        for _ in 0..self.count.min(jobs_max) {
            let job = self.make_one();
            held += job.held_bytes();
            self.prepared.push_back(job);
            if held >= bytes_max {
                break;
            }
        }
    }

    /// The next job, and when it was due in an open loop.
    pub fn next(&mut self, now: Instant) -> Option<(Job, Option<Instant>)> {
        if self.given >= self.count || self.deadline.is_some_and(|deadline| now >= deadline) {
            return None;
        }
        let due = self.schedule.map(|schedule| schedule.due(self.given));
        self.given += 1;
        let job = self.prepared.pop_front().or_else(|| self.again.pop_front().map(Job::Push));
        Some((job.unwrap_or_else(|| self.make_one()), due))
    }

    /// From now on calls are due at their times. Returns what workers must take a permit of for each call.
    pub fn open_loop(&mut self, schedule: Schedule, workers: usize) -> Arc<Semaphore> {
        self.schedule = Some(schedule);
        let permits = Arc::new(Semaphore::new(0));
        schedule.pace(Arc::downgrade(&permits), self.count, workers);
        permits
    }

    pub fn acknowledged(&mut self, push: &Push) {
        self.ledger.acknowledged.push(push.blob);
    }

    /// A refused blob is tried again while a deadline is what ends the phase. Each 64th is given up for good, so that
    /// there is something to look for that must not exist.
    pub fn refused(&mut self, push: Push) {
        const GIVEN_UP_EACH: u64 = 64;
        self.ledger.refusals += 1;
        if self.deadline.is_none() || self.ledger.refusals % GIVEN_UP_EACH == 1 {
            self.ledger.refused.push(push.blob);
        } else {
            self.again.push_back(push);
        }
    }

    fn make_one(&mut self) -> Job {
        self.next_serial += 1;
        (self.make)(self.next_serial - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::payload::Maker;
    use crate::stamped::Family;

    /// Goal: an open loop neither drifts nor skips: as many calls are due as the rate says, each at its time. Method:
    /// rates from one in a minute to a million a second, at moments up to a day.
    #[test]
    fn schedule_keeps_its_rate() {
        let start = Instant::now();
        for rate in [1.0 / 60.0, 0.7, 3.0, 999.0, 12_345.6, 1e6] {
            let schedule = Schedule::new(start, rate);
            assert_eq!((schedule.due(0), schedule.due_count(start)), (start, 1));
            for index in [1, 2, 3, 10, 999, 100_000] {
                let due = schedule.due(index);
                assert_eq!(schedule.due_count(due), index + 1, "{rate}, {index}");
                assert!((due - start).as_secs_f64() - index as f64 / rate < 1e-6);
            }
            let last = calls_within(rate, Duration::from_secs(120)) - 1;
            assert!(schedule.due(last) < start + Duration::from_secs(120), "{rate}");
            assert!(schedule.due(last + 1) >= start + Duration::from_secs(120), "{rate}");
        }
    }

    fn supply(count: u64) -> Supply {
        let maker = Maker { seed: 1, compressibility: 0.5, zstd: false };
        let family = Rc::new(Family::new(&maker, 100, 50));
        let push = move |serial| Push {
            kind: "write",
            family: Rc::clone(&family),
            blob: family.blob(serial, 100),
            name: "".into(),
            pause: Duration::ZERO,
        };
        Supply::new(Box::new(move |serial| Job::Push(push(serial))), count)
    }

    fn push(supply: &mut Supply) -> Option<Push> {
        supply.next(Instant::now()).and_then(|(job, _)| job.push())
    }

    /// Goal: refused blobs come again before new ones, but for those that are given up; prepared ones first of all.
    /// Method: 200 blobs of which each is refused once.
    #[test]
    fn refused_blobs_come_again() {
        let mut supply = supply(u64::MAX);
        supply.prepare(200, u64::MAX);
        supply.deadline = Some(Instant::now() + Duration::from_hours(1));
        for serial in 0..200 {
            let push = push(&mut supply).expect("endless");
            assert_eq!(push.blob.serial, serial);
            supply.refused(push);
        }
        let refused: Vec<_> = supply.ledger.refused.iter().map(|blob| blob.serial).collect();
        assert_eq!(refused, [0, 64, 128, 192]);
        let again: Vec<_> = (0..197).filter_map(|_| push(&mut supply)).map(|push| push.blob.serial).collect();
        assert_eq!((again[0], again[63], again[195], again[196]), (1, 65, 199, 200));
    }

    /// Goal: a counted phase offers each blob once, and ends. Method: three blobs, all refused.
    #[test]
    fn a_counted_supply_ends() {
        let mut supply = supply(3);
        while let Some(push) = push(&mut supply) {
            supply.refused(push);
        }
        assert_eq!(supply.ledger.refused.len(), 3);
        supply.deadline = Some(Instant::now());
        supply.count = 10;
        assert!(push(&mut supply).is_none(), "the time is over");
    }
}
