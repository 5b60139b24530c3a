//! A hit in the action cache is a promise that its blobs are here.
//!
//! Source: REAPI, `GetActionResult`: "the server SHOULD ensure that all blobs referenced ... are available". Asking
//! whether they are present also counts as use, so that they stay for as long as the client relies on them.

use bytes::Bytes;

use super::walk::{Visit, Walk, WalkStop};
use super::{
    Accept, ActionEntry, ActionKey, Blob, Get, Memory, NotDecoded, Opened, Purge, Purged, Purpose, Put, PutOutcome,
    Store, StoreError, Uncounted, UploadKey, UploadStatus, Wanted, bring, wait_holding,
};
use crate::limits;
use crate::pure::action_result::{References, sort_distinct};
use crate::pure::digest::{Digest, Hash};
use crate::pure::directory::{DirectoryScanner, Node, Shape};
use crate::pure::purge::InstanceTag;
use crate::pure::scope::Scope;
use crate::rt::local::{Permit, Permits};

/// Passes everything through, except that an action whose blobs are not all present is a miss, and is dropped where that is
/// sure to stay so.
#[derive(Clone)]
pub struct Complete<S> {
    inner: S,
    /// Walks that may run at a time on this core: each remembers up to `DIRECTORIES_MAX` names.
    walks: Permits,
}

impl<S: Store> Complete<S> {
    pub fn new(inner: S) -> Self {
        Self { inner, walks: Permits::new(limits::CHECK_WALKS_MAX) }
    }

    /// As `action_get`, for who holds `ACTION_READ_HELD_LEN` bytes in `memory`; without `check` every action passes. The
    /// memory is given back while a backend is asked, and more is taken before anything long is kept or checked, which may
    /// wait, and end the call.
    pub async fn action_get_held<E: From<StoreError>>(
        &self,
        key: ActionKey,
        check: bool,
        memory: &mut impl Memory<E>,
    ) -> Result<Option<ActionEntry>, E> {
        let mut found = self.inner.action_get_here(key).await?;
        if found.is_none() {
            memory.release();
            if !self.inner.fetch(Wanted::Action(key)).await? {
                return Ok(None);
            }
            memory.hold(limits::ACTION_READ_HELD_LEN).await?;
            found = self.inner.action_get_here(key).await?;
        }
        let Some(mut entry) = found else { return Ok(None) };
        let is_long = |entry: &ActionEntry| entry.data.len() > limits::ACTION_RESULT_HELD_LEN_MAX;
        let references = if check && !is_long(&entry) { References::of(&entry.data).ok() } else { None };
        let is_costly = |references: &References| !references.trees.is_empty() || !references.roots.is_empty();
        if is_long(&entry) {
            // Why read again: nothing that long is kept while it waits for memory.
            drop(entry);
            memory.hold(limits::ACTION_HELD_LEN).await?;
            match self.inner.action_get_here(key).await? {
                Some(again) => entry = again,
                None => return Ok(None),
            }
        } else if references.as_ref().is_some_and(is_costly) {
            memory.hold(limits::ACTION_HELD_LEN).await?;
        }
        if !check {
            return Ok(Some(entry));
        }
        let references = references.or_else(|| References::of(&entry.data).ok());
        let finding = match references {
            Some(references) => self.check(references, entry.data.len(), memory).await?,
            None => Finding::Unfit,
        };
        // Why by its version: a newer one, stored meanwhile, stays.
        match finding {
            Finding::Complete => return Ok(Some(entry)),
            Finding::Lacks(missing) => self.inner.action_drop_lacking(key, entry.version, missing).await?,
            Finding::Unfit => self.inner.action_drop(key, entry.version).await?,
        }
        Ok(None)
    }

    /// Looks for all that a result names. `kept` bytes are the caller's. Nothing of what else `memory` holds is kept while a
    /// backend takes its time.
    async fn check<E: From<StoreError>>(
        &self,
        references: References,
        kept: usize,
        memory: &mut impl Memory<E>,
    ) -> Result<Finding, E> {
        let store = self.inner.for_check();
        let costly = !references.trees.is_empty() || !references.roots.is_empty();
        let is_long = kept > limits::ACTION_RESULT_HELD_LEN_MAX;
        let held = if costly || is_long { limits::ACTION_HELD_LEN } else { limits::ACTION_READ_HELD_LEN };
        let tree_bytes = references.trees.iter().fold(0u64, |sum, tree| sum.saturating_add(tree.size));
        // What was read of the result is about as long as the result.
        let kept = 2 * kept;
        if tree_bytes > limits::TREE_LEN_MAX {
            return Ok(Finding::Unfit);
        }
        let found = wait_holding(memory, kept, held, check_blobs(&store, references.blobs)).await??;
        if found != Finding::Complete {
            return Ok(found);
        }
        let comes = bring(&store, references.trees.clone(), memory, kept, held).await?;
        for (tree, comes) in references.trees.into_iter().zip(comes) {
            let checked = check_tree(&store, tree, comes);
            let found = wait_holding(memory, kept + limits::READ_HELD_LEN, held, checked).await??;
            if found != Finding::Complete {
                return Ok(found);
            }
        }
        if references.roots.is_empty() {
            return Ok(Finding::Complete);
        }
        self.check_closure(&store, references.roots, kept, held, memory).await
    }

