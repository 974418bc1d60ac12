//! The coordinator's table: who has announced which name of which set.
//!
//! A name is used again and again, and ranks run ahead of each other when it fails: a rank whose request was rejected may
//! ask again by the same name while others have yet to ask for the first time. So a name has *rounds*: a rank's k-th
//! announcement belongs to round k. All rounds but the last are poisoned; a poisoned round is kept until every rank has
//! announced or voided it, so that nobody's late announcement is taken for a later round.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ronde_wire::{Failure, Rank, Request, SetId, TensorName, limits};

use super::context::SetView;
use crate::event::Time;

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Negotiation {
    names: BTreeMap<(SetId, TensorName), VecDeque<Round>>,
    poisoned: usize,
    /// Requests of each rank in open rounds.
    open: BTreeMap<Rank, usize>,
}

#[derive(Debug)]
struct Round {
    since: Time,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Requests are collected.
    Open(BTreeMap<Rank, Request>),
    /// It has failed everywhere; these ranks have taken part.
    Poisoned(BTreeSet<Rank>),
}

/// What an announcement leads to.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Nothing yet.
    Wait,
    /// All ranks of the set have announced: their requests.
    Ready(BTreeMap<Rank, Request>),
    /// The round is poisoned now: one rejection goes to every member sidecar, whose ranks it concerns whether they have
    /// announced or will.
    Poisoned(Failure),
    /// The announcement contradicts the sender's earlier ones, or is one too many.
    Contradiction,
    /// More than [`POISONED_MAX`] poisoned rounds wait for ranks.
    Overflow,
}

/// What a void is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Void {
    /// A submission that was refused: the rank's part in its next round.
    Refused,
    /// A request announced before. When it is ordered or rejected already, the void comes too late and means nothing.
    Withdrawn,
}

/// Poisoned rounds of all names that may wait for ranks at once.
pub(crate) const POISONED_MAX: usize = limits::PENDING_PER_SESSION_MAX;

impl Negotiation {
    /// A rank of the set is ready for a request.
    pub(crate) fn ready(&mut self, now: Time, view: &SetView, rank: Rank, request: Request) -> Outcome {
        let key = (request.set, request.name.clone());
        let rounds = self.names.entry(key.clone()).or_default();
        let round = match next_round(rounds, rank) {
            Some(round) => round,
            None if rounds.back().is_some_and(Round::is_open) => return Outcome::Contradiction,
            None => {
                rounds.push_back(Round { since: now, state: State::Open(BTreeMap::new()) });
                rounds.len() - 1
            }
        };
        match &mut rounds[round].state {
            State::Poisoned(_) => {
                self.take_part(&key, round, view, rank);
                Outcome::Wait
            }
            State::Open(requests) => {
                let open = self.open.entry(rank).or_default();
                if *open >= limits::PENDING_PER_SESSION_MAX {
                    return Outcome::Contradiction;
                }
                *open += 1;
                requests.insert(rank, request);
                if requests.len() < view.ranks.len() {
                    return Outcome::Wait;
                }
                let requests = std::mem::take(requests);
                close(&mut self.open, requests.keys());
                self.remove(&key, round);
                Outcome::Ready(requests)
            }
        }
    }

    /// A rank's request was refused or withdrawn.
    pub(crate) fn void(
        &mut self,
        now: Time,
        view: &SetView,
        (rank, name): (Rank, TensorName),
        (void, failure): (Void, Failure),
    ) -> Outcome {
        let key = (view.topology.set, name);
        let rounds = self.names.entry(key.clone()).or_default();
        let announced = rounds.back().is_some_and(|round| round.is_open() && round.has(rank));
        let round = next_round(rounds, rank);
        let (round, poisons) = match (void, announced, round) {
            (_, true, _) => (rounds.len() - 1, true),
            (Void::Withdrawn, false, _) => {
                self.drop_empty(&key);
                return Outcome::Wait;
            }
            (Void::Refused, false, Some(round)) => (round, rounds[round].is_open()),
            (Void::Refused, false, None) => {
                rounds.push_back(Round { since: now, state: State::Open(BTreeMap::new()) });
                (rounds.len() - 1, true)
            }
        };
        if poisons {
            if self.poisoned >= POISONED_MAX {
                return Outcome::Overflow;
            }
            let ranks = rounds[round].poison();
            close(&mut self.open, ranks.iter());
            self.poisoned += 1;
        }
        self.take_part(&key, round, view, rank);
        if poisons { Outcome::Poisoned(failure) } else { Outcome::Wait }
    }

    /// Forgets everything: the epoch is over.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// How many names wait for ranks.
    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    /// Names that wait for ranks, with one of their requests, the time of the first announcement and the ranks that have
    /// announced.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Waiting<'_>> {
        self.names.values().filter_map(|rounds| match rounds.back() {
            Some(Round { since, state: State::Open(requests) }) => {
                requests.values().next().map(|request| Waiting { request, since: *since, announced: requests })
            }
            _ => None,
        })
    }

    fn take_part(&mut self, key: &(SetId, TensorName), round: usize, view: &SetView, rank: Rank) {
        let Some(State::Poisoned(ranks)) =
            self.names.get_mut(key).and_then(|rounds| rounds.get_mut(round)).map(|round| &mut round.state)
        else {
            return;
        };
        ranks.insert(rank);
        if ranks.len() == view.ranks.len() {
            self.poisoned -= 1;
            self.remove(key, round);
        }
    }

    fn remove(&mut self, key: &(SetId, TensorName), round: usize) {
        if let Some(rounds) = self.names.get_mut(key) {
            rounds.remove(round);
        }
        self.drop_empty(key);
    }

    fn drop_empty(&mut self, key: &(SetId, TensorName)) {
        if self.names.get(key).is_some_and(VecDeque::is_empty) {
            self.names.remove(key);
        }
    }
}

/// The first round that a rank has yet to take part in. A rank takes part in one after the other, so those that have it come
/// first: a rank that runs far ahead with refusals costs the logarithm of their number each, not the number.
fn next_round(rounds: &VecDeque<Round>, rank: Rank) -> Option<usize> {
    let next = rounds.partition_point(|round| round.has(rank));
    (next < rounds.len()).then_some(next)
}

/// A name that waits for ranks.
#[derive(Debug)]
pub(crate) struct Waiting<'a> {
    pub(crate) request: &'a Request,
    pub(crate) since: Time,
    announced: &'a BTreeMap<Rank, Request>,
}

impl Waiting<'_> {
    /// Who is missing, ascending.
    pub(crate) fn missing(&self, view: &SetView) -> Vec<Rank> {
        view.ranks.iter().copied().filter(|rank| !self.announced.contains_key(rank)).collect()
    }
}

impl Round {
    fn is_open(&self) -> bool {
        matches!(self.state, State::Open(_))
    }

    fn has(&self, rank: Rank) -> bool {
        match &self.state {
            State::Open(requests) => requests.contains_key(&rank),
            State::Poisoned(ranks) => ranks.contains(&rank),
        }
    }

    /// The ranks whose requests were open.
    fn poison(&mut self) -> BTreeSet<Rank> {
        let State::Open(requests) = &self.state else { return BTreeSet::new() };
        let ranks: BTreeSet<Rank> = requests.keys().copied().collect();
        self.state = State::Poisoned(ranks.clone());
        ranks
    }
}

fn close<'a>(open: &mut BTreeMap<Rank, usize>, ranks: impl Iterator<Item = &'a Rank>) {
    for rank in ranks {
        if let Some(count) = open.get_mut(rank) {
            *count -= 1;
        }
    }
}
