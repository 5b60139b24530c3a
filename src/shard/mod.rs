//! The owner's side of the key space: shards with their index, their log on disk, their uploads; and the router that
//! brings requests to them.

pub mod blob_disk;
pub mod codec;
pub mod disk;
pub mod geometry;
pub mod pool;
pub mod protocol;
pub mod ram;
pub mod read;
pub mod recover;
pub mod router;
pub mod session;
pub mod upload;
pub mod worker;
