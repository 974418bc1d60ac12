//! Reducing with reducers.

use std::ops::Range;

use ronde_plugin_abi::{Call, Kind, limits, padded};

use crate::copying::copy;
use crate::error::{Fault, FaultKind};
use crate::guest::Guest;
use crate::instance::{Instance, Span, clear_line, elements, fill, unsupported_dtype};
use crate::manifest::Shape;

/// The operands of a reduction and the destination of its result, accessed block by block.
pub trait Operands {
    /// Copies a range of bytes of an operand.
    fn read(&mut self, operand: usize, part: Range<usize>, into: &mut [u8]);
    /// Stores a range of bytes of the result. Ranges come in ascending order, each after that range of all operands was
    /// read.
    fn write(&mut self, part: Range<usize>, result: &[u8]);
}

impl Instance {
    /// Reduces the values of all ranks of a span, in rank order. Reducers are elementwise, so the result does not
    /// depend on the number of calls or on where they are split.
    ///
    /// `measures` is the result of [`Self::conclude`] for shapes that measure, and empty otherwise.
    ///
    /// # Errors
    /// [`Fault`]; `into` may then be partly written.
    pub fn reduce(&mut self, span: &Span, operands: &[&[u8]], measures: &[f64], into: &mut [u8]) -> Result<(), Fault> {
        self.check_lengths(operands, into)?;
        let bytes = into.len();
        self.reduce_parts(span, operands.len(), bytes, measures, &mut Slices { operands, into })
    }

    /// Reduces the values of all ranks of a span pairwise, in rank order, for a pairwise reducer whose order matters.
    ///
    /// # Errors
    /// [`Fault`]; `into` may then be partly written.
    pub fn fold(&mut self, span: &Span, operands: &[&[u8]], into: &mut [u8]) -> Result<(), Fault> {
        self.check_lengths(operands, into)?;
        let bytes = into.len();
        self.reduce_in_pairs(span, operands.len(), bytes, &mut Slices { operands, into })
    }

    fn check_lengths(&self, operands: &[&[u8]], into: &[u8]) -> Result<(), Fault> {
        match operands.iter().find(|operand| operand.len() != into.len()) {
            None => Ok(()),
            Some(other) => {
                let problem = format!("an operand of {} bytes does not reduce into {}", other.len(), into.len());
                Err(self.refused(problem))
            }
        }
    }

    /// Reduces the values of two ranks into `left`, which belongs to the lower one.
    ///
    /// # Errors
    /// [`Fault`]; `left` may then be partly overwritten.
    pub fn reduce_pair(&mut self, span: &Span, left: &mut [u8], right: &[u8]) -> Result<(), Fault> {
        if left.len() != right.len() {
            let problem = format!("an operand of {} bytes does not reduce into {}", right.len(), left.len());
            return Err(self.refused(problem));
        }
        let bytes = left.len();
        self.reduce_in_pairs(span, 2, bytes, &mut Pair { left, right })
    }

    /// Reduces the values of one or more ranks pairwise, in rank order. Intermediate results stay in the plugin's
    /// memory: the values of each rank, and the result, are copied only once.
    ///
    /// # Errors
    /// [`Fault`]; some blocks of the result may have been written.
    pub fn reduce_in_pairs(
        &mut self,
        span: &Span,
        ranks: usize,
        bytes: usize,
        parts: &mut impl Operands,
    ) -> Result<(), Fault> {
        let shape = self.shape(span)?;
        self.attempt(|guest| {
            if shape != Shape::Pairwise || ranks == 0 {
                let problem = format!("a {} reducer does not reduce {ranks} ranks in pairs", shape.name());
                return Err(FaultKind::Refused(problem));
            }
            each_part(guest, span, (2, bytes), 0, |guest, call, part| {
                reduce_pairs_of_part(guest, call, ranks, part, parts)
            })
        })
    }

