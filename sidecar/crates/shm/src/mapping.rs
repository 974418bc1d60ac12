//! Shared mappings of sealed memfds, and copies from and to them.
//!
//! # Why copying bytes that another process may be writing is sound
//!
//! Three things can go wrong with memory that another process writes at any time. Each is prevented here:
//!
//! 1. *The memory disappears*: access beyond the end of a file that has shrunk raises SIGBUS. A [`Mapping`] is made
//!    from a [`SealedFd`] only, which is a memfd of ordinary pages with F_SEAL_SHRINK and at least the mapped size.
//!    Seals cannot be removed. Holes that the peer punches read as zeros, unless the kernel refuses to commit their pages,
//!    which it does with `vm.overcommit_memory=2` alone. Huge pages could be missing after a hole was
//!    punched, so memfds of huge pages are rejected.
//! 2. *The compiler assumes that nobody else writes*. A `&[u8]` promises this, and even a plain load may be repeated or
//!    replaced by a second load of the source. Therefore no reference to the bytes is created (except for a worker's
//!    own slots, see `worker_arena`), and bytes are copied by a foreign function that the compiler cannot identify, or
//!    by assembly (`copy`). To the language this is unknown code that may copy byte by byte with relaxed atomic loads
//!    and stores, for which concurrent writes are defined: each copied byte is some value that the byte had. The
//!    `memcpy` of every platform that has memfds behaves like this, as does the assembly: no load or store tears within
//!    a byte.
//! 3. *The program decides on bytes that change afterwards*. Callers get private copies only.
//!
//! The same argument covers two threads of this process that copy from and to overlapping ranges: they may see a
//! mixture of each other's bytes, but nothing worse. A mapping is therefore `Sync`.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::sys::stat::fstat;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::unistd::{Whence, lseek};

use crate::copy::{copy, copy_non_temporal};
use crate::error::ShmError;
use crate::fork::{MappingRegistration, register_mapping};

/// A memfd of ordinary pages whose size never drops below [`SealedFd::bytes`].
#[derive(Debug)]
pub(crate) struct SealedFd {
    fd: OwnedFd,
    bytes: NonZeroUsize,
}

impl SealedFd {
    /// Checks that `fd` is a memfd of ordinary pages that has all of `seals` and cannot shrink.
    ///
    /// `segment` describes it in errors.
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

    /// The memfd's size in bytes, fixed by its seals.
    pub(crate) fn bytes(&self) -> NonZeroUsize {
        self.bytes
    }

    /// The next pages that exist at `offset` or after it, as a range of bytes; `None` after the last one.
    fn next_extent(&self, offset: usize, segment: &str) -> Result<Option<Range<usize>>, ShmError> {
        let seek = |offset: usize, whence| match libc::off_t::try_from(offset).map(|at| lseek(&self.fd, at, whence)) {
            Ok(Ok(found)) => Ok(usize::try_from(found).ok()),
            // There is nothing at the end.
            Ok(Err(Errno::ENXIO)) | Err(_) => Ok(None),
            Ok(Err(errno)) => Err(ShmError::system("seeking pages", segment, errno)),
        };
        let Some(start) = seek(offset, Whence::SeekData)? else { return Ok(None) };
        let end = seek(start, Whence::SeekHole)?;
        // A hole that the peer has made meanwhile ends the extent where it begins.
        Ok(end.filter(|end| *end > start).map(|end| start..end))
    }

