//! The thread of a [`Staging`](super::Staging): starts copies to the host, waits for them, and keeps what copies use.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::Duration;

use ronde_shm::LeasedSlot;

use super::pipeline::{Action, JobId, Outcome, Pipeline};
use super::registrations::Registrations;
use super::{Filled, Shared, StagingConfig};
use crate::driver::{Direction, Event, Stream};
use crate::error::GpuError;
use crate::span::DeviceSpan;

/// A copy to the host.
pub(super) struct Fetch {
    pub(super) id: JobId,
    pub(super) source: DeviceSpan,
    pub(super) after: Arc<Event>,
    pub(super) slot: LeasedSlot,
    pub(super) filled: Filled,
}

/// What the thread receives.
pub(super) enum Message {
    Fetch(Fetch),
    /// What a copy to the device uses. Without an event nobody knows when that ends.
    Arriving {
        event: Option<Arc<Event>>,
        kept: Kept,
    },
    Share(Share),
}

/// What a copy to the device uses.
#[expect(dead_code, reason = "it is held, never read")]
pub(super) enum Kept {
    /// A slot, and where it goes.
    Slot(LeasedSlot, DeviceSpan),
    /// Device memory, and where it goes.
    Device(DeviceSpan, DeviceSpan),
}

/// A copy within the device, or none: then only the order counts.
pub(super) struct Share {
    pub(super) after: Arc<Event>,
    pub(super) copy: Option<(DeviceSpan, DeviceSpan)>,
    pub(super) shared: Shared,
}

impl Message {
    /// Never releases what a copy may use. For a message that no thread receives.
    pub(super) fn leak(self) {
        if let Self::Arriving { kept, .. } = self {
            std::mem::forget(kept);
        }
    }
}

/// A job in the pipeline.
struct Job {
    fetch: Fetch,
    has_begun: bool,
    failed: Option<GpuError>,
}

/// What a copy to the device uses.
struct Arriving {
    event: Arc<Event>,
    /// Released with this value.
    _kept: Kept,
}

/// A copy within the device that has begun.
struct Sharing {
    event: Event,
    copy: Option<(DeviceSpan, DeviceSpan)>,
    shared: Shared,
}

pub(super) struct Thread {
    down: Stream,
    received: Receiver<Message>,
    pipeline: Pipeline,
    jobs: HashMap<JobId, Job>,
    /// Chunks in flight, oldest first. They end in this order, because they are on one stream.
    chunks: VecDeque<(JobId, Event)>,
    arriving: Vec<Arriving>,
    sharing: Vec<Sharing>,
    is_closed: bool,
    /// How long the next wait for the oldest chunk lasts.
    interval: Duration,
    /// Declared last: released when no copy uses them.
    registrations: Arc<Registrations>,
    _alive: Sender<()>,
}

impl Thread {
    pub(super) fn new(
        down: Stream,
        received: Receiver<Message>,
        registrations: Arc<Registrations>,
        config: StagingConfig,
        alive: Sender<()>,
    ) -> Self {
        Self {
            down,
            received,
            pipeline: Pipeline::new(config.chunk_bytes, config.window),
            jobs: HashMap::new(),
            chunks: VecDeque::new(),
            arriving: Vec::new(),
            sharing: Vec::new(),
            is_closed: false,
            registrations,
            interval: POLL_INTERVAL_MIN,
            _alive: alive,
        }
    }

