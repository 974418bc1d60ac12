//! NCCL's types and tables, as its header `nccl_net.h` documents them (in the packages of NCCL 2.20 to 2.23, which describe the
//! tables up to version 8). Later releases of NCCL load tables of these versions, too.

use std::ffi::{c_char, c_float, c_int, c_ulong, c_void};

/// A result of a call (`ncclResult_t`).
pub(crate) type Status = c_int;
/// `ncclSuccess`.
pub(crate) const SUCCESS: Status = 0;
/// `ncclSystemError`.
pub(crate) const SYSTEM_ERROR: Status = 2;
/// `ncclInternalError`.
pub(crate) const INTERNAL_ERROR: Status = 3;
/// `ncclInvalidUsage`.
pub(crate) const INVALID_USAGE: Status = 5;
/// `ncclRemoteError`.
pub(crate) const REMOTE_ERROR: Status = 6;

/// `NCCL_PTR_HOST`: memory of the host.
pub(crate) const HOST_MEMORY: c_int = 1;
/// `NCCL_LOG_WARN`.
pub(crate) const LOG_WARN: c_int = 2;
/// `NCCL_LOG_INFO`.
pub(crate) const LOG_INFO: c_int = 3;
/// `NCCL_NET`: the subsystem of a line in NCCL's log.
pub(crate) const LOG_NET: c_ulong = 16;

/// NCCL's logger (`ncclDebugLogger_t`): level, subsystems, file, line, format.
pub(crate) type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// Properties of a device in version 6.
#[repr(C)]
pub(crate) struct PropertiesV6 {
    pub(crate) name: *const c_char,
    pub(crate) pci_path: *const c_char,
    pub(crate) guid: u64,
    pub(crate) ptr_support: c_int,
    pub(crate) speed: c_int,
    pub(crate) port: c_int,
    pub(crate) latency: c_float,
    pub(crate) max_comms: c_int,
    pub(crate) max_recvs: c_int,
}

/// Properties of a device in version 7.
#[repr(C)]
pub(crate) struct PropertiesV7 {
    pub(crate) base: PropertiesV6,
    pub(crate) device_type: c_int,
    pub(crate) device_version: c_int,
}

/// Properties of a device in version 8, which has a member in the middle.
#[repr(C)]
pub(crate) struct PropertiesV8 {
    pub(crate) name: *const c_char,
    pub(crate) pci_path: *const c_char,
    pub(crate) guid: u64,
    pub(crate) ptr_support: c_int,
    pub(crate) reg_is_global: c_int,
    pub(crate) speed: c_int,
    pub(crate) port: c_int,
    pub(crate) latency: c_float,
    pub(crate) max_comms: c_int,
    pub(crate) max_recvs: c_int,
    pub(crate) device_type: c_int,
    pub(crate) device_version: c_int,
}

pub(crate) type Init = extern "C" fn(Option<Logger>) -> Status;
pub(crate) type Devices = unsafe extern "C" fn(*mut c_int) -> Status;
pub(crate) type GetProperties<P> = unsafe extern "C" fn(c_int, *mut P) -> Status;
pub(crate) type Listen = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> Status;
pub(crate) type ConnectV6 = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> Status;
pub(crate) type ConnectV7 = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void, *mut c_void) -> Status;
pub(crate) type AcceptV6 = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> Status;
pub(crate) type AcceptV7 = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut c_void) -> Status;
pub(crate) type RegMr<S> = unsafe extern "C" fn(*mut c_void, *mut c_void, S, c_int, *mut *mut c_void) -> Status;
pub(crate) type DeregMr = extern "C" fn(*mut c_void, *mut c_void) -> Status;
pub(crate) type Isend =
    unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, c_int, *mut c_void, *mut *mut c_void) -> Status;
pub(crate) type Irecv = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;
pub(crate) type Iflush = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;
pub(crate) type Test = unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> Status;
pub(crate) type Close = unsafe extern "C" fn(*mut c_void) -> Status;
/// An optional function that this plugin does not have.
pub(crate) type Absent = Option<unsafe extern "C" fn() -> Status>;

/// The members of every version's table, in their order.
#[repr(C)]
pub(crate) struct Table<Properties, Connect, Accept, Size> {
    pub(crate) name: *const c_char,
    pub(crate) init: Init,
    pub(crate) devices: Devices,
    pub(crate) get_properties: GetProperties<Properties>,
    pub(crate) listen: Listen,
    pub(crate) connect: Connect,
    pub(crate) accept: Accept,
    pub(crate) reg_mr: RegMr<Size>,
    /// Memory of devices, which is not supported.
    pub(crate) reg_mr_dma_buf: Absent,
    pub(crate) dereg_mr: DeregMr,
    pub(crate) isend: Isend,
    pub(crate) irecv: Irecv,
    pub(crate) iflush: Iflush,
    pub(crate) test: Test,
    pub(crate) close_send: Close,
    pub(crate) close_recv: Close,
    pub(crate) close_listen: Close,
}

/// Version 6.
pub(crate) type TableV6 = Table<PropertiesV6, ConnectV6, AcceptV6, c_int>;

/// Versions 7 and 8 add two functions for devices.
#[repr(C)]
pub(crate) struct WithDevices<Table> {
    pub(crate) table: Table,
    pub(crate) get_device_mr: Absent,
    pub(crate) irecv_consumed: Absent,
}

/// Version 7.
pub(crate) type TableV7 = WithDevices<Table<PropertiesV7, ConnectV7, AcceptV7, c_int>>;
/// Version 8.
pub(crate) type TableV8 = WithDevices<Table<PropertiesV8, ConnectV7, AcceptV7, usize>>;

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// The sizes and offsets that a C compiler gives the structures of the header on a 64-bit system.
    #[test]
    fn layouts_are_those_of_the_header() {
        assert_eq!((size_of::<PropertiesV6>(), size_of::<PropertiesV7>(), size_of::<PropertiesV8>()), (48, 56, 64));
        assert_eq!((offset_of!(PropertiesV6, ptr_support), offset_of!(PropertiesV6, max_recvs)), (24, 44));
        assert_eq!((offset_of!(PropertiesV7, device_type), offset_of!(PropertiesV7, device_version)), (48, 52));
        assert_eq!((offset_of!(PropertiesV8, reg_is_global), offset_of!(PropertiesV8, speed)), (28, 32));
        assert_eq!((offset_of!(PropertiesV8, latency), offset_of!(PropertiesV8, device_version)), (40, 56));
        let pointers = |bytes: usize| bytes / size_of::<*const c_void>();
        assert_eq!(pointers(size_of::<TableV6>()), 17);
        assert_eq!((pointers(size_of::<TableV7>()), pointers(size_of::<TableV8>())), (19, 19));
        let at = |offset: usize| pointers(offset);
        assert_eq!(at(offset_of!(TableV6, reg_mr_dma_buf)), 8);
        assert_eq!((at(offset_of!(TableV6, test)), at(offset_of!(TableV6, close_listen))), (13, 16));
        assert_eq!(at(offset_of!(TableV8, irecv_consumed)), 18);
    }
}
