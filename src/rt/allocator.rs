//! The allocator of the process, and when memory goes back to the system.
//!
//! Freed memory is kept for a while, so that big buffers (disk reads, uploads) are not paid for in page faults again and
//! again, and goes back when it has not been used since: what a flood took must not stay resident. The allocator itself
//! does so only while it is called, and an idle core does not call; so each core's driver does (`pulse`).

use libmimalloc_sys::{mi_collect, mi_option_set, mi_option_t};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How long freed memory is kept, in milliseconds: ten times as long where whole segments of it are free. Why not the
/// default of 10 ms: with that, 1 MiB reads cost 1.2 to 1.9 s/GB of CPU, and 0.9 to 1.1 with this.
const KEEP_MS: i64 = 1000;
/// Source: mimalloc.h, `enum mi_option_e`, the same in all versions 2 and 3.
const OPTION_PURGE_DELAY: mi_option_t = 15;

/// Call it before there are cores.
pub(super) fn set_up() {
    // SAFETY: sets a number in a table of the allocator's, which checks the index.
    unsafe { mi_option_set(OPTION_PURGE_DELAY, KEEP_MS) };
}

/// Gives all memory back to the system that this thread has freed. Costs the page faults when it is used again.
pub(super) fn give_back() {
    // SAFETY: works on this thread's heap, and what it shares with others is synchronized.
    unsafe { mi_collect(true) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of this process that are resident. Source: proc(5), /proc/pid/statm, the second field, in pages.
    fn resident() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("there is a /proc");
        let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number of pages");
        pages * 4096
    }

    /// Goal: what a flood took is not resident any more. Method: blocks of sizes that the server uses, all of them
    /// touched and freed; resident memory before and after. Other tests run meanwhile, and take far less.
    #[test]
    fn memory_goes_back() {
        for len in [4 << 10, 64 << 10, 256 << 10, 1 << 20] {
            const FLOOD: usize = 256 << 20;
            let flood: Vec<Vec<u8>> = (0..FLOOD / len).map(|_| vec![1; len]).collect();
            let with = resident();
            drop(flood);
            give_back();
            let after = resident();
            assert!(after + FLOOD / 2 < with, "blocks of {len} bytes: {with} bytes resident, {after} after");
        }
    }
}
