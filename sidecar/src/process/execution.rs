//! What the control thread works with: what performs operations, the memory of their results, and the workers' sessions.

use std::collections::HashMap;
use std::sync::Arc;

use ronde_rpc::RankToken;
use ronde_wire::{WorkerNumber, World};

use crate::driver::membership::result_bytes_max;
use crate::driver::{Clients, Execution, Parked};
use crate::operation::lanes::LaneHandle;
use crate::operation::lanes::inline::InlineExecutor;
use crate::operation::results::Results;
use crate::operation::table::Operations;
use crate::plugins::Plugins;
use crate::process::gpus::GpuChoice;
use crate::process::settings::Settings;
use crate::session::segments::Segments;
use crate::session::table::Sessions;
use crate::streams::StreamGate;

/// What performs operations: the lanes, and the control thread for small ones.
pub(super) fn execution(
    settings: &Settings,
    results: Results,
    gpus: &GpuChoice,
    (lanes, plugins): (Vec<LaneHandle>, Arc<Plugins>),
) -> Execution {
    Execution {
        operations: Operations::new(results, lanes.len()),
        inline: InlineExecutor::new(settings.me),
        device: gpus.execution(lanes.len(), settings.tuning.hierarchical_allreduce()),
        lanes,
        plugins,
    }
}

/// The memory of results, which grows with use.
pub(super) fn results(settings: &Settings, world: &World, segments: &Segments) -> Results {
    let limit_bytes = result_bytes_max(settings.tuning.arena_bytes_max(), settings.me, world);
    Results::new(limit_bytes, world.ranks_of(settings.me), segments.clone())
}

/// The workers' sessions and their memory.
pub(super) fn clients(
    settings: &Settings,
    tokens: HashMap<WorkerNumber, RankToken>,
    (segments, streams): (Segments, StreamGate),
) -> Clients {
    Clients {
        sessions: Sessions::new(tokens),
        streams,
        segments,
        parked: Parked::default(),
        arena_bytes_max: settings.tuning.arena_bytes_max(),
        peer_timeout_ms: settings.tuning.peer_timeout_ms(),
    }
}
