//! Failures of data files, made to order by tests.

use std::cell::RefCell;
use std::io;

/// What a data file is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
    Sync,
}

/// A failed device. Source: errno(3).
pub const EIO: i32 = libc::EIO;
/// A full one. Source: errno(3).
pub const ENOSPC: i32 = libc::ENOSPC;

type Plan = Box<dyn FnMut(Operation, u64) -> Option<i32>>;

thread_local! {
    static PLAN: RefCell<Option<Plan>> = const { RefCell::new(None) };
}

/// Ends the failures when dropped.
pub struct Faults(());

/// From now on each operation on this core asks `plan`, with its offset in the file (0 of a sync), and fails with the
/// error number that it is given.
pub fn plan(plan: impl FnMut(Operation, u64) -> Option<i32> + 'static) -> Faults {
    PLAN.set(Some(Box::new(plan)));
    Faults(())
}

/// The next `count` operations of this kind fail.
pub fn fail_next(operation: Operation, count: u32, errno: i32) -> Faults {
    let mut left = count;
    plan(move |asked, _| {
        let fails = asked == operation && left > 0;
        left -= u32::from(fails);
        fails.then_some(errno)
    })
}

impl Drop for Faults {
    fn drop(&mut self) {
        PLAN.set(None);
    }
}

/// What has been planned for this operation.
pub(super) fn strike(operation: Operation, offset: u64) -> io::Result<()> {
    let errno = PLAN.with_borrow_mut(|plan| plan.as_mut().and_then(|plan| plan(operation, offset)));
    errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
}
