//! Admission of orders: an order is checked against this sidecar's own state and becomes a plan.

use std::sync::Arc;

use ronde_collectives::plan;
use ronde_collectives::plan::{Plan, WorkKind};
use ronde_wire::control::{Order, OrderedTensor};
use ronde_wire::{Algorithm, Collective, Epoch, Member, PluginUse, Rank, Request, Seq, SetTopology, Tuning, limits};

use super::requests::{RankKey, Requests};
use crate::engine::shared::eager;
use crate::engine::shared::planning::{allows_joined, digest, kind_with, may_share};
use crate::engine::shared::sets::SetView;
use crate::engine::shared::shapes::{Results, work, work_kind};
use crate::event::{Admission, AdmittedPlugin, AdmittedRequest, AdmittedTensor, Arithmetic};

/// Checks an order and makes its plan; the requests that it completes become ordered. The view is that of the set, or
/// of the pair for a message.
///
/// # Errors
/// What contradicts this sidecar's own state. The requests may be changed then; the epoch has to end.
pub(crate) fn prepare(
    view: &Arc<SetView>,
    requests: &mut Requests,
    epoch: Epoch,
    seq: Seq,
    order: &Order,
) -> Result<Admission, String> {
    check_joined(view, requests, order)?;
    let mut admission = Template::new(view, order)?.admission(requests, epoch, seq, order)?;
    admission.contributions.clone_from(&order.contributions);
    Ok(admission)
}

/// The part of an admission that depends only on the order; the operations of a schedule share it.
#[derive(Debug)]
pub(crate) struct Template {
    pub(crate) view: Arc<SetView>,
    results: Vec<Results>,
    topology: Arc<SetTopology>,
    plan: Arc<Plan>,
    local_ranks: Vec<Rank>,
    /// Whether the members of the set send each rank's values to one of them.
    reduces_at_once: bool,
}

impl Template {
    /// Checks an order by itself and makes its plan.
    ///
    /// # Errors
    /// What contradicts this sidecar's own state.
    pub(crate) fn new(view: &Arc<SetView>, order: &Order) -> Result<Self, String> {
        let me = view.me.ok_or_else(|| format!("it serves no rank of {}", order.set))?;
        let name = order.collective.name();
        let plugin = order.plugin.as_deref();
        plugin.map_or(Ok(()), PluginUse::check).map_err(|error| error.to_string())?;
        let kind = work_kind(&order.collective, order.dtype, order.codec, plugin, order.pair)
            .ok_or_else(|| format!("{name} is not performed as a separate operation"))?;
        check_count(order)?;
        // First of all: no sum of the order's numbers overflows when every result can be addressed.
        let results = results(view, order)?;
        let work = work(kind_with(kind, order.tuning.algorithm), order.dtype, view, &order.tensors);
        if digest(&view.topology, &work, &order.tuning) != order.digest {
            return Err("the digest of the plan's inputs differs from the coordinator's".to_owned());
        }
        eager::check(view, order, &work.kind)?;
        let inputs = PlanInputs::of(view, me, order);
        let plan = plan(inputs.me, &inputs.topology, &work, &inputs.tuning).map_err(|error| error.to_string())?;
        let reduces_at_once = work.kind == WorkKind::AllReduceNAry;
        let PlanInputs { topology, local_ranks, .. } = inputs;
        Ok(Self { view: Arc::clone(view), results, topology, plan: Arc::new(plan), local_ranks, reduces_at_once })
    }

