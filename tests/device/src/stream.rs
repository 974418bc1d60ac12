//! Streams, each with a thread that executes its work in order, and events.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::control::{COUNTERS, Code, change, copy_delay, injected};
use crate::driver::{self, current_device};
use crate::{lock, memory, sticky};

pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_READY: Code = 600;
const CAPTURE_UNSUPPORTED: Code = 900;

/// The handles of the legacy default stream: null, and its name.
const LEGACY: [usize; 2] = [0, 1];

/// What a stream executes.
pub(crate) enum Work {
    ToHost {
        host: usize,
        device: u64,
        bytes: usize,
    },
    ToDevice {
        device: u64,
        host: usize,
        bytes: usize,
    },
    Fill {
        address: u64,
        value: u8,
        bytes: usize,
    },
    /// A copy within device memory.
    Within {
        target: u64,
        source: u64,
        bytes: usize,
    },
    Record(Arc<Recording>),
    Wait(Arc<Recording>),
    /// Work of another part of the software device.
    Call(Box<dyn FnOnce() -> Code + Send>),
}

/// One recording of an event.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    outcome: Mutex<Option<Code>>,
    done: Condvar,
}

impl Recording {
    fn finish(&self, code: Code) {
        *lock(&self.outcome) = Some(code);
        self.done.notify_all();
    }

    /// Waits until the stream has reached the recording.
    pub(crate) fn wait(&self) -> Code {
        let outcome = self.done.wait_while(lock(&self.outcome), |outcome| outcome.is_none());
        outcome.unwrap_or_else(PoisonError::into_inner).unwrap_or_default()
    }

    fn query(&self) -> Code {
        lock(&self.outcome).unwrap_or(NOT_READY)
    }
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    is_held: bool,
    is_capturing: bool,
    is_over: bool,
    is_executing: bool,
    /// The first failure, which stays.
    failed: Code,
}

#[derive(Default)]
struct Stream {
    device: i32,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Stream {
    fn start(device: i32) -> Arc<Self> {
        let stream = Arc::new(Self { device, ..Self::default() });
        let executing = Arc::clone(&stream);
        // Detached: a stream ends with its process, as a device's does.
        drop(std::thread::spawn(move || executing.run()));
        stream
    }

    fn run(&self) {
        loop {
            let mut queue = self.wait_while(|queue| queue.is_held || (queue.work.is_empty() && !queue.is_over));
            let Some(work) = queue.work.pop_front() else { return };
            queue.is_executing = true;
            let failed = queue.failed;
            drop(queue);
            let code = execute(work, failed);
            let mut queue = lock(&self.queue);
            queue.is_executing = false;
            queue.failed = if failed == 0 { code } else { failed };
            sticky::add(self.device, code);
            self.changed.notify_all();
        }
    }

    fn wait_while(&self, waiting: impl Fn(&Queue) -> bool) -> MutexGuard<'_, Queue> {
        let queue = self.changed.wait_while(lock(&self.queue), |queue| waiting(queue));
        queue.unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Queue)) {
        change(&mut lock(&self.queue));
        self.changed.notify_all();
    }
}

/// Executes work; after a failure only what others wait for, which receives the failure.
fn execute(work: Work, failed: Code) -> Code {
    match work {
        Work::Record(recording) => {
            recording.finish(failed);
            0
        }
        Work::Wait(recording) => {
            recording.wait();
            0
        }
        _ if failed != 0 => 0,
        Work::Fill { address, value, bytes } => memory::fill(address, value, bytes),
        Work::Call(call) => call(),
        Work::Within { target, source, bytes } => copy(|| memory::within(target, source, bytes)),
        Work::ToHost { host, device, bytes } => copy(|| memory::to_host(host, device, bytes)),
        Work::ToDevice { device, host, bytes } => copy(|| memory::to_device(device, host, bytes)),
    }
}

fn copy(copy: impl FnOnce() -> Code) -> Code {
    std::thread::sleep(copy_delay());
    match injected("copy") {
        0 => copy(),
        code => code,
    }
}

/// An event's device, and what it recorded last.
type Known = (i32, Option<Arc<Recording>>);

static STREAMS: LazyLock<Mutex<HashMap<usize, Arc<Stream>>>> = LazyLock::new(Mutex::default);
/// By handle: the device, and the last recording.
static EVENTS: LazyLock<Mutex<HashMap<usize, Known>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

fn find(handle: usize) -> Option<Arc<Stream>> {
    let mut streams = lock(&STREAMS);
    if LEGACY.contains(&handle) {
        let device = current_device().unwrap_or_default();
        let key = usize::try_from(device).unwrap_or_default();
        return Some(Arc::clone(streams.entry(key).or_insert_with(|| Stream::start(device))));
    }
    streams.get(&handle).cloned()
}

