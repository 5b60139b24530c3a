//! The command lines of the tools.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use crate::config::values::gib;
use crate::config::{self, ConfigError, StorageMode};
use crate::rt::cores::CorePlan;

/// Works on a cache directory that no server runs on.
#[derive(Subcommand, Debug)]
pub enum Tool {
    /// Verify every record of a cache directory; exit code 1 when something is broken.
    Check(Check),
    /// Say what a cache directory holds.
    Stats(Stats),
    /// Take over the directory of a bazel-remote that has been stopped; exit code 1 when files were skipped that should
    /// not be there as they are.
    Import(Import),
}

/// Which directory, and how many cores.
#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub struct Place {
    /// Cache directory. Default: as for the server.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Threads: a number, or a list of CPUs such as 0-15. Default: one for each CPU that the process may use.
    #[arg(long)]
    cores: Option<String>,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub struct Check {
    #[command(flatten)]
    pub place: Place,
    /// Drop what is broken, so that the server and the next check find a whole directory.
    #[arg(long)]
    pub repair: bool,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub struct Stats {
    #[command(flatten)]
    pub place: Place,
    /// Print the figures as JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub struct Import {
    /// Directory of a bazel-remote that has been stopped; it is only read.
    #[arg(long)]
    pub from: PathBuf,
    #[command(flatten)]
    pub place: Place,
    /// Size of the cache in GiB, as for the server. When not everything fits, what was used last is taken.
    #[arg(long, value_parser = gib)]
    max_size: Option<u64>,
    /// How blobs stand on disk, as for the server.
    #[arg(long, default_value = "zstd")]
    pub storage_mode: StorageMode,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

impl Import {
    /// The size of the cache in `dir`, in bytes.
    pub fn max_size(&self, dir: &Path) -> Result<u64, ConfigError> {
        config::size_or_default(self.max_size, dir)
    }
}

impl Place {
    pub fn dir(&self) -> Result<PathBuf, ConfigError> {
        config::dir_or_default(self.dir.clone())
    }

    pub fn cores(&self) -> Result<CorePlan, ConfigError> {
        config::cores_or_every(self.cores.as_deref())
    }
}
