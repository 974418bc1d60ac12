//! TensorFlow's C API of operations and kernels, found by name at run time, behind types that own what they point to.
//!
//! The declarations are those of `tensorflow/c/ops.h`, `kernels.h`, `tf_tensor.h` and `tf_status.h`, with `*mut c_void` for
//! each opaque structure. [`super::done`] has the one function that goes beyond the API.

#![allow(unsafe_code, reason = "calls of C functions, under the contracts of TensorFlow's headers")]
#![allow(non_snake_case, reason = "the functions have the names of TensorFlow's headers")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

use crate::frameworks::library::Library;
pub(super) use crate::frameworks::status::Code;

/// An opaque structure of TensorFlow.
pub(super) type Opaque = *mut c_void;

macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of TensorFlow that the module calls.
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            fn of(library: &Library) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let name = CString::new(stringify!($name)).map_err(|error| error.to_string())?;
                        let address = library.function(&name)?;
                        // SAFETY: the function of this name has this type in TensorFlow's headers, in all versions that
                        // the Python package accepts.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(address.as_ptr()) }
                    },)*
                })
            }
        }
    };
}

functions! {
    TF_NewStatus() -> Opaque;
    TF_DeleteStatus(Opaque);
    TF_SetStatus(Opaque, c_int, *const c_char);
    TF_GetCode(Opaque) -> c_int;
    TF_Message(Opaque) -> *const c_char;
    TF_NewOpDefinitionBuilder(*const c_char) -> Opaque;
    TF_OpDefinitionBuilderAddAttr(Opaque, *const c_char);
    TF_OpDefinitionBuilderAddInput(Opaque, *const c_char);
    TF_OpDefinitionBuilderAddOutput(Opaque, *const c_char);
    TF_OpDefinitionBuilderSetIsStateful(Opaque, bool);
    TF_OpDefinitionBuilderSetShapeInferenceFunction(Opaque, ShapeFunction);
    TF_RegisterOpDefinition(Opaque, Opaque);
    TF_ShapeInferenceContextNumInputs(Opaque) -> i64;
    TF_ShapeInferenceContextGetInput(Opaque, c_int, Opaque, Opaque);
    TF_ShapeInferenceContextSetOutput(Opaque, c_int, Opaque, Opaque);
    TF_ShapeInferenceContextScalar(Opaque) -> Opaque;
    TF_ShapeInferenceContextVectorFromSize(Opaque, usize) -> Opaque;
    TF_ShapeInferenceContextWithRankAtLeast(Opaque, Opaque, i64, Opaque, Opaque);
    TF_ShapeInferenceContextSubshape(Opaque, Opaque, i64, i64, Opaque, Opaque);
    TF_ShapeInferenceContextConcatenateShapes(Opaque, Opaque, Opaque, Opaque, Opaque);
    TF_NewShapeHandle() -> Opaque;
    TF_DeleteShapeHandle(Opaque);
    TF_NewAsyncKernelBuilder(*const c_char, *const c_char, Create, Compute, Delete) -> Opaque;
    TF_KernelBuilder_HostMemory(Opaque, *const c_char);
    TF_RegisterKernelBuilder(*const c_char, Opaque, Opaque);
    TF_RunAsyncOpKernelDoneCallback(*mut c_void);
    TF_OpKernelConstruction_GetAttrSize(Opaque, *const c_char, *mut i32, *mut i32, Opaque);
    TF_OpKernelConstruction_GetAttrString(Opaque, *const c_char, *mut c_char, usize, Opaque);
    TF_OpKernelConstruction_GetAttrInt64(Opaque, *const c_char, *mut i64, Opaque);
    TF_OpKernelConstruction_Failure(Opaque, Opaque);
    TF_OpKernelContext_Failure(Opaque, Opaque);
    TF_GetFrameId(Opaque) -> u64;
    TF_GetIterId(Opaque) -> i64;
    TF_NumInputs(Opaque) -> c_int;
    TF_GetInput(Opaque, c_int, *mut Opaque, Opaque);
    TF_AllocateOutput(Opaque, c_int, c_int, *const i64, c_int, usize, Opaque) -> Opaque;
    TF_DeleteTensor(Opaque);
    TF_TensorType(Opaque) -> c_int;
    TF_NumDims(Opaque) -> c_int;
    TF_Dim(Opaque, c_int) -> i64;
    TF_TensorByteSize(Opaque) -> usize;
    TF_TensorData(Opaque) -> *mut c_void;
}

/// Infers the shapes of an operation's outputs from a context, and reports errors in a status.
pub(super) type ShapeFunction = unsafe extern "C" fn(Opaque, Opaque);
/// Makes a kernel from the attributes of a node.
pub(super) type Create = unsafe extern "C" fn(Opaque) -> *mut c_void;
/// Starts a kernel. The last argument is the callback for its end.
pub(super) type Compute = unsafe extern "C" fn(*mut c_void, Opaque, *mut c_void);
/// Drops a kernel.
pub(super) type Delete = unsafe extern "C" fn(*mut c_void);

static API: OnceLock<Api> = OnceLock::new();

/// Finds the functions in TensorFlow's library, which Python has loaded from this path.
///
/// # Errors
/// What is missing, as a sentence.
pub(super) fn load(path: &str) -> Result<(), String> {
    let api = Api::of(&Library::loaded(path)?)?;
    // A second call finds the same functions.
    let _ = API.set(api);
    Ok(())
}

