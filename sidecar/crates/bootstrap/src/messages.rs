//! What a launcher and a sidecar say to each other over the sidecar's standard input and output: one JSON object a line.
//!
//! ```text
//! launcher → sidecar   Start     who you are, where to listen
//! sidecar  → launcher  Bound     my certificate request (the key stays here) and the addresses I listen on
//! launcher → sidecar   Join      your certificate, the job's CA certificate, all peers, the placement of ranks
//! sidecar  → launcher  Serving   the directory with my sockets and the ranks' token files
//! sidecar  → launcher  Dialling  which other sidecar is asked for a control link, then Linked: it is up
//! sidecar  → launcher  Attached  a worker has come
//! sidecar  → launcher  Left      a worker's session has ended
//! launcher → sidecar   WorkerExited  how a worker's process ended, and its last lines; sent by the agent on the same host
//! sidecar  → launcher  Noted     and what that worker asked for last
//! sidecar  → launcher  Recorded  where it wrote its flight record after a failure
//! sidecar  → launcher  Ended     counters, when the sidecar has drained
//! sidecar  → launcher  Fatal     why it cannot continue, which is not in its log; it then exits with a non-zero status
//! ```
//!
//! In an elastic job the launcher decides each membership, and sidecars outlive the changes that keep them:
//!
//! ```text
//! launcher → sidecar   Change    the next membership; workers that it adds here get token files
//! sidecar  → launcher  Prepared  these files: the new workers may start; the current epoch continues
//! launcher → sidecar   Enter     leave the current membership when its epoch is over; workers are notified now
//! sidecar  → launcher  Entered   no operation, lane or link of the previous membership is left here
//! launcher → sidecar   Commit    all sidecars have entered: connect, and let workers attach with their new ranks
//! sidecar  → launcher  Hung      a worker hangs, while others wait for it; sent by the coordinator
//! sidecar  → launcher  Seated    a worker has its rank in the membership
//! ```
//!
//! A sidecar that a membership adds gets it in its Join, answers Serving, and waits for Commit like the others. A later
//! Change replaces one that was not committed; its number is higher. A sidecar that the next membership does not contain
//! gets no Change; its input ends after the others have the Commit.
//!
//! End of input tells the sidecar to drain and leave: a sidecar never outlives its launcher. Nothing secret travels
//! here: keys and tokens are made where they are used.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use ronde_wire::{Exit, JobName};
use serde::{Deserialize, Serialize};

use crate::interfaces::InterfaceAddress;
use crate::ports::PortRange;
use crate::profile::Cost;
use crate::streams;
use crate::tuning::Tuning;

/// The most bytes of one line.
pub const LINE_BYTES_MAX: usize = 4 << 20;

/// From the launcher.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ToSidecar {
    /// The first line.
    Start(Box<Start>),
    /// The second line, when all sidecars are bound.
    Join(Join),
    /// The next membership of an elastic job.
    Change(Membership),
    /// Enter the membership of the last [`Change`](Self::Change) when the current epoch is over. Workers of the current
    /// one are notified, so that they end the epoch soon.
    Enter {
        /// The number of the membership.
        membership: u64,
        /// How many workers it adds.
        added: u32,
        /// How many workers it removes.
        removed: u32,
    },
    /// All sidecars of the membership have entered it: connect to them, and let workers attach.
    Commit {
        /// The number of the membership.
        membership: u64,
    },
    /// A worker's process has ended.
    WorkerExited(WorkerExited),
    /// To a sidecar of `--local-ranks`: end when the workers that connected have left, before the input ends.
    EndWithWorkers {
        /// In this time from now, in seconds, one has to connect; else the sidecar ends, too.
        within_s: u32,
    },
}

/// How a worker ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerExited {
    /// Its number, which is its rank in a job that is not elastic.
    pub worker: u32,
    /// The number of its process.
    pub pid: u32,
    /// How it ended.
    pub exit: Exit,
    /// The last lines of its standard error, oldest first.
    pub stderr_tail: Vec<String>,
}

