//! Where settings come from: the command line, the environment, the file; the first that names one counts.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::builder::OsStr as ClapStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};

use super::effective::{Effective, Entry, Source};
use super::file::{self, Known};
use super::{ConfigError, foreign, names, values};
use crate::pure::secret::Secret;

/// What can be asked of the command line only, or leads to the file.
const NOT_IN_FILE: [&str; 5] = ["check_config", "config_file", "help", "print_config", "version"];

/// The command line and the environment of the process. Read again with the file at each reload.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// With the name of the program.
    args: Vec<OsString>,
    variables: BTreeMap<String, String>,
}

/// Settings that fit together.
#[derive(Debug)]
pub struct Outcome<T> {
    pub flags: T,
    pub effective: Effective,
    /// What an operator should know of them, a line each.
    pub notices: Vec<String>,
}

/// What the environment and the file say, by flag.
type Given = BTreeMap<String, (String, Source)>;

impl Inputs {
    /// Those of this process.
    pub fn of_process() -> Self {
        let text = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
        Self { args: std::env::args_os().collect(), variables: std::env::vars_os().filter_map(text).collect() }
    }

    /// Arguments behind the program's name, and variables.
    #[cfg(test)]
    pub fn new(args: &[impl AsRef<OsStr>], variables: &[(&str, &str)]) -> Self {
        let args = std::iter::once("ringcas".into()).chain(args.iter().map(|arg| arg.as_ref().to_owned()));
        let variables = variables.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        Self { args: args.collect(), variables: variables.collect() }
    }

    /// Reads everything; of the environment and the file this checks each value by itself.
    pub fn read<T: CommandFactory + FromArgMatches>(&self) -> Result<Outcome<T>, ConfigError> {
        let command = prepare(T::command());
        let settings: Vec<&Arg> = command.get_arguments().filter(|arg| is_setting(arg)).collect();
        let flags: Vec<&str> = settings.iter().filter_map(|arg| arg.get_long()).collect();
        let (args, emptied) = go_flags(&self.args, &flags);
        let matches = command.clone().try_get_matches_from(&args).map_err(|error| explained(error, &command))?;
        let mut notices = Vec::new();
        let mut given = self.read_variables(&flags, &mut notices)?;
        let path = matches.get_one::<PathBuf>("config_file").cloned();
        if let Some(path) = path.or_else(|| given.get("config_file").map(|(path, _)| path.into())) {
            let in_file = settings.iter().filter(|arg| !NOT_IN_FILE.contains(&arg.get_id().as_str()));
            let known: Vec<Known> = in_file.filter_map(|arg| known(arg)).collect();
            for (flag, value) in file::read(&path, &known)?.into_iter().filter(|(_, value)| !value.is_empty()) {
                given.entry(flag).or_insert((value, Source::File(path.clone())));
            }
        }
        given.retain(|flag, _| !emptied.contains(flag));
        compose_addresses(&mut given, &matches);
        for (flag, (value, source)) in &given {
            let alone = [OsString::from("ringcas"), format!("--{flag}={value}").into()];
            let Err(error) = command.clone().try_get_matches_from(alone) else { continue };
            return Err(ConfigError::Value {
                place: source.place(flag),
                value: value.clone(),
                problem: problem(&error),
            });
        }
        let command =
            given.iter().fold(command.clone(), |command, (flag, (value, _))| with_default(command, flag, value));
        let matches = command.clone().try_get_matches_from(&args)?;
        let effective = Effective(command.get_arguments().filter_map(|arg| entry(arg, &matches, &given)).collect());
        if matches.subcommand_name().is_none() {
            notices.extend(foreign::judge(&effective)?);
        }
        Ok(Outcome { flags: T::from_arg_matches(&matches)?, effective, notices })
    }

    /// What variables say. Those that are empty say nothing.
    fn read_variables(&self, flags: &[&str], notices: &mut Vec<String>) -> Result<Given, ConfigError> {
        let mut given = Given::new();
        let mut known = BTreeSet::new();
        for flag in flags {
            for name in names::variables(flag) {
                let value = self.variables.get(&name).filter(|value| !value.is_empty());
                if value.is_some_and(|value| names::is_of_kubernetes(&name, value)) {
                    notices.push(format!("{name} is taken for a variable of Kubernetes, and has no effect"));
                } else if let Some(value) = value {
                    given.entry((*flag).to_owned()).or_insert((value.clone(), Source::Variable(name.clone())));
                }
                known.insert(name);
            }
        }
        let ours = |name: &String| names::PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        for (name, value) in self.variables.iter().filter(|(name, _)| ours(name) && !known.contains(*name)) {
            if names::is_of_kubernetes(name, value) {
                continue;
            }
            if let Some(nearest) = names::nearest_variable(name, known.iter().map(String::as_str)) {
                return Err(ConfigError::UnknownVariable { name: name.clone(), nearest: nearest.to_owned() });
            }
            notices.push(format!("{name} is no setting, and has no effect"));
        }
        Ok(given)
    }
}

