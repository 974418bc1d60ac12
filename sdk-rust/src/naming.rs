//! [`Names`]: names operations, and checks each one before it takes a name. An operation that fails a check fails only at its
//! caller. An operation with a name may be waited for by other ranks.

use std::collections::HashMap;

use ronde_wire::{
    AnySource, Codec, Collective, DType, Detail, Group, Pair, Rank, Request, SetId, Shape, TensorName, limits,
    set_of_members_name,
};

use crate::error::Error;
use crate::operation::{Label, Operation};
use crate::plugin::checked_codec;
use crate::tensor::{Layout, TensorRef, checked_shape};

/// The counters of unnamed operations, and the process sets of a session.
#[derive(Debug)]
pub(crate) struct Names {
    me: Rank,
    counters: HashMap<CounterKey, u64>,
    /// The process sets that exist.
    sets: HashMap<SetId, KnownSet>,
    /// How often the numbers of a set have restarted. All ranks receive the completions that restart them in the same order.
    generation: u64,
}

/// A process set that exists.
#[derive(Debug)]
struct KnownSet {
    /// Its ranks, ascending.
    ranks: Vec<Rank>,
    /// Its first number. No request that this id had before has a number from it on, because those names may still be
    /// pending.
    first: u64,
}

/// Identifies a counter. Each kind of unnamed operation in each set has its own, so that an operation that only some ranks name,
/// or a set that only some ranks are in, does not shift the numbers of other operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum CounterKey {
    Single {
        set: SetId,
        kind: &'static str,
    },
    Group {
        set: SetId,
        kind: &'static str,
    },
    Message {
        set: SetId,
        from: Rank,
        to: Rank,
        tag: u32,
    },
    /// A receive from any source.
    AnySource {
        set: SetId,
        tag: u32,
    },
    /// A request for a process set of these members.
    Members {
        /// [`digest`] of the ranks.
        ranks: u64,
    },
}

impl CounterKey {
    fn set(self) -> SetId {
        match self {
            Self::Single { set, .. } | Self::Group { set, .. } => set,
            Self::Message { set, .. } | Self::AnySource { set, .. } => set,
            Self::Members { .. } => SetId::WORLD,
        }
    }
}

impl Names {
    /// The names of a rank before its epoch has begun.
    pub(crate) fn new(me: Rank) -> Self {
        Self { me, counters: HashMap::new(), sets: HashMap::new(), generation: 0 }
    }

    /// Registers the set of all ranks, when the epoch begins.
    pub(crate) fn begin(&mut self, size: u32) {
        self.sets.insert(SetId::WORLD, KnownSet { ranks: (0..size).map(Rank).collect(), first: 0 });
    }

    /// Registers a set of ascending ranks. Its id may have belonged to an earlier set.
    pub(crate) fn add_set(&mut self, set: SetId, ranks: Vec<Rank>) {
        let first = self.restart(set);
        self.sets.insert(set, KnownSet { ranks, first });
    }

    /// Registers a set of ascending ranks that its members have formed, or found. Only they get this answer, so it must
    /// not change the generation, which all ranks count alike.
    fn form_set(&mut self, set: SetId, ranks: Vec<Rank>) {
        if self.sets.get(&set).is_some_and(|known| known.ranks == ranks) {
            // Its numbers continue.
            return;
        }
        self.remove_counters(set);
        self.sets.insert(set, KnownSet { ranks, first: self.generation << GENERATION_SHIFT });
    }

    /// Removes a set. Another one with its id may be formed by its members, whose numbers have to be greater.
    pub(crate) fn remove_set(&mut self, set: SetId) {
        self.restart(set);
        self.sets.remove(&set);
    }

    /// Restarts the numbers of a set. All its ranks have joined, some after more operations than others, so their counters
    /// differed.
    pub(crate) fn all_joined(&mut self, set: SetId) {
        if set == SetId::WORLD {
            let first = self.restart(set);
            if let Some(world) = self.sets.get_mut(&set) {
                world.first = first;
            }
            return;
        }
        // Only its members get this answer, so it must not change the generation, which all ranks count alike.
        self.remove_counters(set);
        if let Some(known) = self.sets.get_mut(&set) {
            known.first = known.first.wrapping_add(1 << JOINS_SHIFT);
        }
    }

