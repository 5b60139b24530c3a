//! The rules of ByteStream, through the whole of the network side.

use super::*;
use crate::pure::digest::{Digest, EMPTY};
use crate::store::StoreError;
use crate::store::fake::{digest_of, raw_of, zstd_of};
use crate::wire::bytestream::{QueryWriteStatusRequest, QueryWriteStatusResponse, ReadResponse, WriteResponse};
use base64::Engine as _;

/// The data of a Read that ended well.
#[track_caller]
fn data(answer: &Answer) -> Vec<u8> {
    answer.expect(Code::Ok, "");
    let pieces = answer.messages.iter().map(|message| ReadResponse::decode(message.clone()).unwrap().data);
    pieces.collect::<Vec<_>>().concat()
}

#[track_caller]
fn committed(answer: &Answer) -> i64 {
    answer.message::<WriteResponse>().committed_size
}

async fn status(client: &mut Client, resource_name: String) -> (i64, bool) {
    let answer = client.call(QUERY, frame(&QueryWriteStatusRequest { resource_name })).await;
    let response: QueryWriteStatusResponse = answer.message();
    (response.committed_size, response.complete)
}

/// RequestMetadata of a tool, as header.
fn tool(name: &str, version: &str) -> String {
    let details = [&[0x0a, name.len() as u8][..], name.as_bytes(), &[0x12, version.len() as u8], version.as_bytes()];
    let details = details.concat();
    base64::engine::general_purpose::STANDARD_NO_PAD.encode([&[0x0a, details.len() as u8][..], &details].concat())
}

/// Goal: every range rule of Read (B5). Method: a blob of 1000 bytes, whole and in pieces of 300; all interesting
/// offsets and limits against a slice; then the refusals.
#[test]
fn reads_ranges() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let blob = bytes(1000);
        let digest = harness.store.fake.add(blob.clone());
        let name = read_name(digest);
        for piece_len in [0, 300] {
            harness.store.fake.with(|state| state.piece_len = piece_len);
            for offset in [0, 1, 299, 300, 301, 999, 1000] {
                for limit in [0, 1, 300, 999, 1000, 5000] {
                    let end = if limit == 0 { 1000 } else { (offset + limit).min(1000) };
                    let answer = client.read(&name, offset as i64, limit as i64).await;
                    assert_eq!(data(&answer), blob[offset..end], "{offset} {limit}");
                    assert!(answer.messages.iter().all(|message| message.len() > 2), "no empty messages");
                }
            }
        }
        for (offset, limit) in [(-1, 0), (1001, 0), (i64::MIN, 0), (i64::MAX, 0), (0, -1)] {
            client.read(&name, offset, limit).await.expect(Code::OutOfRange, "read_");
        }
        client.read(&read_name(digest_of(b"absent")), 0, 0).await.expect(Code::NotFound, "not in the cache");
        client.read("blobs/xyz", 0, 0).await.expect(Code::InvalidArgument, "resource_name");
        harness.store.fake.with(|state| state.fail_next = Some(StoreError::Lost { digest }));
        client.read(&name, 0, 0).await.expect(Code::NotFound, "");
        let garbage = Bytes::from_static(b"\0\0\0\0\x02\x0a\x05");
        client.call(READ, garbage).await.expect(Code::InvalidArgument, "ReadRequest");
    });
}

/// Goal: compressed reads: any offset, no limit, and a valid stream also for no bytes. Method: decode the answers.
#[test]
fn reads_compressed() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let blob = bytes(1000);
        let digest = harness.store.fake.add(blob.clone());
        let name = format!("compressed-blobs/zstd/{digest}");
        for offset in [0, 1, 999] {
            let answer = client.read(&name, offset, 0).await;
            assert_eq!(raw_of(&data(&answer)).unwrap(), blob[offset as usize..]);
        }
        client.read(&name, 0, 1).await.expect(Code::InvalidArgument, "read_limit");
        client.read(&name, 1001, 0).await.expect(Code::OutOfRange, "read_offset");
        let empty = client.read(&format!("compressed-blobs/zstd/{EMPTY}"), 0, 0).await;
        assert_eq!(data(&empty), [0x28, 0xb5, 0x2f, 0xfd, 0x20, 0, 1, 0, 0]);
        assert_eq!(data(&client.read(&read_name(EMPTY), 0, 0).await), b"");
        client.read(&read_name(EMPTY), 1, 0).await.expect(Code::OutOfRange, "");
    });
}

