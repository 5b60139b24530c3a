//! The cache directory: its files, their geometry, and what stands in it at start-up.
//!
//! ```text
//! lock      empty; locked by the process that uses the directory
//! super     two copies of the superblock, 4 KiB each, written in turn
//! data.N    1 TiB each but the last, allocated at once, cut into segments
//! ```
//! The volume is the data files one behind the other.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::disk::{Ack, DiskConfig};
use super::log::Log;
use crate::limits::{
    DISK_ALIGN, FRAME_LEN, HEADER_READERS, LARGE_CACHE_LEN, MAX_SIZE_MAX, MAX_SIZE_MIN, SEGMENT_LEN_MAX,
    SEGMENT_LEN_MIN, SEGMENTS_PER_SHARD, SEGMENTS_PER_SHARD_MIN,
};
use crate::pure::record::Checksums;
use crate::pure::segment::{HEAD_LEN, Layout, SegmentHeader};
use crate::pure::shard_map::SHARDS_MAX;
use crate::pure::superblock::{self, Superblock};
use crate::rt::{self, whole};

/// Bytes of a data file but the last.
const DATA_FILE_LEN: u64 = 1 << 40;
/// Bytes of the file `super`.
const SUPER_LEN: u64 = 2 * DISK_ALIGN as u64;

/// An open cache directory, locked against other processes while any clone lives. `Send`; every core gets a clone.
#[derive(Clone)]
pub struct Volume(Arc<Inner>);

struct Inner {
    /// Held for its lock.
    _lock: File,
    dir: PathBuf,
    superblock: Superblock,
    max_size: u64,
    ack: Ack,
    headers: Vec<Option<SegmentHeader>>,
    lost_segments: usize,
}

/// Why the cache directory cannot be used. The texts name the setting and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("--max_size is {given} bytes: give at least 0.0625, which is {MAX_SIZE_MIN} bytes")]
    TooSmall { given: u64 },
    #[error("--max_size is {given} bytes: the largest cache that works has {MAX_SIZE_MAX} bytes (64 TiB)")]
    TooLarge { given: u64 },
    #[error(
        "--max_size is {given} bytes: the cache in --dir {dir} was made with {shards} shards and needs {min} bytes; \
             set --max_size to that or more, or use an empty directory"
    )]
    ShrinksTooFar { dir: PathBuf, given: u64, shards: u16, min: u64 },
    #[error(
        "--dir {dir} holds {found} but no file super, without which nothing in it can be found; put super back, or remove \
             {found} to start with an empty cache"
    )]
    NoSuper { dir: PathBuf, found: String },
    #[error("{path} is no regular file; remove it, or use another directory")]
    NoFile { path: PathBuf },
    #[error("--dir {dir} holds no cache: {path} is not there; give the directory that the server is started with")]
    NoCache { dir: PathBuf, path: PathBuf },
    #[error(
        "{path} has {found} bytes instead of {expected}: a change of --max_size was interrupted; start the server once, \
             which brings it to an end"
    )]
    Resizing { path: PathBuf, found: u64, expected: u64 },
    #[error("{path} is not there; put it back, or start the server once, which makes it anew and empty")]
    NoData { path: PathBuf },
    #[error("--dir {dir} is in use by another process; stop that one, or use another directory")]
    InUse { dir: PathBuf },
    #[error(
        "--dir {dir} is that of a bazel-remote; give an empty one, and fill it: `ringcas import --from {dir} --dir ...`"
    )]
    BazelRemote { dir: PathBuf },
    #[error("--dir {dir} holds {found}, which is no cache of this program; use an empty directory")]
    Foreign { dir: PathBuf, found: String },
    #[error(
        "--dir {dir} holds a cache of format {found}, this program reads format {}; use the program that made it, or \
             an empty directory",
        superblock::VERSION
    )]
    OtherVersion { dir: PathBuf, found: u32 },
    #[error("both copies of {path} are damaged; remove the files in --dir to start with an empty cache")]
    SuperDamaged { path: PathBuf },
    #[error("no room in the file system of {path} to allocate {bytes} bytes; make room, or lower --max_size")]
    NoSpace { path: PathBuf, bytes: u64 },
    #[error("cannot {action} {path}: {source}; check --dir and its permissions")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

