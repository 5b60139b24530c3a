//! The HTTP cache: `GET`, `HEAD` and `PUT` of blobs and action results, as bazel-remote serves them and as RFC 9110 has it.
//!
//! A blob is named by its hash alone. Its size is asked of the store first, and from there on everything is as for gRPC:
//! uploads go the same way and pass the same gate, reads come piece by piece.

use bytes::Bytes;
use prost::Message;
use sha2::{Digest as _, Sha256};

use super::action_cache::{self, mangled};
use super::cas::store_blob;
use super::refusal::Refusal;
use super::{CallContext, Services, Status, action_json};
use crate::limits;
use crate::pure::digest::{Digest, EMPTY, Hash};
use crate::pure::http_cache::{Range, Space, Target, accepts_zstd, names_etag};
use crate::pure::purge::InstanceTag;
use crate::pure::raw_entry;
use crate::pure::scope::Scope;
use crate::rt;
use crate::rt::time::{self, Either};
use crate::store::{
    Accept, ActionKey, Blob, Encoding, Get, Memory, Opened, Purpose, Put, PutOutcome, Store, StoreError, Upload,
    UploadEnd, UploadKey,
};
use crate::wire::reapi::ActionResult;

/// A request body.
#[allow(async_fn_in_trait)] // Why: futures stay on their core; nobody asks for Send.
pub trait Incoming {
    /// The next bytes; `None` at the end. What was not taken yet holds up the client.
    async fn next(&mut self) -> Result<Option<Bytes>, Refusal>;

    /// Takes memory for `len` bytes that are about to be held whole, until the request has ended.
    async fn hold(&mut self, len: usize) -> Result<(), Refusal>;
}

/// Where an answer takes memory for what it is about to read, until it has gone out.
#[allow(async_fn_in_trait)] // Why: as above.
pub trait Answering {
    async fn hold(&mut self, len: usize) -> Result<(), Refusal>;
    /// Gives back what was taken by `hold`.
    fn release(&mut self);
}

/// What an answer has taken, as the store asks for it.
struct AnswerMemory<'a, A>(&'a mut A);

impl<A: Answering> Memory<Refusal> for AnswerMemory<'_, A> {
    async fn hold(&mut self, len: usize) -> Result<(), Refusal> {
        self.0.hold(len).await
    }

    fn release(&mut self) {
        self.0.release();
    }
}

/// What the headers of a read say; empty when they are not there.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wants<'a> {
    pub is_head: bool,
    pub accept: &'a str,
    pub accept_encoding: &'a str,
    pub range: &'a str,
    pub if_range: &'a str,
    pub if_none_match: &'a str,
}

/// What a read found.
pub enum Found {
    /// The client has it.
    NotModified {
        etag: String,
    },
    /// A blob or a part of it. `None` instead of the bytes for HEAD.
    Blob {
        blob: Option<Blob>,
        /// Bytes of the body, if known.
        len: Option<u64>,
        encoding: Encoding,
        etag: String,
        part: Option<Part>,
    },
    Action {
        data: Bytes,
        is_json: bool,
    },
}

/// Which part of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub start: u64,
    pub len: u64,
    /// Of the whole blob.
    pub size: u64,
}

/// What the headers of an upload say.
#[derive(Debug, Clone, Copy, Default)]
pub struct Declared<'a> {
    pub content_length: Option<u64>,
    /// `X-Digest-SizeBytes`; empty when it is not there.
    pub digest_size: &'a str,
    /// Empty when it is not there.
    pub content_encoding: &'a str,
    pub content_type: &'a str,
    /// The client waits for a word before it sends the body.
    pub expects_continue: bool,
}

const JSON: &str = "application/json";

/// `GET` and `HEAD`.
pub async fn get<S: Store>(
    services: &Services<S>,
    target: &Target,
    wants: Wants<'_>,
    answering: &mut impl Answering,
) -> Result<Found, Refusal> {
    match target.space {
        Space::Cas => get_blob(services, target.hash, wants, answering).await,
        Space::Action if services.options.check_http_actions => {
            answering.hold(limits::ACTION_READ_HELD_LEN).await?;
            let key = action_key(services, target);
            let entry = services.store.action_get_held(key, true, &mut AnswerMemory(answering)).await?;
            let data = entry.ok_or_else(not_found)?.data;
            let is_json = wants.accept == JSON;
            let data = if is_json { action_json::encode(&data)?.into() } else { data };
            Ok(Found::Action { data, is_json })
        }
        Space::Action => get_raw(&services.scoped(&Scope::raw()), target, wants, answering).await,
    }
}

