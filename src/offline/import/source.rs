//! Which files a bazel-remote directory holds.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::names::{Form, Space, is_ignored, is_prefix, is_storage_prefix, parse, root_directory};
use super::report::{Reason, Report};
use crate::offline::Failure;
use crate::pure::digest::Hash;

/// Threads that read directories.
const READERS: usize = 16;
/// Older versions, and one fork, set this bit while they write a file.
const SETGID: u32 = 0o2000;

/// A file to import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub space: Space,
    pub form: Form,
    pub hash: Hash,
    /// Bytes of the file.
    pub len: u64,
    /// When it was last used, in nanoseconds since 1970.
    pub used: i128,
    /// Which level of directories it stands in.
    level: Level,
    /// The name without the hash.
    suffix: Box<str>,
    /// Files of the same action that are older: for when this one is damaged. Newest first.
    pub older: Vec<Entry>,
}

/// Why not whole paths: there may be some ten million files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    V2,
    /// Before version 2, with and without directories of two digits.
    Digits,
    Flat,
}

impl Entry {
    /// Where the file is.
    pub fn path(&self, from: &Path) -> PathBuf {
        let space = match (self.space, self.level) {
            (Space::Cas, Level::V2) => "cas.v2",
            (Space::Action, Level::V2) => "ac.v2",
            (Space::Raw, Level::V2) => "raw.v2",
            (Space::Cas, Level::Digits | Level::Flat) => "cas",
            (Space::Action, Level::Digits | Level::Flat) => "ac",
            (Space::Raw, Level::Digits | Level::Flat) => "raw",
        };
        let hash = self.hash.to_hex();
        let mut path = from.join(space);
        if self.level != Level::Flat {
            path.push(&hash[..2]);
        }
        path.push(format!("{hash}{}", self.suffix));
        path
    }
}

/// Lists all files below `from`. Blocks. What can be no entry is noted in `report`.
pub fn scan(from: &Path, into: &Path, report: &mut Report) -> Result<Vec<Entry>, Failure> {
    let failed = |source| Failure::Source { path: from.into(), source };
    let real = from.canonicalize().map_err(failed)?;
    if into.canonicalize().is_ok_and(|into| into.starts_with(&real) || real.starts_with(&into)) {
        return Err(Failure::SameDirectory { from: from.into(), into: into.into() });
    }
    let mut open = Vec::new();
    let mut is_known = false;
    for entry in fs::read_dir(from).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let known = name.to_str().and_then(root_directory);
        let is_dir = entry.file_type().map_err(failed)?.is_dir();
        match known.filter(|_| is_dir) {
            Some((space, is_v2)) => {
                is_known = true;
                let level = if is_v2 { Level::V2 } else { Level::Flat };
                open.push(Directory { path: entry.path(), space, level, is_top: true });
            }
            None if name.to_str().is_some_and(is_ignored) => {}
            None if is_dir && name.to_str().is_some_and(is_storage_prefix) => {
                is_known = true;
                report.skip(Reason::StoragePrefix, &entry.path());
            }
            None => report.skip(Reason::UnknownName, &entry.path()),
        }
    }
    if !is_known {
        return Err(Failure::NoSource { from: from.into() });
    }
    // The directories of two digits hold the files: they are shared out among threads.
    let mut entries = Vec::new();
    let mut below = Vec::new();
    for directory in open {
        let (files, directories) = directory.read(report);
        entries.extend(files);
        below.extend(directories);
    }
    let share = below.len().div_ceil(READERS).max(1);
    let parts: Vec<(Vec<Entry>, Report)> = std::thread::scope(|scope| {
        let readers: Vec<_> = below
            .chunks(share)
            .map(|directories| {
                scope.spawn(move || {
                    let mut report = Report::default();
                    let entries = directories.iter().flat_map(|directory| directory.read(&mut report).0).collect();
                    (entries, report)
                })
            })
            .collect();
        readers.into_iter().map(|reader| reader.join().expect("a reader does not panic")).collect()
    });
    for (part, noted) in parts {
        entries.extend(part);
        report.add(noted);
    }
    Ok(entries)
}

