//! Files that are read again when they change: certificates, passwords, tokens.

use std::fmt::Display;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::limits;
use crate::metrics::{Metric, Snapshot};
use crate::rt;
use crate::rt::published::Published;
use crate::rt::time;

/// Files, and what is made of them.
pub trait Source: Send + 'static {
    /// As the metric and the log name it.
    const WHAT: &'static str;
    type Value: Send + Sync + 'static;
    type Error: Display;

    fn files(&self) -> Vec<&Path>;

    /// Reads the files. Blocks.
    fn read(&self) -> Result<Self::Value, Self::Error>;

    /// What was read and can be used, but is likely not what was meant.
    fn doubts(&self, _: &Self::Value) -> Vec<String> {
        Vec::new()
    }

    /// Reads the files, and logs what is doubtful. Blocks.
    fn read_aloud(&self) -> Result<Self::Value, Self::Error> {
        let value = self.read()?;
        self.doubts(&value).iter().for_each(|doubt| tracing::warn!("{doubt}"));
        Ok(value)
    }
}

/// Some files, and what was made of them last. Clones are the same.
pub struct Kept<S: Source>(Arc<Mutex<State<S>>>);

struct State<S: Source> {
    source: S,
    /// Of each file, when it was read last.
    stamps: Vec<Option<Stamp>>,
    to: Published<S::Value>,
    /// Why the last read failed.
    wrong: Option<String>,
    counts: Arc<Counts>,
}

/// How often files were read again.
#[derive(Default)]
pub struct Counts {
    done: AtomicU64,
    failed: AtomicU64,
}

/// What tells a change of a file. Why not its time alone: a file that is replaced may be as old, and times have steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    /// Of content and of the file's other properties, in seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        let of = std::fs::metadata(path).ok()?;
        Some(Self {
            device: of.dev(),
            inode: of.ino(),
            len: of.len(),
            modified: (of.mtime(), of.mtime_nsec()),
            changed: (of.ctime(), of.ctime_nsec()),
        })
    }
}

fn stamps(source: &impl Source) -> Vec<Option<Stamp>> {
    source.files().into_iter().map(Stamp::of).collect()
}

impl<S: Source> Clone for Kept<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: Source> Kept<S> {
    /// Reads the files for the first time. Blocks.
    pub fn new(source: S) -> Result<(Self, Published<S::Value>), S::Error> {
        // Before the files are read: a change meanwhile is seen at the next look.
        let stamps = stamps(&source);
        let published = Published::new(source.read_aloud()?);
        let state = State { source, stamps, to: published.clone(), wrong: None, counts: Arc::default() };
        Ok((Self(Arc::new(Mutex::new(state))), published))
    }

