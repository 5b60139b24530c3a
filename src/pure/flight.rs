//! The bytes of an object on their way from a backend to several readers: a window over what came last. The flight is
//! never held up for long by a reader; one that falls out of the window goes on from the cache when the flight has landed.

use std::collections::VecDeque;

use bytes::Bytes;

/// Where a flight is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The backend was asked.
    Asking,
    /// It has the object, whose bytes are coming.
    Streaming,
    /// All has come, was verified and stands in the cache.
    Landed,
    /// The backend does not have it.
    Missed,
    /// Broken off, or wrong: what was sent is not to be trusted.
    Failed,
}

/// What a reader at some position gets.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// These bytes.
    Piece(Bytes),
    /// Nothing yet.
    Wait,
    /// It has fallen behind: the rest stands in the cache once the flight has landed.
    Behind,
    Failed,
    End,
}

/// The window. Positions are raw bytes of the object.
#[derive(Debug)]
pub struct Window {
    phase: Phase,
    pieces: VecDeque<Bytes>,
    /// Position of the first piece.
    start: u64,
    /// Position behind the last.
    end: u64,
    /// What the pieces cost together, and may cost, in bytes.
    cost: u64,
    most: u64,
}

/// What a piece costs at least, in bytes: each has some, however short it is.
const PIECE_COST_MIN: u64 = 256;

fn cost_of(len: u64) -> u64 {
    len.max(PIECE_COST_MIN)
}

impl Window {
    pub fn new(most: u64) -> Self {
        Self { phase: Phase::Asking, pieces: VecDeque::new(), start: 0, end: 0, cost: 0, most }
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    pub fn enter(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Where the window starts.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Where the window will start when so many bytes more have come.
    pub fn start_after(&self, bytes: u64) -> u64 {
        let (mut start, mut cost) = (self.start, self.cost + cost_of(bytes));
        for piece in &self.pieces {
            if cost <= self.most {
                break;
            }
            start += piece.len() as u64;
            cost -= cost_of(piece.len() as u64);
        }
        start
    }

    /// More bytes have come.
    pub fn push(&mut self, piece: Bytes) {
        let start = self.start_after(piece.len() as u64);
        while self.start < start {
            let gone = self.pieces.pop_front().expect("the window starts at its first piece");
            self.start += gone.len() as u64;
            self.cost -= cost_of(gone.len() as u64);
        }
        self.cost += cost_of(piece.len() as u64);
        self.end += piece.len() as u64;
        self.pieces.push_back(piece);
    }

    /// What a reader at `at` gets, who wants all up to `until`. The last byte that it wants comes only when the flight has
    /// landed: a wrong object is never served as complete.
    pub fn next(&self, at: u64, until: u64) -> Next {
        if at >= until {
            return Next::End;
        }
        let allowed = match self.phase {
            Phase::Missed | Phase::Failed => return Next::Failed,
            Phase::Asking => return Next::Wait,
            Phase::Streaming => until - 1,
            Phase::Landed => until,
        };
        if at < self.start {
            return Next::Behind;
        }
        let mut start = self.start;
        for piece in &self.pieces {
            let end = start + piece.len() as u64;
            if at < end && at < allowed {
                return Next::Piece(piece.slice((at - start) as usize..(end.min(allowed) - start) as usize));
            }
            start = end;
        }
        // What has landed stands in the cache, the window aside.
        if self.phase == Phase::Landed { Next::Behind } else { Next::Wait }
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::SplitMix64;
    use super::*;

    /// Goal: the window holds all that it may, and lets go of no more than it must. Method: pieces of a length that divides what it
    /// may hold, and of one that does not.
    #[test]
    fn as_much_as_it_may() {
        for (len, held) in [(256, 4), (300, 3), (512, 2), (1, 4), (5000, 1)] {
            let mut window = Window::new(1024);
            for count in 1..10u64 {
                let start = window.start_after(len);
                window.push(Bytes::from(vec![0; len as usize]));
                assert_eq!((window.start(), start), (count.saturating_sub(held) * len, window.start()), "{len}");
            }
        }
    }

    /// Goal: each phase says what to do where there are no bytes. Method: all phases.
    #[test]
    fn phases_without_bytes() {
        for (phase, next) in [
            (Phase::Asking, Next::Wait),
            (Phase::Streaming, Next::Wait),
            (Phase::Landed, Next::Behind),
            (Phase::Missed, Next::Failed),
            (Phase::Failed, Next::Failed),
        ] {
            let mut window = Window::new(1024);
            window.enter(phase);
            assert_eq!((window.next(0, 1), window.next(1, 1)), (next, Next::End), "{phase:?}");
        }
    }

    /// Goal: every reader gets exactly its part, its last byte only after the landing, and nothing after a failure; the
    /// window keeps its bound. Method: seeded flights with readers that come and read at any time.
    #[test]
    fn readers_get_their_part() {
        for seed in 0..400 {
            let mut random = SplitMix64(seed);
            let object: Vec<u8> = (0..1 + random.below(3_000)).map(|at| at as u8).collect();
            let object = Bytes::from(object);
            let most = 200 + random.below(500);
            let mut window = Window::new(most);
            assert_eq!(window.next(0, 1), Next::Wait);
            window.enter(Phase::Streaming);
            let fails = random.below(4) == 0;
            let (mut sent, mut readers) = (0, Vec::new());
            while sent < object.len() || !readers.is_empty() {
                match random.below(4) {
                    0 if sent < object.len() => {
                        let len = (1 + random.below(200) as usize).min(object.len() - sent);
                        window.push(object.slice(sent..sent + len));
                        sent += len;
                        assert!(window.end - window.start <= most.max(len as u64), "seed {seed}");
                        assert!(window.pieces.len() as u64 <= (most / PIECE_COST_MIN).max(1), "seed {seed}");
                        let costs = window.pieces.iter().map(|piece| cost_of(piece.len() as u64));
                        assert_eq!(window.cost, costs.sum::<u64>(), "seed {seed}");
                        if sent == object.len() {
                            window.enter(if fails { Phase::Failed } else { Phase::Landed });
                        }
                    }
                    1 if sent < object.len() => {
                        let at = random.below(object.len() as u64);
                        readers.push((at, at, at + random.below(object.len() as u64 - at + 1), Vec::new()));
                    }
                    _ if readers.is_empty() => {}
                    _ => {
                        let number = random.below(readers.len() as u64) as usize;
                        let (start, at, until, got) = &mut readers[number];
                        let part = &object[*start as usize..*until as usize];
                        match window.next(*at, *until) {
                            Next::Piece(piece) => {
                                assert!(!piece.is_empty(), "seed {seed}");
                                *at += piece.len() as u64;
                                got.extend_from_slice(&piece);
                                assert!(got.len() < part.len() || window.phase() == Phase::Landed, "seed {seed}");
                            }
                            Next::Wait => assert_eq!(window.phase(), Phase::Streaming, "seed {seed}"),
                            Next::Behind if window.phase() == Phase::Landed => {
                                got.extend_from_slice(&object[*at as usize..*until as usize]);
                                assert_eq!(got, part, "seed {seed}");
                                readers.swap_remove(number);
                            }
                            Next::Behind => assert!(*at < window.start, "seed {seed}"),
                            Next::Failed => {
                                assert!(fails && got.len() < part.len(), "seed {seed}");
                                readers.swap_remove(number);
                            }
                            Next::End => {
                                assert_eq!(got, part, "seed {seed}");
                                readers.swap_remove(number);
                            }
                        }
                    }
                }
            }
        }
    }
}
