//! What an engine tells of the operations that it handles, for timelines. It has no clock: whoever takes the traces stamps them,
//! right behind the call that brought them about.

use ronde_wire::control::Order;
use ronde_wire::{Collective, DType, Rank, ReduceOp, Seq, SetId, Shape, TensorName};

/// Something that happened to an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trace {
    /// A rank is ready. At the coordinator that is any rank, but within a schedule, when only local ones are heard of.
    Ready {
        /// The set.
        set: SetId,
        /// The operation's name.
        name: TensorName,
        /// What it is, as [`operation`] says.
        operation: &'static str,
        /// The rank.
        rank: Rank,
    },
    /// It was agreed about and is over without being performed: a join or a change of sets, or it has failed.
    Concluded {
        /// The set.
        set: SetId,
        /// The operation's name.
        name: TensorName,
        /// What it was, as [`operation`] says; `None` for a failure.
        operation: Option<&'static str>,
    },
    /// It is ordered, by the coordinator or by its turn in a schedule.
    Ordered {
        /// Its number.
        seq: Seq,
        /// The set.
        set: SetId,
        /// What it is, as [`operation`] says.
        operation: &'static str,
        /// The type of the elements.
        dtype: DType,
        /// The tensors that travel together, with their shapes.
        tensors: Vec<(TensorName, Shape)>,
        /// Whether it stands in a schedule.
        ahead: bool,
    },
    /// It is over here, or, where this sidecar has no part in it, at the one that reports it.
    Over {
        /// Its number.
        seq: Seq,
        /// Whether it was dropped, to be asked for again.
        dropped: bool,
    },
    /// The coordinator has issued an order or a schedule.
    Cycle,
    /// The epoch is over, and all that was under way.
    EpochOver,
}

impl Trace {
    /// The trace of an order. `ahead` tells whether it belongs to a schedule.
    pub(crate) fn ordered(seq: Seq, order: &Order, ahead: bool) -> Self {
        let tensors = order.tensors.iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect();
        let operation = operation(&order.collective);
        Self::Ordered { seq, set: order.set, operation, dtype: order.dtype, tensors, ahead }
    }
}

/// What an operation is called in timelines: the collective, but for a reduction that is known by its own name.
#[must_use]
pub const fn operation(collective: &Collective) -> &'static str {
    match collective {
        Collective::AllReduce { op: ReduceOp::Adasum } => "ADASUM",
        other => other.name(),
    }
}

/// Traces that nobody has taken yet.
#[derive(Debug, Default)]
pub(crate) struct Traces {
    /// Whether anybody wants them.
    wanted: bool,
    kept: Vec<Trace>,
}

impl Traces {
    /// Keeps one, if it is wanted.
    pub(crate) fn note(&mut self, trace: impl FnOnce() -> Trace) {
        if self.wanted {
            self.kept.push(trace());
        }
    }

    /// Whether they are wanted from now on.
    pub(crate) fn want(&mut self, wanted: bool) {
        *self = Self { wanted, kept: Vec::new() };
    }

    /// All that are kept.
    pub(crate) fn take(&mut self) -> Vec<Trace> {
        std::mem::take(&mut self.kept)
    }
}
