//! The coordinator's process sets: their ids, and the sidecars that have acknowledged a removal.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ronde_wire::{Control, Epoch, ProcessSet, Rank, Seq, SetId, SidecarIndex, SidecarSet, TensorName, limits};

use super::Violation;
use crate::engine::shared::context::Context;
use crate::engine::shared::sets::SetTable;
use crate::engine::shared::wording;

/// The process sets of the job. The id of a removed set is free when all sidecars have acknowledged the removal, so
/// that none of them still sends messages about the old set. Free ids are reused in the order in which they became
/// free.
#[derive(Debug, Default)]
pub(crate) struct ProcessSets {
    pub(super) sets: SetTable,
    /// Removed sets, with the sidecars that have yet to acknowledge the removal.
    leaving: BTreeMap<SetId, BTreeSet<SidecarIndex>>,
    free: VecDeque<SetId>,
    /// Sets that ranks of one sidecar formed alone: that sidecar. No other sidecar can keep it from forming all subsets
    /// of its ranks, so they are counted.
    own: BTreeMap<SetId, SidecarIndex>,
}

impl ProcessSets {
    /// Adds a set of these ranks, which are known to be distinct ranks of the world.
    ///
    /// # Errors
    /// Why it is refused.
    pub(crate) fn add(
        &mut self,
        cx: &mut Context,
        epoch: Epoch,
        name: &TensorName,
        ranks: &[Rank],
    ) -> Result<(), String> {
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        if let Some(present) = self.sets.with_ranks(&cx.config.world, &ranks) {
            return Err(format!("duplicate process set: {present} is of {} already", wording::ranks(&ranks)));
        }
        self.add_new(cx, epoch, name, ranks).map(|_| ())
    }

    /// Answers the members of a set of these ranks, which are ascending ranks of the world. Adds the set if there is
    /// none of exactly these.
    ///
    /// # Errors
    /// Why it is refused.
    pub(crate) fn form(
        &mut self,
        cx: &mut Context,
        epoch: Epoch,
        name: &TensorName,
        ranks: &[Rank],
    ) -> Result<(), String> {
        let sidecars: SidecarSet = ranks.iter().filter_map(|rank| cx.config.world.sidecar_of(*rank)).collect();
        if let Some(id) = self.sets.with_ranks(&cx.config.world, ranks) {
            let set = ProcessSet { id, ranks: ranks.to_vec() };
            cx.send_down(&sidecars, epoch, Seq(0), Control::SetAdded { name: name.clone(), set });
            return Ok(());
        }
        let mut members = sidecars.iter();
        let alone = members.next().filter(|_| members.next().is_none());
        if let Some(sidecar) = alone.filter(|_| cx.sidecars.len() > 1) {
            self.check_own(sidecar)?;
        }
        let id = self.add_new(cx, epoch, name, ranks.to_vec())?;
        self.own.extend(alone.map(|sidecar| (id, sidecar)));
        Ok(())
    }

    /// Checks that ranks of a sidecar may form another set alone.
    fn check_own(&self, sidecar: SidecarIndex) -> Result<(), String> {
        let most = limits::SETS_OF_ONE_SIDECAR_MAX;
        let held = self.own.values().filter(|of| **of == sidecar).count();
        if held < most {
            return Ok(());
        }
        Err(format!(
            "ranks of {sidecar} alone have formed {held} process sets, the most that those of one sidecar may have formed \
             by themselves (SETS_OF_ONE_SIDECAR_MAX). {REMEDY}, or make it on all ranks of the job"
        ))
    }

    /// # Errors
    /// Why it is refused.
    fn add_new(
        &mut self,
        cx: &mut Context,
        epoch: Epoch,
        name: &TensorName,
        ranks: Vec<Rank>,
    ) -> Result<SetId, String> {
        let world = &cx.config.world;
        if self.sets.len(world) >= limits::SETS_MAX {
            return Err(self.full());
        }
        let id = self.free.front().copied().unwrap_or_else(|| self.sets.unused(world));
        let set = ProcessSet { id, ranks };
        self.sets.add(cx, &set).map_err(|error| error.to_string())?;
        self.free.pop_front();
        cx.send_down(&cx.all_sidecars.clone(), epoch, Seq(0), Control::SetAdded { name: name.clone(), set });
        Ok(id)
    }

    /// Why no set can be added, and who has formed how many.
    fn full(&self) -> String {
        let mut held: BTreeMap<SidecarIndex, usize> = BTreeMap::new();
        for sidecar in self.own.values() {
            *held.entry(*sidecar).or_default() += 1;
        }
        let mut held: Vec<(SidecarIndex, usize)> = held.into_iter().collect();
        held.sort_by_key(|(sidecar, sets)| (Reverse(*sets), *sidecar));
        let first: Vec<String> =
            held.iter().take(HOLDERS_MAX).map(|(sidecar, sets)| format!("{sidecar}: {sets}")).collect();
        let holders = match held.len() {
            0 => String::new(),
            more => {
                let others = if more > HOLDERS_MAX { ", and others fewer" } else { "" };
                format!(" (formed by ranks of one sidecar alone: {}{others})", first.join(", "))
            }
        };
        format!("there are {} process sets, the most that a job may have{holders}. {REMEDY}", limits::SETS_MAX)
    }

    /// Removes a set. False when there is no such set, or it is the set of all ranks.
    pub(crate) fn remove(&mut self, cx: &mut Context, epoch: Epoch, name: &TensorName, set: SetId) -> bool {
        let removed = self.sets.remove(cx, set);
        if removed {
            self.own.remove(&set);
            self.leaving.insert(set, cx.sidecars.iter().copied().collect());
        }
        cx.send_down(&cx.all_sidecars.clone(), epoch, Seq(0), Control::SetRemoved { name: name.clone(), set });
        removed
    }

    /// Whether all sidecars have acknowledged all removals.
    pub(crate) fn all_acknowledged(&self) -> bool {
        self.leaving.is_empty()
    }

    /// Whether a sidecar may still send messages about a removed set.
    pub(crate) fn is_leaving(&self, from: SidecarIndex, set: SetId) -> bool {
        self.leaving.get(&set).is_some_and(|unaware| unaware.contains(&from))
    }

    /// A sidecar acknowledges the removal of a set.
    ///
    /// # Errors
    /// When no acknowledgement of it is awaited.
    pub(crate) fn forgotten(&mut self, from: SidecarIndex, set: SetId) -> Result<(), Violation> {
        let unaware = self.leaving.get_mut(&set).filter(|unaware| unaware.contains(&from));
        let unaware = unaware.ok_or_else(|| format!("reports {set} as forgotten, which was not removed"))?;
        unaware.remove(&from);
        if unaware.is_empty() {
            self.leaving.remove(&set);
            self.free.push_back(set);
        }
        Ok(())
    }
}

/// What to do when there are too many sets.
const REMEDY: &str = "Remove sets that are no longer used with remove_process_set on all ranks of the job";

/// The most sidecars that a refusal names.
const HOLDERS_MAX: usize = 4;
