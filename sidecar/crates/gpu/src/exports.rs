//! Device memory that this process allocated so that it can be shared, by address.
//!
//! Whoever allocates here, such as PyTorch through its pluggable allocator, gets memory that a session can pass to its sidecar
//! as it is. Other device memory is copied within the device first.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{Context, DeviceSegment, Driver};
use crate::error::GpuError;

static ALLOCATIONS: Mutex<BTreeMap<u64, Arc<DeviceSegment>>> = Mutex::new(BTreeMap::new());

/// Allocates memory of a device, and returns its address. A multiple of 2 MiB is allocated.
///
/// # Errors
/// [`GpuError::OutOfMemory`], why there is no GPU, and the driver's other errors.
pub fn allocate(ordinal: u32, bytes: usize) -> Result<u64, GpuError> {
    let allocated = allocate_segment(ordinal, bytes);
    allocated.inspect_err(|error| {
        tracing::warn!(target: "ronde", %error, "{bytes} bytes of GPU {ordinal} to share with the sidecar were not allocated");
    })
}

fn allocate_segment(ordinal: u32, bytes: usize) -> Result<u64, GpuError> {
    let context = Context::retain(&Driver::get()?, ordinal)?;
    let segment = Arc::new(DeviceSegment::create(&context, bytes)?);
    let address = segment.address();
    lock().insert(address, segment);
    Ok(address)
}

/// Frees memory. Operations that use it keep it until they are over. Returns whether it was allocated here.
pub fn free(address: u64) -> bool {
    // Dropped after the lock is released: the driver unmaps it.
    let removed = lock().remove(&address);
    if removed.is_none() && address != 0 {
        tracing::warn!(target: "ronde", "memory at {address:#x} was to be freed, which ronde has not allocated");
    }
    removed.is_some()
}

/// The allocation with all of these bytes, and the offset of the first one in it.
#[must_use]
pub fn find(address: u64, bytes: usize) -> Option<(Arc<DeviceSegment>, u64)> {
    let allocations = lock();
    let (start, segment) = allocations.range(..=address).next_back()?;
    let offset = address - start;
    let is_within = offset.checked_add(bytes as u64).is_some_and(|end| end <= segment.bytes() as u64);
    is_within.then(|| (Arc::clone(segment), offset))
}

/// A panic elsewhere leaves the map whole: each change is a single call.
fn lock() -> MutexGuard<'static, BTreeMap<u64, Arc<DeviceSegment>>> {
    ALLOCATIONS.lock().unwrap_or_else(PoisonError::into_inner)
}
