//! Brings each request to the core that owns what it names: a call on this core, a message to another.

use std::rc::Rc;
use std::time::Instant;

use bytes::Bytes;

use super::blob_disk::BlobDisk;
use super::lane::Lane;
use super::protocol::{Asked, Request};
use super::upload::UploadHandle;
use super::worker::Worker;
use crate::limits::{ROUTER_QUEUE_LEN, ROUTER_REQUESTS_MAX};
use crate::metrics::{Counter, Metric, Snapshot};
use crate::pure::batch;
use crate::pure::digest::{Digest, Hash};
use crate::pure::purge::{InstanceTag, Which};
use crate::pure::scope::Scope;
use crate::pure::shard_map::{CoreId, ShardMap};
use crate::rt;
use crate::rt::channel::{self, Receiver, Reply, Sender};
use crate::rt::gate::Gate;
use crate::rt::local::Event;
use crate::rt::time::{Either, race};
use crate::store::{
    ActionEntry, ActionKey, Blob, Get, NotDecoded, Opened, Purge, Purged, Purpose, Put, PutOutcome, Store, StoreError,
    UploadKey, UploadStatus, Wanted,
};

/// One core's end of the mesh, made before the cores start and handed to its core.
pub struct RouterPort {
    core: usize,
    peers: Vec<Sender<Asked>>,
    inbox: Receiver<Asked>,
}

/// Connects `core_count` cores: one bounded queue for each, with a sender for every other. In the order of the cores.
pub fn wire(core_count: usize) -> Vec<RouterPort> {
    let (senders, inboxes): (Vec<_>, Vec<_>) = (0..core_count).map(|_| channel::bounded(ROUTER_QUEUE_LEN)).unzip();
    let ports = inboxes.into_iter().enumerate();
    ports.map(|(core, inbox)| RouterPort { core, peers: senders.clone(), inbox }).collect()
}

impl RouterPort {
    /// Starts to serve the other cores and returns this core's router. `map` must be the same on every core.
    pub fn start<D: BlobDisk>(self, worker: Worker<D>, map: ShardMap) -> Router<D> {
        assert_eq!(usize::from(map.cores()), self.peers.len(), "the map and the mesh must have as many cores");
        // Why without its own sender: the queue ends when the other cores have gone.
        let lanes = self.peers.into_iter().enumerate();
        let lanes: Rc<[_]> = lanes.map(|(core, sender)| (core != self.core).then(|| Lane::new(sender))).collect();
        worker.write_gate().connect(&lanes);
        let received = Rc::new(Counter::default());
        rt::spawn(serve(worker.clone(), self.inbox, received.clone()));
        let inner = Rc::new(Mesh { here: CoreId(self.core as u16), map, lanes, received });
        worker.connect(&inner);
        Router { inner, worker, until: None }
    }
}

/// The store as one core sees it, for the blobs of its worker's scope. Cheap to clone; core-local.
pub struct Router<D: BlobDisk> {
    inner: Rc<Mesh>,
    worker: Worker<D>,
    /// A backend is waited for no longer; `None`: for as long as each kind of question may take.
    until: Option<Instant>,
}

/// How a core reaches the others.
pub(super) struct Mesh {
    here: CoreId,
    map: ShardMap,
    /// By core; `None` for this one.
    lanes: Rc<[Option<Lane>]>,
    /// Requests taken from this core's queue.
    received: Rc<Counter>,
}

impl<D: BlobDisk> Clone for Router<D> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), worker: self.worker.clone(), until: self.until }
    }
}

impl<D: BlobDisk> Router<D> {
    /// For tasks of `worker` itself that need what other cores own; handlers of requests do not. `None` when the core ends.
    pub(super) fn of(worker: Worker<D>) -> Option<Self> {
        worker.mesh().map(|inner| Self { inner, worker, until: None })
    }

    /// This core's worker.
    pub fn worker(&self) -> &Worker<D> {
        &self.worker
    }

