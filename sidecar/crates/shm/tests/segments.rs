//! Segments of a hostile peer: what it must not be able to pass, do or cause.

use std::fs::File;
use std::io::Write;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::unistd::ftruncate;
use proptest::prelude::*;
use ronde_shm::{Blame, OwnedSegment, PeerSegment, Share, ShmError, WorkerSegment};

const PAGE: usize = 4_096;
const LIMIT: u64 = 1 << 30;

/// A memfd with these seals.
fn memfd(bytes: i64, seals: SealFlag) -> OwnedFd {
    let fd = memfd_create("peer", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).expect("memfd");
    ftruncate(&fd, bytes).expect("size");
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).expect("seals");
    fd
}

fn all_seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

fn duplicate(fd: BorrowedFd<'_>) -> OwnedFd {
    fd.try_clone_to_owned().expect("a descriptor")
}

fn map(fd: BorrowedFd<'_>, bytes: usize, protection: ProtFlags) -> Result<NonNull<AtomicU8>, Errno> {
    let bytes = NonZeroUsize::new(bytes).expect("not zero");
    // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory that exists.
    unsafe { mmap(None, bytes, protection, MapFlags::MAP_SHARED, fd, 0) }.map(NonNull::cast)
}

fn unmap(base: NonNull<AtomicU8>, bytes: usize) {
    // SAFETY: the tests call this once for what `map` returned, after the last access.
    unsafe { munmap(base.cast(), bytes) }.expect("unmapped");
}

#[test]
fn the_peer_reads_what_the_owner_writes() {
    let owned = OwnedSegment::create("input", 3 * PAGE, Share::Writable).expect("segment");
    let peer = PeerSegment::map(duplicate(owned.fd()), owned.len(), LIMIT).expect("mapped");
    let pattern: Vec<u8> = (0..=255).cycle().take(3 * PAGE).collect();
    owned.copy_from(0, &pattern).expect("inside");
    owned.copy_from(5, b"odd offsets").expect("inside");
    let mut read = [0; 11];
    peer.copy_to(5, &mut read).expect("inside");
    assert_eq!(&read, b"odd offsets");
    let (mut own, mut peers) = (vec![0; 3 * PAGE], vec![0; 3 * PAGE]);
    owned.copy_to(0, &mut own).expect("inside");
    peer.copy_to(0, &mut peers).expect("inside");
    assert_eq!(own, peers);
    assert_eq!(own[..5], pattern[..5]);
    assert_eq!(own[16..], pattern[16..]);
}

#[test]
fn sizes_are_whole_pages_and_fresh_bytes_are_zero() {
    let owned = OwnedSegment::create("input", 1, Share::Writable).expect("segment");
    assert_eq!((owned.len() % PAGE as u64, owned.is_empty()), (0, false));
    let mut bytes = vec![1; PAGE];
    owned.copy_to(0, &mut bytes).expect("inside");
    assert!(bytes.iter().all(|byte| *byte == 0));
}

#[test]
fn segments_that_cannot_be_are_refused() {
    let too_large = usize::MAX - PAGE;
    for bytes in [0, too_large, usize::MAX] {
        let error = OwnedSegment::create("input", bytes, Share::Writable).expect_err("no such size");
        assert!(matches!(error, ShmError::SegmentSize { .. }), "{error}");
    }
    let error =
        OwnedSegment::create("input", isize::MAX.unsigned_abs() - PAGE, Share::Writable).expect_err("no memory");
    assert!(matches!(error, ShmError::System { .. }), "{error}");
    for name in ["zero\0byte".to_owned(), "n".repeat(250)] {
        let error = OwnedSegment::create(&name, PAGE, Share::Writable).expect_err("no such name");
        assert!(matches!(error, ShmError::SegmentName { .. }), "{error}");
    }
    assert!(OwnedSegment::create(&"n".repeat(249), PAGE, Share::Writable).is_ok());
}

proptest! {
    #[test]
    fn copies_stay_inside(offset in prop_oneof![0..20_000_u64, any::<u64>(), (u64::MAX - 9_000)..], len in 0..12_000_usize) {
        let size = 2 * PAGE as u64;
        let owned = OwnedSegment::create("input", 2 * PAGE, Share::Writable).expect("segment");
        let peer = PeerSegment::map(duplicate(owned.fd()), size, LIMIT).expect("mapped");
        let mut bytes = vec![7; len];
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= size);
        prop_assert_eq!(owned.copy_from(offset, &bytes).is_ok(), inside);
        prop_assert_eq!(owned.copy_to(offset, &mut bytes).is_ok(), inside);
        let read = peer.copy_to(offset, &mut bytes);
        prop_assert_eq!(read.is_ok(), inside);
        prop_assert!(bytes.iter().all(|byte| *byte == 7));
        if let Err(error) = read {
            prop_assert_eq!(error.blame(), Blame::Caller);
            let right = matches!(error, ShmError::OutOfRange { offset: o, len: l, size: s, .. } if (o, l, s) == (offset, len as u64, size));
            prop_assert!(right);
        }
    }
}

