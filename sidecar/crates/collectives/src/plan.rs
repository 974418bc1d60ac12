//! Plans: what one member does for one bucket, as data.
//!
//! The planner is a pure function of (member, topology, work, tuning); the same inputs give every member its part of
//! one schedule. Plans know neither sockets nor buffers: the engine's executor runs a plan, and the symbolic
//! [checker](mod@crate::check) proves it.
//!
//! - A **bucket** is a list of tensors that one operation moves together. Its coordinates are elements
//!   `0..layout.elements`. **Slices** map them to tensors. Slices are ordered so that a shard of the bucket is one
//!   contiguous span, *and so that the reduction order of a tensor's elements does not depend on the bucket*: algorithms
//!   that treat shards differently (ring) cut every tensor into the same number of shards and lay out shard 0 of all
//!   tensors, then shard 1 of all tensors, and so on.
//! - A **sub-schedule** is an independent chain of rounds on about one chunk per shard. The sub-schedules of a lane start
//!   in order, and at most `window` of them are in flight. They overlap freely. This bounds private memory and pipelines
//!   the bucket. A chunk's header carries the sub-schedule's index (the field `sub-schedule` of the protocol).
//! - A **round** has local steps, executed first and in order, then transfers, which run concurrently. The next round
//!   begins when all transfers of this one are complete on this member.
//! - A **register** is a private buffer of a sub-schedule, as long as its last value.
//! - A **prelude** is a first sub-schedule that ends before any other begins. It measures the inputs for reducers that
//!   read them twice. Its conclusion belongs to the operation, and the other sub-schedules use it.

use ronde_wire::{Lane, Member, Rank, limits};

/// A run of elements in the bucket's coordinates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// The first element.
    pub start: u64,
    /// How many.
    pub len: u64,
}

impl Span {
    /// The first element after the span.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.start + self.len
    }

    /// Whether it has no elements.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns one of `count` nearly equal subspans. The first `len % count` are one element longer; some are empty
    /// when
    /// `count` exceeds the elements.
    ///
    /// # Panics
    /// When `count` is 0.
    #[must_use]
    pub const fn split(self, count: u64, index: u64) -> Self {
        let (each, longer) = (self.len / count, self.len % count);
        let (before, extra) = if index < longer { (index, 1) } else { (longer, 0) };
        Self { start: self.start + index * each + before, len: each + extra }
    }
}

/// Whose input a slice of the bucket holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// That of every rank: the elements are reduced.
    EveryRank,
    /// That of one rank.
    One(Rank),
}

/// Whose result a slice of the bucket belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// That of every rank; the ranks of one member share the memory of their result.
    EveryRank,
    /// That of one rank, in its own memory.
    One(Rank),
}

/// A contiguous run of one tensor within the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Its position in the bucket.
    pub span: Span,
    /// Which tensor of the bucket.
    pub tensor: u32,
    /// Whose input it is.
    pub source: Source,
    /// Whose result it is.
    pub target: Target,
    /// Its first element within the contributing tensor.
    pub input_start: u64,
    /// Its first element within the target's resulting tensor.
    pub output_start: u64,
}

/// The map from a bucket's coordinates to tensors, equal on all members.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Layout {
    /// Slices in ascending order without gaps; there are no empty ones.
    pub slices: Vec<Slice>,
    /// Elements of the whole bucket.
    pub elements: u64,
}

impl Layout {
    /// Returns the slices that overlap a span, each clipped to it.
    pub fn within(&self, span: Span) -> impl Iterator<Item = Slice> + '_ {
        let first = self.slices.partition_point(|slice| slice.span.end() <= span.start);
        self.slices[first..].iter().take_while(move |slice| slice.span.start < span.end()).map(move |slice| {
            let start = slice.span.start.max(span.start);
            let end = slice.span.end().min(span.end());
            let skipped = start - slice.span.start;
            Slice {
                span: Span { start, len: end - start },
                input_start: slice.input_start + skipped,
                output_start: slice.output_start + skipped,
                ..*slice
            }
        })
    }
}

