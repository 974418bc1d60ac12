//! The inputs of a plan: what they are and which ones are valid.
//!
//! Every algorithm gets them as [`Inputs`], after all checks that do not depend on the algorithm.

use ronde_wire::{Algorithm, Lane, Member, Rank, SetId, SetTopology, Tuning, limits};

use crate::plan::{MEASURES_MAX, Round, SubSchedule, Work, WorkKind};

/// The bytes that a step of a prelude measures at once, where it needs no transfer. The tuning does not change it, so that
/// the order of the sums is fixed.
pub const MEASURED_BYTES: u64 = 1 << 20;

/// The most sub-schedules of a plan, which bounds its memory: 2^20 chunks of 64 KiB are 64 GiB for each shard.
pub const SUB_SCHEDULES_MAX: u64 = 1 << 20;
/// The most blocks of an operation with a codec from a plugin. Each has its own sub-schedule of about a kilobyte.
pub const BLOCKS_MAX: u64 = 1 << 18;

/// Inputs for which no plan exists. The coordinator checks all of them, so each is a bug here or on the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The member is not one of the topology's.
    #[error("{me} does not exist among {members} members of the set; plan for 0 to {members} exclusively")]
    Member {
        /// The member.
        me: Member,
        /// The number of members.
        members: usize,
    },
    /// The algorithm does not perform this kind of work, or not with so many members.
    #[error("{algorithm} does not perform {kind} over {members} members; order another algorithm")]
    Combination {
        /// The algorithm of the tuning.
        algorithm: Algorithm,
        /// The name of the kind of work.
        kind: &'static str,
        /// The number of members.
        members: usize,
    },
    /// A number is out of its bounds.
    #[error("{what} is {given}, which is not within {min} to {max}")]
    Limit {
        /// The name of the number.
        what: &'static str,
        /// The given value.
        given: u64,
        /// The least value allowed.
        min: u64,
        /// The greatest value allowed.
        max: u64,
    },
    /// The root is not a rank of the set.
    #[error("the root, {root}, is not in {set}; name a rank of the set")]
    Root {
        /// The rank.
        root: Rank,
        /// The set.
        set: SetId,
    },
    /// A tensor has the wrong number of counts.
    #[error("tensor {tensor} has {given} element counts; {kind} needs {needed}")]
    Counts {
        /// The tensor's index in the bucket.
        tensor: usize,
        /// The name of the kind of work.
        kind: &'static str,
        /// The number of counts that it has.
        given: usize,
        /// The number that it needs.
        needed: usize,
    },
}

/// The validated inputs of an algorithm.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    pub(crate) topology: &'a SetTopology,
    pub(crate) work: &'a Work,
    pub(crate) tuning: &'a Tuning,
    /// The most elements of a chunk; at least 1.
    pub(crate) chunk_elements: u64,
}

impl<'a> Inputs<'a> {
    /// Checks everything that does not depend on the algorithm.
    ///
    /// # Errors
    /// [`PlanError`] when the inputs contradict each other or break a limit.
    pub fn new(topology: &'a SetTopology, work: &'a Work, tuning: &'a Tuning) -> Result<Self, PlanError> {
        check_tuning(work, tuning)?;
        check_work(topology, work)?;
        let chunk_elements = u64::from(tuning.chunk_bytes / work.element_bytes);
        within("the number of chunks", work.elements().div_ceil(chunk_elements), 0, SUB_SCHEDULES_MAX)?;
        if let WorkKind::AllReduceByBlocks { block_elements, .. } = work.kind {
            // Blocks never span two tensors, so each tensor's longest shard counts.
            let blocks = |count: &u64| count.div_ceil(topology.len() as u64).div_ceil(u64::from(block_elements));
            let sub_schedules = work.tensors.iter().flatten().map(blocks).fold(0, u64::saturating_add);
            within("the number of blocks", sub_schedules, 0, BLOCKS_MAX)?;
        }
        if work.kind.is_nary() {
            // A register holds the values of all of a member's ranks, so chunks have fewer elements.
            let values_each = topology.members.iter().map(|member| member.ranks.len() as u64).max().unwrap_or(1);
            let shard = work.elements().div_ceil(topology.len() as u64);
            let sub_schedules = shard.div_ceil((chunk_elements / values_each).max(1));
            within("the number of chunks", sub_schedules, 0, SUB_SCHEDULES_MAX)?;
        }
        Ok(Self { topology, work, tuning, chunk_elements })
    }

    /// The number of members.
    pub(crate) fn members(&self) -> usize {
        self.topology.len()
    }

    /// The number of members, as a divisor of elements.
    pub(crate) fn members_count(&self) -> u64 {
        self.topology.len() as u64
    }

