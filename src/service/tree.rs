//! `ContentAddressableStorage.GetTree`: every Directory below a root, in pages.
//!
//! One call sends all pages, each with the token of the next. A token names the root and the last Directory that was
//! sent, and nothing of this server: whoever has the blobs can go on from it, by walking again up to there.

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::reply::{ReplyBuilder, field_len, pieces_len};
use super::{CallContext, Code, Outgoing, ReplyMemory, Services, Status, check_digest_function, decode, parse_digest};
use crate::limits;
use crate::pure::digest::{Digest, Hash};
use crate::store::Store;
use crate::store::walk::{Visit, Walk, WalkStop};
use crate::wire::reapi::GetTreeRequest;

/// `GetTree`. Missing sub-trees are left out; each distinct Directory comes once, breadth first.
pub async fn get_tree<S: Store>(
    services: &Services<S>,
    _context: &CallContext,
    request: Bytes,
    out: &mut impl Outgoing,
) -> Result<(), Status> {
    let request: GetTreeRequest = decode(request)?;
    check_digest_function(request.digest_function)?;
    let root = parse_digest(request.root_digest.as_ref(), "root_digest")?;
    let page_size = match request.page_size {
        0 => usize::MAX,
        size => usize::try_from(size).map_err(|_| Status::invalid("page_size: must not be negative"))?,
    };
    let after = match request.page_token.as_str() {
        "" => None,
        token => Some(parse_token(token, root).ok_or_else(|| {
            Status::invalid("page_token: must be empty, or a next_page_token that came with the same root_digest")
        })?),
    };

    out.hold(limits::GET_TREE_HELD_LEN).await?;
    let mut walk = Walk::new(services.store.clone(), vec![root], limits::DIRECTORIES_MAX);
    let mut page = Page::default();
    let mut passed = after.is_none();
    loop {
        walk.bring(&mut ReplyMemory(out), page.message.len(), limits::GET_TREE_HELD_LEN).await?;
        let Some(visit) = walk.next().await.map_err(stop_status)? else { break };
        let (digest, directory) = match visit {
            Visit::Present { digest, pieces, .. } => (digest, pieces),
            Visit::Absent { digest } if digest == root => {
                return Err(Status::not_found(format!("root_digest: directory {root} is not in the cache")));
            }
            Visit::Invalid { digest, why } if digest == root => {
                return Err(Status::invalid(format!("root_digest: blob {root} is not a Directory: {why}")));
            }
            Visit::Absent { .. } | Visit::Invalid { .. } => continue,
        };
        if !passed {
            passed = after == Some(digest);
            continue;
        }
        // Why: a page goes out only when its successor is known, so that the last one has no token.
        if page.count == page_size || (page.count > 0 && page.len_with(&directory) > limits::TREE_PAGE_LEN_MAX as usize)
        {
            out.send(std::mem::take(&mut page).finish(Some(root))).await?;
            out.ready().await?;
        }
        page.put(digest, directory);
    }
    if !passed {
        return Err(Status::invalid("page_token: its directory is no longer below root_digest: start over"));
    }
    out.send(page.finish(None)).await
}

fn stop_status(stop: WalkStop) -> Status {
    match stop {
        WalkStop::TooMany(_) | WalkStop::TooDeep | WalkStop::TooLong(_) => {
            Status::new(Code::FailedPrecondition, stop.to_string())
        }
        WalkStop::Store(error) => error.into(),
    }
}

/// A GetTreeResponse in the making (directories = 1, next_page_token = 2).
#[derive(Default)]
struct Page {
    message: ReplyBuilder,
    count: usize,
    last: Option<Digest>,
}

impl Page {
    fn len_with(&self, directory: &[Bytes]) -> usize {
        self.message.len() + field_len(pieces_len(directory))
    }

    fn put(&mut self, digest: Digest, directory: Vec<Bytes>) {
        self.message.field(1, pieces_len(&directory));
        directory.into_iter().for_each(|piece| self.message.put(piece));
        self.count += 1;
        self.last = Some(digest);
    }

    /// The message; with `root` there is more below it.
    fn finish(mut self, root: Option<Digest>) -> super::Reply {
        if let (Some(root), Some(last)) = (root, self.last) {
            let token = make_token(root, last);
            self.message.field(2, token.len());
            self.message.copy(token.as_bytes());
        }
        self.message.finish()
    }
}

/// Own format, version 1: `1-HASH-SIZE-CHECK`: the last Directory sent, and the first 16 hex digits of the SHA-256 of
/// root and last Directory as `1-HASH/SIZE-HASH/SIZE`, which ties the token to its root.
fn make_token(root: Digest, last: Digest) -> String {
    let check = Hash(Sha256::digest(format!("1-{root}-{last}")).into()).to_hex();
    format!("1-{}-{}-{}", last.hash, last.size, &check[..16])
}

