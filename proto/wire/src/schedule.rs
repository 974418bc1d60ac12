//! Schedules: the repeated operations of a training step, ordered once for all further steps.

use serde::{Deserialize, Serialize};

use crate::control::Order;
use crate::request::Group;

/// One bucket of a schedule: every iteration performs one such operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScheduledBucket {
    /// The operation; it carries no contributions and has no joined ranks.
    pub order: Order,
    /// The group of the requests for each tensor.
    pub groups: Vec<Option<Group>>,
}

/// Why a schedule is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Invalidation {
    /// A rank has submitted a later operation without an earlier one, and then nothing for a while.
    Order,
    /// A rank has submitted a request that is not in the schedule.
    Request,
    /// A request was refused by its sidecar, or withdrawn by its rank.
    Refusal,
    /// An operation takes so long that the coordinator has to find the missing rank.
    Delay,
    /// A rank closes its session.
    WorkerExit,
    /// The coordinator has other settings for the operations.
    Tuning,
}

impl Invalidation {
    /// All reasons.
    pub const ALL: [Self; 6] = [Self::Order, Self::Request, Self::Refusal, Self::Delay, Self::WorkerExit, Self::Tuning];

    /// The name in status, metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Order => "order",
            Self::Request => "request",
            Self::Refusal => "refusal",
            Self::Delay => "delay",
            Self::WorkerExit => "worker_exit",
            Self::Tuning => "tuning",
        }
    }
}
