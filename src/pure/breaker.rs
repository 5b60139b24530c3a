//! The breaker of one backend: one in the process, on the core that owns the backend. Every other core sees it through
//! a `breaker_view`.
//!
//! Closed, it counts failures in a row over all cores. So many open it. Open, calls miss at once, for a fixed time. Then
//! it is half-open, and the owner sends one probe of its own, which decides. Each change of state has a new epoch, and
//! evidence of calls that began in another epoch changes nothing.

use std::time::Duration;

/// The numbers of a breaker.
#[derive(Debug, Clone, Copy)]
pub struct BreakerLimits {
    /// Failures in a row that open it.
    pub failures: u32,
    /// How long it stays open.
    pub open: Duration,
    /// After this a probe without an answer has failed.
    pub probe: Duration,
}

/// As the metric and the log have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Closed,
    HalfOpen,
    Open,
}

impl State {
    /// The value of `bazel_remote_s3_breaker_state`.
    pub fn number(self) -> u32 {
        match self {
            Self::Closed => 0,
            Self::HalfOpen => 1,
            Self::Open => 2,
        }
    }

    /// The word in logs and labels.
    pub fn word(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::HalfOpen => "half_open",
            Self::Open => "open",
        }
    }
}

/// What every core is told. A later one replaces an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announcement {
    pub epoch: u32,
    pub state: State,
    /// Changes when a run of failures begins: from then on each core reports its next success.
    pub watch: u32,
}

/// What a core reports: the calls of one epoch since its last report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evidence {
    pub epoch: u32,
    /// There was a success, which ends every run before it.
    pub succeeded: bool,
    /// Failures after it.
    pub failures: u32,
}

/// What the owner is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Tell every core.
    Announce(Announcement),
    /// Tell every core, and send the probe of this epoch.
    Probe(Announcement),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Closed { run: u32 },
    Open { until: Duration },
    HalfOpen { until: Duration },
}

/// The state machine. Times are durations since any fixed point.
#[derive(Debug, Clone)]
pub struct Breaker {
    limits: BreakerLimits,
    epoch: u32,
    watch: u32,
    phase: Phase,
}

impl Breaker {
    pub fn new(limits: BreakerLimits) -> Self {
        Self { limits, epoch: 0, watch: 0, phase: Phase::Closed { run: 0 } }
    }

    pub fn announcement(&self) -> Announcement {
        let state = match self.phase {
            Phase::Closed { .. } => State::Closed,
            Phase::Open { .. } => State::Open,
            Phase::HalfOpen { .. } => State::HalfOpen,
        };
        Announcement { epoch: self.epoch, state, watch: self.watch }
    }

