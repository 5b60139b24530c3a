//! A disk in memory for tests: the contract of the real one, with knobs for trouble.

use std::collections::HashMap;
use std::rc::Rc;

use bytes::Bytes;

use super::blob_disk::{BlobDisk, FrameReader, FrameWriter, Older, Record, Stored};
use super::disk::{Codec, DiskError, Frames, Key, Kind};
use super::purging::ActionCursor;
use crate::pure::digest::Hash;
use crate::pure::purge::{Origin, Which};
use crate::pure::random::SplitMix64;
use crate::rt;
use crate::rt::local::Local;

/// Clones share the content.
#[derive(Clone)]
pub struct FakeDisk(Local<State>);

/// What is stored, and how the disk shall behave.
pub struct State {
    pub small: HashMap<Key, Record>,
    pub large: HashMap<Key, Rc<Vec<(Codec, Bytes)>>>,
    /// Frames of large blobs in writers that were neither committed nor dropped.
    pub frames_in_flight: usize,
    /// Reading this frame of any large blob finds damage.
    pub damaged_frame: Option<usize>,
    /// Starting this many large blobs fails for want of space.
    pub no_space: usize,
    /// So many `append`s fail.
    pub append_fails: usize,
    /// So many `append`s and `push`es panic, and any read of a large blob that begins at this frame.
    pub panics: usize,
    pub panic_frame: Option<usize>,
    pub max_blob_len: u64,
    /// `read` and `push` give up their turn; `append` does before and after it has stored.
    pub slow: bool,
    /// Then it takes them a few turns, as chance will have it.
    pub uneven: Option<SplitMix64>,
    pub damaged: Vec<Key>,
    pub reads: usize,
    /// Reads under way, and the most there were.
    pub reading: usize,
    pub reading_most: usize,
    /// What the worker wants done when space is short.
    pub on_pressure: Option<Rc<dyn Fn()>>,
    versions: u64,
}

impl Default for FakeDisk {
    fn default() -> Self {
        Self(Local::new(State {
            small: HashMap::new(),
            large: HashMap::new(),
            frames_in_flight: 0,
            damaged_frame: None,
            no_space: 0,
            append_fails: 0,
            panics: 0,
            panic_frame: None,
            max_blob_len: 1 << 30,
            slow: false,
            uneven: None,
            damaged: Vec::new(),
            reads: 0,
            reading: 0,
            reading_most: 0,
            on_pressure: None,
            versions: 0,
        }))
    }
}

impl FakeDisk {
    /// Looks at the state, or turns a knob.
    pub fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        self.0.with(work)
    }

    fn panic_if_due(&self) {
        if self.with(|state| due(&mut state.panics)) {
            panic_quietly();
        }
    }

    async fn turn(&self) {
        let turns = self.with(|state| {
            let more = state.uneven.as_mut().map_or(0, |random| random.below(4));
            if state.slow { 1 + more } else { 0 }
        });
        for _ in 0..turns {
            rt::time::yield_once().await;
        }
    }
}

/// Counts down to zero; true while it does.
fn due(count: &mut usize) -> bool {
    std::mem::replace(count, count.saturating_sub(1)) > 0
}

/// Why not `panic!`: the log of a thousand of them is of no use.
fn panic_quietly() -> ! {
    std::panic::resume_unwind(Box::new("the disk was told to panic"))
}

/// Actions are found by hash alone.
fn name(key: &Key) -> Key {
    Key { size: if key.kind.is_action() { 0 } else { key.size }, ..*key }
}

impl BlobDisk for FakeDisk {
    type Writer = FakeWriter;
    type Large = FakeLarge;

    async fn ready(&self, _hash: &Hash) {}

    fn contains(&self, key: &Key) -> bool {
        self.with(|state| state.small.contains_key(&name(key)) || state.large.contains_key(&name(key)))
    }

    async fn holds(&self, key: &Key) -> Result<bool, DiskError> {
        Ok(self.contains(key))
    }

    async fn size_of(&self, hash: &Hash) -> Result<Option<u64>, DiskError> {
        Ok(self.with(|state| {
            let mut keys = state.small.keys().chain(state.large.keys());
            keys.find(|key| key.kind == Kind::Cas && key.hash == *hash).map(|key| key.size)
        }))
    }

    async fn read(&self, key: &Key) -> Result<Option<Stored<FakeLarge>>, DiskError> {
        let found = self.with(|state| {
            state.reads += 1;
            state.reading += 1;
            state.reading_most = state.reading_most.max(state.reading);
            let small = state.small.get(&name(key)).cloned();
            (small, state.large.get(&name(key)).cloned())
        });
        self.turn().await;
        self.with(|state| state.reading -= 1);
        Ok(match found {
            (Some(record), _) => Some(Stored::Small(record)),
            (None, Some(frames)) => Some(Stored::Large(FakeLarge { disk: self.clone(), frames })),
            (None, None) => None,
        })
    }

    async fn append(&self, key: &Key, codec: Codec, raw_len: u64, stored: &[&[u8]]) -> Result<u64, DiskError> {
        let data = Bytes::from(stored.concat());
        self.panic_if_due();
        if self.with(|state| due(&mut state.append_fails)) {
            return Err(DiskError::Io("the disk was told to fail".into()));
        }
        self.turn().await;
        let version = self.with(|state| {
            state.versions += 1;
            let origin = Origin::default();
            let record = Record { codec, raw_len, data, version: state.versions, key_size: key.size, origin };
            state.small.insert(name(key), record);
            state.versions
        });
        self.turn().await;
        Ok(version)
    }

