//! The result: a table for people, JSON lines for machines, both from one list of figures.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{self, Write};

use crate::drive::RunError;
use crate::flags::Flags;
use crate::measure::{Codes, Histogram, Tally, median};
use crate::process::Sample;
use crate::verify::Verdict;

/// What the server used for a phase.
#[derive(Clone, Copy)]
pub struct Usage {
    pub cpu_s: f64,
    pub rss_kib: u64,
    /// Since the process started.
    pub rss_peak_kib: u64,
}

/// Calls that were cut off at the end of a siege.
#[derive(Default)]
pub struct Unfinished {
    pub calls: u64,
    /// Those of them that the server had not begun to take, or to answer.
    pub unbegun: u64,
    /// Those of them that nothing had moved on for ten seconds.
    pub stuck: u64,
}

/// What came out of one phase.
pub struct PhaseReport {
    pub name: &'static str,
    pub repeat: u32,
    pub wall_s: f64,
    pub kinds: BTreeMap<&'static str, Tally>,
    pub digests: u64,
    pub unfinished: Unfinished,
    pub usage: Option<Usage>,
    pub client_cpu_s: f64,
    pub samples: Vec<Sample>,
    pub probes: BTreeMap<&'static str, Tally>,
    pub slot_cap: Option<u64>,
    /// The gauge of write slots: the highest that was seen, and at the end.
    pub slots_max: Option<f64>,
    pub slots_after: Option<f64>,
    pub verdict: Option<Verdict>,
}

