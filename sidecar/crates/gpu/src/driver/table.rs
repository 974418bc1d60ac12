//! The functions of the driver API. Names with `_v2` are those to which the header's names expand.

#![allow(unsafe_code, reason = "types of foreign functions")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::library::function_table;

/// A context, a stream or an event: a pointer that only the driver reads.
pub(crate) type Handle = usize;

function_table! {
    /// What ronde calls of `libcuda.so.1`. All of it is in CUDA 11.4 and later.
    DriverTable {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut c_int, c_int);
        cuDeviceGetName(*mut c_char, c_int, c_int);
        cuDeviceGetPCIBusId(*mut c_char, c_int, c_int);
        cuDeviceTotalMem_v2(*mut usize, c_int);
        cuDeviceCanAccessPeer(*mut c_int, c_int, c_int);
        cuDevicePrimaryCtxRetain(*mut Handle, c_int);
        cuDevicePrimaryCtxRelease_v2(c_int);
        cuDevicePrimaryCtxGetState(c_int, *mut c_uint, *mut c_int);
        cuCtxPushCurrent_v2(Handle);
        cuCtxPopCurrent_v2(*mut Handle);
        cuStreamCreate(*mut Handle, c_uint);
        cuStreamDestroy_v2(Handle);
        cuStreamWaitEvent(Handle, Handle, c_uint);
        cuStreamIsCapturing(Handle, *mut c_int);
        cuThreadExchangeStreamCaptureMode(*mut c_int);
        cuEventCreate(*mut Handle, c_uint);
        cuEventDestroy_v2(Handle);
        cuEventRecord(Handle, Handle);
        cuEventQuery(Handle);
        cuEventSynchronize(Handle);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemAlloc_v2(*mut u64, usize);
        cuMemFree_v2(u64);
        cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle);
        cuMemcpyDtoH_v2(*mut c_void, u64, usize);
        cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle);
        cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle);
        cuPointerGetAttribute(*mut c_void, c_int, u64);
        cuGetErrorName(c_int, *mut *const c_char);
        cuGetErrorString(c_int, *mut *const c_char);
    }
}