/// Goal: a large blob comes in messages that clients take, whole. Method: 5 MB as one piece and as a stream.
#[test]
fn reads_large_blobs_in_bounded_messages() {
    with_server(async |harness| {
        let mut client = harness.connect_with(h2::client::Builder::new().max_frame_size(1 << 20)).await;
        let blob = bytes(5_000_000);
        let digest = harness.store.fake.add(blob.clone());
        for piece_len in [0, 256 << 10] {
            harness.store.fake.with(|state| state.piece_len = piece_len);
            let answer = client.read(&read_name(digest), 0, 0).await;
            assert_eq!(data(&answer), blob);
            assert!(answer.messages.iter().all(|message| message.len() < (1 << 20) + 16));
        }
    });
}

/// Goal: an upload arrives whole whatever the size of its messages and frames. Method: blobs of several sizes, in
/// messages of several sizes, identity and zstd; small ones take the path through `put`.
#[test]
fn writes_blobs() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        for (len, step) in
            [(1, 1), (10, 3), (4096, 4096), (100_000, 16 << 10), (600_000, 100_000), (2_000_000, 1 << 20)]
        {
            let blob = bytes(len);
            let digest = digest_of(&blob);
            let answer = client.write(&upload(&write_name(digest), &blob, step, 0)).await;
            assert_eq!(committed(&answer), len as i64);
            assert_eq!(harness.store.fake.blob(digest).unwrap(), blob);
            assert_eq!(status(&mut client, write_name(digest)).await, (len as i64, true));

            harness.store.fake.remove(digest);
            let body = zstd_of(&blob);
            let answer = client.write(&upload(&zstd_write_name(digest), &body, step, 0)).await;
            assert_eq!(committed(&answer), body.len() as i64);
            assert_eq!(harness.store.fake.blob(digest).unwrap(), blob);
            harness.store.fake.remove(digest);
        }
    });
}

/// Goal: cuts between DATA frames do not matter to a Write. Method: an upload in two messages, cut in three at every
/// tenth pair of places, with a turn of the server between the parts.
#[test]
fn writes_may_be_cut_anywhere() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let blob = bytes(50);
        let digest = digest_of(&blob);
        let body = frames(&upload(&write_name(digest), &blob, 30, 0));
        let mut pair = 0;
        for first in 0..=body.len() {
            for second in first..=body.len() {
                pair += 1;
                if pair % 10 != 0 {
                    continue;
                }
                let mut call = client.start(WRITE, &[]).await;
                for (chunk, end) in
                    [(..first, false), (..second, false), (..body.len(), true)].iter().scan(0, |from, (to, end)| {
                        let chunk = body.slice(*from..to.end);
                        *from = to.end;
                        Some((chunk, *end))
                    })
                {
                    call.send(chunk, end);
                    time::yield_once().await;
                }
                assert_eq!(committed(&call.answer().await), 50);
                assert_eq!(harness.store.fake.blob(digest).unwrap(), blob);
                harness.store.fake.remove(digest);
            }
        }
    });
}

/// Goal: a client whose messages are the shortest there are keeps its connection, though nobody reads them for long. Method: a store
/// that takes nothing until the client has used up its window, with a frame for each byte.
#[test]
fn a_window_of_the_shortest_messages_waits() {
    let settings = Settings { purse: Purse::alone(4 << 30), ..settings() };
    with_options(settings, Options::default(), async |harness| {
        let blob = bytes(limits::HTTP2_STREAM_WINDOW as usize / limits::HTTP2_DATA_FRAME_LEN_LEAST);
        let digest = digest_of(&blob);
        harness.store.brake(|brake| brake.hold = true);
        let mut client = harness.connect().await;
        let mut call = client.start(WRITE, &[]).await;
        let messages = upload(&write_name(digest), &blob, 1, 0);
        let last = messages.len() - 1;
        messages.iter().enumerate().for_each(|(at, message)| call.send(frame(message), at == last));
        harness.until("the upload waits", || harness.store.brake(|brake| brake.waiting) == 1).await;
        // Everybody who can do something, does it.
        for _ in 0..1000 {
            time::yield_once().await;
        }
        harness.store.brake(|brake| brake.hold = false);
        assert_eq!(committed(&call.answer().await), blob.len() as i64);
    });
}

