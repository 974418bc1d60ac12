//! The registers of a strand, and what each step does to them.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use ronde_collectives::kernels::Side;
use ronde_collectives::plan::{Form, Register, Span, Step, SubSchedule, Transfer};

use super::Phase;
use super::arithmetic::{Arithmetician, Operands, StepError, Workplace};
use super::register::{Buffers, Value};
use super::sizes::Sizes;
use crate::plugins::Stage;

/// As many registers as a strand names.
#[derive(Debug)]
pub(super) struct Registers {
    values: Vec<Value>,
    /// How many of them hold one member's each where a step names the first.
    members: usize,
}

/// The kind of work that a step is.
pub(super) const fn phase(step: &Step) -> Phase {
    match step {
        Step::Contribute { .. } | Step::ContributeEach { .. } | Step::MeasureOwn { .. } => Phase::ReadInput,
        Step::Reduce { .. }
        | Step::ReduceN { .. }
        | Step::Finish { .. }
        | Step::MeasureAll { .. }
        | Step::Conclude { .. } => Phase::Reduce,
        Step::Encode { .. } | Step::Decode { .. } => Phase::Code,
        Step::Publish { .. } => Phase::CopyResult,
    }
}

/// Where a step stands in its strand.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) strand: &'a SubSchedule,
    pub(super) round: usize,
    pub(super) step: usize,
}

impl Registers {
    pub(super) fn new(strand: &SubSchedule, members: usize) -> Self {
        let steps = strand.rounds.iter().flat_map(|round| &round.steps);
        let in_steps = steps.flat_map(|step| mentioned(step, members)).map(|range| range.end).max();
        let transfers = strand.rounds.iter().flat_map(|round| &round.transfers);
        let in_transfers = transfers.map(|transfer| index(register_of(transfer)) + 1).max();
        let count = in_steps.max(in_transfers).unwrap_or(0);
        Self { values: (0..count).map(|_| Value::default()).collect(), members }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.values.iter().map(|value| value.bytes().len() as u64).sum()
    }

    /// What a register holds, for sending; not copied. Measures that nobody has taken are zeros.
    pub(super) fn share(&mut self, from: Register, form: Form, bytes: usize, sizes: Sizes) -> Result<Bytes, StepError> {
        let value = &mut self.values[index(from)];
        if form == Form::Measures && matches!(value, Value::Empty) {
            *value = Value::Private(BytesMut::zeroed(bytes));
        }
        let found = value.bytes().len();
        if sizes.fits(form, found, bytes) {
            Ok(value.share())
        } else {
            Err(StepError::Register { expected: bytes, found })
        }
    }

    /// A register becomes what was received.
    pub(super) fn receive(&mut self, into: Register, data: Bytes, buffers: &mut Buffers) {
        buffers.give(std::mem::replace(&mut self.values[index(into)], Value::Shared(data)));
    }

    /// Leaves all buffers to the next strand.
    pub(super) fn clear(&mut self, buffers: &mut Buffers) {
        self.values.drain(..).for_each(|value| buffers.give(value));
    }

    pub(super) fn perform(
        &mut self,
        step: Step,
        place: Place<'_>,
        arithmetician: &mut Arithmetician,
        at: &mut Workplace<'_>,
    ) -> Result<(), StepError> {
        match step {
            Step::Contribute { into, span } => {
                let mut buffer = self.renew(into, arithmetician.sizes.values(span), at.buffers);
                arithmetician.contribute(span, &mut buffer, at)?;
                self.put(into, buffer);
            }
            Step::ContributeEach { into, span } => {
                let ranks = at.admission.local_ranks.len();
                let mut buffer = self.renew(into, arithmetician.sizes.of(Form::EachRank, span, ranks), at.buffers);
                arithmetician.contribute_each(span, &mut buffer, at)?;
                self.put(into, buffer);
            }
            Step::Reduce { left, right, into, span } => {
                self.reduce([left, right, into], span, place, arithmetician, at)?;
            }
            Step::ReduceN { first, into, span } => {
                let mut buffer = self.renew(into, arithmetician.sizes.values(span), at.buffers);
                arithmetician.reduce_n(self.of_members(first, into)?, span, &mut buffer, at)?;
                self.put(into, buffer);
            }
            Step::Finish { register, span } => arithmetician.finish(span, self.at(register), at)?,
            // Contributions are encoded in the first round of the plan for codecs, and results in the second.
            Step::Encode { register, span } => {
                let stage = if place.round == 0 { Stage::Contribution } else { Stage::Result };
                arithmetician.encode((span, stage), self.at(register), at)?;
            }
            Step::Decode { register, span } => {
                let stage = if place.round <= 1 { Stage::Contribution } else { Stage::Result };
                arithmetician.decode((span, stage), self.at(register), at)?;
            }
            Step::MeasureOwn { into, span } => arithmetician.measure_own(span, self.at(into), at)?,
            Step::MeasureAll { first, into, span } => {
                let mut measures = std::mem::take(self.at(into));
                arithmetician.measure_all(self.of_members(first, into)?, span, &mut measures, at)?;
                *self.at(into) = measures;
            }
            Step::Conclude { first } => {
                arithmetician.conclude(&self.values[range(first, self.members)], at)?;
            }
            Step::Publish { from, span } => arithmetician.publish(span, self.at(from), at)?,
        }
        Ok(())
    }

