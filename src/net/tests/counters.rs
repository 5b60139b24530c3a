//! Counts of calls: by method, by code, of messages and bytes.

use super::*;
use crate::metrics::percore::{Labels, Value};
use crate::metrics::{Metric, Snapshot};
use crate::store::fake::digest_of;

/// The values of a metric, by method and, where there is one, code. Zeros are left out.
fn series(harness: &Harness, metric: Metric) -> Vec<String> {
    let mut all = Snapshot::default();
    harness.server.report(0, &mut all);
    let line = |(labels, value): (&Labels, &Value)| {
        let number = match value {
            Value::Number(number) => *number,
            Value::Distribution(distribution) => distribution.counts.iter().sum::<u64>() as f64,
        };
        let of_code = metric == Metric::GrpcHandled;
        let name = if of_code { format!("{} {}", labels[1], labels[0]) } else { labels[0].to_string() };
        (number > 0.0).then(|| format!("{name} {number}"))
    };
    let mut lines: Vec<String> = all.of(metric).filter_map(line).collect();
    lines.sort();
    lines
}

/// Goal: each call counts once as started and once as handled, under the code that its client saw, with its messages.
/// Method: calls of each shape that end well, end badly, are unknown, and are cancelled while they run.
#[test]
fn calls_are_counted_by_method_and_code() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let digest = harness.store.fake.add(bytes(60_000));
        client.read(&read_name(digest), 0, 0).await.expect(Code::Ok, "");
        client.read(&read_name(digest_of(b"gone")), 0, 0).await.expect(Code::NotFound, "");
        client.read("blobs/x", 0, 0).await.expect(Code::InvalidArgument, "");
        let blob = bytes(500_000);
        client.write(&upload(&write_name(digest_of(&blob)), &blob, 100_000, 0)).await.expect(Code::Ok, "");
        client.call(CHECK, frame(&crate::wire::health::HealthCheckRequest::default())).await.expect(Code::Ok, "");
        client.call("/no.such/Method", Bytes::new()).await.expect(Code::Unimplemented, "");
        harness.store.brake(|brake| brake.hold = true);
        let mut held = client.start(READ, &[]).await;
        let request = ReadRequest { resource_name: read_name(digest), ..Default::default() };
        held.send(frame(&request), true);
        harness.until("it is in the store", || harness.store.brake(|brake| brake.waiting) == 1).await;
        held.stream.send_reset(Reason::CANCEL);
        harness.until("it is cut", || harness.server.counters.calls_open.get() == 0).await;
        assert_eq!(series(harness, Metric::GrpcStarted), ["Check 1", "Read 4", "Write 1", "unknown 1"]);
        assert_eq!(
            series(harness, Metric::GrpcHandled),
            [
                "Check OK 1",
                "Read Canceled 1",
                "Read InvalidArgument 1",
                "Read NotFound 1",
                "Read OK 1",
                "Write OK 1",
                "unknown Unimplemented 1"
            ]
        );
        assert_eq!(series(harness, Metric::GrpcTime), ["Check 1", "Read 4", "Write 1", "unknown 1"]);
        assert_eq!(series(harness, Metric::GrpcReceived), ["Check 1", "Read 4", "Write 5"]);
        assert_eq!(series(harness, Metric::GrpcSent), ["Check 1", "Read 1", "Write 1"]);
        let mut all = Snapshot::default();
        harness.server.report(0, &mut all);
        let (received, sent) = (all.total(Metric::Received), all.total(Metric::Sent));
        assert!((500_000.0..502_000.0).contains(&received), "{received}");
        assert!((60_000.0..61_000.0).contains(&sent), "{sent}");
    });
}
