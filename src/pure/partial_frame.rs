//! Tells how much an HTTP/2 peer has begun to send that is not whole yet: a frame, or a header block of several.
//!
//! Why by what is read: HTTP/2 gathers both in memory, charges them to no window, and shows them to nobody before their end.

use super::header_table::HeaderTable;
use super::turn::{Most, Turn};
use crate::limits;

/// Source: RFC 9113, 3.4.
const PREFACE_LEN: usize = 24;
/// Length of a frame's head. Source: RFC 9113, 4.1: a length of 24 bits, type, flags, a stream of 32 bits.
const HEAD_LEN: usize = 9;
/// Types of frames, and the flag that ends a header block. Source: RFC 9113, 6.1, 6.2 and 6.10.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;
/// What stands before a header block in a HEADERS frame: a byte with the length of the padding behind it, and five of a priority,
/// the first four of which are the number of another stream. Source: RFC 9113, 6.2.
const PADDED: u8 = 8;
const PRIORITY: u8 = 0x20;
/// The bits of a stream's number. Source: RFC 9113, 4.1.
const STREAM_MASK: u32 = u32::MAX >> 1;

/// What one connection has begun to send.
#[derive(Debug)]
pub struct PartialFrame {
    preface_left: usize,
    head: [u8; HEAD_LEN],
    head_len: usize,
    payload_left: usize,
    /// Bytes of the running frame, or of the header block up to its end; 0 between them.
    len: usize,
    /// The stream of the running frame, and what that is.
    stream: u32,
    is_data: bool,
    /// It is a part of a header block.
    is_block: bool,
    /// The running header block goes on behind the running frame.
    goes_on: bool,
    /// The latest stream that was opened, and whether the running header block is of one that was open.
    last_stream: u32,
    is_trailers: bool,
    /// Of a frame of a header block: whether a length of padding stands first, how many bytes stand before the block, and how many of
    /// the block are to come.
    is_padded: bool,
    front_left: usize,
    block_left: usize,
    /// The first bytes of a priority.
    depends_on: u32,
    table: HeaderTable,
    /// Trailers were too long, of which all may have come at once.
    had_long_trailers: bool,
}

impl Default for PartialFrame {
    fn default() -> Self {
        Self {
            preface_left: PREFACE_LEN,
            head: [0; HEAD_LEN],
            head_len: 0,
            payload_left: 0,
            len: 0,
            stream: 0,
            is_data: false,
            is_block: false,
            goes_on: false,
            last_stream: 0,
            is_trailers: false,
            is_padded: false,
            front_left: 0,
            block_left: 0,
            depends_on: 0,
            table: HeaderTable::default(),
            had_long_trailers: false,
        }
    }
}

impl PartialFrame {
    /// The next bytes that came, cut anywhere, as far as they belong to this turn: up to the end of the frame that is its last.
    /// Tells how many these are.
    pub fn pass(&mut self, all: &[u8], turn: &mut Turn, most: &Most) -> usize {
        let mut read = all;
        let of_preface = self.preface_left.min(read.len());
        self.preface_left -= of_preface;
        read = &read[of_preface..];
        while !read.is_empty() {
            let of_payload = self.payload_left.min(read.len());
            self.payload_left -= of_payload;
            let (payload, behind) = read.split_at(of_payload);
            if self.is_block && !payload.is_empty() {
                self.pass_block(payload);
            }
            read = behind;
            if of_payload > 0 && self.payload_left == 0 {
                self.end_frame(turn);
                if turn.is_over(most) {
                    break;
                }
            }
            let of_head = (HEAD_LEN - self.head_len).min(read.len());
            self.head[self.head_len..self.head_len + of_head].copy_from_slice(&read[..of_head]);
            self.head_len += of_head;
            read = &read[of_head..];
            if self.head_len == HEAD_LEN {
                self.head_len = 0;
                self.begin();
                if self.payload_left == 0 {
                    self.end_frame(turn);
                    if turn.is_over(most) {
                        break;
                    }
                }
            }
        }
        let count = all.len() - read.len();
        turn.bytes_came(count);
        count
    }

