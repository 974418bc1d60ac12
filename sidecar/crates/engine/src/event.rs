//! Events and actions: the interface between the pure engine and the process around it.

use std::sync::Arc;

use bytes::Bytes;
use ronde_collectives::plan::Plan;
use ronde_wire::{
    Codec, Control, DType, Detail, Epoch, Failure, Group, PluginUse, Rank, ReduceOp, Request, RequestId, Seq, SetId,
    SetTopology, Shape, SidecarIndex, TensorName,
};

use crate::autotune::AutotuneSample;

/// A point in time: microseconds since an origin that the caller chooses.
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

/// An input of the engine.
#[derive(Clone, Debug)]
pub enum Event {
    /// A worker has claimed a rank; its session waits for the epoch.
    RankAttached {
        /// The rank.
        rank: Rank,
    },
    /// A session has ended. `failure.cause` is `ShutDown` for an orderly close and `RankLost` otherwise.
    RankLeft {
        /// The rank.
        rank: Rank,
        /// Why, for the other ranks.
        failure: Failure,
    },
    /// A worker has sent a message of any kind.
    RankAlive {
        /// The rank.
        rank: Rank,
    },
    /// A worker has called an operation; [`Event::Submitted`] or [`Event::Refused`] follows.
    Called {
        /// The rank.
        rank: Rank,
        /// The collective: [`ronde_wire::Collective::name`].
        collective: &'static str,
        /// The operation's name.
        operation: TensorName,
        /// The call site in its program, where it is known.
        site: Option<String>,
    },
    /// A worker's checked request.
    Submitted {
        /// The rank.
        rank: Rank,
        /// The worker's number for it.
        request: RequestId,
        /// The request.
        what: Request,
        /// Its contribution, of [`crate::Engine::contribution_bytes`] bytes.
        contribution: Bytes,
    },
    /// The service refused a request whose set and name are known, and has answered the worker. The other ranks must
    /// not wait for it.
    Refused {
        /// The rank.
        rank: Rank,
        /// The set.
        set: SetId,
        /// The name.
        name: TensorName,
        /// The request's group, where it is known; it continues without the request.
        group: Option<Group>,
        /// The ranks of the process set that was to be formed by its members; empty for other requests.
        members: Vec<Rank>,
        /// Why.
        reason: String,
    },
    /// A worker no longer waits for a request.
    Withdrawn {
        /// The rank.
        rank: Rank,
        /// The request.
        request: RequestId,
        /// The reason that the worker gave.
        reason: String,
    },
    /// A control link is open.
    LinkUp {
        /// The authenticated peer.
        peer: SidecarIndex,
        /// The number of lanes that it offers.
        lanes: u16,
    },
    /// A control link is lost or could not be opened; the transport has given up.
    LinkDown {
        /// The peer.
        peer: SidecarIndex,
        /// What the transport observed.
        reason: String,
    },
    /// A lane to a peer is lost or could not be opened; the transport has given up.
    LaneDown {
        /// The peer.
        peer: SidecarIndex,
        /// Whether the peer closed it after it had sent everything.
        closed: bool,
        /// What the transport observed.
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
    /// All lanes have dropped the operations of [`Action::Cancel`] and no longer access their memory.
    Cancelled {
        /// The epoch.
        epoch: Epoch,
        /// The last operation of that action.
        last: Seq,
    },
    /// An admitted operation cannot be performed here.
    ExecutionFailed {
        /// The epoch it belongs to.
        epoch: Epoch,
        /// The operation.
        seq: Seq,
        /// Why; the engine adds the sidecar.
        reason: String,
        /// Whether a plugin is at fault: then only the operation fails, and the epoch continues.
        plugin: bool,
    },
}

/// An output of the engine, which the process around it performs.
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
    /// An epoch has begun: notify the sessions of the local ranks, and the executors.
    EpochBegan {
        /// The epoch.
        epoch: Epoch,
    },
    /// The epoch is over: every pending request has got its failing `Complete` before this. Executors drop its
    /// operations, sessions are notified, and results that are not delivered yet are discarded.
    EpochEnded {
        /// The epoch.
        epoch: Epoch,
        /// Why.
        failure: Failure,
    },
    /// Perform an operation: reserve its results, then pass it to the executors of all its lanes, in this order.
    Admit(Arc<Admission>),
    /// Drop admitted operations in any state: their requests are announced again, or fail right after this. The
    /// executors of all lanes drop them, and late chunks of any operation up to `last`. [`Event::Cancelled`] answers.
    Cancel {
        /// The epoch.
        epoch: Epoch,
        /// The last operation that any sidecar may have admitted by now.
        last: Seq,
        /// The dropped operations, ascending; [`Event::Executed`] may have been reported for some of them.
        dropped: Vec<Seq>,
    },
    /// An operation with a plugin is committed: the state of its codec becomes permanent. Precedes the requests'
    /// `Complete`.
    Commit {
        /// The epoch.
        epoch: Epoch,
        /// The operation.
        seq: Seq,
    },
    /// A request is complete. On success, the result is in the memory of the admission.
    Complete {
        /// The rank.
        rank: Rank,
        /// Its number.
        request: RequestId,
        /// The shape of the result, or why there is none.
        outcome: Result<Completion, Failure>,
    },
    /// A process set is removed and has no operation in flight here: drop its state. Another set may soon have its id.
    SetForgotten {
        /// The set.
        set: SetId,
    },
    /// Notify the local sessions of silent peers. Empty lists withdraw an earlier notice.
    Notice {
        /// Silent sidecars.
        sidecars: Vec<SidecarIndex>,
        /// Silent ranks.
        ranks: Vec<Rank>,
        /// The text for users.
        text: String,
    },
    /// A rank hangs: it alone is missing from operations that have waited for [`EngineConfig::replace_stalled_ms`], and
    /// waits for nothing itself. Sent by the coordinator, once in an epoch.
    ///
    /// [`EngineConfig::replace_stalled_ms`]: crate::EngineConfig::replace_stalled_ms
    Hung {
        /// It.
        rank: Rank,
        /// What it did last, and which operation lacks it.
        text: String,
    },
    /// The search for better settings has a sample, or its outcome. Sent by the coordinator, for logs.
    Autotuned(AutotuneSample),
    /// Close all links to a peer that broke the protocol; it counts as lost.
    Disconnect {
        /// The peer.
        peer: SidecarIndex,
        /// How it broke the protocol.
        reason: String,
    },
    /// End a session whose worker is silent; it counts as lost already.
    EndSession {
        /// The rank.
        rank: Rank,
        /// Why.
        failure: Failure,
    },
}

