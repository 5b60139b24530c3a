//! The data files of a cache directory that no server runs on.

use std::io;

use crate::limits::DISK_ALIGN;
use crate::rt::file::{DiskBuf, DiskFile, ReadBuf};
use crate::shard::geometry::Volume;
use crate::shard::recover::Blocks;

/// All data files, opened on this core.
pub struct Files(Vec<DiskFile>);

impl Files {
    /// Why not always for writing: a drive in doubt is best looked at as it is, on a file system that is read-only.
    pub async fn open(volume: &Volume, writes: bool) -> io::Result<Self> {
        let mut files = Vec::new();
        for path in volume.data_paths() {
            let file = if writes { DiskFile::open(&path).await } else { DiskFile::open_for_reading(&path).await };
            files.push(file?);
        }
        Ok(Self(files))
    }

    /// Writes whole blocks of one segment.
    pub async fn write(&self, position: u64, bytes: &[u8]) -> io::Result<()> {
        let (file, offset) = Volume::file_of(position);
        let mut buf = DiskBuf::new(bytes.len());
        buf.bytes_mut().copy_from_slice(bytes);
        self.0[file].write(offset, buf, bytes.len()).await.map(drop).map_err(|failed| failed.error)
    }

    /// Writes `bytes` at any position: the rest of their blocks stays, as zeros where it cannot be read.
    pub async fn patch(&self, position: u64, bytes: &[u8]) -> io::Result<()> {
        let skip = (position % DISK_ALIGN as u64) as usize;
        let start = position - skip as u64;
        let mut blocks = vec![0; (skip + bytes.len()).next_multiple_of(DISK_ALIGN)];
        for (block, at) in blocks.chunks_exact_mut(DISK_ALIGN).zip((start..).step_by(DISK_ALIGN)) {
            if let Some(read) = self.read(at, DISK_ALIGN).await {
                block.copy_from_slice(read.bytes());
            }
        }
        blocks[skip..skip + bytes.len()].copy_from_slice(bytes);
        self.write(start, &blocks).await
    }

    pub async fn sync(&self) -> io::Result<()> {
        for file in &self.0 {
            file.sync().await?;
        }
        Ok(())
    }
}

impl Blocks for Files {
    async fn read(&self, position: u64, len: usize) -> Option<ReadBuf> {
        let (file, offset) = Volume::file_of(position);
        self.0[file].read(offset, len).await.ok()
    }
}
