//! Changes of the configuration while the server runs: SIGHUP reads it again, and hands it to the parts that can change.

use std::time::Duration;

use crate::access::AccessFiles;
use crate::backend::settings::{Patience, Settings};
use crate::config::effective::Effective;
use crate::config::inputs::{Inputs, Outcome};
use crate::config::{Config, ConfigError, Flags, WriteShedStatus};
use crate::kept::Kept;
use crate::net::tls::TlsFiles;
use crate::rt::latest::Latest;

/// Something that can change while the server runs.
pub trait Part: Send {
    /// Flags whose new values this takes over.
    fn flags(&self) -> &[&str];

    /// Takes over what `config` says, and what files that it names hold now. Returns what changed besides the flags' values,
    /// for the log. On an error everything has to be as before. Runs on a thread that may block.
    fn reload(&mut self, config: &Config) -> Result<Option<String>, String>;
}

/// Settings that every core looks at, and that can change while it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Live {
    /// One log line for each request.
    pub access_log: bool,
    pub endpoint_metrics: bool,
    /// Zero for no limit.
    pub http_read_timeout: Duration,
    pub http_write_timeout: Duration,
    /// Bytes.
    pub max_blob_size: u64,
    /// `None` without backends.
    pub s3_patience: Option<Patience>,
    pub shutdown_timeout: Duration,
    pub write_queue_wait: Duration,
    pub write_shed_status: WriteShedStatus,
    /// `None` for as many as there is memory for.
    pub write_slots: Option<u32>,
}

impl Live {
    /// The flags that these follow from.
    const FLAGS: [&str; 12] = [
        "access_log_level",
        "enable_endpoint_metrics",
        "http_read_timeout",
        "http_write_timeout",
        "max_blob_size",
        "max_inflight_cas_writes",
        "s3.existence_timeout",
        "s3.read_timeout",
        "s3.upload_timeout",
        "shutdown_timeout",
        "write_queue_wait",
        "write_shed_status",
    ];

    pub fn of(config: &Config) -> Self {
        Self {
            access_log: config.access_log,
            endpoint_metrics: config.endpoint_metrics,
            http_read_timeout: config.http_read_timeout,
            http_write_timeout: config.http_write_timeout,
            max_blob_size: config.max_blob_size,
            s3_patience: config.backends.as_ref().map(Settings::patience),
            shutdown_timeout: config.shutdown_timeout,
            write_queue_wait: config.write_queue_wait,
            write_shed_status: config.write_shed_status,
            write_slots: config.write_slots,
        }
    }
}

impl Part for Latest<Live> {
    fn flags(&self) -> &[&str] {
        &Live::FLAGS
    }

    fn reload(&mut self, config: &Config) -> Result<Option<String>, String> {
        let live = Live::of(config);
        if *self.get() != live {
            self.set(live);
        }
        Ok(None)
    }
}

impl Part for Kept<TlsFiles> {
    fn flags(&self) -> &[&str] {
        &["tls_cert_file", "tls_key_file", "tls_ca_file", "min_tls_version"]
    }

    fn reload(&mut self, config: &Config) -> Result<Option<String>, String> {
        let Some(files) = config.tls.clone() else {
            return Err("TLS cannot be turned off while the server runs".into());
        };
        // Why: what the rest of access control does depends on it.
        if files.authorities.is_some() != self.with(|now| now.authorities.is_some()) {
            return Err("--tls_ca_file cannot be given or taken away while the server runs, only changed".into());
        }
        self.change(files).map(|()| Some("certificates were read again".into())).map_err(|error| error.to_string())
    }
}

impl Part for Kept<AccessFiles> {
    fn flags(&self) -> &[&str] {
        &["htpasswd_file", "token_file", "roles_file", "allow_unauthenticated_reads"]
    }

    fn reload(&mut self, config: &Config) -> Result<Option<String>, String> {
        let files = config.access.clone();
        if !files.is_guarded() {
            return Err("access control cannot be turned off while the server runs".into());
        }
        self.change(files).map(|()| Some("credentials were read again".into())).map_err(|error| error.to_string())
    }
}

/// Reads the configuration again when asked, and tells the parts.
pub struct Reloader {
    inputs: Inputs,
    /// What runs.
    effective: Effective,
    parts: Vec<Box<dyn Part>>,
}

impl Reloader {
    /// For a server that was started with these.
    pub fn new(inputs: Inputs, effective: Effective) -> Self {
        Self { inputs, effective, parts: Vec::new() }
    }

    /// One more that is told.
    pub fn add(&mut self, part: impl Part + 'static) {
        self.parts.push(Box::new(part));
    }

    /// Reads everything again. On an error nothing changes.
    pub fn reload(&mut self) {
        let read: Result<Outcome<Flags>, ConfigError> = self.inputs.read();
        let resolved = read.and_then(|outcome| Ok((outcome.flags.resolve()?, outcome.effective, outcome.notices)));
        match resolved {
            Ok((config, effective, notices)) => {
                notices.iter().for_each(|line| tracing::warn!("{line}"));
                self.apply(&config, effective);
            }
            Err(error) => tracing::error!("reload: nothing changes: {error}"),
        }
    }

