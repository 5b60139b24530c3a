//! The few REAPI messages a load generator needs, written and read by hand: payload is never copied through an encoder.
//!
//! Source: `google/bytestream/bytestream.proto`, `build/bazel/remote/execution/v2/remote_execution.proto`, the gRPC
//! length-prefixed message (one flag byte, four length bytes, big-endian). Field numbers stand beside each field.

use bytes::{BufMut, Bytes, BytesMut};

/// Bytes of a gRPC message prefix.
pub const PREFIX_LEN: usize = 5;

/// A digest as it stands on the wire: 64 lower-case hex digits and a size in bytes.
#[derive(Clone, Copy)]
pub struct Digest {
    pub hex: [u8; 64],
    pub size: u64,
}

impl Digest {
    pub fn of(data: &[u8]) -> Self {
        use sha2::Digest as _;
        Self::from_hash(&sha2::Sha256::digest(data).into(), data.len() as u64)
    }

    pub fn from_hash(hash: &[u8; 32], size: u64) -> Self {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        let mut hex = [0; 64];
        for (pair, byte) in hex.chunks_exact_mut(2).zip(hash) {
            pair[0] = HEX[usize::from(byte >> 4)];
            pair[1] = HEX[usize::from(byte & 15)];
        }
        Self { hex, size }
    }

    pub fn hex(&self) -> &str {
        std::str::from_utf8(&self.hex).expect("hex digits are ASCII")
    }

    /// Bytes of the message `Digest {hash = 1, size_bytes = 2}`.
    fn encoded_len(&self) -> usize {
        2 + 64 + 1 + varint_len(self.size)
    }

    fn put(&self, out: &mut BytesMut) {
        put_len_field(out, 1, &self.hex);
        put_varint_field(out, 2, self.size);
    }
}

