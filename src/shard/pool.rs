//! The global pool of segments on core 0, and each core's port to it.
//!
//! Cores ask for segments and report what became of them; the pool answers, and orders the owners of the oldest segments
//! to empty them. Only background tasks of a core talk to the pool, and the pool waits for nobody.

use std::collections::HashMap;
use std::time::Duration;

use super::geometry::Volume;
use crate::limits::POOL_QUEUE_LEN;
use crate::pure::eviction::{Lease, Order, Outcome, Pool, RECLAIMS_MAX, Step, Waiter, epochs_at_start};
use crate::pure::recency::Epoch;
use crate::pure::segment::Class;
use crate::pure::shard_map::{CoreId, ShardId, ShardMap};
use crate::rt::channel::{Receiver, ReplyTo, Sender, bounded};
use crate::rt::time::{Either, race, sleep};

/// What a core tells the pool.
pub(super) enum ToPool {
    /// Waits for a segment; `None`: none can be freed.
    Ask { shard: ShardId, class: Class, reply: ReplyTo<Option<Lease>> },
    /// For a reclaim that copies forward: answered at once.
    AskForReclaim { shard: ShardId, class: Class, reply: ReplyTo<Option<Lease>> },
    /// An order has ended.
    Reclaimed { segment: u32, outcome: Outcome },
    /// A segment comes back unasked.
    Returned { segment: u32, outcome: Outcome },
}

/// What the pool tells a core.
pub(super) enum FromPool {
    Reclaim(Order),
    /// A new epoch has begun.
    Epoch(Epoch),
    /// Somebody is about to be refused: what holds space and does nothing is to give it back.
    Pressure,
}

/// The pool itself: to be run on core 0.
pub struct PoolMain {
    pool: Pool,
    map: ShardMap,
    requests: Receiver<ToPool>,
    cores: Vec<ToCore>,
    replies: HashMap<u64, ReplyTo<Option<Lease>>>,
    next_id: u64,
    /// How often the cores were pressed since a segment was granted, and whether they have had time to answer.
    pressed: u32,
    may_press: bool,
}

/// The pool's connection to one core.
struct ToCore {
    sender: Sender<FromPool>,
    /// The last epoch that the core was told.
    told: Epoch,
}

/// One core's connection to the pool. `Send`: made at boot, handed to the core, given to `Disk::open`.
pub struct PoolPort {
    pub(super) requests: Sender<ToPool>,
    pub(super) messages: Receiver<FromPool>,
    /// The epoch now, and those in which the segments of the core's shards were leased.
    pub(super) epoch: Epoch,
    pub(super) leased_in: HashMap<u32, Epoch>,
}

/// How long a refused upload has to give its space back before another is refused; also what was pressed to do so.
const REFUSAL_PAUSE: Duration = Duration::from_millis(30);
/// How often the cores are pressed to give back space before somebody is refused. Why more than once: the first time parks
/// uploads that stand still, the next one frees them.
const PRESSES_MAX: u32 = 3;

/// Makes the pool for `volume` and the ports for `cores` cores.
pub fn wire(volume: &Volume, cores: usize) -> (PoolMain, Vec<PoolPort>) {
    let map = ShardMap::new(volume.shards(), u16::try_from(cores).expect("fewer cores than 65536"));
    let leased = volume.headers().iter().flatten().map(|header| Lease {
        segment: header.segment,
        shard: header.shard,
        class: header.class,
        generation: header.generation,
    });
    let pool = Pool::new(volume.segment_count(), leased.clone());
    let (sender, requests) = bounded(POOL_QUEUE_LEN);
    let (leased, epoch) = epochs_at_start(volume.segment_count(), leased);
    let mut leased_in = vec![HashMap::new(); cores];
    for (lease, epoch) in leased {
        leased_in[usize::from(map.core_of(lease.shard).0)].insert(lease.segment, epoch);
    }
    let (cores, ports) = leased_in
        .into_iter()
        .map(|leased_in| {
            // Room for every order that can be out, for an epoch and for pressure.
            let (to_core, messages) = bounded(RECLAIMS_MAX + 2);
            let port = PoolPort { requests: sender.clone(), messages, epoch, leased_in };
            (ToCore { sender: to_core, told: epoch }, port)
        })
        .unzip();
    let main =
        PoolMain { pool, map, requests, cores, replies: HashMap::new(), next_id: 0, pressed: 0, may_press: true };
    (main, ports)
}

