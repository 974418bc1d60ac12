//! The functions of the driver API that ronde and its tests call.

#![expect(unsafe_code, reason = "functions of the C ABI, whose results go to addresses of the caller")]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{LazyLock, Mutex};

use crate::control::{COUNTERS, Code, change, injected, number};
use crate::lock;
use crate::memory::{self, INVALID_VALUE, SUCCESS};
use crate::sticky;
use crate::stream::{self, Work};

const NO_DEVICE: Code = 100;
const INVALID_DEVICE: Code = 101;
const INVALID_CONTEXT: Code = 201;
/// CUDA's names of attributes that ronde asks for.
const POINTER_MEMORY_TYPE: c_int = 2;
const POINTER_DEVICE_ORDINAL: c_int = 9;
const MEMORY_TYPE_DEVICE: c_uint = 2;

/// A primary context is a device, once it is retained; how many times.
static CONTEXTS: LazyLock<Mutex<HashMap<c_int, u64>>> = LazyLock::new(Mutex::default);

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// The mode of calls during a capture: global, thread-local or relaxed.
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

const RELAXED: c_int = 2;

/// Whether this thread's calls leave captures of other threads alone.
pub(crate) fn is_relaxed() -> bool {
    CAPTURE_MODE.get() == RELAXED
}

fn devices() -> u64 {
    number("RONDE_DEVICE_COUNT", 2)
}

/// The handle of a device's primary context: never null.
fn context(device: c_int) -> usize {
    0x100 + usize::try_from(device).unwrap_or_default()
}

pub(crate) fn current_device() -> Option<c_int> {
    let top = CURRENT.with_borrow(|stack| stack.last().copied())?;
    c_int::try_from(top - 0x100).ok()
}

/// Writes a result for the caller.
fn give<T>(place: *mut T, value: T) -> Code {
    if place.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller of the C function passes an address for a result of this type.
    unsafe { place.write(value) };
    SUCCESS
}

fn with_device(device: c_int, act: impl FnOnce() -> Code) -> Code {
    let exists = u64::try_from(device).is_ok_and(|device| device < devices());
    if exists { act() } else { INVALID_DEVICE }
}

fn with_context(act: impl FnOnce(c_int) -> Code) -> Code {
    let act = |device| match sticky::of(device) {
        SUCCESS => act(device),
        code => code,
    };
    current_device().map_or(INVALID_CONTEXT, act)
}

/// Releases something, also after an error that stays, which is the result then.
fn releasing(act: impl FnOnce() -> Code) -> Code {
    let Some(device) = current_device() else { return INVALID_CONTEXT };
    let released = act();
    match sticky::of(device) {
        SUCCESS => released,
        code => code,
    }
}

/// Exports functions that fail where the test asks for it, and else do what follows.
macro_rules! exported {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {
        $(
            // SAFETY: the name is that of the library that this one takes the place of.
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $kind),*) -> Code {
                match injected(stringify!($name)) {
                    SUCCESS => $body,
                    code => code,
                }
            }
        )*
    };
}

mod vmm;

pub(crate) use vmm::{handles, made};

