//! Copies: their order, their failures, and how long what they use is kept.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ronde_gpu::{CallerStream, DeviceSpan, GpuError, Keep, Registrations, Staging, StagingConfig};
use ronde_shm::LeasedSlot;

use crate::device::{Device, Slots, caller, eventually};

const SMALL: StagingConfig = StagingConfig { chunk_bytes: 1000, window: 3, drain_timeout: Duration::from_secs(10) };

fn staging(device: &Device) -> Staging {
    Staging::new(&device.driver, 0, &Arc::new(Registrations::default()), SMALL).expect("a device")
}

/// Fetches a span, and returns where the filled slot arrives.
fn fetch(
    staging: &Staging,
    source: DeviceSpan,
    stream: CallerStream,
    slot: LeasedSlot,
) -> Result<Receiver<Result<LeasedSlot, GpuError>>, GpuError> {
    let (send, receive) = channel();
    let after = Arc::new(staging.mark(stream)?);
    staging.fetch(source, after, slot, Box::new(move |filled| drop(send.send(filled))))?;
    Ok(receive)
}

fn filled(receiver: &Receiver<Result<LeasedSlot, GpuError>>) -> Result<LeasedSlot, GpuError> {
    receiver.recv_timeout(Duration::from_secs(10)).expect("every job ends")
}

fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from((at * 31 + seed * 7) % 251).expect("below 251")).collect()
}

#[test]
fn bytes_arrive_for_lengths_around_the_chunks() {
    let device = Device::take();
    let contexts = device.count("contexts");
    let (slots, staging) = (Slots::new(), staging(&device));
    for bytes in [1, 999, 1000, 1001, 3000, 10_007] {
        let (source, target) = (device.allocate(bytes), device.allocate(bytes));
        source.write(&pattern(bytes, bytes));
        let arrived = fetch(&staging, source.span(), CallerStream::LEGACY, slots.lease(bytes)).expect("device memory");
        let slot = filled(&arrived).expect("no failure");
        assert_eq!(slot.bytes()[..bytes], pattern(bytes, bytes));
        let after = staging.mark(CallerStream::LEGACY).expect("an event");
        staging.deliver(slot, target.span(), &after).expect("device memory").synchronize().expect("no failure");
        assert_eq!(target.read(), pattern(bytes, bytes));
    }
    assert_eq!(device.count("registrations"), 1, "all slots are in one segment");
    eventually("slots are released", || slots.in_use() == 0);
    drop(staging);
    assert_eq!((device.count("registrations"), device.count("contexts")), (0, contexts));
}

#[test]
fn an_empty_tensor_needs_no_copy() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let copies = device.count("copies");
    // SAFETY: no byte is accessed.
    let empty = unsafe { DeviceSpan::new(0, 0, 0, None) };
    let arrived = fetch(&staging, empty.clone(), CallerStream::LEGACY, slots.lease(0)).expect("nothing to check");
    let slot = filled(&arrived).expect("no failure");
    let after = staging.mark(CallerStream::LEGACY).expect("an event");
    staging.deliver(slot, empty, &after).expect("nothing to check").synchronize().expect("no failure");
    assert_eq!(device.count("copies"), copies);
}

#[test]
fn a_copy_waits_for_the_callers_stream_and_the_host_does_not() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let (source, stream) = (device.allocate(5000), device.stream());
    let synchronizations = device.count("stream_synchronizations");
    device.hold(stream, true);
    source.fill(stream, 7);
    let arrived = fetch(&staging, source.span(), caller(stream), slots.lease(5000)).expect("device memory");
    // Enqueued after the call: the copy may not see it before its own end, whatever the caller does next is ordered by it.
    assert!(arrived.recv_timeout(Duration::from_millis(50)).is_err(), "the kernel has not run");
    device.hold(stream, false);
    assert!(filled(&arrived).expect("no failure").bytes()[..5000].iter().all(|byte| *byte == 7));
    assert_eq!(device.count("stream_synchronizations"), synchronizations, "no stream was synchronized");
    device.destroy_stream(stream);
}

