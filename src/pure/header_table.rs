//! Follows what an HTTP/2 peer puts into our HPACK table, by the bytes of its header blocks, without decoding them.
//!
//! Why: h2 copies the values of ordinary fields, of `:method` and of `:status`, but keeps those of `:path`, `:authority`,
//! `:scheme` and `:protocol` as cuts: of the buffer that the frame was read into, or of the one that a Huffman code was
//! decoded into. A cut of one byte holds on to all of its buffer for as long as the entry is in the table.
//!
//! Method: where the table cannot know what h2 knows, it errs towards more entries. The newest entries are always the same as
//! h2's; behind them may be some that h2 has evicted.
//!
//! Source: RFC 7541.

use std::collections::VecDeque;

/// What the entries may take together, as we never announce another size. Source: RFC 9113, 6.5.2.
const TABLE_LEN_MAX: usize = 4096;
/// What an entry takes beside its name and value. Source: RFC 7541, 4.1.
const ENTRY_LEN: usize = 32;
/// Entries that can hold on to buffers: no name of theirs is shorter than `:path`.
const CUTS_MAX: usize = TABLE_LEN_MAX / (ENTRY_LEN + 5);
/// No code of an octet has more bits. Source: RFC 7541, appendix B.
const CODE_BITS_MAX: usize = 30;
/// The first seven bits of a Huffman coded name that begins with a colon. Source: RFC 7541, appendix B.
const COLON_CODE: u8 = 0x5c;
/// h2 takes no number with more bits behind its first octet.
const NUMBER_BITS_MAX: u32 = 28;
/// Lengths of the names in the static table, beginning with index 1. Source: RFC 7541, appendix A.
const STATIC_NAME_LENS: [u8; 61] = [
    10, 7, 7, 5, 5, 7, 7, 7, 7, 7, 7, 7, 7, 7, 14, 15, 15, 13, 6, 27, 3, 5, 13, 13, 19, 16, 16, 14, 16, 13, 12, 6, 4,
    4, 6, 7, 4, 4, 8, 17, 13, 8, 19, 13, 4, 8, 12, 18, 19, 5, 7, 7, 11, 6, 10, 25, 17, 10, 4, 3, 16,
];

/// The least that h2 reads into, and that it decodes Huffman codes into, in bytes.
const READ_BUFFER_LEN: usize = 8 << 10;
const DECODE_BUFFER_LEN: usize = 4 << 10;

/// The table of one connection. Allocates nothing before the first entry, and about 1 KiB at most.
#[derive(Debug)]
pub struct HeaderTable {
    state: State,
    /// The running field, if it is a literal.
    field: Field,
    /// Newest first.
    entries: VecDeque<Entry>,
    len: usize,
    len_max: usize,
    /// The longest frame or header block that came, and the longest string that was coded, in bytes.
    frame_len: usize,
    coded_len: usize,
    /// Bytes of the buffers that entries hold on to.
    held: usize,
    /// The most since all was decoded.
    held_most: usize,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// The next octet begins a number, and says which.
    Begin(Begin),
    /// The next octet goes on with a number.
    Number { number: Number, value: usize, shift: u32 },
    /// The next octet is the first of a new name.
    Name { len: usize },
    /// So many octets of a string are still to come; then this begins.
    Skip { left: usize, next: Begin },
    /// h2 ends the connection, or nobody knows what it makes of the rest.
    Broken,
}

#[derive(Debug, Clone, Copy)]
enum Begin {
    Field,
    NameLen,
    ValueLen,
}

#[derive(Debug, Clone, Copy)]
enum Number {
    Index,
    TableLen,
    NameIndex,
    NameLen,
    ValueLen,
}

#[derive(Debug, Clone, Copy, Default)]
struct Field {
    is_inserted: bool,
    /// The name is one whose values are kept as they came.
    is_kept: bool,
    /// The name, then the value.
    is_huffman: bool,
    name_len: usize,
    value_len: usize,
}

/// Lengths are those of decoded strings, or less.
#[derive(Debug)]
struct Entry {
    len: u16,
    name_len: u16,
    is_kept: bool,
    /// Bytes of the buffer that it holds on to.
    held: u32,
}

impl Default for HeaderTable {
    fn default() -> Self {
        Self {
            state: State::Begin(Begin::Field),
            field: Field::default(),
            entries: VecDeque::new(),
            len: 0,
            len_max: TABLE_LEN_MAX,
            frame_len: READ_BUFFER_LEN,
            coded_len: 0,
            held: 0,
            held_most: 0,
        }
    }
}

