//! The coordinator's table: who has announced which name of which set.
//!
//! A name is used again and again, and ranks run ahead of each other when it fails: a rank whose request was rejected may
//! ask again by the same name while others have yet to ask for the first time. So a name has *rounds*: a rank's k-th
//! announcement belongs to round k. All rounds but the last are poisoned; a poisoned round is kept until every rank has
//! announced or voided it, so that nobody's late announcement is taken for a later round.
//!
//! A rank that has joined takes no part in rounds of the set of all ranks: an open round is complete without it, and in one
//! that is poisoned meanwhile it is *excused*, which its sidecar is told. When all ranks have joined every name begins anew.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use ronde_wire::{Collective, Group, Pair, Rank, Request, SetId, TensorName, limits};

use crate::engine::shared::sets::SetView;
use crate::engine::shared::{POISONED_MAX, RankContributions, RankRequests, Submission, TensorKey};
use crate::event::Time;

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Negotiation {
    names: BTreeMap<TensorKey, Name>,
    poisoned: usize,
    /// RankRequests of each rank in open rounds.
    open: BTreeMap<Rank, usize>,
    /// Counts the rounds that began.
    turns: u64,
}

/// A name with those who agree about it.
#[derive(Debug)]
struct Name {
    view: Arc<SetView>,
    rounds: VecDeque<Round>,
    /// Whether somebody was excused from a round, so that the rounds that a rank has taken part in may have gaps.
    has_gaps: bool,
}

#[derive(Debug)]
struct Round {
    since: Time,
    /// Its place among the rounds of all names, in the order in which they began.
    turn: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// RankRequests are collected, with the contributions that came along.
    Open(RankRequests, RankContributions),
    /// It has failed everywhere; these ranks have taken part.
    Poisoned {
        ranks: BTreeSet<Rank>,
        /// Whether its group knows of it.
        grouped: bool,
    },
}

/// What an announcement leads to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Announced {
    /// It stands in an open round, which may be [complete](Negotiation::take_complete) now.
    Open,
    /// The round has failed already; the rank is told. The group, when it has yet to hear of that.
    Poisoned(Option<Group>),
    /// It contradicts the sender's earlier ones, or is one too many.
    Contradiction,
}

/// What a void leads to.
#[derive(Debug)]
pub(crate) enum Voided {
    /// Nothing.
    Late,
    /// The round has failed already. The group, when it has yet to hear of that.
    Poisoned(Option<Group>),
    /// The round is poisoned now: one rejection goes to every member sidecar, whose ranks it concerns whether they have
    /// announced or will.
    Now {
        /// The requests that were open.
        requests: RankRequests,
        /// Ranks that take no part in the round.
        excused: Vec<Rank>,
        /// Its group, as far as it is known.
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
    /// A submission that was refused: the rank's part in its next round.
    Refused,
    /// A request announced before. When it is ordered or rejected already, the void comes too late and means nothing. Nor
    /// does it mean anything for a join: others may have gone on without the rank.
    Withdrawn,
}

/// A round in which everybody has announced who has to.
#[derive(Debug)]
pub(crate) struct Complete {
    pub(crate) view: Arc<SetView>,
    pub(crate) requests: RankRequests,
    /// What came along with them; nothing for a rank whose contribution did not.
    pub(crate) contributions: RankContributions,
    /// Ranks without a request, because they have joined, ascending.
    pub(crate) excused: Vec<Rank>,
    /// When the first rank announced it.
    pub(crate) since: Time,
}

impl Negotiation {
    /// A rank is ready for a request; it belongs to the view.
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

    /// Takes out the open round of a name when all ranks have announced that have not joined.
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

    /// A rank's request was refused or withdrawn; it belongs to the view.
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

    /// Forgets a set: it is gone, or all its ranks have joined.
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
        // Names are in the order of their sets.
        let from_set = self.names.keys().skip_while(|key| key.set < set);
        from_set.take_while(|key| key.set == set).cloned().collect()
    }

    /// Of the messages of a pair with a tag that no receive takes, the first one, with its turn among the messages of all
    /// pairs. It may have failed already.
    pub(crate) fn first_message(&self, set: SetId, pair: Pair, tag: u32) -> Option<(u64, TensorName)> {
        // Names with other numbers follow the one with the least.
        let of_pair = self.names.range(TensorKey { set, name: pair.message_name(tag, 0) }..);
        let of_pair = of_pair.take_while(|(key, _)| key.set == set && Pair::of_message(&key.name) == Some((pair, tag)));
        let sent = of_pair.filter_map(|(TensorKey { name, .. }, known)| {
            let round = known.rounds.iter().find(|round| round.has(pair.from) && !round.has(pair.to))?;
            Some((Pair::message_count(name)?, round.turn, name))
        });
        sent.min().map(|(_, turn, name)| (turn, name.clone()))
    }

    /// Whether a round has failed that ranks have yet to take part in.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.poisoned > 0
    }

    /// Forgets all names: what is asked for will be announced again.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// How many names wait for ranks.
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

    /// Ranks take part in a poisoned round. Returns its group when that is said for the first time.
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

/// Ranks of the view that have joined and take no part, ascending. Joining concerns the set of all ranks only.
fn excused(view: &SetView, joined: &BTreeSet<Rank>, takes_part: impl Fn(Rank) -> bool) -> Vec<Rank> {
    if !view.is_world() {
        return Vec::new();
    }
    joined.iter().copied().filter(|rank| view.contains(*rank) && !takes_part(*rank)).collect()
}

impl Name {
    /// The first round that a rank has yet to take part in. A rank takes part in one after the other, so those that have it
    /// come first: a rank that runs far ahead with refusals costs the logarithm of their number each, not the number.
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
    /// Who is missing and has not joined, ascending.
    pub(crate) fn missing(&self, joined: &BTreeSet<Rank>) -> Vec<Rank> {
        let excused = |rank: &Rank| self.view.is_world() && joined.contains(rank);
        let missing = |rank: &Rank| !self.announced.contains_key(rank) && !excused(rank);
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
