//! What an engine is told and what it wants done: the whole surface between the pure engine and the process around it.

use std::sync::Arc;

use bytes::Bytes;
use ronde_collectives::plan::Plan;
use ronde_wire::{
    Codec, Control, DType, Detail, Epoch, Failure, Group, PluginUse, Rank, ReduceOp, Request, RequestId, Seq, SetId,
    SetTopology, Shape, SidecarIndex, TensorName,
};

/// A point in time: microseconds since a start that the caller chooses. Only differences matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(pub u64);

impl Time {
    /// This time plus milliseconds.
    #[must_use]
    pub const fn plus_ms(self, ms: u64) -> Self {
        Self(self.0 + ms * 1_000)
    }

    /// Milliseconds since an earlier time; 0 when it is not earlier.
    #[must_use]
    pub const fn ms_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0) / 1_000
    }
}

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A worker has claimed a rank; its session waits for the epoch.
    RankAttached {
        /// The rank.
        rank: Rank,
    },
    /// A session has ended. `failure.cause` is `ShutDown` for a goodbye and `RankLost` otherwise.
    RankLeft {
        /// The rank.
        rank: Rank,
        /// Why, for the others.
        failure: Failure,
    },
    /// A sign of life from a worker (any message of its session).
    RankAlive {
        /// The rank.
        rank: Rank,
    },
    /// A worker asks for an operation; what becomes of it follows as [`Event::Submitted`] or [`Event::Refused`].
    Called {
        /// The rank.
        rank: Rank,
        /// What it asks for: [`ronde_wire::Collective::name`].
        collective: &'static str,
        /// The operation's name.
        operation: TensorName,
        /// The place in its program, where that is known.
        site: Option<String>,
    },
    /// A worker's checked request.
    Submitted {
        /// The rank.
        rank: Rank,
        /// The worker's number for it.
        request: RequestId,
        /// What it wants.
        what: Request,
        /// Its contribution where that travels along, as [`crate::Engine::contribution_bytes`] says; empty otherwise.
        contribution: Bytes,
    },
    /// The service refused a request whose set and name are known; the worker has its answer already. The other ranks
    /// must not wait for it.
    Refused {
        /// The rank.
        rank: Rank,
        /// The set.
        set: SetId,
        /// The name.
        name: TensorName,
        /// The request's group, where it is known: the group goes on without it.
        group: Option<Group>,
        /// Why.
        reason: String,
    },
    /// A worker no longer waits for a request.
    Withdrawn {
        /// The rank.
        rank: Rank,
        /// Which request.
        request: RequestId,
        /// Why, in the worker's words.
        reason: String,
    },
    /// A control link is open.
    LinkUp {
        /// The authenticated peer.
        peer: SidecarIndex,
        /// How many lanes it offers.
        lanes: u16,
    },
    /// A control link is gone or did not come; the transport has given up on it.
    LinkDown {
        /// The peer.
        peer: SidecarIndex,
        /// What was seen.
        reason: String,
    },
    /// A lane to a peer is gone or did not come; the transport has given up on it.
    LaneDown {
        /// The peer.
        peer: SidecarIndex,
        /// Whether the peer closed it itself, behind all that it had to send.
        closed: bool,
        /// What was seen.
        reason: String,
    },
    /// A control message arrived.
    Control {
        /// The authenticated sender.
        from: SidecarIndex,
        /// The epoch of the frame.
        epoch: Epoch,
        /// The seq of the frame, 0 for none.
        seq: Seq,
        /// The message.
        message: Control,
    },
    /// All lanes have performed an admitted operation.
    Executed {
        /// The epoch it belongs to.
        epoch: Epoch,
        /// The operation.
        seq: Seq,
    },
    /// All lanes have dropped what [`Action::Cancel`] named: its memory is not touched any more.
    Cancelled {
        /// The epoch.
        epoch: Epoch,
        /// The last operation that was named.
        last: Seq,
    },
    /// An admitted operation cannot be performed here.
    ExecutionFailed {
        /// The epoch it belongs to.
        epoch: Epoch,
        /// The operation.
        seq: Seq,
        /// Why; the engine adds who.
        reason: String,
        /// Whether a plugin is at fault: then the operation fails, and the epoch goes on.
        plugin: bool,
    },
}

