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
    let (sender, receiver) = channel::bounded(1);
    let mut receiver = Some(receiver);
    let cores = launch(&CorePlan::count(4).expect("a plan"), &shutdown, |core| {
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
        let cores = launch(&CorePlan::count(2).expect("a plan"), &shutdown, |core| {
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