    fn reduce(
        &mut self,
        [left, right, into]: [Register; 3],
        span: Span,
        place: Place<'_>,
        arithmetician: &Arithmetician,
        at: &mut Workplace<'_>,
    ) -> Result<(), StepError> {
        let (other, side) = if into == left { (right, Side::AccumulatorLeft) } else { (left, Side::AccumulatorRight) };
        let other_is_free = || !is_read_after(place, other, self.members);
        let registers = self.values.get_disjoint_mut([into, other].map(index)).map_err(|_| StepError::SameRegister)?;
        let [into, other] = registers;
        arithmetician.reduce(span, Operands { into, other, side, other_is_free: &other_is_free }, at)
    }

    fn at(&mut self, register: Register) -> &mut Value {
        &mut self.values[index(register)]
    }

    fn put(&mut self, into: Register, buffer: BytesMut) {
        *self.at(into) = Value::Private(buffer);
    }

    /// A buffer for what a register is to become; the register gives its own.
    fn renew(&mut self, into: Register, bytes: usize, buffers: &mut Buffers) -> BytesMut {
        let old = std::mem::take(self.at(into));
        buffers.renew(old, bytes)
    }

    /// All members' registers from one on, which a result must not be among.
    fn of_members(&self, first: Register, into: Register) -> Result<&[Value], StepError> {
        let range = range(first, self.members);
        if range.contains(&index(into)) { Err(StepError::SameRegister) } else { Ok(&self.values[range]) }
    }
}

/// Whether a strand reads what a register holds now, behind a step of a round. A walk to the next mention: in every
/// algorithm that is at most a round away.
fn is_read_after(place: Place<'_>, register: Register, members: usize) -> bool {
    let mut behind = place.step + 1;
    for round in &place.strand.rounds[place.round..] {
        for step in &round.steps[behind..] {
            if mentioned(step, members).iter().any(|range| range.contains(&index(register))) {
                return !matches!(step, Step::Contribute { .. } | Step::ContributeEach { .. })
                    && !matches!(step, Step::ReduceN { into, .. } if *into == register);
            }
        }
        let mut transfers = round.transfers.iter().filter(|transfer| register_of(transfer) == register).peekable();
        if transfers.peek().is_some() {
            return transfers.any(|transfer| matches!(transfer, Transfer::Send { .. }));
        }
        behind = 0;
    }
    false
}

/// The registers that a step reads or writes.
fn mentioned(step: &Step, members: usize) -> [Range<usize>; 2] {
    let one = |register| range(register, 1);
    match *step {
        Step::Contribute { into: register, .. }
        | Step::ContributeEach { into: register, .. }
        | Step::MeasureOwn { into: register, .. }
        | Step::Finish { register, .. }
        | Step::Encode { register, .. }
        | Step::Decode { register, .. }
        | Step::Publish { from: register, .. } => [one(register), 0..0],
        Step::Reduce { left, right, .. } => [one(left), one(right)],
        Step::ReduceN { first, into, .. } | Step::MeasureAll { first, into, .. } => [range(first, members), one(into)],
        Step::Conclude { first } => [range(first, members), 0..0],
    }
}

const fn register_of(transfer: &Transfer) -> Register {
    match *transfer {
        Transfer::Send { from: register, .. } | Transfer::Receive { into: register, .. } => register,
    }
}

fn range(first: Register, count: usize) -> Range<usize> {
    index(first)..index(first) + count
}

fn index(register: Register) -> usize {
    usize::from(register.0)
}
