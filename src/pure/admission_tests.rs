//! The rules of admission: several cores with messages between them, in one thread and in every order.

use proptest::prelude::*;

use super::*;

const ANSWER_MS: u64 = 20;

/// Cores, and the messages between them, each pair's in order.
struct Cluster {
    cores: Vec<Admission>,
    on_the_way: Vec<(usize, Message)>,
    waiting: Vec<(usize, Ticket)>,
    /// Writes with a slot, by core.
    running: Vec<u32>,
    refused: Vec<Refusal>,
    now_ms: u64,
}

impl Cluster {
    fn new(cores: usize, slots: u32, wait_ms: u64) -> Self {
        let config = |here| AdmissionConfig { here, cores, slots, wait_ms, queue_len: 8, answer_ms: ANSWER_MS };
        Self {
            cores: (0..cores).map(|here| Admission::new(config(here))).collect(),
            on_the_way: Vec::new(),
            waiting: Vec::new(),
            running: vec![0; cores],
            refused: Vec::new(),
            now_ms: 0,
        }
    }

    fn enter(&mut self, core: usize) {
        match self.cores[core].enter(0, self.now_ms) {
            Entry::Admitted => self.running[core] += 1,
            Entry::Waits(ticket) => self.waiting.push((core, ticket)),
            Entry::Refused(refusal) => self.refused.push(refusal),
        }
        self.collect();
    }

    fn release(&mut self, core: usize) {
        self.running[core] -= 1;
        self.cores[core].release(self.now_ms);
        self.collect();
    }

    /// Delivers the message at `index`, unless there is `trouble`: its receiver is gone (true) or busy (false).
    fn deliver(&mut self, index: usize, trouble: Option<bool>) {
        let (to, message) = self.on_the_way[index];
        // Why the first of its pair: a queue keeps the order.
        let sender = sender_of(message);
        let first = |&(other_to, other): &(usize, Message)| other_to == to && sender_of(other) == sender;
        let index = self.on_the_way.iter().position(first).expect("this one at least");
        let (to, message) = self.on_the_way.remove(index);
        match trouble {
            Some(is_gone) => self.cores[sender].undelivered(to, message, is_gone, self.now_ms),
            None => self.cores[to].receive(message, self.now_ms),
        }
        self.collect();
    }

    fn pass(&mut self, ms: u64) {
        self.now_ms += ms;
        for core in &mut self.cores {
            if core.deadline_ms().is_some_and(|deadline| deadline <= self.now_ms) {
                core.tick(self.now_ms);
                assert!(core.deadline_ms().is_none_or(|deadline| deadline > self.now_ms), "{core:?}");
            }
        }
        self.collect();
    }

    fn settle(&mut self) {
        for _ in 0..10_000 {
            match self.on_the_way.is_empty() {
                true => return,
                false => self.deliver(0, None),
            }
        }
        panic!("messages without end");
    }

    /// Lets whoever waits ask all others.
    fn ask_around(&mut self) {
        for _ in 0..3 {
            self.settle();
            self.pass(ROUND_PAUSE_MS + 1);
        }
        self.settle();
    }

    fn collect(&mut self) {
        for at in 0..self.cores.len() {
            while let Some(sent) = self.cores[at].next_message() {
                assert_ne!(sent.0, at, "nobody writes to himself");
                self.on_the_way.push(sent);
            }
            while let Some((ticket, outcome)) = self.cores[at].next_decided() {
                let known = self.waiting.iter().position(|&waits| waits == (at, ticket));
                self.waiting.remove(known.expect("each is decided once"));
                match outcome {
                    Ok(()) => self.running[at] += 1,
                    Err(refusal) => self.refused.push(refusal),
                }
            }
        }
        self.check();
    }

    /// What the cores together were told.
    fn due(&self) -> i64 {
        self.cores.iter().map(|core| i64::from(core.home())).sum()
    }

    fn set_slots(&mut self, core: usize, slots: u32) {
        self.cores[core].set_slots(slots, self.now_ms);
        self.collect();
    }

    fn check(&self) {
        let in_messages = self.on_the_way.iter().map(|(_, message)| match message {
            Message::Lend { slots, .. } => i64::from(*slots),
            Message::Owe { slots, .. } => -i64::from(*slots),
            Message::Ask { .. } | Message::Closed { .. } => 0,
        });
        let here = self.cores.iter().map(|core| i64::from(core.owned()) - i64::from(core.owed));
        assert_eq!(here.chain(in_messages).sum::<i64>(), self.due(), "slots are neither lost nor made");
        for (at, core) in self.cores.iter().enumerate() {
            assert_eq!(core.taken(), self.running[at]);
            assert_eq!(core.waiting(), self.waiting.iter().filter(|(waits, _)| *waits == at).count());
            assert!(core.free == 0 || core.queue.is_empty(), "an idle slot while somebody waits: {core:?}");
            assert!(core.free == 0 || core.owed == 0, "an idle slot that is to go: {core:?}");
            assert!(core.waiting() <= core.config.queue_len);
            assert!(core.queue.len() <= core.config.queue_len + self.cores.len());
        }
    }
}

