//! TLS towards clients: rustls over whatever a connection is.

use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
pub use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::{self, RootCertStore, ServerConfig, SupportedProtocolVersion, version};

use super::accept::Kind;
use crate::access::{Origin, Peer};
use crate::kept::Source;
use crate::limits;
use crate::pure::certificate;
use crate::rt;

/// An encrypted connection.
pub type TlsStream<T> = tokio_rustls::server::TlsStream<T>;

/// The files, and what goes with them.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// `--tls_cert_file`: a chain in PEM, the server's own certificate first.
    pub certificates: PathBuf,
    /// `--tls_key_file`.
    pub key: PathBuf,
    /// `--tls_ca_file`: who signs certificates of clients.
    pub authorities: Option<PathBuf>,
    /// `--min_tls_version 1.3`.
    pub only_tls13: bool,
}

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{setting} {path}: {problem}. Give a file in PEM that this user may read")]
    File { setting: &'static str, path: PathBuf, problem: String },
    #[error(
        "--tls_cert_file {certificates} and --tls_key_file {key}: {problem}. Give the key that the certificate is for"
    )]
    Pair { certificates: PathBuf, key: PathBuf, problem: rustls::Error },
    #[error("--tls_ca_file {path}: {problem}. Give the certificates of authorities in PEM")]
    Authorities { path: PathBuf, problem: String },
    #[error("TLS cannot start: {0}")]
    Other(rustls::Error),
}

/// What handshakes are made with, by what is spoken behind them. Replaced as a whole when the files change.
pub struct Acceptors {
    grpc: TlsAcceptor,
    http: TlsAcceptor,
    both: TlsAcceptor,
    /// When the server's certificate ends to be valid, in seconds since 1970; 0 when it does not say.
    not_after_s: u64,
}

const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

impl Source for TlsFiles {
    const WHAT: &'static str = "certificates";
    type Value = Acceptors;
    type Error = TlsError;

    fn files(&self) -> Vec<&Path> {
        let files = [Some(&self.certificates), Some(&self.key), self.authorities.as_ref()];
        files.into_iter().flatten().map(PathBuf::as_path).collect()
    }

    fn read(&self) -> Result<Acceptors, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let versions: &[&'static SupportedProtocolVersion] =
            if self.only_tls13 { &[&version::TLS13] } else { &[&version::TLS13, &version::TLS12] };
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .map_err(TlsError::Other)?;
        let builder = match &self.authorities {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let wrong = |problem: String| TlsError::Authorities { path: path.clone(), problem };
                let mut roots = RootCertStore::empty();
                for authority in certificates("--tls_ca_file", path)? {
                    roots.add(authority).map_err(|error| wrong(error.to_string()))?;
                }
                // Why not demanded: who shows none may have another credential, and health needs none.
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                    .allow_unauthenticated()
                    .build()
                    .map_err(|error| wrong(error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let chain = certificates("--tls_cert_file", &self.certificates)?;
        let not_after_s = chain.first().and_then(|own| certificate::not_after(own)).unwrap_or_default();
        let key = PrivateKeyDer::from_pem_slice(&file("--tls_key_file", &self.key)?).map_err(|error| {
            TlsError::File { setting: "--tls_key_file", path: self.key.clone(), problem: error.to_string() }
        })?;
        let mut config = builder.with_single_cert(chain, key).map_err(|problem| TlsError::Pair {
            certificates: self.certificates.clone(),
            key: self.key.clone(),
            problem,
        })?;
        // Why tickets and no memory of sessions: a client may come back to another core. They end with this reading of the
        // files, so that a client whose authority was taken out shows its certificate again.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.ticketer = ring::Ticketer::new().map_err(TlsError::Other)?;
        let speaking = |protocols: &[&[u8]]| {
            let mut config = config.clone();
            config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
            TlsAcceptor::from(Arc::new(config))
        };
        // Why HTTP/1.1 first on a port for both: clients of gRPC offer nothing but HTTP/2, browsers and curl offer both, and
        // only HTTP/1.1 has what they come for.
        Ok(Acceptors {
            grpc: speaking(&[HTTP2]),
            http: speaking(&[HTTP1]),
            both: speaking(&[HTTP1, HTTP2]),
            not_after_s,
        })
    }
}

fn file(setting: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    rt::whole::given(path).map_err(|error| TlsError::File { setting, path: path.into(), problem: error.to_string() })
}

fn certificates(setting: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |problem: String| TlsError::File { setting, path: path.into(), problem };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&file(setting, path)?).collect();
    match found {
        Ok(found) if found.is_empty() => Err(wrong("there is no certificate in it".into())),
        found => found.map_err(|error| wrong(error.to_string())),
    }
}

impl Acceptors {
    pub(super) fn not_after_s(&self) -> u64 {
        self.not_after_s
    }

    pub(super) fn of(&self, kind: Kind) -> TlsAcceptor {
        match kind {
            Kind::Grpc => self.grpc.clone(),
            Kind::Http => self.http.clone(),
            Kind::Both => self.both.clone(),
        }
    }
}

/// The handshake. The caller has a deadline. Says who is at the other end.
pub(super) async fn handshake<T>(acceptor: TlsAcceptor, io: T, origin: Origin) -> io::Result<(TlsStream<T>, Peer)>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let limit = |session: &mut rustls::ServerConnection| session.set_buffer_limit(Some(limits::TLS_SEND_BUFFER_LEN));
    let stream = acceptor.accept_with(io, limit).await?;
    let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    let certificate = shown.map(|shown| Rc::from(certificate::name(shown).unwrap_or_default()));
    Ok((stream, Peer { origin, certificate }))
}