    /// Applies a completed operation to the sets and numbers.
    pub(crate) fn apply_completion(&mut self, set: SetId, collective: &Collective, detail: &Detail) {
        match (collective, detail) {
            (Collective::AddSet { ranks }, Detail::Set(set)) => self.add_set(*set, ranks.clone()),
            (Collective::AddSetOfMembers { ranks }, Detail::Set(set)) => self.form_set(*set, ranks.clone()),
            // Without the set in the answer there was nothing to remove. The set of all ranks stays.
            (Collective::RemoveSet { set }, Detail::Set(_)) if *set != SetId::WORLD => self.remove_set(*set),
            (Collective::Join, _) => self.all_joined(set),
            _ => {}
        }
    }

    /// The ranks of a set, ascending, if this rank knows it.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn ranks_of(&self, set: SetId) -> Option<&[Rank]> {
        self.sets.get(&set).map(|known| known.ranks.as_slice())
    }

    /// Whether this rank knows the set.
    pub(crate) fn knows_set(&self, set: SetId) -> bool {
        self.sets.contains_key(&set)
    }

    /// Makes the request for an operation; takes a number when it has no name.
    ///
    /// # Errors
    /// [`Error::Argument`]; no number is taken then.
    #[cfg(any(test, target_arch = "wasm32"))]
    pub(crate) fn request(&mut self, operation: &Operation<'_>) -> Result<Request, Error> {
        self.request_of(operation, operation.layout())
    }

    /// Makes the request for an operation with a contribution of this layout, wherever it is; takes a number when it has no
    /// name.
    ///
    /// # Errors
    /// [`Error::Argument`]; no number is taken then.
    pub(crate) fn request_of(
        &mut self,
        operation: &Operation<'_>,
        layout: Option<Layout<'_>>,
    ) -> Result<Request, Error> {
        let checked = self.checked(operation, layout)?;
        let kind = operation.collective.name();
        let counted = self.counter_of(operation)?;
        let name = match (counted, operation.label.name) {
            (None, Some(name)) if matches!(operation.collective, Collective::AddSetOfMembers { .. }) => {
                set_of_members_name(name).map_err(|error| Error::argument(error.to_string()))?.to_string()
            }
            (None, name) => format!("{}.{}", kind.to_ascii_lowercase(), name.unwrap_or_default()),
            (Some(CounterKey::Message { from, to, tag, .. }), _) => {
                Pair { from, to }.message_name(tag, self.next(counted)).to_string()
            }
            (Some(CounterKey::AnySource { tag, .. }), _) => {
                AnySource { to: self.me, tag }.receive_name(self.next(counted)).to_string()
            }
            (Some(CounterKey::Members { ranks }), _) => {
                set_of_members_name(&format!("noname.{ranks:016x}.{}", self.next(counted)))
                    .map_err(|error| Error::argument(error.to_string()))?
                    .to_string()
            }
            (Some(_), _) => format!("{}.noname.{}", kind.to_ascii_lowercase(), self.next(counted)),
        };
        let name = tensor_name(name)?;
        self.take(counted)?;
        Ok(checked.request(operation, name, None))
    }

    /// The counter of an operation; `None` for one that has a name.
    fn counter_of(&self, operation: &Operation<'_>) -> Result<Option<CounterKey>, Error> {
        let set = operation.label.set;
        let counted = match (operation.collective.pair(self.me), &operation.collective) {
            (Some(Pair { from, to }), &(Collective::Send { tag, .. } | Collective::Recv { tag, .. })) => {
                Some(CounterKey::Message { set, from, to, tag })
            }
            (_, &Collective::RecvAny { tag }) => Some(CounterKey::AnySource { set, tag }),
            (_, Collective::AddSetOfMembers { ranks }) if operation.label.name.is_none() => {
                return Ok(Some(CounterKey::Members { ranks: digest(ranks) }));
            }
            _ => None,
        };
        match (counted, operation.label.name) {
            (Some(_), Some(_)) => {
                Err(Error::argument("messages between two ranks have no name; use tags to distinguish them"))
            }
            (None, Some(_)) => Ok(None),
            (None, None) => Ok(Some(CounterKey::Single { set, kind: operation.collective.name() })),
            (counted, None) => Ok(counted),
        }
    }

    /// Makes the requests for operations that become ready together.
    ///
    /// # Errors
    /// [`Error::Argument`] when one of them is invalid, or there are none or too many.
    #[cfg(any(test, target_arch = "wasm32"))]
    pub(crate) fn group(&mut self, label: Label<'_>, operations: &[Operation<'_>]) -> Result<Vec<Request>, Error> {
        let described: Vec<_> = operations.iter().map(|operation| (operation.clone(), operation.layout())).collect();
        self.group_of(label, &described)
    }

    /// Makes the requests for operations that become ready together, with contributions of these layouts, wherever they are.
    ///
    /// # Errors
    /// [`Error::Argument`] when one of them is invalid, or there are none or too many.
    pub(crate) fn group_of(
        &mut self,
        label: Label<'_>,
        operations: &[(Operation<'_>, Option<Layout<'_>>)],
    ) -> Result<Vec<Request>, Error> {
        let Some((first, _)) = operations.first() else {
            return Err(Error::argument("a group has at least one tensor"));
        };
        if operations.len() > limits::GROUP_TENSORS_MAX {
            let (given, max) = (operations.len(), limits::GROUP_TENSORS_MAX);
            return Err(Error::argument(format!("a group has at most {max} tensors, not {given}; make several")));
        }
        let mut checked = Vec::with_capacity(operations.len());
        for (operation, layout) in operations {
            if operation.collective.name() != first.collective.name() || operation.label.set != label.set {
                return Err(Error::argument("the tensors of a group are of one kind of operation on one set"));
            }
            checked.push(self.checked(operation, *layout)?);
        }
        let kind = first.collective.name();
        let counted = label.name.is_none().then_some(CounterKey::Group { set: label.set, kind });
        let own = label.name.map_or_else(|| format!("noname.{}", self.next(counted)), str::to_owned);
        let stem = format!("grouped_{}.{own}", kind.to_ascii_lowercase());
        let (count, mut names) = (operations.len(), Vec::with_capacity(operations.len()));
        for index in 1..=count {
            names.push(tensor_name(format!("{stem}_{index}of{count}"))?);
        }
        let size = u32::try_from(count).map_err(|error| Error::argument(error.to_string()))?;
        let group = Group { name: tensor_name(stem)?, size };
        self.take(counted)?;
        let parts = checked.into_iter().zip(operations).zip(names);
        Ok(parts
            .map(|((checked, (operation, _)), name)| checked.request(operation, name, Some(group.clone())))
            .collect())
    }

    fn next(&self, key: Option<CounterKey>) -> u64 {
        let number = |key: CounterKey| self.counters.get(&key).copied().unwrap_or_else(|| self.first(key.set()));
        key.map_or(0, number)
    }

    /// The first number of a set.
    fn first(&self, set: SetId) -> u64 {
        self.sets.get(&set).map_or(0, |known| known.first)
    }

    fn take(&mut self, key: Option<CounterKey>) -> Result<(), Error> {
        let Some(key) = key else { return Ok(()) };
        if self.counters.len() >= COUNTERS_MAX && !self.counters.contains_key(&key) {
            return Err(Error::Limit {
                reason: format!(
                    "this session has {COUNTERS_MAX} counters of unnamed operations, which is the limit; use fewer tags"
                ),
            });
        }
        let first = self.first(key.set());
        *self.counters.entry(key).or_insert(first) += 1;
        Ok(())
    }

    /// Removes the counters of a set. Returns its new first number, which no earlier request has.
    fn restart(&mut self, set: SetId) -> u64 {
        self.remove_counters(set);
        self.generation += 1;
        self.generation << GENERATION_SHIFT
    }

    fn remove_counters(&mut self, of: SetId) {
        self.counters.retain(|counted, _| counted.set() != of);
    }

    // === Checks ===

    fn checked(&self, operation: &Operation<'_>, layout: Option<Layout<'_>>) -> Result<Checked, Error> {
        check_scales(operation)?;
        let codec = checked_codec(operation)?;
        let kind = operation.collective.name();
        let input = layout.filter(|_| operation.collective.has_input(self.me));
        if input.is_none() && operation.collective.has_input(self.me) {
            return Err(Error::argument(format!("{kind} needs a tensor on this rank, but there is none")));
        }
        let (dtype, shape) = match input {
            Some(Layout { dtype, shape, bytes }) => (dtype, checked_shape(dtype, shape, bytes)?),
            None => (NO_TENSOR.dtype, NO_TENSOR.checked_shape()?),
        };
        if cuts_rows(&operation.collective) && shape.dimensions().is_empty() {
            return Err(Error::argument(format!(
                "{kind} does not support scalar tensors, as it works on rows; reshape it to [1]"
            )));
        }
        self.check_ranks(operation)?;
        let collective = match &operation.collective {
            Collective::AllToAll { splits } => {
                Collective::AllToAll { splits: self.checked_splits(operation.label.set, &shape, splits)? }
            }
            // Later lookups need ascending ranks.
            Collective::AddSet { ranks } => Collective::AddSet { ranks: ascending(ranks) },
            Collective::AddSetOfMembers { ranks } => Collective::AddSetOfMembers { ranks: ascending(ranks) },
            collective => collective.clone(),
        };
        Ok(Checked { collective, dtype, shape, codec })
    }

    /// The bytes of this rank's result, when its own request determines them. For gathers this assumes that all ranks
    /// contribute equally.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn result_bytes(&self, request: &Request) -> Option<u64> {
        let ranks = &self.sets.get(&request.set)?.ranks;
        let (count, position) = (ranks.len() as u64, ranks.binary_search(&self.me).ok()? as u64);
        let bytes = request.shape.elements() * request.dtype.size_bytes() as u64;
        match &request.collective {
            Collective::AllReduce { .. } | Collective::Broadcast { .. } => Some(bytes),
            Collective::Reduce { root, .. } => (*root == self.me).then_some(bytes),
            Collective::AllGather => bytes.checked_mul(count),
            Collective::Gather { root } => bytes.checked_mul(count).filter(|_| *root == self.me),
            Collective::ReduceScatter { .. } => {
                let rows = request.shape.dimensions().first().copied().filter(|rows| *rows > 0)?;
                let own = rows / count + u64::from(position < rows % count);
                Some(bytes / rows * own)
            }
            Collective::AllToAll { splits } => splits.iter().all(|split| *split == splits[0]).then_some(bytes),
            _ => None,
        }
    }

    fn check_ranks(&self, operation: &Operation<'_>) -> Result<(), Error> {
        // The sidecar checks requests on sets that this rank does not know.
        let Some(KnownSet { ranks, .. }) = self.sets.get(&operation.label.set) else { return Ok(()) };
        let set = operation.label.set;
        let kind = operation.collective.name();
        if let Some(root) = operation.collective.root()
            && ranks.binary_search(&root).is_err()
        {
            return Err(Error::argument(format!("invalid root rank {} for {kind}: it is not in {set}", root.0)));
        }
        if matches!(operation.collective, Collective::RecvAny { .. }) && ranks.len() < 2 {
            return Err(Error::argument(format!(
                "{kind} from any source: {} is alone in {set}, so no rank can send to it",
                self.me
            )));
        }
        let Some(pair) = operation.collective.pair(self.me) else { return Ok(()) };
        let peer = if pair.from == self.me { pair.to } else { pair.from };
        if peer == self.me {
            return Err(Error::argument(format!(
                "{kind} between {peer} and itself: a rank has no messages for itself"
            )));
        }
        if ranks.binary_search(&peer).is_err() {
            return Err(Error::argument(format!("{kind} with {peer}, which is not in {set}")));
        }
        Ok(())
    }

    fn checked_splits(&self, set: SetId, shape: &Shape, splits: &[u64]) -> Result<Vec<u64>, Error> {
        let rows = shape.dimensions().first().copied().unwrap_or(0);
        let ranks = self.sets.get(&set).map(|known| known.ranks.len());
        if splits.is_empty() {
            let Some(ranks) = ranks else {
                return Err(Error::argument(format!("ALLTOALL on {set}, which this rank does not know, needs splits")));
            };
            if rows % ranks as u64 != 0 {
                return Err(Error::argument(format!(
                    "ALLTOALL without splits: the {rows} rows of the tensor cannot be divided equally by the {ranks} ranks of {set}"
                )));
            }
            return Ok(vec![rows / ranks as u64; ranks]);
        }
        if let Some(ranks) = ranks.filter(|ranks| *ranks != splits.len()) {
            let given = splits.len();
            return Err(Error::argument(format!(
                "ALLTOALL with {given} splits, but {set} has {ranks} ranks; give one for each rank"
            )));
        }
        let sum = splits.iter().try_fold(0_u64, |sum, split| sum.checked_add(*split));
        if sum != Some(rows) {
            return Err(Error::argument(format!(
                "the splits {splits:?} of ALLTOALL do not add up to the {rows} rows of the tensor"
            )));
        }
        Ok(splits.to_vec())
    }
}

