//! Whether a backend has a blob, and how large it is, without reading it.

use std::time::Instant;

use super::{Backend, cas_key};
use crate::backend::counts::Operation;
use crate::backend::s3::{HEAD_TIME, S3Error};
use crate::backend::settings::ObjectFormat;
use crate::limits::BACKEND_HEADS_MAX;
use crate::pure::breaker_view::Health;
use crate::pure::casblob::{FIXED_LEN, Header};
use crate::pure::digest::Digest;
use crate::pure::existence::Presence;
use crate::pure::scope::Scope;
use crate::pure::upload_queue::{ObjectKind, Upload};
use crate::rt;
use crate::rt::channel;
use crate::rt::join::for_each_bounded;
use crate::rt::local::{Event, Local};

impl Backend {
    /// Which of these blobs the backend has, as far as it says within the time allowed, or by `until`; what it does not say
    /// counts as absent. While the breaker is not closed that is all, known or not: nobody could read them.
    pub async fn present(&self, digests: &[Digest], scope: &Scope, until: Option<Instant>) -> Vec<bool> {
        let (now, bucket) = (self.now(), self.bucket(scope));
        self.note_unnamed(scope, Operation::Contains);
        let mut present = vec![false; digests.len()];
        if self.0.view.with(|view| view.admit()).is_none() {
            self.0.counts.short_circuits.count();
            return present;
        }
        let mut unknown = Vec::new();
        for (at, digest) in digests.iter().enumerate() {
            let (_, key) = scope.cas_key(&digest.hash);
            if digest.size > self.0.settings.max_proxy_blob_size || bucket.is_wrong(key, digest.size) {
                continue;
            }
            match bucket.existence.with(|existence| existence.get(&key, now)) {
                Some(known) => present[at] = known == Presence::Present,
                None => unknown.push(at),
            }
        }
        let asked_at = rt::time::now();
        let until = until.unwrap_or_else(|| asked_at + self.existence_timeout());
        if unknown.is_empty() || until <= asked_at {
            return present;
        }
        let (found, ended) = (Local::new(present), Event::default());
        let (left, waited) = (Local::new(unknown.len()), ended.wait());
        // Why apart: who asks waits for a while only, but the answers are worth having, and the breaker must learn of a
        // store that gives none. Checks that have not begun by then are not made.
        let name = |at: usize| Upload { kind: ObjectKind::Cas, digest: digests[at], scope: scope.clone() };
        let (backend, asked) = (self.clone(), unknown.iter().map(|&at| (at, name(at))).collect());
        let shared = found.clone();
        rt::spawn(async move {
            let checks = for_each_bounded(asked, BACKEND_HEADS_MAX, |(at, name): (usize, Upload)| {
                let (backend, found, left, ended) = (backend.clone(), shared.clone(), left.clone(), ended.clone());
                async move {
                    let permit = rt::time::race(rt::time::deadline(until), backend.0.heads.take()).await;
                    let is_there = match permit {
                        rt::time::Either::Left(()) => false,
                        rt::time::Either::Right(_permit) => rt::catch(backend.exists(&name)).await.unwrap_or(false),
                    };
                    found.with(|found| found[at] = is_there);
                    let last = left.with(|left| {
                        *left -= 1;
                        *left == 0
                    });
                    if last {
                        ended.notify();
                    }
                }
            });
            rt::time::race(checks, backend.stopped()).await;
        });
        rt::time::race(waited, rt::time::deadline(until)).await;
        found.with(|found| found.clone())
    }

    /// Whether it is known that the backend has no such blob: it has said so itself, or sent another one, or is never asked. Why not where it denied
    /// us a look: it does so as well for what it has, when something is wrong with the credentials.
    pub fn lacks(&self, digest: &Digest, scope: &Scope) -> bool {
        let (bucket, (_, key)) = (self.bucket(scope), scope.cas_key(&digest.hash));
        let known = bucket.existence.with(|existence| existence.get(&key, self.now()));
        let is_too_large = digest.size > self.0.settings.max_proxy_blob_size;
        known == Some(Presence::Absent) || is_too_large || bucket.is_wrong(key, digest.size)
    }

