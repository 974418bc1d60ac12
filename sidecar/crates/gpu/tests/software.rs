//! Tests against the software device of `tests/device`: the real code, on memory of the host. They share one process, whose
//! device has one state, so they run one after the other.

#![allow(unsafe_code, reason = "calls of the device that is under test")]

#[path = "software/device.rs"]
mod device;
#[path = "software/driver.rs"]
mod driver;
#[path = "software/nccl.rs"]
mod nccl;
#[path = "software/shared.rs"]
mod shared;
#[path = "software/staging.rs"]
mod staging;
