//! Logic without I/O, clock, randomness or async: same calls, same answers.

pub mod action_result;
pub mod admission;
pub mod batch;
pub mod chunks;
pub mod digest;
pub mod directory;
pub mod encoding;
pub mod eviction;
#[cfg(test)]
mod eviction_tests;
pub mod find_missing;
pub mod grpc_frame;
pub mod http_cache;
pub mod index;
pub mod parking;
pub mod protobuf;
pub mod recency;
pub mod record;
pub mod resource_name;
pub mod segment;
pub mod shard_map;
pub mod superblock;
pub mod write_request;
