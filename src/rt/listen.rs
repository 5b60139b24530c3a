//! Where a server listens: addresses, and bound sockets that no core owns yet.

use std::fmt;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};

/// Connections that wait to be accepted; the kernel caps it at net.core.somaxconn.
const BACKLOG: i32 = 4096;
/// Silence after which the kernel asks whether the peer is still there, and the distance of the further questions.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// The first descriptor that a service manager passes. Source: sd_listen_fds(3).
const PASSED_FROM: i32 = 3;
/// Descriptors that a service manager may pass.
const PASSED_MAX: i32 = 64;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    /// A unix socket at this path.
    Unix(PathBuf),
}

impl Address {
    /// Whether a socket that is bound at `bound` is what this asks for: port 0 is any port.
    pub fn admits(&self, bound: &Self) -> bool {
        match (self, bound) {
            (Self::Tcp(asked), Self::Tcp(bound)) => {
                asked.ip() == bound.ip() && (asked.port() == 0 || asked.port() == bound.port())
            }
            (Self::Unix(asked), Self::Unix(bound)) => asked == bound,
            (Self::Tcp(_), Self::Unix(_)) | (Self::Unix(_), Self::Tcp(_)) => false,
        }
    }

    /// Whether other machines may reach it, on any of this one's addresses.
    pub fn is_unspecified(&self) -> bool {
        matches!(self, Self::Tcp(address) if address.ip().is_unspecified())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A bound, listening socket that no core owns yet, so that errors show before cores start.
#[derive(Debug)]
pub struct Bound {
    socket: Socket,
    file: Option<SocketFile>,
}

impl Bound {
    /// Binds and listens. `[::]` takes IPv4 as well; any other IPv6 address takes IPv6 only. A unix socket's file that a
    /// dead server left behind is replaced; `mode` is its file's, else what the umask leaves.
    ///
    /// Why no SO_REUSEPORT: one core accepts for all, a second server on the same port should fail, not share, and the
    /// kernel resets what waits for a listener of a group that closes. Who takes over gets the socket itself.
    pub fn bind(address: &Address, mode: Option<u32>) -> io::Result<Self> {
        match address {
            Address::Tcp(address) => {
                let socket = Socket::new(Domain::for_address(*address), Type::STREAM, Some(Protocol::TCP))?;
                if let SocketAddr::V6(v6) = address {
                    socket.set_only_v6(!v6.ip().is_unspecified())?;
                }
                socket.set_reuse_address(true)?;
                socket.bind(&(*address).into())?;
                keep_alive(&socket)?;
                socket.listen(BACKLOG)?;
                Ok(Self { socket, file: None })
            }
            Address::Unix(path) => {
                let socket = bind_unix(path)?;
                let file = SocketFile::at(path)?;
                // Why before it listens: nobody gets in who may not.
                if let Some(mode) = mode {
                    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
                }
                socket.listen(BACKLOG)?;
                Ok(Self { socket, file: Some(file) })
            }
        }
    }

    /// Takes over a socket that another process has bound. `is_ours`: its file, if it has one, is now to be removed by
    /// this process.
    pub fn adopt(socket: OwnedFd, is_ours: bool) -> io::Result<Self> {
        let socket = Socket::from(socket);
        if !socket.is_listener()? || socket.r#type()? != Type::STREAM {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a socket that listens for streams"));
        }
        socket.set_cloexec(true)?;
        let mut bound = Self { socket, file: None };
        match bound.address()? {
            Address::Tcp(_) => keep_alive(&bound.socket)?,
            Address::Unix(path) if is_ours => bound.file = SocketFile::at(&path).ok(),
            Address::Unix(_) => {}
        }
        Ok(bound)
    }

    /// Where it listens.
    pub fn address(&self) -> io::Result<Address> {
        let address = self.socket.local_addr()?;
        if let Some(address) = address.as_socket() {
            return Ok(Address::Tcp(address));
        }
        let path = address.as_pathname().map(Path::to_path_buf);
        path.map(Address::Unix).ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "the socket has no address"))
    }

    /// One more descriptor of it, to be passed on.
    pub fn share(&self) -> io::Result<OwnedFd> {
        Ok(self.socket.try_clone()?.into())
    }

    /// The file of a unix socket, to be removed in the end.
    pub fn take_file(&mut self) -> Option<SocketFile> {
        self.file.take()
    }

    pub(super) fn into_socket(self) -> Socket {
        self.socket
    }
}

