//! Objects that are too large for one PUT.

use super::*;

/// The largest part of an object that is uploaded in parts, in bytes, and how many parts there may be.
///
/// Source: AWS "Amazon S3 multipart upload limits".
const PART_LEN_MAX: u64 = 256 << 20;
const PARTS_MAX: u64 = 10_000;

impl Client {
    /// Makes an object that is too large for one PUT, in parts. `total` bounds all of it but the removal of its parts, which
    /// follows whenever it fails.
    pub(super) async fn put_parts(
        &self,
        key: &str,
        source: &dyn Source,
        condition: Condition,
        total: Duration,
    ) -> Result<PutOutcome, S3Error> {
        let mut deadline = rt::time::sleep(total);
        let timeout = || S3Error::Timeout { what: "end of the upload", after: total };
        let id = match rt::time::race(Box::pin(self.begin_parts(key, condition)), &mut deadline).await {
            rt::time::Either::Left(begun) => begun?,
            rt::time::Either::Right(()) => return Err(timeout()),
        };
        let Some(id) = id else { return Ok(PutOutcome::AlreadyExists) };
        let put = match rt::time::race(Box::pin(self.put_all_parts(key, source, &id)), &mut deadline).await {
            rt::time::Either::Left(put) => put,
            rt::time::Either::Right(()) => Err(timeout()),
        };
        if put.is_err() {
            let mut call = Call::new(Operation::Read, Method::DELETE, key);
            call.query.push(("uploadId", &id));
            // Why not more: what this leaves behind, the bucket's lifecycle rule removes.
            let _ = within(HEAD_TIME, "answer", self.call(&call, &OutBody::empty)).await;
        }
        put.map(|()| PutOutcome::Created)
    }

    /// The id of a new upload; `None` when the object is there already.
    async fn begin_parts(&self, key: &str, condition: Condition) -> Result<Option<String>, S3Error> {
        if condition == Condition::IfAbsent && self.head(key, HEAD_TIME).await?.is_some() {
            return Ok(None);
        }
        let mut call = Call { schedule: Schedule::Patient, ..Call::new(Operation::Write, Method::POST, key) };
        call.query.push(("uploads", ""));
        let begun = self.document(&call, &OutBody::empty).await?;
        let id = s3_message::parse_upload_id(&begun).filter(|id| id.len() <= UPLOAD_ID_LEN_MAX);
        id.map(Some).ok_or_else(|| unexpected("no UploadId in the answer", 200))
    }

    async fn put_all_parts(&self, key: &str, source: &dyn Source, id: &str) -> Result<(), S3Error> {
        let part_len = self.0.settings.multipart_from.min(PART_LEN_MAX);
        let part_len = part_len.max(source.len().div_ceil(PARTS_MAX).next_multiple_of(1 << 20));
        let mut etags = Vec::new();
        for offset in (0..source.len()).step_by(part_len as usize) {
            let number = (etags.len() + 1).to_string();
            let mut call = Call::new(Operation::Write, Method::PUT, key);
            call.query = vec![("partNumber", &number), ("uploadId", id)];
            let body = || source.open(offset, part_len.min(source.len() - offset));
            (call.schedule, call.payload) = (Schedule::Patient, self.payload_of(body()).await?);
            call.try_time = try_time(part_len);
            let Answer::Ok(mut response) = self.call(&call, &body).await? else {
                return Err(refused("a part was refused", 0));
            };
            let etag = response.header("etag").filter(|etag| etag.len() <= ETAG_LEN_MAX);
            etags.push(etag.ok_or_else(|| unexpected("a part has no ETag", 200))?.to_owned());
            finish(&mut response.body).await;
        }
        let document = Bytes::from(s3_message::complete_multipart(&etags));
        let mut call = Call::new(Operation::Write, Method::POST, key);
        // Why as long as for all of it: some stores copy the parts before they answer.
        (call.schedule, call.try_time) = (Schedule::Patient, try_time(source.len()));
        call.query.push(("uploadId", id));
        call.payload = Payload::Known(sigv4::sha256(&document));
        let answer = self.document(&call, &|| OutBody::Pieces([document.clone()].into())).await?;
        match s3_message::judge_completed(&answer) {
            Verdict::Ok => Ok(()),
            _ => {
                let ErrorBody { code, message, .. } = s3_message::parse_error(&answer);
                Err(S3Error::Server { status: 200, code, message })
            }
        }
    }
}