/// The last Directory that was sent. `None` for anything that `make_token` did not make for this root.
fn parse_token(token: &str, root: Digest) -> Option<Digest> {
    let mut parts = token.strip_prefix("1-")?.split('-');
    let last = Digest::parse(parts.next()?.as_bytes(), parts.next()?.parse().ok()?).ok()?;
    (make_token(root, last) == token).then_some(last)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use prost::Message;

    use super::*;
    use crate::pure::digest::EMPTY;
    use crate::service::testing::{self, Collected, wire};
    use crate::store::fake::{FakeStore, digest_of};
    use crate::wire::reapi::{Directory, DirectoryNode, FileNode, GetTreeResponse};

    type Tested = (FakeStore, Services<FakeStore>);

    /// A Directory with these below it, told apart by `name`.
    fn directory(name: &str, below: &[Digest]) -> Directory {
        let node = |(i, &digest): (usize, &Digest)| DirectoryNode { name: format!("{i}"), digest: wire(digest) };
        Directory {
            files: vec![FileNode { name: name.into(), digest: wire(digest_of(b"x")), ..FileNode::default() }],
            directories: below.iter().enumerate().map(node).collect(),
            ..Directory::default()
        }
    }

    /// Digests of blobs that are nowhere.
    fn absent(numbers: std::ops::Range<u32>) -> Vec<Digest> {
        let hash = |number: u32| Hash(std::array::from_fn(|i| number.to_le_bytes()[i % 4]));
        numbers.map(|number| Digest { hash: hash(number), size: 1 }).collect()
    }

    fn add(store: &FakeStore, name: &str, below: &[Digest]) -> Digest {
        store.add(directory(name, below).encode_to_vec())
    }

    fn run(
        (_, services): &Tested,
        root: Digest,
        page_size: i32,
        token: &str,
        out: &mut Collected,
    ) -> Result<(), Status> {
        let request = GetTreeRequest {
            root_digest: wire(root),
            page_size,
            page_token: token.into(),
            ..GetTreeRequest::default()
        };
        get_tree(services, &CallContext::default(), request.encode_to_vec().into(), out).now_or_never().expect("ready")
    }

    fn pages(tested: &Tested, root: Digest, page_size: i32, token: &str) -> Result<Vec<GetTreeResponse>, Status> {
        let mut out = Collected::default();
        run(tested, root, page_size, token, &mut out).map(|()| out.decode())
    }

    /// The name of each Directory's file, in order.
    fn names(pages: &[GetTreeResponse]) -> Vec<&str> {
        pages.iter().flat_map(|page| &page.directories).map(|directory| directory.files[0].name.as_str()).collect()
    }

    /// Goal: breadth first, each distinct Directory once, missing and broken sub-trees left out, one empty token at the
    /// end. Method: a small graph with all of these.
    #[test]
    fn walks_a_graph() {
        let tested = testing::services();
        let store = &tested.0;
        let leaf = add(store, "leaf", &[]);
        let (left, right) = (add(store, "left", &[leaf]), add(store, "right", &[leaf, digest_of(b"gone")]));
        let broken = store.add(&b"\xff"[..]);
        let root = add(store, "root", &[left, broken, right, left]);
        let pages = pages(&tested, root, 0, "").expect("valid");
        assert_eq!(names(&pages), ["root", "left", "right", "leaf"]);
        assert_eq!(pages.len(), 1);
        assert_eq!(pages[0].next_page_token, "");
    }

    /// Goal: depth costs no stack and has an end. Method: chains of the longest length that is walked, and of one more.
    #[test]
    fn a_chain_has_a_longest_length() {
        let tested = testing::services();
        let mut root = add(&tested.0, "level 0", &[]);
        for level in 1..=limits::DIRECTORY_DEPTH_MAX {
            root = add(&tested.0, &format!("level {level}"), &[root]);
        }
        let pages_of = |root| pages(&tested, root, 0, "");
        assert_eq!(names(&pages_of(root).expect("walked")).len(), limits::DIRECTORY_DEPTH_MAX + 1);
        let deeper = add(&tested.0, "one more", &[root]);
        assert_eq!(pages_of(deeper).map_err(|status| status.code), Err(Code::FailedPrecondition));
    }

    /// Goal: page_size holds, and going on from any page's token, on another server, gives the rest. Method: all page
    /// sizes on a tree of 13, resumed after each page on a second store with the same blobs.
    #[test]
    fn resumes_anywhere() {
        let (tested, other) = (testing::services(), testing::services());
        let build = |store: &FakeStore| {
            let mut level: Vec<Digest> = (0..9).map(|i| add(store, &format!("c{i}"), &[])).collect();
            level = level.chunks(3).enumerate().map(|(i, below)| add(store, &format!("b{i}"), below)).collect();
            add(store, "a", &level)
        };
        let root = build(&tested.0);
        assert_eq!(build(&other.0), root);
        let all = pages(&tested, root, 0, "").expect("valid");
        let all = names(&all);
        assert_eq!(all.len(), 13);
        for page_size in 1..=14 {
            let pages_now = pages(&tested, root, page_size, "").expect("valid");
            assert_eq!(names(&pages_now), all);
            let mut sent = 0;
            for (i, page) in pages_now.iter().enumerate() {
                assert!(page.directories.len() <= page_size as usize);
                sent += page.directories.len();
                assert_eq!(page.next_page_token.is_empty(), i + 1 == pages_now.len());
                if !page.next_page_token.is_empty() {
                    let rest = pages(&other, root, 0, &page.next_page_token).expect("a valid token");
                    assert_eq!(names(&rest), all[sent..]);
                }
            }
        }
    }

    /// Goal: a graph with 2^40 paths costs 41 reads, and a chain of 5000 no stack. Method: build both.
    #[test]
    fn bears_hostile_shapes() {
        let tested = testing::services();
        let mut top = add(&tested.0, "0", &[]);
        for i in 1..=40 {
            top = add(&tested.0, &format!("{i}"), &[top, top]);
        }
        assert_eq!(names(&pages(&tested, top, 0, "").expect("valid")).len(), 41);
        assert_eq!(tested.0.with(|state| state.gets), 41);
    }

    /// Goal: pages stay near their length, and a slow or gone client stops the walk. Method: Directories of 50 KB.
    #[test]
    fn pages_are_bounded_and_stop_with_the_client() {
        let tested = testing::services();
        let below: Vec<_> = (0..80).map(|i| add(&tested.0, &format!("{i:050000}"), &[])).collect();
        let root = add(&tested.0, "root", &below);
        let pages = pages(&tested, root, 0, "").expect("valid");
        assert!(pages.len() >= 3 && pages.iter().all(|page| page.encoded_len() <= (1 << 20) + 200));
        assert_eq!(names(&pages).len(), 81);
        tested.0.with(|state| state.gets = 0);
        let mut out = Collected { room: 1, ..Collected::default() };
        assert_eq!(run(&tested, root, 0, "", &mut out).map_err(|status| status.code), Err(Code::Cancelled));
        assert!(tested.0.with(|state| state.gets) <= 60, "reads ahead by one round");
    }

    /// Goal: each refusal. Method: one example for each; tokens spoilt in every character.
    #[test]
    fn refuses() {
        let tested = testing::services();
        let (a, b) = (add(&tested.0, "a", &[]), add(&tested.0, "b", &[]));
        let root = add(&tested.0, "root", &[a, b]);
        let code = |result: Result<Vec<GetTreeResponse>, Status>| result.expect_err("refused").code;
        assert_eq!(code(pages(&tested, digest_of(b"gone"), 0, "")), Code::NotFound);
        assert_eq!(code(pages(&tested, tested.0.add("\u{7f}"), 0, "")), Code::InvalidArgument);
        assert_eq!(code(pages(&tested, root, -1, "")), Code::InvalidArgument);
        let token = pages(&tested, root, 1, "").expect("valid")[1].next_page_token.clone();
        assert_eq!(names(&pages(&tested, root, 0, &token).expect("valid")), ["b"]);
        for i in 0..token.len() {
            let mut spoilt = token.clone().into_bytes();
            spoilt[i] ^= 1;
            let spoilt = String::from_utf8(spoilt).expect("ASCII");
            assert_eq!(code(pages(&tested, root, 0, &spoilt)), Code::InvalidArgument, "{spoilt}");
        }
        for garbage in ["1", "1-", "1---", "x", &token[1..], &format!("{token} "), &"-".repeat(10_000)] {
            assert_eq!(code(pages(&tested, root, 0, garbage)), Code::InvalidArgument);
        }
        assert_eq!(code(pages(&tested, a, 0, &token)), Code::InvalidArgument, "of another root");
        tested.0.remove(a);
        assert_eq!(code(pages(&tested, root, 0, &token)), Code::InvalidArgument, "its place is gone");
        assert_eq!(names(&pages(&tested, root, 0, "").expect("valid")), ["root", "b"]);
        // A Directory that cannot be sent is an error only where it is here.
        let size = limits::DIRECTORY_LEN_MAX + 1;
        let absent_long = Digest { size, ..root };
        assert_eq!(code(pages(&tested, absent_long, 0, "")), Code::NotFound);
        let above = add(&tested.0, "above", &[absent_long, b]);
        assert_eq!(names(&pages(&tested, above, 0, "").expect("valid")), ["above", "b"]);
        let long = tested.0.add(vec![0; size as usize]);
        assert_eq!(code(pages(&tested, long, 0, "")), Code::FailedPrecondition);
        let above = add(&tested.0, "above", &[b, long]);
        assert_eq!(code(pages(&tested, above, 0, "")), Code::FailedPrecondition);
        let many: Vec<_> =
            (0..7).map(|i| add(&tested.0, &format!("many {i}"), &absent(i * 40_000..(i + 1) * 40_000))).collect();
        let many = add(&tested.0, "many", &many);
        assert_eq!(code(pages(&tested, many, 0, "")), Code::FailedPrecondition);
        let empty = pages(&tested, EMPTY, 0, "").expect("the empty Directory");
        assert_eq!(empty, [GetTreeResponse { directories: vec![Directory::default()], ..GetTreeResponse::default() }]);
        let (context, mut out) = (CallContext::default(), Collected::default());
        let no_root = get_tree(&tested.1, &context, Bytes::new(), &mut out).now_or_never().expect("ready");
        assert_eq!(no_root.map_err(|status| status.code), Err(Code::InvalidArgument));
    }
}
