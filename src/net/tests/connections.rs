//! Connections: windows, floods, stop. Hostile clients speak raw frames.

use std::cell::Cell;

use super::*;
use crate::budget::Rank;
use crate::limits;
use crate::net::accept::{self, ConnectionsMax};
use crate::rt::listen::{Address, Bound};
use crate::rt::signal::Shutdown;
use crate::rt::tcp::Listener;
use crate::store::fake::digest_of;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub(super) const HEADERS: u8 = 1;
pub(super) const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
pub(super) const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
pub(super) const END_HEADERS: u8 = 4;
pub(super) const END_STREAM: u8 = 1;
const ACK: u8 = 1;

/// A frame as it stands on the wire (RFC 9113, 4.1).
pub(super) fn raw_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let len = (payload.len() as u32).to_be_bytes();
    [&len[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A header block for a call of `path`, without Huffman code and dynamic table (RFC 7541).
pub(super) fn header_block(path: &str) -> Vec<u8> {
    let mut block = vec![0x83, 0x86, 0x04, path.len() as u8];
    block.extend_from_slice(path.as_bytes());
    let content_type = b"application/grpc";
    block.extend_from_slice(&[0x0f, 0x10, content_type.len() as u8]);
    block.extend_from_slice(content_type);
    block
}

/// A client that writes what it likes and never looks back before it reads.
pub(super) async fn raw_client(harness: &Harness) -> DuplexStream {
    raw_client_with(harness, 8 << 20).await
}

/// The same, where so many bytes are on their way at most.
pub(super) async fn raw_client_with(harness: &Harness, len: usize) -> DuplexStream {
    let (mut ours, theirs) = tokio::io::duplex(len);
    harness.server.serve(Kind::Grpc, theirs, Origin::default(), ());
    ours.write_all(PREFACE).await.unwrap();
    ours.write_all(&raw_frame(SETTINGS, 0, 0, &[])).await.unwrap();
    ours
}

/// All frames until the server closes, as kind, flags and payload.
pub(super) async fn frames_until_close(client: &mut DuplexStream) -> Vec<(u8, u8, Vec<u8>)> {
    let mut all = Vec::new();
    client.read_to_end(&mut all).await.unwrap();
    let mut frames = Vec::new();
    let mut rest = &all[..];
    while let Some((head, after)) = rest.split_at_checked(9) {
        let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let (payload, after) = after.split_at(len.min(after.len()));
        frames.push((head[3], head[4], payload.to_vec()));
        rest = after;
    }
    frames
}

/// Goal: a flood ends its own connection with ENHANCE_YOUR_CALM, leaves nothing behind, and others are served all the
/// while. Method: each flood in raw frames; then a good call on another connection.
#[test]
fn floods_end_their_connection_only() {
    let block = header_block(CHECK);
    let resets: Vec<u8> = (0..10_000u32)
        .flat_map(|i| {
            let headers = raw_frame(HEADERS, END_HEADERS, 2 * i + 1, &block);
            [headers, raw_frame(RST_STREAM, 0, 2 * i + 1, &8u32.to_be_bytes())].concat()
        })
        .collect();
    let mut continuations = raw_frame(HEADERS, 0, 1, &block);
    (0..10_000).for_each(|_| continuations.extend(raw_frame(CONTINUATION, 0, 1, &[])));
    let one_header = [&[0x40, 1, b'x', 0x7f, 0xc1, 0x3d][..], &[b'y'; 8000]].concat();
    let headers: Vec<u8> = [block.clone(), one_header.repeat(30)].concat();
    let huge_headers = raw_frame(HEADERS, END_HEADERS, 1, &headers);
    let refused: Vec<u8> = (0..70_000u32).flat_map(|i| raw_frame(HEADERS, END_HEADERS, 2 * i + 1, &block)).collect();
    let pings = raw_frame(PING, 0, 0, &[7; 8]).repeat(5_000);
    let settings = raw_frame(SETTINGS, 0, 0, &[]).repeat(5_000);
    with_server(async |harness| {
        let mut good = harness.connect().await;
        for (what, flood) in [
            ("PING", pings),
            ("SETTINGS", settings),
            ("rapid reset", resets),
            ("CONTINUATION", continuations),
            ("huge headers", huge_headers),
            ("refused streams", refused),
        ] {
            let failed = harness.server.counters.connections_failed.get();
            let mut client = raw_client(harness).await;
            let _ = client.write_all(&flood).await;
            let frames = frames_until_close(&mut client).await;
            let goaway =
                frames.iter().find(|(kind, ..)| *kind == GOAWAY).unwrap_or_else(|| panic!("{what}: no GOAWAY"));
            assert_eq!(goaway.2[4..8], 11u32.to_be_bytes(), "{what}: not ENHANCE_YOUR_CALM");
            assert_eq!(harness.server.counters.connections_failed.get(), failed + 1, "{what}");
            harness
                .until("only the good connection is left", || {
                    harness.server.counters.connections.get() == 1 && harness.server.counters.calls_open.get() == 0
                })
                .await;
            good.read("blobs/x", 0, 0).await.expect(Code::InvalidArgument, "resource_name");
        }
    });
}

/// Goal: pings are answered for ever by who also makes calls. Method: 20 times 900 pings and a call, each answered before the
/// next.
#[test]
fn answers_every_ping() {
    with_server(async |harness| {
        let mut client = raw_client(harness).await;
        let block = header_block(CHECK);
        let pong = raw_frame(PING, ACK, 0, &[7; 8]);
        for i in 0..20 {
            let pings = raw_frame(PING, 0, 0, &[7; 8]).repeat(900);
            client.write_all(&pings).await.unwrap();
            client.write_all(&raw_frame(HEADERS, END_HEADERS | END_STREAM, 2 * i + 1, &block)).await.unwrap();
            let (mut pongs, mut answers) = (0, 0);
            let mut frame = Vec::new();
            while pongs < 900 || answers < 1 {
                frame.resize(9, 0);
                client.read_exact(&mut frame).await.unwrap();
                let len = u32::from_be_bytes([0, frame[0], frame[1], frame[2]]) as usize;
                frame.resize(9 + len, 0);
                client.read_exact(&mut frame[9..]).await.unwrap();
                pongs += usize::from(frame == pong);
                answers += usize::from(frame[3] == HEADERS);
            }
        }
    });
}

/// Goal: a header list over the limit costs its call, not the connection. Method: 40 KiB of headers, then a good call.
#[test]
fn large_headers_cost_their_call() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let value = "x".repeat(8000);
        let headers: Vec<(&str, &str)> = ["a", "b", "c", "d", "e"].map(|name| (name, value.as_str())).to_vec();
        let answer = client.call_with(READ, &headers, Bytes::new()).await;
        assert_eq!(answer.http, 431);
        client.read("blobs/x", 0, 0).await.expect(Code::InvalidArgument, "resource_name");
    });
}

