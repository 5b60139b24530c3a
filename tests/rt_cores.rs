//! Executors as a whole: start, shutdown, death, messages between them.

use std::time::{Duration, Instant};

use ringcas::rt::cores::{CoreDied, CorePlan, launch};
use ringcas::rt::signal::Shutdown;
use ringcas::rt::{channel, time};

/// Goal: every core starts, gets what was prepared for it, and `wait` returns once a shutdown has ended all.
/// Method: four cores each tell their number to core 0, which then triggers the shutdown.
#[test]
fn starts_and_stops() {
    let shutdown = Shutdown::new();
    // Room for all: core 0 sends before it receives.
    let (sender, receiver) = channel::bounded(4);
    let mut receiver = Some(receiver);
    let cores = launch(&CorePlan::count(4).expect("a plan"), 1 << 20, &shutdown, |core| {
        let (mut sender, shutdown) = (sender.clone(), shutdown.clone());
        let receiver = (core == 0).then(|| receiver.take()).flatten();
        move || async move {
            sender.send(core).await.expect("core 0 listens");
            drop(sender);
            if let Some(mut receiver) = receiver {
                let mut seen: Vec<usize> = Vec::new();
                while seen.len() < 4 {
                    seen.extend(receiver.recv().await);
                }
                seen.sort();
                assert_eq!(seen, [0, 1, 2, 3]);
                shutdown.trigger();
            }
            shutdown.wait().await;
        }
    })
    .expect("four cores");
    assert_eq!(cores.wait(), Ok(()));
}

/// Goal: the death of one core ends `wait` with its number, whether it panicked or just ended.
/// Method: core 1 of two goes; core 0 waits for a shutdown that nobody triggers.
#[test]
fn a_dead_core_ends_the_wait() {
    for panics in [true, false] {
        let shutdown = Shutdown::new();
        let cores = launch(&CorePlan::count(2).expect("a plan"), 1 << 20, &shutdown, |core| {
            let shutdown = shutdown.clone();
            move || async move {
                assert!(!(core == 1 && panics), "on purpose");
                if core == 0 {
                    shutdown.wait().await;
                }
            }
        })
        .expect("two cores");
        assert_eq!(cores.wait(), Err(CoreDied { core: 1, panicked: panics }));
        shutdown.trigger();
    }
}

/// Goal: sleeps end in order and not before their time, and a timeout cuts off what takes longer.
/// Method: real time, short distances.
#[test]
fn sleeps_and_timeouts() {
    ringcas::rt::cores::block_on(async {
        let start = Instant::now();
        time::sleep(Duration::from_millis(5)).await;
        assert!(start.elapsed() >= Duration::from_millis(5));
        assert!(time::timeout(Duration::from_millis(1), time::sleep(Duration::from_secs(600))).await.is_err());
        assert!(time::timeout(Duration::from_secs(600), time::yield_to_reactor()).await.is_ok());
    });
}

/// Goal: a pending sleep costs the same however often it is polled, and leaves nothing behind. glommio's own timer adds
/// an entry at each poll.
/// Method: poll one 200,000 times, and make and drop 100,000; the queue must show one and none.
#[test]
fn sleeps_do_not_pile_up() {
    ringcas::rt::cores::block_on(async {
        let waiting = || ringcas::rt::pulse::pulse_now().0;
        let mut long = std::pin::pin!(time::sleep(Duration::from_secs(3600)));
        for _ in 0..200_000 {
            let _ = time::race(long.as_mut(), std::future::ready(())).await;
        }
        assert_eq!(waiting(), 1);
        for _ in 0..100_000 {
            let _ = time::race(time::sleep(Duration::from_secs(60)), std::future::ready(())).await;
        }
        assert_eq!(waiting(), 1);
    });
}

/// Goal: the beat runs while work is in flight and stops by itself, so that an idle core sleeps.
/// Method: on a launched core, hold a guard for a while, drop it, and wait for the beat to end.
#[test]
fn the_beat_stops_when_idle() {
    let shutdown = Shutdown::new();
    let cores = launch(&CorePlan::count(1).expect("a plan"), 1 << 20, &shutdown, |_| {
        let shutdown = shutdown.clone();
        move || async move {
            let beats = || ringcas::rt::pulse::pulse_now().1;
            let quiet = || async {
                while beats() {
                    time::sleep(Duration::from_millis(5)).await;
                }
            };
            time::timeout(Duration::from_secs(20), quiet()).await.expect("the start-up's beat ends");
            let guard = ringcas::rt::busy();
            time::sleep(Duration::from_millis(100)).await;
            assert!(beats());
            drop(guard);
            time::timeout(Duration::from_secs(20), quiet()).await.expect("the beat ends");
            shutdown.trigger();
        }
    })
    .expect("one core");
    assert_eq!(cores.wait(), Ok(()));
}

