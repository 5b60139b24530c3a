//! The gate before writes on its owner, and across cores.

use std::time::Duration;

use bytes::Bytes;

use super::cores::on_mesh;
use super::{SplitMix64, digest_of};
use crate::budget::{Claim, Purse};
use crate::limits::{self, FRAME_LEN, ROUTER_REQUESTS_MAX};
use crate::metrics::{Metric, Snapshot};
use crate::pure::admission::Message;
use crate::pure::digest::Digest;
use crate::pure::memory_plan::Use;
use crate::pure::shard_map::{CoreId, ShardMap};
use crate::rt;
use crate::rt::cores::block_on;
use crate::rt::gate::Gate;
use crate::rt::local::Local;
use crate::shard::codec::StorageMode;
use crate::shard::fake_disk::FakeDisk;
use crate::shard::router::{Router, wire};
use crate::shard::worker::{Worker, WorkerConfig};
use crate::shard::write_gate::{WriteGate, WriteLimits};
use crate::store::{Accept, Encoding, Get, Opened, Put, PutOutcome, Store, StoreError, Upload, UploadEnd, UploadKey};

fn put(data: &Bytes) -> Put {
    Put { digest: digest_of(data), encoding: Encoding::Identity, data: vec![data.clone()], admitted: false }
}

fn key(digest: Digest) -> UploadKey {
    UploadKey { instance: "".into(), uuid: "u".into(), digest, encoding: Encoding::Identity }
}

/// One core that lets one write in at a time.
fn narrow(wait: Duration) -> Worker<FakeDisk> {
    let writes = WriteLimits::new(1, wait);
    Worker::new(FakeDisk::default(), WorkerConfig { writes, ..super::worker_config(StorageMode::Zstd, 0) })
}

/// Goal: one slot for four cores serves the writes of all of them, in the end, and is never in use twice. Method: real
/// executors; 200 small writes at once, spread by their digests, and an upload beside them.
#[test]
fn one_slot_goes_round_the_cores() {
    let writes = WriteLimits::new(1, Duration::from_secs(60));
    on_mesh(4, writes, async |store| {
        let stored = Local::new(0);
        let gate = rt::gate::Gate::default();
        for n in 0..200u64 {
            let (store, stored) = (store.clone(), stored.clone());
            gate.spawn(async move {
                assert_eq!(store.put(put(&Bytes::copy_from_slice(&n.to_le_bytes()))).await, Ok(PutOutcome::Stored));
                stored.with(|stored| *stored += 1);
            });
        }
        let large = SplitMix64(1).noise(2 * FRAME_LEN);
        let Ok(Opened::Ready(mut upload)) = store.open_upload(key(digest_of(&large)), 0).await else {
            panic!("it is new, and gets its turn");
        };
        upload.write(vec![large]).await.expect("consumed");
        assert_eq!(upload.finish().await, Ok(PutOutcome::Stored));
        gate.wait_empty().await;
        assert_eq!(stored.with(|stored| *stored), 200);
        let here = store.worker().stats().writes;
        assert!(here.lent > 0 && here.in_flight == 0, "{here:?}");
    });
}

/// Goal: without a wait a slot that is idle elsewhere is found, and a busy one refuses. Method: one slot on four cores;
/// writes one after the other, then while an upload has it.
#[test]
fn an_idle_slot_is_found_without_a_wait() {
    // Why so patient: on a busy machine a core may not run for longer than a server would wait for its answer.
    let writes = WriteLimits { answer: Duration::from_secs(60), ..WriteLimits::new(1, Duration::ZERO) };
    on_mesh(4, writes, async |store| {
        for n in 0..60u64 {
            let outcome = store.put(put(&Bytes::copy_from_slice(&n.to_le_bytes()))).await;
            assert_eq!(outcome, Ok(PutOutcome::Stored), "{n}");
        }
        let large = SplitMix64(1).noise(2 * FRAME_LEN);
        let Ok(Opened::Ready(upload)) = store.open_upload(key(digest_of(&large)), 0).await else { panic!("new") };
        for n in 60..100u64 {
            let outcome = store.put(put(&Bytes::copy_from_slice(&n.to_le_bytes()))).await;
            assert_eq!(outcome, Err(StoreError::Shed { slots: 1, wait_ms: 0 }), "{n}");
        }
        drop(upload);
    });
}