/// Something to be done by the process around the engine.
#[derive(Clone, Debug)]
pub enum Action {
    /// Send a control message. Links to peers without one are opened on the first send.
    Send {
        /// The receiver, never this sidecar.
        to: SidecarIndex,
        /// The frame's epoch.
        epoch: Epoch,
        /// The frame's seq.
        seq: Seq,
        /// The message.
        message: Control,
    },
    /// An epoch has begun: tell the sessions of the local ranks, and the executors.
    EpochBegan {
        /// The epoch.
        epoch: Epoch,
    },
    /// The epoch is over: every pending request has got its failing `Complete` before this. Executors drop its operations,
    /// sessions are told, results not yet delivered never will be.
    EpochEnded {
        /// The epoch.
        epoch: Epoch,
        /// Why.
        failure: Failure,
    },
    /// Perform an operation: reserve its results, then hand it to the executors of all its lanes, in this order.
    Admit(Arc<Admission>),
    /// Drop admitted operations where they stand: their requests will be asked for again, or fail right behind this. The executors of all lanes drop
    /// them, and what still comes of any operation up to `last` that they do not have. [`Event::Cancelled`] answers.
    Cancel {
        /// The epoch.
        epoch: Epoch,
        /// The last operation that any sidecar may have admitted by now.
        last: Seq,
        /// What is dropped, ascending; for some of it [`Event::Executed`] may have been told.
        dropped: Vec<Seq>,
    },
    /// An operation with a plugin stands: what its codec is to remember is remembered. Comes before the requests' `Complete`.
    Commit {
        /// The epoch.
        epoch: Epoch,
        /// The operation.
        seq: Seq,
    },
    /// A request is over. For success the result lies where the admission's memory put it.
    Complete {
        /// The rank.
        rank: Rank,
        /// Its number.
        request: RequestId,
        /// The shape of the result, or why there is none.
        outcome: Result<Completion, Failure>,
    },
    /// A process set is gone, and nothing of it is under way here: what is kept for it is let go of. Its id may be that of
    /// another set soon.
    SetForgotten {
        /// The set.
        set: SetId,
    },
    /// Tell the local sessions who is late. Empty lists take an earlier notice back.
    Notice {
        /// Silent sidecars.
        sidecars: Vec<SidecarIndex>,
        /// Silent ranks.
        ranks: Vec<Rank>,
        /// For people.
        text: String,
    },
    /// Close all links to a peer that broke the protocol; it counts as lost.
    Disconnect {
        /// The peer.
        peer: SidecarIndex,
        /// What it did.
        reason: String,
    },
    /// End a session whose worker has gone silent; it counts as lost already.
    EndSession {
        /// The rank.
        rank: Rank,
        /// Why.
        failure: Failure,
    },
}

/// What a rank gets for a completed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The epoch in which it was performed.
    pub epoch: Epoch,
    /// The operation; with job and epoch the trace id.
    pub seq: Seq,
    /// The index of the tensor within the operation.
    pub tensor: u32,
    /// The type of the result.
    pub dtype: DType,
    /// The shape of the result; `[0]` for a rank that gets none.
    pub shape: Shape,
    /// Whether the result lies in memory of this rank's own; otherwise the local ranks share it.
    pub own: bool,
    /// What else the caller learns.
    pub detail: Detail,
}

/// An ordered operation that is performed here: the plan, what it computes, and whose requests it answers.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The epoch.
    pub epoch: Epoch,
    /// The operation.
    pub seq: Seq,
    /// The members, to turn a plan's members into sidecars.
    pub topology: Arc<SetTopology>,
    /// What is done here.
    pub plan: Arc<Plan>,
    /// How elements are combined.
    pub arithmetic: Arithmetic,
    /// The plugin that takes part, if one does.
    pub plugin: Option<AdmittedPlugin>,
    /// The tensors of the bucket, in its order.
    pub tensors: Vec<AdmittedTensor>,
    /// The ranks whose contributions are here, ascending: those that this sidecar serves, or, in an eager operation, all.
    pub local_ranks: Vec<Rank>,
    /// The ranks of the operation that this sidecar serves, ascending: they get results.
    pub served: Vec<Rank>,
    /// Those of them that have joined, ascending: they contribute zeros, and there is no request of theirs.
    pub joined: Vec<Rank>,
    /// For an eager operation: for each tensor the contribution of each of `local_ranks`. Empty otherwise.
    pub contributions: Vec<Vec<Bytes>>,
}

impl Admission {
    /// Whether it came with all that it needs.
    #[must_use]
    pub fn is_eager(&self) -> bool {
        !self.contributions.is_empty()
    }
}

/// The plugin of an admitted operation.
#[derive(Clone, Debug)]
pub struct AdmittedPlugin {
    /// Which one.
    pub uses: Arc<PluginUse>,
    /// For each tensor of the bucket its number of elements.
    pub elements: Vec<u64>,
}

/// How the elements of an operation are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arithmetic {
    /// The element type.
    pub dtype: DType,
    /// The reduction, none where elements are only moved.
    pub op: Option<ReduceOp>,
    /// The number of ranks of the set: an average divides by it.
    pub ranks: u32,
    /// Every contribution is multiplied by this first.
    pub prescale: f64,
    /// The result is multiplied by this last.
    pub postscale: f64,
    /// How elements are encoded on the wire.
    pub codec: Codec,
    /// Whether some sidecar has all ranks' values of an element at once, and reduces them in one go.
    pub at_once: bool,
}

/// One tensor of an admitted operation.
#[derive(Clone, Debug)]
pub struct AdmittedTensor {
    /// The name.
    pub name: TensorName,
    /// The requests that it answers: one for each local rank that has not joined, ascending by rank.
    pub requests: Vec<AdmittedRequest>,
    /// Whether each rank's result has memory of its own; otherwise they share one, and all shapes are equal.
    pub own: bool,
}

/// A local rank's part in a tensor of an admitted operation.
#[derive(Clone, Debug)]
pub struct AdmittedRequest {
    /// The rank.
    pub rank: Rank,
    /// The worker's number for it.
    pub request: RequestId,
    /// The shape of the rank's result; `[0]` when it gets none.
    pub output: Shape,
    /// What else it learns.
    pub detail: Detail,
}
