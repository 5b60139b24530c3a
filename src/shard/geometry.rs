//! The cache directory: its files, their geometry, and what stands in it at start-up.

use super::disk::DiskConfig;

/// An open cache directory, locked against other processes while any clone lives. `Send`; every core gets a clone.
#[derive(Clone)]
pub struct Volume(std::sync::Arc<()>);

/// Why the cache directory cannot be used. The texts name the setting and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {}

/// Creates or validates the cache directory and reads all segment headers. Blocks: for start-up, before the cores run.
pub fn open(_config: &DiskConfig) -> Result<Volume, OpenError> {
    todo!()
}
