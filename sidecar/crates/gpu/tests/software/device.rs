//! The software device of this process, and memory and streams on it.

use std::ffi::{CString, c_int};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ronde_gpu::{CallerStream, DeviceSpan, Driver};
use ronde_shm::{ArenaConfig, LeaseOutcome, LeasedSlot, OwnedSegment, SegmentId, Share, WorkerArena};

/// The device, while a test has it to itself.
pub(crate) struct Device {
    pub(crate) driver: Arc<Driver>,
    library: libloading::Library,
    _alone: MutexGuard<'static, ()>,
}

/// The file that `cargo build --workspace --all-targets` makes, beside the folder of this program.
pub(crate) fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a running program has a path");
    let folder = program.parent().and_then(|deps| deps.parent()).expect("the program is in target/PROFILE/deps");
    let path = folder.join("libronde_software_device.so");
    assert!(path.exists(), "{} is missing; run cargo build --workspace --all-targets", path.display());
    path
}

impl Device {
    pub(crate) fn take() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let driver = Driver::open(&library()).expect("the software device has devices");
        // SAFETY: the library's constructors do nothing.
        let library = unsafe { libloading::Library::new(library()) }.expect("it was opened above");
        let device = Self { driver, library, _alone: alone };
        device.heal();
        device.set_copy_delay(Duration::ZERO);
        device.push_context();
        device
    }

    fn call<A, R>(&self, name: &str, call: impl FnOnce(A) -> R) -> R
    where
        A: Copy,
    {
        // SAFETY: callers pass the type of the function with this name.
        let found = unsafe { self.library.get::<A>(name.as_bytes()) }.expect("the software device has it");
        call(*found)
    }

    pub(crate) fn count(&self, name: &str) -> u64 {
        let name = CString::new(name).expect("no NUL");
        // SAFETY: the signature is that of `control.rs`, and the text ends with NUL.
        self.call("ronde_device_count", |count: unsafe extern "C" fn(*const i8) -> u64| unsafe {
            count(name.as_ptr().cast())
        })
    }

    /// Makes the `nth` call from now on fail; each one with 0.
    pub(crate) fn fail(&self, function: &str, code: c_int, nth: u64) {
        let name = CString::new(function).expect("no NUL");
        // SAFETY: as above.
        self.call("ronde_device_fail", |fail: unsafe extern "C" fn(*const i8, c_int, u64)| unsafe {
            fail(name.as_ptr().cast(), code, nth);
        });
    }

    pub(crate) fn heal(&self) {
        // SAFETY: the signature is that of `control.rs`.
        self.call("ronde_device_heal", |heal: unsafe extern "C" fn()| unsafe { heal() });
    }

    pub(crate) fn set_copy_delay(&self, delay: Duration) {
        let delay = u64::try_from(delay.as_micros()).expect("short");
        // SAFETY: the signature is that of `control.rs`.
        self.call("ronde_device_set_copy_delay_us", |set: unsafe extern "C" fn(u64)| unsafe { set(delay) });
    }

    /// Sets the version that NCCL reports.
    pub(crate) fn set_version(&self, version: c_int) {
        // SAFETY: the signature is that of `nccl.rs`.
        self.call("ronde_device_set_nccl_version", |set: unsafe extern "C" fn(c_int)| unsafe { set(version) });
    }

    /// Allocates on device 0, as PyTorch's runtime would in this thread.
    fn push_context(&self) {
        self.push_context_of(0);
    }

    pub(crate) fn push_context_of(&self, ordinal: usize) {
        // SAFETY: the signature is that of the driver; the software device's contexts have these handles.
        let code = self
            .call("cuCtxPushCurrent_v2", |push: unsafe extern "C" fn(usize) -> c_int| unsafe { push(0x100 + ordinal) });
        assert_eq!(code, 0);
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Allocation<'_> {
        let mut address = 0;
        // SAFETY: the signature is that of the driver, and the result is a local.
        let code = self.call("cuMemAlloc_v2", |allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int| unsafe {
            allocate(&raw mut address, bytes)
        });
        assert_eq!(code, 0, "device memory");
        Allocation { device: self, address, bytes }
    }

    pub(crate) fn stream(&self) -> usize {
        let mut handle = 0;
        // SAFETY: the signature is that of the driver, and the result is a local.
        let code = self.call("cuStreamCreate", |create: unsafe extern "C" fn(*mut usize, u32) -> c_int| unsafe {
            create(&raw mut handle, 1)
        });
        assert_eq!(code, 0);
        handle
    }

    pub(crate) fn destroy_stream(&self, handle: usize) {
        // SAFETY: the signature is that of the driver.
        let code =
            self.call("cuStreamDestroy_v2", |destroy: unsafe extern "C" fn(usize) -> c_int| unsafe { destroy(handle) });
        assert_eq!(code, 0);
    }

    /// Stops a stream as a long kernel would, or lets it go on.
    pub(crate) fn hold(&self, stream: usize, is_held: bool) {
        // SAFETY: the signature is that of `control.rs`.
        let code = self.call("ronde_device_hold", |hold: unsafe extern "C" fn(usize, c_int) -> c_int| unsafe {
            hold(stream, c_int::from(is_held))
        });
        assert_eq!(code, 0);
    }

    /// Begins or ends the capture of a CUDA graph.
    pub(crate) fn capture(&self, stream: usize, is_capturing: bool) {
        // SAFETY: the signature is that of `control.rs`.
        let code = self.call("ronde_device_capture", |capture: unsafe extern "C" fn(usize, c_int) -> c_int| unsafe {
            capture(stream, c_int::from(is_capturing))
        });
        assert_eq!(code, 0);
    }

    /// Makes the first failure of work the result of each later call, until [`Device::heal`].
    pub(crate) fn make_failures_stay(&self) {
        // SAFETY: the signature is that of `control.rs`.
        self.call("ronde_device_set_sticky", |set: unsafe extern "C" fn()| unsafe { set() });
    }

    /// Blocks until a stream of the test's has no work.
    pub(crate) fn synchronize(&self, stream: usize) {
        // SAFETY: the signature is that of the driver.
        let code =
            self.call("cuStreamSynchronize", |wait: unsafe extern "C" fn(usize) -> c_int| unsafe { wait(stream) });
        assert_eq!(code, 0);
    }
}