/// Goal: every refusal of a Write (B2). Method: one stream for each rule; nothing may be stored.
#[test]
fn refuses_bad_writes() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let blob = bytes(100);
        let digest = digest_of(&blob);
        let name = write_name(digest);
        let message = |resource_name: &str, write_offset, data: &[u8], finish_write| WriteRequest {
            resource_name: resource_name.into(),
            write_offset,
            finish_write,
            data: Bytes::copy_from_slice(data),
        };
        let wrong_size = write_name(Digest { size: 99, ..digest });
        let other = write_name(digest_of(b"other"));
        let cases: Vec<(Vec<WriteRequest>, &str)> = vec![
            (vec![], "resource_name"),
            (vec![message("", 0, &blob, true)], "resource_name"),
            (vec![message("blobs/x/1", 0, &blob, true)], "resource_name"),
            (vec![message(&name, 0, &blob[..50], false), message(&other, 50, &blob[50..], true)], "resource_name"),
            (vec![message(&name, -1, &blob, true)], "write_offset"),
            (vec![message(&name, 7, &blob[7..], true)], "write_offset"),
            (vec![message(&name, 0, &blob[..50], false), message("", 49, &blob[50..], true)], "write_offset"),
            (vec![message(&name, 0, &blob[..50], false), message("", 0, &blob[50..], true)], "write_offset"),
            (vec![message(&name, 0, &blob, true), message("", 100, b"", false)], "finish_write"),
            (vec![message(&name, 0, &blob, false), message("", 100, b"x", true)], "longer"),
            (vec![message(&wrong_size, 0, &blob, true)], "longer"),
            (vec![message(&name, 0, &blob[..99], true)], "ends after 99"),
            (vec![message(&name, 0, &[7; 100], true)], "SHA-256"),
            (vec![message(&zstd_write_name(digest), 0, b"no zstd", true)], "zstd"),
            (vec![message(&"x".repeat(5000), 0, b"", true)], "5000"),
        ];
        for (requests, text) in cases {
            client.write(&requests).await.expect(Code::InvalidArgument, text);
            assert!(harness.store.fake.with(|state| state.blobs.is_empty()));
        }
        let garbage = Bytes::from_static(b"\0\0\0\0\x02\x0a\x05");
        client.call(WRITE, garbage).await.expect(Code::InvalidArgument, "WriteRequest");
        let cut = frame(&message(&name, 0, &blob, true));
        client.call(WRITE, cut.slice(..cut.len() - 1)).await.expect(Code::InvalidArgument, "middle of a message");
        // What is allowed: the name again, also in every message, and an empty message that only ends the upload.
        let again = [
            message(&name, 0, &blob[..50], false),
            message(&name, 50, &blob[50..], false),
            message("", 100, b"", true),
        ];
        assert_eq!(committed(&client.write(&again).await), 100);
    });
}

/// Goal: errors of the store become their statuses on every path of a Write. Method: the store fails the next call,
/// once in `put` and once in `open_upload`.
#[test]
fn store_errors_end_writes() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        for len in [100, 500_000] {
            let blob = bytes(len);
            let requests = upload(&write_name(digest_of(&blob)), &blob, 1 << 20, 0);
            harness.store.fake.with(|state| state.fail_next = Some(StoreError::Disk("broken".into())));
            client.write(&requests).await.expect(Code::Internal, "broken");
        }
    });
}

