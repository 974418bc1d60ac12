//! The tables of NCCL's net plugins, declared apart from those of the plugin, and the calls that NCCL makes.
#![expect(unsafe_code, reason = "it opens a library and calls its functions")]

use std::ffi::{CStr, c_char, c_float, c_int, c_ulong, c_void};
use std::ptr;

use libloading::Library;

type Object = *mut c_void;
type Out = *mut *mut c_void;
type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);

#[repr(C)]
struct Functions {
    name: *const c_char,
    init: unsafe extern "C" fn(Logger) -> c_int,
    devices: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_properties: unsafe extern "C" fn(c_int, *mut c_void) -> c_int,
    listen: unsafe extern "C" fn(c_int, *mut c_void, Out) -> c_int,
    /// Version 6 has three arguments. A fourth one changes nothing for such a function.
    connect: unsafe extern "C" fn(c_int, *mut c_void, Out, *mut c_void) -> c_int,
    accept: unsafe extern "C" fn(Object, Out, *mut c_void) -> c_int,
    /// The size has 32 bits before version 8, and is passed in the same register.
    reg_mr: unsafe extern "C" fn(Object, Object, usize, c_int, Out) -> c_int,
    reg_mr_dma_buf: *const c_void,
    dereg_mr: unsafe extern "C" fn(Object, Object) -> c_int,
    isend: unsafe extern "C" fn(Object, Object, c_int, c_int, Object, Out) -> c_int,
    irecv: unsafe extern "C" fn(Object, c_int, *mut Object, *mut c_int, *mut c_int, *mut Object, Out) -> c_int,
    iflush: unsafe extern "C" fn(Object, c_int, *mut Object, *mut c_int, *mut Object, Out) -> c_int,
    test: unsafe extern "C" fn(Object, *mut c_int, *mut c_int) -> c_int,
    close_send: unsafe extern "C" fn(Object) -> c_int,
    close_recv: unsafe extern "C" fn(Object) -> c_int,
    close_listen: unsafe extern "C" fn(Object) -> c_int,
}

/// The plugin, once it is open.
pub(crate) struct Plugin {
    functions: &'static Functions,
    version: u32,
    /// The device that it describes to itself, as NCCL passes on version 7 and later.
    no_device: Box<[u64; 64]>,
}

/// A connection, a listener or a request.
#[derive(Clone, Copy)]
pub(crate) struct Handle(Object);

/// The bytes of a connect handle.
pub(crate) const HANDLE_BYTES: usize = 128;

/// A code other than success.
#[derive(Debug)]
pub(crate) struct Code(pub(crate) c_int);

/// Writes NCCL's log lines to standard error.
///
/// # Safety
/// The format and its one argument are texts that end in NUL.
unsafe extern "C" fn log(
    level: c_int,
    _: c_ulong,
    _: *const c_char,
    _: c_int,
    format: *const c_char,
    text: *const c_char,
) {
    // A variadic function in C, which gets its one argument in the same register.
    // SAFETY: the plugin passes a format with one text, both of which end in NUL.
    let (format, text) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(text)) };
    eprintln!("{level} {}", format.to_string_lossy().replace("%s", &text.to_string_lossy()));
}

fn check(code: c_int) -> Result<(), Code> {
    if code == 0 { Ok(()) } else { Err(Code(code)) }
}

fn made(code: c_int, object: Object) -> Result<Option<Handle>, Code> {
    check(code).map(|()| if object.is_null() { None } else { Some(Handle(object)) })
}

impl Plugin {
    /// Opens the library and finds a version's table.
    pub(crate) fn open(path: &str, version: u32) -> Result<Self, String> {
        // SAFETY: the library of this project; its constructors do nothing. It stays open until the process ends.
        let functions = unsafe {
            let library = Box::leak(Box::new(Library::new(path).map_err(|error| error.to_string())?));
            let symbol = format!("ncclNetPlugin_v{version}");
            let table = library.get::<*const Functions>(symbol.as_bytes()).map_err(|error| error.to_string())?;
            &*table.try_as_raw_ptr().ok_or("no address")?.cast::<Functions>()
        };
        Ok(Self { functions, version, no_device: Box::new([0; 64]) })
    }

    pub(crate) fn init(&self) -> Result<i32, Code> {
        let mut count = 0;
        // SAFETY: as NCCL calls them.
        unsafe {
            check((self.functions.init)(log))?;
            check((self.functions.devices)(&raw mut count))?;
        }
        Ok(count)
    }

    /// The name and the numbers of a device, in the order of the structure.
    pub(crate) fn properties(&self, device: i32) -> Result<String, Code> {
        #[repr(C)]
        struct Head {
            name: *const c_char,
            path: *const c_char,
            guid: u64,
        }
        let mut memory = [u64::MAX; 64];
        // SAFETY: the structure of every version is shorter, begins with `Head`, and continues with words of 32 bits.
        let (head, words) = unsafe {
            check((self.functions.get_properties)(device, memory.as_mut_ptr().cast()))?;
            let head = &*memory.as_ptr().cast::<Head>();
            let words = memory.as_ptr().add(3).cast::<c_int>();
            (head, std::slice::from_raw_parts(words, 10))
        };
        // SAFETY: the plugin's name ends in NUL.
        let name = unsafe { CStr::from_ptr(head.name) }.to_string_lossy();
        let latency = |word: c_int| c_float::from_bits(word.cast_unsigned());
        let at = usize::from(self.version >= 8);
        let (memory, speed, latency) = (words[0], words[1 + at], latency(words[3 + at]));
        let (comms, recvs) = (words[4 + at], words[5 + at]);
        Ok(format!(
            "{name} path={} guid={} memory={memory} speed={speed} latency={latency} comms={comms} recvs={recvs}",
            head.path.is_null(),
            head.guid
        ))
    }

