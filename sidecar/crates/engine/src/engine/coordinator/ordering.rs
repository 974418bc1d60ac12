//! The coordinator's queues: what is ready, what is ordered and not done.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use ronde_collectives::inputs::BLOCKS_MAX;
use ronde_collectives::plan::{Work, WorkKind};
use ronde_collectives::{Choice, algorithm_of, select};
use ronde_wire::control::{Order, OrderedTensor};
use ronde_wire::{
    Algorithm, Collective, Control, Epoch, Pair, Rank, Seq, SetId, SidecarIndex, TensorName, Tuning, limits,
};

use super::commits::Plugged;
use super::fusion::{ReadyTensor, next_bucket};
use super::groups::Ready;
use super::mismatch::lead;
use super::repetition::Repetition;
use crate::engine::shared::context::Context;
use crate::engine::shared::sets::SetView;
use crate::engine::shared::shapes::{Results, element_bytes, ordered_tensor, work, work_kind};
use crate::engine::shared::{RankContributions, RankRequests};
use crate::engine::shared::{eager, planning};
use crate::trace::Trace;

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Ordering {
    queues: BTreeMap<Scope, Queue>,
    in_flight: BTreeMap<Seq, (Scope, SidecarIndex)>,
    last: Seq,
    /// Operations with a plugin that were ordered since they were last asked for, and who performs them.
    plugged: Vec<Plugged>,
    /// The end of a join, which goes out behind what was ready without the ranks that had joined.
    all_joined: Option<(TensorName, Rank)>,
}

/// What has a queue of its own: a process set, and each two ranks of it with their messages in one direction, which are not to
/// wait for what the others do.
type Scope = (SetId, Option<Pair>);

#[derive(Debug)]
struct Queue {
    view: Arc<SetView>,
    /// What is ready and travels eagerly: ordered at once, whatever else is in flight.
    eager: VecDeque<ReadyTensor>,
    ready: VecDeque<ReadyTensor>,
    in_flight: usize,
}

impl Ordering {
    /// Puts a tensor behind those that are ready in its scope.
    pub(crate) fn push(&mut self, view: &Arc<SetView>, tensor: ReadyTensor) {
        let scope = (view.topology.set, pair_of(&tensor));
        let (eager, ready) = (VecDeque::new(), VecDeque::new());
        let new = || Queue { view: Arc::clone(view), eager, ready, in_flight: 0 };
        let queue = self.queues.entry(scope).or_insert_with(new);
        // The id may have been another set's: what is ready is the new one's alone.
        queue.view = Arc::clone(view);
        let of_kind = if tensor.algorithm == Algorithm::Eager { &mut queue.eager } else { &mut queue.ready };
        of_kind.push_back(tensor);
    }

    /// All ranks have joined, the last of them this one.
    pub(crate) fn push_all_joined(&mut self, name: TensorName, last: Rank) {
        self.all_joined = Some((name, last));
    }

    /// Forgets what is ready in a set that is gone: its requests are rejected by each sidecar.
    pub(crate) fn remove_set(&mut self, set: SetId) {
        for (_, queue) in self.queues.iter_mut().filter(|((of, _), _)| *of == set) {
            queue.eager.clear();
            queue.ready.clear();
        }
        self.drop_idle();
    }

    /// Takes out what is ready without any of these ranks, because they had joined.
    pub(crate) fn take_joined(&mut self, ranks: &BTreeSet<Rank>) -> Vec<Ready> {
        let mut taken = Vec::new();
        for (_, queue) in self.queues.range_mut(WORLD) {
            let without = |tensor: &ReadyTensor| tensor.joined.iter().any(|rank| ranks.contains(rank));
            for of_kind in [&mut queue.eager, &mut queue.ready] {
                let (stranded, kept) = std::mem::take(of_kind).into_iter().partition(without);
                *of_kind = kept;
                let stranded: VecDeque<ReadyTensor> = stranded;
                taken.extend(stranded.into_iter().map(|tensor| (Arc::clone(&queue.view), tensor)));
            }
        }
        taken
    }

    /// Orders what travels eagerly, and as much of the rest as may be in flight, scope by scope.
    pub(crate) fn order(&mut self, cx: &mut Context, epoch: Epoch, repetition: &mut Repetition) {
        for (&scope, queue) in &mut self.queues {
            while !queue.eager.is_empty() {
                let bucket = next_bucket(&mut queue.eager, cx.config.fusion_threshold_bytes);
                self.last.0 += 1;
                repetition.ordered(cx.now, &queue.view, &bucket);
                // It is over when the order has arrived: nobody reports it.
                send_order(cx, &queue.view, epoch, self.last, bucket);
            }
            while queue.in_flight < cx.config.buckets_in_flight {
                let bucket = next_bucket(&mut queue.ready, cx.config.fusion_threshold_bytes);
                if bucket.is_empty() {
                    break;
                }
                self.last.0 += 1;
                queue.in_flight += 1;
                repetition.ordered(cx.now, &queue.view, &bucket);
                self.in_flight.insert(self.last, (scope, queue.view.first_member()));
                self.plugged.extend(Plugged::of(self.last, &queue.view, &bucket));
                send_order(cx, &queue.view, epoch, self.last, bucket);
            }
        }
        self.send_all_joined(cx, epoch);
    }

    /// The sidecar that reports an operation, which is ordered and not done.
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

