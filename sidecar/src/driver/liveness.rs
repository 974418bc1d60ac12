//! When a sidecar without a launcher is done: the workers' coming and going says it (`--exit-with-workers`).

use std::time::Duration;

use ronde_wire::{Cause, Failure};

use ronde_bootstrap::codes::Code;

/// What is remembered for that.
#[derive(Debug, Default)]
pub(crate) struct Liveness {
    /// How long the first worker may take to come; absent where the sidecar serves until it is told to stop.
    patience: Option<Duration>,
    /// Whether a worker has come.
    came: bool,
    /// Whether another sidecar has left before there was an epoch.
    peer_left: bool,
    /// Why an epoch ended, if not in an orderly way.
    failure: Option<String>,
}

impl Liveness {
    /// Serves until the workers have left, or, without a patience, until told to stop.
    pub(crate) fn new(patience: Option<Duration>) -> Self {
        Self { patience, ..Self::default() }
    }

    /// A worker has come.
    pub(crate) fn note_worker(&mut self) {
        self.came = true;
    }

    /// Another sidecar has left before there was an epoch: there will be none.
    pub(crate) fn note_peer_left(&mut self) {
        self.peer_left = true;
    }

    /// An epoch has ended.
    pub(crate) fn note_end(&mut self, failure: &Failure) {
        if failure.cause != Cause::ShutDown {
            self.failure.get_or_insert_with(|| failure.reason.clone());
        }
    }

    /// Whether a sidecar with so many sessions has nothing more to do.
    pub(crate) fn is_over(&self, sessions: usize, has_epoch: bool) -> bool {
        self.patience.is_some() && (self.came || self.peer_left) && sessions == 0 && !has_epoch
    }

    /// Until when, from the start of the sidecar, the first worker has to come.
    pub(crate) fn due(&self) -> Option<Duration> {
        self.patience.filter(|_| !self.came && !self.peer_left)
    }

    /// The reason to end a sidecar that has been up so long, if nobody came.
    pub(crate) fn timed_out(&self, up: Duration) -> Option<String> {
        let due = self.due().filter(|due| up >= *due)?;
        let text = format!("no worker has come within {} seconds (--exit-with-workers)", due.as_secs());
        Some(Code::SidecarCannotGoOn.mark(&text))
    }

    /// Why the workers' job failed, where the sidecar answers for it.
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
    fn it_is_over_when_those_who_came_have_left_and_their_epoch_has_ended() {
        let mut liveness = Liveness::new(Some(PATIENCE));
        assert!(!liveness.is_over(0, false), "nobody has come yet");
        liveness.note_worker();
        assert!(!liveness.is_over(1, true) && !liveness.is_over(0, true) && liveness.is_over(0, false));
        assert_eq!(liveness.failure(), None);
    }

    #[test]
    fn without_being_asked_to_it_never_ends() {
        let mut liveness = Liveness::new(None);
        liveness.note_worker();
        liveness.note_end(&Failure::new(Cause::RankLost, "rank 1 is gone"));
        assert!(!liveness.is_over(0, false));
        assert_eq!((liveness.due(), liveness.failure()), (None, None));
    }

    #[test]
    fn who_waits_in_vain_says_for_how_long() {
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
