//! The rules of a single call: what is no call, what is a bad one, and how a call ends.

use super::*;
use std::sync::{Arc, Mutex};

use crate::limits;
use crate::store::fake::digest_of;
use crate::wire::health::HealthCheckRequest;
use crate::wire::reapi::{self, GetActionResultRequest};

const GET_RESULT: &str = "/build.bazel.remote.execution.v2.ActionCache/GetActionResult";

/// Goal: what is not gRPC gets an HTTP status, an unknown method UNIMPLEMENTED in trailers only. Method: one request
/// for each.
#[test]
fn refuses_what_it_does_not_serve() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let get = Request::get("http://cache/status").body(()).unwrap();
        let mut call = client.start_request(get).await;
        call.send(Bytes::new(), true);
        assert_eq!(call.answer().await.http, 405);
        for (content_type, served) in [
            ("application/json", false),
            ("application/grpc-web", false),
            ("application/grpc", true),
            ("application/grpc+proto", true),
            ("application/grpc;charset=utf-8", true),
        ] {
            let answer = client.call_with("/no.Service/Method", &[("content-type", content_type)], Bytes::new()).await;
            if served {
                assert_eq!(answer.http, 200);
                answer.expect(Code::Unimplemented, "/no.Service/Method");
                assert!(answer.trailers.is_empty(), "the status is in the headers");
                assert_eq!(answer.headers["content-type"], "application/grpc");
            } else {
                assert_eq!(answer.http, 415);
            }
        }
        client.call("/google.bytestream.ByteStream/Erase", Bytes::new()).await.expect(Code::Unimplemented, "Erase");
    });
}

/// Goal: a bad body of a unary call is refused with the code that gRPC or REAPI names, without allocating what a
/// prefix claims. Method: one body for each rule, sent to QueryWriteStatus.
#[test]
fn refuses_bad_unary_bodies() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let good = frame(&ReadRequest { resource_name: write_name(digest_of(b"x")), ..Default::default() });
        client.call(QUERY, good.clone()).await.expect(Code::Ok, "");
        let two = [&good[..], &good].concat();
        let truncated = good.slice(..good.len() - 1);
        let claim = [&[0][..], &(limits::GRPC_MESSAGE_LEN_MAX as u32 + 1).to_be_bytes()].concat();
        let limit = limits::GRPC_MESSAGE_LEN_MAX.to_string();
        let cases: [(&[u8], Code, &str); 8] = [
            (b"", Code::Unimplemented, "exactly one"),
            (&two, Code::Unimplemented, "exactly one"),
            (&truncated, Code::InvalidArgument, "middle of a message"),
            (b"\0\0", Code::InvalidArgument, "middle of a message"),
            (&claim, Code::ResourceExhausted, &limit),
            (b"\x01\0\0\0\0", Code::Internal, "grpc-encoding"),
            (b"\x07\0\0\0\0", Code::Internal, "flag"),
            (b"\0\0\0\0\x02\x0a\x05", Code::InvalidArgument, "QueryWriteStatusRequest"),
        ];
        for (body, code, text) in cases {
            client.call(QUERY, Bytes::copy_from_slice(body)).await.expect(code, text);
        }
        let gzip = [("grpc-encoding", "gzip")];
        let answer = client.call_with(QUERY, &gzip, Bytes::from_static(b"\x01\0\0\0\0")).await;
        answer.expect(Code::Unimplemented, "grpc-encoding");
        assert_eq!(answer.headers["grpc-accept-encoding"], "identity");
        client.call_with(QUERY, &gzip, good).await.expect(Code::Ok, "");
        assert_eq!(harness.server.counters.connections_failed.get(), 0);
    });
}

/// Goal: cuts between DATA frames do not matter to a unary call. Method: one request, cut in two at every byte.
#[test]
fn unary_bodies_may_be_cut_anywhere() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let good = frame(&ReadRequest { resource_name: write_name(digest_of(b"x")), ..Default::default() });
        for cut in 0..=good.len() {
            let mut call = client.start(QUERY, &[]).await;
            call.send(good.slice(..cut), false);
            time::yield_once().await;
            call.send(good.slice(cut..), true);
            call.answer().await.expect(Code::Ok, "");
        }
    });
}

/// Goal: a message larger than the windows comes through, because its credit is returned as it comes. Method: 3 MiB of
/// an unknown field in a QueryWriteStatus, with a stream window of 64 KiB; then the core's memory is free again.
#[test]
fn unary_messages_may_be_larger_than_the_window() {
    with_stream_window(64 << 10, async |harness| {
        let mut client = harness.connect().await;
        let name = write_name(digest_of(b"x"));
        let request = [frame(&ReadRequest { resource_name: name, ..Default::default() })[5..].to_vec(), {
            let mut unknown = vec![0x7a];
            prost::encoding::encode_varint(3 << 20, &mut unknown);
            unknown.resize(unknown.len() + (3 << 20), 0);
            unknown
        }]
        .concat();
        let body = [&grpc_frame::prefix(request.len())[..], &request].concat();
        client.call(QUERY, body.into()).await.expect(Code::Ok, "");
    });
}

/// Goal: a panic costs its call. Method: the store panics once; the call gets INTERNAL and the connection serves on.
#[test]
fn a_panic_is_internal() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let digest = harness.store.fake.add(&b"blob"[..]);
        harness.store.brake(|brake| brake.panic = true);
        client.read(&read_name(digest), 0, 0).await.expect(Code::Internal, "");
        assert_eq!(rt::core_stats().panics, 1);
        client.read(&read_name(digest), 0, 0).await.expect(Code::Ok, "");
    });
}

