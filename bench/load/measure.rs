//! What a run measures: latencies in buckets, errors by code.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::client::CallError;

/// Sub-buckets of each power of two: 128, so that a percentile is right within 0.8 %.
const SUB_BITS: u32 = 7;

/// Latencies in nanoseconds, in log-linear buckets.
pub struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: vec![0; ((64 - SUB_BITS as usize) + 1) << SUB_BITS], count: 0, max: 0 }
    }
}

impl Histogram {
    pub fn record(&mut self, value: u64) {
        self.buckets[Self::bucket(value)] += 1;
        self.count += 1;
        self.max = self.max.max(value);
    }

    pub fn record_duration(&mut self, value: Duration) {
        self.record(u64::try_from(value.as_nanos()).unwrap_or(u64::MAX));
    }

    pub fn merge(&mut self, other: &Self) {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(mine, theirs)| *mine += theirs);
        self.count += other.count;
        self.max = self.max.max(other.max);
    }

    pub fn max(&self) -> u64 {
        self.max
    }

    /// The value that a share `q` (0 to 1) of all samples does not exceed; 0 without samples.
    pub fn quantile(&self, q: f64) -> u64 {
        let wanted = ((self.count as f64 * q).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return Self::upper_bound(bucket).min(self.max);
            }
        }
        self.max
    }

    fn bucket(value: u64) -> usize {
        let shift = (64 - value.leading_zeros()).saturating_sub(SUB_BITS + 1);
        ((shift as usize) << SUB_BITS) + (value >> shift) as usize
    }

    /// The largest value in `bucket`.
    fn upper_bound(bucket: usize) -> u64 {
        let shift = (bucket >> SUB_BITS).saturating_sub(1) as u32;
        let low = (bucket - ((shift as usize) << SUB_BITS)) as u64;
        (low << shift) + ((1u64 << shift) - 1)
    }
}

/// What one kind of operation did in one phase.
#[derive(Default)]
pub struct Tally {
    pub ops: u64,
    /// Payload bytes of successful operations, uncompressed.
    pub bytes: u64,
    pub latency: Histogram,
    /// How often each error code came, and the first text that came with it.
    pub errors: Codes,
    /// The same for refusals that the scenario provokes.
    pub refusals: Codes,
}

/// A count and the first text for each gRPC code, or what stood for one.
pub type Codes = BTreeMap<&'static str, (u64, String)>;

impl Tally {
    pub fn success(&mut self, elapsed: Duration, bytes: u64) {
        self.ops += 1;
        self.bytes += bytes;
        self.latency.record_duration(elapsed);
    }

    pub fn error(&mut self, error: CallError) {
        self.ops += 1;
        self.errors.entry(error.code).or_insert((0, error.text)).0 += 1;
    }

    pub fn refusal(&mut self, elapsed: Duration, error: CallError) {
        self.ops += 1;
        self.latency.record_duration(elapsed);
        self.refusals.entry(error.code).or_insert((0, error.text)).0 += 1;
    }

    pub fn refusal_count(&self) -> u64 {
        self.refusals.values().map(|(count, _)| count).sum()
    }

    pub fn error_count(&self) -> u64 {
        self.errors.values().map(|(count, _)| count).sum()
    }
}

/// The middle value; the mean of the two middle ones of an even number. NaN of nothing.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: no value is lost and each bucket's bound is its largest value. Method: edges around every power of two.
    #[test]
    fn buckets_are_contiguous() {
        for bits in 0..64 {
            for value in [(1u64 << bits) - 1, 1 << bits, (1 << bits) + 1] {
                let bucket = Histogram::bucket(value);
                assert!(Histogram::upper_bound(bucket) >= value);
                assert!(bucket == 0 || Histogram::upper_bound(bucket - 1) < value, "{value}");
            }
        }
        assert!(Histogram::bucket(u64::MAX) < Histogram::default().buckets.len());
    }

    /// Goal: percentiles are right within the bucket width. Method: the numbers 1 to 100,000.
    #[test]
    fn quantiles_of_a_ramp() {
        let mut histogram = Histogram::default();
        (1..=100_000).for_each(|value| histogram.record(value));
        for q in [0.5, 0.9, 0.99, 0.999, 1.0] {
            let got = histogram.quantile(q) as f64;
            assert!((got / (q * 100_000.0) - 1.0).abs() < 0.008, "{q}: {got}");
        }
        assert_eq!(Histogram::default().quantile(0.5), 0);
    }
}
