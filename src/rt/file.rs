//! Data files: preallocated, opened with O_DIRECT, read and written in whole `DISK_ALIGN` blocks.

use std::cell::RefCell;
use std::fs::OpenOptions;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use glommio::io::{DmaBuffer, DmaFile};

#[cfg(test)]
use super::faults;
use super::local::Permits;
use super::{loan, pulse};
use crate::limits::{DISK_ALIGN, DISK_BUF_SPARE_MAX, DISK_READS_LEN_MAX, DISK_READS_LEN_MIN};

/// An open data file. Core-local; every core opens its own. Clones share the descriptor.
#[derive(Clone)]
pub struct DiskFile(Rc<DmaFile>);

/// Creates `path` (it must not exist) with `len` bytes allocated on the device. Blocks: for start-up only.
/// Fails with `EOPNOTSUPP` where the file system cannot allocate, instead of writing zeros.
pub fn create_preallocated(path: &Path, len: u64) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    allocate(&file, len)
}

/// Makes the existing file `path` `len` bytes long, allocated on the device. Blocks: for start-up only.
pub fn grow_preallocated(path: &Path, len: u64) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    allocate(&file, len)
}

fn allocate(file: &std::fs::File, len: u64) -> io::Result<()> {
    #[cfg(test)]
    assert!(len <= 1 << 30, "a unit test is about to take {len} bytes of this machine's disk");
    let len = libc::off_t::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    loop {
        // SAFETY: the descriptor belongs to `file`, which outlives the call.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len) } == 0 {
            return file.sync_all();
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Opens a file for reading without changing when it was last read, where this user may do that. Blocks.
pub fn open_unmarked(path: &Path) -> io::Result<std::fs::File> {
    let quiet = OpenOptions::new().read(true).custom_flags(libc::O_NOATIME).open(path);
    match quiet {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => OpenOptions::new().read(true).open(path),
        opened => opened,
    }
}

/// Bytes that an unprivileged process can still allocate on the file system of `path`, which need not be there yet.
pub fn free_space(path: &Path) -> io::Result<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(nearest(path)?.as_os_str().as_bytes())?;
    // SAFETY: `stat` is plain data that the call fills; the path is a C string that outlives the call.
    let stat = unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        if libc::statvfs(path.as_ptr(), &mut stat) != 0 {
            return Err(io::Error::last_os_error());
        }
        stat
    };
    Ok(stat.f_bavail * stat.f_frsize)
}

/// Finds out whether this process could make the data file `path`, without leaving anything; nothing where the file system does not
/// tell.
pub fn could_create(path: &Path) -> io::Result<()> {
    match open_direct(&nearest(path)?, true, libc::O_TMPFILE) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => Ok(()),
        opened => opened.map(drop),
    }
}

fn open_direct(path: &Path, writes: bool, flags: i32) -> io::Result<std::fs::File> {
    let opened = OpenOptions::new().read(true).write(writes).custom_flags(libc::O_DIRECT | flags).open(path);
    opened.map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => io::Error::new(
            io::ErrorKind::Unsupported,
            format!(
                "the file system of {} has no direct I/O (O_DIRECT): put the cache directory on ext4, XFS or another \
                 local file system",
                path.display()
            ),
        ),
        _ => error,
    })
}

/// The part of `path` that is there.
fn nearest(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    Ok(path.ancestors().find(|path| path.exists()).unwrap_or(&path).to_path_buf())
}

/// A buffer that the kernel can read or write directly. Core-local. Comes from the core's pool, and goes back to it.
#[derive(Debug)]
pub struct DiskBuf {
    /// `None` only while it is dropped.
    buffer: Option<Rc<DmaBuffer>>,
}

impl DiskBuf {
    /// A buffer of `len` bytes, a positive multiple of `DISK_ALIGN`. Its content is unspecified: zeros, or what a former
    /// user of this core's pool left.
    pub fn new(len: usize) -> Self {
        assert!(len > 0 && len.is_multiple_of(DISK_ALIGN), "{len} is not a positive multiple of {DISK_ALIGN}");
        let buffer = POOL.with_borrow_mut(|pool| pool.take(len)).unwrap_or_else(|| {
            let mut buffer = glommio::allocate_dma_buffer_global(len);
            // Why: fresh memory may hold anything of this process, and padding goes to disk.
            buffer.as_bytes_mut().fill(0);
            Rc::new(buffer)
        });
        Self { buffer: Some(buffer) }
    }

