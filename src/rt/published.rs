//! A value that is replaced now and then, and that every core reads often.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The side that replaces the value. Clones are the same.
pub struct Published<T>(Arc<Shared<T>>);

struct Shared<T> {
    /// How often it was replaced.
    number: AtomicU64,
    value: Mutex<Arc<T>>,
}

impl<T> Clone for Published<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Published<T> {
    pub fn new(value: T) -> Self {
        Self(Arc::new(Shared { number: AtomicU64::new(0), value: Mutex::new(Arc::new(value)) }))
    }

    /// Replaces the value for all who read it from now on.
    pub fn publish(&self, value: T) {
        let before = {
            let mut place = self.0.value.lock().unwrap_or_else(PoisonError::into_inner);
            self.0.number.fetch_add(1, Ordering::Release);
            std::mem::replace(&mut *place, Arc::new(value))
        };
        drop(before);
    }

    /// A view for one core.
    pub fn reader(&self) -> Reader<T> {
        Reader { shared: self.0.clone(), seen: RefCell::new(self.0.now()) }
    }
}

impl<T> Shared<T> {
    fn now(&self) -> (u64, Arc<T>) {
        let place = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        (self.number.load(Ordering::Relaxed), place.clone())
    }
}

/// One core's view. To look costs one load of a word that hardly ever changes; the lock is taken after a change only, and
/// no count that cores share is touched.
pub struct Reader<T> {
    shared: Arc<Shared<T>>,
    seen: RefCell<(u64, Arc<T>)>,
}

impl<T> Reader<T> {
    /// Runs `work` with the value of now and its number, which is another one after each change.
    pub fn with<R>(&self, work: impl FnOnce(u64, &Arc<T>) -> R) -> R {
        if self.shared.number.load(Ordering::Acquire) != self.seen.borrow().0 {
            let now = self.shared.now();
            drop(self.seen.replace(now));
        }
        let seen = self.seen.borrow();
        work(seen.0, &seen.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: who reads sees the last value, never a torn or older one, and its number tells a change. Method: one thread
    /// replaces a thousand times while this one reads.
    #[test]
    fn readers_see_the_last_value() {
        let published = Published::new((0u64, 0u64));
        let reader = published.reader();
        let writer = published.clone();
        let thread = std::thread::spawn(move || (1..=1000).for_each(|n| writer.publish((n, n))));
        let mut last = 0;
        while last < 1000 {
            reader.with(|number, value| {
                assert!(value.0 == value.1 && value.0 >= last && number == value.0, "{number} {value:?} {last}");
                last = value.0;
            });
        }
        thread.join().expect("no panic");
    }
}