/// Who a sidecar is and where it listens.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// The job.
    pub job: JobName,
    /// The run of the job: a random text, so that a later run with the same name is told apart.
    #[serde(default)]
    pub run: String,
    /// The trust domain of the job's identities.
    pub trust_domain: String,
    /// The sidecar's index.
    pub sidecar: u32,
    /// The addresses to listen on, the one to be named by first.
    pub addresses: Vec<IpAddr>,
    /// The control port, which those of the lanes follow; the system chooses when absent.
    pub port: Option<u16>,
    /// The range of which ports are taken when none is given.
    #[serde(default)]
    pub ports: Option<PortRange>,
    /// Where the session directory is made; the sidecar chooses (XDG_RUNTIME_DIR or the system's temporary directory) when absent.
    pub runtime_dir: Option<PathBuf>,
    /// How long links may take to come, milliseconds.
    pub start_timeout_ms: u64,
    /// The settings that the launcher and the sidecar both take.
    #[serde(default)]
    pub tuning: Tuning,
    /// Whether the sidecar is notified how its workers' processes end.
    #[serde(default)]
    pub exits_are_reported: bool,
    /// Whether the membership of the job may change.
    #[serde(default)]
    pub elastic: bool,
    /// After how long the coordinator reports a worker that hangs, milliseconds; 0 for never.
    #[serde(default)]
    pub replace_stalled_ms: u64,
    /// Sidecars below one on the tree of control links, for tests; the wire's when absent.
    pub control_fan_out: Option<usize>,
}

/// What a sidecar needs to take part.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// The sidecar's certificate, signed by the job CA, PEM.
    pub certificate: String,
    /// The job CA's certificate, PEM.
    pub ca_certificate: String,
    /// Who takes part.
    pub membership: Membership,
}

/// Who takes part in a job, from one change to the next. A job that is not elastic has one membership, number 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Membership {
    /// Its number, at least 1. Each later membership of a job has a higher one.
    pub number: u64,
    /// Its sidecars. The index of a sidecar is never used for another one in the same job.
    pub peers: Vec<Peer>,
    /// For each rank, who has it.
    pub seats: Vec<Seat>,
}

/// A worker and its sidecar. Its position in [`Membership::seats`] is the worker's rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seat {
    /// The worker's number, which it keeps while its rank changes. It is never used for another worker in the same job.
    pub worker: u32,
    /// The index of its sidecar.
    pub sidecar: u32,
}

impl Membership {
    /// The only membership of a job that is not elastic: each worker's number is its rank.
    #[must_use]
    pub fn fixed(peers: Vec<Peer>, placement: &[u32]) -> Self {
        let seat = |(worker, &sidecar)| Seat { worker, sidecar };
        Self { number: 1, peers, seats: (0..).zip(placement).map(seat).collect() }
    }

    /// The sidecar of each rank.
    #[must_use]
    pub fn placement(&self) -> Vec<u32> {
        self.seats.iter().map(|seat| seat.sidecar).collect()
    }
}

/// Where a sidecar is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// Its index.
    pub sidecar: u32,
    /// Its host's name, for people.
    pub host: String,
    /// The address of its control port.
    pub control: SocketAddr,
    /// The address of each lane's port.
    pub lanes: Vec<SocketAddr>,
    /// All its addresses, with the same ports; the ones above alone when empty. Which of them leads there is found out.
    #[serde(default)]
    pub addresses: Vec<InterfaceAddress>,
}