    /// Bytes that HTTP/2 will have gathered when what has begun is whole, as far as that is known; 0 when nothing has begun.
    pub fn gathered(&self) -> usize {
        self.len
    }

    /// No peer may send this, or has a reason to, when the connection's window is at most `window` bytes.
    pub fn is_too_long(&self, window: usize) -> bool {
        let len = if self.is_data { window } else { limits::HTTP2_OTHER_FRAME_LEN_MAX };
        self.had_long_trailers || self.len > HEAD_LEN + len
    }

    /// HTTP/2 asks for more: it has decoded all that is whole.
    pub fn settle(&mut self) {
        if !self.goes_on && (self.len == 0 || !self.is_block) {
            self.table.settle();
        }
    }

    /// Bytes of the buffers that HTTP/2's table of header fields may hold on to.
    pub fn table_held(&self) -> usize {
        self.table.held()
    }

    /// The next bytes of a frame that is part of a header block.
    fn pass_block(&mut self, mut payload: &[u8]) {
        while self.front_left > 0
            && let Some((&octet, behind)) = payload.split_first()
        {
            payload = behind;
            self.front_left -= 1;
            if std::mem::take(&mut self.is_padded) {
                self.block_left = self.block_left.saturating_sub(usize::from(octet));
            } else if self.front_left > 0 {
                self.depends_on = self.depends_on << 8 | u32::from(octet);
                if self.front_left == 1 && self.depends_on & STREAM_MASK == self.stream {
                    // HTTP/2 resets the stream and decodes nothing of this.
                    self.block_left = 0;
                }
            }
        }
        let block = &payload[..payload.len().min(self.block_left)];
        self.block_left -= block.len();
        self.table.pass(block);
    }

    fn end_frame(&mut self, turn: &mut Turn) {
        if self.goes_on {
            return;
        }
        if self.is_block {
            turn.block_ends();
        } else if self.is_data {
            turn.data_ends(self.stream, self.len - HEAD_LEN);
        }
        self.len = 0;
        self.is_trailers = false;
    }

    fn begin(&mut self) {
        let [a, b, c, kind, flags, stream @ ..] = self.head;
        let stream = u32::from_be_bytes(stream) & STREAM_MASK;
        self.payload_left = u32::from_be_bytes([0, a, b, c]) as usize;
        self.is_block = kind == HEADERS || kind == CONTINUATION;
        self.len = self.len.saturating_add(HEAD_LEN + self.payload_left);
        self.table.frame_begins(self.len);
        if self.is_block {
            self.is_padded = kind == HEADERS && flags & PADDED != 0;
            let has_priority = kind == HEADERS && flags & PRIORITY != 0;
            self.front_left = usize::from(self.is_padded) + if has_priority { 5 } else { 0 };
            self.block_left = self.payload_left.saturating_sub(self.front_left);
            self.depends_on = 0;
        }
        self.is_data = kind == DATA && !self.goes_on;
        self.stream = stream;
        if kind == HEADERS && !self.goes_on {
            self.is_trailers = stream <= self.last_stream;
            self.last_stream = self.last_stream.max(stream);
        }
        self.had_long_trailers |= self.is_trailers && self.len > HEAD_LEN + limits::HTTP2_TRAILERS_LEN_MAX;
        self.goes_on = if self.is_block { flags & END_HEADERS == 0 } else { self.goes_on };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Most = Most { frames: usize::MAX, blocks: usize::MAX, len: usize::MAX };

    fn frame(kind: u8, flags: u8, len: usize) -> Vec<u8> {
        let mut frame = (len as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags, 0, 0, 0, 1]);
        // Looks like heads.
        frame.extend([0, 0, 9, 1, 0].iter().cycle().take(len));
        frame
    }