#[test]
fn each_missing_seal_is_named() {
    let all = [
        (SealFlag::F_SEAL_SHRINK, "F_SEAL_SHRINK"),
        (SealFlag::F_SEAL_GROW, "F_SEAL_GROW"),
        (SealFlag::F_SEAL_SEAL, "F_SEAL_SEAL"),
    ];
    for (seal, name) in all {
        let fd = memfd(PAGE as i64, all_seals().difference(seal));
        let error = PeerSegment::map(fd, PAGE as u64, LIMIT).expect_err("a seal is missing");
        assert!(matches!(&error, ShmError::MissingSeals { missing, .. } if missing == name), "{error}");
        assert_eq!(error.blame(), Blame::Peer);
    }
    let error = PeerSegment::map(memfd(PAGE as i64, SealFlag::empty()), PAGE as u64, LIMIT).expect_err("unsealed");
    assert!(error.to_string().contains("F_SEAL_SEAL|F_SEAL_SHRINK|F_SEAL_GROW"), "{error}");
    let unsealable = memfd_create("peer", MFdFlags::MFD_CLOEXEC).expect("memfd");
    ftruncate(&unsealable, PAGE as i64).expect("size");
    let error = PeerSegment::map(unsealable, PAGE as u64, LIMIT).expect_err("not sealable");
    assert!(matches!(error, ShmError::MissingSeals { .. }), "{error}");
}

#[test]
fn descriptors_other_than_memfds_are_refused() {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(&[0; PAGE]).expect("written");
    let (pipe, _other_end) = nix::unistd::pipe().expect("a pipe");
    let directory = File::open(std::env::temp_dir()).expect("a directory");
    let device = File::open("/dev/zero").expect("a device");
    for fd in [OwnedFd::from(file), pipe, directory.into(), device.into()] {
        let error = PeerSegment::map(fd, PAGE as u64, LIMIT).expect_err("no memfd");
        // A regular file on tmpfs supports the query for seals but has the wrong ones.
        assert!(matches!(error, ShmError::NotMemfd { .. } | ShmError::MissingSeals { .. }), "{error}");
    }
}

#[test]
fn huge_pages_are_refused() {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING | MFdFlags::MFD_HUGETLB;
    // No huge page is touched, so the pool may be empty. A kernel without huge pages skips this test.
    let Ok(fd) = memfd_create("peer", flags) else { return };
    let huge_page = 1 << 30;
    if ftruncate(&fd, huge_page).is_err() || fcntl(&fd, FcntlArg::F_ADD_SEALS(all_seals())).is_err() {
        return;
    }
    let error = PeerSegment::map(fd, huge_page.unsigned_abs(), LIMIT).expect_err("huge pages can be missing");
    assert!(matches!(error, ShmError::NotMemfd { found: "a memfd of huge pages", .. }), "{error}");
}

#[test]
fn another_size_than_announced_is_refused() {
    for announced in [1, PAGE as u64 - 1, PAGE as u64 + 1, 1 << 29] {
        let error = PeerSegment::map(memfd(PAGE as i64, all_seals()), announced, LIMIT).expect_err("wrong size");
        let right = matches!(error, ShmError::WrongSize { announced: a, actual, .. } if (a, actual) == (announced, PAGE as u64));
        assert!(right, "{error}");
    }
    for announced in [0, u64::MAX] {
        let error = PeerSegment::map(memfd(PAGE as i64, all_seals()), announced, u64::MAX).expect_err("no size");
        assert!(matches!(error, ShmError::SegmentSize { .. }), "{error}");
    }
    let error = PeerSegment::map(memfd(0, all_seals()), PAGE as u64, LIMIT).expect_err("empty");
    assert!(matches!(error, ShmError::SegmentSize { bytes: 0, .. }), "{error}");
}

#[test]
fn a_segment_over_the_limit_is_refused_before_it_costs_anything() {
    let error = PeerSegment::map(memfd(1 << 40, all_seals()), 1 << 40, LIMIT).expect_err("over the limit");
    assert!(matches!(error, ShmError::OverLimit { bytes, limit_bytes: LIMIT, .. } if bytes == 1 << 40), "{error}");
    assert!(
        PeerSegment::map(memfd(PAGE as i64, all_seals()), PAGE as u64, PAGE as u64).is_ok(),
        "the limit is inclusive"
    );
}