/// Reads what `put_raw` has stored, or a backend has: an entry, and its bytes.
async fn get_raw<S: Store>(
    services: &Services<S>,
    target: &Target,
    wants: Wants<'_>,
    answering: &mut impl Answering,
) -> Result<Found, Refusal> {
    let key = action_key(services, target);
    // Twice where the bytes have been evicted: then the entry is dropped, and a backend may have it as a whole.
    for _ in 0..2 {
        answering.hold(limits::ACTION_READ_HELD_LEN).await?;
        let entry = services.store.action_get_held(key, false, &mut AnswerMemory(answering)).await?;
        let entry = entry.ok_or_else(not_found)?;
        if let Some(content) = raw_entry::content_of(&entry.data) {
            // Who only looks reads nothing, and would not notice.
            if !wants.is_head || services.store.find_missing(vec![content]).await? == [false] {
                match read_blob(services, content, wants, answering).await {
                    Err(refusal) if refusal.code == 404 => {}
                    answered => return answered,
                }
            }
        }
        services.store.action_drop(key, entry.version).await?;
    }
    Err(not_found())
}

async fn get_blob<S: Store>(
    services: &Services<S>,
    hash: Hash,
    wants: Wants<'_>,
    answering: &mut impl Answering,
) -> Result<Found, Refusal> {
    let purpose = if wants.is_head { Purpose::Look } else { Purpose::Read };
    let size = services.store.size_of(hash, purpose).await?.ok_or_else(not_found)?;
    read_blob(services, Digest { hash, size }, wants, answering).await
}

async fn read_blob<S: Store>(
    services: &Services<S>,
    digest: Digest,
    wants: Wants<'_>,
    answering: &mut impl Answering,
) -> Result<Found, Refusal> {
    let hash = digest.hash.to_hex();
    // Why two: bytes that differ must not have the same strong tag (RFC 9110, 8.8.3).
    let (etag, zstd_etag) = (format!("\"{hash}\""), format!("\"{hash}-zstd\""));
    let names = |tag: &String| names_etag(wants.if_none_match, &[tag]);
    if let Some(etag) = [&etag, &zstd_etag].into_iter().find(|tag| names(tag)) {
        return Ok(Found::NotModified { etag: etag.clone() });
    }
    if wants.is_head {
        return Ok(Found::Blob { blob: None, len: Some(digest.size), encoding: Encoding::Identity, etag, part: None });
    }
    let range = if wants.if_range.is_empty() || wants.if_range == etag { wants.range } else { "" };
    let part = match Range::parse(range, digest.size) {
        Range::Whole => None,
        Range::Part { start, len } => Some(Part { start, len, size: digest.size }),
        Range::Unsatisfiable => return Err(Refusal::outside_of(digest.size)),
    };
    let accept = if part.is_none() && accepts_zstd(wants.accept_encoding) { Accept::Any } else { Accept::Identity };
    let get = match part {
        None => Get::whole(digest, accept),
        Some(Part { start, len, .. }) => Get { digest, offset: start, limit: Some(len), accept },
    };
    let len = usize::try_from(digest.size).unwrap_or(usize::MAX);
    answering.hold(len.min(limits::READ_HELD_LEN)).await?;
    let blob = services.store.get(get).await?.ok_or_else(not_found)?;
    let (len, encoding) = (blob.encoded_len(), blob.encoding());
    let etag = if encoding == Encoding::Zstd { zstd_etag } else { etag };
    Ok(Found::Blob { blob: Some(blob), len, encoding, etag, part })
}

/// `PUT`. Says whether the body was taken: that of a blob that is here is not.
pub async fn put<S: Store>(
    services: &Services<S>,
    context: &CallContext,
    target: &Target,
    declared: Declared<'_>,
    body: &mut impl Incoming,
) -> Result<PutOutcome, Refusal> {
    if context.read_only {
        return Err(Refusal::new(403, "this client may read from the cache, not write to it"));
    }
    match target.space {
        Space::Cas => put_blob(services, target, declared, body).await,
        Space::Action if services.options.check_http_actions => put_action(services, target, declared, body).await,
        Space::Action => put_raw(&services.scoped(&Scope::raw()), target, declared, body).await,
    }
}

