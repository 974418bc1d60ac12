//! Codecs and reducers for ronde as WebAssembly plugins, in safe Rust.
//!
//! A plugin implements [`Plugin`] and, for each element type that it takes, [`CodecFor`] or [`ReducerFor`];
//! [`export!`](crate::export!) makes a module of it. The logic is plain Rust on slices, so its tests run natively, with
//! `cargo test` and the helpers of [`testing`]. docs/PLUGINS.md starts with a plugin that is written, built, tested and used.
//!
//! ```
//! use ronde_plugin::{Codec, CodecFor, Error, Plugin, Span};
//!
//! /// Sends the upper half of the bits of each value.
//! struct Cut;
//!
//! impl Plugin for Cut {
//!     type Parameters = Settings;
//!
//!     fn new(_: &Settings) -> Result<Self, Error> {
//!         Ok(Self)
//!     }
//! }
//!
//! impl Codec for Cut {
//!     type State = ();
//!
//!     fn bound(&self, elements: usize) -> usize {
//!         2 * elements
//!     }
//! }
//!
//! impl CodecFor<f32> for Cut {
//!     fn encode(&mut self, _: &Span, values: &[f32], _: &mut [()], encoded: &mut [u8]) -> Result<usize, Error> {
//!         for (value, bytes) in values.iter().zip(encoded.as_chunks_mut::<2>().0) {
//!             *bytes = ((value.to_bits() >> 16) as u16).to_le_bytes();
//!         }
//!         Ok(2 * values.len())
//!     }
//!
//!     fn decode(&mut self, _: &Span, encoded: &[u8], values: &mut [f32]) -> Result<(), Error> {
//!         let halves = encoded.as_chunks::<2>().0;
//!         if encoded.len() != 2 * values.len() {
//!             return Err(Error::malformed("two bytes for each value"));
//!         }
//!         for (bytes, value) in halves.iter().zip(values) {
//!             *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
//!         }
//!         Ok(())
//!     }
//! }
//!
//! ronde_plugin::export! {
//!     name: "cut",
//!     about: "The upper half of each value.",
//!     codec: Cut { dtypes: [float32], state_bytes: 0, lossless: false, elementwise: true },
//!     parameters: Settings {},
//!     limits: { memory_bytes: 524288, call_ms: 20, ranks: 64 },
//!     buffers: { input: 65536, output: 65536, state: 0, measures: 0 },
//! }
//! ```

#![no_std]
#![deny(unsafe_code)]

// What tests and natively built plugins may use; a module has nothing but `core`.
#[cfg(not(target_arch = "wasm32"))]
extern crate std;

pub mod cast;
pub mod element;
mod error;
mod export;
pub mod lanes;
#[doc(hidden)]
pub mod manifest;
pub mod math;
mod operands;
pub mod parameters;
mod plugin;
pub mod ranks;
pub mod residual;
#[allow(unsafe_code, reason = "the one module where a plugin's memory becomes slices")]
#[doc(hidden)]
pub mod support;
#[cfg(not(target_arch = "wasm32"))]
pub mod testing;

pub use element::{Bf16, Bool, Element, F16, Float, State, Wide};
pub use error::Error;
pub use operands::Operands;
pub use plugin::{Codec, CodecFor, Plugin, Reducer, ReducerFor, Span};
pub use ronde_plugin_abi as abi;
pub use ronde_plugin_abi::Stage;
pub use support::log;
