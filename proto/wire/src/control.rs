//! Control messages between sidecars, and the hello that opens every connection.
//!
//! They are encoded with postcard (a stable, specified binary format of serde) inside [`FrameKind::Control`] frames.
//! All of them are sent to or from the coordinator, hop by hop along the tree of control links, except those about one
//! link or one path: heartbeats, and the relay messages from [`Control::Ascending`] on.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::codec::Codec;
use crate::collective::{Collective, Pair};
use crate::dtype::DType;
use crate::failure::Failure;
use crate::frame::{Frame, FrameError, FrameKind, PLANNER_VERSION, WIRE_VERSION, WIRE_VERSION_MIN};
use crate::ids::{Epoch, Incarnation, JobName, Lane, Rank, Seq, SetId, SidecarIndex, TensorName};
use crate::plugin::PluginUse;
use crate::record::Activity;
use crate::relay::{Ascent, Enclosed};
use crate::request::{Group, Request, Shape};
use crate::schedule::{Invalidation, ScheduledBucket};
use crate::sidecars::SidecarSet;
use crate::tuning::Tuning;
use crate::world::{ProcessSet, World};

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Purpose {
    /// Control messages.
    Control,
    /// Chunks of one lane.
    Data(Lane),
}

/// The first frame of each side. The acceptor answers with its own or with a [`Refusal`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The oldest and the newest wire version that the sender reads.
    pub wire_versions: (u16, u16),
    /// The sender's planner version; both sides must have the same.
    pub planner_version: u32,
    /// The job.
    pub job: JobName,
    /// The sender; must be the index in its certificate.
    pub sidecar: SidecarIndex,
    /// The process of that sidecar.
    pub incarnation: Incarnation,
    /// What the connection is for.
    pub purpose: Purpose,
    /// Bytes of chunks for operations not yet admitted that the sender of this hello buffers for the other side on
    /// this lane; 0 on control connections.
    pub early_credit_bytes: u64,
    /// The number of lanes that the sender offers.
    pub lanes: u16,
    /// The transport of the sender's links; both sides must have the same setting.
    pub transport: Transport,
    /// Whether the connection replaces an open one, which ends when both directions have moved.
    pub replaces: bool,
    /// The number of the membership in which the sender takes part; both sides must have the same.
    pub membership: u64,
}

impl Hello {
    /// Why a sidecar of `job` rejects a hello from an authenticated peer; `None` when it accepts it.
    #[must_use]
    pub fn refusal(&self, job: &JobName, authenticated: SidecarIndex) -> Option<Refusal> {
        let (oldest, newest) = self.wire_versions;
        let refuse = |reason: String| Some(Refusal { reason });
        if oldest > WIRE_VERSION || newest < WIRE_VERSION_MIN {
            return refuse(format!(
                "no common wire version: peer {oldest} to {newest}, here {WIRE_VERSION_MIN} to {WIRE_VERSION}; install the same release on all hosts"
            ));
        }
        if self.planner_version != PLANNER_VERSION {
            let theirs = self.planner_version;
            return refuse(format!(
                "planner version {theirs} is not {PLANNER_VERSION}; install the same release on all hosts"
            ));
        }
        if self.job != *job {
            return refuse(format!("job {} is not job {job}", self.job));
        }
        if self.sidecar != authenticated {
            return refuse(format!("the certificate is {authenticated}'s, but the hello claims {}", self.sidecar));
        }
        None
    }
}

/// The transport of the links between sidecars: a setting of the job, equal on all of its sidecars.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// Control over QUIC, lanes over TLS.
    #[default]
    Auto,
    /// Everything over QUIC, which is UDP.
    Quic,
    /// Everything over TLS 1.3 over TCP.
    Tls,
}

impl Transport {
    /// The setting's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Quic => "quic",
            Self::Tls => "tls",
        }
    }

    /// The carrier of a connection for this purpose. There is no fallback.
    #[must_use]
    pub const fn carrier(self, purpose: Purpose) -> Carrier {
        match (self, purpose) {
            (Self::Quic, _) | (Self::Auto, Purpose::Control) => Carrier::Quic,
            (Self::Tls, _) | (Self::Auto, Purpose::Data(_)) => Carrier::Tls,
        }
    }
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = [Self::Auto, Self::Quic, Self::Tls].into_iter().find(|transport| transport.as_str() == text);
        known.ok_or_else(|| format!("{text:?} is not auto, quic or tls"))
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The protocol under one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Carrier {
    /// QUIC over UDP.
    Quic,
    /// TLS 1.3 over TCP.
    Tls,
}

