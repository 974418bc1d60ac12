//! Elements as a codec writes them: f32 as f16 or bf16, rounded once to nearest, ties to even. What is beyond the narrow
//! type's range becomes infinity; NaN becomes canonical both ways.

use std::marker::PhantomData;

use ronde_wire::{Codec, DType};

use super::float::{Brain, Half, Narrow};
use super::sample::Wide;
use super::{KernelError, check_length};

/// Writes values as the codec encodes them.
///
/// `into` has [`Codec::encoded_bytes`] for each element of `values`.
///
/// # Errors
/// [`KernelError`] when the codec does not encode this type, or the lengths do not fit; `into` is unchanged then.
///
/// ```
/// use ronde_collectives::kernels::{decode, encode};
/// use ronde_wire::{Codec, DType};
///
/// let (mut encoded, mut decoded) = ([0; 2], [0; 4]);
/// encode(Codec::Bf16, DType::F32, &1.001_f32.to_le_bytes(), &mut encoded)?;
/// decode(Codec::Bf16, DType::F32, &encoded, &mut decoded)?;
/// assert_eq!(f32::from_le_bytes(decoded), 1.0);
/// # Ok::<(), ronde_collectives::kernels::KernelError>(())
/// ```
pub fn encode(codec: Codec, dtype: DType, values: &[u8], into: &mut [u8]) -> Result<(), KernelError> {
    check(codec, dtype, values, into)?;
    let dispatch = pulp::Arch::new();
    match codec {
        Codec::F16 => dispatch.dispatch(Encode::<Half> { values, into, codec: PhantomData }),
        Codec::Bf16 => dispatch.dispatch(Encode::<Brain> { values, into, codec: PhantomData }),
        _ => return Err(KernelError::Codec { codec, dtype }),
    }
    Ok(())
}

/// The values that [`encode`] wrote, as far as the encoding holds them.
///
/// # Errors
/// [`KernelError`] when the codec does not encode this type, or the lengths do not fit; `into` is unchanged then.
pub fn decode(codec: Codec, dtype: DType, encoded: &[u8], into: &mut [u8]) -> Result<(), KernelError> {
    check(codec, dtype, into, encoded)?;
    let dispatch = pulp::Arch::new();
    match codec {
        Codec::F16 => dispatch.dispatch(Decode::<Half> { encoded, into, codec: PhantomData }),
        Codec::Bf16 => dispatch.dispatch(Decode::<Brain> { encoded, into, codec: PhantomData }),
        _ => return Err(KernelError::Codec { codec, dtype }),
    }
    Ok(())
}

fn check(codec: Codec, dtype: DType, values: &[u8], encoded: &[u8]) -> Result<(), KernelError> {
    let encoded_bytes = match codec.encoded_bytes(dtype) {
        Some(encoded_bytes) if codec != Codec::None => encoded_bytes,
        _ => return Err(KernelError::Codec { codec, dtype }),
    };
    check_length(dtype, values.len())?;
    let expected = values.len() / dtype.size_bytes() * encoded_bytes;
    if encoded.len() == expected { Ok(()) } else { Err(KernelError::Encoded { codec, expected, given: encoded.len() }) }
}

struct Encode<'a, N> {
    values: &'a [u8],
    into: &'a mut [u8],
    codec: PhantomData<N>,
}

impl<N: Narrow> pulp::WithSimd for Encode<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        for (value, encoded) in self.values.as_chunks::<4>().0.iter().zip(self.into.as_chunks_mut::<2>().0) {
            *encoded = N::from_f32(f32::from_le_bytes(*value)).to_le_bytes();
        }
    }
}

struct Decode<'a, N> {
    encoded: &'a [u8],
    into: &'a mut [u8],
    codec: PhantomData<N>,
}

impl<N: Narrow> pulp::WithSimd for Decode<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        for (encoded, value) in self.encoded.as_chunks::<2>().0.iter().zip(self.into.as_chunks_mut::<4>().0) {
            let wide = N::to_f32(u16::from_le_bytes(*encoded));
            *value = (if wide.is_nan() { f32::nan() } else { wide }).to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use pulp::WithSimd;

    use super::super::tests::block;
    use super::*;

    /// The baseline's instructions, the widest ones of this processor, and one element at a time.
    #[test]
    fn dispatch_variants_are_bit_identical() -> Result<(), KernelError> {
        let values = block(3);
        for codec in [Codec::F16, Codec::Bf16] {
            let (mut encoded, mut baseline) = (vec![0; values.len() / 2], vec![0; values.len() / 2]);
            encode(codec, DType::F32, &values, &mut encoded)?;
            let mut decoded = vec![0; 2 * values.len()];
            decode(codec, DType::F32, &values, &mut decoded)?;
            let mut baseline_decoded = decoded.clone();
            if codec == Codec::F16 {
                Encode::<Half> { values: &values, into: &mut baseline, codec: PhantomData }.with_simd(pulp::Scalar);
                Decode::<Half> { encoded: &values, into: &mut baseline_decoded, codec: PhantomData }
                    .with_simd(pulp::Scalar);
            } else {
                Encode::<Brain> { values: &values, into: &mut baseline, codec: PhantomData }.with_simd(pulp::Scalar);
                Decode::<Brain> { encoded: &values, into: &mut baseline_decoded, codec: PhantomData }
                    .with_simd(pulp::Scalar);
            }
            assert!(encoded == baseline && decoded == baseline_decoded, "{codec}");
            for (value, encoded) in values.chunks(4).zip(encoded.chunks(2)) {
                let mut single = [0; 2];
                encode(codec, DType::F32, value, &mut single)?;
                assert_eq!(single, encoded, "{codec} of {value:x?}");
            }
        }
        Ok(())
    }
}