    /// Adds what this core sent to others and took from them.
    pub fn report(&self, into: &mut Snapshot) {
        let here = usize::from(self.inner.here.0);
        for (core, lane) in self.inner.lanes.iter().enumerate() {
            let sent = lane.as_ref().map_or(0, Lane::sent);
            into.add_core(Metric::CoreMessages, here, sent);
            // Why so: what all have sent to a core less what it took is what waits for it.
            into.add_core(Metric::CoreMessagesWaiting, core, sent);
        }
        into.add_core(Metric::CoreMessagesWaiting, here, -(self.inner.received.get() as f64));
        self.worker.report(here, into);
    }

    /// The lane to the owner of `hash`; `None` when that is this core.
    fn lane(&self, hash: &Hash) -> Option<&Lane> {
        self.inner.lanes[usize::from(self.inner.map.core_of_hash(hash).0)].as_ref()
    }

    /// Asks every core for its part of the batch, this one while the others work.
    async fn find_missing_split(&self, digests: Vec<Digest>) -> Result<Vec<bool>, StoreError> {
        let (inner, until) = (&*self.inner, self.until);
        let owner = |digest: &Digest| usize::from(inner.map.core_of_hash(&digest.hash).0);
        let (order, mut parts) = batch::split(digests, inner.lanes.len(), owner);
        let local = std::mem::take(&mut parts[usize::from(inner.here.0)]);
        let mut replies: Vec<Option<Reply<Vec<bool>>>> = Vec::with_capacity(parts.len());
        for (lane, digests) in inner.lanes.iter().zip(parts) {
            let lane = lane.as_ref().filter(|_| !digests.is_empty());
            replies.push(match lane {
                None => None,
                Some(lane) => {
                    Some(lane.post(self.worker.scope(), |reply| Request::FindMissing { digests, until, reply }).await?)
                }
            });
        }
        let mut answers = vec![Vec::new(); replies.len()];
        answers[usize::from(inner.here.0)] = self.worker.find_missing(&local, until).await;
        for (answer, reply) in answers.iter_mut().zip(replies) {
            if let Some(reply) = reply {
                *answer = reply.recv().await.map_err(|_| StoreError::Unanswered)?;
            }
        }
        Ok(batch::join(order, answers).expect("the worker answers each digest once"))
    }

    /// Lets the purge stand, then has every core carry it out.
    async fn purge_everywhere(&self, which: Which) -> Result<Purged, StoreError> {
        let noted = self.worker.standing().add(which).await;
        noted.map_err(|error| StoreError::Disk(format!("the purge could not be noted: {error}")))?;
        let purge = Purge::Actions(which);
        let mut replies = Vec::new();
        for lane in self.inner.lanes.iter().flatten() {
            replies.push(lane.post(self.worker.scope(), |reply| Request::Purge { purge, reply }).await?);
        }
        let mut all = self.worker.purge(purge).await?;
        for reply in replies {
            let Purged { examined, purged } = reply.recv().await.map_err(|_| StoreError::Unanswered)??;
            all.examined += examined;
            all.purged += purged;
        }
        Ok(all)
    }
}

impl<D: BlobDisk> Store for Router<D> {
    type Upload = UploadHandle;

    fn scoped(&self, scope: &Scope) -> Self {
        Self { inner: self.inner.clone(), worker: self.worker.scoped(scope.clone()), until: self.until }
    }

    fn for_check(&self) -> Self {
        let until = self.worker.backend().map(|backend| rt::time::now() + backend.existence_timeout());
        Self { until, ..self.clone() }
    }

    async fn find_missing(&self, digests: Vec<Digest>) -> Result<Vec<bool>, StoreError> {
        if digests.iter().all(|digest| self.inner.map.core_of_hash(&digest.hash) == self.inner.here) {
            return Ok(self.worker.find_missing(&digests, self.until).await);
        }
        self.find_missing_split(digests).await
    }

    async fn is_absent(&self, digest: Digest) -> Result<bool, StoreError> {
        match self.lane(&digest.hash) {
            None => Ok(self.worker.is_absent(&digest).await),
            Some(lane) => {
                let reply = lane.post(self.worker.scope(), |reply| Request::IsAbsent { digest, reply }).await?;
                reply.recv().await.map_err(|_| StoreError::Unanswered)
            }
        }
    }

