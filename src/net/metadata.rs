//! `RequestMetadata`: who calls. Decoded only for the few calls that need it.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use http::header::{HeaderMap, HeaderName, USER_AGENT};
use prost::Message as _;

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

/// The tool that calls; empty when the header is absent or malformed.
pub fn tool(headers: &HeaderMap) -> Tool {
    let Some(value) = NAMES.iter().find_map(|name| headers.get(name)) else { return Tool::default() };
    let details = BASE64
        .decode(value.as_bytes())
        .ok()
        .and_then(|bytes| RequestMetadata::decode(&bytes[..]).ok())
        .and_then(|metadata| metadata.tool_details)
        .unwrap_or_default();
    Tool { name: details.tool_name.to_ascii_lowercase(), version: details.tool_version }
}

/// The `user-agent` header; empty when it is absent or not text.
pub fn user_agent(headers: &HeaderMap) -> String {
    headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok()).unwrap_or_default().to_owned()
}

/// Who calls.
pub fn context(headers: &HeaderMap) -> CallContext {
    let Tool { name: tool_name, version: tool_version } = tool(headers);
    CallContext { tool_name, tool_version, user_agent: user_agent(headers), ..CallContext::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
    use http::HeaderValue;

    /// Goal: both names and both paddings are read, and garbage is no tool. Method: one header for each case.
    #[test]
    fn reads_the_tool() {
        let details = ToolDetails { tool_name: "Bazel".into(), tool_version: "5.0.0".into() };
        let bytes = RequestMetadata { tool_details: Some(details) }.encode_to_vec();
        let expected = Tool { name: "bazel".into(), version: "5.0.0".into() };
        for name in NAMES {
            for value in [STANDARD.encode(&bytes), STANDARD_NO_PAD.encode(&bytes)] {
                let headers = HeaderMap::from_iter([(name.clone(), HeaderValue::try_from(value).unwrap())]);
                assert_eq!(tool(&headers), expected);
            }
        }
        for garbage in ["", "!!!", "AAAA", "Cg=="] {
            let headers = HeaderMap::from_iter([(NAMES[0].clone(), HeaderValue::from_static(garbage))]);
            assert_eq!(tool(&headers), Tool::default(), "{garbage}");
        }
        assert_eq!(tool(&HeaderMap::new()), Tool::default());
    }
}
