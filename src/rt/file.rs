//! Data files: preallocated, opened with O_DIRECT, read and written in whole `DISK_ALIGN` blocks.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::rc::Rc;

use super::local::Event;
use crate::limits::DISK_ALIGN;

/// A buffer that the kernel can read or write directly. Core-local.
pub struct DiskBuf(glommio::io::DmaBuffer);

/// An open data file. Core-local; every core opens its own. Clones share the descriptor.
#[derive(Clone)]
pub struct DiskFile(Rc<glommio::io::DmaFile>);

/// Creates `path` (it must not exist) with `len` bytes allocated on the device. Blocks: for start-up only.
pub fn create_preallocated(path: &Path, len: u64) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let file = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    let len = libc::off_t::try_from(len).map_err(io::Error::other)?;
    // SAFETY: the descriptor belongs to `file`, which outlives the call.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
        0 => file.sync_all(),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Bytes that an unprivileged process can still allocate on the file system of `path`.
pub fn free_space(path: &Path) -> io::Result<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
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

/// Makes the existing file `path` `len` bytes long, allocated on the device. Blocks: for start-up only.
pub fn grow_preallocated(path: &Path, len: u64) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
    let len = libc::off_t::try_from(len).map_err(io::Error::other)?;
    // SAFETY: the descriptor belongs to `file`, which outlives the call.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
        0 => file.sync_all(),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

impl DiskBuf {
    /// A buffer of `len` bytes, a multiple of `DISK_ALIGN`. Its content is unspecified.
    pub fn new(len: usize) -> Self {
        assert!(len.is_multiple_of(DISK_ALIGN), "{len} is not a multiple of {DISK_ALIGN}");
        Self(glommio::allocate_dma_buffer_global(len))
    }

    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_bytes_mut()
    }
}

/// Bytes that a read brought. Core-local.
pub struct ReadBuf(glommio::io::ReadResult);

impl ReadBuf {
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl DiskFile {
    /// Opens an existing data file for reading and writing.
    pub async fn open(path: &Path) -> io::Result<Self> {
        let file = glommio::io::OpenOptions::new().read(true).write(true).dma_open(path).await?;
        Ok(Self(Rc::new(file)))
    }

    /// Reads exactly `len` bytes at `offset`, both multiples of `DISK_ALIGN`. `UnexpectedEof` beyond the end.
    pub async fn read(&self, offset: u64, len: usize) -> io::Result<ReadBuf> {
        assert!(offset.is_multiple_of(DISK_ALIGN as u64) && len.is_multiple_of(DISK_ALIGN));
        let got = self.0.read_at_aligned(offset, len).await?;
        if got.len() < len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(ReadBuf(got))
    }

    /// Writes the first `len` bytes of `buf` at `offset`, both multiples of `DISK_ALIGN`, and gives the buffer back.
    /// Runs to its end even when the caller goes away, so a region must be reused only after its write has ended.
    pub async fn write(&self, offset: u64, buf: DiskBuf, len: usize) -> io::Result<DiskBuf> {
        assert!(offset.is_multiple_of(DISK_ALIGN as u64) && len.is_multiple_of(DISK_ALIGN));
        let file = self.0.clone();
        let slot: Rc<RefCell<Option<io::Result<DiskBuf>>>> = Rc::default();
        let done = Event::default();
        let ended = done.wait();
        let filled = slot.clone();
        super::spawn(async move {
            let mut shared = buf.0;
            shared.trim_to_size(len);
            let shared = Rc::new(shared);
            let result = file.write_rc_at(shared.clone(), offset).await;
            let result = match result {
                Ok(written) if written < len => Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {
                    Rc::try_unwrap(shared).map(DiskBuf).map_err(|_| io::Error::other("the buffer is still shared"))
                }
                Err(error) => Err(error.into()),
            };
            *filled.borrow_mut() = Some(result);
            done.notify();
        });
        ended.await;
        slot.borrow_mut().take().expect("set before the event")
    }

    /// Waits until all that has been written is on the device.
    pub async fn sync(&self) -> io::Result<()> {
        self.0.fdatasync().await.map_err(Into::into)
    }
}