#[test]
fn the_callers_stream_waits_for_what_arrives() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let (target, stream) = (device.allocate(4000), device.stream());
    let mut slot = slots.lease(4000);
    slot.bytes_mut().expect("nobody holds it").fill(3);
    device.set_copy_delay(Duration::from_millis(100));
    // The copy waits for the caller's stream, which waits for the test.
    device.hold(stream, true);
    target.fill(stream, 1);
    let after = staging.mark(caller(stream)).expect("an event");
    let arrival = staging.deliver(slot, target.span(), &after).expect("device memory");
    arrival.order(caller(stream)).expect("an event");
    assert!(!arrival.has_occurred().expect("no failure"), "the host did not wait");
    // A kernel of the caller's after the wait overwrites the result: in the other order the result would be left.
    target.fill(stream, 9);
    device.hold(stream, false);
    device.synchronize(stream);
    assert!(target.read().iter().all(|byte| *byte == 9));
    device.destroy_stream(stream);
}

#[test]
fn a_result_does_not_overtake_earlier_work_on_its_target() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let (target, stream) = (device.allocate(100), device.stream());
    device.hold(stream, true);
    target.fill(stream, 1);
    let mut slot = slots.lease(100);
    slot.bytes_mut().expect("nobody holds it").fill(2);
    let after = staging.mark(caller(stream)).expect("an event");
    let arrival = staging.deliver(slot, target.span(), &after).expect("device memory");
    assert!(!arrival.has_occurred().expect("no failure"));
    device.hold(stream, false);
    arrival.synchronize().expect("no failure");
    assert!(target.read().iter().all(|byte| *byte == 2));
    device.destroy_stream(stream);
}

#[test]
fn a_failed_copy_fails_its_job_and_releases_what_it_used() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let source = device.allocate(5000);
    // A failure at once: the third chunk is refused.
    device.fail("cuMemcpyDtoHAsync_v2", 999, 3);
    let arrived = fetch(&staging, source.span(), CallerStream::LEGACY, slots.lease(5000)).expect("device memory");
    let error = filled(&arrived).expect_err("a chunk failed");
    assert!(matches!(error, GpuError::Call { function: "cuMemcpyAsync", code: 999, .. }), "{error:?}");
    eventually("the slot is released", || slots.in_use() == 0);
    // The next one is not affected.
    let arrived = fetch(&staging, source.span(), CallerStream::LEGACY, slots.lease(5000)).expect("device memory");
    filled(&arrived).expect("no failure");
    // A failure of the work itself, which an event reports.
    device.fail("copy", 700, 2);
    let arrived = fetch(&staging, source.span(), CallerStream::LEGACY, slots.lease(5000)).expect("device memory");
    let error = filled(&arrived).expect_err("a copy failed");
    assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    eventually("the slot is released", || slots.in_use() == 0);
}

#[test]
fn a_failed_delivery_is_an_error_and_not_a_result() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let target = device.allocate(100);
    let after = staging.mark(CallerStream::LEGACY).expect("an event");
    device.fail("copy", 700, 1);
    let arrival = staging.deliver(slots.lease(100), target.span(), &after).expect("it is enqueued");
    arrival.synchronize().expect_err("the copy failed");
    device.fail("cuMemcpyHtoDAsync_v2", 1, 1);
    staging.deliver(slots.lease(100), target.span(), &after).expect_err("it cannot be enqueued");
}

#[test]
fn what_a_copy_uses_is_kept_until_it_ends() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let (target, stream) = (device.allocate(100), device.stream());
    let keep: Keep = Arc::new("the tensor");
    let weak: Weak<_> = Arc::downgrade(&keep);
    // SAFETY: the allocation outlives the copy.
    let span = unsafe { DeviceSpan::new(0, target.address, 100, Some(keep)) };
    device.hold(stream, true);
    let after = staging.mark(caller(stream)).expect("an event");
    let arrival = staging.deliver(slots.lease(100), span, &after).expect("device memory");
    drop(arrival);
    assert_eq!((weak.strong_count(), slots.in_use()), (1, 1), "the copy still reads and writes");
    device.hold(stream, false);
    eventually("both are released", || weak.strong_count() == 0 && slots.in_use() == 0);
    device.destroy_stream(stream);
}

