//! Collective algorithms as plans, the symbolic checker that proves them, the cost model that selects them, and the
//! kernels that reduce elements.
//!
//! Everything here is a pure function: [`plan()`] gives one member its part of a schedule, [`check()`] proves the parts of
//! all members together, [`select`] chooses how to cut a bucket, [`kernels`] compute on private blocks of bytes. The
//! algorithms, their costs and their sources are listed in docs/ALGORITHMS.md.

#![forbid(unsafe_code)]

pub mod algorithms;
pub mod check;
pub mod cost;
mod digest;
pub mod kernels;
mod layout;
pub mod plan;
pub mod planner;

pub use check::{Proof, Violation, check, check_interleaved};
pub use cost::{Choice, CostModel, algorithm_of, select};
pub use digest::digest_input;
pub use plan::{
    Counts, Form, Layout, Plan, Register, Round, Slice, Source, Span, Step, SubSchedule, Target, Transfer, Work,
    WorkKind,
};
pub use planner::{PlanError, plan};
