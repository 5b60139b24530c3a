//! ActionResults: what may be stored, and which blobs a stored one needs.
//!
//! A hit is served only when every blob that it names is present, so entries are walked at each read, in place. For the
//! Trees and Directories that they name see `directory`.

use bytes::Bytes;
use prost::Message;

use crate::pure::digest::Digest;
use crate::pure::directory::WalkError;
use crate::pure::protobuf::{Fields, read_digest};
use crate::wire::reapi;

/// A field of an ActionResult that may not be stored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("action_result.{field}: {problem}")]
pub struct InvalidField {
    /// With its index, as in `output_files[3].digest`.
    pub field: String,
    pub problem: String,
}

/// Checks every field of a result that a client wants stored. Contents that came inline are not compared with digests
/// here; a file may lack its digest only if its contents are inline.
pub fn validate(result: &reapi::ActionResult) -> Result<(), InvalidField> {
    for (i, file) in result.output_files.iter().enumerate() {
        let at = |field| format!("output_files[{i}].{field}");
        check_path(&file.path, false, || at("path"))?;
        if file.digest.is_some() || file.contents.is_empty() {
            check_digest(file.digest.as_ref(), || at("digest"))?;
        }
    }
    for (i, directory) in result.output_directories.iter().enumerate() {
        let at = |field| format!("output_directories[{i}].{field}");
        check_path(&directory.path, true, || at("path"))?;
        // Why: Command.output_directory_format DIRECTORY_ONLY leaves tree_digest out.
        if directory.tree_digest.is_some() || directory.root_directory_digest.is_none() {
            check_digest(directory.tree_digest.as_ref(), || at("tree_digest"))?;
        }
        if directory.root_directory_digest.is_some() {
            check_digest(directory.root_directory_digest.as_ref(), || at("root_directory_digest"))?;
        }
    }
    #[allow(deprecated)] // Why: clients older than API 2.1 fill these.
    let lists = [
        ("output_symlinks", &result.output_symlinks),
        ("output_file_symlinks", &result.output_file_symlinks),
        ("output_directory_symlinks", &result.output_directory_symlinks),
    ];
    for (list, symlinks) in lists {
        for (i, symlink) in symlinks.iter().enumerate() {
            check_path(&symlink.path, false, || format!("{list}[{i}].path"))?;
            if symlink.target.is_empty() {
                return Err(invalid(format!("{list}[{i}].target"), "must not be empty"));
            }
        }
    }
    for (field, digest) in [("stdout_digest", &result.stdout_digest), ("stderr_digest", &result.stderr_digest)] {
        if digest.is_some() {
            check_digest(digest.as_ref(), || field.to_owned())?;
        }
    }
    Ok(())
}

fn invalid(field: String, problem: impl ToString) -> InvalidField {
    InvalidField { field, problem: problem.to_string() }
}

fn check_path(path: &str, may_be_empty: bool, field: impl Fn() -> String) -> Result<(), InvalidField> {
    if path.is_empty() && !may_be_empty {
        return Err(invalid(field(), "must not be empty"));
    }
    if path.starts_with('/') {
        return Err(invalid(field(), "must be relative to the working directory, not absolute"));
    }
    Ok(())
}

fn check_digest(digest: Option<&reapi::Digest>, field: impl Fn() -> String) -> Result<Digest, InvalidField> {
    let digest = digest.ok_or_else(|| invalid(field(), "must be set"))?;
    Digest::parse(digest.hash.as_bytes(), digest.size_bytes).map_err(|error| invalid(field(), error))
}

/// What a stored ActionResult needs to be a hit.
///
/// Contents that stand inline do not make up for an absent blob: they are sent only to clients that ask for them, and
/// the others would get a promise that nobody keeps.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Output files, stdout, stderr, Trees and root Directories: each once, sorted, without the empty blob.
    pub blobs: Vec<Digest>,
    /// Trees whose files are needed as well. Each once, sorted.
    pub trees: Vec<Digest>,
    /// Directories whose whole closure is needed. Each once, sorted.
    pub roots: Vec<Digest>,
}

