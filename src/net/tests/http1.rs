//! HTTP/1.1: routes, keep-alive, limits, stop. Clients speak raw bytes.

use std::cell::Cell;

use super::super::http1::Patience;
use super::*;
use crate::budget::Rank;
use crate::limits;
use crate::store::fake::digest_of;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

/// One client connection.
struct Raw(DuplexStream);

/// What came back for one request.
#[derive(Debug)]
struct Reply {
    code: u16,
    /// Names in lower case.
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Reply {
    fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value)
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }
}

impl Raw {
    fn connect(harness: &Harness) -> Self {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        harness.server.serve(Kind::Http, theirs, Origin::default(), ());
        Self(ours)
    }

    async fn send(&mut self, bytes: &[u8]) {
        // A server that has closed takes nothing; what it said is read all the same.
        let _ = self.0.write_all(bytes).await;
    }

    async fn ask(&mut self, method: &str, path: &str) -> Reply {
        self.send(format!("{method} {path} HTTP/1.1\r\nhost: cache\r\n\r\n").as_bytes()).await;
        self.reply(method == "HEAD").await
    }

    async fn reply(&mut self, is_head: bool) -> Reply {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.0.read_u8().await.unwrap_or_else(|_| panic!("closed after {head:?}")));
        }
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.lines();
        let code = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let pair = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()));
        let headers: Vec<_> = lines.filter_map(pair).collect();
        let mut reply = Reply { code, headers, body: Vec::new() };
        if !is_head {
            reply.body.resize(reply.header("content-length").parse().unwrap_or(0), 0);
            self.0.read_exact(&mut reply.body).await.unwrap();
        }
        reply
    }

    /// The bytes until the server closes.
    async fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        self.0.read_to_end(&mut rest).await.unwrap();
        rest
    }
}

/// Goal: each path and method gets its answer, on one connection. Method: a table of requests, with and without a body.
#[test]
fn routes() {
    with_server(async |harness| {
        let mut client = Raw::connect(harness);
        for (method, path, code, content_type, text) in [
            ("GET", "/status", 200, "application/json", "\"NumFiles\": 0,"),
            ("GET", "/status?x=1", 200, "application/json", "\"MaxSize\": "),
            ("HEAD", "/status", 200, "application/json", ""),
            ("GET", "/metrics", 200, "text/plain; version=0.0.4; charset=utf-8", "# TYPE process_cpu_seconds_total"),
            ("HEAD", "/metrics", 200, "text/plain; version=0.0.4; charset=utf-8", ""),
            ("PUT", "/metrics", 405, "text/plain; charset=utf-8", "Method 'PUT' not supported"),
            ("DELETE", "/status", 405, "text/plain; charset=utf-8", "use one of GET, HEAD"),
            ("GET", "/", 200, "text/html; charset=utf-8", "fetch(\"/overview.json\""),
            ("HEAD", "/", 200, "text/html; charset=utf-8", ""),
            ("GET", "/overview.json", 200, "application/json", "\"entries\":0"),
            ("POST", "/", 405, "text/plain; charset=utf-8", "use one of GET, HEAD"),
            ("GET", "/index", 400, "text/plain; charset=utf-8", "got '/index': try /cas/"),
            ("GET", "/metrics/", 400, "text/plain; charset=utf-8", "/metrics/"),
        ] {
            let reply = client.ask(method, path).await;
            assert_eq!((reply.code, reply.header("content-type")), (code, content_type), "{method} {path}: {reply:?}");
            assert!(reply.text().contains(text), "{method} {path}: {reply:?}");
            assert_eq!(reply.header("allow"), if code == 405 { "GET, HEAD" } else { "" });
            if method == "HEAD" {
                assert!(reply.header("content-length").parse::<usize>().unwrap() > 100, "{reply:?}");
            }
        }
        assert_eq!(harness.server.counters.http.connections.get(), 1);
    });
}

/// Goal: a panic costs its request and the connection. Method: the store panics once; the next connection is served.
#[test]
fn a_panic_is_500() {
    with_server(async |harness| {
        let digest = harness.store.fake.add(&b"blob"[..]);
        let path = format!("/cas/{}", digest.hash);
        harness.store.brake(|brake| brake.panic = true);
        let mut client = Raw::connect(harness);
        let reply = client.ask("GET", &path).await;
        assert_eq!((reply.code, reply.header("connection")), (500, "close"));
        assert_eq!((reply.text(), client.rest().await), ("the handler failed; the server's log says why\n", vec![]));
        assert_eq!(rt::core_stats().panics, 1);
        assert_eq!(Raw::connect(harness).ask("GET", &path).await.code, 200);
        harness.until("both requests are over", || harness.server.asked() == (2, 0)).await;
    });
}