/// A private buffer of a sub-schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Register(pub u16);

/// The most registers that a sub-schedule may name: two for each member of the largest set, and eight more. The
/// executor allocates those that a sub-schedule names.
#[allow(clippy::cast_possible_truncation, reason = "2,056, checked by the assertion below")]
pub const REGISTERS_MAX: u16 = (2 * limits::SIDECARS_MAX + 8) as u16;

const _: () = assert!(REGISTERS_MAX as usize == 2 * limits::SIDECARS_MAX + 8);

/// The most numbers that a two-pass reducer may measure for each rank.
#[allow(clippy::cast_possible_truncation, reason = "64")]
pub const MEASURES_MAX: u32 = limits::PLUGIN_MEASURES_MAX as u32;

/// The representation of a span in a register or chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// The elements.
    Values,
    /// The elements, encoded by the codec.
    Encoded,
    /// The prescaled elements of the span for each rank of the source member, ascending.
    EachRank,
    /// Measures of the source member: `span.len` numbers of type f64; `span.start` is 0.
    Measures,
}

/// A local step of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Loads this member's contribution to the span: for slices of every rank its ranks' prescaled values, reduced in
    /// rank order; otherwise the value of the one rank, which must be local.
    Contribute {
        /// The destination register.
        into: Register,
        /// The elements.
        span: Span,
    },
    /// Loads each local rank's prescaled values of the span, one rank after another ([`Form::EachRank`]).
    ContributeEach {
        /// The destination register.
        into: Register,
        /// The elements.
        span: Span,
    },
    /// Computes `op(left, right)` element by element into `into`, which is one of the two. The left operand holds the
    /// lower members' values, where that is defined.
    Reduce {
        /// The left operand.
        left: Register,
        /// The right operand.
        right: Register,
        /// The result.
        into: Register,
        /// The elements that both hold.
        span: Span,
    },
    /// Computes the n-ary reduction of all ranks' values, in rank order, into `into`. One register per member, from
    /// `first` on in member order, holds them ([`Form::EachRank`]); `into` is none of these.
    ReduceN {
        /// The register of member 0.
        first: Register,
        /// The result.
        into: Register,
        /// The elements that they hold.
        span: Span,
    },
    /// Divides the register by the number of ranks for an average, then multiplies it by the postscale.
    Finish {
        /// The register.
        register: Register,
        /// The elements that it holds.
        span: Span,
    },
    /// Replaces the register's values by their encoding ([`Form::Encoded`]).
    Encode {
        /// The register.
        register: Register,
        /// The elements that it holds.
        span: Span,
    },
    /// Decodes the register's elements into values.
    Decode {
        /// The register.
        register: Register,
        /// The elements that it holds.
        span: Span,
    },
    /// Adds the measures of the local ranks' inputs of the span to `into`: one number per local rank, ascending, and
    /// measure of the reducer. An empty register counts as zeros.
    MeasureOwn {
        /// The measures ([`Form::Measures`]).
        into: Register,
        /// The elements to measure.
        span: Span,
    },
    /// Adds the inner product of each pair of ranks' values of the span to `into`, as the upper triangle row by row, by
    /// position in the set. Registers are as for [`Step::ReduceN`].
    MeasureAll {
        /// The register of member 0.
        first: Register,
        /// The measures ([`Form::Measures`]).
        into: Register,
        /// The elements to measure.
        span: Span,
    },
    /// Makes the measures of all members, in registers from `first` on in member order, those of the operation, which
    /// its [`Step::ReduceN`]s use. It is the last step of a prelude.
    Conclude {
        /// The register of member 0.
        first: Register,
    },
    /// Writes the register's elements to their results, which are never read back. A slice with one target must have a
    /// local one.
    Publish {
        /// The source register.
        from: Register,
        /// The elements that it holds.
        span: Span,
    },
}

