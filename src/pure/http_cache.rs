//! The HTTP cache's paths and the request headers that matter to it. Source: bazel-remote's `/cas/` and `/ac/`; RFC 9110.

use std::borrow::Cow;

use super::digest::Hash;

/// Which of the two stores a path names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    Cas,
    Action,
}

/// What a path names: `/[instance/]cas/<hash>` or `/[instance/]ac/<hash>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub space: Space,
    pub hash: Hash,
    pub instance: String,
}

/// Hexadecimal digits of a SHA-256.
const HASH_LEN: usize = 64;

impl Target {
    /// `None` when the path names nothing of the cache. The last `cas/` or `ac/` counts, so `/cas/ac/<hash>` is an action
    /// of the instance `cas`.
    pub fn parse(path: &str) -> Option<Self> {
        let path = decode_percent(path)?;
        let path = path.strip_prefix('/')?;
        let (front, hash) = path.split_at_checked(path.len().checked_sub(HASH_LEN)?)?;
        let hash = Hash::from_hex(hash.as_bytes()).ok()?;
        let (space, instance) = match front.strip_suffix("cas/") {
            Some(instance) => (Space::Cas, instance),
            None => (Space::Action, front.strip_suffix("ac/")?),
        };
        let instance = if instance.is_empty() { instance } else { instance.strip_suffix('/')? };
        Some(Self { space, hash, instance: instance.to_owned() })
    }
}

/// `None` when it is not UTF-8, or a `%` is not followed by two digits.
pub(super) fn decode_percent(path: &str) -> Option<Cow<'_, str>> {
    if !path.contains('%') {
        return Some(path.into());
    }
    let mut bytes = path.bytes();
    let mut decoded = Vec::with_capacity(path.len());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => {
                let mut digit = || char::from(bytes.next()?).to_digit(16);
                (digit()? << 4 | digit()?) as u8
            }
            byte => byte,
        });
    }
    String::from_utf8(decoded).ok().map(Cow::Owned)
}

/// What a `Range` header asks of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    /// No range, several, or one that we do not know: RFC 9110, 14.2 lets a server ignore them.
    Whole,
    Part {
        start: u64,
        len: u64,
    },
    /// No byte of it is there.
    Unsatisfiable,
}

impl Range {
    /// Reads a header for a blob of `size` bytes.
    pub fn parse(header: &str, size: u64) -> Self {
        let Some((unit, spec)) = header.trim().split_once('=') else { return Self::Whole };
        if !unit.eq_ignore_ascii_case("bytes") {
            return Self::Whole;
        }
        let Some((first, last)) = spec.split_once('-') else { return Self::Whole };
        let number = |text: &str| {
            let text = text.trim();
            // Why not `parse` alone: it takes a sign.
            if text.is_empty() || !text.bytes().all(|c| c.is_ascii_digit()) {
                return None;
            }
            Some(text.parse::<u64>().unwrap_or(u64::MAX))
        };
        let (start, end) = match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => (first, last.saturating_add(1).min(size)),
            (Some(first), None) if last.trim().is_empty() => (first, size),
            // The last so many bytes; of nothing there are none.
            (None, Some(0)) if first.trim().is_empty() => return Self::Unsatisfiable,
            (None, Some(count)) if first.trim().is_empty() => (size.saturating_sub(count), size),
            _ => return Self::Whole,
        };
        if start < end { Self::Part { start, len: end - start } } else { Self::Unsatisfiable }
    }
}

/// Whether an `Accept-Encoding` header names zstd, with a weight above 0.
pub fn accepts_zstd(header: &str) -> bool {
    header.split(',').any(|coding| {
        let mut parts = coding.split(';');
        let is_zstd = parts.next().is_some_and(|name| name.trim().eq_ignore_ascii_case("zstd"));
        is_zstd && !parts.any(|part| is_zero_weight(part.trim()))
    })
}

fn is_zero_weight(parameter: &str) -> bool {
    let weight = parameter.strip_prefix("q=").or_else(|| parameter.strip_prefix("Q="));
    weight.is_some_and(|weight| weight.trim().parse::<f32>() == Ok(0.0))
}