    fn apply(&mut self, config: &Config, effective: Effective) {
        let (mut applied, mut failed, mut lines) = (Vec::new(), Vec::new(), 0);
        for part in &mut self.parts {
            match part.reload(config) {
                Ok(changed) => {
                    applied.extend(part.flags().iter().map(|flag| flag.to_string()));
                    changed.iter().for_each(|line| tracing::info!("reload: {line}"));
                    lines += changed.iter().len();
                }
                Err(error) => {
                    failed.extend(part.flags().iter().map(|flag| flag.to_string()));
                    tracing::error!("reload: {error}; what was in use before stays");
                    lines += 1;
                }
            }
        }
        for (before, after) in self.effective.changes(&effective) {
            let (flag, old, new) = (&after.flag, before.shown(), after.shown());
            lines += 1;
            if applied.contains(flag) {
                tracing::info!("reload: {flag} was {old}, is now {new}");
                self.effective.set(after);
            } else if !failed.contains(flag) {
                tracing::warn!("reload: {flag} stays {old}: for {new} the server has to be started again");
            }
        }
        if lines == 0 {
            tracing::info!("reload: nothing has changed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    fn read(inputs: &Inputs) -> (Config, Effective) {
        let outcome: Outcome<Flags> = inputs.read().expect("valid");
        (outcome.flags.resolve().expect("it fits this machine"), outcome.effective)
    }

    /// Goal: what cores are told follows from exactly the flags that count as taken over. Method: another value for each.
    #[test]
    fn each_flag_counts() {
        let store = ["--dir=/d", "--s3.bucket=b", "--s3.endpoint=h"];
        let base = Live::of(&read(&Inputs::new(&store, &[])).0);
        let others = [
            ("access_log_level", "none"),
            ("enable_endpoint_metrics", "false"),
            ("http_read_timeout", "7s"),
            ("http_write_timeout", "7s"),
            ("max_blob_size", "7"),
            ("max_inflight_cas_writes", "7"),
            ("s3.existence_timeout", "7s"),
            ("s3.read_timeout", "7s"),
            ("s3.upload_timeout", "7s"),
            ("shutdown_timeout", "7s"),
            ("write_queue_wait", "7s"),
            ("write_shed_status", "unavailable"),
        ];
        assert_eq!(others.map(|(flag, _)| flag), Live::FLAGS);
        for (flag, value) in others {
            let live = Live::of(&read(&Inputs::new(&[&store[..], &[&format!("--{flag}={value}")]].concat(), &[])).0);
            assert_ne!(live, base, "{flag}");
        }
    }

    /// A part that takes nothing over.
    struct Stubborn(Arc<Mutex<u32>>);

    impl Part for Stubborn {
        fn flags(&self) -> &[&str] {
            &["ack"]
        }

        fn reload(&mut self, _: &Config) -> Result<Option<String>, String> {
            *self.0.lock().expect("no panic") += 1;
            Err("no".into())
        }
    }

    /// Goal: a reload takes over what can change, remembers what runs, and changes nothing on an error.
    /// Method: a file that is written anew between reloads: a change of each kind, a broken one, back again.
    #[test]
    fn takes_over_what_can_change() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let write = |text: &str| std::fs::write(file.path(), text).expect("written");
        write("dir: /d\nshutdown_timeout: 5s\nstorage_mode: zstd\n");
        let inputs = Inputs::new(&["--config_file", file.path().to_str().expect("UTF-8")], &[]);
        let (config, effective) = read(&inputs);
        let (live, told) = (Latest::new(Live::of(&config)), Arc::default());
        let mut reloader = Reloader::new(inputs, effective);
        reloader.add(live.clone());
        reloader.add(Stubborn(Arc::clone(&told)));
        let value = |reloader: &Reloader, flag: &str| {
            reloader.effective.given().find(|entry| entry.flag == flag).and_then(|entry| entry.value.clone())
        };
        let some = |text: &str| Some(text.to_owned());

        write("dir: /d\nshutdown_timeout: 6s\nstorage_mode: uncompressed\nack: durable\naccess_log_level: none\n");
        reloader.reload();
        let now = || (live.get().access_log, live.get().shutdown_timeout.as_secs());
        assert_eq!(now(), (false, 6));
        assert_eq!(value(&reloader, "shutdown_timeout"), some("6s"));
        assert_eq!(value(&reloader, "storage_mode"), some("zstd"), "it needs a restart");
        assert_eq!(value(&reloader, "ack"), None, "its part refused");

        write("dir: /d\nshutdown_timeout: soon\naccess_log_level: all\n");
        reloader.reload();
        assert_eq!(now(), (false, 6));
        assert_eq!(*told.lock().expect("no panic"), 1, "no part is told of a broken file");

        write("dir: /d\n");
        reloader.reload();
        assert_eq!(now(), (true, 30));
    }
}
