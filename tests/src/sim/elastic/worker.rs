//! A worker: it claims its number, reduces step after step within an epoch, and claims again after each end.

use ronde_wire::RequestId;

/// A worker by its number.
#[derive(Debug)]
pub(super) struct Worker {
    /// Its sidecar.
    pub(super) host: usize,
    /// Whether its process runs.
    pub(super) alive: bool,
    /// Counts its sessions.
    pub(super) session: u64,
    pub(super) state: WorkerState,
    /// The request of the current step.
    pub(super) request: Option<RequestId>,
    /// Steps of the current epoch.
    pub(super) step: u64,
    /// All steps.
    pub(super) steps: u64,
    /// When its last message arrives, so that messages keep their order.
    pub(super) last_us: u64,
    /// Whether it was notified of a change; it leaves after its step.
    pub(super) leaves: bool,
}

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkerState {
    /// Its process starts, or it returns.
    Away,
    /// It has claimed its number.
    Claimed,
    /// It takes part in an epoch.
    Training,
}

impl Worker {
    pub(super) fn new(host: usize) -> Self {
        Self {
            host,
            alive: true,
            session: 0,
            state: WorkerState::Away,
            request: None,
            step: 0,
            steps: 0,
            last_us: 0,
            leaves: false,
        }
    }
}