/// Goal: requests that came together are answered in order, and one that asks to close is the last. Method: three in one
/// write.
#[test]
fn pipelines() {
    with_server(async |harness| {
        let mut client = Raw::connect(harness);
        let ask = |path: &str, more: &str| format!("GET {path} HTTP/1.1\r\nhost: cache\r\n{more}\r\n");
        let all = [ask("/status", ""), ask("/nowhere", ""), ask("/status", "connection: close\r\n")].concat();
        client.send(all.as_bytes()).await;
        for code in [200, 400, 200] {
            assert_eq!(client.reply(false).await.code, code);
        }
        assert_eq!(client.rest().await, b"");
    });
}

/// Goal: a client whose body waits for an acknowledgement of the head gets one, once, and nobody else costs a system call. Method:
/// requests on one connection, in pieces, with the acknowledgements so far.
#[test]
fn a_head_is_acknowledged_when_its_body_has_not_come() {
    with_server(async |harness| {
        let (ours, io) = tokio::io::duplex(64 << 10);
        let acknowledged = Rc::new(Cell::new(0));
        let probe = Probe { io, panics: Rc::default(), acknowledged: acknowledged.clone() };
        harness.server.serve(Kind::Http, probe, Origin::default(), ());
        let mut client = Raw(ours);
        let data = [7; 1000];
        let hash = digest_of(&data).hash.to_hex();
        let put = format!("PUT /cas/{hash} HTTP/1.1\r\nhost: cache\r\ncontent-length: 1000\r\n\r\n");
        client.send(&[put.as_bytes(), &data].concat()).await;
        assert_eq!((client.reply(false).await.code, acknowledged.get()), (200, 0), "it came as a whole");
        client.send(put.as_bytes()).await;
        harness.until("the head is acknowledged", || acknowledged.get() == 1).await;
        client.send(&data[..400]).await;
        harness.until("the request goes on", || harness.server.counters.http.received.get() >= 1400).await;
        client.send(&data[400..]).await;
        assert_eq!((client.reply(false).await.code, acknowledged.get()), (200, 1), "once for each body");
        assert_eq!((client.ask("GET", &format!("/cas/{hash}")).await.code, acknowledged.get()), (200, 1));
        client.send(put.as_bytes()).await;
        harness.until("that of the next, too", || acknowledged.get() == 2).await;
    });
}

