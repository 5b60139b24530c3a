//! Bytes of a disk read that any core may hold, without a copy.
//!
//! The buffer of a read belongs to its core's reactor and is counted there without atomics, so only that core may free
//! it. What other cores have let go of waits for its next read, or for `take_back`.
//!
//! Why: two copies in user space were a quarter of the samples of 1 MiB reads; this is one of them.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use glommio::io::ReadResult;

/// `read` as bytes that may cross cores; all of its buffer lives as long as any of them.
pub(super) fn lend(read: ReadResult) -> Bytes {
    HOME.with(|home| {
        home.lent.set(home.lent.get() + 1);
        Bytes::from_owner(Loan { read: ManuallyDrop::new(read), shelf: home.shelf.clone() })
    })
}

/// Frees what other cores have let go of.
pub(super) fn take_back() {
    HOME.with(Home::take_back);
}

/// What one core has lent.
#[derive(Default)]
struct Home {
    shelf: Arc<Shelf>,
    /// Loans whose buffers have not been freed.
    lent: Cell<usize>,
}

/// Where loans wait that ended on other cores; `None` once their home is gone.
struct Shelf(Mutex<Option<Vec<Ended>>>);

thread_local! {
    static HOME: Home = Home::default();
}

struct Loan {
    read: ManuallyDrop<ReadResult>,
    shelf: Arc<Shelf>,
}

/// A read whose loan has ended. Not freed by a drop: that may be on any thread.
struct Ended(ManuallyDrop<ReadResult>);

// SAFETY: on another thread than its home, a loan only gives its bytes away, which are plain memory that nobody writes,
// and its drop moves the read to the shelf without looking into it. Its counts are touched at home alone (`Loan::drop`).
unsafe impl Send for Loan {}
// SAFETY: as above; a shared loan gives nothing but its bytes away.
unsafe impl Sync for Loan {}
// SAFETY: it can only be moved, until `Home::take_back` frees it on the thread that it came from.
unsafe impl Send for Ended {}

impl AsRef<[u8]> for Loan {
    fn as_ref(&self) -> &[u8] {
        &self.read
    }
}

impl Default for Shelf {
    fn default() -> Self {
        Self(Mutex::new(Some(Vec::new())))
    }
}

impl Shelf {
    fn put(&self, ended: Ended) {
        // A home that is gone leaks: nobody is left who may free it, and the process is ending.
        if let Some(waiting) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            waiting.push(ended);
        }
    }
}

impl Home {
    fn take_back(&self) {
        let ended = match &mut *self.shelf.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(waiting) => std::mem::take(waiting),
            None => return,
        };
        for Ended(read) in ended {
            self.lent.set(self.lent.get() - 1);
            drop(ManuallyDrop::into_inner(read));
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.take_back();
        *self.shelf.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        // SAFETY: `read` is not used again: this is the drop, and it is the only one to take it.
        let read = unsafe { ManuallyDrop::take(&mut self.read) };
        let mut ended = Some(Ended(ManuallyDrop::new(read)));
        // A thread that is ending has no home any more.
        let _ = HOME.try_with(|home| {
            if Arc::ptr_eq(&home.shelf, &self.shelf) {
                home.lent.set(home.lent.get() - 1);
                drop(ended.take().map(|Ended(read)| ManuallyDrop::into_inner(read)));
            }
        });
        if let Some(ended) = ended {
            self.shelf.put(ended);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::cores::block_on;
    use crate::rt::file::{DiskBuf, DiskFile, create_preallocated};

    fn lent() -> usize {
        HOME.with(|home| home.lent.get())
    }

    /// Goal: what was read stays readable on any thread, also after its file is closed, and its buffer is freed at home
    /// only: at once when it ends there, else with the next read. Method: loans that end here, on a thread that runs on,
    /// and on one that outlives the home.
    #[test]
    fn loans_end_at_home() {
        let directory = tempfile::tempdir_in(".").expect("a directory");
        let path = directory.path().join("data");
        create_preallocated(&path, 1 << 20).expect("a file");
        let (late, home) = std::sync::mpsc::channel::<Bytes>();
        let outlives = std::thread::spawn(move || home.recv().map(|bytes| bytes.iter().all(|&byte| byte == 7)));
        let lender = std::thread::spawn(move || {
            block_on(async move {
                let file = DiskFile::open(&path).await.expect("the file");
                let mut buf = DiskBuf::new(64 << 10);
                buf.bytes_mut().fill(7);
                file.write(0, buf, 64 << 10).await.expect("a write");
                let bytes = file.read(0, 64 << 10).await.expect("a read").share(1..4097);
                let part = bytes.slice(5..10);
                assert_eq!(lent(), 1);
                drop(bytes);
                assert_eq!((lent(), &part[..]), (1, &[7; 5][..]));
                drop(part);
                assert_eq!(lent(), 0);

                let bytes = file.read(0, 64 << 10).await.expect("a read").share(0..64 << 10);
                let sum = std::thread::spawn(move || bytes.iter().map(|&byte| u32::from(byte)).sum::<u32>());
                assert_eq!(sum.join().expect("a thread"), 7 << 16);
                assert_eq!(lent(), 1);
                let bytes = file.read(0, 64 << 10).await.expect("a read").share(0..100);
                assert_eq!(lent(), 1);
                late.send(bytes).expect("a thread waits");
            });
        });
        lender.join().expect("no panic");
        assert_eq!(outlives.join().expect("no panic"), Ok(true));
    }
}
