//! `build.bazel.remote.execution.v2.ContentAddressableStorage`, without `GetTree` (see `tree`).

use bytes::Bytes;

use super::reply::{self, ReplyBuilder, item_status, pieces_len};
use super::{CallContext, Code, Reply, Services, Status, check_digest_function, decode, parse_digest};
use crate::limits;
use crate::pure::digest::Digest;
use crate::pure::find_missing::{self, Question};
use crate::rt;
use crate::rt::join::map_bounded;
use crate::store::{Accept, Encoding, Get, Opened, Put, PutOutcome, Store, StoreError, Upload, UploadEnd, UploadKey};
use crate::wire::reapi::{
    BatchReadBlobsRequest, BatchUpdateBlobsRequest, BatchUpdateBlobsResponse, batch_update_blobs_request,
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
        let status = match update_item(services, instance, &item).await {
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
    store_blob(services, instance, digest, encoding, item.data.clone()).await
}

/// Verifies and stores a blob that is all here.
pub(super) async fn store_blob<S: Store>(
    services: &Services<S>,
    instance: &str,
    digest: Digest,
    encoding: Encoding,
    data: Bytes,
) -> Result<PutOutcome, Status> {
    let max = services.options.max_blob_size;
    if digest.size > max {
        return Err(StoreError::BlobTooLarge { digest, max }.into());
    }
    if digest.size <= limits::SMALL_BLOB_LEN_MAX as u64 {
        return Ok(services.store.put(Put { digest, encoding, data: vec![data] }).await?);
    }
    // Why: a name that no client uses, so that two batches with the same blob do not take over each other's upload.
    let uuid = format!("batch-{:016x}", rt::random_u64()).into();
    let key = UploadKey { instance: instance.into(), uuid, digest, encoding };
    let mut upload = match services.store.open_upload(key, 0).await? {
        Opened::AlreadyPresent => return Ok(PutOutcome::AlreadyPresent),
        Opened::Ready(upload) => upload,
    };
    match upload.write(vec![data]).await {
        Ok(()) => Ok(upload.finish().await?),
        Err(UploadEnd::AlreadyPresent) => Ok(PutOutcome::AlreadyPresent),
        Err(UploadEnd::Failed(error)) => Err(error.into()),
    }
}

/// `BatchReadBlobs`. Each item succeeds or fails by itself, unless the batch as a whole is too large.
pub async fn batch_read_blobs<S: Store>(
    services: &Services<S>,
    _context: &CallContext,
    request: Bytes,
) -> Result<Reply, Status> {
    let request: BatchReadBlobsRequest = decode(request)?;
    check_digest_function(request.digest_function)?;
    check_total("digests", request.digests.iter().map(|digest| digest.size_bytes))?;
    let mut digests = Vec::with_capacity(request.digests.len());
    let mut reply_len = 0;
    for (i, digest) in request.digests.iter().enumerate() {
        let digest = parse_digest(Some(digest), &format!("digests[{i}]"))?;
        reply_len += digest.size as usize + READ_ITEM_OVERHEAD_LEN;
        digests.push(digest);
    }
    if reply_len > limits::REPLY_LEN_MAX {
        return Err(Status::invalid(format!(
            "digests: the answer for {} blobs may have {reply_len} bytes, more than {}: ask for fewer in one call",
            digests.len(),
            limits::REPLY_LEN_MAX
        )));
    }
    let zstd = request.acceptable_compressors.contains(&(compressor::Value::Zstd as i32));
    let accept = if zstd { Accept::Any } else { Accept::Identity };
    let items = map_bounded(digests, limits::BATCH_CONCURRENCY, async |digest| {
        (digest, read_item(services, digest, accept).await)
    })
    .await;
    let mut reply = ReplyBuilder::default();
    for (digest, item) in items {
        put_read_item(&mut reply, &digest, item);
    }
    debug_assert!(reply.len() <= limits::REPLY_LEN_MAX, "each item kept within its share");
    Ok(reply.finish())
}

/// What one item of BatchReadBlobsResponse takes besides the blob's raw size, at most, in bytes: headers 16, digest 80,
/// and a status or the excess of zstd over raw.
const READ_ITEM_OVERHEAD_LEN: usize = 16 + 80 + READ_ITEM_EXTRA_LEN_MAX;
/// Bytes for an item's status, or by which zstd may be longer than raw.
const READ_ITEM_EXTRA_LEN_MAX: usize = 160;

async fn read_item<S: Store>(
    services: &Services<S>,
    digest: Digest,
    accept: Accept,
) -> Result<(Vec<Bytes>, Encoding), Status> {
    for accept in [accept, Accept::Identity] {
        let blob = services.store.get(Get::whole(digest, accept)).await?;
        let blob = blob.ok_or_else(|| Status::not_found("not in the cache"))?;
        let encoding = blob.encoding();
        let pieces = blob.collect().await?;
        let (len, size) = (pieces_len(&pieces) as u64, digest.size);
        match encoding {
            Encoding::Identity if len == size => return Ok((pieces, encoding)),
            Encoding::Identity => {
                return Err(StoreError::Disk(format!("the read of {digest} ended after {len} bytes")).into());
            }
            Encoding::Zstd if len <= size + READ_ITEM_EXTRA_LEN_MAX as u64 => return Ok((pieces, encoding)),
            // Why: what is longer than the raw form could make the reply too long for its client.
            Encoding::Zstd => {}
        }
    }
    Err(Status::new(Code::Internal, "the store answered identity with zstd"))
}

/// `BatchReadBlobsResponse.responses` = 1: digest = 1, data = 2, status = 3, compressor = 4.
fn put_read_item(reply: &mut ReplyBuilder, digest: &Digest, item: Result<(Vec<Bytes>, Encoding), Status>) {
    let mut head = ReplyBuilder::default();
    head.digest(1, digest);
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
        Err(status) => {
            let mut message = status.message;
            message.truncate(message.floor_char_boundary(READ_ITEM_EXTRA_LEN_MAX - 16));
            let status = prost::Message::encode_to_vec(&item_status(status.code, message));
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
