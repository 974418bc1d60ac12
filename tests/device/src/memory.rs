//! Device memory, at addresses where nothing is mapped, and registered host memory.

#![expect(unsafe_code, reason = "copies between host addresses and the backing of device memory")]

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, OwnedFd};
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
    bytes: Backing,
}

/// The host memory in which device memory is kept.
#[derive(Debug)]
enum Backing {
    Private(Vec<u8>),
    /// A mapping of memory that other processes may map, too. Until access is set, as much of it is there as none.
    Shared {
        address: usize,
        bytes: usize,
        is_accessible: bool,
    },
}

impl Deref for Backing {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Private(bytes) => bytes,
            Self::Shared { is_accessible: false, .. } => &[],
            // SAFETY: mapped for the life of this value. Another process may change the bytes meanwhile, which only a program
            // without an order between its streams brings about, and which a test then sees.
            Self::Shared { address, bytes, .. } => unsafe { std::slice::from_raw_parts(*address as *const u8, *bytes) },
        }
    }
}

impl DerefMut for Backing {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Private(bytes) => bytes,
            Self::Shared { is_accessible: false, .. } => &mut [],
            // SAFETY: as above.
            Self::Shared { address, bytes, .. } => unsafe {
                std::slice::from_raw_parts_mut(*address as *mut u8, *bytes)
            },
        }
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if let Self::Shared { address, bytes, .. } = self {
            // SAFETY: mapped by `map`, and nothing refers to it any more.
            unsafe { libc::munmap(*address as *mut libc::c_void, *bytes) };
        }
    }
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
    if !has_room(device, bytes) {
        return Err(OUT_OF_MEMORY);
    }
    let address = reserve(bytes);
    // Not zeros: what is not written shows.
    let bytes = Backing::Private(vec![0xA5; bytes]);
    lock(&MEMORY).allocations.insert(address, Allocation { device, bytes });
    Ok(address)
}

/// Whether a device has so much memory left, as far as this process uses it.
pub(crate) fn has_room(device: i32, bytes: usize) -> bool {
    let memory = lock(&MEMORY);
    let is_own = |each: &&Allocation| each.device == device && matches!(each.bytes, Backing::Private(_));
    let used: usize = memory.allocations.values().filter(is_own).map(|each| each.bytes.len()).sum();
    (used + crate::driver::made(device) + bytes) as u64 <= number("RONDE_DEVICE_MEMORY", DEFAULT_BYTES)
}

/// Addresses for so many bytes, at which nothing is.
pub(crate) fn reserve(bytes: usize) -> u64 {
    let mut memory = lock(&MEMORY);
    let address = BASE + memory.next;
    // A gap, so that an access past the end is not one to the neighbour.
    memory.next += (bytes as u64).next_multiple_of(4096) + 4096;
    address
}

/// Maps physical memory at reserved addresses.
pub(crate) fn map(address: u64, device: i32, bytes: usize, descriptor: &OwnedFd) -> Code {
    let (access, descriptor) = (libc::PROT_READ | libc::PROT_WRITE, descriptor.as_raw_fd());
    // SAFETY: a new mapping of a file that lives.
    let mapped = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, descriptor, 0) };
    if mapped == libc::MAP_FAILED {
        return OUT_OF_MEMORY;
    }
    let bytes = Backing::Shared { address: mapped as usize, bytes, is_accessible: false };
    lock(&MEMORY).allocations.insert(address, Allocation { device, bytes });
    SUCCESS
}

/// Lets the device access what is mapped at an address.
pub(crate) fn allow_access(at: u64, length: usize) -> Code {
    match lock(&MEMORY).allocations.get_mut(&at).map(|allocation| &mut allocation.bytes) {
        Some(Backing::Shared { bytes, is_accessible, .. }) if *bytes == length => {
            *is_accessible = true;
            SUCCESS
        }
        _ => INVALID_VALUE,
    }
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

/// Copies device memory to device memory.
pub(crate) fn within(target: u64, source: u64, bytes: usize) -> Code {
    let Some(content) = with(source, bytes, |found| found.to_vec()) else { return ILLEGAL_ADDRESS };
    with(target, bytes, |found| found.copy_from_slice(&content)).map_or(ILLEGAL_ADDRESS, |()| SUCCESS)
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
