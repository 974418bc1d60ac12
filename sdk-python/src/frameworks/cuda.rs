//! Functions for `torch.cuda.memory.CUDAPluggableAllocator`: device memory that a worker can share with its sidecar.
//!
//! PyTorch finds them by name in this library and calls them from any thread, without Python.

#![allow(unsafe_code, reason = "functions of the C ABI")]

use std::ffi::{c_int, c_void};
use std::panic::catch_unwind;

use ronde::gpu::exports;

/// Allocates memory of a device. Returns null if there is none; PyTorch then frees cached memory, and raises.
// SAFETY: no other library of the process exports this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ronde_gpu_malloc(bytes: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    let allocated = catch_unwind(|| {
        let (bytes, device) = (usize::try_from(bytes).ok()?, u32::try_from(device).ok()?);
        usize::try_from(exports::allocate(device, bytes).ok()?).ok()
    });
    std::ptr::without_provenance_mut(allocated.ok().flatten().unwrap_or(0))
}

/// Frees memory. The stream has no work that uses it, which PyTorch ensures.
// SAFETY: no other library of the process exports this name.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ronde_gpu_free(address: *mut c_void, _bytes: isize, _device: c_int, _stream: *mut c_void) {
    let address = address.addr() as u64;
    // A panic must not reach PyTorch; the memory then stays allocated.
    let _ = catch_unwind(|| exports::free(address));
}