    /// Takes the operations that have to be settled, each once.
    pub(crate) fn take_plugged(&mut self) -> Vec<Plugged> {
        std::mem::take(&mut self.plugged)
    }

    /// The last number that was given, or passed over.
    pub(crate) fn last(&self) -> Seq {
        self.last
    }

    /// Numbers up to this one are in use otherwise.
    pub(crate) fn pass_over(&mut self, last: Seq) {
        self.last = self.last.max(last);
    }

    /// Tensors that are ready, with their sets.
    pub(crate) fn ready(&self) -> impl Iterator<Item = (SetId, &ReadyTensor)> {
        self.queues.iter().flat_map(|((set, _), queue)| queue.tensors().map(|tensor| (*set, tensor)))
    }

    /// Whether the end of a join waits to be said.
    pub(crate) fn ends_join(&self) -> bool {
        self.all_joined.is_some()
    }

    /// Forgets what is ready: it will be announced again.
    pub(crate) fn clear_ready(&mut self) {
        for queue in self.queues.values_mut() {
            queue.eager.clear();
            queue.ready.clear();
        }
        self.drop_idle();
    }

    fn drop_idle(&mut self) {
        self.queues.retain(|_, queue| queue.in_flight > 0 || !queue.eager.is_empty() || !queue.ready.is_empty());
    }

    fn send_all_joined(&mut self, cx: &mut Context, epoch: Epoch) {
        let Some((name, last)) = self.all_joined.take() else { return };
        let without_somebody = |(_, queue): (&Scope, &Queue)| queue.tensors().any(|tensor| !tensor.joined.is_empty());
        if self.queues.range(WORLD).any(without_somebody) {
            self.all_joined = Some((name, last));
            return;
        }
        cx.send_down(&cx.everybody.clone(), epoch, Seq(0), Control::AllJoined { name, last });
    }
}

impl Queue {
    fn tensors(&self) -> impl Iterator<Item = &ReadyTensor> {
        self.eager.iter().chain(&self.ready)
    }
}

/// The queues of the set of all ranks; it is the first of all sets.
const WORLD: std::ops::RangeToInclusive<Scope> = ..=(SetId::WORLD, None);

/// What is ordered for requests that were found to fit together.
///
/// # Errors
/// A refusal for all ranks, in words, when no result can hold it.
pub(crate) fn ready_tensor(
    cx: &Context,
    view: &SetView,
    (requests, came): (&RankRequests, RankContributions),
    joined: Vec<Rank>,
) -> Result<ReadyTensor, String> {
    let request = lead(requests).ok_or("the rank whose tensor counts has not asked for it")?;
    let pair = requests.first_key_value().and_then(|(rank, first)| first.collective.pair(*rank));
    let name = request.collective.name();
    let kind = work_kind(&request.collective, request.dtype, (request.codec, request.plugin.as_deref()), pair)
        .ok_or_else(|| format!("{name} is not performed as an operation of its own"))?;
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
    let eager = eager::gathered(view, requests, came, cx.config.eager_bytes);
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

/// Splits differ from rank to rank and stand in the order's rows.
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
        // Nobody reports it.
        cx.traces.note(|| Trace::Over { seq, dropped: false });
    }
    cx.send_down(&view.sidecars, epoch, seq, Control::Order(order));
}

/// The order of a bucket. What may travel eagerly does so where the order `carries` the contributions.
pub(crate) fn make_order(cx: &mut Context, view: &SetView, bucket: Vec<ReadyTensor>, carries: bool) -> Option<Order> {
    let first = bucket.first()?;
    let pair = pair_of(first);
    let ReadyTensor { collective, dtype, prescale, postscale, codec, plugin, joined, .. } = first.clone();
    let kind = work_kind(&collective, dtype, (codec, plugin.as_deref()), pair)?;
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

/// The kind of work, where the ranks of one sidecar may not be reduced with each other first. A set on one sidecar is reduced
/// in rank order in any case.
fn reduced_as(cx: &Context, view: &SetView, kind: WorkKind) -> WorkKind {
    let flat = !cx.config.hierarchical_allreduce && view.topology.len() > 1;
    if flat && view.ranks.len() <= limits::NARY_RANKS_MAX { planning::kind_with(kind, Algorithm::Direct) } else { kind }
}

fn selected(cx: &mut Context, view: &SetView, work: &Work) -> Tuning {
    let Choice { tuning, reason, .. } = select(&view.topology, work, lanes(cx, view), &cx.config.cost);
    cx.note_selection(reason);
    tuning
}

/// Lanes that all members offer, as far as the coordinator knows; its own threads where it is the only member.
fn lanes(cx: &Context, view: &SetView) -> u16 {
    if view.topology.len() == 1 && view.me.is_some() {
        return cx.config.threads.min(LANES_MOST);
    }
    let offered = view.topology.members.iter().filter_map(|member| cx.links.lanes(member.sidecar));
    offered.fold(cx.config.lanes, u16::min).clamp(1, LANES_MOST)
}

/// [`limits::LANES_MAX`] as a tuning holds it.
#[allow(clippy::cast_possible_truncation, reason = "16, checked by the assertion below")]
const LANES_MOST: u16 = limits::LANES_MAX as u16;
const _: () = assert!(LANES_MOST as usize == limits::LANES_MAX);
