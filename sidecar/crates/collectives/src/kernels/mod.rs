//! Arithmetic on private blocks of little-endian bytes.
//!
//! Everything is safe code on unaligned `&[u8]` that the compiler vectorises, for the processor at hand through pulp.
//! Results do not depend on how it does so:
//! no fused multiply-add, NaN results are canonical (quiet, positive, no payload), minimum and maximum are those of IEEE
//! 754-2019 (NaN wins, -0 is less than +0). f16 and bf16 are computed in f32 and rounded once to nearest, ties to even.
//! Integers wrap. Booleans are bytes that are zero or not: sum and maximum are *or*, product and minimum *and*. Bitwise
//! operations are for integers and booleans; a boolean is one bit.
//!
//! Scaling follows Horovod: integers are multiplied as f64 and truncated toward zero, saturating; f64 in f64; f32 is
//! multiplied in f64 and rounded once to f32, so an average is not rounded by an inexact `1 / size` in f32 first; f16 and
//! bf16 go through f32 in the same way. A factor of 1 leaves every value alone. The average of integers is the integer
//! quotient of the sum, truncated toward zero, exactly; with another postscale it is the sum times `postscale / ranks`,
//! truncated once.

mod block;
mod codec;
mod element;
mod float;
mod integer;
mod measure;
mod nary;
mod partial;
mod sample;
mod weights;

use std::marker::PhantomData;

use ronde_wire::{Codec, DType, ReduceOp};

pub use block::{BLOCK_BYTES_MAX, BlockReducer};
pub use codec::{decode, encode};
use element::{Bits, Element, with_element};
use integer::Truth;
pub use measure::{add_products, add_sum_of_squares};
pub use nary::reduce_n;
pub use partial::PartialSums;
pub use weights::weights;

/// What cannot be computed. Requests are checked with [`supports`] when they come, so these are bugs of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The operation has no meaning for the type, or is of the other kind: [`is_nary`] tells which.
    #[error("this kernel has no {op} of {dtype}; refuse it when it is requested, or take the one for its kind")]
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
    /// An average over no ranks, or a reduction of no operands.
    #[error("an average and an n-ary reduction need at least one rank")]
    NoRanks,
    /// The codec does not encode elements of the type.
    #[error("codec {codec} does not encode {dtype}; refuse it when it is requested")]
    Codec {
        /// The codec.
        codec: Codec,
        /// The type.
        dtype: DType,
    },
    /// A buffer of encoded elements has another length than that of the values.
    #[error("{codec} encodes the values in {expected} bytes, not in {given}")]
    Encoded {
        /// The codec.
        codec: Codec,
        /// Bytes that the values take.
        expected: usize,
        /// Bytes of the buffer.
        given: usize,
    },
    /// The operation is not a weighted sum.
    #[error("{op} has no weights; ask for those of clipped-mean and adasum only")]
    NoWeights {
        /// The operation.
        op: ReduceOp,
    },
    /// An n-ary reduction has the wrong number of weights.
    #[error("{op} of these operands takes {needed} weights, not {given}")]
    Weights {
        /// The operation.
        op: ReduceOp,
        /// How many it takes.
        needed: usize,
        /// How many there are.
        given: usize,
    },
    /// There is a wrong number of measures.
    #[error("{op} over {ranks} ranks measures {needed} numbers, not {given}")]
    Measures {
        /// The operation.
        op: ReduceOp,
        /// How many ranks there are.
        ranks: usize,
        /// How many numbers that takes.
        needed: usize,
        /// How many there are.
        given: usize,
    },
}

/// Which operand the accumulator is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// `accumulator = op(accumulator, other)`.
    AccumulatorLeft,
    /// `accumulator = op(other, accumulator)`.
    AccumulatorRight,
}

/// Whether elements of the type can be reduced by the operation, elementwise or, where [`is_nary`], all ranks at once:
///
/// | type | sum, product, min, max | average | median, clipped-mean, adasum | bit-and, bit-or, bit-xor |
/// |---|---|---|---|---|
/// | uint8 int8 uint16 int16 int32 int64 | yes | yes, truncated toward zero | no | yes |
/// | float16 bfloat16 float32 float64 | yes | yes | yes | no |
/// | bool | yes: or, and, and, or | no | no | yes, of one bit |
///
/// What is not supported is refused by every kernel: "this kernel has no average of bool", and so on.
#[must_use]
pub fn supports(dtype: DType, op: ReduceOp) -> bool {
    if is_nary(op) { dtype.is_float() } else { elementwise(dtype, op).is_ok() }
}