    /// Runs until the other side is dropped and all copies have ended.
    pub(super) fn run(mut self) {
        if let Err(error) = self.down.relax_capture() {
            tracing::warn!(target: "ronde", %error, "CUDA graphs that are captured during a copy may become invalid");
        }
        loop {
            while let Some(action) = self.pipeline.poll_action() {
                self.perform(action);
            }
            self.release_arrived();
            self.pass_shared_on();
            if self.is_closed && self.pipeline.is_empty() && self.arriving.is_empty() && self.sharing.is_empty() {
                return;
            }
            self.wait();
        }
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Copy(id, range) => {
                if let Err(error) = self.copy(id, range) {
                    self.stop(id, error);
                    self.pipeline.handle_ended(id);
                }
            }
            Action::Finish(id, outcome) => {
                let Some(Job { fetch: Fetch { slot, filled, .. }, failed, .. }) = self.jobs.remove(&id) else { return };
                let stopped = || GpuError::Thread { reason: "the copy was stopped".to_owned() };
                pass_on(
                    filled,
                    match outcome {
                        Outcome::Copied => Ok(slot),
                        Outcome::Stopped => Err(failed.unwrap_or_else(stopped)),
                    },
                );
            }
        }
    }

    fn copy(&mut self, id: JobId, range: Range<usize>) -> Result<(), GpuError> {
        let Some(job) = self.jobs.get_mut(&id) else { return Ok(()) };
        if !job.has_begun {
            job.has_begun = true;
            self.down.wait(&job.fetch.after)?;
        }
        self.down.copy(Direction::ToHost, &job.fetch.source, &job.fetch.slot, range)?;
        match Event::after(&self.down) {
            Ok(event) => self.chunks.push_back((id, event)),
            Err(error) => {
                // The copy has begun, and no event reports its end: its slot and its memory are never released.
                if let Some(Job { fetch, .. }) = self.jobs.remove(&id) {
                    let Fetch { source, slot, filled, .. } = fetch;
                    std::mem::forget((slot, source));
                    pass_on(filled, Err(error.clone()));
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Starts no further chunk of a job. The first error stays.
    fn stop(&mut self, id: JobId, error: GpuError) {
        self.pipeline.handle_stopped(id);
        if let Some(job) = self.jobs.get_mut(&id) {
            job.failed.get_or_insert(error);
        }
    }

    /// Waits for the oldest chunk, but at most for an interval, or else for a message. New messages are taken first.
    fn wait(&mut self) {
        loop {
            match self.received.try_recv() {
                Ok(message) => self.receive(message),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.is_closed = true;
                    break;
                }
            }
        }
        let Some((id, event)) = self.chunks.front() else {
            if self.pipeline.is_empty() {
                let interval = if self.sharing.is_empty() { POLL_INTERVAL_MAX } else { self.interval };
                self.receive_or_poll(interval);
                self.interval = (self.interval * 2).min(POLL_INTERVAL_MAX);
            }
            return;
        };
        let (id, occurred) = (*id, event.has_occurred());
        if let Ok(false) = occurred {
            self.receive_or_poll(self.interval);
            self.interval = (self.interval * 2).min(POLL_INTERVAL_MAX);
            return;
        }
        self.interval = POLL_INTERVAL_MIN;
        self.chunks.pop_front();
        if let Err(error) = occurred {
            self.stop(id, error);
        }
        self.pipeline.handle_ended(id);
    }

    /// Waits for a message; at most for `interval` when a copy is in flight.
    fn receive_or_poll(&mut self, interval: Duration) {
        if self.is_closed {
            // Not a busy wait: what is in flight is polled.
            std::thread::sleep(interval);
        } else if self.arriving.is_empty() && self.chunks.is_empty() && self.sharing.is_empty() {
            match self.received.recv() {
                Ok(message) => self.receive(message),
                Err(_) => self.is_closed = true,
            }
        } else {
            match self.received.recv_timeout(interval) {
                Ok(message) => self.receive(message),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.is_closed = true,
            }
        }
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Fetch(fetch) => {
                self.pipeline.add(fetch.id, fetch.source.bytes());
                self.jobs.insert(fetch.id, Job { fetch, has_begun: false, failed: None });
            }
            Message::Arriving { event: Some(event), kept } => self.arriving.push(Arriving { event, _kept: kept }),
            Message::Share(share) => self.share(share),
            message @ Message::Arriving { event: None, .. } => message.leak(),
        }
    }

    fn share(&mut self, Share { after, copy, shared }: Share) {
        self.interval = POLL_INTERVAL_MIN;
        let begun = self.down.wait(&after).and_then(|()| match &copy {
            Some((source, target)) => self.down.copy_device(source, target),
            None => Ok(()),
        });
        if let Err(error) = begun {
            return pass_on(shared, Err(error));
        }
        match Event::after(&self.down) {
            Ok(event) => self.sharing.push(Sharing { event, copy, shared }),
            Err(error) => {
                // As for a chunk: no event reports the end of the copy.
                std::mem::forget(copy);
                pass_on(shared, Err(error));
            }
        }
    }

    /// Passes on which copies within the device have ended.
    fn pass_shared_on(&mut self) {
        let ended = |sharing: &mut Sharing| !matches!(sharing.event.has_occurred(), Ok(false));
        for Sharing { event, copy, shared } in self.sharing.extract_if(.., ended) {
            let outcome = event.has_occurred().map(drop);
            drop(copy);
            pass_on(shared, outcome);
        }
    }

    /// Releases what copies that have ended used. A failed copy has ended, too.
    fn release_arrived(&mut self) {
        self.arriving.retain(|Arriving { event, .. }| matches!(event.has_occurred(), Ok(false)));
    }
}

impl Drop for Thread {
    /// After a panic: what copies in flight may use is never released. Without one, nothing is in flight here.
    fn drop(&mut self) {
        for (_, Job { fetch: Fetch { source, slot, .. }, .. }) in self.jobs.drain() {
            std::mem::forget((source, slot));
        }
        if !self.arriving.is_empty() || !self.chunks.is_empty() || !self.sharing.is_empty() {
            std::mem::forget(std::mem::take(&mut self.arriving));
            std::mem::forget(std::mem::take(&mut self.sharing));
            std::mem::forget(Arc::clone(&self.registrations));
        }
    }
}

/// Passes the outcome of a copy on. A panic there must not end the thread, whose copies would lose their memory.
fn pass_on<T>(receiver: Box<dyn FnOnce(Result<T, GpuError>) + Send>, outcome: Result<T, GpuError>) {
    if catch_unwind(AssertUnwindSafe(|| receiver(outcome))).is_err() {
        tracing::error!(target: "ronde", "the receiver of a tensor that was copied from a GPU panicked; this is a bug of ronde");
    }
}

/// How often the thread checks whether copies have ended. The interval doubles while the oldest one has not.
const POLL_INTERVAL_MIN: Duration = Duration::from_micros(20);
const POLL_INTERVAL_MAX: Duration = Duration::from_millis(2);
