//! The coordinator's table of requests for process sets that their members form by themselves, as MPI does with
//! `MPI_Comm_create_group`.
//!
//! A *call* is a name with a list of ranks and a number: the n-th request of each rank of the list, by that name and for
//! that list, belongs to the n-th call. It is complete when all ranks of the list have asked. Calls of one name with other
//! lists are other calls, so disjoint sets may have one name. A rank has at most one request pending by a name. So calls
//! of one name can wait for each other: a rank that one of them needs has asked for the next one. None of them can
//! complete then, and all of them fail.
//!
//! A call that failed is kept until its other ranks have asked for it: their requests fail, too. So no rank waits for one
//! that has asked for the list as often as itself.
//!
//! A rank that has joined asks for nothing, so a call that needs it fails; it has no part in that call.

use std::collections::{BTreeMap, BTreeSet};
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
    failed: Kept,
}

/// Ascending ranks of a set.
type List = Arc<[Rank]>;

/// The calls of one name.
#[derive(Debug, Default)]
struct Named {
    lists: BTreeMap<List, Calls>,
    /// The list for which each rank waits.
    asked: BTreeMap<Rank, List>,
}

/// The calls of one name with one list: failed ones, and the next one if a rank waits for it.
#[derive(Debug, Default)]
struct Calls {
    waiting: Option<Call>,
    /// Failed calls for which ranks have yet to ask, by number.
    failed: BTreeMap<u64, Failed>,
    /// The ranks that have yet to ask for failed calls, with the numbers of these. A request finds its call here, it
    /// does not scan all of them.
    awaited: BTreeSet<(Rank, u64)>,
    /// The number of the next call that fails.
    next: u64,
}

/// A call that is not complete.
#[derive(Debug)]
struct Call {
    since: Time,
    asked: BTreeSet<Rank>,
}

/// A call that failed, with the number of ranks that have yet to ask for it.
#[derive(Debug)]
struct Failed {
    failure: Failure,
    awaited: usize,
}

/// The ranks in the lists of failed calls that are kept, counted by [`weight`].
#[derive(Debug, Default)]
struct Kept {
    total: usize,
    /// By the rank that the failure names.
    by_cause: BTreeMap<Option<Rank>, usize>,
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
        if self.waits(name, rank) {
            return Err(format!("announces {name} twice for {rank}"));
        }
        if let Some(failure) = self.take_part(name, rank, ranks) {
            return Ok(Asked::Failed(Ended { ranks: vec![rank], failure }));
        }
        let pending = self.pending.entry(rank).or_default();
        if *pending + weight(ranks.len()) > limits::SETS_OF_MEMBERS_PENDING_MAX {
            return Err(format!("announces more requests of {rank} for process sets than one may have pending"));
        }
        *pending += weight(ranks.len());
        let named = self.names.entry(name.clone()).or_default();
        let list = named.intern(ranks);
        let call = named.ask(now, rank, &list);
        if call.asked.len() == list.len() {
            let since = call.since;
            self.close(name, &list);
            return Ok(Asked::Complete(since));
        }
        let lacks = |of: &&Rank| joined.contains(of) && !call.asked.contains(of);
        let absent: Vec<Rank> =
            if joined.is_empty() { Vec::new() } else { list.iter().filter(lacks).copied().collect() };
        let blocked = named.cycle(&list);
        if !blocked.is_empty() {
            let failure = disagreement(name, named, &blocked);
            return Ok(Asked::Failed(self.fail(name, &blocked, joined, failure)));
        }
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

    /// Handles a request that the rank's sidecar refused, which is its part in a call. `ranks` are the ascending ranks of
    /// the set.
    ///
    /// # Errors
    /// How it breaks the protocol.
    pub(crate) fn refuse(
        &mut self,
        name: &TensorName,
        rank: Rank,
        ranks: &[Rank],
        joined: &BTreeSet<Rank>,
        failure: Failure,
    ) -> Result<Option<Ended>, Violation> {
        if self.waits(name, rank) {
            return Err(format!("voids {name} for {rank}, of which a request by this name waits"));
        }
        if self.take_part(name, rank, ranks).is_some() {
            return Ok(None);
        }
        let list = self.names.entry(name.clone()).or_default().intern(ranks);
        let asked = self.fail_one(name, &list, Some(rank), joined, &failure);
        Ok((!asked.is_empty()).then(|| Ended { ranks: asked.into_iter().collect(), failure }))
    }

