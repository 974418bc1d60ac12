//! The settings of a sidecar: the launcher's, completed by documented defaults and checked once.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use ronde_bootstrap::messages::{Peer, Start};
use ronde_bootstrap::tuning::Tuning;
use ronde_transport::LinkOptions;
use ronde_wire::{JobName, SidecarIndex, World, limits};

use crate::process::ports::PortChoice;

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
    /// How long connecting the links may take.
    pub(crate) start_timeout: Duration,
    /// The settings that the launcher and the sidecar share.
    pub(crate) tuning: Tuning,
    /// Whether the launcher reports how workers' processes end.
    pub(crate) exits_are_reported: bool,
    /// The fan-out of the tree of control links. Default: [`limits::CONTROL_FAN_OUT`].
    pub(crate) control_fan_out: usize,
}

impl Settings {
    /// Checks the settings of the launcher.
    ///
    /// # Errors
    /// When a value is out of range; the error names it.
    pub(crate) fn new(start: Start) -> anyhow::Result<Self> {
        start.tuning.check()?;
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
            start_timeout: Duration::from_millis(start.start_timeout_ms),
            tuning: start.tuning,
            exits_are_reported: start.exits_are_reported,
            control_fan_out,
        })
    }

    /// Returns the options of the links to other sidecars.
    pub(crate) fn link_options(&self) -> LinkOptions {
        let (start_timeout, congestion) = (self.start_timeout, self.tuning.tcp_congestion.clone());
        LinkOptions { start_timeout, congestion, ..LinkOptions::default() }
    }

    /// Returns the bytes of chunks for operations not yet admitted that one lane holds for one peer.
    pub(crate) fn early_grant_bytes(&self) -> u64 {
        limits::EARLY_BUFFER_BYTES as u64 / u64::from(self.tuning.lanes())
    }
}

/// Builds the membership: for each rank its sidecar's index, and the sidecars' addresses.
///
/// # Errors
/// When it is malformed, or a sidecar with ranks has no address.
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