/// Goal: an interrupted upload is resumed (B2.2, B4), after a half-close and after a lost connection, in both encodings.
/// Method: send a part, look at the status, resume at what it says, and try a wrong offset before.
#[test]
fn resumes_uploads() {
    with_server(async |harness| {
        let blob = bytes(1000);
        let digest = digest_of(&blob);
        let name = write_name(digest);
        let mut client = harness.connect().await;
        assert_eq!(status(&mut client, name.clone()).await, (0, false));
        let mut first = upload(&name, &blob[..400], 150, 0);
        first.last_mut().unwrap().finish_write = false;
        assert_eq!(committed(&client.write(&first).await), 400, "a half-close says what is kept");
        assert_eq!(status(&mut client, name.clone()).await, (400, false));
        client.write(&upload(&name, &blob[399..], 150, 399)).await.expect(Code::InvalidArgument, "400 bytes");

        // A connection that is lost in the middle of a message.
        let mut lost = harness.connect().await;
        let mut call = lost.start(WRITE, &[]).await;
        let second = frames(&upload(&name, &blob[400..], 1000, 400));
        call.send(second.slice(..second.len() - 100), false);
        harness.until("the upload is open", || harness.store.fake.with(|state| state.partial.is_empty())).await;
        drop((call, lost));
        harness.until("it is kept", || harness.store.fake.with(|state| !state.partial.is_empty())).await;
        let (at, complete) = status(&mut client, name.clone()).await;
        assert!(!complete && (400..1000).contains(&at), "{at}");
        let rest = upload(&name, &blob[at as usize..], 150, at);
        assert_eq!(committed(&client.write(&rest).await), 1000);
        assert_eq!(harness.store.fake.blob(digest).unwrap(), blob);
        assert_eq!(status(&mut client, name).await, (1000, true));

        // Compressed: offsets are raw at the start, then plus compressed bytes; the rest is a new frame.
        harness.store.fake.remove(digest);
        let name = zstd_write_name(digest);
        let mut first = upload(&name, &zstd_of(&blob[..400]), 150, 0);
        first.last_mut().unwrap().finish_write = false;
        assert_eq!(committed(&client.write(&first).await), 400);
        assert_eq!(status(&mut client, name.clone()).await, (400, false));
        let body = zstd_of(&blob[400..]);
        assert_eq!(committed(&client.write(&upload(&name, &body, 150, 400)).await), 400 + body.len() as i64);
        assert_eq!(harness.store.fake.blob(digest).unwrap(), blob);
    });
}

/// Goal: a present blob is answered while the client still sends, and the stream is then reset without error. Method:
/// an upload of which only the first message is ever sent; also one that turns out present in the middle.
#[test]
fn answers_early_when_present() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let blob = bytes(1_000_000);
        let digest = harness.store.fake.add(blob.clone());
        for (name, expected) in [(write_name(digest), 1_000_000), (zstd_write_name(digest), -1)] {
            let mut call = client.start(WRITE, &[]).await;
            call.send(frame(&upload(&name, &blob, 1000, 0)[0]), false);
            let answer = call.answer().await;
            assert_eq!(committed(&answer), expected);
        }
        let other = digest_of(b"some other blob");
        harness.store.brake(|brake| brake.present = true);
        let mut call = client.start(WRITE, &[]).await;
        call.send(frame(&upload(&write_name(other), b"some blob", 4, 0)[0]), false);
        assert_eq!(committed(&call.answer().await), other.size as i64);
    });
}

/// Goal: `committed_size` of compressed uploads is what each client takes (B3). Method: a full and a superfluous upload
/// for each kind of client.
#[test]
fn committed_size_follows_the_client() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        let blob = bytes(2000);
        let digest = digest_of(&blob);
        let body = zstd_of(&blob);
        let sent = body.len() as i64;
        let requests = frames(&upload(&zstd_write_name(digest), &body, 700, 0));
        for (name, version, stored, present) in [
            ("", "", sent, -1),
            ("bazel", "8.1.0", sent, -1),
            ("bazel", "5.0.0", sent, sent),
            ("buck2", "2026", sent, -1),
            ("siso", "1.2", 2000, 2000),
        ] {
            let metadata = tool(name, version);
            for header in [
                "build.bazel.remote.execution.v2.requestmetadata-bin",
                "google.devtools.remoteexecution.v1test.requestmetadata-bin",
            ] {
                harness.store.fake.remove(digest);
                for expected in [stored, present] {
                    let answer = client.call_with(WRITE, &[(header, &metadata)], requests.clone()).await;
                    assert_eq!(committed(&answer), expected, "{name} {version}");
                }
            }
        }
    });
}

/// Goal: the empty blob is always there and never stored (B6). Method: all three methods.
#[test]
fn the_empty_blob_is_always_present() {
    with_server(async |harness| {
        let mut client = harness.connect().await;
        assert_eq!(committed(&client.write(&upload(&write_name(EMPTY), b"", 1, 0)).await), 0);
        let body = [0x28, 0xb5, 0x2f, 0xfd, 0x20, 0, 1, 0, 0];
        assert_eq!(committed(&client.write(&upload(&zstd_write_name(EMPTY), &body, 100, 0)).await), -1);
        client.write(&upload(&write_name(EMPTY), b"x", 1, 0)).await.expect(Code::InvalidArgument, "longer");
        assert_eq!(status(&mut client, write_name(EMPTY)).await, (0, true));
        assert_eq!(harness.store.fake.with(|state| (state.puts, state.gets)), (0, 0));
    });
}
