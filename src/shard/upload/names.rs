//! What stands under the names of uploads: where a client may go on, and what is kept of uploads that were cut off.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

use crate::pure::parking::{Cost, Parking, ParkingLimits, Ticket};
use crate::pure::record::Key;
use crate::rt::local::Event;
use crate::shard::blob_disk::BlobDisk;
use crate::shard::session::Session;
use crate::store::UploadKey;

/// What a change of names leaves over. Whoever gets it drops it when nothing is borrowed: a session gives back its space.
pub type Leftover<D> = Vec<(Rc<UploadKey>, Session<D>)>;

/// Memory of a parked session besides its bytes and its name, in bytes.
const PARKED_OVERHEAD: usize = 1024;

/// The names of one core's uploads.
pub struct Names<D: BlobDisk> {
    by_key: HashMap<Rc<UploadKey>, Named>,
    parking: Parking<(Rc<UploadKey>, Session<D>)>,
}

/// What stands under one name. Invariant: at most one is parked, and it is further than what stands beside it.
struct Named {
    /// The last that was opened.
    current: Entry,
    /// One that was further when the current one began anew at 0, until that has come as far. Why: committed_size never
    /// falls (bytestream.proto), and who is told it may go on there.
    elder: Option<Entry>,
    /// What `report` last said.
    reported: u64,
}

enum Entry {
    Running(Rc<Running>),
    Parked(Ticket),
}

/// What others may know of a running upload, and ask of it.
pub struct Running {
    pub blob: Key,
    /// Raw bytes consumed.
    pub committed: Cell<u64>,
    /// Somebody wants to take over: the session is to be parked.
    pub is_wanted: Cell<bool>,
    /// Somebody else is to have its slot.
    pub is_to_yield: Cell<bool>,
    /// The blob has been stored, by this upload or another one.
    pub is_stored: Cell<bool>,
    pub wanted: Event,
    pub ended: Event,
    /// Since when it waits for its client.
    pub idle_since: Cell<Option<Instant>>,
}

impl Running {
    pub fn new(blob: Key, committed: u64) -> Self {
        Self {
            blob,
            committed: Cell::new(committed),
            is_wanted: Cell::default(),
            is_to_yield: Cell::default(),
            is_stored: Cell::default(),
            wanted: Event::default(),
            ended: Event::default(),
            idle_since: Cell::default(),
        }
    }
}

/// What an upload that wants to go on at some offset finds.
pub enum Found {
    Parked(Ticket),
    Running(Rc<Running>),
    Nowhere { committed: u64 },
}

impl<D: BlobDisk> Names<D> {
    pub fn new(limits: ParkingLimits) -> Self {
        Self { by_key: HashMap::new(), parking: Parking::new(limits) }
    }

    /// How many are parked, and what they cost.
    pub fn parked(&self) -> (usize, Cost) {
        (self.parking.len(), self.parking.held())
    }

    /// When the next parked one's time is over.
    pub fn deadline_ms(&self) -> Option<u64> {
        self.parking.deadline_ms()
    }

    /// Raw bytes of the upload that is furthest: the client may go on from there.
    pub fn report(&mut self, key: &UploadKey) -> (u64, Leftover<D>) {
        let left = self.settle(key);
        let Some(named) = self.by_key.get_mut(key) else { return (0, left) };
        named.reported = named.elder.as_ref().unwrap_or(&named.current).committed(&self.parking);
        (named.reported, left)
    }

    /// The upload that may go on at `offset`: where one stands, or was last reported to stand.
    pub fn find(&mut self, key: &UploadKey, offset: u64) -> Found {
        let Some(Named { current, elder, reported }) = self.by_key.get_mut(key) else {
            return Found::Nowhere { committed: 0 };
        };
        let mut furthest = 0;
        for entry in elder.iter().chain([&*current]) {
            let committed = entry.committed(&self.parking);
            if offset == committed || (offset == *reported && offset < committed) {
                // Until a running one has ended it may go on: the offset stays good.
                *reported = offset;
                return match entry {
                    Entry::Running(running) => Found::Running(running.clone()),
                    Entry::Parked(ticket) => Found::Parked(*ticket),
                };
            }
            furthest = furthest.max(committed);
        }
        Found::Nowhere { committed: furthest }
    }

    /// Takes a parked one back.
    pub fn take(&mut self, key: &UploadKey, ticket: Ticket) -> Option<Session<D>> {
        let (_, session) = self.parking.take(ticket)?;
        self.remove(key, |entry| entry.ticket() == Some(ticket));
        Some(session)
    }