impl Volume {
    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    pub fn layout(&self) -> Layout {
        Layout { segment_len: self.0.superblock.segment_len }
    }

    /// The checksums of this directory.
    pub fn checksums(&self) -> Checksums {
        Checksums { key: self.0.superblock.key }
    }

    /// Into how many shards the key space is cut: a power of two.
    pub fn shards(&self) -> u16 {
        self.0.superblock.shards
    }

    pub fn segment_count(&self) -> u32 {
        self.0.superblock.segments
    }

    /// The header of each segment as it stood at start-up; `None` for those that were never used.
    pub fn headers(&self) -> &[Option<SegmentHeader>] {
        &self.0.headers
    }

    /// Segments that were used and have no whole header: what stood in them is lost.
    pub fn lost_segments(&self) -> usize {
        self.0.lost_segments
    }

    /// `--max_size`, in bytes.
    pub fn max_size(&self) -> u64 {
        self.0.max_size
    }

    /// The largest raw size that is accepted for a blob, in bytes: half of `--max_size`, or what one commit record can list.
    pub fn max_blob_len(&self) -> u64 {
        // 12 bytes for each frame, and 8 for a run of four chunks or more.
        let frames = Log::record_len_max(self.layout()) as u64 / 20;
        (self.0.max_size / 2).min(frames * FRAME_LEN as u64)
    }

    /// Bytes that the files take.
    pub fn allocated_bytes(&self) -> u64 {
        SUPER_LEN + volume_len(&self.0.superblock)
    }

    /// Which copies of the superblock are whole.
    pub fn whole_supers(&self) -> Result<[bool; 2], OpenError> {
        let path = self.0.dir.join("super");
        whole::head(&path, SUPER_LEN).map(|bytes| superblock::whole_copies(&bytes)).map_err(failed("read", &path))
    }

    /// Writes the damaged copies of the superblock anew.
    pub fn mend_supers(&self) -> Result<(), OpenError> {
        let whole = self.whole_supers()?;
        // Each write takes the next copy in turn.
        (1..=2u64)
            .map(|step| Superblock { counter: self.0.superblock.counter + step, ..self.0.superblock })
            .try_for_each(
                |next| if whole[(next.counter % 2) as usize] { Ok(()) } else { write_super(&self.0.dir, &next) },
            )
    }

    pub(super) fn ack(&self) -> Ack {
        self.0.ack
    }

    /// The data files, in order.
    pub fn data_paths(&self) -> Vec<PathBuf> {
        data_files(&self.0.dir, &self.0.superblock).into_iter().map(|(path, _)| path).collect()
    }

    /// The data file that holds `position`, and the offset in it. No segment lies in two.
    pub fn file_of(position: u64) -> (usize, u64) {
        ((position / DATA_FILE_LEN) as usize, position % DATA_FILE_LEN)
    }
}

/// Creates or validates the cache directory and reads all segment headers. Blocks: for start-up, before the cores run.
pub fn open(config: &DiskConfig) -> Result<Volume, OpenError> {
    open_when_free(config, || false)
}

/// The same for a directory that another process may still use: `waits` says, and does, whether to look once more.
pub fn open_when_free(config: &DiskConfig, mut waits: impl FnMut() -> bool) -> Result<Volume, OpenError> {
    let given = config.max_size_bytes;
    check_size(given)?;
    let dir = &config.dir;
    fs::create_dir_all(dir).map_err(failed("create", dir))?;
    let super_path = dir.join("super");
    let exists = super_path.try_exists().map_err(failed("look for", &super_path))?;
    if !exists {
        refuse_foreign(dir)?;
    }
    let lock = loop {
        match lock(dir, true) {
            Err(OpenError::InUse { .. }) if waits() => {}
            locked => break locked?,
        }
    };
    let superblock = if exists { read_super(dir, &super_path)? } else { create(dir, given)? };
    let superblock = resize(dir, superblock, given)?;
    let (headers, lost_segments) = read_headers(dir, &superblock, true)?;
    let (max_size, ack) = (given, config.ack);
    let inner = Inner { _lock: lock, dir: dir.clone(), superblock, max_size, ack, headers, lost_segments };
    Ok(Volume(Arc::new(inner)))
}

