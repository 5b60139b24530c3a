//! How long a peer may keep us waiting, by what it has brought or taken: a store of time that waiting draws down and bytes fill.
//! Time in which nobody waits for the peer (a slow disk, a full memory) does not count.
//!
//! Why not the window of `progress`: what a peer takes is seen in bursts, as the kernel's buffer drains, of megabytes that may
//! last longer than any window. Handed to the kernel they are counted before the peer has them, so a store that is large
//! enough never runs out for one that keeps up with the floor.

use std::time::Duration;

/// What one peer has left.
#[derive(Debug, Clone, Copy)]
pub struct Allowance {
    /// Bytes per second that a peer must bring or take on the average.
    floor: u64,
    left_us: u64,
    most_us: u64,
}

impl Allowance {
    /// `first` is there before any byte, and there is never more than `most`.
    pub fn new(floor: u64, first: Duration, most: Duration) -> Self {
        let (left_us, most_us) = (micros(first), micros(most));
        Self { floor, left_us: left_us.min(most_us), most_us }
    }

    /// How long may be waited from now on until bytes move.
    pub fn left(&self) -> Duration {
        Duration::from_micros(self.left_us)
    }

    /// `waited` has passed in waiting, and `bytes` moved at its end. What was waited too long is not owed: whoever waits looks
    /// at `left`, and looks late when it was itself held up.
    pub fn moved(&mut self, waited: Duration, bytes: u64) {
        let earned = bytes.saturating_mul(1_000_000) / self.floor;
        self.left_us = self.left_us.saturating_sub(micros(waited)).saturating_add(earned).min(self.most_us);
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOOR: u64 = 1 << 10;
    const MINUTE: Duration = Duration::from_secs(60);

    /// When a peer that moves `bytes` each `period` has used up its time, if it does within a day.
    fn end(first: Duration, most: Duration, period: Duration, bytes: u64) -> Option<Duration> {
        let mut allowance = Allowance::new(FLOOR, first, most);
        let mut now = Duration::ZERO;
        while now < Duration::from_secs(86_400) {
            if allowance.left() < period {
                return Some(now + allowance.left());
            }
            allowance.moved(period, bytes);
            now += period;
        }
        None
    }

    /// Goal: silence ends a peer after what it has left, a trickle soon after, the floor itself never. Method: steady peers
    /// around the floor, in steps of a quarter second and of half a minute.
    #[test]
    fn the_floor() {
        for (period_ms, bytes, expected_s) in [
            (250, 0, Some(60)),
            (250, 1, Some(60)),
            (250, FLOOR / 8, Some(119)),
            (250, FLOOR / 4 - 1, Some(15_289)),
            (250, FLOOR / 4, None),
            (250, 1 << 20, None),
            (30_000, 0, Some(60)),
            (30_000, 1, Some(60)),
            (30_000, 30 * FLOOR, None),
            (60_001, 1 << 30, Some(60)),
        ] {
            let period = Duration::from_millis(period_ms);
            let ended = end(MINUTE, MINUTE, period, bytes).map(|end| end.as_secs());
            assert_eq!(ended, expected_s, "{bytes} bytes each {period:?}");
        }
    }

    /// Goal: bursts that last longer than the first allowance are no fault where there is room for them. Method: 2 MiB at a
    /// time, each for as long as it takes at the floor, as a full buffer of the kernel drains; the first one comes at once.
    #[test]
    fn bursts_are_counted_by_their_bytes() {
        let (burst, room) = (2 << 20, Duration::from_secs(3600));
        let mut allowance = Allowance::new(FLOOR, MINUTE, room);
        allowance.moved(Duration::ZERO, burst);
        for _ in 0..1000 {
            assert!(allowance.left() >= Duration::from_secs(burst / FLOOR));
            allowance.moved(Duration::from_secs(burst / FLOOR), burst);
        }
    }

    /// Goal: what was fast before buys no more than the room, and a wait that was noticed late is not held against the peer.
    /// Method: much at once; a wait of a year.
    #[test]
    fn bounded_both_ways() {
        let mut allowance = Allowance::new(FLOOR, MINUTE, MINUTE);
        allowance.moved(Duration::ZERO, u64::MAX);
        assert_eq!(allowance.left(), MINUTE);
        allowance.moved(Duration::from_secs(365 * 86_400), 10 * FLOOR);
        assert_eq!(allowance.left(), Duration::from_secs(10));
        allowance.moved(Duration::MAX, 0);
        assert_eq!(allowance.left(), Duration::ZERO);
        assert_eq!(Allowance::new(FLOOR, MINUTE, Duration::ZERO).left(), Duration::ZERO);
    }
}