/// Goal: who waits on another core and goes away leaves its queue, so that the slot goes to somebody who is there. Method:
/// an upload has the one slot of its core; a write of another core waits and is dropped; the next one gets it.
#[test]
fn a_wait_on_another_core_ends_with_its_client() {
    on_mesh(2, WriteLimits::new(1, Duration::from_secs(60)), async |store| {
        let large = SplitMix64(1).noise(2 * FRAME_LEN);
        let Ok(Opened::Ready(upload)) = store.open_upload(key(digest_of(&large)), 0).await else { panic!("new") };
        let given_up: Vec<Put> = (0..50u64).map(|n| put(&Bytes::copy_from_slice(&n.to_le_bytes()))).collect();
        let digests = given_up.iter().map(|put| put.digest).collect();
        for given_up in given_up {
            let outcome = rt::time::timeout(Duration::from_millis(2), store.put(given_up)).await;
            assert_eq!(outcome, Err(rt::time::Elapsed));
        }
        drop(upload);
        let last = put(&Bytes::from_static(b"last"));
        assert_eq!(store.put(last).await, Ok(PutOutcome::Stored));
        assert_eq!(store.find_missing(digests).await, Ok(vec![true; 50]), "somebody got a slot who was gone");
    });
}

/// Goal: a blob that is present, and part of an action's result, need no slot; an interrupted upload holds none; one that
/// is resumed takes one, and is kept when it gets none. Method: one slot, no wait, step by step.
#[test]
fn only_writes_in_flight_hold_slots() {
    block_on(async {
        let worker = narrow(Duration::ZERO);
        let (small, large) = (Bytes::from_static(b"small"), SplitMix64(1).noise(2 * FRAME_LEN));
        assert_eq!(worker.put(put(&small)).await, Ok(PutOutcome::Stored));
        let key = key(digest_of(&large));
        let Ok(Opened::Ready(mut upload)) = worker.open_upload(key.clone(), 0).await else { panic!("new") };
        upload.write(vec![large.slice(..FRAME_LEN)]).await.expect("consumed");
        assert_eq!(worker.put(put(&small)).await, Ok(PutOutcome::AlreadyPresent));
        let other = Bytes::from_static(b"other");
        let shed = StoreError::Shed { slots: 1, wait_ms: 0 };
        assert_eq!(worker.put(put(&other)).await, Err(shed.clone()));
        assert_eq!(worker.put(Put { admitted: true, ..put(&other) }).await, Ok(PutOutcome::Stored));
        assert_eq!(upload.suspend().await.expect("parked"), FRAME_LEN as u64);
        assert_eq!(worker.stats().writes.in_flight, 0);

        let third = key_of(b"third");
        let Ok(Opened::Ready(holder)) = worker.open_upload(third, 0).await else { panic!("new") };
        assert_eq!(worker.open_upload(key.clone(), FRAME_LEN as u64).await.err(), Some(shed));
        assert_eq!((worker.stats().parked_uploads, worker.stats().writes.in_flight), (1, 1));
        drop(holder);
        while worker.stats().writes.in_flight > 0 {
            rt::time::yield_once().await;
        }
        let resumed = worker.open_upload(key, FRAME_LEN as u64).await;
        let Ok(Opened::Ready(mut upload)) = resumed else { panic!("it is still there") };
        upload.write(vec![large.slice(FRAME_LEN..)]).await.expect("consumed");
        assert_eq!(upload.finish().await, Ok(PutOutcome::Stored));
        assert_eq!(worker.stats().writes.in_flight, 0);
    });
}

