//! `google.bytestream.WriteRequest`, read while it arrives: payload is handed on in the slices it came in, and nothing
//! waits for the end of the message.
//!
//! Source: googleapis `google/bytestream/bytestream.proto` (resource_name = 1: string, write_offset = 2: int64,
//! finish_write = 3: bool, data = 10: bytes), protobuf encoding as in protobuf.dev/programming-guides/encoding.

use bytes::{Buf, Bytes};

/// A field of the message, as soon as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Field {
    /// A name is complete: read it with `Scanner::name`.
    ResourceName,
    WriteOffset(i64),
    FinishWrite(bool),
    /// The next bytes of `data`, never empty.
    Data(Bytes),
}

/// Why a message was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    #[error("not a valid WriteRequest: {0}")]
    Malformed(&'static str),
    #[error("resource_name: {len} bytes are more than the limit of {max} bytes")]
    NameTooLong { len: u64, max: usize },
}

/// Reads one message after the other. Fields may come in any order, more than once, and cut anywhere; unknown ones are
/// skipped. Accepts what a protobuf decoder accepts.
pub struct Scanner {
    state: State,
    piece: Bytes,
    name: Vec<u8>,
    name_len_max: usize,
    /// Field numbers of the unknown groups that are open.
    groups: Vec<u32>,
}

#[derive(Clone, Copy)]
enum State {
    Tag(Varint),
    /// The value of a varint field.
    Value {
        field: u32,
        varint: Varint,
    },
    /// The length of a length-delimited field.
    Len {
        field: u32,
        varint: Varint,
    },
    Name {
        left: usize,
    },
    Data {
        left: u64,
    },
    Skip {
        left: u64,
    },
}

/// A base-128 number, so far.
#[derive(Clone, Copy, Default)]
struct Varint {
    value: u64,
    shift: u32,
}

const TAG: State = State::Tag(Varint { value: 0, shift: 0 });
const RESOURCE_NAME: u32 = 1;
const WRITE_OFFSET: u32 = 2;
const FINISH_WRITE: u32 = 3;
const DATA: u32 = 10;
/// Groups inside groups at most. Source: the recursion limit of protobuf decoders.
const GROUP_DEPTH_MAX: usize = 100;

impl Scanner {
    /// Names of at most `name_len_max` bytes pass.
    pub fn new(name_len_max: usize) -> Self {
        Self { state: TAG, piece: Bytes::new(), name: Vec::new(), name_len_max, groups: Vec::new() }
    }

    /// Takes the next bytes of the message. Call `next_field` until it gives `None` before.
    pub fn feed(&mut self, piece: Bytes) {
        assert!(self.piece.is_empty(), "the last piece has not been used up");
        self.piece = piece;
    }

    /// The message is complete; the next bytes begin another one.
    pub fn end(&mut self) -> Result<(), ScanError> {
        let at_boundary = matches!(self.state, State::Tag(Varint { shift: 0, .. })) && self.groups.is_empty();
        self.state = TAG;
        self.groups.clear();
        if at_boundary { Ok(()) } else { Err(ScanError::Malformed("it ends in the middle of a field")) }
    }

    /// The name that the last `Field::ResourceName` completed.
    pub fn name(&self) -> &str {
        std::str::from_utf8(&self.name).unwrap_or_default()
    }

