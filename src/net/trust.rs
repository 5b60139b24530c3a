//! Who may call, and whose blobs a call is about, where trusted servers call for their tenants: a shared secret, a storage
//! prefix, a backend and its bucket, as metadata of each call. What is missing, doubled or not known refuses the call:
//! guessed, it would read or write what is another tenant's.
//!
//! Source: the fork of bazel-remote, `server/grpc_storage_prefix.go` and `grpc_s3_backend.go`. Health and capabilities are
//! exempt, so that probes need no tenant.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use http::header::{HeaderMap, HeaderName};

use crate::limits::TRUST_LOG_MS;
use crate::metrics::{Counter, Metric, Snapshot};
use crate::pure::scope::{Scope, Selection, is_valid_prefix};
use crate::pure::secret::Secret;
use crate::rt;
use crate::service::status::ErrorInfo;
use crate::service::{Code, Status};

const SECRET: HeaderName = HeaderName::from_static("x-blacksmith-cache-auth");
const PREFIX: HeaderName = HeaderName::from_static("x-blacksmith-storage-prefix");
const ENDPOINT: HeaderName = HeaderName::from_static("x-blacksmith-s3-endpoint");
const BUCKET: HeaderName = HeaderName::from_static("x-blacksmith-s3-bucket");
/// Marks refusals that a caller may take for misses.
const DOMAIN: &str = "cache.blacksmith.sh";
const EXEMPT: [&str; 2] = ["/grpc.health.v1.Health/", "/build.bazel.remote.execution.v2.Capabilities/"];

/// What calls must say. `Send`: every core gets a clone.
#[derive(Clone)]
pub struct TrustSettings {
    /// `None`: whoever reaches the port is trusted.
    pub secret: Option<Secret>,
    /// The backends of a map, each with its buckets, in the order of the settings; empty where there is no map.
    pub backends: Arc<[(Arc<str>, Vec<String>)]>,
    pub log: TrustLog,
}

/// The door of one core.
pub struct Trust {
    secret: Option<Secret>,
    backends: HashMap<Arc<str>, (u16, Vec<String>)>,
    log: TrustLog,
    refused: [Counter; CAUSES.len()],
}

/// When each cause was last logged: one log for all cores.
#[derive(Clone)]
pub struct TrustLog(Arc<Told>);

struct Told {
    epoch: Instant,
    /// Milliseconds since the epoch, plus one; 0 for never.
    at_ms: [AtomicU64; CAUSES.len()],
}

/// What is wrong with a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Missing,
    Duplicate,
    /// Mismatch, invalid, or not in the map.
    Value,
}

/// Why a call is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    Secret(Wrong),
    Prefix(Wrong),
    Endpoint(Wrong),
    Bucket(Wrong),
}

/// Every cause: the metric that counts it, and its label there.
const CAUSES: [(Cause, Metric, &str); 12] = [
    (Cause::Secret(Wrong::Missing), Metric::AuthSecretRejected, "missing"),
    (Cause::Secret(Wrong::Duplicate), Metric::AuthSecretRejected, "duplicate"),
    (Cause::Secret(Wrong::Value), Metric::AuthSecretRejected, "mismatch"),
    (Cause::Prefix(Wrong::Missing), Metric::StoragePrefixRejected, "missing"),
    (Cause::Prefix(Wrong::Duplicate), Metric::StoragePrefixRejected, "duplicate"),
    (Cause::Prefix(Wrong::Value), Metric::StoragePrefixRejected, "invalid"),
    (Cause::Endpoint(Wrong::Missing), Metric::S3SelectorRejected, "missing"),
    (Cause::Endpoint(Wrong::Duplicate), Metric::S3SelectorRejected, "duplicate"),
    (Cause::Endpoint(Wrong::Value), Metric::S3SelectorRejected, "unknown"),
    (Cause::Bucket(Wrong::Missing), Metric::S3SelectorRejected, "bucket_missing"),
    (Cause::Bucket(Wrong::Duplicate), Metric::S3SelectorRejected, "bucket_duplicate"),
    (Cause::Bucket(Wrong::Value), Metric::S3SelectorRejected, "bucket_unknown"),
];

impl Cause {
    fn number(self) -> usize {
        CAUSES.iter().position(|(cause, ..)| *cause == self).expect("every cause is listed")
    }

    /// What a caller is told. Of a secret not what is wrong with it.
    fn status(self) -> Status {
        let (_, _, cause) = CAUSES[self.number()];
        let (name, reason) = match self {
            Self::Secret(_) => {
                return Status::new(Code::Unauthenticated, format!("missing or invalid {SECRET} metadata"));
            }
            Self::Prefix(_) => (PREFIX, "STORAGE_PREFIX_REJECTED"),
            Self::Endpoint(_) => (ENDPOINT, "S3_BACKEND_SELECTOR_REJECTED"),
            Self::Bucket(_) => (BUCKET, "S3_BACKEND_SELECTOR_REJECTED"),
        };
        let text = format!("{name}: {} metadata", cause.trim_start_matches("bucket_"));
        Status { info: Some(ErrorInfo { domain: DOMAIN, reason, cause }), ..Status::invalid(text) }
    }
}

