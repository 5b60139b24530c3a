//! The files that say who may do what.

use std::path::{Path, PathBuf};

use super::Role;
use crate::kept::Source;
use crate::pure::htpasswd::{Htpasswd, LineError};
use crate::pure::roles::{Roles, Tokens};
use crate::rt;

/// Where they are, and what goes with them.
#[derive(Debug, Clone, Default)]
pub struct AccessFiles {
    /// `--htpasswd_file`.
    pub htpasswd: Option<PathBuf>,
    /// `--token_file`.
    pub tokens: Option<PathBuf>,
    /// `--roles_file`.
    pub roles: Option<PathBuf>,
    /// Certificates of clients are verified (`--tls_ca_file`), and so are credentials.
    pub certificates: bool,
    /// `--allow_unauthenticated_reads`.
    pub open_reads: bool,
}

/// What the files say.
#[derive(Debug)]
pub struct Rules {
    pub(super) htpasswd: Htpasswd,
    pub(super) tokens: Tokens,
    pub(super) roles: Roles,
    pub(super) everybody: Option<Role>,
    challenge: String,
}

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{setting} {path}: {source}. Give a file that this user may read")]
    Read { setting: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{setting} {path}: {source}")]
    Line { setting: &'static str, path: PathBuf, source: LineError },
}

impl AccessFiles {
    /// Whether anybody is asked for a credential.
    pub fn is_guarded(&self) -> bool {
        self.htpasswd.is_some() || self.tokens.is_some() || self.certificates
    }
}

impl Source for AccessFiles {
    const WHAT: &'static str = "credentials";
    type Value = Rules;
    type Error = FileError;

    fn files(&self) -> Vec<&Path> {
        [&self.htpasswd, &self.tokens, &self.roles].into_iter().flatten().map(PathBuf::as_path).collect()
    }

    fn read(&self) -> Result<Rules, FileError> {
        let schemes = [
            (self.htpasswd.is_some(), "Basic realm=\"ringcas\", charset=\"UTF-8\""),
            (self.tokens.is_some(), "Bearer realm=\"ringcas\""),
            // No scheme is registered for it; RFC 9110 (11.6.1) wants at least one.
            (self.certificates, "Certificate realm=\"ringcas\""),
        ];
        let schemes: Vec<&str> = schemes.iter().filter(|(is_taken, _)| *is_taken).map(|(_, scheme)| *scheme).collect();
        Ok(Rules {
            htpasswd: parsed("--htpasswd_file", self.htpasswd.as_deref(), Htpasswd::parse)?,
            tokens: parsed("--token_file", self.tokens.as_deref(), Tokens::parse)?,
            roles: parsed("--roles_file", self.roles.as_deref(), Roles::parse)?,
            everybody: self.open_reads.then_some(Role::Read),
            challenge: schemes.join(", "),
        })
    }

    /// Why no errors: users may be added to an empty file while the server runs, and who has emptied one wants everybody out.
    fn doubts(&self, rules: &Rules) -> Vec<String> {
        let nobody = match (rules.htpasswd.is_empty() && rules.tokens.is_empty() && !self.certificates, self.open_reads)
        {
            (false, _) => "",
            (true, false) => ": no client is let in",
            (true, true) => ": no client may write",
        };
        let files = [
            ("--htpasswd_file", &self.htpasswd, rules.htpasswd.is_empty()),
            ("--token_file", &self.tokens, rules.tokens.is_empty()),
        ];
        let empty = files.into_iter().filter(|(_, _, is_empty)| *is_empty);
        let named = empty.filter_map(|(setting, path, _)| Some((setting, path.as_ref()?)));
        named.map(|(setting, path)| format!("{setting} {}: nobody stands in it{nobody}", path.display())).collect()
    }
}

impl Rules {
    /// The value of `WWW-Authenticate`. Source: RFC 9110, 11.6.1.
    pub(super) fn challenge(&self) -> &str {
        &self.challenge
    }
}

fn parsed<T: Default>(
    setting: &'static str,
    path: Option<&Path>,
    parse: impl Fn(&str) -> Result<T, LineError>,
) -> Result<T, FileError> {
    let Some(path) = path else { return Ok(T::default()) };
    let text = rt::whole::text(path).map_err(|source| FileError::Read { setting, path: path.into(), source })?;
    parse(&text).map_err(|source| FileError::Line { setting, path: path.into(), source })
}
