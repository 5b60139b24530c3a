//! A job is one call and its check.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::client::{self, CallError, Connection, Message, Method, Windows};
use crate::payload::Blob;
use crate::stamped::{Family, Stamped};
use crate::target::Target;
use crate::wire::{self, Malformed, ReadParser};

/// One call, ready to be sent.
pub enum Job {
    Write {
        messages: Vec<Message>,
        size: u64,
        sent: u64,
    },
    Read {
        blob: Rc<Blob>,
        name: String,
        decode: bool,
    },
    Call {
        kind: &'static str,
        method: Method,
        message: Bytes,
        check: Check,
        work: Work,
    },
    Push(Push),
    /// A Read that is never read.
    Stall {
        name: String,
    },
    /// A connection of its own for one Write.
    Visit {
        target: Target,
        windows: Windows,
        push: Push,
        leave: Leave,
    },
}

/// A Write whose messages are made as flow control takes them.
#[derive(Clone)]
pub struct Push {
    pub kind: &'static str,
    pub family: Rc<Family>,
    pub blob: Stamped,
    pub name: Rc<str>,
    /// How long to wait after each message.
    pub pause: Duration,
}

/// How a visitor goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    /// With a GOAWAY and a FIN, after the answer.
    Politely,
    /// With a TCP reset, after the answer.
    Reset,
    /// With a FIN, in the middle of the upload.
    MidWrite,
}

/// What a unary answer must say.
pub enum Check {
    /// So many digests are missing.
    Missing(usize),
    /// An ActionResult, not empty.
    Action,
    /// The same, to be counted.
    ActionStored(Rc<Cell<u64>>),
    /// So many items, all OK.
    Updated(usize),
    /// These blobs, in any order of items that the request had.
    Blobs(Vec<Rc<Blob>>),
}

/// What a successful job has moved.
#[derive(Clone, Copy, Default)]
pub struct Work {
    /// Payload bytes, uncompressed.
    pub bytes: u64,
    pub digests: u64,
}

impl Job {
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Write { .. } => "write",
            Self::Read { .. } => "read",
            Self::Call { kind, .. } => kind,
            Self::Push(push) => push.kind,
            Self::Stall { .. } => "stalled-read",
            Self::Visit { leave: Leave::Politely, .. } => "visit",
            Self::Visit { leave: Leave::Reset, .. } => "visit-reset",
            Self::Visit { leave: Leave::MidWrite, .. } => "visit-cut",
        }
    }

    /// What is pushed, to be tried again or looked for later.
    pub fn push(&self) -> Option<Push> {
        if let Self::Push(push) = self { Some(push.clone()) } else { None }
    }

    /// Bytes that the job holds in memory, roughly.
    pub fn held_bytes(&self) -> u64 {
        match self {
            Self::Write { messages, sent, .. } => sent + 64 * messages.len() as u64 + 256,
            Self::Read { .. } => 256,
            Self::Call { message, .. } => message.len() as u64 + 128,
            Self::Push(_) | Self::Stall { .. } | Self::Visit { .. } => 512,
        }
    }

    /// Makes the call. `moved` is set whenever a push or a stalled read gets anything done.
    pub async fn run(self, connection: &Connection, moved: &Cell<Option<Instant>>) -> Result<Work, CallError> {
        match self {
            Self::Write { messages, size, sent } => {
                let answer = connection.unary(Method::Write, messages).await?;
                check_committed(&answer, size, sent)
            }
            Self::Read { blob, name, decode } => read(connection, &blob, &name, decode).await,
            Self::Call { method, message, check, work, .. } => {
                let answer = connection.unary(method, [client::whole(message)]).await?;
                check.verify(&answer)?;
                Ok(work)
            }
            Self::Push(push) => push.run(connection, moved).await,
            Self::Stall { name } => {
                connection.stall(client::whole(wire::read_request(&name)), moved).await?;
                Ok(Work::default())
            }
            Self::Visit { target, windows, push, leave } => {
                let connection = Connection::open(&target, windows).await?;
                if leave == Leave::MidWrite {
                    // The first message leaves at once, and there is time for the server to take it.
                    let early = tokio::time::timeout(MID_WRITE, push.run(&connection, moved)).await;
                    return early.unwrap_or(Ok(Work::default()));
                }
                let work = push.run(&connection, moved).await?;
                if leave == Leave::Reset {
                    connection.reset()?;
                }
                Ok(work)
            }
        }
    }
}

