//! Who may do what: credentials to roles, uniformly for gRPC and HTTP.
//!
//! A request needs a role. It has the highest of: what everybody has (`--allow_unauthenticated_reads`), what the certificate
//! of its connection has, what the credential that it brings has. Where no access control is configured everybody may read
//! and write, and nothing is looked at.

mod files;
mod passwords;

use std::cell::Cell;
use std::fmt;
use std::net::IpAddr;
use std::rc::Rc;

pub use crate::pure::roles::Role;
pub use files::{AccessFiles, FileError, Rules};
pub use passwords::Passwords;

use crate::metrics::{Metric, Snapshot};
use crate::pure::credential::Credential;
use crate::rt::published::{Published, Reader};

/// What a request is allowed when no access control is configured. Why not `Admin`, unless that is asked for: whoever reaches
/// the port must not be able to empty the cache.
const EVERYBODY: Role = Role::Write;

/// What was asked for.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    /// The least role that will do.
    pub needs: Role,
    /// The answer depends on the role, so that a credential is looked at even where none is needed.
    pub at_best: bool,
}

impl From<Role> for Ask {
    fn from(needs: Role) -> Self {
        Self { needs, at_best: false }
    }
}

/// Who is at the other end of a connection, as far as the connection itself tells. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Peer {
    pub origin: Origin,
    /// The name of the certificate that it has shown, if that was verified: empty when the certificate has none.
    pub certificate: Option<Rc<str>>,
}

/// Where a connection comes from, as logs name it: an address, or `unix` for a process of this machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Origin(Option<IpAddr>);

