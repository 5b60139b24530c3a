//! The effective configuration as a file that can be used as one, with who said what behind each value.

use std::fmt::Write as _;

use super::derived::Derived;
use super::effective::{Effective, Entry, Source};
use super::names::SECTIONS;
use super::{foreign, names};

/// The text for `--print_config`. Secrets are not in it.
pub fn yaml(effective: &Effective, derived: &[Derived]) -> String {
    let mut text = String::new();
    let sections = std::iter::once(None).chain(SECTIONS.iter().map(|(section, _)| Some(*section)));
    for section in sections {
        let is_key = |entry: &&Entry| entry.flag != "config_file" && !foreign::has(&entry.flag);
        let here = |entry: &&Entry| names::key(&entry.flag).0 == section && is_key(entry);
        let entries: Vec<&Entry> = effective.0.iter().filter(here).collect();
        if let Some(section) = section.filter(|_| !entries.is_empty()) {
            let _ = writeln!(text, "{section}:");
        }
        for entry in entries {
            let indent = if section.is_some() { "  " } else { "" };
            let known = derived.iter().find(|derived| derived.flag == entry.flag);
            let key = names::key(&entry.flag).1;
            let mut source = source(&entry.source);
            let given = entry.value.as_deref();
            let known = known.filter(|known| given.is_none() || given == known.same);
            let follows = known.and_then(|known| known.value.as_deref());
            if let (Some(_), Some(follows)) = (given, follows) {
                let _ = write!(source, ", which means {follows}");
            }
            if let Some(reason) = known.map(|known| known.reason).filter(|reason| !reason.is_empty()) {
                let _ = write!(source, ": {reason}");
            }
            let _ = match given.or(follows) {
                Some(_) if entry.is_secret => writeln!(text, "{indent}# {key}: (secret)  # {source}"),
                Some(value) => writeln!(text, "{indent}{key}: {}  # {source}", scalar(value)),
                None => writeln!(text, "{indent}# {key}:  # {source}"),
            };
        }
    }
    text
}

fn source(source: &Source) -> String {
    match source {
        Source::Flag => "flag".to_owned(),
        Source::Variable(name) => name.clone(),
        Source::File(path) => path.display().to_string(),
        Source::Default => "default".to_owned(),
    }
}

/// As it is where YAML takes it for the same text, else in quotes.
fn scalar(value: &str) -> String {
    let is_word = value.starts_with(|c: char| c.is_ascii_alphabetic())
        && value.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        && !value.eq_ignore_ascii_case("null");
    let is_number = value.len() < 19 && !value.starts_with('0') && value.chars().all(|c| c.is_ascii_digit());
    if is_word || is_number || value == "0" {
        return value.to_owned();
    }
    let mut quoted = String::from("\"");
    for c in value.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::super::Flags;
    use super::super::inputs::{Inputs, Outcome};
    use super::*;

    fn read(args: &[&str], variables: &[(&str, &str)]) -> Outcome<Flags> {
        Inputs::new(args, variables).read().expect("valid")
    }

    /// Goal: what is printed says who said what, hides secrets, and means the same when it is read as a file.
    /// Method: settings from everywhere, odd characters among them; print, read, compare.
    #[test]
    fn what_is_printed_can_be_read() {
        let odd = "a \"b\" \\ : # \u{1} null";
        let empty = tempfile::NamedTempFile::new().expect("a file");
        let config = format!("--config_file={}", empty.path().display());
        let prefix = format!("--s3.prefix={odd}");
        let args = [
            &config,
            &prefix,
            "--s3.bucket=null",
            "--gcs_proxy.bucket=g",
            "--max_size=007",
            "--max_inflight_cas_writes=0",
        ];
        let variables = [("RINGCAS_S3_SECRET_ACCESS_KEY", "hush"), ("BAZEL_REMOTE_ACK", "durable")];
        let outcome = read(&args, &variables);
        let derived = [
            Derived::new("dir", "/d", "below HOME"),
            Derived { same: Some("0"), ..Derived::new("max_inflight_cas_writes", 7, "as many as fit") },
            Derived::new("max_size", 9, "half of what is free"),
            Derived::new("log_level", "info", ""),
            Derived::of_no_value("unix_socket_mode", "what the umask leaves"),
        ];
        let text = yaml(&outcome.effective, &derived);
        let has = |line: &str| assert!(text.lines().any(|l| l == line), "no line {line} in\n{text}");
        has("dir: \"/d\"  # default: below HOME");
        has("max_inflight_cas_writes: 0  # flag, which means 7: as many as fit");
        has("max_size: \"007\"  # flag");
        has("log_level: info  # default");
        has("# unix_socket_mode:  # default: what the umask leaves");
        has("ack: durable  # BAZEL_REMOTE_ACK");
        has("  # secret_access_key: (secret)  # RINGCAS_S3_SECRET_ACCESS_KEY");
        has("  bucket: \"null\"  # flag");
        has("  # region:  # default");
        assert!(!text.contains("hush") && !text.contains("gcs"), "{text}");

        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), &text).expect("written");
        let again = read(&[&format!("--config_file={}", file.path().display())], &[]);
        let own = |outcome: &Outcome<Flags>, skip: &[&str]| -> Vec<(String, Option<String>)> {
            let own = outcome.effective.0.iter().filter(|entry| !entry.is_secret && !foreign::has(&entry.flag));
            let own = own.filter(|entry| !skip.contains(&entry.flag.as_str()));
            own.map(|entry| (entry.flag.clone(), entry.value.clone())).collect()
        };
        let skip = ["config_file", "dir", "log_level"];
        assert_eq!(own(&again, &skip), own(&outcome, &skip));
    }
}