fn key_of(data: &[u8]) -> UploadKey {
    key(digest_of(data))
}

/// Goal: a client that comes back takes the upload and its slot from its own old stream. Method: one slot, no wait.
#[test]
fn a_client_takes_its_own_slot_over() {
    block_on(async {
        let worker = narrow(Duration::ZERO);
        let large = SplitMix64(1).noise(2 * FRAME_LEN);
        let key = key(digest_of(&large));
        let Ok(Opened::Ready(mut old)) = worker.open_upload(key.clone(), 0).await else { panic!("new") };
        old.write(vec![large.slice(..FRAME_LEN)]).await.expect("consumed");
        let committed = worker.upload_status(&key).await.expect("known").committed;
        let Ok(Opened::Ready(mut new)) = worker.open_upload(key, committed).await else { panic!("taken over") };
        assert!(matches!(old.ended().await, UploadEnd::Failed(StoreError::TakenOver)));
        new.write(vec![large.slice(committed as usize..)]).await.expect("consumed");
        assert_eq!(new.finish().await, Ok(PutOutcome::Stored));
    });
}

/// Goal: an upload that stands still gives its slot to one that waits, is told, and can be resumed; without contention it
/// stands as long as it likes. Method: one slot; the clock says when the upload has been idle long enough.
#[test]
fn an_idle_upload_yields_its_slot() {
    block_on(async {
        let idle_time = Duration::from_millis(100);
        let writes = WriteLimits { idle: idle_time, ..WriteLimits::new(1, Duration::from_secs(50)) };
        let config = WorkerConfig { writes, ..super::worker_config(StorageMode::Zstd, 0) };
        let worker = Worker::new(FakeDisk::default(), config);
        let large = SplitMix64(1).noise(2 * FRAME_LEN);
        let key = key(digest_of(&large));
        let Ok(Opened::Ready(mut idle)) = worker.open_upload(key.clone(), 0).await else { panic!("new") };
        idle.write(vec![large.slice(..FRAME_LEN)]).await.expect("consumed");
        let small = Bytes::from_static(b"small");
        let begun = rt::time::now();
        assert_eq!(worker.put(put(&small)).await, Ok(PutOutcome::Stored));
        assert!(begun.elapsed() + Duration::from_millis(20) >= idle_time, "not before its time");
        let end = idle.ended().await;
        assert!(matches!(end, UploadEnd::Failed(StoreError::Yielded)), "{end:?}");
        let writes = worker.stats().writes;
        assert_eq!((writes.in_flight, writes.yielded, worker.stats().parked_uploads), (0, 1, 1));
        let Ok(Opened::Ready(mut resumed)) = worker.open_upload(key, FRAME_LEN as u64).await else { panic!("kept") };
        resumed.write(vec![large.slice(FRAME_LEN..)]).await.expect("consumed");
        assert_eq!(resumed.finish().await, Ok(PutOutcome::Stored));
    });
}

