//! [`Operation`]: a collective with this rank's contribution, its [`Label`] and the [`ReduceOptions`] of a reduction.

use std::panic::Location;

use ronde_wire::{Codec, Collective, PluginCall, Rank, ReduceOp, SetId};

use crate::tensor::{Layout, TensorRef};

/// Identifies an operation on all ranks: the process set and the name within it.
///
/// Made from a name, from `None` for a number, from a set, or from a name and a set: `"gradient"`, `None`, `set`,
/// `("gradient", set)`. Without a set it is the set of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label<'a> {
    /// The name, together with the kind of operation; `None` for a number. Operations without a name are numbered by set
    /// and kind, in the order of the calls.
    pub name: Option<&'a str>,
    /// The process set, all of whose ranks take part.
    pub set: SetId,
}

impl<'a> From<&'a str> for Label<'a> {
    fn from(name: &'a str) -> Self {
        Self { name: Some(name), set: SetId::WORLD }
    }
}

impl<'a> From<Option<&'a str>> for Label<'a> {
    fn from(name: Option<&'a str>) -> Self {
        Self { name, set: SetId::WORLD }
    }
}

impl From<SetId> for Label<'_> {
    fn from(set: SetId) -> Self {
        Self { name: None, set }
    }
}

impl<'a> From<(Option<&'a str>, SetId)> for Label<'a> {
    fn from((name, set): (Option<&'a str>, SetId)) -> Self {
        Self { name, set }
    }
}

impl<'a> From<(&'a str, SetId)> for Label<'a> {
    fn from((name, set): (&'a str, SetId)) -> Self {
        Self { name: Some(name), set }
    }
}

/// How an all-reduce, a reduce-scatter or a reduce computes.
#[derive(Clone, Debug, PartialEq)]
pub struct ReduceOptions {
    /// How elements are combined.
    pub op: ReduceOp,
    /// Multiplies every contribution before the reduction; finite and not 0.
    pub prescale: f64,
    /// Multiplies the result; finite and not 0.
    pub postscale: f64,
    /// How contributions travel between sidecars; only an all-reduce of float32 takes another than [`Codec::None`].
    pub codec: Codec,
    /// The plugin that reduces, with [`ReduceOp::Plugin`]; with Sum and Average the one that encodes. For an all-reduce only.
    pub plugin: Option<PluginCall>,
}

impl ReduceOptions {
    /// A reduction by a plugin that is a reducer: `ReduceOptions::reduced_by(PluginCall::new("median"))`.
    #[must_use]
    pub fn reduced_by(plugin: PluginCall) -> Self {
        Self { op: ReduceOp::Plugin, plugin: Some(plugin), ..Self::default() }
    }

    /// The same sum or average with contributions that a plugin encodes and decodes, which is a codec:
    /// `ReduceOptions::default().encoded_by(PluginCall::new("topk").with("ratio", 0.01))`.
    ///
    /// A codec with state, such as the residuals of error feedback, identifies a tensor by set and name: give the operations on
    /// one tensor the same name.
    #[must_use]
    pub fn encoded_by(self, plugin: PluginCall) -> Self {
        Self { plugin: Some(plugin), ..self }
    }
}

impl Default for ReduceOptions {
    /// The average, without scaling or compression.
    fn default() -> Self {
        Self { op: ReduceOp::Average, prescale: 1.0, postscale: 1.0, codec: Codec::None, plugin: None }
    }
}

impl From<ReduceOp> for ReduceOptions {
    fn from(op: ReduceOp) -> Self {
        Self { op, ..Self::default() }
    }
}

