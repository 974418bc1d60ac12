//! The Rust client of ronde, the encrypted communication service for data-parallel training.
//!
//! A worker connects to the *sidecar* on its host, submits tensors through shared memory and receives the result of the
//! collective. [`Client`] is asynchronous; [`blocking::Client`] is for programs without an asynchronous runtime.
//!
//! ```no_run
//! # async fn run() -> Result<(), ronde::Error> {
//! use ronde::{ReduceOptions, Client, Options, TensorRef};
//!
//! let client = Client::connect(Options::from_env()?).await?;
//! let gradient = [1.0_f32, 2.0, 3.0];
//! let mean = client
//!     .allreduce("gradient", TensorRef::of(&[3], &gradient)?, ReduceOptions::default())
//!     .await?;
//! println!("rank {} of {}: {:?}", client.rank(), client.size(), mean.to_vec::<f32>()?);
//! client.close().await;
//! # Ok(()) }
//! ```
//!
//! On `wasm32-unknown-unknown` the crate has the client of its module `web` instead, which uses gRPC-Web.
//!
//! # Rules
//!
//! - Ranks match operations by name, and may submit names in any order. Operations without a name are numbered in the order in
//!   which they are submitted, so that order must be the same on all ranks.
//! - A call that reaches a limit fails at once and does not wait: waiting could deadlock ranks that submit in different orders.
//!   The operation then fails on the other ranks, too.
//! - When the epoch ends (a rank left or died), every waiter gets the reason. To continue, connect again.
//! - A forked child cannot use a client: calls fail with [`Error::UsedAfterFork`], drops do nothing.

#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("ronde does not run on big-endian machines: tensors travel in little-endian order");

// WebAssembly has no modules that need sockets, threads or shared memory.
#[cfg(not(target_arch = "wasm32"))]
pub mod blocking;
#[cfg(not(target_arch = "wasm32"))]
mod buffer;
#[cfg(not(target_arch = "wasm32"))]
mod client;
#[cfg(not(target_arch = "wasm32"))]
mod completions;
#[cfg(not(target_arch = "wasm32"))]
mod connect;
#[cfg(not(target_arch = "wasm32"))]
mod device;
mod error;
#[cfg(not(target_arch = "wasm32"))]
mod handle;
#[cfg(not(target_arch = "wasm32"))]
mod in_flight;
mod inline;
#[cfg(not(target_arch = "wasm32"))]
mod launcher;
#[cfg(not(target_arch = "wasm32"))]
mod memory;
mod methods;
mod naming;
#[cfg(not(target_arch = "wasm32"))]
mod open;
mod operation;
#[cfg(not(target_arch = "wasm32"))]
mod options;
mod outcome;
mod pending;
mod plugin;
mod promise;
#[cfg(not(target_arch = "wasm32"))]
mod result_data;
#[cfg(not(target_arch = "wasm32"))]
mod ring;
#[cfg(not(target_arch = "wasm32"))]
mod session;
#[cfg(not(target_arch = "wasm32"))]
mod task;
mod tensor;
#[cfg(not(target_arch = "wasm32"))]
mod timeline;
#[cfg(not(target_arch = "wasm32"))]
mod usage;
#[cfg(any(target_arch = "wasm32", test))]
pub mod web;

#[cfg(not(target_arch = "wasm32"))]
pub use buffer::{Buffer, SharedMemory};
#[cfg(not(target_arch = "wasm32"))]
pub use client::Client;
#[cfg(not(target_arch = "wasm32"))]
pub use completions::Completions;
#[cfg(not(target_arch = "wasm32"))]
pub use device::{DeviceTensor, InputTensor, LevelCounts};
pub use error::{Blame, Error};
#[cfg(not(target_arch = "wasm32"))]
pub use handle::Handle;
#[cfg(not(target_arch = "wasm32"))]
pub use launcher::{LaunchedBy, Launcher};
pub use operation::{Label, Operation, ReduceOptions};
#[cfg(not(target_arch = "wasm32"))]
pub use options::{GpuLevels, Options, Ring, Transfer};
pub use outcome::{Exchanged, Outcome, Output, ProcessSet, Received};
pub use pending::MembershipChange;
#[cfg(not(target_arch = "wasm32"))]
pub use ronde_gpu as gpu;
pub use ronde_rpc::EpochView;
pub use ronde_wire::{
    Call, Cause, Codec, Collective, DType, Detail, Exit, Failure, JobName, PluginCall, PluginValue, Rank, Record,
    ReduceOp, SetId, Shape, WorkerNumber,
};
pub use tensor::{Element, Tensor, TensorRef};
#[cfg(not(target_arch = "wasm32"))]
pub use timeline::{TimelineOptions, timeline_text};
#[cfg(not(target_arch = "wasm32"))]
pub use usage::{Usage, usage};

/// Compiles the programs of the READMEs. The runner of documents (tests/documents) checks that each page is listed here.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    mod sdk {}
    #[doc = include_str!("../../README.md")]
    mod project {}
}