    async fn append_action(&self, key: &Key, origin: Origin, data: &[u8], older: Older) -> Result<u64, DiskError> {
        if older == Older::Kept && self.contains(key) {
            return Err(DiskError::Superseded);
        }
        let version = self.append(key, Codec::Raw, data.len() as u64, &[data]).await?;
        self.with(|state| state.small.get_mut(&name(key)).into_iter().for_each(|record| record.origin = origin));
        Ok(version)
    }

    async fn begin_large(&self, key: &Key) -> Result<FakeWriter, DiskError> {
        self.with(|state| match state.no_space {
            0 => Ok(()),
            _ => {
                state.no_space -= 1;
                Err(DiskError::NoSpace { bytes: key.size })
            }
        })?;
        Ok(FakeWriter { disk: self.clone(), key: *key, frames: Vec::new() })
    }

    async fn remove(&self, key: &Key, version: Option<u64>) -> Result<bool, DiskError> {
        Ok(self.with(|state| {
            let same = |record: &Record| version.is_none_or(|version| record.version == version);
            state.small.get(&name(key)).is_some_and(same) && state.small.remove(&name(key)).is_some()
        }))
    }

    async fn purge(&self, keys: &[Key]) -> Result<Vec<bool>, DiskError> {
        self.turn().await;
        Ok(self.with(|state| {
            let named = |key: &Key, known: &Key| known.kind == key.kind && known.hash == key.hash;
            let purged = keys.iter().map(|key| {
                let before = state.small.len() + state.large.len();
                state.small.retain(|known, _| !named(key, known));
                state.large.retain(|known, _| !named(key, known));
                state.small.len() + state.large.len() < before
            });
            purged.collect()
        }))
    }

    async fn next_actions(&self, cursor: &mut ActionCursor, which: &Which) -> Option<Vec<Key>> {
        self.with(|state| {
            let actions = || state.small.iter().filter(|(key, _)| key.kind.is_action());
            // All of them at the first call, none at the next.
            let first = std::mem::replace(&mut cursor.examined, actions().count() as u64) == 0;
            let covered = || actions().filter(|(_, record)| which.covers(record.origin)).map(|(key, _)| *key);
            Some(covered().collect::<Vec<_>>()).filter(|keys| first && !keys.is_empty())
        })
    }

    fn damaged(&self, key: &Key) {
        self.with(|state| {
            state.damaged.push(*key);
            state.small.remove(&name(key));
            state.large.remove(&name(key));
        });
    }

    fn max_blob_len(&self) -> u64 {
        self.with(|state| state.max_blob_len)
    }

    fn on_pressure(&self, work: Box<dyn Fn()>) {
        self.with(|state| state.on_pressure = Some(work.into()));
    }
}

pub struct FakeWriter {
    disk: FakeDisk,
    key: Key,
    frames: Vec<(Codec, Bytes)>,
}

impl FrameWriter for FakeWriter {
    async fn push(&mut self, codec: Codec, stored: &[u8]) -> Result<(), DiskError> {
        self.disk.turn().await;
        self.disk.panic_if_due();
        self.disk.with(|state| state.frames_in_flight += 1);
        self.frames.push((codec, Bytes::copy_from_slice(stored)));
        Ok(())
    }

    fn staged_len(&self) -> usize {
        0
    }

    async fn commit(mut self) -> Result<u64, DiskError> {
        let frames = Rc::new(std::mem::take(&mut self.frames));
        Ok(self.disk.with(|state| {
            state.frames_in_flight -= frames.len();
            state.large.insert(self.key, frames);
            state.versions += 1;
            state.versions
        }))
    }
}

impl Drop for FakeWriter {
    fn drop(&mut self) {
        self.disk.with(|state| state.frames_in_flight -= self.frames.len());
    }
}

pub struct FakeLarge {
    disk: FakeDisk,
    frames: Rc<Vec<(Codec, Bytes)>>,
}

impl FrameReader for FakeLarge {
    fn frame_count(&self) -> usize {
        self.frames.len()
    }

    fn codec(&self, frame: usize) -> Codec {
        self.frames[frame].0
    }

    fn stored_len(&self, frame: usize) -> usize {
        self.frames[frame].1.len()
    }

    async fn read_frames(&self, first: usize, max: usize) -> Result<Frames, DiskError> {
        let range = first..self.frames.len().min(first + max);
        if self.disk.with(|state| state.panic_frame) == Some(first) {
            panic_quietly();
        }
        let frames = match self.disk.with(|state| state.damaged_frame) {
            Some(damaged) if damaged == first => return Err(DiskError::Damaged),
            // Frames before the damaged one are still good.
            Some(damaged) if range.contains(&damaged) => &self.frames[first..damaged],
            _ => &self.frames[range],
        };
        Ok(Frames {
            bytes: frames.iter().map(|(_, bytes)| &bytes[..]).collect::<Vec<_>>().concat().into(),
            list: frames.iter().map(|(codec, bytes)| (*codec, bytes.len())).collect(),
        })
    }
}
