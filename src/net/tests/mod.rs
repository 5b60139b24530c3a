//! The server against a real HTTP/2 client, over an in-memory transport and the fake store.

mod admission;
mod byte_stream;
mod calls;
mod connections;
mod counters;
mod http1;
mod memory;
mod probe;
mod slow_store;
mod unread;

use std::rc::Rc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, SendStream};
use http::{HeaderMap, Request};
use prost::Message;

use super::accept::Kind;
use super::{Server, Settings};
use crate::access::Origin;
use crate::budget::Purse;
use crate::limits;
use crate::metrics::TimeBounds;
use crate::metrics::export::Exporter;
use crate::pure::digest::Digest;
use crate::pure::grpc_frame;
use crate::rt;
use crate::rt::cores::block_on;
use crate::rt::time;
use crate::service::health::Health;
use crate::service::{Code, Options, Services};
use crate::store::Store;
use crate::wire::bytestream::{ReadRequest, WriteRequest};
use probe::Probe;
use slow_store::SlowStore;

const READ: &str = "/google.bytestream.ByteStream/Read";
const WRITE: &str = "/google.bytestream.ByteStream/Write";
const QUERY: &str = "/google.bytestream.ByteStream/QueryWriteStatus";
const BATCH_READ: &str = "/build.bazel.remote.execution.v2.ContentAddressableStorage/BatchReadBlobs";
const CHECK: &str = "/grpc.health.v1.Health/Check";
const UUID: &str = "0e4ba3ae-07b1-4b22-8d0c-6d5e3a7fd2d5";

/// A server over a store, the fake one if nothing else is said.
struct Harness<S = SlowStore> {
    store: S,
    server: Rc<Server<S>>,
}

/// One client connection.
struct Client {
    send: SendRequest<Bytes>,
}

/// One call that has been started.
struct Call {
    response: ResponseFuture,
    stream: SendStream<Bytes>,
}

/// How a call ended.
#[derive(Debug, Default)]
struct Answer {
    http: u16,
    headers: HeaderMap,
    messages: Vec<Bytes>,
    trailers: HeaderMap,
    /// The stream was reset before it ended.
    reset: Option<Reason>,
}

/// Runs `test` with a server, and then checks that nothing of it is left: no open call, no open connection.
/// Memory for everything that a test does.
fn settings() -> Settings {
    Settings {
        time_bounds: TimeBounds::default(),
        stream_window: limits::HTTP2_STREAM_WINDOW,
        max_connection_age: None,
        max_connection_age_grace: None,
        purse: Purse::alone(PEERS),
        tls: None,
        access: Rc::default(),
        trust: None,
    }
}

/// Bytes that peers may make the server of a test hold.
const PEERS: u64 = 256 << 20;

fn with_server(test: impl AsyncFnOnce(&Harness)) {
    with_options(settings(), Options::default(), test);
}

fn with_stream_window(stream_window: u32, test: impl AsyncFnOnce(&Harness)) {
    with_options(Settings { stream_window, ..settings() }, Options::default(), test);
}

fn with_options(settings: Settings, options: Options, test: impl AsyncFnOnce(&Harness)) {
    block_on(with_store(SlowStore::default(), settings, options, test));
}

async fn with_store<S: Store>(store: S, settings: Settings, options: Options, test: impl AsyncFnOnce(&Harness<S>)) {
    let services = Services::new(store.clone(), Rc::new(options), Health::new(true));
    let harness = Harness { store, server: Server::new(services, settings, Exporter::alone()) };
    let limit = Duration::from_secs(300);
    time::timeout(limit, test(&harness)).await.expect("the test is over in time");
    harness.server.drain();
    if time::timeout(Duration::from_secs(5), harness.server.drained()).await.is_err() {
        harness.server.abort();
    }
    time::timeout(limit, harness.server.drained()).await.expect("every connection ends");
    assert_eq!(harness.server.counters.calls_open.get(), 0);
    assert_eq!(harness.server.counters.connections.get(), 0);
}

impl<S: Store> Harness<S> {
    async fn connect(&self) -> Client {
        self.connect_with(&mut h2::client::Builder::new()).await
    }

    async fn connect_with(&self, builder: &mut h2::client::Builder) -> Client {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        self.server.serve(Kind::Grpc, theirs, Origin::default(), ());
        let (send, connection) = builder.handshake(ours).await.expect("the server speaks HTTP/2");
        rt::spawn(async move {
            let _ = connection.await;
        });
        Client { send }
    }

    /// Waits until `done`, turn by turn.
    async fn until(&self, what: &str, done: impl Fn() -> bool) {
        for _ in 0..10_000 {
            if done() {
                return;
            }
            time::sleep(Duration::from_millis(1)).await;
        }
        panic!("waited too long until {what}");
    }
}

