//! Membership: the placement of ranks on sidecars, process sets, and the topology of a plan.

use serde::{Deserialize, Serialize};

use crate::ids::{Member, Rank, SetId, SidecarIndex};
use crate::limits;

/// Why a membership is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorldError {
    /// No rank, or more than [`limits::RANKS_MAX`].
    #[error("a world has 1 to {max} ranks, not {given}", max = limits::RANKS_MAX)]
    Ranks {
        /// How many were given.
        given: usize,
    },
    /// A sidecar serves more than [`limits::LOCAL_RANKS_MAX`] ranks.
    #[error("{sidecar} serves {given} ranks; the limit is {max} a sidecar", max = limits::LOCAL_RANKS_MAX)]
    LocalRanks {
        /// Which one.
        sidecar: SidecarIndex,
        /// How many ranks it was given.
        given: usize,
    },
    /// A sidecar index is out of bounds.
    #[error("sidecar indices are below {max}, not {given}", max = limits::SIDECARS_MAX)]
    Sidecar {
        /// What was given.
        given: u32,
    },
    /// A process set is empty, unsorted, has duplicates, or names a rank outside of the world.
    #[error("{set} must list ranks of the world once, in ascending order, not {ranks:?}")]
    Set {
        /// Which one.
        set: SetId,
        /// What was given.
        ranks: Vec<u32>,
    },
    /// Set ids must be 0 (all ranks), then distinct.
    #[error("process sets begin with the set of all ranks as 0 and have distinct ids; at most {max}", max = limits::SETS_MAX)]
    SetIds,
}

/// A process set: some ranks of the world, ascending.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessSet {
    /// Its id.
    pub id: SetId,
    /// Its ranks, ascending and distinct.
    pub ranks: Vec<Rank>,
}

/// The membership of one epoch: the sidecar of each rank, and the process sets. Checked on construction.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "WorldWire", into = "WorldWire")]
pub struct World {
    placement: Vec<SidecarIndex>,
    sets: Vec<ProcessSet>,
}

impl World {
    /// A world from its placement (`placement[rank]` is the rank's sidecar), with the set of all ranks only.
    ///
    /// # Errors
    /// [`WorldError`] when a limit is exceeded.
    pub fn new(placement: Vec<SidecarIndex>) -> Result<Self, WorldError> {
        let ranks = (0..).map(Rank).take(placement.len()).collect();
        Self::with_sets(placement, vec![ProcessSet { id: SetId::WORLD, ranks }])
    }

    /// A world with process sets; the first must be the set of all ranks.
    ///
    /// # Errors
    /// [`WorldError`] when a limit is exceeded or a set is not well formed.
    pub fn with_sets(placement: Vec<SidecarIndex>, sets: Vec<ProcessSet>) -> Result<Self, WorldError> {
        if placement.is_empty() || placement.len() > limits::RANKS_MAX {
            return Err(WorldError::Ranks { given: placement.len() });
        }
        for &sidecar in &placement {
            if sidecar.index() >= limits::SIDECARS_MAX {
                return Err(WorldError::Sidecar { given: sidecar.0 });
            }
            let given = placement.iter().filter(|s| **s == sidecar).count();
            if given > limits::LOCAL_RANKS_MAX {
                return Err(WorldError::LocalRanks { sidecar, given });
            }
        }
        check_sets(&sets, placement.len())?;
        Ok(Self { placement, sets })
    }

    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.placement.len()
    }

    /// The sidecar of each rank.
    #[must_use]
    pub fn placement(&self) -> &[SidecarIndex] {
        &self.placement
    }

    /// The sidecar that serves a rank, `None` outside of the world.
    #[must_use]
    pub fn sidecar_of(&self, rank: Rank) -> Option<SidecarIndex> {
        self.placement.get(rank.index()).copied()
    }

    /// The sidecar whose engine is the coordinator: the one that hosts rank 0.
    #[must_use]
    pub fn coordinator(&self) -> SidecarIndex {
        self.placement[0]
    }

    /// The sidecars that serve at least one rank, ascending.
    #[must_use]
    pub fn sidecars(&self) -> Vec<SidecarIndex> {
        let mut sidecars = self.placement.clone();
        sidecars.sort_unstable();
        sidecars.dedup();
        sidecars
    }

    /// The ranks that a sidecar serves, ascending.
    #[must_use]
    pub fn ranks_of(&self, sidecar: SidecarIndex) -> Vec<Rank> {
        (0..).map(Rank).zip(&self.placement).filter(|(_, s)| **s == sidecar).map(|(rank, _)| rank).collect()
    }

    /// The process sets, the set of all ranks first.
    #[must_use]
    pub fn sets(&self) -> &[ProcessSet] {
        &self.sets
    }

    /// The topology of a set, `None` when there is no such set.
    #[must_use]
    pub fn topology(&self, set: SetId) -> Option<SetTopology> {
        self.sets.iter().find(|s| s.id == set).map(|set| self.topology_for(set))
    }

    /// The topology of a set that is not one of the world's sets.
    ///
    /// # Errors
    /// [`WorldError::Set`] when its ranks are not ascending ranks of the world.
    pub fn topology_of(&self, set: &ProcessSet) -> Result<SetTopology, WorldError> {
        check_set(set, self.size())?;
        Ok(self.topology_for(set))
    }

    fn topology_for(&self, set: &ProcessSet) -> SetTopology {
        let mut members: Vec<SetMember> = Vec::new();
        for &rank in &set.ranks {
            let sidecar = self.placement[rank.index()];
            match members.iter_mut().find(|m| m.sidecar == sidecar) {
                Some(member) => member.ranks.push(rank),
                None => members.push(SetMember { sidecar, ranks: vec![rank] }),
            }
        }
        members.sort_unstable_by_key(|m| m.sidecar);
        SetTopology { set: set.id, members }
    }
}