/// Goal: a panicking handler costs its request only, and one on the blocking pool is an error and not a hang.
/// Method: both panic on purpose; the core goes on.
#[test]
fn panics_are_contained() {
    ringcas::rt::cores::block_on(async {
        let caught = ringcas::rt::catch(async {
            time::yield_once().await;
            panic!("on purpose")
        });
        assert_eq!(caught.await, Err::<(), _>(ringcas::rt::HandlerPanicked));
        assert!(ringcas::rt::blocking(|| panic!("on purpose")).await.is_err());
        assert_eq!(ringcas::rt::blocking(|| 7).await.ok(), Some(7));
        assert_eq!(ringcas::rt::catch(async { 7 }).await, Ok(7));
    });
}

/// Goal: no message and no wake is lost between cores, however few CPUs they share.
/// Method: 16 cores, each asks its neighbours 12,500 times with 64 requests in flight, 200,000 in all; each answer is
/// checked, and a hang would run into the time limit.
#[test]
fn two_hundred_thousand_round_trips() {
    const CORES: usize = 16;
    const TASKS: usize = 64;
    const EACH: usize = 12_500 / TASKS;
    type Request = (u64, channel::ReplyTo<u64>);
    let shutdown = Shutdown::new();
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..CORES).map(|_| channel::bounded::<Request>(256)).unzip();
    let mut receivers = receivers.into_iter();
    let (done, finished) = std::sync::mpsc::channel();
    let start = Instant::now();
    let cores = launch(&CorePlan::count(CORES).expect("a plan"), 1 << 20, &shutdown, |core| {
        let mut inbox = receivers.next().expect("one for each");
        let (senders, shutdown, done) = (senders.clone(), shutdown.clone(), done.clone());
        move || async move {
            ringcas::rt::spawn(async move {
                while let Some((question, reply)) = inbox.recv().await {
                    reply.send(question + 1);
                }
            });
            let gate = ringcas::rt::gate::Gate::default();
            for task in 0..TASKS {
                let mut sender = senders[(core + 1 + task) % CORES].clone();
                gate.spawn(async move {
                    for number in 0..EACH as u64 {
                        let (reply, answer) = channel::reply();
                        sender.send((number, reply)).await.expect("the core lives");
                        assert_eq!(answer.recv().await, Ok(number + 1));
                    }
                });
            }
            drop(senders);
            gate.wait_empty().await;
            done.send(core).expect("the test waits");
            shutdown.wait().await;
        }
    })
    .expect("sixteen cores");
    drop(senders);
    for _ in 0..CORES {
        finished.recv_timeout(Duration::from_secs(60)).expect("no core hangs");
    }
    println!("{:?} for each round trip", start.elapsed() / (CORES * TASKS * EACH) as u32);
    shutdown.trigger();
    assert_eq!(cores.wait(), Ok(()));
}

/// Goal: 16 executors start on few loaded CPUs, 50 times, with none stuck (see `rt::pulse`, whose own test provokes what
/// happens here by chance).
/// Method: threads that spin keep the CPUs busy; each start must answer a message from each core in time.
#[test]
fn fifty_starts_under_load() {
    const CORES: usize = 16;
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let spinners: Vec<_> = (0..2)
        .map(|_| {
            let stop = stop.clone();
            std::thread::spawn(move || {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        })
        .collect();
    let (done, finished) = std::sync::mpsc::channel();
    let starter = std::thread::spawn(move || {
        for number in 0..50 {
            let start = Instant::now();
            let shutdown = Shutdown::new();
            let (sender, mut receiver) = channel::bounded(1);
            let cores = launch(&CorePlan::count(CORES).expect("a plan"), 1 << 20, &shutdown, |core| {
                let (mut sender, shutdown) = (sender.clone(), shutdown.clone());
                move || async move {
                    time::yield_to_reactor().await;
                    sender.send(core).await.expect("somebody listens");
                    shutdown.wait().await;
                }
            })
            .expect("sixteen cores");
            ringcas::rt::cores::block_on(async {
                for _ in 0..CORES {
                    receiver.recv().await.expect("every core sends");
                }
            });
            shutdown.trigger();
            cores.wait().expect("no core dies");
            done.send((number, start.elapsed())).expect("the test waits");
        }
    });
    let mut slowest = Duration::ZERO;
    for _ in 0..50 {
        let (_, took) = finished.recv_timeout(Duration::from_secs(20)).expect("a start is stuck");
        slowest = slowest.max(took);
    }
    println!("slowest start: {slowest:?}");
    starter.join().expect("the starter ends");
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    spinners.into_iter().for_each(|spinner| spinner.join().expect("a spinner ends"));
}
