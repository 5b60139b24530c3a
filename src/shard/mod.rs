//! The owner's side of the key space: shards with their index, their log on disk, their uploads; and the router that
//! brings requests to them.

pub mod blob_disk;
pub mod codec;
pub mod disk;
mod engine;
pub mod geometry;
mod large;
mod log;
pub mod pool;
pub mod protocol;
pub mod ram;
pub mod read;
mod reclaim;
pub mod recover;
pub mod router;
pub mod session;
pub mod upload;
pub mod worker;

#[cfg(test)]
mod disk_tests;
