//! `build.bazel.remote.execution.v2.ActionCache`.
//!
//! Neither Action nor Command is ever looked at: moon's "action" is JSON, and the key is all that matters.

use bytes::Bytes;
use prost::Message;
use sha2::{Digest as _, Sha256};

use super::inline::{NoHit, rewrite, take_inline};
use super::{CallContext, Outgoing, Reply, ReplyMemory, Services, Status, check_digest_function, decode, parse_digest};
use crate::limits;
use crate::pure::action_result::{InvalidField, needs_rewrite, validate, without_contents};
use crate::pure::digest::Hash;
use crate::pure::protobuf::Fields;
use crate::pure::purge::InstanceTag;
use crate::rt::join::map_bounded;
use crate::store::{ActionKey, Encoding, Put, Store, StoreError};
use crate::wire::reapi::{self, ActionResult, GetActionResultRequest, UpdateActionResultRequest};

/// `GetActionResult`. A stored result whose blobs are not all here never gets to this point (see `store::complete`).
pub async fn get_action_result<S: Store>(
    services: &Services<S>,
    _context: &CallContext,
    request: Bytes,
    out: &mut impl Outgoing,
) -> Result<Reply, Status> {
    let request: GetActionResultRequest = decode(request)?;
    note_action(out, &request.instance_name, request.action_digest.as_ref());
    check_digest_function(request.digest_function)?;
    let key = action_key(services, &request.instance_name, request.action_digest.as_ref())?;
    out.hold(limits::ACTION_READ_HELD_LEN).await?;
    let check = services.options.check_actions;
    let entry = services.store.action_get_held(key, check, &mut ReplyMemory(out)).await?;
    let Some(entry) = entry else { return Err(miss()) };
    let files = !request.inline_output_files.is_empty();
    let answer = match needs_rewrite(&entry.data, request.inline_stdout, request.inline_stderr, files) {
        Ok(false) => Ok(entry.data.clone()),
        Ok(true) => rewrite(services, &request, &entry, out).await?,
        Err(_) => Err(NoHit::Unfit),
    };
    match answer {
        Ok(data) if data.len() <= limits::REPLY_LEN_MAX => return Ok(vec![data]),
        Ok(_) | Err(NoHit::Unfit) => services.store.action_drop(key, entry.version).await?,
        Err(NoHit::Lacks(missing)) => services.store.action_drop_lacking(key, entry.version, missing).await?,
    }
    Err(miss())
}

/// `UpdateActionResult`. Answers with what was stored: contents that came inline are in the CAS from then on.
pub async fn update_action_result<S: Store>(
    services: &Services<S>,
    context: &CallContext,
    request: Bytes,
    out: &mut impl Outgoing,
) -> Result<Reply, Status> {
    context.require_write()?;
    let sent = action_result_as_sent(&request);
    let request: UpdateActionResultRequest = decode(request)?;
    note_action(out, &request.instance_name, request.action_digest.as_ref());
    check_digest_function(request.digest_function)?;
    let key = action_key(services, &request.instance_name, request.action_digest.as_ref())?;
    let result = request.action_result.ok_or_else(|| Status::invalid("action_result: must be set"))?;
    let instance = InstanceTag::of(&request.instance_name);
    Ok(vec![store_result(&services.store, key, instance, result, sent).await?])
}

/// For the access log: the result as HTTP names it, `instance/ac/hash`.
fn note_action(out: &mut impl Outgoing, instance: &str, digest: Option<&reapi::Digest>) {
    let hash = digest.map_or("", |digest| &digest.hash);
    let separator = if instance.is_empty() { "" } else { "/" };
    out.note_resource(format_args!("{instance}{separator}ac/{hash}"));
}

/// Why a result was not stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreResultError {
    #[error("action_result: is no serialized ActionResult: {0}")]
    Unparsable(#[from] prost::DecodeError),
    #[error(transparent)]
    Invalid(#[from] InvalidField),
    #[error(
        "action_result: has {len} bytes without inline contents, more than {max}",
        max = limits::ACTION_RESULT_LEN_MAX
    )]
    TooLong { len: usize },
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<StoreResultError> for Status {
    fn from(error: StoreResultError) -> Self {
        match error {
            StoreResultError::Store(error) => error.into(),
            StoreResultError::Unparsable(_) | StoreResultError::Invalid(_) | StoreResultError::TooLong { .. } => {
                Self::invalid(error.to_string())
            }
        }
    }
}

