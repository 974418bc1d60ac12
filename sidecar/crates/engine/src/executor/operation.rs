//! One admitted operation on one lane: its running sub-schedules, and the chunks that it accepts.
//!
//! **How private memory is bounded.** At most `window` sub-schedules are in flight, each with the registers that it names: at
//! most [`REGISTERS_MAX`](ronde_collectives::plan::REGISTERS_MAX) of a chunk. Chunks that arrive before their round are
//! parked; for each sender they belong to at most `3 window` sub-schedules:
//! - Some are in flight here, at most `window`.
//! - Others have not begun here. When both members send to each other in such a sub-schedule, the sender has not ended it: it
//!   still has to receive from this member. When this member only receives (down a tree, around a ring, a root that
//!   gathers), the sender waits for a *token*: an empty chunk with the round [`ROUND_TAKEN`] that this member sends
//!   when the sub-schedule is over here. Until then the sub-schedule counts as in flight at the sender. So at most `window` of them
//!   are in flight there.
//! - The last `window` sub-schedules of a lane need no token, as no later sub-schedule waits for it: these may be over at the
//!   sender.
//!
//! A **prelude** does not change this. While it is in flight here no other sub-schedule is. Of the sub-schedules after
//! it, a sender that has finished it has at most `window` in flight, and has ended none in which it receives from this
//! member.
//!
//! Tokens cannot deadlock: of all sub-schedules that some member has not ended, the first one is in flight everywhere,
//! so its rounds end everywhere, and then its tokens are sent. A prelude is that first sub-schedule until it is over
//! everywhere.

use std::sync::Arc;

use bytes::Bytes;
use ronde_collectives::plan::{Form, Span, SubSchedule, Transfer};
use ronde_wire::frame::{Chunk, ChunkHeader, ROUND_TAKEN};
use ronde_wire::{Lane, Member, SidecarIndex};

use super::Phase;
use super::arithmetic::{ElementOps, StepContext, StepError};
use super::link::{InFlight, cost_bytes};
use super::measured::Measured;
use super::register::Buffers;
use super::stats::ExecutorStats;
use super::sub_schedule::{Outgoing, Parked, RunningSubSchedule, SubScheduleContext, SubScheduleProgress};
use super::violation::Violation;
use crate::event::Admission;
use crate::memory::Memory;

#[derive(Debug)]
pub(super) struct Operation {
    pub(super) admission: Arc<Admission>,
    ops: ElementOps,
    /// The sub-schedules of this lane that have something to do here.
    sub_schedules: Vec<QueuedSubSchedule>,
    next: usize,
    running: Vec<RunningSubSchedule>,
    parked: Parked,
}

/// A sub-schedule that is not started yet.
#[derive(Clone, Copy, Debug)]
struct QueuedSubSchedule {
    sub_schedule: u32,
    /// Whether a later sub-schedule may wait for its end, so that tokens are exchanged.
    uses_tokens: bool,
}

/// The progress of an operation.
pub(super) enum OperationProgress {
    Idle,
    Worked(Phase),
    Send {
        to: SidecarIndex,
        chunk: Chunk,
    },
    /// A sub-schedule is over; the chunks are its tokens.
    SubScheduleOver(Vec<(SidecarIndex, Chunk)>),
    Done,
}

/// The peers of an operation on one lane.
#[derive(Debug, Default)]
pub(super) struct Peers {
    /// All of them, ascending.
    pub(super) all: Vec<SidecarIndex>,
    /// The peers that send a chunk larger than their credit: they wait for `Admitted`.
    pub(super) beyond_credit: Vec<SidecarIndex>,
}