impl Trust {
    pub fn new(settings: TrustSettings) -> Self {
        let TrustSettings { secret, backends, log } = settings;
        let backends = backends.iter().enumerate();
        let backends = backends.map(|(at, (name, buckets))| (name.clone(), (at as u16, buckets.clone()))).collect();
        Self { secret, backends, log, refused: Default::default() }
    }

    /// The scope of a call; `None` for those that need none. Counts and logs what it refuses.
    pub fn admit(&self, path: &str, headers: &HeaderMap) -> Result<Option<Scope>, Status> {
        if EXEMPT.iter().any(|service| path.starts_with(service)) {
            return Ok(None);
        }
        self.scope(headers).map(Some).map_err(|cause| {
            let number = cause.number();
            self.refused[number].count();
            if self.log.is_due(number) {
                let (_, metric, label) = CAUSES[number];
                tracing::warn!(
                    "call of {path} refused: {cause:?}; counted as {}{{reason={label:?}}}, and for a while not logged",
                    crate::metrics::table::row(metric).name,
                );
            }
            cause.status()
        })
    }

    fn scope(&self, headers: &HeaderMap) -> Result<Scope, Cause> {
        if let Some(secret) = &self.secret {
            let given = single(headers, &SECRET).map_err(Cause::Secret)?;
            if !secret.is(given) {
                return Err(Cause::Secret(Wrong::Value));
            }
        }
        self.place(headers)
    }

    /// The scope of a blob or result that an administrator names by its hash. No secret: his role says who he is.
    pub fn named(&self, headers: &HeaderMap) -> Result<Scope, Status> {
        if is_unplaced(headers) { Ok(Scope::default()) } else { self.place(headers).map_err(Cause::status) }
    }

    fn place(&self, headers: &HeaderMap) -> Result<Scope, Cause> {
        let prefix = single(headers, &PREFIX).map_err(Cause::Prefix)?;
        if !is_valid_prefix(prefix) {
            return Err(Cause::Prefix(Wrong::Value));
        }
        if self.backends.is_empty() {
            return Ok(Scope::new(None, Some(prefix)));
        }
        let name = single(headers, &ENDPOINT).map_err(Cause::Endpoint)?;
        let (backend, buckets) = self.backends.get(name).ok_or(Cause::Endpoint(Wrong::Value))?;
        let name = single(headers, &BUCKET).map_err(Cause::Bucket)?;
        let bucket = buckets.iter().position(|known| known == name).ok_or(Cause::Bucket(Wrong::Value))?;
        let bucket = u16::try_from(bucket).map_err(|_| Cause::Bucket(Wrong::Value))?;
        Ok(Scope::new(Some(Selection { backend: *backend, bucket }), Some(prefix)))
    }

    /// Adds what was refused.
    pub fn report(&self, into: &mut Snapshot) {
        for ((_, metric, label), count) in CAUSES.iter().zip(&self.refused) {
            into.add_for(*metric, [*label], count);
        }
    }
}

/// Whether a request says nothing of where its blobs belong.
pub fn is_unplaced(headers: &HeaderMap) -> bool {
    [PREFIX, ENDPOINT, BUCKET].iter().all(|name| !headers.contains_key(name))
}

/// The one value of a header.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a str, Wrong> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().ok_or(Wrong::Missing)?;
    if values.next().is_some() {
        return Err(Wrong::Duplicate);
    }
    value.to_str().map_err(|_| Wrong::Value)
}

impl Default for TrustLog {
    fn default() -> Self {
        Self(Arc::new(Told { epoch: rt::time::now(), at_ms: Default::default() }))
    }
}

impl TrustLog {
    fn is_due(&self, number: usize) -> bool {
        self.takes(number, (rt::time::now() - self.0.epoch).as_millis() as u64)
    }

