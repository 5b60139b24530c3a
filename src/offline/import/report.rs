//! What became of the files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::names::Space;
use crate::offline::Verdict;
use crate::offline::report::size;
use crate::pure::json::Json;
use crate::store::StoreError;

/// Why a file was not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Cut short, or not what its header says.
    Damaged,
    WrongHash,
    TooLarge,
    NoSpace,
    UnknownName,
    Unreadable,
    /// In the directory of a storage prefix.
    StoragePrefix,
    /// Was being written when bazel-remote ended.
    Temporary,
    /// An older file of an action that was stored.
    Superseded,
    /// All that was used later fills the cache.
    DoesNotFit,
}

impl Reason {
    fn name(self) -> &'static str {
        match self {
            Self::Damaged => "damaged",
            Self::WrongHash => "wrong_hash",
            Self::TooLarge => "too_large",
            Self::NoSpace => "no_space",
            Self::UnknownName => "unknown_name",
            Self::Unreadable => "unreadable",
            Self::StoragePrefix => "storage_prefix",
            Self::Temporary => "temporary",
            Self::Superseded => "superseded",
            Self::DoesNotFit => "does_not_fit",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Damaged => "damaged: cut short, or not what its header says",
            Self::WrongHash => "the content has another hash than its name",
            Self::TooLarge => "too large for this cache: raise --max_size",
            Self::NoSpace => "no space could be freed for it: run the import again, or raise --max_size",
            Self::UnknownName => "no name that bazel-remote gives",
            Self::Unreadable => "cannot be read: look at permissions and the kernel log",
            Self::StoragePrefix => "belongs to a storage prefix, which this cache does not have",
            Self::Temporary => "was being written when bazel-remote ended",
            Self::Superseded => "an older file of an action that was stored",
            Self::DoesNotFit => "used less recently than all that fits: raise --max_size",
        }
    }

    /// Whether the operator should look at it.
    fn is_bad(self) -> bool {
        !matches!(self, Self::Temporary | Self::Superseded | Self::DoesNotFit)
    }
}

/// Files that are named for each reason.
const EXAMPLES_MAX: usize = 5;

/// Sums over files.
#[derive(Debug, Default)]
pub struct Report {
    /// Files that were stored, and their bytes: blobs, results, and those that nobody checked.
    stored: [(u64, u64); 3],
    /// Files whose content was there already.
    pub present: u64,
    skipped: BTreeMap<Reason, (u64, Vec<PathBuf>)>,
    /// What ended it before all files were seen.
    pub fatal: Option<StoreError>,
    pub took: Duration,
}

/// The names of `Report::stored`.
const SPACES: [&str; 3] = ["cas", "ac", "raw"];

impl Report {
    pub fn stored(&mut self, space: Space, len: u64) {
        let (files, bytes) = &mut self.stored[space as usize];
        *files += 1;
        *bytes += len;
    }

    pub fn skip(&mut self, reason: Reason, path: &Path) {
        let (count, examples) = self.skipped.entry(reason).or_default();
        *count += 1;
        if examples.len() < EXAMPLES_MAX {
            examples.push(path.into());
        }
    }

    pub fn add(&mut self, other: Self) {
        for (mine, theirs) in self.stored.iter_mut().zip(other.stored) {
            *mine = (mine.0 + theirs.0, mine.1 + theirs.1);
        }
        self.present += other.present;
        for (reason, (count, examples)) in other.skipped {
            let (mine, named) = self.skipped.entry(reason).or_default();
            *mine += count;
            named.extend(examples);
            named.truncate(EXAMPLES_MAX);
        }
        self.fatal = self.fatal.take().or(other.fatal);
    }

    pub fn verdict(&self) -> Verdict {
        if self.skipped.keys().any(|reason| reason.is_bad()) { Verdict::Flawed } else { Verdict::Fine }
    }

    pub fn text(&self) -> String {
        let mut out = format!("imported in {:.1} s:\n", self.took.as_secs_f64());
        for (name, (files, bytes)) in SPACES.iter().zip(self.stored) {
            out += &format!("  {name:<4} {files} files, {}\n", size(bytes));
        }
        if self.present > 0 {
            out += &format!("{} were there already\n", self.present);
        }
        for (reason, (count, examples)) in &self.skipped {
            out += &format!("skipped {count}: {}\n", reason.text());
            examples.iter().for_each(|path| out += &format!("  {}\n", path.display()));
        }
        out
    }

    pub fn json(&self) -> String {
        let stored = SPACES.iter().zip(self.stored).fold(Json::object(), |json, (name, (files, bytes))| {
            json.raw(name, Json::object().raw("files", files).raw("bytes", bytes).end())
        });
        let skipped = self.skipped.iter().fold(Json::object(), |json, (reason, (count, examples))| {
            let examples = examples.iter().fold(Json::list(), |list, path| list.text_item(&path.to_string_lossy()));
            json.raw(reason.name(), Json::object().raw("files", count).raw("examples", examples.end()).end())
        });
        Json::object()
            .raw("seconds", format!("{:.3}", self.took.as_secs_f64()))
            .raw("stored", stored.end())
            .raw("present", self.present)
            .raw("skipped", skipped.end())
            .end()
            + "\n"
    }
}