impl Operation {
    pub(super) fn new(admission: Arc<Admission>, lane: Lane) -> Result<Self, StepError> {
        let ops = ElementOps::new(&admission)?;
        let plan = &admission.plan;
        let of_lane = || (0_u32..).zip(&plan.sub_schedules).filter(|(_, sub_schedule)| sub_schedule.lane == lane);
        let total = of_lane().count();
        let sub_schedules = of_lane()
            .enumerate()
            .filter(|(_, (_, sub_schedule))| has_work(sub_schedule))
            .map(|(ordinal, (sub_schedule, _))| QueuedSubSchedule {
                sub_schedule,
                uses_tokens: ordinal + plan.window < total,
            })
            .collect();
        Ok(Self { admission, ops, sub_schedules, next: 0, running: Vec::new(), parked: Parked::default() })
    }

    pub(super) fn peers(&self, granted_bytes: u64) -> Peers {
        let mut peers = Peers::default();
        for queued in &self.sub_schedules {
            for round in &self.sub_schedule(queued.sub_schedule).rounds {
                for transfer in &round.transfers {
                    let member = partner(transfer);
                    insert(&mut peers.all, self.sidecar(member));
                    if let Transfer::Receive { span, form, .. } = *transfer
                        && cost_bytes(self.bytes_from(member, span, form)) > granted_bytes
                    {
                        insert(&mut peers.beyond_credit, self.sidecar(member));
                    }
                }
            }
        }
        peers
    }

    /// Checks a chunk against the plan and parks it until its round.
    pub(super) fn handle_chunk(&mut self, from: SidecarIndex, chunk: Chunk) -> Result<(), Violation> {
        let ChunkHeader { sub_schedule, round, .. } = chunk.header;
        let unexpected = Violation::Unexpected { seq: chunk.seq, sub_schedule, round };
        let Some(member) = self.admission.topology.member(from) else { return Err(unexpected) };
        let Ok(queued) = self.sub_schedules.binary_search_by_key(&sub_schedule, |queued| queued.sub_schedule) else {
            return Err(unexpected);
        };
        if round == ROUND_TAKEN {
            return self.handle_token(member, &chunk, unexpected);
        }
        let round = round as usize;
        let Some((span, form)) = expected(self.sub_schedule(sub_schedule), round, member) else {
            return Err(unexpected);
        };
        self.check_span(span, form, self.bytes_from(member, span, form), &chunk)?;
        if self.has_received(queued, round, member) {
            return Err(Violation::Duplicate { seq: chunk.seq, sub_schedule, round: chunk.header.round });
        }
        let sub_schedules_max = WINDOWS_PARKED_MAX * self.admission.plan.window;
        if self.parked.sub_schedules_with(member, sub_schedule) > sub_schedules_max {
            return Err(Violation::Ahead { seq: chunk.seq, sub_schedules_max });
        }
        self.parked.put(member, sub_schedule, round, chunk.data);
        Ok(())
    }

    pub(super) fn handle_sent(&mut self, sent: InFlight) {
        if sent.round != ROUND_TAKEN
            && let Some(run) = self.running.iter_mut().find(|run| run.sub_schedule == sent.sub_schedule)
        {
            run.handle_sent();
        }
    }

    /// Performs one step, sends one chunk, or ends a sub-schedule.
    pub(super) fn advance(
        &mut self,
        buffers: &mut Buffers,
        stats: &mut ExecutorStats,
        memory: &mut dyn Memory,
        may_send: &dyn Fn(SidecarIndex, usize) -> bool,
    ) -> Result<OperationProgress, StepError> {
        self.start_sub_schedules();
        let admission = Arc::clone(&self.admission);
        let mut may_send = |to, bytes| may_send(admission.topology.sidecar(to), bytes);
        let cx = StepContext { admission: &admission, buffers, stats, memory };
        let (ops, parked) = (&mut self.ops, &mut self.parked);
        let mut sub_schedule_cx = SubScheduleContext { cx, ops, parked };
        for index in 0..self.running.len() {
            match self.running[index].advance(&mut sub_schedule_cx, &mut may_send)? {
                SubScheduleProgress::Idle => {}
                SubScheduleProgress::Worked(phase) => return Ok(OperationProgress::Worked(phase)),
                SubScheduleProgress::Send(outgoing) => {
                    return Ok(send(&admission, self.running[index].sub_schedule, outgoing));
                }
                SubScheduleProgress::Over => return Ok(self.end_sub_schedule(index)),
            }
        }
        let over = self.next == self.sub_schedules.len() && self.running.is_empty();
        Ok(if over { OperationProgress::Done } else { OperationProgress::Idle })
    }

