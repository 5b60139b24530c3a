//! Credentials: one keeper in the process for each backend gets them and renews them before they expire; every core
//! holds the current set.
//!
//! Source: botocore's chain; AWS "Use IMDSv2", "Container credential provider", "AssumeRoleWithWebIdentity".

use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::http::{Method, OutBody, Pool, PoolTimes, Request, Response, Target};
use super::settings::{CredentialSource, RoleSource};
use super::tls::{Tls, Trust};
use crate::limits::BACKEND_ERROR_BODY_MAX;
use crate::pure::civil_time::parse_rfc3339;
use crate::pure::s3_message::{self, Temporary};
use crate::pure::secret::Secret;
use crate::pure::sigv4::{Credentials, encode_query};
use crate::pure::{aws_profile, document};
use crate::rt::local::{Event, Local};
use crate::rt::{self, HandlerPanicked};

/// A set of credentials, as it goes to every core.
#[derive(Debug, Clone)]
pub struct Issue {
    /// Counts the sets, from `FIRST` on.
    pub generation: u64,
    /// `None`: requests are not signed. An error: why there are none.
    pub credentials: Result<Option<Credentials>, String>,
}

const FIRST: u64 = 1;

/// The set in use.
#[derive(Debug, Clone)]
pub struct Current {
    pub generation: u64,
    pub credentials: Option<Credentials>,
}

/// One core's holder of a backend's credentials. Clones share it.
#[derive(Clone)]
pub struct Holder {
    held: Local<Option<Held>>,
    changed: Event,
    /// Tells the keeper that a generation has expired.
    ask: Rc<dyn Fn(u64)>,
}

struct Held {
    issue: Issue,
    since: Instant,
}

/// How long a request waits for credentials that were asked for anew.
const REFRESH_WAIT: Duration = Duration::from_secs(5);

impl Holder {
    pub fn new(ask: impl Fn(u64) + 'static) -> Self {
        Self { held: Local::new(None), changed: Event::default(), ask: Rc::new(ask) }
    }

    /// A set has come; when it is older than the one that is held, it came late.
    pub fn hold(&self, issue: Issue) {
        let since = rt::time::now();
        self.held.with(|held| {
            if held.as_ref().is_none_or(|held| held.issue.generation < issue.generation) {
                *held = Some(Held { issue, since });
            }
        });
        self.changed.notify();
    }

    /// The current set. Waits for the first one: the caller has a deadline.
    pub async fn current(&self) -> Result<Current, String> {
        loop {
            let changed = self.changed.wait();
            if let Some(issue) = self.held.with(|held| held.as_ref().map(|held| held.issue.clone())) {
                let generation = issue.generation;
                return issue.credentials.map(|credentials| Current { generation, credentials });
            }
            changed.await;
        }
    }

    /// The backend says that this generation has expired: waits a little for a later one, unless it has only just come: then it
    /// is not refused for its age, and a later one would be refused as well. Why the first one may be asked for anew at any
    /// time: nothing was refused before it.
    pub async fn refresh(&self, generation: u64) {
        let has_just_come = self.held.with(|held| {
            held.as_ref().is_some_and(|Held { issue, since }| {
                issue.generation == generation && rt::time::now() - *since < Duration::from_secs(RETRY_S)
            })
        });
        if has_just_come && generation > FIRST {
            return;
        }
        (self.ask)(generation);
        let later = async {
            loop {
                let changed = self.changed.wait();
                let held = self.held.with(|held| held.as_ref().map_or(0, |held| held.issue.generation));
                if held > generation {
                    return;
                }
                changed.await;
            }
        };
        let _ = rt::time::timeout(REFRESH_WAIT, later).await;
    }
}

/// What came of asking for credentials.
#[derive(Debug)]
pub enum Renewal {
    /// To go to every core.
    Issued(Issue),
    /// Why there is no new set. The last one is still valid and goes on.
    Failed(String),
}

/// Gets credentials, and says when to get the next ones. Lives on the core that owns the backend.
pub struct Keeper {
    source: CredentialSource,
    region: String,
    trust: Option<Trust>,
    /// Of the last issue.
    generation: u64,
    last: Option<Last>,
}

/// The last set that was issued.
#[derive(Clone, Copy)]
struct Last {
    generation: u64,
    /// Seconds since 1970; `None`: it does not say.
    expires: Option<u64>,
}