impl Client {
    async fn start(&mut self, path: &str, headers: &[(&str, &str)]) -> Call {
        let mut request = Request::post(format!("http://cache{path}"));
        if !headers.iter().any(|(name, _)| *name == "content-type") {
            request = request.header("content-type", "application/grpc");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.start_request(request.body(()).unwrap()).await
    }

    async fn start_request(&mut self, request: Request<()>) -> Call {
        std::future::poll_fn(|context| self.send.poll_ready(context)).await.expect("the connection is open");
        let (response, stream) = self.send.send_request(request, false).unwrap();
        Call { response, stream }
    }

    /// A whole call: `body` in one DATA frame.
    async fn call(&mut self, path: &str, body: Bytes) -> Answer {
        self.call_with(path, &[], body).await
    }

    async fn call_with(&mut self, path: &str, headers: &[(&str, &str)], body: Bytes) -> Answer {
        let mut call = self.start(path, headers).await;
        call.send(body, true);
        call.answer().await
    }

    async fn read(&mut self, resource_name: &str, read_offset: i64, read_limit: i64) -> Answer {
        let request = ReadRequest { resource_name: resource_name.into(), read_offset, read_limit };
        self.call(READ, frame(&request)).await
    }

    /// A Write with all of `requests` sent at once.
    async fn write(&mut self, requests: &[WriteRequest]) -> Answer {
        self.call(WRITE, frames(requests)).await
    }
}

impl Call {
    /// Sends bytes, which HTTP/2 may hold until there is window.
    fn send(&mut self, body: Bytes, end: bool) {
        // A stream that the server has ended already takes nothing; its answer is what counts.
        let _ = self.stream.send_data(body, end);
    }

    async fn answer(self) -> Answer {
        let mut answer = Answer::default();
        let response = match self.response.await {
            Ok(response) => response,
            Err(error) => {
                answer.reset = error.reason();
                return answer;
            }
        };
        answer.http = response.status().as_u16();
        answer.headers = response.headers().clone();
        let mut stream = response.into_body();
        let mut body = BytesMut::new();
        while let Some(data) = stream.data().await {
            match data {
                Ok(data) => {
                    let _ = stream.flow_control().release_capacity(data.len());
                    body.extend_from_slice(&data);
                }
                Err(error) => {
                    answer.reset = error.reason();
                    break;
                }
            }
        }
        while body.len() >= grpc_frame::PREFIX_LEN {
            let prefix = body.split_to(grpc_frame::PREFIX_LEN);
            assert_eq!(prefix[0], 0, "replies are not compressed");
            let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
            answer.messages.push(body.split_to(len).freeze());
        }
        assert!(answer.reset.is_some() || body.is_empty(), "a reply ends with a whole message");
        match stream.trailers().await {
            Ok(trailers) => answer.trailers = trailers.unwrap_or_default(),
            Err(error) => answer.reset = error.reason(),
        }
        answer
    }
}

impl Answer {
    /// The number in `grpc-status`, from the trailers or, where there is no message, the headers.
    fn code(&self) -> u8 {
        let value = self.trailers.get("grpc-status").or_else(|| self.headers.get("grpc-status"));
        let value = value.unwrap_or_else(|| panic!("no status in {self:?}"));
        value.to_str().unwrap().parse().unwrap()
    }

    fn text(&self) -> &str {
        let value = self.trailers.get("grpc-message").or_else(|| self.headers.get("grpc-message"));
        value.map_or("", |value| value.to_str().unwrap())
    }

    #[track_caller]
    fn expect(&self, code: Code, text: &str) {
        assert_eq!(self.code(), code as u8, "{self:?}");
        assert!(self.text().contains(text), "{:?} does not contain {text:?}", self.text());
    }

    /// The one message of a call that ended well.
    #[track_caller]
    fn message<M: Message + Default>(&self) -> M {
        self.expect(Code::Ok, "");
        assert_eq!(self.messages.len(), 1);
        M::decode(self.messages[0].clone()).unwrap()
    }
}

/// A message with its gRPC prefix.
fn frame(message: &impl Message) -> Bytes {
    let body = message.encode_to_vec();
    [&grpc_frame::prefix(body.len())[..], &body].concat().into()
}

fn frames(messages: &[impl Message]) -> Bytes {
    messages.iter().map(frame).collect::<Vec<_>>().concat().into()
}

/// The upload of `data` in messages of at most `step` bytes, as a client should do it: the name in the first one only.
fn upload(name: &str, data: &[u8], step: usize, first_offset: i64) -> Vec<WriteRequest> {
    let mut requests = vec![WriteRequest { resource_name: name.into(), ..Default::default() }];
    let mut at = 0;
    for chunk in data.chunks(step) {
        if at > 0 {
            requests.push(WriteRequest::default());
        }
        let last = requests.last_mut().unwrap();
        last.write_offset = first_offset + at as i64;
        last.data = Bytes::copy_from_slice(chunk);
        at += chunk.len();
    }
    let last = requests.last_mut().unwrap();
    last.write_offset = last.write_offset.max(first_offset);
    last.finish_write = true;
    requests
}

fn read_name(digest: Digest) -> String {
    format!("main/blobs/{digest}")
}

fn write_name(digest: Digest) -> String {
    format!("main/uploads/{UUID}/blobs/{digest}")
}

fn zstd_write_name(digest: Digest) -> String {
    format!("main/uploads/{UUID}/compressed-blobs/zstd/{digest}")
}

/// `len` bytes that do not repeat soon.
fn bytes(len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}
