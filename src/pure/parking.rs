//! Keeps things for a while within a budget: the oldest go first, when their time is over or the budget is.

use std::collections::BTreeMap;

/// What may be parked at once, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct ParkingLimits {
    pub count: usize,
    pub memory_bytes: usize,
    pub disk_bytes: u64,
    pub keep_ms: u64,
}

/// What something costs while it is parked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    pub memory_bytes: usize,
    pub disk_bytes: u64,
}

/// Names one parked thing. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The parked things, oldest first.
pub struct Parking<T> {
    limits: ParkingLimits,
    parked: BTreeMap<Ticket, Parked<T>>,
    held: Cost,
    next: u64,
}

struct Parked<T> {
    thing: T,
    cost: Cost,
    since_ms: u64,
}

impl<T> Parking<T> {
    pub fn new(limits: ParkingLimits) -> Self {
        Self { limits, parked: BTreeMap::new(), held: Cost::default(), next: 0 }
    }

    pub fn len(&self) -> usize {
        self.parked.len()
    }

    pub fn is_empty(&self) -> bool {
        self.parked.is_empty()
    }

    /// What all parked things cost.
    pub fn held(&self) -> Cost {
        self.held
    }

    /// Parks a thing. `now_ms` must not be less than at earlier calls. Call `overdue` until it is `None` afterwards: what
    /// came too much may be this thing itself.
    pub fn park(&mut self, thing: T, cost: Cost, now_ms: u64) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.held.memory_bytes += cost.memory_bytes;
        self.held.disk_bytes += cost.disk_bytes;
        self.parked.insert(ticket, Parked { thing, cost, since_ms: now_ms });
        ticket
    }

    /// The thing, if it is still here.
    pub fn get(&self, ticket: Ticket) -> Option<&T> {
        self.parked.get(&ticket).map(|parked| &parked.thing)
    }

    /// Takes the thing back, if it is still here.
    pub fn take(&mut self, ticket: Ticket) -> Option<T> {
        let Parked { thing, cost, .. } = self.parked.remove(&ticket)?;
        self.held.memory_bytes -= cost.memory_bytes;
        self.held.disk_bytes -= cost.disk_bytes;
        Some(thing)
    }

    /// The oldest thing, when its time is over or there is too much.
    pub fn overdue(&mut self, now_ms: u64) -> Option<T> {
        let (&ticket, oldest) = self.parked.first_key_value()?;
        let is_full = self.parked.len() > self.limits.count
            || self.held.memory_bytes > self.limits.memory_bytes
            || self.held.disk_bytes > self.limits.disk_bytes;
        let is_old = now_ms >= oldest.since_ms + self.limits.keep_ms;
        if is_full || is_old { self.take(ticket) } else { None }
    }

    /// When the next thing's time will be over.
    pub fn deadline_ms(&self) -> Option<u64> {
        self.parked.first_key_value().map(|(_, oldest)| oldest.since_ms + self.limits.keep_ms)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Goal: the budget holds after each step, nothing is older than allowed, and only the oldest are given up.
        /// Method: random parks, takes and passing time against a list in order of parking.
        #[test]
        fn gives_up_the_oldest_and_only_when_it_must(
            steps in proptest::collection::vec((0u8..3, 0usize..60, 0u64..40), 1..200),
        ) {
            let limits = ParkingLimits { count: 6, memory_bytes: 150, disk_bytes: 150, keep_ms: 50 };
            let mut parking = Parking::new(limits);
            let mut model: Vec<(Ticket, u32, Cost, u64)> = Vec::new();
            let mut now_ms = 0;
            for (name, (step, size, wait_ms)) in steps.into_iter().enumerate() {
                match step {
                    0 => now_ms += wait_ms,
                    1 if !model.is_empty() => {
                        let (ticket, name, _, _) = model.remove(size % model.len());
                        prop_assert_eq!(parking.get(ticket), Some(&name));
                        prop_assert_eq!(parking.take(ticket), Some(name));
                        prop_assert_eq!(parking.take(ticket), None);
                    }
                    _ => {
                        let cost = Cost { memory_bytes: size, disk_bytes: 2 * wait_ms };
                        let ticket = parking.park(name as u32, cost, now_ms);
                        model.push((ticket, name as u32, cost, now_ms));
                    }
                }
                let full = |model: &[(Ticket, u32, Cost, u64)]| {
                    model.len() > limits.count
                        || model.iter().map(|item| item.2.memory_bytes).sum::<usize>() > limits.memory_bytes
                        || model.iter().map(|item| item.2.disk_bytes).sum::<u64>() > limits.disk_bytes
                };
                while let Some(name) = parking.overdue(now_ms) {
                    let oldest = model.remove(0);
                    prop_assert_eq!(oldest.1, name);
                    let mut before = vec![oldest];
                    before.extend(&model);
                    prop_assert!(full(&before) || oldest.3 + limits.keep_ms <= now_ms);
                }
                prop_assert!(!full(&model));
                prop_assert_eq!(parking.len(), model.len());
                prop_assert_eq!(parking.deadline_ms(), model.first().map(|oldest| oldest.3 + limits.keep_ms));
                prop_assert!(parking.deadline_ms().is_none_or(|deadline| deadline > now_ms));
            }
        }
    }
}
