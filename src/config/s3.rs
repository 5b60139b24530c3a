//! The settings of S3 backends: bazel-remote's `--s3.*` flags, and what stands for them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::backends::{self, Entry};
use super::values::{blob_len, bytes, duration, secret};
use super::{ConfigError, StorageMode};
use crate::backend::http::Target;
use crate::backend::settings::{
    BackendSettings, Bucket, CredentialSource, Dialect, ObjectFormat, RoleSource, Settings,
};
use crate::limits;
use crate::pure::ledger::BUCKET_LEN_MAX;
use crate::pure::secret::Secret;
use crate::pure::sigv4::Credentials;

/// Flags of the backend and of the traffic with it.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "S3 stores")]
pub struct S3Flags {
    /// The store's address: host[:port], or a URL.
    #[arg(long = "s3.endpoint")]
    pub(super) endpoint: Option<String>,
    /// The bucket. Giving one turns the backend on.
    #[arg(long = "s3.bucket")]
    pub(super) bucket: Option<String>,
    /// Where the bucket's name stands: in the host's name (dns), in the path, or as the store needs it.
    #[arg(long = "s3.bucket_lookup_type", default_value = "auto")]
    pub(super) bucket_lookup_type: BucketLookup,
    /// In front of every key.
    #[arg(long = "s3.prefix")]
    pub(super) prefix: Option<String>,
    /// How credentials are got. Default: the keys below, else AWS_ACCESS_KEY_ID, else the shared file, else a role.
    #[arg(long = "s3.auth_method")]
    pub(super) auth_method: Option<AuthMethod>,
    /// For access_key.
    #[arg(long = "s3.access_key_id")]
    pub(super) access_key_id: Option<String>,
    /// For access_key. Better in the environment or the configuration file: other users can see flags.
    #[arg(long = "s3.secret_access_key", value_parser = secret)]
    pub(super) secret_access_key: Option<Secret>,
    /// For access_key with temporary keys.
    #[arg(long = "s3.session_token", value_parser = secret)]
    pub(super) session_token: Option<Secret>,
    /// How requests are signed.
    #[arg(long = "s3.signature_type", default_value = "v4")]
    signature_type: SignatureType,
    /// For aws_credentials_file. Default: AWS_SHARED_CREDENTIALS_FILE, else ~/.aws/credentials.
    #[arg(long = "s3.aws_shared_credentials_file")]
    aws_shared_credentials_file: Option<PathBuf>,
    /// For aws_credentials_file. Default: AWS_PROFILE, else default.
    #[arg(long = "s3.aws_profile")]
    aws_profile: Option<String>,
    /// Speak HTTP, not HTTPS.
    #[arg(long = "s3.disable_ssl")]
    pub(super) disable_ssl: bool,
    /// For iam_role: another address of the instance metadata service.
    #[arg(long = "s3.iam_role_endpoint")]
    iam_role_endpoint: Option<String>,
    /// The bucket's region. Default: AWS_REGION, else us-east-1, until the store names another one.
    #[arg(long = "s3.region")]
    pub(super) region: Option<String>,
    /// Larger objects are uploaded in parts: 5M to 5G.
    #[arg(long = "s3.multipart_from", default_value = "5G", value_parser = bytes)]
    multipart_from: u64,
    /// Idle connections that are kept, over all cores.
    #[arg(long = "s3.max_idle_conns", default_value_t = 1024)]
    pub(super) max_idle_conns: usize,
    /// How old a connection may become, so that a change of addresses is seen; below zero for any age.
    #[arg(long = "s3.conn_recycle_interval", default_value = "5m", allow_hyphen_values = true)]
    pub(super) conn_recycle_interval: String,
    /// The longest read of an object, its body included.
    #[arg(long = "s3.read_timeout", default_value = "5m", value_parser = duration)]
    read_timeout: Duration,
    /// The longest upload of an object, all its tries included.
    #[arg(long = "s3.upload_timeout", default_value = "10m", value_parser = duration)]
    upload_timeout: Duration,
    /// How long FindMissingBlobs and the check of an action's result wait for the store, all that they ask together.
    #[arg(long = "s3.existence_timeout", default_value = "2s",
          value_parser = duration)]
    existence_timeout: Duration,
    /// Several stores: the map s3_proxy.backends of the configuration file, as JSON. (Why a secret: it has keys in it.)
    #[arg(long = "s3.backends", hide = true, value_parser = secret)]
    backends: Option<Secret>,
    /// Uploads to one store that wait or run; what does not fit is kept on disk for later. 0 for no uploads.
    /// [default: 1000000, or 100000 where there are several stores]
    #[arg(long = "max_queued_uploads", allow_hyphen_values = true)]
    max_queued_uploads: Option<i64>,
    /// Uploads to one store that run at a time. 0 for no uploads. [default: 100, or 25 where there are several stores]
    #[arg(long = "num_uploaders", allow_hyphen_values = true)]
    num_uploaders: Option<i64>,
    /// The largest blob that is fetched from the store, in bytes or such as 512M. Default: no limit.
    #[arg(long = "max_proxy_blob_size", default_value_t = i64::MAX as u64, hide_default_value = true,
          value_parser = blob_len)]
    max_proxy_blob_size: u64,
}