/// A collective with this rank's contribution.
#[derive(Clone, Debug)]
pub struct Operation<'a> {
    /// Its set and name; without a name for messages between two ranks, which are numbered.
    pub label: Label<'a>,
    /// The collective. An all-to-all without splits sends the same number of rows to every rank.
    pub collective: Collective,
    /// The contribution, if this rank has one: not for a barrier, nor when it only receives.
    pub tensor: Option<TensorRef<'a>>,
    /// Multiplies the contribution; 1 for operations that reduce nothing.
    pub prescale: f64,
    /// Multiplies the result; 1 for operations that reduce nothing.
    pub postscale: f64,
    /// How contributions travel between sidecars; for an all-reduce only.
    pub codec: Codec,
    /// The plugin that reduces or encodes; see [`ReduceOptions::plugin`].
    pub plugin: Option<PluginCall>,
    /// Whether the result may stay in this worker's shared memory, to be taken as a [`Buffer`](crate::Buffer): without a copy.
    pub mapped: bool,
    /// Whether [`Completions`](crate::Completions) counts its completion when no thread waits for it.
    pub notify: bool,
    /// The caller's `file:line`, for reports of stalls and failures. Methods of the clients fill it in.
    pub site: Option<String>,
}

impl<'a> Operation<'a> {
    /// Any collective, without scaling, codec and plugin.
    #[must_use]
    pub fn new(label: impl Into<Label<'a>>, collective: Collective, tensor: Option<TensorRef<'a>>) -> Self {
        let label = label.into();
        let (prescale, postscale, codec) = (1.0, 1.0, Codec::None);
        let (plugin, site, mapped, notify) = (None, None, false, false);
        Self { label, collective, tensor, prescale, postscale, codec, plugin, mapped, notify, site }
    }

    /// Lets the result stay in shared memory if it is large and there is room.
    #[must_use]
    pub fn mapped(self) -> Self {
        Self { mapped: true, ..self }
    }

    /// Lets [`Completions`](crate::Completions) count its completion when no thread waits for it.
    #[must_use]
    pub fn notify(self) -> Self {
        Self { notify: true, ..self }
    }

    /// Sets the caller's location.
    #[must_use]
    pub fn at(self, site: &impl ToString) -> Self {
        Self { site: Some(site.to_string()), ..self }
    }

    /// The reduction of all tensors, for every rank.
    #[must_use]
    pub fn allreduce(
        label: impl Into<Label<'a>>,
        tensor: impl Into<TensorRef<'a>>,
        options: impl Into<ReduceOptions>,
    ) -> Self {
        let options = options.into();
        Self::new(label, Collective::AllReduce { op: options.op }, Some(tensor.into())).scaled(options)
    }

    /// The reduction of all tensors, each rank its share of rows.
    #[must_use]
    pub fn reduce_scatter(
        label: impl Into<Label<'a>>,
        tensor: impl Into<TensorRef<'a>>,
        options: impl Into<ReduceOptions>,
    ) -> Self {
        let options = options.into();
        Self::new(label, Collective::ReduceScatter { op: options.op }, Some(tensor.into())).scaled(options)
    }

    /// The reduction of all tensors, for the global rank `root`.
    #[must_use]
    pub fn reduce(
        label: impl Into<Label<'a>>,
        tensor: impl Into<TensorRef<'a>>,
        root: u32,
        options: impl Into<ReduceOptions>,
    ) -> Self {
        let options = options.into();
        let collective = Collective::Reduce { op: options.op, root: Rank(root) };
        Self::new(label, collective, Some(tensor.into())).scaled(options)
    }

    /// The rows of all tensors, for every rank.
    #[must_use]
    pub fn allgather(label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>) -> Self {
        Self::new(label, Collective::AllGather, Some(tensor.into()))
    }

    /// The rows of all tensors, for the global rank `root`.
    #[must_use]
    pub fn gather(label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>, root: u32) -> Self {
        Self::new(label, Collective::Gather { root: Rank(root) }, Some(tensor.into()))
    }

    /// The tensor of the global rank `root`, for every rank.
    #[must_use]
    pub fn broadcast(label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>, root: u32) -> Self {
        Self::new(label, Collective::Broadcast { root: Rank(root) }, Some(tensor.into()))
    }

