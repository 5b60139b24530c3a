//! Protobuf messages generated from `proto/`; `tests/wire.rs` proves that they are current.
