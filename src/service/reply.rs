//! Reply messages made by hand: protobuf fields around payload that is not copied.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

use super::{Code, Reply};
use crate::limits;
use crate::pure::digest::Digest;
use crate::pure::protobuf::varint_len;

/// Gathers a message. Short parts share a buffer, long payload stays a piece of its own.
#[derive(Default)]
pub struct ReplyBuilder {
    pieces: Reply,
    tail: BytesMut,
    len: usize,
}

impl ReplyBuilder {
    /// Bytes so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True while nothing was put.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Starts a string, bytes or message field of `len` bytes, which the caller puts next. `number` is below 16.
    pub fn field(&mut self, number: u32, len: usize) {
        debug_assert!((1..16).contains(&number), "the tag has one byte");
        let before = self.tail.len();
        self.tail.put_u8((number as u8) << 3 | 2);
        self.put_varint(len as u64);
        self.len += self.tail.len() - before;
    }

    /// Puts an integer or enum field. `number` is below 16.
    pub fn integer(&mut self, number: u32, value: u64) {
        debug_assert!((1..16).contains(&number), "the tag has one byte");
        let before = self.tail.len();
        self.tail.put_u8((number as u8) << 3);
        self.put_varint(value);
        self.len += self.tail.len() - before;
    }

    fn put_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.tail.put_u8(value as u8 | 0x80);
            value >>= 7;
        }
        self.tail.put_u8(value as u8);
    }

    /// Puts bytes by copy.
    pub fn copy(&mut self, bytes: &[u8]) {
        self.tail.put_slice(bytes);
        self.len += bytes.len();
    }

    /// Puts bytes by handle, or by copy where that is cheaper.
    pub fn put(&mut self, bytes: Bytes) {
        if bytes.len() <= limits::REPLY_COPY_LEN_MAX {
            return self.copy(&bytes);
        }
        self.len += bytes.len();
        self.cut();
        self.pieces.push(bytes);
    }

    /// Puts a `Digest` field.
    pub fn digest(&mut self, number: u32, digest: &Digest) {
        let size_len = if digest.size == 0 { 0 } else { 1 + varint_len(digest.size) };
        self.field(number, 2 + HASH_HEX_LEN + size_len);
        self.field(1, HASH_HEX_LEN);
        self.copy(digest.hash.to_hex().as_bytes());
        if digest.size > 0 {
            self.integer(2, digest.size);
        }
    }

    /// The message.
    pub fn finish(mut self) -> Reply {
        self.cut();
        self.pieces
    }

    fn cut(&mut self) {
        if !self.tail.is_empty() {
            self.pieces.push(self.tail.split().freeze());
        }
    }
}

/// A SHA-256 in hex, in bytes.
const HASH_HEX_LEN: usize = 64;

/// Bytes of a length-delimited field with a tag of one byte.
pub const fn field_len(len: usize) -> usize {
    1 + varint_len(len as u64) + len
}

/// Bytes of a message of pieces.
pub fn pieces_len(pieces: &[Bytes]) -> usize {
    pieces.iter().map(Bytes::len).sum()
}

/// A whole message by prost.
pub fn encode(message: &impl Message) -> Reply {
    vec![message.encode_to_vec().into()]
}

/// A `google.rpc.Status` for one item.
pub fn item_status(code: Code, message: impl Into<String>) -> crate::wire::rpc::Status {
    crate::wire::rpc::Status { code: code as i32, message: message.into(), details: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pure::digest::{EMPTY, Hash};
    use crate::wire::reapi::{self, batch_read_blobs_response::Response};

    /// Goal: what is put by hand is what prost reads, short and long payload alike. Method: one message of each kind.
    #[test]
    fn prost_reads_what_is_built() {
        for len in [0, 1, limits::REPLY_COPY_LEN_MAX, limits::REPLY_COPY_LEN_MAX + 1, 300_000] {
            for digest in [EMPTY, Digest { hash: Hash([9; 32]), size: u64::from(u32::MAX) }] {
                let mut reply = ReplyBuilder::default();
                assert!(reply.is_empty());
                reply.digest(1, &digest);
                reply.field(2, len);
                reply.put(vec![7; len].into());
                reply.integer(4, 1);
                let total = reply.len();
                let pieces = reply.finish();
                assert_eq!(pieces_len(&pieces), total);
                assert_eq!(pieces.len(), if len > limits::REPLY_COPY_LEN_MAX { 3 } else { 1 });
                let read = Response::decode(&pieces.concat()[..]).expect("a message");
                let named = reapi::Digest { hash: digest.hash.to_hex(), size_bytes: digest.size as i64 };
                assert_eq!((read.digest, read.data.len(), read.compressor), (Some(named), len, 1));
            }
        }
    }
}