/// `--s3.bucket_lookup_type`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum BucketLookup {
    Auto,
    Dns,
    Path,
}

/// `--s3.auth_method`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
#[value(rename_all = "snake_case")]
pub enum AuthMethod {
    IamRole,
    AccessKey,
    AwsCredentialsFile,
}

/// `--s3.signature_type`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignatureType {
    /// Taken for `v4`.
    V2,
    V4,
    /// The same here: bodies are not signed in chunks, as their length is known.
    V4streaming,
    Anonymous,
}

/// A setting of a backend that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum S3Error {
    #[error("--s3.bucket {bucket:?} needs --s3.endpoint: the store's host[:port]")]
    NoEndpoint { bucket: String },
    #[error("--s3.endpoint {given:?} is no address of a store. Give host[:port], or a URL without a path")]
    Endpoint { given: String },
    #[error("--s3.bucket {given:?} is no name of a bucket: it has lower-case letters, digits, dots, hyphens")]
    Bucket { given: String },
    #[error("s3_proxy.backends: {problem}")]
    Backends { problem: String },
    #[error("s3_proxy.backends {key:?}: {problem}")]
    Backend { key: String, problem: String },
    #[error("s3_proxy.backends {key:?}: {source}")]
    InBackend { key: String, source: Box<S3Error> },
    #[error("--s3.bucket {given:?} is there twice: extra_buckets are others than the bucket")]
    SameBucket { given: String },
    #[error("--s3.bucket is not set, neither for this backend nor for all")]
    NoBucket,
    #[error("--s3.auth_method access_key needs --s3.access_key_id and --s3.secret_access_key")]
    NoKey,
    #[error("--s3.conn_recycle_interval {given:?}: {problem}")]
    Recycle { given: String, problem: String },
    #[error("--s3.multipart_from: {given} bytes is not between 5M and 5G")]
    MultipartFrom { given: u64 },
    #[error("--{name} {given} is too much; give at most {max}")]
    TooMuch { name: &'static str, given: i64, max: i64 },
}

/// The smallest part, and the largest object that one PUT can make, in bytes.
///
/// Source: AWS "Amazon S3 multipart upload limits".
const PART_LEN_MIN: u64 = 5 << 20;
const PUT_LEN_MAX: u64 = 5 << 30;
/// Queue entries that `--max_queued_uploads` may ask for: about 100 bytes of memory each.
const QUEUED_UPLOADS_MAX: i64 = 10_000_000;
const UPLOADERS_MAX: i64 = 10_000;

