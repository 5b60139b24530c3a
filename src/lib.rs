//! ringcas: a Bazel remote-cache server, one io_uring executor pinned to each core.
//!
//! Read `ARCHITECTURE.md` beside this file first. The modules stand in the order in which the bytes travel.

pub mod access;
pub mod activity;
pub mod backend;
pub mod boot;
pub mod budget;
pub mod config;
pub mod kept;
pub mod limits;
pub mod logging;
pub mod metrics;
pub mod net;
pub mod offline;
pub mod percore;
pub mod ports;
pub mod pure;
pub mod reload;
pub mod rt;
pub mod service;
pub mod shard;
pub mod store;
pub mod watchdog;
pub mod wire;
