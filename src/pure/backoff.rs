//! How long to wait before a call to a backend is tried again. The jitter is a function of the call's number and the
//! retry's, so a run replays.

use std::time::Duration;

use super::random::SplitMix64;

/// Tries of a call that failed for a passing reason, the first one included.
pub const TRIES_TRANSIENT: u32 = 3;
/// Tries of an upload that the backend throttles, the first one included.
pub const TRIES_THROTTLED: u32 = 6;
/// The longest `Retry-After` that is honoured; a longer one counts as none.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

const TRANSIENT_FIRST: Duration = Duration::from_millis(100);
const THROTTLED_FIRST_MS: u64 = 1_000;
const THROTTLED_MOST_MS: u64 = 16_000;

/// Why a call is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A lost connection, a 500.
    Transient,
    /// 429 or 503, with the time that the backend asked for.
    Throttled { retry_after: Option<Duration> },
}

/// What is retried how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// Reads, lists and deletes: somebody waits, so throttling too gets the short schedule.
    Short,
    /// Uploads: nobody waits, so throttling is waited out.
    Patient,
}

/// The tries of one call.
#[derive(Debug, Clone)]
pub struct Backoff {
    schedule: Schedule,
    /// Names the call in the process, for the jitter.
    call: u64,
    /// Retries of each kind so far.
    transient: u32,
    throttled: u32,
}

impl Backoff {
    pub fn new(schedule: Schedule, call: u64) -> Self {
        Self { schedule, call, transient: 0, throttled: 0 }
    }

    /// The wait before the next try; `None` when there is none.
    pub fn next_wait(&mut self, reason: Reason) -> Option<Duration> {
        let asked = match reason {
            Reason::Throttled { retry_after } => retry_after.filter(|asked| *asked <= RETRY_AFTER_MAX),
            Reason::Transient => None,
        };
        if self.schedule == Schedule::Patient && matches!(reason, Reason::Throttled { .. }) {
            self.throttled += 1;
            let wait = throttled_wait(self.call, self.throttled);
            return (self.throttled < TRIES_THROTTLED).then_some(asked.map_or(wait, |asked| asked.max(wait)));
        }
        self.transient += 1;
        let wait = TRANSIENT_FIRST * 2u32.pow((self.transient - 1).min(16));
        // Somebody waits for the answer: a longer wait than our own is an answer too, namely no.
        (self.transient < TRIES_TRANSIENT && asked.is_none_or(|asked| asked <= wait)).then_some(wait)
    }
}

/// The wait before retry `retry` (from 1) of a throttled upload: in [c/2, c), c = min(1 s x 2^(retry-1), 16 s).
pub fn throttled_wait(call: u64, retry: u32) -> Duration {
    let ceiling = THROTTLED_FIRST_MS.saturating_mul(1 << (retry - 1).min(32)).min(THROTTLED_MOST_MS);
    let mut random = SplitMix64(SplitMix64(call).word() ^ u64::from(retry));
    Duration::from_millis(ceiling / 2 + random.below(ceiling / 2))
}

/// When all that is owed to a backend is tried again: the wait after a pass doubles with each pass since the backend last took
/// something. Times count from any fixed moment.
#[derive(Debug, Clone)]
pub struct Passes {
    first: Duration,
    most: Duration,
    last: Option<Duration>,
    /// Passes since the last success.
    fruitless: u32,
}

impl Passes {
    /// The first wait, and the longest.
    pub fn new(first: Duration, most: Duration) -> Self {
        Self { first, most, last: None, fruitless: 0 }
    }

    /// Whether it is time for a pass.
    pub fn is_due(&self, now: Duration) -> bool {
        let wait = self.first.saturating_mul(1 << self.fruitless.saturating_sub(1).min(16)).min(self.most);
        self.last.is_none_or(|last| now >= last + wait)
    }

    /// A pass has begun.
    pub fn begun(&mut self, now: Duration) {
        self.last = Some(now);
        self.fruitless = self.fruitless.saturating_add(1);
    }

    /// The backend took something.
    pub fn succeeded(&mut self) {
        self.fruitless = 0;
    }

