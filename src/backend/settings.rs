//! What the configuration says of backends, checked and complete. `Send`: every core gets a clone.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::http::Target;
use crate::pure::digest::Hash;
use crate::pure::secret::Secret;
use crate::pure::sigv4::Credentials;
use crate::pure::upload_queue::ObjectKind;

/// All backends, and what they have in common.
#[derive(Debug, Clone)]
pub struct Settings {
    pub backends: Arc<[BackendSettings]>,
    pub format: ObjectFormat,
    /// The largest blob that is fetched, in bytes.
    pub max_proxy_blob_size: u64,
    /// Uploads of one backend that wait or run at a time.
    pub max_queued_uploads: usize,
    /// Uploads of one backend that run at a time; 0 for none at all.
    pub num_uploaders: u32,
    /// Of a read, its body included.
    pub read_timeout: Duration,
    /// Of one upload, all its tries included.
    pub upload_timeout: Duration,
    /// Objects that come in on one core at a time.
    pub flights: usize,
    /// How long FindMissing and completeness checks wait.
    pub existence_timeout: Duration,
}

/// How CAS blobs stand in backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectFormat {
    /// bazel-remote's casblobs, under `cas.v2/`.
    Casblob,
    /// As they are, under `cas/`.
    Raw,
}

/// One backend.
#[derive(Debug, Clone)]
pub struct BackendSettings {
    /// The label of its metrics, and its name in logs.
    pub name: Arc<str>,
    /// With the bucket in its name where it is addressed so.
    pub target: Target,
    pub bucket: String,
    /// The bucket stands in the path, not in the host's name.
    pub bucket_in_path: bool,
    /// Empty for not known: learned from the first answer that names another one.
    pub region: String,
    /// In front of every key; empty, or ends with `/`.
    pub prefix: String,
    pub credentials: CredentialSource,
    pub dialect: Dialect,
    /// A larger object is uploaded in parts, in bytes: 5 MiB to 5 GiB.
    pub multipart_from: u64,
    /// `None` for never.
    pub conn_recycle: Option<Duration>,
    /// Idle connections of one core.
    pub idle_conns_max: usize,
}

/// What differs between stores that speak S3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// AWS, and those that follow it.
    S3,
    /// Google's XML API: its own header for conditional creation, no multipart.
    Google,
}

/// Where credentials come from.
#[derive(Debug, Clone)]
pub enum CredentialSource {
    /// Requests are not signed.
    Anonymous,
    Static(Credentials),
    /// An AWS shared credentials file.
    File {
        path: PathBuf,
        profile: String,
    },
    /// Web identity, container or instance role, whichever the environment offers.
    Role(RoleSource),
}

/// The variables that say how a role is taken on. Read once, at start.
#[derive(Debug, Clone, Default)]
pub struct RoleSource {
    pub web_identity_token_file: Option<PathBuf>,
    pub role_arn: Option<String>,
    pub role_session_name: Option<String>,
    /// `AWS_STS_REGIONAL_ENDPOINTS` and the like are not read: the endpoint is that of the region.
    pub sts_endpoint: Option<String>,
    pub container_relative_uri: Option<String>,
    pub container_full_uri: Option<String>,
    pub container_token: Option<Secret>,
    pub container_token_file: Option<PathBuf>,
    /// Instead of the instance metadata service.
    pub metadata_endpoint: Option<String>,
}

/// How long things may take that are asked of backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// See the fields of `Settings` with these names.
    pub read: Duration,
    pub upload: Duration,
    pub existence: Duration,
}

impl Settings {
    pub fn patience(&self) -> Patience {
        Patience { read: self.read_timeout, upload: self.upload_timeout, existence: self.existence_timeout }
    }

    /// The key of an object below a backend's prefix, such as `cas.v2/<2 hex>/<hash>`.
    ///
    /// Source: bazel-remote `cache/s3proxy`.
    pub fn key(&self, backend: &BackendSettings, kind: ObjectKind, hash: &Hash) -> String {
        let directory = match (kind, self.format) {
            (ObjectKind::Action, _) => "ac",
            (ObjectKind::Cas, ObjectFormat::Casblob) => "cas.v2",
            (ObjectKind::Cas, ObjectFormat::Raw) => "cas",
        };
        let hex = hash.to_hex();
        format!("{}{directory}/{}/{hex}", backend.prefix, &hex[..2])
    }
}
