//! What purges need of a worker.

use super::Worker;
use crate::pure::purge::Origin;
use crate::rt::local::Permits;
use crate::shard::blob_disk::BlobDisk;
use crate::shard::read_through::Flights;
use crate::shard::standing::StandingPurges;
use crate::shard::write_behind::Sending;

impl<D: BlobDisk> Worker<D> {
    /// Uploads to backends that run.
    pub(in crate::shard) fn sending(&self) -> &Sending {
        &self.0.sending
    }

    /// One purge of many goes over this core's records at a time.
    pub(in crate::shard) fn purge_turns(&self) -> &Permits {
        &self.0.purge_turns
    }

    /// By backend.
    pub(in crate::shard) fn all_flights(&self) -> &[Flights] {
        &self.0.flights
    }

    /// The purges that stand, for who adds one.
    pub(in crate::shard) fn standing(&self) -> &StandingPurges {
        &self.0.standing
    }

    /// Whether an action of a backend that comes from there has been purged.
    pub(in crate::shard) fn is_purged(&self, origin: Origin) -> bool {
        self.0.purges.with(|_, purges| purges.cover(origin))
    }
}
