//! What keeps a core from sleeping through its work: one driver task for each core, and one nudger for the process.
//!
//! Why: glommio can park an executor that has runnable tasks. When its preempt timer has fired before the first check
//! of the run loop (the thread was off the CPU for 100 ms right after arming it), "preempted" is taken for "nothing to
//! run". Such a park lasts until the reactor has an event, so an event must always be coming:
//!
//! 1. *The beat.* While a core has work in flight (`busy`, `touch`), its driver keeps a timer of `BEAT` armed, so a
//!    wrong park costs at most that. It stops `QUIET_BEATS` after the last sign of work: an idle core sleeps.
//! 2. *The nudge.* Two windows are left open: the wrong park can hit in the very turn in which the beat's timer fired,
//!    so that nothing is armed; and a message from another core can reach a core that was idle, whose beat starts only
//!    once a task has run. Neither can be closed from inside, as no task of that core runs. So a thread outside wakes
//!    each driver every `NUDGE`: the eventfd write behind a wake from another thread ends any park, right or wrong,
//!    and can be repeated until the core turns. A core that just starts is nudged every `NUDGE_YOUNG`, because its
//!    first turn is the likeliest victim; while no core of the process has work, one in `NUDGE_IDLE` does.
//!
//! So a request is delayed by at most `NUDGE` (`NUDGE_IDLE` times that when it is the first on an idle server), and only if the
//! scheduler has just held its thread for 100 ms. Receivers of channels need nothing more: the sender's wake is an event,
//! and the nudge covers the park that swallows it.
//!
//! While a core works, and once after it has ceased to, the driver also gives memory back that the core keeps for no use
//! (`allocator`), every `GIVE_BACK_PERIOD`.
//!
//! The driver also serves the deadlines of the core, all of them by one glommio timer. Why: glommio looks at every
//! timer in every turn, and each poll of a pending one adds an entry that stays until its time.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::deadlines::{Deadlines, Key};
use super::{allocator, file, host};

/// The longest park of a core with work in flight, but for the nudge's share.
const BEAT: Duration = Duration::from_millis(4);
/// Beats without any sign of work after which the beat stops.
const QUIET_BEATS: u32 = 12;
/// How often every core is woken from outside while any core has work.
const NUDGE: Duration = Duration::from_millis(250);
/// Pauses of `NUDGE` between two nudges while none has: a nudge of an idle core costs it up to 70 us.
const NUDGE_IDLE: u32 = 8;
/// The same while a core is starting.
const NUDGE_YOUNG: Duration = Duration::from_millis(10);
/// How long a core counts as starting.
const YOUNG: Duration = Duration::from_secs(2);

/// A timer that fires so late counts as a stall: nothing else of this core ran in time either.
const STALL: Duration = Duration::from_millis(20);

/// How often a core that works gives back what memory it does not need. Why so seldom: what it needs again is paid for in
/// page faults. An estimate: how much that is was not measured.
const GIVE_BACK_PERIOD: Duration = Duration::from_secs(10);
/// How long bulk work may keep a core from its reactor and its other tasks. Why not less: each turn of the reactor costs
/// about 10 us.
const BULK_TURN: Duration = Duration::from_millis(2);
/// The weight of bulk work against 1000 of all other tasks, while both have something to do. It is not less, as the
/// others are the connections, which wait for the bulk work to give window back.
const BULK_SHARES: usize = 250;

/// Some core had a sign of work since the nudger looked.
static ACTIVE: AtomicBool = AtomicBool::new(false);

thread_local! {
    static CORE: Core = Core::default();
}

/// The state of the executor of this thread.
#[derive(Default)]
struct Core {
    deadlines: RefCell<Deadlines>,
    /// The driver task; `None` when no executor runs on this thread.
    driver: RefCell<Option<Waker>>,
    /// When the driver looks again at the latest; `None` for not until it is woken.
    armed: Cell<Option<Instant>>,
    /// Guards alive.
    busy: Cell<u32>,
    /// There was a sign of work since the last beat.
    touched: Cell<bool>,
    /// When the next beat is due; `None` when the core is quiet.
    beat_at: Cell<Option<Instant>>,
    quiet_beats: Cell<u32>,
    /// When memory is given back; `None` when the core has not worked since the last time.
    give_back_at: Cell<Option<Instant>>,
    stopping: Cell<bool>,
    stats: Cell<CoreStats>,
    /// The queue of bulk work, once there was any.
    bulk: Cell<Option<glommio::TaskQueueHandle>>,
    /// See `wake_after_turn`.
    turn: RefCell<Option<Pin<Box<dyn Future<Output = ()>>>>>,
}

