//! One core's view of a backend's breaker: it admits calls without asking anybody, and gathers what the owner must know.

use super::breaker::{Announcement, Evidence, State};

/// A call was admitted; it carries the epoch in which it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    epoch: u32,
}

/// What a call says about the backend's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// It answered; a clean miss is an answer.
    Good,
    /// It did not, or with an error of its own.
    Bad,
    /// Throttled, cancelled by us, or a malformed object: says nothing.
    Unknown,
}

/// The view.
#[derive(Debug)]
pub struct BreakerView {
    announced: Announcement,
    /// The next success must be reported: somewhere a run of failures has begun.
    armed: bool,
    /// Not reported yet.
    pending: Option<Evidence>,
}

impl Default for BreakerView {
    fn default() -> Self {
        Self { announced: Announcement { epoch: 0, state: State::Closed, watch: 0 }, armed: false, pending: None }
    }
}

impl BreakerView {
    pub fn state(&self) -> State {
        self.announced.state
    }

    /// Whether a call may begin now.
    pub fn admit(&self) -> Option<Ticket> {
        (self.announced.state == State::Closed).then_some(Ticket { epoch: self.announced.epoch })
    }

    /// The owner has announced.
    pub fn handle_announcement(&mut self, announced: Announcement) {
        let newer = announced.epoch.wrapping_sub(self.announced.epoch) as i32;
        if newer < 0 {
            return;
        }
        if newer > 0 {
            (self.armed, self.pending) = (false, None);
        } else if announced.watch != self.announced.watch {
            self.armed = true;
        }
        self.announced = announced;
    }

    /// A call that was admitted has ended.
    pub fn handle_outcome(&mut self, ticket: Ticket, health: Health) {
        let epoch = self.announced.epoch;
        if ticket.epoch != epoch {
            return;
        }
        match health {
            Health::Unknown => {}
            Health::Bad => {
                let pending = self.pending.get_or_insert(Evidence { epoch, succeeded: false, failures: 0 });
                pending.failures += 1;
                self.armed = true;
            }
            Health::Good if self.armed => {
                self.pending = Some(Evidence { epoch, succeeded: true, failures: 0 });
                self.armed = false;
            }
            Health::Good => {}
        }
    }

