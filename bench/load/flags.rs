//! The flags, and what stands for those that were not given.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::TypedValueParser;
use clap::{Parser, ValueEnum};

use crate::payload::Sizes;
use crate::target::Target;

/// What to do to the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Scenario {
    /// ByteStream.Write of new blobs.
    Write,
    /// ByteStream.Read of stored blobs, every byte compared.
    Read,
    /// ByteStream.Read, once each, of what a `write` with the same --seed, --count and sizes has stored.
    ReadBack,
    /// FindMissingBlobs, half of the digests present.
    FindMissing,
    /// UpdateActionResult, then GetActionResult; each result names four stored blobs.
    ActionCache,
    /// BatchUpdateBlobs, then BatchReadBlobs.
    Batch,
    /// A build: 70 % reads, 30 % writes, sizes log-normal: median 8 KiB, 99th percentile 4 MiB.
    Mix,
    /// So many Writes at a time of new blobs, each as fast as flow control lets it; with --duration the next begins when
    /// one ends or is refused, and those in flight at the end are cut off.
    Burst,
    /// So many Reads at a time that are never read: their windows are not opened again.
    StalledReaders,
    /// So many Writes at a time that send --pace bytes a second each.
    SlowWriters,
    /// Connections that come, make one call and go: politely, with a reset, or in the middle of a Write.
    Churn,
}

impl Scenario {
    /// Whether its calls last as long as the phase: they are cut off at its end.
    pub fn is_siege(self) -> bool {
        matches!(self, Self::Burst | Self::StalledReaders | Self::SlowWriters)
    }

    /// Whether it takes no fault in a refusal.
    pub fn expects_refusals(self) -> bool {
        self.is_siege() || self == Self::Churn
    }
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
    /// Speak TLS, and trust the authorities in this file (PEM), or the server's own certificate. For gRPC only.
    #[arg(long)]
    pub tls_ca: Option<PathBuf>,
    /// What these two name.
    #[arg(skip)]
    pub target: Target,
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub connections: u32,
    /// Calls in flight on each connection.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub streams: u32,
    /// Calls in flight on all connections together, instead of --streams on each.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub concurrency: Option<u32>,
    /// Bytes of each blob, with an optional KiB, MiB or GiB. Default 4 KiB; burst 4 MiB, stalled-readers and
    /// slow-writers 16 MiB, mix 8 KiB.
    #[arg(long, value_parser = parse_size)]
    pub size: Option<u64>,
    /// Makes sizes log-normal: --size is the median, this the 99th percentile, 64 MiB the most. Default for mix: 4 MiB.
    #[arg(long, value_parser = parse_size)]
    pub size_p99: Option<u64>,
    /// Calls of a timed phase. Default 10000, or no limit when there is a --duration.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Seconds of a timed phase.
    #[arg(long, value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// Open loop: calls a second, each due at its time whatever became of those before. Latencies count from then.
    #[arg(long, value_parser = parse_rate)]
    pub rate: Option<f64>,
    /// Share of the data that zstd can remove: 0 is random data, 0.5 is data that halves.
    #[arg(long, default_value_t = 0.5, value_parser = parse_share)]
    pub compressibility: f64,
    /// Upload and download as compressed-blobs/zstd (batches: with the zstd compressor).
    #[arg(long)]
    pub zstd: bool,
    /// Share of reads in a mix.
    #[arg(long, default_value_t = 0.7, value_parser = parse_share)]
    pub reads: f64,
    /// Digests of each FindMissingBlobs call, blobs of each batch call (as far as 3 MiB go).
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=14_000).map(|n| n as usize))]
    pub digests_per_call: usize,
    /// Distinct blobs that are stored first, where something is read or looked for. Default 1000; stalled-readers 4.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub blobs: Option<u64>,
    /// Bytes of data in each WriteRequest; Bazel sends 16 KiB.
    #[arg(long, default_value = "16KiB", value_parser = parse_size)]
    pub chunk: u64,
    /// Bytes a second of each slow writer, sent once a second.
    #[arg(long, default_value = "1KiB", value_parser = parse_size)]
    pub pace: u64,
    /// Milliseconds before a writer that was refused tries again (burst and slow-writers).
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=60_000))]
    pub refused_pause: u64,
    /// Bytes of payload made before the clock starts; what is beyond is made while it runs.
    #[arg(long, default_value = "2GiB", value_parser = parse_size)]
    pub prepare_max: u64,
    /// REAPI instance name.
    #[arg(long, default_value = "")]
    pub instance: String,
    /// HTTP/2 receive window of each stream; the connection's is 16 times as big. Default 1 MiB; stalled-readers 65535.
    #[arg(long, value_parser = parse_size)]
    pub window: Option<u64>,
    /// The largest DATA frame to accept. gRPC clients in Java and Go take 16 KiB.
    #[arg(long, default_value = "16KiB", value_parser = parse_size)]
    pub frame: u64,
    /// Times to repeat everything; medians at the end.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Process to account for, on this machine: CPU, memory, sockets by state, sampled each second.
    #[arg(long)]
    pub server_pid: Option<u32>,
    /// The server's HTTP address, host:port, for --probe and --slot-cap.
    #[arg(long)]
    pub http_address: Option<String>,
    /// While the load runs, ask for health, a small Read and FindMissingBlobs each 100 ms on a connection of its own,
    /// and with --http-address also for /status on a new connection each time.
    #[arg(long)]
    pub probe: bool,
    /// Burst: read every acknowledged blob back at the end, and see that no refused one exists.
    #[arg(long)]
    pub verify: bool,
    /// The gauge cas_write_slots_inflight of /metrics must never be above this, and 0 at the end.
    #[arg(long, requires = "http_address")]
    pub slot_cap: Option<u64>,
    /// Milliseconds to wait before the server's CPU time, memory and sockets are read, so that what it put off counts.
    #[arg(long, default_value_t = 1500)]
    pub settle: u64,
    /// Seconds after which a call has failed. Default 60; none for calls that last as long as their phase.
    #[arg(long, value_parser = parse_seconds)]
    pub timeout: Option<Duration>,
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

