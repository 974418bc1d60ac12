//! The C structs of XLA's foreign function interface (FFI), and safe access to a call's arguments.
//!
//! Only leading fields are declared: those of API version 0.1, which the handler declares to XLA, and nothing that a later
//! version may append. Fields of tables are used only if the table's own `struct_size` covers them.
//!
//! The contract of the interface, on which the unsafe code relies: a call frame and everything that it points to stay valid
//! until the handler returns, and, if the handler returns a future, until this future is completed.

#![allow(unsafe_code, reason = "pointers of XLA, under the module's contract")]

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::{offset_of, size_of};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{NonNull, null_mut};

use crate::frameworks::status::Code;

/// Returns the address of the function that XLA calls for each collective.
pub(super) fn handler_address() -> usize {
    handler as *const () as usize
}

/// Registers the handler with an XLA, for its programs on CPUs.
///
/// # Errors
/// XLA's reason.
pub(super) fn register(table: NonNull<c_void>) -> Result<(), String> {
    // SAFETY: the function of this name takes nothing and returns the table, which is valid as long as the process.
    let api = unsafe { std::mem::transmute::<*mut c_void, GetApi>(table.as_ptr())() };
    let mut arguments = HandlerRegister {
        struct_size: offset_of!(HandlerRegister, traits) + size_of::<u32>(),
        extension: null_mut(),
        name: ByteSpan::of(TARGET),
        platform: ByteSpan::of("Host"),
        stages: [None, None, None, Some(handler)],
        traits: 0,
    };
    // SAFETY: the arguments are as the interface defines them, and the texts and the handler live as long as the process.
    // An error is destroyed by the one who gets it, once its text is copied.
    unsafe {
        if (*api).struct_size < offset_of!(Api, handler_register) + size_of::<usize>() {
            return Err("XLA's interface for foreign functions lacks registration".to_owned());
        }
        let error = ((*api).handler_register)(&raw mut arguments);
        if error.is_null() {
            return Ok(());
        }
        let text = message_of(api, error);
        destroy(api, error);
        Err(text)
    }
}

type GetApi = unsafe extern "C" fn() -> *const Api;

/// The name of the handler in programs of TensorFlow; `ronde.jax` registers it under the same.
const TARGET: &str = "ronde_collective";

/// Receives calls of compiled programs.
pub(super) trait Handler {
    /// Submits the call's operation. The call is complete on return, unless it has a promise: then when that is fulfilled.
    fn call(call: &Call<'_>) -> Result<(), Failure>;
}

/// The failure of a call, which XLA raises in the program.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) code: Code,
    pub(super) text: String,
}

/// A call's arguments, attributes and results.
pub(super) struct Call<'a> {
    frame: &'a CallFrame,
    /// The future of the promise, once there is one.
    future: Cell<*mut c_void>,
}

/// A tensor of a call: its dimensions and the address of its elements, which are dense.
pub(super) struct Tensor {
    pub(super) shape: Vec<u64>,
    pub(super) address: usize,
}

