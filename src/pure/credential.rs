//! What a request says about who sends it: `authorization`, or `user:password@` in front of the host.

use base64::Engine as _;
use base64::alphabet::{self, Alphabet};
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use super::secret::Secret;

/// The longest user name and password together, in bytes, and the longest token.
pub const CREDENTIAL_LEN_MAX: usize = 4096;

/// What came with a request.
#[derive(Debug)]
pub enum Credential {
    None,
    Basic {
        user: Box<str>,
        password: Secret,
    },
    Bearer(Secret),
    /// Something that is no credential; why.
    Malformed(&'static str),
}

const fn lenient(alphabet: &Alphabet) -> GeneralPurpose {
    let config = GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true);
    GeneralPurpose::new(alphabet, config)
}

const STANDARD: GeneralPurpose = lenient(&alphabet::STANDARD);
/// Bazel's HTTP client takes this one.
const URL_SAFE: GeneralPurpose = lenient(&alphabet::URL_SAFE);

impl Credential {
    /// The values of `authorization`, in turn, and the authority that the request names. The header goes first.
    ///
    /// Source: RFC 7617 and RFC 6750, 2.1. Why the authority: it is where Bazel puts the credentials of
    /// `grpc://user:password@host`.
    pub fn of<'a>(mut values: impl Iterator<Item = &'a [u8]>, authority: Option<&str>) -> Self {
        match (values.next(), values.next()) {
            (Some(_), Some(_)) => Self::Malformed("there is more than one authorization header"),
            (Some(value), None) => Self::of_header(value),
            (None, _) => authority.map_or(Self::None, Self::of_authority),
        }
    }

    fn of_header(value: &[u8]) -> Self {
        let Ok(text) = std::str::from_utf8(value) else { return Self::Malformed("authorization is not text") };
        if text.len() > 2 * CREDENTIAL_LEN_MAX {
            return Self::Malformed("authorization is too long");
        }
        let (scheme, rest) = text.split_once(' ').unwrap_or((text, ""));
        let rest = rest.trim();
        if scheme.eq_ignore_ascii_case("bearer") {
            return if rest.is_empty() {
                Self::Malformed("the token is empty")
            } else {
                Self::Bearer(Secret::new(rest))
            };
        }
        if !scheme.eq_ignore_ascii_case("basic") {
            return Self::Malformed("authorization is neither Basic nor Bearer");
        }
        let Ok(bytes) = STANDARD.decode(rest).or_else(|_| URL_SAFE.decode(rest)) else {
            return Self::Malformed("the Basic credentials are not base64");
        };
        let text = String::from_utf8(bytes).ok();
        match text.as_ref().and_then(|text| text.split_once(':')) {
            Some((user, password)) => Self::basic(user, password),
            None => Self::Malformed("the Basic credentials are not user:password"),
        }
    }

    fn of_authority(authority: &str) -> Self {
        match authority.rsplit_once('@').map(|(login, _)| login.split_once(':')) {
            None => Self::None,
            Some(Some((user, password))) => Self::basic(user, password),
            Some(None) => Self::Malformed("what stands before the host is not user:password"),
        }
    }

    fn basic(user: &str, password: &str) -> Self {
        if user.is_empty() || password.is_empty() {
            return Self::Malformed("the user or the password is empty");
        }
        if user.len() + password.len() > CREDENTIAL_LEN_MAX {
            return Self::Malformed("the user and the password are too long");
        }
        Self::Basic { user: user.into(), password: Secret::new(password) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(headers: &[&str], authority: Option<&str>) -> String {
        match Credential::of(headers.iter().map(|value| value.as_bytes()), authority) {
            Credential::None => "none".into(),
            Credential::Basic { user, password } => format!("{user}/{}", password.reveal()),
            Credential::Bearer(token) => format!("token {}", token.reveal()),
            Credential::Malformed(why) => format!("bad: {why}"),
        }
    }

    /// Goal: credentials are found wherever clients put them, in whichever base64. Method: a table; the two alphabets
    /// differ in `+/` and `-_`, which the password `\u{fb}\u{ff}?>` brings about.
    #[test]
    fn reads_what_clients_send() {
        for (headers, authority, expected) in [
            (&[][..], None, "none"),
            (&[], Some("cache:9092"), "none"),
            (&["Basic dXNlcjpwYXNz"], None, "user/pass"),
            (&["basic   dXNlcjpwYXNzdw=="], Some("other:login@cache"), "user/passw"),
            (&["Basic dXNlcjpwYXNzdw"], None, "user/passw"),
            (&["Basic dTo/Pz8+Pj4="], None, "u/???>>>"),
            (&["Basic dTo_Pz8-Pj4"], None, "u/???>>>"),
            (&["Basic dTpwOnE="], None, "u/p:q"),
            (&["Bearer abc.def"], None, "token abc.def"),
            (&["BEARER  x "], None, "token x"),
            (&[], Some("user:pass@cache:9092"), "user/pass"),
            (&[], Some("user:p@ss:w@cache:9092"), "user/p@ss:w"),
            (&[], Some("user@cache"), "bad: what stands before the host is not user:password"),
            (&["Basic dXNlcg=="], None, "bad: the Basic credentials are not user:password"),
            (&["Basic OnBhc3M="], None, "bad: the user or the password is empty"),
            (&["Basic dXNlcjo="], None, "bad: the user or the password is empty"),
            (&["Basic ***"], None, "bad: the Basic credentials are not base64"),
            (&["Basic"], None, "bad: the Basic credentials are not user:password"),
            (&["Bearer "], None, "bad: the token is empty"),
            (&["Digest x"], None, "bad: authorization is neither Basic nor Bearer"),
            (&["Basic dXNlcjpwYXNz", "Bearer x"], None, "bad: there is more than one authorization header"),
        ] {
            assert_eq!(of(headers, authority), expected, "{headers:?} {authority:?}");
        }
        assert!(of(&[&format!("Bearer {}", "x".repeat(9000))], None).starts_with("bad"));
        assert!(of(&[], Some(&format!("u:{}@h", "x".repeat(9000)))).starts_with("bad"));
        let shown = format!("{:?}", Credential::of([&b"Bearer hunter2"[..]].into_iter(), None));
        assert!(!shown.contains("hunter2"));
    }
}
