//! Of the pool: what becomes of connections, idle and busy.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::mpsc;

use futures_util::stream;

use super::super::*;
use crate::rt::cores::block_on;

const TIMES: PoolTimes = PoolTimes { recycle: None, idle_max: 4 };

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
