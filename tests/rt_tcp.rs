//! Sockets: none is lost, none leaks, and bytes arrive whole.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use ringcas::limits::{READ_AHEAD_BUFS_MAX, READ_AHEAD_LEN};
use ringcas::rt::cores::{CorePlan, block_on, launch};
use ringcas::rt::listen::{Address, Bound};
use ringcas::rt::signal::Shutdown;
use ringcas::rt::tcp::{Accepted, Listener, Peer, TcpConn};
use ringcas::rt::{channel, time};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Tests of this file look at the process's descriptors, so they run one at a time, each when those of the executors before it
/// are gone: they go with their blocking threads, which nobody can join.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (start, limit) = (time::now(), Duration::from_secs(20));
    while has_executors() {
        assert!(start.elapsed() < limit, "an executor's descriptors stay");
        thread::yield_now();
    }
    alone
}

/// Whether a ring or an eventfd is open.
fn has_executors() -> bool {
    let open = std::fs::read_dir("/proc/self/fd").expect("procfs").flatten();
    let mut links = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.any(|link| link.to_string_lossy().starts_with("anon_inode:"))
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

fn bind(address: &str) -> std::io::Result<Bound> {
    Bound::bind(&Address::Tcp(address.parse().expect("an address")), None)
}

fn bound_at(socket: &Bound) -> SocketAddr {
    match socket.address().expect("bound") {
        Address::Tcp(address) => address,
        Address::Unix(path) => panic!("bound at {}", path.display()),
    }
}

fn loopback() -> (Bound, SocketAddr) {
    let socket = bind("127.0.0.1:0").expect("binds");
    let address = bound_at(&socket);
    (socket, address)
}

async fn pair(listener: &Listener, address: SocketAddr) -> (TcpConn, TcpStream) {
    let client = TcpStream::connect(address).expect("the backlog takes it");
    (listener.accept().await.expect("accepts").own().expect("owned"), client)
}

/// Sends `len` bytes of a pattern from a thread, then ends its half.
fn send_pattern(mut client: TcpStream, len: usize) -> thread::JoinHandle<TcpStream> {
    thread::spawn(move || {
        client.write_all(&pattern(len)).expect("sends");
        client.shutdown(std::net::Shutdown::Write).expect("ends");
        client
    })
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

/// Goal: sockets accepted on one core are served on others, each once, and no descriptor stays behind.
/// Method: 200 clients send their number; core 0 deals the sockets out to four cores, which echo.
#[test]
fn two_hundred_sockets_change_cores() {
    const CLIENTS: usize = 200;
    let _alone = alone();
    let before = descriptors();
    let (socket, address) = loopback();
    let shutdown = Shutdown::new();
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..4).map(|_| channel::bounded::<Accepted>(8)).unzip();
    let mut socket = Some(socket);
    let mut receivers = receivers.into_iter();
    let cores = launch(&CorePlan::count(4).expect("a plan"), 1 << 20, &shutdown, |_| {
        let mut inbox = receivers.next().expect("one for each");
        let accepting = socket.take().map(|socket| (socket, senders.clone()));
        let shutdown = shutdown.clone();
        move || async move {
            if let Some((socket, mut senders)) = accepting {
                ringcas::rt::spawn(async move {
                    let listener = Listener::adopt(socket);
                    for number in 0..CLIENTS {
                        let accepted = listener.accept_patiently().await;
                        senders[number % 4].send(accepted).await.expect("the core lives");
                    }
                });
            }
            let served = async {
                while let Some(accepted) = inbox.recv().await {
                    let mut conn = accepted.own().expect("owned");
                    let mut number = [0; 8];
                    conn.read_exact(&mut number).await.expect("reads");
                    conn.write_all(&number).await.expect("writes");
                }
            };
            time::race(served, shutdown.wait()).await;
        }
    })
    .expect("four cores");
    drop(senders);
    let clients: Vec<TcpStream> = (0..CLIENTS)
        .map(|number| {
            let mut client = TcpStream::connect(address).expect("connects");
            client.write_all(&number.to_le_bytes()).expect("sends");
            client
        })
        .collect();
    for (number, mut client) in clients.into_iter().enumerate() {
        let mut echo = [0; 8];
        client.read_exact(&mut echo).expect("answered");
        assert_eq!(usize::from_le_bytes(echo), number);
        assert_eq!(client.read(&mut echo).expect("closed by the core"), 0);
    }
    shutdown.trigger();
    assert_eq!(cores.wait(), Ok(()));
    // The executors' own descriptors go with their blocking threads, which nobody can join.
    let (start, limit) = (time::now(), Duration::from_secs(20));
    while descriptors() > before && start.elapsed() < limit {
        thread::yield_now();
    }
    let gone = descriptors() <= before;
    assert!(gone, "{} descriptors before, {} after", before, descriptors());
}

/// Goal: a dropped accept loses no connection, and a connection dropped before it is owned is closed.
/// Method: give up an accept before each real one; then drop what was accepted, and count descriptors.
#[test]
fn dropped_accepts_lose_nothing() {
    let _alone = alone();
    let (socket, address) = loopback();
    block_on(async {
        let listener = Listener::adopt(socket);
        let _ = time::race(listener.accept(), time::yield_to_reactor()).await;
        let before = descriptors();
        let clients: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(address).expect("connects")).collect();
        let mut accepted = Vec::new();
        while accepted.len() < 100 {
            if let time::Either::Left(got) = time::race(listener.accept(), std::future::ready(())).await {
                accepted.push(got.expect("accepts"));
            }
        }
        assert_eq!(descriptors(), before + 200);
        drop(accepted);
        drop(clients);
        assert_eq!(descriptors(), before);
    });
}