fn sender_of(message: Message) -> usize {
    match message {
        Message::Ask { from, .. }
        | Message::Lend { from, .. }
        | Message::Owe { from, .. }
        | Message::Closed { from } => from,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Goal: whatever happens in whatever order, the slots stay as many as they should be, none idles while a write waits
    /// for it here, each write is decided once, and at the end nothing is held and nobody waits. Method: random
    /// steps over 1 to 5 cores: writes come, end, go away; messages arrive late, or come back because a core is gone;
    /// cores close, or are told another limit or another wait; time passes.
    #[test]
    fn slots_are_neither_lost_nor_made(
        cores in 1usize..6,
        slots in 0u32..9,
        wait_ms in prop_oneof![Just(0u64), Just(50), Just(1000)],
        steps in proptest::collection::vec((0u8..18, 0usize..64, 0u64..40), 1..250),
    ) {
        let mut cluster = Cluster::new(cores, slots, wait_ms);
        let mut closed = vec![false; cores];
        for (step, pick, ms) in steps {
            let core = pick % cores;
            match step {
                0..=4 => cluster.enter(core),
                5..=7 if cluster.running[core] > 0 => cluster.release(core),
                8 if !cluster.waiting.is_empty() => {
                    let (at, ticket) = cluster.waiting.remove(pick % cluster.waiting.len());
                    cluster.cores[at].leave(ticket);
                }
                9 if ms == 0 => {
                    closed[core] = true;
                    cluster.cores[core].close(cluster.now_ms);
                    cluster.collect();
                }
                10..=13 if !cluster.on_the_way.is_empty() => {
                    let index = pick % cluster.on_the_way.len();
                    let trouble = match ms % 8 {
                        0 if closed[cluster.on_the_way[index].0] => Some(true),
                        1 => Some(false),
                        _ => None,
                    };
                    cluster.deliver(index, trouble);
                }
                14 | 15 => cluster.pass(ms),
                16 => cluster.set_slots(core, pick as u32 % 9),
                17 => cluster.cores[core].set_wait_ms(ms * 10, cluster.now_ms),
                _ => {}
            }
            cluster.check();
        }
        for core in 0..cores {
            for _ in 0..cluster.running[core] {
                cluster.release(core);
            }
        }
        for _ in 0..200 {
            cluster.settle();
            cluster.pass(25);
            for core in 0..cores {
                for _ in 0..cluster.running[core] {
                    cluster.release(core);
                }
            }
        }
        prop_assert!(cluster.waiting.is_empty() && cluster.on_the_way.is_empty());
        let owned: Vec<u32> = cluster.cores.iter().map(Admission::owned).collect();
        if closed.iter().any(|closed| !closed) {
            prop_assert!((0..cores).all(|core| !closed[core] || owned[core] == 0), "{owned:?} {closed:?}");
        }
    }
}

/// Goal: with fewer slots than cores every core gets its turn, with and without a wait. Method: one slot, 16 cores,
/// each of which writes in turn, the slot idle on another core each time.
#[test]
fn one_slot_serves_sixteen_cores() {
    for wait_ms in [0, 250] {
        let mut cluster = Cluster::new(16, 1, wait_ms);
        for turn in 0..100 {
            let core = turn * 7 % 16;
            cluster.enter(core);
            cluster.settle();
            assert_eq!(cluster.running[core], 1, "turn {turn}");
            cluster.release(core);
            cluster.pass(ROUND_PAUSE_MS);
        }
        assert_eq!(cluster.refused, []);
    }
}

/// Goal: nobody starves: of writes that wait on all cores for one slot each gets it within one turn of all others,
/// though the core that has it never runs out of writes. Method: one slot, 4 cores with a write each that comes back
/// as soon as it has ended.
#[test]
fn nobody_starves() {
    let mut cluster = Cluster::new(4, 1, 60_000);
    let mut served = [0u32; 4];
    (0..4).for_each(|core| cluster.enter(core));
    for _ in 0..400 {
        cluster.settle();
        cluster.pass(ROUND_PAUSE_MS);
        cluster.settle();
        let core = cluster.running.iter().position(|&running| running > 0).expect("the slot is in use");
        served[core] += 1;
        cluster.enter(core);
        cluster.release(core);
    }
    assert!(served.iter().all(|&served| served >= 80), "{served:?}");
    assert_eq!(cluster.refused, []);
}

/// Goal: a limit that falls is reached when the writes in flight have ended, wherever the slots stand; one that rises serves
/// who waits. Method: all slots of two cores lent to the third, which keeps some in use; lower, end, raise.
#[test]
fn the_limit_can_change() {
    let mut cluster = Cluster::new(3, 30, 10_000);
    for _ in 0..30 {
        cluster.enter(2);
        cluster.ask_around();
    }
    assert_eq!((cluster.running[2], cluster.cores[2].owned()), (30, 30));
    for core in 0..3 {
        cluster.set_slots(core, 4);
    }
    cluster.settle();
    for left in (0..30).rev() {
        cluster.release(2);
        cluster.settle();
        let owned: u32 = cluster.cores.iter().map(Admission::owned).sum();
        assert_eq!(owned, left.max(4));
    }
    for _ in 0..5 {
        cluster.enter(2);
        cluster.ask_around();
    }
    assert_eq!((cluster.running[2], cluster.waiting.len()), (4, 1));
    for core in 0..3 {
        cluster.set_slots(core, 9);
    }
    cluster.ask_around();
    assert_eq!((cluster.running[2], cluster.waiting.len()), (5, 0));
    assert_eq!(cluster.cores.iter().map(Admission::owned).sum::<u32>(), 9);
}

/// Goal: another wait holds for those who come, and shortens that of those who wait. Method: one core, no slot.
#[test]
fn the_wait_can_change() {
    let config = AdmissionConfig { here: 0, cores: 1, slots: 0, wait_ms: 100, queue_len: 9, answer_ms: ANSWER_MS };
    let mut one = Admission::new(config);
    let late = |one: &mut Admission, now_ms| {
        one.tick(now_ms);
        std::iter::from_fn(|| one.next_decided()).count()
    };
    assert!(matches!(one.enter(0, 0), Entry::Waits(_)));
    one.set_wait_ms(20, 10);
    assert!(matches!(one.enter(0, 10), Entry::Waits(_)));
    assert_eq!((late(&mut one, 29), one.deadline_ms()), (0, Some(30)));
    assert_eq!(late(&mut one, 30), 2);
    assert!(matches!(one.enter(0, 30), Entry::Waits(_)));
    one.set_wait_ms(1000, 40);
    assert!(matches!(one.enter(0, 40), Entry::Waits(_)));
    assert_eq!((late(&mut one, 50), one.deadline_ms()), (1, Some(1040)));
}

/// Goal: the queue is first come, first served, bounded, and ends when it should. Method: one core, two slots.
#[test]
fn waits_in_order_and_within_bounds() {
    let config = AdmissionConfig { here: 0, cores: 1, slots: 2, wait_ms: 100, queue_len: 3, answer_ms: ANSWER_MS };
    let mut one = Admission::new(config);
    assert_eq!((one.enter(0, 0), one.enter(0, 0)), (Entry::Admitted, Entry::Admitted));
    let waits = [1, 2, 3].map(|now_ms| match one.enter(0, now_ms) {
        Entry::Waits(ticket) => ticket,
        other => panic!("{other:?}"),
    });
    assert_eq!(one.enter(0, 3), Entry::Refused(Refusal::QueueFull));
    one.leave(waits[1]);
    assert_eq!(one.enter(1, 3), Entry::Refused(Refusal::QueueFull), "one waits for something else");
    one.release(50);
    assert_eq!(one.next_decided(), Some((waits[0], Ok(()))));
    assert_eq!(one.deadline_ms(), Some(103));
    one.tick(102);
    assert_eq!(one.next_decided(), None);
    one.tick(103);
    assert_eq!(one.next_decided(), Some((waits[2], Err(Refusal::Late))));
    assert_eq!((one.deadline_ms(), one.waiting(), one.taken()), (None, 0, 2));
    let mut none = Admission::new(AdmissionConfig { wait_ms: 0, slots: 0, ..config });
    assert_eq!(none.enter(0, 0), Entry::Refused(Refusal::Late));
}

/// Goal: a core that never answers costs some milliseconds, not the wait. Method: 3 cores, the idle slot on the last.
#[test]
fn a_silent_core_is_passed_over() {
    let mut cluster = Cluster::new(3, 1, 250);
    cluster.enter(0);
    cluster.settle();
    cluster.enter(1);
    cluster.release(0);
    let asked = |cluster: &Cluster, to| cluster.on_the_way.iter().any(|&(at, _)| at == to);
    assert!(asked(&cluster, 2) && !asked(&cluster, 0));
    cluster.pass(ANSWER_MS);
    let index = cluster.on_the_way.iter().position(|&(to, _)| to == 0).expect("the next is asked");
    cluster.deliver(index, None);
    let index = cluster.on_the_way.iter().position(|&(to, _)| to == 1).expect("it answers");
    cluster.deliver(index, None);
    assert_eq!(cluster.running, [0, 1, 0]);
}
