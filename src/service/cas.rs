//! `build.bazel.remote.execution.v2.ContentAddressableStorage`, without `GetTree` (see `tree`).

use bytes::Bytes;
use prost::Message as _;

use super::reply::{self, ReplyBuilder, item_status, pieces_len};
use super::{
    CallContext, Code, Options, Outgoing, Reply, Services, Status, check_digest_function, decode, parse_digest,
};
use crate::limits;
use crate::pure::digest::Digest;
use crate::pure::find_missing::{self, Question};
use crate::rt;
use crate::rt::join::map_bounded;
use crate::store::{
    Accept, Encoding, Get, Opened, Put, PutOutcome, Store, StoreError, Upload, UploadEnd, UploadKey, fetch_all,
};
use crate::wire::reapi::{
    self, BatchReadBlobsRequest, BatchUpdateBlobsRequest, BatchUpdateBlobsResponse, batch_update_blobs_request,
    batch_update_blobs_response, compressor,
};
use crate::wire::rpc;

/// `FindMissingBlobs`. The response is cut out of the request.
pub async fn find_missing_blobs<S: Store>(
    services: &Services<S>,
    _context: &CallContext,
    request: Bytes,
) -> Result<Reply, Status> {
    let Question { digests, fields, digest_function } =
        Question::parse(&request).map_err(|error| Status::invalid(error.to_string()))?;
    check_digest_function(digest_function)?;
    let missing = services.store.find_missing(digests).await?;
    let mut reply = ReplyBuilder::default();
    for stretch in find_missing::answer(&fields, &missing) {
        reply.put(request.slice(stretch));
    }
    if reply.len() > limits::REPLY_LEN_MAX {
        return Err(Status::invalid(format!(
            "blob_digests: the answer would have {} bytes, more than {}: ask for fewer digests in one call",
            reply.len(),
            limits::REPLY_LEN_MAX
        )));
    }
    Ok(reply.finish())
}

/// `BatchUpdateBlobs`. Each item succeeds or fails by itself, unless the batch as a whole is too large.
pub async fn batch_update_blobs<S: Store>(
    services: &Services<S>,
    context: &CallContext,
    request: Bytes,
) -> Result<Reply, Status> {
    context.require_write()?;
    let request: BatchUpdateBlobsRequest = decode(request)?;
    check_digest_function(request.digest_function)?;
    let sizes = request.requests.iter().filter_map(|item| item.digest.as_ref()).map(|digest| digest.size_bytes);
    check_total("requests", sizes)?;
    let instance = request.instance_name.as_str();
    let responses = map_bounded(request.requests, limits::BATCH_CONCURRENCY, async |item| {
        let status = match update_item(services, context, instance, &item).await {
            Ok(PutOutcome::Stored | PutOutcome::AlreadyPresent) => rpc::Status::default(),
            Err(status) => item_status(status.code, status.message),
        };
        batch_update_blobs_response::Response { digest: item.digest, status: Some(status) }
    })
    .await;
    Ok(reply::encode(&BatchUpdateBlobsResponse { responses }))
}

async fn update_item<S: Store>(
    services: &Services<S>,
    context: &CallContext,
    instance: &str,
    item: &batch_update_blobs_request::Request,
) -> Result<PutOutcome, Status> {
    let digest = parse_digest(item.digest.as_ref(), "digest")?;
    let encoding = match compressor::Value::try_from(item.compressor) {
        Ok(compressor::Value::Identity) => Encoding::Identity,
        Ok(compressor::Value::Zstd) => Encoding::Zstd,
        Ok(compressor::Value::Deflate | compressor::Value::Brotli) | Err(_) => {
            return Err(Status::invalid(format!("compressor must be IDENTITY or ZSTD, got {}", item.compressor)));
        }
    };
    if encoding == Encoding::Identity && item.data.len() as u64 != digest.size {
        let text = format!("data has {} bytes, the digest says {}", item.data.len(), digest.size);
        return Err(Status::invalid(text));
    }
    store_blob(services, instance, digest, encoding, item.data.clone()).await.map_err(|error| {
        let Options { shed_status, shed_log, .. } = &*services.options;
        if matches!(error, StoreError::Shed { .. }) {
            shed_log.note(format_args!("GRPC CAS BATCHUPDATE SHED {digest}"));
        }
        shed_status.get().status(error, || context.clone())
    })
}