    /// When `poll` is next needed.
    pub fn deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::Closed { .. } => None,
            Phase::Open { until } | Phase::HalfOpen { until } => Some(until),
        }
    }

    /// A core reports.
    pub fn handle_evidence(&mut self, evidence: Evidence, now: Duration) -> Option<Act> {
        let Phase::Closed { run } = &mut self.phase else { return None };
        if evidence.epoch != self.epoch {
            return None;
        }
        if evidence.succeeded {
            *run = 0;
        }
        let begins = *run == 0 && evidence.failures > 0;
        *run += evidence.failures;
        if *run >= self.limits.failures {
            return Some(Act::Announce(self.enter(Phase::Open { until: now + self.limits.open })));
        }
        if begins {
            self.watch = self.watch.wrapping_add(1);
            return Some(Act::Announce(self.announcement()));
        }
        None
    }

    /// Time has passed.
    pub fn poll(&mut self, now: Duration) -> Option<Act> {
        match self.phase {
            Phase::Open { until } if now >= until => {
                Some(Act::Probe(self.enter(Phase::HalfOpen { until: now + self.limits.probe })))
            }
            Phase::HalfOpen { until } if now >= until => self.handle_probe(self.epoch, false, now),
            _ => None,
        }
    }

    /// The probe of `epoch` has an answer.
    pub fn handle_probe(&mut self, epoch: u32, healthy: bool, now: Duration) -> Option<Act> {
        let Phase::HalfOpen { .. } = self.phase else { return None };
        if epoch != self.epoch {
            return None;
        }
        let next = if healthy { Phase::Closed { run: 0 } } else { Phase::Open { until: now + self.limits.open } };
        Some(Act::Announce(self.enter(next)))
    }

    fn enter(&mut self, phase: Phase) -> Announcement {
        self.phase = phase;
        self.epoch = self.epoch.wrapping_add(1);
        self.announcement()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: BreakerLimits =
        BreakerLimits { failures: 5, open: Duration::from_secs(15), probe: Duration::from_secs(5) };

    fn second(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    /// Goal: the rules in one story: five failures open it, a probe after 15 s, a failed and a lost probe open it for 15 s
    /// more, a good one closes it, and stragglers change nothing. Method: tell the story.
    #[test]
    fn a_story() {
        let mut breaker = Breaker::new(LIMITS);
        let failures = |epoch, failures| Evidence { epoch, succeeded: false, failures };
        assert!(matches!(breaker.handle_evidence(failures(0, 4), second(0)), Some(Act::Announce(a)) if a.watch == 1));
        assert_eq!(breaker.handle_evidence(Evidence { epoch: 0, succeeded: true, failures: 0 }, second(0)), None);
        assert!(matches!(breaker.handle_evidence(failures(0, 4), second(1)), Some(Act::Announce(a)) if a.watch == 2));
        assert_eq!(breaker.handle_evidence(Evidence { epoch: 0, succeeded: true, failures: 0 }, second(1)), None);
        assert!(matches!(breaker.handle_evidence(failures(0, 2), second(1)), Some(Act::Announce(a)) if a.watch == 3));
        assert_eq!(breaker.handle_evidence(failures(0, 2), second(1)), None, "the run has been announced");
        let opened = breaker.handle_evidence(failures(0, 1), second(1));
        assert!(matches!(opened, Some(Act::Announce(Announcement { epoch: 1, state: State::Open, .. }))));
        assert_eq!(breaker.handle_evidence(Evidence { epoch: 0, succeeded: true, failures: 0 }, second(2)), None);
        assert_eq!((breaker.deadline(), breaker.poll(second(15))), (Some(second(16)), None));
        let probe = breaker.poll(second(16));
        assert!(matches!(probe, Some(Act::Probe(Announcement { epoch: 2, state: State::HalfOpen, .. }))));
        assert_eq!(breaker.poll(second(17)), None);
        let failed = breaker.handle_probe(2, false, second(18));
        assert!(matches!(failed, Some(Act::Announce(Announcement { epoch: 3, state: State::Open, .. }))));
        assert_eq!(breaker.handle_probe(2, true, second(19)), None);
        assert!(matches!(breaker.poll(second(33)), Some(Act::Probe(a)) if a.epoch == 4));
        let lost = breaker.poll(second(38));
        assert!(matches!(lost, Some(Act::Announce(Announcement { epoch: 5, state: State::Open, .. }))));
        assert_eq!(breaker.handle_probe(4, true, second(39)), None);
        assert!(matches!(breaker.poll(second(53)), Some(Act::Probe(a)) if a.epoch == 6));
        let closed = breaker.handle_probe(6, true, second(54));
        assert!(matches!(closed, Some(Act::Announce(Announcement { epoch: 7, state: State::Closed, .. }))));
        assert_eq!((breaker.deadline(), breaker.poll(second(99))), (None, None));
    }

    /// Goal: in every history there is at most one probe out, it is only sent 15 s after an opening, and only evidence
    /// of the current epoch opens or clears. Method: all histories of seven events against a plain model of the rules.
    #[test]
    fn all_short_histories() {
        const EVENTS: u32 = 7;
        const LENGTH: u32 = 7;
        let limits = BreakerLimits { failures: 2, ..LIMITS };
        for history in 0..EVENTS.pow(LENGTH) {
            let mut breaker = Breaker::new(limits);
            let (mut now, mut rest) = (Duration::ZERO, history);
            let (mut run, mut opened, mut probe): (u32, Option<Duration>, Option<u32>) = (0, None, None);
            for _ in 0..LENGTH {
                let (event, epoch) = (rest % EVENTS, breaker.epoch);
                rest /= EVENTS;
                let before = breaker.announcement();
                let evidence = |epoch, succeeded, failures| Evidence { epoch, succeeded, failures };
                let act = match event {
                    0 => breaker.handle_evidence(evidence(epoch, false, 1), now),
                    1 => breaker.handle_evidence(evidence(epoch, true, 0), now),
                    2 => breaker.handle_evidence(evidence(epoch.wrapping_sub(1), false, 9), now),
                    3 => breaker.handle_probe(epoch, true, now),
                    4 => breaker.handle_probe(epoch.wrapping_sub(2), true, now),
                    5 => breaker.handle_probe(epoch, false, now),
                    _ => {
                        now += second(15);
                        breaker.poll(now)
                    }
                };
                match (event, before.state) {
                    (0, State::Closed) => run += 1,
                    (1, State::Closed) => run = 0,
                    (3, State::HalfOpen) => (run, opened, probe) = (0, None, None),
                    (5, State::HalfOpen) => (opened, probe) = (Some(now), None),
                    (6, State::HalfOpen) => (opened, probe) = (Some(now), None),
                    _ => {}
                }
                if run >= 2 && opened.is_none() && before.state == State::Closed {
                    opened = Some(now);
                }
                if let Some(Act::Probe(announced)) = act {
                    assert!(probe.is_none() && opened.is_some_and(|at| now >= at + limits.open), "{history}");
                    probe = Some(announced.epoch);
                }
                let state = match (opened, probe) {
                    (None, _) => State::Closed,
                    (Some(_), None) => State::Open,
                    (Some(_), Some(_)) => State::HalfOpen,
                };
                let after = breaker.announcement();
                assert_eq!(after.state, state, "history {history}");
                assert_eq!(after.epoch != before.epoch, after.state != before.state, "history {history}");
                assert_eq!(act.is_none(), after == before, "history {history}");
            }
        }
    }
}
