//! Who may do what: roles, the file that gives them to users and certificates, and the file of tokens.

use std::collections::HashMap;

use sha2::{Digest as _, Sha256};

use super::htpasswd::LineError;

/// What somebody may do; each includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Reads blobs, action results, metrics and the status.
    Read,
    /// Stores blobs and action results.
    Write,
    /// Purges.
    Admin,
}

impl Role {
    /// As files name it.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "read" => Some(Self::Read),
            "write" => Some(Self::Write),
            "admin" => Some(Self::Admin),
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Admin => "admin",
        }
    }
}

/// Lines with content and their numbers, from 1. Those that begin with `#` are comments.
pub fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    numbered.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

/// The roles of users and certificates: `role: name name ...` lines, the form of Apache's group files. A certificate is
/// named `cert/<its name>`; `*` is whoever is not named, and `write` without it.
#[derive(Debug, Default)]
pub struct Roles {
    named: HashMap<Box<str>, Role>,
    others: Option<Role>,
}

/// What stands before the name of a certificate.
const CERTIFICATE: &str = "cert/";

impl Roles {
    pub fn parse(text: &str) -> Result<Self, LineError> {
        let mut roles = Self::default();
        for (line, text) in lines(text) {
            let fail = |problem: String| LineError { line, problem };
            let role = text.split_once(':').and_then(|(role, names)| Some((Role::parse(role.trim())?, names)));
            let Some((role, names)) = role else {
                return Err(fail("it must be `role: name name ...`, the role read, write or admin".into()));
            };
            for name in names.split_whitespace() {
                let before = match name {
                    "*" => roles.others.replace(role),
                    name => roles.named.insert(name.into(), role),
                };
                if before.is_some_and(|before| before != role) {
                    return Err(fail(format!("{name:?} has another role already")));
                }
            }
        }
        Ok(roles)
    }

    pub fn of_user(&self, user: &str) -> Role {
        self.of(user)
    }

    pub fn of_certificate(&self, name: &str) -> Role {
        self.of(&format!("{CERTIFICATE}{name}"))
    }

    fn of(&self, name: &str) -> Role {
        self.named.get(name).copied().or(self.others).unwrap_or(Role::Write)
    }
}

/// The tokens that are accepted: `role token` lines, the token as it is or as `sha256:<hex of its SHA-256>`. What follows
/// is a comment. Kept as hashes, so that neither the memory nor the time of a look-up shows one.
#[derive(Debug, Default)]
pub struct Tokens(HashMap<[u8; 32], Role>);

/// The shortest token that is accepted, in bytes. Why: a short one can be guessed, and guesses cost nothing.
pub const TOKEN_LEN_MIN: usize = 16;

impl Tokens {
    pub fn parse(text: &str) -> Result<Self, LineError> {
        let mut tokens = HashMap::new();
        for (line, text) in lines(text) {
            let fail = |problem: String| LineError { line, problem };
            let mut words = text.split_whitespace();
            let (Some(role), Some(token)) = (words.next().and_then(Role::parse), words.next()) else {
                return Err(fail("it must be `role token`, the role read, write or admin".into()));
            };
            let hash = match token.strip_prefix("sha256:") {
                Some(hex) => hash_of_hex(hex).ok_or_else(|| fail("sha256: must have 64 hex digits".into()))?,
                None if token.len() < TOKEN_LEN_MIN => {
                    return Err(fail(format!("the token must have at least {TOKEN_LEN_MIN} bytes")));
                }
                None => hash_of(token),
            };
            if tokens.insert(hash, role).is_some() {
                return Err(fail("the token stands there twice".into()));
            }
        }
        Ok(Self(tokens))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The role of a token. Its time tells nothing about the tokens that there are: what is looked up is a hash.
    pub fn role_of(&self, token: &str) -> Option<Role> {
        self.0.get(&hash_of(token)).copied()
    }
}

fn hash_of(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

fn hash_of_hex(hex: &str) -> Option<[u8; 32]> {
    let mut hash = [0; 32];
    if hex.len() != 64 || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (at, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: roles go to those who are named, by the kind of their credential, and others have the default. Method: a file
    /// with all forms.
    #[test]
    fn roles_of_names() {
        let text = "# who\nread: guest cert/viewer\nread: another\n admin : root cert/root2\n";
        let roles = Roles::parse(text).expect("a file");
        for (user, role) in
            [("guest", Role::Read), ("another", Role::Read), ("root", Role::Admin), ("else", Role::Write)]
        {
            assert_eq!(roles.of_user(user), role, "{user}");
        }
        for (name, role) in [("viewer", Role::Read), ("root2", Role::Admin), ("guest", Role::Write), ("", Role::Write)]
        {
            assert_eq!(roles.of_certificate(name), role, "{name}");
        }
        let roles = Roles::parse("read: *\nwrite: ci").expect("a file");
        assert_eq!(
            (roles.of_user("ci"), roles.of_user("x"), roles.of_certificate("ci")),
            (Role::Write, Role::Read, Role::Read)
        );
        for (text, problem) in [
            ("reader: a", "line 1: it must be"),
            ("read a", "line 1: it must be"),
            ("read: a\n\nwrite: a", "line 3: \"a\" has another role"),
            ("read: *\nwrite: *", "line 2: \"*\" has another role"),
        ] {
            let error = Roles::parse(text).expect_err(text).to_string();
            assert!(error.starts_with(problem), "{error}");
        }
        assert!(Role::Read < Role::Write && Role::Write < Role::Admin);
        assert!([Role::Read, Role::Write, Role::Admin].iter().all(|role| Role::parse(role.name()) == Some(*role)));
    }

    /// Goal: tokens are found by either form and never shown. Method: a file with both, and wrong lines.
    #[test]
    fn roles_of_tokens() {
        let hashed = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        let tokens = Tokens::parse(&format!("write 0123456789abcdef for CI\n#\nadmin {hashed}\n")).expect("a file");
        assert_eq!(
            (tokens.role_of("0123456789abcdef"), tokens.role_of("test")),
            (Some(Role::Write), Some(Role::Admin))
        );
        assert_eq!(
            (tokens.role_of("0123456789abcdeF"), tokens.role_of(""), tokens.role_of(hashed)),
            (None, None, None)
        );
        assert!(!format!("{tokens:?}").contains("0123456789abcdef"));
        for (text, problem) in [
            ("write", "line 1: it must be"),
            ("0123456789abcdef write", "line 1: it must be"),
            ("read short", "line 1: the token must have at least 16"),
            ("read sha256:12", "line 1: sha256: must have 64"),
            ("read 0123456789abcdef\nwrite 0123456789abcdef", "line 2: the token stands there twice"),
        ] {
            let error = Tokens::parse(text).expect_err(text).to_string();
            assert!(error.starts_with(problem), "{error}");
        }
    }
}
