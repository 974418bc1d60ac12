//! The state of a sidecar at one moment, for status and metrics.

use std::time::Duration;

use ronde_engine::{ExecutorStats, Stats, Status};
use ronde_shm::ArenaUsage;
use ronde_transport::{LinkSecurity, PathStats, PortStats};
use ronde_wire::SidecarIndex;
use ronde_wire::control::Transport;

use crate::operation::lanes::LaneStats;
use crate::plugins::PluginStats;

/// The state of a sidecar at one moment.
pub(crate) struct Snapshot {
    /// Of the engine, for people.
    pub(crate) status: Status,
    /// Counters of the engine.
    pub(crate) engine: Stats,
    /// Counters of the control port.
    pub(crate) control: PortStats,
    /// Counters of each lane.
    pub(crate) lanes: Vec<LaneStats>,
    /// Counters of small operations, which the control thread performs.
    pub(crate) inline: ExecutorStats,
    /// Shared memory for results.
    pub(crate) results: ArenaUsage,
    /// Shared memory of live sessions' inputs.
    pub(crate) inputs_mapped_bytes: u64,
    /// Counters of plugins.
    pub(crate) plugins: PluginStats,
    /// Live sessions.
    pub(crate) sessions: usize,
    /// Those of them whose messages go over a ring.
    pub(crate) ring_sessions: usize,
    /// How long the sidecar has served.
    pub(crate) up: Duration,
    /// The control links that are up.
    pub(crate) paths: Vec<(SidecarIndex, PathStats)>,
    /// What links run over.
    pub(crate) transport: Transport,
    /// How they are protected.
    pub(crate) security: Vec<(SidecarIndex, LinkSecurity)>,
}