    /// Adds seals.
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

/// Checks that a size can be mapped: not zero, and at most half of the address space so that pointer offsets cannot
/// overflow.
pub(crate) fn mappable(bytes: u64, segment: &str) -> Result<NonZeroUsize, ShmError> {
    isize::try_from(bytes)
        .ok()
        .and_then(|bytes| NonZeroUsize::new(bytes.unsigned_abs()))
        .ok_or_else(|| ShmError::SegmentSize { segment: segment.to_owned(), bytes })
}

/// The seals of `fd`, or [`ShmError::NotMemfd`] if it cannot have any.
fn seals_of(fd: BorrowedFd<'_>, segment: &str) -> Result<SealFlag, ShmError> {
    match fcntl(fd, FcntlArg::F_GET_SEALS) {
        Ok(seals) => Ok(SealFlag::from_bits_truncate(seals)),
        Err(Errno::EINVAL | Errno::EBADF) => {
            Err(ShmError::NotMemfd { segment: segment.to_owned(), found: "a file that has no seals" })
        }
        Err(errno) => Err(ShmError::system("reading seals", segment, errno)),
    }
}

/// A populated shared mapping of a complete sealed memfd. `A` is its access mode.
///
/// Invariant: `base` is the start of a live mapping of `bytes` bytes with at least `A`'s protection, which only this
/// value unmaps, of a file that never becomes smaller than `bytes`.
#[derive(Debug)]
pub(crate) struct Mapping<A: Access> {
    /// Describes the segment in errors.
    segment: Box<str>,
    base: NonNull<c_void>,
    bytes: NonZeroUsize,
    access: std::marker::PhantomData<A>,
}

// SAFETY: the mapping belongs to the process, not to a thread; any thread may unmap it.
unsafe impl<A: Access> Send for Mapping<A> {}

// SAFETY: a shared reference only allows copies, and concurrent copies are defined (see the module's documentation).
unsafe impl<A: Access> Sync for Mapping<A> {}

impl<A: Access> Mapping<A> {
    /// Maps `sealed` and populates the page tables of its first `populated_bytes`, so that copies there cause no page
    /// faults.
    ///
    /// Blocks while the kernel allocates and zeroes those pages, about 0.5 ms per MiB of a new memfd.
    pub(crate) fn new(sealed: &SealedFd, segment: &str, populated_bytes: usize) -> Result<Self, ShmError> {
        let whole = populated_bytes >= sealed.bytes().get();
        let mapping = Self::map(sealed, segment, if whole { MapFlags::MAP_POPULATE } else { MapFlags::empty() })?;
        mapping.populate(0..mapping.bytes.get().min(populated_bytes))?;
        Ok(mapping)
    }

    /// Maps `sealed` and populates page tables where its pages exist. The first use of another page allocates it.
    ///
    /// A peer that allocates and frees pages at the same time may make the kernel allocate some of them here; they are
    /// never more than the mapping has.
    pub(crate) fn of_allocated(sealed: &SealedFd, segment: &str) -> Result<Self, ShmError> {
        let mapping = Self::map(sealed, segment, MapFlags::empty())?;
        let mut next = 0;
        for _ in 0..EXTENTS_MAX {
            let Some(extent) = sealed.next_extent(next, segment)? else { break };
            next = extent.end;
            mapping.populate(extent)?;
        }
        Ok(mapping)
    }

    fn map(sealed: &SealedFd, segment: &str, flags: MapFlags) -> Result<Self, ShmError> {
        let bytes = sealed.bytes();
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced. There are no references to the
        // new one.
        let base = unsafe { mmap(None, bytes, A::PROTECTION, MapFlags::MAP_SHARED | flags, sealed.as_fd(), 0) }
            .map_err(|errno| ShmError::system("mmap", segment, errno))?;
        Ok(Self { segment: segment.into(), base, bytes, access: std::marker::PhantomData })
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get() as u64
    }

    /// Copies `target.len()` bytes at `offset` into private memory.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]; the target is then unchanged.
    pub(crate) fn copy_to(&self, offset: u64, target: &mut [u8]) -> Result<(), ShmError> {
        let offset = self.range(offset, target.len())?;
        // SAFETY: `range` checked that offset + target.len() <= bytes, and by the invariant these bytes are mapped and
        // readable. The target is private memory, so the two do not overlap.
        unsafe { copy(target.as_mut_ptr().cast(), self.base.as_ptr().byte_add(offset), target.len()) };
        Ok(())
    }

    /// Populates the page tables of a range of whole pages and reports failures such as lack of memory, which
    /// `MAP_POPULATE` ignores.
    fn populate(&self, range: Range<usize>) -> Result<(), ShmError> {
        let end = range.end.min(self.bytes.get());
        let Some(bytes) = end.checked_sub(range.start).filter(|bytes| *bytes > 0) else { return Ok(()) };
        // SAFETY: start and end are within the mapping, which has one allocation's address arithmetic.
        let start = unsafe { self.base.byte_add(range.start) };
        // SAFETY: the range belongs to this mapping, and populating changes no byte of it.
        match unsafe { madvise(start, bytes, A::POPULATE) } {
            // Kernels before 5.14 lack this advice. mmap has populated the pages already, or their first use will.
            Ok(()) | Err(Errno::EINVAL) => Ok(()),
            Err(errno) => Err(ShmError::system("populating the mapping", &*self.segment, errno)),
        }
    }

