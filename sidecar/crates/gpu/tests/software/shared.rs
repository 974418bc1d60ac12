//! Memory that processes share, and communicators of several devices in one process.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_gpu::nccl::collective::{Collective, ElementType, Reduction};
use ronde_gpu::nccl::{Buffers, LocalCommunicators, Nccl, ReduceOp, Step};
use ronde_gpu::{Context, DeviceSegment, Event, GpuError, Stream, Transfers, exports};
use ronde_shm::{OwnedSegment, Share, SharedSlot};

use crate::device::{Device, library};

const BYTES: usize = 1 << 20;

fn context(device: &Device, ordinal: u32) -> Arc<Context> {
    Context::retain(&device.driver, ordinal).expect("a device")
}

fn wait(transfers: &Transfers) {
    for event in transfers.mark().expect("events") {
        event.synchronize().expect("the copies end");
    }
}

/// A segment with these bytes at its start.
fn filled(transfers: &mut Transfers, context: &Arc<Context>, content: &[u8]) -> Arc<DeviceSegment> {
    let segment = Arc::new(DeviceSegment::create(context, content.len()).expect("memory"));
    let slot = transfers.lease(content.len()).expect("host memory");
    slot.write(0, content).expect("it fits");
    transfers.deliver(context, (&slot, 0), &segment.part(0, content.len() as u64).expect("its own")).expect("a copy");
    wait(transfers);
    segment
}

fn read(transfers: &mut Transfers, context: &Arc<Context>, segment: &Arc<DeviceSegment>, bytes: usize) -> Vec<u8> {
    let slot: SharedSlot = transfers.lease(bytes).expect("host memory");
    transfers.fetch(context, &segment.part(0, bytes as u64).expect("its own"), (&slot, 0)).expect("a copy");
    wait(transfers);
    let mut content = vec![0; bytes];
    slot.read(0, &mut content).expect("it fits");
    content
}

fn transfers() -> Transfers {
    Transfers::new(1 << 26).expect("an alignment")
}

#[test]
fn exported_memory_is_the_same_memory_where_it_is_imported() {
    let device = Device::take();
    let before = device.count("physical");
    let (context, mut transfers) = (context(&device, 1), transfers());
    let segment = filled(&mut transfers, &context, &[7; 1000]);
    assert!(segment.bytes() >= 1000 && segment.ordinal() == 1);
    let descriptor = segment.export().expect("a descriptor");
    let imported = DeviceSegment::import(&context, descriptor.as_fd(), segment.bytes()).map(Arc::new).expect("its own");
    assert_ne!(imported.address(), segment.address());
    drop(segment);
    // Also when the process that exported it is gone.
    assert_eq!(read(&mut transfers, &context, &imported, 1000), [7; 1000]);
    drop((imported, descriptor));
    assert_eq!(device.count("physical"), before);
}

#[test]
fn descriptors_that_lie_are_refused() {
    let device = Device::take();
    let before = device.count("physical");
    let (zero, one) = (context(&device, 0), context(&device, 1));
    let segment = DeviceSegment::create(&zero, BYTES).expect("memory");
    let descriptor = segment.export().expect("a descriptor");
    let import = |context, bytes| DeviceSegment::import(context, descriptor.as_fd(), bytes);
    let error = import(&zero, 2 * BYTES).expect_err("more than there is");
    assert!(matches!(&error, GpuError::Call { function: "cuMemMap", .. }), "{error}");
    for bytes in [0, BYTES - 1] {
        let error = import(&zero, bytes).expect_err("no size of an allocation");
        assert!(error.to_string().contains("are no multiple of"), "{error}");
    }
    let error = import(&one, BYTES).expect_err("of another device");
    assert!(error.to_string().contains("the memory is on GPU 0, but was given as memory of GPU 1"), "{error}");
    let host = OwnedSegment::create("host", BYTES, Share::Writable).expect("memory");
    let error = DeviceSegment::import(&zero, host.fd(), BYTES).expect_err("no device memory");
    assert!(matches!(&error, GpuError::Call { function: "cuMemImportFromShareableHandle", .. }), "{error}");
    let error = Arc::new(segment).part(1, BYTES as u64).expect_err("past the end");
    assert!(error.to_string().contains("are outside of device memory"), "{error}");
    assert_eq!(device.count("physical"), before);
}

#[test]
fn a_device_without_memory_is_named_and_nothing_leaks() {
    let device = Device::take();
    let before = device.count("physical");
    let context = context(&device, 0);
    let error = DeviceSegment::create(&context, 1 << 40).expect_err("so much");
    assert!(matches!(error, GpuError::OutOfMemory { function: "cuMemCreate", .. }), "{error}");
    for function in ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"] {
        device.fail(function, 2, 1);
        let error = DeviceSegment::create(&context, BYTES).expect_err("it is made to fail");
        assert!(matches!(error, GpuError::OutOfMemory { function: of, .. } if of == function), "{error}");
    }
    assert_eq!(device.count("physical"), before);
    assert!(!exports::free(4096), "nothing was allocated there");
    assert!(exports::find(4096, 1).is_none());
}

