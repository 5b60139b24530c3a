//! SplitMix64: random words that a seed replays. Ours, so that no dependency's upgrade changes a replay.

/// A generator; its state is the seed.
///
/// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014), as in `java.util.SplittableRandom`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// The next word.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    /// A word below `bound`, which is not 0. The bias of the remainder is below 2^-32 for bounds below 2^32.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the words are those of the reference implementation. Method: its first words for seed 1234567.
    #[test]
    fn words_are_the_published_ones() {
        let mut random = SplitMix64(1_234_567);
        let words = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([random.word(), random.word(), random.word()], words);
    }
}