    /// Looks for every Directory below the roots, and every file in them. One walk for all roots: they may have most of what
    /// is below them in common.
    async fn check_closure<E: From<StoreError>>(
        &self,
        store: &S,
        roots: Vec<Digest>,
        kept: usize,
        held: usize,
        memory: &mut impl Memory<E>,
    ) -> Result<Finding, E> {
        let mut memory = InTurn { memory, turn: None };
        let mut walk = Walk::new(store.clone(), roots, limits::ACTION_DIRECTORIES_MAX);
        let mut waiting = Vec::new();
        loop {
            let kept = kept + waiting.len() * size_of::<Digest>();
            walk.bring(&mut memory, kept, held).await?;
            memory.take_turn(&self.walks, kept + walk.kept_len(), held).await?;
            let is_over = match walk.next().await {
                Ok(Some(Visit::Present { files, .. })) => {
                    waiting.extend(files);
                    false
                }
                Ok(Some(Visit::Absent { digest })) => return Ok(Finding::Lacks(digest)),
                Ok(Some(Visit::Invalid { .. })) => return Ok(Finding::Unfit),
                Ok(None) => true,
                // Why: what cannot be checked cannot be promised.
                Err(WalkStop::TooMany(_) | WalkStop::TooDeep | WalkStop::TooLong(_)) => return Ok(Finding::Unfit),
                Err(WalkStop::Store(error)) => return Err(error.into()),
            };
            if is_over || waiting.len() >= limits::CHECK_DIGESTS_MAX {
                let kept = kept + walk.kept_len() + waiting.len() * size_of::<Digest>();
                let asked = check_blobs(store, std::mem::take(&mut waiting));
                let found = wait_holding(&mut memory, kept, held, asked).await??;
                if found != Finding::Complete {
                    return Ok(found);
                }
            }
            if is_over {
                return Ok(Finding::Complete);
            }
        }
    }
}

/// What a check of a result has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finding {
    Complete,
    /// This blob was not to be had in time, for one.
    Lacks(Digest),
    /// It names what cannot be checked: no answer of a backend would change that.
    Unfit,
}

async fn check_blobs<S: Store>(store: &S, mut digests: Vec<Digest>) -> Result<Finding, StoreError> {
    sort_distinct(&mut digests);
    if digests.is_empty() {
        return Ok(Finding::Complete);
    }
    let missing = store.find_missing(digests.clone()).await?;
    let missing = digests.into_iter().zip(missing).find(|(_, missing)| *missing);
    Ok(missing.map_or(Finding::Complete, |(digest, _)| Finding::Lacks(digest)))
}

/// Reads the Tree as it comes and asks for its files in groups, so that memory does not grow with it.
async fn check_tree<S: Store>(store: &S, tree: Digest, comes: bool) -> Result<Finding, StoreError> {
    let mut blob = match store.get_fetched(Get::whole(tree, Accept::Identity), comes).await {
        Ok(Some(blob)) => blob,
        Ok(None) | Err(StoreError::Lost { .. }) => return Ok(Finding::Lacks(tree)),
        Err(error) => return Err(error),
    };
    let mut scanner = DirectoryScanner::new(Shape::Tree);
    let mut files = Vec::new();
    loop {
        let piece = match blob.next_piece().await {
            Ok(Some(piece)) => piece,
            Ok(None) => break,
            Err(StoreError::Lost { .. }) => return Ok(Finding::Lacks(tree)),
            Err(error) => return Err(error),
        };
        let scanned = scanner.push(&piece, |node| match node {
            Node::File(digest) => files.push(digest),
            Node::Directory(_) => {}
        });
        if scanned.is_err() {
            return Ok(Finding::Unfit);
        }
        if files.len() >= limits::CHECK_DIGESTS_MAX {
            let found = check_blobs(store, std::mem::take(&mut files)).await?;
            if found != Finding::Complete {
                return Ok(found);
            }
        }
    }
    if scanner.finish().is_err() {
        return Ok(Finding::Unfit);
    }
    check_blobs(store, files).await
}

/// The memory of a walk that takes turns with others. The turn goes back with the memory while a backend is asked, so that
/// nobody whose blobs are all here waits for a sick one; what a walk remembers meanwhile is charged as kept.
struct InTurn<'a, M> {
    memory: &'a mut M,
    turn: Option<Permit>,
}

