//! ByteStream resource names.
//!
//! ```text
//! read   [INSTANCE/]blobs/[FUNCTION/]HASH/SIZE
//!        [INSTANCE/]compressed-blobs/COMPRESSOR/[FUNCTION/]HASH/SIZE
//! write  [INSTANCE/]uploads/UUID/ and one of the two above, then any /METADATA
//! ```
//! INSTANCE may have several segments, none of them a keyword. Source: REAPI, comments at `ContentAddressableStorage`.

use crate::limits;
use crate::pure::digest::{Digest, DigestError};
use crate::pure::encoding::Encoding;

/// What a `ReadRequest.resource_name` names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadName<'a> {
    /// Empty when the name has none.
    pub instance: &'a str,
    pub encoding: Encoding,
    pub digest: Digest,
}

/// What a `WriteRequest.resource_name` (and that of QueryWriteStatus) names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteName<'a> {
    /// Empty when the name has none.
    pub instance: &'a str,
    /// Whatever the client chose: REAPI asks for a UUID, and clients are not held to it.
    pub uuid: &'a str,
    pub encoding: Encoding,
    pub digest: Digest,
}

/// Why a name was refused. The texts follow `resource_name: ` in an INVALID_ARGUMENT.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("is longer than {} bytes", limits::RESOURCE_NAME_LEN_MAX)]
    TooLong,
    #[error("has none of the segments {0}")]
    NoKeyword(&'static str),
    #[error("{0:?} is not expected here, want {1}")]
    Keyword(&'static str, &'static str),
    #[error("the instance name has an empty segment")]
    Instance,
    #[error("ends before its {0}")]
    Short(&'static str),
    #[error("the upload's UUID must have 1 to {max} bytes", max = limits::UPLOAD_UUID_LEN_MAX)]
    Uuid,
    #[error("the compressor must be zstd (an uncompressed blob is at blobs/), got {0:?}")]
    Compressor(String),
    #[error("the digest function must be sha256, got {0:?}")]
    Function(String),
    #[error("{0}")]
    Hash(DigestError),
    #[error("the size must be a decimal number from 0 to 2^63-1, got {0:?}")]
    Size(String),
    #[error("has segments after its size")]
    Trailing,
}

/// Longest piece of a bad name that an error text repeats, in characters.
const QUOTE_CHARS_MAX: usize = 32;

/// Segments that end the instance name.
const KEYWORDS: [&str; 7] =
    ["blobs", "uploads", "actions", "actionResults", "operations", "capabilities", "compressed-blobs"];
/// `DigestFunction.Value` in lower case, without those that this server has.
const OTHER_FUNCTIONS: [&str; 9] =
    ["sha1", "md5", "vso", "sha384", "sha512", "murmur3", "sha256tree", "blake3", "gitsha1"];

impl<'a> ReadName<'a> {
    pub fn parse(name: &'a str) -> Result<Self, NameError> {
        let (instance, keyword, mut segments) = split_instance(name, "blobs, compressed-blobs")?;
        let (encoding, digest) = parse_blob(keyword, &mut segments, "blobs or compressed-blobs")?;
        match segments.next() {
            None => Ok(Self { instance, encoding, digest }),
            Some(_) => Err(NameError::Trailing),
        }
    }
}

impl<'a> WriteName<'a> {
    pub fn parse(name: &'a str) -> Result<Self, NameError> {
        let (instance, keyword, mut segments) = split_instance(name, "uploads")?;
        if keyword != "uploads" {
            return Err(NameError::Keyword(keyword, "uploads"));
        }
        let uuid = segments.next().ok_or(NameError::Short("UUID"))?;
        if uuid.is_empty() || uuid.len() > limits::UPLOAD_UUID_LEN_MAX {
            return Err(NameError::Uuid);
        }
        let given = segments.next().ok_or(NameError::Short("keyword blobs or compressed-blobs"))?;
        let keyword = *KEYWORDS.iter().find(|&&k| k == given).ok_or(NameError::NoKeyword("blobs, compressed-blobs"))?;
        let (encoding, digest) = parse_blob(keyword, &mut segments, "blobs or compressed-blobs")?;
        Ok(Self { instance, uuid, encoding, digest })
    }
}

type Segments<'a> = std::str::Split<'a, char>;

/// Splits a name at its first keyword: the instance name, the keyword, and what follows.
fn split_instance<'a>(name: &'a str, wanted: &'static str) -> Result<(&'a str, &'static str, Segments<'a>), NameError> {
    if name.len() > limits::RESOURCE_NAME_LEN_MAX {
        return Err(NameError::TooLong);
    }
    let mut at = 0;
    for segment in name.split('/') {
        let after = at + segment.len();
        if let Some(keyword) = KEYWORDS.iter().find(|&&k| k == segment) {
            let rest = name[after..].strip_prefix('/').ok_or(NameError::Short("hash and size"))?;
            return Ok((name[..at].strip_suffix('/').unwrap_or_default(), keyword, rest.split('/')));
        }
        if segment.is_empty() {
            return Err(NameError::Instance);
        }
        at = after + 1;
    }
    Err(NameError::NoKeyword(wanted))
}