/// A transfer of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Sends the register's content to a peer; the register keeps it.
    Send {
        /// The receiver.
        to: Member,
        /// The source register.
        from: Register,
        /// The elements.
        span: Span,
        /// Their representation.
        form: Form,
    },
    /// Receives a peer's content into the register.
    Receive {
        /// The sender.
        from: Member,
        /// The destination register; no other transfer of the round uses it.
        into: Register,
        /// The elements.
        span: Span,
        /// Their representation.
        form: Form,
    },
}

/// One round of a sub-schedule.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Round {
    /// Local steps, executed first and in order.
    pub steps: Vec<Step>,
    /// Transfers, run concurrently after the steps, at most one send and one receive per peer. One with an empty span
    /// is performed as well. Sub-schedule and round number identify a transfer: a send and its receive are in the same
    /// sub-schedule and round of both plans.
    pub transfers: Vec<Transfer>,
}

/// An independent chain of rounds. Every member of the set has the same sub-schedules in the same order on the same
/// lanes, though a member may be idle in some of them. Round numbers are common to all members: a member that is idle
/// in a round has an empty one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubSchedule {
    /// The lane of all its transfers.
    pub lane: Lane,
    /// The rounds, in order; trailing empty rounds may be left out.
    pub rounds: Vec<Round>,
}

/// What one member does for one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The map from the bucket's coordinates to tensors.
    pub layout: Layout,
    /// The sub-schedules; a chunk's header names the index in this list.
    pub sub_schedules: Vec<SubSchedule>,
    /// Whether sub-schedule 0 is a prelude: it ends on this member before any other begins, and all are on one lane.
    pub prelude: bool,
    /// The most sub-schedules of one lane in flight; at least 1. Sub-schedules without work are skipped and do not
    /// count.
    pub window: usize,
}

impl Plan {
    /// The number of lanes in use, from lane 0 on; at least 1.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.sub_schedules.iter().map(|sub_schedule| usize::from(sub_schedule.lane.0) + 1).max().unwrap_or(1)
    }
}

/// The operation on a bucket's tensors, agreed by all members.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum WorkKind {
    /// Every rank gets the reduction, which is pairwise and associative but for rounding.
    AllReduce,
    /// An all-reduce with a codec: each source encodes once for each owner of a shard. The owner decodes, reduces in
    /// member order and encodes once for all members, itself included.
    AllReduceCoded {
        /// Bytes of an encoded element.
        encoded_bytes: u32,
    },
    /// An all-reduce with a codec that encodes blocks of elements: every tensor's shard is cut into blocks from its
    /// first element on, independently of the bucket, and each block is encoded separately.
    AllReduceByBlocks {
        /// Elements of a block; the last one of a shard may be shorter.
        block_elements: u32,
        /// The most bytes that an encoded block has.
        encoded_bytes: u32,
    },
    /// Every rank gets an n-ary reduction: it combines all ranks' values at once, so partial results do not exist.
    AllReduceNAry,
    /// An n-ary all-reduce after each rank's tensor has been measured separately. A bucket has one tensor.
    AllReduceTwoPass {
        /// Numbers for each rank: 1 to [`MEASURES_MAX`].
        measures: u32,
    },
    /// An n-ary all-reduce after the inner products of all pairs of ranks have been measured. A bucket has one tensor.
    AllReduceAdaptive,
    /// Every rank gets its share of the reduction.
    ReduceScatter,
    /// The root gets the reduction.
    Reduce {
        /// The global rank.
        root: Rank,
    },
    /// Every rank gets the root's tensor.
    Broadcast {
        /// The global rank.
        root: Rank,
    },
    /// Every rank gets all contributions in rank order of the set.
    AllGather,
    /// The root gets all contributions in rank order of the set.
    Gather {
        /// The global rank.
        root: Rank,
    },
    /// Every rank gets its share of the root's tensor.
    Scatter {
        /// The global rank.
        root: Rank,
    },
    /// Every rank gets its share of every rank's tensor, in rank order of the set.
    AllToAll,
    /// All ranks wait for each other; there are no tensors.
    Barrier,
}