    /// Reduces operands of `bytes` bytes each, which are copied directly into the plugin's memory, block by block.
    ///
    /// # Errors
    /// [`Fault`]; some blocks of the result may have been written.
    pub fn reduce_parts(
        &mut self,
        span: &Span,
        ranks: usize,
        bytes: usize,
        measures: &[f64],
        parts: &mut impl Operands,
    ) -> Result<(), Fault> {
        let shape = self.shape(span)?;
        let ranks_max = if shape == Shape::Pairwise { 2 } else { self.plugin().manifest().limits.ranks };
        self.attempt(|guest| {
            check_ranks(shape, ranks, ranks_max)?;
            check_measures(shape, ranks, measures.len())?;
            each_part(guest, span, (ranks, bytes), measures.len() / ranks, |guest, call, part| {
                reduce_part(guest, call, measures, part, parts)
            })
        })
    }

    /// Measures one rank's values of a span and adds the result to `into`. The module determines where a long span is
    /// split, so equal values give equal sums.
    ///
    /// # Errors
    /// [`Fault`]; `into` may then contain a part of the sum.
    pub fn measure(&mut self, span: &Span, values: &[u8], into: &mut [f64]) -> Result<(), Fault> {
        let shape = self.shape(span)?;
        self.attempt(|guest| {
            if shape.measures() == 0 || into.len() != shape.measures() {
                let problem = format!("a {} reducer measures {} numbers", shape.name(), shape.measures());
                return Err(FaultKind::Refused(format!("{problem}, not {}", into.len())));
            }
            let size = span.dtype.size_bytes();
            let elements = elements(span.dtype, values.len())?;
            let step = guest.placement.input.len() / limits::BUFFER_ALIGN * limits::BUFFER_ALIGN / size;
            let mut begin = 0;
            while begin < elements {
                let count = step.min(elements - begin);
                let call = Call { measures: narrow(into.len()), ..span.call(Kind::Measure, begin, count)? };
                let (input, measures) = (guest.placement.input.clone(), guest.placement.measures.start);
                let measures = measures..measures + size_of_val(into);
                let memory = guest.memory();
                fill(memory, &input, &values[begin * size..(begin + count) * size]);
                memory[measures.clone()].fill(0);
                guest.measure(&call)?;
                for (sum, part) in into.iter_mut().zip(numbers(&guest.memory()[measures])) {
                    *sum += part;
                }
                begin += count;
            }
            Ok(())
        })
    }

    /// Converts the measures of all ranks into what the reduction needs. For a two-pass reducer these are the measures
    /// of each rank in turn. For an adaptive one, the inner products of all pairs (the upper triangle, row by row)
    /// become one weight for each rank.
    ///
    /// # Errors
    /// [`Fault`]; the measures are then unchanged.
    pub fn conclude(&mut self, span: &Span, ranks: usize, measures: &mut Vec<f64>) -> Result<(), Fault> {
        let shape = self.shape(span)?;
        let ranks_max = self.plugin().manifest().limits.ranks;
        self.attempt(|guest| {
            check_ranks(shape, ranks, ranks_max)?;
            let (given, left, each) = match shape {
                Shape::Pairwise | Shape::Nary => (0, 0, 0),
                Shape::TwoPass { measures } => (ranks * measures, ranks * measures, measures),
                Shape::Adaptive => (ranks * (ranks + 1) / 2, ranks, 1),
            };
            if measures.len() != given {
                let problem = format!("a {} reducer of {ranks} ranks concludes from {given} numbers", shape.name());
                return Err(FaultKind::Refused(format!("{problem}, not {}", measures.len())));
            }
            if given == 0 || !guest.concludes() {
                return Ok(());
            }
            let call = Call { ranks: narrow(ranks), measures: narrow(each), ..span.call(Kind::Conclude, 0, 0)? };
            put_numbers(guest, measures);
            guest.conclude(&call)?;
            let start = guest.placement.measures.start;
            measures.truncate(left);
            for (place, number) in measures.iter_mut().zip(numbers(&guest.memory()[start..start + left * NUMBER])) {
                *place = number;
            }
            Ok(())
        })
    }

