//! The index of one shard: which keys are on disk and where, in 16 to 24 bytes of memory for each.
//!
//! An open-addressing table kept in tag order: a tag's home slot is `tag * slots >> 64`, which grows with the tag, so
//! the table as a whole is a sorted list with gaps. A lookup ends at the first larger tag, a resize is one pass in
//! place, and a fill of up to 7/8 costs short scans only.

use super::digest::Hash;
use super::recency::{Epoch, STAMP_BITS};
use super::record::{HEADER_LEN, Key, Kind, RECORD_ALIGN};
use twox_hash::xxhash3_64::Hasher;

/// What an index slot says about a key.
///
/// | bits | content |
/// |---|---|
/// | 0..40 | place of the record, in units of 64 bytes from the start of the volume; never 0 |
/// | 40 | 1: the record commits a large blob |
/// | 41..46 | in memory: the stamp of the epoch of the last use. In a footer: bit 41 says that the record is a tomb, 42 that it is of an action, 43 that it is of the CAS; neither in footers of older servers |
/// | 46..64 | CAS: 14 bits of the key's size, then 4 bits: the record's length in sixteenths of its bound. Actions: the record's length in units of 64 bytes. Tombs: `TombAge` |
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Word(u64);

const LOCATION_BITS: u32 = 40;
const LOCATION_MASK: u64 = (1 << LOCATION_BITS) - 1;
const LARGE: u64 = 1 << 40;
const TOMB: u64 = 1 << 41;
const OF_ACTION: u64 = 1 << 42;
const OF_CAS: u64 = 1 << 43;
const STAMP_SHIFT: u32 = 41;
const STAMP_MASK: u64 = ((1 << STAMP_BITS) - 1) << STAMP_SHIFT;
const CHECK_SHIFT: u32 = STAMP_SHIFT + STAMP_BITS;
const CHECK_BITS: u32 = 64 - CHECK_SHIFT;
const CHECK_MASK: u64 = (1 << CHECK_BITS) - 1;
/// Low bits of a CAS check that carry the length class.
const CLASS_BITS: u32 = 4;

/// The most that a CAS record of `size` content bytes may take, header included.
fn record_len_bound(size: u64) -> u64 {
    HEADER_LEN as u64 + size.saturating_add(size / 16).saturating_add(64)
}

/// 14 bits of `size`, spread so that neighbouring sizes differ.
fn size_check(size: u64) -> u64 {
    size.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - (CHECK_BITS - CLASS_BITS))
}

impl Word {
    /// A word for a small record of `record_len` bytes (header included) at `location`. `None` when the length is
    /// beyond what the word can say: more than the content and a sixteenth.
    pub fn small(location: u64, key: &Key, record_len: u64) -> Option<Self> {
        let check = match key.kind {
            Kind::Cas | Kind::ScopedCas => {
                let bound = record_len_bound(key.size);
                if record_len > bound {
                    return None;
                }
                let class = (record_len.saturating_mul(16).div_ceil(bound)).max(1) - 1;
                size_check(key.size) << CLASS_BITS | class
            }
            Kind::Action | Kind::ScopedAction => {
                let units = record_len.div_ceil(RECORD_ALIGN as u64);
                if units > CHECK_MASK {
                    return None;
                }
                units
            }
        };
        Some(Self::assemble(location, mark(key.kind), check))
    }

    /// A word for the commit record of a large blob at `location`.
    pub fn large(location: u64, key: &Key) -> Self {
        let check = match key.kind {
            Kind::Cas | Kind::ScopedCas => size_check(key.size) << CLASS_BITS,
            Kind::Action | Kind::ScopedAction => 0,
        };
        Self::assemble(location, LARGE | mark(key.kind), check)
    }

    /// A footer's word for a tomb at `location`.
    pub fn tomb(location: u64) -> Self {
        Self::assemble(location, TOMB, 0)
    }

    /// The same for a lasting tomb, which first stood so many generations ago: 0 for one that is in its first place.
    pub fn lasting_tomb(location: u64, generations: u64) -> Self {
        Self::assemble(location, TOMB, LASTING | coarse(generations))
    }