/// Stores a serialized result, as `store_result`.
pub async fn store_serialized_result<S: Store>(
    store: &S,
    key: ActionKey,
    instance: InstanceTag,
    data: Bytes,
) -> Result<Bytes, StoreResultError> {
    let result = ActionResult::decode(data.clone())?;
    store_result(store, key, instance, result, Some(data)).await
}

/// Checks a result and stores it under `key`, its inline contents as blobs. `sent` is the result as it was serialized, if
/// that is known. Returns what was stored.
pub(super) async fn store_result<S: Store>(
    store: &S,
    key: ActionKey,
    instance: InstanceTag,
    mut result: ActionResult,
    sent: Option<Bytes>,
) -> Result<Bytes, StoreResultError> {
    validate(&result)?;
    let moved = take_inline(&mut result)?;
    // Why as it was sent: a newer client may have put in what this server does not know.
    let data = sent.and_then(|sent| without_contents(&sent, &result)).unwrap_or_else(|| result.encode_to_vec());
    let len = data.len();
    if len > limits::ACTION_RESULT_LEN_MAX {
        return Err(StoreResultError::TooLong { len });
    }
    let stored = map_bounded(moved, limits::BATCH_CONCURRENCY, async |(digest, data)| {
        let put = Put { digest, encoding: Encoding::Identity, data: vec![data], admitted: true };
        store.put(put).await
    })
    .await;
    for outcome in stored {
        outcome?;
    }
    let data = if data.is_empty() { Bytes::from_static(EXIT_CODE_0) } else { data.into() };
    store.action_put(key, data.clone(), instance).await?;
    Ok(data)
}

/// `action_result` = 3 of a serialized UpdateActionResultRequest. `None` unless it stands there just once.
fn action_result_as_sent(request: &Bytes) -> Option<Bytes> {
    let mut found = Fields::of(request).filter(|field| field.as_ref().is_ok_and(|field| field.number == 3));
    match (found.next(), found.next()) {
        (Some(Ok(field)), None) => field.bytes().ok().map(|bytes| request.slice_ref(bytes)),
        _ => None,
    }
}

/// The ActionResult of an action without outputs, which prost encodes in no bytes, with its `exit_code` = 4 spelt out:
/// below the services no entry is empty.
const EXIT_CODE_0: &[u8] = &[0x20, 0];

fn miss() -> Status {
    Status::not_found("the action is not in the cache, or a blob of its result is not")
}

/// The hash that an action is kept under. With mangling it is SHA-256(hex of the action's hash, instance name), as in
/// bazel-remote.
pub(super) fn mangled<S>(services: &Services<S>, instance: &str, hash: Hash) -> Hash {
    if services.options.mangle_action_keys && !instance.is_empty() {
        return Hash(Sha256::new().chain_update(hash.to_hex()).chain_update(instance).finalize().into());
    }
    hash
}

