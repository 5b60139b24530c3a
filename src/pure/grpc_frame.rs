//! gRPC framing: messages in an HTTP/2 body, deadlines and error texts in its headers.
//!
//! Source: grpc/grpc `doc/PROTOCOL-HTTP2.md`, `doc/compression.md`, `doc/statuscodes.md`.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 1 | 1: the message is compressed as `grpc-encoding` says; 0: it is not |
//! | 1 | 4 | length of the message, big-endian |
//! | 5 | length | the message |

use std::fmt::Write as _;
use std::time::Duration;

use bytes::{Buf, Bytes};

/// Length of what stands before each message, in bytes.
pub const PREFIX_LEN: usize = 5;

/// What stands before a message of `len` bytes that is not compressed. `len` fits 32 bits: replies have a limit.
pub fn prefix(len: usize) -> [u8; PREFIX_LEN] {
    let len = u32::try_from(len).expect("a reply message is far below 4 GiB");
    let [a, b, c, d] = len.to_be_bytes();
    [0, a, b, c, d]
}

/// A request body, cut into messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// A message of so many bytes begins.
    Start { len: usize },
    /// Its next bytes, never empty.
    Piece(Bytes),
    /// It is complete.
    End,
}

/// Why a body is not a sequence of gRPC messages that we take.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a message of {len} bytes is larger than the limit of {max} bytes")]
    TooLong { len: usize, max: usize },
    #[error("the request ends in the middle of a message")]
    Truncated,
    #[error("a message has the compressed flag, but there is no grpc-encoding header")]
    CompressedWithoutEncoding,
    #[error("messages compressed with grpc-encoding are not supported; send them as they are")]
    UnsupportedEncoding,
    #[error("the flag byte of a message is {0}, which means nothing")]
    UnknownFlag(u8),
}

/// Cuts a body into messages, whatever the cuts between its chunks. Copies nothing.
pub struct Deframer {
    state: State,
    chunk: Bytes,
    len_max: usize,
    /// `grpc-encoding` names something other than `identity`.
    has_encoding: bool,
}

enum State {
    /// So many bytes of the prefix are here.
    Prefix { bytes: [u8; PREFIX_LEN], have: usize },
    /// So many bytes of the message are still to come.
    Message { left: usize },
}

const PREFIX_START: State = State::Prefix { bytes: [0; PREFIX_LEN], have: 0 };

impl Deframer {
    /// Messages of at most `len_max` bytes pass.
    pub fn new(len_max: usize, has_encoding: bool) -> Self {
        Self { state: PREFIX_START, chunk: Bytes::new(), len_max, has_encoding }
    }

    /// Takes the next chunk of the body. Call `next_part` until it gives `None` before.
    pub fn feed(&mut self, chunk: Bytes) {
        assert!(self.chunk.is_empty(), "the last chunk has not been used up");
        self.chunk = chunk;
    }

    /// The next part; `None` when it needs another chunk.
    pub fn next_part(&mut self) -> Result<Option<Part>, FrameError> {
        match &mut self.state {
            State::Message { left: 0 } => {
                self.state = PREFIX_START;
                Ok(Some(Part::End))
            }
            State::Message { .. } if self.chunk.is_empty() => Ok(None),
            State::Message { left } => {
                let count = (*left).min(self.chunk.len());
                *left -= count;
                Ok(Some(Part::Piece(self.chunk.split_to(count))))
            }
            State::Prefix { bytes, have } => {
                let count = (PREFIX_LEN - *have).min(self.chunk.len());
                self.chunk.copy_to_slice(&mut bytes[*have..*have + count]);
                *have += count;
                if *have < PREFIX_LEN {
                    return Ok(None);
                }
                let [flag, a, b, c, d] = *bytes;
                let len = u32::from_be_bytes([a, b, c, d]) as usize;
                match flag {
                    0 => {}
                    1 if self.has_encoding => return Err(FrameError::UnsupportedEncoding),
                    1 => return Err(FrameError::CompressedWithoutEncoding),
                    other => return Err(FrameError::UnknownFlag(other)),
                }
                if len > self.len_max {
                    return Err(FrameError::TooLong { len, max: self.len_max });
                }
                self.state = State::Message { left: len };
                Ok(Some(Part::Start { len }))
            }
        }
    }

    /// Bytes of the current chunk that have not come out yet.
    pub fn unread(&self) -> usize {
        self.chunk.len()
    }

    /// The body ended here: is that between two messages?
    pub fn end(&self) -> Result<(), FrameError> {
        match self.state {
            State::Prefix { have: 0, .. } => Ok(()),
            _ => Err(FrameError::Truncated),
        }
    }
}

