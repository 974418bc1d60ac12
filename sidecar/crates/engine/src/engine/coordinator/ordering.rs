//! The coordinator's queues of ready tensors, and its operations in flight.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use ronde_collectives::inputs::BLOCKS_MAX;
use ronde_collectives::plan::{Work, WorkKind};
use ronde_collectives::{Choice, Cutting, algorithm_of, select_cut};
use ronde_wire::control::{Order, OrderedTensor};
use ronde_wire::{
    Algorithm, Collective, Control, Epoch, Pair, Rank, Seq, SetId, SidecarIndex, SidecarSet, TensorName, Tuning, limits,
};

use super::commits::PluginOperation;
use super::fusion::{FusionLimits, ReadyTensor, next_bucket};
use super::groups::Ready;
use super::mismatch::lead;
use super::repetition::Repetition;
use crate::engine::shared::context::Context;
use crate::engine::shared::sets::SetView;
use crate::engine::shared::shapes::{Results, element_bytes, ordered_tensor, work, work_kind};
use crate::engine::shared::{RankContributions, RankRequests, TensorKey};
use crate::engine::shared::{eager, planning};
use crate::trace::Trace;

/// The ready tensors and the operations in flight.
#[derive(Debug, Default)]
pub(crate) struct Ordering {
    queues: BTreeMap<Scope, Queue>,
    /// The tensors of all queues, as an index: each announcement asks whether its tensor waits, and queues may be long.
    waiting: BTreeSet<TensorKey>,
    in_flight: BTreeMap<Seq, (Scope, SidecarIndex)>,
    last: Seq,
    /// Operations with a plugin that were ordered since they were last taken.
    plugin_operations: Vec<PluginOperation>,
    /// The ends of joins, one for each set at most. Each is sent after all tensors of its set that were ready without the
    /// joined ranks.
    all_joined: BTreeMap<SetId, AllJoined>,
}

/// The key of a queue: a process set, or two ranks of it for their messages in one direction, which do not wait for
/// other operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Scope {
    set: SetId,
    pair: Option<Pair>,
}

/// The end of a join.
#[derive(Debug)]
struct AllJoined {
    /// The member sidecars of the set.
    sidecars: SidecarSet,
    name: TensorName,
    last: Rank,
}

#[derive(Debug)]
struct Queue {
    view: Arc<SetView>,
    /// Ready eager tensors, which are ordered at once, whatever else is in flight.
    eager: VecDeque<ReadyTensor>,
    ready: VecDeque<ReadyTensor>,
    in_flight: usize,
}

impl Ordering {
    /// Appends a tensor to the queue of its scope.
    pub(crate) fn push(&mut self, view: &Arc<SetView>, tensor: ReadyTensor) {
        let scope = Scope { set: view.topology.set, pair: pair_of(&tensor) };
        self.waiting.insert(TensorKey::new(scope.set, &tensor.tensor.name));
        let (eager, ready) = (VecDeque::new(), VecDeque::new());
        let new = || Queue { view: Arc::clone(view), eager, ready, in_flight: 0 };
        let queue = self.queues.entry(scope).or_insert_with(new);
        // The id may have been another set's: the queue belongs to the new set now.
        queue.view = Arc::clone(view);
        let of_kind = if tensor.algorithm == Algorithm::Eager { &mut queue.eager } else { &mut queue.ready };
        of_kind.push_back(tensor);
    }

    /// All ranks of a set have joined by this name, `last` as the last one.
    pub(crate) fn push_all_joined(&mut self, view: &SetView, TensorKey { set, name }: TensorKey, last: Rank) {
        self.all_joined.insert(set, AllJoined { sidecars: view.sidecars, name, last });
    }

    /// Removes the ready tensors of a removed set: each sidecar fails their requests.
    pub(crate) fn remove_set(&mut self, set: SetId) {
        for (_, queue) in self.queues.iter_mut().filter(|(scope, _)| scope.set == set) {
            queue.eager.clear();
            queue.ready.clear();
        }
        self.waiting.retain(|key| key.set != set);
        self.drop_idle();
    }