/// The command with what bazel-remote's operators expect of flags.
fn prepare(command: Command) -> Command {
    let with_foreign = foreign::arguments().fold(command.args_override_self(true), Command::arg);
    with_foreign.mut_args(|arg| {
        if !matches!(arg.get_action(), ArgAction::SetTrue) {
            return arg;
        }
        // As in Go: `--x`, `--x=T`, `--x=0`.
        let has_default = !arg.get_default_values().is_empty();
        let arg = arg.action(ArgAction::Set).num_args(0..=1).require_equals(true);
        let arg = arg.default_missing_value("true").value_parser(values::boolean).hide_possible_values(true);
        if has_default { arg } else { arg.default_value("false") }
    })
}

/// Not one of those that end the program at once.
fn is_setting(arg: &Arg) -> bool {
    arg.get_long().is_some() && !["help", "version", "print_config", "check_config"].contains(&arg.get_id().as_str())
}

fn known(arg: &Arg) -> Option<Known> {
    Some(Known { flag: arg.get_long()?.to_owned(), is_list: arg.get_value_delimiter().is_some() })
}

/// The arguments with two dashes where Go's flags may have one, and without flags that are given an empty value; those go
/// back to their defaults.
fn go_flags(args: &[OsString], flags: &[&str]) -> (Vec<OsString>, BTreeSet<String>) {
    let (mut out, mut emptied) = (Vec::new(), BTreeSet::new());
    let mut args = args.iter().peekable();
    while let Some(arg) = args.next() {
        let Some(text) = arg.to_str().filter(|text| text.starts_with('-')) else {
            out.push(arg.clone());
            continue;
        };
        if text == "--" {
            out.push(arg.clone());
            out.extend(args.cloned());
            break;
        }
        let is_short = |text: &str| text.len() <= 2 || !text[1..].starts_with(|c: char| c.is_ascii_alphabetic());
        let text = if text.starts_with("--") || is_short(text) { text.to_owned() } else { format!("-{text}") };
        let body = text.trim_start_matches('-');
        let (name, value) = body.split_once('=').map_or((body, None), |(name, value)| (name, Some(value)));
        let is_alone = value.is_none();
        let has_empty = value.map_or_else(|| args.peek().is_some_and(|next| next.is_empty()), str::is_empty);
        if has_empty && flags.contains(&name) {
            emptied.insert(name.to_owned());
            is_alone.then(|| args.next());
        } else {
            emptied.remove(name);
            out.push(text.into());
        }
    }
    (out, emptied)
}

/// bazel-remote's older flags for addresses: `host` for both, `port`, `grpc_port`. They count where they come from a place
/// that goes before that of the newer one.
fn compose_addresses(given: &mut Given, matches: &ArgMatches) {
    for (address, port, usual) in [("http_address", "port", "8080"), ("grpc_address", "grpc_port", "9092")] {
        let found = |flag: &str| -> Option<(String, Source)> {
            let on_line = matches.value_source(flag) == Some(ValueSource::CommandLine);
            let on_line = on_line.then(|| matches.get_one::<String>(flag).cloned()).flatten();
            on_line.map(|value| (value, Source::Flag)).or_else(|| given.get(flag).cloned())
        };
        let (host, port) = (found("host"), found(port));
        let Some(source) = [&host, &port].into_iter().flatten().map(|(_, source)| source).min_by_key(|s| s.rank())
        else {
            continue;
        };
        let newer = found(address).map_or(Source::Default, |(_, source)| source);
        if newer.rank() <= source.rank() {
            continue;
        }
        let source = source.clone();
        let host = host.map(|(host, _)| host).unwrap_or_default();
        let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
        let port = port.map_or(usual.to_owned(), |(port, _)| port);
        given.insert(address.to_owned(), (format!("{host}:{port}"), source));
    }
}

/// With another default of a flag, for tools too that have a flag of this name.
fn with_default(command: Command, flag: &str, value: &str) -> Command {
    let set = |arg: Arg| match arg.get_long() == Some(flag) {
        true => {
            let values = match arg.get_value_delimiter() {
                Some(delimiter) => value.split(delimiter).map(|part| ClapStr::from(part.to_owned())).collect(),
                None => vec![ClapStr::from(value.to_owned())],
            };
            arg.default_values(values)
        }
        false => arg,
    };
    command.mut_args(set).mut_subcommands(|tool| tool.mut_args(set))
}

