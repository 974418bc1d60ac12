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
//! sidecar  → launcher  Ended     counters, when the sidecar has drained
//! sidecar  → launcher  Fatal     why it cannot continue; it then exits with a non-zero status
//! ```
//!
//! End of input tells the sidecar to drain and leave: a sidecar never outlives its launcher. Nothing secret travels
//! here: keys and tokens are made where they are used.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use ronde_wire::{Exit, JobName};
use serde::{Deserialize, Serialize};

use crate::interfaces::InterfaceAddress;
use crate::ports::PortRange;
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
    /// Its rank.
    pub rank: u32,
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
    /// All sidecars of the job.
    pub peers: Vec<Peer>,
    /// For each rank, the index of its sidecar.
    pub placement: Vec<u32>,
}

/// Where a sidecar is reached.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
        /// The directory with rpc.sock, mem.sock and the token files.
        socket_dir: PathBuf,
        /// For each local rank, its token file.
        token_files: Vec<TokenFile>,
        /// Where /metrics, /status and /healthz are served (loopback).
        admin: SocketAddr,
        /// Where gRPC-Web is answered, if anywhere.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        web: Option<SocketAddr>,
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
    /// A worker has come and shown its token.
    Attached {
        /// Its rank.
        rank: u32,
    },
    /// A worker's session has ended, for whatever reason: said before other workers hear of it, so that the launcher can
    /// tell who left first from who failed because of that.
    Left {
        /// Its rank.
        rank: u32,
    },
    /// The answer to [`WorkerExited`].
    Noted {
        /// The rank.
        rank: u32,
        /// What it asked for last, in words.
        last_call: Option<String>,
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
    /// Queues the message as one line for standard output, which carries nothing else in a sidecar.
    pub fn send(&self) {
        match serde_json::to_string(self).map(|line| streams::message(line + "\n")) {
            Ok(true) => {}
            Ok(false) => tracing::warn!("nobody reads standard output, so a message about this sidecar is dropped"),
            Err(error) => tracing::error!(%error, "a line for the launcher cannot be written"),
        }
    }
}

/// A rank's token file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TokenFile {
    /// The rank.
    pub rank: u32,
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
}
