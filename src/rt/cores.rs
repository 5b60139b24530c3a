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

/// Memory that this process may use, in bytes: the machine's, or the cgroup's limit when that is lower.
pub fn memory_available() -> u64 {
    // SAFETY: sysconf takes no pointers.
    let (pages, page) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let machine = u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(page).unwrap_or(0));
    let read = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    cgroup_dirs().iter().filter_map(|dir| read(&format!("{dir}/memory.max"))).fold(machine, u64::min)
}

/// The directories of this process's cgroup (version 2) and of all above it.
fn cgroup_dirs() -> Vec<String> {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let mut dirs = vec!["/sys/fs/cgroup".to_owned()];
    for part in path.split('/').filter(|part| !part.is_empty()) {
        let deeper = format!("{}/{part}", dirs.last().expect("never empty"));
        dirs.push(deeper);
    }
    dirs
}
