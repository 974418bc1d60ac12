//! The functions of NCCL.

#![allow(unsafe_code, reason = "foreign functions")]

use std::ffi::{CStr, c_char, c_int, c_void};

use cudarc::nccl::sys::{ncclConfig_v21700, ncclResult_t, ncclUniqueId};

use crate::error::GpuError;
use crate::library::{Library, function_table};

/// A communicator: a pointer that only NCCL reads.
pub(super) type Handle = usize;

function_table! {
    /// What ronde calls of `libnccl.so.2`, except what returns no code.
    Functions {
        ncclGetVersion(*mut c_int);
        ncclGetUniqueId(*mut ncclUniqueId);
        ncclCommInitRankConfig(*mut Handle, c_int, ncclUniqueId, c_int, *mut ncclConfig_v21700);
        ncclCommGetAsyncError(Handle, *mut c_int);
        ncclCommFinalize(Handle);
        ncclCommDestroy(Handle);
        ncclCommAbort(Handle);
        ncclAllReduce(*const c_void, *mut c_void, usize, c_int, c_int, Handle, usize);
        ncclReduceScatter(*const c_void, *mut c_void, usize, c_int, c_int, Handle, usize);
        ncclAllGather(*const c_void, *mut c_void, usize, c_int, Handle, usize);
        ncclBroadcast(*const c_void, *mut c_void, usize, c_int, c_int, Handle, usize);
        ncclRedOpCreatePreMulSum(*mut c_int, *mut c_void, c_int, c_int, Handle);
        ncclRedOpDestroy(c_int, Handle);
    }
}

/// NCCL's functions.
#[derive(Clone, Copy, Debug)]
pub(super) struct NcclTable {
    functions: Functions,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// The code of an operation that has been started.
pub(super) const IN_PROGRESS: c_int = ncclResult_t::ncclInProgress as c_int;
const SUCCESS: c_int = ncclResult_t::ncclSuccess as c_int;

fn checked(code: c_int) -> Result<(), c_int> {
    if code == SUCCESS { Ok(()) } else { Err(code) }
}

/// The result of a call that may only have begun its work.
pub(super) fn accepted(code: c_int) -> Result<(), c_int> {
    if code == IN_PROGRESS { Ok(()) } else { checked(code) }
}

impl NcclTable {
    pub(super) fn load(library: &Library) -> Result<Self, GpuError> {
        let functions = Functions::load(library)?;
        // SAFETY: the signature is that of the header.
        let error_string = unsafe { library.function("ncclGetErrorString")? };
        Ok(Self { functions, error_string })
    }

    pub(super) fn error_text(&self, code: c_int) -> Option<&'static CStr> {
        // SAFETY: any code is allowed.
        let text = unsafe { (self.error_string)(code) };
        // SAFETY: NCCL has returned a constant text.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
    }

    pub(super) fn version(&self) -> Result<c_int, c_int> {
        let mut version = 0;
        // SAFETY: the place for the result is a local of the right type.
        checked(unsafe { (self.functions.ncclGetVersion)(&raw mut version) }).map(|()| version)
    }

