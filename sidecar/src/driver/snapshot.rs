//! The state of a sidecar at one moment, for status and metrics.

use std::time::Duration;

use ronde_bootstrap::streams::{self, LostLines};
use ronde_engine::{ExecutorStats, Stats, Status};
use ronde_shm::ArenaUsage;
use ronde_transport::{LinkSecurity, PathStats, Port, PortStats};
use ronde_wire::SidecarIndex;
use ronde_wire::control::Transport;

use super::Driver;
use crate::operation::lanes::{LaneHandle, LaneStats};
use crate::plugins::PluginStats;

/// The state of a sidecar at one moment.
pub(crate) struct Snapshot {
    /// The engine's state for display.
    pub(crate) status: Status,
    /// Counters of the engine.
    pub(crate) engine: Stats,
    /// Counters of the control port.
    pub(crate) control: PortStats,
    /// Counters of each lane.
    pub(crate) lanes: Vec<LaneStats>,
    /// Counters of inline execution.
    pub(crate) inline: ExecutorStats,
    /// Shared memory for results.
    pub(crate) results: ArenaUsage,
    /// Shared memory of live sessions' inputs.
    pub(crate) inputs_mapped_bytes: u64,
    /// Counters of plugins.
    pub(crate) plugins: PluginStats,
    /// Live sessions.
    pub(crate) sessions: usize,
    /// The sessions whose messages use a ring.
    pub(crate) ring_sessions: usize,
    /// Log lines that were not written.
    pub(crate) lost_log_lines: LostLines,
    /// How long the sidecar has served.
    pub(crate) up: Duration,
    /// The control links that are up.
    pub(crate) paths: Vec<(SidecarIndex, PathStats)>,
    /// The transport of the links.
    pub(crate) transport: Transport,
    /// Their TLS parameters.
    pub(crate) security: Vec<(SidecarIndex, LinkSecurity)>,
}

impl Driver {
    /// Collects the state at this moment; lanes that do not answer in time count as zeros.
    pub(crate) fn snapshot(&self) -> impl Future<Output = Snapshot> + Send + use<> {
        let asked: Vec<_> = self.execution.lanes.iter().map(LaneHandle::ask_stats).collect();
        let protected = |peer| Some((peer, self.links.control.security(peer)?));
        let mut snapshot = Snapshot {
            status: self.engine.status(self.now()),
            engine: self.engine.stats().clone(),
            control: self.links.control.stats(),
            lanes: Vec::with_capacity(asked.len()),
            inline: self.execution.inline.stats(),
            results: self.execution.operations.results().usage(),
            plugins: self.execution.plugins.stats(),
            sessions: self.clients.sessions.len(),
            ring_sessions: self.clients.sessions.with_ring(),
            lost_log_lines: streams::lost(),
            up: self.started.elapsed(),
            paths: self.links.control.paths(),
            transport: self.links.transport,
            security: self.world.sidecars().into_iter().filter_map(protected).collect(),
            inputs_mapped_bytes: self.clients.segments.mapped_bytes(),
        };
        async move {
            for answer in asked {
                let answer = tokio::time::timeout(STATS_TIMEOUT, answer).await;
                snapshot.lanes.push(answer.map(Result::unwrap_or_default).unwrap_or_default());
            }
            snapshot
        }
    }
}

/// How long a lane may take to report its counters.
const STATS_TIMEOUT: Duration = Duration::from_secs(1);
