//! How a new process takes over the listening sockets of the one that runs.
//!
//! The one that runs listens on a unix socket in its directory. The new one asks there, gets the sockets, and confirms
//! when it needs nothing more to serve; then the old one stops. Both have the sockets meanwhile, so that connections wait
//! in the kernel and none is refused. Until it is confirmed nothing has changed: a new process that fails costs nothing.
//!
//! | message | from | bytes |
//! |---|---|---|
//! | ask | new | `ringcas takeover 1\n` |
//! | sockets | old | `ringcas takeover 1\n`, then a name and `\n` for each; the descriptors, in this order |
//! | confirm | new | `go\n` |
//!
//! Source: own format, version 1.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::descriptors;
use super::listen::{Address, Bound, SocketFile};

/// The socket's name in the directory.
const NAME: &str = "takeover";
const GREETING: &str = "ringcas takeover 1\n";
const CONFIRM: &[u8] = b"go\n";
/// The longest list of names, in bytes.
const NAMES_LEN_MAX: usize = 1024;
/// How long the other side may take for a message.
const PATIENCE: Duration = Duration::from_secs(5);

/// The offer to a later process to take over. Clones share it; `Default` is none.
#[derive(Clone, Default)]
pub struct Offer(Arc<State>);

#[derive(Default)]
struct State {
    /// `None` when there is nothing to be had any more.
    standing: Mutex<Option<Standing>>,
    taken: AtomicBool,
}

struct Standing {
    sockets: Vec<(String, OwnedFd)>,
    /// Removed with the offer.
    _file: Option<SocketFile>,
}

impl Offer {
    /// Offers `sockets` in `dir` from now on, from a thread of its own. `taken` is called when they have been taken.
    pub fn make(
        dir: &Path,
        sockets: Vec<(String, OwnedFd)>,
        taken: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        // Why the mode: whoever gets in can stop this server.
        let mut bound = Bound::bind(&Address::Unix(dir.join(NAME)), Some(0o600))?;
        let standing = Standing { sockets, _file: bound.take_file() };
        let offer = Self(Arc::new(State { standing: Mutex::new(Some(standing)), taken: AtomicBool::new(false) }));
        let listener = bound.into_socket();
        let state = offer.0.clone();
        std::thread::Builder::new().name("takeover".into()).spawn(move || {
            loop {
                let asked = listener.accept().map(|(stream, _)| UnixStream::from(OwnedFd::from(stream)));
                match asked.and_then(|mut stream| state.hand_over(&mut stream).map(|()| stream)) {
                    Ok(stream) => {
                        // Why kept: nothing but the end of this process may look like its end.
                        std::mem::forget(stream);
                        break;
                    }
                    Err(error) => {
                        tracing::warn!("another process asked to take over, and did not: {error}");
                        // Why a pause: a failure to accept may stay.
                        std::thread::sleep(Duration::from_millis(50));
                    }
                }
            }
            drop(listener);
            state.withdraw();
            state.taken.store(true, Ordering::Release);
            taken();
        })?;
        Ok(offer)
    }

    /// From now on nobody can take over, and the sockets that were offered are closed, as far as this offer goes.
    pub fn withdraw(&self) {
        self.0.withdraw();
    }

    /// Whether a process has taken over.
    pub fn is_taken(&self) -> bool {
        self.0.taken.load(Ordering::Acquire)
    }
}

