//! Which sockets the server listens on: those that a service manager or a former process passes on, or its own.

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;

use crate::config::Config;
use crate::limits;
use crate::rt::listen::{Address, Bound, Passed, SocketFile};
use crate::rt::{self};

/// The names of sockets that are passed on.
const GRPC: &str = "grpc";
const HTTP: &str = "http";

/// Why the server has no sockets.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    #[error("{setting} {address}: {source}. {}", remedy(source.kind()))]
    Bind { setting: &'static str, address: Address, source: io::Error },
    #[error("socket {name:?}, which the service manager passed, cannot be used: {source}")]
    Passed { name: String, source: io::Error },
    #[error(
        "socket {name:?} at {address}, which the service manager passed, is not for this server: write \
         FileDescriptorName=grpc (or http) into the socket unit, or its address into --grpc_address (or --http_address)"
    )]
    Unexpected { name: String, address: String },
    #[error("the sockets cannot be shared: {0}")]
    Share(io::Error),
}

fn remedy(of: ErrorKind) -> &'static str {
    match of {
        ErrorKind::AddrInUse => "Free the address, or give another one",
        ErrorKind::AddrNotAvailable => "Give an address of this machine, or none in front of the port, for all of them",
        ErrorKind::NotFound => "Make the directory, or give another path",
        ErrorKind::PermissionDenied => {
            "Give another one, or the right to use it: ports below 1024 need CAP_NET_BIND_SERVICE"
        }
        _ => "Give another one",
    }
}

/// The sockets of the server.
pub struct Ports {
    /// Serves HTTP too when the same address was given for both.
    pub grpc: Option<Bound>,
    pub http: Option<Bound>,
    is_shared: bool,
}

/// Sockets that somebody else has bound.
pub struct Inherited {
    /// By the service manager. It decides where they listen.
    pub passed: Vec<Passed>,
    /// By the process that is taken over, with its names for them. They are used where they are what is asked for.
    pub taken: Vec<(String, OwnedFd)>,
}

impl Ports {
    /// Finds or binds what `config` asks for.
    pub fn open(config: &Config, inherited: Inherited) -> Result<Self, PortError> {
        let mode = config.lifecycle.unix_socket_mode;
        let mut passed = Vec::new();
        for Passed { name, socket } in inherited.passed {
            match Bound::adopt(socket, false) {
                Ok(bound) => passed.push((name, bound)),
                Err(source) => return Err(PortError::Passed { name, source }),
            }
        }
        let adopted =
            inherited.taken.into_iter().filter_map(|(name, socket)| Some((name, Bound::adopt(socket, true).ok()?)));
        let mut taken: Vec<(String, Bound)> = adopted.collect();
        let mut find = |name: &str, setting, address: &Address| {
            let is_at = |bound: &Bound| bound.address().is_ok_and(|bound| address.admits(&bound));
            let by_name = passed.iter().position(|(of, _)| of == name);
            if let Some(at) = by_name.or_else(|| passed.iter().position(|(_, bound)| is_at(bound))) {
                return Ok(passed.swap_remove(at).1);
            }
            if let Some(at) = taken.iter().position(|(of, bound)| of == name && is_at(bound)) {
                return Ok(taken.swap_remove(at).1);
            }
            bind(setting, address, mode)
        };
        let grpc = config.grpc_address.as_ref();
        let grpc = grpc.map(|address| find(GRPC, "--grpc_address", address)).transpose()?;
        let is_free = matches!(&config.grpc_address, Some(Address::Tcp(address)) if address.port() == 0);
        let is_shared = grpc.is_some() && config.http_address == config.grpc_address && !is_free;
        let http = config.http_address.as_ref().filter(|_| !is_shared);
        let http = http.map(|address| find(HTTP, "--http_address", address)).transpose()?;
        match passed.pop() {
            Some((name, bound)) => {
                let address =
                    bound.address().map_or_else(|_| "an unknown address".to_owned(), |found| found.to_string());
                Err(PortError::Unexpected { name, address })
            }
            None => Ok(Self { grpc, http, is_shared }),
        }
    }

    /// Whether one socket serves both protocols.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Copies for a later process, by name.
    pub fn share(&self) -> Result<Vec<(String, OwnedFd)>, PortError> {
        let named = [(GRPC, self.grpc.as_ref()), (HTTP, self.http.as_ref())];
        let shared = named.into_iter().filter_map(|(name, bound)| Some((name.to_owned(), bound?.share())));
        shared.map(|(name, socket)| Ok((name, socket.map_err(PortError::Share)?))).collect()
    }

    /// The files of unix sockets that are this process's to remove in the end.
    pub fn take_files(&mut self) -> Vec<SocketFile> {
        [&mut self.grpc, &mut self.http].into_iter().filter_map(|bound| bound.as_mut()?.take_file()).collect()
    }
}

/// Why it tries for a while: the kernel takes some milliseconds after the end of a process to close what its rings still
/// held, so the address of a server that was just stopped or killed may still be taken.
fn bind(setting: &'static str, address: &Address, mode: Option<u32>) -> Result<Bound, PortError> {
    let begun = rt::time::now();
    loop {
        match Bound::bind(address, mode) {
            Ok(bound) => return Ok(bound),
            Err(source) if source.kind() == ErrorKind::AddrInUse && begun.elapsed() < limits::BIND_TRY_TIME => {
                std::thread::sleep(limits::BIND_RETRY_TIME);
            }
            Err(source) => return Err(PortError::Bind { setting, address: address.clone(), source }),
        }
    }
}