    pub(crate) fn listen(&self) -> Result<(Handle, [u8; HANDLE_BYTES]), Code> {
        let (mut handle, mut object) = ([0; HANDLE_BYTES], ptr::null_mut());
        // SAFETY: as NCCL calls it.
        let code = unsafe { (self.functions.listen)(0, handle.as_mut_ptr().cast(), &raw mut object) };
        check(code).map(|()| (Handle(object), handle))
    }

    /// One call. `handle` stays at the same address until it returns a connection or an error.
    pub(crate) fn connect(&self, handle: &mut [u8; HANDLE_BYTES]) -> Result<Option<Handle>, Code> {
        let (mut object, device) = (ptr::null_mut(), self.no_device.as_ptr().cast_mut().cast());
        // SAFETY: as NCCL calls it.
        let code = unsafe { (self.functions.connect)(0, handle.as_mut_ptr().cast(), &raw mut object, device) };
        made(code, object)
    }

    pub(crate) fn accept(&self, listener: Handle) -> Result<Option<Handle>, Code> {
        let (mut object, device) = (ptr::null_mut(), self.no_device.as_ptr().cast_mut().cast());
        // SAFETY: as NCCL calls it.
        let code = unsafe { (self.functions.accept)(listener.0, &raw mut object, device) };
        made(code, object)
    }

    /// Registers memory of a kind, and gives it back.
    pub(crate) fn register(&self, end: Handle, buffer: &mut [u8], kind: i32) -> Result<(), Code> {
        let mut registered = ptr::null_mut();
        // SAFETY: as NCCL calls them.
        unsafe {
            let data = buffer.as_mut_ptr().cast();
            check((self.functions.reg_mr)(end.0, data, buffer.len(), kind, &raw mut registered))?;
            check((self.functions.dereg_mr)(end.0, registered))
        }
    }

    /// The buffer stays where it is until the request is complete.
    pub(crate) fn send(&self, end: Handle, buffer: &mut [u8]) -> Result<Option<Handle>, Code> {
        let (mut request, bytes) = (ptr::null_mut(), c_int::try_from(buffer.len()).unwrap_or(c_int::MAX));
        let data = buffer.as_mut_ptr().cast();
        // SAFETY: as NCCL calls it.
        let code = unsafe { (self.functions.isend)(end.0, data, bytes, 7, ptr::null_mut(), &raw mut request) };
        made(code, request)
    }

    /// As [`Self::send`].
    pub(crate) fn receive(&self, end: Handle, buffer: &mut [u8], count: i32) -> Result<Option<Handle>, Code> {
        let (mut request, mut bytes) = (ptr::null_mut(), c_int::try_from(buffer.len()).unwrap_or(c_int::MAX));
        let (mut data, mut tag, mut memory): (Object, _, Object) = (buffer.as_mut_ptr().cast(), 7, ptr::null_mut());
        // SAFETY: as NCCL calls it.
        let code = unsafe {
            let (data, bytes, tag) = (&raw mut data, &raw mut bytes, &raw mut tag);
            (self.functions.irecv)(end.0, count, data, bytes, tag, &raw mut memory, &raw mut request)
        };
        made(code, request)
    }

    /// Whether a flush needs a request, which it does not.
    pub(crate) fn flush(&self, end: Handle, buffer: &mut [u8]) -> Result<bool, Code> {
        let (mut request, mut bytes) = (ptr::null_mut(), c_int::try_from(buffer.len()).unwrap_or(c_int::MAX));
        let (mut data, mut memory): (Object, Object) = (buffer.as_mut_ptr().cast(), ptr::null_mut());
        // SAFETY: as NCCL calls it.
        let code = unsafe {
            let (data, bytes) = (&raw mut data, &raw mut bytes);
            (self.functions.iflush)(end.0, 1, data, bytes, &raw mut memory, &raw mut request)
        };
        check(code).map(|()| !request.is_null())
    }

    /// The bytes of a request that is complete. It must not be used again then.
    pub(crate) fn test(&self, request: Handle) -> Result<Option<usize>, Code> {
        let (mut done, mut bytes) = (-1, -1);
        // SAFETY: as NCCL calls it.
        check(unsafe { (self.functions.test)(request.0, &raw mut done, &raw mut bytes) })?;
        Ok((done == 1).then(|| usize::try_from(bytes).unwrap_or(usize::MAX)))
    }

    /// Closes a connection or a listener by its kind: S, R or L.
    pub(crate) fn close(&self, kind: char, object: Handle) -> Result<(), Code> {
        let close = match kind {
            'S' => self.functions.close_send,
            'R' => self.functions.close_recv,
            _ => self.functions.close_listen,
        };
        // SAFETY: as NCCL calls it.
        check(unsafe { close(object.0) })
    }

    /// The plugin's name, and whether it has a function for memory of devices.
    pub(crate) fn describe(&self) -> (String, bool) {
        // SAFETY: the name ends in NUL.
        let name = unsafe { CStr::from_ptr(self.functions.name) };
        (name.to_string_lossy().into_owned(), !self.functions.reg_mr_dma_buf.is_null())
    }
}
