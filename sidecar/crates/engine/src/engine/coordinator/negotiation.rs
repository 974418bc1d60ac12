//! The coordinator's table of names and the ranks that have announced them.
//!
//! A name is used repeatedly, and ranks run ahead of each other when it fails: a rank whose request was rejected may
//! submit the same name again while others have not submitted it once. So a name has *rounds*: a rank's k-th
//! announcement belongs to round k. All rounds but the last are poisoned. A poisoned round is kept until every rank has
//! announced or voided it, so that a late announcement is not counted for a later round.
//!
//! A rank that has joined in a set takes no part in rounds of that set: an open round is complete without it, and in a
//! round that is poisoned meanwhile it is *excused*, which is reported to its sidecar. When all ranks of the set have
//! joined, all its rounds are reset.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use ronde_wire::{Collective, Group, Pair, Rank, Request, SetId, TensorName, limits};

use crate::engine::shared::sets::SetView;
use crate::engine::shared::{POISONED_MAX, RankContributions, RankRequests, Submission, TensorKey};
use crate::event::Time;

/// The names that wait for ranks.
#[derive(Debug, Default)]
pub(crate) struct Negotiation {
    names: BTreeMap<TensorKey, Name>,
    poisoned: usize,
    /// The number of requests of each rank in open rounds.
    open: BTreeMap<Rank, usize>,
    /// The number of rounds so far.
    turns: u64,
}

/// A name with its participants.
#[derive(Debug)]
struct Name {
    view: Arc<SetView>,
    rounds: VecDeque<Round>,
    /// Whether a rank was excused from a round, so that the rounds in which a rank took part may have gaps.
    has_gaps: bool,
}

#[derive(Debug)]
struct Round {
    since: Time,
    /// Its position among the rounds of all names, in the order of their begin.
    turn: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Requests are collected, with their contributions.
    Open(RankRequests, RankContributions),
    /// It has failed everywhere; these ranks have taken part.
    Poisoned {
        ranks: BTreeSet<Rank>,
        /// Whether its group was updated.
        grouped: bool,
    },
}

/// The effect of an announcement.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Announced {
    /// It is part of an open round, which may be [complete](Negotiation::take_complete) now.
    Open,
    /// The round has failed already. The group, when it has yet to be updated.
    Poisoned(Option<Group>),
    /// It contradicts earlier announcements of the rank, or exceeds a limit.
    Contradiction,
}

/// The effect of a void.
#[derive(Debug)]
pub(crate) enum Voided {
    /// Nothing.
    Late,
    /// The round has failed already. The group, when it has yet to be updated.
    Poisoned(Option<Group>),
    /// The round is poisoned now: every member sidecar gets one rejection, for its ranks that have announced or will.
    Now {
        /// The requests that were open.
        requests: RankRequests,
        /// Ranks that take no part in the round.
        excused: Vec<Rank>,
        /// Its group, if it is known.
        group: Option<Group>,
    },
    /// More than [`POISONED_MAX`] poisoned rounds wait for ranks.
    Overflow,
}

/// The end of a rank's part in a name without an operation.
#[derive(Debug)]
pub(crate) struct Void {
    pub(crate) rank: Rank,
    pub(crate) cause: VoidCause,
    /// The request's group, where it is known.
    pub(crate) group: Option<Group>,
}

/// Why a rank's part is void.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VoidCause {
    /// A refused submission, which is the rank's part in its next round.
    Refused,
    /// The withdrawal of an announced request. It has no effect when the request is already ordered or rejected, nor on
    /// a join: other ranks may have proceeded without the rank.
    Withdrawn,
}

/// A round that all ranks have announced except excused ones.
#[derive(Debug)]
pub(crate) struct Complete {
    pub(crate) view: Arc<SetView>,
    pub(crate) requests: RankRequests,
    /// The contributions of eager requests.
    pub(crate) contributions: RankContributions,
    /// Joined ranks without a request, ascending.
    pub(crate) excused: Vec<Rank>,
    /// When the first rank announced it.
    pub(crate) since: Time,
}

impl Negotiation {
    /// Adds the announcement of a rank of the view.
    pub(crate) fn announce(
        &mut self,
        now: Time,
        view: &Arc<SetView>,
        rank: Rank,
        Submission { what: request, contribution }: Submission,
    ) -> Announced {
        let key = TensorKey::of(&request);
        let turn = self.next_turn();
        let name = self.name(&key, view);
        let round = name.next_round(rank);
        let rounds = &mut name.rounds;
        let round = match round {
            Some(round) => round,
            None if rounds.back().is_some_and(Round::is_open) => return Announced::Contradiction,
            None => {
                rounds.push_back(Round::new(now, turn));
                rounds.len() - 1
            }
        };
        let open = self.open.entry(rank).or_default();
        match self.names.get_mut(&key).map(|name| &mut name.rounds[round].state) {
            Some(State::Open(..)) if *open >= limits::PENDING_PER_SESSION_MAX => Announced::Contradiction,
            Some(State::Open(requests, contributions)) => {
                *open += 1;
                requests.insert(rank, request);
                if !contribution.is_empty() {
                    contributions.insert(rank, contribution);
                }
                Announced::Open
            }
            _ => Announced::Poisoned(self.take_part(&key, round, [rank], request.group)),
        }
    }

