//! Several cores: requests and streams that cross them.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;

use super::{SplitMix64, digest_of};
use crate::budget::Purse;
use crate::limits::{FRAME_LEN, READ_AHEAD_FRAMES, ROUTER_REQUESTS_MAX};
use crate::pure::digest::Digest;
use crate::pure::memory_plan::Use;
use crate::pure::purge::InstanceTag;
use crate::pure::shard_map::{CoreId, ShardMap};
use crate::rt;
use crate::rt::cores::block_on;
use crate::rt::gate::Gate;
use crate::shard::codec::StorageMode;
use crate::shard::fake_disk::FakeDisk;
use crate::shard::router::{Router, wire};
use crate::shard::worker::{Worker, WorkerConfig};
use crate::shard::write_gate::WriteLimits;
use crate::store::{
    Accept, ActionKey, Encoding, Get, Opened, Put, PutOutcome, Store, StoreError, Upload, UploadEnd, UploadKey,
};

/// Enough for every test that is not about slots.
fn many() -> WriteLimits {
    WriteLimits::new(10_000, Duration::from_millis(250))
}

/// Few, and time enough for everybody's turn.
fn queued() -> WriteLimits {
    WriteLimits::new(600, Duration::from_secs(60))
}

/// Runs `first` on one core of a mesh of `cores`; the others serve until it is done.
pub fn on_mesh(cores: usize, writes: WriteLimits, first: impl AsyncFnOnce(Router<FakeDisk>) + Send + 'static) {
    let map = ShardMap::new(64, cores as u16);
    let worker = move |core| {
        let config = WorkerConfig { core, cores, writes, ..super::worker_config(StorageMode::Zstd, 1 << 20) };
        Worker::new(FakeDisk::default(), config)
    };
    let mut ports = wire(cores).into_iter();
    let port = ports.next().expect("at least one core");
    let peers: Vec<_> = ports
        .enumerate()
        .map(|(number, port)| {
            let (stop, stopped) = mpsc::channel::<()>();
            let peer = thread::spawn(move || {
                block_on(async move {
                    let _router = port.start(worker(1 + number), map);
                    while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
                        crate::rt::time::sleep(Duration::from_millis(1)).await;
                    }
                });
            });
            (stop, peer)
        })
        .collect();
    block_on(async move { first(port.start(worker(0), map)).await });
    for (stop, peer) in peers {
        drop(stop);
        peer.join().expect("the core ended well");
    }
}

/// Goal: a store of several cores answers as one. Method: real executors; blobs of both sizes and actions spread over
/// them, each call of the trait, and a batch in one order.
#[test]
fn several_cores_are_one_store() {
    on_mesh(3, many(), async |store| {
        let mut random = SplitMix64::seeded();
        let mut present: Vec<Digest> = Vec::new();
        for n in 0..40 {
            let len = if n % 8 == 0 { 2 * FRAME_LEN + n } else { 1 + 700 * n };
            let data = random.content(len);
            let digest = digest_of(&data);
            if n % 2 == 0 {
                let key = UploadKey { instance: "".into(), uuid: "u".into(), digest, encoding: Encoding::Identity };
                let Ok(Opened::Ready(mut upload)) = store.open_upload(key.clone(), 0).await else {
                    panic!("{digest} is new");
                };
                for piece in data.chunks(100_000) {
                    upload.write(vec![Bytes::copy_from_slice(piece)]).await.expect("consumed");
                }
                assert_eq!(upload.finish().await, Ok(PutOutcome::Stored));
                assert!(store.upload_status(key).await.expect("no error").complete);
            } else {
                let put = Put { digest, encoding: Encoding::Identity, data: vec![data.clone()], admitted: false };
                assert_eq!(store.put(put).await, Ok(PutOutcome::Stored));
            }
            let get = Get { digest, offset: 0, limit: None, accept: Accept::Identity };
            let blob = store.get(get).await.expect("no error").expect("present");
            assert!(super::collect(blob).await.expect("no error").1 == data);
            let action = ActionKey { hash: digest.hash, size: None };
            store.action_put(action, data.slice(..1), InstanceTag::UNKNOWN).await.expect("stored");
            let entry = store.action_get(action).await.expect("no error").expect("present");
            assert_eq!(entry.data, data.slice(..1));
            store.action_drop(action, entry.version).await.expect("no error");
            assert!(store.action_get(action).await.expect("no error").is_none());
            present.push(digest);
        }
        let batch: Vec<Digest> = (0..400u64)
            .map(|n| if n % 3 == 0 { present[n as usize % present.len()] } else { digest_of(&n.to_le_bytes()) })
            .collect();
        let missing = store.find_missing(batch).await.expect("no error");
        assert_eq!(missing.len(), 400);
        assert!(missing.iter().enumerate().all(|(n, &missing)| missing == (n % 3 != 0)));
    });
}

