//! `RequestMetadata`: who calls. Decoded only for the few calls that need it.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use http::header::{HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use prost::Message as _;

use crate::limits;
use crate::service::CallContext;
use crate::service::byte_stream::Tool;

/// gRPC's base64: padded or not. Source: PROTOCOL-HTTP2.md, "Binary-Header".
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

const NAMES: [HeaderName; 2] = [
    HeaderName::from_static("build.bazel.remote.execution.v2.requestmetadata-bin"),
    // Pants sends the name of the API's first draft.
    HeaderName::from_static("google.devtools.remoteexecution.v1test.requestmetadata-bin"),
];

/// The part of `build.bazel.remote.execution.v2.RequestMetadata` that we look at.
#[derive(Clone, PartialEq, prost::Message)]
struct RequestMetadata {
    #[prost(message, optional, tag = "1")]
    tool_details: Option<ToolDetails>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ToolDetails {
    #[prost(string, tag = "1")]
    tool_name: String,
    #[prost(string, tag = "2")]
    tool_version: String,
}

/// What is kept of a call's headers to say later who calls. Copies, because a header shares memory with all that came
/// along with it.
pub struct Caller {
    metadata: Metadata,
    user_agent: Option<Box<[u8]>>,
}

/// Why not always decoded: few calls ask.
enum Metadata {
    /// As it stands in the header.
    Short(Box<[u8]>),
    Decoded(Tool),
}

impl Caller {
    pub fn of(headers: &HeaderMap) -> Self {
        let metadata = match value_of(headers) {
            Some(value) if value.len() <= limits::CALLER_METADATA_LEN_MAX => Metadata::Short(value.into()),
            Some(value) => Metadata::Decoded(decode(value)),
            None => Metadata::Decoded(Tool::default()),
        };
        Self { metadata, user_agent: headers.get(USER_AGENT).map(|agent| start_of(agent.as_bytes()).into()) }
    }

    /// The tool; empty when the header is absent or malformed.
    pub fn tool(&self) -> Tool {
        match &self.metadata {
            Metadata::Short(value) => decode(value),
            Metadata::Decoded(tool) => tool.clone(),
        }
    }

    /// The start of the `user-agent` header; empty when it is absent or not text.
    pub fn user_agent(&self) -> String {
        self.user_agent.as_deref().and_then(|agent| str::from_utf8(agent).ok()).unwrap_or_default().to_owned()
    }
}

fn value_of(headers: &HeaderMap) -> Option<&[u8]> {
    NAMES.iter().find_map(|name| headers.get(name)).map(HeaderValue::as_bytes)
}

fn decode(value: &[u8]) -> Tool {
    let details = BASE64
        .decode(value)
        .ok()
        .and_then(|bytes| RequestMetadata::decode(&bytes[..]).ok())
        .and_then(|metadata| metadata.tool_details)
        .unwrap_or_default();
    let short = |text: &str| String::from_utf8_lossy(start_of(text.as_bytes())).into_owned();
    Tool { name: short(&details.tool_name).to_ascii_lowercase(), version: short(&details.tool_version) }
}

/// As much of a name as is kept.
fn start_of(name: &[u8]) -> &[u8] {
    &name[..name.len().min(limits::CALLER_NAME_LEN_MAX)]
}

/// Who calls.
pub fn context(headers: &HeaderMap) -> CallContext {
    let caller = Caller::of(headers);
    let Tool { name: tool_name, version: tool_version } = caller.tool();
    CallContext { tool_name, tool_version, user_agent: caller.user_agent(), ..CallContext::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};

    /// Goal: both names and both paddings are read, and garbage is no tool. Method: one header for each case.
    #[test]
    fn reads_the_tool() {
        let details = ToolDetails { tool_name: "Bazel".into(), tool_version: "5.0.0".into() };
        let bytes = RequestMetadata { tool_details: Some(details) }.encode_to_vec();
        let expected = Tool { name: "bazel".into(), version: "5.0.0".into() };
        for name in NAMES {
            for value in [STANDARD.encode(&bytes), STANDARD_NO_PAD.encode(&bytes)] {
                let headers = HeaderMap::from_iter([(name.clone(), HeaderValue::try_from(value).unwrap())]);
                assert_eq!(Caller::of(&headers).tool(), expected);
            }
        }
        for garbage in ["", "!!!", "AAAA", "Cg=="] {
            let headers = HeaderMap::from_iter([(NAMES[0].clone(), HeaderValue::from_static(garbage))]);
            assert_eq!(Caller::of(&headers).tool(), Tool::default(), "{garbage}");
        }
        assert_eq!(Caller::of(&HeaderMap::new()).tool(), Tool::default());
    }

    /// Goal: however long the headers are, little is kept of them, and the tool is still known. Method: metadata that is
    /// longer than what is kept as it stands, with a short and a long name, and a long agent.
    #[test]
    fn keeps_little_of_long_headers() {
        for name in ["BuildStream".to_owned(), "x".repeat(20_000)] {
            let details = ToolDetails { tool_name: name.clone(), tool_version: "v".repeat(9000) };
            let bytes = RequestMetadata { tool_details: Some(details) }.encode_to_vec();
            let metadata = HeaderValue::try_from(STANDARD.encode(bytes)).expect("ASCII");
            let agent = HeaderValue::try_from("grpc-c++/".to_owned() + &"a".repeat(9000)).expect("ASCII");
            let caller = Caller::of(&HeaderMap::from_iter([(NAMES[0].clone(), metadata), (USER_AGENT, agent)]));
            let tool = caller.tool();
            assert!(
                tool.name.len() <= limits::CALLER_NAME_LEN_MAX && name.to_ascii_lowercase().starts_with(&tool.name)
            );
            assert_eq!(tool.version.len(), limits::CALLER_NAME_LEN_MAX);
            assert!(caller.user_agent().starts_with("grpc-c++/"));
            assert_eq!(caller.user_agent().len(), limits::CALLER_NAME_LEN_MAX);
            assert!(matches!(caller.metadata, Metadata::Decoded(_)));
        }
    }
}
