//! One admitted operation on one lane: which strands run, and which chunks may come.
//!
//! **How private memory is bounded.** At most `window` strands are in flight, each with the registers that it names: at
//! most [`REGISTERS_MAX`](ronde_collectives::plan::REGISTERS_MAX) of a chunk. Chunks that came before their round are
//! parked; for each sender they belong to at most `3 window` strands:
//! - Some are in flight here, at most `window`.
//! - Others have not begun here. When both members send to each other in such a strand, the sender has not ended it: it has
//!   yet to hear of this member there. When this member hears and says nothing (down a tree, around a ring, a root that
//!   gathers), the sender waits for a *token*: an empty chunk in the place of [`ROUND_TAKEN`] that this member sends when
//!   the strand is over here. Until then the strand counts as in flight at the sender. So at most `window` of them are in
//!   flight there.
//! - The last `window` strands of a lane need no token, as nobody would wait for it: these may be over at the sender.
//!
//! A **prelude** changes nothing in that. While it is in flight here no other strand is, and of those behind it a sender
//! that has concluded has at most `window` in flight, and has ended none in which it hears of this member.
//!
//! Tokens cannot deadlock: of all strands that some member has not ended, the first one is in flight everywhere, so its
//! rounds end everywhere, and then its tokens are sent. A prelude is that first strand until it is over everywhere.

use std::sync::Arc;

use bytes::Bytes;
use ronde_collectives::plan::{Form, Span, SubSchedule, Transfer};
use ronde_wire::frame::{Chunk, ChunkHeader, ROUND_TAKEN};
use ronde_wire::{Lane, Member, SidecarIndex};

use super::Phase;
use super::arithmetic::{Arithmetician, StepError, Workplace};
use super::link::{InFlight, cost_bytes};
use super::register::Buffers;
use super::stats::ExecutorStats;
use super::strand::{Outgoing, Parked, Progress, Run, Surroundings};
use super::violation::Violation;
use crate::event::Admission;
use crate::memory::Memory;

#[derive(Debug)]
pub(super) struct Operation {
    pub(super) admission: Arc<Admission>,
    arithmetician: Arithmetician,
    /// The strands of this lane that have something to do here.
    strands: Vec<Turn>,
    next: usize,
    running: Vec<Run>,
    parked: Parked,
}

/// A strand that waits for its turn.
#[derive(Clone, Copy, Debug)]
struct Turn {
    strand: u32,
    /// Whether another strand may wait for its end, so that tokens are exchanged.
    paced: bool,
}

/// What an operation wants done.
pub(super) enum Move {
    Idle,
    Worked(Phase),
    Send {
        to: SidecarIndex,
        chunk: Chunk,
    },
    /// A strand is over; these get a token.
    Taken(Vec<(SidecarIndex, Chunk)>),
    Done,
}

/// The peers of an operation on one lane.
#[derive(Debug, Default)]
pub(super) struct Peers {
    /// All of them, ascending.
    pub(super) all: Vec<SidecarIndex>,
    /// Those from which a chunk comes that the credit never covers: they wait for `Admitted`.
    pub(super) beyond_credit: Vec<SidecarIndex>,
}

impl Operation {
    pub(super) fn new(admission: Arc<Admission>, lane: Lane) -> Result<Self, StepError> {
        let arithmetician = Arithmetician::new(&admission)?;
        let plan = &admission.plan;
        let of_lane = || (0_u32..).zip(&plan.sub_schedules).filter(|(_, strand)| strand.lane == lane);
        let total = of_lane().count();
        let strands = of_lane()
            .enumerate()
            .filter(|(_, (_, strand))| has_work(strand))
            .map(|(ordinal, (strand, _))| Turn { strand, paced: ordinal + plan.window < total })
            .collect();
        Ok(Self { admission, arithmetician, strands, next: 0, running: Vec::new(), parked: Parked::default() })
    }