/// Whether the operation needs all ranks' values at once, so that nothing can be reduced pair by pair: it is computed by
/// [`reduce_n`], by no [`BlockReducer`] and not by [`reduce_into`].
#[must_use]
pub const fn is_nary(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::Median | ReduceOp::ClippedMean | ReduceOp::Adasum)
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
    let elementwise = elementwise(dtype, op)?;
    check_length(dtype, accumulator.len())?;
    check_lengths(accumulator.len(), other.len())?;
    match elementwise {
        Elementwise::Arithmetic(combination) => {
            with_element!(dtype, op, E => combine::<E>(combination, accumulator, other, side));
        }
        Elementwise::Bitwise(bitwise) if dtype == DType::Bool => {
            combine_bits::<Truth>(bitwise, accumulator, other, side);
        }
        Elementwise::Bitwise(bitwise) => combine_bits::<u8>(bitwise, accumulator, other, side),
    }
    Ok(())
}

/// Multiplies every element; the rules are in the module's header. A factor of 1 changes nothing.
///
/// # Errors
/// [`KernelError::Length`] when the buffer does not hold whole elements.
pub fn scale(dtype: DType, factor: f64, bytes: &mut [u8]) -> Result<(), KernelError> {
    check_length(dtype, bytes.len())?;
    #[allow(clippy::cast_possible_truncation, reason = "whether it is exact is looked at next")]
    let single = factor as f32;
    if factor == 1.0 {
        return Ok(());
    }
    if f64::from(single) == factor {
        with_element!(dtype, ReduceOp::Sum, E => vectorised(|| E::map(bytes, |value| value.scale_single(single))));
    } else {
        with_element!(dtype, ReduceOp::Sum, E => vectorised(|| E::map(bytes, |value| value.scale(factor))));
    }
    Ok(())
}

/// What a complete reduction over `ranks` ranks becomes: an average is divided, then everything is scaled.
///
/// Averages are multiplied by `postscale / ranks` once; integer ones are divided exactly when there is no postscale.
/// N-ary reductions are only scaled.
///
/// # Errors
/// [`KernelError`] when the type does not have the operation, the buffer does not hold whole elements, or an average has
/// no ranks.
pub fn finish(dtype: DType, op: ReduceOp, ranks: u32, postscale: f64, bytes: &mut [u8]) -> Result<(), KernelError> {
    if !supports(dtype, op) {
        return Err(KernelError::Operation { dtype, op });
    }
    if op != ReduceOp::Average {
        return scale(dtype, postscale, bytes);
    }
    if ranks == 0 {
        return Err(KernelError::NoRanks);
    }
    if dtype.is_float() || postscale != 1.0 {
        return scale(dtype, postscale / f64::from(ranks), bytes);
    }
    check_length(dtype, bytes.len())?;
    with_element!(dtype, op, E => E::map(bytes, |value| value.quotient(ranks)));
    Ok(())
}

/// How two elements become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Elementwise {
    Arithmetic(Combination),
    /// On the bits of integers and booleans.
    Bitwise(Bitwise),
}

/// The elementwise functions of every type behind the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Combination {
    Sum,
    Product,
    Minimum,
    Maximum,
}

/// The bitwise functions behind the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bitwise {
    And,
    Or,
    Xor,
}

fn elementwise(dtype: DType, op: ReduceOp) -> Result<Elementwise, KernelError> {
    let arithmetic = |combination| Ok(Elementwise::Arithmetic(combination));
    let bitwise = |bitwise| Ok(Elementwise::Bitwise(bitwise));
    match op {
        ReduceOp::Average if dtype == DType::Bool => Err(KernelError::Operation { dtype, op }),
        ReduceOp::Average | ReduceOp::Sum => arithmetic(Combination::Sum),
        ReduceOp::Product => arithmetic(Combination::Product),
        ReduceOp::Min => arithmetic(Combination::Minimum),
        ReduceOp::Max => arithmetic(Combination::Maximum),
        ReduceOp::BitAnd if !dtype.is_float() => bitwise(Bitwise::And),
        ReduceOp::BitOr if !dtype.is_float() => bitwise(Bitwise::Or),
        ReduceOp::BitXor if !dtype.is_float() => bitwise(Bitwise::Xor),
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

fn combine_bits<E: Bits>(bitwise: Bitwise, accumulator: &mut [u8], other: &[u8], side: Side) {
    match bitwise {
        Bitwise::And => zip(accumulator, other, side, E::bit_and),
        Bitwise::Or => zip(accumulator, other, side, E::bit_or),
        Bitwise::Xor => zip(accumulator, other, side, E::bit_xor),
    }
}

fn zip<E: Element>(accumulator: &mut [u8], other: &[u8], side: Side, f: impl Fn(E, E) -> E) {
    let dispatch = pulp::Arch::new();
    match side {
        Side::AccumulatorLeft => dispatch.dispatch(Zip::<E, _> { accumulator, other, f, element: PhantomData }),
        Side::AccumulatorRight => {
            let f = |a, b| f(b, a);
            dispatch.dispatch(Zip::<E, _> { accumulator, other, f, element: PhantomData });
        }
    }
}

/// The loop over two buffers as a type, because a closure of its size is not inlined into what pulp compiles.
struct Zip<'a, E, F> {
    accumulator: &'a mut [u8],
    other: &'a [u8],
    f: F,
    element: PhantomData<fn(E) -> E>,
}

impl<E: Element, F: Fn(E, E) -> E> pulp::WithSimd for Zip<'_, E, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        E::zip(self.accumulator, self.other, self.f);
    }
}

