//! What a Read of large blobs costs at least on this machine: `cargo bench --bench floor [directory]`.
//!
//! Method: a bare loop reads 1 MiB with O_DIRECT and sends it to one of 8 loopback connections in pieces of one length; no
//! HTTP/2, no checksum, no index. It runs on CPU 1, its readers in a process on CPU 0 (`taskset`), as in `bench/run`. CPU
//! time is that of the sending process.

use std::fs::OpenOptions;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use ringcas::pure::random::SplitMix64;

const BLOB_LEN: usize = 1 << 20;
const BLOBS: u64 = 500;
const SENT: u64 = 3000;
const CONNECTIONS: usize = 8;
const ROUNDS: usize = 5;
/// Source: open(2), `O_DIRECT` on x86-64 and on others that share its value.
const O_DIRECT: i32 = 0x4000;
const PIECES: [usize; 3] = [64 << 10, 256 << 10, 1 << 20];

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match &words[..] {
        [role, port] if role == "readers" => read_all(port.parse().expect("a port")),
        [role, file, piece] if role == "send" => send_all(Path::new(file), piece.parse().expect("a length")),
        _ => measure(words.first().map_or_else(std::env::temp_dir, PathBuf::from)),
    }
}

fn measure(directory: PathBuf) {
    let file = directory.join(format!("ringcas-floor-{}", std::process::id()));
    let mut random = SplitMix64(1);
    let blob: Vec<u8> = (0..BLOB_LEN / 8).flat_map(|_| random.word().to_le_bytes()).collect();
    let mut out = std::fs::File::create(&file).expect("a file in the directory");
    (0..BLOBS).for_each(|_| out.write_all(&blob).expect("room for 500 MiB"));
    out.sync_all().expect("synced");
    for piece in PIECES {
        let mut seconds: Vec<f64> =
            (0..ROUNDS).map(|_| pinned("1", &["send", &file.display().to_string(), &piece.to_string()])).collect();
        seconds.sort_by(f64::total_cmp);
        println!(
            "sends of {:>4} KiB: {:.3} s/GB (median of {ROUNDS}; {:.3} to {:.3})",
            piece >> 10,
            seconds[ROUNDS / 2],
            seconds[0],
            seconds[ROUNDS - 1]
        );
    }
    std::fs::remove_file(&file).expect("removed");
}

fn this_program() -> PathBuf {
    std::env::current_exe().expect("a program")
}

/// Runs this program on one CPU. What it prints is a number.
fn pinned(cpu: &str, words: &[&str]) -> f64 {
    let output = Command::new("taskset").args(["-c", cpu]).arg(this_program()).args(words).output().expect("taskset");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number")
}

fn send_all(file: &Path, piece: usize) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let mut readers = Command::new("taskset")
        .args(["-c", "0"])
        .arg(this_program())
        .args(["readers", &port.to_string()])
        .spawn()
        .expect("taskset");
    let mut peers: Vec<TcpStream> = (0..CONNECTIONS).map(|_| listener.accept().expect("a reader").0).collect();
    let file = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(file).expect("a file system with O_DIRECT");
    // As many buffers as there are reads in flight in `bench/run`.
    let mut buffers: Vec<Vec<u8>> = (0..32).map(|_| vec![1; BLOB_LEN + 4096]).collect();
    let mut random = SplitMix64(2);
    let begun = cpu_seconds();
    for number in 0..SENT as usize {
        let buffer = &mut buffers[number % 32];
        let start = buffer.as_ptr().align_offset(4096);
        let blob = &mut buffer[start..start + BLOB_LEN];
        file.read_exact_at(blob, random.below(BLOBS) * BLOB_LEN as u64).expect("read");
        blob.chunks(piece).for_each(|part| peers[number % CONNECTIONS].write_all(part).expect("sent"));
    }
    let spent = cpu_seconds() - begun;
    println!("{}", spent / (SENT as f64 * BLOB_LEN as f64 / 1e9));
    drop(peers);
    readers.wait().expect("the readers end");
}

fn read_all(port: u16) {
    let readers: Vec<_> = (0..CONNECTIONS)
        .map(|_| TcpStream::connect(("127.0.0.1", port)).expect("connected"))
        .map(|mut peer| {
            std::thread::spawn(move || {
                let mut buffer = vec![0; 256 << 10];
                while peer.read(&mut buffer).is_ok_and(|count| count > 0) {}
            })
        })
        .collect();
    readers.into_iter().for_each(|reader| reader.join().expect("no panic"));
}

/// User and system time of this process. Source: proc_pid_stat(5), in hundredths of a second.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("/proc");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    fields[11..13].iter().map(|ticks| ticks.parse::<f64>().expect("a number")).sum::<f64>() / 100.0
}
