//! The settings of a sidecar: what the launcher gives, completed by documented defaults and checked once.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use ronde_transport::{Congestion, LinkOptions};
use ronde_wire::control::Transport;
use ronde_wire::{JobName, SidecarIndex, World, limits};

use crate::process::ports::PortChoice;
use ronde_bootstrap::messages::{Peer, Start};
use ronde_bootstrap::plugins::PluginSettings;
use ronde_bootstrap::web::WebSettings;

/// Checked settings.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The job.
    pub(crate) job: JobName,
    /// The trust domain of the job's identities.
    pub(crate) trust_domain: String,
    /// This sidecar.
    pub(crate) me: SidecarIndex,
    /// The addresses of all ports, at least one.
    pub(crate) addresses: Vec<IpAddr>,
    /// The ports.
    pub(crate) ports: PortChoice,
    /// Where the session directory is made.
    pub(crate) runtime_dir: Option<PathBuf>,
    /// What links run over.
    pub(crate) transport: Transport,
    /// How its connections over TCP keep to the way. Default: the host's, but none that paces.
    pub(crate) congestion: Congestion,
    /// Lanes to each peer. Default: one up to 4 cores, then one for 4 cores, at most 4.
    pub(crate) lanes: u16,
    /// Data threads: one for each lane, and more for operations that need no other sidecar: one for each core, at most 4.
    pub(crate) threads: u16,
    /// Silence after which a peer is dead. Default: [`limits::PEER_TIMEOUT_MS`].
    pub(crate) peer_timeout_ms: u64,
    /// How long links may take to come.
    pub(crate) start_timeout: Duration,
    /// Bytes of inputs, and of results, of one session. Default: 4 GiB.
    pub(crate) arena_bytes_max: u64,
    /// Bytes of one bucket. Default: [`limits::FUSION_THRESHOLD_BYTES`].
    pub(crate) fusion_threshold_bytes: u64,
    /// Bytes of a contribution up to which operations travel eagerly; 0 for none. Default: the engine's. The coordinator's
    /// counts.
    pub(crate) eager_bytes: Option<u32>,
    /// Whether operations that come again in every step are performed without being negotiated. The coordinator's counts.
    pub(crate) runs_ahead: bool,
    /// Tensors of a step, and requests, that are remembered because they come again. Default: the engine's.
    pub(crate) cache_capacity: Option<usize>,
    /// Whether an all-reduce begins among the ranks of a sidecar. The coordinator's counts.
    pub(crate) hierarchical_allreduce: bool,
    /// Age after which a tensor that waits for some ranks is reported. Default: the engine's.
    pub(crate) stall_warning_ms: Option<u64>,
    /// Age after which such a tensor ends the epoch; 0 for never, the default.
    pub(crate) stall_shutdown_ms: u64,
    /// The plugins.
    pub(crate) plugins: PluginSettings,
    /// Whether the sidecar is told how its workers' processes end.
    pub(crate) tells_of_exits: bool,
    /// Where gRPC-Web is answered. Default: nowhere.
    pub(crate) web: Option<WebSettings>,
    /// Sidecars below one on the tree of control links. Default: [`limits::CONTROL_FAN_OUT`].
    pub(crate) control_fan_out: usize,
}