impl From<IpAddr> for Origin {
    fn from(address: IpAddr) -> Self {
        // Why canonical: a socket for both versions shows 10.0.0.1 as ::ffff:10.0.0.1.
        Self(Some(address.to_canonical()))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("unix"),
        }
    }
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denial {
    NoCredential,
    Malformed(&'static str),
    /// An unknown user, or a wrong password.
    WrongPassword,
    WrongToken,
    /// The role that it has.
    Role {
        needs: Role,
        has: Role,
    },
    /// Too many passwords wait to be compared.
    Busy,
}

impl Denial {
    const REASONS: [&'static str; 6] = ["no_credential", "malformed", "wrong_password", "wrong_token", "role", "busy"];

    fn reason(self) -> usize {
        match self {
            Self::NoCredential => 0,
            Self::Malformed(_) => 1,
            Self::WrongPassword => 2,
            Self::WrongToken => 3,
            Self::Role { .. } => 4,
            Self::Busy => 5,
        }
    }

    /// For the client. Says nothing about which part of a credential was wrong.
    pub fn text(self) -> String {
        match self {
            Self::NoCredential => "this needs a credential: a user and password, a token or a certificate".into(),
            Self::Malformed(why) => why.into(),
            Self::WrongPassword => "the user or the password is wrong".into(),
            Self::WrongToken => "the token is wrong".into(),
            Self::Role { needs, has } => {
                format!("this client has the role {}, and this needs the role {}", has.name(), needs.name())
            }
            Self::Busy => "too many passwords wait to be compared: try again".into(),
        }
    }
}

/// Decides on this core.
pub struct Access(Result<Guarded, Role>);

impl Default for Access {
    fn default() -> Self {
        Self(Err(EVERYBODY))
    }
}

struct Guarded {
    rules: Reader<Rules>,
    passwords: passwords::OnCore,
    denied: [Cell<u64>; Denial::REASONS.len()],
}

/// A decision, or one that has to wait for a password.
pub enum Decision {
    Made(Result<Role, Denial>),
    Waits(Waiting),
}

/// A password that is being compared.
pub struct Waiting {
    compared: passwords::Comparison,
    ask: Ask,
    base: Base,
}

impl Access {
    /// Access control by `rules`.
    pub fn by(rules: &Published<Rules>, passwords: &Passwords) -> Self {
        Self(Ok(Guarded {
            rules: rules.reader(),
            passwords: passwords.on_core(),
            denied: std::array::from_fn(|_| Cell::new(0)),
        }))
    }

    /// Without access control: everybody reads and writes, and with `purges` purges, too.
    pub fn open(purges: bool) -> Self {
        Self(Err(if purges { Role::Admin } else { EVERYBODY }))
    }

    /// True when nothing is asked of anybody.
    pub fn is_open(&self) -> bool {
        self.0.is_err()
    }

    /// Decides on a request of `peer`. `credential` is called when there is need to know it. `count` the outcome.
    pub fn decide(&self, ask: Ask, peer: &Peer, credential: impl FnOnce() -> Credential) -> Decision {
        let guarded = match &self.0 {
            Ok(guarded) => guarded,
            Err(everybody) => return Decision::Made(judge(ask, Base::default(), Ok(*everybody))),
        };
        guarded.rules.with(|number, rules| {
            let certificate = peer.certificate.as_ref().map(|name| rules.roles.of_certificate(name));
            let base = Base { everybody: rules.everybody, certificate };
            if base.role() >= Some(ask.needs) && !ask.at_best {
                return Decision::Made(judge(ask, base, Err(Denial::NoCredential)));
            }
            let found = match credential() {
                Credential::None => Err(Denial::NoCredential),
                Credential::Malformed(why) => Err(Denial::Malformed(why)),
                Credential::Bearer(token) => rules.tokens.role_of(token.reveal()).ok_or(Denial::WrongToken),
                Credential::Basic { user, password } => {
                    match guarded.passwords.compare(number, rules, &user, password) {
                        passwords::Found::Known(found) => found,
                        passwords::Found::Waits(compared) => return Decision::Waits(Waiting { compared, ask, base }),
                    }
                }
            };
            Decision::Made(judge(ask, base, found))
        })
    }

    /// Counts a refusal.
    pub fn count(&self, denial: Denial) {
        if let Ok(guarded) = &self.0 {
            let count = &guarded.denied[denial.reason()];
            count.set(count.get() + 1);
        }
    }

    /// The challenges of `WWW-Authenticate`: how a client may say who it is.
    pub fn challenge(&self) -> String {
        self.0
            .as_ref()
            .map_or_else(|_| String::new(), |guarded| guarded.rules.with(|_, rules| rules.challenge().to_owned()))
    }

    /// Adds what this core has refused, and had compared.
    pub fn report(&self, into: &mut Snapshot) {
        let Ok(guarded) = &self.0 else { return };
        for (reason, count) in Denial::REASONS.iter().zip(&guarded.denied) {
            into.add_for(Metric::AccessDenied, [reason], count.get());
        }
        into.add(Metric::PasswordsCompared, guarded.passwords.compared());
    }
}

impl Decision {
    /// The decision, after the comparison of a password if it needs one.
    pub async fn made(self) -> Result<Role, Denial> {
        match self {
            Self::Made(made) => made,
            Self::Waits(Waiting { compared, ask, base }) => judge(ask, base, compared.await),
        }
    }
}

/// What a request has without a credential of its own.
#[derive(Debug, Clone, Copy, Default)]
struct Base {
    /// What everybody has.
    everybody: Option<Role>,
    /// Of the connection's certificate.
    certificate: Option<Role>,
}

impl Base {
    fn role(self) -> Option<Role> {
        self.everybody.max(self.certificate)
    }
}

/// The highest role counts. A credential that is wrong is as good as none where none is needed.
fn judge(ask: Ask, base: Base, found: Result<Role, Denial>) -> Result<Role, Denial> {
    let named = base.certificate.max(found.ok());
    if let Some(has) = base.everybody.max(named).filter(|&has| has >= ask.needs) {
        return Ok(has);
    }
    match (found, named) {
        // Who has brought a credential may not; others might if they brought one.
        (Ok(_) | Err(Denial::NoCredential), Some(named)) => {
            Err(Denial::Role { needs: ask.needs, has: base.everybody.map_or(named, |all| all.max(named)) })
        }
        (Err(denial), _) => Err(denial),
        (Ok(has), None) => Err(Denial::Role { needs: ask.needs, has }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: who has enough may, who has brought a credential of too low a role is told so, who has brought none is asked for one. Method:
    /// every combination of what everybody has, a certificate has and a credential has, against the rules said apart.
    #[test]
    fn judged_by_the_highest_role() {
        let roles = [None, Some(Role::Read), Some(Role::Write), Some(Role::Admin)];
        let wrong =
            [Denial::NoCredential, Denial::WrongPassword, Denial::WrongToken, Denial::Malformed("x"), Denial::Busy];
        for needs in [Role::Read, Role::Write, Role::Admin] {
            for everybody in roles {
                for certificate in roles {
                    let base = Base { everybody, certificate };
                    for credential in [Role::Read, Role::Write, Role::Admin] {
                        let has =
                            credential.max(everybody.unwrap_or(Role::Read)).max(certificate.unwrap_or(Role::Read));
                        let expected = if has >= needs { Ok(has) } else { Err(Denial::Role { needs, has }) };
                        assert_eq!(judge(needs.into(), base, Ok(credential)), expected, "{base:?} {credential:?}");
                    }
                    for denial in wrong {
                        let expected = match base.role() {
                            Some(has) if has >= needs => Ok(has),
                            Some(has) if certificate.is_some() && denial == Denial::NoCredential => {
                                Err(Denial::Role { needs, has })
                            }
                            _ => Err(denial),
                        };
                        assert_eq!(judge(needs.into(), base, Err(denial)), expected, "{base:?} {denial:?}");
                    }
                }
            }
        }
    }

    /// Goal: without access control everybody reads and writes, nobody purges, and no credential is looked at.
    #[test]
    fn open_to_everybody() {
        let access = Access::default();
        let ask = |needs: Role| match access.decide(needs.into(), &Peer::default(), || panic!("not asked for")) {
            Decision::Made(made) => made,
            Decision::Waits(_) => panic!("nothing to wait for"),
        };
        assert!(access.is_open() && ask(Role::Read) == Ok(Role::Write) && ask(Role::Write) == Ok(Role::Write));
        assert_eq!(ask(Role::Admin), Err(Denial::Role { needs: Role::Admin, has: Role::Write }));
        let purging = Access::open(true).decide(Role::Admin.into(), &Peer::default(), || panic!("not asked for"));
        assert!(matches!(purging, Decision::Made(Ok(Role::Admin))));
    }
}