impl Call<'_> {
    /// The arguments, without the token that orders the calls of a program.
    pub(super) fn arguments(&self) -> Vec<Tensor> {
        let Buffers { size, buffers, .. } = self.frame.arguments;
        // SAFETY: XLA passes as many buffers as `size` says.
        unsafe { tensors(size, buffers) }
    }

    /// The results, without the token.
    pub(super) fn results(&self) -> Vec<Tensor> {
        let Buffers { size, buffers, .. } = self.frame.results;
        // SAFETY: as for the arguments.
        unsafe { tensors(size, buffers) }
    }

    /// Makes the promise of a call that is to be complete later than its return; `None` if this version of XLA has none.
    pub(super) fn promise(&self) -> Option<Promise> {
        let promise = Promise::new(self.frame.api)?;
        self.future.set(promise.future);
        Some(promise)
    }

    /// A text attribute.
    pub(super) fn text(&self, name: &str) -> Result<&str, Failure> {
        let value = self.attribute(name, ATTRIBUTE_STRING)?.cast::<ByteSpan>();
        // SAFETY: attributes of this type are byte spans.
        let bytes = unsafe { (*value).bytes() };
        std::str::from_utf8(bytes).map_err(|_| other_release(name))
    }

    /// An integer attribute.
    pub(super) fn integer(&self, name: &str) -> Result<i64, Failure> {
        // SAFETY: `scalar` has checked the type of the value.
        Ok(unsafe { self.scalar(name, DTYPE_S64)?.cast::<i64>().read() })
    }

    /// A floating-point attribute.
    pub(super) fn float(&self, name: &str) -> Result<f64, Failure> {
        // SAFETY: `scalar` has checked the type of the value.
        Ok(unsafe { self.scalar(name, DTYPE_F64)?.cast::<f64>().read() })
    }

    /// Returns the address of a number of this type.
    fn scalar(&self, name: &str, dtype: c_int) -> Result<*const c_void, Failure> {
        let value = self.attribute(name, ATTRIBUTE_SCALAR)?.cast::<Scalar>();
        // SAFETY: attributes of this type are scalars.
        let scalar = unsafe { &*value };
        if scalar.dtype == dtype { Ok(scalar.value) } else { Err(other_release(name)) }
    }

    fn attribute(&self, name: &str, kind: c_int) -> Result<*const c_void, Failure> {
        let Attributes { size, kinds, names, values, .. } = self.frame.attributes;
        for index in 0..usize::try_from(size).unwrap_or(0) {
            // SAFETY: XLA passes three arrays of `size` elements, and names as pointers to byte spans.
            let (each, found, value) = unsafe { ((**names.add(index)).bytes(), *kinds.add(index), *values.add(index)) };
            if each == name.as_bytes() && found == kind {
                return Ok(value);
            }
        }
        Err(other_release(name))
    }
}

/// Completes a call, also after its return. One that is dropped completes it with a failure, so that XLA never waits in vain.
pub(super) struct Promise {
    api: *const Api,
    /// Null once it is completed.
    future: *mut c_void,
}

// SAFETY: XLA's interface lets any thread complete a future, and its table of functions is immutable and lives as long as the
// process.
unsafe impl Send for Promise {}

impl Promise {
    /// Makes a promise, if this version of XLA can wait for one.
    fn new(api: *const Api) -> Option<Self> {
        // SAFETY: XLA's table is valid for as many bytes as it says, and nothing beyond is read.
        let create = unsafe {
            let covers = (*api).struct_size >= offset_of!(Api, future_set_error) + size_of::<usize>();
            if covers { (*api).future_create } else { None }
        }?;
        let mut arguments =
            FutureCreate { struct_size: 2 * size_of::<usize>(), extension: null_mut(), future: null_mut() };
        // SAFETY: the arguments are as the interface defines them. An error is destroyed by the one who gets it.
        let future = unsafe {
            let error = create(&raw mut arguments);
            if error.is_null() { arguments.future } else { destroy(api, error) }
        };
        (!future.is_null()).then_some(Self { api, future })
    }

    /// Completes the call.
    pub(super) fn complete(mut self, outcome: Result<(), Failure>) {
        self.set(outcome);
    }

