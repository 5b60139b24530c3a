//! An S3 store in memory: `store PORT ACCESS_KEY SECRET_KEY`, on 127.0.0.1, on one thread. Says `listening` when it does.
//!
//! The s3s library checks the signature of each request, the time in it and the hash of its body; here stand the objects.
//! Conditional PUTs and ranges as AWS has them; no versions, no owners, no checksums.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use s3s::auth::SimpleAuth;
use s3s::dto::*;
use s3s::service::S3ServiceBuilder;
use s3s::{Body, S3, S3Request, S3Response, S3Result, s3_error};

#[derive(Default)]
struct Store(Mutex<State>);

#[derive(Default)]
struct State {
    buckets: HashMap<String, BTreeMap<String, Bytes>>,
    /// Multipart uploads, by id: their parts by number.
    uploads: HashMap<String, BTreeMap<i32, Bytes>>,
    next: u64,
}

impl State {
    fn bucket(&mut self, name: &str) -> S3Result<&mut BTreeMap<String, Bytes>> {
        self.buckets.get_mut(name).ok_or_else(|| s3_error!(NoSuchBucket))
    }

    fn object(&mut self, bucket: &str, key: &str) -> S3Result<Bytes> {
        self.bucket(bucket)?.get(key).cloned().ok_or_else(|| s3_error!(NoSuchKey))
    }
}

impl Store {
    fn with<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        change(&mut self.0.lock().expect("nothing panics under the lock"))
    }
}

/// All of a body. Its end fails when the bytes are not those that were signed.
async fn read(body: Option<StreamingBlob>, len: Option<i64>) -> S3Result<Bytes> {
    let Some(mut body) = body else { return Ok(Bytes::new()) };
    let mut data = BytesMut::with_capacity(usize::try_from(len.unwrap_or(0)).unwrap_or(0));
    while let Some(piece) = body.next().await {
        data.extend_from_slice(&piece.map_err(|error| s3_error!(BadDigest, "{error}"))?);
    }
    Ok(data.freeze())
}

fn etag(number: impl std::fmt::Display) -> Option<ETag> {
    Some(ETag::Strong(format!("{number}")))
}

fn len_of(data: &Bytes) -> Option<i64> {
    i64::try_from(data.len()).ok()
}

#[async_trait::async_trait]
impl S3 for Store {
    async fn create_bucket(&self, request: S3Request<CreateBucketInput>) -> S3Result<S3Response<CreateBucketOutput>> {
        self.with(|state| {
            state.buckets.entry(request.input.bucket.to_string()).or_default();
        });
        Ok(S3Response::new(CreateBucketOutput::default()))
    }

    async fn get_object(&self, request: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let GetObjectInput { bucket, key, range, .. } = request.input;
        let data = self.with(|state| state.object(&bucket, &key))?;
        let mut output = GetObjectOutput { accept_ranges: Some("bytes".into()), ..GetObjectOutput::default() };
        let part = match range {
            None => data,
            Some(range) => {
                let part = range.check(data.len() as u64)?;
                output.content_range = Some(format!("bytes {}-{}/{}", part.start, part.end - 1, data.len()));
                data.slice(part.start as usize..part.end as usize)
            }
        };
        output.content_length = len_of(&part);
        output.body = Some(StreamingBlob::from(Body::from(part)));
        Ok(S3Response::new(output))
    }

    async fn head_object(&self, request: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let data = self.with(|state| state.object(&request.input.bucket, &request.input.key))?;
        Ok(S3Response::new(HeadObjectOutput { content_length: len_of(&data), ..HeadObjectOutput::default() }))
    }

    async fn put_object(&self, request: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let PutObjectInput { bucket, key, body, content_length, if_none_match, .. } = request.input;
        let data = read(body, content_length).await?;
        self.with(|state| {
            state.next += 1;
            let tag = etag(state.next);
            let objects = state.bucket(&bucket)?;
            if if_none_match.is_some() && objects.contains_key(&key) {
                return Err(s3_error!(PreconditionFailed));
            }
            objects.insert(key, data);
            Ok(S3Response::new(PutObjectOutput { e_tag: tag, ..PutObjectOutput::default() }))
        })
    }

