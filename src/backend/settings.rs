//! What the configuration says of backends, checked and complete. `Send`: every core gets a clone.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::http::Target;
use crate::pure::ledger::Owed;
use crate::pure::scope::{Scope, Selection};
use crate::pure::secret::Secret;
use crate::pure::sigv4::Credentials;
use crate::pure::upload_queue::{ObjectKind, Upload};

/// All backends, and what they have in common.
#[derive(Debug, Clone)]
pub struct Settings {
    /// In a map each, or one without a map. The order is that of the configuration.
    pub backends: Arc<[BackendSettings]>,
    /// The one of requests that name none.
    pub default_backend: usize,
    /// The configuration has a map: requests name their backend.
    pub has_map: bool,
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
    /// Objects of one backend that come in on one core at a time.
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
    /// The first is that of requests which name none.
    pub buckets: Arc<[Bucket]>,
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
    /// Idle connections of one core to one bucket.
    pub idle_conns_max: usize,
}

impl BackendSettings {
    /// Whether it is reached by TLS.
    pub fn needs_tls(&self) -> bool {
        self.buckets.iter().any(|bucket| bucket.target.tls)
    }
}

/// One bucket of a backend.
#[derive(Debug, Clone)]
pub struct Bucket {
    pub name: String,
    /// With the bucket in its name where it is addressed so.
    pub target: Target,
    /// The bucket stands in the path, not in the host's name.
    pub in_path: bool,
}

/// What differs between stores that speak S3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// AWS, and those that follow it.
    S3,
    /// Google's XML API: its own headers and signature, no multipart.
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

    /// The backend and the bucket of a scope.
    pub fn place_of(&self, scope: &Scope) -> (usize, usize) {
        let place = scope.selection().map(|Selection { backend, bucket }| (usize::from(backend), usize::from(bucket)));
        place.unwrap_or((self.default_backend, 0))
    }

    /// The key of an object in its bucket, such as `<prefix>/cas.v2/<2 hex>/<hash>`.
    ///
    /// Source: bazel-remote `cache/s3proxy`. A scope's prefix takes the place of the backend's own.
    pub fn key(&self, name: &Upload) -> String {
        let is_raw = name.scope.is_raw();
        let directory = match (name.kind, self.format) {
            (ObjectKind::Action, _) if is_raw => "raw",
            (ObjectKind::Action, _) => "ac",
            (ObjectKind::Cas, ObjectFormat::Casblob) => "cas.v2",
            (ObjectKind::Cas, ObjectFormat::Raw) => "cas",
        };
        let hex = name.digest.hash.to_hex();
        let rest = format!("{directory}/{}/{hex}", &hex[..2]);
        match name.scope.prefix().filter(|_| !is_raw) {
            Some(prefix) => format!("{}/{rest}", prefix.strip_suffix('/').unwrap_or(prefix)),
            None => format!("{}{rest}", self.backends[self.place_of(&name.scope).0].prefix),
        }
    }

    /// An upload by names that outlive the settings.
    pub fn owed(&self, upload: &Upload) -> Owed {
        let (backend, bucket) = self.place_of(&upload.scope);
        let bucket = if bucket == 0 { "" } else { &*self.backends[backend].buckets[bucket].name };
        Owed {
            kind: upload.kind,
            digest: upload.digest,
            prefix: upload.scope.prefix().unwrap_or_default().into(),
            bucket: bucket.into(),
        }
    }

    /// What a backend's ledger names. `None` when the bucket is not there any more.
    pub fn upload(&self, backend: usize, owed: &Owed) -> Option<Upload> {
        let buckets = &self.backends[backend].buckets;
        let bucket = match &*owed.bucket {
            "" => 0,
            name => buckets.iter().position(|bucket| bucket.name == name)?,
        };
        let is_default = (backend, bucket) == (self.default_backend, 0);
        let selection = (!is_default).then_some(Selection { backend: backend as u16, bucket: bucket as u16 });
        let prefix = Some(&*owed.prefix).filter(|prefix| !prefix.is_empty());
        Some(Upload { kind: owed.kind, digest: owed.digest, scope: Scope::new(selection, prefix) })
    }
}

