//! What one core counts of one backend.

use std::rc::Rc;

use crate::metrics::{Counter, Histogram, Metric, Snapshot};

#[derive(Default)]
pub(super) struct Counts {
    pub hits: Counter,
    pub misses: Counter,
    pub wrong: Counter,
    pub throttles: Rc<Counter>,
    pub short_circuits: Counter,
    pub failures: Counter,
    pub read_times: Times,
    pub head_times: Times,
    pub upload_times: Times,
}

pub(super) struct Times(pub Histogram);

impl Default for Times {
    fn default() -> Self {
        Self(Histogram::of_times())
    }
}

impl Counts {
    /// Adds them, with the backend's name as label.
    pub fn report(&self, name: &str, into: &mut Snapshot) {
        let label = || vec![name.to_owned().into()];
        into.add_labels(Metric::S3CacheHits, label(), &self.hits);
        into.add_labels(Metric::S3CacheMisses, label(), &self.misses);
        into.add_labels(Metric::S3WrongObjects, label(), &self.wrong);
        into.add_labels(Metric::S3Throttles, label(), &*self.throttles);
        into.add_labels(Metric::S3ShortCircuits, label(), &self.short_circuits);
        into.add_labels(Metric::S3Failures, label(), &self.failures);
        for (operation, times) in [("get", &self.read_times), ("head", &self.head_times), ("put", &self.upload_times)] {
            into.add_histogram(Metric::S3RequestTime, vec![name.to_owned().into(), operation.into()], &times.0);
        }
    }
}

/// Operations on the default backend of a map for requests that named none, and without a prefix where every gRPC call
/// must have one: those of HTTP. By the names that bazel-remote's fork gives them.
#[derive(Default)]
pub(super) struct Unnamed {
    operations: [Counter; 3],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Download,
    Contains,
    Upload,
}

impl Unnamed {
    pub fn note(&self, operation: Operation) {
        self.operations[operation as usize].count();
    }

    pub fn report(&self, metric: Metric, into: &mut Snapshot) {
        for (operation, name) in
            [(Operation::Download, "DOWNLOAD"), (Operation::Contains, "CONTAINS"), (Operation::Upload, "UPLOAD")]
        {
            into.add_for(metric, [name], &self.operations[operation as usize]);
        }
    }
}