    /// What must be reported now.
    pub fn take_report(&mut self) -> Option<Evidence> {
        self.pending.take()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::time::Duration;

    use super::super::breaker::{Act, Breaker, BreakerLimits};
    use super::super::random::SplitMix64;
    use super::*;

    const LIMITS: BreakerLimits =
        BreakerLimits { failures: 5, open: Duration::from_secs(15), probe: Duration::from_secs(5) };

    /// Goal: nothing is reported while all is well; failures are, and then one success.
    /// Method: one view, step by step.
    #[test]
    fn reports_only_in_trouble() {
        let mut view = BreakerView::default();
        let ticket = view.admit().expect("closed");
        view.handle_outcome(ticket, Health::Good);
        view.handle_outcome(ticket, Health::Unknown);
        assert_eq!(view.take_report(), None);
        view.handle_outcome(ticket, Health::Bad);
        let report = view.take_report().expect("a failure");
        assert_eq!(report, Evidence { epoch: 0, succeeded: false, failures: 1 });
        view.handle_outcome(ticket, Health::Bad);
        view.handle_outcome(ticket, Health::Bad);
        assert_eq!(view.take_report(), Some(Evidence { epoch: 0, succeeded: false, failures: 2 }));
        view.handle_outcome(ticket, Health::Good);
        assert_eq!(view.take_report(), Some(Evidence { epoch: 0, succeeded: true, failures: 0 }));
        view.handle_outcome(ticket, Health::Good);
        assert_eq!(view.take_report(), None);
        // What is reported at once, after outcomes in this order: there is a success, and so many failures after it.
        for (outcomes, succeeded, failures) in [
            (&[Health::Bad, Health::Good, Health::Good][..], true, 0),
            (&[Health::Good, Health::Bad, Health::Bad], false, 2),
            (&[Health::Good, Health::Bad], true, 1),
            (&[Health::Good], true, 0),
        ] {
            outcomes.iter().for_each(|health| view.handle_outcome(ticket, *health));
            assert_eq!(view.take_report(), Some(Evidence { epoch: 0, succeeded, failures }), "{outcomes:?}");
        }
        view.handle_announcement(Announcement { epoch: 0, state: State::Closed, watch: 1 });
        view.handle_outcome(ticket, Health::Good);
        assert!(view.take_report().is_some_and(|report| report.succeeded));
        view.handle_outcome(ticket, Health::Bad);
        for (epoch, state) in [(1, State::Open), (2, State::HalfOpen), (3, State::Open)] {
            view.handle_announcement(Announcement { epoch, state, watch: 1 });
            assert_eq!((view.admit(), view.take_report()), (None, None), "{state:?}");
            view.handle_outcome(ticket, Health::Bad);
        }
        assert_eq!(view.take_report(), None);
        view.handle_announcement(Announcement { epoch: 0, state: State::Closed, watch: 1 });
        assert_eq!(view.state(), State::Open);
    }

    /// One owner, some cores, and the messages between them, which arrive late but in order.
    struct World {
        breaker: Breaker,
        views: Vec<BreakerView>,
        to_owner: Vec<VecDeque<Evidence>>,
        to_core: Vec<VecDeque<Announcement>>,
        /// Calls in flight: core, ticket.
        calls: Vec<(usize, Ticket)>,
        probe: Option<u32>,
        opened: Option<Duration>,
        now: Duration,
    }

    impl World {
        fn new(cores: usize) -> Self {
            Self {
                breaker: Breaker::new(LIMITS),
                views: (0..cores).map(|_| BreakerView::default()).collect(),
                to_owner: vec![VecDeque::new(); cores],
                to_core: vec![VecDeque::new(); cores],
                calls: Vec::new(),
                probe: None,
                opened: None,
                now: Duration::ZERO,
            }
        }

        fn act(&mut self, act: Option<Act>) {
            let announced = match act {
                None => return,
                Some(Act::Announce(announced)) => announced,
                Some(Act::Probe(announced)) => {
                    assert_eq!(self.probe, None, "a second probe");
                    assert!(self.opened.is_some_and(|at| self.now >= at + LIMITS.open), "a probe too early");
                    self.probe = Some(announced.epoch);
                    announced
                }
            };
            match announced.state {
                State::Open => (self.opened, self.probe) = (Some(self.now), None),
                State::Closed => (self.opened, self.probe) = (None, None),
                State::HalfOpen => {}
            }
            self.to_core.iter_mut().for_each(|inbox| inbox.push_back(announced));
        }

        fn finish(&mut self, call: usize, health: Health) {
            let (core, ticket) = self.calls.swap_remove(call);
            self.views[core].handle_outcome(ticket, health);
            self.to_owner[core].extend(self.views[core].take_report());
        }

        fn deliver(&mut self, core: usize) {
            if let Some(evidence) = self.to_owner[core].pop_front() {
                let act = self.breaker.handle_evidence(evidence, self.now);
                self.act(act);
            }
            if let Some(announced) = self.to_core[core].pop_front() {
                self.views[core].handle_announcement(announced);
            }
        }

        fn settle(&mut self) {
            while self.to_owner.iter().any(|q| !q.is_empty()) || self.to_core.iter().any(|q| !q.is_empty()) {
                (0..self.views.len()).for_each(|core| self.deliver(core));
            }
        }
    }

    /// Goal: with messages late and reordered between cores there is never more than one probe, never one early, and
    /// every view ends where the owner is; a sick backend ends open, a healthy one closed.
    /// Method: seeded walks of 1 to 16 cores; after each walk all is delivered and the backend stays sick or healthy.
    #[test]
    fn many_cores() {
        for seed in 0..400 {
            let mut random = SplitMix64(seed);
            let cores = 1 + random.below(16) as usize;
            let mut world = World::new(cores);
            for _ in 0..600 {
                let core = random.below(cores as u64) as usize;
                match random.below(8) {
                    0 | 1 => world.calls.extend(world.views[core].admit().map(|ticket| (core, ticket))),
                    2..=4 if !world.calls.is_empty() => {
                        let call = random.below(world.calls.len() as u64) as usize;
                        let health = [Health::Bad, Health::Bad, Health::Good, Health::Unknown];
                        world.finish(call, health[random.below(4) as usize]);
                    }
                    5 => world.deliver(core),
                    6 => {
                        world.now += Duration::from_millis(random.below(9_000));
                        let act = world.breaker.poll(world.now);
                        world.act(act);
                    }
                    _ => {
                        if let Some(epoch) = world.probe.filter(|_| random.below(4) == 0) {
                            let act = world.breaker.handle_probe(epoch, random.below(2) == 0, world.now);
                            world.act(act);
                        }
                    }
                }
            }
            world.settle();
            assert!(world.views.iter().all(|view| view.state() == world.breaker.announcement().state), "seed {seed}");
            let healthy = random.below(2) == 0;
            // Whatever is still in flight is a straggler or evidence; both may come.
            while !world.calls.is_empty() {
                world.finish(0, if healthy { Health::Good } else { Health::Bad });
                world.settle();
            }
            for _ in 0..6 {
                for core in 0..cores.max(5) {
                    let core = core % cores;
                    if let Some(ticket) = world.views[core].admit() {
                        world.calls.push((core, ticket));
                        world.finish(0, if healthy { Health::Good } else { Health::Bad });
                        world.settle();
                    }
                }
                world.now += LIMITS.open;
                let act = world.breaker.poll(world.now);
                world.act(act);
                if let Some(epoch) = world.probe {
                    let act = world.breaker.handle_probe(epoch, healthy, world.now);
                    world.act(act);
                }
                world.settle();
            }
            let expected = if healthy { State::Closed } else { State::Open };
            assert_eq!(world.breaker.announcement().state, expected, "seed {seed}");
        }
    }

    /// Goal: a backend that fails now and then, among successes on other cores, never opens. Method: 16 cores, one of
    /// which fails every call, each failure followed by a success elsewhere.
    #[test]
    fn successes_elsewhere_end_a_run() {
        let mut world = World::new(16);
        for round in 0..200 {
            for (core, health) in [(0, Health::Bad), (1 + round % 15, Health::Good)] {
                let ticket = world.views[core].admit().expect("it stays closed");
                world.calls.push((core, ticket));
                world.finish(0, health);
                world.settle();
            }
        }
        assert_eq!(world.breaker.announcement().state, State::Closed);
    }
}
