//! The wire format between sidecars: identities, data types, collectives, frames, control messages and limits.
//!
//! This is layer 0 of ronde: no sockets, no clock, no tasks. Everything that crosses a process or host boundary between
//! sidecars has its type here, is parsed once into a type that cannot be invalid, and is bounded by a constant of
//! [`limits`]. docs/PROTOCOL.md describes the same bytes in prose.

#![forbid(unsafe_code)]

pub mod codec;
pub mod collective;
pub mod control;
pub mod copying;
pub mod dtype;
pub mod failure;
pub mod frame;
pub mod ids;
mod kinds;
pub mod limits;
pub mod plugin;
pub mod record;
pub mod relay;
pub mod request;
pub mod schedule;
pub mod sidecars;
pub mod stream;
pub mod tuning;
pub mod world;

pub use codec::Codec;
pub use collective::{AnySource, Collective, Pair, ReduceOp, is_set_of_members_name, set_of_members_name};
pub use control::Control;
pub use dtype::DType;
pub use failure::{Blame, Cause, Failure, OPERATION_TIMEOUT, STALL_SHUTDOWN};
pub use frame::{Frame, FrameError, FrameHeader, FrameKind};
pub use ids::{
    Epoch, Incarnation, JobName, Lane, Member, NameError, OpId, Rank, RequestId, Seq, SetId, SidecarIndex, TensorName,
    WorkerNumber,
};
pub use plugin::{PluginCall, PluginUse, PluginValue, PluginWork};
pub use record::{Activity, Call, Exit, Record};
pub use relay::{Ascent, Enclosed};
pub use request::{Detail, Group, Request, Shape};
pub use schedule::{Invalidation, ScheduledBucket};
pub use sidecars::SidecarSet;
pub use tuning::{Algorithm, Tuning, TuningParameter};
pub use world::{ProcessSet, SetMember, SetTopology, World, WorldError};