pub fn varint_len(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

pub fn put_varint(out: &mut BytesMut, mut value: u64) {
    while value >= 0x80 {
        out.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

fn put_tag(out: &mut BytesMut, field: u32, wire_type: u32) {
    put_varint(out, u64::from(field << 3 | wire_type));
}

fn put_varint_field(out: &mut BytesMut, field: u32, value: u64) {
    put_tag(out, field, 0);
    put_varint(out, value);
}

fn put_len_field(out: &mut BytesMut, field: u32, value: &[u8]) {
    put_tag(out, field, 2);
    put_varint(out, value.len() as u64);
    out.put_slice(value);
}

fn put_digest_field(out: &mut BytesMut, field: u32, digest: &Digest) {
    put_tag(out, field, 2);
    put_varint(out, digest.encoded_len() as u64);
    digest.put(out);
}

/// Frames `body`, written by `fill`, as one gRPC message.
fn message(capacity: usize, fill: impl FnOnce(&mut BytesMut)) -> Bytes {
    let mut out = BytesMut::with_capacity(PREFIX_LEN + capacity);
    out.put_bytes(0, PREFIX_LEN);
    fill(&mut out);
    let len = u32::try_from(out.len() - PREFIX_LEN).expect("a message is shorter than 4 GiB");
    out[1..PREFIX_LEN].copy_from_slice(&len.to_be_bytes());
    out.freeze()
}

/// `WriteRequest {resource_name = 1, write_offset = 2, finish_write = 3, data = 10}` up to where `data` begins, with the
/// gRPC prefix in front. `name` is sent with the first message only.
pub fn put_write_head(out: &mut BytesMut, name: Option<&str>, offset: u64, finish: bool, data_len: usize) {
    let name_len = name.map_or(0, |name| 1 + varint_len(name.len() as u64) + name.len());
    let offset_len = if offset == 0 { 0 } else { 1 + varint_len(offset) };
    let data_head_len = if data_len == 0 { 0 } else { 1 + varint_len(data_len as u64) };
    let len = name_len + offset_len + if finish { 2 } else { 0 } + data_head_len + data_len;
    out.put_u8(0);
    out.put_u32(u32::try_from(len).expect("a message is shorter than 4 GiB"));
    if let Some(name) = name {
        put_len_field(out, 1, name.as_bytes());
    }
    if offset > 0 {
        put_varint_field(out, 2, offset);
    }
    if finish {
        put_varint_field(out, 3, 1);
    }
    if data_len > 0 {
        put_tag(out, 10, 2);
        put_varint(out, data_len as u64);
    }
}

/// `ReadRequest {resource_name = 1}`.
pub fn read_request(name: &str) -> Bytes {
    message(name.len() + 8, |out| put_len_field(out, 1, name.as_bytes()))
}

/// `FindMissingBlobsRequest {instance_name = 1, blob_digests = 2}`.
pub fn find_missing_request(instance: &str, digests: impl IntoIterator<Item = Digest>) -> Bytes {
    message(80 * 1024, |out| {
        put_instance(out, instance);
        for digest in digests {
            put_digest_field(out, 2, &digest);
        }
    })
}

/// `BatchUpdateBlobsRequest {instance_name = 1, requests = 2 {digest = 1, data = 2, compressor = 3}}`.
pub fn batch_update_request<'a>(
    instance: &str,
    zstd: bool,
    blobs: impl IntoIterator<Item = (&'a Digest, &'a [u8])>,
) -> Bytes {
    message(1 << 20, |out| {
        put_instance(out, instance);
        for (digest, data) in blobs {
            let digest_len = digest.encoded_len();
            let data_len = 1 + varint_len(data.len() as u64) + data.len();
            put_tag(out, 2, 2);
            put_varint(out, (2 + digest_len + data_len + if zstd { 2 } else { 0 }) as u64);
            put_digest_field(out, 1, digest);
            put_len_field(out, 2, data);
            if zstd {
                put_varint_field(out, 3, 1);
            }
        }
    })
}

/// `BatchReadBlobsRequest {instance_name = 1, digests = 2, acceptable_compressors = 3}`.
pub fn batch_read_request<'a>(instance: &str, zstd: bool, digests: impl IntoIterator<Item = &'a Digest>) -> Bytes {
    message(8 * 1024, |out| {
        put_instance(out, instance);
        for digest in digests {
            put_digest_field(out, 2, digest);
        }
        if zstd {
            put_len_field(out, 3, &[1]);
        }
    })
}

/// `UpdateActionResultRequest {instance_name = 1, action_digest = 2, action_result = 3}` with
/// `ActionResult {output_files = 2 {path = 1, digest = 2}}`.
pub fn update_action_request<'a>(
    instance: &str,
    action: &Digest,
    outputs: impl IntoIterator<Item = &'a Digest>,
) -> Bytes {
    let mut result = BytesMut::new();
    for (i, digest) in outputs.into_iter().enumerate() {
        let mut file = BytesMut::new();
        put_len_field(&mut file, 1, format!("bazel-out/k8-fastbuild/bin/package/output_{i}.o").as_bytes());
        put_digest_field(&mut file, 2, digest);
        put_len_field(&mut result, 2, &file);
    }
    message(result.len() + 256, |out| {
        put_instance(out, instance);
        put_digest_field(out, 2, action);
        put_len_field(out, 3, &result);
    })
}

/// `GetActionResultRequest {instance_name = 1, action_digest = 2}`.
pub fn get_action_request(instance: &str, action: &Digest) -> Bytes {
    message(256, |out| {
        put_instance(out, instance);
        put_digest_field(out, 2, action);
    })
}

fn put_instance(out: &mut BytesMut, instance: &str) {
    if !instance.is_empty() {
        put_len_field(out, 1, instance.as_bytes());
    }
}

/// An answer that is not what the protocol says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// One field of a message: a number, or bytes.
pub enum Field<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
}

/// Calls `each` with every varint and length-delimited field of `message`; fixed-width fields are skipped.
pub fn for_each_field<'a>(
    mut message: &'a [u8],
    mut each: impl FnMut(u64, Field<'a>) -> Result<(), Malformed>,
) -> Result<(), Malformed> {
    while !message.is_empty() {
        let tag = take_varint(&mut message)?;
        match tag & 7 {
            0 => each(tag >> 3, Field::Varint(take_varint(&mut message)?))?,
            1 => drop(take(&mut message, 8)?),
            2 => {
                let len = take_varint(&mut message)?;
                each(tag >> 3, Field::Bytes(take(&mut message, len)?))?;
            }
            5 => drop(take(&mut message, 4)?),
            _ => return Err(Malformed("unknown wire type")),
        }
    }
    Ok(())
}