#[test]
fn copies_that_never_end_keep_their_memory_and_do_not_hang_the_drop() {
    let device = Device::take();
    let slots = Slots::new();
    let config = StagingConfig { drain_timeout: Duration::from_millis(50), ..SMALL };
    let registrations = Arc::new(Registrations::default());
    let staging = Staging::new(&device.driver, 0, &registrations, config).expect("a device");
    let (target, stream) = (device.allocate(100), device.stream());
    device.hold(stream, true);
    let after = staging.mark(caller(stream)).expect("an event");
    drop(staging.deliver(slots.lease(100), target.span(), &after).expect("device memory"));
    drop((staging, registrations));
    assert_eq!((slots.in_use(), device.count("registrations")), (1, 1), "the device may still read the slot");
    device.hold(stream, false);
    eventually("the thread releases it in the end", || slots.in_use() == 0 && device.count("registrations") == 0);
    device.destroy_stream(stream);
}

#[test]
fn memory_that_is_not_this_devices_is_refused() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let refused = |span: DeviceSpan| {
        let error = fetch(&staging, span, CallerStream::LEGACY, slots.lease(64)).expect_err("not its memory");
        assert!(error.is_callers(), "{error:?}");
        error.to_string()
    };
    let host = [0_u8; 64];
    // SAFETY: it is refused, so nothing is accessed.
    let text = refused(unsafe { DeviceSpan::new(0, host.as_ptr().addr() as u64, 64, None) });
    assert!(text.contains("no GPU has memory at"), "{text}");
    let here = device.allocate(64);
    // SAFETY: as above.
    let text = refused(unsafe { DeviceSpan::new(1, here.address, 64, None) });
    assert!(text.contains("the tensor is on GPU 1"), "{text}");
    // SAFETY: as above.
    let text = refused(unsafe { DeviceSpan::new(0, here.address, 65, None) });
    assert!(text.contains("of 65 bytes at") && text.contains("reaches past the memory of GPU 0"), "{text}");
    device.push_context_of(1);
    let there = device.allocate(64);
    let text = refused(there.span());
    assert!(text.contains("is on GPU 1, but the tensor was given as one on GPU 0"), "{text}");
    drop(there);
    device.push_context_of(0);
    assert_eq!(slots.in_use(), 0);
}

#[test]
fn memory_that_cannot_be_locked_is_an_error() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let source = device.allocate(64);
    device.fail("cuMemHostRegister_v2", 2, 1);
    let error = fetch(&staging, source.span(), CallerStream::LEGACY, slots.lease(64)).expect_err("out of memory");
    assert!(matches!(error, GpuError::OutOfMemory { function: "cuMemHostRegister", .. }), "{error:?}");
    // It is tried again, and then no copy is one of pageable memory.
    let pageable = device.count("pageable_copies");
    filled(&fetch(&staging, source.span(), CallerStream::LEGACY, slots.lease(64)).expect("memory"))
        .expect("no failure");
    assert_eq!(device.count("pageable_copies"), pageable);
}

#[test]
fn a_receiver_that_panics_does_not_end_the_thread() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let source = device.allocate(2500);
    let after = Arc::new(staging.mark(CallerStream::LEGACY).expect("an event"));
    let panics = Box::new(|_| panic!("the receiver panics, as this test wants"));
    staging.fetch(source.span(), after, slots.lease(2500), panics).expect("device memory");
    let arrived = fetch(&staging, source.span(), CallerStream::LEGACY, slots.lease(2500)).expect("device memory");
    filled(&arrived).expect("the thread lives");
    eventually("both slots are released", || {
        drop(arrived.try_recv());
        slots.in_use() == 0
    });
}

#[test]
fn what_arrived_is_released_while_a_copy_from_the_device_waits() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let (source, target, stream) = (device.allocate(100), device.allocate(100), device.stream());
    device.hold(stream, true);
    source.fill(stream, 1);
    let arrived = fetch(&staging, source.span(), caller(stream), slots.lease(100)).expect("device memory");
    let after = staging.mark(CallerStream::LEGACY).expect("an event");
    staging.deliver(slots.lease(100), target.span(), &after).expect("device memory").synchronize().expect("no failure");
    eventually("the slot of the result is released", || slots.in_use() == 1);
    assert!(arrived.try_recv().is_err(), "the kernel has not run");
    device.hold(stream, false);
    filled(&arrived).expect("no failure");
    device.destroy_stream(stream);
}