fn check_sets(sets: &[ProcessSet], size: usize) -> Result<(), WorldError> {
    let whole = sets.first().is_some_and(|s| s.id == SetId::WORLD && s.ranks.len() == size);
    let mut ids: Vec<SetId> = sets.iter().map(|s| s.id).collect();
    ids.sort_unstable();
    ids.dedup();
    if !whole || ids.len() != sets.len() || sets.len() > limits::SETS_MAX {
        return Err(WorldError::SetIds);
    }
    sets.iter().try_for_each(|set| check_set(set, size))
}

fn check_set(set: &ProcessSet, size: usize) -> Result<(), WorldError> {
    let ascending = set.ranks.is_sorted_by(|a, b| a < b);
    let inside = set.ranks.last().is_some_and(|last| last.index() < size);
    if ascending && inside {
        Ok(())
    } else {
        Err(WorldError::Set { set: set.id, ranks: set.ranks.iter().map(|r| r.0).collect() })
    }
}

/// A sidecar with the ranks of one set that it serves.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SetMember {
    /// The sidecar.
    pub sidecar: SidecarIndex,
    /// Its ranks of the set, ascending; never empty.
    pub ranks: Vec<Rank>,
}

/// The members of one process set by ascending sidecar index: the topology of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SetTopology {
    /// The set.
    pub set: SetId,
    /// Its members, ascending by sidecar.
    pub members: Vec<SetMember>,
}

impl SetTopology {
    /// The number of members: sidecars that take part.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are no members; never true for a topology of a [`World`].
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The number of ranks of the set.
    #[must_use]
    pub fn size(&self) -> usize {
        self.members.iter().map(|m| m.ranks.len()).sum()
    }

    /// The ranks of the set, ascending.
    #[must_use]
    pub fn ranks(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self.members.iter().flat_map(|m| m.ranks.iter().copied()).collect();
        ranks.sort_unstable();
        ranks
    }

    /// The position of a sidecar among the members, `None` when it hosts no rank of the set.
    #[must_use]
    pub fn member(&self, sidecar: SidecarIndex) -> Option<Member> {
        let index = self.members.binary_search_by_key(&sidecar, |m| m.sidecar).ok()?;
        u32::try_from(index).ok().map(Member)
    }

    /// The member that serves a rank, `None` when the rank is not in the set.
    #[must_use]
    pub fn member_of(&self, rank: Rank) -> Option<Member> {
        let index = self.members.iter().position(|m| m.ranks.contains(&rank))?;
        u32::try_from(index).ok().map(Member)
    }

    /// The same ranks, all served by one sidecar: the topology of an eager operation, in which each member has all
    /// contributions.
    #[must_use]
    pub fn on_one_sidecar(&self, sidecar: SidecarIndex) -> Self {
        Self { set: self.set, members: vec![SetMember { sidecar, ranks: self.ranks() }] }
    }

    /// The topology restricted to some of its ranks, for a message between two of them.
    #[must_use]
    pub fn restricted_to(&self, ranks: &[Rank]) -> Self {
        let restrict = |member: &SetMember| {
            let ranks: Vec<Rank> = member.ranks.iter().copied().filter(|rank| ranks.contains(rank)).collect();
            (!ranks.is_empty()).then_some(SetMember { sidecar: member.sidecar, ranks })
        };
        Self { set: self.set, members: self.members.iter().filter_map(restrict).collect() }
    }

    /// The sidecar of a member.
    #[must_use]
    pub fn sidecar(&self, member: Member) -> SidecarIndex {
        self.members[member.index()].sidecar
    }
}

#[derive(Serialize, Deserialize)]
struct WorldWire {
    placement: Vec<SidecarIndex>,
    sets: Vec<ProcessSet>,
}

impl TryFrom<WorldWire> for World {
    type Error = WorldError;
    fn try_from(wire: WorldWire) -> Result<Self, WorldError> {
        Self::with_sets(wire.placement, wire.sets)
    }
}

impl From<World> for WorldWire {
    fn from(world: World) -> Self {
        Self { placement: world.placement, sets: world.sets }
    }
}
