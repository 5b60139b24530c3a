//! What is asked of the server: scenarios are lists of phases, a phase makes jobs.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use bytes::{Buf, BytesMut};

use crate::client::{Method, Windows};
use crate::flags::{Flags, Scenario};
use crate::job::{Check, Job, Leave, Push, Work};
use crate::payload::{Blob, Maker, Sizes, SplitMix64};
use crate::stamped::{Family, Stamped};
use crate::wire::{self, Digest};

/// Each how many compressed answers are decoded and compared: all would cost the client more than the server.
const DECODE_EACH: u64 = 16;
/// Serial numbers of blobs that are stored before the timed phase start here.
const FILL_SERIALS: u64 = 1 << 40;
/// Files of each ActionResult.
const OUTPUTS_PER_ACTION: u64 = 4;

/// Makes the job of a serial number.
pub type Make = Box<dyn FnMut(u64) -> Job>;

/// A stretch of one scenario.
pub struct Phase {
    pub name: &'static str,
    /// `Some`: exactly so many jobs, not measured.
    pub fill: Option<u64>,
    /// Whether the jobs are worth making before the clock starts.
    pub prepare: bool,
    pub make: Make,
    /// What the blobs of pushes are made from, for those who want to see them again.
    pub family: Option<Rc<Family>>,
}

/// What the phases of one repeat share.
#[derive(Clone)]
pub struct Plan {
    flags: Rc<Flags>,
    maker: Rc<Maker>,
    sizes: Sizes,
    /// Blobs that are stored before the timed phase, to be read or looked for. Made once for all repeats.
    stored: Rc<RefCell<Vec<Rc<Blob>>>>,
    /// ActionResults that this repeat has stored.
    actions: Rc<Cell<u64>>,
}

impl Plan {
    pub fn new(flags: Rc<Flags>, seed: u64) -> Self {
        let maker = Maker { seed, compressibility: flags.compressibility, zstd: flags.zstd };
        let sizes = flags.sizes();
        Self { flags, maker: Rc::new(maker), sizes, stored: Rc::default(), actions: Rc::default() }
    }

    /// The same stored blobs, but new ones from now on.
    pub fn reseeded(&self, seed: u64) -> Self {
        let maker = Maker { seed, compressibility: self.flags.compressibility, zstd: self.flags.zstd };
        Self { maker: Rc::new(maker), actions: Rc::default(), ..self.clone() }
    }

    /// The phases of `repeat`. Only the first stores what is read later.
    pub fn phases(&self, repeat: u32) -> Vec<Phase> {
        let fill = || (repeat == 0).then(|| self.fill());
        let timed = |name, prepare, make| Some(Phase { name, fill: None, prepare, make, family: None });
        let phases = match self.flags.scenario {
            Scenario::Write => vec![timed("write", true, self.writes())],
            Scenario::Read => vec![fill(), timed("read", false, self.reads())],
            Scenario::ReadBack => vec![timed("read-back", true, self.read_backs())],
            Scenario::FindMissing => vec![fill(), timed("find-missing", true, self.find_missing())],
            Scenario::ActionCache => vec![
                fill(),
                timed("action-update", true, self.action_updates()),
                timed("action-get", false, self.action_gets()),
            ],
            Scenario::Batch => vec![
                timed("batch-update", true, self.batch_updates()),
                fill(),
                timed("batch-read", false, self.batch_reads()),
            ],
            Scenario::Mix => vec![fill(), timed("mix", true, self.mix())],
            Scenario::Burst => vec![Some(self.burst())],
            Scenario::StalledReaders => vec![fill(), timed("stalled-readers", false, self.stalls())],
            Scenario::SlowWriters => vec![Some(self.slow_writers())],
            Scenario::Churn => vec![timed("churn", false, self.visits())],
        };
        phases.into_iter().flatten().collect()
    }

    fn fill(&self) -> Phase {
        let plan = self.clone();
        let make = move |serial| {
            let blob = Rc::new(plan.maker.blob(FILL_SERIALS + serial, plan.size(FILL_SERIALS + serial)));
            plan.stored.borrow_mut().push(Rc::clone(&blob));
            plan.write(FILL_SERIALS + serial, &blob)
        };
        Phase { name: "fill", fill: Some(self.flags.blobs()), prepare: false, make: Box::new(make), family: None }
    }

    fn writes(&self) -> Make {
        let plan = self.clone();
        Box::new(move |serial| plan.write(serial, &plan.maker.blob(serial, plan.size(serial))))
    }

    fn reads(&self) -> Make {
        let plan = self.clone();
        Box::new(move |serial| plan.read(serial))
    }

    /// Reads what `writes` of the same seed has put.
    fn read_backs(&self) -> Make {
        let plan = self.clone();
        Box::new(move |serial| plan.read_of(serial, Rc::new(plan.maker.blob(serial, plan.size(serial)))))
    }

    fn mix(&self) -> Make {
        let plan = self.clone();
        Box::new(move |serial| {
            if SplitMix64::new(!plan.maker.seed, serial).unit() <= plan.flags.reads {
                plan.read(serial)
            } else {
                plan.write(serial, &plan.maker.blob(serial, plan.size(serial)))
            }
        })
    }

