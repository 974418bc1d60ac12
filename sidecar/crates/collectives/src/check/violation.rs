//! Violations: the errors that the checker finds in plans.

use std::fmt;

use ronde_wire::{Member, Rank};

use crate::inputs::PlanError;
use crate::plan::{Form, Register, Source, Span, Target};

/// A position in the plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlanPosition {
    /// Whose plan.
    pub member: Member,
    /// The sub-schedule, counted over all lanes.
    pub sub_schedule: usize,
    /// The round of the sub-schedule.
    pub round: usize,
}

impl fmt::Display for PlanPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, sub-schedule {}, round {}", self.member, self.sub_schedule, self.round)
    }
}

/// Why plans are rejected. Each is a bug of the planner.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are named and the messages say what they mean")]
pub enum Violation {
    /// There is no closed form for these inputs.
    #[error("no plans exist for these inputs: {0}")]
    Inputs(PlanError),
    /// The number of plans is not that of the members.
    #[error("{given} plans for {members} members")]
    Plans { given: usize, members: usize },
    /// A member's layout is not the first one's.
    #[error("the layout of {member} is not that of member 0")]
    LayoutsDiffer { member: Member },
    /// Slices leave a gap, are empty, or do not map to the tensors as the work requires.
    #[error("slice {slice} of the layout {problem}")]
    Slice { slice: usize, problem: &'static str },
    /// The slices of a tensor do not tile the elements from a source to a target.
    #[error(
        "element {element} from {source_ranks:?} to {target:?} in tensor {tensor} is not in the bucket exactly once"
    )]
    Tiling { tensor: usize, source_ranks: Source, target: Target, element: u64 },
    /// Members have different sub-schedules, or a sub-schedule's lane is not the same everywhere or outside of the tuning.
    #[error(
        "sub-schedule {sub_schedule} of {member} differs from that of member 0 or is on a lane outside of the tuning"
    )]
    SubSchedulesDiffer { member: Member, sub_schedule: usize },
    /// The window is not the tuning's.
    #[error("the window of {member} is {window}")]
    Window { member: Member, window: usize },
    /// A span extends over the bucket's end or is longer than a chunk.
    #[error("{at}: span {span:?} is longer than a chunk or extends over the bucket's end")]
    Span { at: PlanPosition, span: Span },
    /// A register that does not exist.
    #[error("{at}: there is no {register:?}")]
    NoRegister { at: PlanPosition, register: Register },
    /// A sub-schedule that names more registers than the closed form allows.
    #[error("sub-schedule {sub_schedule} of {member} names {found} registers, where {allowed} suffice")]
    Registers { member: Member, sub_schedule: usize, found: u64, allowed: u64 },
    /// A step that the kind of work does not have.
    #[error("{at}: {kind} has no such step as {step}")]
    Step { at: PlanPosition, step: &'static str, kind: &'static str },
    /// A step of a prelude elsewhere, or another one in it.
    #[error("{at}: {step} is not allowed inside or outside of a prelude, or must be its last step")]
    Prelude { at: PlanPosition, step: &'static str },
    /// A plan with a prelude for work that has none, or without one where it needs one.
    #[error("{member} has a prelude where there is nothing to measure, or none where there is")]
    PreludeMissing { member: Member },
    /// A reduction whose result goes into the wrong register.
    #[error(
        "{at}: the result of a reduction goes into neither operand, or, where all ranks are reduced at once, into one"
    )]
    Target { at: PlanPosition },
    /// A transfer with the member itself or an unknown one, or a second one in the same direction with the same peer.
    #[error("{at}: {peer} is not a peer, or is one twice in this direction")]
    Peer { at: PlanPosition, peer: Member },
    /// A register is received into while another transfer of the round uses it.
    #[error("{at}: {register:?} is received into while another transfer uses it")]
    Clash { at: PlanPosition, register: Register },
    /// A send without its receive.
    #[error("{at}: {to} does not receive what is sent to it")]
    UnmatchedSend { at: PlanPosition, to: Member },
    /// A receive without its send.
    #[error("{at}: {from} does not send what is received from it")]
    UnmatchedReceive { at: PlanPosition, from: Member },
    /// Sender and receiver name different elements.
    #[error("{at}: {sent:?} is sent to {to}, which expects {expected:?}")]
    SpansDiffer { at: PlanPosition, to: Member, sent: Span, expected: Span },
    /// Sender and receiver name different forms.
    #[error("{at}: {sent:?} are sent to {to}, which expects {expected:?}")]
    FormsDiffer { at: PlanPosition, to: Member, sent: Form, expected: Form },
    /// A register holds another form than is read from it.
    #[error("{at}: {register:?} holds {held:?}, not {read:?}")]
    HeldForm { at: PlanPosition, register: Register, held: Form, read: Form },
    /// A register holds another member's content than its number requires.
    #[error("{at}: {register:?} does not hold what comes from {member}")]
    RegisterOrder { at: PlanPosition, register: Register, member: Member },
    /// The number of rounds, sub-schedules, bytes sent or bytes reduced is not the closed form's.
    #[error("{what} of {member}: {found} in the plan, {predicted} by the closed form")]
    ClosedForm { what: &'static str, member: Member, found: u64, predicted: u64 },
    /// A register does not hold the span that is read from it.
    #[error("{at}: {register:?} does not hold {span:?}")]
    Stale { at: PlanPosition, register: Register, span: Span },
    /// A register's value is never read before it is overwritten or the sub-schedule ends.
    #[error("{at}: {register:?} was written but never read")]
    Unread { at: PlanPosition, register: Register },
    /// A member contributes the input of a rank of another member.
    #[error("{at}: {rank} is not local")]
    NotLocal { at: PlanPosition, rank: Rank },
    /// Both operands hold the same contribution.
    #[error("{at}: the contribution of {rank} would count twice")]
    CountedTwice { at: PlanPosition, rank: Rank },
    /// The right operand's members do not follow the left one's.
    #[error("{at}: the right operand does not begin with the member after the left one's last")]
    OperandOrder { at: PlanPosition },
    /// A finished value is reduced or finished again.
    #[error("{at}: the value has been finished before")]
    FinishedBefore { at: PlanPosition },
    /// A value is finished or published while a contribution is missing.
    #[error("{at}: the contribution of {rank} is missing")]
    Missing { at: PlanPosition, rank: Rank },
    /// A reduction is published before it is finished.
    #[error("{at}: the value is published but not finished")]
    Unfinished { at: PlanPosition },
    /// Values leave a member without the codec.
    #[error("{at}: what is sent to {to} is not encoded")]
    SentPlain { at: PlanPosition, to: Member },
    /// A decoded operand and one that has not been through the codec.
    #[error("{at}: only one operand has been through the codec")]
    ReducedPlain { at: PlanPosition },
    /// A result that has not been through the codec, so that others end with other bits.
    #[error("{at}: the value is published as it was before the codec")]
    PublishedPlain { at: PlanPosition },
    /// The same elements go through the codec twice in one stage.
    #[error("{at}: what is encoded here was encoded before")]
    EncodedAgain { at: PlanPosition },
    /// A value that is neither a contribution nor finished goes through the codec.
    #[error("{at}: what is encoded is neither this member's contribution nor finished")]
    EncodedBetween { at: PlanPosition },
    /// Elements that never go through the codec.
    #[error("element {element} is not encoded in stage {stage}: a member's as a source, or behind those the result's")]
    NotEncoded { stage: usize, element: u64 },
    /// An element that is measured not exactly once.
    #[error("{at}: what is concluded from has measured element {element} not exactly once")]
    Measured { at: PlanPosition, element: u64 },
    /// A member concludes from other measures than another one.
    #[error("{at}: the measures were made in another way than those of the first member that concluded")]
    ConclusionsDiffer { at: PlanPosition },
    /// A member concludes a second time.
    #[error("{at}: the measures have been concluded from before")]
    ConcludedTwice { at: PlanPosition },
    /// A member never concludes.
    #[error("{member} concludes from nothing")]
    NeverConcluded { member: Member },
    /// An n-ary reduction uses measures that have not been concluded.
    #[error("{at}: the reduction needs what has not been concluded yet")]
    NotConcluded { at: PlanPosition },
    /// An element of the result is written twice.
    #[error("{at}: element {element} of the bucket is published twice")]
    PublishedTwice { at: PlanPosition, element: u64 },
    /// An element of the result is not written.
    #[error("{member} does not publish element {element} of the bucket")]
    NotPublished { member: Member, element: u64 },
    /// Two members end with different expressions.
    #[error("{member} computes element {element} of the bucket with another expression than member 0")]
    ResultsDiffer { member: Member, element: u64 },
    /// A member passes a barrier without knowing that another one has arrived.
    #[error("{member} passes without knowing that {other} has arrived")]
    NotAwaited { member: Member, other: Member },
    /// No event is possible, though operations are incomplete.
    #[error(
        "operation {operation} is stuck at {at}; a lane's head there is (operation, place) {head:?}; schedule {schedule}"
    )]
    Stuck { operation: usize, at: PlanPosition, head: Option<(usize, PlanPosition)>, schedule: String },
}
