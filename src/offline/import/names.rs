//! Names of files in a bazel-remote directory.
//!
//! | name | what |
//! |---|---|
//! | `<dir>/cas.v2/<hh>/<hash>-<size>-<random>` | a blob as casblob |
//! | `<dir>/cas.v2/<hh>/<hash>-<random>.v1` | a blob as it is |
//! | `<dir>/ac.v2/<hh>/<hash>-<random>` | an ActionResult |
//! | `<dir>/raw.v2/<hh>/<hash>-<random>` | what was stored over HTTP as an action's result, unchecked |
//! | `<dir>/{cas,ac,raw}/[<hh>/]<hash>` | the same of versions before 2, as they are |
//!
//! hh: the first two hex digits of the hash; random: letters and digits. Source: bazel-remote `cache/disk/load.go`.

use crate::pure::digest::Hash;

/// What a directory of the root holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    Cas,
    Action,
    Raw,
}

/// How a file's content stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// With the raw size that the name tells.
    Casblob(u64),
    Plain,
}

/// A directory in the root: what it holds, and whether in the layout of version 2.
pub fn root_directory(name: &str) -> Option<(Space, bool)> {
    Some(match name {
        "cas.v2" => (Space::Cas, true),
        "ac.v2" => (Space::Action, true),
        "raw.v2" => (Space::Raw, true),
        "cas" => (Space::Cas, false),
        "ac" => (Space::Action, false),
        "raw" => (Space::Raw, false),
        _ => return None,
    })
}

/// The two hex digits of a directory below.
pub fn is_prefix(name: &str) -> bool {
    name.len() == 2 && name.bytes().all(is_hex)
}

/// A directory of files that belong to a storage prefix: the SHA-256 of that.
pub fn is_storage_prefix(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(is_hex)
}

/// What bazel-remote passes over too.
pub fn is_ignored(name: &str) -> bool {
    matches!(name, "lost+found" | ".DS_Store")
}

/// The hash of a file and how it stands. `None`: bazel-remote makes no such name.
pub fn parse(space: Space, is_v2: bool, name: &str) -> Option<(Hash, Form)> {
    let (hash, rest) = (name.get(..64)?, name.get(64..)?);
    let hash = Hash::from_hex(hash.as_bytes()).ok()?;
    if !is_v2 {
        return rest.is_empty().then_some((hash, Form::Plain));
    }
    let is_random = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let parts: Vec<&str> = rest.strip_prefix('-')?.split('-').collect();
    let form = match (space, parts.as_slice()) {
        (Space::Cas, [size, random]) if is_random(random) => {
            let is_number = size.bytes().all(|byte| byte.is_ascii_digit());
            let size = size.parse::<i64>().ok().filter(|&size| size >= 1 && is_number)?;
            Form::Casblob(size as u64)
        }
        (Space::Cas, [random]) if is_random(random.strip_suffix(".v1")?) => Form::Plain,
        (Space::Action | Space::Raw, [random]) if is_random(random) => Form::Plain,
        _ => return None,
    };
    Some((hash, form))
}

fn is_hex(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: names are taken as bazel-remote makes them, and nothing else. Method: one of each, and near misses.
    #[test]
    fn names() {
        let hash = "0123456789abcdef".repeat(4);
        let of = |space, rest: &str| parse(space, true, &format!("{hash}{rest}")).map(|(_, form)| form);
        assert_eq!(of(Space::Cas, "-1234-998877665"), Some(Form::Casblob(1234)));
        assert_eq!(of(Space::Cas, "-9223372036854775807-x"), Some(Form::Casblob(i64::MAX as u64)));
        assert_eq!(of(Space::Cas, "-556677.v1"), Some(Form::Plain));
        assert_eq!(of(Space::Action, "-112233"), Some(Form::Plain));
        assert_eq!(of(Space::Raw, "-aZ9"), Some(Form::Plain));
        for rest in
            ["", "-", "-1234", "-0-1", "-+5-1", "-1-", "-1-2-3", "-1-2.v1", "-.v1", ".v1", "-9223372036854775808-1"]
        {
            assert_eq!(of(Space::Cas, rest), None, "{rest}");
        }
        for rest in ["", "-1-2", "-1.v1", "x"] {
            assert_eq!(of(Space::Action, rest), None, "{rest}");
        }
        assert_eq!(parse(Space::Cas, false, &hash).map(|(_, form)| form), Some(Form::Plain));
        assert_eq!(parse(Space::Cas, false, &format!("{hash}-1")), None);
        assert_eq!(parse(Space::Cas, true, &format!("{}-1-2", hash.to_uppercase())), None);
        assert_eq!(parse(Space::Cas, true, "é".repeat(40).as_str()), None);
        assert!(is_prefix("0a") && !is_prefix("0A") && !is_prefix("0") && is_storage_prefix(&hash));
    }
}
