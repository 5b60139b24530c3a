//! Memory for messages that are held as a whole: requests on their way in, replies until they have gone out.
//!
//! All connections share what the memory limit has for them; the last quarter is for those that hold nothing yet, so that
//! few busy ones cannot keep others from being served. Who finds no room waits: of requests the oldest is first, as it holds
//! what has come already; of replies one of each connection in turn, so that thousands of one client do not come before the
//! first of another.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::tables::OpenStreams;
use crate::budget::{Claim, Purse};
use crate::limits;
use crate::pure::memory_plan::Use;
use crate::rt;
use crate::rt::local::Local;

/// The memory of one core for one kind of message. Clones are the same memory.
#[derive(Clone)]
pub struct Memory {
    purse: Purse,
    used: Use,
    core: Local<Core>,
}

#[derive(Default)]
struct Core {
    /// Bytes held in all.
    held: usize,
    /// Who waits, by its place: at most one of each connection.
    queue: BTreeMap<u64, Waker>,
    /// Numbers that were given to rooms and places.
    numbers: u64,
    /// A task looks whether other cores have given something back.
    is_watched: bool,
}

/// One connection's part. Clones are the same part.
#[derive(Clone)]
pub struct Share {
    memory: Memory,
    part: Local<Part>,
}

#[derive(Default)]
struct Part {
    held: usize,
    /// Rooms that may wait; beyond that the youngest gives way.
    waiting_max: usize,
    /// Who waits, by the number of its room.
    waiting: BTreeMap<u64, Waker>,
}

/// Room for one message; it may grow. Dropping it gives the bytes back.
pub struct Room {
    share: Share,
    /// Lower is older.
    number: u64,
    held: Cell<usize>,
}

/// Too many of this connection wait, and this room is the youngest of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GaveWay;

impl Memory {
    pub fn new(purse: Purse, used: Use) -> Self {
        Self { purse, used, core: Local::new(Core::default()) }
    }

    /// The part of a new connection. Any number of its rooms may wait, until `allow_waiting` says otherwise.
    pub fn share(&self) -> Share {
        let part = Part { waiting_max: usize::MAX, ..Part::default() };
        Share { memory: self.clone(), part: Local::new(part) }
    }

    /// Bytes held now.
    pub fn held(&self) -> usize {
        self.core.with(|core| core.held)
    }

    /// Bytes that one connection may have beyond its first room: half of what all may have.
    pub fn connection_max(&self) -> usize {
        usize::try_from(self.purse.share(self.used) / 2).unwrap_or(usize::MAX)
    }

    /// The place of a room that is first of its connection; `None`: behind all that wait.
    fn place_of(&self, number: u64) -> Option<u64> {
        (self.used != Use::Replies).then_some(number)
    }

    /// Sees to it that whoever waits learns when another core has given something back.
    ///
    /// Why by looking: it is needed only when memory is out, and then a message for each return would be one too many.
    fn watch(&self) {
        if self.purse.is_alone() || self.core.with(|core| std::mem::replace(&mut core.is_watched, true)) {
            return;
        }
        let memory = self.clone();
        rt::spawn(async move {
            let first = |core: &mut Core| core.queue.first_key_value().map(|(_, waker)| waker.clone());
            while let Some(waker) = memory.core.with(first) {
                waker.wake();
                rt::time::sleep(Duration::from_millis(limits::MEMORY_WATCH_MS)).await;
            }
            memory.core.with(|core| core.is_watched = false);
        });
    }
}

impl Share {
    /// So many rooms may wait from now on.
    pub fn allow_waiting(&self, rooms: usize) {
        self.part.with(|part| part.waiting_max = rooms);
    }

    /// True when more than half of the memory is taken.
    pub fn is_scarce(&self) -> bool {
        self.memory.purse.is_scarce(self.memory.used)
    }

    /// An empty room.
    pub fn room(&self) -> Room {
        let number = self.memory.core.with(|core| {
            core.numbers += 1;
            core.numbers
        });
        Room { share: self.clone(), number, held: Cell::new(0) }
    }

    /// Wakes those whose turn may have come.
    fn wake_next(&self) {
        let first = |waiting: &BTreeMap<u64, Waker>| waiting.first_key_value().map(|(_, waker)| waker.clone());
        let here = self.part.with(|part| first(&part.waiting));
        let anywhere = self.memory.core.with(|core| first(&core.queue));
        here.into_iter().chain(anywhere).for_each(Waker::wake);
    }
}

