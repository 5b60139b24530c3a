//! What has come and no call has read, and what was answered and nobody has taken.

use std::cell::Cell;
use std::ops::Range;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::connections::{
    END_HEADERS, END_STREAM, GOAWAY, HEADERS, RST_STREAM, frames_until_close, header_block, raw_client,
    raw_client_with, raw_frame,
};
use super::*;
use crate::budget::{Apart, Rank};
use crate::store::fake::digest_of;

const DATA: u8 = 0;
const UNKNOWN: &str = "/no.Such/Method";

/// All the memory that there is for that.
fn all_memory<S: Store>(harness: &Harness<S>, rank: Rank) -> Vec<Apart> {
    let purse = &harness.server.settings.purse;
    std::iter::from_fn(|| purse.apart_for(4 << 10, rank)).collect()
}

/// The kinds of the next frames, up to `count` of HEADERS.
async fn answers(client: &mut DuplexStream, count: usize) -> Vec<u8> {
    let mut kinds = Vec::new();
    while kinds.iter().filter(|kind| **kind == HEADERS).count() < count {
        let mut head = [0; 9];
        client.read_exact(&mut head).await.expect("the connection lives");
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        client.read_exact(&mut payload).await.expect("the connection lives");
        kinds.push(head[3]);
    }
    kinds
}

/// Goal: what comes while its call does something else arrives whole and in order, however it is cut, and holds up nobody. Method: three
/// Writes at once into a store that holds them up, in frames of one byte, of 20 KB, and of both; another call; then the store goes on.
#[test]
fn what_waits_for_its_call_arrives_whole() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let blobs = [bytes(3000), bytes(200_000), bytes(100_000)];
        harness.store.brake(|brake| brake.hold = true);
        let mut calls = Vec::new();
        for (number, blob) in blobs.iter().enumerate() {
            let mut call = client.start(WRITE, &[]).await;
            let messages = upload(&write_name(digest_of(blob)), blob, 50_000, 0);
            call.send(frame(&messages[0]).slice(..10), false);
            let rest = [&frame(&messages[0])[10..], &frames(&messages[1..])].concat();
            let steps = [[1, 1], [20_000, 20_000], [1, 20_000]][number];
            let mut at = 0;
            for step in steps.into_iter().cycle() {
                let end = rest.len().min(at + step);
                call.send(Bytes::copy_from_slice(&rest[at..end]), end == rest.len());
                at = end;
                if at == rest.len() {
                    break;
                }
            }
            calls.push(call);
        }
        harness.until("all wait", || harness.store.brake(|brake| brake.waiting) == 3).await;
        client.call(CHECK, frame(&crate::wire::health::HealthCheckRequest::default())).await.expect(Code::Ok, "");
        harness.store.brake(|brake| brake.hold = false);
        for (call, blob) in calls.into_iter().zip(&blobs) {
            call.answer().await.expect(Code::Ok, "");
            assert_eq!(harness.store.fake.blob(digest_of(blob)).as_deref(), Some(&blob[..]));
        }
    });
}

/// Goal: who is refused ends his request by himself, if it is short and does not take too long: his stream is not reset. Method: no memory
/// for calls; the heads of 100, and their messages with them, or when all are answered; then heads of more than may stay open, one with
/// much behind it; then a drain.
#[test]
fn refused_calls_end_by_themselves() {
    with_server(async |harness| {
        let mut client = raw_client(harness).await;
        client.write_all(&raw_frame(HEADERS, END_HEADERS, 1, &header_block(CHECK))).await.unwrap();
        harness.until("the first runs", || harness.server.counters.calls_open.get() == 1).await;
        let taken = all_memory(harness, Rank::First);
        let block = header_block(QUERY);
        let heads = |streams: Range<u32>| {
            streams.flat_map(|number| raw_frame(HEADERS, END_HEADERS, 2 * number + 1, &block)).collect::<Vec<_>>()
        };
        let bodies = |streams: Range<u32>| {
            let prefix = grpc_frame::prefix(0);
            streams.flat_map(|number| raw_frame(DATA, END_STREAM, 2 * number + 1, &prefix)).collect::<Vec<_>>()
        };
        let resets = |kinds: &[u8]| kinds.iter().filter(|kind| **kind == RST_STREAM).count();
        client.write_all(&[heads(1..101), bodies(1..101)].concat()).await.unwrap();
        assert_eq!(resets(&answers(&mut client, 100).await), 0);
        client.write_all(&heads(101..201)).await.unwrap();
        assert_eq!(resets(&answers(&mut client, 100).await), 0);
        let much = raw_frame(DATA, 0, 2 * 201 + 1, &[0; limits::SMALL_MESSAGE_LEN / 2]).repeat(3);
        client.write_all(&[bodies(101..201), heads(201..202), much].concat()).await.unwrap();
        let mut kinds = answers(&mut client, 1).await;
        let most = limits::HTTP2_BODIES_LEFT_MAX as u32;
        for streams in [202..203, 203..204, 204..202 + most] {
            client.write_all(&heads(streams.clone())).await.unwrap();
            kinds.extend(answers(&mut client, streams.len()).await);
        }
        assert_eq!(resets(&kinds), 1);
        client.write_all(&heads(600..650)).await.unwrap();
        let kinds = answers(&mut client, 50).await;
        client.write_all(&raw_frame(DATA, END_STREAM, 1, &grpc_frame::prefix(0))).await.unwrap();
        assert_eq!(resets(&kinds) + resets(&answers(&mut client, 2).await), 50);
        drop(taken);
        harness.server.drain();
        let last = frames_until_close(&mut client).await;
        assert_eq!(last.iter().filter(|(kind, ..)| *kind == RST_STREAM).count(), most as usize);
    });
}

