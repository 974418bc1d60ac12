//! The checker bites for every kind of work: targets, codecs, reductions of all ranks at once, preludes.

use ronde_collectives::check::Violation;
use ronde_collectives::{Form, Register, Round, Span, Step, Target, Transfer, WorkKind};
use ronde_wire::{Algorithm, Member, Rank};

use crate::mutated::{Case, at, mutated, mutated_step};
use crate::worlds::{flat, placed};

fn halving() -> Case {
    Case::new(flat(5), Algorithm::HalvingDoubling, WorkKind::AllReduce, vec![vec![50]])
}

fn reduce_scatter() -> Case {
    Case::new(flat(4), Algorithm::Ring, WorkKind::ReduceScatter, vec![vec![7, 0, 5, 9]])
}

fn reduce() -> Case {
    Case::new(flat(5), Algorithm::BinomialTree, WorkKind::Reduce { root: Rank(1) }, vec![vec![9]])
}

fn gather() -> Case {
    Case::new(flat(4), Algorithm::Linear, WorkKind::Gather { root: Rank(2) }, vec![vec![7, 3, 5, 7]])
}

fn scatter() -> Case {
    Case::new(flat(4), Algorithm::Linear, WorkKind::Scatter { root: Rank(0) }, vec![vec![7, 3, 3, 9]])
}

fn all_to_all() -> Case {
    Case::new(flat(3), Algorithm::Pairwise, WorkKind::AllToAll, vec![vec![1, 2, 3, 4, 5, 6, 7, 8, 9]])
}

fn coded() -> Case {
    Case::new(flat(4), Algorithm::Direct, WorkKind::AllReduceCoded { encoded_bytes: 128 }, vec![vec![30]])
}

fn n_ary() -> Case {
    Case::new(placed(&[0, 1, 2, 1], |_| true), Algorithm::Direct, WorkKind::AllReduceNAry, vec![vec![30]])
}

fn two_pass() -> Case {
    Case::new(flat(3), Algorithm::Direct, WorkKind::AllReduceTwoPass { measures: 2 }, vec![vec![6_000]])
}

fn adaptive() -> Case {
    Case::new(flat(3), Algorithm::Direct, WorkKind::AllReduceAdaptive, vec![vec![60]])
}

/// Any step of a sort, as a macro's pattern.
macro_rules! step {
    ($name:ident) => {
        Step::$name { .. }
    };
}

// Halving and doubling.
mutated_step!(
    a_shard_not_finished,
    halving(),
    0,
    step!(Finish),
    |round, index| leave_out(round, index),
    Violation::Unfinished { .. }
);
mutated_step!(
    halves_swapped,
    halving(),
    4,
    step!(Reduce),
    |round, index| swap_operands(&mut round.steps[index]),
    Violation::OperandOrder { .. }
);
mutated_step!(
    a_fold_left_out,
    halving(),
    0,
    step!(Reduce),
    |round, index| leave_out(round, index),
    Violation::Unread { .. } | Violation::OperandOrder { .. }
);
mutated!(
    a_shard_to_the_wrong_half,
    halving(),
    at(4, 0, 1),
    |round| redirect(round, Member(2)),
    Violation::UnmatchedSend { .. }
);

// Reduce-scatter and reduce.
mutated_step!(
    a_share_not_finished,
    reduce_scatter(),
    0,
    step!(Finish),
    |round, index| leave_out(round, index),
    Violation::Unfinished { .. }
);
mutated_step!(
    a_share_published_by_a_forwarding_member,
    reduce_scatter(),
    2,
    step!(Reduce),
    |round, index| {
        let Step::Reduce { into, span, .. } = round.steps[index] else { unreachable!("it was found as one") };
        round.steps.insert(index + 1, Step::Publish { from: into, span });
    },
    Violation::Missing { .. }
);
mutated_step!(
    a_share_swapped,
    reduce_scatter(),
    1,
    step!(Reduce),
    |round, index| swap_operands(&mut round.steps[index]),
    Violation::OperandOrder { .. }
);
mutated_step!(
    branches_swapped,
    reduce(),
    1,
    step!(Reduce),
    |round, index| swap_operands(&mut round.steps[index]),
    Violation::OperandOrder { .. }
);
mutated_step!(
    a_branch_reduced_twice,
    reduce(),
    1,
    step!(Reduce),
    |round, index| round.steps.insert(index, round.steps[index]),
    Violation::CountedTwice { .. }
);
mutated_step!(
    a_root_that_averages_early,
    reduce(),
    1,
    step!(Contribute),
    |round, index| {
        let Step::Contribute { into, span } = round.steps[index] else { unreachable!("it was found as one") };
        round.steps.push(Step::Finish { register: into, span });
    },
    Violation::Missing { .. }
);

