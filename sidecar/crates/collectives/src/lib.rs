//! Collective algorithms as plans, the symbolic checker that proves them, the cost model that selects them, and the
//! kernels that reduce elements.

#![forbid(unsafe_code)]

pub mod plan;

pub use plan::{Layout, Plan, Register, Round, Slice, Source, Span, Step, Strand, Transfer, Work, WorkKind};
