//! The configuration: flags, each also an environment variable `RINGCAS_<NAME>` or `BAZEL_REMOTE_<NAME>`, and a key of the
//! configuration file. Names and meanings are bazel-remote's where it has one. What comes out is checked and complete; start-up errors name the setting and the remedy.

mod file;
mod s3;

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Arg, Command, CommandFactory, FromArgMatches, Parser, ValueEnum};

use crate::backend::settings::Settings;
use crate::limits;
use crate::rt::cores::{CorePlan, PlanError};
use crate::service::shed::ShedStatus;
use crate::shard::{codec, disk};

/// A Bazel remote-cache server: one io_uring executor pinned to each core.
#[derive(Parser, Debug)]
#[command(name = "ringcas", version, rename_all = "snake_case", max_term_width = 110)]
pub struct Flags {
    /// Cache directory; created when missing. Default: $XDG_CACHE_HOME/ringcas, else ~/.cache/ringcas.
    #[arg(long, env = "RINGCAS_DIR")]
    dir: Option<PathBuf>,
    /// Size of the cache on disk in GiB, fractions allowed; never exceeded. Default for a new directory: 10, or half of
    /// the free space when that is less; an existing one keeps its size.
    #[arg(long, env = "RINGCAS_MAX_SIZE", value_parser = gib)]
    max_size: Option<u64>,
    /// Where gRPC listens: [host]:port; port 0 picks a free one.
    #[arg(long, env = "RINGCAS_GRPC_ADDRESS", default_value = ":9092")]
    grpc_address: String,
    /// Where HTTP listens, for /cas/, /ac/, /metrics and /status: [host]:port, or `none`; port 0 picks a free one.
    #[arg(long, env = "RINGCAS_HTTP_ADDRESS", default_value = ":8080")]
    http_address: String,
    /// How blobs stand on disk.
    #[arg(long, env = "RINGCAS_STORAGE_MODE", default_value = "zstd")]
    storage_mode: StorageMode,
    /// Executors: a number, or a list of CPUs such as 0-15. Default: one for each CPU that the process may use.
    #[arg(long, env = "RINGCAS_CORES")]
    cores: Option<String>,
    /// Memory for messages, reads, decoders and hot records, such as 4G or 512M. Default: half of the machine or the cgroup.
    #[arg(long, env = "RINGCAS_MEMORY_LIMIT", value_parser = bytes)]
    memory_limit: Option<u64>,
    /// Memory for hot small records, part of the memory limit. Default: a quarter of it.
    #[arg(long, env = "RINGCAS_RAM_CACHE", value_parser = bytes)]
    ram_cache: Option<u64>,
    /// What an acknowledged upload has reached: the write buffer, the drive, or stable storage.
    #[arg(long, env = "RINGCAS_ACK", default_value = "buffered")]
    ack: Ack,
    /// HTTP/2 window of each stream in bytes; a connection's is 16 times this. It never grows. [default: 262144]
    #[arg(long, env = "RINGCAS_GRPC_INITIAL_WINDOW_SIZE", value_parser = window())]
    grpc_initial_window_size: Option<u32>,
    /// CAS writes in flight at a time, on all cores; others wait a little and are then refused. Reads, the action cache and
    /// blobs that are present are never gated. Default, also for 0: as many of 592 KiB as the memory limit has room for.
    #[arg(long, env = "RINGCAS_MAX_INFLIGHT_CAS_WRITES")]
    max_inflight_cas_writes: Option<u32>,
    /// How long a CAS write waits for its turn before it is refused, such as 250ms; at most 60s.
    #[arg(long, env = "RINGCAS_WRITE_QUEUE_WAIT", default_value = "250ms", value_parser = duration)]
    write_queue_wait: Duration,
    /// What a refused CAS write is told.
    #[arg(long, env = "RINGCAS_WRITE_SHED_STATUS", default_value = "auto")]
    write_shed_status: WriteShedStatus,
    /// The largest blob that clients may upload, in bytes. Default: what the cache can hold.
    #[arg(long, env = "RINGCAS_MAX_BLOB_SIZE", default_value_t = i64::MAX as u64,
          value_parser = clap::value_parser!(u64).range(1..=i64::MAX as u64))]
    max_blob_size: u64,
    /// How long calls in flight may take to end after SIGTERM, such as 30s.
    #[arg(long, env = "RINGCAS_SHUTDOWN_TIMEOUT", default_value = "30s", value_parser = duration)]
    shutdown_timeout: Duration,
    /// One log line for each request, or none.
    #[arg(long, env = "RINGCAS_ACCESS_LOG_LEVEL", default_value = "all")]
    access_log_level: AccessLog,
    /// Serve /metrics on the HTTP port.
    #[arg(long, env = "RINGCAS_ENABLE_ENDPOINT_METRICS", num_args = 0..=1, require_equals = true,
          default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    enable_endpoint_metrics: bool,
    /// What the names of metrics start with, but for grpc_server_*, http_* and process_*.
    #[arg(long, env = "RINGCAS_METRICS_PREFIX", default_value = "bazel_remote")]
    metrics_prefix: MetricsPrefix,
    /// Let /ac/ on the HTTP port take and give any bytes, as ccache needs it: not ActionResults that are checked.
    #[arg(long, env = "RINGCAS_DISABLE_HTTP_AC_VALIDATION", num_args = 0..=1, require_equals = true,
          default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    disable_http_ac_validation: bool,
    /// Keep action results of different instance names apart.
    #[arg(long, env = "RINGCAS_ENABLE_AC_KEY_INSTANCE_MANGLING", num_args = 0..=1, require_equals = true,
          default_value_t = false, default_missing_value = "true", action = clap::ArgAction::Set)]
    enable_ac_key_instance_mangling: bool,
    /// A file in YAML that names flags and their values. What is given by flag or environment goes before it.
    #[arg(long, env = "RINGCAS_CONFIG_FILE")]
    config_file: Option<PathBuf>,
    #[command(flatten)]
    s3: s3::S3Flags,
}

