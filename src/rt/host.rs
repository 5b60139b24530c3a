//! What the host allows: CPUs, io_uring, locked memory, descriptors. Asked before any executor starts, because
//! glommio's own failures are a panic, an `exit`, or an error that only a join shows.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::Duration;

/// The least registered memory of an executor that glommio takes, in bytes.
const IO_MEMORY_MIN: usize = 64 << 10;
/// Each executor registers its memory with three rings, and the kernel counts each.
const RINGS: u64 = 3;
/// Locked memory for everything else, in bytes.
const LOCKED_SPARE: u64 = 1 << 20;

/// What the host does not allow, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("this kernel has no io_uring: Linux 5.15 or later with CONFIG_IO_URING is needed")]
    NoUring,
    #[error(
        "io_uring is forbidden here (kernel.io_uring_disabled is {sysctl}): set `sysctl kernel.io_uring_disabled=0`, \
         and let the container's seccomp profile allow io_uring_setup, io_uring_enter and io_uring_register \
         (docker: --security-opt seccomp=<profile>)"
    )]
    UringForbidden { sysctl: String },
    #[error("io_uring_setup failed: {0}")]
    Uring(io::Error),
    #[error(
        "{cores} cores need {needed_kib} KiB of locked memory, but RLIMIT_MEMLOCK is {limit_kib} KiB: raise it \
         (systemd: LimitMEMLOCK=64M; shell: `ulimit -l 65536`; docker: --ulimit memlock=67108864)"
    )]
    LockedMemory { cores: usize, needed_kib: u64, limit_kib: u64 },
    #[error("cannot read the resource limits: {0}")]
    Limits(io::Error),
}

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

/// How far local time (TZ, else the machine's) is from UTC at so many seconds since 1970, in seconds.
pub fn utc_offset_s(unix_s: u64) -> i32 {
    let at = libc::time_t::try_from(unix_s).unwrap_or(libc::time_t::MAX);
    let mut local = std::mem::MaybeUninit::<libc::tm>::uninit();
    // SAFETY: both pointers are to values that outlive the call, which fills `local` unless it returns null.
    let local = unsafe {
        if libc::localtime_r(&at, local.as_mut_ptr()).is_null() {
            return 0;
        }
        local.assume_init()
    };
    i32::try_from(local.tm_gmtoff).unwrap_or_default()
}

/// Makes sure that io_uring can be used.
pub fn probe_uring() -> Result<(), HostError> {
    // `struct io_uring_params` is 120 bytes; all zero asks for a plain ring.
    let mut params = [0u64; 15];
    // SAFETY: the kernel writes at most the 120 bytes of `params`, which outlives the call.
    let got = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4 as libc::c_uint, params.as_mut_ptr()) };
    if got >= 0 {
        // SAFETY: the call returned a new descriptor that nobody else owns.
        drop(unsafe { OwnedFd::from_raw_fd(got as i32) });
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(match error.raw_os_error() {
        Some(libc::ENOSYS) => HostError::NoUring,
        Some(libc::EPERM | libc::EACCES) => {
            let sysctl = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
            HostError::UringForbidden { sysctl: sysctl.map_or("unknown".into(), |text| text.trim().to_owned()) }
        }
        _ => HostError::Uring(error),
    })
}

/// Raises the limit on locked memory as far as allowed, and chooses the registered memory of each of `cores` executors,
/// in bytes: a power of two, `wanted` at most, and as much of it as may be locked.
pub fn choose_io_memory(cores: usize, wanted: usize) -> Result<usize, HostError> {
    let most = wanted.max(IO_MEMORY_MIN);
    let limit = raise(libc::RLIMIT_MEMLOCK, locked_memory_for(cores, most)).map_err(HostError::Limits)?;
    let most = 1 << most.ilog2();
    let within = io_memory_within(limit, cores, most)?;
    Ok(if may_lock_all() { most } else { within })
}

/// True when the kernel does not count what this process locks. Where that is not so after all, in a user namespace,
/// registering fails, and glommio does without.
/// Source: capabilities(7), CAP_IPC_LOCK, number 14; proc_pid_status(5), `CapEff` in hexadecimal.
fn may_lock_all() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok());
    effective.is_some_and(|bits| bits >> 14 & 1 == 1)
}

fn io_memory_within(limit: u64, cores: usize, most: usize) -> Result<usize, HostError> {
    let mut sizes =
        std::iter::successors(Some(most), |&io_memory| Some(io_memory / 2).filter(|&half| half >= IO_MEMORY_MIN));
    sizes.find(|&io_memory| locked_memory_for(cores, io_memory) <= limit).ok_or(HostError::LockedMemory {
        cores,
        needed_kib: locked_memory_for(cores, IO_MEMORY_MIN) >> 10,
        limit_kib: limit >> 10,
    })
}