// Gather, scatter, all-to-all.
mutated_step!(
    a_gathered_block_published_by_its_source,
    gather(),
    0,
    step!(Contribute),
    |round, index| publish_too(round, index),
    Violation::NotLocal { rank: Rank(2), .. }
);
mutated_step!(
    a_gathered_block_forgotten,
    gather(),
    2,
    Step::Publish { from: Register(3), .. },
    |round, index| leave_out(round, index),
    Violation::Unread { register: Register(3), .. }
);
mutated!(gathered_blocks_exchanged, gather(), at(2, 0, 0), |round| swap_receives(round), Violation::Stale { .. });
mutated_step!(a_scattered_block_forgotten, scatter(), 3, step!(Publish), |round, index| leave_out(round, index), Violation::Unread { at: place, .. } if place.member == Member(3));
mutated_step!(
    a_scattered_block_contributed_by_its_receiver,
    scatter(),
    3,
    step!(Publish),
    |round, index| {
        let Step::Publish { from, span } = round.steps[index] else { unreachable!("it was found as one") };
        round.steps.insert(index, Step::Contribute { into: from, span });
    },
    Violation::NotLocal { rank: Rank(0), .. }
);
mutated_step!(
    a_block_published_by_its_sender,
    all_to_all(),
    1,
    Step::Contribute { into: Register(1), .. },
    |round, index| publish_too(round, index),
    Violation::NotLocal { rank: Rank(2), .. }
);
mutated_step!(
    the_members_block_for_itself_forgotten,
    all_to_all(),
    1,
    step!(Publish),
    |round, index| leave_out(round, index),
    Violation::Unread { register: Register(0), .. }
);
mutated_step!(
    a_movement_that_reduces,
    all_to_all(),
    1,
    step!(Publish),
    |round, index| {
        let Step::Publish { from, span } = round.steps[index] else { unreachable!("it was found as one") };
        round.steps.insert(index, Step::Reduce { left: from, right: from, into: from, span });
    },
    Violation::Step { step: "reduce", kind: "all-to-all", .. }
);

// Codecs.
mutated_step!(
    a_contribution_sent_without_encoding,
    coded(),
    1,
    step!(Encode),
    |round, _index| round.steps.retain(|step| !matches!(step, Step::Encode { .. })),
    Violation::HeldForm { held: Form::Values, read: Form::Encoded, .. }
);
mutated_step!(
    encoded_a_second_time,
    coded(),
    1,
    step!(Decode),
    |round, index| {
        let Step::Decode { register, span } = round.steps[index] else { unreachable!("it was found as one") };
        round.steps.insert(index + 1, Step::Encode { register, span });
    },
    Violation::EncodedAgain { .. }
);
mutated_step!(
    encoded_before_it_is_complete,
    coded(),
    1,
    step!(Finish),
    |round, index| {
        let Step::Finish { register, span } = round.steps[index] else { unreachable!("it was found as one") };
        round.steps.insert(index, Step::Encode { register, span });
    },
    Violation::EncodedAgain { .. }
);
mutated_step!(
    an_owner_that_publishes_without_the_codec,
    coded(),
    1,
    step!(Finish),
    |round, index| {
        let Step::Finish { register, span } = round.steps[index] else { unreachable!("it was found as one") };
        round.steps.insert(index + 1, Step::Publish { from: register, span });
    },
    Violation::PublishedPlain { .. }
);
mutated_step!(
    decoded_operands_swapped,
    coded(),
    1,
    step!(Reduce),
    |round, index| swap_operands(&mut round.steps[index]),
    Violation::OperandOrder { .. }
);
mutated_step!(
    a_codec_in_work_without_one,
    halving(),
    0,
    step!(Contribute),
    |round, index| {
        let Step::Contribute { into, span } = round.steps[index] else { unreachable!("it was found as one") };
        round.steps.push(Step::Encode { register: into, span });
    },
    Violation::Step { step: "encode", .. }
);

