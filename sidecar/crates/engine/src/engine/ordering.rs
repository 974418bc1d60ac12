//! The coordinator's queues: what is ready, what is ordered and not done.

use std::collections::{BTreeMap, VecDeque};

use ronde_collectives::{Choice, algorithm_of, select};
use ronde_wire::control::{Order, OrderedTensor};
use ronde_wire::{Cause, Codec, Control, Epoch, Failure, Rank, Request, Seq, SetId, limits};

use super::admission;
use super::context::{Context, SetView};
use super::fusion::{ReadyTensor, next_bucket};

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Ordering {
    sets: BTreeMap<SetId, SetQueue>,
    in_flight: BTreeMap<Seq, SetId>,
    last: Seq,
}

#[derive(Debug, Default)]
struct SetQueue {
    ready: VecDeque<ReadyTensor>,
    in_flight: usize,
}

impl Ordering {
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// A tensor that all ranks of the set have announced alike.
    ///
    /// # Errors
    /// A refusal for all ranks when no result can hold it.
    pub(crate) fn push(
        &mut self,
        cx: &Context,
        view: &SetView,
        requests: &BTreeMap<Rank, Request>,
    ) -> Result<(), Failure> {
        let Some(first) = requests.values().next() else { return Ok(()) };
        let tensor = ready_tensor(cx, view, first, requests).map_err(|reason| {
            let reason = format!("tensor {} of {}: {reason}", first.name, first.set);
            Failure::new(Cause::Refused, reason).with_tensor(first.name.clone())
        })?;
        self.sets.entry(view.topology.set).or_default().ready.push_back(tensor);
        Ok(())
    }

    /// Orders as much as may be in flight, set by set.
    pub(crate) fn order(&mut self, cx: &mut Context, epoch: Epoch) {
        for (&set, queue) in &mut self.sets {
            while queue.in_flight < cx.config.buckets_in_flight {
                let bucket = next_bucket(&mut queue.ready, cx.config.fusion_threshold_bytes);
                let (Some(view), false) = (cx.set(set), bucket.is_empty()) else { break };
                queue.in_flight += 1;
                self.last.0 += 1;
                self.in_flight.insert(self.last, set);
                send_order(cx, &view, epoch, self.last, bucket);
            }
        }
    }

    /// The set of an operation that is ordered and not done.
    pub(crate) fn set_of(&self, seq: Seq) -> Option<SetId> {
        self.in_flight.get(&seq).copied()
    }

    /// An operation is done at the first member.
    pub(crate) fn done(&mut self, seq: Seq) {
        if let Some(queue) = self.in_flight.remove(&seq).and_then(|set| self.sets.get_mut(&set)) {
            queue.in_flight -= 1;
        }
    }
}

fn ready_tensor(
    cx: &Context,
    view: &SetView,
    first: &Request,
    requests: &BTreeMap<Rank, Request>,
) -> Result<ReadyTensor, String> {
    let kind = admission::work_kind(&first.collective)
        .ok_or_else(|| format!("{} is not performed by this version", first.collective.name()))?;
    let gathers = kind == ronde_collectives::WorkKind::AllGather;
    let rows = |request: &Request| request.shape.dimensions().first().copied().unwrap_or_default();
    let rows = if gathers { requests.values().map(rows).collect() } else { Vec::new() };
    let tensor = OrderedTensor { name: first.name.clone(), shape: first.shape.clone(), rows };
    let output = admission::output(&kind, &tensor).ok_or("the result has more elements than can be addressed")?;
    let element_bytes = admission::element_bytes(first.dtype);
    Ok(ReadyTensor {
        algorithm: algorithm_of(&view.topology, &kind, element_bytes, output.elements(), &cx.config.cost),
        bytes: output.elements().saturating_mul(u64::from(element_bytes)),
        tensor,
        collective: first.collective.clone(),
        dtype: first.dtype,
        prescale: first.prescale,
        postscale: first.postscale,
    })
}

fn send_order(cx: &mut Context, view: &SetView, epoch: Epoch, seq: Seq, bucket: Vec<ReadyTensor>) {
    let shared = bucket.len() > 1;
    cx.stats.ordered_operations += 1;
    cx.stats.ordered_tensors += bucket.len() as u64;
    cx.stats.fused_tensors += if shared { bucket.len() as u64 } else { 0 };
    let Some(order) = make_order(cx, view, bucket) else { return };
    for member in &view.topology.members {
        cx.send(member.sidecar, epoch, seq, Control::Order(order.clone()));
    }
}

fn make_order(cx: &mut Context, view: &SetView, bucket: Vec<ReadyTensor>) -> Option<Order> {
    let first = bucket.first()?;
    let (collective, dtype) = (first.collective.clone(), first.dtype);
    let (prescale, postscale) = (first.prescale, first.postscale);
    let kind = admission::work_kind(&collective)?;
    let tensors: Vec<OrderedTensor> = bucket.into_iter().map(|ready| ready.tensor).collect();
    let work = admission::work(kind, dtype, &tensors);
    let Choice { tuning, reason, .. } = select(&view.topology, &work, lanes(cx, view), &cx.config.cost);
    cx.note_selection(reason);
    let digest = admission::digest(&view.topology, &work, &tuning);
    Some(Order {
        set: view.topology.set,
        collective,
        dtype,
        prescale,
        postscale,
        codec: Codec::None,
        pair: None,
        joined: Vec::new(),
        tensors,
        tuning,
        digest,
    })
}

/// Lanes that all members offer, as far as the coordinator knows.
fn lanes(cx: &Context, view: &SetView) -> u16 {
    let offered = view.topology.members.iter().filter_map(|member| cx.links.lanes(member.sidecar));
    let most = u16::try_from(limits::LANES_MAX).unwrap_or(u16::MAX);
    offered.fold(cx.config.lanes, u16::min).clamp(1, most)
}
