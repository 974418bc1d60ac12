//! Properties of the arena under random traffic, and its edges.

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

fn arena(segment_bytes_min: u64, limit_bytes: u64) -> Arena {
    let config = ArenaConfig { segment_bytes_min, limit_bytes, alignment: 64, setting: "RONDE_TEST_LIMIT" };
    Arena::new(config).expect("the alignment is a power of two")
}

/// An arena together with the caller that grows it.
struct GrowingArena {
    arena: Arena,
    segments: u32,
}

impl GrowingArena {
    fn new(segment_bytes_min: u64, limit_bytes: u64) -> Self {
        Self { arena: arena(segment_bytes_min, limit_bytes), segments: 0 }
    }

    fn lease(&mut self, bytes: u64) -> Result<Slot, LeaseError> {
        loop {
            match self.arena.lease(bytes)? {
                Lease::Slot(slot) => return Ok(slot),
                Lease::Grow { bytes } => {
                    assert_eq!(bytes % GROWTH_STEP_BYTES, 0);
                    self.arena.add_segment(SegmentId(self.segments), bytes).expect("growth fits the limit");
                    self.segments += 1;
                }
            }
        }
    }
}

fn assert_disjoint(slots: &[Slot], arena: &Arena) {
    let mut sorted = slots.to_vec();
    sorted.sort_unstable();
    for slot in &sorted {
        assert_eq!(slot.offset % 64, 0);
        assert!(slot.offset + slot.len <= arena.segments[&slot.segment], "{slot:?} leaves its segment");
    }
    for pair in sorted.windows(2) {
        let apart = pair[0].segment != pair[1].segment || pair[0].offset + pair[0].len.max(1) <= pair[1].offset;
        assert!(apart, "{:?} and {:?} overlap", pair[0], pair[1]);
    }
}

/// Every byte is leased, on a stack or in a span, exactly once.
fn assert_accounted(arena: &Arena) {
    let stacked: u64 = arena.stacks.iter().map(|(class, locations)| class * locations.len() as u64).sum();
    let free: u64 = arena.free.by_location.values().sum();
    assert_eq!(arena.free.by_location.len(), arena.free.by_size.len());
    assert_eq!(stacked + free + arena.in_use_bytes, arena.segments.values().sum::<u64>());
    assert_eq!(arena.in_use_bytes, arena.leased.values().map(|leased| leased.class).sum::<u64>());
}

#[derive(Debug, Clone)]
enum Op {
    Lease(u64),
    Release(prop::sample::Index),
}

fn operations() -> impl Strategy<Value = Vec<Op>> {
    let bytes = prop_oneof![0..300_u64, 1_000..70_000_u64, 100_000..3_000_000_u64];
    let operation =
        prop_oneof![3 => bytes.prop_map(Op::Lease), 2 => any::<prop::sample::Index>().prop_map(Op::Release)];
    prop::collection::vec(operation, 1..200)
}

proptest! {
    #[test]
    fn live_slots_never_overlap_and_all_bytes_return(operations in operations()) {
        let limit = 8 * MIB;
        let mut grown = GrowingArena::new(MIB, limit);
        let mut live = Vec::new();
        for operation in operations {
            match operation {
                Op::Lease(bytes) => match grown.lease(bytes) {
                    Ok(slot) => {
                        prop_assert_eq!(slot.len, bytes);
                        live.push(slot);
                    }
                    Err(LeaseError::Limit { wanted, in_use, mapped, .. }) => {
                        prop_assert_eq!(wanted, bytes);
                        prop_assert!(in_use <= mapped && mapped <= limit);
                    }
                },
                Op::Release(index) if !live.is_empty() => {
                    let slot = live.swap_remove(index.index(live.len()));
                    prop_assert_eq!(grown.arena.release(slot), Ok(()));
                    prop_assert_eq!(grown.arena.release(slot), Err(ArenaError::NotLeased(slot)));
                }
                Op::Release(_) => {}
            }
            assert_disjoint(&live, &grown.arena);
            assert_accounted(&grown.arena);
            prop_assert!(grown.arena.usage().mapped_bytes <= limit);
        }
        for slot in live {
            prop_assert_eq!(grown.arena.release(slot), Ok(()));
        }
        grown.arena.drain_stacks();
        // Each segment is one free span again: nothing is lost and nothing stays cut up.
        let whole: BTreeMap<Location, u64> =
            grown.arena.segments.iter().map(|(segment, bytes)| (Location { segment: *segment, offset: 0 }, *bytes)).collect();
        prop_assert_eq!(&grown.arena.free.by_location, &whole);
        prop_assert_eq!(grown.arena.usage().slots, 0);
    }

    #[test]
    fn the_last_released_of_a_class_is_leased_first(sizes in prop::collection::vec(1..200_000_u64, 1..40)) {
        let mut grown = GrowingArena::new(16 * MIB, 64 * MIB);
        let slots: Vec<Slot> = sizes.iter().map(|bytes| grown.lease(*bytes).expect("within the limit")).collect();
        for slot in &slots {
            grown.arena.release(*slot).expect("leased");
        }
        for slot in slots.iter().rev() {
            prop_assert_eq!(grown.arena.lease(slot.len), Ok(Lease::Slot(*slot)));
        }
    }

    #[test]
    fn a_repeated_step_adds_no_segment(sizes in prop::collection::vec(0..2_000_000_u64, 1..60), seed in any::<u64>()) {
        let mut grown = GrowingArena::new(MIB, 256 * MIB);
        let mut order = sizes;
        let mut segments_after_first = None;
        for step in 0..6_u64 {
            let slots: Vec<Slot> = order.iter().map(|bytes| grown.lease(*bytes).expect("within the limit")).collect();
            assert_disjoint(&slots, &grown.arena);
            for slot in slots {
                grown.arena.release(slot).expect("leased");
            }
            // Names become ready in another order in each step.
            let turn = usize::try_from((seed >> (8 * step)) & 0xff).expect("a byte fits") % order.len();
            order.rotate_left(turn);
            prop_assert_eq!(*segments_after_first.get_or_insert(grown.segments), grown.segments);
        }
    }

    #[test]
    fn classes_hold_their_bytes_with_bounded_slack(bytes in 0..u64::MAX / 2, shift in 0..44_u32, align_log in 0..13_u32) {
        let (bytes, alignment) = (bytes >> shift, 1_u64 << align_log);
        let class = class_of(bytes, alignment).expect("far from overflow");
        prop_assert!(class >= bytes && class > 0 && class.is_multiple_of(alignment));
        prop_assert!(class - bytes <= (bytes / 4).min(CLASS_STEP_BYTES_MAX).max(alignment));
        prop_assert_eq!(class_of(class, alignment), Some(class), "a class is its own class");
    }
}

