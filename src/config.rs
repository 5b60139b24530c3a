//! The configuration. A setting is a field of `Flags`, or of a struct that it flattens: its flag, its default, its help.
//! Its environment variables and its key in the file follow from the flag's name (`names`), who gave it its value is kept
//! (`effective`), and settings of bazel-remote that have no meaning here stand in `foreign`. Names and meanings are
//! bazel-remote's where it has one. What comes out is checked and complete; errors name the setting and the remedy.

mod access;
mod backends;
mod derived;
pub mod effective;
mod file;
mod foreign;
pub mod inputs;
mod lifecycle;
mod names;
pub mod print;
mod s3;
mod trust;
pub mod values;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::access::AccessFiles;
use crate::backend::settings::Settings;
use crate::limits;
use crate::metrics::TimeBounds;
use crate::net::tls::TlsFiles;
use crate::rt::cores::{CorePlan, PlanError};
use crate::rt::listen::Address;
use crate::service::shed::ShedStatus;
use crate::shard::{codec, disk, geometry};
pub use lifecycle::Lifecycle;
use values::{address, blob_len, bytes, duration, gib, seconds};

/// Headings of `--help`.
const MEMORY: &str = "Memory and load";
const LOGS: &str = "Logs and metrics";
const HTTP: &str = "HTTP and action results";
const LIFE: &str = "Start, stop and connections";

/// A Bazel remote-cache server: one io_uring executor pinned to each core.
#[derive(Parser, Debug)]
#[command(name = "ringcas", version, rename_all = "snake_case", max_term_width = 110)]
pub struct Flags {
    /// Cache directory; created when missing. Default: $XDG_CACHE_HOME/ringcas, else ~/.cache/ringcas.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Size of the cache on disk in GiB, fractions allowed; never exceeded. Default for a new directory: 10, or half of
    /// the free space when that is less; an existing one keeps its size.
    #[arg(long, value_parser = gib)]
    max_size: Option<u64>,
    /// Where gRPC listens: [host]:port, unix:PATH, or `none`; port 0 picks a free one.
    #[arg(long, default_value = ":9092")]
    grpc_address: String,
    /// Where HTTP listens, for /cas/, /ac/, /metrics and /status: [host]:port, unix:PATH, or `none`; port 0 picks a free
    /// one.
    #[arg(long, default_value = ":8080")]
    http_address: String,
    /// How blobs stand on disk.
    #[arg(long, default_value = "zstd")]
    storage_mode: StorageMode,
    /// Executors: a number, or a list of CPUs such as 0-15. Default: one for each CPU that the process may use.
    #[arg(long)]
    cores: Option<String>,
    /// Memory for messages, reads, decoders and hot records, such as 4G or 512M. Default: half of the machine or the cgroup.
    #[arg(long, help_heading = MEMORY, value_parser = bytes)]
    memory_limit: Option<u64>,
    /// Memory for hot small records, part of the memory limit. Default: a quarter of it.
    #[arg(long, help_heading = MEMORY, value_parser = bytes)]
    ram_cache: Option<u64>,
    /// What an acknowledged upload has reached: the write buffer, the drive, or stable storage.
    #[arg(long, default_value = "buffered")]
    ack: Ack,
    /// HTTP/2 window of each stream in bytes; a connection's is 16 times this. It never grows. [default: 262144]
    #[arg(long, help_heading = MEMORY, value_parser = window())]
    grpc_initial_window_size: Option<u32>,
    /// CAS writes in flight at a time, on all cores; others wait a little and are then refused. Reads, the action cache and
    /// blobs that are present are never gated. Default, also for 0: as many of 464 KiB as the memory limit has room for.
    #[arg(long, help_heading = MEMORY)]
    max_inflight_cas_writes: Option<u32>,
    /// How long a CAS write waits for its turn before it is refused, such as 250ms; at most 60s.
    #[arg(long, help_heading = MEMORY, default_value = "250ms", value_parser = duration)]
    write_queue_wait: Duration,
    /// What a refused CAS write is told.
    #[arg(long, help_heading = MEMORY, default_value = "auto")]
    write_shed_status: WriteShedStatus,
    /// The largest blob that clients may upload, in bytes or such as 512M. Default: what the cache can hold.
    #[arg(long, default_value_t = i64::MAX as u64, hide_default_value = true, value_parser = blob_len)]
    max_blob_size: u64,
    /// How long calls in flight, and then uploads to stores, may take to end after SIGTERM or SIGINT, both together, such as 30s.
    #[arg(long, help_heading = LIFE, default_value = "30s", value_parser = duration)]
    shutdown_timeout: Duration,
    /// One line on stdout for each request, or none.
    #[arg(long, help_heading = LOGS, default_value = "all")]
    access_log_level: AccessLog,
    /// What is logged on stderr: error, warn, info, debug, trace, or a list such as info,ringcas::backend=debug. Default: info; for
    /// tools warn.
    #[arg(long, help_heading = LOGS, value_parser = crate::logging::level)]
    log_level: Option<String>,
    /// Whose time the lines of the log bear.
    #[arg(long, help_heading = LOGS, default_value = "utc", ignore_case = true)]
    log_timezone: LogTimezone,
    /// How long an HTTP request may take to come in, from the end of its head; 0 for as long as 1 KiB/s come on the average.
    #[arg(long, help_heading = HTTP, default_value = "0", value_parser = duration)]
    http_read_timeout: Duration,
    /// How long an HTTP request may take to be answered, from the end of its head; 0 for as long as its client takes 1 KiB/s on the
    /// average.
    #[arg(long, help_heading = HTTP, default_value = "0", value_parser = duration)]
    http_write_timeout: Duration,
    /// Serve /metrics on the HTTP port.
    #[arg(long, help_heading = LOGS, default_value_t = true)]
    enable_endpoint_metrics: bool,
    /// Upper bounds of the buckets of grpc_server_handling_seconds and http_request_duration_seconds, in seconds; without it
    /// from 0.1 ms to 320 s.
    #[arg(long, help_heading = LOGS, value_delimiter = ',', num_args = 1, value_parser = seconds)]
    endpoint_metrics_duration_buckets: Vec<f64>,
    /// What the names of metrics start with, but for grpc_server_*, http_* and process_*.
    #[arg(long, help_heading = LOGS, default_value = "bazel_remote")]
    metrics_prefix: MetricsPrefix,
    /// Let the names of http_* metrics start with the prefix too.
    #[arg(long, help_heading = LOGS)]
    http_metrics_prefix: bool,
    /// Let /ac/ on the HTTP port take and give any bytes, as ccache needs it: not ActionResults that are checked.
    #[arg(long, help_heading = HTTP)]
    disable_http_ac_validation: bool,
    /// Give action results to gRPC clients without a look at whether their blobs are there.
    #[arg(long, help_heading = HTTP)]
    disable_grpc_ac_deps_check: bool,
    /// Keep action results of different instance names apart.
    #[arg(long, help_heading = HTTP)]
    enable_ac_key_instance_mangling: bool,
    /// A file in YAML that names flags and their values. What is given by flag or environment goes before it.
    #[arg(long)]
    config_file: Option<PathBuf>,
    #[command(flatten)]
    access: access::AccessFlags,
    #[command(flatten)]
    lifecycle: lifecycle::LifecycleFlags,
    #[command(flatten)]
    s3: s3::S3Flags,
    #[command(flatten)]
    trust: trust::TrustFlags,
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
    /// As RESOURCE_EXHAUSTED.
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

/// `--log_timezone`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogTimezone {
    Utc,
    /// That of the machine, or of TZ.
    Local,
    /// No time at all.
    None,
}

