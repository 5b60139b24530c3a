//! Admission of writes: a fixed number of slots, split over the cores, and on each core a bounded queue of those who wait
//! for one. A core whose slots are all taken asks the others, one after the other, for idle ones; who has none remembers
//! the question, and lends the next slot that comes free when it is that core's turn.
//!
//! A slot is a value: it stands on one core, or in one message. Nobody returns a borrowed one: it stays where it was
//! needed until another core asks.
//!
//! | message | from, to | meaning |
//! |---|---|---|
//! | `Ask` | who has none, another | lend me so many, now or within the time said |
//! | `Lend`, answer | the asked, the asker | so many, perhaps 0 |
//! | `Lend` | the asked, the asker | one that came free later |
//! | `Closed` | who ends, all | ask me no more, and lend me nothing |
//!
//! Invariant: the slots of all cores and of all messages between them are always as many as there were at the start.

use std::collections::{BTreeMap, VecDeque};

/// What one core starts with.
#[derive(Debug, Clone, Copy)]
pub struct AdmissionConfig {
    /// This core, and how many there are.
    pub here: usize,
    pub cores: usize,
    /// Slots of all cores.
    pub slots: u32,
    /// How long a write may wait for a busy slot. With 0 it waits only for the others' answers.
    pub wait_ms: u64,
    /// Writes that may wait on this core at a time, for a slot or for something else.
    pub queue_len: usize,
    /// How long a core that was asked may take to answer before the next one is asked.
    pub answer_ms: u64,
}

/// One core's part. Time comes in as milliseconds since any fixed instant.
#[derive(Debug)]
pub struct Admission {
    config: AdmissionConfig,
    free: u32,
    taken: u32,
    /// Slots that are to go, as the limit was lowered while they were in use or elsewhere. Invariant: none is free meanwhile.
    owed: u32,
    /// In order of arrival. Invariant: empty while a slot is free.
    queue: BTreeMap<u64, Waiting>,
    /// How many of `queue` wait here.
    waiting_here: usize,
    numbers: u64,
    round: Option<Round>,
    /// No round starts before this.
    next_round_ms: u64,
    /// Where a round begins, so that not all ask the same core first.
    next_core: usize,
    /// Cores that have closed, this one included.
    closed: Vec<bool>,
    outbox: VecDeque<(usize, Message)>,
    decided: VecDeque<(Ticket, Result<(), Refusal>)>,
}

#[derive(Debug, Clone, Copy)]
enum Waiting {
    /// A write on this core.
    Here { until_ms: u64 },
    /// Another core, which wants so many slots.
    Core { core: usize, slots: u32, until_ms: u64 },
}

/// The others are being asked, one at a time.
#[derive(Debug, Clone, Copy)]
struct Round {
    /// Who is asked now, counted from the core after this one.
    step: usize,
    asked_ms: u64,
}

/// What crosses between cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// Lend at most `slots`. What is not there now may follow within `keep_ms`.
    Ask {
        from: usize,
        slots: u32,
        keep_ms: u64,
    },
    Lend {
        from: usize,
        slots: u32,
        is_answer: bool,
    },
    /// So many slots are to go, and `from` has none left.
    Owe {
        from: usize,
        slots: u32,
    },
    Closed {
        from: usize,
    },
}

/// Names one write that waits. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// How a write is received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// It has a slot.
    Admitted,
    /// `decided` will tell.
    Waits(Ticket),
    Refused(Refusal),
}

/// Why a write gets no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// As many wait already as may.
    QueueFull,
    /// None came free in time.
    Late,
    Closed,
}

impl Admission {
    pub fn new(config: AdmissionConfig) -> Self {
        let AdmissionConfig { here, cores, .. } = config;
        assert!(here < cores, "core {here} of {cores}");
        let mut admission = Self {
            config,
            free: 0,
            taken: 0,
            owed: 0,
            queue: BTreeMap::new(),
            waiting_here: 0,
            numbers: 0,
            round: None,
            next_round_ms: 0,
            next_core: 0,
            closed: vec![false; cores],
            outbox: VecDeque::new(),
            decided: VecDeque::new(),
        };
        admission.free = admission.home();
        admission
    }

    /// Writes wait for so long from now on, those that wait already too.
    pub fn set_wait_ms(&mut self, wait_ms: u64, now_ms: u64) {
        self.config.wait_ms = wait_ms;
        let latest_ms = now_ms + wait_ms;
        for waiting in self.queue.values_mut() {
            // Why only down: so that the first to come stays the first to go.
            if let Waiting::Here { until_ms } = waiting {
                *until_ms = latest_ms.min(*until_ms);
            }
        }
    }

