//! Options that exclude each other, across the command line, variables and the file. clap itself checks the command line
//! alone: values of the other sources are defaults to it, which conflict with nothing.

use std::collections::BTreeSet;

use clap::{Arg, ArgAction, Command};

use super::{Mistakes, Source, Value, Values, options};

/// Keeps the stronger one of two options that are alternatives, and notes all other conflicts.
pub(super) fn resolve(command: &Command, given: &BTreeSet<&str>, from: &mut Values, mistakes: &mut Mistakes) {
    for (one, other) in ALTERNATIVES {
        keep_stronger(command, (one, other), given, from, mistakes);
    }
    // A launcher sends its sidecar all settings, whatever is set for sidecars without one.
    if given.contains("bootstrap") {
        return;
    }
    let (modes, others): (Vec<_>, Vec<_>) = pairs(command).into_iter().partition(is_of_mode);
    for (one, other) in modes {
        keep_stronger(command, (one.get_id().as_str(), other.get_id().as_str()), given, from, mistakes);
    }
    for (one, other) in others.into_iter().filter(|pair| !is_alternative(pair)) {
        let set = |arg| Set::find(arg, given, from);
        if let (Some(one), Some(other)) = (set(one), set(other)) {
            note(&one, &other, mistakes);
        }
    }
}

/// The pairs of options that clap does not accept together.
fn pairs(command: &Command) -> Vec<(&Arg, &Arg)> {
    let known: Vec<&Arg> = options(command).collect();
    let conflicts = |arg: &Arg| -> Vec<&Arg> {
        let ids: Vec<&str> =
            command.get_arg_conflicts_with(arg).into_iter().map(|other| other.get_id().as_str()).collect();
        known.iter().copied().filter(|other| ids.contains(&other.get_id().as_str())).collect()
    };
    known.iter().copied().flat_map(|arg| conflicts(arg).into_iter().map(move |other| (arg, other))).collect()
}

fn is_alternative((one, other): &(&Arg, &Arg)) -> bool {
    let (one, other) = (one.get_id().as_str(), other.get_id().as_str());
    ALTERNATIVES.contains(&(one, other)) || ALTERNATIVES.contains(&(other, one))
}

/// Whether one of the pair selects a sidecar without peers, and the other one is for a sidecar with peers. Programs start the
/// former by themselves, also where the environment or the file has settings of the latter.
fn is_of_mode((one, other): &(&Arg, &Arg)) -> bool {
    [one, other].iter().any(|arg| arg.get_id().as_str() == "local_ranks")
}

/// An option that is set, and where.
struct Set<'a> {
    long: &'a str,
    /// `None` on the command line.
    value: Option<&'a Value>,
}

impl<'a> Set<'a> {
    /// A switch that is off is not set.
    fn find(arg: &'a Arg, given: &BTreeSet<&str>, from: &'a Values) -> Option<Self> {
        let (id, long) = (arg.get_id().as_str(), arg.get_long().unwrap_or_default());
        if given.contains(id) {
            return Some(Self { long, value: None });
        }
        let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
        let value = from.get(id).filter(|value| !is_switch || value.words == ["true"])?;
        Some(Self { long, value: Some(value) })
    }

    fn source(&self) -> Source {
        self.value.map_or(Source::CommandLine, |value| value.source)
    }

    /// What the user has written: the option, the variable, or the key with its line.
    fn name(&self) -> String {
        match self.value {
            None => format!("--{}", self.long),
            Some(Value { source: Source::File, place, .. }) => format!("{} ({place})", self.long),
            Some(Value { place, .. }) => place.clone(),
        }
    }
}

/// Notes that two options exclude each other, at the one whose source is weaker.
fn note(one: &Set<'_>, other: &Set<'_>, mistakes: &mut Mistakes) {
    let (weaker, other) = if one.source() > other.source() { (one, other) } else { (other, one) };
    // clap reports a conflict within the command line.
    let Some(value) = weaker.value else { return };
    let subject = if value.source == Source::File { weaker.long } else { "it" };
    mistakes.note(&value.place, format!("{subject} cannot be used with {}; set only one of both", other.name()));
}

/// Keeps the stronger source of two options. With one source for both, none is stronger.
fn keep_stronger(
    command: &Command,
    (one, other): (&str, &str),
    given: &BTreeSet<&str>,
    from: &mut Values,
    mistakes: &mut Mistakes,
) {
    let source = |id: &str| match given.contains(id) {
        true => Some(Source::CommandLine),
        false => from.get(id).map(|value| value.source),
    };
    match (source(one), source(other)) {
        (Some(first), Some(second)) if first < second => drop(from.remove(other)),
        (Some(first), Some(second)) if first > second => drop(from.remove(one)),
        (Some(first), Some(_)) if first > Source::CommandLine => {
            let long = |id: &str| {
                let arg = options(command).find(|arg| arg.get_id().as_str() == id);
                arg.and_then(Arg::get_long).unwrap_or_default()
            };
            let [one, other] = [one, other].map(|id| Set { long: long(id), value: from.get(id) });
            note(&one, &other, mistakes);
        }
        _ => {}
    }
}

/// Options of which the one with the stronger source counts.
const ALTERNATIVES: [(&str, &str); 10] = [
    ("autotune", "no_autotune"),
    ("hosts", "hostfile"),
    ("hosts", "host_discovery_script"),
    ("hostfile", "host_discovery_script"),
    ("num_proc", "nproc_per_node"),
    ("timeline_mark_cycles", "no_timeline_mark_cycles"),
    ("hierarchical_allreduce", "no_hierarchical_allreduce"),
    ("hierarchical_allgather", "no_hierarchical_allgather"),
    ("stall_check", "no_stall_check"),
    ("log_with_timestamp", "log_without_timestamp"),
];