    /// Of a footer's word for a tomb: whether it is a lasting one, and how many generations ago it first stood. Never more than
    /// it was: rounded, the tomb removes what was stored a little after it, too.
    pub fn lasting(self) -> Option<u64> {
        let check = self.0 >> CHECK_SHIFT;
        (self.is_tomb() && check & LASTING != 0).then(|| fine(check & !LASTING))
    }

    /// Of a footer's word: whether the record is of an action. `None` when the footer does not say.
    pub fn is_action(self) -> Option<bool> {
        match self.0 & (OF_ACTION | OF_CAS) {
            OF_ACTION => Some(true),
            OF_CAS => Some(false),
            _ => None,
        }
    }

    fn assemble(location: u64, flags: u64, check: u64) -> Self {
        assert!(location != 0 && location <= LOCATION_MASK, "location {location} is outside the volume");
        Self(location | flags | check << CHECK_SHIFT)
    }

    /// A word as it stood in a footer. `None` for one that no record has.
    pub fn from_bits(bits: u64) -> Option<Self> {
        (bits & LOCATION_MASK != 0).then_some(Self(bits))
    }

    pub fn bits(self) -> u64 {
        self.0
    }

    /// In units of 64 bytes.
    pub fn location(self) -> u64 {
        self.0 & LOCATION_MASK
    }

    pub fn is_large(self) -> bool {
        self.0 & LARGE != 0
    }

    /// Of a footer's word: it stands for a tomb.
    pub fn is_tomb(self) -> bool {
        self.0 & TOMB != 0
    }

    /// The epoch of the last use, seen in epoch `now`. Only of words in the index.
    pub fn used(self, now: Epoch) -> Epoch {
        now.of_stamp(((self.0 & STAMP_MASK) >> STAMP_SHIFT) as u8)
    }

    /// The same record, last used in `epoch`.
    pub fn used_in(self, epoch: Epoch) -> Self {
        Self(self.0 & !STAMP_MASK | u64::from(epoch.stamp()) << STAMP_SHIFT)
    }

    /// False when `key` has another size than the one that was stored (actions: always true).
    pub fn fits(self, key: &Key) -> bool {
        match key.kind {
            Kind::Cas | Kind::ScopedCas => self.0 >> (CHECK_SHIFT + CLASS_BITS) == size_check(key.size),
            Kind::Action | Kind::ScopedAction => true,
        }
    }

    /// How many bytes to read to have the whole small record of `key`, header included.
    pub fn read_len(self, key: &Key) -> u64 {
        let check = self.0 >> CHECK_SHIFT;
        match key.kind {
            Kind::Cas | Kind::ScopedCas => {
                let class = check & ((1 << CLASS_BITS) - 1);
                (record_len_bound(key.size).saturating_mul(class + 1)).div_ceil(16)
            }
            Kind::Action | Kind::ScopedAction => check * RECORD_ALIGN as u64,
        }
    }
}

/// Says in a footer what the record is of.
fn mark(kind: Kind) -> u64 {
    if kind.is_action() { OF_ACTION } else { OF_CAS }
}

/// The check of a lasting tomb: this bit, and then a count of generations in 17 bits: 5 that say by how many bits to shift
/// the other 12.
const LASTING: u64 = 1 << (CHECK_BITS - 1);
const MANTISSA_BITS: u32 = 12;
const SHIFT_MAX: u32 = (1 << (CHECK_BITS - 1 - MANTISSA_BITS)) - 1;

fn coarse(count: u64) -> u64 {
    let shift = (u64::BITS - count.leading_zeros()).saturating_sub(MANTISSA_BITS);
    if shift > SHIFT_MAX {
        return (1 << (CHECK_BITS - 1)) - 1;
    }
    u64::from(shift) << MANTISSA_BITS | count >> shift
}

fn fine(coarse: u64) -> u64 {
    (coarse & ((1 << MANTISSA_BITS) - 1)) << (coarse >> MANTISSA_BITS)
}

