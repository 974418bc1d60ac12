//! Tests of single steps in plans that no planner makes.

use std::sync::Arc;

use ronde_collectives::plan::{
    Form, Layout, Plan, Register, Round, Slice, Source, Span, Step, SubSchedule, Target, Transfer,
};
use ronde_wire::{Codec, DType, Epoch, Lane, Member, Rank, ReduceOp, Seq, SidecarIndex};

use super::topology;
use super::world::PlainMemory;
use crate::event::{Admission, Arithmetic};
use crate::executor::{Executor, ExecutorAction, ExecutorConfig};

const SEQ: Seq = Seq(1);
const PEER: SidecarIndex = SidecarIndex(1);
const ALL: Span = Span { start: 0, len: 4 };

/// A member with the ranks 0, 1 and 3 of four, of which rank 1 has joined. Elements are bytes.
fn perform(layout: Layout, rounds: Vec<Round>, memory: &mut PlainMemory) -> Vec<ExecutorAction> {
    let plan = Plan { layout, sub_schedules: vec![SubSchedule { lane: Lane(0), rounds }], prelude: false, window: 1 };
    let (dtype, op, codec) = (DType::U8, Some(ReduceOp::Sum), Codec::None);
    let admission = Admission {
        epoch: Epoch(1),
        seq: SEQ,
        topology: Arc::new(topology(&[0, 0, 1, 0])),
        plan: Arc::new(plan),
        arithmetic: Arithmetic { dtype, op, ranks: 4, prescale: 1.0, postscale: 1.0, codec, at_once: false },
        plugin: None,
        tensors: Vec::new(),
        local_ranks: vec![Rank(0), Rank(1), Rank(3)],
        served: vec![Rank(0), Rank(1), Rank(3)],
        set_served: [Rank(0), Rank(1), Rank(3)].into(),
        joined: vec![Rank(1)],
        contributions: Vec::new(),
        scheduled: false,
    };
    let mut executor = Executor::new(ExecutorConfig { me: SidecarIndex(0), lane: Lane(0), early_grant_bytes: 1 << 20 });
    executor.handle_epoch(Epoch(1));
    executor.handle_link_up(PEER, 1 << 20);
    executor.handle_admission(Arc::new(admission));
    let mut actions = Vec::new();
    while let Some(action) = executor.poll_action(memory) {
        if matches!(action, ExecutorAction::Send { .. }) {
            executor.handle_sent(PEER, 1);
        }
        actions.push(action);
    }
    actions
}

fn layout(targets: [Target; 4]) -> Layout {
    let slice = |(start, target)| Slice {
        span: Span { start, len: 1 },
        tensor: 0,
        source: Source::EveryRank,
        target,
        input_start: start,
        output_start: 0,
    };
    Layout { slices: (0..).zip(targets).map(slice).collect(), elements: 4 }
}

fn is_done(actions: &[ExecutorAction]) -> bool {
    matches!(actions.last(), Some(ExecutorAction::Done { .. }))
}

/// Results of ranks of other sidecars, and of joined ranks, are not written.
#[test]
fn results_are_written_at_their_offsets() {
    let layout = layout([Target::EveryRank, Target::One(Rank(1)), Target::One(Rank(2)), Target::One(Rank(3))]);
    let mut memory = PlainMemory::default();
    memory.contributions.inputs.insert((SEQ, 0, Rank(0)), vec![1, 2, 3, 4]);
    memory.contributions.inputs.insert((SEQ, 0, Rank(3)), vec![10, 20, 30, 40]);
    for whose in [None, Some(Rank(0)), Some(Rank(1)), Some(Rank(2)), Some(Rank(3))] {
        memory.outputs.insert((SEQ, 0, whose), vec![0]);
    }
    let into = Register(0);
    let steps = vec![Step::Contribute { into, span: ALL }, Step::Publish { from: into, span: ALL }];
    let actions = perform(layout, vec![Round { steps, transfers: Vec::new() }], &mut memory);
    assert!(is_done(&actions), "{actions:?}");
    let results: Vec<u8> = memory.outputs.values().map(|bytes| bytes[0]).collect();
    assert_eq!(results, [11, 0, 0, 0, 44], "shared, then of ranks 0 to 3");
}

/// While the transport holds the accumulator, the other operand may become the result, unless it is read again.
#[test]
fn an_operand_that_is_read_again_is_not_overwritten() {
    let (sum, other) = (Register(0), Register(1));
    let mut memory = PlainMemory::default();
    memory.contributions.inputs.insert((SEQ, 0, Rank(0)), vec![1, 2, 3, 4]);
    memory.contributions.inputs.insert((SEQ, 0, Rank(3)), vec![10, 20, 30, 40]);
    memory.outputs.insert((SEQ, 0, None), vec![0; 4]);
    let whole = Slice {
        span: ALL,
        tensor: 0,
        source: Source::EveryRank,
        target: Target::EveryRank,
        input_start: 0,
        output_start: 0,
    };
    let contribute = [sum, other].map(|into| Step::Contribute { into, span: ALL });
    let send = Transfer::Send { to: Member(1), from: sum, span: ALL, form: Form::Values };
    let add = Step::Reduce { left: sum, right: other, into: sum, span: ALL };
    let rounds = vec![
        Round { steps: contribute.to_vec(), transfers: vec![send] },
        Round { steps: vec![add, add, Step::Publish { from: sum, span: ALL }], transfers: Vec::new() },
    ];
    let actions = perform(Layout { slices: vec![whole], elements: 4 }, rounds, &mut memory);
    assert!(is_done(&actions), "{actions:?}");
    assert_eq!(memory.outputs[&(SEQ, 0, None)], [33, 66, 99, 132]);
}