    /// The shape of the reduction, if it supports the span's type.
    fn shape(&self, span: &Span) -> Result<Shape, Fault> {
        let shape = match &self.plugin().manifest().reducer {
            None => Err("it is a codec, not a reducer".to_owned()),
            Some(reducer) if !reducer.dtypes.contains(&span.dtype) => {
                Err(unsupported_dtype("reduces", span.dtype, &reducer.dtypes))
            }
            Some(reducer) => Ok(reducer.shape),
        };
        shape.map_err(|problem| self.refused(problem))
    }
}

/// Operands and a separate result.
struct Slices<'a> {
    operands: &'a [&'a [u8]],
    into: &'a mut [u8],
}

impl Operands for Slices<'_> {
    fn read(&mut self, operand: usize, part: Range<usize>, into: &mut [u8]) {
        copy(into, &self.operands[operand][part]);
    }

    fn write(&mut self, part: Range<usize>, result: &[u8]) {
        copy(&mut self.into[part], result);
    }
}

/// Two operands; the left one becomes the result.
struct Pair<'a> {
    left: &'a mut [u8],
    right: &'a [u8],
}

impl Operands for Pair<'_> {
    fn read(&mut self, operand: usize, part: Range<usize>, into: &mut [u8]) {
        copy(into, if operand == 0 { &self.left[part] } else { &self.right[part] });
    }

    fn write(&mut self, part: Range<usize>, result: &[u8]) {
        copy(&mut self.left[part], result);
    }
}

/// Calls `reduce` for each block of the operands, which have `bytes` bytes each.
fn each_part(
    guest: &mut Guest,
    span: &Span,
    (ranks, bytes): (usize, usize),
    measures: usize,
    mut reduce: impl FnMut(&mut Guest, &Call, Range<usize>) -> Result<(), FaultKind>,
) -> Result<(), FaultKind> {
    let size = span.dtype.size_bytes();
    let whole = span.call(Kind::Reduce, 0, elements(span.dtype, bytes)?)?;
    let whole = Call { ranks: narrow(ranks), measures: narrow(measures), ..whole };
    let (step, mut begin) = (step_bytes(guest, ranks) / size * size, 0);
    // Element sizes are powers of two.
    let elements = |bytes: usize| bytes >> size.trailing_zeros();
    while begin < bytes {
        let part = begin..bytes.min(begin + step);
        let call = Call {
            elements: narrow(elements(part.len())),
            offset: whole.offset + elements(begin) as u64,
            stride: narrow(padded(part.len())),
            ..whole
        };
        begin = part.end;
        reduce(guest, &call, part)?;
    }
    Ok(())
}

fn reduce_pairs_of_part(
    guest: &mut Guest,
    call: &Call,
    ranks: usize,
    part: Range<usize>,
    parts: &mut impl Operands,
) -> Result<(), FaultKind> {
    let (input, output) = (guest.placement.input.clone(), guest.placement.output.start);
    let (left, right, length) = (input.start, input.start + call.stride as usize, part.len());
    let mut fill = |rank: usize, place: usize, memory: &mut [u8]| {
        parts.read(rank, part.clone(), &mut memory[place..place + length]);
        clear_line(memory, &input, place + length);
    };
    if ranks == 1 {
        fill(0, left, guest.memory());
    } else {
        guest.reduce(call, |memory| {
            fill(0, left, memory);
            fill(1, right, memory);
        })?;
    }
    for rank in 2..ranks {
        guest.reduce(call, |memory| {
            // The intermediate result may be in place already.
            if output != left {
                memory.copy_within(output..output + length, left);
            }
            clear_line(memory, &input, left + length);
            fill(rank, right, memory);
        })?;
    }
    let reduced = if ranks == 1 { left } else { output };
    parts.write(part, &guest.memory()[reduced..reduced + length]);
    Ok(())
}