impl S3Flags {
    /// The backends; `None` when there is none. `variable` reads the environment, `cores` share the idle connections and
    /// the memory limit.
    pub fn resolve(
        self,
        mode: StorageMode,
        cores: usize,
        memory_limit: u64,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Settings>, ConfigError> {
        let map = self.backends.as_ref().map_or(Ok(Vec::new()), |text| backends::entries(text.reveal(), &self))?;
        let has_map = !map.is_empty();
        if !has_map && self.bucket.as_ref().is_none_or(String::is_empty) {
            return Ok(None);
        }
        let (max_queued, uploaders) = self.uploads(has_map)?;
        let backends: Arc<[BackendSettings]> = match has_map {
            false => Arc::new([self.backend("default", &[], cores, &variable)?]),
            true => {
                let made = map.iter().map(|Entry { key, flags, extra_buckets, .. }| {
                    let made = flags.backend(key, extra_buckets, cores, &variable);
                    made.map_err(|source| S3Error::InBackend { key: key.clone(), source: Box::new(source) })
                });
                made.collect::<Result<_, _>>()?
            }
        };
        Ok(Some(Settings {
            default_backend: map.iter().position(|entry| entry.is_default).unwrap_or(0),
            has_map,
            flights: flights(memory_limit / cores as u64, backends.len()),
            backends,
            format: match mode {
                StorageMode::Zstd => ObjectFormat::Casblob,
                StorageMode::Uncompressed => ObjectFormat::Raw,
            },
            max_proxy_blob_size: self.max_proxy_blob_size,
            max_queued_uploads: max_queued,
            num_uploaders: uploaders,
            read_timeout: self.read_timeout,
            upload_timeout: self.upload_timeout,
            existence_timeout: self.existence_timeout,
        }))
    }

    /// How many uploads wait and run. Either of them at 0 or below turns uploads off, as in bazel-remote.
    fn uploads(&self, has_map: bool) -> Result<(usize, u32), S3Error> {
        let (queued, uploaders) = if has_map { (100_000, 25) } else { (1_000_000, 100) };
        let bounded =
            |name, given: i64, max| if given > max { Err(S3Error::TooMuch { name, given, max }) } else { Ok(given) };
        let queued = bounded("max_queued_uploads", self.max_queued_uploads.unwrap_or(queued), QUEUED_UPLOADS_MAX)?;
        let uploaders = bounded("num_uploaders", self.num_uploaders.unwrap_or(uploaders), UPLOADERS_MAX)?;
        if queued <= 0 || uploaders <= 0 {
            return Ok((0, 0));
        }
        Ok((queued as usize, uploaders as u32))
    }

    /// One backend, with the bucket that these flags name and others.
    fn backend(
        &self,
        name: &str,
        extra_buckets: &[String],
        cores: usize,
        variable: &impl Fn(&str) -> Option<String>,
    ) -> Result<BackendSettings, S3Error> {
        let own = self.bucket.as_ref().filter(|bucket| !bucket.is_empty()).ok_or(S3Error::NoBucket)?;
        let names: Vec<&String> = std::iter::once(own).chain(extra_buckets).collect();
        if let Some((_, given)) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            return Err(S3Error::SameBucket { given: given.to_string() });
        }
        let buckets = names.iter().map(|name| self.bucket_of(name)).collect::<Result<Arc<[Bucket]>, _>>()?;
        let is_google = buckets[0].target.host.ends_with("googleapis.com");
        let prefix = self.prefix.as_deref().unwrap_or_default().trim_matches('/');
        Ok(BackendSettings {
            name: name.into(),
            region: self.region.clone().or_else(|| variable("AWS_REGION")).unwrap_or_default(),
            prefix: if prefix.is_empty() { String::new() } else { format!("{prefix}/") },
            credentials: self.credentials(variable)?,
            multipart_from: match self.multipart_from {
                bytes if (PART_LEN_MIN..=PUT_LEN_MAX).contains(&bytes) => bytes,
                given => return Err(S3Error::MultipartFrom { given }),
            },
            dialect: if is_google { Dialect::Google } else { Dialect::S3 },
            conn_recycle: recycle(&self.conn_recycle_interval)?,
            idle_conns_max: (self.max_idle_conns / cores / buckets.len()).max(1),
            buckets,
        })
    }