/// To the launcher.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromSidecar {
    /// The answer to [`Start`].
    Bound {
        /// A certificate signing request, PEM.
        certificate_request: String,
        /// The address of the control port.
        control: SocketAddr,
        /// The address of each lane's port.
        lanes: Vec<SocketAddr>,
        /// The sidecar's version.
        version: String,
    },
    /// The answer to [`Join`]: workers may come.
    Serving {
        /// The job's name.
        job: String,
        /// The directory with rpc.sock, mem.sock and the token files.
        socket_dir: PathBuf,
        /// For each local worker, its token file.
        token_files: Vec<TokenFile>,
        /// Where /metrics, /status, /flight and /healthz are served (loopback).
        admin: SocketAddr,
        /// Where gRPC-Web is answered, if anywhere.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        web: Option<SocketAddr>,
    },
    /// The answer to [`ToSidecar::Change`].
    Prepared {
        /// The number of the membership.
        membership: u64,
        /// For each worker that it adds here, its token file.
        token_files: Vec<TokenFile>,
    },
    /// The answer to [`ToSidecar::Enter`], when nothing of the previous membership is left.
    Entered {
        /// The number of the membership.
        membership: u64,
    },
    /// It asks a peer for the control link that it needs.
    Dialling {
        /// The peer's index.
        peer: u32,
    },
    /// A control link is up, whichever side asked for it.
    Linked {
        /// The peer's index.
        peer: u32,
        /// The address at which the peer is reached, or from which it came.
        address: IpAddr,
    },
    /// A worker has come and shown its token. In an elastic job it may wait for a membership.
    Attached {
        /// Its number, which is its rank in a job that is not elastic.
        worker: u32,
    },
    /// A worker of an elastic job has its rank in a committed membership, and waits for the others or trains.
    Seated {
        /// Its number.
        worker: u32,
        /// The number of the membership.
        membership: u64,
    },
    /// A worker hangs: it alone is missing from collectives that have waited for [`Start::replace_stalled_ms`], and waits for
    /// nothing itself. Sent by the sidecar of rank 0, about a worker of any sidecar.
    Hung {
        /// Its number.
        worker: u32,
        /// The number of the membership.
        membership: u64,
        /// What it did last, and what waits for it.
        text: String,
    },
    /// A peer has not answered for the start timeout, or one of both does not accept the other; this sidecar dials on. Sent
    /// in an elastic job, whose launcher decides which of both has to leave.
    Unreachable {
        /// The peer's index.
        peer: u32,
        /// The number of the membership.
        membership: u64,
        /// What was tried.
        text: String,
    },
    /// A worker's session has ended, for whatever reason. It is sent before other workers are notified, so that the
    /// launcher can distinguish who left first from who failed because of that.
    Left {
        /// Its number.
        worker: u32,
        /// How many operations it has called; absent if it had no rank.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        operations: Option<u64>,
    },
    /// The answer to [`WorkerExited`].
    Noted {
        /// The worker's number.
        worker: u32,
        /// What it asked for last, in words.
        last_call: Option<String>,
    },
    /// It has written a flight record after a failure.
    Recorded {
        /// The file, on its host.
        path: PathBuf,
    },
    /// The sidecar has drained.
    Ended {
        /// What it did.
        summary: Summary,
    },
    /// The sidecar cannot continue.
    Fatal {
        /// Why, and what to do.
        reason: String,
    },
}

impl FromSidecar {
    /// Queues the message as one line for standard output, which carries nothing else in a sidecar. Returns false if it is
    /// dropped.
    pub fn send(&self) -> bool {
        let queued = serde_json::to_string(self).map(|line| streams::message(line + "\n"));
        match &queued {
            Ok(true) => {}
            Ok(false) => tracing::warn!("nobody reads standard output, so a message about this sidecar is dropped"),
            Err(error) => tracing::error!(%error, "a line for the launcher cannot be written"),
        }
        queued.unwrap_or(false)
    }
}

/// A worker's token file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TokenFile {
    /// The worker's number, which is its rank in a job that is not elastic.
    pub worker: u32,
    /// The file, mode 0400.
    pub path: PathBuf,
}

/// Counters of a sidecar's life.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Summary {
    /// Bytes handed to encryption.
    pub sealed_bytes: u64,
    /// Bytes that came out of decryption.
    pub opened_bytes: u64,
    /// Operations performed here.
    pub operations: u64,
    /// Tensors in them: more than operations when fused.
    pub tensors: u64,
    /// For each rank, how often it was the last to be ready (known to the coordinator only).
    pub last_to_be_ready: Vec<u64>,
    /// The measured cost model (of the coordinator only, if it was asked for).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
}