/// Whether `dir` holds a cache of this format that can have `max_size`, or nothing yet, and how many shards it has, or will have.
/// Changes nothing.
pub fn look(dir: &Path, max_size: u64) -> Result<u16, OpenError> {
    prospect(dir, max_size).map(|superblock| superblock.shards)
}

/// The same, and whether `open` could write all files and has room for them.
pub fn look_closely(dir: &Path, max_size: u64) -> Result<u16, OpenError> {
    let superblock = prospect(dir, max_size)?;
    let files = data_files(dir, &superblock);
    for path in [dir.join("lock"), dir.join("super")].iter().chain(files.iter().map(|(path, _)| path)) {
        match must_be_file(path)? {
            Some(_) => drop(OpenOptions::new().write(true).open(path).map_err(failed("open", path))?),
            None => rt::file::could_create(path).map_err(failed("create", path))?,
        }
    }
    check_room(dir, &files).map(|()| superblock.shards)
}

/// Whether a cache can have this size, in bytes.
pub fn check_size(given: u64) -> Result<(), OpenError> {
    match given {
        ..MAX_SIZE_MIN => Err(OpenError::TooSmall { given }),
        MAX_SIZE_MIN..=MAX_SIZE_MAX => Ok(()),
        _ => Err(OpenError::TooLarge { given }),
    }
}

