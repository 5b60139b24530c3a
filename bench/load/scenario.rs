//! What is asked of the server: scenarios are lists of phases, a phase makes jobs, a job is one call and its check.

use std::cell::RefCell;
use std::rc::Rc;

use bytes::{Buf, Bytes, BytesMut};

use crate::client::{self, CallError, Connection, Message, Method};
use crate::payload::{Blob, Maker, SplitMix64};
use crate::wire::{self, Digest, Malformed, ReadParser};
use crate::{Flags, Scenario};

/// Log-normal sizes of a build: median 8 KiB, 99th percentile 4 MiB. The normal's 99th percentile is 2.3263 sigma.
const MIX_MEDIAN_BYTES: f64 = 8192.0;
const MIX_SIGMA: f64 = 6.238_324_6 / 2.326_347_9;
/// The largest blob of a mix, in bytes: the tail beyond it would make two runs differ by a handful of blobs.
const MIX_MAX_BYTES: f64 = (64u64 << 20) as f64;
/// Reads in 100 operations of a mix.
const MIX_READS: u64 = 70;
/// Each how many compressed answers are decoded and compared: all would cost the client more than the server.
const DECODE_EACH: u64 = 16;
/// Serial numbers of blobs that are stored before the timed phase start here.
const FILL_SERIALS: u64 = 1 << 40;
/// Files of each ActionResult.
const OUTPUTS_PER_ACTION: u64 = 4;

/// One call, ready to be sent.
pub enum Job {
    Write { messages: Vec<Message>, size: u64, sent: u64 },
    Read { blob: Rc<Blob>, name: String, decode: bool },
    Call { kind: &'static str, method: Method, message: Bytes, check: Check, work: Work },
}

/// What a unary answer must say.
pub enum Check {
    /// So many digests are missing.
    Missing(usize),
    /// An ActionResult, not empty.
    Action,
    /// So many items, all OK.
    Updated(usize),
    /// These blobs, in any order of items that the request had.
    Blobs(Vec<Rc<Blob>>),
}

/// What a successful job has moved.
#[derive(Clone, Copy, Default)]
pub struct Work {
    /// Payload bytes, uncompressed.
    pub bytes: u64,
    pub digests: u64,
}

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
}

impl Job {
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Write { .. } => "write",
            Self::Read { .. } => "read",
            Self::Call { kind, .. } => kind,
        }
    }

    /// Bytes that the job holds in memory, roughly.
    pub fn held_bytes(&self) -> u64 {
        match self {
            Self::Write { messages, sent, .. } => sent + 64 * messages.len() as u64 + 256,
            Self::Read { .. } => 256,
            Self::Call { message, .. } => message.len() as u64 + 128,
        }
    }

    pub async fn run(self, connection: &Connection) -> Result<Work, CallError> {
        match self {
            Self::Write { messages, size, sent } => {
                let answer = connection.unary(Method::Write, messages).await?;
                let committed = wire::committed_size(&answer)?;
                // Each of the three is right for a compressed upload in some client's eyes.
                if committed != size as i64 && (size == sent || (committed != sent as i64 && committed != -1)) {
                    return Err(CallError::new("WRONG_ANSWER", format!("committed_size {committed} of {size}")));
                }
                Ok(Work { bytes: size, digests: 0 })
            }
            Self::Read { blob, name, decode } => read(connection, &blob, &name, decode).await,
            Self::Call { method, message, check, work, .. } => {
                let answer = connection.unary(method, [client::whole(message)]).await?;
                check.verify(&answer)?;
                Ok(work)
            }
        }
    }
}

