//! Virtual memory management: physical memory that other processes import by a descriptor.
//!
//! Physical memory is a memfd, so both processes see the same bytes. Its length has the device, which an import finds there: it is
//! longer by the device's number and one. So other files, of whole pages, are no device memory.

use std::collections::HashMap;
use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use super::{INVALID_DEVICE, devices, give};
use crate::control::{Code, injected};
use crate::lock;
use crate::memory::{self, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};

/// CUDA's minimum is 2 MiB; tests need less memory so.
const GRANULARITY: usize = 64 << 10;
const POSIX_DESCRIPTOR: c_int = 1;
const ON_DEVICE: c_int = 1;
/// The most devices, and one.
const MARK_MAX: c_int = 64;

#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    metadata: *const c_void,
    flags: [u8; 8],
}

struct Physical {
    device: c_int,
    bytes: usize,
    descriptor: OwnedFd,
}

static PHYSICAL: LazyLock<Mutex<HashMap<u64, Physical>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Bytes of a device's physical memory that this process has made; imported memory is counted where it was made.
static MADE: LazyLock<Mutex<HashMap<u64, (c_int, usize)>>> = LazyLock::new(Mutex::default);

/// Bytes of physical memory of a device that this process has made.
pub(crate) fn made(device: c_int) -> usize {
    lock(&MADE).values().filter(|(of, _)| *of == device).map(|(_, bytes)| bytes).sum()
}

/// Handles of physical memory that this process holds, made or imported.
pub(crate) fn handles() -> u64 {
    lock(&PHYSICAL).len() as u64
}

fn insert(physical: Physical) -> u64 {
    let handle = NEXT.fetch_add(1, Ordering::SeqCst);
    lock(&PHYSICAL).insert(handle, physical);
    handle
}

fn create(device: c_int, bytes: usize) -> Result<u64, Code> {
    if u64::try_from(device).map_or(true, |device| device >= devices()) {
        return Err(INVALID_DEVICE);
    }
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
        return Err(INVALID_VALUE);
    }
    if !memory::has_room(device, bytes) {
        return Err(OUT_OF_MEMORY);
    }
    // SAFETY: the name ends with NUL.
    let descriptor = unsafe { libc::memfd_create(c"ronde-device".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(OUT_OF_MEMORY);
    }
    // SAFETY: just made, and owned by nobody else.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let mark = usize::try_from(device + 1).map_err(|_| INVALID_VALUE)?;
    let length = libc::off_t::try_from(bytes + mark).map_err(|_| INVALID_VALUE)?;
    // SAFETY: the descriptor lives.
    if unsafe { libc::ftruncate(descriptor.as_raw_fd(), length) } != 0 {
        return Err(OUT_OF_MEMORY);
    }
    let handle = insert(Physical { device, bytes, descriptor });
    lock(&MADE).insert(handle, (device, bytes));
    Ok(handle)
}

fn import(descriptor: c_int) -> Result<u64, Code> {
    // SAFETY: any number is allowed.
    let own = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if own < 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: just made, and owned by nobody else.
    let own = unsafe { OwnedFd::from_raw_fd(own) };
    let file = std::fs::File::from(own);
    let length = file.metadata().ok().and_then(|found| usize::try_from(found.len()).ok()).ok_or(INVALID_VALUE)?;
    let mark = length % GRANULARITY;
    match c_int::try_from(mark) {
        Ok(number) if (1..=MARK_MAX).contains(&number) => {
            Ok(insert(Physical { device: number - 1, bytes: length - mark, descriptor: file.into() }))
        }
        _ => Err(INVALID_VALUE),
    }
}

fn export(handle: u64) -> Result<c_int, Code> {
    let physical = lock(&PHYSICAL);
    let found = physical.get(&handle).ok_or(INVALID_VALUE)?;
    found.descriptor.try_clone().map(IntoRawFd::into_raw_fd).map_err(|_| OUT_OF_MEMORY)
}

fn map(address: u64, bytes: usize, handle: u64) -> Code {
    let physical = lock(&PHYSICAL);
    match physical.get(&handle) {
        Some(found) if bytes <= found.bytes && bytes.is_multiple_of(GRANULARITY) => {
            memory::map(address, found.device, bytes, &found.descriptor)
        }
        _ => INVALID_VALUE,
    }
}

exported! {
    fn cuMemGetAllocationGranularity(found: *mut usize, _properties: *const Properties, _option: c_int) {
        give(found, GRANULARITY)
    }
    fn cuMemCreate(found: *mut u64, bytes: usize, properties: *const Properties, _flags: c_ulonglong) {
        if properties.is_null() {
            return INVALID_VALUE;
        }
        // SAFETY: the caller of the C function passes an address with properties.
        let Properties { handle_types, location, .. } = unsafe { properties.read() };
        if handle_types != POSIX_DESCRIPTOR || location.kind != ON_DEVICE {
            return INVALID_VALUE;
        }
        create(location.id, bytes).map_or_else(|code| code, |handle| give(found, handle))
    }
    fn cuMemRelease(handle: u64) {
        lock(&MADE).remove(&handle);
        lock(&PHYSICAL).remove(&handle).map_or(INVALID_VALUE, |_| SUCCESS)
    }
    fn cuMemExportToShareableHandle(found: *mut c_int, handle: u64, kind: c_int, _flags: c_ulonglong) {
        if kind != POSIX_DESCRIPTOR {
            return INVALID_VALUE;
        }
        export(handle).map_or_else(|code| code, |descriptor| give(found, descriptor))
    }
    fn cuMemImportFromShareableHandle(found: *mut u64, descriptor: usize, kind: c_int) {
        match c_int::try_from(descriptor) {
            Ok(descriptor) if kind == POSIX_DESCRIPTOR => {
                import(descriptor).map_or_else(|code| code, |handle| give(found, handle))
            }
            _ => INVALID_VALUE,
        }
    }
    fn cuMemGetAllocationPropertiesFromHandle(found: *mut Properties, handle: u64) {
        let Some(device) = lock(&PHYSICAL).get(&handle).map(|physical| physical.device) else { return INVALID_VALUE };
        let location = Location { kind: ON_DEVICE, id: device };
        give(found, Properties {
            kind: 1,
            handle_types: POSIX_DESCRIPTOR,
            location,
            metadata: std::ptr::null(),
            flags: [0; 8],
        })
    }
    fn cuMemAddressReserve(found: *mut u64, bytes: usize, _alignment: usize, _address: u64, _flags: c_ulonglong) {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return INVALID_VALUE;
        }
        give(found, memory::reserve(bytes))
    }
    fn cuMemAddressFree(_address: u64, _bytes: usize) { SUCCESS }
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, _flags: c_ulonglong) {
        if offset == 0 { map(address, bytes, handle) } else { INVALID_VALUE }
    }
    fn cuMemSetAccess(address: u64, bytes: usize, _access: *const c_void, _count: usize) {
        memory::allow_access(address, bytes)
    }
    fn cuMemUnmap(address: u64, _bytes: usize) { memory::free(address) }
}