#[test]
fn jobs_are_passed_on_in_the_order_of_their_calls() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let (source, stream) = (device.allocate(5000), device.stream());
    let (send, receive) = channel();
    device.hold(stream, true);
    source.fill(stream, 1);
    // SAFETY: no byte of it is accessed.
    let empty = unsafe { DeviceSpan::new(0, 0, 0, None) };
    for (number, span, after) in [(1, source.span(), caller(stream)), (2, empty, CallerStream::LEGACY)] {
        let (send, after) = (send.clone(), Arc::new(staging.mark(after).expect("an event")));
        let slot = slots.lease(span.bytes());
        staging
            .fetch(span, after, slot, Box::new(move |_| send.send(number).expect("the test receives")))
            .expect("device memory");
    }
    assert!(receive.recv_timeout(Duration::from_millis(50)).is_err(), "an empty tensor does not overtake");
    device.hold(stream, false);
    let order: Vec<u32> =
        (0..2).map(|_| receive.recv_timeout(Duration::from_secs(10)).expect("every job ends")).collect();
    assert_eq!(order, [1, 2]);
    device.destroy_stream(stream);
}

#[test]
fn a_stream_that_captures_a_graph_is_refused_and_other_captures_stay_valid() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let (source, stream, other) = (device.allocate(5000), device.stream(), device.stream());
    device.capture(stream, true);
    let error = staging.mark(caller(stream)).expect_err("it captures");
    assert!(error.is_callers() && error.to_string().contains("captures a CUDA graph"), "{error}");
    device.set_copy_delay(Duration::from_millis(5));
    let arrived = fetch(&staging, source.span(), caller(other), slots.lease(5000)).expect("it does not capture");
    filled(&arrived).expect("no failure");
    assert_eq!(device.count("invalidated_captures"), 0, "the thread that copies queries in the relaxed mode");
    device.capture(stream, false);
    staging.mark(caller(stream)).expect("the capture has ended");
    for stream in [stream, other] {
        device.destroy_stream(stream);
    }
}

#[test]
fn an_error_that_stays_fails_what_comes_later_and_does_not_hang_the_drop() {
    let device = Device::take();
    let (slots, staging) = (Slots::new(), staging(&device));
    let (source, stream) = (device.allocate(3000), device.stream());
    device.make_failures_stay();
    device.set_copy_delay(Duration::from_millis(20));
    device.fail("copy", 700, 2);
    // All three copies have an event after them before the first one runs: a copy without one keeps its slot for good.
    let events = device.count("events");
    device.hold(stream, true);
    source.fill(stream, 1);
    let arrived = fetch(&staging, source.span(), caller(stream), slots.lease(3000)).expect("device memory");
    eventually("the copies are enqueued", || device.count("events") == events + 4);
    device.hold(stream, false);
    let error = filled(&arrived).expect_err("a copy failed");
    assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    let error = staging.mark(CallerStream::LEGACY).expect_err("the device is lost");
    assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    drop(staging);
    assert_eq!(slots.in_use(), 0);
    device.heal();
    device.destroy_stream(stream);
}

#[test]
fn an_event_of_one_device_is_not_recorded_on_a_stream_of_another() {
    let device = Device::take();
    let staging = staging(&device);
    device.push_context_of(1);
    let there = device.stream();
    let error = staging.mark(caller(there)).expect_err("a stream of GPU 1");
    assert!(error.to_string().contains("CUDA_ERROR_INVALID_HANDLE"), "{error}");
    device.destroy_stream(there);
    device.push_context_of(0);
}

#[test]
fn memory_is_found_by_a_thread_without_a_context() {
    let device = Device::take();
    let staging = staging(&device);
    let memory = device.allocate(64);
    let found =
        std::thread::scope(|scope| scope.spawn(|| device.driver.device_with(memory.address)).join().expect("no panic"));
    assert_eq!(found, Ok(0));
    drop(staging);
}