fn entry(arg: &Arg, matches: &ArgMatches, given: &Given) -> Option<Entry> {
    let flag = arg.get_long().filter(|_| is_setting(arg))?;
    let id = arg.get_id().as_str();
    let is_on_line = matches.value_source(id) == Some(ValueSource::CommandLine);
    let source = match given.get(flag) {
        _ if is_on_line => Source::Flag,
        Some((_, source)) => source.clone(),
        None => Source::Default,
    };
    if source == Source::Default && foreign::has(flag) {
        return None;
    }
    let texts: Vec<_> = matches.get_raw(id).into_iter().flatten().map(OsStr::to_string_lossy).collect();
    let value = Some(texts.join(",")).filter(|value| !value.is_empty());
    let is_secret = arg.get_value_parser().type_id() == std::any::TypeId::of::<Secret>();
    Some(Entry { flag: flag.to_owned(), value, source, is_secret })
}

/// Clap's error of a word behind the server's flags, which it takes for a tool, with what it may have been meant for.
fn explained(error: clap::Error, command: &Command) -> clap::Error {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else { return error };
    if error.kind() != ErrorKind::ArgumentConflict {
        return error;
    }
    let text = match command.find_subcommand(word) {
        Some(_) => format!("the flags of a tool stand behind its name: ringcas {word} --dir <DIR>\n"),
        None => format!("unexpected argument '{word}' found; true and false stand behind `=`, as in --x=false\n"),
    };
    clap::Error::raw(ErrorKind::UnknownArgument, text)
}