    fn takes(&self, number: usize, now_ms: u64) -> bool {
        let next = |at: u64| (at == 0 || now_ms + 1 >= at + TRUST_LOG_MS).then_some(now_ms + 1);
        self.0.at_ms[number].fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn trust(secret: Option<&str>, backends: &[(&str, &[&str])]) -> Trust {
        let backend = |(name, buckets): &(&str, &[&str])| {
            (Arc::from(*name), buckets.iter().map(|name| (*name).to_owned()).collect())
        };
        let secret = secret.map(Secret::new);
        Trust::new(TrustSettings { secret, backends: backends.iter().map(backend).collect(), log: TrustLog::default() })
    }

    fn headers(values: &[(&HeaderName, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in values {
            headers.append(*name, HeaderValue::from_str(value).expect("a value"));
        }
        headers
    }

    const CALL: &str = "/google.bytestream.ByteStream/Read";
    const MAP: [(&str, &[&str]); 2] = [("http://a:1", &["own", "other"]), ("http://b:2", &["own"])];

    /// Goal: a call that says all it must has the scope that it names. Method: calls with a map, without one, and with no
    /// secret.
    #[test]
    fn scopes() {
        let of = |trust: &Trust, values: &[(&HeaderName, &str)]| trust.admit(CALL, &headers(values)).ok().flatten();
        let said: [(&HeaderName, &str); 4] =
            [(&SECRET, "hush"), (&PREFIX, "t/1/"), (&ENDPOINT, "http://a:1"), (&BUCKET, "other")];
        let selection = Some(Selection { backend: 0, bucket: 1 });
        assert_eq!(of(&trust(Some("hush"), &MAP), &said), Some(Scope::new(selection, Some("t/1/"))));
        assert_eq!(of(&trust(None, &MAP), &said[1..]), Some(Scope::new(selection, Some("t/1/"))));
        // Without a map nobody looks at what is selected.
        assert_eq!(of(&trust(None, &[]), &said), Some(Scope::new(None, Some("t/1/"))));
    }

    /// Goal: each thing that is missing, doubled or wrong refuses the call with its code, its mark and its counter; probes
    /// pass. Method: a good call, changed in one place at a time.
    #[test]
    fn refusals() {
        let trust = trust(Some("hush"), &MAP);
        let good: [(&HeaderName, &str); 4] =
            [(&SECRET, "hush"), (&PREFIX, "t/1/"), (&ENDPOINT, "http://b:2"), (&BUCKET, "own")];
        let wrong = [("hush2", "mismatch"), ("/t", "invalid"), ("http://b:2/", "unknown"), ("other", "bucket_unknown")];
        for (place, (value, cause)) in wrong.into_iter().enumerate() {
            let prefix = if place == 3 { "bucket_" } else { "" };
            let without = [&good[..place], &good[place + 1..]].concat();
            let mut changed = good;
            changed[place].1 = value;
            let cases = [
                (without, format!("{prefix}missing")),
                ([&good[..], &good[place..=place]].concat(), format!("{prefix}duplicate")),
                (changed.to_vec(), cause.to_owned()),
            ];
            for (values, cause) in cases {
                let status = trust.admit(CALL, &headers(&values)).expect_err("it is not let in");
                assert!(!status.message.contains("hush"), "{status}");
                if place == 0 {
                    assert_eq!((status.code, status.info), (Code::Unauthenticated, None), "{cause}");
                    continue;
                }
                let reason = if place == 1 { "STORAGE_PREFIX_REJECTED" } else { "S3_BACKEND_SELECTOR_REJECTED" };
                let info = status.info.expect("it is marked");
                assert_eq!((status.code, info.domain, info.reason), (Code::InvalidArgument, DOMAIN, reason));
                assert_eq!(info.cause, cause);
            }
        }
        assert!(trust.refused.iter().all(|count| count.get() == 1));
        for path in ["/grpc.health.v1.Health/Check", "/build.bazel.remote.execution.v2.Capabilities/GetCapabilities"] {
            assert_eq!(trust.admit(path, &HeaderMap::new()), Ok(None));
        }
        assert!(trust.admit("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", &HeaderMap::new()).is_err());
    }

    /// Goal: an administrator names a tenant's blob as its tenant does, but for the secret; half a name is refused, and none is
    /// what has no prefix. Method: a name, without each part; with a map and without one.
    #[test]
    fn names_of_administrators() {
        let trust_of = |map: &[(&str, &[&str])]| trust(Some("hush"), map);
        let said: [(&HeaderName, &str); 3] = [(&PREFIX, "t/1/"), (&ENDPOINT, "http://a:1"), (&BUCKET, "own")];
        let whole = Scope::new(Some(Selection { backend: 0, bucket: 0 }), Some("t/1/"));
        let (mapped, plain) = (trust_of(&MAP), trust_of(&[]));
        assert_eq!(mapped.named(&headers(&said)), Ok(whole));
        assert_eq!(plain.named(&headers(&said[..1])), Ok(Scope::new(None, Some("t/1/"))));
        assert_eq!(mapped.named(&HeaderMap::new()), Ok(Scope::default()));
        for left_out in 0..3 {
            let rest = [&said[..left_out], &said[left_out + 1..]].concat();
            let status = mapped.named(&headers(&rest)).expect_err("half a name");
            assert_eq!(status.code, Code::InvalidArgument, "{left_out}");
        }
        assert!(plain.named(&headers(&said[1..])).is_err() && plain.named(&headers(&[(&PREFIX, "../x")])).is_err());
    }

    /// Goal: each cause is logged once in a while. Method: times as arguments.
    #[test]
    fn logs_seldom() {
        let log = TrustLog::default();
        let lines: Vec<u64> = (0..4 * TRUST_LOG_MS).filter(|&now| log.takes(3, now)).collect();
        assert_eq!(lines, [0, TRUST_LOG_MS, 2 * TRUST_LOG_MS, 3 * TRUST_LOG_MS]);
        assert!(log.takes(4, 5));
    }
}
