//! What happens to each tensor, told to the worker of rank 0 that wants to record it.
//!
//! The engine and the threads that perform operations say what happened ([`Trace`], [`LaneTrace`]); here it gets its time, and
//! is sent in batches over a stream of its own. A worker that reads too slowly loses events, which are counted; nothing waits
//! for it. While nobody records, all of this costs a branch.

mod work;

use std::time::{Duration, Instant};

use ronde_engine::Trace;
use ronde_rpc::v1;
use ronde_rpc::v1::timeline_event::{CycleStarted, EpochOver, Event, Ordered, Over, Performed, Ready, Settled, Tensor};
use ronde_wire::{Lane, Seq, Shape, TensorName};
use tokio::sync::mpsc;
use tonic::Status;

pub(crate) use work::{LaneTrace, Tracer};

/// Where batches go.
pub(crate) type Batches = mpsc::Sender<Result<v1::TimelineBatch, Status>>;

/// Names a recording; never used again.
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
    /// About the bytes that these take in a message.
    bytes: usize,
    /// When what is kept has to be sent.
    due: Option<Instant>,
    dropped: u64,
}

impl Timeline {
    /// Begins a recording in the place of the one before, which ends.
    pub(crate) fn begin(&mut self, now: Instant, batches: Batches, mark_cycles: bool) -> RecordingId {
        self.last += 1;
        let id = RecordingId(self.last);
        self.end();
        let mut recording =
            Recording { id, batches, began: now, mark_cycles, events: Vec::new(), bytes: 0, due: None, dropped: 0 };
        // The answer: an empty batch.
        let is_wanted = recording.send();
        self.recording = is_wanted.then_some(recording);
        id
    }

    /// Ends a recording with what is left of it, if it has not ended.
    pub(crate) fn end_of(&mut self, id: RecordingId) {
        if self.recording.as_ref().is_some_and(|recording| recording.id == id) {
            self.end();
        }
    }

    /// Ends whatever is recorded.
    pub(crate) fn end(&mut self) {
        if let Some(recording) = self.recording.take() {
            recording.finish();
        }
    }

    /// Whether anything is recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.recording.is_some()
    }

    /// When [`Self::flush`] is due.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.recording.as_ref()?.due
    }

    /// Sends what has been kept for long enough.
    pub(crate) fn flush(&mut self, now: Instant) {
        if self.due().is_some_and(|due| due <= now) {
            self.send();
        }
    }

    /// Things have happened.
    pub(crate) fn note(&mut self, now: Instant, traces: Vec<Trace>) {
        for trace in traces {
            if let Some(recording) = self.recording.as_mut().filter(|of| of.mark_cycles || trace != Trace::Cycle) {
                recording.keep(now, event(trace));
                self.send_if_many();
            }
        }
    }

    /// A thread has done its part of an operation; `None` for the control thread.
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

    /// Sends what is kept; a recording ends whose worker has gone.
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

    /// Sends the last batch, for which room is waited for beside everything else, and ends the stream behind it.
    fn finish(self) {
        let Self { batches, events, dropped, .. } = self;
        let batch = v1::TimelineBatch { events, dropped };
        // A worker that has gone or does not read ends it as well.
        tokio::spawn(async move { drop(tokio::time::timeout(LAST_BATCH_TIMEOUT, batches.send(Ok(batch))).await) });
    }

    /// Whether somebody still listens.
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

/// About the bytes of an event in a message.
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

/// Microseconds of a recording; 0 for what lies before it.
fn microseconds(began: Instant, at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(began).as_micros()).unwrap_or(u64::MAX)
}

/// Events that are sent at once, at the latest.
const BATCH_EVENTS: usize = 256;
/// Bytes that are sent at once, at the latest: with one more event, which is of an order of at most a control frame, they fit
/// into a message of the service.
const BATCH_BYTES: usize = 16 << 10;
/// What an event, or a part of it, takes besides names and shapes; and a number.
const EVENT_BYTES: usize = 40;
const NUMBER_BYTES: usize = 10;
/// For how long an event is kept for others that travel with it.
const BATCH_AGE: Duration = Duration::from_millis(20);
/// How long the last batch of a recording may wait for room.
const LAST_BATCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Batches that wait for the worker; what comes when there is no room is dropped.
pub(crate) const BATCHES_MAX: usize = 256;

#[cfg(test)]
mod tests;