/// Goal: window credit comes back only when the store has taken the bytes, so a slow store stops the client. Method:
/// the store is held; a client sends all that its window allows and gets no more until the store goes on.
#[test]
fn credit_follows_consumption() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let blob = bytes(2_000_000);
        let digest = digest_of(&blob);
        let body = frames(&upload(&write_name(digest), &blob, 100_000, 0));
        harness.store.brake(|brake| brake.hold = true);
        let mut call = client.start(WRITE, &[]).await;
        call.send(body, true);
        harness.until("the store has work", || harness.store.brake(|brake| brake.waiting) == 1).await;
        time::sleep(Duration::from_millis(50)).await;
        // What the store got is what one stream window holds.
        harness.store.brake(|brake| brake.hold = false);
        let answer = call.answer().await;
        assert_eq!(answer.code(), 0, "{answer:?}");
        assert_eq!(harness.store.fake.blob(digest).unwrap(), blob);
        let most = harness.store.brake(|brake| brake.largest_write);
        assert!(most <= limits::HTTP2_STREAM_WINDOW as usize, "{most}");
    });
}

/// Goal: a reader that does not read costs its window and a piece or two, not the blob. Method: a read of 1 TiB with a
/// window of 1000 bytes; the store may not be asked for more than what HTTP/2 holds.
#[test]
fn a_reader_that_does_not_read_costs_little() {
    with_server(async |harness| {
        let mut client = harness.connect_with(h2::client::Builder::new().initial_window_size(1000)).await;
        harness.store.brake(|brake| brake.endless = 1 << 40);
        let request = ReadRequest { resource_name: read_name(digest_of(b"any")), ..Default::default() };
        let mut call = client.start(READ, &[]).await;
        call.send(frame(&request), true);
        harness.until("a piece was made", || harness.store.brake(|brake| brake.pieces_made) > 0).await;
        time::sleep(Duration::from_millis(100)).await;
        // One in HTTP/2, and what the channel holds: one, and one more in its sender's hand.
        let made = harness.store.brake(|brake| brake.pieces_made);
        assert!(made <= 3, "{made} pieces");
        call.stream.send_reset(Reason::CANCEL);
    });
}