    fn set(&mut self, outcome: Result<(), Failure>) {
        let future = std::mem::replace(&mut self.future, null_mut());
        let size = 3 * size_of::<usize>();
        // SAFETY: `new` has checked that the table has these functions. XLA takes ownership of an error. What the functions
        // return is null, because the future is completed only once: it is null from now on.
        unsafe {
            match outcome {
                Ok(()) => {
                    let mut arguments = FutureSet { struct_size: size, extension: null_mut(), future };
                    if let Some(set) = (*self.api).future_set_available {
                        set(&raw mut arguments);
                    }
                }
                Err(failure) => {
                    let error = error_of(self.api, &failure);
                    let struct_size = size + size_of::<usize>();
                    let mut arguments = FutureFail { struct_size, extension: null_mut(), future, error };
                    if let Some(set) = (*self.api).future_set_error {
                        set(&raw mut arguments);
                    }
                }
            }
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if !self.future.is_null() {
            let text = "ronde has a bug: a call was dropped before its end".to_owned();
            self.set(Err(Failure { code: Code::Internal, text }));
        }
    }
}

/// What XLA calls. Returns null, or an error that XLA owns.
extern "C" fn handler(frame: *mut CallFrame) -> *mut c_void {
    // SAFETY: by the module's contract the frame is valid, and only this call uses it. The future lies after the fields of the
    // first version, but every version since has had it; it is written only if XLA's table has futures.
    unsafe {
        if declare_version((*frame).extension) || (*frame).stage != STAGE_EXECUTE {
            return null_mut();
        }
        let call = Call { frame: &*frame, future: Cell::new(null_mut()) };
        let outcome = catch_unwind(AssertUnwindSafe(|| <super::Submitter as Handler>::call(&call)));
        let future = call.future.get();
        if !future.is_null() {
            // Also after a panic: the promise completes the future, and until then the thread may write to XLA's buffers.
            (*frame).future = future;
            return null_mut();
        }
        let failure = match outcome {
            Ok(Ok(())) => return null_mut(),
            Ok(Err(failure)) => failure,
            Err(_) => Failure { code: Code::Internal, text: "ronde has a bug: its handler panicked".to_owned() },
        };
        error_of((*frame).api, &failure)
    }
}

/// Answers XLA's question for the version of the interface, if the call is one.
///
/// # Safety
/// The extensions are those of a call frame.
unsafe fn declare_version(mut extension: *mut Extension) -> bool {
    // SAFETY: extensions form a list that ends with null, and one of this kind has metadata to fill in.
    unsafe {
        while !extension.is_null() {
            if (*extension).kind == EXTENSION_METADATA {
                let metadata = (*extension.cast::<MetadataExtension>()).metadata;
                (*metadata).version.major = 0;
                (*metadata).version.minor = 1;
                return true;
            }
            extension = (*extension).next;
        }
        false
    }
}

/// Makes an error of XLA.
///
/// # Safety
/// The table is XLA's.
unsafe fn error_of(api: *const Api, failure: &Failure) -> *mut c_void {
    // A NUL would end the text early.
    let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
    let mut arguments = ErrorCreate {
        struct_size: offset_of!(ErrorCreate, code) + size_of::<c_int>(),
        extension: null_mut(),
        message: text.as_ptr(),
        code: failure.code as c_int,
    };
    // SAFETY: the arguments are as the interface defines them, and XLA copies the text.
    unsafe { ((*api).error_create)(&raw mut arguments) }
}

/// The text of an error.
///
/// # Safety
/// The table is XLA's, and the error has come from it.
unsafe fn message_of(api: *const Api, error: *mut c_void) -> String {
    let mut arguments = ErrorGetMessage {
        struct_size: 4 * size_of::<usize>(),
        extension: null_mut(),
        error,
        message: std::ptr::null(),
    };
    // SAFETY: the arguments are as the interface defines them. The text is a C string that lives as long as the error.
    unsafe {
        ((*api).error_get_message)(&raw mut arguments);
        if arguments.message.is_null() {
            String::new()
        } else {
            CStr::from_ptr(arguments.message).to_string_lossy().into_owned()
        }
    }
}

/// Destroys an error, and returns null.
///
/// # Safety
/// The table is XLA's, and the error has come from it.
unsafe fn destroy(api: *const Api, error: *mut c_void) -> *mut c_void {
    let mut arguments = ErrorDestroy { struct_size: 3 * size_of::<usize>(), extension: null_mut(), error };
    // SAFETY: the arguments are as the interface defines them.
    unsafe { ((*api).error_destroy)(&raw mut arguments) };
    null_mut()
}

/// Returns the tensors among buffers.
///
/// # Safety
/// There are `size` pointers to valid buffers.
unsafe fn tensors(size: i64, buffers: *const *const Buffer) -> Vec<Tensor> {
    let count = usize::try_from(size).unwrap_or(0);
    let mut found = Vec::with_capacity(count);
    for index in 0..count {
        // SAFETY: by this function's contract; a buffer has as many dimensions as its rank says.
        unsafe {
            let buffer = &**buffers.add(index);
            if buffer.dtype == DTYPE_TOKEN {
                continue;
            }
            let rank = usize::try_from(buffer.rank).unwrap_or(0);
            let shape = (0..rank).map(|axis| u64::try_from(*buffer.dimensions.add(axis)).unwrap_or(0)).collect();
            found.push(Tensor { shape, address: buffer.data as usize });
        }
    }
    found
}

fn other_release(name: &str) -> Failure {
    let text = format!(
        "a compiled program calls ronde without a usable attribute {name}: another release of ronde has compiled it; compile it \
         again with this one"
    );
    Failure { code: Code::InvalidArgument, text }
}

const EXTENSION_METADATA: c_int = 1;
const STAGE_EXECUTE: c_int = 3;
const ATTRIBUTE_SCALAR: c_int = 3;
const ATTRIBUTE_STRING: c_int = 4;
const DTYPE_S64: c_int = 5;
const DTYPE_F64: c_int = 12;
const DTYPE_TOKEN: c_int = 17;

#[repr(C)]
struct Extension {
    struct_size: usize,
    kind: c_int,
    next: *mut Self,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

#[repr(C)]
struct Metadata {
    struct_size: usize,
    version: Version,
}

#[repr(C)]
struct Version {
    struct_size: usize,
    extension: *mut Extension,
    major: c_int,
    minor: c_int,
}

#[repr(C)]
struct CallFrame {
    struct_size: usize,
    extension: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: Buffers,
    results: Buffers,
    attributes: Attributes,
    future: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Buffers {
    struct_size: usize,
    extension: *mut Extension,
    size: i64,
    kinds: *const c_int,
    buffers: *const *const Buffer,
}

#[repr(C)]
struct Buffer {
    struct_size: usize,
    extension: *mut Extension,
    dtype: c_int,
    data: *mut c_void,
    rank: i64,
    dimensions: *const i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Attributes {
    struct_size: usize,
    extension: *mut Extension,
    size: i64,
    kinds: *const c_int,
    names: *const *const ByteSpan,
    values: *const *const c_void,
}

#[repr(C)]
struct ByteSpan {
    start: *const u8,
    length: usize,
}

impl ByteSpan {
    const fn of(text: &'static str) -> Self {
        Self { start: text.as_ptr(), length: text.len() }
    }

