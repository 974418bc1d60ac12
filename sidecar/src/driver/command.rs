//! Commands that other parts of the process send to the driver. Sessions have their own commands.

use std::sync::Arc;
use std::time::Duration;

use ronde_bootstrap::messages::WorkerExited;
use ronde_transport::Identity;
use tokio::sync::oneshot;

use crate::driver::snapshot::Snapshot;

/// A command for the control thread.
pub(crate) enum ControlCommand {
    /// A plugin that requests are parked for is loaded, or failed to load.
    PluginsAnswered,
    /// Use this certificate for links made from now on.
    Identity(Arc<Identity>),
    /// The process of a worker has ended.
    WorkerExited(WorkerExited),
    /// End when the workers that connected have left, or none connects within this time.
    EndWithWorkers(Duration),
    /// Report the state of everything.
    Snapshot(oneshot::Sender<Snapshot>),
}
