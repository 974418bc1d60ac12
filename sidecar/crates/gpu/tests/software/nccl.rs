//! NCCL: versions, communicators, and that no failure blocks longer than its bound.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_gpu::nccl::collective::{Collective, ElementType, Reduction, Work};
use ronde_gpu::nccl::{Communicator, Nccl, ReduceOp, UniqueId};
use ronde_gpu::{Context, DeviceBuffer, DeviceSpan, Event, GpuError, Stream};

use crate::device::{Allocation, Device, library};

fn nccl() -> Arc<Nccl> {
    Nccl::open(vec![library()]).expect("the software device has NCCL")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// A communicator of two ranks, on the two devices, from two threads.
fn pair(device: &Device, nccl: &Arc<Nccl>) -> (Communicator, Communicator) {
    let id = UniqueId::new(nccl).expect("an id");
    let join = |rank: u32| {
        let context = Context::retain(&device.driver, 0).expect("a device");
        Communicator::join(nccl, &context, id, (rank, 2), soon())
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        let one = join(0).expect("both join");
        (one, other.join().expect("no panic").expect("both join"))
    })
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Enqueues an all-reduce in place.
fn all_reduce(one: &mut Communicator, memory: &DeviceSpan, op: ReduceOp, stream: &Stream) -> Result<(), GpuError> {
    let (dtype, reduction) = (ElementType::F32, Reduction { op, factor: 1.0 });
    let work = Work { collective: Collective::AllReduce, source: memory, target: memory, dtype, reduction };
    one.enqueue(&work, stream, soon())
}

#[test]
fn a_missing_nccl_is_named() {
    let error = Nccl::open(vec!["libnccl-that-is-not-there.so.2".into()]).expect_err("no such file");
    assert!(error.to_string().contains("nvidia-nccl-cu12"), "{error}");
}

#[test]
fn an_nccl_that_is_too_old_is_named() {
    let device = Device::take();
    device.set_version(21_703);
    let error = Nccl::open(vec![library()]).expect_err("2.17 is too old");
    assert!(matches!(&error, GpuError::TooOld { needed: "2.18", .. }), "{error:?}");
    assert!(error.to_string().contains("is of version 2.17.3, in "), "{error}");
    // What no version before 2.9 exceeds.
    device.set_version(2_804);
    Nccl::open(vec![library()]).expect_err("2.8 is too old");
    for (number, version) in [(21_800, (2, 18, 0)), (23_203, (2, 32, 3))] {
        device.set_version(number);
        let nccl = Nccl::open(vec![library()]).expect("it is supported");
        assert_eq!((nccl.version(), nccl.version_number()), (version, u32::try_from(number).expect("positive")));
    }
    device.set_version(22_304);
}

#[test]
fn two_ranks_add() {
    let device = Device::take();
    let before = device.count("communicators");
    let nccl = nccl();
    let (one, other) = pair(&device, &nccl);
    assert_eq!(one.ranks(), 2);
    let memory = [device.allocate(8), device.allocate(8)];
    memory[0].write(&floats(&[1.0, 2.0]));
    memory[1].write(&floats(&[10.0, 20.0]));
    let reduce = |mut communicator: Communicator, memory: &Allocation<'_>| {
        let context = Context::retain(&device.driver, 0).expect("a device");
        let stream = Stream::new(&context).expect("a stream");
        all_reduce(&mut communicator, &memory.span(), ReduceOp::Sum, &stream).expect("it is enqueued");
        communicator.wait(&Event::after(&stream).expect("an event"), soon()).expect("both take part");
        communicator.finish(soon()).expect("no failure");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| reduce(one, &memory[0]));
        reduce(other, &memory[1]);
    });
    for memory in &memory {
        assert_eq!(memory.read(), floats(&[11.0, 22.0]));
    }
    assert_eq!(device.count("communicators"), before);
}

