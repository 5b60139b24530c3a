//! What a burst leaves behind: every acknowledged blob as it was sent, no refused one.

use std::cell::RefCell;
use std::rc::Rc;

use tokio::task::JoinSet;

use crate::client::{self, CallError, Connection, Method, Windows};
use crate::drive::RunError;
use crate::flags::Flags;
use crate::measure::Codes;
use crate::scenario;
use crate::stamped::{Family, Stamped};
use crate::supply::Ledger;
use crate::wire::{self, ReadParser};

/// Connections, and calls in flight on each, that read back.
const CONNECTIONS: usize = 4;
const STREAMS: usize = 8;
/// Digests of each FindMissingBlobs call.
const DIGESTS_PER_CALL: usize = 1000;

/// What was found.
#[derive(Default)]
pub struct Verdict {
    /// Acknowledged blobs that came back as they were sent.
    pub intact: u64,
    /// Acknowledged blobs that did not, by code.
    pub lost: Codes,
    /// Acknowledged blobs that FindMissingBlobs misses.
    pub acknowledged_missing: u64,
    /// Refused blobs, and those of them that exist.
    pub refused: u64,
    pub refused_present: u64,
}

impl Verdict {
    pub fn fault_count(&self) -> u64 {
        let lost: u64 = self.lost.values().map(|(count, _)| count).sum();
        lost + self.acknowledged_missing + self.refused_present
    }
}

/// What the readers share.
struct Readers {
    flags: Rc<Flags>,
    family: Rc<Family>,
    left: RefCell<Vec<Stamped>>,
    verdict: RefCell<Verdict>,
}

pub async fn verify(flags: &Rc<Flags>, family: Rc<Family>, ledger: Ledger) -> Result<Verdict, RunError> {
    let windows = Windows::new(1 << 20, flags.frame);
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(Connection::open(&flags.target, windows).await.map_err(RunError::Verify)?);
    }
    let mut verdict = Verdict { refused: ledger.refused.len() as u64, ..Verdict::default() };
    for blobs in ledger.refused.chunks(DIGESTS_PER_CALL) {
        verdict.refused_present += blobs.len() as u64 - missing(flags, &connections[0], blobs).await?;
    }
    for blobs in ledger.acknowledged.chunks(DIGESTS_PER_CALL) {
        verdict.acknowledged_missing += missing(flags, &connections[0], blobs).await?;
    }
    if !flags.quiet {
        eprintln!("reading {} acknowledged blobs back", ledger.acknowledged.len());
    }
    let readers = Rc::new(Readers {
        flags: Rc::clone(flags),
        family,
        left: RefCell::new(ledger.acknowledged),
        verdict: RefCell::new(verdict),
    });
    let mut tasks = JoinSet::new();
    for _ in 0..STREAMS {
        for connection in &connections {
            tasks.spawn_local(Rc::clone(&readers).read(connection.clone()));
        }
    }
    while let Some(ended) = tasks.join_next().await {
        ended?;
    }
    // Blobs that no reader was left for, when all connections broke.
    let unread = readers.left.take().len() as u64;
    let mut verdict = readers.verdict.take();
    if unread > 0 {
        verdict.lost.insert("UNREAD", (unread, "the connections are gone".to_owned()));
    }
    Ok(verdict)
}

async fn missing(flags: &Flags, connection: &Connection, blobs: &[Stamped]) -> Result<u64, RunError> {
    let message = wire::find_missing_request(&flags.instance, blobs.iter().map(|blob| blob.digest));
    let ask = connection.unary(Method::FindMissing, [client::whole(message)]);
    let answer = match tokio::time::timeout(flags.timeout(), ask).await {
        Ok(answer) => answer.map_err(RunError::Verify)?,
        Err(_) => return Err(RunError::Verify(CallError::new("TIMEOUT", "FindMissingBlobs has no answer"))),
    };
    Ok(wire::missing_count(&answer).map_err(|error| RunError::Verify(error.into()))? as u64)
}

impl Readers {
    async fn read(self: Rc<Self>, connection: Connection) {
        loop {
            let Some(blob) = self.left.borrow_mut().pop() else { return };
            let outcome = tokio::time::timeout(self.flags.timeout(), self.read_one(&connection, &blob)).await;
            let outcome = outcome.unwrap_or_else(|_| Err(CallError::new("TIMEOUT", "a Read has no end")));
            let mut verdict = self.verdict.borrow_mut();
            match outcome {
                Ok(()) => verdict.intact += 1,
                Err(error) => {
                    verdict.lost.entry(error.code).or_insert((0, error.text)).0 += 1;
                    if error.is_fatal {
                        return;
                    }
                }
            }
        }
    }

    async fn read_one(&self, connection: &Connection, blob: &Stamped) -> Result<(), CallError> {
        let (hash, size) = (blob.digest.hex(), blob.digest.size);
        let name = format!("{}blobs/{hash}/{size}", scenario::instance_prefix(&self.flags));
        let (mut parser, mut offset, mut is_same) = (ReadParser::default(), 0, true);
        let sink = |chunk: &[u8]| {
            parser.feed(chunk, |data| {
                is_same &= self.family.matches(blob, offset, data);
                offset += data.len() as u64;
            })?;
            Ok(())
        };
        connection.call(Method::Read, [client::whole(wire::read_request(&name))], sink).await?;
        if is_same && offset == size && parser.at_end() {
            return Ok(());
        }
        Err(CallError::new("WRONG_ANSWER", format!("{name} came back as other bytes ({offset} of them)")))
    }
}
