//! What the index is to say after the entries of the log.

use super::*;
use crate::pure::record::Run;

const LAYOUT: Layout = Layout { segment_len: 1 << 20 };
const TAG: u64 = 77;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    Small,
    Large,
    Tomb,
    Lasting,
    /// The copy of a lasting tomb, and how many generations ago that stood.
    Copied(u64),
}

/// The segments of a log, of generations 1, 2, ..., replayed: where the record of `TAG` is, in a segment and at a place there.
fn replayed(segments: &[&[Entry]]) -> Option<(usize, usize)> {
    let (mut index, mut large, mut commits) = (Index::default(), HashMap::new(), 0);
    let mut generations = HashMap::new();
    for (segment, entries) in segments.iter().enumerate() {
        let mut footer = Footer::default();
        for (place, entry) in entries.iter().enumerate() {
            let position = LAYOUT.position(segment as u32, HEAD_LEN) + place as u64 * RECORD_ALIGN as u64;
            let location = position / RECORD_ALIGN as u64;
            let key = Key { kind: Kind::Cas, hash: Hash([1; 32]), size: 500 };
            let word = match *entry {
                Entry::Small => Word::small(location, &key, 500).expect("it fits"),
                Entry::Large => {
                    let runs = vec![Run { first: location as u32, count: 1 }];
                    footer.large.push(LargeEntry { record_len: 100, runs });
                    Word::large(location, &key)
                }
                Entry::Tomb => Word::tomb(location),
                Entry::Lasting => Word::lasting_tomb(location, 0),
                Entry::Copied(ago) => Word::lasting_tomb(location, ago),
            };
            footer.entries.push(FooterEntry { tag: TAG, word: word.bits() });
        }
        let generation = segment as u64 + 1;
        generations.insert(segment as u32, generation);
        let among = Among { layout: LAYOUT, generation, generations: &generations };
        replay(&footer, Written::default(), among, &mut index, &mut large, &mut commits);
    }
    let word = index.get(TAG);
    assert_eq!(
        word.is_some_and(Word::is_large),
        large.contains_key(&TAG),
        "the table of large blobs goes with the index"
    );
    let (segment, offset) = LAYOUT.split(word?.location() * RECORD_ALIGN as u64);
    let place = (offset - HEAD_LEN) as usize / RECORD_ALIGN;
    if let Some((_, entry)) = large.get(&TAG) {
        assert_eq!(u64::from(entry.runs[0].first), word?.location(), "the chunks are those of the last commit");
    }
    Some((segment as usize, place))
}

/// Goal: the last record of a key counts, unless a tomb comes after it; and the copy of a lasting tomb removes what is older than the
/// segment in which that stood, and spares what is newer, though it stands behind it. Method: all logs of two segments with one or
/// two entries each and a third one with one, against the same said in words.
#[test]
fn tombs_remove_what_is_older_and_nothing_else() {
    let kinds = [Entry::Small, Entry::Large, Entry::Tomb, Entry::Lasting, Entry::Copied(1), Entry::Copied(2)];
    let segments: Vec<Vec<Entry>> =
        kinds.iter().flat_map(|one| kinds.iter().map(|two| vec![*one, *two]).chain([vec![*one]])).collect();
    for first in &segments {
        for second in &segments {
            for third in &kinds {
                let log = [&first[..], &second[..], &[*third]];
                assert_eq!(replayed(&log), expected(&log), "{log:?}");
            }
        }
    }
}

fn expected(log: &[&[Entry]; 3]) -> Option<(usize, usize)> {
    let entries: Vec<_> =
        log.iter().zip(0..).flat_map(|(of, at)| of.iter().zip(0..).map(move |(e, n)| (*e, (at, n)))).collect();
    let is_record = |entry: Entry| matches!(entry, Entry::Small | Entry::Large);
    let last = entries.iter().rposition(|(entry, _)| is_record(*entry))?;
    let (_, (segment, _)) = entries[last];
    let removes = |(entry, (at, _)): &(Entry, (usize, usize))| match entry {
        Entry::Small | Entry::Large => false,
        Entry::Tomb | Entry::Lasting => true,
        // It first stood in the segment so many before its own.
        Entry::Copied(ago) => at.saturating_sub(*ago as usize) > segment,
    };
    (!entries[last + 1..].iter().any(removes)).then_some(entries[last].1)
}
