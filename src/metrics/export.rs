//! Collects from all cores, by message and within a time, and writes what Prometheus and `/status` read.

use std::cell::Cell;
use std::fmt::Write as _;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use prometheus::TextEncoder;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric as Sample, MetricFamily, MetricType};

use super::overview;
use super::percore::{Distribution, Labels, Snapshot, Value};
use super::shared::Shared;
use super::table::{Kind, Metric, Row, Scope, TABLE};
use crate::limits::{METRICS_ASKS_MAX, METRICS_COLLECT_TIME};
use crate::rt::channel::{self, Receiver, ReplyTo, Sender};
use crate::rt::host::ProcessStats;
use crate::rt::local::Local;
use crate::rt::{self, HandlerPanicked};

/// What does not change while the process runs.
#[derive(Debug, Clone)]
pub struct Facts {
    /// In front of the names of `Scope::Ours` (`--metrics_prefix`).
    pub prefix: &'static str,
    /// And in front of those of HTTP (`--http_metrics_prefix`).
    pub is_http_prefixed: bool,
    /// Off: `/metrics` is not there (`--enable_endpoint_metrics=false`). Can change.
    pub is_enabled: Cell<bool>,
    /// Bytes (`--max_size`).
    pub max_size: u64,
    /// Bytes (`--memory_limit`).
    pub memory_limit: u64,
    /// Seconds since 1970.
    pub started_s: u64,
}

impl Default for Facts {
    fn default() -> Self {
        let is_enabled = Cell::new(true);
        Self { prefix: "bazel_remote", is_http_prefixed: false, is_enabled, max_size: 0, memory_limit: 0, started_s: 0 }
    }
}

/// The version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The commit of this build, where whoever built it said so (`RINGCAS_GIT_COMMIT`).
pub const REVISION: &str = match option_env!("RINGCAS_GIT_COMMIT") {
    Some(commit) => commit,
    None => "",
};

/// A request to put a core's snapshot on the board.
type Ask = ReplyTo<()>;

/// The last snapshot of every core, and of the process.
///
/// Why kept: a core that is too busy to answer must not make counters fall, which Prometheus takes for a restart. The locks
/// are taken when somebody asks, never on the path of a request.
struct Board {
    cores: Box<[Mutex<Arc<Snapshot>>]>,
    process: Mutex<ProcessStats>,
}

/// One core's end of the collection, made before the cores start.
pub struct Port {
    core: usize,
    asks: Vec<Sender<Ask>>,
    inbox: Receiver<Ask>,
    board: Arc<Board>,
    facts: Facts,
}

/// Connects the cores. In the order of the cores.
pub fn wire(core_count: usize, facts: &Facts) -> Vec<Port> {
    let cores = std::iter::repeat_with(Mutex::default).take(core_count).collect();
    let board = Arc::new(Board { cores, process: Mutex::default() });
    let (asks, inboxes): (Vec<_>, Vec<_>) = (0..core_count).map(|_| channel::bounded(METRICS_ASKS_MAX)).unzip();
    let ports = inboxes.into_iter().enumerate().map(|(core, inbox)| Port {
        core,
        asks: asks.clone(),
        inbox,
        board: board.clone(),
        facts: facts.clone(),
    });
    ports.collect()
}

impl Port {
    /// The side that asks, and the side that answers. Run the latter in the background.
    pub fn split(self) -> (Exporter, Reporter) {
        let [metrics, overview, status] = [(); 3].map(|()| Shared::default());
        let (asks, facts) = (Local::new(self.asks), Rc::new(self.facts));
        let exporter = Exporter { asks, board: self.board.clone(), facts, metrics, overview, status };
        (exporter, Reporter { core: self.core, inbox: self.inbox, board: self.board })
    }
}

/// Answers for one core.
pub struct Reporter {
    core: usize,
    inbox: Receiver<Ask>,
    board: Arc<Board>,
}

impl Reporter {
    /// Answers with what `source` adds, until it says that there is nothing any more.
    pub async fn run(mut self, source: impl Fn(&mut Snapshot) -> bool) {
        while let Some(ask) = self.inbox.recv().await {
            let made = rt::catch(async {
                let mut snapshot = Snapshot::default();
                source(&mut snapshot).then_some(snapshot)
            });
            match made.await {
                Ok(Some(snapshot)) => *lock(&self.board.cores[self.core]) = Arc::new(snapshot),
                Ok(None) => return,
                // Who asks sees a core that is silent.
                Err(HandlerPanicked) => continue,
            }
            ask.send(());
        }
    }
}