impl Carrier {
    /// The display name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Quic => "QUIC",
            Self::Tls => "TLS over TCP",
        }
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The close reason of a connection over TCP; the last frame of a side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Close {
    /// The error code; the numbers are those of QUIC's application errors.
    pub code: u32,
    /// The message for the log.
    pub reason: String,
}

/// Why a connection is rejected; the connection is closed after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The message for the log.
    pub reason: String,
}

/// A message of the control plane.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Control {
    /// Liveness. The stamps measure round trips and clock offsets.
    Heartbeat {
        /// The sender's monotonic clock, in microseconds.
        sent_us: u64,
        /// The newest `sent_us` received from the receiver; 0 for none.
        echo_us: u64,
        /// Microseconds between receiving that and sending this.
        held_us: u64,
    },
    /// To the coordinator: these ranks have attached since the last epoch ended.
    Attached {
        /// The ranks, all placed on the sender.
        ranks: Vec<Rank>,
    },
    /// To the coordinator: a rank has left; the epoch ends.
    Left {
        /// The rank, placed on the sender.
        rank: Rank,
        /// Why: `ShutDown` for an orderly close, `RankLost` otherwise.
        failure: Failure,
    },
    /// To the coordinator: the sender cannot reach another sidecar, or receives nothing from it.
    Unreachable {
        /// The unreachable sidecar.
        sidecar: SidecarIndex,
        /// What was observed.
        reason: String,
    },
    /// From the coordinator: an epoch begins; its number is in the frame.
    EpochBegin {
        /// The membership.
        world: World,
        /// Bytes of a contribution up to which operations of the epoch travel eagerly; 0 for none,
        /// [`crate::limits::EAGER_BYTES_MAX`] at most.
        eager_bytes: u32,
    },
    /// From the coordinator: the epoch of the frame is over; nothing else of it completes.
    EpochEnd {
        /// Why, with the culprit.
        failure: Failure,
    },
    /// To the coordinator: requests of the sender's ranks.
    Announce {
        /// The announcements, in the order of submission.
        announcements: Vec<Announcement>,
    },
    /// From the coordinator: perform this operation; its number is in the frame.
    Order(Order),
    /// From the coordinator: the request with this name fails on all ranks of the set; the job continues.
    Reject {
        /// The set.
        set: SetId,
        /// The name.
        name: TensorName,
        /// Why, with the culprit.
        failure: Failure,
        /// Ranks of the set that take no part in this round of the name, because they have joined, ascending.
        excused: Vec<Rank>,
    },
    /// From the coordinator: all ranks, or its members by themselves, requested a process set, which now exists.
    /// Requests for it follow this message. Where its members requested a set that exists, only their sidecars get it.
    SetAdded {
        /// The name of the requests that this answers, in the world's set.
        name: TensorName,
        /// The new set, with an id that no other set has now.
        set: ProcessSet,
    },
    /// From the coordinator: all ranks requested the removal of a process set; it gets no more operations.
    SetRemoved {
        /// The name of the requests that this answers, in the world's set.
        name: TensorName,
        /// The removed set; its id may be used again.
        set: SetId,
    },
    /// To the coordinator: the sender sends nothing more about a removed set, so that its id may be used again.
    SetForgotten {
        /// The set.
        set: SetId,
    },
    /// From the coordinator: all ranks of a set have joined; all of them take part again from now on.
    AllJoined {
        /// The set.
        set: SetId,
        /// The name of the requests that this answers, in that set.
        name: TensorName,
        /// The rank that joined last.
        last: Rank,
    },
    /// To the coordinator, from the first member of the operation's set: the operation of the frame's seq is done here.
    Done,
    /// To the coordinator: the operation of the frame's seq cannot be performed here; the epoch ends.
    Failed {
        /// Why, naming the sender.
        failure: Failure,
    },
    /// From the coordinator: the silent peers, for status pages and waiting ranks. Nothing fails.
    Suspects {
        /// Sidecars that have been silent for [`crate::limits::SUSPECT_MS`].
        sidecars: Vec<SidecarIndex>,
        /// Ranks whose process has been silent for as long.
        ranks: Vec<Rank>,
    },
    /// To the coordinator: ranks of the sender that have been silent, the whole list each time it changes.
    SuspectRanks {
        /// The ranks.
        ranks: Vec<Rank>,
    },
    /// From the coordinator: a request for the activity of missing ranks, for which others wait.
    AskActivity {
        /// The ranks, all placed on the receiver; at most [`crate::limits::REPORT_RANKS_MAX`].
        ranks: Vec<Rank>,
    },
    /// To the coordinator: the answer.
    Activities {
        /// The activities, in the order of the request.
        activities: Vec<Activity>,
    },
    /// To the parent in the tree: items of the sender and the sidecars below it for the coordinator, in order.
    Ascending {
        /// The parent's newest number in [`Control::PathUp`]; frames with another number are void.
        generation: u64,
        /// The items.
        ascents: Vec<Ascent>,
    },
    /// From the parent in the tree: a message of the coordinator, whose epoch and seq are in the frame.
    Descending {
        /// The recipients among the receiver and the sidecars below it; all of them when absent.
        to: Option<SidecarSet>,
        /// The message.
        message: Enclosed,
    },
    /// From the parent in the tree: there is a new path to the coordinator.
    PathUp {
        /// A number that this parent has not used on this link before.
        generation: u64,
    },
    /// From the parent in the tree: the path to the coordinator is lost.
    PathDown {
        /// The lost sidecar.
        sidecar: SidecarIndex,
        /// What was observed.
        reason: String,
    },
    /// From the coordinator: it has received [`Ascent::Joined`] of the receiver. Its next messages use that path.
    Welcome {
        /// The receiver.
        sidecar: SidecarIndex,
        /// The generation in which it joined.
        generation: u64,
    },
    /// From the coordinator, to a sidecar's parent: close the link to it.
    Expel {
        /// The sidecar.
        sidecar: SidecarIndex,
        /// How it broke the protocol.
        reason: String,
    },
    /// Over one link of the tree: the silent sidecars, upwards those below the sender, downwards those between the
    /// coordinator and the sender. The whole list with each heartbeat while it is not empty, and once when it becomes
    /// empty.
    Silent {
        /// The sidecars, with the milliseconds since their neighbour last received from them.
        sidecars: Vec<(SidecarIndex, u64)>,
    },
    /// From the coordinator: from now on these operations repeat without being announced or ordered. The operation at
    /// position `p` of iteration `k`, both counted from 0, has the frame's seq plus `k` times the number of buckets
    /// plus `p`. Announcements that are not ordered are void. At most [`crate::limits::SCHEDULE_BUCKETS_MAX`] buckets
    /// with [`crate::limits::SCHEDULE_TENSORS_MAX`] tensors of [`crate::limits::SCHEDULE_SETS_MAX`] sets; no name
    /// twice.
    Schedule {
        /// Counts the schedules of the epoch.
        number: u64,
        /// One iteration.
        buckets: Vec<ScheduledBucket>,
        /// For how long a rank may deviate from the order before it invalidates the schedule, in microseconds.
        patience_us: u64,
    },
    /// To the coordinator: the schedule of this number is invalid.
    Invalidated {
        /// The schedule.
        number: u64,
        /// Why.
        invalidation: Invalidation,
    },
    /// From the coordinator: stop admitting and completing operations of the schedule, and answer.
    Withdraw {
        /// The schedule.
        number: u64,
    },
    /// To the coordinator, the answer to [`Control::Withdraw`].
    Frozen {
        /// The schedule.
        number: u64,
        /// The last admitted operation of it; the seq before its first operation for none.
        admitted: Seq,
        /// The last completed operation of it in each set with any.
        completed: Vec<(SetId, Seq)>,
    },
    /// From the coordinator: the schedule is over. Its operations after those in `completed` are dropped with their
    /// chunks, and their requests are announced again.
    Resume {
        /// The schedule.
        number: u64,
        /// The last seq that any sidecar has admitted of it: the seqs of later orders are greater.
        last: Seq,
        /// The last operation of each set that is still performed: all members have admitted it.
        completed: Vec<(SetId, Seq)>,
    },
    /// To the coordinator, from each member of an operation with a plugin: the operation of the frame's seq is
    /// performed here, or cannot be. No rank gets the result before all members have reported.
    Performed {
        /// Why it cannot be performed; the epoch continues.
        failure: Option<Failure>,
    },
    /// From the coordinator, to the members of such an operation: it is committed, or it fails everywhere.
    Commit {
        /// Why it fails.
        failure: Option<Failure>,
    },
    /// From the coordinator, to the sidecar of the receiving rank: a receive from any source is matched with this
    /// message.
    Matched {
        /// The set.
        set: SetId,
        /// The name of the receive, which has the receiving rank and the tag.
        receive: TensorName,
        /// The name of the message, which has the source.
        message: TensorName,
    },
    /// From the coordinator, to the sidecars of these ranks: their pending requests for a process set of its members
    /// ([`Collective::AddSetOfMembers`]) fail; the job continues.
    SetRefused {
        /// The name of the requests, in the world's set.
        name: TensorName,
        /// The ranks, ascending; all of them have announced such a request that was not answered.
        ranks: Vec<Rank>,
        /// Why, with the culprit.
        failure: Failure,
    },
}