    /// Gives the name to one that begins. Of those before it the furthest stays as its elder, if it is further; of the others
    /// one that is parked goes, and one that runs goes on without a name.
    pub fn give(&mut self, key: Rc<UploadKey>, running: Rc<Running>) -> Leftover<D> {
        let begun_at = running.committed.get();
        let (mut before, mut reported) = (Vec::new(), 0);
        if let Some(named) = self.by_key.remove(&key) {
            reported = named.reported;
            before.extend(named.elder);
            before.push(named.current);
        }
        before.sort_by_key(|entry| entry.committed(&self.parking));
        let elder = before.pop_if(|furthest| furthest.committed(&self.parking) > begun_at);
        self.by_key.insert(key, Named { current: Entry::Running(running), elder, reported });
        before.iter().filter_map(|entry| self.parking.take(entry.ticket()?)).collect()
    }

    /// Keeps what has arrived of a running one that was cut off, if it still has its name and nobody else has come as far.
    pub fn park(
        &mut self,
        key: &Rc<UploadKey>,
        running: &Rc<Running>,
        session: Session<D>,
        now_ms: u64,
    ) -> Leftover<D> {
        let named = self.by_key.get_mut(key);
        let slot = named
            .and_then(|named| [&mut named.current].into_iter().chain(&mut named.elder).find(|one| one.is(running)));
        let Some(slot) = slot else { return vec![(key.clone(), session)] };
        if session.committed() == 0 || key.is_unnamed() {
            self.forget(key, running);
            return vec![(key.clone(), session)];
        }
        let (memory_bytes, disk_bytes) = session.held();
        let name_len = key.instance.len() + key.uuid.len();
        let cost = Cost { memory_bytes: memory_bytes + PARKED_OVERHEAD + name_len, disk_bytes };
        let ticket = self.parking.park((key.clone(), session), cost, now_ms);
        *slot = Entry::Parked(ticket);
        let mut left = self.settle(key);
        left.extend(self.free_overdue(now_ms));
        left
    }

    /// One that ran has ended.
    pub fn end(&mut self, key: &UploadKey, running: &Rc<Running>) -> Leftover<D> {
        let left = self.settle(key);
        self.forget(key, running);
        left
    }

    /// Takes out what is parked too long or too much.
    pub fn free_overdue(&mut self, now_ms: u64) -> Leftover<D> {
        let mut left = Vec::new();
        while let Some((key, session)) = self.parking.overdue(now_ms) {
            self.remove(&key, |entry| entry.ticket().is_some());
            left.push((key, session));
        }
        left
    }

    /// Lets an elder go when the current one has come as far; else the current one, if it is parked: who goes on does so with
    /// the elder.
    fn settle(&mut self, key: &UploadKey) -> Leftover<D> {
        let Some(named) = self.by_key.get_mut(key) else { return Vec::new() };
        let Some(elder) = named.elder.take() else { return Vec::new() };
        let gone = if named.current.committed(&self.parking) >= elder.committed(&self.parking) {
            elder
        } else if named.current.ticket().is_some() {
            std::mem::replace(&mut named.current, elder)
        } else {
            named.elder = Some(elder);
            return Vec::new();
        };
        Vec::from_iter(gone.ticket().and_then(|ticket| self.parking.take(ticket)))
    }

    fn forget(&mut self, key: &UploadKey, running: &Rc<Running>) {
        self.remove(key, |entry| entry.is(running));
    }

    /// Takes the name from an entry. One that stood beside it keeps it.
    fn remove(&mut self, key: &UploadKey, is_meant: impl Fn(&Entry) -> bool) {
        let Some(named) = self.by_key.get_mut(key) else { return };
        if named.elder.as_ref().is_some_and(&is_meant) {
            named.elder = None;
        } else if is_meant(&named.current) {
            match named.elder.take() {
                Some(elder) => named.current = elder,
                None => drop(self.by_key.remove(key)),
            }
        }
    }
}

impl Entry {
    fn is(&self, running: &Rc<Running>) -> bool {
        matches!(self, Self::Running(one) if Rc::ptr_eq(one, running))
    }

    fn ticket(&self) -> Option<Ticket> {
        match self {
            Self::Running(_) => None,
            Self::Parked(ticket) => Some(*ticket),
        }
    }

    /// Raw bytes consumed.
    fn committed<D: BlobDisk>(&self, parking: &Parking<(Rc<UploadKey>, Session<D>)>) -> u64 {
        match self {
            Self::Running(running) => running.committed.get(),
            Self::Parked(ticket) => parking.get(*ticket).map_or(0, |(_, session)| session.committed()),
        }
    }
}
