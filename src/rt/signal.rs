//! SIGTERM and SIGINT as values.

/// Waits for signals; one call of `next` for each.
pub struct Signals;