/// Goal: `grpc-timeout` ends a call, and what it waited for is dropped at that moment. Method: a store that never
/// answers, and a timeout in each unit that is short enough; also one that is not a timeout.
#[test]
fn deadlines_end_calls() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let digest = harness.store.fake.add(&b"blob"[..]);
        let request = || frame(&ReadRequest { resource_name: read_name(digest), ..Default::default() });
        harness.store.brake(|brake| brake.hold = true);
        for timeout in ["20m", "20000u", "20000000n", "0S"] {
            let answer = client.call_with(READ, &[("grpc-timeout", timeout)], request()).await;
            answer.expect(Code::DeadlineExceeded, "deadline");
            assert_eq!(harness.store.brake(|brake| brake.waiting), 0);
        }
        harness.store.brake(|brake| brake.hold = false);
        // Nothing is answered after no time, however fast it is.
        for timeout in ["0n", "00000000H"] {
            client
                .call_with(READ, &[("grpc-timeout", timeout)], request())
                .await
                .expect(Code::DeadlineExceeded, "deadline");
        }
        for timeout in ["60S", "1M", "99999999H"] {
            client.call_with(READ, &[("grpc-timeout", timeout)], request()).await.expect(Code::Ok, "");
        }
        let answer = client.call_with(READ, &[("grpc-timeout", "soon")], request()).await;
        answer.expect(Code::InvalidArgument, "grpc-timeout");
    });
}

/// Goal: a cancelled call is dropped at once, in each of its phases: while the request comes, while the store works,
/// and while the reply waits for window. Method: RST_STREAM in each phase, then the gauges.
#[test]
fn cancellation_frees_everything() {
    with_server(async |harness| {
        let mut client = harness.connect_with(h2::client::Builder::new().initial_window_size(1000)).await;
        let digest = harness.store.fake.add(bytes(100_000));
        let name = read_name(digest);
        let request = frame(&ReadRequest { resource_name: name, ..Default::default() });
        let open = &harness.server.counters.calls_open;

        let mut half_sent = client.start(READ, &[]).await;
        half_sent.send(request.slice(..3), false);
        harness.until("the call runs", || open.get() == 1).await;
        half_sent.stream.send_reset(Reason::CANCEL);
        harness.until("it is gone", || open.get() == 0).await;

        harness.store.brake(|brake| brake.hold = true);
        let mut in_store = client.start(READ, &[]).await;
        in_store.send(request.clone(), true);
        harness.until("it is in the store", || harness.store.brake(|brake| brake.waiting) == 1).await;
        in_store.stream.send_reset(Reason::CANCEL);
        harness.until("it is gone", || open.get() == 0).await;
        assert_eq!(harness.store.brake(|brake| brake.waiting), 0);

        harness.store.brake(|brake| (brake.hold, brake.endless) = (false, 1 << 40));
        let mut in_reply = client.start(READ, &[]).await;
        in_reply.send(request, true);
        harness.until("a piece was made", || harness.store.brake(|brake| brake.pieces_made) > 0).await;
        in_reply.stream.send_reset(Reason::CANCEL);
        harness.until("it is gone", || open.get() == 0).await;
        assert_eq!(harness.server.counters.calls_cut.get(), 3);
    });
}

/// Goal: a call without end does not keep a draining server. Method: a health watch, then a drain.
#[test]
fn a_drain_ends_watches() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let mut call = client.start("/grpc.health.v1.Health/Watch", &[]).await;
        call.send(frame(&HealthCheckRequest::default()), true);
        harness.until("it runs", || harness.server.counters.calls_open.get() == 1).await;
        time::sleep(Duration::from_millis(20)).await;
        harness.server.drain();
        let answer = call.answer().await;
        answer.expect(Code::Unavailable, "shutting down");
        assert_eq!(answer.messages.len(), 1);
        drop(client);
        time::timeout(Duration::from_secs(30), harness.server.drained()).await.unwrap();
    });
}

/// Goal: with the access log on, each call is one line that says what it was about. Method: a Read, a
/// result asked for, an unknown method and a cancelled call, with a subscriber that keeps what is written.
#[test]
fn logs_one_line_for_each_call() {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Lines {
        fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(data);
            Ok(data.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let options = Options { access_log: true.into(), ..Default::default() };
    with_options(settings(), options, async |harness| {
        let mut client = harness.connect().await;
        let name = read_name(harness.store.fake.add(&b"blob"[..]));
        client.read(&name, 0, 0).await.expect(Code::Ok, "");
        let digest = Some(reapi::Digest { hash: "12".to_owned(), size_bytes: 3 });
        let request = GetActionResultRequest {
            instance_name: "main".to_owned(),
            action_digest: digest,
            ..GetActionResultRequest::default()
        };
        client.call(GET_RESULT, frame(&request)).await.expect(Code::InvalidArgument, "hash");
        client.call("/no.Service/Method", Bytes::new()).await.expect(Code::Unimplemented, "");
        harness.store.brake(|brake| brake.hold = true);
        let mut call = client.start(READ, &[]).await;
        call.send(frame(&ReadRequest { resource_name: name.clone(), ..Default::default() }), true);
        harness.until("it is in the store", || harness.store.brake(|brake| brake.waiting) == 1).await;
        call.stream.send_reset(Reason::CANCEL);
        harness.until("it is gone", || harness.server.counters.calls_open.get() == 0).await;
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(
            lines[0].contains(&format!("ByteStream.Read {name} OK from=unix in=")) && lines[0].contains(" out=11 "),
            "{text}"
        );
        assert!(lines[1].contains("ActionCache.GetActionResult main/ac/12 InvalidArgument from=unix "), "{text}");
        assert!(lines[2].contains("unknown - Unimplemented"), "{text}");
        assert!(lines[3].contains(&format!("ByteStream.Read {name} cut")), "{text}");
    });
}
