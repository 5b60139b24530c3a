//! Makes the `:authority` of gRPC clients on unix sockets one that HTTP/2 allows.
//!
//! Why: gRPC for C++, Python and Java puts the path of the socket there, as it is or with its slashes as `%2F`. An HTTP/2
//! server may refuse that, and h2 does (a malformed request, RST_STREAM). Nobody here reads it.
//!
//! How: in the header block of each HEADERS frame, before h2 sees it, each `/` and `%` of `:authority` becomes a dot, up to
//! the first `:` or `@`, so that a password stays what it is. Nothing changes its length: not the frames, and not the
//! entries of the dynamic table, to which later requests refer.
//!
//! Limit: a value that is Huffman-coded stays as it is. These clients code none that is so short.
//! Source: RFC 9113, section 4.1, 6.2, 8.3; RFC 7541, section 5, 6, appendix A.

use std::ops::Range;

const AUTHORITY: &[u8] = b":authority";
/// The index of `:authority` in the static table.
const AUTHORITY_INDEX: usize = 1;
/// Bytes that an HTTP/2 client sends before its first frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEAD_LEN: usize = 9;
const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Bytes at the start of a HEADERS frame that are looked at. Why so few: `:authority` and the other names with a colon come
/// first.
const LOOKED_AT_LEN: usize = 1024;

/// Follows the bytes that a connection brings.
pub struct AuthorityFilter {
    part: Part,
    /// Bytes of the part that are still to come.
    left: usize,
    /// The bytes of the part that have come, as they came; of what is not looked at none.
    seen: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum Part {
    Preface,
    /// The first bytes of a frame, which say how long it is and what.
    Head,
    /// The start of a HEADERS frame, `front` bytes of which stand in front of its header block; `behind` bytes follow.
    Block {
        front: usize,
        behind: usize,
    },
    /// The rest of a frame.
    Rest,
    /// It is not HTTP/2.
    Foreign,
}

impl Default for AuthorityFilter {
    fn default() -> Self {
        Self { part: Part::Preface, left: PREFACE.len(), seen: Vec::new() }
    }
}

impl AuthorityFilter {
    /// The next bytes of the connection, in order.
    pub fn pass(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at_mut(bytes.len().min(self.left));
            match self.part {
                Part::Foreign => return,
                Part::Rest => {}
                Part::Preface | Part::Head => self.seen.extend_from_slice(now),
                Part::Block { front, .. } => {
                    let before = self.seen.len();
                    self.seen.extend_from_slice(now);
                    for at in path_in(&self.seen, front).filter(|at| *at >= before) {
                        now[at - before] = b'.';
                    }
                }
            }
            self.left -= now.len();
            while self.left == 0 {
                (self.part, self.left) = self.next_part();
                self.seen.clear();
            }
            bytes = later;
        }
    }

    /// What follows the part that is complete, and its length in bytes.
    fn next_part(&self) -> (Part, usize) {
        match (self.part, &self.seen[..]) {
            (Part::Preface, seen) if seen != PREFACE => (Part::Foreign, usize::MAX),
            (Part::Head, &[a, b, c, kind, flags, ..]) => {
                let len = u32::from_be_bytes([0, a, b, c]) as usize;
                if kind != HEADERS {
                    return (Part::Rest, len);
                }
                let front = usize::from(flags & PADDED != 0) + if flags & PRIORITY != 0 { 5 } else { 0 };
                let looked_at = len.min(LOOKED_AT_LEN);
                (Part::Block { front, behind: len - looked_at }, looked_at)
            }
            (Part::Block { behind, .. }, _) => (Part::Rest, behind),
            _ => (Part::Head, HEAD_LEN),
        }
    }
}

/// Where in `seen` the characters of a path stand that are to go.
fn path_in(seen: &[u8], front: usize) -> impl Iterator<Item = usize> {
    let block = seen.get(front..).unwrap_or_default();
    let value = authority_in(block).unwrap_or_default();
    let value = front + value.start..seen.len().min(front + value.end);
    let of_host = value.take_while(move |at| !matches!(seen[*at], b':' | b'@'));
    of_host.filter(move |at| matches!(seen[*at], b'/' | b'%'))
}

/// Where the value of `:authority` stands in a header block of which only the beginning may be here. `None`: not yet, or
/// Huffman-coded.
fn authority_in(block: &[u8]) -> Option<Range<usize>> {
    let mut rest = block;
    loop {
        let first = *rest.first()?;
        let prefix = match first {
            0x80.. => 7,
            0x40..=0x7f => 6,
            0x20..=0x3f => 5,
            0..=0x1f => 4,
        };
        let index = integer(&mut rest, prefix)?;
        // A whole field of the table, or a change of its size.
        if matches!(first, 0x80.. | 0x20..=0x3f) {
            continue;
        }
        let is_authority = match index {
            0 => {
                let is_coded = *rest.first()? & 0x80 != 0;
                let len = integer(&mut rest, 7)?;
                !is_coded && rest.split_off(..len)? == AUTHORITY
            }
            index => index == AUTHORITY_INDEX,
        };
        let is_coded = *rest.first()? & 0x80 != 0;
        let len = integer(&mut rest, 7)?;
        if is_authority {
            let start = block.len() - rest.len();
            return (!is_coded).then_some(start..start.saturating_add(len));
        }
        rest = rest.get(len..)?;
    }
}

