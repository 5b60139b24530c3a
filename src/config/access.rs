//! Who is let in: TLS, passwords, tokens, roles.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::access::AccessFiles;
use crate::net::tls::TlsFiles;

/// The flags of TLS and access control; names and meanings are bazel-remote's where it has one.
#[derive(Args, Debug)]
#[command(rename_all = "snake_case", next_help_heading = "TLS and access")]
pub struct AccessFlags {
    /// The server's certificate and those between it and its authority, in PEM. With it both gRPC and HTTP are encrypted.
    #[arg(long)]
    tls_cert_file: Option<PathBuf>,
    /// The key of that certificate, in PEM.
    #[arg(long)]
    tls_key_file: Option<PathBuf>,
    /// Authorities that sign certificates of clients, in PEM. A client with such a certificate needs no other credential.
    #[arg(long)]
    tls_ca_file: Option<PathBuf>,
    /// The oldest TLS that is spoken: 1.2 or 1.3.
    #[arg(long, default_value = "1.2")]
    min_tls_version: TlsVersion,
    /// Users and passwords as htpasswd writes them: bcrypt, SHA-1 or MD5.
    #[arg(long)]
    htpasswd_file: Option<PathBuf>,
    /// Bearer tokens: `role token` lines, the token as it is or as sha256:<hex>.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// Roles of users and certificates: `read: names`, `write: names`, `admin: names` lines. Who is not named has write.
    #[arg(long)]
    roles_file: Option<PathBuf>,
    /// Let everybody read; only writes need a credential.
    #[arg(long)]
    allow_unauthenticated_reads: bool,
    /// Without access control: let everybody who reaches the HTTP port purge.
    #[arg(long)]
    allow_unauthenticated_purges: bool,
}

/// `--min_tls_version`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsVersion {
    /// Means 1.2.
    #[value(name = "1.0", hide = true)]
    Tls10,
    /// Means 1.2.
    #[value(name = "1.1", hide = true)]
    Tls11,
    #[value(name = "1.2")]
    Tls12,
    #[value(name = "1.3")]
    Tls13,
}

/// Settings that do not go together.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    #[error("--tls_cert_file and --tls_key_file go together: give both, or neither")]
    HalfOfTls,
    #[error("--tls_ca_file needs --tls_cert_file and --tls_key_file: certificates of clients are a part of TLS")]
    AuthoritiesAlone,
    #[error(
        "--{0} says who may do less or more, and nobody is asked for a credential. Give --htpasswd_file, --token_file or --tls_ca_file"
    )]
    NobodyAsked(&'static str),
    #[error(
        "--allow_unauthenticated_purges is for servers without access control. Give those who purge the role admin \
         instead (--roles_file, --token_file)"
    )]
    PurgesGuarded,
}

impl AccessFlags {
    /// The files of TLS and of access control, and whether everybody may purge.
    pub fn resolve(self) -> Result<(Option<TlsFiles>, AccessFiles, bool), AccessError> {
        if matches!(self.min_tls_version, TlsVersion::Tls10 | TlsVersion::Tls11) {
            tracing::warn!("--min_tls_version: the oldest TLS that is spoken is 1.2");
        }
        let certificates = self.tls_ca_file.is_some();
        let tls = match (self.tls_cert_file, self.tls_key_file) {
            (Some(certificates), Some(key)) => Some(TlsFiles {
                certificates,
                key,
                authorities: self.tls_ca_file,
                only_tls13: self.min_tls_version == TlsVersion::Tls13,
            }),
            (None, None) if certificates => return Err(AccessError::AuthoritiesAlone),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => return Err(AccessError::HalfOfTls),
        };
        let access = AccessFiles {
            htpasswd: self.htpasswd_file,
            tokens: self.token_file,
            roles: self.roles_file,
            certificates,
            open_reads: self.allow_unauthenticated_reads,
        };
        if !access.is_guarded() {
            let alone = [(access.roles.is_some(), "roles_file"), (access.open_reads, "allow_unauthenticated_reads")];
            if let Some((_, flag)) = alone.iter().find(|(is_set, _)| *is_set) {
                return Err(AccessError::NobodyAsked(flag));
            }
        }
        if access.is_guarded() && self.allow_unauthenticated_purges {
            return Err(AccessError::PurgesGuarded);
        }
        Ok((tls, access, self.allow_unauthenticated_purges))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        access: AccessFlags,
    }

    /// Goal: what protects is complete or an error. Method: one command line for each rule.
    #[test]
    fn what_goes_together() {
        let resolve = |flags: &[&str]| {
            let line = Line::try_parse_from([&["ringcas"], flags].concat()).expect("flags");
            line.access.resolve().map(|(tls, access, _)| (tls.map(|tls| tls.only_tls13), access.is_guarded()))
        };
        let pair = ["--tls_cert_file=c", "--tls_key_file=k"];
        assert_eq!(resolve(&[]), Ok((None, false)));
        assert_eq!(resolve(&pair), Ok((Some(false), false)));
        assert_eq!(resolve(&[pair[0], pair[1], "--min_tls_version=1.3"]), Ok((Some(true), false)));
        assert_eq!(resolve(&[pair[0], pair[1], "--min_tls_version=1.0", "--tls_ca_file=a"]), Ok((Some(false), true)));
        assert_eq!(resolve(&["--htpasswd_file=h", "--allow_unauthenticated_reads"]), Ok((None, true)));
        assert_eq!(resolve(&["--token_file=t", "--roles_file=r"]), Ok((None, true)));
        assert_eq!(resolve(&pair[..1]), Err(AccessError::HalfOfTls));
        assert_eq!(resolve(&pair[1..]), Err(AccessError::HalfOfTls));
        assert_eq!(resolve(&["--tls_ca_file=a"]), Err(AccessError::AuthoritiesAlone));
        assert_eq!(resolve(&["--allow_unauthenticated_purges"]), Ok((None, false)));
        assert_eq!(resolve(&["--token_file=t", "--allow_unauthenticated_purges"]), Err(AccessError::PurgesGuarded));
        assert_eq!(resolve(&["--roles_file=r"]), Err(AccessError::NobodyAsked("roles_file")));
        assert_eq!(
            resolve(&[pair[0], pair[1], "--allow_unauthenticated_reads"]),
            Err(AccessError::NobodyAsked("allow_unauthenticated_reads"))
        );
    }
}