/// What the executor of this thread has done.
#[derive(Debug, Clone, Copy, Default)]
pub struct CoreStats {
    /// Time in tasks and in the reactor, not asleep.
    pub busy: Duration,
    /// CPU time of the thread. Much less than `busy`: others take the CPU.
    pub cpu: Duration,
    /// Turns of tasks.
    pub tasks_run: u64,
    /// Timers that fired late by `STALL` or more, and by how much together.
    pub stalls: u64,
    pub stalled: Duration,
    /// Panics that `rt::catch` has caught.
    pub panics: u64,
}

/// The stats of this core, since it started.
pub fn core_stats() -> CoreStats {
    CORE.with(|core| {
        // glommio counts from the last time that it was asked.
        let more = glommio::executor().executor_stats();
        let mut stats = core.stats.get();
        stats.busy += more.total_runtime();
        stats.tasks_run += more.tasks_executed();
        stats.cpu = host::thread_cpu_time();
        core.stats.set(stats);
        stats
    })
}

pub(super) fn count_panic() {
    CORE.with(|core| core.stats.update(|stats| CoreStats { panics: stats.panics + 1, ..stats }));
}

/// Work is in flight on this core as long as this lives. Costs a few core-local counter operations.
pub struct BusyGuard(PhantomData<*const ()>);

/// Marks this core as having work in flight: hold it for each request being served, not for each idle connection.
/// Disk operations, replies being waited for and whole `block_on`s hold one by themselves.
pub fn busy() -> BusyGuard {
    CORE.with(|core| {
        core.busy.set(core.busy.get() + 1);
        core.touch();
    });
    BusyGuard(PhantomData)
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        let _ = CORE.try_with(|core| {
            core.busy.set(core.busy.get() - 1);
            core.touched.set(true);
        });
    }
}

/// A sign of work on this core: bytes have come, a connection was accepted.
pub(super) fn touch() {
    CORE.with(Core::touch);
}

/// Adds a deadline of this core.
pub(super) fn insert(at: Instant, waker: Waker) -> Key {
    CORE.with(|core| {
        let key = core.deadlines.borrow_mut().insert(at, waker);
        if core.armed.get().is_none_or(|armed| at < armed) {
            core.armed.set(Some(at));
            core.wake_driver();
        }
        key
    })
}

/// Wakes somebody else at that deadline.
pub(super) fn set_waker(key: Key, waker: &Waker) {
    CORE.with(|core| core.deadlines.borrow_mut().set_waker(key, waker));
}

/// Forgets a deadline.
pub(super) fn remove(key: Key) {
    let _ = CORE.try_with(|core| {
        let waker = core.deadlines.borrow_mut().remove(key);
        drop(waker);
    });
}

/// Wakes the task of `context` in the next turn of the reactor, and nobody does it before.
///
/// Why so: a shared channel that waits for its peer is woken in each turn, without a system call, and whether or not
/// the turn found anything. Measured for a lone task, CPU: 10 us, which is the turn; by a timer of 1 us 29 us, as the
/// executor parks for it.
pub(super) fn wake_after_turn(context: &mut Context<'_>) {
    CORE.with(|core| {
        let connected =
            core.turn.borrow_mut().get_or_insert_with(|| Box::pin(never_connected())).as_mut().poll(context);
        debug_assert!(connected.is_pending(), "the peer is held and never connects");
    });
}

/// The queue of this core's bulk work. While it has work, and only then, the executor stops for its reactor each
/// `BULK_TURN`: glommio takes the shortest turn that any of its active queues asks for.
pub(super) fn bulk_queue() -> glommio::TaskQueueHandle {
    CORE.with(|core| {
        let queue = core.bulk.get().unwrap_or_else(|| {
            let (shares, turn) = (glommio::Shares::Static(BULK_SHARES), glommio::Latency::Matters(BULK_TURN));
            glommio::executor().create_task_queue(shares, turn, "bulk")
        });
        core.bulk.set(Some(queue));
        queue
    })
}

async fn never_connected() {
    let (peer, receiver) = glommio::channels::shared_channel::new_bounded::<()>(1);
    drop(receiver.connect().await);
    drop(peer);
}

/// True on a thread whose executor runs.
pub(super) fn on_core() -> bool {
    CORE.try_with(|core| core.driver.borrow().is_some()).unwrap_or(false)
}

/// How many deadlines wait on this core, and whether its beat runs: for tests.
pub fn pulse_now() -> (usize, bool) {
    CORE.with(|core| (core.deadlines.borrow().len(), core.beat_at.get().is_some()))
}

