//! The language of plans: what one member does for one bucket, as data.
//!
//! A planner is a pure function of (member, topology, work, tuning); the same inputs give every member its part of one
//! schedule. Nothing here knows sockets or buffers: the engine's executor performs a plan, the symbolic
//! [checker](mod@crate::check) proves it.
//!
//! - A **bucket** is a list of tensors that travel together. Its coordinates are elements `0..layout.elements`, cut into
//!   **slices** that say which part of which tensor lies there. Slices are ordered so that a shard of the bucket is one
//!   contiguous span, *and so that a tensor's elements meet the same reduction order whatever bucket they travel in*:
//!   planners that treat shards differently (ring) cut every tensor into the same number of shards and lay out shard 0
//!   of all tensors, then shard 1 of all tensors, and so on.
//! - A **sub-schedule** is an independent chain of rounds on a small part of the bucket (about a chunk per shard). Sub-schedules of a
//!   lane start in order, at most `window` at once; they overlap freely. That bounds private memory and gives pipelining.
//! - A **round** has local steps, done first and in order, then transfers, which proceed together. The next round begins
//!   when all transfers of this one are complete here.
//! - A **register** is a private buffer of a sub-schedule: a few per sub-schedule, each as long as what was last put into it.
//! - A **prelude** is a first sub-schedule that ends before any other begins. It measures the inputs for reducers that look twice
//!   at them: what it concludes belongs to the operation, and the other sub-schedules use it.

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
    /// The first element behind the span.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.start + self.len
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// One of `parts` nearly equal parts: the first `len % parts` are one element longer, some are empty when there are
    /// more parts than elements.
    ///
    /// # Panics
    /// When `parts` is 0.
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
    /// Every rank contributes to these elements; they are reduced.
    EveryRank,
    /// One rank provides them.
    One(Rank),
}

/// Whose result a slice of the bucket belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Every rank gets these elements; the ranks of one member share the memory of their result.
    EveryRank,
    /// One rank gets them, in a result of its own.
    One(Rank),
}

/// A contiguous part of one tensor within the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Where it lies in the bucket.
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

/// How a bucket's coordinates map to tensors. Equal on all members.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Layout {
    /// Slices in ascending order without gaps; empty slices are left out.
    pub slices: Vec<Slice>,
    /// Elements of the whole bucket.
    pub elements: u64,
}

impl Layout {
    /// The slices that overlap a span, each cut to it.
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

/// The most registers that a sub-schedule may name: two for each member of the largest set, and some to work with. An executor
/// makes room for those that a sub-schedule names.
#[allow(clippy::cast_possible_truncation, reason = "2,056, checked by the assertion below")]
pub const REGISTERS_MAX: u16 = (2 * limits::SIDECARS_MAX + 8) as u16;

const _: () = assert!(REGISTERS_MAX as usize == 2 * limits::SIDECARS_MAX + 8);

/// Numbers that a two-pass reducer may measure for each rank.
#[allow(clippy::cast_possible_truncation, reason = "64")]
pub const MEASURES_MAX: u32 = limits::PLUGIN_MEASURES_MAX as u32;

/// What a register holds of a span, and a chunk carries of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// The elements.
    Values,
    /// The elements as the codec encodes them.
    Encoded,
    /// For each rank of the member they come from, ascending: the rank's prescaled elements of the span.
    EachRank,
    /// Measures of the member they come from: `span.len` numbers of type f64, where `span.start` is 0.
    Measures,
}

/// A local step of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The register becomes this member's contribution to the span: its ranks' values, prescaled, reduced in rank order
    /// for slices of every rank; the value of the one rank otherwise, which must be local.
    Contribute {
        /// Where to.
        into: Register,
        /// Which elements.
        span: Span,
    },
    /// The register becomes each local rank's values of the span, prescaled, one rank after another ([`Form::EachRank`]).
    ContributeEach {
        /// Where to.
        into: Register,
        /// Which elements.
        span: Span,
    },
    /// `into` becomes `op(left, right)` element by element; `into` is one of the two. The left operand is the one that
    /// holds the lower members' values, where that is defined.
    Reduce {
        /// The left operand.
        left: Register,
        /// The right operand.
        right: Register,
        /// The result.
        into: Register,
        /// Which elements both hold.
        span: Span,
    },
    /// `into` becomes the n-ary reduction of all ranks' values, in rank order. As many registers from `first` on as there
    /// are members hold them in member order ([`Form::EachRank`]); `into` is none of them.
    ReduceN {
        /// The register of member 0.
        first: Register,
        /// The result.
        into: Register,
        /// Which elements they hold.
        span: Span,
    },
    /// The register is divided by the number of ranks for an average, then multiplied by the postscale.
    Finish {
        /// Which register.
        register: Register,
        /// Which elements it holds.
        span: Span,
    },
    /// The register's values become what the codec encodes them as ([`Form::Encoded`]).
    Encode {
        /// Which register.
        register: Register,
        /// Which elements it holds.
        span: Span,
    },
    /// The register's encoded elements become values again.
    Decode {
        /// Which register.
        register: Register,
        /// Which elements it holds.
        span: Span,
    },
    /// Adds to the measures in `into` what the local ranks' own inputs of the span say: for each local rank, ascending, for
    /// each measure of the reducer one number. A register that holds nothing yet counts as zeros.
    MeasureOwn {
        /// The measures ([`Form::Measures`]).
        into: Register,
        /// Which elements are measured.
        span: Span,
    },
    /// Adds to the measures in `into` what all ranks' values of the span say together: the inner product of each pair of
    /// ranks, as the upper triangle row by row, by position in the set. Registers as for [`Step::ReduceN`].
    MeasureAll {
        /// The register of member 0.
        first: Register,
        /// The measures ([`Form::Measures`]).
        into: Register,
        /// Which elements are measured.
        span: Span,
    },
    /// The measures of all members, in registers from `first` on in member order, become the operation's: what its
    /// [`Step::ReduceN`]s reduce by. Once, as the last step of a prelude.
    Conclude {
        /// The register of member 0.
        first: Register,
    },
    /// The register's elements are written to the results that they belong to, which are never read back. Slices with one
    /// target must have a local one.
    Publish {
        /// Where from.
        from: Register,
        /// Which elements it holds.
        span: Span,
    },
}

