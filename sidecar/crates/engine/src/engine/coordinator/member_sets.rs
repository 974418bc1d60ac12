//! The coordinator's table of requests for process sets that their members form by themselves, as MPI does with
//! `MPI_Comm_create_group`.
//!
//! A *call* is a name with a list of ranks. It is complete when all ranks of the list have asked for it. Calls of one
//! name with other lists are other calls, so disjoint sets may have one name. A rank has at most one request pending by
//! a name. So calls of one name can wait for each other: a rank that one of them needs has asked for the next one. None
//! of them can complete then, and all of them fail.
//!
//! A call that failed is kept until its other ranks have asked by its name once, for its list or for another one with
//! ranks of it: their part in it fails, too. So ranks that ask again after a failure meet each other in the same call.
//!
//! A rank that has joined asks for nothing, so a call that needs it fails; it has no part in that call.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use ronde_wire::{Cause, Failure, Rank, TensorName, limits};

use super::Violation;
use crate::engine::shared::wording;
use crate::event::Time;

/// The requests that wait, and the failed calls that wait for ranks.
#[derive(Debug, Default)]
pub(crate) struct MemberSets {
    names: BTreeMap<TensorName, Named>,
    /// The ranks in the pending requests of each rank, counted by [`weight`].
    pending: BTreeMap<Rank, usize>,
    /// The ranks of failed calls that wait for some, counted by [`weight`].
    failed: usize,
}

/// Ascending ranks of a set.
type List = Arc<[Rank]>;

/// The calls of one name.
#[derive(Debug, Default)]
struct Named {
    calls: BTreeMap<List, Call>,
    /// The list for which each rank has asked.
    asked: BTreeMap<Rank, List>,
    failed: VecDeque<Failed>,
}

/// A call that is not complete.
#[derive(Debug)]
struct Call {
    since: Time,
    asked: BTreeSet<Rank>,
}

/// A call that failed, with the ranks that have not asked by its name yet.
#[derive(Debug)]
struct Failed {
    failure: Failure,
    lists: Vec<List>,
    awaited: BTreeSet<Rank>,
}

impl Failed {
    /// Whether the request of a rank for this list is its part in the call.
    fn concerns(&self, rank: Rank, ranks: &[Rank]) -> bool {
        let shares = |list: &List| ranks.iter().any(|other| *other != rank && list.binary_search(other).is_ok());
        self.awaited.contains(&rank) && self.lists.iter().any(|list| **list == *ranks || shares(list))
    }

    fn weight(&self) -> usize {
        weight(self.lists.iter().map(|list| list.len()).sum())
    }
}

/// A rank's part in a failed call.
#[derive(Debug)]
struct Part {
    failure: Failure,
    /// Whether the rank asks for a list of the call.
    is_listed: bool,
}

/// The effect of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// It waits for other ranks.
    Waits,
    /// All ranks of the list have asked; the first of them at this time.
    Complete(Time),
    /// These requests fail.
    Failed(Ended),
}

/// Requests that fail.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    /// The ranks, ascending: all of them have asked.
    pub(crate) ranks: Vec<Rank>,
    pub(crate) failure: Failure,
}

/// A request that waits.
#[derive(Debug)]
pub(crate) struct WaitingSet<'a> {
    pub(crate) name: &'a TensorName,
    /// When the first rank asked.
    pub(crate) since: Time,
    /// The ranks that have not asked, ascending.
    pub(crate) missing: Vec<Rank>,
}

impl MemberSets {
    /// Handles the request of a rank for a set of ascending ranks, itself among them. `joined` are the ranks that have
    /// joined.
    ///
    /// # Errors
    /// How it breaks the protocol.
    pub(crate) fn ask(
        &mut self,
        now: Time,
        name: &TensorName,
        rank: Rank,
        ranks: &[Rank],
        joined: &BTreeSet<Rank>,
    ) -> Result<Asked, Violation> {
        if let Some(Part { failure, is_listed }) = self.take_part(name, rank, ranks) {
            // Whoever has asked for a list that is not one of the failed call must not wait for this rank. Requests for
            // one that is belong to the next call, which the rank has yet to ask for.
            let named = self.names.get(name).filter(|_| !is_listed);
            let waiting = named.and_then(|named| named.calls.get_key_value(ranks));
            let mut asked = match waiting.map(|(list, _)| Arc::clone(list)) {
                Some(list) => self.close(name, &list),
                None => BTreeSet::new(),
            };
            asked.insert(rank);
            return Ok(Asked::Failed(Ended { ranks: asked.into_iter().collect(), failure }));
        }
        let pending = self.pending.entry(rank).or_default();
        if *pending + weight(ranks.len()) > limits::SETS_OF_MEMBERS_PENDING_MAX {
            return Err(format!("announces more requests of {rank} for process sets than one may have pending"));
        }
        let named = self.names.entry(name.clone()).or_default();
        if named.asked.contains_key(&rank) {
            return Err(format!("announces {name} twice for {rank}"));
        }
        *pending += weight(ranks.len());
        let list = named.ask(now, rank, ranks);
        let Some(call) = named.calls.get(&list) else { return Ok(Asked::Waits) };
        if call.asked.len() == list.len() {
            let since = call.since;
            self.close(name, &list);
            return Ok(Asked::Complete(since));
        }
        let blocked = named.cycle(&list);
        if !blocked.is_empty() {
            let failure = disagreement(name, named, &blocked);
            return Ok(Asked::Failed(self.fail(name, &blocked, joined, failure)));
        }
        let absent: Vec<Rank> =
            list.iter().copied().filter(|rank| joined.contains(rank) && !call.asked.contains(rank)).collect();
        if absent.is_empty() {
            return Ok(Asked::Waits);
        }
        Ok(Asked::Failed(self.fail(name, &[list], joined, joined_failure(name, &absent))))
    }