/// Goal: many requests at once, more than the queue holds, are all answered. Method: 5000 small puts from one core.
#[test]
fn a_full_queue_is_back_pressure() {
    on_mesh(2, queued(), async |store| {
        let gate = Gate::default();
        let done = crate::rt::local::Local::new(0u32);
        for n in 0..5000u64 {
            let (store, done) = (store.clone(), done.clone());
            gate.spawn(async move {
                let data = Bytes::copy_from_slice(&n.to_le_bytes());
                let put =
                    Put { digest: digest_of(&data), encoding: Encoding::Identity, data: vec![data], admitted: false };
                assert_eq!(store.put(put).await, Ok(PutOutcome::Stored));
                done.with(|done| *done += 1);
            });
        }
        gate.wait_empty().await;
        assert_eq!(done.with(|done| *done), 5000);
    });
}

/// Goal: a core that is gone is an answer, not a wait. Method: drop one end of the mesh.
#[test]
fn a_core_that_is_gone_is_stopping() {
    let mut ports = wire(2).into_iter();
    let port = ports.next().expect("two cores");
    drop(ports);
    block_on(async move {
        let router = port.start(super::worker(StorageMode::Zstd).0, ShardMap::new(64, 2));
        let digests: Vec<Digest> = (0..50u64).map(|n| digest_of(&n.to_le_bytes())).collect();
        assert_eq!(router.find_missing(digests).await, Err(StoreError::Stopping));
    });
}

