//! What clients can make a core hold: requests that they do not finish, replies that they do not read.

use super::*;
use crate::limits;
use crate::store::fake::digest_of;
use crate::wire::bytestream::ReadResponse;
use crate::wire::reapi::{self, BatchReadBlobsRequest};

/// A QueryWriteStatus of so many bytes more than it needs, in an unknown field.
fn long_query(len: usize) -> Bytes {
    let mut request = frame(&ReadRequest { resource_name: write_name(digest_of(b"x")), ..Default::default() })
        [grpc_frame::PREFIX_LEN..]
        .to_vec();
    request.push(0x7a);
    prost::encoding::encode_varint(len as u64, &mut request);
    request.resize(request.len() + len, 0);
    [&grpc_frame::prefix(request.len())[..], &request].concat().into()
}

fn batch_read(digest: Digest) -> Bytes {
    let digests = vec![reapi::Digest { hash: digest.hash.to_hex(), size_bytes: digest.size as i64 }];
    frame(&BatchReadBlobsRequest { digests, ..Default::default() })
}

/// Memory for this many bytes of requests, and windows so small that there is memory for large connection windows.
fn narrow(requests: u64) -> Settings {
    Settings { purse: Purse::alone(8 * requests), stream_window: 64 << 10, ..settings() }
}

/// Makes the server give the connection a larger window.
async fn widen(client: &mut Client) {
    let blob = bytes(10);
    client.write(&upload(&write_name(digest_of(&blob)), &blob, 10, 0)).await.expect(Code::Ok, "");
}

const NARROW: usize = 16 << 20;

/// Goal: who announces messages and sends nothing of them holds no memory and keeps nobody from being served. Method:
/// 200 streams on two connections that each send the prefix of a 16 MiB message; then calls of all sizes on these and on
/// another connection.
#[test]
fn announcements_hold_nothing() {
    with_server(async |harness| {
        let mut clients = [harness.connect().await, harness.connect().await];
        let mut calls = Vec::new();
        for client in &mut clients {
            for _ in 0..100 {
                let mut call = client.start(QUERY, &[]).await;
                call.send(Bytes::from_static(b"\0\x01\0\0\0"), false);
                calls.push(call);
            }
        }
        harness.until("all run", || harness.server.counters.calls_open.get() == 200).await;
        assert_eq!(harness.server.request_memory.held(), 0);
        let [first, _] = clients;
        for mut client in [first, harness.connect().await] {
            client.call(CHECK, frame(&crate::wire::health::HealthCheckRequest::default())).await.expect(Code::Ok, "");
            for len in [0, 100_000, 4_000_000, 16_000_000] {
                client.call(QUERY, long_query(len)).await.expect(Code::Ok, "");
            }
        }
    });
}

/// Goal: half-sent messages are bounded for each connection; one that finds no room waits until another has ended, and
/// other connections are served meanwhile. Method: one call holds nearly all that there is.
#[test]
fn requests_wait_for_memory() {
    with_options(narrow(NARROW as u64), Options::default(), async |harness| {
        let mut client = harness.connect().await;
        widen(&mut client).await;
        let body = long_query(NARROW - 1_500_000);
        let mut first = client.start(QUERY, &[]).await;
        first.send(body.slice(..body.len() - 1), false);
        let held = || harness.server.request_memory.held();
        harness.until("the first holds nearly all", || held() > NARROW - 1_500_000).await;
        let mut second = client.start(QUERY, &[]).await;
        second.send(long_query(1_000_000), true);
        client.call(QUERY, long_query(1000)).await.expect(Code::Ok, "");
        harness.connect().await.call(QUERY, long_query(1_000_000)).await.expect(Code::Ok, "");
        assert!(held() <= NARROW);
        assert_eq!(harness.server.counters.calls_open.get(), 2);
        first.send(body.slice(body.len() - 1..), true);
        first.answer().await.expect(Code::Ok, "");
        second.answer().await.expect(Code::Ok, "");
        harness.until("all is given back", || held() == 0).await;
    });
}