exported! {
    fn cuInit(_flags: c_uint) { if devices() == 0 { NO_DEVICE } else { SUCCESS } }
    fn cuDriverGetVersion(version: *mut c_int) {
        give(version, c_int::try_from(number("RONDE_DEVICE_DRIVER_VERSION", 12_040)).unwrap_or_default())
    }
    fn cuDeviceGetCount(count: *mut c_int) { give(count, c_int::try_from(devices()).unwrap_or_default()) }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) { with_device(ordinal, || give(device, ordinal)) }
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) {
        with_device(device, || give_text(name, length, "software device (tests only)"))
    }
    fn cuDeviceGetPCIBusId(name: *mut c_char, length: c_int, device: c_int) {
        with_device(device, || {
            let first = c_int::try_from(number("RONDE_DEVICE_FIRST", 0)).unwrap_or_default();
            give_text(name, length, &format!("0000:{:02x}:00.0", first + device + 1))
        })
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        with_device(device, || give(bytes, 256 << 20))
    }
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        with_device(device, || with_device(peer, || give(can, c_int::from(device != peer))))
    }
    fn cuDevicePrimaryCtxRetain(found: *mut usize, device: c_int) {
        with_device(device, || {
            *lock(&CONTEXTS).entry(device).or_default() += 1;
            change(&COUNTERS.contexts, true);
            give(found, context(device))
        })
    }
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) {
        with_device(device, || {
            let is_active = lock(&CONTEXTS).get(&device).is_some_and(|count| *count > 0);
            match give(flags, 0) {
                SUCCESS => give(active, c_int::from(is_active)),
                code => code,
            }
        })
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        match lock(&CONTEXTS).get_mut(&device).filter(|count| **count > 0) {
            None => INVALID_CONTEXT,
            Some(count) => {
                *count -= 1;
                change(&COUNTERS.contexts, false);
                SUCCESS
            }
        }
    }
    fn cuCtxPushCurrent_v2(context: usize) {
        CURRENT.with_borrow_mut(|stack| stack.push(context));
        SUCCESS
    }
    fn cuCtxPopCurrent_v2(context: *mut usize) {
        match CURRENT.with_borrow_mut(Vec::pop) {
            None => INVALID_CONTEXT,
            Some(top) => give(context, top),
        }
    }
    fn cuStreamCreate(found: *mut usize, _flags: c_uint) { with_context(|device| give(found, stream::create(device))) }
    fn cuStreamDestroy_v2(handle: usize) { releasing(|| stream::destroy(handle)) }
    fn cuStreamWaitEvent(handle: usize, event: usize, _flags: c_uint) { with_context(|_| stream::wait_event(handle, event)) }
    fn cuStreamIsCapturing(handle: usize, status: *mut c_int) {
        with_context(|_| stream::is_capturing(handle).map_or(stream::INVALID_HANDLE, |found| give(status, c_int::from(found))))
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        if mode.is_null() {
            return INVALID_VALUE;
        }
        // SAFETY: the caller of the C function passes an address with a mode.
        let before = CAPTURE_MODE.replace(unsafe { mode.read() });
        give(mode, before)
    }
    fn cuStreamSynchronize(handle: usize) { with_context(|_| stream::synchronize(handle)) }
    fn cuEventCreate(found: *mut usize, _flags: c_uint) { with_context(|device| give(found, stream::create_event(device))) }
    fn cuEventDestroy_v2(event: usize) { stream::destroy_event(event) }
    fn cuEventRecord(event: usize, handle: usize) { with_context(|_| stream::record(event, handle)) }
    fn cuEventQuery(event: usize) { stream::query_event(event) }
    fn cuEventSynchronize(event: usize) { stream::synchronize_event(event) }
    fn cuMemHostRegister_v2(address: usize, bytes: usize, _flags: c_uint) {
        with_context(|_| memory::register(address, bytes))
    }
    fn cuMemHostUnregister(address: usize) { releasing(|| memory::unregister(address)) }
    fn cuMemcpyDtoHAsync_v2(host: usize, device: u64, bytes: usize, handle: usize) {
        with_context(|_| stream::enqueue(handle, Work::ToHost { host, device, bytes }))
    }
    fn cuMemcpyHtoDAsync_v2(device: u64, host: usize, bytes: usize, handle: usize) {
        with_context(|_| stream::enqueue(handle, Work::ToDevice { device, host, bytes }))
    }
    fn cuMemcpyDtoDAsync_v2(target: u64, source: u64, bytes: usize, handle: usize) {
        with_context(|_| stream::enqueue(handle, Work::Within { target, source, bytes }))
    }
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        with_context(|device| memory::allocate(device, bytes).map_or_else(|code| code, |found| give(address, found)))
    }
    fn cuMemFree_v2(address: u64) { with_context(|_| memory::free(address)) }
    fn cuMemcpyDtoH_v2(host: usize, device: u64, bytes: usize) { with_context(|_| memory::to_host(host, device, bytes)) }
    fn cuMemcpyHtoD_v2(device: u64, host: usize, bytes: usize) { with_context(|_| memory::to_device(device, host, bytes)) }
    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: u64) {
        with_context(|_| match memory::owner(address) {
            None => INVALID_VALUE,
            Some(device) => match attribute {
                POINTER_MEMORY_TYPE => give(data.cast(), MEMORY_TYPE_DEVICE),
                POINTER_DEVICE_ORDINAL => give(data.cast(), device),
                _ => INVALID_VALUE,
            },
        })
    }
    fn cuGetErrorName(code: Code, name: *mut *const c_char) { give(name, name_of(code).as_ptr()) }
    fn cuGetErrorString(code: Code, text: *mut *const c_char) { give(text, name_of(code).as_ptr()) }
}

fn give_text(place: *mut c_char, length: c_int, text: &str) -> Code {
    let Ok(length) = usize::try_from(length) else { return INVALID_VALUE };
    let bytes = text.bytes().take(length.saturating_sub(1)).chain([0]);
    for (at, byte) in bytes.enumerate() {
        // SAFETY: the caller of the C function passes an address for `length` characters, and `at` is below that.
        unsafe { place.add(at).write(byte as c_char) };
    }
    SUCCESS
}

fn name_of(code: Code) -> &'static std::ffi::CStr {
    match code {
        SUCCESS => c"CUDA_SUCCESS",
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        400 => c"CUDA_ERROR_INVALID_HANDLE",
        600 => c"CUDA_ERROR_NOT_READY",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        999 => c"CUDA_ERROR_UNKNOWN",
        _ => c"CUDA_ERROR_OF_THE_TEST",
    }
}