/// The checked configuration.
#[derive(Debug, Clone)]
pub struct Config {
    pub dir: PathBuf,
    /// Bytes on disk.
    pub max_size: u64,
    /// `None` when gRPC is switched off.
    pub grpc_address: Option<Address>,
    /// `None` when HTTP is switched off. Not both.
    pub http_address: Option<Address>,
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
    /// `None` for what is usual.
    pub log_level: Option<String>,
    /// Of an HTTP request and of its answer; zero for no limit.
    pub http_read_timeout: Duration,
    pub http_write_timeout: Duration,
    pub endpoint_metrics: bool,
    pub time_bounds: TimeBounds,
    pub metrics_prefix: MetricsPrefix,
    /// It stands before the names of http_* metrics too.
    pub http_metrics_prefix: bool,
    pub mangle_action_keys: bool,
    pub check_http_actions: bool,
    /// An action result is there only with its blobs.
    pub check_actions: bool,
    pub lifecycle: Lifecycle,
    /// `None` where there is no backend.
    pub backends: Option<Settings>,
    /// `None` where connections are not encrypted.
    pub tls: Option<TlsFiles>,
    pub access: AccessFiles,
    /// Without access control everybody may purge.
    pub open_purges: bool,
    /// `None` where calls say nothing of tenants.
    pub trusted_callers: Option<trust::TrustedCallers>,
}

