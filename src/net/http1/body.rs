//! The body of an answer, and the account of the request that ends with it.

use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::{Method, StatusCode};
use hyper::body::{Frame, SizeHint};

use super::counters::{Handler, HttpCounters, method_label};
use super::io::InRequest;
use crate::rt::{self, BusyGuard, time};

/// One request, from its head to the last byte of its answer. Dropping it counts and logs the request.
pub struct Exchange {
    counters: Rc<HttpCounters>,
    handler: Handler,
    method: Method,
    /// For the access log; `None` when that is off.
    path: Option<String>,
    code: StatusCode,
    sent: u64,
    /// The answer was not cut off.
    is_whole: bool,
    started: Instant,
    _busy: BusyGuard,
    _request: InRequest,
}

impl Exchange {
    pub fn new(
        counters: Rc<HttpCounters>,
        handler: Handler,
        method: Method,
        path: Option<String>,
        request: InRequest,
    ) -> Self {
        let inflight = counters.inflight(handler);
        inflight.set(inflight.get() + 1);
        Self {
            counters,
            handler,
            method,
            path,
            code: StatusCode::OK,
            sent: 0,
            is_whole: false,
            started: time::now(),
            _busy: rt::busy(),
            _request: request,
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let inflight = self.counters.inflight(self.handler);
        inflight.set(inflight.get() - 1);
        let time = self.started.elapsed();
        self.counters.ended(self.handler, method_label(&self.method), self.code, time, self.sent);
        let Some(path) = &self.path else { return };
        let (method, sent, ms) = (&self.method, self.sent, time.as_secs_f64() * 1e3);
        match self.is_whole {
            true => {
                let code = self.code.as_u16();
                tracing::info!(target: "access", "{method} {path} {code} in=0 out={sent} {ms:.3}ms");
            }
            false => tracing::info!(target: "access", "{method} {path} cut in=0 out={sent} {ms:.3}ms"),
        }
    }
}

/// The bytes of an answer.
pub struct Body {
    rest: Bytes,
    exchange: Exchange,
}

impl Body {
    /// All of it is here.
    pub fn whole(bytes: Bytes, code: StatusCode, mut exchange: Exchange) -> Self {
        exchange.code = code;
        exchange.is_whole = bytes.is_empty();
        Self { rest: bytes, exchange }
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let data = std::mem::take(&mut self.rest);
        self.exchange.sent += data.len() as u64;
        self.exchange.is_whole = true;
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}