    pub(super) fn unique_id(&self) -> Result<ncclUniqueId, c_int> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: the place for the result is a local of the right type.
        checked(unsafe { (self.functions.ncclGetUniqueId)(&raw mut id) }).map(|()| id)
    }

    /// Begins to make a communicator that does not block. It is usable when its [asynchronous error](Self::state) is none.
    pub(super) fn begin(&self, id: ncclUniqueId, ranks: c_int, rank: c_int) -> Result<Handle, c_int> {
        let mut config = ncclConfig_v21700 {
            size: size_of::<ncclConfig_v21700>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
        };
        let mut handle = 0;
        let init = self.functions.ncclCommInitRankConfig;
        // SAFETY: both places are locals of the right types; NCCL copies the configuration.
        match unsafe { init(&raw mut handle, ranks, id, rank, &raw mut config) } {
            SUCCESS | IN_PROGRESS => Ok(handle),
            code => Err(code),
        }
    }

    /// Whether what was started last is still in progress, or its error.
    pub(super) fn state(&self, handle: Handle) -> Result<bool, c_int> {
        let mut state = 0;
        // SAFETY: the communicator lives, and the place for the result is a local of the right type.
        checked(unsafe { (self.functions.ncclCommGetAsyncError)(handle, &raw mut state) })?;
        if state == IN_PROGRESS { Ok(true) } else { checked(state).map(|()| false) }
    }

    /// Enqueues a collective.
    ///
    /// # Safety
    /// Both addresses are in memory of the communicator's device, with as many elements of the type as NCCL defines for the
    /// collective and `count`. They stay there until the stream has executed it.
    pub(super) unsafe fn collective(
        &self,
        handle: Handle,
        call: Call,
        (source, target, count): (u64, u64, usize),
        (dtype, op): (c_int, c_int),
        stream: usize,
    ) -> Result<(), c_int> {
        let (source, target, table) = (source as *const c_void, target as *mut c_void, &self.functions);
        // SAFETY: by this function's contract; the communicator lives.
        let code = unsafe {
            match call {
                Call::AllReduce => (table.ncclAllReduce)(source, target, count, dtype, op, handle, stream),
                Call::ReduceScatter => (table.ncclReduceScatter)(source, target, count, dtype, op, handle, stream),
                Call::AllGather => (table.ncclAllGather)(source, target, count, dtype, handle, stream),
                Call::Broadcast { root } => (table.ncclBroadcast)(source, target, count, dtype, root, handle, stream),
            }
        };
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(code),
        }
    }

    /// Makes an operation that multiplies each contribution by a scalar of the type, given as its bytes, and adds.
    pub(super) fn create_scaled_sum(&self, handle: Handle, scalar: &mut [u8; 8], dtype: c_int) -> Result<c_int, c_int> {
        let mut op = 0;
        let scalar = scalar.as_mut_ptr().cast::<c_void>();
        // SAFETY: both places are locals; no type has more than 8 bytes, and NCCL reads the scalar before it returns.
        let code =
            unsafe { (self.functions.ncclRedOpCreatePreMulSum)(&raw mut op, scalar, dtype, HOST_IMMEDIATE, handle) };
        checked(code).map(|()| op)
    }

    /// Releases such an operation. Collectives that were enqueued with it keep its value.
    pub(super) fn destroy_op(&self, handle: Handle, op: c_int) -> Result<(), c_int> {
        // SAFETY: the communicator lives, and the operation is one of its own.
        checked(unsafe { (self.functions.ncclRedOpDestroy)(op, handle) })
    }

    pub(super) fn finalize(&self, handle: Handle) -> Result<(), c_int> {
        // SAFETY: the communicator lives.
        match unsafe { (self.functions.ncclCommFinalize)(handle) } {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(code),
        }
    }

    /// Ends a communicator, which is not used afterwards.
    pub(super) fn destroy(&self, handle: Handle) -> Result<(), c_int> {
        // SAFETY: the communicator lives, and its owner forgets it.
        checked(unsafe { (self.functions.ncclCommDestroy)(handle) })
    }

    /// Aborts a communicator, which is not used afterwards. May block until its kernels have ended.
    pub(super) fn abort(&self, handle: Handle) -> Result<(), c_int> {
        // SAFETY: the communicator lives, and its owner forgets it.
        checked(unsafe { (self.functions.ncclCommAbort)(handle) })
    }
}

/// A collective of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast { root: c_int },
}

/// `ncclScalarHostImmediate`.
const HOST_IMMEDIATE: c_int = 1;

/// NCCL's name of a code. Later versions have more codes.
pub(super) fn name_of(code: c_int) -> &'static str {
    const NAMES: [&str; 9] = [
        "ncclSuccess",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclInternalError",
        "ncclInvalidArgument",
        "ncclInvalidUsage",
        "ncclRemoteError",
        "ncclInProgress",
        "ncclTimeout",
    ];
    usize::try_from(code).ok().and_then(|code| NAMES.get(code).copied()).unwrap_or("a code of a later version")
}

/// `NCCL_CONFIG_INITIALIZER` of 2.18, whose fields later versions have, too: they read the size.
const CONFIG_MAGIC: u32 = 0xcafe_beef;
const CONFIG_VERSION: u32 = 21_800;
const UNDEFINED: c_int = c_int::MIN;
