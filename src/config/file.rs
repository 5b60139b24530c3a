//! The configuration file: YAML with bazel-remote's keys. A key stands for the flag of the same name; a flag, or its
//! environment variable, goes before it.

use std::path::{Path, PathBuf};

use clap::builder::OsStr;
use clap::{Arg, Command};

use crate::pure::document::{self, DocumentError, Value};

/// Sections, and what the flags of their keys begin with.
const SECTIONS: [(&str, &str); 1] = [("s3_proxy", "s3.")];

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("--config_file {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("--config_file {path}: {source}")]
    Document { path: PathBuf, source: DocumentError },
    #[error("--config_file {path}: there is no key {key:?}{}", nearest.as_ref().map_or(String::new(), |nearest| {
        format!("; did you mean {nearest:?}?")
    }))]
    UnknownKey { path: PathBuf, key: String, nearest: Option<String> },
    #[error("--config_file {path}: {key:?} must be {expected}")]
    Kind { path: PathBuf, key: String, expected: &'static str },
}

/// `command`, with what the file says as the default of each flag.
pub fn apply(command: Command, path: &Path) -> Result<Command, FileError> {
    let text = std::fs::read_to_string(path).map_err(|source| FileError::Read { path: path.into(), source })?;
    let document = document::parse(&text).map_err(|source| FileError::Document { path: path.into(), source })?;
    let values = flatten(document, &command, path)?;
    Ok(values.into_iter().fold(command, |command, (flag, value)| {
        let id = command.get_arguments().find(|arg| arg.get_long() == Some(&flag)).map(Arg::get_id).cloned();
        command.mut_arg(id.expect("only flags that exist are given"), |arg| arg.default_value(OsStr::from(value)))
    }))
}

/// The flags that the document names, and their values.
fn flatten(document: Value, command: &Command, path: &Path) -> Result<Vec<(String, String)>, FileError> {
    let kind = |key: &str, expected| FileError::Kind { path: path.into(), key: key.to_owned(), expected };
    let entries = match document {
        Value::Null => Vec::new(),
        Value::Map(entries) => entries,
        Value::Text(_) | Value::List(_) => return Err(kind("the file", "a map of keys to values")),
    };
    let flags: Vec<&str> = command.get_arguments().filter_map(Arg::get_long).collect();
    let mut values = Vec::new();
    for (key, value) in entries {
        let Some((_, prefix)) = SECTIONS.iter().find(|(section, _)| *section == key) else {
            values.extend(scalar(&key, &key, value, &flags, path)?);
            continue;
        };
        match value {
            Value::Null => {}
            Value::Map(entries) => {
                for (inner, value) in entries {
                    values.extend(scalar(&format!("{prefix}{inner}"), &inner, value, &flags, path)?);
                }
            }
            Value::Text(_) | Value::List(_) => return Err(kind(&key, "a map of keys to values")),
        }
    }
    Ok(values)
}

/// One flag and its value; nothing when the key stands there without one.
fn scalar(
    flag: &str,
    key: &str,
    value: Value,
    flags: &[&str],
    path: &Path,
) -> Result<Option<(String, String)>, FileError> {
    let is_key = |flag: &&&str| !["config_file", "help", "version"].contains(*flag);
    if !flags.iter().filter(is_key).any(|known| *known == flag) {
        let (prefix, _) = flag.split_at(flag.len() - key.len());
        let sections = SECTIONS.iter().map(|(section, _)| *section).filter(|_| prefix.is_empty());
        let known = flags.iter().filter(is_key).filter_map(|known| known.strip_prefix(prefix)).chain(sections);
        let near = known.filter(|known| prefix.len() > 1 || !known.contains('.'));
        let nearest = near.map(|known| (strsim::damerau_levenshtein(known, key), known)).min();
        // Farther than this it is no slip of the finger.
        let nearest = nearest.filter(|(distance, _)| *distance <= key.len().div_ceil(3));
        let nearest = nearest.map(|(_, known)| known.to_owned());
        return Err(FileError::UnknownKey { path: path.into(), key: key.to_owned(), nearest });
    }
    match value {
        Value::Null => Ok(None),
        Value::Text(text) => Ok(Some((flag.to_owned(), text))),
        Value::List(_) | Value::Map(_) => {
            Err(FileError::Kind { path: path.into(), key: key.to_owned(), expected: "one value" })
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::Flags;
    use super::*;

    fn values(yaml: &str) -> Result<Vec<(String, String)>, FileError> {
        flatten(document::parse(yaml).expect("YAML"), &Flags::command(), Path::new("f"))
    }

    /// Goal: keys become flags, sections their prefixes; an empty value is none. Method: a file in bazel-remote's form.
    #[test]
    fn keys_are_flags() {
        let yaml = "dir: /d\nmax_size: 100\nstorage_mode: zstd\naccess_log_level:\n\
                    s3_proxy:\n  endpoint: h:9000\n  bucket: b\n  disable_ssl: true\n";
        let expected = [
            ("dir", "/d"),
            ("max_size", "100"),
            ("storage_mode", "zstd"),
            ("s3.endpoint", "h:9000"),
            ("s3.bucket", "b"),
            ("s3.disable_ssl", "true"),
        ];
        let expected = expected.map(|(flag, value)| (flag.to_owned(), value.to_owned()));
        assert_eq!(values(yaml).expect("valid"), expected);
        assert!(values("").is_ok_and(|values| values.is_empty()));
    }

    /// Goal: what is misspelt is named with what was meant, within its section. Method: one example each.
    #[test]
    fn unknown_keys() {
        let text = |yaml: &str| values(yaml).expect_err("an unknown key").to_string();
        assert_eq!(text("max_sze: 1"), "--config_file f: there is no key \"max_sze\"; did you mean \"max_size\"?");
        assert!(text("s3_proxy: {buckt: b}").ends_with("did you mean \"bucket\"?"));
        assert!(text("s3proxy: {}").ends_with("did you mean \"s3_proxy\"?"));
        assert!(text("something_else: 1").ends_with("there is no key \"something_else\""));
        assert!(text("config_file: x").contains("there is no key"));
        assert!(text("bucket: b").contains("there is no key"));
        assert!(text("dir: [a]").ends_with("\"dir\" must be one value"));
        assert!(text("[a]").contains("a map of keys"));
    }
}