/// Runs a loop that is inlined here as it is compiled for the widest vectors of this processor. The instructions do not
/// change what is computed: Rust never fuses or reorders floating-point arithmetic.
fn vectorised(work: impl FnOnce()) {
    pulp::Arch::new().dispatch(work);
}

fn check_lengths(accumulator: usize, other: usize) -> Result<(), KernelError> {
    if accumulator == other { Ok(()) } else { Err(KernelError::Lengths { accumulator, other }) }
}

fn check_length(dtype: DType, bytes: usize) -> Result<(), KernelError> {
    if bytes.is_multiple_of(dtype.size_bytes()) { Ok(()) } else { Err(KernelError::Length { dtype, bytes }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudo-random bits, every eighth byte pair a zero, a denormal, an infinity or a NaN of f16, bf16 or f32.
    pub(super) fn block(seed: u32) -> Vec<u8> {
        let special = [0x0000, 0x8000, 0x0001, 0x8001, 0x7c00, 0xfc00, 0x7e01, 0x7f80, 0xff80, 0x7fc1, 0xffff, 0x03ff];
        let mut state = seed;
        let mut halves = Vec::new();
        for index in 0..BLOCK_BYTES_MAX / 2 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let [_, _, low, high] = state.to_le_bytes();
            let random = u16::from_le_bytes([low, high]);
            halves.push(if index % 8 == 0 { special[usize::from(random) % special.len()] } else { random });
        }
        halves.into_iter().flat_map(u16::to_le_bytes).collect()
    }

    fn plain<E: Element>(combination: Combination, accumulator: &mut [u8], other: &[u8]) {
        match combination {
            Combination::Sum => E::zip(accumulator, other, E::sum),
            Combination::Product => E::zip(accumulator, other, E::product),
            Combination::Minimum => E::zip(accumulator, other, E::least),
            Combination::Maximum => E::zip(accumulator, other, E::greatest),
        }
    }

    /// The baseline's instructions, the widest ones of this processor, and one element at a time.
    #[test]
    fn dispatch_variants_are_bit_identical() -> Result<(), KernelError> {
        for dtype in DType::ALL {
            for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
                let (left, right) = (block(1), block(2));
                let (mut dispatched, mut baseline, mut single) = (left.clone(), left.clone(), left.clone());
                reduce_into(dtype, op, &mut dispatched, &right, Side::AccumulatorLeft)?;
                let Elementwise::Arithmetic(combination) = elementwise(dtype, op)? else { continue };
                with_element!(dtype, op, E => plain::<E>(combination, &mut baseline, &right));
                let elements = single.chunks_mut(dtype.size_bytes()).zip(right.chunks(dtype.size_bytes()));
                for (a, b) in elements {
                    reduce_into(dtype, op, a, b, Side::AccumulatorLeft)?;
                }
                assert!(dispatched == baseline && dispatched == single, "{dtype} {op}");
                // Those that f32 holds take another way than others, to the same bits.
                for factor in [0.3, 0.5, -3.0, 2_f64.powi(-149), 2_f64.powi(127)] {
                    let (mut dispatched, mut baseline) = (dispatched.clone(), baseline.clone());
                    finish(dtype, ReduceOp::Sum, 3, factor, &mut dispatched)?;
                    with_element!(dtype, op, E => E::map(&mut baseline, |value| value.scale(factor)));
                    assert!(dispatched == baseline, "{dtype} {op} scaled by {factor}");
                }
            }
        }
        Ok(())
    }
}