    /// The admission of an operation with this seq, without contributions; the requests that it completes become
    /// ordered. `order` is the one of [`Self::new`].
    ///
    /// # Errors
    /// What contradicts the requests. They may be changed then; the epoch has to end.
    pub(crate) fn admission(
        &self,
        requests: &mut Requests,
        epoch: Epoch,
        seq: Seq,
        order: &Order,
    ) -> Result<Admission, String> {
        let view = &self.view;
        let mut tensors = Vec::with_capacity(order.tensors.len());
        for (tensor, results) in order.tensors.iter().zip(&self.results) {
            let requests = answer(view, requests, seq, order, tensor, results)?;
            tensors.push(AdmittedTensor { name: tensor.name.clone(), requests, own: results.own });
        }
        let arithmetic = Arithmetic {
            dtype: order.dtype,
            op: order.collective.reduce_op(),
            ranks: u32::try_from(view.ranks.len()).unwrap_or(u32::MAX),
            prescale: order.prescale,
            postscale: order.postscale,
            codec: order.codec,
            at_once: self.topology.len() == 1 || self.reduces_at_once,
        };
        let plugin = order.plugin.as_ref().map(|uses| AdmittedPlugin {
            uses: Arc::clone(uses),
            elements: order.tensors.iter().map(|tensor| tensor.shape.elements()).collect(),
        });
        let joined = self.local_ranks.iter().copied().filter(|rank| is_joined(order, *rank)).collect();
        Ok(Admission {
            epoch,
            seq,
            topology: Arc::clone(&self.topology),
            plan: Arc::clone(&self.plan),
            arithmetic,
            plugin,
            tensors,
            local_ranks: self.local_ranks.clone(),
            served: view.local_ranks.clone(),
            set_served: Arc::clone(&view.set_local_ranks),
            joined,
            contributions: Vec::new(),
            scheduled: false,
        })
    }

    /// Elements of all its tensors.
    pub(crate) fn elements(&self) -> u64 {
        self.plan.layout.elements
    }
}

/// The inputs of a plan: the set as it is, or, for an eager order, as if this sidecar served all ranks.
struct PlanInputs {
    topology: Arc<SetTopology>,
    me: Member,
    local_ranks: Vec<Rank>,
    tuning: Tuning,
}

impl PlanInputs {
    fn of(view: &SetView, me: Member, order: &Order) -> Self {
        let tuning = order.tuning;
        if tuning.algorithm == Algorithm::Eager {
            let topology = Arc::new(view.topology.on_one_sidecar(view.topology.sidecar(me)));
            let tuning = Tuning { algorithm: Algorithm::Local, ..tuning };
            return Self { topology, me: Member(0), local_ranks: view.ranks.clone(), tuning };
        }
        Self { topology: Arc::clone(&view.topology), me, local_ranks: view.local_ranks.clone(), tuning }
    }
}

fn results(view: &SetView, order: &Order) -> Result<Vec<Results>, String> {
    let too_large = |tensor: &OrderedTensor| format!("the result of {} has no valid shape", tensor.name);
    let results = |tensor| Results::of(&order.collective, order.pair, view, tensor).ok_or_else(|| too_large(tensor));
    order.tensors.iter().map(results).collect()
}

fn check_count(order: &Order) -> Result<(), String> {
    let most = if may_share(&order.collective, order.plugin.as_deref()) { limits::BUCKET_TENSORS_MAX } else { 1 };
    match order.tensors.len() {
        count if (1..=most).contains(&count) => Ok(()),
        count => Err(format!("a bucket of {} has 1 to {most} tensors, not {count}", order.collective.name())),
    }
}

/// Checks that the joined ranks of an order have joined, and that joining has a meaning for it.
fn check_joined(view: &SetView, requests: &Requests, order: &Order) -> Result<(), String> {
    if order.joined.is_empty() {
        return Ok(());
    }
    let name = order.collective.name();
    if order.pair.is_some() || !allows_joined(&order.collective) {
        return Err(format!("{name} of {} goes on without ranks that have joined", order.set));
    }
    if !order.joined.is_sorted_by(|a, b| a < b) {
        return Err("its ranks that have joined are not ascending".to_owned());
    }
    if let Some(rank) = order.joined.iter().find(|rank| !view.contains(**rank)) {
        return Err(format!("{rank} is marked as joined but is not in {}", order.set));
    }
    let not_joined = |rank: &&Rank| view.serves(**rank) && !requests.has_joined(order.set, **rank);
    match order.joined.iter().find(not_joined) {
        Some(rank) => Err(format!("{rank} is marked as joined but has not joined")),
        None => Ok(()),
    }
}