/// A renewal is due when this part of a lifetime is left, and at least so long before its end.
const RENEW_PART: u64 = 5;
const RENEW_BEFORE_S: u64 = 15 * 60;
/// How often it is tried again when it failed, or when what came of it is refused.
const RETRY_S: u64 = 10;
/// Of one call to a credential service.
const SERVICE_TIME: Duration = Duration::from_secs(5);

/// Credentials, where some are needed, and when they expire, in seconds since 1970.
type Given = (Option<Credentials>, Option<u64>);

impl Keeper {
    pub fn new(source: CredentialSource, region: &str, trust: Option<Trust>) -> Self {
        let region = if region.is_empty() { "us-east-1" } else { region };
        Self { source, region: region.to_owned(), trust, generation: FIRST - 1, last: None }
    }

    /// The next set, or why there is none, and after how long to call again; `None` when only an expiry makes that necessary.
    /// `refused` is the last generation that the backend called expired, 0 for none.
    pub async fn issue(&mut self, refused: u64) -> (Renewal, Option<Duration>) {
        let got = rt::catch(self.ask_source()).await;
        let got = got.unwrap_or_else(|HandlerPanicked| Err("their source could not be asked; the log says why".into()));
        self.settle(got, refused, rt::time::unix_seconds())
    }

    /// What the source gives now, and when it expires, in seconds since 1970.
    async fn ask_source(&self) -> Result<Given, String> {
        match &self.source {
            CredentialSource::Anonymous => Ok((None, None)),
            CredentialSource::Static(credentials) => Ok((Some(credentials.clone()), None)),
            CredentialSource::File { path, profile } => {
                from_file(path, profile).await.map(|credentials| (Some(credentials), None))
            }
            CredentialSource::Role(role) => {
                let temporary = rt::time::timeout(3 * SERVICE_TIME, self.take_role(role)).await;
                let temporary = temporary.unwrap_or_else(|_| Err("the credential service does not answer".into()));
                temporary.map(|temporary| (Some(temporary.credentials), Some(temporary.expires)))
            }
        }
    }

    /// What follows from the answer of the source.
    fn settle(&mut self, got: Result<Given, String>, refused: u64, now: u64) -> (Renewal, Option<Duration>) {
        let retry = Some(Duration::from_secs(RETRY_S));
        let valid = |last: Last| last.generation > refused && last.expires.is_none_or(|expires| now < expires);
        match got {
            Err(reason) if self.last.is_some_and(valid) => (Renewal::Failed(reason), retry),
            Err(reason) => {
                self.last = None;
                (Renewal::Issued(self.next(Err(reason))), retry)
            }
            Ok((credentials, expires)) => {
                let issue = self.next(Ok(credentials));
                self.last = Some(Last { generation: issue.generation, expires });
                (Renewal::Issued(issue), expires.map(|expires| renew_after(expires, now)))
            }
        }
    }

    fn next(&mut self, credentials: Result<Option<Credentials>, String>) -> Issue {
        self.generation += 1;
        Issue { generation: self.generation, credentials }
    }

    async fn take_role(&self, role: &RoleSource) -> Result<Temporary, String> {
        if let (Some(token_file), Some(arn)) = (&role.web_identity_token_file, &role.role_arn) {
            return self.web_identity(role, token_file, arn).await;
        }
        if let Some(uri) = &role.container_relative_uri {
            return self.container(role, &format!("http://169.254.170.2{uri}")).await;
        }
        if let Some(uri) = &role.container_full_uri {
            return self.container(role, uri).await;
        }
        self.instance(role.metadata_endpoint.as_deref().unwrap_or("http://169.254.169.254")).await
    }

    async fn web_identity(&self, role: &RoleSource, token_file: &Path, arn: &str) -> Result<Temporary, String> {
        let token = read_file(token_file).await?;
        let session = role.role_session_name.as_deref().unwrap_or("ringcas");
        let form = encode_query(&[
            ("Action", "AssumeRoleWithWebIdentity"),
            ("Version", "2011-06-15"),
            ("RoleArn", arn),
            ("RoleSessionName", session),
            ("WebIdentityToken", token.trim()),
        ]);
        let endpoint = match &role.sts_endpoint {
            Some(endpoint) => endpoint.clone(),
            None => format!("https://sts.{}.amazonaws.com/", self.region),
        };
        let headers = [("content-type", "application/x-www-form-urlencoded")];
        let answer = self.ask(Method::POST, &endpoint, &headers, form.into()).await?;
        s3_message::parse_assumed_role(&answer).ok_or_else(|| format!("{endpoint} answered without credentials"))
    }