    /// The rows of the tensor of the global rank `root`, each rank its share. The other ranks' tensors are ignored.
    #[must_use]
    pub fn scatter(label: impl Into<Label<'a>>, tensor: Option<TensorRef<'a>>, root: u32) -> Self {
        Self::new(label, Collective::Scatter { root: Rank(root) }, tensor)
    }

    /// Rows from every rank to every rank: `splits` has the number for each rank of the set; `None` for equal numbers.
    #[must_use]
    pub fn alltoall(label: impl Into<Label<'a>>, tensor: impl Into<TensorRef<'a>>, splits: Option<&[u64]>) -> Self {
        let splits = splits.unwrap_or_default().to_vec();
        Self::new(label, Collective::AllToAll { splits }, Some(tensor.into()))
    }

    /// A message to the global rank `to`.
    #[must_use]
    pub fn send(tensor: impl Into<TensorRef<'a>>, to: u32, tag: u32) -> Self {
        Self::new(None, Collective::Send { to: Rank(to), tag }, Some(tensor.into()))
    }

    /// A message from the global rank `from`, or from any rank of the set when that is `None`.
    #[must_use]
    pub fn recv(from: impl Into<Option<u32>>, tag: u32) -> Self {
        let collective = match from.into() {
            Some(from) => Collective::Recv { from: Rank(from), tag },
            None => Collective::RecvAny { tag },
        };
        Self::new(None, collective, None)
    }

    /// A barrier.
    #[must_use]
    pub fn barrier(label: impl Into<Label<'a>>) -> Self {
        Self::new(label, Collective::Barrier, None)
    }

    /// The announcement that this rank has no more tensors for the set of all ranks.
    #[must_use]
    pub fn join() -> Self {
        Self::join_in(SetId::WORLD)
    }

    /// The announcement that this rank has no more tensors for a process set.
    #[must_use]
    pub fn join_in(label: impl Into<Label<'a>>) -> Self {
        Self::new(label, Collective::Join, None)
    }

    /// A process set of these global ranks, in any order.
    #[must_use]
    pub fn add_process_set(ranks: &[u32]) -> Self {
        let mut ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
        ranks.sort_unstable();
        Self::new(None, Collective::AddSet { ranks }, None)
    }

    /// A process set of these global ranks, in any order, which form it by themselves: the other ranks take no part. The
    /// caller is one of them. A set of exactly these ranks that exists is the result.
    #[must_use]
    pub fn add_process_set_of_members(ranks: &[u32]) -> Self {
        let mut ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
        ranks.sort_unstable();
        Self::new(None, Collective::AddSetOfMembers { ranks }, None)
    }

    /// The removal of a process set.
    #[must_use]
    pub fn remove_process_set(set: SetId) -> Self {
        Self::new(None, Collective::RemoveSet { set }, None)
    }

    /// The type, the shape and the length of a contribution in main memory.
    pub(crate) fn layout(&self) -> Option<Layout<'a>> {
        self.tensor.map(|TensorRef { dtype, shape, bytes }| Layout { dtype, shape, bytes: bytes.len() })
    }

    /// The bytes of the contribution.
    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.tensor.map_or(&[], |tensor| tensor.bytes)
    }

    fn scaled(self, options: ReduceOptions) -> Self {
        let ReduceOptions { prescale, postscale, codec, plugin, .. } = options;
        Self { prescale, postscale, codec, plugin, ..self }
    }
}

/// A line of the caller's program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site(&'static Location<'static>);

impl Site {
    /// The caller of the calling function, which must be `#[track_caller]`.
    #[track_caller]
    pub(crate) fn here() -> Self {
        Self(Location::caller())
    }

    /// The operation with this location.
    pub(crate) fn of<'a>(&self, operation: Operation<'a>) -> Operation<'a> {
        operation.at(&format_args!("{}:{}", self.0.file(), self.0.line()))
    }
}
