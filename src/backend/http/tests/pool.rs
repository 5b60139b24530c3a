//! Of the pool: what becomes of connections, idle and busy.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::mpsc;

use futures_util::stream;

use super::super::*;
use crate::rt::channel::{self, ReplyTo};
use crate::rt::cores::block_on;

const TIMES: PoolTimes =
    PoolTimes { recycle: None, idle_max: 4, idle: Duration::from_secs(600), connect: Duration::from_secs(10) };

fn listen() -> (TcpListener, Target) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    (listener, Target { host: "127.0.0.1".into(), port, tls: false })
}

/// Goal: what a server said before it broke the connection is heard, also by who finds that out when it writes. Method: a body
/// whose second piece comes only when the server has answered and reset the connection, and before this core has looked at its
/// sockets.
#[test]
fn an_answer_outlives_its_connection() {
    let (listener, target) = listen();
    let (go, goes) = mpsc::channel();
    let (close, closed) = mpsc::channel();
    let server = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().expect("a connection");
        goes.recv().expect("the first piece was sent");
        // Not all that has come: so the connection is reset.
        connection.read_exact(&mut [0; 16]).expect("a request");
        connection.write_all(b"HTTP/1.1 403 X\r\nContent-Length: 2\r\n\r\nno").expect("it is open");
        drop(connection);
        close.send(()).expect("somebody waits");
    });
    block_on(async {
        let pieces = stream::unfold((0, go, closed), |(number, go, closed)| async move {
            if number == 1 {
                rt::time::yield_once().await;
                go.send(()).expect("the server waits");
                closed.recv().expect("it has closed");
            }
            Some((Ok(Bytes::from_static(&[7; 1000])), (number + 1, go, closed)))
        });
        let mut body = Some(OutBody::Stream { pieces: Box::pin(pieces), left: 2000 });
        let request =
            || Request::put("/").header("host", "x").body(body.take().expect("sent once")).expect("a request");
        let mut response = Pool::new(target, None, TIMES).send(request).await.expect("an answer");
        assert_eq!(response.status, 403);
        assert_eq!(response.body.next().await.ok().flatten().as_deref(), Some(&b"no"[..]));
    });
    server.join().expect("it does not panic");
}

/// Answers each request with the number of its connection, from 0 on, and says when the first connection has ended.
fn number_connections(listener: TcpListener, ended: ReplyTo<()>) {
    let mut ended = Some(ended);
    std::thread::spawn(move || {
        for (number, connection) in listener.incoming().enumerate() {
            let (mut connection, ended) = (connection.expect("a connection"), ended.take());
            std::thread::spawn(move || {
                let mut received = Vec::new();
                let mut buf = [0; 4096];
                while let Ok(len @ 1..) = connection.read(&mut buf) {
                    received.extend_from_slice(&buf[..len]);
                    if received.ends_with(b"\r\n\r\n") {
                        received.clear();
                        let answer = format!("HTTP/1.1 200 X\r\nContent-Length: 1\r\n\r\n{number}");
                        connection.write_all(answer.as_bytes()).expect("it is open");
                    }
                }
                ended.into_iter().for_each(|ended| ended.send(()));
            });
        }
    });
}

/// The number of the connection that a request came in by.
async fn ask(pool: &Pool) -> Result<Bytes, HttpError> {
    let request = || Request::get("/").header("host", "x").body(OutBody::empty()).expect("a request");
    let mut response = pool.send(request).await?;
    let number = response.body.next().await?.expect("a body");
    assert_eq!(response.body.next().await?, None);
    Ok(number)
}

/// Goal: a connection is used again while it is young in idleness; when that time is over it is closed, whether or not anybody
/// asks for something, and not before. Method: a long time and a short one, and a server that sees the end.
#[test]
fn idle_connections_are_closed() {
    for (idle_ms, next) in [(600_000, "0"), (20, "1")] {
        block_on(async {
            let (listener, target) = listen();
            let (ended, has_ended) = channel::reply();
            number_connections(listener, ended);
            let idle = Duration::from_millis(idle_ms);
            let pool = Pool::new(target, None, PoolTimes { idle, ..TIMES });
            let begun = rt::time::now();
            assert_eq!(ask(&pool).await.expect("an answer"), "0");
            if next == "1" {
                has_ended.recv().await.expect("the server sees the end");
                assert!(begun.elapsed() >= idle && pool.0.idle.with(|idle| idle.is_empty()));
            }
            assert_eq!(ask(&pool).await.expect("an answer"), next);
        });
    }
}