/// Verifies and stores a blob that is all here.
pub(super) async fn store_blob<S: Store>(
    services: &Services<S>,
    instance: &str,
    digest: Digest,
    encoding: Encoding,
    data: Bytes,
) -> Result<PutOutcome, StoreError> {
    let max = services.options.max_blob_size.get();
    if digest.size > max {
        return Err(StoreError::BlobTooLarge { digest, max });
    }
    if digest.size <= limits::SMALL_BLOB_LEN_MAX as u64 {
        return services.store.put(Put { digest, encoding, data: vec![data], admitted: false }).await;
    }
    let key = UploadKey::unnamed(instance, rt::random_u64(), digest, encoding);
    let mut upload = match services.store.open_upload(key, 0).await? {
        Opened::AlreadyPresent => return Ok(PutOutcome::AlreadyPresent),
        Opened::Ready(upload) => upload,
    };
    match upload.write(vec![data]).await {
        Ok(()) => upload.finish().await,
        Err(UploadEnd::AlreadyPresent) => Ok(PutOutcome::AlreadyPresent),
        Err(UploadEnd::Failed(error)) => Err(error),
    }
}

/// `BatchReadBlobs`. Each item succeeds or fails by itself, unless the batch as a whole is too large.
///
/// A batch within `max_batch_total_size_bytes` may still be too long for one reply, because of what each item takes
/// besides its blob. What does not fit then is RESOURCE_EXHAUSTED, item by item, for the client to ask for again.
pub async fn batch_read_blobs<S: Store>(
    services: &Services<S>,
    _context: &CallContext,
    request: Bytes,
    out: &mut impl Outgoing,
) -> Result<Reply, Status> {
    let request: BatchReadBlobsRequest = decode(request)?;
    check_digest_function(request.digest_function)?;
    check_total("digests", request.digests.iter().map(|digest| digest.size_bytes))?;
    let (items, reply_len) = plan_read(&request.digests)?;
    // Before anything is held: what has to come from a backend comes now, and is read below like all else.
    let wanted = items.iter().flatten().copied().collect();
    let mut comes = fetch_all(&services.store, wanted).await.into_iter();
    out.hold(reply_len).await?;
    let zstd = request.acceptable_compressors.contains(&(compressor::Value::Zstd as i32));
    let accept = if zstd { Accept::Any } else { Accept::Identity };
    let items = items.into_iter().map(|item| item.map(|digest| (digest, comes.next() == Some(true)))).collect();
    let items = map_bounded(items, limits::BATCH_CONCURRENCY, async |planned| match planned {
        Ok((digest, comes)) => read_item(services, digest, accept, comes).await,
        Err(status) => Err(status),
    })
    .await;
    let mut texts_len = limits::REPLY_LEN_MAX - reply_len;
    let mut reply = ReplyBuilder::default();
    for (digest, item) in request.digests.iter().zip(items) {
        put_read_item(&mut reply, digest, item, &mut texts_len);
    }
    debug_assert!(reply.len() <= limits::REPLY_LEN_MAX, "each item kept within its share");
    Ok(reply.finish())
}

/// What one item of BatchReadBlobsResponse takes at most besides its digest and its blob, in bytes: its own header 5,
/// a status with a code 4, the compressor 2, the header of the data 5.
const READ_ITEM_OVERHEAD_LEN: usize = 16;
/// Bytes of an item's error text at most.
const READ_ITEM_TEXT_LEN_MAX: usize = 144;