impl Room {
    /// Bytes held.
    pub fn held(&self) -> usize {
        self.held.get()
    }

    /// Takes `more` bytes, after waiting for them if need be.
    ///
    /// Limit: who holds room while it waits for more has to be given up after some time, because others may do the same.
    pub async fn grow(&self, more: usize) -> Result<(), GaveWay> {
        if self.try_grow(more) {
            return Ok(());
        }
        let mut turn = Turn { room: self, waits: false, place: None };
        std::future::poll_fn(|context| turn.poll(context, more)).await
    }

    /// Gives back all but `len` bytes.
    pub fn shrink_to(&self, len: usize) {
        self.give_back(self.held().saturating_sub(len));
    }

    /// Takes `more` bytes unless an older room of the connection waits, or there are none.
    pub fn try_grow(&self, more: usize) -> bool {
        self.try_grow_at(more, None)
    }

    /// The same for one that has that place in the queue of the core.
    fn try_grow_at(&self, more: usize, place: Option<u64>) -> bool {
        let Share { memory, part } = &self.share;
        let Memory { purse, used, core, .. } = memory;
        let connection_max = memory.connection_max();
        part.with(|part| {
            if part.waiting.first_key_value().is_some_and(|(&first, _)| first < self.number) {
                return false;
            }
            core.with(|core| {
                let place = place.or_else(|| memory.place_of(self.number)).unwrap_or(u64::MAX);
                let is_next = core.queue.first_key_value().is_none_or(|(&first, _)| first >= place);
                let held = self.held.get();
                let is_only = part.held == held;
                let claim = if is_only { Claim::First { held: held as u64 } } else { Claim::Further };
                let may = is_only || (is_next && part.held + more <= connection_max);
                if !may || !purse.take(*used, more as u64, claim) {
                    return false;
                }
                part.held += more;
                self.held.set(self.held.get() + more);
                core.held += more;
                true
            })
        })
    }

    fn give_back(&self, len: usize) {
        if len == 0 {
            return;
        }
        let Share { memory, part } = &self.share;
        self.held.set(self.held.get() - len);
        part.with(|part| part.held -= len);
        memory.core.with(|core| core.held -= len);
        memory.purse.give(memory.used, len as u64);
        self.share.wake_next();
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.give_back(self.held.get());
    }
}

/// A room that waits for its turn. Dropping it leaves the queues.
struct Turn<'a> {
    room: &'a Room,
    waits: bool,
    /// In the queue of the core, while it is there.
    place: Option<u64>,
}

impl Turn<'_> {
    fn poll(&mut self, context: &Context<'_>, more: usize) -> Poll<Result<(), GaveWay>> {
        let Room { share: Share { memory, part }, number, .. } = self.room;
        let core = &memory.core;
        let connection_max = memory.connection_max();
        if self.waits && part.with(|part| !part.waiting.contains_key(number)) {
            return Poll::Ready(Err(GaveWay));
        }
        if self.room.try_grow_at(more, self.place) {
            return Poll::Ready(Ok(()));
        }
        let is_new = !std::mem::replace(&mut self.waits, true);
        let waker = context.waker();
        let (replaced, in_line, youngest, overtaken) = part.with(|part| {
            let replaced = part.waiting.insert(*number, waker.clone());
            let youngest = if part.waiting.len() > part.waiting_max { part.waiting.pop_last() } else { None };
            let is_first = part.waiting.first_key_value().is_some_and(|(first, _)| first == number);
            // Why: it may have to leave the queue of the core to this one.
            let overtaken = part.waiting.values().nth(1).filter(|_| is_new && is_first).cloned();
            // Why only then: who has its half of all waits for its own connection, not for others.
            (
                replaced,
                is_first && (part.held == self.room.held.get() || part.held + more <= connection_max),
                youngest,
                overtaken,
            )
        });
        let (known, was_next) = core.with(|core| {
            if in_line {
                let place = *self.place.get_or_insert_with(|| {
                    core.numbers += 1;
                    memory.place_of(*number).unwrap_or(core.numbers)
                });
                return (core.queue.insert(place, waker.clone()), false);
            }
            let Some(place) = self.place.take() else { return (None, false) };
            let was_next = core.queue.first_key_value().is_some_and(|(&first, _)| first == place);
            (core.queue.remove(&place), was_next)
        });
        drop((replaced, known)); // Outside of the borrows: dropping a waker may run other drops.
        overtaken.into_iter().for_each(Waker::wake);
        if was_next {
            self.room.share.wake_next();
        }
        if is_new {
            memory.watch();
        }
        match youngest {
            Some((youngest, _)) if youngest == *number => return Poll::Ready(Err(GaveWay)),
            Some((_, waker)) => waker.wake(),
            None => {}
        }
        Poll::Pending
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.waits {
            let Room { share, number, .. } = self.room;
            let left = share.part.with(|part| part.waiting.remove(number));
            let place = self.place.take();
            let queued = place.and_then(|place| share.memory.core.with(|core| core.queue.remove(&place)));
            drop((left, queued));
            share.wake_next();
        }
    }
}

