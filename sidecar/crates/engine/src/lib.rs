//! The pure engine of a sidecar: all decisions, without sockets, clocks or tasks.
//!
//! It has two state machines with the same interface (`handle_*` takes an event, `poll_*` returns what to do next):
//! - the [`Engine`] on the control thread negotiates, orders, admits and completes operations, and tracks liveness;
//! - an [`Executor`] for each lane, on a data thread, performs admitted plans chunk by chunk.
//!
//! The simulation runs a whole cluster of both in one thread under one seed.

#![forbid(unsafe_code)]

pub mod autotune;
pub mod engine;
pub mod event;
pub mod executor;
pub mod membership;
pub mod memory;
pub mod plugins;
mod relay;
pub mod trace;

pub use autotune::{AutotuneSample, AutotuneSettings, AutotuneStage, AutotuneStatus, Knobs};
pub use engine::{
    CostStatus, Engine, EngineConfig, EnginePhase, RunAhead, STATUS_ENTRIES_MAX, ScheduleStatus, Stats, Status,
};
pub use event::{
    Action, Admission, AdmittedPlugin, AdmittedRequest, AdmittedTensor, Arithmetic, Completion, Event, Time,
};
pub use executor::{Executor, ExecutorAction, ExecutorConfig, ExecutorStats, Phase, PrivateBytes, Violation};
pub use membership::{Busy, Memberships};
pub use memory::{Contributions, InputPlace, Memory, MemoryError, OutputPlace};
pub use plugins::{PluginFault, PluginSpan, Plugins, RankValues, Side, Stage};
pub use ronde_collectives::CostModel;
pub use trace::Trace;
