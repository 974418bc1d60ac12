//! One running strand: its round, its registers, and the transfers that it waits for.

use std::collections::BTreeMap;

use bytes::Bytes;
use ronde_collectives::plan::{Form, Register, Span, SubSchedule, Transfer};
use ronde_wire::Member;

use super::Phase;
use super::arithmetic::{ElementOps, StepContext, StepError};
use super::register::Buffers;
use super::steps::{Registers, StepPosition, phase};

/// A strand from its start until its last round is over and all awaited tokens have arrived.
#[derive(Debug)]
pub(super) struct RunningStrand {
    pub(super) strand: u32,
    round: usize,
    step: usize,
    /// Whether the steps of the round are done and its transfers are listed below.
    posted: bool,
    registers: Registers,
    unsent: Vec<PendingSend>,
    unreceived: Vec<(Member, Register)>,
    /// Chunks of the round that the port has not reported as sent.
    unreported: u32,
    /// Members whose token for this strand has not arrived.
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

/// A chunk that a strand wants to send.
pub(super) struct Outgoing {
    pub(super) to: Member,
    pub(super) round: u32,
    pub(super) span: Span,
    pub(super) data: Bytes,
}

/// The progress of a strand.
pub(super) enum StrandProgress {
    /// Nothing can be done now.
    Idle,
    /// A step was performed.
    Worked(Phase),
    /// A chunk is to be sent.
    Send(Outgoing),
    /// The last round is over; reported once.
    Over,
}

/// The context of a running strand.
pub(super) struct StrandContext<'a> {
    pub(super) cx: StepContext<'a>,
    pub(super) ops: &'a mut ElementOps,
    pub(super) parked: &'a mut Parked,
}

impl RunningStrand {
    /// Starts a strand, with its number and the number of members.
    pub(super) fn new(number: u32, strand: &SubSchedule, members: usize, awaited_tokens: Vec<Member>) -> Self {
        Self {
            strand: number,
            round: 0,
            step: 0,
            posted: false,
            registers: Registers::new(strand, members),
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
        strand_cx: &mut StrandContext<'_>,
        may_send: &mut dyn FnMut(Member, usize) -> bool,
    ) -> Result<StrandProgress, StepError> {
        if self.over {
            return Ok(StrandProgress::Idle);
        }
        let strand = &strand_cx.cx.admission.plan.sub_schedules[self.strand as usize];
        while let Some(round) = strand.rounds.get(self.round) {
            if let Some(step) = round.steps.get(self.step) {
                let position = StepPosition { strand, round: self.round, step: self.step };
                self.registers.perform(*step, position, strand_cx.ops, &mut strand_cx.cx)?;
                self.step += 1;
                return Ok(StrandProgress::Worked(phase(step)));
            }
            if !self.posted {
                self.post(&round.transfers);
            }
            self.receive(strand_cx.parked, strand_cx.cx.buffers);
            if let Some(outgoing) = self.send(strand_cx, may_send)? {
                return Ok(StrandProgress::Send(outgoing));
            }
            if !(self.unsent.is_empty() && self.unreceived.is_empty() && self.unreported == 0) {
                return Ok(StrandProgress::Idle);
            }
            (self.round, self.step, self.posted) = (self.round + 1, 0, false);
        }
        self.over = true;
        self.registers.clear(strand_cx.cx.buffers);
        Ok(StrandProgress::Over)
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
        while let Some((from, data)) = parked.take(self.strand, self.round) {
            let index = self.unreceived.iter().position(|(member, _)| *member == from);
            let index = index.expect("a chunk is parked only where the plan receives it, and once");
            let (_, into) = self.unreceived.swap_remove(index);
            self.registers.receive(into, data, buffers);
        }
    }

    fn send(
        &mut self,
        strand_cx: &StrandContext<'_>,
        may_send: &mut dyn FnMut(Member, usize) -> bool,
    ) -> Result<Option<Outgoing>, StepError> {
        let ranks = strand_cx.cx.admission.local_ranks.len();
        let bytes_of = |unsent: &PendingSend| strand_cx.ops.sizes.of(unsent.form, unsent.span, ranks);
        let Some(index) = self.unsent.iter().position(|unsent| may_send(unsent.to, bytes_of(unsent))) else {
            return Ok(None);
        };
        let unsent = self.unsent.remove(index);
        let data = self.registers.share(unsent.from, unsent.form, bytes_of(&unsent), strand_cx.ops.sizes)?;
        self.unreported += 1;
        let round = u32::try_from(self.round).expect("a plan's rounds are counted in 32 bits on the wire");
        Ok(Some(Outgoing { to: unsent.to, round, span: unsent.span, data }))
    }
}

/// Chunks that arrived before their round.
#[derive(Debug, Default)]
pub(super) struct Parked {
    /// By strand and sender, with their rounds; never an empty list.
    chunks: BTreeMap<(u32, Member), Vec<(usize, Bytes)>>,
    /// The number of these lists of each sender.
    strands: BTreeMap<Member, usize>,
    bytes: u64,
}

impl Parked {
    pub(super) fn has(&self, from: Member, strand: u32, round: usize) -> bool {
        self.chunks.get(&(strand, from)).is_some_and(|chunks| chunks.iter().any(|(r, _)| *r == round))
    }

    /// The number of strands with parked chunks of a member, once one of `strand` is added.
    pub(super) fn strands_with(&self, from: Member, strand: u32) -> usize {
        let parked = self.strands.get(&from).copied().unwrap_or(0);
        parked + usize::from(!self.chunks.contains_key(&(strand, from)))
    }

    pub(super) fn put(&mut self, from: Member, strand: u32, round: usize, data: Bytes) {
        self.bytes += data.len() as u64;
        let chunks = self.chunks.entry((strand, from)).or_default();
        if chunks.is_empty() {
            *self.strands.entry(from).or_default() += 1;
        }
        chunks.push((round, data));
    }

    /// Any chunk of a round.
    fn take(&mut self, strand: u32, round: usize) -> Option<(Member, Bytes)> {
        let lists = self.chunks.range_mut((strand, Member(0))..=(strand, Member(u32::MAX)));
        let (from, data, empty) = lists.into_iter().find_map(|((_, from), chunks)| {
            let index = chunks.iter().position(|(r, _)| *r == round)?;
            let (_, data) = chunks.swap_remove(index);
            Some((*from, data, chunks.is_empty()))
        })?;
        if empty {
            self.chunks.remove(&(strand, from));
            self.strands.entry(from).and_modify(|strands| *strands -= 1);
        }
        self.bytes -= data.len() as u64;
        Some((from, data))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}