fn parse_blob(
    keyword: &'static str,
    segments: &mut Segments<'_>,
    wanted: &'static str,
) -> Result<(Encoding, Digest), NameError> {
    let encoding = match keyword {
        "blobs" => Encoding::Identity,
        "compressed-blobs" => match segments.next().ok_or(NameError::Short("compressor"))? {
            "zstd" => Encoding::Zstd,
            other => return Err(NameError::Compressor(quote(other))),
        },
        other => return Err(NameError::Keyword(other, wanted)),
    };
    let mut hash = segments.next().ok_or(NameError::Short("hash"))?;
    if OTHER_FUNCTIONS.contains(&hash) {
        return Err(NameError::Function(hash.to_owned()));
    }
    // Why: REAPI has clients leave sha256 out, and asks servers to bear those who do not.
    if hash == "sha256" {
        hash = segments.next().ok_or(NameError::Short("hash"))?;
    }
    let size = segments.next().ok_or(NameError::Short("size"))?;
    let size = parse_size(size).ok_or_else(|| NameError::Size(quote(size)))?;
    Ok((encoding, Digest::parse(hash.as_bytes(), size).map_err(NameError::Hash)?))
}

/// A decimal number without sign. Leading zeros are refused: a digest has one name.
fn parse_size(text: &str) -> Option<i64> {
    let canonical = text == "0" || !text.starts_with('0');
    let digits = !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
    if canonical && digits { text.parse().ok() } else { None }
}