async fn put_blob<S: Store>(
    services: &Services<S>,
    target: &Target,
    declared: Declared<'_>,
    body: &mut impl Incoming,
) -> Result<PutOutcome, Refusal> {
    let encoding = encoding_of(declared.content_encoding)?;
    let Some(size) = declared_size(declared, encoding)? else {
        let data = collect(declared, limits::HTTP_UNSIZED_LEN_MAX, body).await?;
        let digest = digest_for(services, target.hash, data.len() as u64)?;
        let stored = store_blob(services, &target.instance, digest, encoding, data).await;
        return stored.map_err(|error| refused(services, target, error));
    };
    let digest = digest_for(services, target.hash, size)?;
    if digest.is_empty() {
        return match body.next().await? {
            Some(_) if encoding == Encoding::Identity => Err(Refusal::new(400, "the body is longer than 0 bytes")),
            _ => Ok(PutOutcome::AlreadyPresent),
        };
    }
    let is_here_whole = declared.content_length.is_some_and(|len| len <= limits::SMALL_BLOB_LEN_MAX as u64);
    if is_here_whole && size <= limits::SMALL_BLOB_LEN_MAX as u64 {
        if declared.expects_continue {
            // Why not FindMissing: this is the answer to an upload, and says what `--ack` promises.
            let key = UploadKey::unnamed(&target.instance, 0, digest, encoding);
            if services.store.upload_status(key).await?.complete {
                return Ok(PutOutcome::AlreadyPresent);
            }
        }
        let data = vec![collect(declared, limits::SMALL_BLOB_LEN_MAX, body).await?];
        let stored = services.store.put(Put { digest, encoding, data, admitted: false }).await;
        return stored.map_err(|error| refused(services, target, error));
    }
    upload(services, target, digest, encoding, body).await
}

/// Hands the body to the owner of the blob as it comes.
async fn upload<S: Store>(
    services: &Services<S>,
    target: &Target,
    digest: Digest,
    encoding: Encoding,
    body: &mut impl Incoming,
) -> Result<PutOutcome, Refusal> {
    let key = UploadKey::unnamed(&target.instance, rt::random_u64(), digest, encoding);
    let opened = services.store.open_upload(key, 0).await;
    let mut upload = match opened.map_err(|error| refused(services, target, error))? {
        Opened::AlreadyPresent => return Ok(PutOutcome::AlreadyPresent),
        Opened::Ready(upload) => upload,
    };
    loop {
        let next = match time::race(body.next(), upload.moved()).await {
            Either::Left(next) => next?,
            Either::Right(Ok(())) => continue,
            Either::Right(Err(UploadEnd::AlreadyPresent)) => return Ok(PutOutcome::AlreadyPresent),
            Either::Right(Err(UploadEnd::Failed(error))) => return Err(error.into()),
        };
        let Some(data) = next else { break };
        match upload.write(vec![data]).await {
            Ok(()) => {}
            Err(UploadEnd::AlreadyPresent) => return Ok(PutOutcome::AlreadyPresent),
            Err(UploadEnd::Failed(error)) => return Err(error.into()),
        }
    }
    Ok(upload.finish().await?)
}

async fn put_action<S: Store>(
    services: &Services<S>,
    target: &Target,
    declared: Declared<'_>,
    body: &mut impl Incoming,
) -> Result<PutOutcome, Refusal> {
    let data = collect_whole(services, declared, limits::ACTION_RESULT_LEN_MAX, body).await?;
    let media_type = declared.content_type.split(';').next().unwrap_or_default().trim();
    let (result, sent) = match media_type.eq_ignore_ascii_case(JSON) {
        true => (action_json::decode(&data)?, None),
        false => {
            let result = ActionResult::decode(data.clone());
            (result.map_err(|error| Refusal::new(400, format!("the body is no ActionResult: {error}")))?, Some(data))
        }
    };
    let (key, instance) = (action_key(services, target), InstanceTag::of(&target.instance));
    let stored = action_cache::store_result(&services.store, key, instance, result, sent).await;
    stored.map_err(Status::from)?;
    Ok(PutOutcome::Stored)
}

/// Stores bytes that are no ActionResult (`--disable_http_ac_validation`), as ccache sends them. See `pure::raw_entry`.
async fn put_raw<S: Store>(
    services: &Services<S>,
    target: &Target,
    declared: Declared<'_>,
    body: &mut impl Incoming,
) -> Result<PutOutcome, Refusal> {
    let data = collect_whole(services, declared, limits::HTTP_RAW_LEN_MAX, body).await?;
    let digest = Digest { hash: Hash(Sha256::digest(&data).into()), size: data.len() as u64 };
    if !data.is_empty() {
        let stored = store_blob(services, &target.instance, digest, Encoding::Identity, data).await;
        stored.map_err(|error| refused(services, target, error))?;
    }
    let instance = InstanceTag::of(&target.instance);
    services.store.action_put(action_key(services, target), raw_entry::encode(digest), instance).await?;
    Ok(PutOutcome::Stored)
}

/// The answer to a write that the store refused. One that was not let in is logged.
fn refused<S>(services: &Services<S>, target: &Target, error: StoreError) -> Refusal {
    if matches!(error, StoreError::Shed { .. }) {
        services.options.shed_log.note(format_args!("HTTP PUT SHED {}", target.hash.to_hex()));
    }
    error.into()
}