    /// Calls whose digests are present and absent by turns, in random order of the stored.
    fn find_missing(&self) -> Make {
        let plan = self.clone();
        let per_call = self.flags.digests_per_call;
        Box::new(move |serial| {
            let mut random = SplitMix64::new(plan.maker.seed, serial);
            let stored = plan.stored.borrow();
            let digests =
                (0..per_call).map(|i| if i % 2 == 0 { pick(&stored, &mut random).digest } else { absent(&mut random) });
            let message = wire::find_missing_request(&plan.flags.instance, digests);
            let work = Work { bytes: 0, digests: per_call as u64 };
            let check = Check::Missing(per_call / 2);
            Job::Call { kind: "find-missing", method: Method::FindMissing, message, check, work }
        })
    }

    fn action_updates(&self) -> Make {
        let plan = self.clone();
        Box::new(move |serial| {
            let mut random = SplitMix64::new(plan.maker.seed, serial);
            let action = absent(&mut random);
            let stored = plan.stored.borrow();
            let outputs: Vec<_> = (0..OUTPUTS_PER_ACTION).map(|_| pick(&stored, &mut random).digest).collect();
            let message = wire::update_action_request(&plan.flags.instance, &action, &outputs);
            let (kind, method) = ("action-update", Method::UpdateAction);
            let check = Check::ActionStored(Rc::clone(&plan.actions));
            Job::Call { kind, method, message, check, work: Work::default() }
        })
    }

    /// Gets what `action_updates` of the same seed has put.
    fn action_gets(&self) -> Make {
        let plan = self.clone();
        Box::new(move |serial| {
            let action = absent(&mut SplitMix64::new(plan.maker.seed, serial % plan.actions.get().max(1)));
            let message = wire::get_action_request(&plan.flags.instance, &action);
            let (kind, method) = ("action-get", Method::GetAction);
            Job::Call { kind, method, message, check: Check::Action, work: Work::default() }
        })
    }

    fn batch_updates(&self) -> Make {
        let plan = self.clone();
        let per_call = self.flags.digests_per_call as u64;
        Box::new(move |serial| {
            let mut room = Room::default();
            let serials = (serial * per_call..).take(per_call as usize);
            let sizes = serials.map(|serial| (serial, plan.size(serial))).take_while(|&(_, size)| room.take(size));
            let blobs: Vec<_> = sizes.map(|(serial, size)| plan.maker.blob(serial, size)).collect();
            let items = blobs.iter().map(|blob| (&blob.digest, &blob.body()[..]));
            let message = wire::batch_update_request(&plan.flags.instance, plan.flags.zstd, items);
            let work = Work { bytes: blobs.iter().map(|blob| blob.digest.size).sum(), digests: blobs.len() as u64 };
            let check = Check::Updated(blobs.len());
            Job::Call { kind: "batch-update", method: Method::BatchUpdate, message, check, work }
        })
    }

    fn batch_reads(&self) -> Make {
        let plan = self.clone();
        Box::new(move |serial| {
            let stored = plan.stored.borrow();
            let mut room = Room::default();
            let first = SplitMix64::new(plan.maker.seed, serial).below(stored.len() as u64) as usize;
            let blobs = stored[first..].iter().chain(&stored[..first]).take(plan.flags.digests_per_call);
            let blobs: Vec<_> = blobs.take_while(|blob| room.take(blob.digest.size)).cloned().collect();
            let digests = blobs.iter().map(|blob| &blob.digest);
            let message = wire::batch_read_request(&plan.flags.instance, plan.flags.zstd, digests);
            let work = Work { bytes: blobs.iter().map(|blob| blob.digest.size).sum(), digests: blobs.len() as u64 };
            let check = Check::Blobs(blobs);
            Job::Call { kind: "batch-read", method: Method::BatchRead, message, check, work }
        })
    }

    fn burst(&self) -> Phase {
        let family = Rc::new(Family::new(&self.maker, self.sizes.max(), self.flags.chunk as usize));
        let (plan, makes) = (self.clone(), Rc::clone(&family));
        let make = Box::new(move |serial| {
            plan.push("write", serial, &makes, makes.blob(serial, plan.size(serial)), Duration::ZERO)
        });
        Phase { name: "burst", fill: None, prepare: true, make, family: Some(family) }
    }

    fn slow_writers(&self) -> Phase {
        let family = Rc::new(Family::new(&self.maker, self.sizes.max(), self.flags.pace as usize));
        let (plan, makes) = (self.clone(), Rc::clone(&family));
        let sent_max = self.flags.pace as f64 * (self.flags.duration.unwrap_or_default().as_secs_f64() + 1.0);
        let make = Box::new(move |serial| {
            let size = plan.size(serial);
            // A hash over a blob that nobody will send to its end would be a waste of many seconds.
            let blob = if size as f64 <= sent_max {
                makes.blob(serial, size)
            } else {
                let digest = Digest { size, ..absent(&mut SplitMix64::new(plan.maker.seed, serial)) };
                Stamped { serial, digest }
            };
            plan.push("slow-write", serial, &makes, blob, Duration::from_secs(1))
        });
        Phase { name: "slow-writers", fill: None, prepare: true, make, family: Some(family) }
    }