    /// A rank joins: the calls that need it fail. `joined` has it already.
    pub(crate) fn join(&mut self, rank: Rank, joined: &BTreeSet<Rank>) -> Vec<(TensorName, Ended)> {
        let lacks = |calls: &Calls| calls.waiting.as_ref().is_some_and(|call| !call.asked.contains(&rank));
        let needs = |(list, calls): &(&List, &Calls)| list.binary_search(&rank).is_ok() && lacks(calls);
        let of_name = |(name, named): (&TensorName, &Named)| {
            let lists: Vec<List> = named.lists.iter().filter(needs).map(|(list, _)| Arc::clone(list)).collect();
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
            named.lists.retain(|_, calls| {
                calls.failed.clear();
                calls.awaited.clear();
                !calls.is_empty()
            });
            !named.lists.is_empty()
        });
        self.failed = Kept::default();
    }

    /// The rank that most failed calls name, with the ranks in their lists, if that or the total is over a limit.
    pub(crate) fn overflow(&self) -> Option<(Option<Rank>, usize)> {
        self.failed.overflow()
    }

    /// The number of calls that wait for ranks.
    pub(crate) fn len(&self) -> usize {
        self.waiting_calls().count()
    }

    /// The calls that wait for ranks.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = WaitingSet<'_>> {
        self.waiting_calls().map(|(name, list, call)| WaitingSet {
            name,
            since: call.since,
            missing: list.iter().copied().filter(|rank| !call.asked.contains(rank)).collect(),
        })
    }

    fn waiting_calls(&self) -> impl Iterator<Item = (&TensorName, &List, &Call)> {
        let lists = self.names.iter().flat_map(|(name, named)| named.lists.iter().map(move |of_list| (name, of_list)));
        lists.filter_map(|(name, (list, calls))| Some((name, list, calls.waiting.as_ref()?)))
    }

    /// Whether a request of the rank by this name waits.
    fn waits(&self, name: &TensorName, rank: Rank) -> bool {
        self.names.get(name).is_some_and(|named| named.asked.contains_key(&rank))
    }

    /// The rank's part in a call of this name and list that has failed.
    fn take_part(&mut self, name: &TensorName, rank: Rank, ranks: &[Rank]) -> Option<Failure> {
        let calls = self.names.get_mut(name)?.lists.get_mut(ranks)?;
        let part = *calls.awaited.range((rank, 0)..=(rank, u64::MAX)).next()?;
        calls.awaited.remove(&part);
        let (_, number) = part;
        let failed = calls.failed.get_mut(&number)?;
        failed.awaited -= 1;
        if failed.awaited > 0 {
            return Some(failed.failure.clone());
        }
        let failure = calls.failed.remove(&number)?.failure;
        self.failed.remove(failure.rank, weight(ranks.len()));
        self.drop_empty(name, ranks);
        Some(failure)
    }

    /// Ends calls that wait with a failure.
    fn fail(&mut self, name: &TensorName, lists: &[List], joined: &BTreeSet<Rank>, failure: Failure) -> Ended {
        let mut asked = BTreeSet::new();
        for list in lists {
            asked.extend(self.fail_one(name, list, None, joined, &failure));
        }
        Ended { ranks: asked.into_iter().collect(), failure }
    }

    /// Ends the next call of a list with a failure. `refused` has its part in it, though it does not wait. Returns the
    /// ranks that waited.
    fn fail_one(
        &mut self,
        name: &TensorName,
        list: &List,
        refused: Option<Rank>,
        joined: &BTreeSet<Rank>,
        failure: &Failure,
    ) -> BTreeSet<Rank> {
        let asked = self.take_waiting(name, list);
        let other = |rank: &Rank| !asked.contains(rank) && Some(*rank) != refused && !joined.contains(rank);
        let awaited: Vec<Rank> = list.iter().copied().filter(other).collect();
        if let Some(calls) = self.names.get_mut(name).and_then(|named| named.lists.get_mut(list))
            && !awaited.is_empty()
        {
            calls.awaited.extend(awaited.iter().map(|rank| (*rank, calls.next)));
            calls.failed.insert(calls.next, Failed { failure: failure.clone(), awaited: awaited.len() });
            calls.next += 1;
            self.failed.add(failure.rank, weight(list.len()));
        }
        self.drop_empty(name, list);
        asked
    }

    /// Removes the call of a list that waits.
    fn close(&mut self, name: &TensorName, list: &List) {
        self.take_waiting(name, list);
        self.drop_empty(name, list);
    }

    /// Takes the call of a list that waits. Returns the ranks that have asked for it.
    fn take_waiting(&mut self, name: &TensorName, list: &List) -> BTreeSet<Rank> {
        let Some(named) = self.names.get_mut(name) else { return BTreeSet::new() };
        let waiting = named.lists.get_mut(list).and_then(|calls| calls.waiting.take());
        let asked = waiting.map(|call| call.asked).unwrap_or_default();
        for rank in &asked {
            named.asked.remove(rank);
            if let Some(pending) = self.pending.get_mut(rank) {
                *pending -= weight(list.len());
            }
        }
        asked
    }

    /// Forgets a list, and a name, without calls.
    fn drop_empty(&mut self, name: &TensorName, list: &[Rank]) {
        let Some(named) = self.names.get_mut(name) else { return };
        if named.lists.get(list).is_some_and(Calls::is_empty) {
            named.lists.remove(list);
        }
        if named.lists.is_empty() {
            self.names.remove(name);
        }
    }
}

