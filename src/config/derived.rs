//! What settings come to that nobody has given, and what they follow from: for `--print_config`.

use std::path::PathBuf;

use super::Config;
use crate::backend::settings::CredentialSource;
use crate::limits;
use crate::rt::cores::{MemoryOf, memory_available};
use crate::shard::geometry;

/// One setting.
#[derive(Debug, Clone)]
pub struct Derived {
    pub flag: &'static str,
    /// `None` where it is nothing that the setting could be set to.
    pub value: Option<String>,
    /// Empty where it follows from nothing.
    pub reason: &'static str,
    /// A value that means the same as none.
    pub same: Option<&'static str>,
}

impl Derived {
    pub fn new(flag: &'static str, value: impl ToString, reason: &'static str) -> Self {
        Self { flag, value: Some(value.to_string()), reason, same: None }
    }

    pub fn of_no_value(flag: &'static str, reason: &'static str) -> Self {
        Self { flag, value: None, reason, same: None }
    }
}

impl Config {
    /// Of all settings that may be left out. `writes_fit` is how many writes the memory limit has room for, if that is known.
    pub fn derived(&self, writes_fit: Option<u32>) -> Vec<Derived> {
        let mut derived = vec![
            Derived::new("dir", self.dir.display(), self.dir_reason()),
            Derived::new("max_size", self.max_size as f64 / (1u64 << 30) as f64, self.max_size_reason()),
            Derived::new("cores", self.cores.len(), "one for each CPU that the process may use"),
            Derived::new("memory_limit", self.memory_limit, memory_limit_reason()),
            Derived::new("ram_cache", self.ram_cache, "a quarter of memory_limit"),
            Derived::new("grpc_initial_window_size", self.stream_window, ""),
            Derived::new("log_level", "info", ""),
            Derived::of_no_value("endpoint_metrics_duration_buckets", "from 0.1 ms to 320 s"),
            Derived::of_no_value("unix_socket_mode", "what the umask leaves"),
        ];
        if let Some(fit) = writes_fit {
            let slots = Derived::new("max_inflight_cas_writes", fit, "as many as memory_limit has room for");
            derived.push(Derived { same: Some("0"), ..slots });
        }
        let Some(settings) = &self.backends else { return derived };
        let stores = match (settings.num_uploaders, settings.has_map) {
            (0, _) => "uploads are off",
            (_, false) => "for one store",
            (_, true) => "for several stores",
        };
        derived.push(Derived::new("max_queued_uploads", settings.max_queued_uploads, stores));
        derived.push(Derived::new("num_uploaders", settings.num_uploaders, stores));
        if let ([backend], false) = (&settings.backends[..], settings.has_map) {
            derived.push(Derived::of_no_value("s3.auth_method", credentials_reason(&backend.credentials)));
            derived.push(match backend.region.as_str() {
                "" => Derived::of_no_value("s3.region", "us-east-1, until the store names another one"),
                region => Derived::new("s3.region", region, "AWS_REGION"),
            });
        }
        derived
    }

    fn dir_reason(&self) -> &'static str {
        let is_below =
            |name| std::env::var_os(name).is_some_and(|base| self.dir == PathBuf::from(base).join("ringcas"));
        if is_below("XDG_CACHE_HOME") { "below XDG_CACHE_HOME" } else { "below HOME" }
    }

    fn max_size_reason(&self) -> &'static str {
        match geometry::kept_size(&self.dir) {
            Ok(Some(_)) => "as large as the cache in dir is",
            _ if self.max_size == limits::MAX_SIZE_DEFAULT => "that of a new cache, if twice as much is free",
            _ => "half of what is free",
        }
    }
}

fn memory_limit_reason() -> &'static str {
    match memory_available().1 {
        MemoryOf::Machine => "half of the machine's memory",
        MemoryOf::Cgroup => "half of what the cgroup may use",
    }
}

fn credentials_reason(source: &CredentialSource) -> &'static str {
    match source {
        CredentialSource::Anonymous => "requests are not signed",
        CredentialSource::Static(_) => "access_key, with the keys below or those of AWS_ACCESS_KEY_ID",
        CredentialSource::File { .. } => "aws_credentials_file, as there is one",
        CredentialSource::Role(_) => "iam_role, as there are neither keys nor a file",
    }
}
