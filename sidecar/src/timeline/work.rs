//! Measures what a thread that performs operations spends its time on.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ronde_engine::{ExecutorAction, Phase};
use ronde_rpc::v1::timeline_event::{Phase as WirePhase, Span};
use ronde_wire::Seq;

/// Collects the work of a thread while there is a recording.
#[derive(Default)]
pub(crate) struct Tracer {
    /// The work by operation; `None` without a recording. The operations are in progress, or about to start.
    operations: Option<BTreeMap<Seq, LaneTrace>>,
}

/// One thread's part of an operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LaneTrace(BTreeMap<Kind, Work>);

/// The phases that a timeline distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    ReadInput,
    Reduce,
    Code,
    Send,
    Receive,
    CopyResult,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Work {
    begin: Instant,
    end: Instant,
    busy: Duration,
    pieces: u64,
    bytes: u64,
}

impl Tracer {
    /// Switches tracing on or off.
    pub(crate) fn set(&mut self, wanted: bool) {
        self.operations = wanted.then(BTreeMap::new);
    }

    /// Returns the time, if tracing is on.
    pub(crate) fn now(&self) -> Option<Instant> {
        self.operations.as_ref().map(|_| Instant::now())
    }

    /// Notes what a poll of the executor, started at `begin`, returned.
    pub(crate) fn polled(&mut self, begin: Option<Instant>, action: &ExecutorAction) {
        let (Some(begin), Some(_)) = (begin, &self.operations) else { return };
        let (seq, kind, bytes) = match action {
            ExecutorAction::Worked { work: Some((seq, phase)) } => (*seq, Kind::of(*phase), 0),
            ExecutorAction::Send { chunk, .. } => (chunk.seq, Kind::Send, chunk.data.len() as u64),
            _ => return,
        };
        self.note(seq, kind, begin, bytes);
    }

    /// Notes the arrival of a chunk of an operation.
    pub(crate) fn received(&mut self, seq: Seq, bytes: usize) {
        if let Some(now) = self.now() {
            self.note(seq, Kind::Receive, now, bytes as u64);
        }
    }

    /// Takes the trace of an operation, whose part here is over.
    pub(crate) fn take(&mut self, seq: Seq) -> Option<LaneTrace> {
        self.operations.as_mut()?.remove(&seq)
    }

    /// Drops operations, all up to this one, or all of an epoch.
    pub(crate) fn forget(&mut self, up_to: Option<Seq>) {
        if let Some(operations) = &mut self.operations {
            operations.retain(|seq, _| up_to.is_some_and(|last| *seq > last));
        }
    }

    fn note(&mut self, seq: Seq, kind: Kind, begin: Instant, bytes: u64) {
        let Some(operations) = &mut self.operations else { return };
        let end = Instant::now();
        if operations.len() >= OPERATIONS_MAX && !operations.contains_key(&seq) {
            return;
        }
        let work = Work { begin, end, busy: Duration::ZERO, pieces: 0, bytes: 0 };
        let work = operations.entry(seq).or_default().0.entry(kind).or_insert(work);
        // Sending and receiving only pass chunks on: the connection encrypts and decrypts concurrently.
        let busy = if matches!(kind, Kind::Send | Kind::Receive) { Duration::ZERO } else { end - begin };
        (work.end, work.busy) = (end, work.busy + busy);
        (work.pieces, work.bytes) = (work.pieces + 1, work.bytes + bytes);
    }
}

/// The most operations that are traced; far more than are in progress. Chunks of others come from peers only.
const OPERATIONS_MAX: usize = 4_096;

impl LaneTrace {
    /// Converts to the protocol's type, in the time of a recording.
    pub(super) fn spans(&self, began: Instant) -> Vec<Span> {
        let span = |(kind, work): (&Kind, &Work)| Span {
            phase: kind.to_wire().into(),
            begin_us: super::microseconds(began, work.begin),
            end_us: super::microseconds(began, work.end),
            busy_us: u64::try_from(work.busy.as_micros()).unwrap_or(u64::MAX),
            pieces: work.pieces,
            bytes: work.bytes,
        };
        self.0.iter().map(span).collect()
    }
}

impl Kind {
    const fn of(phase: Phase) -> Self {
        match phase {
            Phase::ReadInput => Self::ReadInput,
            Phase::Reduce => Self::Reduce,
            Phase::Code => Self::Code,
            Phase::CopyResult => Self::CopyResult,
        }
    }

    const fn to_wire(self) -> WirePhase {
        match self {
            Self::ReadInput => WirePhase::ReadInput,
            Self::Reduce => WirePhase::Reduce,
            Self::Code => WirePhase::Code,
            Self::Send => WirePhase::Send,
            Self::Receive => WirePhase::Receive,
            Self::CopyResult => WirePhase::CopyResult,
        }
    }
}
