//! Who gets a lease, and who does not take it.

use super::*;
use crate::rt::channel::reply;
use crate::shard::disk::{Ack, DiskConfig};
use crate::shard::geometry;

/// Goal: a segment that is granted to somebody who has gone away is free again. Method: more of these than there are segments; each
/// goes just before the grant is carried out.
#[test]
fn a_lease_that_nobody_takes_comes_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = DiskConfig { dir: dir.path().into(), max_size_bytes: 64 << 20, ack: Ack::Buffered };
    let volume = geometry::open(&config).expect("the directory opens");
    let (mut main, _ports) = wire(&volume, 1);
    for number in 0..3 * volume.segment_count() {
        let (to, answer) = reply();
        main.take(ToPool::Ask { shard: ShardId(0), class: Class::Log, reply: to });
        let step = main.pool.next_step();
        assert!(matches!(step, Some(Step::Grant(..))), "{step:?} for number {number}");
        drop(answer);
        assert!(!main.carry_out(step.expect("a grant")));
        assert!(main.replies.is_empty());
    }
}
