//! `ContentAddressableStorage.GetTree`: every Directory below a root, in pages.
//!
//! One call sends all pages, each with the token of the next. A token names the root and the last Directory that was
//! sent, and nothing of this server: whoever has the blobs can go on from it, by walking again up to there.

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::reply::{ReplyBuilder, field_len, pieces_len};
use super::{CallContext, Code, Outgoing, Services, Status, check_digest_function, decode, parse_digest};
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

    let mut walk = Walk::new(services.store.clone(), root);
    let mut page = Page::default();
    let mut passed = after.is_none();
    while let Some(visit) = walk.next().await.map_err(stop_status)? {
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
        WalkStop::TooMany | WalkStop::TooLong(_) => Status::new(Code::FailedPrecondition, stop.to_string()),
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