impl Settings {
    /// Checks what the launcher gave.
    ///
    /// # Errors
    /// When a value is out of its range, naming it.
    pub(crate) fn new(start: Start) -> anyhow::Result<Self> {
        let lanes = start.lanes.unwrap_or_else(default_lanes);
        ensure!(
            (1..=limits::LANES_MAX).contains(&usize::from(lanes)),
            "lanes = {lanes} is out of range; it must be 1 to {}",
            limits::LANES_MAX
        );
        let peer_timeout_ms = start.peer_timeout_ms.unwrap_or(limits::PEER_TIMEOUT_MS);
        ensure!(
            peer_timeout_ms > limits::SUSPECT_MS,
            "peer_timeout = {peer_timeout_ms} ms is too short; silence is only suspect for the first {} ms",
            limits::SUSPECT_MS
        );
        ensure!(
            (start.sidecar as usize) < limits::SIDECARS_MAX,
            "sidecar = {} is out of range; indices are below {}",
            start.sidecar,
            limits::SIDECARS_MAX
        );
        let addresses = start.addresses.len();
        ensure!(
            (1..=limits::ADDRESSES_MAX).contains(&addresses),
            "a sidecar listens on 1 to {} addresses, not {addresses}",
            limits::ADDRESSES_MAX
        );
        let control_fan_out = start.control_fan_out.unwrap_or(limits::CONTROL_FAN_OUT);
        ensure!(
            (1..=limits::SIDECARS_MAX).contains(&control_fan_out),
            "control_fan_out = {control_fan_out} is out of range; it must be 1 to {}",
            limits::SIDECARS_MAX
        );
        Ok(Self {
            job: start.job,
            trust_domain: start.trust_domain,
            me: SidecarIndex(start.sidecar),
            addresses: start.addresses,
            ports: match (start.port, start.ports) {
                (Some(port), _) => PortChoice::From(port),
                (None, Some(range)) => PortChoice::Within(range),
                (None, None) => PortChoice::Any,
            },
            runtime_dir: start.runtime_dir,
            transport: start.transport,
            congestion: start.tcp_congestion.map_or(Ok(Congestion::Auto), |name| name.parse())?,
            lanes,
            threads: lanes.max(default_threads()),
            peer_timeout_ms,
            start_timeout: Duration::from_millis(start.start_timeout_ms),
            arena_bytes_max: start.arena_bytes_max.unwrap_or(ARENA_BYTES_MAX),
            fusion_threshold_bytes: start.fusion_threshold_bytes.unwrap_or(limits::FUSION_THRESHOLD_BYTES),
            eager_bytes: start.eager_bytes,
            runs_ahead: start.run_ahead.unwrap_or(true),
            cache_capacity: start.cache_capacity,
            hierarchical_allreduce: start.hierarchical_allreduce.unwrap_or(true),
            stall_warning_ms: start.stall_warning_ms,
            stall_shutdown_ms: start.stall_shutdown_ms.unwrap_or(0),
            plugins: start.plugins,
            tells_of_exits: start.tells_of_exits,
            web: start.web.map(WebSettings::checked).transpose()?,
            control_fan_out,
        })
    }

    /// What the links to other sidecars are like.
    pub(crate) fn link_options(&self) -> LinkOptions {
        let (start_timeout, congestion) = (self.start_timeout, self.congestion.clone());
        LinkOptions { start_timeout, congestion, ..LinkOptions::default() }
    }

    /// Bytes of chunks for operations not yet admitted that one lane holds for one peer.
    pub(crate) fn early_grant_bytes(&self) -> u64 {
        limits::EARLY_BUFFER_BYTES as u64 / u64::from(self.lanes)
    }
}

/// The membership: for each rank its sidecar's index, and where the sidecars are.
///
/// # Errors
/// When it is not well formed, or a sidecar with ranks has no address.
pub(crate) fn world_of(placement: &[u32], peers: &[Peer], me: SidecarIndex) -> anyhow::Result<World> {
    let placement = placement.iter().map(|index| SidecarIndex(*index)).collect();
    let world = World::new(placement).context("the placement of ranks is not usable")?;
    ensure!(!world.ranks_of(me).is_empty(), "no rank is placed on {me}; a sidecar without ranks has nothing to do");
    for sidecar in world.sidecars() {
        let known = peers.iter().any(|peer| peer.sidecar == sidecar.0);
        ensure!(known, "{sidecar} serves ranks, but there is no address for it");
    }
    Ok(world)
}

fn default_lanes() -> u16 {
    u16::try_from(cores() / CORES_PER_LANE).unwrap_or(1).clamp(1, DEFAULT_LANES_MAX)
}

fn default_threads() -> u16 {
    u16::try_from(cores()).map_or(DEFAULT_LANES_MAX, |cores| cores.min(DEFAULT_LANES_MAX))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// A lane keeps about two cores busy, sealing on one side and opening on the other; the training needs the rest.
const CORES_PER_LANE: usize = 4;
/// Beyond this many the control thread and memory are the limit.
const DEFAULT_LANES_MAX: u16 = 4;
/// Address space, not memory: pages are taken when first used, and a limit met is an error for the user.
const ARENA_BYTES_MAX: u64 = 4 << 30;
