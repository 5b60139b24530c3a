//! Upload sessions of one core: who may write to which, and what is kept of those that were cut off.
//!
//! Every running upload is a task on the owner core; its handle, on any core, talks to it through a channel. When the
//! handle goes away, the task parks what has arrived. A client that comes back on another connection, before the old one
//! is known to be dead, takes the session over.

mod names;

use std::collections::{BTreeMap, HashMap, VecDeque, hash_map};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use self::names::{Found, Names, Running};
use super::blob_disk::BlobDisk;
use super::protocol::{UploadAck, UploadMessage};
use super::session::{Session, decoder_for, is_small};
use super::worker::{Admitted, Worker};
use super::write_gate::WriteGate;
use crate::limits::{
    self, PARKED_DISK_MAX, PARKED_MEMORY_MAX, PARKED_UPLOADS_MAX, PARTIAL_UPLOAD_KEEP_MS, UPLOAD_MESSAGE_LEN,
};
use crate::pure::parking::ParkingLimits;
use crate::pure::record::Key;
use crate::rt;
use crate::rt::channel::{self, Receiver, ReplyTo, Sender};
use crate::rt::local::Local;
use crate::rt::time::Either;
use crate::store::{PutOutcome, StoreError, Upload, UploadEnd, UploadKey};

/// The client's end of a running upload. Dropping it parks what has arrived.
///
/// Short writes are gathered into messages of `UPLOAD_MESSAGE_LEN`, and one such message may be on its way while the next
/// is gathered. Why: a message wakes a task on each core, which costs more than hashing the 16 KiB that Bazel sends.
pub struct UploadHandle {
    messages: Sender<UploadMessage>,
    acks: Receiver<UploadAck>,
    gathered: Vec<Bytes>,
    gathered_len: usize,
    /// Lengths of the messages that the owner has not consumed: at most 2 at any time.
    unacked: VecDeque<usize>,
}

impl Upload for UploadHandle {
    async fn write(&mut self, data: Vec<Bytes>) -> Result<(), UploadEnd> {
        self.gathered_len += data.iter().map(Bytes::len).sum::<usize>();
        match self.gathered.is_empty() {
            true => self.gathered = data,
            false => self.gathered.extend(data),
        }
        if self.gathered_len < UPLOAD_MESSAGE_LEN {
            return Ok(());
        }
        let len = self.gathered_len;
        let ahead = usize::from(len < 2 * UPLOAD_MESSAGE_LEN);
        let message = UploadMessage::Write(self.take_gathered());
        if self.messages.send(message).await.is_err() {
            return Err(self.ended().await);
        }
        self.unacked.push_back(len);
        while self.unacked.len() > ahead {
            self.moved().await?;
        }
        Ok(())
    }

    async fn moved(&mut self) -> Result<(), UploadEnd> {
        match self.acks.recv().await {
            Some(Ok(())) => {
                self.unacked.pop_front();
                Ok(())
            }
            Some(Err(end)) => Err(end),
            None => Err(UploadEnd::Failed(StoreError::Unanswered)),
        }
    }

    fn unconsumed(&self) -> usize {
        self.unacked.iter().sum()
    }

    async fn finish(mut self) -> Result<PutOutcome, StoreError> {
        let (reply_to, reply) = channel::reply();
        let message = UploadMessage::Finish { data: self.take_gathered(), reply: reply_to };
        if self.messages.send(message).await.is_ok()
            && let Ok(outcome) = reply.recv().await
        {
            return outcome;
        }
        match self.ended().await {
            UploadEnd::AlreadyPresent => Ok(PutOutcome::AlreadyPresent),
            UploadEnd::Failed(error) => Err(error),
        }
    }

    async fn suspend(mut self) -> Result<u64, UploadEnd> {
        let (reply_to, reply) = channel::reply();
        let message = UploadMessage::Suspend { data: self.take_gathered(), reply: reply_to };
        if self.messages.send(message).await.is_ok()
            && let Ok(committed) = reply.recv().await
        {
            return committed;
        }
        Err(self.ended().await)
    }
}

impl Drop for UploadHandle {
    fn drop(&mut self) {
        if !self.gathered.is_empty() {
            // What does not fit the queue is sent again by a client that resumes.
            let message = UploadMessage::Write(self.take_gathered());
            let _ = self.messages.try_send(message);
        }
    }
}

impl UploadHandle {
    /// Why the owner ended the upload.
    pub async fn ended(&mut self) -> UploadEnd {
        loop {
            if let Err(end) = self.moved().await {
                return end;
            }
        }
    }