/// The functions. `None` before [`load`].
pub(super) fn api() -> Option<&'static Api> {
    API.get()
}

/// A failure of an operation: its code and its text.
#[derive(Clone, Debug)]
pub(super) struct Failed {
    pub(super) code: Code,
    pub(super) text: String,
}

impl Failed {
    pub(super) fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

/// A status, which functions of TensorFlow write to.
pub(super) struct Status {
    api: &'static Api,
    raw: Opaque,
}

impl Status {
    pub(super) fn new(api: &'static Api) -> Self {
        // SAFETY: takes nothing. The result is deleted once, by `drop`.
        Self { api, raw: unsafe { (api.TF_NewStatus)() } }
    }

    pub(super) fn raw(&self) -> Opaque {
        self.raw
    }

    pub(super) fn set(&self, failed: &Failed) {
        set_status(self.api, self.raw, failed);
    }

    /// The text of the failure that a function wrote, if it did.
    pub(super) fn check(&self) -> Result<(), String> {
        // SAFETY: the status is alive.
        if unsafe { (self.api.TF_GetCode)(self.raw) } == 0 {
            return Ok(());
        }
        // SAFETY: the message is a C string that lives as long as the status, and is copied here.
        let message = unsafe { CStr::from_ptr((self.api.TF_Message)(self.raw)) };
        Err(message.to_string_lossy().into_owned())
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        // SAFETY: made by `new`, deleted here only.
        unsafe { (self.api.TF_DeleteStatus)(self.raw) }
    }
}

/// Writes a failure to a status of TensorFlow's.
pub(super) fn set_status(api: &Api, status: Opaque, failed: &Failed) {
    let text = CString::new(failed.text.replace('\0', "\\0")).unwrap_or_default();
    // SAFETY: the status is alive in the caller, and the text is a C string, which is copied.
    unsafe { (api.TF_SetStatus)(status, failed.code as c_int, text.as_ptr()) }
}

/// A tensor, whose memory TensorFlow keeps at least as long.
pub(super) struct Tensor {
    api: &'static Api,
    raw: NonNull<c_void>,
}

impl Tensor {
    /// An input of a running kernel. Its memory is that of the graph's tensor, not a copy.
    ///
    /// # Safety
    /// The context is that of a kernel that runs.
    pub(super) unsafe fn input(api: &'static Api, context: Opaque, index: c_int) -> Result<Self, String> {
        let (status, mut raw) = (Status::new(api), null_mut());
        // SAFETY: the context is alive, and TensorFlow checks the index.
        unsafe { (api.TF_GetInput)(context, index, &raw mut raw, status.raw()) };
        status.check()?;
        NonNull::new(raw).map(|raw| Self { api, raw }).ok_or_else(|| format!("input {index} is no tensor"))
    }

    /// An output of a running kernel.
    ///
    /// # Safety
    /// The context is that of a kernel that runs.
    pub(super) unsafe fn output(
        api: &'static Api,
        context: Opaque,
        (index, dtype): (c_int, c_int),
        shape: &[u64],
        bytes: usize,
    ) -> Result<Self, String> {
        let dimensions = shape.iter().map(|&dimension| i64::try_from(dimension)).collect::<Result<Vec<_>, _>>();
        let dimensions = dimensions.map_err(|error| error.to_string())?;
        let count = c_int::try_from(dimensions.len()).map_err(|error| error.to_string())?;
        let status = Status::new(api);
        let dimensions = dimensions.as_ptr();
        // SAFETY: the context is alive, and the dimensions are as many as `count` says.
        let raw = unsafe { (api.TF_AllocateOutput)(context, index, dtype, dimensions, count, bytes, status.raw()) };
        status.check()?;
        NonNull::new(raw).map(|raw| Self { api, raw }).ok_or_else(|| format!("output {index} has no memory"))
    }

    /// TensorFlow's number of the type.
    pub(super) fn dtype(&self) -> c_int {
        // SAFETY: the tensor is alive.
        unsafe { (self.api.TF_TensorType)(self.raw.as_ptr()) }
    }

    pub(super) fn shape(&self) -> Vec<u64> {
        // SAFETY: the tensor is alive.
        let count = unsafe { (self.api.TF_NumDims)(self.raw.as_ptr()) };
        // SAFETY: as above, and each index is below the number of dimensions.
        let dimension = |index| unsafe { (self.api.TF_Dim)(self.raw.as_ptr(), index) };
        (0..count).map(|index| u64::try_from(dimension(index)).unwrap_or_default()).collect()
    }

    fn memory(&self) -> (*mut u8, usize) {
        // SAFETY: the tensor is alive.
        unsafe { ((self.api.TF_TensorData)(self.raw.as_ptr()).cast(), (self.api.TF_TensorByteSize)(self.raw.as_ptr())) }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self.memory() {
            (data, length) if data.is_null() || length == 0 => &[],
            // SAFETY: the tensor has `length` bytes there as long as it is alive, and kernels do not write to inputs.
            (data, length) => unsafe { std::slice::from_raw_parts(data, length) },
        }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match self.memory() {
            (data, length) if data.is_null() || length == 0 => &mut [],
            // SAFETY: as for `bytes`. An output is its kernel's alone until the kernel ends.
            (data, length) => unsafe { std::slice::from_raw_parts_mut(data, length) },
        }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: made by `input` or `output`, deleted here only. The graph's tensor has further references.
        unsafe { (self.api.TF_DeleteTensor)(self.raw.as_ptr()) }
    }
}
