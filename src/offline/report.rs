//! What a survey found, for people and for machines.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use super::findings::{CLASSES, Class, Findings, SIZE_BOUNDS, key_text};
use crate::limits::CHUNK_LEN;
use crate::pure::json::Json;
use crate::pure::segment::Layout;
use crate::shard::geometry::Volume;

/// What was surveyed.
pub struct Subject {
    pub dir: PathBuf,
    pub shards: u16,
    pub segments: u32,
    pub layout: Layout,
    /// Bytes of the files.
    pub bytes: u64,
    pub took: Duration,
}

/// Positions that people are shown.
const SHOWN_MAX: usize = 20;

impl Subject {
    fn heading(&self) -> String {
        format!(
            "{}: {} in {} segments of {}, {} shards\n",
            self.dir.display(),
            size(self.bytes),
            self.segments,
            size(u64::from(self.layout.segment_len)),
            self.shards
        )
    }

    fn chunks(&self, findings: &Findings) -> u64 {
        findings.chunk_segments * u64::from(self.layout.chunks_per_segment())
    }

    fn leased(&self, findings: &Findings) -> u64 {
        findings.log_segments + findings.chunk_segments
    }
}

pub fn check_text(subject: &Subject, findings: &Findings) -> String {
    let mut out = subject.heading();
    let live = findings.live();
    let total = findings.broken_total();
    out += &segments_text(subject, findings);
    out += &format!(
        "records      {} on disk: {} live, {} tombs; {} verified in {:.1} s\n",
        findings.records,
        live.entries,
        findings.tombs,
        size(findings.verified),
        subject.took.as_secs_f64()
    );
    if total == 0 {
        return out + "nothing is broken\n";
    }
    for (what, count) in &findings.broken {
        out += &format!("broken       {count}: {what}\n");
    }
    for broken in findings.examples.iter().take(SHOWN_MAX) {
        let (file, offset) = Volume::file_of(broken.position);
        let file = if broken.what.name() == "super" { "super".into() } else { format!("data.{file}") };
        let key = broken.key.as_ref().map_or(String::new(), |key| format!(" {}", key_text(key)));
        out += &format!("  {file} at {offset}: {}{key}\n", broken.what.name());
    }
    if total > SHOWN_MAX as u64 {
        out += &format!("  and {} more (--json names {})\n", total - SHOWN_MAX as u64, findings.examples.len());
    }
    out += &match findings.repaired {
        0 => format!("{total} broken; --repair drops what is broken. The server treats it as a miss\n"),
        repaired if repaired == total => format!("{total} were broken, and are dropped or written anew\n"),
        repaired => format!("{total} were broken, {repaired} are dropped or written anew\n"),
    };
    out
}

pub fn check_json(subject: &Subject, findings: &Findings) -> String {
    let kinds = findings.broken.iter().fold(Json::object(), |json, (what, count)| json.raw(what.name(), count));
    let positions = findings.examples.iter().fold(Json::list(), |list, broken| {
        let json = Json::object().text("kind", broken.what.name()).raw("position", broken.position);
        list.item(match &broken.key {
            Some(key) => json.text("key", &key_text(key)).end(),
            None => json.end(),
        })
    });
    let live = findings.live();
    Json::object()
        .text("dir", &subject.dir.to_string_lossy())
        .raw("segments", segments_json(subject, findings))
        .raw("records", findings.records)
        .raw("live", live.entries)
        .raw("tombs", findings.tombs)
        .raw("verified_bytes", findings.verified)
        .raw("seconds", format!("{:.3}", subject.took.as_secs_f64()))
        .raw("broken", findings.broken_total())
        .raw("repaired", findings.repaired)
        .raw("kinds", kinds.end())
        .raw("positions", positions.end())
        .end()
        + "\n"
}

pub fn stats_text(subject: &Subject, findings: &Findings) -> String {
    let mut out = subject.heading();
    out += &segments_text(subject, findings);
    if let Some((oldest, newest)) = findings.generations {
        out += &format!("leases       oldest segment {oldest}, newest {newest}\n");
    }
    let live = findings.live();
    out += &format!("\n{:<13}{:>12}{:>14}{:>14}{:>14}{:>8}\n", "", "entries", "logical", "stored", "on disk", "ratio");
    for ((kind, class), sums) in CLASSES.iter().zip(&findings.classes) {
        out += &class_line(&format!("{kind} {class}"), sums);
    }
    out += &class_line("all", &live);
    out += &format!("\n{:<13}{:>12}{:>14}{:>14}\n", "size up to", "entries", "logical", "on disk");
    for (number, sums) in findings.sizes.iter().enumerate().filter(|(_, sums)| sums.entries > 0) {
        let bound = SIZE_BOUNDS.get(number).map_or("more".into(), |&bound| size(bound));
        out += &format!("{bound:<13}{:>12}{:>14}{:>14}\n", sums.entries, size(sums.logical), size(sums.space));
    }
    let broken = findings.broken_total();
    if broken > 0 {
        out += &format!("\n{broken} records or headers are broken: see `ringcas check`\n");
    }
    out
}