/// What clap found wrong with a value.
fn problem(error: &clap::Error) -> String {
    match (error.source(), error.get(ContextKind::ValidValue)) {
        (Some(source), _) => source.to_string(),
        (None, Some(ContextValue::Strings(values))) => format!("give one of {}", values.join(", ")),
        (None, _) => error.kind().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Flags;
    use super::*;

    fn read(args: &[&str], variables: &[(&str, &str)]) -> Result<Outcome<Flags>, ConfigError> {
        Inputs::new(args, variables).read()
    }

    fn value(outcome: &Outcome<Flags>, flag: &str) -> (Option<String>, Source) {
        let found = outcome.effective.0.iter().find(|entry| entry.flag == flag).expect("a setting");
        (found.value.clone(), found.source.clone())
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("written");
        file
    }

    /// Goal: a flag goes before our variable, that before bazel-remote's, that before the file, that before the default; an
    /// empty value says nothing. Method: one setting in all places, one place less at a time.
    #[test]
    fn the_first_place_counts() {
        let yaml = file("storage_mode: zstd\nack: durable\n");
        let config = format!("--config_file={}", yaml.path().display());
        let both = [("RINGCAS_STORAGE_MODE", "zstd"), ("BAZEL_REMOTE_STORAGE_MODE", "uncompressed")];
        let of =
            |args: &[&str], variables: &[(&str, &str)]| value(&read(args, variables).expect("valid"), "storage_mode");
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(of(&["--storage_mode=uncompressed", &config], &both), (some("uncompressed"), Source::Flag));
        assert_eq!(of(&[&config], &both), (some("zstd"), Source::Variable("RINGCAS_STORAGE_MODE".into())));
        let theirs = Source::Variable("BAZEL_REMOTE_STORAGE_MODE".into());
        assert_eq!(of(&[&config], &both[1..]), (some("uncompressed"), theirs));
        assert_eq!(of(&[&config], &[("RINGCAS_STORAGE_MODE", "")]), (some("zstd"), Source::File(yaml.path().into())));
        assert_eq!(of(&["--storage_mode=", &config], &both), (some("zstd"), Source::Default));
        assert_eq!(
            of(&["--storage_mode", "", "--storage_mode=uncompressed"], &[]),
            (some("uncompressed"), Source::Flag)
        );
        let named = [("BAZEL_REMOTE_CONFIG_FILE", yaml.path().to_str().expect("UTF-8"))];
        assert_eq!(value(&read(&[], &named).expect("valid"), "ack").0, some("durable"));
    }

    /// Goal: flags in the forms that Go's package takes. Method: each form, and what is no flag.
    #[test]
    fn flags_as_in_go() {
        let of = |args: &[&str], flag| value(&read(args, &[]).expect("valid"), flag).0.unwrap_or_default();
        for args in [&["-dir=/d"][..], &["-dir", "/d"], &["--dir=/d"], &["--dir", "/d"], &["-dir=/x", "--dir=/d"]] {
            assert_eq!(of(args, "dir"), "/d", "{args:?}");
        }
        let mangles = |args: &[&str]| read(args, &[]).expect("valid").flags.enable_ac_key_instance_mangling;
        assert!(mangles(&["-enable_ac_key_instance_mangling"]));
        assert!(mangles(&["--enable_ac_key_instance_mangling=T", "--dir=/d"]));
        assert!(!mangles(&["--enable_ac_key_instance_mangling=0"]));
        assert!(!mangles(&[]));
        assert!(read(&["--enable_ac_key_instance_mangling=2"], &[]).is_err());
        assert_eq!(of(&["--s3.conn_recycle_interval", "-5m"], "s3.conn_recycle_interval"), "-5m");
        assert_eq!(of(&["--s3.access_key_id=ends=with="], "s3.access_key_id"), "ends=with=");
        let text = |args: &[&str]| read(args, &[]).expect_err("no flag").to_string();
        assert!(text(&["-max_siez=1"]).contains("'--max_size'"), "{}", text(&["-max_siez=1"]));
        assert!(text(&["--no_such_flag="]).contains("no_such_flag"));
        assert!(text(&["positional"]).contains("positional"));
    }

    /// Goal: what is wrong is named where it stands, with what would be right. Method: wrong values, misspelt names.
    #[test]
    fn errors_name_the_place() {
        let text = |variables: &[(&str, &str)]| read(&[], variables).expect_err("an error").to_string();
        let by_type = text(&[("BAZEL_REMOTE_MAX_SIZE", "x")]);
        assert_eq!(by_type, "BAZEL_REMOTE_MAX_SIZE \"x\": not a number of GiB; write 100 or 0.5");
        let by_choice = text(&[("RINGCAS_STORAGE_MODE", "gzip")]);
        assert_eq!(by_choice, "RINGCAS_STORAGE_MODE \"gzip\": give one of zstd, uncompressed");
        let misspelt = text(&[("RINGCAS_MAX_SIEZ", "1")]);
        assert_eq!(misspelt, "there is no variable RINGCAS_MAX_SIEZ; did you mean RINGCAS_MAX_SIZE?");
        let yaml = file("s3_proxy:\n  read_timeout: soon\n");
        let config = format!("--config_file={}", yaml.path().display());
        let in_file = read(&[&config], &[]).expect_err("an error").to_string();
        let place = format!("{}: s3_proxy.read_timeout", yaml.path().display());
        assert!(in_file.starts_with(&place) && in_file.contains("write 250ms"), "{in_file}");
    }

    /// Goal: what Kubernetes and others set is no error. Method: such variables, and a port that is an address.
    #[test]
    fn variables_of_others() {
        let notices = |variables: &[(&str, &str)]| read(&[], variables).expect("valid").notices;
        assert!(
            notices(&[("BAZEL_REMOTE_SERVICE_HOST", "10.0.0.1"), ("RINGCAS_PORT_9092_TCP", "tcp://h:1")]).is_empty()
        );
        let service = ["RINGCAS_GRPC_PORT_9092_TCP", "RINGCAS_HEADLESS_PORT", "BAZEL_REMOTE_CACHE_PORT"];
        assert!(notices(&service.map(|name| (name, "tcp://10.0.0.1:9092"))).is_empty());
        let [port] = &notices(&[("BAZEL_REMOTE_PORT", "tcp://10.0.0.1:8080")])[..] else { panic!("one line") };
        assert!(port.contains("Kubernetes"), "{port}");
        let [other] = &notices(&[("RINGCAS_SOMETHING_ELSE", "1")])[..] else { panic!("one line") };
        assert_eq!(other, "RINGCAS_SOMETHING_ELSE is no setting, and has no effect");
    }

    /// Goal: the older flags of addresses count, where no newer one does in the same place or before. Method: all places.
    #[test]
    fn older_addresses() {
        let yaml = file("http_address: h:1\n");
        let config = format!("--config_file={}", yaml.path().display());
        let of = |args: &[&str], variables: &[(&str, &str)]| {
            let outcome = read(args, variables).expect("valid");
            let of = |flag| value(&outcome, flag).0.unwrap_or_default();
            (of("http_address"), of("grpc_address"))
        };
        let pair = |http: &str, grpc: &str| (http.to_owned(), grpc.to_owned());
        assert_eq!(of(&[], &[]), pair(":8080", ":9092"));
        assert_eq!(of(&["--host=::1", "--grpc_port=7"], &[]), pair("[::1]:8080", "[::1]:7"));
        assert_eq!(of(&["--port=80", "--http_address=h:2"], &[]), pair("h:2", ":9092"));
        assert_eq!(of(&[&config], &[("BAZEL_REMOTE_PORT", "81")]), pair(":81", ":9092"));
        assert_eq!(of(&["--http_address=none"], &[("BAZEL_REMOTE_PORT", "81")]), pair("none", ":9092"));
        assert_eq!(of(&["--port=0", "--grpc_port", "0"], &[]), pair(":0", ":0"));
    }
}
