//! CUDA devices and NCCL for ronde.
//!
//! The libraries are opened at run time. A machine without them, without a driver or without a device gets an error that
//! names what is missing. Unsafe code is in `library`, the bindings (`driver/table.rs`, `nccl/table.rs`) and the
//! modules that call them; each block has its reason.
//!
//! - [`Driver`]: the driver and its devices
//! - [`Staging`]: copies between device memory and slots of shared memory
//! - [`nccl`]: communicators that do not block
//! - [`DeviceSegment`]: device memory that a worker shares with its sidecar, and [`exports`] by address
//! - [`Transfers`]: copies of a sidecar between devices and the host

#![deny(unsafe_code)]

mod driver;
mod error;
pub mod exports;
mod library;
pub mod nccl;
mod span;
mod staging;

pub use driver::{Context, DeviceBuffer, DeviceInfo, DeviceSegment, Driver, Event, Stream};
pub use error::GpuError;
pub use span::{CallerStream, DeviceSpan, Keep};
pub use staging::{Arrival, Filled, Registrations, Shared, Staging, StagingConfig, Transfers};
