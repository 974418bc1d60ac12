//! Process sets from the view of one sidecar: those of the world, with the additions and removals of the epoch.

use std::collections::BTreeMap;
use std::sync::Arc;

use ronde_wire::{
    AnySource, Member, Pair, ProcessSet, Rank, SetId, SetTopology, SidecarIndex, SidecarSet, TensorName, World,
    WorldError,
};

use super::context::Context;

/// The participants of an operation: a process set, or two of its ranks for a message.
#[derive(Debug)]
pub(crate) struct SetView {
    pub(crate) topology: Arc<SetTopology>,
    /// The member sidecars.
    pub(crate) sidecars: SidecarSet,
    /// All ranks of the set, ascending.
    pub(crate) ranks: Vec<Rank>,
    /// This sidecar's position among the members.
    pub(crate) me: Option<Member>,
    /// The ranks of the set that this sidecar serves, ascending.
    pub(crate) local_ranks: Vec<Rank>,
    /// The same of the whole set, where these are only some ranks of it.
    pub(crate) set_local_ranks: Arc<[Rank]>,
    /// Whether these are the two ranks of a message.
    pub(crate) is_pair: bool,
}

impl SetView {
    pub(crate) fn new(me: SidecarIndex, topology: SetTopology) -> Self {
        let me = topology.member(me);
        let local_ranks = me.map(|me| topology.members[me.index()].ranks.clone()).unwrap_or_default();
        let sidecars = topology.members.iter().map(|member| member.sidecar).collect();
        let (ranks, set_local_ranks) = (topology.ranks(), local_ranks.as_slice().into());
        Self { sidecars, ranks, me, local_ranks, set_local_ranks, topology: Arc::new(topology), is_pair: false }
    }

    /// The two ranks of a message; `None` when the set lacks one of them, or they are equal.
    pub(crate) fn pair(&self, me: SidecarIndex, pair: Pair) -> Option<Self> {
        let inside = pair.from != pair.to && self.contains(pair.from) && self.contains(pair.to);
        inside.then(|| Self { is_pair: true, ..self.restricted(me, &[pair.from, pair.to]) })
    }

    /// One rank of the set, which receives from any source; `None` when it is not in the set.
    fn only(&self, me: SidecarIndex, rank: Rank) -> Option<Self> {
        self.contains(rank).then(|| self.restricted(me, &[rank]))
    }

    fn restricted(&self, me: SidecarIndex, ranks: &[Rank]) -> Self {
        let set_local_ranks = Arc::clone(&self.set_local_ranks);
        Self { set_local_ranks, ..Self::new(me, self.topology.restricted_to(ranks)) }
    }

    pub(crate) fn contains(&self, rank: Rank) -> bool {
        self.position(rank).is_some()
    }

    /// The rank's position in the set.
    pub(crate) fn position(&self, rank: Rank) -> Option<usize> {
        self.ranks.binary_search(&rank).ok()
    }

    /// Whether the rank is in the set and this sidecar serves it.
    pub(crate) fn serves(&self, rank: Rank) -> bool {
        self.local_ranks.binary_search(&rank).is_ok()
    }

    /// Whether it is the set of all ranks, or two ranks of it.
    pub(crate) fn is_world(&self) -> bool {
        self.topology.set == SetId::WORLD
    }

    /// The sidecar that reports operations of the set as done.
    pub(crate) fn first_member(&self) -> SidecarIndex {
        self.topology.members[0].sidecar
    }
}

/// The existing sets. Coordinator and participant have one each, as they learn of a change at different times.
#[derive(Debug, Default)]
pub(crate) struct SetTable {
    /// The differences from the world: added sets, and `None` for removed ones.
    changed: BTreeMap<SetId, Option<Arc<SetView>>>,
}

impl SetTable {
    /// Restores the world's sets: the changes of an epoch end with it.
    pub(crate) fn clear(&mut self) {
        self.changed.clear();
    }

    /// The view of a set, `None` when there is none.
    pub(crate) fn view(&self, cx: &mut Context, set: SetId) -> Option<Arc<SetView>> {
        match self.changed.get(&set) {
            Some(changed) => changed.clone(),
            None => cx.world_set(set),
        }
    }

    /// The view of the ranks that negotiate a name of a set: two ranks for a message, one for a receive from any
    /// source, all ranks otherwise.
    pub(crate) fn scope(&self, cx: &mut Context, set: SetId, name: &TensorName) -> Option<Arc<SetView>> {
        let view = self.view(cx, set)?;
        match (Pair::of_message(name), AnySource::of_receive(name)) {
            (Some((pair, _)), _) => view.pair(cx.me(), pair).map(Arc::new),
            (None, Some(any)) => view.only(cx.me(), any.to).map(Arc::new),
            (None, None) => Some(view),
        }
    }

    /// A set with exactly these ranks, ascending.
    pub(crate) fn with_ranks(&self, world: &World, ranks: &[Rank]) -> Option<SetId> {
        let of_world = world.sets().iter().filter(|set| !self.changed.contains_key(&set.id) && set.ranks == ranks);
        let added = self.changed.iter().filter(|(_, view)| view.as_ref().is_some_and(|view| view.ranks == ranks));
        of_world.map(|set| set.id).chain(added.map(|(id, _)| *id)).next()
    }

    /// The number of sets.
    pub(crate) fn len(&self, world: &World) -> usize {
        let unchanged = world.sets().iter().filter(|set| !self.changed.contains_key(&set.id)).count();
        unchanged + self.changed.values().flatten().count()
    }

    /// All sets except the set of all ranks: first those of the world, then the added ones, by id.
    pub(crate) fn others<'a>(&'a self, world: &'a World) -> impl Iterator<Item = ProcessSet> + 'a {
        let of_world =
            world.sets().iter().filter(|set| set.id != SetId::WORLD && !self.changed.contains_key(&set.id)).cloned();
        let added = self
            .changed
            .iter()
            .filter_map(|(id, view)| view.as_ref().map(|view| ProcessSet { id: *id, ranks: view.ranks.clone() }));
        of_world.chain(added)
    }

    /// An id that is greater than all ids in use so far.
    pub(crate) fn unused(&self, world: &World) -> SetId {
        let ids = world.sets().iter().map(|set| set.id).chain(self.changed.keys().copied());
        SetId(ids.map(|id| id.0).max().unwrap_or_default().saturating_add(1))
    }

    /// # Errors
    /// [`WorldError`] when the set is not well formed or its id is in use.
    pub(crate) fn add(&mut self, cx: &mut Context, set: &ProcessSet) -> Result<(), WorldError> {
        if self.view(cx, set.id).is_some() {
            return Err(WorldError::SetIds);
        }
        let topology = cx.config.world.topology_of(set)?;
        self.changed.insert(set.id, Some(Arc::new(SetView::new(cx.me(), topology))));
        Ok(())
    }

    /// Removes a set. False for the set of all ranks, and when there is no such set.
    pub(crate) fn remove(&mut self, cx: &mut Context, set: SetId) -> bool {
        let exists = set != SetId::WORLD && self.view(cx, set).is_some();
        if exists {
            self.changed.insert(set, None);
        }
        exists
    }
}