    pub(super) fn register_bytes(&self) -> u64 {
        self.running.iter().map(RunningSubSchedule::register_bytes).sum()
    }

    pub(super) fn measured_bytes(&self) -> u64 {
        self.ops.measured.as_ref().map_or(0, Measured::bytes)
    }

    pub(super) fn parked_bytes(&self) -> u64 {
        self.parked.bytes()
    }

    fn start_sub_schedules(&mut self) {
        while self.running.len() < self.window()
            && let Some(&queued) = self.sub_schedules.get(self.next)
        {
            let sub_schedule = self.sub_schedule(queued.sub_schedule);
            let awaited_tokens = if queued.uses_tokens { silent_receivers(sub_schedule) } else { Vec::new() };
            let run = RunningSubSchedule::new(
                queued.sub_schedule,
                sub_schedule,
                self.admission.topology.len(),
                awaited_tokens,
            );
            self.running.push(run);
            self.next += 1;
        }
    }

    /// The number of sub-schedules that may be in flight now; a prelude runs alone.
    fn window(&self) -> usize {
        let in_prelude = self.admission.plan.prelude && self.running.iter().any(|run| run.sub_schedule == 0);
        if in_prelude { 1 } else { self.admission.plan.window }
    }

    /// Ends the rounds of a sub-schedule: members that receive nothing else from here get a token.
    fn end_sub_schedule(&mut self, index: usize) -> OperationProgress {
        let sub_schedule = self.running[index].sub_schedule;
        self.release(index);
        let queued = self
            .sub_schedules
            .binary_search_by_key(&sub_schedule, |queued| queued.sub_schedule)
            .map(|at| self.sub_schedules[at]);
        let token_receivers = match queued {
            Ok(queued) if queued.uses_tokens => silent_senders(self.sub_schedule(sub_schedule)),
            _ => Vec::new(),
        };
        let token = |member| {
            let empty = Outgoing { to: member, round: ROUND_TAKEN, span: EMPTY, data: Bytes::new() };
            (self.sidecar(member), chunk(&self.admission, sub_schedule, empty))
        };
        OperationProgress::SubScheduleOver(token_receivers.into_iter().map(token).collect())
    }

    fn handle_token(&mut self, from: Member, chunk: &Chunk, unexpected: Violation) -> Result<(), Violation> {
        self.check_span(EMPTY, Form::Values, 0, chunk)?;
        let index = self.running.iter().position(|run| run.sub_schedule == chunk.header.sub_schedule);
        let Some(index) = index else { return Err(unexpected) };
        let awaited_tokens = &mut self.running[index].awaited_tokens;
        let Some(at) = awaited_tokens.iter().position(|member| *member == from) else { return Err(unexpected) };
        awaited_tokens.swap_remove(at);
        self.release(index);
        Ok(())
    }

    /// Removes a sub-schedule from the window once it is over and no token is awaited.
    fn release(&mut self, index: usize) {
        if self.running[index].over && self.running[index].awaited_tokens.is_empty() {
            self.running.remove(index);
        }
    }

    fn has_received(&self, queued: usize, round: usize, from: Member) -> bool {
        let sub_schedule = self.sub_schedules[queued].sub_schedule;
        let received = match self.running.iter().find(|run| run.sub_schedule == sub_schedule) {
            Some(run) => run.has_received(round, from),
            None => queued < self.next,
        };
        received || self.parked.has(from, sub_schedule, round)
    }

