//! One strand in flight: its round, its registers, and what it still waits for.

use std::collections::BTreeMap;

use bytes::Bytes;
use ronde_collectives::kernels::Side;
use ronde_collectives::plan::{REGISTERS_MAX, Register, Span, Step, Strand, Transfer};
use ronde_wire::Member;

use super::arithmetic::{Arithmetician, Operands, StepError};
use super::register::{Buffers, Value};
use super::stats::ExecutorStats;
use crate::event::Admission;
use crate::memory::Memory;

/// A strand between its start and the moment when its last round is over and everybody who must has taken it.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) strand: u32,
    round: usize,
    step: usize,
    /// Whether the steps of the round are done and its transfers are listed below.
    posted: bool,
    registers: Vec<Value>,
    unsent: Vec<(Member, Register, Span)>,
    unreceived: Vec<(Member, Register, Span)>,
    /// Chunks of the round that the port has not reported as sent.
    unreported: u32,
    /// Members who have not yet said that they took this strand.
    pub(super) takers: Vec<Member>,
    /// Whether all rounds are over.
    pub(super) over: bool,
}

/// A chunk that a strand wants to send.
pub(super) struct Outgoing {
    pub(super) to: Member,
    pub(super) round: u32,
    pub(super) span: Span,
    pub(super) data: Bytes,
}

/// What became of an attempt to go on.
pub(super) enum Progress {
    /// Nothing can be done now.
    Idle,
    /// A step was done.
    Worked,
    /// A chunk is to be sent.
    Send(Outgoing),
    /// The last round is over; reported once.
    Over,
}

/// Everything around a strand that it needs to go on.
pub(super) struct Surroundings<'a> {
    pub(super) admission: &'a Admission,
    pub(super) arithmetician: &'a mut Arithmetician,
    pub(super) parked: &'a mut Parked,
    pub(super) buffers: &'a mut Buffers,
    pub(super) stats: &'a mut ExecutorStats,
    pub(super) memory: &'a mut dyn Memory,
}

impl Run {
    pub(super) fn new(strand: u32, takers: Vec<Member>) -> Self {
        Self {
            strand,
            round: 0,
            step: 0,
            posted: false,
            registers: (0..REGISTERS_MAX).map(|_| Value::default()).collect(),
            unsent: Vec::new(),
            unreceived: Vec::new(),
            unreported: 0,
            takers,
            over: false,
        }
    }

    /// Does one step, sends one chunk, or goes on to where that is possible. `may_send` says whether a chunk of so many
    /// bytes may be sent to a member now.
    pub(super) fn advance(
        &mut self,
        around: &mut Surroundings<'_>,
        may_send: &mut dyn FnMut(Member, usize) -> bool,
    ) -> Result<Progress, StepError> {
        if self.over {
            return Ok(Progress::Idle);
        }
        let strand = &around.admission.plan.strands[self.strand as usize];
        while let Some(round) = strand.rounds.get(self.round) {
            if let Some(step) = round.steps.get(self.step) {
                self.perform(strand, *step, around)?;
                self.step += 1;
                return Ok(Progress::Worked);
            }
            if !self.posted {
                self.post(&round.transfers);
            }
            self.receive(around);
            if let Some(outgoing) = self.send(around, may_send) {
                return Ok(Progress::Send(outgoing));
            }
            if !(self.unsent.is_empty() && self.unreceived.is_empty() && self.unreported == 0) {
                return Ok(Progress::Idle);
            }
            (self.round, self.step, self.posted) = (self.round + 1, 0, false);
        }
        self.over = true;
        for value in &mut self.registers {
            around.buffers.give(std::mem::take(value));
        }
        Ok(Progress::Over)
    }

    /// A chunk of the current round has left the port's queue.
    pub(super) fn handle_sent(&mut self) {
        self.unreported = self.unreported.saturating_sub(1);
    }

    /// Whether a chunk of a round is behind this strand: it came before.
    pub(super) fn has_received(&self, round: usize, from: Member) -> bool {
        let pending = self.unreceived.iter().any(|(member, ..)| *member == from);
        round < self.round || self.over || (round == self.round && self.posted && !pending)
    }

    pub(super) fn register_bytes(&self) -> u64 {
        self.registers.iter().map(|value| value.bytes().len() as u64).sum()
    }

    fn post(&mut self, transfers: &[Transfer]) {
        self.posted = true;
        for transfer in transfers {
            match *transfer {
                Transfer::Send { to, from, span, .. } => self.unsent.push((to, from, span)),
                Transfer::Receive { from, into, span, .. } => self.unreceived.push((from, into, span)),
            }
        }
    }

    fn receive(&mut self, around: &mut Surroundings<'_>) {
        let (strand, round) = (self.strand, self.round);
        let registers = &mut self.registers;
        self.unreceived.retain(|&(from, into, _)| match around.parked.take(from, strand, round) {
            Some(data) => {
                let old = std::mem::replace(&mut registers[usize::from(into.0)], Value::Shared(data));
                around.buffers.give(old);
                false
            }
            None => true,
        });
    }

