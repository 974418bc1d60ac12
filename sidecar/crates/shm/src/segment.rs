//! Sealed memfd segments: a process's own ([`OwnedSegment`]), and the peer's, either read-only ([`PeerSegment`]) or
//! also written by the sidecar with the results that its worker asked for ([`WorkerSegment`]).
//!
//! A segment is mapped when it is created or attached, and stays mapped for the life of the session. Its pages are
//! populated then: of a new segment the first [`POPULATED_BYTES_MAX`], of a worker's segment those that the worker has
//! allocated. Its size is sealed, so access never ends in a signal. The peer can write an input segment at any time, so all types offer copies
//! only, except for [`OwnedSegment::address`] and [`LeasedSlot`](crate::LeasedSlot). `mapping` explains why this is
//! sound.
//!
//! Forked children inherit the mappings. With `MADV_DONTFORK`, reading an inherited tensor would be a segmentation
//! fault; the mappings cost a child nothing, because page tables of shared mappings are not copied. A child must not
//! write into its parent's tensors: [`OwnedSegment::copy_from`] returns an error there, and writes by address stay
//! private to the child, because a worker's segments are remapped privately in children (see [`fork`](crate::fork)).

use std::ffi::CString;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::SealFlag;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::{SysconfVar, ftruncate, sysconf};

use crate::error::{SEGMENT_NAME_BYTES_MAX, ShmError};
use crate::fork::{ForkGuard, MappingRegistration};
use crate::mapping::{Mapping, ReadOnly, ReadWrite, SealedFd, add_seals, mappable};

/// Who else may write a segment besides its creator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// A worker's segment for inputs and for its own results, sealed against shrinking, growing and further seals. The
    /// sidecar writes only where the worker asked for a result.
    Writable,
    /// A sidecar's result segment, which several workers may share. It also has F_SEAL_FUTURE_WRITE: only the creator's
    /// mapping can write, and receivers can neither map it for writing, write to it, nor punch holes.
    ReadOnlyForOthers,
}

/// Limit for the bytes populated when a segment is created. The creating thread must not block for long, or its peers
/// would consider it dead.
pub const POPULATED_BYTES_MAX: usize = 64 << 20;

/// A segment that this process created and can write.
#[derive(Debug)]
pub struct OwnedSegment {
    /// Declared first, so that it is dropped before mapping and descriptor. `None` if addresses are not available.
    private_in_children: Option<MappingRegistration>,
    mapping: Mapping<ReadWrite>,
    fd: SealedFd,
    fork_guard: ForkGuard,
}

impl OwnedSegment {
    /// Creates, maps, populates and seals a segment of `bytes` bytes, rounded up to whole pages.
    ///
    /// `name` appears in `/proc/<pid>/maps` and in errors. Blocks while the kernel zeroes the first
    /// [`POPULATED_BYTES_MAX`] bytes, about 0.5 ms per MiB; the rest of a larger segment is zeroed on first use.
    ///
    /// # Errors
    ///
    /// [`ShmError::SegmentSize`], [`ShmError::SegmentName`], [`ShmError::ForkTableFull`], or [`ShmError::System`] if
    /// memory or descriptors are exhausted.
    pub fn create(name: &str, bytes: usize, share: Share) -> Result<Self, ShmError> {
        let label = format!("segment {name}");
        let bytes = whole_pages(bytes, &label)?;
        let (fd, mapping) = sized_memfd(name, &label, bytes)?;
        // F_SEAL_FUTURE_WRITE does not affect existing mappings, so it is added after this one. F_SEAL_SEAL must be
        // last.
        let last_seals = match share {
            Share::Writable => SealFlag::F_SEAL_SEAL,
            Share::ReadOnlyForOthers => SealFlag::F_SEAL_FUTURE_WRITE | SealFlag::F_SEAL_SEAL,
        };
        fd.add_seals(last_seals, &label)?;
        let private_in_children = match share {
            Share::Writable => Some(mapping.make_private_in_children(fd.as_fd())?),
            Share::ReadOnlyForOthers => None,
        };
        Ok(Self { private_in_children, mapping, fd, fork_guard: ForkGuard::new() })
    }

    /// Writes `source` at `offset`.
    ///
    /// The peer may see the bytes in any order until it is notified by another channel.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`], or [`ShmError::UsedAfterFork`] in a forked child. Nothing is written in either case.
    pub fn copy_from(&self, offset: u64, source: &[u8]) -> Result<(), ShmError> {
        self.fork_guard.check()?;
        self.mapping.copy_from(offset, source)
    }

    /// Like [`OwnedSegment::copy_from`], with non-temporal stores: for a block of a large transfer whose bytes are
    /// evicted from the caches before they are read. `copy_from` uses them for sources of
    /// [`NON_TEMPORAL_BYTES_MIN`](crate::NON_TEMPORAL_BYTES_MIN) and more.
    ///
    /// # Errors
    ///
    /// Those of [`OwnedSegment::copy_from`].
    pub fn copy_from_non_temporal(&self, offset: u64, source: &[u8]) -> Result<(), ShmError> {
        self.fork_guard.check()?;
        self.mapping.copy_from_non_temporal(offset, source)
    }