    async fn size_of(&self, hash: Hash, purpose: Purpose) -> Result<Option<u64>, StoreError> {
        match self.lane(&hash) {
            None => self.worker.size_of(hash, purpose).await,
            Some(lane) => lane.ask(self.worker.scope(), |reply| Request::SizeOf { hash, purpose, reply }).await,
        }
    }

    async fn get(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        // Why: what is in time has been fetched.
        if self.until.is_some() {
            return self.get_here(get).await;
        }
        match self.lane(&get.digest.hash) {
            None => self.worker.get(get).await,
            Some(lane) => lane.ask(self.worker.scope(), |reply| Request::Get { get, only_here: false, reply }).await,
        }
    }

    async fn get_here(&self, get: Get) -> Result<Option<Blob>, StoreError> {
        match self.lane(&get.digest.hash) {
            None => self.worker.get_here(get).await,
            Some(lane) => lane.ask(self.worker.scope(), |reply| Request::Get { get, only_here: true, reply }).await,
        }
    }

    async fn fetch(&self, wanted: Wanted) -> Result<bool, StoreError> {
        let hash = match &wanted {
            Wanted::Blob(digest) => digest.hash,
            Wanted::Action(key) => key.hash,
        };
        // Why first: most servers have no backend, and need no message to know that.
        if self.worker.backend().is_none() {
            return Ok(false);
        }
        let until = self.until;
        match self.lane(&hash) {
            None => Ok(self.worker.fetch(wanted, until).await),
            Some(lane) => {
                let reply = lane.post(self.worker.scope(), |reply| Request::Fetch { wanted, until, reply }).await?;
                reply.recv().await.map_err(|_| StoreError::Unanswered)
            }
        }
    }

    async fn put(&self, put: Put) -> Result<PutOutcome, StoreError> {
        match self.lane(&put.digest.hash) {
            None => self.worker.put(put).await,
            Some(lane) => lane.ask(self.worker.scope(), |reply| Request::Put { put, reply }).await,
        }
    }

    async fn open_upload(&self, key: UploadKey, write_offset: u64) -> Result<Opened<UploadHandle>, StoreError> {
        match self.lane(&key.digest.hash) {
            None => self.worker.open_upload(key, write_offset).await,
            Some(lane) => lane.ask(self.worker.scope(), |reply| Request::OpenUpload { key, write_offset, reply }).await,
        }
    }

    async fn upload_status(&self, key: UploadKey) -> Result<UploadStatus, StoreError> {
        match self.lane(&key.digest.hash) {
            None => self.worker.upload_status(&key).await,
            Some(lane) => lane.ask(self.worker.scope(), |reply| Request::UploadStatus { key, reply }).await,
        }
    }

    async fn action_get(&self, key: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        match self.lane(&key.hash) {
            None => self.worker.action_get(key).await,
            Some(lane) => {
                lane.ask(self.worker.scope(), |reply| Request::ActionGet { key, only_here: false, reply }).await
            }
        }
    }

    async fn action_get_here(&self, key: ActionKey) -> Result<Option<ActionEntry>, StoreError> {
        match self.lane(&key.hash) {
            None => self.worker.action_here(key).await,
            Some(lane) => {
                lane.ask(self.worker.scope(), |reply| Request::ActionGet { key, only_here: true, reply }).await
            }
        }
    }

    async fn action_put(&self, key: ActionKey, data: Bytes, instance: InstanceTag) -> Result<(), StoreError> {
        match self.lane(&key.hash) {
            None => self.worker.action_put(key, data, instance).await,
            Some(lane) => {
                lane.ask(self.worker.scope(), |reply| Request::ActionPut { key, data, instance, reply }).await
            }
        }
    }

    async fn action_drop(&self, key: ActionKey, version: u64) -> Result<(), StoreError> {
        match self.lane(&key.hash) {
            None => self.worker.action_drop(key, version).await,
            Some(lane) => lane.ask(self.worker.scope(), |reply| Request::ActionDrop { key, version, reply }).await,
        }
    }

    fn decoded(&self, zstd: &[u8], raw_len: usize) -> Result<Bytes, NotDecoded> {
        self.worker.decoded(zstd, raw_len)
    }