/// The file of a unix socket that this process listens on. Dropping it removes it, if it is still the same.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl SocketFile {
    fn at(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), identity: identity(path)? })
    }

    /// Leaves it to who listens on it from now on.
    pub fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// Accepted sockets inherit it.
fn keep_alive(socket: &Socket) -> io::Result<()> {
    socket.set_tcp_keepalive(&keepalive())
}

/// How connections find out that their peer's machine is gone.
pub(super) fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new().with_time(KEEPALIVE_AFTER).with_interval(KEEPALIVE_INTERVAL)
}

fn bind_unix(path: &Path) -> io::Result<Socket> {
    let address = SockAddr::unix(path)?;
    let bind = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.bind(&address).map(|()| socket)
    };
    match bind() {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_abandoned(path) => {
            fs::remove_file(path)?;
            bind()
        }
        bound => bound,
    }
}

/// Whether a dead server left it behind. Why the kind of file counts: what is no socket refuses connections, too.
fn is_abandoned(path: &Path) -> bool {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    let refuses = || UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    is_socket && refuses()
}

/// All interfaces: `[::]`, which also takes IPv4, or `0.0.0.0` on a machine without IPv6.
pub fn any_interface(port: u16) -> SocketAddr {
    match Socket::new(Domain::IPV6, Type::STREAM, None) {
        Ok(_) if Path::new("/proc/net/if_inet6").exists() => (Ipv6Addr::UNSPECIFIED, port).into(),
        _ => (Ipv4Addr::UNSPECIFIED, port).into(),
    }
}

/// A descriptor that the service manager has passed to this process, and its name.
#[derive(Debug)]
pub struct Passed {
    pub name: String,
    pub socket: OwnedFd,
}

/// What the service manager has passed, by `variable` (the environment). Source: sd_listen_fds(3).
///
/// # Safety
///
/// The descriptors are owned by what is returned: nobody else may use them, so call it once, and before anything else
/// opens files.
unsafe fn passed(variable: impl Fn(&str) -> Option<String>) -> Vec<Passed> {
    let number = |name: &str| variable(name).and_then(|value| value.parse::<i32>().ok());
    if number("LISTEN_PID") != i32::try_from(std::process::id()).ok() {
        return Vec::new();
    }
    let count = number("LISTEN_FDS").unwrap_or(0).clamp(0, PASSED_MAX);
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    (PASSED_FROM..PASSED_FROM + count)
        .map(|number| {
            // SAFETY: the service manager has opened it for this process (LISTEN_PID), and the caller takes them once.
            let socket = unsafe { OwnedFd::from_raw_fd(number) };
            // SAFETY: `socket` is open during the call, which changes only its flags.
            unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
            Passed { name: names.next().unwrap_or_default().to_owned(), socket }
        })
        .collect()
}

/// What the service manager has passed to this process, with `LISTEN_FDS`. The first call gets it, further ones nothing.
pub fn take_passed() -> Vec<Passed> {
    static TAKEN: std::sync::Once = std::sync::Once::new();
    let mut all = Vec::new();
    TAKEN.call_once(|| {
        // SAFETY: `Once` sees to it that there is one call, and nothing else in the process refers to these numbers: what
        // the process itself opens gets others, as these were open before it began.
        all = unsafe { passed(|name| std::env::var(name).ok()) };
    });
    all
}

