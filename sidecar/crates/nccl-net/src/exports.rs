//! The tables that NCCL loads, and their functions.
//!
//! No panic and no Rust error crosses into NCCL: each function logs it by NCCL's logger and returns a code. NCCL promises
//! that arguments are valid, that handles have 128 bytes, that objects come from this library and are closed once, and that
//! a buffer stays valid until its request is complete.
#![expect(unsafe_code, reason = "these are C functions: they read and write what NCCL's pointers name")]

use std::any::Any;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Arc, OnceLock};

use ronde_wire::limits;
use ronde_wire::stream::HANDLE_BYTES;

use crate::abi::{
    HOST_MEMORY, INTERNAL_ERROR, LOG_INFO, LOG_NET, LOG_WARN, Logger, PropertiesV6, PropertiesV7, PropertiesV8,
    SUCCESS, Status, Table, TableV6, TableV7, TableV8, WithDevices,
};
use crate::buffer::Buffer;
use crate::connection::{Receiver, Sender};
use crate::error::Error;
use crate::plugin::{self, End, Listener, Plugin, Request};
use crate::settings::Settings;

/// Makes a table of constants shareable.
#[repr(transparent)]
pub(crate) struct Exported<T>(T);

// SAFETY: a table holds addresses of functions and of a constant text, and nobody writes it.
unsafe impl<T> Sync for Exported<T> {}

const NAME: *const c_char = c"ronde".as_ptr();

macro_rules! table {
    ($properties:expr, $connect:expr, $accept:expr, $reg_mr:expr) => {
        Table {
            name: NAME,
            init,
            devices,
            get_properties: $properties,
            listen,
            connect: $connect,
            accept: $accept,
            reg_mr: $reg_mr,
            reg_mr_dma_buf: None,
            dereg_mr,
            isend,
            irecv,
            iflush,
            test,
            close_send,
            close_recv,
            close_listen,
        }
    };
}

/// Version 6, for NCCL 2.13 and later.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL loads it by this name")]
pub(crate) static ncclNetPlugin_v6: Exported<TableV6> =
    Exported(table!(get_properties_v6, connect_v6, accept_v6, reg_mr::<c_int>));

/// Version 7, for NCCL 2.18 and later.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL loads it by this name")]
pub(crate) static ncclNetPlugin_v7: Exported<TableV7> = Exported(WithDevices {
    table: table!(get_properties_v7, connect_v7, accept_v7, reg_mr::<c_int>),
    get_device_mr: None,
    irecv_consumed: None,
});

/// Version 8, for NCCL 2.20 and later.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL loads it by this name")]
pub(crate) static ncclNetPlugin_v8: Exported<TableV8> = Exported(WithDevices {
    table: table!(get_properties_v8, connect_v7, accept_v7, reg_mr::<usize>),
    get_device_mr: None,
    irecv_consumed: None,
});

static LOGGER: OnceLock<Logger> = OnceLock::new();
static PLUGIN: OnceLock<Plugin> = OnceLock::new();

/// Writes a line to NCCL's log.
fn log(level: c_int, text: &str) {
    let (Some(logger), Ok(text)) = (LOGGER.get(), CString::new(text.replace('\0', " "))) else { return };
    // SAFETY: the logger is NCCL's, which takes a format and its arguments; all texts end in NUL.
    unsafe { logger(level, LOG_NET, c"ronde".as_ptr(), 0, c"NET/ronde: %s".as_ptr(), text.as_ptr()) };
}

/// Calls `body` and turns its outcome into a code.
fn guarded(call: &str, body: impl FnOnce() -> Result<(), Error>) -> Status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(error)) => {
            log(LOG_WARN, &format!("{call}: {error}"));
            error.code()
        }
        Err(panic) => {
            log(LOG_WARN, &format!("{call}: a bug in the plugin: {}", panic_text(&*panic)));
            INTERNAL_ERROR
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it panicked")
}

fn initialised() -> Result<&'static Plugin, Error> {
    PLUGIN.get().ok_or_else(|| Error::Usage("the plugin is not initialised".to_owned()))
}

extern "C" fn init(logger: Option<Logger>) -> Status {
    if let Some(logger) = logger {
        // Another communicator of the process may have set it.
        let _ = LOGGER.set(logger);
    }
    guarded("init", || {
        if PLUGIN.get().is_none() {
            let settings = Settings::from_env()?;
            let text = format!("worker {} uses the sidecar at {}", settings.worker, settings.socket.display());
            // Another thread may have been faster.
            let _ = PLUGIN.set(Plugin::new(settings));
            log(LOG_INFO, &text);
        }
        Ok(())
    })
}

/// # Safety
/// See the module.
unsafe extern "C" fn devices(count: *mut c_int) -> Status {
    guarded("devices", || {
        // SAFETY: see the module.
        unsafe { count.write(1) };
        Ok(())
    })
}

