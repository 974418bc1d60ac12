//! [`Pipeline`]: which chunk is copied next, and when a job is done. Pure: it copies nothing and knows no device.
//!
//! Jobs are copied in the order of their arrival, chunk by chunk, with a bounded number of chunks in flight. So the last
//! chunk of one job and the first of the next are in flight together. A job that fails or is cancelled starts no further
//! chunk, and is reported once its chunks in flight have ended: before that its memory is in use. Jobs are reported in the
//! order of their arrival.

use std::collections::VecDeque;
use std::ops::Range;

/// Identifies a job.
pub(super) type JobId = u64;

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Start to copy these bytes of a job.
    Copy(JobId, Range<usize>),
    /// Nothing of the job is in flight any more. It succeeded, unless it failed or was cancelled before.
    Finish(JobId, Outcome),
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Copied,
    Stopped,
}

#[derive(Debug)]
struct Job {
    id: JobId,
    bytes: usize,
    started: usize,
    /// Chunks.
    in_flight: usize,
    is_stopped: bool,
}

impl Job {
    fn is_over(&self) -> bool {
        self.in_flight == 0 && (self.is_stopped || self.started == self.bytes)
    }
}

/// The copies of one direction.
#[derive(Debug)]
pub(super) struct Pipeline {
    jobs: VecDeque<Job>,
    chunk_bytes: usize,
    window: usize,
    /// Chunks of all jobs.
    in_flight: usize,
}

impl Pipeline {
    /// Without jobs. At most `window` chunks of at most `chunk_bytes` bytes are in flight; both are at least 1.
    pub(super) fn new(chunk_bytes: usize, window: usize) -> Self {
        Self { jobs: VecDeque::new(), chunk_bytes: chunk_bytes.max(1), window: window.max(1), in_flight: 0 }
    }

    /// Adds a job of any length.
    pub(super) fn add(&mut self, id: JobId, bytes: usize) {
        self.jobs.push_back(Job { id, bytes, started: 0, in_flight: 0, is_stopped: false });
    }

    /// The next action; `None` until a chunk ends or a job is added.
    pub(super) fn poll_action(&mut self) -> Option<Action> {
        if self.jobs.front().is_some_and(Job::is_over) {
            let job = self.jobs.pop_front()?;
            let outcome = if job.is_stopped { Outcome::Stopped } else { Outcome::Copied };
            return Some(Action::Finish(job.id, outcome));
        }
        if self.in_flight >= self.window {
            return None;
        }
        let job = self.jobs.iter_mut().find(|job| !job.is_stopped && job.started < job.bytes)?;
        let range = job.started..job.bytes.min(job.started + self.chunk_bytes);
        job.started = range.end;
        job.in_flight += 1;
        self.in_flight += 1;
        Some(Action::Copy(job.id, range))
    }

    /// A chunk of the job has ended.
    pub(super) fn handle_ended(&mut self, id: JobId) {
        if let Some(job) = self.jobs.iter_mut().find(|job| job.id == id && job.in_flight > 0) {
            job.in_flight -= 1;
            self.in_flight -= 1;
        }
    }

    /// The job failed or is cancelled: it starts no further chunk.
    pub(super) fn handle_stopped(&mut self, id: JobId) {
        if let Some(job) = self.jobs.iter_mut().find(|job| job.id == id) {
            job.is_stopped = true;
        }
    }

    /// Whether there are no jobs.
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn actions(pipeline: &mut Pipeline) -> Vec<Action> {
        std::iter::from_fn(|| pipeline.poll_action()).collect()
    }

    #[test]
    fn chunks_of_the_next_job_start_while_the_last_of_one_is_in_flight() {
        let mut pipeline = Pipeline::new(10, 2);
        pipeline.add(1, 15);
        pipeline.add(2, 7);
        assert_eq!(actions(&mut pipeline), [Action::Copy(1, 0..10), Action::Copy(1, 10..15)]);
        pipeline.handle_ended(1);
        assert_eq!(actions(&mut pipeline), [Action::Copy(2, 0..7)]);
        pipeline.handle_ended(1);
        assert_eq!(actions(&mut pipeline), [Action::Finish(1, Outcome::Copied)]);
        pipeline.handle_ended(2);
        assert_eq!(actions(&mut pipeline), [Action::Finish(2, Outcome::Copied)]);
        assert!(pipeline.is_empty());
    }

