//! [`Output`]: the result of an operation, and the types that clients convert it to.

use ronde_wire::{Collective, Detail, SetId};

use crate::error::Error;
use crate::tensor::Tensor;

/// The complete result of an operation on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The result; `None` for operations without one, and on ranks that get none.
    pub tensor: Option<Tensor>,
    /// Further information, such as the rank that sent a message.
    pub detail: Detail,
    collective: Collective,
}

impl Output {
    pub(crate) fn new(tensor: Option<Tensor>, detail: Detail, collective: Collective) -> Self {
        Self { tensor, detail, collective }
    }
}

/// A process set: some ranks of the world, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSet {
    /// Its number.
    pub id: SetId,
    /// Its global ranks, ascending.
    pub ranks: Vec<u32>,
}

impl ProcessSet {
    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The position of a global rank in the set; `None` when it is not in it.
    #[must_use]
    pub fn position(&self, rank: u32) -> Option<usize> {
        self.ranks.binary_search(&rank).ok()
    }
}

/// A message and its sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The sender's tensor.
    pub tensor: Tensor,
    /// The sender's global rank.
    pub source: u32,
}

/// The result of an all-to-all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchanged {
    /// The rows from all ranks, in rank order of the set.
    pub tensor: Tensor,
    /// How many rows came from each rank of the set, in rank order.
    pub received_splits: Vec<u64>,
}

/// A type that the result of an operation can be converted to.
pub trait Outcome: Sized + private::Sealed {
    /// Converts an operation's output.
    ///
    /// # Errors
    /// [`Error::Protocol`] when the sidecar's answer lacks a part of it.
    fn of(output: Output) -> Result<Self, Error>;
}

impl Outcome for Output {
    fn of(output: Output) -> Result<Self, Error> {
        Ok(output)
    }
}

impl Outcome for () {
    fn of(_: Output) -> Result<Self, Error> {
        Ok(())
    }
}

impl Outcome for Tensor {
    fn of(output: Output) -> Result<Self, Error> {
        output.tensor.ok_or_else(|| lacks(&output.collective, "a result"))
    }
}

impl Outcome for Option<Tensor> {
    fn of(output: Output) -> Result<Self, Error> {
        Ok(output.tensor)
    }
}

impl Outcome for Exchanged {
    fn of(output: Output) -> Result<Self, Error> {
        match (output.tensor, output.detail) {
            (Some(tensor), Detail::Splits(received_splits)) => Ok(Self { tensor, received_splits }),
            _ => Err(lacks(&output.collective, "a result with its splits")),
        }
    }
}

impl Outcome for Received {
    fn of(output: Output) -> Result<Self, Error> {
        match (output.tensor, output.detail) {
            (Some(tensor), Detail::Source(source)) => Ok(Self { tensor, source: source.0 }),
            _ => Err(lacks(&output.collective, "a message with its source")),
        }
    }
}

/// The rank that joined last.
impl Outcome for u32 {
    fn of(output: Output) -> Result<Self, Error> {
        match output.detail {
            Detail::LastJoined(rank) => Ok(rank.0),
            _ => Err(lacks(&output.collective, "the rank that joined last")),
        }
    }
}

impl Outcome for ProcessSet {
    fn of(output: Output) -> Result<Self, Error> {
        match (output.detail, output.collective) {
            (Detail::Set(id), Collective::AddSet { ranks } | Collective::AddSetOfMembers { ranks }) => {
                Ok(Self { id, ranks: ranks.into_iter().map(|rank| rank.0).collect() })
            }
            (_, collective) => Err(lacks(&collective, "the number of the set")),
        }
    }
}

fn lacks(collective: &Collective, what: &str) -> Error {
    Error::Protocol { reason: format!("the answer to {} lacks {what}", collective.name()) }
}

mod private {
    /// Only this crate implements `Outcome`.
    pub trait Sealed {}

    impl Sealed for super::Output {}
    impl Sealed for () {}
    impl Sealed for super::Tensor {}
    impl Sealed for Option<super::Tensor> {}
    impl Sealed for super::Exchanged {}
    impl Sealed for super::Received {}
    impl Sealed for u32 {}
    impl Sealed for super::ProcessSet {}
}
