//! Which path is answered by whom.

use std::convert::Infallible;
use std::rc::Rc;

use bytes::Bytes;
use http::header::{
    ALLOW, CONNECTION, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderName, HeaderValue,
    TRANSFER_ENCODING, X_CONTENT_TYPE_OPTIONS,
};
use http::request::Parts;
use http::{HeaderMap, Method, Request, Response, StatusCode, Version};
use hyper::body::Incoming;

use super::super::credential;
use super::super::memory::Shares;
use super::super::server::Server;
use super::super::trust::is_unplaced;
use super::body::{Body, Exchange, Hold};
use super::cache;
use super::counters::Handler;
use super::io::InRequest;
use crate::access::{Peer, Role};
use crate::budget::Rank;
use crate::pure::http_cache::Target;
use crate::pure::json::Json;
use crate::pure::scope::Scope;
use crate::rt::{self, HandlerPanicked};
use crate::service::purge::{purge_actions, purge_target, told};
use crate::service::refusal::Refusal;
use crate::store::{Purged, Store};

pub(super) const JSON: HeaderValue = HeaderValue::from_static("application/json");
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
/// Source: Prometheus, "Exposition formats", text format 0.0.4.
const PROMETHEUS: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
const HTML: HeaderValue = HeaderValue::from_static("text/html; charset=utf-8");
const PURGE: &str = "/admin/purge";
const PAGE: &str = "/";
/// The figures that the page shows.
const OVERVIEW: &str = "/overview.json";
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                           connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const NOSNIFF: (HeaderName, HeaderValue) = (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));

/// Answers one request. A panic costs that request, and its connection.
pub async fn answer<S: Store>(
    server: Rc<Server<S>>,
    peer: Peer,
    shares: Shares,
    in_request: InRequest,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    // Why boxed: it is some kilobytes, which would be moved several times.
    let made = rt::catch(Box::pin(respond(server, peer, shares, in_request, request))).await;
    Ok(made.unwrap_or_else(|HandlerPanicked| {
        let reason = "the handler failed; the server's log says why\n";
        let mut response = Response::new(Body::unaccounted(Bytes::from_static(reason.as_bytes())));
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response.headers_mut().insert(CONTENT_TYPE, TEXT);
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        response
    }))
}

async fn respond<S: Store>(
    server: Rc<Server<S>>,
    peer: Peer,
    shares: Shares,
    in_request: InRequest,
    request: Request<Incoming>,
) -> Response<Body> {
    let (head, body) = request.into_parts();
    if hyper::body::Body::is_end_stream(&body) {
        in_request.received();
    }
    let path = head.uri.path();
    let target = Target::parse(path);
    let handler = match (path, &target, &head.method) {
        ("/metrics", ..) => Handler::Metrics,
        ("/status", ..) => Handler::Status,
        (PAGE | OVERVIEW, ..) => Handler::Page,
        (_, Some(_), &Method::GET) => Handler::Get,
        (_, Some(_), &Method::HEAD) => Handler::Head,
        (_, Some(_), &Method::PUT) => Handler::Put,
        (PURGE, ..) | (_, Some(_), &Method::DELETE) => Handler::Purge,
        _ => Handler::None,
    };
    // Why not these: whoever polls every few seconds would fill the log.
    let is_polled = matches!(handler, Handler::Metrics | Handler::Status | Handler::Page);
    let logged = (server.services.options.access_log.get() && !is_polled).then(|| path.to_owned());
    let exchange =
        Exchange::new(server.counters.http.clone(), handler, head.method.clone(), logged, peer.origin, in_request);
    let is_read = head.method == Method::GET || head.method == Method::HEAD;
    let needs = match (handler, is_read) {
        (Handler::Purge, _) => Role::Admin,
        (_, true) => Role::Read,
        (_, false) => Role::Write,
    };
    if let Some(reason) = malformed(&head) {
        let mut response = cache::reject(&server, Refusal::new(400, reason), &head, body, &shares, exchange);
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        return response;
    }
    let credential = || credential(&head.headers, head.uri.authority());
    let role = match server.settings.access.decide(needs.into(), &peer, credential).made().await {
        Ok(role) => role,
        Err(denial) => return cache::deny(&server, denial, &head, body, &shares, exchange),
    };
    let mut response = match (handler, &target) {
        (Handler::Metrics | Handler::Status | Handler::Page, _) if !is_read => {
            not_allowed(&head.method, "GET, HEAD", exchange)
        }
        (Handler::Metrics, _) if !server.exporter.is_enabled() => {
            // Source: bazel-remote's text.
            text(StatusCode::NOT_FOUND, "Endpoint metrics are not enabled on this server.".to_owned(), exchange)
        }
        (Handler::Metrics, _) => figures(&server, PROMETHEUS, server.exporter.metrics().await, &head.method, exchange),
        (Handler::Status, _) => figures(&server, JSON, server.exporter.status().await, &head.method, exchange),
        (Handler::Page, _) if path == OVERVIEW => {
            figures(&server, JSON, server.exporter.overview().await, &head.method, exchange)
        }
        (Handler::Page, _) => page(&head.method, exchange),
        (Handler::Get | Handler::Head, Some(target)) => cache::get(&server, target, &head, &shares, exchange).await,
        (Handler::Put, Some(target)) => cache::put(&server, role, target, &head, body, &shares, exchange).await,
        (Handler::Purge, Some(target)) => match named_scope(&server, &head.headers) {
            Ok(scope) => {
                let of = scope.prefix().map_or_else(String::new, |prefix| format!(" below {prefix:?}"));
                let what = format!("{path}{of}, for {}", peer.origin);
                purge(&what, purge_target(&server.services, &scope, target), exchange).await
            }
            Err(refusal) => cache::reject(&server, refusal, &head, body, &shares, exchange),
        },
        (Handler::Purge, None) if head.method == Method::POST && !is_unplaced(&head.headers) => {
            let refusal =
                Refusal::new(400, "a purge of many takes those of all tenants: name no prefix, backend or bucket");
            cache::reject(&server, refusal, &head, body, &shares, exchange)
        }
        (Handler::Purge, None) if head.method == Method::POST => {
            let query = head.uri.query().unwrap_or_default();
            purge(
                &format!("action results, {query}, for {}", peer.origin),
                purge_actions(&server.services, query),
                exchange,
            )
            .await
        }
        (Handler::Purge, None) => not_allowed(&head.method, "POST", exchange),
        (_, Some(_)) => not_allowed(&head.method, "GET, HEAD, PUT, DELETE", exchange),
        (_, None) => {
            // Why not 404, also where no cache is meant: to a client with a wrong address that would be a miss.
            // Source: bazel-remote's text, up to the colon.
            let reason = format!(
                "resource name must be a SHA256 hash in hex, got '{path}': \
                 try /cas/<hash>, /ac/<hash>, /status, /metrics or /"
            );
            text(StatusCode::BAD_REQUEST, reason, exchange)
        }
    };
    if server.is_draining() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Where the blob or result belongs that a purge names.
fn named_scope<S>(server: &Server<S>, headers: &HeaderMap) -> Result<Scope, Refusal> {
    match &server.settings.trust {
        Some(trust) => trust.named(headers).map_err(Refusal::from),
        None if is_unplaced(headers) => Ok(Scope::default()),
        // Why not passed over: something else would be purged than was meant.
        None => Err(Refusal::new(400, "this server knows no tenants: see --trust_storage_prefix_header")),
    }
}

/// Why a request that hyper lets pass is none. Whoever stands between may have read another one in it.
/// Source: RFC 9112, 3.2 (Host) and 6.1 (Transfer-Encoding).
fn malformed(head: &Parts) -> Option<&'static str> {
    if head.version == Version::HTTP_11 && head.headers.get_all(HOST).iter().count() != 1 {
        return Some("Host: must be there, and once");
    }
    let mut codings = head.headers.get_all(TRANSFER_ENCODING).iter();
    let is_chunked = |coding: &HeaderValue| coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked");
    match codings.next() {
        Some(coding) if !is_chunked(coding) || codings.next().is_some() => {
            Some("Transfer-Encoding: must be chunked, and nothing besides")
        }
        _ => None,
    }
}

