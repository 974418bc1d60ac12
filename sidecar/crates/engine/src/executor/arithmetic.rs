//! What the steps of a plan do to bytes: contribute, reduce, finish, publish.

use bytes::BytesMut;
use ronde_collectives::kernels::{self, BLOCK_BYTES_MAX, BlockReducer, KernelError, Side};
use ronde_collectives::plan::{Slice, Source, Span};
use ronde_wire::ReduceOp;

use super::register::{Buffers, Value};
use super::stats::ExecutorStats;
use crate::event::Admission;
use crate::memory::{InputPlace, Memory, MemoryError, OutputPlace};

/// Why a step cannot be done. After ordering that ends the epoch, so each of these is a bug or lost memory.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    #[error("the tensor's memory is gone: {0}")]
    Memory(#[from] MemoryError),
    #[error("{0}")]
    Kernel(#[from] KernelError),
    #[error("a step needs a register of {expected} bytes that holds {found}; the plan is wrong")]
    Register { expected: usize, found: usize },
    #[error("elements of every rank are reduced, but the operation names no reduction")]
    NoReduction,
    #[error("a reduction names one register twice; the plan is wrong")]
    SameRegister,
    #[error("no local rank contributes")]
    NoRank,
}

/// Computes on the elements of one operation.
#[derive(Debug)]
pub(super) struct Arithmetician {
    element_bytes: usize,
    reducer: Option<BlockReducer>,
    /// A block of one rank, as it was read.
    block: Vec<u8>,
}

impl Arithmetician {
    pub(super) fn new(admission: &Admission) -> Result<Self, StepError> {
        let arithmetic = &admission.arithmetic;
        let reducer =
            arithmetic.op.map(|op| BlockReducer::new(arithmetic.dtype, op, arithmetic.prescale)).transpose()?;
        Ok(Self { element_bytes: arithmetic.dtype.size_bytes(), reducer, block: Vec::new() })
    }

    pub(super) fn bytes_of(&self, span: Span) -> usize {
        usize::try_from(span.len).map_or(usize::MAX, |len| len.saturating_mul(self.element_bytes))
    }

    /// Fills a buffer with this member's contribution to a span. Every byte is read from the memory once.
    pub(super) fn contribute(
        &mut self,
        admission: &Admission,
        span: Span,
        into: &mut BytesMut,
        memory: &mut dyn Memory,
    ) -> Result<(), StepError> {
        let mut rest = &mut into[..];
        for slice in admission.plan.layout.within(span) {
            let (part, behind) = rest.split_at_mut(self.bytes_of(slice.span));
            rest = behind;
            match slice.source {
                Source::One(rank) => memory.read(self.input(admission, &slice, rank, 0), part)?,
                Source::EveryRank => self.reduce_local(admission, &slice, part, memory)?,
            }
        }
        Ok(())
    }

    fn reduce_local(
        &mut self,
        admission: &Admission,
        slice: &Slice,
        into: &mut [u8],
        memory: &mut dyn Memory,
    ) -> Result<(), StepError> {
        let scaled = admission.arithmetic.prescale != 1.0;
        match admission.local_ranks.as_slice() {
            [] => Err(StepError::NoRank),
            // One rank's value is its own reduction; nothing is gained by going through a block.
            [rank] if !scaled => Ok(memory.read(self.input(admission, slice, *rank, 0), into)?),
            _ => {
                let block_bytes = BLOCK_BYTES_MAX - BLOCK_BYTES_MAX % self.element_bytes;
                for (index, part) in into.chunks_mut(block_bytes).enumerate() {
                    self.reduce_block(admission, slice, index * block_bytes, part, memory)?;
                }
                Ok(())
            }
        }
    }

    /// One block of all local ranks, in rank order, while it lies in the first-level cache.
    fn reduce_block(
        &mut self,
        admission: &Admission,
        slice: &Slice,
        skipped_bytes: usize,
        into: &mut [u8],
        memory: &mut dyn Memory,
    ) -> Result<(), StepError> {
        self.block.resize(into.len(), 0);
        for (index, &rank) in admission.local_ranks.iter().enumerate() {
            let place = self.input(admission, slice, rank, skipped_bytes);
            memory.read(place, &mut self.block)?;
            let reducer = self.reducer.as_mut().ok_or(StepError::NoReduction)?;
            if index == 0 { reducer.first(&self.block)? } else { reducer.add(&self.block)? }
        }
        self.reducer.as_mut().ok_or(StepError::NoReduction)?.store(into)?;
        Ok(())
    }

    fn input(&self, admission: &Admission, slice: &Slice, rank: ronde_wire::Rank, skipped_bytes: usize) -> InputPlace {
        let offset = slice.input_start * self.element_bytes as u64 + skipped_bytes as u64;
        InputPlace { seq: admission.seq, tensor: slice.tensor, rank, offset }
    }

    /// `into` becomes `op(left, right)`, where `into` is the left one when `side` says that the accumulator is. The other
    /// register's buffer becomes the result when it is free for that and the own one is still held by somebody else, as
    /// it is while a transport keeps what was sent: then nothing is copied.
    pub(super) fn reduce(
        &self,
        admission: &Admission,
        operands: Operands<'_>,
        buffers: &mut Buffers,
        stats: &mut ExecutorStats,
    ) -> Result<(), StepError> {
        let Operands { into, other, side, other_is_free, bytes } = operands;
        check(into, bytes)?;
        check(other, bytes)?;
        let dtype = admission.arithmetic.dtype;
        let op = admission.arithmetic.op.ok_or(StepError::NoReduction)?;
        stats.reduced_bytes += bytes as u64;
        let held = match std::mem::take(into).try_private() {
            Ok(mut accumulator) => {
                kernels::reduce_into(dtype, op, &mut accumulator, other.bytes(), side)?;
                *into = Value::Private(accumulator);
                return Ok(());
            }
            Err(held) => held,
        };
        if other_is_free {
            match std::mem::take(other).try_private() {
                Ok(mut accumulator) => {
                    kernels::reduce_into(dtype, op, &mut accumulator, held.bytes(), opposite(side))?;
                    *into = Value::Private(accumulator);
                    return Ok(());
                }
                Err(shared) => *other = shared,
            }
        }
        let mut accumulator = copy(&held, buffers, stats);
        kernels::reduce_into(dtype, op, &mut accumulator, other.bytes(), side)?;
        *into = Value::Private(accumulator);
        Ok(())
    }

    /// Divides an average and applies the postscale.
    pub(super) fn finish(
        &self,
        admission: &Admission,
        value: &mut Value,
        bytes: usize,
        buffers: &mut Buffers,
        stats: &mut ExecutorStats,
    ) -> Result<(), StepError> {
        check(value, bytes)?;
        let arithmetic = &admission.arithmetic;
        let op = arithmetic.op.ok_or(StepError::NoReduction)?;
        if op != ReduceOp::Average && arithmetic.postscale == 1.0 {
            return Ok(());
        }
        let mut buffer = match std::mem::take(value).try_private() {
            Ok(buffer) => buffer,
            Err(held) => copy(&held, buffers, stats),
        };
        kernels::finish(arithmetic.dtype, op, arithmetic.ranks, arithmetic.postscale, &mut buffer)?;
        *value = Value::Private(buffer);
        Ok(())
    }

    /// Writes a register's elements to the results.
    pub(super) fn publish(
        &self,
        admission: &Admission,
        span: Span,
        value: &Value,
        memory: &mut dyn Memory,
    ) -> Result<(), StepError> {
        check(value, self.bytes_of(span))?;
        let mut rest = value.bytes();
        for slice in admission.plan.layout.within(span) {
            let (part, behind) = rest.split_at(self.bytes_of(slice.span));
            rest = behind;
            let offset = slice.output_start * self.element_bytes as u64;
            memory.write(OutputPlace { seq: admission.seq, tensor: slice.tensor, rank: None, offset }, part)?;
        }
        Ok(())
    }
}

/// The two registers of a reduction.
pub(super) struct Operands<'a> {
    pub(super) into: &'a mut Value,
    pub(super) other: &'a mut Value,
    /// Where `into` stands.
    pub(super) side: Side,
    /// Whether the other register's value is not read any more.
    pub(super) other_is_free: bool,
    pub(super) bytes: usize,
}

const fn opposite(side: Side) -> Side {
    match side {
        Side::AccumulatorLeft => Side::AccumulatorRight,
        Side::AccumulatorRight => Side::AccumulatorLeft,
    }
}

fn copy(value: &Value, buffers: &mut Buffers, stats: &mut ExecutorStats) -> BytesMut {
    let mut buffer = buffers.take(value.bytes().len());
    buffer.copy_from_slice(value.bytes());
    stats.copies += 1;
    stats.copied_bytes += value.bytes().len() as u64;
    buffer
}

fn check(value: &Value, expected: usize) -> Result<(), StepError> {
    let found = value.bytes().len();
    if found == expected { Ok(()) } else { Err(StepError::Register { expected, found }) }
}