/// The key of an action.
fn action_key<S>(services: &Services<S>, instance: &str, digest: Option<&reapi::Digest>) -> Result<ActionKey, Status> {
    let digest = parse_digest(digest, "action_digest")?;
    if digest.is_empty() {
        return Err(Status::invalid("action_digest: must not be that of the empty blob"));
    }
    Ok(ActionKey { hash: mangled(services, instance, digest.hash), size: Some(digest.size) })
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::pure::digest::{Digest, EMPTY};
    use crate::service::testing::{self, Collected, wire};
    use crate::service::{Code, Options};
    use crate::store::fake::{FakeStore, digest_of};
    use crate::wire::reapi::{Directory, FileNode, OutputDirectory, OutputFile, Tree};

    type Tested = (FakeStore, Services<FakeStore>);

    const ACTION: &[u8] = b"{ \"moon\": \"an action in JSON\" }";

    fn get((_, services): &Tested, request: GetActionResultRequest) -> Result<ActionResult, Status> {
        let request = request.encode_to_vec().into();
        let (context, mut out) = (CallContext::default(), Collected::default());
        let reply = get_action_result(services, &context, request, &mut out).now_or_never().expect("ready")?;
        Ok(ActionResult::decode(&reply.concat()[..]).expect("a message"))
    }

    fn get_plain(tested: &Tested) -> Result<ActionResult, Status> {
        get(tested, GetActionResultRequest { action_digest: wire(digest_of(ACTION)), ..Default::default() })
    }

    fn update_as(
        (_, services): &Tested,
        context: &CallContext,
        request: UpdateActionResultRequest,
    ) -> Result<ActionResult, Status> {
        let request = request.encode_to_vec().into();
        let reply = update_action_result(services, context, request, &mut Collected::default())
            .now_or_never()
            .expect("ready")?;
        Ok(ActionResult::decode(&reply.concat()[..]).expect("a message"))
    }

    fn update(tested: &Tested, action_result: ActionResult) -> Result<ActionResult, Status> {
        let request = UpdateActionResultRequest {
            action_digest: wire(digest_of(ACTION)),
            action_result: Some(action_result),
            ..UpdateActionResultRequest::default()
        };
        update_as(tested, &CallContext::default(), request)
    }

    fn file(path: &str, digest: Digest) -> OutputFile {
        OutputFile { path: path.into(), digest: wire(digest), ..OutputFile::default() }
    }

    fn directory(files: &[Digest]) -> Directory {
        let node = |&digest: &Digest| FileNode { name: "f".into(), digest: wire(digest), ..FileNode::default() };
        Directory { files: files.iter().map(node).collect(), ..Directory::default() }
    }

    fn code<T: std::fmt::Debug>(result: Result<T, Status>) -> Code {
        result.expect_err("refused").code
    }

    /// Goal: what was stored is returned, byte for byte, and counts as use of its blobs. Method: store and get.
    #[test]
    fn returns_what_was_stored() {
        let tested = testing::services();
        assert_eq!(code(get_plain(&tested)), Code::NotFound);
        let here = tested.0.add("here");
        let result = ActionResult {
            output_files: vec![file("a", here), file("empty", EMPTY), file("again", here)],
            exit_code: 3,
            ..ActionResult::default()
        };
        assert_eq!(update(&tested, result.clone()), Ok(result.clone()));
        assert_eq!(get_plain(&tested), Ok(result));
        assert_eq!(tested.0.with(|state| state.asked.clone()), [[here]]);
        let empty = ActionResult::default();
        assert_eq!(update(&tested, empty.clone()), Ok(empty.clone()));
        assert_eq!(get_plain(&tested), Ok(empty));
        assert!(tested.0.with(|state| state.actions.values().all(|(_, data, _)| !data.is_empty())));
    }

    /// Goal: fields that this server does not know are kept, in the result and in a file, also where inline contents are
    /// taken out; a message written in an unusual way is stored in the usual one. Method: such fields are added by hand.
    #[test]
    fn keeps_what_it_does_not_know() {
        let tested = testing::services();
        let unknown = |number: u32, text: &str| {
            let mut out = Vec::new();
            prost::encoding::bytes::encode(number, &text.as_bytes().to_vec(), &mut out);
            out
        };
        let here = tested.0.add("here");
        let inline = OutputFile { path: "b".into(), contents: Bytes::from_static(b"inline"), ..OutputFile::default() };
        let mut sent = ActionResult { stdout_raw: Bytes::from_static(b"out"), exit_code: 4, ..ActionResult::default() }
            .encode_to_vec();
        for output in [file("a", here), inline] {
            let message = [output.encode_to_vec(), unknown(90, "of a file")].concat();
            prost::encoding::bytes::encode(2, &message, &mut sent);
        }
        sent.extend(unknown(91, "of the result"));
        let update = |sent: &[&[u8]]| {
            let digest = UpdateActionResultRequest { action_digest: wire(digest_of(ACTION)), ..Default::default() };
            let mut request = digest.encode_to_vec();
            sent.iter().for_each(|sent| prost::encoding::bytes::encode(3, &sent.to_vec(), &mut request));
            let (context, mut out) = (CallContext::default(), Collected::default());
            let reply = update_action_result(&tested.1, &context, request.into(), &mut out).now_or_never();
            reply.expect("ready").expect("stored").concat()
        };
        let stored = update(&[&sent]);
        let has = |text: &str| stored.windows(text.len()).filter(|window| *window == text.as_bytes()).count();
        assert_eq!((has("of a file"), has("of the result"), has("inline"), has("out")), (2, 1, 0, 0));
        let result = ActionResult::decode(&stored[..]).expect("a message");
        assert_eq!(result.output_files.iter().map(|file| &file.path[..]).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(result.output_files[1].digest, wire(digest_of(b"inline")));
        assert_eq!((result.stdout_digest.clone(), result.exit_code), (wire(digest_of(b"out")), 4));
        assert_eq!(get_plain(&tested), Ok(result));
        let wants = GetActionResultRequest {
            action_digest: wire(digest_of(ACTION)),
            inline_stdout: true,
            inline_output_files: vec!["b".into()],
            ..Default::default()
        };
        let (context, mut out) = (CallContext::default(), Collected::default());
        let reply = get_action_result(&tested.1, &context, wants.encode_to_vec().into(), &mut out).now_or_never();
        let inlined = reply.expect("ready").expect("a hit").concat();
        let has = |text: &str| inlined.windows(text.len()).filter(|window| *window == text.as_bytes()).count();
        assert_eq!((has("of a file"), has("of the result"), has("inline"), has("out")), (2, 1, 1, 1));
        // In two parts, which a reader has to join.
        let parts = update(&[&sent, &unknown(91, "more")]);
        assert_eq!(ActionResult::decode(&parts[..]).expect("a message").encode_to_vec(), parts);
    }

    /// Goal: an entry is a hit only while every blob that it reaches is here; it is dropped where one surely is not, and kept
    /// where a backend only does not answer; one check is one for the backend, however much it asks. Method: a result that
    /// reaches blobs in every way; each blob is taken away in turn, in both ways; Trees come whole and in pieces.
    #[test]
    fn a_hit_needs_every_blob() {
        for piece_len in [0, 7] {
            let tested = testing::services();
            let store = &tested.0;
            store.with(|state| state.piece_len = piece_len);
            let [f, out, err, t1, t2, d1, d2] = ["f", "out", "err", "t1", "t2", "d1", "d2"].map(|s| store.add(s));
            let tree = Tree { root: Some(directory(&[t1])), children: vec![directory(&[t2, EMPTY])] };
            let tree = store.add(tree.encode_to_vec());
            let below = store.add(directory(&[d2]).encode_to_vec());
            let mut root = directory(&[d1]);
            root.directories.push(reapi::DirectoryNode { name: "below".into(), digest: wire(below) });
            let root = store.add(root.encode_to_vec());
            let result = ActionResult {
                output_files: vec![file("f", f)],
                output_directories: vec![
                    OutputDirectory { tree_digest: wire(tree), ..OutputDirectory::default() },
                    OutputDirectory { root_directory_digest: wire(root), ..OutputDirectory::default() },
                ],
                stdout_digest: wire(out),
                stderr_digest: wire(err),
                ..ActionResult::default()
            };
            for gone in [f, out, err, t1, t2, d1, d2, tree, below, root] {
                update(&tested, result.clone()).expect("valid");
                assert_eq!(get_plain(&tested), Ok(result.clone()));
                let data = store.blob(gone).expect("here");
                store.remove(gone);
                store.with(|state| state.unsure.insert(gone));
                store.with(|state| (state.checks, state.asked_for) = (0, Vec::new()));
                assert_eq!(code(get_plain(&tested)), Code::NotFound, "without {gone}");
                let asked_for = store.with(|state| state.asked_for.clone());
                assert!(!asked_for.is_empty() && asked_for.iter().all(|&check| check == 1), "{asked_for:?}");
                store.add(data.clone());
                assert_eq!(get_plain(&tested), Ok(result.clone()), "kept");
                store.remove(gone);
                store.with(|state| state.unsure.clear());
                assert_eq!(code(get_plain(&tested)), Code::NotFound, "without {gone}");
                assert!(store.with(|state| state.actions.is_empty()), "dropped");
                store.add(data);
                assert_eq!(code(get_plain(&tested)), Code::NotFound, "and stays so");
            }
        }
    }

    /// Goal: what roots have in common is walked once, too many Directories are a miss, and memory is taken before a
    /// result is checked that is long or names Directories. Method: 300 roots above one chain of 100; then one root that
    /// names more than are allowed; then a long result.
    #[test]
    fn checks_are_bounded() {
        let tested = testing::services();
        let store = &tested.0;
        let above = |name: &str, below: &[Digest]| {
            let node = |(i, &digest): (usize, &Digest)| reapi::DirectoryNode {
                name: format!("{name}{i}"),
                digest: wire(digest),
            };
            Directory { directories: below.iter().enumerate().map(node).collect(), ..Directory::default() }
                .encode_to_vec()
        };
        let chain = (0..100).fold(EMPTY, |top, _| store.add(above("", &[top])));
        let root = |root| OutputDirectory { root_directory_digest: wire(root), ..OutputDirectory::default() };
        let roots = (0..300).map(|i| root(store.add(above(&format!("root {i} "), &[chain])))).collect();
        let held = |result: ActionResult| {
            update(&tested, result).expect("valid");
            let request = GetActionResultRequest { action_digest: wire(digest_of(ACTION)), ..Default::default() };
            let (context, mut out) = (CallContext::default(), Collected::default());
            let request = request.encode_to_vec().into();
            let reply = get_action_result(&tested.1, &context, request, &mut out).now_or_never().expect("ready");
            (reply.is_ok(), out.held)
        };
        store.with(|state| state.gets = 0);
        let result = ActionResult { output_directories: roots, ..ActionResult::default() };
        assert_eq!(held(result), (true, limits::ACTION_HELD_LEN));
        assert_eq!(store.with(|state| state.gets), 400);
        let absent = |i: usize| Digest { hash: Hash(std::array::from_fn(|at| (i >> (8 * (at % 4))) as u8)), size: 1 };
        let absent: Vec<_> = (0..limits::ACTION_DIRECTORIES_MAX).map(absent).collect();
        let parts: Vec<_> = absent.chunks(30_000).map(|part| store.add(above("", part))).collect();
        let result =
            ActionResult { output_directories: vec![root(store.add(above("", &parts)))], ..Default::default() };
        store.with(|state| state.gets = 0);
        assert!(!held(result).0);
        assert!(store.with(|state| state.gets) < 40, "it stops before it reads what is below");
        let path = "x".repeat(limits::ACTION_RESULT_HELD_LEN_MAX);
        let result = ActionResult { output_files: vec![file(&path, store.add("here"))], ..Default::default() };
        assert_eq!(held(result), (true, limits::ACTION_HELD_LEN));
        let result = ActionResult { output_files: vec![file("short", store.add("here"))], ..Default::default() };
        assert_eq!(held(result), (true, limits::ACTION_READ_HELD_LEN));
    }

    /// Goal: contents that stand inline in a stored entry do not make up for an absent blob, a broken Tree is a miss,
    /// and with the check off everything passes. Method: entries put under the services.
    #[test]
    fn the_check_is_strict_or_off() {
        let mut tested = testing::services();
        let inline = OutputFile { contents: "x".into(), ..file("a", digest_of(b"x")) };
        let broken = wire(tested.0.add(&b"\x0a\x05"[..]));
        let tree = OutputDirectory { tree_digest: broken, ..OutputDirectory::default() };
        let bad = [
            ActionResult { output_files: vec![inline], ..ActionResult::default() },
            ActionResult { output_directories: vec![tree], ..ActionResult::default() },
        ];
        for check in [true, false] {
            let options = Options { check_actions: check, ..Options::default() };
            tested.1 = Services::new(tested.0.clone(), options.into(), tested.1.health.clone());
            for result in &bad {
                let hash = digest_of(ACTION).hash;
                let data = result.encode_to_vec().into();
                tested.0.with(|state| state.actions.insert(hash, (None, data, 1)));
                let got = get_plain(&tested).map_err(|status| status.code);
                assert_eq!(got, if check { Err(Code::NotFound) } else { Ok(result.clone()) });
            }
            let garbage = Bytes::from_static(b"\xff\xff");
            tested.0.with(|state| state.actions.insert(digest_of(ACTION).hash, (None, garbage, 2)));
            assert_eq!(code(get_plain(&tested)), Code::NotFound);
            assert!(tested.0.with(|state| state.actions.is_empty()));
        }
    }

    /// Goal: inline contents are moved to the CAS, where both the answer and later readers find them. Method: every
    /// slot, with and without its digest.
    #[test]
    fn update_moves_inline_contents() {
        let tested = testing::services();
        let large = Bytes::from(vec![9u8; limits::SMALL_BLOB_LEN_MAX + 1]);
        let result = ActionResult {
            output_files: vec![
                OutputFile { contents: "file".into(), ..file("named", digest_of(b"file")) },
                OutputFile { path: "unnamed".into(), contents: large.clone(), ..OutputFile::default() },
            ],
            stdout_raw: "out".into(),
            stderr_raw: "err".into(),
            stderr_digest: wire(digest_of(b"err")),
            ..ActionResult::default()
        };
        let expected = ActionResult {
            output_files: vec![file("named", digest_of(b"file")), file("unnamed", digest_of(&large))],
            stdout_digest: wire(digest_of(b"out")),
            stderr_digest: wire(digest_of(b"err")),
            ..ActionResult::default()
        };
        assert_eq!(update(&tested, result), Ok(expected.clone()));
        for blob in [&b"file"[..], &large, b"out", b"err"] {
            assert_eq!(tested.0.blob(digest_of(blob)).as_deref(), Some(blob));
        }
        assert_eq!(get_plain(&tested), Ok(expected));
    }

    /// Goal: hints are honoured as far as the message allows, and only hints. Method: all combinations of hints; then
    /// blobs that do not fit.
    #[test]
    fn inlines_on_request_only() {
        let tested = testing::services();
        tested.0.with(|state| state.piece_len = 3);
        let [out, err, a, b] = ["stdout", "stderr", "file a", "file b"].map(|s| tested.0.add(s));
        let plain = ActionResult {
            output_files: vec![file("a", a), file("b", b)],
            stdout_digest: wire(out),
            stderr_digest: wire(err),
            ..ActionResult::default()
        };
        update(&tested, plain.clone()).expect("valid");
        for hints in 0..8 {
            let [stdout, stderr, files] = [1, 2, 4].map(|bit| hints & bit != 0);
            let request = GetActionResultRequest {
                action_digest: wire(digest_of(ACTION)),
                inline_stdout: stdout,
                inline_stderr: stderr,
                inline_output_files: if files { vec!["b".into(), "none".into()] } else { vec![] },
                ..GetActionResultRequest::default()
            };
            let mut expected = plain.clone();
            expected.stdout_raw = if stdout { "stdout".into() } else { Bytes::new() };
            expected.stderr_raw = if stderr { "stderr".into() } else { Bytes::new() };
            expected.output_files[1].contents = if files { "file b".into() } else { Bytes::new() };
            assert_eq!(get(&tested, request), Ok(expected));
        }
    }

    /// Goal: the answer stays below the limit, what fits is inlined, and a wanted blob that is gone makes a miss, for which the
    /// entry is dropped if that is sure. Method: two blobs of which one fits, and a small one that does; then the small one is
    /// lost unnoticed.
    #[test]
    fn inlining_has_limits() {
        let mut tested = testing::services();
        let (big, small) = (tested.0.add(vec![1u8; 3 << 20]), tested.0.add("small"));
        let result = ActionResult {
            output_files: vec![file("1", big), file("2", big), file("3", small)],
            ..ActionResult::default()
        };
        update(&tested, result).expect("valid");
        let request = || GetActionResultRequest {
            action_digest: wire(digest_of(ACTION)),
            inline_output_files: ["1", "2", "3"].map(String::from).to_vec(),
            ..GetActionResultRequest::default()
        };
        let got = get(&tested, request()).expect("a hit");
        assert!(got.encoded_len() <= limits::REPLY_LEN_MAX);
        assert_eq!(got.output_files.iter().map(|f| f.contents.len()).collect::<Vec<_>>(), [3 << 20, 0, 5]);
        let options = Options { check_actions: false, ..Options::default() };
        tested.1 = Services::new(tested.0.clone(), options.into(), tested.1.health.clone());
        tested.0.remove(small);
        for is_sure in [false, true] {
            tested.0.with(|state| state.unsure = if is_sure { Default::default() } else { [small].into() });
            assert_eq!(code(get(&tested, request())), Code::NotFound);
            assert_eq!(tested.0.with(|state| state.actions.is_empty()), is_sure);
        }
    }

    /// Goal: an entry that was stored inline elsewhere is sent as hints say: out without, in with. Method: put it under
    /// the services, its blob present.
    #[test]
    fn stored_inline_contents_follow_the_hints() {
        let tested = testing::services();
        let out = tested.0.add("stdout");
        let stored = ActionResult {
            stdout_raw: "stdout".into(),
            stdout_digest: wire(out),
            stderr_raw: "nameless".into(),
            ..ActionResult::default()
        };
        let data = Bytes::from(stored.encode_to_vec());
        tested.0.with(|state| state.actions.insert(digest_of(ACTION).hash, (None, data, 1)));
        let hinted = GetActionResultRequest {
            action_digest: wire(digest_of(ACTION)),
            inline_stdout: true,
            ..GetActionResultRequest::default()
        };
        assert_eq!(get(&tested, hinted), Ok(stored.clone()));
        // Without a digest the bytes are nowhere else, so they stay.
        assert_eq!(get_plain(&tested), Ok(ActionResult { stdout_raw: Bytes::new(), ..stored }));
    }

    /// Goal: instances share entries, or with mangling do not. Method: store under one name, ask under others; one key
    /// is compared with a value computed by `sha256sum`.
    #[test]
    fn mangles_keys_by_instance() {
        let mut tested = testing::services();
        let under = |instance: &str| GetActionResultRequest {
            instance_name: instance.into(),
            action_digest: wire(digest_of(ACTION)),
            ..GetActionResultRequest::default()
        };
        update(&tested, ActionResult::default()).expect("valid");
        assert!(get(&tested, under("any")).is_ok());
        let options = Options { mangle_action_keys: true, ..Options::default() };
        tested.1 = Services::new(tested.0.clone(), options.into(), tested.1.health.clone());
        assert!(get(&tested, under("")).is_ok());
        assert_eq!(code(get(&tested, under("any"))), Code::NotFound);
        let key = action_key(&tested.1, "main", wire(Digest { size: 7, ..EMPTY }).as_ref()).expect("valid");
        let by_hand = digest_of(format!("{}main", EMPTY.hash).as_bytes());
        assert_eq!(key, ActionKey { hash: by_hand.hash, size: Some(7) });
    }

    /// Goal: each refusal of both calls. Method: one example for each.
    #[test]
    fn refuses() {
        let tested = testing::services();
        let action_digest = wire(digest_of(ACTION));
        for digest in [None, wire(EMPTY), Some(reapi::Digest { hash: "x".into(), size_bytes: 1 })] {
            let request = GetActionResultRequest { action_digest: digest.clone(), ..Default::default() };
            assert_eq!(code(get(&tested, request)), Code::InvalidArgument);
            let request = UpdateActionResultRequest {
                action_digest: digest,
                action_result: Some(ActionResult::default()),
                ..UpdateActionResultRequest::default()
            };
            assert_eq!(code(update_as(&tested, &CallContext::default(), request)), Code::InvalidArgument);
        }
        let other =
            GetActionResultRequest { action_digest: action_digest.clone(), digest_function: 9, ..Default::default() };
        assert_eq!(code(get(&tested, other)), Code::InvalidArgument);
        let request = UpdateActionResultRequest { action_digest, ..UpdateActionResultRequest::default() };
        assert_eq!(code(update_as(&tested, &CallContext::default(), request.clone())), Code::InvalidArgument);
        let reader = CallContext { read_only: true, ..CallContext::default() };
        let request = UpdateActionResultRequest { action_result: Some(ActionResult::default()), ..request };
        assert_eq!(code(update_as(&tested, &reader, request)), Code::PermissionDenied);

        let error = update(&tested, ActionResult { output_files: vec![file("/a", EMPTY)], ..Default::default() });
        assert!(error.expect_err("absolute").message.starts_with("action_result.output_files[0].path: "));
        let lie = OutputFile { contents: "x".into(), ..file("a", digest_of(b"y")) };
        let error = update(&tested, ActionResult { output_files: vec![lie], ..Default::default() }).expect_err("a lie");
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.message.starts_with("action_result.output_files[0].contents: "), "{error}");
        let files = (0..50_000).map(|i| file(&format!("{i}"), digest_of(b"x"))).collect();
        let error = update(&tested, ActionResult { output_files: files, ..Default::default() }).expect_err("too long");
        assert!(error.code == Code::InvalidArgument && error.message.contains("more than 3145728"), "{error}");
        assert!(tested.0.with(|state| state.actions.is_empty()));

        tested.0.with(|state| state.fail_next = Some(StoreError::Busy { what: "writes", limit: 1 }));
        let inline = ActionResult { stdout_raw: "out".into(), ..ActionResult::default() };
        assert_eq!(code(update(&tested, inline)), Code::ResourceExhausted);
        assert!(tested.0.with(|state| state.actions.is_empty()), "no entry without its blobs");
        tested.0.with(|state| state.fail_next = Some(StoreError::Stopping));
        assert_eq!(code(get_plain(&tested)), Code::Unavailable);
    }
}
