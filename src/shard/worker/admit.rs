//! How a write is let in: a slot, then its memory, each after a wait if need be.

use std::time::Duration;

use super::{Inner, Worker};
use crate::budget::{Claim, Grant};
use crate::limits::{self, PRESSURE_HEAVY_US, WRITE_GATE_TICK_MS};
use crate::pure::memory_plan::Use;
use crate::rt;
use crate::rt::local::{Event, Permits};
use crate::shard::blob_disk::BlobDisk;
use crate::shard::codec::StreamDecoder;
use crate::shard::write_gate::{WriteGate, WriteSlot};
use crate::store::StoreError;

/// The right of one write to run, and its memory. Dropping it gives both back.
pub(in crate::shard) struct Admitted {
    _memory: Grant,
    _slot: WriteSlot,
    /// Why last: whoever is told looks for memory at once.
    _freed: Freed,
}

/// Tells those who wait for memory, when dropped, that there may be some.
struct Freed(Event);

impl Drop for Freed {
    fn drop(&mut self) {
        self.0.notify();
    }
}

/// Those who wait for memory on a core, first come, first served. Why in three lines: what is small goes into what is left
/// between the large ones, and must not wait behind them.
pub(super) struct Lines {
    small: Permits,
    large: Permits,
    decoders: Permits,
    freed: Event,
}

impl Lines {
    pub fn new() -> Self {
        let [small, large, decoders] = [(); 3].map(|()| Permits::new(1));
        Self { small, large, decoders, freed: Event::default() }
    }

    /// How many wait.
    fn len(&self) -> usize {
        [&self.small, &self.large, &self.decoders].map(Permits::in_line).iter().sum()
    }
}

impl<D: BlobDisk> Worker<D> {
    /// The right to write what holds `len` bytes meanwhile. Waits for it a little, if need be.
    pub(in crate::shard) async fn enter_write(&self, len: u64) -> Result<Admitted, StoreError> {
        let (slot, has_waited) = match self.0.write_gate.enter(self.0.lines.len()) {
            Ok(slot) => (slot, false),
            Err(turn) => {
                self.keep_gate();
                (turn.await?, true)
            }
        };
        let is_small = len <= limits::WRITE_SMALL_HELD_LEN;
        // Why: a quarter is for small ones, so that large ones which take long do not keep them out.
        let claim = if is_small { Claim::First { held: 0 } } else { Claim::Bulk };
        let (line, most) = match is_small {
            true => (&self.0.lines.small, limits::WRITE_QUEUE_LEN),
            false => (&self.0.lines.large, self.large_line_max()),
        };
        let memory = self.patiently(line, most, has_waited, || self.0.purse.grant(Use::Writes, len, claim)).await?;
        Ok(Admitted { _memory: memory, _slot: slot, _freed: Freed(self.0.lines.freed.clone()) })
    }

    /// A decoder for a blob of `size` raw bytes, after waiting for its memory if need be.
    pub(in crate::shard) async fn enter_decoder(&self, size: u64) -> Result<StreamDecoder, StoreError> {
        self.patiently(&self.0.lines.decoders, self.large_line_max(), false, || self.0.codecs.stream_decoder(size))
            .await
    }

    /// How many large writes may wait in a line: about as many as there is memory for on one core.
    ///
    /// Why so few: who waits holds what it was sent in its connection's window, which those that were let in need as well.
    fn large_line_max(&self) -> usize {
        let fit = self.0.purse.share(Use::Writes) / (limits::WRITE_HELD_LEN * self.0.cores as u64);
        usize::try_from(fit).unwrap_or(usize::MAX).clamp(limits::WRITE_LINE_LEN_MIN, limits::WRITE_QUEUE_LEN)
    }

    /// How many writes wait on this core, for a slot or for memory.
    pub(in crate::shard) fn waiting_writes(&self) -> usize {
        self.0.write_gate.waiting() + self.0.lines.len()
    }

    /// What `take` takes of the memory limit, after waiting in line for it as long as a write may wait. Where `most` wait
    /// already, or as many writes as may, it is refused; one that has waited for its slot has its place among these.
    async fn patiently<T>(
        &self,
        line: &Permits,
        most: usize,
        has_waited: bool,
        take: impl Fn() -> Option<T>,
    ) -> Result<T, StoreError> {
        if line.in_line() == 0
            && let Some(taken) = take()
        {
            return Ok(taken);
        }
        if line.in_line() >= most || (!has_waited && self.waiting_writes() >= limits::WRITE_QUEUE_LEN) {
            return Err(self.0.write_gate.no_memory());
        }
        let in_turn = async {
            let _turn = line.take().await;
            loop {
                let freed = self.0.lines.freed.wait();
                if let Some(taken) = take() {
                    return taken;
                }
                // Why also by the clock: other cores do not tell.
                rt::time::race(freed, rt::time::sleep(Duration::from_millis(limits::WRITE_MEMORY_WATCH_MS))).await;
            }
        };
        let mut in_turn = std::pin::pin!(rt::time::timeout(self.0.write_gate.limits().wait, in_turn));
        let keeping = std::future::poll_fn(|context| {
            let taken = in_turn.as_mut().poll(context);
            // Why only now: it stands in the line from its first poll on.
            if taken.is_pending() {
                self.keep_gate();
            }
            taken
        });
        keeping.await.map_err(|rt::time::Elapsed| self.0.write_gate.no_memory())
    }

    /// Sees to it that those who wait at the gate, or for memory, are looked after.
    pub(super) fn keep_gate(&self) {
        let Inner { write_gate, lines, gate_kept, gate_wakes, .. } = &*self.0;
        if let Some(until) = gate_kept.get() {
            // Why: who has just come may have to be looked after sooner than those before.
            if write_gate.deadline().is_some_and(|due| due < until) {
                gate_wakes.notify();
            }
            return;
        }
        let is_wanted = |write_gate: &WriteGate, lines: &Lines| write_gate.is_contended() || lines.len() > 0;
        if !is_wanted(write_gate, lines) {
            return;
        }
        gate_kept.set(Some(rt::time::now()));
        let worker = self.clone();
        rt::spawn(async move {
            let Inner { write_gate, lines, gate_kept, gate_wakes, codecs, uploads, .. } = &*worker.0;
            while is_wanted(write_gate, lines) {
                let now = rt::time::now();
                let latest = now + Duration::from_millis(WRITE_GATE_TICK_MS);
                let due = write_gate.tick().map_or(latest, |due| due.min(latest));
                // Why: when this core is late, it is not the clients who let their uploads stand still.
                if codecs.pressure().delay_us() < PRESSURE_HEAVY_US {
                    uploads.yield_idle(write_gate, lines.len(), now);
                }
                let woken = gate_wakes.wait();
                gate_kept.set(Some(due));
                rt::time::race(rt::time::deadline(due), woken).await;
            }
            gate_kept.set(None);
        });
    }
}