/// A `--max_size` with which the cache in `dir` stays as large as it is, in bytes: what its files take, but that the smallest one
/// takes a little less than it is to be given. `None` when there is none, or its superblock cannot be read.
pub fn kept_size(dir: &Path) -> io::Result<Option<u64>> {
    let path = dir.join("super");
    let bytes = match fs::metadata(&path) {
        Ok(found) if found.is_file() => whole::head(&path, SUPER_LEN)?,
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let kept = superblock::decode(&bytes).ok();
    Ok(kept.map(|superblock| (SUPER_LEN + volume_len(&superblock)).max(MAX_SIZE_MIN)))
}

/// Finds out whether `open_when_free` will be able to open a directory that another process uses, as far as can be known
/// before that has ended, and with how many shards. Changes nothing.
pub fn foresee(config: &DiskConfig) -> Result<u16, OpenError> {
    let (dir, given) = (&config.dir, config.max_size_bytes);
    let before = read_super(dir, &dir.join("super"))?;
    look_closely(dir, given)?;
    read_headers(dir, &before, true).map(|_| before.shards)
}

/// Opens a cache directory as it is, for tools: creates, changes and resizes nothing.
pub fn open_as_is(dir: &Path) -> Result<Volume, OpenError> {
    let super_path = dir.join("super");
    if !super_path.try_exists().map_err(failed("look for", &super_path))? {
        return Err(OpenError::NoCache { dir: dir.into(), path: super_path });
    }
    let lock = lock(dir, false)?;
    let superblock = read_super(dir, &super_path)?;
    for (path, expected) in data_files(dir, &superblock) {
        let found = must_be_file(&path)?.ok_or_else(|| OpenError::NoData { path: path.clone() })?;
        if found != expected {
            return Err(OpenError::Resizing { path, found, expected });
        }
    }
    let (headers, lost_segments) = read_headers(dir, &superblock, false)?;
    let (dir, max_size, ack) = (dir.into(), SUPER_LEN + volume_len(&superblock), Ack::Buffered);
    Ok(Volume(Arc::new(Inner { _lock: lock, dir, superblock, max_size, ack, headers, lost_segments })))
}

/// What the superblock will say once `open` has opened or made the volume.
fn prospect(dir: &Path, max_size: u64) -> Result<Superblock, OpenError> {
    check_size(max_size)?;
    let path = dir.join("super");
    if must_be_file(&path)?.is_some() {
        let before = read_super(dir, &path)?;
        return Ok(Superblock { segments: fitting(dir, &before, max_size)?, ..before });
    }
    if dir.is_dir() {
        refuse_foreign(dir)?;
    }
    Ok(fresh(max_size))
}

/// The superblock of a new volume.
fn fresh(max_size: u64) -> Superblock {
    let (segment_len, segments, shards) = plan(max_size);
    Superblock {
        counter: 1,
        key: rt::random_u64(),
        segment_len: segment_len as u32,
        segments: segments as u32,
        shards: shards as u16,
    }
}

/// A new volume's segment length, number of segments and number of shards.
fn plan(max_size: u64) -> (u64, u64, u64) {
    let segment_len = prev_power_of_two(max_size / 1024).clamp(SEGMENT_LEN_MIN, SEGMENT_LEN_MAX);
    let segments = (max_size - SUPER_LEN) / segment_len;
    let shards_max = if max_size < LARGE_CACHE_LEN { SHARDS_MAX / 4 } else { SHARDS_MAX };
    let shards = prev_power_of_two(segments / SEGMENTS_PER_SHARD).clamp(1, u64::from(shards_max));
    (segment_len, segments, shards)
}

fn prev_power_of_two(number: u64) -> u64 {
    if number == 0 { 0 } else { 1 << number.ilog2() }
}

/// Makes a volume. The superblock gets its name last: a crash before that leaves `super.new`, and data files that the next start
/// removes.
fn create(dir: &Path, max_size: u64) -> Result<Superblock, OpenError> {
    remove_data_files(dir, 0)?;
    let superblock = fresh(max_size);
    let files = data_files(dir, &superblock);
    check_room(dir, &files)?;
    let (path, fresh) = (dir.join("super"), dir.join("super.new"));
    let copies = [superblock.encode(0), superblock.encode(1)].concat();
    let write = || {
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(&fresh)?;
        file.write_all_at(&copies, 0)?;
        file.sync_all()?;
        File::open(dir)?.sync_all()
    };
    write().map_err(failed("write", &fresh))?;
    for (path, len) in files {
        if let Err(error) = rt::file::create_preallocated(&path, len) {
            // Why ignored: the error that is reported is the first one.
            let _ = remove_data_files(dir, 0).map(|()| fs::remove_file(&fresh));
            return Err(no_room(error, &path, len));
        }
    }
    let name = || fs::rename(&fresh, &path).and_then(|()| File::open(dir)?.sync_all());
    name().map_err(failed("write", &path))?;
    Ok(superblock)
}

/// The segments of a volume that is to take `max_size` bytes.
fn fitting(dir: &Path, before: &Superblock, max_size: u64) -> Result<u32, OpenError> {
    let segments = (max_size - SUPER_LEN) / u64::from(before.segment_len);
    let segments_min = u64::from(before.shards) * SEGMENTS_PER_SHARD_MIN;
    if segments < segments_min {
        let min = SUPER_LEN + segments_min * u64::from(before.segment_len);
        return Err(OpenError::ShrinksTooFar { dir: dir.into(), given: max_size, shards: before.shards, min });
    }
    Ok(segments as u32)
}

/// Fits the volume to `max_size`. A growing one allocates first and then says so in `super`; a shrinking one the other way round.
fn resize(dir: &Path, before: Superblock, max_size: u64) -> Result<Superblock, OpenError> {
    let after = Superblock { segments: fitting(dir, &before, max_size)?, counter: before.counter + 1, ..before };
    let files = data_files(dir, &after);
    check_room(dir, &files)?;
    if after.segments < before.segments {
        write_super(dir, &after)?;
    }
    let formerly = data_files(dir, &before).into_iter().map(|(_, len)| len).chain(std::iter::repeat(0));
    for ((path, len), formerly) in files.iter().zip(formerly) {
        let now = must_be_file(path)?;
        let found = now.unwrap_or(0);
        if found < formerly.min(*len) {
            let path = path.display();
            tracing::warn!("{path} has {found} bytes, and should have {formerly}: what stood in the rest is lost");
        }
        match now {
            Some(now) if now == *len => {}
            Some(now) if now > *len => {
                let cut = || OpenOptions::new().write(true).open(path)?.set_len(*len);
                cut().map_err(failed("truncate", path))?;
            }
            Some(now) => rt::file::grow_preallocated(path, *len).map_err(|error| {
                // Why ignored: the error that is reported is the first one.
                let _ = OpenOptions::new().write(true).open(path).and_then(|file| file.set_len(now));
                no_room(error, path, *len)
            })?,
            None => rt::file::create_preallocated(path, *len).map_err(|error| {
                // Why ignored: as above.
                let _ = fs::remove_file(path);
                no_room(error, path, *len)
            })?,
        }
    }
    remove_data_files(dir, files.len())?;
    if after.segments > before.segments {
        write_super(dir, &after)?;
    }
    Ok(if after.segments == before.segments { before } else { after })
}

/// Refuses a directory that holds anything but what an interrupted creation leaves.
///
/// Why not data files alone: they are those of a cache that has lost its superblock, or of another program.
fn refuse_foreign(dir: &Path) -> Result<(), OpenError> {
    if ["cas.v2", "ac.v2"].iter().any(|kind| dir.join(kind).is_dir()) {
        return Err(OpenError::BazelRemote { dir: dir.into() });
    }
    let begun = must_be_file(&dir.join("super.new"))?.is_some();
    for entry in fs::read_dir(dir).map_err(failed("list", dir))? {
        let name = entry.map_err(failed("list", dir))?.file_name();
        let name = name.to_string_lossy();
        if !(name == "lock" || name == "super.new" || name == "lost+found" || data_file_number(&name).is_some()) {
            return Err(OpenError::Foreign { dir: dir.into(), found: name.into_owned() });
        }
        if !begun && data_file_number(&name).is_some() {
            return Err(OpenError::NoSuper { dir: dir.into(), found: name.into_owned() });
        }
    }
    Ok(())
}

/// The length of a regular file; `None` when it is not there. Why: whoever opens a FIFO waits for ever.
fn must_be_file(path: &Path) -> Result<Option<u64>, OpenError> {
    match fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(Some(found.len())),
        Ok(_) => Err(OpenError::NoFile { path: path.into() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("look at", path)(error)),
    }
}

/// Locks the directory. Who will not write needs no right to, once it has been locked.
fn lock(dir: &Path, writes: bool) -> Result<File, OpenError> {
    let path = dir.join("lock");
    must_be_file(&path)?;
    let file = match OpenOptions::new().write(true).create(true).truncate(false).open(&path) {
        Err(error)
            if !writes
                && matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) =>
        {
            File::open(&path)
        }
        opened => opened,
    };
    let file = file.map_err(failed("open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(OpenError::InUse { dir: dir.into() }),
        Err(TryLockError::Error(error)) => Err(failed("lock", &path)(error)),
    }
}

fn read_super(dir: &Path, path: &Path) -> Result<Superblock, OpenError> {
    must_be_file(path)?;
    let bytes = whole::head(path, SUPER_LEN).map_err(failed("read", path))?;
    match superblock::decode(&bytes) {
        Ok(superblock) => Ok(superblock),
        Err(superblock::Unreadable::Damaged) => Err(OpenError::SuperDamaged { path: path.into() }),
        Err(superblock::Unreadable::OtherVersion(found)) => Err(OpenError::OtherVersion { dir: dir.into(), found }),
    }
}

/// Writes the copy whose turn it is.
fn write_super(dir: &Path, superblock: &Superblock) -> Result<(), OpenError> {
    let path = dir.join("super");
    let copy = superblock.counter % 2;
    let write = || {
        let file = OpenOptions::new().write(true).open(&path)?;
        file.write_all_at(&superblock.encode(copy as u8), copy * DISK_ALIGN as u64)?;
        file.sync_all()
    };
    write().map_err(failed("write", &path))
}

/// The headers of all segments, and how many of those that were used have none.
fn read_headers(
    dir: &Path,
    superblock: &Superblock,
    writes: bool,
) -> Result<(Vec<Option<SegmentHeader>>, usize), OpenError> {
    let layout = Layout { segment_len: superblock.segment_len };
    let sums = Checksums { key: superblock.key };
    let mut files = Vec::new();
    for (path, _) in data_files(dir, superblock) {
        // Why for writing: here it can be said what is wrong.
        let file = OpenOptions::new().read(true).write(writes).open(&path);
        files.push(file.map_err(failed("open", &path))?);
    }
    let lost = AtomicUsize::new(0);
    let mut headers = vec![None; superblock.segments as usize];
    let share = headers.len().div_ceil(HEADER_READERS).max(64);
    std::thread::scope(|scope| {
        for (part, first) in headers.chunks_mut(share).zip((0..).step_by(share)) {
            let (files, lost) = (&files, &lost);
            scope.spawn(move || {
                let mut bytes = vec![0u8; HEAD_LEN as usize];
                for (header, segment) in part.iter_mut().zip(first..) {
                    let (file, offset) = Volume::file_of(layout.position(segment, 0));
                    // A header that cannot be read loses its segment, and nothing else.
                    let is_read = files[file].read_exact_at(&mut bytes, offset).is_ok();
                    if is_read {
                        *header = SegmentHeader::decode(&bytes, &sums, layout, segment)
                            .filter(|header| header.shard.0 < superblock.shards);
                    }
                    if header.is_none() && !(is_read && SegmentHeader::is_blank(&bytes)) {
                        lost.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    Ok((headers, lost.into_inner()))
}

fn volume_len(superblock: &Superblock) -> u64 {
    u64::from(superblock.segments) * u64::from(superblock.segment_len)
}

/// The data files of a volume with their lengths in bytes.
fn data_files(dir: &Path, superblock: &Superblock) -> Vec<(PathBuf, u64)> {
    let total = volume_len(superblock);
    (0..total.div_ceil(DATA_FILE_LEN))
        .map(|n| (dir.join(format!("data.{n}")), (total - n * DATA_FILE_LEN).min(DATA_FILE_LEN)))
        .collect()
}

fn data_file_number(name: &str) -> Option<usize> {
    name.strip_prefix("data.")?.parse().ok()
}

/// Removes the data files from number `first` on.
fn remove_data_files(dir: &Path, first: usize) -> Result<(), OpenError> {
    for entry in fs::read_dir(dir).map_err(failed("list", dir))? {
        let entry = entry.map_err(failed("list", dir))?;
        if data_file_number(&entry.file_name().to_string_lossy()).is_some_and(|number| number >= first) {
            fs::remove_file(entry.path()).map_err(failed("remove", &entry.path()))?;
        }
    }
    Ok(())
}

/// Refuses to start an allocation that cannot end well: that of all that the files lack. Why: a file system that is filled first
/// and cleaned up then fails everybody else on it in between.
fn check_room(dir: &Path, files: &[(PathBuf, u64)]) -> Result<(), OpenError> {
    let mut bytes = 0;
    for (path, len) in files {
        bytes += len.saturating_sub(must_be_file(path)?.unwrap_or(0));
    }
    let free = rt::file::free_space(dir).map_err(failed("look at", dir))?;
    if bytes > free { Err(OpenError::NoSpace { path: dir.into(), bytes }) } else { Ok(()) }
}

fn no_room(error: io::Error, path: &Path, bytes: u64) -> OpenError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            OpenError::NoSpace { path: path.into(), bytes }
        }
        _ => failed("allocate", path)(error),
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError + use<> {
    let path = path.to_path_buf();
    move |source| OpenError::Io { action, path, source }
}

#[cfg(test)]
mod tests;
