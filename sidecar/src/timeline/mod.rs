//! The timeline: sends the events of each tensor to the worker of rank 0 that records them.
//!
//! The engine and the threads that perform operations report events ([`Trace`], [`LaneTrace`]); this module adds the
//! time and sends them in batches over a separate stream. A worker that reads too slowly loses events, which are
//! counted; nothing waits for it. Without a recording, all of this costs a branch.

mod work;

use std::time::{Duration, Instant};

use ronde_engine::Trace;
use ronde_rpc::v1;
use ronde_rpc::v1::timeline_event::{CycleStarted, EpochOver, Event, Ordered, Over, Performed, Ready, Settled, Tensor};
use ronde_wire::{Lane, Seq, Shape, TensorName};
use tokio::sync::mpsc;
use tonic::Status;

pub(crate) use work::{LaneTrace, Tracer};

/// The channel for batches.
pub(crate) type Batches = mpsc::Sender<Result<v1::TimelineBatch, Status>>;

/// Identifies a recording; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordingId(u64);

/// The recording, if there is one.
#[derive(Default)]
pub(crate) struct Timeline {
    recording: Option<Recording>,
    last: u64,
}

struct Recording {
    id: RecordingId,
    batches: Batches,
    began: Instant,
    mark_cycles: bool,
    events: Vec<v1::TimelineEvent>,
    /// The approximate size of these events in a message.
    bytes: usize,
    /// When the events have to be sent.
    due: Option<Instant>,
    dropped: u64,
}

impl Timeline {
    /// Begins a recording; an earlier one ends.
    pub(crate) fn begin(&mut self, now: Instant, batches: Batches, mark_cycles: bool) -> RecordingId {
        self.last += 1;
        let id = RecordingId(self.last);
        self.end();
        let mut recording =
            Recording { id, batches, began: now, mark_cycles, events: Vec::new(), bytes: 0, due: None, dropped: 0 };
        // The reply: an empty batch.
        let is_wanted = recording.send();
        self.recording = is_wanted.then_some(recording);
        id
    }

    /// Ends a recording and sends its remaining events, if it has not ended.
    pub(crate) fn end_of(&mut self, id: RecordingId) {
        if self.recording.as_ref().is_some_and(|recording| recording.id == id) {
            self.end();
        }
    }

    /// Ends the current recording.
    pub(crate) fn end(&mut self) {
        if let Some(recording) = self.recording.take() {
            recording.finish();
        }
    }

    /// Returns whether there is a recording.
    pub(crate) fn is_on(&self) -> bool {
        self.recording.is_some()
    }

    /// Returns when [`Self::flush`] is due.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.recording.as_ref()?.due
    }

    /// Sends events that are old enough.
    pub(crate) fn flush(&mut self, now: Instant) {
        if self.due().is_some_and(|due| due <= now) {
            self.send();
        }
    }

    /// Adds events.
    pub(crate) fn note(&mut self, now: Instant, traces: Vec<Trace>) {
        for trace in traces {
            if let Some(recording) = self.recording.as_mut().filter(|of| of.mark_cycles || trace != Trace::Cycle) {
                recording.keep(now, event(trace));
                self.send_if_many();
            }
        }
    }

    /// Adds the trace of a thread's part of an operation; `None` is the control thread.
    pub(crate) fn performed(&mut self, now: Instant, seq: Seq, lane: Option<Lane>, work: &LaneTrace) {
        if let Some(recording) = &mut self.recording {
            let spans = work.spans(recording.began);
            let lane = lane.map(|lane| u32::from(lane.0));
            recording.keep(now, Event::Performed(Performed { seq: seq.0, lane, spans }));
        }
        self.send_if_many();
    }

    fn send_if_many(&mut self) {
        if self.recording.as_ref().is_some_and(Recording::has_many) {
            self.send();
        }
    }

    /// Sends the collected events; ends the recording if its worker is gone.
    fn send(&mut self) {
        if self.recording.as_mut().is_some_and(|recording| !recording.send()) {
            self.recording = None;
        }
    }
}

