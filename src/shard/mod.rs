//! The owner's side of the key space: shards with their index, their log on disk, their uploads; and the router that
//! brings requests to them.

#[cfg(test)]
pub mod fake_disk;

pub mod blob_disk;
pub mod codec;
pub mod disk;
#[cfg(test)]
mod disk_tests;
mod engine;
#[cfg(test)]
mod fault_tests;
mod fences;
pub mod geometry;
mod lane;
mod large;
mod log;
mod meters;
mod object;
pub mod pool;
pub mod protocol;
pub mod purge;
#[cfg(test)]
mod purge_tests;
mod purging;
pub mod ram;
mod raw;
pub mod read;
mod read_through;
mod reclaim;
pub mod recover;
mod rescue;
pub mod router;
pub mod session;
pub mod standing;
#[cfg(test)]
mod tests;
pub mod upload;
pub mod worker;
mod write_behind;
pub mod write_gate;