    /// # Safety
    /// The span is one of a valid call frame.
    unsafe fn bytes<'a>(&self) -> &'a [u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: a span that is not empty has `length` bytes from `start`, for as long as the frame is valid.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }
}

#[repr(C)]
struct Scalar {
    dtype: c_int,
    value: *const c_void,
}

/// XLA's table of functions. Those that are not used are addresses.
#[repr(C)]
struct Api {
    struct_size: usize,
    extension: *mut Extension,
    version: Version,
    internal: *const c_void,
    error_create: unsafe extern "C" fn(*mut ErrorCreate) -> *mut c_void,
    error_get_message: unsafe extern "C" fn(*mut ErrorGetMessage),
    error_destroy: unsafe extern "C" fn(*mut ErrorDestroy),
    handler_register: unsafe extern "C" fn(*mut HandlerRegister) -> *mut c_void,
    stream_get: usize,
    type_register: usize,
    execution_context_get: usize,
    state_set: usize,
    state_get: usize,
    device_memory_allocate: usize,
    device_memory_free: usize,
    thread_pool_schedule: usize,
    thread_pool_num_threads: usize,
    future_create: Option<unsafe extern "C" fn(*mut FutureCreate) -> *mut c_void>,
    future_set_available: Option<unsafe extern "C" fn(*mut FutureSet) -> *mut c_void>,
    future_set_error: Option<unsafe extern "C" fn(*mut FutureFail) -> *mut c_void>,
}

#[repr(C)]
struct ErrorCreate {
    struct_size: usize,
    extension: *mut Extension,
    message: *const c_char,
    code: c_int,
}

#[repr(C)]
struct HandlerRegister {
    struct_size: usize,
    extension: *mut Extension,
    name: ByteSpan,
    platform: ByteSpan,
    /// Instantiate, prepare, initialize, execute.
    stages: [Option<extern "C" fn(*mut CallFrame) -> *mut c_void>; 4],
    traits: u32,
}

#[repr(C)]
struct ErrorGetMessage {
    struct_size: usize,
    extension: *mut Extension,
    error: *mut c_void,
    message: *const c_char,
}

#[repr(C)]
struct ErrorDestroy {
    struct_size: usize,
    extension: *mut Extension,
    error: *mut c_void,
}

#[repr(C)]
struct FutureCreate {
    struct_size: usize,
    extension: *mut Extension,
    future: *mut c_void,
}

#[repr(C)]
struct FutureSet {
    struct_size: usize,
    extension: *mut Extension,
    future: *mut c_void,
}

#[repr(C)]
struct FutureFail {
    struct_size: usize,
    extension: *mut Extension,
    future: *mut c_void,
    error: *mut c_void,
}