/// Goal: early answers cost the connection nothing that lasts: neither window, nor the client's standing. Method: 3000
/// uploads of a present blob that are answered with data in flight, then one of a megabyte that is new.
#[test]
fn many_early_answers_do_not_wear_out_a_connection() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let digest = harness.store.fake.add(bytes(50_000));
        let messages = upload(&write_name(digest), &bytes(50_000), 8000, 0);
        for _ in 0..3000 {
            let mut call = client.start(WRITE, &[]).await;
            call.send(frame(&messages[0]), false);
            call.send(frames(&messages[1..5]), false);
            call.answer().await.expect(Code::Ok, "");
        }
        let blob = bytes(1_000_000);
        client.write(&upload(&write_name(digest_of(&blob)), &blob, 16 << 10, 0)).await.expect(Code::Ok, "");
        assert_eq!(harness.server.counters.connections_failed.get(), 0);
    });
}

/// Goal: half-sent messages of many calls do not block each other by filling the connection's window. Method: 40 calls
/// of 200 KB with a connection window of 1 MiB, each sent but for its last byte; then the last bytes.
#[test]
fn half_sent_messages_do_not_block() {
    with_stream_window(64 << 10, async |harness| {
        let mut client = harness.connect().await;
        let mut request = frame(&ReadRequest { resource_name: write_name(digest_of(b"x")), ..Default::default() })
            [grpc_frame::PREFIX_LEN..]
            .to_vec();
        request.push(0x7a);
        prost::encoding::encode_varint(200_000, &mut request);
        request.resize(request.len() + 200_000, 0);
        let body = Bytes::from([&grpc_frame::prefix(request.len())[..], &request].concat());
        let mut calls = Vec::new();
        for _ in 0..40 {
            let mut call = client.start(QUERY, &[]).await;
            call.send(body.slice(..body.len() - 1), false);
            calls.push(call);
        }
        harness.until("all run", || harness.server.counters.calls_open.get() == 40).await;
        for mut call in calls {
            call.send(body.slice(body.len() - 1..), true);
            call.answer().await.expect(Code::Ok, "");
        }
    });
}

/// Goal: a drain tells the client, finishes what is in flight, and ends the connection. Method: a call that the store
/// holds, a drain, a refused new call, and then the held one's answer.
#[test]
fn drains() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let digest = harness.store.fake.add(&b"blob"[..]);
        let request = frame(&ReadRequest { resource_name: read_name(digest), ..Default::default() });
        harness.store.brake(|brake| brake.hold = true);
        let mut held = client.start(READ, &[]).await;
        held.send(request, true);
        harness.until("it is in the store", || harness.store.brake(|brake| brake.waiting) == 1).await;
        harness.server.drain();
        // The client learns by GOAWAY that it must not begin another call here.
        harness
            .until("the client knows", || {
                let mut send = client.send.clone();
                let ready = send.poll_ready(&mut std::task::Context::from_waker(std::task::Waker::noop()));
                matches!(ready, std::task::Poll::Ready(Err(_)))
            })
            .await;
        assert_eq!(harness.server.counters.connections.get(), 1);
        harness.store.brake(|brake| brake.hold = false);
        held.answer().await.expect(Code::Ok, "");
        time::timeout(Duration::from_secs(30), harness.server.drained()).await.unwrap();
    });
}

