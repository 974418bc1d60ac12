//! A shared mapping of a sealed memfd, and copies out of and into it.
//!
//! # Why copies of bytes that another process may be writing are sound
//!
//! Three things could go wrong with memory that someone else writes at any time; each is closed off here.
//!
//! 1. *The memory goes away* (a file that shrinks turns an access into SIGBUS). A [`Mapping`] is only made from a
//!    [`SealedFd`], whose constructors make sure of F_SEAL_SHRINK on a memfd of ordinary pages with at least the mapped
//!    size. Seals are never removable. Holes that the peer punches read as zeros. Pages of a huge-page pool could be
//!    missing after a hole was punched, so such memfds are refused.
//! 2. *The compiler assumes that nobody writes*: a `&[u8]` promises just that, and even without one a plain load may be
//!    repeated or a later load of the copy replaced by a second load of the source. So no reference to the bytes is ever
//!    formed (but of a worker's own slots, for which `worker_arena` argues), and the copy is a call of a foreign function whose identity the compiler is not told, or assembly (`copy`). To
//!    the language that is unknown code which may well copy byte by byte with relaxed atomic loads and stores, for which
//!    concurrent writes are defined: each copied byte is some value that byte had. The machine's `memcpy` does just that on
//!    every platform that has memfds: no load or store it uses tears within a byte, and no more does the assembly's.
//! 3. *The program decides on bytes that then change*. Callers get only private copies; no method looks at shared
//!    bytes.
//!
//! The same argument covers two threads of this process that copy to and from overlapping ranges: they may see each other's
//! bytes mixed, as with the peer, and nothing worse. So a mapping is `Sync`.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::sys::stat::fstat;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use crate::copy::{copy, copy_non_temporal};
use crate::error::ShmError;
use crate::fork::{MappingRegistration, register_mapping};

/// A memfd of ordinary pages that holds at least [`SealedFd::bytes`] bytes for as long as anything refers to it.
#[derive(Debug)]
pub(crate) struct SealedFd {
    fd: OwnedFd,
    bytes: NonZeroUsize,
}

impl SealedFd {
    /// Checks that `fd` is a memfd of ordinary pages that carries all of `seals` and can never shrink.
    ///
    /// `segment` names it in errors.
    pub(crate) fn verify(fd: OwnedFd, seals: SealFlag, segment: &str) -> Result<Self, ShmError> {
        let found = seals_of(fd.as_fd(), segment)?;
        let missing = (seals | SealFlag::F_SEAL_SHRINK).difference(found);
        if !missing.is_empty() {
            let missing = missing.iter_names().map(|(name, _)| name).collect::<Vec<_>>().join("|");
            return Err(ShmError::MissingSeals { segment: segment.to_owned(), missing });
        }
        let filesystem = fstatfs(&fd).map_err(|errno| ShmError::system("fstatfs", segment, errno))?;
        if filesystem.filesystem_type() != TMPFS_MAGIC {
            return Err(ShmError::NotMemfd { segment: segment.to_owned(), found: "a memfd of huge pages" });
        }
        let status = fstat(&fd).map_err(|errno| ShmError::system("fstat", segment, errno))?;
        let bytes = u64::try_from(status.st_size).unwrap_or(0);
        Ok(Self { bytes: mappable(bytes, segment)?, fd })
    }

    /// Size of the memfd in bytes, fixed by its seals.
    pub(crate) fn bytes(&self) -> NonZeroUsize {
        self.bytes
    }

    /// Adds further seals.
    pub(crate) fn add_seals(&self, seals: SealFlag, segment: &str) -> Result<(), ShmError> {
        add_seals(self.fd.as_fd(), seals, segment)
    }
}

impl AsFd for SealedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Adds `seals` to the memfd `fd`.
pub(crate) fn add_seals(fd: BorrowedFd<'_>, seals: SealFlag, segment: &str) -> Result<(), ShmError> {
    fcntl(fd, FcntlArg::F_ADD_SEALS(seals)).map_err(|errno| ShmError::system("adding seals", segment, errno))?;
    Ok(())
}

/// A size that can be mapped: not zero and at most half the address space, so that pointer offsets cannot overflow.
pub(crate) fn mappable(bytes: u64, segment: &str) -> Result<NonZeroUsize, ShmError> {
    isize::try_from(bytes)
        .ok()
        .and_then(|bytes| NonZeroUsize::new(bytes.unsigned_abs()))
        .ok_or_else(|| ShmError::SegmentSize { segment: segment.to_owned(), bytes })
}