impl Kept {
    fn add(&mut self, cause: Option<Rank>, ranks: usize) {
        self.total += ranks;
        *self.by_cause.entry(cause).or_default() += ranks;
    }

    fn remove(&mut self, cause: Option<Rank>, ranks: usize) {
        self.total -= ranks;
        if let Some(of_cause) = self.by_cause.get_mut(&cause) {
            *of_cause -= ranks;
            if *of_cause == 0 {
                self.by_cause.remove(&cause);
            }
        }
    }

    fn overflow(&self) -> Option<(Option<Rank>, usize)> {
        // No rank can be over its limit otherwise.
        if self.total <= limits::SETS_OF_MEMBERS_FAILED_OF_RANK_MAX {
            return None;
        }
        let (cause, most) = self.by_cause.iter().max_by_key(|(_, ranks)| **ranks)?;
        let over =
            *most > limits::SETS_OF_MEMBERS_FAILED_OF_RANK_MAX || self.total > limits::SETS_OF_MEMBERS_FAILED_MAX;
        over.then_some((*cause, *most))
    }
}

impl Calls {
    fn is_empty(&self) -> bool {
        self.waiting.is_none() && self.failed.is_empty()
    }
}

impl Named {
    /// The list with these ranks: one for all calls, so that lists are compared by address.
    fn intern(&mut self, ranks: &[Rank]) -> List {
        if let Some((list, _)) = self.lists.get_key_value(ranks) {
            return Arc::clone(list);
        }
        let list: List = ranks.into();
        self.lists.insert(Arc::clone(&list), Calls::default());
        list
    }

    /// Adds a request to the next call of a list.
    fn ask(&mut self, now: Time, rank: Rank, list: &List) -> &Call {
        self.asked.insert(rank, Arc::clone(list));
        let calls = self.lists.entry(Arc::clone(list)).or_default();
        let call = calls.waiting.get_or_insert_with(|| Call { since: now, asked: BTreeSet::new() });
        call.asked.insert(rank);
        call
    }

    /// The lists of the calls that a call waits for: ranks of it have asked for them by the same name.
    fn blockers<'a>(&'a self, list: &'a List) -> impl Iterator<Item = &'a List> {
        // Few have asked for one of many long lists, or many for a short one.
        let few = self.asked.len() < list.len();
        let of_asked = few.then(|| self.asked.iter().filter(|(rank, _)| list.binary_search(rank).is_ok()));
        let of_list = (!few).then(|| list.iter().filter_map(|rank| self.asked.get(rank)));
        let all = of_asked.into_iter().flatten().map(|(_, other)| other).chain(of_list.into_iter().flatten());
        all.filter(move |other| !Arc::ptr_eq(other, list))
    }

    /// The lists of the calls on a way from one that leads back to it, itself first; none when there is no such way.
    fn cycle(&self, start: &List) -> Vec<List> {
        if self.lists.len() < 2 {
            return Vec::new();
        }
        // Each list that was reached, by address, with the one from which it was.
        let mut reached: BTreeMap<*const Rank, &List> = BTreeMap::new();
        let mut next = vec![start];
        while let Some(list) = next.pop() {
            for blocker in self.blockers(list) {
                if Arc::ptr_eq(blocker, start) {
                    return way_back(&reached, start, list);
                }
                reached.entry(blocker.as_ptr()).or_insert_with(|| {
                    next.push(blocker);
                    list
                });
            }
        }
        Vec::new()
    }
}

fn way_back(reached: &BTreeMap<*const Rank, &List>, start: &List, end: &List) -> Vec<List> {
    let mut way = vec![Arc::clone(start)];
    let mut at = end;
    while !Arc::ptr_eq(at, start) {
        way.push(Arc::clone(at));
        let Some(from) = reached.get(&at.as_ptr()) else { break };
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
        let call = named.lists.get(list).and_then(|calls| calls.waiting.as_ref());
        holders.push((call.map(|call| call.asked.iter().copied().collect()).unwrap_or_default(), list));
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