impl References {
    /// Walks a serialized ActionResult (output_files = 2, output_directories = 3, stdout_digest = 6,
    /// stderr_digest = 8).
    pub fn of(action_result: &[u8]) -> Result<Self, WalkError> {
        let mut found = Self::default();
        for field in Fields::of(action_result) {
            let field = field?;
            match field.number {
                2 => {
                    let (digest, has_contents) = output_file(field.bytes()?)?;
                    match digest {
                        Some(digest) => found.blobs.push(digest),
                        None if has_contents => {}
                        None => return Err(WalkError::NoDigest),
                    }
                }
                3 => found.output_directory(field.bytes()?)?,
                6 | 8 => found.blobs.push(read_digest(field.bytes()?)?),
                _ => {}
            }
        }
        for list in [&mut found.blobs, &mut found.trees, &mut found.roots] {
            sort_distinct(list);
        }
        Ok(found)
    }

    /// OutputDirectory: tree_digest = 3, root_directory_digest = 5.
    fn output_directory(&mut self, message: &[u8]) -> Result<(), WalkError> {
        let (mut tree, mut root) = (None, None);
        for field in Fields::of(message) {
            let field = field?;
            match field.number {
                3 => tree = Some(read_digest(field.bytes()?)?),
                5 => root = Some(read_digest(field.bytes()?)?),
                _ => {}
            }
        }
        if tree.is_none() && root.is_none() {
            return Err(WalkError::NoDigest);
        }
        self.blobs.extend(tree.iter().chain(&root));
        self.trees.extend(tree);
        self.roots.extend(root);
        Ok(())
    }
}

/// OutputFile: its digest = 2, and whether it has contents = 5.
fn output_file(message: &[u8]) -> Result<(Option<Digest>, bool), WalkError> {
    let (mut digest, mut has_contents) = (None, false);
    for field in Fields::of(message) {
        let field = field?;
        match field.number {
            2 => digest = Some(read_digest(field.bytes()?)?),
            5 => has_contents = !field.bytes()?.is_empty(),
            _ => {}
        }
    }
    Ok((digest, has_contents))
}

/// Leaves each digest once, and the empty blob, which is always present, not at all.
pub fn sort_distinct(digests: &mut Vec<Digest>) {
    digests.retain(|digest| !digest.is_empty());
    digests.sort_unstable();
    digests.dedup();
}