/// Which items will be read, and why the others will not; and the length of the reply at most, in bytes, but for error
/// texts. Items have their room in the order in which they were asked for.
fn plan_read(digests: &[reapi::Digest]) -> Result<(Vec<Result<Digest, Status>>, usize), Status> {
    let bare_len = |digest: &reapi::Digest| reply::field_len(digest.encoded_len()) + READ_ITEM_OVERHEAD_LEN;
    let mut len: usize = digests.iter().map(bare_len).sum();
    if len > limits::REPLY_LEN_MAX {
        let (count, max) = (digests.len(), limits::REPLY_LEN_MAX);
        let text = format!("digests: an answer for {count} of them is longer than {max} bytes: use several calls");
        return Err(Status::invalid(text));
    }
    let plan = |digest: &reapi::Digest| {
        let digest = parse_digest(Some(digest), "digest")?;
        // Invariant: the sizes together are at most `BATCH_TOTAL_SIZE_MAX`.
        let with_blob = len + digest.size as usize;
        if with_blob > limits::REPLY_LEN_MAX {
            return Err(Status::new(Code::ResourceExhausted, "does not fit this reply: ask for it in another call"));
        }
        len = with_blob;
        Ok(digest)
    };
    let items = digests.iter().map(plan).collect();
    Ok((items, len))
}

async fn read_item<S: Store>(
    services: &Services<S>,
    digest: Digest,
    accept: Accept,
    comes: bool,
) -> Result<(Vec<Bytes>, Encoding), Status> {
    for accept in [accept, Accept::Identity] {
        let blob = services.store.get_fetched(Get::whole(digest, accept), comes).await?;
        let blob = blob.ok_or_else(|| Status::not_found("not in the cache"))?;
        let encoding = blob.encoding();
        let pieces = blob.collect().await?;
        let (len, size) = (pieces_len(&pieces) as u64, digest.size);
        match encoding {
            Encoding::Identity if len == size => return Ok((pieces, encoding)),
            Encoding::Identity => {
                return Err(StoreError::Disk(format!("the read of {digest} ended after {len} bytes")).into());
            }
            Encoding::Zstd if len <= size => return Ok((pieces, encoding)),
            // Why: what is longer than the raw form could make the reply too long for its client.
            Encoding::Zstd => {}
        }
    }
    Err(Status::new(Code::Internal, "the store answered identity with zstd"))
}

/// `BatchReadBlobsResponse.responses` = 1: digest = 1, data = 2, status = 3, compressor = 4. Error texts are cut down to
/// what is left of `texts_len`.
fn put_read_item(
    reply: &mut ReplyBuilder,
    digest: &reapi::Digest,
    item: Result<(Vec<Bytes>, Encoding), Status>,
    texts_len: &mut usize,
) {
    let mut head = ReplyBuilder::default();
    head.field(1, digest.encoded_len());
    head.copy(&digest.encode_to_vec());
    let pieces = match item {
        Ok((pieces, encoding)) => {
            // Why: an empty status is OK, and clients that look for one find it.
            head.field(3, 0);
            if encoding == Encoding::Zstd {
                head.integer(4, compressor::Value::Zstd as u64);
            }
            head.field(2, pieces_len(&pieces));
            pieces
        }
        Err(Status { code, mut message, info: _ }) => {
            // Headers of the text, and of longer messages around it.
            const HEADERS_LEN: usize = 4;
            let room = texts_len.saturating_sub(HEADERS_LEN).min(READ_ITEM_TEXT_LEN_MAX);
            message.truncate(message.floor_char_boundary(room));
            *texts_len = texts_len.saturating_sub(message.len() + HEADERS_LEN);
            let status = item_status(code, message).encode_to_vec();
            head.field(3, status.len());
            head.copy(&status);
            Vec::new()
        }
    };
    reply.field(1, head.len() + pieces_len(&pieces));
    head.finish().iter().for_each(|piece| reply.copy(piece));
    pieces.into_iter().for_each(|piece| reply.put(piece));
}

/// Refuses batches beyond `max_batch_total_size_bytes`. Sizes that are invalid by themselves are their items' concern.
fn check_total(field: &str, sizes: impl Iterator<Item = i64>) -> Result<(), Status> {
    let total = sizes.map(|size| size.max(0) as u64).fold(0u64, u64::saturating_add);
    if total > limits::BATCH_TOTAL_SIZE_MAX as u64 {
        return Err(Status::invalid(format!(
            "{field}: the blobs have {total} bytes together, more than max_batch_total_size_bytes ({}): use several \
             calls, or ByteStream for large blobs",
            limits::BATCH_TOTAL_SIZE_MAX
        )));
    }
    Ok(())
}

