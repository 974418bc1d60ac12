//! Checks that the requests of all ranks of a set match. The checks, their order and their key words are Horovod's, so
//! that its users recognise them; a list of the ranks and their values follows.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use ronde_wire::{Cause, Codec, Collective, Failure, Rank, ReduceOp, Request, Shape, SidecarIndex};

use crate::engine::shared::RankRequests;
use crate::engine::shared::planning::allows_joined;
use crate::engine::shared::wording;

/// Checks the requests of all ranks of a set for one name. `excused` are the joined ranks without a request, ascending.
///
/// # Errors
/// A [`Failure`] of cause `Mismatch` for all ranks: the first check that fails, with the first rank that differs from the
/// lowest one as the culprit.
pub(crate) fn check(requests: &RankRequests, excused: &[Rank]) -> Result<(), Failure> {
    let Some((rank, first)) = requests.first_key_value() else { return Ok(()) };
    let found = if first.collective.pair(*rank).is_some() {
        // The two sides of a message differ by nature, and their name fixes everything else.
        joined(requests, excused)
    } else {
        data_type(requests).or_else(|| operation(requests)).or_else(|| by_collective(requests, excused))
    };
    found.map_or(Ok(()), |difference| Err(difference.into_failure(first)))
}

/// The request whose type and shape are used: that of the root of a scatter, of the sender of a message, of the lowest
/// rank otherwise.
pub(crate) fn lead(requests: &RankRequests) -> Option<&Request> {
    let (rank, first) = requests.first_key_value()?;
    match &first.collective {
        Collective::Scatter { root } => requests.get(root),
        collective => collective.pair(*rank).map_or(Some(first), |pair| requests.get(&pair.from)),
    }
}

fn by_collective(requests: &RankRequests, excused: &[Rank]) -> Option<Difference> {
    let joined = || joined(requests, excused);
    let gathered = || scalar(requests).or_else(|| dimensions(requests)).or_else(|| rows(requests));
    let reduced = || shape(requests).or_else(|| scales(requests)).or_else(|| reduction(requests));
    let root = || root(requests);
    let found = match requests.values().next()?.collective {
        Collective::AllReduce { .. } => reduced().or_else(joined).or_else(|| codec(requests)),
        Collective::ReduceScatter { .. } => reduced().or_else(joined).or_else(|| scalar(requests)),
        Collective::Reduce { .. } => reduced().or_else(joined).or_else(root),
        Collective::AllGather | Collective::AllToAll { .. } => joined().or_else(gathered),
        Collective::Gather { .. } => joined().or_else(gathered).or_else(root),
        Collective::Broadcast { .. } => shape(requests).or_else(joined).or_else(root),
        Collective::Scatter { .. } => joined().or_else(root).or_else(|| scalar(requests)),
        Collective::AddSet { .. } | Collective::RemoveSet { .. } => joined().or_else(|| sets(requests)),
        _ => joined(),
    };
    found.or_else(|| group(requests))
}

/// The description of a difference, and the rank that differs.
struct Difference {
    text: String,
    culprit: Rank,
}

impl Difference {
    fn into_failure(self, request: &Request) -> Failure {
        let (name, set) = (&request.name, request.set);
        let reason = format!("{} Tensor {name} of {set}: make all ranks of the set ask for the same.", self.text);
        Failure::new(Cause::Mismatch, reason).with_rank(self.culprit).with_tensor(name.clone())
    }
}

/// Compares the ranks with an input.
fn data_type(requests: &RankRequests) -> Option<Difference> {
    let dtype = |rank: Rank, r: &Request| r.collective.has_input(rank).then(|| r.dtype.name());
    compare_as(
        requests,
        dtype,
        |name| (*name).to_owned(),
        |a, b| format!("Mismatched data types: One rank had type {a}, but another rank had type {b}."),
    )
}

fn operation(requests: &RankRequests) -> Option<Difference> {
    compare(
        requests,
        |r| r.collective.name(),
        |a, b| format!("Mismatched operations: One rank did an {a}, but another rank did an {b}."),
    )
}

fn shape(requests: &RankRequests) -> Option<Difference> {
    let operation = operation_name(requests);
    compare(
        requests,
        |r| r.shape.to_string(),
        |a, b| {
            format!(
                "Mismatched {operation} tensor shapes: One rank sent a tensor of shape {a}, but another rank sent a tensor of shape {b}."
            )
        },
    )
}

