//! The element-wise steps of a plan: contribute, reduce in pairs, finish, encode, decode, publish.

use bytes::BytesMut;
use ronde_collectives::kernels::{self, BlockReducer, KernelError, PartialSums, Side};
use ronde_collectives::plan::{Form, Slice, Source, Span, Target};
use ronde_wire::{Codec, DType, Rank, ReduceOp, copying};

use super::inputs::Inputs;
use super::measured::Measured;
use super::nary::Ranks;
use super::plugin_steps;
use super::register::{Buffers, Value};
use super::sizes::Sizes;
use super::stats::ExecutorStats;
use crate::event::{Admission, Arithmetic};
use crate::memory::{Memory, MemoryError, OutputPlace};
use crate::plugins::{PluginFault, Stage};

/// Why a step failed. This ends the epoch, so each of these is a bug, lost memory or a fault of a plugin.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    #[error("the tensor's memory is not accessible: {0}")]
    Memory(#[from] MemoryError),
    #[error("{0}")]
    Kernel(#[from] KernelError),
    #[error("{codec} does not encode {dtype}; the request should have been refused")]
    Codec { codec: Codec, dtype: DType },
    #[error("a step needs a register of {expected} bytes that holds {found}; the plan is wrong")]
    Register { expected: usize, found: usize },
    #[error("elements of every rank are reduced, but the operation names no reduction")]
    NoReduction,
    #[error("a reduction names one register twice; the plan is wrong")]
    SameRegister,
    #[error("no local rank contributes")]
    NoRank,
    #[error("ranks are weighted before the measures are concluded; the plan is wrong")]
    NotConcluded,
    #[error("the measures are concluded twice; the plan is wrong")]
    ConcludedTwice,
    #[error("elements contribute that the prelude did not measure; the plan is wrong")]
    NotMeasured,
    #[error("{0}")]
    Plugin(#[from] PluginFault),
}

/// Computes on the elements of one operation.
#[derive(Debug)]
pub(super) struct ElementOps {
    pub(super) sizes: Sizes,
    /// For reductions in pairs.
    pub(super) reducer: Option<BlockReducer>,
    average: Average,
    pub(super) ranks: Ranks,
    /// The copy of the local tensors that a prelude measures.
    pub(super) measured: Option<Measured>,
}

impl ElementOps {
    pub(super) fn new(admission: &Admission) -> Result<Self, StepError> {
        let arithmetic = &admission.arithmetic;
        let work = admission.plugin.as_ref().map(|plugin| plugin.uses.work);
        let sizes = Sizes::new(arithmetic.dtype, arithmetic.codec, work)?;
        let reducer = match arithmetic.op {
            Some(op) if !kernels::is_nary(op) && op != ReduceOp::Plugin => {
                Some(BlockReducer::new(arithmetic.dtype, op, arithmetic.prescale)?)
            }
            _ => None,
        };
        let average = Average::of(admission);
        let reducer = reducer.map(|reducer| match average {
            Average::Finished => reducer.as_average(arithmetic.ranks, arithmetic.postscale),
            Average::Partial(sums) => reducer.as_partial_sums(sums),
            Average::Plain => reducer,
        });
        let plan = &admission.plan;
        let copy = || Measured::new(admission.local_ranks.len(), plan.layout.elements, sizes);
        let measured = plan.prelude.then(copy);
        Ok(Self { sizes, reducer, average, ranks: Ranks::new(&admission.topology), measured })
    }

    /// How elements of every rank are reduced.
    pub(super) fn reduction(&self, admission: &Admission) -> Result<ReduceOp, StepError> {
        admission.arithmetic.op.ok_or(StepError::NoReduction)
    }

    /// Fills a buffer with this member's contribution to a span. Every byte of the input is read once.
    pub(super) fn contribute(
        &mut self,
        span: Span,
        into: &mut BytesMut,
        at: &mut StepContext<'_>,
    ) -> Result<(), StepError> {
        let mut inputs = self.inputs(at);
        let mut rest = &mut into[..];
        for slice in inputs.admission.plan.layout.within(span) {
            let (part, remaining) = rest.split_at_mut(self.sizes.values(slice.span));
            rest = remaining;
            match slice.source {
                Source::One(rank) => inputs.read(&slice, rank, 0, part)?,
                Source::EveryRank => self.reduce_local(&mut inputs, &slice, part)?,
            }
        }
        Ok(())
    }

    /// Each local rank's values of a span, one rank after another; `old` gives its buffer. Where the values are reduced
    /// in pairs, the reduction prescales them. After a prelude these are the values that it measured.
    pub(super) fn contribute_each(
        &mut self,
        span: Span,
        old: Value,
        at: &mut StepContext<'_>,
    ) -> Result<Value, StepError> {
        if let Some(measured) = self.measured.as_ref().filter(|measured| measured.is_complete()) {
            return measured.contribution(span, old, at.buffers);
        }
        let ranks = at.admission.local_ranks.len();
        let mut buffer = at.buffers.renew(old, self.sizes.of(Form::EachRank, span, ranks));
        self.read_each(span, &mut buffer, at)?;
        Ok(Value::Private(buffer))
    }

    /// Fills a buffer from the inputs. During a prelude the values are kept, too.
    fn read_each(&mut self, span: Span, into: &mut [u8], at: &mut StepContext<'_>) -> Result<(), StepError> {
        let mut inputs = self.inputs(at);
        let mut rest = into;
        let admission = inputs.admission;
        for (index, &rank) in admission.local_ranks.iter().enumerate() {
            for slice in admission.plan.layout.within(span) {
                let (part, remaining) = rest.split_at_mut(self.sizes.values(slice.span));
                rest = remaining;
                match self.reducer {
                    Some(_) => inputs.read(&slice, rank, 0, part)?,
                    None => inputs.read_prescaled(&slice, rank, 0, part)?,
                }
                if let Some(measured) = &mut self.measured {
                    copying::copy(measured.place(index, slice.span)?, part);
                }
            }
        }
        Ok(())
    }

    /// Whether the contribution of a single rank is its unchanged value.
    fn is_plain(&self) -> bool {
        self.reducer.as_ref().is_none_or(BlockReducer::is_plain)
    }

    pub(super) fn inputs<'a>(&self, at: &'a mut StepContext<'_>) -> Inputs<'a> {
        let (memory, plugins) = at.memory.parts();
        Inputs { admission: at.admission, sizes: self.sizes, stats: at.stats, memory, plugins }
    }

    /// The reduction of the local ranks' values, in rank order, in blocks that stay in the first-level cache.
    fn reduce_local(&mut self, inputs: &mut Inputs<'_>, slice: &Slice, into: &mut [u8]) -> Result<(), StepError> {
        let admission = inputs.admission;
        match admission.local_ranks.as_slice() {
            [] => Err(StepError::NoRank),
            // The value of one rank needs no reduction and no block.
            [rank] if admission.arithmetic.prescale == 1.0 && self.is_plain() => {
                Ok(inputs.read(slice, *rank, 0, into)?)
            }
            ranks if at_plugin(admission) => plugin_steps::reduce_local(inputs, slice, ranks, into),
            ranks => {
                let reducer = self.reducer.as_mut().ok_or(StepError::NoReduction)?;
                reducer.reduce(ranks.len(), into, |index, start, block| {
                    Ok(inputs.read(slice, ranks[index], start, block)?)
                })
            }
        }
    }

    /// Encodes the elements of a register into another buffer.
    pub(super) fn encode(&self, block: Block, value: &mut Value, at: &mut StepContext<'_>) -> Result<(), StepError> {
        let Block { span, .. } = block;
        check(value, self.sizes.values(span))?;
        let arithmetic = &at.admission.arithmetic;
        let mut encoded = at.buffers.take(self.sizes.encoded(span));
        if arithmetic.codec == Codec::Plugin {
            let bytes = plugin_steps::encode(block, value.bytes(), &mut encoded, at)?;
            encoded.truncate(bytes);
        } else {
            kernels::encode(arithmetic.codec, arithmetic.dtype, value.bytes(), &mut encoded)?;
        }
        at.stats.encoded_bytes += value.bytes().len() as u64;
        at.buffers.give(std::mem::replace(value, Value::Private(encoded)));
        Ok(())
    }

    /// Decodes the elements of a register into another buffer.
    pub(super) fn decode(&self, block: Block, value: &mut Value, at: &mut StepContext<'_>) -> Result<(), StepError> {
        let Block { span, .. } = block;
        let (expected, found) = (self.sizes.encoded(span), value.bytes().len());
        if !self.sizes.fits(Form::Encoded, found, expected) {
            return Err(StepError::Register { expected, found });
        }
        let arithmetic = &at.admission.arithmetic;
        let mut decoded = at.buffers.take(self.sizes.values(span));
        if arithmetic.codec == Codec::Plugin {
            plugin_steps::decode(block, value.bytes(), &mut decoded, at)?;
        } else {
            kernels::decode(arithmetic.codec, arithmetic.dtype, value.bytes(), &mut decoded)?;
        }
        at.stats.decoded_bytes += decoded.len() as u64;
        at.buffers.give(std::mem::replace(value, Value::Private(decoded)));
        Ok(())
    }

    /// `into` becomes `op(left, right)`; `side` says on which side `into` is. When a transport still holds the buffer
    /// of `into` and the other register is not read again, the result uses the other register's buffer, so that nothing
    /// is copied.
    pub(super) fn reduce(&self, span: Span, operands: Operands<'_>, at: &mut StepContext<'_>) -> Result<(), StepError> {
        let Operands { into, other, side, other_is_free } = operands;
        let bytes = self.sizes.values(span);
        check(into, bytes)?;
        check(other, bytes)?;
        at.stats.reduced_bytes += bytes as u64;
        let held = match std::mem::take(into).try_private() {
            Ok(mut accumulator) => {
                self.reduce_into(span, Accumulator { bytes: &mut accumulator, side }, other.bytes(), at)?;
                *into = Value::Private(accumulator);
                return Ok(());
            }
            Err(held) => held,
        };
        if other_is_free() {
            match std::mem::take(other).try_private() {
                Ok(mut accumulator) => {
                    let opposite = Accumulator { bytes: &mut accumulator, side: opposite(side) };
                    self.reduce_into(span, opposite, held.bytes(), at)?;
                    *into = Value::Private(accumulator);
                    return Ok(());
                }
                Err(shared) => *other = shared,
            }
        }
        let mut accumulator = copy(&held, at);
        self.reduce_into(span, Accumulator { bytes: &mut accumulator, side }, other.bytes(), at)?;
        *into = Value::Private(accumulator);
        Ok(())
    }

    /// Reduces another operand into the accumulator.
    fn reduce_into(
        &self,
        span: Span,
        accumulator: Accumulator<'_>,
        other: &[u8],
        at: &mut StepContext<'_>,
    ) -> Result<(), StepError> {
        let dtype = at.admission.arithmetic.dtype;
        match self.reduction(at.admission)? {
            ReduceOp::Plugin => plugin_steps::reduce_pair(span, accumulator, other, at),
            _ if let Average::Partial(sums) = self.average => {
                Ok(sums.add(accumulator.bytes, other, accumulator.side)?)
            }
            op => Ok(kernels::reduce_into(dtype, op, accumulator.bytes, other, accumulator.side)?),
        }
    }

    /// Divides an average and applies the postscale.
    pub(super) fn finish(&self, span: Span, value: &mut Value, at: &mut StepContext<'_>) -> Result<(), StepError> {
        check(value, self.sizes.values(span))?;
        let arithmetic = &at.admission.arithmetic;
        let op = self.reduction(at.admission)?;
        let is_done = self.average == Average::Finished || op != ReduceOp::Average && arithmetic.postscale == 1.0;
        if is_done {
            return Ok(());
        }
        let mut buffer = match std::mem::take(value).try_private() {
            Ok(buffer) => buffer,
            Err(held) => copy(&held, at),
        };
        let Arithmetic { dtype, ranks, postscale, .. } = *arithmetic;
        match self.average {
            _ if op == ReduceOp::Plugin => kernels::scale(dtype, postscale, &mut buffer)?,
            Average::Partial(sums) => sums.finish(ranks, postscale, &mut buffer)?,
            _ => kernels::finish(dtype, op, ranks, postscale, &mut buffer)?,
        }
        *value = Value::Private(buffer);
        Ok(())
    }

    /// Writes a register's elements to the local results.
    pub(super) fn publish(&self, span: Span, value: &Value, at: &mut StepContext<'_>) -> Result<(), StepError> {
        check(value, self.sizes.values(span))?;
        let mut rest = value.bytes();
        for slice in at.admission.plan.layout.within(span) {
            let (part, remaining) = rest.split_at(self.sizes.values(slice.span));
            rest = remaining;
            let Some(rank) = result_of(at.admission, slice.target) else { continue };
            let offset = slice.output_start * self.sizes.element_bytes as u64;
            at.memory.write(OutputPlace { seq: at.admission.seq, tensor: slice.tensor, rank, offset }, part)?;
            at.stats.published_bytes += part.len() as u64;
        }
        Ok(())
    }
}

/// How averages of two-byte types are computed, in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Average {
    /// All ranks' values are added together, and the sum is divided before it is rounded.
    Finished,
    /// Sums of some ranks' values are sent, which may exceed the range of the type.
    Partial(PartialSums),
    /// All other reductions.
    Plain,
}

impl Average {
    fn of(admission: &Admission) -> Self {
        let Arithmetic { dtype, op, codec, at_once, .. } = admission.arithmetic;
        if op != Some(ReduceOp::Average) || codec != Codec::None || !matches!(dtype, DType::F16 | DType::Bf16) {
            return Self::Plain;
        }
        if at_once {
            return Self::Finished;
        }
        let ranks: Vec<usize> = admission.topology.members.iter().map(|member| member.ranks.len()).collect();
        PartialSums::of(dtype, &ranks).map_or(Self::Plain, Self::Partial)
    }
}

/// The context of a step besides the registers of its sub-schedule.
pub(super) struct StepContext<'a> {
    pub(super) admission: &'a Admission,
    pub(super) buffers: &'a mut Buffers,
    pub(super) stats: &'a mut ExecutorStats,
    pub(super) memory: &'a mut dyn Memory,
}

