//! One running sub-schedule: its round, its registers, and the transfers that it waits for.

use std::collections::BTreeMap;

use bytes::Bytes;
use ronde_collectives::plan::{Form, Register, Span, SubSchedule, Transfer};
use ronde_wire::Member;

use super::Phase;
use super::arithmetic::{ElementOps, StepContext, StepError};
use super::register::Buffers;
use super::steps::{Registers, StepPosition, phase};

/// A sub-schedule from its start until its last round is over and all awaited tokens have arrived.
#[derive(Debug)]
pub(super) struct RunningSubSchedule {
    pub(super) sub_schedule: u32,
    round: usize,
    step: usize,
    /// Whether the steps of the round are done and its transfers are listed below.
    posted: bool,
    registers: Registers,
    unsent: Vec<PendingSend>,
    unreceived: Vec<(Member, Register)>,
    /// Chunks of the round that the port has not reported as sent.
    unreported: u32,
    /// Members whose token for this sub-schedule has not arrived.
    pub(super) awaited_tokens: Vec<Member>,
    /// Whether all rounds are over.
    pub(super) over: bool,
}

/// A send of the round that is not done.
#[derive(Clone, Copy, Debug)]
struct PendingSend {
    to: Member,
    from: Register,
    span: Span,
    form: Form,
}

/// A chunk that a sub-schedule wants to send.
pub(super) struct Outgoing {
    pub(super) to: Member,
    pub(super) round: u32,
    pub(super) span: Span,
    pub(super) data: Bytes,
}

/// The progress of a sub-schedule.
pub(super) enum SubScheduleProgress {
    /// Nothing can be done now.
    Idle,
    /// A step was performed.
    Worked(Phase),
    /// A chunk is to be sent.
    Send(Outgoing),
    /// The last round is over; reported once.
    Over,
}

/// The context of a running sub-schedule.
pub(super) struct SubScheduleContext<'a> {
    pub(super) cx: StepContext<'a>,
    pub(super) ops: &'a mut ElementOps,
    pub(super) parked: &'a mut Parked,
}

impl RunningSubSchedule {
    /// Starts a sub-schedule, with its number and the number of members.
    pub(super) fn new(number: u32, sub_schedule: &SubSchedule, members: usize, awaited_tokens: Vec<Member>) -> Self {
        Self {
            sub_schedule: number,
            round: 0,
            step: 0,
            posted: false,
            registers: Registers::new(sub_schedule, members),
            unsent: Vec::new(),
            unreceived: Vec::new(),
            unreported: 0,
            awaited_tokens,
            over: false,
        }
    }

    /// Performs one step or sends one chunk, after advancing to the next round where possible. `may_send` decides
    /// whether a chunk of this number of bytes may be sent to a member now.
    pub(super) fn advance(
        &mut self,
        sub_schedule_cx: &mut SubScheduleContext<'_>,
        may_send: &mut dyn FnMut(Member, usize) -> bool,
    ) -> Result<SubScheduleProgress, StepError> {
        if self.over {
            return Ok(SubScheduleProgress::Idle);
        }
        let sub_schedule = &sub_schedule_cx.cx.admission.plan.sub_schedules[self.sub_schedule as usize];
        while let Some(round) = sub_schedule.rounds.get(self.round) {
            if let Some(step) = round.steps.get(self.step) {
                let position = StepPosition { sub_schedule, round: self.round, step: self.step };
                self.registers.perform(*step, position, sub_schedule_cx.ops, &mut sub_schedule_cx.cx)?;
                self.step += 1;
                return Ok(SubScheduleProgress::Worked(phase(step)));
            }
            if !self.posted {
                self.post(&round.transfers);
            }
            self.receive(sub_schedule_cx.parked, sub_schedule_cx.cx.buffers);
            if let Some(outgoing) = self.send(sub_schedule_cx, may_send)? {
                return Ok(SubScheduleProgress::Send(outgoing));
            }
            if !(self.unsent.is_empty() && self.unreceived.is_empty() && self.unreported == 0) {
                return Ok(SubScheduleProgress::Idle);
            }
            (self.round, self.step, self.posted) = (self.round + 1, 0, false);
        }
        self.over = true;
        self.registers.clear(sub_schedule_cx.cx.buffers);
        Ok(SubScheduleProgress::Over)
    }

    /// A chunk of the current round has left the port's queue.
    pub(super) fn handle_sent(&mut self) {
        self.unreported = self.unreported.saturating_sub(1);
    }

