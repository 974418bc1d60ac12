//! A software device, for tests only: the functions of `libcuda.so.1` and `libnccl.so.2` that ronde uses, on host memory.
//!
//! It exists so that ordering, failures and lifetimes are tested on machines without a GPU, with the code that drives a real
//! one. It is no emulator: no kernel runs on it, and no figure is ever taken from it.
//!
//! What a test can rely on:
//!
//! - Device memory has addresses at which nothing is mapped. Code that reads it as host memory crashes.
//! - Each stream executes its work in order on a thread of its own, so streams overlap and a missing event is a wrong result.
//! - The legacy default stream (handle 0) of a device is a stream like others; it does not wait for blocking streams.
//! - A stream and an event belong to the device that was current; recording an event on a stream of another device fails.
//! - Calls that need a context fail in a thread without one.
//! - An event that is queried during a capture makes it invalid, unless the thread's mode is relaxed.
//! - An event that a wait names keeps the recording that was the last at that time, as in CUDA.
//! - Ranks of NCCL may be threads or processes of one host. Calls that differ wait for ever, as do those that wait for a process
//!   that has died; an abort reaches all ranks.
//! - Work fails, is delayed and stops where the test asks for it: variables (`control.rs`) for other processes, exported functions for
//!   this one.
//!
//! | variable | effect |
//! |---|---|
//! | `RONDE_DEVICE_COUNT` | devices; default 2. With 0, `cuInit` reports that there is none |
//! | `RONDE_DEVICE_FIRST` | the place on the bus of the first device that the process sees; default 0 |
//! | `RONDE_DEVICE_MEMORY` | bytes of each device; default 256 MiB |
//! | `RONDE_DEVICE_COPY_DELAY_US` | how long each copy takes in addition |
//! | `RONDE_DEVICE_FAIL` | `FUNCTION=CODE[@N]`, comma-separated: the N-th call (default: each) returns the code; `copy` is the work itself |
//! | `RONDE_DEVICE_NCCL_VERSION` | what `ncclGetVersion` returns; default 22304 |
//! | `RONDE_DEVICE_DRIVER_VERSION` | what `cuDriverGetVersion` returns; default 12040 |

#![deny(unsafe_code)]

mod control;
mod driver;
mod memory;
mod nccl;
mod nccl_group;
mod sticky;
mod stream;

/// Locks a mutex. A panic elsewhere leaves these maps whole: each change is a single call.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