/// A copy for an error text, cut to a bearable length.
fn quote(text: &str) -> String {
    text.chars().take(QUOTE_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pure::digest::{EMPTY, Hash};

    const HEX: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn read(name: &str) -> Result<ReadName<'_>, NameError> {
        ReadName::parse(name)
    }

    fn read_error(name: &str) -> NameError {
        read(name).expect_err(name)
    }

    /// Goal: every read form of the grammar. Method: one example for each.
    #[test]
    fn reads_every_form() {
        let digest = Digest { hash: Hash::from_hex(HEX.as_bytes()).expect("hex"), size: 12 };
        for instance in ["", "main", "a/b/c"] {
            let slash = if instance.is_empty() { "" } else { "/" };
            for function in ["", "sha256/"] {
                let plain = format!("{instance}{slash}blobs/{function}{HEX}/12");
                assert_eq!(read(&plain), Ok(ReadName { instance, encoding: Encoding::Identity, digest }));
                let zstd = format!("{instance}{slash}compressed-blobs/zstd/{function}{HEX}/12");
                assert_eq!(read(&zstd), Ok(ReadName { instance, encoding: Encoding::Zstd, digest }));
            }
        }
        assert_eq!(read(&format!("blobs/{EMPTY}")).map(|name| name.digest), Ok(EMPTY));
    }

    /// Goal: every write form, with a UUID that is none and metadata with keywords in it. Method: one example for each.
    #[test]
    fn writes_every_form() {
        for meta in ["", "/", "/a/blobs/b", "/uploads"] {
            let name = format!("x/y/uploads/not a uuid/compressed-blobs/zstd/{HEX}/12{meta}");
            let parsed = WriteName::parse(&name).expect(&name);
            assert_eq!((parsed.instance, parsed.uuid, parsed.encoding), ("x/y", "not a uuid", Encoding::Zstd));
            assert_eq!(parsed.digest.to_string(), format!("{HEX}/12"));
        }
        let name = format!("uploads/blobs/blobs/{HEX}/12");
        assert_eq!(WriteName::parse(&name).map(|name| name.uuid), Ok("blobs"));
    }

    /// Goal: every refusal, with its reason. Method: one example for each.
    #[test]
    fn refuses_with_a_reason() {
        use NameError::*;
        assert!(matches!(read_error(""), Instance));
        assert!(matches!(read_error("main"), NoKeyword(_)));
        assert!(matches!(read_error("blobs"), Short(_)));
        assert!(matches!(read_error(&format!("/blobs/{HEX}/12")), Instance));
        assert!(matches!(read_error(&format!("a//blobs/{HEX}/12")), Instance));
        assert!(matches!(read_error(&format!("blobs/{HEX}")), Short("size")));
        assert!(matches!(read_error(&format!("blobs/{HEX}/12/")), Trailing));
        assert!(matches!(read_error(&format!("blobs/{HEX}/12/meta")), Trailing));
        assert!(matches!(read_error(&format!("actions/blobs/{HEX}/12")), Keyword("actions", _)));
        assert!(matches!(read_error(&format!("uploads/u/blobs/{HEX}/12")), Keyword("uploads", _)));
        assert!(matches!(read_error(&format!("blobs/blake3/{HEX}/12")), Function(_)));
        assert!(matches!(read_error(&format!("blobs/{}/12", HEX.to_uppercase())), Hash(DigestError::Character(20))));
        assert!(matches!(read_error(&format!("blobs/{HEX}/0")), Hash(DigestError::EmptyHash)));
        for compressor in ["identity", "deflate", "brotli", "ZSTD", ""] {
            assert!(matches!(read_error(&format!("compressed-blobs/{compressor}/{HEX}/12")), Compressor(_)));
        }
        for size in ["", "-1", "+1", "012", "00", "1e3", " 1", "9223372036854775808", "99999999999999999999"] {
            assert!(matches!(read_error(&format!("blobs/{HEX}/{size}")), Size(_)), "{size}");
        }
        assert!(read(&format!("blobs/{HEX}/9223372036854775807")).is_ok());
        assert!(matches!(read_error(&"a".repeat(limits::RESOURCE_NAME_LEN_MAX + 1)), TooLong));
        let fill = |used: usize| "a".repeat(limits::RESOURCE_NAME_LEN_MAX - used);
        assert!(read(&format!("{}/blobs/{HEX}/12", fill(format!("/blobs/{HEX}/12").len()))).is_ok());
        assert_eq!(quote(&"ä".repeat(QUOTE_CHARS_MAX + 1)), "ä".repeat(QUOTE_CHARS_MAX));
        let longest = "u".repeat(limits::UPLOAD_UUID_LEN_MAX);
        assert!(WriteName::parse(&format!("uploads/{longest}/blobs/{HEX}/12")).is_ok());
        let write_error = |name: String| WriteName::parse(&name).expect_err(&name);
        assert!(matches!(write_error(format!("blobs/{HEX}/12")), Keyword("blobs", "uploads")));
        assert!(matches!(write_error(format!("uploads//blobs/{HEX}/12")), Uuid));
        assert!(matches!(
            write_error(format!("uploads/{}/blobs/{HEX}/12", "u".repeat(limits::UPLOAD_UUID_LEN_MAX + 1))),
            Uuid
        ));
        assert!(matches!(write_error(format!("uploads/u/actions/{HEX}/12")), Keyword("actions", _)));
        assert!(matches!(write_error(format!("uploads/u/{HEX}/12")), NoKeyword(_)));
    }

    proptest! {
        /// Goal: what is written is read. Method: random parts, put together and taken apart.
        #[test]
        fn round_trips(
            instance in "([a-z]{1,4}x/){0,3}[a-z]{0,4}y",
            uuid in "[^/]{1,32}",
            zstd: bool,
            hash: [u8; 32],
            size in 1..=i64::MAX,
            meta in "(/.{0,9}){0,3}",
        ) {
            let digest = Digest { hash: Hash(hash), size: size as u64 };
            let (encoding, keyword) =
                if zstd { (Encoding::Zstd, "compressed-blobs/zstd") } else { (Encoding::Identity, "blobs") };
            let name = format!("{instance}/{keyword}/{digest}");
            prop_assert_eq!(read(&name), Ok(ReadName { instance: &instance, encoding, digest }));
            let name = format!("{instance}/uploads/{uuid}/{keyword}/{digest}{meta}");
            let parsed = WriteName { instance: &instance, uuid: &uuid, encoding, digest };
            prop_assert_eq!(WriteName::parse(&name), Ok(parsed));
        }

        /// Goal: no text makes the parser panic. Method: random segments out of keywords and any characters.
        #[test]
        fn garbage_never_panics(
            name in "(/|blobs|uploads|compressed-blobs|zstd|sha256|[0-9a-f]{64}|-?[0-9]{0,20}|.){0,12}",
        ) {
            let _ = (ReadName::parse(&name), WriteName::parse(&name));
        }
    }
}