fn is_joined(order: &Order, rank: Rank) -> bool {
    order.joined.binary_search(&rank).is_ok()
}

/// The requests of the local ranks for a tensor, compared with the order.
fn answer(
    view: &SetView,
    requests: &mut Requests,
    seq: Seq,
    order: &Order,
    tensor: &OrderedTensor,
    results: &Results,
) -> Result<Vec<AdmittedRequest>, String> {
    let mut answered = Vec::with_capacity(view.local_ranks.len());
    for &rank in view.local_ranks.iter().filter(|rank| !is_joined(order, **rank)) {
        let request = requests
            .order(&RankKey::new(order.set, &tensor.name, rank), seq, |own| fits(view, order, tensor, rank, own))
            .map_err(|reason| format!("tensor {} of {rank}: {reason}", tensor.name))?;
        let (output, detail) = results.of_rank(view, rank, tensor);
        answered.push(AdmittedRequest { rank, request, output, detail });
    }
    Ok(answered)
}

/// Compares a rank's request with the order.
pub(crate) fn fits(
    view: &SetView,
    order: &Order,
    tensor: &OrderedTensor,
    rank: Rank,
    own: &Request,
) -> Result<(), String> {
    let pair = own.collective.pair(rank);
    if pair != order.pair || !same_collective(&order.collective, &own.collective, pair.is_some()) {
        return Err(format!("{:?} was ordered, {:?} was asked for", order.collective, own.collective));
    }
    if !own.collective.has_input(rank) {
        return Ok(());
    }
    if order.dtype != own.dtype {
        return Err(format!("type {} was ordered, {} was asked for", order.dtype, own.dtype));
    }
    let scales = |pre: f64, post: f64| (pre.to_bits(), post.to_bits());
    if scales(order.prescale, order.postscale) != scales(own.prescale, own.postscale) {
        return Err("other scale factors were ordered than asked for".to_owned());
    }
    if order.codec != own.codec {
        return Err(format!("codec {} was ordered, {} was asked for", order.codec, own.codec));
    }
    if order.plugin != own.plugin {
        return Err("another plugin was ordered than asked for, or under other parameters".to_owned());
    }
    if shape_fits(view, tensor, rank, own) {
        Ok(())
    } else {
        Err(format!("shape {} was ordered, {} was asked for", tensor.shape, own.shape))
    }
}

/// Whether an order and a request have the same collective. The differences between ranks are in other fields: splits
/// in the order's rows, the two sides of a message in its pair.
fn same_collective(ordered: &Collective, own: &Collective, is_message: bool) -> bool {
    match (ordered, own) {
        (Collective::AllToAll { .. }, Collective::AllToAll { .. }) => true,
        (Collective::Send { tag, .. }, Collective::Send { tag: own, .. } | Collective::Recv { tag: own, .. }) => {
            is_message && tag == own
        }
        _ => ordered == own,
    }
}

fn shape_fits(view: &SetView, tensor: &OrderedTensor, rank: Rank, own: &Request) -> bool {
    let (count, position) = (view.ranks.len(), view.position(rank));
    let (ordered, dimensions) = (tensor.shape.dimensions(), own.shape.dimensions());
    let same_rows = ordered.get(1..) == dimensions.get(1..);
    match &own.collective {
        Collective::AllGather | Collective::Gather { .. } => {
            let rows = position.and_then(|position| tensor.rows.get(position));
            tensor.rows.len() == count && rows == dimensions.first() && same_rows
        }
        Collective::AllToAll { splits } => {
            let sent = position.and_then(|position| tensor.rows.chunks_exact(count).nth(position));
            tensor.rows.len() == count * count && sent == Some(splits.as_slice()) && same_rows
        }
        _ => tensor.shape == own.shape && tensor.rows.is_empty(),
    }
}