/// Goal: a panic in what a core does for another one costs that request, and no slot, memory, name or place. Method: two cores on
/// one executor; the owner's disk panics 1,000 times in each kind of write, then in a read, at its beginning and further on.
#[test]
fn a_panic_costs_its_request() {
    const TIMES: u64 = 1000;
    block_on(async {
        let map = ShardMap::new(64, 2);
        let (disk, purse) = (FakeDisk::default(), Purse::alone(1 << 40));
        let config = |core| {
            let writes = WriteLimits::new(2, Duration::ZERO);
            let config = super::worker_config(StorageMode::Uncompressed, 0);
            WorkerConfig { core, cores: 2, writes, purse: purse.clone(), ..config }
        };
        let mut ports = wire(2).into_iter();
        let mut start = |disk, core| ports.next().expect("two").start(Worker::new(disk, config(core)), map);
        let (asking, owner) = (start(FakeDisk::default(), 0), start(disk.clone(), 1));
        let theirs = |len| {
            let blobs = (0..u64::MAX).map(|seed| SplitMix64(seed).noise(len));
            let mut blobs = blobs.filter(|blob| map.core_of_hash(&digest_of(blob).hash) == CoreId(1));
            blobs.next().expect("every other one")
        };
        let (small, large) = (theirs(100), theirs(6 * FRAME_LEN));
        let put = || Put {
            digest: digest_of(&small),
            encoding: Encoding::Identity,
            data: vec![small.clone()],
            admitted: false,
        };
        let digest = digest_of(&large);
        let key = UploadKey { instance: "".into(), uuid: "u".into(), digest, encoding: Encoding::Identity };
        let before = rt::core_stats().panics;
        for _ in 0..TIMES {
            disk.with(|disk| disk.panics = 1);
            assert_eq!(asking.put(put()).await, Err(StoreError::Unanswered));
            disk.with(|disk| disk.panics = 1);
            let opened = asking.open_upload(key.clone(), 0).await;
            let Ok(Opened::Ready(mut upload)) = opened else { panic!("a slot or a name is lost: {:?}", opened.err()) };
            let end = upload.write(vec![large.slice(..FRAME_LEN)]).await;
            assert!(matches!(end, Err(UploadEnd::Failed(StoreError::Unanswered))), "{end:?}");
        }
        assert_eq!(rt::core_stats().panics - before, 2 * TIMES);
        let (stats, status) = (owner.worker().stats(), asking.upload_status(key.clone()).await.expect("an answer"));
        assert_eq!((stats.writes.in_flight, stats.writes.waiting, stats.tasks, stats.parked_uploads), (0, 0, 0, 0));
        assert_eq!((purse.held(Use::Writes), status.committed), (0, 0));

        assert_eq!(asking.put(put()).await, Ok(PutOutcome::Stored));
        let Ok(Opened::Ready(mut upload)) = asking.open_upload(key, 0).await else { panic!("it is new") };
        upload.write(vec![large.clone()]).await.expect("consumed");
        assert_eq!(upload.finish().await, Ok(PutOutcome::Stored));
        let whole = Get { digest, offset: 0, limit: None, accept: Accept::Identity };
        disk.with(|disk| disk.panic_frame = Some(0));
        assert_eq!(asking.get(whole).await.err(), Some(StoreError::Unanswered));
        disk.with(|disk| disk.panic_frame = Some(READ_AHEAD_FRAMES));
        let blob = asking.get(whole).await.expect("it begins well").expect("present");
        assert_eq!(super::collect(blob).await.err(), Some(StoreError::Unanswered));
        disk.with(|disk| disk.panic_frame = None);
        let blob = asking.get(whole).await.expect("no error").expect("present");
        assert!(super::collect(blob).await.expect("no error").1 == large);
        assert_eq!((owner.worker().stats().tasks, rt::core_stats().panics - before), (0, 2 * TIMES + 2));
    });
}

/// Goal: a core works on a bounded number of the others' requests at a time. Method: two cores on one executor; one asks for
/// three times as many blobs of the other, whose disk is slow.
#[test]
fn requests_of_others_are_bounded() {
    block_on(async {
        let map = ShardMap::new(64, 2);
        let mut ports = wire(2).into_iter();
        let asking = ports.next().expect("two cores").start(super::worker(StorageMode::Zstd).0, map);
        let (worker, disk) = super::worker(StorageMode::Zstd);
        let _asked = ports.next().expect("two cores").start(worker, map);
        disk.with(|disk| (disk.slow, disk.uneven) = (true, Some(SplitMix64(1))));
        let digests = (0..u64::MAX).map(|n| digest_of(&n.to_le_bytes()));
        let theirs = digests.filter(|digest| map.core_of_hash(&digest.hash) == CoreId(1));
        let gate = Gate::default();
        for digest in theirs.take(3 * ROUTER_REQUESTS_MAX) {
            let asking = asking.clone();
            gate.spawn(async move {
                let found = asking.get(Get::whole(digest, Accept::Identity)).await;
                assert!(found.expect("no error").is_none());
            });
        }
        gate.wait_empty().await;
        let most = disk.with(|disk| disk.reading_most);
        assert!((ROUTER_REQUESTS_MAX / 2..=ROUTER_REQUESTS_MAX).contains(&most), "{most} at a time");
    });
}
