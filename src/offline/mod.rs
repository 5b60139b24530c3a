//! Tools that work on a cache directory while no server runs on it: `check`, `stats`, `import`.
//!
//! They hold the directory's lock, run on executors as the server does, and read what stands there with the same code as
//! a start.

mod check;
mod content;
mod crew;
mod files;
mod findings;
pub mod flags;
mod import;
mod repair;
mod report;
mod survey;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::config::ConfigError;
use crate::rt::cores::{CoreDied, StartError};
use crate::shard::geometry::OpenError;
use crate::store::StoreError;
use flags::Tool;

/// Why a tool did not come to an end.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("cannot watch for SIGTERM and SIGINT: {0}")]
    Signals(std::io::Error),
    #[error(transparent)]
    CoreDied(#[from] CoreDied),
    #[error("cannot read or write the data files: {0}; check --dir and the drive")]
    Data(#[from] std::io::Error),
    #[error("cannot print the report: {0}")]
    Print(std::io::Error),
    #[error("stopped by a signal before the end")]
    Stopped,
    #[error("--from {path}: {source}; give the directory of a bazel-remote that has been stopped", path = path.display())]
    Source { path: PathBuf, source: std::io::Error },
    #[error(
        "--from {from} holds none of cas.v2, ac.v2, raw.v2; give the directory that bazel-remote was started with",
        from = from.display()
    )]
    NoSource { from: PathBuf },
    #[error(
        "--dir {into} and --from {from} lie in one another; give --dir a directory of its own",
        into = into.display(), from = from.display()
    )]
    SameDirectory { from: PathBuf, into: PathBuf },
    #[error("nothing more can be stored: {0}; check --dir and the drive, then run the import again: it goes on")]
    Store(StoreError),
}

/// How a tool that came to its end found things.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Fine,
    /// There is something that the operator should look at.
    Flawed,
}

/// Exit code of a tool that did not come to its end, as for a wrong command line.
const EXIT_FAILURE: u8 = 2;

/// Runs a tool: 0 when all is fine, 1 when the report has bad news, 2 when there is no whole report.
pub fn run(tool: Tool) -> ExitCode {
    let verdict = match tool {
        Tool::Check(check) => check::check(&check),
        Tool::Stats(stats) => check::stats(&stats),
        Tool::Import(import) => import::import(&import),
    };
    match verdict {
        Ok(Verdict::Fine) => ExitCode::SUCCESS,
        Ok(Verdict::Flawed) => ExitCode::from(1),
        Err(failure) => {
            tracing::error!("{failure}");
            ExitCode::from(EXIT_FAILURE)
        }
    }
}

fn print(text: &str) -> Result<(), Failure> {
    std::io::stdout().write_all(text.as_bytes()).map_err(Failure::Print)
}