/// A directory with files, or with directories of two digits.
struct Directory {
    path: PathBuf,
    space: Space,
    level: Level,
    /// In the root.
    is_top: bool,
}

impl Directory {
    /// The files in it, and the directories of two digits.
    fn read(&self, report: &mut Report) -> (Vec<Entry>, Vec<Directory>) {
        let (mut files, mut below) = (Vec::new(), Vec::new());
        let listed = match fs::read_dir(&self.path) {
            Ok(listed) => listed,
            Err(_) => {
                report.skip(Reason::Unreadable, &self.path);
                return (files, below);
            }
        };
        for entry in listed {
            let Ok(entry) = entry else {
                report.skip(Reason::Unreadable, &self.path);
                continue;
            };
            let (name, path) = (entry.file_name(), entry.path());
            // Of the link itself, where it is one.
            let Ok(metadata) = entry.metadata() else {
                report.skip(Reason::Unreadable, &path);
                continue;
            };
            if metadata.is_dir() {
                match name.to_str() {
                    Some(name) if self.is_top && is_prefix(name) => {
                        let level = if self.level == Level::V2 { Level::V2 } else { Level::Digits };
                        below.push(Self { path, space: self.space, level, is_top: false });
                    }
                    _ if name.to_str().is_some_and(is_ignored) => {}
                    _ => report.skip(Reason::UnknownName, &path),
                }
                continue;
            }
            match self.entry(&name, &metadata) {
                Ok(Some(entry)) => files.push(entry),
                Ok(None) => {}
                Err(reason) => report.skip(reason, &path),
            }
        }
        (files, below)
    }

    fn entry(&self, name: &OsString, metadata: &fs::Metadata) -> Result<Option<Entry>, Reason> {
        let name = name.to_str().ok_or(Reason::UnknownName)?;
        if is_ignored(name) {
            return Ok(None);
        }
        let is_v2 = self.level == Level::V2;
        let (hash, form) = parse(self.space, is_v2, name).filter(|_| metadata.is_file()).ok_or(Reason::UnknownName)?;
        if self.level != Level::Flat && self.path.file_name().is_none_or(|digits| digits != &name[..2]) {
            return Err(Reason::UnknownName);
        }
        if metadata.mode() & SETGID != 0 {
            return Err(Reason::Temporary);
        }
        let nanoseconds = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        let used = nanoseconds(metadata.atime(), metadata.atime_nsec())
            .max(nanoseconds(metadata.mtime(), metadata.mtime_nsec()));
        Ok(Some(Entry {
            space: self.space,
            form,
            hash,
            len: metadata.len(),
            used,
            level: self.level,
            suffix: name[64..].into(),
            older: Vec::new(),
        }))
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A file that was last used at `used`.
    pub fn entry(space: Space, form: Form, hash: u8, len: u64, used: i128) -> Entry {
        let hash = Hash([hash; 32]);
        Entry { space, form, hash, len, used, level: Level::V2, suffix: "-1".into(), older: Vec::new() }
    }

    /// Goal: a file is looked for where it was found. Method: each level by hand.
    #[test]
    fn paths() {
        let hash = "ab".repeat(32);
        let mut entry = entry(Space::Cas, Form::Plain, 0xab, 1, 1);
        assert_eq!(entry.path(Path::new("d")), PathBuf::from(format!("d/cas.v2/ab/{hash}-1")));
        (entry.space, entry.level, entry.suffix) = (Space::Raw, Level::Digits, "".into());
        assert_eq!(entry.path(Path::new("d")), PathBuf::from(format!("d/raw/ab/{hash}")));
        (entry.space, entry.level) = (Space::Action, Level::Flat);
        assert_eq!(entry.path(Path::new("d")), PathBuf::from(format!("d/ac/{hash}")));
    }
}