    /// Removes the tensors of a set that are ready without any of these joined ranks.
    pub(crate) fn take_joined(&mut self, set: SetId, ranks: &BTreeSet<Rank>) -> Vec<Ready> {
        let mut taken = Vec::new();
        let Some(queue) = self.queues.get_mut(&Scope { set, pair: None }) else { return taken };
        let without = |tensor: &ReadyTensor| tensor.joined.iter().any(|rank| ranks.contains(rank));
        for of_kind in [&mut queue.eager, &mut queue.ready] {
            let (stranded, kept) = std::mem::take(of_kind).into_iter().partition(without);
            *of_kind = kept;
            let stranded: VecDeque<ReadyTensor> = stranded;
            forget(&mut self.waiting, set, &stranded);
            taken.extend(stranded.into_iter().map(|tensor| Ready { view: Arc::clone(&queue.view), tensor }));
        }
        taken
    }

    /// Orders all eager tensors, and as many others as may be in flight, scope by scope.
    pub(crate) fn order(&mut self, cx: &mut Context, epoch: Epoch, repetition: &mut Repetition) {
        let limits = FusionLimits::of(&cx.config);
        for (&scope, queue) in &mut self.queues {
            while !queue.eager.is_empty() {
                let bucket = next_bucket(&mut queue.eager, limits);
                forget(&mut self.waiting, scope.set, &bucket);
                self.last.0 += 1;
                repetition.ordered(cx.now, &queue.view, &bucket);
                // It is over when the order arrives, so no member reports it.
                send_order(cx, &queue.view, epoch, self.last, bucket);
            }
            while queue.in_flight < cx.config.buckets_in_flight {
                let bucket = next_bucket(&mut queue.ready, limits);
                if bucket.is_empty() {
                    break;
                }
                forget(&mut self.waiting, scope.set, &bucket);
                self.last.0 += 1;
                queue.in_flight += 1;
                repetition.ordered(cx.now, &queue.view, &bucket);
                self.in_flight.insert(self.last, (scope, queue.view.first_member()));
                self.plugin_operations.extend(PluginOperation::of(self.last, &queue.view, &bucket));
                send_order(cx, &queue.view, epoch, self.last, bucket);
            }
        }
        self.send_all_joined(cx, epoch);
    }

    /// The member that reports an operation in flight.
    pub(crate) fn reporter(&self, seq: Seq) -> Option<SidecarIndex> {
        self.in_flight.get(&seq).map(|(_, reporter)| *reporter)
    }

    /// An operation is done at the first member.
    pub(crate) fn done(&mut self, cx: &mut Context, seq: Seq) {
        let scope = self.in_flight.remove(&seq).map(|(scope, _)| scope);
        let Some(queue) = scope.and_then(|scope| self.queues.get_mut(&scope)) else { return };
        queue.in_flight -= 1;
        if queue.view.me.is_none() {
            cx.traces.note(|| Trace::Over { seq, dropped: false });
        }
        self.drop_idle();
    }

    /// Takes the new operations that have to be committed.
    pub(crate) fn take_plugin_operations(&mut self) -> Vec<PluginOperation> {
        std::mem::take(&mut self.plugin_operations)
    }

    /// The last seq that is in use.
    pub(crate) fn last(&self) -> Seq {
        self.last
    }

    /// Skips the seqs up to this one, which a schedule used.
    pub(crate) fn pass_over(&mut self, last: Seq) {
        self.last = self.last.max(last);
    }

    /// Whether a tensor is ready and not ordered.
    pub(crate) fn waits(&self, key: &TensorKey) -> bool {
        self.waiting.contains(key)
    }

    /// Tensors that are ready, with their sets.
    pub(crate) fn ready(&self) -> impl Iterator<Item = (SetId, &ReadyTensor)> {
        self.queues.iter().flat_map(|(scope, queue)| queue.tensors().map(|tensor| (scope.set, tensor)))
    }

    /// Whether the end of a join waits to be sent.
    pub(crate) fn ends_join(&self) -> bool {
        !self.all_joined.is_empty()
    }

    /// Whether the end of a join of this set waits to be sent.
    pub(crate) fn ends_join_of(&self, set: SetId) -> bool {
        self.all_joined.contains_key(&set)
    }

    /// Removes all ready tensors: they will be announced again.
    pub(crate) fn clear_ready(&mut self) {
        for queue in self.queues.values_mut() {
            queue.eager.clear();
            queue.ready.clear();
        }
        self.waiting.clear();
        self.drop_idle();
    }