fn take<'a>(message: &mut &'a [u8], len: u64) -> Result<&'a [u8], Malformed> {
    let len = usize::try_from(len).map_err(|_| Malformed("length out of range"))?;
    let (head, rest) = message.split_at_checked(len).ok_or(Malformed("field longer than its message"))?;
    *message = rest;
    Ok(head)
}

fn take_varint(message: &mut &[u8]) -> Result<u64, Malformed> {
    let mut value = 0;
    for (i, &byte) in message.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * i);
        if byte < 0x80 {
            *message = &message[i + 1..];
            return Ok(value);
        }
    }
    Err(Malformed("varint without an end"))
}

/// `WriteResponse {committed_size = 1}`.
pub fn committed_size(message: &[u8]) -> Result<i64, Malformed> {
    let mut committed = 0;
    for_each_field(message, |number, field| {
        if let (1, Field::Varint(value)) = (number, field) {
            committed = value as i64;
        }
        Ok(())
    })?;
    Ok(committed)
}

/// How many digests a `FindMissingBlobsResponse {missing_blob_digests = 2}` names.
pub fn missing_count(message: &[u8]) -> Result<usize, Malformed> {
    let mut count = 0;
    for_each_field(message, |number, _| {
        count += usize::from(number == 2);
        Ok(())
    })?;
    Ok(count)
}

/// One item of a batch answer.
#[derive(Default)]
pub struct Item<'a> {
    /// `google.rpc.Status.code`.
    pub code: u64,
    pub data: &'a [u8],
    pub compressor: u64,
}

/// Calls `each` with the items of a `BatchUpdateBlobsResponse {responses = 1 {status = 2}}` or, `is_read`, of a
/// `BatchReadBlobsResponse {responses = 1 {data = 2, status = 3, compressor = 4}}`.
pub fn for_each_item<'a>(message: &'a [u8], is_read: bool, mut each: impl FnMut(Item<'a>)) -> Result<(), Malformed> {
    let status_field = if is_read { 3 } else { 2 };
    for_each_field(message, |number, field| {
        let (1, Field::Bytes(response)) = (number, field) else { return Ok(()) };
        let mut item = Item::default();
        for_each_field(response, |number, field| {
            match (number, field) {
                (n, Field::Bytes(status)) if n == status_field => for_each_field(status, |number, field| {
                    if let (1, Field::Varint(code)) = (number, field) {
                        item.code = code;
                    }
                    Ok(())
                })?,
                (2, Field::Bytes(data)) => item.data = data,
                (4, Field::Varint(compressor)) => item.compressor = compressor,
                _ => {}
            }
            Ok(())
        })?;
        each(item);
        Ok(())
    })
}

/// Takes `ReadResponse {data = 10}` messages apart as they arrive, without gathering them.
#[derive(Default)]
pub struct ReadParser {
    /// Bytes of a prefix or of a field's tag and length seen so far.
    head: [u8; 12],
    head_len: usize,
    /// Bytes of this message still to come.
    message_left: usize,
    /// Bytes of this `data` still to come.
    data_left: usize,
}

impl ReadParser {
    /// Calls `sink` with each run of payload bytes in `chunk`.
    pub fn feed(&mut self, mut chunk: &[u8], mut sink: impl FnMut(&[u8])) -> Result<(), Malformed> {
        while !chunk.is_empty() {
            if self.data_left > 0 {
                let (data, rest) = chunk.split_at(self.data_left.min(chunk.len()));
                self.data_left -= data.len();
                self.message_left -= data.len();
                sink(data);
                chunk = rest;
                continue;
            }
            self.head[self.head_len] = chunk[0];
            self.head_len += 1;
            chunk = &chunk[1..];
            if self.message_left == 0 {
                self.prefix_byte()?;
            } else {
                self.message_left -= 1;
                self.field_byte()?;
            }
        }
        Ok(())
    }

