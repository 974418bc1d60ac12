//! The flight recorder: keeps the newest operations of this sidecar and of its ranks, for the time after a failure.
//!
//! It notes what the driver does anyway: a request is submitted, announced, ordered and answered; an operation is handed
//! to threads and performed. A note writes into a ring that exists already: it allocates nothing, takes no lock and makes
//! no system call. The text of a call site moves from the submission into the ring.

mod convert;
mod ring;

use std::collections::BTreeMap;

use ronde_engine::{Admission, Time};
use ronde_rpc::convert::Submission;
use ronde_wire::{Cause, Epoch, Failure, Rank, RequestId, Seq, SetId, TensorName, WorkerNumber, limits};

pub(crate) use convert::{FlightFacts, FlightSnapshot};
use ring::Ring;

/// The recorder; it notes nothing when it is off.
pub(crate) struct FlightRecorder {
    is_on: bool,
    ranks: BTreeMap<Rank, RankRing>,
    operations: Ring<OperationNote>,
    epoch: Epoch,
    /// When it began.
    epoch_began: Time,
    /// The requests that failed since the epoch began because of its end.
    failed_by_end: u64,
}

/// A copy of what is recorded.
pub(crate) struct FlightNotes {
    epoch: Epoch,
    epoch_began: Time,
    ranks: BTreeMap<Rank, RankRing>,
    operations: Ring<OperationNote>,
}

/// The newest requests of a rank.
#[derive(Clone)]
pub(crate) struct RankRing {
    /// The worker that submits them. In an elastic job another one may get its rank.
    worker: WorkerNumber,
    requests: Ring<RequestNote>,
}

/// A request of a rank.
#[derive(Clone)]
pub(crate) struct RequestNote {
    request: RequestId,
    set: SetId,
    name: TensorName,
    collective: &'static str,
    bytes: u64,
    site: Option<String>,
    epoch: Epoch,
    submitted: Time,
    announced: Option<Time>,
    ordered: Option<OrderNote>,
    /// Whether the worker has withdrawn it.
    withdrawn: bool,
    ended: Option<(Time, Option<FailureNote>)>,
}

/// When and how a request was ordered.
#[derive(Clone, Copy)]
struct OrderNote {
    seq: Seq,
    at: Time,
    /// Whether a schedule has admitted it, rather than an order that follows the submissions of all ranks.
    scheduled: bool,
}

/// Why a request failed.
#[derive(Clone)]
pub(crate) struct FailureNote {
    cause: Cause,
    reason: String,
}

/// An operation of this sidecar.
#[derive(Clone)]
pub(crate) struct OperationNote {
    epoch: Epoch,
    seq: Seq,
    /// Whether a schedule has admitted it.
    scheduled: bool,
    name: Option<TensorName>,
    tensors: u32,
    ordered: Time,
    started: Option<Time>,
    performed: Option<Time>,
    failed: Option<String>,
}

impl FlightRecorder {
    /// Creates a recorder without notes.
    pub(crate) fn new(is_on: bool) -> Self {
        let operations = if is_on { Ring::new() } else { Ring::empty() };
        Self { is_on, ranks: BTreeMap::new(), operations, epoch: Epoch(0), epoch_began: Time(0), failed_by_end: 0 }
    }

    /// Whether it records.
    pub(crate) fn is_on(&self) -> bool {
        self.is_on
    }

    /// An epoch has begun, in which this sidecar serves these ranks, each with its worker. Requests of a rank that another
    /// worker has now are dropped, and those of other ranks if there are many.
    pub(crate) fn epoch_began(&mut self, now: Time, epoch: Epoch, served: &[(Rank, WorkerNumber)]) {
        (self.epoch, self.epoch_began, self.failed_by_end) = (epoch, now, 0);
        if !self.is_on {
            return;
        }
        for (rank, worker) in served {
            if self.ranks.get(rank).is_none_or(|ring| ring.worker != *worker) {
                self.ranks.insert(*rank, RankRing { worker: *worker, requests: Ring::new() });
            }
        }
        if self.ranks.len() > limits::LOCAL_RANKS_MAX {
            self.ranks.retain(|rank, _| served.iter().any(|(kept, _)| kept == rank));
        }
    }

    /// Whether requests failed because the epoch ended.
    pub(crate) fn has_failed_by_end(&self) -> bool {
        self.failed_by_end > 0
    }

    /// A worker has submitted a request.
    pub(crate) fn submitted(&mut self, now: Time, rank: Rank, submission: &Submission) {
        let epoch = self.epoch;
        let Some(ring) = self.ranks.get_mut(&rank) else { return };
        let Submission { request, what, .. } = submission;
        ring.requests.push(RequestNote {
            request: *request,
            set: what.set,
            name: what.name.clone(),
            collective: what.collective.name(),
            bytes: what.shape.elements().saturating_mul(what.dtype.size_bytes() as u64),
            site: None,
            epoch,
            submitted: now,
            announced: None,
            ordered: None,
            withdrawn: false,
            ended: None,
        });
    }

