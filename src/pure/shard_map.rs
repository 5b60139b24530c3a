//! Which shard a hash belongs to, and which core owns a shard.

use super::digest::Hash;

/// A slice of the key space: the top bits of the hash. At most 256 of them, a power of two, fixed for a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardId(pub u16);

/// A core of this process, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CoreId(pub u16);

/// The map of one process: a directory's shards dealt out to the cores in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardMap {
    shards: u16,
    cores: u16,
}

/// Most shards of a directory.
pub const SHARDS_MAX: u16 = 256;

impl ShardMap {
    /// `shards` is a power of two of at most `SHARDS_MAX`; `cores` is at least 1.
    pub fn new(shards: u16, cores: u16) -> Self {
        assert!(shards.is_power_of_two() && shards <= SHARDS_MAX, "{shards} shards");
        assert!(cores > 0, "no cores");
        Self { shards, cores }
    }

    pub fn shards(&self) -> u16 {
        self.shards
    }

    pub fn cores(&self) -> u16 {
        self.cores
    }

    /// The shard of `hash`.
    pub fn shard_of(&self, hash: &Hash) -> ShardId {
        let top = u32::from(u16::from_be_bytes([hash.0[0], hash.0[1]]));
        ShardId(((top * u32::from(self.shards)) >> 16) as u16)
    }

    /// The core that owns `shard`.
    pub fn core_of(&self, shard: ShardId) -> CoreId {
        CoreId(shard.0 % self.cores)
    }

    /// The core that owns `hash`.
    pub fn core_of_hash(&self, hash: &Hash) -> CoreId {
        self.core_of(self.shard_of(hash))
    }

    /// The shards that `core` owns.
    pub fn shards_of(&self, core: CoreId) -> impl Iterator<Item = ShardId> + use<> {
        (core.0..self.shards).step_by(usize::from(self.cores)).map(ShardId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every hash has one shard and every shard one core, whatever their numbers. Method: all first bytes against
    /// several maps; the shards of all cores together are all shards once.
    #[test]
    fn deals_every_shard_to_one_core() {
        for (shards, cores) in [(1, 1), (4, 3), (64, 16), (256, 5), (2, 16)] {
            let map = ShardMap::new(shards, cores);
            let mut owned: Vec<u16> = (0..cores).flat_map(|core| map.shards_of(CoreId(core))).map(|s| s.0).collect();
            owned.sort_unstable();
            assert_eq!(owned, (0..shards).collect::<Vec<_>>());
            for byte in 0..=255u8 {
                let mut hash = Hash([0xff; 32]);
                hash.0[0] = byte;
                let shard = map.shard_of(&hash);
                assert_eq!(shard.0, u16::from(byte) * shards / 256);
                assert!(map.shards_of(map.core_of_hash(&hash)).any(|own| own == shard));
            }
        }
    }
}