/// The value of a `grpc-timeout` header: up to 8 digits and a unit. `None` when it is anything else.
pub fn parse_timeout(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let amount = digits.iter().fold(0u64, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => Duration::from_secs(amount * 3600),
        b'M' => Duration::from_secs(amount * 60),
        b'S' => Duration::from_secs(amount),
        b'm' => Duration::from_millis(amount),
        b'u' => Duration::from_micros(amount),
        b'n' => Duration::from_nanos(amount),
        _ => return None,
    })
}

/// An error text as it stands in `grpc-message`: all but printable ASCII, and `%`, percent-encoded.
pub fn encode_message(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'%' => out.push_str("%25"),
            b' '..=b'~' => out.push(byte as char),
            _ => write!(out, "%{byte:02X}").expect("writing to a string cannot fail"),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `chunks` and returns each message's bytes, or the error.
    fn messages(deframer: &mut Deframer, chunks: &[&[u8]]) -> Result<Vec<Vec<u8>>, FrameError> {
        let mut out: Vec<Vec<u8>> = Vec::new();
        let mut lens = Vec::new();
        for chunk in chunks {
            deframer.feed(Bytes::copy_from_slice(chunk));
            while let Some(part) = deframer.next_part()? {
                match part {
                    Part::Start { len } => {
                        lens.push(len);
                        out.push(Vec::new());
                    }
                    Part::Piece(piece) => {
                        assert!(!piece.is_empty());
                        out.last_mut().unwrap().extend_from_slice(&piece);
                    }
                    Part::End => assert_eq!(out.last().unwrap().len(), lens.pop().unwrap()),
                }
            }
        }
        deframer.end()?;
        Ok(out)
    }

    /// Goal: cuts between chunks do not matter. Method: three messages, one of them empty, cut into three chunks at
    /// every pair of places (so also into single bytes at each place).
    #[test]
    fn cuts_do_not_matter() {
        let body = b"\0\0\0\0\x03abc\0\0\0\0\0\0\0\0\0\x05defgh";
        for first in 0..=body.len() {
            for second in first..=body.len() {
                let chunks = [&body[..first], &body[first..second], &body[second..]];
                let got = messages(&mut Deframer::new(5, false), &chunks).unwrap();
                assert_eq!(got, [&b"abc"[..], b"", b"defgh"]);
            }
        }
        for cut in 0..body.len() {
            let whole_messages = [0, 8, 13].contains(&cut);
            let got = messages(&mut Deframer::new(5, false), &[&body[..cut]]);
            assert_eq!(got.is_ok(), whole_messages, "{cut}");
        }
    }

    /// Goal: a prefix that we do not take is refused before anything is kept. Method: one example for each rule.
    #[test]
    fn refuses_bad_prefixes() {
        let long = messages(&mut Deframer::new(5, false), &[b"\0\xff\xff\xff\xff"]);
        assert_eq!(long, Err(FrameError::TooLong { len: u32::MAX as usize, max: 5 }));
        let flagged = b"\x01\0\0\0\0";
        assert_eq!(messages(&mut Deframer::new(5, false), &[flagged]), Err(FrameError::CompressedWithoutEncoding));
        assert_eq!(messages(&mut Deframer::new(5, true), &[flagged]), Err(FrameError::UnsupportedEncoding));
        assert_eq!(messages(&mut Deframer::new(5, true), &[b"\x02\0\0\0\0"]), Err(FrameError::UnknownFlag(2)));
        assert_eq!(messages(&mut Deframer::new(5, true), &[b"\0\0\0\0\x01a"]), Ok(vec![b"a".to_vec()]));
    }

    /// Goal: every unit, and nothing but the grammar. Method: examples.
    #[test]
    fn parses_timeouts() {
        let cases: [(&str, Option<Duration>); 13] = [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("60S", Some(Duration::from_secs(60))),
            ("100m", Some(Duration::from_millis(100))),
            ("7u", Some(Duration::from_micros(7))),
            ("99999999n", Some(Duration::from_nanos(99_999_999))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("0S", Some(Duration::ZERO)),
            ("123456789S", None),
            ("S", None),
            ("", None),
            ("1s", None),
            ("-1S", None),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_timeout(text.as_bytes()), expected, "{text}");
        }
    }

    /// Goal: any text becomes a header value that decodes to itself. Method: one text with each kind of character.
    #[test]
    fn encodes_texts() {
        assert_eq!(encode_message("a~ 50% ü\n\u{7f}"), "a~ 50%25 %C3%BC%0A%7F");
    }
}