/// How long a visitor stays who goes in the middle of an upload.
const MID_WRITE: Duration = Duration::from_millis(100);

impl Push {
    async fn run(&self, connection: &Connection, moved: &Cell<Option<Instant>>) -> Result<Work, CallError> {
        let sent = Cell::new(0);
        let messages = self.family.messages(&self.blob, &self.name, &sent);
        let answer = connection.push(messages, self.pause, moved).await?;
        check_committed(&answer, self.blob.digest.size, sent.get())
    }
}

/// Each of the three is right for a compressed upload in some client's eyes: the size, the bytes sent, -1.
fn check_committed(answer: &[u8], size: u64, sent: u64) -> Result<Work, CallError> {
    let committed = wire::committed_size(answer)?;
    if committed != size as i64 && (size == sent || (committed != sent as i64 && committed != -1)) {
        return Err(CallError::new("WRONG_ANSWER", format!("committed_size {committed} of {size}")));
    }
    Ok(Work { bytes: size, digests: 0 })
}

async fn read(connection: &Connection, blob: &Blob, name: &str, decode: bool) -> Result<Work, CallError> {
    let mut parser = ReadParser::default();
    let mut gathered = Vec::new();
    let (mut len, mut is_same) = (0, true);
    let sink = |chunk: &[u8]| {
        parser.feed(chunk, |data| {
            if blob.zstd.is_none() {
                is_same &= blob.data.get(len..len + data.len()) == Some(data);
            } else if decode {
                gathered.extend_from_slice(data);
            }
            len += data.len();
        })?;
        Ok(())
    };
    connection.call(Method::Read, [client::whole(wire::read_request(name))], sink).await?;
    let is_whole = parser.at_end() && if blob.zstd.is_none() { len == blob.data.len() } else { len > 0 };
    if decode {
        is_same = unpack(&gathered, blob.data.len()).as_deref() == Some(&blob.data[..]);
    }
    if !is_same || !is_whole {
        return Err(CallError::new("WRONG_ANSWER", format!("{name} came back as other bytes ({len} of them)")));
    }
    Ok(Work { bytes: blob.digest.size, digests: 0 })
}

/// Decodes a zstd stream of known content size.
fn unpack(data: &[u8], len: usize) -> Option<Vec<u8>> {
    let mut out = vec![0; len];
    (zstd_safe::decompress(&mut out[..], data).ok()? == len).then_some(out)
}

impl From<Malformed> for CallError {
    fn from(error: Malformed) -> Self {
        Self::new("WRONG_ANSWER", error.0)
    }
}

impl Check {
    fn verify(&self, answer: &[u8]) -> Result<(), CallError> {
        let (got, wanted) = match self {
            Self::Missing(wanted) => (wire::missing_count(answer)?, *wanted),
            Self::Action => (usize::from(!answer.is_empty()), 1),
            Self::ActionStored(count) => {
                count.set(count.get() + 1);
                (usize::from(!answer.is_empty()), 1)
            }
            Self::Updated(wanted) => {
                let mut fine = 0;
                wire::for_each_item(answer, false, |item| fine += usize::from(item.code == 0))?;
                (fine, *wanted)
            }
            Self::Blobs(blobs) => {
                let (mut fine, mut rest) = (0, blobs.iter());
                wire::for_each_item(answer, true, |item| {
                    let Some(blob) = rest.next() else { return };
                    let is_same = if item.compressor == 0 {
                        item.data == blob.data
                    } else {
                        unpack(item.data, blob.data.len()).as_deref() == Some(&blob.data[..])
                    };
                    fine += usize::from(item.code == 0 && is_same);
                })?;
                (fine, blobs.len())
            }
        };
        if got == wanted {
            return Ok(());
        }
        Err(CallError::new("WRONG_ANSWER", format!("{got} items as they should be, not {wanted}")))
    }
}