    fn bucket_of(&self, bucket: &str) -> Result<Bucket, S3Error> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        if bucket.is_empty() || bucket.len() > BUCKET_LEN_MAX || !bucket.chars().all(is_name) {
            return Err(S3Error::Bucket { given: bucket.to_owned() });
        }
        let Some(given) = self.endpoint.clone().filter(|endpoint| !endpoint.is_empty()) else {
            return Err(S3Error::NoEndpoint { bucket: bucket.to_owned() });
        };
        let mut target = endpoint(&given, self.disable_ssl).ok_or(S3Error::Endpoint { given })?;
        let in_path = match self.bucket_lookup_type {
            BucketLookup::Path => true,
            BucketLookup::Dns => false,
            BucketLookup::Auto => !wants_bucket_in_host(&target, bucket),
        };
        if !in_path {
            target.host = format!("{bucket}.{}", target.host);
        }
        Ok(Bucket { name: bucket.to_owned(), target, in_path })
    }

    fn credentials(&self, variable: &impl Fn(&str) -> Option<String>) -> Result<CredentialSource, S3Error> {
        if self.signature_type == SignatureType::Anonymous {
            return Ok(CredentialSource::Anonymous);
        }
        let keys = |id: Option<String>, secret: Option<Secret>, token: Option<Secret>| {
            let credentials = Credentials {
                access_key_id: id.filter(|id| !id.is_empty())?.into(),
                secret_access_key: secret.filter(|secret| !secret.reveal().is_empty())?,
                session_token: token.filter(|token| !token.reveal().is_empty()),
            };
            Some(CredentialSource::Static(credentials))
        };
        let given = || keys(self.access_key_id.clone(), self.secret_access_key.clone(), self.session_token.clone());
        let named = || {
            let secret = |name: &str| variable(name).map(Secret::new);
            keys(variable("AWS_ACCESS_KEY_ID"), secret("AWS_SECRET_ACCESS_KEY"), secret("AWS_SESSION_TOKEN"))
        };
        match self.auth_method {
            Some(AuthMethod::AccessKey) => given().ok_or(S3Error::NoKey),
            Some(AuthMethod::AwsCredentialsFile) => Ok(self.file(variable)),
            Some(AuthMethod::IamRole) => Ok(self.role(variable)),
            None => Ok(given().or_else(named).unwrap_or_else(|| match self.file(variable) {
                CredentialSource::File { path, profile } if path.exists() => CredentialSource::File { path, profile },
                _ => self.role(variable),
            })),
        }
    }

    fn file(&self, variable: &impl Fn(&str) -> Option<String>) -> CredentialSource {
        let in_home = || PathBuf::from(variable("HOME").unwrap_or_default()).join(".aws").join("credentials");
        let path = self.aws_shared_credentials_file.clone();
        let path = path.or_else(|| variable("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from));
        let profile = self.aws_profile.clone().or_else(|| variable("AWS_PROFILE"));
        CredentialSource::File {
            path: path.unwrap_or_else(in_home),
            profile: profile.unwrap_or_else(|| "default".to_owned()),
        }
    }

    fn role(&self, variable: &impl Fn(&str) -> Option<String>) -> CredentialSource {
        CredentialSource::Role(RoleSource {
            web_identity_token_file: variable("AWS_WEB_IDENTITY_TOKEN_FILE").map(PathBuf::from),
            role_arn: variable("AWS_ROLE_ARN"),
            role_session_name: variable("AWS_ROLE_SESSION_NAME"),
            sts_endpoint: variable("AWS_ENDPOINT_URL_STS"),
            container_relative_uri: variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
            container_full_uri: variable("AWS_CONTAINER_CREDENTIALS_FULL_URI"),
            container_token: variable("AWS_CONTAINER_AUTHORIZATION_TOKEN").map(Secret::new),
            container_token_file: variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").map(PathBuf::from),
            metadata_endpoint: self.iam_role_endpoint.clone().filter(|endpoint| !endpoint.is_empty()),
        })
    }
}

/// How many objects of each backend a core may have on their way to it, with so many bytes of the memory limit. Why parts
/// of their own: what a sick backend holds, the others must not wait for.
fn flights(memory: u64, backends: usize) -> usize {
    let fit = memory / limits::FLIGHT_MEMORY_PART / limits::FLIGHT_HELD_LEN / backends as u64;
    let least = limits::FLIGHTS_RUNNING_MIN.div_ceil(backends);
    usize::try_from(fit).unwrap_or(usize::MAX).clamp(least, limits::FLIGHTS_RUNNING_MAX)
}

/// `host[:port]`, or a URL, whose scheme then decides about TLS.
fn endpoint(given: &str, disable_ssl: bool) -> Option<Target> {
    if given.contains("://") {
        let (target, path) = Target::parse(given)?;
        return (path == "/").then_some(target);
    }
    let (host, port) = Target::split_authority(given)?;
    let tls = !disable_ssl;
    Some(Target { host, port: port.unwrap_or(if tls { 443 } else { 80 }), tls })
}

/// Amazon, Google and Aliyun want the bucket in the host's name. A name with dots fits no wildcard certificate.
///
/// Source: minio-go, `isVirtualHostStyleRequest`.
fn wants_bucket_in_host(target: &Target, bucket: &str) -> bool {
    let known = ["amazonaws.com", "amazonaws.com.cn", "storage.googleapis.com", "aliyuncs.com"];
    let is_known = known.iter().any(|domain| target.host == *domain || target.host.ends_with(&format!(".{domain}")));
    is_known && !(target.tls && bucket.contains('.'))
}

/// 0 is the default of 5 minutes, as in the YAML of those who leave it out.
fn recycle(given: &str) -> Result<Option<Duration>, S3Error> {
    if given.starts_with('-') {
        return Ok(None);
    }
    let parsed = duration(given).map_err(|problem| S3Error::Recycle { given: given.to_owned(), problem })?;
    Ok(Some(if parsed.is_zero() { Duration::from_secs(300) } else { parsed }))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        s3: S3Flags,
    }

    fn resolve(args: &[&str], variables: &[(&str, &str)]) -> Result<Option<Settings>, ConfigError> {
        let only = Only::try_parse_from([&["x"], args].concat()).expect("flags that exist");
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
        only.s3.resolve(StorageMode::Zstd, 4, 1 << 30, find)
    }

    fn backend(args: &[&str], variables: &[(&str, &str)]) -> BackendSettings {
        let settings = resolve(args, variables).expect("valid flags").expect("a backend");
        settings.backends[0].clone()
    }

    /// Goal: no bucket is no backend, half a backend is an error that names the flag. Method: one example each.
    #[test]
    fn on_and_off() {
        assert!(resolve(&[], &[]).is_ok_and(|settings| settings.is_none()));
        assert!(resolve(&["--s3.endpoint=h"], &[]).is_ok_and(|settings| settings.is_none()));
        let text = |args: &[&str]| resolve(args, &[]).expect_err("it is incomplete").to_string();
        assert!(text(&["--s3.bucket=b"]).contains("--s3.endpoint"));
        assert!(text(&["--s3.bucket=b", "--s3.endpoint=h/x"]).contains("without a path"));
        assert!(text(&["--s3.bucket=b/c", "--s3.endpoint=h"]).contains("no name of a bucket"));
        assert!(text(&["--s3.bucket=b", "--s3.endpoint=h", "--s3.auth_method=access_key"]).contains("access_key_id"));
        let off = resolve(&["--s3.bucket=b", "--s3.endpoint=h", "--num_uploaders=-1"], &[]);
        assert_eq!(off.expect("valid").map(|settings| settings.num_uploaders), Some(0));
    }

    /// Goal: addresses become targets as minio-go makes them. Method: one example for each rule.
    #[test]
    fn addresses() {
        let target = |args: &[&str]| {
            let backend = backend(&[&["--s3.access_key_id=a", "--s3.secret_access_key=s"], args].concat(), &[]);
            (backend.buckets[0].target.authority(), backend.needs_tls(), backend.buckets[0].in_path)
        };
        let of = |text: &str, tls, in_path| (text.to_owned(), tls, in_path);
        let plain = ["--s3.bucket=b", "--s3.endpoint=127.0.0.1:9000", "--s3.disable_ssl"];
        assert_eq!(target(&plain), of("127.0.0.1:9000", false, true));
        assert_eq!(target(&["--s3.bucket=b", "--s3.endpoint=http://h:80"]), of("h", false, true));
        let aws = "--s3.endpoint=s3.eu-west-1.amazonaws.com";
        assert_eq!(target(&["--s3.bucket=b", aws]), of("b.s3.eu-west-1.amazonaws.com", true, false));
        assert_eq!(target(&["--s3.bucket=b.c", aws]), of("s3.eu-west-1.amazonaws.com", true, true));
        assert_eq!(
            target(&["--s3.bucket=b", "--s3.endpoint=h", "--s3.bucket_lookup_type=dns"]),
            of("b.h", true, false)
        );
        assert_eq!(backend(&["--s3.bucket=b", "--s3.endpoint=h", "--s3.prefix=/a/b/"], &[]).prefix, "a/b/");
    }

    /// Goal: credentials come from the first place that has some, and none is shown. Method: one example each.
    #[test]
    fn credentials() {
        let base = ["--s3.bucket=b", "--s3.endpoint=h"];
        let of = |args: &[&str], variables: &[(&str, &str)]| backend(&[&base, args].concat(), variables).credentials;
        let keys = ["--s3.access_key_id=ID", "--s3.secret_access_key=hush"];
        assert!(matches!(of(&keys, &[]), CredentialSource::Static(c) if &*c.access_key_id == "ID"));
        let named = [("AWS_ACCESS_KEY_ID", "E"), ("AWS_SECRET_ACCESS_KEY", "hush"), ("AWS_SESSION_TOKEN", "hush")];
        assert!(matches!(of(&[], &named), CredentialSource::Static(c) if c.session_token.is_some()));
        assert!(matches!(of(&["--s3.auth_method=iam_role"], &named), CredentialSource::Role(_)));
        let file = of(&["--s3.auth_method=aws_credentials_file"], &[("HOME", "/h"), ("AWS_PROFILE", "p")]);
        assert!(matches!(file, CredentialSource::File { path, profile }
            if path.ends_with(".aws/credentials") && profile == "p"));
        assert!(matches!(of(&["--s3.signature_type=anonymous"], &named), CredentialSource::Anonymous));
        let shown = format!("{:?} {:?}", of(&keys, &[]), of(&[], &named));
        assert!(!shown.contains("hush"), "{shown}");
    }
}
