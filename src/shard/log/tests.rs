//! Which segment is filled next.

use super::*;

/// Goal: segments are filled in the order of their generations, whatever the order in which leases are asked for, come
/// and are taken. Method: leases for reclaims and others, kept in each order; some taken in between.
#[test]
fn segments_are_filled_in_the_order_of_their_generations() {
    let lease = |n: u32| Lease { segment: n, shard: ShardId(0), class: Class::Log, generation: u64::from(n) };
    let orders: [[u32; 4]; 6] = [[1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3], [3, 1, 4, 2], [1, 4, 2, 3], [4, 1, 3, 2]];
    for order in orders {
        for reserved in 0..16u32 {
            for taken_after in 1..=4 {
                let (mut log, mut filled, mut kept) = (Log::default(), Vec::new(), Vec::new());
                for (n, count) in order.into_iter().zip(1..) {
                    if log.keep_lease(lease(n), reserved >> n & 1 == 1) {
                        kept.push(n);
                    }
                    if count == taken_after {
                        filled.extend(log.next_lease(reserved & 1 == 1).map(|(lease, _)| lease));
                    }
                }
                while let Some((lease, _)) = log.next_lease(true) {
                    filled.push(lease);
                }
                assert!(filled.is_sorted_by_key(|lease| lease.generation), "{order:?} {reserved:b}: {filled:?}");
                let mut segments: Vec<u32> = filled.iter().map(|lease| lease.segment).collect();
                segments.sort_unstable();
                kept.sort_unstable();
                assert_eq!(segments, kept, "each is filled once");
            }
        }
    }
}