    fn send(&mut self, around: &Surroundings<'_>, may_send: &mut dyn FnMut(Member, usize) -> bool) -> Option<Outgoing> {
        let bytes_of = |span| around.arithmetician.bytes_of(span);
        let index = self.unsent.iter().position(|&(to, _, span)| may_send(to, bytes_of(span)))?;
        let (to, from, span) = self.unsent.remove(index);
        self.unreported += 1;
        let data = self.registers[usize::from(from.0)].share();
        let round = u32::try_from(self.round).expect("a plan's rounds are counted in 32 bits on the wire");
        Some(Outgoing { to, round, span, data })
    }

    fn perform(&mut self, strand: &Strand, step: Step, around: &mut Surroundings<'_>) -> Result<(), StepError> {
        let Surroundings { admission, arithmetician, buffers, stats, memory, .. } = around;
        match step {
            Step::Contribute { into, span } => {
                let value = std::mem::take(&mut self.registers[usize::from(into.0)]);
                let mut buffer = buffers.renew(value, arithmetician.bytes_of(span));
                arithmetician.contribute(admission, span, &mut buffer, *memory)?;
                stats.contributed_bytes += buffer.len() as u64;
                self.registers[usize::from(into.0)] = Value::Private(buffer);
            }
            Step::Reduce { left, right, into, span } => {
                let (other, side) =
                    if into == left { (right, Side::AccumulatorLeft) } else { (left, Side::AccumulatorRight) };
                let other_is_free = !is_read_after(strand, self.round, self.step, other);
                let [into, other] = self
                    .registers
                    .get_disjoint_mut([into, other].map(|r| usize::from(r.0)))
                    .map_err(|_| StepError::SameRegister)?;
                let bytes = arithmetician.bytes_of(span);
                let operands = Operands { into, other, side, other_is_free, bytes };
                arithmetician.reduce(admission, operands, buffers, stats)?;
            }
            Step::Finish { register, span } => {
                let value = &mut self.registers[usize::from(register.0)];
                arithmetician.finish(admission, value, arithmetician.bytes_of(span), buffers, stats)?;
            }
            Step::Publish { from, span } => {
                let value = &self.registers[usize::from(from.0)];
                arithmetician.publish(admission, span, value, *memory)?;
                stats.published_bytes += value.bytes().len() as u64;
            }
            Step::ContributeEach { .. }
            | Step::ReduceN { .. }
            | Step::Encode { .. }
            | Step::Decode { .. }
            | Step::MeasureOwn { .. }
            | Step::MeasureAll { .. }
            | Step::Conclude { .. } => return Err(StepError::NoReduction),
        }
        Ok(())
    }
}

/// Whether a strand reads what a register holds now, behind a step of a round. A walk to the next mention: in every
/// algorithm that is at most a round away.
fn is_read_after(strand: &Strand, round: usize, step: usize, register: Register) -> bool {
    for (index, round) in (round..).zip(&strand.rounds[round..]).map(|(i, r)| (i == round, r)) {
        let steps = if index { &round.steps[step + 1..] } else { &round.steps[..] };
        for step in steps {
            match *step {
                Step::Contribute { into, .. } if into == register => return false,
                Step::Reduce { left, right, .. } if left == register || right == register => return true,
                Step::Finish { register: read, .. } | Step::Publish { from: read, .. } if read == register => {
                    return true;
                }
                _ => {}
            }
        }
        let sends = |t: &Transfer| matches!(t, Transfer::Send { from, .. } if *from == register);
        if round.transfers.iter().any(sends) {
            return true;
        }
        let receives = |t: &Transfer| matches!(t, Transfer::Receive { into, .. } if *into == register);
        if round.transfers.iter().any(receives) {
            return false;
        }
    }
    false
}

/// Chunks that came before their round, by sender, strand and round.
#[derive(Debug, Default)]
pub(super) struct Parked {
    chunks: BTreeMap<(Member, u32), Vec<(usize, Bytes)>>,
    bytes: u64,
}

impl Parked {
    pub(super) fn has(&self, from: Member, strand: u32, round: usize) -> bool {
        self.chunks.get(&(from, strand)).is_some_and(|chunks| chunks.iter().any(|(r, _)| *r == round))
    }

    /// Of how many strands chunks of a member are parked, once one of `strand` is added.
    pub(super) fn strands_with(&self, from: Member, strand: u32) -> usize {
        let others = self.chunks.range((from, 0)..=(from, u32::MAX)).filter(|((_, s), _)| *s != strand);
        others.count() + 1
    }

    pub(super) fn put(&mut self, from: Member, strand: u32, round: usize, data: Bytes) {
        self.bytes += data.len() as u64;
        self.chunks.entry((from, strand)).or_default().push((round, data));
    }

    fn take(&mut self, from: Member, strand: u32, round: usize) -> Option<Bytes> {
        let chunks = self.chunks.get_mut(&(from, strand))?;
        let index = chunks.iter().position(|(r, _)| *r == round)?;
        let (_, data) = chunks.swap_remove(index);
        if chunks.is_empty() {
            self.chunks.remove(&(from, strand));
        }
        self.bytes -= data.len() as u64;
        Some(data)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}
