//! [`Driver`]: the driver of this machine's GPUs.

#![allow(unsafe_code, reason = "calls of the driver")]

mod buffer;
mod context;
mod table;
mod vmm;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute, CUresult};

use crate::error::GpuError;
use crate::library::Library;
use table::DriverTable;
use vmm::VmmTable;

pub use buffer::DeviceBuffer;
pub use context::{Context, Event, Stream};
pub(crate) use context::{Direction, Registration};
pub use vmm::DeviceSegment;

/// The driver, initialized, with at least one device. Processes that are forked from this one must not use it.
#[derive(Debug)]
pub struct Driver {
    table: DriverTable,
    vmm: VmmTable,
    path: PathBuf,
    version: c_int,
    devices: u32,
    process: u32,
}

/// What a device is, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number.
    pub ordinal: u32,
    /// The maker's name.
    pub name: String,
    /// Its place on the bus, as `nvidia-smi` prints it.
    pub bus_id: String,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// The devices of which it can read the memory directly.
    pub peers: Vec<u32>,
}

impl Driver {
    /// The driver of this process, opened by the first call. The error stays, too: a driver that is installed later needs a
    /// new process.
    ///
    /// # Errors
    /// [`GpuError::NoLibrary`], [`GpuError::NoFunction`] or [`GpuError::NoDevice`].
    pub fn get() -> Result<Arc<Self>, GpuError> {
        static DRIVER: OnceLock<Result<Arc<Driver>, GpuError>> = OnceLock::new();
        DRIVER.get_or_init(|| Self::open(Path::new(LIBRARY))).clone()
    }

    /// Whether the driver is installed. Does not initialize it.
    #[must_use]
    pub fn is_installed() -> bool {
        Library::open(LIBRARY, vec![LIBRARY.into()]).and_then(|library| DriverTable::load(&library)).is_ok()
    }

    /// Opens the driver from a file.
    ///
    /// # Errors
    /// Those of [`Driver::get`].
    pub fn open(path: &Path) -> Result<Arc<Self>, GpuError> {
        let library = Library::open(LIBRARY, vec![path.to_owned()])?;
        let (table, vmm) = (DriverTable::load(&library)?, VmmTable::load(&library)?);
        let path = library.path().to_owned();
        let mut driver = Self { table, vmm, path, version: 0, devices: 0, process: std::process::id() };
        let unusable = |error: GpuError| GpuError::NoDevice { reason: error.to_string() };
        // SAFETY: the first call of the library, with the only value that it allows.
        driver.check("cuInit", unsafe { (table.cuInit)(0) }).map_err(unusable)?;
        let (mut version, mut count) = (0, 0);
        // SAFETY: the place for the result is a local of the right type.
        driver.check("cuDriverGetVersion", unsafe { (table.cuDriverGetVersion)(&raw mut version) })?;
        // SAFETY: as above.
        driver.check("cuDeviceGetCount", unsafe { (table.cuDeviceGetCount)(&raw mut count) }).map_err(unusable)?;
        driver.version = version;
        driver.devices = u32::try_from(count).unwrap_or_default();
        if driver.devices == 0 {
            return Err(GpuError::NoDevice { reason: "the driver lists no device".to_owned() });
        }
        Ok(Arc::new(driver))
    }