    pub fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().expect(HELD).as_bytes()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let buffer = self.buffer.as_mut().expect(HELD);
        Rc::get_mut(buffer).expect("a write gives its share back before it returns the buffer").as_bytes_mut()
    }

    /// The first `len` bytes, in a buffer of that length.
    fn front(&self, len: usize) -> Rc<DmaBuffer> {
        let buffer = self.buffer.as_ref().expect(HELD);
        if len == buffer.len() {
            return buffer.clone();
        }
        // Why a copy: glommio writes whole buffers, and can shorten one but not lengthen it again.
        let mut front = glommio::allocate_dma_buffer_global(len);
        front.as_bytes_mut().copy_from_slice(&buffer.as_bytes()[..len]);
        Rc::new(front)
    }
}

const HELD: &str = "only a drop takes the buffer out";

impl Drop for DiskBuf {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            // A thread that is ending has no pool any more.
            let _ = POOL.try_with(|pool| pool.borrow_mut().give(buffer));
        }
    }
}

/// Lengths of which a core keeps spare buffers, in bytes: those that are asked for again and again.
const POOLED: [usize; 5] = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];

/// Buffers of one length that come back between two looks at how many spare ones were not needed.
const SPARE_LOOK: u32 = 256;

/// Spare buffers of a core, for each of the lengths `POOLED`.
struct Pool {
    spare: [Spare; POOLED.len()],
    /// Bytes of each length that are kept.
    most: usize,
}

impl Default for Pool {
    fn default() -> Self {
        Self { spare: Default::default(), most: DISK_BUF_SPARE_MAX }
    }
}

/// How many bytes of spare buffers this core keeps, of all lengths together; as many as may be when nothing is said.
pub fn keep_spare(bytes: usize) {
    POOL.with_borrow_mut(|pool| pool.most = (bytes / POOLED.len()).min(DISK_BUF_SPARE_MAX));
}

/// Spare buffers of one length. Those that nobody needed for some time are freed. Why: else each core keeps as many as it
/// ever needed at a time, and memory grows for as long as chance brings new peaks.
#[derive(Default)]
struct Spare {
    buffers: Vec<Rc<DmaBuffer>>,
    /// The fewest that lay here since the last look: so many were not needed.
    fewest: usize,
    came_back: u32,
}

impl Spare {
    fn take(&mut self) -> Option<Rc<DmaBuffer>> {
        let buffer = self.buffers.pop();
        self.fewest = self.fewest.min(self.buffers.len());
        buffer
    }

    /// `most`: bytes that are kept.
    fn give(&mut self, buffer: Rc<DmaBuffer>, most: usize) {
        if self.buffers.len() < most / buffer.len() {
            self.buffers.push(buffer);
        }
        self.came_back += 1;
        if self.came_back == SPARE_LOOK {
            self.buffers.drain(..self.fewest);
            self.came_back = 0;
            self.fewest = self.buffers.len();
        }
    }
}

thread_local! {
    static POOL: RefCell<Pool> = RefCell::default();
    /// Places for reads under way, in blocks of `DISK_ALIGN`.
    static READS: RefCell<Permits> = RefCell::new(Permits::new(DISK_READS_LEN_MAX / DISK_ALIGN));
}

/// How many bytes this core reads at a time, within bounds; a longer read goes alone. For the start: reads that are under
/// way then are not counted.
pub fn read_at_once(bytes: usize) {
    let bytes = bytes.clamp(DISK_READS_LEN_MIN, DISK_READS_LEN_MAX);
    READS.replace(Permits::new(bytes / DISK_ALIGN));
}

/// Frees the spare buffers of this core, and what others have let go of.
pub(super) fn drop_spares() {
    drop(POOL.with_borrow_mut(|pool| std::mem::take(&mut pool.spare)));
    loan::take_back();
}

