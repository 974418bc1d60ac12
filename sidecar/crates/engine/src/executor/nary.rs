//! The steps of a plan on all ranks' values at once: measure, conclude, reduce.

use bytes::BytesMut;
use ronde_collectives::kernels::{self, BLOCK_BYTES_MAX, BlockReducer};
use ronde_collectives::plan::{Slice, Span};
use ronde_wire::{PluginWork, ReduceOp, SetTopology, copying};

use super::arithmetic::{ElementOps, StepContext, StepError, check};
use super::inputs::Inputs;
use super::plugin_steps;
use super::register::{Buffers, Value};
use super::sizes::MEASURE_BYTES;
use crate::event::Admission;

/// The positions of the ranks of a set in members' registers, and the conclusions about them.
#[derive(Debug)]
pub(super) struct Ranks {
    /// The member and the position among its ranks, for each rank of the set, ascending.
    order: Vec<(usize, usize)>,
    /// The number of ranks of each member.
    counts: Vec<usize>,
    /// The weights that the prelude concluded, one for each rank, ascending.
    weights: Option<Vec<f64>>,
}

impl Ranks {
    pub(super) fn new(topology: &SetTopology) -> Self {
        let positions = topology.members.iter().enumerate().flat_map(|(member, of)| {
            of.ranks.iter().enumerate().map(move |(position, rank)| (*rank, (member, position)))
        });
        let mut positions: Vec<_> = positions.collect();
        positions.sort_unstable();
        let order = positions.into_iter().map(|(_, position)| position).collect();
        Self { order, counts: topology.members.iter().map(|member| member.ranks.len()).collect(), weights: None }
    }

    /// Each rank's elements in the members' registers, ascending by rank.
    fn operands<'a>(&self, registers: &'a [Value], bytes: usize) -> Result<Vec<&'a [u8]>, StepError> {
        for (register, ranks) in registers.iter().zip(&self.counts) {
            check(register, ranks * bytes)?;
        }
        let operand = |&(member, position): &(usize, usize)| &registers[member].bytes()[position * bytes..][..bytes];
        Ok(self.order.iter().map(operand).collect())
    }

    /// The conclusions; empty where there are none.
    pub(super) fn concluded(&self) -> &[f64] {
        self.weights.as_deref().unwrap_or_default()
    }

    /// The number of pairs of ranks, including each rank with itself.
    fn pairs(&self) -> usize {
        self.order.len() * (self.order.len() + 1) / 2
    }
}

impl ElementOps {
    /// Reduces all members' registers to one. The kernel reads all operands of a small group of elements together, so
    /// that every byte is read once. A pairwise reduction runs as if all ranks were local.
    pub(super) fn reduce_n(
        &mut self,
        registers: &[Value],
        span: Span,
        into: &mut BytesMut,
        at: &mut StepContext<'_>,
    ) -> Result<(), StepError> {
        let (dtype, op) = (at.admission.arithmetic.dtype, self.reduction(at.admission)?);
        let operands = self.ranks.operands(registers, self.sizes.values(span))?;
        at.stats.reduced_bytes += operands.iter().map(|operand| operand.len() as u64).sum::<u64>();
        if let Some(reducer) = &mut self.reducer {
            return reduce_by_rank(reducer, &operands, into);
        }
        if op == ReduceOp::Plugin {
            return self.reduce_n_by_plugin(&operands, span, into, at);
        }
        let weights = match op {
            ReduceOp::Median => &[],
            _ => self.ranks.weights.as_deref().ok_or(StepError::NotConcluded)?,
        };
        Ok(kernels::reduce_n(dtype, op, &operands, weights, into)?)
    }

    /// Adds each local rank's sum of squares over a span, prescaled, to its measure.
    pub(super) fn measure_own(
        &mut self,
        span: Span,
        value: &mut Value,
        at: &mut StepContext<'_>,
    ) -> Result<(), StepError> {
        let admission = at.admission;
        let each = measures_of(admission);
        let mut sums = numbers(value, admission.local_ranks.len() * each)?;
        for slice in admission.plan.layout.within(span) {
            for (rank, sums) in sums.chunks_exact_mut(each).enumerate() {
                self.measure_rank(&slice, rank, sums, &mut self.inputs(at))?;
            }
            at.stats.measured_bytes += (self.sizes.values(slice.span) * admission.local_ranks.len()) as u64;
        }
        store(&sums, value, at.buffers);
        Ok(())
    }

