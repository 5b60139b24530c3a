//! Which path is answered by whom.

use std::convert::Infallible;
use std::rc::Rc;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;

use super::super::server::Server;
use super::body::{Body, Exchange};
use super::counters::Handler;
use super::io::InRequest;
use crate::store::Store;

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
/// Source: Prometheus, "Exposition formats", text format 0.0.4.
const PROMETHEUS: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
const NOSNIFF: (HeaderName, HeaderValue) = (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
const GET_OR_HEAD: HeaderValue = HeaderValue::from_static("GET, HEAD");

/// Answers one request. Its body, if it has one, is dropped unread: hyper then closes the connection behind the answer.
pub async fn answer<S: Store>(
    server: Rc<Server<S>>,
    in_request: InRequest,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let (head, _body) = request.into_parts();
    let path = head.uri.path();
    let handler = match path {
        "/metrics" => Handler::Metrics,
        "/status" => Handler::Status,
        _ => Handler::None,
    };
    // Why only these: whoever polls every few seconds would fill the log.
    let is_logged = server.services.options.access_log && handler == Handler::None;
    let logged = is_logged.then(|| path.to_owned());
    let exchange = Exchange::new(server.counters.http.clone(), handler, head.method.clone(), logged, in_request);
    let answer = match (handler, &head.method) {
        (Handler::None, _) => {
            Answer::text(StatusCode::NOT_FOUND, format!("There is nothing at {path} here: try /status or /metrics."))
        }
        (_, method) if method != Method::GET && method != Method::HEAD => {
            let text = format!("Method '{method}' not supported for {path}: use GET or HEAD.");
            Answer::text(StatusCode::METHOD_NOT_ALLOWED, text)
        }
        (Handler::Metrics, _) if !server.exporter.is_enabled() => {
            // Source: bazel-remote's text.
            Answer::text(StatusCode::NOT_FOUND, "Endpoint metrics are not enabled on this server.".to_owned())
        }
        (Handler::Metrics, _) => Answer::ok(PROMETHEUS, server.exporter.metrics().await),
        (Handler::Status, _) => Answer::ok(JSON, server.exporter.status().await),
    };
    Ok(answer.into_response(&head.method, exchange))
}

/// An answer that is here as a whole.
struct Answer {
    code: StatusCode,
    content_type: HeaderValue,
    bytes: Bytes,
}

impl Answer {
    fn ok(content_type: HeaderValue, text: String) -> Self {
        Self { code: StatusCode::OK, content_type, bytes: text.into() }
    }

    /// For a person who reads what went wrong.
    fn text(code: StatusCode, text: String) -> Self {
        Self { code, content_type: TEXT, bytes: (text + "\n").into() }
    }

    fn into_response(self, method: &Method, exchange: Exchange) -> Response<Body> {
        let Self { code, content_type, bytes } = self;
        let len = bytes.len();
        let bytes = if method == Method::HEAD { Bytes::new() } else { bytes };
        let mut response = Response::new(Body::whole(bytes, code, exchange));
        *response.status_mut() = code;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, content_type);
        headers.insert(CONTENT_LENGTH, len.into());
        if !code.is_success() {
            let (name, value) = NOSNIFF;
            headers.insert(name, value);
        }
        if code == StatusCode::METHOD_NOT_ALLOWED {
            headers.insert(ALLOW, GET_OR_HEAD);
        }
        response
    }
}
