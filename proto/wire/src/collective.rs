//! The operations that ranks perform together.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{NameError, Rank, SetId, TensorName};

/// How elements of several ranks become one. The numbers are Horovod's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum divided by the number of ranks of the set; integers truncate toward zero.
    Average = 0,
    /// The sum.
    Sum = 1,
    /// Adaptive summation (Maleki et al., 2020).
    Adasum = 2,
    /// The least element; IEEE 754-2019 `minimum`, so NaN wins.
    Min = 3,
    /// The greatest element; IEEE 754-2019 `maximum`, so NaN wins.
    Max = 4,
    /// The product.
    Product = 5,
    /// The median of all ranks' values, coordinate by coordinate (Yin et al., 2018): the lower and the upper middle
    /// value averaged where the number of ranks is even. Floating-point types only, all-reduce only.
    Median = 6,
    /// The mean of all ranks' tensors, each of which is first scaled down to the median of their Euclidean norms where
    /// it is longer. Floating-point types only, all-reduce only.
    ClippedMean = 7,
    /// The reduction of the plugin that the request names. All-reduce only.
    Plugin = 8,
    /// The bitwise *and*; of bool, whether all are true. Integers and bool only.
    BitAnd = 9,
    /// The bitwise *or*; of bool, whether any is true. Integers and bool only.
    BitOr = 10,
    /// The bitwise exclusive *or*; of bool, whether an odd number is true. Integers and bool only.
    BitXor = 11,
}

impl ReduceOp {
    /// The name that users see.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Average => "average",
            Self::Sum => "sum",
            Self::Adasum => "adasum",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
            Self::Median => "median",
            Self::ClippedMean => "clipped-mean",
            Self::Plugin => "plugin",
            Self::BitAnd => "bit-and",
            Self::BitOr => "bit-or",
            Self::BitXor => "bit-xor",
        }
    }

    /// Whether the operation works on the bits of its operands, which floating-point types do not have.
    #[must_use]
    pub const fn is_bitwise(self) -> bool {
        matches!(self, Self::BitAnd | Self::BitOr | Self::BitXor)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The collective of a request. Each has had its number since the first version of the wire; an engine refuses by name
/// the collectives that it does not support.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Collective {
    /// Every rank gets the reduction of all contributions.
    AllReduce {
        /// How elements are combined.
        op: ReduceOp,
    },
    /// Every rank gets the concatenation of all contributions along the first dimension, in rank order.
    AllGather,
    /// Every rank gets its share of rows of the reduction: the first `rows % ranks` of them one row more.
    ReduceScatter {
        /// How elements are combined.
        op: ReduceOp,
    },
    /// Every rank gets the contribution of the root.
    Broadcast {
        /// The global rank whose tensor is sent.
        root: Rank,
    },
    /// Every rank sends a slice of rows to every other.
    AllToAll {
        /// Rows for each rank of the set, in rank order.
        splits: Vec<u64>,
    },
    /// The root gets the reduction.
    Reduce {
        /// How elements are combined.
        op: ReduceOp,
        /// The global rank that gets the result.
        root: Rank,
    },
    /// The root gets the concatenation.
    Gather {
        /// The global rank that gets the result.
        root: Rank,
    },
    /// Every rank gets its rows of the root's tensor: the first `rows % ranks` of them one more. Only the root's type
    /// and shape count.
    Scatter {
        /// The global rank whose tensor is cut.
        root: Rank,
    },
    /// One rank sends its tensor to another.
    Send {
        /// The receiving global rank.
        to: Rank,
        /// Distinguishes messages between the same two ranks.
        tag: u32,
    },
    /// The other side of [`Collective::Send`]; the sender's type and shape count.
    Recv {
        /// The sending global rank.
        from: Rank,
        /// Distinguishes messages between the same two ranks.
        tag: u32,
    },
    /// No rank passes before all ranks have arrived.
    Barrier,
    /// The rank has no more tensors for the set and takes part with zeros until all ranks of the set have joined.
    Join,
    /// All ranks of the world form a process set of some of them.
    AddSet {
        /// Its ranks, as the caller gave them.
        ranks: Vec<Rank>,
    },
    /// All ranks of the world dissolve a process set.
    RemoveSet {
        /// Which one.
        set: SetId,
    },
    /// The other side of a [`Collective::Send`] of any rank of the set: of the first one that was announced to the
    /// coordinator and is not taken by an earlier receive. Once its source is known it becomes a [`Collective::Recv`].
    RecvAny {
        /// Distinguishes messages between the same two ranks.
        tag: u32,
    },
    /// The ranks of a process set form it by themselves; the other ranks of the world take no part. A set of exactly
    /// these ranks that exists is the answer. Its name is one of [`set_of_members_name`].
    AddSetOfMembers {
        /// Its ranks, as the caller gave them, the caller's own among them.
        ranks: Vec<Rank>,
    },
}

