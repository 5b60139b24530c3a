//! The global pool of segments on core 0, and each core's port to it.

use super::geometry::Volume;

/// The pool itself: to be run on core 0.
pub struct PoolMain(());

/// One core's connection to the pool. `Send`: made at boot, handed to the core, given to `Disk::open`.
pub struct PoolPort(());

/// Makes the pool for `volume` and the ports for `cores` cores.
pub fn wire(_volume: &Volume, _cores: usize) -> (PoolMain, Vec<PoolPort>) {
    todo!()
}

impl PoolMain {
    /// Serves until every port is gone. Run it on core 0, in the background.
    pub async fn run(self) {}
}
