//! The gate before the writes of one core: who is let in has a `WriteSlot`. The rules stand in `pure::admission`; this
//! brings them time, wakers, and the ways to the other cores.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::lane::Lane;
use super::protocol::Request;
use crate::limits;
use crate::metrics::{Metric, Snapshot};
use crate::pure::admission::{Admission, AdmissionConfig, Entry, Message, Refusal, Ticket};
use crate::rt::local::{Local, Vital};
use crate::rt::time;
use crate::store::StoreError;

/// What boot decides for the gates of all cores.
#[derive(Debug, Clone, Copy)]
pub struct WriteLimits {
    /// Writes in flight on all cores (`--max_inflight_cas_writes`).
    pub slots: u32,
    /// How long a write may wait for a slot (`--write_queue_wait`).
    pub wait: Duration,
    /// How long an upload may send nothing while somebody waits for its slot.
    pub idle: Duration,
    /// How long another core may take to say whether it has an idle slot.
    pub answer: Duration,
}

/// What a gate has done and holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WriteStats {
    /// Slots in use on this core now: the sum over all cores is at most `--max_inflight_cas_writes`, or what that was when they
    /// were given.
    pub in_flight: u64,
    /// Slots that stand on this core now, idle or in use. What others have borrowed stands there.
    pub slots: u64,
    /// Slots that this core started with.
    pub home_slots: u64,
    /// Writes that wait for a slot now.
    pub waiting: u64,
    /// Writes that were let in, and how many of them had to wait.
    pub admitted: u64,
    pub admitted_late: u64,
    /// Writes that were refused because none came free in time, or because too many waited.
    pub shed_late: u64,
    pub shed_queue_full: u64,
    /// Writes that were refused because the memory limit had no room for them.
    pub shed_memory: u64,
    /// Slots that came from other cores, and went to them.
    pub borrowed: u64,
    pub lent: u64,
    /// Uploads that stood still and lost their slot to somebody who waited; they are kept to be resumed.
    pub yielded: u64,
}

/// The gate of one core. Clones share it.
#[derive(Clone)]
pub struct WriteGate(Rc<Inner>);

struct Inner {
    limits: Cell<WriteLimits>,
    rules: Vital<Admission>,
    /// Those who wait: how to wake them, or what was decided.
    waiting: Vital<BTreeMap<Ticket, Waits>>,
    lanes: Local<Weak<[Option<Lane>]>>,
    /// When milliseconds count from.
    epoch: Instant,
    counts: Counts,
}

enum Waits {
    Undecided(Waker),
    Decided(Result<(), Refusal>),
}

impl WriteLimits {
    /// `slots` for all cores; the other times as `limits` says.
    pub fn new(slots: u32, wait: Duration) -> Self {
        let [idle, answer] = [limits::WRITE_SLOT_IDLE_MS, limits::WRITE_SLOT_ANSWER_MS].map(Duration::from_millis);
        Self { slots, wait, idle, answer }
    }
}

#[derive(Default)]
struct Counts {
    admitted: Cell<u64>,
    admitted_late: Cell<u64>,
    shed_late: Cell<u64>,
    shed_queue_full: Cell<u64>,
    shed_memory: Cell<u64>,
    borrowed: Cell<u64>,
    lent: Cell<u64>,
    yielded: Cell<u64>,
}

/// The right of one write to run. Dropping it frees the slot, however the write ended.
pub struct WriteSlot(WriteGate);

impl WriteGate {
    pub fn new(limits: WriteLimits, here: usize, cores: usize) -> Self {
        let WriteLimits { slots, wait, answer, idle: _ } = limits;
        let wait_ms = wait.as_millis() as u64;
        let config = AdmissionConfig {
            here,
            cores,
            slots,
            wait_ms,
            queue_len: limits::WRITE_QUEUE_LEN,
            answer_ms: answer.as_millis() as u64,
        };
        Self(Rc::new(Inner {
            limits: Cell::new(limits),
            rules: Vital::new(Admission::new(config)),
            waiting: Vital::new(BTreeMap::new()),
            lanes: Local::new(Weak::<[Option<Lane>; 0]>::new()),
            epoch: time::now(),
            counts: Counts::default(),
        }))
    }

    /// Says by which ways the other cores are reached. Without, there are none.
    pub(super) fn connect(&self, lanes: &Rc<[Option<Lane>]>) {
        self.0.lanes.with(|known| *known = Rc::downgrade(lanes));
    }

    pub fn limits(&self) -> WriteLimits {
        self.0.limits.get()
    }