/// Whether a plugin reduces.
fn at_plugin(admission: &Admission) -> bool {
    admission.arithmetic.op == Some(ReduceOp::Plugin)
}

/// The local result of a target, as in [`OutputPlace::rank`]; `None` when no local rank gets it. Joined ranks get no
/// results.
fn result_of(admission: &Admission, target: Target) -> Option<Option<Rank>> {
    let gets_one = |rank: &Rank| admission.joined.binary_search(rank).is_err();
    match target {
        Target::EveryRank => admission.served.iter().any(gets_one).then_some(None),
        Target::One(rank) => (admission.served.binary_search(&rank).is_ok() && gets_one(&rank)).then_some(Some(rank)),
    }
}

/// A span that a codec encodes or decodes, and what its values are.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) span: Span,
    pub(super) stage: Stage,
}

/// The operand of a reduction that becomes the result, and the side on which it stands.
pub(super) struct Accumulator<'a> {
    pub(super) bytes: &'a mut [u8],
    pub(super) side: Side,
}

/// The two registers of a reduction.
pub(super) struct Operands<'a> {
    pub(super) into: &'a mut Value,
    pub(super) other: &'a mut Value,
    /// The side of `into`.
    pub(super) side: Side,
    /// Whether the other register's value is not read again.
    pub(super) other_is_free: &'a dyn Fn() -> bool,
}

const fn opposite(side: Side) -> Side {
    match side {
        Side::AccumulatorLeft => Side::AccumulatorRight,
        Side::AccumulatorRight => Side::AccumulatorLeft,
    }
}

fn copy(value: &Value, at: &mut StepContext<'_>) -> BytesMut {
    let mut buffer = at.buffers.take(value.bytes().len());
    copying::copy(&mut buffer, value.bytes());
    at.stats.copies += 1;
    at.stats.copied_bytes += value.bytes().len() as u64;
    buffer
}

/// Checks that a register holds as many bytes as a step needs.
pub(super) fn check(value: &Value, expected: usize) -> Result<(), StepError> {
    let found = value.bytes().len();
    if found == expected { Ok(()) } else { Err(StepError::Register { expected, found }) }
}