    /// Whether the chunk of a member in a round was received already.
    pub(super) fn has_received(&self, round: usize, from: Member) -> bool {
        let pending = self.unreceived.iter().any(|(member, _)| *member == from);
        round < self.round || self.over || (round == self.round && self.posted && !pending)
    }

    pub(super) fn register_bytes(&self) -> u64 {
        self.registers.bytes()
    }

    fn post(&mut self, transfers: &[Transfer]) {
        self.posted = true;
        for transfer in transfers {
            match *transfer {
                Transfer::Send { to, from, span, form } => self.unsent.push(PendingSend { to, from, span, form }),
                Transfer::Receive { from, into, .. } => self.unreceived.push((from, into)),
            }
        }
    }

    fn receive(&mut self, parked: &mut Parked, buffers: &mut Buffers) {
        while let Some((from, data)) = parked.take(self.sub_schedule, self.round) {
            let index = self.unreceived.iter().position(|(member, _)| *member == from);
            let index = index.expect("a chunk is parked only where the plan receives it, and once");
            let (_, into) = self.unreceived.swap_remove(index);
            self.registers.receive(into, data, buffers);
        }
    }

    fn send(
        &mut self,
        sub_schedule_cx: &SubScheduleContext<'_>,
        may_send: &mut dyn FnMut(Member, usize) -> bool,
    ) -> Result<Option<Outgoing>, StepError> {
        let ranks = sub_schedule_cx.cx.admission.local_ranks.len();
        let bytes_of = |unsent: &PendingSend| sub_schedule_cx.ops.sizes.of(unsent.form, unsent.span, ranks);
        let Some(index) = self.unsent.iter().position(|unsent| may_send(unsent.to, bytes_of(unsent))) else {
            return Ok(None);
        };
        let unsent = self.unsent.remove(index);
        let data = self.registers.share(unsent.from, unsent.form, bytes_of(&unsent), sub_schedule_cx.ops.sizes)?;
        self.unreported += 1;
        let round = u32::try_from(self.round).expect("a plan's rounds are counted in 32 bits on the wire");
        Ok(Some(Outgoing { to: unsent.to, round, span: unsent.span, data }))
    }
}

/// Chunks that arrived before their round.
#[derive(Debug, Default)]
pub(super) struct Parked {
    /// By sub-schedule and sender, with their rounds; never an empty list.
    chunks: BTreeMap<(u32, Member), Vec<(usize, Bytes)>>,
    /// The number of these lists of each sender.
    sub_schedules: BTreeMap<Member, usize>,
    bytes: u64,
}

impl Parked {
    pub(super) fn has(&self, from: Member, sub_schedule: u32, round: usize) -> bool {
        self.chunks.get(&(sub_schedule, from)).is_some_and(|chunks| chunks.iter().any(|(r, _)| *r == round))
    }

    /// The number of sub-schedules with parked chunks of a member, once one of `sub-schedule` is added.
    pub(super) fn sub_schedules_with(&self, from: Member, sub_schedule: u32) -> usize {
        let parked = self.sub_schedules.get(&from).copied().unwrap_or(0);
        parked + usize::from(!self.chunks.contains_key(&(sub_schedule, from)))
    }

    pub(super) fn put(&mut self, from: Member, sub_schedule: u32, round: usize, data: Bytes) {
        self.bytes += data.len() as u64;
        let chunks = self.chunks.entry((sub_schedule, from)).or_default();
        if chunks.is_empty() {
            *self.sub_schedules.entry(from).or_default() += 1;
        }
        chunks.push((round, data));
    }

    /// Any chunk of a round.
    fn take(&mut self, sub_schedule: u32, round: usize) -> Option<(Member, Bytes)> {
        let lists = self.chunks.range_mut((sub_schedule, Member(0))..=(sub_schedule, Member(u32::MAX)));
        let (from, data, empty) = lists.into_iter().find_map(|((_, from), chunks)| {
            let index = chunks.iter().position(|(r, _)| *r == round)?;
            let (_, data) = chunks.swap_remove(index);
            Some((*from, data, chunks.is_empty()))
        })?;
        if empty {
            self.chunks.remove(&(sub_schedule, from));
            self.sub_schedules.entry(from).and_modify(|sub_schedules| *sub_schedules -= 1);
        }
        self.bytes -= data.len() as u64;
        Some((from, data))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}
