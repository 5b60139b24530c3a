//! The protobuf wire format, read in place: for messages where building objects costs more than the work itself.
//!
//! Source: protobuf.dev, "Encoding". Groups, which no message of ours has, are refused.

use std::ops::Range;

use crate::pure::digest::{Digest, DigestError};

/// Why bytes are not a protobuf message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("ends inside a field")]
    Truncated,
    #[error("holds a varint of more than 10 bytes or 64 bits")]
    Varint,
    #[error("holds field number 0 or one beyond 2^29")]
    FieldNumber,
    #[error("holds wire type {0}")]
    WireType(u8),
    #[error("has the wrong wire type in field {0}")]
    FieldType(u32),
}

/// One field's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    Varint(u64),
    Fixed64(u64),
    /// A string, bytes, a message, or a packed list.
    Bytes(&'a [u8]),
    Fixed32(u32),
}

/// One field as it stands in its message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field<'a> {
    pub number: u32,
    pub value: Value<'a>,
    /// Where in the message the field stands, tag included.
    pub range: Range<usize>,
}

impl<'a> Field<'a> {
    /// The value, where the field is a string, bytes or a message.
    pub fn bytes(&self) -> Result<&'a [u8], Malformed> {
        match self.value {
            Value::Bytes(bytes) => Ok(bytes),
            Value::Varint(_) | Value::Fixed64(_) | Value::Fixed32(_) => Err(Malformed::FieldType(self.number)),
        }
    }

    /// The value, where the field is an integer, a bool or an enum.
    pub fn varint(&self) -> Result<u64, Malformed> {
        match self.value {
            Value::Varint(value) => Ok(value),
            Value::Bytes(_) | Value::Fixed64(_) | Value::Fixed32(_) => Err(Malformed::FieldType(self.number)),
        }
    }
}

/// The fields of a message, in the order in which they stand. Ends after the first error.
pub struct Fields<'a> {
    message: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    pub fn of(message: &'a [u8]) -> Self {
        Self { message, at: 0 }
    }

    #[inline]
    fn field(&mut self) -> Result<Field<'a>, Malformed> {
        let start = self.at;
        let (number, wire_type) = split_tag(self.varint()?)?;
        let value = match wire_type {
            0 => Value::Varint(self.varint()?),
            1 => Value::Fixed64(u64::from_le_bytes(self.array()?)),
            2 => {
                let len = self.varint()?;
                let rest = (self.message.len() - self.at) as u64;
                if len > rest {
                    return Err(Malformed::Truncated);
                }
                let bytes = &self.message[self.at..][..len as usize];
                self.at += len as usize;
                Value::Bytes(bytes)
            }
            5 => Value::Fixed32(u32::from_le_bytes(self.array()?)),
            other => return Err(Malformed::WireType(other)),
        };
        Ok(Field { number, value, range: start..self.at })
    }

    #[inline]
    fn varint(&mut self) -> Result<u64, Malformed> {
        let (value, len) = read_varint(&self.message[self.at..])?.ok_or(Malformed::Truncated)?;
        self.at += len;
        Ok(value)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let array = self.message[self.at..].first_chunk().ok_or(Malformed::Truncated)?;
        self.at += N;
        Ok(*array)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at == self.message.len() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.at = self.message.len();
        }
        Some(field)
    }
}

/// The field number and wire type of a tag.
pub fn split_tag(tag: u64) -> Result<(u32, u8), Malformed> {
    let number = tag >> 3;
    if number == 0 || number >= 1 << 29 {
        return Err(Malformed::FieldNumber);
    }
    Ok((number as u32, (tag & 7) as u8))
}

/// A varint and its length in bytes; `None` when more bytes are needed.
#[inline]
pub fn read_varint(bytes: &[u8]) -> Result<Option<(u64, usize)>, Malformed> {
    // Why: tags and most lengths have one byte.
    if let Some(&byte @ 0..0x80) = bytes.first() {
        return Ok(Some((u64::from(byte), 1)));
    }
    read_long_varint(bytes)
}

fn read_long_varint(bytes: &[u8]) -> Result<Option<(u64, usize)>, Malformed> {
    let mut value = 0;
    for (i, &byte) in bytes.iter().take(10).enumerate() {
        if i == 9 && byte > 1 {
            return Err(Malformed::Varint);
        }
        value |= u64::from(byte & 0x7f) << (7 * i);
        if byte < 0x80 {
            return Ok(Some((value, i + 1)));
        }
    }
    Ok(None)
}

