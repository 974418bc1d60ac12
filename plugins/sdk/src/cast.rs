//! A codec that converts float32 to a 16-bit floating-point type and back.

use core::fmt;
use core::marker::PhantomData;

use crate::Error;
use crate::element::{Bf16, F16, Float};
use crate::lanes::zip;
use crate::plugin::{Codec, CodecFor, Plugin, Span};

/// A floating-point type of 16 bits.
pub trait Half: Float<Wide = f32> {
    /// The value with these bits.
    fn from_bits(bits: u16) -> Self;
    /// The bits of the value.
    fn to_bits(self) -> u16;
}

impl Half for F16 {
    #[inline(always)]
    fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    #[inline(always)]
    fn to_bits(self) -> u16 {
        self.0
    }
}

impl Half for Bf16 {
    #[inline(always)]
    fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    #[inline(always)]
    fn to_bits(self) -> u16 {
        self.0
    }
}

/// Encodes each float32 as an `H`, little-endian, rounded once to nearest, ties to even. `P` are the plugin's parameters,
/// of which there are none; [`export_cast!`](crate::export_cast!) fills both in.
pub struct Cast<H, P>(PhantomData<(H, P)>);

impl<H, P> Cast<H, P> {
    /// Creates the codec.
    #[must_use]
    pub const fn create() -> Self {
        Self(PhantomData)
    }
}

impl<H, P> fmt::Debug for Cast<H, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cast")
    }
}

impl<H, P> Plugin for Cast<H, P> {
    type Parameters = P;

    fn new(_: &P) -> Result<Self, Error> {
        Ok(Self::create())
    }
}

impl<H, P> Codec for Cast<H, P> {
    type State = ();

    fn bound(&self, elements: usize) -> usize {
        HALF_BYTES * elements
    }
}

impl<H: Half, P> CodecFor<f32> for Cast<H, P> {
    fn encode(&mut self, _: &Span, values: &[f32], _: &mut [()], encoded: &mut [u8]) -> Result<usize, Error> {
        let halves = encoded.as_chunks_mut::<HALF_BYTES>().0;
        zip(halves, values, |bytes, value| *bytes = H::narrow(value).to_bits().to_le_bytes());
        Ok(HALF_BYTES * values.len())
    }

    fn decode(&mut self, _: &Span, encoded: &[u8], values: &mut [f32]) -> Result<(), Error> {
        if encoded.len() != HALF_BYTES * values.len() {
            return Err(Error::malformed("a cast to 16 bits takes 2 bytes for each element"));
        }
        zip(values, encoded.as_chunks().0, |value, bytes| *value = H::from_bits(u16::from_le_bytes(bytes)).widen());
        Ok(())
    }
}

const HALF_BYTES: usize = size_of::<u16>();

/// Makes a WebAssembly module of [`Cast`] to one of the 16-bit types, with the manifest and buffers that all casts have.
///
/// ```
/// ronde_plugin::export_cast! { name: "half", about: "Values as IEEE binary16.", to: F16 }
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! export_cast {
    (name: $name:literal, about: $about:literal, to: $half:ident $(,)?) => {
        /// The codec of this plugin.
        pub type Cast = $crate::cast::Cast<$crate::$half, Settings>;

        $crate::export! {
            name: $name,
            about: $about,
            codec: Cast { dtypes: [float32], state_bytes: 0, lossless: false, elementwise: true },
            parameters: Settings {},
            limits: { memory_bytes: 327680, call_ms: 20, ranks: 256 },
            buffers: { input: 65536, output: 65536, state: 0, measures: 0 },
        }
    };
}