    /// Reads `target.len()` bytes at `offset` into private memory.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]; the target is then unchanged.
    pub fn copy_to(&self, offset: u64, target: &mut [u8]) -> Result<(), ShmError> {
        self.mapping.copy_to(offset, target)
    }

    /// The address of `len` bytes at `offset` in this process, valid while this value lives. The peer may write there
    /// as long as it is asked to, and must be trusted not to write afterwards. A forked child sees what its parent
    /// writes until it writes a page itself; the parent does not see the child's writes.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`], which is also returned for every segment of [`Share::ReadOnlyForOthers`].
    pub fn address(&self, offset: u64, len: usize) -> Result<usize, ShmError> {
        let address = self.private_in_children.as_ref().and_then(|_| self.mapping.address(offset, len));
        address.ok_or_else(|| self.mapping.out_of_range(offset, len))
    }

    /// A pointer to `len` bytes at `offset`, or `None` if they exceed the segment.
    pub(crate) fn pointer(&self, offset: u64, len: usize) -> Option<*const u8> {
        self.mapping.pointer(offset, len)
    }

    /// The error for a range that exceeds the segment.
    pub(crate) fn out_of_range(&self, offset: u64, len: usize) -> ShmError {
        self.mapping.out_of_range(offset, len)
    }

    /// The size in bytes: the requested one, rounded up to whole pages. Never zero.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.mapping.bytes()
    }

    /// Always false: segments are never empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The memfd, to pass to the peer.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A segment that the peer created, mapped read-only.
#[derive(Debug)]
pub struct PeerSegment {
    mapping: Mapping<ReadOnly>,
}

impl PeerSegment {
    /// Checks, maps and populates the peer's memfd. `fd` is closed; the mapping keeps the memory.
    ///
    /// The memfd must have the seals SHRINK, GROW and SEAL and exactly `expected_bytes`, at most `limit_bytes`. `name`
    /// describes it in errors ("input segment 3").
    ///
    /// Blocks while pages are populated. Pages that the peer has not written yet are allocated here.
    ///
    /// # Errors
    ///
    /// [`ShmError::OverLimit`], [`ShmError::NotMemfd`], [`ShmError::MissingSeals`] or [`ShmError::WrongSize`] for
    /// mistakes of the peer; [`ShmError::System`] if memory or address space is exhausted.
    pub fn map_named(name: &str, fd: OwnedFd, expected_bytes: u64, limit_bytes: u64) -> Result<Self, ShmError> {
        let sealed = checked(name, fd, expected_bytes, limit_bytes)?;
        Ok(Self { mapping: Mapping::new(&sealed, name, usize::MAX)? })
    }

    /// Calls [`PeerSegment::map_named`] with the name "the peer's segment".
    ///
    /// # Errors
    ///
    /// Those of [`PeerSegment::map_named`].
    pub fn map(fd: OwnedFd, expected_bytes: u64, limit_bytes: u64) -> Result<Self, ShmError> {
        Self::map_named("the peer's segment", fd, expected_bytes, limit_bytes)
    }

    /// Reads `target.len()` bytes at `offset` into private memory.
    ///
    /// The peer may write at the same time; each byte read is then some value that the byte had.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]; the target is then unchanged.
    pub fn copy_to(&self, offset: u64, target: &mut [u8]) -> Result<(), ShmError> {
        self.mapping.copy_to(offset, target)
    }

    /// Size in bytes. Never zero.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.mapping.bytes()
    }

    /// Always false: segments are never empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }
}

/// A worker's segment as its sidecar maps it: read for inputs, written with the results that the worker asked for.
#[derive(Debug)]
pub struct WorkerSegment {
    mapping: Mapping<ReadWrite>,
}

impl WorkerSegment {
    /// Checks and maps a worker's memfd for reading and writing. `fd` is closed; the mapping keeps the memory.
    ///
    /// The memfd must have the seals SHRINK, GROW and SEAL and exactly `expected_bytes`, for which the caller has found
    /// room. `name` describes it in errors ("input segment 3").
    ///
    /// Blocks while page tables are populated. Only pages that exist are: a page belongs to the memory limit (cgroup) of
    /// the process that touches it first, and a worker must not charge its sidecar for pages that nobody uses.
    ///
    /// # Errors
    ///
    /// [`ShmError::SegmentSize`], [`ShmError::NotMemfd`], [`ShmError::MissingSeals`] or [`ShmError::WrongSize`] for
    /// mistakes of the worker; [`ShmError::System`] if memory or address space is exhausted, or the memfd cannot be
    /// mapped for writing.
    pub fn map_named(name: &str, fd: OwnedFd, expected_bytes: u64) -> Result<Self, ShmError> {
        let sealed = checked(name, fd, expected_bytes, expected_bytes)?;
        Ok(Self { mapping: Mapping::of_allocated(&sealed, name)? })
    }