fn check_device(device: c_int) -> Result<&'static Plugin, Error> {
    match device {
        0 => initialised(),
        _ => Err(Error::Usage(format!("there is device 0 only, not {device}"))),
    }
}

fn properties(device: c_int) -> Result<PropertiesV6, Error> {
    let speed = check_device(device)?.settings.speed_mbps;
    Ok(PropertiesV6 {
        name: NAME,
        pci_path: ptr::null(),
        guid: 0,
        ptr_support: HOST_MEMORY,
        speed,
        port: 0,
        latency: LATENCY_US,
        max_comms: c_int::try_from(limits::STREAMS_PER_WORKER_MAX).unwrap_or(c_int::MAX),
        max_recvs: 1,
    })
}

/// # Safety
/// See the module.
unsafe extern "C" fn get_properties_v6(device: c_int, out: *mut PropertiesV6) -> Status {
    guarded("getProperties", || {
        let found = properties(device)?;
        // SAFETY: see the module.
        unsafe { out.write(found) };
        Ok(())
    })
}

/// # Safety
/// See the module.
unsafe extern "C" fn get_properties_v7(device: c_int, out: *mut PropertiesV7) -> Status {
    guarded("getProperties", || {
        let base = properties(device)?;
        // SAFETY: see the module.
        unsafe { out.write(PropertiesV7 { base, device_type: 0, device_version: 0 }) };
        Ok(())
    })
}

/// # Safety
/// See the module.
unsafe extern "C" fn get_properties_v8(device: c_int, out: *mut PropertiesV8) -> Status {
    guarded("getProperties", || {
        let PropertiesV6 { name, pci_path, guid, ptr_support, speed, port, latency, max_comms, max_recvs } =
            properties(device)?;
        let found = PropertiesV8 {
            name,
            pci_path,
            guid,
            ptr_support,
            reg_is_global: 0,
            speed,
            port,
            latency,
            max_comms,
            max_recvs,
            device_type: 0,
            device_version: 0,
        };
        // SAFETY: see the module.
        unsafe { out.write(found) };
        Ok(())
    })
}

/// # Safety
/// See the module.
unsafe extern "C" fn listen(device: c_int, handle: *mut c_void, out: *mut *mut c_void) -> Status {
    guarded("listen", || {
        let mut bytes = [0; HANDLE_BYTES];
        let listener = Box::new(check_device(device)?.listen(&mut bytes)?);
        // SAFETY: see the module. The box is taken back by `close_listen`.
        unsafe {
            handle.cast::<[u8; HANDLE_BYTES]>().write(bytes);
            out.write(Box::into_raw(listener).cast());
        }
        Ok(())
    })
}

/// # Safety
/// See the module.
unsafe extern "C" fn connect_v6(device: c_int, handle: *mut c_void, out: *mut *mut c_void) -> Status {
    guarded("connect", || {
        // SAFETY: see the module.
        let mut bytes = unsafe {
            out.write(ptr::null_mut());
            handle.cast::<[u8; HANDLE_BYTES]>().read()
        };
        let outcome = check_device(device)?.connect(&mut bytes);
        // SAFETY: as above.
        unsafe { handle.cast::<[u8; HANDLE_BYTES]>().write(bytes) };
        if let Some(end) = outcome? {
            // SAFETY: as above. The count is taken back by `close_send`.
            unsafe { out.write(Arc::into_raw(Arc::new(end)).cast_mut().cast()) };
        }
        Ok(())
    })
}

/// # Safety
/// See the module. The last argument is for devices that send by themselves; it stays as it is, which means none.
unsafe extern "C" fn connect_v7(device: c_int, handle: *mut c_void, out: *mut *mut c_void, _: *mut c_void) -> Status {
    // SAFETY: the same contract.
    unsafe { connect_v6(device, handle, out) }
}

/// # Safety
/// See the module.
unsafe extern "C" fn accept_v6(listener: *mut c_void, out: *mut *mut c_void) -> Status {
    guarded("accept", || {
        // SAFETY: see the module; the listener is one of `listen`.
        let listener = unsafe {
            out.write(ptr::null_mut());
            &*listener.cast::<Listener>()
        };
        if let Some(end) = initialised()?.accept(listener)? {
            // SAFETY: as above. The count is taken back by `close_recv`.
            unsafe { out.write(Arc::into_raw(Arc::new(end)).cast_mut().cast()) };
        }
        Ok(())
    })
}

/// # Safety
/// See the module, and [`connect_v7`].
unsafe extern "C" fn accept_v7(listener: *mut c_void, out: *mut *mut c_void, _: *mut c_void) -> Status {
    // SAFETY: the same contract.
    unsafe { accept_v6(listener, out) }
}