    /// The number of devices.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.devices
    }

    /// The newest CUDA that the driver supports, such as 12.4.
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        let version = u32::try_from(self.version).unwrap_or_default();
        (version / 1000, version % 1000 / 10)
    }

    /// The file that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Describes a device.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for a number without a device, and the driver's errors.
    pub fn info(&self, ordinal: u32) -> Result<DeviceInfo, GpuError> {
        let device = self.device(ordinal)?;
        let mut memory_bytes = 0_usize;
        let total = self.table.cuDeviceTotalMem_v2;
        // SAFETY: the place for the result is a local of the right type.
        self.check("cuDeviceTotalMem", unsafe { total(&raw mut memory_bytes, device) })?;
        let mut peers = Vec::new();
        for other in (0..self.devices).filter(|other| *other != ordinal) {
            let (mut can, peer) = (0, self.device(other)?);
            // SAFETY: as above.
            let code = unsafe { (self.table.cuDeviceCanAccessPeer)(&raw mut can, device, peer) };
            self.check("cuDeviceCanAccessPeer", code)?;
            peers.extend((can != 0).then_some(other));
        }
        let name = self.text("cuDeviceGetName", self.table.cuDeviceGetName, device)?;
        let bus_id = self.text("cuDeviceGetPCIBusId", self.table.cuDeviceGetPCIBusId, device)?;
        Ok(DeviceInfo { ordinal, name, bus_id, memory_bytes: memory_bytes as u64, peers })
    }

    /// The device with memory at an address, for a thread that may have no context. Contexts that exist are used, and none is
    /// made.
    ///
    /// # Errors
    /// [`GpuError::Argument`] when no device has, and the driver's errors.
    pub fn device_with(self: &Arc<Self>, address: u64) -> Result<u32, GpuError> {
        let found = self.device_of(address);
        if !matches!(found, Err(GpuError::Call { code: INVALID_CONTEXT, .. })) {
            return found;
        }
        for ordinal in 0..self.devices {
            if self.is_active(ordinal)? {
                return Context::retain(self, ordinal)?.with(|| self.device_of(address))?;
            }
        }
        Err(GpuError::argument(format!("no GPU has memory at {address:#x}: this process uses none")))
    }

    /// Whether this process uses a device.
    fn is_active(&self, ordinal: u32) -> Result<bool, GpuError> {
        let (mut flags, mut active) = (0, 0);
        let device = self.device(ordinal)?;
        // SAFETY: the places for the results are locals of the right types.
        let code = unsafe { (self.table.cuDevicePrimaryCtxGetState)(device, &raw mut flags, &raw mut active) };
        self.check("cuDevicePrimaryCtxGetState", code)?;
        Ok(active != 0)
    }

    /// The device with memory at an address. The thread has a context.
    ///
    /// # Errors
    /// [`GpuError::Argument`] when no device has.
    pub(crate) fn device_of(&self, address: u64) -> Result<u32, GpuError> {
        let none = || GpuError::argument(format!("no GPU has memory at {address:#x}; give a tensor on a GPU"));
        let kind = self.attribute::<c_uint>(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
        match kind {
            Ok(kind) if kind == CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint => {}
            // The driver's answer for an address that it does not know.
            Ok(_) | Err(GpuError::Call { code: INVALID_VALUE, .. }) => return Err(none()),
            Err(error) => return Err(error),
        }
        let device: c_int = self.attribute(CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)?;
        u32::try_from(device).map_err(|_| none())
    }

    fn attribute<T: Default>(&self, attribute: CUpointer_attribute, address: u64) -> Result<T, GpuError> {
        let mut value = T::default();
        self.check_process()?;
        // SAFETY: the place for the result is a local of the type that the header gives for the attribute.
        let code = unsafe {
            (self.table.cuPointerGetAttribute)((&raw mut value).cast::<c_void>(), attribute as c_int, address)
        };
        self.check("cuPointerGetAttribute", code)?;
        Ok(value)
    }

    fn text(
        &self,
        function: &'static str,
        get: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
        device: c_int,
    ) -> Result<String, GpuError> {
        let mut bytes: [c_char; TEXT_BYTES as usize] = [0; TEXT_BYTES as usize];
        // SAFETY: the buffer is as long as the second argument says, which leaves its last byte zero.
        self.check(function, unsafe { get(bytes.as_mut_ptr(), TEXT_BYTES - 1, device) })?;
        // SAFETY: the last byte of the buffer is zero.
        Ok(unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// The driver's handle of a device.
    fn device(&self, ordinal: u32) -> Result<c_int, GpuError> {
        let none = || {
            let last = self.devices - 1;
            GpuError::argument(format!("there is no GPU {ordinal}; this process sees those from 0 to {last}"))
        };
        self.check_process()?;
        let number = c_int::try_from(ordinal).map_err(|_| none())?;
        if ordinal >= self.devices {
            return Err(none());
        }
        let mut device = 0;
        // SAFETY: the place for the result is a local of the right type.
        self.check("cuDeviceGet", unsafe { (self.table.cuDeviceGet)(&raw mut device, number) })?;
        Ok(device)
    }

    /// Whether this process is the one that opened the driver.
    fn is_own_process(&self) -> bool {
        std::process::id() == self.process
    }

    fn check_process(&self) -> Result<(), GpuError> {
        if self.is_own_process() { Ok(()) } else { Err(GpuError::UsedAfterFork { parent: self.process }) }
    }

    /// The error of a code.
    fn check(&self, function: &'static str, code: c_int) -> Result<(), GpuError> {
        if code == CUresult::CUDA_SUCCESS as c_int {
            return Ok(());
        }
        let name = self.describe(self.table.cuGetErrorName, code);
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int {
            return Err(GpuError::OutOfMemory { function, name });
        }
        let text = self.describe(self.table.cuGetErrorString, code);
        Err(GpuError::Call { function, code, name, text })
    }

    fn describe(&self, get: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int, code: c_int) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the place for the result is a local of the right type.
        let found = unsafe { get(code, &raw mut text) };
        if found != CUresult::CUDA_SUCCESS as c_int || text.is_null() {
            return "an error that this driver does not name".to_owned();
        }
        // SAFETY: the driver has returned a constant text.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

const INVALID_CONTEXT: c_int = CUresult::CUDA_ERROR_INVALID_CONTEXT as c_int;
const INVALID_VALUE: c_int = CUresult::CUDA_ERROR_INVALID_VALUE as c_int;
/// The name by which NVIDIA's driver is installed.
const LIBRARY: &str = "libcuda.so.1";
/// Room for a device's name or place.
const TEXT_BYTES: c_int = 256;