async fn read(connection: &Connection, blob: &Blob, name: &str, decode: bool) -> Result<Work, CallError> {
    let mut parser = ReadParser::default();
    let mut gathered = Vec::new();
    let (mut len, mut is_same) = (0, true);
    let sink = |chunk: &[u8]| {
        parser.feed(chunk, |data| {
            if blob.zstd.is_none() {
                is_same &= blob.data.get(len..len + data.len()) == Some(data);
            } else if decode {
                gathered.extend_from_slice(data);
            }
            len += data.len();
        })?;
        Ok(())
    };
    connection.call(Method::Read, [client::whole(wire::read_request(name))], sink).await?;
    let is_whole = parser.at_end() && if blob.zstd.is_none() { len == blob.data.len() } else { len > 0 };
    if decode {
        is_same = unpack(&gathered, blob.data.len()).as_deref() == Some(&blob.data[..]);
    }
    if !is_same || !is_whole {
        return Err(CallError::new("WRONG_ANSWER", format!("{name} came back as other bytes ({len} of them)")));
    }
    Ok(Work { bytes: blob.digest.size, digests: 0 })
}

/// Decodes a zstd stream of known content size.
fn unpack(data: &[u8], len: usize) -> Option<Vec<u8>> {
    let mut out = vec![0; len];
    (zstd_safe::decompress(&mut out[..], data).ok()? == len).then_some(out)
}

impl From<Malformed> for CallError {
    fn from(error: Malformed) -> Self {
        Self::new("WRONG_ANSWER", error.0)
    }
}

impl Check {
    fn verify(&self, answer: &[u8]) -> Result<(), CallError> {
        let (got, wanted) = match self {
            Self::Missing(wanted) => (wire::missing_count(answer)?, *wanted),
            Self::Action => (usize::from(!answer.is_empty()), 1),
            Self::Updated(wanted) => {
                let mut fine = 0;
                wire::for_each_item(answer, false, |item| fine += usize::from(item.code == 0))?;
                (fine, *wanted)
            }
            Self::Blobs(blobs) => {
                let (mut fine, mut rest) = (0, blobs.iter());
                wire::for_each_item(answer, true, |item| {
                    let Some(blob) = rest.next() else { return };
                    let is_same = if item.compressor == 0 {
                        item.data == blob.data
                    } else {
                        unpack(item.data, blob.data.len()).as_deref() == Some(&blob.data[..])
                    };
                    fine += usize::from(item.code == 0 && is_same);
                })?;
                (fine, blobs.len())
            }
        };
        if got == wanted {
            return Ok(());
        }
        Err(CallError::new("WRONG_ANSWER", format!("{got} items as they should be, not {wanted}")))
    }
}

/// What the phases of one repeat share.
#[derive(Clone)]
pub struct Plan {
    flags: Rc<Flags>,
    maker: Rc<Maker>,
    /// Blobs that are stored before the timed phase, to be read or looked for. Made once for all repeats.
    stored: Rc<RefCell<Vec<Rc<Blob>>>>,
}

impl Plan {
    pub fn new(flags: Rc<Flags>, seed: u64) -> Self {
        let maker = Maker { seed, compressibility: flags.compressibility, zstd: flags.zstd };
        Self { flags, maker: Rc::new(maker), stored: Rc::default() }
    }

    /// The same stored blobs, but new ones from now on.
    pub fn reseeded(&self, seed: u64) -> Self {
        let maker = Maker { seed, compressibility: self.flags.compressibility, zstd: self.flags.zstd };
        Self { maker: Rc::new(maker), ..self.clone() }
    }