/// # Safety
/// See the module.
unsafe extern "C" fn reg_mr<Size>(
    _: *mut c_void,
    _: *mut c_void,
    _: Size,
    kind: c_int,
    out: *mut *mut c_void,
) -> Status {
    guarded("regMr", || {
        if kind != HOST_MEMORY {
            return Err(Error::Usage(format!("memory of kind {kind} is not memory of the host")));
        }
        // SAFETY: see the module.
        unsafe { out.write(ptr::null_mut()) };
        Ok(())
    })
}

extern "C" fn dereg_mr(_: *mut c_void, _: *mut c_void) -> Status {
    SUCCESS
}

/// The bytes of a buffer.
fn size_of_buffer(size: c_int) -> Result<usize, Error> {
    usize::try_from(size).map_err(|_| Error::Usage(format!("a buffer has {size} bytes")))
}

/// Hands a request to NCCL, or null.
///
/// # Safety
/// `out` can be written. The box is taken back by `test`.
unsafe fn hand_out(request: Option<Request>, out: *mut *mut c_void) {
    let address = request.map_or(ptr::null_mut(), |request| Box::into_raw(Box::new(request)));
    // SAFETY: the caller's promise.
    unsafe { out.write(address.cast()) };
}

/// Another reference to the end that an object of NCCL's is.
///
/// # Safety
/// The object is one of [`connect_v6`] or [`accept_v6`] with this type, and is not closed.
unsafe fn shared_end<T>(object: *mut c_void) -> Arc<End<T>> {
    let end = object.cast_const().cast::<End<T>>();
    // SAFETY: the caller's promise; NCCL's own reference stays counted.
    unsafe {
        Arc::increment_strong_count(end);
        Arc::from_raw(end)
    }
}

/// # Safety
/// See the module.
unsafe extern "C" fn isend(
    object: *mut c_void,
    data: *mut c_void,
    size: c_int,
    _tag: c_int,
    _: *mut c_void,
    out: *mut *mut c_void,
) -> Status {
    guarded("isend", || {
        let bytes = size_of_buffer(size)?;
        // SAFETY: see the module.
        unsafe {
            let end = shared_end::<Sender>(object);
            hand_out(plugin::send(&end, Buffer::new(data.cast(), bytes))?, out);
        }
        Ok(())
    })
}

/// # Safety
/// See the module.
unsafe extern "C" fn irecv(
    object: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    _tags: *mut c_int,
    _: *mut *mut c_void,
    out: *mut *mut c_void,
) -> Status {
    guarded("irecv", || {
        if count != 1 {
            return Err(Error::Usage(format!("one message is received at a time, not {count}")));
        }
        // SAFETY: see the module.
        unsafe {
            let (data, bytes) = (data.read(), size_of_buffer(sizes.read())?);
            let end = shared_end::<Receiver>(object);
            hand_out(plugin::receive(&end, Buffer::new(data.cast(), bytes))?, out);
        }
        Ok(())
    })
}

/// Host memory needs no flush.
///
/// # Safety
/// See the module.
unsafe extern "C" fn iflush(
    _: *mut c_void,
    _: c_int,
    _: *mut *mut c_void,
    _: *mut c_int,
    _: *mut *mut c_void,
    out: *mut *mut c_void,
) -> Status {
    // SAFETY: see the module.
    unsafe { hand_out(None, out) };
    SUCCESS
}

/// # Safety
/// See the module.
unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> Status {
    guarded("test", || {
        // SAFETY: see the module; the request is one of `hand_out`.
        let bytes = unsafe {
            done.write(0);
            (*request.cast::<Request>()).test()?
        };
        let Some(bytes) = bytes else { return Ok(()) };
        // SAFETY: as above. NCCL does not use a request again that is done.
        unsafe {
            drop(Box::from_raw(request.cast::<Request>()));
            if !sizes.is_null() {
                sizes.write(c_int::try_from(bytes).unwrap_or(c_int::MAX));
            }
            done.write(1);
        }
        Ok(())
    })
}

/// # Safety
/// See the module.
unsafe extern "C" fn close_send(object: *mut c_void) -> Status {
    guarded("closeSend", || {
        // SAFETY: see the module; this is NCCL's own reference.
        let end = unsafe { Arc::from_raw(object.cast_const().cast::<End<Sender>>()) };
        plugin::close_sender(&end);
        Ok(())
    })
}

/// # Safety
/// See the module.
unsafe extern "C" fn close_recv(object: *mut c_void) -> Status {
    guarded("closeRecv", || {
        // SAFETY: see the module; this is NCCL's own reference.
        let end = unsafe { Arc::from_raw(object.cast_const().cast::<End<Receiver>>()) };
        plugin::close_receiver(&end);
        Ok(())
    })
}

/// # Safety
/// See the module.
unsafe extern "C" fn close_listen(object: *mut c_void) -> Status {
    guarded("closeListen", || {
        // SAFETY: see the module; the box is that of `listen`.
        drop(unsafe { Box::from_raw(object.cast::<Listener>()) });
        Ok(())
    })
}

/// What NCCL is told about the time of a small message, in microseconds.
const LATENCY_US: f32 = 50.0;
