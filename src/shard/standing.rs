//! The purges that stand, as the process and its directory have them.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::pure::purge::{Purges, Which};
use crate::rt;
use crate::rt::published::{Published, Reader};

/// The purges that stand. Clones are the same. The default stands in no directory.
#[derive(Clone)]
pub struct StandingPurges {
    path: Option<PathBuf>,
    published: Published<Purges>,
    /// Held by who changes them.
    turn: Arc<Mutex<()>>,
}

/// The file's name, below the cache directory. It carries the version.
const FILE: &str = "purges.v1";

impl Default for StandingPurges {
    fn default() -> Self {
        Self::of(None, Purges::default())
    }
}

impl StandingPurges {
    fn of(path: Option<PathBuf>, purges: Purges) -> Self {
        Self { path, published: Published::new(purges), turn: Arc::default() }
    }

    /// Those of a cache directory. A file that makes no sense is an error: without it backends might bring back what was
    /// purged. Blocks.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join(FILE);
        let purges = match rt::whole::text(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Purges::default(),
            read => Purges::parse(&read?).ok_or_else(|| {
                io::Error::other(format!(
                    "{} is damaged. If no backend has what was purged from here, delete it",
                    path.display()
                ))
            })?,
        };
        Ok(Self::of(Some(path), purges))
    }

    /// A view for one core.
    pub fn reader(&self) -> Reader<Purges> {
        self.published.reader()
    }

    /// Adds one that is made now. When it returns, all cores know it, and a start after a power cut will.
    pub async fn add(&self, which: Which) -> io::Result<()> {
        let (this, now_s) = (self.clone(), rt::time::unix_seconds());
        rt::blocking(move || {
            let _turn = this.turn.lock().unwrap_or_else(PoisonError::into_inner);
            let mut purges = this.reader().with(|_, purges| Purges::clone(purges));
            purges.add(which, now_s);
            if let Some(path) = &this.path {
                write(path, &purges)?;
            }
            this.published.publish(purges);
            Ok(())
        })
        .await
        .map_err(io::Error::other)?
    }
}

fn write(path: &Path, purges: &Purges) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = File::create(&fresh)?;
    file.write_all(purges.to_text().as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&fresh, path)?;
    match path.parent() {
        Some(dir) => File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pure::purge::Origin;
    use crate::rt::cores::block_on;

    /// Goal: a purge stands for every core at once and after a restart, and a damaged file is an error. Method: add, open
    /// again, spoil the file.
    #[test]
    fn stands_after_a_restart() {
        let dir = tempfile::tempdir().expect("a directory");
        let standing = StandingPurges::open(dir.path()).expect("nothing there");
        let reader = standing.reader();
        let covers = |reader: &Reader<Purges>| reader.with(|_, purges| purges.cover(Origin::default()));
        assert!(!covers(&reader));
        block_on(async { standing.add(Which::default()).await.expect("written") });
        assert!(covers(&reader) && covers(&StandingPurges::open(dir.path()).expect("readable").reader()));
        std::fs::write(dir.path().join(FILE), "something else").expect("written");
        assert!(StandingPurges::open(dir.path()).is_err());
    }
}
