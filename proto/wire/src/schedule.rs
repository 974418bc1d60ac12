//! Schedules: what a job asks for step after step, ordered once for all steps to come.

use serde::{Deserialize, Serialize};

use crate::control::Order;
use crate::request::Group;

/// One bucket of a schedule: every iteration has an operation like this one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScheduledBucket {
    /// What is performed; it carries no contributions, and nobody has joined.
    pub order: Order,
    /// For each tensor the group of its requests.
    pub groups: Vec<Option<Group>>,
}

/// Why a schedule does not hold any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Invalidation {
    /// A rank has asked for what comes later, not for what comes before that, and then for nothing else.
    Order,
    /// A rank has asked for something else.
    Request,
    /// A request was refused by its sidecar, or withdrawn by its rank.
    Refusal,
    /// An operation takes so long that somebody has to find out who holds it up.
    Delay,
    /// A rank closes its session.
    WorkerExit,
}

impl Invalidation {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Order, Self::Request, Self::Refusal, Self::Delay, Self::WorkerExit];

    /// The name in status, metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Order => "order",
            Self::Request => "request",
            Self::Refusal => "refusal",
            Self::Delay => "delay",
            Self::WorkerExit => "worker_exit",
        }
    }
}
