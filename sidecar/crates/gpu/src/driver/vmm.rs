//! [`DeviceSegment`]: device memory that a worker exports as a descriptor and its sidecar imports.
//!
//! Both processes map the same physical memory, each at an address of its own. The memory exists until both have released
//! it, so the end of one process takes nothing from the other.

#![allow(unsafe_code, reason = "calls of the driver")]

use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAllocationGranularity_flags, CUmemAllocationType, CUmemLocationType,
};

use super::context::Context;
use crate::error::GpuError;
use crate::library::function_table;
use crate::span::DeviceSpan;

function_table! {
    /// What ronde calls of `libcuda.so.1` for memory that processes share. All of it is in CUDA 11.4 and later.
    VmmTable {
        cuMemGetAllocationGranularity(*mut usize, *const AllocationProperties, c_int);
        cuMemCreate(*mut u64, usize, *const AllocationProperties, c_ulonglong);
        cuMemRelease(u64);
        cuMemExportToShareableHandle(*mut c_void, u64, c_int, c_ulonglong);
        cuMemImportFromShareableHandle(*mut u64, *mut c_void, c_int);
        cuMemGetAllocationPropertiesFromHandle(*mut AllocationProperties, u64);
        cuMemAddressReserve(*mut u64, usize, usize, u64, c_ulonglong);
        cuMemAddressFree(u64, usize);
        cuMemMap(u64, usize, usize, u64, c_ulonglong);
        cuMemSetAccess(u64, usize, *const Access, usize);
        cuMemUnmap(u64, usize);
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`, with numbers in place of enums.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    metadata: *const c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    location: Location,
    flags: c_int,
}

impl Location {
    fn device(id: c_int) -> Self {
        Self { kind: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_int, id }
    }
}

impl AllocationProperties {
    /// Memory of a device that can be exported as a descriptor.
    fn exportable(id: c_int) -> Self {
        Self {
            kind: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as c_int,
            handle_types: POSIX_DESCRIPTOR,
            location: Location::device(id),
            metadata: std::ptr::null(),
            flags: [0; 8],
        }
    }
}

/// Device memory, mapped in this process, that another process may have mapped, too.
#[derive(Debug)]
pub struct DeviceSegment {
    /// Declared first: unmapped before the memory is released.
    mapping: Mapping,
    physical: Physical,
}

/// Physical memory of a device, while this process refers to it.
#[derive(Debug)]
struct Physical {
    context: Arc<Context>,
    handle: u64,
}

/// Addresses of a device, with or without memory.
#[derive(Debug)]
struct Mapping {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
    is_mapped: bool,
}

impl DeviceSegment {
    /// Allocates at least `bytes` bytes, rounded up to what the device allocates at least (2 MiB).
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], and the driver's other errors.
    pub fn create(context: &Arc<Context>, bytes: usize) -> Result<Self, GpuError> {
        let properties = AllocationProperties::exportable(context.device());
        let granularity = granularity(context)?;
        let bytes = bytes.max(1).checked_next_multiple_of(granularity);
        let bytes = bytes.ok_or_else(|| GpuError::argument("so many bytes do not fit an address space"))?;
        let mut handle = 0;
        // SAFETY: the place for the result and the properties are locals of the right types.
        context.call("cuMemCreate", |_| unsafe {
            (context.vmm().cuMemCreate)(&raw mut handle, bytes, &raw const properties, 0)
        })?;
        Self::map(Physical { context: Arc::clone(context), handle }, bytes)
    }

    /// Maps memory that another process has exported. The driver checks that the descriptor is one of device memory, and that
    /// this has as many bytes.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for memory of another device or of an impossible size, and the driver's errors.
    pub fn import(context: &Arc<Context>, descriptor: BorrowedFd<'_>, bytes: usize) -> Result<Self, GpuError> {
        let granularity = granularity(context)?;
        if bytes == 0 || !bytes.is_multiple_of(granularity) {
            return Err(GpuError::argument(format!(
                "{bytes} bytes of device memory are no multiple of {granularity}; name the size of the allocation"
            )));
        }
        let mut handle = 0;
        // CUDA takes the number of the descriptor in place of an address.
        let number = std::ptr::without_provenance_mut(usize::try_from(descriptor.as_raw_fd()).unwrap_or_default());
        // SAFETY: the place for the result is a local of the right type, and the descriptor is open.
        context.call("cuMemImportFromShareableHandle", |_| unsafe {
            (context.vmm().cuMemImportFromShareableHandle)(&raw mut handle, number, POSIX_DESCRIPTOR)
        })?;
        let physical = Physical { context: Arc::clone(context), handle };
        let found = physical.device()?;
        if found != context.device() {
            let ordinal = context.ordinal();
            return Err(GpuError::argument(format!(
                "the memory is on GPU {found}, but was given as memory of GPU {ordinal}; name its own device"
            )));
        }
        Self::map(physical, bytes)
    }

    fn map(physical: Physical, bytes: usize) -> Result<Self, GpuError> {
        let context = Arc::clone(&physical.context);
        let mut address = 0;
        // SAFETY: the place for the result is a local of the right type.
        context.call("cuMemAddressReserve", |_| unsafe {
            (context.vmm().cuMemAddressReserve)(&raw mut address, bytes, 0, 0, 0)
        })?;
        let mut mapping = Mapping { context: Arc::clone(&context), address, bytes, is_mapped: false };
        // SAFETY: these addresses are reserved, and nothing is mapped there.
        context.call("cuMemMap", |_| unsafe { (context.vmm().cuMemMap)(address, bytes, 0, physical.handle, 0) })?;
        mapping.is_mapped = true;
        let access = Access {
            location: Location::device(context.device()),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as c_int,
        };
        // SAFETY: the addresses are mapped; the description is a local.
        context.call("cuMemSetAccess", |_| unsafe {
            (context.vmm().cuMemSetAccess)(address, bytes, &raw const access, 1)
        })?;
        Ok(Self { mapping, physical })
    }

    /// A descriptor by which another process can import the memory.
    ///
    /// # Errors
    /// The driver's, for example without a free descriptor.
    pub fn export(&self) -> Result<OwnedFd, GpuError> {
        let (context, mut descriptor) = (&self.physical.context, -1);
        // SAFETY: for this type of handle the result is a C int, and the place for it is a local.
        context.call("cuMemExportToShareableHandle", |_| unsafe {
            let place = (&raw mut descriptor).cast::<c_void>();
            (context.vmm().cuMemExportToShareableHandle)(place, self.physical.handle, POSIX_DESCRIPTOR, 0)
        })?;
        if descriptor < 0 {
            return Err(GpuError::argument("the driver exported device memory without a descriptor"));
        }
        // SAFETY: the driver has opened it for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// The device's number.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.mapping.context.ordinal()
    }

    /// The first address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.mapping.address
    }

    /// The length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.mapping.bytes
    }

    /// A part of the segment, which stays mapped while the part is used.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for bytes outside of it.
    pub fn part(self: &Arc<Self>, offset: u64, bytes: u64) -> Result<DeviceSpan, GpuError> {
        let whole = self.bytes();
        if offset.checked_add(bytes).is_none_or(|end| end > whole as u64) {
            return Err(GpuError::argument(format!(
                "bytes {offset} to {offset}+{bytes} are outside of device memory of {whole} bytes"
            )));
        }
        let length = usize::try_from(bytes).map_err(|error| GpuError::argument(error.to_string()))?;
        let keep: crate::span::Keep = Arc::clone(self) as _;
        // SAFETY: within the mapping, which `keep` keeps. Who else uses the bytes is the program's to order, as for all
        // device memory; whatever it does, only values of these bytes depend on it.
        Ok(unsafe { DeviceSpan::new(self.ordinal(), self.address() + offset, length, Some(keep)) })
    }
}

impl Physical {
    /// The number of the device with this memory.
    fn device(&self) -> Result<c_int, GpuError> {
        let (context, mut found) = (&self.context, AllocationProperties::exportable(-1));
        // SAFETY: the place for the result is a local of the right type.
        context.call("cuMemGetAllocationPropertiesFromHandle", |_| unsafe {
            (context.vmm().cuMemGetAllocationPropertiesFromHandle)(&raw mut found, self.handle)
        })?;
        Ok(found.location.id)
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let context = &self.context;
        // SAFETY: this value's own reference, released once. Mappings keep the memory by themselves.
        context.call_on_drop("cuMemRelease", |_| unsafe { (context.vmm().cuMemRelease)(self.handle) });
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Self { context, address, bytes, is_mapped } = self;
        if *is_mapped {
            // SAFETY: mapped by this value, and the owner of a part keeps the segment until no work uses it.
            context.call_on_drop("cuMemUnmap", |_| unsafe { (context.vmm().cuMemUnmap)(*address, *bytes) });
        }
        // SAFETY: reserved by this value, and nothing is mapped there any more.
        context.call_on_drop("cuMemAddressFree", |_| unsafe { (context.vmm().cuMemAddressFree)(*address, *bytes) });
    }
}

/// The least that a device allocates, of which all sizes are multiples.
fn granularity(context: &Arc<Context>) -> Result<usize, GpuError> {
    let (mut found, properties) = (0, AllocationProperties::exportable(context.device()));
    let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as c_int;
    // SAFETY: the place for the result and the properties are locals of the right types.
    context.call("cuMemGetAllocationGranularity", |_| unsafe {
        (context.vmm().cuMemGetAllocationGranularity)(&raw mut found, &raw const properties, least)
    })?;
    Ok(found.max(1))
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_DESCRIPTOR: c_int = 1;