    /// True between messages.
    pub fn at_end(&self) -> bool {
        self.message_left == 0 && self.head_len == 0
    }

    fn prefix_byte(&mut self) -> Result<(), Malformed> {
        if self.head[0] != 0 {
            return Err(Malformed("a compressed gRPC message that was not asked for"));
        }
        if self.head_len == PREFIX_LEN {
            self.message_left = u32::from_be_bytes([self.head[1], self.head[2], self.head[3], self.head[4]]) as usize;
            self.head_len = 0;
        }
        Ok(())
    }

    fn field_byte(&mut self) -> Result<(), Malformed> {
        if self.head[0] != 0x52 {
            return Err(Malformed("a ReadResponse with a field other than data"));
        }
        if self.head_len > 1 && self.head[self.head_len - 1] < 0x80 {
            let mut rest = &self.head[1..self.head_len];
            let len = usize::try_from(take_varint(&mut rest)?).map_err(|_| Malformed("length out of range"))?;
            if len > self.message_left {
                return Err(Malformed("data longer than its message"));
            }
            self.data_left = len;
            self.head_len = 0;
        } else if self.head_len == self.head.len() || self.message_left == 0 {
            return Err(Malformed("a length without an end"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: payload is found wherever the stream is cut. Method: three messages, cut at every pair of positions.
    #[test]
    fn read_parser_takes_any_cut() {
        let mut stream = BytesMut::new();
        for data in [&b"hello, "[..], b"", &[b'x'; 200]] {
            stream.put_slice(&message(256, |out| {
                if !data.is_empty() {
                    put_len_field(out, 10, data);
                }
            }));
        }
        let want = [&b"hello, "[..], &[b'x'; 200]].concat();
        for first in 0..stream.len() {
            for second in first..stream.len() {
                let mut parser = ReadParser::default();
                let mut got = Vec::new();
                for part in [&stream[..first], &stream[first..second], &stream[second..]] {
                    parser.feed(part, |data| got.extend_from_slice(data)).expect("well formed");
                }
                assert!(parser.at_end() && got == want, "cut at {first} and {second}");
            }
        }
    }

    /// Goal: a bad answer is an error, never a panic. Method: every single-byte change of one message, fed bytewise.
    #[test]
    fn read_parser_survives_damage() {
        let good = message(64, |out| put_len_field(out, 10, &[7; 40]));
        for position in 0..good.len() {
            for value in 0..=255 {
                let mut bad = good.to_vec();
                bad[position] = value;
                let mut parser = ReadParser::default();
                let _ = bad.chunks(1).try_for_each(|byte| parser.feed(byte, |_| {}));
                let _ = for_each_item(&bad, true, |_| {});
            }
        }
    }

    /// Goal: the head of a WriteRequest announces exactly what follows. Method: parse it back for each combination.
    #[test]
    fn write_head_round_trip() {
        for name in [None, Some("uploads/u/blobs/h/1")] {
            for offset in [0, 1, 1 << 40] {
                for finish in [false, true] {
                    for data_len in [0usize, 1, 127, 128, 70_000] {
                        let mut out = BytesMut::new();
                        put_write_head(&mut out, name, offset, finish, data_len);
                        out.put_bytes(9, data_len);
                        assert_eq!(u32::from_be_bytes(out[1..5].try_into().unwrap()) as usize, out.len() - PREFIX_LEN);
                        let mut got = (None, 0, false, 0);
                        for_each_field(&out[PREFIX_LEN..], |number, field| {
                            match (number, field) {
                                (1, Field::Bytes(n)) => got.0 = Some(n.to_vec()),
                                (2, Field::Varint(n)) => got.1 = n,
                                (3, Field::Varint(n)) => got.2 = n == 1,
                                (10, Field::Bytes(n)) => got.3 = n.len(),
                                _ => panic!("field {number}"),
                            }
                            Ok(())
                        })
                        .unwrap();
                        assert_eq!(got, (name.map(|n| n.as_bytes().to_vec()), offset, finish, data_len));
                    }
                }
            }
        }
    }
}