impl<M> InTurn<'_, M> {
    /// Waits for a turn, unless this walk has one.
    async fn take_turn<E>(&mut self, turns: &Permits, kept: usize, held: usize) -> Result<(), E>
    where
        M: Memory<E>,
    {
        if self.turn.is_none() {
            self.turn = Some(wait_holding(self.memory, kept, held, turns.take()).await?);
        }
        Ok(())
    }
}

impl<E, M: Memory<E>> Memory<E> for InTurn<'_, M> {
    async fn hold(&mut self, len: usize) -> Result<(), E> {
        self.memory.hold(len).await
    }

    fn release(&mut self) {
        self.turn = None;
        self.memory.release();
    }
}

impl<S: Store> Store for Complete<S> {
    type Upload = S::Upload;

    fn scoped(&self, scope: &Scope) -> Self {
        Self { inner: self.inner.scoped(scope), walks: self.walks.clone() }
    }

    fn for_check(&self) -> Self {
        Self { inner: self.inner.for_check(), walks: self.walks.clone() }
    }

    async fn is_absent(&self, digest: Digest) -> Result<bool, StoreError> {
        self.inner.is_absent(digest).await
    }

    async fn find_missing(&self, digests: Vec<Digest>) -> Result<Vec<bool>, StoreError> {
        self.inner.find_missing(digests).await
    }

    async fn size_of(&self, hash: Hash, purpose: Purpose) -> Result<Option<u64>, StoreError> {
        self.inner.size_of(hash, purpose).await
    }

    async fn get(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        self.inner.get(get).await
    }

    async fn get_here(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        self.inner.get_here(get).await
    }

    async fn fetch(&self, wanted: Wanted) -> Result<bool, StoreError> {
        self.inner.fetch(wanted).await
    }

    async fn put(&self, put: Put) -> Result<PutOutcome, StoreError> {
        self.inner.put(put).await
    }

    async fn open_upload(&self, key: UploadKey, write_offset: u64) -> Result<Opened<Self::Upload>, StoreError> {
        self.inner.open_upload(key, write_offset).await
    }

    async fn upload_status(&self, key: UploadKey) -> Result<UploadStatus, StoreError> {
        self.inner.upload_status(key).await
    }

    async fn action_get(&self, key: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        self.action_get_held(key, true, &mut Uncounted).await
    }

    async fn action_put(&self, key: ActionKey, data: Bytes, instance: InstanceTag) -> Result<(), StoreError> {
        self.inner.action_put(key, data, instance).await
    }

    async fn action_drop(&self, key: ActionKey, version: u64) -> Result<(), StoreError> {
        self.inner.action_drop(key, version).await
    }

    async fn purge(&self, purge: Purge) -> Result<Purged, StoreError> {
        self.inner.purge(purge).await
    }

    fn decoded(&self, zstd: &[u8], raw_len: usize) -> Result<Bytes, NotDecoded> {
        self.inner.decoded(zstd, raw_len)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prost::Message;

    use super::*;
    use crate::pure::digest::tests::wire;
    use crate::rt;
    use crate::rt::cores::block_on;
    use crate::store::fake::{FakeStore, digest_of};
    use crate::wire::reapi::{ActionResult, Directory, DirectoryNode, OutputDirectory};

    /// Goal: walks that wait for a backend hold up none whose Directories are all here. Method: twice as many walks as may
    /// run, each at a Directory that a backend never brings; then one that needs no backend.
    #[test]
    fn a_sick_backend_holds_up_no_other_walk() {
        block_on(async {
            let fake = FakeStore::default();
            let store = Complete::new(fake.clone());
            let action = |name: String, below: Digest| {
                let node = DirectoryNode { name: name.clone(), digest: wire(below) };
                let root = fake.add(Directory { directories: vec![node], ..Directory::default() }.encode_to_vec());
                let root = OutputDirectory { root_directory_digest: wire(root), ..OutputDirectory::default() };
                let result = ActionResult { output_directories: vec![root], ..ActionResult::default() };
                let (hash, data) = (digest_of(name.as_bytes()).hash, result.encode_to_vec().into());
                fake.with(|state| state.actions.insert(hash, (None, data, 1)));
                ActionKey { hash, size: None }
            };
            let far = digest_of(b"what only a backend has");
            fake.with(|state| state.hanging.insert(far));
            for number in 0..2 * limits::CHECK_WALKS_MAX {
                let (store, key) = (store.clone(), action(number.to_string(), far));
                rt::spawn(async move { drop(store.action_get(key).await) });
            }
            let here = action("here".into(), fake.add(Directory::default().encode_to_vec()));
            rt::time::yield_to_reactor().await;
            let found = rt::time::timeout(Duration::from_secs(30), store.action_get(here)).await;
            assert!(found.expect("it waits for nobody").expect("an answer").is_some());
        });
    }
}
