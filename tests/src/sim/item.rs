//! An item: one named request of some ranks, with each rank's request and the shape of its result.

use std::collections::BTreeMap;

use ronde_wire::{
    AnySource, Codec, Collective, DType, Detail, Group, Pair, Rank, ReduceOp, Request, SetId, Shape, TensorName,
};

use super::fake_plugins::FakePlugin;

/// One named request of all ranks of a set that take part.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) place: SetOf,
    /// The set's ranks.
    pub(super) ranks: Vec<Rank>,
    /// The ranks that submit it: the two of a message, or those that have not joined by then.
    pub(super) askers: Vec<Rank>,
    pub(super) name: TensorName,
    pub(super) kind: Kind,
    pub(super) dtype: DType,
    pub(super) codec: Codec,
    /// The plugin that encodes or reduces, if there is one.
    pub(super) plugin: Option<FakePlugin>,
    /// Whether the plugin fails now and then, with all operations performed together.
    pub(super) may_fail: bool,
    pub(super) group: Option<Group>,
    /// How many dimensions the shape has: 0 to 2.
    pub(super) dimensions: usize,
    /// Elements of a row.
    pub(super) columns: u64,
    /// Rows, for each rank of the set.
    pub(super) rows: Vec<u64>,
    /// Of an all-to-all: rows from each rank to each rank.
    pub(super) splits: Vec<Vec<u64>>,
    /// What contributions and the result are multiplied by.
    pub(super) scales: (f64, f64),
    pub(super) injected: InjectedError,
    pub(super) excuse: Option<Excuse>,
    /// Whether a rank's result is larger than the limit: then it fails on all ranks.
    pub(super) too_large: bool,
    /// Items whose answer a rank waits for before it submits this one.
    pub(super) after: Vec<usize>,
    /// Items that a rank submits before this one.
    pub(super) asked_before: Vec<usize>,
    /// Its position in the loop that every rank goes through, if it is a part of that.
    pub(super) turn: Option<usize>,
    /// Makes the values of different items and epochs differ.
    pub(super) salt: u64,
}

/// The set of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SetOf {
    /// One whose number is known.
    Fixed(SetId),
    /// The one that an earlier item adds.
    Added(usize),
}

/// The kind of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    Broadcast(Rank),
    AllToAll,
    Reduce(ReduceOp, Rank),
    Gather(Rank),
    Scatter(Rank),
    Message(Pair, u32),
    Barrier,
    Join,
    /// Ranks as the callers give them.
    AddSet(Vec<Rank>),
    /// The ranks form a set by themselves. The number of the set, if it exists already.
    FormSet(Vec<Rank>, Option<SetId>),
    /// The set that an earlier item added; one that never was for none.
    RemoveSet(Option<usize>),
}

/// An error injected into an item by intent: it fails on all ranks, or, if withdrawn, may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InjectedError {
    None,
    /// This rank submits a different request.
    Mismatch(Rank, Difference),
    /// This rank's service refuses its request.
    Refused(Rank),
    /// This rank's request is invalid, which its engine detects.
    Absurd(Rank),
    /// This rank withdraws its request soon.
    Withdrawn(Rank),
    /// The request is invalid on every rank; the failure has this text.
    Nonsense(&'static str),
    /// A rank has joined before submitting it, which it does not support.
    Joined,
    /// A rank never submits it, and the set is removed.
    Missing,
}

/// How a rank's request differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Difference {
    Type,
    Operation,
    Dimensions,
    Reduction,
    Root,
    Scale,
    Codec,
    List,
}

/// Why an item may fail without an injected error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Excuse {
    /// Its set is removed while it is pending.
    Removed,
    /// A rank's join fails, without which it was to be performed.
    JoinFails,
}

/// Which sets a rank has added, by item.
pub(super) type Added = BTreeMap<usize, SetId>;

/// A set that no rank ever adds.
pub(super) const NO_SET: SetId = SetId(7_000);

impl Item {
    /// Builds a rank's request; the rank knows the sets that it needs.
    pub(super) fn request(&self, rank: Rank, added: &Added) -> Request {
        let mut request = self.plain_request(rank, added);
        match self.injected {
            InjectedError::Mismatch(culprit, difference) if culprit == rank => {
                self.differ(rank, &mut request, difference);
            }
            InjectedError::Absurd(culprit) if culprit == rank => self.make_absurd(&mut request),
            _ => {}
        }
        request
    }

