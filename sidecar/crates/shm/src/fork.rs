//! The fork guard: a forked child neither keeps its parent's session open nor uses it.
//!
//! Training processes fork, for example to start data loaders, and the child inherits every descriptor. If the parent
//! dies, its sockets stay open in the child, so peers do not notice. The child also inherits shared mappings with
//! tensors that it may modify as its own. Therefore one `pthread_atfork` handler per process runs in every new child.
//! By system calls and atomics only, it closes the registered descriptors, remaps the registered segments privately so
//! that the child's writes do not reach the parent, and increments a *generation*, by which every earlier [`ForkGuard`]
//! detects that it is in a child.
//!
//! # Limitations
//!
//! - `vfork`, `posix_spawn` and raw `clone` run no handlers. The first two end in `exec`, which closes descriptors with
//!   `O_CLOEXEC`, as all of this crate's are.
//! - If another thread forks between the creation of a descriptor and its registration, or between the end of the
//!   registration and `close`, the child keeps a copy. The owner of a socket therefore calls `shutdown(2)` before it closes
//!   the socket: that ends the connection for all copies.
//!
//! # Duties of the owners of registered descriptors
//!
//! In the child the descriptor is closed, and its number may soon refer to another file, which a second close would
//! close. Owners therefore wrap the value that holds the descriptor in [`ForkSafe`], which forgets it in a child
//! instead of dropping it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};

use crate::error::ShmError;

/// Detects whether the process has forked since the guard was created.
#[derive(Debug, Clone, Copy)]
pub struct ForkGuard {
    generation: u64,
}

impl ForkGuard {
    /// Creates a guard for the calling process. The first guard installs the process's fork handler.
    ///
    /// If that fails for lack of memory, this guard detects no fork until a later one succeeds. [`register_fd`], which
    /// every session needs, reports the failure.
    #[must_use]
    pub fn new() -> Self {
        let _ = install_handler();
        Self { generation: GENERATION.load(Ordering::Relaxed) }
    }

    /// Returns an error if the calling process is a forked child of the one that created the guard. Costs one load.
    ///
    /// # Errors
    ///
    /// [`UsedAfterFork`].
    pub fn check(&self) -> Result<(), UsedAfterFork> {
        if self.is_child() { Err(UsedAfterFork) } else { Ok(()) }
    }

    /// The generation of the process that created the guard. It is greater in a child than in its parent, usually by one.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether the calling process is a forked child (or grandchild) of the one that created the guard.
    #[must_use]
    pub fn is_child(&self) -> bool {
        GENERATION.load(Ordering::Relaxed) != self.generation
    }
}

impl Default for ForkGuard {
    fn default() -> Self {
        Self::new()
    }
}

/// A session was used in a forked child of the process that opened it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "used after fork: this client belongs to the parent process; open a client of its own in the child, after the fork"
)]
pub struct UsedAfterFork;