/// Goal: a client that does not answer holds up a drain only while it has a call. Method: a raw peer that says its preface
/// and is silent, with and without a Write that has begun.
#[test]
fn a_silent_client_does_not_hold_up_a_drain() {
    with_server(async |harness| {
        harness.server.farewell.set(Duration::from_millis(20));
        let mut busy = raw_client(harness).await;
        busy.write_all(&raw_frame(HEADERS, END_HEADERS, 1, &header_block(WRITE))).await.unwrap();
        harness.until("the call runs", || harness.server.counters.calls_open.get() == 1).await;
        let mut idle = raw_client(harness).await;
        harness.until("both are open", || harness.server.counters.connections.get() == 2).await;
        harness.server.drain();
        let mut end = Vec::new();
        time::timeout(Duration::from_secs(30), idle.read_to_end(&mut end)).await.expect("the idle one ends").unwrap();
        assert_eq!(harness.server.counters.connections.get(), 1, "the busy one goes on");
        drop(busy);
        time::timeout(Duration::from_secs(30), harness.server.drained()).await.unwrap();
    });
}

/// Goal: an abort cuts calls and connections at once. Method: a held call, then abort; `drained` must end.
#[test]
fn aborts() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let request = frame(&ReadRequest { resource_name: read_name(digest_of(b"x")), ..Default::default() });
        harness.store.brake(|brake| brake.hold = true);
        let mut held = client.start(READ, &[]).await;
        held.send(request, true);
        harness.until("it is in the store", || harness.store.brake(|brake| brake.waiting) == 1).await;
        harness.server.abort();
        time::timeout(Duration::from_secs(30), harness.server.drained()).await.unwrap();
        assert_eq!(harness.store.brake(|brake| brake.waiting), 0);
    });
}

/// Goal: who does not speak HTTP/2 is shown out: by the preface timeout, or at once. Method: silence, and HTTP/1.1.
#[test]
fn refuses_other_protocols() {
    with_server(async |harness| {
        harness.server.preface_timeout.set(Duration::from_millis(20));
        for hello in [&b""[..], b"GET /status HTTP/1.1\r\nhost: cache\r\n\r\n"] {
            let (mut ours, theirs) = tokio::io::duplex(4096);
            harness.server.serve(Kind::Grpc, theirs, Origin::default(), ());
            ours.write_all(hello).await.unwrap();
            let mut answer = Vec::new();
            let _ = ours.read_to_end(&mut answer).await;
            harness.until("it is closed", || harness.server.counters.connections.get() == 0).await;
        }
    });
}

/// Goal: sockets reach a core, count there until they end, and beyond the limit they are closed at once; after a stop
/// nobody listens. Method: real TCP with a limit of two connections, on one core.
#[test]
fn accepts_up_to_the_limit() {
    with_server(async |harness| {
        let socket = Bound::bind(&Address::Tcp(([127, 0, 0, 1], 0).into()), None).unwrap();
        let Ok(Address::Tcp(address)) = socket.address() else { panic!("bound elsewhere") };
        let (targets, mut inboxes) = accept::inboxes(1, ConnectionsMax { grpc: 2, http: 1 });
        let load = targets.load();
        let stop = Shutdown::new();
        rt::spawn(accept::run(Listener::adopt(socket), Kind::Grpc, targets, stop.wait()));
        rt::spawn(accept::serve_core(inboxes.remove(0), harness.server.clone()));
        let connect = || std::net::TcpStream::connect(address).unwrap();
        let (first, second) = (connect(), connect());
        harness.until("two are served", || harness.server.counters.connections.get() == 2).await;
        assert_eq!(load.connections(), 2);
        let third = connect();
        let refused = rt::blocking(move || std::io::Read::read(&mut &third, &mut [0; 100]).unwrap_or(0)).await;
        assert_eq!(refused.unwrap(), 0);
        assert_eq!(load.refused(), 1);
        drop(first);
        harness.until("one has ended", || load.connections() == 1).await;
        stop.trigger();
        harness.until("nobody listens", || std::net::TcpStream::connect(address).is_err()).await;
        drop(second);
        harness.until("all have ended", || load.connections() == 0).await;
    });
}