fn scales(requests: &RankRequests) -> Option<Difference> {
    // Compared as bits: NaN equals itself, and 0 is not -0.
    let factors = |_, r: &Request| Some((r.prescale.to_bits(), r.postscale.to_bits()));
    let text = |(pre, post): &(u64, u64)| format!("{} and {}", f64::from_bits(*pre), f64::from_bits(*post));
    compare_as(requests, factors, text, |a, b| {
        format!("Mismatched prescale and/or postscale factors: One rank sent {a}, but another rank sent {b}.")
    })
}

fn reduction(requests: &RankRequests) -> Option<Difference> {
    compare(
        requests,
        |r| match r.collective.reduce_op() {
            Some(ReduceOp::Plugin) => plugin_text(r),
            op => op.map_or("none", |op| op.name()).to_owned(),
        },
        |a, b| format!("Mismatched reduction operation: One rank asked for {a}, but another rank asked for {b}."),
    )
}

fn scalar(requests: &RankRequests) -> Option<Difference> {
    let operation = operation_name(requests);
    let is_scalar = |rank: Rank, r: &Request| r.collective.has_input(rank) && r.shape.dimensions().is_empty();
    let (rank, _) = requests.iter().find(|(rank, request)| is_scalar(**rank, request))?;
    let lowest = requests.keys().next() == Some(rank);
    let who = if lowest { "Process-set rank zero".to_owned() } else { wording::capitalised(&rank.to_string()) };
    let text = format!("{who} tried to {operation} a rank-zero tensor: give it a first dimension. It is {rank}.");
    Some(Difference { text, culprit: *rank })
}

fn dimensions(requests: &RankRequests) -> Option<Difference> {
    let operation = operation_name(requests);
    compare(
        requests,
        |r| r.shape.dimensions().len(),
        |a, b| {
            format!(
                "Mismatched {operation} tensor shapes: One rank sent a tensor of rank {a}, but another rank sent a tensor of rank {b}."
            )
        },
    )
}

/// Every dimension but the first; all requests have the same number of them.
fn rows(requests: &RankRequests) -> Option<Difference> {
    let operation = operation_name(requests);
    let count = requests.values().next().map_or(0, |r| r.shape.dimensions().len());
    (1..count).find_map(|d| {
        compare(requests, |r| dimension(&r.shape, d), |a, b| {
            format!("Mismatched {operation} tensor shapes: One rank sent a tensor with dimension {d} equal to {a}, but another rank sent a tensor with dimension {d} equal to {b}.")
        })
    })
}

fn root(requests: &RankRequests) -> Option<Difference> {
    let operation = operation_name(requests);
    let root = |r: &Request| r.collective.root().map_or(u32::MAX, |root| root.0);
    compare(requests, root, |a, b| {
        format!(
            "Mismatched {operation} root ranks: One rank specified root rank {a}, but another rank specified root rank {b}."
        )
    })
}

fn codec(requests: &RankRequests) -> Option<Difference> {
    compare(
        requests,
        |r| if r.codec == Codec::Plugin { plugin_text(r) } else { r.codec.to_string() },
        |a, b| format!("Mismatched codecs: One rank asked for {a}, but another rank asked for {b}."),
    )
}

/// The plugin of a request with its parameters.
fn plugin_text(request: &Request) -> String {
    let Some(plugin) = &request.plugin else { return "a plugin".to_owned() };
    let parameters: Vec<String> = plugin.parameters.iter().map(|bits| format!("{bits:x}")).collect();
    format!("plugin {plugin} with parameters [{}]", parameters.join(", "))
}

/// Checks that all sidecars have the same module under one name. `sidecar_of` maps a rank to its sidecar.
///
/// # Errors
/// A [`Failure`] of cause `Mismatch` for all ranks.
pub(crate) fn check_modules(
    requests: &RankRequests,
    sidecar_of: impl Fn(Rank) -> Option<SidecarIndex>,
) -> Result<(), Failure> {
    let mut modules: BTreeMap<(String, [u8; 32]), BTreeSet<SidecarIndex>> = BTreeMap::new();
    let mut names = BTreeSet::new();
    for (rank, request) in requests {
        let (Some(plugin), Some(sidecar)) = (&request.plugin, sidecar_of(*rank)) else { return Ok(()) };
        names.insert(&plugin.name);
        modules.entry((plugin.to_string(), plugin.digest)).or_default().insert(sidecar);
    }
    let (Some((rank, first)), true) = (requests.first_key_value(), modules.len() > 1 && names.len() == 1) else {
        return Ok(());
    };
    let list: Vec<String> = modules
        .iter()
        .take(VALUES_MAX)
        .map(|((module, _), sidecars)| {
            let sidecars: Vec<String> = sidecars.iter().take(VALUES_MAX).map(ToString::to_string).collect();
            format!("{}: {module}", sidecars.join(", "))
        })
        .collect();
    let text = format!(
        "Mismatched plugins: the sidecars have different modules by one name ({}); install the same file on all hosts.",
        list.join("; ")
    );
    let own = first.plugin.as_ref();
    let culprit =
        requests.iter().find(|(_, request)| request.plugin.as_ref().map(|p| p.digest) != own.map(|p| p.digest));
    Err(Difference { text, culprit: culprit.map_or(*rank, |(rank, _)| *rank) }.into_failure(first))
}