    /// Converts `offset` if `offset..offset + len` lies within the mapping.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`].
    fn range(&self, offset: u64, len: usize) -> Result<usize, ShmError> {
        self.checked_offset(offset, len).ok_or_else(|| self.out_of_range(offset, len))
    }

    /// The error for a range that exceeds the mapping.
    pub(crate) fn out_of_range(&self, offset: u64, len: usize) -> ShmError {
        ShmError::OutOfRange { segment: self.segment.to_string(), offset, len: len as u64, size: self.bytes() }
    }

    /// Converts `offset` if `offset..offset + len` lies within the mapping, otherwise returns `None`.
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
    /// [`ShmError::OutOfRange`]; nothing is written in that case.
    pub(crate) fn copy_from(&self, offset: u64, source: &[u8]) -> Result<(), ShmError> {
        let offset = self.range(offset, source.len())?;
        // SAFETY: `range` checked that offset + source.len() <= bytes, and by the invariant these bytes are mapped and
        // writable (A is ReadWrite). The source is private memory, so the two do not overlap.
        unsafe { copy(self.base.as_ptr().byte_add(offset), source.as_ptr().cast(), source.len()) };
        Ok(())
    }

    /// Like [`Mapping::copy_from`], with non-temporal stores: for a block of a large transfer whose bytes are evicted
    /// from the caches before they are read.
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

    /// Makes the mapping private in children that this process forks. Drop the registration before the mapping and
    /// `fd`.
    pub(crate) fn make_private_in_children(&self, fd: BorrowedFd<'_>) -> Result<MappingRegistration, ShmError> {
        register_mapping(self.base.as_ptr().expose_provenance(), self.bytes.get(), fd)
    }

    /// The address of the bytes at `offset`, or `None` if they exceed the mapping. Who uses the address must keep the
    /// mapping and satisfy the conditions in this module's documentation.
    pub(crate) fn address(&self, offset: u64, len: usize) -> Option<usize> {
        self.pointer(offset, len).map(<*const u8>::expose_provenance)
    }

    /// A pointer to the bytes at `offset`, or `None` if they exceed the mapping. Who dereferences it must satisfy the
    /// conditions in this module's documentation.
    pub(crate) fn pointer(&self, offset: u64, len: usize) -> Option<*const u8> {
        Some(self.base.as_ptr().cast_const().cast::<u8>().wrapping_add(self.checked_offset(offset, len)?))
    }

    /// The atomic at `offset`, or `None` if it exceeds the mapping or is not aligned.
    pub(crate) fn atomic_u64(&self, offset: u64) -> Option<&AtomicU64> {
        let offset = self.checked_offset(offset, size_of::<u64>())?;
        // SAFETY: checked_offset ensures that the bytes are mapped, and they stay mapped while `self` is borrowed. They
        // are writable and aligned, because the base is page-aligned. An atomic may be written concurrently, also by
        // other processes. Within this process these bytes are accessed by atomics or by opaque copies, which are
        // atomic for each byte.
        offset
            .is_multiple_of(align_of::<AtomicU64>())
            .then(|| unsafe { AtomicU64::from_ptr(self.base.as_ptr().byte_add(offset).cast()) })
    }

    /// The atomic at `offset`, or `None` if it exceeds the mapping or is not aligned.
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
        // SAFETY: the range belongs to this mapping, only this value unmaps it, and there are no references into it. An
        // error would mean that the range is not page-aligned, which mmap rules out; the mapping would then remain.
        let _ = unsafe { munmap(self.base, self.bytes.get()) };
    }
}

/// The access mode of a mapping.
pub(crate) trait Access {
    /// Page protection.
    const PROTECTION: ProtFlags;
    /// The madvise call that populates it.
    const POPULATE: MmapAdvise;
}

/// A mapping for reading.
#[derive(Debug)]
pub(crate) struct ReadOnly;

impl Access for ReadOnly {
    const PROTECTION: ProtFlags = ProtFlags::PROT_READ;
    const POPULATE: MmapAdvise = MmapAdvise::MADV_POPULATE_READ;
}

/// A mapping for reading and writing.
#[derive(Debug)]
pub(crate) struct ReadWrite;

impl Access for ReadWrite {
    const PROTECTION: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);
    const POPULATE: MmapAdvise = MmapAdvise::MADV_POPULATE_WRITE;
}

/// Extents of a peer's memfd that are populated: a worker writes its pages in few runs. Pages of further ones are mapped
/// by their first use.
const EXTENTS_MAX: usize = 1_024;
