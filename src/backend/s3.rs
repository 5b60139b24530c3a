//! The S3 client of one core: signs, sends, retries, and says what an answer means. It knows nothing of breakers.

mod parts;
mod put;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;

pub use self::put::{Condition, InMemory, PutOutcome, Source};
use super::credentials::Holder;
use super::http::{
    Body, CONNECT, HeaderMap, HttpError, IDLE, Method, OutBody, Pool, PoolTimes, Request, Response, Uri,
};
use super::settings::{BackendSettings, Bucket, Dialect};
use super::tls::Tls;
use crate::limits::{BACKEND_ERROR_BODY_MAX, BACKEND_HEAD_MS, BACKEND_SPEED_FLOOR, WORK_SLICE_LEN};
use crate::pure::backoff::{Backoff, Reason, Schedule};
use crate::pure::breaker_view::Health;
use crate::pure::civil_time::{Civil, parse_http_date};
use crate::pure::progress::Progress;
use crate::pure::purge::{InstanceTag, Origin};
use crate::pure::s3_message::{self, ErrorBody, ListedObject, Operation, Verdict};
use crate::pure::sigv4::{self, Payload, Scheme, Signer};
use crate::rt;
use crate::rt::local::{Event, Local};

/// The longest wait for a connection and the head of an answer, all tries of a read together.
pub const HEAD_TIME: Duration = Duration::from_millis(BACKEND_HEAD_MS);
/// Differences of clocks from which a refusal is taken for one that they caused.
const SKEW_MIN_S: u64 = 5 * 60;