    /// Goal: what has begun is told to the byte, and nothing else is. Method: a stream of frames and header blocks, cut into
    /// pieces of several lengths; at each cut what is told is compared with the bounds of what was sent.
    #[test]
    fn tells_what_has_begun() {
        let units: [&[Vec<u8>]; 8] = [
            &[frame(4, 0, 12)],
            &[frame(4, 1, 0)],
            &[frame(0, 0, 70_000)],
            &[frame(1, 4, 300)],
            &[frame(1, 0, 500), frame(9, 0, 0), frame(9, 0, 700), frame(9, 4, 20)],
            &[frame(1, 1, 0), frame(9, 4, 0)],
            &[frame(0xee, 4, 16_384)],
            &[frame(0, 1, 0)],
        ];
        let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        // By the count of bytes that came: what is to be told.
        let mut expected = vec![0; sent.len() + 1];
        for unit in units {
            let mut told = 0;
            for (at, frame) in unit.iter().enumerate() {
                let is_last = at + 1 == unit.len();
                for count in 1..=frame.len() {
                    if count == HEAD_LEN {
                        told += frame.len();
                    }
                    let is_begun = told > 0 && !(is_last && count == frame.len());
                    expected.push(if is_begun { told } else { 0 });
                }
                sent.extend(frame);
            }
        }
        for piece in [1, 5, 9, 10, 1000, 65_536] {
            let (mut partial, mut count) = (PartialFrame::default(), 0);
            for read in sent.chunks(piece) {
                partial.pass(read, &mut Turn::default(), &ALL);
                count += read.len();
                assert_eq!(partial.gathered(), expected[count], "{count} in pieces of {piece}");
            }
            assert_eq!(partial.gathered(), 0);
        }
    }

    /// Goal: only what cannot be meant is too long. Method: the longest frames that may come, and one byte more.
    #[test]
    fn too_long() {
        let other = limits::HTTP2_OTHER_FRAME_LEN_MAX;
        let trailers = limits::HTTP2_TRAILERS_LEN_MAX;
        for (frames, is_too_long) in [
            (vec![frame(0, 0, 1000)], false),
            (vec![frame(0, 0, 1001)], true),
            (vec![frame(0xee, 0, other)], false),
            (vec![frame(0xee, 0, other + 1)], true),
            (vec![frame(1, 4, 100), frame(0, 0, 5), frame(1, 5, trailers)], false),
            (vec![frame(1, 4, 100), frame(0, 0, 5), frame(1, 5, trailers + 1)], true),
            (vec![frame(1, 4, 100), frame(1, 1, trailers), frame(9, 0, 1)], true),
            (vec![frame(1, 0, other / 2), frame(9, 0, other / 2 - HEAD_LEN)], false),
            (vec![frame(1, 0, other / 2), frame(9, 0, other / 2 - HEAD_LEN + 1)], true),
        ] {
            let mut partial = PartialFrame::default();
            partial.pass(&[0; PREFACE_LEN], &mut Turn::default(), &ALL);
            let sent = frames.concat();
            partial.pass(&sent[..sent.len() - 1], &mut Turn::default(), &ALL);
            assert_eq!(partial.is_too_long(1000), is_too_long, "{}", sent.len());
        }
    }