/// The seals of `fd`, or [`ShmError::NotMemfd`] when it cannot have any.
fn seals_of(fd: BorrowedFd<'_>, segment: &str) -> Result<SealFlag, ShmError> {
    match fcntl(fd, FcntlArg::F_GET_SEALS) {
        Ok(seals) => Ok(SealFlag::from_bits_truncate(seals)),
        Err(Errno::EINVAL | Errno::EBADF) => {
            Err(ShmError::NotMemfd { segment: segment.to_owned(), found: "a file that has no seals" })
        }
        Err(errno) => Err(ShmError::system("reading seals", segment, errno)),
    }
}

/// A populated shared mapping of a whole sealed memfd. `A` says whether it may be written.
///
/// Invariant: `base` starts a live mapping of `bytes` bytes with at least `A`'s protection, which this value alone unmaps,
/// of a file that never gets smaller than `bytes`.
#[derive(Debug)]
pub(crate) struct Mapping<A: Access> {
    /// Whose bytes these are, for errors.
    segment: Box<str>,
    base: NonNull<c_void>,
    bytes: NonZeroUsize,
    access: std::marker::PhantomData<A>,
}

// SAFETY: the mapping belongs to the process, not to a thread; unmapping from another thread is allowed.
unsafe impl<A: Access> Send for Mapping<A> {}

// SAFETY: through a shared reference one can only copy bytes, and concurrent copies are defined; see the module's header.
unsafe impl<A: Access> Sync for Mapping<A> {}

impl<A: Access> Mapping<A> {
    /// Maps all of `sealed` and populates the page tables of its first `populated_bytes`, so that no copy there pays for a
    /// first fault.
    ///
    /// Blocks while the kernel finds and clears those pages: about half a millisecond for each MiB of a fresh memfd.
    pub(crate) fn new(sealed: &SealedFd, segment: &str, populated_bytes: usize) -> Result<Self, ShmError> {
        let bytes = sealed.bytes();
        let whole = populated_bytes >= bytes.get();
        let flags = MapFlags::MAP_SHARED | if whole { MapFlags::MAP_POPULATE } else { MapFlags::empty() };
        // SAFETY: no address is asked for, so no existing mapping is replaced. Nobody has a reference to the new one.
        let base = unsafe { mmap(None, bytes, A::PROTECTION, flags, sealed.as_fd(), 0) }
            .map_err(|errno| ShmError::system("mmap", segment, errno))?;
        let mapping = Self { segment: segment.into(), base, bytes, access: std::marker::PhantomData };
        mapping.populate(segment, populated_bytes)?;
        Ok(mapping)
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get() as u64
    }

    /// Copies `target.len()` bytes from `offset` into private memory.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]; the target is then untouched.
    pub(crate) fn copy_to(&self, offset: u64, target: &mut [u8]) -> Result<(), ShmError> {
        let offset = self.range(offset, target.len())?;
        // SAFETY: range says that offset + target.len() <= bytes, and the invariant says that so many bytes
        // are mapped and readable. The target is private, so the two do not overlap.
        unsafe { copy(target.as_mut_ptr().cast(), self.base.as_ptr().byte_add(offset), target.len()) };
        Ok(())
    }

    /// `MAP_POPULATE` keeps failures to itself; this reports them (out of memory) instead of leaving them to a fault.
    fn populate(&self, segment: &str, populated_bytes: usize) -> Result<(), ShmError> {
        let bytes = self.bytes.get().min(populated_bytes);
        // SAFETY: the range is this mapping's, and populating changes no byte of it.
        match unsafe { madvise(self.base, bytes, A::POPULATE) } {
            // A kernel before 5.14 does not know the advice; mmap has done the work, or the first use will.
            Ok(()) | Err(Errno::EINVAL) => Ok(()),
            Err(errno) => Err(ShmError::system("populating the mapping", segment, errno)),
        }
    }

    /// `offset` as a `usize`, if `offset..offset + len` lies inside the mapping.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`].
    fn range(&self, offset: u64, len: usize) -> Result<usize, ShmError> {
        self.checked_offset(offset, len).ok_or_else(|| self.out_of_range(offset, len))
    }

    /// Says that bytes do not lie inside.
    pub(crate) fn out_of_range(&self, offset: u64, len: usize) -> ShmError {
        ShmError::OutOfRange { segment: self.segment.to_string(), offset, len: len as u64, size: self.bytes() }
    }

    /// `offset` as a `usize` when `offset..offset + len` lies inside the mapping.
    fn checked_offset(&self, offset: u64, len: usize) -> Option<usize> {
        let offset = usize::try_from(offset).ok()?;
        (offset.checked_add(len)? <= self.bytes.get()).then_some(offset)
    }
}