/// `--storage_mode`, with the meaning of `shard::codec::StorageMode`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageMode {
    /// Compressed where that saves at least a tenth.
    Zstd,
    /// As they are.
    Uncompressed,
}

/// `--ack`, with the meaning of `shard::disk::Ack`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ack {
    /// Verified, and in the write buffer: a crash within the next milliseconds loses it.
    Buffered,
    /// Written to the drive: survives the end of the process.
    Flushed,
    /// On stable storage: survives a power cut.
    Durable,
}

/// `--write_shed_status`, with the meaning of `service::shed::ShedStatus`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
#[value(rename_all = "snake_case")]
pub enum WriteShedStatus {
    /// RESOURCE_EXHAUSTED for BuildStream, which fails its build on the other; FAILED_PRECONDITION for all else.
    Auto,
    /// Bazel takes it for a warning, and goes on at once.
    FailedPrecondition,
    /// Bazel tries each blob again for some seconds.
    ResourceExhausted,
    /// As before.
    Unavailable,
}

impl From<WriteShedStatus> for ShedStatus {
    fn from(status: WriteShedStatus) -> Self {
        match status {
            WriteShedStatus::Auto => Self::Auto,
            WriteShedStatus::FailedPrecondition => Self::FailedPrecondition,
            WriteShedStatus::ResourceExhausted => Self::ResourceExhausted,
            WriteShedStatus::Unavailable => Self::Unavailable,
        }
    }
}

impl From<StorageMode> for codec::StorageMode {
    fn from(mode: StorageMode) -> Self {
        match mode {
            StorageMode::Zstd => Self::Zstd,
            StorageMode::Uncompressed => Self::Uncompressed,
        }
    }
}

impl From<Ack> for disk::Ack {
    fn from(ack: Ack) -> Self {
        match ack {
            Ack::Buffered => Self::Buffered,
            Ack::Flushed => Self::Flushed,
            Ack::Durable => Self::Durable,
        }
    }
}

/// `--metrics_prefix`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
#[value(rename_all = "snake_case")]
pub enum MetricsPrefix {
    /// bazel-remote's names, for its dashboards and alerts.
    BazelRemote,
    /// Our own.
    Ringcas,
}

impl MetricsPrefix {
    /// As it stands in front of `_`.
    pub fn text(self) -> &'static str {
        match self {
            Self::BazelRemote => "bazel_remote",
            Self::Ringcas => "ringcas",
        }
    }
}

/// `--access_log_level`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessLog {
    All,
    None,
}