/// Goal: reads in small pieces get all bytes in order, with few system calls, and an idle connection holds no buffer.
/// Method: 3 MiB of a pattern read 8 KiB at a time; the read-ahead must be seen, and be empty at the end.
#[test]
fn small_reads_are_read_ahead() {
    const LEN: usize = 3 << 20;
    let _alone = alone();
    let (socket, address) = loopback();
    block_on(async {
        let listener = Listener::adopt(socket);
        let (mut conn, client) = pair(&listener, address).await;
        let sender = send_pattern(client, LEN);
        let (mut got, mut ahead_max) = (Vec::new(), 0);
        loop {
            let mut piece = [0; 8192];
            let count = conn.read(&mut piece).await.expect("reads");
            ahead_max = ahead_max.max(conn.read_ahead());
            if count == 0 {
                break;
            }
            got.extend_from_slice(&piece[..count]);
        }
        assert!(got == pattern(LEN));
        assert!(ahead_max > 8192 && ahead_max < READ_AHEAD_LEN, "{ahead_max}");
        assert_eq!(conn.read_ahead(), 0);
        drop(sender.join());
    });
}

/// Goal: reads into large buffers arrive whole too, past the read-ahead, also when the core has lent all of it.
/// Method: more connections than buffers, each with unread bytes; every one is then read to its end.
#[test]
fn large_reads_and_spent_buffers() {
    const LEN: usize = 300_000;
    let _alone = alone();
    let (socket, address) = loopback();
    block_on(async {
        let listener = Listener::adopt(socket);
        let mut open = Vec::new();
        for _ in 0..READ_AHEAD_BUFS_MAX + 4 {
            let (mut conn, client) = pair(&listener, address).await;
            let sender = send_pattern(client, LEN);
            let mut first = vec![0; 1000];
            conn.read_exact(&mut first).await.expect("reads");
            open.push((conn, sender, first));
        }
        let holding = open.iter().filter(|(conn, ..)| conn.read_ahead() > 0).count();
        assert!(holding <= READ_AHEAD_BUFS_MAX);
        for (mut conn, sender, mut got) in open {
            let mut piece = vec![0; 128 << 10];
            loop {
                match conn.read(&mut piece).await.expect("reads") {
                    0 => break,
                    count => got.extend_from_slice(&piece[..count]),
                }
            }
            assert!(got == pattern(LEN));
            drop(sender.join());
        }
    });
}

/// Goal: a half-closed connection still takes our answer; vectored writes arrive in order, also beyond the socket buffer.
/// Method: the client ends its half and then reads 4 MiB slowly.
#[test]
fn half_closed_and_vectored() {
    const LEN: usize = 4 << 20;
    let _alone = alone();
    let (socket, address) = loopback();
    block_on(async {
        let listener = Listener::adopt(socket);
        let (mut conn, client) = pair(&listener, address).await;
        client.shutdown(std::net::Shutdown::Write).expect("ends");
        assert_eq!(conn.read(&mut [0; 16]).await.expect("the end"), 0);
        let reader = thread::spawn(move || {
            let mut client = client;
            let mut got = Vec::new();
            client.read_to_end(&mut got).expect("reads");
            got
        });
        let data = pattern(LEN);
        let mut sent = 0;
        while sent < LEN {
            let (first, second) = data[sent..].split_at((LEN - sent) / 3);
            let slices = [std::io::IoSlice::new(first), std::io::IoSlice::new(second)];
            sent += conn.write_vectored(&slices).await.expect("writes");
        }
        conn.shutdown().await.expect("ends");
        assert!(reader.join().expect("read") == data);
    });
}

