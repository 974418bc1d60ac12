//! The coordinator's process sets: their ids, and the sidecars that have acknowledged a removal.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ronde_wire::{Control, Epoch, ProcessSet, Rank, Seq, SetId, SidecarIndex, TensorName, limits};

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
            return Err(format!("duplicate process set: {} are {present} already", wording::ranks(&ranks)));
        }
        self.add_new(cx, epoch, name, ranks)
    }

    /// Answers the members of a set of these ranks, which are ascending ranks of the world. Adds the set if there is
    /// none of exactly these.
    ///
    /// # Errors
    /// Why it is refused.
    pub(crate) fn find_or_add(
        &mut self,
        cx: &mut Context,
        epoch: Epoch,
        name: &TensorName,
        ranks: &[Rank],
    ) -> Result<(), String> {
        let Some(id) = self.sets.with_ranks(&cx.config.world, ranks) else {
            return self.add_new(cx, epoch, name, ranks.to_vec());
        };
        let sidecars = ranks.iter().filter_map(|rank| cx.config.world.sidecar_of(*rank)).collect();
        let set = ProcessSet { id, ranks: ranks.to_vec() };
        cx.send_down(&sidecars, epoch, Seq(0), Control::SetAdded { name: name.clone(), set });
        Ok(())
    }

    fn add_new(&mut self, cx: &mut Context, epoch: Epoch, name: &TensorName, ranks: Vec<Rank>) -> Result<(), String> {
        let world = &cx.config.world;
        if self.sets.len(world) >= limits::SETS_MAX {
            return Err(format!("there are {} process sets, the most that a job may have", limits::SETS_MAX));
        }
        let id = self.free.front().copied().unwrap_or_else(|| self.sets.unused(world));
        let set = ProcessSet { id, ranks };
        self.sets.add(cx, &set).map_err(|error| error.to_string())?;
        self.free.pop_front();
        cx.send_down(&cx.all_sidecars.clone(), epoch, Seq(0), Control::SetAdded { name: name.clone(), set });
        Ok(())
    }

    /// Removes a set. False when there is no such set, or it is the set of all ranks.
    pub(crate) fn remove(&mut self, cx: &mut Context, epoch: Epoch, name: &TensorName, set: SetId) -> bool {
        let removed = self.sets.remove(cx, set);
        if removed {
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