    fn take_gathered(&mut self) -> Vec<Bytes> {
        self.gathered_len = 0;
        std::mem::take(&mut self.gathered)
    }
}

/// The sessions of one core. Clones share them.
pub struct Uploads<D: BlobDisk>(Local<Table<D>>);

struct Table<D: BlobDisk> {
    names: Names<D>,
    /// All running uploads, oldest first, also those whose name another one has taken.
    running: BTreeMap<u64, Rc<Running>>,
    /// The same by what they upload.
    by_blob: HashMap<Key, Vec<Rc<Running>>>,
    started: u64,
    /// When milliseconds count from.
    epoch: Instant,
    /// A task waits for the next deadline.
    is_swept: bool,
}

impl<D: BlobDisk> Clone for Uploads<D> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<D: BlobDisk> Uploads<D> {
    /// Interrupted uploads may hold `parked_bytes` of memory.
    pub fn new(parked_bytes: usize) -> Self {
        let limits = ParkingLimits {
            count: PARKED_UPLOADS_MAX,
            memory_bytes: parked_bytes.min(PARKED_MEMORY_MAX),
            disk_bytes: PARKED_DISK_MAX,
            keep_ms: PARTIAL_UPLOAD_KEEP_MS,
        };
        Self(Local::new(Table {
            names: Names::new(limits),
            running: BTreeMap::new(),
            by_blob: HashMap::new(),
            started: 0,
            epoch: rt::time::now(),
            is_swept: false,
        }))
    }
}

impl<D: BlobDisk> Uploads<D> {
    /// Starts anew at offset 0, else goes on where a session stands or was last reported to stand. A running one gives up
    /// its slot to the client that comes back; a parked one is left as it is until there is a slot. What had come before a
    /// start at 0 stays until that has come as far.
    pub async fn open(&self, worker: &Worker<D>, key: UploadKey, offset: u64) -> Result<UploadHandle, StoreError> {
        let decoder = decoder_for(worker, key.digest, key.encoding).await?;
        let held = limits::write_held_len(key.digest.size);
        if offset == 0 {
            let slot = worker.enter_write(held).await?;
            let session = Session::new(key.digest, decoder);
            return self.start(worker, Rc::new(key), session, slot);
        }
        let mut slot = None;
        for _ in 0..TAKE_OVER_TRIES {
            match (self.0.with(|table| table.names.find(&key, offset)), slot.take()) {
                (Found::Parked(ticket), Some(slot)) => {
                    let taken = self.0.with(|table| table.names.take(&key, ticket));
                    let Some(mut session) = taken else { continue };
                    session.resume(offset, decoder);
                    return self.start(worker, Rc::new(key), session, slot);
                }
                (Found::Parked(_), None) => slot = Some(worker.enter_write(held).await?),
                (Found::Running(running), _) => {
                    let ended = running.ended.wait();
                    running.is_wanted.set(true);
                    running.wanted.notify();
                    ended.await;
                }
                (Found::Nowhere { committed }, _) => return Err(StoreError::WriteOffset { given: offset, committed }),
            }
        }
        // Several streams take the same upload from each other.
        Err(StoreError::TakenOver)
    }

    /// Ends uploads whose clients have sent nothing for some time, for the sake of those who wait for a slot, and of
    /// `for_memory` others who wait for memory: one for each of them. They are parked, to be resumed.
    pub fn yield_idle(&self, gate: &WriteGate, for_memory: usize, now: Instant) {
        let idle_min = gate.limits().idle;
        let wanted = (gate.stats().waiting as usize + for_memory).max(1);
        let is_idle = |running: &Rc<Running>| {
            let idle = running.idle_since.get().map(|since| now.saturating_duration_since(since));
            idle.is_some_and(|idle| idle >= idle_min) && !running.is_to_yield.get()
        };
        let idle: Vec<_> =
            self.0.with(|table| table.running.values().filter(|one| is_idle(one)).take(wanted).cloned().collect());
        for running in idle {
            gate.note_yielded();
            running.is_to_yield.set(true);
            running.wanted.notify();
        }
    }

    /// Somebody is about to be refused for want of disk space: frees what is parked, and ends uploads that stand still, the
    /// half that has stood longest. They are parked, and freed when that was not enough.
    pub fn give_way(&self, gate: &WriteGate, now: Instant) {
        self.clear();
        let idle_min = gate.limits().idle;
        let mut idle: Vec<(Instant, Rc<Running>)> = self.0.with(|table| {
            let still = |running: &Rc<Running>| {
                let since = running.idle_since.get().filter(|_| !running.is_to_yield.get())?;
                (now.saturating_duration_since(since) >= idle_min).then(|| (since, running.clone()))
            };
            table.running.values().filter_map(still).collect()
        });
        idle.sort_by_key(|(since, _)| *since);
        let count = idle.len().div_ceil(2).max(GIVE_WAY_MIN);
        for (_, running) in idle.into_iter().take(count) {
            gate.note_yielded();
            running.is_to_yield.set(true);
            running.wanted.notify();
        }
    }

