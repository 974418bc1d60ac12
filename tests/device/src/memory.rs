//! Device memory, at addresses where nothing is mapped, and registered host memory.

#![expect(unsafe_code, reason = "copies between host addresses and the backing of device memory")]

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{LazyLock, Mutex};

use crate::control::{COUNTERS, Code, change, number};
use crate::lock;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_REGISTERED: Code = 713;
const ALREADY_REGISTERED: Code = 712;
const ILLEGAL_ADDRESS: Code = 700;

/// Where device memory begins: not a canonical address of x86-64 or aarch64 user space, so no access to it succeeds.
const BASE: u64 = 0x7fd0_0000_0000_0000;
const DEFAULT_BYTES: u64 = 256 << 20;

#[derive(Debug, Default)]
struct Memory {
    /// By address.
    allocations: BTreeMap<u64, Allocation>,
    next: u64,
    /// Host ranges: address and bytes.
    registered: BTreeMap<usize, usize>,
}

#[derive(Debug)]
struct Allocation {
    device: i32,
    bytes: Vec<u8>,
}

static MEMORY: LazyLock<Mutex<Memory>> = LazyLock::new(Mutex::default);

impl Memory {
    /// The allocation with all of a range, and the offset of the range in it.
    fn find(&mut self, address: u64, bytes: usize) -> Option<(&mut Allocation, usize)> {
        let (start, allocation) = self.allocations.range_mut(..=address).next_back()?;
        let offset = usize::try_from(address - start).ok()?;
        (offset.checked_add(bytes)? <= allocation.bytes.len()).then_some((allocation, offset))
    }
}

pub(crate) fn allocate(device: i32, bytes: usize) -> Result<u64, Code> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let mut memory = lock(&MEMORY);
    let used: usize =
        memory.allocations.values().filter(|each| each.device == device).map(|each| each.bytes.len()).sum();
    if (used + bytes) as u64 > number("RONDE_DEVICE_MEMORY", DEFAULT_BYTES) {
        return Err(OUT_OF_MEMORY);
    }
    let address = BASE + memory.next;
    // A gap, so that an access past the end is not one to the neighbour.
    memory.next += (bytes as u64).next_multiple_of(4096) + 4096;
    // Not zeros: what is not written shows.
    memory.allocations.insert(address, Allocation { device, bytes: vec![0xA5; bytes] });
    Ok(address)
}

pub(crate) fn free(address: u64) -> Code {
    lock(&MEMORY).allocations.remove(&address).map_or(INVALID_VALUE, |_| SUCCESS)
}

pub(crate) fn allocated() -> u64 {
    lock(&MEMORY).allocations.values().map(|each| each.bytes.len() as u64).sum()
}

/// The device with memory at an address.
pub(crate) fn owner(address: u64) -> Option<i32> {
    let memory = lock(&MEMORY);
    let (start, allocation) = memory.allocations.range(..=address).next_back()?;
    ((address - start) < allocation.bytes.len() as u64).then_some(allocation.device)
}

pub(crate) fn register(address: usize, bytes: usize) -> Code {
    let mut memory = lock(&MEMORY);
    let overlaps =
        memory.registered.range(..address + bytes).next_back().is_some_and(|(at, length)| at + length > address);
    if bytes == 0 {
        return INVALID_VALUE;
    }
    if overlaps {
        return ALREADY_REGISTERED;
    }
    memory.registered.insert(address, bytes);
    change(&COUNTERS.registrations, true);
    change(&COUNTERS.registrations_made, true);
    SUCCESS
}

pub(crate) fn unregister(address: usize) -> Code {
    if lock(&MEMORY).registered.remove(&address).is_none() {
        return NOT_REGISTERED;
    }
    change(&COUNTERS.registrations, false);
    SUCCESS
}

/// Whether a copy may read or write host memory at any time: it is registered.
fn is_registered(memory: &Memory, address: usize, bytes: usize) -> bool {
    memory.registered.range(..=address).next_back().is_some_and(|(at, length)| at + length >= address + bytes)
}

fn count_copy(memory: &Memory, host: usize, bytes: usize) {
    COUNTERS.copies.fetch_add(1, Ordering::SeqCst);
    if !is_registered(memory, host, bytes) {
        COUNTERS.pageable_copies.fetch_add(1, Ordering::SeqCst);
    }
}

/// Copies device memory to host memory.
pub(crate) fn to_host(host: usize, device: u64, bytes: usize) -> Code {
    let mut memory = lock(&MEMORY);
    count_copy(&memory, host, bytes);
    let Some((allocation, offset)) = memory.find(device, bytes) else { return ILLEGAL_ADDRESS };
    // SAFETY: the caller of the driver's function promises that the host has so many writable bytes there until the copy ends.
    unsafe { std::ptr::copy_nonoverlapping(allocation.bytes[offset..].as_ptr(), host as *mut u8, bytes) };
    SUCCESS
}

/// Copies host memory to device memory.
pub(crate) fn to_device(device: u64, host: usize, bytes: usize) -> Code {
    let mut memory = lock(&MEMORY);
    count_copy(&memory, host, bytes);
    let Some((allocation, offset)) = memory.find(device, bytes) else { return ILLEGAL_ADDRESS };
    // SAFETY: the caller of the driver's function promises that the host has so many readable bytes there until the copy ends.
    unsafe { std::ptr::copy_nonoverlapping(host as *const u8, allocation.bytes[offset..].as_mut_ptr(), bytes) };
    SUCCESS
}

/// Sets bytes of device memory.
pub(crate) fn fill(address: u64, value: u8, bytes: usize) -> Code {
    with(address, bytes, |found| found.fill(value)).map_or(ILLEGAL_ADDRESS, |()| SUCCESS)
}

/// Calls `use_bytes` with bytes of device memory.
pub(crate) fn with<R>(address: u64, bytes: usize, use_bytes: impl FnOnce(&mut [u8]) -> R) -> Option<R> {
    let mut memory = lock(&MEMORY);
    let (allocation, offset) = memory.find(address, bytes)?;
    Some(use_bytes(&mut allocation.bytes[offset..offset + bytes]))
}
