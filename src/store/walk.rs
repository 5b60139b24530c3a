//! Everything below some root Directories, each distinct Directory once.
//!
//! Breadth first, with a queue and a set instead of a call stack, because depth and fan-out are the client's choice: a
//! chain of any length costs no stack, and a graph that names the same Directories along 2^n paths costs n reads.

use std::collections::{HashSet, VecDeque};

use bytes::Bytes;

use super::{Memory, Store, StoreError, read_raw};
use crate::limits;
use crate::pure::digest::Digest;
use crate::pure::directory::{Node, Shape, WalkError, scan_pieces};
use crate::rt::join::map_bounded;

/// One Directory of the walk.
#[derive(Debug, PartialEq, Eq)]
pub enum Visit {
    Present {
        digest: Digest,
        /// The serialized Directory.
        pieces: Vec<Bytes>,
        files: Vec<Digest>,
    },
    /// Not in the store, or damaged there. The walk goes on without what is below.
    Absent { digest: Digest },
    /// Not to be read as a Directory. The walk goes on without what is below.
    Invalid { digest: Digest, why: WalkError },
}

/// What a walk remembers of each Directory, in bytes: its digest in a set, and in the queue.
const SEEN_LEN: usize = 100;

/// Why a walk stops.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum WalkStop {
    #[error("there are more than {0} directories below the root")]
    TooMany(usize),
    #[error("there are directories more than {} levels below the root", limits::DIRECTORY_DEPTH_MAX)]
    TooDeep,
    #[error("directory {0} is longer than {max} bytes", max = limits::DIRECTORY_LEN_MAX)]
    TooLong(Digest),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A running walk. The order depends on the Directories alone, so that it is the same on every server.
pub struct Walk<S> {
    store: S,
    /// Named, not yet read; and how many of these are of the level that is being read.
    queue: VecDeque<Digest>,
    left_of_level: usize,
    /// Levels below the roots.
    depth: usize,
    /// Of what is read next, whether a backend brings it.
    coming: Vec<bool>,
    /// Read ahead.
    read: VecDeque<(Digest, Option<Vec<Bytes>>)>,
    /// Everything that was ever in `queue`.
    seen: HashSet<Digest>,
    /// Distinct Directories at most.
    max: usize,
}

impl<S: Store> Walk<S> {
    /// Walks what is below `roots`, each of them once and sharing what they have below them; at most `max` Directories.
    pub fn new(store: S, mut roots: Vec<Digest>, max: usize) -> Self {
        let mut seen = HashSet::new();
        roots.retain(|root| seen.insert(*root));
        let left_of_level = roots.len();
        Self {
            store,
            queue: roots.into(),
            left_of_level,
            depth: 0,
            coming: Vec::new(),
            read: VecDeque::new(),
            seen,
            max,
        }
    }

    /// Has a backend bring what `next` is about to read, which asks none by itself. Waits as `wait_holding` does; what this walk remembers counts as
    /// kept, besides `kept` bytes of the caller's.
    pub async fn bring<E>(&mut self, memory: &mut impl Memory<E>, kept: usize, held: usize) -> Result<(), E> {
        if !self.read.is_empty() {
            return Ok(());
        }
        self.coming = super::bring(&self.store, self.next_few(), memory, kept + self.kept_len(), held).await?;
        Ok(())
    }

    /// What this walk remembers, in bytes.
    pub fn kept_len(&self) -> usize {
        self.seen.len() * SEEN_LEN
    }

    /// The next Directory; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Visit>, WalkStop> {
        if self.read.is_empty() {
            self.read_ahead().await?;
        }
        let Some((digest, pieces)) = self.read.pop_front() else { return Ok(None) };
        if self.left_of_level == 0 {
            self.left_of_level = self.read.len() + 1 + self.queue.len();
            self.depth += 1;
            if self.depth > limits::DIRECTORY_DEPTH_MAX {
                return Err(WalkStop::TooDeep);
            }
        }
        self.left_of_level -= 1;
        let Some(pieces) = pieces else { return Ok(Some(Visit::Absent { digest })) };
        let (mut files, mut below) = (Vec::new(), Vec::new());
        let scanned = scan_pieces(Shape::Directory, &pieces, |node| match node {
            Node::File(digest) => files.push(digest),
            Node::Directory(digest) => below.push(digest),
        });
        if let Err(why) = scanned {
            return Ok(Some(Visit::Invalid { digest, why }));
        }
        for digest in below {
            if self.seen.insert(digest) {
                self.queue.push_back(digest);
            }
        }
        if self.seen.len() > self.max {
            return Err(WalkStop::TooMany(self.max));
        }
        Ok(Some(Visit::Present { digest, pieces, files }))
    }

    /// The Directories at the front of the queue that are read together. None of them: the first one is too long.
    fn next_few(&self) -> Vec<Digest> {
        let (mut next, mut len) = (Vec::new(), 0);
        for &digest in &self.queue {
            len += digest.size;
            let full = next.len() == limits::BATCH_CONCURRENCY || len > limits::TREE_PAGE_LEN_MAX;
            if digest.size > limits::DIRECTORY_LEN_MAX || (full && !next.is_empty()) {
                break;
            }
            next.push(digest);
        }
        next
    }

    /// Reads the next few Directories of the queue together.
    async fn read_ahead(&mut self) -> Result<(), WalkStop> {
        let next = self.next_few();
        self.queue.drain(..next.len());
        // Why asked only when its turn has come: what stands before it goes out first, in the same order anywhere.
        if let Some(&digest) = self.queue.front().filter(|_| next.is_empty()) {
            if !self.store.find_missing(vec![digest]).await?.contains(&true) {
                return Err(WalkStop::TooLong(digest));
            }
            self.queue.pop_front();
            self.read.push_back((digest, None));
            return Ok(());
        }
        let (store, coming) = (&self.store, std::mem::take(&mut self.coming));
        let wanted = next.iter().enumerate().map(|(at, &digest)| (digest, coming.get(at) == Some(&true))).collect();
        let read = async |(digest, comes)| read_raw(store, digest, comes).await;
        let read = map_bounded(wanted, limits::BATCH_CONCURRENCY, read).await;
        for (digest, pieces) in next.into_iter().zip(read) {
            self.read.push_back((digest, pieces?));
        }
        Ok(())
    }
}
