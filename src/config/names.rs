//! The names of a setting: its flag, its environment variables, its key in the file. All follow from the flag's.

/// Sections of the file, and what the flags of their keys begin with.
pub const SECTIONS: [(&str, &str); 6] = [
    ("s3_proxy", "s3."),
    ("grpc_proxy", "grpc_proxy."),
    ("http_proxy", "http_proxy."),
    ("gcs_proxy", "gcs_proxy."),
    ("azblob_proxy", "azblob."),
    ("ldap", "ldap."),
];

/// What the names of variables begin with; ours go first.
pub const PREFIXES: [&str; 2] = ["RINGCAS_", "BAZEL_REMOTE_"];

/// Variables that do not follow from the flag's name, bazel-remote's slips included.
///
/// Source: bazel-remote `utils/flags`.
const ODD: [(&str, &str); 13] = [
    ("allow_unauthenticated_reads", "BAZEL_REMOTE_UNAUTHENTICATED_READS"),
    ("azblob.cert_path", "AZURE_CLIENT_CERTIFICATE_PATH"),
    ("azblob.client_id", "AZURE_CLIENT_ID"),
    ("azblob.client_secret", "BAZEL_REMOTE_AZBLOB_SECRET_CLIENT_SECRET"),
    ("azblob.client_secret", "AZURE_CLIENT_SECRET"),
    ("azblob.shared_key", "AZURE_STORAGE_ACCOUNT_KEY"),
    ("azblob.tenant_id", "AZURE_TENANT_ID"),
    ("disable_grpc_ac_deps_check", "BAZEL_REMOTE_DISABLE_GRPS_AC_DEPS_CHECK"),
    ("gcs_proxy.bucket", "BAZEL_REMOTE_GCS_BUCKET"),
    ("gcs_proxy.json_credentials_file", "BAZEL_REMOTE_GCS_JSON_CREDENTIALS_FILE"),
    ("gcs_proxy.use_default_credentials", "BAZEL_REMOTE_GCS_USE_DEFAULT_CREDENTIALS"),
    ("log_level", "RINGCAS_LOG"),
    ("ldap.username_attribute", "BAZEL_REMOTE_LDAP_USER_ATTRIBUTE"),
];

/// The environment names of a flag; the first that is set counts.
pub fn variables(flag: &str) -> Vec<String> {
    let upper = flag.replace('.', "_").to_ascii_uppercase();
    let regular = PREFIXES.iter().map(|prefix| format!("{prefix}{upper}"));
    regular.chain(ODD.iter().filter(|(odd, _)| *odd == flag).map(|(_, name)| (*name).to_owned())).collect()
}

/// The section of the file that a flag's key stands in, if any, and the key.
pub fn key(flag: &str) -> (Option<&'static str>, &str) {
    let within = |(section, prefix): &(&'static str, &str)| Some((Some(*section), flag.strip_prefix(prefix)?));
    SECTIONS.iter().find_map(within).unwrap_or((None, flag))
}

/// The one of the variables in `known` that somebody who wrote `name` may have meant.
pub fn nearest_variable<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let bare = |name: &'a str| PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
    let prefix = PREFIXES.iter().find(|prefix| name.starts_with(**prefix))?;
    // Why without what they begin with: all would be near, as most of them is the same.
    let known: Vec<&str> = known.filter(|known| known.starts_with(prefix)).collect();
    let nearest = nearest(name.strip_prefix(prefix)?, known.iter().filter_map(|known| bare(known)))?;
    known.into_iter().find(|known| bare(known) == Some(nearest))
}

/// The one of `known` that somebody who wrote `name` may have meant.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let nearest = known.map(|known| (strsim::damerau_levenshtein(known, name), known)).min()?;
    // Farther than this it is no slip of the finger.
    (nearest.0 <= name.len().div_ceil(3)).then_some(nearest.1)
}

/// Kubernetes sets these for services whose names begin as ours or bazel-remote's, such as `ringcas` and `bazel-remote-grpc`:
/// `RINGCAS_SERVICE_HOST`, `BAZEL_REMOTE_GRPC_PORT=tcp://10.0.0.1:9092`, `BAZEL_REMOTE_GRPC_PORT_9092_TCP_ADDR`.
///
/// Source: Kubernetes, "Service", environment variables.
pub fn is_of_kubernetes(variable: &str, value: &str) -> bool {
    let Some(rest) = PREFIXES.iter().find_map(|prefix| variable.strip_prefix(prefix)) else { return false };
    // As if a service's name stood in front in any case.
    let rest = format!("_{rest}");
    let of_port = |(_, rest): (&str, &str)| rest.starts_with(|c: char| c.is_ascii_digit()) && rest.contains('_');
    rest.ends_with("_SERVICE_HOST")
        || rest.contains("_SERVICE_PORT")
        || rest.rsplit_once("_PORT_").is_some_and(of_port)
        || (rest.ends_with("_PORT") && value.contains("://"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: names follow from the flag's, and bazel-remote's odd ones are known. Method: one example each.
    #[test]
    fn names() {
        assert_eq!(variables("s3.bucket"), ["RINGCAS_S3_BUCKET", "BAZEL_REMOTE_S3_BUCKET"]);
        assert_eq!(variables("disable_grpc_ac_deps_check")[2], "BAZEL_REMOTE_DISABLE_GRPS_AC_DEPS_CHECK");
        assert_eq!(key("s3.bucket"), (Some("s3_proxy"), "bucket"));
        assert_eq!(key("azblob.prefix"), (Some("azblob_proxy"), "prefix"));
        assert_eq!(key("dir"), (None, "dir"));
        assert_eq!(nearest("max_sze", ["dir", "max_size"].into_iter()), Some("max_size"));
        assert_eq!(nearest("something_else", ["dir", "max_size"].into_iter()), None);
        let variable = |name| nearest_variable(name, ["BAZEL_REMOTE_DIR", "RINGCAS_DIR", "RINGCAS_CORES"].into_iter());
        assert_eq!(variable("RINGCAS_DIRR"), Some("RINGCAS_DIR"));
        assert_eq!(variable("BAZEL_REMOTE_DRI"), Some("BAZEL_REMOTE_DIR"));
        assert_eq!(variable("RINGCAS_FOOBAR"), None);
        assert_eq!(variable("RINGCAS_VERSION"), None);
    }

    /// Goal: what Kubernetes sets is told from what an operator sets. Method: names of both.
    #[test]
    fn kubernetes() {
        for service in ["BAZEL_REMOTE", "RINGCAS", "RINGCAS_GRPC", "BAZEL_REMOTE_CACHE"] {
            for name in ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT_9092_TCP", "PORT_9092_TCP_ADDR"] {
                assert!(is_of_kubernetes(&format!("{service}_{name}"), "9092"), "{service}_{name}");
            }
            assert!(is_of_kubernetes(&format!("{service}_PORT"), "tcp://10.0.0.1:9092"));
            assert!(!is_of_kubernetes(&format!("{service}_PORT"), "9092"));
        }
        for name in ["RINGCAS_DIR", "SERVICE_HOST", "RINGCAS_PORT_X", "RINGCAS_S3_ENDPOINT"] {
            assert!(!is_of_kubernetes(name, "http://h:1"), "{name}");
        }
    }
}