impl State {
    fn withdraw(&self) {
        drop(self.standing.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn hand_over(&self, stream: &mut UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        expect(stream, GREETING.as_bytes())?;
        {
            let standing = self.standing.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(standing) = &*standing else { return Err(io::Error::other("this process is stopping already")) };
            let names: String = standing.sockets.iter().map(|(name, _)| format!("{name}\n")).collect();
            let passed: Vec<BorrowedFd<'_>> = standing.sockets.iter().map(|(_, socket)| socket.as_fd()).collect();
            descriptors::send(stream.as_fd(), format!("{GREETING}{names}").as_bytes(), &passed)?;
        }
        expect(stream, CONFIRM)
    }
}

/// The sockets of the process that runs, before it has been told to stop.
pub struct Taken {
    stream: UnixStream,
    /// By the names that the other process gave them.
    pub sockets: Vec<(String, OwnedFd)>,
}

/// Asks the process that serves from `dir` for its sockets. `None` when there is none, or it is stopping already.
pub fn ask(dir: &Path) -> io::Result<Option<Taken>> {
    let mut stream = match UnixStream::connect(dir.join(NAME)) {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(GREETING.as_bytes())?;
    let mut bytes = [0; NAMES_LEN_MAX];
    let (got, sockets) = descriptors::receive(stream.as_fd(), &mut bytes)?;
    if got == 0 {
        return Ok(None);
    }
    let names = str::from_utf8(&bytes[..got]).ok().and_then(|text| text.strip_prefix(GREETING));
    let names: Vec<&str> = names.map(|names| names.lines().collect()).unwrap_or_default();
    if names.len() != sockets.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the process that runs speaks another version of this"));
    }
    let sockets = names.into_iter().map(str::to_owned).zip(sockets).collect();
    Ok(Some(Taken { stream, sockets }))
}

impl Taken {
    /// Tells the other process to stop: it finishes what is in flight, then frees the directory.
    pub fn confirm(mut self) -> io::Result<()> {
        self.stream.write_all(CONFIRM)
    }
}

fn expect(stream: &mut UnixStream, expected: &[u8]) -> io::Result<()> {
    let mut got = [0; 32];
    let got = &mut got[..expected.len()];
    stream.read_exact(got)?;
    if got == expected { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidData, "it said something else")) }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn listener() -> Bound {
        Bound::bind(&Address::Tcp(([127, 0, 0, 1], 0).into()), None).expect("binds")
    }

    /// Goal: a process that asks and vanishes changes nothing, one that confirms has the sockets, and then there is no
    /// offer any more. Method: both, one after the other; the socket is the same if it has the same port.
    #[test]
    fn sockets_change_hands_when_confirmed() {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let dir = scratch.path();
        assert!(ask(dir).expect("nobody").is_none());
        let socket = listener();
        let (told, stopped) = mpsc::channel();
        let sockets = vec![("grpc".to_owned(), socket.share().expect("one more"))];
        let offer = Offer::make(dir, sockets, move || told.send(()).expect("the test waits")).expect("offers");
        drop(ask(dir).expect("asks").expect("there is an offer"));
        let taken = ask(dir).expect("asks").expect("it still stands");
        assert!(!offer.is_taken() && stopped.try_recv().is_err());
        let (name, passed) = &taken.sockets[0];
        let passed = Bound::adopt(passed.try_clone().expect("one more"), true).expect("listens");
        assert_eq!((name.as_str(), passed.address().expect("bound")), ("grpc", socket.address().expect("bound")));
        taken.confirm().expect("confirms");
        stopped.recv().expect("the server is told");
        assert!(offer.is_taken() && ask(dir).expect("nobody").is_none());
    }

    /// Goal: a server that stops lets go of the sockets, and says so to who asks then. Method: an offer that is withdrawn.
    #[test]
    fn a_withdrawn_offer_holds_nothing() {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let socket = listener();
        let Ok(Address::Tcp(address)) = socket.address() else { panic!("bound elsewhere") };
        let sockets = vec![("grpc".to_owned(), socket.share().expect("one more"))];
        let offer = Offer::make(scratch.path(), sockets, || panic!("nobody took it")).expect("offers");
        drop(socket);
        assert!(std::net::TcpStream::connect(address).is_ok());
        offer.withdraw();
        assert!(std::net::TcpStream::connect(address).is_err());
        assert!(ask(scratch.path()).expect("nobody").is_none() && !offer.is_taken());
    }
}
