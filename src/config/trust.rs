//! Whether callers are trusted servers that name their tenants, as the fork of bazel-remote has it.

use clap::Args;

use super::values::secret;
use crate::pure::secret::Secret;

/// Flags of that.
#[derive(Args, Debug)]
#[command(next_help_heading = "Tenants")]
pub struct TrustFlags {
    /// Callers are trusted servers: every gRPC call, but health and capabilities, must carry one storage prefix as metadata
    /// x-blacksmith-storage-prefix, which its blobs are kept apart by, and the shared secret.
    #[arg(long = "trust_storage_prefix_header")]
    trust_storage_prefix_header: bool,
    /// The secret that trusted callers send as metadata x-blacksmith-cache-auth. Better in the environment or the
    /// configuration file: other users can see flags.
    #[arg(long = "l1_auth_secret", value_parser = secret)]
    l1_auth_secret: Option<Secret>,
    /// Trust whoever reaches the gRPC port, without a secret.
    #[arg(long = "l1_unsafe_no_auth_secret")]
    l1_unsafe_no_auth_secret: bool,
}

/// What trusted callers must know.
#[derive(Debug, Clone)]
pub struct TrustedCallers {
    /// `None`: nothing.
    pub secret: Option<Secret>,
}

/// A setting of trust that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error(
        "--trust_storage_prefix_header needs --l1_auth_secret: without it whoever reaches the port may name any tenant. \
         (--l1_unsafe_no_auth_secret allows that, for tests)"
    )]
    NoSecret,
    #[error(
        "s3_proxy.backends needs --trust_storage_prefix_header and --l1_auth_secret: a call without a trusted name would \
         be for a guessed backend"
    )]
    MapWithoutTrust,
}

impl TrustFlags {
    /// `None` when calls say nothing of tenants. `has_map`: there is a map of backends.
    pub fn resolve(self, has_map: bool) -> Result<Option<TrustedCallers>, TrustError> {
        if !self.trust_storage_prefix_header {
            return if has_map { Err(TrustError::MapWithoutTrust) } else { Ok(None) };
        }
        let secret = self.l1_auth_secret.filter(|secret| !secret.reveal().is_empty());
        if secret.is_none() && !self.l1_unsafe_no_auth_secret {
            return Err(TrustError::NoSecret);
        }
        Ok(Some(TrustedCallers { secret }))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        trust: TrustFlags,
    }

    /// Goal: no trust without a secret, unless somebody insists; no map without trust. Method: every combination.
    #[test]
    fn fails_closed() {
        let of = |args: &[&str], has_map| {
            let only = Only::try_parse_from([&["x"], args].concat()).expect("flags that exist");
            only.trust.resolve(has_map)
        };
        let (on, secret, unsafe_) =
            ("--trust_storage_prefix_header", "--l1_auth_secret=hush", "--l1_unsafe_no_auth_secret");
        for has_map in [false, true] {
            assert!(matches!(of(&[on], has_map), Err(TrustError::NoSecret)));
            assert!(matches!(of(&[on, "--l1_auth_secret="], has_map), Err(TrustError::NoSecret)));
            let trusted = of(&[on, secret], has_map).expect("valid").expect("on");
            assert!(trusted.secret.as_ref().is_some_and(|secret| secret.is("hush")));
            assert!(!format!("{trusted:?}").contains("hush"));
            assert!(of(&[on, unsafe_], has_map).is_ok_and(|on| on.is_some_and(|on| on.secret.is_none())));
            assert!(of(&[on, unsafe_, secret], has_map).is_ok_and(|on| on.is_some_and(|on| on.secret.is_some())));
        }
        assert!(of(&[secret], false).is_ok_and(|trust| trust.is_none()));
        assert!(matches!(of(&[secret], true), Err(TrustError::MapWithoutTrust)));
    }
}
