//! What HTTP/2's tables of one connection have grown to, and the memory that they are charged to.
//!
//! Why apart from the calls: a table has a row for each stream that is open, or that was reset a short time ago, and its
//! length is that of the most there ever were.

use std::cell::Cell;
use std::rc::Rc;

use crate::budget::{Apart, Rank};
use crate::limits;

/// The tables of one connection.
pub struct Tables {
    /// The connection's own memory, with `limits::HTTP2_ROWS_FIRST` rows from its beginning.
    memory: Apart,
    rows: usize,
    /// Rows that are counted with frames besides.
    open: usize,
    /// Bytes of the buffers that the table of header fields holds on to, as far as they are charged or need not be.
    headers: usize,
}

/// How many streams of a connection are open, as far as calls know: they are running, or their messages have not gone out.
/// Clones count together.
#[derive(Clone, Default)]
pub struct OpenStreams(Rc<Cell<usize>>);

/// One of them, and its call's memory.
pub struct OpenStream {
    streams: OpenStreams,
    _memory: Option<Apart>,
}

impl OpenStreams {
    pub fn open(&self, memory: Option<Apart>) -> OpenStream {
        self.0.set(self.0.get() + 1);
        OpenStream { streams: self.clone(), _memory: memory }
    }

    pub fn count(&self) -> usize {
        self.0.get()
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.streams.0.set(self.streams.0.get() - 1);
    }
}

impl Tables {
    pub fn new(memory: Apart) -> Self {
        Self {
            memory,
            rows: limits::HTTP2_ROWS_FIRST,
            open: limits::HTTP2_ROWS_FIRST,
            headers: limits::HTTP2_HEADERS_FREE_LEN,
        }
    }

    /// Frames that have a row of those that are charged.
    pub fn frames(&self) -> usize {
        self.open
    }

    /// Charges tables with so many streams that are open and so many that are remembered. False when there is no memory for it.
    pub fn cover(&mut self, open: usize, remembered: usize) -> bool {
        let rows = (open + remembered).next_power_of_two().max(self.rows);
        let open = open.next_power_of_two().max(self.open);
        let more =
            (rows - self.rows) as u64 * limits::HTTP2_ROW_LEN + (open - self.open) as u64 * limits::HTTP2_FRAMES_LEN;
        let is_covered = more == 0 || self.memory.grow(more, Rank::More);
        if is_covered {
            (self.rows, self.open) = (rows, open);
        }
        is_covered
    }

    /// Charges the buffers that the table of header fields holds on to. Gives how many bytes of them there is no memory for.
    pub fn cover_headers(&mut self, held: usize) -> usize {
        let more = held.saturating_sub(self.headers);
        if more == 0 || self.memory.grow(more as u64, Rank::More) {
            self.headers += more;
            return 0;
        }
        more
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Purse;

    /// Goal: the charge is that of the longest tables there were, to the end of the connection. Method: streams that come and go,
    /// and more than there is memory for.
    #[test]
    fn the_longest_tables_are_charged() {
        let purse = Purse::alone(5 << 20);
        let begun = purse.apart_for(limits::CONNECTION_HELD_LEN, Rank::More).expect("there is room");
        let mut tables = Tables::new(begun);
        let beyond = || purse.apart() - limits::CONNECTION_HELD_LEN;
        let (row, frames) = (limits::HTTP2_ROW_LEN, limits::HTTP2_FRAMES_LEN);
        for (open, remembered, charged) in [
            (16, 0, 0),
            (0, 16, 0),
            (17, 0, 16 * (row + frames)),
            (1, 31, 16 * (row + frames)),
            (1, 32, 48 * row + 16 * frames),
            (0, 0, 48 * row + 16 * frames),
            (500, 500, 1008 * row + 496 * frames),
        ] {
            assert!(tables.cover(open, remembered));
            assert_eq!(beyond(), charged, "{open} and {remembered}");
        }
        let rest = purse.apart_for(1700 << 10, Rank::More).expect("there is room");
        assert!(tables.cover(512, 512) && !tables.cover(512, 2048) && tables.cover(500, 520));
        drop((rest, tables));
        assert_eq!(purse.apart(), 0);
    }

    /// Goal: a few buffers of header fields need no memory, more are charged once, and who finds none is told how much is missing.
    /// Method: a purse with room for one table of all.
    #[test]
    fn buffers_of_headers_are_charged() {
        let free = limits::HTTP2_HEADERS_FREE_LEN;
        let purse = Purse::alone(2 << 20);
        let mut tables = Tables::new(purse.apart_for(limits::CONNECTION_HELD_LEN, Rank::More).expect("there is room"));
        assert_eq!((tables.cover_headers(free), purse.apart()), (0, limits::CONNECTION_HELD_LEN));
        for held in [free + 1000, free + 10, free + 1000] {
            assert_eq!((tables.cover_headers(held), purse.apart()), (0, limits::CONNECTION_HELD_LEN + 1000));
        }
        assert_eq!(tables.cover_headers(free + (4 << 20)), (4 << 20) - 1000);
        assert_eq!(purse.apart(), limits::CONNECTION_HELD_LEN + 1000);
    }
}
