//! Validation of single requests: an invalid request is refused by name on all ranks.

use ronde_collectives::kernels;
use ronde_wire::{
    AnySource, Codec, Collective, DType, Pair, PluginUse, PluginWork, Rank, ReduceOp, Request, SetId, TensorName,
    World, is_set_of_members_name, limits,
};

use super::sets::SetView;
use super::shapes::has_codecs;
use super::wording;

/// Checks a rank's request as far as it does not depend on the requests of other ranks. `view` are its participants.
///
/// # Errors
/// Why it is refused; the other ranks' requests with the same name fail with the same text.
pub(crate) fn check(world: &World, view: &SetView, request: &Request) -> Result<(), String> {
    let name = request.collective.name();
    let ranks = view.ranks.len();
    check_extras(request)?;
    match &request.collective {
        Collective::AllReduce { op } => check_all_reduce(*op, request, ranks),
        Collective::ReduceScatter { op } | Collective::Reduce { op, .. } => check_elementwise(name, *op, request.dtype),
        Collective::AllToAll { splits } => check_splits(splits, request, ranks),
        Collective::AddSet { .. } | Collective::AddSetOfMembers { .. } | Collective::RemoveSet { .. }
            if !view.is_world() =>
        {
            Err(format!("{name} is for the set of all ranks, {}, not for {}", SetId::WORLD, request.set))
        }
        Collective::AddSet { ranks } | Collective::AddSetOfMembers { ranks } => check_ranks(world, ranks),
        _ => Ok(()),
    }?;
    match request.collective.root() {
        Some(root) if !view.contains(root) => {
            Err(format!("received invalid root rank: rank {} is not in {}", root.0, request.set))
        }
        _ => Ok(()),
    }
}

/// Checks that the name of a message or receive belongs to its two ranks, and that other requests do not use such
/// names. Other ranks cannot know of a request that breaks this, so it is refused locally.
///
/// # Errors
/// Why it is refused.
pub(crate) fn check_message(view: &SetView, rank: Rank, request: &Request) -> Result<(), String> {
    let (name, what) = (&request.name, request.collective.name());
    check_set_of_members(rank, request)?;
    if let Collective::RecvAny { tag } = request.collective {
        return check_any_source(view, AnySource { to: rank, tag }, name);
    }
    let (pair, tag) = match (request.collective.pair(rank), &request.collective) {
        (Some(pair), Collective::Send { tag, .. } | Collective::Recv { tag, .. }) => (pair, *tag),
        _ if Pair::of_message(name).is_none() && AnySource::of_receive(name).is_none() => return Ok(()),
        _ => return Err(format!("the name {name} is reserved for messages; give {what} another one")),
    };
    if pair.from == pair.to {
        return Err(format!("{what}: rank {} cannot exchange messages with itself", rank.0));
    }
    let other = if pair.from == rank { pair.to } else { pair.from };
    if !view.contains(other) {
        return Err(format!("{what}: rank {} is not in {}", other.0, request.set));
    }
    if Pair::of_message(name) != Some((pair, tag)) {
        let form = format!("message.{}.{}.{tag}.<count>", pair.from.0, pair.to.0);
        return Err(format!("{what} with tag {tag} must be named {form}, not {name}"));
    }
    Ok(())
}

/// Checks that a request for a process set of its members is one of such a member, and that other requests do not use
/// such names.
fn check_set_of_members(rank: Rank, request: &Request) -> Result<(), String> {
    let (name, what) = (&request.name, request.collective.name());
    match &request.collective {
        Collective::AddSetOfMembers { .. } if !is_set_of_members_name(name) => {
            Err(format!("{what} by the members of a set must be named add_process_set.members.<name>, not {name}"))
        }
        Collective::AddSetOfMembers { ranks } if !ranks.contains(&rank) => {
            let mut ranks = ranks.clone();
            ranks.sort_unstable();
            let listed = wording::ranks(&ranks);
            Err(format!(
                "{what}: {rank} is not among {listed}, the members of the set; only they ask for a set of members"
            ))
        }
        // Its name belongs to set 0, where another request by that name may wait.
        Collective::AddSetOfMembers { .. } if request.set != SetId::WORLD => {
            Err(format!("{what} is for the set of all ranks, {}, not for {}", SetId::WORLD, request.set))
        }
        Collective::AddSetOfMembers { .. } => Ok(()),
        _ if is_set_of_members_name(name) => Err(format!(
            "the name {name} is reserved for process sets that their members form; give {what} another one"
        )),
        _ => Ok(()),
    }
}

