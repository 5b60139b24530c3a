//! Entries that were stored over HTTP unchecked (`--disable_http_ac_validation`). The bytes are a CAS blob, and an ActionResult
//! names it as its stdout: so they are checked, evicted and kept together like all else. Both stand in `Scope::raw`, so that
//! no other client sees either.

use bytes::Bytes;
use prost::Message;

use super::action_result::References;
use super::digest::{Digest, EMPTY};
use crate::wire::reapi::{self, ActionResult};

/// The serialized ActionResult that stands for `content`.
pub fn encode(content: Digest) -> Bytes {
    let stdout_digest = reapi::Digest { hash: content.hash.to_hex(), size_bytes: content.size as i64 };
    ActionResult { stdout_digest: Some(stdout_digest), ..ActionResult::default() }.encode_to_vec().into()
}

/// What an entry stands for. `None` when it is none.
pub fn content_of(entry: &[u8]) -> Option<Digest> {
    match References::of(entry).ok()?.blobs[..] {
        [] => Some(EMPTY),
        [content] => Some(content),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::digest::Hash;
    use super::*;

    /// Goal: what is written is read, and nothing else. Method: the empty blob, some blob; a result of two; junk.
    #[test]
    fn both_ways() {
        let some = Digest { hash: Hash([7; 32]), size: 1 << 40 };
        for content in [EMPTY, some] {
            assert_eq!(content_of(&encode(content)), Some(content));
        }
        let mut two = ActionResult::decode(encode(some)).expect("a result");
        two.stderr_digest = Some(reapi::Digest { hash: Hash([8; 32]).to_hex(), size_bytes: 5 });
        assert_eq!(content_of(&two.encode_to_vec()), None);
        assert_eq!(content_of(b"\xff"), None);
    }
}
