//! Data files: what is read is what was written, whatever happens in between.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringcas::limits::DISK_ALIGN;
use ringcas::rt::cores::block_on;
use ringcas::rt::file::{DiskBuf, DiskFile, create_preallocated, grow_preallocated};
use ringcas::rt::local::Local;
use ringcas::rt::{spawn, time};

/// A directory on a file system with direct I/O; /tmp may have none.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a scratch directory")
}

fn data_file(directory: &Path, len: u64) -> PathBuf {
    let path = directory.join("data");
    create_preallocated(&path, len).expect("a data file");
    path
}

fn filled(len: usize, byte: u8) -> DiskBuf {
    let mut buf = DiskBuf::new(len);
    buf.bytes_mut().fill(byte);
    buf
}

/// Goal: blocks come back as they were written, also from the shorter front of a buffer, and a buffer returned by a
/// write has its full length.
/// Method: a whole and a partial write, read back on a second open file.
#[test]
fn what_was_written_is_read() {
    let scratch = scratch();
    let path = data_file(scratch.path(), 1 << 20);
    block_on(async {
        let file = DiskFile::open(&path).await.expect("opens");
        let buf = file.write(0, filled(64 << 10, 1), 64 << 10).await.expect("writes");
        assert_eq!(buf.bytes().len(), 64 << 10);
        let mut buf = buf;
        buf.bytes_mut().fill(2);
        let buf = file.write(8192, buf, DISK_ALIGN).await.expect("writes the front");
        assert_eq!(buf.bytes().len(), 64 << 10);
        file.sync().await.expect("syncs");
        let again = DiskFile::open(&path).await.expect("opens");
        let read = again.read(0, 64 << 10).await.expect("reads");
        let expected = |at: usize| if (8192..8192 + DISK_ALIGN).contains(&at) { 2 } else { 1 };
        assert!(read.bytes().iter().enumerate().all(|(at, &byte)| byte == expected(at)));
    });
}

/// Goal: a write that fails gives its buffer back, whole and as it was.
/// Method: write at an offset that no file has, the whole buffer and its front.
#[test]
fn a_failed_write_gives_the_buffer_back() {
    let scratch = scratch();
    let path = data_file(scratch.path(), 1 << 20);
    block_on(async {
        let file = DiskFile::open(&path).await.expect("opens");
        for len in [64 << 10, DISK_ALIGN] {
            let failed = file.write(1 << 62, filled(64 << 10, 3), len).await.expect_err("beyond any file");
            assert_eq!(failed.buf.bytes(), [3; 64 << 10]);
            file.write(0, failed.buf, len).await.expect("writes elsewhere");
        }
    });
}

/// Goal: a read beyond the end is an error and never other bytes; one that is not in whole blocks is a programming error.
/// Method: read across the end, behind it, and at an odd offset.
#[test]
fn reads_stay_inside() {
    let scratch = scratch();
    let path = data_file(scratch.path(), 64 << 10);
    block_on(async {
        let file = DiskFile::open(&path).await.expect("opens");
        for offset in [60 << 10, 64 << 10, 1 << 30] {
            let error = file.read(offset, 8192).await.err().expect("beyond the end");
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        }
        let odd = ringcas::rt::catch(file.read(512, DISK_ALIGN)).await;
        assert!(odd.is_err(), "an offset within a block is refused");
    });
}

/// Goal: a write whose caller goes away still lands whole.
/// Method: begin 32 writes, drop each future after its first poll, then read until all have landed.
#[test]
fn dropped_writes_land() {
    const BLOCK: usize = 64 << 10;
    let scratch = scratch();
    let path = data_file(scratch.path(), 32 * BLOCK as u64);
    block_on(async {
        let file = DiskFile::open(&path).await.expect("opens");
        for number in 0..32u8 {
            let write = file.write(u64::from(number) * BLOCK as u64, filled(BLOCK, number + 1), BLOCK);
            let _ = time::race(write, std::future::ready(())).await;
        }
        for number in 0..32u8 {
            let landed = async {
                loop {
                    let read = file.read(u64::from(number) * BLOCK as u64, BLOCK).await.expect("reads");
                    if read.bytes().iter().all(|&byte| byte == number + 1) {
                        return;
                    }
                }
            };
            time::timeout(std::time::Duration::from_secs(20), landed).await.expect("the write lands");
        }
    });
}

