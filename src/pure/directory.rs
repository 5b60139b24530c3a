//! Trees and Directories, read piece by piece: what they name, in memory that does not grow with them.

use bytes::Bytes;

use crate::limits;
use crate::pure::digest::Digest;
use crate::pure::protobuf::{DigestFieldError, Fields, Malformed, read_digest, read_varint, split_tag};

/// Which message a `DirectoryScanner` reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// root = 1, children = 2: each a Directory.
    Tree,
    /// files = 1, directories = 2: each a node with digest = 2.
    Directory,
}

/// What a Directory names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Node {
    File(Digest),
    Directory(Digest),
}

/// Why a stored ActionResult, Tree or Directory cannot be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WalkError {
    #[error("the message {0}")]
    Malformed(#[from] Malformed),
    #[error("{0}")]
    Digest(#[from] DigestFieldError),
    #[error("an output file or directory has no digest")]
    NoDigest,
    #[error("a node of {len} bytes is longer than {max}", max = limits::TREE_NODE_LEN_MAX)]
    NodeTooLong { len: u64 },
}

/// Reads a Tree or a Directory that comes in pieces, and hands out the digests in it. Holds one node at most.
pub struct DirectoryScanner {
    shape: Shape,
    /// Bytes that are left of the Directory inside a Tree; 0 between them. Not used for `Shape::Directory`.
    inside: u64,
    /// Bytes of a field without interest that are still to come.
    skip: u64,
    /// The start of a field that has not come whole.
    held: Vec<u8>,
}

/// What stands at the start of the bytes.
enum Step {
    /// More bytes are needed to say.
    Wait,
    /// Bytes to take off; the next ones are a Directory of this length.
    Enter { taken: usize, inside: u64 },
    /// Bytes to take off, and bytes to skip after them.
    Pass { taken: usize, skip: u64 },
    /// Bytes to take off: a whole node, which names this.
    Node { taken: usize, node: Node },
}

impl DirectoryScanner {
    pub fn new(shape: Shape) -> Self {
        Self { shape, inside: 0, skip: 0, held: Vec::new() }
    }

    /// Takes the next piece and calls `found` for each digest that has come whole.
    pub fn push(&mut self, piece: &[u8], mut found: impl FnMut(Node)) -> Result<(), WalkError> {
        let mut piece = piece;
        // Why: a field that is split between pieces is rare; it grows by as little as completes it.
        while !self.held.is_empty() && !piece.is_empty() {
            let held = std::mem::take(&mut self.held);
            let more = piece.len().min(FIELD_HEADER_LEN_MAX.max(missing(&held)));
            let joined = [&held, &piece[..more]].concat();
            let used = self.consume(&joined, &mut found)?;
            if used >= held.len() {
                piece = &piece[used - held.len()..];
            } else {
                // Invariant: nothing of `held` alone was usable, so nothing was used at all.
                debug_assert_eq!(used, 0, "a field held back was taken apart");
                self.held = joined;
                piece = &piece[more..];
            }
        }
        if !piece.is_empty() {
            let used = self.consume(piece, &mut found)?;
            self.held.extend_from_slice(&piece[used..]);
        }
        Ok(())
    }

    /// Says whether the message ended where a message may end.
    pub fn finish(self) -> Result<(), WalkError> {
        if self.held.is_empty() && self.skip == 0 && self.inside == 0 {
            return Ok(());
        }
        Err(Malformed::Truncated.into())
    }

    /// Works off whole fields at the start of `bytes`, and says how many bytes they took.
    fn consume(&mut self, bytes: &[u8], found: &mut impl FnMut(Node)) -> Result<usize, WalkError> {
        let mut at = 0;
        loop {
            let skipped = self.skip.min((bytes.len() - at) as u64);
            self.skip -= skipped;
            at += skipped as usize;
            if at == bytes.len() {
                return Ok(at);
            }
            let taken = match self.step(&bytes[at..])? {
                Step::Wait => return Ok(at),
                Step::Enter { taken, inside } => {
                    self.inside = inside;
                    at += taken;
                    continue;
                }
                Step::Pass { taken, skip } => {
                    self.skip = skip;
                    at += taken;
                    skip.saturating_add(taken as u64)
                }
                Step::Node { taken, node } => {
                    found(node);
                    at += taken;
                    taken as u64
                }
            };
            if self.inside > 0 {
                // Why: a field that runs beyond its Directory would make the next one start in its middle.
                self.inside = self.inside.checked_sub(taken).ok_or(Malformed::Truncated)?;
            }
        }
    }

    fn step(&self, bytes: &[u8]) -> Result<Step, WalkError> {
        let Some((tag, tag_len)) = read_varint(bytes)? else { return Ok(Step::Wait) };
        let (number, wire_type) = split_tag(tag)?;
        let rest = &bytes[tag_len..];
        match wire_type {
            2 => self.step_bytes(number, rest, tag_len),
            0 | 1 | 5 if number <= 2 => Err(Malformed::FieldType(number).into()),
            0 => match read_varint(rest)? {
                Some((_, len)) => Ok(Step::Pass { taken: tag_len + len, skip: 0 }),
                None => Ok(Step::Wait),
            },
            1 => Ok(Step::Pass { taken: tag_len, skip: 8 }),
            5 => Ok(Step::Pass { taken: tag_len, skip: 4 }),
            other => Err(Malformed::WireType(other).into()),
        }
    }

    fn step_bytes(&self, number: u32, rest: &[u8], tag_len: usize) -> Result<Step, WalkError> {
        let Some((len, len_len)) = read_varint(rest)? else { return Ok(Step::Wait) };
        let taken = tag_len + len_len;
        if number > 2 {
            return Ok(Step::Pass { taken, skip: len });
        }
        if self.shape == Shape::Tree && self.inside == 0 {
            return Ok(Step::Enter { taken, inside: len });
        }
        // Why: a Tree carries its directories itself; only their files are blobs.
        if self.shape == Shape::Tree && number == 2 {
            return Ok(Step::Pass { taken, skip: len });
        }
        if len > limits::TREE_NODE_LEN_MAX as u64 {
            return Err(WalkError::NodeTooLong { len });
        }
        let len = len as usize;
        let Some(node) = rest[len_len..].get(..len) else { return Ok(Step::Wait) };
        let digest = node_digest(node)?;
        let node = if number == 1 { Node::File(digest) } else { Node::Directory(digest) };
        Ok(Step::Node { taken: taken + len, node })
    }
}

/// Longest tag and length of a field, in bytes.
const FIELD_HEADER_LEN_MAX: usize = 20;

/// How many bytes the field at the start of `held` lacks, when its header is there.
fn missing(held: &[u8]) -> usize {
    let Ok(Some((_, tag_len))) = read_varint(held) else { return 0 };
    let Ok(Some((len, len_len))) = read_varint(&held[tag_len..]) else { return 0 };
    (tag_len + len_len + len.min(limits::TREE_NODE_LEN_MAX as u64) as usize).saturating_sub(held.len())
}

/// FileNode and DirectoryNode: digest = 2.
fn node_digest(node: &[u8]) -> Result<Digest, WalkError> {
    let mut digest = None;
    for field in Fields::of(node) {
        let field = field?;
        if field.number == 2 {
            digest = Some(read_digest(field.bytes()?)?);
        }
    }
    digest.ok_or(WalkError::NoDigest)
}

/// Scans a message that is all here.
pub fn scan_pieces(shape: Shape, pieces: &[Bytes], mut found: impl FnMut(Node)) -> Result<(), WalkError> {
    let mut scanner = DirectoryScanner::new(shape);
    for piece in pieces {
        scanner.push(piece, &mut found)?;
    }
    scanner.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::pure::digest::tests::{any_digest, wire};
    use crate::wire::reapi;

    prop_compose! {
        fn any_directory()(
            files in prop::collection::vec((".{0,20}", any_digest(), any::<bool>()), 0..5),
            directories in prop::collection::vec((".{0,20}", any_digest()), 0..4),
            target in prop::option::of(".{0,300}"),
        ) -> reapi::Directory {
            reapi::Directory {
                files: files
                    .into_iter()
                    .map(|(name, digest, is_executable)| reapi::FileNode {
                        name, digest: wire(digest), is_executable, node_properties: None,
                    })
                    .collect(),
                directories: directories
                    .into_iter()
                    .map(|(name, digest)| reapi::DirectoryNode { name, digest: wire(digest) })
                    .collect(),
                symlinks: target
                    .map(|target| reapi::SymlinkNode { name: "s".into(), target, node_properties: None })
                    .into_iter()
                    .collect(),
                node_properties: None,
            }
        }
    }

    fn digests<'a>(nodes: impl Iterator<Item = &'a Option<reapi::Digest>>) -> Vec<Digest> {
        let parse = |d: &reapi::Digest| Digest::parse(d.hash.as_bytes(), d.size_bytes).expect("made valid");
        nodes.map(|digest| parse(digest.as_ref().expect("made set"))).collect()
    }

    fn scan(shape: Shape, pieces: &[Bytes]) -> Result<Vec<Node>, WalkError> {
        let mut nodes = Vec::new();
        scan_pieces(shape, pieces, |node| nodes.push(node)).map(|()| nodes)
    }

    proptest! {
        /// Goal: a Tree's files are those that prost sees, wherever the pieces are cut. Method: random Trees, cut in
        /// pieces of one random length, down to single bytes.
        #[test]
        fn tree_files_are_found_in_any_pieces(
            root in any_directory(),
            children in prop::collection::vec(any_directory(), 0..5),
            piece_len in 1usize..400,
        ) {
            let tree = reapi::Tree { root: Some(root), children };
            let all = tree.root.iter().chain(&tree.children);
            let expected = digests(all.flat_map(|directory| &directory.files).map(|file| &file.digest));
            let expected: Vec<_> = expected.into_iter().map(Node::File).collect();
            let bytes = tree.encode_to_vec();
            let pieces: Vec<_> = bytes.chunks(piece_len).map(Bytes::copy_from_slice).collect();
            prop_assert_eq!(scan(Shape::Tree, &pieces), Ok(expected));
        }

        /// Goal: the same for one Directory, where both kinds of node count.
        #[test]
        fn directory_nodes_are_found_in_any_pieces(directory in any_directory(), piece_len in 1usize..400) {
            let files = digests(directory.files.iter().map(|file| &file.digest)).into_iter().map(Node::File);
            let below = digests(directory.directories.iter().map(|node| &node.digest)).into_iter().map(Node::Directory);
            let bytes = directory.encode_to_vec();
            let pieces: Vec<_> = bytes.chunks(piece_len).map(Bytes::copy_from_slice).collect();
            prop_assert_eq!(scan(Shape::Directory, &pieces), Ok(files.chain(below).collect()));
        }

        /// Goal: neither a panic nor more than one node in memory, and the pieces do not change the verdict. Method:
        /// random bytes, and valid Trees with one byte changed, whole and byte by byte.
        #[test]
        fn garbage_never_panics(
            garbage in prop::collection::vec(any::<u8>(), 0..200),
            root in any_directory(),
            at: prop::sample::Index,
            to: u8,
        ) {
            let mut bytes = reapi::Tree { root: Some(root), children: vec![] }.encode_to_vec();
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = to;
            }
            for bytes in [garbage, bytes] {
                for shape in [Shape::Tree, Shape::Directory] {
                    let single: Vec<_> = bytes.chunks(1).map(Bytes::copy_from_slice).collect();
                    let whole = scan(shape, &[Bytes::copy_from_slice(&bytes)]);
                    prop_assert_eq!(whole, scan(shape, &single));
                }
            }
        }
    }

    /// Goal: a field that reaches beyond its Directory, an oversized node and a wrong type are refused. Method: one
    /// hand-made message for each.
    #[test]
    fn scanner_refuses_crooked_trees() {
        let scan = |bytes: &[u8]| scan(Shape::Tree, &[Bytes::copy_from_slice(bytes)]);
        assert_eq!(scan(&[0x0a, 2, 0x22, 5, 0, 0, 0, 0, 0]), Err(Malformed::Truncated.into()));
        assert_eq!(scan(&[0x0a, 5, 0x22, 1]), Err(Malformed::Truncated.into()));
        assert_eq!(scan(&[0x08, 1]), Err(Malformed::FieldType(1).into()));
        assert_eq!(scan(&[0x0a, 2, 0x0a, 0]), Err(WalkError::NoDigest));
        assert_eq!(scan(&[0x0a, 9, 0x0a, 0xff, 0xff, 0x7f]), Err(WalkError::NodeTooLong { len: 0x1f_ffff }));
        let endless = [0x1a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];
        assert_eq!(scan(&endless), Err(Malformed::Truncated.into()));
        assert_eq!(scan(&[0x0a, 0, 0x12, 0]), Ok(vec![]));
    }
}