    async fn purge(&self, purge: Purge) -> Result<Purged, StoreError> {
        let lane = match purge {
            Purge::Blob(hash) | Purge::Action(hash) => self.lane(&hash),
            Purge::Actions(which) => return self.purge_everywhere(which).await,
        };
        match lane {
            None => self.worker.purge(purge).await,
            Some(lane) => {
                let reply = lane.post(self.worker.scope(), |reply| Request::Purge { purge, reply }).await?;
                reply.recv().await.map_err(|_| StoreError::Unanswered)?
            }
        }
    }
}

/// Answers the other cores until all of them are gone.
async fn serve<D: BlobDisk>(worker: Worker<D>, mut inbox: Receiver<Asked>, received: Rc<Counter>) {
    let running = Gate::default();
    let ended = Event::default();
    while let Some(Asked { scope, request }) = inbox.recv().await {
        received.count();
        if let Request::Slots(message) = request {
            worker.receive_slots(message);
            continue;
        }
        let (worker, ended_here) = (worker.scoped(scope), ended.clone());
        running.spawn(async move {
            let _busy = rt::busy();
            // Its asker, who is left without an answer, tells its client.
            rt::contain(handle(worker, request)).await;
            ended_here.notify();
        });
        // The one that just ended is still inside, so the bound is met a little early.
        while running.len() >= ROUTER_REQUESTS_MAX {
            ended.wait().await;
        }
    }
}

async fn handle<D: BlobDisk>(worker: Worker<D>, request: Request) {
    match request {
        Request::FindMissing { digests, until, reply } => {
            let mut missing = worker.find_missing_here(&digests).await;
            if !missing.contains(&true) || worker.backend().is_none() {
                return reply.send(missing);
            }
            let elsewhere = worker.clone();
            worker.apart(async move {
                elsewhere.find_there(&digests, &mut missing, until).await;
                reply.send(missing);
            });
        }
        // Why it ends with its client: what is read for nobody is charged to nobody.
        Request::Get { get, only_here, mut reply } => match race(worker.get_here(get), reply.abandoned()).await {
            Either::Left(Ok(None)) if !only_here && worker.reads_through(&get.digest) => {
                let elsewhere = worker.clone();
                worker.apart(async move { reply.send(elsewhere.get_there(get).await) });
            }
            Either::Left(found) => reply.send(found),
            Either::Right(()) => {}
        },
        Request::SizeOf { hash, purpose, reply } => match worker.size_here(hash).await {
            Ok(None) if worker.takes_reads() => {
                let elsewhere = worker.clone();
                worker.apart(async move { reply.send(Ok(elsewhere.size_there(hash, purpose).await)) });
            }
            found => reply.send(found),
        },
        // Why these two end with their client: they may wait for a slot, and would take it from somebody else.
        Request::Put { put, mut reply } => {
            if let Either::Left(outcome) = race(worker.put(put), reply.abandoned()).await {
                reply.send(outcome);
            }
        }
        Request::OpenUpload { key, write_offset, mut reply } => {
            if let Either::Left(opened) = race(worker.open_upload(key, write_offset), reply.abandoned()).await {
                reply.send(opened);
            }
        }
        Request::UploadStatus { key, reply } => reply.send(worker.upload_status(&key).await),
        Request::IsAbsent { digest, reply } => reply.send(worker.is_absent(&digest).await),
        Request::Fetch { wanted, until, reply } => {
            let elsewhere = worker.clone();
            worker.apart(async move { reply.send(elsewhere.fetch(wanted, until).await) });
        }
        Request::ActionGet { key, only_here, reply } => match worker.action_here(key).await {
            Ok(None) if !only_here && worker.takes_reads() => {
                let elsewhere = worker.clone();
                worker.apart(async move { reply.send(elsewhere.action_there(key).await) });
            }
            found => reply.send(found),
        },
        Request::ActionPut { key, data, instance, reply } => {
            reply.send(worker.action_put(key, data, instance).await);
        }
        Request::ActionDrop { key, version, reply } => reply.send(worker.action_drop(key, version).await),
        Request::Purge { purge, reply } => {
            let elsewhere = worker.clone();
            worker.apart(async move { reply.send(elsewhere.purge(purge).await) });
        }
        Request::Slots(message) => worker.receive_slots(message),
    }
}
