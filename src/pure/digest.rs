//! The REAPI `Digest`: a SHA-256 and a size, checked once at the border and a plain value from then on.

use std::fmt;

/// A SHA-256 value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hash(pub [u8; 32]);

/// SHA-256 of zero bytes.
pub const EMPTY_HASH: Hash = Hash([
    0xe3, 0xb0, 0xc4, 0x42, 0x98, 0xfc, 0x1c, 0x14, 0x9a, 0xfb, 0xf4, 0xc8, 0x99, 0x6f, 0xb9, 0x24, 0x27, 0xae, 0x41,
    0xe4, 0x64, 0x9b, 0x93, 0x4c, 0xa4, 0x95, 0x99, 0x1b, 0x78, 0x52, 0xb8, 0x55,
]);

/// The digest of the empty blob, which is always present (REAPI: `ContentAddressableStorage`).
pub const EMPTY: Digest = Digest { hash: EMPTY_HASH, size: 0 };

/// A blob's name: hash and size in bytes. The pair is the name: the right hash with another size is another digest.
///
/// Source: `build.bazel.remote.execution.v2.Digest` (hash = 1: 64 lower-case hex digits, size_bytes = 2: int64 >= 0).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest {
    pub hash: Hash,
    /// Bytes; at most `i64::MAX`.
    pub size: u64,
}

/// Why a digest was refused. The texts follow the field's name in an INVALID_ARGUMENT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    #[error("hash must be 64 lower-case hex digits (SHA-256), got {0} bytes")]
    Length(usize),
    #[error("hash must be 64 lower-case hex digits (SHA-256), found another character at position {0}")]
    Character(usize),
    #[error("size_bytes must not be negative, got {0}")]
    NegativeSize(i64),
    #[error("size_bytes is 0, but the hash is not that of the empty blob")]
    EmptyHash,
}

impl Hash {
    /// Parses 64 lower-case hex digits.
    pub fn from_hex(hex: &[u8]) -> Result<Self, DigestError> {
        let Ok(hex) = <&[u8; 64]>::try_from(hex) else { return Err(DigestError::Length(hex.len())) };
        // Why: arithmetic on whole arrays becomes vector code. This is the inner loop of FindMissing.
        let nibbles = hex.map(nibble);
        if nibbles.iter().fold(0, |all, nibble| all | nibble) > 0xf {
            let position = nibbles.iter().position(|&nibble| nibble > 0xf).unwrap_or_default();
            return Err(DigestError::Character(position));
        }
        let mut out = [0u8; 32];
        for (byte, pair) in out.iter_mut().zip(nibbles.as_chunks::<2>().0) {
            let pair = u16::from_le_bytes(*pair);
            *byte = (pair << 4 | pair >> 8) as u8;
        }
        Ok(Self(out))
    }

    /// The 64 lower-case hex digits.
    pub fn to_hex(self) -> String {
        let mut out = String::with_capacity(64);
        for byte in self.0 {
            out.push(HEX[(byte >> 4) as usize] as char);
            out.push(HEX[(byte & 0xf) as usize] as char);
        }
        out
    }
}

impl Digest {
    /// Checks a digest as it stands on the wire.
    pub fn parse(hash: &[u8], size_bytes: i64) -> Result<Self, DigestError> {
        let size = u64::try_from(size_bytes).map_err(|_| DigestError::NegativeSize(size_bytes))?;
        let digest = Self { hash: Hash::from_hex(hash)?, size };
        if size == 0 && digest.hash != EMPTY_HASH {
            return Err(DigestError::EmptyHash);
        }
        Ok(digest)
    }

    /// True for the empty blob.
    pub fn is_empty(&self) -> bool {
        self.size == 0
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

/// `hash/size`, as in resource names and logs.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.hash, self.size)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.hash, self.size)
    }
}

const HEX: &[u8; 16] = b"0123456789abcdef";

/// The value of a lower-case hex digit; 0xff for every other byte.
const fn nibble(c: u8) -> u8 {
    let (digit, letter) = (c.wrapping_sub(b'0'), c.wrapping_sub(b'a'));
    if digit < 10 {
        digit
    } else if letter < 6 {
        letter + 10
    } else {
        0xff
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::reapi;

    /// As a message of the API has it.
    pub fn wire(digest: Digest) -> Option<reapi::Digest> {
        Some(reapi::Digest { hash: digest.hash.to_hex(), size_bytes: digest.size as i64 })
    }

    /// Any digest but the empty blob's.
    pub fn any_digest() -> impl Strategy<Value = Digest> {
        (any::<[u8; 32]>(), 1..=i64::MAX as u64).prop_map(|(hash, size)| Digest { hash: Hash(hash), size })
    }

    /// Goal: the border lets exactly the REAPI form through. Method: one example for each rule.
    #[test]
    fn parses_only_the_canonical_form() {
        let hex = EMPTY_HASH.to_hex();
        assert_eq!(Digest::parse(hex.as_bytes(), 0), Ok(EMPTY));
        assert_eq!(Digest::parse(hex.to_uppercase().as_bytes(), 0), Err(DigestError::Character(0)));
        assert_eq!(Digest::parse(&hex.as_bytes()[1..], 0), Err(DigestError::Length(63)));
        assert_eq!(Digest::parse(hex.as_bytes(), -1), Err(DigestError::NegativeSize(-1)));
        let other = "a".repeat(64);
        assert_eq!(Digest::parse(other.as_bytes(), 0), Err(DigestError::EmptyHash));
        assert_eq!(Digest::parse(other.as_bytes(), 7).map(|d| d.to_string()), Ok(format!("{other}/7")));
        for byte in (0..=255u8).filter(|byte| !matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            let mut odd = [b'a'; 64];
            odd[63] = byte;
            assert_eq!(Hash::from_hex(&odd), Err(DigestError::Character(63)));
        }
        let every = Hash(std::array::from_fn(|i| i as u8 * 8 + 7));
        assert_eq!(Hash::from_hex(every.to_hex().as_bytes()), Ok(every));
    }
}
