//! How long a client keeps us waiting: for its body, or to take its answer.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use crate::limits;
use crate::pure::allowance::Allowance;
use crate::rt::time::{self, Sleep};

/// The account of one direction.
#[derive(Debug, Clone, Copy)]
pub struct Waiting {
    allowance: Allowance,
    /// Since when we wait, if we do.
    since: Option<Instant>,
}

impl Waiting {
    /// `first` is allowed for nothing, and `most` after much has moved.
    pub fn new(first: Duration, most: Duration) -> Self {
        Self { allowance: Allowance::new(limits::HTTP_SPEED_FLOOR, first, most), since: None }
    }

    /// Nothing moves before the client does something.
    pub fn begin(&mut self) {
        self.since.get_or_insert_with(time::now);
    }

    /// So many bytes have moved.
    pub fn end(&mut self, bytes: usize) {
        let waited = self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        self.allowance.moved(waited, bytes as u64);
    }

    pub fn is_waiting(&self) -> bool {
        self.since.is_some()
    }

    /// When the client has used up what it may, if it does nothing.
    fn overdue_at(&self) -> Option<Instant> {
        self.since?.checked_add(self.allowance.left())
    }
}

/// Notices when a client is overdue.
///
/// Why the timer is not stopped when bytes move: they only put the time off, so a timer that fires too early is set anew,
/// instead of one for each wait.
#[derive(Default)]
pub struct Overdue {
    timer: Option<Sleep>,
}

impl Overdue {
    /// Ready when `waiting` has gone on for too long.
    pub fn poll(&mut self, waiting: &Waiting, context: &mut Context<'_>) -> Poll<()> {
        while let Some(at) = waiting.overdue_at() {
            ready!(Pin::new(self.timer.get_or_insert_with(|| time::deadline(at))).poll(context));
            self.timer = None;
            if at <= time::now() {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }
}