fn group(requests: &RankRequests) -> Option<Difference> {
    let first = &requests.values().next()?.group;
    if requests.values().all(|request| request.group == *first) {
        return None;
    }
    let group = |r: &Request| match &r.group {
        Some(group) => format!("{} of {} tensors", group.name, group.size),
        None => "none".to_owned(),
    };
    compare(requests, group, |a, b| format!("Mismatched groups: One rank had group {a}, but another rank had {b}."))
}

fn sets(requests: &RankRequests) -> Option<Difference> {
    let set = |r: &Request| match &r.collective {
        Collective::AddSet { ranks } => {
            let mut ranks = ranks.clone();
            ranks.sort_unstable();
            wording::ranks(&ranks)
        }
        Collective::RemoveSet { set } => set.to_string(),
        _ => String::new(),
    };
    compare(requests, set, |a, b| format!("Mismatched process sets: One rank asked for {a}, but another rank for {b}."))
}

/// Rejects collectives that need the joined ranks.
fn joined(requests: &RankRequests, excused: &[Rank]) -> Option<Difference> {
    let culprit = *excused.first()?;
    let collective = &requests.values().next()?.collective;
    if allows_joined(collective) {
        return None;
    }
    let who = wording::ranks(excused);
    if *collective == Collective::Join {
        let text = format!("Mismatched operations: {who} joined by another name; give all joins the same one.");
        return Some(Difference { text, culprit });
    }
    let operation = wording::capitalised(&collective.name().to_lowercase());
    let what = match collective {
        Collective::AllReduce { op } => format!("{operation} with reduction {op}"),
        _ => operation,
    };
    let text = format!("{what} is not supported with Join: {who} joined, so wait for the join first.");
    Some(Difference { text, culprit })
}

fn compare<K: Ord + Display>(
    requests: &RankRequests,
    of: impl Fn(&Request) -> K,
    words: impl Fn(&str, &str) -> String,
) -> Option<Difference> {
    compare_as(requests, |_, request| Some(of(request)), ToString::to_string, words)
}

/// Compares one property of the requests that have it. On a difference, `words` gets the lowest rank's and the first
/// other value, and a list of all values with their ranks follows.
fn compare_as<K: Ord>(
    requests: &RankRequests,
    of: impl Fn(Rank, &Request) -> Option<K>,
    text: impl Fn(&K) -> String,
    words: impl Fn(&str, &str) -> String,
) -> Option<Difference> {
    let mut all = requests.iter().filter_map(|(rank, request)| Some((*rank, of(*rank, request)?)));
    let (_, expected) = all.next()?;
    let (culprit, other) = all.find(|(_, value)| *value != expected)?;
    let mut holders: BTreeMap<K, Vec<Rank>> = BTreeMap::new();
    for (rank, request) in requests {
        if let Some(value) = of(*rank, request) {
            holders.entry(value).or_default().push(*rank);
        }
    }
    let mut groups: Vec<(K, Vec<Rank>)> = holders.into_iter().collect();
    groups.sort_by_key(|(_, ranks)| ranks.first().copied());
    let named =
        groups.iter().take(VALUES_MAX).map(|(value, ranks)| format!("{}: {}", wording::ranks(ranks), text(value)));
    let mut list = named.collect::<Vec<_>>().join("; ");
    if groups.len() > VALUES_MAX {
        list.push_str("; and others");
    }
    Some(Difference { text: format!("{} ({list}.)", words(&text(&expected), &text(&other))), culprit })
}

fn operation_name(requests: &RankRequests) -> &'static str {
    requests.values().next().map_or("", |request| request.collective.name())
}

fn dimension(shape: &Shape, index: usize) -> u64 {
    shape.dimensions().get(index).copied().unwrap_or_default()
}

