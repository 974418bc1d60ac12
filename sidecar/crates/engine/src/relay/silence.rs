//! Silent sidecars in the tree: each sidecar observes its neighbours and reports silent ones along the tree.

use std::collections::BTreeMap;

use ronde_wire::{Control, Epoch, Seq, SidecarIndex};

use super::{Relay, RelayOutput};

/// Silent sidecars with the milliseconds of their silence.
type List = Vec<(SidecarIndex, u64)>;

/// The reports of neighbours, and whether this sidecar reported to them.
#[derive(Debug, Default)]
pub(super) struct Silence {
    /// The silent sidecars below each child.
    below: BTreeMap<SidecarIndex, List>,
    /// The silent sidecars between the parent and the coordinator, which is included.
    above: List,
    reported_above: bool,
    reported_below: bool,
}

impl Silence {
    pub(super) fn forget(&mut self, child: SidecarIndex) {
        self.below.remove(&child);
    }

    pub(super) fn forget_above(&mut self) {
        self.above.clear();
    }
}

impl Relay {
    /// Restarts all liveness timers.
    pub(crate) fn rebase(&mut self) {
        self.silence.below.clear();
        self.silence.above.clear();
    }

    /// The reported silence of a sidecar that is no neighbour; 0 when it is not silent.
    pub(crate) fn silent_ms(&self, peer: SidecarIndex) -> u64 {
        let mut lists = self.silence.below.values().chain([&self.silence.above]).flatten();
        lists.find(|(sidecar, _)| *sidecar == peer).map_or(0, |(_, ms)| *ms)
    }

    /// The sidecar on the path to the coordinator, which is included, that has been silent for longest. `parent_ms` is
    /// the silence of the parent, which this sidecar observes itself.
    pub(crate) fn silent_above(&self, parent_ms: u64) -> Option<(SidecarIndex, u64)> {
        let parent = (self.parent()?, parent_ms);
        let above = self.silence.above.iter().copied();
        Some(above.fold(parent, |most, other| if other.1 > most.1 { other } else { most }))
    }

    /// Reports silent sidecars to the neighbours on the other side. `silent_ms` is the silence of a neighbour, which is
    /// reported from `limit_ms` on.
    pub(crate) fn report_silence(
        &mut self,
        out: &mut RelayOutput<'_>,
        limit_ms: u64,
        silent_ms: impl Fn(SidecarIndex) -> u64,
    ) {
        let Some(parent) = self.parent() else { return };
        let late = |peer: SidecarIndex| Some((peer, silent_ms(peer))).filter(|(_, ms)| *ms >= limit_ms);
        let mut below = List::new();
        for (child, _) in self.children.iter().filter(|(_, link)| link.generation.is_some()) {
            // Older reports of a silent child are ignored.
            match (late(*child), self.silence.below.get(child)) {
                (Some(child), _) => below.push(child),
                (None, Some(list)) => below.extend(list),
                (None, None) => {}
            }
        }
        let above = late(parent).map_or_else(|| self.silence.above.clone(), |parent| vec![parent]);
        if std::mem::replace(&mut self.silence.reported_above, !below.is_empty()) || !below.is_empty() {
            out.send(parent, Epoch(0), Seq(0), Control::Silent { sidecars: below });
        }
        if std::mem::replace(&mut self.silence.reported_below, !above.is_empty()) || !above.is_empty() {
            for (child, _) in self.children.iter().filter(|(_, link)| link.generation.is_some()) {
                out.send(*child, self.epoch, Seq(0), Control::Silent { sidecars: above.clone() });
            }
        }
    }

    pub(super) fn receive_silence(&mut self, from: SidecarIndex, sidecars: List) -> Result<(), String> {
        let about = |sidecar: SidecarIndex| match self.tree.branch(from) {
            Some(branch) => branch.all.contains(sidecar) && sidecar != from,
            None => self.tree.is_above(sidecar) && sidecar != from,
        };
        let ascending = sidecars.iter().map(|(sidecar, _)| *sidecar).collect::<std::collections::BTreeSet<_>>();
        if ascending.len() != sidecars.len() || !ascending.into_iter().all(about) {
            return Err("reports the silence of sidecars that are not on its side of the tree".to_owned());
        }
        if self.parent() == Some(from) {
            self.silence.above = sidecars;
        } else {
            self.silence.below.insert(from, sidecars);
        }
        Ok(())
    }
}