    /// Reads `target.len()` bytes at `offset` into private memory.
    ///
    /// The worker may write at the same time; each byte read is then some value that the byte had.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]; the target is then unchanged.
    pub fn copy_to(&self, offset: u64, target: &mut [u8]) -> Result<(), ShmError> {
        self.mapping.copy_to(offset, target)
    }

    /// Writes `source` at `offset`, where the worker asked for it.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]; nothing is written in that case.
    pub fn copy_from(&self, offset: u64, source: &[u8]) -> Result<(), ShmError> {
        self.mapping.copy_from(offset, source)
    }

    /// Like [`WorkerSegment::copy_from`], with non-temporal stores; see [`OwnedSegment::copy_from_non_temporal`].
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]; nothing is written in that case.
    pub fn copy_from_non_temporal(&self, offset: u64, source: &[u8]) -> Result<(), ShmError> {
        self.mapping.copy_from_non_temporal(offset, source)
    }

    /// Size in bytes. Never zero.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.mapping.bytes()
    }

    /// Always false: segments are never empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }
}

/// Checks that the peer's memfd is what was announced.
fn checked(name: &str, fd: OwnedFd, expected_bytes: u64, limit_bytes: u64) -> Result<SealedFd, ShmError> {
    if expected_bytes > limit_bytes {
        return Err(ShmError::OverLimit { segment: name.to_owned(), bytes: expected_bytes, limit_bytes });
    }
    mappable(expected_bytes, name)?;
    let sealed = SealedFd::verify(fd, SEALS_OF_PEER, name)?;
    let actual = sealed.bytes().get() as u64;
    if actual != expected_bytes {
        return Err(ShmError::WrongSize { segment: name.to_owned(), announced: expected_bytes, actual });
    }
    Ok(sealed)
}

/// Creates a memfd that the peer may write, with all seals, and maps it.
pub(crate) fn sealed_memfd(
    name: &str,
    label: &str,
    bytes: NonZeroUsize,
) -> Result<(SealedFd, Mapping<ReadWrite>), ShmError> {
    let (fd, mapping) = sized_memfd(name, label, bytes)?;
    fd.add_seals(SealFlag::F_SEAL_SEAL, label)?;
    Ok((fd, mapping))
}

/// Creates a memfd, seals its size, and maps it. The caller adds further seals.
fn sized_memfd(name: &str, label: &str, bytes: NonZeroUsize) -> Result<(SealedFd, Mapping<ReadWrite>), ShmError> {
    let fd = create_memfd(name)?;
    let length = libc::off_t::try_from(bytes.get())
        .map_err(|_| ShmError::SegmentSize { segment: label.to_owned(), bytes: bytes.get() as u64 })?;
    ftruncate(&fd, length).map_err(|errno| ShmError::system("ftruncate", label, errno))?;
    let size_seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    add_seals(fd.as_fd(), size_seals, label)?;
    let fd = SealedFd::verify(fd, size_seals, label)?;
    let mapping = Mapping::new(&fd, label, POPULATED_BYTES_MAX)?;
    Ok((fd, mapping))
}

/// Creates a memfd: close-on-exec, sealable, and not executable if the kernel supports that.
fn create_memfd(name: &str) -> Result<OwnedFd, ShmError> {
    let refused = || ShmError::SegmentName { name: name.to_owned() };
    if name.len() > SEGMENT_NAME_BYTES_MAX {
        return Err(refused());
    }
    let c_name = CString::new(name).map_err(|_| refused())?;
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    // Hardened systems require this flag; kernels before 6.3 reject it.
    let no_exec = MFdFlags::from_bits_retain(libc::MFD_NOEXEC_SEAL);
    let created = match memfd_create(c_name.as_c_str(), flags | no_exec) {
        Err(Errno::EINVAL) => memfd_create(c_name.as_c_str(), flags),
        other => other,
    };
    created.map_err(|errno| ShmError::system("memfd_create", format!("segment {name}"), errno))
}

/// Rounds `bytes` up to whole pages.
pub(crate) fn whole_pages(bytes: usize, segment: &str) -> Result<NonZeroUsize, ShmError> {
    let wrong_size = || ShmError::SegmentSize { segment: segment.to_owned(), bytes: bytes as u64 };
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|page| usize::try_from(page).ok());
    let rounded = bytes.checked_next_multiple_of(page.unwrap_or(PAGE_BYTES_MAX)).ok_or_else(wrong_size)?;
    mappable(rounded as u64, segment)
}

/// The seals that a peer's memfd must have: its size is fixed and no further seals can be added.
pub(crate) const SEALS_OF_PEER: SealFlag =
    SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);

/// The largest page size of Linux, used if the system does not report its own.
const PAGE_BYTES_MAX: usize = 65_536;
