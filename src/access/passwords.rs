//! Passwords against their hashes: slow by design, so aside of the cores, each one once, and few at a time.
//!
//! What was found is remembered under a fingerprint, here by core and there by process: a keyed hash of user, password and
//! the number of the files' reading, so that a change of the files forgets all.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use sha2::{Digest as _, Sha256};

use super::{Denial, Role, Rules};
use crate::limits;
use crate::metrics::Counter;
use crate::pure::htpasswd::PasswordHash;
use crate::pure::secret::Secret;
use crate::pure::verified::{Fingerprint, Verified};
use crate::rt;
use crate::rt::aside::{Aside, Busy};
use crate::rt::local::{Event, Local};
use crate::rt::time;

/// The process' part. Clones are the same.
#[derive(Clone)]
pub struct Passwords {
    aside: Aside,
    known: Arc<Mutex<Known>>,
    /// What fingerprints are keyed with. Why: who finds one in memory cannot try passwords against it.
    key: [u8; 32],
    started: Instant,
}

/// What was found. Why apart: guesses must not drive out what is right.
struct Known {
    right: Verified<()>,
    wrong: Verified<()>,
}

impl Known {
    fn new() -> Self {
        let [right, wrong] = [(); 2].map(|()| Verified::new(limits::PASSWORDS_KNOWN_MAX, limits::PASSWORD_KEEP_MS));
        Self { right, wrong }
    }

    fn get(&mut self, of: &Fingerprint, now_ms: u64) -> Option<bool> {
        if self.right.get(of, now_ms).is_some() {
            return Some(true);
        }
        self.wrong.get(of, now_ms).map(|()| false)
    }

    fn put(&mut self, of: Fingerprint, is_right: bool, now_ms: u64) {
        let of_kind = if is_right { &mut self.right } else { &mut self.wrong };
        of_kind.put(of, (), now_ms);
    }
}

impl Passwords {
    /// Starts the threads that compare: one for each four cores.
    pub fn start(cores: usize) -> io::Result<Self> {
        let threads = cores.div_ceil(4).min(limits::PASSWORD_THREADS_MAX);
        let words: Vec<u8> = (0..4).flat_map(|_| rt::random_u64().to_le_bytes()).collect();
        Ok(Self {
            aside: Aside::start("passwords", threads, limits::PASSWORDS_WAITING_MAX)?,
            known: Arc::new(Mutex::new(Known::new())),
            key: words.try_into().expect("four words are 32 bytes"),
            started: time::now(),
        })
    }

    /// One core's part.
    pub(super) fn on_core(&self) -> OnCore {
        OnCore(Rc::new(Core {
            process: self.clone(),
            known: RefCell::new(Known::new()),
            flights: Local::new(HashMap::new()),
            compared: Counter::default(),
        }))
    }

    /// Blocks.
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fingerprint(&self, reading: u64, user: &str, password: &str) -> Fingerprint {
        let mut hash = Sha256::new();
        for part in [&self.key[..], &reading.to_le_bytes(), &(user.len() as u64).to_le_bytes()] {
            hash.update(part);
        }
        hash.update(user);
        hash.update(password);
        hash.finalize().into()
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// One core's part. Clones are the same.
#[derive(Clone)]
pub(super) struct OnCore(Rc<Core>);

struct Core {
    process: Passwords,
    known: RefCell<Known>,
    /// Comparisons that run for this core: who asks for the same joins.
    flights: Local<HashMap<Fingerprint, Rc<Flight>>>,
    compared: Counter,
}

#[derive(Default)]
struct Flight {
    found: RefCell<Option<Result<bool, Busy>>>,
    landed: Event,
}

pub(super) enum Found {
    Known(Result<Role, Denial>),
    Waits(Comparison),
}

/// A wait for the comparison of a password.
pub(super) type Comparison = Pin<Box<dyn Future<Output = Result<Role, Denial>>>>;

impl OnCore {
    /// Comparisons that this core has asked for.
    pub(super) fn compared(&self) -> u64 {
        self.0.compared.get()
    }

    /// The role of `user`, if `rules` say that the password is theirs, which are of the given reading.
    pub(super) fn compare(&self, reading: u64, rules: &Rules, user: &str, password: Secret) -> Found {
        let process = &self.0.process;
        let fingerprint = process.fingerprint(reading, user, password.reveal());
        let role = rules.roles.of_user(user);
        let outcome = move |is_right: bool| if is_right { Ok(role) } else { Err(Denial::WrongPassword) };
        if let Some(is_right) = self.0.known.borrow_mut().get(&fingerprint, process.now_ms()) {
            return Found::Known(outcome(is_right));
        }
        let hash = rules.htpasswd.get(user);
        // Why one of another user: so that the time does not tell which users there are.
        let Some(against) = hash.or_else(|| rules.htpasswd.any()) else {
            return Found::Known(Err(Denial::WrongPassword));
        };
        let flight = self.join(fingerprint, against, hash.is_some(), password);
        Found::Waits(Box::pin(async move {
            loop {
                let landed = flight.landed.wait();
                if let Some(found) = *flight.found.borrow() {
                    return found.map_err(|Busy| Denial::Busy).and_then(outcome);
                }
                landed.await;
            }
        }))
    }

    /// The comparison that runs, or a new one.
    fn join(&self, of: Fingerprint, against: &PasswordHash, is_user: bool, password: Secret) -> Rc<Flight> {
        if let Some(flight) = self.0.flights.with(|flights| flights.get(&of).cloned()) {
            return flight;
        }
        let flight = Rc::new(Flight::default());
        self.0.flights.with(|flights| flights.insert(of, flight.clone()));
        self.0.compared.count();
        let (core, lands, against) = (self.0.clone(), flight.clone(), against.clone());
        rt::spawn(async move {
            let process = core.process.clone();
            let work = move || {
                if let Some(is_right) = process.lock().get(&of, process.now_ms()) {
                    return is_right;
                }
                // Not shortened for who is no user.
                let is_right = against.is_of(password.reveal()) & is_user;
                process.lock().put(of, is_right, process.now_ms());
                is_right
            };
            let found = core.process.aside.run(limits::PASSWORD_WAIT, work).await;
            if let Ok(is_right) = found {
                core.known.borrow_mut().put(of, is_right, core.process.now_ms());
            }
            core.flights.with(|flights| flights.remove(&of));
            lands.found.replace(Some(found));
            lands.landed.notify();
        });
        flight
    }
}