#[test]
fn an_owner_that_does_not_encode_its_own_contribution() {
    let mut case = coded();
    let (place, index) = case.step(1, |step| matches!(step, Step::Encode { register: Register(1), .. }));
    leave_out(case.round(place), index);
    let (place, index) = case.step(1, |step| matches!(step, Step::Decode { register: Register(1), .. }));
    leave_out(case.round(place), index);
    assert!(matches!(case.violation(), Violation::ReducedPlain { .. }), "{:?}", case.violation());
}

#[test]
fn a_result_sent_without_encoding() {
    let mut case = coded();
    for plan in &mut case.plans {
        for round in plan.sub_schedules.iter_mut().flat_map(|sub_schedule| &mut sub_schedule.rounds) {
            round.steps.retain(|step| !matches!(step, Step::Encode { .. } | Step::Decode { .. }));
            for transfer in &mut round.transfers {
                let (Transfer::Send { form, .. } | Transfer::Receive { form, .. }) = transfer;
                *form = Form::Values;
            }
        }
    }
    assert!(matches!(case.violation(), Violation::SentPlain { .. }), "{:?}", case.violation());
}

// All ranks at once.
mutated_step!(
    reduced_before,
    n_ary(),
    1,
    step!(ContributeEach),
    |round, index| {
        let Step::ContributeEach { into, span } = round.steps[index] else { unreachable!("it was found as one") };
        round.steps[index] = Step::Contribute { into, span };
    },
    Violation::Step { step: "contribute", kind: "n-ary all-reduce", .. }
);
mutated!(
    another_members_ranks,
    n_ary(),
    at(0, 0, 0),
    |round| swap_receives(round),
    Violation::RegisterOrder { .. } | Violation::Span { .. }
);
mutated_step!(
    a_result_into_an_operand,
    n_ary(),
    1,
    step!(ReduceN),
    |round, index| {
        let Step::ReduceN { first, into, .. } = &mut round.steps[index] else { unreachable!("it was found as one") };
        *into = *first;
    },
    Violation::Target { .. }
);
mutated_step!(
    a_rank_left_out,
    n_ary(),
    1,
    Step::ContributeEach { into: Register(1), .. },
    |round, index| leave_out(round, index),
    Violation::Stale { .. }
);
mutated!(
    ranks_sent_as_values,
    n_ary(),
    at(0, 0, 0),
    |round| {
        let (Transfer::Send { form, .. } | Transfer::Receive { form, .. }) = &mut round.transfers[0];
        *form = Form::Values;
    },
    Violation::FormsDiffer { .. }
);

// Preludes.
mutated_step!(
    an_input_not_measured,
    two_pass(),
    1,
    step!(MeasureOwn),
    |round, index| leave_out(round, index),
    Violation::Measured { .. }
);
mutated_step!(
    an_input_measured_twice,
    two_pass(),
    1,
    step!(MeasureOwn),
    |round, index| round.steps.push(round.steps[index]),
    Violation::Measured { .. }
);
mutated_step!(
    nothing_concluded,
    two_pass(),
    1,
    step!(Conclude),
    |round, index| leave_out(round, index),
    Violation::Unread { .. } | Violation::NotConcluded { .. }
);
mutated_step!(
    concluded_twice,
    two_pass(),
    1,
    step!(Conclude),
    |round, index| round.steps.push(round.steps[index]),
    Violation::Prelude { step: "conclude", .. }
);
mutated_step!(
    a_reduction_in_the_prelude,
    two_pass(),
    1,
    step!(MeasureOwn),
    |round, _index| {
        round.steps.push(Step::ReduceN { first: Register(0), into: Register(7), span: Span { start: 0, len: 1 } });
    },
    Violation::Prelude { step: "reduce all", .. }
);
mutated_step!(
    a_measure_after_the_prelude,
    two_pass(),
    1,
    step!(ReduceN),
    |round, _index| {
        round.steps.push(Step::MeasureOwn { into: Register(7), span: Span { start: 0, len: 1 } });
    },
    Violation::Prelude { step: "measure own", .. }
);
mutated_step!(
    products_not_added,
    adaptive(),
    1,
    step!(MeasureAll),
    |round, index| leave_out(round, index),
    Violation::Unread { .. } | Violation::Measured { .. }
);
mutated_step!(
    products_added_twice,
    adaptive(),
    1,
    step!(MeasureAll),
    |round, index| round.steps.push(round.steps[index]),
    Violation::Measured { .. }
);
mutated_step!(
    an_adaptive_prelude_that_measures_inputs_alone,
    adaptive(),
    1,
    step!(MeasureAll),
    |round, index| {
        let Step::MeasureAll { into, span, .. } = round.steps[index] else { unreachable!("it was found as one") };
        round.steps[index] = Step::MeasureOwn { into, span };
    },
    Violation::Step { step: "measure own", kind: "adaptive all-reduce", .. }
);