/// The outcome of a successful request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The epoch in which it was performed.
    pub epoch: Epoch,
    /// The operation; job, epoch and seq form the trace id.
    pub seq: Seq,
    /// The index of the tensor within the operation.
    pub tensor: u32,
    /// The type of the result.
    pub dtype: DType,
    /// The shape of the result; `[0]` for a rank that gets none.
    pub shape: Shape,
    /// Whether the result is in memory of this rank alone; otherwise the local ranks share it.
    pub own: bool,
    /// Further information for the caller.
    pub detail: Detail,
}

/// An ordered operation that is performed here: its plan, its arithmetic, and the requests that it completes.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The epoch.
    pub epoch: Epoch,
    /// The operation.
    pub seq: Seq,
    /// The members, which map a plan's members to sidecars.
    pub topology: Arc<SetTopology>,
    /// The plan of this sidecar.
    pub plan: Arc<Plan>,
    /// How elements are combined.
    pub arithmetic: Arithmetic,
    /// The plugin, if the operation has one.
    pub plugin: Option<AdmittedPlugin>,
    /// The tensors of the bucket, in its order.
    pub tensors: Vec<AdmittedTensor>,
    /// The ranks whose contributions are here, ascending: the served ranks, or all ranks in an eager operation.
    pub local_ranks: Vec<Rank>,
    /// The ranks of the operation that this sidecar serves, ascending; they get results.
    pub served: Vec<Rank>,
    /// The ranks of the whole process set that this sidecar serves, ascending; more than `served` for a message.
    pub set_served: Arc<[Rank]>,
    /// The served ranks that have joined, ascending; they contribute zeros and have no request.
    pub joined: Vec<Rank>,
    /// For an eager operation, the contributions of `local_ranks` to each tensor. Empty otherwise.
    pub contributions: Vec<Vec<Bytes>>,
    /// Whether a schedule admits it: the ranks of this sidecar have submitted it, those of others maybe not yet.
    pub scheduled: bool,
}

impl Admission {
    /// Whether the order carried all contributions.
    #[must_use]
    pub fn is_eager(&self) -> bool {
        !self.contributions.is_empty()
    }

    /// The admission of an operation in which the contributions of the local ranks have been reduced to one, each multiplied by
    /// `factor` before. That is the contribution of the first local rank. The factor is a power of two, so that it is divided out without rounding.
    #[must_use]
    pub fn with_reduced_ranks(&self, factor: f64) -> Self {
        let mut reduced = self.clone();
        reduced.local_ranks.truncate(1);
        reduced.arithmetic.prescale /= factor;
        reduced
    }
}

/// The plugin of an admitted operation.
#[derive(Clone, Debug)]
pub struct AdmittedPlugin {
    /// The plugin and its parameters.
    pub uses: Arc<PluginUse>,
    /// The number of elements of each tensor of the bucket.
    pub elements: Vec<u64>,
}

/// How the elements of an operation are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arithmetic {
    /// The element type.
    pub dtype: DType,
    /// The reduction, none where elements are only moved.
    pub op: Option<ReduceOp>,
    /// The number of ranks of the set, the divisor of an average.
    pub ranks: u32,
    /// The factor of every contribution.
    pub prescale: f64,
    /// The factor of the result.
    pub postscale: f64,
    /// How elements are encoded on the wire.
    pub codec: Codec,
    /// Whether one sidecar has all ranks' values of an element and reduces them together.
    pub at_once: bool,
}

/// One tensor of an admitted operation.
#[derive(Clone, Debug)]
pub struct AdmittedTensor {
    /// The name.
    pub name: TensorName,
    /// The requests that it completes: one for each local rank that has not joined, ascending by rank.
    pub requests: Vec<AdmittedRequest>,
    /// Whether each rank has a separate result; otherwise they share one, and all shapes are equal.
    pub own: bool,
}

/// A local rank's request for a tensor of an admitted operation.
#[derive(Clone, Debug)]
pub struct AdmittedRequest {
    /// The rank.
    pub rank: Rank,
    /// The worker's number for it.
    pub request: RequestId,
    /// The shape of the rank's result; `[0]` when it gets none.
    pub output: Shape,
    /// Further information for the caller.
    pub detail: Detail,
}