/// Appends a varint.
pub fn put_varint(out: &mut impl Extend<u8>, mut value: u64) {
    while value >= 0x80 {
        out.extend([value as u8 | 0x80]);
        value >>= 7;
    }
    out.extend([value as u8]);
}

/// Bytes that a varint takes.
pub const fn varint_len(value: u64) -> usize {
    // Why: 7 bits a byte, and one byte for 0.
    (70 - (value | 1).leading_zeros() as usize) / 7
}

/// Why a serialized `Digest` was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DigestFieldError {
    #[error("the message {0}")]
    Malformed(#[from] Malformed),
    #[error(transparent)]
    Digest(#[from] DigestError),
}

/// Reads a serialized `build.bazel.remote.execution.v2.Digest` (hash = 1, size_bytes = 2).
pub fn read_digest(message: &[u8]) -> Result<Digest, DigestFieldError> {
    // Why: the one form that clients send, and the inner loop of FindMissing: a third less time than field by field.
    if let Some((&[0x0a, 64, ref hash @ .., 0x10], size)) = message.split_first_chunk::<67>()
        && let Some((size_bytes, len)) = read_varint(size)?
        && len == size.len()
    {
        return Ok(Digest::parse(hash, size_bytes as i64)?);
    }
    let (mut hash, mut size_bytes) = (&[][..], 0);
    for field in Fields::of(message) {
        let field = field?;
        match field.number {
            1 => hash = field.bytes()?,
            2 => size_bytes = field.varint()?,
            _ => {}
        }
    }
    Ok(Digest::parse(hash, size_bytes as i64)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::wire::reapi;

    /// Goal: garbage is refused, not followed. Method: one example for each way to be malformed.
    #[test]
    fn refuses_what_is_not_protobuf() {
        let first = |bytes: &[u8]| Fields::of(bytes).next().expect("bytes are there").map(|field| field.number);
        assert_eq!(first(&[0x0a, 5, 1, 2]), Err(Malformed::Truncated));
        assert_eq!(first(&[0x0a]), Err(Malformed::Truncated));
        assert_eq!(first(&[0x09, 1, 2, 3, 4, 5, 6, 7]), Err(Malformed::Truncated));
        assert_eq!(first(&[0xff; 11]), Err(Malformed::Varint));
        assert_eq!(first(&[0x80; 9]), Err(Malformed::Truncated));
        assert_eq!(first(&[0x02, 0]), Err(Malformed::FieldNumber));
        assert_eq!(first(&[0x0b]), Err(Malformed::WireType(3)));
        assert_eq!(first(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]), Err(Malformed::Truncated));
        assert_eq!(
            Fields::of(&[0x08, 1]).next().expect("a field").expect("valid").bytes(),
            Err(Malformed::FieldType(1))
        );
    }

    proptest! {
        /// Goal: varints round-trip and their length is known. Method: random words of every magnitude.
        #[test]
        fn varints_round_trip(word: u64, shift in 0u32..64) {
            let value = word >> shift;
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            prop_assert_eq!(bytes.len(), varint_len(value));
            prop_assert_eq!(read_varint(&bytes), Ok(Some((value, bytes.len()))));
            prop_assert_eq!(read_varint(&bytes[..bytes.len() - 1]), Ok(None));
        }

        /// Goal: never a panic, and the ranges tile the message. Method: random bytes.
        #[test]
        fn garbage_never_panics(message: Vec<u8>) {
            let mut end = 0;
            for field in Fields::of(&message) {
                let Ok(field) = field else { return Ok(()) };
                prop_assert_eq!(field.range.start, end);
                end = field.range.end;
            }
            prop_assert_eq!(end, message.len());
        }

        /// Goal: `read_digest` and prost agree. Method: random digests, both valid and not.
        #[test]
        fn reads_digests_as_prost_does(hash in "[0-9a-f]{63,65}|[0-9a-g]{64}", size_bytes: i64) {
            let message = reapi::Digest { hash: hash.clone(), size_bytes }.encode_to_vec();
            let expected = Digest::parse(hash.as_bytes(), size_bytes).map_err(DigestFieldError::Digest);
            prop_assert_eq!(read_digest(&message), expected);
        }
    }
}