impl HeaderTable {
    /// A frame comes, or a header block goes on, of so many bytes: what follows may lie in a buffer as long.
    pub fn frame_begins(&mut self, len: usize) {
        self.frame_len = self.frame_len.max(len);
    }

    /// The next bytes of the running header block, without padding and priority, cut anywhere.
    ///
    /// Leave out frames that h2 does not decode: HEADERS of a stream that depends on itself.
    pub fn pass(&mut self, mut fragment: &[u8]) {
        while let Some((&octet, behind)) = fragment.split_first() {
            fragment = match self.state {
                State::Begin(begin) => {
                    self.state = self.begin(begin, octet);
                    behind
                }
                State::Number { number, value, shift } => {
                    let value = value + (usize::from(octet & 0x7f) << shift);
                    let shift = shift + 7;
                    self.state = match octet {
                        ..0x80 => self.number_ends(number, value),
                        _ if shift < NUMBER_BITS_MAX => State::Number { number, value, shift },
                        _ => State::Broken,
                    };
                    behind
                }
                State::Name { len } => {
                    // Why all that begin with a colon: the others are named by their static index by everybody.
                    let field = &mut self.field;
                    field.is_kept = if field.is_huffman { octet >> 1 == COLON_CODE } else { octet == b':' };
                    self.state = State::Skip { left: len, next: Begin::ValueLen };
                    fragment
                }
                State::Skip { left, next } => {
                    let passed = left.min(fragment.len());
                    self.state = match (left - passed, next) {
                        (0, Begin::Field) => self.field_ends(),
                        (0, next) => State::Begin(next),
                        (left, next) => State::Skip { left, next },
                    };
                    &fragment[passed..]
                }
                State::Broken => return,
            };
        }
    }

    /// h2 asks for more to read, and no header block is running: it has decoded all that passed.
    pub fn settle(&mut self) {
        if matches!(self.state, State::Begin(Begin::Field)) {
            self.held_most = self.held;
        } else {
            self.state = State::Broken;
        }
    }

    /// Bytes of the buffers that entries may hold on to. What goes counts until h2 has decoded that it does. As many as a table can
    /// hold once a peer has broken the rules.
    pub fn held(&self) -> usize {
        match self.state {
            State::Broken => CUTS_MAX * self.frame_len.max(self.decode_buffer_len()),
            _ => self.held_most,
        }
    }

    /// Why twice: no code has less than 5 bits for 8.
    fn decode_buffer_len(&self) -> usize {
        DECODE_BUFFER_LEN.max(2 * self.coded_len)
    }

    /// The least octets that a string of `len` octets stands for.
    fn octets_min(&mut self, len: usize) -> usize {
        if !self.field.is_huffman {
            return len;
        }
        self.coded_len = self.coded_len.max(len);
        8 * len / CODE_BITS_MAX
    }

    fn begin(&mut self, begin: Begin, octet: u8) -> State {
        let (number, bits) = match (begin, octet) {
            (Begin::Field, 0x80..) => (Number::Index, 7),
            (Begin::Field, 0x20..0x40) => (Number::TableLen, 5),
            (Begin::Field, _) => {
                self.field = Field { is_inserted: octet >= 0x40, ..Field::default() };
                (Number::NameIndex, if octet >= 0x40 { 6 } else { 4 })
            }
            (Begin::NameLen | Begin::ValueLen, _) => {
                self.field.is_huffman = octet >= 0x80;
                (if matches!(begin, Begin::NameLen) { Number::NameLen } else { Number::ValueLen }, 7)
            }
        };
        let most = (1 << bits) - 1;
        match octet & most {
            value if value < most => self.number_ends(number, usize::from(value)),
            value => State::Number { number, value: usize::from(value), shift: 0 },
        }
    }

    fn number_ends(&mut self, number: Number, value: usize) -> State {
        let is_entry = (1..=STATIC_NAME_LENS.len() + self.entries.len()).contains(&value);
        match number {
            Number::Index if is_entry => State::Begin(Begin::Field),
            Number::NameIndex if is_entry => {
                (self.field.name_len, self.field.is_kept) = self.name(value);
                State::Begin(Begin::ValueLen)
            }
            Number::NameIndex if value == 0 => State::Begin(Begin::NameLen),
            Number::TableLen if value <= TABLE_LEN_MAX => {
                self.len_max = value;
                self.evict(value);
                State::Begin(Begin::Field)
            }
            // Why an empty name: h2 reads on behind it, in the next frame of the block, but not always where the field ends.
            Number::NameLen if value == 0 => State::Broken,
            Number::Index | Number::NameIndex | Number::TableLen => State::Broken,
            Number::NameLen => {
                self.field.name_len = self.octets_min(value);
                State::Name { len: value }
            }
            Number::ValueLen => {
                self.field.value_len = self.octets_min(value);
                if value == 0 { self.field_ends() } else { State::Skip { left: value, next: Begin::Field } }
            }
        }
    }

