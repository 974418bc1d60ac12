//! [`Pool`]: buffers on GPUs that operations lease, and [`DeviceResult`]: a result in one.
//!
//! A buffer is leased again when nothing uses it any more: its events have occurred, and no copy keeps it.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ronde_gpu::{Arrival, CallerStream, Context, DeviceBuffer, DeviceSpan, Event, GpuError};

/// Buffers of all devices.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Buffers>);

#[derive(Debug, Default)]
struct Buffers {
    idle: Vec<(u32, Arc<DeviceBuffer>)>,
    /// What was used last until an event.
    busy: Vec<Busy>,
}

#[derive(Debug)]
struct Busy {
    event: Option<Arc<Event>>,
    buffer: Option<(u32, Arc<DeviceBuffer>)>,
    /// The caller's memory that the same work uses.
    _spans: Vec<DeviceSpan>,
}

impl Busy {
    fn is_over(&self) -> bool {
        // Work that failed has ended, too.
        let has_occurred = self.event.as_ref().is_none_or(|event| !matches!(event.has_occurred(), Ok(false)));
        has_occurred && self.buffer.as_ref().is_none_or(|(_, buffer)| Arc::strong_count(buffer) == 1)
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Buffers> {
        // A panic elsewhere leaves the lists whole: each change is a single call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leases a buffer of at least `bytes` bytes.
    pub(super) fn lease(self: &Arc<Self>, context: &Arc<Context>, bytes: usize) -> Result<Lease, GpuError> {
        self.sweep();
        let device = context.ordinal();
        let most = bytes.saturating_mul(2).max(GRAIN_BYTES);
        let fits = |(on, buffer): &(u32, Arc<DeviceBuffer>)| *on == device && (bytes..=most).contains(&buffer.bytes());
        let mut buffers = self.lock();
        let found = buffers.idle.iter().position(fits).map(|at| buffers.idle.swap_remove(at).1);
        drop(buffers);
        let buffer = match found {
            Some(buffer) => buffer,
            None => Arc::new(self.allocate(context, bytes)?),
        };
        Ok(Lease { pool: Arc::clone(self), device, buffer, event: None, spans: Vec::new() })
    }

    fn allocate(&self, context: &Arc<Context>, bytes: usize) -> Result<DeviceBuffer, GpuError> {
        let rounded = bytes.checked_next_multiple_of(GRAIN_BYTES).unwrap_or(bytes);
        let made = DeviceBuffer::new(context, rounded);
        if !matches!(made, Err(GpuError::OutOfMemory { .. })) {
            return made;
        }
        // Idle buffers of other sizes give way.
        let idle = std::mem::take(&mut self.lock().idle);
        drop(idle);
        DeviceBuffer::new(context, rounded)
    }

    /// Takes back what is not in use any more.
    pub(super) fn sweep(&self) {
        let mut buffers = self.lock();
        let (mut over, busy): (Vec<Busy>, Vec<Busy>) =
            std::mem::take(&mut buffers.busy).into_iter().partition(Busy::is_over);
        buffers.busy = busy;
        let mut idle_bytes: usize = buffers.idle.iter().map(|(_, buffer)| buffer.bytes()).sum();
        let mut surplus = Vec::new();
        for each in &mut over {
            if let Some((device, buffer)) = each.buffer.take() {
                idle_bytes += buffer.bytes();
                let list = if idle_bytes > IDLE_BYTES_MAX { &mut surplus } else { &mut buffers.idle };
                list.push((device, buffer));
            }
        }
        // Freed, and the callers' memory released, without the lock.
        drop(buffers);
        drop((over, surplus));
    }
}

impl Drop for Pool {
    /// Nobody waits for work here: what it uses is never released.
    fn drop(&mut self) {
        self.sweep();
        let buffers = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::take(&mut buffers.busy));
    }
}

/// A buffer that is in use.
#[derive(Debug)]
pub(super) struct Lease {
    pool: Arc<Pool>,
    device: u32,
    buffer: Arc<DeviceBuffer>,
    event: Option<Arc<Event>>,
    spans: Vec<DeviceSpan>,
}

impl Lease {
    /// A part of it, which keeps the buffer.
    pub(super) fn part(&self, range: Range<usize>) -> Result<DeviceSpan, GpuError> {
        self.buffer.span().part(range)
    }

    /// The buffer, and these spans, are in use until the event. It follows all earlier ones.
    pub(super) fn use_until(&mut self, event: &Arc<Event>, spans: impl IntoIterator<Item = DeviceSpan>) {
        self.event = Some(Arc::clone(event));
        self.spans.extend(spans);
    }

    /// The spans are not in use any more.
    pub(super) fn release_spans(&mut self) {
        self.spans.clear();
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let (event, spans) = (self.event.take(), std::mem::take(&mut self.spans));
        let buffer = Some((self.device, Arc::clone(&self.buffer)));
        self.pool.lock().busy.push(Busy { event, buffer, _spans: spans });
    }
}

/// A result in device memory, which is complete.
#[derive(Debug)]
pub(crate) struct DeviceResult {
    context: Arc<Context>,
    lease: Lease,
    /// Where it is in the buffer.
    pieces: Vec<Range<usize>>,
}

impl DeviceResult {
    pub(super) fn new(context: &Arc<Context>, lease: Lease, pieces: Vec<Range<usize>>) -> Self {
        Self { context: Arc::clone(context), lease, pieces }
    }

    /// The number of its device.
    pub(crate) fn device(&self) -> u32 {
        self.context.ordinal()
    }

    /// Its length.
    pub(crate) fn bytes(&self) -> usize {
        self.pieces.iter().map(Range::len).sum()
    }

    /// Copies it on a stream of the target's device, after the present work of the stream.
    pub(crate) fn deliver(mut self, target: DeviceSpan, stream: CallerStream) -> Result<Arrival, GpuError> {
        let mut at = 0;
        for piece in &self.pieces {
            let source = self.lease.part(piece.clone())?;
            let copied = target.part(at..at + piece.len()).and_then(|to| self.context.copy_on(stream, &source, &to));
            // Also after an error: earlier pieces may be on their way.
            let event = copied.inspect_err(|_| std::mem::forget(target.clone()))?;
            self.lease.use_until(&event, []);
            at += piece.len();
        }
        let event = Arc::new(Event::after_caller(&self.context, stream)?);
        self.lease.use_until(&event, [target]);
        Ok(Arrival::at(event))
    }

    /// Copies it to main memory, and waits for that.
    pub(crate) fn read(&self, target: &mut [u8]) -> Result<(), GpuError> {
        let mut rest = target;
        for piece in &self.pieces {
            let (part, others) = rest.split_at_mut_checked(piece.len()).ok_or_else(|| GpuError::Argument {
                reason: format!("a result of {} bytes does not fit the target", self.bytes()),
            })?;
            self.context.read(&self.lease.part(piece.clone())?, part)?;
            rest = others;
        }
        Ok(())
    }
}

/// Idle buffers beyond this are freed.
const IDLE_BYTES_MAX: usize = 1 << 30;
/// Sizes are multiples of this, so that buffers of like tensors are leased again. The page of a device has as much.
const GRAIN_BYTES: usize = 2 << 20;
