//! Random payloads that never repeat within a run, at a few hundred microseconds for each MiB.

use bytes::Bytes;

use crate::wire::Digest;

/// Bytes of one block of a payload: a random part, then the same filler in every block.
const BLOCK_LEN: usize = 128;

/// SplitMix64 (Steele, Lea, Flood 2014): the same seed gives the same run.
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The generator of item `serial` of the run `seed`; different pairs give unrelated streams.
    pub fn new(seed: u64, serial: u64) -> Self {
        let mut outer = Self(seed);
        Self(outer.next_u64() ^ serial.wrapping_mul(0xff51_afd7_ed55_8ccd))
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0 to `bound` exclusive, near enough for bounds far below 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Uniform in (0, 1].
    pub fn unit(&mut self) -> f64 {
        ((self.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal (Box and Muller 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.unit().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

/// Sizes of blobs: all the same, or log-normal.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sizes {
    median: u64,
    /// Standard deviation of the logarithm; 0 for one size.
    sigma: f64,
}

impl Sizes {
    /// The largest blob of a distribution, in bytes: the tail beyond it would make two runs differ by a handful of blobs.
    const MAX: u64 = 64 << 20;
    /// The normal distribution's 99th percentile, in standard deviations.
    const P99_SIGMAS: f64 = 2.326_347_874;

    pub fn new(median: u64, p99: Option<u64>) -> Self {
        let spread = |p99: u64| (p99 as f64 / median.max(1) as f64).ln().max(0.0) / Self::P99_SIGMAS;
        Self { median, sigma: p99.map_or(0.0, spread) }
    }

    pub fn draw(&self, random: &mut SplitMix64) -> u64 {
        if self.sigma == 0.0 {
            return self.median;
        }
        (self.median as f64 * (self.sigma * random.normal()).exp()).clamp(1.0, Self::MAX as f64) as u64
    }

    pub fn median(&self) -> u64 {
        self.median
    }

    pub fn max(&self) -> u64 {
        if self.sigma == 0.0 { self.median } else { Self::MAX.max(self.median) }
    }
}

/// A blob as the client holds it.
pub struct Blob {
    pub digest: Digest,
    pub data: Bytes,
    /// One zstd frame of `data`, when the run compresses.
    pub zstd: Option<Bytes>,
}

impl Blob {
    /// The body that an upload carries.
    pub fn body(&self) -> &Bytes {
        self.zstd.as_ref().unwrap_or(&self.data)
    }
}

/// Makes the blobs of a run: the seed and the serial number decide everything.
pub struct Maker {
    pub seed: u64,
    /// The share of each block that compresses away: 0.5 is data that zstd makes about half as big.
    pub compressibility: f64,
    pub zstd: bool,
}

impl Maker {
    pub fn blob(&self, serial: u64, size: u64) -> Blob {
        let data = self.data(serial, size);
        let zstd = self.zstd.then(|| compressed(&data));
        Blob { digest: Digest::of(&data), data, zstd }
    }

    /// `size` bytes of the asked compressibility.
    pub fn data(&self, serial: u64, size: u64) -> Bytes {
        let mut random = SplitMix64::new(self.seed, serial);
        let mut data = vec![0; usize::try_from(size).expect("a payload fits the address space")];
        let random_len = (BLOCK_LEN as f64 * (1.0 - self.compressibility)).round() as usize;
        for block in data.chunks_mut(BLOCK_LEN) {
            let (noise, filler) = block.split_at_mut(random_len.min(block.len()));
            for word in noise.chunks_mut(8) {
                word.copy_from_slice(&random.next_u64().to_le_bytes()[..word.len()]);
            }
            for (i, byte) in filler.iter_mut().enumerate() {
                *byte = b"the same words in each block of the file; "[i % 42];
            }
        }
        Bytes::from(data)
    }

    /// A random version 4 UUID for the upload `serial`.
    pub fn uuid(&self, serial: u64) -> String {
        let mut random = SplitMix64::new(!self.seed, serial);
        let (high, low) = (random.next_u64(), random.next_u64());
        format!(
            "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
            high >> 32,
            high >> 16 & 0xffff,
            high & 0xfff,
            low >> 48 & 0x3fff | 0x8000,
            low & 0xffff_ffff_ffff
        )
    }
}

/// One zstd frame of `data`.
pub fn compressed(data: &[u8]) -> Bytes {
    let mut packed = vec![0; zstd_safe::compress_bound(data.len())];
    let packed_len = zstd_safe::compress(&mut packed[..], data, 1).expect("the buffer takes the worst case");
    packed.truncate(packed_len);
    packed.shrink_to_fit();
    Bytes::from(packed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: payloads are unique, reproducible and about as compressible as asked. Method: a few sizes and shares.
    #[test]
    fn payloads_are_unique_and_compress_as_asked() {
        for (compressibility, low, high) in [(0.0, 0.99, 1.05), (0.5, 0.5, 0.6), (0.75, 0.25, 0.4)] {
            let maker = Maker { seed: 7, compressibility, zstd: true };
            let (a, b) = (maker.blob(1, 100_000), maker.blob(2, 100_000));
            assert!(a.data != b.data && a.data == maker.blob(1, 100_000).data);
            let ratio = a.body().len() as f64 / a.data.len() as f64;
            assert!(low <= ratio && ratio <= high, "{compressibility}: {ratio}");
        }
        let maker = Maker { seed: 7, compressibility: 0.5, zstd: false };
        assert_eq!(maker.blob(1, 0).data.len(), 0);
        assert_eq!(maker.uuid(1).len(), 36);
        assert_ne!(maker.uuid(1), maker.uuid(2));
    }

    /// Goal: sizes are distributed as asked. Method: 200,000 draws, sorted; both quantiles that define the distribution.
    #[test]
    fn sizes_have_their_quantiles() {
        for (median, p99) in [(8 << 10, 4 << 20), (100, 1000), (1 << 20, 4 << 20)] {
            let sizes = Sizes::new(median, Some(p99));
            let mut random = SplitMix64::new(11, median);
            let mut drawn: Vec<u64> = (0..200_000).map(|_| sizes.draw(&mut random)).collect();
            drawn.sort_unstable();
            for (index, want) in [(100_000, median as f64), (198_000, p99 as f64)] {
                let ratio = drawn[index] as f64 / want;
                assert!((0.93..1.07).contains(&ratio), "{median}, {p99}: {ratio} at {index}");
            }
            assert!(drawn[0] >= 1 && drawn[199_999] <= sizes.max());
        }
        let fixed = Sizes::new(0, None);
        assert_eq!((fixed.draw(&mut SplitMix64::new(1, 1)), fixed.max()), (0, 0));
    }
}
