//! A scripted REAPI server in memory, for the tests of the load generator.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use bytes::{BufMut, Bytes, BytesMut};
use h2::server::SendResponse;
use http::{HeaderMap, Request, Response};
use tokio::net::TcpListener;
use tokio::task::spawn_local;

use crate::wire::{Field, for_each_field, put_varint};

/// How the peer misbehaves.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub enum Mood {
    #[default]
    Good,
    /// Every call ends with RESOURCE_EXHAUSTED.
    Refuses,
    /// One bit of each ReadResponse is wrong.
    Corrupts,
    /// The connection is cut instead of an answer.
    HangsUp,
}

#[derive(Default)]
pub struct Peer {
    pub mood: Cell<Mood>,
    /// Bodies as they came, by `hash/size` with or without `zstd/` in front; ActionResults by `ac/hash`.
    pub kept: RefCell<HashMap<String, Vec<u8>>>,
    pub calls: Cell<u64>,
}

impl Peer {
    /// Serves on a port of the system's choice. Returns the address.
    pub async fn start(self: &Rc<Self>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound").to_string();
        let peer = Rc::clone(self);
        spawn_local(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let peer = Rc::clone(&peer);
                spawn_local(async move {
                    let mut builder = h2::server::Builder::new();
                    let windows = builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 24);
                    let mut connection = windows.handshake::<_, Bytes>(tcp).await.expect("handshake");
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        if peer.mood.get() == Mood::HangsUp {
                            return;
                        }
                        spawn_local(Rc::clone(&peer).answer(request, respond));
                    }
                });
            }
        });
        address
    }

    async fn answer(self: Rc<Self>, request: Request<h2::RecvStream>, mut respond: SendResponse<Bytes>) {
        self.calls.set(self.calls.get() + 1);
        let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let mut body = request.into_body();
        let mut bytes = Vec::new();
        while let Some(Ok(chunk)) = body.data().await {
            body.flow_control().release_capacity(chunk.len()).expect("no more than came");
            bytes.extend_from_slice(&chunk);
        }
        let head = Response::builder().header("content-type", "application/grpc");
        if self.mood.get() == Mood::Refuses {
            let refusal = head.header("grpc-status", "8").header("grpc-message", "no room").body(()).expect("valid");
            let _ = respond.send_response(refusal, true);
            return;
        }
        let mut stream = respond.send_response(head.body(()).expect("valid"), false).expect("open");
        for answer in self.answers(&method, &bytes) {
            let mut message = BytesMut::new();
            message.put_u8(0);
            message.put_u32(answer.len() as u32);
            message.put_slice(&answer);
            stream.send_data(message.freeze(), false).expect("open");
        }
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().expect("valid"));
        stream.send_trailers(trailers).expect("open");
    }

    fn answers(&self, method: &str, mut stream: &[u8]) -> Vec<Vec<u8>> {
        let mut messages = Vec::new();
        while let Some((head, rest)) = stream.split_first_chunk::<5>() {
            let (message, rest) = rest.split_at(u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize);
            messages.push(message);
            stream = rest;
        }
        let request = messages[0];
        match method {
            "Check" => vec![vec![8, 1]],
            "Write" => vec![self.write(&messages)],
            "Read" => {
                let name = text(bytes_field(request, 1)[0]);
                let key = name.split_once("blobs/").expect("a blob name").1;
                let mut data = self.kept.borrow()[key].clone();
                if self.mood.get() == Mood::Corrupts {
                    data[0] ^= 1;
                }
                data.chunks(1000).map(|piece| field(10, piece)).collect()
            }
            "FindMissingBlobs" => {
                let kept = self.kept.borrow();
                let missing = bytes_field(request, 2).into_iter().filter(|d| !kept.contains_key(&digest_key(d)));
                vec![missing.flat_map(|digest| field(2, digest)).collect()]
            }
            "BatchUpdateBlobs" => {
                let answers = bytes_field(request, 2).into_iter().flat_map(|item| {
                    let (digest, data) = (bytes_field(item, 1)[0], bytes_field(item, 2)[0]);
                    self.kept.borrow_mut().insert(digest_key(digest), data.to_vec());
                    field(1, &[field(1, digest), field(2, &[])].concat())
                });
                vec![answers.collect()]
            }
            "BatchReadBlobs" => {
                let kept = self.kept.borrow();
                let answers = bytes_field(request, 2).into_iter().flat_map(|digest| {
                    let data = field(2, &kept[&digest_key(digest)]);
                    field(1, &[field(1, digest), data].concat())
                });
                vec![answers.collect()]
            }
            "UpdateActionResult" => {
                let (digest, result) = (bytes_field(request, 2)[0], bytes_field(request, 3)[0]);
                self.kept.borrow_mut().insert(format!("ac/{}", digest_key(digest)), result.to_vec());
                vec![result.to_vec()]
            }
            "GetActionResult" => {
                vec![self.kept.borrow()[&format!("ac/{}", digest_key(bytes_field(request, 2)[0]))].clone()]
            }
            other => panic!("method {other}"),
        }
    }

    fn write(&self, messages: &[&[u8]]) -> Vec<u8> {
        let name = text(bytes_field(messages[0], 1)[0]);
        let key = name.split_once("blobs/").expect("a blob name").1.to_owned();
        let body: Vec<u8> = messages.iter().flat_map(|message| bytes_field(message, 10).concat()).collect();
        let committed = body.len();
        self.kept.borrow_mut().insert(key, body);
        let mut answer = BytesMut::from(&[8][..]);
        put_varint(&mut answer, committed as u64);
        answer.to_vec()
    }
}

fn digest_key(digest: &[u8]) -> String {
    let mut size = 0;
    let read = for_each_field(digest, |number, field| {
        if let (2, Field::Varint(value)) = (number, field) {
            size = value;
        }
        Ok(())
    });
    read.expect("well formed");
    format!("{}/{size}", text(bytes_field(digest, 1)[0]))
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

fn bytes_field(message: &[u8], wanted: u64) -> Vec<&[u8]> {
    let mut found = Vec::new();
    let read = for_each_field(message, |number, field| {
        if let (true, Field::Bytes(bytes)) = (number == wanted, field) {
            found.push(bytes);
        }
        Ok(())
    });
    read.expect("well formed");
    found
}

fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = BytesMut::from(&[number << 3 | 2][..]);
    put_varint(&mut out, bytes.len() as u64);
    out.put_slice(bytes);
    out.to_vec()
}
