//! Purges, as the owner of what is purged carries them out. When one returns, nothing brings back what it took: not the
//! RAM tier, not a restart, not an object on its way from a backend or to it, and not the backend.

use super::blob_disk::BlobDisk;
use super::disk::{ActionCursor, Key};
use super::worker::{Worker, store_error};
use crate::limits::{PURGE_BATCH, PURGE_UPLOAD_WAIT};
use crate::pure::digest::{Digest, Hash};
use crate::pure::purge::Which;
use crate::pure::upload_queue::ObjectKind;
use crate::rt;
use crate::store::{Purge, Purged, StoreError};

impl<D: BlobDisk> Worker<D> {
    /// Purges what this core owns of it.
    pub async fn purge(&self, purge: Purge) -> Result<Purged, StoreError> {
        match purge {
            Purge::Blob(hash) => self.purge_one(ObjectKind::Cas, hash).await,
            Purge::Action(hash) => self.purge_one(ObjectKind::Action, hash).await,
            Purge::Actions(which) => self.purge_actions(which).await,
        }
    }

    /// Purges one blob or action, also in the backend.
    async fn purge_one(&self, kind: ObjectKind, hash: Hash) -> Result<Purged, StoreError> {
        let name = self.name(kind, Digest { hash, size: 0 });
        let (kind, hash) = match kind {
            ObjectKind::Cas => self.scope().cas_key(&hash),
            ObjectKind::Action => self.scope().action_key(&hash),
        };
        let keys = [Key { kind, hash, size: 0 }];
        // Why first: from now on an upload of it finds nothing to send.
        let mut purged = self.drop_for_good(&keys).await?;
        if let Some((backend, flights)) = self.backend_and_flights() {
            let sent = self.sending().ended(&name);
            if rt::time::timeout(PURGE_UPLOAD_WAIT, sent).await.is_err() {
                let detail = "an upload of it does not end".to_owned();
                return Err(StoreError::NotPurged { backend: backend.name().to_owned(), detail });
            }
            backend.delete(&name).await.map_err(|error| StoreError::NotPurged {
                backend: backend.name().to_owned(),
                detail: error.to_string(),
            })?;
            // What is on its way from there has perhaps begun before.
            flights.doom(|flown| flown.kind == name.kind && flown.digest.hash == name.digest.hash);
            purged += self.drop_for_good(&keys).await?;
        }
        Ok(Purged { examined: 1, purged: purged.min(1) })
    }

    /// Purges the actions of this core that `which` covers, whatever their scope. Backends are not asked: the purge stands
    /// (`standing`) before this is called.
    async fn purge_actions(&self, which: Which) -> Result<Purged, StoreError> {
        let _turn = self.purge_turns().take().await;
        // What is on its way has perhaps begun before the purge stood.
        self.all_flights().iter().for_each(|flights| flights.doom(|flown| flown.kind == ObjectKind::Action));
        let mut cursor = ActionCursor::default();
        let mut purged = 0;
        while let Some(keys) = self.disk().next_actions(&mut cursor, &which).await {
            for keys in keys.chunks(PURGE_BATCH) {
                purged += self.drop_for_good(keys).await?;
            }
            rt::time::yield_to_reactor().await;
        }
        Ok(Purged { examined: cursor.examined, purged })
    }

    /// Removes keys from RAM and from the disk, so that no restart brings them back. How many there were.
    async fn drop_for_good(&self, keys: &[Key]) -> Result<u64, StoreError> {
        let _changing = self.changing(keys);
        let found = self.disk().purge(keys).await;
        let hash = keys.first().map_or(Hash([0; 32]), |key| key.hash);
        let found = found.map_err(|error| store_error(error, Digest { hash, size: 0 }))?;
        Ok(found.into_iter().filter(|found| *found).count() as u64)
    }
}
