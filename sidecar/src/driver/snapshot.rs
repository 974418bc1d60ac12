//! The state of a sidecar at one moment, for status and metrics.

use std::time::Duration;

use ronde_bootstrap::streams::{self, LostLines};
use ronde_engine::{ExecutorStats, Stats, Status};
use ronde_shm::{ArenaUsage, PciAddress};
use ronde_transport::{LinkSecurity, PathStats, Port, PortStats};
use ronde_wire::control::Transport;
use ronde_wire::{Rank, SidecarIndex};
use tokio::time::Instant;

use super::{Driver, GpuState};
use crate::operation::lanes::{GpuStats, LaneStats};
use crate::plugins::PluginStats;
use crate::session::gpu_use::GpuUse;
use crate::streams::StreamStats;

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
    /// Device memory that live sessions have passed.
    pub(crate) device_bytes: u64,
    /// Whether the sidecar uses GPUs.
    pub(crate) gpus: GpuState,
    /// How local workers use GPUs, and how they and earlier ones have used them together.
    pub(crate) gpu_uses: (Vec<(Rank, PciAddress, GpuUse)>, GpuUse),
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

impl Snapshot {
    /// Counters of the connections of NCCL's net plugin, of all lanes.
    pub(crate) fn streams(&self) -> StreamStats {
        self.lanes.iter().fold(StreamStats::default(), |sum, lane| sum.plus(lane.streams))
    }

    /// Counters of operations in device memory; zeros without GPUs.
    pub(crate) fn gpu_stats(&self) -> GpuStats {
        self.lanes.iter().find_map(|lane| lane.gpu).unwrap_or_default()
    }
}

impl Driver {
    /// Collects the state at this moment. Of lanes that do not answer in time it has the counters of their last answer.
    pub(crate) fn snapshot(&self) -> impl Future<Output = Snapshot> + Send + use<> {
        let deadline = Instant::now() + STATS_TIMEOUT;
        let asked: Vec<_> = self.execution.lanes.iter().map(|lane| lane.stats(deadline)).collect();
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
            device_bytes: self.clients.segments.device_bytes(),
            gpus: self.execution.device.gpus.clone(),
            gpu_uses: (self.clients.sessions.gpu_uses(), self.clients.sessions.gpu_total()),
        };
        async move {
            for stats in asked {
                snapshot.lanes.push(stats.await);
            }
            snapshot
        }
    }
}

/// How long the lanes on the host may take to report their counters, all together. They do so between two steps of their work,
/// which take far less, unless a plugin works.
const STATS_TIMEOUT: Duration = Duration::from_secs(1);
