//! The effective configuration as a file that can be used as one, with who said what behind each value.

use std::fmt::Write as _;

use super::effective::{Effective, Entry, Source};
use super::names::SECTIONS;
use super::{foreign, names};

/// The text for `--print_config`. `derived` has the values of settings that follow from the machine. Secrets are not in it.
pub fn yaml(effective: &Effective, derived: &[(&str, String)]) -> String {
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
            let known = derived.iter().find(|(flag, _)| *flag == entry.flag).map(|(_, value)| value.as_str());
            let key = names::key(&entry.flag).1;
            let source = source(&entry.source);
            let _ = match (&entry.value, known) {
                (Some(_), _) if entry.is_secret => writeln!(text, "{indent}# {key}: (secret)  # {source}"),
                (Some(value), _) => writeln!(text, "{indent}{key}: {}  # {source}", scalar(value)),
                (None, Some(value)) => writeln!(text, "{indent}{key}: {}  # {source}, for this machine", scalar(value)),
                (None, None) => writeln!(text, "{indent}# {key}:  # {source}"),
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
    if is_word || is_number {
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
        let args =
            [&config, &format!("--s3.prefix={odd}"), "--s3.bucket=null", "--gcs_proxy.bucket=g", "--max_size=007"];
        let variables = [("RINGCAS_S3_SECRET_ACCESS_KEY", "hush"), ("BAZEL_REMOTE_ACK", "durable")];
        let outcome = read(&args, &variables);
        let text = yaml(&outcome.effective, &[("dir", "/d".to_owned()), ("ack", "wrong".to_owned())]);
        let has = |line: &str| assert!(text.lines().any(|l| l == line), "no line {line} in\n{text}");
        has("dir: \"/d\"  # default, for this machine");
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
        let skip = ["config_file", "dir"];
        assert_eq!(own(&again, &skip), own(&outcome, &skip));
    }
}