/// Asks all cores. Core-local; clones are the same one.
#[derive(Clone)]
pub struct Exporter {
    asks: Local<Vec<Sender<Ask>>>,
    board: Arc<Board>,
    facts: Rc<Facts>,
    metrics: Shared,
    overview: Shared,
    status: Shared,
}

impl Exporter {
    /// For a server that has no cores to ask.
    pub fn alone() -> Self {
        wire(1, &Facts::default()).remove(0).split().0
    }

    /// Whether `/metrics` is served.
    pub fn is_enabled(&self) -> bool {
        self.facts.is_enabled.get()
    }

    /// Says whether `/metrics` is served from now on.
    pub fn enable(&self, is_enabled: bool) {
        self.facts.is_enabled.set(is_enabled);
    }

    /// All cores' series as they are now, of those that answer in time; of others as they last were.
    pub async fn collect(&self) -> Snapshot {
        let replies: Vec<_> = self.asks.with(|asks| {
            let ask = |core: &mut Sender<Ask>| {
                let (reply_to, reply) = channel::reply();
                // A full queue: that core has not answered for some scrapes.
                core.try_send(reply_to).ok().map(|()| reply)
            };
            asks.iter_mut().map(ask).collect()
        });
        let board = self.board.clone();
        let process = rt::blocking(move || {
            if let Ok(stats) = rt::host::process_stats() {
                *lock(&board.process) = stats;
            }
        });
        let mut silent = replies.len();
        let answers = async {
            for reply in replies.into_iter().flatten() {
                silent -= usize::from(reply.recv().await.is_ok());
            }
            // A failure leaves the last ones.
            let _ = process.await;
        };
        let _ = rt::time::timeout(METRICS_COLLECT_TIME, answers).await;
        let mut all = Snapshot::default();
        for core in &self.board.cores {
            let snapshot = lock(core).clone();
            all.merge(&snapshot);
        }
        all.add(Metric::CoresSilent, silent);
        self.add_process(&mut all);
        all.floor_gauges();
        all
    }

    fn add_process(&self, all: &mut Snapshot) {
        let stats = lock(&self.board.process).clone();
        all.add_for(Metric::DiskCacheSizeLimit, ["evict"], self.facts.max_size);
        all.add_for(Metric::DiskCacheSizeLimit, ["reject"], self.facts.max_size);
        all.add(Metric::MemoryLimit, self.facts.memory_limit);
        all.add_for(Metric::BuildInfo, [REVISION, VERSION], 1.0);
        all.add(Metric::ProcessCpu, stats.cpu);
        all.add(Metric::ProcessOpenFds, stats.open_fds);
        all.add(Metric::ProcessMaxFds, stats.max_fds);
        all.add(Metric::ProcessResident, stats.resident_bytes);
        all.add(Metric::ProcessVirtual, stats.virtual_bytes);
        all.add(Metric::ProcessStart, self.facts.started_s);
    }

    /// The answer to `GET /metrics`, in Prometheus' text format 0.0.4. `None`, here and below: a panic.
    pub async fn metrics(&self) -> Option<Bytes> {
        let make = |this: Self| async move {
            let Facts { prefix, is_http_prefixed, .. } = &*this.facts;
            render(&this.collect().await, prefix, *is_http_prefixed)
        };
        self.metrics.get(|| make(self.clone())).await
    }

    /// What the page at `/` shows, as JSON.
    pub async fn overview(&self) -> Option<Bytes> {
        let make =
            |this: Self| async move { overview::render(&this.collect().await, &this.facts, rt::time::unix_seconds()) };
        self.overview.get(|| make(self.clone())).await
    }

    /// The answer to `GET /status`: bazel-remote's keys, in its order.
    pub async fn status(&self) -> Option<Bytes> {
        let make = |this: Self| async move { this.status_of(&this.collect().await) };
        self.status.get(|| make(self.clone())).await
    }