    async fn delete_object(&self, request: S3Request<DeleteObjectInput>) -> S3Result<S3Response<DeleteObjectOutput>> {
        self.with(|state| state.bucket(&request.input.bucket).map(|objects| objects.remove(&request.input.key)))?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let ListObjectsV2Input { bucket, prefix, max_keys, .. } = request.input;
        let (prefix, most) = (prefix.unwrap_or_default(), max_keys.unwrap_or(1000));
        let contents = self.with(|state| -> S3Result<Vec<Object>> {
            let objects = state.bucket(&bucket)?.range(prefix.clone()..);
            let listed = objects.take_while(|(key, _)| key.starts_with(&prefix)).take(most.try_into().unwrap_or(0));
            Ok(listed
                .map(|(key, data)| Object { key: Some(key.clone()), size: len_of(data), ..Object::default() })
                .collect())
        })?;
        Ok(S3Response::new(ListObjectsV2Output {
            key_count: i32::try_from(contents.len()).ok(),
            is_truncated: Some(false),
            max_keys: Some(most),
            name: Some(bucket),
            prefix: Some(prefix),
            contents: Some(contents),
            ..ListObjectsV2Output::default()
        }))
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let CreateMultipartUploadInput { bucket, key, .. } = request.input;
        let id = self.with(|state| -> S3Result<String> {
            state.bucket(&bucket)?;
            state.next += 1;
            let id = format!("upload-{}", state.next);
            state.uploads.insert(id.clone(), BTreeMap::new());
            Ok(id)
        })?;
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(bucket),
            key: Some(key),
            upload_id: Some(id),
            ..CreateMultipartUploadOutput::default()
        }))
    }

    async fn upload_part(&self, request: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
        let UploadPartInput { body, content_length, part_number, upload_id, .. } = request.input;
        let data = read(body, content_length).await?;
        let tag = etag(format!("part-{part_number}-{}", data.len()));
        self.with(|state| {
            let parts = state.uploads.get_mut(&upload_id).ok_or_else(|| s3_error!(NoSuchUpload))?;
            parts.insert(part_number, data);
            Ok(S3Response::new(UploadPartOutput { e_tag: tag, ..UploadPartOutput::default() }))
        })
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let CompleteMultipartUploadInput { bucket, key, multipart_upload, upload_id, .. } = request.input;
        let named = multipart_upload.and_then(|upload| upload.parts).unwrap_or_default();
        self.with(|state| {
            let parts = state.uploads.get(&upload_id).ok_or_else(|| s3_error!(NoSuchUpload))?;
            let mut data = BytesMut::new();
            for part in named {
                let number = part.part_number.ok_or_else(|| s3_error!(MalformedXML))?;
                let found = parts.get(&number).ok_or_else(|| s3_error!(InvalidPart))?;
                if part.e_tag != etag(format!("part-{number}-{}", found.len())) {
                    return Err(s3_error!(InvalidPart));
                }
                data.extend_from_slice(found);
            }
            state.uploads.remove(&upload_id);
            state.bucket(&bucket)?.insert(key.clone(), data.freeze());
            Ok(S3Response::new(CompleteMultipartUploadOutput {
                bucket: Some(bucket),
                key: Some(key),
                e_tag: etag(upload_id),
                ..CompleteMultipartUploadOutput::default()
            }))
        })
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let removed = self.with(|state| state.uploads.remove(&request.input.upload_id));
        removed.ok_or_else(|| s3_error!(NoSuchUpload))?;
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [port, access_key, secret_key] = &arguments[..] else {
        return Err("usage: store PORT ACCESS_KEY SECRET_KEY".into());
    };
    let mut builder = S3ServiceBuilder::new(Store::default());
    builder.set_auth(SimpleAuth::from_single(access_key.as_str(), secret_key.as_str()));
    let service = builder.build();
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port.parse::<u16>()?)).await?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        let (socket, _) = listener.accept().await?;
        // Why: else heads and bodies wait for acknowledgements.
        socket.set_nodelay(true)?;
        let service = service.clone();
        tokio::spawn(async move {
            let served = hyper::server::conn::http1::Builder::new();
            // A connection that breaks is its client's affair.
            let _ = served.serve_connection(hyper_util::rt::TokioIo::new(socket), service).await;
        });
    }
}
