//! An answer that is made once for all who asked before it was begun.
//!
//! Why: who scrapes does so seldom, and who asks thousands of times at once must not keep a core busy with as many answers, nor
//! memory with as many copies.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use bytes::Bytes;

use crate::rt::local::Permits;

/// One kind of answer. Core-local; clones are the same one.
#[derive(Clone)]
pub struct Shared(Rc<State>);

struct State {
    turn: Permits,
    /// Answers that were begun.
    begun: Cell<u64>,
    /// The number of the last one that was made, and its text.
    last: RefCell<(u64, Bytes)>,
}

impl Default for Shared {
    fn default() -> Self {
        Self(Rc::new(State { turn: Permits::new(1), begun: Cell::new(0), last: RefCell::default() }))
    }
}

impl Shared {
    /// What `make` makes, or what somebody else's made that began later than this was asked.
    pub async fn get(&self, make: impl Future<Output = String>) -> Bytes {
        let State { turn, begun, last } = &*self.0;
        let asked = begun.get();
        let _turn = turn.take().await;
        if last.borrow().0 > asked {
            return last.borrow().1.clone();
        }
        begun.set(begun.get() + 1);
        let text = Bytes::from(make.await);
        last.replace((begun.get(), text.clone()));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt;
    use crate::rt::cores::block_on;
    use crate::rt::gate::Gate;

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
                    let make = async {
                        made.set(made.get() + 1);
                        let text = now.get().to_string();
                        for _ in 0..10 {
                            rt::time::yield_once().await;
                        }
                        text
                    };
                    shared.get(make).await
                }
            };
            for number in 0..100 {
                let (asked, now, ask) = (number / 10, now.clone(), ask(&shared));
                gate.spawn(async move {
                    for _ in 0..asked {
                        rt::time::yield_once().await;
                    }
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
