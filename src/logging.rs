//! What the process says: the log on stderr, the access log on stdout, as bazel-remote has them.

use std::fmt;
use std::io;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::writer::MakeWriterExt;

use crate::config::{Config, LogTimezone};
use crate::pure::civil_time::Civil;
use crate::reload::Part;
use crate::rt::host;
use crate::rt::time;

/// What is logged when nobody says more.
const USUAL: &str = "info";
/// Access lines pass whatever the level: `--access_log_level` says whether there are any.
const ACCESS: &str = "access=info";

/// `--log_level`: a level, or directives such as `info,ringcas::backend=debug`.
pub fn level(text: &str) -> Result<String, String> {
    const FORM: &str = "write info, debug or warn, or a list such as info,ringcas::backend=debug";
    EnvFilter::try_new(text).map_err(|error| format!("{error}; {FORM}"))?;
    // Why here: a misspelt level would be taken for a part of the program, of which all is wanted.
    let mut words = text.split(',').map(str::trim).filter(|word| !word.is_empty() && !word.contains(['=', '[']));
    match words.find(|word| word.parse::<LevelFilter>().is_err()) {
        Some(word) => Err(format!("{word} is no level; {FORM}")),
        None => Ok(text.to_owned()),
    }
}

/// The log, whose level can change.
pub struct Log {
    level: String,
    set: Box<dyn Fn(EnvFilter) -> Result<(), String> + Send>,
}

/// Starts the log.
pub fn start(level: Option<&str>, timezone: LogTimezone) -> Log {
    let level = level.unwrap_or(USUAL);
    // Why apart: bazel-remote's operators send the two to different files.
    let writer = io::stderr.with_filter(|line| line.target() != "access").or_else(io::stdout);
    let builder = tracing_subscriber::fmt()
        .with_writer(writer)
        .with_target(false)
        .with_env_filter(EnvFilter::new(with_access(level)));
    let set: Box<dyn Fn(EnvFilter) -> Result<(), String> + Send> = match timezone {
        LogTimezone::None => {
            let builder = builder.without_time().with_filter_reloading();
            let handle = builder.reload_handle();
            builder.init();
            Box::new(move |filter| handle.reload(filter).map_err(|error| error.to_string()))
        }
        LogTimezone::Utc | LogTimezone::Local => {
            let builder =
                builder.with_timer(Clock { is_local: timezone == LogTimezone::Local }).with_filter_reloading();
            let handle = builder.reload_handle();
            builder.init();
            Box::new(move |filter| handle.reload(filter).map_err(|error| error.to_string()))
        }
    };
    Log { level: level.to_owned(), set }
}

impl Part for Log {
    fn flags(&self) -> &[&str] {
        &["log_level"]
    }

    fn reload(&mut self, config: &Config) -> Result<Option<String>, String> {
        let level = config.log_level.as_deref().unwrap_or(USUAL);
        if level != self.level {
            let filter = EnvFilter::try_new(with_access(level)).map_err(|error| format!("--log_level: {error}"))?;
            (self.set)(filter)?;
            level.clone_into(&mut self.level);
        }
        Ok(None)
    }
}

/// In front, so that a list that names `access` itself has the last word.
fn with_access(level: &str) -> String {
    format!("{ACCESS},{level}")
}

/// Times as in RFC 3339, with microseconds.
struct Clock {
    is_local: bool,
}

impl FormatTime for Clock {
    fn format_time(&self, out: &mut Writer<'_>) -> fmt::Result {
        let (seconds, micros) = time::unix_micros();
        let offset_s = if self.is_local { host::utc_offset_s(seconds) } else { 0 };
        out.write_str(&stamp(seconds, micros, offset_s))
    }
}

fn stamp(seconds: u64, micros: u32, offset_s: i32) -> String {
    let Civil { year, month, day, hour, minute, second } =
        Civil::from_unix(seconds.saturating_add_signed(i64::from(offset_s)));
    let zone = match offset_s / 60 {
        0 => "Z".to_owned(),
        minutes => {
            let sign = if minutes < 0 { '-' } else { '+' };
            format!("{sign}{:02}:{:02}", minutes.abs() / 60, minutes.abs() % 60)
        }
    };
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}{zone}")
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    /// Goal: access lines do not depend on the level, unless it names them. Method: levels, and which lines pass.
    #[test]
    fn access_lines_pass() {
        for (level, access, other) in [("info", true, true), ("error", true, false), ("info,access=off", false, true)] {
            let subscriber = tracing_subscriber::registry().with(EnvFilter::new(with_access(level)));
            tracing::subscriber::with_default(subscriber, || {
                assert_eq!(tracing::enabled!(target: "access", tracing::Level::INFO), access, "{level}");
                assert_eq!(tracing::enabled!(target: "ringcas", tracing::Level::INFO), other, "{level}");
            });
        }
    }

    /// Goal: times are those of the zone, with its distance from UTC. Method: one instant in three zones.
    #[test]
    fn stamps() {
        assert_eq!(stamp(1_369_353_600, 42, 0), "2013-05-24T00:00:00.000042Z");
        assert_eq!(stamp(1_369_353_600, 0, 7200), "2013-05-24T02:00:00.000000+02:00");
        assert_eq!(stamp(1_369_353_600, 0, -12_600), "2013-05-23T20:30:00.000000-03:30");
    }
}