/// A transfer of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// What the register holds goes to a peer; the register keeps it.
    Send {
        /// The receiver.
        to: Member,
        /// Where from.
        from: Register,
        /// Which elements.
        span: Span,
        /// What of them.
        form: Form,
    },
    /// The register becomes what a peer sends.
    Receive {
        /// The sender.
        from: Member,
        /// Where to; no other transfer of the round uses this register.
        into: Register,
        /// Which elements.
        span: Span,
        /// What of them.
        form: Form,
    },
}

/// One round of a sub-schedule.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Round {
    /// Done first, in order.
    pub steps: Vec<Step>,
    /// Then these, together, each of them performed even when its span is empty. At most one send and one receive per peer. The sender's sub-schedule and round numbers identify
    /// the transfer at the receiver: matching transfers stand in the same sub-schedule and round of both plans.
    pub transfers: Vec<Transfer>,
}

/// An independent chain of rounds. Every member of the set has the same number of sub-schedules in the same order on the same
/// lanes, though a member may have nothing to do in some of them; round numbers are global to the sub-schedule, so a member
/// that is idle in a round has an empty one.
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
    /// How the bucket's coordinates map to tensors.
    pub layout: Layout,
    /// The sub-schedules; a chunk's header names the index in this list.
    pub sub_schedules: Vec<SubSchedule>,
    /// Whether the first sub-schedule ends here before any other begins. Then all sub-schedules are on one lane.
    pub prelude: bool,
    /// How many sub-schedules of one lane may be in flight at once; at least 1. A sub-schedule that has nothing to do is skipped
    /// and does not count.
    pub window: usize,
}

impl Plan {
    /// How many lanes take part, from the first one on; at least 1.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.sub_schedules.iter().map(|sub_schedule| usize::from(sub_schedule.lane.0) + 1).max().unwrap_or(1)
    }
}

/// What a bucket's tensors need, agreed by all members.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum WorkKind {
    /// Every rank gets the reduction, which is pairwise and associative but for rounding.
    AllReduce,
    /// The same with a codec: each source encodes once for each owner of a shard, which decodes, reduces in member order
    /// and encodes once for all, itself included.
    AllReduceCoded {
        /// Bytes of an encoded element.
        encoded_bytes: u32,
    },
    /// The same with a codec that looks at many elements at once: every tensor's shard is cut into blocks from its first
    /// element on, whatever else is in the bucket, and each of them is encoded by itself.
    AllReduceByBlocks {
        /// Elements of a block; the last one of a shard may be shorter.
        block_elements: u32,
        /// The most bytes that an encoded block has.
        encoded_bytes: u32,
    },
    /// Every rank gets the reduction, which takes all ranks' values at once: nothing is reduced before.
    AllReduceNAry,
    /// The same, after each rank's tensor has been measured by itself. One tensor in a bucket.
    AllReduceTwoPass {
        /// Numbers for each rank: 1 to [`MEASURES_MAX`].
        measures: u32,
    },
    /// The same, after the inner products of all pairs of ranks have been measured. One tensor in a bucket.
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
    /// Nothing but waiting for each other; no tensors.
    Barrier,
}

/// A bucket of work: the part of a plan's inputs that comes from the requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Work {
    /// What to do.
    pub kind: WorkKind,
    /// Bytes of one element; chunk sizes are given in bytes.
    pub element_bytes: u32,
    /// For each tensor its element counts, by [`WorkKind::counts`].
    pub tensors: Vec<Vec<u64>>,
}

/// How many element counts a tensor of a bucket has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// One: all contributions and results are equally long.
    One,
    /// One for each rank of the set in rank order: what it contributes (all-gather, gather) or gets (reduce-scatter,
    /// scatter).
    EachRank,
    /// From each rank to each rank of the set, those of the lowest sender first.
    EachPair,
}

impl WorkKind {
    /// The name in messages and reasons.
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

    /// Whether ranks' values are combined: then results are finished.
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

    /// Whether contributions and results are encoded on their way.
    #[must_use]
    pub const fn is_coded(&self) -> bool {
        matches!(self, Self::AllReduceCoded { .. } | Self::AllReduceByBlocks { .. })
    }

    /// Whether all ranks' values are combined at once, so that nothing is reduced before.
    #[must_use]
    pub const fn is_nary(&self) -> bool {
        matches!(self, Self::AllReduceNAry | Self::AllReduceTwoPass { .. } | Self::AllReduceAdaptive)
    }

    /// Whether the input is measured first, in a prelude.
    #[must_use]
    pub const fn measures(&self) -> bool {
        matches!(self, Self::AllReduceTwoPass { .. } | Self::AllReduceAdaptive)
    }

    /// The root, where there is one.
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
    /// Elements of all tensors together; saturates.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.tensors.iter().flatten().fold(0, |sum, count| sum.saturating_add(*count))
    }
}