fn action_key<S>(services: &Services<S>, target: &Target) -> ActionKey {
    ActionKey { hash: mangled(services, &target.instance, target.hash), size: None }
}

/// The digest of an upload, if the cache takes blobs of that size.
fn digest_for<S>(services: &Services<S>, hash: Hash, size: u64) -> Result<Digest, Refusal> {
    let max = services.options.max_blob_size.get();
    if size > max {
        return Err(Refusal::new(400, format!("the blob has {size} bytes, more than the {max} that are taken")));
    }
    if (size == 0) != (hash == EMPTY.hash) {
        return Err(Refusal::new(400, format!("a blob of {size} bytes does not have this hash")));
    }
    Ok(Digest { hash, size })
}

fn encoding_of(content_encoding: &str) -> Result<Encoding, Refusal> {
    let is = |coding| content_encoding.eq_ignore_ascii_case(coding);
    match () {
        () if is("") || is("identity") => Ok(Encoding::Identity),
        () if is("zstd") => Ok(Encoding::Zstd),
        // Why not 415: it is what bazel-remote answers.
        () => {
            Err(Refusal::new(400, format!("Unsupported content-encoding: {content_encoding:?}; send identity or zstd")))
        }
    }
}

/// The body of an upload to `/ac/`, of at most `max` bytes and of the size that the headers say. Not as it came where it is zstd:
/// it is looked at, and action results are kept as they are.
async fn collect_whole<S: Store>(
    services: &Services<S>,
    declared: Declared<'_>,
    max: usize,
    body: &mut impl Incoming,
) -> Result<Bytes, Refusal> {
    let encoding = encoding_of(declared.content_encoding)?;
    let size = declared_size(declared, encoding)?;
    if let (Encoding::Zstd, Some(size)) = (encoding, size) {
        let raw_len = usize::try_from(size).ok().filter(|len| *len <= max).ok_or_else(|| too_long(max))?;
        let encoded_max = declared.content_length.map_or(max, |len| max.min(usize::try_from(len).unwrap_or(max)));
        body.hold(encoded_max + raw_len).await?;
        let encoded = collect(declared, max, body).await?;
        let decoded = services.store.decoded(&encoded, raw_len);
        return decoded.map_err(|error| Refusal::new(400, error.to_string()));
    }
    let data = collect(declared, max, body).await?;
    match size {
        Some(size) if size != data.len() as u64 => {
            Err(Refusal::new(400, format!("X-Digest-SizeBytes: is {size}, but the body has {} bytes", data.len())))
        }
        _ => Ok(data),
    }
}

/// Raw bytes of the blob, as the headers say; `None` when they do not.
fn declared_size(declared: Declared<'_>, encoding: Encoding) -> Result<Option<u64>, Refusal> {
    let size = match declared.digest_size {
        "" => None,
        text => Some(
            text.parse::<u64>()
                .map_err(|_| Refusal::new(400, format!("X-Digest-SizeBytes: {text:?} is not a number of bytes")))?,
        ),
    };
    match (encoding, size, declared.content_length) {
        (Encoding::Zstd, None, _) => {
            Err(Refusal::new(400, "X-Digest-SizeBytes: must be set for a body of Content-Encoding zstd"))
        }
        (Encoding::Identity, Some(size), Some(len)) if size != len => {
            Err(Refusal::new(400, format!("X-Digest-SizeBytes: is {size}, but Content-Length is {len}")))
        }
        (Encoding::Identity, None, len) => Ok(len),
        (_, size, _) => Ok(size),
    }
}

/// The whole body, of at most `max` bytes.
async fn collect(declared: Declared<'_>, max: usize, body: &mut impl Incoming) -> Result<Bytes, Refusal> {
    let expected = match declared.content_length {
        Some(len) => usize::try_from(len).ok().filter(|len| *len <= max).ok_or_else(|| too_long(max))?,
        None => max,
    };
    body.hold(expected).await?;
    let Some(first) = body.next().await? else { return Ok(Bytes::new()) };
    if declared.content_length == Some(first.len() as u64) {
        return Ok(first);
    }
    // Why as it comes, and not as announced: an announcement costs a client nothing.
    let mut data = Vec::from(first);
    while let Some(piece) = body.next().await? {
        if data.len() + piece.len() > max {
            return Err(too_long(max));
        }
        data.extend_from_slice(&piece);
    }
    Ok(data.into())
}

fn too_long(max: usize) -> Refusal {
    Refusal::new(413, format!("the body has more than the {max} bytes that are taken here"))
}

/// Source: bazel-remote's text.
fn not_found() -> Refusal {
    Refusal::new(404, "Not found")
}
