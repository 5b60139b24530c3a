//! The gRPC methods that are served, and what one core counts of each: go-grpc-prometheus' metrics.

use crate::access::{Ask, Role};
use crate::metrics::percore::Labels;
use crate::metrics::{Counter, Histogram, Metric, Snapshot, TimeBounds};
use crate::service::Code;

impl Method {
    /// What a caller needs; `None` for health, which whoever looks after the server asks for, without a credential.
    ///
    /// Source: bazel-remote's list of what needs no credential with --allow_unauthenticated_reads: reads, and
    /// GetCapabilities, but not QueryWriteStatus.
    pub fn ask(self) -> Option<Ask> {
        match self {
            Self::HealthCheck | Self::HealthList | Self::HealthWatch => None,
            Self::GetCapabilities => Some(Ask { needs: Role::Read, at_best: true }),
            Self::Read
            | Self::GetActionResult
            | Self::FindMissingBlobs
            | Self::BatchReadBlobs
            | Self::GetTree
            | Self::SplitBlob
            | Self::Reflection
            | Self::ReflectionAlpha
            | Self::Unknown => Some(Role::Read.into()),
            Self::Write
            | Self::QueryWriteStatus
            | Self::UpdateActionResult
            | Self::BatchUpdateBlobs
            | Self::SpliceBlob => Some(Role::Write.into()),
        }
    }
}

macro_rules! methods {
    ($($method:ident: $service:literal $name:literal $kind:literal;)*) => {
        /// Names a method.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Method {
            $($method,)*
        }

        impl Method {
            pub const ALL: &[Self] = &[$(Self::$method,)*];

            /// The full name of its service.
            pub fn service(self) -> &'static str {
                match self { $(Self::$method => $service,)* }
            }

            /// Its name within the service.
            pub fn name(self) -> &'static str {
                match self { $(Self::$method => $name,)* }
            }

            /// Which side streams, in the words of go-grpc-prometheus.
            fn kind(self) -> &'static str {
                match self { $(Self::$method => $kind,)* }
            }
        }
    };
}

methods! {
    Read: "google.bytestream.ByteStream" "Read" "server_stream";
    Write: "google.bytestream.ByteStream" "Write" "client_stream";
    QueryWriteStatus: "google.bytestream.ByteStream" "QueryWriteStatus" "unary";
    GetActionResult: "build.bazel.remote.execution.v2.ActionCache" "GetActionResult" "unary";
    UpdateActionResult: "build.bazel.remote.execution.v2.ActionCache" "UpdateActionResult" "unary";
    FindMissingBlobs: "build.bazel.remote.execution.v2.ContentAddressableStorage" "FindMissingBlobs" "unary";
    BatchUpdateBlobs: "build.bazel.remote.execution.v2.ContentAddressableStorage" "BatchUpdateBlobs" "unary";
    BatchReadBlobs: "build.bazel.remote.execution.v2.ContentAddressableStorage" "BatchReadBlobs" "unary";
    GetTree: "build.bazel.remote.execution.v2.ContentAddressableStorage" "GetTree" "server_stream";
    SplitBlob: "build.bazel.remote.execution.v2.ContentAddressableStorage" "SplitBlob" "unary";
    SpliceBlob: "build.bazel.remote.execution.v2.ContentAddressableStorage" "SpliceBlob" "unary";
    GetCapabilities: "build.bazel.remote.execution.v2.Capabilities" "GetCapabilities" "unary";
    HealthCheck: "grpc.health.v1.Health" "Check" "unary";
    HealthList: "grpc.health.v1.Health" "List" "unary";
    HealthWatch: "grpc.health.v1.Health" "Watch" "server_stream";
    Reflection: "grpc.reflection.v1.ServerReflection" "ServerReflectionInfo" "bidi_stream";
    ReflectionAlpha: "grpc.reflection.v1alpha.ServerReflection" "ServerReflectionInfo" "bidi_stream";
    Unknown: "unknown" "unknown" "unary";
}

/// What one core counts of its gRPC calls.
pub struct GrpcCounters {
    /// By method.
    methods: Box<[OfMethod]>,
}

/// The counts of one method.
pub struct OfMethod {
    pub started: Counter,
    /// Messages.
    pub received: Counter,
    pub sent: Counter,
    /// Bytes of messages.
    pub received_bytes: Counter,
    pub sent_bytes: Counter,
    /// Calls that ended, by code.
    ended: [Counter; Code::COUNT],
    time: Histogram,
}

impl OfMethod {
    fn new(bounds: &TimeBounds) -> Self {
        Self {
            started: Counter::default(),
            received: Counter::default(),
            sent: Counter::default(),
            received_bytes: Counter::default(),
            sent_bytes: Counter::default(),
            ended: Default::default(),
            time: Histogram::of_handling(bounds),
        }
    }

    pub fn ended(&self, code: Code, time: std::time::Duration) {
        self.ended[code as usize].count();
        self.time.observe_time(time);
    }
}

impl GrpcCounters {
    pub fn new(bounds: &TimeBounds) -> Self {
        Self { methods: Method::ALL.iter().map(|_| OfMethod::new(bounds)).collect() }
    }

    pub fn of(&self, method: Method) -> &OfMethod {
        &self.methods[method as usize]
    }

    /// Calls of all methods that have begun.
    pub fn begun(&self) -> u64 {
        self.methods.iter().map(|of| of.started.get()).sum()
    }

    /// Every method's series are there from the start, so that rates need no special case; a code's when it was seen, and
    /// OK always.
    pub fn report(&self, into: &mut Snapshot) {
        for &method in Method::ALL {
            let of = self.of(method);
            let labels = [method.name(), method.service(), method.kind()];
            into.add_for(Metric::GrpcStarted, labels, &of.started);
            into.add_for(Metric::GrpcReceived, labels, &of.received);
            into.add_for(Metric::GrpcSent, labels, &of.sent);
            into.add_for(Metric::Received, ["grpc"], &of.received_bytes);
            into.add_for(Metric::Sent, ["grpc"], &of.sent_bytes);
            into.add_histogram(Metric::GrpcTime, labels.map(Into::into).to_vec(), &of.time);
            for code in Code::ALL {
                let ended = &of.ended[code as usize];
                if ended.get() > 0 || code == Code::Ok {
                    let [name, service, kind] = labels;
                    let labels: Labels = vec![label(code).into(), name.into(), service.into(), kind.into()];
                    into.add_labels(Metric::GrpcHandled, labels, ended);
                }
            }
        }
    }
}

/// The label `grpc_code`. Source: grpc-go's `codes.Code.String`.
pub(super) fn label(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::SERVICES;

    /// Goal: methods are those of the services that are announced. Method: both ways, names that are no service aside.
    #[test]
    fn methods_belong_to_services() {
        for (at, method) in Method::ALL.iter().enumerate() {
            assert_eq!(*method as usize, at);
            assert!(SERVICES.contains(&method.service()) || *method == Method::Unknown, "{method:?}");
        }
        for service in SERVICES {
            assert!(Method::ALL.iter().any(|method| method.service() == service), "{service}");
        }
        assert!(Code::ALL.iter().enumerate().all(|(at, code)| *code as usize == at));
    }
}