impl Flags {
    /// Completes what depends on other flags.
    pub fn completed(mut self) -> Result<Self, String> {
        if self.count.is_none() && self.duration.is_none() {
            self.count = Some(10_000);
        }
        if matches!(self.scenario, Scenario::StalledReaders | Scenario::SlowWriters) && self.duration.is_none() {
            return Err("stalled-readers and slow-writers last as long as --duration says".to_owned());
        }
        if self.verify && self.scenario != Scenario::Burst {
            return Err("--verify goes with burst; the other scenarios compare what they read anyway".to_owned());
        }
        if self.rate.is_some() && self.scenario.is_siege() {
            return Err("--rate goes with scenarios whose calls end".to_owned());
        }
        self.target = Target::new(&self.address, self.tls_ca.as_deref())?;
        Ok(self)
    }

    pub fn sizes(&self) -> Sizes {
        let (median, p99) = match self.scenario {
            Scenario::Burst => (4 << 20, None),
            Scenario::StalledReaders | Scenario::SlowWriters => (16 << 20, None),
            Scenario::Mix => (8 << 10, Some(4 << 20)),
            _ => (4 << 10, None),
        };
        Sizes::new(self.size.unwrap_or(median), self.size_p99.or(p99.filter(|_| self.size.is_none())))
    }

    pub fn blobs(&self) -> u64 {
        self.blobs.unwrap_or(if self.scenario == Scenario::StalledReaders { 4 } else { 1000 })
    }

    pub fn window(&self) -> u64 {
        self.window.unwrap_or(if self.scenario == Scenario::StalledReaders { 65_535 } else { 1 << 20 })
    }

    pub fn concurrency(&self) -> u32 {
        match self.scenario {
            Scenario::Churn => self.concurrency.unwrap_or(self.connections),
            _ => self.concurrency.unwrap_or(self.connections * self.streams),
        }
    }

    pub fn timeout(&self) -> Duration {
        const DEFAULT: Duration = Duration::from_mins(1);
        self.timeout.unwrap_or_else(|| match self.duration {
            Some(duration) if self.scenario.is_siege() => duration + DEFAULT,
            _ => DEFAULT,
        })
    }
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

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if (0.01..=1e6).contains(&rate) { Ok(rate) } else { Err("want 0.01 to 1000000 calls a second".to_owned()) }
}

fn parse_share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err("want 0 to 1".to_owned()) }
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
        assert!(parse_share("1.1").is_err() && parse_rate("0").is_err() && parse_rate("nan").is_err());
        let flags = Flags::try_parse_from(["load", "find-missing", "--digests-per-call", "14000"]).expect("valid");
        assert_eq!((flags.scenario, flags.digests_per_call), (Scenario::FindMissing, 14_000));
        assert!(Flags::try_parse_from(["load", "find-missing", "--digests-per-call", "0"]).is_err());
        assert!(Flags::try_parse_from(["load", "burst", "--slot-cap", "1"]).is_err(), "nobody to ask for the gauge");
    }

    /// Goal: each scenario has defaults of its own and refuses what it cannot do. Method: examples.
    #[test]
    fn flags_are_completed() {
        let completed = |words: &str| Flags::try_parse_from(words.split(' ')).expect("valid").completed();
        assert_eq!(completed("load write").expect("fine").count, Some(10_000));
        assert_eq!(completed("load write --duration 1").expect("fine").count, None);
        assert_eq!(completed("load burst").expect("fine").sizes(), Sizes::new(4 << 20, None));
        assert_eq!(completed("load mix").expect("fine").sizes(), Sizes::new(8 << 10, Some(4 << 20)));
        assert_eq!(completed("load mix --size 5").expect("fine").sizes(), Sizes::new(5, None));
        let stalled = completed("load stalled-readers --duration 2 --connections 3 --concurrency 10").expect("fine");
        assert_eq!((stalled.concurrency(), stalled.blobs(), stalled.window()), (10, 4, 65_535));
        assert_eq!(stalled.timeout(), Duration::from_secs(62));
        for words in ["stalled-readers", "slow-writers --count 3", "write --verify", "burst --rate 5"] {
            assert!(completed(&format!("load {words}")).is_err(), "{words}");
        }
    }
}
