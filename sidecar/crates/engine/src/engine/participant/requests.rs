//! Pending requests of local ranks, by name and by number, and rejections of names that a rank has not submitted yet.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use ronde_wire::{Collective, Failure, Group, Rank, Request, RequestId, Seq, SetId, TensorName};

use crate::engine::shared::{RequestKey, Submission};
use crate::event::Time;

/// A tensor's name for one rank.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RankKey {
    pub(crate) set: SetId,
    pub(crate) name: TensorName,
    pub(crate) rank: Rank,
}

impl RankKey {
    pub(crate) fn new(set: SetId, name: &TensorName, rank: Rank) -> Self {
        Self { set, name: name.clone(), rank }
    }
}

/// A request that was taken out, with its name.
#[derive(Debug)]
pub(crate) struct TakenRequest {
    pub(crate) key: RequestKey,
    pub(crate) name: TensorName,
}

/// The pending requests of all local ranks.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    pending: BTreeMap<RankKey, Pending>,
    numbers: BTreeMap<RequestKey, RankKey>,
    counts: BTreeMap<Rank, usize>,
    rounds: BTreeMap<RankKey, RoundOffset>,
    /// Ranks with a pending join, by set.
    joined: BTreeSet<(SetId, Rank)>,
    /// The number of submissions and refusals so far.
    turns: u64,
}

/// A pending request.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) request: RequestId,
    pub(crate) what: Request,
    pub(crate) since: Time,
    /// The operation that performs it.
    pub(crate) ordered: Option<Seq>,
    /// The contribution that travels with its announcement.
    pub(crate) contribution: Bytes,
    /// The failure of a withdrawn request.
    pub(crate) withdrawn: Option<Failure>,
    turn: u64,
}

impl Pending {
    /// Whether it asks for a process set of its members.
    pub(crate) fn forms_set(&self) -> bool {
        matches!(self.what.collective, Collective::AddSetOfMembers { .. })
    }
}

/// A submission that was refused, and whose rejection has not arrived.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) failure: Failure,
    pub(crate) group: Option<Group>,
    turn: u64,
}

/// Submissions that the coordinator does not know when a schedule is over, in the order of submission.
#[derive(Debug)]
pub(crate) enum Unordered {
    /// A request without an operation.
    Request(RankKey),
    /// A refusal.
    Refused { key: RankKey, failure: Failure, group: Option<Group> },
}

/// The difference between a rank and the coordinator in the rounds of a name (see `coordinator::negotiation`). At most
/// one of the two lists is not empty.
#[derive(Debug, Default)]
struct RoundOffset {
    /// Rounds that the rank took part in with a refusal, and whose rejection has not arrived.
    refused: VecDeque<Refusal>,
    /// Rounds that were rejected before the rank took part.
    rejected: VecDeque<Failure>,
}

/// Rejections that may wait for one rank and name; the coordinator's bound on poisoned rounds keeps them below this.
pub(crate) const REJECTED_AHEAD_MAX: usize = crate::engine::shared::POISONED_MAX;

/// The effect of a rejection on one rank.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Rejected {
    /// This request fails.
    Request(RequestId),
    /// The rank was answered before.
    Answered,
    /// The rank has no such request yet; its next one with that name fails at once.
    Ahead,
    /// Too many rejections wait.
    Overflow,
}

impl Requests {
    /// Whether the rank has a pending request with this name.
    pub(crate) fn has(&self, key: &RankKey) -> bool {
        self.pending.contains_key(key)
    }

    /// Whether the rank has a pending request with this number.
    pub(crate) fn has_number(&self, key: RequestKey) -> bool {
        self.numbers.contains_key(&key)
    }

    /// Whether the rank has a pending join in the set.
    pub(crate) fn has_joined(&self, set: SetId, rank: Rank) -> bool {
        self.joined.contains(&(set, rank))
    }

    /// The ranks with a pending join in any set, ascending.
    pub(crate) fn joined_ranks(&self) -> BTreeSet<Rank> {
        self.joined.iter().map(|(_, rank)| *rank).collect()
    }

    /// The number of pending requests of a rank.
    pub(crate) fn of(&self, rank: Rank) -> usize {
        self.counts.get(&rank).copied().unwrap_or_default()
    }