    /// Handles the withdrawal of a request. `None` when it is answered already.
    pub(crate) fn withdraw(
        &mut self,
        name: &TensorName,
        rank: Rank,
        joined: &BTreeSet<Rank>,
        failure: Failure,
    ) -> Option<Ended> {
        let list = Arc::clone(self.names.get(name)?.asked.get(&rank)?);
        Some(self.fail(name, &[list], joined, failure))
    }

    /// Handles a request that the rank's sidecar refused, which is its part in a call of the name. `ranks` are the
    /// ascending ranks of the set.
    pub(crate) fn refuse(
        &mut self,
        name: &TensorName,
        rank: Rank,
        ranks: &[Rank],
        joined: &BTreeSet<Rank>,
        failure: Failure,
    ) -> Option<Ended> {
        if self.take_part(name, rank, ranks).is_some() {
            return None;
        }
        let call = self.names.get(name).and_then(|named| named.calls.get_key_value(ranks));
        let Some(list) = call.filter(|(_, call)| !call.asked.contains(&rank)).map(|(list, _)| Arc::clone(list)) else {
            let awaited = ranks.iter().copied().filter(|other| *other != rank && !joined.contains(other)).collect();
            self.keep(name, Failed { failure, lists: vec![ranks.into()], awaited });
            return None;
        };
        let ended = self.fail(name, &[list], joined, failure);
        self.take_part(name, rank, ranks);
        Some(ended)
    }

    /// A rank joins: the calls that need it fail. `joined` has it already.
    pub(crate) fn join(&mut self, rank: Rank, joined: &BTreeSet<Rank>) -> Vec<(TensorName, Ended)> {
        let needs = |list: &List, call: &Call| list.binary_search(&rank).is_ok() && !call.asked.contains(&rank);
        let of_name = |(name, named): (&TensorName, &Named)| {
            let lists: Vec<List> =
                named.calls.iter().filter(|(list, call)| needs(list, call)).map(|(list, _)| Arc::clone(list)).collect();
            (!lists.is_empty()).then(|| (name.clone(), lists))
        };
        let found: Vec<(TensorName, Vec<List>)> = self.names.iter().filter_map(of_name).collect();
        let mut ended = Vec::with_capacity(found.len());
        for (name, lists) in found {
            let failure = joined_failure(&name, &[rank]);
            let failed = self.fail(&name, &lists, joined, failure);
            ended.push((name, failed));
        }
        ended
    }

    /// All ranks have joined: no call waits, and the failed ones wait for no rank any more.
    pub(crate) fn all_joined(&mut self) {
        self.names.retain(|_, named| {
            named.failed.clear();
            !named.is_empty()
        });
        self.failed = 0;
    }

    /// Whether failed calls wait for more ranks than the limit.
    pub(crate) fn overflows(&self) -> bool {
        self.failed > limits::SETS_OF_MEMBERS_FAILED_MAX
    }

    /// The number of calls that wait for ranks.
    pub(crate) fn len(&self) -> usize {
        self.names.values().map(|named| named.calls.len()).sum()
    }

    /// The calls that wait for ranks.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = WaitingSet<'_>> {
        self.names.iter().flat_map(|(name, named)| {
            named.calls.iter().map(move |(list, call)| WaitingSet {
                name,
                since: call.since,
                missing: list.iter().copied().filter(|rank| !call.asked.contains(rank)).collect(),
            })
        })
    }

    /// The rank's part in a call of this name that has failed.
    fn take_part(&mut self, name: &TensorName, rank: Rank, ranks: &[Rank]) -> Option<Part> {
        let named = self.names.get_mut(name)?;
        let at = named.failed.iter().position(|failed| failed.concerns(rank, ranks))?;
        let failed = &mut named.failed[at];
        let is_listed = failed.lists.iter().any(|list| **list == *ranks);
        let failure = failed.failure.clone();
        failed.awaited.remove(&rank);
        if failed.awaited.is_empty() {
            self.failed -= failed.weight();
            named.failed.remove(at);
        }
        self.drop_empty(name);
        Some(Part { failure, is_listed })
    }

    /// Ends calls with a failure.
    fn fail(&mut self, name: &TensorName, lists: &[List], joined: &BTreeSet<Rank>, failure: Failure) -> Ended {
        let mut asked = BTreeSet::new();
        for list in lists {
            asked.extend(self.close(name, list));
        }
        let other = |rank: &Rank| !asked.contains(rank) && !joined.contains(rank);
        let awaited = lists.iter().flat_map(|list| list.iter()).copied().filter(other).collect();
        self.keep(name, Failed { failure: failure.clone(), lists: lists.to_vec(), awaited });
        Ended { ranks: asked.into_iter().collect(), failure }
    }

    fn keep(&mut self, name: &TensorName, failed: Failed) {
        if !failed.awaited.is_empty() {
            self.failed += failed.weight();
            self.names.entry(name.clone()).or_default().failed.push_back(failed);
        }
    }

    /// Removes a call. Returns the ranks that have asked for it.
    fn close(&mut self, name: &TensorName, list: &List) -> BTreeSet<Rank> {
        let Some(named) = self.names.get_mut(name) else { return BTreeSet::new() };
        let asked = named.calls.remove(list).map(|call| call.asked).unwrap_or_default();
        for rank in &asked {
            named.asked.remove(rank);
            if let Some(pending) = self.pending.get_mut(rank) {
                *pending -= weight(list.len());
            }
        }
        self.drop_empty(name);
        asked
    }

    fn drop_empty(&mut self, name: &TensorName) {
        if self.names.get(name).is_some_and(Named::is_empty) {
            self.names.remove(name);
        }
    }
}