    /// The next field, or part of `data`; `None` when it needs more bytes.
    pub fn next_field(&mut self) -> Result<Option<Field>, ScanError> {
        loop {
            match &mut self.state {
                State::Tag(varint) => {
                    let Some(tag) = varint.read(&mut self.piece)? else { return Ok(None) };
                    self.state = self.tagged(tag)?;
                }
                State::Value { field, varint } => {
                    let Some(value) = varint.read(&mut self.piece)? else { return Ok(None) };
                    let field = *field;
                    self.state = TAG;
                    match field {
                        WRITE_OFFSET => return Ok(Some(Field::WriteOffset(value as i64))),
                        FINISH_WRITE => return Ok(Some(Field::FinishWrite(value != 0))),
                        _ => {}
                    }
                }
                State::Len { field, varint } => {
                    let Some(left) = varint.read(&mut self.piece)? else { return Ok(None) };
                    self.state = match *field {
                        RESOURCE_NAME => {
                            let max = self.name_len_max;
                            let fits = usize::try_from(left).ok().filter(|&len| len <= max);
                            self.name.clear();
                            State::Name { left: fits.ok_or(ScanError::NameTooLong { len: left, max })? }
                        }
                        DATA => State::Data { left },
                        _ => State::Skip { left },
                    };
                }
                State::Name { left } => {
                    let count = (*left).min(self.piece.len());
                    self.name.extend_from_slice(&self.piece[..count]);
                    self.piece.advance(count);
                    *left -= count;
                    if *left > 0 {
                        return Ok(None);
                    }
                    self.state = TAG;
                    if std::str::from_utf8(&self.name).is_err() {
                        return Err(ScanError::Malformed("resource_name is not UTF-8"));
                    }
                    return Ok(Some(Field::ResourceName));
                }
                State::Data { left: 0 } | State::Skip { left: 0 } => self.state = TAG,
                State::Data { .. } | State::Skip { .. } if self.piece.is_empty() => return Ok(None),
                State::Data { left } => {
                    let count = self.piece.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= count as u64;
                    return Ok(Some(Field::Data(self.piece.split_to(count))));
                }
                State::Skip { left } => {
                    let count = self.piece.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= count as u64;
                    self.piece.advance(count);
                }
            }
        }
    }

    /// What follows `tag`.
    fn tagged(&mut self, tag: u64) -> Result<State, ScanError> {
        let tag = u32::try_from(tag).map_err(|_| ScanError::Malformed("a field number is too large"))?;
        let (field, wire_type) = (tag >> 3, tag & 7);
        if field == 0 {
            return Err(ScanError::Malformed("field number 0"));
        }
        // Why: inside a group every field is unknown, whatever its number.
        let known = if self.groups.is_empty() { field } else { 0 };
        let expected = match known {
            RESOURCE_NAME | DATA => Some(2),
            WRITE_OFFSET | FINISH_WRITE => Some(0),
            _ => None,
        };
        if expected.is_some_and(|expected| expected != wire_type) {
            return Err(ScanError::Malformed("a field has the wrong wire type"));
        }
        match wire_type {
            0 => Ok(State::Value { field: known, varint: Varint::default() }),
            1 => Ok(State::Skip { left: 8 }),
            2 => Ok(State::Len { field: known, varint: Varint::default() }),
            3 if self.groups.len() == GROUP_DEPTH_MAX => Err(ScanError::Malformed("groups are nested too deep")),
            3 => {
                self.groups.push(field);
                Ok(TAG)
            }
            4 if self.groups.pop() == Some(field) => Ok(TAG),
            4 => Err(ScanError::Malformed("a group ends that did not begin")),
            5 => Ok(State::Skip { left: 4 }),
            _ => Err(ScanError::Malformed("an unknown wire type")),
        }
    }
}