/// A setting that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{setting} {value:?}: {problem}. Give [host]:port, such as :9092 or 127.0.0.1:9092, or unix:PATH")]
    Address { setting: &'static str, value: String, problem: String },
    #[error("--cores: {0}")]
    Cores(#[from] PlanError),
    #[error("--dir: neither it nor XDG_CACHE_HOME nor HOME is set. Give --dir a directory on a local file system")]
    NoDirectory,
    #[error(
        "--grpc_address and --http_address are both `none`, so that nobody could be served. Give one of them an address"
    )]
    NoAddress,
    #[error("--dir {dir}: {problem}. Give --dir a directory that this user may write")]
    Directory { dir: String, problem: std::io::Error },
    #[error(
        "--max_size is not set, and half of what is free in {dir} are {bytes} bytes: the smallest cache that works has {min} \
             (64 MiB). Make room, or set --max_size",
        min = limits::MAX_SIZE_MIN
    )]
    NoRoom { dir: String, bytes: u64 },
    #[error("--ram_cache ({ram_cache} bytes) is more than half of --memory_limit ({memory_limit} bytes). Lower it")]
    RamCache { ram_cache: u64, memory_limit: u64 },
    #[error("--write_queue_wait: {0:?} is too long. Give at most {max:?}", max = limits::WRITE_QUEUE_WAIT_MAX)]
    WriteQueueWait(Duration),
    #[error("--memory_limit: {0} bytes is too little. Give at least {min}M", min = limits::MEMORY_LIMIT_MIN >> 20)]
    MemoryLimit(u64),
    #[error("{0}")]
    CommandLine(#[from] clap::Error),
    #[error("{place} {value:?}: {problem}")]
    Value { place: String, value: String, problem: String },
    #[error("there is no variable {name}; did you mean {nearest}?")]
    UnknownVariable { name: String, nearest: String },
    #[error("{place}: {reason}")]
    Refused { place: String, reason: &'static str },
    #[error(transparent)]
    File(#[from] file::FileError),
    #[error(transparent)]
    S3(#[from] s3::S3Error),
    #[error("--endpoint_metrics_duration_buckets: {0}")]
    Buckets(String),
    #[error(transparent)]
    Access(#[from] access::AccessError),
    #[error(transparent)]
    Trust(#[from] trust::TrustError),
}

impl Flags {
    /// `--log_level` and `--log_timezone`: wanted before anything can be said.
    pub fn log(&self) -> (Option<&str>, LogTimezone) {
        (self.log_level.as_deref(), self.log_timezone)
    }

    /// Checks every setting and fills in the defaults that depend on the machine.
    pub fn resolve(self) -> Result<Config, ConfigError> {
        let dir = dir_or_default(self.dir)?;
        let max_size = size_or_default(self.max_size, &dir)?;
        let memory_limit = self.memory_limit.unwrap_or_else(|| crate::rt::cores::memory_available().0 / 2);
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
        let (tls, access, open_purges) = self.access.resolve()?;
        let address_or_none =
            |setting, value: &str| if value == "none" { Ok(None) } else { address(setting, value).map(Some) };
        let grpc_address = address_or_none("--grpc_address", &self.grpc_address)?;
        let http_address = address_or_none("--http_address", &self.http_address)?;
        if grpc_address.is_none() && http_address.is_none() {
            return Err(ConfigError::NoAddress);
        }
        let trusted_callers = self.trust.resolve(backends.as_ref().is_some_and(|settings| settings.has_map))?;
        Ok(Config {
            tls,
            access,
            open_purges,
            trusted_callers,
            write_slots: write_slots_wanted,
            write_queue_wait: self.write_queue_wait,
            write_shed_status: self.write_shed_status,
            lifecycle: self.lifecycle.resolve(),
            backends,
            grpc_address,
            http_address,
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
            log_level: self.log_level,
            http_read_timeout: self.http_read_timeout,
            http_write_timeout: self.http_write_timeout,
            endpoint_metrics: self.enable_endpoint_metrics,
            time_bounds: match &self.endpoint_metrics_duration_buckets[..] {
                [] => TimeBounds::default(),
                bounds => TimeBounds::of_seconds(bounds).map_err(ConfigError::Buckets)?,
            },
            metrics_prefix: self.metrics_prefix,
            http_metrics_prefix: self.http_metrics_prefix,
            mangle_action_keys: self.enable_ac_key_instance_mangling,
            check_http_actions: !self.disable_http_ac_validation,
            check_actions: !self.disable_grpc_ac_deps_check,
        })
    }
}

fn window() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(65_535..=16 << 20)
}

/// `--dir`.
pub fn dir_or_default(given: Option<PathBuf>) -> Result<PathBuf, ConfigError> {
    given.or_else(default_dir).ok_or(ConfigError::NoDirectory)
}

/// `--max_size`, in bytes.
pub fn size_or_default(given: Option<u64>, dir: &Path) -> Result<u64, ConfigError> {
    if let Some(given) = given {
        return Ok(given);
    }
    let dir_text = || dir.display().to_string();
    let bytes = default_size(dir).map_err(|problem| ConfigError::Directory { dir: dir_text(), problem })?;
    if bytes < limits::MAX_SIZE_MIN { Err(ConfigError::NoRoom { dir: dir_text(), bytes }) } else { Ok(bytes) }
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

/// An existing cache keeps its size; a new one takes at most half of what is free.
fn default_size(dir: &Path) -> std::io::Result<u64> {
    match geometry::kept_size(dir)? {
        Some(kept) => Ok(kept),
        None => Ok(limits::MAX_SIZE_DEFAULT.min(crate::rt::file::free_space(dir)? / 2)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: clap accepts the table. Method: clap's own self-check.
    #[test]
    fn the_table_is_sound() {
        use clap::CommandFactory;
        Flags::command().debug_assert();
    }
}