/// Why an operation brought nothing. The texts go into logs and name no secret.
#[derive(Debug, thiserror::Error)]
pub enum S3Error {
    #[error("{0}")]
    Http(#[from] HttpError),
    #[error("no {what} within {} ms", after.as_millis())]
    Timeout { what: &'static str, after: Duration },
    #[error("the body came in at less than {} KiB/s for 10 s", BACKEND_SPEED_FLOOR >> 10)]
    Stalled,
    #[error("throttled: status {status} {code}")]
    Throttled { status: u16, code: String },
    #[error("status {status} {code}: {message}")]
    Server { status: u16, code: String, message: String },
    #[error("access denied: status {status} {code}: {message}")]
    Denied { status: u16, code: String, message: String },
    #[error("the credentials have expired or the clock is wrong: status {status} {code}: {message}")]
    Outdated { status: u16, code: String, message: String },
    #[error("refused: status {status} {code}: {message}")]
    Refused { status: u16, code: String, message: String },
    #[error("there are no credentials: {0}")]
    NoCredentials(String),
    #[error("given up, as the backend is not well meanwhile: {0}")]
    GivenUp(Box<S3Error>),
}

impl S3Error {
    /// What it says about the backend's health.
    pub fn health(&self) -> Health {
        match self {
            Self::Http(HttpError::OurBody(_)) => Health::Unknown,
            Self::Http(_) | Self::Timeout { .. } | Self::Stalled | Self::Server { .. } => Health::Bad,
            Self::Throttled { .. } | Self::Denied { .. } | Self::Outdated { .. } | Self::NoCredentials(_) => {
                Health::Unknown
            }
            // It answered, and will so again.
            Self::Refused { .. } => Health::Good,
            Self::GivenUp(cause) => cause.health(),
        }
    }
}

/// How an operation ended that got an answer.
enum Answer {
    Ok(Box<Response>),
    Miss,
    Exists,
    Conflict,
    NotImplemented,
}

/// An object on its way to us.
pub struct Object {
    body: Body,
    /// Bytes of the object, or of the asked part.
    content_length: Option<u64>,
    origin: Origin,
    progress: Progress,
    deadline: rt::time::Deadline,
    allowed: Duration,
}

impl Object {
    /// Bytes, where the backend says.
    pub fn content_length(&self) -> Option<u64> {
        self.content_length
    }

    /// Who stored it and when, as far as the object tells.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// The next bytes; `None` at the end. Too slow a body, and one that takes too long in all, is an error.
    pub async fn next(&mut self) -> Result<Option<Bytes>, S3Error> {
        let mut begun = rt::time::now();
        let mut next = std::pin::pin!(self.body.next());
        loop {
            let check = rt::time::sleep(self.progress.next_check());
            let waited = rt::time::race(next.as_mut(), rt::time::race(check, &mut self.deadline)).await;
            let now = rt::time::now();
            let passed = now - std::mem::replace(&mut begun, now);
            match waited {
                rt::time::Either::Left(piece) => {
                    let piece = piece?;
                    let bytes = piece.as_ref().map_or(0, Bytes::len) as u64;
                    // A body that has ended was fast enough.
                    let moves = self.progress.wait_passed(passed, bytes);
                    return if moves || piece.is_none() { Ok(piece) } else { Err(S3Error::Stalled) };
                }
                rt::time::Either::Right(rt::time::Either::Left(())) => {
                    if !self.progress.wait_passed(passed, 0) {
                        return Err(S3Error::Stalled);
                    }
                }
                rt::time::Either::Right(rt::time::Either::Right(())) => {
                    return Err(S3Error::Timeout { what: "end of the body", after: self.allowed });
                }
            }
        }
    }
}

/// The client of one bucket of a backend on this core. Clones share it.
#[derive(Clone)]
pub struct Client(Rc<Inner>);

struct Inner {
    settings: BackendSettings,
    bucket: Bucket,
    authority: String,
    pool: Pool,
    credentials: Holder,
    signer: Local<Option<SignerFor>>,
    region: Local<String>,
    /// What to add to our clock to have the backend's, in seconds.
    skew: Cell<i64>,
    /// Numbers this core's calls, for the jitter.
    calls: Cell<u64>,
    /// The backend does not know conditional creation.
    unconditional: Cell<bool>,
    hooks: Hooks,
}

/// What a client asks of those who know more than it does.
pub struct Hooks {
    /// Told of each throttle at once.
    pub on_throttle: Box<dyn Fn()>,
    /// Whether a call that failed may be tried again.
    pub may_retry: Box<dyn Fn() -> bool>,
    /// That may be otherwise now.
    pub changed: Event,
}

struct SignerFor {
    generation: u64,
    signer: Signer,
}

/// One operation.
struct Call<'a> {
    operation: Operation,
    method: Method,
    key: &'a str,
    query: Vec<(&'a str, &'a str)>,
    headers: Vec<(&'static str, String)>,
    payload: Payload,
    schedule: Schedule,
    /// What one try may take; a longer one is not repeated.
    try_time: Duration,
}

impl<'a> Call<'a> {
    fn new(operation: Operation, method: Method, key: &'a str) -> Self {
        Self {
            operation,
            method,
            key,
            query: Vec::new(),
            headers: Vec::new(),
            payload: Payload::Empty,
            schedule: Schedule::Short,
            try_time: HEAD_TIME,
        }
    }
}

impl Client {
    /// `core` seeds the jitter, so that cores differ.
    pub fn new(
        settings: &BackendSettings,
        bucket: &Bucket,
        tls: Option<Tls>,
        credentials: Holder,
        core: usize,
        hooks: Hooks,
    ) -> Self {
        let (recycle, idle_max) = (settings.conn_recycle, settings.idle_conns_max);
        let times = PoolTimes { recycle, idle_max, idle: IDLE, connect: CONNECT };
        let region = match (settings.region.as_str(), settings.dialect) {
            ("", Dialect::S3) => DEFAULT_REGION,
            ("", Dialect::Google) => GOOGLE_REGION,
            (region, _) => region,
        };
        Self(Rc::new(Inner {
            authority: bucket.target.authority(),
            pool: Pool::new(bucket.target.clone(), tls, times),
            credentials,
            signer: Local::new(None),
            region: Local::new(region.to_owned()),
            skew: Cell::new(0),
            calls: Cell::new((core as u64) << 48),
            unconditional: Cell::new(false),
            hooks,
            settings: settings.clone(),
            bucket: bucket.clone(),
        }))
    }

    /// An object, or its first `limit` bytes. `None` when there is none. `head` bounds the wait for the answer's head,
    /// `total` the read as a whole.
    pub async fn get(
        &self,
        key: &str,
        limit: Option<u64>,
        head: Duration,
        total: Duration,
    ) -> Result<Option<Object>, S3Error> {
        let deadline = rt::time::sleep(total);
        let mut call = Call::new(Operation::Read, Method::GET, key);
        if let Some(limit) = limit {
            call.headers.push(("range", format!("bytes=0-{}", limit.max(1) - 1)));
        }
        match within(head.min(total), "answer", self.call(&call, &OutBody::empty)).await? {
            // Why refused: nobody asked for a part, or for nothing; and where no length is said, a broken connection cannot
            // be told from the end.
            Answer::Ok(response) if limit.is_none() && response.status != 200 => {
                Err(unexpected("this status is no answer to a read", response.status))
            }
            Answer::Ok(response) if !response.is_delimited() => {
                Err(unexpected("the answer does not say where it ends", response.status))
            }
            Answer::Ok(response) => Ok(Some(Object {
                content_length: response.content_length(),
                origin: self.origin_of(&response),
                body: response.body,
                progress: Progress::new(BACKEND_SPEED_FLOOR),
                deadline,
                allowed: total,
            })),
            Answer::Miss | Answer::Exists | Answer::Conflict | Answer::NotImplemented => Ok(None),
        }
    }

    /// An object's length in bytes, 0 where the backend does not say. `None` when there is none.
    pub async fn head(&self, key: &str, total: Duration) -> Result<Option<u64>, S3Error> {
        let known = self.0.region.with(|region| region.clone());
        let mut asked = self.ask_head(key, total).await;
        if let Err(S3Error::Refused { status: 301 | 400, .. }) = asked {
            // The region may be wrong, or the credentials have expired, and the answer to a HEAD has no document that would say so.
            let listed = self.list("").await;
            if listed.is_ok() || self.0.region.with(|region| *region != known) {
                asked = self.ask_head(key, total).await;
            }
        }
        asked
    }

    async fn ask_head(&self, key: &str, total: Duration) -> Result<Option<u64>, S3Error> {
        let call = Call::new(Operation::Read, Method::HEAD, key);
        match within(HEAD_TIME.min(total), "answer", self.call(&call, &OutBody::empty)).await? {
            Answer::Ok(mut response) => {
                let len = response.content_length().unwrap_or(0);
                response.body.next().await?;
                Ok(Some(len))
            }
            Answer::Miss | Answer::Exists | Answer::Conflict | Answer::NotImplemented => Ok(None),
        }
    }

    /// Removes an object, if there is one.
    pub async fn delete(&self, key: &str) -> Result<(), S3Error> {
        let call = Call::new(Operation::Read, Method::DELETE, key);
        match within(HEAD_TIME, "answer", self.call(&call, &OutBody::empty)).await? {
            Answer::Ok(mut response) => {
                finish(&mut response.body).await;
                Ok(())
            }
            Answer::Miss => Ok(()),
            Answer::Exists | Answer::Conflict | Answer::NotImplemented => {
                Err(refused("the backend deletes nothing", 0))
            }
        }
    }

    /// The metadata that says an object's origin.
    fn origin_header(&self) -> &'static str {
        match self.0.settings.dialect {
            Dialect::S3 => "x-amz-meta-ringcas-origin",
            Dialect::Google => "x-goog-meta-ringcas-origin",
        }
    }

    /// Of an object that says nothing of itself, the time is what the backend says, by our clock.
    fn origin_of(&self, response: &Response) -> Origin {
        if let Some(origin) = response.header(self.origin_header()).and_then(Origin::parse) {
            return origin;
        }
        let modified = response.header("last-modified").and_then(parse_http_date);
        let ours = |theirs: u64| theirs.saturating_add_signed(-self.difference(response).unwrap_or(0));
        Origin::new(modified.map_or(0, ours), InstanceTag::UNKNOWN)
    }

    /// Some of the objects whose keys begin with `prefix`.
    pub async fn list(&self, prefix: &str) -> Result<Vec<ListedObject>, S3Error> {
        let mut call = Call::new(Operation::Read, Method::GET, "");
        call.query = vec![("list-type", "2"), ("max-keys", "1"), ("prefix", prefix)];
        let document = within(HEAD_TIME, "answer", self.document(&call, &OutBody::empty)).await?;
        s3_message::parse_listing(&document).ok_or_else(|| unexpected("no listing in the answer", 200))
    }

    /// What to sign for a body whose hash nobody knows: nothing over TLS. Without TLS it is read once more, as nothing
    /// else would notice a changed byte.
    async fn payload_of(&self, mut body: OutBody) -> Result<Payload, S3Error> {
        if self.0.bucket.target.tls {
            return Ok(Payload::Unsigned);
        }
        let mut hasher = sigv4::Hasher::default();
        while let Some(piece) = body.next().await? {
            for slice in piece.chunks(WORK_SLICE_LEN) {
                hasher.update(slice);
                rt::time::yield_to_reactor().await;
            }
        }
        Ok(Payload::Known(hasher.finish()))
    }

    fn if_absent(&self) -> (&'static str, String) {
        match self.0.settings.dialect {
            Dialect::S3 => ("if-none-match", "*".into()),
            Dialect::Google => ("x-goog-if-generation-match", "0".into()),
        }
    }

    /// An operation whose answer is a document.
    async fn document(&self, call: &Call<'_>, body: &dyn Fn() -> OutBody) -> Result<Bytes, S3Error> {
        match self.call(call, body).await? {
            Answer::Ok(mut response) => read_document(&mut response.body, DOCUMENT_MAX).await,
            Answer::Miss => Err(refused("NoSuchBucket", 404)),
            Answer::Exists | Answer::Conflict | Answer::NotImplemented => {
                Err(refused("the operation is not possible here", 0))
            }
        }
    }

    /// Sends until there is an answer, as often and as late as the schedule says.
    async fn call(&self, call: &Call<'_>, body: &dyn Fn() -> OutBody) -> Result<Answer, S3Error> {
        self.0.calls.set(self.0.calls.get() + 1);
        let mut backoff = Backoff::new(call.schedule, self.0.calls.get());
        // Each of these is mended once in a call.
        let (mut refreshed, mut set_clock, mut moved) = (false, false, false);
        loop {
            let (generation, sent) = within(call.try_time, "answer", self.attempt(call, body)).await?;
            let (reason, error) = match sent {
                Err(error @ HttpError::OurBody(_)) => return Err(error.into()),
                Err(error) => (Reason::Transient, error.into()),
                Ok((response, ErrorBody { code, message, region })) => {
                    let status = response.status;
                    let error = ErrorBody { region: region_of(&response, region), code, message };
                    let verdict = s3_message::judge(call.operation, status, &error);
                    let ErrorBody { code, message, .. } = error;
                    match self.with_clock(verdict, &response) {
                        // No acknowledgement of what has not all been sent.
                        Verdict::Ok if response.unsent > 0 => {
                            (Reason::Transient, unexpected("answered in the middle of the upload", status))
                        }
                        Verdict::Ok => return Ok(Answer::Ok(Box::new(response))),
                        Verdict::Miss => return Ok(Answer::Miss),
                        Verdict::Exists => return Ok(Answer::Exists),
                        Verdict::Conflict => return Ok(Answer::Conflict),
                        Verdict::NotImplemented if call.operation == Operation::Write => {
                            return Ok(Answer::NotImplemented);
                        }
                        Verdict::Expired if !refreshed => {
                            refreshed = true;
                            self.0.credentials.refresh(generation).await;
                            continue;
                        }
                        Verdict::Skewed if !set_clock => {
                            set_clock = true;
                            self.learn_clock(&response);
                            continue;
                        }
                        Verdict::Region(region) if !moved => {
                            moved = true;
                            tracing::info!(backend = %self.0.settings.name, %region, "the bucket is in another region");
                            self.0.region.with(|known| *known = region);
                            continue;
                        }
                        Verdict::Throttled => {
                            (self.0.hooks.on_throttle)();
                            let retry_after = self.retry_after(&response);
                            (Reason::Throttled { retry_after }, S3Error::Throttled { status, code })
                        }
                        Verdict::Transient => (Reason::Transient, S3Error::Server { status, code, message }),
                        Verdict::Denied => return Err(S3Error::Denied { status, code, message }),
                        Verdict::Expired | Verdict::Skewed => {
                            return Err(S3Error::Outdated { status, code, message });
                        }
                        Verdict::Region(_) | Verdict::NotImplemented | Verdict::Permanent => {
                            return Err(S3Error::Refused { status, code, message });
                        }
                    }
                }
            };
            match backoff.next_wait(reason) {
                Some(wait) if self.may_go_on_after(wait).await => {}
                Some(_) => return Err(S3Error::GivenUp(Box::new(error))),
                None => return Err(error),
            }
        }
    }

    /// Waits before another try. False as soon as there may be none.
    async fn may_go_on_after(&self, wait: Duration) -> bool {
        let hooks = &self.0.hooks;
        let mut over = rt::time::sleep(wait);
        loop {
            let changed = hooks.changed.wait();
            if !(hooks.may_retry)() {
                return false;
            }
            if let rt::time::Either::Left(()) = rt::time::race(&mut over, changed).await {
                return (hooks.may_retry)();
            }
        }
    }

    /// Sends once. Says which credentials were used, and of a refusal why.
    async fn attempt(
        &self,
        call: &Call<'_>,
        body: &dyn Fn() -> OutBody,
    ) -> Result<(u64, Result<(Response, ErrorBody), HttpError>), S3Error> {
        let inner = &*self.0;
        let current = inner.credentials.current().await.map_err(S3Error::NoCredentials)?;
        let path = match inner.bucket.in_path {
            true => sigv4::encode_path(&format!("/{}/{}", inner.bucket.name, call.key)),
            false => sigv4::encode_path(&format!("/{}", call.key)),
        };
        let query = sigv4::encode_query(&call.query);
        let target = sigv4::Target { method: call.method.as_str(), path: &path, query: &query };
        let mut signed: Vec<(&str, &str)> = vec![("host", &inner.authority)];
        signed.extend(call.headers.iter().map(|(name, value)| (*name, value.as_str())));
        let mut added = Vec::new();
        if let Some(credentials) = &current.credentials {
            let now = Civil::from_unix(rt::time::unix_seconds().saturating_add_signed(inner.skew.get()));
            let region = inner.region.with(|region| region.clone());
            added = inner.signer.with(|signer| {
                let fits =
                    |signer: &SignerFor| signer.generation == current.generation && signer.signer.region() == region;
                if !signer.as_ref().is_some_and(fits) {
                    let scheme = match inner.settings.dialect {
                        Dialect::S3 => Scheme::Aws,
                        Dialect::Google => Scheme::Google,
                    };
                    let fresh = Signer::new(credentials.clone(), &region, scheme);
                    *signer = Some(SignerFor { generation: current.generation, signer: fresh });
                }
                let signer = signer.as_mut().expect("it was just made where it was missing");
                signer.signer.sign(target, &signed, call.payload, now)
            });
        }
        let uri = if query.is_empty() { path.clone() } else { format!("{path}?{query}") };
        let added = added.iter().map(|(name, value)| (*name, value.as_str()));
        let head = request_head(&call.method, &uri, signed.iter().copied().chain(added));
        // Why not taken for granted: keys and tokens come from files, variables and other servers.
        let head = head.ok_or_else(|| S3Error::NoCredentials(UNSENDABLE.into()))?;
        let request = || {
            let mut request = Request::new(body());
            (*request.method_mut(), *request.uri_mut()) = (call.method.clone(), head.0.clone());
            *request.headers_mut() = head.1.clone();
            request
        };
        let sent = match Box::pin(inner.pool.send(request)).await {
            Ok(mut response) if !(200..300).contains(&response.status) => {
                let error = read_error(&mut response).await;
                Ok((response, error))
            }
            sent => sent.map(|response| (response, ErrorBody::default())),
        };
        Ok((current.generation, sent))
    }

    /// A refusal whose date is far from ours is one for that reason. (The answer to a HEAD has no document.)
    fn with_clock(&self, verdict: Verdict, response: &Response) -> Verdict {
        let apart = self.difference(response).map_or(0, |apart| apart.abs_diff(self.0.skew.get()));
        if verdict == Verdict::Denied && apart >= SKEW_MIN_S { Verdict::Skewed } else { verdict }
    }

    /// The backend's clock less ours, in seconds.
    fn difference(&self, response: &Response) -> Option<i64> {
        let theirs = parse_http_date(response.header("date")?)?;
        Some(theirs as i64 - rt::time::unix_seconds() as i64)
    }

    fn retry_after(&self, response: &Response) -> Option<Duration> {
        let apart = self.difference(response).unwrap_or(self.0.skew.get());
        let theirs = rt::time::unix_seconds().saturating_add_signed(apart);
        s3_message::parse_retry_after(response.header("retry-after")?, theirs)
    }

    fn learn_clock(&self, response: &Response) {
        let Some(difference) = self.difference(response) else { return };
        self.0.skew.set(difference);
        tracing::warn!(
            backend = %self.0.settings.name,
            "this machine's clock is {} s {} the backend's; requests are signed with the backend's time. Check NTP",
            difference.unsigned_abs(),
            if difference < 0 { "ahead of" } else { "behind" },
        );
    }
}

/// MinIO's, and the one that AWS takes from clients which do not know better.
const DEFAULT_REGION: &str = "us-east-1";
/// Google looks at no region.
const GOOGLE_REGION: &str = "auto";
/// The longest document that is read, in bytes: a page of a listing has 1,000 keys of at most 1 KiB.
const DOCUMENT_MAX: usize = 4 << 20;

/// What an upload of nothing may take until it is answered.
const TRY_TIME_MIN: Duration = Duration::from_secs(60);

/// What a try to send so many bytes may take.
fn try_time(len: u64) -> Duration {
    TRY_TIME_MIN + Duration::from_secs(len / BACKEND_SPEED_FLOOR)
}

/// The longest id of an upload in parts, and the longest ETag of a part, that are taken, in bytes.
const UPLOAD_ID_LEN_MAX: usize = 4096;
const ETAG_LEN_MAX: usize = 1024;
const UNSENDABLE: &str = "the access key, the session token or the region has characters that no header may have";

fn refused(what: &str, status: u16) -> S3Error {
    S3Error::Refused { status, code: what.to_owned(), message: String::new() }
}

fn unexpected(what: &str, status: u16) -> S3Error {
    S3Error::Server { status, code: what.to_owned(), message: String::new() }
}

/// `None` when it cannot be sent.
fn request_head<'a>(
    method: &Method,
    uri: &str,
    headers: impl Iterator<Item = (&'a str, &'a str)>,
) -> Option<(Uri, HeaderMap)> {
    let mut request = Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        request = request.header(name, value);
    }
    let (head, ()) = request.body(()).ok()?.into_parts();
    Some((head.uri, head.headers))
}