/// Goal: when too many of a connection wait for memory, the youngest is refused, so that its window is free for those
/// that can end. Method: as above, with twenty that wait.
#[test]
fn the_youngest_request_gives_way() {
    with_options(narrow(NARROW as u64), Options::default(), async |harness| {
        let mut client = harness.connect().await;
        widen(&mut client).await;
        let body = long_query(NARROW - 1_500_000);
        let mut first = client.start(QUERY, &[]).await;
        first.send(body.slice(..body.len() - 1), false);
        let held = || harness.server.request_memory.held();
        harness.until("the first holds nearly all", || held() > NARROW - 1_500_000).await;
        let mut calls = Vec::new();
        for _ in 0..20 {
            let mut call = client.start(QUERY, &[]).await;
            call.send(long_query(1_000_000), true);
            calls.push(call);
        }
        // The window is a 32nd of nearly 8 MiB, which is three of the streams'.
        let waiting = 1;
        harness.until("the rest is refused", || harness.server.counters.calls_open.get() == 1 + waiting as u64).await;
        first.send(body.slice(body.len() - 1..), true);
        first.answer().await.expect(Code::Ok, "");
        let mut served = 0;
        for call in calls {
            let answer = call.answer().await;
            match answer.code() {
                0 => served += 1,
                _ => answer.expect(Code::ResourceExhausted, "memory"),
            }
        }
        assert_eq!(served, waiting);
    });
}

/// Goal: a client that stops in the middle of a request is given up, a unary one soon and a Write late, and the upload
/// is kept. Method: short limits; the prefix of a message, half of one, and a Write of half a blob.
#[test]
fn stalled_requests_are_given_up() {
    with_server(async |harness| {
        harness.server.request_stall.set(Duration::from_millis(20));
        harness.server.write_idle.set(Duration::from_millis(60));
        let mut client = harness.connect().await;
        for sent in [0, 3, 5, 50_000] {
            let mut call = client.start(QUERY, &[]).await;
            call.send(long_query(100_000).slice(..sent), false);
            call.answer().await.expect(Code::DeadlineExceeded, "nothing of the request came");
        }
        assert_eq!(harness.server.request_memory.held(), 0);
        let blob = bytes(600_000);
        let name = write_name(digest_of(&blob));
        let mut call = client.start(WRITE, &[]).await;
        call.send(frames(&upload(&name, &blob, 100_000, 0)[..3]), false);
        call.answer().await.expect(Code::DeadlineExceeded, "nothing of the request came");
        let request = frame(&crate::wire::bytestream::QueryWriteStatusRequest { resource_name: name });
        let status: crate::wire::bytestream::QueryWriteStatusResponse = client.call(QUERY, request).await.message();
        assert_eq!((status.committed_size, status.complete), (300_000, false));
    });
}

/// Goal: a client that does not read its replies makes the core hold a bounded number of them, whatever it asks for; the
/// rest is not even read from the store; others are served; all is free when it goes. Method: 100 BatchReads of 1 MiB
/// and a window of 1000 bytes.
#[test]
fn unread_replies_are_bounded() {
    with_server(async |harness| {
        let mut client = harness.connect_with(h2::client::Builder::new().initial_window_size(1000)).await;
        let digest = harness.store.fake.add(bytes(1 << 20));
        let mut calls = Vec::new();
        for _ in 0..100 {
            let mut call = client.start(BATCH_READ, &[]).await;
            call.send(batch_read(digest), true);
            calls.push(call);
        }
        let memory = &harness.server.reply_memory;
        let max = memory.connection_max();
        harness.until("its part is full", || memory.held() > max - (2 << 20)).await;
        time::sleep(Duration::from_millis(50)).await;
        assert!(memory.held() <= max, "{}", memory.held());
        assert!(harness.store.fake.with(|state| state.gets) <= max >> 20);
        let mut other = harness.connect().await;
        for _ in 0..20 {
            other.call(BATCH_READ, batch_read(digest)).await.expect(Code::Ok, "");
        }
        // The replies of calls that have ended are still held: they have not gone out.
        assert!(memory.held() > max - (2 << 20));
        for mut call in calls {
            call.stream.send_reset(Reason::CANCEL);
        }
        harness.until("it is gone", || memory.held() == 0).await;
        assert_eq!(harness.server.request_memory.held(), 0);
    });
}