    /// There are so many slots on all cores from now on.
    pub fn set_slots(&self, slots: u32) {
        self.0.limits.set(WriteLimits { slots, ..self.limits() });
        self.decide(|rules, now_ms| rules.set_slots(slots, now_ms));
        self.carry_out();
    }

    /// Writes wait for so long from now on.
    pub fn set_wait(&self, wait: Duration) {
        self.0.limits.set(WriteLimits { wait, ..self.limits() });
        self.decide(|rules, now_ms| rules.set_wait_ms(wait.as_millis() as u64, now_ms));
    }

    /// Adds what this gate has done and holds.
    pub fn report(&self, into: &mut Snapshot) {
        let stats = self.stats();
        // Why not those in use here alone: cores answer at different moments, and a slot that moves meanwhile would be in both
        // answers. So one that was lent counts where it came from, until its borrower's answer takes it off.
        let in_flight = stats.in_flight as f64 + stats.lent as f64 - stats.borrowed as f64;
        into.add(Metric::WriteSlotsInflight, in_flight);
        // Why those: they sum up to the limit, while the others are on their way now and then.
        into.add(Metric::WriteSlotsLimit, stats.home_slots);
        into.add(Metric::WritesWaiting, stats.waiting);
        into.add(Metric::WritesAdmitted, stats.admitted);
        into.add(Metric::WritesAdmittedLate, stats.admitted_late);
        into.add_for(Metric::WritesShed, ["timeout"], stats.shed_late);
        into.add_for(Metric::WritesShed, ["queue_full"], stats.shed_queue_full);
        into.add_for(Metric::WritesShed, ["memory"], stats.shed_memory);
        into.add(Metric::WriteSlotsBorrowed, stats.borrowed);
        into.add(Metric::WritesYielded, stats.yielded);
    }

    pub fn stats(&self) -> WriteStats {
        let counts = &self.0.counts;
        self.0.rules.with(|rules| WriteStats {
            in_flight: u64::from(rules.taken()),
            slots: u64::from(rules.owned()),
            home_slots: u64::from(rules.home()),
            waiting: rules.waiting() as u64,
            admitted: counts.admitted.get(),
            admitted_late: counts.admitted_late.get(),
            shed_late: counts.shed_late.get(),
            shed_queue_full: counts.shed_queue_full.get(),
            shed_memory: counts.shed_memory.get(),
            borrowed: counts.borrowed.get(),
            lent: counts.lent.get(),
            yielded: counts.yielded.get(),
        })
    }

    /// A slot if there is one, else the wait for one, beside `elsewhere` writes that wait for something else.
    pub fn enter(&self, elsewhere: usize) -> Result<WriteSlot, Turn> {
        match self.decide(|rules, now_ms| rules.enter(elsewhere, now_ms)) {
            Entry::Admitted => Ok(self.admit()),
            Entry::Waits(ticket) => {
                self.0.waiting.with(|waiting| waiting.insert(ticket, Waits::Undecided(Waker::noop().clone())));
                // Why only now: whoever is asked may be answered at once.
                self.carry_out();
                Err(Turn { gate: self.clone(), ticket: Some(ticket), refusal: None })
            }
            Entry::Refused(refusal) => Err(Turn { gate: self.clone(), ticket: None, refusal: Some(refusal) }),
        }
    }

    /// A message of another core's gate.
    pub fn receive(&self, message: Message) {
        if let Message::Lend { slots, .. } = message {
            add(&self.0.counts.borrowed, u64::from(slots));
        }
        self.decide(|rules, now_ms| rules.receive(message, now_ms));
        self.carry_out();
    }

    /// Somebody waits for a slot of this core, here or elsewhere.
    pub fn is_contended(&self) -> bool {
        self.0.rules.with(|rules| rules.is_contended())
    }

    /// Does what is due by now; returns when something will be next.
    pub fn tick(&self) -> Option<Instant> {
        self.decide(|rules, now_ms| rules.tick(now_ms));
        self.carry_out();
        self.deadline()
    }

    /// Writes that wait for a slot of this core.
    pub fn waiting(&self) -> usize {
        self.0.rules.with(|rules| rules.waiting())
    }

    /// When `tick` has something to do.
    pub fn deadline(&self) -> Option<Instant> {
        let deadline_ms = self.0.rules.with(|rules| rules.deadline_ms());
        deadline_ms.map(|ms| self.0.epoch + Duration::from_millis(ms))
    }

    /// Lets nobody in any more, and refuses those who wait.
    pub fn close(&self) {
        self.decide(|rules, now_ms| rules.close(now_ms));
        self.carry_out();
    }

    /// A write, or its decoder, found no memory, or no place to wait for it.
    pub(super) fn no_memory(&self) -> StoreError {
        add(&self.0.counts.shed_memory, 1);
        self.shed()
    }

