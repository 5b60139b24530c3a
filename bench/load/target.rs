//! Where the server is, and the sockets to it: plain, or encrypted where the authority of its certificate is given.

use std::io::{self, IoSlice};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// A server's address. Cheap to clone, and `Send`.
#[derive(Clone, Debug, Default)]
pub struct Target {
    /// host:port.
    pub address: Arc<str>,
    tls: Option<Tls>,
}

#[derive(Clone)]
struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TLS to {:?}", self.name)
    }
}

impl Target {
    /// `authorities`: a file in PEM with what signs the server's certificate; with one, connections are encrypted.
    pub fn new(address: &str, authorities: Option<&Path>) -> Result<Self, String> {
        let tls = authorities.map(|path| Tls::new(address, path)).transpose()?;
        Ok(Self { address: address.into(), tls })
    }

    pub async fn connect(&self) -> io::Result<Socket> {
        let tcp = TcpStream::connect(&*self.address).await?;
        tcp.set_nodelay(true)?;
        match &self.tls {
            None => Ok(Socket::Plain(tcp)),
            Some(Tls { connector, name }) => {
                Ok(Socket::Encrypted(Box::new(connector.connect(name.clone(), tcp).await?)))
            }
        }
    }
}

impl Tls {
    fn new(address: &str, authorities: &Path) -> Result<Self, String> {
        let wrong = |problem: String| format!("--tls-ca {}: {problem}", authorities.display());
        let mut roots = RootCertStore::empty();
        for authority in CertificateDer::pem_file_iter(authorities).map_err(|error| wrong(error.to_string()))? {
            let authority = authority.map_err(|error| wrong(error.to_string()))?;
            roots.add(authority).map_err(|error| wrong(error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(wrong("there is no certificate in it".to_owned()));
        }
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
        let name = ServerName::try_from(host.to_owned()).map_err(|error| format!("--address {address}: {error}"))?;
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("TLS cannot start: {error}"))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self { connector: Arc::new(config).into(), name })
    }
}

/// A connection to the server.
pub enum Socket {
    Plain(TcpStream),
    Encrypted(Box<TlsStream<TcpStream>>),
}

impl Socket {
    /// Makes its end a TCP reset.
    pub fn set_zero_linger(&self) -> io::Result<()> {
        match self {
            Self::Plain(tcp) => tcp.set_zero_linger(),
            Self::Encrypted(tls) => tls.get_ref().0.set_zero_linger(),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, out),
            Self::Encrypted(tls) => Pin::new(tls).poll_read(cx, out),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(cx, data),
            Self::Encrypted(tls) => Pin::new(tls).poll_write(cx, data),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write_vectored(cx, data),
            Self::Encrypted(tls) => Pin::new(tls).poll_write_vectored(cx, data),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Encrypted(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Encrypted(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}