/// Goal: one connection is enough for a name one of whose addresses takes it, whichever comes first; the others are not tried
/// again until the next lookup, and that comes when none is left. Method: a name whose addresses the test chooses, with and
/// without the one that has a server.
#[test]
fn every_address_has_its_turn() {
    block_on(async {
        let (listener, target) = listen();
        let (ended, _has_ended) = channel::reply();
        number_connections(listener, ended);
        let at = |last: u8| SocketAddr::from(([127, 0, 0, last], target.port));
        for turn in 0..3 {
            let pool = Pool::new(target.clone(), None, PoolTimes::ONCE);
            let until = Some(rt::time::now() + Duration::from_secs(600));
            let set =
                |found: Vec<_>| pool.0.addresses.with(|addresses| (addresses.found, addresses.until) = (found, until));
            let found = || pool.0.addresses.with(|addresses| (addresses.found.clone(), addresses.until));
            pool.0.addresses.with(|addresses| addresses.next = turn);
            set(vec![at(2), at(1), at(3)]);
            ask(&pool).await.expect("an answer");
            let refused = (turn + 1..turn + 4).map(|place| [2, 1, 3][place % 3]).take_while(|last| *last != 1);
            let refused: Vec<_> = refused.map(at).collect();
            assert_eq!(found(), ([at(2), at(1), at(3)].into_iter().filter(|a| !refused.contains(a)).collect(), until));
            set(vec![at(2), at(3)]);
            let error = ask(&pool).await.expect_err("nobody is there").to_string();
            assert!(error.contains("refused"), "{error}");
            assert_eq!(found(), (vec![], None));
            // The name is an address, so it is looked up without a resolver.
            ask(&pool).await.expect("an answer");
        }
    });
}

/// Goal: an address that is silent costs a connection a second and not its whole time, and when nobody waits for the last
/// address to answer, the name is looked up again. Method: a silent address before one that has a server, and alone, with the
/// limit of the pool and of who asks.
#[test]
fn a_silent_address_costs_a_second() {
    block_on(async {
        let (listener, target) = listen();
        let (ended, _has_ended) = channel::reply();
        number_connections(listener, ended);
        let (silent, _held) = rt::listen::silent();
        let well = SocketAddr::from(([127, 0, 0, 1], target.port));
        let until = Some(rt::time::now() + Duration::from_secs(600));
        let pool_of = |connect, found: Vec<_>| {
            let pool = Pool::new(target.clone(), None, PoolTimes { connect, ..TIMES });
            // The one that comes first is the next one.
            let next = found.len() - 1;
            pool.0.addresses.with(|addresses| {
                (addresses.found, addresses.until, addresses.next) = (found, until, next);
            });
            pool
        };
        let known = |pool: &Pool| pool.0.addresses.with(|addresses| (addresses.found.clone(), addresses.until));

        let pool = pool_of(CONNECT, vec![silent, well]);
        rt::time::timeout(CONNECT / 2, ask(&pool)).await.expect("half the time is enough").expect("an answer");
        assert_eq!(known(&pool), (vec![well], until));

        let short = Duration::from_millis(50);
        let pool = pool_of(short, vec![silent]);
        let error = ask(&pool).await.expect_err("nobody answers").to_string();
        assert!(error.contains("cannot connect"), "{error}");
        assert_eq!(known(&pool).1, None);
        ask(&pool).await.expect("it was looked up");

        let pool = pool_of(CONNECT, vec![silent]);
        rt::time::timeout(short, ask(&pool)).await.expect_err("nobody answers");
        assert_eq!(known(&pool).1, None);
        ask(&pool).await.expect("it was looked up");
    });
}