    /// The service has accepted a request; its call site is kept here.
    pub(crate) fn accepted(&mut self, rank: Rank, submission: &mut Submission) {
        if let Some(ring) = self.ranks.get_mut(&rank) {
            let site = submission.site.take();
            ring.change(submission.request, |note| note.site = site);
        }
    }

    /// A request enters the negotiation.
    pub(crate) fn announced(&mut self, now: Time, rank: Rank, request: RequestId) {
        if let Some(ring) = self.ranks.get_mut(&rank) {
            ring.change(request, |note| note.announced = Some(now));
        }
    }

    /// The worker withdraws a request.
    pub(crate) fn withdrawn(&mut self, rank: Rank, request: RequestId) {
        if let Some(ring) = self.ranks.get_mut(&rank) {
            ring.change(request, |note| note.withdrawn = true);
        }
    }

    /// An operation is ordered here, or admitted by a schedule.
    pub(crate) fn ordered(&mut self, now: Time, admission: &Admission) {
        if !self.is_on {
            return;
        }
        let Admission { epoch, seq, scheduled, .. } = *admission;
        let order = OrderNote { seq, at: now, scheduled };
        for request in admission.tensors.iter().flat_map(|tensor| &tensor.requests) {
            if let Some(ring) = self.ranks.get_mut(&request.rank) {
                ring.change(request.request, |note| note.ordered = Some(order));
            }
        }
        self.operations.push(OperationNote {
            epoch,
            seq,
            scheduled,
            name: admission.tensors.first().map(|tensor| tensor.name.clone()),
            tensors: u32::try_from(admission.tensors.len()).unwrap_or(u32::MAX),
            ordered: now,
            started: None,
            performed: None,
            failed: None,
        });
    }

    /// An operation is handed to the threads that perform it.
    pub(crate) fn started(&mut self, now: Time, epoch: Epoch, seq: Seq) {
        self.change_operation(epoch, seq, |note| note.started = Some(now));
    }

    /// All threads have done their parts of an operation.
    pub(crate) fn performed(&mut self, now: Time, epoch: Epoch, seq: Seq) {
        self.change_operation(epoch, seq, |note| note.performed = Some(now));
    }

    /// An operation cannot be performed, or is dropped.
    pub(crate) fn not_performed(&mut self, epoch: Epoch, seq: Seq, reason: &str) {
        self.change_operation(epoch, seq, |note| note.failed = Some(begin_of(reason)));
    }

    /// Operations are dropped; their requests are announced again, or fail.
    pub(crate) fn dropped(&mut self, epoch: Epoch, dropped: &[Seq]) {
        for seq in dropped {
            self.not_performed(epoch, *seq, "dropped");
        }
        if dropped.is_empty() {
            return;
        }
        let is_dropped = |note: &RequestNote| {
            note.epoch == epoch
                && note.ended.is_none()
                && note.ordered.is_some_and(|order| dropped.contains(&order.seq))
        };
        for note in self.ranks.values_mut().flat_map(|ring| ring.requests.iter_mut()).filter(|note| is_dropped(note)) {
            note.ordered = None;
        }
    }

    /// A request is over.
    pub(crate) fn ended(&mut self, now: Time, rank: Rank, request: RequestId, failure: Option<&Failure>) {
        let Some(ring) = self.ranks.get_mut(&rank) else { return };
        let failed = failure.map(|failure| FailureNote { cause: failure.cause, reason: begin_of(&failure.reason) });
        self.failed_by_end += u64::from(failure.is_some_and(|failure| failure.cause.ends_epoch()));
        ring.change(request, |note| note.ended = Some((now, failed)));
    }

    /// A copy of all notes, which another thread converts.
    pub(crate) fn notes(&self) -> FlightNotes {
        let (epoch, epoch_began) = (self.epoch, self.epoch_began);
        FlightNotes { epoch, epoch_began, ranks: self.ranks.clone(), operations: self.operations.clone() }
    }

    fn change_operation(&mut self, epoch: Epoch, seq: Seq, change: impl FnOnce(&mut OperationNote)) {
        if self.is_on {
            // In flight are the newest ones.
            self.operations.change_newest(|note| (note.epoch, note.seq) == (epoch, seq), change);
        }
    }
}

impl RankRing {
    /// Changes the note of a request. Clients number their requests one after the other, so its place is known; if not,
    /// it is searched from the newest on.
    fn change(&mut self, request: RequestId, change: impl FnOnce(&mut RequestNote)) {
        let newest = self.requests.newest().map_or(0, |note| note.request.0);
        let back = usize::try_from(newest.wrapping_sub(request.0)).unwrap_or(usize::MAX);
        match self.requests.before_newest_mut(back).filter(|note| note.request == request) {
            Some(note) => change(note),
            None => self.requests.change_newest(|note| note.request == request, change),
        }
    }
}

/// The begin of a reason.
fn begin_of(reason: &str) -> String {
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason[..end].to_owned()
}

/// The bytes of a reason that are kept.
const REASON_BYTES_MAX: usize = 512;

#[cfg(test)]
mod tests;
