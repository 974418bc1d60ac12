//! The checker bites: each way to spoil correct plans is named for what it is.

use ronde_collectives::check::Violation;
use ronde_collectives::plan::REGISTERS_MAX;
use ronde_collectives::{Form, Register, Round, Span, Step, Transfer, WorkKind};
use ronde_wire::{Algorithm, Lane, Member, Rank};

use crate::mutated::{Case, at, mutated};
use crate::worlds::{flat, placed};

mutated!(a_contribution_left_out, Case::ring(), at(1, 0, 0), |round| round.steps.clear(), Violation::Stale { at: place, .. } if place == at(1, 0, 0));
mutated!(a_later_contribution_left_out, Case::ring(), at(1, 0, 2), |round| { round.steps.remove(0); }, Violation::Stale { at: place, .. } if place == at(1, 0, 2));
mutated!(a_contribution_twice, Case::ring(), at(1, 0, 1), |round| round.steps.insert(0, round.steps[0]), Violation::Unread { at: place, .. } if place == at(1, 0, 1));
mutated!(
    a_reduction_left_out,
    Case::ring(),
    at(2, 1, 1),
    |round| { round.steps.remove(1); },
    Violation::Unread { register: Register(2), at: place } if place.member == Member(2)
);
mutated!(
    a_reduction_twice,
    Case::doubling(),
    at(2, 0, 2),
    |round| {
        let step = round.steps[0];
        round.steps = vec![step, step];
    },
    Violation::CountedTwice { at: place, rank: Rank(0) } if place == at(2, 0, 2)
);
mutated!(
    a_chunk_left_out,
    Case::doubling(),
    at(2, 0, 1),
    |round| {
        round.transfers.remove(0);
    },
    Violation::UnmatchedReceive { from: Member(2), .. }
);
mutated!(
    a_receive_left_out,
    Case::doubling(),
    at(2, 0, 1),
    |round| {
        round.transfers.remove(1);
    },
    Violation::UnmatchedSend { to: Member(2), .. }
);
mutated!(operands_swapped, Case::ring(), at(2, 0, 1), |round| swap_operands(round), Violation::OperandOrder { at: place } if place == at(2, 0, 1));
mutated!(
    operands_swapped_in_doubling,
    Case::doubling(),
    at(0, 0, 2),
    |round| swap_operands(round),
    Violation::OperandOrder { .. }
);
mutated!(a_span_too_short, Case::ring(), at(1, 0, 1), |round| {
    let Transfer::Send { span, .. } = &mut round.transfers[0] else { panic!("a ring sends first") };
    span.len -= 1;
}, Violation::SpansDiffer { at: place, to: Member(2), .. } if place == at(1, 0, 1));
mutated!(a_step_on_another_span, Case::ring(), at(1, 0, 1), |round| {
    let Step::Contribute { span, .. } = &mut round.steps[0] else { panic!("a ring contributes first") };
    span.start += 1;
}, Violation::Stale { at: place, .. } if place == at(1, 0, 1));
mutated!(a_span_beyond_the_end, Case::ring(), at(1, 0, 1), |round| {
    let Step::Contribute { span, .. } = &mut round.steps[0] else { panic!("a ring contributes first") };
    span.start = u64::MAX - 1;
}, Violation::Span { at: place, .. } if place == at(1, 0, 1));
mutated!(
    a_span_longer_than_a_chunk,
    Case::ring(),
    at(1, 0, 1),
    |round| {
        let Step::Contribute { span, .. } = &mut round.steps[0] else { panic!("a ring contributes first") };
        span.len = 17;
    },
    Violation::Span { .. }
);
mutated!(
    the_wrong_peer,
    Case::ring(),
    at(1, 0, 1),
    |round| {
        let Transfer::Send { to, .. } = &mut round.transfers[0] else { panic!("a ring sends first") };
        *to = Member(3);
    },
    Violation::UnmatchedSend { to: Member(3), .. }
);
mutated!(
    nobody_as_peer,
    Case::ring(),
    at(1, 0, 1),
    |round| {
        let Transfer::Send { to, .. } = &mut round.transfers[0] else { panic!("a ring sends first") };
        *to = Member(4);
    },
    Violation::Peer { peer: Member(4), .. }
);
mutated!(
    oneself_as_peer,
    Case::ring(),
    at(1, 0, 1),
    |round| {
        let Transfer::Send { to, .. } = &mut round.transfers[0] else { panic!("a ring sends first") };
        *to = Member(1);
    },
    Violation::Peer { peer: Member(1), .. }
);
mutated!(
    a_peer_twice,
    Case::ring(),
    at(1, 0, 1),
    |round| round.transfers.push(round.transfers[0]),
    Violation::Peer { peer: Member(2), .. }
);
mutated!(
    received_into_what_is_sent,
    Case::ring(),
    at(1, 0, 1),
    |round| {
        let Transfer::Send { from, .. } = round.transfers[0] else { panic!("a ring sends first") };
        let Transfer::Receive { into, .. } = &mut round.transfers[1] else { panic!("then it receives") };
        *into = from;
    },
    Violation::Clash { .. }
);
mutated!(
    a_register_too_many,
    Case::ring(),
    at(1, 0, 1),
    |round| {
        let Transfer::Receive { into, .. } = &mut round.transfers[1] else { panic!("a ring receives second") };
        *into = Register(REGISTERS_MAX);
    },
    Violation::NoRegister { register: Register(REGISTERS_MAX), .. }
);
mutated!(
    received_into_an_unread_register,
    Case::ring(),
    at(1, 0, 1),
    |round| {
        let Transfer::Receive { into, .. } = &mut round.transfers[1] else { panic!("a ring receives second") };
        *into = Register(3);
    },
    Violation::Stale { .. } | Violation::Unread { .. }
);
mutated!(published_before_it_is_finished, Case::ring(), at(1, 0, 3), |round| round.steps.swap(2, 3), Violation::Unfinished { at: place } if place == at(1, 0, 3));
mutated!(finished_before_it_is_complete, Case::ring(), at(1, 0, 3), |round| round.steps.swap(1, 2), Violation::Missing { at: place, rank: Rank(1) } if place == at(1, 0, 3));
mutated!(
    not_finished,
    Case::doubling(),
    at(0, 0, 3),
    |round| round.steps.retain(|step| !matches!(step, Step::Finish { .. })),
    Violation::Unfinished { .. }
);
mutated!(
    finished_twice,
    Case::ring(),
    at(1, 0, 3),
    |round| round.steps.insert(2, round.steps[2]),
    Violation::FinishedBefore { .. }
);
mutated!(published_twice, Case::ring(), at(1, 0, 4), |round| round.steps.push(round.steps[0]), Violation::PublishedTwice { at: place, .. } if place == at(1, 0, 4));
mutated!(
    not_published,
    Case::ring(),
    at(1, 0, 6),
    |round| round.steps.clear(),
    Violation::Unread { .. } | Violation::NotPublished { member: Member(1), .. }
);
mutated!(
    not_published_though_sent_on,
    Case::ring(),
    at(1, 0, 4),
    |round| round.steps.clear(),
    Violation::NotPublished { member: Member(1), .. }
);
mutated!(
    a_result_in_neither_operand,
    Case::doubling(),
    at(2, 0, 2),
    |round| {
        let Step::Reduce { into, .. } = &mut round.steps[0] else { panic!("doubling reduces first") };
        *into = Register(2);
    },
    Violation::Target { .. }
);
mutated!(a_value_reduced_with_itself, Case::doubling(), at(2, 0, 2), |round| {
    let Step::Reduce { left, right, into, .. } = &mut round.steps[0] else { panic!("doubling reduces first") };
    (*left, *right) = (*into, *into);
}, Violation::CountedTwice { at: place, .. } if place == at(2, 0, 2));
mutated!(
    reduced_after_it_was_finished,
    Case::doubling(),
    at(2, 0, 2),
    |round| {
        let Step::Reduce { into, span, .. } = round.steps[0] else { panic!("doubling reduces first") };
        round.steps.insert(0, Step::Finish { register: into, span });
    },
    Violation::Missing { .. }
);
mutated!(
    a_broadcast_that_reduces,
    Case::new(flat(3), Algorithm::BinomialTree, WorkKind::Broadcast { root: Rank(1) }, vec![vec![9]]),
    at(1, 0, 0),
    |round| {
        round.steps.push(Step::Finish { register: Register(0), span: Span { start: 0, len: 9 } });
    },
    Violation::Step { .. }
);
mutated!(
    another_ranks_contribution,
    Case::new(flat(3), Algorithm::BinomialTree, WorkKind::Broadcast { root: Rank(1) }, vec![vec![9]]),
    at(0, 0, 2),
    |round| {
        round.steps.insert(0, Step::Contribute { into: Register(1), span: Span { start: 0, len: 9 } });
    },
    Violation::NotLocal { rank: Rank(1), .. }
);

