//! Signals: the first one is a request, the second one an order.

use std::process::{Command, Stdio};
use std::time::Duration;

use ringcas::rt::cores::block_on;
use ringcas::rt::signal::{Shutdown, trigger_on_signals};
use ringcas::rt::time;

const CHILD: &str = "RINGCAS_TEST_SIGNAL_CHILD";

/// Goal: the first SIGTERM or SIGINT triggers the shutdown, and the second ends the process with 128 plus its number.
/// Method: this test runs itself again as a child, which raises the signals against itself.
#[test]
fn first_asks_second_ends() {
    if let Ok(number) = std::env::var(CHILD) {
        return child(number.parse().expect("a signal's number"));
    }
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let ended = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "first_asks_second_ends", "--nocapture"])
            .env(CHILD, signal.to_string())
            .stdin(Stdio::null())
            .output()
            .expect("the child runs");
        assert_eq!(ended.status.code(), Some(128 + signal), "{}", String::from_utf8_lossy(&ended.stderr));
        assert!(String::from_utf8_lossy(&ended.stdout).contains("told to stop"), "the first one triggered");
    }
}

fn child(signal: i32) {
    let shutdown = Shutdown::new();
    trigger_on_signals(&shutdown).expect("handlers");
    signal_hook::low_level::raise(signal).expect("raised");
    block_on(time::timeout(Duration::from_secs(20), shutdown.wait())).expect("triggered");
    println!("told to stop");
    signal_hook::low_level::raise(signal).expect("raised");
    unreachable!("the second one ends the process");
}

/// Goal: a shutdown reaches every waiter, before and after it, on any thread, and dropped waits are forgotten.
/// Method: waits on three executors of their own threads, one given up first; triggered from a thread without one.
#[test]
fn shutdown_reaches_all() {
    let shutdown = Shutdown::new();
    let (ready, all_ready) = std::sync::mpsc::channel();
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (shutdown, ready) = (shutdown.clone(), ready.clone());
            std::thread::spawn(move || {
                block_on(async move {
                    let _ = time::race(shutdown.wait(), time::yield_once()).await;
                    ready.send(()).expect("the test waits");
                    shutdown.wait().await;
                    shutdown.wait().await;
                });
            })
        })
        .collect();
    (0..3).for_each(|_| all_ready.recv().expect("ready"));
    assert!(!shutdown.is_triggered());
    shutdown.trigger();
    threads.into_iter().for_each(|thread| thread.join().expect("ends"));
    assert!(shutdown.is_triggered());
}
