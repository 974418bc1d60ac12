//! From inputs to a plan: checks them and hands them to the algorithm.

use ronde_wire::{Algorithm, Lane, Member, Rank, SetId, SetTopology, Tuning, limits};

use crate::algorithms::{
    Predicted, binomial_broadcast, binomial_reduce, direct, dissemination, halving_doubling, linear_gather,
    linear_scatter, local, pairwise_alltoall, recursive_doubling, ring_allgather, ring_allreduce, ring_reduce_scatter,
};
use crate::plan::{Counts, MEASURES_MAX, Plan, Round, SubSchedule, Work, WorkKind};

/// Bytes that a step of a prelude measures at once, where it needs no transfer. It does not depend on the tuning, because the order of the sums that it
/// makes does not either.
pub const MEASURED_BYTES: u64 = 1 << 20;

/// The most sub-schedules that a plan may have: 2^20 chunks of 64 KiB are 64 GiB for each shard. Bounds the memory of a plan.
pub const SUB_SCHEDULES_MAX: u64 = 1 << 20;
/// Blocks of an operation with a codec from a plugin: each has a sub-schedule of its own, of about a kilobyte.
pub const BLOCKS_MAX: u64 = 1 << 18;

/// Inputs that no plan exists for. All of them were checked by whoever ordered the operation, so they are bugs of ours
/// or of the peer that ordered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The member is not one of the topology's.
    #[error("{me} does not exist among {members} members of the set; plan for 0 to {members} exclusively")]
    Member {
        /// Who asked.
        me: Member,
        /// How many there are.
        members: usize,
    },
    /// The algorithm does not perform this kind of work, or not with so many members.
    #[error("{algorithm} does not perform {kind} over {members} members; order another algorithm")]
    Combination {
        /// What the tuning names.
        algorithm: Algorithm,
        /// What is to be done.
        kind: &'static str,
        /// How many members there are.
        members: usize,
    },
    /// A number of the inputs is out of its bounds.
    #[error("{what} is {given}, which is not within {min} to {max}")]
    Limit {
        /// What the number is.
        what: &'static str,
        /// What was given.
        given: u64,
        /// The least that is allowed.
        min: u64,
        /// The most that is allowed.
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
        /// Which tensor of the bucket.
        tensor: usize,
        /// What is to be done.
        kind: &'static str,
        /// How many counts it has.
        given: usize,
        /// How many it needs.
        needed: usize,
    },
}

/// The part of one member in the schedule for a bucket.
///
/// A pure function: all members that give the same topology, work and tuning get parts that fit together, which
/// [`crate::digest_input`] lets them verify. An element's order of reduction depends on topology, algorithm and its
/// tensor's element count only: not on chunk size, lanes, window or the other tensors of the bucket.
///
/// # Errors
/// [`PlanError`] when the inputs contradict each other or break a limit.
pub fn plan(me: Member, topology: &SetTopology, work: &Work, tuning: &Tuning) -> Result<Plan, PlanError> {
    let members = topology.len();
    if me.index() >= members {
        return Err(PlanError::Member { me, members });
    }
    let inputs = Inputs::new(topology, work, tuning)?;
    let plan = match choose(&inputs)? {
        Planner::Local => local::plan(&inputs),
        Planner::RingAllReduce => ring_allreduce::plan(me, &inputs),
        Planner::RecursiveDoubling => recursive_doubling::plan(me, &inputs),
        Planner::HalvingDoubling => halving_doubling::plan(me, &inputs),
        Planner::RingReduceScatter => ring_reduce_scatter::plan(me, &inputs),
        Planner::BinomialReduce => binomial_reduce::plan(me, &inputs),
        Planner::BinomialBroadcast => binomial_broadcast::plan(me, &inputs),
        Planner::RingAllGather => ring_allgather::plan(me, &inputs),
        Planner::LinearGather => linear_gather::plan(me, &inputs),
        Planner::LinearScatter => linear_scatter::plan(me, &inputs),
        Planner::PairwiseAllToAll => pairwise_alltoall::plan(me, &inputs),
        Planner::Direct => direct::plan(me, &inputs),
        Planner::Dissemination => dissemination::plan(me, &inputs),
    };
    Ok(plan)
}

/// What the algorithm's closed form says about the plans of all members: rounds, bytes sent and reduced.
///
/// # Errors
/// [`PlanError`] when the inputs contradict each other or break a limit.
pub fn predicted(topology: &SetTopology, work: &Work, tuning: &Tuning) -> Result<Predicted, PlanError> {
    let inputs = Inputs::new(topology, work, tuning)?;
    Ok(match choose(&inputs)? {
        Planner::Local => local::predicted(&inputs),
        Planner::RingAllReduce => ring_allreduce::predicted(&inputs),
        Planner::RecursiveDoubling => recursive_doubling::predicted(&inputs),
        Planner::HalvingDoubling => halving_doubling::predicted(&inputs),
        Planner::RingReduceScatter => ring_reduce_scatter::predicted(&inputs),
        Planner::BinomialReduce => binomial_reduce::predicted(&inputs),
        Planner::BinomialBroadcast => binomial_broadcast::predicted(&inputs),
        Planner::RingAllGather => ring_allgather::predicted(&inputs),
        Planner::LinearGather => linear_gather::predicted(&inputs),
        Planner::LinearScatter => linear_scatter::predicted(&inputs),
        Planner::PairwiseAllToAll => pairwise_alltoall::predicted(&inputs),
        Planner::Direct => direct::predicted(&inputs),
        Planner::Dissemination => dissemination::predicted(&inputs),
    })
}