/// What one rank announces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Announcement {
    /// The rank.
    pub rank: Rank,
    /// What it announces.
    pub intent: Intent,
    /// The rank's contribution, where the request is eager; empty otherwise.
    pub contribution: Bytes,
}

impl Announcement {
    /// An announcement without a contribution.
    #[must_use]
    pub const fn new(rank: Rank, intent: Intent) -> Self {
        Self { rank, intent, contribution: Bytes::new() }
    }
}

/// A request, or the end of one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Intent {
    /// The rank is ready for it.
    Ready(Request),
    /// The rank is ready for it, and both sides cache it in a slot of the sender's choice, below
    /// [`crate::limits::ANNOUNCE_SLOTS_MAX`], which replaces the previous entry.
    Remember {
        /// The slot.
        slot: u16,
        /// The request.
        request: Request,
    },
    /// The rank is ready for the request in a cache slot.
    Again {
        /// The slot.
        slot: u16,
    },
    /// The rank's request was refused by its sidecar, or withdrawn by the rank before it was ordered: it fails
    /// everywhere.
    Void {
        /// The set.
        set: SetId,
        /// The name.
        name: TensorName,
        /// Why, naming the rank.
        failure: Failure,
        /// The request's group, which continues without it.
        group: Option<Group>,
    },
    /// The rank's request for a process set of its members ([`Collective::AddSetOfMembers`]) was refused by its
    /// sidecar, or withdrawn by the rank before it was answered: it fails on the other members, too.
    VoidSet {
        /// The name, in the world's set.
        name: TensorName,
        /// The ranks of the set as far as they are valid, ascending, the announcing one among them.
        ranks: Vec<Rank>,
        /// Why, naming the rank.
        failure: Failure,
    },
}