    /// The backend is well again: the next pass is due at once.
    pub fn healed(&mut self) {
        (self.last, self.fruitless) = (None, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(schedule: Schedule, call: u64, reason: Reason) -> Vec<Duration> {
        let mut backoff = Backoff::new(schedule, call);
        std::iter::from_fn(|| backoff.next_wait(reason)).collect()
    }

    /// Goal: three tries 100 ms and 200 ms apart, whatever the operation, and throttled reads the same.
    /// Method: the whole schedule of each combination.
    #[test]
    fn short_schedules() {
        let short = [100, 200].map(Duration::from_millis);
        let throttled = Reason::Throttled { retry_after: None };
        assert_eq!(waits(Schedule::Short, 1, Reason::Transient), short);
        assert_eq!(waits(Schedule::Patient, 2, Reason::Transient), short);
        assert_eq!(waits(Schedule::Short, 3, throttled), short);
        let asked = |ms| Reason::Throttled { retry_after: Some(Duration::from_millis(ms)) };
        assert_eq!(waits(Schedule::Short, 4, asked(2_000)), [Duration::ZERO; 0]);
        assert_eq!(waits(Schedule::Short, 4, asked(100)), short);
    }

    /// Goal: a throttled upload waits five times, each within [c/2, c), 15.5 s to 31 s in all, and replays.
    /// Method: the schedules of many calls.
    #[test]
    fn the_ladder_of_throttled_uploads() {
        let throttled = Reason::Throttled { retry_after: None };
        let mut distinct = std::collections::BTreeSet::new();
        for call in 0..2_000 {
            let waits = waits(Schedule::Patient, call, throttled);
            assert_eq!(waits.len(), 5);
            for (wait, ceiling) in waits.iter().zip([1_000, 2_000, 4_000, 8_000, 16_000]) {
                assert!((ceiling / 2..ceiling).contains(&(wait.as_millis() as u64)), "{waits:?}");
            }
            let all: Duration = waits.iter().sum();
            assert!((15_500..31_000).contains(&(all.as_millis() as u64)));
            assert_eq!(waits, super::tests::waits(Schedule::Patient, call, throttled));
            distinct.insert(waits);
        }
        assert!(distinct.len() > 1_990);
        // One random word would be the same remainder in all of them.
        let is_one_word = |waits: &&Vec<Duration>| {
            waits.windows(2).all(|pair| pair[0].as_millis() % 500 == pair[1].as_millis() % 500)
        };
        assert_eq!(distinct.iter().filter(is_one_word).count(), 0, "each wait has a jitter of its own");
    }

    /// Goal: a `Retry-After` within a minute lengthens the wait, a longer one is not believed.
    /// Method: both, against the wait without one.
    #[test]
    fn retry_after() {
        let first = |after| {
            let reason = Reason::Throttled { retry_after: after };
            Backoff::new(Schedule::Patient, 9).next_wait(reason).expect("a first retry")
        };
        assert_eq!(first(Some(Duration::from_secs(60))), Duration::from_secs(60));
        assert_eq!(first(Some(Duration::from_secs(61))), first(None));
        assert_eq!(first(Some(Duration::ZERO)), first(None));
    }

    /// Goal: passes that bring nothing come ever later, up to the longest wait, and soon again after a success. Method: a
    /// clock of the test that looks each second.
    #[test]
    fn passes() {
        let seconds = Duration::from_secs;
        let mut passes = Passes::new(seconds(15), seconds(300));
        let mut begun = Vec::new();
        for now in 0..1_000 {
            if passes.is_due(seconds(now)) {
                passes.begun(seconds(now));
                begun.push(now);
            }
        }
        assert_eq!(begun, [0, 15, 45, 105, 225, 465, 765]);
        passes.succeeded();
        assert!(!passes.is_due(seconds(779)) && passes.is_due(seconds(780)));
        passes.begun(seconds(1_000));
        assert!(!passes.is_due(seconds(1_014)) && passes.is_due(seconds(1_015)));
        passes.begun(seconds(1_015));
        assert!(!passes.is_due(seconds(1_044)));
        passes.healed();
        assert!(passes.is_due(seconds(1_016)));
        passes.begun(seconds(1_016));
        assert!(!passes.is_due(seconds(1_030)) && passes.is_due(seconds(1_031)));
        (0..100).for_each(|_| passes.begun(seconds(2_000)));
        assert!(!passes.is_due(seconds(2_299)) && passes.is_due(seconds(2_300)));
    }
}