    /// The length of a name in the tables, and whether values of this name are kept as they came.
    fn name(&self, index: usize) -> (usize, bool) {
        match STATIC_NAME_LENS.get(index - 1) {
            // The authority, paths and schemes.
            Some(&len) => (usize::from(len), matches!(index, 1 | 4..=7)),
            None => {
                let entry = &self.entries[index - 1 - STATIC_NAME_LENS.len()];
                (usize::from(entry.name_len), entry.is_kept)
            }
        }
    }

    fn field_ends(&mut self) -> State {
        let Field { is_inserted, is_kept, is_huffman, name_len, value_len } = self.field;
        let len = ENTRY_LEN + name_len + value_len;
        if is_inserted {
            self.evict(self.len_max.saturating_sub(len));
        }
        if is_inserted && len <= self.len_max {
            let buffer_len = if is_huffman { self.decode_buffer_len() } else { self.frame_len };
            let held = if is_kept { buffer_len } else { 0 };
            let entry = Entry { len: len as u16, name_len: name_len as u16, is_kept, held: held as u32 };
            self.len += len;
            self.held += held;
            self.held_most = self.held_most.max(self.held);
            self.entries.push_front(entry);
        }
        State::Begin(Begin::Field)
    }

    /// Evicts the oldest until the rest takes no more than `len`.
    fn evict(&mut self, len: usize) {
        while self.len > len
            && let Some(entry) = self.entries.pop_back()
        {
            self.len -= usize::from(entry.len);
            self.held -= entry.held as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pure::random::SplitMix64;

    /// Literals by their first octet: with incremental indexing, without, never.
    const INSERTED: u8 = 0x40;
    const PLAIN: u8 = 0;
    const NEVER: u8 = 0x10;

    fn number(first: u8, bits: u32, value: usize, out: &mut Vec<u8>) {
        let most = (1 << bits) - 1;
        if value < most {
            return out.push(first | value as u8);
        }
        out.push(first | most as u8);
        let mut rest = value - most;
        while rest >= 0x80 {
            out.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        out.push(rest as u8);
    }

    fn string(octets: &[u8], is_huffman: bool, out: &mut Vec<u8>) {
        number(u8::from(is_huffman) << 7, 7, octets.len(), out);
        out.extend(octets);
    }

    fn indexed(index: usize) -> Vec<u8> {
        let mut out = Vec::new();
        number(0x80, 7, index, &mut out);
        out
    }

    fn resize(len: usize) -> Vec<u8> {
        let mut out = Vec::new();
        number(0x20, 5, len, &mut out);
        out
    }

    /// A literal whose name is in a table.
    fn named(kind: u8, index: usize, value: &[u8], is_huffman: bool) -> Vec<u8> {
        let mut out = Vec::new();
        number(kind, if kind == INSERTED { 6 } else { 4 }, index, &mut out);
        string(value, is_huffman, &mut out);
        out
    }

    /// A literal with a new name that is spelled out.
    fn new(kind: u8, name: &[u8], value: &[u8]) -> Vec<u8> {
        let mut out = vec![kind];
        string(name, false, &mut out);
        string(value, false, &mut out);
        out
    }

    /// A literal with a new name that is Huffman coded.
    fn coded(name: &[u8], value: &[u8]) -> Vec<u8> {
        let mut out = vec![INSERTED];
        string(name, true, &mut out);
        string(value, false, &mut out);
        out
    }

    /// How many entries hold on to what was read, and how many to what was decoded, while no frame was long.
    fn cuts(table: &HeaderTable) -> (usize, usize) {
        let held: Vec<_> = table.entries.iter().map(|entry| entry.held as usize).filter(|held| *held > 0).collect();
        let read = held.iter().filter(|held| **held == READ_BUFFER_LEN).count();
        (read, held.len() - read)
    }

    /// Passes a block in pieces and settles.
    fn block(table: &mut HeaderTable, bytes: &[u8], piece: usize) -> (usize, usize) {
        bytes.chunks(piece).for_each(|piece| table.pass(piece));
        table.settle();
        cuts(table)
    }

    /// Goal: each representation does what RFC 7541 and h2 make of it, wherever it is cut. Method: blocks on one table, with
    /// the cuts of the read buffer and of the decoder's after each; whole, and in pieces down to single bytes.
    #[test]
    fn follows_each_representation() {
        let long = [b'a'; 300];
        let cases: &[(&str, Vec<u8>, (usize, usize))] = &[
            ("nothing", vec![], (0, 0)),
            ("static indexed", [indexed(2), indexed(4), indexed(61)].concat(), (0, 0)),
            ("not indexed", [named(PLAIN, 4, b"/a", false), new(PLAIN, b":path", b"/a")].concat(), (0, 0)),
            ("never indexed", [named(NEVER, 1, b"host", false), new(NEVER, b":path", b"/a")].concat(), (0, 0)),
            ("an authority", named(INSERTED, 1, b"host", false), (1, 0)),
            ("paths", [named(INSERTED, 4, b"/a", false), named(INSERTED, 5, b"", false)].concat(), (3, 0)),
            ("schemes", [named(INSERTED, 6, b"a", false), named(INSERTED, 7, b"b", false)].concat(), (5, 0)),
            (
                "a method and a status",
                [named(INSERTED, 2, b"PUT", false), named(INSERTED, 8, b"200", false)].concat(),
                (5, 0),
            ),
            ("ordinary ones", [named(INSERTED, 58, &long, false), new(INSERTED, b"te", b"trailers")].concat(), (5, 0)),
            (
                "new names that are kept",
                [new(INSERTED, b":path", &long), new(INSERTED, b":protocol", b"a")].concat(),
                (7, 0),
            ),
            ("dynamic indexed", [indexed(62), indexed(70)].concat(), (7, 0)),
            ("by the name of :protocol", named(INSERTED, 62, b"b", false), (8, 0)),
            ("by the name of te", named(INSERTED, 65, b"b", false), (8, 0)),
            ("coded values", [named(INSERTED, 4, &long, true), named(INSERTED, 58, b"a", true)].concat(), (8, 1)),
            // :path and te, coded.
            ("coded names", [coded(&[0xb9, 0x58, 0xd3, 0x3f], b"/"), coded(&[0x49, 0x7f], b"a")].concat(), (9, 1)),
            ("by a coded name", named(INSERTED, 63, b"/a", true), (9, 2)),
            ("the largest that stays", new(INSERTED, b":path", &[b'a'; 4096 - 32 - 5]), (1, 0)),
            ("one that is too large", new(INSERTED, b":path", &[b'a'; 4096 - 32 - 4]), (0, 0)),
            ("three", named(INSERTED, 4, b"", false).repeat(3), (3, 0)),
            ("room for three, for two", [resize(111), resize(110)].concat(), (2, 0)),
            ("two take turns", named(INSERTED, 4, b"", false), (2, 0)),
            ("no room", resize(0), (0, 0)),
            ("still none", named(INSERTED, 4, b"", false), (0, 0)),
            ("room again", [resize(4096), named(INSERTED, 4, b"", false)].concat(), (1, 0)),
            ("as many as fit", named(INSERTED, 4, b"", false).repeat(200), (110, 0)),
            ("pushed out by others", new(INSERTED, b"a", b"").repeat(123), (1, 0)),
        ];
        for piece in [usize::MAX, 1, 2, 3, 7] {
            let mut table = HeaderTable::default();
            for (what, bytes, expected) in cases {
                assert_eq!(block(&mut table, bytes, piece), *expected, "{what}, in pieces of {piece}");
            }
        }
    }

    /// Goal: what h2 may not have decoded yet does not count as gone. Method: a block that evicts all, before and after its end.
    #[test]
    fn what_goes_counts_until_it_is_decoded() {
        let mut table = HeaderTable::default();
        assert_eq!(block(&mut table, &named(INSERTED, 4, b"/a", false).repeat(2), usize::MAX), (2, 0));
        table.pass(&[resize(0), resize(4096), named(INSERTED, 4, b"/b", false)].concat());
        assert_eq!(table.held(), 2 * READ_BUFFER_LEN);
        table.settle();
        assert_eq!(table.held(), READ_BUFFER_LEN);
    }

    /// Goal: behind what breaks the rules the counts are the most that can be, as h2 may not follow. Method: one example for
    /// each rule, then a block that would evict all.
    #[test]
    fn counts_the_most_behind_errors() {
        let broken: [(&str, Vec<u8>); 10] = [
            ("index 0", indexed(0)),
            ("no such entry", indexed(63)),
            ("no such name", named(INSERTED, 63, b"a", false)),
            ("too large a table", resize(4097)),
            ("too long a number", vec![0xff, 0x80, 0x80, 0x80, 0x80]),
            ("no name", new(PLAIN, b"", b"a")),
            ("no coded name", coded(b"", b"a")),
            ("half a number", vec![0xff, 0x80]),
            ("half a name", vec![INSERTED, 5, b':']),
            ("half a field", vec![INSERTED | 4]),
        ];
        for (what, bytes) in broken {
            let mut table = HeaderTable::default();
            block(&mut table, &named(INSERTED, 4, b"/a", false), usize::MAX);
            block(&mut table, &bytes, usize::MAX);
            block(&mut table, &resize(0), usize::MAX);
            assert_eq!(table.held(), CUTS_MAX * READ_BUFFER_LEN, "{what}");
        }
        let mut table = HeaderTable::default();
        block(&mut table, &[0x3f, 0x80, 0x80, 0x80, 0x00], usize::MAX);
        assert_eq!(
            block(&mut table, &named(INSERTED, 4, b"/a", false), usize::MAX),
            (0, 0),
            "a long number for a small one"
        );
    }

    /// Goal: buffers count with the longest that they can be. Method: names before and after a long frame, and a long coded string.
    #[test]
    fn buffers_are_as_long_as_what_came() {
        let mut table = HeaderTable::default();
        table.frame_begins(100);
        block(&mut table, &named(INSERTED, 4, b"/a", false), usize::MAX);
        assert_eq!(table.held(), READ_BUFFER_LEN);
        table.frame_begins(60_000);
        table.frame_begins(100);
        assert_eq!(table.held(), READ_BUFFER_LEN);
        table.pass(&named(INSERTED, 4, b"/b", false));
        table.settle();
        assert_eq!(table.held(), READ_BUFFER_LEN + 60_000);
        table.pass(&named(INSERTED, 4, b"/c", true));
        table.settle();
        assert_eq!(table.held(), READ_BUFFER_LEN + 60_000 + DECODE_BUFFER_LEN);
        table.pass(&[named(PLAIN, 4, &[0; 5000], true), named(INSERTED, 4, b"/d", true)].concat());
        table.settle();
        assert_eq!(table.held(), READ_BUFFER_LEN + 60_000 + DECODE_BUFFER_LEN + 10_000);
    }

    /// What a table holds, as RFC 7541 says it.
    struct Model {
        /// Newest first: the name, and the length of the value, and whether it came Huffman coded.
        entries: Vec<(Vec<u8>, usize, bool)>,
        len_max: usize,
    }

    impl Model {
        fn shrink(&mut self) {
            let len = |entries: &[(Vec<u8>, usize, bool)]| {
                entries.iter().map(|(name, value, _)| 32 + name.len() + value).sum::<usize>()
            };
            while len(&self.entries) > self.len_max {
                self.entries.pop();
            }
        }

        fn insert(&mut self, name: Vec<u8>, value_len: usize, is_huffman: bool) {
            self.entries.insert(0, (name, value_len, is_huffman));
            self.shrink();
        }

        fn cuts(&self) -> (usize, usize) {
            let kept: [&[u8]; 4] = [b":path", b":authority", b":scheme", b":protocol"];
            let count = |coded: bool| {
                self.entries.iter().filter(|(name, _, c)| *c == coded && kept.contains(&&name[..])).count()
            };
            (count(false), count(true))
        }
    }

    /// Appends a field to a block and does with the model what it says.
    fn random_field(random: &mut SplitMix64, model: &mut Model, has_huffman: bool, out: &mut Vec<u8>) {
        const STATIC: [(usize, &[u8]); 8] = [
            (1, b":authority"),
            (2, b":method"),
            (4, b":path"),
            (5, b":path"),
            (7, b":scheme"),
            (15, b"accept-charset"),
            (58, b"user-agent"),
            (61, b"www-authenticate"),
        ];
        // With Huffman codes: ":path" is b9..., ":protocol" too; the others begin with a letter.
        const NEW: [(&[u8], &[u8]); 4] = [
            (b":path", &[0xb9, 0x58, 0xd3, 0x3f]),
            (b":protocol", &[0xb9, 0x5d, 0x87, 0x49, 0xc8, 0x7a, 0x3f]),
            (b"te", &[0x49, 0x7f]),
            (b"x-a", &[0xf2, 0xb1, 0xff]),
        ];
        let kind = [INSERTED, INSERTED, INSERTED, PLAIN, NEVER][random.below(5) as usize];
        let bits = if kind == INSERTED { 6 } else { 4 };
        let name = match random.below(20) {
            0..8 => {
                let (index, name) = STATIC[random.below(8) as usize];
                number(kind, bits, index, out);
                name.to_vec()
            }
            8..12 if !model.entries.is_empty() => {
                let at = random.below(model.entries.len() as u64) as usize;
                number(kind, bits, 62 + at, out);
                model.entries[at].0.clone()
            }
            12..19 => {
                let (name, code) = NEW[random.below(4) as usize];
                let is_coded = has_huffman && random.below(2) == 0;
                out.push(kind);
                string(if is_coded { code } else { name }, is_coded, out);
                name.to_vec()
            }
            19 if random.below(10) == 0 => {
                model.len_max = random.below(TABLE_LEN_MAX as u64 + 1) as usize;
                model.shrink();
                return out.extend(resize(model.len_max));
            }
            _ => return out.extend(indexed(1 + random.below(61 + model.entries.len() as u64) as usize)),
        };
        let bound = [4, 40, 400, 5000][random.below(4) as usize];
        let value_len = random.below(bound) as usize;
        let is_huffman = has_huffman && random.below(2) == 0;
        // Codes have 5 to 30 bits.
        let code_bits = if is_huffman { 5 + random.below(26) as usize } else { 8 };
        string(&vec![b'a'; (value_len * code_bits).div_ceil(8)], is_huffman, out);
        if kind == INSERTED {
            model.insert(name, value_len, is_huffman);
        }
    }

    /// Goal: nothing that is held is forgotten, and without Huffman codes the counts are exact. Method: random blocks, in
    /// random pieces, against a list of entries.
    #[test]
    fn agrees_with_a_list() {
        for seed in 0..400 {
            let mut random = SplitMix64(seed);
            let has_huffman = seed % 2 == 0;
            let mut table = HeaderTable::default();
            let mut model = Model { entries: Vec::new(), len_max: TABLE_LEN_MAX };
            for _ in 0..60 {
                let mut bytes = Vec::new();
                (0..random.below(12)).for_each(|_| random_field(&mut random, &mut model, has_huffman, &mut bytes));
                let piece = 1 + random.below(30) as usize;
                let (read, decoded) = block(&mut table, &bytes, piece);
                let (expected_read, expected_decoded) = model.cuts();
                if has_huffman {
                    assert!(read >= expected_read && decoded >= expected_decoded, "seed {seed}");
                    assert!(table.entries.len() >= model.entries.len(), "seed {seed}");
                } else {
                    assert_eq!((read, decoded), (expected_read, expected_decoded), "seed {seed}");
                    assert_eq!(table.entries.len(), model.entries.len(), "seed {seed}");
                }
                assert!(!matches!(table.state, State::Broken), "seed {seed}");
            }
        }
    }

    /// Goal: whatever comes, it costs little and nothing breaks. Method: random octets, in blocks and pieces of any length;
    /// after each the counts are those of the entries, which are few.
    #[test]
    fn takes_any_octets() {
        assert_eq!(HeaderTable::default().entries.capacity(), 0);
        for seed in 0..2000 {
            let mut random = SplitMix64(seed);
            let mut table = HeaderTable::default();
            for _ in 0..200 {
                // Small ones make short strings: more of them are whole.
                let bound = [8, 80, 256][random.below(3) as usize];
                let mut piece: Vec<u8> = (0..random.below(40)).map(|_| random.below(bound) as u8).collect();
                if random.below(2) == 0 {
                    piece.insert(0, INSERTED | random.below(8) as u8);
                }
                table.pass(&piece);
                if random.below(20) == 0 {
                    table.settle();
                }
                let held: usize = table.entries.iter().map(|entry| entry.held as usize).sum();
                assert_eq!(table.held, held, "seed {seed}");
                assert_eq!(
                    table.len,
                    table.entries.iter().map(|entry| usize::from(entry.len)).sum::<usize>(),
                    "seed {seed}"
                );
                assert!(table.len <= table.len_max && table.len_max <= TABLE_LEN_MAX, "seed {seed}");
                assert!(table.entries.capacity() <= TABLE_LEN_MAX / ENTRY_LEN, "seed {seed}");
                assert!(table.held() >= table.held);
            }
        }
    }
}