#[test]
fn measures_in_the_wrong_registers() {
    let mut case = two_pass();
    let (place, _) = case.step(1, |step| matches!(step, Step::Conclude { .. }));
    swap_receives(case.round(at(1, 0, place.round - 1)));
    assert!(matches!(case.violation(), Violation::RegisterOrder { .. }), "{:?}", case.violation());
}

/// Every element is measured once in both, but not in the same order: sums that differ in the last bit.
#[test]
fn measures_taken_in_another_order() {
    let mut case = two_pass();
    let first = case.plans[1].sub_schedules[0].rounds[0].steps[0];
    let second = std::mem::replace(&mut case.plans[1].sub_schedules[0].rounds[1].steps[0], first);
    case.plans[1].sub_schedules[0].rounds[0].steps[0] = second;
    let proof = case.check().expect("each element is measured once");
    let straight = two_pass().check().expect("the plans are correct");
    assert_ne!(proof.measured[1], straight.measured[1]);
    assert_eq!(proof.measured[0], straight.measured[0]);
}

#[test]
fn a_prelude_flag_that_does_not_match_the_work() {
    let mut case = two_pass();
    case.plans[2].prelude = false;
    assert_eq!(case.violation(), Violation::PreludeMissing { member: Member(2) });
    let mut case = n_ary();
    case.plans[2].prelude = true;
    assert_eq!(case.violation(), Violation::PreludeMissing { member: Member(2) });
}

#[test]
fn a_result_for_another_rank() {
    for (mut case, slice) in [(reduce_scatter(), 0), (reduce(), 0), (gather(), 1), (scatter(), 1), (all_to_all(), 4)] {
        for plan in &mut case.plans {
            plan.layout.slices[slice].target = Target::One(Rank(if slice == 0 { 3 } else { 0 }));
        }
        let violation = case.violation();
        assert!(matches!(violation, Violation::Slice { .. } | Violation::Tiling { .. }), "{violation}");
    }
}

#[test]
fn a_share_read_from_the_wrong_offset() {
    for mut case in [reduce_scatter(), scatter(), all_to_all()] {
        for plan in &mut case.plans {
            plan.layout.slices[1].input_start += 1;
        }
        assert!(matches!(case.violation(), Violation::Slice { slice: 1, .. }), "{:?}", case.violation());
    }
}

#[test]
fn more_registers_than_the_closed_form_allows() {
    let mut case = reduce_scatter();
    for round in &mut case.plans[1].sub_schedules[0].rounds[1..2] {
        for step in &mut round.steps {
            match step {
                Step::Contribute { into, .. } => *into = Register(9),
                Step::Reduce { right, .. } => *right = Register(9),
                _ => {}
            }
        }
    }
    let expected = Violation::Registers { member: Member(1), sub_schedule: 0, found: 4, allowed: 3 };
    assert_eq!(case.violation(), expected);
}

fn swap_operands(step: &mut Step) {
    let Step::Reduce { left, right, .. } = step else { panic!("the step reduces two operands") };
    std::mem::swap(left, right);
}

/// Publishes what was just contributed.
fn publish_too(round: &mut Round, index: usize) {
    let Step::Contribute { into, span } = round.steps[index] else { panic!("the step contributes") };
    round.steps.insert(index + 1, Step::Publish { from: into, span });
}

fn leave_out(round: &mut Round, index: usize) {
    round.steps.remove(index);
}

fn redirect(round: &mut Round, other: Member) {
    let sent = round.transfers.iter_mut().find_map(|transfer| match transfer {
        Transfer::Send { to, .. } => Some(to),
        Transfer::Receive { .. } => None,
    });
    *sent.expect("the round sends") = other;
}

/// Exchanges the registers of the first two receives.
fn swap_receives(round: &mut Round) {
    let mut receives = round.transfers.iter_mut().filter_map(|transfer| match transfer {
        Transfer::Receive { into, .. } => Some(into),
        Transfer::Send { .. } => None,
    });
    let (first, second) = (receives.next(), receives.next());
    std::mem::swap(first.expect("the round receives"), second.expect("twice"));
}