    /// The set of the item, for a rank that knows it.
    pub(super) fn set(&self, added: &Added) -> SetId {
        match self.place {
            SetOf::Fixed(set) => set,
            SetOf::Added(item) => added.get(&item).copied().unwrap_or(NO_SET),
        }
    }

    /// The shape of a rank's result.
    pub(super) fn output(&self, rank: Rank) -> Shape {
        let position = self.position(rank);
        match &self.kind {
            Kind::AllReduce(_) | Kind::Broadcast(_) => self.shape(self.rows[0]),
            Kind::AllGather => self.shape(self.rows.iter().sum()),
            Kind::ReduceScatter(_) => self.shape(self.share(self.rows[0], position).1),
            Kind::Scatter(root) => self.shape(self.share(self.rows[self.position(*root)], position).1),
            Kind::AllToAll => self.shape(self.splits.iter().map(|splits| splits[position]).sum()),
            Kind::Reduce(_, root) if *root == rank => self.shape(self.rows[0]),
            Kind::Gather(root) if *root == rank => self.shape(self.rows.iter().sum()),
            Kind::Message(pair, _) if pair.to == rank => self.shape(self.rows[self.position(pair.from)]),
            _ => nothing(),
        }
    }

    /// Whether each rank's result is its own.
    pub(super) fn is_own(&self) -> bool {
        matches!(
            self.kind,
            Kind::ReduceScatter(_)
                | Kind::Scatter(_)
                | Kind::AllToAll
                | Kind::Reduce(..)
                | Kind::Gather(_)
                | Kind::Message(..)
        )
    }

    /// What a rank receives besides the result, if it is known beforehand.
    pub(super) fn detail(&self, rank: Rank) -> Option<Detail> {
        match &self.kind {
            Kind::AllToAll => {
                Some(Detail::Splits(self.splits.iter().map(|splits| splits[self.position(rank)]).collect()))
            }
            Kind::Join | Kind::AddSet(_) | Kind::FormSet(..) | Kind::RemoveSet(Some(_)) => None,
            Kind::Message(pair, _) if pair.to == rank => Some(Detail::Source(pair.from)),
            _ => Some(Detail::None),
        }
    }