#[test]
fn a_size_that_is_no_whole_page_is_read_to_its_end() {
    let peer = PeerSegment::map(memfd(100, all_seals()), 100, LIMIT).expect("mapped");
    assert!(peer.copy_to(0, &mut [0; 100]).is_ok());
    assert!(peer.copy_to(1, &mut [0; 100]).is_err());
}

#[test]
fn a_sealed_segment_cannot_be_resized() {
    for share in [Share::Writable, Share::ReadOnlyForOthers] {
        let owned = OwnedSegment::create("sealed", 2 * PAGE, share).expect("segment");
        for bytes in [0, PAGE as i64, 3 * PAGE as i64] {
            assert_eq!(ftruncate(owned.fd(), bytes), Err(Errno::EPERM));
        }
        let unseal = fcntl(owned.fd(), FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE));
        assert_eq!(unseal, Err(Errno::EPERM), "no further seals");
    }
}

#[test]
fn a_result_segment_is_written_by_its_creator_only() {
    let owned = OwnedSegment::create("result", 2 * PAGE, Share::ReadOnlyForOthers).expect("segment");
    owned.copy_from(0, b"result").expect("the creator's mapping predates the seal");
    let received = duplicate(owned.fd());

    let writable = map(received.as_fd(), PAGE, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE);
    assert_eq!(writable.err(), Some(Errno::EPERM));
    assert_eq!(nix::unistd::write(&received, b"scribble"), Err(Errno::EPERM));
    let hole = fallocate(
        &received,
        FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE,
        0,
        PAGE as i64,
    );
    assert_eq!(hole, Err(Errno::EPERM));

    // A read-only mapping cannot be made writable.
    let base = map(received.as_fd(), PAGE, ProtFlags::PROT_READ).expect("mapped");
    // SAFETY: changing the protection of a mapping that only this test knows.
    let raised = unsafe { nix::sys::mman::mprotect(base.cast(), PAGE, ProtFlags::PROT_WRITE) };
    assert_eq!(raised, Err(Errno::EACCES));
    unmap(base, PAGE);

    let reopened = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", raw(&received)));
    if let Ok(reopened) = reopened {
        assert_eq!(nix::unistd::write(&reopened, b"scribble"), Err(Errno::EPERM));
    }
    let peer = PeerSegment::map(received, owned.len(), LIMIT).expect("mapped");
    owned.copy_from(6, b"s").expect("inside");
    let mut read = [0; 7];
    peer.copy_to(0, &mut read).expect("inside");
    assert_eq!(&read, b"results");
}

