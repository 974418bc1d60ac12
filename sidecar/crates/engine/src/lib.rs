//! The pure engine: what a sidecar decides, without sockets, clocks or tasks.
//!
//! Two state machines of one grammar (`handle_*`: it happened; `poll_*`: what now):
//! - the [`Engine`] on the control thread negotiates, orders, admits and completes, and knows who is alive;
//! - an [`Executor`] for each lane, on a data thread, performs admitted plans chunk by chunk.
//!
//! A whole cluster of both runs in one thread under one seed in the project's simulation.

#![forbid(unsafe_code)]

pub mod engine;
pub mod event;
pub mod executor;
pub mod memory;
pub mod plugins;
mod relay;
pub mod trace;

pub use engine::{Engine, EngineConfig, EnginePhase, RunAhead, ScheduleStatus, Stats, Status};
pub use event::{
    Action, Admission, AdmittedPlugin, AdmittedRequest, AdmittedTensor, Arithmetic, Completion, Event, Time,
};
pub use executor::{Executor, ExecutorAction, ExecutorConfig, ExecutorStats, Phase, PrivateBytes, Violation};
pub use memory::{Contributions, InputPlace, Memory, MemoryError, OutputPlace};
pub use plugins::{PluginFault, PluginSpan, Plugins, RankValues, Side, Stage};
pub use trace::Trace;
