//! The configuration file: YAML with bazel-remote's keys. A key stands for the flag that it names.

use std::path::{Path, PathBuf};

use super::names::{self, SECTIONS};
use crate::pure::document::{self, DocumentError, Value};
use crate::rt;

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
    #[error("--config_file {path}: {key:?} is named {name:?} within the section {section:?}")]
    InSection { path: PathBuf, key: String, section: &'static str, name: String },
    #[error("--config_file {path}: it must be a map of keys to values")]
    NoMap { path: PathBuf },
    #[error("--config_file {path}: {key:?} must be {expected}")]
    Kind { path: PathBuf, key: String, expected: &'static str },
}

/// A flag as the file may name it.
#[derive(Debug, Clone)]
pub struct Known {
    pub flag: String,
    /// It takes several values.
    pub is_list: bool,
}

/// The one flag whose value in the file is a map, which it takes as a document.
const MAP: &str = "s3.backends";

/// The flags that the file names, and their values, those of a list with commas between them.
pub fn read(path: &Path, flags: &[Known]) -> Result<Vec<(String, String)>, FileError> {
    let text = rt::whole::text(path).map_err(|source| FileError::Read { path: path.into(), source })?;
    let document = document::parse(&text).map_err(|source| FileError::Document { path: path.into(), source })?;
    flatten(document, flags, path)
}

fn flatten(document: Value, flags: &[Known], path: &Path) -> Result<Vec<(String, String)>, FileError> {
    let kind = |key: &str, expected| FileError::Kind { path: path.into(), key: key.to_owned(), expected };
    let entries = match document {
        Value::Null => Vec::new(),
        Value::Map(entries) => entries,
        Value::Text(_) | Value::List(_) => return Err(FileError::NoMap { path: path.into() }),
    };
    let mut values = Vec::new();
    for (key, value) in entries {
        let Some((section, _)) = SECTIONS.iter().find(|(section, _)| *section == key) else {
            values.extend(one(None, &key, value, flags, path)?);
            continue;
        };
        match value {
            Value::Null => {}
            Value::Map(entries) => {
                for (inner, value) in entries {
                    values.extend(one(Some(section), &inner, value, flags, path)?);
                }
            }
            Value::Text(_) | Value::List(_) => return Err(kind(&key, "a map of keys to values")),
        }
    }
    Ok(values)
}

/// One flag and its value; nothing when the key stands there without one.
fn one(
    section: Option<&str>,
    key: &str,
    value: Value,
    flags: &[Known],
    path: &Path,
) -> Result<Option<(String, String)>, FileError> {
    let Some(Known { flag, is_list }) = flags.iter().find(|known| names::key(&known.flag) == (section, key)) else {
        // A flag's name, as the command line has it.
        if let (Some(section), name) = names::key(key)
            && flags.iter().any(|known| known.flag == key)
        {
            return Err(FileError::InSection {
                path: path.into(),
                key: key.to_owned(),
                section,
                name: name.to_owned(),
            });
        }
        let here = flags.iter().map(|known| names::key(&known.flag)).filter(|(known, _)| *known == section);
        let sections = SECTIONS.iter().map(|(section, _)| *section).filter(|_| section.is_none());
        let by_prefix = SECTIONS.iter().find(|(_, prefix)| section.is_none() && prefix.strip_suffix('.') == Some(key));
        let nearest = by_prefix.map(|(section, _)| *section);
        let nearest = nearest.or_else(|| names::nearest(key, here.map(|(_, key)| key).chain(sections)));
        let nearest = nearest.map(str::to_owned);
        return Err(FileError::UnknownKey { path: path.into(), key: key.to_owned(), nearest });
    };
    let kind = |expected| FileError::Kind { path: path.into(), key: key.to_owned(), expected };
    let text = match value {
        Value::Null => return Ok(None),
        Value::Text(text) => text,
        Value::List(items) if *is_list => {
            let texts = items.into_iter().map(|item| match item {
                Value::Text(text) => Ok(text),
                Value::Null | Value::List(_) | Value::Map(_) => Err(kind("a list of values")),
            });
            texts.collect::<Result<Vec<_>, _>>()?.join(",")
        }
        Value::Map(_) if flag == MAP => value.to_json(),
        Value::List(_) | Value::Map(_) => return Err(kind("one value")),
    };
    Ok(Some((flag.clone(), text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(yaml: &str) -> Result<Vec<(String, String)>, FileError> {
        let flags = ["dir", "max_size", "access_log_level", "buckets"];
        let flags = flags.iter().chain(&["s3.endpoint", "s3.bucket", "s3.disable_ssl", "s3.backends"]);
        let flags: Vec<Known> =
            flags.map(|flag| Known { flag: (*flag).to_owned(), is_list: *flag == "buckets" }).collect();
        flatten(document::parse(yaml).expect("YAML"), &flags, Path::new("f"))
    }

    /// Goal: keys become flags, sections their prefixes; an empty value is none. Method: a file in bazel-remote's form.
    #[test]
    fn keys_are_flags() {
        let yaml = "dir: /d\nmax_size: 100\nbuckets: [0.5, 1]\naccess_log_level:\n\
                    s3_proxy:\n  endpoint: h:9000\n  bucket: b\n  disable_ssl: true\n";
        let expected = [
            ("dir", "/d"),
            ("max_size", "100"),
            ("buckets", "0.5,1"),
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
        // The one key of a map keeps its value as a document.
        let map = values("s3_proxy: {backends: {a: {default: true}}}").expect("valid");
        assert_eq!(map, [("s3.backends".to_owned(), "{\"a\": {\"default\": \"true\"}}".to_owned())]);
        assert!(text("something_else: 1").ends_with("there is no key \"something_else\""));
        assert!(text("bucket: b").contains("there is no key"));
        let named = "--config_file f: \"s3.bucket\" is named \"bucket\" within the section \"s3_proxy\"";
        assert_eq!(text("s3.bucket: b"), named);
        assert_eq!(text("s3: {bucket: b}"), "--config_file f: there is no key \"s3\"; did you mean \"s3_proxy\"?");
        assert!(text("dir: [a]").ends_with("\"dir\" must be one value"));
        assert!(text("buckets: [[a]]").ends_with("\"buckets\" must be a list of values"));
        assert!(text("[a]").contains("a map of keys"));
    }
}
