//! Commands that other parts of the process send to the driver. Sessions have their own commands.

use std::sync::Arc;

use ronde_bootstrap::messages::ToSidecar;
use ronde_transport::Identity;
use tokio::sync::oneshot;

use crate::driver::snapshot::Snapshot;
use crate::flight::FlightSnapshot;

/// A command for the control thread.
pub(crate) enum ControlCommand {
    /// A plugin that requests are parked for is loaded, or failed to load.
    PluginsAnswered,
    /// Use this certificate for links made from now on.
    Identity(Arc<Identity>),
    /// A message of the launcher after the first two.
    Launcher(Box<ToSidecar>),
    /// Answer, to show that the control thread runs.
    Ping(oneshot::Sender<()>),
    /// Report the state of everything.
    Snapshot(oneshot::Sender<Snapshot>),
    /// Copy what the flight recorder has; `None` when it is off.
    Flight(oneshot::Sender<Option<FlightSnapshot>>),
}
