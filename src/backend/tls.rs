//! TLS towards backends: rustls over `rt`'s connections. Trust comes from the system's store, or from `SSL_CERT_FILE` and
//! `SSL_CERT_DIR`.

use std::io;
use std::sync::Arc;

use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::rt::tcp::TcpConn;

/// Whom we trust. Read once, before the cores start; `Send`.
#[derive(Clone)]
pub struct Trust(Arc<RootCertStore>);

/// An encrypted connection.
pub type TlsConn = TlsStream<TcpConn>;

/// Makes TLS connections. Core-local: its sessions are resumed by this core only.
pub struct Tls(TlsConnector);

/// There is nothing to trust.
#[derive(Debug, thiserror::Error)]
#[error(
    "no trusted certificate authority was found ({0}): install the system's certificates (package ca-certificates), \
     or set SSL_CERT_FILE"
)]
pub struct NoTrust(String);

impl Trust {
    /// The system's authorities. Blocks.
    pub fn of_system() -> Result<Self, NoTrust> {
        let found = rustls_native_certs::load_native_certs();
        let mut roots = RootCertStore::empty();
        let (added, _) = roots.add_parsable_certificates(found.certs);
        if added == 0 {
            let errors: Vec<String> = found.errors.iter().map(ToString::to_string).collect();
            return Err(NoTrust(errors.join("; ")));
        }
        Ok(Self(Arc::new(roots)))
    }
}

impl Tls {
    pub fn new(trust: &Trust) -> Self {
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring has cipher suites for TLS 1.2 and 1.3")
            .with_root_certificates(trust.0.clone())
            .with_no_client_auth();
        Self(TlsConnector::from(Arc::new(config)))
    }

    /// The handshake. The caller has a deadline.
    pub async fn connect(&self, host: &str, stream: TcpConn) -> io::Result<TlsConn> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        self.0.connect(name, stream).await
    }
}