/// The checked parts of a request.
struct Checked {
    collective: Collective,
    dtype: DType,
    shape: Shape,
    codec: Codec,
}

impl Checked {
    fn request(self, operation: &Operation<'_>, name: TensorName, group: Option<Group>) -> Request {
        let Self { collective, dtype, shape, codec } = self;
        let Operation { label, prescale, postscale, .. } = *operation;
        let plain = Request::new(label.set, name, collective, dtype, shape);
        Request { prescale, postscale, codec, group, ..plain }
    }
}

fn check_scales(operation: &Operation<'_>) -> Result<(), Error> {
    for (field, given) in [("prescale", operation.prescale), ("postscale", operation.postscale)] {
        if !given.is_finite() || given == 0.0 {
            return Err(Error::argument(format!(
                "{field} is {given}, but must be finite and not zero; 1 means no scaling"
            )));
        }
        // Exactly 1 means no scaling.
        if operation.collective.reduce_op().is_none() && given.to_bits() != 1.0_f64.to_bits() {
            let kind = operation.collective.name();
            return Err(Error::argument(format!("{field} is {given}, but {kind} does not scale; leave it at 1")));
        }
    }
    Ok(())
}

/// Whether it divides or concatenates tensors along the first dimension.
fn cuts_rows(collective: &Collective) -> bool {
    matches!(
        collective,
        Collective::AllGather
            | Collective::Gather { .. }
            | Collective::ReduceScatter { .. }
            | Collective::Scatter { .. }
            | Collective::AllToAll { .. }
    )
}

fn ascending(ranks: &[Rank]) -> Vec<Rank> {
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    ranks
}

/// A digest of ranks in any order (FNV-1a of the ascending ranks), which makes names of different sets differ. Two sets
/// with one digest would be reported as ranks that disagree.
fn digest(ranks: &[Rank]) -> u64 {
    let bytes = ascending(ranks).into_iter().flat_map(|rank| rank.0.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn tensor_name(name: String) -> Result<TensorName, Error> {
    TensorName::new(name).map_err(|error| Error::argument(error.to_string()))
}

/// The type and shape of a rank without a contribution.
const NO_TENSOR: TensorRef<'static> = TensorRef { dtype: DType::U8, shape: &[0], bytes: &[] };
/// Bits of the numbers of one generation. No request of the previous generation is pending when they overflow.
const GENERATION_SHIFT: u32 = 32;
/// Bits of the numbers between two joins of a set other than that of all ranks.
const JOINS_SHIFT: u32 = 48;
/// The limit of counters in one session. Only tags need many: one for each pair of ranks and tag.
const COUNTERS_MAX: usize = 65_536;
