//! `grpc.health.v1.Health`. Source: github.com/grpc/grpc, doc/health-checking.md.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::{CallContext, Outgoing, Reply, SERVICES, Services, Status, decode, reply};
use crate::rt::local::{Event, Local};
use crate::store::Store;
use crate::wire::health::health_check_response::ServingStatus;
use crate::wire::health::{HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse};

/// Whether this core serves. Clones share the value; changes wake every `Watch` of this core.
#[derive(Clone)]
pub struct Health {
    serving: Local<bool>,
    changed: Event,
}

impl Health {
    pub fn new(serving: bool) -> Self {
        Self { serving: Local::new(serving), changed: Event::default() }
    }

    /// Sets the answer from now on.
    pub fn set(&self, serving: bool) {
        self.serving.with(|now| *now = serving);
        self.changed.notify();
    }

    /// The answer now.
    pub fn is_serving(&self) -> bool {
        self.serving.with(|now| *now)
    }

    fn status(&self) -> ServingStatus {
        if self.is_serving() { ServingStatus::Serving } else { ServingStatus::NotServing }
    }
}

/// Asked for by Kubernetes probes that were written for bazel-remote, where this odd name is the one registered.
const PROBE_NAME: &str = "/grpc.health.v1.Health/Check";

fn is_known(service: &str) -> bool {
    service.is_empty() || service == PROBE_NAME || SERVICES.contains(&service)
}

fn message(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status as i32 }
}

/// `Check`. All services stand and fall together.
pub async fn check<S: Store>(services: &Services<S>, _context: &CallContext, request: Bytes) -> Result<Reply, Status> {
    let HealthCheckRequest { service } = decode(request)?;
    if !is_known(&service) {
        return Err(Status::not_found("service: there is no service of that name here"));
    }
    Ok(reply::encode(&message(services.health.status())))
}

/// `List`.
pub async fn list<S: Store>(services: &Services<S>, _context: &CallContext, request: Bytes) -> Result<Reply, Status> {
    let HealthListRequest {} = decode(request)?;
    let status = message(services.health.status());
    let names = SERVICES.iter().copied().chain([""]);
    let statuses: BTreeMap<_, _> = names.map(|name| (name.to_owned(), status)).collect();
    Ok(reply::encode(&HealthListResponse { statuses }))
}

/// `Watch`, server-streaming: never ends by itself; it ends when `out` says so or when it is dropped.
pub async fn watch<S: Store>(
    services: &Services<S>,
    _context: &CallContext,
    request: Bytes,
    out: &mut impl Outgoing,
) -> Result<(), Status> {
    let HealthCheckRequest { service } = decode(request)?;
    if !is_known(&service) {
        // Why: the service might come, says the protocol; here none does.
        out.send(reply::encode(&message(ServingStatus::ServiceUnknown))).await?;
        return std::future::pending().await;
    }
    let mut sent = None;
    loop {
        // Why: waiting starts before looking, so that no change falls between.
        let changed = services.health.changed.wait();
        let status = services.health.status();
        if sent != Some(status) {
            out.send(reply::encode(&message(status))).await?;
            sent = Some(status);
        }
        changed.await;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use prost::Message;

    use super::*;
    use crate::service::testing::{self, Collected};
    use crate::service::{Code, SERVICES};

    fn request(service: &str) -> Bytes {
        HealthCheckRequest { service: service.into() }.encode_to_vec().into()
    }

    /// Goal: the server as a whole, each service and nothing else have a state. Method: Check on each name, before and
    /// after a change.
    #[test]
    fn checks_known_names_only() {
        let (_, services) = testing::services();
        let context = CallContext::default();
        for (serving, expected) in [(true, ServingStatus::Serving), (false, ServingStatus::NotServing)] {
            services.health.set(serving);
            for name in SERVICES.iter().chain(&["", PROBE_NAME]) {
                let reply = check(&services, &context, request(name)).now_or_never().expect("ready").expect("known");
                assert_eq!(HealthCheckResponse::decode(&reply.concat()[..]), Ok(message(expected)), "{name}");
            }
        }
        let error = check(&services, &context, request("none")).now_or_never().expect("ready");
        assert_eq!(error.map_err(|status| status.code), Err(Code::NotFound));
        let reply = list(&services, &context, Bytes::new()).now_or_never().expect("ready").expect("served");
        let list = HealthListResponse::decode(&reply.concat()[..]).expect("a message");
        assert_eq!(list.statuses.len(), SERVICES.len() + 1);
        let malformed =
            super::list(&services, &context, Bytes::from_static(b"\x0a\x05")).now_or_never().expect("ready");
        assert_eq!(malformed.map_err(|status| status.code), Err(Code::InvalidArgument));
    }

    /// Goal: a watcher sees the state at once, then changes only, and goes on for ever. Method: poll by hand, with
    /// changes between polls.
    #[test]
    fn watch_sends_changes() {
        let (_, services) = testing::services();
        let context = CallContext::default();
        let mut out = Collected::default();
        {
            let mut running = std::pin::pin!(watch(&services, &context, request(""), &mut out));
            assert!(running.as_mut().now_or_never().is_none());
            for serving in [true, false, false, true] {
                services.health.set(serving);
                assert!(running.as_mut().now_or_never().is_none());
            }
        }
        use ServingStatus::{NotServing, Serving};
        assert_eq!(out.decode::<HealthCheckResponse>(), [Serving, NotServing, Serving].map(message));
    }

    /// Goal: an unknown service is watched without an end, and a client that has gone ends its watch.
    #[test]
    fn watch_of_unknown_and_of_nobody() {
        let (_, services) = testing::services();
        let context = CallContext::default();
        let mut out = Collected::default();
        assert!(watch(&services, &context, request("none"), &mut out).now_or_never().is_none());
        assert_eq!(out.decode::<HealthCheckResponse>(), [message(ServingStatus::ServiceUnknown)]);
        let mut gone = Collected { room: 0, ..Collected::default() };
        let ended = watch(&services, &context, request(""), &mut gone).now_or_never().expect("ended");
        assert_eq!(ended.map_err(|status| status.code), Err(Code::Cancelled));
    }
}
