//! Executors: one for each configured core, pinned where there are enough CPUs.

use std::future::Future;

/// The CPUs that this process may run on.
pub fn allowed_cpus() -> Vec<usize> {
    // SAFETY: `set` is a plain bit set that the call fills; the size is its own.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return vec![0];
        }
        (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect()
    }
}

/// Runs `future` on an executor of the calling thread: for tests and tools.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let executor = glommio::LocalExecutorBuilder::new(glommio::Placement::Unbound)
        .io_memory(64 << 10)
        .ring_depth(128)
        .make()
        .expect("an executor for this thread");
    executor.run(future)
}