fn check_any_source(view: &SetView, any: AnySource, name: &TensorName) -> Result<(), String> {
    if view.ranks.len() < 2 {
        let (rank, set) = (any.to.0, view.topology.set);
        return Err(format!("RECV from any source: rank {rank} is alone in {set}, so no rank can send to it"));
    }
    if AnySource::of_receive(name) != Some(any) {
        let form = format!("message.any.{}.{}.<count>", any.to.0, any.tag);
        return Err(format!("RECV from any source with tag {} must be named {form}, not {name}", any.tag));
    }
    Ok(())
}

/// Rejects codec, plugin, group and scales where they have no meaning.
fn check_extras(request: &Request) -> Result<(), String> {
    let Request { collective, codec, group, prescale, postscale, plugin, .. } = request;
    let name = collective.name();
    let reduces = collective.reduce_op().is_some();
    if !reduces && (prescale.to_bits(), postscale.to_bits()) != (ONE, ONE) {
        return Err(format!(
            "{name} does not reduce, so its prescale and postscale are 1, not {prescale} and {postscale}"
        ));
    }
    if *codec != Codec::None && !matches!(collective, Collective::AllReduce { .. }) {
        return Err(format!("{name} takes no codec, and was given {codec}; only ALLREDUCE does"));
    }
    if plugin.is_some() && !matches!(collective, Collective::AllReduce { .. }) {
        return Err(format!("{name} takes no plugin; only ALLREDUCE does"));
    }
    let Some(group) = group else { return Ok(()) };
    if !may_be_grouped(collective) {
        return Err(format!("{name} cannot be in a group, and was put into {}", group.name));
    }
    let most = limits::GROUP_TENSORS_MAX;
    if (1..=most as u64).contains(&u64::from(group.size)) {
        Ok(())
    } else {
        Err(format!("group {} has {} tensors; a group has 1 to {most}", group.name, group.size))
    }
}

fn may_be_grouped(collective: &Collective) -> bool {
    let single = matches!(
        collective,
        Collective::Barrier
            | Collective::Join
            | Collective::Send { .. }
            | Collective::Recv { .. }
            | Collective::RecvAny { .. }
            | Collective::AddSet { .. }
            | Collective::AddSetOfMembers { .. }
            | Collective::RemoveSet { .. }
    );
    !single
}

fn check_all_reduce(op: ReduceOp, request: &Request, ranks: usize) -> Result<(), String> {
    let (name, dtype, codec) = (request.collective.name(), request.dtype, request.codec);
    if let Some(plugin) = &request.plugin {
        return check_plugin(plugin, op, request, ranks);
    }
    if codec == Codec::Plugin || op == ReduceOp::Plugin {
        return Err(format!("{name} needs a plugin, but the request names none"));
    }
    if codec != Codec::None && (codec.encoded_bytes(dtype).is_none() || !has_codecs(op)) {
        return Err(format!(
            "{name} with codec {codec} takes float32 with reduction sum or average, not {dtype} with {op}"
        ));
    }
    if !matches!(op, ReduceOp::Adasum | ReduceOp::Median | ReduceOp::ClippedMean) {
        return check_elementwise(name, op, dtype);
    }
    if !dtype.is_float() {
        return Err(format!("{name} with reduction {op} takes floating-point types, not {dtype}; cast to float32"));
    }
    let most = limits::NARY_RANKS_MAX;
    if ranks > most {
        return Err(format!("{name} with reduction {op} takes sets of up to {most} ranks; this one has {ranks}"));
    }
    Ok(())
}

