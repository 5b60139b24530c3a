//! What /proc tells about the server: CPU time, memory, and its sockets by state, sampled by a thread of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A process's account of itself.
#[derive(Clone, Copy, Default)]
pub struct Process {
    /// User and system time of all its threads, kernel workers on its behalf included, in seconds.
    pub cpu_s: f64,
    /// Resident now and at most so far, in KiB.
    pub rss_kib: u64,
    pub rss_peak_kib: u64,
}

impl Process {
    /// Reads `/proc/<pid>/stat` and `/proc/<pid>/status`; `None` when there is no such process.
    pub fn read(pid: u32) -> Option<Self> {
        /// Clock ticks in a second (USER_HZ), a constant of the Linux ABI on every architecture of today.
        const TICKS_PER_S: f64 = 100.0;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The command name may hold spaces and brackets: fields are counted after its last bracket. utime and stime
        // are fields 14 and 15 (proc_pid_stat(5)), `state` after the bracket is field 3.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
        let ticks: f64 = fields.next()?.parse::<f64>().ok()? + fields.next()?.parse::<f64>().ok()?;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let kib = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        };
        Some(Self { cpu_s: ticks / TICKS_PER_S, rss_kib: kib("VmRSS:")?, rss_peak_kib: kib("VmHWM:")? })
    }
}

/// Sockets by state, as `ss` calls them: `ESTAB`, `CLOSE-WAIT`, ...
pub type Sockets = BTreeMap<&'static str, u64>;

/// Names of TCP states 1 to 12. Source: linux/include/net/tcp_states.h.
const STATES: [&str; 12] = [
    "ESTAB",
    "SYN-SENT",
    "SYN-RECV",
    "FIN-WAIT-1",
    "FIN-WAIT-2",
    "TIME-WAIT",
    "CLOSE",
    "CLOSE-WAIT",
    "LAST-ACK",
    "LISTEN",
    "CLOSING",
    "SYN-RECV",
];

/// One TCP socket of `/proc/<pid>/net/tcp`.
struct Row {
    port: u16,
    state: usize,
    inode: u64,
}

/// Takes a line `sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode ...` apart, numbers in hex
/// but for the inode. Source: linux/Documentation/networking/proc_net_tcp.rst.
fn row(line: &str) -> Option<Row> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let port = u16::from_str_radix(fields.next()?.rsplit_once(':')?.1, 16).ok()?;
    let state = usize::from_str_radix(fields.nth(1)?, 16).ok()?;
    Some(Row { port, state, inode: fields.nth(5)?.parse().ok()? })
}

/// The TCP sockets of the process's network name space, header lines left out.
fn rows(pid: u32) -> Vec<Row> {
    let tables =
        ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default());
    tables.iter().flat_map(|table| table.lines().filter_map(row)).collect()
}

/// The ports where the process listens.
fn listening_ports(pid: u32) -> BTreeSet<u16> {
    let own: BTreeSet<u64> = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let link = fs::read_link(entry.ok()?.path()).ok()?;
            link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
        })
        .collect();
    let is_own = |row: &Row| row.state == 10 && own.contains(&row.inode);
    rows(pid).iter().filter(|row| is_own(row)).map(|row| row.port).collect()
}

fn sockets(pid: u32, ports: &BTreeSet<u16>) -> Sockets {
    let mut counts = Sockets::new();
    for row in rows(pid).iter().filter(|row| ports.contains(&row.port)) {
        if let Some(name) = row.state.checked_sub(1).and_then(|index| STATES.get(index)) {
            *counts.entry(*name).or_default() += 1;
        }
    }
    counts
}

/// The process at one moment.
pub struct Sample {
    /// Seconds since the phase began.
    pub at_s: f64,
    pub process: Process,
    pub sockets: Sockets,
}

/// Takes a sample each second until it is stopped.
pub struct Sampler {
    stop: Sender<()>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Sampler {
    const PERIOD: Duration = Duration::from_secs(1);

    pub fn start(pid: u32) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let (start, ports) = (Instant::now(), listening_ports(pid));
            let mut samples = Vec::new();
            loop {
                let is_last = stopped.recv_timeout(Self::PERIOD) != Err(RecvTimeoutError::Timeout);
                // A server that has died is found out by the one who reads its account at the end.
                if let Some(process) = Process::read(pid) {
                    samples.push(Sample {
                        at_s: start.elapsed().as_secs_f64(),
                        process,
                        sockets: sockets(pid, &ports),
                    });
                }
                if is_last {
                    return samples;
                }
            }
        });
        Self { stop, thread }
    }

    /// All samples; the last is of now.
    pub fn finish(self) -> Vec<Sample> {
        drop(self.stop);
        self.thread.join().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// Goal: the account of a process is read. Method: our own, after some work.
    #[test]
    fn reads_this_process() {
        let mut x = 1u64;
        (0..20_000_000u64).for_each(|i| x = std::hint::black_box(x.wrapping_mul(i | 1)));
        let process = Process::read(std::process::id()).expect("/proc is mounted");
        assert!(process.cpu_s > 0.0 && process.rss_peak_kib >= process.rss_kib && process.rss_kib > 0);
        assert!(Process::read(u32::MAX).is_none());
    }

    /// Goal: the server's side of a connection is counted in its state, the client's side is not. Method: a listener of
    /// this process; its peer closes, which leaves the accepted socket in CLOSE-WAIT.
    #[test]
    fn sockets_are_counted_by_state() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let port = listener.local_addr().expect("bound").port();
        assert!(listening_ports(std::process::id()).contains(&port));
        let client = TcpStream::connect(("127.0.0.1", port)).expect("listens");
        let (accepted, _) = listener.accept().expect("connected");
        let count = || sockets(std::process::id(), &BTreeSet::from([port]));
        assert_eq!(count(), Sockets::from([("ESTAB", 1), ("LISTEN", 1)]));
        drop(client);
        assert_eq!(count(), Sockets::from([("CLOSE-WAIT", 1), ("LISTEN", 1)]));
        drop(accepted);
    }

    /// Goal: the kernel's table is read by its columns. Method: a line of it, the header, and rubbish.
    #[test]
    fn rows_are_parsed() {
        let line =
            "   3: 0100007F:2384 0100007F:D1F6 08 00000000:00000001 00:00000000 00000000  1000        0 81234 1 0";
        let parsed = row(line).expect("a row");
        assert_eq!((parsed.port, parsed.state, parsed.inode), (0x2384, 8, 81_234));
        assert!(row("  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid").is_none());
        assert!(row("").is_none());
    }
}