    /// There are so many slots on all cores from now on, each of which has to be told. Writes that have one keep it: where
    /// the limit falls, slots go as they come free.
    pub fn set_slots(&mut self, slots: u32, now_ms: u64) {
        let before = self.home();
        self.config.slots = slots;
        let more = self.home().saturating_sub(before);
        self.owed += before.saturating_sub(self.home());
        self.gain(more, now_ms);
    }

    /// The slots that are due to this core. At the start it has as many.
    pub fn home(&self) -> u32 {
        let AdmissionConfig { here, cores, slots, .. } = self.config;
        slots / cores as u32 + u32::from((here as u32) < slots % cores as u32)
    }

    /// Slots in use on this core.
    pub fn taken(&self) -> u32 {
        self.taken
    }

    /// Slots on this core, idle and in use.
    pub fn owned(&self) -> u32 {
        self.free + self.taken
    }

    /// Writes that wait on this core.
    pub fn waiting(&self) -> usize {
        self.waiting_here
    }

    /// Somebody waits for a slot of this core, here or elsewhere.
    pub fn is_contended(&self) -> bool {
        !self.queue.is_empty()
    }

    /// A write wants a slot. `elsewhere` is how many others of this core wait for something else: with these there are as many as
    /// may wait.
    pub fn enter(&mut self, elsewhere: usize, now_ms: u64) -> Entry {
        let AdmissionConfig { here, cores, wait_ms, queue_len, answer_ms, .. } = self.config;
        if self.closed[here] {
            return Entry::Refused(Refusal::Closed);
        }
        if self.free > 0 {
            self.free -= 1;
            self.taken += 1;
            return Entry::Admitted;
        }
        if wait_ms == 0 && cores == 1 {
            return Entry::Refused(Refusal::Late);
        }
        if self.waiting_here + elsewhere >= queue_len {
            return Entry::Refused(Refusal::QueueFull);
        }
        let grace_ms = if cores == 1 { 0 } else { ROUND_PAUSE_MS + cores as u64 * answer_ms };
        let number = self.queue_up(Waiting::Here { until_ms: now_ms + wait_ms.max(grace_ms) });
        self.waiting_here += 1;
        self.begin_round(now_ms);
        Entry::Waits(Ticket(number))
    }

    /// A write that had a slot has ended.
    pub fn release(&mut self, now_ms: u64) {
        self.taken = self.taken.checked_sub(1).expect("a slot is released by who took it, once");
        self.gain(1, now_ms);
    }

    /// A write that waited has gone. One that was decided meanwhile gives its slot back by `release`.
    pub fn leave(&mut self, ticket: Ticket) {
        if self.queue.remove(&ticket.0).is_some() {
            self.waiting_here -= 1;
        }
    }

    /// A message has come.
    pub fn receive(&mut self, message: Message, now_ms: u64) {
        match message {
            Message::Ask { from, slots, keep_ms } => self.answer(from, slots, keep_ms, now_ms),
            Message::Lend { from, slots, is_answer } => {
                self.borrowed(slots, now_ms);
                if is_answer {
                    self.answered(from, now_ms);
                }
            }
            Message::Owe { slots, .. } => {
                self.owed += slots;
                self.gain(0, now_ms);
            }
            Message::Closed { from } => self.note_closed(from, now_ms),
        }
    }

    /// A message could not be delivered: its core is gone, or too busy to take it now. What was in it is still here.
    pub fn undelivered(&mut self, to: usize, message: Message, is_gone: bool, now_ms: u64) {
        if is_gone {
            self.note_closed(to, now_ms);
        }
        match message {
            Message::Ask { .. } => self.answered(to, now_ms),
            Message::Lend { slots, .. } => self.gain(slots, now_ms),
            // Why not to the next core at once: it may be as busy. The next slot that comes or goes tries again.
            Message::Owe { slots, .. } => {
                self.owed += slots;
                // Slots may have come free since.
                self.free -= self.withdraw(self.free);
            }
            Message::Closed { .. } => {}
        }
    }

    /// Refuses those whose time is over, and goes on asking. Call it at `deadline_ms`.
    pub fn tick(&mut self, now_ms: u64) {
        self.drop_overdue(now_ms);
        if self.round.is_some_and(|round| now_ms >= round.asked_ms + self.config.answer_ms) {
            self.ask_next(now_ms);
        }
        self.begin_round(now_ms);
    }

