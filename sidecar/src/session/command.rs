//! The commands of sessions to the driver.

use ronde_rpc::convert::{Claim, Refused, Submission};
use ronde_shm::{PciAddress, SessionToken};
use ronde_wire::{Group, RequestId, SetId, TensorName, limits};
use tokio::sync::oneshot;
use tonic::Status;

use crate::session::gpu_use::GpuUse;
use crate::session::outgoing::Outgoing;
use crate::session::ring::RingOut;
use crate::session::table::SessionId;
use crate::timeline::{Batches, RecordingId};

/// A command of a session to the driver.
pub(crate) enum SessionCommand {
    /// A worker claims a rank.
    Claim(Box<ClaimRequest>),
    /// A worker submits a request; the driver also answers and announces requests that cannot be parsed.
    Submit {
        /// The session.
        session: SessionId,
        /// The submission.
        submission: Box<Result<Submission, Refused>>,
    },
    /// A worker does not take part in an operation that others may wait for.
    Abstain {
        /// The session.
        session: SessionId,
        /// The process set.
        set: SetId,
        /// The name.
        name: TensorName,
        /// The group that continues without it.
        group: Option<Group>,
        /// The reason.
        reason: String,
    },
    /// A worker no longer waits for a request.
    Withdraw {
        /// The session.
        session: SessionId,
        /// The request.
        request: RequestId,
        /// The reason.
        reason: String,
    },
    /// A worker has read a result.
    Release {
        /// The session.
        session: SessionId,
        /// The request.
        request: RequestId,
    },
    /// A worker has attached a ring, which carries all further messages to it.
    Ring {
        /// The session.
        session: SessionId,
        /// The ring's outgoing direction.
        ring: Box<RingOut>,
    },
    /// A worker has made room for messages that wait.
    Room {
        /// The session.
        session: SessionId,
    },
    /// A heartbeat.
    Heartbeat {
        /// The session.
        session: SessionId,
    },
    /// How a worker has used a GPU.
    GpuUse {
        /// The session.
        session: SessionId,
        /// The figures so far.
        used: Box<(PciAddress, GpuUse)>,
    },
    /// The worker shuts its session down.
    ShutDown {
        /// The session.
        session: SessionId,
        /// The reason.
        reason: String,
    },
    /// The stream is over.
    Closed {
        /// The session.
        session: SessionId,
        /// How it ended.
        reason: String,
    },
    /// A worker wants to record a timeline.
    Record(RecordRequest),
    /// A worker has stopped recording.
    EndRecording(RecordingId),
}

/// A claim with everything that the driver needs to decide.
pub(crate) struct ClaimRequest {
    /// The worker's message.
    pub(crate) claim: Claim,
    /// How the worker connects.
    pub(crate) access: Access,
    /// The negotiated protocol version.
    pub(crate) protocol: u32,
    /// A new token for the session.
    pub(crate) session_token: SessionToken,
    /// The channel for messages to the worker.
    pub(crate) outgoing: Outgoing,
    /// The channel for the decision.
    pub(crate) reply: oneshot::Sender<Result<SessionId, Status>>,
}

/// How a worker connects to the sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Over rpc.sock; the kernel reports the uid of its process, which may share memory.
    Socket {
        /// The uid.
        uid: u32,
    },
    /// Over gRPC-Web: all data travels inside messages.
    Web,
}

impl Access {
    /// The uid of a process that may share memory with this one.
    pub(crate) fn uid(self) -> Option<u32> {
        if let Self::Socket { uid } = self { Some(uid) } else { None }
    }

    /// The requests that such a session may have pending, with the name of the limit.
    pub(crate) fn pending_max(self) -> (usize, &'static str) {
        match self {
            Self::Socket { .. } => (limits::PENDING_PER_SESSION_MAX, "PENDING_PER_SESSION_MAX"),
            Self::Web => (limits::WEB_PENDING_MAX, "WEB_PENDING_MAX"),
        }
    }

    /// The bytes of each direction of the ring that such a session may attach; 0 for none.
    pub(crate) fn ring_bytes(self) -> u64 {
        if self == Self::Web { 0 } else { limits::RING_BYTES as u64 }
    }
}

/// A request to record a timeline.
pub(crate) struct RecordRequest {
    /// The token of the worker's session.
    pub(crate) session_token: SessionToken,
    /// Whether the coordinator's cycles are marked.
    pub(crate) mark_cycles: bool,
    /// The channel for batches.
    pub(crate) batches: Batches,
    /// The channel for the decision.
    pub(crate) reply: oneshot::Sender<Result<RecordingId, Status>>,
}
