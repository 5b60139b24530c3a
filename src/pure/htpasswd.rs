//! Password files as Apache's `htpasswd` writes them: `user:hash` lines, hashed by bcrypt, SHA-1 or Apache's MD5.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use md5::Md5;
use sha1::Sha1;
use sha2::Digest as _;

use super::secret::same;

/// The highest cost of a bcrypt hash that is accepted. Why: each step doubles the time, 14 takes about a second.
pub const BCRYPT_COST_MAX: u32 = 14;

/// Users and the hashes of their passwords.
#[derive(Debug, Default)]
pub struct Htpasswd(HashMap<Box<str>, PasswordHash>);

/// The hash of one password.
#[derive(Clone)]
pub enum PasswordHash {
    /// As it stands in the file: `$2y$10$...`.
    Bcrypt(Box<str>),
    Sha1([u8; 20]),
    /// Apache's MD5, or the older MD5 of crypt(3).
    Md5 {
        magic: &'static str,
        salt: Box<str>,
        hash: Box<str>,
    },
}

/// What is wrong with a line.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct LineError {
    pub line: usize,
    pub problem: String,
}

impl std::fmt::Debug for PasswordHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(hash of a password)")
    }
}

impl Htpasswd {
    /// Reads a file. Empty lines and lines that begin with `#` say nothing.
    pub fn parse(text: &str) -> Result<Self, LineError> {
        let mut users = HashMap::new();
        for (line, text) in super::roles::lines(text) {
            let fail = |problem: String| LineError { line, problem };
            let Some((user, rest)) = text.split_once(':') else {
                return Err(fail("it must be user:hash, as htpasswd writes it".into()));
            };
            // What follows a second colon is a comment to Apache.
            let hash = rest.split(':').next().unwrap_or_default();
            let hash = PasswordHash::parse(hash).map_err(|problem| fail(format!("user {user:?}: {problem}")))?;
            if user.is_empty() {
                return Err(fail("the user has no name".into()));
            }
            if users.insert(user.into(), hash).is_some() {
                return Err(fail(format!("user {user:?} stands there twice")));
            }
        }
        Ok(Self(users))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The hash of a user's password.
    pub fn get(&self, user: &str) -> Option<&PasswordHash> {
        self.0.get(user)
    }

    /// Any hash, to compare the password of an unknown user with: so that it takes as long as that of a known one.
    pub fn any(&self) -> Option<&PasswordHash> {
        self.0.values().next()
    }
}

impl PasswordHash {
    fn parse(text: &str) -> Result<Self, String> {
        if ["$2a$", "$2b$", "$2x$", "$2y$"].iter().any(|magic| text.starts_with(magic)) {
            let is_known = text.parse::<bcrypt::HashParts>().is_ok_and(|parts| parts.get_cost() <= BCRYPT_COST_MAX);
            return match is_known {
                true => Ok(Self::Bcrypt(text.into())),
                false => Err(format!("it is no bcrypt hash of a cost of at most {BCRYPT_COST_MAX}")),
            };
        }
        if let Some(hash) = text.strip_prefix("{SHA}") {
            let bytes = STANDARD.decode(hash).ok().and_then(|bytes| bytes.try_into().ok());
            return bytes.map(Self::Sha1).ok_or_else(|| "it is no SHA-1 in base64".into());
        }
        for magic in ["$apr1$", "$1$"] {
            let Some((salt, hash)) = text.strip_prefix(magic).and_then(|rest| rest.split_once('$')) else { continue };
            if salt.len() <= 8 && hash.len() == MD5_TEXT_LEN {
                return Ok(Self::Md5 { magic, salt: salt.into(), hash: hash.into() });
            }
        }
        Err("the kind of its hash is not known: make it with `htpasswd -B`".into())
    }