/// Goal: what HTTP/2 remembers of streams that were cut off is charged to their connection, to its end. Method: 100 Writes with a
/// name that is none, each answered before its end.
#[test]
fn cut_off_streams_are_charged() {
    with_server(async |harness| {
        let purse = &harness.server.settings.purse;
        let mut client = harness.connect().await;
        for _ in 0..100 {
            let mut call = client.start(WRITE, &[]).await;
            call.send(frames(&upload("nothing", b"1234", 4, 0)), false);
            call.answer().await.expect(Code::InvalidArgument, "resource_name");
        }
        let rows = 100usize.next_power_of_two() - limits::HTTP2_ROWS_FIRST;
        let charged = limits::CONNECTION_HELD_LEN + rows as u64 * limits::HTTP2_ROW_LEN;
        harness.until("the calls are over", || purse.apart() <= charged).await;
        assert_eq!(purse.apart(), charged);
        drop(client);
        harness.until("all is given back", || purse.apart() == 0).await;
    });
}

/// Goal: a panic in what serves a connection costs that connection and its calls, and gives back all that they held. Method: a
/// transport that panics, in the first bytes of each kind of connection, and while a call waits.
#[test]
fn a_panic_costs_its_connection() {
    with_server(async |harness| {
        let held = Rc::new(());
        let trap = |kind, is_set: &Rc<Cell<bool>>| {
            let (ours, theirs) = tokio::io::duplex(64 << 10);
            harness.server.serve(
                kind,
                Probe { io: theirs, panics: is_set.clone(), acknowledged: Rc::default() },
                Origin::default(),
                held.clone(),
            );
            ours
        };
        let is_set = Rc::new(Cell::new(true));
        for kind in [Kind::Grpc, Kind::Http, Kind::Both] {
            let mut client = trap(kind, &is_set);
            client.write_all(b"GET /status HTTP/1.1\r\nhost: cache\r\n\r\n").await.expect("it is read");
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.expect("it is closed");
        }
        assert_eq!(rt::core_stats().panics, 3);

        is_set.set(false);
        let (send, connection) = h2::client::Builder::new().handshake(trap(Kind::Grpc, &is_set)).await.expect("HTTP/2");
        rt::spawn(async move {
            let _ = connection.await;
        });
        let mut client = Client { send };
        let digest = harness.store.fake.add(&b"blob"[..]);
        harness.store.brake(|brake| brake.hold = true);
        let mut call = client.start(READ, &[]).await;
        call.send(frame(&ReadRequest { resource_name: read_name(digest), ..Default::default() }), true);
        harness.until("it waits", || harness.store.brake(|brake| brake.waiting) == 1).await;
        is_set.set(true);
        let _other = client.start(READ, &[]).await;
        harness.until("the call is cut", || harness.server.counters.calls_open.get() == 0).await;
        harness.until("all is given back", || Rc::strong_count(&held) == 1).await;
        assert_eq!(harness.server.settings.purse.apart(), 0);
        harness.store.brake(|brake| brake.hold = false);
        harness.connect().await.read(&read_name(digest), 0, 0).await.expect(Code::Ok, "");
    });
}

/// Goal: a new connection waits for memory, few of them do, and one that waited is served as any other. Method: a purse whose last
/// bytes are taken and given back, connections that wait, and one more than may.
#[test]
fn new_connections_wait_for_memory() {
    with_server(async |harness| {
        let (purse, counters) = (&harness.server.settings.purse, &harness.server.counters);
        let taken: Vec<_> = std::iter::from_fn(|| purse.apart_for(limits::CONNECTION_HELD_LEN, Rank::First)).collect();
        harness.server.connection_wait.set(Duration::from_secs(30));
        let mut waiting = Vec::new();
        for number in 1..=limits::CONNECTIONS_WAITING_MAX {
            let (ours, theirs) = tokio::io::duplex(64 << 10);
            harness.server.serve(Kind::Grpc, theirs, Origin::default(), ());
            waiting.push(ours);
            harness.until("it waits", || counters.connections_waiting.get() == number).await;
        }
        let (_one_more, theirs) = tokio::io::duplex(64 << 10);
        harness.server.serve(Kind::Grpc, theirs, Origin::default(), ());
        harness.until("one more is turned away", || counters.connections_failed.get() == 1).await;
        drop(taken);
        harness.until("those that waited are served", || counters.connections.get() == waiting.len() as u64).await;
        harness
            .connect()
            .await
            .call(CHECK, frame(&crate::wire::health::HealthCheckRequest::default()))
            .await
            .expect(Code::Ok, "");
    });
}