    /// Removes the open round of a name when all ranks that have not joined in its set have announced it.
    pub(crate) fn take_complete(&mut self, key: &TensorKey, joined: &BTreeSet<Rank>) -> Option<Complete> {
        let name = self.names.get_mut(key)?;
        let view = Arc::clone(&name.view);
        let Some(Round { state: State::Open(requests, contributions), since, .. }) = name.rounds.back_mut() else {
            return None;
        };
        let excused = excused(&view, joined, |rank| requests.contains_key(&rank));
        if requests.len() + excused.len() < view.ranks.len() {
            return None;
        }
        let (requests, contributions, since) = (std::mem::take(requests), std::mem::take(contributions), *since);
        name.rounds.pop_back();
        close(&mut self.open, requests.keys());
        self.drop_empty(key);
        Some(Complete { view, requests, contributions, excused, since })
    }

    /// Handles the refusal or withdrawal of a request; its rank belongs to the view.
    pub(crate) fn void(
        &mut self,
        now: Time,
        view: &Arc<SetView>,
        key: &TensorKey,
        Void { rank, cause, group }: Void,
        joined: &BTreeSet<Rank>,
    ) -> Voided {
        let turn = self.next_turn();
        let name = self.name(key, view);
        let round = name.next_round(rank);
        let rounds = &mut name.rounds;
        let announced = rounds.back().is_some_and(|round| round.is_open() && round.has(rank));
        let joins = announced && rounds.back().is_some_and(|round| round.has_joined(rank));
        let (round, poisons) = match (cause, announced, round) {
            (VoidCause::Withdrawn, true, _) if joins => return Voided::Late,
            (_, true, _) => (rounds.len() - 1, true),
            (VoidCause::Withdrawn, false, _) => {
                self.drop_empty(key);
                return Voided::Late;
            }
            (VoidCause::Refused, false, Some(round)) => (round, rounds[round].is_open()),
            (VoidCause::Refused, false, None) => {
                rounds.push_back(Round::new(now, turn));
                (rounds.len() - 1, true)
            }
        };
        if !poisons {
            return Voided::Poisoned(self.take_part(key, round, [rank], group));
        }
        if self.poisoned >= POISONED_MAX {
            return Voided::Overflow;
        }
        self.poisoned += 1;
        let requests = self.name(key, view).rounds[round].poison();
        close(&mut self.open, requests.keys());
        let excused = excused(view, joined, |other| other == rank || requests.contains_key(&other));
        self.name(key, view).has_gaps |= !excused.is_empty();
        let group = group.or_else(|| requests.values().find_map(|request| request.group.clone()));
        let taking_part = std::iter::once(rank).chain(excused.iter().copied());
        let group = self.take_part(key, round, taking_part, group);
        Voided::Now { requests, excused, group }
    }

    /// Removes the names of a set: it is removed, or all its ranks have joined.
    pub(crate) fn remove_set(&mut self, set: SetId) {
        for key in self.names_of(set) {
            for round in self.names.remove(&key).into_iter().flat_map(|name| name.rounds) {
                match round.state {
                    State::Open(requests, _) => close(&mut self.open, requests.keys()),
                    State::Poisoned { .. } => self.poisoned -= 1,
                }
            }
        }
    }

    /// The names of a set that wait for ranks.
    pub(crate) fn names_of(&self, set: SetId) -> Vec<TensorKey> {
        // Names are ordered by set.
        let from_set = self.names.keys().skip_while(|key| key.set < set);
        from_set.take_while(|key| key.set == set).cloned().collect()
    }

    /// The first message of a pair with a tag that no receive takes, with its position among the messages of all pairs.
    /// It may have failed already.
    pub(crate) fn first_message(&self, set: SetId, pair: Pair, tag: u32) -> Option<(u64, TensorName)> {
        // The name with the least number comes first.
        let of_pair = self.names.range(TensorKey { set, name: pair.message_name(tag, 0) }..);
        let of_pair = of_pair.take_while(|(key, _)| key.set == set && Pair::of_message(&key.name) == Some((pair, tag)));
        let sent = of_pair.filter_map(|(TensorKey { name, .. }, known)| {
            let round = known.rounds.iter().find(|round| round.has(pair.from) && !round.has(pair.to))?;
            Some((Pair::message_count(name)?, round.turn, name))
        });
        sent.min().map(|(_, turn, name)| (turn, name.clone()))
    }