#[test]
fn a_slot_of_zero_bytes_is_valid() {
    let mut grown = GrowingArena::new(MIB, MIB);
    let first = grown.lease(0).expect("room");
    let second = grown.lease(0).expect("room");
    assert_ne!(first.offset, second.offset);
    assert_eq!((first.len, second.len), (0, 0));
    assert_eq!(grown.arena.release(first), Ok(()));
    assert_eq!(grown.arena.release(first), Err(ArenaError::NotLeased(first)));
    assert!(grown.arena.is_leased(second));
}

#[test]
fn the_limit_is_an_immediate_error_with_its_setting() {
    let mut grown = GrowingArena::new(MIB, 4 * MIB);
    let slot = grown.lease(3 * MIB).expect("within the limit");
    let error = grown.lease(2 * MIB).expect_err("over the limit");
    let expected = LeaseError::Limit {
        limit_bytes: 4 * MIB,
        wanted: 2 * MIB,
        in_use: 3 * MIB,
        mapped: 3 * MIB,
        setting: "RONDE_TEST_LIMIT",
    };
    assert_eq!(error, expected);
    assert!(error.to_string().contains("RONDE_TEST_LIMIT = 4194304"));
    assert!(grown.lease(u64::MAX).is_err(), "a size that overflows is over any limit");
    grown.arena.release(slot).expect("leased");
    assert_eq!(grown.lease(2 * MIB).map(|slot| slot.segment), Ok(SegmentId(0)), "the mapped space serves it");
}

#[test]
fn a_slot_of_exactly_the_limit_fits() {
    let mut grown = GrowingArena::new(64 * MIB, 64 * MIB);
    assert!(grown.lease(64 * MIB).is_ok());
    assert_eq!(arena(64 * MIB, 64 * MIB + 5).lease(1), Ok(Lease::Grow { bytes: 64 * MIB }));
    assert!(arena(MIB, 0).lease(1).is_err());
}

#[test]
fn growth_shrinks_to_what_the_limit_leaves() {
    let mut grown = GrowingArena::new(3 * MIB, 4 * MIB);
    grown.lease(3 * MIB).expect("within the limit");
    assert_eq!(grown.arena.lease(1), Ok(Lease::Grow { bytes: MIB }));
}

#[test]
fn only_exactly_the_leased_slot_is_released() {
    let mut grown = GrowingArena::new(MIB, MIB);
    let slot = grown.lease(100).expect("room");
    let wrong = [
        Slot { len: 101, ..slot },
        Slot { offset: slot.offset + 64, ..slot },
        Slot { segment: SegmentId(7), ..slot },
        Slot { offset: u64::MAX, ..slot },
    ];
    for slot in wrong {
        assert_eq!(grown.arena.release(slot), Err(ArenaError::NotLeased(slot)));
    }
    assert_eq!(grown.arena.release(slot), Ok(()));
}

#[test]
fn segments_are_checked_when_added() {
    let mut arena = arena(MIB, 2 * MIB);
    assert_eq!(arena.add_segment(SegmentId(1), MIB + 17), Ok(()));
    assert_eq!(arena.add_segment(SegmentId(1), MIB), Err(ArenaError::SegmentKnown(SegmentId(1))));
    let refused = |segment, bytes| ArenaError::SegmentSize { segment, bytes, alignment: 64, room: MIB - 17 };
    assert_eq!(arena.add_segment(SegmentId(2), MIB), Err(refused(SegmentId(2), MIB)));
    assert_eq!(arena.add_segment(SegmentId(2), 63), Err(refused(SegmentId(2), 63)));
    let config = ArenaConfig { segment_bytes_min: 1, limit_bytes: 1, alignment: 48, setting: "" };
    assert_eq!(Arena::new(config).err(), Some(ArenaError::Alignment { alignment: 48 }));
}