/// The checked configuration.
#[derive(Debug, Clone)]
pub struct Config {
    pub dir: PathBuf,
    /// Bytes on disk.
    pub max_size: u64,
    pub grpc_address: SocketAddr,
    /// `None` when HTTP is switched off.
    pub http_address: Option<SocketAddr>,
    pub storage_mode: StorageMode,
    pub cores: CorePlan,
    /// Bytes.
    pub memory_limit: u64,
    /// Bytes, over all cores.
    pub ram_cache: u64,
    pub ack: Ack,
    /// Bytes.
    pub stream_window: u32,
    /// CAS writes in flight on all cores, at most; `None` for as many as there is memory for.
    pub write_slots: Option<u32>,
    pub write_queue_wait: Duration,
    pub write_shed_status: WriteShedStatus,
    /// Bytes.
    pub max_blob_size: u64,
    pub shutdown_timeout: Duration,
    pub access_log: bool,
    pub endpoint_metrics: bool,
    pub metrics_prefix: MetricsPrefix,
    pub mangle_action_keys: bool,
    pub check_http_actions: bool,
    /// `None` where there is no backend.
    pub backends: Option<Settings>,
}

/// A setting that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{setting} {value:?}: {problem}. Give [host]:port, such as :9092 or 127.0.0.1:9092")]
    Address { setting: &'static str, value: String, problem: String },
    #[error("--cores: {0}")]
    Cores(#[from] PlanError),
    #[error("--dir: neither it nor XDG_CACHE_HOME nor HOME is set. Give --dir a directory on a local file system")]
    NoDirectory,
    #[error("--dir {dir}: {problem}. Give --dir a directory that this user may write")]
    Directory { dir: String, problem: std::io::Error },
    #[error("--ram_cache ({ram_cache} bytes) is more than half of --memory_limit ({memory_limit} bytes). Lower it")]
    RamCache { ram_cache: u64, memory_limit: u64 },
    #[error("--write_queue_wait: {0:?} is too long. Give at most {max:?}", max = limits::WRITE_QUEUE_WAIT_MAX)]
    WriteQueueWait(Duration),
    #[error("--memory_limit: {0} bytes is too little. Give at least {min}M", min = limits::MEMORY_LIMIT_MIN >> 20)]
    MemoryLimit(u64),
    #[error(transparent)]
    File(#[from] file::FileError),
    #[error(transparent)]
    S3(#[from] s3::S3Error),
}

/// Reads the command line, the environment and the configuration file. Ends the process on bad flags and for `--help`.
pub fn read<T: CommandFactory + FromArgMatches>() -> Result<T, ConfigError> {
    let command = with_both_names(T::command(), |name| std::env::var_os(name).is_some());
    let matches = command.clone().get_matches();
    let of = |matches| T::from_arg_matches(matches).unwrap_or_else(|error| error.exit());
    let Some(path) = matches.get_one::<PathBuf>("config_file") else { return Ok(of(&matches)) };
    Ok(of(&file::apply(command, path)?.get_matches()))
}

impl Flags {
    /// Checks every setting and fills in the defaults that depend on the machine.
    pub fn resolve(self) -> Result<Config, ConfigError> {
        let dir = dir_or_default(self.dir)?;
        std::fs::create_dir_all(&dir)
            .map_err(|problem| ConfigError::Directory { dir: dir.display().to_string(), problem })?;
        let max_size = size_or_default(self.max_size, &dir)?;
        let memory_limit = self.memory_limit.unwrap_or_else(|| crate::rt::cores::memory_available() / 2);
        if memory_limit < limits::MEMORY_LIMIT_MIN {
            return Err(ConfigError::MemoryLimit(memory_limit));
        }
        let ram_cache = self.ram_cache.unwrap_or(memory_limit / 4);
        if ram_cache > memory_limit / 2 {
            return Err(ConfigError::RamCache { ram_cache, memory_limit });
        }
        if self.write_queue_wait > limits::WRITE_QUEUE_WAIT_MAX {
            return Err(ConfigError::WriteQueueWait(self.write_queue_wait));
        }
        let window = self.grpc_initial_window_size;
        let write_slots_wanted = self.max_inflight_cas_writes.filter(|&wanted| wanted > 0);
        let cores = cores_or_every(self.cores.as_deref())?;
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let backends = self.s3.resolve(self.storage_mode, cores.len(), memory_limit, variable)?;
        Ok(Config {
            write_slots: write_slots_wanted,
            write_queue_wait: self.write_queue_wait,
            write_shed_status: self.write_shed_status,
            backends,
            grpc_address: address("--grpc_address", &self.grpc_address)?,
            http_address: match self.http_address.as_str() {
                "none" => None,
                value => Some(address("--http_address", value)?),
            },
            cores,
            dir,
            max_size,
            storage_mode: self.storage_mode,
            memory_limit,
            ram_cache,
            ack: self.ack,
            stream_window: window.unwrap_or(limits::HTTP2_STREAM_WINDOW),
            max_blob_size: self.max_blob_size,
            shutdown_timeout: self.shutdown_timeout,
            access_log: self.access_log_level == AccessLog::All,
            endpoint_metrics: self.enable_endpoint_metrics,
            metrics_prefix: self.metrics_prefix,
            mangle_action_keys: self.enable_ac_key_instance_mangling,
            check_http_actions: !self.disable_http_ac_validation,
        })
    }
}

fn window() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(65_535..=16 << 20)
}

/// Lets a flag be set by bazel-remote's variable where ours is not.
fn with_both_names(command: Command, is_set: impl Fn(&str) -> bool) -> Command {
    let other = |arg: &Arg| {
        let ours = arg.get_env()?.to_str()?;
        let theirs = ours.replacen("RINGCAS_", "BAZEL_REMOTE_", 1);
        (!is_set(ours) && is_set(&theirs)).then_some(theirs)
    };
    command.mut_args(|arg| match other(&arg) {
        Some(theirs) => arg.env(clap::builder::OsStr::from(theirs)),
        None => arg,
    })
}

/// `host:port`, `:port` for all interfaces (both IP versions where the machine has IPv6), `[v6]:port`.
fn address(setting: &'static str, value: &str) -> Result<SocketAddr, ConfigError> {
    let bad = |problem: String| ConfigError::Address { setting, value: value.to_owned(), problem };
    if let Some(port) = value.strip_prefix(':') {
        let port = port.parse().map_err(|_| bad("the port is not a number up to 65535".into()))?;
        return Ok(crate::rt::tcp::any_interface(port));
    }
    let mut found = value.to_socket_addrs().map_err(|e| bad(e.to_string()))?;
    found.next().ok_or_else(|| bad("the host has no address".into()))
}

/// `--dir`.
pub fn dir_or_default(given: Option<PathBuf>) -> Result<PathBuf, ConfigError> {
    given.or_else(default_dir).ok_or(ConfigError::NoDirectory)
}

/// `--max_size`, in bytes.
pub fn size_or_default(given: Option<u64>, dir: &Path) -> Result<u64, ConfigError> {
    let failed = |problem| ConfigError::Directory { dir: dir.display().to_string(), problem };
    given.map_or_else(|| default_size(dir).map_err(failed), Ok)
}

/// `--cores`.
pub fn cores_or_every(given: Option<&str>) -> Result<CorePlan, ConfigError> {
    given.map_or_else(|| Ok(CorePlan::every_cpu()), |text| Ok(text.parse()?))
}

fn default_dir() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("ringcas"))
}