    /// The name of the operation.
    pub(super) fn what(&self) -> &'static str {
        match self.kind {
            _ if self.plugin == Some(FakePlugin::Codec) => "codec by a plugin",
            _ if self.plugin.is_some() => "reduction by a plugin",
            Kind::AllReduce(ReduceOp::Median) => "median",
            Kind::AllReduce(ReduceOp::ClippedMean) => "clipped mean",
            Kind::AllReduce(ReduceOp::Adasum) => "adasum",
            Kind::AllReduce(_) if self.codec != Codec::None => "coded all-reduce",
            Kind::AllReduce(_) => "all-reduce",
            Kind::AllGather => "all-gather",
            Kind::ReduceScatter(_) => "reduce-scatter",
            Kind::Broadcast(_) => "broadcast",
            Kind::AllToAll => "all-to-all",
            Kind::Reduce(..) => "reduce",
            Kind::Gather(_) => "gather",
            Kind::Scatter(_) => "scatter",
            Kind::Message(_, ANY_SOURCE_TAGS..) => "message from any source",
            Kind::Message(..) => "message",
            Kind::Barrier => "barrier",
            Kind::Join => "join",
            Kind::AddSet(_) => "add set",
            Kind::FormSet(_, Some(_)) => "find set",
            Kind::FormSet(..) => "form set",
            Kind::RemoveSet(_) => "remove set",
        }
    }

    /// Whether an operation performs it; other items are agreed on by messages alone.
    pub(super) fn is_performed(&self) -> bool {
        !matches!(self.kind, Kind::Join | Kind::AddSet(_) | Kind::FormSet(..) | Kind::RemoveSet(_))
    }

    /// Whether it fails on all ranks for certain.
    pub(super) fn must_fail(&self) -> bool {
        self.too_large || !matches!(self.injected, InjectedError::None | InjectedError::Withdrawn(_))
    }

    /// The bytes of the largest result.
    pub(super) fn result_bytes(&self) -> u64 {
        let elements = self.ranks.iter().map(|rank| self.output(*rank).elements()).max().unwrap_or_default();
        elements * self.dtype.size_bytes() as u64
    }

    /// Whether ranks that have joined take part in it without asking.
    pub(super) fn supports_join(&self) -> bool {
        match self.kind {
            Kind::AllReduce(op) => matches!(op, ReduceOp::Sum | ReduceOp::Average | ReduceOp::Adasum),
            Kind::Barrier => true,
            _ => false,
        }
    }

    pub(super) fn reduction(&self) -> Option<ReduceOp> {
        match self.kind {
            Kind::AllReduce(op) | Kind::ReduceScatter(op) | Kind::Reduce(op, _) => Some(op),
            _ => None,
        }
    }

    /// Elements that a rank contributes.
    pub(super) fn elements_of(&self, rank: Rank) -> u64 {
        let rows = self.rows[self.position(rank)];
        match &self.kind {
            Kind::Scatter(root) if *root != rank => 0,
            Kind::Message(pair, _) if pair.from != rank => 0,
            _ => rows * self.columns,
        }
    }

    /// The first row and the number of rows that a rank gets of `rows`.
    pub(super) fn share(&self, rows: u64, position: usize) -> (u64, u64) {
        let (ranks, position) = (self.ranks.len() as u64, position as u64);
        let (each, longer) = (rows / ranks, rows % ranks);
        (position * each + position.min(longer), each + u64::from(position < longer))
    }

    pub(super) fn position(&self, rank: Rank) -> usize {
        self.ranks.iter().position(|r| *r == rank).expect("only members of the set ask")
    }

    fn plain_request(&self, rank: Rank, added: &Added) -> Request {
        let collective = self.collective(rank, added);
        let has_input = collective.has_input(rank);
        let dtype = if has_input { self.dtype } else { DType::U8 };
        let shape = if has_input { self.shape(self.rows[self.position(rank)]) } else { nothing() };
        let (prescale, postscale) = self.scales;
        let (codec, group) = (self.codec, self.group.clone());
        let plugin = self.plugin.map(|plugin| plugin.uses(self.may_fail));
        let name = match collective {
            Collective::RecvAny { tag } => AnySource { to: rank, tag }.receive_name(0),
            _ => self.name.clone(),
        };
        let plain = Request::new(self.set(added), name, collective, dtype, shape);
        Request { prescale, postscale, codec, group, plugin, ..plain }
    }

    fn collective(&self, rank: Rank, added: &Added) -> Collective {
        match &self.kind {
            Kind::AllReduce(op) => Collective::AllReduce { op: *op },
            Kind::AllGather => Collective::AllGather,
            Kind::ReduceScatter(op) => Collective::ReduceScatter { op: *op },
            Kind::Broadcast(root) => Collective::Broadcast { root: *root },
            Kind::AllToAll => Collective::AllToAll { splits: self.splits[self.position(rank)].clone() },
            Kind::Reduce(op, root) => Collective::Reduce { op: *op, root: *root },
            Kind::Gather(root) => Collective::Gather { root: *root },
            Kind::Scatter(root) => Collective::Scatter { root: *root },
            Kind::Message(pair, tag) if pair.from == rank => Collective::Send { to: pair.to, tag: *tag },
            Kind::Message(_, tag @ ANY_SOURCE_TAGS..) => Collective::RecvAny { tag: *tag },
            Kind::Message(pair, tag) => Collective::Recv { from: pair.from, tag: *tag },
            Kind::Barrier => Collective::Barrier,
            Kind::Join => Collective::Join,
            Kind::AddSet(ranks) => Collective::AddSet { ranks: ranks.clone() },
            Kind::FormSet(ranks, _) => Collective::AddSetOfMembers { ranks: ranks.clone() },
            Kind::RemoveSet(adding) => {
                let set = adding.and_then(|item| added.get(&item).copied()).unwrap_or(NO_SET);
                Collective::RemoveSet { set }
            }
        }
    }

    fn differ(&self, rank: Rank, request: &mut Request, difference: Difference) {
        match difference {
            // Bitwise reductions take no floats.
            Difference::Type
                if matches!(self.reduction(), Some(ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor)) =>
            {
                request.dtype = if self.dtype == DType::I64 { DType::I32 } else { DType::I64 };
            }
            Difference::Type => request.dtype = if self.dtype == DType::F32 { DType::F64 } else { DType::F32 },
            Difference::Operation if self.kind == Kind::AllGather => {
                request.collective = Collective::AllReduce { op: ReduceOp::Max };
            }
            Difference::Operation => {
                // Nothing else is scaled.
                (request.collective, request.prescale, request.postscale) = (Collective::AllGather, 1.0, 1.0);
            }
            Difference::Dimensions => {
                let mut dimensions = request.shape.dimensions().to_vec();
                dimensions.push(3);
                request.shape = Shape::new(dimensions).expect("small tensors");
            }
            Difference::Reduction => {
                let other = if self.reduction() == Some(ReduceOp::Max) { ReduceOp::Min } else { ReduceOp::Max };
                match &mut request.collective {
                    Collective::AllReduce { op } | Collective::ReduceScatter { op } | Collective::Reduce { op, .. } => {
                        *op = other;
                    }
                    _ => {}
                }
            }
            Difference::Root => self.turn_to_another_root(rank, &mut request.collective),
            Difference::Scale => request.postscale *= 3.0,
            Difference::Codec => request.codec = if self.codec == Codec::F16 { Codec::Bf16 } else { Codec::F16 },
            Difference::List => {
                if let Collective::AddSetOfMembers { ranks } = &mut request.collective {
                    // Without one of the others; at least one more of them is left, which asks for the whole list.
                    let other = ranks.iter().position(|other| *other != rank).expect("three members");
                    ranks.remove(other);
                }
                if let Collective::AddSet { ranks } = &mut request.collective {
                    let all: Vec<Rank> = self.ranks.clone();
                    *ranks = if ranks.len() == 1 { all } else { ranks[1..].to_vec() };
                }
            }
        }
    }

    /// Chooses a root other than the rank itself, so that no rank becomes a root without a tensor.
    fn turn_to_another_root(&self, rank: Rank, collective: &mut Collective) {
        match collective {
            Collective::Broadcast { root }
            | Collective::Reduce { root, .. }
            | Collective::Gather { root }
            | Collective::Scatter { root } => {
                let other = self.ranks.iter().find(|other| **other != rank && **other != *root);
                *root = other.copied().unwrap_or(rank);
            }
            _ => {}
        }
    }

    fn make_absurd(&self, request: &mut Request) {
        match &mut request.collective {
            Collective::AllToAll { splits } => splits.push(1),
            Collective::Broadcast { root }
            | Collective::Reduce { root, .. }
            | Collective::Gather { root }
            | Collective::Scatter { root } => *root = Rank(4_000),
            other => {
                *other = Collective::AllReduce { op: ReduceOp::Average };
                request.dtype = DType::Bool;
            }
        }
    }

    fn shape(&self, rows: u64) -> Shape {
        let dimensions = match self.dimensions {
            0 => Vec::new(),
            1 => vec![rows],
            _ => vec![rows, self.columns],
        };
        Shape::new(dimensions).expect("small tensors")
    }
}