/// Goal: who takes no answers is not read on while there is no memory for them, and is answered whole when he takes them. Method: 3000
/// calls on a connection that is not read, with all memory taken; how many have begun; then all are read.
#[test]
fn answers_that_are_not_taken_hold_up_their_connection() {
    with_server(async |harness| {
        let client = raw_client_with(harness, 4 << 10).await;
        let _taken = all_memory(harness, Rank::More);
        let (mut reads, mut writes) = tokio::io::split(client);
        let calls = 3000;
        let is_sent = Rc::new(Cell::new(false));
        let sent = is_sent.clone();
        rt::spawn(async move {
            let block = header_block(UNKNOWN);
            for number in 0..calls {
                let call = raw_frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, &block);
                writes.write_all(&call).await.expect("the connection lives");
            }
            sent.set(true);
            std::future::pending::<()>().await;
        });
        let begun = || harness.server.counters.grpc.begun();
        let mut last = u64::MAX;
        while last != begun() {
            last = begun();
            time::sleep(Duration::from_millis(50)).await;
        }
        assert!(last > 50 && last < 1000 && !is_sent.get(), "{last}");
        let mut answered = 0;
        while answered < calls {
            let mut head = [0; 9];
            reads.read_exact(&mut head).await.expect("the connection lives");
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            reads.read_exact(&mut payload).await.expect("the connection lives");
            answered += u32::from(head[3] == HEADERS);
        }
        assert_eq!(begun(), u64::from(calls));
    });
}

/// Goal: what HTTP/2's table of header fields holds on to is charged; where there is no memory, who has all our methods in it goes on,
/// who has some more finds the connection closed when his calls are over, and who has many more is cut off. Method: calls with so many
/// different paths that are put into the table, with and without memory.
#[test]
fn tables_of_header_fields_are_charged() {
    with_server(async |harness| {
        let purse = &harness.server.settings.purse;
        for (paths, has_memory, end) in
            [(100, true, None), (12, false, None), (18, false, Some(0)), (100, false, Some(11u32))]
        {
            let mut client = raw_client(harness).await;
            harness.until("it is there", || purse.apart() == limits::CONNECTION_HELD_LEN).await;
            let taken = if has_memory { Vec::new() } else { all_memory(harness, Rank::More) };
            let calls = (0..paths).flat_map(|number: u32| {
                let path = format!("/{number:03}");
                let block = [&header_block(&path)[..2], &[0x44, 4], path.as_bytes(), &header_block("")[4..]].concat();
                raw_frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, &block)
            });
            client.write_all(&calls.collect::<Vec<_>>()).await.unwrap();
            let held = paths as usize * (8 << 10);
            let Some(reason) = end else {
                assert_eq!(
                    answers(&mut client, paths as usize).await.iter().filter(|kind| **kind == GOAWAY).count(),
                    0
                );
                let charged = held.saturating_sub(limits::HTTP2_HEADERS_FREE_LEN) as u64;
                assert!(!has_memory || purse.apart() >= limits::CONNECTION_HELD_LEN + charged);
                drop(client);
                drop(taken);
                harness.until("all is given back", || purse.apart() == 0).await;
                continue;
            };
            let goaway = frames_until_close(&mut client).await.into_iter().rfind(|(kind, ..)| *kind == GOAWAY);
            assert_eq!(goaway.expect("it is told to go").2[4..8], reason.to_be_bytes(), "{paths}");
            drop(taken);
            harness.until("all is given back", || purse.apart() == 0).await;
        }
    });
}