    fn drop_idle(&mut self) {
        self.queues.retain(|_, queue| queue.in_flight > 0 || !queue.eager.is_empty() || !queue.ready.is_empty());
    }

    fn send_all_joined(&mut self, cx: &mut Context, epoch: Epoch) {
        let queues = &self.queues;
        let is_over = |set: &SetId, _: &mut AllJoined| {
            let queue = queues.get(&Scope { set: *set, pair: None });
            queue.is_none_or(|queue| queue.tensors().all(|tensor| tensor.joined.is_empty()))
        };
        for (set, AllJoined { sidecars, name, last }) in self.all_joined.extract_if(.., is_over) {
            cx.send_down(&sidecars, epoch, Seq(0), Control::AllJoined { set, name, last });
        }
    }
}

impl Queue {
    fn tensors(&self) -> impl Iterator<Item = &ReadyTensor> {
        self.eager.iter().chain(&self.ready)
    }
}

/// Removes tensors that wait no longer.
fn forget<'a>(waiting: &mut BTreeSet<TensorKey>, set: SetId, tensors: impl IntoIterator<Item = &'a ReadyTensor>) {
    for tensor in tensors {
        waiting.remove(&TensorKey::new(set, &tensor.tensor.name));
    }
}

/// The ready tensor of matching requests.
///
/// # Errors
/// The reason of a refusal on all ranks, when a limit is exceeded.
pub(crate) fn ready_tensor(
    cx: &Context,
    view: &SetView,
    requests: &RankRequests,
    contributions: RankContributions,
    joined: Vec<Rank>,
) -> Result<ReadyTensor, String> {
    let request = lead(requests).ok_or("the rank whose tensor counts has not asked for it")?;
    let pair = requests.first_key_value().and_then(|(rank, first)| first.collective.pair(*rank));
    let name = request.collective.name();
    let kind = work_kind(&request.collective, request.dtype, request.codec, request.plugin.as_deref(), pair)
        .ok_or_else(|| format!("{name} is not performed as a separate operation"))?;
    let tensor = ordered_tensor(request, requests.values());
    let results = Results::of(&request.collective, pair, view, &tensor)
        .ok_or_else(|| format!("{name} has a result of more elements than a tensor may have, 2^48; cut the tensor"))?;
    let element_bytes = element_bytes(request.dtype);
    let bytes_of = |elements: u64| elements.saturating_mul(u64::from(element_bytes));
    let bytes = bytes_of(results.largest());
    let most = cx.config.result_bytes_max;
    if bytes > most {
        return Err(format!(
            "{name} has a result of {bytes} bytes, more than the {most} bytes of arena_bytes_max; raise that, or cut the tensor"
        ));
    }
    let kind = reduced_as(cx, view, kind);
    let elements = work(kind.clone(), request.dtype, view, std::slice::from_ref(&tensor)).elements();
    let eager = eager::gathered(view, requests, contributions, cx.tuner.eager_bytes(&cx.config));
    let (algorithm, bytes) = match &eager {
        Some(contributions) => (Algorithm::Eager, contributions.iter().map(|bytes| bytes.len() as u64).sum()),
        None => {
            let algorithm = algorithm_of(&view.topology, &kind, element_bytes, elements, &cx.config.cost);
            (algorithm, bytes_of(elements))
        }
    };
    let ready = ReadyTensor {
        algorithm,
        bytes,
        contributions: eager.unwrap_or_default(),
        tensor,
        collective: without_splits(&request.collective),
        dtype: request.dtype,
        prescale: request.prescale,
        postscale: request.postscale,
        codec: request.codec,
        plugin: request.plugin.clone(),
        group: request.group.clone(),
        group_use: 0,
        joined,
    };
    let blocks = ready.blocks();
    if blocks > BLOCKS_MAX {
        return Err(format!(
            "{name} with this plugin has {blocks} blocks, more than the {BLOCKS_MAX} of an operation; cut the tensor"
        ));
    }
    Ok(ready)
}

/// The collective without its splits, which differ by rank and are in the order's rows.
fn without_splits(collective: &Collective) -> Collective {
    match collective {
        Collective::AllToAll { .. } => Collective::AllToAll { splits: Vec::new() },
        other => other.clone(),
    }
}