    /// The phases of `repeat`. Only the first stores what is read later.
    pub fn phases(&self, repeat: u32) -> Vec<Phase> {
        let fill = || (repeat == 0).then(|| self.fill());
        let timed = |name, prepare, make| Some(Phase { name, fill: None, prepare, make });
        let phases = match self.flags.scenario {
            Scenario::Write => vec![timed("write", true, self.writes())],
            Scenario::Read => vec![fill(), timed("read", false, self.reads())],
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
        Phase { name: "fill", fill: Some(self.flags.blobs), prepare: false, make: Box::new(make) }
    }

    fn writes(&self) -> Make {
        let plan = self.clone();
        Box::new(move |serial| plan.write(serial, &plan.maker.blob(serial, plan.size(serial))))
    }

    fn reads(&self) -> Make {
        let plan = self.clone();
        Box::new(move |serial| plan.read(serial))
    }

    fn mix(&self) -> Make {
        let plan = self.clone();
        Box::new(move |serial| {
            if SplitMix64::new(!plan.maker.seed, serial).below(100) < MIX_READS {
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
            Job::Call { kind, method, message, check: Check::Action, work: Work::default() }
        })
    }

    /// Gets what `action_updates` of the same seed has put, as far as the count goes.
    fn action_gets(&self) -> Make {
        let plan = self.clone();
        let known = self.flags.count.unwrap_or(1);
        Box::new(move |serial| {
            let action = absent(&mut SplitMix64::new(plan.maker.seed, serial % known));
            let message = wire::get_action_request(&plan.flags.instance, &action);
            let (kind, method) = ("action-get", Method::GetAction);
            Job::Call { kind, method, message, check: Check::Action, work: Work::default() }
        })
    }

    fn batch_updates(&self) -> Make {
        let plan = self.clone();
        let per_call = self.batch_len();
        Box::new(move |serial| {
            let serials = serial * per_call..(serial + 1) * per_call;
            let blobs: Vec<_> = serials.map(|serial| plan.maker.blob(serial, plan.flags.size)).collect();
            let items = blobs.iter().map(|blob| (&blob.digest, &blob.body()[..]));
            let message = wire::batch_update_request(&plan.flags.instance, plan.flags.zstd, items);
            let work = Work { bytes: per_call * plan.flags.size, digests: per_call };
            let check = Check::Updated(blobs.len());
            Job::Call { kind: "batch-update", method: Method::BatchUpdate, message, check, work }
        })
    }

    fn batch_reads(&self) -> Make {
        let plan = self.clone();
        let per_call = self.batch_len();
        Box::new(move |serial| {
            let stored = plan.stored.borrow();
            let first = SplitMix64::new(plan.maker.seed, serial).below(stored.len() as u64);
            let blobs = stored.iter().cycle().skip(first as usize).take(per_call as usize).cloned();
            let blobs: Vec<_> = blobs.collect();
            let digests = blobs.iter().map(|blob| &blob.digest);
            let message = wire::batch_read_request(&plan.flags.instance, plan.flags.zstd, digests);
            let work = Work { bytes: per_call * plan.flags.size, digests: per_call };
            let check = Check::Blobs(blobs);
            Job::Call { kind: "batch-read", method: Method::BatchRead, message, check, work }
        })
    }

    /// Blobs of one batch call: as many as asked for that stay under 3 MiB, at least one.
    fn batch_len(&self) -> u64 {
        (self.flags.digests_per_call as u64).min((3 << 20) / (self.flags.size + 100)).max(1)
    }

    fn size(&self, serial: u64) -> u64 {
        if self.flags.scenario != Scenario::Mix {
            return self.flags.size;
        }
        let normal = SplitMix64::new(self.maker.seed.rotate_left(32), serial).normal();
        (MIX_MEDIAN_BYTES * (MIX_SIGMA * normal).exp()).clamp(1.0, MIX_MAX_BYTES) as u64
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
        let name = format!("{}{}", self.instance_prefix(), blob_name(&blob));
        Job::Read { decode: blob.zstd.is_some() && serial.is_multiple_of(DECODE_EACH), blob, name }
    }

    fn instance_prefix(&self) -> String {
        if self.flags.instance.is_empty() { String::new() } else { format!("{}/", self.flags.instance) }
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
fn absent(random: &mut SplitMix64) -> Digest {
    let mut hash = [0; 32];
    for word in hash.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next_u64().to_le_bytes());
    }
    Digest::from_hash(&hash, 1 + random.below(1 << 20))
}