/// The shape of an absent tensor.
fn nothing() -> Shape {
    Shape::new(vec![0]).expect("one dimension")
}

/// Messages with these tags are received from any source.
pub(super) const ANY_SOURCE_TAGS: u32 = 1 << 20;

/// How a rank's request may differ so that the ranks do not agree.
pub(super) fn differences(item: &Item) -> Vec<Difference> {
    let mut possible = Vec::new();
    let tensor = item.is_performed() && !matches!(item.kind, Kind::Barrier | Kind::Message(..) | Kind::Scatter(_));
    let coded = item.codec != Codec::None || item.plugin.is_some();
    if tensor {
        possible.push(Difference::Dimensions);
    }
    // Nothing else can be encoded.
    if tensor && !coded {
        possible.extend([Difference::Type, Difference::Operation]);
    }
    if !coded && matches!(item.reduction(), Some(ReduceOp::Min | ReduceOp::Max | ReduceOp::Product | ReduceOp::Sum)) {
        possible.extend([Difference::Reduction, Difference::Scale]);
    }
    let rooted = matches!(item.kind, Kind::Broadcast(_) | Kind::Reduce(..) | Kind::Gather(_) | Kind::Scatter(_));
    if rooted && item.askers.len() == item.ranks.len() && item.ranks.len() > 2 {
        possible.push(Difference::Root);
    }
    let may_be_coded = matches!(item.kind, Kind::AllReduce(ReduceOp::Sum | ReduceOp::Average));
    if may_be_coded && item.dtype == DType::F32 && item.plugin.is_none() {
        possible.push(Difference::Codec);
    }
    possible
}
