//! How long a start takes until everything is known again: `cargo bench --bench recovery [entries] [directory]`.
//!
//! Method: one process fills a cache with small records and ends cleanly, or by `abort()` a second after the last write; a
//! fresh one opens it and waits for all shards. One thread does the work of all cores, so that CPU time is what the whole box spends; N cores share it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use ringcas::pure::digest::Hash;
use ringcas::pure::shard_map::{CoreId, ShardMap};
use ringcas::rt::cores::block_on;
use ringcas::shard::disk::{Ack, Codec, Disk, DiskConfig, Key, Kind};
use ringcas::shard::geometry::{self, Volume};
use ringcas::shard::pool;

const ENTRIES: u64 = 10_000_000;
const PAYLOAD: &[u8] = b"16 bytes of data";
/// Bytes that a record of `PAYLOAD` takes with its line of a footer, and room for what is not full.
const RECORD_LEN: u64 = 128 + 16 + 16;
const CORES: usize = 4;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["fill", dir, entries, end] => fill(Path::new(dir), entries.parse().expect("a number"), end == "clean"),
        ["open", dir, entries] => open(Path::new(dir), entries.parse().expect("a number")),
        _ => {
            let entries = words.first().map_or(ENTRIES, |text| text.parse().expect("a number of entries"));
            let parent = words.get(1).map_or_else(std::env::temp_dir, PathBuf::from);
            for end in ["clean", "killed"] {
                let dir = parent.join(format!("ringcas-recovery-{}", std::process::id()));
                let (path, entries) = (dir.to_str().expect("a path in UTF-8"), entries.to_string());
                println!("{entries} entries, {end}:");
                run(&["fill", path, &entries, end], end == "clean");
                run(&["open", path, &entries], true);
                std::fs::remove_dir_all(&dir).expect("the directory can be removed");
            }
        }
    }
}

fn run(arguments: &[&str], to_succeed: bool) {
    let this = std::env::current_exe().expect("the path of this program");
    let status = Command::new(this).args(arguments).status().expect("started");
    assert_eq!(status.success(), to_succeed, "{arguments:?}: {status}");
}

fn volume(dir: &Path, entries: u64) -> Volume {
    let max_size_bytes = (entries * RECORD_LEN * 5 / 4).max(1 << 30);
    geometry::open(&DiskConfig { dir: dir.into(), max_size_bytes, ack: Ack::Buffered }).expect("the directory opens")
}

/// Opens all cores' shares and waits for their shards.
async fn disks(volume: &Volume) -> (Vec<Disk>, ShardMap) {
    let map = ShardMap::new(volume.shards(), CORES as u16);
    let (main, ports) = pool::wire(volume, CORES);
    ringcas::rt::spawn(main.run());
    let mut disks = Vec::new();
    for (core, port) in ports.into_iter().enumerate() {
        disks.push(Disk::open(volume.clone(), core, CORES, port).await.expect("the disk opens"));
    }
    for shard in 0..u64::from(map.shards()) {
        let mut hash = Hash([0; 32]);
        hash.0[..8].copy_from_slice(&(((shard << 32) / u64::from(map.shards())) << 32).to_be_bytes());
        disks[usize::from(map.core_of_hash(&hash).0)].ready(&hash).await;
    }
    (disks, map)
}

/// As random as a SHA-256 value.
fn key(number: u64) -> Key {
    let mut hash = Hash([0; 32]);
    for (word, lane) in hash.0.chunks_exact_mut(8).zip(0u64..) {
        let mut mixed = (number << 2 | lane).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word.copy_from_slice(&(mixed ^ mixed >> 31).to_le_bytes());
    }
    Key { kind: Kind::Cas, hash, size: PAYLOAD.len() as u64 }
}

fn fill(dir: &Path, entries: u64, clean: bool) {
    let begun = Instant::now();
    block_on(async move {
        let (disks, map) = disks(&volume(dir, entries)).await;
        for number in 0..entries {
            let key = key(number);
            let CoreId(core) = map.core_of_hash(&key.hash);
            let disk = &disks[usize::from(core)];
            disk.append(&key, Codec::Raw, key.size, &[PAYLOAD]).await.expect("stored");
        }
        println!("  filled in {:.1} s", begun.elapsed().as_secs_f64());
        if !clean {
            // What is in the write buffers goes to the drive within this time.
            ringcas::rt::time::sleep(std::time::Duration::from_secs(1)).await;
            std::process::abort();
        }
        for disk in &disks {
            disk.shutdown().await;
        }
    });
}

fn open(dir: &Path, entries: u64) {
    let begun = Instant::now();
    let volume = volume(dir, entries);
    let headers = begun.elapsed();
    block_on(async move {
        let (disks, _) = disks(&volume).await;
        let (wall, cpu) = (begun.elapsed(), cpu_seconds());
        let (mut found, mut bytes) = (0, 0);
        for disk in &disks {
            let stats = disk.stats();
            found += stats.entries;
            bytes += stats.index_bytes;
        }
        println!(
            "  headers read after {:.3} s, all known after {:.3} s, {cpu:.2} s of CPU; {found} entries, {:.1} bytes of index each",
            headers.as_secs_f64(),
            wall.as_secs_f64(),
            bytes as f64 / found as f64,
        );
        assert!(found * 1000 >= entries * 999, "{found} of {entries}");
    });
}

/// Of this process, all threads; user and system, in steps of 10 ms.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