    pub(crate) fn insert(
        &mut self,
        key: RankKey,
        request: RequestId,
        Submission { what, contribution }: Submission,
        now: Time,
    ) {
        *self.counts.entry(key.rank).or_default() += 1;
        if what.collective == Collective::Join {
            self.joined.insert((key.set, key.rank));
        }
        self.numbers.insert(RequestKey { rank: key.rank, request }, key.clone());
        let turn = self.next_turn();
        let (ordered, withdrawn) = (None, None);
        self.pending.insert(key, Pending { request, what, since: now, ordered, contribution, withdrawn, turn });
    }

    /// The request with a number while it can still be withdrawn: it is not ordered, or only by the schedule that
    /// begins with `ahead`.
    pub(crate) fn withdrawable(&mut self, key: RequestKey, ahead: Option<Seq>) -> Option<&mut Pending> {
        let pending = self.pending.get_mut(self.numbers.get(&key)?)?;
        let decided = pending.ordered.is_some_and(|seq| ahead.is_none_or(|first| seq < first));
        (!decided).then_some(pending)
    }

    /// Marks a request as not ordered: its operation was dropped.
    pub(crate) fn mark_unordered(&mut self, key: RequestKey) {
        let pending = self.numbers.get(&key).and_then(|key| self.pending.get_mut(key));
        if let Some(pending) = pending {
            pending.ordered = None;
        }
    }

    /// The requests and refusals that are neither ordered nor rejected, except those for process sets of their members,
    /// which a schedule does not concern.
    pub(crate) fn unordered(&self) -> Vec<Unordered> {
        let asked = self.pending.iter().filter(|(_, pending)| pending.ordered.is_none() && !pending.forms_set());
        let asked = asked.map(|(key, pending)| (pending.turn, Unordered::Request(key.clone())));
        let refused =
            self.rounds.iter().flat_map(|(key, ahead)| ahead.refused.iter().map(move |refusal| (key, refusal)));
        let refused = refused.map(|(key, Refusal { failure, group, turn })| {
            let (key, failure, group) = (key.clone(), failure.clone(), group.clone());
            (*turn, Unordered::Refused { key, failure, group })
        });
        let mut all: Vec<(u64, Unordered)> = asked.chain(refused).collect();
        all.sort_by_key(|(turn, _)| *turn);
        all.into_iter().map(|(_, unordered)| unordered).collect()
    }

    /// Removes the group from a rank's part in the next round of a name. False when there is none.
    pub(crate) fn ungroup(&mut self, key: &RankKey) -> bool {
        if let Some(refusal) = self.rounds.get_mut(key).and_then(|ahead| ahead.refused.front_mut()) {
            refusal.group = None;
            return true;
        }
        let pending = self.pending.get_mut(key).filter(|pending| pending.ordered.is_none());
        pending.map(|pending| pending.what.group = None).is_some()
    }

    pub(crate) fn pending(&self, key: &RankKey) -> Option<&Pending> {
        self.pending.get(key)
    }

    /// Takes the failure that already waits for the rank's next request with this name.
    pub(crate) fn take_rejection(&mut self, key: &RankKey) -> Option<Failure> {
        let ahead = self.rounds.get_mut(key)?;
        let failure = ahead.rejected.pop_front();
        self.drop_if_even(key);
        failure
    }

    /// Records a refusal as the rank's part in the next round of the name.
    pub(crate) fn refuse(&mut self, key: RankKey, failure: Failure, group: Option<Group>) {
        if self.take_rejection(&key).is_none() {
            let turn = self.next_turn();
            self.rounds.entry(key).or_default().refused.push_back(Refusal { failure, group, turn });
        }
    }

    /// Handles the rejection of a round of the name.
    pub(crate) fn reject(&mut self, key: RankKey, failure: &Failure) -> Rejected {
        if let Some(ahead) = self.rounds.get_mut(&key).filter(|ahead| !ahead.refused.is_empty()) {
            ahead.refused.pop_front();
            self.drop_if_even(&key);
            return Rejected::Answered;
        }
        if let Some(pending) = self.pending.get(&key).filter(|pending| pending.ordered.is_none()) {
            let request = pending.request;
            self.remove(RequestKey { rank: key.rank, request });
            return Rejected::Request(request);
        }
        let ahead = self.rounds.entry(key).or_default();
        if ahead.rejected.len() >= REJECTED_AHEAD_MAX {
            return Rejected::Overflow;
        }
        ahead.rejected.push_back(failure.clone());
        Rejected::Ahead
    }