impl Recording {
    fn keep(&mut self, now: Instant, event: Event) {
        self.due.get_or_insert(now + BATCH_AGE);
        self.bytes += bytes_of(&event);
        self.events.push(v1::TimelineEvent { at_us: microseconds(self.began, now), event: Some(event) });
    }

    fn has_many(&self) -> bool {
        self.events.len() >= BATCH_EVENTS || self.bytes >= BATCH_BYTES
    }

    /// Sends the last batch, in a task that waits for room, and then ends the stream.
    fn finish(self) {
        let Self { batches, events, dropped, .. } = self;
        let batch = v1::TimelineBatch { events, dropped };
        // A worker that is gone or does not read ends it as well.
        tokio::spawn(async move { drop(tokio::time::timeout(LAST_BATCH_TIMEOUT, batches.send(Ok(batch))).await) });
    }

    /// Returns whether the worker is still connected.
    fn send(&mut self) -> bool {
        let events = std::mem::take(&mut self.events);
        (self.due, self.bytes) = (None, 0);
        let count = events.len() as u64;
        match self.batches.try_send(Ok(v1::TimelineBatch { events, dropped: self.dropped })) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.dropped += count;
                // Reported with the next batch that there is room for, so that the last count is right.
                self.due = Some(Instant::now() + BATCH_AGE);
                true
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        }
    }
}

fn event(trace: Trace) -> Event {
    let owned = |operation: &'static str| operation.to_owned();
    match trace {
        Trace::Ready { set, name, operation, rank } => {
            Event::Ready(Ready { name: name.into(), process_set: set.0, collective: owned(operation), rank: rank.0 })
        }
        Trace::Concluded { set, name, operation } => Event::Settled(Settled {
            name: name.into(),
            process_set: set.0,
            failed: operation.is_none(),
            collective: operation.map(owned).unwrap_or_default(),
        }),
        Trace::Ordered { seq, set, operation, dtype, tensors, ahead } => {
            let tensor =
                |(name, shape): (TensorName, Shape)| Tensor { name: name.into(), shape: shape.dimensions().to_vec() };
            let tensors = tensors.into_iter().map(tensor).collect();
            let (collective, dtype) = (owned(operation), v1::DType::from(dtype).into());
            Event::Ordered(Ordered { seq: seq.0, process_set: set.0, collective, dtype, tensors, ahead })
        }
        Trace::Over { seq, dropped } => Event::Over(Over { seq: seq.0, dropped }),
        Trace::Cycle => Event::CycleStarted(CycleStarted {}),
        Trace::EpochOver => Event::EpochOver(EpochOver {}),
    }
}

/// Estimates the size of an event in a message.
fn bytes_of(event: &Event) -> usize {
    match event {
        Event::Ready(Ready { name, .. }) | Event::Settled(Settled { name, .. }) => EVENT_BYTES + name.len(),
        Event::Ordered(Ordered { tensors, .. }) => {
            let tensor = |tensor: &Tensor| EVENT_BYTES + tensor.name.len() + NUMBER_BYTES * tensor.shape.len();
            EVENT_BYTES + tensors.iter().map(tensor).sum::<usize>()
        }
        Event::Performed(Performed { spans, .. }) => EVENT_BYTES * (1 + spans.len()),
        Event::Over(_) | Event::CycleStarted(_) | Event::EpochOver(_) => EVENT_BYTES,
    }
}

/// Returns the time in microseconds since the recording began; 0 for earlier times.
fn microseconds(began: Instant, at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(began).as_micros()).unwrap_or(u64::MAX)
}

/// The number of events after which a batch is sent.
const BATCH_EVENTS: usize = 256;
/// The size after which a batch is sent: with one more event, which is at most the size of a control frame's order, it
/// fits into a message of the service.
const BATCH_BYTES: usize = 16 << 10;
/// The size of an event, or a part of it, without names and shapes; and the size of a number.
const EVENT_BYTES: usize = 40;
const NUMBER_BYTES: usize = 10;
/// How long an event waits for others to form a batch.
const BATCH_AGE: Duration = Duration::from_millis(20);
/// How long the last batch of a recording may wait for room.
const LAST_BATCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Batches queued for the worker; those beyond it are dropped.
pub(crate) const BATCHES_MAX: usize = 256;

#[cfg(test)]
mod tests;
