//! What a survey found: sums over shards, and what is broken.

use std::collections::BTreeMap;
use std::fmt;

use crate::pure::record::{Key, Kind};

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// One copy of the superblock: the other one holds.
    Super,
    /// One copy of a segment's header: the other one holds.
    HeaderCopy,
    /// Both: what stood in the segment is lost.
    Header,
    /// The list of a log segment's records: they are found without it.
    Footer,
    /// All that a log segment had behind its header, its list as well.
    Records,
    /// Entries that a shard had when the server ended, and that nothing names any more.
    Missing,
    /// A record whose header is not what was written there.
    RecordHeader,
    /// A record with another payload than was written.
    Payload,
    /// A record that is not the one that the segment's list names, or a commit that contradicts itself.
    Listing,
    /// The commit of a large blob whose space is not its own: the header of a segment with its frames is gone.
    Chunks,
    /// A frame of a large blob is not what was written.
    Frame,
    /// Bytes as they were written, which are not the content that the key names.
    Content,
    /// The drive refuses to read it.
    Unreadable,
}

impl What {
    /// Whether content is lost with it.
    pub fn is_loss(self) -> bool {
        !matches!(self, Self::Super | Self::HeaderCopy | Self::Footer)
    }

    /// For machines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Super => "super",
            Self::HeaderCopy => "segment_header_copy",
            Self::Header => "segment_header",
            Self::Footer => "footer",
            Self::Records => "records",
            Self::Missing => "missing",
            Self::RecordHeader => "record_header",
            Self::Payload => "payload",
            Self::Listing => "listing",
            Self::Chunks => "chunks",
            Self::Frame => "frame",
            Self::Content => "content",
            Self::Unreadable => "unreadable",
        }
    }

    /// For people.
    fn text(self) -> &'static str {
        match self {
            Self::Super => "one copy of the superblock (nothing is lost)",
            Self::HeaderCopy => "one copy of a segment's header (nothing is lost)",
            Self::Header => "both copies of a segment's header (its content is lost)",
            Self::Footer => "the footer of a segment (nothing is lost)",
            Self::Records => "all records of a segment, and their list (its content is lost)",
            Self::Missing => "entries of a shard that were there when the server ended (they are lost)",
            Self::RecordHeader => "the header of a record",
            Self::Payload => "the payload of a record",
            Self::Listing => "a record that is not the one listed",
            Self::Chunks => "a large blob whose frames are gone",
            Self::Frame => "a frame of a large blob",
            Self::Content => "content that is not what its key names",
            Self::Unreadable => "the drive refuses to read it",
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// Something that is broken, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    pub what: What,
    /// Bytes from the start of the volume; of a superblock: from the start of its file.
    pub position: u64,
    /// Whose record it is, where that is known.
    pub key: Option<Key>,
}

/// `cas <hash>/<size>` or `ac <hash>`. Below a storage prefix the hash is that of the key, not of the content.
pub fn key_text(key: &Key) -> String {
    match key.kind {
        Kind::Cas => format!("cas {}/{}", key.hash, key.size),
        Kind::Action => format!("ac {}", key.hash),
        Kind::ScopedCas => format!("cas below a storage prefix {}/{}", key.hash, key.size),
        Kind::ScopedAction => format!("ac below a storage prefix {}", key.hash),
    }
}

/// Entries of one class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Class {
    pub entries: u64,
    /// Bytes of content.
    pub logical: u64,
    /// Bytes of content at rest.
    pub stored: u64,
    /// Bytes that they take on disk, headers and rounding included.
    pub space: u64,
}

impl Class {
    fn add(&mut self, other: &Self) {
        self.entries += other.entries;
        self.logical += other.logical;
        self.stored += other.stored;
        self.space += other.space;
    }
}

/// The classes of `Findings::classes`, in order.
pub const CLASSES: [(&str, &str); 4] = [("cas", "small"), ("cas", "large"), ("ac", "small"), ("ac", "large")];
/// The number of a class.
pub fn class_of(kind: Kind, large: bool) -> usize {
    usize::from(kind.is_action()) * 2 + usize::from(large)
}

/// Upper bounds of the bars of the size histogram, in bytes; one more bar has all that is larger.
pub const SIZE_BOUNDS: [u64; 10] =
    [256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 256 << 20, 4 << 30];
/// Positions that a report names at most; the counts are always whole.
pub const EXAMPLES_MAX: usize = 1000;

/// Sums over what was surveyed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    pub log_segments: u64,
    pub chunk_segments: u64,
    /// Bytes of log segments that records take, dead ones included.
    pub log_used: u64,
    /// Chunks that live blobs take.
    pub chunks_taken: u64,
    /// Records on disk, of every kind.
    pub records: u64,
    /// Of those: records that remove a key.
    pub tombs: u64,
    /// Entries that a server would serve, by class.
    pub classes: [Class; CLASSES.len()],
    /// The same by size, the last bar without a bound.
    pub sizes: [Class; SIZE_BOUNDS.len() + 1],
    /// Bytes read and compared.
    pub verified: u64,
    /// Generations of the oldest and the newest segment.
    pub generations: Option<(u64, u64)>,
    pub broken: BTreeMap<What, u64>,
    /// The first of them.
    pub examples: Vec<Broken>,
    /// Of the broken: dropped or written anew.
    pub repaired: u64,
}

impl Findings {
    pub fn note_broken(&mut self, broken: Broken) {
        *self.broken.entry(broken.what).or_default() += 1;
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push(broken);
        }
    }

    pub fn note_entry(&mut self, class: usize, entry: Class) {
        self.classes[class].add(&entry);
        let size = entry.logical / entry.entries.max(1);
        self.sizes[SIZE_BOUNDS.partition_point(|&bound| bound < size)].add(&entry);
    }

    pub fn note_generation(&mut self, generation: u64) {
        let (oldest, newest) = self.generations.unwrap_or((generation, generation));
        self.generations = Some((oldest.min(generation), newest.max(generation)));
    }

    /// Whether anything is broken that took content with it.
    pub fn has_losses(&self) -> bool {
        self.broken.keys().any(|what| what.is_loss())
    }

    pub fn broken_total(&self) -> u64 {
        self.broken.values().sum()
    }

    /// All live entries.
    pub fn live(&self) -> Class {
        let mut all = Class::default();
        self.classes.iter().for_each(|class| all.add(class));
        all
    }

    /// Adds what another part of the directory brought.
    pub fn add(&mut self, other: Self) {
        self.log_segments += other.log_segments;
        self.chunk_segments += other.chunk_segments;
        self.log_used += other.log_used;
        self.chunks_taken += other.chunks_taken;
        self.records += other.records;
        self.tombs += other.tombs;
        self.classes.iter_mut().zip(&other.classes).for_each(|(mine, theirs)| mine.add(theirs));
        self.sizes.iter_mut().zip(&other.sizes).for_each(|(mine, theirs)| mine.add(theirs));
        self.verified += other.verified;
        self.repaired += other.repaired;
        for generation in other.generations.into_iter().flat_map(|(oldest, newest)| [oldest, newest]) {
            self.note_generation(generation);
        }
        for (what, count) in other.broken {
            *self.broken.entry(what).or_default() += count;
        }
        self.examples.extend(other.examples);
        self.examples.sort_by_key(|broken| (broken.position, broken.what));
        self.examples.truncate(EXAMPLES_MAX);
    }
}