/// `SplitBlob`: not served, and not announced.
pub async fn split_blob<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "SplitBlob is not served (split_blob_support is false)"))
}

/// `SpliceBlob`: not served, and not announced.
pub async fn splice_blob<S: Store>(
    _services: &Services<S>,
    _context: &CallContext,
    _request: Bytes,
) -> Result<Reply, Status> {
    Err(Status::new(Code::Unimplemented, "SpliceBlob is not served (splice_blob_support is false)"))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::pure::digest::{EMPTY, Hash};
    use crate::service::testing::{self, Collected, wire};
    use crate::store::fake::{FakeStore, digest_of, raw_of, zstd_of};
    use crate::wire::reapi::{
        BatchReadBlobsResponse, Digest as WireDigest, FindMissingBlobsRequest, FindMissingBlobsResponse,
        batch_read_blobs_response,
    };

    type Tested = (FakeStore, Services<FakeStore>);

    fn find((_, services): &Tested, request: &FindMissingBlobsRequest) -> Result<Vec<WireDigest>, Status> {
        let request = request.encode_to_vec().into();
        let reply = find_missing_blobs(services, &CallContext::default(), request).now_or_never().expect("ready")?;
        Ok(FindMissingBlobsResponse::decode(&reply.concat()[..]).expect("a message").missing_blob_digests)
    }

    fn update(
        (_, services): &Tested,
        context: &CallContext,
        request: &BatchUpdateBlobsRequest,
    ) -> Result<Vec<rpc::Status>, Status> {
        let request = request.encode_to_vec().into();
        let reply = batch_update_blobs(services, context, request).now_or_never().expect("ready")?;
        let response = BatchUpdateBlobsResponse::decode(&reply.concat()[..]).expect("a message");
        Ok(response.responses.into_iter().map(|item| item.status.expect("set")).collect())
    }

    fn item(
        digest: Option<WireDigest>,
        data: impl Into<Bytes>,
        compressor: i32,
    ) -> batch_update_blobs_request::Request {
        batch_update_blobs_request::Request { digest, data: data.into(), compressor }
    }

    fn batch(requests: Vec<batch_update_blobs_request::Request>) -> BatchUpdateBlobsRequest {
        BatchUpdateBlobsRequest { requests, ..BatchUpdateBlobsRequest::default() }
    }

    fn read(
        (_, services): &Tested,
        digests: Vec<WireDigest>,
        acceptable_compressors: Vec<i32>,
    ) -> Result<Vec<batch_read_blobs_response::Response>, Status> {
        let request = BatchReadBlobsRequest { digests, acceptable_compressors, ..BatchReadBlobsRequest::default() };
        let request = request.encode_to_vec().into();
        let (context, mut out) = (CallContext::default(), Collected::default());
        let reply = batch_read_blobs(services, &context, request, &mut out).now_or_never().expect("ready")?;
        assert!(pieces_len(&reply) <= limits::REPLY_LEN_MAX);
        Ok(BatchReadBlobsResponse::decode(&reply.concat()[..]).expect("a message").responses)
    }

    fn code<T>(result: Result<T, Status>) -> Code {
        result.err().map_or(Code::Ok, |status| status.code)
    }

    /// Goal: 14,000 digests in one call; duplicates each get their answer, the empty blob is never missing. Method:
    /// every third blob is stored.
    #[test]
    fn finds_missing_among_many() {
        let tested = testing::services();
        let blobs: Vec<String> = (0..14_000).map(|i| format!("blob {i}")).collect();
        let mut digests: Vec<Digest> = blobs.iter().map(|blob| digest_of(blob.as_bytes())).collect();
        for blob in blobs.iter().step_by(3) {
            tested.0.add(blob.clone());
        }
        digests.extend([EMPTY, digests[1], digests[1], digests[0]]);
        let blob_digests = digests.iter().filter_map(|&digest| wire(digest)).collect();
        let request = FindMissingBlobsRequest { blob_digests, digest_function: 1, ..Default::default() };
        let missing = find(&tested, &request).expect("valid");
        let absent = |digest: &&Digest| !digest.is_empty() && tested.0.blob(**digest).is_none();
        let expected: Vec<_> = digests.iter().filter(absent).filter_map(|&digest| wire(digest)).collect();
        assert_eq!(missing, expected);
        assert_eq!(tested.0.with(|state| state.asked.len()), 1, "one call to the store");
    }

    /// Goal: each refusal of FindMissing. Method: one example for each.
    #[test]
    fn find_missing_refuses() {
        let tested = testing::services();
        let bad = WireDigest { hash: "A".repeat(64), size_bytes: 1 };
        let request = |blob_digests, digest_function| FindMissingBlobsRequest {
            blob_digests,
            digest_function,
            ..FindMissingBlobsRequest::default()
        };
        let error = find(&tested, &request(vec![wire(EMPTY).expect("some"), bad], 0)).expect_err("a bad digest");
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.message.starts_with("blob_digests[1]: hash must be 64 lower-case hex"), "{error}");
        for function in [2, 8, 9, 77] {
            assert_eq!(code(find(&tested, &request(vec![], function))), Code::InvalidArgument);
        }
        let absent = wire(Digest { hash: Hash([1; 32]), size: 1 }).expect("some");
        let error = find(&tested, &request(vec![absent; 61_000], 1)).expect_err("too long an answer");
        assert_eq!(error.code, Code::InvalidArgument);
        tested.0.with(|state| state.fail_next = Some(StoreError::Stopping));
        assert_eq!(code(find(&tested, &request(vec![], 0))), Code::Unavailable);
    }

    /// Goal: each item succeeds or fails by itself, with code and text. Method: one batch with an item of each kind.
    #[test]
    fn batch_update_items_are_independent() {
        let tested = testing::services();
        let (large, name) = (vec![5u8; limits::SMALL_BLOB_LEN_MAX + 1], digest_of(b"other"));
        let zstd = zstd_of(b"compressed");
        let request = batch(vec![
            item(wire(digest_of(b"plain")), "plain", 0),
            item(wire(digest_of(b"compressed")), zstd, 1),
            item(wire(digest_of(&large)), large.clone(), 0),
            item(wire(digest_of(&large)), zstd_of(&large), 1),
            item(wire(EMPTY), "", 0),
            item(wire(digest_of(b"plain")), "plain", 0),
            item(wire(name), "wrong", 0),
            item(wire(name), "longer", 0),
            item(wire(name), "not zstd", 1),
            item(wire(name), "other", 2),
            item(wire(name), "other", 77),
            item(None, "other", 0),
            item(Some(WireDigest { hash: "0".into(), size_bytes: 5 }), "other", 0),
            item(Some(WireDigest { hash: "0".repeat(64), size_bytes: -5 }), "other", 0),
        ]);
        let statuses = update(&tested, &CallContext::default(), &request).expect("the call as a whole is well");
        let codes: Vec<_> = statuses.iter().map(|status| status.code).collect();
        assert_eq!(codes, [0, 0, 0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3]);
        assert!(statuses.iter().all(|status| (status.code == 0) == status.message.is_empty()), "{statuses:?}");
        for blob in [&b"plain"[..], b"compressed", &large] {
            assert_eq!(tested.0.blob(digest_of(blob)).as_deref(), Some(blob));
        }
        assert_eq!(tested.0.blob(name), None);
    }

    /// Goal: what ends a whole batch upload: its size, its function, a reader. Method: one example for each, at the
    /// limit and one byte over it.
    #[test]
    fn batch_update_refuses_as_a_whole() {
        let tested = testing::services();
        let context = CallContext::default();
        let full = vec![0u8; limits::BATCH_TOTAL_SIZE_MAX];
        let mut request = batch(vec![item(wire(digest_of(&full)), full, 0)]);
        assert_eq!(update(&tested, &context, &request), Ok(vec![rpc::Status::default()]));
        request.requests.push(item(wire(digest_of(b"x")), "x", 0));
        let error = update(&tested, &context, &request).expect_err("too much");
        assert!(error.code == Code::InvalidArgument && error.message.contains("max_batch_total_size_bytes"), "{error}");
        let huge = WireDigest { hash: "0".repeat(64), size_bytes: i64::MAX };
        let request = batch(vec![item(Some(huge.clone()), "", 1), item(Some(huge), "", 1)]);
        assert_eq!(code(update(&tested, &context, &request)), Code::InvalidArgument);
        let request = BatchUpdateBlobsRequest { digest_function: 9, ..batch(vec![]) };
        assert_eq!(code(update(&tested, &context, &request)), Code::InvalidArgument);
        let reader = CallContext { read_only: true, ..CallContext::default() };
        assert_eq!(code(update(&tested, &reader, &batch(vec![]))), Code::PermissionDenied);
    }

    /// Goal: the store's trouble with one item is that item's, and the limit on blobs holds here too.
    #[test]
    fn batch_update_passes_trouble_on() {
        let tested = testing::services();
        tested.1.options.max_blob_size.set(4);
        tested.0.with(|state| state.fail_next = Some(StoreError::Busy { what: "writes", limit: 7 }));
        let request = batch(["abcd", "efgh", "ijklm"].map(|s| item(wire(digest_of(s.as_bytes())), s, 0)).to_vec());
        let statuses = update(&tested, &CallContext::default(), &request).expect("the call as a whole is well");
        assert_eq!(statuses.iter().map(|status| status.code).collect::<Vec<_>>(), [8, 0, 3]);
        assert!(statuses[0].message.contains("writes, limit 7"), "{statuses:?}");
    }

    /// Goal: BatchRead gives every form its bytes, small and in pieces, raw and zstd, and NOT_FOUND by item. Method:
    /// the same digests with and without zstd, on a store that prefers it and one that does not.
    #[test]
    fn batch_read_returns_every_form() {
        let tested = testing::services();
        tested.0.with(|state| state.piece_len = 50_000);
        let large: Vec<u8> = (0..300_000u32).map(|i| i as u8).collect();
        let blobs: [Bytes; 4] = ["".into(), "small".into(), large.clone().into(), vec![1; 2000].into()];
        let mut digests: Vec<_> = blobs.iter().map(|blob| wire(tested.0.add(blob.clone())).expect("some")).collect();
        digests.push(wire(digest_of(b"gone")).expect("some"));
        for (acceptable, prefers) in [(vec![], true), (vec![0, 1], true), (vec![1, 2], false)] {
            tested.0.with(|state| state.prefers_zstd = prefers);
            let items = read(&tested, digests.clone(), acceptable.clone()).expect("valid");
            assert_eq!(items.iter().map(|item| item.digest.clone().expect("set")).collect::<Vec<_>>(), digests);
            for (item, blob) in items.iter().zip(&blobs) {
                assert_eq!(item.status, Some(rpc::Status::default()));
                let zstd = prefers && acceptable.contains(&1) && zstd_of(blob).len() <= blob.len();
                assert_eq!(item.compressor, i32::from(zstd));
                let raw = if zstd { raw_of(&item.data).expect("zstd") } else { item.data.to_vec() };
                assert!(raw == *blob, "{:?}", item.digest);
            }
            assert_eq!(items[4].status.as_ref().map(|status| status.code), Some(Code::NotFound as i32));
        }
    }

    /// Goal: no reply is too long for a client, whether through blobs, their number, or error texts; what a batch within
    /// the announced limit asks for is served as far as it fits; payload is not copied; memory is taken for all of it.
    /// Method: batches at the limits.
    #[test]
    fn batch_read_stays_below_the_limit() {
        let tested = testing::services();
        let data = Bytes::from(vec![3u8; limits::BATCH_TOTAL_SIZE_MAX]);
        let full = wire(tested.0.add(data.clone())).expect("some");
        let request = BatchReadBlobsRequest { digests: vec![full.clone()], ..Default::default() };
        let (context, mut out) = (CallContext::default(), Collected::default());
        let reply = batch_read_blobs(&tested.1, &context, request.encode_to_vec().into(), &mut out).now_or_never();
        let reply = reply.expect("ready").expect("fits");
        assert!((pieces_len(&reply)..=limits::REPLY_LEN_MAX).contains(&out.held));
        assert!(reply.iter().any(|piece| piece.as_ptr() == data.as_ptr()), "by handle");
        let one = wire(tested.0.add("1")).expect("some");
        assert_eq!(code(read(&tested, vec![full, one.clone()], vec![])), Code::InvalidArgument);
        let small = wire(tested.0.add(vec![1; 300])).expect("some");
        let third = wire(tested.0.add(vec![2; 1 << 20])).expect("some");
        let gone = WireDigest { hash: "0".repeat(64), size_bytes: 1 };
        // The number of items, of which so many are read.
        let cases = [
            (vec![small; 8000], 8000),
            (vec![one.clone(); 40_000], 40_000),
            ([vec![third; 3], vec![one; 20_000]].concat(), 3),
            (vec![gone; 40_000], 0),
        ];
        for (digests, expected) in cases {
            let items = read(&tested, digests.clone(), vec![]).expect("within the announced limit");
            let ok = items.iter().filter(|item| item.status.as_ref().is_some_and(|status| status.code == 0)).count();
            assert!(ok >= expected && items.len() == digests.len(), "{ok} of {}", digests.len());
            assert!(items.iter().zip(&digests).all(|(item, digest)| item.digest.as_ref() == Some(digest)));
        }
        let one = WireDigest { hash: "0".repeat(64), size_bytes: 0 };
        assert_eq!(code(read(&tested, vec![one; 60_000], vec![])), Code::InvalidArgument);
    }

    /// Goal: what does not fit a reply is RESOURCE_EXHAUSTED by item, and fits the next one; a malformed digest is its
    /// item's trouble. Method: more small blobs than one reply has room for, asked for until all are here.
    #[test]
    fn batch_read_answers_by_item() {
        let tested = testing::services();
        let mut digests = vec![wire(tested.0.add(vec![9; 60])).expect("some"); 30_000];
        let mut calls = 0;
        while !digests.is_empty() {
            let items = read(&tested, digests, vec![]).expect("within the announced limit");
            let status = |item: &batch_read_blobs_response::Response| item.status.clone().expect("set").code;
            assert!(items.iter().all(|item| status(item) == 0 && item.data == [9; 60][..] || status(item) == 8));
            digests = items.into_iter().filter(|item| status(item) != 0).filter_map(|item| item.digest).collect();
            calls += 1;
        }
        assert_eq!(calls, 2);
        let good = wire(tested.0.add("good")).expect("some");
        let bad = [("no", 1), ("", 0), (&"A".repeat(64)[..], 1), (&"0".repeat(64)[..], -1)];
        let bad = bad.map(|(hash, size_bytes)| WireDigest { hash: hash.into(), size_bytes });
        let items = read(&tested, [&bad[..], &[good]].concat(), vec![]).expect("the call as a whole is well");
        for (item, bad) in items.iter().zip(&bad) {
            let status = item.status.as_ref().expect("set");
            assert_eq!((status.code, item.digest.as_ref()), (Code::InvalidArgument as i32, Some(bad)));
            assert!(status.message.starts_with("digest: "), "{status:?}");
        }
        assert_eq!(items[4].data, "good");
    }

    /// Goal: damage and trouble of one item are that item's; long texts do not break the reply's limit.
    #[test]
    fn batch_read_passes_trouble_on() {
        let tested = testing::services();
        let digest = tested.0.add("here");
        let digests = vec![wire(digest).expect("some"); 2];
        let lost = StoreError::Lost { digest };
        for (error, expected) in [(lost, Code::NotFound), (StoreError::Disk("e".repeat(5000)), Code::Internal)] {
            tested.0.with(|state| state.fail_next = Some(error));
            let items = read(&tested, digests.clone(), vec![]).expect("the call as a whole is well");
            let status = items[0].status.clone().expect("set");
            assert_eq!(status.code, expected as i32);
            assert!(!status.message.is_empty() && status.message.len() <= READ_ITEM_TEXT_LEN_MAX);
            assert_eq!(items[1].data, "here");
        }
    }

    /// Goal: what is not announced is not served.
    #[test]
    fn splits_and_splices_nothing() {
        let (_, services) = testing::services();
        let context = CallContext::default();
        let split = split_blob(&services, &context, Bytes::new()).now_or_never().expect("ready");
        let splice = splice_blob(&services, &context, Bytes::new()).now_or_never().expect("ready");
        assert_eq!((code(split), code(splice)), (Code::Unimplemented, Code::Unimplemented));
    }
}
