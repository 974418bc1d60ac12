//! Accepts options in the form of Horovod's launcher (`-np 4`, `-hostfile FILE`), which clap does not support.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command};

/// Rewrites the single-dash long options before the worker command of `run` and `tune`; the worker's arguments stay as they
/// are.
pub(super) fn normalise(cli: &Command, arguments: Vec<OsString>) -> Vec<OsString> {
    let named = arguments.get(1).and_then(|subcommand| LAUNCHING.into_iter().find(|name| subcommand == name));
    let Some(run) = named.and_then(|name| cli.find_subcommand(name)) else { return arguments };
    let mut rest = arguments.into_iter();
    let mut rewritten: Vec<OsString> = rest.by_ref().take(2).collect();
    while let Some(argument) = rest.next() {
        if !is_option(&argument) {
            rewritten.push(argument);
            break;
        }
        let option = long_form(&argument);
        let values = following_values(run, &option);
        rewritten.push(option);
        rewritten.extend(rest.by_ref().take(values));
    }
    rewritten.extend(rest);
    rewritten
}

/// Returns the options before the first positional, by the id of their argument, with their values.
pub(super) fn given(command: &Command, arguments: &[OsString]) -> BTreeMap<String, Option<OsString>> {
    let mut found = BTreeMap::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next().filter(|argument| is_option(argument)) {
        let option = long_form(argument);
        let text = option.to_string_lossy();
        let (name, attached) = text.split_once('=').map_or((&*text, None), |(name, value)| (name, Some(value.into())));
        let values = if attached.is_some() { 0 } else { following_values(command, &option) };
        let following: Vec<&OsString> = rest.by_ref().take(values).collect();
        let value = attached.or_else(|| following.first().copied().cloned());
        let is_named = |arg: &&Arg| match name.strip_prefix("--") {
            Some(long) => is_long(arg, long),
            None => arg.get_short().is_some() && arg.get_short() == name.chars().nth(1),
        };
        if let Some(arg) = command.get_arguments().find(is_named) {
            found.insert(arg.get_id().to_string(), value);
        }
    }
    found
}

/// Leaves out the suggestion to put `--` before an unknown option if the subcommand runs what follows as a command: the option
/// would be taken for the name of a program. Other suggestions stay.
pub(super) fn without_wrong_suggestion(cli: &Command, arguments: &[OsString], mut error: clap::Error) -> clap::Error {
    let subcommand = arguments.get(1).and_then(|name| cli.find_subcommand(name));
    let runs_command = subcommand.is_some_and(|found| found.get_positionals().any(Arg::is_trailing_var_arg_set));
    if !runs_command {
        return error;
    }
    if let Some(ContextValue::StyledStrs(mut suggestions)) = error.remove(ContextKind::Suggested) {
        suggestions.retain(|suggestion: &StyledStr| !suggestion.to_string().starts_with("to pass "));
        if !suggestions.is_empty() {
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(suggestions));
        }
    }
    error
}

/// Adds what to do to errors that clap does not explain.
pub(super) fn with_tip(cli: &Command, arguments: &[OsString], mut error: clap::Error) -> clap::Error {
    if let Some(tip) = tip(cli, arguments, &error) {
        let mut tips = match error.remove(ContextKind::Suggested) {
            Some(ContextValue::StyledStrs(suggestions)) => suggestions,
            _ => Vec::new(),
        };
        tips.push(StyledStr::from(tip));
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
    error
}

/// How jobs are started, for a command line without a subcommand, such as `ronde -np 2 python train.py`, unless clap suggests a
/// similar one; and which argument is not valid UTF-8.
fn tip(cli: &Command, arguments: &[OsString], error: &clap::Error) -> Option<String> {
    let has_subcommand = arguments.get(1).is_some_and(|name| name == "help" || cli.find_subcommand(name).is_some());
    let is_similar = error.get(ContextKind::SuggestedSubcommand).is_some();
    match error.kind() {
        ErrorKind::InvalidSubcommand | ErrorKind::UnknownArgument if !has_subcommand && !is_similar => {
            Some("jobs are started by 'ronde run', as in 'ronde run -np 2 python train.py'".to_owned())
        }
        ErrorKind::InvalidUtf8 => {
            let argument = arguments.iter().find(|argument| argument.to_str().is_none())?;
            Some(format!("it is {argument:?}; hosts receive arguments as UTF-8, so give the file another name"))
        }
        _ => None,
    }
}

/// The subcommands that start workers.
const LAUNCHING: [&str; 2] = ["run", "tune"];

/// Stops at `--` as well as at the first positional.
fn is_option(argument: &OsStr) -> bool {
    argument.to_str().is_some_and(|text| text.len() > 1 && text.starts_with('-') && text != "--")
}

/// Turns `-np` into `--num-proc`, and `-np=4` and `-np4` into `--num-proc=4`; others stay.
fn long_form(argument: &OsStr) -> OsString {
    // clap refuses one that is not valid UTF-8.
    let Some(text) = argument.to_str() else { return argument.to_owned() };
    let attached = ["-np", "-n"].into_iter().find_map(|short| text.strip_prefix(short));
    if let Some(number) = attached.filter(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit())) {
        return format!("--num-proc={number}").into();
    }
    let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
    match SINGLE_DASH.iter().find(|(short, _)| *short == name) {
        Some((_, long)) => value.map_or_else(|| (*long).into(), |value| format!("{long}={value}").into()),
        None => argument.to_owned(),
    }
}

