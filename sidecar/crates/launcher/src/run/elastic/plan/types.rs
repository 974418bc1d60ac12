//! What a plan is given and what it decides: bounds, events, actions.

use std::rc::Rc;
use std::time::Duration;

use super::super::exclusion::{CooldownRange, Time};
use super::count;
use super::hosts::Listed;

/// The bounds of a job.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Workers that are needed for the first membership.
    pub first: u32,
    /// Workers that are needed for later ones.
    pub min: u32,
    /// The most workers.
    pub max: u32,
    /// How long the job waits for enough slots.
    pub elastic_timeout: Duration,
    /// The most memberships after the first.
    pub reset_limit: Option<u32>,
    /// The cool-down of failing slots and hosts.
    pub cooldown: Option<CooldownRange>,
    /// Whether hosts may appear.
    pub has_discovery: bool,
    /// How long an agent or a sidecar may take to start.
    pub start_timeout: Duration,
    /// How long a worker may take to attach.
    pub attach_timeout: Duration,
    /// How long a sidecar may take to answer.
    pub answer_timeout: Duration,
    /// How many workers are kept ready for a loss.
    pub spares: u32,
    /// Whether a worker that hangs is replaced.
    pub replaces_stalled: bool,
    /// How long a host lives on after it has received SIGTERM.
    pub preemption_notice: Duration,
    /// The most workers of one sidecar.
    pub local_max: usize,
    /// The most sidecars in the life of a job.
    pub sidecars_max: u32,
    /// The seed of random delays.
    pub seed: u64,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// Time has passed.
    Tick,
    /// These hosts can be used; others cannot, any more.
    Hosts(Vec<Listed>),
    /// An agent answers.
    AgentUp {
        /// Which.
        agent: u32,
    },
    /// An agent has ended or cannot be used; what it started has ended.
    AgentLost {
        /// Which.
        agent: u32,
    },
    /// A sidecar has its ports.
    Bound {
        /// Which.
        sidecar: u32,
    },
    /// A sidecar has joined and takes workers.
    Serving {
        /// Which.
        sidecar: u32,
    },
    /// A sidecar has ended or cannot continue.
    SidecarLost {
        /// Which.
        sidecar: u32,
    },
    /// A sidecar has answered a Change.
    Prepared {
        /// Which.
        sidecar: u32,
        /// The number of the membership.
        membership: u64,
    },
    /// A sidecar has answered an Enter.
    Entered {
        /// Which.
        sidecar: u32,
        /// The number of the membership.
        membership: u64,
    },
    /// A worker's session has ended.
    Left {
        /// Which.
        worker: u32,
    },
    /// A worker has claimed its number.
    Attached {
        /// Which.
        worker: u32,
    },
    /// A worker has its rank in a membership.
    Seated {
        /// Which.
        worker: u32,
        /// The number of the membership.
        membership: u64,
    },
    /// A worker's process has ended.
    WorkerEnded {
        /// Which.
        worker: u32,
        /// How.
        how: WorkerEnd,
    },
    /// A worker hangs, while others wait for it.
    Hung {
        /// The sidecar that reports it.
        sidecar: u32,
        /// Which.
        worker: u32,
        /// The membership in which it hangs.
        membership: u64,
    },
    /// A sidecar has dialled a peer in vain for the start timeout, or was refused.
    Unreachable {
        /// The sidecar that reports it.
        sidecar: u32,
        /// The peer.
        peer: u32,
        /// The membership in which it dials.
        membership: u64,
    },
    /// A sidecar has a link to a peer.
    Linked {
        /// Which.
        sidecar: u32,
        /// The peer.
        peer: u32,
    },
    /// A host, or a worker there, has received SIGTERM: it is about to be taken away.
    Preempted {
        /// The host's agent.
        agent: u32,
        /// The worker, if only that has.
        worker: Option<u32>,
    },
}

/// How a worker's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerEnd {
    /// With status 0.
    Success,
    /// By SIGTERM, which the launcher did not order.
    Terminated,
    /// In another way.
    Failure,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start an agent.
    StartAgent {
        /// Its number.
        agent: u32,
        /// On which host.
        host: String,
    },
    /// End the connection to an agent, which ends what it started.
    DropAgent {
        /// Which.
        agent: u32,
    },
    /// Start a sidecar.
    StartSidecar {
        /// Its index.
        sidecar: u32,
        /// By which agent.
        agent: u32,
    },
    /// End the input of a sidecar.
    CloseSidecar {
        /// Which.
        sidecar: u32,
    },
    /// Give a new sidecar its certificate and first membership.
    Join {
        /// Which.
        sidecar: u32,
        /// The membership.
        members: Rc<Members>,
    },
    /// Send a sidecar the next membership.
    Change {
        /// Which.
        sidecar: u32,
        /// The membership.
        members: Rc<Members>,
    },
    /// Let a sidecar enter it.
    Enter {
        /// Which.
        sidecar: u32,
        /// The number of the membership.
        membership: u64,
        /// How many workers it adds.
        added: u32,
        /// How many workers it removes.
        removed: u32,
    },
    /// Let a sidecar connect.
    Commit {
        /// Which.
        sidecar: u32,
        /// The number of the membership.
        membership: u64,
    },
    /// Start a worker.
    StartWorker {
        /// Its number.
        worker: u32,
        /// The sidecar that serves it.
        sidecar: u32,
        /// The membership that it will enter.
        members: Rc<Members>,
        /// Whether it waits for a loss instead.
        is_spare: bool,
    },
    /// End a worker.
    StopWorker {
        /// Its number.
        worker: u32,
    },
    /// End a worker that hangs, without waiting for it.
    KillWorker {
        /// Its number.
        worker: u32,
    },
    /// Something to report.
    Notice(Notice),
    /// The job is over; nothing follows.
    End(End),
}