impl PoolMain {
    /// Serves until every port is gone. Run it on core 0, in the background.
    pub async fn run(mut self) {
        let mut paused = false;
        loop {
            let message = if paused {
                match race(self.requests.recv(), sleep(REFUSAL_PAUSE)).await {
                    Either::Left(message) => message.map(Some),
                    Either::Right(()) => Some(None),
                }
            } else {
                self.requests.recv().await.map(Some)
            };
            match message {
                None => return,
                Some(None) => (paused, self.may_press) = (false, true),
                Some(Some(message)) => {
                    // What came back may be enough for those who still wait.
                    paused &= !matches!(message, ToPool::Returned { .. });
                    self.take(message);
                }
            }
            self.forget_withdrawn();
            while !paused {
                let Some(step) = self.pool.next_step() else { break };
                paused = self.carry_out(step);
            }
            self.tell_epoch();
        }
    }

    /// Forgets who has found room elsewhere.
    fn forget_withdrawn(&mut self) {
        let Self { pool, replies, .. } = self;
        replies.retain(|id, reply| {
            let stays = !reply.is_abandoned();
            if !stays {
                pool.withdraw(*id);
            }
            stays
        });
    }

    /// Tells the cores what epoch it is. One that has no room is told after the next message.
    fn tell_epoch(&mut self) {
        let now = self.pool.epoch();
        for core in self.cores.iter_mut().filter(|core| core.told != now) {
            if core.sender.try_send(FromPool::Epoch(now)).is_ok() {
                core.told = now;
            }
        }
    }

    fn take(&mut self, message: ToPool) {
        match message {
            ToPool::Ask { shard, class, reply } => {
                let id = self.next_id;
                self.next_id += 1;
                self.replies.insert(id, reply);
                self.pool.ask(Waiter { id, shard, class });
            }
            ToPool::AskForReclaim { shard, class, reply } => reply.send(self.pool.lease_for_reclaim(shard, class)),
            ToPool::Reclaimed { segment, outcome } => self.pool.reclaimed(segment, outcome),
            ToPool::Returned { segment, outcome } => self.pool.returned(segment, outcome),
        }
    }

    /// Before anybody is refused the cores are pressed to give back space, a few times. False when that has been done.
    fn press(&mut self) -> bool {
        if self.pressed >= PRESSES_MAX {
            return false;
        }
        if std::mem::replace(&mut self.may_press, false) {
            self.pressed += 1;
            // A core that has no room has enough to do.
            self.cores.iter_mut().for_each(|core| drop(core.sender.try_send(FromPool::Pressure)));
        }
        true
    }

    /// True when there is to be a pause: somebody was refused, or is about to be.
    fn carry_out(&mut self, step: Step) -> bool {
        match step {
            Step::Grant(waiter, lease) => {
                self.pressed = 0;
                let taken = self.replies.remove(&waiter.id).map(|reply| reply.offer(Some(lease)));
                if !matches!(taken, Some(Ok(()))) {
                    self.pool.returned(lease.segment, Outcome::Freed);
                }
                false
            }
            Step::Refuse(waiter) if self.press() => {
                self.pool.ask(waiter);
                true
            }
            Step::Refuse(waiter) => {
                self.pressed = 0;
                if let Some(reply) = self.replies.remove(&waiter.id) {
                    reply.send(None);
                }
                true
            }
            Step::Reclaim(order) => {
                let CoreId(core) = self.map.core_of(order.shard);
                // The channel has room for all orders that can be out; a core that is gone keeps its segments.
                if self.cores[usize::from(core)].sender.try_send(FromPool::Reclaim(order)).is_err() {
                    self.pool.reclaimed(order.segment, Outcome::Pinned);
                }
                false
            }
        }
    }
}

#[cfg(test)]
mod tests;
