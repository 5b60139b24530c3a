//! Makes the `:authority` of gRPC clients on unix sockets one that HTTP/2 allows.
//!
//! Why: gRPC for C++, Python and Java says the path of the socket there, as it is or with its slashes as `%2F`. An HTTP/2
//! server may refuse that, and h2 does (a malformed request, RST_STREAM). Nobody here reads it.
//!
//! How: the bytes of HEADERS and CONTINUATION frames are walked through before h2 sees them, and each `/` and `%` of a
//! literal value of `:authority` is replaced by a character whose code is as long, up to the first `:` or `@`, so that a
//! password stays what it is. So nothing changes its length: not the frames, and not the entries of the dynamic table, to
//! which later requests refer. The name is known by its index in the static table, or when it is spelt out uncoded.
//! Source: RFC 9113, section 4.1, 6.2, 6.10; RFC 7541, section 5, 6, appendix B.

const AUTHORITY: &[u8] = b":authority";
/// Bytes that an HTTP/2 client sends before its first frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEAD_LEN: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
const PRIORITY_LEN: usize = 5;

/// Where a connection's incoming bytes stand.
pub struct AuthorityFilter {
    frame: Frame,
    block: Block,
}

enum Frame {
    /// Within the preface: so many of its bytes have come.
    Preface {
        got: usize,
    },
    /// It is not HTTP/2.
    Foreign,
    /// Bytes that are neither a frame's head nor of a header block.
    Other {
        left: usize,
    },
    Head {
        bytes: [u8; HEAD_LEN],
        got: usize,
    },
    /// The length of the padding, the first byte of a padded HEADERS.
    PadLen {
        left: usize,
        flags: u8,
    },
    /// The priority of a HEADERS.
    Priority {
        left: usize,
        priority_left: usize,
        pad: usize,
        flags: u8,
    },
    Fragment {
        left: usize,
        pad: usize,
        flags: u8,
    },
}

impl Default for AuthorityFilter {
    fn default() -> Self {
        Self { frame: Frame::Preface { got: 0 }, block: Block::Start }
    }
}

impl AuthorityFilter {
    /// The next bytes of the connection, in order.
    pub fn pass(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            match &mut self.frame {
                Frame::Foreign => return,
                Frame::Other { left: 0 } => self.frame = Frame::Head { bytes: [0; HEAD_LEN], got: 0 },
                Frame::Other { left } => {
                    let skipped = bytes.len().min(*left);
                    *left -= skipped;
                    bytes = &mut bytes[skipped..];
                }
                Frame::Fragment { left: 0, pad, flags } => {
                    let (pad, flags) = (*pad, *flags);
                    if flags & END_HEADERS != 0 {
                        self.block = Block::Start;
                    }
                    self.frame = Frame::Other { left: pad };
                }
                Frame::Fragment { left, .. } => {
                    let (fragment, rest) = bytes.split_at_mut(bytes.len().min(*left));
                    *left -= fragment.len();
                    fragment.iter_mut().for_each(|byte| self.block.pass(byte));
                    bytes = rest;
                }
                _ => {
                    self.frame_byte(bytes[0]);
                    bytes = &mut bytes[1..];
                }
            }
        }
    }

    /// One byte of a frame's head, or of what stands in front of its header block.
    fn frame_byte(&mut self, byte: u8) {
        let fragment = |left: usize, pad: usize, flags| match left.checked_sub(pad) {
            Some(left) => Frame::Fragment { left, pad, flags },
            // More padding than there is: h2 refuses it.
            None => Frame::Other { left },
        };
        let after_pad = |left: usize, pad: usize, flags: u8| {
            if flags & PRIORITY != 0 && left >= PRIORITY_LEN {
                Frame::Priority { left: left - PRIORITY_LEN, priority_left: PRIORITY_LEN, pad, flags }
            } else {
                fragment(left, pad, flags)
            }
        };
        match &mut self.frame {
            Frame::Head { bytes, got } => {
                bytes[*got] = byte;
                *got += 1;
                if *got < HEAD_LEN {
                    return;
                }
                let [a, b, c, kind, flags, ..] = *bytes;
                let left = u32::from_be_bytes([0, a, b, c]) as usize;
                self.frame = match kind {
                    HEADERS if flags & PADDED != 0 && left > 0 => Frame::PadLen { left: left - 1, flags },
                    HEADERS => after_pad(left, 0, flags),
                    CONTINUATION => Frame::Fragment { left, pad: 0, flags },
                    _ => Frame::Other { left },
                };
            }
            Frame::PadLen { left, flags } => self.frame = after_pad(*left, usize::from(byte), *flags),
            Frame::Priority { left, priority_left, pad, flags } => {
                *priority_left -= 1;
                if *priority_left == 0 {
                    self.frame = fragment(*left, *pad, *flags);
                }
            }
            Frame::Preface { got } if byte == PREFACE[*got] => {
                *got += 1;
                if *got == PREFACE.len() {
                    self.frame = Frame::Other { left: 0 };
                }
            }
            Frame::Preface { .. } => self.frame = Frame::Foreign,
            Frame::Foreign | Frame::Other { .. } | Frame::Fragment { .. } => {}
        }
    }
}

