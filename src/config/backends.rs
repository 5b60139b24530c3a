//! `s3_proxy.backends`: several backends, each named by what requests name it with. What an entry leaves out is that of
//! `s3_proxy` itself.
//!
//! Source: the fork of bazel-remote, `config/s3.go`.

use clap::ValueEnum as _;

use super::s3::{AuthMethod, BucketLookup, S3Error, S3Flags};
use crate::backend::http::Target;
use crate::pure::document::{self, Value};
use crate::pure::secret::Secret;

/// One entry: the settings of its backend, in the form of flags.
pub struct Entry {
    /// What requests name it with, byte by byte.
    pub key: String,
    pub flags: S3Flags,
    pub extra_buckets: Vec<String>,
    pub is_default: bool,
}

/// Keys of an entry.
const KEYS: [&str; 13] = [
    "endpoint",
    "bucket",
    "extra_buckets",
    "prefix",
    "access_key_id",
    "secret_access_key",
    "session_token",
    "disable_ssl",
    "region",
    "bucket_lookup_type",
    "max_idle_conns",
    "conn_recycle_interval",
    "default",
];

/// The entries of `text`, in its order, with what they leave out taken from `base`. Exactly one of them is the default.
pub fn entries(text: &str, base: &S3Flags) -> Result<Vec<Entry>, S3Error> {
    let bad = |problem: &str| S3Error::Backends { problem: problem.to_owned() };
    let map = match document::parse(text).map_err(|error| bad(&error.to_string()))? {
        Value::Map(map) if !map.is_empty() => map,
        Value::Map(_) | Value::Null => return Ok(Vec::new()),
        Value::Text(_) | Value::List(_) => return Err(bad("must be a map of names to backends")),
    };
    let entries: Vec<Entry> = map.into_iter().map(|(key, value)| entry(key, value, base)).collect::<Result<_, _>>()?;
    for (at, Entry { key, .. }) in entries.iter().enumerate() {
        if entries[..at].iter().any(|earlier| earlier.key == *key) {
            return Err(bad(&format!("there are two entries {key:?}")));
        }
    }
    match entries.iter().filter(|entry| entry.is_default).count() {
        1 => Ok(entries),
        0 => Err(bad("no entry has `default: true`: it is the backend of requests that name none, those of HTTP")),
        _ => Err(bad("more than one entry has `default: true`")),
    }
}