    /// The count of each tensor, for kinds with one count per tensor.
    pub(crate) fn counts(&self) -> Vec<u64> {
        self.work.tensors.iter().flatten().copied().collect()
    }

    /// Whether the plan has a prelude: the kind measures, and there are elements.
    pub(crate) fn has_prelude(&self) -> bool {
        self.work.kind.measures() && self.work.elements() > 0
    }

    /// The elements that a step of a prelude measures at once, at least 1, when a register holds so many values of each.
    pub(crate) fn measured_elements(&self, values_each: u64) -> u64 {
        (MEASURED_BYTES / (values_each * u64::from(self.work.element_bytes))).max(1)
    }

    pub(crate) fn bytes(&self, elements: u64) -> u64 {
        elements * u64::from(self.work.element_bytes)
    }

    /// The number of sub-schedules that cut a block of `longest` elements into chunks.
    pub(crate) fn sub_schedule_count(&self, longest: u64) -> u64 {
        longest.div_ceil(self.chunk_elements)
    }

    /// Builds sub-schedules from the rounds for each index, and assigns them to the lanes in turn (with a prelude: all to one).
    pub(crate) fn sub_schedules(&self, count: u64, mut rounds: impl FnMut(u64) -> Vec<Round>) -> Vec<SubSchedule> {
        let lanes = if self.has_prelude() { 1 } else { self.tuning.lanes };
        let lanes = (0..lanes).map(Lane).cycle();
        (0..count).zip(lanes).map(|(index, lane)| SubSchedule { lane, rounds: rounds(index) }).collect()
    }

    pub(crate) fn window(&self) -> usize {
        usize::from(self.tuning.window)
    }
}

fn check_tuning(work: &Work, tuning: &Tuning) -> Result<(), PlanError> {
    let (min, max) = (limits::CHUNK_BYTES_MIN as u64, limits::CHUNK_BYTES_MAX as u64);
    within("chunk_bytes", u64::from(tuning.chunk_bytes), min, max)?;
    within("lanes", u64::from(tuning.lanes), 1, limits::LANES_MAX as u64)?;
    within("window", u64::from(tuning.window), 1, limits::WINDOW_MAX as u64)?;
    within("element_bytes", u64::from(work.element_bytes), 1, u64::from(tuning.chunk_bytes))
}

fn check_work(topology: &SetTopology, work: &Work) -> Result<(), PlanError> {
    let (ranks_max, tensors_max) = match work.kind {
        WorkKind::Barrier => (limits::RANKS_MAX, 0),
        WorkKind::AllReduceTwoPass { .. } | WorkKind::AllReduceAdaptive => (limits::NARY_RANKS_MAX, 1),
        WorkKind::AllReduceNAry => (limits::NARY_RANKS_MAX, limits::BUCKET_TENSORS_MAX),
        WorkKind::AllToAll => (limits::ALL_TO_ALL_RANKS_MAX, limits::BUCKET_TENSORS_MAX),
        _ => (limits::RANKS_MAX, limits::BUCKET_TENSORS_MAX),
    };
    within("the number of ranks", topology.size() as u64, 1, ranks_max as u64)?;
    within("the number of tensors", work.tensors.len() as u64, 0, tensors_max as u64)?;
    match work.kind {
        WorkKind::AllReduceCoded { encoded_bytes } => {
            within("encoded_bytes", u64::from(encoded_bytes), 1, u64::from(work.element_bytes))?;
        }
        WorkKind::AllReduceByBlocks { block_elements, encoded_bytes } => {
            let block = u64::from(block_elements) * u64::from(work.element_bytes);
            within("the bytes of a block", block, 1, limits::PLUGIN_BLOCK_BYTES_MAX as u64)?;
            within("encoded_bytes", u64::from(encoded_bytes), 1, limits::PLUGIN_BLOCK_BYTES_MAX as u64)?;
        }
        WorkKind::AllReduceTwoPass { measures } => within("measures", u64::from(measures), 1, u64::from(MEASURES_MAX))?,
        _ => {}
    }
    if let Some(root) = work.kind.root()
        && topology.member_of(root).is_none()
    {
        return Err(PlanError::Root { root, set: topology.set });
    }
    let needed = work.kind.counts().number(topology.size());
    for (tensor, counts) in work.tensors.iter().enumerate() {
        if counts.len() != needed {
            return Err(PlanError::Counts { tensor, kind: work.kind.name(), given: counts.len(), needed });
        }
    }
    Ok(())
}

fn within(what: &'static str, given: u64, min: u64, max: u64) -> Result<(), PlanError> {
    if (min..=max).contains(&given) { Ok(()) } else { Err(PlanError::Limit { what, given, min, max }) }
}