    /// Whether there is a poisoned round.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.poisoned > 0
    }

    /// Removes all names: their requests will be announced again.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The number of names that wait for ranks.
    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    /// Names that wait for ranks.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Waiting<'_>> {
        self.names.values().filter_map(|name| match name.rounds.back() {
            Some(Round { since, state: State::Open(requests, _), .. }) => {
                let request = requests.values().next()?;
                Some(Waiting { request, since: *since, announced: requests, view: &name.view })
            }
            _ => None,
        })
    }

    fn next_turn(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }

    fn name(&mut self, key: &TensorKey, view: &Arc<SetView>) -> &mut Name {
        let new = || Name { view: Arc::clone(view), rounds: VecDeque::new(), has_gaps: false };
        self.names.entry(key.clone()).or_insert_with(new)
    }

    /// Records that ranks take part in a poisoned round. Returns its group the first time that it is known.
    fn take_part(
        &mut self,
        key: &TensorKey,
        round: usize,
        who: impl IntoIterator<Item = Rank>,
        group: Option<Group>,
    ) -> Option<Group> {
        let name = self.names.get_mut(key)?;
        let Some(State::Poisoned { ranks, grouped }) = name.rounds.get_mut(round).map(|round| &mut round.state) else {
            return None;
        };
        ranks.extend(who);
        let new = group.filter(|_| !*grouped);
        *grouped |= new.is_some();
        if ranks.len() == name.view.ranks.len() {
            self.poisoned -= 1;
            name.rounds.remove(round);
            self.drop_empty(key);
        }
        new
    }

    fn drop_empty(&mut self, key: &TensorKey) {
        if self.names.get(key).is_some_and(|name| name.rounds.is_empty()) {
            self.names.remove(key);
        }
    }
}

/// Joined ranks of the view that take no part, ascending. `joined` are those of the set.
fn excused(view: &SetView, joined: &BTreeSet<Rank>, takes_part: impl Fn(Rank) -> bool) -> Vec<Rank> {
    joined.iter().copied().filter(|rank| view.contains(*rank) && !takes_part(*rank)).collect()
}

impl Name {
    /// The first round in which a rank has no part yet. A rank takes part in one round after the other, so a binary
    /// search finds it: many refusals of a rank that runs ahead cost the logarithm of their number each.
    fn next_round(&self, rank: Rank) -> Option<usize> {
        if self.has_gaps {
            return self.rounds.iter().position(|round| !round.has(rank));
        }
        let next = self.rounds.partition_point(|round| round.has(rank));
        (next < self.rounds.len()).then_some(next)
    }
}

/// A name that waits for ranks.
#[derive(Debug)]
pub(crate) struct Waiting<'a> {
    /// One of its requests.
    pub(crate) request: &'a Request,
    /// When the first rank announced it.
    pub(crate) since: Time,
    announced: &'a RankRequests,
    view: &'a SetView,
}

impl Waiting<'_> {
    /// The missing ranks that have not joined, ascending. `joined` are those of the set of the request.
    pub(crate) fn missing(&self, joined: &BTreeSet<Rank>) -> Vec<Rank> {
        let missing = |rank: &Rank| !self.announced.contains_key(rank) && !joined.contains(rank);
        self.view.ranks.iter().copied().filter(missing).collect()
    }
}

impl Round {
    fn new(since: Time, turn: u64) -> Self {
        Self { since, turn, state: State::Open(RankRequests::new(), RankContributions::new()) }
    }

    fn is_open(&self) -> bool {
        matches!(self.state, State::Open(..))
    }

    fn has(&self, rank: Rank) -> bool {
        match &self.state {
            State::Open(requests, _) => requests.contains_key(&rank),
            State::Poisoned { ranks, .. } => ranks.contains(&rank),
        }
    }

    fn has_joined(&self, rank: Rank) -> bool {
        let State::Open(requests, _) = &self.state else { return false };
        requests.get(&rank).is_some_and(|request| request.collective == Collective::Join)
    }

    /// The requests that were open.
    fn poison(&mut self) -> RankRequests {
        let State::Open(requests, _) = &mut self.state else { return RankRequests::new() };
        let requests = std::mem::take(requests);
        self.state = State::Poisoned { ranks: requests.keys().copied().collect(), grouped: false };
        requests
    }
}

fn close<'a>(open: &mut BTreeMap<Rank, usize>, ranks: impl Iterator<Item = &'a Rank>) {
    for rank in ranks {
        if let Some(count) = open.get_mut(rank) {
            *count -= 1;
        }
    }
}
