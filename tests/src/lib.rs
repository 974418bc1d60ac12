//! The library of the system tests: it starts, controls and observes real processes.

#![forbid(unsafe_code)]

pub mod closed_port;
pub mod cluster;
pub mod crew;
pub mod elastic_worker;
pub mod harness;
pub mod left_out;
pub mod probe;
pub mod programs;
pub mod raw;
pub mod regression;
pub mod script;
pub mod sim;
pub mod web;

/// The reductions that combine two values at a time.
pub(crate) const PAIRWISE: [ronde::ReduceOp; 8] = [
    ronde::ReduceOp::Sum,
    ronde::ReduceOp::Average,
    ronde::ReduceOp::Min,
    ronde::ReduceOp::Max,
    ronde::ReduceOp::Product,
    ronde::ReduceOp::BitAnd,
    ronde::ReduceOp::BitOr,
    ronde::ReduceOp::BitXor,
];
