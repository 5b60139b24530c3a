//! What the RAM tier forgets when something changes on the disk.

use super::{Inner, Worker};
use crate::shard::blob_disk::BlobDisk;
use crate::shard::disk::Key;

impl<D: BlobDisk> Worker<D> {
    /// To be held while `keys` change on the disk.
    pub(in crate::shard) fn changing<'a>(&'a self, keys: &'a [Key]) -> Changing<'a, D> {
        let changing = Changing { worker: self, keys };
        changing.forget();
        changing
    }
}

/// A change of keys on the disk. What the RAM tier has of them goes when it begins and when it ends, and a read that is under
/// way then keeps nothing there.
///
/// Why a guard: a change that failed, or that nobody waits for any more, may be on the disk all the same.
pub(in crate::shard) struct Changing<'a, D: BlobDisk> {
    worker: &'a Worker<D>,
    keys: &'a [Key],
}

impl<D: BlobDisk> Changing<'_, D> {
    fn forget(&self) {
        let Inner { fences, ram, .. } = &*self.worker.0;
        for key in self.keys {
            fences.change(key);
            ram.with(|ram| ram.remove(key));
        }
    }
}

impl<D: BlobDisk> Drop for Changing<'_, D> {
    fn drop(&mut self) {
        self.forget();
    }
}