#[test]
fn what_is_in_flight_on_the_host_is_bounded_but_one_operation_always_fits() {
    const MIB: u64 = 1 << 20;
    let mut transfers = Transfers::new(4 * MIB).expect("an alignment");
    assert!(transfers.has_room(100 * MIB), "nothing is in flight");
    let large = transfers.lease(20 << 20).expect("the system's memory is the bound");
    assert!(!transfers.has_room(1));
    drop(large);
    let (one, other) = (transfers.lease(1 << 20).expect("room"), transfers.lease(1 << 20).expect("room"));
    assert!(transfers.has_room(2 * MIB) && !transfers.has_room(2 * MIB + 1));
    transfers.abandon(vec![one.clone(), one]);
    assert!(!transfers.has_room(100 * MIB), "the other one will be released");
    drop(other);
    assert!(transfers.has_room(100 * MIB), "nothing waits for what is never released");
}

/// Communicators of two devices.
fn pair(device: &Device) -> LocalCommunicators {
    let nccl = Nccl::open(vec![library()]).expect("the software device has NCCL");
    let contexts = [context(device, 0), context(device, 1)];
    LocalCommunicators::join(&nccl, &contexts, soon(), &mut || Ok(())).expect("both join")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn buffers(segments: &[Arc<DeviceSegment>], bytes: usize) -> Vec<Buffers> {
    let span = |segment: &Arc<DeviceSegment>| segment.part(0, bytes as u64).expect("its own");
    segments.iter().map(|segment| Buffers { source: span(segment), target: span(segment) }).collect()
}

fn step(collective: Collective, op: ReduceOp, buffers: Vec<Buffers>) -> Step {
    Step { collective, dtype: ElementType::F32, reduction: Reduction { op, factor: 1.0 }, buffers }
}

/// A sum of all devices' bytes.
fn sum(buffers: Vec<Buffers>) -> [Step; 1] {
    [step(Collective::AllReduce, ReduceOp::Sum, buffers)]
}

#[test]
fn devices_of_one_process_reduce() {
    let device = Device::take();
    let communicators_before = device.count("communicators");
    let (mut transfers, mut communicators) = (transfers(), pair(&device));
    assert_eq!(communicators.devices().collect::<Vec<_>>(), [0, 1]);
    let of = |transfers: &mut Transfers, values: [[f32; 2]; 2]| -> Vec<Arc<DeviceSegment>> {
        (0..2).map(|at| filled(transfers, &context(&device, at), &floats(&values[at as usize]))).collect()
    };
    let segments = of(&mut transfers, [[1.0, 5.0], [2.0, 3.0]]);
    let cases = [(ReduceOp::Sum, [3.0, 8.0]), (ReduceOp::Average, [3.0, 8.0]), (ReduceOp::Product, [9.0, 64.0])];
    for (op, expected) in cases {
        let collective = [step(Collective::AllReduce, op, buffers(&segments, 8))];
        communicators.perform(&collective, soon(), &mut || Ok(())).expect("no failure");
        for (at, segment) in (0..).zip(&segments) {
            assert_eq!(read(&mut transfers, &context(&device, at), segment, 8), floats(&expected), "{collective:?}");
        }
    }
    let other_lengths = vec![buffers(&segments, 8).remove(0), buffers(&segments, 4).remove(1)];
    let error = communicators.perform(&sum(other_lengths), soon(), &mut || Ok(()));
    assert!(error.expect_err("other lengths").to_string().contains("different lengths"));
    drop(communicators);
    assert_eq!(device.count("communicators"), communicators_before);
}

/// Both phases of two levels, in place: 4 elements for each of two devices and a rest of 1, all in one group.
#[test]
fn parts_are_reduced_and_gathered_in_their_places() {
    let device = Device::take();
    let (mut transfers, mut communicators) = (transfers(), pair(&device));
    let content = |from: u8| (0..9).map(|at| f32::from(from + at)).collect::<Vec<f32>>();
    let segments: Vec<_> = [1, 100]
        .map(content)
        .iter()
        .zip(0..)
        .map(|(of, at)| filled(&mut transfers, &context(&device, at), &floats(of)))
        .collect();
    let span = |at: usize, range: std::ops::Range<usize>| {
        segments[at].part(0, 36).expect("its own").part(range).expect("within")
    };
    let parts = |source: fn(usize) -> std::ops::Range<usize>, target: fn(usize) -> std::ops::Range<usize>| {
        (0..2).map(|at| Buffers { source: span(at, source(at)), target: span(at, target(at)) }).collect::<Vec<_>>()
    };
    let own = |at: usize| at * 16..(at + 1) * 16;
    let first = [
        step(Collective::ReduceScatter, ReduceOp::Sum, parts(|_| 0..32, own)),
        step(Collective::AllReduce, ReduceOp::Sum, parts(|_| 32..36, |_| 32..36)),
    ];
    communicators.perform(&first, soon(), &mut || Ok(())).expect("no failure");
    let gather = [step(Collective::AllGather, ReduceOp::Sum, parts(own, |_| 0..32))];
    communicators.perform(&gather, soon(), &mut || Ok(())).expect("no failure");
    let total: Vec<f32> = (0..9_u8).map(|at| f32::from(101 + 2 * at)).collect();
    for (at, segment) in (0..).zip(&segments) {
        assert_eq!(read(&mut transfers, &context(&device, at), segment, 36), floats(&total), "device {at}");
    }
    // Contributions that are multiplied before they are added.
    let halves = Step {
        reduction: Reduction { op: ReduceOp::Sum, factor: 0.5 },
        ..step(Collective::AllReduce, ReduceOp::Sum, parts(|_| 0..36, |_| 0..36))
    };
    communicators.perform(&[halves], soon(), &mut || Ok(())).expect("no failure");
    assert_eq!(read(&mut transfers, &context(&device, 1), &segments[1], 36), floats(&total), "half of twice the total");
    let unfit = [step(Collective::ReduceScatter, ReduceOp::Sum, parts(|_| 0..36, own))];
    let error = communicators.perform(&unfit, soon(), &mut || Ok(())).expect_err("no two equal parts");
    assert!(error.to_string().contains("the lengths do not fit"), "{error}");
    assert!(!communicators.are_aborted(), "it is refused before NCCL");
    communicators.perform(&sum(parts(|_| 0..4, |_| 0..4)), soon(), &mut || Ok(())).expect("it is refused before NCCL");
}

#[test]
fn a_collective_that_is_ended_aborts_all_communicators() {
    let device = Device::take();
    let before = device.count("communicators");
    let (mut transfers, mut communicators) = (transfers(), pair(&device));
    let segments: Vec<_> = (0..2).map(|at| filled(&mut transfers, &context(&device, at), &floats(&[1.0]))).collect();
    let error = communicators.perform(&sum(buffers(&segments, 4)), soon(), &mut || Err("a rank is gone".to_owned()));
    // The collective may complete before the first check; NCCL's own answer then counts.
    if let Err(error) = error {
        assert!(matches!(&error, GpuError::Aborted { reason } if reason == "a rank is gone"), "{error}");
        assert_eq!(device.count("communicators"), before);
        assert!(communicators.are_aborted());
        let again = communicators.perform(&sum(buffers(&segments, 4)), soon(), &mut || Ok(()));
        assert!(again.expect_err("they are aborted").to_string().contains("aborted"));
    }
}

#[test]
fn a_failure_of_nccl_aborts_all_communicators() {
    let device = Device::take();
    let before = device.count("communicators");
    let (mut transfers, mut communicators) = (transfers(), pair(&device));
    let segments: Vec<_> = (0..2).map(|at| filled(&mut transfers, &context(&device, at), &floats(&[1.0]))).collect();
    device.fail("async", 6, 0);
    let error = communicators.perform(&sum(buffers(&segments, 4)), soon(), &mut || Ok(()));
    device.heal();
    assert!(matches!(error, Err(GpuError::Aborted { .. })), "{error:?}");
    assert!(communicators.are_aborted());
    assert_eq!(device.count("communicators"), before);
}

#[test]
fn copies_within_a_device_follow_the_stream_before_them() {
    let device = Device::take();
    let (context, mut transfers) = (context(&device, 0), transfers());
    let (source, target) = (filled(&mut transfers, &context, &[1; 100]), filled(&mut transfers, &context, &[2; 100]));
    let stream = Stream::new(&context).expect("a stream");
    let part = |segment: &Arc<DeviceSegment>, bytes| segment.part(0, bytes).expect("its own");
    stream.copy_device(&part(&source, 100), &part(&target, 100)).expect("equal lengths");
    Event::after(&stream).expect("an event").synchronize().expect("the copy ends");
    assert_eq!(read(&mut transfers, &context, &target, 100), [1; 100]);
    stream.copy_device(&part(&source, 100), &part(&target, 99)).expect_err("other lengths");
}

#[test]
fn slots_of_ever_larger_sizes_do_not_add_up() {
    let _device = Device::take();
    let mut transfers = Transfers::new(64 << 20).expect("the alignment is valid");
    for mib in [20, 30, 40, 50, 60, 63] {
        drop(transfers.lease(mib << 20).expect("the system has memory"));
        assert!(transfers.mapped_bytes() <= 64 << 20, "{} bytes after {mib} MiB", transfers.mapped_bytes());
    }
    // What is in use stays.
    let _held = transfers.lease(30 << 20).expect("the system has memory");
    drop(transfers.lease(62 << 20).expect("the system has memory"));
    assert!(transfers.mapped_bytes() > 64 << 20);
}