    async fn container(&self, role: &RoleSource, uri: &str) -> Result<Temporary, String> {
        let token = match (&role.container_token_file, &role.container_token) {
            (Some(file), _) => Some(Secret::new(read_file(file).await?.trim())),
            (None, token) => token.clone(),
        };
        let headers: Vec<_> = token.iter().map(|token| ("authorization", token.reveal())).collect();
        let answer = self.ask(Method::GET, uri, &headers, Bytes::new()).await?;
        from_json(&answer).ok_or_else(|| format!("{uri} answered without credentials"))
    }

    async fn instance(&self, endpoint: &str) -> Result<Temporary, String> {
        let endpoint = endpoint.trim_end_matches('/');
        let lifetime = [("x-aws-ec2-metadata-token-ttl-seconds", "21600")];
        let token = self.ask(Method::PUT, &format!("{endpoint}/latest/api/token"), &lifetime, Bytes::new()).await?;
        let token = Secret::new(String::from_utf8_lossy(&token).into_owned());
        let headers = [("x-aws-ec2-metadata-token", token.reveal())];
        let roles = format!("{endpoint}/latest/meta-data/iam/security-credentials/");
        let role = self.ask(Method::GET, &roles, &headers, Bytes::new()).await?;
        let role = String::from_utf8_lossy(&role);
        let role = role.lines().next().unwrap_or_default().trim().to_owned();
        let answer = self.ask(Method::GET, &format!("{roles}{role}"), &headers, Bytes::new()).await?;
        from_json(&answer).ok_or_else(|| format!("{roles}{role} answered without credentials"))
    }

    /// One request; its answer's body. The error names no header: some are secrets.
    async fn ask(&self, method: Method, url: &str, headers: &[(&str, &str)], body: Bytes) -> Result<Bytes, String> {
        let (target, path) = Target::parse(url).ok_or_else(|| format!("{url} is no URL of a credential service"))?;
        let tls = match (target.tls, &self.trust) {
            (false, _) => None,
            (true, Some(trust)) => Some(Tls::new(trust)),
            (true, None) => return Err(format!("{url} needs TLS, for which there is no trusted authority")),
        };
        let host = target.authority();
        let pool = Pool::new(target, tls, PoolTimes::ONCE);
        let request = || {
            let mut request = Request::builder().method(method.clone()).uri(path.as_str()).header("host", &host);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            request.body(OutBody::Pieces(Some(body.clone()).filter(|body| !body.is_empty()).into_iter().collect()))
        };
        request().map_err(|_| format!("a token for {url} has characters that no header may have"))?;
        let answered = async {
            let sent = pool.send(|| request().expect("it was made before")).await;
            let mut response = sent.map_err(|error| error.to_string())?;
            let body = read_all(&mut response).await?;
            match response.status {
                200..=299 => Ok(body),
                status => Err(format!("{url} answered with status {status}")),
            }
        };
        let answered = rt::time::timeout(SERVICE_TIME, answered).await;
        answered.unwrap_or_else(|_| Err(format!("{url} does not answer")))
    }
}

/// How long until credentials that expire then should be renewed. Both in seconds since 1970.
fn renew_after(expires: u64, now: u64) -> Duration {
    let left = expires.saturating_sub(now);
    let before = (left / RENEW_PART).max(RENEW_BEFORE_S.min(left / 2));
    Duration::from_secs((left - before).max(RETRY_S))
}

async fn read_all(response: &mut Response) -> Result<Bytes, String> {
    let mut all = Vec::new();
    while let Some(piece) = response.body.next().await.map_err(|error| error.to_string())? {
        if all.len() + piece.len() > BACKEND_ERROR_BODY_MAX {
            return Err("the answer is too long".into());
        }
        all.extend_from_slice(&piece);
    }
    Ok(all.into())
}

async fn from_file(path: &Path, profile: &str) -> Result<Credentials, String> {
    let file = read_file(path).await?;
    aws_profile::credentials(&file, profile)
        .ok_or_else(|| format!("{} has no credentials of profile {profile:?}", path.display()))
}

async fn read_file(path: &Path) -> Result<String, String> {
    let shown = path.display().to_string();
    let path = path.to_owned();
    let read = rt::blocking(move || rt::whole::text(&path)).await.map_err(|error| error.to_string())?;
    read.map_err(|error| format!("cannot read {shown}: {error}"))
}

