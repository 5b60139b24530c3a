//! Inline contents of action results: taken out of what clients store, put into what they ask for.

use std::collections::HashSet;

use bytes::Bytes;
use prost::Message;
use sha2::{Digest as _, Sha256};

use super::{Outgoing, ReplyMemory, Services, Status};
use crate::limits;
use crate::pure::action_result::{Contents, Inlined, InvalidField, with_contents};
use crate::pure::digest::{Digest, Hash};
use crate::rt::join::map_bounded;
use crate::store::{ActionEntry, Store, bring, read_raw};
use crate::wire::reapi::{self, ActionResult, GetActionResultRequest};

/// A place for inline contents in an ActionResult.
#[derive(Debug, Clone, Copy)]
enum Slot {
    Stdout,
    Stderr,
    File(usize),
}

/// Every slot of a result.
fn slots(result: &ActionResult) -> impl Iterator<Item = Slot> + use<> {
    [Slot::Stdout, Slot::Stderr].into_iter().chain((0..result.output_files.len()).map(Slot::File))
}

/// A slot's contents and digest.
fn slot(result: &mut ActionResult, slot: Slot) -> (&mut Bytes, &mut Option<reapi::Digest>) {
    match slot {
        Slot::Stdout => (&mut result.stdout_raw, &mut result.stdout_digest),
        Slot::Stderr => (&mut result.stderr_raw, &mut result.stderr_digest),
        Slot::File(i) => {
            let file = &mut result.output_files[i];
            (&mut file.contents, &mut file.digest)
        }
    }
}

/// Takes inline contents out of a result that was validated, and leaves their digests.
pub(super) fn take_inline(result: &mut ActionResult) -> Result<Vec<(Digest, Bytes)>, InvalidField> {
    let mut taken = Vec::new();
    for at in slots(result) {
        let (contents, named) = slot(result, at);
        if contents.is_empty() {
            continue;
        }
        let data = std::mem::take(contents);
        let digest = Digest { hash: Hash(Sha256::digest(&data).into()), size: data.len() as u64 };
        let actual = reapi::Digest { hash: digest.hash.to_hex(), size_bytes: data.len() as i64 };
        if named.as_ref().is_some_and(|named| *named != actual) {
            let field = match at {
                Slot::Stdout => "stdout_raw".to_owned(),
                Slot::Stderr => "stderr_raw".to_owned(),
                Slot::File(i) => format!("output_files[{i}].contents"),
            };
            return Err(InvalidField { field, problem: "is not what the digest beside it says".into() });
        }
        *named = Some(actual);
        taken.push((digest, data));
    }
    Ok(taken)
}

/// An entry turns out to be no hit.
pub(super) enum NoHit {
    /// It is not to be read.
    Unfit,
    /// This blob is not to be had.
    Lacks(Digest),
}

/// The answer with what the client wants inline, as far as it fits, and nothing else inline.
pub(super) async fn rewrite<S: Store>(
    services: &Services<S>,
    request: &GetActionResultRequest,
    entry: &ActionEntry,
    out: &mut impl Outgoing,
) -> Result<Result<Bytes, NoHit>, Status> {
    let Ok(mut result) = ActionResult::decode(entry.data.clone()) else { return Ok(Err(NoHit::Unfit)) };
    let files: HashSet<&str> = request.inline_output_files.iter().map(String::as_str).collect();
    let mut inlined = Inlined { files: vec![Contents::AsStored; result.output_files.len()], ..Inlined::default() };
    let mut wanted = Vec::new();
    for at in slots(&result) {
        let wants = match at {
            Slot::Stdout => request.inline_stdout,
            Slot::Stderr => request.inline_stderr,
            Slot::File(i) => files.contains(result.output_files[i].path.as_str()),
        };
        let (contents, named) = slot(&mut result, at);
        let Some(named) = named else { continue };
        let Ok(digest) = Digest::parse(named.hash.as_bytes(), named.size_bytes) else {
            return Ok(Err(NoHit::Unfit));
        };
        if wants && contents.is_empty() && !digest.is_empty() {
            wanted.push((at, digest));
        }
        // Why: not asked for, and present as a blob (unless nobody checked).
        if !wants && !contents.is_empty() && services.options.check_actions {
            *place(&mut inlined, at) = Contents::Nothing;
        }
    }
    let mut room = limits::REPLY_LEN_MAX.saturating_sub(entry.data.len()) as u64;
    wanted.retain(|(_, digest)| {
        match digest.size.checked_add(INLINE_HEADER_LEN).and_then(|len| room.checked_sub(len)) {
            Some(left) => {
                room = left;
                true
            }
            None => false,
        }
    });
    let mut comes = Vec::new();
    if !wanted.is_empty() {
        let digests = wanted.iter().map(|(_, digest)| *digest).collect();
        let held = limits::ACTION_READ_HELD_LEN.max(entry.data.len());
        comes = bring(&services.store, digests, &mut ReplyMemory(out), 2 * entry.data.len(), held).await?;
        out.hold(limits::REPLY_LEN_MAX - room as usize).await?;
    }
    let wanted = wanted.into_iter().zip(comes).collect();
    let read = map_bounded(wanted, limits::BATCH_CONCURRENCY, async |((at, digest), comes)| {
        (at, digest, read_raw(&services.store, digest, comes).await)
    })
    .await;
    for (at, digest, pieces) in read {
        // Why: inlining is a hint, and trouble with one blob no reason to fail the call; its absence is a miss.
        let Ok(pieces) = pieces else { continue };
        let Some(pieces) = pieces else { return Ok(Err(NoHit::Lacks(digest))) };
        *place(&mut inlined, at) = Contents::These(join(pieces));
    }
    Ok(with_contents(&entry.data, &inlined).map(Bytes::from).ok_or(NoHit::Unfit))
}

/// What is to stand in a slot.
fn place(inlined: &mut Inlined, slot: Slot) -> &mut Contents {
    match slot {
        Slot::Stdout => &mut inlined.stdout,
        Slot::Stderr => &mut inlined.stderr,
        Slot::File(i) => &mut inlined.files[i],
    }
}

/// What inline contents add to a message besides themselves, at most, in bytes: their own header, and a longer length
/// of the OutputFile around them.
const INLINE_HEADER_LEN: u64 = 16;

/// One piece out of many; a single one is not copied.
fn join(mut pieces: Vec<Bytes>) -> Bytes {
    match pieces.len() {
        1 => pieces.remove(0),
        _ => pieces.concat().into(),
    }
}