    /// Marks a request as ordered, after `fits` has compared it.
    pub(crate) fn order(
        &mut self,
        key: &RankKey,
        seq: Seq,
        fits: impl FnOnce(&Request) -> Result<(), String>,
    ) -> Result<RequestId, String> {
        let pending = self.pending.get_mut(key).ok_or("it was ordered, but not asked for")?;
        if let Some(earlier) = pending.ordered {
            return Err(format!("it was ordered as {earlier} already"));
        }
        fits(&pending.what)?;
        pending.ordered = Some(seq);
        Ok(pending.request)
    }

    /// Removes a request; true when there was one.
    pub(crate) fn remove(&mut self, RequestKey { rank, request }: RequestKey) -> bool {
        let Some(key) = self.numbers.remove(&RequestKey { rank, request }) else { return false };
        if let Some(count) = self.counts.get_mut(&rank) {
            *count -= 1;
        }
        let pending = self.pending.remove(&key);
        if pending.as_ref().is_some_and(|pending| pending.what.collective == Collective::Join) {
            self.joined.remove(&(key.set, rank));
        }
        pending.is_some()
    }

    /// Whether the rank's request with this name is not ordered and fits.
    pub(crate) fn fits(&self, key: &RankKey, fits: impl Fn(&Collective) -> bool) -> bool {
        let pending = self.pending.get(key).filter(|pending| pending.ordered.is_none());
        pending.is_some_and(|pending| fits(&pending.what.collective))
    }

    /// Removes the rank's request with this name and returns all of it.
    pub(crate) fn take_pending(&mut self, key: &RankKey) -> Option<Pending> {
        let request = self.pending.get(key)?.request;
        self.numbers.remove(&RequestKey { rank: key.rank, request });
        if let Some(count) = self.counts.get_mut(&key.rank) {
            *count -= 1;
        }
        self.pending.remove(key)
    }

    /// Removes the rank's request with this name and returns its number.
    pub(crate) fn take_one(&mut self, key: &RankKey) -> Option<RequestId> {
        let request = self.pending.get(key)?.request;
        self.remove(RequestKey { rank: key.rank, request });
        Some(request)
    }

    /// Removes the requests of a set that are not ordered, and the rejections of the set.
    pub(crate) fn take_set(&mut self, set: SetId) -> Vec<TakenRequest> {
        let of_set = |(key, pending): (&RankKey, &Pending)| {
            let taken = key.set == set && pending.ordered.is_none();
            let request = RequestKey { rank: key.rank, request: pending.request };
            taken.then(|| TakenRequest { key: request, name: key.name.clone() })
        };
        let taken: Vec<_> = self.pending.iter().filter_map(of_set).collect();
        for request in &taken {
            self.remove(request.key);
        }
        self.rounds.retain(|key, _| key.set != set);
        taken
    }

    /// Drops rejections of a set that wait for later requests.
    pub(crate) fn forget_rejections(&mut self, set: SetId) {
        self.rounds.retain(|key, ahead| key.set != set || !ahead.refused.is_empty());
    }

    /// Removes all requests, or only those that are not ordered, ascending by rank and number.
    pub(crate) fn take(&mut self, unordered_only: bool) -> Vec<RequestKey> {
        let chosen = |key: &RankKey| {
            let ordered = self.pending.get(key).is_some_and(|pending| pending.ordered.is_some());
            !(unordered_only && ordered)
        };
        let taken: Vec<RequestKey> =
            self.numbers.iter().filter(|(_, key)| chosen(key)).map(|(number, _)| *number).collect();
        for key in &taken {
            self.remove(*key);
        }
        self.rounds.clear();
        taken
    }

    pub(crate) fn len(&self) -> usize {
        self.pending.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Rank, &Pending)> {
        self.pending.iter().map(|(key, pending)| (key.rank, pending))
    }

    fn next_turn(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }

    fn drop_if_even(&mut self, key: &RankKey) {
        if self.rounds.get(key).is_some_and(|ahead| ahead.refused.is_empty() && ahead.rejected.is_empty()) {
            self.rounds.remove(key);
        }
    }
}
