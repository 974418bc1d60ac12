//! The fork guard: a forked child neither keeps its parent's session alive nor uses it.
//!
//! A trainer forks (data loaders do), and the child inherits every descriptor. If the trainer then dies, its sockets stay
//! open in the child and no peer ever hears of the death. And it inherits shared mappings, in which tensors may lie that the
//! child takes for its own. One `pthread_atfork` handler per process therefore runs in every new child and does three things,
//! all system calls or atomics: it closes the descriptors that are registered here, it maps the segments that are registered
//! here anew, privately, so that what the child writes is not its parent's, and it counts up a *generation* by which every
//! [`ForkGuard`] made before the fork knows that it is in a child.
//!
//! # What it does not see
//!
//! - `vfork`, `posix_spawn` and raw `clone` run no handlers. The first two end in `exec`, which closes descriptors made
//!   with `O_CLOEXEC`, as all of this crate's are.
//! - A fork in another thread between the making of a descriptor and its registration, or between the end of the
//!   registration and `close`, leaves the child a copy. So an owner of a socket calls `shutdown(2)` before it closes: that
//!   ends the connection for all copies.
//!
//! # What owners of registered descriptors must do
//!
//! In the child the number is closed already and may soon name another file. Closing it again would close that file. An
//! owner therefore wraps what holds the descriptor in [`ForkSafe`], which forgets it in a child instead of dropping it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};

use crate::error::ShmError;

/// Knows whether this process forked off since the guard was made.
#[derive(Debug, Clone, Copy)]
pub struct ForkGuard {
    generation: u64,
}

impl ForkGuard {
    /// A guard of the calling process. The first one installs the process's fork handler.
    ///
    /// Should that fail for want of memory, this guard sees no fork until a later one has succeeded; [`register_fd`], without
    /// which no session is opened, reports it.
    #[must_use]
    pub fn new() -> Self {
        let _ = install_handler();
        Self { generation: GENERATION.load(Ordering::Relaxed) }
    }

    /// Fails when the calling process is a forked child of the one that made the guard. Costs one load.
    ///
    /// # Errors
    ///
    /// [`UsedAfterFork`].
    pub fn check(&self) -> Result<(), UsedAfterFork> {
        if self.is_child() { Err(UsedAfterFork) } else { Ok(()) }
    }

    /// Whether the calling process is a forked child (or grandchild) of the one that made the guard.
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

/// Registers `fd` to be closed in every child that this process forks.
///
/// The registration must end before the descriptor is closed, or a child might close another file of the same number: put
/// both into one value, the registration first, and that into a [`ForkSafe`]; [`ForkSafe::with_fd`] does it.
///
/// # Errors
///
/// [`ShmError::ForkTableFull`] beyond [`REGISTERED_FDS_MAX`]; [`ShmError::System`] when no fork handler can be installed.
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

/// A descriptor's place in the table of those closed in children. Dropping it frees the place.
#[derive(Debug)]
pub struct FdRegistration {
    entry: &'static AtomicI32,
    guard: ForkGuard,
}

impl Drop for FdRegistration {
    fn drop(&mut self) {
        // In a child the handler has emptied the place, and the child may have filled it anew.
        if !self.guard.is_child() {
            self.entry.store(NO_FD, Ordering::Release);
        }
    }
}

/// Registers a mapping of `fd`, which is to be private in every child that this process forks.
///
/// The registration must end before the mapping and the descriptor do.
///
/// # Errors
///
/// [`ShmError::ForkTableFull`] beyond [`REGISTERED_MAPPINGS_MAX`]; [`ShmError::System`] when no fork handler can be installed.
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

/// A mapping's place in the table of those that are private in children. Dropping it frees the place.
#[derive(Debug)]
pub(crate) struct MappingRegistration {
    entry: &'static MappingEntry,
    guard: ForkGuard,
}

impl Drop for MappingRegistration {
    fn drop(&mut self) {
        // In a child the handler has emptied the place, and the child may have filled it anew.
        if !self.guard.is_child() {
            self.entry.base.store(NO_MAPPING, Ordering::Release);
        }
    }
}

/// A place of the table of mappings.
#[derive(Debug)]
struct MappingEntry {
    /// The address, or [`NO_MAPPING`] or [`RESERVED`].
    base: AtomicUsize,
    bytes: AtomicUsize,
    fd: AtomicI32,
}

impl MappingEntry {
    const fn empty() -> Self {
        Self { base: AtomicUsize::new(NO_MAPPING), bytes: AtomicUsize::new(0), fd: AtomicI32::new(NO_FD) }
    }
}

/// A value that only the process that made it may use or drop; in a forked child it is forgotten.
///
/// Forgetting leaks the child's copy of the value's memory. That is the price of never running destructors that would close
/// foreign descriptors, join threads that do not exist in the child or send farewells in the parent's name.
#[derive(Debug)]
pub struct ForkSafe<T> {
    /// Declared first: the registration ends before the value closes.
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
    /// Those of [`register_fd`]; the value is then dropped.
    pub fn with_fd(value: T) -> Result<Self, ShmError>
    where
        T: AsFd,
    {
        let registration = register_fd(value.as_fd())?;
        Ok(Self { registration: Some(registration), value: Some(value), guard: ForkGuard::new() })
    }

