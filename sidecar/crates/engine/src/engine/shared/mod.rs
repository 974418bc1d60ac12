//! Code that coordinator and participant share: settings, context, process sets, and rules that both apply.

pub(crate) mod calibration;
pub(crate) mod config;
pub(crate) mod context;
pub(crate) mod eager;
pub(crate) mod links;
pub(crate) mod planning;
pub(crate) mod request_cache;
pub(crate) mod sets;
pub(crate) mod shapes;
pub(crate) mod stats;
pub(crate) mod status;
pub(crate) mod tuning;
pub(crate) mod validation;
pub(crate) mod waits;
pub(crate) mod wording;

use std::collections::BTreeMap;

use bytes::Bytes;
use ronde_wire::{AnySource, Rank, Request, RequestId, SetId, SidecarIndex, TensorName, limits};

/// A tensor's name within its process set.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TensorKey {
    pub(crate) set: SetId,
    pub(crate) name: TensorName,
}

impl TensorKey {
    pub(crate) fn new(set: SetId, name: &TensorName) -> Self {
        Self { set, name: name.clone() }
    }

    /// The key of a request.
    pub(crate) fn of(what: &Request) -> Self {
        Self::new(what.set, &what.name)
    }
}

/// A local rank and its worker's number for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RequestKey {
    pub(crate) rank: Rank,
    pub(crate) request: RequestId,
}

/// A request and the contribution that travels with its announcement: empty unless the request is eager.
#[derive(Clone, Debug)]
pub(crate) struct Submission {
    pub(crate) what: Request,
    pub(crate) contribution: Bytes,
}

/// The receives of one rank with one tag in one set, which are matched with messages in posting order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mailbox {
    pub(crate) set: SetId,
    pub(crate) any: AnySource,
}

/// Sidecars and ranks that are silent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Suspects {
    pub(crate) sidecars: Vec<SidecarIndex>,
    pub(crate) ranks: Vec<Rank>,
}

/// The requests of all ranks of a set for one name.
pub(crate) type RankRequests = BTreeMap<Rank, Request>;

/// The contributions in the announcements of one name, by rank.
pub(crate) type RankContributions = BTreeMap<Rank, Bytes>;

/// The greatest number of an operation: far above any real one, and so far below the end of the range that counting on from
/// it cannot overflow.
pub(crate) const SEQ_MAX: u64 = u64::MAX / 2;

/// Poisoned rounds of all names that may wait for ranks at the same time.
pub(crate) const POISONED_MAX: usize = limits::PENDING_PER_SESSION_MAX;

/// Tensors of a bucket that a failure names.
pub(crate) const NAMES_MAX: usize = 3;