fn locked_memory_for(cores: usize, io_memory: usize) -> u64 {
    RINGS * io_memory as u64 * cores as u64 + LOCKED_SPARE
}

/// Raises the limit on open descriptors to what the hard limit allows, and returns it.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    raise(libc::RLIMIT_NOFILE, 0)
}

/// Raises a soft limit to its hard one, and tries to raise both to `wanted` when that is more. Returns the soft limit.
fn raise(resource: libc::__rlimit_resource_t, wanted: u64) -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call fills `limit`, which outlives it.
    if unsafe { libc::getrlimit(resource, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    for max in [limit.rlim_max.max(wanted), limit.rlim_max] {
        let raised = libc::rlimit { rlim_cur: max, rlim_max: max };
        // SAFETY: the call reads `raised`, which outlives it.
        if unsafe { libc::setrlimit(resource, &raised) } == 0 {
            return Ok(max);
        }
    }
    Ok(limit.rlim_cur)
}

/// CPU time of the calling thread, in user and kernel mode.
pub fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills `time`, which outlives it.
    let got = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    if got == 0 { Duration::new(time.tv_sec as u64, time.tv_nsec as u32) } else { Duration::ZERO }
}

/// What the kernel says of this process.
#[derive(Debug, Clone, Default)]
pub struct ProcessStats {
    /// CPU time, of all threads, in user and kernel mode.
    pub cpu: Duration,
    pub resident_bytes: u64,
    pub virtual_bytes: u64,
    pub open_fds: u64,
    pub max_fds: u64,
}

/// Asks the kernel. Blocks: a count of some ten thousand descriptors takes milliseconds.
pub fn process_stats() -> io::Result<ProcessStats> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the call fills `usage`, which outlives it.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so all of it is initialized.
    let usage = unsafe { usage.assume_init() };
    let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: as above.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Source: proc(5), /proc/pid/statm: pages in all, pages resident, and more.
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let mut pages = statm.split(' ').map(|field| field.trim().parse::<u64>().unwrap_or(0));
    // SAFETY: sysconf takes no pointers.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let mut next = || pages.next().unwrap_or(0) * page;
    Ok(ProcessStats {
        cpu: time(usage.ru_utime) + time(usage.ru_stime),
        virtual_bytes: next(),
        resident_bytes: next(),
        // The directory's own descriptor is one of them.
        open_fds: (std::fs::read_dir("/proc/self/fd")?.count() as u64).saturating_sub(1),
        max_fds: limit.rlim_cur,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: registered memory follows the limit on locked memory, and a refusal names need, limit and remedy.
    /// Method: the pure part of the choice, at chosen limits.
    #[test]
    fn io_memory_follows_the_limit() {
        assert_eq!(io_memory_within(u64::MAX, 16, 8 << 20).ok(), Some(8 << 20));
        assert_eq!(io_memory_within(49 << 20, 16, 8 << 20).ok(), Some(1 << 20));
        assert_eq!(io_memory_within(8 << 20, 16, 8 << 20).ok(), Some(128 << 10));
        assert_eq!(io_memory_within(4 << 20, 16, 8 << 20).ok(), Some(IO_MEMORY_MIN));
        let text = io_memory_within(2 << 20, 16, 8 << 20).expect_err("too little").to_string();
        assert!(text.contains("16 cores need 4096 KiB") && text.contains("2048 KiB"), "{text}");
        assert!(text.contains("LimitMEMLOCK") && text.contains("ulimit -l"), "{text}");
    }

    /// Goal: the probes pass on a host where the tests themselves run.
    /// Method: call them; the descriptor limit must end up at the hard limit.
    #[test]
    fn probes_pass_here() {
        probe_uring().expect("io_uring works");
        assert!(choose_io_memory(1, 3 << 20).is_ok_and(|chosen| chosen.is_power_of_two() && chosen <= 2 << 20));
        assert!(raise_descriptor_limit().is_ok_and(|limit| limit >= 1024));
        assert!(!allowed_cpus().is_empty());
    }

    /// Goal: the figures of this process are of a size that it can have. Method: hold memory, descriptors and the CPU, and
    /// ask.
    #[test]
    fn process_stats_are_plausible() {
        let files: Vec<_> = (0..50).map(|_| std::fs::File::open("/proc/self/statm").expect("there is one")).collect();
        let held = vec![1u8; 8 << 20];
        let stats = process_stats().expect("the kernel tells");
        assert!(stats.open_fds >= 50 && stats.open_fds < stats.max_fds, "{stats:?}");
        assert!(stats.resident_bytes > held.len() as u64 && stats.resident_bytes <= stats.virtual_bytes, "{stats:?}");
        assert!(stats.cpu > Duration::ZERO, "{stats:?}");
        drop(files);
    }
}
