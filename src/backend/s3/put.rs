//! Objects that come to be: what is uploaded, on which condition, and how that ends.

use super::*;

/// How an upload ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    Created,
    AlreadyExists,
}

/// Whether an upload may replace an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    IfAbsent,
    Replace,
}

/// The bytes of an upload, which can be read as often as a retry needs.
#[allow(clippy::len_without_is_empty)] // Why: nobody asks.
pub trait Source {
    /// Bytes.
    fn len(&self) -> u64;
    /// What to sign for all of it, where that is known without reading it.
    fn payload(&self) -> Option<Payload>;
    /// Of an action: who stored it and when, to be kept with the object.
    fn origin(&self) -> Option<Origin> {
        None
    }
    /// `len` bytes from `offset` on.
    fn open(&self, offset: u64, len: u64) -> OutBody;
}

/// Bytes that are all here.
pub struct InMemory {
    pub data: Bytes,
    pub payload: Option<Payload>,
    pub origin: Option<Origin>,
}

impl Source for InMemory {
    fn len(&self) -> u64 {
        self.data.len() as u64
    }

    fn payload(&self) -> Option<Payload> {
        self.payload
    }

    fn origin(&self) -> Option<Origin> {
        self.origin
    }

    fn open(&self, offset: u64, len: u64) -> OutBody {
        OutBody::Pieces([self.data.slice(offset as usize..(offset + len) as usize)].into())
    }
}

impl Client {
    /// Makes an object. `total` bounds all of it.
    pub async fn put(
        &self,
        key: &str,
        source: &dyn Source,
        condition: Condition,
        total: Duration,
    ) -> Result<PutOutcome, S3Error> {
        let large = source.len() > self.0.settings.multipart_from && self.0.settings.dialect == Dialect::S3;
        match large {
            true => Box::pin(self.put_parts(key, source, condition, total)).await,
            false => within(total, "end of the upload", self.put_whole(key, source, condition)).await,
        }
    }

    async fn put_whole(&self, key: &str, source: &dyn Source, condition: Condition) -> Result<PutOutcome, S3Error> {
        let body = || source.open(0, source.len());
        let mut call = Call::new(Operation::Write, Method::PUT, key);
        (call.schedule, call.try_time) = (Schedule::Patient, try_time(source.len()));
        call.payload = match source.payload() {
            Some(payload) => payload,
            None => self.payload_of(body()).await?,
        };
        call.headers.push(("content-type", "application/octet-stream".into()));
        call.headers.extend(source.origin().map(|origin| (self.origin_header(), origin.to_text())));
        let unconditional = call.headers.len();
        if condition == Condition::IfAbsent && !self.0.unconditional.get() {
            call.headers.push(self.if_absent());
        }
        self.0.calls.set(self.0.calls.get() + 1);
        let mut conflicts = Backoff::new(Schedule::Short, self.0.calls.get());
        loop {
            let answer = match self.call(&call, &body).await {
                // What stands for it need not know its conditions.
                Err(S3Error::Refused { status: 400, .. }) if self.0.settings.dialect == Dialect::Google => {
                    Answer::NotImplemented
                }
                answer => answer?,
            };
            let mut response = match answer {
                Answer::Ok(response) => response,
                Answer::Exists if condition == Condition::IfAbsent => return Ok(PutOutcome::AlreadyExists),
                Answer::NotImplemented if call.headers.len() > unconditional => {
                    tracing::info!(
                        backend = %self.0.settings.name,
                        "the backend does not know conditional uploads: objects that are there will be written again"
                    );
                    self.0.unconditional.set(true);
                    call.headers.truncate(unconditional);
                    continue;
                }
                // Somebody else is making the object, or has just made it. Why not asked for when it is to be replaced: what is
                // there may be what has to go.
                Answer::Conflict => {
                    if condition == Condition::IfAbsent && self.head(key, HEAD_TIME).await?.is_some() {
                        return Ok(PutOutcome::AlreadyExists);
                    }
                    let error = refused("others go on writing this object", 409);
                    match conflicts.next_wait(Reason::Transient) {
                        Some(wait) if self.may_go_on_after(wait).await => continue,
                        Some(_) => return Err(S3Error::GivenUp(Box::new(error))),
                        None => return Err(error),
                    }
                }
                Answer::Miss | Answer::Exists | Answer::NotImplemented => {
                    return Err(refused("the backend refuses this kind of upload", 0));
                }
            };
            finish(&mut response.body).await;
            return Ok(PutOutcome::Created);
        }
    }
}