/// Goal: who breaks the rules or the limits is told and shown out. Method: nonsense, and a head that is too long.
#[test]
fn refuses_what_is_not_http() {
    with_server(async |harness| {
        let long = format!("GET /status HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(limits::HTTP_HEAD_LEN_MAX));
        for (request, code) in [("\r\n\r\nnonsense\r\n\r\n", 400), (long.as_str(), 431)] {
            let failed = harness.server.counters.http.failed.get();
            let mut client = Raw::connect(harness);
            client.send(request.as_bytes()).await;
            assert_eq!(client.reply(false).await.code, code);
            client.rest().await;
            harness.until("it is closed", || harness.server.counters.http.connections.get() == 0).await;
            assert_eq!(harness.server.counters.http.failed.get(), failed + 1);
        }
    });
}

/// Goal: a request that others could read as another one is refused, and its connection closed. Method: no Host and two,
/// codings besides chunked; HTTP/1.0, which has no Host, is served.
#[test]
fn refuses_what_is_ambiguous() {
    with_server(async |harness| {
        let put = format!("PUT /cas/{} HTTP/1.1\r\nhost: cache\r\n", "ab".repeat(32));
        for (head, code) in [
            ("GET /status HTTP/1.1\r\n", 400),
            ("GET /status HTTP/1.1\r\nhost: a\r\nhost: a\r\n", 400),
            (&format!("{put}transfer-encoding: gzip, chunked\r\n"), 400),
            (&format!("{put}transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"), 400),
            ("GET /status HTTP/1.0\r\n", 200),
        ] {
            let mut client = Raw::connect(harness);
            client.send(format!("{head}\r\n0\r\n\r\n").as_bytes()).await;
            assert_eq!(client.reply(false).await.code, code, "{head}");
            assert_eq!(client.rest().await, b"", "{head}");
        }
    });
}

/// Goal: a connection on which nothing moves is closed, whatever it waits for; one that is used stays, within the times that
/// are set for whole requests. Method: patience of milliseconds, and clients that stop before a request, in its head, behind
/// its answer, and in a body.
#[test]
fn patience_ends() {
    with_server(async |harness| {
        let short = Duration::from_millis(30);
        let long = Duration::from_secs(600);
        let whole = "GET /status HTTP/1.1\r\nhost: cache\r\n\r\n";
        let half =
            &format!("PUT /cas/{} HTTP/1.1\r\nhost: cache\r\ncontent-length: 900000\r\n\r\nabc", "ab".repeat(32));
        for (sent, patience) in [
            ("", Patience { idle: short, head: long, stall: long, ..Patience::default() }),
            ("GET /sta", Patience { idle: long, head: short, stall: long, ..Patience::default() }),
            (whole, Patience { idle: short, head: long, stall: long, ..Patience::default() }),
            (half, Patience { idle: long, head: long, stall: short, ..Patience::default() }),
            (half, Patience { idle: long, head: long, stall: long, read: short, write: long, ..Patience::default() }),
            (
                half,
                Patience {
                    idle: long,
                    head: long,
                    stall: long,
                    read: Duration::ZERO,
                    write: short,
                    ..Patience::default()
                },
            ),
            (whole, Patience { idle: short, head: long, stall: long, read: long, write: long, ..Patience::default() }),
        ] {
            harness.server.patience.set(patience);
            let mut client = Raw::connect(harness);
            client.send(sent.as_bytes()).await;
            let rest = client.rest().await;
            assert_eq!(rest.starts_with(b"HTTP/1.1 200"), sent == whole, "{rest:?}");
        }
        assert_eq!(harness.server.counters.http.failed.get(), 4, "those that were in the middle of a request");
        harness.until("all are closed", || harness.server.counters.http.connections.get() == 0).await;
    });
}

/// Goal: a client that brings its body by bytes is told and shown out, and one that takes its answer by bytes is cut off, though
/// something moves all the time. Method: 200 bytes a second, a fifth of the floor, and 50 ms to wait for nothing.
#[test]
fn trickles_end() {
    with_server(async |harness| {
        let (little, pause) = (Duration::from_millis(50), Duration::from_millis(5));
        let failed = || harness.server.counters.http.failed.get();
        harness.server.patience.set(Patience { body: little, ..Patience::default() });
        let path = format!("/cas/{}", "ab".repeat(32));
        for (length, byte) in [("content-length: 9000", "x"), ("transfer-encoding: chunked", "1\r\nx\r\n")] {
            let mut client = Raw::connect(harness);
            client.send(format!("PUT {path} HTTP/1.1\r\nhost: cache\r\n{length}\r\n\r\n").as_bytes()).await;
            let mut first = [0];
            while time::timeout(pause, client.0.read_exact(&mut first)).await.is_err() {
                client.send(byte.as_bytes()).await;
            }
            let rest = String::from_utf8(client.rest().await).unwrap();
            assert!(
                rest.starts_with("TTP/1.1 408 Request Timeout\r\n") && rest.contains("connection: close"),
                "{rest}"
            );
        }
        assert_eq!(failed(), 0, "whoever was told is counted by the code of the answer");

        harness.server.patience.set(Patience { taking: little, taking_most: little, ..Patience::default() });
        let digest = harness.store.fake.add(bytes(3_000_000));
        harness.store.brake(|brake| brake.endless = 3 << 20);
        let mut client = Raw::connect(harness);
        client.send(format!("GET /cas/{} HTTP/1.1\r\nhost: cache\r\n\r\n", digest.hash).as_bytes()).await;
        while failed() == 0 {
            client.0.read_u8().await.unwrap();
            time::sleep(pause).await;
        }
        assert!(client.rest().await.len() <= 64 << 10, "only what had been sent");
    });
}

/// Goal: a client does not answer for what holds up the server. Method: a store that takes nothing for four times as long as may
/// be waited for the body, in the middle of which it is.
#[test]
fn our_own_waits_are_no_trickle() {
    with_server(async |harness| {
        let little = Duration::from_millis(100);
        harness.server.patience.set(Patience { body: little, ..Patience::default() });
        let blob = bytes(400_000);
        let digest = digest_of(&blob);
        harness.store.brake(|brake| brake.hold = true);
        let mut client = Raw::connect(harness);
        let head =
            format!("PUT /cas/{} HTTP/1.1\r\nhost: cache\r\ncontent-length: {}\r\n\r\n", digest.hash, blob.len());
        let all = [head.as_bytes(), &blob].concat();
        let code = Rc::new(Cell::new(0));
        let answered = code.clone();
        rt::spawn(async move {
            client.send(&all).await;
            answered.set(client.reply(false).await.code);
        });
        harness.until("the upload waits", || harness.store.brake(|brake| brake.waiting) == 1).await;
        time::sleep(4 * little).await;
        harness.store.brake(|brake| brake.hold = false);
        harness.until("it is answered", || code.get() > 0).await;
        assert_eq!(code.get(), 200);
    });
}

/// Goal: a drain closes connections that have no whole request, but answers one that comes a moment later, with a word
/// that it was the last. Method: an idle connection, one in the middle of a head, and one that asks when all know.
#[test]
fn drains() {
    with_server(async |harness| {
        let mut late = Raw::connect(harness);
        assert_eq!(late.ask("GET", "/status").await.code, 200);
        harness.server.drain();
        let answer = late.ask("GET", "/status").await;
        assert_eq!((answer.code, answer.header("connection")), (200, "close"));
        assert_eq!(late.rest().await, b"");
    });
    with_server(async |harness| {
        harness.server.farewell.set(Duration::from_millis(20));
        let (mut idle, mut asking) = (Raw::connect(harness), Raw::connect(harness));
        assert_eq!(idle.ask("GET", "/status").await.code, 200);
        asking.send(b"GET /status HTTP/1.1\r\n").await;
        harness.until("both are served", || harness.server.counters.http.connections.get() == 2).await;
        harness.server.drain();
        assert_eq!(idle.rest().await, b"");
        assert_eq!(asking.rest().await, b"");
        time::timeout(Duration::from_secs(30), harness.server.drained()).await.unwrap();
    });
}

/// Goal: an answer stays charged until its client has taken it, though the request is over, and so is the connection. Method: a blob
/// and figures that a client does not read.
#[test]
fn unread_answers_stay_charged() {
    with_server(async |harness| {
        let blob = bytes(300_000);
        let digest = harness.store.fake.add(blob.clone());
        let purse = &harness.server.settings.purse;
        let mut client = Raw::connect(harness);
        client.send(format!("GET /cas/{} HTTP/1.1\r\nhost: cache\r\n\r\n", digest.hash).as_bytes()).await;
        harness.until("the request is over", || harness.server.asked() == (1, 0)).await;
        assert!(harness.server.reply_memory.held() >= blob.len());
        assert_eq!(purse.apart(), limits::HTTP_CONNECTION_HELD_LEN);
        let reply = client.reply(false).await;
        assert!(reply.code == 200 && reply.body == blob);
        harness.until("it has gone out", || harness.server.reply_memory.held() == 0).await;
        drop(client);
        harness.until("all is given back", || purse.apart() == 0).await;
        harness.server.connection_wait.set(Duration::from_millis(1));
        let rest = purse.apart_for((PEERS / 4 * 3) - limits::HTTP_CONNECTION_HELD_LEN, Rank::First);
        let mut client = Raw::connect(harness);
        assert_eq!(client.ask("GET", "/status").await.code, 503);
        assert_eq!(Raw::connect(harness).rest().await, b"", "there is no memory for another connection");
        drop(rest);
        assert_eq!(client.ask("GET", "/status").await.code, 200);
    });
}

/// Goal: whatever gRPC clients have taken, some HTTP connections are served. Method: all the memory that connections and calls of
/// gRPC may take, then HTTP connections up to the count of those who may have the rest, and one more.
#[test]
fn figures_are_there_when_others_have_all() {
    with_server(async |harness| {
        let purse = &harness.server.settings.purse;
        let mut taken = Vec::new();
        for len in [64 << 10, 1 << 10, 1] {
            while let Some(apart) = purse.apart_for(len, Rank::Open) {
                taken.push(apart);
            }
        }
        harness.server.connection_wait.set(Duration::from_millis(1));
        let mut kept = Vec::new();
        for _ in 0..limits::HTTP_CONNECTIONS_FIRST_MAX {
            let mut client = Raw::connect(harness);
            assert_eq!(client.ask("GET", "/status").await.code, 200);
            kept.push(client);
        }
        assert_eq!(Raw::connect(harness).rest().await, b"", "there is no memory for another connection");
    });
}