/// Whether an answer to GetActionResult differs from the serialized ActionResult that is stored, given what the client
/// wants inline. False lets the stored bytes be sent as they are.
pub fn needs_rewrite(action_result: &[u8], stdout: bool, stderr: bool, files: bool) -> Result<bool, WalkError> {
    for field in Fields::of(action_result) {
        let field = field?;
        let differs = match field.number {
            2 => files || output_file(field.bytes()?)?.1,
            5 | 7 => !field.bytes()?.is_empty(),
            6 => stdout,
            8 => stderr,
            _ => false,
        };
        if differs {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The serialized ActionResult `sent` without inline contents, with the digests that `result` has in their place, and
/// otherwise as the client sent it, with fields that we do not know. `result` is the same message, decoded, after its
/// contents were taken out. `None` when the two do not say the same: `sent` is written in an unusual way.
pub fn without_contents(sent: &[u8], result: &reapi::ActionResult) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(sent.len());
    let mut files = result.output_files.iter();
    let (mut stdout, mut stderr) = (false, false);
    for field in Fields::of(sent) {
        let field = field.ok()?;
        match field.number {
            2 => {
                let (message, file) = (field.bytes().ok()?, files.next()?);
                match output_file(message).ok()?.1 {
                    true => put_file(&mut out, message, file)?,
                    false => out.extend_from_slice(&sent[field.range]),
                }
            }
            5 => stdout |= !field.bytes().ok()?.is_empty(),
            7 => stderr |= !field.bytes().ok()?.is_empty(),
            _ => out.extend_from_slice(&sent[field.range]),
        }
    }
    for (moved, number, digest) in [(stdout, 6, &result.stdout_digest), (stderr, 8, &result.stderr_digest)] {
        // Equal to one that the client sent beside the contents: then it stands there twice, and that is one.
        if moved {
            prost::encoding::message::encode(number, digest.as_ref()?, &mut out);
        }
    }
    let same = reapi::ActionResult::decode(&out[..]).is_ok_and(|again| again == *result)
        && References::of(&out) == References::of(&result.encode_to_vec());
    same.then_some(out)
}

/// What is to stand in a place for inline contents.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Contents {
    #[default]
    AsStored,
    Nothing,
    These(Bytes),
}

/// What is to stand in each place of a result.
#[derive(Debug, Clone, Default)]
pub struct Inlined {
    pub stdout: Contents,
    pub stderr: Contents,
    /// In the order of `output_files`.
    pub files: Vec<Contents>,
}

/// The serialized ActionResult `stored` with other inline contents, and otherwise as it stands there, with fields that we do
/// not know. `None` where it has other files than `inlined`, or groups.
pub fn with_contents(stored: &[u8], inlined: &Inlined) -> Option<Vec<u8>> {
    let places = [(5, &inlined.stdout), (7, &inlined.stderr)];
    let mut out = Vec::with_capacity(stored.len());
    let mut files = inlined.files.iter();
    for field in Fields::of(stored) {
        let field = field.ok()?;
        let contents = match field.number {
            2 => files.next()?,
            number => places.iter().find(|(place, _)| *place == number).map_or(&Contents::AsStored, |(_, it)| it),
        };
        match contents {
            Contents::AsStored => out.extend_from_slice(&stored[field.range]),
            Contents::Nothing | Contents::These(_) if field.number != 2 => {}
            Contents::Nothing | Contents::These(_) => {
                let file = field.bytes().ok()?;
                let mut message = Vec::with_capacity(file.len());
                for field in Fields::of(file) {
                    let field = field.ok()?;
                    if field.number != 5 {
                        message.extend_from_slice(&file[field.range]);
                    }
                }
                put_contents(&mut message, 5, contents);
                prost::encoding::bytes::encode(2, &message, &mut out);
            }
        }
    }
    places.iter().for_each(|(number, contents)| put_contents(&mut out, *number, contents));
    files.next().is_none().then_some(out)
}

fn put_contents(out: &mut Vec<u8>, number: u32, contents: &Contents) {
    if let Contents::These(bytes) = contents {
        prost::encoding::bytes::encode(number, bytes, out);
    }
}

/// Adds an OutputFile (field 2) without contents = 5, its digest = 2 from `file`.
fn put_file(out: &mut Vec<u8>, sent: &[u8], file: &reapi::OutputFile) -> Option<()> {
    let mut message = Vec::with_capacity(sent.len());
    for field in Fields::of(sent) {
        let field = field.ok()?;
        if field.number != 2 && field.number != 5 {
            message.extend_from_slice(&sent[field.range]);
        }
    }
    prost::encoding::message::encode(2, file.digest.as_ref()?, &mut message);
    prost::encoding::bytes::encode(2, &message, out);
    Some(())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::pure::digest::tests::{any_digest, wire};
    use crate::pure::digest::{EMPTY, Hash};

    proptest! {
        /// Goal: no input makes the walk panic. Method: random bytes.
        #[test]
        fn garbage_never_panics(garbage: Vec<u8>) {
            let _ = (References::of(&garbage), needs_rewrite(&garbage, false, false, false));
        }

        /// Goal: the walk names every digest of a result once. Method: random results, compared with what went in.
        #[test]
        fn references_are_complete(
            files in prop::collection::vec(any_digest(), 0..6),
            trees in prop::collection::vec(any_digest(), 0..3),
            roots in prop::collection::vec(any_digest(), 0..3),
            stdout in prop::option::of(any_digest()),
        ) {
            let twice = files.iter().chain(&files);
            let mut result = reapi::ActionResult {
                output_files: twice.map(|&d| reapi::OutputFile { digest: wire(d), ..Default::default() }).collect(),
                stdout_digest: stdout.and_then(wire),
                stderr_digest: wire(EMPTY),
                ..Default::default()
            };
            let tree = |&d: &Digest| reapi::OutputDirectory { tree_digest: wire(d), ..Default::default() };
            let root = |&d: &Digest| reapi::OutputDirectory { root_directory_digest: wire(d), ..Default::default() };
            result.output_directories = trees.iter().map(tree).chain(roots.iter().map(root)).collect();
            let mut expected = References { blobs: files, trees, roots };
            expected.blobs.extend(expected.trees.iter().chain(&expected.roots).chain(&stdout).copied());
            for list in [&mut expected.blobs, &mut expected.trees, &mut expected.roots] {
                sort_distinct(list);
            }
            prop_assert_eq!(References::of(&result.encode_to_vec()), Ok(expected));
        }
    }

    type Spoil = fn(&mut reapi::ActionResult);

    /// Goal: each rule for a stored result, and that the error names the field. Method: a valid result, spoilt in one
    /// place at a time.
    #[test]
    #[allow(deprecated)]
    fn validation_names_the_field() {
        let some = wire(Digest { hash: Hash([7; 32]), size: 3 });
        let bad = Some(reapi::Digest { hash: "zz".into(), size_bytes: 1 });
        let negative = some.clone().map(|d| reapi::Digest { size_bytes: -1, ..d });
        let symlink = || reapi::OutputSymlink { path: "l".into(), target: "t".into(), node_properties: None };
        let valid = reapi::ActionResult {
            output_files: vec![reapi::OutputFile { path: "a/b".into(), digest: some.clone(), ..Default::default() }],
            output_directories: vec![
                reapi::OutputDirectory { tree_digest: some.clone(), ..Default::default() },
                reapi::OutputDirectory { path: "d".into(), root_directory_digest: bad, ..Default::default() },
            ],
            output_symlinks: vec![symlink()],
            output_file_symlinks: vec![symlink()],
            output_directory_symlinks: vec![symlink()],
            stdout_digest: some.clone(),
            stderr_digest: negative,
            ..Default::default()
        };
        let mut result = valid;
        let mut next = |spoil: Spoil| {
            spoil(&mut result);
            validate(&result).expect_err("spoilt").to_string()
        };
        // Each step mends what the one before complained of.
        assert_eq!(
            next(|_| ()),
            "action_result.output_directories[1].root_directory_digest: \
             hash must be 64 lower-case hex digits (SHA-256), got 2 bytes"
        );
        let text = next(|r| r.output_directories[1].root_directory_digest = r.stdout_digest.clone());
        assert_eq!(text, "action_result.stderr_digest: size_bytes must not be negative, got -1");
        let text = next(|r| {
            r.stderr_digest = None;
            r.output_files[0].path.clear();
        });
        assert_eq!(text, "action_result.output_files[0].path: must not be empty");
        let text = next(|r| r.output_files[0].path = "/abs".into());
        assert_eq!(text, "action_result.output_files[0].path: must be relative to the working directory, not absolute");
        let text = next(|r| r.output_files[0] = reapi::OutputFile { path: "a".into(), ..Default::default() });
        assert_eq!(text, "action_result.output_files[0].digest: must be set");
        let text = next(|r| {
            r.output_files[0].contents = Bytes::from_static(b"inline");
            r.output_directories[0].path = "/".into();
        });
        assert!(text.starts_with("action_result.output_directories[0].path: must be relative"), "{text}");
        let text = next(|r| r.output_directories[0] = reapi::OutputDirectory::default());
        assert_eq!(text, "action_result.output_directories[0].tree_digest: must be set");
        let text = next(|r| {
            r.output_directories.clear();
            r.output_symlinks[0].target.clear();
        });
        assert_eq!(text, "action_result.output_symlinks[0].target: must not be empty");
        let text = next(|r| {
            r.output_symlinks.clear();
            r.output_file_symlinks[0].path.clear();
        });
        assert_eq!(text, "action_result.output_file_symlinks[0].path: must not be empty");
        let text = next(|r| {
            r.output_file_symlinks.clear();
            r.output_directory_symlinks[0].path = "/x".into();
        });
        assert!(text.starts_with("action_result.output_directory_symlinks[0].path: "), "{text}");
        result.output_directory_symlinks.clear();
        assert_eq!(validate(&result), Ok(()));
    }

    /// Goal: stored bytes are sent as they are unless a hint or something inline asks for more. Method: one example for
    /// each reason.
    #[test]
    fn rewrites_only_with_a_reason() {
        let some = wire(Digest { hash: Hash([7; 32]), size: 3 });
        let plain = reapi::ActionResult {
            output_files: vec![reapi::OutputFile { path: "a".into(), digest: some.clone(), ..Default::default() }],
            stdout_digest: some,
            ..Default::default()
        };
        let needs = |result: &reapi::ActionResult, stdout, stderr, files| {
            needs_rewrite(&result.encode_to_vec(), stdout, stderr, files).expect("valid")
        };
        assert!(!needs(&plain, false, true, false));
        assert!(needs(&plain, true, false, false));
        assert!(needs(&plain, false, false, true));
        assert!(needs(&reapi::ActionResult { stderr_raw: "x".into(), ..plain.clone() }, false, false, false));
        let mut inline = plain;
        inline.output_files[0].contents = "x".into();
        assert!(needs(&inline, false, false, false));
    }
}