    /// The value, in the process that made it.
    ///
    /// # Errors
    ///
    /// [`UsedAfterFork`] in a child.
    pub fn get(&self) -> Result<&T, UsedAfterFork> {
        self.guard.check()?;
        self.value.as_ref().ok_or(UsedAfterFork)
    }

    /// The value, in the process that made it.
    ///
    /// # Errors
    ///
    /// [`UsedAfterFork`] in a child.
    pub fn get_mut(&mut self) -> Result<&mut T, UsedAfterFork> {
        self.guard.check()?;
        self.value.as_mut().ok_or(UsedAfterFork)
    }

    /// The value, no longer guarded nor registered.
    ///
    /// # Errors
    ///
    /// [`UsedAfterFork`] in a child, where the value is forgotten.
    pub fn into_inner(mut self) -> Result<T, UsedAfterFork> {
        self.guard.check()?;
        self.registration = None;
        self.value.take().ok_or(UsedAfterFork)
    }

    /// Whether the calling process is a forked child of the one that made the value.
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

/// Installs the child handler once. A failure is the C library's being out of memory; the next guard tries again.
fn install_handler() -> Result<(), ShmError> {
    if INSTALLED.load(Ordering::Acquire) {
        return Ok(());
    }
    // Two threads may both arrive here and install twice: the generation then counts up by two and the second sweep
    // finds an empty table, so that is harmless. (A `Once` would not be: held by another thread at the moment of a fork,
    // it stays held in the child.)
    //
    // SAFETY: the handler only touches atomics and calls close(2) and mmap(2), system calls without state in the C library, all
    // allowed between fork and exec in a child of a
    // multi-threaded process. It never unwinds. It is not called after this image is unloaded: a handler belongs to
    // the shared object that registered it, and dlclose removes it.
    let status = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if status != 0 {
        let error = io::Error::from_raw_os_error(status);
        return Err(ShmError::system("pthread_atfork", "the fork guard", error));
    }
    INSTALLED.store(true, Ordering::Release);
    Ok(())
}

/// Runs in every new child, before anything else does.
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    for entry in &REGISTERED_FDS {
        let fd = entry.swap(NO_FD, Ordering::Relaxed);
        if fd != NO_FD {
            // SAFETY: the number was registered by its owner in the parent and is not closed there before the registration
            // ends, so here it names the inherited copy. Its owner in this process is told by the generation not to close it.
            unsafe { libc::close(fd) };
        }
    }
    for entry in &REGISTERED_MAPPINGS {
        // Emptied here: a grandchild inherits what is private already.
        let base = entry.base.swap(NO_MAPPING, Ordering::Acquire);
        if base != NO_MAPPING && base != RESERVED {
            remap_private(base, entry.bytes.load(Ordering::Relaxed), entry.fd.load(Ordering::Relaxed));
        }
    }
}

/// Puts a private mapping of the same file in the place of a shared one.
fn remap_private(base: usize, bytes: usize, fd: RawFd) {
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let address = std::ptr::with_exposed_provenance_mut(base);
    // SAFETY: the owner has registered a live mapping of so many bytes of this descriptor, and neither ends before the
    // registration, so this replaces that mapping and nothing else. Its bytes stay the same, and nobody holds a reference into
    // it: they are reached by copies, or by addresses for which they go on to be readable and writable.
    unsafe { libc::mmap(address, bytes, protection, flags, fd, 0) };
}

/// Descriptors that one process can register: 64 clients of 16 descriptors each.
pub const REGISTERED_FDS_MAX: usize = 1_024;

/// Mappings that one process can register: as many segments as four sessions may have.
pub const REGISTERED_MAPPINGS_MAX: usize = 4_096;

/// An empty place of the table of mappings.
const NO_MAPPING: usize = 0;
/// A place of it that is just being filled: no mapping begins there.
const RESERVED: usize = 1;

/// An empty place of the table.
const NO_FD: RawFd = -1;

static GENERATION: AtomicU64 = AtomicU64::new(0);
static INSTALLED: AtomicBool = AtomicBool::new(false);
static REGISTERED_FDS: [AtomicI32; REGISTERED_FDS_MAX] = [const { AtomicI32::new(NO_FD) }; REGISTERED_FDS_MAX];
static REGISTERED_MAPPINGS: [MappingEntry; REGISTERED_MAPPINGS_MAX] =
    [const { MappingEntry::empty() }; REGISTERED_MAPPINGS_MAX];