/// What one connection may make this core hold besides its windows.
#[derive(Clone)]
pub struct Shares {
    pub requests: Share,
    pub replies: Share,
    pub streams: OpenStreams,
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::time::Duration;

    use super::*;
    use crate::rt::time::{self, Either};

    /// Memory of 100 bytes: 75 for all, of which one connection has 50 at most, and 25 for first rooms.
    fn memory() -> Memory {
        Memory::new(Purse::alone(400), Use::Replies)
    }

    type Growing<'a> = Pin<Box<dyn Future<Output = Result<(), GaveWay>> + 'a>>;

    fn poll(growing: &mut Growing<'_>) -> Poll<Result<(), GaveWay>> {
        growing.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    fn taken(share: &Share, len: usize) -> Room {
        let room = share.room();
        assert!(room.try_grow(len), "{len}");
        room
    }

    /// Goal: bounds hold to the byte, a connection that holds nothing finds room though others are busy, and everything
    /// comes back. Method: two connections take all that they may; a third one still has its first room.
    #[test]
    fn is_bounded() {
        let memory = memory();
        let [a, b, c] = [(); 3].map(|()| memory.share());
        let rooms = [taken(&a, 10), taken(&a, 40), taken(&b, 10), taken(&b, 15)];
        for share in [&a, &b] {
            assert!(!share.room().try_grow(1));
        }
        assert!(!c.room().try_grow(26));
        let own = taken(&c, 25);
        assert!(!c.room().try_grow(1) && !memory.share().room().try_grow(1));
        assert_eq!(memory.held(), 100);
        rooms[1].shrink_to(20);
        assert_eq!((rooms[1].held(), memory.held()), (20, 80));
        drop(rooms);
        let more = taken(&c, 25);
        assert!(!c.room().try_grow(1), "half for one");
        drop(more);
        own.shrink_to(3);
        assert_eq!(memory.held(), 3);
        own.shrink_to(5);
        assert_eq!(own.held(), 3);
        drop(own);
        let large = taken(&c, 900);
        assert!(large.try_grow(100), "who is alone is never too large");
        assert!(!memory.share().room().try_grow(1));
        drop(large);
        assert_eq!(memory.held(), 0);
    }

    /// Goal: the oldest of a connection is first, others do not overtake it, the youngest gives way when too many wait,
    /// and a wait that is given up leaves nothing. Method: polls by hand.
    #[test]
    fn the_oldest_is_first() {
        let memory = memory();
        let share = memory.share();
        share.allow_waiting(2);
        let full = taken(&share, 50);
        let [old, middle, young] = [(); 3].map(|()| share.room());
        let mut middle_grows: Growing = Box::pin(middle.grow(4));
        let mut young_grows: Growing = Box::pin(young.grow(1));
        let mut old_grows: Growing = Box::pin(old.grow(8));
        assert!(poll(&mut middle_grows).is_pending() && poll(&mut young_grows).is_pending());
        assert!(poll(&mut old_grows).is_pending());
        assert_eq!(poll(&mut young_grows), Poll::Ready(Err(GaveWay)));
        drop(young_grows);
        full.shrink_to(44);
        assert!(poll(&mut middle_grows).is_pending() && !share.room().try_grow(1), "no overtaking");
        assert!(poll(&mut old_grows).is_pending());
        drop(old_grows);
        assert_eq!(poll(&mut middle_grows), Poll::Ready(Ok(())));
        drop(middle_grows);
        assert!(share.part.with(|part| part.waiting.is_empty()) && memory.core.with(|core| core.queue.is_empty()));
        drop((full, old, middle, young));
        assert_eq!(memory.held(), 0);
    }

    /// Goal: what is shared goes to those who wait for it in order, and one who has its half does not hold up others.
    /// Method: one connection at its half waits, then two others; room comes back.
    #[test]
    fn shared_room_goes_in_order() {
        let memory = memory();
        let [greedy, other, a, b] = [(); 4].map(|()| memory.share());
        let rooms = [&greedy, &other, &a, &b].map(|share| taken(share, 2));
        let half = [taken(&greedy, 48), taken(&other, 19)];
        let [more, first, second] = [greedy.room(), a.room(), b.room()];
        let mut greedy_grows: Growing = Box::pin(more.grow(1));
        let mut first_grows: Growing = Box::pin(first.grow(10));
        let mut second_grows: Growing = Box::pin(second.grow(2));
        for growing in [&mut greedy_grows, &mut first_grows, &mut second_grows] {
            assert!(poll(growing).is_pending());
        }
        half[1].shrink_to(12);
        assert!(poll(&mut second_grows).is_pending(), "2 would fit, but 10 came first");
        half[1].shrink_to(0);
        assert!(poll(&mut greedy_grows).is_pending());
        assert_eq!(poll(&mut first_grows), Poll::Ready(Ok(())));
        assert_eq!(poll(&mut second_grows), Poll::Ready(Ok(())));
        half[0].shrink_to(47);
        assert_eq!(poll(&mut greedy_grows), Poll::Ready(Ok(())));
        drop((greedy_grows, first_grows, second_grows));
        drop((rooms, half, more, first, second));
        assert_eq!(memory.held(), 0);
    }

    /// Goal: replies go to each connection in turn, so that the first of one does not wait behind all of another. Method: three
    /// of one connection wait, then one of another; room comes back bit by bit.
    #[test]
    fn replies_go_to_each_connection_in_turn() {
        let memory = memory();
        let [busy, other, full, rest] = [(); 4].map(|()| memory.share());
        let firsts = [taken(&busy, 2), taken(&other, 2)];
        let (full, _rest) = (taken(&full, 48), taken(&rest, 23));
        let rooms = [&busy, &busy, &busy, &other].map(Share::room);
        let mut growing: Vec<Growing> = rooms.iter().map(|room| Box::pin(room.grow(5)) as Growing).collect();
        assert!(growing.iter_mut().all(|growing| poll(growing).is_pending()));
        for (left, served) in [(43, 0), (38, 3), (33, 1), (28, 2)] {
            full.shrink_to(left);
            for later in [0, 3, 1, 2].into_iter().rev().take_while(|&later| later != served) {
                assert!(poll(&mut growing[later]).is_pending(), "{later} before {served}");
            }
            assert_eq!(poll(&mut growing[served]), Poll::Ready(Ok(())), "{served}");
        }
        drop(growing);
        drop((rooms, firsts));
        assert!(memory.core.with(|core| core.queue.is_empty()));
        assert_eq!(memory.held(), 28 + 23);
    }

    /// Goal: nobody is forgotten who could go on, and nothing is left. Method: 50 seeded runs of 60 tasks over three
    /// connections, each of which takes room at once, holds it, and goes; some give up waiting. A forgotten one never ends.
    #[test]
    fn nobody_is_forgotten() {
        for seed in 0..50u64 {
            crate::rt::cores::block_on(async move {
                let memory = Memory::new(Purse::alone(4 * 28), Use::Replies);
                let shares = [(); 3].map(|()| memory.share());
                let gate = crate::rt::gate::Gate::default();
                for task in 0..60u64 {
                    // Why these multipliers: any odd ones will do, the runs only have to differ.
                    let word = (seed * 60 + task + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
                    let share = shares[(word % 3) as usize].clone();
                    let (len, turns, patience) = ((word >> 4) % 10 + 1, (word >> 8) % 5, (word >> 12) % 40);
                    gate.spawn(async move {
                        let room = share.room();
                        let patience = async {
                            for _ in 0..=patience {
                                time::yield_once().await;
                            }
                            if patience < 30 {
                                std::future::pending().await
                            }
                        };
                        if let Either::Left(grown) = time::race(room.grow(len as usize), patience).await {
                            assert_eq!(grown, Ok(()));
                            for _ in 0..turns {
                                time::yield_once().await;
                            }
                        }
                    });
                }
                let all = time::timeout(Duration::from_secs(20), gate.wait_empty()).await;
                assert!(all.is_ok(), "seed {seed}: {} are forgotten", gate.len());
                assert_eq!((memory.held(), memory.core.with(|core| core.queue.len())), (0, 0), "seed {seed}");
            });
        }
    }
}
