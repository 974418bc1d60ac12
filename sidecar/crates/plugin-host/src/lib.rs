//! Runs WebAssembly plugins: modules that compress tensors (codecs) or combine them (reducers).
//!
//! A [`Host`] loads modules as [`Plugin`]s, and threads start [`Instance`]s of them. [`Instance::encode`],
//! [`Instance::decode`] and [`Instance::reduce`] copy a span in, call the module, and copy the result out. A plugin's
//! [`Manifest`] describes it; a [`trust::Policy`] decides which plugins are loaded. The interface between host and
//! module is the crate ronde-plugin-abi.
//!
//! Plugins are untrusted code. A module can import a bounded log only; its memory is fixed when it starts; each call
//! has a deadline. Every failure is a [`Fault`] that names the plugin, and too many of them disable it. Results have
//! the same bits on every machine: NaNs are canonical, relaxed SIMD is off, and there is neither clock nor randomness.

#![forbid(unsafe_code)]

mod codec;
#[cfg(feature = "compiler")]
mod compiler;
pub mod conformance;
mod copying;
pub mod determinism;
mod error;
mod guest;
mod host;
mod instance;
mod manifest;
mod module;
#[cfg(any(test, not(feature = "compiler")))]
mod no_compiler;
mod placement;
mod plugin;
mod reducer;
pub mod throughput;
mod ticker;
pub mod trust;

#[cfg(not(feature = "compiler"))]
use no_compiler as compiler;

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