    fn stalls(&self) -> Make {
        let plan = self.clone();
        Box::new(move |serial| {
            let blob = Rc::clone(pick(&plan.stored.borrow(), &mut SplitMix64::new(plan.maker.seed, serial)));
            Job::Stall { name: format!("{}{}", plan.instance_prefix(), blob_name(&blob)) }
        })
    }

    fn visits(&self) -> Make {
        let plan = self.clone();
        let target = self.flags.target.clone();
        let windows = Windows::new(self.flags.window(), self.flags.frame);
        let family =
            Rc::new(Family::new(&self.maker, self.sizes.max().max(self.flags.chunk + 1), self.flags.chunk as usize));
        Box::new(move |serial| {
            let (leave, pause) = match serial % 3 {
                0 => (Leave::Politely, Duration::ZERO),
                1 => (Leave::Reset, Duration::ZERO),
                // Between two of its messages.
                _ => (Leave::MidWrite, Duration::from_mins(1)),
            };
            // Two chunks at least, so that there is a middle.
            let size = if leave == Leave::MidWrite { plan.flags.chunk + 1 } else { plan.size(serial) };
            let Job::Push(push) = plan.push("visit", serial, &family, family.blob(serial, size), pause) else {
                unreachable!("a push is made")
            };
            Job::Visit { target: target.clone(), windows, push, leave }
        })
    }

    fn size(&self, serial: u64) -> u64 {
        self.sizes.draw(&mut SplitMix64::new(self.maker.seed.rotate_left(32), serial))
    }

    fn push(&self, kind: &'static str, serial: u64, family: &Rc<Family>, blob: Stamped, pause: Duration) -> Job {
        let what = if self.flags.zstd { "compressed-blobs/zstd" } else { "blobs" };
        let (hash, size) = (blob.digest.hex(), blob.digest.size);
        let name = format!("{}uploads/{}/{what}/{hash}/{size}", self.instance_prefix(), self.maker.uuid(serial));
        Job::Push(Push { kind, family: Rc::clone(family), blob, name: name.into(), pause })
    }

    fn write(&self, serial: u64, blob: &Blob) -> Job {
        let name = format!("{}uploads/{}/{}", self.instance_prefix(), self.maker.uuid(serial), blob_name(blob));
        let body = blob.body();
        let chunk_len = self.flags.chunk.max(1) as usize;
        let count = body.len().div_ceil(chunk_len).max(1);
        let mut heads = BytesMut::with_capacity(name.len() + 32 * count);
        let messages = (0..count).map(|i| {
            let range = i * chunk_len..body.len().min((i + 1) * chunk_len);
            let name = (i == 0).then_some(&name[..]);
            wire::put_write_head(&mut heads, name, range.start as u64, i + 1 == count, range.len());
            heads.split().freeze().chain(body.slice(range))
        });
        Job::Write { messages: messages.collect(), size: blob.digest.size, sent: body.len() as u64 }
    }

    fn read(&self, serial: u64) -> Job {
        let mut random = SplitMix64::new(self.maker.seed, serial);
        let blob = Rc::clone(pick(&self.stored.borrow(), &mut random));
        self.read_of(serial, blob)
    }

    fn read_of(&self, serial: u64, blob: Rc<Blob>) -> Job {
        let name = format!("{}{}", self.instance_prefix(), blob_name(&blob));
        Job::Read { decode: blob.zstd.is_some() && serial.is_multiple_of(DECODE_EACH), blob, name }
    }

    fn instance_prefix(&self) -> String {
        instance_prefix(&self.flags)
    }
}

/// What stands before `blobs/...` and `uploads/...`.
pub fn instance_prefix(flags: &Flags) -> String {
    if flags.instance.is_empty() { String::new() } else { format!("{}/", flags.instance) }
}

/// What still fits in a batch: 3 MiB of payload and digests, but one blob always.
#[derive(Default)]
struct Room {
    taken: u64,
}

impl Room {
    fn take(&mut self, size: u64) -> bool {
        let is_first = self.taken == 0;
        self.taken += size + 100;
        is_first || self.taken <= 3 << 20
    }
}

fn blob_name(blob: &Blob) -> String {
    let prefix = if blob.zstd.is_some() { "compressed-blobs/zstd" } else { "blobs" };
    format!("{prefix}/{}/{}", blob.digest.hex(), blob.digest.size)
}

fn pick<'a>(stored: &'a [Rc<Blob>], random: &mut SplitMix64) -> &'a Rc<Blob> {
    &stored[random.below(stored.len() as u64) as usize]
}

/// A digest that nobody has stored, of a size like any other.
pub fn absent(random: &mut SplitMix64) -> Digest {
    let mut hash = [0; 32];
    for word in hash.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next_u64().to_le_bytes());
    }
    Digest::from_hash(&hash, 1 + random.below(1 << 20))
}
