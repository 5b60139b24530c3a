//! The cells in which one core counts, and what it says of them when it is asked.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

use super::table::{self, Kind, Metric, Unit};

/// Counts up from the start of the process.
#[derive(Debug, Default)]
pub struct Counter(Cell<u64>);

impl Counter {
    /// One more.
    pub fn count(&self) {
        self.add(1);
    }

    pub fn add(&self, more: u64) {
        self.0.set(self.0.get().wrapping_add(more));
    }

    pub fn get(&self) -> u64 {
        self.0.get()
    }
}

/// Upper bounds of the buckets for times, in nanoseconds: from 0.1 ms up, with all of bazel-remote's (0.5 s to 320 s), so
/// that its dashboards go on to work.
const TIME_BOUNDS: [u64; 21] = {
    const US: u64 = 1_000;
    const MS: u64 = 1_000 * US;
    const S: u64 = 1_000 * MS;
    [
        100 * US,
        250 * US,
        500 * US,
        MS,
        2_500 * US,
        5 * MS,
        10 * MS,
        25 * MS,
        50 * MS,
        100 * MS,
        250 * MS,
        500 * MS,
        S,
        2_500 * MS,
        5 * S,
        10 * S,
        20 * S,
        40 * S,
        80 * S,
        160 * S,
        320 * S,
    ]
};
/// Upper bounds of the buckets for sizes, in bytes. Source: bazel-remote's `http_response_size_bytes`.
const SIZE_BOUNDS: [u64; 8] = [100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000];
/// Upper bounds of the buckets for ages, in nanoseconds: a minute to a month.
const AGE_BOUNDS: [u64; 9] = {
    const MINUTE: u64 = 60_000_000_000;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    [MINUTE, 10 * MINUTE, HOUR, 3 * HOUR, 12 * HOUR, DAY, 3 * DAY, 7 * DAY, 30 * DAY]
};

/// Upper bounds of the buckets for times that calls and requests took, in nanoseconds.
#[derive(Debug, Clone)]
pub struct TimeBounds(Cow<'static, [u64]>);

/// Bounds that an operator may give: each is a series for each method.
const TIME_BOUNDS_MAX: usize = 64;

impl Default for TimeBounds {
    fn default() -> Self {
        Self(Cow::Borrowed(&TIME_BOUNDS))
    }
}

impl TimeBounds {
    /// Bounds in seconds, in any order, as bazel-remote takes them.
    pub fn of_seconds(bounds: &[f64]) -> Result<Self, String> {
        if bounds.is_empty() || bounds.len() > TIME_BOUNDS_MAX {
            return Err(format!("give 1 to {TIME_BOUNDS_MAX} bounds"));
        }
        if let Some(bad) = bounds.iter().find(|bound| !(1e-9..=1e9).contains(*bound)) {
            return Err(format!("{bad} is no number of seconds above 0"));
        }
        let mut nanos: Vec<u64> = bounds.iter().map(|bound| (bound * 1e9).round() as u64).collect();
        nanos.sort_unstable();
        if let Some(twice) = nanos.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("{} stands there twice", twice[0] as f64 / 1e9));
        }
        Ok(Self(nanos.into()))
    }
}

/// How often values fell into each bucket.
#[derive(Debug)]
pub struct Histogram {
    bounds: Cow<'static, [u64]>,
    /// One more than there are bounds: the last is for what is above all of them.
    counts: Box<[Cell<u64>]>,
    sum: Cell<u64>,
    unit: Unit,
}

impl Histogram {
    /// For times of operations.
    pub fn of_times() -> Self {
        Self::new(Cow::Borrowed(&TIME_BOUNDS), Unit::Seconds)
    }

    /// For times of calls and requests.
    pub fn of_handling(bounds: &TimeBounds) -> Self {
        Self::new(bounds.0.clone(), Unit::Seconds)
    }

    /// For bytes.
    pub fn of_sizes() -> Self {
        Self::new(Cow::Borrowed(&SIZE_BOUNDS), Unit::Bytes)
    }

    /// For times from minutes to weeks.
    pub fn of_ages() -> Self {
        Self::new(Cow::Borrowed(&AGE_BOUNDS), Unit::Seconds)
    }

    fn new(bounds: Cow<'static, [u64]>, unit: Unit) -> Self {
        let counts = std::iter::repeat_with(Cell::default).take(bounds.len() + 1).collect();
        Self { bounds, counts, sum: Cell::default(), unit }
    }

