//! The ranks that have joined, by process set. The joins of a set do not affect other sets.

use std::collections::{BTreeMap, BTreeSet};

use ronde_wire::{Collective, Rank, SetId};

use super::agreement::Agreement;
use super::groups::Ready;
use crate::engine::shared::context::Context;
use crate::engine::shared::sets::SetView;
use crate::engine::shared::{RankRequests, TensorKey, wording};

/// The ranks that have joined, of the sets of which some ranks have and others have not.
#[derive(Debug, Default)]
pub(crate) struct Joins {
    sets: BTreeMap<SetId, Joined>,
}

/// The ranks of a set that have joined; at least one.
#[derive(Debug)]
struct Joined {
    ranks: BTreeSet<Rank>,
    last: Rank,
}

impl Joins {
    /// The ranks of a set that have joined.
    pub(crate) fn of(&self, set: SetId) -> &BTreeSet<Rank> {
        self.sets.get(&set).map_or(&NOBODY, |joined| &joined.ranks)
    }

    /// Whether no rank of any set has joined.
    pub(crate) fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    /// The ranks that have joined in any set, ascending.
    pub(crate) fn ranks(&self) -> BTreeSet<Rank> {
        self.sets.values().flat_map(|joined| joined.ranks.iter().copied()).collect()
    }

    fn add(&mut self, set: SetId, rank: Rank) {
        let joined = self.sets.entry(set).or_insert_with(|| Joined { ranks: BTreeSet::new(), last: rank });
        joined.ranks.insert(rank);
        joined.last = rank;
    }

    /// Removes the ranks of a set. Returns them with the last one of them.
    fn take(&mut self, set: SetId) -> Option<(BTreeSet<Rank>, Rank)> {
        self.sets.remove(&set).map(|joined| (joined.ranks, joined.last))
    }

    /// Removes a rank. False when it has not joined.
    fn undo(&mut self, set: SetId, rank: Rank) -> bool {
        let Some(joined) = self.sets.get_mut(&set) else { return false };
        let removed = joined.ranks.remove(&rank);
        if joined.ranks.is_empty() {
            self.sets.remove(&set);
        }
        removed
    }
}

static NOBODY: BTreeSet<Rank> = BTreeSet::new();

impl Agreement {
    /// A rank joins: names of the set that waited only for it are complete now.
    pub(super) fn join(&mut self, cx: &mut Context, rank: Rank, join: &TensorKey) {
        let set = join.set;
        self.joins.add(set, rank);
        if set == SetId::WORLD {
            self.join_fails_sets(cx, rank);
        }
        // The join itself comes last: when it is complete nothing else is pending.
        for key in self.negotiation.names_of(set).into_iter().filter(|key| key != join) {
            self.decide(cx, &key);
        }
        self.match_after_join(cx, set);
    }

    /// All ranks of a set have joined: the rounds of all its names are reset.
    pub(super) fn all_joined(&mut self, cx: &mut Context, view: &SetView, key: &TensorKey) {
        let set = key.set;
        let Some((joined, last)) = self.joins.take(set) else { return };
        for (incomplete, progress) in self.groups.take_joined(set, &joined) {
            let why = format!("{progress}, and all ranks have joined; ask for all tensors of a group before a join");
            self.reject_each(cx, vec![incomplete], &why);
        }
        self.groups.forget_rejected(set);
        self.negotiation.remove_set(set);
        if set == SetId::WORLD {
            self.member_sets.all_joined();
        }
        self.ordering.push_all_joined(view, key.clone(), last);
    }

    /// Undoes failed joins: operations that are ready without these ranks are rejected.
    pub(super) fn unjoin(&mut self, cx: &mut Context, set: SetId, requests: &RankRequests) {
        let joins = requests.iter().filter(|(_, request)| request.collective == Collective::Join);
        let ranks: BTreeSet<Rank> = joins.map(|(rank, _)| *rank).filter(|rank| self.joins.undo(set, *rank)).collect();
        if ranks.is_empty() {
            return;
        }
        let taken = self.groups.take_joined(set, &ranks);
        let mut stranded: Vec<Ready> = taken.into_iter().map(|(ready, _)| ready).collect();
        stranded.extend(self.ordering.take_joined(set, &ranks));
        let who = wording::ranks(&ranks.into_iter().collect::<Vec<_>>());
        self.reject_each(cx, stranded, &format!("it was to be performed without {who}, whose join has failed"));
    }

    /// Checks that no rank waits for the end of a join in a set, which is to be removed.
    ///
    /// # Errors
    /// Why it is not removed.
    pub(super) fn check_no_joins(&self, set: SetId) -> Result<(), String> {
        let joined = self.joins.of(set);
        if joined.is_empty() && !self.ordering.ends_join_of(set) {
            return Ok(());
        }
        let who = match joined.len() {
            0 => "its ranks have".to_owned(),
            1 => format!("{} has", wording::ranks(&joined.iter().copied().collect::<Vec<_>>())),
            _ => format!("{} have", wording::ranks(&joined.iter().copied().collect::<Vec<_>>())),
        };
        Err(format!("{set} cannot be removed: {who} joined in it; remove it when the join is complete"))
    }
}