/// The keyed 64-bit tag that stands for a key in the index and in footers. `seed` is the directory's random key, so
/// that nobody outside can choose keys whose tags meet.
pub fn tag(seed: u64, space: Kind, hash: &Hash) -> u64 {
    let seed = match space {
        Kind::Cas => seed,
        Kind::Action => seed ^ 0x5bd1_e995_7b93_5bd1,
        Kind::ScopedCas => seed ^ 0x2545_f491_4f6c_dd1d,
        Kind::ScopedAction => seed ^ 0x7a39_6d2c_11e8_4b63,
    };
    Hasher::oneshot_with_seed(seed, &hash.0)
}

#[derive(Clone, Copy)]
struct Slot {
    tag: u64,
    /// 0: the slot is empty.
    word: u64,
}

const EMPTY: Slot = Slot { tag: 0, word: 0 };
const _: () = assert!(size_of::<Slot>() == 16);

/// Slots of a table that is not worth shrinking.
const SLOTS_MIN: usize = 64;

/// The table.
///
/// Invariant: occupied slots are in ascending tag order, no tag twice, each at or after its home, and no slot between
/// a home and its entry is empty.
pub struct Index {
    slots: Vec<Slot>,
    /// What homes are computed with; `slots` may be a little longer, for what runs over at the end.
    homes: usize,
    len: usize,
}

impl Default for Index {
    fn default() -> Self {
        Self { slots: vec![EMPTY; SLOTS_MIN], homes: SLOTS_MIN, len: 0 }
    }
}

impl Index {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory that the table takes.
    pub fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    pub fn get(&self, tag: u64) -> Option<Word> {
        self.find(tag).ok().map(|at| Word(self.slots[at].word))
    }

    /// Notes that `tag` was last used in `epoch`.
    pub fn touch(&mut self, tag: u64, epoch: Epoch) {
        if let Ok(at) = self.find(tag) {
            let (now, then) = (self.slots[at].word, Word(self.slots[at].word).used_in(epoch).0);
            // Why the test: most are touched many times in an epoch, and a write makes a cache line dirty.
            if now != then {
                self.slots[at].word = then;
            }
        }
    }

    /// Notes when each entry was last used, in tag order.
    pub fn touch_all(&mut self, epochs: impl IntoIterator<Item = Epoch>) {
        let occupied = self.slots.iter_mut().filter(|slot| slot.word != 0);
        occupied.zip(epochs).for_each(|(slot, epoch)| slot.word = Word(slot.word).used_in(epoch).0);
    }

    /// Makes room for `more` entries, and for as many again as are here: for filling it from nothing. Call `fit` at the end.
    pub fn make_room(&mut self, more: usize) {
        let wanted = self.len + more;
        if wanted * 8 > self.slots.len() * 7 {
            self.resize(wanted.max(2 * self.len) * 5 / 4);
        }
    }

    /// Gives back what is not needed.
    pub fn fit(&mut self) {
        if self.slots.len() > SLOTS_MIN && self.len * 3 < self.slots.len() * 2 {
            self.resize((self.len + self.len / 4).max(SLOTS_MIN));
        }
    }

    /// Puts `word` in place of what `tag` had, and returns that.
    pub fn insert(&mut self, tag: u64, word: Word) -> Option<Word> {
        let mut at = match self.find(tag) {
            Ok(at) => return Some(Word(std::mem::replace(&mut self.slots[at].word, word.0))),
            Err(at) => at,
        };
        if (self.len + 1) * 8 > self.slots.len() * 7 {
            self.resize(self.slots.len() + self.slots.len() / 4);
            at = self.find(tag).unwrap_or_else(|at| at);
        }
        let gap = match self.slots[at..].iter().position(|slot| slot.word == 0) {
            Some(distance) => at + distance,
            None => {
                self.slots.reserve_exact(16);
                self.slots.push(EMPTY);
                self.slots.len() - 1
            }
        };
        self.slots.copy_within(at..gap, at + 1);
        self.slots[at] = Slot { tag, word: word.0 };
        self.len += 1;
        None
    }

    /// Replaces the word of `tag` only if it still is at `location`. True when it was.
    pub fn replace_at(&mut self, tag: u64, location: u64, word: Word) -> bool {
        match self.find(tag) {
            Ok(at) if Word(self.slots[at].word).location() == location => {
                self.slots[at].word = word.0;
                true
            }
            _ => false,
        }
    }