    pub(super) fn peers(&self, granted_bytes: u64) -> Peers {
        let mut peers = Peers::default();
        for turn in &self.strands {
            for round in &self.strand(turn.strand).rounds {
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
        let ChunkHeader { strand, round, .. } = chunk.header;
        let unexpected = Violation::Unexpected { seq: chunk.seq, strand, round };
        let Some(member) = self.admission.topology.member(from) else { return Err(unexpected) };
        let Ok(turn) = self.strands.binary_search_by_key(&strand, |turn| turn.strand) else { return Err(unexpected) };
        if round == ROUND_TAKEN {
            return self.handle_taken(member, &chunk, unexpected);
        }
        let round = round as usize;
        let Some((span, form)) = expected(self.strand(strand), round, member) else { return Err(unexpected) };
        self.check_span(span, form, self.bytes_from(member, span, form), &chunk)?;
        if self.has_received(turn, round, member) {
            return Err(Violation::Duplicate { seq: chunk.seq, strand, round: chunk.header.round });
        }
        let strands_max = WINDOWS_PARKED_MAX * self.admission.plan.window;
        if self.parked.strands_with(member, strand) > strands_max {
            return Err(Violation::Ahead { seq: chunk.seq, strands_max });
        }
        self.parked.put(member, strand, round, chunk.data);
        Ok(())
    }

    pub(super) fn handle_sent(&mut self, sent: InFlight) {
        if sent.round != ROUND_TAKEN
            && let Some(run) = self.running.iter_mut().find(|run| run.strand == sent.strand)
        {
            run.handle_sent();
        }
    }

    /// One step, one chunk, or the end of something.
    pub(super) fn advance(
        &mut self,
        buffers: &mut Buffers,
        stats: &mut ExecutorStats,
        memory: &mut dyn Memory,
        may_send: &dyn Fn(SidecarIndex, usize) -> bool,
    ) -> Result<Move, StepError> {
        self.start_strands();
        let admission = Arc::clone(&self.admission);
        let mut may_send = |to, bytes| may_send(admission.topology.sidecar(to), bytes);
        let workplace = Workplace { admission: &admission, buffers, stats, memory };
        let (arithmetician, parked) = (&mut self.arithmetician, &mut self.parked);
        let mut around = Surroundings { workplace, arithmetician, parked };
        for index in 0..self.running.len() {
            match self.running[index].advance(&mut around, &mut may_send)? {
                Progress::Idle => {}
                Progress::Worked(phase) => return Ok(Move::Worked(phase)),
                Progress::Send(outgoing) => return Ok(send(&admission, self.running[index].strand, outgoing)),
                Progress::Over => return Ok(self.end_strand(index)),
            }
        }
        let over = self.next == self.strands.len() && self.running.is_empty();
        Ok(if over { Move::Done } else { Move::Idle })
    }

    pub(super) fn register_bytes(&self) -> u64 {
        self.running.iter().map(Run::register_bytes).sum()
    }

    pub(super) fn parked_bytes(&self) -> u64 {
        self.parked.bytes()
    }

    fn start_strands(&mut self) {
        while self.running.len() < self.window()
            && let Some(&turn) = self.strands.get(self.next)
        {
            let strand = self.strand(turn.strand);
            let takers = if turn.paced { silent_receivers(strand) } else { Vec::new() };
            let run = Run::new((turn.strand, strand), self.admission.topology.len(), takers);
            self.running.push(run);
            self.next += 1;
        }
    }

    /// How many strands may be in flight here now: a prelude is alone.
    fn window(&self) -> usize {
        let in_prelude = self.admission.plan.prelude && self.running.iter().any(|run| run.strand == 0);
        if in_prelude { 1 } else { self.admission.plan.window }
    }

    /// The rounds of a strand are over: tokens go to those who hear nothing else from here.
    fn end_strand(&mut self, index: usize) -> Move {
        let strand = self.running[index].strand;
        self.release(index);
        let turn = self.strands.binary_search_by_key(&strand, |turn| turn.strand).map(|at| self.strands[at]);
        let givers = match turn {
            Ok(turn) if turn.paced => silent_senders(self.strand(strand)),
            _ => Vec::new(),
        };
        let token = |member| {
            let empty = Outgoing { to: member, round: ROUND_TAKEN, span: EMPTY, data: Bytes::new() };
            (self.sidecar(member), chunk(&self.admission, strand, empty))
        };
        Move::Taken(givers.into_iter().map(token).collect())
    }

    fn handle_taken(&mut self, from: Member, chunk: &Chunk, unexpected: Violation) -> Result<(), Violation> {
        self.check_span(EMPTY, Form::Values, 0, chunk)?;
        let index = self.running.iter().position(|run| run.strand == chunk.header.strand);
        let Some(index) = index else { return Err(unexpected) };
        let takers = &mut self.running[index].takers;
        let Some(taker) = takers.iter().position(|member| *member == from) else { return Err(unexpected) };
        takers.swap_remove(taker);
        self.release(index);
        Ok(())
    }

    /// Frees the place of a strand in the window once nothing is awaited.
    fn release(&mut self, index: usize) {
        if self.running[index].over && self.running[index].takers.is_empty() {
            self.running.remove(index);
        }
    }

    fn has_received(&self, turn: usize, round: usize, from: Member) -> bool {
        let strand = self.strands[turn].strand;
        let behind = match self.running.iter().find(|run| run.strand == strand) {
            Some(run) => run.has_received(round, from),
            None => turn < self.next,
        };
        behind || self.parked.has(from, strand, round)
    }

    fn check_span(&self, span: Span, form: Form, span_bytes: usize, chunk: &Chunk) -> Result<(), Violation> {
        let ChunkHeader { lane, strand, round, start, len } = chunk.header;
        let plan_lane = self.strand(strand).lane;
        if lane != plan_lane {
            return Err(Violation::Lane { seq: chunk.seq, lane: plan_lane, found: lane });
        }
        let bytes = chunk.data.len();
        let fits = self.arithmetician.sizes.fits(form, bytes, span_bytes);
        if (span.start, span.len) != (start, len) || !fits {
            return Err(Violation::Span { seq: chunk.seq, strand, round, start, len, bytes });
        }
        Ok(())
    }

    /// Bytes of what a member sends of a span.
    fn bytes_from(&self, member: Member, span: Span, form: Form) -> usize {
        let ranks = self.admission.topology.members[member.index()].ranks.len();
        self.arithmetician.sizes.of(form, span, ranks)
    }

    fn strand(&self, strand: u32) -> &SubSchedule {
        &self.admission.plan.sub_schedules[strand as usize]
    }

    fn sidecar(&self, member: Member) -> SidecarIndex {
        self.admission.topology.sidecar(member)
    }
}

/// Of how many windows of strands chunks of one sender may be parked; the reasons are in the header.
const WINDOWS_PARKED_MAX: usize = 3;

const EMPTY: Span = Span { start: 0, len: 0 };

fn send(admission: &Admission, strand: u32, outgoing: Outgoing) -> Move {
    Move::Send { to: admission.topology.sidecar(outgoing.to), chunk: chunk(admission, strand, outgoing) }
}

fn chunk(admission: &Admission, strand: u32, outgoing: Outgoing) -> Chunk {
    let Outgoing { round, span, data, .. } = outgoing;
    let lane = admission.plan.sub_schedules[strand as usize].lane;
    let header = ChunkHeader { lane, strand, round, start: span.start, len: span.len };
    Chunk { epoch: admission.epoch, seq: admission.seq, early: false, header, data }
}

fn has_work(strand: &SubSchedule) -> bool {
    strand.rounds.iter().any(|round| !round.steps.is_empty() || !round.transfers.is_empty())
}

/// What a member sends here in a round.
fn expected(strand: &SubSchedule, round: usize, member: Member) -> Option<(Span, Form)> {
    strand.rounds.get(round)?.transfers.iter().find_map(|transfer| match *transfer {
        Transfer::Receive { from, span, form, .. } if from == member => Some((span, form)),
        _ => None,
    })
}

/// Members to which a strand sends and of which it hears nothing.
fn silent_receivers(strand: &SubSchedule) -> Vec<Member> {
    let (receivers, senders) = partners(strand);
    receivers.into_iter().filter(|member| senders.binary_search(member).is_err()).collect()
}

/// Members from which a strand receives and to which it says nothing.
fn silent_senders(strand: &SubSchedule) -> Vec<Member> {
    let (receivers, senders) = partners(strand);
    senders.into_iter().filter(|member| receivers.binary_search(member).is_err()).collect()
}

/// To whom a strand sends, and from whom it receives, both ascending.
fn partners(strand: &SubSchedule) -> (Vec<Member>, Vec<Member>) {
    let (mut receivers, mut senders) = (Vec::new(), Vec::new());
    for transfer in strand.rounds.iter().flat_map(|round| &round.transfers) {
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

/// Into an ascending list without duplicates.
fn insert<T: Ord>(list: &mut Vec<T>, item: T) {
    if let Err(at) = list.binary_search(&item) {
        list.insert(at, item);
    }
}
