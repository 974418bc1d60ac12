//! Converts notes to the format of files.

use ronde_bootstrap::flight::{
    EndRecord, FORMAT, FailureRecord, FlightRecord, OperationRecord, OrderedRecord, RankRecord, RequestRecord,
    SetRecord, VERSION, WAITING_MAX, WaitingRecord,
};
use ronde_engine::{EnginePhase, STATUS_ENTRIES_MAX, Status, Time};
use ronde_wire::{Failure, JobName};

use super::{FailureNote, FlightNotes, OperationNote, RankRing, RequestNote};

/// The engine cuts its lists to that.
const _: () = assert!(STATUS_ENTRIES_MAX <= WAITING_MAX);

/// What is recorded, with what the engine knows, at one moment.
pub(crate) struct FlightSnapshot {
    /// The notes.
    pub(crate) notes: FlightNotes,
    /// What the engine knows besides.
    pub(crate) status: Status,
    /// The moment and the reason.
    pub(crate) facts: FlightFacts,
}

/// The moment and the reason of a snapshot.
pub(crate) struct FlightFacts {
    /// The job.
    pub(crate) job: JobName,
    /// Its run.
    pub(crate) run: String,
    /// The time of the engine.
    pub(crate) now: Time,
    /// The same time in microseconds since the Unix epoch.
    pub(crate) unix_us: u64,
    /// The failure after which it was made.
    pub(crate) failure: Option<Failure>,
}

impl FlightSnapshot {
    /// Converts to the format of files.
    pub(crate) fn into_record(self) -> FlightRecord {
        let Self { notes, status, facts } = self;
        let clock = Clock { now: facts.now, unix_us: facts.unix_us };
        // A record after the end of an epoch is about what waited then.
        let is_over = facts.failure.is_some() && status.phase != EnginePhase::Active;
        let waiting = if is_over { status.waited_at_end } else { status.waiting_tensors };
        let waiting = waiting.into_iter().map(|waiting| WaitingRecord {
            set: waiting.set.0,
            name: waiting.name.into(),
            collective: waiting.collective.to_ascii_lowercase(),
            missing: waiting.missing.into_iter().map(|rank| rank.0).collect(),
            since_us: facts.unix_us.saturating_sub(waiting.age_ms.saturating_mul(1_000)),
        });
        let sets = status
            .process_sets
            .into_iter()
            .map(|set| SetRecord { id: set.id.0, ranks: set.ranks.iter().map(|rank| rank.0).collect() });
        FlightRecord {
            format: FORMAT.to_owned(),
            version: VERSION,
            job: facts.job.to_string(),
            run: facts.run,
            sidecar: status.sidecar.0,
            made_us: facts.unix_us,
            failure: facts.failure.map(|failure| failure.reason),
            epoch: notes.epoch.0,
            epoch_began_us: clock.unix(notes.epoch_began),
            placement: status.placement.into_iter().map(|sidecar| sidecar.0).collect(),
            sets: sets.collect(),
            ranks: notes.ranks.iter().map(|(rank, ring)| clock.rank(rank.0, ring)).collect(),
            operations: notes.operations.iter().map(|note| clock.operation(note)).collect(),
            last_to_be_ready: status.last_to_be_ready,
            waited_for_us: status.waited_for_us,
            waiting: waiting.collect(),
        }
    }
}

/// Converts times of the engine to microseconds since the Unix epoch.
struct Clock {
    now: Time,
    unix_us: u64,
}

impl Clock {
    fn unix(&self, at: Time) -> u64 {
        self.unix_us.saturating_sub(self.now.0.saturating_sub(at.0))
    }

    fn rank(&self, rank: u32, ring: &RankRing) -> RankRecord {
        let requests = ring.requests.iter().map(|note| self.request(note)).collect();
        RankRecord { rank, submitted: ring.requests.pushed(), requests }
    }

    fn request(&self, note: &RequestNote) -> RequestRecord {
        let failed = |failed: &FailureNote| FailureRecord {
            cause: format!("{:?}", failed.cause),
            reason: failed.reason.clone(),
            ends_epoch: failed.cause.ends_epoch(),
        };
        RequestRecord {
            set: note.set.0,
            name: note.name.as_str().to_owned(),
            collective: note.collective.to_ascii_lowercase(),
            bytes: note.bytes,
            site: note.site.clone(),
            epoch: note.epoch.0,
            submitted_us: self.unix(note.submitted),
            announced_us: note.announced.map(|at| self.unix(at)),
            ordered: note.ordered.map(|order| OrderedRecord {
                seq: order.seq.0,
                at_us: self.unix(order.at),
                scheduled: order.scheduled,
            }),
            withdrawn: note.withdrawn,
            ended: note
                .ended
                .as_ref()
                .map(|(at, failure)| EndRecord { at_us: self.unix(*at), failed: failure.as_ref().map(failed) }),
        }
    }

    fn operation(&self, note: &OperationNote) -> OperationRecord {
        OperationRecord {
            epoch: note.epoch.0,
            seq: note.seq.0,
            scheduled: note.scheduled,
            name: note.name.as_ref().map_or_else(String::new, |name| name.as_str().to_owned()),
            tensors: note.tensors,
            ordered_us: self.unix(note.ordered),
            started_us: note.started.map(|at| self.unix(at)),
            performed_us: note.performed.map(|at| self.unix(at)),
            failed: note.failed.clone(),
        }
    }
}