/// Goal: an upload that stands still gives its memory to one that waits for it, a small write goes into what large ones leave,
/// and without a wait who finds none is refused. Method: memory for one large upload; the clock says when it has been idle
/// long enough.
#[test]
fn an_idle_upload_yields_its_memory() {
    block_on(async {
        for wait in [Duration::from_secs(50), Duration::ZERO] {
            let writes = WriteLimits { idle: Duration::from_millis(100), ..WriteLimits::new(100, wait) };
            let purse = Purse::alone(limits::WRITE_HELD_LEN * 3 / 2 * 16 / 5);
            let config = WorkerConfig { writes, purse: purse.clone(), ..super::worker_config(StorageMode::Zstd, 0) };
            let worker = Worker::new(FakeDisk::default(), config);
            let blobs = [1, 2, 3].map(|seed| SplitMix64(seed).noise(2 * FRAME_LEN));
            let Ok(Opened::Ready(mut idle)) = worker.open_upload(key_of(&blobs[0]), 0).await else { panic!("new") };
            idle.write(vec![blobs[0].slice(..FRAME_LEN)]).await.expect("consumed");
            assert_eq!(worker.put(put(&Bytes::from_static(b"small"))).await, Ok(PutOutcome::Stored));
            let next = worker.open_upload(key_of(&blobs[1]), 0).await;
            if wait.is_zero() {
                assert_eq!(next.err(), Some(StoreError::Shed { slots: 100, wait_ms: 0 }));
                assert_eq!(worker.stats().writes.shed_memory, 1);
                continue;
            }
            let Ok(Opened::Ready(mut next)) = next else { panic!("new") };
            assert!(matches!(idle.ended().await, UploadEnd::Failed(StoreError::Yielded)));
            assert_eq!((worker.stats().writes.yielded, worker.stats().parked_uploads), (1, 1));
            next.write(vec![blobs[1].clone()]).await.expect("consumed");
            assert_eq!(next.finish().await, Ok(PutOutcome::Stored));
            assert_eq!((worker.stats().writes.in_flight, purse.held(Use::Writes)), (0, 0));
        }
    });
}

/// Goal: writes that wait, for slots and for memory, leave room for reads of other cores, however long they wait. Method: two cores
/// on one executor; the memory for writes is taken, and one core sends the other more writes than it works on at a time, then a
/// read; then there is memory.
#[test]
fn waiting_writes_leave_room_for_reads() {
    block_on(async {
        let map = ShardMap::new(64, 2);
        let writes = WriteLimits::new(limits::WRITE_QUEUE_LEN as u32 / 2, Duration::from_secs(50));
        let purse = Purse::alone(1 << 30);
        let mut ports = wire(2).into_iter();
        let mut start = |core| {
            let config = super::worker_config(StorageMode::Uncompressed, 0);
            let config = WorkerConfig { core, cores: 2, writes, purse: purse.clone(), ..config };
            ports.next().expect("two").start(Worker::new(FakeDisk::default(), config), map)
        };
        let (asking, owner) = (start(0), start(1));
        let taken = purse.grant(Use::Writes, purse.share(Use::Writes), Claim::First { held: 0 }).expect("all of it");
        let blobs = (0..u64::MAX).map(|n| Bytes::copy_from_slice(&n.to_le_bytes()));
        let mut theirs = blobs.filter(|blob| map.core_of_hash(&digest_of(blob).hash) == CoreId(1));
        let (outcomes, gate) = (Local::new([0; 2]), Gate::default());
        for blob in theirs.by_ref().take(3 * ROUTER_REQUESTS_MAX) {
            let (asking, outcomes) = (asking.clone(), outcomes.clone());
            gate.spawn(async move {
                match asking.put(put(&blob)).await {
                    Ok(PutOutcome::Stored) => outcomes.with(|[stored, _]| *stored += 1),
                    Err(StoreError::Shed { .. }) => outcomes.with(|[_, shed]| *shed += 1),
                    other => panic!("{other:?}"),
                }
            });
        }
        // Why not at once: they wait before it is asked for.
        while owner.worker().waiting_writes() < limits::WRITE_QUEUE_LEN {
            rt::time::yield_once().await;
        }
        let other = digest_of(&theirs.next().expect("one more"));
        let read = asking.get(Get::whole(other, Accept::Identity));
        let found = rt::time::timeout(Duration::from_secs(30), read).await.expect("it waits for no write");
        assert!(found.expect("no error").is_none());
        let here = owner.worker().stats().writes;
        let in_line = owner.worker().waiting_writes() - here.waiting as usize;
        assert!(here.waiting > 0 && in_line > 0 && in_line as u64 == here.in_flight, "{here:?}, {in_line} in line");
        drop(taken);
        gate.wait_empty().await;
        let waited = limits::WRITE_QUEUE_LEN;
        assert_eq!(outcomes.with(|all| *all), [waited, 3 * ROUTER_REQUESTS_MAX - waited]);
        assert_eq!((owner.worker().waiting_writes(), owner.worker().stats().writes.in_flight), (0, 0));
    });
}

