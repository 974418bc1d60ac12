//! Resolves the value of an option: from the command line, else the environment, else the configuration file, else its
//! default.
//!
//! Values of the environment and the file become clap's defaults, after they were checked as clap would check them. So
//! all mistakes of both are reported at once, each with its place, and clap still parses the command line.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use clap::builder::Resettable;
use clap::{Arg, ArgAction, Command};
use strsim::levenshtein;

use super::arguments;

mod conflicts;
#[cfg(test)]
mod document;
mod file;

/// The subcommands whose options can be set elsewhere than on the command line.
pub(super) const CONFIGURED: [&str; 2] = ["run", "sidecar"];
/// The variable that names the configuration file.
pub(super) const CONFIG_VARIABLE: &str = "RONDE_CONFIG";

/// Sets the options of the subcommand that `arguments` name from the environment and the file, unless the arguments
/// contain them. Returns the command, and notices about options that have no effect.
///
/// # Errors
/// All mistakes in the file, and in the variables of this subcommand.
pub(super) fn layered(
    cli: Command,
    arguments: &[OsString],
    environment: &BTreeMap<String, OsString>,
) -> Result<(Command, Vec<String>), Mistakes> {
    let name = arguments.get(1).and_then(|name| name.to_str()).unwrap_or_default();
    let Some(command) = CONFIGURED.iter().find(|known| **known == name).and_then(|name| cli.find_subcommand(name))
    else {
        return Ok((described(cli), Vec::new()));
    };
    let given = arguments::given(command, &arguments[2..]);
    let lookup = |name: &str| environment.get(name).cloned();
    let mut mistakes = Mistakes::default();
    note_unknown_variables(command, environment, &mut mistakes);
    let path = given.get("config").cloned().flatten().map(PathBuf::from);
    let path = path.or_else(|| lookup(CONFIG_VARIABLE).map(PathBuf::from));
    let mut in_file = path.map(|path| file::read(&cli, &path, &mut mistakes)).unwrap_or_default();
    let mut from = Values::new();
    for arg in options(command) {
        let id = arg.get_id().to_string();
        let file = in_file.remove(&(name.to_owned(), id.clone()));
        let file = file.map(|value| Value { source: Source::File, place: value.place, words: value.words });
        if let Some(value) = of_environment(command, arg, &lookup, &mut mistakes).or(file) {
            from.insert(id, value);
        }
    }
    let given: BTreeSet<&str> = given.keys().map(String::as_str).collect();
    let notices = conflicts::resolve(command, &given, &mut from, &mut mistakes);
    if !mistakes.0.is_empty() {
        return Err(mistakes);
    }
    let cli = described(cli).mut_subcommand(name, |command| {
        command.mut_args(|arg| match from.remove(arg.get_id().as_str()) {
            Some(value) => arg.required(false).default_values(value.words),
            None => arg,
        })
    });
    Ok((cli, notices))
}

/// The mistakes, each with its place.
#[derive(Debug, Default)]
pub(super) struct Mistakes(Vec<String>);

impl Mistakes {
    fn note(&mut self, place: impl fmt::Display, what: impl fmt::Display) {
        self.0.push(format!("{place}: {what}"));
    }
}

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => f.write_str("a mistake in the configuration")?,
            count => write!(f, "{count} mistakes in the configuration")?,
        }
        self.0.iter().try_for_each(|mistake| write!(f, "\n  {mistake}"))
    }
}

/// The options that can be set elsewhere than on the command line.
pub(super) fn options(command: &Command) -> impl Iterator<Item = &Arg> {
    let is_set_here_only = |arg: &&Arg| ["config", "bootstrap", "help", "version"].contains(&arg.get_id().as_str());
    command
        .get_arguments()
        .filter(|arg| arg.get_long().is_some() && !arg.is_hide_set())
        .filter(move |arg| !is_set_here_only(arg))
}

/// Returns the variables of an option: its own, and Horovod's that it accepts.
pub(super) fn variables(command: &Command, arg: &Arg) -> (String, Option<String>) {
    let long = arg.get_long().unwrap_or_default();
    let own = format!("RONDE_{}_{long}", command.get_name()).replace('-', "_").to_ascii_uppercase();
    (own, arg.get_env().map(|name| name.to_string_lossy().into_owned()))
}

/// Notes variables of `ronde run` that no option has. Other programs read variables of `ronde sidecar`, and Kubernetes sets
/// some for a service of this name.
fn note_unknown_variables(command: &Command, environment: &BTreeMap<String, OsString>, mistakes: &mut Mistakes) {
    let prefix = "RONDE_RUN_";
    if command.get_name() != "run" {
        return;
    }
    let known: Vec<String> = options(command).map(|arg| variables(command, arg).0).collect();
    let given = environment.keys().filter(|name| name.starts_with(prefix) && !is_of_service(name, environment));
    for name in given.filter(|name| !known.contains(name)) {
        let named = name[prefix.len()..].replace('_', "-").to_ascii_lowercase();
        let near = match named.as_str() {
            "config" => Some(CONFIG_VARIABLE.to_owned()),
            _ => {
                nearest(command, &named).map(|long| format!("{prefix}{}", long.replace('-', "_").to_ascii_uppercase()))
            }
        };
        let hint = near.map(|near| format!("; is {near} meant?")).unwrap_or_default();
        mistakes.note(name, format!("no option of `ronde run` has this variable{hint}"));
    }
}