impl Collective {
    /// The name in messages and logs: upper case, as Horovod's users know it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "ALLREDUCE",
            Self::AllGather => "ALLGATHER",
            Self::ReduceScatter { .. } => "REDUCESCATTER",
            Self::Broadcast { .. } => "BROADCAST",
            Self::AllToAll { .. } => "ALLTOALL",
            Self::Reduce { .. } => "REDUCE",
            Self::Gather { .. } => "GATHER",
            Self::Scatter { .. } => "SCATTER",
            Self::Send { .. } => "SEND",
            Self::Recv { .. } | Self::RecvAny { .. } => "RECV",
            Self::Barrier => "BARRIER",
            Self::Join => "JOIN",
            Self::AddSet { .. } | Self::AddSetOfMembers { .. } => "ADD_PROCESS_SET",
            Self::RemoveSet { .. } => "REMOVE_PROCESS_SET",
        }
    }

    /// The reduction, where there is one.
    #[must_use]
    pub const fn reduce_op(&self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce { op } | Self::ReduceScatter { op } | Self::Reduce { op, .. } => Some(*op),
            _ => None,
        }
    }

    /// The root, where there is one.
    #[must_use]
    pub const fn root(&self) -> Option<Rank> {
        match self {
            Self::Broadcast { root } | Self::Reduce { root, .. } | Self::Gather { root } | Self::Scatter { root } => {
                Some(*root)
            }
            _ => None,
        }
    }

    /// Whether a rank has an input: not for a barrier, a join or a change of sets, and not for a rank that only
    /// receives. Requests without an input have type `uint8` and shape `[0]`.
    #[must_use]
    pub fn has_input(&self, me: Rank) -> bool {
        match self {
            Self::Barrier | Self::Join => false,
            Self::AddSet { .. } | Self::AddSetOfMembers { .. } | Self::RemoveSet { .. } => false,
            Self::Recv { .. } | Self::RecvAny { .. } => false,
            Self::Scatter { root } => *root == me,
            _ => true,
        }
    }

    /// Whether a rank gets a result.
    #[must_use]
    pub fn has_result(&self, me: Rank) -> bool {
        match self {
            Self::Reduce { root, .. } | Self::Gather { root } => *root == me,
            Self::Send { .. } | Self::Barrier | Self::Join => false,
            Self::AddSet { .. } | Self::AddSetOfMembers { .. } | Self::RemoveSet { .. } => false,
            _ => true,
        }
    }

    /// The two ranks of a message that `me` requests; `None` also while the source is unknown.
    #[must_use]
    pub const fn pair(&self, me: Rank) -> Option<Pair> {
        match *self {
            Self::Send { to, .. } => Some(Pair { from: me, to }),
            Self::Recv { from, .. } => Some(Pair { from, to: me }),
            _ => None,
        }
    }
}

/// The sender and the receiver of a message. Only these two negotiate and perform it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Pair {
    /// The sending global rank.
    pub from: Rank,
    /// The receiving global rank; another one.
    pub to: Rank,
}

impl Pair {
    /// The name of a message, by which its two ranks agree: `message.<from>.<to>.<tag>.<count>`, where `count` is the
    /// number of earlier messages of this pair, direction and tag, on each side. So the k-th send matches the k-th
    /// receive.
    #[must_use]
    pub fn message_name(self, tag: u32, count: u64) -> TensorName {
        let name = format!("{MESSAGE}.{}.{}.{tag}.{count}", self.from.0, self.to.0);
        TensorName::new(name).expect("three numbers of up to 10 digits and one of up to 20 are a short name")
    }

    /// The number in a name of [`Self::message_name`]; `None` for other names.
    #[must_use]
    pub fn message_count(name: &TensorName) -> Option<u64> {
        Self::of_message(name)?;
        number(name.as_str().rsplit('.').next()?)
    }