    pub fn remove(&mut self, tag: u64) -> Option<Word> {
        let at = self.find(tag).ok()?;
        let removed = Word(self.slots[at].word);
        let mut end = at + 1;
        while end < self.slots.len() && self.slots[end].word != 0 && self.home(self.slots[end].tag) < end {
            end += 1;
        }
        self.slots.copy_within(at + 1..end, at);
        self.slots[end - 1] = EMPTY;
        self.len -= 1;
        self.fit();
        Some(removed)
    }

    /// All entries, in tag order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, Word)> {
        self.slots.iter().filter(|slot| slot.word != 0).map(|slot| (slot.tag, Word(slot.word)))
    }

    fn home(&self, tag: u64) -> usize {
        home(tag, self.homes)
    }

    /// Where `tag` is, or else where it belongs (which may be one past the end).
    fn find(&self, tag: u64) -> Result<usize, usize> {
        let start = self.home(tag);
        for (distance, slot) in self.slots[start..].iter().enumerate() {
            if slot.word == 0 || slot.tag > tag {
                return Err(start + distance);
            }
            if slot.tag == tag {
                return Ok(start + distance);
            }
        }
        Err(self.slots.len())
    }

    /// Moves all entries to a table of `slots`, in place: first to the far end, then one by one to their new homes.
    ///
    /// Why it cannot overtake itself: entry i of n is read at `longest - n + i`, and lands at most there, because the n - i
    /// entries from it on fit behind where it lands.
    fn resize(&mut self, slots: usize) {
        let slots = slots.max(self.len);
        let occupied = self.slots.iter().filter(|slot| slot.word != 0);
        let needed = occupied.fold(0, |next, slot| home(slot.tag, slots).max(next) + 1);
        let longest = needed.max(slots).max(self.slots.len());
        if longest > self.slots.len() {
            self.slots.reserve_exact(longest - self.slots.len());
            self.slots.resize(longest, EMPTY);
        }
        let mut write = longest;
        for read in (0..longest).rev() {
            if self.slots[read].word != 0 {
                write -= 1;
                self.slots.swap(read, write);
            }
        }
        self.homes = slots;
        let mut next = 0;
        for read in write..longest {
            let slot = std::mem::replace(&mut self.slots[read], EMPTY);
            let place = home(slot.tag, slots).max(next);
            assert!(place <= read, "a resize overtook itself");
            self.slots[place] = slot;
            next = place + 1;
        }
        self.slots.truncate(slots.max(next));
        self.slots.shrink_to_fit();
    }
}

