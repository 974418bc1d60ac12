//! Simulates an elastic job in one thread under one seed: the launcher's plan of memberships, sidecars with real engines
//! and the real rules of [`ronde_engine::Memberships`], workers that reduce step after step and return after a failure,
//! and a network with delays, cuts and crashes.
//!
//! Checked at every event: an epoch belongs to one membership, later epochs to later ones; a result has the contributions
//! of exactly the workers of its membership, and is the same on all ranks. Checked once nothing breaks any more: all
//! workers of the last membership go on. A planted [`ElasticBug`] must be caught.

mod checks;
mod driving;
mod host;
mod launcher;
mod launching;
mod net;
mod worker;

use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;

use fastrand::Rng;
use ronde_wire::{Epoch, RequestId, Seq};

use self::checks::Oracle;
use self::host::Host;
use self::launcher::Launcher;
use self::net::Network;
use self::worker::Worker;

/// A bug that a run plants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElasticBug {
    /// The launcher commits before all sidecars have entered, and links do not compare memberships.
    EarlyCommit,
    /// A sidecar enters while its epoch runs.
    EnterWithinEpoch,
    /// A new coordinator counts epochs from the start.
    ForgottenEpoch,
    /// A sidecar does not leave its membership when it is released.
    NeverEnter,
    /// A worker that returns attaches with its last rank.
    StaleRank,
}

impl ElasticBug {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::EarlyCommit, Self::EnterWithinEpoch, Self::ForgottenEpoch, Self::NeverEnter, Self::StaleRank];
}

/// Figures of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ElasticReport {
    /// Memberships that were committed.
    pub memberships: u64,
    /// Changes that were replaced before their commit.
    pub replaced: u64,
    /// Epochs that began.
    pub epochs: u64,
    /// Steps that a worker completed.
    pub steps: u64,
    /// Crashes of workers and of sidecars.
    pub crashes: (u64, u64),
    /// Hosts that got a notice of preemption.
    pub notices: u64,
    /// Workers that were added.
    pub added: u64,
}

/// A seed whose run violates a property.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElasticFailed {
    /// The seed.
    pub seed: u64,
    /// What was violated.
    pub what: String,
}

impl fmt::Display for ElasticFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, what } = self;
        write!(f, "seed {seed}: {what}\nreplay: cargo run -p ronde-tests --bin sim -- --elastic --seed {seed} --trace")
    }
}

impl std::error::Error for ElasticFailed {}

/// Runs the job of a seed.
///
/// # Errors
/// [`ElasticFailed`] with the first violation.
pub fn run_elastic(seed: u64, bug: Option<ElasticBug>, trace: bool) -> Result<ElasticReport, ElasticFailed> {
    Sim::new(seed, bug, trace).run().map_err(|what| ElasticFailed { seed, what })
}

/// The simulated job.
struct Sim {
    rng: Rng,
    now_us: u64,
    queue: BinaryHeap<Queued>,
    order: u64,
    /// By sidecar index; an index is not reused.
    hosts: Vec<Host>,
    /// By number.
    workers: Vec<Worker>,
    network: Network,
    launcher: Launcher,
    oracle: Oracle,
    /// The contributions to an operation, as bits, and which hosts have admitted it.
    admitted: BTreeMap<(Epoch, Seq), (u64, Vec<usize>)>,
    bug: Option<ElasticBug>,
    trace: bool,
    report: ElasticReport,
    next_request: u64,
    /// The membership that was committed last.
    last_number: u64,
    /// Random faults happen until then.
    calm_us: u64,
    /// The first violation.
    violation: Option<String>,
}

/// What happens at a time.
#[derive(Debug)]
enum Happening {
    /// An engine's timer may be due.
    Tick { host: usize },
    /// A control message arrives.
    Deliver { from: usize, to: usize, link: u64 },
    /// An attempt to connect ends.
    Connect { from: usize, to: usize, membership: u64, deadline_us: u64 },
    /// A side learns that a link is gone.
    LinkGone { host: usize, peer: usize, membership: u64 },
    /// The lanes have performed an operation.
    Executed { host: usize, epoch: Epoch, seq: Seq },
    /// The lanes have dropped operations.
    Cancelled { host: usize, epoch: Epoch, last: Seq },
    /// The lanes have released an epoch.
    Released { host: usize, epoch: Epoch },
    /// The lanes have entered a membership.
    LanesEntered { host: usize, membership: u64 },
    /// A message of the launcher arrives at a sidecar.
    ToSidecar { host: usize, message: launcher::ToSidecar },
    /// A message of a sidecar, or of an agent, arrives at the launcher.
    ToLauncher { message: launcher::ToLauncher },
    /// A worker acts.
    Act { worker: u32, session: u64 },
    /// A worker receives the end of a request.
    Completed { worker: u32, session: u64, request: RequestId, result: Option<u64> },
    /// A worker receives the begin of an epoch.
    Begun { worker: u32, session: u64 },
    /// A worker receives the end of its epoch.
    Ended { worker: u32, session: u64 },
    /// A worker is notified that the membership changes.
    Change { worker: u32, session: u64 },
    /// The sidecar learns that a worker's session is over.
    SessionOver { worker: u32, session: u64, orderly: bool },
    /// Something breaks, or a host is added.
    Fault,
}

struct Queued {
    at_us: u64,
    order: u64,
    what: Happening,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        (self.at_us, self.order) == (other.at_us, other.order)
    }
}

impl Eq for Queued {}

impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // The earliest first.
        (other.at_us, other.order).cmp(&(self.at_us, self.order))
    }
}

impl Sim {
    /// Something happens after a delay.
    fn after(&mut self, delay_us: u64, what: Happening) {
        self.order += 1;
        self.queue.push(Queued { at_us: self.now_us + delay_us, order: self.order, what });
    }

    /// Something happens after a random delay of at most this.
    fn within(&mut self, most_us: u64, what: Happening) {
        let delay_us = self.rng.u64(1..=most_us);
        self.after(delay_us, what);
    }

    fn pop(&mut self) -> Option<Happening> {
        let next = self.queue.pop()?;
        self.now_us = self.now_us.max(next.at_us);
        Some(next.what)
    }

    fn violate(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    fn log(&self, text: impl FnOnce() -> String) {
        if self.trace {
            println!("{:>12} us  {}", self.now_us, text());
        }
    }
}