/// Goal: the same for Reads of large blobs. Method: 100 of 1 TiB on a window of 1000 bytes, and a Read on another
/// connection that ends.
#[test]
fn unread_reads_are_bounded() {
    with_server(async |harness| {
        let mut client = harness.connect_with(h2::client::Builder::new().initial_window_size(1000)).await;
        let digest = Digest { size: 1 << 40, ..digest_of(b"any") };
        harness.store.brake(|brake| brake.endless = 1 << 40);
        let mut calls = Vec::new();
        for _ in 0..100 {
            let mut call = client.start(READ, &[]).await;
            call.send(frame(&ReadRequest { resource_name: read_name(digest), ..Default::default() }), true);
            calls.push(call);
        }
        let memory = &harness.server.reply_memory;
        let max = memory.connection_max();
        harness.until("its part is full", || memory.held() > max - 2 * limits::READ_HELD_LEN).await;
        time::sleep(Duration::from_millis(50)).await;
        assert!(memory.held() <= max, "{}", memory.held());
        let made = harness.store.brake(|brake| {
            brake.endless = 0;
            brake.pieces_made
        });
        assert!(made * limits::FRAME_LEN <= max, "{made} pieces");
        let blob = bytes(1 << 20);
        let digest = harness.store.fake.add(blob.clone());
        let answer = harness.connect().await.read(&read_name(digest), 0, 0).await;
        answer.expect(Code::Ok, "");
        drop(calls);
        drop(client);
        harness.until("it is gone", || memory.held() == 0).await;
    });
}

/// Goal: readers that stop give their memory back when it is scarce, so that others are served, and go on where they
/// stood. Method: 200 Reads of a blob of 2 MiB over 20 connections with windows of 1000 bytes, more than there is memory
/// for; another connection reads; then one that has stopped goes on.
#[test]
fn readers_that_stop_give_way() {
    let settings = Settings { purse: Purse::alone(64 << 20), ..settings() };
    with_options(settings, Options::default(), async |harness| {
        let blob = bytes(2 << 20);
        let digest = harness.store.fake.add(blob.clone());
        harness.store.fake.with(|state| state.piece_len = limits::FRAME_LEN);
        let request = frame(&ReadRequest { resource_name: read_name(digest), ..Default::default() });
        let mut clients = Vec::new();
        let mut calls = Vec::new();
        for _ in 0..20 {
            let mut client = harness.connect_with(h2::client::Builder::new().initial_window_size(1000)).await;
            for _ in 0..10 {
                let mut call = client.start(READ, &[]).await;
                call.send(request.clone(), true);
                calls.push(call);
            }
            clients.push(client);
        }
        let memory = &harness.server.reply_memory;
        harness.until("memory is scarce", || memory.held() > 6 << 20).await;
        for _ in 0..3 {
            let answer = harness.connect().await.read(&read_name(digest), 0, 0).await;
            answer.expect(Code::Ok, "");
        }
        harness.until("all have stopped", || memory.held() < 9 << 20).await;
        let answer = calls.pop().expect("one of many").answer().await;
        answer.expect(Code::Ok, "");
        let pieces = answer.messages.iter().map(|message| ReadResponse::decode(message.clone()).unwrap().data);
        assert!(pieces.collect::<Vec<_>>().concat() == blob);
        drop((calls, clients));
        harness.until("all is given back", || memory.held() == 0).await;
    });
}
