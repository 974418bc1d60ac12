//! Arithmetic on private blocks of little-endian bytes.
//!
//! Everything is safe code on unaligned `&[u8]` that the compiler vectorises. Results do not depend on how it does so:
//! no fused multiply-add, NaN results are canonical (quiet, positive, no payload), minimum and maximum are those of IEEE
//! 754-2019 (NaN wins, -0 is less than +0). f16 and bf16 are computed in f32 and rounded once to nearest, ties to even.
//! Integers wrap. Booleans are bytes that are zero or not: sum and maximum are *or*, product and minimum *and*.
//!
//! Scaling follows Horovod: integers are multiplied as f64 and truncated toward zero, saturating; f64 in f64; f32 is
//! multiplied in f64 and rounded once to f32, so an average is not rounded by an inexact `1 / size` in f32 first; f16 and
//! bf16 go through f32 in the same way. A factor of 1 leaves every value alone. The average of integers is the integer
//! quotient of the sum, truncated toward zero, exactly, and only then scaled.

mod block;
mod element;
mod float;
mod integer;

use ronde_wire::{DType, ReduceOp};

pub use block::{BLOCK_BYTES_MAX, BlockReducer};
use element::{Element, with_element};

/// What cannot be computed. Requests are checked with [`supports`] when they come, so these are bugs of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The operation is not elementwise, or has no meaning for the type.
    #[error("{op} of {dtype} is not an elementwise operation; refuse it when it is requested")]
    Operation {
        /// The type.
        dtype: DType,
        /// The operation.
        op: ReduceOp,
    },
    /// A buffer does not hold whole elements.
    #[error("{bytes} bytes are not a whole number of {dtype} elements")]
    Length {
        /// The type.
        dtype: DType,
        /// The length of the buffer.
        bytes: usize,
    },
    /// Two buffers that are combined have different lengths.
    #[error("a block of {other} bytes does not combine with one of {accumulator}")]
    Lengths {
        /// The length of the buffer with the result.
        accumulator: usize,
        /// The length of the other one.
        other: usize,
    },
    /// A block is larger than [`BLOCK_BYTES_MAX`].
    #[error("a block has up to {BLOCK_BYTES_MAX} bytes, not {bytes}")]
    Block {
        /// Its length.
        bytes: usize,
    },
    /// An average over no ranks.
    #[error("an average needs at least one rank")]
    NoRanks,
}

/// Which operand the accumulator is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// `accumulator = op(accumulator, other)`.
    AccumulatorLeft,
    /// `accumulator = op(other, accumulator)`.
    AccumulatorRight,
}

/// Whether elements of the type can be reduced by the operation: everything but Adasum and the average of booleans.
#[must_use]
pub fn supports(dtype: DType, op: ReduceOp) -> bool {
    combination(dtype, op).is_ok()
}

/// Reduces `other` into `accumulator`, element by element. An average reduces as a sum; [`finish`] divides.
///
/// # Errors
/// [`KernelError`] when the operation is not elementwise or the lengths do not fit; the accumulator is unchanged then.
pub fn reduce_into(
    dtype: DType,
    op: ReduceOp,
    accumulator: &mut [u8],
    other: &[u8],
    side: Side,
) -> Result<(), KernelError> {
    let combination = combination(dtype, op)?;
    check_length(dtype, accumulator.len())?;
    if accumulator.len() != other.len() {
        return Err(KernelError::Lengths { accumulator: accumulator.len(), other: other.len() });
    }
    with_element!(dtype, op, E => combine::<E>(combination, accumulator, other, side));
    Ok(())
}

/// Multiplies every element; the rules are in the module's header. A factor of 1 changes nothing.
///
/// # Errors
/// [`KernelError::Length`] when the buffer does not hold whole elements.
pub fn scale(dtype: DType, factor: f64, bytes: &mut [u8]) -> Result<(), KernelError> {
    check_length(dtype, bytes.len())?;
    if factor != 1.0 {
        with_element!(dtype, ReduceOp::Sum, E => E::map(bytes, |value| value.scale(factor)));
    }
    Ok(())
}

/// What a complete reduction over `ranks` ranks becomes: an average is divided, then everything is scaled.
///
/// Floating-point averages are multiplied by `postscale / ranks` once; integer ones are divided exactly, then scaled.
///
/// # Errors
/// [`KernelError`] when the operation is not elementwise, the buffer does not hold whole elements, or an average has no
/// ranks.
pub fn finish(dtype: DType, op: ReduceOp, ranks: u32, postscale: f64, bytes: &mut [u8]) -> Result<(), KernelError> {
    combination(dtype, op)?;
    if op != ReduceOp::Average {
        return scale(dtype, postscale, bytes);
    }
    if ranks == 0 {
        return Err(KernelError::NoRanks);
    }
    if dtype.is_float() {
        return scale(dtype, postscale / f64::from(ranks), bytes);
    }
    check_length(dtype, bytes.len())?;
    with_element!(dtype, op, E => E::map(bytes, |value| value.quotient(ranks)));
    scale(dtype, postscale, bytes)
}

/// The elementwise functions behind the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Combination {
    Sum,
    Product,
    Minimum,
    Maximum,
}

fn combination(dtype: DType, op: ReduceOp) -> Result<Combination, KernelError> {
    match op {
        ReduceOp::Average if dtype == DType::Bool => Err(KernelError::Operation { dtype, op }),
        ReduceOp::Average | ReduceOp::Sum => Ok(Combination::Sum),
        ReduceOp::Product => Ok(Combination::Product),
        ReduceOp::Min => Ok(Combination::Minimum),
        ReduceOp::Max => Ok(Combination::Maximum),
        _ => Err(KernelError::Operation { dtype, op }),
    }
}

/// One loop for each combination and side: the branches are outside of the loops.
fn combine<E: Element>(combination: Combination, accumulator: &mut [u8], other: &[u8], side: Side) {
    match combination {
        Combination::Sum => zip(accumulator, other, side, E::sum),
        Combination::Product => zip(accumulator, other, side, E::product),
        Combination::Minimum => zip(accumulator, other, side, E::least),
        Combination::Maximum => zip(accumulator, other, side, E::greatest),
    }
}

fn zip<E: Element>(accumulator: &mut [u8], other: &[u8], side: Side, f: impl Fn(E, E) -> E) {
    match side {
        Side::AccumulatorLeft => E::zip(accumulator, other, f),
        Side::AccumulatorRight => E::zip(accumulator, other, |a, b| f(b, a)),
    }
}

fn check_length(dtype: DType, bytes: usize) -> Result<(), KernelError> {
    if bytes.is_multiple_of(dtype.size_bytes()) { Ok(()) } else { Err(KernelError::Length { dtype, bytes }) }
}
