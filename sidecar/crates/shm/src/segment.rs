//! Sealed memfd segments: one's own ([`OwnedSegment`]) and the peer's: [`PeerSegment`], which is only read, and
//! [`WorkerSegment`], into which the sidecar also writes the results that its worker wants there.
//!
//! A segment is mapped and populated when it is made or attached and stays mapped for the life of the session. Its
//! size is sealed, so no access can fault. The peer can write an input segment at any time, so all types hand out
//! copies and nothing else (but for [`OwnedSegment::address`] and [`LeasedSlot`](crate::LeasedSlot)); `mapping` argues why that is sound.
//!
//! A forked child inherits the mappings. They stay (`MADV_DONTFORK` would turn a child's innocent look at an inherited
//! tensor into a segmentation fault) and cost a child nothing: page tables of shared mappings are not copied. What a
//! child must not do is write into its parent's tensors: [`OwnedSegment::copy_from`] refuses there, and what it writes by an
//! address stays its own, as a worker's segments are mapped privately in children ([`fork`](crate::fork)).

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

/// Who may write a segment besides its creator's own mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// A worker's segment, for inputs and for results of its own: sealed against shrinking, growing and further seals. The
    /// peer writes only where the worker asked for a result.
    Writable,
    /// A result segment, made by the sidecar and possibly shared by several workers: also sealed with
    /// F_SEAL_FUTURE_WRITE, so that only the creator's mapping can write. No receiver can map it writable, write to it
    /// or punch holes into it.
    ReadOnlyForOthers,
}

/// How much of a new segment is populated at once: the thread that creates it must not stand still for long, since others
/// take its silence for death.
pub const POPULATED_BYTES_MAX: usize = 64 << 20;

/// A segment that this process created and may write.
#[derive(Debug)]
pub struct OwnedSegment {
    /// Declared first: it ends before mapping and descriptor. `None` where nobody gets an address.
    private_in_children: Option<MappingRegistration>,
    mapping: Mapping<ReadWrite>,
    fd: SealedFd,
    fork_guard: ForkGuard,
}

impl OwnedSegment {
    /// Creates, maps, populates and seals a segment of `bytes` bytes, rounded up to whole pages.
    ///
    /// `name` shows in `/proc/<pid>/maps` and in errors. Blocks while the kernel clears the pages, about 0.5 ms a MiB, for at
    /// most [`POPULATED_BYTES_MAX`]: of larger segments the rest is cleared when it is first used.
    ///
    /// # Errors
    ///
    /// [`ShmError::SegmentSize`], [`ShmError::SegmentName`], [`ShmError::ForkTableFull`], or [`ShmError::System`] when memory or
    /// descriptors run out.
    pub fn create(name: &str, bytes: usize, share: Share) -> Result<Self, ShmError> {
        let label = format!("segment {name}");
        let bytes = whole_pages(bytes, &label)?;
        let (fd, mapping) = sized_memfd(name, &label, bytes)?;
        // F_SEAL_FUTURE_WRITE spares mappings that exist, so it comes after ours; F_SEAL_SEAL comes last of all.
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
    /// The peer may see the bytes in any order and state until it is told, by another channel, that they are there.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`], or [`ShmError::UsedAfterFork`] in a forked child; in both cases nothing was written.
    pub fn copy_from(&self, offset: u64, source: &[u8]) -> Result<(), ShmError> {
        self.fork_guard.check()?;
        self.mapping.copy_from(offset, source)
    }

    /// Writes `source` at `offset`, around the caches: for a part of much that nobody reads before it would be evicted.
    /// [`OwnedSegment::copy_from`] does so by itself from 32 MiB on.
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
    /// [`ShmError::OutOfRange`]; the target is then untouched.
    pub fn copy_to(&self, offset: u64, target: &mut [u8]) -> Result<(), ShmError> {
        self.mapping.copy_to(offset, target)
    }

    /// Where `len` bytes at `offset` lie in this process, for whoever can use an address: it is good while this value lives.
    /// The peer may write there until it has been asked to for the last time, and must be trusted not to afterwards. A forked
    /// child sees there what its parent writes, up to what the child itself has written, which the parent does not see.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]: also always for a segment of [`Share::ReadOnlyForOthers`], which is no tensor's memory.
    pub fn address(&self, offset: u64, len: usize) -> Result<usize, ShmError> {
        let address = self.private_in_children.as_ref().and_then(|_| self.mapping.address(offset, len));
        address.ok_or_else(|| self.mapping.out_of_range(offset, len))
    }

    /// Where `len` bytes at `offset` begin, or `None` when they do not all lie inside.
    pub(crate) fn pointer(&self, offset: u64, len: usize) -> Option<*const u8> {
        self.mapping.pointer(offset, len)
    }

    /// Says that bytes do not lie inside.
    pub(crate) fn out_of_range(&self, offset: u64, len: usize) -> ShmError {
        self.mapping.out_of_range(offset, len)
    }

    /// Size in bytes: what was asked for, rounded up to whole pages. Never zero.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.mapping.bytes()
    }