/// Device memory of a test.
pub(crate) struct Allocation<'a> {
    device: &'a Device,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl Allocation<'_> {
    pub(crate) fn span(&self) -> DeviceSpan {
        // SAFETY: tests wait for their copies before they drop an allocation, or test what happens then.
        unsafe { DeviceSpan::new(0, self.address, self.bytes, None) }
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes);
        // SAFETY: the signature is that of the driver, and the source is a slice.
        let code =
            self.device.call("cuMemcpyHtoD_v2", |copy: unsafe extern "C" fn(u64, *const u8, usize) -> c_int| unsafe {
                copy(self.address, bytes.as_ptr(), bytes.len())
            });
        assert_eq!(code, 0);
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        // SAFETY: the signature is that of the driver, and the target is a vector.
        let code =
            self.device.call("cuMemcpyDtoH_v2", |copy: unsafe extern "C" fn(*mut u8, u64, usize) -> c_int| unsafe {
                copy(bytes.as_mut_ptr(), self.address, bytes.len())
            });
        assert_eq!(code, 0);
        bytes
    }

    /// Enqueues a kernel that sets all bytes.
    pub(crate) fn fill(&self, stream: usize, value: u8) {
        // SAFETY: the signature is that of `control.rs`.
        let code = self.device.call(
            "ronde_device_fill",
            |fill: unsafe extern "C" fn(usize, u64, u8, usize) -> c_int| unsafe {
                fill(stream, self.address, value, self.bytes)
            },
        );
        assert_eq!(code, 0);
    }
}

impl Drop for Allocation<'_> {
    fn drop(&mut self) {
        // SAFETY: the signature is that of the driver.
        self.device.call("cuMemFree_v2", |free: unsafe extern "C" fn(u64) -> c_int| unsafe { free(self.address) });
    }
}

pub(crate) fn caller(stream: usize) -> CallerStream {
    // SAFETY: tests destroy their streams at their ends.
    unsafe { CallerStream::new(stream) }
}

/// An arena with a segment for all slots of a test.
pub(crate) struct Slots(WorkerArena);

impl Slots {
    pub(crate) fn new() -> Self {
        let config =
            ArenaConfig { segment_bytes_min: 1 << 20, limit_bytes: 1 << 24, alignment: 64, setting: "arena_bytes_max" };
        Self(WorkerArena::new(config).expect("powers of two"))
    }

    pub(crate) fn lease(&self, bytes: usize) -> LeasedSlot {
        for id in 0.. {
            match self.0.lease(bytes as u64).expect("room") {
                LeaseOutcome::Slot(slot) => return slot,
                LeaseOutcome::Grow { bytes } => {
                    let size = usize::try_from(bytes).expect("small");
                    let segment = OwnedSegment::create("gpu", size, Share::Writable).expect("memory");
                    let _ = self.0.add_segment(SegmentId(id), segment);
                }
            }
        }
        unreachable!("numbers do not end");
    }

    pub(crate) fn in_use(&self) -> usize {
        self.0.usage().slots
    }
}

/// Polls until a condition holds; fails after ten seconds.
pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
