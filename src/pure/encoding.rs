//! The forms in which a blob's bytes travel and rest.

/// How bytes stand on the wire or at rest. Source: REAPI `Compressor.Value`, as far as it is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    Identity,
    Zstd,
}