/// Goal: what cores report at different moments never adds up to more writes than may be in flight, though a slot moves between
/// them meanwhile, and it is nothing at the end. Method: two cores on one executor with a slot each; one reports, then its slot goes
/// to the other, which reports.
#[test]
fn reports_of_different_moments_keep_the_limit() {
    block_on(async {
        let map = ShardMap::new(64, 2);
        let writes = WriteLimits::new(2, Duration::from_secs(50));
        let mut ports = wire(2).into_iter();
        let mut start = |core| {
            let config = super::worker_config(StorageMode::Zstd, 0);
            let worker = Worker::new(FakeDisk::default(), WorkerConfig { core, cores: 2, writes, ..config });
            ports.next().expect("two").start(worker, map)
        };
        let (one, two) = (start(0), start(1));
        let told = |core: &Router<FakeDisk>| {
            let mut told = Snapshot::default();
            core.worker().write_gate().report(&mut told);
            told.total(Metric::WriteSlotsInflight)
        };
        let blobs = (0..u64::MAX).map(|seed| SplitMix64(seed).noise(2 * FRAME_LEN));
        let [mut ones, mut twos] = [0, 1].map(|core| {
            let theirs = blobs.clone().filter(move |blob| map.core_of_hash(&digest_of(blob).hash) == CoreId(core));
            theirs.map(|blob| key(digest_of(&blob)))
        });
        let mut next = |of: u16| if of == 0 { ones.next() } else { twos.next() }.expect("every other one");
        let Ok(Opened::Ready(first)) = one.open_upload(next(0), 0).await else { panic!("a slot") };
        let Ok(Opened::Ready(second)) = two.open_upload(next(1), 0).await else { panic!("a slot") };
        let before = told(&one);
        assert_eq!((before, told(&two)), (1.0, 1.0));
        drop(first);
        let Ok(Opened::Ready(third)) = two.open_upload(next(1), 0).await else { panic!("it is lent") };
        let here = two.worker().stats().writes;
        assert_eq!((here.in_flight, here.borrowed), (2, 1));
        assert_eq!((before + told(&two), told(&one) + told(&two)), (2.0, 2.0));
        drop((second, third));
        while two.worker().stats().writes.in_flight > 0 {
            rt::time::yield_once().await;
        }
        assert_eq!(told(&one) + told(&two), 0.0);
    });
}

/// Goal: limits that change while the server runs are those that writes wait by and are told. Method: a change of both, and a
/// refusal.
#[test]
fn a_refusal_names_the_limits_of_now() {
    block_on(async {
        let gate = WriteGate::new(WriteLimits::new(100, Duration::ZERO), 0, 1);
        gate.set_slots(7);
        gate.set_wait(Duration::from_millis(30));
        assert_eq!(gate.no_memory(), StoreError::Shed { slots: 7, wait_ms: 30 });
        assert_eq!(gate.limits().wait, Duration::from_millis(30));
        let mut counted = Snapshot::default();
        gate.report(&mut counted);
        assert_eq!(counted.total(Metric::WritesShed), 1.0);
    });
}