#[cfg(test)]
pub mod testing {
    use super::*;
    use crate::backend::http::Target;

    /// Backends of these names, each with two buckets, `own` and `other`. The first is the default one.
    pub fn settings(names: &[&str]) -> Settings {
        let target = Target { host: "127.0.0.1".into(), port: 9, tls: false };
        let bucket = |name: &str| Bucket { name: name.into(), target: target.clone(), in_path: true };
        let backend = |name: &&str| BackendSettings {
            name: (*name).into(),
            buckets: [bucket("own"), bucket("other")].into(),
            region: String::new(),
            prefix: format!("of-{name}/"),
            credentials: CredentialSource::Anonymous,
            dialect: Dialect::S3,
            multipart_from: 5 << 30,
            conn_recycle: None,
            idle_conns_max: 1,
        };
        Settings {
            backends: names.iter().map(backend).collect(),
            default_backend: 0,
            has_map: true,
            format: ObjectFormat::Casblob,
            max_proxy_blob_size: u64::MAX,
            max_queued_uploads: 10,
            num_uploaders: 1,
            flights: 4,
            read_timeout: Duration::from_secs(300),
            upload_timeout: Duration::from_secs(600),
            existence_timeout: Duration::from_secs(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pure::digest::{Digest, Hash};

    fn upload(selection: Option<Selection>, prefix: Option<&str>) -> Upload {
        let digest = Digest { hash: Hash([0xab; 32]), size: 7 };
        Upload { kind: ObjectKind::Cas, digest, scope: Scope::new(selection, prefix) }
    }

    /// Goal: a scope's prefix takes the place of its backend's; without one the backend's own counts. Method: keys of one
    /// hash in scopes of each kind.
    #[test]
    fn keys() {
        let settings = testing::settings(&["a", "b"]);
        let key = |selection, prefix| settings.key(&upload(selection, prefix));
        let rest = format!("cas.v2/ab/{}", "ab".repeat(32));
        let there = Some(Selection { backend: 1, bucket: 1 });
        assert_eq!(key(None, None), format!("of-a/{rest}"));
        assert_eq!(key(there, None), format!("of-b/{rest}"));
        assert_eq!(key(None, Some("t/1/")), format!("t/1/{rest}"));
        assert_eq!(key(there, Some("t/1")), format!("t/1/{rest}"));
        let raw = Upload { kind: ObjectKind::Action, scope: Scope::raw(), ..upload(None, None) };
        assert_eq!(settings.key(&raw), format!("of-a/raw/ab/{}", "ab".repeat(32)));
    }

    /// Goal: what is owed is found again by its names when backends have been added, and not when its bucket is gone.
    /// Method: uploads of each kind written with one map and read with others.
    #[test]
    fn owed_uploads_outlive_the_map() {
        let before = testing::settings(&["a", "b"]);
        let after = testing::settings(&["new", "a", "b"]);
        let at = |backend, bucket| Some(Selection { backend, bucket });
        for prefix in [None, Some("t/1/")] {
            for (old, own, new) in [(None, 0, at(1, 0)), (at(1, 0), 1, at(2, 0)), (at(1, 1), 1, at(2, 1))] {
                let owed = before.owed(&upload(old, prefix));
                assert_eq!(before.upload(own, &owed), Some(upload(old, prefix)));
                assert_eq!(after.upload(own + 1, &owed), Some(upload(new, prefix)));
            }
        }
        let raw = Upload { kind: ObjectKind::Action, scope: Scope::raw(), ..upload(None, None) };
        assert_eq!(before.upload(0, &before.owed(&raw)), Some(raw));
        let owed = Owed { bucket: "gone".into(), ..before.owed(&upload(None, None)) };
        assert_eq!(before.upload(0, &owed), None);
    }
}