    fn status_of(&self, all: &Snapshot) -> String {
        let whole = |metric| all.total(metric) as u64;
        let tasks = whole(Metric::Connections) + whole(Metric::CallsInflight) + whole(Metric::Tasks);
        let mut text = String::from("{\n");
        let mut line = |key: &str, value: String, end: &str| {
            let _ = writeln!(text, " \"{key}\": {value}{end}");
        };
        line("CurrSize", whole(Metric::DiskCacheSize).to_string(), ",");
        line("UncompressedSize", whole(Metric::DiskCacheLogical).to_string(), ",");
        line("ReservedSize", whole(Metric::DiskCacheReserved).to_string(), ",");
        line("MaxSize", self.facts.max_size.to_string(), ",");
        line("NumFiles", whole(Metric::DiskCacheEntries).to_string(), ",");
        line("ServerTime", rt::time::unix_seconds().to_string(), ",");
        line("GitCommit", format!("\"{REVISION}\""), ",");
        line("GitTags", format!("\"v{VERSION}\""), ",");
        line("NumGoroutines", tasks.to_string(), "");
        text.push_str("}\n");
        text
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes every series, in the order of the table.
fn render(all: &Snapshot, prefix: &str, is_http_prefixed: bool) -> String {
    let is_prefixed = |row: &Row| row.scope == Scope::Ours || (is_http_prefixed && row.name.starts_with("http_"));
    let prefixed = TABLE.iter().map(|row| (row, is_prefixed(row).then_some(prefix)));
    let families: Vec<MetricFamily> = prefixed.filter_map(|(row, prefix)| family(row, all, prefix)).collect();
    let mut text = String::new();
    let written = TextEncoder::new().encode_utf8(&families, &mut text);
    debug_assert!(written.is_ok(), "no family is empty, and a string takes everything");
    text
}

/// `None` when there is no series.
fn family(row: &Row, all: &Snapshot, prefix: Option<&str>) -> Option<MetricFamily> {
    let samples: Vec<Sample> = all.of(row.metric).map(|(labels, value)| sample(row, labels, value)).collect();
    if samples.is_empty() {
        return None;
    }
    let mut family = MetricFamily::default();
    family.set_name(match prefix {
        Some(prefix) => format!("{prefix}_{}", row.name),
        None => row.name.to_owned(),
    });
    family.set_help(row.help.to_owned());
    family.set_field_type(match row.kind {
        Kind::Counter => MetricType::COUNTER,
        Kind::Gauge => MetricType::GAUGE,
        Kind::Histogram => MetricType::HISTOGRAM,
    });
    family.set_metric(samples);
    Some(family)
}

fn sample(row: &Row, labels: &Labels, value: &Value) -> Sample {
    let pair = |(name, value): (&&str, &std::borrow::Cow<'static, str>)| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value(value.clone().into_owned());
        pair
    };
    let mut sample = Sample::default();
    sample.set_label(row.labels.iter().zip(labels).map(pair).collect());
    match (row.kind, value) {
        (Kind::Counter, Value::Number(number)) => {
            let mut counter = Counter::default();
            counter.set_value(*number);
            sample.set_counter(counter);
        }
        (Kind::Histogram, Value::Distribution(distribution)) => sample.set_histogram(histogram(distribution)),
        (Kind::Gauge, Value::Number(number)) => {
            let mut gauge = Gauge::default();
            gauge.set_value(*number);
            sample.set_gauge(gauge);
        }
        (Kind::Counter | Kind::Gauge, Value::Distribution(_)) | (Kind::Histogram, Value::Number(_)) => {
            debug_assert!(false, "{}: a value of another kind", row.name);
        }
    }
    sample
}

/// Cumulative, as Prometheus wants it; the bucket `+Inf` is the encoder's.
fn histogram(distribution: &Distribution) -> Histogram {
    let mut below = 0;
    let bucket = |(bound, count): (&f64, &u64)| {
        below += count;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*bound);
        bucket.set_cumulative_count(below);
        bucket
    };
    let mut histogram = Histogram::default();
    histogram.set_bucket(distribution.bounds.iter().zip(&distribution.counts).map(bucket).collect());
    histogram.set_sample_count(distribution.counts.iter().sum());
    histogram.set_sample_sum(distribution.sum);
    histogram
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::metrics::Counter as Count;
    use crate::rt::cores::block_on;
    use crate::rt::time::{self, Either};

    /// Goal: a core that does not answer delays nobody beyond the time allowed, is counted, and its counters do not fall.
    /// Method: two cores; one answers always, the other once.
    #[test]
    fn a_stuck_core_is_shown_as_it_was() {
        block_on(async {
            let mut ports = wire(2, &Facts::default());
            let (exporter, second) = ports.pop().expect("two").split();
            let (_, first) = ports.pop().expect("one").split();
            let (answers, stop) = (Rc::new(Count::default()), Rc::new(Count::default()));
            rt::spawn(first.run(|into| {
                into.add(Metric::StoredBlobs, 5u64);
                true
            }));
            let counted = answers.clone();
            rt::spawn(second.run(move |into| {
                counted.count();
                into.add(Metric::StoredBlobs, 2u64);
                stop.get() == 0 && counted.get() == 1
            }));
            let all = exporter.collect().await;
            assert_eq!((all.total(Metric::StoredBlobs), all.total(Metric::CoresSilent)), (7.0, 0.0));
            for _ in 0..2 * METRICS_ASKS_MAX {
                let all = time::timeout(Duration::from_secs(10), exporter.collect()).await.expect("an end");
                assert_eq!((all.total(Metric::StoredBlobs), all.total(Metric::CoresSilent)), (7.0, 1.0));
            }
            assert_eq!(answers.get(), 2);
        });
    }

    /// Goal: an answer takes two collections at most, each of which is over in its time (see `limits`), whatever cores and others who
    /// ask do. Method: a core that never answers, and some who ask and go away at once; what the core was asked is counted.
    #[test]
    fn an_answer_takes_two_collections_at_most() {
        block_on(async {
            let mut ports = wire(2, &Facts::default());
            let (_, mut silent) = ports.pop().expect("two").split();
            let (exporter, reporter) = ports.pop().expect("one").split();
            rt::spawn(reporter.run(|into| {
                into.add(Metric::DiskCacheEntries, 5u64);
                true
            }));
            for _ in 0..4 {
                let _ = time::race(exporter.status(), time::yield_once()).await;
            }
            let text = exporter.status().await.expect("no panic");
            assert!(std::str::from_utf8(&text).expect("text").contains("\"NumFiles\": 5,"), "{text:?}");
            let mut asked = 0;
            while let Either::Left(Some(_)) = time::race(silent.inbox.recv(), std::future::ready(())).await {
                asked += 1;
            }
            assert_eq!(asked, 2);
        });
    }

    /// Goal: the text is what Prometheus reads: help and type once, labels, cumulative buckets, the prefix where it
    /// belongs. Method: one metric of each kind.
    #[test]
    fn renders_the_text_format() {
        let (mut all, times) = (Snapshot::default(), super::super::Histogram::of_times());
        all.add_for(Metric::Received, ["grpc"], 1e15);
        all.add(Metric::ProcessOpenFds, 7u64);
        times.observe_time(Duration::from_micros(200));
        times.observe_time(Duration::from_secs(1000));
        all.add_histogram(Metric::DiskFlushTime, vec![], &times);
        all.add_labels(Metric::HttpInflight, vec!["GET".into(), "".into()], 1u64);
        assert!(render(&all, "ringcas", true).contains("\nringcas_http_requests_inflight{"));
        let text = render(&all, "ringcas", false);
        assert!(text.contains("\nhttp_requests_inflight{"), "{text}");
        for line in [
            "# TYPE ringcas_received_bytes_total counter",
            "ringcas_received_bytes_total{protocol=\"grpc\"} 1000000000000000",
            "# TYPE process_open_fds gauge",
            "process_open_fds 7",
            "# TYPE ringcas_disk_flush_seconds histogram",
            "ringcas_disk_flush_seconds_bucket{le=\"0.0001\"} 0",
            "ringcas_disk_flush_seconds_bucket{le=\"0.00025\"} 1",
            "ringcas_disk_flush_seconds_bucket{le=\"320\"} 1",
            "ringcas_disk_flush_seconds_bucket{le=\"+Inf\"} 2",
            "ringcas_disk_flush_seconds_sum 1000.0002",
            "ringcas_disk_flush_seconds_count 2",
        ] {
            assert!(text.lines().any(|l| l == line), "no line {line} in\n{text}");
        }
        assert_eq!(text.matches("# HELP").count(), 4);
    }
}
