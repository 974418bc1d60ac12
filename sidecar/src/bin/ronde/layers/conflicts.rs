//! Options that exclude each other, across the command line, variables and the file. clap itself checks the command line
//! alone: values of the other sources are defaults to it, which conflict with nothing.

use std::collections::BTreeSet;

use clap::{Arg, ArgAction, Command};

use super::{Mistakes, Source, Value, Values, options};

/// Removes the option with the weaker source of each two that exclude each other, and notes those with one source as
/// mistakes. Returns a notice for each option that is removed, unless another value of the same setting replaces it.
pub(super) fn resolve(
    command: &Command,
    given: &BTreeSet<&str>,
    from: &mut Values,
    mistakes: &mut Mistakes,
) -> Vec<String> {
    let mut set: Vec<Set<'_>> = options(command).filter_map(|arg| Set::find(arg, given, from)).collect();
    set.sort_by_key(Set::source);
    let (mut kept, mut removed, mut notices) = (Vec::new(), Vec::new(), Vec::new());
    for option in set {
        let Some((stronger, relation)) = kept.iter().find_map(|kept| Some((kept, relation(command, kept, &option)?)))
        else {
            kept.push(option);
            continue;
        };
        if stronger.source() < option.source() {
            removed.push(option.id().to_owned());
            if relation == Relation::Conflict {
                let (weaker, stronger) = (option.name(), stronger.name());
                notices.push(format!("{weaker} has no effect: it cannot be used with {stronger}"));
            }
        } else if let Some(value) = option.value {
            let subject = if value.source == Source::File { option.long } else { "it" };
            mistakes
                .note(&value.place, format!("{subject} cannot be used with {}; set only one of both", stronger.name()));
        }
        // clap reports those on the command line.
    }
    removed.iter().for_each(|id: &String| drop(from.remove(id)));
    notices
}

/// How two options exclude each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Relation {
    /// They are values of one setting.
    Alternative,
    Conflict,
}

/// Programs start sidecars with options of their own, also where variables have settings for other sidecars, so a sidecar's
/// options conflict on its command line only.
fn relation(command: &Command, one: &Set<'_>, other: &Set<'_>) -> Option<Relation> {
    let ids = (one.id(), other.id());
    if ALTERNATIVES.iter().any(|pair| *pair == ids || *pair == (ids.1, ids.0)) {
        return Some(Relation::Alternative);
    }
    let names = |arg, id| command.get_arg_conflicts_with(arg).iter().any(|found| found.get_id().as_str() == id);
    let are_on = command.get_name() == "run" && one.is_on() && other.is_on();
    (are_on && (names(one.arg, ids.1) || names(other.arg, ids.0))).then_some(Relation::Conflict)
}

/// An option that is set, and where.
struct Set<'a> {
    arg: &'a Arg,
    long: &'a str,
    /// `None` on the command line.
    value: Option<&'a Value>,
}

impl<'a> Set<'a> {
    fn find(arg: &'a Arg, given: &BTreeSet<&str>, from: &'a Values) -> Option<Self> {
        let (id, long) = (arg.get_id().as_str(), arg.get_long().unwrap_or_default());
        let value = if given.contains(id) { None } else { Some(from.get(id)?) };
        Some(Self { arg, long, value })
    }

    fn id(&self) -> &'a str {
        self.arg.get_id().as_str()
    }

    fn source(&self) -> Source {
        self.value.map_or(Source::CommandLine, |value| value.source)
    }

    /// A switch that is off conflicts with nothing.
    fn is_on(&self) -> bool {
        let is_switch = matches!(self.arg.get_action(), ArgAction::SetTrue);
        !is_switch || self.value.is_none_or(|value| value.words == ["true"])
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

/// Options that are values of one setting, of which the one with the stronger source counts.
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