/// Registers `fd` to be closed in every forked child.
///
/// Drop the registration before closing the descriptor, or a child might close another file with the same number:
/// declare it before the descriptor in the same struct, and wrap that in a [`ForkSafe`]. [`ForkSafe::with_fd`] does so.
///
/// # Errors
///
/// [`ShmError::ForkTableFull`] beyond [`REGISTERED_FDS_MAX`]; [`ShmError::System`] if the fork handler cannot be
/// installed.
pub fn register_fd(fd: BorrowedFd<'_>) -> Result<FdRegistration, ShmError> {
    install_handler()?;
    let guard = ForkGuard::new();
    let raw = fd.as_raw_fd();
    let free = |entry: &&AtomicI32| entry.compare_exchange(NO_FD, raw, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    match REGISTERED_FDS.iter().find(free) {
        Some(entry) => Ok(FdRegistration { entry, guard }),
        None => Err(ShmError::ForkTableFull { limit: REGISTERED_FDS_MAX }),
    }
}

/// The entry of a descriptor in the table of those to close in children. Dropping it frees the entry.
#[derive(Debug)]
pub struct FdRegistration {
    entry: &'static AtomicI32,
    guard: ForkGuard,
}

impl Drop for FdRegistration {
    fn drop(&mut self) {
        // In a child the handler has cleared the entry, and the child may use it again.
        if !self.guard.is_child() {
            self.entry.store(NO_FD, Ordering::Release);
        }
    }
}

/// Registers a mapping of `fd` to be remapped privately in every forked child.
///
/// Drop the registration before the mapping and the descriptor.
///
/// # Errors
///
/// [`ShmError::ForkTableFull`] beyond [`REGISTERED_MAPPINGS_MAX`]; [`ShmError::System`] if the fork handler cannot be
/// installed.
pub(crate) fn register_mapping(base: usize, bytes: usize, fd: BorrowedFd<'_>) -> Result<MappingRegistration, ShmError> {
    install_handler()?;
    let guard = ForkGuard::new();
    let free = |entry: &&MappingEntry| {
        entry.base.compare_exchange(NO_MAPPING, RESERVED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    let Some(entry) = REGISTERED_MAPPINGS.iter().find(free) else {
        return Err(ShmError::ForkTableFull { limit: REGISTERED_MAPPINGS_MAX });
    };
    entry.bytes.store(bytes, Ordering::Relaxed);
    entry.fd.store(fd.as_raw_fd(), Ordering::Relaxed);
    entry.base.store(base, Ordering::Release);
    Ok(MappingRegistration { entry, guard })
}

/// The entry of a mapping in the table of those to remap in children. Dropping it frees the entry.
#[derive(Debug)]
pub(crate) struct MappingRegistration {
    entry: &'static MappingEntry,
    guard: ForkGuard,
}

impl Drop for MappingRegistration {
    fn drop(&mut self) {
        // In a child the handler has cleared the entry, and the child may use it again.
        if !self.guard.is_child() {
            self.entry.base.store(NO_MAPPING, Ordering::Release);
        }
    }
}

/// An entry of the table of mappings.
#[derive(Debug)]
struct MappingEntry {
    /// The address, [`NO_MAPPING`], or [`RESERVED`].
    base: AtomicUsize,
    bytes: AtomicUsize,
    fd: AtomicI32,
}

impl MappingEntry {
    const fn empty() -> Self {
        Self { base: AtomicUsize::new(NO_MAPPING), bytes: AtomicUsize::new(0), fd: AtomicI32::new(NO_FD) }
    }
}

/// A value that only the process that created it may use or drop; a forked child forgets it.
///
/// Forgetting leaks the child's copy of the value. In return, the child never runs destructors that would close
/// unrelated descriptors, join threads that do not exist there, or send messages on behalf of the parent.
#[derive(Debug)]
pub struct ForkSafe<T> {
    /// Declared first, so that the registration ends before the value is dropped.
    registration: Option<FdRegistration>,
    value: Option<T>,
    guard: ForkGuard,
}

impl<T> ForkSafe<T> {
    /// Guards a value that owns no registered descriptor, or that registers its own.
    pub fn new(value: T) -> Self {
        Self { registration: None, value: Some(value), guard: ForkGuard::new() }
    }

    /// Guards a value and registers its descriptor to be closed in children.
    ///
    /// # Errors
    ///
    /// Those of [`register_fd`]; the value is dropped in that case.
    pub fn with_fd(value: T) -> Result<Self, ShmError>
    where
        T: AsFd,
    {
        let registration = register_fd(value.as_fd())?;
        Ok(Self { registration: Some(registration), value: Some(value), guard: ForkGuard::new() })
    }

    /// The value, in the process that created it.
    ///
    /// # Errors
    ///
    /// [`UsedAfterFork`] in a child.
    pub fn get(&self) -> Result<&T, UsedAfterFork> {
        self.guard.check()?;
        self.value.as_ref().ok_or(UsedAfterFork)
    }

    /// The value, in the process that created it.
    ///
    /// # Errors
    ///
    /// [`UsedAfterFork`] in a child.
    pub fn get_mut(&mut self) -> Result<&mut T, UsedAfterFork> {
        self.guard.check()?;
        self.value.as_mut().ok_or(UsedAfterFork)
    }

    /// Returns the value and ends its registration.
    ///
    /// # Errors
    ///
    /// [`UsedAfterFork`] in a child, which forgets the value.
    pub fn into_inner(mut self) -> Result<T, UsedAfterFork> {
        self.guard.check()?;
        self.registration = None;
        self.value.take().ok_or(UsedAfterFork)
    }

    /// Whether the calling process is a forked child of the one that created the value.
    #[must_use]
    pub fn is_child(&self) -> bool {
        self.guard.is_child()
    }
}

impl<T> Drop for ForkSafe<T> {
    fn drop(&mut self) {
        if self.guard.is_child() {
            std::mem::forget(self.value.take());
        }
    }
}

/// Installs the fork handler once. It fails only if the C library is out of memory; the next guard tries again.
fn install_handler() -> Result<(), ShmError> {
    if INSTALLED.load(Ordering::Acquire) {
        return Ok(());
    }
    // Two threads may install the handler twice. This is harmless: the generation is incremented by two, and the second
    // run finds empty tables. (A `Once` is not safe here: if another thread holds it during a fork, it stays locked in
    // the child.)
    //
    // SAFETY: the handler only uses atomics, close(2) and mmap(2), which are allowed between fork and exec in the child
    // of a multi-threaded process, and it never unwinds. It is not called after this image is unloaded: a handler
    // belongs to the shared object that registered it, and dlclose removes it.
    let status = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if status != 0 {
        let error = io::Error::from_raw_os_error(status);
        return Err(ShmError::system("pthread_atfork", "the fork guard", error));
    }
    INSTALLED.store(true, Ordering::Release);
    Ok(())
}

/// The fork handler, which runs first in every new child.
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    for entry in &REGISTERED_FDS {
        let fd = entry.swap(NO_FD, Ordering::Relaxed);
        if fd != NO_FD {
            // SAFETY: the owner registered the descriptor in the parent and does not close it before the registration
            // ends, so here the number is the inherited copy. The generation keeps the owner's copy here from closing it.
            unsafe { libc::close(fd) };
        }
    }
    for entry in &REGISTERED_MAPPINGS {
        // Cleared, because a grandchild inherits a mapping that is private already.
        let base = entry.base.swap(NO_MAPPING, Ordering::Acquire);
        if base != NO_MAPPING && base != RESERVED {
            remap_private(base, entry.bytes.load(Ordering::Relaxed), entry.fd.load(Ordering::Relaxed));
        }
    }
}

/// Replaces a shared mapping by a private one of the same file.
fn remap_private(base: usize, bytes: usize, fd: RawFd) {
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let address = std::ptr::with_exposed_provenance_mut(base);
    // SAFETY: the owner registered a live mapping of `bytes` bytes of this descriptor, and neither ends before the
    // registration, so this replaces exactly that mapping. Its contents stay the same. There are no references into it:
    // it is accessed by copies, or by addresses, which stay readable and writable.
    unsafe { libc::mmap(address, bytes, protection, flags, fd, 0) };
}

/// Limit for registered descriptors of a process: 64 clients with 16 descriptors each.
pub const REGISTERED_FDS_MAX: usize = 1_024;

/// Limit for registered mappings of a process: the segments of four sessions.
pub const REGISTERED_MAPPINGS_MAX: usize = 4_096;

/// An empty entry of the table of mappings.
const NO_MAPPING: usize = 0;
/// An entry of the table of mappings that is being written; no mapping starts at this address.
const RESERVED: usize = 1;

/// An empty entry of the table of descriptors.
const NO_FD: RawFd = -1;

static GENERATION: AtomicU64 = AtomicU64::new(0);
static INSTALLED: AtomicBool = AtomicBool::new(false);
static REGISTERED_FDS: [AtomicI32; REGISTERED_FDS_MAX] = [const { AtomicI32::new(NO_FD) }; REGISTERED_FDS_MAX];
static REGISTERED_MAPPINGS: [MappingEntry; REGISTERED_MAPPINGS_MAX] =
    [const { MappingEntry::empty() }; REGISTERED_MAPPINGS_MAX];