    /// Whether it is that of `password`. Slow, and meant to be: bcrypt takes 50 ms and more.
    pub fn is_of(&self, password: &str) -> bool {
        match self {
            Self::Bcrypt(hash) => bcrypt::verify(password, hash).unwrap_or(false),
            Self::Sha1(hash) => same(&Sha1::digest(password.as_bytes()), hash),
            Self::Md5 { magic, salt, hash } => same(md5_crypt(password, magic, salt).as_bytes(), hash.as_bytes()),
        }
    }
}

/// An MD5 in the alphabet of crypt(3).
const MD5_TEXT_LEN: usize = 22;
const CRYPT_ALPHABET: &[u8; 64] = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// The MD5 of crypt(3), which Apache uses with a magic of its own. Source: apr_md5.c, `apr_md5_encode`.
fn md5_crypt(password: &str, magic: &str, salt: &str) -> String {
    let (password, salt) = (password.as_bytes(), salt.as_bytes());
    let twice = Md5::new().chain_update(password).chain_update(salt).chain_update(password).finalize();
    let mut first = Md5::new().chain_update(password).chain_update(magic).chain_update(salt);
    for at in (0..password.len()).step_by(16) {
        first.update(&twice[..(password.len() - at).min(16)]);
    }
    let mut left = password.len();
    while left > 0 {
        first.update(if left & 1 == 1 { &[0] } else { &password[..1] });
        left >>= 1;
    }
    let mut digest = first.finalize();
    for round in 0..1000 {
        let mut next = Md5::new();
        if round & 1 == 1 {
            next.update(password)
        } else {
            next.update(digest)
        }
        if round % 3 != 0 {
            next.update(salt);
        }
        if round % 7 != 0 {
            next.update(password);
        }
        if round & 1 == 1 {
            next.update(digest)
        } else {
            next.update(password)
        }
        digest = next.finalize();
    }
    let mut text = String::with_capacity(MD5_TEXT_LEN);
    let mut put = |mut value: u32, count: usize| {
        for _ in 0..count {
            text.push(char::from(CRYPT_ALPHABET[(value & 63) as usize]));
            value >>= 6;
        }
    };
    for (high, middle, low) in [(0, 6, 12), (1, 7, 13), (2, 8, 14), (3, 9, 15), (4, 10, 5)] {
        put(u32::from(digest[high]) << 16 | u32::from(digest[middle]) << 8 | u32::from(digest[low]), 4);
    }
    put(u32::from(digest[11]), 2);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every kind of hash that htpasswd and openssl write is taken for its password and no other. Method: lines made by
    /// `openssl passwd -apr1` and `-1`, `openssl sha1`, and crypt(3).
    #[test]
    fn known_hashes() {
        const LONG: &str = "a password that is longer than sixteen bytes, and than thirty-two";
        for (line, password) in [
            ("u:$apr1$abcdefgh$rK/lObuciIG5ziaV8BdHR/", "pass"),
            ("u:$apr1$xy$nzGh6v/MInwvRmqJfRf1i1", LONG),
            ("u:$1$abcdefgh$1s0bv7.OjNizlrMAOIQD7.", "pass"),
            ("u:{SHA}nU4eI71bcnBGqeO0t9tXvY1u5oQ=", "pass"),
            ("u:$2y$05$abcdefghijklmnopqrstuuZFBUbfXoM8LFiPx8LYlO/sXZB/Cwk3K", "pass"),
        ] {
            let file = Htpasswd::parse(line).expect(line);
            let hash = file.get("u").expect(line);
            assert!(hash.is_of(password), "{line}");
            assert!(!hash.is_of(&format!("{password}x")) && !hash.is_of(""), "{line}");
            assert!(!format!("{file:?}").contains('$'));
        }
    }

    /// Goal: what is wrong is named by its line. Method: one line of each kind behind a good one.
    #[test]
    fn wrong_lines() {
        let good = "# users\n\na:{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=:a comment\n";
        assert_eq!(Htpasswd::parse(good).map(|file| file.len()), Ok(1));
        for (line, problem) in [
            ("b", "must be user:hash"),
            (":{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=", "no name"),
            ("a:{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=", "twice"),
            ("b:{SHA}W6ph5", "no SHA-1"),
            ("b:plain", "not known"),
            ("b:$6$salt$hash", "not known"),
            ("b:$apr1$salt$short", "not known"),
            ("b:$2y$05$short", "bcrypt"),
            ("b:$2y$15$abcdefghijklmnopqrstuuZFBUbfXoM8LFiPx8LYlO/sXZB/Cwk3K", "at most 14"),
        ] {
            let error = Htpasswd::parse(&format!("{good}{line}\n")).expect_err(line).to_string();
            assert!(error.starts_with("line 4: ") && error.contains(problem), "{error}");
        }
    }
}