/// What the container and instance services answer.
fn from_json(answer: &[u8]) -> Option<Temporary> {
    let value = document::parse(std::str::from_utf8(answer).ok()?).ok()?;
    let credentials = Credentials {
        access_key_id: value.text("AccessKeyId")?.into(),
        secret_access_key: Secret::new(value.text("SecretAccessKey")?),
        session_token: value.text("Token").map(Secret::new),
    };
    Some(Temporary { credentials, expires: parse_rfc3339(value.text("Expiration")?)? })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::rt::cores::block_on;

    /// Goal: the answer of the metadata service is read, and half of one is none. Method: an example of each.
    #[test]
    fn metadata() {
        let whole = br#"{"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": "ASIA", "SecretAccessKey": "s/+=",
            "Token": "t==", "Expiration": "1994-11-06T08:49:37Z"}"#;
        let temporary = from_json(whole).expect("credentials");
        assert!(temporary.expires == 784_111_777 && temporary.credentials.secret_access_key.is("s/+="));
        assert!(from_json(br#"{"AccessKeyId": "ASIA"}"#).is_none() && from_json(b"\xff").is_none());
    }

    /// Goal: what a backend refuses is asked for anew, but not what has only just come after an earlier one was refused, until
    /// some time is over; and a set that comes late replaces none. Method: sets that are refused as soon as they come and later.
    #[test]
    fn refused_again() {
        let asked = Rc::new(RefCell::new(Vec::new()));
        let asks = asked.clone();
        let holder = Holder::new(move |generation| asks.borrow_mut().push(generation));
        let issue = |generation| Issue { generation, credentials: Ok(None) };
        block_on(async {
            let mut refresh = Box::pin(holder.refresh(1));
            holder.hold(issue(1));
            assert!(rt::time::timeout(Duration::ZERO, refresh.as_mut()).await.is_err(), "it waits for a later one");
            holder.hold(issue(3));
            refresh.await;
            holder.hold(issue(2));
            assert_eq!(holder.current().await.map(|current| current.generation), Ok(3));
            holder.refresh(3).await;
            assert_eq!(*asked.borrow(), [1]);
            let came = rt::time::now() - Duration::from_secs(RETRY_S);
            holder.held.with(|held| held.iter_mut().for_each(|held| held.since = came));
            let refresh = holder.refresh(3);
            assert!(rt::time::timeout(Duration::ZERO, refresh).await.is_err());
            assert_eq!(*asked.borrow(), [1, 3]);
        });
    }

    /// Goal: renewals come well before the end, and never in a busy loop. Method: some lifetimes.
    #[test]
    fn renewals() {
        let now = 1_000_000;
        let after = |left: u64| renew_after(now + left, now).as_secs();
        assert_eq!((after(3_600), after(21_600), after(900)), (2_700, 17_280, 450));
        assert_eq!((after(5), renew_after(0, now).as_secs()), (RETRY_S, RETRY_S));
    }

    /// Goal: a set is used until it expires or the backend calls it expired, whatever comes of its renewal. Method: one
    /// renewal after the other, on a clock of the test.
    #[test]
    fn a_renewal_that_fails() {
        let mut keeper = Keeper::new(CredentialSource::Anonymous, "", None);
        let mut settle = |got, refused, now| match keeper.settle(got, refused, now) {
            (Renewal::Issued(issue), again) => (Some((issue.generation, issue.credentials.is_ok())), again),
            (Renewal::Failed(_), again) => (None, again),
        };
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        let fails = || Err("status 500".to_owned());
        assert_eq!(settle(fails(), 0, 0), (Some((1, false)), seconds(RETRY_S)), "there was none before");
        assert_eq!(settle(Ok((None, Some(3_600))), 0, 0), (Some((2, true)), seconds(2_700)));
        assert_eq!(settle(fails(), 1, 2_700), (None, seconds(RETRY_S)), "an earlier one was refused");
        assert_eq!(settle(fails(), 1, 3_599), (None, seconds(RETRY_S)));
        assert_eq!(settle(fails(), 1, 3_600), (Some((3, false)), seconds(RETRY_S)), "it has expired");
        assert_eq!(settle(Ok((None, Some(7_200))), 1, 3_600), (Some((4, true)), seconds(2_700)));
        assert_eq!(settle(fails(), 4, 3_700), (Some((5, false)), seconds(RETRY_S)), "the backend refuses it");
        assert_eq!(settle(Ok((None, None)), 4, 3_800), (Some((6, true)), None));
        assert_eq!(settle(fails(), 4, u64::MAX), (None, seconds(RETRY_S)), "it does not expire");
    }
}
