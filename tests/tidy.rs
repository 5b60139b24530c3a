//! Goal: the rules that a reader relies on hold everywhere: who may name what, sizes, links, reasons.
//! Method: read every source file of the repository as text and look for what must not be there.

use std::fs;
use std::path::{Path, PathBuf};

const LINES_MAX: usize = 700;

/// One text file of the repository.
struct Source {
    /// Relative to the repository, with `/`.
    path: String,
    text: String,
}

impl Source {
    /// What the compiler sees outside of tests: no comments, no strings, no file and no last module that is for tests only.
    fn code(&self) -> String {
        let is_test = self.path.contains("/tests/") || self.path.ends_with("_tests.rs");
        let tests = ["", "pub ", "pub(crate) "].map(|public| format!("#[cfg(test)]\n{public}mod tests {{"));
        let end = tests.iter().filter_map(|start| self.text.find(start.as_str())).min().unwrap_or(self.text.len());
        if is_test { String::new() } else { strip(&self.text[..end]) }
    }

    fn within(&self, directory: &str) -> bool {
        self.path.starts_with(directory)
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All files under the named places, except what tools make.
fn files(places: &[&str], extensions: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> = places.iter().map(|place| root().join(place)).collect();
    while let Some(path) = open.pop() {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "__pycache__" && name != "target" {
                open.extend(fs::read_dir(&path).expect("readable").map(|entry| entry.expect("readable").path()));
            }
        } else if path.extension().is_some_and(|extension| extensions.iter().any(|e| *e == extension))
            || (extensions.is_empty() && path.is_file())
        {
            let relative = path.strip_prefix(root()).expect("below the root").to_string_lossy().replace('\\', "/");
            if let Ok(text) = fs::read_to_string(&path) {
                found.push(Source { path: relative, text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// Replaces comments, string contents and character literals by nothing. Good enough for the Rust that rustfmt writes.
fn strip(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['/', '"', '\'']) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if rest.starts_with("//") {
            rest = rest.find('\n').map_or("", |end| &rest[end..]);
        } else if rest.starts_with("/*") {
            rest = rest.find("*/").map_or("", |end| &rest[end + 2..]);
        } else if rest.starts_with('"') {
            let hashes = out.len() - out.trim_end_matches('#').len();
            let raw = out.trim_end_matches('#').ends_with(['r']);
            rest = if raw {
                let close = format!("\"{}", "#".repeat(hashes));
                rest[1..].find(&close).map_or("", |end| &rest[1 + end + close.len()..])
            } else {
                end_of_string(&rest[1..])
            };
        } else if let Some(literal) = char_literal(rest) {
            rest = &rest[literal..];
        } else {
            out.push_str(&rest[..1]);
            rest = &rest[1..];
        }
    }
    out.push_str(rest);
    out
}

fn end_of_string(text: &str) -> &str {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            '"' if !escaped => return &text[at + 1..],
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    ""
}

/// The length of the character literal that `text` starts with; `None` for a lifetime.
fn char_literal(text: &str) -> Option<usize> {
    let mut chars = text.char_indices().skip(1);
    let (_, first) = chars.next()?;
    if first == '\\' {
        let end = text.get(3..)?.find('\'')?;
        return Some(3 + end + 1);
    }
    let (at, close) = chars.next()?;
    (close == '\'').then_some(at + 1)
}

/// Whether `code` names `word` with no identifier character around it.
fn names(code: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).any(|(at, _)| {
        !code[..at].chars().next_back().is_some_and(is_part)
            && !code[at + word.len()..].chars().next().is_some_and(is_part)
    })
}

fn report(title: &str, problems: &[String]) {
    assert!(problems.is_empty(), "{title}:\n  {}", problems.join("\n  "));
}

#[test]
fn strip_and_names_work() {
    assert_eq!(strip("a // glommio\nb /* x */ c \"h2::x \\\" y\" d r#\"libc \" z\"# e"), "a \nb  c  d r# e");
    assert_eq!(strip("fn f<'a>(x: &'a str) { '\\'' '\"' 'x' }"), "fn f<'a>(x: &'a str) {    }");
    assert!(names("use h2::server;", "h2"));
    assert!(!names("use http2::server; let h2x = 1;", "h2"));
}

/// Each outside crate has its doors, as `src/ARCHITECTURE.md` draws them.
#[test]
fn only_the_door_names_a_crate() {
    let doors: &[(&str, &[&str])] = &[
        ("glommio", &["src/rt/"]),
        ("futures_channel", &["src/rt/"]),
        ("socket2", &["src/rt/"]),
        ("signal_hook", &["src/rt/"]),
        ("libc", &["src/rt/"]),
        ("mimalloc", &["src/rt/allocator.rs"]),
        ("libmimalloc_sys", &["src/rt/allocator.rs"]),
        ("h2", &["src/net/"]),
        ("http", &["src/net/"]),
        ("hyper", &["src/net/http1/", "src/backend/http.rs"]),
        ("prost_reflect", &["src/service/action_json.rs"]),
        ("serde_json", &["src/service/action_json.rs"]),
        ("prometheus", &["src/metrics/export.rs"]),
        ("zstd_safe", &["src/shard/codec"]),
        ("clap", &["src/config.rs", "src/config/", "src/boot.rs", "src/offline/flags.rs"]),
        ("tokio_rustls", &["src/backend/tls.rs", "src/net/tls.rs"]),
        ("bcrypt", &["src/pure/htpasswd.rs"]),
        ("md5", &["src/pure/htpasswd.rs"]),
        ("sha1", &["src/pure/htpasswd.rs"]),
        ("rustls_native_certs", &["src/backend/tls.rs"]),
        ("hmac", &["src/pure/sigv4.rs"]),
        ("quick_xml", &["src/pure/s3_message.rs"]),
        ("yaml_rust2", &["src/pure/document.rs"]),
        ("strsim", &["src/config/names.rs"]),
        ("prost", &["src/wire/", "src/service/", "src/pure/", "src/store/", "src/net/"]),
        ("tracing_subscriber", &["src/logging.rs"]),
    ];
    let mut problems = Vec::new();
    for source in files(&["src"], &["rs"]) {
        let code = source.code();
        for (name, doors) in doors {
            let path = format!("{name}::");
            let named = code.match_indices(&path).any(|(at, _)| {
                let before = code[..at].chars().next_back();
                !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') || code[..at].ends_with(" ::")
            });
            if named && !doors.iter().any(|door| source.within(door)) {
                problems.push(format!("{} names {name}; only {} may", source.path, doors.join(", ")));
            }
        }
    }
    report("walls between crates", &problems);
}

/// Layers look down, never up.
#[test]
fn layers_keep_to_their_side() {
    let bans: &[(&str, &[&str])] = &[
        ("src/pure/", &["crate::rt", "crate::net", "crate::service", "crate::store", "crate::shard", "crate::percore"]),
        ("src/rt/", &["crate::net", "crate::service", "crate::store", "crate::shard", "crate::pure", "crate::percore"]),
        ("src/service/", &["crate::net", "crate::shard", "crate::percore", "crate::rt::tcp", "crate::rt::file"]),
        ("src/store/", &["crate::net", "crate::service", "crate::shard", "crate::rt::file", "crate::rt::tcp"]),
        ("src/shard/", &["crate::net", "crate::service", "crate::rt::tcp", "crate::offline"]),
        ("src/offline/", &["crate::net", "crate::rt::tcp"]),
        (
            "src/access/",
            &["crate::net", "crate::service", "crate::store", "crate::shard", "crate::rt::tcp", "crate::rt::file"],
        ),
        ("src/net/", &["crate::shard", "crate::rt::file"]),
        ("src/backend/", &["crate::net", "crate::service", "crate::store", "crate::shard", "crate::percore"]),
        ("src/metrics/", &["crate::net", "crate::service", "crate::store", "crate::shard", "crate::percore"]),
    ];
    let mut problems = Vec::new();
    for source in files(&["src"], &["rs"]) {
        let code = source.code();
        for (directory, banned) in bans {
            for name in banned.iter().filter(|name| source.within(directory) && names(&code, name)) {
                problems.push(format!("{} names {name}", source.path));
            }
        }
    }
    report("walls between layers", &problems);
}

/// The same calls give the same answers: no clock, no randomness, no I/O, no tasks.
#[test]
fn pure_is_pure() {
    let bans = [
        "std::fs",
        "std::net",
        "std::io",
        "std::time::Instant",
        "Instant::now",
        "SystemTime",
        "std::thread",
        "std::process",
        "std::env",
        "async",
        "await",
        "rand",
        "getrandom",
        "thread_local",
        "RandomState",
        "println",
        "eprintln",
        "tracing",
    ];
    let mut problems = Vec::new();
    for source in files(&["src/pure"], &["rs"]) {
        let code = source.code();
        for name in bans.iter().filter(|name| names(&code, name)) {
            problems.push(format!("{} names {name}", source.path));
        }
    }
    report("src/pure must be replayable", &problems);
}

/// Threads, clocks, sleeps and random words come through `rt` (or from the standard library before there are executors).
#[test]
fn only_rt_asks_the_system() {
    let allowed = [
        "src/rt/",
        "src/main.rs",
        "src/boot.rs",
        "src/config.rs",
        "src/percore.rs",
        "src/ports.rs",
        "src/shard/geometry.rs",
        "src/offline/import/source.rs",
    ];
    let bans = ["std::thread", "Instant::now", "SystemTime", "std::net::TcpListener", "std::net::TcpStream"];
    let mut problems = Vec::new();
    for source in files(&["src"], &["rs"]) {
        let code = source.code();
        for name in bans.iter().filter(|name| names(&code, name)) {
            if !allowed.iter().any(|place| source.within(place)) {
                problems.push(format!("{} names {name}", source.path));
            }
        }
    }
    report("only rt asks the system", &problems);
}

/// Every store error is given its status by hand: a new one must not slip through as something else.
#[test]
fn statuses_are_mapped_one_by_one() {
    for (path, map) in [
        ("src/service/status.rs", "impl From<StoreError> for Status"),
        ("src/service/refusal.rs", "impl From<StoreError> for Refusal"),
        ("src/service/refusal.rs", "impl From<Status> for Refusal"),
    ] {
        let text = fs::read_to_string(root().join(path)).expect("there is a status map");
        let code = strip(&text);
        let map = code.split(map).nth(1).expect("the map of errors");
        let body = &map[..map.find("\n}").expect("the end of the map")];
        assert!(!body.contains("_ =>"), "{path} maps errors with a catch-all arm");
    }
}

#[test]
fn unsafe_gives_its_reason() {
    let mut problems = Vec::new();
    for source in files(&["src", "bench", "tests"], &["rs"]) {
        let lines: Vec<&str> = source.text.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            let code = strip(line);
            if !(names(&code, "unsafe") && (code.contains("unsafe {") || code.contains("unsafe impl"))) {
                continue;
            }
            let above = &lines[number.saturating_sub(6)..=number];
            if !above.iter().any(|line| line.contains("SAFETY:")) {
                problems.push(format!("{}:{}: unsafe without a SAFETY comment", source.path, number + 1));
            }
        }
    }
    report("unsafe", &problems);
}

#[test]
fn files_are_of_a_size_that_one_reads() {
    let mut problems = Vec::new();
    for source in files(&["src", "bench", "tests", "proto"], &["rs", "py", "md", "proto"]) {
        if source.within("src/wire/") {
            continue;
        }
        let lines = source.text.lines().count();
        if lines > LINES_MAX && !source.path.ends_with(".proto") {
            problems.push(format!("{} has {lines} lines, more than {LINES_MAX}", source.path));
        }
    }
    report("sizes", &problems);
}

/// Every module of the library says at its head what it is for.
#[test]
fn modules_introduce_themselves() {
    let problems: Vec<String> = files(&["src", "tests", "bench"], &["rs"])
        .iter()
        .filter(|source| !source.within("src/wire/") && !source.text.starts_with("//!"))
        .map(|source| format!("{} does not start with //!", source.path))
        .collect();
    report("module comments", &problems);
}

#[test]
fn nothing_is_left_undone() {
    // Built from parts, so that this file does not find itself.
    let words = [["TO", "DO"], ["FIX", "ME"], ["XX", "X:"], ["todo", "!("], ["unimplemented", "!("], ["dbg", "!("]];
    let mut problems = Vec::new();
    for source in files(
        &["src", "bench", "tests", "proto", "README.md", "CHANGELOG.md", "Cargo.toml"],
        &["rs", "py", "md", "proto", "toml"],
    ) {
        for word in words.iter().map(|parts| parts.concat()) {
            if source.text.contains(&word) {
                problems.push(format!("{} contains {word}", source.path));
            }
        }
        if source.within("src/") && source.code().contains(&["#[ig", "nore"].concat()) {
            problems.push(format!("{} ignores a test", source.path));
        }
    }
    report("left undone", &problems);
}

/// The repository works wherever it is cloned.
#[test]
fn no_paths_of_one_machine() {
    let paths = [["/wo", "rk/"], ["/ro", "ot/"], ["/tm", "p/"], ["/ho", "me/"]].map(|parts| parts.concat());
    let mut problems = Vec::new();
    let places = ["src", "proto", "tests", "bench", ".ci", "README.md", "CHANGELOG.md", "Cargo.toml"];
    for source in files(&places, &[]) {
        for path in paths.iter().filter(|path| source.text.contains(path.as_str())) {
            problems.push(format!("{} contains {path}", source.path));
        }
    }
    report("paths of one machine", &problems);
}

/// `[text](target)` in our documents leads to a file, and `#anchors` to a heading.
#[test]
fn links_lead_somewhere() {
    let mut problems = Vec::new();
    for source in files(&["README.md", "CHANGELOG.md", "src", "bench", "tests", "proto", "tuning"], &["md"]) {
        let base = root().join(&source.path);
        let base = base.parent().expect("a file has a directory");
        for (at, _) in source.text.match_indices("](") {
            let rest = &source.text[at + 2..];
            let target = &rest[..rest.find(')').unwrap_or(0)];
            if target.contains("://") || target.is_empty() {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = if file.is_empty() { root().join(&source.path) } else { base.join(file) };
            if !path.exists() {
                problems.push(format!("{}: {target} leads nowhere", source.path));
            } else if !anchor.is_empty()
                && !fs::read_to_string(&path).is_ok_and(|text| headings(&text).contains(&anchor.to_owned()))
            {
                problems.push(format!("{}: {target}: no such heading", source.path));
            }
        }
    }
    report("links", &problems);
}

/// Anchors as forges make them: lower case, spaces to hyphens, punctuation dropped.
fn headings(text: &str) -> Vec<String> {
    let anchor = |line: &str| -> String {
        let kept = line.trim_start_matches('#').trim().to_lowercase();
        kept.chars()
            .filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-' || *c == '_')
            .map(|c| if c == ' ' { '-' } else { c })
            .collect()
    };
    text.lines().filter(|line| line.starts_with('#')).map(anchor).collect()
}

/// Each dependency stands below the reason why it is there (one comment may cover neighbours).
#[test]
fn dependencies_have_reasons() {
    let text = fs::read_to_string(root().join("Cargo.toml")).expect("there is a manifest");
    let mut problems = Vec::new();
    let mut section = "";
    let mut reason = false;
    for line in text.lines() {
        if line.starts_with('[') {
            section = line;
            reason = false;
        } else if line.starts_with('#') {
            reason = true;
        } else if line.trim().is_empty() {
            reason = false;
        } else if section.ends_with("dependencies]") && !line.starts_with(' ') && line.contains('=') && !reason {
            problems.push(format!("Cargo.toml: {line}: no comment says why"));
        }
    }
    report("dependencies", &problems);
}

/// The flags table of the README is the list of flags, no more and no less.
#[test]
fn readme_names_every_flag() {
    let readme = fs::read_to_string(root().join("README.md")).expect("there is a README");
    let table: Vec<&str> = readme
        .lines()
        .filter_map(|line| line.strip_prefix("| `--"))
        .filter_map(|line| line.split(['`', ' ']).next())
        .collect();
    let command = <ringcas::config::Flags as clap::CommandFactory>::command();
    let flags: Vec<&str> = command.get_arguments().filter_map(|arg| arg.get_long()).collect();
    assert!(!flags.is_empty());
    let mut problems: Vec<String> =
        flags.iter().filter(|flag| !table.contains(flag)).map(|flag| format!("--{flag} is not in README.md")).collect();
    problems.extend(
        table
            .iter()
            .filter(|flag| !flags.iter().any(|f| f == *flag))
            .map(|flag| format!("README.md names --{flag}, which is none")),
    );
    report("flags", &problems);
}