    pub fn observe_time(&self, time: Duration) {
        debug_assert_eq!(self.unit, Unit::Seconds);
        self.observe(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub fn observe_bytes(&self, bytes: u64) {
        debug_assert_eq!(self.unit, Unit::Bytes);
        self.observe(bytes);
    }

    fn observe(&self, value: u64) {
        let bucket = &self.counts[self.bounds.partition_point(|&bound| bound < value)];
        bucket.set(bucket.get() + 1);
        self.sum.set(self.sum.get().saturating_add(value));
    }

    fn distribution(&self) -> Distribution {
        // Why divided, not multiplied: 100,000 / 1e9 is 0.0001 to the last bit, 100,000 x 1e-9 is not.
        let scale = if self.unit == Unit::Seconds { 1e9 } else { 1.0 };
        Distribution {
            bounds: self.bounds.iter().map(|&bound| bound as f64 / scale).collect(),
            counts: self.counts.iter().map(Cell::get).collect(),
            sum: self.sum.get() as f64 / scale,
        }
    }
}

/// What a histogram held at one moment, in the unit of its metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    /// Upper bounds.
    pub bounds: Vec<f64>,
    /// How many fell between a bound and the one below it; the last is for what is above all bounds.
    pub counts: Vec<u64>,
    pub sum: f64,
}

/// The value of one series.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Number(f64),
    Distribution(Distribution),
}

/// The values of a metric's labels, in the order of its row.
pub type Labels = Vec<Cow<'static, str>>;

/// All series of one core, or of all cores, at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    series: BTreeMap<(Metric, Labels), Value>,
}

/// Numbers that become a sample.
pub trait Amount {
    fn amount(self) -> f64;
}

impl Amount for f64 {
    fn amount(self) -> f64 {
        self
    }
}

impl Amount for u64 {
    fn amount(self) -> f64 {
        self as f64
    }
}

impl Amount for usize {
    fn amount(self) -> f64 {
        self as f64
    }
}

impl Amount for Duration {
    fn amount(self) -> f64 {
        self.as_secs_f64()
    }
}

impl Amount for &Counter {
    fn amount(self) -> f64 {
        self.get() as f64
    }
}

impl Snapshot {
    /// Adds to the one series of a metric without labels.
    pub fn add(&mut self, metric: Metric, amount: impl Amount) {
        self.add_labels(metric, Vec::new(), amount);
    }

