//! One strand in flight: its round, its registers, and what it still waits for.

use std::collections::BTreeMap;

use bytes::Bytes;
use ronde_collectives::plan::{Form, Register, Span, SubSchedule, Transfer};
use ronde_wire::Member;

use super::Phase;
use super::arithmetic::{Arithmetician, StepError, Workplace};
use super::register::Buffers;
use super::steps::{Place, Registers, phase};

/// A strand between its start and the moment when its last round is over and everybody who must has taken it.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) strand: u32,
    round: usize,
    step: usize,
    /// Whether the steps of the round are done and its transfers are listed below.
    posted: bool,
    registers: Registers,
    unsent: Vec<Unsent>,
    unreceived: Vec<(Member, Register)>,
    /// Chunks of the round that the port has not reported as sent.
    unreported: u32,
    /// Members who have not yet said that they took this strand.
    pub(super) takers: Vec<Member>,
    /// Whether all rounds are over.
    pub(super) over: bool,
}

/// A transfer of the round that has not left.
#[derive(Clone, Copy, Debug)]
struct Unsent {
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

/// What became of an attempt to go on.
pub(super) enum Progress {
    /// Nothing can be done now.
    Idle,
    /// A step was done.
    Worked(Phase),
    /// A chunk is to be sent.
    Send(Outgoing),
    /// The last round is over; reported once.
    Over,
}

/// Everything around a strand that it needs to go on.
pub(super) struct Surroundings<'a> {
    pub(super) workplace: Workplace<'a>,
    pub(super) arithmetician: &'a mut Arithmetician,
    pub(super) parked: &'a mut Parked,
}

impl Run {
    /// The run of a strand by its number and its content, among so many members.
    pub(super) fn new((number, strand): (u32, &SubSchedule), members: usize, takers: Vec<Member>) -> Self {
        Self {
            strand: number,
            round: 0,
            step: 0,
            posted: false,
            registers: Registers::new(strand, members),
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
        let strand = &around.workplace.admission.plan.sub_schedules[self.strand as usize];
        while let Some(round) = strand.rounds.get(self.round) {
            if let Some(step) = round.steps.get(self.step) {
                let place = Place { strand, round: self.round, step: self.step };
                self.registers.perform(*step, place, around.arithmetician, &mut around.workplace)?;
                self.step += 1;
                return Ok(Progress::Worked(phase(step)));
            }
            if !self.posted {
                self.post(&round.transfers);
            }
            self.receive(around.parked, around.workplace.buffers);
            if let Some(outgoing) = self.send(around, may_send)? {
                return Ok(Progress::Send(outgoing));
            }
            if !(self.unsent.is_empty() && self.unreceived.is_empty() && self.unreported == 0) {
                return Ok(Progress::Idle);
            }
            (self.round, self.step, self.posted) = (self.round + 1, 0, false);
        }
        self.over = true;
        self.registers.clear(around.workplace.buffers);
        Ok(Progress::Over)
    }

    /// A chunk of the current round has left the port's queue.
    pub(super) fn handle_sent(&mut self) {
        self.unreported = self.unreported.saturating_sub(1);
    }

    /// Whether a chunk of a round is behind this strand: it came before.
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
                Transfer::Send { to, from, span, form } => self.unsent.push(Unsent { to, from, span, form }),
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
        around: &Surroundings<'_>,
        may_send: &mut dyn FnMut(Member, usize) -> bool,
    ) -> Result<Option<Outgoing>, StepError> {
        let ranks = around.workplace.admission.local_ranks.len();
        let bytes_of = |unsent: &Unsent| around.arithmetician.sizes.of(unsent.form, unsent.span, ranks);
        let Some(index) = self.unsent.iter().position(|unsent| may_send(unsent.to, bytes_of(unsent))) else {
            return Ok(None);
        };
        let unsent = self.unsent.remove(index);
        let data = self.registers.share(unsent.from, unsent.form, bytes_of(&unsent), around.arithmetician.sizes)?;
        self.unreported += 1;
        let round = u32::try_from(self.round).expect("a plan's rounds are counted in 32 bits on the wire");
        Ok(Some(Outgoing { to: unsent.to, round, span: unsent.span, data }))
    }
}

/// Chunks that came before their round.
#[derive(Debug, Default)]
pub(super) struct Parked {
    /// By strand and sender, with their rounds; never an empty list.
    chunks: BTreeMap<(u32, Member), Vec<(usize, Bytes)>>,
    /// How many of these lists each sender has.
    strands: BTreeMap<Member, usize>,
    bytes: u64,
}

impl Parked {
    pub(super) fn has(&self, from: Member, strand: u32, round: usize) -> bool {
        self.chunks.get(&(strand, from)).is_some_and(|chunks| chunks.iter().any(|(r, _)| *r == round))
    }

    /// Of how many strands chunks of a member are parked, once one of `strand` is added.
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
