//! What one core holds and runs.
