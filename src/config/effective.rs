//! What every setting is, and who said so.

use std::path::PathBuf;

use super::names;

/// Who gave a setting its value. In the order in which they count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Flag,
    Variable(String),
    File(PathBuf),
    Default,
}

/// One setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub flag: String,
    /// As it was written; `None` where there is none, or where it follows from the machine.
    pub value: Option<String>,
    pub source: Source,
    /// Its value is shown to nobody.
    pub is_secret: bool,
}

/// All settings, in the order of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effective(pub(super) Vec<Entry>);

impl Effective {
    /// Those that somebody has set.
    pub fn given(&self) -> impl Iterator<Item = &Entry> {
        self.0.iter().filter(|entry| entry.source != Source::Default)
    }
}

impl Effective {
    /// What `newer` says of settings whose value is another one there: before and after.
    pub fn changes(&self, newer: &Self) -> Vec<(Entry, Entry)> {
        let missing = |flag: &str| Entry::absent(flag);
        let find = |all: &Self, flag: &str| all.0.iter().find(|entry| entry.flag == flag).cloned();
        // Settings of others are listed only where they are given.
        let gone = self.0.iter().filter(|entry| find(newer, &entry.flag).is_none());
        let gone = gone.map(|entry| (entry.clone(), missing(&entry.flag)));
        let other = newer.0.iter().filter_map(|after| {
            let before = find(self, &after.flag).unwrap_or_else(|| missing(&after.flag));
            (before.value != after.value).then(|| (before, after.clone()))
        });
        gone.chain(other).collect()
    }

    /// Replaces the entry of the same flag.
    pub fn set(&mut self, entry: Entry) {
        match self.0.iter_mut().find(|known| known.flag == entry.flag) {
            Some(known) => *known = entry,
            None => self.0.push(entry),
        }
    }
}

impl Entry {
    fn absent(flag: &str) -> Self {
        Self { flag: flag.to_owned(), value: None, source: Source::Default, is_secret: false }
    }

    /// The value for people to read.
    pub fn shown(&self) -> &str {
        match &self.value {
            None => "not set",
            Some(_) if self.is_secret => "(secret)",
            Some(value) => value,
        }
    }

    /// Where the operator finds what was written.
    pub fn place(&self) -> String {
        self.source.place(&self.flag)
    }
}

impl Source {
    /// The lower one counts.
    pub fn rank(&self) -> usize {
        match self {
            Self::Flag => 0,
            Self::Variable(_) => 1,
            Self::File(_) => 2,
            Self::Default => 3,
        }
    }

    /// Where the operator finds what was written about `flag`.
    pub fn place(&self, flag: &str) -> String {
        match (self, names::key(flag)) {
            (Self::Flag | Self::Default, _) => format!("--{flag}"),
            (Self::Variable(name), _) => name.clone(),
            (Self::File(path), (None, key)) => format!("{}: {key}", path.display()),
            (Self::File(path), (Some(section), key)) => format!("{}: {section}.{key}", path.display()),
        }
    }
}