/// Answers when the purge is done. It ends when its client goes away; what is purged by then stays so.
async fn purge(what: &str, purge: impl Future<Output = Result<Purged, Refusal>>, exchange: Exchange) -> Response<Body> {
    let request = exchange.request();
    match told(what, purge, || request.goes_on()).await {
        Ok(Purged { examined, purged }) => {
            let answer = Json::object().raw("purged", purged).raw("examined", examined).end();
            whole(JSON, (answer + "\n").into(), &Method::GET, exchange)
        }
        Err(Refusal { code, text: reason, .. }) => {
            let code = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            text(code, reason, exchange)
        }
    }
}

/// The page for people. It loads nothing from elsewhere, and may not.
fn page(method: &Method, exchange: Exchange) -> Response<Body> {
    let mut response = whole(HTML, Bytes::from_static(include_bytes!("page.html")), method, exchange);
    response.headers_mut().insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(PAGE_POLICY));
    response
}

/// Figures, if there is memory to keep them until they have gone out. Why it does not wait: figures are of their moment.
fn figures<S>(
    server: &Server<S>,
    content_type: HeaderValue,
    figures: Option<Bytes>,
    method: &Method,
    mut exchange: Exchange,
) -> Response<Body> {
    let Some(figures) = figures else {
        let reason = "the figures could not be made; the server's log says why".to_owned();
        return text(StatusCode::INTERNAL_SERVER_ERROR, reason, exchange);
    };
    let Some(apart) = server.settings.purse.apart_for(figures.len() as u64, Rank::First) else {
        let reason = "answers that their clients do not take have all of the memory that they may".to_owned();
        return text(StatusCode::SERVICE_UNAVAILABLE, reason, exchange);
    };
    exchange.keep(Some(Hold::Apart { _apart: apart }));
    whole(content_type, figures, method, exchange)
}

fn whole(content_type: HeaderValue, text: Bytes, method: &Method, exchange: Exchange) -> Response<Body> {
    let len = text.len();
    let bytes = if method == Method::HEAD { Bytes::new() } else { text };
    let mut response = Response::new(Body::whole(bytes, StatusCode::OK, exchange));
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response.headers_mut().insert(CONTENT_LENGTH, len.into());
    response
}

/// What went wrong, for a person.
pub(super) fn text(code: StatusCode, reason: String, exchange: Exchange) -> Response<Body> {
    let bytes = Bytes::from(reason + "\n");
    let len = bytes.len();
    let bytes = if exchange.is_head() { Bytes::new() } else { bytes };
    let mut response = Response::new(Body::whole(bytes, code, exchange));
    *response.status_mut() = code;
    let (name, value) = NOSNIFF;
    response.headers_mut().insert(CONTENT_TYPE, TEXT);
    response.headers_mut().insert(CONTENT_LENGTH, len.into());
    response.headers_mut().insert(name, value);
    response
}

fn not_allowed(method: &Method, allowed: &'static str, exchange: Exchange) -> Response<Body> {
    let reason = format!("Method '{method}' not supported: use one of {allowed}.");
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, reason, exchange);
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}
