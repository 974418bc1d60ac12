//! What coordinator and participant have in common: settings, context, process sets, and the rules that both apply alike.

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
pub(crate) mod validation;
pub(crate) mod wording;

use std::collections::BTreeMap;

use bytes::Bytes;
use ronde_wire::{Rank, Request, SetId, TensorName, limits};

/// A tensor's name within its process set.
pub(crate) type TensorKey = (SetId, TensorName);

/// The requests of all ranks of a set for one name.
pub(crate) type RankRequests = BTreeMap<Rank, Request>;

/// The contributions that arrived with the announcements of one name.
pub(crate) type RankContributions = BTreeMap<Rank, Bytes>;

/// Poisoned rounds of all names that may wait for ranks at once.
pub(crate) const POISONED_MAX: usize = limits::PENDING_PER_SESSION_MAX;

/// Tensors of a bucket that a failure names.
pub(crate) const NAMES_MAX: usize = 3;