/// Whether a variable describes a service: Kubernetes sets `X_SERVICE_HOST`, `X_SERVICE_PORT`, `X_PORT` and `X_PORT_80_TCP` for
/// a service X, and Docker's links the last two. The value of `X_PORT` is an address such as `tcp://10.0.0.1:80`.
fn is_of_service(name: &str, environment: &BTreeMap<String, OsString>) -> bool {
    let is_service = |service: &str| {
        let is_address = |value: &OsString| value.to_string_lossy().contains("://");
        let of_kubernetes = format!("{service}_SERVICE_");
        environment.get(&format!("{service}_PORT")).is_some_and(is_address)
            || environment.keys().any(|name| name.starts_with(&of_kubernetes))
    };
    let mut ports = name.match_indices("_PORT").filter(|(at, port)| {
        let rest = &name[at + port.len()..];
        rest.is_empty() || rest.starts_with('_')
    });
    name.contains("_SERVICE_") || ports.any(|(at, _)| is_service(&name[..at]))
}

/// Returns the long option with one typing error less: another separator, or one letter added, removed or replaced; also that
/// of other launchers' names.
fn nearest(command: &Command, name: &str) -> Option<String> {
    let name = name.replace('_', "-").to_ascii_lowercase();
    let name = if ["np", "n", "nproc"].contains(&name.as_str()) { "num-proc" } else { &name };
    let (slips, found) =
        options(command).filter_map(Arg::get_long).map(|long| (levenshtein(long, name), long)).min()?;
    (slips <= SLIPS_MAX).then(|| found.to_owned())
}

/// The source of a value, the strongest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    CommandLine,
    Environment,
    Horovod,
    File,
}

/// The value of an option from elsewhere than the command line.
struct Value {
    source: Source,
    /// The variable, or the line of the file.
    place: String,
    words: Vec<String>,
}

/// By the id of the option.
type Values = BTreeMap<String, Value>;

fn of_environment(
    command: &Command,
    arg: &Arg,
    lookup: &impl Fn(&str) -> Option<OsString>,
    mistakes: &mut Mistakes,
) -> Option<Value> {
    let (own, horovod) = variables(command, arg);
    let horovod = horovod.map(|name| (Source::Horovod, name));
    let (source, name, value) = [(Source::Environment, own)]
        .into_iter()
        .chain(horovod)
        .find_map(|(source, name)| lookup(&name).map(|value| (source, name, value)))
        // Horovod's programs take an empty variable as one that is not set.
        .filter(|(source, _, value)| *source != Source::Horovod || !value.is_empty())?;
    let Ok(value) = value.into_string() else {
        mistakes.note(name, "its value is not valid UTF-8");
        return None;
    };
    let value = if source == Source::Horovod { horovods_switch(arg, value) } else { value };
    let values = match arg.get_value_delimiter() {
        Some(delimiter) => value.split(delimiter).map(str::to_owned).collect(),
        None => vec![value],
    };
    match check(arg, &values) {
        Ok(words) => Some(Value { source, place: name, words }),
        Err(what) => {
            mistakes.note(name, what);
            None
        }
    }
}

/// Horovod reads a switch as a number, of which each but 0 means on. Words are checked as those of other variables.
fn horovods_switch(arg: &Arg, value: String) -> String {
    match value.trim().parse::<i64>() {
        Ok(number) if matches!(arg.get_action(), ArgAction::SetTrue) => (number != 0).to_string(),
        _ => value,
    }
}

/// Checks values as clap will, and converts them to the form that it accepts.
fn check(arg: &Arg, values: &[String]) -> Result<Vec<String>, String> {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        let [value] = values else { return Err("it is true or false".to_owned()) };
        return match value.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Ok(vec!["true".to_owned()]),
            "false" | "0" | "no" | "off" => Ok(vec!["false".to_owned()]),
            _ => Err(format!("{value:?} is not true or false")),
        };
    }
    // Checked in a separate command, so that no other option is missing or in conflict.
    let long = arg.get_long().unwrap_or_default().to_owned();
    let name = arg.get_value_names().and_then(|names| names.first()).map_or("VALUE", |name| name.as_str()).to_owned();
    let parser = arg.get_value_parser().clone();
    let alone = Arg::new("value").long(&long).value_name(name).action(ArgAction::Append).value_parser(parser);
    let alone = alone.ignore_case(arg.is_ignore_case_set());
    let words = values.iter().map(|value| format!("--{long}={value}"));
    let parsed = Command::new("check").no_binary_name(true).arg(alone).try_get_matches_from(words);
    match parsed {
        Ok(_) => Ok(values.to_vec()),
        Err(error) => {
            let text = error.to_string();
            let mut lines = text.lines();
            let first = lines.next().unwrap_or_default();
            // One of some words: the next line has them.
            let words = lines.next().map(str::trim).filter(|line| line.starts_with("[possible values: "));
            let words = words.map(|words| format!(" {words}")).unwrap_or_default();
            Err(format!("{}{words}", first.strip_prefix("error: ").unwrap_or(first)))
        }
    }
}

/// Lists the variables in the help of every option that has some.
fn described(cli: Command) -> Command {
    CONFIGURED.iter().fold(cli, |cli, name| {
        cli.mut_subcommand(name, |command| {
            let texts: BTreeMap<String, String> = options(&command)
                .map(|arg| {
                    let (own, horovod) = variables(&command, arg);
                    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
                    let horovod = horovod.map(|name| format!(" or {name}")).unwrap_or_default();
                    (arg.get_id().to_string(), format!("{help} [env: {own}{horovod}]"))
                })
                .collect();
            command.mut_args(|arg| match texts.get(arg.get_id().as_str()) {
                // Read here, not by clap, which supports one variable and reports mistakes one by one.
                Some(help) => arg.help(help.clone()).env(Resettable::Reset),
                None => arg,
            })
        })
    })
}

const SLIPS_MAX: usize = 2;

#[cfg(test)]
mod tests;