    /// A blob has been stored: all who still upload it end, also those who wait for their client.
    pub fn note_stored(&self, blob: &Key) {
        let uploads = self.0.with(|table| table.by_blob.get(blob).cloned());
        for running in uploads.into_iter().flatten() {
            running.is_stored.set(true);
            running.wanted.notify();
        }
    }

    /// Raw bytes that the session has; the client may go on from there.
    pub fn report(&self, key: &UploadKey) -> u64 {
        let (committed, left) = self.0.with(|table| table.names.report(key));
        drop(left);
        committed
    }

    /// How many interrupted uploads are kept.
    pub fn parked(&self) -> usize {
        self.0.with(|table| table.names.parked().0)
    }

    /// Bytes of memory that they hold.
    pub fn parked_bytes(&self) -> usize {
        self.0.with(|table| table.names.parked().1.memory_bytes)
    }

    /// Frees all interrupted uploads.
    pub fn clear(&self) {
        let left = self.0.with(|table| table.names.free_overdue(u64::MAX));
        drop(left);
    }

    /// Makes `session` the running one of `key`. Of those before it the furthest stays as its elder; of the others one that
    /// was parked is freed, and one that runs goes on without a name.
    fn start(
        &self,
        worker: &Worker<D>,
        key: Rc<UploadKey>,
        session: Session<D>,
        slot: Admitted,
    ) -> Result<UploadHandle, StoreError> {
        let running = Rc::new(Running::new(worker.cas_key(&key.digest), session.committed()));
        let (messages, inbox) = channel::bounded(1);
        // Room for the acknowledgements of 2 writes and for the reason of an end.
        let (ack_to, acks) = channel::bounded(2);
        let number = self.0.with(|table| {
            table.started += 1;
            table.started
        });
        let place = Place { worker: worker.clone(), key: key.clone(), number, running: running.clone() };
        let task = Task { session, slot, place, ack_to };
        // A panic in it is told to the handle, which gets no answer.
        let task = rt::contain(task.run(inbox));
        let gate = worker.gate();
        // Why not all: a small blob is at most one slice of work, and between two queues it costs a third more.
        let entered = if is_small(&key.digest) { gate.spawn(task) } else { gate.spawn_bulk(task) };
        if !entered {
            return Err(StoreError::Stopping);
        }
        let left = self.0.with(|table| {
            table.running.insert(number, running.clone());
            table.by_blob.entry(running.blob).or_default().push(running.clone());
            table.names.give(key, running)
        });
        drop(left);
        Ok(UploadHandle { messages, acks, gathered: Vec::new(), gathered_len: 0, unacked: VecDeque::new() })
    }

    /// Sees to it that parked uploads go when their time is over.
    fn sweep(&self) {
        let starts = self.0.with(|table| !std::mem::replace(&mut table.is_swept, true));
        if !starts {
            return;
        }
        let uploads = self.clone();
        rt::spawn(async move {
            while let Some(wait_ms) = uploads.0.with(|table| table.wait_ms()) {
                rt::time::sleep(Duration::from_millis(wait_ms)).await;
                let left = uploads.0.with(|table| table.names.free_overdue(table.now_ms()));
                drop(left);
            }
            uploads.0.with(|table| table.is_swept = false);
        });
    }
}

