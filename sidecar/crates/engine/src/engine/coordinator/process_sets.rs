//! The coordinator's process sets: ids, and who has heard that a set is gone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ronde_wire::{Control, Epoch, ProcessSet, Rank, Seq, SetId, SidecarIndex, TensorName, limits};

use super::Violation;
use crate::engine::shared::context::Context;
use crate::engine::shared::sets::SetTable;
use crate::engine::shared::wording;

/// See the module's text. Ids of sets that are gone are used again in the order in which they became free: when all sidecars
/// have heard that the set is gone, so that none of them still speaks of the old one.
#[derive(Debug, Default)]
pub(crate) struct ProcessSets {
    pub(super) sets: SetTable,
    /// Sets that are gone, with the sidecars that have yet to say that they know.
    leaving: BTreeMap<SetId, BTreeSet<SidecarIndex>>,
    free: VecDeque<SetId>,
}

impl ProcessSets {
    /// All ranks want a set of these ranks, which were found to be distinct ranks of the world.
    ///
    /// # Errors
    /// Why there is none, in words.
    pub(crate) fn add(
        &mut self,
        cx: &mut Context,
        epoch: Epoch,
        name: &TensorName,
        ranks: &[Rank],
    ) -> Result<(), String> {
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        let world = &cx.config.world;
        if let Some(present) = self.sets.with_ranks(world, &ranks) {
            return Err(format!("duplicate process set: {} are {present} already", wording::ranks(&ranks)));
        }
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

    /// All ranks want a set gone. False when there is no such set, or it is the set of all ranks.
    pub(crate) fn remove(&mut self, cx: &mut Context, epoch: Epoch, name: &TensorName, set: SetId) -> bool {
        let removed = self.sets.remove(cx, set);
        if removed {
            self.leaving.insert(set, cx.sidecars.iter().copied().collect());
        }
        cx.send_down(&cx.all_sidecars.clone(), epoch, Seq(0), Control::SetRemoved { name: name.clone(), set });
        removed
    }

    /// Whether all sidecars know of all changes.
    pub(crate) fn all_acknowledged(&self) -> bool {
        self.leaving.is_empty()
    }

    /// Whether a sidecar may still speak of a set that is gone.
    pub(crate) fn is_leaving(&self, from: SidecarIndex, set: SetId) -> bool {
        self.leaving.get(&set).is_some_and(|unaware| unaware.contains(&from))
    }

    /// A sidecar knows that a set is gone.
    ///
    /// # Errors
    /// When it was not told so.
    pub(crate) fn forgotten(&mut self, from: SidecarIndex, set: SetId) -> Result<(), Violation> {
        let unaware = self.leaving.get_mut(&set).filter(|unaware| unaware.contains(&from));
        let unaware = unaware.ok_or_else(|| format!("forgets {set}, of whose end it was not told"))?;
        unaware.remove(&from);
        if unaware.is_empty() {
            self.leaving.remove(&set);
            self.free.push_back(set);
        }
        Ok(())
    }
}