fn reduce_part(
    guest: &mut Guest,
    call: &Call,
    measures: &[f64],
    part: Range<usize>,
    parts: &mut impl Operands,
) -> Result<(), FaultKind> {
    let (input, output) = (guest.placement.input.clone(), guest.placement.output.start);
    let (stride, length) = (call.stride as usize, part.len());
    put_numbers(guest, measures);
    guest.reduce(call, |memory| {
        for operand in 0..call.ranks as usize {
            let start = input.start + operand * stride;
            parts.read(operand, part.clone(), &mut memory[start..start + length]);
            clear_line(memory, &input, start + length);
        }
    })?;
    parts.write(part, &guest.memory()[output..output + length]);
    Ok(())
}

/// Bytes of each operand in one call: what fits the buffers and the cache, in whole cache lines. Operands of several
/// pages start at different offsets of their pages; at equal offsets they would compete for the same cache sets.
fn step_bytes(guest: &Guest, ranks: usize) -> usize {
    let fits = (guest.placement.input.len() / ranks).min(guest.placement.output.len());
    let buffers = if guest.placement.reduces_in_place() { ranks } else { ranks + 1 };
    let near = (CACHED_BYTES / buffers).max(STEP_BYTES_MIN);
    let bytes = fits.min(near);
    match bytes.checked_sub(PAGE_BYTES + SKEW_BYTES) {
        Some(more) => more / PAGE_BYTES * PAGE_BYTES + PAGE_BYTES + SKEW_BYTES,
        None => (bytes / limits::BUFFER_ALIGN).max(1) * limits::BUFFER_ALIGN,
    }
}

/// Writes numbers into the block of measures. The check of the placement ensures that they fit.
fn put_numbers(guest: &mut Guest, values: &[f64]) {
    let start = guest.placement.measures.start;
    let block = &mut guest.memory()[start..start + size_of_val(values)];
    for (place, value) in block.chunks_exact_mut(NUMBER).zip(values) {
        place.copy_from_slice(&value.to_le_bytes());
    }
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = f64> {
    bytes.chunks_exact(NUMBER).map(|number| f64::from_le_bytes(number.try_into().expect("eight bytes")))
}

fn check_ranks(shape: Shape, ranks: usize, max: usize) -> Result<(), FaultKind> {
    let fits = if shape == Shape::Pairwise { ranks == 2 } else { (1..=max).contains(&ranks) };
    if fits {
        return Ok(());
    }
    let takes = if shape == Shape::Pairwise { "2".to_owned() } else { format!("1 to {max}") };
    Err(FaultKind::Refused(format!("it reduces the values of {takes} ranks at once, not of {ranks}")))
}

fn check_measures(shape: Shape, ranks: usize, given: usize) -> Result<(), FaultKind> {
    let wanted = match shape {
        Shape::Pairwise | Shape::Nary => 0,
        Shape::TwoPass { measures } => ranks * measures,
        Shape::Adaptive => ranks,
    };
    if given == wanted {
        return Ok(());
    }
    Err(FaultKind::Refused(format!("a {} reducer of {ranks} ranks sees {wanted} numbers, not {given}", shape.name())))
}

/// Converts a number that is known to fit, because it is at most the size of the plugin's memory.
fn narrow(number: usize) -> u32 {
    u32::try_from(number).expect("no plugin has 4 GiB of memory")
}

/// Bytes of a measure.
const NUMBER: usize = size_of::<f64>();
/// Bytes of operands and result in one call. With the copies' sources they fit a first-level cache of 32 KiB.
/// plugins/text-sum sums two operands of 1 MiB at 11.1 GB/s with this value, at 10.8 with 20 KiB, and at 10.4 with 26
/// KiB (AMD EPYC, Zen 3).
const CACHED_BYTES: usize = 16 << 10;
/// The granularity at which the processor compares addresses first.
const PAGE_BYTES: usize = 4 << 10;
/// Offset between the operands within their pages: an odd number of cache lines, so that many operands use all cache
/// sets, and about half a page, so that the bytes copied last do not share sets with the first values read.
const SKEW_BYTES: usize = 29 * limits::BUFFER_ALIGN;
/// Least bytes of each operand in one call of many ranks, to bound the overhead per call.
const STEP_BYTES_MIN: usize = 1 << 10;