/// A figure: its JSON name, its value.
type Figure = (&'static str, f64);

impl PhaseReport {
    fn errors(&self) -> u64 {
        self.kinds.values().map(Tally::error_count).sum()
    }

    /// What must not be: each with a count.
    fn faults(&self) -> Vec<(String, u64)> {
        let mut faults = Vec::new();
        for (name, tally) in &self.probes {
            faults.push((format!("probes of {name} failed"), tally.error_count()));
        }
        if let Some(verdict) = &self.verdict {
            faults.push((
                "acknowledged blobs that are not as sent, or refused ones that exist".to_owned(),
                verdict.fault_count(),
            ));
        }
        if let Some(cap) = self.slot_cap {
            let is_above = self.slots_max.is_none_or(|max| max > cap as f64);
            faults.push((format!("more than {cap} write slots were taken, or nobody says"), u64::from(is_above)));
            let is_left = self.slots_after != Some(0.0);
            faults.push(("write slots are taken at the end, or nobody says".to_owned(), u64::from(is_left)));
        }
        faults.retain(|(_, count)| *count > 0);
        faults
    }

    /// Every figure of the phase. Not a number where it has no meaning.
    fn figures(&self) -> Vec<Figure> {
        let sum = |of: fn(&Tally) -> u64| self.kinds.values().map(of).sum::<u64>();
        let (ops, bytes, refused) = (sum(|tally| tally.ops), sum(|tally| tally.bytes), sum(Tally::refusal_count));
        let (fine, gigabytes) = ((ops - refused - self.errors()) as f64, bytes as f64 / 1e9);
        let over = |value: f64, by: f64| if by > 0.0 { value / by } else { f64::NAN };
        let mut latency = Histogram::default();
        self.kinds.iter().filter(|(kind, _)| **kind != "refused").for_each(|(_, tally)| latency.merge(&tally.latency));
        let mut figures = vec![
            ("ops", ops as f64),
            ("errors", self.errors() as f64),
            ("refused", refused as f64),
            ("payload_bytes", bytes as f64),
            ("wall_s", self.wall_s),
            ("ops_per_s", over(ops as f64, self.wall_s)),
            ("payload_mb_per_s", over(bytes as f64 / 1e6, self.wall_s)),
        ];
        figures.extend(latencies(&latency));
        figures.extend([
            ("unfinished", self.unfinished.calls as f64),
            ("unfinished_unbegun", self.unfinished.unbegun as f64),
            ("unfinished_stuck", self.unfinished.stuck as f64),
            ("client_cpu_us_per_op", over(self.client_cpu_s * 1e6, fine)),
        ]);
        if let Some(usage) = self.usage {
            let sampled = self.samples.iter().map(|sample| sample.process.rss_kib).max();
            figures.extend([
                ("server_cpu_s", usage.cpu_s),
                ("server_cpu_us_per_op", over(usage.cpu_s * 1e6, fine)),
                ("server_cpu_s_per_gb", over(usage.cpu_s, gigabytes)),
                ("server_cpu_ms_per_1000_digests", over(usage.cpu_s * 1e6, self.digests as f64)),
                ("server_rss_mib", usage.rss_kib as f64 / 1024.0),
                ("server_rss_peak_mib", usage.rss_peak_kib as f64 / 1024.0),
                ("server_rss_sampled_max_mib", sampled.map_or(f64::NAN, |kib| kib as f64 / 1024.0)),
            ]);
        }
        for (name, value) in [("write_slots_max", self.slots_max), ("write_slots_after", self.slots_after)] {
            figures.push((name, value.unwrap_or(f64::NAN)));
        }
        if let Some(verdict) = &self.verdict {
            figures.extend([
                ("verified_intact", verdict.intact as f64),
                ("verified_faults", verdict.fault_count() as f64),
                ("verified_refused", verdict.refused as f64),
            ]);
        }
        figures
    }

    /// Members of the JSON object beside the figures.
    fn details(&self) -> String {
        let mut out = format!(",\"kinds\":{},\"probes\":{}", tallies(&self.kinds), tallies(&self.probes));
        let faults = self.faults().into_iter().map(|(what, count)| format!("{}:{count}", quoted(&what)));
        let _ = write!(out, ",\"faults\":{{{}}}", faults.collect::<Vec<_>>().join(","));
        if let Some(verdict) = &self.verdict {
            let _ = write!(
                out,
                ",\"verdict\":{{\"intact\":{},\"lost\":{},\"acknowledged_missing\":{},\"refused\":{},\"refused_present\":{}}}",
                verdict.intact,
                codes(&verdict.lost),
                verdict.acknowledged_missing,
                verdict.refused,
                verdict.refused_present
            );
        }
        let samples = self.samples.iter().map(|sample| {
            let sockets = sample.sockets.iter().map(|(state, count)| format!("{}:{count}", quoted(state)));
            format!(
                "{{\"at_s\":{:.2},\"rss_mib\":{:.1},\"cpu_s\":{:.2},\"sockets\":{{{}}}}}",
                sample.at_s,
                sample.process.rss_kib as f64 / 1024.0,
                sample.process.cpu_s,
                sockets.collect::<Vec<_>>().join(",")
            )
        });
        let _ = write!(out, ",\"samples\":[{}]", samples.collect::<Vec<_>>().join(","));
        out
    }
}

/// A JSON object with a member for each tally.
fn tallies(tallies: &BTreeMap<&'static str, Tally>) -> String {
    let each = tallies.iter().map(|(name, tally)| {
        format!(
            "{}:{{\"ops\":{},\"payload_bytes\":{}{},\"errors\":{},\"refusals\":{}}}",
            quoted(name),
            tally.ops,
            tally.bytes,
            members(&latencies(&tally.latency)),
            codes(&tally.errors),
            codes(&tally.refusals)
        )
    });
    format!("{{{}}}", each.collect::<Vec<_>>().join(","))
}

fn codes(codes: &Codes) -> String {
    let each = codes
        .iter()
        .map(|(code, (count, text))| format!("{}:{{\"count\":{count},\"first\":{}}}", quoted(code), quoted(text)));
    format!("{{{}}}", each.collect::<Vec<_>>().join(","))
}

fn latencies(latency: &Histogram) -> [Figure; 5] {
    let us = |ns: u64| ns as f64 / 1e3;
    [
        ("latency_p50_us", us(latency.quantile(0.5))),
        ("latency_p90_us", us(latency.quantile(0.9))),
        ("latency_p99_us", us(latency.quantile(0.99))),
        ("latency_p999_us", us(latency.quantile(0.999))),
        ("latency_max_us", us(latency.max())),
    ]
}

/// The columns of the table: heading, figure, digits after the point, divisor.
const COLUMNS: [(&str, &str, usize, f64); 16] = [
    ("calls", "ops", 0, 1.0),
    ("errors", "errors", 0, 1.0),
    ("refused", "refused", 0, 1.0),
    ("wall s", "wall_s", 2, 1.0),
    ("calls/s", "ops_per_s", 0, 1.0),
    ("MB/s", "payload_mb_per_s", 1, 1.0),
    ("p50 ms", "latency_p50_us", 2, 1e3),
    ("p90 ms", "latency_p90_us", 2, 1e3),
    ("p99 ms", "latency_p99_us", 2, 1e3),
    ("p99.9 ms", "latency_p999_us", 2, 1e3),
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
        let _ = write!(settings, ",\"tls\":{}", flags.tls_ca.is_some());
        for (name, value) in [
            ("connections", u64::from(flags.connections)),
            ("streams", u64::from(flags.streams)),
            ("concurrency", u64::from(flags.concurrency())),
            ("size", flags.sizes().median()),
            ("chunk", flags.chunk),
            ("blobs", flags.blobs()),
            ("digests_per_call", flags.digests_per_call as u64),
            ("window", flags.window()),
            ("frame", flags.frame),
            ("seed", seed),
        ] {
            let _ = write!(settings, ",\"{name}\":{value}");
        }
        let _ = write!(settings, ",\"compressibility\":{},\"zstd\":{}", flags.compressibility, flags.zstd);
        if let Some(rate) = flags.rate {
            let _ = write!(settings, ",\"rate\":{rate}");
        }
        eprintln!("load: {scenario} at {} with seed {seed}", flags.address);
        let mut heading = format!("{:<14} {:>6}", "phase", "repeat");
        COLUMNS.iter().for_each(|(name, ..)| _ = write!(heading, " {name:>9}"));
        println!("{heading}");
        Ok(Self { json, settings, repeats: flags.repeat, errors: 0, phases: Vec::new() })
    }

    pub fn add(&mut self, done: PhaseReport) -> Result<(), RunError> {
        let figures = done.figures();
        self.errors += done.errors() + done.faults().iter().map(|(_, count)| count).sum::<u64>();
        self.print(done.name, &done.repeat.to_string(), &figures);
        print_details(&done);
        self.write_json(done.name, &done.repeat.to_string(), &figures, &done.details())?;
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

/// The lines below the table's line.
fn print_details(done: &PhaseReport) {
    let kinds = done.kinds.iter().map(|(name, tally)| (String::from(*name), tally));
    let probes = done.probes.iter().map(|(name, tally)| (format!("probe {name}"), tally));
    let is_alone = done.kinds.len() == 1;
    for (name, tally) in kinds.chain(probes) {
        if !is_alone || name.starts_with("probe ") {
            let latency =
                latencies(&tally.latency).map(|(name, us)| format!("{} {:.2} ms", &name[8..name.len() - 3], us / 1e3));
            println!("  {name}: {} calls, {}", tally.ops, latency.join(", "));
        }
        for (code, (count, text)) in tally.errors.iter().chain(&tally.refusals) {
            println!("  {name}: {count} x {code}, first: {text}");
        }
    }
    let Unfinished { calls, unbegun, stuck } = done.unfinished;
    if calls > 0 {
        println!("  cut off at the end: {calls}; not begun: {unbegun}; nothing moved for 10 s: {stuck}");
    }
    if let Some(last) = done.samples.last() {
        let sockets =
            last.sockets.iter().map(|(state, count)| format!("{state} {count}")).collect::<Vec<_>>().join(", ");
        println!("  after it: {:.0} MiB resident, sockets: {sockets}", last.process.rss_kib as f64 / 1024.0);
    }
    if let Some(max) = done.slots_max {
        println!("  write slots: at most {max}, at the end {}", done.slots_after.unwrap_or(f64::NAN));
    }
    if let Some(verdict) = &done.verdict {
        let lost = verdict.lost.iter().map(|(code, (count, text))| format!("; {count} x {code}, first: {text}"));
        println!(
            "  read back: {} as sent{}; missing: {}; of {} refused exist: {}",
            verdict.intact,
            lost.collect::<String>(),
            verdict.acknowledged_missing,
            verdict.refused,
            verdict.refused_present
        );
    }
    for (what, count) in done.faults() {
        println!("  FAULT: {what}: {count}");
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
    use std::time::Duration;

    use super::*;
    use crate::client::CallError;
    use crate::process::Process;

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

    /// Goal: machines find what they look for. Method: the whole object of a small phase, to the letter.
    #[test]
    fn details_have_their_shape() {
        let mut write = Tally::default();
        write.success(Duration::from_millis(1), 10);
        let mut refused = Tally::default();
        refused.refusal(Duration::from_millis(2), CallError::new("FAILED_PRECONDITION", "all \"slots\""));
        let mut health = Tally::default();
        health.error(CallError::new("TIMEOUT", "late"));
        let process = Process { cpu_s: 1.5, rss_kib: 2048, rss_peak_kib: 4096 };
        let done = PhaseReport {
            name: "burst",
            repeat: 0,
            wall_s: 2.0,
            kinds: BTreeMap::from([("write", write), ("refused", refused)]),
            digests: 0,
            unfinished: Unfinished { calls: 3, unbegun: 2, stuck: 1 },
            usage: Some(Usage { cpu_s: 0.5, rss_kib: 2048, rss_peak_kib: 4096 }),
            client_cpu_s: 0.25,
            samples: vec![Sample { at_s: 1.0, process, sockets: BTreeMap::from([("CLOSE-WAIT", 2)]) }],
            probes: BTreeMap::from([("health", health)]),
            slot_cap: Some(1),
            slots_max: Some(2.0),
            slots_after: Some(0.0),
            verdict: Some(Verdict { intact: 1, refused: 1, ..Verdict::default() }),
        };
        let latency = |us: u64| {
            let each = ["p50", "p90", "p99", "p999", "max"].map(|name| format!("\"latency_{name}_us\":{us}"));
            each.join(",")
        };
        let want = [
            r#","kinds":{"refused":{"ops":1,"payload_bytes":0,"#,
            &latency(2000),
            r#","errors":{},"refusals":{"FAILED_PRECONDITION":{"count":1,"first":"all \"slots\""}}},"#,
            r#""write":{"ops":1,"payload_bytes":10,"#,
            &latency(1000),
            r#","errors":{},"refusals":{}}},"probes":{"health":{"ops":1,"payload_bytes":0,"#,
            &latency(0),
            r#","errors":{"TIMEOUT":{"count":1,"first":"late"}},"refusals":{}}},"#,
            r#""faults":{"probes of health failed":1,"more than 1 write slots were taken, or nobody says":1},"#,
            r#""verdict":{"intact":1,"lost":{},"acknowledged_missing":0,"refused":1,"refused_present":0},"#,
            r#""samples":[{"at_s":1.00,"rss_mib":2.0,"cpu_s":1.50,"sockets":{"CLOSE-WAIT":2}}]"#,
        ];
        assert_eq!(done.details(), want.concat());
        let figures: BTreeMap<_, _> = done.figures().into_iter().collect();
        for (name, value) in [
            ("ops", 2.0),
            ("refused", 1.0),
            ("errors", 0.0),
            ("unfinished_stuck", 1.0),
            ("latency_p999_us", 1000.0),
            ("server_cpu_us_per_op", 500_000.0),
            ("write_slots_max", 2.0),
            ("verified_intact", 1.0),
        ] {
            assert_eq!(figures[name], value, "{name}");
        }
    }
}