fn home(tag: u64, homes: usize) -> usize {
    ((u128::from(tag) * homes as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn word(location: u64) -> Word {
        Word::assemble(location, 0, 0)
    }

    impl Index {
        fn check(&self) {
            let mut before = None;
            let mut count = 0;
            for (at, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.word != 0) {
                assert!(before.is_none_or(|tag| tag < slot.tag), "out of order at {at}");
                before = Some(slot.tag);
                count += 1;
                let home = self.home(slot.tag);
                assert!(home <= at && self.slots[home..at].iter().all(|slot| slot.word != 0), "a gap before {at}");
            }
            assert_eq!(count, self.len);
        }
    }

    /// Tags that crowd: few high parts, so that clusters grow and run over the table's end.
    fn crowded_tag() -> impl Strategy<Value = u64> {
        prop_oneof![
            any::<u64>(),
            (0u64..200).prop_map(|low| u64::MAX - low),
            0u64..200,
            (0u64..200).prop_map(|n| 1 << 63 | n)
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Goal: the table is a map. Method: random inserts, removals and marks against a BTreeMap, with the invariant
        /// checked at the end of each walk; tags crowd at the ends and the middle.
        #[test]
        fn behaves_as_a_map(steps in proptest::collection::vec((0u8..4, crowded_tag(), 1u64..1000), 1..800)) {
            let mut index = Index::default();
            let mut model = BTreeMap::new();
            for (step, tag, location) in steps {
                match step {
                    0 | 1 => prop_assert_eq!(index.insert(tag, word(location)).map(Word::bits), model.insert(tag, location)),
                    2 => {
                        let picked = model.range(tag..).next().map_or(tag, |(&tag, _)| tag);
                        prop_assert_eq!(index.remove(picked).map(Word::bits), model.remove(&picked));
                    }
                    _ => {
                        let moved = index.replace_at(tag, location, word(7));
                        prop_assert_eq!(moved, model.get(&tag) == Some(&location));
                        if moved {
                            model.insert(tag, 7);
                        }
                    }
                }
            }
            index.check();
            let all: Vec<_> = index.iter().map(|(tag, word)| (tag, word.bits())).collect();
            prop_assert_eq!(all, model.into_iter().collect::<Vec<_>>());
        }

        /// Goal: a word tells apart other sizes, and its read length covers the record. Method: random sizes and lengths.
        #[test]
        fn a_word_covers_its_record(size in 1u64..300_000, part in 0u64..=100, location in 1u64..1 << 40) {
            let cas = Key { kind: Kind::Cas, hash: Hash([1; 32]), size };
            let len = HEADER_LEN as u64 + size * part / 100;
            let word = Word::small(location, &cas, len).expect("fits");
            prop_assert!(word.read_len(&cas) >= len && word.read_len(&cas) <= len + record_len_bound(size) / 16 + 1);
            prop_assert!(word.fits(&cas) && word.location() == location && !word.is_large() && !word.is_tomb());
            let (longer, shorter) = (Key { size: size + 1, ..cas }, Key { size: size - 1, ..cas });
            prop_assert!(!word.fits(&longer) && !Word::large(location, &cas).fits(&shorter));
            let action = Key { kind: Kind::Action, ..cas };
            let word = Word::small(location, &action, len).expect("fits").used_in(Epoch(39));
            let any_size = Key { size: 0, ..action };
            prop_assert!(word.read_len(&action) >= len && word.fits(&any_size) && word.location() == location);
            prop_assert_eq!(word.used(Epoch(40)), Epoch(39));
        }
    }

    /// Goal: a lasting tomb says how long ago it first stood, exactly for small counts, and never too much. Method: all small
    /// counts, and powers of two with their neighbours.
    #[test]
    fn a_lasting_tomb_tells_its_age() {
        let told = |count: u64| Word::lasting_tomb(9, count).lasting().expect("a lasting one");
        assert!((0..4096).all(|count| told(count) == count));
        for bits in 12..64 {
            for count in [(1u64 << bits) - 1, 1 << bits, (1 << bits) + 1] {
                let told = told(count);
                assert!(told <= count && (bits >= 43 || count - told <= count >> 11), "{count} {told}");
            }
        }
        assert_eq!((Word::tomb(9).lasting(), word(9).lasting()), (None, None));
        let (cas, action) = (Key { kind: Kind::Cas, hash: Hash([1; 32]), size: 9 }, Kind::Action);
        let small = |kind| Word::small(9, &Key { kind, ..cas }, 90).expect("fits");
        assert_eq!((small(Kind::Cas).is_action(), small(action).is_action()), (Some(false), Some(true)));
        assert_eq!(small(action).used_in(Epoch(0)).bits() & (OF_ACTION | OF_CAS) & !STAMP_MASK, 0);
    }

    /// Goal: at any fill above the minimum the table takes at most 24 bytes for each entry, growing and shrinking.
    /// Method: 30,000 spread tags in, checked at each step, and out again.
    #[test]
    fn memory_is_at_most_24_bytes_for_each_entry() {
        let mut index = Index::default();
        let tags: Vec<u64> = (1..=30_000u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let fits = |index: &Index| index.len() < 512 || index.memory_bytes() <= index.len() * 24 + 256;
        for &tag in &tags {
            index.insert(tag, word(1));
            assert!(fits(&index), "{} bytes for {}", index.memory_bytes(), index.len());
        }
        index.check();
        for &tag in &tags {
            assert!(index.remove(tag).is_some());
            assert!(fits(&index), "{} bytes for {}", index.memory_bytes(), index.len());
        }
        assert!(index.is_empty());
        for tags in tags.chunks(7000) {
            index.make_room(tags.len());
            for &tag in tags {
                index.insert(tag, word(1));
            }
        }
        index.fit();
        index.check();
        assert!(index.len() == tags.len() && fits(&index), "{} bytes for {}", index.memory_bytes(), index.len());
    }
}