/// An existing cache keeps its size, to the byte; a new one takes at most half of what is free.
fn default_size(dir: &Path) -> std::io::Result<u64> {
    let mut taken = 0;
    for entry in std::fs::read_dir(dir)? {
        let metadata = entry?.metadata()?;
        taken += if metadata.is_file() { metadata.len() } else { 0 };
    }
    if taken > 0 {
        return Ok(taken);
    }
    Ok(limits::MAX_SIZE_DEFAULT.min(crate::rt::file::free_space(dir)? / 2))
}

/// GiB with fractions, to bytes.
pub fn gib(text: &str) -> Result<u64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number of GiB".to_owned())?;
    if !value.is_finite() || value <= 0.0 || value > (1u64 << 33) as f64 {
        return Err("must be more than 0 GiB".into());
    }
    Ok((value * (1u64 << 30) as f64) as u64)
}

/// Bytes with an optional suffix K, M, G or T (powers of 1024).
fn bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim_end_matches("iB").trim_end_matches('B');
    let (digits, shift) = match trimmed.char_indices().last() {
        Some((at, 'k' | 'K')) => (&trimmed[..at], 10),
        Some((at, 'm' | 'M')) => (&trimmed[..at], 20),
        Some((at, 'g' | 'G')) => (&trimmed[..at], 30),
        Some((at, 't' | 'T')) => (&trimmed[..at], 40),
        _ => (trimmed, 0),
    };
    let value: f64 = digits.parse().map_err(|_| "not a size; write 512M, 4G or a number of bytes".to_owned())?;
    if !value.is_finite() || value < 0.0 || value * (1u64 << shift) as f64 > (1u64 << 60) as f64 {
        return Err("not a size that a machine can have".into());
    }
    Ok((value * (1u64 << shift) as f64) as u64)
}