    /// When `tick` has something to do; `None` while nobody waits here.
    pub fn deadline_ms(&self) -> Option<u64> {
        let here = |waiting: &Waiting| match waiting {
            Waiting::Here { until_ms } => Some(*until_ms),
            Waiting::Core { .. } => None,
        };
        // Invariant: all wait for the same time, so that the first to come is the first to go.
        let first = self.queue.values().find_map(here)?;
        let round = match self.round {
            Some(round) => round.asked_ms + self.config.answer_ms,
            None if self.others_open() => self.next_round_ms,
            None => u64::MAX,
        };
        Some(first.min(round))
    }

    /// Lets nobody in any more, refuses who waits, and passes on what slots there are and come.
    pub fn close(&mut self, now_ms: u64) {
        let here = self.config.here;
        if std::mem::replace(&mut self.closed[here], true) {
            return;
        }
        for (number, waiting) in std::mem::take(&mut self.queue) {
            if matches!(waiting, Waiting::Here { .. }) {
                self.decided.push_back((Ticket(number), Err(Refusal::Closed)));
            }
        }
        self.waiting_here = 0;
        self.round = None;
        for core in (0..self.config.cores).filter(|&core| !self.closed[core]) {
            self.outbox.push_back((core, Message::Closed { from: here }));
        }
        self.gain(0, now_ms);
    }

    /// The next message to send, and to whom.
    pub fn next_message(&mut self) -> Option<(usize, Message)> {
        self.outbox.pop_front()
    }

    /// The next write that waited and waits no longer. With `Ok` it has a slot.
    pub fn next_decided(&mut self) -> Option<(Ticket, Result<(), Refusal>)> {
        self.decided.pop_front()
    }

    fn queue_up(&mut self, waiting: Waiting) -> u64 {
        self.numbers += 1;
        self.queue.insert(self.numbers, waiting);
        self.numbers
    }

    fn others_open(&self) -> bool {
        self.closed.iter().enumerate().any(|(core, closed)| core != self.config.here && !closed)
    }

    /// Slots have come from another core, because writes waited here: those have them first.
    ///
    /// Why not whoever has waited longest: another core may have been served elsewhere since it asked here.
    fn borrowed(&mut self, slots: u32, now_ms: u64) {
        let slots = slots - self.withdraw(slots);
        let is_here = |waiting: &Waiting| matches!(waiting, Waiting::Here { .. });
        let here = self.queue.iter().filter(|(_, waiting)| is_here(waiting)).map(|(&number, _)| number);
        let served: Vec<u64> = here.take(slots as usize).collect();
        for &number in &served {
            self.queue.remove(&number);
            self.decided.push_back((Ticket(number), Ok(())));
        }
        self.waiting_here -= served.len();
        self.taken += served.len() as u32;
        self.gain(slots - served.len() as u32, now_ms);
    }

    /// Slots have come free here: they go to whoever has waited longest.
    fn gain(&mut self, slots: u32, now_ms: u64) {
        self.free += slots;
        self.free -= self.withdraw(self.free);
        let here = self.config.here;
        // What no slot here will pay is for those who have borrowed them.
        let excess = self.owed.saturating_sub(self.taken);
        let next =
            (1..self.config.cores).map(|step| (here + step) % self.config.cores).find(|&core| !self.closed[core]);
        if let Some(next) = next.filter(|_| excess > 0) {
            self.owed -= excess;
            self.outbox.push_back((next, Message::Owe { from: here, slots: excess }));
        }
        if self.closed[here] {
            let heir = (1..self.config.cores).map(|step| self.peer(step)).find(|&core| !self.closed[core]);
            if let Some(heir) = heir.filter(|_| self.free > 0) {
                let slots = std::mem::take(&mut self.free);
                self.outbox.push_back((heir, Message::Lend { from: here, slots, is_answer: false }));
            }
            return;
        }
        while self.free > 0
            && let Some(mut first) = self.queue.first_entry()
        {
            let number = *first.key();
            match first.get_mut() {
                Waiting::Here { .. } => {
                    first.remove();
                    self.waiting_here -= 1;
                    self.free -= 1;
                    self.taken += 1;
                    self.decided.push_back((Ticket(number), Ok(())));
                }
                Waiting::Core { until_ms, .. } if *until_ms <= now_ms => drop(first.remove()),
                Waiting::Core { core, slots, .. } => {
                    self.outbox.push_back((*core, Message::Lend { from: here, slots: 1, is_answer: false }));
                    self.free -= 1;
                    *slots -= 1;
                    if *slots == 0 {
                        first.remove();
                    }
                }
            }
        }
    }

