//! An answer that is made once for all who asked before it was begun.
//!
//! Why: who scrapes does so seldom, and who asks thousands of times at once must not keep a core busy with as many answers, nor
//! memory with as many copies.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use bytes::Bytes;

use crate::rt;
use crate::rt::local::Event;

/// One kind of answer. Core-local; clones are the same one.
#[derive(Clone, Default)]
pub struct Shared(Rc<State>);

#[derive(Default)]
struct State {
    /// Answers that were begun, and whether the last of them is being made.
    begun: Cell<u64>,
    is_making: Cell<bool>,
    /// The number of the last one that was made, and its text; `None` when that ended with a panic.
    last: RefCell<(u64, Option<Bytes>)>,
    made: Event,
}

impl Shared {
    /// What `make` makes, or what somebody else's made that began later than this was asked: so it waits for two of them at most.
    /// `None` when that ended with a panic.
    pub async fn get<F>(&self, make: impl Fn() -> F) -> Option<Bytes>
    where
        F: Future<Output = String> + 'static,
    {
        let State { begun, is_making, last, made } = &*self.0;
        let asked = begun.get();
        loop {
            let next = made.wait();
            if last.borrow().0 > asked {
                return last.borrow().1.clone();
            }
            if !is_making.get() {
                self.begin(make());
            }
            next.await;
        }
    }

    /// Why in a task of its own: whoever asked for it may go away, and others would wait for one more.
    fn begin(&self, make: impl Future<Output = String> + 'static) {
        self.0.begun.set(self.0.begun.get() + 1);
        self.0.is_making.set(true);
        let shared = self.clone();
        rt::spawn(async move {
            let _busy = rt::busy();
            let text = rt::catch(make).await.ok().map(Bytes::from);
            let State { begun, is_making, last, made } = &*shared.0;
            last.replace((begun.get(), text));
            is_making.set(false);
            made.notify();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::cores::block_on;
    use crate::rt::gate::Gate;

    async fn turns(count: u32) {
        for _ in 0..count {
            rt::time::yield_once().await;
        }
    }

    /// Goal: who asks waits for two answers at most, whoever asked before and goes away; a panic costs who waited for it alone.
    /// Method: ten who ask and leave shortly before an answer of 20 turns would be made, and one who asks after them, in a task that
    /// counts its turns; then an answer that panics.
    #[test]
    fn waits_for_two_at_most() {
        block_on(async {
            let (shared, gate, waited) = (Shared::default(), Gate::default(), Rc::new(Cell::new(0)));
            let make = || async {
                turns(20).await;
                String::new()
            };
            for number in 1..=10 {
                let shared = shared.clone();
                gate.spawn(async move {
                    let _ = rt::time::race(shared.get(make), turns(18 * number)).await;
                });
            }
            let (asks, counted) = (shared.clone(), waited.clone());
            gate.spawn(async move {
                turns(3).await;
                let counting = async {
                    loop {
                        rt::time::yield_once().await;
                        counted.set(counted.get() + 1);
                    }
                };
                let answered = rt::time::race(asks.get(make), counting).await;
                assert!(matches!(answered, rt::time::Either::Left(Some(_))));
            });
            gate.wait_empty().await;
            assert!((20..60).contains(&waited.get()), "{} turns", waited.get());
            assert_eq!(shared.get(|| async { panic!("on purpose") }).await, None);
            assert!(shared.get(make).await.is_some());
        });
    }

    /// Goal: many who ask at once share few answers, each of which was begun after it was asked for, and one who goes away
    /// while he makes it leaves the next one to others. Method: 100 tasks that ask while an answer is being made, of which some
    /// give up; answers say when they were begun.
    #[test]
    fn is_made_for_all_who_wait() {
        block_on(async {
            let (shared, made, gate) = (Shared::default(), Rc::new(Cell::new(0u32)), Gate::default());
            let now = Rc::new(Cell::new(0u32));
            let ask = |shared: &Shared| {
                let (shared, made, now) = (shared.clone(), made.clone(), now.clone());
                async move {
                    let make = || {
                        let (made, now) = (made.clone(), now.clone());
                        async move {
                            made.set(made.get() + 1);
                            let text = now.get().to_string();
                            turns(10).await;
                            text
                        }
                    };
                    shared.get(make).await.expect("made")
                }
            };
            for number in 0..100 {
                let (asked, now, ask) = (number / 10, now.clone(), ask(&shared));
                gate.spawn(async move {
                    turns(asked).await;
                    now.set(now.get().max(asked));
                    if number % 7 == 0 {
                        let _ = rt::time::race(ask, rt::time::yield_once()).await;
                        return;
                    }
                    let text = ask.await;
                    let begun: u32 = std::str::from_utf8(&text).expect("a number").parse().expect("a number");
                    assert!(begun >= asked, "begun at {begun}, asked for at {asked}");
                });
            }
            gate.wait_empty().await;
            assert!((2..15).contains(&made.get()), "{} were made", made.get());
        });
    }
}
