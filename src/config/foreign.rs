//! Settings of bazel-remote that have no meaning here. Each is accepted, and named at the start with what to use instead;
//! those that would have kept somebody out are refused, so that nobody's cache is open by a misunderstanding.

use clap::Arg;

use super::ConfigError;
use super::effective::{Effective, Entry};
use super::values::boolean;

/// What becomes of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It has no effect, for this reason.
    Ignored(&'static str),
    /// The start fails, for this reason.
    Refused(&'static str),
    /// It is a part of the address that this flag gives. (`inputs` puts it together.)
    PartOf(&'static str),
}

use Fate::{Ignored, PartOf, Refused};

const AZURE: Fate = Ignored("Azure's store is no backend here; give an S3 store: --s3.bucket");
const GOOGLE: Fate =
    Ignored("Google's store is reached by its S3 interface: --s3.endpoint storage.googleapis.com, and HMAC keys");
const PROXY: Fate = Ignored("another cache is no backend here; give an S3 store: --s3.bucket");
const PROFILE: Fate = Ignored("there is no such server; perf(1) profiles this program");
const LDAP: Fate = Refused(
    "LDAP is not supported, and without it the cache may be open to everybody. Take it out, and give --htpasswd_file, \
     --token_file or --tls_ca_file",
);

/// Every such setting by its flag, as the configuration's own are.
///
/// Source: bazel-remote `utils/flags`, `config`.
const ROWS: &[(&str, Fate)] = &[
    ("azblob.auth_method", AZURE),
    ("azblob.cert_path", AZURE),
    ("azblob.client_id", AZURE),
    ("azblob.client_secret", AZURE),
    ("azblob.container_name", AZURE),
    ("azblob.prefix", AZURE),
    ("azblob.shared_key", AZURE),
    ("azblob.storage_account", AZURE),
    ("azblob.tenant_id", AZURE),
    ("azblob.update_timestamps", AZURE),
    ("experimental_remote_asset_api", Ignored("the Remote Asset API is not served")),
    ("gcs_proxy.bucket", GOOGLE),
    ("gcs_proxy.json_credentials_file", GOOGLE),
    ("gcs_proxy.use_default_credentials", GOOGLE),
    ("grpc_port", PartOf("grpc_address")),
    ("grpc_proxy.ca_file", PROXY),
    ("grpc_proxy.cert_file", PROXY),
    ("grpc_proxy.key_file", PROXY),
    ("grpc_proxy.url", PROXY),
    ("host", PartOf("http_address")),
    ("http_proxy.ca_file", PROXY),
    ("http_proxy.cert_file", PROXY),
    ("http_proxy.key_file", PROXY),
    ("http_proxy.url", PROXY),
    ("ldap.base_dn", LDAP),
    ("ldap.bind_password", LDAP),
    ("ldap.bind_user", LDAP),
    ("ldap.cache_time", LDAP),
    ("ldap.groups_query", LDAP),
    ("ldap.url", LDAP),
    ("ldap.username_attribute", LDAP),
    ("lru_artifacts", Ignored("what is used together is not written down")),
    ("max_size_hard_limit", Ignored("--max_size is hard: the cache never takes more")),
    ("port", PartOf("http_address")),
    ("profile_address", PROFILE),
    ("profile_host", PROFILE),
    ("profile_port", PROFILE),
    ("s3.key_version", Ignored("keys are always of version 2")),
    (
        "s3.update_timestamps",
        Ignored("objects in the store keep their times; let its lifecycle rules outlast the cache"),
    ),
    ("zstd_implementation", Ignored("zstd is always libzstd")),
];

/// Values of our own settings that mean something else here.
const VALUES: &[(&str, &str, &str)] =
    &[("s3.signature_type", "v2", "requests are signed by version 4, which all stores know that knew version 2")];

/// Values with which a setting asks for nothing that is not so anyway.
const IDLE: &[(&str, &str)] = &[("max_size_hard_limit", "-1"), ("profile_address", "none"), ("s3.key_version", "2")];

/// The flags, for the parser: any value, or none.
pub fn arguments() -> impl Iterator<Item = Arg> {
    let argument = |(flag, _): &(&'static str, Fate)| {
        let argument = Arg::new(*flag).long(*flag).hide(true).num_args(0..=1).default_missing_value("true");
        argument.allow_negative_numbers(true)
    };
    ROWS.iter().map(argument)
}

/// Whether this is one of them.
pub fn has(flag: &str) -> bool {
    fate(flag).is_some()
}

/// A line for each of them that is set, or why the server must not start.
pub fn judge(effective: &Effective) -> Result<Vec<String>, ConfigError> {
    let mut lines = Vec::new();
    for entry in effective.given() {
        let value = entry.value.as_deref().unwrap_or_default();
        for (_, _, reason) in VALUES.iter().filter(|(flag, odd, _)| *flag == entry.flag && *odd == value) {
            lines.push(format!("{} {value}: {reason}", entry.place()));
        }
        let Some(fate) = fate(&entry.flag).filter(|_| !is_idle(entry)) else { continue };
        let place = entry.place();
        match fate {
            Ignored(reason) => lines.push(format!("{place} has no effect: {reason}")),
            PartOf(flag) => lines.push(format!("{place} is understood; its newer name is --{flag}")),
            Refused(reason) => return Err(ConfigError::Refused { place, reason }),
        }
    }
    let is_given = |flag: &str| effective.given().any(|entry| entry.flag == flag && entry.value.is_some());
    if !is_given("s3.bucket") && !is_given("s3.backends") {
        let idle = effective.given().filter(|entry| entry.flag.starts_with("s3.") && fate(&entry.flag).is_none());
        lines.extend(idle.map(|entry| format!("{} has no effect without --s3.bucket", entry.place())));
    }
    Ok(lines)
}

fn fate(flag: &str) -> Option<Fate> {
    ROWS.iter().find(|(known, _)| *known == flag).map(|(_, fate)| *fate)
}

fn is_idle(entry: &Entry) -> bool {
    let value = entry.value.as_deref().unwrap_or_default();
    let is_part = matches!(fate(&entry.flag), Some(PartOf(_)));
    (boolean(value) == Ok(false) && !is_part) || IDLE.contains(&(&entry.flag, value))
}

#[cfg(test)]
mod tests {
    use super::super::Flags;
    use super::super::inputs::{Inputs, Outcome};
    use super::*;

    fn lines(args: &[&str], variables: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let read: Result<Outcome<Flags>, _> = Inputs::new(args, variables).read();
        read.map(|outcome| outcome.notices).map_err(|error| error.to_string())
    }

    /// Goal: each setting is named in one line with a reason when it asks for something, wherever it is set; none is both
    /// here and among our own. Method: every row as a flag and as a variable.
    #[test]
    fn each_is_told() {
        for (flag, fate) in ROWS {
            let value = if matches!(fate, PartOf(_)) { "1" } else { "x" };
            let variable = format!("BAZEL_REMOTE_{}", flag.replace('.', "_").to_uppercase());
            let [by_flag, by_variable] =
                [lines(&[&format!("--{flag}={value}")], &[]), lines(&[], &[(variable.as_str(), value)])];
            match fate {
                Ignored(reason) => {
                    assert_eq!(by_flag, Ok(vec![format!("--{flag} has no effect: {reason}")]));
                    assert_eq!(by_variable, Ok(vec![format!("{variable} has no effect: {reason}")]));
                }
                PartOf(newer) => {
                    let line = format!("--{flag} is understood; its newer name is --{newer}");
                    assert_eq!(by_flag, Ok(vec![line]));
                }
                Refused(reason) => {
                    assert!(
                        by_flag.is_err_and(|text| text.starts_with(&format!("--{flag}: ")) && text.contains(reason))
                    );
                    assert!(by_variable.is_err_and(|text| text.starts_with(&variable) && text.contains(reason)));
                }
            }
        }
    }

    /// Goal: a store that lacks its bucket is not passed over in silence. Method: settings of one without and with it.
    #[test]
    fn a_store_needs_its_bucket() {
        let line = "--s3.endpoint has no effect without --s3.bucket".to_owned();
        assert_eq!(lines(&["--s3.endpoint=h:1"], &[]), Ok(vec![line]));
        assert_eq!(lines(&["--s3.endpoint=h:1", "--s3.bucket=b"], &[]), Ok(vec![]));
        assert_eq!(lines(&["--s3.endpoint=h:1"], &[("BAZEL_REMOTE_S3_BUCKET", "b")]), Ok(vec![]));
    }

    /// Goal: what asks for nothing is not told. Method: values that switch off.
    #[test]
    fn idle_values_are_silent() {
        let args = ["--profile_address=none", "--max_size_hard_limit", "-1", "--s3.key_version=2", "--profile_port=0"];
        assert_eq!(lines(&args, &[("BAZEL_REMOTE_AZBLOB_UPDATE_TIMESTAMPS", "false")]), Ok(vec![]));
        assert_eq!(lines(&[], &[("BAZEL_REMOTE_TRUST_STORAGE_PREFIX_HEADER", "0")]), Ok(vec![]));
        assert_eq!(lines(&["--experimental_remote_asset_api", "--max_size=1"], &[]).map(|lines| lines.len()), Ok(1));
    }
}
