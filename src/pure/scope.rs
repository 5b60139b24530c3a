//! Where the blobs of a request belong: to which backend, which of its buckets, and below which prefix.
//!
//! A prefix partitions the key space: what is stored with one is not found with another, or with none. The backend does
//! not, as with the fork of bazel-remote that these rules come from: one prefix is one tenant, wherever its objects are.

use std::hash::{Hash as StdHash, Hasher};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::digest::Hash;
use super::record::Kind;

/// Where the blobs of a request belong. The default is that of requests which do not say: the default backend, its own
/// bucket and its own prefix. Cheap to clone, and `Send`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope(Option<Arc<Said>>);

/// What a request says.
#[derive(Debug)]
struct Said {
    selection: Option<Selection>,
    prefix: Option<Prefix>,
}

/// A backend and one of its buckets, by their places in the settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Selection {
    pub backend: u16,
    pub bucket: u16,
}

#[derive(Debug)]
struct Prefix {
    text: Box<str>,
    /// SHA-256 of the text.
    id: Hash,
    /// Has taken in a block that only this prefix has, so that a key costs one block more.
    keys: Sha256,
}

/// The prefix of entries that were stored over HTTP unchecked, which no client can name: it is no valid prefix.
const RAW_PREFIX: &str = "\\raw";

/// The longest prefix, in bytes. Source: bazel-remote's fork, `ValidStoragePrefix`.
pub const PREFIX_LEN_MAX: usize = 512;

/// Whether objects may stand below `prefix`: it stays within its bucket, and is not too long. One slash may end it.
pub fn is_valid_prefix(prefix: &str) -> bool {
    if prefix.is_empty() || prefix.len() > PREFIX_LEN_MAX || prefix.contains('\\') {
        return false;
    }
    let body = prefix.strip_suffix('/').unwrap_or(prefix);
    body.split('/').all(|segment| !["", ".", ".."].contains(&segment))
}

impl Scope {
    /// `prefix` is valid.
    pub fn new(selection: Option<Selection>, prefix: Option<&str>) -> Self {
        if selection.is_none() && prefix.is_none() {
            return Self::default();
        }
        Self(Some(Arc::new(Said { selection, prefix: prefix.map(Prefix::new) })))
    }

    /// Where entries are that were stored over HTTP unchecked. Its actions are a backend's objects under `raw/`; its blobs are
    /// what these consist of, and no backend has them by themselves.
    pub fn raw() -> Self {
        Self::new(None, Some(RAW_PREFIX))
    }

    pub fn is_raw(&self) -> bool {
        self.prefix() == Some(RAW_PREFIX)
    }

    /// Which backend and bucket; `None` for the default ones.
    pub fn selection(&self) -> Option<Selection> {
        self.0.as_ref().and_then(|said| said.selection)
    }

    /// What object keys begin with, instead of what the settings say.
    pub fn prefix(&self) -> Option<&str> {
        self.partition().map(|prefix| &*prefix.text)
    }

    fn partition(&self) -> Option<&Prefix> {
        self.0.as_ref().and_then(|said| said.prefix.as_ref())
    }

    /// What a CAS blob is kept as, and under which hash.
    pub fn cas_key(&self, hash: &Hash) -> (Kind, Hash) {
        self.partition().map_or((Kind::Cas, *hash), |prefix| (Kind::ScopedCas, prefix.key(hash)))
    }

    /// The same for an action.
    pub fn action_key(&self, hash: &Hash) -> (Kind, Hash) {
        self.partition().map_or((Kind::Action, *hash), |prefix| (Kind::ScopedAction, prefix.key(hash)))
    }

    /// What an instance's upload sessions are kept under: clients choose their names, which must not meet across
    /// partitions.
    pub fn instance(&self, instance: Box<str>) -> Box<str> {
        self.partition().map_or(instance.clone(), |prefix| format!("{}\n{instance}", prefix.id).into())
    }
}

impl Prefix {
    fn new(text: &str) -> Self {
        let id = Hash(Sha256::digest(text).into());
        let mut keys = Sha256::new_with_prefix(b"a key below a storage prefix:   ");
        keys.update(id.0);
        Self { text: text.into(), id, keys }
    }

    /// The hash that stands for `hash` here. Why its first bytes stay: they say which shard it belongs to.
    fn key(&self, hash: &Hash) -> Hash {
        let mut key: [u8; 32] = self.keys.clone().chain_update(hash.0).finalize().into();
        key[..KEPT_LEN].copy_from_slice(&hash.0[..KEPT_LEN]);
        Hash(key)
    }
}

/// Bytes of a hash that name its shard. See `shard_map`.
const KEPT_LEN: usize = 2;

impl Said {
    fn name(&self) -> (Option<Selection>, Option<&Hash>) {
        (self.selection, self.prefix.as_ref().map(|prefix| &prefix.id))
    }
}

impl PartialEq for Said {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Said {}

impl StdHash for Said {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl PartialOrd for Said {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Said {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.name().cmp(&other.name())
    }
}

#[cfg(test)]
mod tests {
    use super::super::shard_map::{SHARDS_MAX, ShardMap};
    use super::*;

    /// Goal: prefixes that lead out of their bucket, or have no one spelling, are refused. Method: one of each kind.
    #[test]
    fn prefixes() {
        for good in ["a", "a/", "bazel/staging/us-west/42/9876/v0/bazel/", "..a", "a b", &"x".repeat(PREFIX_LEN_MAX)] {
            assert!(is_valid_prefix(good), "{good}");
        }
        let long = "x".repeat(PREFIX_LEN_MAX + 1);
        for bad in ["", "/", "/abs/path/", "a/../b/", "a//b/", "a//", "a\\b/", "..", ".", "a/.", long.as_str()] {
            assert!(!is_valid_prefix(bad), "{bad}");
        }
    }

    /// Goal: keys of different prefixes, and of none, never meet; a key stays in its shard and does not depend on the
    /// backend. Method: some hashes below some prefixes, all pairs.
    #[test]
    fn partitions() {
        let map = ShardMap::new(SHARDS_MAX, 3);
        let hashes = [Hash([0; 32]), Hash([7; 32]), Hash(std::array::from_fn(|at| at as u8))];
        let there = Some(Selection { backend: 1, bucket: 2 });
        let mut seen = std::collections::HashSet::new();
        for prefix in [None, Some("a"), Some("a/"), Some("b")] {
            let (here, elsewhere) = (Scope::new(None, prefix), Scope::new(there, prefix));
            assert!(here != elsewhere && elsewhere == Scope::new(there, prefix));
            for hash in &hashes {
                assert_eq!(here.cas_key(hash), elsewhere.cas_key(hash));
                for key in [here.cas_key(hash), here.action_key(hash)] {
                    assert!(seen.insert(key), "{prefix:?} {hash}");
                    assert_eq!(map.shard_of(&key.1), map.shard_of(hash));
                }
            }
        }
        assert!(Scope::raw().is_raw() && !is_valid_prefix(Scope::raw().prefix().expect("it has one")));
        assert!(!Scope::default().is_raw() && !Scope::new(None, Some("raw")).is_raw());
        assert_ne!(Scope::new(None, Some("a")).instance("i".into()), Scope::new(None, Some("b")).instance("i".into()));
        assert_eq!(Scope::default().instance("i".into()), "i".into());
    }
}