/// Performs a collective of two ranks on a buffer of two elements each, and returns both buffers.
fn performed(device: &Device, given: [[f32; 2]; 2], work: impl Fn(&DeviceSpan, u32) -> Parts + Sync) -> [Vec<u8>; 2] {
    let (one, other) = pair(device, &nccl());
    let memory = [device.allocate(8), device.allocate(8)];
    for (memory, given) in memory.iter().zip(&given) {
        memory.write(&floats(given));
    }
    let call = |mut communicator: Communicator, rank: u32, memory: &Allocation<'_>| {
        let context = Context::retain(&device.driver, 0).expect("a device");
        let stream = Stream::new(&context).expect("a stream");
        let (collective, source, target, reduction) = work(&memory.span(), rank);
        let work = Work { collective, source: &source, target: &target, dtype: ElementType::F32, reduction };
        communicator.enqueue(&work, &stream, soon()).expect("it is enqueued");
        communicator.wait(&Event::after(&stream).expect("an event"), soon()).expect("both take part");
        // An abort could reach the other rank before it has polled.
        communicator.finish(soon()).expect("no failure");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| call(one, 0, &memory[0]));
        call(other, 1, &memory[1]);
    });
    [memory[0].read(), memory[1].read()]
}

/// A collective, its memory and its reduction.
type Parts = (Collective, DeviceSpan, DeviceSpan, Reduction);

#[test]
fn parts_are_reduced_gathered_and_sent() {
    let device = Device::take();
    let given = [[1.0, 2.0], [10.0, 20.0]];
    let mine = |whole: &DeviceSpan, rank: u32| {
        let start = rank as usize * 4;
        whole.part(start..start + 4).expect("within")
    };
    let scattered = performed(&device, given, |whole, rank| {
        let reduction = Reduction { op: ReduceOp::Sum, factor: 0.5 };
        (Collective::ReduceScatter, whole.clone(), mine(whole, rank), reduction)
    });
    assert_eq!(scattered, [floats(&[5.5, 2.0]), floats(&[10.0, 11.0])]);
    let gathered = performed(&device, given, |whole, rank| {
        (Collective::AllGather, mine(whole, rank), whole.clone(), Reduction::NONE)
    });
    assert_eq!(gathered, [floats(&[1.0, 20.0]), floats(&[1.0, 20.0])]);
    let sent = performed(&device, given, |whole, _| {
        (Collective::Broadcast { root: 1 }, whole.clone(), whole.clone(), Reduction::NONE)
    });
    assert_eq!(sent, [floats(&[10.0, 20.0]), floats(&[10.0, 20.0])]);
    let product = performed(&device, given, |whole, _| {
        let reduction = Reduction { op: ReduceOp::Product, factor: 1.0 };
        (Collective::AllReduce, whole.clone(), whole.clone(), reduction)
    });
    assert_eq!(product, [floats(&[10.0, 40.0]), floats(&[10.0, 40.0])]);
}

#[test]
fn memory_of_ronde_is_copied_and_freed() {
    let device = Device::take();
    let before = device.count("allocated");
    let context = Context::retain(&device.driver, 0).expect("a device");
    let (given, stream) = (device.allocate(8), Stream::new(&context).expect("a stream"));
    given.write(&floats(&[3.0, 4.0]));
    let own = Arc::new(DeviceBuffer::new(&context, 8).expect("room"));
    stream.copy_device(&given.span(), &own.span()).expect("as many bytes");
    stream.copy_device(&given.span(), &own.span().part(0..4).expect("within")).expect_err("other lengths");
    Event::after(&stream).expect("an event").synchronize().expect("no failure");
    let mut found = [0; 8];
    context.read(&own.span(), &mut found).expect("as many bytes");
    assert_eq!(found.to_vec(), floats(&[3.0, 4.0]));
    context.read(&own.span(), &mut [0; 4]).expect_err("another length");
    own.span().part(4..9).expect_err("past the end");
    device.fail("cuMemAlloc_v2", 2, 1);
    let error = DeviceBuffer::new(&context, 8).expect_err("no room");
    assert!(matches!(error, GpuError::OutOfMemory { .. }), "{error:?}");
    drop((own, given));
    assert_eq!(device.count("allocated"), before);
}