    /// An upload has given up its slot.
    pub(super) fn note_yielded(&self) {
        add(&self.0.counts.yielded, 1);
    }

    fn admit(&self) -> WriteSlot {
        add(&self.0.counts.admitted, 1);
        WriteSlot(self.clone())
    }

    fn refuse(&self, refusal: Refusal) -> StoreError {
        let counts = &self.0.counts;
        match refusal {
            Refusal::QueueFull => add(&counts.shed_queue_full, 1),
            Refusal::Late => add(&counts.shed_late, 1),
            Refusal::Closed => return StoreError::Stopping,
        }
        self.shed()
    }

    fn shed(&self) -> StoreError {
        let WriteLimits { slots, wait, .. } = self.limits();
        StoreError::Shed { slots, wait_ms: wait.as_millis() as u64 }
    }

    fn decide<R>(&self, work: impl FnOnce(&mut Admission, u64) -> R) -> R {
        let now_ms = self.0.epoch.elapsed().as_millis() as u64;
        self.0.rules.with(|rules| work(rules, now_ms))
    }

    /// Wakes those who have been decided, and sends what is to be sent.
    ///
    /// Why sent without waiting: a full queue costs a question or a loan, while a wait would hold up what comes next.
    fn carry_out(&self) {
        while let Some((ticket, outcome)) = self.0.rules.with(|rules| rules.next_decided()) {
            let waker = self.0.waiting.with(|waiting| match waiting.insert(ticket, Waits::Decided(outcome)) {
                Some(Waits::Undecided(waker)) => waker,
                Some(Waits::Decided(_)) | None => unreachable!("each waits until it is decided, once"),
            });
            waker.wake();
        }
        while let Some((to, message)) = self.0.rules.with(|rules| rules.next_message()) {
            let lanes = self.0.lanes.with(|lanes| lanes.upgrade());
            let sent = match lanes.as_ref().and_then(|lanes| lanes.get(to)?.as_ref()) {
                Some(lane) => lane.try_tell(Request::Slots(message)).map_err(|unsent| unsent.is_gone),
                None => Err(true),
            };
            match (sent, message) {
                (Ok(()), Message::Lend { slots, .. }) => add(&self.0.counts.lent, u64::from(slots)),
                (Ok(()), Message::Ask { .. } | Message::Owe { .. } | Message::Closed { .. }) => {}
                (Err(is_gone), message) => {
                    self.decide(|rules, now_ms| rules.undelivered(to, message, is_gone, now_ms));
                    return self.carry_out();
                }
            }
        }
    }
}

impl Drop for WriteSlot {
    fn drop(&mut self) {
        self.0.decide(|rules, now_ms| rules.release(now_ms));
        self.0.carry_out();
    }
}

/// The wait for a slot. Dropping it leaves the queue.
pub struct Turn {
    gate: WriteGate,
    /// `None` when it has been decided.
    ticket: Option<Ticket>,
    refusal: Option<Refusal>,
}

impl Future for Turn {
    type Output = Result<WriteSlot, StoreError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let turn = &mut *self;
        if let Some(refusal) = turn.refusal {
            return Poll::Ready(Err(turn.gate.refuse(refusal)));
        }
        let ticket = turn.ticket.expect("a turn ends once");
        let outcome = turn.gate.0.waiting.with(|waiting| match waiting.get_mut(&ticket) {
            Some(Waits::Undecided(waker)) => {
                waker.clone_from(context.waker());
                None
            }
            Some(Waits::Decided(outcome)) => {
                let outcome = *outcome;
                waiting.remove(&ticket);
                Some(outcome)
            }
            None => unreachable!("it stands here until it is decided and taken, or dropped"),
        });
        let Some(outcome) = outcome else { return Poll::Pending };
        turn.ticket = None;
        Poll::Ready(match outcome {
            Ok(()) => {
                add(&turn.gate.0.counts.admitted_late, 1);
                Ok(turn.gate.admit())
            }
            Err(refusal) => Err(turn.gate.refuse(refusal)),
        })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        // Why outside of the borrow: dropping a waker may run other drops.
        let waits = self.gate.0.waiting.with(|waiting| waiting.remove(&ticket));
        match waits {
            Some(Waits::Decided(Ok(()))) => drop(WriteSlot(self.gate.clone())),
            Some(Waits::Decided(Err(_)) | Waits::Undecided(_)) | None => {
                self.gate.0.rules.with(|rules| rules.leave(ticket));
            }
        }
    }
}

fn add(cell: &Cell<u64>, more: u64) {
    cell.set(cell.get() + more);
}