/// A Go-like duration: `250ms`, `45s`, `5m`, `1h`; a plain number is seconds.
fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let value: f64 = text[..split].parse().map_err(|_| "not a duration; write 250ms, 45s, 5m or 1h".to_owned())?;
    let unit = match &text[split..] {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err("not a duration; write 250ms, 45s, 5m or 1h".into()),
    };
    Duration::try_from_secs_f64(value * unit).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: units are what they say, nonsense is refused. Method: one example for each form.
    #[test]
    fn units() {
        assert_eq!(gib("0.25"), Ok(256 << 20));
        assert!(gib("0").is_err() && gib("-1").is_err() && gib("NaN").is_err() && gib("x").is_err());
        assert_eq!(bytes("512M"), Ok(512 << 20));
        assert_eq!(bytes("1.5G"), Ok(3 << 29));
        assert_eq!(bytes("4096"), Ok(4096));
        assert!(bytes("M").is_err() && bytes("-1").is_err() && bytes("9e99").is_err());
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("7"), Ok(Duration::from_secs(7)));
        assert!(duration("").is_err() && duration("5 parsecs").is_err() && duration("-1s").is_err());
    }

    /// Goal: addresses as bazel-remote takes them. Method: one example for each form.
    #[test]
    fn addresses() {
        assert_eq!(address("--grpc_address", ":9092").map(|a| a.port()).ok(), Some(9092));
        assert_eq!(address("--grpc_address", "127.0.0.1:1").ok(), Some(([127, 0, 0, 1], 1).into()));
        assert_eq!(address("--grpc_address", "[::1]:7").map(|a| a.is_ipv6()).ok(), Some(true));
        let error = address("--grpc_address", "127.0.0.1").expect_err("no port");
        assert!(error.to_string().starts_with("--grpc_address \"127.0.0.1\""), "{error}");
        assert!(address("--grpc_address", ":99999").is_err());
    }

    /// Goal: clap accepts what the README shows. Method: clap's own self-check, and a bool in both forms.
    #[test]
    fn flags() {
        use clap::CommandFactory;
        Flags::command().debug_assert();
        let on = |args: &[&str]| {
            Flags::try_parse_from([&["ringcas"], args].concat()).map(|f| f.enable_ac_key_instance_mangling)
        };
        assert!(on(&["--enable_ac_key_instance_mangling"]).unwrap());
        assert!(!on(&["--enable_ac_key_instance_mangling=false"]).unwrap());
        assert!(!on(&[]).unwrap());
    }

    /// Goal: bazel-remote's variable counts where ours is not set. Method: look at the names after the choice.
    #[test]
    fn variables_of_both_names() {
        let env = |set: &[&str]| {
            let command = with_both_names(Flags::command(), |name| set.contains(&name));
            let arg = command.get_arguments().find(|arg| arg.get_long() == Some("s3.bucket")).cloned();
            arg.and_then(|arg| arg.get_env().map(|name| name.to_string_lossy().into_owned())).unwrap_or_default()
        };
        assert_eq!(env(&[]), "RINGCAS_S3_BUCKET");
        assert_eq!(env(&["BAZEL_REMOTE_S3_BUCKET"]), "BAZEL_REMOTE_S3_BUCKET");
        assert_eq!(env(&["BAZEL_REMOTE_S3_BUCKET", "RINGCAS_S3_BUCKET"]), "RINGCAS_S3_BUCKET");
    }
}