/// Goal: a reset is an error of that connection, for reads and for writes, and kills nothing (no SIGPIPE).
/// Method: the client leaves with unread data, which makes the kernel send RST.
#[test]
fn a_reset_is_an_error() {
    let _alone = alone();
    let (socket, address) = loopback();
    block_on(async {
        let listener = Listener::adopt(socket);
        let (mut conn, client) = pair(&listener, address).await;
        conn.write_all(b"never read").await.expect("writes");
        drop(client);
        let error = conn.read(&mut [0; 16]).await.expect_err("reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert!(conn.write_all(b"too late").await.is_err());
        assert!(conn.shutdown().await.is_ok());
    });
}

/// Goal: a process without free descriptors goes on accepting once it has some again.
/// Method: open /dev/null until nothing opens; accept meanwhile; then close one and accept.
#[test]
fn no_descriptors_is_waited_out() {
    let _alone = alone();
    let (socket, address) = loopback();
    block_on(async {
        let listener = Listener::adopt(socket);
        let client = TcpStream::connect(address).expect("the backlog takes it");
        let mut hoard = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            hoard.push(file);
        }
        let error = listener.accept().await.err().expect("no descriptor");
        let patient = listener.accept_patiently();
        let accepted = time::timeout(Duration::from_millis(60), patient).await;
        hoard.clear();
        assert_eq!(error.raw_os_error(), Some(24), "EMFILE");
        assert!(accepted.is_err());
        let accepted = listener.accept_patiently().await;
        assert_eq!(accepted.peer(), Peer::Tcp(client.local_addr().expect("connected")));
    });
}

/// Goal: `[::]` takes IPv4 and IPv6 clients on one port, whatever the system's default.
/// Method: connect over both; a host without IPv6 has nothing to show.
#[test]
fn any_address_is_dual_stack() {
    let _alone = alone();
    let Ok(socket) = bind("[::]:0") else { return };
    let port = bound_at(&socket).port();
    block_on(async {
        let listener = Listener::adopt(socket);
        for host in ["127.0.0.1", "[::1]"] {
            let address: SocketAddr = format!("{host}:{port}").parse().expect("an address");
            let _client = TcpStream::connect(address).expect("connects");
            listener.accept().await.expect("accepts");
        }
    });
}

/// Goal: a port that is taken is an error, and not shared.
/// Method: bind it twice.
#[test]
fn a_taken_port_is_an_error() {
    let _alone = alone();
    let (_socket, address) = loopback();
    assert_eq!(bind(&address.to_string()).expect_err("taken").kind(), ErrorKind::AddrInUse);
}

/// Goal: unix sockets serve like TCP. Method: a connection that is echoed once.
#[test]
fn unix_sockets() {
    let _alone = alone();
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let path = scratch.path().join("socket");
    let mut socket = Bound::bind(&Address::Unix(path.clone()), None).expect("binds");
    let _file = socket.take_file().expect("it is ours to remove");
    block_on(async {
        let listener = Listener::adopt(socket);
        let mut client = UnixStream::connect(&path).expect("connects");
        let accepted = listener.accept().await.expect("accepts");
        assert_eq!(accepted.peer().to_string(), "unix");
        let mut conn = accepted.own().expect("owned");
        client.write_all(b"ping").expect("sends");
        let mut got = [0; 4];
        conn.read_exact(&mut got).await.expect("reads");
        conn.write_all(&got).await.expect("writes");
        client.read_exact(&mut got).expect("answered");
        assert_eq!(&got, b"ping");
    });
}

/// Goal: a task that computes and yields to the reactor does not keep a socket waiting. `yield_once` would.
/// Method: bytes are there and a reader waits; it must have run within a few yields.
#[test]
fn the_reactor_gets_its_turn() {
    let _alone = alone();
    let (socket, address) = loopback();
    block_on(async {
        let listener = Listener::adopt(socket);
        let (mut conn, mut client) = pair(&listener, address).await;
        let seen = ringcas::rt::local::Local::new(false);
        ringcas::rt::spawn({
            let seen = seen.clone();
            async move {
                conn.read_exact(&mut [0; 4]).await.expect("reads");
                seen.with(|seen| *seen = true);
            }
        });
        time::yield_to_reactor().await; // The reader has registered.
        client.write_all(b"data").expect("sends");
        let mut yields = 0;
        while !seen.with(|seen| *seen) {
            time::yield_to_reactor().await;
            yields += 1;
            assert!(yields < 100, "the socket is ready, and nobody looks");
        }
    });
}