    /// Goal: what is taken ends with the last frame of its turn, whatever was cut before, and the rest is the next turn's. Method: frames
    /// of all kinds, in pieces of several lengths and turns of several bounds; the lengths of the turns are compared with what the frames
    /// make them.
    #[test]
    fn takes_a_turn_at_a_time() {
        let frames = [
            frame(0, 0, 10),
            frame(0, 0, 0),
            frame(1, 0, 40),
            frame(9, 4, 5),
            frame(0xee, 0, 3000),
            frame(0, 1, 700),
            frame(1, 5, 9),
            frame(8, 0, 4),
            frame(0, 0, 1),
        ];
        // What each frame ends: a DATA frame, a header block, or nothing.
        let ends = [(1, 0), (1, 0), (0, 0), (0, 1), (0, 0), (1, 0), (0, 1), (0, 0), (1, 0)];
        let sent: Vec<u8> = [vec![0; PREFACE_LEN], frames.concat()].concat();
        for most in [(1, 9), (2, 9), (9, 1), (3, 2), (9, 9)].map(|(frames, blocks)| Most { frames, blocks, ..ALL }) {
            let (mut expected, mut len, mut sum) = (Vec::new(), PREFACE_LEN, (0, 0));
            for (frame, (data, block)) in frames.iter().zip(ends) {
                len += frame.len();
                sum = (sum.0 + data, sum.1 + block);
                if sum.0 >= most.frames || sum.1 >= most.blocks {
                    expected.push(std::mem::take(&mut len));
                    sum = (0, 0);
                }
            }
            expected.extend((len > 0).then_some(len));
            for piece in [1, 4, 9, 50, 5000] {
                let (mut partial, mut turn, mut at) = (PartialFrame::default(), Turn::default(), 0);
                let mut turns = vec![0];
                while at < sent.len() {
                    let count = partial.pass(&sent[at..sent.len().min(at + piece)], &mut turn, &most);
                    at += count;
                    *turns.last_mut().unwrap() += count;
                    if turn.is_over(&most) {
                        turn.end().for_each(drop);
                        turns.push(0);
                    }
                }
                turns.retain(|len| *len > 0);
                assert_eq!(turns, expected, "{most:?} in pieces of {piece}");
            }
        }
    }

    /// Goal: header blocks are followed whatever stands around them, and only when HTTP/2 has decoded them. Method: a path that is put into
    /// the table in each form of frame, in pieces of several lengths; and a form that HTTP/2 does not decode.
    #[test]
    fn follows_header_blocks() {
        // A literal with incremental indexing, whose name is the static entry of `:path`.
        let block = [0x44, 2, b'/', b'a'];
        let head = |len: usize, kind: u8, flags: u8| [&[0, 0, len as u8, kind, flags, 0, 0, 0, 3][..]].concat();
        let framed =
            |kind: u8, flags: u8, payload: &[u8]| [head(payload.len(), kind, flags), payload.to_vec()].concat();
        let priority = |on: u8| [0, 0, 0, on, 16];
        let padded = |front: &[u8]| [&[3], front, &block, &[0x44; 3]].concat();
        for (what, frames, held) in [
            ("plain", framed(HEADERS, END_HEADERS, &block), 1),
            ("padded", framed(HEADERS, END_HEADERS | PADDED, &padded(&[])), 1),
            ("with a priority", framed(HEADERS, END_HEADERS | PRIORITY, &[&priority(1)[..], &block].concat()), 1),
            ("with both", framed(HEADERS, END_HEADERS | PRIORITY | PADDED, &padded(&priority(1))), 1),
            ("depends on itself", framed(HEADERS, END_HEADERS | PRIORITY, &[&priority(3)[..], &block].concat()), 0),
            (
                "continued",
                [framed(HEADERS, 0, &block[..1]), framed(CONTINUATION, 0, &[]), framed(CONTINUATION, 12, &block[1..])]
                    .concat(),
                1,
            ),
            ("DATA", framed(DATA, 0, &block), 0),
        ] {
            for piece in [1, 2, 3, 100] {
                let mut partial = PartialFrame::default();
                let sent = [&[0; PREFACE_LEN][..], &frames, &frames].concat();
                for piece in sent.chunks(piece) {
                    partial.settle();
                    partial.pass(piece, &mut Turn::default(), &ALL);
                }
                partial.settle();
                assert_eq!(partial.table_held(), held * 2 * (8 << 10), "{what} in pieces of {piece}");
            }
        }
    }
}