/// Takes an integer off the front of `rest`, whose first byte has `prefix` bits of it. `None` where it is not complete, or
/// longer than any here.
fn integer(rest: &mut &[u8], prefix: u32) -> Option<usize> {
    let most = (1u8 << prefix) - 1;
    let mut value = usize::from(rest.split_off_first()? & most);
    if value < usize::from(most) {
        return Some(value);
    }
    for shift in [0, 7, 14] {
        let byte = *rest.split_off_first()?;
        value += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn literal(first: &[u8], value: &str) -> Vec<u8> {
        [first, &[u8::try_from(value.len()).expect("short")], value.as_bytes()].concat()
    }

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let len = (payload.len() as u32).to_be_bytes();
        [&len[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// Passes all in pieces of `step` bytes.
    fn filtered(frames: &[Vec<u8>], step: usize) -> Vec<u8> {
        let mut bytes = [PREFACE, &frames.concat()].concat();
        let mut filter = AuthorityFilter::default();
        bytes.chunks_mut(step).for_each(|piece| filter.pass(piece));
        bytes.split_off(PREFACE.len())
    }

    /// Goal: paths of sockets become hosts of the same length, however the name is written and the bytes come; all other
    /// authorities, and all other fields and frames, stay. Method: each kind of field around the authority, bare, padded and with
    /// a priority, behind another frame and in front of one, in pieces of 1 to 40 bytes.
    #[test]
    fn paths_become_hosts() {
        for (given, expected) in [
            ("%2Ftmp%2Fx", ".2Ftmp.2Fx"),
            ("/run/tmpX", ".run.tmpX"),
            ("h:22", "h:22"),
            ("ru:%2F@h/", "ru:%2F@h/"),
            ("/r@%2F", ".r@%2F"),
            ("", ""),
        ] {
            let data = frame(0, 0, &literal(&[0x41], given));
            let own_name = [literal(&[0x40], ":authority2"), literal(&[], given)].concat();
            // An index, a change of the table's size, another path, a name of its own, one of the dynamic table.
            let other = [&[0x83, 0x3f, 0xe1, 0x1f][..], &literal(&[0x04], given), &own_name].concat();
            let around = [other, literal(&[0x7f, 0x80, 0x01], given)].concat();
            for name in [&[0x41][..], &[0x01], &[0x11], &literal(&[0x40], ":authority")] {
                for (flags, front, end) in
                    [(4, &[][..], &[][..]), (PADDED, &[3], &[0; 3]), (PADDED | PRIORITY, &[3, 0, 0, 0, 9, 1], &[0; 3])]
                {
                    let headers = |authority| {
                        let block = [&around, &literal(name, authority), &around].map(Vec::as_slice).concat();
                        vec![data.clone(), frame(HEADERS, flags, &[front, &block, end].concat()), data.clone()]
                    };
                    for step in 1..=40 {
                        assert_eq!(
                            filtered(&headers(given), step),
                            headers(expected).concat(),
                            "{given} {name:x?} {step}"
                        );
                    }
                }
            }
        }
    }

    /// Goal: a coded value stays, and a block that is longer than what is looked at does no harm. Method: one of each, then
    /// one that is changed.
    #[test]
    fn what_is_not_understood_stays() {
        let coded = frame(HEADERS, 4, &[0x41, 0x84, b'/', b'/', b'/', b'/']);
        let long = frame(HEADERS, 4, &literal(&[0x04], &"/".repeat(100)).repeat(50));
        let block = |authority| frame(HEADERS, 4, &literal(&[0x41], authority));
        for step in [1, 7, 5000] {
            let passed = filtered(&[coded.clone(), long.clone(), block("/a")], step);
            assert_eq!(passed, [coded.clone(), long.clone(), block(".a")].concat());
        }
    }

    /// Goal: what is not HTTP/2 stays. Method: an upload over HTTP/1.1 whose body is a HEADERS frame.
    #[test]
    fn other_protocols_pass() {
        let frame = frame(HEADERS, 4, &literal(&[0x41], "/a/b"));
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
            let framed = [frame(HEADERS, random.word() as u8, &noise), noise.clone()];
            assert_eq!(filtered(&framed, 7).len(), framed.concat().len(), "seed {seed}");
        }
    }
}
