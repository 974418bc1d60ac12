//! The registers of a sub-schedule, and the effect of each step on them.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use ronde_collectives::kernels::Side;
use ronde_collectives::plan::{Form, Register, Span, Step, SubSchedule, Transfer};

use super::Phase;
use super::arithmetic::{Block, ElementOps, Operands, StepContext, StepError};
use super::register::{Buffers, Value};
use super::sizes::Sizes;
use crate::plugins::Stage;

/// The registers of a sub-schedule.
#[derive(Debug)]
pub(super) struct Registers {
    values: Vec<Value>,
    /// The number of members: a step on all members names the first of so many registers.
    members: usize,
}

/// The kind of work of a step.
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

/// The position of a step in its sub-schedule.
#[derive(Clone, Copy)]
pub(super) struct StepPosition<'a> {
    pub(super) sub_schedule: &'a SubSchedule,
    pub(super) round: usize,
    pub(super) step: usize,
}

impl Registers {
    pub(super) fn new(sub_schedule: &SubSchedule, members: usize) -> Self {
        let steps = sub_schedule.rounds.iter().flat_map(|round| &round.steps);
        let in_steps = steps.flat_map(|step| mentioned(step, members)).map(|range| range.end).max();
        let transfers = sub_schedule.rounds.iter().flat_map(|round| &round.transfers);
        let in_transfers = transfers.map(|transfer| index(register_of(transfer)) + 1).max();
        let count = in_steps.max(in_transfers).unwrap_or(0);
        Self { values: (0..count).map(|_| Value::default()).collect(), members }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.values.iter().map(|value| value.bytes().len() as u64).sum()
    }

    /// The value of a register for sending, without a copy. Empty measures are zeros.
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

    /// Stores received bytes in a register.
    pub(super) fn receive(&mut self, into: Register, data: Bytes, buffers: &mut Buffers) {
        buffers.give(std::mem::replace(&mut self.values[index(into)], Value::Shared(data)));
    }

    /// Returns all buffers to the pool.
    pub(super) fn clear(&mut self, buffers: &mut Buffers) {
        self.values.drain(..).for_each(|value| buffers.give(value));
    }

    pub(super) fn perform(
        &mut self,
        step: Step,
        position: StepPosition<'_>,
        ops: &mut ElementOps,
        at: &mut StepContext<'_>,
    ) -> Result<(), StepError> {
        match step {
            Step::Contribute { into, span } => {
                let mut buffer = self.renew(into, ops.sizes.values(span), at.buffers);
                ops.contribute(span, &mut buffer, at)?;
                self.put(into, buffer);
            }
            Step::ContributeEach { into, span } => {
                let old = std::mem::take(self.at(into));
                *self.at(into) = ops.contribute_each(span, old, at)?;
            }
            Step::Reduce { left, right, into, span } => {
                self.reduce([left, right, into], span, position, ops, at)?;
            }
            Step::ReduceN { first, into, span } => {
                let mut buffer = self.renew(into, ops.sizes.values(span), at.buffers);
                ops.reduce_n(self.of_members(first, into)?, span, &mut buffer, at)?;
                self.put(into, buffer);
            }
            Step::Finish { register, span } => ops.finish(span, self.at(register), at)?,
            // Contributions are encoded in the first round of the plan for codecs, and results in the second.
            Step::Encode { register, span } => {
                let stage = if position.round == 0 { Stage::Contribution } else { Stage::Result };
                ops.encode(Block { span, stage }, self.at(register), at)?;
            }
            Step::Decode { register, span } => {
                let stage = if position.round <= 1 { Stage::Contribution } else { Stage::Result };
                ops.decode(Block { span, stage }, self.at(register), at)?;
            }
            Step::MeasureOwn { into, span } => ops.measure_own(span, self.at(into), at)?,
            Step::MeasureAll { first, into, span } => {
                let mut measures = std::mem::take(self.at(into));
                ops.measure_all(self.of_members(first, into)?, span, &mut measures, at)?;
                *self.at(into) = measures;
            }
            Step::Conclude { first } => {
                ops.conclude(&self.values[range(first, self.members)], at)?;
            }
            Step::Publish { from, span } => ops.publish(span, self.at(from), at)?,
        }
        Ok(())
    }

    fn reduce(
        &mut self,
        [left, right, into]: [Register; 3],
        span: Span,
        position: StepPosition<'_>,
        ops: &ElementOps,
        at: &mut StepContext<'_>,
    ) -> Result<(), StepError> {
        let (other, side) = if into == left { (right, Side::AccumulatorLeft) } else { (left, Side::AccumulatorRight) };
        let other_is_free = || !is_read_after(position, other, self.members);
        let registers = self.values.get_disjoint_mut([into, other].map(index)).map_err(|_| StepError::SameRegister)?;
        let [into, other] = registers;
        ops.reduce(span, Operands { into, other, side, other_is_free: &other_is_free }, at)
    }

    fn at(&mut self, register: Register) -> &mut Value {
        &mut self.values[index(register)]
    }

    fn put(&mut self, into: Register, buffer: BytesMut) {
        *self.at(into) = Value::Private(buffer);
    }

    /// A buffer for the new value of a register; its old buffer is reused if possible.
    fn renew(&mut self, into: Register, bytes: usize, buffers: &mut Buffers) -> BytesMut {
        let old = std::mem::take(self.at(into));
        buffers.renew(old, bytes)
    }

    /// All members' registers from `first` on, which must not include the result.
    fn of_members(&self, first: Register, into: Register) -> Result<&[Value], StepError> {
        let range = range(first, self.members);
        if range.contains(&index(into)) { Err(StepError::SameRegister) } else { Ok(&self.values[range]) }
    }
}

/// Whether a sub-schedule reads the current value of a register after a step. It searches the next use of the register,
/// which is at most a round away in every algorithm.
fn is_read_after(position: StepPosition<'_>, register: Register, members: usize) -> bool {
    let mut next_step = position.step + 1;
    for round in &position.sub_schedule.rounds[position.round..] {
        for step in &round.steps[next_step..] {
            if mentioned(step, members).iter().any(|range| range.contains(&index(register))) {
                return !matches!(step, Step::Contribute { .. } | Step::ContributeEach { .. })
                    && !matches!(step, Step::ReduceN { into, .. } if *into == register);
            }
        }
        let mut transfers = round.transfers.iter().filter(|transfer| register_of(transfer) == register).peekable();
        if transfers.peek().is_some() {
            return transfers.any(|transfer| matches!(transfer, Transfer::Send { .. }));
        }
        next_step = 0;
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
