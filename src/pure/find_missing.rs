//! `FindMissingBlobsRequest`, read in place: a client asks for up to 14,000 digests at once, and most are present.
//!
//! The response lists the absent ones in a field of the same number and type as the request's, so that it is cut out of
//! the request.

use std::ops::Range;

use crate::pure::digest::Digest;
use crate::pure::protobuf::{DigestFieldError, Fields, Malformed, read_digest};

/// The request, ready to be asked and answered.
///
/// Source: `build.bazel.remote.execution.v2.FindMissingBlobsRequest` (instance_name = 1, blob_digests = 2,
/// digest_function = 3) and `FindMissingBlobsResponse` (missing_blob_digests = 2).
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// In the order of the request, duplicates included.
    pub digests: Vec<Digest>,
    /// Where each one's whole field (`0x12 len digest`) stands in the request.
    pub fields: Vec<Range<u32>>,
    /// As sent; 0 when absent.
    pub digest_function: i32,
}

/// Why the request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QuestionError {
    #[error("the request {0}")]
    Malformed(#[from] Malformed),
    #[error("blob_digests[{index}]: {error}")]
    Digest { index: usize, error: DigestFieldError },
}

/// A digest of ordinary size with its field header, in bytes: to reserve memory.
const DIGEST_FIELD_LEN: usize = 70;

impl Question {
    /// Reads a request of at most 4 GiB.
    pub fn parse(request: &[u8]) -> Result<Self, QuestionError> {
        assert!(u32::try_from(request.len()).is_ok(), "a gRPC message is shorter than 4 GiB");
        let likely = request.len() / DIGEST_FIELD_LEN;
        let mut question =
            Self { digests: Vec::with_capacity(likely), fields: Vec::with_capacity(likely), digest_function: 0 };
        for field in Fields::of(request) {
            let field = field?;
            match field.number {
                2 => {
                    let index = question.digests.len();
                    let digest = read_digest(field.bytes()?).map_err(|error| QuestionError::Digest { index, error })?;
                    question.digests.push(digest);
                    question.fields.push(field.range.start as u32..field.range.end as u32);
                }
                3 => question.digest_function = field.varint()? as i32,
                _ => {}
            }
        }
        Ok(question)
    }
}

/// The stretches of the request that make up the response: neighbours that are missing are one stretch.
pub fn answer(fields: &[Range<u32>], missing: &[bool]) -> Vec<Range<usize>> {
    assert_eq!(fields.len(), missing.len(), "one answer for each digest");
    let mut stretches: Vec<Range<usize>> = Vec::new();
    for (field, _) in fields.iter().zip(missing).filter(|&(_, &missing)| missing) {
        match stretches.last_mut() {
            Some(last) if last.end == field.start as usize => last.end = field.end as usize,
            _ => stretches.push(field.start as usize..field.end as usize),
        }
    }
    stretches
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::pure::digest::Hash;
    use crate::wire::reapi;

    fn request(hashes: &[[u8; 32]], instance: &str, digest_function: i32) -> Vec<u8> {
        let blob_digests =
            hashes.iter().map(|&h| reapi::Digest { hash: Hash(h).to_hex(), size_bytes: 1 + i64::from(h[0]) }).collect();
        reapi::FindMissingBlobsRequest { instance_name: instance.into(), blob_digests, digest_function }.encode_to_vec()
    }

    proptest! {
        /// Goal: the response is what prost would have made. Method: random requests and answers, compared as messages.
        #[test]
        fn answers_like_prost(
            asked in prop::collection::vec((any::<[u8; 32]>(), any::<bool>()), 0..40),
            instance in "[a-z]{0,5}",
            digest_function in 0..2,
        ) {
            let hashes: Vec<_> = asked.iter().map(|&(hash, _)| hash).collect();
            let missing: Vec<_> = asked.iter().map(|&(_, missing)| missing).collect();
            let message = request(&hashes, &instance, digest_function);
            let question = Question::parse(&message).expect("a valid request");
            prop_assert_eq!(question.digest_function, digest_function);
            prop_assert_eq!(question.digests.iter().map(|d| d.hash.0).collect::<Vec<_>>(), hashes);
            let stretches = answer(&question.fields, &missing);
            let reply: Vec<u8> = stretches.into_iter().flat_map(|range| message[range].to_vec()).collect();
            let reply = reapi::FindMissingBlobsResponse::decode(&reply[..]).expect("a valid response");
            let expected: Vec<_> =
                question.digests.iter().zip(&missing).filter(|&(_, &m)| m).map(|(d, _)| d.hash.to_hex()).collect();
            prop_assert_eq!(reply.missing_blob_digests.into_iter().map(|d| d.hash).collect::<Vec<_>>(), expected);
        }

        /// Goal: no input makes the scanner panic. Method: random bytes, and valid requests with one byte changed.
        #[test]
        fn garbage_never_panics(garbage: Vec<u8>, hashes: Vec<[u8; 32]>, at: prop::sample::Index, to: u8) {
            let _ = Question::parse(&garbage);
            let mut message = request(&hashes, "i", 1);
            let at = at.index(message.len());
            message[at] = to;
            let _ = Question::parse(&message);
        }
    }

    /// Goal: errors name the digest; unknown fields are passed over. Method: one example for each.
    #[test]
    fn names_the_bad_digest() {
        let mut message = request(&[[7; 32], [8; 32]], "", 0);
        message.extend([0x7a, 1, 0]); // Field 15, which does not exist.
        assert_eq!(Question::parse(&message).map(|q| q.digests.len()), Ok(2));
        message.extend([0x12, 3, 0x0a, 1, b'f']);
        let error = Question::parse(&message).expect_err("a short hash").to_string();
        assert_eq!(error, "blob_digests[2]: hash must be 64 lower-case hex digits (SHA-256), got 1 bytes");
        let error = Question::parse(&[0x12, 9]).expect_err("a cut field").to_string();
        assert_eq!(error, "the request ends inside a field");
    }
}