/// Whether an `If-None-Match` header names one of `etags`, by weak comparison (RFC 9110, 13.1.2).
pub fn names_etag(header: &str, etags: &[&str]) -> bool {
    let known = |tag: &str| etags.contains(&tag.trim().trim_start_matches("W/"));
    header.trim() == "*" || header.split(',').any(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn target(path: &str) -> Option<(Space, String)> {
        Target::parse(&path.replace("HASH", HEX)).map(|target| (target.space, target.instance))
    }

    /// Goal: paths as bazel-remote reads them. Method: one example of each form, and near misses.
    #[test]
    fn paths() {
        for (path, space, instance) in [
            ("/cas/HASH", Space::Cas, ""),
            ("/ac/HASH", Space::Action, ""),
            ("/some/instance/cas/HASH", Space::Cas, "some/instance"),
            ("/cas/ac/HASH", Space::Action, "cas"),
            ("/a%20b%2fc/ac/HASH", Space::Action, "a b/c"),
            ("//cas/HASH", Space::Cas, ""),
        ] {
            assert_eq!(target(path), Some((space, instance.to_owned())), "{path}");
        }
        let upper = format!("/cas/{}", HEX.to_uppercase());
        for path in ["/", "", "/cas/", "/HASH", "/xcas/HASH", "/cas.v2/HASH", "/cas/HASH/", "/cas/HASH0", "cas/HASH"] {
            assert_eq!(target(path), None, "{path}");
        }
        for path in
            [upper.as_str(), "/%/cas/HASH", "/%ff/cas/HASH", "/%e2%82%ac", "/€€€€€€€€€€€€€€€€€€€€€€€€€€€€€€€€€€€€"]
        {
            assert_eq!(target(path), None, "{path}");
        }
    }

    /// Goal: ranges as RFC 9110 has them: never beyond the blob, never empty. Method: a table, for a blob of 10 bytes.
    #[test]
    fn ranges() {
        let part = |start, len| Range::Part { start, len };
        for (header, expected) in [
            ("bytes=0-0", part(0, 1)),
            ("bytes=2-4", part(2, 3)),
            ("Bytes=2-4", part(2, 3)),
            ("bytes=2-", part(2, 8)),
            ("bytes=-3", part(7, 3)),
            ("bytes=-30", part(0, 10)),
            ("bytes=9-99999999999999999999999", part(9, 1)),
            ("bytes=10-", Range::Unsatisfiable),
            ("bytes=10-20", Range::Unsatisfiable),
            ("bytes=-0", Range::Unsatisfiable),
            ("bytes=4-2", Range::Whole),
            ("bytes=0-1,3-4", Range::Whole),
            ("bytes=+1-2", Range::Whole),
            ("bytes=-", Range::Whole),
            ("bytes=x-y", Range::Whole),
            ("lines=1-2", Range::Whole),
            ("", Range::Whole),
        ] {
            assert_eq!(Range::parse(header, 10), expected, "{header}");
        }
        assert_eq!(Range::parse("bytes=0-", 0), Range::Unsatisfiable);
    }

    /// Goal: zstd is sent to those who asked for it and to nobody else. Method: a table.
    #[test]
    fn codings() {
        for (header, expected) in [
            ("zstd", true),
            ("gzip, deflate, br, zstd", true),
            ("gzip;q=1.0, ZSTD;q=0.5", true),
            ("zstd;q=0", false),
            ("zstd; q=0.000", false),
            ("gzip, deflate, snappy", false),
            ("x-zstd-not", false),
            ("*", false),
            ("", false),
        ] {
            assert_eq!(accepts_zstd(header), expected, "{header}");
        }
    }

    /// Goal: a client that has the blob is told so. Method: lists, weak tags, and the star.
    #[test]
    fn etags() {
        for (header, expected) in [
            ("\"a\"", true),
            ("\"x\", W/\"a\"", true),
            ("*", true),
            ("\"b\"", true),
            ("\"x\"", false),
            ("a", false),
            ("", false),
        ] {
            assert_eq!(names_etag(header, &["\"a\"", "\"b\""]), expected, "{header}");
        }
    }
}