impl Varint {
    /// Reads on; the number when it is complete.
    fn read(&mut self, piece: &mut Bytes) -> Result<Option<u64>, ScanError> {
        while !piece.is_empty() {
            let byte = piece.get_u8();
            // Why: the tenth byte holds the last bit of 64.
            if self.shift == 63 && byte > 1 {
                return Err(ScanError::Malformed("a number is longer than 64 bits"));
            }
            self.value |= u64::from(byte & 0x7f) << self.shift;
            if byte < 0x80 {
                return Ok(Some(self.value));
            }
            self.shift += 7;
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use prost::Message;

    #[derive(Clone, PartialEq, Message)]
    struct WriteRequest {
        #[prost(string, tag = "1")]
        resource_name: String,
        #[prost(int64, tag = "2")]
        write_offset: i64,
        #[prost(bool, tag = "3")]
        finish_write: bool,
        #[prost(bytes = "vec", tag = "10")]
        data: Vec<u8>,
    }

    /// Scans `message` cut at `cuts`, and puts its last values together as a decoder would. `data` of a message that
    /// has the field twice is both after each other.
    fn scan(message: &[u8], cuts: &[usize]) -> Result<WriteRequest, ScanError> {
        let mut scanner = Scanner::new(1000);
        let mut out = WriteRequest::default();
        let mut from = 0;
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (message.len() + 1)).collect();
        cuts.sort_unstable();
        cuts.push(message.len());
        for cut in cuts {
            scanner.feed(Bytes::copy_from_slice(&message[from..cut]));
            from = cut;
            while let Some(field) = scanner.next_field()? {
                match field {
                    Field::ResourceName => out.resource_name = scanner.name().to_owned(),
                    Field::WriteOffset(offset) => out.write_offset = offset,
                    Field::FinishWrite(finish) => out.finish_write = finish,
                    Field::Data(data) => {
                        assert!(!data.is_empty());
                        out.data.extend_from_slice(&data);
                    }
                }
            }
        }
        scanner.end()?;
        Ok(out)
    }

    /// One field in wire form, known or unknown; `data` at most once in a message (see `scan`).
    fn field() -> impl Strategy<Value = Vec<u8>> {
        let encoded = |request: WriteRequest| request.encode_to_vec();
        prop_oneof![
            "[a-z/ü]{0,40}".prop_map(move |name| encoded(WriteRequest { resource_name: name, ..Default::default() })),
            any::<i64>().prop_map(move |at| encoded(WriteRequest { write_offset: at, ..Default::default() })),
            Just(vec![0x18, 1]),
            Just(vec![0x18, 0]),
            // Unknown: a varint, 64 bits, bytes, 32 bits, a group that holds known numbers.
            any::<u64>().prop_map(|value| {
                let mut out = vec![0x20];
                prost::encoding::encode_varint(value, &mut out);
                out
            }),
            any::<[u8; 8]>().prop_map(|value| [&[0x31][..], &value].concat()),
            prop::collection::vec(any::<u8>(), 0..30)
                .prop_map(|value| [&[0x3a, value.len() as u8][..], &value].concat()),
            any::<[u8; 4]>().prop_map(|value| [&[0x3d][..], &value].concat()),
            Just(vec![0x43, 0x08, 5, 0x4b, 0x52, 1, 7, 0x4c, 0x44]),
        ]
    }

    proptest! {
        /// Goal: the scanner reads what prost reads. Method: random fields in random order with random cuts; the seed
        /// of a failure is printed and kept by proptest.
        #[test]
        fn agrees_with_prost(
            before in prop::collection::vec(field(), 0..6),
            data in prop::collection::vec(any::<u8>(), 0..300),
            after in prop::collection::vec(field(), 0..6),
            cuts in prop::collection::vec(any::<usize>(), 0..8),
        ) {
            let data = WriteRequest { data, ..Default::default() }.encode_to_vec();
            let message = [before.concat(), data, after.concat()].concat();
            let expected = WriteRequest::decode(&message[..]).unwrap();
            prop_assert_eq!(scan(&message, &cuts).unwrap(), expected);
        }

        /// Goal: it refuses what prost refuses, and never panics. Method: random bytes and damaged messages.
        #[test]
        fn agrees_with_prost_on_garbage(
            fields in prop::collection::vec(field(), 0..4),
            flip in any::<(usize, u8)>(),
            garbage in prop::collection::vec(any::<u8>(), 0..12),
            cuts in prop::collection::vec(any::<usize>(), 0..4),
        ) {
            let mut message = [fields.concat(), garbage].concat();
            if !message.is_empty() {
                let at = flip.0 % message.len();
                message[at] ^= flip.1;
            }
            let decoded = WriteRequest::decode(&message[..]);
            let scanned = scan(&message, &cuts);
            prop_assert_eq!(scanned.is_ok(), decoded.is_ok(), "{:?} {:?}", scanned, decoded);
        }
    }

    /// Goal: no cut matters, and the limits hold. Method: one full message cut at every place; a name too long.
    #[test]
    fn cuts_do_not_matter() {
        let request =
            WriteRequest { resource_name: "abc".into(), write_offset: -1, finish_write: true, data: vec![7; 300] };
        let message = request.encode_to_vec();
        for first in 0..message.len() {
            assert_eq!(scan(&message, &[first]).as_ref(), Ok(&request));
            assert!(
                first == 0 || scan(&message[..first], &[]).is_err() || WriteRequest::decode(&message[..first]).is_ok()
            );
        }
        let long = WriteRequest { resource_name: "x".repeat(1001), ..Default::default() }.encode_to_vec();
        assert_eq!(scan(&long, &[]), Err(ScanError::NameTooLong { len: 1001, max: 1000 }));
    }
}