/// The most different values in a list.
const VALUES_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use ronde_wire::{DType, ReduceOp, SetId, TensorName};

    use super::*;

    fn request(collective: Collective, dtype: DType, shape: &[u64]) -> Request {
        Request::new(
            SetId::WORLD,
            TensorName::new("t").expect("a name"),
            collective,
            dtype,
            Shape::new(shape.to_vec()).expect("a shape"),
        )
    }

    fn sum(shape: &[u64]) -> Request {
        request(Collective::AllReduce { op: ReduceOp::Sum }, DType::F32, shape)
    }

    fn gather(shape: &[u64]) -> Request {
        request(Collective::AllGather, DType::F32, shape)
    }

    fn verdict(requests: Vec<Request>) -> Option<(String, Option<Rank>)> {
        let requests = (0..).map(Rank).zip(requests).collect();
        check(&requests, &[]).err().map(|failure| (failure.reason, failure.rank))
    }

    fn assert_refused(requests: Vec<Request>, words: &str, culprit: u32) {
        let (text, rank) = verdict(requests).expect("a mismatch");
        assert!(text.contains(words), "{text:?} lacks {words:?}");
        assert!(text.contains("Tensor t of process set 0"), "{text:?}");
        assert_eq!(rank, Some(Rank(culprit)));
    }

    #[test]
    fn equal_requests_fit() {
        assert_eq!(verdict(vec![sum(&[2, 3]), sum(&[2, 3])]), None);
        assert_eq!(verdict(vec![gather(&[2, 3]), gather(&[0, 3]), gather(&[7, 3])]), None);
        let nan = || Request { prescale: f64::NAN, ..sum(&[2]) };
        assert_eq!(verdict(vec![nan(), nan()]), None);
        let barrier = |dtype| request(Collective::Barrier, dtype, &[]);
        assert_eq!(verdict(vec![barrier(DType::U8), barrier(DType::F32)]), None);
        assert_eq!(verdict(vec![]), None);
    }

    #[test]
    fn data_types() {
        let int = request(Collective::AllReduce { op: ReduceOp::Sum }, DType::I32, &[9]);
        let words = "Mismatched data types: One rank had type float32, but another rank had type int32.";
        assert_refused(vec![sum(&[2]), sum(&[2]), int.clone(), sum(&[3])], words, 2);
        assert_refused(vec![sum(&[2]), sum(&[2]), int], "(ranks 0-1: float32; rank 2: int32.)", 2);
    }

    #[test]
    fn operations() {
        let words = "Mismatched operations: One rank did an ALLREDUCE, but another rank did an ALLGATHER.";
        assert_refused(vec![sum(&[2]), gather(&[2])], words, 1);
    }

    #[test]
    fn shapes() {
        let words = "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2, 3], but another rank sent a tensor of shape [6].";
        assert_refused(vec![sum(&[2, 3]), sum(&[6])], words, 1);
        let broadcast = |shape: &[u64]| request(Collective::Broadcast { root: Rank(0) }, DType::F32, shape);
        assert_refused(vec![broadcast(&[2]), broadcast(&[3])], "Mismatched BROADCAST tensor shapes", 1);
    }

    #[test]
    fn factors_and_reductions() {
        let scaled = Request { postscale: 0.5, ..sum(&[2]) };
        let words =
            "Mismatched prescale and/or postscale factors: One rank sent 1 and 1, but another rank sent 1 and 0.5.";
        assert_refused(vec![sum(&[2]), scaled], words, 1);
        let max = request(Collective::AllReduce { op: ReduceOp::Max }, DType::F32, &[2]);
        assert_refused(vec![sum(&[2]), max], "Mismatched reduction operation: One rank asked for sum, but another", 1);
    }

    #[test]
    fn gathers() {
        assert_refused(
            vec![gather(&[]), gather(&[1])],
            "Process-set rank zero tried to ALLGATHER a rank-zero tensor",
            0,
        );
        assert_refused(vec![gather(&[1]), gather(&[])], "Rank 1 tried to ALLGATHER a rank-zero tensor", 1);
        let words = "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank 2, but another rank sent a tensor of rank 3.";
        assert_refused(vec![gather(&[1, 2]), gather(&[1, 2, 3])], words, 1);
        let words = "One rank sent a tensor with dimension 1 equal to 2, but another rank sent a tensor with dimension 1 equal to 3.";
        assert_refused(vec![gather(&[1, 2]), gather(&[5, 3])], words, 1);
    }

    #[test]
    fn roots() {
        let broadcast = |root| request(Collective::Broadcast { root: Rank(root) }, DType::F32, &[2]);
        let words =
            "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1.";
        assert_refused(vec![broadcast(0), broadcast(1)], words, 1);
    }

    #[test]
    fn many_different_values_stay_within_the_length_limit_of_a_reason() {
        let requests: Vec<Request> = (0..4_000).map(|n| sum(&[n])).collect();
        let (text, _) = verdict(requests).expect("a mismatch");
        assert!(text.len() < 1_000 && text.contains("and others"), "{text}");
    }
}
