//! How many uploads to a backend may run at a time: additive increase, multiplicative decrease (RFC 5681's idea). Each
//! throttle halves it at once; each window of successes adds one.

/// The pace of one backend's uploads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    limit: u32,
    most: u32,
    /// Successes since the limit last changed.
    succeeded: u32,
}

impl Pace {
    /// Starts at `most`.
    pub fn new(most: u32) -> Self {
        Self { limit: most, most, succeeded: 0 }
    }

    /// Uploads that may run at a time: at least 1, or none where there may never be one.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// The backend asked for less.
    pub fn throttled(&mut self) {
        self.limit = (self.limit / 2).max(1).min(self.most);
        self.succeeded = 0;
    }

    /// An upload succeeded.
    pub fn succeeded(&mut self) {
        if self.limit == self.most {
            return;
        }
        self.succeeded += 1;
        if self.succeeded >= self.limit {
            self.limit += 1;
            self.succeeded = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::SplitMix64;
    use super::*;

    /// Goal: the pace falls at the first throttle, never below 1, and comes back by one for each window.
    /// Method: walk it down and up again.
    #[test]
    fn falls_at_once_and_comes_back_slowly() {
        let mut pace = Pace::new(64);
        let mut limits = Vec::new();
        for _ in 0..8 {
            pace.throttled();
            limits.push(pace.limit());
        }
        assert_eq!(limits, [32, 16, 8, 4, 2, 1, 1, 1]);
        let mut successes = 0;
        while pace.limit() < 64 {
            let before = pace.limit();
            (0..before).for_each(|_| pace.succeeded());
            successes += before;
            assert_eq!(pace.limit(), before + 1);
        }
        assert_eq!(successes, (1..64).sum::<u32>());
    }

    /// Goal: the limit stays within its bounds, whatever comes. Method: seeded walks.
    #[test]
    fn stays_within_its_bounds() {
        for seed in 0..200 {
            let mut random = SplitMix64(seed);
            let most = random.below(100) as u32;
            let mut pace = Pace::new(most);
            for _ in 0..500 {
                if random.below(8) == 0 {
                    pace.throttled()
                } else {
                    pace.succeeded()
                }
                assert!((most.min(1)..=most).contains(&pace.limit()), "seed {seed}");
            }
        }
    }
}
