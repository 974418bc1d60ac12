//! Runs WebAssembly plugins: modules that compress tensors (codecs) or combine them (reducers).
//!
//! A [`Host`] lets modules in as [`Plugin`]s, of which threads start [`Instance`]s; [`Instance::encode`], [`Instance::decode`]
//! and [`Instance::reduce`] copy a span in, call the module and copy the result out. What a plugin is, its [`Manifest`] says;
//! whose it may be, a [`trust::Policy`]. The interface itself is the crate ronde-plugin-abi.
//!
//! A plugin is foreign code. It imports nothing but a bounded log; its memory is fixed when it starts; each call has a
//! deadline; whatever it does is a [`Fault`] that names it, and too many of them disable it. It computes the same bits on
//! every machine: NaNs are canonical, relaxed SIMD is off, there is neither clock nor randomness.

#![forbid(unsafe_code)]

mod codec;
pub mod conformance;
mod copying;
pub mod determinism;
mod error;
mod guest;
mod host;
mod instance;
mod manifest;
mod module;
mod placement;
mod plugin;
mod reducer;
pub mod throughput;
mod ticker;
pub mod trust;

pub use codec::CodecFacts;
pub use error::{Fault, FaultKind, HostError, LoadError};
pub use host::{DISABLE_AFTER, Host, HostConfig};
pub use instance::{Instance, Span};
pub use manifest::{
    CodecManifest, Given, Limits, Manifest, ManifestError, Parameter, ParameterError, ParameterKind, ParameterValue,
    Parameters, ReducerManifest, Shape,
};
pub use module::{Inspection, inspect, name};
pub use plugin::{Operation, Plugin};
pub use reducer::Operands;
pub use ronde_plugin_abi::{Stage, limits};