impl<D: BlobDisk> Table<D> {
    fn now_ms(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// How long until the next deadline; `None` when nothing is parked.
    fn wait_ms(&self) -> Option<u64> {
        self.names.deadline_ms().map(|deadline| deadline.saturating_sub(self.now_ms()).max(1))
    }

    /// Takes out of the running ones.
    fn forget(&mut self, number: u64, running: &Rc<Running>) {
        self.running.remove(&number);
        if let hash_map::Entry::Occupied(mut uploads) = self.by_blob.entry(running.blob) {
            uploads.get_mut().retain(|upload| !Rc::ptr_eq(upload, running));
            if uploads.get().is_empty() {
                uploads.remove();
            }
        }
    }
}

/// Where a running upload stands among those of its core. Dropping it, however the upload ends, takes it out.
struct Place<D: BlobDisk> {
    worker: Worker<D>,
    key: Rc<UploadKey>,
    number: u64,
    running: Rc<Running>,
}

impl<D: BlobDisk> Place<D> {
    /// Keeps what has arrived of an upload that was cut off, if it still has its name.
    fn park(self, mut session: Session<D>) {
        session.park();
        let left = self.worker.uploads().0.with(|table| {
            let now_ms = table.now_ms();
            table.names.park(&self.key, &self.running, session, now_ms)
        });
        drop(left);
        self.worker.uploads().sweep();
    }
}

impl<D: BlobDisk> Drop for Place<D> {
    fn drop(&mut self) {
        let left = self.worker.uploads().0.with(|table| {
            table.forget(self.number, &self.running);
            table.names.end(&self.key, &self.running)
        });
        drop(left);
        self.running.ended.notify();
    }
}

/// The owner's side of one running upload. Its parts go in this order: who sees that it has ended may count on its slot.
struct Task<D: BlobDisk> {
    session: Session<D>,
    slot: Admitted,
    place: Place<D>,
    ack_to: Sender<UploadAck>,
}

impl<D: BlobDisk> Task<D> {
    async fn run(mut self, mut inbox: Receiver<UploadMessage>) {
        loop {
            let wanted = self.place.running.wanted.wait();
            if self.place.running.is_wanted.get() {
                self.ack(Err(UploadEnd::Failed(StoreError::TakenOver)));
                return self.park();
            }
            if self.place.running.is_to_yield.get() {
                self.ack(Err(UploadEnd::Failed(StoreError::Yielded)));
                return self.park();
            }
            if self.place.running.is_stored.take()
                && let Err(end) = self.check_absent().await
            {
                self.ack(Err(end));
                return;
            }
            self.place.running.idle_since.set(Some(rt::time::now()));
            let next = rt::time::race(inbox.recv(), wanted).await;
            self.place.running.idle_since.set(None);
            match next {
                Either::Right(()) => {}
                Either::Left(None) => return self.park(),
                Either::Left(Some(UploadMessage::Write(data))) => {
                    let consumed = self.consume(data).await;
                    let has_ended = consumed.is_err();
                    self.ack(consumed);
                    if has_ended {
                        return;
                    }
                }
                Either::Left(Some(UploadMessage::Finish { data, reply })) => return self.finish(data, reply).await,
                Either::Left(Some(UploadMessage::Suspend { data, reply })) => return self.suspend(data, reply).await,
            }
        }
    }

    async fn finish(mut self, data: Vec<Bytes>, reply: ReplyTo<Result<PutOutcome, StoreError>>) {
        let consumed = self.consume(data).await;
        let Self { session, slot, place, ack_to: _ack_to } = self;
        let outcome = match consumed {
            Ok(()) => session.finish(&place.worker).await,
            Err(UploadEnd::AlreadyPresent) => Ok(PutOutcome::AlreadyPresent),
            Err(UploadEnd::Failed(error)) => Err(error),
        };
        // Why before the answer: who has it may count on the slot.
        drop((place, slot));
        reply.send(outcome);
    }

    async fn suspend(mut self, data: Vec<Bytes>, reply: ReplyTo<Result<u64, UploadEnd>>) {
        if let Err(end) = self.consume(data).await {
            drop(self);
            return reply.send(Err(end));
        }
        let (uploads, key) = (self.place.worker.uploads().clone(), self.place.key.clone());
        self.park();
        reply.send(Ok(uploads.report(&key)));
    }

    fn park(self) {
        let Self { session, slot, place, .. } = self;
        place.park(session);
        drop(slot);
    }

    async fn consume(&mut self, data: Vec<Bytes>) -> UploadAck {
        self.check_absent().await?;
        self.session.write(&self.place.worker, &data).await.map_err(UploadEnd::Failed)?;
        self.place.running.committed.set(self.session.committed());
        Ok(())
    }

    /// An upload of a blob that is here is over.
    async fn check_absent(&self) -> Result<(), UploadEnd> {
        match self.place.worker.holds(&self.place.key.digest).await {
            Ok(false) => Ok(()),
            Ok(true) => Err(UploadEnd::AlreadyPresent),
            Err(error) => Err(UploadEnd::Failed(error)),
        }
    }

    /// Why there is room: a handle has at most 2 writes on their way. A handle that is gone needs no answer.
    fn ack(&mut self, ack: UploadAck) {
        let _ = self.ack_to.try_send(ack);
    }
}

/// Uploads that give way at a time when space is short, at least.
const GIVE_WAY_MIN: usize = 8;
/// How often an upload asks a running one for its session before it gives up.
const TAKE_OVER_TRIES: u32 = 6;