    /// How many of so many idle slots go for good.
    fn withdraw(&mut self, slots: u32) -> u32 {
        let gone = slots.min(self.owed);
        self.owed -= gone;
        gone
    }

    /// Takes out who has waited too long.
    fn drop_overdue(&mut self, now_ms: u64) {
        let Self { queue, decided, waiting_here, .. } = self;
        queue.retain(|&number, waiting| match waiting {
            Waiting::Here { until_ms } if *until_ms <= now_ms => {
                decided.push_back((Ticket(number), Err(Refusal::Late)));
                *waiting_here -= 1;
                false
            }
            Waiting::Core { until_ms, .. } => *until_ms > now_ms,
            Waiting::Here { .. } => true,
        });
    }

    /// Another core asks. It gets half of what is idle, so that two busy cores do not rob each other in turn.
    fn answer(&mut self, from: usize, wanted: u32, keep_ms: u64, now_ms: u64) {
        let slots = wanted.min(self.free.div_ceil(2));
        self.free -= slots;
        self.outbox.push_back((from, Message::Lend { from: self.config.here, slots, is_answer: true }));
        let known = self.queue.iter().find_map(|(&number, waiting)| match waiting {
            Waiting::Core { core, .. } if *core == from => Some(number),
            Waiting::Core { .. } | Waiting::Here { .. } => None,
        });
        let left = wanted - slots;
        if left == 0 || keep_ms == 0 || self.free > 0 || self.closed[self.config.here] {
            known.map(|number| self.queue.remove(&number));
            return;
        }
        let waiting = Waiting::Core { core: from, slots: left, until_ms: now_ms + keep_ms };
        match known {
            // Why in its old place: who asks again has not waited less.
            Some(number) => drop(self.queue.insert(number, waiting)),
            None => drop(self.queue_up(waiting)),
        }
    }

    fn note_closed(&mut self, core: usize, now_ms: u64) {
        self.closed[core] = true;
        self.queue.retain(|_, waiting| !matches!(waiting, Waiting::Core { core: waits, .. } if *waits == core));
        self.answered(core, now_ms);
        // Those that were its due, if this one is closed as well, go to the next.
        self.gain(0, now_ms);
    }

    /// The core at `step` of a round.
    fn peer(&self, step: usize) -> usize {
        let AdmissionConfig { here, cores, .. } = self.config;
        let first = self.next_core % (cores - 1);
        (here + 1 + (first + step - 1) % (cores - 1)) % cores
    }

    fn begin_round(&mut self, now_ms: u64) {
        if self.round.is_none() && self.waiting_here > 0 && now_ms >= self.next_round_ms && self.others_open() {
            self.round = Some(Round { step: 0, asked_ms: now_ms });
            self.ask_next(now_ms);
        }
    }

    /// `core` has answered, or never will.
    fn answered(&mut self, core: usize, now_ms: u64) {
        if self.round.is_some_and(|round| self.peer(round.step) == core) {
            self.ask_next(now_ms);
        }
    }

    /// Asks the next core, or ends the round.
    fn ask_next(&mut self, now_ms: u64) {
        let Some(mut round) = self.round.take() else { return };
        round.step += 1;
        while round.step < self.config.cores && self.closed[self.peer(round.step)] {
            round.step += 1;
        }
        if self.waiting_here > 0 && round.step < self.config.cores {
            let to = self.peer(round.step);
            let slots = u32::try_from(self.waiting_here).unwrap_or(u32::MAX);
            let keep_ms = self.config.wait_ms;
            self.outbox.push_back((to, Message::Ask { from: self.config.here, slots, keep_ms }));
            self.round = Some(Round { asked_ms: now_ms, ..round });
            return;
        }
        // Why not the same first core each time: its slots are spent.
        self.next_core += round.step;
        self.next_round_ms = now_ms + ROUND_PAUSE_MS;
        if self.config.wait_ms == 0 {
            // Nobody had an idle slot, and a busy one is not waited for.
            self.drop_overdue(u64::MAX);
        }
    }
}

/// Between the end of a round of questions and the next. Why: at full load each core would ask all others for each write.
const ROUND_PAUSE_MS: u64 = 5;

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
