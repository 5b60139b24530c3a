//! What the page at `/` shows, as JSON: some of the metrics, by name, for a person's eyes.

use std::collections::BTreeMap;

use super::export::{Facts, REVISION, VERSION};
use super::percore::{Snapshot, Value};
use super::table::Metric;
use crate::pure::json::Json;

/// One object. Counters count since the start; whoever shows rates compares two of them by `time_s`.
pub fn render(all: &Snapshot, facts: &Facts, time_s: u64) -> String {
    let disk = Json::object()
        .raw("used_bytes", all.total(Metric::DiskCacheSize))
        .raw("max_bytes", facts.max_size)
        .raw("logical_bytes", all.total(Metric::DiskCacheLogical))
        .raw("entries", all.total(Metric::DiskCacheEntries))
        .raw("recovering_shards", all.total(Metric::DiskCacheRecoveringShards))
        .end();
    let memory = Json::object()
        .raw("held_bytes", all.total(Metric::MemoryHeld))
        .raw("resident_bytes", all.total(Metric::ProcessResident))
        .raw("limit_bytes", facts.memory_limit)
        .end();
    let writes = Json::object()
        .raw("inflight", all.total(Metric::WriteSlotsInflight))
        .raw("limit", all.total(Metric::WriteSlotsLimit))
        .raw("refused", all.total(Metric::WritesShed))
        .end();
    let (received, sent) = (all.total(Metric::Received), all.total(Metric::Sent));
    let traffic = Json::object().raw("received_bytes", received).raw("sent_bytes", sent).end();
    Json::object()
        .text("version", VERSION)
        .text("revision", REVISION)
        .raw("time_s", time_s)
        .raw("up_s", time_s.saturating_sub(facts.started_s))
        .raw("disk", disk)
        .raw("memory", memory)
        .raw("writes", writes)
        .raw("traffic", traffic)
        .raw("calls", all.total(Metric::CallsInflight))
        .raw("lookups", lookups(all))
        .raw("cores", cores(all))
        .raw("backends", backends(all))
        .end()
}

/// Hits and misses of each kind of read.
fn lookups(all: &Snapshot) -> String {
    // Labels: kind, method, status.
    let mut kinds: BTreeMap<(&str, &str), [f64; 2]> = BTreeMap::new();
    for (labels, value) in all.of(Metric::IncomingRequests) {
        let [kind, method, status] = &labels[..] else { continue };
        kinds.entry((kind, method)).or_default()[usize::from(status == "miss")] += number(value);
    }
    let item = |((kind, method), [hits, misses]): (&(&str, &str), &[f64; 2])| {
        Json::object().text("kind", kind).text("method", method).raw("hits", hits).raw("misses", misses).end()
    };
    kinds.iter().map(item).fold(Json::list(), Json::item).end()
}

/// What each core does.
fn cores(all: &Snapshot) -> String {
    let mut cores: BTreeMap<u64, [f64; 4]> = BTreeMap::new();
    for (at, metric) in
        [Metric::Connections, Metric::CoreBusyTime, Metric::CoreCpuTime, Metric::CoreStallTime].into_iter().enumerate()
    {
        for (labels, value) in all.of(metric) {
            let core = labels.first().and_then(|core| core.parse().ok());
            if let Some(core) = core {
                cores.entry(core).or_default()[at] += number(value);
            }
        }
    }
    let item = |(core, [connections, busy, cpu, stalled]): (&u64, &[f64; 4])| {
        Json::object()
            .raw("core", core)
            .raw("connections", connections)
            .raw("busy_s", busy)
            .raw("cpu_s", cpu)
            .raw("stalled_s", stalled)
            .end()
    };
    cores.iter().map(item).fold(Json::list(), Json::item).end()
}

/// How each backend is.
fn backends(all: &Snapshot) -> String {
    let of = |metric, name: &str| -> f64 {
        let series = all.of(metric).filter(|(labels, _)| labels.first().is_some_and(|backend| backend == name));
        series.fold(0.0, |sum, (_, value)| sum + number(value))
    };
    let item = |(labels, state): (&super::percore::Labels, &Value)| {
        let name = labels.first().map_or("", |name| name);
        // Source: bazel-remote's numbers.
        let breaker = match number(state) {
            0.0 => "closed",
            1.0 => "half-open",
            _ => "open",
        };
        Json::object()
            .text("name", name)
            .text("breaker", breaker)
            .raw("hits", of(Metric::S3CacheHits, name))
            .raw("misses", of(Metric::S3CacheMisses, name))
            .raw("failures", of(Metric::S3Failures, name))
            .raw("queued", of(Metric::S3UploadQueueDepth, name))
            .raw("owed", of(Metric::S3OwedUploads, name))
            .end()
    };
    all.of(Metric::S3BreakerState).map(item).fold(Json::list(), Json::item).end()
}

fn number(value: &Value) -> f64 {
    match value {
        Value::Number(number) => *number,
        Value::Distribution(distribution) => distribution.sum,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: what cores and backends have said stands in the JSON, sorted by number, summed by name. Method: a snapshot by
    /// hand, eleven cores among it.
    #[test]
    fn everything_stands_in_its_place() {
        let mut all = Snapshot::default();
        for core in [10usize, 2] {
            all.add_core(Metric::CoreBusyTime, core, 1.5);
            all.add_labels(Metric::Connections, vec![core.to_string().into(), "grpc".into()], 3.0);
            all.add_labels(Metric::Connections, vec![core.to_string().into(), "http".into()], 1.0);
        }
        for (status, count) in [("hit", 9.0), ("miss", 1.0)] {
            all.add_for(Metric::IncomingRequests, ["ac", "get", status], count);
        }
        all.add_labels(Metric::S3BreakerState, vec!["a \"b\"".into()], 2.0);
        all.add_labels(Metric::S3OwedUploads, vec!["a \"b\"".into()], 7.0);
        let facts = Facts { started_s: 100, max_size: 5, ..Facts::default() };
        let text = render(&all, &facts, 160);
        let expected = [
            r#""up_s":60"#,
            r#""max_bytes":5"#,
            r#""lookups":[{"kind":"ac","method":"get","hits":9,"misses":1}]"#,
            r#""cores":[{"core":2,"connections":4,"busy_s":1.5,"cpu_s":0,"stalled_s":0},{"core":10,"connections":4,"#,
            r#""backends":[{"name":"a \"b\"","breaker":"open","hits":0,"misses":0,"failures":0,"queued":0,"owed":7}]"#,
        ];
        for part in expected {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
}