fn swap_operands(round: &mut Round) {
    let step = round.steps.iter_mut().find_map(|step| match step {
        Step::Reduce { left, right, .. } => Some((left, right)),
        _ => None,
    });
    let (left, right) = step.expect("this round reduces");
    std::mem::swap(left, right);
}

#[test]
fn a_round_too_late() {
    let mut case = Case::ring();
    case.plans[1].sub_schedules[0].rounds.insert(0, Round::default());
    assert!(matches!(case.violation(), Violation::UnmatchedReceive { .. } | Violation::UnmatchedSend { .. }));
}

#[test]
fn layouts_that_differ() {
    let mut case = Case::ring();
    case.plans[2].layout.slices[1].input_start += 1;
    assert_eq!(case.violation(), Violation::LayoutsDiffer { member: Member(2) });
}

#[test]
fn a_layout_that_maps_an_element_twice() {
    let mut case = Case::ring();
    for plan in &mut case.plans {
        plan.layout.slices[2].input_start -= 1;
        plan.layout.slices[2].output_start -= 1;
    }
    assert!(matches!(case.violation(), Violation::Tiling { tensor: 0, .. }), "{:?}", case.violation());
}

#[test]
fn a_layout_that_mixes_ranks() {
    let kind = WorkKind::AllGather;
    let mut case = Case::new(placed(&[0, 1, 0], |_| true), Algorithm::Ring, kind, vec![vec![3, 3, 3]]);
    for plan in &mut case.plans {
        plan.layout.slices[0].source = ronde_collectives::Source::One(Rank(2));
    }
    assert!(matches!(case.violation(), Violation::Slice { slice: 0, .. }), "{:?}", case.violation());
}