/// Reads the rest of an answer that has been understood, so that the connection is used again; not if that is long or late.
async fn finish(body: &mut Body) {
    let _ = within(HEAD_TIME, "end", read_document(body, BACKEND_ERROR_BODY_MAX)).await;
}

fn region_of(response: &Response, named: String) -> String {
    match response.header("x-amz-bucket-region") {
        Some(region) => region.to_owned(),
        None => named,
    }
}

/// The error document of an answer; what cannot be read, or does not come, is none. Read to its end, so that the connection is used
/// again.
async fn read_error(response: &mut Response) -> ErrorBody {
    let document = within(HEAD_TIME, "end", read_document(&mut response.body, BACKEND_ERROR_BODY_MAX)).await;
    document.map_or_else(|_| ErrorBody::default(), |document| s3_message::parse_error(&document))
}

async fn read_document(body: &mut Body, most: usize) -> Result<Bytes, S3Error> {
    let mut document = Vec::new();
    while let Some(piece) = body.next().await? {
        if document.len() + piece.len() > most {
            return Err(unexpected("the document is too long", 200));
        }
        document.extend_from_slice(&piece);
    }
    Ok(document.into())
}

/// Why boxed: these nest, and each level would hold and move all that is below it.
async fn within<T>(
    after: Duration,
    what: &'static str,
    work: impl Future<Output = Result<T, S3Error>>,
) -> Result<T, S3Error> {
    rt::time::timeout(after, Box::pin(work)).await.unwrap_or(Err(S3Error::Timeout { what, after }))
}
