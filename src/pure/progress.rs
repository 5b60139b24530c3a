//! The floor under a body's speed: a backend that sends too little in any 10 seconds in which we waited for it has
//! stalled. Time in which nobody asked it for bytes (a slow disk, a slow client) does not count.

use std::time::Duration;

/// The window, in slots of equal length.
const SLOTS: usize = 10;
/// The length of a slot in waited time.
pub const SLOT: Duration = Duration::from_secs(1);
/// The window's length in waited time.
pub const WINDOW: Duration = Duration::from_secs(SLOTS as u64);

/// The progress of one body.
#[derive(Debug, Clone)]
pub struct Progress {
    /// Bytes that must come in a window.
    floor: u64,
    /// Bytes that came in each slot of the window; `at` is the current one.
    slots: [u64; SLOTS],
    at: usize,
    /// Time waited within the current slot.
    waited: Duration,
    /// Slots that have passed, up to a window's worth.
    passed: usize,
}

impl Progress {
    /// `floor` in bytes per second.
    pub fn new(floor: u64) -> Self {
        Self { floor: floor * WINDOW.as_secs(), slots: [0; SLOTS], at: 0, waited: Duration::ZERO, passed: 0 }
    }

    /// How long may be waited before the next call of `wait_passed`.
    pub fn next_check(&self) -> Duration {
        SLOT - self.waited
    }

    /// `waited` has passed in waiting, and `bytes` came at its end. False when the body has stalled.
    pub fn wait_passed(&mut self, waited: Duration, bytes: u64) -> bool {
        self.waited += waited;
        while self.waited >= SLOT {
            self.waited -= SLOT;
            self.passed = (self.passed + 1).min(SLOTS);
            let full = self.passed == SLOTS;
            // Why here: what comes after the wait belongs to the next window.
            if full && self.slots.iter().sum::<u64>() < self.floor {
                return false;
            }
            self.at = (self.at + 1) % SLOTS;
            self.slots[self.at] = 0;
        }
        self.slots[self.at] += bytes;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOOR: u64 = 64 << 10;

    /// Goal: silence ends a body after 10 s, however fast it was before. Method: fast, then nothing.
    #[test]
    fn silence_is_a_stall() {
        for fast in [0, 1, 5, 30] {
            let mut progress = Progress::new(FLOOR);
            for _ in 0..fast {
                assert!(progress.wait_passed(SLOT, 100 << 20));
            }
            let silent = (1..).find(|_| !progress.wait_passed(SLOT, 0)).expect("it ends");
            // The last bytes came at the end of a slot, so they belong to the window that begins there.
            assert!((10..=11).contains(&silent), "{fast}: {silent}");
        }
    }

    /// Goal: the floor itself is enough, a little less is not. Method: steady bodies just above and below it.
    #[test]
    fn the_floor() {
        let step = Duration::from_millis(250);
        let seconds = |bytes| {
            let mut progress = Progress::new(FLOOR);
            (0..400).find(|_| !progress.wait_passed(step, bytes)).map(|steps| steps / 4)
        };
        assert_eq!(seconds(FLOOR / 4 + FLOOR / 16), None);
        assert_eq!(seconds(FLOOR / 4 - 100), Some(9));
        for (bytes, goes_on) in [(10 * FLOOR, true), (10 * FLOOR - 1, false)] {
            let mut progress = Progress::new(FLOOR);
            assert!(progress.wait_passed(Duration::ZERO, bytes));
            assert_eq!(progress.wait_passed(WINDOW, 0), goes_on, "{bytes}");
        }
    }

    /// Goal: only waiting counts. Method: a body whose bytes are there whenever they are asked for.
    #[test]
    fn a_slow_reader_is_no_stall() {
        let mut progress = Progress::new(FLOOR);
        for _ in 0..10_000 {
            assert!(progress.wait_passed(Duration::from_micros(10), 1));
        }
        assert_eq!(progress.next_check(), SLOT - Duration::from_millis(100));
    }
}
