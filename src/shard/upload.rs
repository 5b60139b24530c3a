//! Upload sessions of one core: who may write to which, and what is kept of those that were cut off.
//!
//! Every running upload is a task on the owner core; its handle, on any core, talks to it through a channel. When the
//! handle goes away, the task parks what has arrived. A client that comes back on another connection, before the old one
//! is known to be dead, takes the session over.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::blob_disk::BlobDisk;
use super::protocol::{UploadAck, UploadMessage};
use super::session::Session;
use super::worker::{Worker, cas_key};
use crate::limits::{
    PARKED_DISK_MAX, PARKED_MEMORY_MAX, PARKED_UPLOADS_MAX, PARTIAL_UPLOAD_KEEP_MS, UPLOAD_MESSAGE_LEN,
};
use crate::pure::parking::{Cost, Parking, ParkingLimits, Ticket};
use crate::rt;
use crate::rt::channel::{self, Receiver, Sender};
use crate::rt::local::{Event, Local};
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
    /// Messages that the owner has not consumed: at most 2 at any time.
    unacked: u32,
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
        let ahead = u32::from(self.gathered_len < 2 * UPLOAD_MESSAGE_LEN);
        let message = UploadMessage::Write(self.take_gathered());
        if self.messages.send(message).await.is_err() {
            return Err(self.end().await);
        }
        self.unacked += 1;
        while self.unacked > ahead {
            match self.acks.recv().await {
                Some(ack) => ack?,
                None => return Err(UploadEnd::Failed(StoreError::Stopping)),
            }
            self.unacked -= 1;
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<PutOutcome, StoreError> {
        let (reply_to, reply) = channel::reply();
        let message = UploadMessage::Finish { data: self.take_gathered(), reply: reply_to };
        if self.messages.send(message).await.is_ok()
            && let Ok(outcome) = reply.recv().await
        {
            return outcome;
        }
        match self.end().await {
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
        Err(self.end().await)
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
    fn take_gathered(&mut self) -> Vec<Bytes> {
        self.gathered_len = 0;
        std::mem::take(&mut self.gathered)
    }

    /// Why the owner ended the upload.
    async fn end(&mut self) -> UploadEnd {
        loop {
            match self.acks.recv().await {
                Some(Ok(())) => {}
                Some(Err(end)) => return end,
                None => return UploadEnd::Failed(StoreError::Stopping),
            }
        }
    }
}

/// The sessions of one core. Clones share them.
pub struct Uploads<D: BlobDisk>(Local<Table<D>>);

struct Table<D: BlobDisk> {
    by_key: HashMap<Rc<UploadKey>, Entry>,
    parking: Parking<(Rc<UploadKey>, Session<D>)>,
    /// When milliseconds count from.
    epoch: Instant,
    /// A task waits for the next deadline.
    is_swept: bool,
}

#[derive(Clone)]
enum Entry {
    Running(Rc<Running>),
    Parked {
        ticket: Ticket,
        /// What `report` last said.
        reported: u64,
    },
}

/// What others may know of a running upload, and ask of it.
#[derive(Default)]
struct Running {
    /// Raw bytes consumed.
    committed: Cell<u64>,
    /// What `report` last said.
    reported: Cell<u64>,
    /// Somebody wants to take over: the session is to be parked.
    is_wanted: Cell<bool>,
    wanted: Event,
    ended: Event,
}

/// What an upload that wants to go on at some offset finds.
enum Found<S> {
    Session(S),
    Running(Rc<Running>),
    Nowhere { committed: u64 },
}

impl<D: BlobDisk> Clone for Uploads<D> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<D: BlobDisk> Default for Uploads<D> {
    fn default() -> Self {
        let limits = ParkingLimits {
            count: PARKED_UPLOADS_MAX,
            memory_bytes: PARKED_MEMORY_MAX,
            disk_bytes: PARKED_DISK_MAX,
            keep_ms: PARTIAL_UPLOAD_KEEP_MS,
        };
        let parking = Parking::new(limits);
        Self(Local::new(Table { by_key: HashMap::new(), parking, epoch: rt::time::now(), is_swept: false }))
    }
}

impl<D: BlobDisk> Uploads<D> {
    /// Starts anew at offset 0, else goes on where a session stands or was last reported to stand.
    pub async fn open(&self, worker: &Worker<D>, key: UploadKey, offset: u64) -> Result<UploadHandle, StoreError> {
        if offset == 0 {
            let session = Session::new(worker, key.digest, key.encoding);
            return self.start(worker, Rc::new(key), session);
        }
        for _ in 0..TAKE_OVER_TRIES {
            match self.find(&key, offset) {
                Found::Session(mut session) => {
                    session.resume(worker, offset);
                    return self.start(worker, Rc::new(key), session);
                }
                Found::Running(running) => {
                    let ended = running.ended.wait();
                    running.is_wanted.set(true);
                    running.wanted.notify();
                    ended.await;
                }
                Found::Nowhere { committed } => return Err(StoreError::WriteOffset { given: offset, committed }),
            }
        }
        // Several streams take the same upload from each other.
        Err(StoreError::TakenOver)
    }

    /// Raw bytes that the session has; the client may go on from there.
    pub fn report(&self, key: &UploadKey) -> u64 {
        self.0.with(|table| {
            let Table { by_key, parking, .. } = table;
            match by_key.get_mut(key) {
                None => 0,
                Some(Entry::Running(running)) => {
                    running.reported.set(running.committed.get());
                    running.committed.get()
                }
                Some(Entry::Parked { ticket, reported }) => {
                    *reported = parking.get(*ticket).map_or(0, |(_, session)| session.committed());
                    *reported
                }
            }
        })
    }

    /// How many interrupted uploads are kept.
    pub fn parked(&self) -> usize {
        self.0.with(|table| table.parking.len())
    }

    /// Frees all interrupted uploads.
    pub fn clear(&self) {
        let freed = self.0.with(|table| table.free_overdue(u64::MAX));
        drop(freed);
    }

    /// Finds the session of `key`, if it may go on at `offset`. A parked one is taken out.
    fn find(&self, key: &UploadKey, offset: u64) -> Found<Session<D>> {
        self.0.with(|table| match table.by_key.get(key).cloned() {
            None => Found::Nowhere { committed: 0 },
            Some(Entry::Running(running)) => match (running.committed.get(), running.reported.get()) {
                (committed, reported) if offset != committed && offset != reported => Found::Nowhere { committed },
                _ => {
                    // Until it has ended it may go on: the offset stays good.
                    running.reported.set(offset);
                    Found::Running(running)
                }
            },
            Some(Entry::Parked { ticket, reported }) => {
                let committed = table.parking.get(ticket).map_or(0, |(_, session)| session.committed());
                if offset != committed && offset != reported {
                    return Found::Nowhere { committed };
                }
                table.by_key.remove(key);
                match table.parking.take(ticket) {
                    Some((_, session)) => Found::Session(session),
                    None => Found::Nowhere { committed: 0 },
                }
            }
        })
    }

    /// Makes `session` the running one of `key`. One that was parked is freed; one that runs goes on without a name.
    fn start(&self, worker: &Worker<D>, key: Rc<UploadKey>, session: Session<D>) -> Result<UploadHandle, StoreError> {
        let running = Rc::new(Running::default());
        running.committed.set(session.committed());
        let (messages, inbox) = channel::bounded(1);
        // Room for the acknowledgements of 2 writes and for the reason of an end.
        let (ack_to, acks) = channel::bounded(2);
        let task = Task { worker: worker.clone(), key: key.clone(), running: running.clone(), session, ack_to };
        if !worker.gate().spawn(task.run(inbox)) {
            return Err(StoreError::Stopping);
        }
        let replaced = self.0.with(|table| match table.by_key.insert(key, Entry::Running(running)) {
            Some(Entry::Parked { ticket, .. }) => table.parking.take(ticket),
            Some(Entry::Running(_)) | None => None,
        });
        drop(replaced);
        Ok(UploadHandle { messages, acks, gathered: Vec::new(), gathered_len: 0, unacked: 0 })
    }

    /// Forgets a running upload that has ended.
    fn end(&self, key: &Rc<UploadKey>, running: &Rc<Running>) {
        self.0.with(|table| {
            if table.is_current(key, running) {
                table.by_key.remove(key);
            }
        });
        running.ended.notify();
    }

    /// Keeps what has arrived of a running upload that was cut off, if it still has its name.
    fn park(&self, key: Rc<UploadKey>, running: &Rc<Running>, mut session: Session<D>) {
        session.park();
        let (memory_bytes, disk_bytes) = session.held();
        let cost =
            Cost { memory_bytes: memory_bytes + PARKED_OVERHEAD + key.instance.len() + key.uuid.len(), disk_bytes };
        let freed = self.0.with(|table| {
            if !table.is_current(&key, running) {
                return vec![(key, session)];
            }
            if session.committed() == 0 {
                table.by_key.remove(&key);
                return vec![(key, session)];
            }
            let now_ms = table.now_ms();
            let ticket = table.parking.park((key.clone(), session), cost, now_ms);
            table.by_key.insert(key, Entry::Parked { ticket, reported: running.reported.get() });
            table.free_overdue(now_ms)
        });
        drop(freed);
        running.ended.notify();
        self.sweep();
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
                let freed = uploads.0.with(|table| table.free_overdue(table.now_ms()));
                drop(freed);
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
        self.parking.deadline_ms().map(|deadline| deadline.saturating_sub(self.now_ms()).max(1))
    }

    fn is_current(&self, key: &UploadKey, running: &Rc<Running>) -> bool {
        matches!(self.by_key.get(key), Some(Entry::Running(current)) if Rc::ptr_eq(current, running))
    }

    /// Takes out what is parked too long or too much. The caller drops it after the borrow.
    fn free_overdue(&mut self, now_ms: u64) -> Vec<(Rc<UploadKey>, Session<D>)> {
        let mut freed = Vec::new();
        while let Some((key, session)) = self.parking.overdue(now_ms) {
            self.by_key.remove(&key);
            freed.push((key, session));
        }
        freed
    }
}

/// The owner's side of one running upload.
struct Task<D: BlobDisk> {
    worker: Worker<D>,
    key: Rc<UploadKey>,
    running: Rc<Running>,
    session: Session<D>,
    ack_to: Sender<UploadAck>,
}

impl<D: BlobDisk> Task<D> {
    async fn run(mut self, mut inbox: Receiver<UploadMessage>) {
        let uploads = self.worker.uploads().clone();
        loop {
            let wanted = self.running.wanted.wait();
            if self.running.is_wanted.get() {
                self.ack(Err(UploadEnd::Failed(StoreError::TakenOver)));
                return uploads.park(self.key, &self.running, self.session);
            }
            match rt::time::race(inbox.recv(), wanted).await {
                Either::Right(()) => {}
                Either::Left(None) => return uploads.park(self.key, &self.running, self.session),
                Either::Left(Some(UploadMessage::Write(data))) => {
                    let consumed = self.consume(data).await;
                    let has_ended = consumed.is_err();
                    self.ack(consumed);
                    if has_ended {
                        return uploads.end(&self.key, &self.running);
                    }
                }
                Either::Left(Some(UploadMessage::Finish { data, reply })) => {
                    let outcome = match self.consume(data).await {
                        Ok(()) => self.session.finish(&self.worker).await,
                        Err(UploadEnd::AlreadyPresent) => Ok(PutOutcome::AlreadyPresent),
                        Err(UploadEnd::Failed(error)) => Err(error),
                    };
                    uploads.end(&self.key, &self.running);
                    return reply.send(outcome);
                }
                Either::Left(Some(UploadMessage::Suspend { data, reply })) => {
                    if let Err(end) = self.consume(data).await {
                        uploads.end(&self.key, &self.running);
                        return reply.send(Err(end));
                    }
                    let key = self.key.clone();
                    uploads.park(self.key, &self.running, self.session);
                    return reply.send(Ok(uploads.report(&key)));
                }
            }
        }
    }

    async fn consume(&mut self, data: Vec<Bytes>) -> UploadAck {
        if self.worker.disk().contains(&cas_key(&self.key.digest)) {
            return Err(UploadEnd::AlreadyPresent);
        }
        self.session.write(&self.worker, &data).await.map_err(UploadEnd::Failed)?;
        self.running.committed.set(self.session.committed());
        Ok(())
    }

    /// Why there is room: a handle has at most 2 writes on their way. A handle that is gone needs no answer.
    fn ack(&mut self, ack: UploadAck) {
        let _ = self.ack_to.try_send(ack);
    }
}

/// Memory of a parked session besides its bytes and its name, in bytes.
const PARKED_OVERHEAD: usize = 1024;
/// How often an upload asks a running one for its session before it gives up.
const TAKE_OVER_TRIES: u32 = 4;