    /// Always false: there are no empty segments.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The memfd, to be passed to the peer.
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
    /// Checks, maps and populates the peer's memfd; `fd` is closed, the mapping keeps the memory.
    ///
    /// The memfd must carry the seals SHRINK, GROW and SEAL and have exactly `expected_bytes`, at most `limit_bytes`.
    /// `name` names it in errors ("input segment 3").
    ///
    /// Blocks while pages are populated. Pages that the peer left out are allocated here and now, at most
    /// `expected_bytes` of them.
    ///
    /// # Errors
    ///
    /// [`ShmError::OverLimit`], [`ShmError::NotMemfd`], [`ShmError::MissingSeals`], [`ShmError::WrongSize`] for what the
    /// peer did wrong; [`ShmError::System`] when memory or address space runs out.
    pub fn map_named(name: &str, fd: OwnedFd, expected_bytes: u64, limit_bytes: u64) -> Result<Self, ShmError> {
        let sealed = checked(name, fd, expected_bytes, limit_bytes)?;
        Ok(Self { mapping: Mapping::new(&sealed, name, usize::MAX)? })
    }

    /// [`PeerSegment::map_named`] under the name "the peer's segment".
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
    /// [`ShmError::OutOfRange`]; the target is then untouched.
    pub fn copy_to(&self, offset: u64, target: &mut [u8]) -> Result<(), ShmError> {
        self.mapping.copy_to(offset, target)
    }

    /// Size in bytes. Never zero.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.mapping.bytes()
    }

    /// Always false: there are no empty segments.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }
}

/// A segment that a worker created, as its sidecar maps it: read for inputs, written for the results that the worker wants
/// there.
#[derive(Debug)]
pub struct WorkerSegment {
    mapping: Mapping<ReadWrite>,
}

impl WorkerSegment {
    /// [`PeerSegment::map_named`], but to be written as well.
    ///
    /// # Errors
    ///
    /// Those of [`PeerSegment::map_named`]; [`ShmError::System`] also when the memfd cannot be mapped to be written.
    pub fn map_named(name: &str, fd: OwnedFd, expected_bytes: u64, limit_bytes: u64) -> Result<Self, ShmError> {
        let sealed = checked(name, fd, expected_bytes, limit_bytes)?;
        Ok(Self { mapping: Mapping::new(&sealed, name, usize::MAX)? })
    }

    /// Reads `target.len()` bytes at `offset` into private memory.
    ///
    /// The worker may write at the same time; each byte read is then some value that the byte had.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]; the target is then untouched.
    pub fn copy_to(&self, offset: u64, target: &mut [u8]) -> Result<(), ShmError> {
        self.mapping.copy_to(offset, target)
    }

    /// Writes `source` at `offset`, where the worker has asked for it.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]; nothing was written then.
    pub fn copy_from(&self, offset: u64, source: &[u8]) -> Result<(), ShmError> {
        self.mapping.copy_from(offset, source)
    }

    /// The same around the caches, as [`OwnedSegment::copy_from_non_temporal`] does it.
    ///
    /// # Errors
    ///
    /// [`ShmError::OutOfRange`]; nothing was written then.
    pub fn copy_from_non_temporal(&self, offset: u64, source: &[u8]) -> Result<(), ShmError> {
        self.mapping.copy_from_non_temporal(offset, source)
    }

    /// Size in bytes. Never zero.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.mapping.bytes()
    }

    /// Always false: there are no empty segments.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }
}

/// The peer's memfd, once it is known to be what was announced.
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

/// A memfd of its own that its peer may write, with all seals, and its mapping.
pub(crate) fn sealed_memfd(
    name: &str,
    label: &str,
    bytes: NonZeroUsize,
) -> Result<(SealedFd, Mapping<ReadWrite>), ShmError> {
    let (fd, mapping) = sized_memfd(name, label, bytes)?;
    fd.add_seals(SealFlag::F_SEAL_SEAL, label)?;
    Ok((fd, mapping))
}

/// A memfd whose size is sealed, and its mapping. Further seals are to follow.
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

/// A fresh memfd, closed on exec, sealable, and not executable where the kernel knows how to say so.
fn create_memfd(name: &str) -> Result<OwnedFd, ShmError> {
    let refused = || ShmError::SegmentName { name: name.to_owned() };
    if name.len() > SEGMENT_NAME_BYTES_MAX {
        return Err(refused());
    }
    let c_name = CString::new(name).map_err(|_| refused())?;
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    // Hardened machines refuse memfds without this flag; kernels before 6.3 refuse it.
    let no_exec = MFdFlags::from_bits_retain(libc::MFD_NOEXEC_SEAL);
    let created = match memfd_create(c_name.as_c_str(), flags | no_exec) {
        Err(Errno::EINVAL) => memfd_create(c_name.as_c_str(), flags),
        other => other,
    };
    created.map_err(|errno| ShmError::system("memfd_create", format!("segment {name}"), errno))
}

/// `bytes` rounded up to whole pages.
pub(crate) fn whole_pages(bytes: usize, segment: &str) -> Result<NonZeroUsize, ShmError> {
    let wrong_size = || ShmError::SegmentSize { segment: segment.to_owned(), bytes: bytes as u64 };
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|page| usize::try_from(page).ok());
    let rounded = bytes.checked_next_multiple_of(page.unwrap_or(PAGE_BYTES_MAX)).ok_or_else(wrong_size)?;
    mappable(rounded as u64, segment)
}

/// What a peer's memfd must carry: a size that never changes, and no seal to come.
pub(crate) const SEALS_OF_PEER: SealFlag =
    SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);

/// The largest page of any Linux, used when the system does not tell its own.
const PAGE_BYTES_MAX: usize = 65_536;