/// Returns how many arguments after `option` are its values. (`--name=value` and `-Hvalue` contain theirs.)
fn following_values(run: &Command, option: &OsStr) -> usize {
    let text = option.to_string_lossy();
    let is_named = |arg: &&Arg| match text.strip_prefix("--") {
        Some(long) => is_long(arg, long),
        None => arg.get_short().is_some_and(|short| text[1..].chars().eq([short])),
    };
    let takes_value = |arg: &&Arg| matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    let values = |arg: &Arg| arg.get_num_args().map_or(1, |range| range.max_values());
    run.get_arguments().find(is_named).filter(takes_value).map_or(0, values)
}

fn is_long(arg: &Arg, name: &str) -> bool {
    arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
}

/// Those of Horovod's launcher, and the names of mpirun and mpiexec for the same options. clap would take the `-h` of `-host`
/// for `--help`, and end without a job and with success.
const SINGLE_DASH: [(&str, &str); 7] = [
    ("-np", "--num-proc"),
    ("-n", "--num-proc"),
    ("-host", "--hosts"),
    ("-hosts", "--hosts"),
    ("-hostfile", "--hostfile"),
    ("-machinefile", "--hostfile"),
    ("-prefix-timestamp", "--prefix-output-with-timestamp"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn run_command() -> Command {
        let value = |name: &'static str| Arg::new(name).long(name).action(ArgAction::Set);
        Command::new("ronde").subcommand(
            Command::new("run")
                .arg(value("num-proc"))
                .arg(value("hostfile"))
                .arg(value("hosts").short('H'))
                .arg(value("network-interfaces").alias("network-interface"))
                .arg(value("range").num_args(2))
                .arg(Arg::new("verbose").long("verbose").action(ArgAction::SetTrue)),
        )
    }

    fn normalised(line: &str) -> String {
        let words = line.split(' ').map(OsString::from).collect();
        normalise(&run_command(), words).join(OsStr::new(" ")).to_string_lossy().into_owned()
    }

    #[test]
    fn single_dash_options_are_rewritten_in_front_of_the_command_only() {
        assert_eq!(normalised("ronde run -np 4 sh -np 5"), "ronde run --num-proc 4 sh -np 5");
        assert_eq!(normalised("ronde run -n 4 sh -n 5"), "ronde run --num-proc 4 sh -n 5");
        assert_eq!(normalised("ronde run -np=4 --verbose sh"), "ronde run --num-proc=4 --verbose sh");
        assert_eq!(normalised("ronde run -np4 --verbose sh -np5"), "ronde run --num-proc=4 --verbose sh -np5");
        assert_eq!(normalised("ronde run -n16 sh -n5"), "ronde run --num-proc=16 sh -n5");
        assert_eq!(normalised("ronde run -n4x -nx sh"), "ronde run -n4x -nx sh");
        assert_eq!(normalised("ronde run -H a:1 -hostfile f sh -np 5"), "ronde run -H a:1 --hostfile f sh -np 5");
        assert_eq!(normalised("ronde run -host a:1 -np 4 sh -host b"), "ronde run --hosts a:1 --num-proc 4 sh -host b");
        assert_eq!(normalised("ronde run -hosts=a,b -np 2 sh"), "ronde run --hosts=a,b --num-proc 2 sh");
        assert_eq!(normalised("ronde run -machinefile f -np 2 sh"), "ronde run --hostfile f --num-proc 2 sh");
        assert_eq!(
            normalised("ronde run --network-interface eth0 -np 4 sh"),
            "ronde run --network-interface eth0 --num-proc 4 sh"
        );
        assert_eq!(normalised("ronde run --range 1 2 -np 4 sh -np 5"), "ronde run --range 1 2 --num-proc 4 sh -np 5");
        assert_eq!(normalised("ronde run -Ha:1 -np 4 sh"), "ronde run -Ha:1 --num-proc 4 sh");
        assert_eq!(normalised("ronde run -- sh -np 5"), "ronde run -- sh -np 5");
        assert_eq!(normalised("ronde sidecar -np 4"), "ronde sidecar -np 4");
    }

    #[test]
    fn given_options_are_found_with_their_values() {
        let given = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let command = run_command();
            let run = command.find_subcommand("run").expect("it is there");
            let show = |(name, value): (String, Option<OsString>)| match value {
                Some(value) => format!("{name}={}", value.to_string_lossy()),
                None => name,
            };
            super::given(run, &words).into_iter().map(show).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(given("--num-proc 2 -H a:1 --verbose sh --hostfile x"), "hosts=a:1 num-proc=2 verbose");
        assert_eq!(given("--hostfile=f --verbose -- --num-proc 3"), "hostfile=f verbose");
        assert_eq!(given("-np2 --verbose sh"), "num-proc=2 verbose");
        assert_eq!(given("-Ha:1 --unknown"), "hosts");
    }

    #[test]
    fn a_value_that_resembles_an_option_is_not_rewritten() {
        assert_eq!(normalised("ronde run --hostfile -np sh"), "ronde run --hostfile -np sh");
    }
}