/// A bucket of work: the part of a plan's inputs that comes from the requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Work {
    /// The operation.
    pub kind: WorkKind,
    /// Bytes of one element; chunk sizes are given in bytes.
    pub element_bytes: u32,
    /// The element counts of each tensor, by [`WorkKind::counts`].
    pub tensors: Vec<Vec<u64>>,
}

/// The number of element counts that a tensor of a bucket has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// One: all contributions and results are equally long.
    One,
    /// One for each rank of the set, in rank order: of its contribution (all-gather, gather) or result (reduce-scatter,
    /// scatter).
    EachRank,
    /// One from each rank to each rank of the set, those of the lowest sender first.
    EachPair,
}

impl Counts {
    /// How many counts a tensor has in a set of `ranks` ranks.
    #[must_use]
    pub const fn number(self, ranks: usize) -> usize {
        match self {
            Self::One => 1,
            Self::EachRank => ranks,
            Self::EachPair => ranks * ranks,
        }
    }
}

impl WorkKind {
    /// The name in messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllReduceCoded { .. } => "coded all-reduce",
            Self::AllReduceByBlocks { .. } => "all-reduce by blocks",
            Self::AllReduceNAry => "n-ary all-reduce",
            Self::AllReduceTwoPass { .. } => "two-pass all-reduce",
            Self::AllReduceAdaptive => "adaptive all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::Reduce { .. } => "reduce",
            Self::Broadcast { .. } => "broadcast",
            Self::AllGather => "all-gather",
            Self::Gather { .. } => "gather",
            Self::Scatter { .. } => "scatter",
            Self::AllToAll => "all-to-all",
            Self::Barrier => "barrier",
        }
    }

    /// How many counts each tensor has.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        match self {
            Self::AllGather | Self::Gather { .. } | Self::ReduceScatter | Self::Scatter { .. } => Counts::EachRank,
            Self::AllToAll => Counts::EachPair,
            _ => Counts::One,
        }
    }

    /// Whether it combines ranks' values, so that results are finished.
    #[must_use]
    pub const fn reduces(&self) -> bool {
        matches!(
            self,
            Self::AllReduce
                | Self::AllReduceCoded { .. }
                | Self::AllReduceByBlocks { .. }
                | Self::AllReduceNAry
                | Self::AllReduceTwoPass { .. }
                | Self::AllReduceAdaptive
                | Self::ReduceScatter
                | Self::Reduce { .. }
        )
    }

    /// Whether a codec encodes contributions and results.
    #[must_use]
    pub const fn is_coded(&self) -> bool {
        matches!(self, Self::AllReduceCoded { .. } | Self::AllReduceByBlocks { .. })
    }

    /// Whether it combines all ranks' values at once.
    #[must_use]
    pub const fn is_nary(&self) -> bool {
        matches!(self, Self::AllReduceNAry | Self::AllReduceTwoPass { .. } | Self::AllReduceAdaptive)
    }

    /// Whether a prelude measures the input.
    #[must_use]
    pub const fn measures(&self) -> bool {
        matches!(self, Self::AllReduceTwoPass { .. } | Self::AllReduceAdaptive)
    }

    /// The root, if it has one.
    #[must_use]
    pub const fn root(&self) -> Option<Rank> {
        match self {
            Self::Broadcast { root } | Self::Reduce { root } | Self::Gather { root } | Self::Scatter { root } => {
                Some(*root)
            }
            _ => None,
        }
    }
}

impl Work {
    /// The elements of all tensors together, saturating.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.tensors.iter().flatten().fold(0, |sum, count| sum.saturating_add(*count))
    }
}
