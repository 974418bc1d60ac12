//! What sessions ask of the driver.

use ronde_rpc::convert::{Claim, Refused, Submission};
use ronde_shm::SessionToken;
use ronde_wire::{Group, RequestId, SetId, TensorName};
use tokio::sync::oneshot;
use tonic::Status;

use crate::session::ring::RingOut;
use crate::session::table::{Outgoing, SessionId};
use crate::timeline::{Batches, RecordingId};

/// What a session asks of the driver.
pub(crate) enum SessionCommand {
    /// A worker claims a rank.
    Claim(Box<ClaimRequest>),
    /// A worker submits a request; what cannot be parsed is answered and announced by the driver too.
    Submit {
        /// Whose.
        session: SessionId,
        /// What.
        submission: Box<Result<Submission, Refused>>,
    },
    /// A worker takes no part in what others may wait for.
    Abstain {
        /// Whose.
        session: SessionId,
        /// The process set.
        set: SetId,
        /// The name.
        name: TensorName,
        /// The group that goes on without it.
        group: Option<Group>,
        /// Why.
        reason: String,
    },
    /// A worker no longer waits.
    Withdraw {
        /// Whose.
        session: SessionId,
        /// Which request.
        request: RequestId,
        /// Why.
        reason: String,
    },
    /// A result has been read.
    Release {
        /// Whose.
        session: SessionId,
        /// Which request's.
        request: RequestId,
    },
    /// A worker has attached a ring: messages for it go there from now on.
    Ring {
        /// Whose.
        session: SessionId,
        /// The ring's outgoing direction.
        ring: Box<RingOut>,
    },
    /// A worker has made room in its ring.
    Room {
        /// Whose.
        session: SessionId,
    },
    /// A sign of life.
    Heartbeat {
        /// Whose.
        session: SessionId,
    },
    /// The session will end in order.
    ShutDown {
        /// Whose.
        session: SessionId,
        /// Why.
        reason: String,
    },
    /// The stream is over.
    Closed {
        /// Whose.
        session: SessionId,
        /// What was seen.
        reason: String,
    },
    /// A worker wants to record what happens.
    Record(RecordRequest),
    /// A worker records no longer.
    EndRecording(RecordingId),
}

/// A claim with everything that the driver needs to decide.
pub(crate) struct ClaimRequest {
    /// What the worker said.
    pub(crate) claim: Claim,
    /// How it came.
    pub(crate) access: Access,
    /// The version that both speak.
    pub(crate) protocol: u32,
    /// A fresh token for the session.
    pub(crate) session_token: SessionToken,
    /// Where messages for the worker go.
    pub(crate) outgoing: Outgoing,
    /// The decision.
    pub(crate) reply: oneshot::Sender<Result<SessionId, Status>>,
}

/// How a worker came to the sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Over rpc.sock; its process is of this uid, as the kernel says, and may share memory.
    Socket {
        /// The uid.
        uid: u32,
    },
    /// Over gRPC-Web: everything travels inside messages.
    Web,
}

impl Access {
    /// The uid of a process that may share memory with this one.
    pub(crate) fn uid(self) -> Option<u32> {
        if let Self::Socket { uid } = self { Some(uid) } else { None }
    }
}

/// What is needed to record for a worker.
pub(crate) struct RecordRequest {
    /// Of the session whose worker asks.
    pub(crate) session_token: SessionToken,
    /// Whether the coordinator's orders are marked.
    pub(crate) mark_cycles: bool,
    /// Where batches go.
    pub(crate) batches: Batches,
    /// The decision.
    pub(crate) reply: oneshot::Sender<Result<RecordingId, Status>>,
}