/// Where a header block stands: before a field, or within one.
enum Block {
    Start,
    /// More bytes of an integer, then what it is.
    Integer {
        value: usize,
        shift: u32,
        of: Integer,
    },
    /// The first byte of a string's length.
    StringLen(Text),
    String {
        left: usize,
        text: Text,
        huffman: bool,
    },
}

#[derive(Clone, Copy)]
enum Integer {
    /// A field that is an index alone, or a change of the table's size.
    Alone,
    /// The index of a literal's name.
    Name,
    Len {
        text: Text,
        huffman: bool,
    },
}

/// Which string.
#[derive(Clone, Copy)]
enum Text {
    /// So many bytes of it are those of `:authority`; `None` when it is another one.
    Name(Option<usize>),
    Value,
    Authority(Soften),
}

/// How far the value of an `:authority` is.
#[derive(Clone, Copy, Default)]
struct Soften {
    /// What follows is no path, and stays as it is.
    done: bool,
    /// The bits of a code that is not complete, and how many.
    code: u8,
    bits: u8,
}

impl Block {
    fn pass(&mut self, byte: &mut u8) {
        *self = match std::mem::replace(self, Self::Start) {
            Self::Start => match *byte {
                first @ 0x80.. => Self::integer(first, 7, Integer::Alone),
                first @ 0x40..=0x7f => Self::integer(first, 6, Integer::Name),
                first @ 0x20..=0x3f => Self::integer(first, 5, Integer::Alone),
                first => Self::integer(first, 4, Integer::Name),
            },
            Self::Integer { value, shift, of } => {
                let part = usize::from(*byte & 0x7f).checked_shl(shift).unwrap_or(usize::MAX);
                let value = value.saturating_add(part);
                if *byte & 0x80 != 0 { Self::Integer { value, shift: shift + 7, of } } else { Self::after(value, of) }
            }
            Self::StringLen(text) => Self::integer(*byte, 7, Integer::Len { text, huffman: *byte & 0x80 != 0 }),
            Self::String { left, mut text, huffman } => {
                match &mut text {
                    Text::Authority(soften) if huffman => soften.huffman(byte),
                    Text::Authority(soften) => soften.plain(byte),
                    Text::Name(same) => {
                        *same = same.filter(|same| !huffman && AUTHORITY.get(*same) == Some(byte)).map(|same| same + 1);
                    }
                    Text::Value => {}
                }
                Self::string(left - 1, text, huffman)
            }
        };
    }

    /// An integer whose first byte has `prefix` bits of it.
    fn integer(first: u8, prefix: u32, of: Integer) -> Self {
        let most = (1u8 << prefix) - 1;
        match first & most {
            value if value == most => Self::Integer { value: usize::from(most), shift: 0, of },
            value => Self::after(usize::from(value), of),
        }
    }

    fn after(value: usize, of: Integer) -> Self {
        match of {
            Integer::Alone => Self::Start,
            Integer::Name => Self::StringLen(match value {
                0 => Text::Name(Some(0)),
                1 => Text::Authority(Soften::default()),
                _ => Text::Value,
            }),
            Integer::Len { text, huffman } => Self::string(value, text, huffman),
        }
    }

