//! Load generator for any REAPI server: closed loop, one thread, latencies and the server's own CPU time.
//!
//! `bench/README.md` has the method and the commands.

mod client;
mod drive;
mod measure;
mod payload;
#[cfg(test)]
mod peer;
mod report;
mod scenario;
mod wire;

use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use clap::builder::TypedValueParser;
use clap::{Parser, ValueEnum};

/// What to do to the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Scenario {
    /// ByteStream.Write of new blobs.
    Write,
    /// ByteStream.Read of stored blobs, every byte compared.
    Read,
    /// FindMissingBlobs, half of the digests present.
    FindMissing,
    /// UpdateActionResult, then GetActionResult; each result names four stored blobs.
    ActionCache,
    /// BatchUpdateBlobs, then BatchReadBlobs.
    Batch,
    /// 70 % reads, 30 % writes, sizes log-normal: median 8 KiB, 99th percentile 4 MiB.
    Mix,
}

/// Load generator for any REAPI server.
#[derive(Parser, Debug)]
#[command(name = "load", max_term_width = 100)]
pub struct Flags {
    #[arg(value_enum)]
    pub scenario: Scenario,
    /// gRPC address of the server, host:port.
    #[arg(long, default_value = "127.0.0.1:9092")]
    pub address: String,
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub connections: u32,
    /// Calls in flight on each connection.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub streams: u32,
    /// Bytes of each blob, with an optional KiB, MiB or GiB.
    #[arg(long, default_value = "4KiB", value_parser = parse_size)]
    pub size: u64,
    /// Calls of a timed phase. Default 10000, or no limit when there is a --duration.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Seconds of a timed phase.
    #[arg(long, value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// Share of the data that zstd can remove: 0 is random data, 0.5 is data that halves.
    #[arg(long, default_value_t = 0.5, value_parser = parse_share)]
    pub compressibility: f64,
    /// Upload and download as compressed-blobs/zstd (batches: with the zstd compressor).
    #[arg(long)]
    pub zstd: bool,
    /// Digests of each FindMissingBlobs call, blobs of each batch call (as far as 3 MiB go).
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=14_000).map(|n| n as usize))]
    pub digests_per_call: usize,
    /// Distinct blobs that are stored first, where something is read or looked for.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    pub blobs: u64,
    /// Bytes of data in each WriteRequest; Bazel sends 16 KiB.
    #[arg(long, default_value = "16KiB", value_parser = parse_size)]
    pub chunk: u64,
    /// Bytes of payload made before the clock starts; what is beyond is made while it runs.
    #[arg(long, default_value = "2GiB", value_parser = parse_size)]
    pub prepare_max: u64,
    /// REAPI instance name.
    #[arg(long, default_value = "")]
    pub instance: String,
    /// HTTP/2 receive window of each stream; the connection's is 16 times as big.
    #[arg(long, default_value = "1MiB", value_parser = parse_size)]
    pub window: u64,
    /// The largest DATA frame to accept. gRPC clients in Java and Go take 16 KiB.
    #[arg(long, default_value = "16KiB", value_parser = parse_size)]
    pub frame: u64,
    /// Times to repeat everything; medians at the end.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Process to account for, on this machine.
    #[arg(long)]
    pub server_pid: Option<u32>,
    /// Milliseconds to wait before the server's CPU time is read, so that what it put off counts.
    #[arg(long, default_value_t = 1500)]
    pub settle: u64,
    /// Seconds after which a call has failed.
    #[arg(long, default_value = "60", value_parser = parse_seconds)]
    pub timeout: Duration,
    /// Seed of all random choices. Default: new ones for each run.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Appends one JSON object for each phase of each repeat, and one for each median, to this file (- is stdout).
    #[arg(long)]
    pub json: Option<String>,
    /// No progress lines.
    #[arg(long)]
    pub quiet: bool,
    /// `cargo bench` passes this; it means nothing.
    #[arg(long, hide = true)]
    pub bench: bool,
}

fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" | "K" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1 << 30,
        unit => return Err(format!("unit {unit:?}: want KiB, MiB or GiB")),
    };
    let count: u64 = digits.parse().map_err(|error| format!("{digits:?}: {error}"))?;
    count.checked_mul(unit).filter(|&size| size < 1 << 40).ok_or_else(|| "at most 1024 GiB".to_owned())
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if !(0.001..=86_400.0).contains(&seconds) {
        return Err("want 0.001 to 86400 seconds".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn parse_share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err("want 0 to 1".to_owned()) }
}

fn main() -> ExitCode {
    let mut flags = Flags::parse();
    if flags.count.is_none() && flags.duration.is_none() {
        flags.count = Some(10_000);
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("load: cannot start a runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = tokio::task::LocalSet::new().block_on(&runtime, drive::run(Rc::new(flags)));
    match outcome {
        Ok(0) => ExitCode::SUCCESS,
        Ok(errors) => {
            eprintln!("load: {errors} calls failed");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("load: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: flags read as people write them, nonsense is refused. Method: examples.
    #[test]
    fn flags_parse() {
        assert_eq!(parse_size("4KiB"), Ok(4096));
        assert_eq!(parse_size("17"), Ok(17));
        assert!(parse_size("4kb").is_err() && parse_size("-1").is_err() && parse_size("9999999GiB").is_err());
        assert!(parse_seconds("0").is_err() && parse_seconds("nan").is_err());
        assert!(parse_share("1.1").is_err());
        let flags = Flags::try_parse_from(["load", "find-missing", "--digests-per-call", "14000"]).expect("valid");
        assert_eq!((flags.scenario, flags.digests_per_call), (Scenario::FindMissing, 14_000));
        assert!(Flags::try_parse_from(["load", "find-missing", "--digests-per-call", "0"]).is_err());
    }
}