/// An ordered operation: a bucket of tensors that one plan reduces, gathers or broadcasts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// The set.
    pub set: SetId,
    /// The collective, equal for all tensors of the bucket.
    pub collective: Collective,
    /// The element type, equal for all.
    pub dtype: DType,
    /// Equal for all.
    pub prescale: f64,
    /// Equal for all.
    pub postscale: f64,
    /// Equal for all.
    pub codec: Codec,
    /// Equal for all.
    pub plugin: Option<Arc<PluginUse>>,
    /// The ranks of a message ([`Collective::Send`]); the topology of its plan has only these two.
    pub pair: Option<Pair>,
    /// Ranks of the set that have joined, ascending: they have no request and contribute zeros.
    pub joined: Vec<Rank>,
    /// The tensors, in the bucket's order.
    pub tensors: Vec<OrderedTensor>,
    /// How the plan is made.
    pub tuning: Tuning,
    /// The first 16 bytes of SHA-256 over all inputs of the plan: a sidecar with another digest fails and names itself.
    pub digest: [u8; 16],
    /// For an eager operation, the contributions of all ranks of the set to each tensor, in rank order, empty for ranks
    /// without one. Empty otherwise.
    pub contributions: Vec<Vec<Bytes>>,
}

/// A tensor of an order. It suffices for a sidecar without a request for it, whose ranks have joined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OrderedTensor {
    /// The name.
    pub name: TensorName,
    /// The shape: of every contribution, or of the lowest rank's where `rows` says how the first dimension differs; of
    /// the root's for a scatter, of the sender's for a message.
    pub shape: Shape,
    /// For an all-gather and a gather: rows that each rank of the set contributes, in rank order. For an all-to-all:
    /// rows from each rank to each rank, those of the lowest sender first. Empty otherwise.
    pub rows: Vec<u64>,
}

/// Encodes a message as the payload of a frame.
///
/// # Panics
/// Never for messages within [`crate::limits`]; callers split announcements by [`crate::limits`] beforehand.
#[must_use]
pub fn encode<T: Serialize>(message: &T) -> Bytes {
    postcard::to_stdvec(message).expect("serialising to memory does not fail").into()
}

/// Decodes a payload; trailing bytes are an error.
///
/// # Errors
/// [`FrameError::Payload`] with the decoder's reason.
pub fn decode<'a, T: Deserialize<'a>>(kind: FrameKind, payload: &'a [u8]) -> Result<T, FrameError> {
    let refuse = |reason: String| FrameError::Payload { kind, reason };
    match postcard::take_from_bytes(payload) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(refuse(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(refuse(error.to_string())),
    }
}

impl Control {
    /// The message as a frame.
    #[must_use]
    pub fn into_frame(self, epoch: Epoch, seq: Seq) -> Frame {
        Frame::new(FrameKind::Control, epoch, seq, encode(&self))
    }

    /// The message in a frame of kind [`FrameKind::Control`].
    ///
    /// # Errors
    /// [`FrameError::Payload`] when it is none.
    pub fn from_frame(frame: &Frame) -> Result<Self, FrameError> {
        decode(frame.header.kind, &frame.payload)
    }
}