pub fn stats_json(subject: &Subject, findings: &Findings) -> String {
    let classes = CLASSES
        .iter()
        .zip(&findings.classes)
        .fold(Json::object(), |json, ((kind, class), sums)| json.raw(&format!("{kind}_{class}"), class_json(sums)));
    let sizes = findings.sizes.iter().enumerate().fold(Json::list(), |list, (number, sums)| {
        let bound = SIZE_BOUNDS.get(number).map_or("null".into(), u64::to_string);
        list.item(Json::object().raw("up_to", bound).raw("sums", class_json(sums)).end())
    });
    let (oldest, newest) = findings.generations.unwrap_or_default();
    Json::object()
        .text("dir", &subject.dir.to_string_lossy())
        .raw("bytes", subject.bytes)
        .raw("segments", segments_json(subject, findings))
        .raw("oldest_lease", oldest)
        .raw("newest_lease", newest)
        .raw("all", class_json(&findings.live()))
        .raw("classes", classes.end())
        .raw("sizes", sizes.end())
        .raw("broken", findings.broken_total())
        .end()
        + "\n"
}

fn segments_text(subject: &Subject, findings: &Findings) -> String {
    let mut out = String::new();
    let log_bytes = findings.log_segments * u64::from(subject.layout.segment_len);
    let chunks = subject.chunks(findings);
    let percent = |part: u64, whole: u64| (100 * part).checked_div(whole).unwrap_or(0);
    // Writing to a String cannot fail.
    let _ = write!(
        out,
        "segments     {} of {} in use ({} %)\n\
         logs         {} segments, {} written ({} %)\n\
         chunks       {} segments, {} of {} chunks taken ({} %), {}\n",
        subject.leased(findings),
        subject.segments,
        percent(subject.leased(findings), u64::from(subject.segments)),
        findings.log_segments,
        size(findings.log_used),
        percent(findings.log_used, log_bytes),
        findings.chunk_segments,
        findings.chunks_taken,
        chunks,
        percent(findings.chunks_taken, chunks),
        size(findings.chunks_taken * CHUNK_LEN as u64),
    );
    out
}

fn segments_json(subject: &Subject, findings: &Findings) -> String {
    Json::object()
        .raw("total", subject.segments)
        .raw("bytes_each", subject.layout.segment_len)
        .raw("logs", findings.log_segments)
        .raw("log_bytes", findings.log_used)
        .raw("chunks", findings.chunk_segments)
        .raw("chunks_taken", findings.chunks_taken)
        .raw("chunks_total", subject.chunks(findings))
        .end()
}

fn class_line(name: &str, sums: &Class) -> String {
    let ratio = if sums.stored == 0 { 1.0 } else { sums.logical as f64 / sums.stored as f64 };
    format!(
        "{name:<13}{:>12}{:>14}{:>14}{:>14}{ratio:>8.2}\n",
        sums.entries,
        size(sums.logical),
        size(sums.stored),
        size(sums.space)
    )
}

fn class_json(sums: &Class) -> String {
    Json::object()
        .raw("entries", sums.entries)
        .raw("logical_bytes", sums.logical)
        .raw("stored_bytes", sums.stored)
        .raw("disk_bytes", sums.space)
        .end()
}

/// Bytes for people.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = (bytes.max(1).ilog2() / 10).min(UNITS.len() as u32 - 1);
    let value = bytes as f64 / (1u64 << (10 * unit)) as f64;
    if unit == 0 || value.fract() == 0.0 {
        format!("{value} {}", UNITS[unit as usize])
    } else {
        format!("{value:.1} {}", UNITS[unit as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: sizes read well. Method: by hand, at the borders of units.
    #[test]
    fn sizes_for_people() {
        let sizes = [0, 1, 1023, 1024, 1536, 1 << 20, (1 << 30) + (1 << 29), 3 << 40].map(size);
        assert_eq!(sizes, ["0 B", "1 B", "1023 B", "1 KiB", "1.5 KiB", "1 MiB", "1.5 GiB", "3 TiB"]);
    }
}
