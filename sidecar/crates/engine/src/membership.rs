//! When a sidecar of an elastic job enters its next membership, and which rank a worker has meanwhile. Pure.
//!
//! The launcher decides memberships (docs/adr/0026) and announces each in three steps: *change*, *enter*, *commit*. A
//! sidecar enters between two epochs: no epoch runs here, nothing uses memory of an operation, and nobody needs this
//! sidecar to finish the last epoch. Workers get ranks when all sidecars have entered, so no message of one membership
//! reaches a sidecar within another one.

use ronde_wire::{Rank, SidecarIndex, WorkerNumber, World};

use crate::event::Time;

/// The memberships as far as one sidecar knows them.
#[derive(Debug)]
pub struct Memberships {
    number: u64,
    /// By rank.
    workers: Vec<WorkerNumber>,
    is_committed: bool,
    /// Workers of earlier memberships that later ones did not contain.
    removed: Vec<WorkerNumber>,
    next: Option<Next>,
}

/// A membership that this sidecar has yet to enter.
#[derive(Debug)]
struct Next {
    number: u64,
    workers: Vec<WorkerNumber>,
    state: NextState,
}

/// How far entering a membership has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextState {
    /// The launcher has announced it.
    Announced,
    /// It is entered when the epoch is over; others may finish theirs until the time, once it is set.
    Released(Option<Time>),
    /// Engine and control links have entered it; so many lanes have yet to.
    Entering(usize),
}

/// What keeps a sidecar from entering another membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    /// An epoch runs here, or its operations are being finished, or lanes use memory of an operation.
    pub here: bool,
    /// Others may need this sidecar to finish the last epoch.
    pub for_others: bool,
}

impl Memberships {
    /// The first membership of a sidecar. In a job that is not elastic it is committed from the start.
    #[must_use]
    pub fn new(number: u64, workers: Vec<WorkerNumber>, is_committed: bool) -> Self {
        Self { number, workers, is_committed, removed: Vec::new(), next: None }
    }

    /// The number of the current membership.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether sidecars of the current membership may be connected and its workers attach: all have entered it, and this
    /// one is not about to leave it. A membership that is only announced may never be entered.
    #[must_use]
    pub fn is_open(&self) -> bool {
        let is_ending = self.next.as_ref().is_some_and(|next| next.state != NextState::Announced);
        self.is_committed && !is_ending
    }

    /// Whether a worker took part in an earlier membership and does not any more.
    #[must_use]
    pub fn is_removed(&self, worker: WorkerNumber) -> bool {
        self.removed.contains(&worker)
    }

    /// The worker that has a rank in the current membership.
    #[must_use]
    pub fn worker_of(&self, rank: Rank) -> Option<WorkerNumber> {
        self.workers.get(usize::try_from(rank.0).ok()?).copied()
    }

    /// The rank of a worker that may attach now.
    #[must_use]
    pub fn open_rank(&self, worker: WorkerNumber) -> Option<Rank> {
        if !self.is_open() {
            return None;
        }
        let position = self.workers.iter().position(|seated| *seated == worker)?;
        u32::try_from(position).ok().map(Rank)
    }

    /// The launcher announces the next membership, in place of one that was not entered. Nothing else changes yet.
    ///
    /// # Errors
    /// When a membership that is known here is as new, or this sidecar has no rank.
    pub fn change(
        &mut self,
        me: SidecarIndex,
        number: u64,
        workers: Vec<WorkerNumber>,
        world: &World,
    ) -> Result<(), String> {
        let newest = self.next.as_ref().map_or(self.number, |next| next.number);
        if number <= newest {
            return Err(format!("membership {newest} is newer"));
        }
        if workers.len() != world.size() || world.ranks_of(me).is_empty() {
            return Err(format!("it has {} workers and {} ranks, none of them on {me}", workers.len(), world.size()));
        }
        self.next = Some(Next { number, workers, state: NextState::Announced });
        Ok(())
    }

    /// The launcher releases the next membership: enter it when the epoch is over. Returns whether it is the next one.
    pub fn release(&mut self, number: u64) -> bool {
        let Some(next) = self.next.as_mut().filter(|next| next.number == number) else { return false };
        // A second release of the same one changes nothing: it may have begun to enter.
        if matches!(next.state, NextState::Announced) {
            next.state = NextState::Released(None);
        }
        true
    }

    /// Whether the next membership is released, and not entered yet.
    #[must_use]
    pub fn is_released(&self) -> bool {
        self.next.as_ref().is_some_and(|next| matches!(next.state, NextState::Released(_)))
    }

    /// When [`Self::poll_enter`] gives up to wait for others, if it does wait for them.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        match self.next.as_ref()?.state {
            NextState::Released(until) => until,
            NextState::Announced | NextState::Entering(_) => None,
        }
    }

    /// Whether to enter the next membership now: then it is the current one, and `lanes` lanes follow. Call it whenever
    /// `busy` may have changed.
    pub fn poll_enter(&mut self, now: Time, busy: Busy, lanes: usize) -> bool {
        let Some(Next { state: state @ NextState::Released(_), .. }) = &mut self.next else { return false };
        if busy.here {
            return false;
        }
        let NextState::Released(until) = *state else { return false };
        if busy.for_others && until.is_none_or(|until| now < until) {
            *state = NextState::Released(Some(until.unwrap_or(now.plus_ms(OTHERS_WAIT_MS))));
            return false;
        }
        *state = NextState::Entering(lanes);
        self.begin_next();
        true
    }

    fn begin_next(&mut self) {
        let Some(next) = &mut self.next else { return };
        (self.number, self.is_committed) = (next.number, false);
        let before = std::mem::replace(&mut self.workers, std::mem::take(&mut next.workers));
        self.removed.extend(before.into_iter().filter(|worker| !self.workers.contains(worker)));
    }

    /// A lane has entered a membership. Returns whether it was the last one of the current membership: the launcher gets
    /// the confirmation then.
    pub fn lane_entered(&mut self, number: u64) -> bool {
        let Some(next) = self.next.as_mut().filter(|next| next.number == number) else { return false };
        let NextState::Entering(left) = &mut next.state else { return false };
        *left -= 1;
        if *left > 0 {
            return false;
        }
        self.next = None;
        true
    }

    /// All sidecars have entered the membership. Returns whether it is the current one: workers may attach now.
    pub fn commit(&mut self, number: u64) -> bool {
        if number != self.number || self.is_committed {
            return false;
        }
        self.is_committed = true;
        true
    }
}

