//! Decides when a sidecar without a launcher ends: after its workers have connected and left (`--exit-with-workers`, or
//! because its starter requests it).

use std::time::Duration;

use ronde_wire::{Cause, Failure};

use ronde_bootstrap::codes::Code;

/// Tracks whether workers have connected, and how their job ended.
#[derive(Debug, Default)]
pub(crate) struct Liveness {
    /// How long the first worker may take to connect; `None` if the sidecar serves until it is stopped.
    patience: Option<Duration>,
    /// Whether its starter has requested that it ends with its workers.
    is_last: bool,
    /// How long after the start of the sidecar the first worker may still connect then.
    last_due: Option<Duration>,
    /// Whether that time is over, and no worker came.
    is_unused: bool,
    /// Whether a worker has connected.
    came: bool,
    /// Whether another sidecar has left before there was an epoch.
    peer_left: bool,
    /// Why an epoch ended, if it did not end with a shutdown.
    failure: Option<String>,
}

impl Liveness {
    /// A sidecar that serves until the workers have left or, without a timeout, until it is stopped.
    pub(crate) fn new(patience: Option<Duration>) -> Self {
        Self { patience, ..Self::default() }
    }

    /// Ends the sidecar after the workers that connected have left, and one to which none connects when it has been up
    /// this long.
    pub(crate) fn end_with_workers(&mut self, due: Duration) {
        self.is_last = true;
        self.last_due = Some(due);
    }

    /// Notes that a worker has connected.
    pub(crate) fn note_worker(&mut self) {
        self.came = true;
    }

    /// Notes that another sidecar has left before the first epoch, which cannot begin then.
    pub(crate) fn note_peer_left(&mut self) {
        self.peer_left = true;
    }

    /// Notes that an epoch has ended.
    pub(crate) fn note_end(&mut self, failure: &Failure) {
        if failure.cause != Cause::ShutDown {
            self.failure.get_or_insert_with(|| failure.reason.clone());
        }
    }

    /// Returns whether a sidecar with this many sessions is done.
    pub(crate) fn is_over(&self, sessions: usize, has_epoch: bool) -> bool {
        let has_served = (self.patience.is_some() || self.is_last) && self.came;
        let ends = has_served || (self.is_unused && !self.came) || (self.patience.is_some() && self.peer_left);
        ends && sessions == 0 && !has_epoch
    }

    /// Returns how long after the start of the sidecar the first worker has to connect.
    pub(crate) fn due(&self) -> Option<Duration> {
        let last_due = self.last_due.filter(|_| !self.is_unused);
        let due = self.patience.into_iter().chain(last_due).min();
        due.filter(|_| !self.came && !self.peer_left)
    }

    /// Returns the reason to end a sidecar that has been up this long, if no worker has connected in time. One that its
    /// starter has released is over then, without a failure.
    pub(crate) fn timed_out(&mut self, up: Duration) -> Option<String> {
        self.is_unused = !self.came && self.last_due.is_some_and(|due| up >= due);
        let due = self.patience.filter(|due| up >= *due && !self.came && !self.peer_left)?;
        let text = format!("no worker connected within {} seconds (--exit-with-workers)", due.as_secs());
        Some(Code::SidecarCannotGoOn.mark(&text))
    }

    /// Returns why the workers' job failed, where the sidecar's exit status reports it.
    pub(crate) fn failure(&self) -> Option<String> {
        let peer_left = || (self.peer_left && !self.came).then(|| "the job ended before its first epoch".to_owned());
        self.patience.and_then(|_| self.failure.clone().or_else(peer_left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(9);

    #[test]
    fn the_sidecar_ends_after_its_workers_have_left_and_their_epoch_has_ended() {
        let mut liveness = Liveness::new(Some(PATIENCE));
        assert!(!liveness.is_over(0, false), "no worker has connected yet");
        liveness.note_worker();
        assert!(!liveness.is_over(1, true) && !liveness.is_over(0, true) && liveness.is_over(0, false));
        assert_eq!(liveness.failure(), None);
    }

    #[test]
    fn without_exit_after_workers_the_sidecar_never_ends() {
        let mut liveness = Liveness::new(None);
        liveness.note_worker();
        liveness.note_end(&Failure::new(Cause::RankLost, "rank 1 is gone"));
        assert!(!liveness.is_over(0, false));
        assert_eq!((liveness.due(), liveness.failure()), (None, None));
    }

    #[test]
    fn a_sidecar_whose_starter_requests_it_ends_with_its_workers() {
        let mut liveness = Liveness::new(None);
        liveness.end_with_workers(PATIENCE);
        assert!(!liveness.is_over(0, false), "its workers may still come");
        assert_eq!((liveness.due(), liveness.timed_out(PATIENCE / 2)), (Some(PATIENCE), None));
        assert!(!liveness.is_over(0, false), "its workers may still come");
        liveness.note_worker();
        liveness.note_end(&Failure::new(Cause::RankLost, "rank 1 is gone"));
        assert!(!liveness.is_over(1, true) && liveness.is_over(0, false));
        assert_eq!((liveness.due(), liveness.failure()), (None, None), "the workers report their failure");
    }

    #[test]
    fn a_released_sidecar_that_never_had_workers_ends_without_a_failure() {
        let mut liveness = Liveness::new(None);
        liveness.end_with_workers(PATIENCE);
        assert_eq!(liveness.timed_out(PATIENCE), None);
        assert!(liveness.is_over(0, false));
        assert_eq!((liveness.due(), liveness.failure()), (None, None));
        liveness.note_worker();
        assert!(!liveness.is_over(1, false), "one that came in the last moment is served");
    }

    #[test]
    fn a_timeout_without_workers_names_its_length() {
        let mut liveness = Liveness::new(Some(PATIENCE));
        assert_eq!(liveness.timed_out(PATIENCE - Duration::from_millis(1)), None);
        assert!(liveness.timed_out(PATIENCE).is_some_and(|reason| reason.contains("within 9 seconds")));
        liveness.note_worker();
        assert_eq!(liveness.timed_out(2 * PATIENCE), None);
    }

    #[test]
    fn a_sidecar_whose_peers_have_left_before_the_start_does_not_wait_for_workers() {
        let mut liveness = Liveness::new(Some(PATIENCE));
        liveness.note_peer_left();
        assert!(liveness.is_over(0, false) && !liveness.is_over(1, false));
        assert!(liveness.failure().is_some_and(|reason| reason.contains("before its first epoch")));
    }

    #[test]
    fn the_first_failure_is_kept_and_an_orderly_end_is_none() {
        let mut liveness = Liveness::new(Some(PATIENCE));
        liveness.note_end(&Failure::new(Cause::ShutDown, "rank 0 has shut down"));
        assert_eq!(liveness.failure(), None);
        liveness.note_end(&Failure::new(Cause::RankLost, "rank 1 is gone"));
        liveness.note_end(&Failure::new(Cause::SidecarLost, "sidecar 0 is gone"));
        assert_eq!(liveness.failure().as_deref(), Some("rank 1 is gone"));
    }
}
