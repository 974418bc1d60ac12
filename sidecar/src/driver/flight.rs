//! The flight recorder's files: which failures make one, and the thread that writes it.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ronde_bootstrap::flight::{FlightDirectory, write};
use ronde_bootstrap::messages::FromSidecar;
use ronde_engine::Time;
use ronde_wire::{Cause, Epoch, Failure, JobName, OPERATION_TIMEOUT, Rank};
use tokio::task::JoinHandle;

use super::Driver;
use crate::flight::{FlightFacts, FlightRecorder, FlightSnapshot};

/// The recorder, and where its files go.
pub(crate) struct Flight {
    /// What is recorded.
    pub(crate) recorder: FlightRecorder,
    job: JobName,
    run: String,
    /// `None` if nothing is written.
    directory: Option<PathBuf>,
    /// The write in progress.
    writing: Option<JoinHandle<()>>,
    /// When the last record of a timeout was written.
    timed_out: Option<Time>,
}

impl Flight {
    /// A recorder of a sidecar of this run of a job.
    pub(crate) fn new((job, run): (JobName, String), directory: &FlightDirectory) -> Self {
        let directory = directory.of_job(job.as_str());
        let recorder = FlightRecorder::new(directory.is_some());
        Self { recorder, job, run, directory, writing: None, timed_out: None }
    }

    /// Waits for the write in progress, for a bounded time.
    pub(crate) async fn finish(&mut self) {
        if let Some(writing) = self.writing.take()
            && tokio::time::timeout(WRITE_TIMEOUT, writing).await.is_err()
        {
            tracing::warn!(
                "the flight record was not written within {WRITE_TIMEOUT:?}; the file system does not answer"
            );
        }
    }
}

impl Driver {
    /// A copy of what is recorded; `None` when the recorder is off.
    pub(super) fn flight_snapshot(&self, failure: Option<Failure>) -> Option<FlightSnapshot> {
        let Flight { recorder, job, run, .. } = &self.flight;
        // Both clocks are read together, before the notes are copied, which takes a while.
        let now = self.now();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_us = u64::try_from(since.as_micros()).unwrap_or(u64::MAX);
        recorder.is_on().then(|| FlightSnapshot {
            notes: recorder.notes(),
            status: self.engine.status(now),
            facts: FlightFacts { job: job.clone(), run: run.clone(), now, unix_us, failure },
        })
    }

    /// Notes the begin of an epoch.
    pub(super) fn note_epoch(&mut self, epoch: Epoch) {
        let sessions = &mut self.clients.sessions;
        let served = self.world.ranks_of(self.me).into_iter();
        let served: Vec<_> = served.filter_map(|rank| Some((rank, sessions.of_rank(rank)?.worker))).collect();
        self.flight.recorder.epoch_began(self.now(), epoch, &served);
    }

    /// Writes a record if an epoch ended by a failure, rather than because the ranks are done.
    pub(super) fn record_failure(&mut self, failure: &Failure) {
        let is_orderly = failure.cause == Cause::ShutDown && !failure.is_stall();
        if !is_orderly || self.flight.recorder.has_failed_by_end() {
            self.write_flight_record(failure.clone());
        }
    }

    /// Writes a record if a worker has waited for longer than its operation timeout; at most one a minute.
    pub(super) fn record_timeout(&mut self, rank: Rank, reason: &str) {
        let now = self.now();
        let is_due = self.flight.timed_out.is_none_or(|last| now.ms_since(last) >= TIMEOUTS_INTERVAL_MS);
        if is_due
            && reason.contains(OPERATION_TIMEOUT)
            && self.write_flight_record(Failure::new(Cause::TimedOut, reason).with_rank(rank))
        {
            self.flight.timed_out = Some(now);
        }
    }

    /// Writes a record on a thread of its own. While it is writing another one, nothing new is written: consequences
    /// follow a failure within moments. Returns whether it is written.
    fn write_flight_record(&mut self, failure: Failure) -> bool {
        if self.flight.writing.as_ref().is_some_and(|writing| !writing.is_finished()) {
            return false;
        }
        let Some(directory) = self.flight.directory.clone() else { return false };
        let Some(snapshot) = self.flight_snapshot(Some(failure)) else { return false };
        self.flight.writing =
            Some(tokio::task::spawn_blocking(move || match write(&directory, &snapshot.into_record()) {
                Ok(path) => {
                    tracing::info!(path = %path.display(), "a flight record was written");
                    FromSidecar::Recorded { path }.send();
                }
                Err(error) => tracing::warn!("the flight record was not written: {error:#}"),
            }));
        true
    }
}

const TIMEOUTS_INTERVAL_MS: u64 = 60_000;
/// How long the end of the process waits for a record.
const WRITE_TIMEOUT: Duration = Duration::from_secs(3);