/// Goal: when space is short, uploads that stand still give theirs back, half of them at a time; others go on. Method: 20
/// uploads; the disk presses until nothing is left to give. The same with a long time to stand still.
#[test]
fn idle_uploads_give_their_space_back() {
    block_on(async {
        for idle in [Duration::ZERO, Duration::from_secs(3600)] {
            let writes = WriteLimits { idle, ..WriteLimits::new(100, Duration::ZERO) };
            let config = WorkerConfig { writes, ..super::worker_config(StorageMode::Uncompressed, 0) };
            let disk = FakeDisk::default();
            let worker = Worker::new(disk.clone(), config);
            let mut uploads = Vec::new();
            for seed in 0..20 {
                let large = SplitMix64(seed).noise(3 * FRAME_LEN);
                let Ok(Opened::Ready(mut upload)) = worker.open_upload(key_of(&large), 0).await else { panic!("new") };
                upload.write(vec![large.slice(..2 * FRAME_LEN)]).await.expect("consumed");
                uploads.push((upload, large));
            }
            while worker.stats().writes.in_flight < 20 || disk.with(|state| state.frames_in_flight) < 40 {
                rt::time::yield_once().await;
            }
            let press = disk.with(|state| state.on_pressure.clone()).expect("the worker wants to know");
            if idle > Duration::ZERO {
                press();
                for (mut upload, large) in uploads {
                    upload.write(vec![large.slice(2 * FRAME_LEN..)]).await.expect("consumed");
                    assert_eq!(upload.finish().await, Ok(PutOutcome::Stored));
                }
                assert_eq!(worker.stats().writes.yielded, 0);
                continue;
            }
            for (parked, ended) in [(10, 10), (8, 18), (2, 20), (0, 20)] {
                press();
                while worker.stats().tasks > 20 - ended {
                    rt::time::yield_once().await;
                }
                assert_eq!((worker.stats().parked_uploads, worker.stats().writes.yielded), (parked, ended));
                assert_eq!(disk.with(|state| state.frames_in_flight) as u64, 2 * (20 - ended + parked));
            }
            for (mut upload, _) in uploads {
                assert!(matches!(upload.ended().await, UploadEnd::Failed(StoreError::Yielded)));
            }
        }
    });
}

/// Goal: a stop refuses who waits and waits for who writes. Method: one slot, held, and a write that waits.
#[test]
fn a_stop_refuses_who_waits() {
    block_on(async {
        let worker = narrow(Duration::from_secs(50));
        let Ok(Opened::Ready(holder)) = worker.open_upload(key_of(b"holder"), 0).await else { panic!("new") };
        let gate = rt::gate::Gate::default();
        let waits = worker.clone();
        gate.spawn(async move {
            assert_eq!(waits.put(put(&Bytes::from_static(b"waits"))).await, Err(StoreError::Stopping));
        });
        while worker.stats().writes.waiting == 0 {
            rt::time::yield_once().await;
        }
        let stops = worker.clone();
        gate.spawn(async move { stops.stop().await });
        rt::time::yield_once().await;
        drop(holder);
        gate.wait_empty().await;
        assert_eq!(worker.stats().writes.in_flight, 0);
    });
}

/// Goal: a slot that came free for a write which has gone away meanwhile is not lost. Method: a turn that is decided, and
/// dropped before it is looked at.
#[test]
fn a_decided_turn_gives_its_slot_back() {
    block_on(async {
        let gate = WriteGate::new(WriteLimits::new(1, Duration::from_secs(60)), 0, 1);
        let first = gate.enter(0).ok().expect("a slot");
        let turn = gate.enter(0).err().expect("no other slot");
        drop(first);
        assert_eq!(gate.stats().in_flight, 1, "it is the turn's");
        drop(turn);
        assert_eq!(gate.stats().in_flight, 0);
        assert!(gate.enter(0).is_ok());
    });
}

/// Goal: a loan that cannot be delivered stays. Method: a core that cannot be reached asks for an idle slot.
#[test]
fn an_undelivered_loan_stays() {
    block_on(async {
        let gate = WriteGate::new(WriteLimits::new(2, Duration::from_secs(60)), 0, 2);
        gate.receive(Message::Ask { from: 1, slots: 1, keep_ms: 0 });
        assert_eq!((gate.stats().slots, gate.stats().lent), (1, 0));
    });
}