#[test]
fn a_workers_segment_is_read_and_written_within_its_bounds() {
    let owned = OwnedSegment::create("worker", PAGE, Share::Writable).expect("segment");
    let worker = WorkerSegment::map_named("mine", duplicate(owned.fd()), owned.len()).expect("mapped");
    worker.copy_from(100, &[7; 8]).expect("inside");
    let mut seen = [0; 10];
    owned.copy_to(99, &mut seen).expect("inside");
    assert_eq!(seen, [0, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
    let outside = [
        worker.copy_from(PAGE as u64 - 7, &[9; 8]),
        worker.copy_from(u64::MAX, &[9; 8]),
        worker.copy_to(PAGE as u64 - 7, &mut [0; 8]),
    ];
    for outcome in outside {
        let error = outcome.expect_err("outside");
        assert!(matches!(&error, ShmError::OutOfRange { segment, .. } if segment == "mine"), "{error}");
    }
    owned.copy_to(PAGE as u64 - 10, &mut seen).expect("inside");
    assert_eq!(seen, [0; 10]);
    // The same checks as for a read-only segment; a memfd that cannot be written is rejected.
    let loose = memfd(PAGE as i64, all_seals().difference(SealFlag::F_SEAL_SHRINK));
    let error = WorkerSegment::map_named("mine", loose, PAGE as u64).expect_err("a seal is missing");
    assert!(matches!(error, ShmError::MissingSeals { .. }), "{error}");
    let frozen = memfd(PAGE as i64, all_seals() | SealFlag::F_SEAL_FUTURE_WRITE);
    let error = WorkerSegment::map_named("mine", frozen, PAGE as u64).expect_err("not to be written");
    assert!(matches!(error, ShmError::System { .. }), "{error}");
}

/// The pages that a memfd has.
fn allocated_pages(fd: &impl AsFd) -> usize {
    let blocks = nix::sys::stat::fstat(fd).expect("a memfd").st_blocks;
    usize::try_from(blocks).expect("few") * 512 / PAGE
}

#[test]
fn attaching_a_workers_segment_allocates_none_of_its_pages() {
    const PAGES: usize = 4_096;
    let sparse = memfd((PAGES * PAGE) as i64, all_seals());
    for page in [0, 1, 7, PAGES - 1] {
        let at = libc::off_t::try_from(page * PAGE).expect("small");
        assert_eq!(nix::sys::uio::pwrite(&sparse, b"here", at), Ok(4));
    }
    let worker = WorkerSegment::map_named("sparse", duplicate(sparse.as_fd()), (PAGES * PAGE) as u64).expect("mapped");
    assert_eq!(allocated_pages(&sparse), 4, "only those that were written");
    for (page, expected) in [(0, b"here"), (1, b"here"), (2, &[0; 4]), (7, b"here"), (PAGES - 1, b"here")] {
        let mut seen = [9; 4];
        worker.copy_to((page * PAGE) as u64, &mut seen).expect("inside");
        assert_eq!(&seen, expected, "page {page}");
    }
    worker.copy_from(100 * PAGE as u64, b"result").expect("inside");
    assert_eq!(allocated_pages(&sparse), 6, "and the two that were used");
}

#[test]
fn an_input_segment_is_mapped_read_only() {
    let owned = OwnedSegment::create("ronde-test-protection", PAGE, Share::Writable).expect("segment");
    let peer = PeerSegment::map(duplicate(owned.fd()), owned.len(), LIMIT).expect("mapped");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let mut protections: Vec<&str> = maps
        .lines()
        .filter(|line| line.contains("memfd:ronde-test-protection"))
        .filter_map(|line| line.split_whitespace().nth(1))
        .collect();
    protections.sort_unstable();
    assert_eq!(protections, ["r--s", "rw-s"]);
    drop((owned, peer));
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    assert!(!maps.contains("memfd:ronde-test-protection"), "dropping unmaps");
}

#[test]
fn concurrent_writes_and_punched_holes_only_change_bytes() {
    const BYTES: usize = 64 * PAGE;
    let fd = memfd(BYTES as i64, all_seals());
    let peer = PeerSegment::map(duplicate(fd.as_fd()), BYTES as u64, LIMIT).expect("mapped");
    let base = map(fd.as_fd(), BYTES, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE).expect("mapped");
    let stop = AtomicBool::new(false);
    let shared = Scribbled(base);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0_u8;
            while !stop.load(Ordering::Relaxed) {
                round = round % 200 + 1;
                shared.fill(BYTES, round);
                let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                fallocate(&fd, flags, PAGE as i64, BYTES as i64 / 2).expect("a hole");
                assert_eq!(ftruncate(&fd, 0), Err(Errno::EPERM), "only the seals keep reads from faulting");
            }
        });
        let mut copy = vec![0; BYTES];
        for _ in 0..300 {
            peer.copy_to(0, &mut copy).expect("inside");
            assert!(copy.iter().all(|byte| *byte <= 200), "only bytes that were ever there");
        }
        stop.store(true, Ordering::Relaxed);
    });
    unmap(base, BYTES);
}

#[test]
fn threads_may_copy_to_and_from_the_same_bytes() {
    let owned = OwnedSegment::create("result", PAGE, Share::ReadOnlyForOthers).expect("segment");
    let written = [0_u8, 3, 5];
    std::thread::scope(|scope| {
        for byte in [3, 5] {
            let owned = &owned;
            scope.spawn(move || {
                for _ in 0..2_000 {
                    owned.copy_from(0, &[byte; PAGE]).expect("inside");
                }
            });
        }
        let mut copy = [0; PAGE];
        for _ in 0..2_000 {
            owned.copy_to(0, &mut copy).expect("inside");
            assert!(copy.iter().all(|byte| written.contains(byte)));
        }
    });
}

/// The writable view of the hostile thread.
struct Scribbled(NonNull<AtomicU8>);

impl Scribbled {
    fn fill(&self, bytes: usize, value: u8) {
        for index in 0..bytes {
            // SAFETY: the test maps `bytes` bytes writable at the base and unmaps them after the thread has ended.
            unsafe { self.0.add(index).as_ref() }.store(value, Ordering::Relaxed);
        }
    }
}

// SAFETY: all accesses through it are atomic.
unsafe impl Sync for Scribbled {}

fn raw(fd: &OwnedFd) -> i32 {
    use std::os::fd::AsRawFd;
    fd.as_raw_fd()
}
