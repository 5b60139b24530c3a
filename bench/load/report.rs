//! The result: a table for people, JSON lines for machines, both from one list of figures.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{self, Write};

use crate::Flags;
use crate::drive::RunError;
use crate::measure::{Histogram, Tally, median};

/// What the server used for a phase.
#[derive(Clone, Copy)]
pub struct Usage {
    pub cpu_s: f64,
    pub rss_kib: u64,
    /// Since the process started.
    pub rss_peak_kib: u64,
}

/// What came out of one phase.
pub struct PhaseReport {
    pub name: &'static str,
    pub repeat: u32,
    pub wall_s: f64,
    pub kinds: BTreeMap<&'static str, Tally>,
    pub digests: u64,
    pub usage: Option<Usage>,
    pub client_cpu_s: f64,
}

/// A figure: its JSON name, its value.
type Figure = (&'static str, f64);

impl PhaseReport {
    fn errors(&self) -> u64 {
        self.kinds.values().map(Tally::error_count).sum()
    }

    /// Every figure of the phase. Not a number where it has no meaning.
    fn figures(&self) -> Vec<Figure> {
        let ops: u64 = self.kinds.values().map(|tally| tally.ops).sum();
        let bytes: u64 = self.kinds.values().map(|tally| tally.bytes).sum();
        let (fine, gigabytes) = ((ops - self.errors()) as f64, bytes as f64 / 1e9);
        let over = |value: f64, by: f64| if by > 0.0 { value / by } else { f64::NAN };
        let mut latency = Histogram::default();
        self.kinds.values().for_each(|tally| latency.merge(&tally.latency));
        let mut figures = vec![
            ("ops", ops as f64),
            ("errors", self.errors() as f64),
            ("payload_bytes", bytes as f64),
            ("wall_s", self.wall_s),
            ("ops_per_s", over(ops as f64, self.wall_s)),
            ("payload_mb_per_s", over(bytes as f64 / 1e6, self.wall_s)),
        ];
        figures.extend(latencies(&latency));
        figures.push(("client_cpu_us_per_op", over(self.client_cpu_s * 1e6, fine)));
        if let Some(usage) = self.usage {
            figures.extend([
                ("server_cpu_s", usage.cpu_s),
                ("server_cpu_us_per_op", over(usage.cpu_s * 1e6, fine)),
                ("server_cpu_s_per_gb", over(usage.cpu_s, gigabytes)),
                ("server_cpu_ms_per_1000_digests", over(usage.cpu_s * 1e6, self.digests as f64)),
                ("server_rss_mib", usage.rss_kib as f64 / 1024.0),
                ("server_rss_peak_mib", usage.rss_peak_kib as f64 / 1024.0),
            ]);
        }
        figures
    }
}

fn latencies(latency: &Histogram) -> [Figure; 4] {
    let us = |ns: u64| ns as f64 / 1e3;
    [
        ("latency_p50_us", us(latency.quantile(0.5))),
        ("latency_p90_us", us(latency.quantile(0.9))),
        ("latency_p99_us", us(latency.quantile(0.99))),
        ("latency_max_us", us(latency.max())),
    ]
}

/// The columns of the table: heading, figure, digits after the point, divisor.
const COLUMNS: [(&str, &str, usize, f64); 14] = [
    ("calls", "ops", 0, 1.0),
    ("errors", "errors", 0, 1.0),
    ("wall s", "wall_s", 2, 1.0),
    ("calls/s", "ops_per_s", 0, 1.0),
    ("MB/s", "payload_mb_per_s", 1, 1.0),
    ("p50 ms", "latency_p50_us", 2, 1e3),
    ("p90 ms", "latency_p90_us", 2, 1e3),
    ("p99 ms", "latency_p99_us", 2, 1e3),
    ("max ms", "latency_max_us", 1, 1e3),
    ("srv us/op", "server_cpu_us_per_op", 1, 1.0),
    ("srv s/GB", "server_cpu_s_per_gb", 2, 1.0),
    ("ms/1000dg", "server_cpu_ms_per_1000_digests", 3, 1.0),
    ("peak MiB", "server_rss_peak_mib", 0, 1.0),
    ("cli us/op", "client_cpu_us_per_op", 1, 1.0),
];

/// Gathers the phases of all repeats.
pub struct Report {
    json: Option<Box<dyn Write>>,
    /// Members of each JSON object that say how the run was made.
    settings: String,
    repeats: u32,
    errors: u64,
    /// Figures of each timed phase, in the order of the scenario.
    phases: Vec<(&'static str, Vec<Vec<Figure>>)>,
}

impl Report {
    pub fn new(flags: &Flags, seed: u64) -> Result<Self, RunError> {
        let json: Option<Box<dyn Write>> = match flags.json.as_deref() {
            None => None,
            Some("-") => Some(Box::new(io::stdout())),
            Some(path) => Some(Box::new(OpenOptions::new().create(true).append(true).open(path)?)),
        };
        let mut settings = String::new();
        let scenario = format!("{:?}", flags.scenario);
        let _ = write!(settings, "\"scenario\":{},\"address\":{}", quoted(&scenario), quoted(&flags.address));
        for (name, value) in [
            ("connections", u64::from(flags.connections)),
            ("streams", u64::from(flags.streams)),
            ("size", flags.size),
            ("chunk", flags.chunk),
            ("blobs", flags.blobs),
            ("digests_per_call", flags.digests_per_call as u64),
            ("window", flags.window),
            ("frame", flags.frame),
            ("seed", seed),
        ] {
            let _ = write!(settings, ",\"{name}\":{value}");
        }
        let _ = write!(settings, ",\"compressibility\":{},\"zstd\":{}", flags.compressibility, flags.zstd);
        eprintln!("load: {scenario} at {} with seed {seed}", flags.address);
        let mut heading = format!("{:<14} {:>6}", "phase", "repeat");
        COLUMNS.iter().for_each(|(name, ..)| _ = write!(heading, " {name:>9}"));
        println!("{heading}");
        Ok(Self { json, settings, repeats: flags.repeat, errors: 0, phases: Vec::new() })
    }

    pub fn add(&mut self, done: PhaseReport) -> Result<(), RunError> {
        let figures = done.figures();
        self.errors += done.errors();
        self.print(done.name, &done.repeat.to_string(), &figures);
        let mut kinds = String::new();
        for (kind, tally) in &done.kinds {
            if done.kinds.len() > 1 {
                let latency = latencies(&tally.latency);
                let line = latency.map(|(name, us)| format!("{} {:.2} ms", &name[8..name.len() - 3], us / 1e3));
                println!("  {kind}: {} calls, {}", tally.ops, line.join(", "));
            }
            for (code, (count, text)) in &tally.errors {
                println!("  {kind}: {count} x {code}, first: {text}");
            }
            let errors = tally.errors.iter().map(|(code, (count, text))| {
                format!("{}:{{\"count\":{count},\"first\":{}}}", quoted(code), quoted(text))
            });
            let errors = errors.collect::<Vec<_>>().join(",");
            let head = if kinds.is_empty() { "" } else { "," };
            let counts = format!("\"ops\":{},\"payload_bytes\":{}", tally.ops, tally.bytes);
            let latency = members(&latencies(&tally.latency));
            let _ = write!(kinds, "{head}{}:{{{counts}{latency},\"errors\":{{{errors}}}}}", quoted(kind));
        }
        self.write_json(done.name, &done.repeat.to_string(), &figures, &format!(",\"kinds\":{{{kinds}}}"))?;
        match self.phases.iter_mut().find(|(name, _)| *name == done.name) {
            Some((_, repeats)) => repeats.push(figures),
            None => self.phases.push((done.name, vec![figures])),
        }
        Ok(())
    }

    /// Prints the medians of all repeats. Returns how many calls failed.
    pub fn finish(mut self) -> Result<u64, RunError> {
        if self.repeats > 1 {
            for (name, repeats) in std::mem::take(&mut self.phases) {
                let middle = |i: usize| median(&mut repeats.iter().map(|figures| figures[i].1).collect::<Vec<_>>());
                let figures: Vec<Figure> =
                    repeats[0].iter().enumerate().map(|(i, (key, _))| (*key, middle(i))).collect();
                self.print(name, "median", &figures);
                self.write_json(name, "\"median\"", &figures, "")?;
            }
        }
        if let Some(json) = &mut self.json {
            json.flush()?;
        }
        Ok(self.errors)
    }

    fn print(&self, name: &str, repeat: &str, figures: &[Figure]) {
        let mut line = format!("{name:<14} {repeat:>6}");
        for (_, key, digits, divisor) in COLUMNS {
            let _ = match figures.iter().find(|(name, value)| *name == key && value.is_finite()) {
                Some((_, value)) => write!(line, " {:>9.digits$}", value / divisor),
                None => write!(line, " {:>9}", "-"),
            };
        }
        println!("{line}");
    }

    fn write_json(&mut self, phase: &str, repeat: &str, figures: &[Figure], more: &str) -> io::Result<()> {
        let Some(json) = &mut self.json else { return Ok(()) };
        let head = format!("{},\"phase\":{},\"repeat\":{repeat}", self.settings, quoted(phase));
        writeln!(json, "{{{head}{}{more}}}", members(figures))
    }
}

/// `,"name":value` for each finite figure.
fn members(figures: &[Figure]) -> String {
    let mut out = String::new();
    for (name, value) in figures.iter().filter(|(_, value)| value.is_finite()) {
        let _ = write!(out, ",\"{name}\":{}", (value * 1e4).round() / 1e4);
    }
    out
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        let _ = match c {
            '"' | '\\' => write!(out, "\\{c}"),
            c if c < ' ' => write!(out, "\\u{:04x}", u32::from(c)),
            c => write!(out, "{c}"),
        };
    }
    out + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: texts from a server cannot break the JSON. Method: the characters that must be escaped.
    #[test]
    fn strings_are_escaped() {
        assert_eq!(quoted("a\"b\\c\nd\u{e9}"), "\"a\\\"b\\\\c\\u000ad\u{e9}\"");
    }

    /// Goal: figures without meaning are left out. Method: one of each.
    #[test]
    fn members_are_finite() {
        assert_eq!(members(&[("a", 1.0), ("b", f64::NAN), ("c", 0.123_456)]), ",\"a\":1,\"c\":0.1235");
    }
}