/// Goal: a file that is renamed or unlinked while it is being opened costs an error at most. glommio alone panics.
/// Method: a thread moves the file to and fro until it has been opened 100 times.
#[test]
fn renames_do_not_hurt_an_open() {
    let scratch = scratch();
    let path = data_file(scratch.path(), 64 << 10);
    let stop = Arc::new(AtomicBool::new(false));
    let mover = std::thread::spawn({
        let (path, away, stop) = (path.clone(), scratch.path().join("away"), stop.clone());
        move || {
            while !stop.load(Ordering::Relaxed) {
                std::fs::rename(&path, &away).expect("moves away");
                std::fs::rename(&away, &path).expect("moves back");
            }
        }
    });
    block_on(async {
        let (start, mut opened) = (time::now(), 0);
        while opened < 100 {
            assert!(start.elapsed().as_secs() < 20, "the file is hardly ever there");
            match DiskFile::open(&path).await {
                Ok(_) => opened += 1,
                Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
            }
        }
    });
    stop.store(true, Ordering::Relaxed);
    mover.join().expect("the mover ends");
}

/// Goal: a file system without direct I/O is refused with a text that says what to do.
/// Method: procfs is one, and this process may write its own name there.
#[test]
fn no_direct_io_is_named() {
    block_on(async {
        let error = DiskFile::open(Path::new("/proc/self/comm")).await.err().expect("no direct I/O");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let text = error.to_string();
        assert!(text.contains("O_DIRECT") && text.contains("/proc/self/comm"), "{text}");
    });
}

/// Goal: preallocation takes the space for real, never replaces a file, and fails clearly when it cannot.
/// Method: look at the blocks of the file; create it twice; ask for more than any disk has.
#[test]
fn preallocation_is_real() {
    use std::os::unix::fs::MetadataExt;
    let scratch = scratch();
    let path = data_file(scratch.path(), 1 << 20);
    let blocks = |path: &Path| std::fs::metadata(path).expect("there").blocks() * 512;
    assert!(blocks(&path) >= 1 << 20);
    grow_preallocated(&path, 3 << 20).expect("grows");
    assert!(blocks(&path) >= 3 << 20);
    let twice = create_preallocated(&path, 1 << 20).expect_err("it exists");
    assert_eq!(twice.kind(), ErrorKind::AlreadyExists);
    assert!(create_preallocated(&scratch.path().join("vast"), 1 << 60).is_err());
    assert!(create_preallocated(&scratch.path().join("vaster"), u64::MAX).is_err());
}

/// Goal: buffers are reused, and a fresh one holds nothing of the process's memory.
/// Method: compare addresses across a drop; look into a length that was never used before.
#[test]
fn buffers_come_from_the_pool() {
    block_on(async {
        let buf = filled(128 << 10, 7);
        let address = buf.bytes().as_ptr();
        drop(buf);
        assert_eq!(DiskBuf::new(128 << 10).bytes().as_ptr(), address);
        assert!(DiskBuf::new(132 << 10).bytes().iter().all(|&byte| byte == 0));
    });
}

/// Goal: many operations at once, by several tasks, keep their data apart.
/// Method: 16 tasks write and read back 32 blocks each of their own.
#[test]
fn many_at_once() {
    const TASKS: u64 = 16;
    const ROUNDS: u64 = 32;
    let scratch = scratch();
    let path = data_file(scratch.path(), TASKS * ROUNDS * DISK_ALIGN as u64);
    block_on(async {
        let file = DiskFile::open(&path).await.expect("opens");
        let gate = ringcas::rt::gate::Gate::default();
        let done = Local::new(0);
        for task in 0..TASKS {
            let (file, done) = (file.clone(), done.clone());
            gate.spawn(async move {
                for round in 0..ROUNDS {
                    let (offset, byte) = ((task * ROUNDS + round) * DISK_ALIGN as u64, (task * 7 + round) as u8);
                    file.write(offset, filled(DISK_ALIGN, byte), DISK_ALIGN).await.expect("writes");
                    let read = file.read(offset, DISK_ALIGN).await.expect("reads");
                    assert!(read.bytes().iter().all(|&got| got == byte));
                }
                done.with(|done| *done += 1);
            });
        }
        spawn(async {});
        gate.wait_empty().await;
        assert_eq!(done.with(|done| *done), TASKS);
    });
}