    /// Adds to the series of these label values.
    pub fn add_for<const N: usize>(&mut self, metric: Metric, labels: [&'static str; N], amount: impl Amount) {
        self.add_labels(metric, labels.map(Cow::Borrowed).to_vec(), amount);
    }

    /// Adds to the series of this core.
    pub fn add_core(&mut self, metric: Metric, core: usize, amount: impl Amount) {
        self.add_labels(metric, vec![core.to_string().into()], amount);
    }

    /// Adds all that a histogram holds.
    pub fn add_histogram(&mut self, metric: Metric, labels: Labels, histogram: &Histogram) {
        debug_assert_eq!(histogram.unit, table::row(metric).unit);
        self.put(metric, labels, Value::Distribution(histogram.distribution()));
    }

    /// Adds to the series of these label values.
    pub fn add_labels(&mut self, metric: Metric, labels: Labels, amount: impl Amount) {
        self.put(metric, labels, Value::Number(amount.amount()));
    }

    /// Adds all that another one says.
    pub fn merge(&mut self, other: &Self) {
        for ((metric, labels), value) in &other.series {
            self.put(*metric, labels.clone(), value.clone());
        }
    }

    /// A metric's value, summed over its labels; 0 when nobody has said anything.
    pub fn total(&self, metric: Metric) -> f64 {
        let number = |value: &Value| match value {
            Value::Number(number) => *number,
            Value::Distribution(distribution) => distribution.sum,
        };
        // Why no `sum`: of nothing it is -0.
        self.of(metric).fold(0.0, |sum, (_, value)| sum + number(value))
    }

    /// The number, or the count of values, of one series.
    #[cfg(test)]
    pub fn value(&self, metric: Metric, labels: &[&str]) -> Option<f64> {
        let (_, value) = self.of(metric).find(|(known, _)| known.iter().eq(labels))?;
        Some(match value {
            Value::Number(number) => *number,
            Value::Distribution(distribution) => distribution.counts.iter().sum::<u64>() as f64,
        })
    }

    /// All series of a metric.
    pub fn of(&self, metric: Metric) -> impl Iterator<Item = (&Labels, &Value)> {
        let all = self.series.range((metric, Vec::new())..);
        all.take_while(move |((of, _), _)| *of == metric).map(|((_, labels), value)| (labels, value))
    }

    /// Makes what is below zero zero: a difference of counts that two cores took at different moments.
    pub(super) fn floor_gauges(&mut self) {
        for ((metric, _), value) in &mut self.series {
            if let (Kind::Gauge, Value::Number(number)) = (table::row(*metric).kind, value) {
                *number = number.max(0.0);
            }
        }
    }

    fn put(&mut self, metric: Metric, labels: Labels, value: Value) {
        debug_assert_eq!(labels.len(), table::row(metric).labels.len(), "{metric:?}");
        debug_assert_eq!(matches!(value, Value::Distribution(_)), table::row(metric).kind == Kind::Histogram);
        match (self.series.entry((metric, labels)).or_insert(Value::Number(0.0)), value) {
            (Value::Number(known), Value::Number(more)) => *known += more,
            (Value::Distribution(known), Value::Distribution(more)) => {
                known.counts.iter_mut().zip(more.counts).for_each(|(known, more)| *known += more);
                known.sum += more.sum;
            }
            (known, value) => *known = value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an operator's bounds are sorted, and what is no list of bounds is an error. Method: lists of each kind.
    #[test]
    fn bounds_of_an_operator() {
        let bounds = TimeBounds::of_seconds(&[2.5, 0.5, 1.0]).expect("good");
        assert_eq!(*bounds.0, [500_000_000, 1_000_000_000, 2_500_000_000]);
        let histogram = Histogram::of_handling(&bounds);
        histogram.observe_time(Duration::from_millis(700));
        let told = histogram.distribution();
        assert_eq!((told.bounds, told.counts), (vec![0.5, 1.0, 2.5], vec![0, 1, 0, 0]));
        for bad in [&[][..], &[1.0, 1.0], &[0.0], &[-1.0], &[f64::NAN], &[f64::INFINITY], &[1.0; 65]] {
            assert!(TimeBounds::of_seconds(bad).is_err(), "{bad:?}");
        }
    }

    /// Goal: a value falls into the first bucket whose bound is not below it, and the sum is in the metric's unit.
    /// Method: values on, below and above bounds.
    #[test]
    fn buckets_include_their_bound() {
        let histogram = Histogram::of_times();
        for us in [0, 100, 101, 250, 1_000_000_000] {
            histogram.observe_time(Duration::from_micros(us));
        }
        let distribution = histogram.distribution();
        assert_eq!(distribution.bounds[..3], [0.0001, 0.00025, 0.0005]);
        assert_eq!(distribution.counts[..3], [2, 2, 0]);
        assert_eq!(distribution.counts.last(), Some(&1));
        assert_eq!(distribution.counts.iter().sum::<u64>(), 5);
        assert!((distribution.sum - 1000.000451).abs() < 1e-6);
        assert!(TIME_BOUNDS.is_sorted() && SIZE_BOUNDS.is_sorted() && AGE_BOUNDS.is_sorted());
    }

    /// Goal: merging adds numbers and distributions series by series, and a total spans labels. Method: two snapshots that
    /// share some series.
    #[test]
    fn snapshots_add_up() {
        let histogram = Histogram::of_times();
        histogram.observe_time(Duration::from_millis(1));
        let (mut one, mut two) = (Snapshot::default(), Snapshot::default());
        one.add_for(Metric::Received, ["grpc"], 5u64);
        two.add_for(Metric::Received, ["grpc"], 7u64);
        two.add_for(Metric::Received, ["http"], 1u64);
        one.add_histogram(Metric::DiskFlushTime, vec![], &histogram);
        two.add_histogram(Metric::DiskFlushTime, vec![], &histogram);
        two.add_core(Metric::CoreMessagesWaiting, 1, -3.0);
        one.merge(&two);
        assert_eq!(one.total(Metric::Received), 13.0);
        assert_eq!(one.of(Metric::Received).count(), 2);
        let (_, flushed) = one.of(Metric::DiskFlushTime).next().expect("a series");
        let Value::Distribution(flushed) = flushed else { panic!("a distribution") };
        assert_eq!(flushed.counts.iter().sum::<u64>(), 2);
        assert_eq!(one.total(Metric::CoreMessagesWaiting), -3.0);
        one.floor_gauges();
        assert_eq!(one.total(Metric::CoreMessagesWaiting), 0.0);
        assert_eq!(one.total(Metric::Connections), 0.0);
    }
}