    async fn exists(&self, name: &Upload) -> bool {
        let one = &*self.0;
        let Some(ticket) = one.view.with(|view| view.admit()) else { return false };
        let begun = rt::time::now();
        match self.bucket(&name.scope).client.head(&self.key(name), HEAD_TIME).await {
            Ok(found) => {
                one.counts.head_times.0.observe_time(begun.elapsed());
                self.report(ticket, Health::Good);
                self.learn(name, presence_of(found));
                found.is_some()
            }
            Err(error) => {
                self.learn_denied(name, &error);
                self.failed(ticket, "existence check", &error);
                false
            }
        }
    }

    /// The raw size of a blob that is named by its hash alone, as far as the backend says within the time allowed for
    /// existence checks.
    pub async fn size_of(&self, name: &Upload) -> Option<u64> {
        let (bucket, key) = (self.bucket(&name.scope), cas_key(name));
        self.note_unnamed(&name.scope, Operation::Contains);
        let known = bucket.existence.with(|existence| existence.get(&key, self.now()));
        if matches!(known, Some(Presence::Absent | Presence::Denied)) || bucket.is_wrong(key, name.digest.size) {
            return None;
        }
        let until = rt::time::now() + self.existence_timeout();
        let (reply, answer) = channel::reply();
        let (backend, name) = (self.clone(), name.clone());
        // Why apart: as above.
        rt::spawn(rt::contain(async move {
            let asked = async {
                match rt::time::race(rt::time::deadline(until), backend.0.heads.take()).await {
                    rt::time::Either::Left(()) => None,
                    rt::time::Either::Right(_permit) => backend.ask_size(&name).await,
                }
            };
            if let rt::time::Either::Left(size) = rt::time::race(Box::pin(asked), backend.stopped()).await {
                reply.send(size);
            }
        }));
        match rt::time::race(answer.recv(), rt::time::deadline(until)).await {
            rt::time::Either::Left(Ok(size)) => size,
            rt::time::Either::Left(Err(_)) | rt::time::Either::Right(()) => None,
        }
    }

    async fn ask_size(&self, name: &Upload) -> Option<u64> {
        let one = &*self.0;
        let Some(ticket) = one.view.with(|view| view.admit()) else {
            one.counts.short_circuits.count();
            return None;
        };
        let begun = rt::time::now();
        match self.read_size(name).await {
            Ok(found) => {
                one.counts.head_times.0.observe_time(begun.elapsed());
                self.report(ticket, Health::Good);
                self.learn(name, presence_of(found));
                found.filter(|size| (1..=one.settings.max_proxy_blob_size).contains(size))
            }
            Err(error) => {
                self.learn_denied(name, &error);
                self.failed(ticket, "existence check", &error);
                None
            }
        }
    }

    /// 0 where the object does not say what the blob's size is.
    async fn read_size(&self, name: &Upload) -> Result<Option<u64>, S3Error> {
        let (client, key) = (&self.bucket(&name.scope).client, self.key(name));
        if self.0.settings.format == ObjectFormat::Raw {
            return client.head(&key, HEAD_TIME).await;
        }
        let Some(mut object) = client.get(&key, Some(FIXED_LEN as u64), HEAD_TIME, HEAD_TIME).await? else {
            return Ok(None);
        };
        let mut fixed = Vec::new();
        // Read to its end, for the connection's sake; a store that does not know ranges sends more.
        while let Some(piece) = object.next().await? {
            fixed.extend_from_slice(&piece[..piece.len().min(FIXED_LEN + 1 - fixed.len())]);
            if fixed.len() > FIXED_LEN {
                break;
            }
        }
        let header = fixed.first_chunk().and_then(|fixed| Header::parse(fixed).ok());
        Ok(Some(header.map_or(0, |header| header.raw_size)))
    }
}

fn presence_of(size: Option<u64>) -> Presence {
    if size.is_some() { Presence::Present } else { Presence::Absent }
}