/// What users are notified of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A membership is committed.
    Committed {
        /// It.
        members: Rc<Members>,
        /// Why it replaced the one before.
        cause: Cause,
        /// When that happened.
        since: Time,
    },
    /// There are too few slots.
    Waiting {
        /// How many there are.
        have: u32,
        /// How many are needed.
        needed: u32,
    },
    /// A slot is not used for some time, or any more.
    SlotExcluded {
        /// Its host.
        host: String,
        /// Its number on the host.
        slot: u32,
        /// For how long.
        cooldown: Option<Duration>,
    },
    /// A host is not used for some time.
    HostExcluded {
        /// It.
        host: String,
        /// For how long.
        cooldown: Option<Duration>,
    },
    /// A sidecar does not answer, so it counts as lost.
    Silent {
        /// Which.
        sidecar: u32,
        /// What was awaited.
        awaited: &'static str,
    },
    /// An agent does not answer.
    SilentAgent {
        /// Which.
        agent: u32,
    },
    /// A worker has not attached in time, so it is stopped.
    NotAttached {
        /// Which.
        worker: u32,
    },
    /// A host, or a worker there, has received SIGTERM.
    Preempted {
        /// The host's agent.
        agent: u32,
        /// The worker, if only that has.
        worker: Option<u32>,
    },
    /// Spare workers have started, and wait for a loss.
    Spares {
        /// Which.
        workers: Vec<u32>,
    },
    /// A worker hangs, so it is replaced.
    Hung {
        /// Which.
        worker: u32,
    },
    /// Two sidecars do not reach each other, so one of them counts as lost.
    Unreachable {
        /// That one.
        sidecar: u32,
        /// The other one.
        peer: u32,
        /// Which of both reported it.
        reporter: u32,
    },
    /// A host's time is over, and it has workers still.
    NoticeOver {
        /// Its agent.
        agent: u32,
    },
    /// A worker has not come back for its rank in time, so it is stopped.
    NotReturned {
        /// Which.
        worker: u32,
        /// The number of the membership.
        membership: u64,
    },
    /// Workers do not leave their epoch, for which new workers wait.
    NotEntered {
        /// The number of the membership.
        membership: u64,
    },
}

/// Why a membership changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The job starts.
    Start,
    /// A worker failed, or did not attach.
    Worker(u32),
    /// A sidecar was lost.
    Sidecar(u32),
    /// An agent was lost.
    Agent(u32),
    /// Hosts or slots appeared, or can be used again.
    Added,
    /// Hosts or slots disappeared.
    Removed,
    /// The user has drained a host.
    Drained,
    /// A host got a notice of preemption.
    Preempted,
    /// The user wants fewer workers.
    Scaled,
}

/// How the job ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All remaining workers ended with status 0.
    Success,
    /// A worker failed when no further membership could begin, or nobody is left who has the job's state.
    Failed(Cause),
    /// Too few slots for too long.
    TooFew {
        /// How many there are.
        have: u32,
        /// How many are needed.
        needed: u32,
        /// What was lost last.
        cause: Option<Cause>,
    },
    /// More changes than `--reset-limit`.
    ResetLimit {
        /// The limit.
        limit: u32,
        /// What required another one.
        cause: Cause,
    },
    /// A worker left without joining, for which the others wait.
    NeverJoined {
        /// Which.
        worker: u32,
    },
}

/// Who takes part in a membership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// Its number.
    pub number: u64,
    /// For each rank the worker and its sidecar.
    pub seats: Vec<Seat>,
}

/// A worker and its sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// The worker's number.
    pub worker: u32,
    /// Its sidecar.
    pub sidecar: u32,
}

impl Members {
    /// Whether a worker takes part.
    pub fn contains(&self, worker: u32) -> bool {
        self.seats.iter().any(|seat| seat.worker == worker)
    }

    /// The rank of a worker.
    pub fn rank_of(&self, worker: u32) -> Option<u32> {
        self.seats.iter().position(|seat| seat.worker == worker).and_then(|rank| u32::try_from(rank).ok())
    }

    /// The sidecars, ascending.
    pub fn sidecars(&self) -> Vec<u32> {
        let mut sidecars: Vec<u32> = self.seats.iter().map(|seat| seat.sidecar).collect();
        sidecars.sort_unstable();
        sidecars.dedup();
        sidecars
    }

    /// How many of its workers `other` does not have.
    pub(super) fn count_without(&self, other: &Self) -> u32 {
        count(self.seats.iter().filter(|seat| !other.contains(seat.worker)))
    }
}