fn pair_of(tensor: &ReadyTensor) -> Option<Pair> {
    Pair::of_message(&tensor.tensor.name).map(|(pair, _)| pair)
}

fn send_order(cx: &mut Context, view: &SetView, epoch: Epoch, seq: Seq, bucket: Vec<ReadyTensor>) {
    let shared = bucket.len() > 1;
    cx.stats.ordered_operations += 1;
    cx.stats.ordered_tensors += bucket.len() as u64;
    cx.stats.fused_tensors += if shared { bucket.len() as u64 } else { 0 };
    let carries = bucket.first().is_some_and(|first| first.algorithm == Algorithm::Eager);
    let Some(order) = make_order(cx, view, bucket, carries) else { return };
    cx.traces.note(|| Trace::Cycle);
    cx.traces.note(|| Trace::ordered(seq, &order, false));
    if carries && view.me.is_none() {
        // No member reports it.
        cx.traces.note(|| Trace::Over { seq, dropped: false });
    }
    cx.send_down(&view.sidecars, epoch, seq, Control::Order(order));
}

/// The order of a bucket. Eager tensors stay eager only where the order `carries` the contributions.
pub(crate) fn make_order(cx: &mut Context, view: &SetView, bucket: Vec<ReadyTensor>, carries: bool) -> Option<Order> {
    let first = bucket.first()?;
    let pair = pair_of(first);
    let ReadyTensor { collective, dtype, prescale, postscale, codec, plugin, joined, .. } = first.clone();
    let kind = work_kind(&collective, dtype, codec, plugin.as_deref(), pair)?;
    let small = first.algorithm == Algorithm::Eager;
    let kind = match (small, carries) {
        (true, true) => kind,
        (true, false) => planning::kind_with(kind, Algorithm::Direct),
        (false, _) => reduced_as(cx, view, kind),
    };
    let (tensors, contributions): (Vec<OrderedTensor>, Vec<Vec<Bytes>>) =
        bucket.into_iter().map(|ready| (ready.tensor, ready.contributions)).unzip();
    let contributions = if carries { contributions } else { Vec::new() };
    let work = work(kind, dtype, view, &tensors);
    let tuning = if carries { eager::TUNING } else { selected(cx, view, &work) };
    let digest = planning::digest(&view.topology, &work, &tuning);
    let set = view.topology.set;
    Some(Order {
        set,
        collective,
        dtype,
        prescale,
        postscale,
        codec,
        plugin,
        pair,
        joined,
        tensors,
        tuning,
        digest,
        contributions,
    })
}

/// The kind of work without hierarchical reduction, if that is switched off. A set on one sidecar is always reduced in
/// rank order.
fn reduced_as(cx: &Context, view: &SetView, kind: WorkKind) -> WorkKind {
    let flat = !cx.config.hierarchical_allreduce && view.topology.len() > 1;
    if flat && view.ranks.len() <= limits::NARY_RANKS_MAX { planning::kind_with(kind, Algorithm::Direct) } else { kind }
}

fn selected(cx: &mut Context, view: &SetView, work: &Work) -> Tuning {
    let cutting = Cutting { lanes: lanes(cx, view), chunk_bytes: cx.config.chunk_bytes };
    let Choice { tuning, reason, .. } = select_cut(&view.topology, work, cutting, &cx.config.cost);
    cx.note_selection(reason);
    tuning
}

/// The lanes that all known members offer, or the number of local threads where this sidecar is the only member; not more
/// than the setting for either allows.
fn lanes(cx: &Context, view: &SetView) -> u16 {
    if view.topology.len() == 1 && view.me.is_some() {
        return cx.config.threads.min(cx.config.threads_used_max).min(LANES_MOST);
    }
    let most = cx.config.lanes_used_max.min(LANES_MOST);
    let offered = view.topology.members.iter().filter_map(|member| cx.links.lanes(member.sidecar));
    offered.fold(cx.config.lanes, u16::min).clamp(1, most)
}

/// [`limits::LANES_MAX`] in the type of a tuning.
#[allow(clippy::cast_possible_truncation, reason = "16, checked by the assertion below")]
const LANES_MOST: u16 = limits::LANES_MAX as u16;
const _: () = assert!(LANES_MOST as usize == limits::LANES_MAX);
