//! What one number, `--memory_limit`, means: how much each thing that a peer can make the process hold may take.
//!
//! | part | size | what is in it |
//! |---|---|---|
//! | hot records | `--ram_cache`, else a quarter | copies of small records, which give way to nobody |
//! | fixed | by cores and shards | code, threads, rings, a write buffer for each shard |
//! | buffers | a sixteenth | spare disk buffers, read-ahead, what few large writes stage beyond their share |
//! | reads | a 32nd | what is being read from the drive, also for clients that have gone; registered with the kernel |
//! | flights | an eighth with backends, else nothing | what is read through, until it has landed |
//! | peers | all the rest | the index, connections and calls, and, of what they leave, a share for each `Use` |
//!
//! So the worst case is the sum of the parts, whatever the peers do: many entries of the cache leave less for connections and
//! calls, and these less for each of the uses, of which an eighth of the peers' part is kept free for more connections and
//! calls as long as these may have more. An eighth of the limit is left by the index in any case, so that a server with
//! more entries than it has memory for goes on to serve; it says so, and takes more than its limit then.

use crate::limits;

/// For what a peer makes the process hold memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Unary requests, held until they are whole and answered.
    Requests,
    /// Replies that have not gone out, and what is read ahead for them.
    Replies,
    /// Writes that were let in: open frames, and what is on its way to them.
    Writes,
    /// zstd decoders of uploads.
    Decoders,
    /// HTTP/2 connection windows beyond the first 64 KiB.
    Windows,
}

impl Use {
    pub const ALL: [Self; 5] = [Self::Requests, Self::Replies, Self::Writes, Self::Decoders, Self::Windows];

    /// Its share of what connections and calls leave, in sixteenths. Interrupted uploads have the last one.
    const fn sixteenths(self) -> u64 {
        match self {
            Self::Requests => 2,
            Self::Replies => 4,
            Self::Writes => 5,
            Self::Decoders => 3,
            Self::Windows => 1,
        }
    }

    /// Bytes of `left` that it may take.
    pub const fn share_of(self, left: u64) -> u64 {
        left / 16 * self.sixteenths()
    }

    /// Its name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Replies => "replies",
            Self::Writes => "writes",
            Self::Decoders => "decoders",
            Self::Windows => "windows",
        }
    }
}

/// How the memory limit is divided, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    pub limit: u64,
    pub hot: u64,
    pub fixed: u64,
    pub buffers: u64,
    pub reads: u64,
    pub flights: u64,
    pub peers: u64,
    /// Of `peers`, what the uses leave free for more connections and calls.
    pub newcomers: u64,
}

/// The parts that peers cannot change leave less than an eighth of the limit to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{limit} bytes are too few for {fixed} bytes of fixed parts and {hot} of hot records")]
pub struct TooSmall {
    pub limit: u64,
    pub fixed: u64,
    pub hot: u64,
}

impl MemoryPlan {
    /// Divides `limit`, of which `hot` is for hot records and `flights` for reads through to backends.
    pub fn new(limit: u64, hot: u64, flights: u64, cores: usize, shards: u16) -> Result<Self, TooSmall> {
        let fixed = PROCESS_LEN + cores as u64 * CORE_LEN + u64::from(shards) * SHARD_LEN;
        let (buffers, reads) = (limit / 16, limit / 32);
        match limit
            .checked_sub(hot + fixed + buffers + reads + flights)
            .filter(|&peers| peers >= limit / PEERS_PART_MIN)
        {
            Some(peers) => Ok(Self { limit, hot, fixed, buffers, reads, flights, peers, newcomers: peers / 8 }),
            None => Err(TooSmall { limit, fixed, hot }),
        }
    }

    /// What connections and calls may take of the peers' part, while the index is small; more are turned away.
    pub fn apart_max(&self) -> u64 {
        Self::apart_of(self.peers)
    }

    /// The same of what the index leaves.
    pub fn apart_of(left: u64) -> u64 {
        left / 4 * 3
    }

    /// What `used` may take of `left`, of which connections and calls have `apart`.
    pub fn share(&self, used: Use, left: u64, apart: u64) -> u64 {
        let kept = (apart + self.newcomers).min(Self::apart_of(left)).max(apart);
        used.share_of(left.saturating_sub(kept))
    }

    /// What `used` may take at most.
    pub fn share_max(&self, used: Use) -> u64 {
        self.share(used, self.peers, 0)
    }

    /// What an index of so many bytes leaves to peers.
    pub fn left_by_index(&self, index: u64) -> u64 {
        self.peers.saturating_sub(index).max(self.limit / PEERS_PART_MIN)
    }

    /// The longest index that fits into the limit.
    pub fn index_max(&self) -> u64 {
        self.peers.saturating_sub(self.limit / PEERS_PART_MIN)
    }

    /// What each of `cores` registers with the kernel, for its reads of the drive.
    pub fn io_memory(&self, cores: usize) -> usize {
        usize::try_from(self.reads / cores as u64).unwrap_or(usize::MAX).min(limits::DISK_READS_LEN_MAX)
    }

    /// What interrupted uploads may hold.
    pub fn parked(&self) -> u64 {
        (self.peers - self.newcomers) / 16
    }
}

/// Peers have one in this many bytes of the limit, or the server does not start.
const PEERS_PART_MIN: u64 = 8;
/// Code, heap and stacks of the process without peers, measured at 14 MiB.
const PROCESS_LEN: u64 = 20 << 20;
/// A core's rings, stacks and tables.
const CORE_LEN: u64 = 1 << 20;
/// A shard's write buffers: one that is filled and one on its way to the drive.
const SHARD_LEN: u64 = 512 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the parts are the limit, for every machine: nothing is promised twice. Method: limits from small to large,
    /// with 1 and 16 cores.
    #[test]
    fn the_parts_are_the_whole() {
        for limit in [128 << 20, 512 << 20, 12 << 30, 1 << 40] {
            for (cores, shards) in [(1, 4), (2, 64), (16, 64)] {
                let Ok(plan) = MemoryPlan::new(limit, limit / 4, limit / 8, cores, shards) else {
                    assert!(limit == 128 << 20, "{limit} is enough");
                    continue;
                };
                assert_eq!(plan.hot + plan.fixed + plan.buffers + plan.reads + plan.flights + plan.peers, limit);
                for taken in [0, plan.peers / 2, plan.apart_max()] {
                    let shares: u64 = Use::ALL.map(|used| plan.share(used, plan.peers, taken)).iter().sum();
                    let left = plan.peers - taken;
                    let newcomers = plan.newcomers.min(plan.apart_max() - taken);
                    assert!(shares + newcomers + (left - newcomers) / 16 <= left && plan.parked() <= plan.peers / 16);
                }
            }
        }
        assert!(MemoryPlan::new(64 << 20, 16 << 20, 0, 2, 64).is_err());
        assert!(MemoryPlan::new(512 << 20, 128 << 20, 0, 16, 64).is_ok_and(|plan| plan.peers > 256 << 20));
    }
}