    /// The ranks and the tag of a name of [`Self::message_name`]; `None` for other names. These names are reserved for
    /// messages.
    #[must_use]
    pub fn of_message(name: &TensorName) -> Option<(Self, u32)> {
        let numbers = name.as_str().strip_prefix(MESSAGE)?.strip_prefix('.')?;
        let mut numbers = numbers.split('.').map(number);
        let mut small = || u32::try_from(numbers.next()??).ok();
        let (from, to, tag) = (Rank(small()?), Rank(small()?), small()?);
        let last = numbers.next().flatten().is_some() && numbers.next().is_none();
        last.then_some((Self { from, to }, tag))
    }
}

/// The name of a receive from any source: `message.any.<to>.<tag>.<count>`, where `count` is the number of earlier ones
/// of this rank and tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AnySource {
    /// The receiving global rank.
    pub to: Rank,
    /// The tag of the messages that it takes.
    pub tag: u32,
}

impl AnySource {
    /// The name of one of these receives.
    #[must_use]
    pub fn receive_name(self, count: u64) -> TensorName {
        let name = format!("{MESSAGE}.{ANY}.{}.{}.{count}", self.to.0, self.tag);
        TensorName::new(name).expect("two numbers of up to 10 digits and one of up to 20 are a short name")
    }

    /// The rank and the tag of a name of [`Self::receive_name`]; `None` for other names. These names are reserved for
    /// these receives.
    #[must_use]
    pub fn of_receive(name: &TensorName) -> Option<Self> {
        let numbers = name.as_str().strip_prefix(MESSAGE)?.strip_prefix('.')?.strip_prefix(ANY)?.strip_prefix('.')?;
        let mut numbers = numbers.split('.').map(number);
        let mut small = || u32::try_from(numbers.next()??).ok();
        let (to, tag) = (Rank(small()?), small()?);
        let last = numbers.next().flatten().is_some() && numbers.next().is_none();
        last.then_some(Self { to, tag })
    }
}

/// The name of a request for a process set by its members ([`Collective::AddSetOfMembers`]):
/// `add_process_set.members.<own>`. These names are reserved for such requests.
///
/// # Errors
/// [`NameError`] when it is too long.
pub fn set_of_members_name(own: &str) -> Result<TensorName, NameError> {
    TensorName::new(format!("{SET_OF_MEMBERS}{own}"))
}

/// Whether it is a name of [`set_of_members_name`].
#[must_use]
pub fn is_set_of_members_name(name: &TensorName) -> bool {
    name.as_str().starts_with(SET_OF_MEMBERS)
}

const SET_OF_MEMBERS: &str = "add_process_set.members.";
const MESSAGE: &str = "message";
const ANY: &str = "any";

/// A decimal number without leading zeros.
fn number(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let plain = digits && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|_| plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_messages_are_read_back_and_others_are_not() {
        let pair = Pair { from: Rank(3), to: Rank(u32::MAX) };
        assert_eq!(Pair::of_message(&pair.message_name(7, u64::MAX)), Some((pair, 7)));
        let others = [
            "message",
            "message.1.2.3",
            "message.1.2.3.4.5",
            "message.01.2.3.4",
            "message.1.+2.3.4",
            "message.1.2.3.",
            "Message.1.2.3.4",
            "message.1.2.3.x",
            "message1.2.3.4",
            "message.1.2.4294967296.4",
            "message.1.-2.3.4",
        ];
        for other in others {
            let name = TensorName::new(other).expect("a name");
            assert_eq!((Pair::of_message(&name), Pair::message_count(&name)), (None, None), "{other}");
        }
        assert_eq!(Pair::message_count(&pair.message_name(7, 12)), Some(12));
    }

    #[test]
    fn names_of_receives_from_any_source_are_read_back_and_others_are_not() {
        let any = AnySource { to: Rank(u32::MAX), tag: 7 };
        let name = any.receive_name(u64::MAX);
        assert_eq!((AnySource::of_receive(&name), Pair::of_message(&name)), (Some(any), None));
        let pair = Pair { from: Rank(3), to: Rank(1) };
        assert_eq!(AnySource::of_receive(&pair.message_name(7, 0)), None);
        for other in ["message.any", "message.any.1.2", "message.any.1.2.3.4", "message.any.01.2.3", "any.1.2.3"] {
            assert_eq!(AnySource::of_receive(&TensorName::new(other).expect("a name")), None, "{other}");
        }
    }
}