pub(crate) fn exists(handle: usize) -> bool {
    find(handle).is_some()
}

pub(crate) fn create(device: i32) -> usize {
    let handle = NEXT.fetch_add(16, Ordering::SeqCst);
    lock(&STREAMS).insert(handle, Stream::start(device));
    change(&COUNTERS.streams, true);
    handle
}

/// Ends a stream when its work is done.
pub(crate) fn destroy(handle: usize) -> Code {
    let removed = lock(&STREAMS).remove(&handle);
    let Some(stream) = removed else { return INVALID_HANDLE };
    stream.change(|queue| queue.is_over = true);
    change(&COUNTERS.streams, false);
    0
}

pub(crate) fn enqueue(handle: usize, work: Work) -> Code {
    let Some(stream) = find(handle) else { return INVALID_HANDLE };
    stream.change(|queue| queue.work.push_back(work));
    0
}

pub(crate) fn hold(handle: usize, is_held: bool) -> Code {
    let Some(stream) = find(handle) else { return INVALID_HANDLE };
    stream.change(|queue| queue.is_held = is_held);
    0
}

/// Begins or ends the capture of a graph.
pub(crate) fn capture(handle: usize, is_capturing: bool) -> Code {
    let Some(stream) = find(handle) else { return INVALID_HANDLE };
    stream.change(|queue| queue.is_capturing = is_capturing);
    0
}

pub(crate) fn is_capturing(handle: usize) -> Option<bool> {
    find(handle).map(|stream| lock(&stream.queue).is_capturing)
}

/// Whether a call that is unsafe during a capture would make one invalid.
fn is_any_capturing() -> bool {
    let streams: Vec<_> = lock(&STREAMS).values().cloned().collect();
    streams.iter().any(|stream| lock(&stream.queue).is_capturing)
}

pub(crate) fn synchronize(handle: usize) -> Code {
    let Some(stream) = find(handle) else { return INVALID_HANDLE };
    COUNTERS.stream_synchronizations.fetch_add(1, Ordering::SeqCst);
    stream.wait_while(|queue| queue.is_executing || !queue.work.is_empty()).failed
}

pub(crate) fn create_event(device: i32) -> usize {
    let handle = NEXT.fetch_add(16, Ordering::SeqCst);
    lock(&EVENTS).insert(handle, (device, None));
    change(&COUNTERS.events, true);
    handle
}

pub(crate) fn destroy_event(handle: usize) -> Code {
    if lock(&EVENTS).remove(&handle).is_none() {
        return INVALID_HANDLE;
    }
    change(&COUNTERS.events, false);
    0
}

/// Records an event, which has to be of the stream's device.
pub(crate) fn record(event: usize, stream: usize) -> Code {
    let recording = Arc::new(Recording::default());
    let device = find(stream).map(|stream| stream.device);
    let mut events = lock(&EVENTS);
    let Some((own, last)) = events.get_mut(&event) else { return INVALID_HANDLE };
    if device != Some(*own) {
        return INVALID_HANDLE;
    }
    *last = Some(Arc::clone(&recording));
    drop(events);
    enqueue(stream, Work::Record(recording))
}

/// The last recording of an event; none if it was never recorded.
fn last_recording(event: usize) -> Result<Option<Arc<Recording>>, Code> {
    let (device, last) = lock(&EVENTS).get(&event).cloned().ok_or(INVALID_HANDLE)?;
    match sticky::of(device) {
        0 => Ok(last),
        code => Err(code),
    }
}

/// Makes a stream wait for an event. One that was never recorded is no wait, as in CUDA.
pub(crate) fn wait_event(stream: usize, event: usize) -> Code {
    match last_recording(event) {
        Err(code) => code,
        Ok(None) => find(stream).map_or(INVALID_HANDLE, |_| 0),
        Ok(Some(recording)) => enqueue(stream, Work::Wait(recording)),
    }
}

pub(crate) fn query_event(event: usize) -> Code {
    if is_any_capturing() && !driver::is_relaxed() {
        COUNTERS.invalidated_captures.fetch_add(1, Ordering::SeqCst);
        return CAPTURE_UNSUPPORTED;
    }
    last_recording(event).map_or_else(|code| code, |recording| recording.map_or(0, |recording| recording.query()))
}

pub(crate) fn synchronize_event(event: usize) -> Code {
    last_recording(event).map_or_else(|code| code, |recording| recording.map_or(0, |recording| recording.wait()))
}