    /// Reads other files, or the same in another way, if that goes well. Blocks.
    pub fn change(&self, source: S) -> Result<(), S::Error> {
        let mut state = self.lock();
        let stamps = stamps(&source);
        let value = source.read_aloud()?;
        (state.source, state.stamps, state.wrong) = (source, stamps, None);
        state.to.publish(value);
        state.counts.done.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Looks at what is read now.
    pub fn with<R>(&self, work: impl FnOnce(&S) -> R) -> R {
        work(&self.lock().source)
    }

    fn lock(&self) -> MutexGuard<'_, State<S>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Files that are looked after.
pub trait Watched: Send {
    /// Reads the files again if one of them is another than before. What is wrong with them is logged, and what was read
    /// before stays. Blocks.
    fn look(&self);

    /// What it is, and how often it was read again.
    fn counts(&self) -> (&'static str, Arc<Counts>);
}

impl<S: Source> Watched for Kept<S> {
    fn look(&self) {
        let mut state = self.lock();
        let stamps = stamps(&state.source);
        let is_same = stamps == state.stamps;
        // Why again when they are the same: what was wrong may have been the machine.
        if is_same && state.wrong.is_none() {
            return;
        }
        state.stamps = stamps;
        match state.source.read_aloud().map_err(|error| error.to_string()) {
            Ok(value) => {
                state.to.publish(value);
                state.wrong = None;
                state.counts.done.fetch_add(1, Ordering::Relaxed);
                tracing::info!("{} have changed and were read again", S::WHAT);
            }
            Err(error) if is_same && state.wrong.as_ref() == Some(&error) => {}
            Err(error) => {
                state.counts.failed.fetch_add(1, Ordering::Relaxed);
                tracing::error!("{} have changed and cannot be used; those of before stay: {error}", S::WHAT);
                state.wrong = Some(error);
            }
        }
    }

    fn counts(&self) -> (&'static str, Arc<Counts>) {
        (S::WHAT, self.lock().counts.clone())
    }
}

/// How often what was read again, for metrics. Clones are the same.
#[derive(Clone, Default)]
pub struct Reloads(Vec<(&'static str, Arc<Counts>)>);

impl Reloads {
    pub fn of(files: &[Box<dyn Watched>]) -> Self {
        Self(files.iter().map(|of| of.counts()).collect())
    }

    /// For one core to say.
    pub fn report(&self, into: &mut Snapshot) {
        for (what, counts) in &self.0 {
            into.add_for(Metric::Reloads, ["done", what], counts.done.load(Ordering::Relaxed));
            into.add_for(Metric::Reloads, ["failed", what], counts.failed.load(Ordering::Relaxed));
        }
    }
}

/// Looks after the files for ever. Run it detached on one core.
pub async fn watch(mut files: Vec<Box<dyn Watched>>) {
    while !files.is_empty() {
        time::sleep(limits::RELOAD_PERIOD).await;
        let looked = rt::blocking(move || {
            files.iter().for_each(|of| of.look());
            files
        });
        match looked.await {
            Ok(same) => files = same,
            Err(error) => return tracing::error!("files are not looked after any more: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A file with a number in it.
    struct Number(PathBuf);

    impl Source for Number {
        const WHAT: &'static str = "numbers";
        type Value = u64;
        type Error = String;

        fn files(&self) -> Vec<&Path> {
            vec![&self.0]
        }

        fn read(&self) -> Result<u64, String> {
            std::fs::read_to_string(&self.0).map_err(|e| e.to_string())?.parse::<u64>().map_err(|e| e.to_string())
        }
    }

    /// Goal: a change is seen however it is made, a wrong file leaves what was there, and a missing one too. Method: one file
    /// that is written, replaced by another of the same length, broken and removed; then another one in its place.
    #[test]
    fn changes_are_seen() {
        let home = tempfile::tempdir().expect("a directory");
        let path = home.path().join("number");
        let write = |text: &str| {
            std::fs::write(home.path().join("new"), text).expect("written");
            std::fs::rename(home.path().join("new"), &path).expect("renamed");
        };
        assert!(Kept::new(Number(path.clone())).is_err());
        write("11");
        let (kept, published) = Kept::new(Number(path.clone())).expect("a number");
        let reader = published.reader();
        let (_, counts) = kept.counts();
        let now = || {
            let counts = (counts.done.load(Ordering::Relaxed), counts.failed.load(Ordering::Relaxed));
            (reader.with(|_, value| **value), counts)
        };
        let look = || {
            kept.look();
            now()
        };
        assert_eq!(look(), (11, (0, 0)));
        write("12");
        assert_eq!(look(), (12, (1, 0)));
        assert_eq!(look(), (12, (1, 0)));
        write("no number");
        assert_eq!((look(), look()), ((12, (1, 1)), (12, (1, 1))));
        std::fs::remove_file(&path).expect("removed");
        assert_eq!((look(), look()), ((12, (1, 2)), (12, (1, 2))));
        write("13");
        assert_eq!(look(), (13, (2, 2)));
        let other = home.path().join("other");
        assert!(kept.change(Number(other.clone())).is_err() && look() == (13, (2, 2)));
        std::fs::write(&other, "20").expect("written");
        assert!(kept.change(Number(other)).is_ok() && now() == (20, (3, 2)));
        write("14");
        assert_eq!(look(), (20, (3, 2)), "the first file counts no more");
    }
}