fn entry(key: String, value: Value, base: &S3Flags) -> Result<Entry, S3Error> {
    let bad = |problem: String| S3Error::Backend { key: key.clone(), problem };
    if key.is_empty() {
        return Err(S3Error::Backends { problem: "an entry has no name".into() });
    }
    let given = match value {
        Value::Map(given) => given,
        Value::Null => Vec::new(),
        Value::Text(_) | Value::List(_) => return Err(bad("must be a map of keys to values".into())),
    };
    let (mut extra_buckets, mut is_default) = (Vec::new(), false);
    let (mut endpoint, mut disable_ssl, mut keys) = (None, None, (None, None, None));
    let mut flags = base.clone();
    for (name, value) in given {
        if name == "extra_buckets" {
            extra_buckets = texts(value).ok_or_else(|| bad("extra_buckets must be a list of names".into()))?;
            continue;
        }
        let text = match value {
            Value::Null => continue,
            Value::Text(text) => text,
            Value::List(_) | Value::Map(_) => return Err(bad(format!("{name} must be one value"))),
        };
        let truth = || text.parse::<bool>().map_err(|_| bad(format!("{name} must be true or false")));
        match name.as_str() {
            "endpoint" => endpoint = Some(text).filter(|text| !text.is_empty()),
            "bucket" if text.is_empty() => {}
            "bucket" => flags.bucket = Some(text),
            "prefix" if text.is_empty() => {}
            "prefix" => flags.prefix = Some(text),
            "access_key_id" => keys.0 = Some(text).filter(|text| !text.is_empty()),
            "secret_access_key" => keys.1 = Some(text).filter(|text| !text.is_empty()).map(Secret::new),
            "session_token" => keys.2 = Some(text).filter(|text| !text.is_empty()).map(Secret::new),
            "disable_ssl" => disable_ssl = Some(truth()?),
            "region" if text.is_empty() => {}
            "region" => flags.region = Some(text),
            "bucket_lookup_type" => {
                let problem = |_| bad("bucket_lookup_type must be auto, dns or path".into());
                flags.bucket_lookup_type = BucketLookup::from_str(&text, false).map_err(problem)?;
            }
            "max_idle_conns" => {
                let count = text.parse().map_err(|_| bad("max_idle_conns must be a number".into()))?;
                flags.max_idle_conns = if count == 0 { flags.max_idle_conns } else { count };
            }
            "conn_recycle_interval" => flags.conn_recycle_interval = text,
            "default" => is_default = truth()?,
            _ => {
                let nearest = super::names::nearest(&name, KEYS.into_iter());
                let hint = nearest.map_or(String::new(), |nearest| format!("; did you mean {nearest:?}?"));
                return Err(bad(format!("there is no key {name:?}{hint}")));
            }
        }
    }
    if keys.0.is_some() || keys.1.is_some() || keys.2.is_some() {
        // Why the token too: one of other keys would be of no use.
        flags.auth_method = Some(AuthMethod::AccessKey);
        (flags.access_key_id, flags.secret_access_key, flags.session_token) = keys;
    }
    match endpoint {
        Some(endpoint) => flags.endpoint = Some(endpoint),
        None => {
            let named = Target::parse(&key).filter(|(_, path)| path == "/");
            let (target, _) = named.ok_or_else(|| {
                bad("its name is no http(s) URL of a store: give it an endpoint, the store's host[:port]".into())
            })?;
            flags.endpoint = Some(format!("{}:{}", bracketed(&target.host), target.port));
            disable_ssl = disable_ssl.or(Some(!target.tls));
        }
    }
    flags.disable_ssl = disable_ssl.unwrap_or(flags.disable_ssl);
    Ok(Entry { key, flags, extra_buckets, is_default })
}

fn texts(value: Value) -> Option<Vec<String>> {
    let text = |item| match item {
        Value::Text(text) => Some(text),
        Value::Null | Value::List(_) | Value::Map(_) => None,
    };
    match value {
        Value::Null => Some(Vec::new()),
        Value::List(items) => items.into_iter().map(text).collect(),
        Value::Text(_) | Value::Map(_) => None,
    }
}

fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::StorageMode;
    use super::*;
    use crate::backend::settings::{CredentialSource, Settings};

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        s3: S3Flags,
    }

    /// What the flags `base` and the map `yaml` give.
    fn resolve(base: &[&str], yaml: &str) -> Result<Settings, String> {
        let map = format!("--s3.backends={}", document::parse(yaml).expect("YAML").to_json());
        let only = Only::try_parse_from([&["x", &map], base].concat()).expect("flags that exist");
        let settings = only.s3.resolve(StorageMode::Zstd, 4, 1 << 30, |_| None).map_err(|error| error.to_string())?;
        settings.ok_or_else(|| "no backend".into())
    }

    const BASE: [&str; 5] =
        ["--s3.bucket=b", "--s3.prefix=p", "--s3.access_key_id=ID", "--s3.secret_access_key=hush", "--s3.region=here"];

    /// Goal: an entry is what `s3_proxy` says, but for what it says itself; an endpoint it does not name is that of its
    /// name. Method: one entry that says nothing, one that says all.
    #[test]
    fn inheritance() {
        let yaml = "http://a.example:9000: {default: true}\n\
                    opaque name:\n  endpoint: 10.0.0.1:9000\n  disable_ssl: true\n  bucket: c\n  extra_buckets: [d, e]\n  \
                    prefix: q\n  access_key_id: ID2\n  secret_access_key: hush2\n  region: there\n  max_idle_conns: 24\n  \
                    conn_recycle_interval: -1s\n";
        let settings = resolve(&BASE, yaml).expect("valid");
        assert_eq!((settings.default_backend, settings.has_map, settings.backends.len()), (0, true, 2));
        // These have other defaults where there is a map.
        assert_eq!((settings.max_queued_uploads, settings.num_uploaders), (100_000, 25));
        let [one, two] = &settings.backends[..] else { panic!("two backends") };
        let keys = |source: &CredentialSource| match source {
            CredentialSource::Static(keys) => (keys.access_key_id.to_string(), keys.session_token.is_some()),
            _ => panic!("static keys"),
        };
        assert_eq!((&*one.name, &*one.prefix, &*one.region), ("http://a.example:9000", "p/", "here"));
        assert_eq!((one.buckets[0].target.authority(), one.needs_tls()), ("a.example:9000".into(), false));
        assert_eq!(one.buckets.iter().map(|bucket| &*bucket.name).collect::<Vec<_>>(), ["b"]);
        assert_eq!((keys(&one.credentials), one.idle_conns_max), (("ID".into(), false), 256));
        assert!(one.conn_recycle.is_some());
        assert_eq!((&*two.name, &*two.prefix, &*two.region), ("opaque name", "q/", "there"));
        assert_eq!((two.buckets[0].target.authority(), two.needs_tls()), ("10.0.0.1:9000".into(), false));
        assert_eq!(two.buckets.iter().map(|bucket| &*bucket.name).collect::<Vec<_>>(), ["c", "d", "e"]);
        assert_eq!((keys(&two.credentials), two.idle_conns_max), (("ID2".into(), false), 2));
        assert_eq!(two.conn_recycle, None);
        let token = [&BASE[..], &["--s3.session_token=hush"]].concat();
        let settings = resolve(&token, yaml).expect("valid");
        assert_eq!(settings.backends.iter().map(|one| keys(&one.credentials).1).collect::<Vec<_>>(), [true, false]);
        let given = [&BASE[..], &["--num_uploaders=100", "--max_queued_uploads=7"]].concat();
        let settings = resolve(&given, yaml).expect("valid");
        assert_eq!((settings.max_queued_uploads, settings.num_uploaders), (7, 100));
    }

    /// Goal: an `https` name is spoken to by TLS, and an entry may say otherwise. Method: the forms.
    #[test]
    fn tls() {
        let tls = |entry: &str| resolve(&BASE, &format!("{entry}\n")).expect("valid").backends[0].needs_tls();
        assert!(tls("https://a: {default: true}"));
        assert!(!tls("https://a: {default: true, disable_ssl: true}"));
        assert!(!tls("http://a: {default: true}"));
        assert!(tls("http://a: {default: true, endpoint: b}"));
        assert!(tls("http://a: {default: true, disable_ssl: false}"));
    }

    /// Goal: what is wrong is named, secrets are not shown. Method: one example each.
    #[test]
    fn errors() {
        let error = |base: &[&str], yaml: &str| resolve(base, yaml).expect_err("it cannot be used");
        let text = |yaml: &str| error(&BASE, yaml);
        assert!(text("http://a: {}").contains("no entry has `default: true`"));
        assert!(text("{http://a: {default: true}, http://b: {default: true}}").contains("more than one"));
        assert!(text("name: {default: true}").contains("is no http(s) URL"));
        assert!(text("http://a/path: {default: true}").contains("is no http(s) URL"));
        assert!(text("http://a: {default: true, buckt: c}").ends_with("no key \"buckt\"; did you mean \"bucket\"?"));
        assert!(text("http://a: {default: true, extra_buckets: c}").contains("must be a list"));
        assert!(text("http://a: {default: true, extra_buckets: [b]}").contains("there twice"));
        assert!(text("http://a: {default: true, extra_buckets: [x/y]}").contains("no name of a bucket"));
        assert!(text("http://a: {default: maybe}").contains("true or false"));
        assert!(text("http://a: {default: true, access_key_id: only}").contains("access_key_id"));
        assert!(text("http://a: text").contains("must be a map of keys"));
        assert!(error(&BASE[2..], "http://a: {default: true}").contains("--s3.bucket is not set"));
        let map = "--s3.backends={\"http://a\": {\"secret_access_key\": \"hush\"}}";
        let only = Only::try_parse_from(["x", map]).unwrap_or_else(|error| panic!("{error}"));
        assert!(!format!("{:?}", only.s3).contains("hush"));
    }
}