/// The checked inputs of every algorithm.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    pub(crate) topology: &'a SetTopology,
    pub(crate) work: &'a Work,
    pub(crate) tuning: &'a Tuning,
    /// Elements that a chunk may have; at least 1.
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
            // Each tensor's longest shard has blocks of its own.
            let blocks = |count: &u64| count.div_ceil(topology.len() as u64).div_ceil(u64::from(block_elements));
            let sub_schedules = work.tensors.iter().flatten().map(blocks).fold(0, u64::saturating_add);
            within("the number of blocks", sub_schedules, 0, BLOCKS_MAX)?;
        }
        if work.kind.is_nary() {
            // Ranks' values lie side by side, and sub-schedules cut shards.
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

    /// The single count of each tensor, for kinds that have one.
    pub(crate) fn counts(&self) -> Vec<u64> {
        self.work.tensors.iter().flatten().copied().collect()
    }

    /// Whether the plan has a prelude: where something is measured, and there is something.
    pub(crate) fn has_prelude(&self) -> bool {
        self.work.kind.measures() && self.work.elements() > 0
    }

    /// Elements that a step of a prelude measures at once, when a register holds so many values for each; at least 1.
    pub(crate) fn measured_elements(&self, values_each: u64) -> u64 {
        (MEASURED_BYTES / (values_each * u64::from(self.work.element_bytes))).max(1)
    }

    pub(crate) fn bytes(&self, elements: u64) -> u64 {
        elements * u64::from(self.work.element_bytes)
    }

    /// How many sub-schedules are needed so that no part of a block of `longest` elements is larger than a chunk.
    pub(crate) fn sub_schedule_count(&self, longest: u64) -> u64 {
        longest.div_ceil(self.chunk_elements)
    }

    /// Sub-schedules over lanes in turn, all on one where there is a prelude, each with the rounds that belong to its index.
    pub(crate) fn sub_schedules(&self, count: u64, mut rounds: impl FnMut(u64) -> Vec<Round>) -> Vec<SubSchedule> {
        let lanes = if self.has_prelude() { 1 } else { self.tuning.lanes };
        let lanes = (0..lanes).map(Lane).cycle();
        (0..count).zip(lanes).map(|(index, lane)| SubSchedule { lane, rounds: rounds(index) }).collect()
    }

    pub(crate) fn window(&self) -> usize {
        usize::from(self.tuning.window)
    }
}

enum Planner {
    Local,
    RingAllReduce,
    RecursiveDoubling,
    HalvingDoubling,
    RingReduceScatter,
    BinomialReduce,
    BinomialBroadcast,
    RingAllGather,
    LinearGather,
    LinearScatter,
    PairwiseAllToAll,
    Direct,
    Dissemination,
}

/// With one member everything is local, and with several nothing is.
fn choose(inputs: &Inputs<'_>) -> Result<Planner, PlanError> {
    let alone = inputs.members() == 1;
    match (inputs.tuning.algorithm, &inputs.work.kind) {
        (Algorithm::Local, _) if alone => Ok(Planner::Local),
        (Algorithm::Ring, WorkKind::AllReduce) if !alone => Ok(Planner::RingAllReduce),
        (Algorithm::RecursiveDoubling, WorkKind::AllReduce) if !alone => Ok(Planner::RecursiveDoubling),
        (Algorithm::HalvingDoubling, WorkKind::AllReduce) if !alone => Ok(Planner::HalvingDoubling),
        (Algorithm::Ring, WorkKind::ReduceScatter) if !alone => Ok(Planner::RingReduceScatter),
        (Algorithm::BinomialTree, WorkKind::Reduce { .. }) if !alone => Ok(Planner::BinomialReduce),
        (Algorithm::BinomialTree, WorkKind::Broadcast { .. }) if !alone => Ok(Planner::BinomialBroadcast),
        (Algorithm::Ring, WorkKind::AllGather) if !alone => Ok(Planner::RingAllGather),
        (Algorithm::Linear, WorkKind::Gather { .. }) if !alone => Ok(Planner::LinearGather),
        (Algorithm::Linear, WorkKind::Scatter { .. }) if !alone => Ok(Planner::LinearScatter),
        (Algorithm::Pairwise, WorkKind::AllToAll) if !alone => Ok(Planner::PairwiseAllToAll),
        (
            Algorithm::Direct,
            WorkKind::AllReduceCoded { .. }
            | WorkKind::AllReduceByBlocks { .. }
            | WorkKind::AllReduceNAry
            | WorkKind::AllReduceTwoPass { .. }
            | WorkKind::AllReduceAdaptive,
        ) if !alone => Ok(Planner::Direct),
        (Algorithm::Dissemination, WorkKind::Barrier) if !alone => Ok(Planner::Dissemination),
        (algorithm, kind) => Err(PlanError::Combination { algorithm, kind: kind.name(), members: inputs.members() }),
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
    let needed = match work.kind.counts() {
        Counts::One => 1,
        Counts::EachRank => topology.size(),
        Counts::EachPair => topology.size() * topology.size(),
    };
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