#[test]
fn sub_schedules_on_other_lanes() {
    let mut case = Case::ring();
    case.plans[3].sub_schedules[1].lane = Lane(0);
    assert_eq!(case.violation(), Violation::SubSchedulesDiffer { member: Member(3), sub_schedule: 1 });
    let mut case = Case::ring();
    case.plans.iter_mut().for_each(|plan| plan.sub_schedules[1].lane = Lane(2));
    assert_eq!(case.violation(), Violation::SubSchedulesDiffer { member: Member(0), sub_schedule: 1 });
    let mut case = Case::ring();
    drop(case.plans[1].sub_schedules.pop());
    assert!(matches!(case.violation(), Violation::SubSchedulesDiffer { member: Member(1), .. }));
}

#[test]
fn a_window_other_than_the_tunings() {
    let mut case = Case::ring();
    case.plans[1].window = 3;
    assert_eq!(case.violation(), Violation::Window { member: Member(1), window: 3 });
}

#[test]
fn a_member_without_plan() {
    let mut case = Case::ring();
    drop(case.plans.pop());
    assert_eq!(case.violation(), Violation::Plans { given: 3, members: 4 });
}

/// Two trees that are complete, in order and finished, but not the same: sums that differ in the last bit.
#[test]
fn members_that_compute_differently() {
    let topology = flat(4);
    let mut case = Case::new(topology, Algorithm::RecursiveDoubling, WorkKind::AllReduce, vec![vec![16]]);
    let span = Span { start: 0, len: 16 };
    let (sum, other) = (Register(0), Register(1));
    // Member 0 computes ((0 1) (2 3)), member 1 now the rotation ((2 3) (0 1)).
    let step = &mut case.plans[1].sub_schedules[0].rounds[2].steps[0];
    assert_eq!(*step, Step::Reduce { left: sum, right: other, into: sum, span });
    *step = Step::Reduce { left: other, right: sum, into: sum, span };
    assert_eq!(case.violation(), Violation::ResultsDiffer { member: Member(1), element: 0 });
}

#[test]
fn a_barrier_that_a_member_passes_early() {
    let topology = flat(4);
    let mut case = Case::new(topology, Algorithm::Dissemination, WorkKind::Barrier, Vec::new());
    for (member, plan) in (0_u32..).zip(&mut case.plans) {
        let round = &mut plan.sub_schedules[0].rounds[1];
        let (to, from) = (Member((member + 1) % 4), Member((member + 3) % 4));
        let empty = Span { start: 0, len: 0 };
        round.transfers = vec![
            Transfer::Send { to, from: Register(0), span: empty, form: Form::Values },
            Transfer::Receive { from, into: Register(1), span: empty, form: Form::Values },
        ];
    }
    assert!(matches!(case.violation(), Violation::NotAwaited { .. }), "{:?}", case.violation());
}

#[test]
fn more_rounds_than_the_closed_form() {
    let mut case = Case::doubling();
    for plan in &mut case.plans {
        plan.sub_schedules[0].rounds.insert(0, Round::default());
    }
    assert!(matches!(case.violation(), Violation::ClosedForm { what: "rounds", found: 5, predicted: 4, .. }));
}