impl Pool {
    fn of(&mut self, len: usize) -> Option<&mut Spare> {
        Some(&mut self.spare[POOLED.iter().position(|&pooled| pooled == len)?])
    }

    fn take(&mut self, len: usize) -> Option<Rc<DmaBuffer>> {
        self.of(len)?.take()
    }

    fn give(&mut self, mut buffer: Rc<DmaBuffer>) {
        // A share that somebody still holds must not be handed out again.
        let is_whole = Rc::get_mut(&mut buffer).is_some();
        let most = self.most;
        if let Some(spare) = self.of(buffer.len()).filter(|_| is_whole) {
            spare.give(buffer, most);
        }
    }
}

/// A write that failed, with its buffer as it was: for a try elsewhere.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct FailedWrite {
    pub error: io::Error,
    pub buf: DiskBuf,
}

/// Bytes that a read brought. Core-local.
pub struct ReadBuf(glommio::io::ReadResult);

impl ReadBuf {
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The bytes `range` of it, not copied, for any core. They keep all of the buffer in memory.
    pub fn share(self, range: Range<usize>) -> Bytes {
        loan::lend(self.0).slice(range)
    }
}

impl DiskFile {
    /// Opens an existing data file for reading and writing.
    pub async fn open(path: &Path) -> io::Result<Self> {
        Self::open_for(path, true).await
    }

    /// Opens an existing data file for reading alone.
    pub async fn open_for_reading(path: &Path) -> io::Result<Self> {
        Self::open_for(path, false).await
    }

    async fn open_for(path: &Path, writes: bool) -> io::Result<Self> {
        // Why twice: glommio looks the path up again after opening it, and panics when it has gone meanwhile. A name
        // under /proc/self/fd cannot go while we hold it. And it does without O_DIRECT in places; we do not.
        let held = open_direct(path, writes, 0)?;
        let name = format!("/proc/self/fd/{}", held.as_raw_fd());
        let file = glommio::io::OpenOptions::new().read(true).write(writes).dma_open(name).await?;
        if file.alignment() > DISK_ALIGN as u64 {
            return Err(io::Error::other(format!(
                "the device of {} has blocks of {} bytes; at most {DISK_ALIGN} are supported",
                path.display(),
                file.alignment()
            )));
        }
        Ok(Self(Rc::new(file)))
    }

    /// Reads exactly `len` bytes at `offset`, both multiples of `DISK_ALIGN`. `UnexpectedEof` beyond the end.
    ///
    /// Once begun it runs to its end even when the caller goes away, who is then charged for its buffer no more: so there is
    /// a bound on what is being read at a time (`read_at_once`), and further reads wait.
    pub async fn read(&self, offset: u64, len: usize) -> io::Result<ReadBuf> {
        assert_aligned(offset, len);
        let place = READS.with_borrow(|reads| reads.take_many(len / DISK_ALIGN)).await;
        let file = self.0.clone();
        Landing::new(async move {
            let (_place, _busy) = (place, pulse::busy());
            loan::take_back();
            #[cfg(test)]
            faults::strike(faults::Operation::Read, offset)?;
            // Why not `read_at`: with a position that is not aligned it returns bytes beyond the end of the file.
            let got = file.read_at_aligned(offset, len).await?;
            if got.len() < len {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            Ok(ReadBuf(got))
        })
        .await
    }

    /// Writes the first `len` bytes of `buf` at `offset`, both multiples of `DISK_ALIGN`, and gives the buffer back, as it
    /// was. A write of the whole buffer is the cheapest.
    ///
    /// Once begun it runs to its end even when the caller goes away, so a region must be reused only after its write has
    /// ended.
    pub async fn write(&self, offset: u64, buf: DiskBuf, len: usize) -> Result<DiskBuf, FailedWrite> {
        assert_aligned(offset, len);
        let file = self.0.clone();
        Landing::new(async move {
            let _busy = pulse::busy();
            match write_front(&file, offset, &buf, len).await {
                Ok(written) if written == len => Ok(buf),
                Ok(_) => Err(FailedWrite { error: io::ErrorKind::WriteZero.into(), buf }),
                Err(error) => Err(FailedWrite { error, buf }),
            }
        })
        .await
    }

    /// Waits until all that has been written is on the device.
    pub async fn sync(&self) -> io::Result<()> {
        let _busy = pulse::busy();
        #[cfg(test)]
        faults::strike(faults::Operation::Sync, 0)?;
        self.0.fdatasync().await.map_err(Into::into)
    }
}

async fn write_front(file: &DmaFile, offset: u64, buf: &DiskBuf, len: usize) -> io::Result<usize> {
    #[cfg(test)]
    faults::strike(faults::Operation::Write, offset)?;
    Ok(file.write_rc_at(buf.front(len), offset).await?)
}

fn assert_aligned(offset: u64, len: usize) {
    assert!(
        offset.is_multiple_of(DISK_ALIGN as u64) && len.is_multiple_of(DISK_ALIGN) && len > 0,
        "disk access of {len} bytes at {offset} is not in whole blocks of {DISK_ALIGN}"
    );
}

/// An operation that goes on by itself when its future is dropped half-way.
///
/// Why: a DMA write that is cancelled usually still lands, later, where somebody else may write by then; and a read keeps its
/// buffer until the kernel is done with it, which nobody would learn.
struct Landing<T: 'static>(Option<Pin<Box<dyn Future<Output = T>>>>);

impl<T: 'static> Landing<T> {
    fn new(operation: impl Future<Output = T> + 'static) -> Self {
        Self(Some(Box::pin(operation)))
    }
}