    fn check_span(&self, span: Span, form: Form, span_bytes: usize, chunk: &Chunk) -> Result<(), Violation> {
        let ChunkHeader { lane, sub_schedule, round, start, len } = chunk.header;
        let plan_lane = self.sub_schedule(sub_schedule).lane;
        if lane != plan_lane {
            return Err(Violation::Lane { seq: chunk.seq, lane: plan_lane, found: lane });
        }
        let bytes = chunk.data.len();
        let fits = self.ops.sizes.fits(form, bytes, span_bytes);
        if (span.start, span.len) != (start, len) || !fits {
            return Err(Violation::Span { seq: chunk.seq, sub_schedule, round, start, len, bytes });
        }
        Ok(())
    }

    /// The bytes that a member sends for a span.
    fn bytes_from(&self, member: Member, span: Span, form: Form) -> usize {
        let ranks = self.admission.topology.members[member.index()].ranks.len();
        self.ops.sizes.of(form, span, ranks)
    }

    fn sub_schedule(&self, sub_schedule: u32) -> &SubSchedule {
        &self.admission.plan.sub_schedules[sub_schedule as usize]
    }

    fn sidecar(&self, member: Member) -> SidecarIndex {
        self.admission.topology.sidecar(member)
    }
}

/// The most windows of sub-schedules with parked chunks of one sender; the module documentation has the proof.
const WINDOWS_PARKED_MAX: usize = 3;

const EMPTY: Span = Span { start: 0, len: 0 };

fn send(admission: &Admission, sub_schedule: u32, outgoing: Outgoing) -> OperationProgress {
    OperationProgress::Send {
        to: admission.topology.sidecar(outgoing.to),
        chunk: chunk(admission, sub_schedule, outgoing),
    }
}

fn chunk(admission: &Admission, sub_schedule: u32, outgoing: Outgoing) -> Chunk {
    let Outgoing { round, span, data, .. } = outgoing;
    let lane = admission.plan.sub_schedules[sub_schedule as usize].lane;
    let header = ChunkHeader { lane, sub_schedule, round, start: span.start, len: span.len };
    Chunk { epoch: admission.epoch, seq: admission.seq, early: false, header, data }
}

fn has_work(sub_schedule: &SubSchedule) -> bool {
    sub_schedule.rounds.iter().any(|round| !round.steps.is_empty() || !round.transfers.is_empty())
}

/// The span that a member sends here in a round.
fn expected(sub_schedule: &SubSchedule, round: usize, member: Member) -> Option<(Span, Form)> {
    sub_schedule.rounds.get(round)?.transfers.iter().find_map(|transfer| match *transfer {
        Transfer::Receive { from, span, form, .. } if from == member => Some((span, form)),
        _ => None,
    })
}

/// Members to which a sub-schedule sends and from which it receives nothing.
fn silent_receivers(sub_schedule: &SubSchedule) -> Vec<Member> {
    let (receivers, senders) = partners(sub_schedule);
    receivers.into_iter().filter(|member| senders.binary_search(member).is_err()).collect()
}

/// Members from which a sub-schedule receives and to which it sends nothing.
fn silent_senders(sub_schedule: &SubSchedule) -> Vec<Member> {
    let (receivers, senders) = partners(sub_schedule);
    senders.into_iter().filter(|member| receivers.binary_search(member).is_err()).collect()
}

/// The receivers and the senders of a sub-schedule, both ascending.
fn partners(sub_schedule: &SubSchedule) -> (Vec<Member>, Vec<Member>) {
    let (mut receivers, mut senders) = (Vec::new(), Vec::new());
    for transfer in sub_schedule.rounds.iter().flat_map(|round| &round.transfers) {
        match transfer {
            Transfer::Send { to, .. } => insert(&mut receivers, *to),
            Transfer::Receive { from, .. } => insert(&mut senders, *from),
        }
    }
    (receivers, senders)
}

const fn partner(transfer: &Transfer) -> Member {
    match *transfer {
        Transfer::Send { to, .. } => to,
        Transfer::Receive { from, .. } => from,
    }
}

/// Inserts into an ascending list without duplicates.
fn insert<T: Ord>(list: &mut Vec<T>, item: T) {
    if let Err(at) = list.binary_search(&item) {
        list.insert(at, item);
    }
}