/// An address of this machine that takes no connection and does not refuse any, for as long as what is returned is held: a
/// listener whose backlog is full.
#[cfg(test)]
pub fn silent() -> (SocketAddr, Vec<Socket>) {
    let socket = || Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).expect("a socket");
    let listener = socket();
    listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a free port");
    listener.listen(0).expect("it is bound");
    let address = listener.local_addr().expect("it is bound");
    let mut held = vec![listener];
    for _ in 0..4 {
        let filler = socket();
        filler.set_nonblocking(true).expect("a socket");
        // It says that it is under way, and that for ever.
        let _ = filler.connect(&address);
        held.push(filler);
    }
    (address.as_socket().expect("an address"), held)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: nothing is taken that was meant for another process or is no number. Method: environments without
    /// descriptors that count.
    #[test]
    fn nothing_is_taken_from_others() {
        let own = std::process::id().to_string();
        for (pid, count) in [("1", "2"), ("", "1"), (&own, "0"), (&own, "-3"), (&own, "many")] {
            let variable = |name: &str| match name {
                "LISTEN_PID" => Some(pid.to_owned()),
                "LISTEN_FDS" => Some(count.to_owned()),
                _ => None,
            };
            // SAFETY: none of these environments names a descriptor of this process.
            assert!(unsafe { passed(variable) }.is_empty(), "{pid} {count}");
        }
    }

    /// Goal: a socket serves where it was asked to. Method: ports given and free, other hosts, paths, both kinds.
    #[test]
    fn addresses_admit_what_they_ask_for() {
        let tcp = |text: &str| Address::Tcp(text.parse().expect("an address"));
        let unix = |path: &str| Address::Unix(path.into());
        assert!(tcp("127.0.0.1:0").admits(&tcp("127.0.0.1:9092")));
        assert!(tcp("127.0.0.1:9092").admits(&tcp("127.0.0.1:9092")));
        assert!(!tcp("127.0.0.1:9092").admits(&tcp("127.0.0.1:9093")));
        assert!(!tcp("127.0.0.2:0").admits(&tcp("127.0.0.1:9092")));
        assert!(unix("/run/a").admits(&unix("/run/a")) && !unix("/run/a").admits(&unix("/run/b")));
        assert!(!unix("/run/a").admits(&tcp("127.0.0.1:1")) && !tcp("127.0.0.1:0").admits(&unix("/run/a")));
    }

    /// Goal: only a socket that nobody listens on is replaced; its file is removed in the end, another's is not; the mode
    /// is as asked for. Method: a fresh path, one in use, an abandoned one, and one that is a document.
    #[test]
    fn files_of_unix_sockets() {
        let scratch = tempfile::tempdir().expect("a scratch directory");
        let path = scratch.path().join("socket");
        let address = Address::Unix(path.clone());
        let first = Bound::bind(&address, Some(0o600)).expect("binds");
        assert_eq!(fs::metadata(&path).expect("is there").mode() & 0o777, 0o600);
        assert_eq!(first.address().expect("has one"), address);
        assert_eq!(Bound::bind(&address, None).expect_err("in use").kind(), io::ErrorKind::AddrInUse);
        let Bound { socket, file } = first;
        drop(socket);
        let old_file = file.expect("it has a file");
        let mut second = Bound::bind(&address, None).expect("replaces");
        // Why it is there: file systems give an inode's number again at once, so this one may be the same.
        old_file.leave();
        assert!(path.exists());
        drop(second.take_file());
        assert!(!path.exists());
        fs::write(&path, "a document").expect("writes");
        assert_eq!(Bound::bind(&address, None).expect_err("no socket").kind(), io::ErrorKind::AddrInUse);
        assert_eq!(fs::read_to_string(&path).expect("is there"), "a document");
    }

    /// Goal: what does not listen is not adopted. Method: a connected pair, and a listener by its second descriptor.
    #[test]
    fn only_listeners_are_adopted() {
        let (one, _other) = UnixStream::pair().expect("a pair");
        assert!(Bound::adopt(one.into(), true).is_err());
        let bound = Bound::bind(&Address::Tcp(([127, 0, 0, 1], 0).into()), None).expect("binds");
        let adopted = Bound::adopt(bound.share().expect("one more"), true).expect("listens");
        assert_eq!(adopted.address().expect("bound"), bound.address().expect("bound"));
    }
}