#[test]
fn a_rank_that_does_not_join_is_waited_for_until_the_deadline() {
    let device = Device::take();
    let (nccl, before) = (nccl(), device.count("communicators"));
    let context = Context::retain(&device.driver, 0).expect("a device");
    let id = UniqueId::new(&nccl).expect("an id");
    let deadline = Instant::now() + Duration::from_millis(50);
    let error = Communicator::join(&nccl, &context, id, (0, 2), deadline).expect_err("rank 1 is missing");
    assert!(matches!(&error, GpuError::Aborted { reason } if reason.contains("not all 2 ranks joined")), "{error:?}");
    assert_eq!(device.count("communicators"), before, "it is aborted");
    let error = Communicator::join(&nccl, &context, id, (2, 2), soon()).expect_err("ranks are 0 and 1");
    assert!(error.is_callers(), "{error:?}");
}

#[test]
fn a_rank_that_dies_in_a_collective_aborts_the_others() {
    let device = Device::take();
    let (nccl, before) = (nccl(), device.count("communicators"));
    let (mut one, other) = pair(&device, &nccl);
    let memory = device.allocate(8);
    let context = Context::retain(&device.driver, 0).expect("a device");
    let stream = Stream::new(&context).expect("a stream");
    all_reduce(&mut one, &memory.span(), ReduceOp::Sum, &stream).expect("it is enqueued");
    let event = Event::after(&stream).expect("an event");
    assert!(!event.has_occurred().expect("no failure"), "the other rank is missing");
    // As when its process ends.
    drop(other);
    let error = one.wait(&event, soon()).expect_err("the other rank is gone");
    assert!(matches!(&error, GpuError::Aborted { reason } if reason.contains("ncclRemoteError")), "{error:?}");
    event.synchronize().expect("the kernel has ended");
    let error = all_reduce(&mut one, &memory.span(), ReduceOp::Sum, &stream).expect_err("it is over");
    assert!(matches!(error, GpuError::Aborted { .. }), "{error:?}");
    assert_eq!(device.count("communicators"), before);
}

#[test]
fn a_collective_that_is_late_is_aborted() {
    let device = Device::take();
    let nccl = nccl();
    let (mut one, _other) = pair(&device, &nccl);
    let memory = device.allocate(8);
    let context = Context::retain(&device.driver, 0).expect("a device");
    let stream = Stream::new(&context).expect("a stream");
    all_reduce(&mut one, &memory.span(), ReduceOp::Sum, &stream).expect("it is enqueued");
    let event = Event::after(&stream).expect("an event");
    let error = one.wait(&event, Instant::now() + Duration::from_millis(50)).expect_err("the other never calls");
    assert!(matches!(&error, GpuError::Aborted { reason } if reason.contains("in time")), "{error:?}");
    event.synchronize().expect("the kernel has ended");
}

#[test]
fn what_nccl_refuses_is_an_error_and_no_drop_panics() {
    let device = Device::take();
    let nccl = nccl();
    let context = Context::retain(&device.driver, 0).expect("a device");
    let id = UniqueId::new(&nccl).expect("an id");
    device.fail("ncclCommInitRankConfig", 2, 1);
    let error = Communicator::join(&nccl, &context, id, (0, 1), soon()).expect_err("a system error");
    assert!(error.to_string().contains("ncclSystemError (2)"), "{error}");
    // A code of a later version than this build knows.
    device.fail("async", 99, 1);
    let error = Communicator::join(&nccl, &context, id, (0, 1), soon()).expect_err("a new code");
    assert!(error.to_string().contains("a code of a later version (99)"), "{error}");
    let alone =
        Communicator::join(&nccl, &context, UniqueId::new(&nccl).expect("an id"), (0, 1), soon()).expect("alone");
    device.fail("ncclCommAbort", 3, 1);
    drop(alone);
}