impl<T: 'static> Future for Landing<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let operation = self.0.as_mut().expect("not polled after it ended");
        let ended = operation.as_mut().poll(context);
        if ended.is_ready() {
            self.0 = None;
        }
        ended
    }
}

impl<T: 'static> Drop for Landing<T> {
    fn drop(&mut self) {
        let Some(operation) = self.0.take() else { return };
        if pulse::on_core() {
            glommio::spawn_local(async move { drop(operation.await) }).detach();
        } else {
            // The executor is gone with the operation under way: the kernel may still read the buffer.
            std::mem::forget(operation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a core keeps as many spare buffers as it needs at a time, not as many as it ever needed. Method: a peak of 50,
    /// then three at a time.
    #[test]
    fn spare_buffers_follow_the_need() {
        let mut spare = Spare::default();
        let fresh = || Rc::new(glommio::allocate_dma_buffer_global(64 << 10));
        (0..50).for_each(|_| spare.give(fresh(), DISK_BUF_SPARE_MAX));
        assert_eq!(spare.buffers.len(), 50);
        for _ in 0..SPARE_LOOK {
            let taken: Vec<_> = (0..3).map(|_| spare.take().expect("enough are left")).collect();
            taken.into_iter().for_each(|buffer| spare.give(buffer, DISK_BUF_SPARE_MAX));
        }
        assert_eq!(spare.buffers.len(), 3);
    }

    /// Goal: what is being read at a time is bounded, also by callers that went away, and who waits gets its turn. Method:
    /// reads of all that may be read at once; the first is dropped when it has begun.
    #[test]
    fn reads_are_bounded() {
        let directory = tempfile::tempdir_in(".").expect("a directory");
        let path = directory.path().join("data");
        const LEN: usize = DISK_READS_LEN_MIN;
        create_preallocated(&path, 2 * LEN as u64).expect("a file");
        crate::rt::cores::block_on(async move {
            read_at_once(0);
            let in_line = || READS.with_borrow(Permits::in_line);
            let file = DiskFile::open(&path).await.expect("the file");
            let mut reads: Vec<_> = (0..3).map(|_| Box::pin(file.read(0, LEN))).collect();
            for read in &mut reads {
                assert!(read.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop())).is_pending());
            }
            assert_eq!(in_line(), LEN / DISK_ALIGN + 2);
            drop(reads.remove(0));
            assert_eq!(in_line(), LEN / DISK_ALIGN + 2, "it runs on");
            for read in reads {
                assert_eq!(read.await.expect("a read").bytes().len(), LEN);
            }
            // A read that is longer than all that may be goes alone.
            assert_eq!(file.read(0, 2 * LEN).await.expect("a read").bytes().len(), 2 * LEN);
            assert_eq!(in_line(), 0);
            read_at_once(DISK_READS_LEN_MAX);
        });
    }
}