/// Runs `future` to its end on `executor`, with driver and nudges.
pub(super) fn run<T>(executor: &glommio::LocalExecutor, future: impl Future<Output = T>) -> T {
    assert!(!on_core(), "this thread runs an executor already");
    // Spawned before the run, and polled at once: from here on the executor can be woken from outside, which the
    // first turn of the run needs already.
    let driver = executor.spawn(Driver::default()).detach();
    let _leave = Leave(nudger().register(CORE.with(|core| core.driver.borrow().clone())));
    touch();
    executor.run(async move {
        let result = future.await;
        CORE.with(|core| {
            core.stopping.set(true);
            core.wake_driver();
        });
        driver.await;
        result
    })
}

/// Clears the thread's state behind a run, also when it panicked.
struct Leave(u64);

impl Drop for Leave {
    fn drop(&mut self) {
        nudger().unregister(self.0);
        CORE.with(|core| {
            drop(core.deadlines.take());
            drop(core.driver.take());
            drop(core.turn.take());
            core.bulk.set(None);
            core.armed.set(None);
            core.beat_at.set(None);
            core.give_back_at.set(None);
            core.stopping.set(false);
        });
    }
}

impl Core {
    fn touch(&self) {
        self.touched.set(true);
        if !ACTIVE.load(Ordering::Relaxed) {
            ACTIVE.store(true, Ordering::Relaxed);
        }
        if self.beat_at.get().is_some() {
            return;
        }
        let at = Instant::now() + BEAT;
        self.quiet_beats.set(0);
        self.beat_at.set(Some(at));
        if self.armed.get().is_none_or(|armed| at < armed) {
            self.armed.set(Some(at));
            self.wake_driver();
        }
    }

    fn wake_driver(&self) {
        if let Some(driver) = &*self.driver.borrow() {
            driver.wake_by_ref();
        }
    }

    /// Wakes all that are due. No borrow is held while a waker runs.
    fn wake_due(&self, now: Instant) {
        loop {
            let due = self.deadlines.borrow_mut().pop_due(now);
            let Some(waker) = due else { return };
            waker.wake();
        }
    }

    /// A timer for `at` has fired.
    fn note_fired(&self, at: Instant, now: Instant) {
        let late = now.saturating_duration_since(at);
        if late >= STALL {
            let stats = self.stats.get();
            self.stats.set(CoreStats { stalls: stats.stalls + 1, stalled: stats.stalled + late, ..stats });
        }
    }

    /// Counts a beat that is due, and says when the next one is.
    fn beat(&self, now: Instant) -> Option<Instant> {
        let at = self.beat_at.get()?;
        if now < at {
            return Some(at);
        }
        if self.busy.get() > 0 || self.touched.replace(false) {
            self.quiet_beats.set(0);
        } else {
            self.quiet_beats.set(self.quiet_beats.get() + 1);
        }
        let next = (self.quiet_beats.get() < QUIET_BEATS).then(|| now + BEAT);
        self.beat_at.set(next);
        next
    }

    /// Says whether memory is to be given back now, and when the next time is. Call it after `beat`.
    fn give_back(&self, now: Instant) -> (bool, Option<Instant>) {
        let is_due = self.give_back_at.get().is_some_and(|at| at <= now);
        if is_due {
            self.give_back_at.set(None);
        }
        if self.beat_at.get().is_some() && self.give_back_at.get().is_none() {
            self.give_back_at.set(Some(now + GIVE_BACK_PERIOD));
        }
        (is_due, self.give_back_at.get())
    }
}

/// The driver task of a core.
#[derive(Default)]
struct Driver {
    /// The one glommio timer of the core, and when it fires.
    timer: Option<(Instant, glommio::timer::Timer)>,
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        CORE.with(|core| {
            if core.stopping.get() {
                self.timer = None;
                return Poll::Ready(());
            }
            if core.driver.borrow().is_none() {
                core.driver.replace(Some(context.waker().clone()));
            }
            if let Some((at, _)) = &self.timer {
                core.note_fired(*at, Instant::now());
            }
            loop {
                let now = Instant::now();
                core.wake_due(now);
                let deadline = core.deadlines.borrow().next();
                let beat = core.beat(now);
                let (gives_back, give_back) = core.give_back(now);
                if gives_back {
                    file::drop_spares();
                    allocator::give_back();
                }
                let next = [deadline, beat, give_back].into_iter().flatten().min();
                core.armed.set(next);
                let Some(at) = next else {
                    self.timer = None;
                    return Poll::Pending;
                };
                if self.timer.as_ref().is_some_and(|(armed, _)| *armed == at) {
                    return Poll::Pending; // Polling the same timer again would add an entry to glommio's wheel.
                }
                let mut timer = glommio::timer::Timer::new(at - now);
                let fired = Pin::new(&mut timer).poll(context).is_ready();
                self.timer = (!fired).then_some((at, timer));
                if !fired {
                    return Poll::Pending;
                }
            }
        })
    }
}

/// The thread that wakes every core now and then.
#[derive(Default)]
struct Nudger {
    state: Mutex<Nudged>,
    changed: Condvar,
}