    /// Copies the values of a local rank, which is counted from 0, and measures the copy in blocks that stay in a
    /// first-level cache.
    fn measure_rank(
        &mut self,
        slice: &Slice,
        rank: usize,
        sums: &mut [f64],
        inputs: &mut Inputs<'_>,
    ) -> Result<(), StepError> {
        let measured = self.measured.as_mut().ok_or(StepError::NotMeasured)?;
        let values = measured.place(rank, slice.span)?;
        let rank = inputs.admission.local_ranks[rank];
        for (number, block) in values.chunks_mut(BLOCK_BYTES_MAX).enumerate() {
            let start = number * BLOCK_BYTES_MAX;
            inputs.read_prescaled(slice, rank, start, block)?;
            if inputs.admission.plugin.is_some() {
                plugin_steps::measure(slice, start, block, sums, inputs)?;
            } else {
                kernels::add_sum_of_squares(inputs.admission.arithmetic.dtype, block, &mut sums[0])?;
            }
        }
        Ok(())
    }

    /// Adds the inner products over a span of all pairs of ranks to the measures.
    pub(super) fn measure_all(
        &self,
        registers: &[Value],
        span: Span,
        value: &mut Value,
        at: &mut StepContext<'_>,
    ) -> Result<(), StepError> {
        let operands = self.ranks.operands(registers, self.sizes.values(span))?;
        let mut products = numbers(value, self.ranks.pairs())?;
        kernels::add_products(at.admission.arithmetic.dtype, &operands, &mut products)?;
        at.stats.measured_bytes += operands.iter().map(|operand| operand.len() as u64).sum::<u64>();
        store(&products, value, at.buffers);
        Ok(())
    }

    /// Turns all members' measures into the weights of the operation.
    pub(super) fn conclude(&mut self, registers: &[Value], at: &mut StepContext<'_>) -> Result<(), StepError> {
        let op = self.reduction(at.admission)?;
        let work = at.admission.plugin.as_ref().map(|plugin| plugin.uses.work);
        let measures = match (op, work) {
            (ReduceOp::ClippedMean, _) => self.in_rank_order(registers, 1)?,
            (_, Some(PluginWork::TwoPass { .. })) => self.in_rank_order(registers, measures_of(at.admission))?,
            _ => self.summed(registers)?,
        };
        if let Some(measured) = &mut self.measured {
            measured.complete()?;
        }
        let ranks = self.ranks.order.len();
        let weights = match op {
            ReduceOp::Plugin => plugin_steps::conclude(ranks, measures, at)?,
            _ => kernels::weights(op, ranks, &measures)?,
        };
        if self.ranks.weights.replace(weights).is_some() { Err(StepError::ConcludedTwice) } else { Ok(()) }
    }

    /// The measures of each rank, `each` per rank.
    fn in_rank_order(&self, registers: &[Value], each: usize) -> Result<Vec<f64>, StepError> {
        let of_members =
            registers.iter().zip(&self.ranks.counts).map(|(register, ranks)| numbers(register, ranks * each));
        let of_members = of_members.collect::<Result<Vec<_>, _>>()?;
        let of_rank =
            |&(member, position): &(usize, usize)| of_members[member][position * each..][..each].iter().copied();
        Ok(self.ranks.order.iter().flat_map(of_rank).collect())
    }

    /// The sums of the members' measures, each of which covers a part of the elements.
    fn summed(&self, registers: &[Value]) -> Result<Vec<f64>, StepError> {
        let mut sums = vec![0.0; self.ranks.pairs()];
        for register in registers {
            let part = numbers(register, sums.len())?;
            sums.iter_mut().zip(part).for_each(|(sum, number)| *sum += number);
        }
        Ok(sums)
    }
}

/// The number of measures of each rank.
fn measures_of(admission: &Admission) -> usize {
    match admission.plugin.as_ref().map(|plugin| plugin.uses.work) {
        Some(PluginWork::TwoPass { measures }) => measures as usize,
        _ => 1,
    }
}

/// Reduces the operands in rank order, pairwise.
fn reduce_by_rank(reducer: &mut BlockReducer, operands: &[&[u8]], into: &mut [u8]) -> Result<(), StepError> {
    reducer.reduce(operands.len(), into, |rank, start, block| {
        copying::copy(block, &operands[rank][start..start + block.len()]);
        Ok(())
    })
}

/// The measures in a register; zeros when it is empty.
fn numbers(value: &Value, count: usize) -> Result<Vec<f64>, StepError> {
    if matches!(value, Value::Empty) {
        return Ok(vec![0.0; count]);
    }
    check(value, count * MEASURE_BYTES)?;
    let (numbers, _) = value.bytes().as_chunks::<MEASURE_BYTES>();
    Ok(numbers.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect())
}

fn store(numbers: &[f64], value: &mut Value, buffers: &mut Buffers) {
    let mut buffer = buffers.renew(std::mem::take(value), numbers.len() * MEASURE_BYTES);
    let (slots, _) = buffer.as_chunks_mut::<MEASURE_BYTES>();
    slots.iter_mut().zip(numbers).for_each(|(slot, number)| *slot = number.to_le_bytes());
    *value = Value::Private(buffer);
}