impl Mapping<ReadWrite> {
    /// Copies `source` to `offset`.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]; nothing was written then.
    pub(crate) fn copy_from(&self, offset: u64, source: &[u8]) -> Result<(), ShmError> {
        let offset = self.range(offset, source.len())?;
        // SAFETY: range says that offset + source.len() <= bytes, and the invariant says that so many bytes
        // are mapped and writable (A is ReadWrite). The source is private, so the two do not overlap.
        unsafe { copy(self.base.as_ptr().byte_add(offset), source.as_ptr().cast(), source.len()) };
        Ok(())
    }

    /// The same around the caches: for a part of much that nobody reads before it would be evicted.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::copy_from`].
    pub(crate) fn copy_from_non_temporal(&self, offset: u64, source: &[u8]) -> Result<(), ShmError> {
        let offset = self.range(offset, source.len())?;
        // SAFETY: as in `copy_from`.
        unsafe { copy_non_temporal(self.base.as_ptr().byte_add(offset), source.as_ptr().cast(), source.len()) };
        Ok(())
    }

    /// Makes it private in children that this process forks from now on. To end before the mapping and `fd`, its file.
    pub(crate) fn make_private_in_children(&self, fd: BorrowedFd<'_>) -> Result<MappingRegistration, ShmError> {
        register_mapping(self.base.as_ptr().expose_provenance(), self.bytes.get(), fd)
    }

    /// Where the bytes from `offset` lie in this process, or `None` when they do not all lie inside. Whoever uses the address
    /// keeps the mapping, and answers for what its module's header says.
    pub(crate) fn address(&self, offset: u64, len: usize) -> Option<usize> {
        self.pointer(offset, len).map(<*const u8>::expose_provenance)
    }

    /// Where the bytes from `offset` begin, or `None` when they do not all lie inside. Whoever looks at them answers for what
    /// this module's header says.
    pub(crate) fn pointer(&self, offset: u64, len: usize) -> Option<*const u8> {
        Some(self.base.as_ptr().cast_const().cast::<u8>().wrapping_add(self.checked_offset(offset, len)?))
    }

    /// The number at `offset`, or `None` when it is not inside or not aligned.
    pub(crate) fn atomic_u64(&self, offset: u64) -> Option<&AtomicU64> {
        let offset = self.checked_offset(offset, size_of::<u64>())?;
        // SAFETY: checked_offset says that the bytes are mapped, and they stay so while `self` is borrowed; they are writable
        // and, as the base is page-aligned, aligned. An atomic may be written by others at any time, other processes
        // included. Within this process the bytes are reached in this way or by opaque copies, which are atomic byte by byte.
        offset
            .is_multiple_of(align_of::<AtomicU64>())
            .then(|| unsafe { AtomicU64::from_ptr(self.base.as_ptr().byte_add(offset).cast()) })
    }

    /// The number at `offset`, or `None` when it is not inside or not aligned.
    pub(crate) fn atomic_u32(&self, offset: u64) -> Option<&AtomicU32> {
        let offset = self.checked_offset(offset, size_of::<u32>())?;
        // SAFETY: as for `atomic_u64`.
        offset
            .is_multiple_of(align_of::<AtomicU32>())
            .then(|| unsafe { AtomicU32::from_ptr(self.base.as_ptr().byte_add(offset).cast()) })
    }
}

impl<A: Access> Drop for Mapping<A> {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's, nothing else unmaps it, and no reference into it exists. A failure would
        // mean that the range is not page-aligned, which mmap has ruled out; the mapping would then merely stay.
        let _ = unsafe { munmap(self.base, self.bytes.get()) };
    }
}

/// What a mapping allows.
pub(crate) trait Access {
    /// Page protection.
    const PROTECTION: ProtFlags;
    /// How to populate.
    const POPULATE: MmapAdvise;
}

/// A mapping that is only read.
#[derive(Debug)]
pub(crate) struct ReadOnly;

impl Access for ReadOnly {
    const PROTECTION: ProtFlags = ProtFlags::PROT_READ;
    const POPULATE: MmapAdvise = MmapAdvise::MADV_POPULATE_READ;
}

/// A mapping that is read and written.
#[derive(Debug)]
pub(crate) struct ReadWrite;

impl Access for ReadWrite {
    const PROTECTION: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);
    const POPULATE: MmapAdvise = MmapAdvise::MADV_POPULATE_WRITE;
}