/// How long a sidecar whose own epoch is over lets others finish theirs, for which it may relay messages; milliseconds.
const OTHERS_WAIT_MS: u64 = 2_000;

#[cfg(test)]
mod tests {
    use super::*;

    const ME: SidecarIndex = SidecarIndex(1);
    const QUIET: Busy = Busy { here: false, for_others: false };

    fn workers(numbers: &[u32]) -> Vec<WorkerNumber> {
        numbers.iter().copied().map(WorkerNumber).collect()
    }

    fn world(size: usize) -> World {
        World::new(vec![ME; size]).expect("a world")
    }

    fn running() -> Memberships {
        let mut memberships = Memberships::new(1, workers(&[0, 1, 2]), false);
        assert_eq!(memberships.open_rank(WorkerNumber(0)), None, "not committed");
        assert!(memberships.commit(1) && !memberships.commit(1));
        memberships
    }

    #[test]
    fn a_membership_is_entered_between_epochs_and_ranks_are_open_after_the_commit() {
        let mut memberships = running();
        assert_eq!(memberships.open_rank(WorkerNumber(2)), Some(Rank(2)));
        assert_eq!(memberships.change(ME, 2, workers(&[0, 2]), &world(2)), Ok(()));
        assert_eq!(memberships.open_rank(WorkerNumber(2)), Some(Rank(2)), "the epoch continues");
        assert!(memberships.is_open(), "links have to be up as long as nothing is released");
        assert!(!memberships.poll_enter(Time(0), QUIET, 1), "it is not released");
        assert!(memberships.release(2) && memberships.is_released());
        assert_eq!(memberships.open_rank(WorkerNumber(2)), None, "who returns waits");
        assert!(!memberships.poll_enter(Time(0), Busy { here: true, for_others: true }, 2));
        assert!(memberships.poll_enter(Time(0), QUIET, 2));
        assert_eq!((memberships.number(), memberships.is_open()), (2, false));
        assert!(memberships.release(2) && !memberships.is_released(), "it is entered once");
        assert!(!memberships.poll_enter(Time(0), QUIET, 2));
        assert!(!memberships.lane_entered(2) && memberships.lane_entered(2));
        assert_eq!(memberships.open_rank(WorkerNumber(2)), None);
        assert!(memberships.commit(2));
        assert_eq!(memberships.open_rank(WorkerNumber(2)), Some(Rank(1)));
        assert!(memberships.is_removed(WorkerNumber(1)) && !memberships.is_removed(WorkerNumber(0)));
        assert!(memberships.is_open());
    }

    #[test]
    fn others_are_waited_for_for_a_bounded_time() {
        let mut memberships = running();
        memberships.change(ME, 2, workers(&[0]), &world(1)).expect("the next one");
        memberships.release(2);
        let waits = Busy { here: false, for_others: true };
        assert!(!memberships.poll_enter(Time(5), waits, 1));
        let until = memberships.poll_timeout().expect("it waits");
        assert_eq!(until, Time(5).plus_ms(OTHERS_WAIT_MS));
        assert!(!memberships.poll_enter(Time(until.0 - 1), waits, 1));
        assert_eq!(memberships.poll_timeout(), Some(until), "the time does not move");
        assert!(memberships.poll_enter(until, waits, 1));
    }

    #[test]
    fn a_later_change_replaces_one_that_was_not_committed() {
        let mut memberships = running();
        memberships.change(ME, 2, workers(&[0, 1]), &world(2)).expect("the next one");
        memberships.release(2);
        assert!(memberships.poll_enter(Time(0), QUIET, 2));
        memberships.change(ME, 3, workers(&[1]), &world(1)).expect("the next one");
        assert!(!memberships.lane_entered(2) && !memberships.lane_entered(2), "nobody waits for it any more");
        assert!(!memberships.release(2), "it is not the next one");
        assert!(memberships.release(3) && memberships.poll_enter(Time(0), QUIET, 1) && memberships.lane_entered(3));
        assert!(!memberships.commit(2) && memberships.commit(3));
        assert_eq!(memberships.open_rank(WorkerNumber(1)), Some(Rank(0)));
        assert!(memberships.is_removed(WorkerNumber(0)) && memberships.is_removed(WorkerNumber(2)));
    }

    #[test]
    fn stale_and_foreign_memberships_are_refused() {
        let mut memberships = running();
        assert_eq!(memberships.change(ME, 1, workers(&[0]), &world(1)), Err("membership 1 is newer".to_owned()));
        memberships.change(ME, 4, workers(&[0]), &world(1)).expect("the next one");
        assert_eq!(memberships.change(ME, 3, workers(&[0]), &world(1)), Err("membership 4 is newer".to_owned()));
        let elsewhere = World::new(vec![SidecarIndex(0)]).expect("a world");
        assert!(memberships.change(ME, 5, workers(&[0]), &elsewhere).is_err(), "no rank is here");
        assert!(memberships.change(ME, 5, workers(&[0, 1]), &world(1)).is_err());
    }
}
