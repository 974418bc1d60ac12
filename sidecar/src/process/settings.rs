//! The settings of a sidecar: the launcher's, completed by documented defaults and checked once.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use ronde_bootstrap::messages::Start;
use ronde_bootstrap::tuning::Tuning;
use ronde_transport::LinkOptions;
use ronde_wire::{JobName, SidecarIndex, limits};

use crate::process::ports::PortChoice;

/// Checked settings.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The job.
    pub(crate) job: JobName,
    /// The run of the job; empty if no launcher has started this sidecar.
    pub(crate) run: String,
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
    /// Whether the membership of the job may change.
    pub(crate) elastic: bool,
    /// After how long a worker that hangs is reported to the launcher; 0 for never.
    pub(crate) replace_stalled_ms: u64,
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
        ensure!(
            !start.elastic || start.tuning.web.settings()?.is_none(),
            "gRPC-Web (--web-listen) serves the ranks of the start, so it cannot be used in an elastic job"
        );
        let control_fan_out = start.control_fan_out.unwrap_or(limits::CONTROL_FAN_OUT);
        ensure!(
            (1..=limits::SIDECARS_MAX).contains(&control_fan_out),
            "control_fan_out = {control_fan_out} is out of range; it must be 1 to {}",
            limits::SIDECARS_MAX
        );
        Ok(Self {
            job: start.job,
            run: start.run,
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
            elastic: start.elastic,
            replace_stalled_ms: if start.elastic { start.replace_stalled_ms } else { 0 },
            control_fan_out,
        })
    }

    /// Returns how many sidecars the job may have at most, of which it has `now` at the start.
    pub(crate) fn sidecars_max(&self, now: usize) -> usize {
        if self.elastic { limits::SIDECARS_MAX } else { now }
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