    fn string(left: usize, text: Text, huffman: bool) -> Self {
        match (left, text) {
            (0, Text::Name(Some(same))) if same == AUTHORITY.len() => {
                Self::StringLen(Text::Authority(Soften::default()))
            }
            (0, Text::Name(_)) => Self::StringLen(Text::Value),
            (0, Text::Value | Text::Authority(_)) => Self::Start,
            _ => Self::String { left, text, huffman },
        }
    }
}

impl Soften {
    fn plain(&mut self, byte: &mut u8) {
        self.done |= matches!(*byte, b':' | b'@');
        if matches!(*byte, b'/' | b'%') && !self.done {
            *byte = b'.';
        }
    }

    /// Replaces `/` (011000) by `3` (011001), and `%` (010101) by `.` (010111): only bits of the byte at hand are changed,
    /// as those before are gone already.
    fn huffman(&mut self, byte: &mut u8) {
        for at in (0..8).rev() {
            if self.done {
                return;
            }
            let mut bit = *byte >> at & 1;
            // 0 is a space here, which no authority has, or a `%`.
            let is_percent = (self.bits, self.code, bit) == (4, 0b0101, 0);
            let is_slash = (self.bits, self.code, bit) == (5, 0b01100, 0);
            if is_percent || is_slash {
                bit = 1;
                *byte |= 1 << at;
            }
            (self.code, self.bits) = (self.code << 1 | bit, self.bits + 1);
            let is_whole = match self.bits {
                ..5 => false,
                5 => self.code <= 0x09,
                6 => (0x14..=0x2d).contains(&self.code),
                7 => (0x5c..=0x7b).contains(&self.code),
                // The codes of 8 bits are of no character of a path but these; longer ones are the end, or stranger.
                _ => {
                    self.done = !(0xf8..=0xfd).contains(&self.code);
                    true
                }
            };
            if is_whole {
                // A colon.
                self.done |= (self.bits, self.code) == (7, 0x5c);
                (self.code, self.bits) = (0, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes of the characters that the tests use. Source: RFC 7541, appendix B.
    const CODES: [(u8, u32, u32); 18] = [
        (b'%', 0x15, 6),
        (b'/', 0x18, 6),
        (b'.', 0x17, 6),
        (b'3', 0x19, 6),
        (b'2', 0x2, 5),
        (b'F', 0x61, 7),
        (b't', 0x9, 5),
        (b'm', 0x29, 6),
        (b'p', 0x2b, 6),
        (b'r', 0x2c, 6),
        (b'u', 0x2d, 6),
        (b'n', 0x2a, 6),
        (b'x', 0x79, 7),
        (b':', 0x5c, 7),
        (b'@', 0x1ffa, 13),
        (b'h', 0x27, 6),
        (b'X', 0xfc, 8),
        (b'0', 0x0, 5),
    ];

    fn huffman(text: &str) -> Vec<u8> {
        let mut bits: Vec<u8> = Vec::new();
        for character in text.bytes() {
            let (_, code, len) = CODES.into_iter().find(|(of, ..)| *of == character).expect("a code");
            bits.extend((0..len).rev().map(|at| (code >> at & 1) as u8));
        }
        bits.resize(bits.len().next_multiple_of(8), 1);
        bits.chunks(8).map(|byte| byte.iter().fold(0, |value, bit| value << 1 | bit)).collect()
    }

    fn literal(first: &[u8], value: &str, coded: bool) -> Vec<u8> {
        let bytes = if coded { huffman(value) } else { value.into() };
        let len = u8::try_from(bytes.len()).expect("short") | if coded { 0x80 } else { 0 };
        [first, &[len], &bytes].concat()
    }

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let len = (payload.len() as u32).to_be_bytes();
        [&len[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// Passes all in pieces of `step` bytes.
    fn filtered(frames: &[Vec<u8>], step: usize) -> Vec<u8> {
        let mut bytes = PREFACE.to_vec();
        frames.iter().for_each(|frame| bytes.extend(frame));
        let mut filter = AuthorityFilter::default();
        bytes.chunks_mut(step).for_each(|piece| filter.pass(piece));
        bytes.split_off(PREFACE.len())
    }

    /// Goal: paths of sockets become hosts of the same length, whatever the coding and however the bytes come; all other
    /// authorities, and all other fields, stay. Method: each in both codings, in pieces of 1 to 9 bytes.
    #[test]
    fn paths_become_hosts() {
        for (given, plain, coded) in [
            ("%2Ftmp%2Fx", ".2Ftmp.2Fx", ".2Ftmp.2Fx"),
            ("/run/tmpX", ".run.tmpX", "3run3tmpX"),
            ("h:22", "h:22", "h:22"),
            ("tmp%2Fx", "tmp.2Fx", "tmp.2Fx"),
            ("ru:%2F@h/", "ru:%2F@h/", "ru:%2F@h/"),
            ("/r@%2F", ".r@%2F", "3r@%2F"),
            ("", "", ""),
        ] {
            for (coded, expected) in [(false, plain), (true, coded)] {
                for step in 1..10 {
                    // As its own entry of the table, and as none; around it an index, another path, and a name of its own.
                    let block = |authority: &str| {
                        let own_name = [literal(&[0x40], "x", coded), literal(&[], given, coded)].concat();
                        let other = literal(&[0x04], given, coded);
                        let long_index = literal(&[0x7f, 0x80, 0x01], given, coded);
                        let spelt_out =
                            [literal(&[0x40], ":authority", false), literal(&[], authority, coded)].concat();
                        let indexed = [literal(&[0x41], authority, coded), literal(&[0x01], authority, coded)].concat();
                        let authorities = [indexed, spelt_out].concat();
                        [&[0x83][..], &[0x3f, 0xe1, 0x1f], &other, &own_name, &long_index, &authorities, &[0x86]]
                            .concat()
                    };
                    let data = frame(0, 0, given.as_bytes());
                    let frames =
                        |authority| vec![data.clone(), frame(HEADERS, END_HEADERS, &block(authority)), data.clone()];
                    assert_eq!(filtered(&frames(given), step), frames(expected).concat(), "{given} {coded} {step}");
                }
            }
        }
    }

    /// Goal: the block is found behind padding and priority, and across CONTINUATION, and the next one begins anew. Method:
    /// one authority cut at each place.
    #[test]
    fn blocks_are_found() {
        let block = |authority| literal(&[0x41], authority, false);
        for cut in 0..=block("/a/b").len() {
            let frames = |authority| {
                let block = block(authority);
                let (one, two) = block.split_at(cut);
                let front = [&[2][..], &[0, 0, 0, 0, 9], one, &[0x41, 0x41]].concat();
                let last = frame(HEADERS, END_HEADERS, &block);
                [frame(HEADERS, PADDED | PRIORITY, &front), frame(CONTINUATION, END_HEADERS, two), last]
            };
            assert_eq!(filtered(&frames("/a/b"), 3), frames(".a.b").concat(), "{cut}");
        }
    }

    /// Goal: what is not HTTP/2 stays. Method: an upload over HTTP/1.1 whose body is a HEADERS frame.
    #[test]
    fn other_protocols_pass() {
        let frame = frame(HEADERS, END_HEADERS, &literal(&[0x41], "/a/b", false));
        let sent = [&b"PUT /cas/x HTTP/1.1\r\n\r\n"[..], &frame, &frame].concat();
        let mut got = sent.clone();
        let mut filter = AuthorityFilter::default();
        got.chunks_mut(5).for_each(|piece| filter.pass(piece));
        assert_eq!(got, sent);
    }

    /// Goal: nonsense does not panic. Method: seeded noise, framed and bare.
    #[test]
    fn noise_passes() {
        for seed in 0..200 {
            let mut random = crate::pure::random::SplitMix64(seed);
            let noise: Vec<u8> = (0..300).map(|_| random.word() as u8).collect();
            let flags = random.word() as u8;
            let framed = [frame(HEADERS, flags, &noise), frame(CONTINUATION, flags, &noise), noise.clone()];
            assert_eq!(filtered(&framed, 7).len(), framed.concat().len(), "seed {seed}");
        }
    }
}
