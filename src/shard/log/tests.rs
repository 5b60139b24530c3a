//! Which segment is filled next, how far, and what waits for a sync.

use super::*;
use crate::pure::random::SplitMix64;

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

const LAYOUT: Layout = Layout { segment_len: 1 << 20 };

/// Goal: a footer has room behind the records that it lists. Method: segments filled with records of random lengths, some of
/// which add much to the footer, until one does not fit.
#[test]
fn records_leave_room_for_their_footer() {
    for seed in 0..2000 {
        let mut random = SplitMix64(seed);
        let mut open = OpenSegment::new(0, 1, 0, Footer::default(), 0);
        loop {
            let len = RECORD_ALIGN * (2 + random.below(if seed % 2 == 0 { 30 } else { 3000 }) as usize);
            let entry_len = Footer::entry_len((random.below(3) == 0).then(|| random.below(500) as usize));
            let is_room = open.fits(LAYOUT, len, entry_len);
            let start = open.tail.next_multiple_of(BLOCK).max(HEAD_LEN) as usize;
            let records = (start + len).next_multiple_of(DISK_ALIGN);
            let footer = (open.footer_len + entry_len).next_multiple_of(DISK_ALIGN);
            assert_eq!(is_room, records + footer <= LAYOUT.segment_len as usize, "seed {seed}");
            if !is_room {
                break;
            }
            (open.tail, open.footer_len) = ((start + len) as u32, open.footer_len + entry_len);
        }
        assert!(open.tail > 0 && !OpenSegment { failed: true, ..open }.fits(LAYOUT, RECORD_ALIGN, 0));
    }
}

/// Goal: what was written is not taken for synced before it is, also when the list of it grows long. Method: seeded walks of
/// writes to two segments and of syncs, of which none ends well in every other walk, against the sync that each write needs.
#[test]
fn what_was_written_waits_for_its_sync() {
    for seed in 0..200 {
        let mut random = SplitMix64(seed);
        let (mut log, mut written) = (Log::default(), Vec::new());
        let (mut next, mut synced, mut tails) = (1, 0, [HEAD_LEN, HEAD_LEN]);
        let is_lucky = seed % 2 == 0;
        for _ in 0..800 {
            if random.below(2) == 0 {
                let segment = random.below(2) as u32;
                let tail = &mut tails[segment as usize];
                log.note_unsynced(segment, *tail..*tail + RECORD_ALIGN as u32, next, synced);
                written.push((segment, *tail, next));
                *tail += RECORD_ALIGN as u32;
            } else {
                if is_lucky && random.below(3) == 0 {
                    synced = next;
                }
                next += 1;
            }
        }
        for (segment, at, needed) in written {
            let location = LAYOUT.position(segment, at) / RECORD_ALIGN as u64;
            let told = log.sync_of(LAYOUT, location);
            // Where parts were joined for want of room, more than it needs.
            let is_exact = log.unsynced.len() < UNSYNCED_PARTS_MAX;
            assert!(needed <= synced || told == needed || (told > needed && !is_exact), "seed {seed}: {told} {needed}");
        }
    }
}

/// Goal: the header of a segment is written first and alone, few writes are under way, and one that failed holds up none. Method: by
/// hand.
#[test]
fn a_header_goes_first_and_alone() {
    let flight =
        |segment, start, failed| Flight { segment, start, end: start + BLOCK, ticket: Ticket::default(), failed };
    let holds_up = |flights, segment| Log { flights, ..Log::default() }.holds_up(segment);
    assert!(holds_up(vec![flight(3, 0, false)], 3) && !holds_up(vec![flight(3, 0, false)], 4));
    assert!(!holds_up(vec![flight(3, BLOCK, false)], 3) && !holds_up(vec![flight(3, 0, true)], 3));
    let two = |failed| vec![flight(1, BLOCK, false), flight(2, BLOCK, failed)];
    assert!(holds_up(two(false), 3) && !holds_up(two(true), 3));
}
