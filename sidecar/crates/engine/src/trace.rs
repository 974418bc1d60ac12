//! Traces of the operations that an engine handles, for timelines. The caller adds the time, right after the call that
//! produced them.

use ronde_wire::control::Order;
use ronde_wire::{Collective, DType, Rank, ReduceOp, Seq, SetId, Shape, TensorName};

/// An event in the life of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trace {
    /// A rank is ready. The coordinator traces all ranks; under a schedule each sidecar traces only its local ranks.
    Ready {
        /// The set.
        set: SetId,
        /// The operation's name.
        name: TensorName,
        /// The name of the kind of operation, from [`operation`].
        operation: &'static str,
        /// The rank.
        rank: Rank,
    },
    /// The negotiation ended without an operation: a join or a change of sets, or a failure.
    Concluded {
        /// The set.
        set: SetId,
        /// The operation's name.
        name: TensorName,
        /// The name of the kind of operation, from [`operation`]; `None` for a failure.
        operation: Option<&'static str>,
    },
    /// The operation is ordered, by the coordinator or by a schedule.
    Ordered {
        /// Its number.
        seq: Seq,
        /// The set.
        set: SetId,
        /// The name of the kind of operation, from [`operation`].
        operation: &'static str,
        /// The type of the elements.
        dtype: DType,
        /// The tensors that travel together, with their shapes.
        tensors: Vec<(TensorName, Shape)>,
        /// Whether it is part of a schedule.
        ahead: bool,
    },
    /// The operation is over here, or at its reporting member when this sidecar takes no part in it.
    Over {
        /// Its number.
        seq: Seq,
        /// Whether it was dropped, to be announced again.
        dropped: bool,
    },
    /// The coordinator has issued an order or a schedule.
    Cycle,
    /// The epoch is over, and with it all operations.
    EpochOver,
}

impl Trace {
    /// The trace of an order. `ahead` marks one of a schedule.
    pub(crate) fn ordered(seq: Seq, order: &Order, ahead: bool) -> Self {
        let tensors = order.tensors.iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect();
        let operation = operation(&order.collective);
        Self::Ordered { seq, set: order.set, operation, dtype: order.dtype, tensors, ahead }
    }
}

/// The name of an operation in timelines: its collective, or `ADASUM`.
#[must_use]
pub const fn operation(collective: &Collective) -> &'static str {
    match collective {
        Collective::AllReduce { op: ReduceOp::Adasum } => "ADASUM",
        other => other.name(),
    }
}

/// Traces that are not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Traces {
    /// Whether tracing is on.
    wanted: bool,
    kept: Vec<Trace>,
}

impl Traces {
    /// Keeps a trace while tracing is on.
    pub(crate) fn note(&mut self, trace: impl FnOnce() -> Trace) {
        if self.wanted {
            self.kept.push(trace());
        }
    }

    /// Turns tracing on or off.
    pub(crate) fn want(&mut self, wanted: bool) {
        *self = Self { wanted, kept: Vec::new() };
    }

    /// Takes all kept traces.
    pub(crate) fn take(&mut self) -> Vec<Trace> {
        std::mem::take(&mut self.kept)
    }
}
