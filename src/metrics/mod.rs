//! What the server tells Prometheus: the table of metrics, the cells in which a core counts, the export of all cores.
//!
//! Who counts also reports: each part of the server holds its cells and adds them to its core's `Snapshot` when asked.
//! Counting is a write to a `Cell` of this core; nothing is shared between cores until somebody asks.

pub mod export;
mod overview;
pub mod percore;
mod shared;
pub mod table;

pub use percore::{Counter, Histogram, Snapshot, TimeBounds};
pub use table::Metric;
