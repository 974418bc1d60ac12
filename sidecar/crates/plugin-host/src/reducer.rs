//! Calls of reducers.

use std::ops::Range;

use ronde_plugin_abi::{Call, Kind, limits, padded};

use crate::copying::copy;
use crate::error::{Fault, FaultKind};
use crate::guest::Guest;
use crate::instance::{Instance, Span, clear_line, elements, fill, unsupported_dtype};
use crate::manifest::Shape;

/// What is reduced and where it goes, span by span.
pub trait Operands {
    /// Copies a part of an operand, given in bytes.
    fn read(&mut self, operand: usize, part: Range<usize>, into: &mut [u8]);
    /// Takes a part of the result. Parts come in order, each after that part of all operands was read.
    fn write(&mut self, part: Range<usize>, result: &[u8]);
}

impl Instance {
    /// Reduces all ranks' values of a span, in the order of ranks. The result depends on neither how many calls that takes
    /// nor where they are cut, as reducers work element by element.
    ///
    /// `measures` are what [`Self::conclude`] left, for shapes that measure; otherwise there are none.
    ///
    /// # Errors
    /// [`Fault`]; `into` is then partly written.
    pub fn reduce(&mut self, span: &Span, operands: &[&[u8]], measures: &[f64], into: &mut [u8]) -> Result<(), Fault> {
        self.check_lengths(operands, into)?;
        let bytes = into.len();
        self.reduce_parts(span, operands.len(), bytes, measures, &mut Slices { operands, into })
    }

    /// Reduces all ranks' values of a span in pairs, in the order of ranks: what a reducer of pairs does whose order counts.
    ///
    /// # Errors
    /// [`Fault`]; `into` is then partly written.
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

    /// Reduces two ranks' values into the left, that is the lower, one.
    ///
    /// # Errors
    /// [`Fault`]; `left` is then partly overwritten.
    pub fn reduce_pair(&mut self, span: &Span, left: &mut [u8], right: &[u8]) -> Result<(), Fault> {
        if left.len() != right.len() {
            let problem = format!("an operand of {} bytes does not reduce into {}", right.len(), left.len());
            return Err(self.refused(problem));
        }
        let bytes = left.len();
        self.reduce_in_pairs(span, 2, bytes, &mut Pair { left, right })
    }

    /// Reduces the values of one rank or more in pairs, in the order of ranks. What has been reduced stays in the plugin's
    /// memory until it is done: each rank's values are copied once, and the result is.
    ///
    /// # Errors
    /// [`Fault`]; some parts of the result may have been written then.
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

    /// Reduces operands of so many bytes each that are copied straight into the plugin's memory, part by part.
    ///
    /// # Errors
    /// [`Fault`]; some parts of the result may have been written then.
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

    /// Measures one rank's values of a span and adds the result to `into`. Where a long span is cut follows from the module,
    /// so that equal values give equal sums.
    ///
    /// # Errors
    /// [`Fault`]; `into` may have grown by a part then.
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

    /// Turns what was measured of all ranks into what the reduction wants to see. Of a two-pass reducer that is each rank's
    /// measures one after the other; of an adaptive one the inner products of all pairs, the upper triangle row by row,
    /// become one weight for each rank.
    ///
    /// # Errors
    /// [`Fault`]; the measures are then as they were.
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

    /// The shape of its reduction, if it reduces the span's type.
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

/// Operands that lie somewhere else than the result.
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

/// Two operands of which the left one becomes the result.
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

/// Does something with each part of operands of so many bytes each, and the call for it.
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
    // Sizes of elements are powers of two.
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
            // What has been reduced may lie there already.
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

/// Bytes of each operand in one call: what fits the buffers and stays in the cache, in whole lines. Operands of some pages
/// do not lie at the same place of their pages, as they would be taken for each other by the first cache.
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

/// Writes numbers into the block of measures; that they fit was checked when the plugin was placed.
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

/// A number that is known to fit: at most bytes of the plugin's memory.
fn narrow(number: usize) -> u32 {
    u32::try_from(number).expect("no plugin has 4 GiB of memory")
}

/// Bytes of a measure.
const NUMBER: usize = size_of::<f64>();
/// Bytes of operands and result in one call: they and what they are copied from fit the first cache of 32 KiB. plugins/text-sum
/// sums two operands of 1 MiB at 11.1 GB/s so, at 10.8 with 20 KiB and at 10.4 with 26 (AMD EPYC, Zen 3).
const CACHED_BYTES: usize = 16 << 10;
/// What the processor compares addresses by first.
const PAGE_BYTES: usize = 4 << 10;
/// How far the next operand lies behind in its page: an odd number of lines, so that many operands use all of the cache, and
/// not far from half a page, so that what was copied last does not lie where the first values are read.
const SKEW_BYTES: usize = 29 * limits::BUFFER_ALIGN;
/// Bytes of each operand in one call of many ranks, so that loops stay longer than what is around them.
const STEP_BYTES_MIN: usize = 1 << 10;