    #[test]
    fn a_stopped_job_ends_after_its_chunks_in_flight() {
        let mut pipeline = Pipeline::new(10, 2);
        pipeline.add(1, 100);
        pipeline.add(2, 10);
        assert_eq!(actions(&mut pipeline).len(), 2);
        pipeline.handle_stopped(1);
        assert_eq!(pipeline.poll_action(), None, "its memory is in use");
        pipeline.handle_ended(1);
        assert_eq!(actions(&mut pipeline), [Action::Copy(2, 0..10)]);
        pipeline.handle_ended(1);
        assert_eq!(actions(&mut pipeline), [Action::Finish(1, Outcome::Stopped)]);
    }

    #[test]
    fn an_empty_job_is_done_at_once() {
        let mut pipeline = Pipeline::new(10, 2);
        pipeline.add(1, 0);
        assert_eq!(actions(&mut pipeline), [Action::Finish(1, Outcome::Copied)]);
    }

    #[test]
    fn an_empty_job_does_not_overtake_one_in_flight() {
        let mut pipeline = Pipeline::new(10, 2);
        pipeline.add(1, 5);
        pipeline.add(2, 0);
        assert_eq!(actions(&mut pipeline), [Action::Copy(1, 0..5)]);
        pipeline.handle_ended(1);
        assert_eq!(actions(&mut pipeline), [Action::Finish(1, Outcome::Copied), Action::Finish(2, Outcome::Copied)]);
    }

    proptest! {
        /// Every byte of every job is copied once and in order, the window is kept, and every job ends once, stopped or not.
        #[test]
        fn every_job_ends_once_with_all_its_bytes(
            sizes in prop::collection::vec(0_usize..100, 0..12),
            stopped in prop::collection::vec(any::<bool>(), 12),
            ends in prop::collection::vec(any::<prop::sample::Index>(), 0..64),
            chunk in 1_usize..40,
            window in 1_usize..5,
        ) {
            let mut pipeline = Pipeline::new(chunk, window);
            for (id, bytes) in sizes.iter().enumerate() {
                pipeline.add(id as u64, *bytes);
            }
            let mut copied = vec![0; sizes.len()];
            let mut finished = vec![None; sizes.len()];
            let mut flying: Vec<JobId> = Vec::new();
            let mut ends = ends.into_iter();
            loop {
                while let Some(action) = pipeline.poll_action() {
                    match action {
                        Action::Copy(id, range) => {
                            let at = usize::try_from(id).expect("small");
                            prop_assert_eq!(range.start, copied[at]);
                            prop_assert!(!range.is_empty() && range.len() <= chunk && finished[at].is_none());
                            copied[at] = range.end;
                            flying.push(id);
                        }
                        Action::Finish(id, outcome) => {
                            let at = usize::try_from(id).expect("small");
                            prop_assert!(finished[at].is_none() && !flying.contains(&id));
                            finished[at] = Some(outcome);
                        }
                    }
                    prop_assert!(flying.len() <= window);
                }
                if flying.is_empty() {
                    break;
                }
                let next = ends.next().map_or(0, |index| index.index(flying.len()));
                let id = flying.remove(next);
                if stopped[usize::try_from(id).expect("small")] {
                    pipeline.handle_stopped(id);
                }
                pipeline.handle_ended(id);
            }
            prop_assert!(pipeline.is_empty());
            for (at, bytes) in sizes.iter().enumerate() {
                let expected = if stopped[at] && *bytes > 0 { Outcome::Stopped } else { Outcome::Copied };
                prop_assert_eq!(finished[at], Some(expected));
                prop_assert!(expected == Outcome::Stopped || copied[at] == *bytes);
            }
        }
    }
}