#[derive(Default)]
struct Nudged {
    drivers: Vec<(u64, Waker)>,
    numbers: u64,
    young_until: Option<Instant>,
    started: bool,
}

static NUDGER: Nudger = Nudger {
    state: Mutex::new(Nudged { drivers: Vec::new(), numbers: 0, young_until: None, started: false }),
    changed: Condvar::new(),
};

fn nudger() -> &'static Nudger {
    &NUDGER
}

impl Nudger {
    fn register(&'static self, driver: Option<Waker>) -> u64 {
        let driver = driver.expect("the driver stored its waker in its first poll");
        let mut state = self.lock();
        state.numbers += 1;
        let number = state.numbers;
        state.drivers.push((number, driver));
        state.young_until = Some(Instant::now() + YOUNG);
        if !state.started {
            state.started = true;
            std::thread::Builder::new()
                .name("nudger".into())
                .spawn(|| self.nudge_for_ever())
                .expect("a thread for the nudger");
        }
        self.changed.notify_one();
        number
    }

    fn unregister(&self, number: u64) {
        let mut state = self.lock();
        let gone = state.drivers.iter().position(|(known, _)| *known == number).map(|at| state.drivers.remove(at));
        drop(state);
        drop(gone);
    }

    fn nudge_for_ever(&self) {
        let mut state = self.lock();
        let mut skipped = 0;
        loop {
            if state.drivers.is_empty() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let young = state.young_until.is_some_and(|until| Instant::now() < until);
            let pause = if young { NUDGE_YOUNG } else { NUDGE };
            state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
            skipped += 1;
            if !young && skipped < NUDGE_IDLE && !ACTIVE.swap(false, Ordering::Relaxed) {
                continue;
            }
            skipped = 0;
            state.drivers.iter().for_each(|(_, driver)| driver.wake_by_ref());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Nudged> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::rt::cores::block_on;
    use crate::rt::time;

    /// Goal: memory is given back once after work has ended, now and then while it lasts, and never on an idle core.
    /// Method: the core's state alone, at chosen times.
    #[test]
    fn memory_is_given_back_after_work() {
        let core = Core::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(core.give_back(start), (false, None));
        core.beat_at.set(Some(start));
        assert_eq!(core.give_back(start), (false, Some(at(10))));
        assert_eq!(core.give_back(at(9)), (false, Some(at(10))));
        assert_eq!(core.give_back(at(11)), (true, Some(at(21))));
        core.beat_at.set(None);
        assert_eq!(core.give_back(at(20)), (false, Some(at(21))));
        assert_eq!(core.give_back(at(21)), (true, None));
        assert_eq!(core.give_back(at(99)), (false, None));
    }

    /// Goal: an executor that parks with runnable tasks goes on all the same.
    /// Method: preempt timers so short that they have often fired before the run loop looks. Without the beat and the
    /// nudge about a third of these runs hang for ever; with the beat alone some do.
    #[test]
    fn wrong_parks_end() {
        for preempt_us in [40, 80].repeat(10) {
            let (done, finished) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let executor = glommio::LocalExecutorBuilder::new(glommio::Placement::Unbound)
                    .io_memory(64 << 10)
                    .preempt_timer(Duration::from_micros(preempt_us))
                    .make()
                    .expect("an executor");
                run(&executor, async {
                    for _ in 0..200 {
                        time::yield_once().await;
                        time::yield_to_reactor().await;
                    }
                });
                done.send(()).expect("the test waits");
            });
            finished.recv_timeout(Duration::from_secs(60)).expect("the executor sleeps through its work");
        }
    }

    /// Goal: whoever waits for the reactor need not wait for a round of all bulk work. Method: a thousand bulk tasks
    /// that burn 100 us a turn for ever; turns are counted, not time, until a timer of 5 ms has ended. In one queue they
    /// were a thousand at least, and more for the 100 ms until the reactor's turn.
    #[test]
    fn bulk_work_gives_way() {
        block_on(async {
            let (turns, is_over) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
            for _ in 0..1000 {
                let (turns, is_over) = (turns.clone(), is_over.clone());
                crate::rt::spawn_bulk(async move {
                    while !is_over.get() {
                        turns.set(turns.get() + 1);
                        let start = Instant::now();
                        while start.elapsed() < Duration::from_micros(100) {
                            std::hint::spin_loop();
                        }
                        time::yield_once().await;
                    }
                });
            }
            while turns.get() == 0 {
                time::yield_to_reactor().await;
            }
            let before = turns.get();
            time::sleep(Duration::from_millis(5)).await;
            is_over.set(true);
            assert!(turns.get() - before < 500, "{} turns of bulk work", turns.get() - before);
        });
    }
}
