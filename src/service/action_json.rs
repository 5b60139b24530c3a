//! ActionResults as JSON, for people and scripts: protobuf's own mapping. Source: protobuf.dev, "ProtoJSON Format".

use std::sync::OnceLock;

use bytes::Bytes;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};

use super::refusal::Refusal;
use crate::wire;
use crate::wire::reapi::ActionResult;

/// A stored ActionResult as JSON.
pub fn encode(data: &Bytes) -> Result<Vec<u8>, Refusal> {
    let message = DynamicMessage::decode(descriptor(), data.clone())
        .map_err(|error| Refusal::new(500, format!("the stored ActionResult is not readable: {error}")))?;
    serde_json::to_vec(&message)
        .map_err(|error| Refusal::new(500, format!("the ActionResult cannot be written as JSON: {error}")))
}

/// JSON as an ActionResult.
pub fn decode(json: &[u8]) -> Result<ActionResult, Refusal> {
    let bad = |error: String| Refusal::new(400, format!("the body is no ActionResult in JSON: {error}"));
    let mut reader = serde_json::Deserializer::from_slice(json);
    let message = DynamicMessage::deserialize(descriptor(), &mut reader).map_err(|error| bad(error.to_string()))?;
    reader.end().map_err(|error| bad(error.to_string()))?;
    ActionResult::decode(&message.encode_to_vec()[..]).map_err(|error| bad(error.to_string()))
}

/// Read once for the process: 20 KB, needed by few servers.
fn descriptor() -> MessageDescriptor {
    static ACTION_RESULT: OnceLock<MessageDescriptor> = OnceLock::new();
    let read = || {
        let pool = DescriptorPool::decode(wire::DESCRIPTORS).expect("the compiled-in descriptors are whole");
        let name = "build.bazel.remote.execution.v2.ActionResult";
        pool.get_message_by_name(name).expect("the descriptors have the messages that are served")
    };
    ACTION_RESULT.get_or_init(read).clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::reapi::{Digest, OutputFile};

    /// Goal: what JSON says is what protobuf says, both ways, in protobuf's spelling. Method: one result with each kind of
    /// value, and bodies that are none.
    #[test]
    fn both_ways() {
        let digest = Digest { hash: "ab".repeat(32), size_bytes: 1 << 40 };
        let file = OutputFile { path: "a/b".into(), digest: Some(digest), is_executable: true, ..Default::default() };
        let result = ActionResult {
            output_files: vec![file],
            exit_code: -3,
            stdout_raw: Bytes::from_static(b"\xff\x00hi"),
            ..Default::default()
        };
        let json = encode(&result.encode_to_vec().into()).expect("JSON");
        let text = String::from_utf8(json.clone()).expect("text");
        for part in
            ["\"outputFiles\":[", "\"sizeBytes\":\"1099511627776\"", "\"stdoutRaw\":\"/wBoaQ==\"", "\"exitCode\":-3"]
        {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(decode(&json), Ok(result));
        assert_eq!(decode(b"{\"exit_code\": 1}").map(|result| result.exit_code), Ok(1));
        for bad in [&b""[..], b"[]", b"{\"exitCode\": \"x\"}", b"{} {}", b"{\"nonsense\": 1}", b"\xff"] {
            assert_eq!(decode(bad).map_err(|refusal| refusal.code), Err(400), "{bad:?}");
        }
        let deep = ["{\"executionMetadata\":".repeat(10_000).as_bytes(), b"{}"].concat();
        assert!(decode(&deep).is_err());
    }
}