impl Named {
    fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.failed.is_empty()
    }

    /// Adds a request. Returns the list of its call.
    fn ask(&mut self, now: Time, rank: Rank, ranks: &[Rank]) -> List {
        let list = self.calls.get_key_value(ranks).map_or_else(|| ranks.into(), |(list, _)| Arc::clone(list));
        let call = self.calls.entry(Arc::clone(&list)).or_insert_with(|| Call { since: now, asked: BTreeSet::new() });
        call.asked.insert(rank);
        self.asked.insert(rank, Arc::clone(&list));
        list
    }

    /// The calls that a call waits for: ranks of it have asked for them by the same name.
    fn blockers<'a>(&'a self, list: &'a List) -> impl Iterator<Item = &'a List> {
        list.iter().filter_map(|rank| self.asked.get(rank)).filter(move |other| *other != list)
    }

    /// The calls on a way from one that leads back to it, itself first; none when there is no such way.
    fn cycle(&self, start: &List) -> Vec<List> {
        // Each call that was reached, with the one from which it was.
        let mut reached: BTreeMap<&List, &List> = BTreeMap::new();
        let mut next = vec![start];
        while let Some(list) = next.pop() {
            for blocker in self.blockers(list) {
                if blocker == start {
                    return way_back(&reached, start, list);
                }
                if !reached.contains_key(blocker) {
                    reached.insert(blocker, list);
                    next.push(blocker);
                }
            }
        }
        Vec::new()
    }
}

fn way_back(reached: &BTreeMap<&List, &List>, start: &List, end: &List) -> Vec<List> {
    let mut way = vec![Arc::clone(start)];
    let mut at = end;
    while at != start {
        way.push(Arc::clone(at));
        let Some(from) = reached.get(at) else { break };
        at = from;
    }
    way
}

/// The ranks as which a list counts.
pub(crate) fn weight(ranks: usize) -> usize {
    ranks.max(limits::SET_OF_MEMBERS_RANKS_MIN)
}

/// The failure of calls that wait for each other.
fn disagreement(name: &TensorName, named: &Named, lists: &[List]) -> Failure {
    let mut holders: Vec<(Vec<Rank>, &List)> = Vec::new();
    for list in lists {
        let asked = named.calls.get(list).map(|call| call.asked.iter().copied().collect()).unwrap_or_default();
        holders.push((asked, list));
    }
    holders.sort();
    let text = |list: &List| wording::ranks(list);
    let (first, other) = (&holders[0], &holders[holders.len().min(2) - 1]);
    let all: Vec<String> = holders
        .iter()
        .take(VALUES_MAX)
        .map(|(asked, list)| format!("{}: {}", wording::ranks(asked), text(list)))
        .collect();
    let more = if holders.len() > VALUES_MAX { "; and others" } else { "" };
    let reason = format!(
        "Mismatched process sets: One rank asked for {}, but another rank for {}. ({}{more}.) They asked by the name \
         {name}: make all ranks of a set ask for the same ranks, or give another set another name.",
        text(first.1),
        text(other.1),
        all.join("; ")
    );
    let failure = Failure::new(Cause::Mismatch, reason).with_tensor(name.clone());
    match other.0.first() {
        Some(culprit) => failure.with_rank(*culprit),
        None => failure,
    }
}

/// The failure of a call that needs ranks that have joined.
fn joined_failure(name: &TensorName, absent: &[Rank]) -> Failure {
    let who = wording::ranks(absent);
    let reason = format!(
        "Add_process_set is not supported with Join: {who} joined, so wait for the join first. It was asked for as {name}."
    );
    let failure = Failure::new(Cause::Mismatch, reason).with_tensor(name.clone());
    match absent.first() {
        Some(culprit) => failure.with_rank(*culprit),
        None => failure,
    }
}

/// The most lists that a failure names.
const VALUES_MAX: usize = 8;

#[cfg(test)]
mod tests;
