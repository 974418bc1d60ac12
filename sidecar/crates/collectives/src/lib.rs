//! Collective algorithms as plans, the symbolic checker that proves them, the cost model that selects them, and the
//! kernels that reduce elements.
//!
//! Everything here is a pure function: [`plan()`] returns one member's part of a schedule, [`check()`] proves the parts of
//! all members together, [`select`] chooses how to cut a bucket, [`kernels`] compute on private blocks of bytes.
//! docs/ALGORITHMS.md lists the algorithms with their costs and sources.
//!
//! **Add an algorithm** with one file in `algorithms` and one line in its [table](algorithms::TABLE).
//!
//! # Terms
//! | term | meaning |
//! |---|---|
//! | bucket | the tensors that one operation moves together |
//! | shard | one of the `n` nearly equal runs into which an algorithm cuts each tensor, one per member; shard `i` of a bucket is shard `i` of all its tensors |
//! | block | what one member contributes to, or gets from, an operation with a count for each rank or pair |
//! | chunk | the run of a shard, block or bucket that one sub-schedule moves; it fits a frame |
//! | sub-schedule | an independent chain of rounds that moves one chunk of each shard or block; the sub-schedules of a lane are pipelined |
//! | round | local steps, then transfers that run concurrently |
//! | span | any run of elements of a bucket |

#![forbid(unsafe_code)]

pub mod algorithms;
pub mod check;
pub mod cost;
mod digest;
pub mod inputs;
pub mod kernels;
mod layout;
pub mod plan;
pub mod planner;

pub use check::{Proof, Violation, check, check_interleaved};
pub use cost::{Choice, CostModel, Cutting, algorithm_of, select, select_cut};
pub use digest::digest_input;
pub use inputs::PlanError;
pub use plan::{
    Counts, Form, Layout, Plan, Register, Round, Slice, Source, Span, Step, SubSchedule, Target, Transfer, Work,
    WorkKind,
};
pub use planner::plan;