/// Checks that the plugin fits the reduction. The sidecar that loaded it has checked the element type.
fn check_plugin(plugin: &PluginUse, op: ReduceOp, request: &Request, ranks: usize) -> Result<(), String> {
    let (name, dtype) = (request.collective.name(), request.dtype);
    plugin.check().map_err(|error| error.to_string())?;
    if !plugin.goes_with(op) || (request.codec == Codec::Plugin) != plugin.work.is_codec() {
        let what = if plugin.work.is_codec() { "encodes, and goes with sum or average" } else { "reduces by itself" };
        return Err(format!("{name} with reduction {op}: plugin {plugin} {what}"));
    }
    let block_bytes = match plugin.work {
        PluginWork::Codec { block_elements, .. } => block_elements as usize * dtype.size_bytes(),
        _ => 0,
    };
    if block_bytes > limits::PLUGIN_BLOCK_BYTES_MAX {
        return Err(format!("{name}: plugin {plugin} takes blocks of {block_bytes} bytes, more than a chunk"));
    }
    let most = limits::NARY_RANKS_MAX;
    if !matches!(plugin.work, PluginWork::Codec { .. } | PluginWork::Pairwise) && ranks > most {
        return Err(format!("{name} with plugin {plugin} takes sets of up to {most} ranks; this one has {ranks}"));
    }
    if plugin.work.is_codec() { check_elementwise(name, op, dtype) } else { Ok(()) }
}

fn check_elementwise(name: &str, op: ReduceOp, dtype: DType) -> Result<(), String> {
    match op {
        ReduceOp::Adasum | ReduceOp::Median | ReduceOp::ClippedMean | ReduceOp::Plugin => {
            Err(format!("{name} with reduction {op} is not supported; use ALLREDUCE"))
        }
        ReduceOp::Average if dtype == DType::Bool => {
            Err(format!("{name} cannot average bool; use max (any rank's) or min (every rank's), or cast to float32"))
        }
        _ if op.is_bitwise() && dtype.is_float() => Err(format!(
            "{name} with reduction {op} takes integers and bool, not {dtype}; floats have no bitwise reduction"
        )),
        _ if kernels::supports(dtype, op) => Ok(()),
        _ => Err(format!("{name} with reduction {op} of {dtype} is not supported by this version")),
    }
}

fn check_splits(splits: &[u64], request: &Request, ranks: usize) -> Result<(), String> {
    let (name, most) = (request.collective.name(), limits::ALL_TO_ALL_RANKS_MAX);
    if ranks > most {
        return Err(format!("{name} takes sets of up to {most} ranks; this one has {ranks}"));
    }
    if splits.len() != ranks {
        let given = splits.len();
        return Err(format!("{name}: splits has {given} entries for a set of {ranks} ranks; give one for each rank"));
    }
    // A scalar is refused with its own text when the requests of all ranks are compared.
    let Some(&rows) = request.shape.dimensions().first() else { return Ok(()) };
    match splits.iter().try_fold(0_u64, |sum, split| sum.checked_add(*split)) {
        Some(sum) if sum == rows => Ok(()),
        Some(sum) if sum < rows => {
            Err(format!("{name}: the sum of splits, {sum}, is smaller than the first dimension of the tensor, {rows}"))
        }
        _ => Err(format!("{name}: the sum of splits is larger than the first dimension of the tensor, {rows}")),
    }
}

fn check_ranks(world: &World, ranks: &[Rank]) -> Result<(), String> {
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    if sorted.is_empty() {
        return Err("a process set has at least one rank".to_owned());
    }
    if let Some(outside) = sorted.iter().find(|rank| rank.index() >= world.size()) {
        let (rank, size) = (outside.0, world.size());
        return Err(format!("a process set cannot have rank {rank}: there are {size} ranks, the first of them 0"));
    }
    match sorted.windows(2).find(|two| two[0] == two[1]) {
        Some(twice) => Err(format!("a process set names {} twice: {}", twice[0], wording::ranks(&sorted))),
        None => Ok(()),
    }
}

const ONE: u64 = 1.0_f64.to_bits();
