//! Protobuf messages generated from `proto/`; `tests/wire.rs` proves that they are current.
//!
//! The modules are nested as the packages are, because the generated code refers to its neighbours that way. The rest
//! of the crate uses the short names.

#![allow(clippy::all)] // Why: generated code; its shape is prost-build's.

pub use build::bazel::remote::execution::v2 as reapi;
pub use build::bazel::semver;
pub use google::{bytestream, rpc};
pub use grpc::health::v1 as health;
pub use grpc::reflection::v1 as reflection;

/// A serialized `google.protobuf.FileDescriptorSet` of everything here, sorted by file name, without comments.
pub const DESCRIPTORS: &[u8] = include_bytes!("descriptors.bin");

pub mod build {
    pub mod bazel {
        pub mod remote {
            pub mod execution {
                pub mod v2 {
                    include!("build.bazel.remote.execution.v2.rs");
                }
            }
        }
        pub mod semver {
            include!("build.bazel.semver.rs");
        }
    }
}

pub mod google {
    pub mod bytestream {
        include!("google.bytestream.rs");
    }
    pub mod protobuf {
        include!("google.protobuf.rs");
    }
    pub mod rpc {
        include!("google.rpc.rs");
    }
}

pub mod grpc {
    pub mod health {
        pub mod v1 {
            include!("grpc.health.v1.rs");
        }
    }
    pub mod reflection {
        pub mod v1 {
            include!("grpc.reflection.v1.rs");
        }
        pub mod v1alpha {
            include!("grpc.reflection.v1alpha.rs");
        }
    }
}
